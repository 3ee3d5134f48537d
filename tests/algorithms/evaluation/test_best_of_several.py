"""Metrics of the release that won a search: of several releases of the same people the one with the best score."""

from dataclasses import replace

import numpy as np
import pytest

from algorithms.evaluation import ReleasedHistogram, metrics_of, sum_of_scores
from algorithms.privacy.accounting.events import Trials
from comparisons import private_evaluation as populations
from comparisons.private_evaluation import NOISE, Population

MEAN = 8.0


def low_scores() -> Population:
    made = populations.bounded_scores()
    return replace(made, scores=1 - made.scores, truth={"score": 1 - made.truth["score"]})


POPULATIONS = {
    "ten hard classes": lambda: populations.classes(10, [1] * 10, 0.2),
    "low scores": low_scores,
}
"""Where the score is low, noise of the sum by which a release wins is that of the metric, too."""


def winner(population: Population, draw: np.random.Generator) -> ReleasedHistogram:
    """Of a geometric number of models that are equally good, so that noise alone decides which one wins."""
    (sample,) = population.releases(500, 0.0, draw, 1)
    noise = NOISE[0.5] * sample.spec.sensitivity
    number = Trials(MEAN).number(draw.random())
    noisy = sample.values + draw.normal(0.0, noise, (number, sample.spec.cells))
    return max((ReleasedHistogram(sample.spec, values, noise) for values in noisy), key=sum_of_scores)


@pytest.mark.parametrize("name", POPULATIONS)
def test_the_winners_interval_holds_in_at_least_93_of_100_searches(name: str) -> None:
    population, draw = POPULATIONS[name](), np.random.default_rng(81)
    winners = [winner(population, draw) for _ in range(400)]
    metric = "score" if name == "low scores" else "accuracy"
    truth = population.truth[metric]

    def holds(best_of: float) -> float:
        estimates = [metrics_of(replace(one, best_of=best_of))[metric] for one in winners]
        assert None not in estimates
        return float(np.mean([each is not None and each.low <= truth <= each.high for each in estimates]))

    assert holds(MEAN) >= 0.93
    assert holds(1.0) < 0.93  # what it is for
    assert np.mean([metrics_of(one)[metric].value for one in winners]) > truth


def test_how_many_could_have_won_is_not_written_with_the_release() -> None:
    (one,) = low_scores().releases(500, 1.0, np.random.default_rng(82), 1)
    assert replace(one, best_of=MEAN).to_json() == one.to_json()
