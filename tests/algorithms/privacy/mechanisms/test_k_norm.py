"""Noise in the norm of a bound: its distribution, what it costs, and the contributions it is meant for."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from algorithms.errors import RefusedError
from algorithms.gradients import L2, Box, clip_and_sum
from algorithms.models import build
from algorithms.privacy.accounting.epsilon import REPLACE_ONE, epsilon
from algorithms.privacy.mechanisms.noise import Stream, seeded_generator
from algorithms.privacy.mechanisms.release import (
    KNorm,
    Minimum,
    PureObjectiveNoise,
    gradient_release,
    minimum_release,
)
from algorithms.privacy.mechanisms.release_noise import noise_std
from algorithms.privacy.mechanisms.sampling import FullBatch, Poisson
from tests.support.barriers import barrier
from tests.support.bench import SHAPE, made_up
from tests.support.soak import soak_but

DRAWS = 2000


@cache
def draws(dimension: int, *, box: bool) -> NDArray[np.float64]:
    """Not to be changed."""
    generator = seeded_generator(5)
    return np.array([Stream(generator.key, i).k_norm(dimension, box=box) for i in range(DRAWS)])


def width(values: NDArray[np.float64]) -> NDArray[np.float64]:
    above, below = values.max(axis=-1, initial=0.0), values.min(axis=-1, initial=0.0)
    return np.asarray(above - below)


LENGTHS = [(1, True), (3, False), (20, False), (20, True)]
"""One dimension, few and many, in either norm."""


@pytest.mark.parametrize(("dimension", "box"), soak_but(LENGTHS, [*LENGTHS, (1, False), (3, True)]))
def test_the_length_is_a_gamma_draw(dimension: int, box: bool) -> None:
    found = draws(dimension, box=box)
    lengths = width(found) if box else np.linalg.norm(found, axis=1)
    assert stats.kstest(lengths, stats.gamma(dimension).cdf).pvalue > 1e-4


@pytest.mark.parametrize("dimension", [2, 5])
def test_the_direction_in_a_box_is_that_of_a_uniform_point_of_the_body(dimension: int) -> None:
    random = np.random.default_rng(0)
    points = random.uniform(-1, 1, size=(150_000, dimension))
    inside = points[width(points) <= 1.0]
    expected = inside / width(inside)[:, None]
    found = draws(dimension, box=True)
    found = found / width(found)[:, None]
    for function in (lambda v: v[:, 0], lambda v: v.max(axis=1), lambda v: v.sum(axis=1)):
        assert stats.ks_2samp(function(found), function(expected)).pvalue > 1e-4


@pytest.mark.parametrize(("clipping", "box"), [(L2(1.0), False), (Box(1.0), True)])
def test_the_trace_states_its_standard_deviation(clipping: L2 | Box, box: bool) -> None:
    stated = noise_std(gradient_release(FullBatch(), clipping, KNorm(1.0), 1.0), 20)
    assert np.sqrt(np.mean(draws(20, box=box) ** 2)) == pytest.approx(stated, rel=0.02)


def test_what_it_costs() -> None:
    event = gradient_release(FullBatch(), Box(3.0), KNorm(4.0), 1.0).event()
    assert epsilon([(event, 8)], 0.0, accountant="pure") == pytest.approx(2.0)
    assert epsilon([(event, 8)], 0.0, accountant="pure", adjacency=REPLACE_ONE) == pytest.approx(4.0)
    with pytest.raises(RefusedError, match="no proven privacy event"):
        gradient_release(Poisson(0.1), Box(1.0), KNorm(1.0), 1.0).event()


def test_what_a_perturbed_objective_costs_purely() -> None:
    problem = Minimum(clip_norm=1.0, regularisation=10.0, tolerance=1e-9, input_norm=2.0, curvature=1.0)
    event = minimum_release(problem, PureObjectiveNoise(2.0, output=50.0)).event()
    expected = math.log1p(0.1) + 0.5 + 0.02
    assert epsilon([(event, 1)], 0.0, accountant="pure") == pytest.approx(expected)


def test_contributions_to_a_box_are_scaled_down_to_its_width() -> None:
    rows = torch.tensor([[0.5, -0.25, 0.0], [4.0, -2.0, 1.0], [-3.0, -6.0, -1.0]])
    expected = rows[0] + rows[1] / 3.0 + rows[2] / 3.0
    torch.testing.assert_close(clip_and_sum(rows, Box(2.0)), expected.double(), rtol=1e-5, atol=1e-6)
    scaled = clip_and_sum(rows[1:2], Box(2.0)).numpy()
    assert width(scaled) <= 2.0


def test_the_noise_of_a_release_has_the_declared_scale() -> None:
    model = build("logistic", input_shape=SHAPE, classes=2, seed=0)
    asked, point = barrier(made_up(0, classes=2), model), model.initial_parameters()
    answers = [
        asked.gradient(point, sampling=FullBatch(), clipping=Box(1.0), noise=KNorm(7.0), divisor=2.0)
        for _ in range(200)
    ]
    lengths = width(torch.stack(answers).double().numpy()) * 2.0 / 7.0
    assert stats.kstest(lengths, stats.gamma(len(point)).cdf).pvalue > 1e-4
