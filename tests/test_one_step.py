"""The page of one private step: its code runs, and computes what the product does."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from algorithms import DPSGD, fit
from algorithms.gradients import L2, Engine
from algorithms.models import Model
from tests.support.checkout import PROJECT

RECORDS, RATE, NOISE, STEPS, DELTA = 200, 0.1, 1.5, 40, 1e-5


@pytest.fixture(scope="module")
def page() -> SimpleNamespace:
    """What the page's code defines."""
    text = (PROJECT / "docs/explanation/one-step.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 60
    names: dict[str, object] = {}
    exec(compile(code, "one-step.md", "exec"), names)
    return SimpleNamespace(**names)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def records(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(count, 5, generator=draw), torch.randint(0, 3, (count,), generator=draw)


@pytest.mark.parametrize("clip_norm", [0.05, 0.6, 1e3])
def test_sum_is_that_of_the_engine(page: SimpleNamespace, clip_norm: float) -> None:
    inputs, labels = records(23)
    losses = nn.CrossEntropyLoss(reduction="none")
    model = Model("small", network(), losses, scores=lambda outputs: outputs)
    found = Engine(model, input_shape=(5,)).clipped_sum(
        model.initial_parameters(), inputs, labels, L2(clip_norm)
    )
    expected = page.clipped_sum(network(), nn.CrossEntropyLoss(), inputs, labels, clip_norm)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_training_costs_and_noise_are_those_of_a_run(page: SimpleNamespace) -> None:
    inputs, labels = records(RECORDS)
    stated = page.epsilon(RATE, NOISE, STEPS, DELTA)
    method = DPSGD(steps=STEPS, expected_batch_size=int(RATE * RECORDS), clip_norm=0.5)
    result = fit(network(), nn.CrossEntropyLoss(), inputs, labels, method=method, epsilon=stated, delta=DELTA)
    assert result.card.mechanism.sampling_rate == RATE
    assert result.card.mechanism.noise_multiplier == pytest.approx(NOISE, rel=0.005)
    assert np.allclose(result.trace["noise_std"], NOISE * 0.5, rtol=0.005)


def test_step_moves_parameters_by_the_noisy_mean(page: SimpleNamespace) -> None:
    inputs, labels = records(RECORDS)
    model, start = network(), torch.nn.utils.parameters_to_vector(network().parameters())
    settings = {"rate": 1.0, "clip_norm": 0.5, "noise_multiplier": 0.0, "learning_rate": 2.0}
    page.step(model, nn.CrossEntropyLoss(), inputs, labels, **settings)
    total = page.clipped_sum(network(), nn.CrossEntropyLoss(), inputs, labels, 0.5)
    moved = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(moved, (start - 2.0 * total / RECORDS).float().detach(), rtol=1e-5, atol=1e-6)
    page.step(
        model,
        nn.CrossEntropyLoss(),
        inputs,
        labels,
        **settings | {"noise_multiplier": 40.0, "learning_rate": 1.0},
    )
    noise = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - moved
    assert math.isclose(float(noise.std()), 40.0 * 0.5 / RECORDS, rel_tol=0.5)


def test_sample_tosses_a_coin_for_each_record(page: SimpleNamespace) -> None:
    torch.manual_seed(2)
    chosen = page.sample(100_000, RATE)
    assert (chosen.diff() > 0).all()
    assert abs(len(chosen) - 10_000) < 6 * 9_000**0.5
