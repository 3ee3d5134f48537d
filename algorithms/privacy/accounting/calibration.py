"""Calibration: the least noise that keeps releases within a target, and noise schedules of few different levels.

Every search for a multiplier in the house is `smallest`: it needs a cost that falls as its argument grows, and what it
returns was itself evaluated, so that rounding never ends above the limit.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.accounting.epsilon import (
    ADD_OR_REMOVE_ONE,
    COARSENING,
    FINE,
    Accountant,
    Adjacency,
    discretisation_of,
    epsilon,
    epsilon_of_rdp,
    in_few_kinds,
    rdp,
)
from algorithms.privacy.accounting.events import Schedule

Array = NDArray[np.float64]

LEVELS = 24
"""The most different noise multipliers in a plan; each costs the accountant a distribution of its own."""

_FEW_ORDERS = (1.25, 1.5, *map(float, range(2, 64)), 128.0, 256.0, 512.0, 1024.0)
_NOISE_RANGE = (1e-6, 1e7)
_TOLERANCE, _WASTE = 2e-4, 1e-3
_TINY, _HUGE = 1e-300, 1e300
_LOOSE = 4.0
"""How much larger than the cost itself Rényi's bound on it is at the most, with room to spare."""


def smallest(
    cost: Callable[[float], float], limit: float, *, low: float, high: float, tolerance: float
) -> float | None:
    """The smallest number in [low, high] that costs at most `limit`.

    Args:
        cost: Falls as its argument grows; may be infinite.
        limit: Above 0.
        low: Above 0; is returned where it costs at most the limit.
        high: The largest number that may be returned.
        tolerance: Relative; how far above the smallest number the result may be.

    Returns:
        The number, whose own cost was found to be at most the limit, or None where even `high` costs more.

    Example:
        >>> round(smallest(lambda z: 1 / z**2, 0.25, low=1e-3, high=1e3, tolerance=1e-9), 6)
        2.0
    """

    def excess(logarithm: float) -> float:
        return math.log(min(max(cost(math.exp(logarithm)), _TINY), _HUGE) / max(limit, _TINY))

    if cost(low) <= limit:
        return low
    if cost(high) > limit:
        return None
    root = brentq(excess, math.log(low), math.log(high), xtol=tolerance)
    candidates = (min(math.exp(root + k * tolerance), high) for k in range(1000))
    return next((number for number in candidates if cost(number) <= limit), high)


def calibrate(
    schedule_at: Callable[[float], Schedule],
    target: Budget,
    *,
    accountant: Accountant = "pld",
    adjacency: Adjacency = ADD_OR_REMOVE_ONE,
) -> float:
    """The smallest noise multiplier, up to a tolerance, whose schedule costs at most `target`.

    Never above the target: the multiplier that is returned was itself evaluated at the fine discretisation.

    Args:
        schedule_at: The schedule at a noise multiplier; its cost must fall as the multiplier grows.
        target: The budget that the schedule is to keep to.
        accountant: Whose epsilon is compared with the target's.
        adjacency: What the events are accounted under.

    Raises:
        RefusedError: Where no multiplier up to 1e7 meets the target.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> found = calibrate(lambda z: [(GaussianDpEvent(z), 1)], Budget(1.0, 1e-5))
        >>> 3.73 < found < 3.74  # 3.7306 by the Gaussian mechanism's closed form
        True
    """
    if accountant != "pld":
        return _near(
            lambda z: epsilon(schedule_at(z), target.delta, accountant=accountant, adjacency=adjacency),
            target.epsilon,
            tolerance=2e-5,
        )

    @lru_cache
    def cost(z: float, coarsening: float = 1.0) -> float:
        if coarsening == 1.0:
            return epsilon(schedule_at(z), target.delta, adjacency=adjacency)  # as the plan asks for it
        schedule = in_few_kinds(schedule_at(z))
        grid = (discretisation_of(schedule, target.delta, adjacency) or FINE) * coarsening
        return epsilon(schedule, target.delta, adjacency=adjacency, discretisation=grid)

    def bracket(z: float) -> float:
        few = in_few_kinds(schedule_at(z))
        try:
            divergences = rdp(few, orders=_FEW_ORDERS, adjacency=adjacency)
        except RefusedError:
            return cost(z, COARSENING)
        return epsilon_of_rdp(divergences, target.delta, _FEW_ORDERS)

    try:
        rough = _near(bracket, target.epsilon, tolerance=0.02)
    except RefusedError:  # by looser bounds, which what is released beside the noise may exceed by itself
        is_far = bracket(_NOISE_RANGE[1]) > _LOOSE * target.epsilon  # and a distribution would be endless
        if is_far or cost(_NOISE_RANGE[1], COARSENING) > target.epsilon:
            raise
        rough = 1.0
    coarse = _near(lambda z: cost(z, COARSENING), target.epsilon, start=rough)
    if 0 <= target.epsilon - cost(coarse) < _WASTE * target.epsilon:
        return coarse
    return _near(cost, target.epsilon, start=coarse, factor=1.02)


def _near(
    cost: Callable[[float], float],
    target: float,
    *,
    start: float = 1.0,
    factor: float = 1.5,
    tolerance: float = _TOLERANCE,
) -> float:
    """The smallest multiplier that costs at most the target, searched for outwards from `start`.

    One evaluation of a cost may take seconds, so the search begins where a coarser one ended.
    """
    low = high = start
    while cost(high) > target:
        low, high = high, high * factor
        if high > _NOISE_RANGE[1]:
            raise RefusedError(
                f"no noise multiplier up to {_NOISE_RANGE[1]:.0e} meets epsilon = {target:g};"
                " ask for a larger epsilon, fewer steps, smaller batches or more noise in what is released beside them."
            )
    while low >= high and low > _NOISE_RANGE[0]:
        low /= factor
        if cost(low) <= target:
            high = low
    if low <= _NOISE_RANGE[0]:
        return high
    return smallest(cost, target, low=low, high=high, tolerance=tolerance) or high


def in_levels(weights: Array, levels: int = LEVELS) -> tuple[Array, Array]:
    """Positive weights as a few runs of equal ones.

    A run takes its geometric mean, so where there are fewer runs of equal weights they are kept. Else runs end where
    they follow the logarithm with the least squared error: their density goes with its slope to the power 2/3.

    Args:
        weights: Shape [steps].
        levels: The most runs.

    Returns:
        The values of the runs and their lengths, each of shape [runs].

    Example:
        >>> values, counts = in_levels(np.array([1.0, 1.0, 4.0]))
        >>> values.round(6).tolist(), counts.tolist()
        ([1.0, 4.0], [2, 1])
    """
    moves = np.abs(np.diff(np.log(weights), prepend=math.log(weights[0])))
    cells = np.cumsum(moves > 0)
    if cells[-1] >= levels:
        course = np.cumsum(moves ** (2.0 / 3.0))
        cells = np.minimum(np.floor(course / course[-1] * levels), levels - 1)
    starts = np.flatnonzero(np.diff(cells, prepend=-1.0))
    counts = np.diff(np.append(starts, len(weights)))
    return np.exp(np.add.reduceat(np.log(weights), starts) / counts), counts
