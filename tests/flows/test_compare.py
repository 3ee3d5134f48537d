"""The comparison under real Prefect, as a command, and interrupted."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from typer.testing import CliRunner, Result

from flows.cli.main import app
from flows.compare import comparison, plan, run, task_runner
from tasks.comparing import trial as one_cell
from tasks.comparing.files import Place
from tests.support.checkout import PROJECT
from tests.support.comparisons import document, small, write


@pytest.fixture
def place(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A small checkout as the current folder, with a server that is up."""
    root = small(tmp_path / "checkout")
    monkeypatch.chdir(root)
    untracked(root)
    # No lines are sent: at its end the process would try for a minute to reach a server that is gone.
    with temporary_settings({PREFECT_API_URL: server, PREFECT_LOGGING_TO_API_ENABLED: False}):
        yield Place(root, "tiny")


def quick() -> dict[str, Any]:
    """The tiny comparison without what takes time and has tests of its own: curves and all but one figure."""
    return document() | {"record": {}}


def untracked(root: Path) -> None:
    """Logs nothing to W&B: that takes a process a run, and has tests of its own."""
    path = root / "params.yaml"
    path.write_text(path.read_text().replace("mode: offline", "mode: disabled"))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": "200"})


def table(place: Place) -> pd.DataFrame:
    return pd.read_csv(place.folder / "results.csv")


def test_nothing_is_tried_again() -> None:
    assert (plan.retries, run.retries, comparison.retries) == (0, 0, 0)


def test_a_comparison_runs_and_then_has_nothing_to_do(place: Place) -> None:
    file = write(place.root, quick())
    result = call(str(file), "--workers", "2")
    assert result.exit_code == 0, result.output
    assert len(table(place)) == 3
    assert (place.folder / "report.html").exists()
    before = {path: path.stat().st_mtime_ns for path in place.cells.glob("*.json")}
    assert len(before) == 3
    more = quick() | {"epsilons": [1.0, 2.0, 4.0]}
    result = call(str(write(place.root, more)))
    assert result.exit_code == 0, result.output
    assert sorted(table(place)["epsilon"].dropna()) == [1.0, 2.0, 4.0]
    after = {path: path.stat().st_mtime_ns for path in place.cells.glob("*.json")}
    new = after.keys() - before.keys()
    assert len(new) == 1
    cards = [json.loads(path.read_text())["card"]["runs"] for path in after]
    assert cards == [4] * 4


def test_what_cannot_run_is_refused_before_the_first_trains(place: Place) -> None:
    wrong = quick()
    wrong["problems"].append({"dataset": "digits", "model": "logistic"})
    result = call(str(write(place.root, wrong)))
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("refused: ")]
    assert "2 classes" in line
    assert place.finished() == set()
    assert place.ledger_urls() == []


def test_what_cannot_run_is_listed_where_the_file_says_so(place: Place) -> None:
    wrong = quick() | {"skip_refused": True, "seeds": 2}
    wrong["problems"].append({"dataset": "digits", "model": "logistic"})
    result = call(str(write(place.root, wrong)))
    assert result.exit_code == 0, result.output
    assert set(table(place)["model"]) == {"softmax"}
    page = (place.folder / "page.md").read_text()
    assert page.count("2 classes") == 3  # once a method and epsilon, not once a seed


@pytest.mark.parametrize(
    ("change", "words"), [({"tempo": 1}, "unknown key tempo"), ({"name": "other"}, "name must be")]
)
def test_a_file_that_is_wrong_is_refused_in_one_sentence(
    place: Place, change: dict[str, Any], words: str
) -> None:
    result = call(str(write(place.root, quick() | change)))
    assert result.exit_code == 2
    assert [line for line in result.stderr.splitlines() if words in line and line.startswith("refused: ")]
    assert not place.folder.exists()


def test_a_failed_cell_fails_the_flow_and_leaves_the_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = one_cell._trained

    def fails(cell: Any, *rest: Any) -> Any:
        if cell.epsilon == 1.0:
            raise RuntimeError("out of luck")
        return real(cell, *rest)

    monkeypatch.setattr(one_cell, "_trained", fails)
    result = call(str(write(place.root, quick())))
    assert result.exit_code == 1
    assert "1 of 3 cells failed: dp_sgd on digits, softmax, epsilon 1: out of luck" in result.stderr
    assert len(table(place)) == 2
    monkeypatch.undo()
    monkeypatch.chdir(place.root)
    assert call(str(place.root / "comparisons" / "tiny.yaml")).exit_code == 0
    assert len(table(place)) == 3


def test_an_unknown_runner_is_refused(place: Place) -> None:
    result = call(str(write(place.root, quick())), "--runner", "slurm")
    assert result.exit_code == 2
    assert "threads, dask or ray" in result.stderr


@pytest.mark.parametrize(("runner", "name"), [("dask", "DaskTaskRunner"), ("ray", "RayTaskRunner")])
def test_other_runners_are_those_of_their_extras(runner: Any, name: str) -> None:
    pytest.importorskip(f"prefect_{runner}")
    assert type(task_runner(runner, 2)).__name__ == name


def started(place: Place, content: dict[str, Any]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "flows.compare", str(write(place.root, content))],
        cwd=place.root,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # where tests run in the background
    )


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_comparison_keeps_what_is_finished_and_goes_on(
    server: str, place: Place, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """One of its cells would go on for hours, and nobody waits for its end."""
    content = quick() | {"seeds": 3, "epsilons": [1.0]}
    del content["methods"]["plain"]
    long = json.loads(json.dumps(content["methods"]["dp_sgd"]))
    long["algorithm"]["steps"] = 2_000_000
    monkeypatch.setenv("PREFECT_API_URL", server)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    process = started(place, content | {"methods": {**content["methods"], "long": long}})
    while len(place.finished()) < 3 and process.poll() is None:
        time.sleep(0.01)
    try:
        process.send_signal(number)
        complaints = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 128 + number, complaints
    assert complaints.splitlines()[-1].startswith("stopped: finished cells are kept")
    assert len(place.finished()) == 3
    content["seeds"] = 4
    assert call(str(write(place.root, content))).exit_code == 0
    assert len(table(place)) == 4


def test_comparisons_are_run_one_after_the_other_and_dvc_does_not_look_at_them(place: Place) -> None:
    """Their results are files of their own, which know what is finished; DVC's status and graph are the pipeline's."""
    first = write(place.root, quick())
    second = place.root / "comparisons" / "other.yaml"
    second.write_text(first.read_text().replace('"tiny"', '"other"'))
    assert call(str(first), str(second)).exit_code == 0
    assert len(table(place)) == len(table(Place(place.root, "other"))) == 3
    tracked = subprocess.run(
        ["git", "ls-files", "*dvc.yaml"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert "comparisons/dvc.yaml" not in tracked.stdout
