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
from tests.support.soak import soak_but

ALONE = histogram_for("score", 1, compared=True)
BESIDE_OTHERS = histogram_for("two classes", 2, compared=True)


def compared(spec, draw, people, gain, noise):
    """Of the people a share is right by one model alone, `gain` more by this one."""
    share = draw.multinomial(people, [0.1, 0.8 - gain, 0.1 + gain]) / people
    scores = np.full((3, spec.outputs), 0.5)
    cells = people * count(spec, scores, np.zeros(3), weights=share, differences=np.array([-1.0, 0.0, 1.0]))
    return ReleasedHistogram(spec, cells + draw.normal(0.0, noise, spec.cells), noise)


COVERED = [(1000, 3.73), (5000, 26.7), (50_000, 16.3)]


@pytest.mark.parametrize(("people", "noise"), soak_but(COVERED[:2], COVERED))
def test_the_interval_covers(people, noise):
    """Where the sample decides how wide it is, and where noise does."""
    draw, gain = np.random.default_rng(31), 0.02
    seen = Intervals(400)
    for _ in range(seen.draws):
        seen.note("difference", metrics_of(compared(ALONE, draw, people, gain, noise))["difference"], gain)
    seen.check(shown=1)


def test_beside_other_tables_it_is_the_interval_of_a_comparison_alone():
    """Its sums are as many times larger as a record's part of all other tables is."""
    share = BESIDE_OTHERS.comparison_norm / ALONE.comparison_norm
    assert share == pytest.approx(math.sqrt(len(BESIDE_OTHERS.shapes)))
    for deviation, draw in ((3.0, np.random.default_rng(34)), (30.0, np.random.default_rng(35))):
        beside = compared(BESIDE_OTHERS, draw, 5000, 0.02, deviation)
        cells = np.zeros(ALONE.cells)
        ALONE.comparison_cells(cells)[...] = BESIDE_OTHERS.comparison_cells(beside.values) / share
        alone = metrics_of(ReleasedHistogram(ALONE, cells, deviation / share))["difference"]
        found = metrics_of(beside)["difference"]
        assert (found.value, found.low, found.high) == pytest.approx((alone.value, alone.low, alone.high))


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
