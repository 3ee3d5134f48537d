"""A rare class: weights in training, recall and precision beside accuracy, and the threshold at a stated cost."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import precision_score, recall_score
from torch import nn

from algorithms.evaluation import (
    ReleasedHistogram,
    cheapest_threshold,
    class_metrics_of,
    count,
    histogram_for,
)
from algorithms.models import build
from algorithms.models.objectives import classifier, with_class_weights
from algorithms.models.saved import load as load_model
from algorithms.privacy.card import load
from data.card import CARDS, DataCard
from tasks import model_building
from tasks.config import params
from tasks.config.overrides import ParamOverrides, params_edit
from tasks.evaluate import EvaluationResult, exact_histogram, uneven_metrics
from tasks.predict import predict
from tasks.runs.metrics import metric_rows, report_text
from tasks.tracking.runs import summary
from tests.support.cards import csv_of, label, number
from tests.support.checkout import PROJECT
from tests.support.metrics import metrics_of
from tests.support.own_records import CARD, finish
from tests.support.own_records import declared as declared
from tests.support.refusals import refused_as
from tests.support.synthetic_run import description
from tests.support.workspace import Workspace

__all__ = ["declared"]
COSTS = {"yes": 30.0}


def rare_people(people: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of two classes, [n, 2], and labels, 2 % of which are 1."""
    draw = np.random.default_rng(seed)
    labels = (draw.random(people) < 0.02).astype(np.int64)
    positive = 1 / (1 + np.exp(-draw.normal(-4.0 + 2.5 * labels, 1.0)))
    return np.stack([1 - positive, positive], axis=1), labels


def test_weights_multiply_losses_and_leave_the_bound_of_gradients() -> None:
    plain = build("logistic", input_shape=(3,), classes=2, seed=0)
    weighted = with_class_weights(plain, (1.0, 5.0))
    outputs, labels = torch.tensor([[0.3], [-2.0], [1.5]]), torch.tensor([0, 1, 1])
    by_hand = np.log1p(np.exp([0.3, 2.0, -1.5])) * [0.2, 1.0, 1.0]
    assert weighted.losses(outputs, labels).numpy() == pytest.approx(by_hand)
    assert weighted.bounds == plain.bounds  # for gradients of at most 1, as no weight is above 1
    free = outputs.clone().requires_grad_(True)
    (slopes,) = torch.autograd.grad(weighted.losses(free, labels).sum(), free)
    assert slopes.abs().max() < 1.0


def test_weights_find_more_of_a_rare_class() -> None:
    draw = torch.Generator().manual_seed(0)
    records = torch.randn(2000, 2, generator=draw)
    labels = (records[:, 0] + torch.randn(2000, generator=draw) > 3.0).long()
    recalls = []
    for weights in ((1.0, 1.0), (1.0, 20.0)):
        model = with_class_weights(classifier("small", nn.Linear(2, 2)), weights)
        optimizer = torch.optim.LBFGS(model.module.parameters(), max_iter=100)

        def close(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model.losses(model.module(records), labels).mean()
            loss.backward()
            return loss

        optimizer.step(close)
        recalls.append(recall_score(labels, model.module(records).argmax(1)))
    assert recalls[1] > recalls[0] + 0.3


@pytest.mark.parametrize(
    ("public", "weights", "fields"),
    [
        ({}, {"dgo": 2.0}, {"name": "dgo", "classes": "cat, dog, owl"}),
        ({"classes": ()}, {"dog": 2.0}, {"name": None}),
    ],
)
def test_weights_that_fit_no_class_are_refused(
    public: dict[str, Any], weights: dict[str, float], fields: dict[str, Any]
) -> None:
    known = dataclasses.replace(description(), **public)
    with refused_as("bad_keys", keys=("model.class_weights",), **fields):
        model_building.class_weights_of(weights, known)


@pytest.mark.parametrize("weights", [{"yes": 0.0}, {"yes": -1.0}, {}, {"yes": "much"}])
def test_impossible_weights_are_refused_with_their_key(weights: dict[str, Any]) -> None:
    document = {"model": {"name": "softmax", "class_weights": weights}}
    with refused_as("bad_keys", params.ParamsRefusedError):
        params.parse(document, reads=("model",))


@pytest.mark.parametrize(
    "keys",
    [
        {"costs": {"maybe": 2.0}},
        {"costs": {"yes": 0.0}},
        {"costs": {}},
        {"classes": ["a", "b", "c"], "costs": {"a": 2.0}},
    ],
)
def test_costs_that_fit_no_two_classes_are_refused(keys: dict[str, Any]) -> None:
    document = CARD | {"reader": csv_of(number("x", 0, 1), label("y"))} | keys
    document |= {"files": {"train": {"path": "x.csv", "keyed_sha256": "0" * 64}}}
    with pytest.raises(ValueError, match="costs"):
        DataCard.model_validate_json(json.dumps(document))


def test_the_threshold_is_the_cheapest_of_all_edges() -> None:
    scores, labels = rare_people(4000, 1)
    spec = histogram_for("two classes", 2)
    exact = ReleasedHistogram(spec, count(spec, scores, labels), 0.0)
    decision = cheapest_threshold(exact, (1.0, 30.0))
    assert decision is not None and decision.cost is not None and decision.constant_cost is not None

    def cost(threshold: float) -> float:
        named = scores[:, 1] > threshold
        return float((30.0 * (labels[~named] == 1).sum() + (labels[named] == 0).sum()) / len(labels))

    # Edges are 63; a threshold between two of them can be a little cheaper.
    best = min(cost(threshold) for threshold in np.unique(scores[:, 1]))
    assert cost(decision.at.threshold) == pytest.approx(decision.cost.value)
    assert best <= decision.cost.value <= 1.15 * best
    assert decision.constant_cost.value == pytest.approx(min(30.0 * labels.mean(), 1 - labels.mean()))


def test_a_noisy_histogram_gives_a_threshold_nearly_as_cheap() -> None:
    scores, labels = rare_people(4000, 2)
    spec = histogram_for("two classes", 2)
    cells, ratios = count(spec, scores, labels), []
    exact = cheapest_threshold(ReleasedHistogram(spec, cells, 0.0), (1.0, 30.0))
    assert exact is not None and exact.cost is not None
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0, 3.7 * spec.sensitivity, spec.cells)
        decision = cheapest_threshold(
            ReleasedHistogram(spec, cells + noise, 3.7 * spec.sensitivity), (1.0, 30.0)
        )
        assert decision is not None
        named = scores[:, 1] > decision.at.threshold
        real = (30.0 * (labels[~named] == 1).sum() + (labels[named] == 0).sum()) / len(labels)
        ratios.append(real / exact.cost.value)
    assert exact.constant_cost is not None
    assert np.mean(ratios) < 1.3 < exact.constant_cost.value / exact.cost.value  # at epsilon 1


@pytest.mark.parametrize("classes", [2, 3, 40])
def test_recall_and_precision_of_each_class_are_those_of_scikit_learn(classes: int) -> None:
    draw = np.random.default_rng(classes)
    labels = draw.choice(classes, 3000, p=np.arange(1, classes + 1) / np.arange(1, classes + 1).sum())
    scores = draw.dirichlet(np.ones(classes), 3000) + 0.2 * np.eye(classes)[labels]
    scores /= scores.sum(axis=1, keepdims=True)
    spec = histogram_for("two classes" if classes == 2 else "classes", classes)
    per_class = class_metrics_of(ReleasedHistogram(spec, count(spec, scores, labels), 0.0))
    found = [(one.recall, one.precision, one.share) for one in per_class]
    predicted = scores.argmax(axis=1)
    for place, (recall, precision, share) in enumerate(found):
        assert recall is not None and precision is not None and share is not None
        assert recall.value == pytest.approx(recall_score(labels == place, predicted == place))
        assert precision.value == pytest.approx(precision_score(labels == place, predicted == place))
        assert share.value == pytest.approx((labels == place).mean())


def test_the_page_the_terminal_and_wandb_say_what_becomes_of_a_rare_class() -> None:
    scores, labels = rare_people(4000, 3)
    info = dataclasses.replace(description(), classes=("no", "<yes>"), costs=(1.0, 30.0))
    evaluation = EvaluationResult(scores.argmax(axis=1), 0.1, scores)
    metrics: dict[str, Any] = {**uneven_metrics(exact_histogram(info, evaluation, labels), info)}
    metrics |= {"test_accuracy": 0.98, "majority_accuracy": 0.98, "test_records": 4000}
    rows = dict(metric_rows(metrics))
    assert "naming all so: 2." in rows["rare class <yes>"]
    assert "from a probability of" in rows["cheapest threshold"]
    text = report_text(metrics, 4000, 0.98).sentences
    assert "Classes are uneven" in text and "&lt;yes&gt;" in text and "<yes>" not in text
    assert "--threshold" in text and "better than always naming one class" in text
    card = load(PROJECT / "tests/golden/card-00-dp_sgd.json")
    sent = {name: one for name, one in summary(metrics, card).items() if name.startswith("test/rare_")}
    (rare,) = (one for one in metrics["by_class"] if one["class"] == "<yes>")
    assert sent == {f"test/rare_{name}": rare[name]["value"] for name in ("share", "recall", "precision")}
    drowned = metrics | {
        "by_class": [one | {"recall": None, "precision": None} for one in metrics["by_class"]]
    }
    unknown = (
        " Of the records of &lt;yes&gt; noise drowns how many the model finds (recall); of those that it calls so noise"
        " drowns how many are (precision), where naming all records so would be right in 2."
    )
    assert unknown in report_text(drowned, 4000, 0.98).sentences
    even = metrics | {"by_class": [metrics["by_class"][0] | {"class": name} for name in ("no", "<yes>")]}
    assert "uneven" not in report_text(even, 4000, 0.98).sentences


def table(path: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.random(400).round(3)
    rows = [f"{one},{'yes' if one > 0.93 else 'no'}" for one in x]
    path.write_text("\n".join(["x,y", *rows]) + "\n")


@pytest.mark.usefixtures("same_secrets")
def test_costs_on_a_card_reach_the_page_and_predictions_and_change_no_run(
    workspace: Workspace, declared: Callable[..., None]
) -> None:
    table(workspace.root / "rare.csv")
    keys = {"reader": csv_of(number("x", 0, 1), label("y")) | {"cells": {"trees": 4}}, "holdout": "private"}
    declared("rare.csv", model={"name": "additive", "class_weights": {"yes": 3.0}}, **keys)
    finish(workspace)
    before = metrics_of(workspace)
    declared("rare.csv", model={"name": "additive", "class_weights": {"yes": 3.0}}, costs=COSTS, **keys)
    finish(workspace)
    after = metrics_of(workspace)
    assert after["run_id"] == before["run_id"]
    assert "decision" not in before and 0.0 < after["decision"]["threshold"] < 1.0
    model = load_model(workspace.root / "artifacts")
    threshold = after["decision"]["threshold"]
    for some in predict(model, workspace.root / "rare.csv", threshold=threshold):
        assert [one == "yes" for one in some.predicted] == (some.scores[:, 1] > threshold).tolist()
    for wrong in (0.0, 1.0, 7.0):
        with refused_as("bad_option", options=("--threshold",)):
            next(predict(model, workspace.root / "rare.csv", threshold=wrong))


def test_weights_stay_when_the_method_changes_and_go_with_the_data(workspace: Workspace) -> None:
    workspace.set("model", name="softmax", class_weights={"3": 2.0})
    cards = workspace.root / "data/cards"
    cards.mkdir(parents=True)
    for name in ("digits", "synthetic-logistic"):
        shutil.copyfile(CARDS / f"{name}.yaml", cards / f"{name}.yaml")
    same, other = (
        params_edit(workspace.root, overrides).params.model.class_weights
        for overrides in (ParamOverrides(algorithm="dp_gd"), ParamOverrides("synthetic-logistic"))
    )
    assert (same, other) == ({"3": 2.0}, None)


def test_a_threshold_is_refused_where_there_are_not_two_classes(
    workspace: Workspace,
) -> None:
    workspace.train()
    with refused_as("bad_option", options=("--threshold",)):
        next(predict(workspace.root / "artifacts", workspace.root / "any.csv", threshold=0.2))
