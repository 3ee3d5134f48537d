"""Batch sizes for which a record's results do not depend on the batch size or on its position, and tensor layouts.

A matrix product computes rows that do not fill its kernel in another order, which changes their last bits. If a
function has a kink, one bit can decide a whole gradient, so adding a record could change the gradients of many.
"""

from typing import NamedTuple

import torch
from torch import Tensor, cat

WHOLE = 64
"""A batch size that fills all products' kernels; its multiples give the same bits with up to `Engine.threads`."""

FEWEST = 32
"""The smallest batch size that fills all kernels; below it, all passes have the same size."""


def round_batch(count: int) -> int:
    """The largest allowed batch size up to `count`: a multiple of 64, or 32, or any smaller number."""
    return count // WHOLE * WHOLE if count >= WHOLE else min(count, FEWEST)


def pass_size(count: int, most: int) -> int:
    """The size of passes over `count` records: at most `most`, and about equal, as a short last pass is not cheaper.

    most: a result of `round_batch`.
    """
    passes = max(1, -(-count // most))
    return min(most, -(-count // (passes * WHOLE)) * WHOLE or most)


def pad_to_multiple(values: Tensor, step: int = WHOLE) -> Tensor:
    """Pad a batch, [batch, ...] with at least one record, to a multiple of `step` by repeating the last record."""
    missing = -len(values) % step
    return cat([values, values[-1:].expand(missing, *values.shape[1:])]) if missing else values


class UnrecordedError(Exception):
    """A use of a parameter whose gradients cannot be separated by record; the message says which."""


class Layout(NamedTuple):
    """The batch dimension of a tensor, and how many of its indices belong to one record.

    These are consecutive; or, if alternates, they are as many as there are records apart, as after `torch.cat`.
    """

    dimension: int
    folded: int = 1
    alternates: bool = False

    def by_record(self, values: Tensor, batch: int) -> Tensor:
        """The values with the batch first: [batch, folded (if above 1), the other dimensions]."""
        values = values.detach()
        if values.shape[self.dimension] != batch * self.folded:
            raise UnrecordedError("a tensor that does not have its part of each record")
        if self.folded == 1:
            return values.movedim(self.dimension, 0)
        sizes = (self.folded, batch) if self.alternates else (batch, self.folded)
        here = self.dimension
        apart = torch.unflatten(values, here, sizes)
        return apart.movedim((here + self.alternates, here + 1 - self.alternates), (0, 1))

    def with_channels(self, values: Tensor, batch: int) -> Tensor:
        """The same, with channels after the batch: [batch, channels, folded (if above 1), all others]."""
        apart = self.by_record(values, batch)
        return apart if self.folded == 1 else apart.movedim(1, 2)

    def alone(self, value: Tensor) -> Tensor:
        """One record's part of `by_record`, in the shape that the tensor would have for this record alone."""
        return value.unsqueeze(self.dimension) if self.folded == 1 else value.movedim(0, self.dimension)


def layout_of(shape: tuple[int, ...], other: tuple[int, ...], batch: int, other_batch: int) -> Layout | None:
    """The layout of a tensor from its shapes for two batch sizes; None unless exactly one dimension grows with them."""
    if len(shape) != len(other):
        return None
    moved = [i for i, (size, changed) in enumerate(zip(shape, other, strict=True)) if size != changed]
    if len(moved) != 1:
        return None
    size, changed = shape[moved[0]], other[moved[0]]
    folded, rest = divmod(size, batch)
    return Layout(moved[0], folded) if rest == 0 and folded * other_batch == changed else None
