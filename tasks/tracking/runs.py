"""Log finished runs to Weights & Biases, with their inputs and outputs; offline by default.

What is sent about a run is selected by name from the privacy card, the held-out metrics and the noise trace. Nothing
else can be included: no source code, no facts about the machine, no console output, and nothing about training records
without noise. A promoted model is sent again with its card. For a search only the winner is sent. Runs on public
records, as in a comparison, are sent as a group with complete tables and figures.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from algorithms.privacy.card import PrivacyCard, load
from data import PublicDescription
from data.files import read_json
from tasks.config.params import Tracking
from tasks.reporting.figures import Curve
from tasks.runs.quality import quality, tracked
from tasks.tracking.session import add_file, reason, safely, session, valid

if TYPE_CHECKING:
    import wandb

TRAIN = "train"
_FILES = {
    "plan": "plan.json",
    "model": "model.safetensors",
    "trace": "trace.parquet",
    "card": "privacy_card.json",
}
STEP = "privacy/step"
HISTORY = (STEP, "privacy/epsilon", "privacy/epsilon_so_far", "privacy/noise_std", "privacy/noise_multiplier")
SUMMARY = ("test/accuracy", "test/loss", "privacy/epsilon_total", "privacy/delta", "privacy/private")
ALIAS = "serving"
REGISTRY = "wandb-registry-model"
_PROMOTED = ("model.safetensors", "privacy_card.json")
_MOST_ROWS, _SECONDS_TO_SEND = 2000, 60
_log = logging.getLogger(__name__)


def use(logged: "wandb.Run", artifact: "wandb.Artifact") -> None:
    """Declare an input of the run; the same content under the same name is the artifact of another run.

    `use_artifact` does the same, but does not work offline.
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
    """The data set by name, with its public description; its records are not sent."""
    import wandb

    described = json.loads(public.to_json())
    artifact = wandb.Artifact(valid(f"dataset-{public.dataset}"), "dataset", metadata=described)
    artifact.add_reference(f"dataset://{public.dataset}", name="description", checksum=False)
    return artifact


@dataclass(frozen=True)
class Finished:
    """A finished pipeline run: its card, held-out metrics, noise trace, data description and epsilon over steps."""

    card: PrivacyCard
    metrics: Mapping[str, Any]
    trace: pd.DataFrame
    public: PublicDescription
    curve: Curve


def log_run(run: Finished, settings: Tracking, *, artifacts: Path, root: Path) -> bool:
    """Log a finished run; returns whether it was logged. A failure costs only one line of the log.

    artifacts: folder of the run's files. root: the checkout, below which W&B's own files are written.
    """
    folder = artifacts.absolute()
    return safely(lambda: _log_run(run, settings, folder), settings, "this run", root)


def _log_run(run: Finished, settings: Tracking, artifacts: Path) -> None:
    """Continue the run that training showed live, if there is one.

    A W&B run for each stage would have only artifacts to show, and make five lines of one run in every list.
    """
    run_id = run.card.evidence.run_id
    with session(
        settings,
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
    # Rows that an earlier report of the same run has logged exist already.
    last = logged.summary.get(STEP, 0)  # type: ignore[no-untyped-call]
    for row in history(run):
        if row[STEP] > last:
            logged.log(row)


def _name(card: PrivacyCard) -> str:
    epsilon = card.setting.epsilon
    promise = "not private" if epsilon is None else f"epsilon {epsilon:.3g}"
    return f"{card.mechanism.algorithm} on {card.setting.dataset}, {promise}"


def config(card: PrivacyCard) -> dict[str, Any]:
    """The run's settings."""
    of_setting = ("dataset", "population", "public_records", "unit", "adjacency", "delta", "private")
    of_mechanism = ("algorithm", "settings", "steps", "noise_multiplier", "sampling_rate", "divisor")
    return {
        "run_id": card.evidence.run_id,
        **{name: getattr(card.setting, name) for name in of_setting},
        **{name: getattr(card.mechanism, name) for name in of_mechanism},
        "model": card.mechanism.model.model_dump(),
        "target_epsilon": card.accounting.target.epsilon,
        "accountant": card.accounting.accountant,
        "noise_is_secret": card.implementation.noise == "secure",
    }


def history(run: Finished) -> Iterator[dict[str, float]]:
    """Cost and noise by step, with the keys of HISTORY; at most about 2000 rows, since the whole trace is an artifact.

    A number that is infinite or unknown at a step is left out.
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


@dataclass(frozen=True)
class Member:
    """A finished run of a group. images: PNG files. files: the files of an artifact."""

    job_type: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame]
    images: Mapping[str, Path] = field(default_factory=dict)
    files: Sequence[Path] = ()


def log_group(group: str, members: Sequence[Member], settings: Tracking, *, root: Path) -> bool:
    """Log finished runs as one group; returns whether it was logged. A failure costs one line of the log."""

    def log() -> None:
        for member in members:
            _log_member(group, member, settings)

    return safely(log, settings, "this group", root)


def _log_member(group: str, member: Member, settings: Tracking) -> None:
    import wandb

    with session(
        settings,
        group=group,
        job_type=member.job_type,
        name=f"{group}: {member.job_type}",
        config=member.config,
    ) as logged:
        images = {name: wandb.Image(str(path)) for name, path in member.images.items()}
        logged.log({name: _table(frame) for name, frame in member.tables.items()} | images)
        logged.summary.update(dict(member.summary))
        if member.files:
            artifact = wandb.Artifact(valid(f"comparison-{group}"), "comparison")
            for path in member.files:
                add_file(artifact, path)
            logged.log_artifact(artifact)


def _table(frame: pd.DataFrame) -> "wandb.Table":
    """A table for W&B; unknown values are empty."""
    import wandb

    rows = frame.astype(object).where(frame.notna(), None)
    return wandb.Table(columns=[str(name) for name in rows.columns], data=rows.to_numpy())


def log_promotion(name: str, entry: Path, settings: Tracking, *, root: Path) -> bool:
    """Log the promotion of a model; returns whether it was logged. A failure costs one line of the log.

    name: name of the models. entry: the model's folder. root: the checkout. Online, the model is also linked in the
    registry of models under its name and with the same alias; if there is no registry or it refuses, that costs only
    one line.
    """
    folder = entry.absolute()
    return safely(lambda: _log_to(name, folder, settings), settings, "this promotion", root)


def _log_to(name: str, entry: Path, settings: Tracking) -> None:
    import wandb

    promoted = load(entry / "privacy_card.json")
    with session(
        settings,
        group=entry.name,
        job_type="promotion",
        name=f"{name}: {entry.name}",
        config={"name": name, "run_id": entry.name},
    ) as logged:
        use(logged, file_artifact("model", promoted, entry))
        artifact = wandb.Artifact(valid(name), "model", metadata={"run_id": entry.name})
        for file in _PROMOTED:
            add_file(artifact, entry / file)
        logged.log_artifact(artifact, aliases=["latest", ALIAS])
        if settings.mode == "online":
            _register(logged, artifact, valid(name))


def _register(logged: "wandb.Run", artifact: "wandb.Artifact", name: str) -> None:
    try:
        artifact.wait(timeout=_SECONDS_TO_SEND)
        logged.link_artifact(artifact, f"{REGISTRY}/{name}", aliases=[ALIAS])
    except Exception as error:
        _log.warning("W&B's registry did not take %s, which serves without it: %s", name, reason(error))


def log_winner(receipt: Mapping[str, Any], folder: Path, settings: Tracking, *, root: Path) -> None:
    """Log the winner in `folder`; a failure costs one line of the log."""
    card = read_json(folder / "privacy_card.json")
    config = {name: card["mechanism"][name] for name in ("algorithm", "settings", "steps")}
    summary = {"epsilon": card["setting"]["epsilon"], "delta": card["setting"]["delta"]}

    def log() -> None:
        with session(
            settings,
            job_type="search",
            group=f"{receipt['dataset']} searches",
            name=receipt["run_id"],
            config=config,
            run_id=receipt["run_id"],
        ) as logged:
            logged.summary.update(summary)

    safely(log, settings, "the winner", root)
