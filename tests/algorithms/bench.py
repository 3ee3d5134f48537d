"""A small bench for algorithms: made-up records, a barrier over them, and runs of a few steps."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.algorithm import Algorithm, Plan, Target
from algorithms.catalogue import from_settings
from algorithms.models import Model, build
from algorithms.privacy.barrier import Barrier, Performance
from algorithms.privacy.budget import Budget
from algorithms.privacy.noise import Generator, seeded_generator
from algorithms.privacy.trace import Trace
from algorithms.public import Public

SHAPE, CLASSES, RECORDS, DELTA = (1, 4, 4), 3, 40, 1e-3
SETTINGS = {"steps": 5, "batch_size": 10}


@dataclass(frozen=True)
class MadeUp:
    """Records for a barrier: features [n, 1, 4, 4], labels [n]."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]


def made_up(count: int = RECORDS, *, seed: int = 0) -> MadeUp:
    draw = np.random.default_rng(seed)
    return MadeUp(draw.normal(size=(count, *SHAPE)).astype(np.float32), draw.integers(0, CLASSES, count))


def with_record(records: MadeUp, features: NDArray[np.float32], label: int) -> MadeUp:
    """The records and one more, which comes last, so that the others keep their coins."""
    return MadeUp(np.concatenate([records.features, features[None]]), np.append(records.labels, label))


@cache
def small_model(name: str = "softmax") -> Model:
    return build(name, input_shape=SHAPE, classes=CLASSES, seed=1)


def algorithm(name: str, **settings: Any) -> Algorithm[Any]:
    return from_settings({"name": name} | SETTINGS | settings)


@cache
def planned(
    method: Algorithm[Any], model: Model, *, records: int | None = RECORDS, epsilon: float = 5.0
) -> Plan:
    public = Public(records, model.parameter_count, len(model.layers), CLASSES)
    return method.plan(Target(Budget(epsilon, DELTA)), public)


class Watched(Barrier):
    """A barrier that keeps its answers to `gradient`, as an adversary sees them."""

    def gradient(self, *args: Any, **kwargs: Any) -> Tensor:
        answer = super().gradient(*args, **kwargs)
        self.__dict__.setdefault("answers", []).append(answer)
        return answer


@dataclass(frozen=True)
class Outcome:
    """What a run left: released parameters, the trace, the barrier and its answers."""

    released: Tensor
    trace: Trace
    barrier: Watched

    @property
    def answers(self) -> list[Tensor]:
        answers: list[Tensor] = self.barrier.__dict__["answers"]
        return answers


def run(
    method: Algorithm[Any], plan: Plan, records: MadeUp, model: Model, *, generator: Generator | None = None
) -> Outcome:
    trace = Trace()
    barrier = Watched(
        records,
        model,
        spend=plan.open_filter(),
        generator=generator or seeded_generator(7),
        delta=DELTA,
        trace=trace,
        performance=Performance(torch.device("cpu"), memory_mb=1),
    )
    state = method.init(model.initial_parameters(), plan)
    for trace.step in range(plan.steps):
        state = method.step(state, plan, barrier)
    return Outcome(method.released(state), trace, barrier)
