"""The card of a run whose held-out people were evaluated by a release of their own, by both verifiers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from dp_accounting import GaussianDpEvent

from algorithms.core.plan import by_accountants
from algorithms.privacy.accounting import EventRow
from algorithms.privacy.accounting.epsilon import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    adjacency_named,
    epsilon,
)
from algorithms.privacy.accounting.events import (
    Schedule,
    disjoint_parts_of,
    on_disjoint_parts,
    schedule_from_json,
    schedule_to_json,
)
from algorithms.privacy.card import PrivacyCard, RunRecord, build, public_key_of, verify, verify_card
from tests.algorithms.privacy.conftest import KEY
from tests.support.bounds_once import bounds_once
from tests.support.synthetic_run import DELTA, record, sha256_of, with_entries, write_json, write_run

__all__ = ["bounds_once"]

pytestmark = pytest.mark.usefixtures("bounds_once")

OWNER = public_key_of(KEY)
FILES = ("model.safetensors", "plan.json", "trace.parquet", "evaluation.json")


def evaluated(root: Path, *, noise: float = 40.0, planned: float | None = None) -> tuple[Path, RunRecord]:
    """A finished run whose held-out people were evaluated with this noise, and what its plan says of it."""
    folders = write_run(root)
    run, artifacts = record(folders), folders.artifacts
    training = run.receipt.schedule
    last = run.trace.iloc[-1].to_dict() if isinstance(run.trace, pd.DataFrame) else {}
    event = {"type": "GaussianDpEvent", "noise_multiplier": noise}
    row = last | {
        "kind": "evaluation",
        "sampling": "full batch",
        "sampling_rate": 1.0,
        "clip_norm": 1.0,
        "noise_multiplier": noise,
        "noise_std": noise,
        "divisor": 1.0,
        "event": json.dumps(event),
    }
    trace = pd.concat([run.trace, pd.DataFrame([row])], ignore_index=True)
    trace.to_parquet(artifacts / "trace.parquet")
    plan = with_entries(run.plan, evaluation=_evaluation(planned or noise))
    write_json(artifacts / "plan.json", plan.to_json())
    write_json(artifacts / "evaluation.json", {"spec": {}, "noise_std": noise})
    sums = {name: sha256_of(artifacts / name) for name in FILES}
    held_out = schedule_from_json(_rows(noise))
    events = schedule_to_json(on_disjoint_parts(training, held_out))
    receipt = with_entries(
        run.receipt,
        events=events,
        releases=len(trace),
        sha256=sums,
        evaluation_epsilon=epsilon(held_out, run.receipt.delta),
    )
    data = with_entries(run.data, holdout="private")
    return artifacts, replace(run, plan=plan, receipt=receipt, data=data, trace=trace)


def _evaluation(noise: float) -> dict[str, Any]:
    return {
        "spec": {},
        "noise": "gaussian",
        "noise_multiplier": noise,
        "epsilon": 1.0,
        "schedule": _rows(noise),
    }


def _rows(noise: float) -> list[EventRow]:
    return [{"event": {"type": "GaussianDpEvent", "noise_multiplier": noise}, "count": 1}]


def failures(card: PrivacyCard, artifacts: Path) -> tuple[list[str], list[str]]:
    """The names of the checks that fail, by our verifier and by the one that stands alone."""
    (artifacts / "privacy_card.json").write_bytes(card.to_bytes())
    ours = [check.name for check in verify(card, artifacts, key=OWNER).failures]
    theirs = [name for name, passed, _ in verify_card.verify(artifacts, key=OWNER) if passed is False]
    return ours, theirs


def test_both_verifiers_hold_it_and_it_costs_what_training_costs(tmp_path: Path) -> None:
    artifacts, run = evaluated(tmp_path)
    card = build(run, KEY)
    training = record(write_run(tmp_path / "alone"))
    assert failures(card, artifacts) == ([], [])
    assert card.setting.epsilon == training.receipt.epsilon["pld"]
    assert card.mechanism.releases == training.receipt.releases + 1


def _of_training_alone(schedule: Schedule) -> Schedule:
    parts = disjoint_parts_of(schedule)
    assert parts is not None
    return parts[0]


def _with_more_noise(schedule: Schedule) -> Schedule:
    return on_disjoint_parts(_of_training_alone(schedule), [(GaussianDpEvent(80.0), 1)])


@pytest.mark.parametrize("change", [_of_training_alone, _with_more_noise])
def test_a_card_with_other_events_than_were_released_fails(
    change: Callable[[Schedule], Schedule], tmp_path: Path
) -> None:
    artifacts, run = evaluated(tmp_path)
    events = schedule_to_json(change(run.receipt.schedule))
    card = build(replace(run, receipt=with_entries(run.receipt, events=events)), KEY)
    ours, theirs = failures(card, artifacts)
    assert "events of the trace" in ours
    assert theirs


def test_less_noise_than_was_planned_fails(tmp_path: Path) -> None:
    artifacts, run = evaluated(tmp_path, noise=40.0, planned=50.0)
    ours, theirs = failures(build(run, KEY), artifacts)
    assert ours == ["releases of the plan"]
    assert theirs == ["plan"]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_price_of_training_alone_is_not_enough_where_evaluation_costs_more(
    accountant: str, tmp_path: Path
) -> None:
    """Noise of 0.5 costs epsilon 10.1 at delta 1e-5, training less than 3."""
    artifacts, run = evaluated(tmp_path, noise=0.5)
    card = build(run, KEY)
    document = card.to_json()
    document["accounting"]["target"]["epsilon"] = 100.0
    ours, theirs = failures(_signed(document), artifacts)
    assert f"epsilon by {accountant.upper()}" in ours
    assert f"epsilon by {accountant}" in theirs


def _signed(document: Mapping[str, Any]) -> PrivacyCard:
    return PrivacyCard.model_validate_json(json.dumps(document)).sign(KEY)


def test_an_evaluation_that_failed_leaves_the_card_of_training(tmp_path: Path) -> None:
    """The plan has one; the run released the model alone."""
    folders = write_run(tmp_path)
    run = record(folders)
    plan = with_entries(run.plan, evaluation=_evaluation(40.0))
    write_json(folders.artifacts / "plan.json", plan.to_json())
    sums = run.receipt.sha256 | {"plan.json": sha256_of(folders.artifacts / "plan.json")}
    card = build(replace(run, plan=plan, receipt=with_entries(run.receipt, sha256=sums)), KEY)
    assert failures(card, folders.artifacts) == ([], [])


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '"x"', "1" + "0" * 5000, "no histogram"])
def test_a_histogram_that_cannot_be_read_fails(tmp_path: Path, content: str) -> None:
    artifacts, run = evaluated(tmp_path)
    (artifacts / "evaluation.json").write_text(content)
    sums = dict(run.receipt.sha256) | {"evaluation.json": sha256_of(artifacts / "evaluation.json")}
    card = build(replace(run, receipt=with_entries(run.receipt, sha256=sums, evaluation_epsilon=1.0)), KEY)
    assert failures(card, artifacts) == (["evaluation"], [])


def test_all_that_is_released_of_the_people_held_out_counts(tmp_path: Path) -> None:
    """Noise of 1 and then of 40: the last costs epsilon 0.09 at delta 1e-5, the two together 4.38."""
    artifacts, run = evaluated(tmp_path)
    (artifacts / "evaluation.json").write_text("{}")
    sums = dict(run.receipt.sha256) | {"evaluation.json": sha256_of(artifacts / "evaluation.json")}
    released: Schedule = [(GaussianDpEvent(1.0), 1), (GaussianDpEvent(40.0), 1)]
    events = schedule_to_json(on_disjoint_parts(_of_training_alone(run.receipt.schedule), released))
    for stated, covers in ((0.1, False), (4.3, False), (4.39, True)):
        receipt = with_entries(run.receipt, events=events, sha256=sums, evaluation_epsilon=stated)
        for names in failures(build(replace(run, receipt=receipt), KEY), artifacts):
            assert ("epsilon of the people held out" in names) is not covers


NAME = "releases of the people held out"


def forge_card(
    run: RunRecord,
    artifacts: Path,
    trained: Schedule,
    held_out: Schedule,
    *,
    adjacency: str = "ADD_OR_REMOVE_ONE",
) -> PrivacyCard:
    """The card of the same releases in other places, with the costs that follow; the plan says the same."""
    relation = adjacency_named(adjacency)
    whole = on_disjoint_parts(trained, held_out)
    if relation is not ADD_OR_REMOVE_ONE:
        whole = [*trained, *held_out]
    costs = by_accountants(whole, DELTA, relation)
    stated = epsilon(held_out, DELTA, adjacency=relation)
    rows = schedule_to_json(trained)
    own = {
        "adjacency": adjacency,
        "schedule": rows,
        "epsilon": costs,
        "target": {"epsilon": 90.0, "delta": DELTA},
    }
    evaluation = _evaluation(40.0) | {"schedule": schedule_to_json(held_out), "epsilon": stated}
    plan = with_entries(run.plan, evaluation=evaluation, **own)
    write_json(artifacts / "plan.json", plan.to_json())
    pd.DataFrame(run.trace).assign(epsilon=costs["pld"]).to_parquet(artifacts / "trace.parquet")
    sums = {name: sha256_of(artifacts / name) for name in FILES}
    receipt = with_entries(
        run.receipt, events=schedule_to_json(whole), epsilon=costs, sha256=sums, evaluation_epsilon=stated
    )
    return build(replace(run, plan=plan, receipt=receipt), KEY)


def test_training_cannot_pass_as_a_release_of_the_people_held_out(tmp_path: Path) -> None:
    """Six of twelve steps on people of their own would cost less than twelve."""
    artifacts, run = evaluated(tmp_path)
    count, (step, times) = _of_training_alone(run.receipt.schedule)
    honest = build(run, KEY)
    card = forge_card(
        run, artifacts, [count, (step, times // 2)], [(step, times // 2), (GaussianDpEvent(40.0), 1)]
    )
    assert card.setting.epsilon is not None and honest.setting.epsilon is not None
    assert card.setting.epsilon < 0.8 * honest.setting.epsilon
    assert failures(card, artifacts) == ([NAME], [NAME])


def test_the_price_of_a_training_step_cannot_pass_as_that_of_the_evaluation(tmp_path: Path) -> None:
    """Where both are composed, the evaluation is the last release; a step on a sample costs less."""
    artifacts, run = evaluated(tmp_path, noise=0.5)
    count, (step, times) = _of_training_alone(run.receipt.schedule)
    first = run.trace.tail(1) if isinstance(run.trace, pd.DataFrame) else pd.DataFrame()
    rows = pd.concat([first, pd.DataFrame(run.trace).head(-1)], ignore_index=True)
    moved = [(GaussianDpEvent(0.5), 1), count, (step, times - 1)]
    card = forge_card(replace(run, trace=rows), artifacts, moved, [(step, 1)], adjacency="REPLACE_ONE")
    assert card.setting.evaluation_epsilon is not None
    assert card.setting.evaluation_epsilon < 0.5 * epsilon(
        [(GaussianDpEvent(0.5), 1)], DELTA, adjacency=REPLACE_ONE
    )
    assert failures(card, artifacts) == ([NAME], [NAME])


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("setting", "holdout", "public"),
        ("evidence", "files", dict.fromkeys(FILES[:3], "0" * 64)),
    ],
)
def test_an_evaluation_is_one_wherever_the_card_has_it(
    tmp_path: Path, section: str, name: str, value: object
) -> None:
    artifacts, run = evaluated(tmp_path)
    document = build(run, KEY).to_json()
    document[section] |= {name: value}  # type: ignore[operator]
    ours, theirs = failures(_signed(document), artifacts)
    assert NAME in ours
    assert NAME in theirs
