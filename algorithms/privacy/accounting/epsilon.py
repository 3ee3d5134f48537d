"""From privacy events to epsilon: what a schedule costs.

An epsilon is by PLD, Rényi divergences or pure epsilons; under either adjacency, and for groups.

Two accountants of dp_accounting do the work: PLD (privacy loss distributions, tight) and RDP (Rényi). Both are valid
for a schedule that was fixed in advance; adaptive spending is enforced by `filters`. A third accountant adds up pure
epsilons, for delta = 0.

Events state the noise multiplier std / C for the bound C on one record, whatever the adjacency. Replacing a record
removes one and adds one, so a sum over all records moves by twice the bound. Events of samples are translated only if a
theorem says how, since the accountants have bounds of their own for them.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any

import dp_accounting.dp_event as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_epsilon
from numpy.typing import NDArray

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Accountant as Accountant
from algorithms.privacy.accounting.event_classes import alternatives_of, parts
from algorithms.privacy.accounting.event_rules import ADD_OR_REMOVE_ONE as ADD_OR_REMOVE_ONE
from algorithms.privacy.accounting.event_rules import REPLACE_ONE as REPLACE_ONE
from algorithms.privacy.accounting.event_rules import check_possible, compose_pld, pairs_of, rule_of
from algorithms.privacy.accounting.events import (
    Schedule,
    check_payments,
    count_same,
    disjoint_parts_of,
    unroll,
)
from algorithms.privacy.accounting.gaussian import gaussian_epsilon
from algorithms.privacy.accounting.pairs import TAIL_DELTA
from algorithms.privacy.accounting.pld_epsilon import ComposedPLD, epsilon_of, epsilon_on_grid, sides_of
from algorithms.privacy.accounting.selection import shift_of_trials

Array = NDArray[np.float64]


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
_RECOMPUTED_ABOVE, _REFINEMENT = 1e-3, 8.0
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
    return compose_pld(translate(schedule, adjacency), adjacency, delta, grid, coarser)


def translate(schedule: Schedule, adjacency: NeighboringRelation) -> list[tuple[dp.DpEvent, int]]:
    """A schedule in events whose price accountants know, under an adjacency."""
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
    return [(dp.GaussianDpEvent(1.0 / math.sqrt(precision)), 1)]  # 1 / z^2 adds up


ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "pure")
_MIN_DELTA = 1e-300
"""Of which a millionth for each release, and logarithms, are still numbers; far below any chance that matters."""


def epsilon(
    schedule: Schedule,
    delta: float,
    *,
    accountant: Accountant = "pld",
    adjacency: NeighboringRelation = ADD_OR_REMOVE_ONE,
    discretisation: float | None = None,
) -> float:
    """The epsilon of a schedule that was fixed in advance, at `delta`; an upper bound with every accountant.

    delta: from 1e-300 on and below 1, or 0 for the accountant "pure". discretisation: grid of privacy losses, for PLD
    only; by default one that adds less than 1e-4 of the result. Where losses are known down to some delta only, so that
    PLD states infinity, "pld" is the epsilon by Rényi divergences. Returns infinity if an event is not private. Raises
    RefusedError if the accountant does not support an event.
    Source: Koskela et al. 2020 and Doroshenko et al. 2022 (PLD); Mironov 2017 and Canonne et al. 2020,
    Proposition 12 (RDP and its conversion).
    """
    return _epsilon(ReprKey.of(count_same(schedule), delta, accountant, adjacency, discretisation))


@lru_cache(maxsize=128)
def _epsilon(key: ReprKey) -> float:
    """`epsilon` with a cache, since calibration, plan and card compute the same epsilon."""
    schedule, delta, accountant, adjacency, discretisation = key.arguments
    if accountant != "pure" and not _MIN_DELTA <= delta < 1:
        raise RefusedError(
            "delta must be at least {least:g} and below 1, not {delta}; set {target.delta}, customarily to 1/n or"
            " less.",
            code="delta_outside",
            least=_MIN_DELTA,
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
    if accountant != "pld" or not stated < cost <= stated * (1 + _RECOMPUTED_ABOVE):
        return cost
    grid = discretisation_of(schedule, delta, adjacency)
    if grid is None:
        return cost
    return min(cost, epsilon(schedule, delta, adjacency=adjacency, discretisation=grid / _REFINEMENT))


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
    events = translate(schedule, adjacency)
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
    chance = chance_of_sampling(events) * (1 + 2.0**-40)  # rounded up
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
    delta_of_trial = delta / event.mean  # the best has at most the mean number times a trial's delta
    different = {repr(kind): kind for kind in alternatives_of(event.event)}
    trials = [merge_events([(kind, 1)]) for kind in different.values()]
    costs = [_by_pld(trial, delta_of_trial, adjacency, grid) for trial in trials]
    largest = max(epsilon for epsilon, _ in costs)
    if not 0 < largest < math.inf:
        return None
    translated = [translate(trial, adjacency) for trial in trials]
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


def chance_of_sampling(events: Schedule) -> float:
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
    # P's mass from the first of both losses on
    often = math.fsum(count * float(cells.p[0] + cells.above[0]) for cells, count in above)
    return often > _NEARLY_ALL * chance_of_sampling(samples)


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
    """`chance_of_sampling` of all samples of a schedule, also within what consists of others, as trials of a search.

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
            chance += chance_of_sampling(translate([(event, count)], adjacency))
    return chance
