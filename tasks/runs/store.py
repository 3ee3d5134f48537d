"""The identity of a run, and its folder: first with what it needs during training, then with its result.

The id is a keyed digest of everything that decides the result, and the number of the attempt: `5f0c3a9be1d27746-1`. So
an identical run is found by its id alone, in `runs/ID` of the home, and the ledger's rows with that id say what was
spent. The key of its noise is written before its budget is reserved, so that a killed run is resumed with the same
noise and without a second charge. At the end, key and checkpoints are deleted, and what the run releases stays in
`runs/ID/result`.

    the ledger says    the folder has       an identical run
    nothing            anything             begins or is resumed
    open, settled      the key              is resumed
    settled            a complete result    gets that result for free, unless a person agrees to spend again
    open, settled      neither              is lost, or was a search without trials; a person who agrees to spend again
                                            gets another attempt
    forfeited          (is deleted)         is another attempt

For public records, which cost nothing, a result is deleted once a later stage has used it, and nobody is asked.

A receipt records the description of the data with which the model was trained, and metrics record their run, so that no
model is reported with another description or with the metrics of another model.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from algorithms.errors import NoiseElsewhereError, RefusedError
from algorithms.privacy.documents import Receipt
from algorithms.privacy.ledger import NOISE_KEY
from algorithms.privacy.mechanisms.noise import Generator
from data import DatasetInfo
from data.files import KEY_BYTES, keyed_digest, owner_key, read_json, try_lock, write_text, write_whole
from data.prepared import contents, halves_digest
from tasks.config.params import ModelParams

RECEIPT, PLAN, EVALUATION = "receipt.json", "plan.json", "evaluation.json"
"""Files of a result; the last is the released histogram of private held-out records, an empty object without one."""
_RUN_FACTS, _KEY, _LOCK, _RESULT, _TAKEN, _DELETED = (
    "run.json",
    "generator.key",
    "lock",
    "result",
    "taken",
    ".gone-",
)
_RELEASED_FILES = ("model.safetensors", "trace.parquet")
_DECIDES_NOTHING = (
    "title",
    "source",
    "licence",
    "unit",
    "cap_epsilon",
    "cap_delta",
    "each_record_alone",
    "holdout_why",
    "costs",
    "cell_columns",  # but with histograms, see `counted_columns`
)
_DIGITS, _POLL_SECONDS = 16, 0.2

_LOG = logging.getLogger(__name__)

StatusLookup = Callable[[str], str | None]
"""The ledger's status of a run: open, settled, forfeited, or None if it does not know the run."""
OnRepeat = Callable[[str, bool], bool]
"""Whether to repeat a run that is charged already, given its id and whether its result exists."""


def digest(decides: Sequence[object], info: DatasetInfo, prepared: Path, *, home: Path) -> str:
    """A keyed digest of everything that decides a run's result, the first part of its id.

    decides: the plan, which has digests of the code, and the settings. prepared: the folder with the records; the
    training records are covered. home: folder of the owner key. Only a holder of that key can compute the digest, so
    nobody else can use an id to test a guess about the records. The id reveals whether two runs were the same except
    for their noise.

    The texts on a data card, its unit and the cap decide no result (a population is bound to its unit, see
    `tasks.runs.ledger`). Nor does the checkout: two checkouts that request the same run share one result, which is
    paid for once, and take turns by the lock of its folder. DVC tracks what each checkout has and needs no id.
    """
    described = {
        key: value for key, value in json.loads(info.to_json()).items() if key not in _DECIDES_NOTHING
    }
    every = json.dumps([*decides, described, contents(prepared)], sort_keys=True)
    return keyed_digest(owner_key(home), ["what decides a run", every]).hex()[:_DIGITS]


def training_digest(
    plan: Mapping[str, Any],
    model: ModelParams,
    blocks: Sequence[str],
    info: DatasetInfo,
    prepared: Path,
    *,
    home: Path,
) -> str:
    """The digest of a training: see `digest`. plan: the JSON of its file. blocks: those that are read."""
    decides: list[object] = [plan, model.model_dump(), blocks]
    if plan.get("held_out", {}).get("recalibrate"):  # other halves must not get the same noise
        decides.append(halves_digest(prepared))
    return digest([*decides, *counted_columns([plan], info)], info, prepared, home=home)


def counted_columns(documents: Iterable[Mapping[str, Any]], info: DatasetInfo) -> list[object]:
    """The columns of which a plan, or settings, release histograms: others of the same rows must not get their noise.

    Empty without histograms.
    """
    if all(document.get("features", {}).get("name") != "histograms" for document in documents):
        return []
    return [[asdict(column) for column in info.cell_columns]]


@dataclass(frozen=True)
class RunAttempt:
    """An attempt at a run.

    Attributes:
        run_id: In the ledger.
        folder: With its key and checkpoints, or its result.
        private_noise: Whether its noise is secret.
        result: The folder of its result; None if there is none yet.
        ledger_status: The ledger's status of it when it was acquired; None if it was not reserved. Whether others
            reserve, forfeit or settle it meanwhile, the ledger checks when it is reserved and settled.
        notes: About the software that began it.
    """

    run_id: str
    folder: Path
    private_noise: bool
    result: Path | None
    notes: Mapping[str, str]
    ledger_status: str | None

    def generator(self) -> Generator:
        """The generator with which the run began; raises RefusedError if its key is damaged."""
        key = (self.folder / _KEY).read_bytes()
        if len(key) != KEY_BYTES:  # a shorter one can be a key, too, but draws other noise
            raise RefusedError(
                "{path} is damaged, so run {run_id} cannot be resumed with the same noise; restore"
                " that file, or give the run up by `epsilonflow ledger forfeit {run_id}`.",
                code="broken_file",
                path=self.folder / _KEY,
                run_id=self.run_id,
            )
        return Generator(key, private=self.private_noise)

    @property
    def noise_key_note(self) -> dict[str, str]:
        """The ledger's entry about its noise: another home may begin the same run at the same time with another key."""
        return {NOISE_KEY: hashlib.sha256(b"key of a run's noise" + self.generator().key).hexdigest()}

    def make_result_folder(self) -> Path:
        """Make an empty folder for the result, which `finish` gives its name."""
        path = self.folder / "written"
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(mode=0o700)
        return path

    def keep_plan(self, content: bytes, name: str = PLAN) -> None:
        """Keep the plan's document until there is a result, so that another version knows what was begun."""
        write_whole(self.folder / name, lambda new: new.write_bytes(content), mode=0o600)

    def finish(self, result: Path) -> Path:
        """Make the folder `result` the result, durably before the secrets are deleted; returns the result's folder."""
        for path in (*result.iterdir(), result):
            _sync(path)
        # A rename is atomic, so that a result is whole or not there; it is durable once its folder is flushed.
        result.rename(self.folder / _RESULT)
        _sync(self.folder)
        self.forget_secrets()
        return self.folder / _RESULT

    def forget_secrets(self) -> None:
        """Delete the key, checkpoints and trials; only for a run that has its result, or never will have one."""
        for path in self.folder.iterdir():
            if path.name not in (_RUN_FACTS, _LOCK, _RESULT, _TAKEN):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    @contextmanager
    def abandon_if_refused(self, status: StatusLookup) -> Iterator[None]:
        """Delete the run's folder if the block refuses the run, except if it has a result or the ledger knows it.

        It is also deleted if another home has the run's noise, so that it is not resumed here.
        """
        try:
            yield
        except NoiseElsewhereError:
            _delete(self.folder)
            raise
        except RefusedError:
            if self.result is None and status(self.run_id) is None:
                _delete(self.folder)
            raise


@contextmanager
def acquire_run(
    home: Path,
    digest: str,
    status: StatusLookup,
    *,
    checkout: Path,
    new_generator: Generator,
    on_repeat: OnRepeat,
    notes: Mapping[str, str],
) -> Iterator[RunAttempt]:
    """The attempt to make or to return, locked against other processes within the block.

    checkout: the requesting checkout, for `begun_runs`. notes: about the software of this process, kept with an attempt
    that is not charged yet, and so has drawn no noise. new_generator: for a new attempt. on_repeat: called for an
    attempt that is charged and has ended or is lost; if it returns False, the attempt's result is returned, and for a
    lost attempt it returns True or raises. If another process runs the same run, this waits for it and then gets its
    result for free.
    """
    runs, has_logged = home / "runs", False
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    runs.mkdir(mode=0o700, exist_ok=True)
    for gone in runs.glob(f"{_DELETED}*"):
        shutil.rmtree(gone, ignore_errors=True)
    while True:
        run_id = _choose_attempt(home, digest, status, on_repeat)
        folder = runs / run_id
        folder.mkdir(mode=0o700, exist_ok=True)
        with _lock_folder(folder) as is_held:
            ledger_status = status(run_id)  # again, under the lock: it may have ended since
            state = _run_state(folder, ledger_status) if is_held else None
            if state in ("begun", "finished"):
                run_notes = notes if ledger_status is None else _notes(folder)
                meta = {"checkout": str(checkout.resolve()), **run_notes}
                write_text(folder / _RUN_FACTS, json.dumps(meta), mode=0o600)
                # On the disk, entries of the folders included, before anything is reserved: who resumes the run has to
                # find the key of the noise that was paid for.
                if state == "begun" and not (folder / _KEY).exists():
                    write_whole(folder / _KEY, lambda new: new.write_bytes(new_generator.key), mode=0o600)
                    _sync(folder)
                    _sync(runs)
                result = folder / _RESULT if state == "finished" else None
                yield RunAttempt(run_id, folder, new_generator.private, result, run_notes, ledger_status)
                return
        if not is_held:
            if not has_logged:
                _LOG.info("another process is at run %s: waiting for its end", run_id)
            has_logged = True
            time.sleep(_POLL_SECONDS)


def _notes(folder: Path) -> dict[str, str]:
    """The notes of a run about the software that began it; empty if there are none."""
    with suppress(OSError, ValueError, AttributeError):
        return {name: text for name, text in read_json(folder / _RUN_FACTS).items() if name != "checkout"}
    return {}


def _choose_attempt(home: Path, digest: str, status: StatusLookup, on_repeat: OnRepeat) -> str:
    """The id of the last attempt, to be resumed or returned, or of a new one."""
    states = _attempts(home, digest, status)
    new = f"{digest}-{len(states) + 1}"
    usable = [run_id for run_id, state in states.items() if state in ("begun", "finished")]
    lost = [run_id for run_id, state in states.items() if state == "lost"]
    if usable:
        was_used = (home / "runs" / usable[-1] / _TAKEN).exists()
        return new if was_used and on_repeat(usable[-1], True) else usable[-1]
    return new if not lost or on_repeat(lost[-1], False) else lost[-1]


def _attempts(home: Path, digest: str, status: StatusLookup) -> dict[str, str]:
    """The state of each attempt by its id, the first one first; deletes the folders of forfeited ones."""
    states = dict[str, str]()
    for number in count(1):
        run_id = f"{digest}-{number}"
        ledger_status, folder = status(run_id), home / "runs" / run_id
        if ledger_status is None and not folder.is_dir():
            break
        states[run_id] = _run_state(folder, ledger_status)
        if states[run_id] == "forfeited":
            abandon(home, run_id)
    return states


def _run_state(folder: Path, ledger_status: str | None) -> Literal["begun", "finished", "lost", "forfeited"]:
    """The state of an attempt's folder, given the ledger's status of it."""
    if ledger_status == "forfeited":
        return "forfeited"
    if _has_whole_result(folder):
        return "finished"
    return "begun" if ledger_status is None or (folder / _KEY).exists() else "lost"


def _has_whole_result(folder: Path) -> bool:
    """Whether a run's result is complete and unchanged, by the checksums of its receipt."""
    result = folder / _RESULT
    try:
        receipt = read_json(result / RECEIPT)
        names = [*_RELEASED_FILES, *({EVALUATION} & receipt["sha256"].keys())]
        same = all(sha256_of(result / name) == receipt["sha256"][name] for name in names)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return same and receipt.get("run_id") == folder.name


def hand_out(result: Path, artifacts: Path, names: Iterable[str], *, facts: Mapping[str, str]) -> None:
    """Copy files of a result, each whole or not at all, since a truncated receipt would stop every later run.

    facts: the current description of the data for the receipt, which may have new texts. The plan may also be
    written in another order; its content decided which run this is, and the receipt gets the checksum of the file in
    `artifacts`.
    """
    artifacts.mkdir(exist_ok=True)
    for name in names:
        fresh = artifacts / f".{name}"
        if name == EVALUATION and not (result / name).is_file():  # there was none, and DVC wants the file
            fresh.write_text("{}\n", encoding="utf-8")
        else:
            shutil.copyfile(result / name, fresh)
        if name == RECEIPT:
            receipt = {**read_json(fresh), **facts}
            receipt["sha256"][PLAN] = sha256_of(artifacts / PLAN)
            fresh.write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
        fresh.replace(artifacts / name)


def mark_used(home: Path, run_id: str, *, keeps: bool) -> None:
    """Record that a later stage has used the result of a finished run; does nothing for an unfinished run.

    keeps: keep the result, since it cannot be had again for free and the checkout may lose it; otherwise it is deleted.
    If another process has locked the run, nothing happens.
    """
    folder = home / "runs" / run_id
    with _lock_folder(folder) as is_held:
        if is_held and (folder / _RESULT).is_dir():
            # First: a process that is killed here leaves a result that is known to be used.
            (folder / _TAKEN).touch()
            if not keeps:
                _delete(folder)


def abandon(home: Path, run_id: str) -> None:
    """Delete the folder of a forfeited run, with everything about records in it, unless a process has locked it."""
    folder = home / "runs" / run_id
    with _lock_folder(folder) as is_held:
        if is_held:
            _delete(folder)


def is_here(home: Path, run_id: str) -> bool:
    """Whether the run's folder is in this home, so that the run can only be resumed here."""
    return (home / "runs" / run_id).is_dir()


def is_idle(home: Path, run_id: str) -> bool:
    """Whether the run's folder is in this home and no process is at the run."""
    with _lock_folder(home / "runs" / run_id) as is_held:
        return is_held


def begun_runs(home: Path, checkout: Path) -> dict[str, int]:
    """The runs here that a checkout began, resumed or got, each with a mark that changes when it does so again."""
    marks: dict[str, int] = {}
    for meta in (home / "runs").glob(f"[!.]*/{_RUN_FACTS}"):
        with suppress(FileNotFoundError):  # another process deletes it
            if read_json(meta)["checkout"] == str(checkout.resolve()):
                marks[meta.parent.name] = meta.stat().st_mtime_ns
    return marks


@contextmanager
def _lock_folder(folder: Path) -> Iterator[bool]:
    """Lock a run's folder; yields False if there is none, or another process has locked or just deleted it."""
    lock = None
    with suppress(FileNotFoundError):
        lock = try_lock(folder / _LOCK)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _delete(folder: Path) -> None:
    """Rename a run's folder before deleting it, so that a partly deleted folder is never resumed."""
    gone = folder.with_name(f"{_DELETED}{folder.name}")
    if gone.exists():
        shutil.rmtree(gone)
    folder.rename(gone)
    shutil.rmtree(gone)


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def data_facts(info: DatasetInfo) -> dict[str, str]:
    """The names of the run's data and a digest of their description, for `check_data_facts`."""
    return {"dataset": info.dataset, "population": info.population, "description_sha256": info.digest}


def check_data_facts(receipt: Receipt, info: DatasetInfo) -> None:
    """Raise RefusedError if the description of the data has changed since the model was trained.

    A card would describe other data, and some records that the model was trained on may be held out now.
    """
    if receipt.description_sha256 != info.digest:
        raise RefusedError(
            "datasets/prepared/public.json describes the data otherwise than when the model was trained; prepare them"
            " again with the data card as it was, or train again.",
            code="unlike_training",
        )


def run_facts(receipt: Receipt) -> dict[str, str | float | None]:
    """The facts that link metrics to their run, for `check_run_facts`; epsilon is null without privacy.

    The run's id is a digest of all settings, which DVC shows next to the metrics.
    """
    return {
        "epsilon": receipt.cost,
        "delta": receipt.delta,
        "run_id": receipt.run_id,
    }


def check_run_facts(metrics: Mapping[str, object], receipt: Receipt) -> None:
    """Raise RefusedError if the metrics belong to another run than the receipt, or do not name their run."""
    wanted = run_facts(receipt)
    differing = [name for name, value in wanted.items() if name not in metrics or metrics[name] != value]
    if differing:
        raise RefusedError(
            "artifacts/metrics.json is not of run {run_id} (it has another {differing}, or none);"
            " evaluate again by `python -P -m tasks.evaluate` or `dvc repro evaluate`.",
            code="files_of_two_runs",
            run_id=wanted["run_id"],
            differing=differing[-1],
        )
