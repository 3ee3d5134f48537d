"""The interface of an algorithm: a plan from public values, an initial state, and steps that query the barrier.

The training loop, checkpoints, the noise trace and progress use only this interface. Before its first release, an
algorithm may use declared values only, and nothing computed from records.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

import dp_accounting as dp
from pydantic import JsonValue, PydanticUserError, TypeAdapter
from torch import Tensor

from algorithms.core.optimizers import STRICT
from algorithms.core.unknown_names import check_settings
from algorithms.errors import RefusedError
from algorithms.extension import imported, is_own
from algorithms.models import LossBounds
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import (
    ACCOUNTANTS,
    ADD_OR_REMOVE_ONE,
    Accountant,
    Adjacency,
    adjacency_named,
    epsilon_near,
)
from algorithms.privacy.accounting.events import Schedule, schedule_from_json, schedule_to_json
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
    filter_from_json,
    filter_to_json,
)
from algorithms.privacy.barrier.barrier import Barrier, Performance


@dataclass(frozen=True)
class Inputs:
    """Bounds on the norms of the vector that a linear model multiplies with its weights, including the bias's 1.

    width: the largest coordinate above 0 plus the largest below, as for `Box`. outputs: of the model.
    """

    l1: float
    l2: float
    width: float = math.inf
    outputs: int = 1


@dataclass(frozen=True)
class PlanningFacts:
    """What an algorithm may use before its first release.

    records: number of training records, None if it is private. parameters: d. layers: number of the model's layers.
    classes: number of classes, 1 if the target is not a class. inputs: for a linear model on data whose card bounds
    them, else None. loss: bounds of a record's loss as a function of the outputs, None if unknown. rows_per_user:
    number of rows of a record that is a person with several rows, else None. bfloat16: whether the model computes in
    it.
    """

    records: int | None
    parameters: int
    layers: int
    classes: int
    inputs: Inputs | None = None
    loss: LossBounds | None = None
    rows_per_user: int | None = None
    bfloat16: bool = False

    def known_records(self, what: str) -> int:
        """The number of records, which `what` needs; raises RefusedError if it is private."""
        if self.records is None:
            raise RefusedError(
                f"the number of records is private, and {what} needs it; declare it public, or use 'dp_gd' or 'dp_sgd'."
            )
        return self.records

    def check_rows(self) -> None:
        """Raises RefusedError if a record is a person with several rows, for which minima are not implemented."""
        if self.rows_per_user is not None:
            raise RefusedError(
                "the method finds a minimum over single rows, and a training record here is a person with up to"
                f" {self.rows_per_user}; use a method that takes steps, such as 'dp_sgd', or keep one row of each"
                " person."
            )

    def check_norms(self) -> None:
        """Raises RefusedError in bfloat16, where products on some processors spoil the rows next to one not finite."""
        if self.bfloat16:
            raise RefusedError(
                "the method releases or samples by norms of gradients, and in bfloat16 a record that is not finite can"
                " spoil those of others; set model.precision to float32, or take another method."
            )

    def check_losses(self, selected: str) -> None:
        """Raises RefusedError unless losses are known to be at least 0, as the noisy selection of `selected` needs."""
        if self.loss is None or self.loss.least < 0:
            raise RefusedError(
                f"the selection of {selected} compares losses from 0 up, and this model's are not known to be;"
                " use a model whose losses are, such as 'logistic'."
            )

    def gradient_norm(self, order: Literal[1, 2, "box"]) -> float:
        """A bound on the norm, `L1`, `L2` or `Box`, of a record's gradient for a linear model with one output.

        Raises RefusedError if a public bound is missing.
        """
        inputs, loss = self._bounded("sensitivity")
        if not math.isfinite(loss.slope):
            raise RefusedError(
                "a sensitivity was asked of the squared error, whose gradient has no bound; use an algorithm that"
                " clips, such as 'dp_sgd' or 'dp_gd'."
            )
        return loss.slope * {1: inputs.l1, 2: inputs.l2, "box": inputs.width}[order]

    def smoothness(self) -> float:
        """A bound on the eigenvalues of a record's Hessian; raises RefusedError if public bounds do not give one."""
        inputs, loss = self._bounded("smoothness")
        if not math.isfinite(loss.curvature):
            raise RefusedError(
                "smoothness was asked of a loss with a kink, like the hinge loss, which has none;"
                " use the model 'huber_svm' or 'logistic', or another algorithm."
            )
        return loss.curvature * inputs.l2**2

    def _bounded(self, what: str) -> tuple[Inputs, LossBounds]:
        if self.inputs is None or self.loss is None:
            raise RefusedError(
                f"a public bound for {what} is missing; take a linear model on data whose card bounds every feature,"
                " or an algorithm that clips."
            )
        return self.inputs, self.loss

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values; an infinite number becomes null."""
        # A plan on disk names the rows of a user "pooled".
        document = {
            "pooled" if name == "rows_per_user" else name: value for name, value in asdict(self).items()
        }
        for name in ("inputs", "loss"):
            if document[name] is not None:
                document[name] = to_finite(document[name])
        if self.rows_per_user is None:
            del document["pooled"]
        if not self.bfloat16:
            del document["bfloat16"]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The facts that `to_json` wrote."""
        inputs, loss = document.get("inputs"), document.get("loss")
        others = {key: value for key, value in document.items() if key not in ("inputs", "loss", "pooled")}
        return cls(
            **others,
            rows_per_user=document.get("pooled"),
            inputs=None if inputs is None else Inputs(**from_finite(inputs)),
            loss=None if loss is None else LossBounds(**from_finite(loss)),
        )


def to_finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Numbers for JSON: infinity becomes None."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def from_finite(values: Mapping[str, float | None]) -> dict[str, Any]:
    """The numbers that `to_finite` wrote."""
    return {key: math.inf if value is None else value for key, value in values.items()}


@dataclass(frozen=True)
class Target:
    """What a run may cost, and how the cost is computed.

    accountant: whose epsilon must meet the budget. count_noise: noise multiplier of the count that is released first if
    the number of records is private. prior_events: releases before the algorithm's own, which the budget must cover
    too.
    """

    budget: Budget
    accountant: Accountant = "pld"
    count_noise: float = 100.0
    prior_events: tuple[tuple[dp.DpEvent, int], ...] = ()

    def __post_init__(self) -> None:
        if (self.accountant == "pure") != (self.budget.delta == 0):
            raise RefusedError(
                f"delta = {self.budget.delta:g} was asked for with the accountant {self.accountant!r}; choose 'pure',"
                " which takes delta = 0 alone, or 'pld' or 'rdp' and a delta above 0."
            )


P = TypeVar("P")


_ADAPTERS: dict[object, TypeAdapter[Any]] = {}


def adapter(kind: type[P]) -> TypeAdapter[P]:
    """The (cached) pydantic adapter that reads and writes the dataclass `kind` as JSON values."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def from_registry(
    settings: Mapping[str, Any], shipped: Mapping[str, type[P]], what: str, *, needs: Sequence[str]
) -> P:
    """What `settings` name under "name", with the other keys as its settings.

    Args:
        settings: A name `package.module:factory` is of the user's own: a dataclass of its settings, or a function of
            them.
        shipped: The others by name.
        what: It is, such as "algorithm".
        needs: The functions that the user's own must have.

    Raises:
        RefusedError: For an unknown name, and for the user's own without these functions.
        ValidationError: Pydantic's, for unknown, missing or impossible settings.
    """
    name = str(settings.get("name"))
    kind: Any = imported(name, f"the {what}") if is_own(name) else shipped.get(name)
    if kind is None:
        raise RefusedError(
            f"there is no {what} {name!r}; choose one of {', '.join(shipped)}, or name your own package.module:factory."
        )
    try:
        reader = adapter(kind)
    except PydanticUserError as error:
        why = str(error).partition("\n")[0]
        raise RefusedError(f"the {what} {name!r} has settings that no file can give ({why}).") from None
    # By way of JSON, where strict checking still takes a mapping for a nested dataclass.
    own = {key: value for key, value in settings.items() if key != "name"}
    made: P = reader.validate_json(json.dumps(own))
    missing = [part for part in needs if not callable(getattr(made, part, None))]
    if missing:
        raise RefusedError(f"the {what} {name!r} has no {missing[0]}; give it {', '.join(needs)}.")
    return made


@dataclass(frozen=True)
class Plan:
    """The releases and the cost of a run, decided before the records are read.

    steps: the largest number of training steps. noise_multiplier: 0 if it is chosen adaptively. schedule: the events of
    the releases, in order. divisor: the public number that sums are divided by, None if a released count decides it.
    filter: enforces the budget. epsilon: by accountant, at the target's delta; infinite for a run that is not private;
    accountants without a bound are absent. adjacency: ADD_OR_REMOVE_ONE or REPLACE_ONE. method_params: public values
    that the method planned, as JSON; `params` returns them as the method's dataclass. not_private: why the stated
    epsilon does not hold, if it does not.
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

    def __post_init__(self) -> None:
        if not self.is_fixed and adjacency_named(self.adjacency) is not ADD_OR_REMOVE_ONE:
            raise RefusedError(
                f"releases chosen on the way are counted under {ADD_OR_REMOVE_ONE.name} alone, not under"
                f" {self.adjacency}; run the calibrate stage again."
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
    def expected_batch(self) -> float | None:
        """The expected number of records in a step; None if the number of all is private."""
        return None if self.facts.records is None else self.sampling_rate * self.facts.records

    @property
    def fixed_noise(self) -> float | None:
        """The noise multiplier, 0 for a run without noise; None if it is chosen adaptively, under a filter."""
        return self.noise_multiplier if self.is_fixed else None

    def with_public_sizes(self, performance: Performance) -> Performance:
        """The performance with the public numbers that decide how many records a pass has."""
        return replace(performance, number=self.facts.records, expected_batch=self.expected_batch)

    def params(self, kind: type[P]) -> P:
        """The method's public values as its dataclass `kind`."""
        return adapter(kind).validate_python(self.method_params)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; an infinite epsilon becomes null."""
        return {
            "target": to_finite(asdict(self.target.budget)),
            "accountant": self.target.accountant,
            "count_noise": self.target.count_noise,
            "prior_events": schedule_to_json(self.target.prior_events),
            "public": self.facts.to_json(),
            "adjacency": self.adjacency,
            "delta": self.target.budget.delta,
            "epsilon": to_finite(self.epsilon),
            "steps": self.steps,
            "noise_multiplier": self.fixed_noise,
            "sampling_rate": self.sampling_rate,
            "divisor": self.divisor,
            "schedule": schedule_to_json(self.schedule),
            "filter": filter_to_json(self.filter),
            "method_params": dict(self.method_params),
            "not_private": self.not_private,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The plan that `to_json` wrote; other keys are ignored."""
        budget = Budget(**from_finite(document["target"]))
        return cls(
            target=Target(
                budget,
                document["accountant"],
                document["count_noise"],
                prior_events=tuple(schedule_from_json(document["prior_events"])),
            ),
            facts=PlanningFacts.from_json(document["public"]),
            schedule=schedule_from_json(document["schedule"]),
            epsilon=from_finite(document["epsilon"]),
            noise_multiplier=document["noise_multiplier"] or 0.0,
            filter=filter_from_json(document["filter"]),
            **{
                name: document[name]
                for name in ("steps", "sampling_rate", "divisor", "adjacency", "method_params", "not_private")
            },
        )

    def check(self) -> None:
        """Raises RefusedError if the stated epsilon is less than the events or the filter cost, as after an edit.

        By PLD it may be more: another version may have computed a looser bound.
        """
        costs, target = self._costs(), self.target.budget.epsilon
        cost = costs.get(self.accountant, math.inf)
        if cost > target * (1 + 1e-6) and math.isfinite(cost):
            raise RefusedError(
                f"the plan's releases cost epsilon {cost:g}, its target is {target:g}; run the calibrate stage again."
            )
        found = {name: costs.get(name, math.inf) for name in self.epsilon}
        if any(
            found[name] > stated * (1 + 1e-6) or (name != "pld" and found[name] < stated * (1 - 1e-2))
            for name, stated in self.epsilon.items()
        ):
            raise RefusedError(
                f"the plan states epsilon {to_finite(self.epsilon)}, its releases cost {to_finite(costs)};"
                " run the calibrate stage again."
            )

    def _costs(self) -> Mapping[str, float]:
        budget = self.target.budget
        match self.filter:
            case FixedSchedule():
                adjacency = adjacency_named(self.adjacency)
                return by_accountants(self.schedule, budget.delta, adjacency, stated=self.epsilon)
            case ZCDPBudget(rho):
                return {"rdp": epsilon_of_zcdp(rho, budget.delta)}
            case RenyiBudget(order, limit):
                held = RenyiFilter(order, budget).limit
                if not math.isclose(limit, held, rel_tol=1e-9):
                    raise RefusedError(
                        f"the plan states a limit of {limit:g} at order {order:g}, its target leaves {held:g};"
                        " run the calibrate stage again."
                    )
                return {"rdp": limit + conversion(order, budget.delta)}

    def open_filter(self) -> Filter:
        """A new filter that enforces this plan."""
        match self.filter:
            case FixedSchedule():
                return ScheduleFilter(
                    self.schedule, self.cost, adjacency_named(self.adjacency), self.accountant
                )
            case ZCDPBudget(rho):
                return ZCDPFilter(rho)
            case RenyiBudget(order, _):
                return RenyiFilter(order, self.target.budget)


class State(Protocol):
    """A dataclass of tensors: everything that a step passes to the next one; checkpointed as it is."""

    @property
    def parameters(self) -> Tensor: ...


S = TypeVar("S", bound=State)


class Algorithm(Protocol[S]):
    """A training method: its settings, and four functions.

    plan: calibrates noise, steps and events to a target from public values; raises RefusedError for settings that do
    not fit. init: the state before the first step, given the model's initial parameters. step: queries the barrier and
    post-processes the answer; returns None to end the run before its last planned step. released: the parameters to
    publish, from the last state.

    A class attribute `by_coordinate = True` declares that the state's vectors are combined coordinate by coordinate
    alone, as in SGD and Adam, except for sums over all of them by `placement.total`. Processes can then each hold a
    slice of them (`performance.shard_trained`).
    """

    def plan(self, target: Target, facts: PlanningFacts) -> Plan: ...
    def init(self, parameters: Tensor, plan: Plan) -> S: ...
    def step(self, state: S, plan: Plan, barrier: Barrier) -> S | None: ...
    def released(self, state: S) -> Tensor: ...


@dataclass(frozen=True)
class Answered:
    """parameters: [d], the initial ones, and after the only step those to publish."""

    parameters: Tensor


class Strict:
    """The base of settings: unknown keys, and values of another type, are refused."""

    by_coordinate: ClassVar[bool] = False
    __pydantic_config__ = STRICT

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Raises UnknownNameError for a setting that does not exist, as `epochs`."""
        check_settings(cls, settings)
        return super().__new__(cls)


class SingleRelease(Strict):
    """The base of methods that make one query and publish its answer."""

    def init(self, parameters: Tensor, plan: Plan) -> Answered:
        """The model's initial parameters."""
        return Answered(parameters.clone())

    def released(self, state: Answered) -> Tensor:
        """The answer, shape [d]."""
        return state.parameters


def by_accountants(
    schedule: Schedule,
    delta: float,
    adjacency: Adjacency = ADD_OR_REMOVE_ONE,
    *,
    stated: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """The epsilon of a fixed schedule by each accountant that has a bound for it; at delta = 0 only by "pure".

    The pure epsilon of Laplace noise holds at every delta, and is listed with the others. stated: what was computed
    before, perhaps on another grid.
    """
    costs: dict[str, float] = {}
    for accountant in ACCOUNTANTS if delta > 0 else ("pure",):
        with suppress(RefusedError):
            costs[accountant] = epsilon_near(
                stated.get(accountant, math.inf), schedule, delta, accountant=accountant, adjacency=adjacency
            )
    return costs
