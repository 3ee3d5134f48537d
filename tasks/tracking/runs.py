"""A finished pipeline run at Weights & Biases: one run there, with what it used and made; offline by default.

What is sent is picked by name from the privacy card, the held-out metrics and the noise trace; nothing else can get
in: no source code, no machine, no console, and nothing about training records without noise.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from algorithms.privacy.card import PrivacyCard
from data import PublicDescription
from tasks.config.params import Tracking
from tasks.reporting.figures import Curve
from tasks.runs.quality import quality, tracked
from tasks.tracking.session import Mode, add_file, safely, session, valid

if TYPE_CHECKING:
    import wandb

TRAIN = "train"
_FILES = {
    "plan": "plan.json",
    "model": "model.safetensors",
    "trace": "trace.parquet",
    "card": "privacy_card.json",
}


def use(logged: "wandb.Run", artifact: "wandb.Artifact") -> None:
    """Declares an input of the run; the same content under the same name is the artifact that another run made.

    `use_artifact` does the same, but refuses to work offline.
    """
    logged._log_artifact(artifact, is_user_created=True, use_after_commit=True)


def file_artifact(kind: str, card: PrivacyCard, folder: Path) -> "wandb.Artifact":
    """The plan, model, trace or card of a run, from the folder of its files."""
    import wandb

    name = valid(f"{kind}-{card.mechanism.algorithm}-{card.setting.dataset}")
    artifact = wandb.Artifact(name, kind, metadata={"run_id": card.evidence.run_id})
    add_file(artifact, folder / _FILES[kind])
    return artifact


def _dataset(public: PublicDescription) -> "wandb.Artifact":
    """The data set by name, with its public description; its records stay where they are."""
    import wandb

    described = json.loads(public.to_json())
    artifact = wandb.Artifact(valid(f"dataset-{public.dataset}"), "dataset", metadata=described)
    artifact.add_reference(f"dataset://{public.dataset}", name="description", checksum=False)
    return artifact


CONFIG = (
    "run_id", "dataset", "population", "public_records", "unit", "adjacency", "algorithm", "settings", "model",
    "target_epsilon", "delta", "accountant", "steps", "noise_multiplier", "sampling_rate", "divisor", "private",
    "noise_is_secret",
)  # fmt: skip
STEP = "privacy/step"
HISTORY = (STEP, "privacy/epsilon", "privacy/epsilon_so_far", "privacy/noise_std", "privacy/noise_multiplier")
SUMMARY = ("test/accuracy", "test/loss", "privacy/epsilon_total", "privacy/delta", "privacy/private")

_MOST_ROWS = 2000


@dataclass(frozen=True)
class Finished:
    """A finished pipeline run: its card, held-out metrics, noise trace, data description and epsilon over steps."""

    card: PrivacyCard
    metrics: Mapping[str, Any]
    trace: pd.DataFrame
    public: PublicDescription
    curve: Curve


def log_run(run: Finished, settings: Tracking, *, artifacts: Path, root: Path) -> bool:
    """Logs a finished run; returns whether it was logged. A failure costs one line of the log and nothing else.

    artifacts: folder of the run's files. root: the checkout, below which W&B's own files go.
    """
    folder = artifacts.absolute()
    return safely(lambda mode: _log_run(run, settings, mode, folder), settings, "this run", root)


def _log_run(run: Finished, settings: Tracking, mode: Mode, artifacts: Path) -> None:
    """Goes on with the run that training showed live, where there is one.

    A run for each stage had only artifacts to show, and made five lines of one in every list.
    """
    run_id = run.card.evidence.run_id
    with session(
        settings,
        mode,
        run_id=run_id,
        group=run_id,
        job_type=TRAIN,
        name=_name(run.card),
        config=config(run.card),
    ) as logged:
        use(logged, _dataset(run.public))
        for kind in _FILES:
            logged.log_artifact(file_artifact(kind, run.card, artifacts))
        _log_curves(logged, run)
        logged.summary.update(summary(run))


def _log_curves(logged: "wandb.Run", run: Finished) -> None:
    logged.define_metric(STEP, hidden=True)
    logged.define_metric("privacy/*", step_metric=STEP)
    # What an earlier report about the same run has logged is there already.
    last = logged.summary.get(STEP, 0)  # type: ignore[no-untyped-call]
    for row in history(run):
        if row[STEP] > last:
            logged.log(row)


def _name(card: PrivacyCard) -> str:
    epsilon = card.setting.epsilon
    promise = "not private" if epsilon is None else f"epsilon {epsilon:.3g}"
    return f"{card.mechanism.algorithm} on {card.setting.dataset}, {promise}"


def config(card: PrivacyCard) -> dict[str, Any]:
    """The run's settings, with the keys of CONFIG."""
    setting, mechanism, accounting = card.setting, card.mechanism, card.accounting
    values = (
        card.evidence.run_id, setting.dataset, setting.population, setting.public_records, setting.unit,
        setting.adjacency, mechanism.algorithm, mechanism.settings, mechanism.model.model_dump(),
        accounting.target.epsilon, setting.delta, accounting.accountant, mechanism.steps, mechanism.noise_multiplier,
        mechanism.sampling_rate, mechanism.divisor, setting.private, card.implementation.noise == "secure",
    )  # fmt: skip
    return dict(zip(CONFIG, values, strict=True))


def history(run: Finished) -> Iterator[dict[str, float]]:
    """Cost and noise by step, with keys of HISTORY; at most about 2000 rows, the whole trace being an artifact.

    A number that is infinite or not known at a step is left out.
    """
    rows = run.trace.groupby("step").last()
    accounted = dict(zip(run.curve.steps, run.curve.epsilon, strict=True))
    wanted = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_ROWS)).round().astype(int)
    kept = sorted({*rows.index[wanted], *(step - 1 for step in accounted)})
    columns = ("epsilon", "noise_std", "noise_multiplier")
    for step, *values in rows.loc[kept, list(columns)].itertuples():
        numbers = (step + 1, accounted.get(step + 1, np.nan), *values)
        yield {key: float(value) for key, value in zip(HISTORY, numbers, strict=True) if np.isfinite(value)}


def summary(run: Finished) -> dict[str, Any]:
    """The results, with the keys of SUMMARY. The held-out records are declared public."""
    setting, metrics = run.card.setting, run.metrics
    values = (quality(metrics), metrics["test_loss"], setting.epsilon, setting.delta, setting.private)
    return dict(zip((tracked(metrics), *SUMMARY[1:]), values, strict=True))
