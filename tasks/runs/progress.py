"""Progress of a long training: a bar on a terminal, otherwise a line every few seconds."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from algorithms.core.training import OnStep

_SECONDS_BETWEEN_LINES = 5.0
_log = logging.getLogger(__name__)


@contextmanager
def progress(steps: int, *, console: Console | None = None) -> Iterator[OnStep]:
    """A callback that shows the progress of a training of `steps` steps: steps, rate, time left, epsilon so far."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines(steps)
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}, epsilon so far {task.fields[epsilon]:.3g}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=steps, epsilon=0.0, rate="")

        def on_step(step: int, epsilon: float, _noise_std: float) -> None:
            speed = bar.tasks[0].speed
            rate = f"{speed:.0f} steps/s" if speed else ""
            bar.update(task, completed=step, epsilon=epsilon, rate=rate)

        yield on_step


def _lines(steps: int) -> OnStep:
    began = last = time.monotonic()
    first: int | None = None

    def on_step(step: int, epsilon: float, _noise_std: float) -> None:
        nonlocal last, first
        first = step - 1 if first is None else first
        now = time.monotonic()
        if now - last < _SECONDS_BETWEEN_LINES and step < steps:
            return
        last = now
        rate = (step - first) / max(now - began, 1e-9)
        # The first step also inspects the model, so its time does not predict the others.
        left = f", {(steps - step) / rate:.0f} s left" if step - first > 1 else ""
        _log.info("step %d of %d, %.1f steps/s%s, epsilon so far %.3g", step, steps, rate, left, epsilon)

    return on_step
