"""The attacker's game against a registered method: made-up records, and the barrier's answers.

The records are the worst case. All except the canaries are zeros, which add nothing to any sum. A canary's gradient has
the largest length, in a direction of its own, in every layer. So the attacker knows everything except who takes part.
It sees each answer of the barrier (white box) or only the released parameters (black box). The method's own plan and
steps run in the real training loop at the real barrier.
"""

import hashlib
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import dp_accounting as dp
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue
from torch import Tensor, nn

from algorithms.core.method import Algorithm
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import Inputs, Intercepts, PlanningFacts
from algorithms.core.training import Hooks, ResumableRun, train
from algorithms.errors import RefusedError
from algorithms.gradients import L1, L2, Engine, LineCandidates
from algorithms.methods import CATALOGUE, from_settings
from algorithms.models import LossBounds, Model
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import REPLACE_ONE, Accountant
from algorithms.privacy.accounting.gaussian import SHARE_OF_FEATURES, noise_for_share
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig
from algorithms.privacy.barrier.histograms import SHARES, count_cells
from algorithms.privacy.mechanisms.noise import Generator
from algorithms.privacy.mechanisms.release import Minimum
from algorithms.privacy.mechanisms.sampling import FullBatch
from algorithms.target_scale import TargetScale

Array = NDArray[np.float64]
Predicts: TypeAlias = Literal["class", "number", "count"]
LENGTH = 1e3
"""The length of a canary's gradient in each layer, before clipping."""
_USUAL_SETTINGS: Mapping[str, JsonValue] = {
    "steps": 4,
    "epochs": 2,
    "rounds": 4,
    "iterations": 4,
    "clip_norm": 1.0,
}
_METHOD_SETTINGS: Mapping[str, Mapping[str, JsonValue]] = {
    "dp_agd": {"loss_bound": 1.0},
    "dpis": {"norm_noise_multiplier": 4.0, "oversampling": 1.5},
    "nesterov": {"variant": "nag_opt", "noise": "gaussian"},
    "priv_gene": {"loss_bound": 1.0},
    "quantile_clipping": {"count_noise_multiplier": 4.0},
}


_DELTA = 1e-5
"""For the noise of features, where the claim is one of delta 0, which the plan then refuses."""
_ONE_LAYER = ("objective_perturbation", "output_perturbation", "majority")
"""Methods that need a linear model with one layer."""


@dataclass(frozen=True)
class Game:
    """The settings of a game.

    Attributes:
        algorithm: Name of a registered method, or "package.module:factory".
        settings: Of the method; the defaults are small (four steps, half of the records in a batch).
        epsilon, delta: The claim, to which the method's plan is calibrated.
        canaries: Number of records that the attacker asks about.
        zeros: Number of other records, and of coordinates that no record moves, which show only noise.
        accountant: Of the claim; at delta 0 it is "pure".
        predicts: With a number or a count its centre and its mean are released before the training, as for tables.
    """

    algorithm: str
    settings: Mapping[str, JsonValue]
    epsilon: float
    delta: float
    canaries: int
    zeros: int = 8
    accountant: Accountant = "pld"
    predicts: Predicts = "class"

    @property
    def records(self) -> int:
        """The public number of records."""
        return self.canaries + self.zeros

    def method(self) -> Algorithm[Any]:
        """The method with its settings."""
        return from_settings({"name": self.algorithm, **self.all_settings()})

    def model(self) -> Model:
        """A model with a linear loss, so that a record's gradient equals its features at every point."""
        single = nn.Sequential(nn.Flatten(), _one_layer(self.width))
        module = single if self.algorithm in _ONE_LAYER else _Layers(self.width)
        if self.features is not None:
            module.add_module("features", self.features.module((self.width,)))
        bounds = LossBounds(slope=1.0, curvature=0.25, least=0.0)
        return Model(
            "made-up",
            module,
            losses=lambda outputs, _labels: outputs[:, 0],  # w x, whose gradient by w is x
            scores=lambda outputs: torch.cat([-outputs, outputs], dim=1),
            bounds=bounds,
        )

    @property
    def features(self) -> TargetScale | None:
        """What is released before the training: of a number."""
        if self.predicts == "class":
            return None
        noise = noise_for_share(SHARE_OF_FEATURES, self.epsilon, self.delta or _DELTA)
        return TargetScale(noise=noise, mean_noise=noise)

    def labels(self, are_in: Sequence[int] | NDArray[np.int64]) -> NDArray[Any]:
        """The labels of zeros and canaries: 0 and 1, as classes or as numbers."""
        return np.asarray(are_in, np.int64 if self.predicts == "class" else np.float32)

    @property
    def width(self) -> int:
        """Features of a record: in each of two layers one for each canary, and those that show noise."""
        return 2 * self.records

    def plan(self) -> Plan:
        """The method's plan for the claim; raises RefusedError for a method without a claim.

        Frequencies of classes that are released move a coordinate that no record moves.
        """
        facts = PlanningFacts(
            records=self.records,
            parameters=self.width,
            layers=len(self.model().layers),
            classes=2,
            inputs=Inputs(l1=1.0, l2=1.0, width=1.0),
            loss=LossBounds(slope=1.0, curvature=0.25, least=0.0),
            intercepts=Intercepts(self.canaries, 1, 1, 1.0) if self.predicts == "class" else None,
            number=None if self.predicts == "class" else self.predicts,
        )
        before = () if self.features is None else self.features.releases((self.width,))
        events = tuple((release.event(), 1) for release in before)
        accountant = "pure" if self.delta == 0 else self.accountant
        plan = self.method().plan(
            Target(Budget(self.epsilon, self.delta), accountant, prior_events=events), facts
        )
        if not math.isfinite(plan.epsilon.get(plan.accountant, math.inf)) or plan.not_private:
            raise RefusedError(
                f"the method {self.algorithm!r} claims no privacy here, so there is nothing to audit; choose another."
            )
        return plan

    def canary(self, index: int) -> Array:
        """A canary's features, shape [width]: its own coordinate in each layer."""
        # Orthogonal to all others, so that each canary shows in coordinates of its own.
        features = np.zeros(self.width)
        features[[index, self.records + index]] = LENGTH
        return features

    @property
    def silent(self) -> NDArray[np.intp]:
        """The coordinates that no record moves."""
        return np.concatenate([part + np.arange(self.canaries, self.records) for part in (0, self.records)])

    def all_settings(self) -> dict[str, JsonValue]:
        """The given settings, and small defaults for the others."""
        kind: Any = CATALOGUE.get(self.algorithm)  # None for a method that is not shipped
        names = set() if kind is None else {field.name for field in fields(kind)}
        usual = {name: value for name, value in _USUAL_SETTINGS.items() if name in names}
        is_sampled = "expected_batch_size" in names and "relative_step" not in names
        usual |= {"expected_batch_size": self.records // 2} if is_sampled else {}
        usual |= {"update": {"learning_rate": 0.01}} if "update" in names else {}
        return usual | dict(_METHOD_SETTINGS.get(self.algorithm, {})) | dict(self.settings)


class _Layers(nn.Module):
    """Two parallel layers, each for half of the features, so that a fault in one layer shows in its half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = width // 2
        self.first, self.second = _one_layer(self.left), _one_layer(width - self.left)

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.first(features[:, : self.left]) + self.second(features[:, self.left :])
        return outputs


def _one_layer(width: int) -> nn.Linear:
    layer = nn.Linear(width, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


@dataclass(frozen=True)
class CanaryRecords:
    """Made-up records.

    Attributes:
        features: [n, width].
        labels: [n]; 1 of a canary.
    """

    features: NDArray[np.float32]
    labels: NDArray[Any]


@dataclass(frozen=True)
class Answer:
    """The barrier's answer to one query.

    Attributes:
        kind: "gradient", "total", "norms", "norm count", "argmin", "loss gain" or "minimum".
        sampling: Of the records.
        bound: On what one record adds.
        noise: On the sum.
        value: The noisy sum before division, or the chosen index of a selection.
        public_query: A total's statistic, a selection's candidates, or the step whose gain in loss is asked for.
    """

    kind: str
    sampling: Any
    bound: Any
    noise: Any
    value: Array
    public_query: Any = None

    @property
    def scale(self) -> float:
        """The claimed scale of the noise on the sum."""
        if isinstance(self.bound, Minimum):  # as a sum of gradients: see `RecordingBarrier.minimum`
            return float(self.noise.scale(self.bound)) * (
                1.0 if self.noise.is_inside else self.bound.regularisation
            )
        return float(self.noise.scale(self.bound))


class RecordingBarrier(Barrier):
    """The real barrier, with all answers recorded."""

    def __init__(self, *args: Any, seen: list[Answer], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen = seen

    def with_model(self, _model: Model) -> "RecordingBarrier":
        """Itself: the losses of the game are linear whatever features are released before the training."""
        return self

    def gradient(self, parameters: Tensor, **options: Any) -> Tensor:
        answer = super().gradient(parameters, **options)
        self._keep("gradient", answer * options["divisor"], options["clipping"], options)
        return answer

    def total(self, statistic: Any, **options: Any) -> Tensor:
        answer = super().total(statistic, **options)
        self._keep("total", answer, options["bound"], options, statistic)
        return answer

    def histograms(self, cells: Any, sizes: Sequence[int], **options: Any) -> Tensor:
        """As a total, of the counts of one record."""

        def counts(features: Tensor, label: Tensor) -> Tensor:
            return count_cells(cells(features, label)[None], sizes) / SHARES

        answer = super().histograms(cells, sizes, **options)
        self._keep("total", answer, L2(math.sqrt(len(sizes))), options, counts)
        return answer

    def norm_total(self, parameters: Tensor, **options: Any) -> float:
        answer = super().norm_total(parameters, **options)
        self._keep("norms", torch.tensor([answer]), options["bound"], options)
        return answer

    def norm_count(self, parameters: Tensor, **options: Any) -> float:
        answer = super().norm_count(parameters, **options)
        self._keep("norm count", torch.tensor([answer]), L2(0.5), options)
        return answer

    def argmin(self, candidates: Any, **options: Any) -> int:
        answer = super().argmin(candidates, **options)
        points = candidates.candidates if isinstance(candidates, LineCandidates) else candidates
        self._keep("argmin", torch.tensor([answer]), L1(options["bound"]), options, points.double())
        return answer

    def loss_gain(self, start: Tensor, parameters: Tensor, **options: Any) -> float:
        answer = super().loss_gain(start, parameters, **options)
        step = (parameters - start).double()
        self._keep("loss gain", torch.tensor([answer]), options["bound"], options, step)
        return answer

    def minimum(self, problem: Minimum, **options: Any) -> Tensor:
        """For linear losses the minimum is -(sum of gradients + noise) / regularisation."""
        answer = super().minimum(problem, **options)
        self._keep("minimum", -problem.regularisation * answer, problem, options)
        return answer

    def _keep(
        self, kind: str, value: Tensor, bound: Any, options: Mapping[str, object], about: Any = None
    ) -> None:
        answer, sampling = value.detach().double().cpu().numpy(), options.get("sampling") or FullBatch()
        self._seen.append(Answer(kind, sampling, bound, options["noise"], answer, about))


@dataclass(frozen=True)
class GameTranscript:
    """What one run of a game left.

    Attributes:
        coins: [canaries], which of them were included.
        answers: Of the barrier, in order.
        events: Charged for each answer.
        released: The parameters, [width].
    """

    coins: NDArray[np.bool_]
    answers: Sequence[Answer]
    events: Sequence[dp.DpEvent]
    released: Array


class _Examined(ComputeConfig):
    """Uses one engine for all runs of a game, since inspecting the same model again would take most of the time."""

    def engine(self, model: Model, records: Any) -> Engine:
        key = (repr(model.module), records.features.shape[1:])
        if key not in _ENGINES:
            _ENGINES[key] = super().engine(model, records)
        return _ENGINES[key]


_ENGINES: dict[object, Engine] = {}


def key_of(*parts: object) -> Generator:
    """A reproducible generator: audits use made-up records and must be repeatable."""
    return Generator(hashlib.sha256(repr(parts).encode()).digest(), private=False)


def play(
    game: Game, plan: Plan, coins: NDArray[np.bool_], generator: Generator, *, blank: bool = False
) -> GameTranscript:
    """One run of the method on made-up records.

    Args:
        game: Method, settings and claim.
        plan: Of the game.
        coins: [canaries], which of them are included; under replace-one, which have their features rather than the
            negative of these.
        generator: Of noise and samples.
        blank: Replace canaries that are not included by zeros, so that later coins and noise are the same.
    """
    canaries = np.stack([game.canary(index) for index in range(game.canaries)])
    if plan.adjacency == REPLACE_ONE.name:
        canaries *= np.where(coins, 1.0, -1.0)[:, None]
        labels = coins.astype(np.int64)
    elif blank:
        canaries, labels = canaries * coins[:, None], coins.astype(np.int64)
    else:
        canaries, labels = canaries[coins], np.ones(int(coins.sum()), np.int64)
    zeros = np.zeros((game.zeros, game.width))
    records = CanaryRecords(
        np.concatenate([zeros, canaries]).astype(np.float32),
        game.labels(np.concatenate([np.zeros(game.zeros, np.int64), labels])),
    )
    seen: list[Answer] = []
    method = game.method()
    with tempfile.TemporaryDirectory(prefix="epsilonflow-audit-") as folder:
        state, trace, _model = train(
            method,
            plan,
            game.model(),
            open_records=lambda: records,
            run=ResumableRun(run_id="audit", generator=generator, folder=Path(folder)),
            compute=_Examined(physical_batch=64),
            features=game.features,
            hooks=Hooks(barrier_of=lambda *args, **kwargs: RecordingBarrier(*args, seen=seen, **kwargs)),
        )
    return GameTranscript(coins, seen, trace.events(), method.released(state).detach().double().numpy())
