"""Privacy loss distributions on a grid, and bounds on what a sum of them has.

The loss of a pair (P, Q) of output distributions is L = log P/Q under P. Then delta(e) = E max(0, 1 - exp(e - L)), and
losses of independent (or adaptively chosen, each dominated) releases add up. `pld_composition` adds them up, and
`pld_epsilon` chooses the grid.

`discretise` replaces L by a loss on a grid. A loss inside a cell becomes one of the cell's ends, at random, such that
the mean of exp(-L) there stays the same ("connect the dots", Doroshenko et al. 2022, arXiv:2207.04380). Proof that no
composition becomes cheaper: with all other losses fixed, max(0, 1 - c exp(-L)) is convex in exp(-L), and a spread that
keeps the mean does not lower a convex function's mean (Jensen). One release after the other is replaced. Losses above
the grid become infinite, those below it become its lowest point; both only raise delta. The error is of second order in
the width of a cell.

Where one epsilon matters, the grid ends at a cap, and the last cell reaches from there to infinity, where exp(-L) is 0:
the same proof holds, since max(0, 1 - c x) is convex on [0, exp(-cap)], too. A loss above the cap becomes the cap or
infinite. Nothing is lost as long as the other losses do not bring the sum down to epsilon again, for then
max(0, 1 - c x) is a line on the whole cell. So losses of 50 that are about as rare as delta need neither points nor a
window of that length beside an epsilon of 0.05, and no tilt makes them heavier than what decides.

A cell adds its mass times its squared width to the variance of the sum. A rare sample's loss is mostly tiny, and only
what is common needs the finest cells: on the same grid the others are wider, the more so, the less of the mass lies
there, tilted towards what decides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from algorithms.errors import RefusedError

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_LARGEST_GRID, _POINTS_TOGETHER = 2**24, 2**17
"""Points of a grid beyond which losses are refused, and up to which all distributions are taken as one array."""
_TILTED_TOGETHER = 2**15
"""Numbers of an array up to which several tilts are taken at once, so that it stays in a processor's cache."""
_ITERATIONS, _LARGEST_TILT = 60, 1e15
"""Of Newton's method; and the tilt times a loss where rounding the loss begins to change its tilted mass by a tenth."""
_MIN_TILT, _TILTS = 1e-9, np.geomspace(0.05, 500.0, 20)
"""The least tilt, and by what one that serves for a bound is multiplied to find a better one."""
_LOG_INDECISIVE, _LOG_NEVER = math.log(1e4), math.log(1e6)
"""Logarithms of how far below delta a chance decides nothing, and of how rare the sum of other losses is."""
_BELOW = 64
"""Below the losses that decide, cells are two points wide after one in so many parts of their length, then wider."""
_MORE_VARIANCE, _MORE_OF_FAMILY, _WIDENING, _STEEP, _NEXT_TO_NOTHING = 0.005, 0.1, 16.0, 0.25, 1e-300
"""Of cells that are wide where little lies: what they add to the variance, as a share of what equal cells do, also for
many losses, of which cells next to 0 are off by more; over how many points they become one point wider; their largest
width times the tilt; and a share of the mass that is none."""
_ROOM_ABOVE = 0.25
"""The share of epsilon that losses above it are kept for at least."""
_LOWER_CAPS, _CAP_TILTS = 0.25 ** np.arange(12.0), np.geomspace(1.0, 1e4, 12)
"""Caps that are tried, as shares of the largest loss, and tilts under each, in units of log(1 / delta) over it."""


@dataclass(frozen=True)
class CellMasses:
    """The masses of a pair between neighbouring edges; of several pairs at once, a row for each.

    Attributes:
        p, q: In each cell, of P and of Q, shape [cells]; of several pairs [pairs, cells].
        p_error, q_error: How far rounding may have moved them, of the same shape.
        below, above: The masses of P and of Q outside all cells; of several pairs columns, [pairs, 1] each.
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


@dataclass(frozen=True, eq=False)
class PLDFamily:
    """Losses of several releases that are nearly alike, which are put on the same edges all at once.

    As one `PrivacyLoss` it is their mean, as if each release were drawn from them. Its moments bound those of all
    releases together, since a mean is at least the geometric one, and its deltas at epsilon 0 add up to the same.

    Attributes:
        members: Their cells have a row for each.
        counts: How often each occurs, shape [members].
        widest: One whose tails are no lighter than those of any of them.
    """

    members: PrivacyLoss
    counts: Array
    widest: PrivacyLoss

    @property
    def count(self) -> int:
        """The number of releases."""
        return int(self.counts.sum())

    def edges(self, p_tail: float, q_tail: float) -> Array:
        return self.widest.edges(p_tail, q_tail)

    def cells(self, edges: Array) -> CellMasses:
        every, shares = self.members.cells(edges), self.counts / self.counts.sum()
        p, q, p_error, q_error = (
            shares @ masses for masses in (every.p, every.q, every.p_error, every.q_error)
        )
        below, above = (
            (float((shares @ of_p)[0]), float((shares @ of_q)[0]))
            for of_p, of_q in (every.below, every.above)
        )
        return CellMasses(p, q, p_error, q_error, below, above, every.slip)


@dataclass(frozen=True)
class DiscretePLD:
    """A loss that takes finitely many values.

    Attributes:
        losses: Ascending, shape [k].
        masses: Shape [k].
        infinity_mass: The chance of an infinite loss.
        is_mean: Whether it is the mean of several, as that of a `PLDFamily`.
    """

    losses: Array
    masses: Array
    infinity_mass: float
    is_mean: bool = False

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest finite loss."""
        return float(self.losses[0]), float(self.losses[-1])

    @cached_property
    def logarithms(self) -> Array:
        """The logarithms of the masses, shape [k]; -inf for none."""
        with np.errstate(divide="ignore"):
            return np.log(self.masses)

    def with_cap(self, cap: float) -> "DiscretePLD":
        """A loss that dominates this one and has no finite value above the cap: each above is split as a cell's are."""
        first = int(np.searchsorted(self.losses, cap, side="right"))  # a loss equal to the cap stays
        if first == len(self.losses):
            return self
        above, masses = self.losses[first:] - cap, self.masses[first:]
        # The mean of exp(-L) stays: exp(cap - loss) of a mass at the cap, and the rest at infinity, where it is 0.
        return DiscretePLD(
            np.append(self.losses[:first], cap),
            np.append(self.masses[:first], masses @ np.exp(-above)),
            self.infinity_mass - float(masses @ np.expm1(-above)),
            self.is_mean,
        )


def connect_the_dots(edges: Array, cells: CellMasses) -> DiscretePLD:
    """The loss whose values are the edges of cells; see the module's text for why it dominates."""
    losses, masses, infinity_mass = _masses_at_edges(edges, cells, is_capped=False)
    return DiscretePLD(losses, masses, float(infinity_mass))


def _masses_at_edges(edges: Array, cells: CellMasses, *, is_capped: bool) -> tuple[Array, Array, Any]:
    """`connect_the_dots` for one pair or for rows of several: the losses, their masses, and those of infinite ones.

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
    p = cells.p + cells.p_error
    infinity_mass: Any = cells.above[0]
    up = np.clip((p - scaled) / -np.expm1(lower - upper), 0.0, p)
    masses = np.zeros((*p.shape[:-1], len(edges)))
    masses[..., 1:] += up  # to the upper edge
    masses[..., :-1] += p - up  # the rest of the cell to the lower one
    masses[..., :1] += cells.below[0]  # raised to the lowest edge
    if is_capped:
        last = masses[..., -1:] if masses.ndim > 1 else masses[-1]
        # What lies at the upper end of the last cell is infinite loss.
        edges, masses, infinity_mass = edges[:-1], masses[..., :-1], infinity_mass + last
    # Edges, and the losses at them, are rounded by a few units in the last place.
    slip = cells.slip + 2.0**-49 * max(abs(float(edges[0])), abs(float(edges[-1])))
    return edges + slip, masses, infinity_mass


def _rough_cells(pld: PrivacyLoss, tail: float, low_tail: float) -> tuple[Array, CellMasses]:
    """Edges from where P has at most `low_tail` below to where it has `tail` above, and the masses between them."""
    edges = pld.edges(tail, 1.0)
    cells = pld.cells(edges)
    below = np.append(0.0, np.cumsum(cells.p)) + cells.below[0]  # P's mass below each edge
    first = int(np.searchsorted(below, low_tail, side="right")) - 1
    return cells.above_edge(edges, min(max(first, 0), len(edges) - 2))


@dataclass(frozen=True)
class GridLoss:
    """A loss on points of an equidistant grid, or several losses on the same points.

    Attributes:
        points: The loss; of several their mean.
        indices: Of the points on the grid, shape [points].
        masses: Of each loss, shape [losses, points].
        counts: How often each occurs, shape [losses].
    """

    points: DiscretePLD
    indices: Indices
    masses: Array
    counts: Array

    @property
    def count(self) -> int:
        """The number of losses that are added up."""
        return int(self.counts.sum())


def discretise(
    pld: PrivacyLoss,
    count: int,
    grid: float,
    ends: tuple[float, float],
    decisive: tuple[float, float] | None = None,
    tilted: tuple[DiscretePLD, float] | None = None,
) -> GridLoss:
    """A loss on points of an equidistant grid that dominates that of a distribution, and how often it occurs.

    ends: The losses between which tails leave the rest; any two bound. decisive: as in `PLDSum.decisive_losses`, where
    one epsilon matters. tilted: A sketch of the loss, capped, and a tilt, where cells are to be few.
    """
    lowest, highest = ends
    low, cap = decisive or (lowest, math.inf)
    check_points((min(cap, highest) - max(low, lowest)) / grid)
    number = max(1, math.floor((min(cap, highest) - lowest) / grid)) + 1
    family = pld if isinstance(pld, PLDFamily) else None
    if tilted is not None:
        more = _MORE_OF_FAMILY if family else _MORE_VARIANCE
        indices = _edges_by_weight(*tilted, grid, number, more)
    elif low > lowest:  # lowest^ Without a sketch: equal cells above `low`, ever wider ones below it.
        indices = _edges_of_cells(number, grid, low - lowest)
    else:
        indices = np.arange(number + 1)
    edges = np.asarray(lowest + grid * indices, dtype=np.float64)
    if is_capped := cap < highest:
        edges = np.append(edges, max(highest, float(edges[-1]) + grid))
    members, counts = (family.members, family.counts) if family else (pld, np.array([count]))
    losses, masses, infinity_masses = _masses_at_edges(edges, members.cells(edges), is_capped=is_capped)
    masses = np.atleast_2d(masses)
    shares = counts / counts.sum()
    mean = shares @ masses
    is_used = mean > 0  # where a loss takes few values, few points have any
    is_used[[0, -1]] = True
    infinity_mass = float(shares @ np.ravel(infinity_masses))
    points = DiscretePLD(losses[is_used], mean[is_used], infinity_mass, is_mean=family is not None)
    return GridLoss(points, indices[is_used], masses[:, is_used], counts)


def check_points(points: float) -> None:
    """Raises RefusedError if a grid had too many points."""
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
    # Distances below: scale ((1 + 1 / scale)^k - 1) for the k-th.
    below = np.ceil(scale * np.expm1(np.arange(1, steps + 1) * math.log1p(1 / scale))).astype(np.int64)
    ascending = np.concatenate([[0], first - below[::-1], np.arange(first, count + 1)]).clip(0)
    return ascending[np.diff(ascending, prepend=-1) > 0]


def _edges_by_weight(
    points: DiscretePLD, tilt: float, grid: float, count: int, more_variance: float
) -> Indices:
    """Points of a grid that are edges of cells: the further apart, the less of the tilted loss lies there.

    A cell adds to the variance of the tilted sum its mass times its squared width. Each knot of the sketch may add the
    same, and all together a share, `more_variance`, of what cells one point wide add to nearly all of the mass. No cell
    is much wider than its distance from narrow ones allows, nor so wide that tilted masses inside of it differ much.
    """
    knots = np.clip((points.losses - points.losses[0]) / grid, 0.0, count)  # in steps of the grid
    exponents = points.logarithms + tilt * points.losses
    shares = np.exp(exponents - exponents.max())
    shares = np.maximum(shares / shares.sum(), _NEXT_TO_NOTHING)
    # Of each knot alike: share * width^2 = more_variance / knots, but at least one step.
    widths = np.sqrt(more_variance / (len(shares) * shares)).clip(1.0, max(1.0, _STEEP / (tilt * grid)))
    slopes = knots / _WIDENING
    # Twice a running minimum: no width rises by more than one step in `_WIDENING`, to the right or to the left.
    widths = np.minimum.accumulate(widths - slopes) + slopes
    widths = np.minimum.accumulate((widths + slopes)[::-1])[::-1] - slopes
    # How many cells lie before each knot.
    course = np.append(0.0, np.cumsum(np.diff(knots) / np.minimum(widths[1:], widths[:-1])))
    inner = np.interp(np.arange(1.0, course[-1]), course, knots)  # where one cell after another ends
    ascending = np.concatenate([[0], np.rint(inner).astype(np.int64), [count]])
    return ascending[np.diff(ascending, prepend=-1) > 0]


@dataclass(frozen=True)
class PLDSum:
    """The sum of independent losses: each with the number of times that it occurs."""

    parts: Sequence[tuple[DiscretePLD, int]]

    @property
    def infinity_mass(self) -> float:
        """A bound on the chance that any of them is infinite."""
        # Of several losses, of which the mean chance is known, it is at most the sum of their chances.
        each = [
            (min(1.0, count * points.infinity_mass), 1)
            if points.is_mean
            else (min(1.0, points.infinity_mass), count)
            for points, count in self.parts
        ]
        if any(chance == 1.0 for chance, _ in each):
            return 1.0
        none = math.fsum(count * math.log1p(-chance) for chance, count in each)  # log P(no loss is infinite)
        return min(1.0, -math.expm1(none) * (1 + 2.0**-40))  # rounded up

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
            exponents = logarithms + tilt * losses  # [distributions, points]
            largest = exponents.max(axis=1)  # taken out, so that no exp overflows
            weights = np.exp(exponents - largest[:, None])
            totals = weights.sum(axis=1)
            means = (weights * losses).sum(axis=1) / totals
            variances = (weights * np.square(losses - means[:, None])).sum(axis=1) / totals
            k += float(counts @ (largest + np.log(totals)))
            mean, variance = mean + float(counts @ means), variance + float(counts @ variances)
        return k, mean, variance

    def log_moments(self, tilts: Array) -> Array:
        """log E exp(tilt * L) over finite losses at each tilt, shape [tilts]."""
        return _add_up(self._single_log_moments(tilts))

    def _single_log_moments(self, tilts: Array) -> list[tuple[Array, Array]]:
        """log E exp(tilt * L) of each single loss, shape [tilts, distributions], and counts, by block."""
        every = []
        for losses, logarithms, counts in self._blocks:
            singles, together = [], max(1, _TILTED_TOGETHER // losses.size)
            for first in range(0, len(tilts), together):
                # [tilts, distributions, points]
                exponents = logarithms + tilts[first : first + together, None, None] * losses
                largest = exponents.max(axis=2)
                exponents -= largest[:, :, None]
                singles.append(largest + np.log(np.exp(exponents).sum(axis=2)))
            every.append((np.concatenate(singles), counts))
        return every

    @cached_property
    def delta_at_0(self) -> float:
        """A bound on delta at epsilon 0, where those of the losses add up."""
        # E max(0, 1 - exp(-L)), at epsilon 0
        every = [(points.masses @ -np.expm1(-np.maximum(points.losses, 0.0)), n) for points, n in self.parts]
        return self.infinity_mass + math.fsum(count * float(mass) for mass, count in every) * (1 + 2.0**-40)

    @cached_property
    def _variance(self) -> float:
        return self.cumulant(0.0)[2]

    def saddle_point(self, delta: float) -> tuple[float, float]:
        """An estimate of epsilon, and the tilt under which the mean of the sum is this estimate.

        delta is about exp(K - tilt e) / (tilt (1 + tilt) sqrt(2 pi K'')) at e = K'(tilt), the lattice left aside.
        """
        if self.delta_at_0 <= delta:
            return 0.0, 0.0
        log_target = -math.log(self.finite_delta(delta))
        variance = self._variance
        low, high, tilt = 0.0, math.inf, math.sqrt(2 * log_target / variance) if variance > 0 else 0.0
        for _ in range(_ITERATIONS):  # Newton's method, inside a bracket
            k, mean, variance = self.cumulant(tilt)
            # How far -log(delta), estimated at this tilt, is below the one looked for; it rises by tilt * variance per
            # tilt.
            missing = log_target + _log_tail(tilt, k, mean, variance)
            low, high = (tilt, high) if missing > 0 else (low, tilt)
            if abs(missing) < 1e-2 * log_target or tilt * max(1.0, abs(mean)) > _LARGEST_TILT:
                break
            step = tilt + missing / (tilt * variance) if variance > 0 else 0.0
            # Beyond the bracket or too far: bisect instead.
            if not max(low, tilt / 4) < step < min(high, 4 * tilt):
                step = 4 * tilt if high == math.inf else max((low + high) / 2, high / 4)
            tilt = step
        return max(0.0, self.cumulant(tilt)[1]), tilt

    def tail_at(self, tilt: float) -> tuple[float, float]:
        """Estimates of the epsilon that is the mean of the sum under a tilt, and of the logarithm of its delta."""
        k, mean, variance = self.cumulant(tilt)
        return mean, min(0.0, _log_tail(tilt, k, mean, variance))

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
        log_moments = self.log_moments(tilts) + self.count * 2.0**-40  # rounded up
        # K(t) - t e = log(delta) at this e, for each t.
        bounds = (log_moments - math.log(delta - self.infinity_mass)) / tilts
        return max(0.0, float(bounds.min())) * (1 + 2.0**-40)

    def with_cap(self, cap: float) -> "PLDSum":
        """The sum of losses none of which has a finite value above the cap (see `DiscretePLD.with_cap`)."""
        return PLDSum([(points.with_cap(cap), count) for points, count in self.parts])

    def cap(self, delta: float) -> float:
        """A loss above which all cost as much as infinite ones at this delta; infinite where few losses are far above.

        Far losses spoil Chernoff's bound, however rare they are, so that it is taken under ever lower caps.
        """
        highest = max(float(points.losses[-1]) for points, _ in self.parts)
        if not highest > 0:
            return math.inf
        epsilon, log_inverse = math.inf, -math.log(delta)
        for cap in highest * _LOWER_CAPS:
            bound = self.with_cap(float(cap)).tail_bound(delta, log_inverse / cap * _CAP_TILTS)
            if bound >= epsilon:
                break
            epsilon = bound
        if not 0 < epsilon < highest / 2:
            return math.inf
        cap = epsilon - self._low_end(log_inverse / epsilon * _TILTS)
        return cap if cap < highest / 2 else math.inf

    def _low_end(self, tilts: Array) -> float:
        """What the sum without any one of its losses is below with a chance of at most one in a million, by Chernoff.

        Without it, since the others decide whether a sum with a large loss is still above epsilon: a loss that is never
        below 1 lifts the sum by 1 only where it is itself.
        """
        singles = self._single_log_moments(-tilts)  # at negative tilts, for the lower tail
        # log E exp(-t L) of all losses but one, for the one that leaves most, at each t.
        rests = _add_up(singles) - np.min([of_block.min(axis=1) for of_block, _ in singles], axis=0)
        return -float(np.min((rests + _LOG_NEVER) / tilts))  # P(sum < -s) <= exp(K(-t) - t s), at the best t

    def decisive_losses(self, epsilon: float, delta: float) -> tuple[float, float]:
        """Between which losses a single one decides how much of the sum is above epsilon.

        Above them the sum is above epsilon with next to any others, below them with next to none (Chernoff's bound);
        max(0, 1 - exp(epsilon - loss)) is then a line in exp(-loss), which a cell of any width keeps. Some room above
        is kept even where no other loss is below 0: next to epsilon, infinite losses would leave hardly any delta to
        the finite ones, whose saddle point would lie at the cap.
        """
        tilts = max(self.tail_tilt(delta), _MIN_TILT) * _TILTS
        rarity = _LOG_INDECISIVE - math.log(self.finite_delta(delta))
        # Chernoff's bound on the sum of all losses.
        highest = float(np.min((self.log_moments(tilts) + rarity) / tilts))
        return epsilon - highest, epsilon + max(-self._low_end(tilts), _ROOM_ABOVE * epsilon)


def _log_tail(tilt: float, k: float, mean: float, variance: float) -> float:
    """The logarithm of delta at the mean under a tilt, as in `PLDSum.saddle_point`; k, mean, variance: its cumulant."""
    return k - tilt * mean - math.log(max(1.0, tilt * (1 + tilt) * math.sqrt(2 * math.pi * variance)))


def _add_up(blocks: list[tuple[Array, Array]]) -> Array:
    """What losses have together at each tilt, shape [tilts], from what each has, shape [tilts, distributions]."""
    sums = np.zeros(len(blocks[0][0]))
    for of_block, counts in blocks:
        sums += of_block[:, 0] * counts[0] if len(counts) == 1 else [counts @ singles for singles in of_block]
    return sums


def sketch(plds: Sequence[tuple[PrivacyLoss, int]], tail: float, low_tail: float = 0.0) -> PLDSum:
    """A sum of a few hundred points a distribution, for bounds and for the choice of a grid."""
    every = []
    for pld, count in plds:
        points = connect_the_dots(*_rough_cells(pld, tail, low_tail))
        every.append((replace(points, is_mean=isinstance(pld, PLDFamily)), count))
    return PLDSum(every)


def tail_truncation(plds: Sequence[tuple[PrivacyLoss, int]], delta: float) -> float:
    """Tail mass that is truncated per release, so that all releases together truncate a millionth of delta."""
    return max(1e-300, 1e-6 * delta / sum(count for _, count in plds))


def low_tail_truncation(plds: Sequence[tuple[PrivacyLoss, int]]) -> float:
    """Low tail mass per release whose loss is raised to the lowest one; of all releases together, one in a million."""
    return 1e-6 / sum(count for _, count in plds)
