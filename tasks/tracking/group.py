"""A group of finished runs at Weights & Biases, about public records: their tables and figures are sent whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from tasks.config.params import Tracking
from tasks.tracking.session import Mode, add_file, safely, session, valid

if TYPE_CHECKING:
    import wandb


@dataclass(frozen=True)
class Member:
    """A run of a group that is logged after it ended. images: PNG files; files: an artifact."""

    job_type: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame]
    images: Mapping[str, Path] = field(default_factory=dict)
    files: Sequence[Path] = ()


def log_group(group: str, members: Sequence[Member], settings: Tracking, *, root: Path) -> bool:
    """Logs finished runs as one group; returns whether it was logged. A failure costs one line of the log."""

    def log(mode: Mode) -> None:
        for member in members:
            _log_member(group, member, settings, mode)

    return safely(log, settings, "this group", root)


def _log_member(group: str, member: Member, settings: Tracking, mode: Mode) -> None:
    import wandb

    with session(
        settings,
        mode,
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
    """A table as W&B takes it: what is not known is empty."""
    import wandb

    rows = frame.astype(object).where(frame.notna(), None)
    return wandb.Table(columns=[str(name) for name in rows.columns], data=rows.to_numpy())
