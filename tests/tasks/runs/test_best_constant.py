"""How a model compares with the best constant answer, for each kind of target, by what is known of chance."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from data.targets import IGNORED, Count, Labels, NextToken, Number, Quantile, Tags
from tasks.evaluate import EvaluationResult, classification_metrics, compute_metrics
from tasks.runs.metrics import metric_rows, report_text

PEOPLE = 400
NUMBERS = {
    "number": (Number(bounds=(0.0, 10.0)), "always naming the mean"),
    "count": (Count(bounds=(0.0, 10.0), counts=True), "always naming the mean"),
    "quantile": (Quantile(bounds=(0.0, 10.0), quantile=0.5), "always naming the quantile of all records"),
}


def said(metrics: dict[str, Any]) -> str:
    words = [text for _, text in metric_rows(metrics) if "the model is" in text]
    assert len(words) == 1
    return words[0]


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize(
    ("skill", "how"), [(1.0, "better than"), (0.0, "within noise of"), (-1.0, "worse than")]
)
def test_a_model_of_a_number(kind: str, skill: float, how: str) -> None:
    label_type, constant = NUMBERS[kind]
    draw = np.random.default_rng(1)
    numbers = draw.normal(5.0, 1.5, PEOPLE) if kind == "quantile" else draw.poisson(3.0, PEOPLE)
    labels = (numbers.clip(0, 10) / 5 - 1).astype(np.float32)
    centred = labels - np.median(labels) if kind == "quantile" else labels - labels.mean()
    wobble = 0.03 * draw.normal(size=PEOPLE) if skill == 0 else 0.0
    scores = (labels - centred + 0.5 * skill * centred + wobble)[:, None].astype(np.float64)
    found = compute_metrics(label_type, EvaluationResult(np.zeros(PEOPLE, np.int64), 0.0, scores), labels)
    assert f"the model is {how} {constant}" in said(found)
    warning = report_text(found, PEOPLE, 0.1).warning
    assert warning == (None if skill > 0 else f"The model is {how} {constant}.")


@pytest.mark.parametrize(("share", "how"), [(0.95, "better than"), (0.0, "worse than")])
def test_a_model_of_labels(share: float, how: str) -> None:
    draw = np.random.default_rng(2)
    labels = (draw.random((PEOPLE, 3)) < [0.7, 0.5, 0.2]).astype(np.float32)
    right = draw.random((PEOPLE, 1)) < share
    predicted = np.where(right, labels, 1 - labels).astype(np.int64)
    label_type = Labels(labels=("a", "b", "c"))
    found = compute_metrics(label_type, EvaluationResult(predicted, 0.0, predicted.astype(float)), labels)
    assert f"the model is {how} an answer that is always the same" in said(found)


@pytest.mark.parametrize(("share", "how"), [(0.95, "better than"), (0.1, "worse than")])
@pytest.mark.parametrize("kind", ["tags", "next token"])
def test_a_model_of_tokens(kind: str, share: float, how: str) -> None:
    draw = np.random.default_rng(3)
    labels = draw.choice(4, (PEOPLE, 6), p=[0.4, 0.3, 0.2, 0.1])
    labels[:, 5] = IGNORED
    # The next token is predicted at the place before it.
    at = np.where(draw.random(labels.shape) < share, labels, (labels + 1) % 4)
    predicted = at if kind == "tags" else np.roll(at, -1, axis=1)
    label_type = Tags(tags=("O", "a", "b", "c")) if kind == "tags" else NextToken(next="token")
    found = compute_metrics(label_type, EvaluationResult(predicted, 1.0, np.zeros((PEOPLE, 0))), labels)
    what = "tag" if kind == "tags" else "token"
    assert f"the model is {how} always naming the most frequent {what}" in said(found)


@pytest.mark.parametrize(
    ("low", "high", "how"),
    [(0.72, 0.8, "better than"), (0.6, 0.69, "worse than"), (0.65, 0.75, "within noise of")],
)
def test_private_people_are_judged_by_their_intervals(low: float, high: float, how: str) -> None:
    middle = (low + high) / 2
    metrics: dict[str, Any] = {
        "held_out": "private",
        "evaluation_epsilon": 1.0,
        "test_accuracy": {"value": middle, "low": low, "high": high},
        "test_majority_accuracy": {"value": 0.7, "low": 0.69, "high": 0.71},
    }
    words = f"The model is {how} always naming the most frequent class."
    assert report_text(metrics, 0, 0.0).warning == (None if how == "better than" else words)
    assert (
        dict(metric_rows(metrics))["baseline"] == f"the model is {how} always naming the most frequent class"
    )
    number = {key: metrics[key] for key in ("held_out", "evaluation_epsilon")}
    number["test_r2"] = {"value": middle - 0.7, "low": low - 0.7, "high": high - 0.7}
    assert dict(metric_rows(number))["baseline"] == f"the model is {how} always naming the mean"
    drowned: list[tuple[dict[str, Any], str]] = [
        (number | {"test_r2": None}, "always naming the mean"),
        (metrics | {"test_accuracy": None}, "always naming the most frequent class"),
        (metrics | {"test_majority_accuracy": None}, "always naming the most frequent class"),
    ]
    for of, constant in drowned:
        row = dict(metric_rows(of))["baseline"]
        assert row == f"not known, as noise drowns it: whether the model is better than {constant}"
    scores = {key: number[key] for key in ("held_out", "evaluation_epsilon")} | {"test_score": None}
    assert "baseline" not in dict(metric_rows(scores))


def test_shares_of_records_and_errors_of_probabilities_are_in_percent() -> None:
    estimate = {"value": 0.081, "low": 0.02, "high": 0.137}
    names = ("positive_share", "calibration_gap", "calibration_error", "majority_accuracy", "f1")
    private = {"held_out": "private", "evaluation_epsilon": 1.0} | {
        f"test_{name}": estimate for name in names
    }
    rows = dict(metric_rows(private | {"test_accuracy": estimate}))
    assert rows.pop("test F1") == "0.081, 0.020 to 0.137"
    shown = {rows[f"test {name.replace('_', ' ')}"] for name in names[:-1]}
    assert shown == {"8.10%, 2.00% to 13.70%"}
    text = report_text(private | {"test_accuracy": estimate, "test_auc": None}, 0, 0.0).sentences
    assert '<td class="name">F1</td><td class="name">0.081</td><td class="name">0.020 to 0.137</td>' in text
    assert (
        '<td class="name">AUC</td><td class="name">unknown</td><td class="name">noise drowns it</td>' in text
    )
    scores = np.tile([0.7, 0.3], (10, 1))  # sure to 70 %, and right in 9 of 10 cases
    labels = np.array([0] * 9 + [1])
    found = classification_metrics(EvaluationResult(np.zeros(10, np.int64), 0.0, scores), labels)
    assert dict(metric_rows(asdict(found)))["AUC, F1, calibration error"].endswith(", 20.00%")
