"""What a person sees of a long training: a bar on a terminal, lines elsewhere."""

import io
import logging
from types import SimpleNamespace

import pytest
from rich.console import Console

from tasks.tracking import live as module
from tasks.tracking.live import progress


def test_a_terminal_shows_steps_epsilon_and_time_left() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with progress(40, console=console) as tell:
        for step in range(1, 31):
            tell(step, step / 10, 1.0)
    shown = screen.getvalue()
    assert "30/40" in shown
    assert "epsilon so far 3" in shown
    assert "steps/s" in shown


def test_elsewhere_there_is_a_line_every_few_seconds_and_one_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([100.0, *(100.0 + step for step in range(1, 13))])
    # In place of the module, which other threads ask for the time, too.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with caplog.at_level(logging.INFO), progress(12, console=Console(file=io.StringIO())) as tell:
        for step in range(1, 13):
            tell(step, 0.25 * step, 1.0)
    assert caplog.messages == [
        "step 5 of 12, 1.0 steps/s, 7 s left, epsilon so far 1.25",
        "step 10 of 12, 1.0 steps/s, 2 s left, epsilon so far 2.5",
        "step 12 of 12, 1.0 steps/s, 0 s left, epsilon so far 3",
    ]


def test_a_run_that_was_resumed_counts_its_rate_from_there_and_its_first_step_promises_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 10.0, 20.0])
    # In place of the module, which other threads ask for the time, too.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with caplog.at_level(logging.INFO), progress(1000, console=Console(file=io.StringIO())) as tell:
        tell(901, 1.0, 1.0)
        tell(905, 1.1, 1.0)
    assert caplog.messages == [
        "step 901 of 1000, 0.1 steps/s, epsilon so far 1",
        "step 905 of 1000, 0.2 steps/s, 380 s left, epsilon so far 1.1",
    ]
