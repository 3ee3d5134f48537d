"""Output perturbation and the exact minimum: noise, regularisation and what is refused."""

import math
from dataclasses import replace
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from algorithms.core.method import Algorithm
from algorithms.errors import RefusedError
from algorithms.methods.baselines import LBFGS
from algorithms.methods.perturbation import OutputPerturbation
from algorithms.models import build
from tests.algorithms.test_perturbation import (
    LONGEST,
    TARGET,
    WIDTH,
    assert_standard_deviation,
    minimum_of,
    public,
    released,
    some,
)


@pytest.mark.parametrize("clip_norm", [0.6, None])
def test_the_noise_on_the_output_is_what_one_record_can_do(clip_norm: float | None) -> None:
    method, records = OutputPerturbation(regularisation=0.02, clip_norm=clip_norm), some(300)
    plan = method.plan(TARGET, public(300))
    bound = clip_norm or LONGEST
    least = minimum_of(records, clip_norm=bound, regularisation=0.02 * 300)
    answers = np.array([released(method, plan, records, seed=seed).double().numpy() for seed in range(8)])
    assert_standard_deviation(answers - least, plan.noise_multiplier * bound / (0.02 * 300))


@pytest.mark.parametrize("clip_norm", [0.6, None])
def test_with_hardly_any_noise_the_output_is_the_minimum_of_the_clipped_losses(
    clip_norm: float | None,
) -> None:
    method, records = OutputPerturbation(regularisation=0.02, clip_norm=clip_norm), some(300)
    plan = method.plan(TARGET, public(300))
    quiet = replace(plan, noise_multiplier=1e-7, schedule=[(dp.GaussianDpEvent(1e-7), 1)])
    least = minimum_of(records, clip_norm=clip_norm or LONGEST, regularisation=0.02 * 300)
    np.testing.assert_allclose(released(method, quiet, records), least, atol=1e-5)


def test_the_regularisation_of_the_output_balances_its_noise() -> None:
    small, large = (OutputPerturbation().plan(TARGET, public(count)) for count in (10**3, 10**6))
    assert small.noise_multiplier == large.noise_multiplier
    by_rule = OutputPerturbation(
        regularisation=0.25 * (WIDTH * (2.0 * small.noise_multiplier / 300) ** 2) ** (1 / 3)
    )
    one, two = (
        released(method, method.plan(TARGET, public(300)), some(300))
        for method in (by_rule, OutputPerturbation())
    )
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [OutputPerturbation(), LBFGS()])
def test_a_mean_over_a_private_number_of_records_is_refused(method: Algorithm[Any]) -> None:
    with pytest.raises(RefusedError, match="number of records is private"):
        method.plan(TARGET, public(None))


# The exact minimum


@pytest.mark.parametrize("regularisation", [0.0, 1e-3, 0.1])
def test_lbfgs_finds_the_minimum_of_scikit_learn(regularisation: float) -> None:
    method, records = LBFGS(regularisation=regularisation), some(2000)
    plan = method.plan(TARGET, public(2000))
    assert plan.epsilon == {"pld": math.inf, "rdp": math.inf, "pure": math.inf}
    inverse = 1.0 / (2000 * max(regularisation, 1e-12))
    expected = LogisticRegression(C=inverse, fit_intercept=False, tol=1e-10, max_iter=10_000)
    expected.fit(records.features, records.labels)
    np.testing.assert_allclose(released(method, plan, records), expected.coef_[0], atol=2e-3)


def test_lbfgs_minimises_the_hinge_loss() -> None:
    model = build("svm", input_shape=(WIDTH,), classes=2, seed=0)
    method, records = LBFGS(regularisation=0.01), some(500)
    found = released(method, method.plan(TARGET, public(500, model)), records, model=model)

    def objective(point: Tensor) -> float:
        losses = model.losses(
            model.outputs(model.named(point), torch.from_numpy(records.features)),
            torch.from_numpy(records.labels),
        )
        return float(losses.mean() + 0.005 * point @ point)

    least = objective(found)
    assert least < 0.8 * objective(torch.zeros(WIDTH + 1))
    draw = torch.Generator().manual_seed(1)
    for scale in (0.01, 0.1, 1.0):
        others = found + scale * torch.randn(30, WIDTH + 1, generator=draw)
        assert min(objective(other) for other in others) > least - 1e-4
