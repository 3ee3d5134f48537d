"""The models of a name in the folder `models`: one folder a run, with its privacy card, and which one serves.

An entry is a model with all that `epsilonflow card verify` needs beside its card. The one that serves is behind the
link `serving`, which is replaced in one step: a reader finds a whole model at every moment.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILES = (
    "model.safetensors",
    "privacy_card.json",
    "receipt.json",
    "metrics.json",
    "plan.json",
    "trace.parquet",
    "diagnostics.parquet",
)
_SERVING = "serving"


@dataclass(frozen=True)
class Registry:
    """The models of one name; folder: theirs, made with the first."""

    folder: Path

    @property
    def serving(self) -> Path | None:
        """The folder of the model that serves; None before the first."""
        link = self.folder / _SERVING
        return self.folder / os.readlink(link) if link.is_symlink() else None

    def metrics(self, run_id: str) -> dict[str, Any]:
        """The metrics of the model of a run, held-out accuracy and epsilon among them; none where it is not kept."""
        path = self.folder / run_id / "metrics.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return found

    def add(self, artifacts: Path) -> Path:
        """Keeps the model in `artifacts` under its run's id, whole or not at all; returns its folder.

        A model that is there already stays as it is.
        """
        receipt: dict[str, Any] = json.loads((artifacts / "receipt.json").read_text(encoding="utf-8"))
        entry = self.folder / str(receipt["run_id"])
        if entry.is_dir():
            return entry
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            for name in _FILES:
                shutil.copyfile(artifacts / name, fresh / name)
            fresh.chmod(0o755)
            fresh.rename(entry)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return entry

    def promote(self, entry: Path) -> None:
        """Lets the model in the folder `entry` serve from now on."""
        fresh = self.folder / f".{_SERVING}-{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(entry.name)
        fresh.replace(self.folder / _SERVING)
