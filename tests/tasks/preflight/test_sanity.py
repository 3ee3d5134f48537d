"""Settings that look wrong are questioned before anything is reserved, and others never."""

import io
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from ruamel.yaml import YAML

from algorithms.core.plan import Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.training import Hooks
from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.methods import from_settings
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Ledger
from data import dataset_info
from data.card import CARDS, data_card
from flows.cli.costs import cost_table
from tasks import calibrate, train
from tasks.calibrate import plan_for
from tasks.config import params
from tasks.config.overrides import recipe
from tasks.config.params import GROUPS, Params
from tasks.preflight.consent import confirm_before_stages
from tasks.preflight.preview import preview_run
from tasks.preflight.sanity import records_of, sanity_warnings
from tests.support.checkout import PROJECT
from tests.support.refusals import refused, refused_as
from tests.support.terminal import Terminal
from tests.support.visits import CARD, Visits
from tests.support.visits import unprepared_visits as unprepared_visits
from tests.support.visits import visits as visits
from tests.support.workspace import killed_in

EXAMPLE = PROJECT / "examples/own_data"


def settings_for(
    dataset: str = "visits",
    *,
    epsilon: float = 1.0,
    name: str = "dp_sgd",
    accountant: str = "pld",
    **own: Any,
) -> Params:
    """By the recipe of the data set, but for what is given; `update` is added to its own."""
    card = data_card(dataset, EXAMPLE if dataset == "visits" else CARDS)
    chosen = recipe(card, name, epsilon)
    settings = chosen.settings | own
    if "update" in own:
        settings["update"] = chosen.settings["update"] | own["update"]
    return params.parse(
        {
            "data": {"dataset": dataset},
            "privacy": {"epsilon": epsilon, "delta": 1e-5, "accountant": accountant},
            "algorithm": {"name": name, **settings},
            "model": {"name": chosen.model},
        }
    )


def warnings_about(settings: Params) -> list[str]:
    cards = EXAMPLE if settings.data.dataset == "visits" else CARDS
    info = dataset_info(data_card(settings.data.dataset, cards))
    return sanity_warnings(settings, plan_for(settings, info), records_of(info, cards))


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            {"dataset": "digits", "name": "dp_gd", "epsilon": 0.01},
            "at epsilon 0.01 the noise is 8.6 times as large as all that 1,436 records can say about 650 parameters",
        ),
        ({"name": "majority", "epsilon": 1e-9}, "all that 2,000 records can say about 1 parameter"),
        ({"update": {"learning_rate": 1e9}}, "one step moves the parameters by up to"),
        ({"update": {"learning_rate": 1e9, "optimizer": "adam"}}, "one step moves the parameters by up to"),
        ({"update": {"learning_rate": 1e-9}}, "stays where it starts"),
        ({"dataset": "digits", "clip_norm": 1e-9}, "stays where it starts"),
    ],
)
def test_what_looks_wrong_is_doubted(own: dict[str, Any], words: str) -> None:
    (warning,) = warnings_about(settings_for(**own))
    assert re.search(words, warning)


@pytest.mark.parametrize(("dataset", "epsilon"), [("visits", 0.5), ("visits", 8.0), ("adult", 0.5)])
def test_no_usual_setting_is_doubted(dataset: str, epsilon: float) -> None:
    assert warnings_about(settings_for(dataset, epsilon=epsilon)) == []


@pytest.mark.parametrize(("epsilon", "doubts"), [(1.0, 0), (0.001, 1)])
def test_few_records_are_doubted_by_outputs_where_noise_is_limited(epsilon: float, doubts: int) -> None:
    """A recipe of cells: noise of 4.84 / epsilon in each of four outputs, beside 500 records; not in each cell."""
    update = {"learning_rate": 3.8, "momentum": 0.9, "schedule": "linear", "noise_limit": 0.35}
    settings = {"name": "dp_sgd", "steps": 300, "expected_batch_size": 50, "update": update}
    method, facts = from_settings(settings), PlanningFacts(500, 11_756, 1, 4)
    plan = method.plan(Target(Budget(epsilon, 1e-5)), facts)
    found = sanity_warnings(SimpleNamespace(algorithm=method), plan, 500)  # type: ignore[arg-type]
    words = "the noise is 19.4 times as large as all that 500 records can say about 4 outputs"
    assert len(found) == doubts and all(words in one for one in found)


@pytest.mark.parametrize(("steps", "is_doubted"), [(1, True), (9, True), (100, False)])
def test_a_run_that_hardly_reads_a_record_is_doubted(steps: int, is_doubted: bool) -> None:
    """A step reads a record with a chance of 1e-5, which is delta."""
    method = from_settings({"name": "dp_sgd", "steps": steps, "expected_batch_size": 1})
    plan = method.plan(Target(Budget(1.0, 1e-5)), PlanningFacts(100_000, 10, 1, 2))
    warnings = sanity_warnings(SimpleNamespace(algorithm=method), plan, 100_000)  # type: ignore[arg-type]
    assert any("is not negligible beside the chance" in one for one in warnings) is is_doubted


@pytest.mark.parametrize("name", ["dp_gd", "dp_agd", "dpis", "majority", "objective_perturbation"])
def test_other_algorithms_are_doubted_as_little(name: str) -> None:
    """At hardly more noise than by PLD, whose search for it takes seconds."""
    assert warnings_about(settings_for("adult", name=name, accountant="rdp")) == []


@pytest.fixture
def too_fast(visits: Visits) -> Visits:
    """A private table with a learning rate far beyond any use."""
    visits.place.set("data", dataset="visits")
    visits.place.set("algorithm", update={"learning_rate": 1e9})
    return visits


def nothing_is_reserved(visits: Visits) -> bool:
    return Ledger.open(f"sqlite:///{visits.place.home}/ledger.sqlite").populations() == []


def test_without_a_person_it_is_refused_and_nothing_is_reserved(
    too_fast: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(r"one step moves .* EPSILONFLOW_TRAIN_ANYWAY=yes"):
        too_fast.train()
    assert nothing_is_reserved(too_fast)
    monkeypatch.setenv("EPSILONFLOW_TRAIN_ANYWAY", "yes")
    too_fast.train()
    assert too_fast.runs == 1


def test_at_a_terminal_a_person_is_asked(
    too_fast: Visits, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    with pytest.raises(RefusedError):
        too_fast.train()
    assert "Spend epsilon 1 all the same? [y/N]" in capsys.readouterr().err
    assert nothing_is_reserved(too_fast)
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    too_fast.train()
    assert too_fast.runs == 1


def test_a_run_that_was_begun_is_paid_for_and_goes_on_unasked(
    too_fast: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*given: Any, hooks: Hooks, **named: Any) -> None:
        hooks.reserve()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setenv("EPSILONFLOW_TRAIN_ANYWAY", "yes")
        patch.setattr(train, "run_training", killed)
        too_fast.train()
    too_fast.train()
    assert too_fast.runs == 1


def test_of_public_records_it_is_only_said(too_fast: Visits, caplog: pytest.LogCaptureFixture) -> None:
    card = CARD.replace("holdout_why: the records are invented\n", "").replace("keyed_sha256", "sha256")
    too_fast.prepare(card.replace("public: false", "public: true"))
    too_fast.place.set("algorithm", update={"learning_rate": 1e9})
    too_fast.train()
    assert "one step moves the parameters" in caplog.text


def test_a_command_asks_at_its_terminal_before_the_stages_start(
    too_fast: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stages are processes that cannot ask; they are told by the environment."""
    settings = params.load(too_fast.place.root / "params.yaml", reads=GROUPS)
    preview = preview_run(too_fast.place.root, settings)

    def ask() -> None:
        confirm_before_stages(preview.warnings, preview.info, epsilon=1.0)

    with refused_as("consent_needed", variable="EPSILONFLOW_TRAIN_ANYWAY"):
        ask()
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    with refused_as("consent_needed", variable="EPSILONFLOW_TRAIN_ANYWAY"):
        ask()
    monkeypatch.setenv("EPSILONFLOW_TRAIN_ANYWAY", "")
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    ask()
    too_fast.train()
    assert too_fast.runs == 1


def test_the_plan_says_it(too_fast: Visits) -> None:
    settings = params.load(too_fast.place.root / "params.yaml", reads=GROUPS)
    out = io.StringIO()
    Console(file=out, width=300).print(cost_table(preview_run(too_fast.place.root, settings), settings))
    assert "these settings look wrong" in out.getvalue()
    assert "one step moves the parameters" in out.getvalue()


def test_the_plan_names_the_features_that_are_learned(visits: Visits) -> None:
    place = visits.place
    visits.prepare(CARD)
    place.set("data", dataset="visits")
    plain = params.load(place.root / "params.yaml", reads=GROUPS)
    place.set("features", name="centred", mean_noise=20.0)
    place.set("model", name="unit_linear")
    settings = params.load(place.root / "params.yaml", reads=GROUPS)
    for some, words in ((plain, None), (settings, "centred: learned by a release before training")):
        table = cost_table(preview_run(place.root, some), some)
        rows = dict(zip(*(column.cells for column in table.columns), strict=True))
        assert "features" not in rows if words is None else rows["features"].startswith(words)


def test_the_plan_of_a_run_that_is_not_private_says_so(visits: Visits) -> None:
    place = visits.place
    visits.prepare(CARD)
    place.set("data", dataset="visits")
    settings = params.load(place.root / "params.yaml", reads=GROUPS)
    preview, promises = preview_run(place.root, settings), dict[str, object]()
    for name, changed in {"usual": {}, "shown": {"diagnostics": True}, "seeded": {"noise": "seeded"}}.items():
        document = YAML(typ="safe", pure=True).load(place.root / "params.yaml")
        document["privacy"] |= changed
        table = cost_table(preview, params.parse(document, reads=GROUPS))
        promises[name] = dict(zip(*(column.cells for column in table.columns), strict=True)).get("promises")
    assert promises == {
        "usual": None,
        "seeded": "no privacy: anyone can compute seeded noise and take it away",
        "shown": "no privacy: diagnostics are shown without noise",
    }


def test_a_run_that_a_filter_refuses_is_told_what_it_would_take_of_the_cap(visits: Visits) -> None:
    """At a delta far below its own, which is that of the cap, a run takes more than its epsilon."""
    visits.prepare(re.sub("cap: .*", "cap: {epsilon: 1.5, delta: 1e-9}\ncomposition: {kind: zcdp}", CARD))
    visits.place.set("data", dataset="visits")
    settings = params.load(visits.place.root / "params.yaml", reads=GROUPS)
    preview = preview_run(visits.place.root, settings)
    (one, _) = preview.spent_after
    with pytest.raises(BudgetRefusedError) as refused:
        preview.check()
    assert one.epsilon > 1.5
    stated = re.search(r"after which epsilon (\S+) would be spent by zCDP, and", str(refused.value))
    assert stated and one.epsilon <= float(stated[1]) < 1.001 * one.epsilon
    barely = replace(preview, spent_after=(Budget(1.50001, 1e-9),))
    with refused_as("above_cap", BudgetRefusedError) as refusal:
        barely.check()
    assert "1.501" in str(refusal.value.fields["spent"])  # not 1.5, which the cap would allow


def test_warning_beyond_the_cap_says_what_is_left_and_who_reserved(visits: Visits) -> None:
    """Spent 0, reserved 0.75 by a run that was stopped, of a cap of 1.5; asked is 1."""
    visits.prepare(re.sub("cap: .*", "cap: {epsilon: 1.5, delta: 1e-4}", CARD))
    visits.place.set("data", dataset="visits")
    visits.place.set("privacy", epsilon=0.75)
    calibrate.main()
    with killed_in(train, "run_training"):
        visits.train()
    (stopped,) = visits.place.run_folders
    visits.place.set("privacy", epsilon=1.0)
    preview = preview_run(visits.place.root, params.load(visits.place.root / "params.yaml", reads=GROUPS))
    with pytest.raises(BudgetRefusedError) as refused:
        preview.check()
    message = str(refused.value)
    left, reserved = re.search(r"has epsilon (\S+) and .* with 0 spent and (\S+) reserved", message).groups()  # type: ignore[union-attr]
    assert 0.75 <= float(left) < 0.76 and 0.74 < float(reserved) <= 0.75
    assert f"reserved by runs that have not ended ({stopped.name}); ask for" in message
    assert "left of its cap of epsilon 1.5, with" in message
    assert message.endswith("raise it by `epsilonflow ledger cap visits --epsilon E --delta D`.")


def test_the_plan_says_what_this_run_and_ten_more_take_of_the_cap(visits: Visits) -> None:
    place = visits.place
    visits.prepare(CARD.replace("holdout: public", "composition: {kind: renyi, runs: 10}\nholdout: public"))
    place.set("data", dataset="visits")
    settings = params.load(place.root / "params.yaml", reads=GROUPS)

    def plan() -> str:
        out = io.StringIO()
        Console(file=out, width=300).print(cost_table(preview_run(place.root, settings), settings))
        return out.getvalue()

    before = plan()
    added = re.search(r"runs add up by\W+(\w[^:]+): (.*)", before)
    assert added is not None and "10" in added[2]
    said = re.search(r"spent after this run\W+epsilon (\S+); after ten more like it: epsilon (\S+)", before)
    assert said is not None
    visits.train()
    receipt = place.receipt
    spent, later = (float(receipt["ledger"][name]["epsilon"]) for name in ("spent", "ten_more"))
    assert (float(said[1]), float(said[2])) == (
        pytest.approx(spent, rel=1e-4),
        pytest.approx(later, rel=1e-4),
    )
    assert added[1].strip() == str(
        Ledger.open(f"sqlite:///{place.home}/ledger.sqlite").balance("visits").composition
    )
    Ledger.open(f"sqlite:///{place.home}/ledger.sqlite").set_cap("visits", Budget(later - 0.1, 1e-5))
    second = re.search(r"spent after this run\W+epsilon (\S+); ten more like it would exceed the cap", plan())
    assert second is not None and spent < float(second[1]) < later
