"""From privacy events to epsilon and back: what a schedule costs, and the least noise that keeps it within a target.

An epsilon is by PLD, Rényi divergences or pure epsilons; under either adjacency, and for groups.

Two accountants of dp_accounting do the work: PLD (privacy loss distributions, tight) and RDP (Rényi). Both are valid
for a schedule that was fixed in advance; adaptive spending is enforced by `filters`. A third accountant adds up pure
epsilons, for delta = 0.

Events state the noise multiplier std / C for the bound C on one record, whatever the adjacency. Replacing a record
removes one and adds one, so a sum over all records moves by twice the bound. Events of samples are translated only if a
theorem says how, since the accountants have bounds of their own for them.

Every search for a multiplier in the house is `smallest`: it needs a cost that falls as its argument grows, and what it
returns was itself evaluated, so that rounding never ends above the limit.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import dp_accounting as dp
import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS
from numpy.typing import NDArray
from scipy.optimize import brentq

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.event_rules import loss_of, parts, rule_of
from algorithms.privacy.accounting.events import Schedule, unrolled

Array = NDArray[np.float64]
Adjacency: TypeAlias = dp.NeighboringRelation
ADD_OR_REMOVE_ONE = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = dp.NeighboringRelation.REPLACE_ONE


def adjacency_named(name: str) -> Adjacency:
    """The adjacency with a name; raises RefusedError for one without accounting."""
    known = {adjacency.name: adjacency for adjacency in (ADD_OR_REMOVE_ONE, REPLACE_ONE)}
    if name not in known:
        raise RefusedError(f"the adjacency {name!r} is not known; choose {' or '.join(known)}.")
    return known[name]


def as_add_remove(adjacency: Adjacency, event: dp.DpEvent) -> dp.DpEvent:
    """The event for the accountants; raises RefusedError if no theorem covers it under this adjacency.

    Also refuses events with impossible numbers, as in an edited document.
    """
    _check(adjacency, event)
    plain = event if adjacency is ADD_OR_REMOVE_ONE else rule_of(event).replacing(event)
    return rule_of(plain).amplified(plain)


def pure_epsilon(event: dp.DpEvent) -> float:
    """The epsilon of a purely private event that `as_add_remove` returned; infinite if it is not private.

    Raises RefusedError if the event is not purely private.
    """
    return rule_of(event).pure_epsilon(event)


def _check(adjacency: Adjacency, event: dp.DpEvent) -> None:
    """Raises RefusedError for an event that no theorem covers, at any depth of nesting."""
    if not rule_of(event).is_possible(event):
        raise RefusedError(
            f"{event} is no mechanism: a number in it is out of its range; check the document."
        )
    if not rule_of(event).is_proven(event, adjacency):
        raise RefusedError(
            "sampling without replacement is proven under replace-one alone, not under add-or-remove-one;"
            " take a full batch or a Poisson sample."
        )
    for inner in parts(event):
        _check(adjacency, inner)


def group_privacy(event: dp.DpEvent, count: int) -> dp.DpEvent:
    """An event whose loss bounds that of `event` if `count` records are added or removed together.

    A sum moves by at most `count` bounds. A Poisson sample contains at least one of the records with probability
    1 - (1 - rate)^count, and then moves by at most all of them: divergences are convex in the shifted output, so the
    largest shift at that rate is the worst. zCDP grows with the square (Bun and Steinke 2016, Proposition 1.9).
    Raises RefusedError for events without a result on groups.
    """
    return event if count == 1 else rule_of(event).grouped(event, count)


ORDERS = tuple(float(order) for order in DEFAULT_RDP_ORDERS)


def rdp(
    schedule: Schedule, *, orders: tuple[float, ...] = ORDERS, adjacency: Adjacency = ADD_OR_REMOVE_ONE
) -> np.ndarray:
    """The Rényi divergence bound of a schedule at each order, shape [orders]."""
    total = np.zeros(len(orders))
    for event, count in schedule:
        total += count * _event_rdp(_Asked.of(event, orders, adjacency))
    return total


def epsilon_of_rdp(divergences: np.ndarray, delta: float, orders: tuple[float, ...] = ORDERS) -> float:
    """The epsilon at `delta` of Rényi bounds, shape [orders], at the best of their orders.

    Source: Mironov 2017; Canonne et al. 2020, Proposition 12.
    """
    if np.isinf(divergences).all():
        return math.inf
    return float(compute_epsilon(orders, divergences, delta)[0])


@dataclass(frozen=True)
class _Asked:
    """Arguments of a cached function, equal if written alike: a ComposedDpEvent holds a list, which has no hash."""

    text: str
    arguments: Any = field(compare=False)

    @classmethod
    def of(cls, *arguments: Any) -> "_Asked":
        return cls(repr(arguments), arguments)


@lru_cache(maxsize=4096)
def _event_rdp(asked: _Asked) -> np.ndarray:
    event, orders, adjacency = asked.arguments
    if is_not_private(event):
        return np.full(len(orders), math.inf)
    plain = as_add_remove(adjacency, event)
    divergences: np.ndarray = rule_of(plain).rdp(plain, orders, adjacency)
    divergences.setflags(write=False)
    return divergences


def is_not_private(event: dp.DpEvent) -> bool:
    """Whether an event, or one of its parts, gives no privacy."""
    return isinstance(event, dp.NonPrivateDpEvent) or any(map(is_not_private, parts(event)))


def composed(schedule: Schedule, grid: float, adjacency: Adjacency) -> PrivacyLossDistribution:
    """The privacy loss distribution of a schedule, with losses rounded up to multiples of `grid`.

    Raises RefusedError for an event without one.
    """
    return loss_of(((as_add_remove(adjacency, event), count) for event, count in schedule), grid, adjacency)


def in_few_kinds(schedule: Schedule) -> Schedule:
    """A schedule that costs at least as much but has fewer kinds of events, so that composing it is fast.

    Equal events are counted together, and Gaussian events are combined exactly. An event of several releases is
    replaced by these.
    """
    schedule = _counted(unrolled(schedule))
    gaussian = [(event, count) for event, count in schedule if isinstance(event, dp.GaussianDpEvent)]
    others = [(event, count) for event, count in schedule if not isinstance(event, dp.GaussianDpEvent)]
    return [*_added_up(gaussian), *others]


def _counted(schedule: Schedule) -> Schedule:
    """Each event once, with its total count."""
    counts: dict[str, tuple[dp.DpEvent, int]] = {}
    for event, count in schedule:
        counts[repr(event)] = (event, counts.get(repr(event), (event, 0))[1] + count)
    return list(counts.values())


def _added_up(schedule: Schedule) -> Schedule:
    if len({event for event, _ in schedule}) < 2:
        return schedule
    precision = math.fsum(count / event.noise_multiplier**2 for event, count in schedule)
    return [(dp.GaussianDpEvent(1.0 / math.sqrt(precision)), 1)]


Accountant = Literal["pld", "rdp", "pure"]
ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "pure")

FINE, FINEST, COARSENING = 1e-4, 1e-5, 10.0
LEAST_PLD_DELTA = 1e-11
"""Below this delta, the tail of a composed distribution is noise of the Fourier transform; Rényi bounds are used."""
TRANSFORM_NOISE = 2.0**-49
"""What this noise can add to a tail, per root of the number of releases: three times the observed size."""
_STEPS_A_LOSS, _STEPS_IN_ALL = 16, 1e6
_VAST, _STEPS_OF_VAST = 50.0, 1e5
_TAIL_ORDER = 63.0


def epsilon(
    schedule: Schedule,
    delta: float,
    *,
    accountant: Accountant = "pld",
    adjacency: Adjacency = ADD_OR_REMOVE_ONE,
    discretisation: float | None = None,
) -> float:
    """The epsilon of a schedule that was fixed in advance, at `delta`; an upper bound with every accountant.

    delta: in (0, 1), or 0 for the accountant "pure". Below 1e-11, "pld" returns the Rényi bound, see `LEAST_PLD_DELTA`.
    discretisation: grid of privacy losses, for PLD only; by default chosen from the schedule. Returns infinity if an
    event is not private. Raises RefusedError if the accountant does not support an event.
    Source: Koskela et al. 2020 and Doroshenko et al. 2022 (PLD); Mironov 2017 and Canonne et al. 2020,
    Proposition 12 (RDP and its conversion).
    """
    return _epsilon(_Asked.of([*schedule], delta, accountant, adjacency, discretisation))


@lru_cache(maxsize=128)
def _epsilon(asked: _Asked) -> float:
    """`epsilon` with a cache, since calibration, plan and card compute the same epsilon."""
    schedule, delta, accountant, adjacency, discretisation = asked.arguments
    if accountant != "pure" and not 0 < delta < 1:
        raise RefusedError(f"delta must lie strictly between 0 and 1, not {delta}; 1/n or less is customary.")
    if any(is_not_private(event) for event, _ in schedule):
        return math.inf
    if accountant == "pure":
        return math.fsum(count * pure_epsilon(as_add_remove(adjacency, event)) for event, count in schedule)
    for event, _ in schedule:
        as_add_remove(adjacency, event)  # what is refused is refused before it is merged with others
    few = in_few_kinds(schedule)
    if accountant == "rdp" or delta < LEAST_PLD_DELTA:
        return epsilon_of_rdp(rdp(few, adjacency=adjacency), delta)
    grid = discretisation or discretisation_of(few, delta, adjacency)
    noise = TRANSFORM_NOISE * math.sqrt(sum(count * _releases(event) for event, count in few))
    if noise > delta / 2:
        return epsilon_of_rdp(rdp(few, adjacency=adjacency), delta)
    return float(composed(few, grid or FINE, adjacency).get_epsilon_for_delta(delta - noise))


def _releases(event: dp.DpEvent) -> int:
    """The number of releases in an event."""
    inner = sum(map(_releases, parts(event))) or 1
    if isinstance(event, dp.dp_event.RepeatAndSelectDpEvent):
        inner *= math.ceil(event.mean**2)  # deltas are so many times those of a trial
    return int(event.count) * inner if isinstance(event, dp.SelfComposedDpEvent) else inner


def discretisation_of(schedule: Schedule, delta: float, adjacency: Adjacency) -> float | None:
    """A grid that is fine enough to add far less than the result, yet fast for heavy-tailed losses.

    None below `LEAST_PLD_DELTA`, where no grid is used. If losses are bounded, the grid has sixteen steps up to the
    smallest bound, so that rounding up does not add a share of a step to each of a thousand equal losses.
    """
    if delta < LEAST_PLD_DELTA:
        return None
    if _is_vast(schedule, adjacency):
        return max(FINE, epsilon_of_rdp(rdp(schedule, adjacency=adjacency), delta) / _STEPS_OF_VAST)
    count = sum(count for _, count in schedule)
    losses = list(_largest_losses(schedule, adjacency))
    if count < 10_000 and all(loss >= _STEPS_A_LOSS * FINE for loss in losses):
        return FINE  # as below, without the Renyi bound, which takes longer than the rest of a calibration
    try:
        upper = epsilon_of_rdp(rdp(schedule, adjacency=adjacency), delta)
    except RefusedError:
        return FINE
    smallest = min(losses, default=math.inf)
    if smallest < _STEPS_A_LOSS * FINE:
        return max(smallest / _STEPS_A_LOSS, min(upper / _STEPS_IN_ALL, FINEST))
    tails = (rdp([(event, 1)], orders=(_TAIL_ORDER,), adjacency=adjacency)[0] for event, _ in schedule)
    return FINEST if upper < 0.4 and count >= 10_000 and max(tails) < 10 else FINE


def _is_vast(schedule: Schedule, adjacency: Adjacency) -> bool:
    """Whether losses are so large that a fine grid would fill the memory."""
    try:
        return bool(_VAST < rdp(schedule, orders=(2.0,), adjacency=adjacency)[0] < math.inf)
    except RefusedError:
        return False


def _largest_losses(schedule: Schedule, adjacency: Adjacency) -> Iterator[float]:
    """The largest loss of each event with a bounded loss."""
    for event, _ in schedule:
        with suppress(RefusedError):
            if 0 < (loss := pure_epsilon(as_add_remove(adjacency, event))) < math.inf:
                yield loss


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
