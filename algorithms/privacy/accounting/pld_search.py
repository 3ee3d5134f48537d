"""Epsilons for a search: estimates from coarse grids, which are no bounds and never stated."""

import math
from collections.abc import Sequence

from algorithms.privacy.accounting.pld import PrivacyLoss, low_tail_truncation, sketch, tail_truncation
from algorithms.privacy.accounting.pld_composition import GridComposition
from algorithms.privacy.accounting.pld_epsilon import (
    ALL_TILTS,
    GRID_RATIO,
    MIN_GRID_ERROR,
    coarse_grid,
    epsilon_below,
)

_FIRST_ERROR, _ERROR, _FAR_ERROR, _KNOWN_DOUBT = 3e-4, 5e-4, 0.1, 0.25
"""Shares: of the variance, by which a first grid may be off; of epsilon, and of its distance from the one searched for,
that may be extrapolated; and by how much less that counts once three grids tell how fast the error falls."""
_FIRST_POINTS, _MAX_POINTS = 2**16, 2**19


def estimated_epsilon(plds: Sequence[tuple[PrivacyLoss, int]], delta: float) -> float:
    """An estimate from a few hundred points a distribution, mostly above: by half where rare losses decide.

    Far losses are cut off first. About as rare as delta, they would be taken for what decides.
    """
    rough = sketch(plds, tail_truncation(plds, delta), low_tail_truncation(plds))
    return rough.with_cap(rough.cap(delta)).saddle_point(delta)[0]


def extrapolated_epsilon(
    plds: Sequence[tuple[PrivacyLoss, int]],
    delta: float,
    near: float,
    *,
    floor: float = 0.0,
    floor_grid: float | None = None,
) -> tuple[float, float]:
    """About the epsilon of the finest grid, and the last grid that was taken.

    Args:
        plds: Each with the number of times that it occurs.
        delta: Above 0.
        near: The epsilon that is searched for; further away, less exact ones will do.
        floor, floor_grid: As for `epsilon_of`.
    """
    rough = sketch(plds, tail_truncation(plds, delta), low_tail_truncation(plds))
    if (below := epsilon_below(floor, plds, rough, delta, floor_grid)) is not None:
        return below
    cap = rough.cap(delta)
    capped = rough.with_cap(cap)
    grid, _ = coarse_grid(plds, delta, _FIRST_ERROR, capped, max_points=_FIRST_POINTS)
    grid = min(grid, floor_grid or grid)
    decisive = (-math.inf, cap)
    cost = GridComposition(plds, GRID_RATIO * grid, delta, rough, decisive).epsilon(delta)
    if cost < near / 2:
        return cost, GRID_RATIO * grid
    if floor < cost < math.inf:
        decisive = capped.decisive_losses(cost, delta)
    remaining, earlier = 0.0, math.inf
    while cost > floor:
        sums = GridComposition(plds, grid, delta, rough, decisive)
        finer = sums.epsilon(delta)
        gain, cost = abs(cost - finer) if cost < math.inf else math.inf, min(cost, finer)
        # Where each halving divides the error by f, it has gained f - 1 times the error that is left.
        remaining = gain / (_fall(earlier, gain) - 1)
        tolerance = MIN_GRID_ERROR
        if cost < math.inf:
            tolerance = max(_ERROR * cost, MIN_GRID_ERROR, _FAR_ERROR * abs(cost - remaining - near))
        unsure = remaining if earlier == math.inf else _KNOWN_DOUBT * remaining
        if unsure <= tolerance or sums.points > _MAX_POINTS / 2 or sums.infinity_mass > delta:
            break
        earlier, grid = gain, grid / GRID_RATIO
    if cost == math.inf:
        return capped.tail_bound(delta, ALL_TILTS), grid
    return (cost - remaining if remaining < math.inf else cost), grid


def _fall(earlier: float, gain: float) -> float:
    """About what a grid's error is divided by if the grid is halved, from what two halvings gained.

    By the square in the end, but by less where cells are wide beside common losses. earlier: infinite if not known.
    """
    seen = earlier / gain if 0 < gain < earlier < math.inf else GRID_RATIO
    return (3 * min(max(seen, GRID_RATIO), GRID_RATIO**2) + GRID_RATIO**2) / 4


def cost_ratio(
    plds: Sequence[tuple[PrivacyLoss, int]],
    others: Sequence[tuple[PrivacyLoss, int]],
    delta: float,
    *,
    coarser: float,
) -> float:
    """About what some releases cost over what others do that are nearly alike, on one grid.

    coarser: By how much its cells are wider than those of a search's first grid.
    """
    rough = sketch(others, tail_truncation(others, delta), low_tail_truncation(others))
    cap = rough.cap(delta)
    capped = rough.with_cap(cap)
    grid, estimate = coarse_grid(others, delta, _FIRST_ERROR, capped, max_points=_FIRST_POINTS)
    low, _ = capped.decisive_losses(estimate, delta)
    cost, other = (
        GridComposition(side, coarser * grid, delta, decisive=(low, cap)).epsilon(delta)
        for side in (plds, others)
    )
    return cost / other if 0 < other < math.inf and 0 < cost < math.inf else 1.0
