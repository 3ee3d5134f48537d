"""Numbers of records at which no record's results depend on how many there are, or on its place among them.

A matrix product computes the rows that its kernel leaves over in another order, which changes their last bits. Where a
function has a kink, a last bit can decide a whole gradient; so one record more could turn the gradients of many others.

Which part of a tensor belongs to which record.
"""

from typing import NamedTuple

import torch
from torch import Tensor, cat

WHOLE = 64
"""Records that fill the kernels of all products; multiples give the same bits, with `Engine.threads` on a CPU."""

FEWEST = 32
"""Fewer records than this do not fill them all: passes are then all of one size, and taken as they are."""


def round_batch(count: int) -> int:
    """The most records, at most `count`, that are taken at once: a multiple of 64, or 32, or any number below."""
    return count // WHOLE * WHOLE if count >= WHOLE else min(count, FEWEST)


def pass_size(count: int, most: int) -> int:
    """How many of `count` records to take at once, so that passes of at most `most` are about equally large.

    most: what `even` gave. A short last pass would cost as many calls as a full one.
    """
    passes = max(1, -(-count // most))
    return min(most, -(-count // (passes * WHOLE)) * WHOLE or most)


def pad_to_multiple(values: Tensor, step: int = WHOLE) -> Tensor:
    """Values of some records, [batch, ...], at least one, with the last repeated up to a multiple of `step`."""
    missing = -len(values) % step
    return cat([values, values[-1:].expand(missing, *values.shape[1:])]) if missing else values


class UnrecordedError(Exception):
    """A use of a parameter whose gradient cannot be told apart by record; the message says which."""


class Layout(NamedTuple):
    """Where the records are: the dimension, and how many of its values in a row belong to one record."""

    dimension: int
    folded: int = 1

    def by_record(self, values: Tensor, batch: int) -> Tensor:
        """The values with the records first: [batch, folded (where above 1), the other dimensions]."""
        values = values.detach()
        if values.shape[self.dimension] != batch * self.folded:
            raise UnrecordedError("a tensor that does not have its part of each record")
        if self.folded == 1:
            return values.movedim(self.dimension, 0)
        return torch.unflatten(values, self.dimension, (batch, self.folded)).movedim(self.dimension, 0)

    def with_channels(self, values: Tensor, batch: int) -> Tensor:
        """The same where channels follow the records: [batch, channels, folded (where above 1), all others]."""
        apart = self.by_record(values, batch)
        return apart if self.folded == 1 else apart.movedim(1, 2)

    def alone(self, value: Tensor) -> Tensor:
        """One record's part of `by_record` as the tensor would be if that record were alone."""
        return value.unsqueeze(self.dimension) if self.folded == 1 else value


def layout_of(shape: tuple[int, ...], other: tuple[int, ...], batch: int, other_batch: int) -> Layout | None:
    """The layout of a tensor from its shapes at two batch sizes; None where not exactly one dimension follows them."""
    if len(shape) != len(other):
        return None
    moved = [i for i, (size, changed) in enumerate(zip(shape, other, strict=True)) if size != changed]
    if len(moved) != 1:
        return None
    size, changed = shape[moved[0]], other[moved[0]]
    folded, rest = divmod(size, batch)
    return Layout(moved[0], folded) if rest == 0 and folded * other_batch == changed else None
