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


@dataclass(frozen=True)
class Window:
    """How a kernel moves over an image; each a pair (vertical, horizontal)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def overlap(self) -> int:
        """The most places that see one pixel."""
        (height, width), (down, right) = self.kernel, self.stride
        return -(-height // down) * -(-width // right) if self.dilation == (1, 1) else height * width


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
        for inputs, errors, into in slices(self._numbers, self.inputs, self.errors, written):
            self._write(inputs, errors, into)
        return written

    def square_norms(self) -> Tensor:
        if not prefers_gram(self.length, self._patch, self.errors.shape[1] // self.window.groups):
            return square_norms(self._written)
        parts = slices(self._numbers, self.inputs, self.errors)
        squares = torch.cat([_square_norms(inputs, errors, self.window) for inputs, errors in parts])
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
            total = sum_of_written(self._write, self.inputs, self.errors, weights, numbers=self._numbers)
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

    def _write(self, inputs: Tensor, errors: Tensor, into: Tensor | None = None) -> Tensor:
        """The gradients of a few records, by products of patches and errors, in the order of the patches."""
        batch, _, *places = errors.shape
        seen = patches(wide(inputs), self.window, (places[0], places[1]))
        back = wide(errors).reshape(batch * self.window.groups, -1, seen.shape[1])
        out = None if into is None else into.view(len(back), -1, seen.shape[2])
        return torch.bmm(back, seen, out=out).view(batch, -1)


def patches(inputs: Tensor, window: Window, places: tuple[int, int]) -> Tensor:
    """What each place of the output saw, [batch, channels, h, w] -> [batch * groups, places, kernel x channels]."""
    (vertical, horizontal), (down, right) = window.padding, window.stride
    batch, channels, height, width = inputs.shape
    padded = inputs.new_zeros(batch, height + 2 * vertical, width + 2 * horizontal, channels)
    padded[:, vertical : vertical + height, horizontal : horizontal + width] = inputs.movedim(1, 3)
    record, row, column, channel = padded.stride()
    seen = padded.as_strided(
        (batch, *places, *window.kernel, channels),
        (record, down * row, right * column, window.dilation[0] * row, window.dilation[1] * column, channel),
    )
    grouped = torch.unflatten(seen, 5, (window.groups, -1)).movedim(5, 1)
    return grouped.reshape(batch * window.groups, places[0] * places[1], -1)


def _square_norms(inputs: Tensor, errors: Tensor, window: Window) -> Tensor:
    """Of a few records, by products of patches and errors."""
    batch, length = len(errors), errors.shape[2] * errors.shape[3]
    seen = patches(wide(inputs), window, (errors.shape[2], errors.shape[3]))
    back = wide(errors).reshape(batch * window.groups, -1, length).transpose(1, 2)
    return product_norms(seen, back).view(batch, window.groups).sum(dim=1)
