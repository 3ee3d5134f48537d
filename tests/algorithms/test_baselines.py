"""DP-GD and SGD without clipping: what they plan, ask and publish."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import dp_accounting as dp
import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor

from algorithms.core.method import Inputs, Plan, PublicInfo, Target
from algorithms.core.optimizers import OptimizerConfig
from algorithms.errors import RefusedError
from algorithms.methods.dp_gd import DPGD, NormBoundSGD, steps_for
from algorithms.methods.dp_sgd import DPSGD
from algorithms.models import Model
from algorithms.privacy.accounting import Budget
from tests.algorithms import bench
from tests.algorithms.bench import MadeUp, made_up, run, small_model

LOGISTIC = small_model("logistic", classes=2)
LONGEST = math.sqrt(17.0)
TARGET = Target(Budget(1.0, 1e-8))
QUIET = 1e-5


def public(records: int | None, model: Model = LOGISTIC, **changes: Any) -> PublicInfo:
    """What is public of records of norm up to 4, the bias's 1 not counted."""
    known = PublicInfo(records, model.parameter_count, 1, 2, inputs=Inputs(17.0, LONGEST), loss=model.bounds)
    return replace(known, **changes)


def quiet(plan: Plan) -> Plan:
    """The plan with so little noise that it is far below what is measured."""

    def event(planned: dp.DpEvent) -> dp.DpEvent:
        if isinstance(planned, dp.PoissonSampledDpEvent):
            return attrs.evolve(planned, event=event(planned.event))
        return attrs.evolve(planned, noise_multiplier=QUIET)

    schedule = [(event(planned), count) for planned, count in plan.schedule]
    return replace(plan, noise_multiplier=QUIET, schedule=schedule)


def within(records: MadeUp, longest: float = 4.0) -> MadeUp:
    norms = np.linalg.norm(records.features.reshape(len(records.labels), -1), axis=1)
    return MadeUp(
        records.features * np.minimum(1, longest / norms)[:, None, None, None].astype(np.float32),
        records.labels,
    )


def gradients(parameters: Tensor, records: MadeUp) -> Tensor:
    """Of each record's loss of the logistic model, shape [n, d]."""
    rows = torch.from_numpy(records.features).flatten(1)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
    slopes = torch.sigmoid(rows @ parameters) - torch.from_numpy(records.labels)
    return slopes[:, None] * rows


def clipped(rows: Tensor, clip_norm: float) -> Tensor:
    scales: Tensor = clip_norm / rows.norm(dim=1).clamp(min=clip_norm)
    return rows * scales[:, None]


# DP-GD


@pytest.mark.parametrize(
    ("epsilon", "steps"),
    [(1e-6, 10), (0.05, 34), (0.1, 47), (0.2, 67), (0.4, 95), (0.8, 134), (1.6, 190), (math.inf, 1000)],
)
def test_the_steps_of_dp_gd_follow_from_epsilon(epsilon: float, steps: int) -> None:
    assert steps_for(epsilon) == steps
    assert DPGD().plan(TARGET, public(50)).schedule[0][1] == 150
    assert DPGD(steps=7).plan(TARGET, public(50)).schedule[0][1] == 7


@pytest.mark.parametrize("epsilon", [0.05, 1.6])
def test_the_noise_of_dp_gd_is_that_of_one_gaussian_release(epsilon: float) -> None:
    """All steps together are mu-GDP with mu = sqrt(T) / z (Dong, Roth and Su 2022)."""

    def excess(mu: float) -> float:
        return float(
            norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2) - 1e-8
        )

    plan = DPGD().plan(Target(Budget(epsilon, 1e-8)), public(50))
    least = math.sqrt(plan.steps) / brentq(excess, 1e-4, 10.0)
    assert least <= plan.noise_multiplier <= 1.002 * least


def test_dp_gd_is_descent_on_all_clipped_gradients_with_momentum() -> None:
    method, records = DPGD(steps=6, clip_norm=0.8), made_up(50, classes=2)
    found = run(method, quiet(method.plan(TARGET, public(50))), records, LOGISTIC)
    point, velocity = torch.zeros(17), torch.zeros(17)
    for step in range(6):
        velocity = 0.8 * velocity + clipped(gradients(point, records), 0.8).mean(dim=0)
        point = point - 1.25 * (1 - step / 6) * velocity
    torch.testing.assert_close(found.released, point, rtol=0, atol=1e-5)
    assert {row.sampling for row in found.trace.rows} == {"full batch"}


def test_dp_gd_divides_by_a_released_count_where_the_number_is_private(tmp_path: Path) -> None:
    method = DPGD(steps=4)
    plan = method.plan(Target(Budget(2.0, 1e-3), count_noise=3.0), public(None))
    assert plan.divisor is None
    records = partial(made_up, 50, classes=2)
    state, trace, _ = bench.trained(method, plan, LOGISTIC, tmp_path, records=records)
    assert [row.kind for row in trace.rows] == ["total"] + ["gradient"] * 4
    assert trace.rows[0].noise_multiplier == 3.0
    assert {row.divisor for row in trace.rows[1:]} == {float(state.divisor)}
    assert 0 < abs(float(state.divisor) - 50) < 6 * 3.0


# SGD without clipping


def test_norm_bound_sgd_takes_its_sensitivity_from_the_data_card() -> None:
    plan = NormBoundSGD(steps=3, expected_batch_size=20).plan(TARGET, public(50))
    clips = DPSGD(steps=3, expected_batch_size=20, clip_norm=1.0).plan(TARGET, public(50))
    assert plan.schedule == clips.schedule
    records = made_up(50, classes=2)
    rows = run(NormBoundSGD(steps=3, expected_batch_size=20), plan, records, LOGISTIC).trace.rows
    assert {row.clip_norm for row in rows} == {LONGEST}
    assert rows[0].noise_std == pytest.approx(plan.noise_multiplier * LONGEST, rel=1e-3)


def test_norm_bound_sgd_changes_no_gradient_within_the_bound() -> None:
    method = NormBoundSGD(steps=1, expected_batch_size=50, update=OptimizerConfig(1.0))
    records = within(made_up(50, classes=2))
    found = run(method, quiet(method.plan(TARGET, public(50))), records, LOGISTIC)
    rows = gradients(torch.zeros(17), records)
    assert float(rows.norm(dim=1).max()) > 1.5  # a usual bound would have changed it
    torch.testing.assert_close(found.released, -rows.mean(dim=0), rtol=0, atol=1e-5)


def test_norm_bound_sgd_holds_a_record_beyond_the_bound_to_it() -> None:
    method = NormBoundSGD(steps=1, expected_batch_size=1, update=OptimizerConfig(1.0))
    far = MadeUp(np.full((1, 1, 4, 4), 1e3, np.float32), np.ones(1, np.int64))
    found = run(method, quiet(method.plan(TARGET, public(1))), far, LOGISTIC)
    assert float(found.released.norm()) == pytest.approx(LONGEST, abs=1e-3)


@pytest.mark.parametrize("missing", [{"inputs": None}, {"loss": None}])
def test_norm_bound_sgd_needs_public_bounds(missing: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="public bound for sensitivity is missing"):
        NormBoundSGD(steps=3, expected_batch_size=20).plan(TARGET, public(50, **missing))
