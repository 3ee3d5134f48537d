"""The least noise that keeps a schedule within a target.

All noise calibration goes through `calibrate`: the cost falls as the noise multiplier grows, and the multiplier that is
returned was itself priced as the plan prices it, so that neither a coarse search nor rounding ends above the target.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import dp_accounting.dp_event as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Accountant, Budget
from algorithms.privacy.accounting.epsilon import (
    ADD_OR_REMOVE_ONE,
    ORDERS,
    Array,
    ReprKey,
    chance_of_sampling,
    epsilon,
    epsilon_of_rdp,
    merge_events,
    translate,
)
from algorithms.privacy.accounting.event_rules import pairs_of
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.accounting.pld import PrivacyLoss
from algorithms.privacy.accounting.pld_epsilon import sides_of
from algorithms.privacy.accounting.pld_search import cost_ratio, estimated_epsilon, extrapolated_epsilon

LEVELS = 24
"""The most different noise multipliers in a plan; each costs the accountant a distribution of its own."""

_SEARCH_KINDS = LEVELS
"""The most kinds of samples that noise is searched with; what that changes is estimated once."""
_SEARCH_GRID, _ESTIMATE_GRID = 1e-3, 1e-2
"""Distances of privacy losses on the grids of single mechanisms, while noise is searched for and first estimated."""
_NOISE_RANGE, _MAX_SENSIBLE_NOISE = (1e-6, 1e9), 1e4
"""The noise multipliers that are searched, and the one above which no sum of usual size is told from noise."""
_TOLERANCE, _COARSE_MARGIN = 2e-4, 2e-3
"""The share of a multiplier to which it is found; and that of epsilon by which coarse costs are aimed above it."""
_MAX_UNSPENT = ((8, 2e-4), (_SEARCH_KINDS, 5e-4), (math.inf, 1e-3))
"""The share of epsilon that noise may leave unspent, for up to so many kinds of samples: each evaluation of many takes
long, and of more than noise is searched with, the coarse cost is less exact."""
_FINE_TOLERANCE = 2e-5
"""The share of a multiplier to which it is found by Rényi divergences or pure epsilons, which take less time."""
_MAX_SECANT_STEPS, _MIN_STEEPNESS, _ESTIMATE_RATIO, _FAR_RATIO = 10, 0.1, 1.2, 8.0
"""The steps of the secant method, the least fall of log cost by log multiplier that it believes, the ratio of
multipliers between which the first is estimated, as estimates jump a little, and the ratio to the target from which on
costs tell the direction alone."""
_TINY, _HUGE = 1e-300, 1e300


def find_smallest(
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
        >>> round(find_smallest(lambda z: 1 / z**2, 0.25, low=1e-3, high=1e3, tolerance=1e-9), 6)
        2.0
    """

    ends = {math.log(low): low, math.log(high): high}  # exp(log(x)) need not be x, and a cost may jump there

    def excess(logarithm: float) -> float:
        return _log(cost(ends.get(logarithm, math.exp(logarithm)))) - _log(limit)

    if cost(low) <= limit:
        return low
    if cost(high) > limit:
        return None
    from scipy.optimize import brentq  # here, since most plans do without it

    # Up to rounding and the tolerance, on either side of the limit.
    root = brentq(excess, math.log(low), math.log(high), xtol=tolerance)
    # Upwards, until one is known to be within it.
    candidates = (min(math.exp(root + k * tolerance), high) for k in range(1000))
    return next((number for number in candidates if cost(number) <= limit), high)


def _log(number: float) -> float:
    return math.log(min(max(number, _TINY), _HUGE))


def calibrate(
    schedule_at: Callable[[float], Schedule],
    target: Budget,
    *,
    accountant: Accountant = "pld",
    adjacency: NeighboringRelation = ADD_OR_REMOVE_ONE,
) -> float:
    """The smallest noise multiplier, up to a tolerance, whose schedule costs at most `target`.

    Never above the target: the multiplier that is returned was itself priced by `epsilon`, as the plan is. Where the
    samples read a record with a chance of at most delta, that may be the smallest multiplier there is; see
    `rare_reading_chance`.

    Args:
        schedule_at: The schedule at a noise multiplier; its cost must fall as the multiplier grows.
        target: The budget that the schedule is to keep to.
        accountant: Whose epsilon is compared with the target's.
        adjacency: What the events are accounted under.

    Raises:
        RefusedError: Where no multiplier up to 1e9 meets the target, or, by Rényi divergences, no sensible one.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> found = calibrate(lambda z: [(GaussianDpEvent(z), 1)], Budget(1.0, 1e-5))
        >>> 3.73 < found < 3.74  # 3.7306 by the Gaussian mechanism's closed form
        True
    """
    if accountant == "pld":
        return _calibrate_by_pld(schedule_at, target, adjacency)

    def cost(z: float) -> float:
        return epsilon(schedule_at(z), target.delta, accountant=accountant, adjacency=adjacency)

    if accountant == "rdp":
        _check_orders_reach(cost, target)
    start = search_outwards(cost, target.epsilon, factor=8.0, tolerance=0.1)
    last = _secant_search(cost, target.epsilon, start, steepness=1.0, max_unspent=2 * _FINE_TOLERANCE)
    if last.is_met:
        return last.multiplier
    return search_outwards(cost, target.epsilon, start=last.multiplier, factor=1.1, tolerance=_FINE_TOLERANCE)


def _calibrate_by_pld(
    schedule_at: Callable[[float], Schedule], target: Budget, adjacency: NeighboringRelation
) -> float:
    """`calibrate` by privacy loss distributions, in three searches, each on a finer grid and from where the last ended.

    A cost on the plan's own grid may take seconds, so that few are computed. Estimates and coarse costs are no bounds:
    where the last search does not end, as where costs jump, `search_outwards` goes on with the plan's costs alone.
    """

    def cost(z: float) -> float:
        return epsilon(schedule_at(z), target.delta, adjacency=adjacency)  # as the plan asks for it

    start, factor = 1.0, 1.5
    with suppress(RefusedError):
        rough = _RoughCosts(schedule_at, target, adjacency)
        smallest = _NOISE_RANGE[0]
        chance = chance_of_sampling(rough.events(smallest))
        if 0 < chance <= target.delta and _is_met(cost, smallest, target):
            return smallest
        start, steepness = _estimated_start(rough, target.epsilon)
        near = _secant_search(
            rough.coarse,
            (1 + _COARSE_MARGIN) * target.epsilon,
            start,
            steepness=steepness,
            max_unspent=2 * _COARSE_MARGIN,
        )
        kinds = len(rough.events(near.multiplier))
        max_unspent = next(share for max_kinds, share in _MAX_UNSPENT if kinds <= max_kinds)
        if near.is_met:
            # near the target, unless the cost falls from above it to 0 at once, as grids make those of tiny targets
            above = _log(rough.closest(near.multiplier)) - _log((1 - max_unspent / 2) * target.epsilon)
            start = near.multiplier * _bounded_ratio(above / max(near.steepness, _MIN_STEEPNESS))
        else:
            start = search_outwards(rough.coarse, target.epsilon, start=near.multiplier, factor=1.02)
        factor = 1.02
        last = _secant_search(cost, target.epsilon, start, steepness=near.steepness, max_unspent=max_unspent)
        if last.is_met:
            return last.multiplier
        start = last.multiplier
    if cost(_NOISE_RANGE[1]) > target.epsilon:
        raise _unreachable(target.epsilon)
    return search_outwards(cost, target.epsilon, start=start, factor=factor)


def _is_met(cost: Callable[[float], float], multiplier: float, target: Budget) -> bool:
    """Whether a multiplier is known to cost at most the target."""
    with suppress(RefusedError):
        return cost(multiplier) <= target.epsilon
    return False


def _estimated_start(rough: "_RoughCosts", target: float) -> tuple[float, float]:
    """A multiplier whose estimated cost is about the target, and how steeply estimates fall there."""
    # Near what is released beside the noise, an estimate may never get down to the target.
    start = search_outwards(rough.estimate, target, factor=4.0, tolerance=0.1)
    fall = _log(rough.estimate(start)) - _log(rough.estimate(_ESTIMATE_RATIO * start))
    return start, fall / math.log(_ESTIMATE_RATIO)


class _RoughCosts:
    """Costs of a schedule by its multiplier that do for a search, since their grids are coarse and their kinds few.

    Each is kept, and none is a bound. From the rarest to the most exact: `estimate`, from a few hundred points a
    distribution; `coarse`, extrapolated from two grids; and `closest`, with all kinds of samples.
    """

    def __init__(
        self, schedule_at: Callable[[float], Schedule], target: Budget, adjacency: NeighboringRelation
    ) -> None:
        self._schedule_at, self._target, self._adjacency = schedule_at, target, adjacency
        self.events = lru_cache(self._events)
        self.coarse, self.estimate = lru_cache(self._coarse), lru_cache(self._estimate)
        self._cost_of_all_kinds: float | None = None
        """Relative to that of few kinds; from the first multiplier whose cost came near the target."""

    def _events(self, z: float) -> Schedule:
        """The events at a multiplier, as the accountants take them."""
        return translate(merge_events(self._schedule_at(z)), self._adjacency)

    def _coarse(self, z: float) -> float:
        """The larger cost of both sides, the more exact the nearer to the target; below half of it, a bound."""
        target, largest, floor_grid = self._target.epsilon, 0.0, None
        kinds = _merge_kinds(self.events(z))
        for side in range(len(_sides(ReprKey.of(kinds, self._adjacency, _SEARCH_GRID)))):
            floor = max(largest, target / 2)
            key = ReprKey.of(kinds, side, self._target.delta, target, floor, floor_grid, self._adjacency)
            cost, grid = _extrapolate_side(key)
            if target / 2 < cost < 2 * target:
                floor_grid = grid
                if self._cost_of_all_kinds is None:
                    self._cost_of_all_kinds = self._relative_cost_of_all(z, coarser=16.0)
                cost *= self._cost_of_all_kinds
            largest = max(largest, cost)
        return largest

    def closest(self, z: float) -> float:
        """The coarse cost with all kinds at this very multiplier, for a last step."""
        cost, relative = self.coarse(z), self._cost_of_all_kinds
        return cost if relative is None else cost / relative * self._relative_cost_of_all(z, coarser=0.25)

    def _estimate(self, z: float) -> float:
        """The cost for a record less, mostly the larger side."""
        return _estimate_side(ReprKey.of(_merge_kinds(self.events(z)), self._target.delta, self._adjacency))

    def _relative_cost_of_all(self, z: float, coarser: float) -> float:
        """The cost of all kinds over that of the few, on one grid."""
        events = self.events(z)
        kinds = _merge_kinds(events)
        if kinds is events:
            return 1.0
        few, every = (
            sides_of(pairs_of(schedule, self._adjacency, _SEARCH_GRID))[0] for schedule in (kinds, events)
        )
        return cost_ratio(every, few, self._target.delta, coarser=coarser)


@lru_cache(maxsize=4)
def _sides(key: ReprKey) -> list[list[tuple[PrivacyLoss, int]]]:
    events, adjacency, grid = key.arguments
    return sides_of(pairs_of(events, adjacency, grid))


@lru_cache(maxsize=1024)
def _extrapolate_side(key: ReprKey) -> tuple[float, float]:
    """`extrapolated_epsilon` of one side; kept, since the trials of a search mostly release the same."""
    events, side, delta, near, floor, floor_grid, adjacency = key.arguments
    plds = _sides(ReprKey.of(events, adjacency, _SEARCH_GRID))[side]
    return extrapolated_epsilon(plds, delta, near, floor=floor, floor_grid=floor_grid)


@lru_cache(maxsize=1024)
def _estimate_side(key: ReprKey) -> float:
    """`estimated_epsilon` of the first side; kept, too."""
    events, delta, adjacency = key.arguments
    return estimated_epsilon(_sides(ReprKey.of(events, adjacency, _ESTIMATE_GRID))[0], delta)


def _merge_kinds(events: Schedule) -> Schedule:
    """Samples of fewer kinds, `_SEARCH_KINDS`, that cost about the same, for a search: no bound, and never stated.

    Neighbours by rate and multiplier become two kinds whose logarithms have the same mean and, along the line on which
    they spread most, the same variance: the logarithm of a characteristic function is smooth in both.
    """
    is_sample = [
        isinstance(event, dp.PoissonSampledDpEvent)
        and isinstance(event.event, dp.GaussianDpEvent)
        and event.sampling_probability > 0
        for event, _ in events
    ]
    if sum(is_sample) <= _SEARCH_KINDS:
        return events
    others = [row for row, sample in zip(events, is_sample, strict=True) if not sample]
    table = np.array(
        [
            (math.log(event.sampling_probability), math.log(event.event.noise_multiplier), count)
            for (event, count), sample in zip(events, is_sample, strict=True)
            if sample
        ]
    )
    cells = [_KindCell(table)]
    while len(cells) < _SEARCH_KINDS // 2:
        widest = max(range(len(cells)), key=lambda at: cells[at].spread)
        cells[widest : widest + 1] = cells[widest].halves()
    few = [kind for cell in cells for kind in cell.kinds()]
    return [
        *others,
        *((dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), count) for rate, noise, count in few),
    ]


class _KindCell:
    """Neighbouring kinds of samples: logarithms of rate and multiplier, and the count, shape [kinds, 3]."""

    def __init__(self, table: Array) -> None:
        self._table, self._count = table, int(table[:, 2].sum())
        points, shares = table[:, :2], table[:, 2] / table[:, 2].sum()
        self._mean: Array = shares @ points
        away = points - self._mean
        variances, axes = np.linalg.eigh((shares * away.T) @ away)
        self._deviation, self._axis = math.sqrt(max(0.0, float(variances[-1]))), axes[:, -1]
        # About what they add to a moment of the losses, which kinds of much noise hardly do.
        moments = np.exp(2 * points[:, 0]) * np.expm1(np.minimum(4 * np.exp(-2 * points[:, 1]), 60.0))
        self.spread = float(table[:, 2] @ moments) * self._deviation**2

    def halves(self) -> list["_KindCell"]:
        """The kinds on either side of the mean."""
        is_above = (self._table[:, :2] - self._mean) @ self._axis > 0
        return [_KindCell(self._table[rows]) for rows in (is_above, ~is_above) if rows.any()]

    def kinds(self) -> list[tuple[float, float, int]]:
        """Rate, multiplier and count of one kind, or of two."""
        first = self._count // 2
        second = self._count - first
        if first == 0 or self._deviation == 0:
            return [(*np.exp(self._mean).tolist(), self._count)]
        # Two points that have the mean of all and, with these counts, their deviation along the axis.
        step = self._deviation * self._axis
        return [
            (*np.exp(self._mean + math.sqrt(second / first) * step).tolist(), first),
            (*np.exp(self._mean - math.sqrt(first / second) * step).tolist(), second),
        ]


def _check_orders_reach(cost: Callable[[float], float], target: Budget) -> None:
    """Refuses a target below what the orders state of a release that reveals nearly nothing.

    They state 0 once the total variation is below delta, which takes noise by which nothing is left to learn, unless
    the release is of few records.
    """
    minimum = epsilon_of_rdp(np.full(len(ORDERS), 2 * target.delta**2), target.delta)
    if target.epsilon <= minimum and cost(_MAX_SENSIBLE_NOISE) > target.epsilon:
        raise RefusedError(
            "Rényi divergences state no epsilon up to {least:.3g} at delta {delta:g} for noise multipliers up to"
            " {noise:.0e}, and {epsilon:g} is asked for; set {target.accountant} to pld, or {target.epsilon} to more"
            " than {least:.3g}.",
            code="epsilon_below_orders",
            least=minimum,
            delta=target.delta,
            noise=_MAX_SENSIBLE_NOISE,
            epsilon=target.epsilon,
        )


def _bounded_ratio(step: float) -> float:
    """The ratio of multipliers of a step of their logarithm, within bounds, as far costs tell the direction alone."""
    return math.exp(min(max(step, -0.5), 0.5))


class _SecantResult(NamedTuple):
    """Where a secant search ended.

    Attributes:
        multiplier: The last one.
        steepness: How steeply log cost falls by log multiplier there.
        is_met: Whether the multiplier costs the target or less by at most what may be left unspent. If the cost falls
            so steeply that grids decide it, one that is above a multiplier that costs too much, by at most that share
            of it, is as good.
    """

    multiplier: float
    steepness: float
    is_met: bool


def _secant_search(
    cost: Callable[[float], float], target: float, start: float, *, steepness: float, max_unspent: float
) -> _SecantResult:
    """Search for a multiplier that meets the target by the secant method on logarithms, in a few evaluations.

    Args:
        cost: Falls as the multiplier grows.
        target: The cost to meet from below.
        start: The first multiplier.
        steepness: Believed until two costs near the target are known.
        max_unspent: The share of the target by which the cost may be below it.
    """
    multiplier = start
    earlier: tuple[float, float] | None = None
    low, high, stretch = 0.0, math.inf, 1.0
    for _ in range(_MAX_SECANT_STEPS):
        spent = cost(multiplier)
        if spent <= target and (
            spent >= (1 - max_unspent) * target or multiplier <= max(_NOISE_RANGE[0], (1 + max_unspent) * low)
        ):
            return _SecantResult(multiplier, steepness, is_met=True)
        low, high = (multiplier, high) if spent > target else (low, multiplier)
        here = (
            (math.log(multiplier), _log(spent)) if target / _FAR_RATIO < spent < _FAR_RATIO * target else None
        )
        # Of costs closer than this, grids tell more than the multiplier.
        if earlier and here and abs(earlier[1] - here[1]) > 3 * max_unspent:
            steepness = (earlier[1] - here[1]) / (here[0] - earlier[0])
        earlier = here or earlier
        step = (_log(spent) - _log((1 - max_unspent / 2) * target)) / max(steepness, _MIN_STEEPNESS)
        stretch = 1.0 if here else 2 * stretch
        multiplier *= _bounded_ratio(stretch * step)
        if not low < multiplier < high or (here is None and 0 < low < high < math.inf):
            multiplier = math.sqrt(low * high)
    return _SecantResult(multiplier, steepness, is_met=False)


def search_outwards(
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
            raise _unreachable(target)
    while low >= high and low > _NOISE_RANGE[0]:
        low /= factor
        if cost(low) <= target:
            high = low
    if low <= _NOISE_RANGE[0]:
        return high
    return find_smallest(cost, target, low=low, high=high, tolerance=tolerance) or high


def _unreachable(target: float) -> RefusedError:
    return RefusedError(
        "no noise multiplier up to {largest:.0e} meets epsilon = {epsilon:g}; set {target.epsilon} to more, or"
        " take fewer steps, smaller batches or more noise in what is released beside them.",
        code="no_noise_meets_epsilon",
        largest=_NOISE_RANGE[1],
        epsilon=target,
    )


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
