"""Which part of a tensor belongs to which record."""

from typing import NamedTuple

import torch
from torch import Tensor


class Unrecorded(Exception):
    """A use of a parameter whose gradient cannot be told apart by record; the message says which."""


class Layout(NamedTuple):
    """Where the records are: the dimension, and how many of its values in a row belong to one record."""

    dimension: int
    folded: int = 1

    def by_record(self, values: Tensor, batch: int) -> Tensor:
        """The values with the records first: [batch, folded (where above 1), the other dimensions]."""
        values = values.detach()
        if values.shape[self.dimension] != batch * self.folded:
            raise Unrecorded("a tensor that does not have its part of each record")
        if self.folded == 1:
            return values.movedim(self.dimension, 0)
        return torch.unflatten(values, self.dimension, (batch, self.folded)).movedim(self.dimension, 0)

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
