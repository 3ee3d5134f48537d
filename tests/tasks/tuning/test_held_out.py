"""A search whose trials are scored on private held-out people, by a release of them in each trial."""

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dp_accounting import GaussianDpEvent

from algorithms.errors import RefusedError
from algorithms.evaluation import ReleasedHistogram
from algorithms.evaluation import metrics_of as metrics_of_release
from algorithms.models.saved import load_model
from algorithms.privacy import card
from algorithms.privacy.accounting import events
from algorithms.privacy.accounting.epsilon import epsilon
from algorithms.privacy.accounting.events import Trials, disjoint_parts_of, schedule_from_json, trials_of
from algorithms.privacy.card import verify_card
from algorithms.privacy.card.verify import check_charged
from data import DatasetInfo
from data.prepared import HeldOut, load_held_out
from tasks.evaluate import metrics_of
from tasks.evaluation_counts import count_held_out
from tasks.tuning import search as searching
from tasks.tuning import settings
from tasks.tuning.search import Search, SearchTrial, one_by_one, tune
from tasks.tuning.search_plan import plan_search
from tasks.tuning.settings import Tuning
from tests.support.checkout import PROJECT
from tests.support.refusals import refused_as
from tests.tasks.tuning.searching import BASE, SPACE, ledger_of, never, place

__all__ = ["place"]


def held_out_search(place: Path, base: dict[str, Any] = BASE, **settings: Any) -> Search:
    """A search on digits, as if all of them were private people."""
    described = DatasetInfo.read(place / "prepared")
    described = dataclasses.replace(described, is_public=False, holdout="private", holdout_rule="a" * 64)
    (place / "prepared" / "public.json").write_text(described.to_json())
    asked = Tuning.model_validate(
        {"space": SPACE, "epsilon": 4.0, "objective": {"on": "held_out"}} | settings
    )
    return Search(asked, plan_search(asked, base, described), place / "prepared", described)


def test_a_search_costs_the_larger_of_its_trainings_and_its_evaluations(place: Path, own_home: Path) -> None:
    """By both verifiers and the ledger; each side is priced here as a search of its own."""
    search, ledger = held_out_search(place, trials={"mean": 6.0}), ledger_of(own_home)
    receipt = tune(search, ledger=ledger, home=own_home, root=place)
    trained, evaluated = disjoint_parts_of(receipt.schedule) or []
    alone = [schedule_from_json(plan.schedule) for plan in search.search_plan.plans]
    assert epsilon(trained, 1e-5) == pytest.approx(epsilon([(Trials(6.0).event(alone), 1)], 1e-5), rel=1e-9)
    ((noised, _),) = (trials_of(evaluated) or [])[0]
    assert isinstance(noised, GaussianDpEvent)
    of_held_out = epsilon([(Trials(6.0).event([[(noised, 1)]]), 1)], 1e-5)
    assert epsilon(evaluated, 1e-5) == pytest.approx(of_held_out, rel=1e-9)
    assert 0.9 * receipt.epsilon["pld"] < of_held_out <= receipt.epsilon["pld"] <= 4.0  # type: ignore[operator]
    assert receipt.epsilon["pld"] == pytest.approx(epsilon(trained, 1e-5), rel=1e-6)
    written = card.load(place / "tuned" / "privacy_card.json")
    assert (
        written.setting.evaluation_epsilon is not None and written.setting.evaluation_epsilon >= of_held_out
    )
    verified = card.verify(written, place / "tuned", key=(own_home / "owner.pub").read_text().strip())
    assert verified.passed, verified.failures
    assert not [name for name, passed, _ in verify_card.verify(place / "tuned") if passed is False]
    check_charged(written, ledger)
    assert ledger.balance("digits").spent.epsilon == pytest.approx(receipt.epsilon["pld"])
    (reserved,) = [json.loads(row.about) for row in ledger.history("digits") if row.kind == "reserve"]
    assert reserved["held_out"] == "private"
    kinds = pd.read_parquet(place / "tuned/trace.parquet")["kind"]
    assert list(kinds) == [*["gradient"] * 4, "evaluation"]


@pytest.mark.usefixtures("same_secrets")
def test_trials_train_on_all_training_records_and_are_scored_on_the_others(
    place: Path, own_home: Path
) -> None:
    search, ran = held_out_search(place, show_all=True), list[SearchTrial]()

    def each(trials: Sequence[SearchTrial]) -> None:
        one_by_one(trials)
        data, noises = load_held_out(place / "prepared"), []
        for trial in trials:
            released = ReleasedHistogram.from_json((trial.folder / "evaluation.json").read_text())
            exact = count_held_out(released.spec, load_model(trial.folder / "model.safetensors"), data)
            noises.append((released.values - exact) / released.noise_std)
            right = float(json.loads((trial.folder / "score.json").read_text()))
            truth = exact[: released.spec.shapes["right"][0]][1]
            assert abs(right - truth) < 6 * released.noise_std
            to_score, to_train = trial.records()
            assert to_score is None and len(to_train.labels) == search.info.records
        # Of fresh noise in each trial, and of the standard deviation that is stated.
        assert abs(np.corrcoef(noises[0], noises[1])[0, 1]) < 0.5
        assert 0.5 < float(np.std(noises)) < 1.5
        ran.extend(trials)

    tune(search, ledger=ledger_of(own_home), home=own_home, root=place, run_all=each)
    assert len(ran) == 2
    assert verify_passes(place)
    released = ReleasedHistogram.from_json((place / "tuned/evaluation.json").read_text())
    assert len(released.values) == released.spec.cells
    page = (place / "tuned/tune.html").read_text()
    assert "of the winner on private, noised held-out records" in page
    # The better of two: each one's interval is of 97.5 %, so 2.241403 standard deviations on each side.
    right = metrics_of_release(dataclasses.replace(released, best_of=2.0))["accuracy"]
    assert right is not None and released.z == pytest.approx(1.959964)
    assert dataclasses.replace(released, best_of=2.0).z == pytest.approx(2.241403)
    assert f"{100 * right.value:.2f}% ({100 * right.low:.2f}% to {100 * right.high:.2f}%)" in page
    assert "it holds in at least 95% of searches" in page


FILES = {
    *(
        "evaluation.json",
        "model.safetensors",
        "plan.json",
        "privacy_card.json",
        "receipt.json",
        "trace.parquet",
    ),
    *("tune.html", "winner.yaml"),
}


def test_nothing_else_of_the_people_held_out_leaves_a_search(
    place: Path, own_home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the winner's exact metrics, nor what any trial scored; the trials are deleted."""
    caplog.set_level("DEBUG")
    monkeypatch.setattr(events.Trials, "number", lambda *_: 3)
    search, scores = held_out_search(place), list[float]()

    def each(trials: Sequence[SearchTrial]) -> None:
        one_by_one(trials)
        scores.extend(json.loads((trial.folder / "score.json").read_text()) for trial in trials)

    receipt = tune(search, ledger=ledger_of(own_home), home=own_home, root=place, run_all=each)
    assert {path.name for path in (place / "tuned").iterdir()} == FILES
    left = [path for path in (own_home / "runs" / receipt.run_id).rglob("*") if path.is_file()]
    assert {path.name for path in left} == FILES - {"privacy_card.json", "tune.html"} | {
        "lock",
        "run.json",
        "search.json",
    }
    exact = metrics_of(place / "tuned/model.safetensors", place / "prepared")
    secrets = [repr(exact[name]) for name in ("test_accuracy", "test_auc", "test_loss", "majority_accuracy")]
    texts = [path.read_bytes() for path in [*left, *(place / "tuned").iterdir()]]
    others = sorted(scores)[:-1]  # the winner's is a cell of its release
    for secret in [*(secret for secret in secrets if len(secret) > 9), *map(repr, others)]:
        assert not [content for content in texts if secret.encode() in content]
        assert secret not in caplog.text


def verify_passes(place: Path) -> bool:
    written = card.load(place / "tuned" / "privacy_card.json")
    theirs = [name for name, passed, _ in verify_card.verify(place / "tuned") if passed is False]
    return card.verify(written, place / "tuned").passed and not theirs


def test_people_held_out_may_lose_less(place: Path) -> None:
    base = BASE | {"privacy": {"epsilon": 1.0, "delta": 1e-5, "evaluation": {"epsilon": 0.5}}}
    plan = held_out_search(place, base).charged_plan
    assert plan.evaluation is not None
    (release,) = plan.evaluation.schedule_of_trial
    of_held_out = epsilon([(Trials(8.0).event([[release]]), 1)], 1e-5)
    assert 0.49 < of_held_out <= 0.5
    assert plan.cost.epsilon > 3.0


def test_a_killed_trial_repeats_its_release(place: Path, own_home: Path) -> None:
    search, released = held_out_search(place, trials={"mean": 3.0}), list[bytes]()

    def killed_once(trials: Sequence[SearchTrial]) -> None:
        one_by_one(trials[:1])
        released.append((trials[0].folder / "evaluation.json").read_bytes())
        if len(released) == 1:
            shutil.rmtree(trials[0].folder)
            raise KeyboardInterrupt
        one_by_one(trials)

    ledger = ledger_of(own_home)
    with pytest.raises(KeyboardInterrupt):
        tune(search, ledger=ledger, home=own_home, root=place, run_all=killed_once)
    tune(search, ledger=ledger, home=own_home, root=place, run_all=killed_once)
    assert released[0] == released[1]
    assert [row.kind for row in ledger.history("digits") if row.run_id] == ["reserve", "settle"]


@pytest.mark.parametrize(
    ("fails_on_zeros", "words"),
    [(True, "record of zeros fails, too: ValueError."), (False, "withheld, as it could reveal a record.")],
)
def test_a_search_whose_scores_fail_ends_with_a_model_and_a_card(
    place: Path,
    own_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails_on_zeros: bool,
    words: str,
) -> None:
    def failing(_: Any, __: Any, data: HeldOut) -> None:
        if fails_on_zeros or np.any(data.test_features):
            raise ValueError("13.37731")

    monkeypatch.setattr(searching, "count_held_out", failing)
    search, ledger = held_out_search(place), ledger_of(own_home)
    receipt = tune(search, ledger=ledger, home=own_home, root=place)
    assert verify_passes(place)
    assert receipt.evaluation_epsilon is None and not (place / "tuned/evaluation.json").exists()
    assert ledger.balance("digits").spent.epsilon == pytest.approx(receipt.epsilon["pld"])
    (line,) = [one.getMessage() for one in caplog.records if "could not be evaluated" in one.getMessage()]
    assert line.endswith(words) and "13.37731" not in caplog.text


def test_what_cannot_be_scored_on_people_held_out_is_refused(place: Path, own_home: Path) -> None:
    replaced = BASE | {"algorithm": {"name": "heavy_ball", "steps": 2}}
    with refused_as("bad_keys", keys=("objective.on", "algorithm.adjacency")):
        held_out_search(place, replaced, space={"algorithm.steps": [2, 3]})
    asked = Tuning.model_validate({"space": SPACE, "epsilon": 4.0, "objective": {"on": "held_out"}})
    info = dataclasses.replace(DatasetInfo.read(place / "prepared"), holdout="public")
    with refused_as("bad_keys", keys=("objective.on",)):
        plan_search(asked, BASE, info)
    poor = held_out_search(place)
    with pytest.raises(RefusedError, match="cap"):
        tune(
            dataclasses.replace(poor, info=dataclasses.replace(poor.info, cap_epsilon=0.1)),
            ledger=ledger_of(own_home),
            home=own_home,
            root=place,
            run_all=never,
        )


def test_private_held_out_records_are_the_default_to_score_on(tmp_path: Path) -> None:
    text = (PROJECT / "examples/own_data/visits.yaml").read_text()
    assert "holdout: public" in text
    private = "\n".join(line for line in text.splitlines() if not line.startswith("holdout_why"))
    (tmp_path / "data/cards").mkdir(parents=True)
    (tmp_path / "data/cards/visits.yaml").write_text(private.replace("holdout: public", "holdout: private"))
    (tmp_path / "params.yaml").write_text("data: {dataset: visits}\n")
    (tmp_path / "tune.yaml").write_text("space: {algorithm.clip_norm: [0.3, 1.0]}\nepsilon: 3.0\n")
    assert settings.load_here(tmp_path, Path("tune.yaml")).objective.on == "held_out"
    (tmp_path / "tune.yaml").write_text(
        "space: {algorithm.clip_norm: [0.3, 1.0]}\nepsilon: 3.0\nobjective: {on: private}\n"
    )
    assert settings.load_here(tmp_path, Path("tune.yaml")).objective.on == "private"


def test_poisson_trials_survive_the_plan(place: Path) -> None:
    search = held_out_search(place, trials={"distribution": "poisson", "mean": 3.0})
    plan, document = search.plan_if_won(0)
    assert plan.evaluation is not None and isinstance(plan.evaluation.trials, Trials)
    assert math.isinf(plan.evaluation.trials.shape)
    again = type(document).from_json(document.to_text(sort_keys=True).encode(), "plan.json")
    assert again.evaluation == document.evaluation
    search.check()
