"""SGD-Adv and SGD-MA: their noise, what they claim and what they cost."""

import math
from typing import Any

import pytest

from algorithms.core.method import Algorithm, Target
from algorithms.errors import RefusedError
from algorithms.methods.dp_sgd import SGDMA, SGDAdv
from algorithms.privacy.accounting import Budget
from tests.algorithms.test_baselines import TARGET, public


@pytest.mark.parametrize(
    ("epsilon", "steps", "noise_multiplier"),
    [(0.05, 4, 67.48022113), (0.4, 31, 24.61494784), (1.6, 125, 12.72970658)],
)
def test_sgd_adv_has_the_noise_of_its_formula_on_adult(
    epsilon: float, steps: int, noise_multiplier: float
) -> None:
    """The numbers are the formula of Lee and Kifer's code, worked out apart from this package."""
    plan = SGDAdv().plan(Target(Budget(epsilon, 1e-8)), public(39_073))
    assert (plan.steps, plan.divisor) == (steps, 207.0)
    assert plan.noise_multiplier == pytest.approx(noise_multiplier, rel=1e-9)


def test_sgd_adv_s_noise_gives_back_the_target_by_advanced_composition() -> None:
    plan = SGDAdv(steps=60, expected_batch_size=300).plan(TARGET, public(40_000))
    step_epsilon = 2 * math.sqrt(2 * math.log(1.25 * 2 * 60 / 1e-8)) / plan.noise_multiplier
    sampled = 2 * (300 / 40_000) * step_epsilon
    assert sampled * 2 * math.sqrt(2 * 60 * math.log(2 / 1e-8)) == pytest.approx(1.0)


def test_sgd_adv_states_both_epsilons() -> None:
    plan = SGDAdv().plan(TARGET, public(39_073))
    assert plan.method_params == {"claimed_epsilon": 1.0}
    assert 0.005 < plan.cost.epsilon < 0.05


# SGD by the moments accountant

ADULT = {1: 0.5757, 100: 0.5787, 1000: 0.6058, 10_000: 0.8776, 20_000: 1.1795}
"""Epsilon by the number of steps, for noise 4 and batches of 207 of 39,074 records, by the code of Lee and Kifer."""


@pytest.mark.parametrize("steps", ADULT)
def test_sgd_ma_s_epsilon_is_that_of_its_paper_on_adult(steps: int) -> None:
    plan = SGDMA(steps=steps, noise_multiplier=4.0).plan(Target(Budget(2.0, 1e-8), "rdp"), public(39_074))
    assert plan.divisor == 207.0
    assert plan.method_params["claimed_epsilon"] == pytest.approx(ADULT[steps], abs=6e-5)
    assert plan.cost.epsilon < plan.method_params["claimed_epsilon"]


def test_sgd_ma_takes_the_least_noise_that_its_accountant_allows() -> None:
    plan = SGDMA(steps=500).plan(TARGET, public(10_000))
    assert 1 - 1e-4 < plan.method_params["claimed_epsilon"] <= 1.0
    less = SGDMA(steps=500, noise_multiplier=0.999 * plan.noise_multiplier).plan(TARGET, public(10_000))
    assert less.method_params["claimed_epsilon"] > 1.0
    assert plan.cost.epsilon < 0.8


def test_sgd_ma_cannot_state_a_small_epsilon() -> None:
    with pytest.raises(RefusedError, match=r"no epsilon below 0\.5756"):
        SGDMA().plan(Target(Budget(0.5, 1e-8)), public(39_074))
    fixed = SGDMA(steps=100, noise_multiplier=4.0).plan(Target(Budget(0.5, 1e-8)), public(39_074))
    assert fixed.cost.epsilon < 0.5 < fixed.method_params["claimed_epsilon"]


def test_noise_that_costs_more_than_the_target_is_refused() -> None:
    with pytest.raises(RefusedError, match="ask for more epsilon or more noise"):
        SGDMA(steps=1000, noise_multiplier=0.5).plan(TARGET, public(10_000))


@pytest.mark.parametrize("method", [SGDAdv(), SGDMA()])
def test_older_analyses_refuse_what_they_have_no_answer_for(method: Algorithm[Any]) -> None:
    with pytest.raises(RefusedError, match="number of records is private"):
        method.plan(TARGET, public(None))
    with pytest.raises(RefusedError, match="no pure epsilon"):
        method.plan(Target(Budget(1.0, 0.0), "pure"), public(10_000))


@pytest.mark.parametrize(("records", "size"), [(10_000, 110), (4, 4)])
def test_their_batches_are_of_the_root_of_the_number_of_records(records: int, size: int) -> None:
    assert SGDAdv(steps=5).plan(TARGET, public(records)).divisor == size
