"""The closing table: what a person reads after a run."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Ledger
from tasks.runs.quality import run_summary
from tests.support.checkout import PROJECT


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "params.yaml").write_text((PROJECT / "params.yaml").read_text())
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "receipt.json").write_text(
        json.dumps({"population": "people", "dataset": "digits", "algorithm": "dp_sgd"})
    )
    return tmp_path


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
    return dict(run_summary(root).rows())


def test_it_tells_the_result_and_what_the_population_has_left(root: Path, own_home: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    ledger.declare("people", Budget(10.0, 1e-3), public=False)
    ledger.reserve("one", "people", Budget(4.0, 1e-5), events=[], about={})
    ledger.settle("one", Budget(1.5, 1e-5), events=[])
    ledger.reserve("two", "people", Budget(2.0, 1e-5), events=[], about={})
    assert finished(root) == {
        "data set": "digits",
        "algorithm": "dp_sgd",
        "test accuracy": "91.23%",
        "AUC, F1, calibration error": "0.950, none, none",
        "majority-class baseline": "73.45%: the model is better than always naming the most frequent class",
        "epsilon of this run": "1.5 at delta 1e-05",
        "population": "people",
        "epsilon spent on it": "1.5",
        "epsilon left for it": "6.5",
        "report": os.path.relpath(root / "artifacts" / "report.html"),
    }


def test_a_long_name_leaves_room_for_the_numbers(root: Path) -> None:
    (root / "artifacts" / "receipt.json").write_text(
        json.dumps({"population": "people " * 20, "dataset": "d" * 90, "algorithm": "dp_sgd"})
    )
    finished(root)
    out = io.StringIO()
    Console(file=out, width=80).print(run_summary(root).table())
    assert "91.23%" in out.getvalue() and out.getvalue().count("d" * 9) > 2


def test_a_run_without_noise_is_called_not_private(root: Path) -> None:
    assert finished(root, epsilon=None)["epsilon of this run"] == "not private"


def test_a_result_of_another_machine_has_a_population_that_this_ledger_does_not_know(root: Path) -> None:
    rows = finished(root)
    assert rows["epsilon spent on it"] == "unknown to this ledger"
    assert rows["epsilon left for it"] == "unknown to this ledger"
