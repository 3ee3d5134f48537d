"""Run stages in a checkout by DVC, one flow at a time.

A refusal of a stage is one sentence on stderr and exit status 2, and its code and fields are in a file, see
`tasks.runs.stage_main`. DVC decides whether a stage has to run. It works in a process of its own, see
`tasks.runs.dvc_process`, which serves all stages of a run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from algorithms.errors import RefusedError
from algorithms.privacy.ledger import system_user
from tasks.config.params import ParamsRefusedError
from tasks.config.temporary_params import restore_params
from tasks.runs.checkout import append_checkout_to_path, find_checkout, missing_in

Say = Callable[[str], object]
STAGES = ("prepare", "calibrate", "train", "evaluate", "report")
REFUSED = "refused: "
"""The prefix of a refusal in a stage's output."""
REFUSAL = Path(".dvc/tmp/epsilonflow-refusal.json")
"""The file in a checkout with the last refusal of a stage: its sentence, code and fields."""
TRAINING_LINE, EXISTING_RESULT = "training ...", "existing result, nothing charged"
"""The line of a train stage that trains, and the prefix of the line of one that hands out an existing result."""
STATUS_REQUEST, END_OF_ANSWER = "anything to do?", "\x1e"
"""The request without a stage, and how the line that ends an answer begins; no program writes a record separator."""
NOTHING_TO_DO = 3
"""The exit status of a request if DVC had nothing to do."""
_KILLED = (f"exited with -{signal.SIGKILL}", f"exited with {128 + signal.SIGKILL}")
"""How DVC's last line ends if a stage was killed; the second if a shell ran it."""
_SECONDS_TO_LEAVE = 5.0
ENDINGS = ((signal.SIGINT, 5.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 1.0))
"""Signals that end a process, with seconds to wait: first an interrupt, on which DVC releases its locks."""


def checkout() -> Path:
    """The checkout in which this process works; raises ParamsRefusedError if the current folder lies in none.

    Code of the user's own is imported from there.
    """
    root = find_checkout()
    if root is None:
        raise ParamsRefusedError(
            "{folder} is no checkout of epsilonflow, it has no {missing}, and lies in none;"
            " change to one, or make one by `epsilonflow init DIR`.",
            code="no_checkout",
            folder=Path.cwd(),
            missing=missing_in(Path.cwd())[0],
        )
    append_checkout_to_path(root)
    return root


class StageRefusedError(RefusedError):
    """A stage refused its input; the message is the stage's sentence.

    code, fields: of the refusal, if it has a code; what JSON has not is its text among the fields.
    """

    def __init__(self, sentence: str, code: str = "", fields: Mapping[str, object] | None = None) -> None:
        super().__init__(sentence)
        self.code, self.fields = code, dict(fields or {})

    def __str__(self) -> str:
        return self.template


class StageFailedError(RuntimeError):
    """A stage failed; the message is the last line that it wrote."""


@contextmanager
def checkout_lock(root: Path, *, say: Say) -> Iterator[None]:
    """Lock the checkout at `root` within the block; if another flow has locked it, say so and wait.

    What a killed run left in params.yaml is taken back first.
    """
    lock = FileLock(root / ".dvc" / "tmp" / "epsilonflow.lock")
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        say("another run holds this checkout: waiting for its end")
        held = lock.acquire()
    with held:
        restore_params(root)
        yield


class DvcProcess:
    """A process in which DVC works in the checkout at `root` for one run; ends with the block, or with this process.

    say: called with each line that DVC and the stages write. If another dvc command is running in the checkout, each
    request waits for it. An exception within the block, such as a cancellation, ends the process and a stage under way.
    """

    def __init__(self, root: Path, *, say: Say) -> None:
        self._root, self._say = root, say

    def __enter__(self) -> Self:
        here = str(Path(sys.executable).parent)
        path = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tasks.runs.dvc_process"],
            cwd=self._root,
            # `python` is this one, output is unbuffered, no module of the user's own is in the way of ours, also in a
            # checkout whose dvc.yaml has no -P, and the user has a name, for DVC
            env=os.environ
            | {"PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "LOGNAME": system_user()},
            stdin=subprocess.PIPE,  # closed whenever and however this process ends
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        return self

    def __exit__(self, *raised: object) -> None:
        with suppress(OSError, subprocess.TimeoutExpired):
            # Also after an interrupt, which DVC leaves to the stage: it would go on to wait for the next request.
            self._write("")
            if raised[0] is None:
                self._process.wait(timeout=_SECONDS_TO_LEAVE)
        _end(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def reproduce(self, stage: str) -> bool:
        """Let DVC run one stage if its dependencies have changed; returns whether they had.

        Records that a killed prepare stage left are deleted. Once the stage has started, nothing is retried, since a
        stage may spend.
        Raises StageRefusedError if the stage refused its input, StageFailedError if it or DVC failed.
        """
        if stage != "prepare":  # which goes on with the records that it encoded before it was killed
            from data.prepared import sweep  # which imports NumPy

            sweep(self._root / "datasets" / "prepared")
        note = self._root / REFUSAL
        note.unlink(missing_ok=True)
        status, lines = self.request(stage)
        if status not in (0, NOTHING_TO_DO):
            for line in lines:
                if line.startswith(REFUSED):
                    raise _refusal(line.removeprefix(REFUSED), note)
            if lines and lines[-1].endswith(_KILLED):
                raise StageFailedError(
                    f"{stage} was killed, as by a system that ran out of memory; rerun the command to resume"
                    " at no extra cost."
                )
            raise StageFailedError(lines[-1] if lines else f"{stage} ended with exit status {status}.")
        return status != NOTHING_TO_DO

    def request(self, what: str) -> tuple[int, list[str]]:
        """Write a request, see `tasks.runs.dvc_process`; returns its exit status and the lines that are not empty."""
        lines = list[str]()
        with suppress(BrokenPipeError):  # it has ended, and its last lines say why
            self._write(what)
        for line in self._process.stdout or ():
            text = line.rstrip()
            if text.startswith(END_OF_ANSWER):
                return int(text.removeprefix(END_OF_ANSWER)), lines
            if text:
                lines.append(text)
                self._say(text)
        return self._process.wait() or 1, lines

    def _write(self, request: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(f"{request}\n")
            self._process.stdin.flush()


def _refusal(sentence: str, note: Path) -> StageRefusedError:
    """The error of a stage that wrote this sentence, with code and fields if the file has them."""
    with suppress(OSError, ValueError):
        match json.loads(note.read_text(encoding="utf-8")):
            case {"sentence": noted, "code": str(code), "fields": dict(fields)} if noted == sentence:
                return StageRefusedError(sentence, code, fields)
    return StageRefusedError(sentence)


def reproduce(stage: str, *, root: Path, say: Say) -> bool:
    """Let DVC run one stage in a process of its own; see `DvcProcess.reproduce`."""
    with DvcProcess(root, say=say) as dvc:
        return dvc.reproduce(stage)


def up_to_date(root: Path, *, say: Say) -> bool:
    """Whether DVC has nothing to do in the checkout at `root`. say: called if this waits for another dvc command."""
    if not (root / "dvc.lock").exists():
        return False  # no stage has ended, so that DVC, which takes a second to start, need not be asked
    with DvcProcess(root, say=say) as dvc:
        status, _ = dvc.request(STATUS_REQUEST)
    return status == NOTHING_TO_DO


def _end(process: subprocess.Popen[str]) -> None:
    """End an interrupted command and all its child processes, so that nothing continues in the checkout or spends."""
    if process.poll() is not None:
        return
    for ending, seconds in ENDINGS:
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
