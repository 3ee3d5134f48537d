"""An upgrade that needs less noise, or edits a method, makes nobody pay again for a search that was paid for."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from algorithms.core import calibration
from algorithms.privacy.accounting import noise_search
from algorithms.privacy.ledger import Ledger
from data import DatasetInfo
from tasks import calibrate
from tasks.tuning.search import Search, SearchTrial, tune
from tasks.tuning.search_plan import plan_search
from tasks.tuning.settings import Tuning
from tests.support.refusals import refused

BASE: dict[str, Any] = {
    "data": {"dataset": "digits"},
    "privacy": {"epsilon": 1.0, "delta": 1e-5},
    "algorithm": {"name": "dp_sgd", "expected_batch_size": 256, "steps": 2, "update": {"learning_rate": 1.0}},
    "model": {"name": "softmax"},
    "performance": {"threads": 1},
}
EXACT = noise_search.calibrate


@pytest.fixture
def place(tmp_path: Path, prepared_digits: Path) -> Path:
    shutil.copytree(prepared_digits, tmp_path / "prepared")
    return tmp_path


def search_of(place: Path, base: dict[str, Any] = BASE, **settings: Any) -> Search:
    info = dataclasses.replace(DatasetInfo.read(place / "prepared"), is_public=False)
    (place / "prepared" / "public.json").write_text(info.to_json())
    space = {"algorithm.update.learning_rate": [0.001, 2.0]}
    tuning = Tuning.model_validate({"space": space, "epsilon": 4.0, "trials": {"mean": 1.0}} | settings)
    return Search(tuning, plan_search(tuning, base, info), place / "prepared", info)


def search_before(place: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Search:
    """As planned by a version that took more noise and whose method had another source."""
    with monkeypatch.context() as before:
        before.setattr(calibration, "calibrate", lambda *given, **named: 1.02 * EXACT(*given, **named))
        before.setattr(calibrate, "source_digest", lambda name: "0" * 64)
        return search_of(place, **settings)


def ledger_of(home: Path) -> Ledger:
    return Ledger.open(f"sqlite:///{home}/ledger.sqlite")


def reserved(home: Path) -> int:
    return sum(row.kind == "reserve" for row in ledger_of(home).history("digits"))


def keep(search: Search, home: Path) -> Path:
    """As a run of it keeps it beside its result."""
    (folder := home / "runs" / f"{search.digest(home)}-1" / "result").mkdir(parents=True)
    (folder / "search.json").write_text(search.to_json())
    return folder / "search.json"


def test_the_same_search_gets_the_earlier_result_for_nothing(
    place: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, today = search_before(place, monkeypatch), search_of(place)
    assert earlier.digest(own_home) != today.digest(own_home)
    ids = {
        tune(search, ledger=ledger_of(own_home), home=own_home, root=place).run_id
        for search in (earlier, today)
    }
    assert (len(ids), reserved(own_home)) == (1, 1)
    written = json.loads((place / "tuned/plan.json").read_text())
    assert written["search"]["each"] == earlier.search_plan.epsilon_per_trial


@pytest.mark.parametrize("settings", [{}, {"show_all": "cheaper", "objective": {"on": "private"}}])
def test_only_a_search_that_asked_for_the_same_is_taken_over(
    place: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    today, earlier = search_of(place, **settings), search_before(place, monkeypatch, **settings)
    file = keep(earlier, own_home)
    assert today.or_earlier(own_home).digest(own_home) == earlier.digest(own_home)
    space = {"algorithm.update.learning_rate": [0.001, 3.0]}
    seeded = {**BASE, "model": {"name": "softmax", "seed": 3}}
    for change in ({"epsilon": 3.9}, {"space": space}, {"trials": {"mean": 2.5}}, {"base": seeded}):
        other = search_of(place, **{**settings, **change})
        assert other.or_earlier(own_home) is other
    records = place / "prepared/contents"
    before = records.read_text()
    records.write_text("another" + before)
    assert today.or_earlier(own_home) is today
    records.write_text(before)
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    assert today.or_earlier(own_home) is today
    monkeypatch.delenv("EPSILONFLOW_SPEND_AGAIN")
    paid_again = keep(today, own_home)
    assert today.or_earlier(own_home) is today
    paid_again.unlink()
    file.write_text('{"plan": 3}')
    assert today.or_earlier(own_home) is today


def test_a_plan_that_costs_more_than_it_states_today_is_not_taken_over(
    place: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the events of a search were once priced too low."""
    search = search_before(place, monkeypatch)
    costs = {name: cost / 2 for name, cost in search.search_plan.costs.items()}
    understated = dataclasses.replace(search.search_plan, costs=costs)
    search = dataclasses.replace(search, search_plan=understated)
    assert search.digest(own_home) == search_before(place, monkeypatch).digest(own_home)
    keep(search, own_home)
    today = search_of(place)
    assert today.or_earlier(own_home) is today


def test_an_unfinished_search_of_another_version_is_not_passed_by(
    place: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(trials: Sequence[SearchTrial]) -> None:
        raise KeyboardInterrupt

    earlier, ledger = search_before(place, monkeypatch), ledger_of(own_home)
    with monkeypatch.context() as before:
        before.setattr("algorithms.core.software.source_of", lambda names: "0" * 64)
        with pytest.raises(KeyboardInterrupt):
            tune(earlier, ledger=ledger, home=own_home, root=place, run_all=killed)
    with refused(r"was begun by .* and is not finished"):
        tune(search_of(place), ledger=ledger, home=own_home, root=place)
    assert reserved(own_home) == 1
