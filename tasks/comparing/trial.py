"""One trial of a comparison: its files and records, its plan, and its run, whose result is one JSON file.

Data sets are prepared once for all comparisons of a checkout. Plans are made before the first trial trains and are kept
on disk; trials with equal inputs share one. The noise is seeded by the trial, so the result is reproducible and not
private. A killed process leaves no result, and the trial runs again from its start. For the curve of the objective,
released parameters are kept during training, and their losses are computed afterwards.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.random import MT19937, RandomState, SeedSequence
from numpy.typing import NDArray
from torch import Tensor

from algorithms.core.plan import Plan
from algorithms.core.training import Hooks, ResumableRun, train
from algorithms.errors import RefusedError
from algorithms.models import Model
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.barrier.trace import Diagnostics, Trace
from algorithms.privacy.documents import StatedPlan
from algorithms.privacy.mechanisms.noise import seeded_generator
from data import DatasetInfo
from data.card import DataRefusedError
from data.files import read_json, write_text, write_whole
from data.prepared import HeldOut, Prepared, load
from data.readers.records import RecordBatch
from tasks.calibrate import READS, plan_for
from tasks.comparing.definition import Fold, Trial, digest_of
from tasks.config import data_mirror, home, params
from tasks.config.params import Params
from tasks.evaluate import compute_metrics, evaluate
from tasks.model_building import features_for, model_for
from tasks.prediction_passes import MAX_OUTPUTS
from tasks.prepare import prepare
from tasks.runs.metrics import held_out_metrics

_WITHOUT_NOISE = {"epsilon": 1.0, "delta": 1e-9, "accountant": "pld"}
"""A placeholder target for methods without noise; nothing depends on it."""
_POINTS = 200
_BATCH, _AT_ONCE = 4096, 32


@dataclass(frozen=True)
class ComparisonFolder:
    """The folder of one comparison. root: the checkout, as an absolute path."""

    root: Path
    name: str

    @property
    def folder(self) -> Path:
        """The folder of all files of this comparison."""
        return self.root / "artifacts" / "compare" / self.name

    @property
    def trials(self) -> Path:
        """The results, one JSON file per finished trial."""
        return self.folder / "cells"  # what earlier results are in

    @property
    def plans(self) -> Path:
        """The plans."""
        return self.folder / "plans"

    @property
    def failures(self) -> Path:
        """Tracebacks of trials that failed."""
        return self.folder / "failures"

    @property
    def store(self) -> Path:
        """Prepared data sets, shared by all comparisons of the checkout."""
        return self.root / "artifacts" / "compare" / ".data"

    @property
    def stop(self) -> Path:
        """A file that asks workers to start no further trial."""
        return self.folder / "stop"

    def finish_times(self) -> dict[str, float]:
        """The digests of the trials that have a result, each with the time when it was written."""
        return {path.stem: path.stat().st_mtime for path in self.trials.glob("*.json")}

    def finished_digests(self) -> set[str]:
        """The digests of the trials that have a result."""
        return set(self.finish_times())

    def result(self, digest: str) -> dict[str, object]:
        """The result of a finished trial."""
        return read_json(self.trials / f"{digest}.json")


def write_json(path: Path, document: object) -> None:
    """Write a JSON document."""
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_parquet(path: Path, frame: pd.DataFrame) -> None:
    """Write a table."""
    write_whole(path, lambda fresh: frame.to_parquet(fresh, index=False))


@dataclass(frozen=True)
class TrialRecords:
    """The training and test records of a trial. info: the public facts of exactly these records."""

    info: DatasetInfo
    train: RecordBatch
    test: RecordBatch


def split_by_fold(records: int, chosen: Fold) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices of the training and of the test records of a fold, ascending; depends only on these numbers.

    The records are shuffled by (seed, repeat), with a NumPy generator whose numbers never change, and divided into
    folds whose sizes differ by at most one. Raises DataRefusedError if there are more folds than records.
    """
    if chosen.k > records:
        raise DataRefusedError(
            "{folds} folds of {records} records cannot be made; choose from 2 to {records} folds.",
            code="folds_unfit",
            folds=chosen.k,
            records=records,
        )
    generator = RandomState(MT19937(SeedSequence((chosen.seed, chosen.repeat))))
    shuffled = generator.permutation(records).astype(np.int64)
    start, stop = (
        records * number // chosen.k for number in (chosen.fold, chosen.fold + 1)
    )  # floor(n f / k)
    return np.sort(np.concatenate([shuffled[:start], shuffled[stop:]])), np.sort(shuffled[start:stop])


def check_classes(labels: NDArray[np.int64], train: NDArray[np.int64], test: NDArray[np.int64]) -> None:
    """Raise DataRefusedError if all training records, or all test records, have the same class.

    labels: of all records, int64 [n]. train, test: as `split_by_fold` returns them. Only for public records, since a
    refusal reveals something about them.
    """
    for name, part in (("training", train), ("test", test)):
        if len(np.unique(labels[part])) < 2:
            raise DataRefusedError(
                "the {part} records of a fold are all of one class; choose fewer folds.",
                code="folds_unfit",
                part=name,
            )


def prepared_folder(store: Path, trial: Trial) -> Path:
    """The folder below `store` of a trial's prepared data set; another card or transform has another folder."""
    transform = "" if trial.transform == "none" else f"-{trial.transform}"
    transform += f"-{digest_of(trial.encoder)}" if trial.encoder else ""
    return store / f"{trial.dataset}-{trial.card}{transform}"


def prepare_dataset(store: Path, trial: Trial, *, root: Path) -> None:
    """Prepare a trial's data set below `store` unless it exists; raises DataRefusedError if that is impossible."""
    folder = prepared_folder(store, trial)
    if not folder.exists():
        encoder = {key: value for key, value in trial.encoder.items() if key != "sha256"} or None
        chosen = {"dataset": trial.dataset, "transform": trial.transform, "encoder": encoder}
        wanted = params.parse({"data": chosen}, reads=("data",))
        cards = root / "data" / "cards"
        prepare(wanted, mirror=data_mirror(), home=home(), destination=folder, root=root, cards=cards)


def trial_records(store: Path, trial: Trial) -> TrialRecords:
    """The records of a trial, memory-mapped without a fold; raises DataRefusedError if a fold cannot be trained on."""
    folder = prepared_folder(store, trial)
    data = _load_records(folder)
    if trial.fold is None:
        train = RecordBatch(data.train_features, data.train_labels)
        return TrialRecords(data.info, train, RecordBatch(data.test_features, data.test_labels))
    features = np.concatenate([data.train_features, data.test_features])
    labels = np.concatenate([data.train_labels, data.test_labels])
    info, *rows_of_sides = _fold_records(folder, trial.fold)
    return TrialRecords(info, *(RecordBatch(features[side], labels[side]) for side in rows_of_sides))


def info_of(store: Path, trial: Trial) -> DatasetInfo:
    """The public facts of the records that a trial trains on; raises DataRefusedError as `trial_records` does."""
    folder = prepared_folder(store, trial)
    return _load_records(folder).info if trial.fold is None else _fold_records(folder, trial.fold)[0]


@lru_cache(maxsize=64)
def _load_records(folder: Path) -> Prepared:
    return load(folder)


@lru_cache(maxsize=8)
def _fold_records(folder: Path, chosen: Fold) -> tuple[DatasetInfo, NDArray[np.int64], NDArray[np.int64]]:
    """The facts of a fold, and the indices in the union, training records first, of its records for either use."""
    data = _load_records(folder)
    if data.info.rows_per_user is not None:
        raise DataRefusedError(
            "folds of {dataset!r} were asked for, whose training records are people with several rows;"
            " leave folds out, or keep one record a person.",
            code="folds_unfit",
            dataset=data.info.dataset,
        )
    labels = np.concatenate([data.train_labels, data.test_labels])
    train, test = split_by_fold(len(labels), chosen)
    if data.info.label_type.kind == "class":
        check_classes(labels, train, test)
    return replace(data.info, records=len(train), test_records=len(test)), train, test


@dataclass(frozen=True)
class TrialContext:
    """What all trials share.

    code: a digest of the algorithms' source. compute: the resources that a trial may use, which do not change its
    result.
    """

    workspace: ComparisonFolder
    code: str
    compute: ComputeConfig = field(default_factory=ComputeConfig)


def plan_trial(context: TrialContext, trial: Trial) -> Plan:
    """Plan a trial, or read the plan from disk if there is one with equal inputs.

    Raises RefusedError or DataRefusedError if the trial cannot run, for example because a fold has a single
    class.
    """
    settings, info = _params(trial), info_of(context.workspace.store, trial)
    inputs = [trial.settings, trial.model, trial.accountant, trial.epsilon, trial.delta]
    inputs += [extra for extra in (trial.model_settings, trial.features) if extra]
    # Seed, fold and labels are not among them, so that all repetitions share a plan, which may take minutes.
    name = digest_of([*inputs, json.loads(info.to_json()), context.code])
    path = context.workspace.plans / f"{name}.json"
    if path.exists():
        return Plan.from_document(StatedPlan.read(path))
    plan = plan_for(settings, info)
    is_private = math.isfinite(plan.cost.epsilon)
    if is_private and trial.epsilon is None:
        raise RefusedError(
            "methods.{method} adds noise, but says private: false; leave that out.",
            code="bad_keys",
            method=trial.method,
            keys=(f"methods.{trial.method}.private",),
        )
    if not is_private and trial.epsilon is not None:
        raise RefusedError(
            "methods.{method} adds no noise; say private: false, and it runs once.",
            code="bad_keys",
            method=trial.method,
            keys=(f"methods.{trial.method}.private",),
        )
    write_json(path, plan.to_document().to_json())
    return plan


def _params(trial: Trial) -> Params:
    target = {"epsilon": trial.epsilon, "delta": trial.delta, "accountant": trial.accountant}
    document = {
        "privacy": (_WITHOUT_NOISE if trial.epsilon is None else target) | {"noise": "seeded"},
        "features": trial.features,
        "algorithm": trial.settings,
        "model": trial.model_group,
    }
    return params.parse(document, reads=READS, name=f"methods.{trial.method}")


class ParameterTrail:
    """Keeps the released parameters after selected steps: after each of up to 200 steps, otherwise after about 200.

    start: the algorithm's state before the first step.
    """

    def __init__(self, released: Callable[[Any], Tensor], steps: int, *, start: Any) -> None:
        self._released = released
        self._wanted = curve_steps(steps)
        self._last: tuple[int, Any] | None = None
        self._kept: list[tuple[int, Tensor]] = []
        self._keep(0, start)
        self.seconds = 0.0

    def on_state(self, step: int, state: Any) -> None:
        """Called after each step."""
        began = time.perf_counter()
        self._last = (step, state)
        if step in self._wanted:
            self._keep(step, state)
        self.seconds += time.perf_counter() - began

    def frame(self, model: Model, trace: Trace, data: TrialRecords, *, regularisation: float) -> pd.DataFrame:
        """A table: step, objective, and epsilon spent by then, an upper bound. model: the trained model."""
        if self._last and self._last[0] != self._kept[-1][0]:
            self._keep(*self._last)  # a run that ended before its last planned step
        parameters = torch.stack([step_parameters for _, step_parameters in self._kept])
        losses = mean_losses(model, parameters, data.train)
        norms = parameters.double().square().sum(dim=1).numpy()
        # Each curve point has the epsilon of all releases before it: the index of its step among theirs counts them.
        steps = [step for step, _ in self._kept]
        spent = np.array([0.0, *(row.epsilon for row in trace.rows)])
        done = np.searchsorted([row.step for row in trace.rows], steps, side="left")
        return pd.DataFrame(
            {"step": steps, "objective": losses + regularisation * norms, "epsilon": spent[done]}
        )

    def _keep(self, step: int, state: Any) -> None:
        self._kept.append((step, self._released(state).detach().clone().cpu()))


def curve_steps(steps: int) -> set[int]:
    """The steps that a curve keeps: all of up to 200, otherwise about 200 that are denser at the start."""
    if steps <= _POINTS:
        return set(range(1, steps + 1))
    # The objective falls fastest at first; even steps show the end.
    dense = np.geomspace(1, steps, _POINTS // 2).round().astype(int)
    even = np.linspace(1, steps, _POINTS // 2).round().astype(int)
    return {*dense.tolist(), *even.tolist()}


def mean_losses(model: Model, parameters: Tensor, part: RecordBatch) -> NDArray[np.float64]:
    """The mean loss over the records at each of several parameters, shape [k, d] -> [k]."""

    def total(point: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        return model.losses(model.outputs(model.by_name(point), inputs), labels).double().sum()

    totals = torch.zeros(len(parameters), dtype=torch.float64)
    with torch.no_grad():
        # Outputs of all points at once, [points, records, outputs], are what takes memory.
        record = torch.from_numpy(np.array(part.features[:1]))
        outputs = model.outputs(model.by_name(parameters[0]), record).numel() * min(_AT_ONCE, len(parameters))
        size = max(1, min(_BATCH, MAX_OUTPUTS // outputs))
        for start in range(0, len(part.labels), size):
            inputs = torch.from_numpy(np.array(part.features[start : start + size]))
            labels = torch.from_numpy(np.array(part.labels[start : start + size]))
            for first in range(0, len(parameters), _AT_ONCE):
                chosen = parameters[first : first + _AT_ONCE]
                totals[first : first + _AT_ONCE] += torch.func.vmap(total, in_dims=(0, None, None))(
                    chosen, inputs, labels
                )
    result: NDArray[np.float64] = totals.numpy() / len(part.labels)
    return result


def run_trial(context: TrialContext, trial: Trial) -> None:
    """Run a trial with one thread of torch and write its result. Raises what planning and training raise."""
    torch.set_num_threads(1)  # workers run trials side by side, and more threads could round otherwise
    workspace, data = context.workspace, trial_records(context.workspace.store, trial)
    plan, objective = plan_trial(context, trial), trial.record["objective"]
    regularisation = objective["regularisation"] if objective else 0.0
    trained = _train_model(trial, plan, data, context.compute)
    results = _results(plan, trained, data, regularisation if objective else None)
    if trained.curve is not None:
        frame = trained.curve.frame(trained.model, trained.trace, data, regularisation=regularisation)
        write_parquet(workspace.trials / f"{trial.digest}.curve.parquet", frame)
    if trial.is_first:
        rows = pd.DataFrame([asdict(row) for row in trained.trace.rows])
        write_parquet(workspace.trials / f"{trial.digest}.trace.parquet", rows)
    if trained.diagnostics is not None:
        write_parquet(workspace.trials / f"{trial.digest}.diagnostics.parquet", trained.diagnostics.frame())
    # Last: a trial with this file is finished.
    write_json(
        workspace.trials / f"{trial.digest}.json",
        {
            "digest": trial.digest,
            "cell": asdict(trial),
            "code": context.code,
            "results": results,
        },
    )


def build_models(context: TrialContext, trials: Iterable[Trial]) -> None:
    """Initialise all models before trials run, since initialisation uses torch's global generator."""
    for trial in trials:
        _model(trial, info_of(context.workspace.store, trial))


def _model(trial: Trial, info: DatasetInfo) -> Model:
    """The model of a trial, which is not changed: a trial trains a copy, since threads must not share a module."""
    return _build_model(json.dumps({"model": trial.model_group, "features": trial.features}), info)


@cache
def _build_model(groups: str, info: DatasetInfo) -> Model:
    """Build the model that these groups of params.yaml describe, given as JSON."""
    return model_for(params.parse(json.loads(groups), reads=("model", "features")), info)


@dataclass(frozen=True)
class _TrainedTrial:
    model: Model
    parameters: torch.Tensor
    trace: Trace
    curve: ParameterTrail | None
    diagnostics: Diagnostics | None
    seconds: float
    steps: int


def _train_model(trial: Trial, plan: Plan, data: TrialRecords, compute: ComputeConfig) -> _TrainedTrial:
    """Train from the start and without checkpoints: trials are short, and an interrupted one runs again."""
    model, settings = deepcopy(_model(trial, data.info)), _params(trial)
    algorithm = settings.algorithm
    start = algorithm.init(model.initial_parameters(), plan)
    curve = ParameterTrail(algorithm.released, plan.steps, start=start) if trial.record["curves"] else None
    diagnostics, steps = Diagnostics() if trial.is_diagnosed else None, [0]

    began = time.perf_counter()
    state, trace, model = train(
        algorithm,
        plan,
        model,
        open_records=lambda: data.train,
        run=ResumableRun(
            run_id=trial.digest, generator=seeded_generator(trial.noise_seed), folder=Path(os.devnull)
        ),
        compute=compute,
        features=features_for(settings, data.info),
        hooks=Hooks(
            on_step=lambda step, *_: steps.append(step),
            on_state=curve.on_state if curve else None,
            diagnostics=diagnostics,
        ),
    )
    seconds = time.perf_counter() - began - (curve.seconds if curve else 0.0)
    return _TrainedTrial(model, algorithm.released(state), trace, curve, diagnostics, seconds, steps[-1])


def _results(
    plan: Plan, trained: _TrainedTrial, data: TrialRecords, regularisation: float | None
) -> dict[str, object]:
    """The numbers of a finished trial. regularisation: None where the objective is not recorded."""
    records, label_type = HeldOut(data.info, data.test.features, data.test.labels), data.info.label_type
    evaluation = evaluate(trained.model, trained.model.published_tensors(trained.parameters), records)
    metrics = compute_metrics(label_type, evaluation, data.test.labels)
    objective = None
    if regularisation is not None:
        (loss,) = mean_losses(trained.model, trained.parameters[None], data.train)
        norm = float(trained.parameters.double().square().sum())
        objective = loss + regularisation * norm
    return {
        **{name: _finite(value) for name, value in held_out_metrics(metrics).items()},
        "test_loss": _finite(evaluation.loss),
        "objective": _finite(objective),
        "seconds": trained.seconds,
        "steps": trained.steps,
        "planned_steps": plan.steps,
        "epsilon_spent": _finite(trained.trace.rows[-1].epsilon) if trained.trace.rows else 0.0,
        "epsilon_planned": _finite(plan.cost.epsilon),
        "noise_multiplier": plan.fixed_noise,
        "sampling_rate": plan.sampling_rate,
        "records": data.info.records,
    }


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and math.isfinite(number) else None
