"""Thresholds and calibration curves of noisy histograms."""

import numpy as np
import pytest
from scipy.stats import norm

from algorithms.evaluation import ReleasedHistogram, count, histogram_for
from algorithms.evaluation.curves import (
    calibration_curve,
    calibration_error_of,
    threshold_at,
    thresholds_of,
)
from algorithms.evaluation.estimates import scored_cells
from comparisons import private_evaluation as populations

MEAN, SPREAD, POSITIVE = (-2.0, 1.0), 1.5, 0.3


@pytest.fixture(scope="module")
def drawn():
    population = populations.two_classes(0.3, MEAN, (SPREAD, SPREAD))
    draw = np.random.default_rng(41)
    return [population.released(10_000, 1.0, draw) for _ in range(200)]


def test_metrics_at_thresholds_cover_those_of_normal_scores(drawn):
    hits, lifts = [], []
    cuts, points = {7: 32, 9: 40, 10: 44}, thresholds_of(drawn[0])
    assert len(points) == 15 and points[7].threshold == pytest.approx(0.5)
    first = scored_cells(drawn[0].view())
    assert all(points[place] == threshold_at(first, cut) for place, cut in cuts.items())
    for each in drawn:
        cells = scored_cells(each.view())
        for point in (threshold_at(cells, cut) for cut in cuts.values()):
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


def classes_of(confidence, right):
    """People whose prediction has a confidence, and is right for a share of them; and the error over 16 bins."""
    predicted, share = np.repeat(confidence, 2), np.stack([right, 1 - right], axis=1).ravel()
    scores = np.repeat((1 - predicted)[:, None] / 9, 10, axis=1)
    scores[:, 0] = predicted
    labels = np.tile([0.0, 1.0], len(confidence))
    frequencies = share / len(confidence)
    truth = error_over(np.arange(1, 16) / 16, predicted, labels == 0, frequencies)
    return populations.Population(histogram_for("classes", 10), scores, labels, frequencies, {"error": truth})


def two_classes_of(odds, positive):
    """The same for log-odds of two classes."""
    predicted = np.repeat(1 / (1 + np.exp(-odds)), 2)
    labels = np.tile([1.0, 0.0], len(odds))
    frequencies = np.stack([positive, 1 - positive], axis=1).ravel() / len(odds)
    inner = np.sinh(np.linspace(-1, 1, 63) * np.arcsinh(16)) / 2  # even in asinh(2 z), up to 8
    ends = 1 / (1 + np.exp(-inner[3::4]))
    truth = error_over(ends, predicted, labels, frequencies)
    scores = np.stack([1 - predicted, predicted], axis=1)
    return populations.Population(
        histogram_for("two classes", 2), scores, labels, frequencies, {"error": truth}
    )


def error_over(ends, predicted, observed, frequencies):
    inside = np.searchsorted(ends, predicted, side="right")
    people = np.bincount(inside, frequencies, 16)
    sums = np.bincount(inside, frequencies * (predicted - observed), 16)
    return float(np.sqrt(np.sum(sums[people > 0] ** 2 / people[people > 0])))


GRID = (np.arange(400) + 0.5) / 400
ODDS = norm.ppf(GRID) * 1.5
SURE = np.concatenate([0.25 + 0.68 * GRID, 1 - 0.02 * GRID**2, 1 - 0.02 * GRID**2])


@pytest.mark.parametrize(
    ("population", "people", "noise"),
    [
        (
            classes_of(0.2 + 0.8 * GRID, np.clip(0.2 + 0.8 * GRID + 0.12 * np.sign(np.sin(20 * GRID)), 0, 1)),
            2000,
            7.03,
        ),
        (classes_of(SURE, SURE), 50_000, 1.39),  # no error, and most are at the upper end of the last bin
        (two_classes_of(4 * ODDS, norm.cdf(ODDS)), 2000, 7.03),
        (
            two_classes_of(
                ODDS - 2.5,
                np.clip(1 / (1 + np.exp(2.5 - ODDS)) + 0.2 * (ODDS > 0.5) * np.sign(np.sin(4 * ODDS)), 0, 1),
            ),
            2000,
            7.03,
        ),
    ],
    ids=["opposite signs", "sure of most", "too sure", "opposite signs of two classes"],
)
def test_the_calibration_error_covers_what_merged_bins_hide(population, people, noise):
    drawn = population.releases(people, noise, np.random.default_rng(44), 200)
    errors = [error for each in drawn if not isinstance(error := calibration_error_of(each), str)]
    assert len(errors) > 150
    truth = population.truth["error"]
    assert np.mean([error.low <= truth <= error.high for error in errors]) >= 0.93


def test_too_few_people_for_the_bins_have_no_calibration_error_but_a_curve():
    population = classes_of(SURE, np.clip(SURE + 0.2 * np.sign(np.sin(50 * SURE)), 0, 1))
    for each in population.releases(2000, 7.03, np.random.default_rng(45), 40):
        assert calibration_curve(each)
        assert "opposite signs" in calibration_error_of(each)


def test_noise_below_0_beside_a_clear_bin_leaves_a_calibration_error():
    spec = histogram_for("classes", 10)
    values = np.zeros(spec.cells)
    table = spec.tables_of("", values)["confidence x right"][0]
    table[0], table[1], table[2:] = 500.0, 10.0, -1.0
    assert calibration_error_of(ReleasedHistogram(spec, values, 1.0)).high > 0


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
