"""The loss at a model's start, which is public: its value for each loss, and that plans on disk do not change by it."""

import math
from dataclasses import replace

import pytest
import torch

from algorithms.core.facts_of_models import zero_start_loss
from algorithms.core.planning_facts import PlanningFacts
from algorithms.models import build


@pytest.mark.parametrize(
    ("name", "classes", "loss"),
    [("logistic", 2, math.log(2)), ("softmax", 7, math.log(7)), ("svm", 2, 1.0), ("huber_svm", 2, 1.0)],
)
def test_a_linear_classifier_from_zero_has_the_loss_of_a_guess(name: str, classes: int, loss: float) -> None:
    model = build(name, input_shape=(5,), classes=classes, seed=3)
    assert zero_start_loss(model, classes) == pytest.approx(loss, rel=1e-12)
    with torch.no_grad():
        next(iter(model.module.parameters()))[0, 0] = 1e-3
    assert zero_start_loss(model, classes) is None


def test_networks_and_numbers_have_no_known_loss_at_the_start() -> None:
    network = build("tanh_cnn", input_shape=(1, 28, 28), classes=10, seed=0)
    number = build("linear", input_shape=(5,), classes=1, seed=0, predicts="number")
    assert zero_start_loss(network, 10) is None
    assert zero_start_loss(number, 1) is None


def test_plans_of_before_are_of_the_same_facts() -> None:
    facts = PlanningFacts(100, 5, 1, 2)
    known = replace(facts, start_loss=0.5)
    assert known == facts and known.to_json() == facts.to_json()
    assert PlanningFacts.from_json(known.to_json()).start_loss is None
