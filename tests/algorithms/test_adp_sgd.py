"""ADP-SGD: matched noise, equal epsilons, the adaptive step size, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import Answer, multiplier_at
from algorithms.core.optimizers import OptimizerConfig
from algorithms.errors import RefusedError
from algorithms.methods.dp_sgd import DPSGD
from algorithms.methods.noise_schedules import ADPSGD, Decay, allocated, square_without_noise
from algorithms.privacy.accounting import Budget
from tests.algorithms.bench import made_up, run, small_model
from tests.algorithms.unaccounted import plan_with, with_schedule

TARGET = Target(Budget(0.3, 1e-5))
PUBLIC = PublicInfo(1000, 10, 1, 2)
STEEP = Decay(offset=1.0)


class Slope:
    """A stand-in for the barrier whose gradient is 1 everywhere."""

    def gradient(self, parameters: Tensor, **_settings: Any) -> Tensor:
        return torch.ones_like(parameters)


def by_hand(method: ADPSGD) -> Plan:
    """A plan with the allocation that the method's own has, for a noise multiplier of 1."""
    weights = allocated(method.decay.factors(method.steps), method.allocation)
    return plan_with(1.0, steps=method.steps, weights=weights)


def path(method: ADPSGD) -> list[float]:
    """The first coordinate after each step along a gradient of ones."""
    plan = by_hand(method)
    state, found = method.init(torch.zeros(10), plan), []
    for _ in range(plan.steps):
        state = method.step(state, plan, Slope())  # type: ignore[arg-type]
        found.append(float(state.parameters[0]))
    return found


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (Decay(), [(20 + t) ** -0.5 for t in range(8)]),
        (Decay(offset=2.0, rate=0.1), [(2 + 0.1 * t) ** -0.5 for t in range(8)]),
        (Decay("linear_in_sqrt", end=0.2), [1 - 0.8 * math.sqrt(t / 8) for t in range(8)]),
        (Decay("constant"), [1.0] * 8),
        (Decay("adaptive", noise_growth=0.5), [(20 + 0.5 * t) ** -0.5 for t in range(8)]),
    ],
)
def test_steps_become_shorter_by_their_formula(decay: Decay, expected: list[float]) -> None:
    assert decay.factors(8).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_sums_of_the_paper_s_steps() -> None:
    assert Decay().factors(11760).sum() == pytest.approx(208.23, abs=0.005)
    assert 0.1 * Decay("linear_in_sqrt", end=1e-9).factors(11760).sum() == pytest.approx(392.05, abs=0.005)


def test_matched_noise_is_the_reference_value() -> None:
    found = allocated(Decay().factors(4), "matched") ** 2
    expected = [0.9654668676086098, 0.9893091458550657, 1.0125901933630301, 1.0353478706780044]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert np.mean(1.0 / found) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("decay", [STEEP, Decay("linear_in_sqrt"), Decay("adaptive", noise_growth=5.0)])
def test_the_noise_s_variance_times_the_step_is_the_same_at_each_step(decay: Decay) -> None:
    plan = by_hand(ADPSGD(20, 100, decay=decay))
    found = np.square([multiplier_at(plan, t) for t in range(20)]) * decay.factors(20)
    np.testing.assert_allclose(found, found[0], rtol=1e-9)


def test_of_all_courses_with_its_cost_in_precision_it_adds_the_least_noise() -> None:
    factors = STEEP.factors(11700)
    added = {}
    for kind in ("matched", "constant"):
        alphas = allocated(factors, kind)  # type: ignore[arg-type]
        assert np.mean(alphas**-2.0) == pytest.approx(1.0)
        added[kind] = float(np.sum((alphas * factors) ** 2))
    moved = allocated(factors, "matched") * np.exp(0.1 * np.sin(np.arange(11700)))
    moved *= math.sqrt(np.mean(moved**-2.0))
    assert added["matched"] < float(np.sum((moved * factors) ** 2))
    assert added["matched"] < added["constant"]


def test_both_allocations_meet_the_same_epsilon() -> None:
    plans = [
        ADPSGD(6, 100, decay=STEEP, allocation=kind).plan(TARGET, PUBLIC) for kind in ("matched", "constant")
    ]  # type: ignore[arg-type]
    for plan in plans:
        assert 0.298 < plan.cost.epsilon <= 0.3
    assert plans[1].noise_multiplier == DPSGD(6, 100).plan(TARGET, PUBLIC).noise_multiplier
    assert plans[0].noise_multiplier > plans[1].noise_multiplier  # early steps of little noise cost more


def test_each_release_has_the_noise_of_its_step() -> None:
    model, method = small_model("softmax"), ADPSGD(6, 10, decay=STEEP)
    weights = allocated(STEEP.factors(6), "matched")
    plan = with_schedule(plan_with(1.4, steps=6, batch=10, records=40, weights=weights))
    rows = run(method, plan, made_up(), model).trace.rows
    assert [row.noise_multiplier for row in rows] == pytest.approx((1.4 * weights).tolist(), rel=1e-9)
    assert [row["steps"] for row in plan.method_params["noise"]] == [1] * 6


def test_momentum_goes_over_the_shortened_steps() -> None:
    method = ADPSGD(3, 100, decay=STEEP, update=OptimizerConfig(1.0, momentum=0.5))
    expected = np.cumsum(STEEP.factors(3) * np.array([1.0, 1.5, 1.75]))
    assert path(method) == pytest.approx((-expected).tolist(), rel=1e-5)


def test_the_adaptive_step_size_follows_its_formula() -> None:
    decay = Decay("adaptive", beta=4.0, period=3)
    method = ADPSGD(5, 100, clip_norm=2.0, decay=decay)
    squared, where, expected = 20.0, 0.0, []
    for t in range(5):
        left = 10.0 - 10 * (multiplier_at(by_hand(method), t) * 2.0 / 100) ** 2
        squared += max([4.0, 2.0, 4 / 3][t % 3] * left, 1e-5)
        where -= squared**-0.5
        expected.append(where)
    assert path(method) == pytest.approx(expected, rel=1e-5)


def test_under_noise_alone_the_adaptive_step_size_sees_no_gradient() -> None:
    torch.manual_seed(4)
    d, noise, draws = 400, 0.7, 4000
    found = [square_without_noise(Answer(noise * torch.randn(d), 100.0), noise) for _ in range(draws)]
    error = noise**2 * math.sqrt(2 * d / draws)
    assert abs(np.mean(found)) < 5 * error  # as printed it would be d noise^2, 196, or 440 of these errors
    decay = Decay("adaptive")
    assert decay.growth(-1.0, 0) == decay.growth(0.0, 7) == 1e-5


@pytest.mark.parametrize(
    ("decay", "steps"),
    [(Decay("linear_in_sqrt", end=-0.5), 10), (Decay(offset=0.0), 5), (Decay("adaptive", offset=0.0), 5)],
)
def test_step_sizes_that_are_none_are_refused(decay: Decay, steps: int) -> None:
    with pytest.raises(RefusedError, match=r"the step size after \d+ steps would be"):
        ADPSGD(steps, 100, decay=decay).plan(TARGET, PUBLIC)


def test_a_second_schedule_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"set algorithm\.update\.schedule to constant"):
        ADPSGD(5, 100, update=OptimizerConfig(schedule="linear")).plan(TARGET, PUBLIC)
