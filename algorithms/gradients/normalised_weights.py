"""Gradients of weights that a layer uses standardised or normalised, row by row, without pulling each record's back.

A layer of a normaliser-free network uses a weight minus its mean and over its deviation, times a gain; weight
normalisation divides by the length. Both change a row w of the weight matrix, an output's weights, by a map of w alone
that is a(w) w + b(w) 1, where a and b depend on the row's sum and length. So the transposed derivative of the map
multiplies whatever is orthogonal to 1 and w by one number, and maps the plane of 1 and w to itself:

    J^T e = scale (e - Q Q^T e) + Q inner Q^T e,    Q = (1, w) made orthonormal.

The map is the same for all records. A norm |J^T e| then follows from |e| and Q^T e for each row, and the sum of clipped
gradients is J^T of the clipped sum of the e. The numbers are read off three backward passes through the map itself,
which also show whether it is of this kind; norms and sums use the same numbers, so that no error in them, however
large, lets a record contribute more than its bound. Of PyTorch's own batch normalisation and weight normalisation of a
weight they are known in closed form.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

WEIGHTS_AT_ONCE = 2**18
"""Numbers of the weights that backward passes go through together, with a few copies of each."""


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
        matrices = vectors.view(*vectors.shape[:-1], *self.direction.shape)  # [..., rows, width]
        root = math.sqrt(self.direction.shape[1])
        # [2, ..., rows]: Q^T e
        along = torch.stack([matrices.sum(dim=-1) / root, torch.linalg.vecdot(matrices, self.direction)])
        # (inner - scale) Q^T e, as the next line scales all of e
        first, second = self._inner_of(along) - self.scale * along
        mapped = matrices * self.scale[:, None]
        mapped.add_(first[..., None] / root).addcmul_(self.direction, second[..., None])
        return mapped.view(vectors.shape)

    def square_norms(self, products: RowProducts) -> Tensor:
        """Squared norms of the mapped gradients, [batch], with a margin for the rounding of what they follow from."""
        # across: |e|^2 - |Q^T e|^2, [batch, rows]
        along, across = products.along, products.squares - products.along.square().sum(dim=0)
        # scale^2 times what is orthogonal to the plane, plus the mapped plane's, summed over rows: [batch].
        squares = across.clamp_(min=0.0) @ self.scale.square() + self._inner_of(along).square_().sum(
            dim=(0, 2)
        )
        # Squares may cancel where a row lies in the plane, so that their rounding is relative to whole squares.
        lost = rounding(self.direction.shape[1], torch.float64)
        sizes = products.squares @ self.lengthening.square()
        room = lost * sizes.sqrt()
        if products.slack is not None:
            # Slacks of rows are lengths, mapped at most so much longer.
            room = room + torch.linalg.vector_norm(products.slack * self.lengthening, dim=1)
        norms: Tensor = (squares + lost * sizes).sqrt() + room
        return norms.square()

    def _inner_of(self, along: Tensor) -> Tensor:
        """The components of mapped gradients along 1 and the direction, both [2, ..., rows]."""
        first, second = along
        (a, b), (c, d) = self.inner
        return torch.stack([torch.addcmul(a * first, b, second), torch.addcmul(c * first, d, second)])


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
        rows = torch.empty_like(self.of.rows)
        for portion, into in slices(2 * rows.shape[1], self.of.rows, rows):
            into.copy_(self.map.apply(portion.double()))
        return rows

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
        # A map of its own, as it keeps what norms compute of it: parts of a pass have one form before their norms.
        return NormalisedGrad(self.of.take(chosen), replace(self.map))

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
        values = (self.coefficients[:, None] * self.of.products.along).sum(dim=0)  # [batch, rows]
        return values.to(wide(self.of.of.grad_outputs).dtype)

    def take(self, chosen: Tensor | slice) -> "RowFactorGrad":
        return RowFactorGrad(self.of.take(chosen), self.coefficients)

    def double(self) -> "RowFactorGrad":
        return RowFactorGrad(self.of.double(), self.coefficients)


@dataclass(frozen=True)
class _Candidate:
    """A weight that may be computed by a map of its rows, in a graph from a parameter of its size and its factors.

    part: gradients of the weight. end: the weight. weight, factors: names of the parameters.
    """

    part: RowGrad
    end: Tensor
    weight: str
    factors: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.part.grad_rows, self.end.numel() // self.part.grad_rows

    @property
    def names(self) -> tuple[str, ...]:
        return self.weight, *self.factors


def standardised_gradients(
    part: PerExample, weight: Tensor, gain: Tensor | None, eps: float
) -> tuple[PerExample, PerExample, PerExample] | None:
    """Gradients of w and, in gain (w - mean) / deviation + shift, of gain and shift; None if not by these rows.

    part: gradients of the result. weight: w, [rows, width]. gain: [rows], or None for 1. eps: added to the variance.
    """
    if not _is_by_rows_of(part, weight):
        return None
    assert isinstance(part, RowGrad)
    rows, width = weight.shape
    centred = weight.double()
    centred = centred - centred.mean(dim=1, keepdim=True)  # [rows, width]
    length = _length(centred)
    direction = centred.div_(torch.where(length > 0, length, 1.0)[:, None])
    # J^T e = scale (e - u u.e - share d d.e), for u along 1 and the direction d, where share is variance / (variance +
    # eps): what the result's row is along d has the square width * share.
    variance = length.square() / width
    share = variance / (variance + eps)  # below 1 by eps alone, [rows]
    scale = (variance + eps).rsqrt()
    if gain is not None:
        scale = scale * gain.double()
    zeros = torch.zeros_like(scale)
    # 1 goes to 0, and d to scale (1 - share) d
    inner = torch.stack([zeros, zeros, zeros, scale * (1.0 - share)]).view(2, 2, rows)
    of_weight = NormalisedGrad(part, RowMap(scale, direction, inner))
    of_gain = torch.stack([zeros, (width * share).sqrt()])
    # The sum of e is sqrt(width) times its component along 1.
    of_shift = torch.stack([torch.full_like(scale, math.sqrt(width)), zeros])
    return of_weight, RowFactorGrad(of_weight, of_gain), RowFactorGrad(of_weight, of_shift)


def normalised_gradients(
    part: PerExample, weight: Tensor, gain: Tensor
) -> tuple[PerExample, PerExample] | None:
    """Gradients of w and gain in gain w / |w|, by rows; None if `part`, those of the result, are not by these rows.

    weight: w, [rows, width]. gain: [rows].
    """
    if not _is_by_rows_of(part, weight):
        return None
    assert isinstance(part, RowGrad)
    vectors = weight.double()
    length, direction = _length(vectors), _direction_of(vectors)
    # The unit row w / |w| in the plane of 1 and the direction d; J^T e is scale times e without its part along it.
    # [2, rows], components along 1 and d
    unit = torch.stack([vectors.sum(dim=1) / math.sqrt(weight.shape[1]), _dot(vectors, direction)]) / length
    scale = gain.double() / length
    # scale (I - unit unit^T), [2, 2, rows]
    inner = scale * (torch.eye(2, dtype=scale.dtype, device=scale.device)[:, :, None] - unit[:, None] * unit)
    of_weight = NormalisedGrad(part, RowMap(scale, direction, inner))
    return of_weight, RowFactorGrad(of_weight, unit)


def _is_by_rows_of(part: PerExample, weight: Tensor) -> bool:
    """Whether gradients of a weight's map have its rows, in a type that maps are computed for."""
    return isinstance(part, RowGrad) and part.grad_rows == len(weight) and weight.dtype in _TOLERANCE


def pull_back_by_rows(
    ends: Sequence[tuple[PerExample, Tensor]], starts: Mapping[str, Tensor], *, is_asserted: bool = False
) -> list[dict[str, PerExample] | None]:
    """Gradients of the parameters that each weight is computed from, by name; None if its map is of another kind.

    ends: gradients of a weight, and the weight. starts: the parameters, in one graph with the weights. is_asserted:
    whether an operation raises RuntimeError for such a map instead, so that no value is read.
    """
    pulled: list[dict[str, PerExample] | None] = [None] * len(ends)
    names = {id(start): name for name, start in starts.items()}
    candidates: dict[int, _Candidate] = {}
    for i, (part, end) in enumerate(ends):
        if isinstance(part, RowGrad) and (candidate := _candidate(part, end, names, starts)) is not None:
            candidates[i] = candidate
    for group in _groups(candidates):
        of_group = _pull_back([candidates[i] for i in group], starts, is_asserted=is_asserted)
        for i, by_name in zip(group, of_group, strict=True):
            pulled[i] = by_name
    return pulled


def _candidate(
    part: RowGrad, end: Tensor, names: Mapping[int, str], starts: Mapping[str, Tensor]
) -> _Candidate | None:
    """A weight that its graph does not exclude; names: of the parameters, by identity."""
    rows, width = part.grad_rows, end.numel() // part.grad_rows
    if end.dtype not in _TOLERANCE or rows * width != end.numel() or width < 2:
        return None
    of_graph = [names[id(leaf)] for leaf in _leaves_of(end) if id(leaf) in names]
    weights = [name for name in of_graph if starts[name].numel() == end.numel()]
    # A parameter with one number a row is a gain or a shift.
    factors = tuple(name for name in of_graph if starts[name].numel() == rows)
    if len(weights) != 1 or len(factors) + 1 < len(of_graph):
        return None
    return _Candidate(part, end, weights[0], factors)


def _leaves_of(end: Tensor) -> list[Tensor]:
    """The leaves of a tensor's graph."""
    leaves: list[Tensor] = []
    nodes = [] if end.grad_fn is None else [end.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return leaves


def _groups(candidates: Mapping[int, _Candidate]) -> Iterator[list[int]]:
    """The keys of those that backward passes go through together: few numbers, and no parameter in common."""
    group: list[int] = []
    kind, taken, numbers = None, set[str](), 0
    for i, each in candidates.items():
        same = kind == (each.end.dtype, each.end.device) and taken.isdisjoint(each.names)
        if group and not (same and numbers + each.end.numel() <= WEIGHTS_AT_ONCE):
            yield group
            group, taken, numbers = [], set(), 0
        group.append(i)
        kind = each.end.dtype, each.end.device
        taken.update(each.names)
        numbers += each.end.numel()
    if group:
        yield group


def _pull_back(
    group: Sequence[_Candidate], starts: Mapping[str, Tensor], *, is_asserted: bool
) -> list[dict[str, PerExample] | None]:
    """`pull_back_by_rows` for weights without a common parameter."""
    ends, names = [each.end for each in group], [name for each in group for name in each.names]
    inputs = [starts[name] for name in names]

    def back(vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        shaped = [vector.view(end.shape) for vector, end in zip(vectors, ends, strict=True)]
        images = torch.autograd.grad(ends, inputs, shaped, retain_graph=True, materialize_grads=True)
        return dict(zip(names, images, strict=True))

    directions = [_direction_of(starts[each.weight].detach().double().reshape(each.shape)) for each in group]
    along = [direction.to(end.dtype) for direction, end in zip(directions, ends, strict=True)]
    across = [_across(each, direction) for each, direction in zip(group, along, strict=True)]
    ones = [_ones(each) for each in group]
    multiples = [_multiples(rows) for rows in across]
    mixed = [_mix(*parts) for parts in zip(across, ones, along, multiples, strict=True)]
    # Three passes, each for all weights of the group: images of 1, of the direction, of a mix with the rest.
    images = back(ones), back(along), back(mixed)
    of_weights, of_factors = list[list[Tensor]](), list[list[Tensor]]()
    for each, own_multiples in zip(group, multiples, strict=True):
        of_weights.append(_unmix([image[each.weight].reshape(each.shape) for image in images], own_multiples))
        of_factors += [
            _unmix([image[name].reshape(-1, 1) for image in images], own_multiples) for name in each.factors
        ]
    maps = _row_maps(directions, along, across, of_weights, is_asserted=is_asserted)
    factors = [name for each in group for name in each.factors]
    by_factor = dict(zip(factors, _coefficients(of_factors, is_asserted=is_asserted), strict=True))
    return [
        None if row_map is None else _by_name(each, row_map, by_factor)
        for each, row_map in zip(group, maps, strict=True)
    ]


def _by_name(
    candidate: _Candidate, row_map: RowMap, coefficients: Mapping[str, Tensor | None]
) -> dict[str, PerExample] | None:
    """Gradients of a weight's parameters; None if one of them has a derivative of another kind."""
    of_weight = NormalisedGrad(candidate.part, row_map)
    by_name: dict[str, PerExample] = {candidate.weight: of_weight}
    for name in candidate.factors:
        of_factor = coefficients[name]
        if of_factor is None:
            return None
        by_name[name] = RowFactorGrad(of_weight, of_factor)
    return by_name


def _row_maps(
    directions: Sequence[Tensor],
    along: Sequence[Tensor],
    across: Sequence[Tensor],
    images: Sequence[Sequence[Tensor]],
    *,
    is_asserted: bool,
) -> list[RowMap | None]:
    """The maps that take 1 / |1|, the direction, and rows orthogonal to both, to these images; None for no such map.

    along: the directions, in the type of the images. All sequences have an entry for each map.
    """
    counts, parts = [len(direction) for direction in directions], []
    for direction, other, of_map in zip(along, across, images, strict=True):
        stacked = torch.stack([*of_map])
        # Components of two images along 1, [2, rows]
        ones = stacked[:2].sum(dim=2).div_(math.sqrt(direction.shape[1]))
        # [rows] and [3, rows]
        stretch, lengths = _dot(stacked[2], other), torch.linalg.vector_norm(stacked, dim=2)
        parts.append(
            torch.cat([ones, _dot(stacked[:2], direction), stretch[None], lengths, _length(other)[None]])
        )
    # Of all rows of all maps, [9, rows]; `plane` has components along 1, then along the direction, of both images.
    numbers = torch.cat(parts, dim=1).double()
    plane, stretch, squares, length = numbers[:4], numbers[4], numbers[5:8].square(), numbers[8]
    stretch = torch.where(length > 0, stretch / length, 0.0)  # along `other`, of unit length
    # By how much `other` is stretched, of which |other| is the length.
    scale = torch.where(length > 0, stretch / length, 0.0)
    # What an image has besides, by Pythagoras.
    inner = plane.view(2, 2, -1)
    besides = torch.stack([*(squares[:2] - inner.square().sum(dim=0)), squares[2] - stretch.square()])
    besides[2] /= length.square().clamp(min=1.0)
    sizes = inner.square().sum(dim=(0, 1)) + scale.square()
    are_little = _are_little(besides.amax(dim=0), sizes, counts, along[0].dtype)
    scale, are_maps = _decide(are_little, scale, is_asserted=is_asserted)
    parts_of_maps = zip(
        directions, torch.split(scale, counts), torch.split(inner, counts, dim=2), are_maps, strict=True
    )
    return [
        RowMap(its_scale, direction, its_inner) if is_map else None
        for direction, its_scale, its_inner, is_map in parts_of_maps
    ]


def _coefficients(images: Sequence[Sequence[Tensor]], *, is_asserted: bool) -> list[Tensor | None]:
    """What each factor's gradient takes of the components along 1 and the direction, [2, rows]; None if of more."""
    if not images:
        return []
    counts = [of_factor[0].numel() for of_factor in images]
    joined = torch.cat(
        [torch.stack([image.reshape(-1) for image in of_factor]) for of_factor in images], dim=1
    )
    *plane, rest = joined.double()
    coefficients = torch.stack(plane)
    are_little = _are_little(rest.square(), coefficients.square().sum(dim=0), counts, joined.dtype)
    coefficients, are_of_plane = _decide(are_little, coefficients, is_asserted=is_asserted)
    return [
        each if is_of_plane else None
        for each, is_of_plane in zip(torch.split(coefficients, counts, dim=1), are_of_plane, strict=True)
    ]


def _are_little(rests: Tensor, sizes: Tensor, counts: list[int], dtype: torch.dtype) -> Tensor:
    """Whether, for each part of so many rows, squared rests are little beside their rows' sizes; [parts].

    Or beside those of the part's other rows, if that is zero. rests, sizes: [rows].
    """
    of_parts = []
    for part, of_part in zip(torch.split(rests, counts), torch.split(sizes, counts), strict=True):
        # The floor is for rows that the map takes to zero.
        are_little = part <= _TOLERANCE[dtype] ** 2 * (of_part + 1e-6 * of_part.amax())
        of_parts.append(are_little.all())
    return torch.stack(of_parts)


def _decide(are_little: Tensor, numbers: Tensor, *, is_asserted: bool) -> tuple[Tensor, list[bool]]:
    """The numbers that a map by rows has, and for which weights it is one; all if it is asserted.

    Numbers that are asserted follow from the assertion, which thus runs before them.
    """
    if is_asserted:
        message = "a map that is not by rows"
        asserted = torch.ops.aten._functional_assert_async.msg(are_little.all(), message, numbers)
        return asserted, [True] * len(are_little)
    of_parts: list[bool] = are_little.tolist()
    return numbers, of_parts


def _direction_of(weight: Tensor) -> Tensor:
    """The part of each row that is orthogonal to 1, with length 1; a constant row gives zeros."""
    centred = weight - weight.mean(dim=1, keepdim=True)
    length = _length(centred)[:, None]
    return centred.div_(torch.where(length > 0, length, 1.0))


def _across(candidate: _Candidate, along: Tensor) -> Tensor:
    """Rows orthogonal to 1 and to their directions."""
    rows = _random_rows(candidate.shape, candidate.end)
    # Minus their components along the direction.
    return rows.addcmul_(along, _dot(rows, along)[:, None], value=-1.0)


def _multiples(across: Tensor) -> Tensor:
    """Of 1 and of the direction, a random number for each row, about as large as the row; [2, rows].

    Where a map moves one row by another, as one that normalises two rows together, what it does to equal multiples of
    all rows may be what a map by rows does, but not what it does to these.
    """
    numbers = _random(2 * len(across), across.dtype, across.device).view(2, -1)
    return numbers * _length(across)


def _mix(across: Tensor, ones: Tensor, along: Tensor, multiples: Tensor) -> Tensor:
    first, second = multiples[..., None]
    return torch.addcmul(torch.addcmul(across, first, ones), second, along)


def _unmix(images: Sequence[Tensor], multiples: Tensor) -> list[Tensor]:
    """The images of 1, the direction and, by a map by rows, `across`, from those of 1, the direction and the mix."""
    ones, along, mixed = images
    first, second = multiples[..., None]
    return [ones, along, mixed.addcmul(first, ones, value=-1.0).addcmul(second, along, value=-1.0)]


def _ones(candidate: _Candidate) -> Tensor:
    """Rows along 1, of length 1."""
    end, shape = candidate.end, candidate.shape
    return torch.full(shape, 1.0 / math.sqrt(shape[1]), dtype=end.dtype, device=end.device)


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
