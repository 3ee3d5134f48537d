"""Metrics of the release that won a search: of several releases of the same people the one with the best score."""

from dataclasses import replace

import numpy as np
import pytest

from algorithms.evaluation import Estimate, ReleasedHistogram, metrics_of, sum_of_scores
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

    def estimates(best_of: float) -> list[Estimate]:
        found = [metrics_of(replace(one, best_of=best_of))[metric] for one in winners]
        return [each for each in found if each is not None]

    def holding(intervals: list[Estimate]) -> float:
        assert len(intervals) == len(winners)
        return float(np.mean([each.low <= truth <= each.high for each in intervals]))

    alone = estimates(1.0)
    assert holding(estimates(MEAN)) >= 0.93
    assert holding(alone) < 0.93  # what it is for
    assert np.mean([each.value for each in alone]) > truth


def test_how_many_could_have_won_is_not_written_with_the_release() -> None:
    (one,) = low_scores().releases(500, 1.0, np.random.default_rng(82), 1)
    assert replace(one, best_of=MEAN).to_json() == one.to_json()
