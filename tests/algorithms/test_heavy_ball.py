"""DP-SHB and DP-GD: what they plan, ask and do with the answers; also what they share with Nesterov's methods."""

import json
import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from algorithms.core.method import Target
from algorithms.errors import RefusedError
from algorithms.methods.momentum import HeavyBall, Nesterov
from algorithms.privacy.accounting import Budget
from tests.algorithms.box import (
    APPROXIMATE,
    FEATURES,
    PURE,
    RECORDS,
    bowl,
    box,
    descended,
    public,
    run,
)


@pytest.mark.parametrize("momentum", [0.0, 0.5, None])
def test_on_exact_gradients_it_is_the_heavy_ball(momentum: float | None) -> None:
    method = HeavyBall(30, momentum=momentum, noise="laplace", regularisation=0.05, start=3.0)
    iterates = descended(method, method.plan(PURE, public()), bowl)
    size, convexity = 1.0 / (FEATURES / 4 + 0.1), 0.1
    root = math.sqrt(size * convexity)
    beta = (1 - root) / (1 + root) if momentum is None else momentum
    now = before = torch.full((FEATURES,), 3.0, dtype=torch.float64)
    for iterate in iterates[1:]:
        now, before = now - size * (bowl(now) + 0.1 * now) + beta * (now - before), now
        torch.testing.assert_close(iterate, now, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("adjacency", "apart"), [("REPLACE_ONE", 2), ("ADD_OR_REMOVE_ONE", 1)])
def test_pure_epsilon_is_divided_equally(adjacency: Any, apart: int) -> None:
    plan = HeavyBall(50, noise="laplace", adjacency=adjacency).plan(PURE, public())
    assert plan.noise_multiplier == pytest.approx(apart * 50, rel=1e-9)
    assert 1 - 1e-9 < plan.cost.epsilon <= 1.0
    assert plan.cost.delta == 0.0
    assert plan.adjacency == adjacency
    assert (plan.divisor, plan.sampling_rate, len(plan.schedule)) == (RECORDS, 1.0, 1)


@pytest.mark.parametrize(("size", "scale"), [(100_000, 0.040000000000000424), (1000, 0.05749998180027885)])
def test_the_scale_on_the_mean_is_the_reference_value(size: int, scale: float) -> None:
    plan = HeavyBall(100, noise="laplace", batch_size=size).plan(PURE, public(100_000))
    assert plan.noise_multiplier * FEATURES / plan.divisor == pytest.approx(scale, rel=1e-9)


@pytest.mark.parametrize(("steps", "shrinks"), [(100, 2.41), (1000, 7.5)])
def test_laplace_noise_shrinks_when_a_delta_is_granted(steps: int, shrinks: float) -> None:
    method = HeavyBall(steps, noise="laplace")
    pure = method.plan(PURE, public()).noise_multiplier
    plan = method.plan(APPROXIMATE, public())
    assert pure / plan.noise_multiplier == pytest.approx(shrinks, rel=0.01)
    assert 0.99 < plan.cost.epsilon <= 1.0


def test_gaussian_noise_is_calibrated_under_both_adjacencies() -> None:
    replaced = HeavyBall(50).plan(APPROXIMATE, public())
    removed = HeavyBall(50, adjacency="ADD_OR_REMOVE_ONE").plan(APPROXIMATE, public())
    assert 0.99 < replaced.cost.epsilon <= 1.0
    assert replaced.noise_multiplier == pytest.approx(2 * removed.noise_multiplier, rel=1e-3)


def test_gaussian_noise_on_samples_is_accounted_by_renyi() -> None:
    method = HeavyBall(20, batch_size=100)
    plan = method.plan(Target(Budget(1.0, 1e-6), "rdp"), public())
    assert 0.99 < plan.cost.epsilon <= 1.0
    assert plan.noise_multiplier < HeavyBall(20).plan(APPROXIMATE, public()).noise_multiplier


@pytest.mark.parametrize("batch_size", [None, 50])
def test_the_noise_that_is_drawn_has_the_scale_of_the_plan(batch_size: int | None) -> None:
    """False alarms: under 1e-6, the absolute values of Laplace noise being exponential."""
    method = HeavyBall(300, noise="laplace", batch_size=batch_size, momentum=0.0, relative_step=1e-9)
    plan, clean = method.plan(PURE, public()), box()
    zeros = type(clean)(clean.features * 0, clean.labels)  # their gradients are 0
    _, _, watching = run(method, plan, zeros)
    drawn = torch.stack(watching.answers).double() * plan.divisor
    scale = plan.noise_multiplier * 20.0
    count = drawn.numel()
    assert abs(float(drawn.abs().sum()) / scale - count) < 5 * math.sqrt(count)


@pytest.mark.parametrize("kind", [HeavyBall, Nesterov])
def test_a_smoothness_from_the_data_marks_the_plan(kind: Any) -> None:
    assert kind(20, noise="laplace").plan(PURE, public()).not_private is None
    method = kind(20, noise="laplace", smoothness=5.1, smoothness_is_data_dependent=True)
    plan = method.plan(PURE, public())
    assert plan.not_private is not None
    assert "computed from the private records" in plan.not_private
    own = plan.method_params
    assert own["smoothness"] == 5.1
    assert own["stages"][0]["step_size"] == 1 / 5.1


@pytest.mark.parametrize(
    ("settings", "target", "facts", "words"),
    [
        ({}, APPROXIMATE, {"records": None}, "number of records is private"),
        ({"batch_size": RECORDS + 1}, APPROXIMATE, {}, "there are 1000 training records"),
        ({"batch_size": 10, "adjacency": "ADD_OR_REMOVE_ONE"}, APPROXIMATE, {}, "under REPLACE_ONE only"),
        ({"batch_size": 10}, APPROXIMATE, {}, "Rényi bound only"),
        ({"noise": "gaussian"}, PURE, {}, "gaussian noise has no pure epsilon"),
        ({}, Target(Budget(math.inf, 1e-6)), {}, "finite epsilon"),
        ({"smoothness": 5.1}, APPROXIMATE, {}, "given by hand may come from the private records"),
        ({"smoothness_is_data_dependent": True}, APPROXIMATE, {}, "given by hand may come from"),
        ({"relative_step": 300.0}, APPROXIMATE, {}, "set algorithm.relative_step to at most 251"),
        ({"regularisation": 0.0}, APPROXIMATE, {}, "regularisation"),
        ({}, APPROXIMATE, {"name": "svm"}, "kink"),
    ],
)
@pytest.mark.parametrize("kind", [HeavyBall, Nesterov])
def test_refuses_in_one_sentence(
    kind: Any, settings: dict[str, Any], target: Target, facts: dict[str, Any], words: str
) -> None:
    with pytest.raises(RefusedError, match=words) as refused:
        kind(20, **settings).plan(target, public(**facts))
    assert str(refused.value).count(". ") == 0


@pytest.mark.parametrize("kind", [HeavyBall, Nesterov])
def test_refuses_models_and_data_without_public_bounds(kind: Any) -> None:
    known = public()
    bare = type(known)(known.records, known.parameters, known.layers, known.classes)
    with pytest.raises(RefusedError, match="public bound"):
        kind(20).plan(APPROXIMATE, bare)


def test_gradient_descent_needs_no_strong_convexity() -> None:
    (stage,) = (
        HeavyBall(5, momentum=0.0, regularisation=0.0).plan(APPROXIMATE, public()).method_params["stages"]
    )
    assert stage == {"steps": 5, "step_size": pytest.approx(0.2), "momentum": 0.0}


@pytest.mark.parametrize(
    "settings",
    [{"steps": 0}, {"steps": 5, "momentum": 1.0}, {"steps": 5, "noise": "none"}, {"steps": 5, "step": 1.0}],
)
def test_impossible_and_unknown_settings_are_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(HeavyBall).validate_json(json.dumps(settings))


def test_settings_are_read_with_the_shared_ones() -> None:
    read = TypeAdapter(HeavyBall).validate_json(
        '{"steps": 5, "momentum": 0.0, "noise": "laplace", "start": 10}'
    )
    assert read == HeavyBall(5, momentum=0.0, noise="laplace", start=10.0)
