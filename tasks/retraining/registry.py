"""The registry of a retraining's models, in the folder `models`, and the states of its periods.

Each run has a folder with its model, its privacy card and everything that `epsilonflow card verify` needs. The link
`serving` points to the model in use and is replaced atomically, so a reader always finds a complete model. The states
of the periods are in the home, like the ledger, so no checkout, branch or server can restore an old state.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from data.files import read_json, write_text

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
    """The models of one name. folder: their folder, created with the first model."""

    folder: Path

    @property
    def serving(self) -> Path | None:
        """The folder of the model in use; None before the first."""
        link = self.folder / _SERVING
        return self.folder / os.readlink(link) if link.is_symlink() else None

    def metrics(self, run_id: str) -> dict[str, Any]:
        """The metrics of a run's model, including held-out accuracy and epsilon; empty if it has no model here."""
        path = self.folder / run_id / "metrics.json"
        return read_json(path) if path.is_file() else {}

    def add(self, artifacts: Path) -> Path:
        """Add the model in `artifacts` under its run's id, whole or not at all; returns its folder.

        An existing model is left unchanged.
        """
        entry = self.folder / str(read_json(artifacts / "receipt.json")["run_id"])
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
        """Make the model in the folder `entry` the one in use."""
        fresh = self.folder / f".{_SERVING}-{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(entry.name)
        fresh.replace(self.folder / _SERVING)


Kind = Literal["open", "promoted", "kept", "forfeited", "given up"]


@dataclass(frozen=True)
class State:
    """A retraining that was begun.

    kind: "open" until it has ended. params: the text of params.yaml that it runs with, so that it is resumed unchanged.
    before: the text that it replaced. root: its checkout. number: its index among all; names of periods do not sort by
    time if they have several lengths or the clock was changed.
    """

    period: str
    root: str
    params: str
    before: str
    blocks: tuple[str, ...]
    epsilon: float
    kind: Kind = "open"
    message: str = ""
    run_id: str | None = None
    number: int = 0


@dataclass(frozen=True)
class States:
    """The states of one retraining's periods. folder: their folder, with one file per period."""

    folder: Path

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Lock this retraining within the block; yields False if another process has locked it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            held = FileLock(self.folder / "lock").acquire(blocking=False)
        except Timeout:
            yield False
            return
        with held:
            yield True

    def of(self, period: str) -> State | None:
        """The state of a period; None if it has not begun."""
        path = self._file(period)
        return _read(path) if path.is_file() else None

    def open(self) -> State | None:
        """The interrupted retraining, if there is one; there is never more than one."""
        return next((state for state in self.all() if state.kind == "open"), None)

    def all(self) -> list[State]:
        """All states, in the order in which they began."""
        found = [_read(path) for path in self.folder.glob("*.json")]
        return sorted(found, key=lambda state: (state.number, state.period))

    def write(self, state: State) -> None:
        """Write a state durably."""
        write_text(self._file(state.period), json.dumps(asdict(state), indent=2))

    def forget(self, state: State) -> None:
        """Delete the state of a period for which nothing was charged, so that it can start again."""
        self._file(state.period).unlink()

    def _file(self, period: str) -> Path:
        return self.folder / f"{period}.json"


def _read(path: Path) -> State:
    document = read_json(path)
    return State(**document | {"blocks": tuple(document["blocks"])})
