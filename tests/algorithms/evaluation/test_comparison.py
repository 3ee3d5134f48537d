"""The difference of two models on the same people, released with the other tables."""

import math

import numpy as np
import pytest

from algorithms.evaluation import (
    ReleasedHistogram,
    count,
    expected_errors,
    histogram_for,
    metrics_of,
    reasons_of,
)
from tests.support.intervals import Intervals

ALONE = histogram_for("score", 1, compared=True)
BESIDE_OTHERS = histogram_for("two classes", 2, compared=True)


def compared(spec, draw, people, gain, noise):
    """Of the people a share is right by one model alone, `gain` more by this one."""
    share = draw.multinomial(people, [0.1, 0.8 - gain, 0.1 + gain]) / people
    scores = np.full((3, spec.outputs), 0.5)
    cells = people * count(spec, scores, np.zeros(3), weights=share, differences=np.array([-1.0, 0.0, 1.0]))
    return ReleasedHistogram(spec, cells + draw.normal(0.0, noise, spec.cells), noise)


@pytest.mark.parametrize(
    ("spec", "people", "noise"),
    [(ALONE, 1000, 3.73), (ALONE, 5000, 26.7), (ALONE, 50_000, 16.3), (BESIDE_OTHERS, 5000, 26.7)],
)
def test_the_interval_covers(spec, people, noise):
    draw, gain = np.random.default_rng(31), 0.02
    seen = Intervals(400)
    for _ in range(seen.draws):
        seen.note("difference", metrics_of(compared(spec, draw, people, gain, noise))["difference"], gain)
    seen.check(shown=1)


def test_equal_models_are_told_apart_as_often_as_said():
    draw = np.random.default_rng(32)
    drawn = [metrics_of(compared(ALONE, draw, 2000, 0.0, 10.0))["difference"] for _ in range(1000)]
    assert 0.01 < np.mean([each.low > 0 for each in drawn]) < 0.04


@pytest.mark.parametrize("spec", [ALONE, BESIDE_OTHERS])
def test_a_years_52_comparisons_have_the_deviation_of_half_a_release(spec):
    # Epsilon 1 a year is noise of 3.73 sqrt(52) each: .54 points of accuracy with 5,000 people in a release of one sum.
    # The comparison has half of the squared norm, of which the sum of differences has 1 / 1.125: 1.5 times as much.
    noise, draw = 3.73 * math.sqrt(52) * spec.sensitivity, np.random.default_rng(33)
    people = 5000
    same = np.zeros(people)  # no sampling error
    scores = np.full((people, spec.outputs), 0.5)
    cells = count(spec, scores, same, differences=same)
    drawn = [
        metrics_of(ReleasedHistogram(spec, cells + draw.normal(0, noise, spec.cells), noise))["difference"]
        for _ in range(300)
    ]
    assert np.std([each.value for each in drawn]) == pytest.approx(1.5 * 0.0054, rel=0.12)
    assert expected_errors(spec, people, noise)["difference"] == pytest.approx(
        math.hypot(math.sqrt(0.2 / 5000), 1.5 * 0.0054), rel=0.05
    )


def test_noise_that_drowns_the_difference_shows_none():
    nobody = ReleasedHistogram(ALONE, np.zeros(ALONE.cells), 100.0)
    assert metrics_of(nobody)["difference"] is None and "too few" in reasons_of(nobody)["difference"]


def test_a_model_whose_scores_are_not_finite_is_not_compared():
    changes = np.repeat([1.0, np.nan], [900, 100])
    cells = count(ALONE, np.full((1000, 1), 0.5), np.zeros(1000), differences=changes)
    assert metrics_of(ReleasedHistogram(ALONE, cells, 5.0))["difference"] is None


def test_no_comparison_is_described_as_before_there_were_any():
    assert "compared" not in histogram_for("score", 1).to_json()
    assert '"compared": true' in ALONE.to_json()
