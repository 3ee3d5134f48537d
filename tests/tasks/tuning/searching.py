"""A search on digits, with the folder and the ledger that it needs."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from algorithms.privacy.ledger import Ledger
from tasks.tuning.search import SearchTrial

BASE: dict[str, Any] = {
    "data": {"dataset": "digits"},
    "privacy": {"epsilon": 1.0, "delta": 1e-5},
    "algorithm": {"name": "dp_sgd", "expected_batch_size": 256, "steps": 4, "update": {"learning_rate": 1.0}},
    "model": {"name": "softmax"},
    "performance": {"threads": 1},
}
SPACE = {"algorithm.update.learning_rate": [0.001, 2.0]}


@pytest.fixture
def place(tmp_path: Path, prepared_digits: Path) -> Path:
    shutil.copytree(prepared_digits, tmp_path / "prepared")
    return tmp_path


def ledger_of(home: Path) -> Ledger:
    return Ledger.open(f"sqlite:///{home}/ledger.sqlite")


def never(trials: Sequence[SearchTrial]) -> None:
    raise AssertionError("a trial ran")
