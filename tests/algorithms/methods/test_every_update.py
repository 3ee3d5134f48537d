"""What every algorithm with an `update` composes with, by being in the catalogue, and the optimisers by their formulas.

Learning-rate schedules, momentum, Adam, averages of the iterates, several views of a record, layers that are not
trained, and a start from a file: each is planned, takes its steps through the barrier and does what it says.
"""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from algorithms.core.method import Algorithm
from algorithms.core.optimizers import OptimizerConfig, OptimizerState
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import Inputs, PlanningFacts
from algorithms.gradients import linear_layer
from algorithms.methods import CATALOGUE
from algorithms.models import Model, build
from algorithms.models.saved import adapt
from algorithms.privacy.accounting import Budget
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from tests.support.bench import DELTA, RECORDS, SHAPE, OneLook, Watched, algorithm, made_up
from tests.support.costs import costs_once
from tests.support.refusals import refused_as
from tests.support.soak import soak_but

__all__ = ["costs_once"]

STEPS, RATE = 12, 0.5
NAMES = [name for name, kind in CATALOGUE.items() if "update" in vars(kind)["__dataclass_fields__"]]
LINEAR = "norm_bound_sgd"
"""Its bound holds for a linear model with one output alone."""
OF_THE_MODEL = ["dp_sgd", "adaclip", "quantile_clipping", "dpis", LINEAR]
"""What is done to a model is seen by the barrier alone: one of each kind of query, and the one that needs a bound."""
of_the_model = pytest.mark.parametrize("name", soak_but(OF_THE_MODEL, NAMES))


@dataclass(frozen=True)
class Walk:
    """iterates: the start and what follows each step, [steps + 1, d]. released: [d]."""

    iterates: Tensor
    released: Tensor


def model_for(name: str, **changes: Any) -> Model:
    """A small model that the algorithm can train, with a start, layers and views by `changes`."""
    kind, settings = ("logistic", {}) if name == LINEAR else ("mlp", {"hidden": 3})
    model = build(kind, input_shape=SHAPE, classes=2, seed=1, settings=settings)
    return adapt(model, input_shape=SHAPE, **changes)


def method(name: str, **update: Any) -> Algorithm[Any]:
    steps = {"epochs": 3} if name == "dpis" else {"steps": STEPS}
    return algorithm(name, **steps, update={"learning_rate": RATE, **update})


def planned(made: Algorithm[Any], model: Model) -> Plan:
    """A plan from what the pipeline knows of the model."""
    facts = PlanningFacts(
        records=RECORDS,
        parameters=model.parameter_count,
        layers=len(model.layers),
        classes=2,
        inputs=Inputs(17.0, math.sqrt(17.0)) if linear_layer(model.module) else None,
        loss=model.bounds,
    )
    return made.plan(Target(Budget(1.0, DELTA), "rdp"), facts)


def walk(made: Algorithm[Any], model: Model) -> Walk:
    """The run of its plan, with the coins and the noise of every other one here."""
    plan, trace = planned(made, model), Trace()
    barrier = Watched(
        made_up(classes=2),
        model,
        privacy_filter=plan.open_filter(),
        generator=seeded_generator(7),
        delta=DELTA,
        trace=trace,
        compute=OneLook(),
    )
    state = made.init(model.initial_parameters(), plan)
    iterates = [state.parameters]
    for trace.step in range(plan.steps):
        state = made.step(state, plan, barrier)
        assert state is not None
        iterates.append(state.parameters)
    found = Walk(torch.stack(iterates), made.released(state))
    assert plan.steps == STEPS and barrier.answers
    assert bool(torch.isfinite(found.iterates).all()) and bool(torch.isfinite(found.released).all())
    return found


@cache
def plain(name: str) -> Walk:
    """With a constant rate, without momentum, average or anything of the model."""
    return walk(method(name), model_for(name))


@pytest.mark.parametrize(
    ("name", "schedule"), [*((name, "linear") for name in NAMES), ("dp_sgd", "cosine"), ("dpis", "cosine")]
)
def test_a_schedule_begins_at_the_full_rate_and_shortens_later_steps(name: str, schedule: str) -> None:
    if name == "adp_sgd":
        with refused_as("schedule_given_twice"):
            planned(method(name, schedule=schedule), model_for(name))
        return
    found, constant = walk(method(name, schedule=schedule), model_for(name)), plain(name)
    assert torch.equal(found.iterates[:2], constant.iterates[:2])
    last, full = ((run.iterates[-1] - run.iterates[-2]).norm() for run in (found, constant))
    assert 0 < last < 0.5 * full


@pytest.mark.parametrize(
    ("name", "averaging"), [*((name, "tail") for name in NAMES), ("dp_sgd", "ema"), ("dpis", "ema")]
)
def test_an_average_is_released_and_changes_no_step(name: str, averaging: str) -> None:
    found = walk(method(name, averaging=averaging), model_for(name))
    assert torch.equal(found.iterates, plain(name).iterates)
    assert not torch.allclose(found.released, found.iterates[-1])
    if averaging == "tail":
        torch.testing.assert_close(found.released, found.iterates[-STEPS // 4 :].mean(dim=0))


def refused_for_no_linear_model(name: str, model: Model) -> bool:
    """Whether the algorithm needs a bound that what was done to the model takes away; it says so before it spends."""
    if name != LINEAR:
        return False
    with refused_as("public_bound_missing", what="sensitivity"):
        planned(method(name), model)
    return True


@of_the_model
def test_several_views_change_the_gradient(name: str) -> None:
    model = model_for(name, augmentations=3)
    if not refused_for_no_linear_model(name, model):
        assert not torch.allclose(walk(method(name), model).released, plain(name).released)


@of_the_model
def test_what_is_frozen_is_released_as_it_was(name: str) -> None:
    frozen = "1.bias" if name == LINEAR else "1"
    model = model_for(name, freeze=[frozen])
    if refused_for_no_linear_model(name, model):
        return
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    after = model.published_tensors(walk(method(name), model).released)
    assert after.keys() == before.keys()
    for key, value in after.items():
        assert torch.equal(value, before[key]) == key.startswith(frozen)


@of_the_model
def test_a_start_from_a_file_is_where_the_first_step_begins(name: str, tmp_path: Path) -> None:
    own = model_for(name)
    at = torch.linspace(-1, 1, own.parameter_count)
    save_file(
        {key: value.clone() for key, value in own.published_tensors(at).items()}, tmp_path / "a.safetensors"
    )
    found = walk(method(name), model_for(name, start=tmp_path / "a.safetensors"))
    assert torch.equal(found.iterates[0], at)
    assert not torch.equal(found.released, at)


def moved(update: OptimizerConfig, *, steps: int, factors: list[float] | None = None) -> list[OptimizerState]:
    """The states after each step along a gradient of ones, from 0."""
    states = [update.start(torch.zeros(3))]
    for count in range(steps):
        factor = factors[count] if factors else 1.0
        states.append(update.apply(states[-1], torch.ones(3), steps=steps, factor=factor))
    return states[1:]


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


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({"momentum": 0.9}, lambda moved: torch.optim.SGD([moved], 0.1, momentum=0.9)),
        (
            {"momentum": 0.9, "nesterov": True},
            lambda moved: torch.optim.SGD([moved], 0.1, momentum=0.9, nesterov=True),
        ),
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


@pytest.mark.parametrize("settings", [{"momentum": 0.0}, {"optimizer": "adam", "momentum": 0.9}])
def test_looking_ahead_needs_the_momentum_of_sgd(settings: Any) -> None:
    with pytest.raises(ValueError, match="nesterov needs the optimizer sgd with a momentum above 0"):
        OptimizerConfig(nesterov=True, **settings)
