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


CLASSES = histogram_for("classes", 5, halves=True)


def released_classes(draw, true_temperature, people=5000, epsilon_noise=3.73, spread=2.0):
    """Labels are drawn from the probabilities of log-odds of which the model gives a multiple."""
    odds = draw.normal(0, spread, (people, 5))
    labels = (odds + draw.gumbel(size=odds.shape)).argmax(axis=1)
    scores = np.exp(odds * true_temperature)
    scores /= scores.sum(axis=1, keepdims=True)
    noise = epsilon_noise * CLASSES.sensitivity
    cells = count(CLASSES, scores, labels, halves=draw.integers(0, 2, people))
    return ReleasedHistogram(CLASSES, cells + draw.normal(0, noise, CLASSES.cells), noise)


@pytest.mark.parametrize("temperature", [0.35, 2.8])
def test_the_temperature_of_more_classes_is_chosen(temperature):
    draw = np.random.default_rng(54)
    drawn = [recalibration_of(released_classes(draw, temperature, 5000, 0.9)) for _ in range(20)]
    assert all(drawn) and all(each.gain.low > 0 and each.metric == "brier_score" for each in drawn)
    assert np.mean([each.temperature == temperature for each in drawn]) > 0.5
    assert all(abs(np.log(each.temperature / temperature)) < 0.4 for each in drawn)


def test_the_gain_of_more_classes_covers_that_of_all_people():
    """Of everybody, without noise, by the temperature that was chosen; 200 draws of which 186 to 194 are expected."""
    draw = np.random.default_rng(55)
    odds = draw.normal(0, 2.0, (200_000, 5))
    labels = (odds + draw.gumbel(size=odds.shape)).argmax(axis=1)

    def brier(beta):
        shares = np.exp(beta * odds)
        shares /= shares.sum(axis=1, keepdims=True)
        return np.square(shares - np.eye(5)[labels]).sum(axis=1).mean()

    truth = {each: brier(2.8) - brier(2.8 / each) for each in (1.4, 2.0, 2.8)}
    drawn = [recalibration_of(released_classes(draw, 2.8, 2000, 0.7)) for _ in range(200)]
    covered = [each.gain.low <= truth[each.temperature] <= each.gain.high for each in drawn]
    assert 0.92 <= np.mean(covered) <= 0.98


@pytest.mark.parametrize(("spec", "outputs"), [(SPEC, 2), (CLASSES, 5)])
def test_a_temperature_is_judged_on_the_half_that_did_not_fit_it(spec, outputs):
    """The first half needs one, for the second one the model is right as it is."""
    draw, people = np.random.default_rng(57), 4000
    odds = draw.normal(0, 2.0, (people, outputs))
    labels = (odds + draw.gumbel(size=odds.shape)).argmax(axis=1)
    half = np.arange(people) % 2

    def of_multiples(first, second):
        scores = np.exp(odds * np.where(half == 0, first, second)[:, None])
        scores /= scores.sum(axis=1, keepdims=True)
        cells = count(spec, scores, labels, halves=half)
        return recalibration_of(ReleasedHistogram(spec, cells + draw.normal(0, 1.0, spec.cells), 1.0))

    assert of_multiples(3.0, 1.0) is None
    assert of_multiples(3.0, 3.0).temperature > 1.5


@pytest.mark.parametrize("spread", [2.0, 0.01])
def test_calibrated_probabilities_of_more_classes_are_left_alone(spread):
    """Also where all are alike, so that no temperature does harm and the best one is that of the largest noise."""
    draw = np.random.default_rng(56)
    drawn = [recalibration_of(released_classes(draw, 1.0, 500, 1.2, spread)) for _ in range(300)]
    assert np.mean([each is not None for each in drawn]) <= 0.045  # at most 2.5 %, and chance
    assert recalibration_of(released_classes(draw, 0.35, 100)) is None


@pytest.mark.parametrize(("people", "has_temperature"), [(2500, False), (7000, True)])
def test_people_of_more_classes_must_stand_out_from_the_noise_in_their_number(people, has_temperature):
    """It is released at a quarter of the weight of the gains, so with four times their noise."""
    labels, half = np.ones(2 * people, dtype=int), np.arange(2 * people) % 2
    scores = np.tile([0.9, 0.025, 0.025, 0.025, 0.025], (2 * people, 1))  # sure, and wrong
    noise = 100 / np.sqrt(0.25**2 + 6 * (1 + 0.25**2))
    cells = count(CLASSES, scores, labels, halves=half)
    assert (recalibration_of(ReleasedHistogram(CLASSES, cells, noise)) is not None) is has_temperature


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
