"""Per-example gradients of a convolution's weight."""

from collections.abc import Iterator
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
    slice_of,
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

    @cached_property
    def rows(self) -> Tensor:
        return torch.cat([self._write(*part) for part in self._parts()])

    def square_norms(self) -> Tensor:
        if not prefers_gram(self.length, self._patch, self.errors.shape[1] // self.window.groups):
            return square_norms(self.rows)
        squares = torch.cat([_square_norms(*part, self.window) for part in self._parts()])
        sizes = self.window.overlap**0.5 * product_sizes(self.inputs, self.errors)
        return raised(squares, sizes, self.length, wide(self.errors).dtype)

    def absolute_norms(self) -> Tensor:
        return absolute_norms(self.rows)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        return square_distances(self.rows, shift, scale)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return sum_of_written(self._write, self.inputs, self.errors, weights, numbers=self._numbers)

    def take(self, chosen: Tensor | slice) -> "Patches":
        return Patches(self.inputs[chosen], self.errors[chosen], self.window)

    def double(self) -> "Patches":
        return Patches(self.inputs.double(), self.errors.double(), self.window)

    @property
    def _patch(self) -> int:
        """Values that a place of the output saw, of one group."""
        return self.inputs.shape[1] // self.window.groups * self.window.kernel[0] * self.window.kernel[1]

    @property
    def _numbers(self) -> int:
        """What the products of one record need: its patches, or its gradient."""
        return self._patch * max(self.length * self.window.groups, self.errors.shape[1])

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and errors of a few records at a time."""
        size = slice_of(self._numbers, self.inputs.device)
        return zip(torch.split(self.inputs, size), torch.split(self.errors, size), strict=True)

    def _write(self, inputs: Tensor, errors: Tensor) -> Tensor:
        """The gradients of a few records, by products of patches and errors; [batch, numel]."""
        batch, outputs, *places = errors.shape
        seen = patches(wide(inputs), self.window, (places[0], places[1]))
        gradients = torch.bmm(wide(errors).reshape(batch * self.window.groups, -1, seen.shape[1]), seen)
        height, width = self.window.kernel
        return gradients.view(batch, outputs, height * width, -1).transpose(2, 3).reshape(batch, -1)


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
