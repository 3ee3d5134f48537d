"""Per-example gradients of a convolution's weight."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import (
    absolute_norms,
    raised,
    square_distances,
    square_norms,
    wide,
)
from algorithms.gradients.products import (
    prefers_gram,
    product_norms,
    product_sizes,
    slices,
    sum_of_rows,
    sum_of_written,
)
from algorithms.gradients.windows import Cutter, Window


@dataclass(frozen=True)
class Patches:
    """Gradients of the weight of a two-dimensional convolution, shape [outputs, channels / groups, *kernel].

    inputs: [batch, channels, height, width]. errors: [batch, outputs, rows, columns], its output's gradient. Every
    place of the output adds an outer product of its error and the patch of the input that it saw.
    """

    inputs: Tensor
    errors: Tensor
    window: Window

    @property
    def length(self) -> int:
        """How many outer products are summed."""
        return self.errors.shape[2] * self.errors.shape[3]

    @property
    def rows(self) -> Tensor:
        return self._in_weight_order(self._written).flatten(start_dim=1)

    @cached_property
    def _written(self) -> Tensor:
        """The gradients in the order of the patches, [batch, outputs, kernel x channels / groups]."""
        written = wide(self.errors).new_empty(len(self.errors), self.errors.shape[1], self._patch)
        write = self._writer()
        for inputs, errors, into in slices(self._numbers, self.inputs, self.errors, written):
            write(inputs, errors, into)
        return written

    def square_norms(self) -> Tensor:
        if not prefers_gram(self.length, self._patch, self.errors.shape[1] // self.window.groups):
            return square_norms(self._written)
        # |sum_t e_t p_t^T|^2 = sum_st (e_s e_t)(p_s p_t): two Gram matrices [places, places] instead of the gradient.
        parts = slices(self._numbers, self.inputs, self.errors)
        cut = self._cutter()
        squares = torch.cat(
            [_square_norms(cut(wide(some)), their, self.window.groups) for some, their in parts]
        )
        # A value of the input is in `overlap` patches, so their squares add up to at most that many times its own.
        sizes = self.window.overlap**0.5 * product_sizes(self.inputs, self.errors)
        return raised(squares, sizes, self.length, wide(self.errors).dtype)

    def absolute_norms(self) -> Tensor:
        return absolute_norms(self._written)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        moved, scaled = (self._in_patch_order(part) for part in (shift, scale))
        return square_distances(self._written.flatten(start_dim=1), moved, scaled)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if "_written" in self.__dict__:
            total = sum_of_rows(self._written.flatten(start_dim=1), weights)
        else:
            total = sum_of_written(self._writer(), self.inputs, self.errors, weights, numbers=self._numbers)
        return self._in_weight_order(total.view(self.errors.shape[1], -1)).reshape(-1)

    def take(self, chosen: Tensor | slice) -> "Patches":
        return self._with(lambda part: part[chosen])

    def double(self) -> "Patches":
        return self._with(lambda part: part.double())

    def _with(self, change: Callable[[Tensor], Tensor]) -> "Patches":
        """The same with another form of its tensors; what is written down stays as it was measured."""
        changed = Patches(change(self.inputs), change(self.errors), self.window)
        if "_written" in self.__dict__:
            changed.__dict__["_written"] = change(self._written)
        return changed

    def _in_weight_order(self, written: Tensor) -> Tensor:
        """[..., kernel x channels] -> [..., channels x kernel]."""
        height, width = self.window.kernel
        apart = torch.unflatten(written, -1, (height * width, -1))
        return apart.transpose(-1, -2).flatten(start_dim=-2)

    def _in_patch_order(self, weight: Tensor) -> Tensor:
        """A vector of the weight's length in the order of the patches."""
        height, width = self.window.kernel
        return weight.view(self.errors.shape[1], -1, height * width).transpose(1, 2).reshape(-1)

    @property
    def _patch(self) -> int:
        """Values that a place of the output saw, of one group."""
        return self.inputs.shape[1] // self.window.groups * self.window.kernel[0] * self.window.kernel[1]

    @property
    def _numbers(self) -> int:
        """What the products of one record need: its patches, or its gradient."""
        return self._patch * max(self.length * self.window.groups, self.errors.shape[1])

    def _cutter(self) -> Cutter:
        return Cutter(self.window, (self.errors.shape[2], self.errors.shape[3]))

    def _writer(self) -> Callable[..., Tensor]:
        """What writes down the gradients of a few records, by products of patches and errors, in their order."""
        cut = self._cutter()

        def write(inputs: Tensor, errors: Tensor, into: Tensor | None = None) -> Tensor:
            # [records x groups, places, patch] and [records x groups, outputs / groups, places]: each group of a record
            # is a product of its own.
            seen = cut(wide(inputs))
            back = wide(errors).reshape(len(seen), -1, seen.shape[1])
            out = None if into is None else into.view(len(seen), -1, seen.shape[2])
            return torch.bmm(back, seen, out=out).view(len(errors), -1)

        return write


def _square_norms(seen: Tensor, errors: Tensor, groups: int) -> Tensor:
    """Of a few records, by products of patches and errors."""
    batch, length = len(errors), errors.shape[2] * errors.shape[3]
    back = wide(errors).reshape(batch * groups, -1, length).transpose(1, 2)
    return product_norms(seen, back).view(batch, groups).sum(dim=1)
