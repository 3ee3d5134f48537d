"""How plans are made: noise calibrated to a target, noise set by a formula, or a budget that is spent on the way."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dp_accounting as dp

from algorithms.algorithm import Plan, Target, by_accountants
from algorithms.privacy.accounting import calibrate
from algorithms.privacy.adjacency import ADD_OR_REMOVE_ONE, named
from algorithms.privacy.errors import Refused
from algorithms.privacy.events import Schedule
from algorithms.privacy.filters import RenyiFilter, epsilon_of_zcdp
from algorithms.privacy.releases import Release
from algorithms.public import Public

_LARGEST_DELTA_UNKNOWN_N = 1e-5


def plan_fixed(
    releases: Callable[[float], Sequence[tuple[Release, int]]],
    *,
    target: Target,
    public: Public,
    steps: int,
    sampling_rate: float,
    divisor: float | None,
    adjacency: str = ADD_OR_REMOVE_ONE.name,
    own: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of an algorithm whose releases are fixed before the first one, with the least noise that fits.

    releases: the algorithm's own and how often each occurs in a row, at a noise multiplier. own: see Plan.
    Raises Refused where no noise fits, and for events that are not proven under the adjacency.
    """

    def schedule_at(noise_multiplier: float) -> Schedule:
        return [(release.event(), count) for release, count in releases(noise_multiplier)]

    accountant, relation = target.accountant, named(adjacency)
    multiplier = calibrate(
        lambda noise: [*target.before, *schedule_at(noise)],
        target.budget,
        accountant=accountant,
        adjacency=relation,
    )
    return plan_given(
        schedule_at(multiplier),
        target=target,
        public=public,
        steps=steps,
        noise_multiplier=multiplier,
        sampling_rate=sampling_rate,
        divisor=divisor,
        adjacency=adjacency,
        own=own,
    )


def plan_given(
    schedule: Schedule,
    *,
    target: Target,
    public: Public,
    steps: int,
    noise_multiplier: float,
    sampling_rate: float,
    divisor: float | None,
    adjacency: str = ADD_OR_REMOVE_ONE.name,
    own: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of fixed releases whose noise is set already; raises Refused where they cost more than the target."""
    relation, schedule = named(adjacency), [*target.before, *schedule]
    costs = by_accountants(schedule, target.budget.delta, relation)
    if target.accountant not in costs:
        raise Refused(
            f"the accountant {target.accountant!r} has no bound for these releases;"
            f" choose {' or '.join(costs) or 'other releases'}."
        )
    if costs[target.accountant] > target.budget.epsilon * (1 + 1e-9):
        raise Refused(
            f"the releases cost epsilon {costs[target.accountant]:g}, the target is {target.budget.epsilon:g};"
            " ask for more epsilon or more noise."
        )
    return Plan(
        target=target,
        public=public,
        steps=steps,
        noise_multiplier=noise_multiplier,
        sampling_rate=sampling_rate,
        divisor=divisor,
        schedule=schedule,
        epsilon=costs,
        adjacency=adjacency,
        own=dict(own or {}),
    )


def plan_zcdp(
    rho: float, *, target: Target, public: Public, steps: int, own: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of a run that chooses its releases on the way, under a zCDP filter; steps: the most it may take."""
    _check_adaptive(target)
    if target.before:
        raise Refused(
            "this algorithm spends its budget on the way, and has no part for learned features in it; set"
            " features.name to none, or choose an algorithm with a fixed schedule."
        )
    return Plan(
        target=target,
        public=public,
        steps=steps,
        noise_multiplier=0.0,
        sampling_rate=1.0,
        divisor=None,
        schedule=[(dp.dp_event.ZCDpEvent(rho), 1)],
        epsilon={"rdp": epsilon_of_zcdp(rho, target.budget.delta)},
        filter={"kind": "zcdp", "rho": rho},
        own=dict(own or {}),
    )


def plan_renyi(
    order: float,
    *,
    target: Target,
    public: Public,
    steps: int,
    sampling_rate: float,
    own: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of a run that chooses its releases on the way, under a Rényi filter at an order fixed here."""
    _check_adaptive(target)
    limit = RenyiFilter(order, target.budget).limit
    return Plan(
        target=target,
        public=public,
        steps=steps,
        noise_multiplier=0.0,
        sampling_rate=sampling_rate,
        divisor=None,
        schedule=[],
        epsilon={"rdp": target.budget.epsilon},
        filter={"kind": "renyi", "order": order, "limit": limit},
        own=dict(own or {}),
    )


def _check_adaptive(target: Target) -> None:
    if target.accountant == "pure":
        raise Refused(
            "a run that chooses its releases on the way is counted by a zCDP or Rényi filter, which needs a delta;"
            " set privacy.delta above 0 and privacy.accountant to pld or rdp."
        )


def check_delta(delta: float, records: int | None) -> None:
    """Raises Refused for a delta above 1/n, and above 1e-5 where the number of records is private, None."""
    most = _LARGEST_DELTA_UNKNOWN_N if records is None else 1 / records
    if delta > most:
        why = (
            "the number of records is private" if records is None else f"there are {records} training records"
        )
        raise Refused(f"delta = {delta:g} was asked for, but {why}; set delta to at most {most:.3g}.")
