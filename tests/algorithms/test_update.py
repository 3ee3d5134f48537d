"""What is done with a released gradient: the learning rate with a factor, schedules and averages."""

import math
from typing import Any

import pytest
import torch

from algorithms.core.optimizers import OptimizerConfig, OptimizerState


def moved(update: OptimizerConfig, *, steps: int, factors: list[float] | None = None) -> list[OptimizerState]:
    """The states after each step along a gradient of ones, from 0."""
    states = [update.start(torch.zeros(3))]
    for count in range(steps):
        factor = factors[count] if factors else 1.0
        states.append(update.apply(states[-1], torch.ones(3), steps=steps, factor=factor))
    return states[1:]


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({"momentum": 0.9}, lambda moved: torch.optim.SGD([moved], 0.1, momentum=0.9)),
        ({"optimizer": "adam", "momentum": 0.8}, lambda moved: torch.optim.Adam([moved], 0.1, (0.8, 0.999))),
        (
            {"optimizer": "adam", "momentum": 0.9, "weight_decay": 0.5},
            lambda moved: torch.optim.AdamW([moved], 0.1, (0.9, 0.999), weight_decay=0.5),
        ),
    ],
)
def test_a_step_is_that_of_the_optimizer_of_this_name(settings: Any, reference: Any) -> None:
    update = OptimizerConfig(0.1, **settings)
    expected = torch.tensor([1.0, -2.0, 0.5])
    state, optimizer = update.start(expected), reference(expected)
    for gradient in torch.tensor([[0.3, 4.0, -1.0], [-2.0, 0.1, 0.0], [5.0, 5.0, 1e-3]]):
        state = update.apply(state, gradient, steps=3)
        expected.grad = gradient
        optimizer.step()
        assert torch.equal(state.parameters, expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_factor_multiplies_the_learning_rate_of_its_step(optimizer: Any) -> None:
    factors = [1.0, 0.5, 2.0]
    found = moved(OptimizerConfig(0.1, optimizer=optimizer), steps=3, factors=factors)
    gone = torch.stack([state.parameters for state in found]).diff(dim=0, prepend=torch.zeros(1, 3))
    expected = -0.1 * torch.tensor(factors)[:, None].expand(3, 3)
    torch.testing.assert_close(gone, expected, rtol=1e-4, atol=1e-6)


def test_a_factor_multiplies_the_weight_decay_too() -> None:
    update = OptimizerConfig(0.1, weight_decay=0.5)
    start = OptimizerState(torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3), torch.tensor(0))
    found = update.apply(start, torch.zeros(3), steps=1, factor=4.0)
    torch.testing.assert_close(found.parameters, torch.full((3,), 1 - 0.1 * 4.0 * 0.5))


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5 + 0.5 * math.cos(math.pi * t / 4) for t in range(4)]),
    ],
)
def test_schedules_follow_their_formula(schedule: Any, rates: list[float]) -> None:
    found = [float(state.parameters[0]) for state in moved(OptimizerConfig(1.0, schedule=schedule), steps=4)]
    assert found == pytest.approx([-sum(rates[: t + 1]) for t in range(4)], rel=1e-6)


def test_the_tail_is_the_mean_of_the_last_quarter() -> None:
    states = moved(OptimizerConfig(1.0, averaging="tail"), steps=8)
    assert float(states[-1].average[0]) == pytest.approx(-(7 + 8) / 2)


def test_the_moving_average_forgets_in_a_tenth_of_the_steps() -> None:
    states = moved(OptimizerConfig(1.0, averaging="ema"), steps=100)
    lag = float((states[-1].average - states[-1].parameters)[0])
    assert lag == pytest.approx(10 - 1, rel=1e-3)  # of a steady drift: one time constant less the last step
