"""What became of each period's retraining, kept beside the ledger: no checkout, branch or server can bring it back."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from data.files import write_whole

Kind = Literal["open", "promoted", "kept", "forfeited", "given up"]


@dataclass(frozen=True)
class State:
    """A retraining that was begun.

    kind: "open" until it has ended. params: the text of params.yaml that it runs with, so that it is taken up as it
    was; before: the one that it replaced. root: its checkout. attempts: how often it was begun or taken up. number: its
    place among all; names of periods of several lengths, and those after a clock was set, do not sort by time.
    """

    period: str
    root: str
    params: str
    before: str
    blocks: tuple[str, ...]
    epsilon: float
    kind: Kind = "open"
    message: str = ""
    attempts: int = 0
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
