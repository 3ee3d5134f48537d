"""Many draws at once: the descent is that of the method with its plan's noise, and the tests are corrected by Holm."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from algorithms.core.minibatch import NoiseRun, NoiseSchedule
from algorithms.core.optimizers import OptimizerConfig
from algorithms.methods.dp_sgd import DPGD
from algorithms.privacy.mechanisms.release import Gaussian
from comparisons.convex_draws import Moment, by_holm, descend, summary

STEPS, RECORDS = 4, 30
AHEAD = OptimizerConfig(1.5, schedule="linear", momentum=0.7, nesterov=True)


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plan(noise: float) -> Any:
    """What is read of a plan: noise that doubles after half of the steps."""
    schedule = NoiseSchedule((NoiseRun(2, 1.0), NoiseRun(2, 2.0)))
    return SimpleNamespace(steps=STEPS, noise_multiplier=noise, params=lambda _kind: schedule)


def test_without_noise_all_draws_are_pytorch_s_descent_on_clipped_gradients() -> None:
    inputs = 3 * torch.randn((RECORDS, 5), generator=draws(1))
    labels = torch.randn(RECORDS, generator=draws(2)).sign()
    found = descend(DPGD(clip_norm=0.5, update=AHEAD), plan(0.0), inputs, labels, draws=2, generator=draws(3))
    point = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.SGD([point], 1.5, momentum=0.7, nesterov=True)
    for step in range(STEPS):
        total = torch.zeros(5)
        for record, label in zip(inputs, labels, strict=True):
            loss = torch.nn.functional.softplus(-label * (record @ point))
            (gradient,) = torch.autograd.grad(loss, point)
            total += gradient / max(1.0, float(gradient.norm()) / 0.5)
        optimizer.param_groups[0]["lr"] = 1.5 * (1 - step / STEPS)
        point.grad = total / RECORDS
        optimizer.step()
    torch.testing.assert_close(found, point.detach()[:, None].expand(5, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("allocation", "growth"), [("matched", 2.0), ("constant", 1.0)])
def test_each_step_has_the_noise_of_the_plan(allocation: Any, growth: float) -> None:
    method = DPGD(clip_norm=0.5, allocation=allocation, update=OptimizerConfig(1.0))
    still = torch.zeros((RECORDS, 3))
    found = descend(method, plan(6.0), still, torch.ones(RECORDS), draws=20_000, generator=draws(4))
    expected = 0.5 * 6.0 / RECORDS * math.sqrt(2 + 2 * growth**2)
    assert float(found.std()) == pytest.approx(expected, rel=0.02)


def test_a_noisy_moment_is_symmetric_with_the_noise_of_the_release() -> None:
    records = torch.randn((10, 40), generator=draws(5))
    found = Moment(records, draws(6)).moment(None, bound=None, noise=Gaussian(3.0))
    added = (found - (records.T @ records).double()).numpy()
    assert np.allclose(added, added.T)
    assert added[np.triu_indices(40)].std() == pytest.approx(3.0, rel=0.1)


def test_p_values_are_corrected_for_their_number() -> None:
    values = pd.Series({"a": 0.01, "b": 0.2, "c": 0.02, "d": 0.9})
    assert by_holm(values).to_dict() == pytest.approx({"a": 0.04, "c": 0.06, "b": 0.4, "d": 0.9})


def test_differences_are_those_of_a_fold_s_means() -> None:
    gains = {"dp_gd": 0.0, "ahead": 0.01, "matched": 0.03, "together": 0.05}
    by_fold = {"matched": 0.002, "together": 0.001}
    rows = [
        {"dataset": "made up", "epsilon": 0.1, "fold": fold, "method": method}
        | {"accuracy": 0.8 + gain + fold * by_fold.get(method, 0.0) + wobble}
        for fold in range(3)
        for method, gain in gains.items()
        for wobble in (-0.02, 0.02)
    ]
    table = summary(pd.DataFrame(rows)).set_index(["method", "base"])
    assert table["gain"].to_dict() == pytest.approx(
        {("matched", "dp_gd"): 0.032, ("together", "dp_gd"): 0.051, ("matched", "ahead"): 0.022}
    )
    assert table["gain_stderr"]["together", "dp_gd"] == pytest.approx(0.001 / math.sqrt(3), abs=1e-5)
    assert table["base_accuracy"]["matched", "ahead"] == pytest.approx(0.81)
