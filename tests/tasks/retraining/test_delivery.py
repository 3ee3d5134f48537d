"""Scheduled retraining: one charge a period however it is delivered; every way out settles, forfeits or resumes."""

import errno
import json
import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from algorithms.core.training import Hooks
from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Balance, Choice, Ledger
from flows.cli.main import app
from tasks import retraining, train
from tasks.config import temporary_params
from tasks.config.params import ParamsRefusedError
from tasks.retraining import Registry, Retraining, RetrainingStates, delivery
from tasks.retraining.affordable_epsilon import epsilon_for
from tasks.retraining.delivery import Outcome
from tests.support.beginnings import Beginnings
from tests.support.retraining import CARD, CARD_FILE, MONDAY, PARAMS, SETTINGS, Place
from tests.support.retraining import place as place
from tests.support.soak import soak_but
from tests.support.transactions import transactions
from tests.support.workspace import killed_in


@pytest.fixture
def delivered(place: Place, beginnings: Beginnings) -> Place:
    """The checkout after the retraining of its first week."""
    beginnings.begin("delivered", place.folders, place.deliver)
    return place


def disk_full(*_: Any, hooks: Hooks, **__: Any) -> None:
    hooks.reserve()
    raise OSError("no space left")


def test_a_period_is_retrained_once_and_a_new_block_starts_the_next(place: Place) -> None:
    assert place.deliver().kind == "promoted"
    head = place.ledger.head()
    for late in range(2):
        assert place.deliver().kind == "done", late
    assert place.ledger.head() == head
    assert "none of the blocks" in place.deliver(1).message
    place.arrive("w3")
    second = place.deliver(1)
    assert (second.kind, len(place.rows("reserve")), len(place.rows("settle"))) == ("promoted", 2, 2)
    public = json.loads((place.root / "datasets/prepared/public.json").read_text())
    assert public["blocks"] == ["w1", "w2", "w3"]
    assert json.loads((place.root / "artifacts/receipt.json").read_text())["blocks"] == ["w1", "w2", "w3"]
    assert place.ledger.run_of("tiny", "visits 2026-W03") == place.rows("settle")[1]


def test_no_block_exceeds_its_cap_and_exhausted_ones_retire(place: Place) -> None:
    renyi = CARD | {"composition": {"kind": "renyi", "order": 6.0}, "cap": {"epsilon": 4.0, "delta": 1e-5}}
    YAML(typ="safe", pure=True).dump(renyi, place.root / CARD_FILE)
    for week, name in enumerate(("w3", "w4", "w5")):
        place.arrive(name)
        place.deliver(week)
    blocks = {block.name: block for block in place.ledger.blocks("tiny")}
    assert [name for name, block in blocks.items() if block.retired] == ["w1", "w2", "w3"]
    assert [block.runs for block in blocks.values()] == [3, 3, 3, 2, 1]
    for name, block in blocks.items():
        spent = place.ledger.balance("tiny", name).spent.epsilon
        assert 0 <= block.left[0] <= block.limit[0]
        assert spent <= 4.0
    assert place.ledger.balance("tiny", "w1").spent.epsilon > 3.9


def test_a_cancelled_run_is_taken_up_first_by_whatever_comes_next(place: Place) -> None:
    with killed_in(train, "run_training"):
        place.deliver()
    (run_id,) = place.rows("reserve")
    assert place.ledger.status(run_id) == "open"
    (place.root / "params.yaml").write_text(
        (place.root / "params.yaml").read_text().replace("steps: 4", "steps: 9")
    )
    place.arrive("w3")
    assert place.deliver(1).kind == "promoted"
    assert place.rows("settle")[0] == run_id
    assert len(place.rows("reserve")) == 2
    served = Registry(place.root / "models/visits")
    assert served.serving is not None
    assert served.serving.name == place.rows("reserve")[1]
    assert (served.folder / run_id / "model.safetensors").is_file()


def test_a_fault_that_lasts_forfeits_nothing_and_the_run_goes_on_when_it_has_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(train, "run_training", disk_full)
        for week in range(3):  # and it comes before what is due
            found = place.deliver(week)
            (run_id,) = place.rows("reserve")
            assert (
                found.kind,
                f"no space left. Run {run_id} is charged; the next delivery resumes it" in found.message,
            ) == ("failed", True)
    place.arrive("w3")
    assert place.deliver(3).kind == "promoted"
    assert place.rows("forfeit") == []
    assert place.rows("settle") == place.rows("reserve")
    assert place.rows("settle")[0] == run_id and len(place.rows("settle")) == 2


def test_a_person_ends_what_keeps_failing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (place.root / "params.yaml").read_text()

    YAML(typ="safe", pure=True).dump(SETTINGS, place.root / "retrain.yaml")
    with monkeypatch.context() as patch:
        patch.setattr(train, "run_training", disk_full)
        place.deliver()
    asked = CliRunner().invoke(app, ["retrain", "--give-up"], input="n\n")
    assert (asked.exit_code, place.rows("forfeit")) == (2, [])
    ended = CliRunner().invoke(app, ["retrain", "--give-up", "--yes"])
    (run_id,) = place.rows("forfeit")
    assert f"the whole reservation of run {run_id}" in " ".join(ended.output.split())
    assert not list((Path(os.environ["EPSILONFLOW_HOME"]) / "runs").iterdir())
    assert (place.root / "params.yaml").read_text() == before
    assert (
        "No retraining is waiting to be resumed" in CliRunner().invoke(app, ["retrain", "--give-up"]).output
    )
    assert place.deliver().kind == "done"
    place.arrive("w3")
    assert place.deliver(1).kind == "promoted"


def test_a_run_that_was_forfeited_by_hand_makes_room_for_the_next(place: Place) -> None:
    with killed_in(train, "run_training"):
        place.deliver()
    place.ledger.forfeit(place.rows("reserve")[0])
    place.arrive("w3")
    assert place.deliver(1).kind == "promoted"
    assert place.deliver().kind == "done"


def test_too_few_blocks_train_nothing(place: Place) -> None:
    (place.root / "weeks/w2.csv").unlink()
    found = place.deliver()
    assert (found.kind, place.stages) == ("skipped", [])
    assert "1 of 1 blocks can pay for this retraining and 2 are needed" in found.message
    assert "Nothing was spent. The next scheduled retraining reads new blocks by itself" in found.message
    place.arrive("w2")
    assert place.deliver().kind == "promoted"


def test_a_retraining_is_not_planned_by_what_a_person_writes_meanwhile(place: Place) -> None:
    params, run_stage = place.root / "params.yaml", place.run_stage

    def edited(stage: str, root: Path) -> None:
        if stage == "calibrate":
            params.write_text(params.read_text().replace("steps: 4", "steps: 2"))
        run_stage(stage, root)

    found = place.deliver(run_stage=edited)
    assert found.kind == "refused" and place.rows("reserve") == []
    assert "params.yaml was changed before this run had planned its training" in found.message
    assert "Nothing was spent" in found.message
    assert place.deliver().kind == "promoted"


def test_a_skipped_retraining_names_the_runs_that_hold_a_part_of_the_blocks(place: Place) -> None:
    place.settings = place.settings.model_copy(update={"smallest": 0.2})
    assert place.deliver().kind == "promoted"
    place.ledger.reserve("by-hand", "tiny", Budget(2.5, 1e-5), events=[], notes={}, blocks=["w1", "w2"])
    place.arrive("w3")
    found = place.deliver(1)
    assert found.kind == "skipped"
    assert "What is reserved for runs that have not ended (by-hand) is missing there" in found.message


def test_a_block_that_does_not_fit_its_card_spends_nothing_and_may_be_corrected(place: Place) -> None:
    before = (place.root / "params.yaml").read_text()
    (place.root / "weeks/w2.csv").write_text("age,answer\nsecret,yes\n")
    found = place.deliver()
    assert found.kind == "refused"
    assert "not a number" in found.message
    assert "secret" not in found.message
    assert (place.rows("reserve"), (place.root / "params.yaml").read_text()) == ([], before)
    place.arrive("w2")
    assert place.deliver().kind == "promoted"


def test_a_block_that_was_delivered_twice_is_none_of_the_ledgers_until_it_is_overruled(
    delivered: Place,
) -> None:
    shutil.copyfile(delivered.root / "weeks/w2.csv", delivered.root / "weeks/w3.csv")
    for _ in range(2):
        refused = delivered.deliver(1)
        assert (refused.kind, "'w2' and 'w3'" in refused.message) == ("refused", True)
        assert [block.name for block in delivered.ledger.blocks("tiny")] == ["w1", "w2"]
    delivered.ledger.overrule("tiny", "w3", "w2", by="the owner")
    assert delivered.deliver(1).kind == "promoted"
    assert [block.runs for block in delivered.ledger.blocks("tiny")] == [2, 2, 1]


def test_charged_block_that_changed_is_refused_until_the_owner_overrules(delivered: Place) -> None:
    with (delivered.root / "weeks/w2.csv").open("a") as file:
        file.write("33,no\n")
    delivered.arrive("w3")
    charged = delivered.rows("reserve")
    stopped = delivered.deliver(1)
    assert stopped.kind == "refused"
    assert "'w2' of population 'tiny' does not hold the records that were charged" in stopped.message
    assert delivered.rows("reserve") == charged
    delivered.ledger.overrule("tiny", "w2", by="the owner")
    assert delivered.deliver(1).kind == "promoted"


def test_charged_block_that_is_missing_is_said(delivered: Place) -> None:
    (delivered.root / "weeks/w1.csv").unlink()
    delivered.arrive("w3")
    assert delivered.deliver(1).kind == "promoted"
    (said,) = (line for line in delivered.said if "that were charged are not there" in line)
    assert said.startswith("blocks of population 'tiny' that were charged are not there: 'w1'.")
    assert "`epsilonflow ledger retire tiny w1`" in said
    delivered.ledger.retire_block("tiny", "w1")
    delivered.arrive("w4")
    delivered.deliver(2)
    assert len([line for line in delivered.said if "are not there" in line]) == 1


def test_blocks_keep_their_order_where_a_retraining_uses_the_newest(place: Place) -> None:
    place.arrive("w3")
    place.settings = place.settings.model_copy(update={"blocks": Choice(policy="last", window=2)})
    place.deliver()
    assert [(block.name, block.runs) for block in place.ledger.blocks("tiny")] == [
        ("w1", 0),
        ("w2", 1),
        ("w3", 1),
    ]


def test_a_second_machine_is_refused_by_the_ledger(delivered: Place) -> None:
    head = delivered.ledger.head()
    shutil.rmtree(Path(os.environ["EPSILONFLOW_HOME"]) / "retrainings")
    assert "charged already" in delivered.deliver().message
    assert delivered.ledger.head() == head


def test_a_second_worker_leaves_it_to_the_first(place: Place) -> None:
    inner: list[Outcome] = []

    def at_work(stage: str, root: Path) -> None:
        if stage == "train":
            inner.append(place.deliver())
        place.run_stage(stage, root)

    assert place.deliver(run_stage=at_work).kind == "promoted"
    assert [found.kind for found in inner] == ["busy"]
    assert len(place.rows("reserve")) == 1


def test_a_worse_model_is_kept_beside_the_one_that_serves(place: Place) -> None:
    place.settings = Retraining.model_validate_json(
        json.dumps(SETTINGS | {"minimal_gain": 1.0, "warm_start": True})
    )
    place.deliver()
    first = os.readlink(place.root / "models/visits/serving")
    place.arrive("w3")
    assert place.deliver(1).kind == "kept"
    assert os.readlink(place.root / "models/visits/serving") == first
    last = RetrainingStates(Path(os.environ["EPSILONFLOW_HOME"]) / "retrainings/visits").all()[-1]
    start = YAML(typ="safe", pure=True).load(last.params)["model"]["start"]
    assert start == f"models/visits/{first}/model.safetensors"
    assert {path.name for path in (place.root / "models/visits").iterdir()} == {
        *place.rows("settle"),
        "serving",
    }


@pytest.mark.usefixtures("same_secrets")  # noise promotes a model now and then
def test_private_held_out_people_of_weekly_models_are_never_read_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was released of them with each model says which one serves."""

    def refusing(*_: Any, **__: Any) -> None:
        raise AssertionError("held-out records were read")

    monkeypatch.setattr(delivery, "metrics_of", refusing)
    YAML(typ="safe", pure=True).dump(CARD | {"holdout": "private"}, place.root / CARD_FILE)
    place.settings = Retraining.model_validate_json(json.dumps(SETTINGS | {"minimal_gain": 0.0}))
    first = place.deliver()
    assert (first.kind, "with private held-out accuracy" in first.message) == ("promoted", True)
    assert "The new model cost epsilon 1.334 at delta 1e-05." in first.message  # a third of 4, rounded up
    place.arrive("w3")
    second = place.deliver(1)
    assert (second.kind, "noise" in second.message) == ("kept", True)
    assert len(place.rows("reserve")) == len(place.rows("settle")) == 2
    entries = [path for path in (place.root / "models/visits").iterdir() if path.name != "serving"]
    assert all((entry / "evaluation.json").stat().st_size > 10 for entry in entries)


def test_params_of_another_data_set_are_refused(place: Place) -> None:
    path = place.root / "params.yaml"
    path.write_text(path.read_text().replace("dataset: tiny", "dataset: other"))
    (place.root / "data/cards/other.yaml").write_text(
        (place.root / "data/cards/tiny.yaml").read_text().replace("name: tiny", "name: other")
    )
    assert "'other'" in place.deliver().message
    assert place.stages == []


def test_a_retraining_is_planned_for_the_features_that_it_trains_on(place: Place) -> None:
    scattered = PARAMS | {"data": {"dataset": "tiny", "transform": "scattering"}}
    YAML(typ="safe", pure=True).dump(scattered, place.root / "params.yaml")
    assert "scattering takes images" in place.deliver().message
    assert place.stages == []


RECIPE = {name: PARAMS[name] for name in ("algorithm", "model")} | {"privacy": {"delta": 1e-5}}


def write_params(place: Place, **groups: Any) -> None:
    YAML(typ="safe", pure=True).dump(PARAMS | groups, place.root / "params.yaml")


def change_recipe(place: Place, **algorithm: Any) -> None:
    recipe = RECIPE | {"algorithm": RECIPE["algorithm"] | algorithm}
    place.settings = Retraining.model_validate_json(json.dumps(SETTINGS | {"recipe": recipe}))


@pytest.mark.parametrize(
    ("has_recipe", "dataset"),
    soak_but([(True, "other"), (False, "tiny")], product((True, False), ("tiny", "other"))),
)
def test_a_run_in_between_changes_no_retraining_and_a_retraining_no_params(
    place: Place, has_recipe: bool, dataset: str
) -> None:
    if has_recipe:
        change_recipe(place)
    YAML(typ="safe", pure=True).dump(CARD | {"name": "other"}, place.root / "data/cards/other.yaml")
    params, during = place.root / "params.yaml", list[int]()
    assert place.deliver().kind == "promoted"
    write_params(place, data={"dataset": dataset}, algorithm=PARAMS["algorithm"] | {"steps": 2})
    before = params.read_text()
    place.arrive("w3")

    def run_stage(stage: str, root: Path) -> None:
        during.append(YAML(typ="safe", pure=True).load(params)["algorithm"]["steps"])
        place.run_stage(stage, root)

    assert place.deliver(1, run_stage=run_stage).kind == "promoted"
    assert during == [4] * 5
    assert params.read_text() == before


def test_a_killed_retraining_goes_on_by_its_recipe_and_keeps_what_was_chosen_meanwhile(place: Place) -> None:
    before = (place.root / "params.yaml").read_text()
    with pytest.MonkeyPatch.context() as patch, killed_in(train, "run_training"):
        patch.setattr(delivery, "restore_params", lambda _: None)  # nothing runs after a kill
        place.deliver()
    assert (place.root / "params.yaml").read_text() != before
    assert place.deliver().kind == "promoted"
    assert (place.root / "params.yaml").read_text() == before
    place.arrive("w3")
    with killed_in(train, "run_training"):
        place.deliver(1)
    write_params(place, algorithm=PARAMS["algorithm"] | {"steps": 9})
    chosen = (place.root / "params.yaml").read_text()
    assert place.deliver(1).kind == "promoted"
    assert (place.root / "params.yaml").read_text() == chosen
    assert place.rows("settle") == place.rows("reserve") and len(place.rows("reserve")) == 2


def test_a_changed_recipe_is_said_and_waits_until_it_is_accepted(place: Place) -> None:
    change_recipe(place)
    assert place.deliver().kind == "promoted"
    place.arrive("w3")
    change_recipe(place, steps=6)
    place.settings = place.settings.model_copy(update={"minimal_gain": 1.0})
    head = place.ledger.head()
    asked, said = place.deliver(1), list[str]()
    assert asked.kind == "refused"
    assert "algorithm.steps is 6 and was 4. Nothing was spent" in asked.message
    assert "accept it with `epsilonflow retrain --accept-recipe`, in Prefect" in asked.message
    other = place.deliver(1, file=place.root / "other weeks.yaml")
    assert "`epsilonflow retrain 'other weeks.yaml' --accept-recipe`" in other.message
    assert place.ledger.head() == head
    accepted = place.deliver(1, accepts_recipe=True, say=said.append)
    assert (accepted.kind, "algorithm.steps is 6 and was 4" in accepted.message) == ("kept", True)
    assert any("algorithm.steps is 6 and was 4" in line for line in said)
    place.arrive("w4")
    assert place.deliver(2).kind == "kept"  # accepted once, though the first model still serves


def test_a_file_without_a_recipe_gets_the_one_it_had_once(place: Place) -> None:
    file = place.root / "retrain.yaml"
    text = "# weekly\nname: visits\ndataset: tiny\nblocks: {policy: all, at_least: 2}\n"
    file.write_text(text + "spread: {policy: equal, planned: 3} # thrice\nminimal_gain: -1\n")
    place.settings = retraining.load(file)
    assert place.deliver(file=file).kind == "promoted"
    written = file.read_text()
    assert "# weekly" in written and "# thrice" in written
    write_params(place, algorithm=PARAMS["algorithm"] | {"steps": 2})
    place.settings = retraining.load(file)
    assert place.settings.recipe is not None
    assert place.settings.recipe.algorithm == PARAMS["algorithm"]
    place.arrive("w3")
    assert place.deliver(1, file=file).kind == "promoted"
    assert file.read_text() == written


def test_a_retraining_asks_the_ledger_few_times(delivered: Place) -> None:
    """24 times for the training, which declares a block, and 17 to decide before it and after it."""
    delivered.arrive("w3")
    with transactions() as begun:
        assert delivered.deliver(1).kind == "promoted"
    assert len(begun) <= 41


def test_the_ledger_charges_a_retraining_once(own_home: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{own_home}/once.sqlite")
    ledger.declare("p", Budget(10.0, 1e-3), public=False)
    cost, notes = Budget(1.0, 1e-5), {"retraining": "m 2026-W01"}
    ledger.reserve("a", "p", cost, events=[], notes=notes)
    ledger.reserve("a", "p", cost, events=[], notes=notes)
    ledger.forfeit("a")
    with pytest.raises(BudgetRefusedError, match="charged already, for run 'a'"):
        ledger.reserve("b", "p", cost, events=[], notes=notes)
    ledger.reserve("b", "p", cost, events=[], notes={"retraining": "m 2026-W02"})


def test_a_model_is_added_whole_or_not_at_all(tmp_path: Path) -> None:
    artifacts, registry = tmp_path / "artifacts", Registry(tmp_path / "models/m")
    artifacts.mkdir()
    (artifacts / "receipt.json").write_text('{"run_id": "r1"}')
    with pytest.raises(FileNotFoundError):
        registry.add(artifacts)
    assert list(registry.folder.iterdir()) == []
    names = ("model.safetensors", "privacy_card.json", "metrics.json", "plan.json", "trace.parquet")
    for name in (*names, "diagnostics.parquet"):
        (artifacts / name).write_text(name)
    entry = registry.add(artifacts)
    registry.promote(entry)
    with killed_in(Path, "replace"):
        registry.promote(tmp_path / "models/m/r2")
    assert registry.serving == entry


GOOD = "name: m\ndataset: d\nblocks: {policy: all}\nspread: {policy: equal, planned: 2}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: m\n", "dataset"),
        ("name: m\ndataset: d\nblocks: {policy: sometimes}\nspread: {policy: equal, planned: 2}\n", "policy"),
        ("name: ../m\n", "name"),
        (f"{GOOD}recipe: {{algorithm: {{name: dp_sgd}}}}\n", "recipe.model"),
        (
            f"{GOOD}delta: 1e-5\nrecipe: {{algorithm: {{name: dp_sgd, stepz: 3}}, model: {{name: logistic}}}}\n",
            "the recipe in retrain.yaml: .*unknown key algorithm.stepz",
        ),
        (f"{GOOD}recipe: {{data: {{dataset: d}}, algorithm: {{}}, model: {{}}}}\n", "recipe.data.dataset"),
        ("- a\n", "retrain.yaml"),
        ("a: [\n", "no valid YAML|not valid YAML"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "retrain.yaml").write_text(text)
    with pytest.raises(ParamsRefusedError, match=said):
        retraining.load(tmp_path / "retrain.yaml")


@pytest.mark.parametrize(
    ("every", "period"),
    [("hour", "2026-01-05T03"), ("day", "2026-01-05"), ("week", "2026-W02"), ("month", "2026-01")],
)
def test_a_period_is_that_of_the_moment(every: str, period: str) -> None:
    assert Retraining.model_validate_json(json.dumps(SETTINGS | {"every": every})).period(MONDAY) == period


KEY = "visits 2026-W02"


def elsewhere(place: Place, run_id: str = "elsewhere") -> None:
    """What another home does to the ledger that both use: it takes the period."""
    events: list[dict[str, Any]] = []
    cost, notes = Budget(0.1, 1e-6), {"retraining": KEY}
    place.ledger.declare_block("tiny", "w1")
    place.ledger.reserve(run_id, "tiny", cost, events=events, notes=notes, blocks=("w1",))


def test_what_another_home_is_at_is_left_to_it(place: Place) -> None:
    before = (place.root / "params.yaml").read_text()

    def overtaken(stage: str, root: Path) -> None:
        if stage == "train":
            elsewhere(place)
        place.run_stage(stage, root)

    found = place.deliver(run_stage=overtaken)
    assert (found.kind, "charged already" in found.message) == ("refused", True)
    assert place.ledger.status("elsewhere") == "open"
    assert (place.root / "params.yaml").read_text() == before
    assert place.deliver().kind == "done"
    shutil.rmtree(Path(os.environ["EPSILONFLOW_HOME"]) / "retrainings")
    place.stages.clear()
    assert place.deliver().kind == "busy"
    place.ledger.settle("elsewhere", Budget(0.1, 1e-6), events=[])
    assert place.deliver().kind == "done"
    assert (place.stages, place.rows("reserve")) == ([], ["elsewhere"])


def test_a_ledger_that_is_away_for_a_moment_costs_no_run(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise RefusedError("the ledger cannot be used.")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "settle", away)
        found = place.deliver()
    assert (found.kind, "the next delivery resumes it" in found.message) == ("refused", True)
    assert place.deliver().kind == "promoted"
    assert place.rows("reserve") == place.rows("settle") != []


def test_what_a_checkout_that_is_gone_began_goes_on_in_another(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with killed_in(train, "run_training"):
        place.deliver()
    old, new = place.root, tmp_path_factory.mktemp("clone") / "root"
    shutil.copytree(old, new)
    place.root = new
    monkeypatch.chdir(new)
    assert "finish it there" in place.deliver().message
    old.rename(old.with_name("moved"))
    assert place.deliver().kind == "promoted"
    assert place.rows("settle") == place.rows("reserve") != []
    assert (new / "models/visits/serving").is_symlink()


def test_the_last_retraining_is_the_last_that_began(place: Place) -> None:
    own = SETTINGS | {"delta": 1e-6}
    place.settings = Retraining.model_validate_json(json.dumps(own))
    assert place.deliver().kind == "promoted"
    place.arrive("w3")
    # names of days sort before those of weeks
    place.settings = Retraining.model_validate_json(json.dumps(own | {"every": "day"}))
    assert place.deliver(1).kind == "promoted"
    assert "none of the blocks" in place.deliver(2).message
    assert len(place.rows("reserve")) == 2


@pytest.mark.parametrize(
    ("of", "name"),
    [(RetrainingStates, "write"), (temporary_params, "write_text"), (Registry, "add"), (Registry, "promote")],
)
def test_a_disk_that_is_full_between_the_stages_costs_a_sentence_and_no_run(
    place: Place, monkeypatch: pytest.MonkeyPatch, of: Any, name: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(of, name, full)
        found = place.deliver()
    assert (found.kind, found.message.startswith("the disk is full; make room")) == ("failed", True)
    assert place.deliver().kind == "promoted"
    assert len(place.rows("reserve")) == 1


def test_a_full_disk_leaves_params_as_they_were(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = (place.root / "params.yaml").read_text(), Path.write_text

    def cut_short(path: Path, text: str, **how: Any) -> int:
        if "params.yaml" not in path.name:
            return write(path, text, **how)
        write(path, "", **how)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", cut_short)
        place.deliver()
    assert (place.root / "params.yaml").read_text() == before


def test_a_person_in_two_blocks_pays_each_block_s_price_once() -> None:
    """Half of it for each block, whether the run reads one of the person's blocks or both."""
    nothing, cap = Budget(0.0, 0.0), Budget(4.0, 1e-5)
    balance = Balance("visits", cap, False, nothing, nothing, cap, block="w01", blocks_per_person=2)
    for blocks in (1, 3):
        epsilon, delta = epsilon_for((1.0, 1e-5), balance, blocks, 1e-9, lambda _: pytest.fail("no plan"))
        assert (epsilon, delta) == (0.5, 1e-9)
