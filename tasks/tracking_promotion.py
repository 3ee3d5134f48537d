"""A promotion at Weights & Biases: the model that serves, with its card, as an artifact with the alias `serving`."""

from pathlib import Path

from tasks.groups import Tracking
from tasks.tracking import Mode, run_settings, safely, valid

ALIAS = "serving"
_SENT = ("model.safetensors", "privacy_card.json")


def log_promotion(name: str, entry: Path, settings: Tracking, *, root: Path) -> bool:
    """Logs that a model serves; returns whether it was logged. A failure costs one line of the log.

    name: of the models. entry: the model's folder. root: the checkout.
    """
    return safely(lambda mode: _log(name, entry, settings, mode), settings, "this promotion", root)


def _log(name: str, entry: Path, settings: Tracking, mode: Mode) -> None:
    import wandb  # here, since it takes most of a second and may not be wanted

    with wandb.init(
        project=settings.project,
        entity=settings.entity,
        job_type="promotion",
        name=f"{name}: {entry.name}",
        config={"name": name, "run_id": entry.name},
        settings=run_settings(mode),
    ) as logged:
        artifact = wandb.Artifact(valid(name), "model", metadata={"run_id": entry.name})
        for file in _SENT:
            artifact.add_file(str(entry / file), skip_cache=True)
        logged.log_artifact(artifact, aliases=["latest", ALIAS])
