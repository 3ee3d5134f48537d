"""The majority class by noisy counts."""

import math

import numpy as np
import pytest
import torch

from algorithms.errors import RefusedError
from algorithms.methods.baselines import Majority, log_odds
from algorithms.models import Model, build
from tests.algorithms.bench import MadeUp, Outcome, run, small_model
from tests.algorithms.test_baselines import LOGISTIC, TARGET, public, quiet


def majority(model: Model, labels: list[int], *, classes: int = 2, noised: bool = False) -> Outcome:
    records = MadeUp(np.ones((len(labels), 1, 4, 4), np.float32), np.array(labels))
    plan = Majority().plan(TARGET, public(len(labels), model, classes=classes))
    return run(Majority(), plan if noised else quiet(plan), records, model)


@pytest.mark.parametrize("name", ["logistic", "svm"])
@pytest.mark.parametrize(("ones", "zeros"), [(30, 10), (10, 30)])
def test_the_majority_class_of_two_is_a_bias(name: str, ones: int, zeros: int) -> None:
    released = majority(small_model(name, classes=2), [1] * ones + [0] * zeros).released
    assert not released[:-1].any()
    assert float(released[-1]) == pytest.approx(math.log(ones / zeros), abs=1e-4)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_majority_class_of_a_softmax_has_the_frequencies_for_probabilities(classes: int) -> None:
    model = build("softmax", input_shape=(1, 4, 4), classes=classes, seed=1)
    counts = [20, 70, 10][:classes]
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    released = majority(model, labels, classes=classes).released
    outputs = model.outputs(model.named(released), torch.randn(5, 1, 4, 4))
    expected = torch.tensor(counts) / sum(counts)
    torch.testing.assert_close(outputs.softmax(dim=1), expected.expand(5, -1), atol=1e-4, rtol=0)


def test_counts_that_noise_made_negative_give_a_bounded_bias() -> None:
    assert log_odds(torch.tensor([-50.0, 1e9])).tolist() == [10.0]
    assert log_odds(torch.tensor([1e9, -50.0])).tolist() == [-10.0]
    assert float(log_odds(torch.tensor([-50.0, 20.0]))) == pytest.approx(math.log(20.0))
    three = log_odds(torch.tensor([-1.0, 0.5, 1e30]))
    assert three.tolist() == [-10.0, -10.0, 10.0]


def test_a_record_changes_one_count_by_one() -> None:
    found = majority(LOGISTIC, [1] * 30 + [0] * 10, noised=True)
    more = majority(LOGISTIC, [1] * 30 + [0] * 11, noised=True)
    torch.testing.assert_close(
        more.answers[0] - found.answers[0], torch.tensor([1.0, 0.0], dtype=torch.float64), atol=1e-3, rtol=0
    )
    row = found.trace.rows[0]
    assert (row.kind, row.clip_norm) == ("total", 1.0)
    assert 5 < row.noise_std < 6  # epsilon 1 at delta 1e-8


def test_the_majority_class_is_refused_for_other_models() -> None:
    with pytest.raises(RefusedError, match="bias of a linear model"):
        Majority().plan(TARGET, public(50, inputs=None))
