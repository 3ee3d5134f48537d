"""A plan: the releases of a run and what they cost, decided before the records are read.

`Target` is what a run may cost; a method's `plan` turns it into a `Plan`, which opens the filter that enforces it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Self, TypeVar

import dp_accounting.dp_event as dp
from dp_accounting.privacy_accountant import NeighboringRelation
from pydantic import JsonValue

from algorithms.core.planning_facts import PlanningFacts, to_finite
from algorithms.core.private_evaluation import EvaluationPlan
from algorithms.core.settings import adapter
from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import (
    ACCOUNTANTS,
    ADD_OR_REMOVE_ONE,
    Accountant,
    adjacency_named,
    epsilon,
    epsilon_near,
    rdp,
)
from algorithms.privacy.accounting.events import (
    RenyiDpEvent,
    Schedule,
    count_same,
    on_disjoint_parts,
    schedule_from_json,
    schedule_to_json,
)
from algorithms.privacy.accounting.filters import (
    FIXED,
    Filter,
    FilterSpec,
    FixedSchedule,
    RenyiBudget,
    RenyiFilter,
    ScheduleFilter,
    ZCDPBudget,
    ZCDPFilter,
    conversion,
    epsilon_of_zcdp,
    rho_of,
)
from algorithms.privacy.documents import Amount, StatedPlan

if TYPE_CHECKING:
    from algorithms.privacy.barrier.barrier import ComputeConfig

P = TypeVar("P")

_RECOMPUTATION_ERROR, _BOUND_ERROR = 1e-6, 1e-2
"""Relative: by how much the same cost may differ where another machine computes it, and how far a bound other than
PLD's may be stated above what it costs here."""
_ROUNDING = 1e-9
"""Relative, of a filter's limit, which has a closed form that every machine computes alike."""
_RECORDS_IN_BOUND, _USUAL_PASS = 10.0, 64
"""How many times the number of records a public bound on it may be for passes to be full; and how many records a pass
has without a bound.
"""


@dataclass(frozen=True)
class Target:
    """What a run may cost, and how the cost is computed.

    Attributes:
        budget: The epsilon and delta of the run.
        accountant: Whose epsilon must meet the budget.
        count_noise: Noise multiplier of the count that is released first if the number of records is private.
        prior_events: Releases before the algorithm's own, which the budget must cover too.
    """

    budget: Budget
    accountant: Accountant = "pld"
    count_noise: float = 100.0
    prior_events: tuple[tuple[dp.DpEvent, int], ...] = ()

    def __post_init__(self) -> None:
        if (self.accountant == "pure") != (self.budget.delta == 0):
            raise RefusedError(
                "delta = {delta:g} was asked for with the accountant {accountant!r}, where pure takes 0 alone, and pld"
                " and rdp take more than 0; set {target.delta} or {target.accountant} so.",
                code="delta_of_accountant",
                delta=self.budget.delta,
                accountant=self.accountant,
            )


@dataclass(frozen=True)
class Plan:
    """The releases and the cost of a run, decided before the records are read.

    Attributes:
        target: What the run may cost.
        facts: The public values that the plan follows from.
        steps: The largest number of training steps.
        schedule: The events of the releases, in order.
        epsilon: By accountant, at the target's delta; infinite for a run that is not private; accountants without a
            bound are absent.
        noise_multiplier: 0 if it is chosen adaptively.
        sampling_rate: The probability that a record takes part in a step.
        divisor: The public number that sums are divided by, None if a released count decides it.
        filter: Enforces the budget.
        adjacency: ADD_OR_REMOVE_ONE or REPLACE_ONE.
        method_params: Public values that the method planned, as JSON; `params` returns them as the method's dataclass.
        not_private: Why the stated epsilon does not hold, if it does not.
        evaluation: The release of private held-out records, which costs no more than the training, or is part of the
            cost under replace-one.
    """

    target: Target
    facts: PlanningFacts
    steps: int
    schedule: Schedule
    epsilon: Mapping[str, float]
    noise_multiplier: float = 0.0
    sampling_rate: float = 1.0
    divisor: float | None = None
    filter: FilterSpec = FIXED
    adjacency: str = ADD_OR_REMOVE_ONE.name
    method_params: Mapping[str, JsonValue] = field(default_factory=dict)
    not_private: str | None = None
    evaluation: EvaluationPlan | None = None

    def __post_init__(self) -> None:
        if not self.is_fixed and adjacency_named(self.adjacency) is not ADD_OR_REMOVE_ONE:
            raise RefusedError(
                "releases chosen on the way are counted under {only} alone, not under {adjacency};"
                " {plan.remedy}.",
                code="filter_adjacency",
                only=ADD_OR_REMOVE_ONE.name,
                adjacency=self.adjacency,
            )

    @property
    def is_fixed(self) -> bool:
        """Whether all releases were fixed in advance."""
        return isinstance(self.filter, FixedSchedule)

    @property
    def accountant(self) -> Accountant:
        """The accountant that decides the cost: the target's for fixed releases, otherwise Rényi's."""
        return self.target.accountant if self.is_fixed else "rdp"

    @property
    def cost(self) -> Budget:
        """The budget that the run reserves: its accountant's epsilon at the target's delta."""
        return Budget(self.epsilon[self.accountant], self.target.budget.delta)

    @property
    def reserved_schedule(self) -> Schedule:
        """The events that the run reserves: its schedule, or all that its filter allows, beside its evaluation's."""
        match self.filter:
            case RenyiBudget(order, limit):
                trained: Schedule = [(RenyiDpEvent(order, limit), 1)]
            case ZCDPBudget(rho):
                trained = [(dp.ZCDpEvent(rho), 1)]
            case FixedSchedule():
                trained = self.schedule
        return self.with_evaluation(trained)

    def with_evaluation(self, trained: Schedule) -> Schedule:
        """The releases of a training beside those of the evaluation, if there is one.

        A record that is replaced may change sides, so that both are composed.
        """
        if self.evaluation is None:
            return trained
        if self.adjacency == ADD_OR_REMOVE_ONE.name:
            return on_disjoint_parts(trained, self.evaluation.schedule)
        return [*trained, *self.evaluation.schedule]

    def without_evaluation(self) -> Plan:
        """The plan of a run whose evaluation released nothing, which costs what its training does."""
        if self.evaluation is None:
            return self
        alone = replace(self, evaluation=None)
        if not self.is_fixed:
            return alone
        adjacency = adjacency_named(self.adjacency)
        return replace(alone, epsilon=by_accountants(self.schedule, self.target.budget.delta, adjacency))

    @property
    def expected_batch(self) -> float | None:
        """The expected number of records in a step; None if the number of all is private."""
        return None if self.facts.records is None else self.sampling_rate * self.facts.records

    @property
    def fixed_noise(self) -> float | None:
        """The noise multiplier, 0 for a run without noise; None if it is chosen adaptively, under a filter."""
        return self.noise_multiplier if self.is_fixed else None

    def with_public_sizes(self, compute: ComputeConfig) -> ComputeConfig:
        """The configuration with the public numbers that decide how many records a pass has."""
        expected = self.expected_batch
        if expected is None and compute.max_number is not None:
            # If this is less than a usual pass, as of few records, passes stay as they are without a bound.
            fewest = self.sampling_rate * compute.max_number / _RECORDS_IN_BOUND
            expected = fewest if fewest > _USUAL_PASS else None
        return replace(compute, number=self.facts.records, expected_batch=expected)

    def params(self, kind: type[P]) -> P:
        """The method's public values as its dataclass `kind`."""
        return adapter(kind).validate_python(self.method_params)

    def to_document(self) -> StatedPlan:
        """The plan as a document; an infinite epsilon becomes null."""
        budget = self.target.budget
        return StatedPlan(
            target=Amount(epsilon=None if math.isinf(budget.epsilon) else budget.epsilon, delta=budget.delta),
            accountant=self.target.accountant,
            count_noise=self.target.count_noise,
            prior_events=tuple(schedule_to_json(self.target.prior_events)),
            public=self.facts.to_json(),
            adjacency=self.adjacency,
            delta=budget.delta,
            epsilon=to_finite(self.epsilon),
            steps=self.steps,
            noise_multiplier=self.fixed_noise,
            sampling_rate=self.sampling_rate,
            divisor=self.divisor,
            schedule=tuple(schedule_to_json(self.schedule)),
            filter=self.filter,
            method_params=dict(self.method_params),
            not_private=self.not_private,
            evaluation=None if self.evaluation is None else self.evaluation.to_document(),
        )

    @classmethod
    def from_document(cls, stated: StatedPlan) -> Self:
        """The plan that `to_document` wrote."""
        epsilon = math.inf if stated.target.epsilon is None else stated.target.epsilon
        return cls(
            target=Target(
                Budget(epsilon, stated.target.delta),
                stated.accountant,
                stated.count_noise,
                prior_events=tuple(schedule_from_json(stated.prior_events)),
            ),
            facts=PlanningFacts.from_json(stated.public),
            steps=stated.steps,
            schedule=schedule_from_json(stated.schedule),
            epsilon={name: math.inf if cost is None else cost for name, cost in stated.epsilon.items()},
            noise_multiplier=stated.noise_multiplier or 0.0,
            sampling_rate=stated.sampling_rate,
            divisor=stated.divisor,
            filter=stated.filter,
            adjacency=stated.adjacency,
            method_params=stated.method_params,
            not_private=stated.not_private,
            evaluation=None if stated.evaluation is None else EvaluationPlan.from_document(stated.evaluation),
        )

    def check(self) -> None:
        """Raises RefusedError if the stated epsilon is less than the events or the filter cost, as after an edit.

        By PLD it may be more: another version may have computed a looser bound.
        """
        costs, target = self._costs(), self.target.budget.epsilon
        cost = costs.get(self.accountant, math.inf)
        if cost > target * (1 + _RECOMPUTATION_ERROR) and math.isfinite(cost):
            raise RefusedError(
                "the plan's releases cost epsilon {cost:g}, its target is {epsilon:g}; {plan.remedy}.",
                code="plan_above_target",
                cost=cost,
                epsilon=target,
            )
        if self.evaluation is not None:
            minimum, stated = self.cost_held_out(self.evaluation.schedule), self.evaluation.epsilon
            if stated < minimum * (1 - _RECOMPUTATION_ERROR):
                raise RefusedError(
                    "the plan states epsilon {stated:g} for the people held out, their evaluation costs"
                    " {least:g}; {plan.remedy}.",
                    code="plan_understates_evaluation",
                    stated=stated,
                    least=minimum,
                )
        computed = {name: costs.get(name, math.inf) for name in self.epsilon}
        if any(
            computed[name] > stated * (1 + _RECOMPUTATION_ERROR)
            or (name != "pld" and computed[name] < stated * (1 - _BOUND_ERROR))
            for name, stated in self.epsilon.items()
        ):
            raise RefusedError(
                "the plan states epsilon {stated}, its releases cost {costs}; {plan.remedy}.",
                code="plan_misstates_epsilon",
                stated=to_finite(self.epsilon),
                costs=to_finite(costs),
            )

    def cost_held_out(self, evaluated: Schedule) -> float:
        """The epsilon of an evaluation alone, at the target's delta, computed as that of the training is."""
        delta = self.target.budget.delta
        match self.filter:
            case ZCDPBudget():
                return epsilon_of_zcdp(math.fsum(count * rho_of(event) for event, count in evaluated), delta)
            case RenyiBudget(order, _):
                return max(0.0, float(rdp(evaluated, orders=(order,))[0]) + conversion(order, delta))
            case FixedSchedule():
                adjacency = adjacency_named(self.adjacency)
                return epsilon(evaluated, delta, accountant=self.accountant, adjacency=adjacency)

    def _costs(self) -> Mapping[str, float]:
        budget = self.target.budget
        evaluated = [] if self.evaluation is None else self.evaluation.schedule
        match self.filter:
            case FixedSchedule():
                adjacency = adjacency_named(self.adjacency)
                return by_accountants(self.reserved_schedule, budget.delta, adjacency, stated=self.epsilon)
            case ZCDPBudget(rho):
                # Trained on and held out are different people: nobody loses more than the larger one.
                maximum = max([rho, *(rho_of(event) for event, _ in evaluated)])
                return {"rdp": epsilon_of_zcdp(maximum, budget.delta)}
            case RenyiBudget(order, limit):
                held = RenyiFilter(order, budget).limit
                if not math.isclose(limit, held, rel_tol=_ROUNDING):
                    raise RefusedError(
                        "the plan states a limit of {limit:g} at order {order:g}, its target leaves"
                        " {held:g}; {plan.remedy}.",
                        code="plan_misstates_limit",
                        limit=limit,
                        order=order,
                        held=held,
                    )
                # Trained on and held out are different people: nobody loses more than the larger one.
                maximum = max(limit, float(rdp(evaluated, orders=(order,))[0]))
                return {"rdp": maximum + conversion(order, budget.delta)}

    def open_filter(self) -> Filter:
        """A new filter that enforces the training of this plan."""
        match self.filter:
            case FixedSchedule():
                cost = self.without_evaluation().cost
                return ScheduleFilter(self.schedule, cost, adjacency_named(self.adjacency), self.accountant)
            case ZCDPBudget(rho):
                return ZCDPFilter(rho)
            case RenyiBudget(order, _):
                return RenyiFilter(order, self.target.budget)


def by_accountants(
    schedule: Schedule,
    delta: float,
    adjacency: NeighboringRelation = ADD_OR_REMOVE_ONE,
    *,
    stated: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """The epsilon of a fixed schedule by each accountant that has a bound for it; at delta = 0 only by "pure".

    The pure epsilon of Laplace noise holds at every delta, and is listed with the others. stated: what was computed
    before, perhaps on another grid.
    """
    costs: dict[str, float] = {}
    schedule = count_same(schedule)
    for accountant in ACCOUNTANTS if delta > 0 else ("pure",):
        with suppress(RefusedError):
            costs[accountant] = epsilon_near(
                stated.get(accountant, math.inf), schedule, delta, accountant=accountant, adjacency=adjacency
            )
    return costs
