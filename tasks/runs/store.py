"""What a run is: its id, and the one folder with what it needs while it trains and with its result afterwards.

The id is a keyed digest of all that decides the result, with the number of the attempt: `5f0c3a9be1d27746-1`. So a run
that is asked for again is found by its id alone, in `runs/ID` of the home, and the ledger's rows of that id say what
was spent. The key of its noise is there before its budget is reserved, so that a killed run goes on with the same noise
and no second charge; at the end key and checkpoints are deleted, and what it releases stays in `runs/ID/result`.

    the ledger says    the folder has    asked for once more
    nothing            anything          it begins, or goes on
    open, settled      the key           it goes on
    settled            a whole result    that is handed out for nothing, unless a person agrees to spend again
    open, settled      neither           it was lost, or a search drew no trial: only who agrees to spend again has
                                         another attempt
    forfeited          what is deleted   another attempt begins

Of public records, which cost nothing, a result is deleted once a later stage has it in hand, and nobody is asked.

A receipt says under which description of the data the model was trained, and metrics of which run they are, so that
nothing is said of a model under another description or with another one's metrics.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from algorithms.errors import RefusedError
from algorithms.privacy.mechanisms.noise import Generator
from data import PublicDescription
from data.prepare.files import taken, write_whole
from data.prepare.prepared import contents
from data.prepare.secret_key import keyed, owner_key

RECEIPT, PLAN = "receipt.json", "plan.json"
_META, _KEY, _LOCK, _RESULT, _TAKEN, _GONE = "run.json", "generator.key", "lock", "result", "taken", ".gone-"
_RELEASED = ("model.safetensors", "trace.parquet")
_DECIDES_NOTHING = ("title", "source", "licence", "unit", "cap_epsilon", "cap_delta")
_DIGITS, _POLL_SECONDS = 16, 0.2

_LOG = logging.getLogger(__name__)

Status = Callable[[str], str | None]
"""What the ledger says of a run: open, settled, forfeited, or None for one that it does not know."""
Anew = Callable[[str, bool], bool]
"""Whether a run that is charged already is to be done anew, given its id and whether its result is there."""


def digest(decides: Sequence[object], public: PublicDescription, prepared: Path, *, home: Path) -> str:
    """All that decides a run's result, as the first part of its id.

    decides: plan, which has digests of the code, and settings. prepared: the folder with the records, of which it
    covers those to train on. home: where the owner key is. Only a holder of that key can make it, so whoever sees an id
    can test no guess about the records; it tells whether two runs were the same but for their noise.

    What a data card says in words, its unit and the cap decide no result (a population is bound to its unit, see
    `tasks.runs.population`). Nor does the checkout: two that ask for one run have one result, paid for once, and its
    folder's lock lets them take turns. DVC knows of each what it has, and needs no id.
    """
    described = {
        key: value for key, value in json.loads(public.to_json()).items() if key not in _DECIDES_NOTHING
    }
    every = json.dumps([*decides, described, contents(prepared)], sort_keys=True)
    return keyed(owner_key(home), ["what decides a run", every]).hex()[:_DIGITS]


@dataclass(frozen=True)
class Run:
    """An attempt at a run: its identity in the ledger, its folder, and the one within that has its result.

    private_noise: whether its noise is secret. result: None where it is still to be had.
    """

    run_id: str
    folder: Path
    private_noise: bool
    result: Path | None

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
        """Makes the folder `written` the result, on the disk before the secrets go; returns where it is."""
        for path in (*written.iterdir(), written):
            _sync(path)
        written.rename(self.folder / _RESULT)
        _sync(self.folder)
        self.forget_secrets()
        return self.folder / _RESULT

    def forget_secrets(self) -> None:
        """Deletes the key and the checkpoints; only for a run that has its result, or never will."""
        for path in self.folder.iterdir():
            if path.name not in (_META, _LOCK, _RESULT, _TAKEN):
                path.unlink()

    @contextmanager
    def abandoned_if_refused(self, *, unless: Callable[[], bool]) -> Iterator[None]:
        """Deletes the folder of a run that the block refuses; not one with a result, or charged as `unless` says."""
        try:
            yield
        except RefusedError:
            if self.result is None and not unless():
                _delete(self.folder)
            raise


@contextmanager
def claimed(
    home: Path, digest: str, status: Status, *, checkout: Path, fresh: Generator, anew: Anew
) -> Iterator[Run]:
    """The attempt at a run that is to be made or handed out, held against other processes until the end of the block.

    checkout: which asks, for `begun_since`. fresh: the generator of an attempt that begins. anew: asked of one that is
    charged and has ended or is lost; where it says no, its result is handed out, and of a lost one it says yes or
    raises. Another process that is at the same run is waited for: what it pays for is had for nothing then.
    """
    runs, is_told = home / "runs", False
    meta = json.dumps({"checkout": str(checkout.resolve())})
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    runs.mkdir(mode=0o700, exist_ok=True)
    for gone in runs.glob(f"{_GONE}*"):
        shutil.rmtree(gone, ignore_errors=True)
    while True:
        run_id = _attempt(home, digest, status, anew)
        folder = runs / run_id
        folder.mkdir(mode=0o700, exist_ok=True)
        with _held(folder) as is_held:
            standing = _standing(folder, status(run_id)) if is_held else None
            if standing in ("begun", "finished"):
                write_whole(folder / _META, lambda new: new.write_text(meta, encoding="utf-8"), mode=0o600)
                if standing == "begun" and not (folder / _KEY).exists():
                    write_whole(folder / _KEY, lambda new: new.write_bytes(fresh.key), mode=0o600)
                    _sync(folder)
                    _sync(runs)
                yield Run(run_id, folder, fresh.private, folder / _RESULT if standing == "finished" else None)
                return
        if not is_held:
            if not is_told:
                _LOG.info("another process is at run %s: waiting for its end", run_id)
            is_told = True
            time.sleep(_POLL_SECONDS)


def _attempt(home: Path, digest: str, status: Status, anew: Anew) -> str:
    """The last attempt that goes on or is handed out, or else the next one; those that were forfeited are deleted."""
    stands: dict[str, str] = {}
    for number in count(1):
        run_id = f"{digest}-{number}"
        state, folder = status(run_id), home / "runs" / run_id
        if state is None and not folder.is_dir():
            break
        stands[run_id] = _standing(folder, state)
        if stands[run_id] == "forfeited":
            abandon(home, run_id)
    here = [run for run, stand in stands.items() if stand in ("begun", "finished")]
    lost = [run for run, stand in stands.items() if stand == "lost"]
    if not here and not lost:
        return run_id
    last = (here or lost)[-1]
    is_asked = stands[last] == "lost" or (home / "runs" / last / _TAKEN).exists()
    return run_id if is_asked and anew(last, bool(here)) else last


def _standing(folder: Path, state: str | None) -> Literal["begun", "finished", "lost", "forfeited"]:
    """What is to be had of an attempt, of which the ledger says `state`."""
    if state == "forfeited":
        return "forfeited"
    if _is_whole(folder):
        return "finished"
    return "begun" if state is None or (folder / _KEY).exists() else "lost"


def _is_whole(folder: Path) -> bool:
    """Whether a run's result is there as it was released, by the checksums of its receipt."""
    result = folder / _RESULT
    try:
        receipt: dict[str, Any] = json.loads((result / RECEIPT).read_text(encoding="utf-8"))
        same = all(_sha256(result / name) == receipt["sha256"][name] for name in _RELEASED)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return same and receipt.get("run_id") == folder.name


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
            receipt["sha256"][PLAN] = _sha256(artifacts / PLAN)
            fresh.write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
        fresh.replace(artifacts / name)


def take_up(home: Path, run_id: str, *, keeps: bool) -> None:
    """Notes that a later stage has the result of a finished run in hand; does nothing for another run.

    keeps: since it cannot be had again for nothing, and those hands may lose it; else it is deleted. Another process
    that holds the run is left to it.
    """
    folder = home / "runs" / run_id
    with _held(folder) as is_held:
        if is_held and (folder / _RESULT).is_dir():
            (folder / _TAKEN).touch()
            if not keeps:
                _delete(folder)


def abandon(home: Path, run_id: str) -> None:
    """Deletes the folder of a forfeited run, with what it knew of records; not while a process holds it."""
    folder = home / "runs" / run_id
    with _held(folder) as is_held:
        if is_held:
            _delete(folder)


def is_here(home: Path, run_id: str) -> bool:
    """Whether the run's folder is in this home, so that it goes on here and nowhere else."""
    return (home / "runs" / run_id).is_dir()


def begun_since(home: Path, moment: float, checkout: Path) -> str | None:
    """The run that a checkout began, resumed or was handed last, if that was since a moment and its folder is there.

    moment: in seconds since the epoch.
    """
    found: list[tuple[float, str]] = []
    for meta in (home / "runs").glob(f"[!.]*/{_META}"):
        with suppress(FileNotFoundError):  # another process takes it away
            began, of = meta.stat().st_mtime, json.loads(meta.read_text(encoding="utf-8"))
            if began >= moment and of["checkout"] == str(checkout.resolve()):
                found.append((began, meta.parent.name))
    return max(found)[1] if found else None


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Holds a run's folder, where there is one; false where another process does, or has just taken it away."""
    lock = None
    with suppress(FileNotFoundError):
        lock = taken(folder / _LOCK)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _delete(folder: Path) -> None:
    """Takes a run's folder out of sight first: what a killed process leaves of it must not be taken up."""
    gone = folder.with_name(f"{_GONE}{folder.name}")
    if gone.exists():
        shutil.rmtree(gone)
    folder.rename(gone)
    shutil.rmtree(gone)


def _sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def described(public: PublicDescription) -> dict[str, str]:
    """Of which data the run is, and a digest of their description, for `check_described`."""
    return {
        "dataset": public.dataset,
        "population": public.population,
        "description_sha256": public.digest,
    }


def check_described(receipt: Mapping[str, Any], public: PublicDescription) -> None:
    """Raises RefusedError where the data are described otherwise than when the model was trained.

    A card would tell of other data, and other records may be held out now, some of which the model was trained on.
    """
    trained_under = receipt.get("description_sha256")
    if trained_under is None:
        raise RefusedError(
            "artifacts/receipt.json, of an older version, does not say how the data were described when the model was"
            " trained; keep what the run has, or train again."
        )
    if trained_under != public.digest:
        raise RefusedError(
            "datasets/prepared/public.json describes the data otherwise than when the model was trained;"
            " prepare them again"
            " with the data card as it was, or train again."
        )


def evaluated(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """What the metrics have of the run that they are of, for `check_evaluated`; epsilon is null without privacy.

    The run's id is a digest of all settings, which DVC shows beside the metrics.
    """
    return {
        "epsilon": receipt["epsilon"][receipt["accountant"]],
        "delta": receipt["delta"],
        "run_id": receipt["run_id"],
    }


def check_evaluated(metrics: Mapping[str, Any], receipt: Mapping[str, Any]) -> None:
    """Raises RefusedError where the metrics are of another run than the receipt, or do not say of which they are."""
    wanted = evaluated(receipt)
    differing = [name for name, value in wanted.items() if name not in metrics or metrics[name] != value]
    if differing:
        raise RefusedError(
            f"artifacts/metrics.json is not of run {wanted['run_id']} (it has another {differing[-1]}, or none);"
            " evaluate again by `python -m tasks.evaluate` or `dvc repro evaluate`."
        )
