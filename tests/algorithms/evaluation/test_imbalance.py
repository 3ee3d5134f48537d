"""Recall, precision and share of each class, and what the cheapest threshold costs, from noisy histograms."""

import numpy as np
import pytest

from algorithms.evaluation.imbalance import cheapest_threshold, class_metrics_of
from comparisons import private_evaluation as populations

POPULATIONS = {
    "two classes": populations.two_classes(0.24, (-3.2, 0.3), (2.0, 1.5)),
    "five classes": populations.classes(5, [5, 4, 3, 2, 1], 0.8),
}


@pytest.mark.parametrize("name", POPULATIONS)
def test_metrics_of_each_class_cover_those_of_all_people(name):
    population = POPULATIONS[name]
    each, real = population.frequencies, population.labels.astype(int)
    predicted = population.scores.argmax(axis=1)
    draw, hits = np.random.default_rng(61), {"share": [], "recall": [], "precision": []}
    for _ in range(200):
        for label, metrics in enumerate(class_metrics_of(population.released(10_000, 1.0, draw))):
            right = each[(real == label) & (predicted == label)].sum()
            truth = {
                "share": each[real == label].sum(),
                "recall": right / each[real == label].sum(),
                "precision": right / each[predicted == label].sum(),
            }
            for metric, value in truth.items():
                estimate = getattr(metrics, metric)
                hits[metric].append(estimate.low <= value <= estimate.high)
    coverage = {metric: np.mean(found) for metric, found in hits.items()}
    assert all(0.93 <= covered <= 0.97 for covered in coverage.values()), coverage


def test_the_cost_at_a_threshold_that_is_chosen_on_the_same_people_is_hardly_too_small():
    population, draw = POPULATIONS["two classes"], np.random.default_rng(62)
    chances, real, hits = population.scores[:, 1], population.labels, []
    for _ in range(200):
        decision = cheapest_threshold(population.released(10_000, 1.0, draw), (1.0, 3.0))
        named = chances > decision.at.threshold
        truth = population.frequencies @ (named * (real == 0) * 1.0 + ~named * (real == 1) * 3.0)
        hits.append(decision.cost.low <= truth <= decision.cost.high)
    assert 0.90 <= np.mean(hits) <= 0.985
