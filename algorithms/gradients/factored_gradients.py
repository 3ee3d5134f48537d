"""Gradients of a value computed from parameters, as products of what each record has and what all records share."""

from dataclasses import dataclass, replace
from functools import cached_property
from string import ascii_lowercase

import torch
from torch import Tensor

from algorithms.gradients.parameter_gradients import FromRows

_RECORD = "Z"


@dataclass(frozen=True)
class FactoredGrad(FromRows):
    """Gradients of a tensor that are products of a record's values and of a factor that all records share.

    Attributes:
        values: [batch, ...], as many dimensions as the tensor has, of which some may be 1.
        factor: The same without the batch.
        shape: Of the tensor.
    """

    values: Tensor
    factor: Tensor
    shape: torch.Size
    is_materialized = True

    @cached_property
    def rows(self) -> Tensor:
        return (self.values * self.factor).expand(-1, *self.shape).flatten(start_dim=1)

    def times(self, factor: Tensor) -> "FactoredGrad":
        """Each record's gradient times a factor that broadcasts to the tensor's shape."""
        return replace(self, factor=self.factor * factor)

    def summed_to(self, shape: torch.Size) -> Tensor:
        """The gradients of a tensor that was broadcast from this shape, [batch, numel]."""
        full = (1,) * (len(self.shape) - len(shape)) + tuple(shape)
        values, of_values = _without_ones(self.values, ascii_lowercase, first=1)
        factor, of_factor = _without_ones(self.factor, ascii_lowercase, first=0)
        kept = [
            letter
            for letter, size in zip(ascii_lowercase, full, strict=False)
            if size > 1 and letter in of_values + of_factor
        ]
        summed = torch.einsum(f"{_RECORD}{of_values},{of_factor}->{_RECORD}{''.join(kept)}", values, factor)
        sizes = [size if letter in kept else 1 for letter, size in zip(ascii_lowercase, full, strict=False)]
        return summed.reshape(-1, *sizes).expand(-1, *full).flatten(start_dim=1)

    def take(self, chosen: Tensor | slice) -> "FactoredGrad":
        return replace(self, values=self.values[chosen])

    def double(self) -> "FactoredGrad":
        return replace(self, values=self.values.to(torch.promote_types(self.values.dtype, torch.float64)))


def _without_ones(side: Tensor, letters: str, *, first: int) -> tuple[Tensor, str]:
    """A side without its dimensions of one from the first on, and the letters of those that are left."""
    sizes = side.shape[first:]
    present = [letter for letter, size in zip(letters, sizes, strict=False) if size > 1]
    return side.reshape(*side.shape[:first], *(size for size in sizes if size > 1)), "".join(present)
