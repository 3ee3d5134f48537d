"""Run a stage as a process in a checkout, by DVC, one flow at a time.

A refusal of a stage is one sentence on stderr and exit status 2. DVC decides whether a stage has to run. It works in a
separate process, `python -P -m tasks.runs.stages STAGE`. That process leads a process group with the stage, and ends
when the process that requested the stage ends, so that no process is left that could spend.
"""

import atexit
import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout

from algorithms.plain_text import for_terminal
from algorithms.privacy.ledger import system_user
from tasks.config import SPEND_AGAIN, has_consent
from tasks.config.params import ParamsRefusedError
from tasks.runs.checkout import append_checkout_to_path, find_checkout, missing_in

if TYPE_CHECKING:
    from dvc.repo import Repo


T = TypeVar("T")
Say = Callable[[str], object]
STAGES = ("prepare", "calibrate", "train", "evaluate", "report")
REFUSED = "refused: "
"""The prefix of a refusal in a stage's output."""
TRAINING, EXISTING = "training ...", "existing result, nothing charged"
"""The line of a train stage that trains, and the prefix of the line of one that hands out an existing result."""
_NOTHING = 3
"""The exit status of the process if DVC has nothing to do."""
_KILLED = (f"exited with -{signal.SIGKILL}", f"exited with {128 + signal.SIGKILL}")
"""How DVC's last line ends if a stage was killed; the second if a shell ran it."""
_POLL_SECONDS = 0.5
_ENDINGS = ((signal.SIGINT, 5.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 1.0))
"""Signals that end a process, with seconds to wait: first an interrupt, on which DVC releases its locks."""


def main_of(function: Callable[[], object]) -> None:
    """Run a stage's main function; a refusal or a shortage becomes one sentence on stderr and exit status 2.

    What it writes is for its owner only, and so are the records that it finds.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PlainFormatter())
    logging.basicConfig(handlers=[handler])  # of libraries only warnings
    for ours in ("__main__", "algorithms", "data", "tasks"):
        logging.getLogger(ours).setLevel(logging.INFO)
    append_checkout_to_path(Path.cwd())
    atexit.register(gc.freeze)  # a search for garbage at the end of a process takes tenths of a second
    try:
        with _for_the_owner_only():
            hide_records(Path(), Path(".dvc/cache"))
            function()
            hide_records(Path(), Path(".dvc/cache"))
    except Exception as error:
        words = str(error) if isinstance(error, refusals()) else shortage(error)
        if words is None:
            raise
        sys.stderr.write(f"{REFUSED}{for_terminal(' '.join(words.split()))}\n")
        raise SystemExit(2) from None


class _PlainFormatter(logging.Formatter):
    """Formats a line of the log, and a traceback if it has one, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return for_terminal(super().format(record))


@contextmanager
def _for_the_owner_only() -> Iterator[None]:
    """Within the block, this process and those that it starts write files that only their owner can read."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def hide_records(root: Path, cache: Path) -> None:
    """Make private records in the checkout at `root` accessible to their owner only: raw, prepared and in DVC's cache.

    DVC gives what it brings back the modes of its umask. cache: DVC's. Another user's folder stays as it is.
    """
    from data.card import DataRefusedError
    from data.description import DatasetInfo
    from data.files import hide

    prepared, datasets = root / "datasets" / "prepared", root / "datasets"
    try:
        is_public = DatasetInfo.read(prepared).is_public
    except DataRefusedError:
        return  # nothing is prepared
    if is_public:
        return
    with suppress(FileNotFoundError, PermissionError):
        cache.mkdir(mode=0o700, exist_ok=True)  # before DVC makes it
        hide(prepared)
        for folder in (datasets / "raw", datasets, root / ".dvc" / "tmp", cache):
            if folder.exists():
                folder.chmod(0o700)


def shortage(error: Exception) -> str | None:
    """The message for a full disk, too little memory or too many open files, raised by any library; None otherwise."""
    if isinstance(error, MemoryError):
        return (
            "memory did not suffice; free some, or run where there is more, then rerun the command to resume."
        )
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return "too many files are open; close some, or raise the limit (ulimit -n), then rerun the command to resume."
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if not is_full and os.strerror(errno.ENOSPC) not in str(error):
        return None
    return (
        f"the disk is full; make room where the checkout {Path.cwd()}, the home of its runs and temporary files lie,"
        " then rerun the command to resume."
    )


def refusals() -> tuple[type[ValueError], ...]:
    """The exceptions that are shown without a traceback."""
    from algorithms.errors import RefusedError
    from algorithms.extension import NotUsableError
    from data.card import DataRefusedError

    return (
        DataRefusedError,
        NotUsableError,
        ParamsRefusedError,
        RefusedError,
        StageRefusedError,
    )


def checkout() -> Path:
    """The checkout in which this process works; raises ParamsRefusedError if the current folder lies in none.

    Code of the user's own is imported from there.
    """
    root = find_checkout()
    if root is None:
        raise ParamsRefusedError(
            f"{Path.cwd()} is no checkout of epsilonflow, it has no {missing_in(Path.cwd())[0]}, and lies in none;"
            " change to one, or make one by `epsilonflow init DIR`."
        )
    append_checkout_to_path(root)
    return root


class StageRefusedError(ValueError):
    """A stage refused its input; the message is the stage's sentence."""


class StageFailedError(RuntimeError):
    """A stage failed; the message is the last line that it wrote."""


@contextmanager
def checkout_lock(root: Path, *, say: Say) -> Iterator[None]:
    """Lock the checkout at `root` within the block; if another flow has locked it, say so and wait."""
    lock = FileLock(root / ".dvc" / "tmp" / "epsilonflow.lock")
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        say("another run holds this checkout: waiting for its end")
        held = lock.acquire()
    with held:
        yield


def reproduce(stage: str, *, root: Path, say: Say) -> bool:
    """Let DVC run one stage of the checkout at `root` if its dependencies have changed; returns whether they had.

    say: called with each line that DVC and the stage write. If another dvc command is running in the checkout, this
    waits for it. Records that a killed prepare stage left are deleted. Once the stage has started, nothing is retried,
    since a stage may spend.
    Raises StageRefusedError if the stage refused its input, StageFailedError if it or DVC failed.
    """
    if stage != "prepare":  # which goes on with the records that it encoded before it was killed
        from data.prepared import sweep  # which imports NumPy

        sweep(root / "datasets" / "prepared")
    status, lines = _dvc(stage, root=root, say=say)
    if status not in (0, _NOTHING):
        for line in lines:
            if line.startswith(REFUSED):
                raise StageRefusedError(line.removeprefix(REFUSED))
        if lines and lines[-1].endswith(_KILLED):
            raise StageFailedError(
                f"{stage} was killed, as by a system that ran out of memory; rerun the command to resume"
                " at no extra cost."
            )
        raise StageFailedError(lines[-1] if lines else f"{stage} ended with exit status {status}.")
    return status != _NOTHING


def up_to_date(root: Path, *, say: Say) -> bool:
    """Whether DVC has nothing to do in the checkout at `root`. say: called if this waits for another dvc command."""
    status, _ = _dvc(root=root, say=say)
    return status == _NOTHING


def _dvc(*stage: str, root: Path, say: Say) -> tuple[int, list[str]]:
    """Run `main` in a process and pass its output to `say`; returns the exit status and the lines that are not empty.

    An exception here, such as a cancellation, ends the process.
    """
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tasks.runs.stages", *stage],
        cwd=root,
        # `python` is this one, output is unbuffered, no module of the user's own is in the way of ours, also in a
        # checkout whose dvc.yaml has no -P, and the user has a name, for DVC
        env=os.environ
        | {"PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "LOGNAME": system_user()},
        stdin=subprocess.PIPE,  # nothing is written; it is closed whenever and however this process ends
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines = []
    try:
        for line in process.stdout or ():
            if text := line.rstrip():
                lines.append(text)
                say(text)
        return process.wait(), lines
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End an interrupted command and all its child processes, so that nothing continues in the checkout or spends."""
    if process.poll() is not None:
        return
    for ending, seconds in _ENDINGS:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, ending)
        deadline = time.monotonic() + seconds
        while _lives(process) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not _lives(process):
            return


def _lives(process: subprocess.Popen[str]) -> bool:
    """Whether the command, or any process in its process group, is still running."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Let DVC run the stage that the command line names; without a name, ask it whether there is anything to do.

    The exit status is _NOTHING if there was nothing to do. When stdin is closed, this process and the stage end.
    """
    threading.Thread(target=_end_with_input, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # even if the parent process blocks it
    with _for_the_owner_only():  # DVC reads it when it is imported
        _let_dvc_run()


def _let_dvc_run() -> None:
    from dvc.exceptions import DvcException  # here, since only this process uses DVC
    from dvc.lock import LockError
    from dvc.scm import SCMError

    stages = sys.argv[1:]
    is_new = any(code_has_changed(stage, Path()) for stage in stages or STAGES)
    is_new |= stages[:1] in ([], ["prepare"]) and has_other_blocks(Path())
    try:
        with _lock_repo(*stages) as repo:
            if stages:
                has_work = bool(repo.reproduce(*stages, single_item=True, force=is_new))
            else:
                has_work = is_new or bool(repo.status(targets="dvc.yaml"))
            hide_records(Path(), Path(repo.cache.local.path))
    except DvcException as error:
        if isinstance(error.__cause__, LockError):
            raise SystemExit(
                f"{stages[0]} ran, but another dvc command kept DVC from recording it; run the pipeline again."
            ) from None
        if isinstance(error, SCMError):
            raise SystemExit(f"{error}, which DVC needs; run `git init` there.") from None
        raise SystemExit(f"{error}: {error.__cause__}" if error.__cause__ else str(error)) from None
    raise SystemExit(0 if has_work else _NOTHING)


def code_has_changed(stage: str, root: Path) -> bool:
    """Whether a stage has to run again, or to refuse, because of code that DVC does not watch.

    That is code of the user's own; and in training that of epsilonflow, if a person agreed to train again.
    """
    from algorithms.extension import NotUsableError, is_own, source_digest
    from data.card import DataRefusedError, data_card
    from data.documents import DocumentError, load_yaml
    from data.files import read_json
    from data.formats import Own

    if stage == "train" and has_consent(SPEND_AGAIN):
        from tasks.runs.software import reuse_note_of

        return reuse_note_of(root) is not None
    if stage not in ("prepare", "calibrate"):
        return False
    try:
        named = load_yaml((root / "params.yaml").read_text(encoding="utf-8"))
        if stage == "prepare":
            if _encoder_has_changed(named["data"], root / "datasets" / "prepared"):
                return True
            reader = data_card(str(named["data"]["dataset"]), root / "data" / "cards").reader
            return isinstance(reader, Own) and source_digest(reader.factory) != reader.source_sha256
        names = {
            group: str((named.get(group) or {}).get("name")) for group in ("algorithm", "features", "model")
        }
        plan = root / "artifacts" / "plan.json"
        digests = read_json(plan)["code"] if plan.exists() else {}
        return any(
            is_own(name) and source_digest(name) != digests.get(group, source_digest(name))
            for group, name in names.items()
        )
    except NotUsableError:
        return True
    except (
        OSError,
        DocumentError,
        DataRefusedError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        AttributeError,
    ):
        return False  # the stage says what is wrong


def _encoder_has_changed(data: Mapping[str, Any], prepared: Path) -> bool:
    """Whether an encoder of the user's own has other code or weights than when the data were prepared."""
    from algorithms.extension import is_own
    from data import DatasetInfo
    from tasks.config.params import Data
    from tasks.prepare import encoder_of

    chosen = Data.model_validate(dict(data)).encoder
    if chosen is None or not is_own(chosen.name) or not (prepared / "public.json").exists():
        return False
    encoder = DatasetInfo.read(prepared).encoder
    return encoder is None or encoder.sha256 != encoder_of(chosen).sha256


def has_other_blocks(root: Path) -> bool:
    """Whether the files of blocks are others than those that were prepared.

    DVC watches their names alone: a checksum of their content in dvc.lock would say something about private records.
    """
    from data.card import DataRefusedError, data_card
    from tasks.config import home, params

    try:
        chosen = params.load(root / "params.yaml", reads=("data",)).data
        card = data_card(chosen.dataset, root / "data" / "cards")
        if card.blocks is None:
            return False
        from data import prepared  # here, since most data sets have no blocks, and readers import much
        from data.files import PUBLIC_KEY, owner_key
        from data.reading import blocks_have_changed

        digests = prepared.block_digests(root / "datasets" / "prepared")
        key = PUBLIC_KEY if card.public else owner_key(home())
        return blocks_have_changed(card, chosen.blocks, digests, root=root, key=key)
    except (OSError, DataRefusedError, ParamsRefusedError, ValueError):
        return False  # the stage says what is wrong


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(0, signal.SIGKILL)


@contextmanager
def _lock_repo(*stages: str) -> "Iterator[Repo]":
    """DVC's view of the checkout, with the locks that DVC takes for these stages; waits for other dvc commands.

    DVC takes the locks again, which works within the same process. So a later failure of DVC is due to the stage.
    """
    from dvc.lock import LockError
    from dvc.repo import Repo, lock_repo
    from dvc.rwlock import RWLOCK_FILE, RWLockFileCorruptedError, rwlock

    logging.getLogger("dvc").setLevel(logging.WARNING)  # otherwise it explains how to use git
    logging.getLogger("dvc.stage").setLevel(logging.INFO)
    repo, has_said_so = Repo(), False
    while True:
        with ExitStack() as held:
            try:
                held.enter_context(lock_repo(repo))
                for stage in [one for name in stages for one in repo.stage.collect(name)]:
                    read, written = ([item.fs_path for item in items] for items in (stage.deps, stage.outs))
                    held.enter_context(
                        rwlock(repo.tmp_dir, repo.fs, " ".join(sys.argv), read, written, hardlink=False)
                    )
            except LockError as error:
                if not has_said_so:
                    # With what to do where that command was killed, and another program has its number.
                    why = " ".join(str(error).split())
                    sys.stdout.write(f"waiting for another dvc command in this checkout: {why}\n")
                has_said_so = True
            except RWLockFileCorruptedError:  # a command was killed while it wrote the file
                Path(str(repo.tmp_dir), RWLOCK_FILE).unlink(missing_ok=True)
                continue
            else:
                yield repo
                return
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
