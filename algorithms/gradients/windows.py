"""What the places of a convolution's output see of its input."""

from dataclasses import dataclass

import torch
from torch import Tensor


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


class Cutter:
    """Cuts images into what each place of the output saw, a few records at a time, in memory that it uses again."""

    def __init__(self, window: Window, places: tuple[int, int]) -> None:
        self._window, self._places = window, places
        self._padded = self._seen = torch.empty(0)

    def __call__(self, inputs: Tensor) -> Tensor:
        """[batch, channels, h, w] -> [batch * groups, places, kernel x channels / groups], until the next call."""
        (vertical, horizontal), groups = self._window.padding, self._window.groups
        batch, channels, height, width = inputs.shape
        if len(self._padded) < max(1, batch):
            self._make_room(inputs)
        padded = self._padded[:batch]
        padded[:, vertical : vertical + height, horizontal : horizontal + width] = inputs.movedim(1, 3)
        seen = self._seen[: batch * groups]
        apart = (batch, groups, *self._places, *self._window.kernel, channels // groups)
        seen.view(apart).copy_(torch.unflatten(self._places_of(padded), 5, (groups, -1)).movedim(5, 1))
        return seen

    def _make_room(self, inputs: Tensor) -> None:
        (vertical, horizontal), (down, right) = self._window.padding, self._window.kernel
        batch, channels, height, width = inputs.shape
        groups, places = self._window.groups, self._places[0] * self._places[1]
        self._padded = inputs.new_zeros(batch, height + 2 * vertical, width + 2 * horizontal, channels)
        self._seen = inputs.new_empty(batch * groups, places, channels // groups * down * right)

    def _places_of(self, padded: Tensor) -> Tensor:
        """A view [batch, *places, *kernel, channels] of padded images [batch, h, w, channels]."""
        record, row, column, channel = padded.stride()
        (down, right), (below, beside) = self._window.stride, self._window.dilation
        return padded.as_strided(
            (len(padded), *self._places, *self._window.kernel, padded.shape[3]),
            (record, down * row, right * column, below * row, beside * column, channel),
        )
