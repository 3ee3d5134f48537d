"""A search: priced as a whole, reserved before its first trial, charged once, and only its winner leaves."""

import dataclasses
import json
import logging
import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pytest
from dp_accounting import GaussianDpEvent
from safetensors import safe_open

from algorithms.errors import BudgetRefusedError, EmptySearchError, RefusedError
from algorithms.privacy import card
from algorithms.privacy.accounting import events
from algorithms.privacy.accounting.epsilon import epsilon
from algorithms.privacy.accounting.events import event_from_json
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.card import text
from algorithms.privacy.card.verify import check_charged
from algorithms.privacy.mechanisms.noise import Generator
from data import DataRefusedError, DatasetInfo
from tasks import retraining
from tasks.calibrate import calibrate
from tasks.config.params import ParamsRefusedError
from tasks.evaluate import metrics_of
from tasks.runs import store
from tasks.runs.signing import signing_key
from tasks.tuning import search as searching
from tasks.tuning import search_plan, settings
from tasks.tuning.search import Search, SearchTrial, in_threads, one_by_one, tune
from tasks.tuning.search_plan import SearchPlan, plan_search
from tasks.tuning.settings import Tuning
from tests.support.own_code import own_code_alone
from tests.support.refusals import refused_as
from tests.support.soak import soak_but
from tests.support.workspace import killed_in
from tests.tasks.tuning.searching import BASE, SPACE, ledger_of, never, place

__all__ = ["own_code_alone", "place"]

SEARCH_PLANS: dict[str, SearchPlan] = {}
"""What was searched for is the same in many tests."""


def search_of(place: Path, public: bool = True, base: dict[str, Any] = BASE, **settings: Any) -> Search:
    found = DatasetInfo.read(place / "prepared")
    found = dataclasses.replace(found, is_public=public)
    (place / "prepared" / "public.json").write_text(found.to_json())
    asked = Tuning.model_validate({"space": SPACE, "epsilon": 4.0} | settings)
    key = repr((asked, base, found))
    if key not in SEARCH_PLANS:
        SEARCH_PLANS[key] = plan_search(asked, base, found)
    return Search(asked, SEARCH_PLANS[key], place / "prepared", found)


def test_a_search_over_many_settings_plans_all_of_them_about_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epsilon of a trial is found with the first and the last of them."""
    planned = []

    def spy(settings: Any, info: DatasetInfo) -> Any:
        planned.append(settings.algorithm.steps)
        return calibrate(settings, info)

    monkeypatch.setattr(search_plan, "calibrate", spy)
    space = {"algorithm.steps": [*range(2, 22, 2)]}
    found = search_of(place, space=space).search_plan
    assert 0.98 * 4.0 < found.cost <= 4.0
    assert planned.count(10) == 1
    assert planned.count(2) <= 4


def test_a_search_leaves_the_winner_alone_with_the_price_of_the_whole(place: Path, own_home: Path) -> None:
    search, ledger = search_of(place, public=False, trials={"mean": 6.0}), ledger_of(own_home)
    ran: list[SearchTrial] = []

    def noting(trials: Sequence[SearchTrial]) -> None:
        assert ledger.balance("digits").reserved.epsilon == pytest.approx(search.search_plan.cost)
        ran.extend(trials)
        one_by_one(trials)

    receipt = tune(search, ledger=ledger, home=own_home, root=place, run_all=noting)
    assert search.search_plan.epsilon_per_trial < search.search_plan.cost <= 4.0
    assert ledger.balance("digits").spent.epsilon == pytest.approx(receipt.epsilon["pld"])
    written = card.load(place / "tuned" / "privacy_card.json")
    verified = card.verify(written, place / "tuned", key=(own_home / "owner.pub").read_text().strip())
    assert verified.passed, verified.failures
    assert written.setting.epsilon == pytest.approx(search.search_plan.cost)
    assert "The cost is that of a whole search" in text.markdown(written)
    check_charged(written, ledger)
    assert sorted(path.name for path in (own_home / "runs" / receipt.run_id).iterdir()) == [
        "lock",
        "result",
        "run.json",
    ]
    page = (place / "tuned" / "tune.html").read_text()
    assert "which, how many and how good they were is" in page
    stated = re.findall(r"<b>(\S+)</b><span>epsilon (?:of the whole search|that one trial)", page)
    plan = json.loads((place / "tuned" / "plan.json").read_text())
    for number, true in zip(stated, (receipt.cost, plan["search"]["each"]), strict=True):
        assert true is not None and true <= float(number) < 1.01 * true
    again = tune(search, ledger=ledger, home=own_home, root=place, run_all=noting)
    assert again.run_id == receipt.run_id
    assert len([row for row in ledger.history("digits") if row.kind == "reserve"]) == 1


def test_the_card_of_whatever_method_wins_is_of_the_search_that_was_charged(
    place: Path, own_home: Path
) -> None:
    search = search_of(place, space={"algorithm.name": ["dp_sgd_decay", "dp_sgd"]}, show_all=True)
    ledger = ledger_of(own_home)

    def the_second_wins(trials: Sequence[SearchTrial]) -> None:
        one_by_one(trials)
        for score, trial in zip(("NaN", "0.1"), trials, strict=True):  # the first one could not be scored
            (trial.folder / "score.json").write_text(score)

    tune(search, ledger=ledger, home=own_home, root=place, run_all=the_second_wins)
    written = card.load(place / "tuned" / "privacy_card.json")
    assert written.mechanism.algorithm == "dp_sgd"
    assert card.verify(written, place / "tuned").passed
    check_charged(written, ledger)
    (reserved,) = [json.loads(row.about) for row in ledger.history("digits") if row.kind == "reserve"]
    assert reserved["algorithm"] == "dp_sgd, dp_sgd_decay"
    for name in ("adaclip", "dp_sgd, dp_sgd_decay"):
        document = written.to_json()
        document["mechanism"]["algorithm"] = name
        edited = card.PrivacyCard.model_validate_json(json.dumps(document)).sign(signing_key(own_home))
        with pytest.raises(RefusedError, match="differ in algorithm;"):
            check_charged(edited, ledger)


def test_a_killed_search_goes_on_with_the_same_trials_for_one_charge(place: Path, own_home: Path) -> None:
    search, ledger = search_of(place, trials={"mean": 6.0}), ledger_of(own_home)
    drawn: list[list[tuple[bytes, float]]] = []

    def some(trials: Sequence[SearchTrial]) -> None:
        drawn.append(
            [(trial.key, trial.document["algorithm"]["update"]["learning_rate"]) for trial in trials]
        )
        one_by_one(trials[: 1 if len(drawn) == 1 else None])
        if len(drawn) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(search, ledger=ledger, home=own_home, root=place, run_all=some)
    receipt = tune(search, ledger=ledger, home=own_home, root=place, run_all=some)
    assert drawn[0] == drawn[1]
    assert len({key for key, _ in drawn[0]}) == len(drawn[0])
    rows = [row.kind for row in ledger.history("digits") if row.run_id == receipt.run_id]
    assert rows == ["reserve", "settle"]


def test_methods_with_correlated_noise_are_searched(place: Path, own_home: Path) -> None:
    base = BASE | {"algorithm": {"name": "dp_ftrl", "expected_batch_size": 256, "steps": 8}}
    search, ledger = search_of(place, base=base), ledger_of(own_home)
    receipt = tune(search, ledger=ledger, home=own_home, root=place)
    assert ledger.balance("digits").spent.epsilon == pytest.approx(receipt.epsilon["pld"])
    assert card.verify(card.load(place / "tuned" / "privacy_card.json"), place / "tuned").passed


def test_trials_are_of_the_charged_records_alone(place: Path, own_home: Path) -> None:
    """As where another command prepares other records of the same description while a search runs."""
    search, ledger = search_of(place, show_all=True), ledger_of(own_home)
    file = place / "prepared" / "contents"
    charged = file.read_text()

    def others(trials: Sequence[SearchTrial]) -> None:
        one_by_one(trials[:1])
        file.write_text("of other records\n")
        one_by_one(trials)

    def unseen(trials: Sequence[SearchTrial]) -> None:
        assert [(trial.folder / "score.json").exists() for trial in trials] == [True, False]
        one_by_one(trials)

    with refused_as("prepared_anew", DataRefusedError):
        tune(search, ledger=ledger, home=own_home, root=place, run_all=others)
    file.write_text(charged)
    tune(search, ledger=ledger, home=own_home, root=place, run_all=unseen)
    assert [row.kind for row in ledger.history("digits") if row.run_id] == ["reserve", "settle"]


def test_killed_while_its_trials_are_deleted_a_search_has_its_result(
    place: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, ledger = search_of(place), ledger_of(own_home)

    def half(folder: Path) -> None:
        for model in folder.glob("*/model.safetensors"):
            model.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", half)
        tune(search, ledger=ledger, home=own_home, root=place)
    receipt = tune(search, ledger=ledger, home=own_home, root=place, run_all=never)
    assert card.verify(card.load(place / "tuned" / "privacy_card.json"), place / "tuned").passed
    left = (own_home / "runs" / receipt.run_id).iterdir()
    assert sorted(path.name for path in left) == ["lock", "result", "run.json"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_search_that_drew_no_trial_ends_and_another_may_be_paid_for(
    place: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    search = search_of(place, public=False, epsilon=1.0, trials={"distribution": "poisson", "mean": 2.0})
    ledger, numbers = ledger_of(own_home), iter([0, 0, 2] if is_killed else [0, 2])
    monkeypatch.setattr(events.Trials, "number", lambda *_: next(numbers))
    if is_killed:
        with killed_in(store.RunAttempt, "forget_secrets"):
            tune(search, ledger=ledger, home=own_home, root=place, run_all=never)
    with refused_as("no_trials", EmptySearchError, another="ask again"):
        tune(search, ledger=ledger, home=own_home, root=place, run_all=never)
    assert [row.kind for row in ledger.history("digits")][-2:] == ["reserve", "settle"]
    assert ledger.balance("digits").spent.epsilon == pytest.approx(search.search_plan.cost)
    (folder,) = (own_home / "runs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "run.json"]
    with refused_as("consent_needed", doing="searching", variable="EPSILONFLOW_SPEND_AGAIN"):
        tune(search, ledger=ledger, home=own_home, root=place, run_all=never)
    monkeypatch.setenv("EPSILONFLOW_SPEND_AGAIN", "yes")
    receipt = tune(search, ledger=ledger, home=own_home, root=place)
    assert receipt.run_id == folder.name[:-1] + "2"
    assert ledger.balance("digits").spent.epsilon == pytest.approx(2 * search.search_plan.cost)
    check_charged(card.load(place / "tuned" / "privacy_card.json"), ledger)


COUNT, MEAN = GaussianDpEvent(100.0), GaussianDpEvent(20.0)
CENTRED = BASE | {"features": {"name": "centred", "mean_noise": 20.0}, "model": {"name": "unit_linear"}}


def test_trials_share_features_that_are_released_once(place: Path, own_home: Path) -> None:
    search, ledger = search_of(place, base=CENTRED, trials={"mean": 6.0}), ledger_of(own_home)
    means: list[bytes] = []
    killed = False

    def noting(trials: Sequence[SearchTrial]) -> None:
        nonlocal killed
        one_by_one(trials[: None if killed else 1])
        if not killed:
            (
                trials[0].folder.parent / "shared" / "state.safetensors"
            ).unlink()  # released again with the same noise
            killed = True
            raise KeyboardInterrupt
        for trial in trials:
            rows = pd.read_parquet(trial.folder / "trace.parquet")
            assert list(rows["kind"]) == ["total", *["gradient"] * 4]
            with safe_open(trial.folder / "model.safetensors", "pt") as file:
                means.append(file.get_tensor("features.mean").numpy().tobytes())

    with pytest.raises(KeyboardInterrupt):
        tune(search, ledger=ledger, home=own_home, root=place, run_all=noting)
    receipt = tune(search, ledger=ledger, home=own_home, root=place, run_all=noting)
    assert len(set(means)) == 1
    assert [row["count"] for row in receipt.events] == [1, 1]
    assert [row["event"]["type"] for row in receipt.events] == [
        "GaussianDpEvent",
        "RepeatAndSelectDpEvent",
    ]
    written = card.load(place / "tuned" / "privacy_card.json")
    verified = card.verify(written, place / "tuned", key=(own_home / "owner.pub").read_text().strip())
    assert verified.passed, verified.failures
    assert "released once" in (place / "tuned" / "tune.html").read_text()


def test_what_is_shared_leaves_a_trial_more(place: Path) -> None:
    shared = search_of(place, base=CENTRED).search_plan
    inside = search_of(place, base=CENTRED, space=SPACE | {"features.mean_noise": [20.0]}).search_plan
    assert (len(shared.schedule), len(inside.schedule)) == (2, 1)
    assert inside.epsilon_per_trial < shared.epsilon_per_trial < shared.cost <= 4.0


@pytest.mark.parametrize("times", soak_but([1.1], [1.1, 1.5]))
def test_whatever_features_leave_goes_to_the_trials(place: Path, times: float) -> None:
    alone = epsilon([(MEAN, 1)], 1e-5)
    found = search_of(place, base=CENTRED, epsilon=times * alone).search_plan
    assert alone < found.epsilon_per_trial < found.cost
    assert 0.98 * times < found.cost / alone <= times


def test_features_that_cost_more_than_the_search_are_refused(place: Path) -> None:
    most = 0.99 * epsilon([(MEAN, 1)], 1e-5)
    with refused_as("budget_spent_before_steps"):
        search_of(place, base=CENTRED, epsilon=most)


@pytest.mark.parametrize(
    ("varied", "features", "shares"),
    [
        ("algorithm.clip_norm", {"name": "centred"}, True),
        ("algorithm.clip_norm", {"name": "centred", "head_noise": 20.0}, True),
        ("model.seed", {"name": "centred"}, False),
        ("features.mean_noise", {"name": "centred"}, False),
        ("algorithm.clip_norm", {"name": "none"}, False),
        ("algorithm.clip_norm", None, False),
    ],
)
def test_features_are_shared_where_no_trial_varies_them(varied: str, features: Any, shares: bool) -> None:
    asked = Tuning.model_validate({"space": {varied: [1, 2]}, "epsilon": 1.0})
    assert search_plan.shares_features(asked, {"features": features}) is shares


def traces_of(search: Search, place: Path, home: Path) -> list[pd.DataFrame]:
    """The traces of all trials, each settings' once."""
    found: list[pd.DataFrame] = []

    def noting(trials: Sequence[SearchTrial]) -> None:
        one_by_one(trials)
        found.extend(pd.read_parquet(trial.folder / "trace.parquet") for trial in trials)

    tune(search, ledger=ledger_of(home), home=home, root=place, run_all=noting)
    return found


def test_what_is_shared_does_not_tell_which_settings_the_first_trial_took(
    place: Path, own_home: Path
) -> None:
    """The cost of the shared features is their own, and not a trial's; each trial ends at the price of its own plan."""
    base = CENTRED | {"algorithm": {"name": "sgd_adv", "expected_batch_size": 256}}
    search = search_of(place, base=base, space={"algorithm.steps": [1, 8]}, show_all=True)
    first, second = traces_of(search, place, own_home)
    prices = [plan.epsilon["pld"] for plan in search.search_plan.plans]
    assert first["epsilon"][0] == second["epsilon"][0] < min(prices)
    assert [trace["epsilon"].iloc[-1] for trace in (first, second)] == prices and prices[0] != prices[1]


def test_a_private_number_is_counted_for_what_is_shared_and_by_each_trial(
    place: Path, own_home: Path
) -> None:
    base = CENTRED | {"algorithm": {"name": "dp_sgd", "sampling_rate": 0.2, "steps": 2}}
    found = DatasetInfo.read(place / "prepared")
    (place / "prepared" / "public.json").write_text(dataclasses.replace(found, records=None).to_json())
    search = search_of(place, base=base, space={"algorithm.clip_norm": [0.5, 1.0]}, show_all=True)
    assert list(search.search_plan.schedule[:-1]) == [(COUNT, 1), (MEAN, 1)]
    for trace in traces_of(search, place, own_home):
        events = [event_from_json(json.loads(row)) for row in trace["event"]]
        assert events[:3] == [COUNT, MEAN, COUNT]
        assert list(trace["kind"]) == [*["total"] * 3, *["gradient"] * 2]


def test_each_trial_starts_at_its_own_model(place: Path, own_home: Path) -> None:
    search = search_of(place, base=CENTRED, space={"model.name": ["softmax", "mlp"]}, show_all=True)
    for trace in traces_of(search, place, own_home):
        assert list(trace["kind"]) == ["total", *["gradient"] * 4]


def test_trials_log_nothing_from_which_their_number_could_be_read(
    place: Path, own_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine warns of a slow model: before the charge, and not again for each trial."""
    algorithm = BASE["algorithm"] | {"steps": 1, "expected_batch_size": 8}
    base = BASE | {"model": {"name": "tests.support.own_models:distances"}, "algorithm": algorithm}
    search, said = search_of(place, base=base, trials={"mean": 3.0}), list[str]()

    def each_way(trials: Sequence[SearchTrial]) -> None:
        said.extend(caplog.messages)
        for run_all in (one_by_one, partial(in_threads, 2)):
            for trial in trials:
                shutil.rmtree(trial.folder, ignore_errors=True)
            run_all(trials)

    tune(search, ledger=ledger_of(own_home), home=own_home, root=place, run_all=each_way)
    assert any("differentiated record by record" in message for message in said)
    assert caplog.messages == said
    logging.getLogger("algorithms").warning("heard again")
    assert caplog.messages[-1] == "heard again"


def test_a_trial_never_learns_by_itself_what_is_shared(place: Path, own_home: Path) -> None:
    def without(trials: Sequence[SearchTrial]) -> None:
        (trials[0].folder.parent / "shared" / "state.safetensors").unlink()
        one_by_one(trials)

    search = search_of(place, base=CENTRED)
    with refused_as("missing_file"):
        tune(search, ledger=ledger_of(own_home), home=own_home, root=place, run_all=without)


@pytest.mark.parametrize("made", ["build", "environment"])
def test_a_search_whose_winner_could_have_no_card_or_page_is_not_charged(
    place: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    whole = getattr(searching, made)

    def failing(*given: Any) -> Any:
        if made == "environment" or given[0].plan.settings["clip_norm"] == 2.0:
            raise ArithmeticError("this fails")
        return whole(*given)

    monkeypatch.setattr(searching, made, failing)
    search, ledger = search_of(place, space={"algorithm.clip_norm": [0.5, 2.0]}), ledger_of(own_home)
    with refused_as("card_rehearsal_failed") as refusal:
        tune(search, ledger=ledger, home=own_home, root=place, run_all=never)
    assert str(refusal.value.fields["error"]) == "this fails"
    assert [row.kind for row in ledger.history("digits")] == ["population"]
    assert not list((own_home / "runs").iterdir())


def test_a_result_that_cannot_be_handed_out_leaves_that_of_another_search(
    place: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, ledger = search_of(place), ledger_of(own_home)
    tune(search, ledger=ledger, home=own_home, root=place)
    before = {path.name: path.read_bytes() for path in (place / "tuned").iterdir()}
    monkeypatch.setattr(searching, "environment", lambda: _refuse("the disk is full."))
    with pytest.raises(RefusedError, match="the disk is full"):
        tune(search, ledger=ledger, home=own_home, root=place)
    assert {path.name: path.read_bytes() for path in (place / "tuned").iterdir()} == before


def test_a_search_with_a_model_that_mixes_records_is_not_charged(place: Path, own_home: Path) -> None:
    space = {"model.name": ["softmax", "tests.support.own_models:mixing"]}
    search, ledger = search_of(place, space=space), ledger_of(own_home)
    with refused_as("records_mixed"):
        tune(search, ledger=ledger, home=own_home, root=place, run_all=never)
    assert [row.kind for row in ledger.history("digits")] == ["population"]


def test_a_trial_has_the_resources_that_params_give_it(
    place: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[ComputeConfig] = []

    def train(*_: object, compute: ComputeConfig, **__: object) -> NoReturn:
        given.append(compute)
        raise KeyboardInterrupt

    monkeypatch.setattr(searching, "train", train)
    base = BASE | {"performance": {"threads": 1, "workers": 2, "offload": True, "memory_mb": 512}}
    with pytest.raises(KeyboardInterrupt):
        tune(search_of(place, base=base), ledger=ledger_of(own_home), home=own_home, root=place)
    (found,) = given
    assert (found.threads, found.workers, found.offload, found.memory_mb) == (1, 2, True, 512)


def test_a_population_that_cannot_pay_for_the_whole_pays_for_nothing(place: Path, own_home: Path) -> None:
    search, ledger = search_of(place, public=False), ledger_of(own_home)
    poor = dataclasses.replace(search, info=dataclasses.replace(search.info, cap_epsilon=1.0))
    (place / "prepared" / "public.json").write_text(poor.info.to_json())

    with pytest.raises(BudgetRefusedError):
        tune(poor, ledger=ledger, home=own_home, root=place, run_all=never)
    assert ledger.balance("digits").spent.epsilon == 0


def test_a_private_score_is_charged_with_its_trial(place: Path, own_home: Path) -> None:
    search = search_of(place, public=False, objective={"on": "private", "noise_multiplier": 30.0})
    tune(search, ledger=ledger_of(own_home), home=own_home, root=place)
    written = card.load(place / "tuned" / "privacy_card.json")
    assert [query.kind for query in written.mechanism.queries] == ["gradient", "total"]
    assert card.verify(written, place / "tuned", unsigned=True, key=None).passed
    assert (
        not (place / "tuned/score.json").exists()
        and "of the winner on public" not in (place / "tuned/tune.html").read_text()
    )


def test_all_trials_may_be_shown_where_all_are_paid_for(place: Path, own_home: Path) -> None:
    search = search_of(place, show_all=True)
    tune(search, ledger=ledger_of(own_home), home=own_home, root=place)
    assert (
        (place / "tuned" / "trials.csv")
        .read_text()
        .startswith("algorithm.update.learning_rate,score\n0.001,")
    )
    assert json.loads((place / "tuned" / "plan.json").read_text())["search"]["shows_all"] is True
    alone = search_of(place)
    cheaper = search_of(place, show_all="cheaper")
    assert cheaper.search_plan.epsilon_per_trial == max(
        search.search_plan.epsilon_per_trial, alone.search_plan.epsilon_per_trial
    )


def test_the_cheaper_way_is_the_one_that_fits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = search_of(place).search_plan
    monkeypatch.setattr(sys.modules[__name__], "SEARCH_PLANS", {})
    monkeypatch.setattr(
        "tasks.tuning.search_plan._fit_search_plan",
        lambda *_, releases_all: fits if not releases_all else _refuse("all"),
    )
    assert search_of(place, show_all="cheaper").search_plan is fits
    SEARCH_PLANS.clear()
    monkeypatch.setattr(
        "tasks.tuning.search_plan._fit_search_plan",
        lambda *_, releases_all: _refuse("all" if releases_all else "one"),
    )
    with pytest.raises(RefusedError, match="one"):
        search_of(place, show_all="cheaper")


def _refuse(why: str) -> NoReturn:
    raise RefusedError(why)


def test_what_cannot_be_searched_is_refused(place: Path) -> None:
    with refused_as("bad_keys", ParamsRefusedError, key="privacy.noise", keys=("space.privacy.noise",)):
        search_of(place, space={"privacy.noise": ["secure"]})
    asked = Tuning.model_validate({"space": {"algorithm.clip_norm": [1.0]}, "epsilon": 1.0})
    base = BASE | {"algorithm": {"name": "dp_agd"}}
    with refused_as("method_unfit", method="dp_agd"):
        plan_search(asked, base, DatasetInfo.read(place / "prepared"))


@pytest.mark.parametrize(
    ("load", "example"), [(settings.load, settings.EXAMPLE), (retraining.load, retraining.EXAMPLE)]
)
def test_where_a_file_is_missing_an_example_of_one_is_told(tmp_path: Path, load: Any, example: str) -> None:
    path = tmp_path / "own.yaml"
    with refused_as("missing_file", ParamsRefusedError):
        load(path)
    path.write_text(example)
    load(path)


def test_all_trials_shown_cost_all_trials(place: Path) -> None:
    """Each release of each setting, composed; one of them alone would cost a quarter less."""
    search_plan = search_of(place, show_all=True).search_plan
    every = [pair for plan in search_plan.plans for pair in events.schedule_from_json(plan.schedule)]
    assert search_plan.cost == pytest.approx(epsilon(every, 1e-5), rel=1e-6)
    alone = epsilon(events.schedule_from_json(search_plan.plans[0].schedule), 1e-5)
    assert (
        alone == pytest.approx(search_plan.epsilon_per_trial, rel=0.01)
        and search_plan.cost > 1.2 * search_plan.epsilon_per_trial
    )


def test_each_trial_draws_with_a_key_of_its_own(place: Path, tmp_path: Path) -> None:
    search, asked = search_of(place, show_all=True), Generator(bytes(range(32)), private=True)
    run = SimpleNamespace(generator=lambda: asked, private_noise=True, run_id="run-1", folder=tmp_path)
    trials = searching.trials_of_run(search, run)  # type: ignore[arg-type]
    keys = [trial.key for _, trial in trials]
    assert len(keys) == len({*keys, asked.key}) - 1 == 2
    drawn = [
        float(trial._generator(purpose).stream(0).uniform(1)[0]) for _, trial in trials for purpose in "ab"
    ]
    assert len({*drawn}) == 4


def test_which_records_are_held_for_scoring_follows_from_their_content(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order, and with one record less, the same records are held."""
    search, generator = search_of(place, objective={"on": "private", "share": 0.3}), np.random.default_rng(0)
    run = SimpleNamespace(
        generator=lambda: Generator(bytes(32), private=True),
        private_noise=True,
        run_id="r-1",
        folder=tmp_path,
    )
    (_, trial), *_ = searching.trials_of_run(search, run)  # type: ignore[arg-type]
    features, labels = generator.random((60, 4), np.float32), generator.integers(0, 10, 60)

    def held(order: Any) -> set[bytes]:
        data = SimpleNamespace(train_features=features[order], train_labels=labels[order])
        monkeypatch.setattr(searching, "load_as", lambda *_: data)
        inside, outside = trial.records()
        assert inside is not None and len(inside) + len(outside) == len(order)
        return {row.tobytes() for row in inside.features}

    usual = held(np.arange(60))
    assert 5 < len(usual) < 35
    assert held(generator.permutation(60)) == usual
    assert held(np.arange(1, 60)) == usual - {features[0].tobytes()}


@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_number_of_tasks_is_not_that_of_the_trials(count: int) -> None:
    made = searching.shares(list(range(count)), 3)  # type: ignore[arg-type]
    assert len(made) == 3 and sorted(trial for share in made for trial in share) == [*range(count)]  # type: ignore


def test_what_leaves_a_search_tells_nothing_of_its_other_trials(place: Path, own_home: Path) -> None:
    search = search_of(place, trials={"mean": 6.0})
    tune(search, ledger=ledger_of(own_home), home=own_home, root=place)
    assert sorted(path.name for path in (place / "tuned").iterdir()) == [
        "model.safetensors",
        "plan.json",
        "privacy_card.json",
        "receipt.json",
        "score.json",  # of the winner, on public records
        "trace.parquet",
        "tune.html",
        "winner.yaml",
    ]
    accuracy = json.loads((place / "tuned/score.json").read_text())
    file = place / "tuned/model.safetensors"
    assert accuracy == metrics_of(file, search.prepared)["test_accuracy"]
    assert (
        f"<b>{accuracy:.2%}</b><span>accuracy of the winner on public"
        in (place / "tuned/tune.html").read_text()
    )
    plan = json.loads((place / "tuned/plan.json").read_text())
    assert plan["search"].keys() == {"each", "shares", "shows_all", "space"} and plan["search"]["space"] == 2
    receipt = json.loads((place / "tuned/receipt.json").read_text())
    assert receipt.keys() == {
        *(
            "accountant",
            "algorithm",
            "blocks",
            "dataset",
            "delta",
            "description_sha256",
            "device",
            "diagnostics",
        ),
        *("epsilon", "events", "ledger", "population", "private_noise", "releases", "run_id", "sha256"),
        *("software", "steps"),
    }
    assert receipt["ledger"].keys() == {
        *("cap", "composition", "first", "head", "remaining", "spent", "ten_more"),
    }
