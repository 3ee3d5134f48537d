"""The live curve: what is sent of a training while it runs, and that nothing at W&B's end can harm or hold it."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from algorithms.privacy.documents import PlanDocument
from tasks.config.params import Tracking
from tasks.tracking import live as module
from tasks.tracking.live import END, live_curve
from tests.support.checkout import PROJECT
from tests.support.synthetic_run import with_entries
from tests.support.waiting import HANG_SECONDS, before_long
from tests.support.wandb_stand_in import standing_in

PLAN = with_entries(
    PlanDocument.read(PROJECT / "tests/golden/plan-00-dp_sgd.json"),
    dataset="digits",
    steps=9,
    target={"delta": 1e-5, "epsilon": 3.0},
    method_params={"secret": "of nobody's concern"},
)
ONLINE = Tracking(mode="online")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the process that talks to W&B: one that writes down its lines; returns the file."""
    told = tmp_path / "told"
    code = f"import sys, pathlib; pathlib.Path({str(told)!r}).write_text(sys.stdin.read())"
    _replace_client(monkeypatch, code)
    return told


def _replace_client(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    start = subprocess.Popen

    def started(_: Any, **how: Any) -> Any:
        return start([sys.executable, "-c", code], **how)

    monkeypatch.setattr(subprocess, "Popen", started)


@contextmanager
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now


def test_a_row_a_second_is_sent_then_the_last_step_and_the_end(
    client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live_curve("run-1", PLAN, ONLINE, group="visits", root=tmp_path) as tell, clock(monkeypatch) as now:
        for step in range(1, 10):
            tell(step, float("inf") if step == 1 else step / 4, 0.5)
            now[0] += 0.4
    opening, *rows = [json.loads(line) for line in client.read_text().splitlines()]
    assert opening["about"] == {
        "algorithm": "dp_sgd",
        "dataset": "digits",
        "steps": 9,
        "delta": 1e-5,
        "target_epsilon": 3.0,
    }
    assert "secret" not in json.dumps(opening)
    assert rows == [
        {"live/step": 1, "live/noise_std": 0.5},
        {"live/step": 4, "live/epsilon_so_far": 1.0, "live/noise_std": 0.5},
        {"live/step": 7, "live/epsilon_so_far": 1.75, "live/noise_std": 0.5},
        {"live/step": 9, "live/epsilon_so_far": 2.25, "live/noise_std": 0.5},
        END,
    ]


def test_a_training_that_fails_does_not_say_that_it_ended(client: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        live_curve("run-1", PLAN, ONLINE, group="visits", root=tmp_path) as tell,
    ):
        tell(1, 0.5, 0.5)
        raise KeyboardInterrupt
    assert [json.loads(line) for line in client.read_text().splitlines()][1:] == [
        {"live/step": 1, "live/epsilon_so_far": 0.5, "live/noise_std": 0.5}
    ]


@pytest.mark.parametrize("rows", [[], [END]])
def test_a_training_that_took_no_step_opens_no_run(
    rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "session", None)  # a call of it would fail
    module.log_rows(
        {"run_id": "run-1", "about": PLAN, "settings": ONLINE.model_dump(), "root": "."}, iter(rows)
    )


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_nothing_is_started_unless_the_mode_is_online(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)  # a call of it would fail
    with live_curve(
        "run-1", PLAN, Tracking.model_validate({"mode": mode}), group="visits", root=tmp_path
    ) as tell:
        tell(1, 0.5, 0.5)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.stdout.write('the server is on fire')", "the server is on fire"),
        ("raise SystemExit(3)", "its client failed"),
        ("import time; time.sleep(60)", "it took longer than 0.2 s"),
    ],
)
def test_a_client_that_fails_or_hangs_costs_one_line_and_never_a_wait(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _replace_client(monkeypatch, code)
    patience = 0.2 if "sleep" in code else HANG_SECONDS
    with (
        caplog.at_level(logging.WARNING),
        live_curve("run-1", PLAN, ONLINE, group="visits", root=tmp_path, patience_seconds=patience) as tell,
        clock(monkeypatch) as now,
    ):
        for step in range(5000):  # more than a pipe holds
            tell(step, 0.5, 0.5)
            now[0] += 1.0
    (line,) = caplog.messages
    assert words in line


def test_no_process_for_it_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with (
        caplog.at_level(logging.WARNING),
        live_curve("run-1", PLAN, ONLINE, group="visits", root=tmp_path) as tell,
    ):
        tell(1, 0.5, 0.5)
    assert caplog.messages == ["W&B gets no live curve of this training: no process for it: no memory"]


def test_a_server_that_does_not_answer_leaves_nothing_behind(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with standing_in(hangs=True) as backend:
        monkeypatch.setenv("WANDB_BASE_URL", backend.known.url)
        with (
            caplog.at_level(logging.WARNING),
            live_curve("run-1", PLAN, ONLINE, group="visits", root=tmp_path, patience_seconds=3.0) as tell,
        ):
            tell(1, 0.5, 0.5)
        (line,) = caplog.messages
        assert "it took longer than 3 s" in line
        assert _clients_end(own_home)


@pytest.mark.soak
def test_a_training_that_was_killed_takes_its_client_with_it(tmp_path: Path, own_home: Path) -> None:
    code = f"""
import time
from pathlib import Path
from algorithms.privacy.documents import PlanDocument
from tasks.config.params import Tracking
from tasks.tracking.live import live_curve
with live_curve("run-1", {PLAN}, Tracking(mode="online"), group="visits", root=Path({str(tmp_path)!r})) as tell:
    tell(1, 0.5, 0.5)
    time.sleep(600)
"""
    with standing_in() as backend:
        own = {"WANDB_BASE_URL": backend.known.url, "WANDB_API_KEY": "0" * 40, "PYTHONPATH": str(PROJECT)}
        training = subprocess.Popen([sys.executable, "-c", code], env=os.environ | own)
        try:
            assert before_long(lambda: [row["live/step"] for row in backend.rows("run-1")] == [1])
        finally:
            training.kill()
            training.wait()
        assert _clients_end(own_home)
        streams = [r.document for r in backend.requests if r.path.endswith("file_stream")]
        assert streams[-1]["exitcode"] == 1


def _clients_end(home: Path) -> bool:
    """Whether the processes that talk to W&B for a test end before long; home: of the test's own."""
    return before_long(lambda: not _clients(home))


def _clients(home: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ", "status"])
        if (process.info["environ"] or {}).get("EPSILONFLOW_HOME") == str(home)
        and re.search("tracking_live|wandb-core", " ".join(process.info["cmdline"] or []))
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]
