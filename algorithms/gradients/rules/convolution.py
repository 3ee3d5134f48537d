"""What the places of a convolution's output see of its input.

Per-example gradients of a convolution's weight.

One- and two-dimensional convolutions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from algorithms.gradients.arithmetic import (
    absolute_norms,
    raised,
    square_distances,
    square_norms,
    wide,
)
from algorithms.gradients.grad_sample_recorder import Gradients, GradSampleRecorder
from algorithms.gradients.grads import (
    DenseGrad,
    add_rows,
    add_short,
    add_single,
    add_written,
    is_formed_singly,
    is_short,
    norms_of_single,
    prefers_gram,
    product_norms,
    product_sizes,
    rows_of_product,
    slices,
)
from algorithms.gradients.padding import Layout
from algorithms.gradients.rules.general import general


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


@dataclass(frozen=True)
class ConvGrad:
    """Gradients of the weight of a two-dimensional convolution, shape [outputs, channels / groups, *kernel].

    inputs: [batch, channels, height, width]. errors: [batch, outputs, rows, columns], its output's gradient. Every
    place of the output adds an outer product of its error and the patch of the input that it saw.
    """

    inputs: Tensor
    errors: Tensor
    window: Window

    @property
    def is_written(self) -> bool:
        return not self._prefers_gram and not self._is_formed_singly

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
        if not self._prefers_gram:
            if self._is_formed_singly:
                return norms_of_single(self._writer(), self.inputs, self.errors)
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

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        parts = self.inputs, self.errors, weights
        if "_written" not in self.__dict__ and self._is_summed_by_products:
            return self._add_products(*parts, total.view(self.errors.shape[1], -1))
        in_patch_order = torch.zeros_like(total)
        if "_written" in self.__dict__:
            add_rows(self._written.flatten(start_dim=1), weights, in_patch_order)
        elif self._is_formed_singly:
            add_single(self._writer(), *parts, in_patch_order)
        else:
            add_written(self._writer(), *parts, total=in_patch_order, numbers=self._numbers)
        apart = in_patch_order.view(self.errors.shape[1], -1)
        ordered = self._in_weight_order(apart)
        total.view(ordered.shape).add_(ordered)
        return None

    @property
    def _is_summed_by_products(self) -> bool:
        """Whether the sum is a product of all places of some records, in 64 bits, which writes no gradient down."""
        is_single = self._is_formed_singly
        is_few = is_short(self.length, is_single=is_single) and (self._prefers_gram or not is_single)
        return self.window.groups == 1 and is_few

    def _add_products(self, inputs: Tensor, errors: Tensor, weights: Tensor, total: Tensor) -> None:
        cut, rows = self._cutter(), rows_of_product(self._patch, errors.shape[1], errors.device)
        parts = (torch.split(part, max(1, rows // self.length)) for part in (inputs, errors, weights))
        for some, their, each in zip(*parts, strict=True):
            seen = self._in_weight_order(cut(wide(some))).flatten(start_dim=2)
            add_short(seen, wide(their).flatten(start_dim=2).transpose(1, 2), each, total)

    def take(self, chosen: Tensor | slice) -> "ConvGrad":
        return self._with(lambda part: part[chosen])

    def double(self) -> "ConvGrad":
        return self._with(lambda part: part.double())

    def _with(self, change: Callable[[Tensor], Tensor]) -> "ConvGrad":
        """The same with another form of its tensors; what is written down stays as it was measured."""
        changed = ConvGrad(change(self.inputs), change(self.errors), self.window)
        if "_written" in self.__dict__:
            changed.__dict__["_written"] = change(self._written)
        return changed

    def _in_weight_order(self, written: Tensor) -> Tensor:
        """A view of [..., kernel x channels] as [..., channels, kernel]."""
        height, width = self.window.kernel
        return torch.unflatten(written, -1, (height * width, -1)).transpose(-1, -2)

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
        if self._is_depthwise:
            return self.inputs[0].numel() + self.errors[0].numel()
        return self._patch * max(self.length * self.window.groups, self.errors.shape[1])

    @property
    def _prefers_gram(self) -> bool:
        return prefers_gram(self.length, self._patch, self.errors.shape[1] // self.window.groups)

    @property
    def _is_depthwise(self) -> bool:
        """Whether every channel has kernels of its own."""
        return self.window.groups == self.inputs.shape[1] > 1

    @property
    def _is_formed_singly(self) -> bool:
        return is_formed_singly(self.inputs, self.errors.shape[1] * self._patch)

    def _cutter(self) -> Cutter:
        return Cutter(self.window, (self.errors.shape[2], self.errors.shape[3]))

    def _writer(self) -> Callable[..., Tensor]:
        """What writes down the gradients of a few records, by products of patches and errors, in their order."""
        if self._is_depthwise and self.length > 1:  # kernels of one number are slow in PyTorch
            return self._write_depthwise
        cut = self._cutter()

        def write(inputs: Tensor, errors: Tensor, into: Tensor | None = None) -> Tensor:
            # [records x groups, places, patch] and [records x groups, outputs / groups, places]: each group of a record
            # is a product of its own.
            seen = cut(wide(inputs))
            back = wide(errors).reshape(len(seen), -1, seen.shape[1])
            out = None if into is None else into.view(len(seen), -1, seen.shape[2])
            return torch.bmm(back, seen, out=out).view(len(errors), -1)

        return write

    def _write_depthwise(self, inputs: Tensor, errors: Tensor, into: Tensor | None = None) -> Tensor:
        """The same where every channel has kernels of its own: each record's channel is convolved with its error.

        The error is then the kernel, and what was the stride is the distance of its places (Rochette, Manoel and Tramel
        2019, arXiv:1912.06015).
        """
        window, records = self.window, len(errors)
        channels = wide(inputs).repeat_interleave(errors.shape[1] // inputs.shape[1], dim=1).flatten(0, 1)
        kernels = wide(errors).reshape(-1, 1, *errors.shape[2:])
        found = torch.conv2d(
            channels[None], kernels, None, window.dilation, window.padding, window.stride, len(kernels)
        )
        height, width = window.kernel
        written = found[0, :, :height, :width].reshape(
            records, -1
        )  # places that no kernel reached are left over
        return written if into is None else into.view_as(written).copy_(written)


def _square_norms(seen: Tensor, errors: Tensor, groups: int) -> Tensor:
    """Of a few records, by products of patches and errors."""
    batch, length = len(errors), errors.shape[2] * errors.shape[3]
    back = wide(errors).reshape(batch * groups, -1, length).transpose(1, 2)
    return product_norms(seen, back).view(batch, groups).sum(dim=1)


Pair = int | Sequence[int]


def convolution(
    tape: GradSampleRecorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A convolution of input [batch, channels, (height,) width] with weight [outputs, channels / groups, *kernel]."""
    return _recorded(tape, func, *args, **kwargs)


def _recorded(
    tape: GradSampleRecorder,
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Any:
    layout = tape.layout(input)
    if layout != Layout(0) or tape.name(input) is not None:
        return general(tape, func, (input, weight, bias, stride, padding, dilation, groups), {})
    if isinstance(
        padding, str
    ):  # what is kept is the padded input, so that patches are cut from what was seen
        input, padding = _padded(input, padding, weight.shape[2:], dilation)
    output = func(input, weight, bias, stride, padding, dilation, groups)
    kernel = weight.shape[2:]
    window = Window(
        kernel=_pair(kernel, len(kernel), 1),
        stride=_pair(stride, len(kernel), 1),
        padding=_pair(padding, len(kernel), 0),
        dilation=_pair(dilation, len(kernel), 1),
        groups=groups,
    )
    names = tape.name(weight), tape.name(bias)
    return tape.keep(output, lambda errors: _gradients(input, errors, window, names), input)


def _gradients(
    inputs: Tensor, errors: Tensor, window: Window, names: tuple[str | None, str | None]
) -> Gradients:
    weight, bias = names
    found: Gradients = {}
    if weight is not None:
        # Every place of the output is a linear layer of the patch that it saw: sum over places of error x patch^T.
        found[weight] = ConvGrad(_image(inputs.detach()), _image(errors), window)
    if bias is not None:
        # The bias is added at every place: [batch, outputs, *places] -> [batch, outputs].
        found[bias] = DenseGrad(errors.flatten(start_dim=2).sum(dim=2))
    return found


def _image(values: Tensor) -> Tensor:
    """A sequence as an image of height 1."""
    return values.unsqueeze(2) if values.dim() == 3 else values


def _pair(value: Pair, dimensions: int, above: int) -> tuple[int, int]:
    """A setting for height and width; a convolution along one dimension has `above` for the height that it lacks."""
    across = value if isinstance(value, int) else value[-1]
    if dimensions == 1:
        return (above, across)
    return (value if isinstance(value, int) else value[0], across)


def _padded(
    input: Tensor, padding: str, kernel: Sequence[int], dilation: Pair
) -> tuple[Tensor, tuple[int, ...]]:
    """The input padded as the words 'same' and 'valid' say, and the padding that is then left to do: none."""
    none = (0,) * len(kernel)
    if padding == "valid":
        return input, none
    spread = _pair(dilation, len(kernel), 1)[-len(kernel) :]
    totals = [step * (size - 1) for step, size in zip(spread, kernel, strict=True)]
    sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return functional.pad(input, sides), none
