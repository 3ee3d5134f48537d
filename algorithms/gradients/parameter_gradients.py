"""Ghost clipping: norms and weighted sums of one parameter's per-example gradients, without the gradients themselves.

A backward pass leaves a linear layer's gradient as a sum of outer products of inputs and output gradients. Its norm and
a weighted sum over records follow from these factors; the gradients are materialised only if that is cheaper. Norms of
sums of outer products are computed by the cheaper of two algorithms, a few records at a time. `model_gradients` puts
the parameters of a model together.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import (
    MIN_KERNEL_BATCH,
    absolute_norms,
    add_rounding_margin,
    round_batch,
    rounding,
    square_distances,
    square_norms,
    wide,
)
from algorithms.gradients.devices import is_slow_in_64_bits

_IN_CACHE = 2**18
"""How many numbers a CPU processes together: about what a core's second-level cache holds."""

_AT_LEAST = 4
"""The smallest number of records at a time; with fewer, function calls cost more than the cache saves."""

_MAX_DISTANCE_ERROR = 1e-2
"""The largest relative error of a squared distance in 32 bits; above it, distances are computed in 64 bits."""

_ON_DEVICE = 2**27
"""`_IN_CACHE` for a GPU, where a few large products beat many small ones."""

_ROWS = 256
"""The number of rows from which a product's arithmetic takes longer than its memory traffic."""

LARGE_PARAMETER = 2**19
"""Size of a parameter above which the gradients of a few records do not fit a CPU's cache."""

FEW_NUMBERS = 1024
"""Size of a parameter whose gradients are always materialised, to be processed with others: calls cost more."""

_MAX_PRODUCTS, MAX_PRODUCTS_ALONE = 8, 64
"""Outer products per record up to which 64-bit products beat materialising small and large gradients."""


def is_formed_singly(values: Tensor, numbers: int) -> bool:
    """Whether gradients of this size are materialised for one record at a time and then dropped.

    They are computed twice, for the norms and for the sum, by the same product and so with the same bits. This is
    faster than reading them from memory.
    """
    return values.device.type == "cpu" and numbers > LARGE_PARAMETER


def prefers_gram(
    length: int, inputs: int, outputs: int, device: torch.device, *, is_summed_by_products: bool = False
) -> bool:
    """Whether the norm is cheaper from the two length x length Gram matrices than from the gradient itself.

    The comparison accounts for float64, in which the Gram matrices are multiplied because their products cancel.
    is_summed_by_products: whether the sum needs no gradient either, which is then neither written to memory nor read.
    """
    # 2 length^2 (p + o) operations, times the cost of 64 bits, for less than half of the 2 length p o in 32 bits. On a
    # core of a CPU both ways took as long where these are equal, whatever the shape (64 to 3,072 numbers a side); at
    # half, norms and weighted sum took 0.67 to 0.85 of the time.
    cost_of_64_bits = 32 if is_slow_in_64_bits(device) else 2
    saved = 2 if is_summed_by_products and not is_slow_in_64_bits(device) else 1
    return 2 * cost_of_64_bits * length * (inputs + outputs) < saved * inputs * outputs


def materialize(inputs: Tensor, grad_outputs: Tensor) -> Tensor:
    """The sums of outer products, [batch, length, p], [batch, length, o] -> [batch, o * p]."""
    (batch, _, p), o = inputs.shape, grad_outputs.shape[2]
    if slice_of(p * o, inputs.device) >= batch:
        return _materialize_slice(inputs, grad_outputs).flatten(start_dim=1)
    dtype = torch.promote_types(wide(inputs).dtype, wide(grad_outputs).dtype)
    rows = torch.empty(batch, o, p, dtype=dtype, device=inputs.device)
    for part in slices(p * o, inputs, grad_outputs, rows):
        _materialize_slice(*part)
    return rows.flatten(start_dim=1)


def add_weighted_products(
    inputs: Tensor, grad_outputs: Tensor, weights: Tensor, total: Tensor, bias: Tensor | None = None
) -> None:
    """Add sum_i weights_i grad_outputs_i inputs_i^T to a total, and sum_i weights_i grad_outputs_i to a bias's.

    [n, p], [n, o], [n], and [o, p] and [o], float64.

    64 bits are needed for privacy: in 32 bits a record's contribution would be rounded relative to the sum of the
    others, so that one more record could change all contributions (Casacuberta et al. 2022, "Widespread underestimation
    of sensitivity in differentially private libraries and how to fix it").
    """
    for x, e, w in _in_64_bits(inputs, grad_outputs, weights):
        if bias is not None:
            bias.addmv_(e.T, w)  # sum_i w_i e_i
        # E^T diag(w) X: the weights go to the narrower factor, so one matrix product sums all records.
        if x.shape[1] < e.shape[1]:
            x = x * w[:, None]
        else:
            e = e * w[:, None]
        total.addmm_(e.T, x)


def _in_64_bits(
    inputs: Tensor, grad_outputs: Tensor, weights: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """A few rows at a time, in float64; the next ones overwrite them."""
    (_, p), o = inputs.shape, grad_outputs.shape[1]
    size = max(1, rows_of_product(p, o, inputs.device))
    if len(weights) <= size:
        yield inputs.double(), grad_outputs.double(), weights
        return
    # Buffers of one size, reused: a conversion of all rows would need twice their memory again.
    seen, back = (torch.empty(size, n, dtype=torch.float64, device=inputs.device) for n in (p, o))
    parts = (torch.split(part, size) for part in (inputs, grad_outputs, weights))
    for part_inputs, part_grad_outputs, each in zip(*parts, strict=True):
        yield seen[: len(each)].copy_(part_inputs), back[: len(each)].copy_(part_grad_outputs), each


@lru_cache
def rows_of_product(p: int, o: int, device: torch.device) -> int:
    """How many rows of [n, p] and [n, o] to multiply at once, in 64 bits.

    As many as fit into the cache, or enough to pay for reading and writing the [o, p] total, which may not fit.
    """
    # `p * o // (p + o)` rows have as many numbers, n (p + o), as the [o, p] total that each product rereads.
    return max(slice_of(2 * (p + o), device), min(_ROWS, p * o // max(1, p + o)))


def product_in_64_bits(features: Tensor, grad_outputs: Tensor) -> Tensor:
    """features @ grad_outputs, [p, n], [n, o] -> [p, o], float64, for the reason given in `add_weighted_products`."""
    total = torch.zeros(len(features), grad_outputs.shape[1], dtype=torch.float64, device=grad_outputs.device)
    size = slice_of(len(features), grad_outputs.device)
    for columns, part_grad_outputs in zip(
        torch.split(features, size, dim=1), torch.split(grad_outputs, size), strict=True
    ):
        total.addmm_(columns.double(), part_grad_outputs.double())
    return total


def add_rows(rows: Tensor, weights: Tensor, total: Tensor) -> None:
    """Add sum_i weights_i rows_i to a total; [n, d], [n], and [d], float64, like `add_weighted_products`."""
    size = max(1, slice_of(2 * len(rows), rows.device))
    if size >= len(total):
        total.addmv_(rows.double().T, weights)
        return
    # A few columns of all records at a time, each of which takes 2 n numbers of 32 bits.
    for columns, into in zip(torch.split(rows, size, dim=1), torch.split(total, size), strict=True):
        into.addmv_(columns.double().T, weights)


def square_norms_of_single(
    form: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, grad_outputs: Tensor
) -> Tensor:
    """Squared L2 norms [batch], float64, of the gradients that `form` computes for one record at a time."""
    return torch.cat([square_norms(form(*record).view(1, -1)) for record in _singly(inputs, grad_outputs)])


def add_single(
    form: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    grad_outputs: Tensor,
    weights: Tensor,
    total: Tensor,
) -> None:
    """Add the weighted sum of the gradients of `square_norms_of_single` to a total [numbers], float64."""
    for record, weight in zip(_singly(inputs, grad_outputs), weights.tolist(), strict=True):
        # The type is promoted to 64 bits before the addition.
        total.add_(form(*record).view_as(total), alpha=weight)


def _singly(inputs: Tensor, grad_outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(inputs, 1), torch.split(grad_outputs, 1), strict=True)


def is_short(length: int, *, is_single: bool) -> bool:
    """Whether `add_short` sums gradients of this many outer products; is_single: see `is_formed_singly`."""
    return length <= (MAX_PRODUCTS_ALONE if is_single else _MAX_PRODUCTS)


def add_short(inputs: Tensor, grad_outputs: Tensor, weights: Tensor, total: Tensor) -> None:
    """Add the weighted sum of gradients by 64-bit products, without materialising any.

    [batch, length, p], [batch, length, o], [batch], and [o, p], float64.
    """
    length = inputs.shape[1]
    # Every outer product of a record has its record's weight.
    each = weights.repeat_interleave(length) if length > 1 else weights
    add_weighted_products(inputs.flatten(0, 1), grad_outputs.flatten(0, 1), each, total)


def add_materialized(
    write: Callable[[Tensor, Tensor, Tensor], Tensor], *parts: Tensor, total: Tensor, numbers: int
) -> None:
    """Add the weighted sum of gradients that `write` computes, a few records at a time, to a total [numel], float64.

    write: from inputs and grad_outputs to its third argument. parts: inputs, grad_outputs and weights. numbers: the
    memory of one record, in numbers.
    """
    inputs, grad_outputs, weights = parts
    size = min(slice_of(numbers, total.device), len(weights))
    # The next records overwrite the last ones, which are still in the cache.
    rows = wide(grad_outputs).new_empty(size, len(total))
    # A buffer in 64 bits as long as both fit into the cache; above, `add_rows` converts by columns.
    wider = torch.empty_like(rows, dtype=torch.float64) if rows.numel() <= _IN_CACHE else None
    for part_inputs, part_grad_outputs, each in slices(numbers, inputs, grad_outputs, weights):
        part = rows[: len(each)]
        write(part_inputs, part_grad_outputs, part)
        if wider is None:
            add_rows(part, each, total)
        else:
            total.addmv_(wider[: len(each)].copy_(part).T, each)


def product_square_norms(inputs: Tensor, grad_outputs: Tensor) -> Tensor:
    """Squared L2 norms of sum_t grad_outputs_t inputs_t^T by Gram matrices, a few records at a time.

    inputs: [batch, length, p]. grad_outputs: [batch, length, o]. Returns [batch], float64.
    """
    _, length, p = inputs.shape
    # In 32-bit numbers: both sides and two Gram matrices of each record, all in 64 bits, hence twice.
    parts = slices(2 * (length * (p + grad_outputs.shape[2]) + 2 * length**2), inputs, grad_outputs)
    return torch.cat([gram_square_norms(*part) for part in parts])


def gram_square_norms(inputs: Tensor, grad_outputs: Tensor) -> Tensor:
    """Squared L2 norms of sum_t e_t x_t^T, inputs x [batch, length, p], output gradients e [batch, length, o]."""
    # <e_s x_s^T, e_t x_t^T> = (e_s . e_t) (x_s . x_t), so the squared norm of the sum over t is the sum over s and t of
    # the product of two Gram matrices, entry by entry: length^2 (p + o) operations, and no [o, p] gradient.
    inputs, grad_outputs = inputs.double(), grad_outputs.double()
    products = torch.bmm(inputs, inputs.transpose(1, 2)) * torch.bmm(
        grad_outputs, grad_outputs.transpose(1, 2)
    )
    return products.sum(dim=(1, 2)).clamp(min=0.0)  # cancellation can leave a small negative square


@dataclass(frozen=True)
class RowProducts:
    """What the norms of gradients follow from after a map by rows, as in `normalised_weights`; float64.

    Attributes:
        squares: [batch, rows], the squared norm of each row of the gradient matrix.
        along: [2, batch, rows], a row's components along 1 and its direction.
        slack: [batch, rows], a bound on how much rounding may change a row in the sum; None for rows that are kept.
    """

    squares: Tensor
    along: Tensor
    slack: Tensor | None


def row_products(rows: Tensor, directions: Tensor) -> RowProducts:
    """From materialised gradients [batch, rows, width]; directions: [rows, width], of unit length, float64."""
    parts, root = [], math.sqrt(directions.shape[1])
    size = slice_of(8 * directions.numel(), rows.device)
    values, scaled = torch.empty(
        2, min(size, len(rows)), *directions.shape, dtype=torch.float64, device=rows.device
    )
    for portion in torch.split(rows, size):  # [few, rows, width]
        wider, products = values[: len(portion)].copy_(portion), scaled[: len(portion)]
        along = torch.mul(wider, directions, out=products).sum(dim=2)
        squares = torch.linalg.vector_norm(wider, dim=2).square_()
        parts.append(torch.stack([wider.sum(dim=2) / root, along, squares]))
    ones, along, squares = torch.cat(parts, dim=1)  # [batch, rows] each
    return RowProducts(squares, torch.stack([ones, along]), None)


def join_row_products(parts: list[RowProducts]) -> RowProducts:
    """The products of several parts of a materialised batch, in their order."""
    squares = torch.cat([part.squares for part in parts])
    return RowProducts(squares, torch.cat([part.along for part in parts], dim=1), None)


def row_products_of_factors(
    inputs: Tensor, grad_outputs: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor]:
    """The squares and components of sums of outer products, by Gram matrices, for a few gradients.

    [batch, length, p], [batch, length, o] and [o, p] -> [batch, o] and [2, batch, o].
    """
    # A row of the gradient, of output r, is sum_t e_tr x_t: its square sum_st e_sr e_tr (x_s . x_t), and its component
    # along a direction q sum_t e_tr (x_t . q).
    inputs, grad_outputs = inputs.double(), grad_outputs.double()
    gram = torch.bmm(inputs, inputs.transpose(1, 2))  # x_s . x_t: [batch, length, length]
    squares = (torch.bmm(gram, grad_outputs) * grad_outputs).sum(dim=1)  # sum_s (sum_t gram_st e_tr) e_sr
    # Along 1 / sqrt(p): sum_t e_tr (x_t . 1) / sqrt(p).
    ones = torch.bmm(inputs.sum(dim=2)[:, None], grad_outputs)[:, 0] / math.sqrt(inputs.shape[2])
    # Inputs @ directions^T: [batch, length, o]
    along = (torch.matmul(inputs, directions.mT) * grad_outputs).sum(dim=1)
    return squares.clamp_(min=0.0), torch.stack([ones, along])


def row_slack(input_squares: Tensor, grad_outputs: Tensor, length: int) -> Tensor:
    """A bound on the rounding of each row of a sum of outer products, if it is materialised; [batch, rows], float64.

    Infinite if it might overflow. input_squares: [batch], of what a row is a sum of. grad_outputs: [batch, length, o].
    """
    dtype = wide(grad_outputs).dtype
    columns = grad_outputs.double().square().sum(dim=1).sqrt()  # `vector_norm` takes 25 times as long
    # By Cauchy and Schwarz: sum_t |e_tr| |x_t| is at most |x| times column r's norm.
    sizes = input_squares.sqrt()[:, None] * columns
    return rounding(length, dtype) * torch.where(sizes > torch.finfo(dtype).max / 4, torch.inf, sizes)


def product_distances(
    inputs: Tensor, grad_outputs: Tensor, shift: Tensor, scale: Tensor, *, cancels: float
) -> Tensor:
    """Squared L2 norms of (grad_outputs inputs^T - shift) / scale, with a margin for rounding; [batch], float64.

    inputs: [batch, p]. grad_outputs: [batch, o]. shift, scale: [o * p]. cancels: see `Affine`. The square is expanded,
    so that nothing is materialised. Its terms cancel if the shift is close to the gradient. If the error could be large
    at the allowed distance, all records are computed in 64 bits. Only public values decide this, since no record may
    change the result of another.
    """
    inputs, grad_outputs = wide(inputs), wide(grad_outputs)
    # `cancels` is the largest ratio of the terms to the distance at the bound, so this is a relative error there.
    is_vague = (
        expansion_room(inputs.shape[1] + grad_outputs.shape[1], grad_outputs.dtype) * cancels
        > _MAX_DISTANCE_ERROR
    )
    dtype = torch.float64 if is_vague else grad_outputs.dtype
    squares, sizes, room = _distances(inputs, grad_outputs, shift.to(dtype), scale.to(dtype))
    # `room` bounds the rounding of the distance itself, the margin that of the contribution in the sum.
    return add_rounding_margin(squares + room, sizes.sqrt(), 1, dtype)


def expansion_room(terms: int, dtype: torch.dtype) -> float:
    """A bound on the rounding error of a distance, relative to the sizes of its terms.

    Each sum has an error of at most twice `rounding`, in the worst order; 2 g a is at most |g|^2 + |a|^2.
    """
    return 4.0 * rounding(terms, dtype)


def _distances(
    inputs: Tensor, grad_outputs: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Over squared scales: |g|^2 - 2 g a + |a|^2, |g|^2 + |a|^2, and a rounding bound for the first; [batch].

    In the type of shift and scale.
    """
    shape, dtype = (grad_outputs.shape[1], inputs.shape[1]), scale.dtype
    # With w = 1 / b^2 and m = a / b^2, |(g - a) / b|^2 = sum g^2 w - 2 sum g m + sum (a / b)^2. As g is the outer
    # product e x^T, the first two are the bilinear forms (e^2)^T w (x^2) and e^T m x: matrix products, without any g.
    inverse = scale.reciprocal().view(shape)
    ratio = shift.view(shape) * inverse
    # [o, p], [o, p] and []
    weights, moved, constant = inverse.square(), ratio * inverse, ratio.double().square().sum()
    # At least 1, as are the factors below, so that the product bounds each of its parts.
    largest = 1.0 + torch.maximum(weights.amax(), moved.abs().amax()).double()
    if inputs.shape[1] > grad_outputs.shape[1]:  # the wider side is multiplied, the narrower only weighted
        inputs, grad_outputs, weights, moved = grad_outputs, inputs, weights.T, moved.T
    pairs = slices(2 * sum(shape), inputs, grad_outputs)
    parts = [
        _expand_squares(part_inputs.to(dtype), part_grad_outputs.to(dtype), weights, moved)
        for part_inputs, part_grad_outputs in pairs
    ]
    # [batch] each, float64
    squares, mixed, factors = (torch.cat(terms).double() for terms in zip(*parts, strict=True))
    # Each product may underflow; it has at most four factors of these sizes.
    lost = 8.0 * torch.finfo(dtype).tiny * weights.numel() * largest * factors
    sizes = squares + constant
    difference = (squares - 2.0 * mixed + constant).clamp(min=0.0)
    return difference, sizes, expansion_room(sum(shape), dtype) * sizes + lost


def _expand_squares(
    inputs: Tensor, grad_outputs: Tensor, weights: Tensor, moved: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of g^2 / b^2 and g a / b^2 in (g - a)^2 / b^2, and (1 + |outputs|^2) (1 + |inputs|^2); each [batch]."""
    mixed = torch.linalg.vecdot(grad_outputs @ moved, inputs)  # e^T m x, row by row
    grad_outputs, inputs = grad_outputs.square(), inputs.square()
    sizes = (1.0 + grad_outputs.sum(dim=1)) * (1.0 + inputs.sum(dim=1))
    return torch.linalg.vecdot(grad_outputs @ weights, inputs), mixed, sizes


def product_sizes(inputs: Tensor, grad_outputs: Tensor) -> Tensor:
    """A bound on sum_t |inputs_t| |grad_outputs_t|, to which rounding is relative; [batch, ...] each -> [batch],
    float64.

    Infinite if the sum might overflow in their type, which a norm by 64-bit Gram matrices would not show.
    """
    # Cauchy and Schwarz over t: sum_t |x_t| |e_t| is at most the product of the two whole norms.
    sizes = (square_norms(inputs) * square_norms(grad_outputs)).sqrt()
    return torch.where(sizes > torch.finfo(wide(grad_outputs).dtype).max / 4, torch.inf, sizes)


@lru_cache
def slice_of(numbers: int, device: torch.device) -> int:
    """How many records to process at once if each takes this many numbers."""
    maximum = (_IN_CACHE if device.type == "cpu" else _ON_DEVICE) // max(1, numbers)
    # Below the smallest size that fills kernels, the largest power of two.
    return (
        round_batch(maximum)
        if maximum >= MIN_KERNEL_BATCH
        else max(_AT_LEAST, 2 ** maximum.bit_length() // 2)
    )


def slices(numbers: int, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors for a few records at a time, if each record needs this many numbers."""
    size = slice_of(numbers, parts[0].device)
    if size >= len(parts[0]):
        return iter((parts,))
    return zip(*(torch.split(part, size) for part in parts), strict=True)


def _materialize_slice(inputs: Tensor, grad_outputs: Tensor, into: Tensor | None = None) -> Tensor:
    back, seen = wide(grad_outputs).transpose(1, 2), wide(inputs)  # [few, o, length] and [few, length, p]
    out = None if into is None else into.view(len(back), back.shape[1], seen.shape[2])
    return torch.mul(back, seen, out=out) if seen.shape[1] == 1 else torch.bmm(back, seen, out=out)


class PerExample(Protocol):
    """Gradients of one parameter with `numel` values for each of `batch` records.

    The norms bound a record's contribution in `add_weighted`, rounding included.
    """

    @property
    def is_materialized(self) -> bool:
        """Whether the norms materialise the gradients, so that `rows` costs nothing extra."""
        ...

    @property
    def rows(self) -> Tensor:
        """The materialised gradients, shape [batch, numel]."""
        ...

    def square_norms(self) -> Tensor:
        """Squared L2 norms, shape [batch], float64."""
        ...

    def absolute_norms(self) -> Tensor:
        """L1 norms, shape [batch], float64."""
        ...

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        """Squared L2 norms of (gradient - shift) / scale, both [numel]; [batch], float64. cancels: see `Affine`."""
        ...

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        """Add the sum over records of weight times gradient, weights [batch], to a total [numel], float64."""
        ...

    def take(self, chosen: Tensor | slice) -> "PerExample":
        """The gradients of the chosen records; chosen: their indices, or a slice."""
        ...

    def double(self) -> "PerExample":
        """The same gradients in float64."""
        ...


class FromRows:
    """Norms and sums of a `PerExample` whose materialised gradients are cheap enough to compute them from."""

    def square_norms(self: PerExample) -> Tensor:
        return square_norms(self.rows)

    def absolute_norms(self: PerExample) -> Tensor:
        return absolute_norms(self.rows)

    def square_distances(self: PerExample, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        return square_distances(self.rows, shift, scale)

    def add_weighted(self: PerExample, weights: Tensor, total: Tensor) -> None:
        add_rows(self.rows, weights, total)


@dataclass(frozen=True)
class DenseGrad(FromRows):
    """Materialised gradients, shape [batch, numel]."""

    rows: Tensor
    is_materialized = True

    def take(self, chosen: Tensor | slice) -> "DenseGrad":
        return DenseGrad(self.rows[chosen])

    def double(self) -> "DenseGrad":
        return DenseGrad(self.rows.double())


if TYPE_CHECKING:
    _Base = PerExample
else:
    _Base = object  # `isinstance` takes 50 times as long for classes that inherit from a protocol


class RowGrad(_Base):
    """Gradients of a weight matrix, one row for each output, that are sums of outer products.

    grad_outputs: the gradients of the layer's outputs.
    """

    grad_outputs: Tensor

    @property
    @abstractmethod
    def grad_rows(self) -> int:
        """The number of rows of the matrix."""

    @abstractmethod
    def row_products(self, directions: Tensor) -> RowProducts:
        """The products of the rows, for a map by rows; directions: [rows, width], of unit length, float64."""

    @abstractmethod
    def take(self, chosen: Tensor | slice) -> "RowGrad": ...

    @abstractmethod
    def double(self) -> "RowGrad": ...


def as_measured(gradient: PerExample) -> PerExample:
    """The same gradients; as rows if the norms materialised them, since recomputing them could round differently."""
    # In `__dict__` only if the cached property was read, that is, by the norms.
    return DenseGrad(gradient.rows) if "rows" in gradient.__dict__ else gradient


@dataclass(frozen=True)
class LinearGrad(RowGrad):
    """Sums of outer products: the gradients of a linear layer's weight, shape [outputs, inputs].

    Attributes:
        inputs: [batch, length, inputs], the layer's input.
        grad_outputs: [batch, length, outputs], its output's gradient.
    """

    inputs: Tensor
    grad_outputs: Tensor

    @property
    def is_materialized(self) -> bool:
        return self.length > 1 and not self._prefers_gram and not is_formed_singly(self.inputs, self._numbers)

    @cached_property
    def rows(self) -> Tensor:
        return materialize(self.inputs, self.grad_outputs)

    @cached_property
    def grad_output_squares(self) -> Tensor:
        """Squared L2 norms of the output gradients, shape [batch], float64."""
        return square_norms(self.grad_outputs)

    @property
    def length(self) -> int:
        """The number of outer products in a record's sum."""
        return self.inputs.shape[1]

    @property
    def _prefers_gram(self) -> bool:
        sizes = self.length, self.inputs.shape[2], self.grad_outputs.shape[2]
        # The sum of so few outer products needs no gradient, which makes Gram matrices worth more.
        return self._numbers > FEW_NUMBERS and prefers_gram(
            *sizes, self.inputs.device, is_summed_by_products=self.length <= _MAX_PRODUCTS
        )

    @property
    def _numbers(self) -> int:
        return self.inputs.shape[2] * self.grad_outputs.shape[2]

    def square_norms(self) -> Tensor:
        # One outer product: |e x^T| = |e| |x| (Goodfellow 2015, arXiv:1510.01799).
        if self.length == 1:
            return square_norms(self.inputs) * self.grad_output_squares
        if self.is_materialized:
            return square_norms(self.rows)
        if not self._prefers_gram:
            return square_norms_of_single(_materialize_slice, self.inputs, self.grad_outputs)
        # A sum of products: by Gram matrices of length x length (ghost clipping, Li et al. 2022, arXiv:2110.05679).
        # Their terms cancel, hence 64 bits and a margin, so that no contribution exceeds the bound.
        squares = product_square_norms(self.inputs, self.grad_outputs)
        return add_rounding_margin(
            squares, product_sizes(self.inputs, self.grad_outputs), self.length, wide(self.grad_outputs).dtype
        )

    @property
    def grad_rows(self) -> int:
        return self.grad_outputs.shape[2]

    def row_products(self, directions: Tensor) -> RowProducts:
        if self.is_materialized:
            return row_products(self.rows.view(len(self.rows), *directions.shape), directions)
        pairs = zip(self.inputs, self.grad_outputs, strict=True)
        if self.length > 1 and not self._prefers_gram:
            return join_row_products(
                # [1, o, p] each
                [
                    row_products(_materialize_slice(x[None], grad_output[None]), directions)
                    for x, grad_output in pairs
                ]
            )
        # In 32-bit numbers: the Gram matrix and both sides, in 64 bits.
        numbers = 2 * self.length * (self.length + sum(directions.shape))
        parts = slices(numbers, self.inputs, self.grad_outputs)
        each = [
            row_products_of_factors(part_inputs, part_grad_outputs, directions)
            for part_inputs, part_grad_outputs in parts
        ]
        # [batch, o] and [2, batch, o]
        squares, along = (torch.cat(part, dim=-2) for part in zip(*each, strict=True))
        slack = row_slack(square_norms(self.inputs), self.grad_outputs, self.length)
        return RowProducts(squares, along, slack)

    def absolute_norms(self) -> Tensor:
        # |e x^T|_1 = |e|_1 |x|_1 holds for one product alone; a sum of products has to be formed.
        if self.length == 1:
            return absolute_norms(self.inputs) * absolute_norms(self.grad_outputs)
        return absolute_norms(self.rows)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        if self.length > 1:
            return square_distances(self.rows, shift, scale)
        return product_distances(self.inputs[:, 0], self.grad_outputs[:, 0], shift, scale, cancels=cancels)

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        parts, numbers = (self.inputs, self.grad_outputs, weights), self._numbers
        # A view of the total as the weight's matrix.
        products = total.view(self.grad_outputs.shape[2], self.inputs.shape[2])
        if self._is_summed_by_products:
            add_short(*parts, products)
        elif is_formed_singly(self.inputs, numbers):
            add_single(_materialize_slice, *parts, total)
        else:
            add_materialized(_materialize_slice, *parts, total=total, numbers=numbers)
        return None

    @property
    def _is_summed_by_products(self) -> bool:
        """Whether the sum is a 64-bit product over all outer products, without materialised gradients."""
        is_single = is_formed_singly(self.inputs, self._numbers)
        return self.length == 1 or (self._prefers_gram and is_short(self.length, is_single=is_single))

    def take(self, chosen: Tensor | slice) -> "LinearGrad":
        return self._with(lambda part: part[chosen])

    def double(self) -> "LinearGrad":
        return self._with(lambda part: part.double())

    def _with(self, change: Callable[[Tensor], Tensor]) -> "LinearGrad":
        """Apply a function to the tensors, and to the materialised gradients if they exist."""
        changed = LinearGrad(change(self.inputs), change(self.grad_outputs))
        if "rows" in self.__dict__:
            changed.__dict__["rows"] = change(self.rows)
        return changed


@dataclass(frozen=True)
class BiasGrad(FromRows):
    """Gradients of a linear layer's bias, shape [outputs]: sums of the output gradients in its weight's gradients."""

    of: LinearGrad

    @property
    def is_materialized(self) -> bool:
        return self.of.length > 1

    @cached_property
    def rows(self) -> Tensor:
        grad_outputs = wide(self.of.grad_outputs)
        return grad_outputs[:, 0] if self.of.length == 1 else grad_outputs.sum(dim=1)  # [batch, outputs]

    def square_norms(self) -> Tensor:
        return self.of.grad_output_squares if self.of.length == 1 else square_norms(self.rows)

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        rows = self.rows
        # A bias is the weight of an input that is 1: its gradient is the outer product of the error and (1).
        return product_distances(rows.new_ones(len(rows), 1), rows, shift, scale, cancels=cancels)

    def add_with_matrix(self, weights: Tensor, total: Tensor, products: Tensor) -> None:
        """`add_weighted`, and that of the layer's matrix to `products`, if there is no sequence."""
        inputs, grad_outputs = self.of.inputs[:, 0], self.of.grad_outputs[:, 0]
        add_weighted_products(inputs, grad_outputs, weights, products.view(grad_outputs.shape[1], -1), total)

    def take(self, chosen: Tensor | slice) -> "BiasGrad":
        return BiasGrad(self.of.take(chosen))

    def double(self) -> "BiasGrad":
        return BiasGrad(self.of.double())


@dataclass(frozen=True)
class SlicedGrad:
    """Gradients of consecutive entries of a parameter that are used apart, such as the parts of a packed projection.

    Attributes:
        parts: By slice of the flat parameter; the slices are disjoint, and all other entries have the gradient 0.
        size: The number of entries of the whole parameter.
    """

    parts: dict[tuple[int, int], PerExample]
    size: int

    @property
    def is_materialized(self) -> bool:
        return all(part.is_materialized for part in self.parts.values())

    @cached_property
    def rows(self) -> Tensor:
        first = next(iter(self.parts.values())).rows
        rows = first.new_zeros(len(first), self.size)
        for (start, stop), part in self.parts.items():
            rows[:, start:stop] = part.rows
        return rows

    def square_norms(self) -> Tensor:
        return _sum_of([part.square_norms() for part in self.parts.values()])

    def absolute_norms(self) -> Tensor:
        return _sum_of([part.absolute_norms() for part in self.parts.values()])

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        # Entries of no part have the gradient 0, so the square of (0 - shift) / scale is all that they add.
        moved = (shift.double() / scale.double()).square()
        squares = []
        for (start, stop), part in self.parts.items():
            squares.append(part.square_distances(shift[start:stop], scale[start:stop], cancels=cancels))
            moved[start:stop] = 0.0
        return _sum_of(squares) + moved.sum()

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        for (start, stop), part in self.parts.items():
            as_measured(part).add_weighted(weights, total[start:stop])

    def take(self, chosen: Tensor | slice) -> "SlicedGrad":
        return self._with(lambda part: as_measured(part).take(chosen))

    def double(self) -> "SlicedGrad":
        return self._with(lambda part: as_measured(part).double())

    def _with(self, change: Callable[[PerExample], PerExample]) -> "SlicedGrad":
        return SlicedGrad({span: change(part) for span, part in self.parts.items()}, self.size)


def _sum_of(parts: list[Tensor]) -> Tensor:
    """The sum of tensors of one shape."""
    return sum(parts[1:], parts[0])
