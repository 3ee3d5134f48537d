"""The difference of two models on the same people."""

import numpy as np
import pytest
from scipy.stats import norm

from algorithms.evaluation import Released, count, expected_errors, histogram_for, metrics_of
from algorithms.evaluation.comparison import comparison_of

SPEC = histogram_for("difference", 1)


def compared(draw, people, gain, noise):
    """Of the people a share is right by one model alone, `gain` more by the second."""
    changes = draw.choice([1.0, 0.0, -1.0], people, p=[0.1 + gain, 0.8 - gain, 0.1])
    share = np.unique(changes, return_counts=True)[1] / people
    cells = people * count(SPEC, np.array([-1.0, 0.0, 1.0])[:, None], np.zeros(3), weights=share)
    return Released(SPEC, cells + draw.normal(0.0, noise, SPEC.cells), noise)


@pytest.mark.parametrize(("people", "noise"), [(1000, 3.73), (5000, 26.7), (50_000, 16.3)])
def test_the_interval_covers_and_the_probability_is_calibrated(people, noise):
    draw = np.random.default_rng(31)
    gain = 0.02
    drawn = [comparison_of(compared(draw, people, gain, noise)) for _ in range(600)]
    covered = np.mean([each.difference.low <= gain <= each.difference.high for each in drawn])
    assert 0.93 <= covered <= 0.97
    # z = gain n / sd is normal with this mean and deviation 1, so the probability is above .975 as often as z > 1.96.
    mean = gain * people / np.sqrt(people * (0.2 + gain) + (noise * np.sqrt(1.125)) ** 2)
    often = norm.sf(1.96 - mean)
    assert np.mean([each.probability_better > 0.975 for each in drawn]) == pytest.approx(often, abs=0.06)


def test_equal_models_are_called_better_as_often_as_said():
    draw = np.random.default_rng(32)
    called = [comparison_of(compared(draw, 2000, 0.0, 10.0)).probability_better > 0.95 for _ in range(1000)]
    assert 0.03 < np.mean(called) < 0.07


def test_a_years_52_comparisons_have_the_deviation_that_one_sum_has():
    # Epsilon 1 a year is noise of 3.73 sqrt(52) each: .54 points of accuracy with 5,000 people, 2.7 with 1,000.
    noise = 3.73 * np.sqrt(52)
    draw = np.random.default_rng(33)
    for people, deviation in ((5000, 0.0054), (1000, 0.027)):
        same = np.zeros(people)  # no sampling error
        cells = count(SPEC, same[:, None], same)
        values = [
            comparison_of(Released(SPEC, cells + draw.normal(0, noise, SPEC.cells), noise)).difference.value
            for _ in range(300)
        ]
        assert np.std(values) == pytest.approx(1.06 * deviation, rel=0.12)
    assert expected_errors(SPEC, 5000, noise)["difference"] == pytest.approx(
        np.hypot(np.sqrt(0.2 / 5000), 1.06 * 0.0054), rel=0.05
    )


def test_noise_that_drowns_the_difference_leaves_an_even_chance():
    nobody = Released(SPEC, np.zeros(SPEC.cells), 100.0)
    assert comparison_of(nobody).difference is None and metrics_of(nobody)["difference"] is None
    assert comparison_of(nobody).probability_better == 0.5


def test_a_model_whose_scores_are_not_finite_is_not_called_better():
    changes = np.repeat([1.0, np.nan], [900, 100])[:, None]
    broken = comparison_of(Released(SPEC, count(SPEC, changes, changes), 5.0))
    assert broken.difference is None and broken.probability_better == 0.5
