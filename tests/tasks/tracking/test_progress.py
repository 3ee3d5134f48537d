"""What a person sees of a run: a bar or lines while it trains, and the closing table."""

import io
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from algorithms.privacy.accounting import Budget
from algorithms.privacy.documents import Receipt
from algorithms.privacy.ledger import Composition, Ledger
from tasks.runs.summary import outcome_sentence, run_summary, two_columns
from tasks.tracking import live as module
from tasks.tracking.live import progress
from tests.support.checkout import PROJECT
from tests.support.synthetic_run import with_entries, write_run


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


def test_a_resumed_run_counts_its_rate_from_where_it_resumed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its first step promises nothing."""
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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "params.yaml").write_text((PROJECT / "params.yaml").read_text())
    (tmp_path / "artifacts").mkdir()
    write_receipt(tmp_path, population="people", dataset="digits")
    return tmp_path


def write_receipt(root: Path, **entries: Any) -> None:
    made = Receipt.read(write_run(root / f"of {len(entries['dataset'])} letters").artifacts / "receipt.json")
    (root / "artifacts" / "receipt.json").write_text(with_entries(made, **entries).to_text())


def finished(root: Path, **changes: Any) -> dict[str, str]:
    metrics = {
        "test_accuracy": 0.91234,
        "majority_accuracy": 0.73451,
        "test_records": 500,
        "test_auc": 0.95,
        "epsilon": 1.5,
        "delta": 1e-5,
    }
    (root / "artifacts" / "metrics.json").write_text(json.dumps(metrics | changes))
    return dict(run_summary(root))


def test_it_tells_the_result_and_what_the_population_has_left(root: Path, own_home: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    ledger.declare("people", Budget(10.0, 1e-3), public=False)
    ledger.reserve("one", "people", Budget(4.0, 1e-5), events=[], notes={})
    ledger.settle("one", Budget(1.5, 1e-5), events=[])
    ledger.reserve("two", "people", Budget(2.0, 1e-5), events=[], notes={})
    assert finished(root) == {
        "data set": "digits",
        "algorithm": "dp_sgd",
        "test accuracy": "91.23%",
        "AUC": "0.950",
        "majority-class baseline": "73.45%: the model is better than always naming the most frequent class",
        "epsilon of this run": "1.5 at delta 1e-05",
        "population": "people",
        "epsilon spent on it": "1.5",
        "epsilon left for it": "6.5",
        "report": os.path.relpath(root / "artifacts" / "report.html"),
    }


def test_what_is_left_says_that_epsilons_do_not_add_up(root: Path, own_home: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    ledger.declare("people", Budget(10.0, 1e-3), public=False, composition=Composition("renyi", 6.0))
    left = finished(root)["epsilon left for it"]
    assert left == "10 for one more run; Rényi at order 6.0 adds up the runs, not their epsilons"


def test_a_long_name_leaves_room_for_the_numbers(root: Path) -> None:
    write_receipt(root, population="people " * 20, dataset="d" * 90)
    finished(root)
    out = io.StringIO()
    Console(file=out, width=80).print(two_columns(run_summary(root)))
    assert "91.23%" in out.getvalue() and out.getvalue().count("d" * 9) > 2


def test_epsilon_is_rounded_up_as_on_the_card(root: Path) -> None:
    assert finished(root, epsilon=1.69401)["epsilon of this run"] == "1.695 at delta 1e-05"


def test_a_run_without_noise_is_called_not_private(root: Path) -> None:
    assert finished(root, epsilon=None)["epsilon of this run"] == "not private"


@pytest.mark.parametrize("changed", [{"private_noise": False}, {"diagnostics": True}])
def test_a_run_whose_noise_or_diagnostics_promise_nothing_is_called_not_private(
    root: Path, changed: dict[str, bool]
) -> None:
    write_receipt(root, population="people", dataset="d" * 7, **changed)
    assert finished(root)["epsilon of this run"] == "not private"
    assert " on ddddddd without privacy: " in outcome_sentence(root)


def test_a_result_of_another_machine_has_a_population_that_this_ledger_does_not_know(root: Path) -> None:
    rows = finished(root)
    assert rows["epsilon spent on it"] == "unknown to this ledger"
    assert rows["epsilon left for it"] == "unknown to this ledger"
