"""The models of a name in the folder `models`: one folder a run, with its privacy card, and which one serves.

An entry is a model with all that `epsilonflow card verify` needs beside its card. The one that serves is behind the
link `serving`, which is replaced in one step: a reader finds a whole model at every moment.

What became of each period's retraining, kept beside the ledger: no checkout, branch or server can bring it back.
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

from data.prepare.files import write_whole

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


Kind = Literal["open", "promoted", "kept", "forfeited", "given up"]


@dataclass(frozen=True)
class State:
    """A retraining that was begun.

    kind: "open" until it has ended. params: the text of params.yaml that it runs with, so that it is taken up as it
    was; before: the one that it replaced. root: its checkout. number: its place among all; names of periods of several
    lengths, and those after a clock was set, do not sort by time.
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
    """The states of one retraining's periods; folder: theirs alone, one file a period."""

    folder: Path

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Whether no other process is at this retraining; none begins until the end of the block."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            held = FileLock(self.folder / "lock").acquire(blocking=False)
        except Timeout:
            yield False
            return
        with held:
            yield True

    def of(self, period: str) -> State | None:
        """The state of a period; None where it did not begin."""
        path = self._file(period)
        return _read(path) if path.is_file() else None

    def open(self) -> State | None:
        """The retraining that was interrupted, if there is one; there is never a second."""
        return next((state for state in self.all() if state.kind == "open"), None)

    def all(self) -> list[State]:
        """All states, in the order in which they began."""
        found = [_read(path) for path in self.folder.glob("*.json")]
        return sorted(found, key=lambda state: (state.number, state.period))

    def write(self, state: State) -> None:
        """Keeps a state, on the disk before this returns."""
        text = json.dumps(asdict(state), indent=2)
        write_whole(self._file(state.period), lambda fresh: fresh.write_text(text, encoding="utf-8"))

    def forget(self, state: State) -> None:
        """Lets a period begin anew, where nothing was charged for it."""
        self._file(state.period).unlink()

    def _file(self, period: str) -> Path:
        return self.folder / f"{period}.json"


def _read(path: Path) -> State:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return State(**document | {"blocks": tuple(document["blocks"])})
