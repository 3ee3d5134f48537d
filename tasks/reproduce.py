"""Running stages by DVC, one flow at a time in a checkout.

DVC decides whether a stage has to run. A stage that was started is never tried again here, since it may spend.
"""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.stage import REFUSED

STAGES = ("prepare", "calibrate", "train", "evaluate", "report")

_RUNNING = "Running stage "
_BUSY = ("Unable to acquire lock", "is busy, it is being blocked by")
_ADVICE = (
    "To track the changes",
    "git add",
    "To enable auto",
    "dvc config",
    "Use `dvc push`",
    " lock file 'dvc.lock'",
)
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_POLL_SECONDS = 0.5
_ENDINGS = ((signal.SIGINT, 5.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 1.0))
"""How a command is ended: an interrupt, on which DVC gives its locks back, then harder; with seconds to wait."""

Say = Callable[[str], object]


class StageRefused(ValueError):
    """A stage refused its input; the message is the stage's sentence."""


class StageFailed(RuntimeError):
    """A stage did not succeed; what it wrote says why."""


@contextmanager
def checkout_lock(root: Path, *, say: Say) -> Iterator[None]:
    """Hold the checkout at `root` until the end of the block; wait, and say so, while another flow holds it."""
    path = root / ".dvc" / "tmp" / "epsilonflow.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        told = False
        while not _try_lock(file.fileno()):
            if not told:
                say("another run holds this checkout: waiting for its end")
            told = True
            time.sleep(_POLL_SECONDS)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit status and what it wrote to stdout and stderr, line by line."""

    status: int
    lines: tuple[str, ...]

    def has(self, *texts: str) -> bool:
        """Whether one of the texts stands in one of the lines."""
        return any(text in line for line in self.lines for text in texts)


def reproduce(stage: str, *, root: Path, say: Say) -> bool:
    """Let DVC run one stage of the checkout at `root` if what it depends on has changed; returns whether it ran.

    say: receives what DVC and the stage write, line by line. A lock that another dvc command holds is waited for.
    Nothing is tried a second time once the stage was started, since a stage may spend.
    Raises StageRefused when the stage refused its input, StageFailed when it or DVC failed.
    """
    seen: set[str] = set()
    while True:
        outcome = dvc("repro", "--single-item", stage, root=root, say=lambda line: line in seen or say(line))
        started = outcome.has(f"{_RUNNING}'{stage}'")
        if outcome.status == 0:
            return started
        if not outcome.has(*_BUSY):
            raise _failure(stage, outcome)
        if started:
            raise StageFailed(
                f"{stage} ran, but another dvc command kept DVC from recording it; run the pipeline again."
            )
        if not seen:
            say(f"{stage} waits for another dvc command in this checkout")
        seen.update(outcome.lines)
        time.sleep(_POLL_SECONDS)


def _failure(stage: str, outcome: Outcome) -> StageRefused | StageFailed:
    for line in outcome.lines:
        if line.startswith(REFUSED):
            return StageRefused(line.removeprefix(REFUSED))
    errors = [line.removeprefix("ERROR: ") for line in outcome.lines if line.startswith("ERROR: ")]
    return StageFailed(errors[-1] if errors else f"{stage} ended with exit status {outcome.status}.")


def up_to_date(root: Path, *, say: Say) -> bool:
    """Whether DVC has nothing to do in the checkout at `root`."""
    told = False
    while True:
        outcome = dvc("status", "--quiet", "dvc.yaml", root=root, say=_nothing)
        if not outcome.has(*_BUSY):
            return outcome.status == 0
        if not told:
            say("waiting for another dvc command in this checkout")
        told = True
        time.sleep(_POLL_SECONDS)


def _nothing(_line: str) -> None:
    pass


def dvc(*arguments: str, root: Path, say: Say) -> Outcome:
    """Run a dvc command in `root`; an exception here, such as a cancellation, ends it and what it started."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=root,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines = []
    try:
        for line in process.stdout or ():
            lines.append(_COLOURS.sub("", line).rstrip())
            if lines[-1] and not any(advice in lines[-1] for advice in _ADVICE):
                say(lines[-1])
        return Outcome(process.wait(), tuple(lines))
    finally:
        _end(process)


def _environment() -> Mapping[str, str]:
    """The environment of a stage: its `python` is this one, and its lines are not held back."""
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1", "DVC_NO_ANALYTICS": "1"}


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
