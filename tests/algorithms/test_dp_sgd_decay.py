"""DP-SGD-Decay: the noise of each epoch, one calibration for all of them, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest

from algorithms.core.method import PublicInfo, Target
from algorithms.errors import RefusedError
from algorithms.methods.dp_sgd import DPSGD
from algorithms.methods.noise_schedules import DPSGDDecay
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import LEVELS, in_levels
from tests.algorithms.bench import made_up, run, small_model
from tests.algorithms.unaccounted import plan_with, with_schedule

TARGET = Target(Budget(0.3, 1e-5))
PUBLIC = PublicInfo(1000, 10, 1, 2)


@pytest.mark.parametrize(
    ("form", "settings", "expected"),
    [
        ("exponential", {"rate": 0.1}, [math.exp(-0.1 * e) for e in range(4)]),
        ("time", {"rate": 0.5}, [1 / (1 + 0.5 * e) for e in range(4)]),
        ("step", {"rate": 0.4, "period": 2}, [1.0, 1.0, 0.6, 0.6]),
        ("polynomial", {"power": 2.0, "end": 0.2}, [0.2 + 0.8 * (1 - e / 4) ** 2 for e in range(4)]),
    ],
)
def test_the_share_of_an_epoch_follows_its_formula(
    form: Any, settings: dict[str, Any], expected: list[float]
) -> None:
    found = DPSGDDecay(40, 100, form=form, **settings).shares(0.1)
    assert found.tolist() == pytest.approx(np.repeat(expected, 10).tolist(), rel=1e-12)


def test_an_epoch_begins_after_as_many_steps_as_its_batches_need() -> None:
    shares = DPSGDDecay(25, 64, rate=0.5).shares(0.3)
    assert np.flatnonzero(np.diff(shares)).tolist() == [3, 6, 9, 13, 16, 19, 23]


@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_the_whole_schedule_costs_the_target(rate: float) -> None:
    plan = DPSGDDecay(30, 100, rate=rate).plan(TARGET, PUBLIC)
    assert 0.298 < plan.cost.epsilon <= 0.3
    constant = DPSGD(30, 100).plan(TARGET, PUBLIC).noise_multiplier
    if rate == 0.0:
        assert plan.noise_multiplier == constant
    else:
        assert plan.noise_multiplier * math.exp(-2 * rate) < constant < plan.noise_multiplier


def test_each_release_has_the_noise_of_its_epoch() -> None:
    model, method = small_model("softmax"), DPSGDDecay(12, 10, rate=0.3)
    plan = with_schedule(plan_with(1.4, steps=12, batch=10, records=40, weights=method.shares(0.25)))
    rows = run(method, plan, made_up(), model).trace.rows
    expected = [plan.noise_multiplier * math.exp(-0.3 * (t // 4)) for t in range(12)]
    assert [row.noise_multiplier for row in rows] == pytest.approx(expected, rel=1e-12)
    assert [row.noise_std for row in rows] == pytest.approx(expected, rel=1e-6)


def test_noise_that_all_but_ends_is_refused() -> None:
    with pytest.raises(RefusedError, match="the noise would fall to"):
        DPSGDDecay(500, 100, rate=0.5).plan(TARGET, PUBLIC)


@pytest.mark.parametrize("steps", [1, 5, LEVELS, LEVELS + 1, 5000])
def test_a_course_has_few_levels_near_its_weights(steps: int) -> None:
    weights = (20.0 + np.arange(steps)) ** 0.25
    values, counts = in_levels(weights)
    assert min(steps, LEVELS - 1) <= len(values) == len(counts) <= LEVELS
    assert counts.sum() == steps
    assert counts.min() >= 1
    found = np.repeat(values, counts)
    if steps <= LEVELS:
        np.testing.assert_allclose(found, weights, rtol=1e-12)
    assert np.abs(np.log(found / weights)).max() < 0.1


def test_a_course_that_jumps_at_its_end_keeps_its_levels_where_the_steps_are() -> None:
    weights = (1.0 - (1.0 - 1e-9) * np.sqrt(np.arange(2000) / 2000)) ** -0.5
    values, counts = in_levels(weights)
    errors = np.log(np.repeat(values, counts) / weights)
    assert np.quantile(np.abs(errors), 0.99) < 0.15
    assert len(values) <= LEVELS
