"""Gradients of weights that a layer uses standardised or normalised, row by row, without pulling each record's back.

A layer of a normaliser-free network uses a weight minus its mean and over its deviation, times a gain; weight
normalisation divides by the length. Both change a row w of the weight matrix, an output's weights, by a map of w alone
that is a(w) w + b(w) 1, where a and b depend on the row's sum and length. So the transposed derivative of the map
multiplies whatever is orthogonal to 1 and w by one number, and maps the plane of 1 and w to itself:

    J^T e = scale (e - Q Q^T e) + Q inner Q^T e,    Q = (1, w) made orthonormal.

The map is the same for all records. A norm |J^T e| then follows from |e| and Q^T e for each row, and the sum of clipped
gradients is J^T of the clipped sum of the e. The numbers are read off three backward passes through the map itself,
which also show whether it is of this kind; norms and sums use the same numbers, so that no error in them, however
large, lets a record contribute more than its bound.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import rounding, square_norms, wide
from algorithms.gradients.parameter_gradients import (
    FromRows,
    PerExample,
    RowGrad,
    RowProducts,
    as_measured,
    slices,
)

_TOLERANCE = {torch.float32: 3e-3, torch.float64: 1e-6}
"""What a backward pass may give besides, relative to the map: as little as rounding lets one see."""


@dataclass(frozen=True)
class RowMap:
    """The transposed derivative of a map of the rows of a matrix [rows, width], by the formula above; float64.

    Attributes:
        scale: [rows].
        direction: [rows, width], of unit length and orthogonal to 1, or zero for a constant row.
        inner: [2, 2, rows], from the components along 1 and the direction to those of the result.
    """

    scale: Tensor
    direction: Tensor
    inner: Tensor

    @cached_property
    def lengthening(self) -> Tensor:
        """A bound on how much the map lengthens each row, [rows]."""
        return torch.maximum(self.scale.abs(), self.inner.square().sum(dim=(0, 1)).sqrt())

    def apply(self, vectors: Tensor) -> Tensor:
        """The map of vectors [..., rows * width], float64."""
        matrices = vectors.view(*vectors.shape[:-1], *self.direction.shape)
        root = math.sqrt(self.direction.shape[1])
        along = torch.stack([matrices.sum(dim=-1) / root, torch.linalg.vecdot(matrices, self.direction)])
        first, second = self._inner_of(along) - self.scale * along
        mapped = matrices * self.scale[:, None]
        mapped.add_(first[..., None] / root).addcmul_(self.direction, second[..., None])
        return mapped.view(vectors.shape)

    def square_norms(self, products: RowProducts) -> Tensor:
        """Squared norms of the mapped gradients, [batch], with a margin for the rounding of what they follow from."""
        along, across = products.along, (products.squares - products.along.square().sum(dim=0)).clamp(min=0.0)
        squares = (across * self.scale.square()).sum(dim=1) + self._inner_of(along).square().sum(dim=(0, 2))
        # Squares may cancel where a row lies in the plane, so that their rounding is relative to whole squares.
        lost = rounding(self.direction.shape[1], torch.float64)
        sizes = (products.squares * self.lengthening.square()).sum(dim=1)
        room = lost * sizes.sqrt() + torch.linalg.vector_norm(products.slack * self.lengthening, dim=1)
        norms: Tensor = (squares + lost * sizes).sqrt() + room
        return norms.square()

    def _inner_of(self, along: Tensor) -> Tensor:
        """The components of mapped gradients along 1 and the direction, both [2, ..., rows]."""
        (a, b), (c, d) = self.inner
        return torch.stack([a * along[0] + b * along[1], c * along[0] + d * along[1]])


@dataclass(frozen=True)
class NormalisedGrad(FromRows):
    """Gradients of a weight whose map by rows a layer uses; of: those of the mapped weight."""

    of: RowGrad
    map: RowMap

    @property
    def is_materialized(self) -> bool:
        return self.of.is_materialized

    @cached_property
    def rows(self) -> Tensor:
        written = torch.empty_like(self.of.rows)
        for some, into in slices(2 * written.shape[1], self.of.rows, written):
            into.copy_(self.map.apply(some.double()))
        return written

    @cached_property
    def products(self) -> RowProducts:
        """What norms follow from."""
        return self.of.row_products(self.map.direction)

    def square_norms(self) -> Tensor:
        return square_norms(self.rows) if "rows" in vars(self) else self.map.square_norms(self.products)

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        added = torch.zeros_like(total)
        as_measured(self.of).add_weighted(weights, added)
        total.add_(self.map.apply(added))

    def take(self, chosen: Tensor | slice) -> "NormalisedGrad":
        return NormalisedGrad(self.of.take(chosen), self.map)

    def double(self) -> "NormalisedGrad":
        return NormalisedGrad(self.of.double(), self.map)


@dataclass(frozen=True)
class RowFactorGrad(FromRows):
    """Gradients of a parameter with one number for each row, such as a gain; coefficients: [2, rows], of Q^T e."""

    of: NormalisedGrad
    coefficients: Tensor
    is_materialized = True

    @cached_property
    def rows(self) -> Tensor:
        values = (self.coefficients[:, None] * self.of.products.along).sum(dim=0)
        return values.to(wide(self.of.of.grad_outputs).dtype)

    def take(self, chosen: Tensor | slice) -> "RowFactorGrad":
        return RowFactorGrad(self.of.take(chosen), self.coefficients)

    def double(self) -> "RowFactorGrad":
        return RowFactorGrad(self.of.double(), self.coefficients)


def pull_back_by_rows(
    part: RowGrad, end: Tensor, starts: Mapping[str, Tensor]
) -> dict[str, PerExample] | None:
    """Gradients of the parameters that a weight is computed from, by name; None if its map is of another kind.

    part: gradients of the weight. end, starts: the weight and the parameters, in one graph.
    """
    shape = part.grad_rows, end.numel() // part.grad_rows
    if end.dtype not in _TOLERANCE or math.prod(shape) != end.numel() or shape[1] < 2:
        return None

    def back(vectors: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        images = torch.autograd.grad(
            end, list(inputs.values()), vectors.view(end.shape), retain_graph=True, allow_unused=True
        )
        return {name: image for name, image in zip(inputs, images, strict=True) if image is not None}

    ones = torch.full(shape, 1.0 / math.sqrt(shape[1]), dtype=end.dtype, device=end.device)
    of_ones = back(ones, starts)
    weights = [name for name, image in of_ones.items() if image.numel() == end.numel()]
    factors = [name for name, image in of_ones.items() if image.numel() == shape[0]]
    if len(weights) != 1 or len(factors) + 1 < len(of_ones):
        return None
    (weight,), inputs = weights, {name: starts[name] for name in of_ones}
    direction = _direction_of(starts[weight].detach().double().reshape(shape))
    along = direction.to(end.dtype)
    across = _random_rows(shape, end)
    across = across - along * _dot(across, along)[:, None]
    images = of_ones, back(along, inputs), back(across, inputs)
    if any(image.keys() != inputs.keys() for image in images):
        return None
    row_map = _row_map(direction, across, [image[weight].reshape(shape) for image in images])
    if row_map is None:
        return None
    of_weight = NormalisedGrad(part, row_map)
    by_name: dict[str, PerExample] = {weight: of_weight}
    for name in factors:
        *plane, rest = (image[name].reshape(-1) for image in images)
        coefficients = torch.stack(plane).double()
        if not _are_little(rest.double().square(), coefficients.square().sum(dim=0), end.dtype):
            return None
        by_name[name] = RowFactorGrad(of_weight, coefficients)
    return by_name


def _row_map(direction: Tensor, across: Tensor, images: Sequence[Tensor]) -> RowMap | None:
    """The map that takes 1 / |1|, the direction, and rows orthogonal to both, to these images; None if none does."""
    along, root = direction.to(across.dtype), math.sqrt(direction.shape[1])
    # Of the images of 1 / |1| and of the direction, the components along 1 and along the direction: [2, 2, rows].
    components = [(image.sum(dim=1) / root, _dot(image, along)) for image in images[:2]]
    inner = torch.stack([torch.stack(pair) for pair in zip(*components, strict=True)]).double()
    length = _length(across)
    stretch = _dot(images[2], across) / length
    scale = torch.where(length > 0, stretch / length, 0.0).double()
    # What an image has besides, by Pythagoras.
    rests = torch.stack([_length(image) for image in images]).double().square()
    sizes = inner.square()
    rests[:2] -= sizes.sum(dim=0)
    rests[2] = (
        rests[2] - torch.where(length > 0, stretch, 0.0).double().square()
    ) / length.double().square().clamp(min=1.0)
    sizes = sizes.sum(dim=(0, 1)) + scale.square()
    return RowMap(scale, direction, inner) if _are_little(rests, sizes, across.dtype) else None


def _are_little(rests: Tensor, sizes: Tensor, dtype: torch.dtype) -> bool:
    """Whether the squared rest of each row is little beside its size, or beside those of other rows if that is zero."""
    return bool((rests <= _TOLERANCE[dtype] ** 2 * (sizes + 1e-6 * sizes.amax())).all())


def _direction_of(weight: Tensor) -> Tensor:
    """The part of each row that is orthogonal to 1, with length 1; a constant row gives zeros."""
    centred = weight - weight.mean(dim=1, keepdim=True)
    length = _length(centred)[:, None]
    return centred.div_(torch.where(length > 0, length, 1.0))


def _dot(rows: Tensor, others: Tensor) -> Tensor:
    products: Tensor = torch.linalg.vecdot(rows, others)
    return products


def _length(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return lengths


def _random_rows(shape: tuple[int, int], like: Tensor) -> Tensor:
    """Rows whose sum is zero: each a random multiple of the same random numbers."""
    factors, row = (_random(count, like.dtype, like.device) for count in shape)
    return torch.outer(factors, row - row.mean())


@lru_cache
def _random(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers, the same in every process."""
    draw = torch.Generator().manual_seed(count)
    return torch.randn(count, generator=draw, dtype=torch.float64).to(device, dtype)
