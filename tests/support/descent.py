"""A bench for descent by selection: two classes of records, whole runs, and a barrier that answers as a test says."""

from collections.abc import Sequence
from typing import Any

import dp_accounting as dp
import numpy as np
import torch
from torch import Tensor

from algorithms.core.method import Algorithm
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.gradients import LineCandidates
from algorithms.methods.dp_agd import DPAGD, AGDState
from algorithms.models import Model, build
from algorithms.privacy.accounting import Budget
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Release, argmin_release
from tests.support.bench import MadeUp, OneLook

RECORDS, FEATURES, DELTA, EPSILON = 400, 6, 1e-6, 2.0


def made_up(count: int = RECORDS) -> MadeUp:
    draw = np.random.default_rng(5)
    features = draw.normal(size=(count, FEATURES)).astype(np.float32)
    labels = (features[:, 0] + 0.3 * draw.normal(size=count) > 0.2).astype(np.int64)
    return MadeUp(features, labels)


def model_of(name: str = "logistic") -> Model:
    return build(name, input_shape=(FEATURES,), classes=2, seed=0)


def planned(
    method: Algorithm[Any], *, epsilon: float = EPSILON, delta: float = DELTA, records: int | None = RECORDS
) -> Plan:
    facts = PlanningFacts(records, FEATURES + 1, 1, 2, loss=model_of().bounds)
    return method.plan(Target(Budget(epsilon, delta)), facts)


def run(method: DPAGD, plan: Plan, *, seed: int = 7, name: str = "logistic") -> tuple[AGDState, Trace, bool]:
    """A whole run: its last state, its trace, and whether it ended before its last planned step."""
    model, trace = model_of(name), Trace()
    barrier = Barrier(
        made_up(),
        model,
        privacy_filter=plan.open_filter(),
        generator=seeded_generator(seed),
        delta=DELTA,
        trace=trace,
        compute=OneLook(memory_mb=8, number=plan.facts.records),
    )
    state = method.init(model.initial_parameters(), plan)
    for trace.step in range(plan.steps):
        following = method.step(state, plan, barrier)
        if following is None:
            return state, trace, True
        state = following
    return state, trace, False


def rho(event: dp.DpEvent) -> float:
    """The rho of the two events of a full-batch run, counted apart from the filter."""
    if isinstance(event, dp.GaussianDpEvent):
        return 1 / (2 * event.noise_multiplier**2)
    assert isinstance(event, dp.dp_event.ZCDpEvent)
    return float(event.rho)


class Scripted:
    """A stand-in for the barrier: gradients and selections as given, under the plan's own filter."""

    def __init__(self, plan: Plan, *, chosen: Sequence[int], gradients: Sequence[Tensor] = ()) -> None:
        self.privacy_filter = plan.open_filter()
        self.chosen, self.gradients = list(chosen), list(gradients)
        self.asked: list[Any] = []
        self.multipliers: list[float] = []
        self.lines: list[LineCandidates] = []

    def affords(self, release: Release) -> bool:
        return self.privacy_filter.affords(release.event())

    def gradient(self, parameters: Tensor, **terms: Any) -> Tensor:
        release = Release("gradient", terms["sampling"], terms["clipping"], terms["noise"], terms["divisor"])
        self.privacy_filter.charge(release.event())
        self.asked.append(release)
        self.multipliers.append(release.noise.multiplier)
        return self.gradients.pop(0) if self.gradients else torch.tensor([3.0, 4.0])

    def argmin(self, line: LineCandidates, **terms: Any) -> int:
        release = argmin_release(terms["bound"], terms["noise"], terms["sampling"])
        self.privacy_filter.charge(release.event())
        self.asked.append(release)
        self.lines.append(line)
        return self.chosen.pop(0) if self.chosen else 1


def stepped(method: DPAGD, state: AGDState, plan: Plan, barrier: Scripted) -> AGDState:
    """The state after an iteration that the budget allows."""
    following = method.step(state, plan, barrier)  # type: ignore[arg-type]
    assert following is not None
    return following
