"""A small bench for algorithms: made-up records, a barrier over them, and runs of a few steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.core import training
from algorithms.core.facts_of_models import intercepts_of, number_of
from algorithms.core.learned_features import FeatureLearner
from algorithms.core.method import Algorithm
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import Inputs, PlanningFacts
from algorithms.gradients import Engine
from algorithms.methods import from_settings
from algorithms.models import Model, build
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import Accountant
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import Generator, add_steps, seeded_generator, steps_of
from tests.support.device import DEVICE

SHAPE, CLASSES, RECORDS, DELTA = (1, 4, 4), 3, 40, 1e-3

_LOOKS: dict[object, Engine] = {}


class OneLook(ComputeConfig):
    """Looks once at models that are alike, for all barriers: a look costs more than the few steps here."""

    def engine(self, model: Model, records: Any) -> Engine:
        shapes = tuple(model.shapes.items())
        parts = (model.name, str(model.module), shapes, model.losses, model.scores, model.precision)
        asked = (self.device, self.memory_mb, self.physical_batch, self.expected_batch)
        key = (asked, parts, records.features.shape[1:], records.features.dtype)
        if key not in _LOOKS:
            _LOOKS[key] = super().engine(model, records)
        return _LOOKS[key]


def add_on_grid(total: NDArray[np.float64], noise: NDArray[np.float64], *, std: float) -> NDArray[np.float64]:
    """A sum plus noise as a release adds them, for the grid of `std`."""
    return add_steps(torch.from_numpy(total), steps_of(noise, std=std), std=std).numpy()


PLAIN = OneLook(DEVICE)
SETTINGS: dict[str, dict[str, Any]] = {
    "dp_sgd": {"steps": 5, "expected_batch_size": 10},
    "dp_sgd_decay": {"steps": 5, "expected_batch_size": 10, "rate": 0.2},
    "quantile_clipping": {"steps": 2, "expected_batch_size": 10, "count_noise_multiplier": 10.0},
    "adaclip": {"steps": 5, "expected_batch_size": 10},
    "adp_sgd": {"steps": 5, "expected_batch_size": 10, "decay": {"form": "constant"}},
    "matrix_factorisation": {"steps": 5, "expected_batch_size": 10},
    "dp_ftrl": {"steps": 5, "expected_batch_size": 10},
    "dp_gd": {"steps": 5},
    "dp_agd": {"iterations": 5, "range_every": 2},
    "dpis": {"epochs": 3, "expected_batch_size": 10, "clip_norm": 4.0, "oversampling": 1, "norm_noise": 0.5},
    "heavy_ball": {"steps": 5},
    "nesterov": {"steps": 5, "variant": "nag"},
    "norm_bound_sgd": {"steps": 5, "expected_batch_size": 10},
    "sgd_adv": {"steps": 5, "expected_batch_size": 10},
    "sgd_ma": {"steps": 5, "expected_batch_size": 10},
    "priv_gene": {},
    "objective_perturbation": {},
    "output_perturbation": {},
    "majority": {},
    "lbfgs": {"regularisation": 0.1},
    "non_private": {"steps": 5, "expected_batch_size": 10},
}
"""Settings for a run of a few steps, by algorithm."""


@dataclass(frozen=True)
class MadeUp:
    """Records for a barrier: features [n, 1, 4, 4], labels [n]."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]


def made_up(count: int = RECORDS, *, seed: int = 0, classes: int = CLASSES) -> MadeUp:
    draw = np.random.default_rng(seed)
    return MadeUp(draw.normal(size=(count, *SHAPE)).astype(np.float32), draw.integers(0, classes, count))


def with_record(records: MadeUp, features: NDArray[np.float32], label: int) -> MadeUp:
    """The records and one more, which comes last, so that the others keep their coins."""
    return MadeUp(np.concatenate([records.features, features[None]]), np.append(records.labels, label))


@cache
def small_model(name: str = "softmax", *, classes: int = CLASSES) -> Model:
    return build(name, input_shape=SHAPE, classes=classes, seed=1)


def algorithm(name: str, **settings: Any) -> Algorithm[Any]:
    return from_settings({"name": name} | SETTINGS[name] | settings)


@cache
def planned(
    method: Algorithm[Any],
    model: Model,
    *,
    records: int | None = RECORDS,
    epsilon: float = 5.0,
    accountant: Accountant = "pld",
) -> Plan:
    """A plan for records of norm up to 4, the bias's 1 not counted."""
    classes = 2 if model.name in ("logistic", "svm", "huber_svm") else CLASSES
    facts = PlanningFacts(
        records=records,
        parameters=model.parameter_count,
        layers=len(model.layers),
        classes=classes,
        inputs=Inputs(17.0, math.sqrt(17.0)),
        loss=model.bounds,
        intercepts=intercepts_of(model, classes),
        number=number_of(model),
    )
    delta = 0.0 if accountant == "pure" else DELTA
    return method.plan(Target(Budget(epsilon, delta), accountant), facts)


class Watched(Barrier):
    """A barrier that keeps its answers in their order, as an adversary sees them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.answers: list[Tensor] = []

    def gradient(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._kept(super().gradient(*args, **kwargs))

    def total(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._kept(super().total(*args, **kwargs))

    def histograms(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._kept(super().histograms(*args, **kwargs))

    def norm_count(self, *args: Any, **kwargs: Any) -> float:
        return float(self._kept(torch.tensor([super().norm_count(*args, **kwargs)], dtype=torch.float64)))

    def norm_total(self, *args: Any, **kwargs: Any) -> float:
        return float(self._kept(torch.tensor(super().norm_total(*args, **kwargs))))

    def loss_gain(self, *args: Any, **kwargs: Any) -> float:
        return float(self._kept(torch.tensor([super().loss_gain(*args, **kwargs)], dtype=torch.float64)))

    def argmin(self, *args: Any, **kwargs: Any) -> int:
        return int(self._kept(torch.tensor(super().argmin(*args, **kwargs))))

    def minimum(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._kept(super().minimum(*args, **kwargs))

    def _kept(self, answer: Tensor) -> Tensor:
        self.answers.append(answer)
        return answer


class StoppedError(Exception):
    """Stands for a crash."""


def trained(
    method: Algorithm[Any],
    plan: Plan,
    model: Model,
    folder: Path,
    *,
    records: Callable[[], Any] = made_up,
    features: FeatureLearner | None = None,
    compute: ComputeConfig = PLAIN,
    stop_after: int | None = None,
) -> training.Trained:
    """A run in the training loop with a checkpoint in a folder after each step; it crashes after `stop_after`."""

    def on_step(step: int, _epsilon: float, _noise_std: float) -> None:
        if step == stop_after:
            raise StoppedError

    folder.mkdir(exist_ok=True)
    return training.train(
        method,
        plan,
        model,
        open_records=records,
        run=training.ResumableRun(
            run_id="one run", generator=seeded_generator(3), folder=folder, checkpoint_seconds=0.0
        ),
        compute=compute,
        features=features,
        hooks=training.Hooks(on_step=on_step),
    )


@dataclass(frozen=True)
class Outcome:
    """What a run left: released parameters, the trace, the barrier and its answers."""

    released: Tensor
    trace: Trace
    barrier: Watched

    @property
    def answers(self) -> list[Tensor]:
        return self.barrier.answers


def run(
    method: Algorithm[Any], plan: Plan, records: MadeUp, model: Model, *, generator: Generator | None = None
) -> Outcome:
    trace = Trace()
    barrier = Watched(
        records,
        model,
        privacy_filter=plan.open_filter(),
        generator=generator or seeded_generator(7),
        delta=plan.target.budget.delta,
        trace=trace,
        compute=OneLook(DEVICE, memory_mb=1),
    )
    state = method.init(model.initial_parameters().to(DEVICE), plan)
    for trace.step in range(plan.steps):
        following = method.step(state, plan, barrier)
        if following is None:
            break
        state = following
    return Outcome(method.released(state), trace, barrier)
