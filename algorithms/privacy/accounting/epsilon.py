"""From privacy events to epsilon and back: what a schedule costs, and the least noise that keeps it within a target.

An epsilon is by PLD, Rényi divergences or pure epsilons; under either adjacency, and for groups.

Two accountants of dp_accounting do the work: PLD (privacy loss distributions, tight) and RDP (Rényi). Both are valid
for a schedule that was fixed in advance; adaptive spending is enforced by `filters`. A third accountant adds up pure
epsilons, for delta = 0.

Events state the noise multiplier std / C for the bound C on one record, whatever the adjacency. Replacing a record
removes one and adds one, so a sum over all records moves by twice the bound. Events of samples are translated only if a
theorem says how, since the accountants have bounds of their own for them.

All noise calibration goes through `calibrate`: the cost falls as the noise multiplier grows, and the multiplier that is
returned was itself priced as the plan prices it, so that neither a coarse search nor rounding ends above the target.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import dp_accounting.dp_event as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_epsilon
from numpy.typing import NDArray
from scipy.optimize import brentq

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Accountant as Accountant
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.event_rules import (
    alternatives_of,
    check_possible,
    compose_pld,
    pairs_of,
    parts,
    rule_of,
)
from algorithms.privacy.accounting.events import (
    Schedule,
    check_payments,
    count_same,
    disjoint_parts_of,
    unroll,
)
from algorithms.privacy.accounting.gaussian import gaussian_epsilon
from algorithms.privacy.accounting.pairs import TAIL_DELTA
from algorithms.privacy.accounting.pld import PrivacyLoss
from algorithms.privacy.accounting.pld_epsilon import ComposedPLD, epsilon_of, epsilon_on_grid, sides_of
from algorithms.privacy.accounting.pld_search import cost_ratio, estimated_epsilon, extrapolated_epsilon
from algorithms.privacy.accounting.selection import shift_of_trials

Array = NDArray[np.float64]
ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = NeighboringRelation.REPLACE_ONE


def adjacency_named(name: str) -> NeighboringRelation:
    """The adjacency with a name; raises RefusedError for one without accounting."""
    known = {adjacency.name: adjacency for adjacency in (ADD_OR_REMOVE_ONE, REPLACE_ONE)}
    if name not in known:
        raise RefusedError(f"the adjacency {name!r} is not known; choose {' or '.join(known)}.")
    return known[name]


def event_for_accountants(adjacency: NeighboringRelation, event: dp.DpEvent) -> dp.DpEvent:
    """The event whose cost the accountants compute for one that is counted under an adjacency.

    Under add-or-remove-one it is the event itself, but for samples that no accountant takes, of which the amplification
    is computed here. Under replace-one its numbers are in units of what one record that is replaced by another moves:

    - Of all records and of a sample of a fixed size, a sum moves by twice the bound on one record: the noise multiplier
      z becomes z / 2, a pure epsilon twice and a rho four times as large.
    - Of a Poisson sample with Gaussian noise, z stays the multiple of the bound on one record, since its losses and
      Rényi bounds are computed for the two records by themselves.

    Raises RefusedError if no theorem covers the event under this adjacency, and for impossible numbers, as in an edited
    document.
    """
    _check(adjacency, event)
    plain = event if adjacency is ADD_OR_REMOVE_ONE else rule_of(event).under_replace_one(event)
    return rule_of(plain).with_amplification(plain)


def pure_epsilon(event: dp.DpEvent) -> float:
    """The epsilon of a purely private event that `event_for_accountants` returned; infinite if it is not private.

    Raises RefusedError if the event is not purely private.
    """
    return rule_of(event).pure_epsilon(event)


def _check(adjacency: NeighboringRelation, event: dp.DpEvent) -> None:
    """Raises RefusedError for an event that no theorem covers, at any depth of nesting."""
    check_possible(event)
    if not rule_of(event).is_proven(event, adjacency):
        raise RefusedError(
            "sampling without replacement is proven under REPLACE_ONE alone; set {method.adjacency} to it,"
            " or take a full batch or a Poisson sample.",
            code="sample_without_bound",
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
    return event if count == 1 else rule_of(event).group_privacy(event, count)


ORDERS = tuple(float(order) for order in DEFAULT_RDP_ORDERS)


def rdp(
    schedule: Schedule,
    *,
    orders: tuple[float, ...] = ORDERS,
    adjacency: NeighboringRelation = ADD_OR_REMOVE_ONE,
) -> np.ndarray:
    """The Rényi divergence bound of a schedule at each order, shape [orders]."""
    total = np.zeros(len(orders))
    for event, count in schedule:
        total += count * _event_rdp(ReprKey.of(event, orders, adjacency))
    return total


def epsilon_of_rdp(divergences: np.ndarray, delta: float, orders: tuple[float, ...] = ORDERS) -> float:
    """The epsilon at `delta` of Rényi bounds, shape [orders], at the best of their orders.

    Source: Mironov 2017; Canonne et al. 2020, Proposition 12.
    """
    # The library takes what is no number for nothing.
    known = np.where(np.isnan(divergences), math.inf, divergences)
    if np.isinf(known).all():
        return math.inf
    return float(compute_epsilon(orders, known, delta)[0])


@dataclass(frozen=True)
class ReprKey:
    """Arguments of a cached function, equal if written alike: a ComposedDpEvent holds a list, which has no hash."""

    text: str
    arguments: Any = field(compare=False)

    @classmethod
    def of(cls, *arguments: Any) -> "ReprKey":
        return cls(repr(arguments), arguments)


@lru_cache(maxsize=4096)
def _event_rdp(key: ReprKey) -> np.ndarray:
    event, orders, adjacency = key.arguments
    if is_not_private(event):
        return np.full(len(orders), math.inf)
    plain = event_for_accountants(adjacency, event)
    divergences: np.ndarray = rule_of(plain).rdp(plain, orders, adjacency)
    divergences.setflags(write=False)
    return divergences


def is_not_private(event: dp.DpEvent) -> bool:
    """Whether an event, or one of its parts, gives no privacy."""
    return isinstance(event, dp.NonPrivateDpEvent) or any(map(is_not_private, parts(event)))


MIN_DELTA = 1e-12
"""The least delta for which whole privacy profiles are computed."""
_SEARCH_GRID, _ESTIMATE_GRID = 1e-3, 1e-2
"""Distances of privacy losses on the grids of single mechanisms, while noise is searched for and first estimated."""
_NEXT_TO, _FINER = 1e-3, 8.0
"""A cost within this share above a stated one is computed again, on a grid so many times finer."""


def compose_loss(
    schedule: Schedule,
    adjacency: NeighboringRelation,
    *,
    delta: float = MIN_DELTA,
    grid: float | None = None,
    coarser: float = 1.0,
) -> ComposedPLD:
    """The privacy loss of a schedule for deltas from `delta` on; raises RefusedError for an event without one.

    grid, coarser: As for `ComposedPLD`.
    """
    return compose_pld(_translate(schedule, adjacency), adjacency, delta, grid, coarser)


def _translate(schedule: Schedule, adjacency: NeighboringRelation) -> list[tuple[dp.DpEvent, int]]:
    return [(event_for_accountants(adjacency, event), count) for event, count in schedule]


def merge_events(schedule: Schedule) -> Schedule:
    """The single releases of a schedule, in fewer kinds that cost the same.

    An event that stands for several is replaced by these, however it is nested, and equal ones are counted together.
    Gaussian releases without sampling are one: their losses are normal with mean mu^2 / 2 and variance mu^2, and mu^2
    is 1 / z^2, added up (Dong, Roth and Su 2022, Corollary 3.3).
    """
    schedule = _count_equal(
        [(event, count) for event, count in unroll(schedule) if not isinstance(event, dp.NoOpDpEvent)]
    )
    gaussian = [(event, count) for event, count in schedule if isinstance(event, dp.GaussianDpEvent)]
    others = [(event, count) for event, count in schedule if not isinstance(event, dp.GaussianDpEvent)]
    return [*_merge_gaussians(gaussian), *others]


def _count_equal(schedule: Schedule) -> Schedule:
    """Each event once, with its total count."""
    counts: dict[str, tuple[dp.DpEvent, int]] = {}
    for event, count in count_same(schedule):
        counts[repr(event)] = (event, counts.get(repr(event), (event, 0))[1] + count)
    return list(counts.values())


def _merge_gaussians(schedule: Schedule) -> Schedule:
    if len({event for event, _ in schedule}) < 2:
        return schedule
    precision = math.fsum(count / event.noise_multiplier**2 for event, count in schedule)
    return [(dp.GaussianDpEvent(1.0 / math.sqrt(precision)), 1)]


ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "pure")


def epsilon(
    schedule: Schedule,
    delta: float,
    *,
    accountant: Accountant = "pld",
    adjacency: NeighboringRelation = ADD_OR_REMOVE_ONE,
    discretisation: float | None = None,
) -> float:
    """The epsilon of a schedule that was fixed in advance, at `delta`; an upper bound with every accountant.

    delta: in (0, 1), or 0 for the accountant "pure". discretisation: grid of privacy losses, for PLD only; by default
    one that adds less than 1e-4 of the result. Where losses are known down to some delta only, so that PLD states
    infinity, "pld" is the epsilon by Rényi divergences. Returns infinity if an event is not private. Raises
    RefusedError if the accountant does not support an event.
    Source: Koskela et al. 2020 and Doroshenko et al. 2022 (PLD); Mironov 2017 and Canonne et al. 2020,
    Proposition 12 (RDP and its conversion).
    """
    return _epsilon(ReprKey.of(count_same(schedule), delta, accountant, adjacency, discretisation))


@lru_cache(maxsize=128)
def _epsilon(key: ReprKey) -> float:
    """`epsilon` with a cache, since calibration, plan and card compute the same epsilon."""
    schedule, delta, accountant, adjacency, discretisation = key.arguments
    if accountant != "pure" and not 0 < delta < 1:
        raise RefusedError(
            "delta must lie strictly between 0 and 1, not {delta}; set {target.delta}, customarily to 1/n or"
            " less.",
            code="delta_outside",
            delta=delta,
        )
    if any(is_not_private(event) for event, _ in schedule):
        return math.inf
    if disjoint := disjoint_parts_of(schedule):
        event_for_accountants(adjacency, schedule[0][0])
        how = {"accountant": accountant, "adjacency": adjacency, "discretisation": discretisation}
        return max(epsilon(part, delta, **how) for part in disjoint)
    if accountant == "pure":
        check_payments(schedule)
        return math.fsum(
            count * pure_epsilon(event_for_accountants(adjacency, event)) for event, count in schedule
        )
    if accountant == "rdp":
        for event, _ in schedule:
            event_for_accountants(
                adjacency, event
            )  # what is refused is refused before it is merged with others
        return epsilon_of_rdp(rdp(merge_events(schedule), adjacency=adjacency), delta)
    return _by_pld(schedule, delta, adjacency, discretisation)[0]


def epsilon_near(
    stated: float, schedule: Schedule, delta: float, *, accountant: Accountant, adjacency: NeighboringRelation
) -> float:
    """Epsilon, more finely where it is next to what is stated, as by another version with another grid.

    Two grids both give upper bounds, and either may be the larger one by what is left of its error.
    """
    cost = epsilon(schedule, delta, accountant=accountant, adjacency=adjacency)
    if accountant != "pld" or not stated < cost <= stated * (1 + _NEXT_TO):
        return cost
    grid = discretisation_of(schedule, delta, adjacency)
    if grid is None:
        return cost
    return min(cost, epsilon(schedule, delta, adjacency=adjacency, discretisation=grid / _FINER))


def discretisation_of(schedule: Schedule, delta: float, adjacency: NeighboringRelation) -> float | None:
    """The grid of privacy losses that `epsilon` uses; None for a closed form, and where no such losses are known."""
    if any(is_not_private(event) for event, _ in schedule):
        return None
    try:
        disjoint = disjoint_parts_of(schedule) or [[*schedule]]
        return max((_by_pld(part, delta, adjacency, None) for part in disjoint), key=itemgetter(0))[1]
    except RefusedError:
        return None


def _by_pld(
    schedule: Schedule, delta: float, adjacency: NeighboringRelation, grid: float | None
) -> tuple[float, float | None]:
    return _pld_epsilon(ReprKey.of(count_same(schedule), delta, adjacency, grid))


@lru_cache(maxsize=128)
def _pld_epsilon(key: ReprKey) -> tuple[float, float | None]:
    """Epsilon by PLD, and the grid: exactly for Gaussian releases alone, else the larger of both sides."""
    schedule, delta, adjacency, grid = key.arguments
    for event, _ in schedule:
        event_for_accountants(adjacency, event)  # what is refused is refused before it is merged with others
    schedule = merge_events(schedule)
    events = _translate(schedule, adjacency)
    if _are_hardly_sampled(events, delta):
        return 0.0, None
    if (best := _epsilon_of_search(schedule, delta, adjacency, grid)) is not None:
        return best
    if all(isinstance(event, dp.GaussianDpEvent) for event, _ in events):
        mu = math.sqrt(math.fsum(count / event.noise_multiplier**2 for event, count in events))
        return gaussian_epsilon(mu, delta), None
    beside = _epsilon_beside_rare_samples(schedule, events, delta, adjacency, grid)
    if beside is not None and _publish_what_they_read(events, beside[0], adjacency):
        return beside
    try:
        together = _epsilon_on_grids(schedule, events, delta, adjacency, grid)
    except RefusedError:  # as where hardly any noise makes losses that are as rare as they are large
        if beside is None:
            raise
        return beside
    return together if beside is None else min(together, beside, key=itemgetter(0))


def _epsilon_on_grids(
    schedule: Schedule,
    events: Schedule,
    delta: float,
    adjacency: NeighboringRelation,
    grid: float | None,
) -> tuple[float, float | None]:
    """The larger epsilon of both sides by privacy loss distributions of all events, and the grid.

    events: As the accountants take those of the schedule.
    """
    cost = 0.0
    if grid is not None:
        for plds in sides_of(pairs_of(events, adjacency, grid)):
            cost = max(cost, epsilon_on_grid(plds, delta, grid, floor=cost))
        return min(cost, _sum_of_pure(events)), grid
    for plds in sides_of(pairs_of(events, adjacency)):
        side = epsilon_of(plds, delta, floor=cost, floor_grid=grid)
        cost, grid = max((cost, grid), side, key=itemgetter(0))
    if cost == math.inf:  # the tail of a search or of a user's own mechanism is known down to some delta only
        with suppress(RefusedError):
            return epsilon_of_rdp(rdp(schedule, adjacency=adjacency), delta), None
    return min(cost, _sum_of_pure(events)), grid


def _epsilon_beside_rare_samples(
    schedule: Schedule,
    events: Schedule,
    delta: float,
    adjacency: NeighboringRelation,
    grid: float | None,
) -> tuple[float, float | None] | None:
    """The epsilon of all other events at what the chance of being sampled leaves of delta, and its grid.

    None unless some events are samples and the chance c that any of these reads the record in which neighbours differ
    is below delta, while others read it for certain. Proof that it bounds the epsilon of all: let P and Q be the
    outputs for two neighbours, and R those where the samples read what they read under Q, and the others what they
    read under P. P and R are the same unless a sample reads the record, so that P(S) <= R(S) + c for every set S. R
    and Q differ by the others alone, whatever the samples gave them before, so that R(S) <= exp(epsilon) Q(S) +
    delta - c if the others have this epsilon at delta - c. It holds with P and Q exchanged, too, so for a record less
    and for one more.
    """
    chances = [rule_of(event).sampling_chance(event) for event, _ in events]
    others = [row for row, chance in zip(schedule, chances, strict=True) if chance >= 1]
    chance = _chance_of_sampling(events) * (1 + 2.0**-40)
    if not others or len(others) == len(schedule) or not chance < delta:
        return None
    with suppress(RefusedError):
        return _by_pld(others, delta - chance, adjacency, grid)
    return None


def _epsilon_of_search(
    schedule: Schedule, delta: float, adjacency: NeighboringRelation, grid: float | None
) -> tuple[float, float | None] | None:
    """The epsilon of a search and nothing beside it, and the widest grid of its trials; None for other schedules.

    At delta the search costs what its dearest trial costs at delta over the mean number of trials, and a shift for what
    the number of trials tells. Also None where a trial costs nothing there: its profile goes on below an epsilon of 0.
    """
    (event, count), *others = schedule or [(dp.NoOpDpEvent(), 1)]
    if others or count != 1 or not isinstance(event, dp.RepeatAndSelectDpEvent):
        return None
    delta_of_trial = delta / event.mean
    different = {repr(kind): kind for kind in alternatives_of(event.event)}
    trials = [merge_events([(kind, 1)]) for kind in different.values()]
    costs = [_by_pld(trial, delta_of_trial, adjacency, grid) for trial in trials]
    largest = max(epsilon for epsilon, _ in costs)
    if not 0 < largest < math.inf:
        return None
    translated = [_translate(trial, adjacency) for trial in trials]
    losses = [
        ComposedPLD(pairs_of(events, adjacency), TAIL_DELTA, by_delta=True)
        for events in translated
        if not _are_hardly_sampled(events, delta_of_trial)
    ]
    delta_of_others = delta_of_trial if len(losses) < len(trials) else 0.0
    widest = max((width for _, width in costs if width is not None), default=None)
    return largest + shift_of_trials(event, losses, delta_of_others), widest


def _sum_of_pure(events: Schedule) -> float:
    """What purely private events add up to, which no grid needs to state more than; infinite for others."""
    with suppress(RefusedError):
        return math.fsum(count * pure_epsilon(event) for event, count in events)
    return math.inf


def _are_hardly_sampled(events: Schedule, delta: float) -> bool:
    """Whether neighbours' records are read at all with a chance of at most delta, which is then delta at epsilon 0."""
    return _chance_of_reading(events) * (1 + 2.0**-40) <= delta


def _chance_of_reading(events: Schedule) -> float:
    """A bound on the chance that any of the events reads a record in which neighbours differ; may be above 1."""
    return math.fsum(count * rule_of(event).sampling_chance(event) for event, count in events)


def _chance_of_sampling(events: Schedule) -> float:
    """A bound on the chance that any of the samples among the events reads such a record; may be above 1."""
    every = [(rule_of(event).sampling_chance(event), count) for event, count in events]
    return math.fsum(count * chance for chance, count in every if chance < 1)


def _publish_what_they_read(events: Schedule, epsilon: float, adjacency: NeighboringRelation) -> bool:
    """Whether the samples among the events have losses far above epsilon nearly as often as they read the record.

    Then what `_epsilon_beside_rare_samples` gives is next to the epsilon of all events together, whose losses reach so
    far that grids of them are long.
    """
    samples = [(event, count) for event, count in events if rule_of(event).sampling_chance(event) < 1]
    far = epsilon + np.array([_FAR_ABOVE, 2 * _FAR_ABOVE])
    above = [(pair.remove.cells(far), count) for pair, count in pairs_of(samples, adjacency)]
    often = math.fsum(count * float(cells.p[0] + cells.above[0]) for cells, count in above)
    return often > _NEARLY_ALL * _chance_of_sampling(samples)


_FAR_ABOVE, _NEARLY_ALL = 7.0, 0.999
"""How much larger a loss is that counts nearly as much as an infinite one; and a share that is nearly all."""
_MAX_DELTA_SHARE = 0.1
"""The share of the chance that a record is read up to which delta is negligible beside it."""


def rare_reading_chance(schedule: Schedule, delta: float, adjacency: NeighboringRelation) -> float | None:
    """The chance that a record is sampled, at most, where delta is no longer negligible beside it; else None.

    Delta may be the chance of anything at all, so a mechanism that publishes some of the records that it samples can
    keep the same (epsilon, delta); where the chance is at most delta, it may publish all of them. The statement is
    correct, and protects those who are not sampled. What reads all records beside, as a private count, changes nothing
    of that. Raises RefusedError for events without a bound.

    Example:
        >>> step = dp.PoissonSampledDpEvent(1e-8, dp.GaussianDpEvent(1e-6))
        >>> rare_reading_chance([(step, 100)], 1e-5, ADD_OR_REMOVE_ONE)
        1e-06
        >>> rare_reading_chance([(step, 100)], 1e-8, ADD_OR_REMOVE_ONE) is None
        True
    """
    if any(is_not_private(event) for event, _ in schedule):
        return None
    parts_of_people = disjoint_parts_of(schedule) or [[*schedule]]
    chance = min(_chance_of_samples_within(part, adjacency) for part in parts_of_people)
    return chance if chance > 0 and _MAX_DELTA_SHARE * chance < delta else None


def _chance_of_samples_within(schedule: Schedule, adjacency: NeighboringRelation) -> float:
    """`_chance_of_sampling` of all samples of a schedule, also within what consists of others, as trials of a search.

    Such an event as a whole reads a record for certain where a part of it does.
    """
    chance = 0.0
    for event, count in merge_events(schedule):
        is_search = isinstance(event, dp.RepeatAndSelectDpEvent)
        times, run = (count * event.mean, event.event) if is_search else (count, event)
        kinds = alternatives_of(run)
        if is_search or len(kinds) > 1:
            chance += times * max(_chance_of_samples_within([(kind, 1)], adjacency) for kind in kinds)
        else:
            chance += _chance_of_sampling(_translate([(event, count)], adjacency))
    return chance


LEVELS = 24
"""The most different noise multipliers in a plan; each costs the accountant a distribution of its own."""

_SEARCH_KINDS = LEVELS
"""The most kinds of samples that noise is searched with; what that changes is estimated once."""
_NOISE_RANGE, _MOST_SENSIBLE_NOISE = (1e-6, 1e9), 1e4
"""Noise multipliers that are looked at, and the one above which no sum of usual size is told from noise."""
_TOLERANCE, _COARSE_MARGIN = 2e-4, 2e-3
"""The share of a multiplier to which it is found; and that of epsilon by which coarse costs are aimed above it."""
_MAX_UNSPENT = ((8, 2e-4), (_SEARCH_KINDS, 5e-4), (math.inf, 1e-3))
"""The share of epsilon that noise may leave unspent, for up to so many kinds of samples: each evaluation of many takes
long, and of more than noise is searched with, the coarse cost is less exact."""
_FINE_TOLERANCE = 2e-5
"""The share of a multiplier to which it is found by Rényi divergences or pure epsilons, which take less time."""
_STEPS, _MIN_STEEPNESS, _APART, _FAR = 10, 0.1, 1.2, 8.0
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
    root = brentq(excess, math.log(low), math.log(high), xtol=tolerance)
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
        chance = _chance_of_sampling(rough.events(smallest))
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
    fall = _log(rough.estimate(start)) - _log(rough.estimate(_APART * start))
    return start, fall / math.log(_APART)


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
        return _translate(merge_events(self._schedule_at(z)), self._adjacency)

    def _coarse(self, z: float) -> float:
        """The larger cost of both sides, the more exact the nearer to the target; below half of it, a bound."""
        target, largest, floor_grid = self._target.epsilon, 0.0, None
        kinds = _merge_kinds(self.events(z))
        for side in range(len(_sides(ReprKey.of(kinds, self._adjacency, _SEARCH_GRID)))):
            floor = max(largest, target / 2)
            key = ReprKey.of(kinds, side, self._target.delta, target, floor, floor_grid, self._adjacency)
            cost, grid = _extrapolated(key)
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
        return _estimated(ReprKey.of(_merge_kinds(self.events(z)), self._target.delta, self._adjacency))

    def _relative_cost_of_all(self, z: float, coarser: float) -> float:
        """The cost of all kinds over that of the few, on one grid."""
        events = self.events(z)
        kinds = _merge_kinds(events)
        if kinds is events:
            return 1.0
        few, every = (sides_of(pairs_of(some, self._adjacency, _SEARCH_GRID))[0] for some in (kinds, events))
        return cost_ratio(every, few, self._target.delta, coarser=coarser)


@lru_cache(maxsize=4)
def _sides(key: ReprKey) -> list[list[tuple[PrivacyLoss, int]]]:
    events, adjacency, grid = key.arguments
    return sides_of(pairs_of(events, adjacency, grid))


@lru_cache(maxsize=1024)
def _extrapolated(key: ReprKey) -> tuple[float, float]:
    """`extrapolated_epsilon` of one side; kept, since the trials of a search mostly release the same."""
    events, side, delta, near, floor, floor_grid, adjacency = key.arguments
    plds = _sides(ReprKey.of(events, adjacency, _SEARCH_GRID))[side]
    return extrapolated_epsilon(plds, delta, near, floor=floor, floor_grid=floor_grid)


@lru_cache(maxsize=1024)
def _estimated(key: ReprKey) -> float:
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
        return [_KindCell(self._table[some]) for some in (is_above, ~is_above) if some.any()]

    def kinds(self) -> list[tuple[float, float, int]]:
        """Rate, multiplier and count of one kind, or of two."""
        first = self._count // 2
        second = self._count - first
        if first == 0 or self._deviation == 0:
            return [(*np.exp(self._mean).tolist(), self._count)]
        step = self._deviation * self._axis
        return [
            (*np.exp(self._mean + math.sqrt(second / first) * step).tolist(), first),
            (*np.exp(self._mean - math.sqrt(first / second) * step).tolist(), second),
        ]


def _check_orders_reach(cost: Callable[[float], float], target: Budget) -> None:
    """Refuses a target below what the orders state of a release that tells nearly nothing.

    They state 0 once the total variation is below delta, which takes noise by which nothing is left to learn, unless
    the release is of few records.
    """
    least = epsilon_of_rdp(np.full(len(ORDERS), 2 * target.delta**2), target.delta)
    if target.epsilon <= least and cost(_MOST_SENSIBLE_NOISE) > target.epsilon:
        raise RefusedError(
            "Rényi divergences state no epsilon up to {least:.3g} at delta {delta:g} for noise multipliers up to"
            " {noise:.0e}, and {epsilon:g} is asked for; set {target.accountant} to pld, or {target.epsilon} to more"
            " than {least:.3g}.",
            code="epsilon_below_orders",
            least=least,
            delta=target.delta,
            noise=_MOST_SENSIBLE_NOISE,
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
    for _ in range(_STEPS):
        spent = cost(multiplier)
        if spent <= target and (
            spent >= (1 - max_unspent) * target or multiplier <= max(_NOISE_RANGE[0], (1 + max_unspent) * low)
        ):
            return _SecantResult(multiplier, steepness, is_met=True)
        low, high = (multiplier, high) if spent > target else (low, multiplier)
        here = (math.log(multiplier), _log(spent)) if target / _FAR < spent < _FAR * target else None
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
