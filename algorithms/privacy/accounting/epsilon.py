"""From privacy events to epsilon: by PLD, by Rényi divergences, purely; under either adjacency, and for groups.

Two accountants of dp_accounting do the work: PLD (privacy loss distributions, tight) and RDP (Rényi). Both are
valid for a schedule that was fixed before its first release; a spend chosen on the way is held by `filters`. The
third adds up pure epsilons, for delta = 0.

Events carry the noise multiplier std / C of the bound C of one record, whatever the adjacency. Replacing a record takes
one out and puts one in, so a sum over all records moves by twice the bound. Events of samples are not translated here
unless a theorem says how: the accountants have bounds of their own for them.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import Literal, TypeAlias

import dp_accounting as dp
import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.event_rules import loss_of, parts, rule_of
from algorithms.privacy.accounting.events import Schedule, kept, unrolled

Adjacency: TypeAlias = dp.NeighboringRelation
ADD_OR_REMOVE_ONE = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = dp.NeighboringRelation.REPLACE_ONE


def adjacency_named(name: str) -> Adjacency:
    """The adjacency of a name; raises RefusedError where nothing is accounted under it."""
    known = {adjacency.name: adjacency for adjacency in (ADD_OR_REMOVE_ONE, REPLACE_ONE)}
    if name not in known:
        raise RefusedError(f"the adjacency {name!r} is not known; choose {' or '.join(known)}.")
    return known[name]


def as_add_remove(adjacency: Adjacency, event: dp.DpEvent) -> dp.DpEvent:
    """An event as the accountants are to take it; raises RefusedError where no theorem covers it under this adjacency.

    An event with an impossible number, as in a document that was edited, is refused too.
    """
    _check(adjacency, event)
    plain = event if adjacency is ADD_OR_REMOVE_ONE else rule_of(event).replacing(event)
    return rule_of(plain).amplified(plain)


def pure_epsilon(event: dp.DpEvent) -> float:
    """The epsilon of a purely private event, as `as_add_remove` gives it; infinite for one that is not private.

    Raises RefusedError where the event is not pure.
    """
    return rule_of(event).pure_epsilon(event)


def _check(adjacency: Adjacency, event: dp.DpEvent) -> None:
    """Raises RefusedError for what no theorem covers, however deep it is nested."""
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
    """An event whose loss bounds that of `event` when `count` records come or go together.

    A sum moves by at most `count` bounds. A Poisson sample holds one of the records or more with probability
    1 - (1 - rate)^count, and moves by at most all of them then: divergences are convex in the moved output, so the
    largest move at that rate is the worst. zCDP grows by the square (Bun and Steinke 2016, Proposition 1.9).
    Raises RefusedError where nothing is known of groups.
    """
    return event if count == 1 else rule_of(event).grouped(event, count)


ORDERS = tuple(float(order) for order in DEFAULT_RDP_ORDERS)


def rdp(
    schedule: Schedule, *, orders: tuple[float, ...] = ORDERS, adjacency: Adjacency = ADD_OR_REMOVE_ONE
) -> np.ndarray:
    """The Rényi divergence bound of a schedule at each order, shape [orders]."""
    total = np.zeros(len(orders))
    for event, count in schedule:
        total += count * kept(_event_rdp, event, orders, adjacency)
    return total


def epsilon_of_rdp(divergences: np.ndarray, delta: float, orders: tuple[float, ...] = ORDERS) -> float:
    """The epsilon at `delta` of Rényi bounds, shape [orders], at the best of their orders.

    Source: Mironov 2017; Canonne et al. 2020, Proposition 12.
    """
    if np.isinf(divergences).all():
        return math.inf
    return float(compute_epsilon(orders, divergences, delta)[0])


@lru_cache(maxsize=4096)
def _event_rdp(event: dp.DpEvent, orders: tuple[float, ...], adjacency: Adjacency) -> np.ndarray:
    if is_not_private(event):
        return np.full(len(orders), math.inf)
    plain = as_add_remove(adjacency, event)
    divergences = rule_of(plain).rdp(plain, orders, adjacency)
    divergences.setflags(write=False)
    return divergences


def is_not_private(event: dp.DpEvent) -> bool:
    """Whether an event, or one that it is made of, protects nobody."""
    return rule_of(event).is_not_private(event)


_GROUPS = 24


def composed(schedule: Schedule, grid: float, adjacency: Adjacency) -> PrivacyLossDistribution:
    """The distribution of a schedule's privacy loss, rounded up to multiples of `grid`.

    Raises RefusedError for an event without one.
    """
    return loss_of(((as_add_remove(adjacency, event), count) for event, count in schedule), grid, adjacency)


def in_few_kinds(schedule: Schedule) -> Schedule:
    """A schedule that costs at least as much with fewer kinds of events, so that it is composed quickly.

    Equal events are counted together, and Gaussian ones added up exactly. More than 24 kinds of Laplace events, as
    noise that changes with each step has them, become 24 whose noise is the least of those that they stand for. An
    event of many releases becomes these.
    """
    schedule = unrolled(schedule)
    gaussian = [(event, count) for event, count in schedule if isinstance(event, dp.GaussianDpEvent)]
    laplace = [(event, count) for event, count in schedule if isinstance(event, dp.LaplaceDpEvent)]
    apart = (dp.GaussianDpEvent, dp.LaplaceDpEvent)
    others = [(event, count) for event, count in schedule if not isinstance(event, apart)]
    return [*_added_up(gaussian), *_grouped(laplace), *_counted(others)]


def _counted(schedule: Schedule) -> Schedule:
    """Each event once, with how often it occurs in all."""
    counts: dict[str, tuple[dp.DpEvent, int]] = {}
    for event, count in schedule:
        counts[repr(event)] = (event, counts.get(repr(event), (event, 0))[1] + count)
    return list(counts.values())


def _added_up(schedule: Schedule) -> Schedule:
    if len({event for event, _ in schedule}) < 2:
        return schedule
    precision = math.fsum(count / event.noise_multiplier**2 for event, count in schedule)
    return [(dp.GaussianDpEvent(1.0 / math.sqrt(precision)), 1)]


def _grouped(schedule: Schedule) -> Schedule:
    multipliers = {event.noise_multiplier for event, _ in schedule}
    if len(multipliers) <= _GROUPS:
        return schedule
    low, high = math.log(min(multipliers)), math.log(max(multipliers))
    edges = np.exp(np.linspace(low, high, _GROUPS, endpoint=False))

    def place(row: tuple[dp.DpEvent, int]) -> int:
        return int(np.searchsorted(edges, row[0].noise_multiplier, side="right"))

    groups = (list(rows) for _, rows in groupby(sorted(schedule, key=place), key=place))
    return [_least_noise(rows) for rows in groups]


def _least_noise(rows: Iterable[tuple[dp.DpEvent, int]]) -> tuple[dp.DpEvent, int]:
    rows = list(rows)
    least = min(event.noise_multiplier for event, _ in rows)
    return dp.LaplaceDpEvent(least), sum(count for _, count in rows)


Accountant = Literal["pld", "rdp", "pure"]
ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "pure")

FINE, FINEST, COARSENING = 1e-4, 1e-5, 10.0
LEAST_PLD_DELTA = 1e-11
"""Below it the tail of a composed distribution is noise of its Fourier transform, and Rényi bounds take its place."""
TRANSFORM_NOISE = 2.0**-49
"""What that noise adds to a tail, times the root of the number of releases: three times what was seen."""
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
    """The epsilon that a schedule fixed in advance costs at `delta`; an upper bound by either accountant.

    delta: in (0, 1), or 0 for the accountant "pure". Below 1e-11 "pld" gives the Rényi bound: see `LEAST_PLD_DELTA`.
    discretisation: grid of the privacy losses, PLD only; chosen from the schedule when None. Returns
    infinity when an event is not private. Raises RefusedError when the accountant cannot take an event.
    Source: Koskela et al. 2020 and Doroshenko et al. 2022 (PLD); Mironov 2017 and Canonne et al. 2020,
    Proposition 12 (RDP and its conversion).
    """
    return kept(_epsilon, tuple(schedule), delta, accountant, adjacency, discretisation)


@lru_cache(maxsize=32)
def _epsilon(
    schedule: Schedule,
    delta: float,
    accountant: Accountant,
    adjacency: Adjacency,
    discretisation: float | None,
) -> float:
    """What calibration has verified is asked for again by the plan, and by its card."""
    if accountant == "pure":
        if any(is_not_private(event) for event, _ in schedule):
            return math.inf
        return math.fsum(count * pure_epsilon(as_add_remove(adjacency, event)) for event, count in schedule)
    if not 0 < delta < 1:
        raise RefusedError(f"delta must lie strictly between 0 and 1, not {delta}; 1/n or less is customary.")
    if any(is_not_private(event) for event, _ in schedule):
        return math.inf
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
    """How many an event is made of."""
    inner = sum(map(_releases, parts(event))) or 1
    if isinstance(event, dp.dp_event.RepeatAndSelectDpEvent):
        inner *= math.ceil(event.mean**2)  # deltas are so many times those of a trial
    return int(event.count) * inner if isinstance(event, dp.SelfComposedDpEvent) else inner


def discretisation_of(schedule: Schedule, delta: float, adjacency: Adjacency) -> float | None:
    """Fine enough that the grid adds far less than the result, yet quick for heavy-tailed losses.

    None where no grid is used, below `LEAST_PLD_DELTA`. Where a loss has a largest value, the grid has sixteen steps up
    to the smallest of these, so that a thousand equal losses are not each a share of a step too large.
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
    """Whether losses reach so far that a fine grid of them fills the memory."""
    try:
        return bool(_VAST < rdp(schedule, orders=(2.0,), adjacency=adjacency)[0] < math.inf)
    except RefusedError:
        return False


def _largest_losses(schedule: Schedule, adjacency: Adjacency) -> Iterator[float]:
    """The largest loss of each event that has one."""
    for event, _ in schedule:
        with suppress(RefusedError):
            if 0 < (loss := pure_epsilon(as_add_remove(adjacency, event))) < math.inf:
                yield loss
