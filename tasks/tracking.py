"""The one place that talks to Weights & Biases: a run per pipeline run, a group per comparison, offline by default.

What is sent is picked by name from the privacy card, the held-out metrics and the noise trace; nothing else can get
in: no source code, no machine, no console, and nothing about training records without noise. A comparison's tables
and figures are sent whole: its records are public.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from algorithms.privacy.card import PrivacyCard
from data import PublicDescription
from tasks.figures import Curve
from tasks.groups import Tracking
from tasks.tracking_places import places as _places

if TYPE_CHECKING:
    import wandb

CONFIG = (
    "run_id", "dataset", "population", "public_records", "unit", "adjacency", "algorithm", "settings", "model",
    "target_epsilon", "delta", "accountant", "steps", "noise_multiplier", "sampling_rate", "divisor", "private",
    "noise_is_secret",
)  # fmt: skip
STEP = "privacy/step"
HISTORY = (STEP, "privacy/epsilon", "privacy/epsilon_bound", "privacy/noise_std", "privacy/noise_multiplier")
SUMMARY = ("test/accuracy", "test/loss", "privacy/epsilon_total", "privacy/delta", "privacy/private")

_MOST_ROWS = 2000
_SECONDS = 30
Mode = Literal["offline", "online"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """A finished pipeline run: its card, held-out metrics, noise trace, data description and epsilon over steps."""

    card: PrivacyCard
    metrics: Mapping[str, Any]
    trace: pd.DataFrame
    public: PublicDescription
    curve: Curve


@dataclass(frozen=True)
class Member:
    """A run of a group that is logged after it ended, about public records. images: PNG files; files: an artifact."""

    job_type: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame]
    images: Mapping[str, Path] = field(default_factory=dict)
    files: Sequence[Path] = ()


def log_group(group: str, members: Sequence[Member], settings: Tracking, *, root: Path) -> bool:
    """Logs finished runs as one group; returns whether it was logged. See `log_run`."""
    return safely(lambda mode: _log_members(group, members, settings, mode), settings, "this group", root)


def log_run(run: Finished, settings: Tracking, *, artifacts: Path, root: Path) -> bool:
    """Logs a finished run; returns whether it was logged. A failure costs one line of the log and nothing else.

    artifacts: folder of the run's files. root: the checkout, below which W&B's own files go.
    """
    return safely(lambda mode: _log_run(run, settings, mode, artifacts), settings, "this run", root)


def safely(log: Callable[[Mode], None], settings: Tracking, what: str, root: Path) -> bool:
    """Whether W&B logged, unless it is not wanted; a failure costs one line of the log. what: in words."""
    mode = settings.mode
    if mode == "disabled":
        return False
    try:
        with _places(root):
            log(mode)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        _log.warning("W&B did not log %s, which is complete without it: %s", what, reason)
        return False
    return True


def _log_run(run: Finished, settings: Tracking, mode: Mode, artifacts: Path) -> None:
    import wandb  # here, since it takes most of a second and may not be wanted

    with wandb.init(
        project=settings.project,
        entity=settings.entity,
        id=re.sub(r"[^A-Za-z0-9_-]", "-", run.card.evidence.run_id),
        name=_name(run.card),
        config=config(run.card),
        settings=run_settings(mode),
    ) as logged:
        logged.define_metric(STEP, hidden=True)
        logged.define_metric("privacy/*", step_metric=STEP)
        for row in history(run):
            logged.log(row)
        logged.summary.update(summary(run))
        for artifact in _inputs(run, artifacts):
            _use(logged, artifact)
        for artifact in _outputs(run, artifacts):
            logged.log_artifact(artifact)


def _log_members(group: str, members: Sequence[Member], settings: Tracking, mode: Mode) -> None:
    for member in members:
        _log_member(group, member, settings, mode)


def _log_member(group: str, member: Member, settings: Tracking, mode: Mode) -> None:
    import wandb

    with wandb.init(
        project=settings.project,
        entity=settings.entity,
        group=group,
        job_type=member.job_type,
        name=f"{group}: {member.job_type}",
        config=dict(member.config),
        settings=run_settings(mode),
    ) as logged:
        images = {name: wandb.Image(str(path)) for name, path in member.images.items()}
        logged.log({name: _table(frame) for name, frame in member.tables.items()} | images)
        logged.summary.update(dict(member.summary))
        if member.files:
            artifact = wandb.Artifact(valid(f"comparison-{group}"), "comparison")
            for path in member.files:
                artifact.add_file(str(path), skip_cache=True)
            logged.log_artifact(artifact)


def _table(frame: pd.DataFrame) -> "wandb.Table":
    """A table as W&B takes it: what is not known is empty."""
    import wandb

    rows = frame.astype(object).where(frame.notna(), None)
    return wandb.Table(columns=[str(name) for name in rows.columns], data=rows.to_numpy())


def run_settings(mode: Mode) -> "wandb.Settings":
    """A run's settings: nothing about the machine or the code is sent."""
    import wandb

    return wandb.Settings(
        mode=mode,
        root_dir=os.environ["WANDB_DIR"],
        console="off",
        silent=True,
        save_code=False,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        host="",
        init_timeout=_SECONDS,
        login_timeout=_SECONDS,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )


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
        mechanism.sampling_rate, mechanism.divisor, setting.private, card.implementation.noise.private,
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
    values = (metrics["test_accuracy"], metrics["test_loss"], setting.epsilon, setting.delta, setting.private)
    return dict(zip(SUMMARY, values, strict=True))


def _use(logged: "wandb.Run", artifact: "wandb.Artifact") -> None:
    """Declares an input of the run. `use_artifact` refuses to work offline, although the record it makes does."""
    logged._log_artifact(artifact, is_user_created=True, use_after_commit=True)


def _inputs(run: Finished, artifacts: Path) -> Iterator["wandb.Artifact"]:
    import wandb

    described = json.loads(run.public.to_json())
    dataset = wandb.Artifact(valid(f"dataset-{run.public.dataset}"), "dataset", metadata=described)
    dataset.add_reference(f"dataset://{run.public.dataset}", name="description", checksum=False)
    yield dataset
    yield _artifact("plan", "plan.json", run, artifacts)


def _outputs(run: Finished, artifacts: Path) -> Iterator["wandb.Artifact"]:
    for kind, file in (
        ("trace", "trace.parquet"),
        ("model", "model.safetensors"),
        ("card", "privacy_card.json"),
    ):
        yield _artifact(kind, file, run, artifacts)


def _artifact(kind: str, file: str, run: Finished, artifacts: Path) -> "wandb.Artifact":
    import wandb

    name = valid(f"{kind}-{run.card.mechanism.algorithm}-{run.card.setting.dataset}")
    artifact = wandb.Artifact(name, kind, metadata={"run_id": run.card.evidence.run_id})
    artifact.add_file(str(artifacts / file), skip_cache=True)
    return artifact


def valid(name: str) -> str:
    """The name of an artifact without what W&B does not take."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)
