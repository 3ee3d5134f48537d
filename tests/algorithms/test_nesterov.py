"""DP-NAG and DP-MASG: their iterates, their chosen lengths, the course of their noise and what it is good for."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.core.method import Plan, Target
from algorithms.methods.momentum import (
    Curve,
    Nesterov,
    Stage,
    coefficients,
    divide_epsilon,
    iteration,
    laplace_scale,
)
from algorithms.privacy.accounting import Budget
from tests.algorithms.box import (
    APPROXIMATE,
    FEATURES,
    PURE,
    bowl,
    box,
    descended,
    objective,
    public,
    run,
)

MANY = 100_000
PAPER: dict[str, Any] = {"noise": "laplace", "smoothness": 5.1, "smoothness_is_data_dependent": True}


def multipliers(plan: Plan) -> np.ndarray:
    """The noise multiplier of each iteration, shape [steps]."""
    return np.array([iteration(plan, t).noise_multiplier for t in range(plan.steps)])


def importance(plan: Plan) -> np.ndarray:
    """The coefficients a_t of the plan's own path, shape [steps]."""
    stages = [Stage(stage["steps"], stage["step_size"]) for stage in plan.method_params["stages"]]
    return coefficients(
        stages, Curve(plan.method_params["smoothness"], plan.method_params["strong_convexity"])
    )


def test_on_exact_gradients_it_is_nesterovs_method_with_restarts() -> None:
    method = Nesterov(60, variant="masg", noise="laplace", regularisation=1.0, start=3.0)
    plan = method.plan(PURE, public())
    assert [stage["steps"] for stage in plan.method_params["stages"]] == [3, 16, 32, 9]  # kappa = 7 / 2
    now = torch.full((FEATURES,), 3.0, dtype=torch.float64)
    expected = [now]
    for stage, length in enumerate((3, 16, 32, 9), start=1):
        before, size = now, (1.0 if stage == 1 else 4.0**-stage) / 7.0
        root = math.sqrt(2.0 * size)
        for _ in range(length):
            ahead = now + (1 - root) / (1 + root) * (now - before)
            now, before = ahead - size * (bowl(ahead) + 2.0 * ahead), now
            expected.append(now)
    torch.testing.assert_close(descended(method, plan, bowl), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("variant", "step", "length"),
    [("nag_opt", 1.0, 121), ("nag_opt", 0.1, 349), ("masg_opt", 1.0, 89), ("masg_opt", 0.1, 89)],
)
def test_it_ends_where_the_papers_bound_is_least(variant: Any, step: float, length: int) -> None:
    method = Nesterov(1000, variant=variant, relative_step=step, **PAPER)
    assert method.plan(PURE, public(MANY)).steps == length
    shorter = Nesterov(50, variant=variant, relative_step=step, **PAPER)
    assert shorter.plan(PURE, public(MANY)).steps == 50


@pytest.mark.parametrize("variant", ["nag", "masg"])
def test_without_opt_the_steps_are_as_given_and_noise_is_equal(variant: Any) -> None:
    plan = Nesterov(300, variant=variant, noise="laplace").plan(PURE, public(MANY))
    assert plan.steps == 300
    np.testing.assert_allclose(multipliers(plan), 600.0, rtol=1e-9)


@pytest.mark.parametrize("variant", ["nag_opt", "masg_opt"])
def test_pure_epsilon_follows_the_cube_root_of_the_coefficients(variant: Any) -> None:
    plan = Nesterov(1000, variant=variant, noise="laplace").plan(PURE, public(MANY))
    epsilons = 2.0 / multipliers(plan)
    assert 1 - 1e-9 < epsilons.sum() <= 1.0
    roots = np.cbrt(importance(plan))
    np.testing.assert_allclose(epsilons, roots / roots.sum(), rtol=0.1)  # to the grid of 24 values


def test_samples_divide_what_their_amplified_releases_cost() -> None:
    plan = Nesterov(1000, noise="laplace", batch_size=1000).plan(PURE, public(MANY))
    epsilons = np.log1p(np.expm1(2.0 / multipliers(plan)) / 100)
    assert 1 - 1e-9 < epsilons.sum() <= 1.0
    assert plan.divisor == 1000
    a = importance(plan)
    as_for_all = laplace_scale(divide_epsilon(1.0, a, np.ones(len(a))), rate=0.01)
    assert np.sum(a * (multipliers(plan) / 2.0) ** 2) < np.sum(a * as_for_all**2)


@pytest.mark.parametrize("variant", ["nag_opt", "masg_opt"])
def test_gaussian_variance_follows_the_inverse_root_of_the_coefficients(variant: Any) -> None:
    plan = Nesterov(400, variant=variant).plan(APPROXIMATE, public(MANY))
    followed = multipliers(plan) ** 2 * np.sqrt(importance(plan))
    assert followed.max() < 1.3 * followed.min()
    assert np.mean(multipliers(plan) ** -2.0) == pytest.approx(plan.noise_multiplier**-2.0)


def test_gaussian_noise_ends_where_its_own_bound_is_least() -> None:
    plan = Nesterov(2000).plan(APPROXIMATE, public(MANY))
    # Closer lengths differ by less than calibration leaves open.
    lengths = [plan.steps - 200, plan.steps, plan.steps + 200]
    bounds = [_gaussian_bound(length) for length in lengths]
    assert bounds[1] < min(bounds[0], bounds[2])


def _gaussian_bound(length: int) -> float:
    """The error bound of a plan of this length, from the noise that the plan was given."""
    curve = Curve(5.02, 0.02)
    a = coefficients([Stage(length, 1 / 5.02)], curve)
    plan = Nesterov(length, variant="nag").plan(APPROXIMATE, public(MANY))  # the same sum of precisions
    variance = (plan.noise_multiplier * math.sqrt(20.0) / MANY) ** 2 / length
    start = 2 * 10.0 * (1 - math.sqrt(0.02 / 5.02)) ** length
    return start + 20 / 2 * variance * float(np.sum(np.sqrt(a))) ** 2


def test_a_granted_delta_scales_the_same_course_down() -> None:
    method = Nesterov(1000, noise="laplace")
    pure, approximate = method.plan(PURE, public(MANY)), method.plan(APPROXIMATE, public(MANY))
    ratios = multipliers(pure) / multipliers(approximate)
    assert ratios.min() == pytest.approx(ratios.max(), rel=1e-9)
    assert 2.0 < ratios.min() < 2.5


@pytest.fixture(scope="module")
def problem() -> tuple[Any, float]:
    """The synthetic problem of the paper's Section 5, and the least value of its objective."""
    records = box(MANY)
    method = Nesterov(400, variant="nag", noise="laplace", relative_step=4.0)
    features = torch.from_numpy(records.features).double()
    signs = 2.0 * torch.from_numpy(records.labels).double() - 1.0

    def mean_gradient(theta: Tensor) -> Tensor:
        return features.T @ (-signs * torch.sigmoid(-signs * (features @ theta))) / MANY

    plan = method.plan(PURE, public(MANY))
    return records, objective(records, descended(method, plan, mean_gradient)[-1], 0.01)


@pytest.mark.parametrize(
    ("method", "target", "least", "most"),
    [
        (Nesterov(1000, noise="laplace", start=10.0), PURE, 4e-3, 2.5e-2),
        (Nesterov(1000, start=10.0), APPROXIMATE, 1e-5, 2e-4),
        (Nesterov(1000, noise="laplace", start=10.0), Target(Budget(1.0, 1e-6)), 6e-4, 6e-3),
    ],
)
def test_errors_are_those_that_were_measured(
    method: Nesterov, target: Target, least: float, most: float, problem: tuple[Any, float]
) -> None:
    """Means over 20 runs: 0.0111, 6.3e-5 and 0.0023; of one run, within a factor of about 3."""
    records, best = problem
    released, _, _ = run(method, method.plan(target, public(MANY)), records)
    assert least < objective(records, released, 0.01) - best < most
