"""The stated cost of noise in an objective dominates the exact one, and is the moment of the loss that is claimed."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.special import expit, logsumexp

from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, composed, rdp
from algorithms.privacy.accounting.events import ObjectivePerturbationDpEvent
from algorithms.privacy.mechanisms.release import Minimum
from tests.algorithms.bench import MadeUp
from tests.algorithms.privacy.test_minimum import problem, some, with_one


def log_density(
    points: NDArray[np.float64], records: MadeUp, asked: Minimum, std: float
) -> NDArray[np.float64]:
    """Of the minimum of a perturbed objective in one dimension, by the change of variables b = -gradient."""
    gradient, curvature = asked.regularisation * points, np.full(len(points), asked.regularisation)
    for (x,), label in zip(records.features.astype(np.float64), records.labels, strict=True):
        sign, bound = 2.0 * label - 1.0, asked.clip_norm / abs(x)
        slope = -sign * expit(-sign * x * points)
        gradient += np.clip(slope, -bound, bound) * x
        curvature += np.where(np.abs(slope) < bound, x**2 * expit(x * points) * expit(-x * points), 0.0)
    return stats.norm.logpdf(gradient, scale=std) + np.log(curvature)


def weights(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the trapezoidal rule."""
    return (np.diff(points, prepend=points[0]) + np.diff(points, append=points[-1])) / 2


def log_integral(logarithms: NDArray[np.float64], points: NDArray[np.float64]) -> float:
    return float(logsumexp(logarithms, b=weights(points)))


@pytest.mark.parametrize("count", [0, 3, 50])
@pytest.mark.parametrize(
    ("regularisation", "multiplier", "clip_norm"),
    [
        (0.05, 8.0, 2.0),
        (0.05, 0.5, 0.5),
        (0.5, 2.0, 2.0),
        (5.0, 0.5, 0.5),
        (50.0, 0.5, 0.5),
        (50.0, 2.0, 0.5),
    ],
)
def test_the_stated_cost_dominates_the_exact_one(
    count: int, regularisation: float, multiplier: float, clip_norm: float
) -> None:
    asked = problem(clip_norm=clip_norm, regularisation=regularisation)
    records = MadeUp((2 * some(count, 1).features).clip(-2, 2), some(count, 1).labels)
    std = multiplier * clip_norm
    reach = np.arcsinh(50 * (9 * std + 2 * count + 2) / regularisation)
    points = np.sinh(np.linspace(-reach, reach, 100_001)) / 50
    more = with_one(records, np.array([2.0], np.float32), 1)
    pair = [log_density(points, held, asked, std) for held in (records, more)]
    assert [log_integral(one, points) for one in pair] == pytest.approx([0.0, 0.0], abs=1e-3)
    event = ObjectivePerturbationDpEvent(multiplier, asked.curvature / regularisation)
    stated = composed([(event, 1)], 1e-3, ADD_OR_REMOVE_ONE)
    by_order = dict(zip((1.5, 4.0, 16.0), rdp([(event, 1)], orders=(1.5, 4.0, 16.0)), strict=True))
    for p, q in (pair, pair[::-1]):
        for epsilon in (0.0, 0.3, 1.0, 3.0):
            exact = float(np.maximum(np.exp(p) - np.exp(epsilon + q), 0.0) @ weights(points))
            assert exact <= stated.get_delta_for_epsilon(epsilon) * (1 + 1e-3) + 1e-9
        for order, divergence in by_order.items():
            assert log_integral(order * p + (1 - order) * q, points) / (order - 1) <= divergence + 1e-3


def test_the_stated_renyi_divergence_is_the_moment_of_the_stated_loss() -> None:
    multiplier, ratio = 1.7, 0.6
    draw = np.linspace(0.0, 40.0, 400_001)
    loss = math.log1p(ratio) + 0.5 / multiplier**2 + draw / multiplier
    for order in (1.5, 4.0, 32.0):
        whole = log_integral(math.log(2.0) + stats.norm.logpdf(draw) + (order - 1) * loss, draw)
        found = rdp([(ObjectivePerturbationDpEvent(multiplier, ratio), 3)], orders=(order,))[0]
        assert found == pytest.approx(3 * whole / (order - 1), rel=1e-5)


def test_the_whole_loss_distribution_is_that_of_the_stated_loss() -> None:
    stated = composed([(ObjectivePerturbationDpEvent(1.7, 0.6), 1)], 1e-4, ADD_OR_REMOVE_ONE)
    draw = np.linspace(0.0, 40.0, 400_001)
    loss = math.log1p(0.6) + 0.5 / 1.7**2 + draw / 1.7
    for epsilon in (0.0, 0.5, 1.0, 3.0):
        gain = np.maximum(-np.expm1(epsilon - loss), 0.0)
        expected = float(2 * stats.norm.pdf(draw) * gain @ weights(draw))
        assert expected <= stated.get_delta_for_epsilon(epsilon) + 1e-9
        assert stated.get_delta_for_epsilon(epsilon) == pytest.approx(expected, rel=1e-3, abs=1e-6)
