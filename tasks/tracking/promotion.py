"""A promotion at Weights & Biases: the model that serves, with its card, in the artifacts and in the registry."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.privacy.card import load
from tasks.config.params import Tracking
from tasks.tracking.runs import file_artifact, use
from tasks.tracking.session import Mode, add_file, reason, safely, session, valid

if TYPE_CHECKING:
    import wandb

ALIAS = "serving"
REGISTRY = "wandb-registry-model"
_SENT = ("model.safetensors", "privacy_card.json")
_SECONDS_TO_SEND = 60
_log = logging.getLogger(__name__)


def log_promotion(name: str, entry: Path, settings: Tracking, *, root: Path) -> bool:
    """Logs that a model serves; returns whether it was logged. A failure costs one line of the log.

    name: of the models. entry: the model's folder. root: the checkout. Online, the registry of models gets it, too,
    under its name and with the same alias; where there is none or it refuses, that costs a line and nothing else.
    """
    folder = entry.absolute()
    return safely(lambda mode: _log_to(name, folder, settings, mode), settings, "this promotion", root)


def _log_to(name: str, entry: Path, settings: Tracking, mode: Mode) -> None:
    import wandb

    promoted = load(entry / "privacy_card.json")
    with session(
        settings,
        mode,
        group=entry.name,
        job_type="promotion",
        name=f"{name}: {entry.name}",
        config={"name": name, "run_id": entry.name},
    ) as logged:
        use(logged, file_artifact("model", promoted, entry))
        artifact = wandb.Artifact(valid(name), "model", metadata={"run_id": entry.name})
        for file in _SENT:
            add_file(artifact, entry / file)
        logged.log_artifact(artifact, aliases=["latest", ALIAS])
        if mode == "online":
            _register(logged, artifact, valid(name))


def _register(logged: "wandb.Run", artifact: "wandb.Artifact", name: str) -> None:
    try:
        artifact.wait(timeout=_SECONDS_TO_SEND)
        logged.link_artifact(artifact, f"{REGISTRY}/{name}", aliases=[ALIAS])
    except Exception as error:
        _log.warning("W&B's registry did not take %s, which serves without it: %s", name, reason(error))
