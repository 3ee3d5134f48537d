"""What a run is charged for is what it does: its records, its noise and the filter that holds it."""

import dataclasses
import json
import shutil
from typing import Any

import pytest

from algorithms.core.calibration import plan_zcdp
from algorithms.core.method import PublicInfo, Target
from algorithms.core.receipt import reserved_events
from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.events import event_to_json
from algorithms.privacy.ledger import Ledger
from data import DataRefusedError
from data.prepared import block_digests
from flows.cli import main
from tasks import train
from tasks.runs.stages import StageRefusedError
from tests.support.refusals import refused
from tests.support.workspace import killed_in
from tests.tasks.test_retraining import Place
from tests.tasks.test_retraining import place as place


def test_noise_that_is_known_is_refused_where_the_plan_was_made_for_secret_noise(place: Place) -> None:
    for stage in ("prepare", "calibrate"):
        place.run_stage(stage, place.root)
    file = place.root / "params.yaml"
    file.write_text(file.read_text().replace("privacy: {", "privacy: {noise: seeded, "))
    with pytest.raises(RefusedError, match="seeded noise protects nobody"):
        train.main()
    assert place.ledger.populations() == []


def test_stages_before_their_turn_say_which_one_is_missing(place: Place) -> None:
    for stage in ("calibrate", "train"):
        with pytest.raises(
            StageRefusedError, match="datasets/prepared holds no prepared data; run the prepare stage"
        ):
            place.run_stage(stage, place.root)
    place.run_stage("prepare", place.root)
    with pytest.raises(StageRefusedError, match=r"plan\.json is not there; run the calibrate stage"):
        place.run_stage("train", place.root)
    place.run_stage("calibrate", place.root)
    (place.root / "datasets/prepared/contents").unlink()
    with pytest.raises(StageRefusedError, match="no whole prepared data; run the prepare stage"):
        place.run_stage("train", place.root)


def test_blocks_that_were_prepared_while_a_run_began_are_not_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place.root / "params.yaml"
    text = file.read_text()
    register = train.register

    def of(block: str) -> None:
        file.write_text(text.replace("dataset: tiny", f"dataset: tiny, blocks: [{block}]"))
        place.run_stage("prepare", place.root)

    def swapped(*given: Any, **named: Any) -> None:
        register(*given, **named)
        of("w2")

    of("w1")
    place.run_stage("calibrate", place.root)
    monkeypatch.setattr(train, "register", swapped)
    with pytest.raises(DataRefusedError, match="made anew while this run began"):
        train.main()
    assert json.loads((place.root / "datasets/prepared/public.json").read_text())["blocks"] == ["w2"]
    assert not (place.root / "artifacts/model.safetensors").exists()


def test_a_run_under_a_zcdp_filter_reserves_what_the_filter_lets_through() -> None:
    public = PublicInfo(records=1000, parameters=10, layers=1, classes=2)
    plan = plan_zcdp(0.01, target=Target(Budget(1.0, 1e-5)), public=public, steps=5)
    edited = dataclasses.replace(plan, schedule=[])
    assert reserved_events(edited) == [{"event": event_to_json(plan.schedule[0][0]), "count": 1}]


def test_a_run_that_is_repeated_with_other_code_gives_no_second_model_for_one_charge(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when it was settled and before its result was kept, then repeated with the same noise."""
    settle, by_name = Ledger.settle, train.by_name
    for stage in ("prepare", "calibrate"):
        place.run_stage(stage, place.root)

    def killed(*given: Any, **named: Any) -> None:
        settle(*given, **named)
        raise KeyboardInterrupt

    with killed_in(Ledger, "settle", killed):
        train.main()
    with monkeypatch.context() as patch, pytest.raises(RefusedError, match="settled with another model"):
        patch.setattr(train, "by_name", lambda model: {k: v + 1 for k, v in by_name(model).items()})
        train.main()
    assert not (place.root / "artifacts/model.safetensors").exists()
    train.main()
    assert (place.root / "artifacts/model.safetensors").exists()
    settled = [entry.run_id for entry in place.ledger.history() if entry.kind == "settle"]
    assert len(set(settled)) == 1


def test_a_block_keeps_its_name_from_when_a_run_is_charged_for_it(place: Place) -> None:
    """A run that its cap refused leaves no name behind, and so does one that was only prepared."""
    file, weeks = place.root / "params.yaml", place.root / "weeks"
    text = file.read_text()

    def run(block: str, epsilon: float) -> None:
        chosen = text.replace("dataset: tiny", f"dataset: tiny, blocks: [{block}]")
        file.write_text(chosen.replace("epsilon: 1.0", f"epsilon: {epsilon}"))
        for stage in ("prepare", "calibrate", "train"):
            place.run_stage(stage, place.root)

    with pytest.raises(StageRefusedError, match="at most epsilon=4"):
        run("w1", 9.0)
    (weeks / "w1.csv").rename(weeks / "week-1.csv")
    run("week-1", 1.0)
    run("week-1", 0.9)
    (weeks / "week-1.csv").rename(weeks / "w1.csv")
    with pytest.raises(
        StageRefusedError, match="'week-1' and 'w1' of population 'tiny' hold exactly the same"
    ):
        run("w1", 1.0)


def test_the_owner_overrules_a_repeat_and_the_ledger_keeps_who(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    weeks = place.root / "weeks"
    shutil.copyfile(weeks / "w1.csv", weeks / "copy.csv")
    for stage in ("prepare", "calibrate"):
        place.run_stage(stage, place.root)
    before = place.ledger.populations()
    with refused("`epsilonflow ledger overrule tiny w1 copy`", BudgetRefusedError):
        train.main()
    assert (before, [row.kind for row in place.ledger.history()]) == ([], ["population"])
    main.app(["ledger", "overrule", "tiny", "copy", "w1", "--by", "who owns it"], standalone_mode=False)
    assert "who owns it says so" in " ".join(capsys.readouterr().out.split())
    train.main()
    said = place.ledger.history()[1].to_json()
    assert (said["kind"], said["about"]) == ("cap", {"overruled": ["copy", "w1"], "by": "who owns it"})
    assert (place.root / "artifacts/model.safetensors").exists()
    main.app(["ledger", "history"], standalone_mode=False)
    assert "overruled" in capsys.readouterr().out


def test_of_two_checkouts_that_name_a_block_differently_one_alone_is_trained_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run's reservation comes between this one's check and its own."""
    register = train.register
    for stage in ("prepare", "calibrate"):
        place.run_stage(stage, place.root)

    def meanwhile(*given: Any, **named: Any) -> None:
        register(*given, **named)
        held = {f"my-{name}": found for name, found in block_digests(named["prepared"]).items()}
        for name in held:
            place.ledger.declare_block("tiny", name)
        place.ledger.reserve(
            "theirs", "tiny", Budget(0.1, 1e-6), events=[], about={}, blocks=[*held], held=held
        )

    monkeypatch.setattr(train, "register", meanwhile)
    with pytest.raises(BudgetRefusedError, match="'my-w1' and 'w1' of population 'tiny'"):
        train.main()
    assert not (place.root / "artifacts/model.safetensors").exists()
    assert {row.run_id for row in place.ledger.history() if row.kind == "reserve"} == {"theirs"}


def test_records_that_were_prepared_anew_under_the_same_names_are_not_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their description is the same; the block has one record more."""
    bind = train.bind

    def swapped(*given: Any, **named: Any) -> None:
        week = place.root / "weeks/w1.csv"
        lines = week.read_text().splitlines(keepends=True)
        week.write_text("".join([*lines, lines[-1]]))
        place.run_stage("prepare", place.root)
        bind(*given, **named)

    for stage in ("prepare", "calibrate"):
        place.run_stage(stage, place.root)
    monkeypatch.setattr(train, "bind", swapped)
    with pytest.raises(DataRefusedError, match="made anew while this run began"):
        train.main()
    assert not (place.root / "artifacts/model.safetensors").exists()
