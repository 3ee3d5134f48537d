"""DP-MF and DP-FTRL: how many bands are worth their cost, what is DP-SGD after all, and what cannot be had."""

import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

from algorithms.core.noise_strategies import _inverse
from algorithms.core.noise_workload import mean_squared_noise, workload
from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.methods import from_settings
from algorithms.methods.matrix_factorisation import CorrelatedPlan
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.events import CorrelatedDpEvent, unroll
from algorithms.privacy.mechanisms.correlated import Toeplitz, Tree
from tests.support.bench import algorithm, made_up, planned, run, small_model
from tests.support.refusals import refused_as

UPDATE = {"learning_rate": 1.0, "momentum": 0.9, "schedule": "linear"}


def plan_of(name: str, *, epsilon: float, records: int | None = 10_000, **settings: Any) -> Plan:
    batch = {"expected_batch_size": 250} if records else {"sampling_rate": 0.025}
    method = from_settings({"name": name, "steps": 200, "update": UPDATE, **batch} | settings)
    return method.plan(Target(Budget(epsilon, 1e-5), "rdp"), PlanningFacts(records, 50, 1, 2))


def correlated_of(plan: Plan) -> CorrelatedPlan:
    return plan.params(CorrelatedPlan)


def test_one_band_over_samples_is_dp_sgd_bit_for_bit() -> None:
    model, records = small_model(), made_up()
    ours, dp_sgd = algorithm("matrix_factorisation", bands=1), algorithm("dp_sgd")
    found, expected = (
        run(method, planned(method, model, epsilon=2.0), records, model) for method in (ours, dp_sgd)
    )
    assert torch.equal(found.released, expected.released)
    assert found.trace.rows == expected.trace.rows


def test_bands_are_taken_as_long_as_they_take_noise_away() -> None:
    """More at a larger epsilon, none where sampling is worth more; the plan says what is gained."""
    bands = {}
    for epsilon in (0.3, 3.0, 30.0):
        plan = plan_of("matrix_factorisation", epsilon=epsilon)
        strategy = correlated_of(plan).correlation()
        assert isinstance(strategy, Toeplitz)
        bands[epsilon] = len(strategy.coefficients)
        other = plan_of("matrix_factorisation", epsilon=epsilon, bands=1)
        asked = workload(OptimizerConfig(**UPDATE), 200)
        mine, alone = (
            p.noise_multiplier * math.sqrt(mean_squared_noise(correlated_of(p).correlation(), asked))
            for p in (plan, other)
        )
        assert (
            correlated_of(plan).noise_against_independent == pytest.approx(mine / alone, rel=1e-3)
            and mine <= alone
        )
        assert correlated_of(plan).course[-1][0] == 200
        for more in {min(2 * bands[epsilon], 40), 40}:
            forced = plan_of("matrix_factorisation", epsilon=epsilon, bands=more)
            spread = forced.noise_multiplier * math.sqrt(
                mean_squared_noise(correlated_of(forced).correlation(), asked)
            )
            assert spread >= 0.99 * mine * (1 - 1e-3)
    assert bands[0.3] == 1 < bands[3.0] < bands[30.0]


def test_without_samples_correlation_always_gains() -> None:
    for epsilon in (0.3, 3.0):
        for strategy in ("banded", "buffered", "square_root"):
            plan = plan_of(
                "matrix_factorisation", epsilon=epsilon, participation="fixed_order", strategy=strategy
            )
            assert correlated_of(plan).noise_against_independent < 0.5 and correlated_of(plan).parts == 40
            assert [type(event) for event, _ in unroll(plan.schedule)] == [dp.GaussianDpEvent]
        tree = plan_of("dp_ftrl", epsilon=epsilon)
        assert 0.2 < correlated_of(tree).noise_against_independent < 0.7
        assert correlated_of(tree).correlation() == Tree(40)


def test_a_tree_may_stand_for_several_passes() -> None:
    plan = plan_of("dp_ftrl", epsilon=1.0, restart=5)
    assert correlated_of(plan).correlation() == Tree(200)
    event = plan.schedule[0][0]
    assert isinstance(event, CorrelatedDpEvent) and event.leaves == 200


def test_a_run_that_never_completes_its_tree_costs_the_same_however_large_that_is() -> None:
    small, large = (plan_of("dp_ftrl", epsilon=1.0, records=records) for records in (10**6, 10**9))
    assert correlated_of(large).correlation() == Tree(10**6)
    assert large.noise_multiplier == small.noise_multiplier
    assert correlated_of(large).course == correlated_of(small).course


def test_a_private_number_of_records_is_counted_first_and_parts_follow_the_rate() -> None:
    for name in ("matrix_factorisation", "dp_ftrl"):
        plan = plan_of(name, epsilon=3.0, records=None)
        assert plan.divisor is None and plan.schedule[0][1] == 1
        assert plan.schedule[0][0] == dp.GaussianDpEvent(plan.target.count_noise)
    assert correlated_of(plan).parts == 40


@pytest.mark.parametrize(
    ("settings", "code", "fields"),
    [
        ({"strategy": "buffered"}, "buffered_samples", {}),
        ({"bands": 41}, "too_many_bands", {"bands": 41, "max_bands": 40}),
        ({"steps": 50_001}, "too_many_correlated_steps", {"steps": 50_001, "largest": 50_000}),
    ],
)
def test_what_cannot_be_had_is_refused(
    settings: dict[str, Any], code: str, fields: dict[str, object]
) -> None:
    with refused_as(code, **fields):
        plan_of("matrix_factorisation", epsilon=1.0, **settings)


def test_a_strategy_has_a_band_or_more() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        plan_of("matrix_factorisation", epsilon=1.0, bands=0)


def test_the_courses_of_noise_are_those_of_the_iterates() -> None:
    """What many runs without records end at spreads as the plan says."""
    plan = plan_of("dp_ftrl", epsilon=2.0)
    course = np.array(correlated_of(plan).course)
    asked = workload(OptimizerConfig(**UPDATE), 200)
    last = plan.noise_multiplier * math.sqrt(float(np.square(asked.rows[-1]).sum()))
    assert (np.diff(course[:, 0]) > 0).all() and (course[-1, 1:] > 0).all()
    assert course[-1, 2] < last  # independent noise of the same cost needs less of it than the tree
    assert correlated_of(plan_of("matrix_factorisation", epsilon=0.3)).correlation() == Toeplitz((1.0,))


@pytest.mark.parametrize("bands", [1, 3, 64, 65, 90])
def test_the_inverse_of_a_strategy_and_its_slope_are_those_of_its_matrix(bands: int) -> None:
    """By a recurrence up to 64 bands, by Newton's iteration above."""
    steps, generator = 90, np.random.default_rng(bands)
    column = np.append(1.0, generator.random(bands - 1) / (2 * bands))
    weights = generator.random(steps)

    def inverse_of(entries: np.ndarray) -> np.ndarray:
        first = np.append(entries, np.zeros(steps - bands))
        return np.linalg.inv(toeplitz(first, np.zeros(steps)))[:, 0]

    variables = torch.from_numpy(column).requires_grad_()
    inverse = _inverse(variables, steps)
    (slopes,) = torch.autograd.grad(inverse @ torch.from_numpy(weights), variables)
    assert inverse.detach().numpy() == pytest.approx(inverse_of(column), abs=1e-13)
    for at in {0, bands // 2, bands - 1}:
        moved = np.eye(bands)[at] * 1e-6
        expected = weights @ (inverse_of(column + moved) - inverse_of(column - moved)) / 2e-6
        assert slopes[at].item() == pytest.approx(expected, rel=1e-6, abs=1e-8)
