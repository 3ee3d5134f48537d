"""A small bench for methods that live on public bounds: records in a box, a model without a bias, and runs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.core.method import Algorithm
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import Inputs, PlanningFacts
from algorithms.models import Model, build
from algorithms.privacy.accounting import Budget
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from tests.support.bench import OneLook

FEATURES, RECORDS, DELTA = 20, 1000, 1e-6
PURE = Target(Budget(1.0, 0.0), "pure")
APPROXIMATE = Target(Budget(1.0, DELTA))

SIZES = torch.linspace(0.1, 5.0, FEATURES, dtype=torch.float64)


def bowl(theta: Tensor) -> Tensor:
    """The gradient of a quadratic with its least value away from the origin."""
    return SIZES * (theta - 1.0)


@dataclass(frozen=True)
class Box:
    """Records for a barrier: features [n, 20] in [0, 1], labels [n] of two classes."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]


@cache
def model(name: str = "logistic_through_origin") -> Model:
    return build(name, input_shape=(FEATURES,), classes=2, seed=1)


def facts(records: int | None = RECORDS, *, name: str = "logistic_through_origin") -> PlanningFacts:
    """What is public of such records: 0 <= x <= 1 in 20 places, and the model's loss bounds."""
    inputs = Inputs(float(FEATURES), math.sqrt(FEATURES))
    return PlanningFacts(records, model(name).parameter_count, 1, 2, inputs, model(name).bounds)


def box(count: int = RECORDS, *, features_seed: int = 1, hyperplane_seed: int = 75) -> Box:
    """Uniform points on two sides of a hyperplane through the origin."""
    points = np.random.RandomState(features_seed).random_sample((FEATURES, count)).T
    normal = np.random.RandomState(hyperplane_seed).standard_normal(FEATURES)
    return Box(np.ascontiguousarray(points, np.float32), (points @ normal > 0).astype(np.int64))


@dataclass
class Watching:
    """A barrier's answers, and the points where it was asked."""

    barrier: Barrier
    points: list[Tensor] = field(default_factory=list)
    answers: list[Tensor] = field(default_factory=list)

    def gradient(self, parameters: Tensor, **asked: Any) -> Tensor:
        self.points.append(parameters)
        self.answers.append(self.barrier.gradient(parameters, **asked))
        return self.answers[-1]


def run(method: Algorithm[Any], plan: Plan, records: Box) -> tuple[Tensor, Trace, Watching]:
    """The released parameters, the trace and the watched barrier of a whole run with a fixed seed."""
    trace = Trace()
    barrier = Barrier(
        records,
        model(),
        privacy_filter=plan.open_filter(),
        generator=seeded_generator(7),
        delta=plan.target.budget.delta,
        trace=trace,
        compute=OneLook(number=plan.facts.records),
    )
    watching = Watching(barrier)
    state = method.init(model().initial_parameters(), plan)
    for trace.step in range(plan.steps):
        state = method.step(state, plan, watching)  # type: ignore[arg-type]
    return method.released(state), trace, watching


@dataclass
class Exact:
    """A stand-in for the barrier: a gradient without bound and noise."""

    of: Callable[[Tensor], Tensor]

    def gradient(self, parameters: Tensor, **_asked: Any) -> Tensor:
        return self.of(parameters)


def descended(method: Algorithm[Any], plan: Plan, gradient: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """All iterates of a run on exact gradients, in 64 bits."""
    state = method.init(torch.zeros(FEATURES, dtype=torch.float64), plan)
    iterates = [state.parameters]
    for _ in range(plan.steps):
        state = method.step(state, plan, Exact(gradient))  # type: ignore[arg-type]
        iterates.append(state.parameters)
    return iterates


def objective(records: Box, theta: Tensor, regularisation: float) -> float:
    """The mean logistic loss + regularisation ||theta||^2, in 64 bits."""
    signs = 2.0 * torch.from_numpy(records.labels) - 1.0
    margins = signs * (torch.from_numpy(records.features).double() @ theta.double())
    return float(
        torch.nn.functional.softplus(-margins).mean() + regularisation * theta.double().square().sum()
    )
