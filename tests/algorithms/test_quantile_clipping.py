"""DP-SGD with quantile clipping: how its clip norm moves, what both releases cost, and what is refused."""

import math
from dataclasses import replace
from typing import Any

import dp_accounting as dp
import pytest
import torch
from torch import Tensor

from algorithms.core.method import PublicInfo, Target
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.methods.adaptive_clipping import QuantileClipping
from algorithms.methods.dp_sgd import DPSGD
from algorithms.privacy.accounting import Budget
from tests.algorithms.bench import made_up, run, small_model
from tests.algorithms.unaccounted import plan_with

TARGET = Target(Budget(0.3, 1e-5))
PUBLIC = PublicInfo(1000, 10, 1, 2)


class Norms:
    """A stand-in for the barrier of records whose gradients have log-normal norms with median 3."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.draw = torch.Generator().manual_seed(5)
        self.bounds: list[float] = []

    def gradient(self, parameters: Tensor, **_settings: Any) -> Tensor:
        return torch.zeros_like(parameters)

    def norm_count(self, _parameters: Tensor, *, bound: L2, noise: Any, sampling: Any) -> float:
        assert sampling.rate == self.batch / 1000
        self.bounds.append(bound.norm)
        norms = 3.0 * torch.randn(self.batch, generator=self.draw).exp()
        within = torch.where(norms <= bound.norm, 0.5, -0.5).sum()
        return float(within + 0.5 * noise.multiplier * torch.randn((), generator=self.draw))


@pytest.mark.parametrize(("quantile", "expected"), [(0.5, 3.0), (0.9, 3.0 * math.exp(1.2816))])
@pytest.mark.parametrize("start", [0.05, 100.0])
def test_the_clip_norm_settles_at_its_quantile(quantile: float, expected: float, start: float) -> None:
    method = QuantileClipping(200, 200, clip_norm=start, quantile=quantile, count_noise_multiplier=5.0)
    plan, barrier = plan_with(1.0, steps=200, batch=200, count_noise_multiplier=5.0), Norms(200)
    state = method.init(torch.zeros(10), plan)
    for _ in range(200):
        state = method.step(state, plan, barrier)  # type: ignore[arg-type]
    settled = torch.tensor(barrier.bounds[-40:]).log().mean().exp()
    assert float(settled) == pytest.approx(expected, rel=0.1)


def test_the_step_of_the_clip_norm_follows_its_formula_within_its_limits() -> None:
    method = QuantileClipping(1, 10, min_clip_norm=0.5, max_clip_norm=2.0, quantile=0.3, rate=0.2)
    assert method.followed(1.0, 0.8) == pytest.approx(math.exp(-0.2 * 0.5), rel=1e-12)
    assert method.followed(1.0, -5.0) == pytest.approx(math.exp(0.2 * 0.3), rel=1e-12)
    assert method.followed(1.99, 0.0) == 2.0
    assert method.followed(0.5, 1.0) == 0.5


def test_both_releases_fit_the_target_together() -> None:
    plan = QuantileClipping(3, 100).plan(TARGET, PUBLIC)
    counted = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(10.0))  # a twentieth of the batch over 1/2
    noised = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(plan.noise_multiplier))
    assert plan.schedule == [(noised, 1), (counted, 1)] * 3
    assert 0.298 < plan.cost.epsilon <= 0.3
    assert plan.noise_multiplier > DPSGD(3, 100).plan(TARGET, PUBLIC).noise_multiplier


def test_a_run_asks_for_a_count_at_each_clip_norm() -> None:
    model = small_model("softmax")
    method = QuantileClipping(10, 20, clip_norm=1e-3, rate=3.0, count_noise_multiplier=4.0)
    noised, counted = (dp.PoissonSampledDpEvent(0.5, dp.GaussianDpEvent(z)) for z in (2.0, 4.0))
    plan = plan_with(2.0, steps=10, batch=20, records=40, count_noise_multiplier=4.0)
    plan = replace(plan, schedule=[(noised, 1), (counted, 1)] * 10)
    rows = run(method, plan, made_up(), model).trace.rows
    gradients, counts = rows[::2], rows[1::2]
    assert {row.kind for row in gradients} == {"gradient"}
    assert {(row.kind, row.noise_multiplier) for row in counts} == {("norm count", 4.0)}
    assert [row.noise_std for row in counts] == pytest.approx([2.0] * 10, rel=1e-6)
    norms = [row.clip_norm for row in gradients]
    assert norms[0] == 1e-3
    assert norms[1] == pytest.approx(1e-3 * math.exp(1.5), rel=0.5)
    assert 0.3 < norms[-1] < 30.0  # from far below, it came to where the gradients of 16 normal features are


@pytest.mark.parametrize(
    ("settings", "records", "sentence"),
    [
        ({"expected_batch_size": 10, "clip_norm": 2.0, "max_clip_norm": 1.0}, 1000, "lies outside"),
        ({"sampling_rate": 0.1}, None, r"set algorithm\.count_noise_multiplier"),
        ({"expected_batch_size": 500, "count_noise_multiplier": 0.5}, 1000, "no noise multiplier up to"),
    ],
)
def test_impossible_settings_are_refused(
    settings: dict[str, Any], records: int | None, sentence: str
) -> None:
    with pytest.raises(RefusedError, match=sentence):
        QuantileClipping(2, **settings).plan(TARGET, PublicInfo(records, 10, 1, 2))
