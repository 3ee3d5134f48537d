"""A stage as a process in a checkout: what it refuses, and how DVC runs it, one flow at a time.

What a stage refuses is one sentence on stderr and exit status 2. DVC decides whether a stage has to run. It works in a
process of its own, `python -m tasks.runs.stages STAGE`, which leads a process group with the stage and ends when the
process that asked for the stage does: nobody is left to spend.
"""

import errno
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
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from tasks.config.params import ParamsRefusedError

if TYPE_CHECKING:
    from dvc.repo import Repo

REFUSED = "refused: "
"""How the sentence of a refusal begins, for whoever reads what a stage wrote."""


def main_of(function: Callable[[], object]) -> None:
    """Run a stage's main function; what it refuses, or a full disk, becomes a sentence on stderr and exit status 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        function()
    except Exception as error:
        words = str(error) if isinstance(error, refusals()) else disk_full(error)
        if words is None:
            raise
        sys.stderr.write(f"{REFUSED}{' '.join(words.split())}\n")
        raise SystemExit(2) from None


def disk_full(error: Exception) -> str | None:
    """What to tell a person where an error is that of a full disk, whichever library met it; else None."""
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if not is_full and os.strerror(errno.ENOSPC) not in str(error):
        return None
    return (
        f"the disk is full; make room where the checkout {Path.cwd()}, the home of its runs and temporary files lie,"
        " then start it again: it goes on where it was."
    )


def refusals() -> tuple[type[ValueError], ...]:
    """What a person may be shown without a traceback."""
    from algorithms.errors import EncoderRefusedError, ModelRefusedError, RefusedError
    from algorithms.extension import NotUsableError
    from data.schema.errors import DataRefusedError

    return (
        DataRefusedError,
        EncoderRefusedError,
        NotUsableError,
        RefusedError,
        ModelRefusedError,
        ParamsRefusedError,
    )


def checkout() -> Path:
    """The checkout this process works in; raises ParamsRefusedError when the current folder is none."""
    root = Path.cwd()
    missing = [name for name in ("params.yaml", "dvc.yaml", ".dvc") if not (root / name).exists()]
    if missing:
        raise ParamsRefusedError(
            f"{root} is no checkout of epsilonflow, it has no {missing[0]}; change to one, or make one by"
            " `epsilonflow init DIR`."
        )
    return root


STAGES = ("prepare", "calibrate", "train", "evaluate", "report")

_NOTHING = 3
"""The exit status of the process where DVC has nothing to do."""
_POLL_SECONDS = 0.5
_ENDINGS = ((signal.SIGINT, 5.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 1.0))
"""How a process is ended: an interrupt, on which DVC gives its locks back, then harder; with seconds to wait."""

Say = Callable[[str], object]


class StageRefusedError(ValueError):
    """A stage refused its input; the message is the stage's sentence."""


class StageFailedError(RuntimeError):
    """A stage did not succeed; what it wrote says why."""


@contextmanager
def checkout_lock(root: Path, *, say: Say) -> Iterator[None]:
    """Hold the checkout at `root` until the end of the block; wait, and say so, while another flow holds it."""
    lock = FileLock(root / ".dvc" / "tmp" / "epsilonflow.lock")
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        say("another run holds this checkout: waiting for its end")
        held = lock.acquire()
    with held:
        yield


def reproduce(stage: str, *, root: Path, say: Say) -> bool:
    """Let DVC run one stage of the checkout at `root` if what it depends on has changed; returns whether it had.

    say: receives what DVC and the stage write, line by line. Another dvc command in the checkout is waited for, but
    nothing is tried a second time once the stage was started, since a stage may spend.
    Raises StageRefusedError when the stage refused its input, StageFailedError when it or DVC failed.
    """
    status, lines = _dvc(stage, root=root, say=say)
    if status not in (0, _NOTHING):
        for line in lines:
            if line.startswith(REFUSED):
                raise StageRefusedError(line.removeprefix(REFUSED))
        raise StageFailedError(lines[-1] if lines else f"{stage} ended with exit status {status}.")
    return status != _NOTHING


def up_to_date(root: Path, *, say: Say) -> bool:
    """Whether DVC has nothing to do in the checkout at `root`. say: receives that another dvc command is waited for."""
    status, _ = _dvc(root=root, say=say)
    return status == _NOTHING


def _dvc(*stage: str, root: Path, say: Say) -> tuple[int, list[str]]:
    """Run `main` in a process, and say what it writes; an exception here, such as a cancellation, ends both.

    Returns the exit status and the lines that are not empty.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.runs.stages", *stage],
        cwd=root,
        env=_environment(),
        stdin=subprocess.PIPE,  # nothing is written there: it is closed when this process ends, however that is
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


def _environment() -> Mapping[str, str]:
    """The environment of a stage: its `python` is this one, and its lines are not held back."""
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"}


def _end(process: subprocess.Popen[str]) -> None:
    """End a command that was cut short and all that it started: nothing may go on in the checkout, or spend."""
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
    """Whether the command, or anything in the process group that it leads, is still there."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Let DVC run the stage that the command line names; without one, ask it whether anything is to be done.

    The exit status is _NOTHING where there was nothing. Ends, and the stage with it, when its input does.
    """
    threading.Thread(target=_end_with_input, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # whatever the one who asked does about it
    from dvc.exceptions import DvcException  # here, since only this process has a use for DVC
    from dvc.lock import LockError

    stages = sys.argv[1:]
    try:
        with _locked(*stages) as repo:
            found = repo.reproduce(*stages, single_item=True) if stages else repo.status(targets="dvc.yaml")
    except DvcException as error:
        if isinstance(error.__cause__, LockError):
            raise SystemExit(
                f"{stages[0]} ran, but another dvc command kept DVC from recording it; run the pipeline again."
            ) from None
        raise SystemExit(f"{error}: {error.__cause__}" if error.__cause__ else str(error)) from None
    raise SystemExit(0 if found else _NOTHING)


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(0, signal.SIGKILL)


@contextmanager
def _locked(*stages: str) -> "Iterator[Repo]":
    """DVC's view of the checkout, with the locks that DVC takes for these stages; waits for other dvc commands.

    DVC takes them again, which it may, being the same process. So what it fails at later is the stage.
    """
    from dvc.lock import LockError
    from dvc.repo import Repo, lock_repo
    from dvc.rwlock import rwlock

    logging.getLogger("dvc").setLevel(logging.WARNING)  # else it explains how to use git
    logging.getLogger("dvc.stage").setLevel(logging.INFO)
    repo, told = Repo(), False
    while True:
        with ExitStack() as held:
            try:
                held.enter_context(lock_repo(repo))
                for stage in [found for name in stages for found in repo.stage.collect(name)]:
                    read, written = ([item.fs_path for item in items] for items in (stage.deps, stage.outs))
                    held.enter_context(
                        rwlock(repo.tmp_dir, repo.fs, " ".join(sys.argv), read, written, hardlink=False)
                    )
            except LockError:
                if not told:
                    sys.stdout.write("waiting for another dvc command in this checkout\n")
                told = True
            else:
                yield repo
                return
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
