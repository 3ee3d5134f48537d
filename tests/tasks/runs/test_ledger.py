"""What the train stage charges: its records, blocks, noise and the filter that holds it."""

import dataclasses
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from algorithms.core.calibration import plan_renyi, plan_zcdp
from algorithms.core.checkpoint import cpu_copies
from algorithms.core.plan import Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.receipt import reserved_events
from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import group_privacy, rdp
from algorithms.privacy.accounting.events import RenyiDpEvent, event_to_json, schedule_from_json
from algorithms.privacy.accounting.filters import RenyiFilter
from algorithms.privacy.ledger import (
    WHOLE_POPULATION,
    Composition,
    Ledger,
    check_usual,
    contents,
    export,
    restore,
)
from algorithms.privacy.ledger.state import digest_schemes
from data import DataRefusedError, DatasetInfo, dataset_info
from data.card import DataCard
from data.prepared import block_digests
from data.reading import SCHEME
from flows.cli import main
from tasks import calibrate, evaluate, model_file, train
from tasks.config import params
from tasks.preflight import preview
from tasks.runs.dvc_stages import StageRefusedError
from tasks.runs.ledger import bind, declare, register
from tests.support.checkout import PROJECT
from tests.support.refusals import refused, refused_as
from tests.support.retraining import Place
from tests.support.retraining import place as place
from tests.support.synthetic_run import description
from tests.support.workspace import Workspace, killed_in


def test_the_ledger_knows_the_schemes_of_the_digests_of_blocks() -> None:
    """Else it would take all blocks with the same columns for repeats of one."""
    digests = [f"{SCHEME}0a", "1b"]
    assert (contents(digests), digest_schemes(digests)) == ({"1b"}, {f"{SCHEME}0a"})


def test_private_people_are_charged_in_one_ledger_alone(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, info = workspace.ledger, replace(workspace.info, is_public=False)
    register(first, info, home=workspace.home, prepared=tmp_path)
    bind(first, info, home=workspace.home, prepared=tmp_path)
    register(first, info, home=workspace.home, prepared=tmp_path)
    bind(first, info, home=workspace.home, prepared=tmp_path)
    other = Ledger.open(f"sqlite:///{workspace.home}/other.sqlite")
    with refused_as("charged_elsewhere", population="digits"):
        register(other, info, home=workspace.home, prepared=tmp_path)
    other.declare("somebody", Budget(1.0, 1e-5), public=True)
    with refused_as("charged_elsewhere", population="digits"):
        register(other, info, home=workspace.home, prepared=tmp_path)
    with refused_as("charged_elsewhere", population="digits"):
        register(other, replace(info, is_public=True), home=workspace.home, prepared=tmp_path)
    assert other.populations() == ["somebody"]
    monkeypatch.setattr(preview, "open_ledger", lambda *_: other)
    monkeypatch.setattr(preview, "home", lambda: workspace.home)
    shutil.copytree(PROJECT / "data/cards", workspace.root / "data/cards")
    with refused_as("charged_elsewhere", population="digits"):  # before any stage starts
        preview.preview_run(workspace.root, params.load(workspace.root / "params.yaml", reads=params.GROUPS))
    export(first, tmp_path / "copy.jsonl")
    moved = f"sqlite:///{workspace.home}/moved.sqlite"
    restore(tmp_path / "copy.jsonl", moved)
    register(Ledger.open(moved), info, home=workspace.home, prepared=tmp_path)


def test_a_plan_refuses_blocks_that_the_card_lacks_as_the_run_would(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(PROJECT / "data/cards", workspace.root / "data/cards")
    settings = params.load(workspace.root / "params.yaml", reads=params.GROUPS)
    monkeypatch.setattr(preview, "open_ledger", lambda *_: workspace.ledger)
    declare(workspace.ledger, workspace.info)
    assert preview.preview_run(workspace.root, settings).fits != 0
    workspace.ledger.declare_block("digits", "january")
    with pytest.raises(RefusedError, match="charged by blocks"):
        workspace.train()
    with refused_as("unlike_population", differing="blocks", blocks="january", dataset="digits"):
        preview.preview_run(workspace.root, settings)


def test_a_home_from_before_has_its_own_ledger_where_people_are_charged(
    workspace: Workspace, tmp_path: Path
) -> None:
    """No mark says which ledger is theirs, but the one in the home has charged them."""
    own, info = workspace.ledger, replace(workspace.info, is_public=False)
    register(own, info, home=workspace.home, prepared=tmp_path)
    other = Ledger.open(f"sqlite:///{workspace.home}/other.sqlite")
    other.declare("somebody", Budget(1.0, 1e-5), public=True)
    check_usual(other, "digits", home=workspace.home)
    own.reserve("first", "digits", Budget(0.1, 1e-6), events=[], notes={})
    elsewhere = f"keep {workspace.home}/ledger.sqlite elsewhere"
    with refused_as("charged_elsewhere", population="digits", remedy=elsewhere):
        register(other, info, home=workspace.home, prepared=tmp_path)
    register(other, replace(info, population="others"), home=workspace.home, prepared=tmp_path)
    register(own, info, home=workspace.home, prepared=tmp_path)


def test_people_belong_to_the_first_ledger_charged_and_not_by_refused_runs(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused run leaves them to any ledger."""
    workspace.declare(is_public=False, population="people", cap_epsilon=1.0, cap_delta=1e-4)
    other = Ledger.open(f"sqlite:///{workspace.home}/other.sqlite")
    with monkeypatch.context() as patch, pytest.raises(BudgetRefusedError):
        patch.setattr(Workspace, "ledger", other)
        workspace.train()
    workspace.set("privacy", epsilon=0.5)
    workspace.train()
    with monkeypatch.context() as patch, refused_as("charged_elsewhere", population="people"):
        patch.setattr(Workspace, "ledger", other)
        patch.setattr(train, "register", lambda *_, **__: None)  # as it was before the first run was reserved
        workspace.set("privacy", epsilon=0.6)
        workspace.train()
    assert [row.kind for row in other.history("people")] == ["population", "reserve"]
    assert [path.read_text().strip() for path in (workspace.home / "ledger_of").iterdir()] == [
        workspace.ledger.history()[0].hash
    ]


def test_a_run_that_chooses_on_the_way_reserves_the_bound_of_its_filter() -> None:
    budget = Budget(3.0, 1e-5)
    facts = PlanningFacts(records=1000, parameters=10, layers=1, classes=2)
    plan = plan_renyi(16.0, target=Target(budget), facts=facts, steps=5, sampling_rate=0.1)
    event = RenyiDpEvent(16.0, RenyiFilter(16.0, budget).limit)
    assert schedule_from_json(reserved_events(plan)) == [(event, 1)]
    assert rdp([(event, 1)], orders=(8.0,))[0] == event.bound


def test_a_population_under_renyi_is_charged_by_the_events_of_its_runs(workspace: Workspace) -> None:
    workspace.declare(composition="renyi", composition_order=8.0, blocks_per_person=2, cap_delta=1e-3)
    receipt = workspace.train()
    balance = workspace.ledger.balance("digits")
    assert (balance.composition, balance.blocks_per_person) == (Composition("renyi", 8.0), 2)
    (block,) = workspace.ledger.blocks("digits")
    of_two = [(group_privacy(event, 2), count) for event, count in schedule_from_json(receipt["events"])]
    assert block.limit[0] - block.left[0] == pytest.approx(rdp(of_two, orders=(8.0,))[0])
    assert receipt["ledger"]["first"] == workspace.ledger.history()[0].hash
    workspace.declare(composition="zcdp", composition_order=None)
    workspace.mark_used()
    with refused_as("unlike_population", differing="composition", declared_count=2):
        workspace.train()


def test_a_card_that_plans_many_runs_gets_its_order_from_the_first_and_keeps_it(workspace: Workspace) -> None:
    workspace.declare(composition="renyi", composition_runs=10, cap_epsilon=30.0, cap_delta=1e-3)
    receipt = workspace.train()
    composition = workspace.ledger.balance("digits").composition
    assert composition.kind == "renyi" and receipt["ledger"]["composition"] == composition.to_json()
    once, after_ten = receipt["ledger"]["spent"]["epsilon"], receipt["ledger"]["ten_more"]["epsilon"]
    (price,) = (row.to_json()["about"]["price"] for row in workspace.ledger.history() if row.kind == "settle")
    assert after_ten - once == pytest.approx(10 * price)  # the conversion to epsilon is paid once
    assert once <= 1.5 * receipt["epsilon"]["pld"] and after_ten < 11 * receipt["epsilon"]["pld"]
    workspace.set("algorithm", steps=2)  # another plan, for which another order might be best
    workspace.mark_used()
    workspace.train()
    assert workspace.ledger.balance("digits").composition == composition
    workspace.declare(composition_runs=20)  # whose order is the one that is there
    workspace.mark_used()
    workspace.set("algorithm", steps=3)
    workspace.train()
    assert workspace.ledger.balance("digits").composition == composition


def test_a_first_run_that_does_not_fit_fixes_no_order(workspace: Workspace) -> None:
    workspace.declare(
        is_public=False, population="people", composition="renyi", composition_runs=10, cap_epsilon=2.5
    )
    with refused_as("above_cap", BudgetRefusedError, population="people", cap=2.5):
        workspace.train()
    assert workspace.ledger.populations() == []
    workspace.set("privacy", epsilon=0.5)
    workspace.train()
    assert workspace.ledger.is_charged("people")


def test_a_card_that_plans_many_runs_takes_the_sums_of_a_population_that_exists(workspace: Workspace) -> None:
    workspace.train()
    workspace.declare(composition="renyi", composition_runs=10)
    workspace.mark_used()
    workspace.train()
    assert workspace.ledger.balance("digits").composition == Composition("basic")


def test_a_run_on_blocks_charges_each_of_them_and_a_spent_one_refuses_it(workspace: Workspace) -> None:
    ledger = workspace.ledger
    ledger.declare("digits", Budget(10.0, 1e-3), public=True)
    ledger.declare_block("digits", "january", Budget(4.0, 1e-3))
    ledger.declare_block("digits", "february")
    settings = params.load(workspace.root / "params.yaml", reads=train.READS)
    artifacts, prepared = workspace.root / "artifacts", workspace.root / "datasets/prepared"
    plan = (artifacts / "plan.json").read_bytes()
    job = train.Job(settings, plan, prepared, workspace.info, blocks=("january", "february"))

    def run() -> None:
        train.train(job, ledger=ledger, home=workspace.home, root=workspace.root, artifacts=artifacts)

    run()
    spent = [ledger.balance("digits", block).spent.epsilon for block in ("january", "february")]
    assert spent == [job.plan.cost.epsilon] * 2
    assert calibrate.plan_for(settings, workspace.info).cost == job.plan.cost
    workspace.mark_used()
    shutil.rmtree(workspace.home / "runs")
    with refused_as("budget_exceeded", BudgetRefusedError, population="digits", block="january"):
        run()
    assert ledger.balance("digits", "february").spent.epsilon == job.plan.cost.epsilon


def _charge(ledger: Ledger, block: str = WHOLE_POPULATION) -> None:
    ledger.reserve("first", "painters", Budget(0.1, 1e-6), events=[], notes={}, blocks=(block,))


def test_a_private_population_keeps_its_rule_of_the_holdout(tmp_path: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    first = replace(description(), holdout_rule="a")
    for info in (replace(first, holdout_rule="z"), first, first):
        declare(ledger, info)
    _charge(ledger)
    declare(ledger, first)
    for rule in ("b", None):
        with refused("records trained on could be published as held out"):
            declare(ledger, replace(first, holdout_rule=rule))
    declare(ledger, replace(first, holdout_rule="b", population="others"))


@pytest.mark.parametrize("public", [True, False])
def test_a_population_keeps_its_unit_from_its_first_run_on(tmp_path: Path, public: bool) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    patients = replace(description(), unit="one patient", holdout_rule="a", is_public=public)
    visits = replace(patients, unit="one visit")
    for chosen in (visits, patients):
        declare(ledger, chosen)
    _charge(ledger)
    declare(ledger, patients)
    before = ledger.head()
    with refused(r"counts 'one patient'.* but the card of 'animals' says 'one visit'"):
        declare(ledger, visits)
    assert ledger.head() == before
    declare(ledger, replace(visits, population="others"))


@pytest.mark.parametrize(
    ("person", "words"),
    [
        (None, "holds out other records"),
        ({"column": "reason"}, "holds out other records"),
        ({"column": "who", "per_person": 3, "group_privacy": True}, "at most 1 records of a person"),
    ],
    ids=["rows stand for themselves", "another column names the person", "a person has several records"],
)
def test_a_private_population_keeps_how_rows_belong_to_people(
    tmp_path: Path, person: dict[str, Any] | None, words: str
) -> None:
    """Several rows of a person that are one record need no term: the person adds that record alone."""
    card = YAML(typ="safe").load((PROJECT / "examples/own_data/visits.yaml").read_text())
    names = [column["name"] for column in card["reader"]["columns"]]
    card["reader"]["columns"][names.index("reason")] = {"name": "reason", "kind": "ignored"}
    card["reader"]["columns"].insert(0, {"name": "who", "kind": "ignored"})

    def info_of(person: dict[str, Any] | None) -> DatasetInfo:
        own = {} if person is None else {"person": person}
        return dataset_info(
            DataCard.model_validate_json(json.dumps({**card, "population": "painters", **own})), "none"
        )

    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    declare(ledger, info_of({"column": "who"}))
    _charge(ledger)
    before = ledger.head()
    declare(ledger, info_of({"column": "who", "per_person": 3}))
    with refused(words):
        declare(ledger, info_of(person))
    assert ledger.head() == before


def test_a_private_population_keeps_what_makes_its_blocks(tmp_path: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    whole = replace(description(), holdout_rule="a")
    first = replace(whole, blocks_by="the column 'week' of a query", blocks=("monday",))
    for info in (whole, first, whole, first):
        declare(ledger, info)
    _charge(ledger, "monday")
    before = ledger.head()
    for way in ("the column 'region' of a query", "the files of a folder"):
        words = re.escape(
            f"are made by the column 'week' of a query, but the card of 'animals' makes them by {way}"
        )
        with refused(words):
            declare(ledger, replace(first, blocks_by=way, blocks=("north",)))
    assert (ledger.head(), len(ledger.blocks("painters"))) == (before, 1)


def test_a_card_that_moves_records_to_the_other_side_is_refused_before_anything_is_spent(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corrected bound encodes every record anew, and with it draws the split anew."""
    card = (PROJECT / "examples/own_data/visits.yaml").read_text()
    (tmp_path / "data/cards").mkdir(parents=True)
    (tmp_path / "examples").symlink_to(PROJECT / "examples")

    workspace = Workspace(tmp_path, own_home)

    def prepared(text: str) -> None:
        (tmp_path / "data/cards/visits.yaml").write_text(text)
        workspace.prepare("visits")

    prepared(card)
    workspace.set("algorithm", expected_batch_size=None, sampling_rate=0.1)
    workspace.set("privacy", epsilon=1.0)
    workspace.train()
    monkeypatch.chdir(tmp_path)
    evaluate.main()
    before = workspace.ledger.head()
    prepared(card.replace("[18, 100]", "[18, 110]"))
    workspace.set("privacy", epsilon=0.5)
    with refused_as("unlike_population", differing="held-out records", population="visits", dataset="visits"):
        workspace.train()
    assert workspace.ledger.head() == before
    with refused_as("unlike_training"):
        evaluate.main()
    prepared(card.replace("epsilon: 10.0", "epsilon: 11.0"))
    workspace.train()
    evaluate.main()


def test_a_run_that_its_cap_refused_binds_the_card_to_nothing(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that comes between another run's declaration and its reservation does not change what that is held to."""
    workspace.declare(is_public=False, population="people", holdout_rule="a", cap_epsilon=2.0, cap_delta=1e-4)
    with pytest.raises(BudgetRefusedError):
        workspace.train()
    workspace.set("privacy", epsilon=1.0)
    workspace.declare(holdout_rule="b")
    with monkeypatch.context() as patch, refused_as("unlike_population", differing="held-out records"):
        other = replace(workspace.info, holdout_rule="c")
        patch.setattr(train, "register", lambda ledger, *_, **__: declare(ledger, other))
        workspace.train()
    assert not (workspace.root / "artifacts/model.safetensors").exists()
    workspace.declare(holdout_rule="c")
    workspace.train()
    with refused_as("unlike_population", differing="held-out records"):
        declare(workspace.ledger, replace(workspace.info, holdout_rule="a"))


def test_noise_that_is_known_is_refused_where_the_plan_was_made_for_secret_noise(place: Place) -> None:
    for stage in ("prepare", "calibrate"):
        place.run_stage(stage, place.root)
    file = place.root / "params.yaml"
    file.write_text(file.read_text().replace("privacy: {", "privacy: {noise: seeded, "))
    with refused_as("bad_keys", keys=("privacy.noise",)):
        train.main()
    assert place.ledger.populations() == []


def test_stages_before_their_turn_say_which_one_is_missing(place: Place) -> None:
    for stage in ("calibrate", "train"):
        with refused_as("not_prepared", StageRefusedError):
            place.run_stage(stage, place.root)
    place.run_stage("prepare", place.root)
    with refused_as("no_plan", StageRefusedError):
        place.run_stage("train", place.root)
    place.run_stage("calibrate", place.root)
    (place.root / "datasets/prepared/contents").unlink()
    with refused_as("not_prepared", StageRefusedError):
        place.run_stage("train", place.root)


def test_a_run_that_was_reserved_goes_on_though_all_its_blocks_are_retired(place: Place) -> None:
    for stage in ("prepare", "calibrate"):
        place.run_stage(stage, place.root)
    with killed_in(train, "run_training"):
        train.main()
    for block in ("w1", "w2"):
        place.ledger.retire_block("tiny", block)
    seen = preview.preview_run(place.root, params.load(place.root / "params.yaml", reads=params.GROUPS))
    assert (seen.fits, seen.is_begun, seen.spent_after) == (0, True, ())
    seen.check()
    place.run_stage("train", place.root)
    assert place.rows("reserve") == place.rows("settle") != []


def test_blocks_that_were_prepared_while_a_run_began_are_not_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place.root / "params.yaml"
    text = file.read_text()

    def of(block: str) -> None:
        file.write_text(text.replace("dataset: tiny", f"dataset: tiny, blocks: [{block}]"))
        place.run_stage("prepare", place.root)

    def swapped(*given: Any, **named: Any) -> None:
        register(*given, **named)
        of("w2")

    of("w1")
    place.run_stage("calibrate", place.root)
    monkeypatch.setattr(train, "register", swapped)
    with refused_as("prepared_anew", DataRefusedError):
        train.main()
    assert json.loads((place.root / "datasets/prepared/public.json").read_text())["blocks"] == ["w2"]
    assert not (place.root / "artifacts/model.safetensors").exists()


def test_a_run_under_a_zcdp_filter_reserves_what_the_filter_lets_through() -> None:
    facts = PlanningFacts(records=1000, parameters=10, layers=1, classes=2)
    plan = plan_zcdp(0.01, target=Target(Budget(1.0, 1e-5)), facts=facts, steps=5)
    edited = dataclasses.replace(plan, schedule=[])
    assert reserved_events(edited) == [{"event": event_to_json(plan.schedule[0][0]), "count": 1}]


def test_a_run_that_is_repeated_with_other_code_gives_no_second_model_for_one_charge(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when it was settled and before its result was kept, then repeated with the same noise."""
    settle = Ledger.settle
    for stage in ("prepare", "calibrate"):
        place.run_stage(stage, place.root)

    def killed(*given: Any, **named: Any) -> None:
        settle(*given, **named)
        raise KeyboardInterrupt

    with killed_in(Ledger, "settle", killed):
        train.main()
    with monkeypatch.context() as patch, pytest.raises(RefusedError, match="settled with another model"):
        patch.setattr(
            model_file, "cpu_copies", lambda model: {k: v + 1 for k, v in cpu_copies(model).items()}
        )
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

    with refused_as("budget_exceeded", StageRefusedError):
        run("w1", 9.0)
    (weeks / "w1.csv").rename(weeks / "week-1.csv")
    run("week-1", 1.0)
    run("week-1", 0.9)
    (weeks / "week-1.csv").rename(weeks / "w1.csv")
    with refused_as("block_repeated", StageRefusedError, block="w1", other="week-1", population="tiny"):
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
    with refused_as("block_repeated", BudgetRefusedError, block="w1", other="copy"):
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
    for stage in ("prepare", "calibrate"):
        place.run_stage(stage, place.root)

    def meanwhile(*given: Any, **named: Any) -> None:
        register(*given, **named)
        held = {f"my-{name}": found for name, found in block_digests(named["prepared"]).items()}
        for name in held:
            place.ledger.declare_block("tiny", name)
        place.ledger.reserve(
            "theirs", "tiny", Budget(0.1, 1e-6), events=[], notes={}, blocks=[*held], content_digests=held
        )

    monkeypatch.setattr(train, "register", meanwhile)
    with refused_as("block_repeated", BudgetRefusedError, other="my-w1", block="w1", population="tiny"):
        train.main()
    assert not (place.root / "artifacts/model.safetensors").exists()
    assert {row.run_id for row in place.ledger.history() if row.kind == "reserve"} == {"theirs"}


def test_records_that_were_prepared_anew_under_the_same_names_are_not_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their description is the same; the block has one record more."""

    def swapped(*given: Any, **named: Any) -> None:
        week = place.root / "weeks/w1.csv"
        lines = week.read_text().splitlines(keepends=True)
        week.write_text("".join([*lines, lines[-1]]))
        place.run_stage("prepare", place.root)
        bind(*given, **named)

    for stage in ("prepare", "calibrate"):
        place.run_stage(stage, place.root)
    monkeypatch.setattr(train, "bind", swapped)
    with refused_as("prepared_anew", DataRefusedError):
        train.main()
    assert not (place.root / "artifacts/model.safetensors").exists()
