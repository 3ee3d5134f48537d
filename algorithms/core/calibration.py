"""How plans are made: noise calibrated to a target, noise given by a formula, or a budget that is spent adaptively."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import dp_accounting.dp_event as dp
import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from algorithms.core.plan import Plan, Target, by_accountants
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.private_evaluation import EvaluationPlan
from algorithms.core.settings import adapter
from algorithms.errors import RefusedError, Slot
from algorithms.evaluation import HistogramSpec
from algorithms.gradients import L2
from algorithms.privacy.accounting import MAX_EPSILON
from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, adjacency_named, epsilon, rdp
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.accounting.filters import (
    RenyiBudget,
    RenyiFilter,
    ZCDPBudget,
    epsilon_of_zcdp,
)
from algorithms.privacy.accounting.noise_search import calibrate, find_smallest, search_outwards
from algorithms.privacy.mechanisms.release import Gaussian, Release, total_release
from algorithms.privacy.mechanisms.sampling import FullBatch, Sampling

_LARGEST_DELTA_UNKNOWN_N = 1e-5
_EVALUATION_WASTE = 1e-5
"""How far an evaluation's noise may be above the smallest, relatively."""

SLACK = 1e-9
"""Part of a budget that is left over, so that what is spent of it does not round above it."""

Repeated = Sequence[tuple[Release, int]]
"""Releases in their order, and how often each is repeated."""
Releases = Callable[[float], Repeated]
"""The releases of a run at a noise multiplier."""


@dataclass(frozen=True)
class Batches:
    """How records are sampled, and the public divisor of a sum; None if a released count of the records decides it."""

    sampling: Sampling
    divisor: float | None

    @property
    def rate(self) -> float:
        """The probability that a record takes part."""
        return self.sampling.rate


ALL = Batches(FullBatch(), 1.0)
"""All records, and sums as they are."""


def count_release(noise_multiplier: float) -> Release:
    """The release of the number of records, if that number is private."""
    return total_release(L2(1.0), Gaussian(noise_multiplier))


def events_before(target: Target, facts: PlanningFacts, sampled: Batches) -> Schedule:
    """What is released before a method's own steps: features, and a count of the records if the divisor needs it.

    Args:
        target: With the events of learned features, and the noise of the count.
        facts: Whose `records` are None where their number is private.
        sampled: Whose divisor is None where the count decides it.
    """
    waits = facts.records is None and sampled.divisor is None
    count = [(count_release(target.count_noise).event(), 1)] if waits else []
    return [*target.prior_events, *count]


def events_of(releases: Repeated) -> Schedule:
    """The events of releases, each with its count."""
    releases = [*releases]
    rows = {id(row): row for row in releases}  # a row may come many times, and a release in many rows
    single = {id(release): release for release, _ in rows.values()}
    events = {key: release.event() for key, release in single.items()}
    priced = {key: (events[id(release)], count) for key, (release, count) in rows.items()}
    # Equal rows come out as one object, by which `count_same` counts them without comparing events.
    return [*map(priced.__getitem__, map(id, releases))]


def plan_fixed(
    releases: Releases,
    *,
    target: Target,
    facts: PlanningFacts,
    sampled: Batches = ALL,
    steps: int = 1,
    noise_multiplier: float | None = None,
    adjacency: str = ADD_OR_REMOVE_ONE.name,
    method_params: object | None = None,
    not_private: str | None = None,
) -> Plan:
    """The plan of an algorithm whose releases are fixed in advance.

    By default the plan has one step over all records, and the smallest noise that meets the target.

    Args:
        releases: Of the whole run, by the noise multiplier.
        target: Budget, accountant, and what is released before.
        facts: Public facts of data and model.
        sampled: How records are sampled, and the divisor of sums.
        steps: Of the training loop.
        noise_multiplier: Above 0, noise over clip norm; None for the smallest that meets the target.
        adjacency: Under which the releases are counted.
        method_params: A dataclass of public values that the method plans; `Plan.params` returns it.
        not_private: Why the plan protects nobody, as a sentence; None for a plan that does.

    Raises:
        RefusedError: If no noise meets the target or the given noise does not, and for events without a proof under
            the adjacency.
    """
    if noise_multiplier is None:
        noise_multiplier = calibrated_multiplier(releases, target, facts, sampled, adjacency=adjacency)
    schedule = [*events_before(target, facts, sampled), *events_of(releases(noise_multiplier))]
    costs = by_accountants(schedule, target.budget.delta, adjacency_named(adjacency))
    if not costs:
        raise RefusedError(
            "no accountant has a bound for these releases; set {method.kind} to another.",
            code="releases_without_bound",
        )
    if target.accountant not in costs:
        raise RefusedError(
            "the accountant {accountant!r} has no bound for these releases; set {target.accountant} to {choices}.",
            code="accountant_without_bound",
            accountant=target.accountant,
            choices=" or ".join(costs),
        )
    # Calibrated noise was priced by the same accountant and meets the target; noise that a formula gives may not.
    if costs[target.accountant] > target.budget.epsilon * (1 + SLACK):
        raise RefusedError(
            "the releases cost epsilon {cost:g}, the target is {epsilon:g}; set {target.epsilon} to more, or"
            " {method.noise_multiplier}, where it is given.",
            code="releases_above_target",
            cost=costs[target.accountant],
            epsilon=target.budget.epsilon,
        )
    return Plan(
        target=target,
        facts=facts,
        steps=steps,
        noise_multiplier=noise_multiplier,
        sampling_rate=sampled.rate,
        divisor=sampled.divisor,
        schedule=schedule,
        epsilon=costs,
        adjacency=adjacency,
        method_params=_as_json(method_params),
        not_private=not_private,
    )


def calibrated_multiplier(
    releases: Releases,
    target: Target,
    facts: PlanningFacts,
    sampled: Batches,
    *,
    adjacency: str = ADD_OR_REMOVE_ONE.name,
) -> float:
    """The smallest noise multiplier with which releases, and those before them, meet a target.

    The order of releases does not change their cost.

    Args:
        releases, target, facts, sampled, adjacency: As for `plan_fixed`.

    Raises:
        RefusedError: If no noise meets it, and for an epsilon with which the accountants' numbers overflow.
    """
    if target.budget.epsilon > MAX_EPSILON:
        raise RefusedError(
            "epsilon {epsilon:g} is beyond {largest:g} and promises nothing; set {target.epsilon} to less.",
            code="epsilon_promises_nothing",
            epsilon=target.budget.epsilon,
            largest=MAX_EPSILON,
        )
    before, budget, neighbours = (
        events_before(target, facts, sampled),
        target.budget,
        adjacency_named(adjacency),
    )
    alone = epsilon(before, budget.delta, accountant=target.accountant, adjacency=neighbours)
    if alone > budget.epsilon:
        raise RefusedError(
            "what is released before the first step costs epsilon {alone:.4g}, and {epsilon:g} was asked for; raise"
            " {setting} or {target.epsilon}.",
            code="budget_spent_before_steps",
            alone=alone,
            epsilon=budget.epsilon,
            setting="the noise of learned features" if target.prior_events else Slot("target.count_noise"),
        )
    return calibrate(
        lambda noise: [*before, *events_of(releases(noise))],
        budget,
        accountant=target.accountant,
        adjacency=neighbours,
    )


MAX_NOISE = 1e8


def find_min_noise(
    events: Callable[[float], Schedule], limits: Mapping[float, float]
) -> tuple[float, float] | None:
    """The least noise at which events keep to the limit of one Rényi order, and that order.

    Args:
        events: By the noise multiplier.
        limits: Rényi divergence by order, above 0.

    Returns:
        The noise multiplier and the order, or None if even `MAX_NOISE` is too little.
    """
    orders, allowed = tuple(limits), np.array(list(limits.values())) * (1 - SLACK)

    def parts(noise: float) -> NDArray[np.float64]:
        # Of each limit. A filter needs one order only, so the order with the smallest part decides.
        return np.asarray(rdp(events(noise), orders=orders) / allowed)

    multiplier = find_smallest(
        lambda noise: float(parts(noise).min()), 1.0, low=1e-2, high=MAX_NOISE, tolerance=1e-10
    )
    return None if multiplier is None else (multiplier, orders[int(parts(multiplier).argmin())])


def plan_zcdp(
    rho: float, *, target: Target, facts: PlanningFacts, steps: int, method_params: object | None = None
) -> Plan:
    """The plan of a run that chooses its releases adaptively, under a zCDP filter.

    Args:
        rho: The budget of the filter; the reservation is one event of it, however it is spent.
        target: With a delta above 0.
        facts: Public facts of data and model.
        steps: The largest number; the filter may end the run earlier.
        method_params: As for `plan_fixed`.

    Raises:
        RefusedError: For the accountant "pure", and for a target with learned features.

    Source:
        Bun and Steinke 2016: rho adds up for any adaptive choice.
    """
    check_adaptive(target)
    if target.prior_events:
        raise RefusedError(
            "this algorithm spends its budget on the way, and has no part for learned features in it; set"
            " {learned.kind} to none, or choose an algorithm with a fixed schedule.",
            code="no_budget_for_features",
        )
    return Plan(
        target=target,
        facts=facts,
        steps=steps,
        schedule=[(dp.ZCDpEvent(rho), 1)],  # the whole budget, however many releases it is spent on
        epsilon={"rdp": epsilon_of_zcdp(rho, target.budget.delta)},
        filter=ZCDPBudget(rho),
        method_params=_as_json(method_params),
    )


def plan_renyi(
    order: float,
    *,
    target: Target,
    facts: PlanningFacts,
    steps: int,
    sampling_rate: float,
    method_params: object | None = None,
) -> Plan:
    """The plan of a run that chooses its releases adaptively, under a Rényi filter.

    Args:
        order: Above 1, from public values alone: a filter holds at an order that is fixed in advance.
        target: With a delta above 0.
        facts: Public facts of data and model.
        steps: The largest number; the filter may end the run earlier.
        sampling_rate: The probability that a record takes part in a step.
        method_params: As for `plan_fixed`.

    Raises:
        RefusedError: For the accountant "pure", and for a budget that the order's conversion alone uses up.

    Source:
        Feldman and Zrnic 2021, arXiv:2008.11193.
    """
    check_adaptive(target)
    limit = RenyiFilter(order, target.budget).limit
    return Plan(
        target=target,
        facts=facts,
        steps=steps,
        sampling_rate=sampling_rate,
        schedule=[],  # not known beforehand; what is reserved follows from the filter, see `Plan.reserved_schedule`
        epsilon={"rdp": target.budget.epsilon},
        filter=RenyiBudget(order, limit),
        method_params=_as_json(method_params),
    )


def plan_evaluation(
    plan: Plan,
    spec: HistogramSpec,
    *,
    wanted: float | None = None,
    ratios: Sequence[Callable[[Schedule], float]] = (),
) -> Plan:
    """The same plan with an evaluation of private held-out records, by the smallest noise that is allowed.

    Under add-or-remove-one, where it costs no more than the training alone.

    Args:
        plan: Of the training, which costs the same afterwards.
        spec: Of the histogram to release.
        wanted: Epsilon of the people held out; None for as much as those trained on.
        ratios: Functions of the evaluation's schedule that may be at most 1 each, such as its price in a ledger over
            that of the training; they fall as the noise grows.

    Raises:
        RefusedError: Where the run's price would not be that of the training.
    """
    target, delta = plan.target.budget, plan.target.budget.delta
    if not isfinite(plan.cost.epsilon):
        raise RefusedError(
            "held-out records are private, and a run without noise says nothing of how much they may lose;"
            " set {method.kind} to one with noise.",
            code="evaluation_without_noise",
        )
    if wanted is not None and wanted > target.epsilon * (1 + SLACK):
        raise RefusedError(
            "{target.evaluation.epsilon} is {wanted:g}, above the {largest:g} of the run, which would then"
            " cost that; set it to at most {largest:g}, or to null.",
            code="evaluation_above_target",
            wanted=wanted,
            largest=target.epsilon,
        )
    limit = plan.cost.epsilon if wanted is None else min(wanted, plan.cost.epsilon)

    evaluation = _min_noise(plan, spec, limit, ratios)
    whole = replace(plan, evaluation=evaluation)
    # A filter's plan states its whole budget, which the evaluation keeps to.
    if not plan.is_fixed:
        return whole
    return replace(whole, epsilon=by_accountants(whole.reserved_schedule, delta))


def plan_composed_evaluation(
    plan_at: Callable[[Target], Plan],
    target: Target,
    spec: HistogramSpec,
    *,
    wanted: float | None,
    ratios: Sequence[Callable[[Schedule], float]] = (),
) -> Plan:
    """The plan of a training and an evaluation that are paid for together, as under replace-one.

    plan_at: the training's plan for a target. wanted, ratios: as in `plan_evaluation`. Raises RefusedError unless
    `wanted` is a part of the target that leaves enough for the training.
    """
    if wanted is None or not wanted < target.budget.epsilon:
        raise RefusedError(
            "held-out records are private, and a record that is replaced can change sides, so that the"
            " evaluation costs beside the training; give it a part of epsilon {epsilon:g} by"
            " {target.evaluation.epsilon}, or set {method.adjacency} to {adjacency}, where it is free.",
            code="evaluation_needs_part",
            epsilon=target.budget.epsilon,
            adjacency=ADD_OR_REMOVE_ONE.name,
        )
    evaluation = _min_noise(plan_at(target), spec, wanted, ratios)
    # Planned as if it came first, since the order of releases does not change their cost, and then taken out again.
    paid_first = replace(target, prior_events=(*target.prior_events, *evaluation.schedule))
    whole = plan_at(paid_first)
    begins = len(target.prior_events)
    schedule = [*whole.schedule[:begins], *whole.schedule[begins + len(evaluation.schedule) :]]
    return replace(whole, target=target, schedule=schedule, evaluation=evaluation)


def _min_noise(
    plan: Plan, spec: HistogramSpec, limit: float, ratios: Sequence[Callable[[Schedule], float]]
) -> EvaluationPlan:
    """The evaluation with the least noise whose epsilon is at most the limit, and each ratio at most 1."""

    def at(noise: float, cost: float = 0.0) -> EvaluationPlan:
        return EvaluationPlan(spec, "laplace" if plan.accountant == "pure" else "gaussian", noise, cost)

    def cost(noise: float) -> float:
        return plan.cost_held_out(at(noise).schedule)

    noise = search_outwards(cost, limit, tolerance=_EVALUATION_WASTE)

    def largest_ratio(noise: float) -> float:
        return max(ratio(at(noise).schedule) for ratio in ratios)

    # Prices in a ledger fall with the noise, too: where one is above the training's, the search goes on from here.
    if ratios and largest_ratio(noise) > 1.0:
        noise = search_outwards(largest_ratio, 1.0, start=noise, tolerance=_EVALUATION_WASTE)
    return at(noise, cost(noise))


def _as_json(method_params: object | None) -> dict[str, JsonValue]:
    if method_params is None:
        return {}
    written: dict[str, JsonValue] = adapter(type(method_params)).dump_python(method_params, mode="json")
    return written


def check_adaptive(target: Target) -> None:
    """Raises RefusedError for a target that a run which chooses its releases on the way cannot be held to."""
    if target.accountant == "pure":
        raise RefusedError(
            "a run that chooses its releases on the way is counted by a zCDP or Rényi filter, which needs a"
            " delta; set {target.delta} above 0 and {target.accountant} to pld or rdp.",
            code="filter_needs_delta",
        )
    target.budget.check_spendable()


def check_delta(delta: float, records: int | None) -> None:
    """Check that delta is small enough to mean something.

    Args:
        delta: Of the target.
        records: Their public number n, or None if it is private.

    Raises:
        RefusedError: For a delta above 1/n, at which a random record may be published; where n is private, above 1e-5.
    """
    max_delta = _LARGEST_DELTA_UNKNOWN_N if records is None else 1 / records
    if delta > max_delta:
        why = (
            "the number of records is private" if records is None else f"there are {records} training records"
        )
        raise RefusedError(
            "delta = {delta:g} was asked for, but {why}; set {target.delta} to at most {largest:.3g}.",
            code="delta_above_1_n",
            delta=delta,
            why=why,
            largest=max_delta,
        )


@dataclass(frozen=True)
class Claim:
    """The epsilon that a paper's own analysis states; nothing is enforced by it."""

    claimed_epsilon: float
