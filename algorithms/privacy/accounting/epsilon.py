"""From privacy events to epsilon.

Two accountants of dp_accounting do the work: PLD (privacy loss distributions, tight) and RDP (Rényi). Both are
valid for a schedule that was fixed before its first release; a spend chosen on the way is held by `filters`. The
third adds up pure epsilons, for delta = 0.

Events carry the noise multiplier std / C of the clip bound C, whatever the adjacency: see `adjacency`.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Literal

import dp_accounting as dp

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.adjacency import (
    ADD_OR_REMOVE_ONE,
    Adjacency,
    as_add_remove,
    pure_epsilon,
)
from algorithms.privacy.accounting.event_rules import parts
from algorithms.privacy.accounting.events import Schedule, kept
from algorithms.privacy.accounting.pld import composed, in_few_kinds
from algorithms.privacy.accounting.rdp import epsilon_of_rdp, is_not_private, rdp

Accountant = Literal["pld", "rdp", "pure"]
ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "pure")

FINE, FINEST, COARSENING = 1e-4, 1e-5, 10.0
LEAST_PLD_DELTA = 1e-11
"""Below it the tail of a composed distribution is noise of its Fourier transform, and Rényi bounds take its place."""
TRANSFORM_NOISE = 2.0**-49
"""What that noise adds to a tail, times the root of the number of releases: three times what was seen."""
_STEPS_A_LOSS, _STEPS_IN_ALL = 16, 1e6
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


def _largest_losses(schedule: Schedule, adjacency: Adjacency) -> Iterator[float]:
    """The largest loss of each event that has one."""
    for event, _ in schedule:
        with suppress(RefusedError):
            if 0 < (loss := pure_epsilon(as_add_remove(adjacency, event))) < math.inf:
                yield loss
