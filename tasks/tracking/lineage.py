"""The steps of a pipeline run as job types, and the artifacts that lead from one to the next."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.privacy.card import PrivacyCard
from data import PublicDescription
from tasks.tracking.session import add_file, valid

if TYPE_CHECKING:
    import wandb

TRAIN = "train"
_FILES = {
    "plan": "plan.json",
    "model": "model.safetensors",
    "trace": "trace.parquet",
    "card": "privacy_card.json",
}


@dataclass(frozen=True)
class Step:
    """A step of the pipeline: the kinds of artifacts that it uses and makes."""

    job_type: str
    uses: tuple[str, ...]
    makes: tuple[str, ...]


STEPS = (
    Step("prepare", (), ("dataset",)),
    Step("calibrate", ("dataset",), ("plan",)),
    Step(TRAIN, ("dataset", "plan"), ("model", "trace")),
    Step("evaluate", ("dataset", "model"), ()),
    Step("report", ("plan", "model", "trace"), ("card",)),
)


def link(logged: "wandb.Run", step: Step, card: PrivacyCard, public: PublicDescription, folder: Path) -> None:
    """Logs what a step used and made. folder: of the run's files."""
    for kind in step.uses:
        use(logged, _artifact(kind, card, public, folder))
    for kind in step.makes:
        logged.log_artifact(_artifact(kind, card, public, folder))


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


def _artifact(kind: str, card: PrivacyCard, public: PublicDescription, folder: Path) -> "wandb.Artifact":
    return _dataset(public) if kind == "dataset" else file_artifact(kind, card, folder)


def _dataset(public: PublicDescription) -> "wandb.Artifact":
    """The data set by name, with its public description; its records stay where they are."""
    import wandb

    described = json.loads(public.to_json())
    artifact = wandb.Artifact(valid(f"dataset-{public.dataset}"), "dataset", metadata=described)
    artifact.add_reference(f"dataset://{public.dataset}", name="description", checksum=False)
    return artifact
