"""Thresholds and calibration curves of noisy histograms."""

import numpy as np
import pytest
from scipy.stats import norm

from algorithms.evaluation import ReleasedHistogram, count, histogram_for
from algorithms.evaluation.curves import calibration_curve, calibration_error_of, thresholds_of
from comparisons import private_evaluation as populations

MEAN, SPREAD, POSITIVE = (-2.0, 1.0), 1.5, 0.3


@pytest.fixture(scope="module")
def drawn():
    population = populations.two_classes(0.3, MEAN, (SPREAD, SPREAD))
    draw = np.random.default_rng(41)
    return [population.released(10_000, 1.0, draw) for _ in range(200)]


def test_metrics_at_thresholds_cover_those_of_normal_scores(drawn):
    hits, lifts = [], []
    for each in drawn:
        points = thresholds_of(each)
        assert len(points) == 15 and points[7].threshold == pytest.approx(0.5)
        for point in (points[7], points[9], points[10]):
            odds = np.log(point.threshold / (1 - point.threshold))
            false, true = norm.sf((odds - np.array(MEAN)) / SPREAD)
            selected = POSITIVE * true + (1 - POSITIVE) * false
            precision = POSITIVE * true / selected
            for name, truth in {
                "selected": selected,
                "recall": true,
                "false_positive_rate": false,
                "precision": precision,
            }.items():
                estimate = getattr(point, name)
                hits.append(estimate.low <= truth <= estimate.high)
            lifts.append(point.lift.low <= precision / POSITIVE <= point.lift.high)
    assert 0.93 <= np.mean(hits) <= 0.97
    assert 0.915 <= np.mean(lifts) <= 0.985  # of 200 draws


def test_the_calibration_curve_covers_the_share_of_positives(drawn):
    # With equal spreads the true log-odds are linear in the score: slope (m1 - m0) / s^2, and even at the middle.
    hits = []
    for each in drawn:
        curve = calibration_curve(each)
        assert curve[0].low == 0.0 and curve[-1].high > 0.9 and len(curve) > 4
        for point in curve[1:-1]:
            inside = np.log(np.array([point.low, point.high]) / (1 - np.array([point.low, point.high])))
            below, above = norm.cdf((inside[:, None] - np.array(MEAN)) / SPREAD).T
            negative, positive = (1 - POSITIVE) * (below[1] - below[0]), POSITIVE * (above[1] - above[0])
            hits.append(point.observed.low <= positive / (negative + positive) <= point.observed.high)
            assert point.low <= point.predicted <= point.high
    assert 0.93 <= np.mean(hits) <= 0.97


def test_the_calibration_error_covers_that_of_all_people(drawn):
    # The scores are too close together: the true log-odds are 4/3 of them, and shifted.
    population = populations.two_classes(0.3, MEAN, (SPREAD, SPREAD))
    predicted, gaps = population.scores[:, 1], population.scores[:, 1] - population.labels
    hits = []
    for each in drawn:
        ends = [point.high for point in calibration_curve(each)[:-1]]
        inside = np.searchsorted(ends, predicted)
        people = np.bincount(inside, population.frequencies, len(ends) + 1)
        sums = np.bincount(inside, population.frequencies * gaps, len(ends) + 1)
        truth = np.sqrt(np.sum(sums**2 / people))
        error = calibration_error_of(each)
        hits.append(error.low <= truth <= error.high)
    assert 0.93 <= np.mean(hits) <= 0.985  # of 200 draws


def test_confidence_of_more_classes_has_a_curve():
    population = populations.classes(10, [1] * 10, 0.7)
    curve = calibration_curve(population.released(20_000, 3.0, np.random.default_rng(42)))
    assert [(point.low, point.high) for point in curve[-3:]] == [
        (0.8125, 0.875),
        (0.875, 0.9375),
        (0.9375, 1.0),
    ]
    confidence, right = population.scores.max(axis=1), population.scores.argmax(axis=1) == population.labels
    for point in curve:
        inside = (confidence >= point.low) & (confidence < point.high)
        assert point.observed.low < right[inside].mean() < point.observed.high


def test_nobody_has_no_curve():
    spec = histogram_for("two classes", 2)
    nobody = ReleasedHistogram(spec, np.zeros(spec.cells), 10.0)
    assert calibration_curve(nobody) == ()
    assert {point.precision for point in thresholds_of(nobody)} == {None}
    numbers = histogram_for("number", 1)
    other = ReleasedHistogram(numbers, count(numbers, np.zeros((9, 1)), np.zeros(9)), 1.0)
    assert calibration_curve(other) == thresholds_of(other) == ()


def test_the_calibration_error_is_not_biased_by_noise():
    # Scores are true log-odds times a factor; the true error is that of 200,000 people, in the curve's bins.
    draw, spec, noise = np.random.default_rng(43), histogram_for("two classes", 2), 3.73 * np.sqrt(5)
    for factor in (1.0, 2.0):
        odds = draw.normal(-0.5, 1.5, 200_000)
        labels = draw.random(200_000) < 1 / (1 + np.exp(-odds))
        predicted = 1 / (1 + np.exp(-factor * odds))
        hits, values = [], []
        for some in np.arange(200_000).reshape(40, 5000):
            scores = np.stack([1 - predicted[some], predicted[some]], axis=1)
            cells = count(spec, scores, labels[some]) + draw.normal(0, noise, spec.cells)
            release = ReleasedHistogram(spec, cells, noise)
            error = calibration_error_of(release)
            curve = calibration_curve(release)
            inside = np.searchsorted([point.high for point in curve[:-1]], predicted)
            people = np.bincount(inside, minlength=len(curve))
            gaps = np.bincount(inside, predicted - labels, len(curve)) / people
            truth = np.sqrt(np.average(gaps**2, weights=people))
            hits.append(error.low <= truth <= error.high)
            values.append(error.value - truth)
            assert error.low == 0.0 if factor == 1.0 and error.value == 0.0 else error.high > error.value
        assert np.mean(hits) >= 0.875  # of 40; where the truth is 0 the lower end is cut off
        assert abs(np.mean(values)) < 0.012
