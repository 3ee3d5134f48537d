"""Metrics of noisy histograms against those of the population, which are computed from its people."""

import numpy as np
import pytest
from scipy.stats import norm

from algorithms.evaluation import (
    ReleasedHistogram,
    calibration_curve,
    count,
    expected_errors,
    groups_of,
    histogram_for,
    metrics_of,
    reasons_of,
    recalibration_of,
    sum_of_scores,
    thresholds_of,
)
from comparisons import private_evaluation as populations

POPULATIONS = populations.populations()
del POPULATIONS["skewed classes"]  # much like the even ones
BASELINES = {"majority_accuracy"}
DRAWS = 200


def draws_of(population, people, epsilon, draws=DRAWS):
    draw = np.random.default_rng([8, people, int(10 * epsilon)])
    return [metrics_of(population.released(people, epsilon, draw)) for _ in range(draws)]


@pytest.mark.parametrize("name", ["even classes", "five classes", "numbers", "bounded scores"])
def test_estimates_have_no_bias_that_can_be_seen(name):
    population = POPULATIONS[name]
    drawn = draws_of(population, 5000, 3.0)
    for metric, truth in population.truth.items():
        if metric not in BASELINES:
            values = [each[metric].value for each in drawn]
            assert abs(np.mean(values) - truth) < 4 * np.std(values) / np.sqrt(DRAWS), metric


@pytest.mark.parametrize(
    ("positive", "mean", "spread"),
    [(0.5, (-0.05, 0.05), (0.1, 0.1)), (0.3, (-4.0, -3.0), (1.0, 1.0)), (0.5, (-7.0, -5.0), (0.8, 0.8))],
)
def test_bins_do_not_bias_the_auc(positive, mean, spread):
    # Normal log-odds have the AUC Phi(d / sqrt(s0^2 + s1^2)); ties as halves would give it .003 to .006 too low.
    quantiles = np.linspace(0, 1, 20_001)[1:] - 1 / 40_000
    odds = np.concatenate([norm.ppf(quantiles, m, s) for m, s in zip(mean, spread, strict=True)])
    scores = np.stack([1 / (1 + np.exp(odds)), 1 / (1 + np.exp(-odds))], axis=1)
    labels = np.repeat([0, 1], 20_000)
    weights = np.repeat([1 - positive, positive], 20_000)
    spec = histogram_for("two classes", 2)
    area = metrics_of(ReleasedHistogram(spec, count(spec, scores, labels, weights=weights), 1.0))["auc"]
    truth = norm.cdf((mean[1] - mean[0]) / np.hypot(*spread))
    assert area.value == pytest.approx(truth, abs=0.0012)


def test_the_error_of_accuracy_is_half_of_what_one_table_of_20_bins_gives():
    # 5,000 people at epsilon .5: .0055 by noise, .0071 in all, of the cells of 20 bins in probability.
    drawn = draws_of(populations.two_classes(0.24, (-3.2, 0.3), (2.0, 1.5)), 5000, 0.5, 50)
    errors = {
        m: np.mean([each[m].standard_error for each in drawn]) for m in ("accuracy", "auc", "positive_f1")
    }
    assert errors["accuracy"] < 0.006 and errors["auc"] < 0.0095 and errors["positive_f1"] < 0.0145


def test_too_few_people_give_no_metric_and_say_why():
    draw = np.random.default_rng(3)
    for population in POPULATIONS.values():
        for people in (0, 1, 5):
            released = population.released(people, 0.2, draw)
            assert set(metrics_of(released).values()) == {None}
            assert set(reasons_of(released)) == set(population.truth)
            assert all("too few" in reason for reason in reasons_of(released).values())
    spec = histogram_for("number", 1)
    # nobody, and no noise
    assert set(metrics_of(ReleasedHistogram(spec, np.zeros(spec.cells), 0.0)).values()) == {None}


def test_scores_that_are_not_finite_are_not_left_out_in_silence():
    spec = histogram_for("two classes", 2, (("sex", ("f",)),), halves=True)
    scores = np.repeat([[0.2, 0.8], [np.nan, 0.5]], [900, 100], axis=0)
    everyone = np.zeros(1000, np.int64)
    released = ReleasedHistogram(
        spec, count(spec, scores, np.ones(1000), everyone[:, None], halves=everyone), 1.0
    )
    assert set(groups_of(released)["sex"][0].metrics.values()) == {None}
    assert thresholds_of(released) == calibration_curve(released) == ()
    assert recalibration_of(released) is None
    assert set(metrics_of(released).values()) == {None}
    assert "not finite" in reasons_of(released)["accuracy"]


def test_a_model_worse_than_the_mean_is_seen_to_be():
    population = populations.numbers(0.6)
    metrics = metrics_of(population.released(5000, 3.0, np.random.default_rng(5)))
    assert metrics["r2"].high < 0 and metrics["rmse"].low > metrics["mean_rmse"].high


def test_the_sum_of_scores_ranks_models_by_what_is_right():
    """By hand, without noise; a record that cannot be evaluated adds nothing."""

    def total(kind, outputs, scores, labels):
        spec = histogram_for(kind, outputs)
        return sum_of_scores(ReleasedHistogram(spec, count(spec, np.array(scores), np.array(labels)), 0.0))

    two = [[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [np.nan, 0.6]]
    assert total("two classes", 2, two, [0, 1, 0, 1]) == pytest.approx(2)
    three = [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.1, 0.8, 0.1], [np.inf, 0.0, 0.0]]
    assert total("classes", 3, three, [0, 2, 0, 0]) == pytest.approx(2)
    # Errors of .5, 0 and 1.6, which counts as 1: squares of .25, 0 and 1.
    assert total("number", 1, [[0.5], [-0.3], [0.8], [np.nan]], [0.0, -0.3, -0.8, 0.0]) == pytest.approx(1.75)
    assert total("score", 1, [[0.3], [1.0], [7.0], [np.nan]], [0, 0, 0, 0]) == pytest.approx(2.3)


@pytest.mark.parametrize(("centre", "gap", "spread"), [(7.0, 0.2, 0.05), (-8.0, 2.0, 2.0), (9.0, 2.0, 2.0)])
def test_scores_whose_order_bins_hide_have_no_auc(centre, gap, spread):
    draw, spec = np.random.default_rng(6), histogram_for("two classes", 2)
    labels = np.repeat([0, 1], 2000)
    odds = draw.normal(centre + gap * (labels - 0.5), spread)
    scores = np.stack([1 / (1 + np.exp(odds)), 1 / (1 + np.exp(-odds))], axis=1)
    released = ReleasedHistogram(spec, count(spec, scores, labels), 1.0)
    assert metrics_of(released)["auc"] is None and "hide the order" in reasons_of(released)["auc"]


def test_probabilities_within_one_bin_are_not_averaged():
    """All have the same log-odds, which are anywhere in their bin: its middle would be off by up to half its width."""
    draw, spec = np.random.default_rng(7), histogram_for("two classes", 2, halves=True)
    for odds in (-0.64, -0.56):
        chance = 1 / (1 + np.exp(-odds))
        scores = np.tile([1 - chance, chance], (20_000, 1))
        cells = count(spec, scores, draw.random(20_000) < 0.5, halves=np.arange(20_000) % 2)
        released = ReleasedHistogram(spec, cells + draw.normal(0, 1.0, spec.cells), 1.0)
        metrics = metrics_of(released)
        assert metrics["log_loss"] is metrics["calibration_gap"] is None and metrics["accuracy"] is not None
        assert "few of the bins" in reasons_of(released)["log_loss"]
        assert recalibration_of(released) is None and calibration_curve(released) == ()


@pytest.mark.parametrize("name", ["even classes", "five classes", "numbers", "bounded scores"])
def test_expected_errors_are_near_those_of_a_real_population(name):
    population = POPULATIONS[name]
    metric = next(iter(population.truth)) if name != "numbers" else "mae"
    expected = expected_errors(population.spec, 5000, populations.NOISE[1.0] * population.spec.sensitivity)
    real = np.std([each[metric].value for each in draws_of(population, 5000, 1.0, 50)])  # to a tenth
    assert 0.6 < expected[metric] / real < 1.6
    nobody = expected_errors(population.spec, 50, populations.NOISE[0.2] * population.spec.sensitivity)
    assert set(nobody.values()) == {None}


def test_no_interval_of_the_most_frequent_class_is_beyond_all_people() -> None:
    """Also where the tables of a release are of different numbers of people, which noise makes them."""
    spec = histogram_for("classes", 3)
    tables = {name: np.zeros(shape) for name, shape in spec.shapes.items()}
    tables["predicted x label"][:] = np.diag([900.0, 900.0, 0.0])
    tables["right"][:] = [50.0, 450.0]
    values = np.zeros(spec.cells)
    start = 0
    for name in spec.shapes:
        values[start : start + tables[name].size] = tables[name].ravel()
        start += tables[name].size
    majority = metrics_of(ReleasedHistogram(spec, values, 1.0))["majority_accuracy"]
    assert majority is not None and majority.low <= majority.value <= majority.high <= 1.0
