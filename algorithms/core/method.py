"""The interface of a method: a plan from public values, an initial state, and steps that query the barrier.

The training loop, checkpoints, the noise trace and progress use only this interface. Before its first release, a
method may use declared values only, and nothing computed from records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import JsonValue

from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.settings import Strict

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.privacy.barrier.barrier import Barrier

STORED_AS = "stored_as"
"""The metadata of a state's field that has another name in checkpoints, which runs begun before may resume."""


class MethodState(Protocol):
    """A dataclass of tensors: everything that a step passes to the next one; checkpointed as it is."""

    @property
    def parameters(self) -> Tensor: ...


S = TypeVar("S", bound=MethodState)


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
class PaperSwitch:
    """A setting that, at a value, makes the choices of a paper: a method's class attribute `paper_switch`.

    name, value: of the setting. paper: whose protocol it is. settings: what it decides, with the paper's values.
    """

    name: str
    paper: str
    settings: Mapping[str, JsonValue]
    value: JsonValue = True


@dataclass(frozen=True)
class PaperProtocol:
    """What a plan and a card state of a paper's protocol: the settings that the run has, and which are not the paper's.

    A setting that is given beside the switch is kept, as for a sweep over it, and shows here as a departure.
    """

    paper: str
    settings: Mapping[str, JsonValue]
    departures: tuple[str, ...]


def paper_protocol(method: Any, **in_effect: JsonValue) -> PaperProtocol | None:
    """The protocol of a method whose paper switch is on, or None.

    in_effect: values of settings that the method itself fills in, where theirs is None.
    """
    switch: PaperSwitch = method.paper_switch
    if getattr(method, switch.name) != switch.value:
        return None
    settings, printed = asdict(method) | in_effect, _as_json(switch.settings)
    used = _as_json({name: settings[name] for name in printed})
    return PaperProtocol(switch.paper, used, tuple(name for name in used if used[name] != printed[name]))


def _as_json(values: Mapping[str, JsonValue | tuple[JsonValue, ...]]) -> dict[str, JsonValue]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True)
class ReleasedParameters:
    """parameters: [d], the initial ones, and after the only step those to publish."""

    parameters: Tensor


class SingleRelease(Strict):
    """The base of methods that make one query and publish its answer."""

    def init(self, parameters: Tensor, plan: Plan) -> ReleasedParameters:
        """The model's initial parameters."""
        return ReleasedParameters(parameters.clone())

    def released(self, state: ReleasedParameters) -> Tensor:
        """The answer, shape [d]."""
        return state.parameters
