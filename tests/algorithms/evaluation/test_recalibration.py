"""Temperatures from the released histogram."""

import numpy as np
import pytest

from algorithms.evaluation import ReleasedHistogram, count, histogram_for
from algorithms.evaluation.recalibration import recalibration_of

SPEC = histogram_for("two classes", 2, halves=True)


def released(draw, true_temperature, people=5000, epsilon_noise=7.03):
    """Labels are drawn from log-odds of which the model gives a multiple."""
    odds = draw.normal(-0.5, 2.0, people)
    labels = (draw.random(people) < 1 / (1 + np.exp(-odds))).astype(int)
    shown = odds * true_temperature
    scores = np.stack([1 / (1 + np.exp(shown)), 1 / (1 + np.exp(-shown))], axis=1)
    noise = epsilon_noise * SPEC.sensitivity
    cells = count(SPEC, scores, labels, halves=draw.integers(0, 2, people))
    return ReleasedHistogram(SPEC, cells + draw.normal(0, noise, SPEC.cells), noise)


@pytest.mark.parametrize("temperature", [0.35, 3.0])
def test_the_temperature_of_a_miscalibrated_model_is_estimated(temperature):
    draw = np.random.default_rng(51)
    drawn = [recalibration_of(released(draw, temperature, 20_000, 3.73)) for _ in range(40)]
    assert all(drawn) and all(each.gain.low > 0 for each in drawn)
    assert np.median([each.temperature for each in drawn]) == pytest.approx(temperature, rel=0.15)


def test_a_calibrated_model_is_left_alone():
    draw = np.random.default_rng(52)
    changed = [recalibration_of(released(draw, 1.0)) for _ in range(300)]
    assert np.mean([each is not None for each in changed]) <= 0.045  # at most 2.5 %, and chance


def test_too_few_people_have_no_temperature():
    assert recalibration_of(released(np.random.default_rng(53), 0.3, 100)) is None


def test_halves_are_needed():
    spec = histogram_for("two classes", 2)
    with pytest.raises(ValueError, match="halves"):
        recalibration_of(ReleasedHistogram(spec, np.zeros(spec.cells), 1.0))
    with pytest.raises(ValueError, match="halves"):
        count(SPEC, np.full((1, 2), 0.5), np.zeros(1))
    with pytest.raises(ValueError, match="halves"):
        histogram_for("number", 1, halves=True)


def test_a_person_is_in_the_half_that_is_said():
    scores = np.array([[0.9, 0.1], [0.1, 0.9]])
    cells = ReleasedHistogram(SPEC, count(SPEC, scores, np.array([0, 1]), halves=np.array([0, 1])), 0.0)
    assert cells.half(0).sum(axis=0).tolist() == [1.0, 0.0]
    assert cells.half(1).sum(axis=0).tolist() == [0.0, 1.0]
