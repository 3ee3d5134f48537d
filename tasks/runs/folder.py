"""Run folders: what a training run keeps outside the checkout, so that a crash costs neither results nor budget.

A run's folder holds the secret key of its noise from before its budget is reserved until it is settled, then the
released result until a later stage has it in hand; that of private records is kept after that, too. A run with the same
key of inputs finds an unfinished folder and takes it up: same noise, same model, no second charge.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from algorithms.errors import RefusedError
from algorithms.privacy.mechanisms.noise import Generator
from data.prepare.files import taken
from tasks.runs.result_store import keep

DONE = "done"
"""The folder that tells of which inputs a run was finished."""

RECEIPT, PLAN = "receipt.json", "plan.json"
_META, _KEY, _LOCK, _RESULT, _GONE = "run.json", "generator.key", "lock", "result", ".gone-"


@dataclass(frozen=True)
class Run:
    """One training run: its identity in the ledger, its folder, and whether its noise is secret."""

    run_id: str
    folder: Path
    private_noise: bool

    @property
    def result(self) -> Path | None:
        """The folder with the released result, once there is one."""
        path = self.folder / _RESULT
        return path if path.is_dir() else None

    def generator(self) -> Generator:
        """The generator that the run began with."""
        return Generator((self.folder / _KEY).read_bytes(), private=self.private_noise)

    def emptied(self, name: str) -> Path:
        """A folder of this name in the run's own, with nothing in it."""
        path = self.folder / name
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(mode=0o700)
        return path

    def finish(self, written: Path) -> Path:
        """Keeps the folder `written` as the result and deletes the run's secrets; returns where the result is."""
        written.rename(self.folder / _RESULT)
        self.forget_secrets()
        return self.folder / _RESULT

    def forget_secrets(self) -> None:
        """Deletes the key and the checkpoints; only for a run that has its result."""
        for path in self.folder.iterdir():
            if path.name not in (_META, _LOCK, _RESULT):
                path.unlink()

    @contextmanager
    def abandoned_if_refused(self, *, unless: Callable[[], bool]) -> Iterator[None]:
        """Deletes the folder of a run that the block refuses; not where `unless` says it is charged already."""
        try:
            yield
        except RefusedError:
            if not unless():
                _hide(self.folder)
                _sweep(self.folder.parent)
            raise


@contextmanager
def claimed(
    home: Path,
    *,
    inputs: str,
    checkout: Path,
    fresh: Generator,
    is_forfeited: Callable[[str], bool],
    keeps: bool = True,
) -> Iterator[Run]:
    """The run of these inputs, held against other processes until the end of the block.

    inputs: a digest of all that decides the result. checkout: for which it is. An unfinished run of the same inputs
    that no process holds is taken up, unless its owner has forfeited it; else a new one begins, with the generator
    `fresh`. keeps: whether the result is kept for good, since it cannot be had again for nothing.
    """
    runs = home / "runs"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    runs.mkdir(mode=0o700, exist_ok=True)
    run, lock = _take_up(runs, inputs, is_forfeited) or _begin(runs, inputs, checkout, fresh, keeps)
    os.utime(run.folder / _LOCK)  # for `begun_since`
    try:
        yield run
    finally:
        os.close(lock)


def hand_out(result: Path, artifacts: Path, names: Iterable[str], *, said: Mapping[str, str]) -> None:
    """Copies files of a result, each whole or not at all: a receipt cut short would stop every run after it.

    said: what the receipt says of the data, which may be described in other words by now. So may the plan be written in
    another order: its content decided which run this is, and its file is the one in `artifacts`.
    """
    artifacts.mkdir(exist_ok=True)
    for name in names:
        fresh = artifacts / f".{name}"
        shutil.copyfile(result / name, fresh)
        if name == RECEIPT:
            receipt = json.loads(fresh.read_text(encoding="utf-8")) | said
            receipt["sha256"][PLAN] = hashlib.sha256((artifacts / PLAN).read_bytes()).hexdigest()
            fresh.write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
        fresh.replace(artifacts / name)


def discard(home: Path, run_id: str) -> None:
    """Forgets a finished run, whose result is in other hands; does nothing for an unfinished or unknown one.

    What cannot be had again for nothing is kept: those hands may lose it. Another process that does the same, or still
    trains, is left to it.
    """
    folder = home / "runs" / run_id
    with _held(folder) as is_held:
        if is_held and (folder / _RESULT).is_dir():
            described = json.loads((folder / _META).read_text(encoding="utf-8"))
            if described.get("keeps", True):
                keep(home, run_id, folder / _RESULT)
            _note_done(home, described["inputs"], run_id)
            _hide(folder)
    _sweep(folder.parent)


def is_known(home: Path, inputs: str) -> bool:
    """Whether a run of these inputs was finished, or is in the folders still."""
    return (home / DONE / inputs).is_file() or bool(unfinished(home, inputs))


def unfinished(home: Path, inputs: str) -> list[str]:
    """The runs of these inputs that are in the folders still, and are taken up unless they were forfeited."""
    metas = (home / "runs").glob(f"[0-9]*/{_META}")
    return [
        meta.parent.name for meta in metas if json.loads(meta.read_text(encoding="utf-8"))["inputs"] == inputs
    ]


def begun_since(home: Path, moment: float, checkout: Path) -> str | None:
    """The run of a checkout that was begun or resumed last, if that was since a moment and it is in the folders still.

    moment: in seconds since the epoch.
    """
    found: list[tuple[float, str]] = []
    for meta in (home / "runs").glob(f"[0-9]*/{_META}"):
        with suppress(FileNotFoundError):  # another process takes it away
            began = (meta.parent / _LOCK).stat().st_mtime
            described = json.loads(meta.read_text(encoding="utf-8"))
            if began >= moment and described.get("checkout") == str(checkout.resolve()):
                found.append((began, meta.parent.name))
    return max(found)[1] if found else None


def is_kept(home: Path, run_id: str) -> bool:
    """Whether the run's folder is in this home, so that it is taken up here and nowhere else."""
    return (home / "runs" / run_id).is_dir()


def _note_done(home: Path, inputs: str, run_id: str) -> None:
    (home / DONE).mkdir(mode=0o700, exist_ok=True)
    (home / DONE / inputs).write_text(f"{run_id}\n", encoding="utf-8")


def abandon(home: Path, run_id: str) -> None:
    """Deletes the folder of a forfeited run, with what it knew of records; not while a process holds it."""
    folder = home / "runs" / run_id
    with _held(folder) as is_held:
        if is_held:
            _hide(folder)
    _sweep(folder.parent)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Holds a run's folder, where there is one; false where another process does, or has just taken it away."""
    lock = None
    with suppress(FileNotFoundError):
        lock = taken(folder / _LOCK)
    try:
        yield lock is not None and folder.is_dir()
    finally:
        if lock is not None:
            os.close(lock)


def _hide(folder: Path) -> None:
    """Takes a run's folder out of sight, to be deleted: what a killed process leaves of it must not be taken up."""
    folder.rename(folder.with_name(f"{_GONE}{folder.name}"))


def _sweep(runs: Path) -> None:
    """Deletes the folders that were hidden, and those of runs whose process was killed before they began."""
    for gone in runs.glob(f"{_GONE}*"):
        shutil.rmtree(gone, ignore_errors=True)
    for path in runs.glob(f".[0-9]*/{_LOCK}"):
        with suppress(FileNotFoundError):  # another process does the same
            lock = taken(path)
            if lock is not None:
                shutil.rmtree(path.parent, ignore_errors=True)
                os.close(lock)


def _take_up(runs: Path, inputs: str, is_forfeited: Callable[[str], bool]) -> tuple[Run, int] | None:
    for meta in sorted(runs.glob(f"[0-9]*/{_META}")):
        described = json.loads(meta.read_text(encoding="utf-8"))
        if described["inputs"] != inputs or is_forfeited(meta.parent.name):
            continue
        lock = taken(meta.parent / _LOCK)
        if lock is not None:
            return Run(meta.parent.name, meta.parent, described["private_noise"]), lock
    return None


def _begin(runs: Path, inputs: str, checkout: Path, fresh: Generator, keeps: bool) -> tuple[Run, int]:
    _sweep(runs)
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
    folder = runs / f".{run_id}"
    folder.mkdir(mode=0o700)
    lock = taken(folder / _LOCK)
    if lock is None or not folder.exists():  # another process took it for one that was left
        return _begin(runs, inputs, checkout, fresh, keeps)
    described = {
        "inputs": inputs,
        "checkout": str(checkout.resolve()),
        "private_noise": fresh.private,
        "keeps": keeps,
    }
    _write_synced(folder / _KEY, fresh.key)
    _write_synced(folder / _META, json.dumps(described).encode())
    folder.rename(runs / run_id)
    return Run(run_id, runs / run_id, fresh.private), lock


def _write_synced(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
