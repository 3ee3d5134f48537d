"""What the benchmark of killed retrainings would see: each thing that must hold, broken by hand."""

import re
import sqlite3
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest
import torch

from algorithms.core import checkpoint
from algorithms.privacy.accounting import Budget
from algorithms.privacy.barrier.importance_sampling import LastNorms
from algorithms.privacy.barrier.trace import ReleaseRow, Trace
from algorithms.privacy.ledger import Ledger
from tests.soak.kills_check import ended_badly, fell, problems, rows_of
from tests.soak.kills_place import POPULATION, Place, make
from tests.support.checkout import PROJECT

EVENTS = [{"event": {"type": "GaussianDpEvent", "noise_multiplier": 8.0}, "count": 5}]
STEP = '{"type": "GaussianDpEvent", "noise_multiplier": 8.0}'


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """With a run that is reserved for the first week."""
    made = make(tmp_path, None)
    ledger = Ledger.open(made.url)
    ledger.declare(POPULATION, Budget(6.0, 1e-5), public=False)
    reserve(made, "0123456789abcdef-1", 0)
    return made


def reserve(place: Place, run_id: str, week: int) -> None:
    notes = {"retraining": f"{POPULATION} {place.period(week)}"}
    Ledger.open(place.url).reserve(run_id, POPULATION, Budget(1.0, 1e-6), events=EVENTS, notes=notes)


def release(place: Place, run_id: str, count: int) -> None:
    """Leaves a checkpoint with so many releases."""
    folder = place.home / "runs" / run_id
    folder.mkdir(parents=True)
    numbers = {
        "sampling_rate": 1.0,
        "clip_norm": 1.0,
        "noise_multiplier": 8.0,
        "noise_std": 8.0,
        "divisor": 1.0,
    }
    words = {
        "kind": "gradient",
        "event": STEP,
        "sampling": "full batch",
        "clipping": "L2",
        "noise": "gaussian",
    }
    trace = Trace([ReleaseRow(release=n, step=n, epsilon=0.1, **words, **numbers) for n in range(count)])
    state = {"parameters": torch.zeros(2)}
    checkpoint.save(folder, state, run_id=run_id, step=count, trace=trace, last_norms=LastNorms())


@pytest.mark.parametrize(
    ("run_id", "count", "wrong"),
    [
        ("0123456789abcdef-1", 5, []),
        ("0123456789abcdef-1", 6, ["run 0123456789abcdef-1 released more than it reserved"]),
        ("0123456789abcdef-2", 1, ["run 0123456789abcdef-2 released without a reservation"]),
    ],
)
def test_what_was_released_is_compared_with_what_is_reserved(
    place: Place, run_id: str, count: int, wrong: list[str]
) -> None:
    release(place, run_id, count)
    assert problems(place, [], rows_of(place)) == wrong
    assert fell(place, rows_of(place), 0) == "before it began"


def test_what_is_left_of_a_run_that_has_ended_is_seen(place: Place) -> None:
    place.states.mkdir(parents=True)
    (place.states / f"{place.period(0)}.json").write_text('{"kind": "forfeited"}')
    Ledger.open(place.url).forfeit("0123456789abcdef-1")
    assert ended_badly(place, rows_of(place), 0) == []
    folder = place.home / "runs/0123456789abcdef-1"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    assert ended_badly(place, rows_of(place), 0) == ["a run that was forfeited is still there"]
    (folder / "generator.key").touch()
    assert "a run that has ended keeps secrets" in ended_badly(place, rows_of(place), 0)


def test_rows_that_are_lost_changed_or_charged_twice_are_seen(place: Place) -> None:
    rows = rows_of(place)
    assert [row["kind"] for row in rows] == ["population", "reserve"]
    assert problems(place, rows, rows[:1]) == ["a row was lost or changed"]
    with closing(sqlite3.connect(place.url.removeprefix("sqlite:///"))) as connection, connection:
        connection.execute("DROP TRIGGER epsilonflow_ledger_no_update")
        connection.execute("UPDATE epsilonflow_ledger SET epsilon = 0.5 WHERE seq = 2")
    assert problems(place, rows, rows_of(place)) == ["a row was lost or changed", "the chain does not hold"]


def test_two_charges_of_a_period_are_seen(place: Place) -> None:
    rows = rows_of(place)
    twice = [*rows, rows[1] | {"run_id": "another"}]
    assert "a period was charged twice" in problems(place, rows, twice)
    reserve(place, "fedcba9876543210-1", 1)
    assert problems(place, rows, rows_of(place)) == []


_NIGHTLY = re.findall(r"python -m (tests\.soak\.\w+)", (PROJECT / "Makefile").read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", _NIGHTLY)
def test_what_takes_a_night_can_be_started(module: str) -> None:
    """It is run by hand, so a name that is gone would be found out late."""
    assert callable(import_module(module).main)
