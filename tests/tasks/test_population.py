"""What the train stage reserves: blocks, and the bound of a run that is held by a Rényi filter of its own."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from algorithms.core.calibration import plan_renyi
from algorithms.core.method import PublicInfo, Target
from algorithms.core.receipt import reserved_events
from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import group_privacy, rdp
from algorithms.privacy.accounting.events import RenyiDpEvent, schedule_from_json
from algorithms.privacy.accounting.filters import RenyiFilter
from algorithms.privacy.ledger import WHOLE_POPULATION, Composition, Ledger, export, restore
from algorithms.privacy.ledger.place import check_usual
from tasks import calibrate, evaluate, train
from tasks.config import params
from tasks.runs import preflight
from tasks.runs.ledger import bind, declare, register
from tests.support.checkout import PROJECT
from tests.support.refusals import refused
from tests.support.synthetic_run import description
from tests.support.workspace import Workspace


def test_private_people_are_charged_in_one_ledger_alone(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, public = workspace.ledger, replace(workspace.public, public=False)
    register(first, public, home=workspace.home, prepared=tmp_path)
    bind(first, public, home=workspace.home, prepared=tmp_path)
    register(first, public, home=workspace.home, prepared=tmp_path)
    bind(first, public, home=workspace.home, prepared=tmp_path)
    other = Ledger.open(f"sqlite:///{workspace.home}/other.sqlite")
    with pytest.raises(RefusedError, match="is charged in another ledger"):
        register(other, public, home=workspace.home, prepared=tmp_path)
    other.declare("somebody", Budget(1.0, 1e-5), public=True)
    with pytest.raises(RefusedError, match="is charged in another ledger"):
        register(other, public, home=workspace.home, prepared=tmp_path)
    with pytest.raises(RefusedError, match="is charged in another ledger"):
        register(other, replace(public, public=True), home=workspace.home, prepared=tmp_path)
    assert other.populations() == ["somebody"]
    monkeypatch.setattr(preflight, "open_ledger", lambda *_: other)
    monkeypatch.setattr(preflight, "home", lambda: workspace.home)
    shutil.copytree(PROJECT / "data/cards", workspace.root / "data/cards")
    with pytest.raises(RefusedError, match="is charged in another ledger"):  # before any stage starts
        preflight.outlook(workspace.root, params.load(workspace.root / "params.yaml", reads=params.GROUPS))
    export(first, tmp_path / "copy.jsonl")
    moved = f"sqlite:///{workspace.home}/moved.sqlite"
    restore(tmp_path / "copy.jsonl", moved)
    register(Ledger.open(moved), public, home=workspace.home, prepared=tmp_path)


def test_a_plan_refuses_blocks_that_the_card_lacks_as_the_run_would(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(PROJECT / "data/cards", workspace.root / "data/cards")
    settings = params.load(workspace.root / "params.yaml", reads=params.GROUPS)
    monkeypatch.setattr(preflight, "open_ledger", lambda *_: workspace.ledger)
    declare(workspace.ledger, workspace.public)
    assert preflight.outlook(workspace.root, settings).fits != 0
    workspace.ledger.declare_block("digits", "january")
    with pytest.raises(RefusedError, match="charged by blocks"):
        workspace.train()
    with pytest.raises(RefusedError, match=r"charged by blocks \(january\), but the card of 'digits'"):
        preflight.outlook(workspace.root, settings)


def test_a_home_from_before_has_its_own_ledger_where_people_are_charged(
    workspace: Workspace, tmp_path: Path
) -> None:
    """No mark says which ledger is theirs, but the one in the home has charged them."""
    own, public = workspace.ledger, replace(workspace.public, public=False)
    register(own, public, home=workspace.home, prepared=tmp_path)
    other = Ledger.open(f"sqlite:///{workspace.home}/other.sqlite")
    other.declare("somebody", Budget(1.0, 1e-5), public=True)
    check_usual(other, "digits", home=workspace.home)
    own.reserve("first", "digits", Budget(0.1, 1e-6), events=[], about={})
    with pytest.raises(
        RefusedError, match=r"charged in another ledger .* or keep .*/ledger\.sqlite elsewhere"
    ):
        register(other, public, home=workspace.home, prepared=tmp_path)
    register(other, replace(public, population="others"), home=workspace.home, prepared=tmp_path)
    register(own, public, home=workspace.home, prepared=tmp_path)


def test_a_run_that_is_refused_leaves_people_to_any_ledger_and_the_first_one_charged_keeps_them(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.declare(public=False, population="people", cap_epsilon=1.0, cap_delta=1e-4)
    other = Ledger.open(f"sqlite:///{workspace.home}/other.sqlite")
    with monkeypatch.context() as patch, pytest.raises(BudgetRefusedError):
        patch.setattr(Workspace, "ledger", other)
        workspace.train()
    workspace.set("privacy", epsilon=0.5)
    workspace.train()
    with monkeypatch.context() as patch, pytest.raises(RefusedError, match="charged in another ledger"):
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
    public = PublicInfo(records=1000, parameters=10, layers=1, classes=2)
    plan = plan_renyi(16.0, target=Target(budget), public=public, steps=5, sampling_rate=0.1)
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
    workspace.take_up()
    with pytest.raises(
        RefusedError, match=r"declared under Rényi at order 8\.0 with at most 2 records of a person, but the"
    ):
        workspace.train()


def test_a_run_on_blocks_charges_each_of_them_and_a_spent_one_refuses_it(workspace: Workspace) -> None:
    ledger = workspace.ledger
    ledger.declare("digits", Budget(10.0, 1e-3), public=True)
    ledger.declare_block("digits", "january", Budget(4.0, 1e-3))
    ledger.declare_block("digits", "february")
    settings = params.load(workspace.root / "params.yaml", reads=train.READS)
    artifacts, prepared = workspace.root / "artifacts", workspace.root / "datasets/prepared"
    plan = (artifacts / "plan.json").read_bytes()
    job = train.Job(settings, plan, prepared, workspace.public, blocks=("january", "february"))

    def run() -> None:
        train.train(job, ledger=ledger, home=workspace.home, root=workspace.root, artifacts=artifacts)

    run()
    spent = [ledger.balance("digits", block).spent.epsilon for block in ("january", "february")]
    assert spent == [job.plan.cost.epsilon] * 2
    assert calibrate.plan_for(settings, workspace.public).cost == job.plan.cost
    workspace.take_up()
    shutil.rmtree(workspace.home / "runs")
    with pytest.raises(BudgetRefusedError, match="block 'january' of population 'digits'"):
        run()
    assert ledger.balance("digits", "february").spent.epsilon == job.plan.cost.epsilon


def _charge(ledger: Ledger, block: str = WHOLE_POPULATION) -> None:
    ledger.reserve("first", "painters", Budget(0.1, 1e-6), events=[], about={}, blocks=(block,))


def test_a_private_population_keeps_its_rule_of_the_holdout(tmp_path: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    first = replace(description(), holdout_rule="a")
    for public in (replace(first, holdout_rule="z"), first, first):
        declare(ledger, public)
    _charge(ledger)
    declare(ledger, first)
    for rule in ("b", None):
        with refused("records trained on could be published as held out"):
            declare(ledger, replace(first, holdout_rule=rule))
    declare(ledger, replace(first, holdout_rule="b", population="others"))


@pytest.mark.parametrize("public", [True, False])
def test_a_population_keeps_its_unit_from_its_first_run_on(tmp_path: Path, public: bool) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    patients = replace(description(), unit="one patient", holdout_rule="a", public=public)
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


def test_a_private_population_keeps_what_makes_its_blocks(tmp_path: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    whole = replace(description(), holdout_rule="a")
    first = replace(whole, blocks_by="the column 'week' of a query", blocks=("monday",))
    for public in (whole, first, whole, first):
        declare(ledger, public)
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

    def prepared(text: str) -> None:
        (tmp_path / "data/cards/visits.yaml").write_text(text)
        place.prepare("visits")

    place = Workspace(tmp_path, own_home)
    prepared(card)
    place.set("algorithm", expected_batch_size=None, sampling_rate=0.1)
    place.set("privacy", epsilon=1.0)
    place.train()
    monkeypatch.chdir(tmp_path)
    evaluate.main()
    before = place.ledger.head()
    prepared(card.replace("[18, 100]", "[18, 110]"))
    place.set("privacy", epsilon=0.5)
    with pytest.raises(
        RefusedError, match="population 'visits' holds out other records than the card of 'visits'"
    ):
        place.train()
    assert place.ledger.head() == before
    with pytest.raises(RefusedError, match="describes the data otherwise"):
        evaluate.main()
    prepared(card.replace("epsilon: 10.0", "epsilon: 11.0"))
    place.train()
    evaluate.main()


def test_a_run_that_its_cap_refused_binds_the_card_to_nothing(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that comes between another run's declaration and its reservation does not change what that is held to."""
    workspace.declare(public=False, population="people", holdout_rule="a", cap_epsilon=2.0, cap_delta=1e-4)
    with pytest.raises(BudgetRefusedError):
        workspace.train()
    workspace.set("privacy", epsilon=1.0)
    workspace.declare(holdout_rule="b")
    with monkeypatch.context() as patch, pytest.raises(RefusedError, match="holds out other records"):
        other = replace(workspace.public, holdout_rule="c")
        patch.setattr(train, "register", lambda ledger, *_, **__: declare(ledger, other))
        workspace.train()
    assert not (workspace.root / "artifacts/model.safetensors").exists()
    workspace.declare(holdout_rule="c")
    workspace.train()
    with pytest.raises(RefusedError, match="holds out other records"):
        declare(workspace.ledger, replace(workspace.public, holdout_rule="a"))
