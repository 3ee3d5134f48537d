"""Per-example gradients of all parameters of a model, for one physical batch: their norms and clipped sums.

Those of one parameter are in `parameter_gradients`. They are for the barrier alone, since they have no noise yet.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import wide
from algorithms.gradients.clipping import L1, Affine, Box, Clipping, PerLayer, factors, rounding_margin
from algorithms.gradients.normalised_weights import NormalisedGrad, RowFactorGrad
from algorithms.gradients.parameter_gradients import (
    BiasGrad,
    DenseGrad,
    LinearGrad,
    PerExample,
    SlicedGrad,
    as_measured,
)
from algorithms.gradients.patches import in_full_precision
from algorithms.gradients.small_gradients import SmallGradients
from algorithms.gradients.table_gradients import BagGrad, EmbeddingGrad

RecordWeights: TypeAlias = Tensor | dict[str, Tensor]
"""A factor of each record, [batch]; the same for all parameters, or by the name of the parameter. Here `weights` are
always these, never a layer's."""


_KEPT_WITHOUT_PADDING = ("_small", "_whole_norms")
"""Cached properties that do not depend on how many records are padding."""


@dataclass(frozen=True)
class PerExampleGradients:
    """Losses and gradients of some records at one point, from one forward and one backward pass.

    Attributes:
        losses: [batch].
        gradients: by parameter; zero for a parameter without an entry.
        slices: the slice of each parameter in the flat vector.
        layers: the names of each layer's parameters, in the model's order.
        dtype: of the gradients, at least 32 bits.
        padding: the number of extra records at the end of the gradients, which are ignored.

    Example:
        >>> from algorithms.gradients import L2
        >>> gradients = PerExampleGradients.of_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
        >>> [round(norm, 2) for norm in gradients.norms(L2(1.0)).tolist()]
        [5.0, 0.5]
        >>> [round(value, 2) for value in gradients.clipped_sum(L2(1.0)).tolist()]
        [0.9, 1.2]
    """

    losses: Tensor
    gradients: dict[str, PerExample]
    slices: dict[str, slice]
    layers: tuple[tuple[str, ...], ...]
    dtype: torch.dtype
    padding: int = 0

    @staticmethod
    def of_rows(rows: Tensor) -> "PerExampleGradients":
        """Wrap materialised gradients [batch, d] as those of a single parameter."""
        slices, layers = {"": slice(0, rows.shape[1])}, (("",),)
        return PerExampleGradients(
            rows.new_zeros(len(rows)), {"": DenseGrad(rows)}, slices, layers, wide(rows).dtype
        )

    @in_full_precision()
    def norms(self, clipping: Clipping) -> Tensor:
        """The norms that `clipping` bounds, including a margin for rounding; float64, not finite if a gradient is not.

        [batch], or [batch, layers] for per-layer clipping.
        """
        if isinstance(clipping, PerLayer):
            # [batch, layers]
            norms = torch.stack([self._root(names, clipping) for names in self.layers], dim=1)
        elif isinstance(clipping, L1):
            norms = sum((g.absolute_norms() for g in self.gradients.values()), self._zeros())
        elif isinstance(clipping, Box):
            norms = self._widths()
        else:
            norms = self._root(self.slices, clipping)
        return norms[: len(self.losses)] if self.padding else norms

    def finite(self, clipping: Clipping) -> Tensor:
        """Which records have a finite norm, shape [batch]."""
        return all_finite(self.norms(clipping))

    def clipped_sum(self, clipping: Clipping, norms: Tensor | None = None) -> Tensor:
        """The sum of the clipped contributions, shape [d], float64; arguments as in `add_clipped`."""
        total = self._empty_sum()
        self.add_clipped(clipping, total, norms)
        return total

    @in_full_precision()
    def add_clipped(self, clipping: Clipping, total: Tensor, norms: Tensor | None = None) -> None:
        """Add the clipped contributions to a total [d], float64.

        A record whose gradient is not finite contributes zero. norms: the result of `norms`, if it is known already.
        Raises ValueError for per-layer bounds that do not fit.
        """
        self._check(clipping)
        for records, record_norms in self._finite(clipping, norms):
            records._add_weighted(records._record_weights(record_norms, clipping), total, clipping)

    @in_full_precision()
    def add_clipped_if_finite(self, clipping: Clipping, total: Tensor, norms: Tensor | None = None) -> Tensor:
        """`add_clipped` if all norms are finite, and whether they are, []; the host waits for nothing.

        If they are not, the total is spoilt. norms: as in `add_clipped`.
        """
        self._check(clipping)
        if len(self.losses) == 0:
            return torch.ones((), dtype=torch.bool, device=self.losses.device)
        norms = self.norms(clipping) if norms is None else norms
        self._add_weighted(self._record_weights(norms, clipping), total, clipping)
        return norms.amax() < math.inf  # false for NaN, too

    def _check(self, clipping: Clipping) -> None:
        if isinstance(clipping, PerLayer) and len(clipping.norms) != len(self.layers):
            raise ValueError(
                f"per-layer clipping has {len(clipping.norms)} bounds, the model has {len(self.layers)} layers;"
                " give one for each."
            )

    def clipped_parts(
        self, clipping: Clipping, norms: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the sum of the clipped contributions by parameter: its slice, and its part [numel], float64.

        Every parameter has one, in the model's order, even without records. Not for clipping with a shift.
        """
        parts: list[tuple[PerExampleGradients, dict[str, Tensor], dict[str, Tensor]]] = []
        for records, record_norms in self._finite(clipping, norms):
            weights, small = records._record_weights(record_norms, clipping), dict[str, Tensor]()
            if isinstance(weights, Tensor):
                small = records._small_sums(weights)
                weights = dict.fromkeys(self.slices, weights)
            parts.append((records, weights, small))
        for name, span in self.slices.items():
            total = torch.zeros(span.stop - span.start, dtype=torch.float64, device=self.losses.device)
            for records, weights, small in parts:
                if name in small:
                    total += small[name]
                elif name in records.gradients:
                    records._add_weighted_of(name, weights[name], total)
            yield span, total

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum of weight times gradient, weights [batch] -> [d], float64."""
        total = self._empty_sum()
        self._add_weighted(weights, total)
        return total

    def weighted_parts(self, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The result of `weighted_sum` by parameter, [numel] each, for parameters that have gradients."""
        for name in self.gradients:
            span = self.slices[name]
            total = torch.zeros(span.stop - span.start, dtype=torch.float64, device=self.losses.device)
            self._add_weighted_of(name, weights, total)
            yield name, total

    def take(self, chosen: Tensor) -> "PerExampleGradients":
        """The gradients of some records; chosen: their indices."""
        gradients = self._change_each(lambda each: each.take(chosen))
        return replace(self, losses=self.losses[chosen], gradients=gradients, padding=0)

    def parts(self, size: int) -> list[slice]:
        """The rows of `size` records after another, the last ones with their padding.

        Norms and sums of a part materialise its gradients alone. Padding that fills whole parts is left out.
        """
        return [slice(start, min(start + size, self.rows)) for start in range(0, len(self.losses), size)]

    def part(self, rows: slice, gradients: dict[str, PerExample] | None = None) -> "PerExampleGradients":
        """The gradients of such rows; gradients: if they were taken already."""
        losses = self.losses[rows]
        gradients = self._change_each(lambda each: each.take(rows)) if gradients is None else gradients
        return replace(self, losses=losses, gradients=gradients, padding=rows.stop - rows.start - len(losses))

    def _change_each(self, change: Callable[[PerExample], PerExample]) -> dict[str, PerExample]:
        """The gradients of all parameters as they were measured, changed alike.

        A bias is summed with its layer, by which it is known: without it the layer would be rounded in another way. A
        gain uses what was computed of its weight.
        """
        measured = {name: as_measured(each) for name, each in self.gradients.items()}
        changed = {
            id(each): change(each)
            for each in measured.values()
            if not isinstance(each, BiasGrad | RowFactorGrad)
        }

        def changed_beside(each: BiasGrad | RowFactorGrad) -> PerExample:
            of = changed.get(id(each.of))
            if isinstance(each, BiasGrad):
                return BiasGrad(of) if isinstance(of, LinearGrad) else change(each)
            return replace(each, of=of) if isinstance(of, NormalisedGrad) else change(each)

        return {
            name: changed_beside(each) if isinstance(each, BiasGrad | RowFactorGrad) else changed[id(each)]
            for name, each in measured.items()
        }

    def first(self, count: int) -> "PerExampleGradients":
        """The first `count` records; the rest becomes padding, which is computed but ignored.

        This makes a record's results independent of the number of records.
        """
        if count == len(self.losses):
            return self
        padding = len(self.losses) + self.padding - count
        return replace(self, losses=self.losses[:count], padding=padding).with_measured(self.measured)

    @property
    def rows(self) -> int:
        """How many records there are, padding included."""
        return len(self.losses) + self.padding

    @property
    def measured(self) -> dict[str, object]:
        """What norms have left of all records, padding included, for sums to use."""
        return {name: vars(self)[name] for name in _KEPT_WITHOUT_PADDING if name in vars(self)}

    def with_measured(self, measured: dict[str, object]) -> "PerExampleGradients":
        """The same with what `measured` is of the same gradients."""
        same = replace(self)
        vars(same).update(measured)
        return same

    @property
    def materialized_bytes(self) -> int:
        """Bytes of the materialised gradients, after `norms`."""
        each = (
            part
            for gradient in self.gradients.values()
            for part in (
                *((gradient, *gradient.parts.values()) if isinstance(gradient, SlicedGrad) else (gradient,)),
                *((gradient.of,) if isinstance(gradient, NormalisedGrad) else ()),
            )
        )
        materialized = (
            vars(gradient).get(name) for gradient in each for name in ("rows", "_materialized_sums")
        )
        return sum(part.nbytes for part in materialized if part is not None)

    def _finite(
        self, clipping: Clipping, norms: Tensor | None
    ) -> Iterator[tuple["PerExampleGradients", Tensor]]:
        """Yield gradients of finite norms, and the norms; those whose squares overflow in 32 bits come in 64.

        Never those of no records: not every formula takes an empty batch.
        """
        if len(self.losses) == 0:
            return
        norms = self.norms(clipping) if norms is None else norms
        if bool(norms.amax() < math.inf):  # neither infinite nor NaN; one wait for a device
            yield self, norms
            return
        # Squares overflow in 32 bits from gradients of about 1e19 on, which are numbers all the same.
        finite = all_finite(norms)
        # All finite: yields at most once.
        yield from self.take(torch.nonzero(finite)[:, 0])._finite(clipping, norms[finite])
        if self.dtype != torch.float64:
            others = self.take(torch.nonzero(~finite)[:, 0])
            wider = others._change_each(lambda each: each.double())
            yield from replace(others, gradients=wider, dtype=torch.float64)._finite(clipping, None)

    def _record_weights(self, norms: Tensor, clipping: Clipping) -> RecordWeights:
        """The factor of each record, for records of these norms."""
        if not isinstance(clipping, PerLayer):
            return factors(norms, clipping, clipping.sensitivity, self.dtype)
        return {
            name: factors(norms[:, i], clipping, bound, self.dtype)
            for i, (names, bound) in enumerate(zip(self.layers, clipping.norms, strict=True))
            for name in names
        }

    def _zeros(self) -> Tensor:
        count = len(self.losses) + self.padding
        return torch.zeros(count, dtype=torch.float64, device=self.losses.device)  # [batch], padding included

    def _widths(self) -> Tensor:
        """The largest coordinate above 0 plus the largest below, [batch], float64, with a margin for rounding."""
        above, below = self._zeros(), self._zeros()
        for gradient in self.gradients.values():
            rows = gradient.rows
            above = torch.maximum(above, rows.amax(dim=1).double())  # at least 0, as the box has both signs
            below = torch.maximum(below, -rows.amin(dim=1).double())
        return (above + below) * (1.0 + rounding_margin(self.dtype))

    def _root(self, names: Iterable[str], clipping: Clipping) -> Tensor:
        """The L2 norm over some parameters, [batch], float64."""
        # Small parameters are measured together only as parts of the whole gradient, without a map of it.
        if names is not self.slices or isinstance(clipping, Affine):
            return sum((self._squares(name, clipping) for name in names), self._zeros()).sqrt()
        return self._whole_norms

    @cached_property
    def _whole_norms(self) -> Tensor:
        """The L2 norms of whole gradients, padding included, float64."""
        parts = [*self._small.square_norms(), *(self.gradients[name].square_norms() for name in self._others)]
        # Squared norms of disjoint parameters add up to that of the whole vector.
        return (sum(parts[1:], parts[0]) if parts else self._zeros()).sqrt()

    @cached_property
    def _small(self) -> SmallGradients:
        """Those that are processed together, where a clipping treats all alike."""
        return SmallGradients.of(self.gradients, self.slices)

    def _small_sums(self, weights: Tensor) -> dict[str, Tensor]:
        """The weighted sums of the small gradients, [numel] each, float64."""
        names = sorted(self._small.names)
        sizes = [self.slices[name].stop - self.slices[name].start for name in names]
        ends = accumulate(sizes)
        slices = {name: slice(end - size, end) for name, size, end in zip(names, sizes, ends, strict=True)}
        total = torch.zeros(sum(sizes), dtype=torch.float64, device=self.losses.device)
        self._small.add_weighted(weights.double(), total, slices)
        return {name: total[span] for name, span in slices.items()}

    @property
    def _others(self) -> list[str]:
        """The names of those that are processed one by one."""
        return [name for name in self.gradients if name not in self._small.names]

    def _squares(self, name: str, clipping: Clipping) -> Tensor:
        """Squared L2 norms of one parameter's gradients, after the clipping's transformation."""
        gradient = self.gradients.get(name)
        if not isinstance(clipping, Affine):
            return self._zeros() if gradient is None else gradient.square_norms()
        device, span = self.losses.device, self.slices[name]
        shift, scale = clipping.shift[span].to(device), clipping.scale[span].to(device)
        if gradient is None:
            return self._zeros() + (shift.double() / scale.double()).square().sum()
        return gradient.square_distances(shift, scale, cancels=clipping.cancels)

    def _empty_sum(self) -> Tensor:
        size = sum(span.stop - span.start for span in self.slices.values())
        return torch.zeros(size, dtype=torch.float64, device=self.losses.device)

    def _add_weighted(self, weights: RecordWeights, total: Tensor, clipping: Clipping | None = None) -> None:
        """Add the weighted sum of the gradients, as an affine clipping maps them, to a total [d], float64.

        With the same weights for all parameters, small gradients are summed together.
        """
        if isinstance(clipping, Affine) and isinstance(weights, Tensor):
            # sum_i w_i (g_i - a) / b = (sum_i w_i g_i - a sum_i w_i) / b
            moved = torch.zeros_like(total)
            # One by one, as measured: where shift and gradient cancel, another rounding could exceed the bound.
            self._add_weighted(dict.fromkeys(self.gradients, weights), moved)
            moved -= weights.sum().to(total.device) * clipping.shift.double()
            total += moved / clipping.scale.double()
            return
        if isinstance(weights, Tensor):
            if total.device == self.losses.device:
                self._small.add_weighted(weights.double(), total, self.slices)
            else:
                for name, part in self._small_sums(weights).items():
                    total[self.slices[name]] += part.to(total.device)
            weights = dict.fromkeys(self._others, weights)
        added = set()
        # Where the records' weights are the same tensor for both, one product sums a layer's matrix and bias.
        for bias, matrix in (
            self._matrix_of_bias.items() if weights and total.device == self.losses.device else ()
        ):
            if bias in weights and weights[bias] is weights.get(matrix):
                gradient = self._without_padding(self.gradients[bias])
                assert isinstance(gradient, BiasGrad)
                parts_of_layer = total[self.slices[bias]], total[self.slices[matrix]]
                gradient.add_with_matrix(weights[bias].double(), *parts_of_layer)
                added |= {bias, matrix}
        for name, each in weights.items():
            if name in self.gradients and name not in added:
                self._add_weighted_of(name, each, total[self.slices[name]])

    @property
    def _matrix_of_bias(self) -> dict[str, str]:
        """The matrix of each bias's linear layer, by bias, for layers without a sequence: one product sums both."""
        products = {name: as_measured(each) for name, each in self.gradients.items()}
        linear = {id(each): name for name, each in products.items() if isinstance(each, LinearGrad)}
        biases = {name: each.of for name, each in self.gradients.items() if isinstance(each, BiasGrad)}
        return {name: linear[id(of)] for name, of in biases.items() if of.length == 1 and id(of) in linear}

    def _without_padding(self, gradient: PerExample) -> PerExample:
        """The gradients without those of the padding."""
        return gradient.take(slice(0, len(self.losses))) if self.padding else gradient

    def _add_weighted_of(self, name: str, weights: Tensor, total: Tensor) -> None:
        gradient = self._without_padding(as_measured(self.gradients[name]))
        if total.device == self.losses.device:
            gradient.add_weighted(weights.double(), total)
            return
        added = torch.zeros_like(total, device=self.losses.device)  # the sum stays in main memory
        gradient.add_weighted(weights.double(), added)
        total += added.to(total.device)


def all_finite(norms: Tensor) -> Tensor:
    """Which records have finite norms, [batch] or [batch, layers] -> [batch]."""
    return torch.isfinite(norms.sum(dim=1) if norms.dim() > 1 else norms)


def combine(parts: list[PerExample]) -> PerExample:
    """The sum of a parameter's gradients from several uses, in a closed form if there is one."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, LinearGrad) for part in parts):
        # A matrix that is used several times is one layer on a longer sequence: [batch, length_1 + length_2 + ..., p].
        inputs, grad_outputs = (
            [getattr(part, side) for part in parts] for side in ("inputs", "grad_outputs")
        )
        # The outer products of all uses: the gradient is their sum.
        return LinearGrad(torch.cat(inputs, dim=1), torch.cat(grad_outputs, dim=1))
    lookups = [part.lookups if isinstance(part, BagGrad) else part for part in parts]
    if all(isinstance(part, EmbeddingGrad) for part in lookups):
        indices, grad_outputs = (
            [getattr(part, side) for part in lookups] for side in ("indices", "grad_outputs")
        )
        # The lookups of all uses, which are added up by entry later.
        return EmbeddingGrad(torch.cat(indices, dim=1), torch.cat(grad_outputs, dim=1), lookups[0].entries)  # type: ignore[attr-defined]
    if all(isinstance(part, SlicedGrad) for part in parts):
        slices = _by_slice(parts)  # type: ignore[arg-type]
        if _are_disjoint(slices):
            return SlicedGrad({span: combine(of) for span, of in slices.items()}, parts[0].size)  # type: ignore[attr-defined]
    return DenseGrad(reduce(torch.add, [part.rows for part in parts]))


def combine_by_name(
    names: Sequence[str | None], gradients: Iterable[PerExample | None]
) -> dict[str, PerExample] | None:
    """The sums of gradients of factors by the factors' names; None if that of a named one is not known.

    A factor without a name is no parameter, so its gradient is not needed.
    """
    parts: dict[str, list[PerExample]] = {}
    for name, gradient in zip(names, gradients, strict=True):
        if name is None:
            continue
        if gradient is None:
            return None
        parts.setdefault(name, []).append(gradient)
    return {name: combine(of) for name, of in parts.items()}


def _by_slice(parts: list[SlicedGrad]) -> dict[tuple[int, int], list[PerExample]]:
    """The gradients of each slice, from all uses."""
    by_slice: dict[tuple[int, int], list[PerExample]] = {}
    for sliced in parts:
        for span, part in sliced.parts.items():
            by_slice.setdefault(span, []).append(part)
    return by_slice


def _are_disjoint(slices: Iterable[tuple[int, int]]) -> bool:
    ordered = sorted(slices)
    return all(stop <= start for (_, stop), (start, _) in pairwise(ordered))
