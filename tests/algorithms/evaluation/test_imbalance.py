"""What the cheapest threshold costs, from noisy histograms."""

import numpy as np

from algorithms.evaluation.imbalance import cheapest_threshold
from comparisons import private_evaluation as populations


def test_cost_at_a_threshold_chosen_on_the_same_people_is_hardly_too_small():
    population = populations.two_classes(0.24, (-3.2, 0.3), (2.0, 1.5))
    draw = np.random.default_rng(62)
    chances, real, hits = population.scores[:, 1], population.labels, []
    for _ in range(200):
        decision = cheapest_threshold(population.released(10_000, 1.0, draw), (1.0, 3.0))
        named = chances > decision.at.threshold
        truth = population.frequencies @ (named * (real == 0) * 1.0 + ~named * (real == 1) * 3.0)
        hits.append(decision.cost.low <= truth <= decision.cost.high)
    assert 0.90 <= np.mean(hits) <= 0.985
