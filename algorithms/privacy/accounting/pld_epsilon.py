"""The epsilon of what was composed: both sides of a pair, and a grid that is fine enough."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from algorithms.privacy.accounting.mechanism_plds import ProfilePLD
from algorithms.privacy.accounting.pld import (
    Array,
    PLDFamily,
    PLDPair,
    PLDSum,
    PrivacyLoss,
    low_tail_truncation,
    sketch,
    tail_truncation,
)
from algorithms.privacy.accounting.pld_composition import MAX_POINTS, GridComposition, deltas_of_tails
from algorithms.privacy.accounting.pld_families import in_families

FIRST_GRID_ERROR = 5e-5
"""The share of the variance by which a first grid may be off."""
_FIRST_CELLS, _FIRST_POINTS = 2**16, 2**19
_GRID_ERROR, MIN_GRID_ERROR = 2e-5, 2e-8
"""The share of epsilon that a grid may add, and what it may add to a tiny one."""
GRID_RATIO, _FEW_KINDS, _ERROR_OF_MANY, _ERROR_OF_FAMILIES = 2.0, 8, 1e-4, 2e-4
_FIRST_OF_MANY, _GRID_RATIO_OF_MANY = 1.5e-5, 8.0
"""The first grid is compared with one that is coarser by this factor. Of more distributions, each of which takes a
transform of its own, more is left of a grid's error; their first grid is so fine that it mostly is the last, and the
one that it is compared with is coarser by more."""
_ORDER_OF_MANY = 1.5
"""By this power of its cells the error of so coarse a grid falls, rather than by the square as later."""
_MIN_REFINEMENT, _MAX_REFINEMENT, _OVERSHOOT = 1.5, 8.0, 1.1
_FLOOR_TILTS, ALL_TILTS = np.geomspace(1.0, 1e4, 24), np.geomspace(1e-2, 1e12, 200)


class ComposedPLD:
    """The loss of releases together, for a record less and for a record more.

    Args:
        pairs: Each with the number of times that it occurs; at least one.
        delta: The least delta that matters.
        grid: The width of a cell; by default as wide as accuracy allows, for each side by itself.
        coarser: By how much cells are wider than that default.
        by_delta: Whether the default is one for each of several deltas, rather than for the least.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[PLDPair, int]],
        delta: float,
        grid: float | None = None,
        coarser: float = 1.0,
        *,
        by_delta: bool = False,
    ) -> None:
        self._delta = delta
        self.sides: list[GridComposition | GridsByDelta | ProfilePLD] = []
        for plds in sides_of(pairs):
            if (profile := profile_alone(plds)) is not None:
                self.sides.append(profile)
                continue
            rough = sketch(plds, tail_truncation(plds, delta), low_tail_truncation(plds))
            if by_delta:
                self.sides.append(GridsByDelta(plds, rough))
                continue
            width = grid or coarser * coarse_grid(plds, delta, FIRST_GRID_ERROR, rough)[0]
            self.sides.append(GridComposition(plds, width, delta, rough))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at which delta is known to be at most this one."""
        return max(side.epsilon(delta) for side in self.sides)

    def deltas(self, epsilons: Array) -> Array:
        """Bounds on delta at epsilons of any sign, shape [epsilons]."""
        every: Array = np.max(self.deltas_of_sides(epsilons), axis=0)
        return every

    def deltas_of_sides(self, epsilons: Array) -> tuple[Array, Array]:
        """The same for a record less and for a record more."""
        each = [side.deltas(np.asarray(epsilons, dtype=np.float64), self._delta) for side in self.sides]
        return each[0], each[-1]


class GridsByDelta:
    """A sum of losses on a grid for each of several deltas, each with a cap of its own.

    Where few losses are far above the others, epsilon at the least delta may be a thousand times that at the others,
    and a grid that does for it far too coarse for these.

    Args:
        plds: Each with the number of times that it occurs.
        rough: Their sum of a few hundred points a distribution.
    """

    def __init__(self, plds: Sequence[tuple[PrivacyLoss, int]], rough: PLDSum) -> None:
        self._plds, self.rough = plds, rough
        self._on_grid_for = lru_cache(self._on_its_grid)

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at which delta is known to be at most this one."""
        return self._on_grid_for(delta).epsilon(delta)

    def deltas(self, epsilons: Array, min_delta: float) -> Array:
        """Bounds on delta at each epsilon, close where delta is at least `min_delta`, shape [epsilons]."""
        first, *others = deltas_of_tails(min_delta, max(min_delta, min(0.5, self.rough.delta_at_0 / 2)))
        best = self._at_most_at_0(epsilons, self._on_grid_for(first).deltas(epsilons, first))
        for delta in others:  # all of them, since what lies above a cap says nothing of the next
            best = np.minimum(best, self._on_grid_for(delta).deltas_near(epsilons, delta))
        return best

    def deltas_near(self, epsilons: Array, delta: float) -> Array:
        """Bounds on delta at each epsilon, close where they are not far below this one, shape [epsilons]."""
        sums = self._on_grid_for(delta)
        near = np.minimum(sums.deltas_without_tilt(epsilons), sums.deltas_near(epsilons, delta))
        return self._at_most_at_0(epsilons, near)

    def _at_most_at_0(self, epsilons: Array, deltas: Array) -> Array:
        return np.where(epsilons < 0, deltas, np.minimum(deltas, self.rough.delta_at_0))

    def _on_its_grid(self, delta: float) -> GridComposition:
        cap = self.rough.cap(delta)
        width, _ = coarse_grid(self._plds, delta, FIRST_GRID_ERROR, self.rough.with_cap(cap))
        return GridComposition(self._plds, width, delta, self.rough, (-math.inf, cap))


def sides_of(pairs: Sequence[tuple[PLDPair, int]]) -> list[list[tuple[PrivacyLoss, int]]]:
    """The distributions for a record less, and those for a record more where these are others; many in families."""
    remove = in_families([(pair.remove, count) for pair, count in pairs])
    if all(pair.is_symmetric for pair, _ in pairs):
        return [remove]
    return [remove, in_families([(pair.add, count) for pair, count in pairs])]


def profile_alone(plds: Sequence[tuple[PrivacyLoss, int]]) -> ProfilePLD | None:
    """The only release, if its deltas are known without a grid."""
    (pld, count), *others = plds
    return pld if isinstance(pld, ProfilePLD) and count == 1 and not others else None


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
    width = math.sqrt(12 * error * square)  # a cell adds width^2 / 6: twice the share of the square
    return max(width, longest / _FIRST_CELLS, epsilon / max_points) or 1.0, epsilon


def epsilon_on_grid(
    plds: Sequence[tuple[PrivacyLoss, int]], delta: float, grid: float, *, floor: float = 0.0
) -> float:
    """The epsilon that a grid of this width states; the floor where it is known to be no more."""
    if (profile := profile_alone(plds)) is not None:
        return profile.epsilon(delta)
    rough = sketch(plds, tail_truncation(plds, delta), low_tail_truncation(plds))
    if floor > 0 and rough.tail_bound(delta, -math.log(delta) / floor * _FLOOR_TILTS) <= floor:
        return floor
    cap = rough.cap(delta)
    capped = rough.with_cap(cap)
    low, _ = capped.decisive_losses(capped.saddle_point(delta)[0], delta)
    return GridComposition(plds, grid, delta, rough, (low, cap)).epsilon(delta)


def epsilon_of(
    plds: Sequence[tuple[PrivacyLoss, int]],
    delta: float,
    *,
    floor: float = 0.0,
    floor_grid: float | None = None,
) -> tuple[float, float | None]:
    """An epsilon that a finer grid would hardly reduce, and its grid, if it takes one.

    The error of a grid falls with the square of its cells, and a coarser grid never gives less, so that what a grid
    has over a finer one tells how much is left.

    Args:
        plds: Each with the number of times that it occurs.
        delta: Above 0.
        floor: Below this the epsilon does not matter.
        floor_grid: That the other side ended with, whose cost is the floor; a bound on it, or on a coarser one, may do.
    """
    if (profile := profile_alone(plds)) is not None:
        return profile.epsilon(delta), None
    has_families = any(isinstance(pld, PLDFamily) for pld, _ in plds)
    is_many = has_families or len(plds) > _FEW_KINDS
    error, order = (_ERROR_OF_MANY, _ORDER_OF_MANY) if is_many else (_GRID_ERROR, 2.0)
    error = _ERROR_OF_FAMILIES if has_families else error
    refinement = _GRID_RATIO_OF_MANY if is_many else GRID_RATIO
    rough = sketch(plds, tail_truncation(plds, delta), low_tail_truncation(plds))
    if (below := epsilon_below(floor, plds, rough, delta, floor_grid)) is not None:
        return below
    cap = rough.cap(delta)
    capped = rough.with_cap(cap)
    grid, _ = coarse_grid(plds, delta, _FIRST_OF_MANY if is_many else FIRST_GRID_ERROR, capped)
    decisive = (-math.inf, cap)
    cost = GridComposition(plds, refinement * grid, delta, rough, decisive).epsilon(delta)
    if floor < cost < math.inf:
        decisive = capped.decisive_losses(cost, delta)
    while cost > floor:
        sums = GridComposition(plds, grid, delta, rough, decisive)
        finer = sums.epsilon(delta)
        previous, cost = cost, min(cost, finer)
        # A grid whose cells are wide beside a tail may end without an epsilon where a finer one has it.
        # Richardson: the error falls by refinement^order, so what this grid has left is the gain over that less 1.
        remaining = abs(previous - finer) / (refinement**order - 1) if previous < math.inf else math.inf
        tolerance = max(error * cost, MIN_GRID_ERROR) if cost < math.inf else MIN_GRID_ERROR
        if remaining <= tolerance or sums.points > MAX_POINTS / 2 or sums.infinity_mass > delta:
            break
        # By as much as takes the rest to the tolerance, and a little more.
        refinement = min(
            max(_MIN_REFINEMENT, _OVERSHOOT * (remaining / tolerance) ** (1 / order)),
            _MAX_REFINEMENT,
            MAX_POINTS / sums.points,
        )
        grid, order = grid / refinement, 2.0
    if cost == math.inf:  # only far finer grids resolve the tail of losses that are large and rare
        return capped.tail_bound(delta, ALL_TILTS), grid
    return cost, grid


def epsilon_below(
    floor: float,
    plds: Sequence[tuple[PrivacyLoss, int]],
    rough: PLDSum,
    delta: float,
    floor_grid: float | None,
) -> tuple[float, float] | None:
    """An epsilon that is at most the floor, and its grid, where a cheap bound gives it; see `epsilon_of`."""
    largest = math.fsum(count * float(points.losses[-1]) for points, count in rough.parts)
    if rough.infinity_mass <= delta and largest <= floor:
        return max(0.0, largest), largest or 1.0
    if floor <= 0:
        return None
    # The floor is mostly the epsilon of the other side, which is far above where samples are rare.
    bound = rough.tail_bound(delta, -math.log(delta) / floor * _FLOOR_TILTS)
    if bound <= floor:
        return bound, bound or 1.0
    for grid in () if floor_grid is None else (_GRID_RATIO_OF_MANY * floor_grid, floor_grid):
        decisive = rough.decisive_losses(floor, delta)
        bound = GridComposition(plds, grid, delta, rough, decisive).epsilon(delta)
        if bound <= floor:
            return bound, grid
    return None
