"""An upgrade that needs less noise, or edits a method, makes nobody pay again for what was paid for."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from algorithms.core import calibration
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.training import Hooks
from algorithms.methods.momentum import Nesterov
from algorithms.privacy.accounting import noise_search
from data import DatasetInfo
from data.prepared import load
from tasks import calibrate, train
from tasks.config import params
from tasks.config.params import GROUPS, Params
from tasks.planned_model import facts_and_notes
from tasks.preflight.preview import preview_run
from tasks.runs import store
from tests.support.refusals import refused
from tests.support.visits import CARD, Visits
from tests.support.visits import unprepared_visits as unprepared_visits
from tests.support.visits import visits as visits

EXACT = noise_search.calibrate


@pytest.fixture(scope="module")
def upgraded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that has an upgrade leaves its checkout and its home for the others."""
    return tmp_path_factory.mktemp("upgraded")


@pytest.fixture
def after_upgrade(visits: Visits, upgraded_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Visits:
    """A run is done by a version that took more noise and whose method had another source."""
    places = {"root": visits.place.root, "home": visits.place.home}
    if not any(upgraded_folder.iterdir()):
        with monkeypatch.context() as before:
            before.setattr(calibration, "calibrate", lambda *given, **named: 1.02 * EXACT(*given, **named))
            before.setattr(calibrate, "source_digest", lambda name: "0" * 64)
            visits.place.set("data", dataset="visits")
            visits.train()
        visits.finish()
        for name, place in places.items():
            shutil.copytree(place, upgraded_folder / name, ignore=shutil.ignore_patterns("examples"))
    else:
        for name, place in places.items():
            shutil.copytree(upgraded_folder / name, place, dirs_exist_ok=True)
    return visits


def plan_of(visits: Visits) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((visits.place.root / "artifacts/plan.json").read_text())
    return plan


def test_the_same_request_gets_the_earlier_plan_and_its_result_for_nothing(after_upgrade: Visits) -> None:
    first, receipt = plan_of(after_upgrade), after_upgrade.place.receipt
    settings = params.load(after_upgrade.place.root / "params.yaml", reads=GROUPS)
    assert calibrate.plan_for(settings, after_upgrade.place.info).noise_multiplier < first["noise_multiplier"]
    assert preview_run(after_upgrade.place.root, settings).is_begun
    calibrate.main()
    assert plan_of(after_upgrade) == first
    assert after_upgrade.train() == receipt["run_id"] and after_upgrade.runs == 1
    after_upgrade.finish()  # with a card that verifies


def test_a_person_who_agrees_to_spend_again_gets_the_new_plan_and_keeps_it(
    after_upgrade: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plan_of(after_upgrade)
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    calibrate.main()
    assert plan_of(after_upgrade)["noise_multiplier"] < first["noise_multiplier"]
    second = after_upgrade.train()
    after_upgrade.finish()
    monkeypatch.delenv("EPSILONFLOW_SPEND_AGAIN")
    calibrate.main()
    assert (after_upgrade.train(), after_upgrade.runs) == (second, 2)


@pytest.mark.parametrize(
    ("group", "value"), [("privacy", {"epsilon": 1.01}), ("algorithm", {"steps": 4}), ("model", {"seed": 7})]
)
def test_another_request_gets_a_plan_of_its_own(
    after_upgrade: Visits, group: str, value: dict[str, Any]
) -> None:
    after_upgrade.place.set(group, **value)
    new = plan_of(after_upgrade)
    calibrate.main()
    assert plan_of(after_upgrade) == new
    after_upgrade.train()
    assert after_upgrade.runs == 2


def test_other_records_get_a_plan_of_their_own(after_upgrade: Visits) -> None:
    digests = after_upgrade.place.root / "datasets/prepared/contents"
    digests.write_text("another" + digests.read_text())
    before = plan_of(after_upgrade)["noise_multiplier"]
    calibrate.main()
    assert plan_of(after_upgrade)["noise_multiplier"] < before


def test_a_plan_that_costs_more_than_its_target_today_is_not_taken_over(
    after_upgrade: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = next((after_upgrade.place.home / "runs").glob("*-1"))
    old = json.loads((folder / "result" / store.PLAN).read_text())
    before = old["noise_multiplier"]
    monkeypatch.setattr(
        store, "training_digest", lambda plan, *_, **__: str(plan["noise_multiplier"] == before)
    )
    folder.rename(folder.with_name("True-1"))
    calibrate.main()
    assert plan_of(after_upgrade) == old
    cheaper = json.dumps(old["schedule"]).replace(str(before), str(before / 2))
    old["schedule"] = json.loads(cheaper)  # as where the price of these events was understated
    (folder.with_name("True-1") / "result" / store.PLAN).write_text(json.dumps(old))
    calibrate.main()
    assert plan_of(after_upgrade)["noise_multiplier"] < before


def test_an_unfinished_run_of_the_other_version_is_not_passed_by(
    visits: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*given: Any, hooks: Hooks, **named: Any) -> None:
        hooks.reserve()
        raise KeyboardInterrupt

    with monkeypatch.context() as before:
        before.setattr(calibration, "calibrate", lambda *given, **named: 1.02 * EXACT(*given, **named))
        before.setattr("algorithms.core.software.source_of", lambda names: "0" * 64)
        visits.place.set("data", dataset="visits")
        before.setattr("tasks.train.run_training", killed)
        with pytest.raises(KeyboardInterrupt):
            visits.train()
    begun = plan_of(visits)
    calibrate.main()
    assert plan_of(visits) == begun
    with refused(r"was begun by .* and is not finished"):
        visits.train()
    assert visits.runs == 1


def test_a_damaged_plan_in_a_run_is_passed_by(after_upgrade: Visits) -> None:
    (file,) = (after_upgrade.place.home / "runs").glob("*-1/result/plan.json")
    file.write_text('{"model": 3}')
    calibrate.main()
    assert Path(after_upgrade.place.root / "artifacts/plan.json").is_file()


def test_a_plan_at_another_delta_is_not_taken_over_where_an_attack_is_the_target(
    visits: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = {"false_alarms": 0.01, "caught": 0.03}
    settings = YAML(typ="safe").load((visits.place.root / "params.yaml").read_text())["privacy"]
    del settings["epsilon"]
    visits.place.set("data", dataset="visits")
    file = visits.place.root / "params.yaml"

    def ask(delta: float) -> None:
        document = YAML(typ="safe").load(file.read_text())
        document["privacy"] = {**settings, "target": attack, "delta": delta}
        with file.open("w") as out:
            YAML().dump(document, out)

    ask(1e-5)
    with monkeypatch.context() as before:
        before.setattr(calibrate, "source_digest", lambda name: "0" * 64)
        calibrate.main()
        visits.train()
    ask(1e-6)
    with refused("made for another delta"):
        train.main()
    calibrate.main()
    assert plan_of(visits)["delta"] == 1e-6


def test_a_plan_for_other_facts_is_passed_by_as_training_would_refuse_it(
    after_upgrade: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a version knows another bound of a loss: calibration would name a plan that training sends back."""
    first = plan_of(after_upgrade)

    def other_facts(settings: Params, info: DatasetInfo) -> tuple[PlanningFacts, tuple[str, ...]]:
        facts, notes = facts_and_notes(settings, info)
        return replace(facts, loss=None), notes

    monkeypatch.setattr(calibrate, "facts_and_notes", other_facts)
    calibrate.main()
    assert plan_of(after_upgrade)["noise_multiplier"] < first["noise_multiplier"]


def test_a_run_under_an_earlier_default_keeps_its_plan_and_its_result(
    visits: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gap that Nesterov's length follows from was 10, whatever the loss: such a run is not paid for again."""
    held = load(visits.place.root / "datasets/prepared")  # the number of records, for a card that declares it
    counts = f"{{train: {len(held.train_labels)}, test: {len(held.test_labels)}}}"
    (visits.place.root / "data/cards/visits.yaml").write_text(CARD.replace("{at_most: 2000}", counts))
    visits.place.prepare("visits")
    document = YAML(typ="safe", pure=True).load(visits.place.root / "params.yaml") | {
        "data": {"dataset": "visits"},
        "model": {"name": "logistic"},
        "algorithm": {"name": "nesterov", "steps": 400, "regularisation": 0.01},
    }
    with monkeypatch.context() as before:
        before.setattr(Nesterov, "gap_at_start", lambda self, facts: 10.0)
        visits.place.write(document)
        run_id = visits.train()
    first = plan_of(visits)
    settings = params.load(visits.place.root / "params.yaml", reads=GROUPS)
    assert calibrate.plan_for(settings, visits.place.info).steps < first["steps"]
    calibrate.main()
    assert plan_of(visits) == first
    assert visits.train() == run_id and visits.runs == 1
