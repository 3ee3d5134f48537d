"""Audits of the release of held-out records: an honest one is not accused, planted faults are."""

from typing import Any

import numpy as np
import pytest

from algorithms.auditing.private_evaluation import audit_evaluation, released_values
from algorithms.core.private_evaluation import EvaluationPlan
from algorithms.evaluation import counts, histogram_for
from tests.support.soak import soak_but

SPECS = {
    "two classes": histogram_for("two classes", 2),
    "groups": histogram_for(
        "two classes", 2, (("sex", ("f", "m")), ("region", ("a", "b", "c"))), halves=True
    ),
    "classes": histogram_for("classes", 5),
    "number": histogram_for("number", 1),
    "score": histogram_for("score", 1),
    "compared": histogram_for("two classes", 2, compared=True),
    "classes, halves": histogram_for("classes", 5, halves=True),
}


@pytest.mark.parametrize("name", soak_but([name for name in SPECS if name != "classes"], SPECS))
def test_the_release_of_held_out_records_has_its_noise_and_its_bound(name: str) -> None:
    found = audit_evaluation(SPECS[name], draws=20)
    assert not found.is_violated, found
    assert found.claimed == pytest.approx(4.377, abs=0.01)  # of a multiplier of 1
    reach = {check.name: check.seen for check in found.checks}["reach of a record"]
    assert (0.85 if name == "classes, halves" else 1 - 1e-3) <= reach <= 1 + 1e-3


@pytest.mark.parametrize("name", soak_but(["groups", "score"], SPECS))
def test_an_attack_on_held_out_records_comes_near_the_claim(name: str) -> None:
    """The worst record reaches the bound, but for what temperatures gain: no record has the largest for each."""
    found = audit_evaluation(SPECS[name], draws=300)
    assert not found.is_violated, found
    assert 1.2 < found.attack.epsilon_lower_bound <= found.claimed


def noise_on_the_rounded_metric(planned: EvaluationPlan, cells: Any, model: int) -> Any:
    """What the accuracy is read from is rounded and gets noise; the cells of the plots leave as they are."""
    values = cells.copy()
    values[:4] = np.round(cells[:4], -1) + released_values(planned, 0 * cells, model)[:4]
    return values


def noise_for_the_metrics_sensitivity(planned: EvaluationPlan, cells: Any, model: int) -> Any:
    """As much noise as one count needs, although a record enters several tables."""
    return cells + (released_values(planned, 0 * cells, model)) / planned.spec.sensitivity


def the_same_noise_for_two_models(planned: EvaluationPlan, cells: Any, model: int) -> Any:
    return released_values(planned, cells, 0)


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (noise_on_the_rounded_metric, "noise"),
        (noise_for_the_metrics_sensitivity, "noise"),
        (the_same_noise_for_two_models, "noise of two models"),
    ],
)
def test_a_planted_fault_of_the_release_is_found(fault: Any, part: str) -> None:
    found = audit_evaluation(SPECS["two classes"], fault, draws=100)
    assert part in [check.name for check in found.checks if check.is_violated]


def test_a_record_that_enters_a_table_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    once = counts._contributions

    def twice(*args: Any) -> Any:
        return {name: parts * 2 for name, parts in once(*args).items()}

    monkeypatch.setattr(counts, "_contributions", twice)
    found = audit_evaluation(SPECS["classes"], draws=300)
    assert [check.name for check in found.checks if check.is_violated] == ["reach of a record"]
    assert found.attack.is_violated


def test_half_of_the_noise_is_seen_by_the_attack_too() -> None:
    def half(planned: EvaluationPlan, cells: Any, model: int) -> Any:
        return cells + released_values(planned, np.zeros_like(cells), model) / 2

    assert audit_evaluation(SPECS["score"], half, draws=400).attack.is_violated
