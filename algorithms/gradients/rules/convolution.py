"""Per-example gradients of convolutions and transposed convolutions in one, two or three dimensions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from algorithms.gradients.arithmetic import (
    absolute_norms,
    add_rounding_margin,
    square_distances,
    square_norms,
    wide,
)
from algorithms.gradients.block_gradients import BlockGrad, are_worth_blocks
from algorithms.gradients.grad_sample_recorder import (
    Args,
    Func,
    Gradients,
    GradSampleRecorder,
    Kwargs,
    Layout,
)
from algorithms.gradients.parameter_gradients import (
    DenseGrad,
    LinearGrad,
    PerExample,
    RowGrad,
    RowProducts,
    add_materialized,
    add_rows,
    add_short,
    add_single,
    is_formed_singly,
    is_short,
    join_row_products,
    prefers_gram,
    product_sizes,
    product_square_norms,
    row_products,
    row_products_of_factors,
    row_slack,
    rows_of_product,
    slices,
    square_norms_of_single,
)
from algorithms.gradients.rules.general import general


@dataclass(frozen=True)
class Window:
    """How a kernel moves over an image; each setting has one number per dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def overlap(self) -> int:
        """The largest number of output positions that see one pixel."""
        # With dilation the positions that see a pixel are not neighbours; the number of kernel entries is a bound.
        if any(step != 1 for step in self.dilation):
            return math.prod(self.kernel)
        # ceil(kernel / stride) for each axis.
        return math.prod(-(-size // step) for size, step in zip(self.kernel, self.stride, strict=True))

    def over(self, layout: Layout) -> "Window":
        """The window for records with several images, which become one more dimension."""
        if layout.rows_per_record == 1:
            return self
        # A kernel of 1 along a record's rows, without padding there: no patch spans two images.
        kernel, stride, dilation = ((1, *each) for each in (self.kernel, self.stride, self.dilation))
        return Window(kernel, stride, (0, *self.padding), dilation, self.groups)


class Cutter:
    """Cuts images into the patches that each output position sees, a few records at a time, and reuses its memory."""

    def __init__(self, window: Window, positions: Sequence[int]) -> None:
        self._window, self._positions = window, tuple(positions)
        self._pad = self._seen = torch.empty(0)
        self._is_pointwise = math.prod(window.kernel) == 1 and not any(window.padding)

    def __call__(self, inputs: Tensor) -> Tensor:
        """[batch, channels, *image] -> [batch * groups, positions, kernel x channels / groups], until the next call."""
        groups, (batch, channels, *image) = self._window.groups, inputs.shape
        if self._is_pointwise and tuple(image) == self._positions:
            # A view: each pixel is its own patch.
            return torch.unflatten(inputs, 1, (groups, -1)).flatten(0, 1).flatten(start_dim=2).transpose(1, 2)
        if len(self._pad) < max(1, batch):
            self._make_room(inputs)
        padded = self._pad[:batch]
        middle = [slice(edge, edge + size) for edge, size in zip(self._window.padding, image, strict=True)]
        # The frame of zeros stays from one call to the next; only the middle is written.
        # Channels come last, so that a patch's numbers for one pixel are next to each other.
        padded[:, *middle] = inputs.movedim(1, -1)
        seen = self._seen[: batch * groups]
        # What `_seen` holds, before positions and patches are flattened.
        apart = (batch, groups, *self._positions, *self._window.kernel, channels // groups)
        # [batch, *positions, *kernel, groups, channels / groups], with the groups moved behind the batch.
        seen.view(apart).copy_(torch.unflatten(self._positions_of(padded), -1, (groups, -1)).movedim(-2, 1))
        return seen

    def _make_room(self, inputs: Tensor) -> None:
        window, (batch, channels, *image) = self._window, inputs.shape
        sizes = [size + 2 * edge for edge, size in zip(window.padding, image, strict=True)]
        patch = channels // window.groups * math.prod(window.kernel)
        self._pad = inputs.new_zeros(batch, *sizes, channels)  # [batch, *padded image, channels]
        # Uninitialised, as each call writes all of it.
        self._seen = inputs.new_empty(batch * window.groups, math.prod(self._positions), patch)

    def _positions_of(self, padded: Tensor) -> Tensor:
        """A view [batch, *positions, *kernel, channels] of padded images [batch, *image, channels].

        Entry (p, k) of an axis is the image's at p * stride + k * dilation, so that both are strides of one memory:
        patches overlap in it, and nothing is copied until they are multiplied.
        """
        record, *axes, channel = padded.stride()
        moves, steps = (
            [many * axis for many, axis in zip(each, axes, strict=True)]
            for each in (self._window.stride, self._window.dilation)
        )
        return padded.as_strided(
            (len(padded), *self._positions, *self._window.kernel, padded.shape[-1]),
            (record, *moves, *steps, channel),
        )


@dataclass(frozen=True)
class ConvGrad(RowGrad):
    """Gradients of the weight of a convolution, shape [outputs, channels / groups, *kernel].

    inputs: [batch, channels, *image]. grad_outputs: [batch, outputs, *positions], of the output. Every output position
    adds the outer product of its gradient and the input patch that it sees.
    """

    inputs: Tensor
    grad_outputs: Tensor
    window: Window

    @property
    def is_materialized(self) -> bool:
        return not self._prefers_gram and not self._is_formed_singly

    @property
    def length(self) -> int:
        """The number of outer products in a record's sum."""
        return math.prod(self.grad_outputs.shape[2:])

    @property
    def rows(self) -> Tensor:
        return self._in_weight_order(self._materialized_sums).flatten(start_dim=1)

    @cached_property
    def _materialized_sums(self) -> Tensor:
        """The gradients in patch order, [batch, outputs, kernel x channels / groups]."""
        sums = wide(self.grad_outputs).new_empty(
            len(self.grad_outputs), self.grad_outputs.shape[1], self._patch
        )
        write = self._materializer()
        for inputs, grad_outputs, into in slices(self._numbers, self.inputs, self.grad_outputs, sums):
            write(inputs, grad_outputs, into)
        return sums

    def square_norms(self) -> Tensor:
        if not self._prefers_gram:
            if self._is_formed_singly:
                return square_norms_of_single(self._materializer(), self.inputs, self.grad_outputs)
            return square_norms(self._materialized_sums)
        # |sum_t e_t p_t^T|^2 = sum_st (e_s e_t)(p_s p_t): two Gram matrices [positions, positions], no gradient.
        # Per record: patches [groups * positions, patch], and a Gram matrix of each group.
        parts = slices(self._gram_numbers, self.inputs, self.grad_outputs)
        cut = self._cutter()
        squares = torch.cat(
            [
                _square_norms(cut(wide(part_inputs)), part_grad_outputs, self.window.groups)
                for part_inputs, part_grad_outputs in parts
            ]
        )
        # An input value is in at most `overlap` patches, so their squares add up to at most `overlap` times its square.
        sizes = self.window.overlap**0.5 * product_sizes(self.inputs, self.grad_outputs)
        return add_rounding_margin(squares, sizes, self.length, wide(self.grad_outputs).dtype)

    @property
    def grad_rows(self) -> int:
        return self.grad_outputs.shape[1]

    def row_products(self, directions: Tensor) -> RowProducts:
        # Rows of `directions` are outputs, so only the order within a row changes.
        directions = self._in_patch_order(directions).view(directions.shape)
        if not self._prefers_gram:
            if not self._is_formed_singly:
                return row_products(self._materialized_sums, directions)
            write = self._materializer()
            pairs = zip(self.inputs, self.grad_outputs, strict=True)
            # [1, outputs, patch]
            each = (
                write(image[None], grad_output[None]).view(1, *directions.shape)
                for image, grad_output in pairs
            )
            return join_row_products([row_products(part, directions) for part in each])
        cut, groups, parts = self._cutter(), self.window.groups, []
        for part_inputs, part_grad_outputs in slices(self._gram_numbers, self.inputs, self.grad_outputs):
            # [records * groups, positions, outputs / groups]
            back = part_grad_outputs.reshape(len(part_grad_outputs) * groups, -1, self.length).transpose(1, 2)
            parts.append(_row_products(cut(wide(part_inputs)), back, directions, groups))
        # Along the batch: [batch, rows] and [2, batch, rows].
        squares, along = (torch.cat(part, dim=-2) for part in zip(*parts, strict=True))
        back = self.grad_outputs.flatten(start_dim=2).transpose(1, 2)  # [batch, positions, outputs]
        slack = row_slack(self.window.overlap * square_norms(self.inputs), back, self.length)
        return RowProducts(squares, along, slack)

    def absolute_norms(self) -> Tensor:
        return absolute_norms(self._materialized_sums)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        moved, scaled = (self._in_patch_order(part) for part in (shift, scale))
        return square_distances(self._materialized_sums.flatten(start_dim=1), moved, scaled)

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        parts = self.inputs, self.grad_outputs, weights
        if "_materialized_sums" not in self.__dict__ and self._is_summed_by_products:
            return self._add_products(*parts, total.view(self.grad_outputs.shape[1], -1))
        in_patch_order = torch.zeros_like(total)
        # What the norms have left; else formed record by record, or a few records at a time.
        if "_materialized_sums" in self.__dict__:
            add_rows(self._materialized_sums.flatten(start_dim=1), weights, in_patch_order)
        elif self._is_formed_singly:
            add_single(self._materializer(), *parts, in_patch_order)
        else:
            add_materialized(self._materializer(), *parts, total=in_patch_order, numbers=self._numbers)
        apart = in_patch_order.view(self.grad_outputs.shape[1], -1)
        ordered = self._in_weight_order(apart)
        total.view(ordered.shape).add_(ordered)  # [outputs, channels / groups, kernel]
        return None

    @property
    def _is_summed_by_products(self) -> bool:
        """Whether the sum is a 64-bit product over all positions of some records, without materialised gradients."""
        is_single = self._is_formed_singly
        is_few = is_short(self.length, is_single=is_single) and (self._prefers_gram or not is_single)
        return self.window.groups == 1 and is_few

    def _add_products(self, inputs: Tensor, grad_outputs: Tensor, weights: Tensor, total: Tensor) -> None:
        cut, rows = self._cutter(), rows_of_product(self._patch, grad_outputs.shape[1], grad_outputs.device)
        # A record has `length` rows in the product, one for each position.
        parts = (torch.split(part, max(1, rows // self.length)) for part in (inputs, grad_outputs, weights))
        for part_inputs, part_grad_outputs, each in zip(*parts, strict=True):
            # [records, positions, channels * kernel]
            seen = self._in_weight_order(cut(wide(part_inputs))).flatten(start_dim=2)
            # back: [records, positions, outputs]
            add_short(seen, wide(part_grad_outputs).flatten(start_dim=2).transpose(1, 2), each, total)

    def take(self, chosen: Tensor | slice) -> "ConvGrad":
        return self._with(lambda part: part[chosen])

    def double(self) -> "ConvGrad":
        return self._with(lambda part: part.double())

    def _with(self, change: Callable[[Tensor], Tensor]) -> "ConvGrad":
        """Apply a function to the tensors, and to the materialised gradients if they exist."""
        changed = ConvGrad(change(self.inputs), change(self.grad_outputs), self.window)
        if "_materialized_sums" in self.__dict__:
            changed.__dict__["_materialized_sums"] = change(self._materialized_sums)
        return changed

    def _in_weight_order(self, values: Tensor) -> Tensor:
        """A view of [..., kernel x channels] as [..., channels, kernel]."""
        return torch.unflatten(values, -1, (math.prod(self.window.kernel), -1)).transpose(-1, -2)

    def _in_patch_order(self, weight: Tensor) -> Tensor:
        """A vector of the weight's length, in patch order."""
        kernel = math.prod(self.window.kernel)
        return weight.view(self.grad_outputs.shape[1], -1, kernel).transpose(1, 2).reshape(-1)

    @property
    def _patch(self) -> int:
        """The number of values that an output position sees, in one group."""
        return self.inputs.shape[1] // self.window.groups * math.prod(self.window.kernel)

    @property
    def _numbers(self) -> int:
        """Memory for one record's products, in numbers: its patches, or its gradient."""
        if self._is_depthwise:
            return self.inputs[0].numel() + self.grad_outputs[0].numel()
        # The larger of all patches [positions * groups, patch] and one gradient [outputs, patch].
        return self._patch * max(self.length * self.window.groups, self.grad_outputs.shape[1])

    @property
    def _gram_numbers(self) -> int:
        """The same for its patches, output gradients and Gram matrices, twice since they are in 64 bits."""
        outputs = self.grad_outputs.shape[1]
        return 2 * self.length * (self.window.groups * (self._patch + self.length) + outputs)

    @property
    def _prefers_gram(self) -> bool:
        outputs = self.grad_outputs.shape[1] // self.window.groups
        return prefers_gram(self.length, self._patch, outputs, self.inputs.device)

    @property
    def _is_depthwise(self) -> bool:
        """Whether every channel has its own kernels."""
        return self.window.groups == self.inputs.shape[1] > 1

    @property
    def _is_formed_singly(self) -> bool:
        return is_formed_singly(self.inputs, self.grad_outputs.shape[1] * self._patch)

    def _cutter(self) -> Cutter:
        return Cutter(self.window, self.grad_outputs.shape[2:])

    def _materializer(self) -> Callable[..., Tensor]:
        """A function that materialises the gradients of a few records, by products of patches and output gradients."""
        moves = len(self.window.kernel) <= len(_CONVOLUTIONS)
        if self._is_depthwise and moves and self.length > 1:  # PyTorch is slow for kernels of one number
            return self._write_depthwise
        cut = self._cutter()

        def write(inputs: Tensor, grad_outputs: Tensor, into: Tensor | None = None) -> Tensor:
            # [records x groups, positions, patch] and [records x groups, outputs / groups, positions]: one product
            # for each group of a record.
            seen = cut(wide(inputs))
            # Outputs of one group are consecutive, so this reshape gives each group its own matrix.
            back = wide(grad_outputs).reshape(len(seen), -1, seen.shape[1])
            out = None if into is None else into.view(len(seen), -1, seen.shape[2])
            return torch.bmm(back, seen, out=out).view(len(grad_outputs), -1)

        return write

    def _write_depthwise(self, inputs: Tensor, grad_outputs: Tensor, into: Tensor | None = None) -> Tensor:
        """Materialise gradients if every channel has its own kernels: each channel is convolved with its error.

        The error acts as the kernel, and the stride as its dilation (Rochette, Manoel and Tramel 2019,
        arXiv:1912.06015).
        """
        window, records = self.window, len(grad_outputs)
        # [records x outputs, *image] and [records x outputs, 1, *positions]: each is a group of one large convolution.
        channels = (
            wide(inputs).repeat_interleave(grad_outputs.shape[1] // inputs.shape[1], dim=1).flatten(0, 1)
        )
        kernels = wide(grad_outputs).reshape(-1, 1, *grad_outputs.shape[2:])
        # PyTorch's argument order: stride, padding, dilation, groups. Stride and dilation are swapped on purpose.
        move = _CONVOLUTIONS[len(window.kernel) - 1]
        moved = move(
            channels[None], kernels, None, window.dilation, window.padding, window.stride, len(kernels)
        )
        reached = [slice(size) for size in window.kernel]  # drops positions that no kernel reaches
        sums = moved[0][:, *reached].reshape(records, -1)  # [records, outputs * kernel]
        return sums if into is None else into.view_as(sums).copy_(sums)


def _square_norms(seen: Tensor, grad_outputs: Tensor, groups: int) -> Tensor:
    """Squared norms for a few records, by products of patches and output gradients."""
    batch, length = len(grad_outputs), math.prod(grad_outputs.shape[2:])
    # [records * groups, positions, outputs / groups]
    back = wide(grad_outputs).reshape(batch * groups, -1, length).transpose(1, 2)
    return product_square_norms(seen, back).view(batch, groups).sum(dim=1)


def _row_products(seen: Tensor, back: Tensor, directions: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """`row_products_of_factors` for patches and output gradients of several groups, each with rows of its own."""
    if groups == 1:
        return row_products_of_factors(seen, back, directions)
    # [records * groups, outputs / groups, patch]
    of_groups = directions.view(groups, -1, directions.shape[1]).repeat(len(seen) // groups, 1, 1)
    squares, along = row_products_of_factors(seen, back, of_groups)
    # A record's groups are consecutive, so its rows join to [records, outputs]
    return squares.view(-1, len(directions)), along.view(2, -1, len(directions))


_CONVOLUTIONS = torch.conv1d, torch.conv2d, torch.conv3d
Sizes = int | Sequence[int]


def convolution(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A convolution of input [batch, channels, *image] with weight [outputs, channels / groups, *kernel]."""
    return _convolution(recorder, func, *args, **kwargs)


def _convolution(
    recorder: GradSampleRecorder,
    func: Func,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Any:
    layout = _layout(recorder, input)
    if layout is None:
        return general(recorder, func, (input, weight, bias, stride, padding, dilation, groups), {})
    # An output position is the product of the weight with the patch of the input that it sees, so the weight's gradient
    # is a sum of outer products over positions, as a linear layer's over the positions of a sequence.
    kernel = weight.shape[2:]
    if isinstance(padding, str):
        # An input that is padded is kept as it is then, since patches are cut from it.
        input, padding = _pad(input, padding, kernel, dilation)
    output = func(input, weight, bias, stride, padding, dilation, groups)
    window = _window(kernel, stride, padding, dilation, groups).over(layout)

    def of_weight(seen: Tensor, back: Tensor) -> PerExample:
        # Each output position is a linear layer on its patch; the gradient sums error x patch^T over positions.
        return _gradients_of_weight(seen, back, window)

    return _record_weight_and_bias(
        recorder, output, input, layout, of_weight, (recorder.name(weight), recorder.name(bias))
    )


def transposed_convolution(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A transposed convolution of input [batch, channels, *image] with weight [channels, outputs / groups, *kernel]."""
    return _transposed_convolution(recorder, func, *args, **kwargs)


def _transposed_convolution(  # noqa: PLR0913
    recorder: GradSampleRecorder,
    func: Func,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Any:
    settings = stride, padding, output_padding, groups, dilation
    layout = _layout(recorder, input)
    if layout is None:
        return general(recorder, func, (input, weight, bias, *settings), {})
    window = _window(weight.shape[2:], stride, padding, dilation, groups).over(layout)
    output = func(input, weight, bias, *settings)

    def of_weight(seen: Tensor, back: Tensor) -> PerExample:
        # A transposed convolution is the backward pass of a convolution, so input and output gradient swap their roles.
        return _gradients_of_weight(back, seen, window)

    return _record_weight_and_bias(
        recorder, output, input, layout, of_weight, (recorder.name(weight), recorder.name(bias))
    )


def _gradients_of_weight(inputs: Tensor, grad_outputs: Tensor, window: Window) -> PerExample:
    """The gradients of a weight; with a single output position they are a linear layer's, or one's for each group."""
    positions, groups = grad_outputs.shape[2:], window.groups
    outputs, patch = grad_outputs.shape[1] // groups, inputs.shape[1] // groups * math.prod(window.kernel)
    if math.prod(positions) > 1 or not (groups == 1 or are_worth_blocks(groups, outputs, patch)):
        return ConvGrad(inputs, grad_outputs, window)
    # From patch order, kernel before channels, to the weight's, channels before kernel.
    # [batch * groups, 1, channels / groups, kernel]
    seen = torch.unflatten(Cutter(window, positions)(wide(inputs)), 2, (-1, inputs.shape[1] // groups)).mT
    # One output position is an outer product without a sequence: [batch * groups, 1, patch] and [.., outputs].
    sides = seen.flatten(start_dim=2), grad_outputs.reshape(len(seen), 1, outputs)
    if groups == 1:
        return LinearGrad(*sides)
    # [batch, groups, 1, width] each
    return BlockGrad(*(torch.unflatten(side, 0, (-1, groups)) for side in sides))


def _layout(recorder: GradSampleRecorder, input: Tensor) -> Layout | None:
    """The input's layout; None if the batch does not come first, or the input is a parameter."""
    layout = recorder.layout(input)
    return layout if layout.dimension == 0 and recorder.name(input) is None else None


def _record_weight_and_bias(
    recorder: GradSampleRecorder,
    output: Tensor,
    input: Tensor,
    layout: Layout,
    of_weight: Callable[[Tensor, Tensor], PerExample],
    names: tuple[str | None, str | None],
) -> Tensor:
    """Record the gradients of weight and bias; of_weight: computes the weight's from input and output gradient."""
    batch, (weight, bias) = recorder.batch, names

    def gradients(grad_outputs: Tensor) -> Gradients:
        seen, back = (layout.with_channels(part, batch) for part in (input, grad_outputs))
        by_name: Gradients = {}
        if weight is not None:
            by_name[weight] = of_weight(seen, back)
        if bias is not None:
            # The bias is added at every position: [batch, outputs, *positions] -> [batch, outputs].
            by_name[bias] = DenseGrad(back.flatten(start_dim=2).sum(dim=2))
        return by_name

    return recorder.keep(output, gradients, input)


def _window(kernel: Sequence[int], stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> Window:
    moved, edge, spread = (_by_dimension(size, len(kernel)) for size in (stride, padding, dilation))
    return Window(tuple(kernel), moved, edge, spread, groups)


def _by_dimension(size: Sizes, dimensions: int) -> tuple[int, ...]:
    """Expand a setting to one number per dimension; a single number holds for all."""
    each = (size,) if isinstance(size, int) else tuple(size)
    return each * dimensions if len(each) == 1 else each


def _pad(
    input: Tensor, padding: str, kernel: Sequence[int], dilation: Sizes
) -> tuple[Tensor, int | tuple[int, ...]]:
    """The input and the numbers for the padding 'same' or 'valid'; applied to the input where sides differ."""
    if padding == "valid":
        return input, 0
    spread = _by_dimension(dilation, len(kernel))
    # Of both sides: a kernel covers step * (size - 1) + 1 pixels.
    totals = [step * (size - 1) for step, size in zip(spread, kernel, strict=True)]
    if all(total % 2 == 0 for total in totals):
        return input, tuple(total // 2 for total in totals)
    # `functional.pad` takes the last axis first. As in PyTorch, "same" pads the odd pixel at the end.
    sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return functional.pad(input, sides), 0
