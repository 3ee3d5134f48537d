"""What is shown of a training while it runs: its progress here, and its live curve at Weights & Biases.

The progress is a bar on a terminal, otherwise a line every few seconds. The live curve is at most one row per second,
sent by a separate process. Training never waits for that process, and the network client never shares memory with the
records or the key of the noise. Rows that the process does not accept in time are left out of the live curve; the
report has all of them.

W&B's own service process is not enough: `wandb.init` waits for the server, up to its timeout if the server hangs or is
unreachable, and `log` raises in the training if the service has died.

The process gets a line about the training, a line for each row of the curve, and a last line. It ends when its input
ends, so that it does not outlive a training that was killed. Its output is one line that says why it failed.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from pydantic import JsonValue

from tasks.config.params import Tracking
from tasks.tracking import reason, session, wandb_folders

if TYPE_CHECKING:
    from rich.console import Console

    from algorithms.core.training import OnStep
    from algorithms.privacy.documents import PlanDocument

_SECONDS_BETWEEN_LINES = 5.0
_log = logging.getLogger(__name__)
LIVE_STEP = "live/step"
LIVE = (LIVE_STEP, "live/epsilon_so_far", "live/noise_std")
END = {"finished": True}
"""The last line of a training that finished."""
_SECONDS_BETWEEN_ROWS, _SECONDS_TO_FINISH = 1.0, 15
_PATIENCE, _PATIENCE_AFTER_A_FAILURE = 20.0, 2.0


@contextmanager
def progress(steps: int, *, console: "Console | None" = None) -> Iterator["OnStep"]:
    """A callback that shows the progress of a training of `steps` steps: steps, rate, time left, epsilon so far."""
    if not (sys.stderr.isatty() if console is None else console.is_terminal):
        yield _LineLogger(steps)
        return
    from rich.console import Console  # here, since DVC gives a stage no terminal
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}, epsilon so far {task.fields[epsilon]:.3g}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console or Console(stderr=True)) as bar:
        task = bar.add_task("training", total=steps, epsilon=0.0, rate="")

        def on_step(step: int, epsilon: float, _noise_std: float) -> None:
            speed = bar.tasks[0].speed
            rate = f"{speed:.0f} steps/s" if speed else ""
            bar.update(task, completed=step, epsilon=epsilon, rate=rate)

        yield on_step


class _LineLogger:
    """Logs a line about the steps at most once in a while, and one about the last step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began = self._last_line = time.monotonic()
        self._steps_before: int | None = None  # those of an earlier process, which a checkpoint has

    def __call__(self, step: int, epsilon: float, _noise_std: float) -> None:
        if self._steps_before is None:
            self._steps_before = step - 1
        now, done = time.monotonic(), step - self._steps_before
        if now - self._last_line < _SECONDS_BETWEEN_LINES and step < self._steps:
            return
        self._last_line = now
        rate = done / max(now - self._began, 1e-9)
        # The first step also inspects the model, so its time does not predict the others.
        left = f", {(self._steps - step) / rate:.0f} s left" if done > 1 else ""
        _log.info(
            "step %d of %d, %.1f steps/s%s, epsilon so far %.3g", step, self._steps, rate, left, epsilon
        )


@contextmanager
def live_curve(
    run_id: str,
    plan: "PlanDocument",
    settings: Tracking,
    *,
    group: str,
    root: Path,
    patience_seconds: float = _PATIENCE,
) -> Iterator["OnStep"]:
    """A callback that shows the steps of a training at W&B if the mode is online, and otherwise does nothing.

    plan: its document. group: see `group_of`. root: the checkout. patience_seconds: how long W&B may take once the
    training has ended. A failure of W&B does not affect the training, except for that time and one line of the log.
    """
    if settings.mode != "online":
        yield lambda *_: None
        return
    about: dict[str, JsonValue] = {
        "algorithm": plan.algorithm,
        "dataset": plan.dataset,
        "steps": plan.steps,
        "delta": plan.delta,
        "target_epsilon": plan.target.epsilon,
    }
    opening: Opening = {
        "run_id": run_id,
        "group": group,
        "about": about,
        "settings": settings.model_dump(),
        "root": str(root),
    }
    try:
        sender = _Sender(opening)
    except OSError as error:
        _log.warning("W&B gets no live curve of this training: no process for it: %s", error)
        yield lambda *_: None
        return
    try:
        yield sender.take
    except BaseException:
        sender.end(_PATIENCE_AFTER_A_FAILURE, finished=False)
        raise
    sender.end(patience_seconds, finished=True)


class Opening(TypedDict):
    """The first line to the process. about: the run's settings. root: the checkout, for W&B's folders."""

    run_id: str
    group: str
    about: dict[str, JsonValue]
    settings: dict[str, JsonValue]
    root: str


class _Sender:
    """Writes lines to the process, and drops lines for which it would have to wait."""

    def __init__(self, opening: Opening) -> None:
        self._latest: tuple[int, float, float] | None = None
        self._sent = -math.inf
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tasks.tracking.live"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # W&B's own output, which may be long
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        for pipe in (self._input, self._output):  # their other ends may outlive the process
            os.set_blocking(pipe.fileno(), False)
        self._write(opening)

    def take(self, step: int, epsilon: float, noise_std: float) -> None:
        """Send the step, unless the last one was sent less than a second ago."""
        self._latest = (step, epsilon, noise_std)
        now = time.monotonic()
        if now - self._sent >= _SECONDS_BETWEEN_ROWS:
            self._sent = now
            self._send_latest()

    def end(self, patience: float, *, finished: bool) -> None:
        """Send the last step and wait for the process; kill it if it takes too long."""
        self._send_latest()
        if finished:
            self._write(END)
        self._input.close()
        try:
            self._process.wait(patience)
            lines = (self._output.read() or b"").decode(errors="replace").splitlines()
        except subprocess.TimeoutExpired:
            self._kill()
            lines = [f"it took longer than {patience:g} s"]
        if self._process.returncode != 0 or lines:
            why = lines[-1] if lines else "its client failed"
            _log.warning("W&B has no complete live curve of this training, which needs none: %s", why)

    def _send_latest(self) -> None:
        if self._latest is not None:
            values = zip(LIVE, self._latest, strict=True)
            self._write({name: value for name, value in values if math.isfinite(value)})
        self._latest = None

    def _write(self, document: Mapping[str, object]) -> None:
        """Write a line. A line of less than a page is written whole, or not at all if the pipe is full or closed."""
        with contextlib.suppress(OSError):
            os.write(self._input.fileno(), json.dumps(document).encode() + b"\n")

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class UnfinishedError(Exception):
    """Training did not finish, so the run at W&B counts as failed until it is resumed."""


def log_rows(opening: Opening, rows: Iterator[dict[str, float]]) -> None:
    """Log the rows as they come; raises UnfinishedError if they end without END.

    A training that took no step, such as one whose model is refused, opens no run at W&B.
    """
    first = next(rows, END)
    if first == END:
        return
    config = {"run_id": opening["run_id"], **opening["about"]}
    with session(
        Tracking.model_validate(opening["settings"]),
        run_id=opening["run_id"],
        group=opening["group"],
        job_type="train",
        name="{algorithm} on {dataset}, in training".format(**config),
        config=config,
        seconds_to_finish=_SECONDS_TO_FINISH,
    ) as logged:
        logged.define_metric(LIVE_STEP, hidden=True)
        logged.define_metric("live/*", step_metric=LIVE_STEP)
        for row in itertools.chain([first], rows):
            if row == END:
                return
            logged.log({name: row[name] for name in LIVE if name in row})
        raise UnfinishedError("training did not come to its end.")


def main() -> None:
    """`python -P -m tasks.tracking.live`, with lines as input."""
    lines = (json.loads(line) for line in sys.stdin)
    opening = next(lines)
    try:
        with contextlib.suppress(UnfinishedError), wandb_folders(Path(opening["root"])):
            log_rows(opening, lines)
    except Exception as error:
        sys.stdout.write(f"{reason(error)}\n")


if __name__ == "__main__":
    main()
