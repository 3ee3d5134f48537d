"""Privacy loss distributions: their discretisation, their composition and the epsilon of what was composed.

The loss of a pair (P, Q) of output distributions is L = log P/Q under P. Then delta(e) = E max(0, 1 - exp(e - L)), and
losses of independent (or adaptively chosen, each dominated) releases add up. Three steps lead to an upper bound.

1. `discretise` replaces L by a loss on a grid. A loss inside a cell becomes one of the cell's ends, at random, such
that the mean of exp(-L) there stays the same ("connect the dots", Doroshenko et al. 2022, arXiv:2207.04380). Proof
that no composition becomes cheaper: with all other losses fixed, max(0, 1 - c exp(-L)) is convex in exp(-L), and a
spread that keeps the mean does not lower a convex function's mean (Jensen). One release after the other is replaced.
Losses above the grid become infinite, those below it become its lowest point; both only raise delta. The error is of
second order in the width of a cell.
   Where one epsilon matters, the grid ends at a cap, and the last cell reaches from there to infinity, where exp(-L)
is 0: the same proof holds, since max(0, 1 - c x) is convex on [0, exp(-cap)], too. A loss above the cap becomes the
cap or infinite. Nothing is lost as long as the other losses do not bring the sum down to epsilon again, for then
max(0, 1 - c x) is a line on the whole cell. So losses of 50 that are about as rare as delta need neither points nor
a window of that length beside an epsilon of 0.05, and no tilt makes them heavier than what decides.

2. `GridComposition` convolves by Fourier transforms. Each distribution is first multiplied by exp(tilt * L) and
normalised, which commutes with convolution. With the tilt of a saddle point the mean of the sum lies near the epsilon
that is looked for, so a delta of 1e-15 is as exact as one of 0.1. (A sum without tilt is known to about 1e-16 in all,
which is more than the tail that decides a small delta.)

3. What the numbers lose is added: the norm of the rounding of the transforms is bounded by Higham 2002, Theorem 24.2,
and what it adds to a delta by Cauchy and Schwarz; mass that leaves the window upwards is bounded by Chernoff's bound
and counts as infinite loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import fft, signal

from algorithms.errors import RefusedError

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_UNIT_ROUNDOFF = 2.0**-53
_LOG_ABOVE_WINDOW, _LOG_NEGLIGIBLE = math.log(1e8), math.log(1e7)
"""Logarithms of how rare a tilted sum above the window is, and of how small a part of delta does not matter."""
_LARGEST_EXPONENT = 600.0
_RARE_TAIL, _LARGEST_TILT = 5.0, 1e15
_MIN_MODULUS, _LOG_SURE = 1e-300, math.log(1e-9)
"""The least modulus of a transform, and the logarithm of one that rounding is far below."""
_LOG_NOTHING, _NOTHING = -42.0, math.exp(-40.0)
"""The logarithm of a product that is left out, and a bound on the norm of all that are, which rounding is above."""
_FIRST_CELLS, _FIRST_POINTS, _FIRST_SEARCH_POINTS, _ITERATIONS = 2**16, 2**19, 2**16, 60
_FEW_POINTS, _POINTS_TOGETHER = 2**12, 2**17
_ROOT, _PRODUCTS = 2, 8
"""Of a transform at few frequencies: what a root takes, by what a point of a fast transform does, and how many products
take as long as one."""
FIRST_GRID_ERROR = 5e-5
"""The share of the variance by which a first grid may be off."""
_GRID_ERROR, _MIN_GRID_ERROR, _FAR_ERROR = 2e-5, 2e-8, 0.1
_FEW_KINDS, _ERROR_OF_MANY, _FIRST_OF_MANY, _COARSER, _COARSER_OF_MANY = 8, 6e-5, 1.5e-5, 2.0, 8.0
"""Of more distributions, each of which takes a transform of its own, more is left of a grid's error; their first grid
is so fine that it mostly is the last, and the one that it is compared with is coarser by more."""
_MAX_POINTS, _MAX_SEARCH_POINTS, _LARGEST_GRID = 2**20, 2**17, 2**24
_MIN_REFINEMENT, _MAX_REFINEMENT, _OVERSHOOT, _MAX_WIDENING = 1.5, 8.0, 1.1, 50
_JUMPS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_MIN_TILT, _TILTS, _LOG_INDECISIVE, _LOG_NEVER = (
    1e-9,
    np.geomspace(0.05, 500.0, 20),
    math.log(1e4),
    math.log(1e6),
)
_BELOW, _LOWER_CAPS, _CAP_TILTS = 64, 0.25 ** np.arange(12.0), np.geomspace(1.0, 1e4, 12)
_ABOVE, _ALL_TILTS = np.geomspace(1.0, 1e4, 24), np.geomspace(1e-2, 1e12, 200)
_SHIFTS = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)


@dataclass(frozen=True)
class CellMasses:
    """The masses of a pair between neighbouring edges.

    Attributes:
        p, q: In each cell, of P and of Q, shape [cells].
        p_error, q_error: How far rounding may have moved them, shape [cells].
        below, above: The masses of P and of Q outside all cells.
        slip: How far a loss may lie outside its cell.
    """

    p: Array
    q: Array
    p_error: Array
    q_error: Array
    below: tuple[float, float]
    above: tuple[float, float]
    slip: float = 0.0

    def above_edge(self, edges: Array, first: int) -> tuple[Array, "CellMasses"]:
        """The edges from one on, and the masses between them, with those of the cells before below."""
        p_below, q_below = self.below
        return edges[first:], replace(
            self,
            p=self.p[first:],
            q=self.q[first:],
            p_error=self.p_error[first:],
            q_error=self.q_error[first:],
            below=(p_below + float(self.p[:first].sum()), q_below + float(self.q[:first].sum())),
        )


class PrivacyLoss(Protocol):
    """The distribution of a privacy loss log P/Q."""

    def edges(self, p_tail: float, q_tail: float) -> Array:
        """A few hundred ascending losses; P and Q have at most these masses below the first and above the last."""

    def cells(self, edges: Array) -> CellMasses:
        """The masses between ascending losses, shape [edges]."""


@dataclass(frozen=True)
class PLDPair:
    """The losses of a neighbour with one record less, and of one with one record more."""

    remove: PrivacyLoss
    add: PrivacyLoss

    @property
    def is_symmetric(self) -> bool:
        """Whether both are the same."""
        return self.remove is self.add


@dataclass(frozen=True)
class DiscretePLD:
    """A loss that takes finitely many values.

    Attributes:
        losses: Ascending, shape [k].
        masses: Shape [k].
        infinity_mass: The chance of an infinite loss.
    """

    losses: Array
    masses: Array
    infinity_mass: float

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest finite loss."""
        return float(self.losses[0]), float(self.losses[-1])

    @cached_property
    def logarithms(self) -> Array:
        """The logarithms of the masses, shape [k]; -inf for none."""
        with np.errstate(divide="ignore"):
            return np.log(self.masses)

    def capped(self, cap: float) -> "DiscretePLD":
        """A loss that dominates this one and has no finite value above the cap: each above is split as a cell's are."""
        first = int(np.searchsorted(self.losses, cap, side="right"))
        if first == len(self.losses):
            return self
        above, masses = self.losses[first:] - cap, self.masses[first:]
        return DiscretePLD(
            np.append(self.losses[:first], cap),
            np.append(self.masses[:first], masses @ np.exp(-above)),
            self.infinity_mass - float(masses @ np.expm1(-above)),
        )


def connect_the_dots(edges: Array, cells: CellMasses, *, is_capped: bool = False) -> DiscretePLD:
    """The loss whose values are the edges of cells; see the module's text for why it dominates.

    is_capped: The last cell reaches to infinity; its masses lie above its lower edge, wherever its upper one is.
    """
    # A cell keeps p and q if p = up + down and q = up exp(-upper) + down exp(-lower), with `up` and `down` the masses
    # at its ends. So up = (p - q exp(lower)) / (1 - exp(lower - upper)). Rounding errors all go up, which is a bound.
    # So does what losses lie outside of their cells: put back inside, each grows by at most `slip`, and q falls by
    # at most that share; all then move up by `slip`.
    lower, upper = edges[:-1], np.append(edges[1:-1], math.inf if is_capped else edges[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (cells.q - cells.q_error) * np.exp(lower - cells.slip)  # at most p
    scaled = np.where(np.isfinite(scaled), scaled, 0.0)  # then all of the mass goes up, which is a bound, too
    p, infinity_mass = cells.p + cells.p_error, cells.above[0]
    up = np.clip((p - scaled) / -np.expm1(lower - upper), 0.0, p)
    masses = np.zeros(len(edges))
    masses[1:] += up
    masses[:-1] += p - up
    masses[0] += cells.below[0]
    if is_capped:
        edges, masses, infinity_mass = edges[:-1], masses[:-1], infinity_mass + float(masses[-1])
    # Edges, and the losses at them, are rounded by a few units in the last place.
    slip = cells.slip + 2.0**-49 * max(abs(float(edges[0])), abs(float(edges[-1])))
    return DiscretePLD(edges + slip, masses, infinity_mass)


def _rough_cells(pld: PrivacyLoss, tail: float, low_tail: float) -> tuple[Array, CellMasses]:
    """Edges from where P has at most `low_tail` below to where it has `tail` above, and the masses between them."""
    edges = pld.edges(tail, 1.0)
    cells = pld.cells(edges)
    below = np.append(0.0, np.cumsum(cells.p)) + cells.below[0]
    first = int(np.searchsorted(below, low_tail, side="right")) - 1
    return cells.above_edge(edges, min(max(first, 0), len(edges) - 2))


def discretise(
    pld: PrivacyLoss,
    grid: float,
    tail: float,
    low_tail: float = 0.0,
    decisive: tuple[float, float] | None = None,
    ends: tuple[float, float] | None = None,
) -> tuple[DiscretePLD, Indices]:
    """A loss on points of an equidistant grid that dominates that of a distribution, and the points' indices.

    tail, low_tail: as in `tail_truncation` and `low_tail_truncation`. decisive: as in `PLDSum.decisive_losses`, where
    one epsilon matters. ends: The losses between which the tails leave the rest, where they are known; any two bound.
    """
    if ends is None:
        rough, _ = _rough_cells(pld, tail, low_tail)
        ends = float(rough[0]), float(rough[-1])
    lowest, highest = ends
    low, cap = decisive or (lowest, math.inf)
    _check_points((min(cap, highest) - max(low, lowest)) / grid)
    count = max(1, math.floor((min(cap, highest) - lowest) / grid)) + 1
    indices = np.arange(count + 1)
    if low > lowest:
        indices = _edges_of_cells(count, grid, low - lowest)
    edges = np.asarray(lowest + grid * indices, dtype=np.float64)
    if is_capped := cap < highest:
        edges = np.append(edges, max(highest, float(edges[-1]) + grid))
    points = connect_the_dots(edges, pld.cells(edges), is_capped=is_capped)
    is_used = points.masses > 0  # where a loss takes few values, few points have any
    is_used[[0, -1]] = True
    return DiscretePLD(points.losses[is_used], points.masses[is_used], points.infinity_mass), indices[is_used]


def _check_points(points: float) -> None:
    if not points < _LARGEST_GRID:  # as is also true of what is no number
        raise RefusedError(
            "privacy losses spread over more than {largest} points of a grid, which are not computed; set"
            " {target.epsilon} to less, which takes more noise, or {target.accountant} to rdp; or check the document"
            " that they come from.",
            code="losses_spread_too_far",
            largest=_LARGEST_GRID,
        )


def _edges_of_cells(count: int, grid: float, low: float) -> Indices:
    """Points of a grid that are edges of cells: all above a loss, and further apart the further below it they lie.

    A finer grid makes all cells smaller by its factor, so that the error falls as that of equal cells does.
    """
    first = min(max(math.floor(low / grid), 0), count)
    scale = max(1.0, (count - first) / _BELOW)  # so many points below, cells are two points wide
    steps = math.ceil(math.log1p(first / scale) / math.log1p(1 / scale))
    below = np.ceil(scale * np.expm1(np.arange(1, steps + 1) * math.log1p(1 / scale))).astype(np.int64)
    ascending = np.concatenate([[0], first - below[::-1], np.arange(first, count + 1)]).clip(0)
    return ascending[np.diff(ascending, prepend=-1) > 0]


@dataclass(frozen=True)
class PLDSum:
    """The sum of independent losses: each with the number of times that it occurs."""

    parts: Sequence[tuple[DiscretePLD, int]]

    @property
    def infinity_mass(self) -> float:
        """A bound on the chance that any of them is infinite."""
        each = (count * points.infinity_mass for points, count in self.parts)
        return min(1.0, math.fsum(each) * (1 + 2.0**-40))

    def finite_delta(self, delta: float) -> float:
        """What infinite losses leave of a delta; at least a billionth of it."""
        return max(delta - self.infinity_mass, 1e-9 * delta)

    @property
    def count(self) -> int:
        """The number of losses."""
        return sum(count for _, count in self.parts)

    @cached_property
    def _blocks(self) -> list[tuple[Array, Array, Array]]:
        """Losses and logarithms of masses, shape [distributions, points], and counts; short ones share a block."""
        longest = max(len(points.losses) for points, _ in self.parts)
        together = longest * len(self.parts) <= _POINTS_TOGETHER
        blocks = []
        for parts in [self.parts] if together else [[part] for part in self.parts]:
            losses = np.zeros((len(parts), max(len(points.losses) for points, _ in parts)))
            logarithms = np.full_like(losses, -math.inf)
            for row, (points, _) in enumerate(parts):
                losses[row, : len(points.losses)] = points.losses
                logarithms[row, : len(points.losses)] = points.logarithms
            blocks.append((losses, logarithms, np.array([count for _, count in parts], dtype=np.float64)))
        return blocks

    def cumulant(self, tilt: float) -> tuple[float, float, float]:
        """log E exp(tilt * L) over finite losses, and its first two derivatives."""
        k = mean = variance = 0.0
        for losses, logarithms, counts in self._blocks:
            exponents = logarithms + tilt * losses
            largest = exponents.max(axis=1)
            weights = np.exp(exponents - largest[:, None])
            totals = weights.sum(axis=1)
            means = (weights * losses).sum(axis=1) / totals
            variances = (weights * np.square(losses - means[:, None])).sum(axis=1) / totals
            k += float(counts @ (largest + np.log(totals)))
            mean, variance = mean + float(counts @ means), variance + float(counts @ variances)
        return k, mean, variance

    def log_moments(self, tilts: Array) -> Array:
        """log E exp(tilt * L) over finite losses at each tilt, shape [tilts]."""
        moments = np.zeros(len(tilts))
        for losses, logarithms, counts in self._blocks:
            for at, tilt in enumerate(tilts):
                exponents = logarithms + tilt * losses
                largest = exponents.max(axis=1)
                totals = np.exp(exponents - largest[:, None]).sum(axis=1)
                moments[at] += counts @ (largest + np.log(totals))
        return moments

    @property
    def delta_at_0(self) -> float:
        """A bound on delta at epsilon 0, where those of the losses add up."""
        every = [(points.masses @ -np.expm1(-np.maximum(points.losses, 0.0)), n) for points, n in self.parts]
        return self.infinity_mass + math.fsum(count * float(one) for one, count in every) * (1 + 2.0**-40)

    def saddle_point(self, delta: float) -> tuple[float, float]:
        """An estimate of epsilon, and the tilt under which the mean of the sum is this estimate.

        delta is about exp(K - tilt e) / (tilt (1 + tilt) sqrt(2 pi K'')) at e = K'(tilt), the lattice left aside.
        """
        if self.delta_at_0 <= delta:
            return 0.0, 0.0
        log_target = -math.log(self.finite_delta(delta))
        variance = self.cumulant(0.0)[2]
        low, high, tilt = 0.0, math.inf, math.sqrt(2 * log_target / variance) if variance > 0 else 0.0
        for _ in range(_ITERATIONS):  # Newton's method, inside a bracket
            k, mean, variance = self.cumulant(tilt)
            # How far -log(delta), estimated at this tilt, is below the one looked for; it rises by tilt * variance per
            # tilt.
            missing = log_target - (tilt * mean - k)
            missing -= math.log(max(1.0, tilt * (1 + tilt) * math.sqrt(2 * math.pi * variance)))
            low, high = (tilt, high) if missing > 0 else (low, tilt)
            if abs(missing) < 1e-2 * log_target or tilt > _LARGEST_TILT:
                break
            step = tilt + missing / (tilt * variance) if variance > 0 else 0.0
            if not max(low, tilt / 4) < step < min(high, 4 * tilt):
                step = 4 * tilt if high == math.inf else max((low + high) / 2, high / 4)
            tilt = step
        return max(0.0, self.cumulant(tilt)[1]), tilt

    def tail_tilt(self, delta: float) -> float:
        """The least tilt that brings the tail of this size well above rounding: more makes heavy tails long."""
        epsilon, max_tilt = self.saddle_point(delta)
        tilts = max_tilt * np.linspace(0.3, 1.0, 15)
        usual = -math.log(delta) / epsilon if epsilon > 0 else max_tilt
        if usual < tilts[0]:  # near the largest loss there is, where the saddle point's tilt has no limit
            tilts = np.append(np.geomspace(usual / 10, tilts[0], 30), tilts)
        bounds = self.log_moments(tilts) - tilts * epsilon
        enough = max(math.log(self.finite_delta(delta)) + 3.0, float(bounds.min()) + 1.0)
        return float(tilts[np.argmax(bounds <= enough)])

    def tail_bound(self, delta: float, tilts: Array) -> float:
        """An epsilon with at most this delta, by Chernoff: delta(e) <= P(L > e) <= exp(K(t) - t e) at each tilt t.

        Infinite where an infinite loss is likelier. Each log moment is rounded, as often as its loss occurs, and at
        large tilts in proportion to the losses.
        """
        if self.infinity_mass >= delta * (1 - 2.0**-40):
            return math.inf
        log_moments = self.log_moments(tilts) + self.count * 2.0**-40
        bounds = (log_moments - math.log(delta - self.infinity_mass)) / tilts
        return max(0.0, float(bounds.min())) * (1 + 2.0**-40)

    def capped(self, cap: float) -> "PLDSum":
        """The sum of losses none of which has a finite value above the cap (see `DiscretePLD.capped`)."""
        return PLDSum([(points.capped(cap), count) for points, count in self.parts])

    def cap(self, delta: float) -> float:
        """A loss above which all cost as much as infinite ones at this delta; infinite where few losses are far above.

        Far losses spoil Chernoff's bound, however rare they are, so that it is taken under ever lower caps.
        """
        highest = max(float(points.losses[-1]) for points, _ in self.parts)
        if not highest > 0:
            return math.inf
        epsilon, log_inverse = math.inf, -math.log(delta)
        for cap in highest * _LOWER_CAPS:
            bound = self.capped(float(cap)).tail_bound(delta, log_inverse / cap * _CAP_TILTS)
            if bound >= epsilon:
                break
            epsilon = bound
        if not 0 < epsilon < highest / 2:
            return math.inf
        cap = epsilon - self._low_end(log_inverse / epsilon * _TILTS)
        return cap if cap < highest / 2 else math.inf

    def _low_end(self, tilts: Array) -> float:
        """What the sum is below with a chance of at most one in a million, by Chernoff's bound at these tilts."""
        return -float(np.min((self.log_moments(-tilts) + _LOG_NEVER) / tilts))

    def decisive_losses(self, epsilon: float, delta: float) -> tuple[float, float]:
        """Between which losses a single one decides how much of the sum is above epsilon.

        Above them the sum is above epsilon with next to any others, below them with next to none (Chernoff's bound);
        max(0, 1 - exp(epsilon - loss)) is then a line in exp(-loss), which a cell of any width keeps.
        """
        tilts = max(self.tail_tilt(delta), _MIN_TILT) * _TILTS
        rarity = _LOG_INDECISIVE - math.log(self.finite_delta(delta))
        highest = float(np.min((self.log_moments(tilts) + rarity) / tilts))
        return epsilon - highest, epsilon - self._low_end(tilts)


def sketch(plds: Sequence[tuple[PrivacyLoss, int]], tail: float, low_tail: float = 0.0) -> PLDSum:
    """A sum of a few hundred points a distribution, for bounds and for the choice of a grid."""
    every = []
    for pld, count in plds:
        edges, cells = _rough_cells(pld, tail, low_tail)
        every.append((connect_the_dots(edges, cells), count))
    return PLDSum(every)


class GridComposition:
    """The sum of independent losses on one grid, whose deltas are upper bounds.

    Args:
        plds: Each with the number of times that it occurs.
        grid: The width of a cell.
        delta: The delta that matters: less than a millionth of it is given to tails.
        rough: The sum of a few hundred points a distribution, where it is known.
        decisive: The losses that decide, where delta alone matters: those above are capped.
    """

    def __init__(
        self,
        plds: Sequence[tuple[PrivacyLoss, int]],
        grid: float,
        delta: float,
        rough: PLDSum | None = None,
        decisive: tuple[float, float] | None = None,
    ) -> None:
        tail, low_tail = tail_truncation(plds, delta), low_tail_truncation(plds)
        self._grid, self._size = grid, 0
        ends = [points.ends for points, _ in rough.parts] if rough else [None] * len(plds)
        every = [
            discretise(pld, grid, tail, low_tail, decisive, known)
            for (pld, _), known in zip(plds, ends, strict=True)
        ]
        self._exact = PLDSum([(points, count) for (points, _), (_, count) in zip(every, plds, strict=True)])
        self._indices = [indices for _, indices in every]
        # A grid of few points may be so coarse that its losses spread further than the distributions do.
        lengths = [len(points.losses) for points, _ in self._exact.parts]
        is_small = max(lengths) <= _FEW_POINTS and sum(lengths) <= 16 * _FEW_POINTS
        self._rough = self._exact
        if not is_small:
            self._rough = (rough or sketch(plds, tail, low_tail)).capped(
                decisive[1] if decisive else math.inf
            )

    @property
    def points(self) -> int:
        """The size of the largest array that was needed."""
        return max(self._size, *(len(points.losses) for points, _ in self._exact.parts))

    @property
    def infinity_mass(self) -> float:
        """A bound on the chance of an infinite loss, on any grid."""
        return self._exact.infinity_mass

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at which delta is known to be at most this one."""
        if min(self._rough.delta_at_0, self._exact.delta_at_0) <= delta:
            return 0.0
        tilt, widening = self._rough.tail_tilt(delta), 0
        while True:
            tail = self._tilted_tail(tilt, delta, widening)
            epsilon = tail.epsilon(delta)
            # Where losses take few values, epsilon may lie in a gap below the window, unless that holds all losses.
            is_whole = float(tail.losses[0]) <= self._lowest
            if epsilon > tail.lowest or is_whole or widening > _MAX_WIDENING or self._size > _MAX_POINTS:
                return epsilon
            widening = 4 * widening + 1

    @property
    def _lowest(self) -> float:
        """The lowest sum."""
        return math.fsum(count * float(points.losses[0]) for points, count in self._exact.parts)

    def deltas(self, epsilons: Array, min_delta: float) -> Array:
        """Bounds on delta at each epsilon, close where delta is at least `min_delta`, shape [epsilons]."""
        best = np.minimum(1.0, self._tilted_tail(0.0, 0.5).deltas(epsilons))
        for delta in np.geomspace(0.5, min_delta, max(2, math.ceil(-math.log10(min_delta) / 2))):
            tail = self._tilted_tail(self._rough.tail_tilt(float(delta)), float(delta))
            best = np.minimum(best, tail.deltas(epsilons))
            if best.min(initial=1.0) >= delta:  # tails for less would not be closer
                break
        return best

    def _tilted_tail(self, tilt: float, delta: float, widening: int = 0) -> "_Tail":
        """The upper tail, from the transforms of the tilted losses; widening: adds so many lengths below."""
        grid, parts = self._grid, self._exact.parts
        low, high, shift = self._window(tilt, delta)
        lowest = self._lowest
        low = max(lowest, low - widening * (high - low))
        _check_points((high - low) / grid)
        size = fft.next_fast_len(max(8, math.ceil((high - low) / grid) + 2), real=True)
        self._size = max(self._size, size)
        product = _Product.of(parts, self._indices, tilt, size)
        sums, error = product.sums(), product.error_norm()
        # Tilted masses are each off by a few units in the last place, as many times as they are multiplied.
        rounding = 1 + 64 * _UNIT_ROUNDOFF * sum(product.counts)
        sums, error = np.maximum(sums, 0.0) * rounding, error * rounding
        # The point with circular index i has the loss lowest + grid * (index + i), for i around 0.
        first = math.floor((low - lowest) / grid) - product.index
        sums = np.roll(sums, -(first % size))
        losses = lowest + grid * (product.index + first + np.arange(size))
        # Chernoff: P(L > l) <= exp(K(t) - t l). What may lie above the window counts as an infinite loss.
        k, _, _ = self._exact.cumulant(tilt + shift)
        top = math.fsum(count * float(points.losses[-1]) for points, count in parts)
        beyond = math.exp(min(0.0, k - (tilt + shift) * float(losses[-1]))) if losses[-1] < top else 0.0
        return _Tail(losses, sums, error, tilt, product.log_moment, grid, self._exact.infinity_mass + beyond)

    def _window(self, tilt: float, delta: float) -> tuple[float, float, float]:
        """Where nearly all of the tilted sum lies, and a further tilt with which Chernoff's bound says so.

        What lies below comes back at the top, where it has to count for next to nothing.
        """
        k, mean, variance = self._rough.cumulant(tilt)
        log_delta = math.log(self._exact.finite_delta(delta))
        ends = [math.fsum(n * float(p.losses[at]) for p, n in self._exact.parts) for at in (0, -1)]
        if variance <= 0:
            return ends[0], ends[1] + self._grid, 1.0

        def top(sums: PLDSum, shifts: Array, log_rarity: float) -> tuple[float, float]:
            tops = (sums.log_moments(tilt + shifts) - sums.cumulant(tilt)[0] + log_rarity) / shifts
            at = int(np.argmin(tops))
            return min((float(tops[at]), float(shifts[at])), (ends[1] + self._grid, 1.0))

        usual, log_rarity = math.sqrt(2 * _LOG_ABOVE_WINDOW / variance) * np.array(_SHIFTS), _LOG_ABOVE_WINDOW
        for _ in range(2):  # the second time with what the first leaves above of delta
            high, best = top(self._rough, usual * math.sqrt(log_rarity / _LOG_ABOVE_WINDOW), log_rarity)
            if (longest := max(float(points.losses[-1]) for points, _ in self._rough.parts)) > 0:
                # Where rare large losses decide, the sum is not normal, and the window would be far too wide.
                jumped, shift = top(self._rough, np.array(_JUMPS) / longest, log_rarity)
                if jumped - mean < (high - mean) / 2:
                    high, best = min((high, best), top(self._exact, np.array([shift]), log_rarity))
            log_rarity = max(_LOG_ABOVE_WINDOW, k - tilt * high - log_delta + _LOG_NEGLIGIBLE)
        log_rarity = max(_RARE_TAIL, k - tilt * high - log_delta + _LOG_NEGLIGIBLE)
        shifts = np.append(usual * math.sqrt(log_rarity / _LOG_ABOVE_WINDOW), tilt * np.array(_SHIFTS))
        shifts = shifts[shifts > 0]
        bottoms = (k - self._rough.log_moments(tilt - shifts) - log_rarity) / shifts
        low = max(ends[0], float(bottoms.max()))
        return low, high, best


def _fold(masses: Array, indices: Indices, size: int) -> Array:
    """Masses on a circle of this size."""
    return np.bincount(indices % size, weights=masses, minlength=size).astype(np.float64)


def _fast_unit(size: int) -> float:
    """How far a fast transform of this size may be off, relative to the masses."""
    return 8 * _UNIT_ROUNDOFF * math.log2(size)


def _transform_at(
    frequencies: Indices, masses: Array, indices: Indices, size: int
) -> tuple[NDArray[np.complex128], float]:
    """The transform of masses at points of a circle, less their sum, and how far it may be off, relative to that.

    At few frequencies it is added up term by term: each part of a sum of n terms is off by n units, each root by a few.
    A frequency is b k + l for l below b, so that each term's root is one of few that are computed times another.
    """
    total, count = float(masses.sum()), int(frequencies[-1]) + 1
    b = math.isqrt(count - 1) + 1
    rows = -(-count // b)
    if (_ROOT * (b + rows) + count // _PRODUCTS) * len(masses) > size:
        return fft.rfft(_fold(masses, indices, size))[frequencies] - total, _fast_unit(size)
    points = indices % size
    low, high = (
        np.exp(-2j * math.pi / size * (np.outer(factors, points) % size))
        for factors in (np.arange(b), b * np.arange(rows))
    )
    sums = ((high * masses) @ low.T).ravel()[frequencies]
    return sums - total, (2 * len(masses) + 128) * _UNIT_ROUNDOFF


def _tilt(points: DiscretePLD, tilt: float) -> tuple[Array, float]:
    """The masses times exp(tilt * loss), divided by their sum, and the logarithm of that sum."""
    exponents = points.logarithms + tilt * points.losses
    largest = float(exponents.max())  # taken out, so that nothing overflows
    weights = np.exp(exponents - largest)
    total = float(weights.sum())
    weights /= total
    return weights, largest + math.log(total)


@dataclass(frozen=True)
class _TiltedPart:
    """A tilted loss that is summed so often.

    Attributes:
        rest: The masses beside the likeliest, the centre, whose transform is its mass, exactly; [points].
        offsets: Of the points from the centre, in steps of the grid, [points].
        centre: Its index on the grid.
    """

    count: int
    rest: Array
    offsets: Indices
    centre: int
    log_total: float


def _tilted_parts(
    parts: Sequence[tuple[DiscretePLD, int]], positions: Sequence[Indices], tilt: float
) -> list[_TiltedPart]:
    """All parts; those whose transforms leave the fewest frequencies come first."""
    tilted = []
    for (points, count), indices in zip(parts, positions, strict=True):
        rest, log_total = _tilt(points, tilt)
        at = int(np.argmax(rest))
        rest[at] = 0.0
        tilted.append(_TiltedPart(count, rest, indices - indices[at], int(indices[at]), log_total))
    return sorted(
        tilted, key=lambda part: -part.count * float(part.rest @ np.square(part.offsets, dtype=float))
    )


def _log_modulus_of_1_plus(x: NDArray[np.complex128], modulus: Array) -> Array:
    """log |1 + x|, also for small x; modulus: |x|."""
    is_small, logs = modulus < 0.25, np.empty_like(modulus)
    small, large = x[is_small], x[~is_small]
    logs[is_small] = np.log1p(2 * small.real + np.square(modulus[is_small])) / 2
    logs[~is_small] = np.log(np.maximum(np.abs(1 + large), _MIN_MODULUS))
    return logs


@dataclass(frozen=True)
class _Product:
    """The transform of a sum of tilted losses, which is the product of the parts' transforms to their counts.

    Attributes:
        size: Of the circular grid, in points.
        counts: Of each part, how often it is summed.
        frequencies: Those of the half spectrum where the product is not negligible, [m]; the arrays below are there.
        log_modulus: Logarithm of the product's modulus, [m].
        argument: Its argument, [m].
        conditioning: By how many units roundoff a power may be off, relative to the product, [m].
        log_moduli: Logarithm of the modulus of each part's transform, [m] each.
        units: By how much each value of a part's transform may be off, relative to its norm.
        norms: The mass of each part beside its centre, to which the rounding of its transform is relative.
        log_moment: Logarithm of the tilted mass, by which the parts are normalised.
        index: The point that the circular grid begins at, in steps of the grid from the lowest loss.
    """

    size: int
    counts: list[int]
    frequencies: Indices
    log_modulus: Array
    argument: Array
    conditioning: Array
    log_moduli: list[Array]
    units: list[float]
    norms: list[float]
    log_moment: float
    index: int

    @classmethod
    def of(
        cls,
        parts: Sequence[tuple[DiscretePLD, int]],
        positions: Sequence[Indices],
        tilt: float,
        size: int,
    ) -> "_Product":
        """The product for parts that are each summed so often, on a circular grid of so many points.

        positions: of each part's losses on the grid, from its lowest.
        """
        frequencies = np.arange(size // 2 + 1)
        log_product, argument, conditioning, log_bound = np.zeros((4, size // 2 + 1))
        log_moduli: list[Array] = []
        units, norms = [], []
        tilted = _tilted_parts(parts, positions, tilt)
        for part in tilted:
            count = part.count
            x, unit = _transform_at(frequencies, part.rest, part.offsets, size)
            # Powers by logarithms of modulus and argument: (1 + x)^count neither overflows nor loses a small x.
            modulus = np.abs(x)
            log_modulus = _log_modulus_of_1_plus(x, modulus)
            log_product = log_product + count * log_modulus
            angle = np.arctan2(x.imag, 1 + x.real)
            argument = argument + count * angle
            conditioning = conditioning + count * (np.abs(log_modulus) + np.abs(angle) + modulus)
            log_moduli.append(log_modulus)
            units.append(unit)
            norms.append(float(part.rest.sum()))
            # Where the product is nothing, as it mostly is, it need not be computed. A factor that is nearly 0 may be
            # so by rounding alone, so it counts as no less than what is sure.
            log_bound = log_bound + count * np.maximum(log_modulus, _LOG_SURE)
            is_large = log_bound > _LOG_NOTHING
            if is_large.mean() < 0.5:
                frequencies, log_product, argument, conditioning, log_bound, *log_moduli = (
                    array[is_large]
                    for array in (frequencies, log_product, argument, conditioning, log_bound, *log_moduli)
                )
        return cls(
            size,
            [part.count for part in tilted],
            frequencies,
            log_product,
            argument,
            conditioning,
            log_moduli,
            units,
            norms,
            math.fsum(part.count * part.log_total for part in tilted),
            sum(part.count * part.centre for part in tilted),
        )

    def sums(self) -> Array:
        """The probabilities of the sums, [size], with rounding."""
        transform = np.zeros(self.size // 2 + 1, dtype=np.complex128)
        transform[self.frequencies] = np.exp(self.log_modulus) * np.exp(1j * self.argument)
        return np.asarray(fft.irfft(transform, self.size))

    def error_norm(self) -> float:
        """What transforms and powers lose at most, as the norm of the error of `sums`."""
        product = np.exp(self.log_modulus)
        # Parseval for half a spectrum: the norm of the sums is at most sqrt(2 / size) times that of the half.
        root = math.sqrt(2 / self.size)
        error = _fast_unit(self.size) * root * float(np.linalg.norm(product))
        error += (
            8 * _UNIT_ROUNDOFF * root * float(np.linalg.norm((1 + self.conditioning) * product)) + _NOTHING
        )
        for log_modulus, count, unit, norm in zip(
            self.log_moduli, self.counts, self.units, self.norms, strict=True
        ):
            # The power's derivative, count * transform^(count - 1), times what the transform is off by.
            others = np.exp(self.log_modulus - log_modulus)
            error += 2 * count * unit * norm * root * float(np.linalg.norm(others))
        return error


@dataclass(frozen=True)
class _Tail:
    """A tilted sum: the mass at losses[i] is sums[i] exp(log_moment - tilt losses[i]).

    error: A bound on the norm of the error of the sums.
    """

    losses: Array
    sums: Array
    error: float
    tilt: float
    log_moment: float
    grid: float
    infinity_mass: float

    @cached_property
    def _hockey_stick(self) -> tuple[Array, Array]:
        """Losses and the deltas at them.

        With A_k the mass above point k, delta_k = exp(-grid) delta_(k+1) + (1 - exp(-grid)) A_k: nothing cancels.
        Errors of the sums count with weights w_j = exp(-tilt grid j) (1 - exp(-grid j)) for the j-th point above k, so
        that together they are at most their norm times that of the weights (Cauchy and Schwarz).
        """
        middle = float(self.losses[int(np.argmax(self.sums))])
        relative = self.losses - middle
        inside = self.tilt * relative > -_LARGEST_EXPONENT
        losses, relative = self.losses[inside], relative[inside]
        masses = self.sums[inside] * np.exp(-self.tilt * relative)
        above = np.append(np.cumsum(masses[::-1])[::-1][1:], 0.0)
        step = -math.expm1(-self.grid)
        sticks = signal.lfilter([step], [1.0, step - 1.0], above[::-1])[::-1]
        weights = np.sqrt(np.minimum(self._squared_weights, np.arange(len(losses), 0.0, -1.0)))
        sticks = sticks + self.error * np.exp(-self.tilt * relative) * weights
        scale = self.log_moment - self.tilt * middle
        rounding = (
            1
            + 8 * _UNIT_ROUNDOFF * len(losses)
            + 16 * _UNIT_ROUNDOFF * (abs(scale) + abs(self.tilt * middle))
        )
        with np.errstate(over="ignore", invalid="ignore"):
            deltas = np.nan_to_num(sticks * rounding * math.exp(min(scale, 700.0)), nan=1.0, posinf=1.0)
        return losses, deltas + self.infinity_mass

    @property
    def lowest(self) -> float:
        """The lowest loss whose delta is known."""
        return float(self._hockey_stick[0][0])

    @property
    def _squared_weights(self) -> float:
        """A bound on the sum of w_j^2, from w_j at most exp(-tilt grid j) and at most that times grid j."""
        ratio, rest = math.exp(-2 * self.tilt * self.grid), -math.expm1(-2 * self.tilt * self.grid)
        return min(ratio / rest, self.grid**2 * ratio * (1 + ratio) / rest**3) if rest > 0 else math.inf

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon with at most this delta; infinite where none has."""
        losses, deltas = self._hockey_stick
        if deltas[-1] > delta:
            return math.inf
        first = int(np.argmax(deltas <= delta))
        if first == 0:
            return max(0.0, float(losses[0]))
        # Between two points delta is linear in exp(epsilon), since the loss has no value there.
        share = (deltas[first - 1] - delta) / (deltas[first - 1] - deltas[first])
        within = math.log1p(share * math.expm1(self.grid)) if self.grid < _LARGEST_EXPONENT else self.grid
        return max(0.0, float(losses[first - 1] + within))

    def deltas(self, epsilons: Array) -> Array:
        """Bounds on delta, shape [epsilons].

        delta is convex in exp(epsilon) and at most 1 at 0, which bounds it below the window.
        """
        losses, deltas = self._hockey_stick
        after = np.searchsorted(losses, epsilons, side="right")
        is_inside = (after > 0) & (after < len(losses))
        at = np.clip(after, 1, len(losses) - 1)
        above = np.clip(epsilons - losses[at - 1], 0.0, self.grid)
        share = np.exp(above - self.grid) * np.expm1(-above) / math.expm1(-self.grid)
        between = deltas[at - 1] + np.clip(share, 0.0, 1.0) * (deltas[at] - deltas[at - 1])
        before = 1.0 - np.exp(np.minimum(epsilons - losses[0], 0.0)) * (1.0 - min(1.0, float(deltas[0])))
        outside = np.where(after == 0, before, self.infinity_mass)
        return np.where(is_inside, np.minimum(between, 1.0), outside)


def tail_truncation(plds: Sequence[tuple[PrivacyLoss, int]], delta: float) -> float:
    """Tail mass that is truncated per release, so that all releases together truncate a millionth of delta."""
    return max(1e-300, 1e-6 * delta / sum(count for _, count in plds))


def low_tail_truncation(plds: Sequence[tuple[PrivacyLoss, int]]) -> float:
    """Low tail mass per release whose loss is raised to the lowest one; of all releases together, one in a million."""
    return 1e-6 / sum(count for _, count in plds)


class ComposedPLD:
    """The loss of releases together, for a record less and for a record more.

    Args:
        pairs: Each with the number of times that it occurs; at least one.
        delta: The least delta that matters.
        grid: The width of a cell; by default as wide as accuracy allows, for each side by itself.
    """

    def __init__(self, pairs: Sequence[tuple[PLDPair, int]], delta: float, grid: float | None = None) -> None:
        self._delta = delta
        self._sides = []
        for plds in sides_of(pairs):
            rough = sketch(plds, tail_truncation(plds, delta), low_tail_truncation(plds))
            width = grid or coarse_grid(plds, delta, FIRST_GRID_ERROR, rough)[0]
            self._sides.append(GridComposition(plds, width, delta, rough))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at which delta is known to be at most this one."""
        return max(side.epsilon(delta) for side in self._sides)

    def deltas(self, epsilons: Array) -> Array:
        """Bounds on delta at epsilons of any sign, shape [epsilons]."""
        every: Array = np.max(self.deltas_of_sides(epsilons), axis=0)
        return every

    def deltas_of_sides(self, epsilons: Array) -> tuple[Array, Array]:
        """The same for a record less and for a record more."""
        each = [side.deltas(np.asarray(epsilons, dtype=np.float64), self._delta) for side in self._sides]
        return each[0], each[-1]


def sides_of(pairs: Sequence[tuple[PLDPair, int]]) -> list[list[tuple[PrivacyLoss, int]]]:
    """The distributions for a record less, and those for a record more where these are others."""
    remove = [(pair.remove, count) for pair, count in pairs]
    if all(pair.is_symmetric for pair, _ in pairs):
        return [remove]
    return [remove, [(pair.add, count) for pair, count in pairs]]


def coarse_grid(
    plds: Sequence[tuple[PrivacyLoss, int]],
    delta: float,
    error: float,
    rough: PLDSum | None = None,
    *,
    max_points: int = _FIRST_POINTS,
) -> tuple[float, float]:
    """A grid whose cells add about twice this share to the variance of the losses, and an estimate of epsilon.

    A cell adds about a sixth of its squared width to the variance of each release, if losses spread over many cells.
    Where rare large losses make nearly all of the variance, delta still falls by a factor e over a length of about
    epsilon / log(1 / delta), which cells have to resolve.
    """
    rough = rough or sketch(plds, tail_truncation(plds, delta), low_tail_truncation(plds))
    epsilon, tilt = rough.saddle_point(delta)
    longest = max(float(points.losses[-1] - points.losses[0]) for points, _ in rough.parts)
    square = rough.cumulant(tilt)[2] / rough.count
    if epsilon > 0:
        square = min(square, epsilon**2 / -math.log(delta))
    width = math.sqrt(12 * error * square)
    return max(width, longest / _FIRST_CELLS, epsilon / max_points) or 1.0, epsilon


def epsilon_on_grid(
    plds: Sequence[tuple[PrivacyLoss, int]], delta: float, grid: float, *, floor: float = 0.0
) -> float:
    """The epsilon that a grid of this width states; the floor where it is known to be no more."""
    rough = sketch(plds, tail_truncation(plds, delta), low_tail_truncation(plds))
    if floor > 0 and rough.tail_bound(delta, -math.log(delta) / floor * _ABOVE) <= floor:
        return floor
    cap = rough.cap(delta)
    capped = rough.capped(cap)
    low, _ = capped.decisive_losses(capped.saddle_point(delta)[0], delta)
    return GridComposition(plds, grid, delta, rough, (low, cap)).epsilon(delta)


def epsilon_of(
    plds: Sequence[tuple[PrivacyLoss, int]],
    delta: float,
    *,
    floor: float = 0.0,
    floor_grid: float | None = None,
    first: float | None = None,
    error: float | None = None,
    near: float | None = None,
) -> tuple[float, float]:
    """An epsilon that a finer grid would hardly reduce, and its grid.

    The error of a grid falls with the square of its cells, and a coarser grid never gives less, so that what a grid
    has over a finer one tells how much is left.

    Args:
        plds: Each with the number of times that it occurs.
        delta: Above 0.
        floor: Below this the epsilon does not matter.
        floor_grid: That the other side ended with, whose cost is the floor; a bound on it, or on a coarser one, may do.
        first: The share of the variance by which the first grid may be off; by default 5e-5, and less of many
            distributions.
        error: About how much of the epsilon the last grid may add; by default 2e-5, and 6e-5 of many distributions.
        near: The epsilon that is searched for. Then what the last grid adds is taken off, which ends nearer to the
            truth but is no bound, and the further an epsilon is from this one, the less exact it is.
    """
    is_many = len(plds) > _FEW_KINDS and near is None
    first = first or (_FIRST_OF_MANY if is_many else FIRST_GRID_ERROR)
    error = error or (_ERROR_OF_MANY if is_many else _GRID_ERROR)
    rough = sketch(plds, tail_truncation(plds, delta), low_tail_truncation(plds))
    largest = math.fsum(count * float(points.losses[-1]) for points, count in rough.parts)
    if rough.infinity_mass <= delta and largest <= floor:
        return max(0.0, largest), largest or 1.0
    if floor > 0:  # mostly that of the other side, which is far above where samples are rare
        bound = rough.tail_bound(delta, -math.log(delta) / floor * _ABOVE)
        if bound <= floor:
            return bound, bound or 1.0
        for grid in () if floor_grid is None else (_COARSER_OF_MANY * floor_grid, floor_grid):
            bound = GridComposition(plds, grid, delta, rough, rough.decisive_losses(floor, delta)).epsilon(
                delta
            )
            if bound <= floor:
                return bound, grid
    first_points, max_points = _FIRST_POINTS, _MAX_POINTS
    if near is not None:
        first_points, max_points = _FIRST_SEARCH_POINTS, _MAX_SEARCH_POINTS
    cap = rough.cap(delta)
    capped = rough.capped(cap)
    grid, _ = coarse_grid(plds, delta, first, capped, max_points=first_points)
    refinement, remaining = _COARSER_OF_MANY if is_many else _COARSER, 0.0
    decisive = (-math.inf, cap)
    cost = GridComposition(plds, refinement * grid, delta, rough, decisive).epsilon(delta)
    if floor < cost < math.inf:
        decisive = capped.decisive_losses(cost, delta)
    while cost > floor:
        sums = GridComposition(plds, grid, delta, rough, decisive)
        finer = sums.epsilon(delta)
        previous, cost = cost, min(cost, finer)
        # A grid whose cells are wide beside a tail may end without an epsilon where a finer one has it.
        remaining = abs(previous - finer) / (refinement**2 - 1) if previous < math.inf else math.inf
        tolerance = max(error * cost, _MIN_GRID_ERROR) if cost < math.inf else _MIN_GRID_ERROR
        if near is not None and cost < math.inf:
            tolerance = max(tolerance, _FAR_ERROR * abs(cost - remaining - near))
        if remaining <= tolerance or sums.points > max_points / 2 or sums.infinity_mass > delta:
            break
        refinement = min(
            max(_MIN_REFINEMENT, _OVERSHOOT * math.sqrt(remaining / tolerance)),
            _MAX_REFINEMENT,
            max_points / sums.points,
        )
        grid /= refinement
    if cost == math.inf:  # only far finer grids resolve the tail of losses that are large and rare
        cost = capped.tail_bound(delta, _ALL_TILTS)
        return cost, grid
    return (cost if near is None or cost == math.inf else cost - remaining), grid
