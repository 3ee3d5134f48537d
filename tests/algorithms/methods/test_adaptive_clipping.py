"""AdaCliP: its scale and variance, the shift added once, its bounds, and DP-SGD as a special case."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.gradients import Affine
from algorithms.methods.adaptive_clipping import AdaCliP, AdaCliPState
from algorithms.methods.dp_sgd import DPSGD
from algorithms.privacy.accounting import Budget
from tests.support.bench import made_up, run, small_model
from tests.support.refusals import refused_as
from tests.support.unaccounted import plan_with, with_equal_steps

TARGET = Target(Budget(2.0, 1e-5))


class Answers:
    """A stand-in for the barrier with answers of its own, in units of the transformed mean."""

    def __init__(self, *answers: Tensor) -> None:
        self.answers = list(answers)
        self.asked: list[Affine] = []

    def gradient(self, _parameters: Tensor, *, clipping: Affine, **_settings: Any) -> Tensor:
        self.asked.append(clipping)
        return self.answers.pop(0)


class NoRecords:
    """A stand-in for the barrier of an empty data set: noise alone."""

    def gradient(self, parameters: Tensor, *, noise: Any, divisor: float, **_settings: Any) -> Tensor:
        return torch.randn(len(parameters)) * noise.multiplier / divisor


def plan_of(method: AdaCliP, parameters: int, *, noise_multiplier: float = 1.1) -> Plan:
    assert method.expected_batch_size is not None
    return plan_with(
        noise_multiplier,
        steps=method.steps,
        batch=method.expected_batch_size,
        records=60_000,
        parameters=parameters,
    )


def after(method: AdaCliP, plan: Plan, *answers: Tensor) -> AdaCliPState:
    state = method.init(torch.zeros(len(answers[0])), plan)
    barrier = Answers(*answers)
    for _ in answers:
        state = method.step(state, plan, barrier)  # type: ignore[arg-type]
    return state


def test_the_scale_is_the_reference_value() -> None:
    state = after(AdaCliP(1, 4), plan_of(AdaCliP(1, 4), 4), torch.zeros(4))
    found = replace(state, deviation=torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)).scale
    expected = [0.6, 1.3416407864998738, 1.8973665961010275, 2.6832815729997477]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_variance_is_the_reference_value() -> None:
    released = torch.tensor([1.0, -1.2, 0.1, 2.5], dtype=torch.float64)
    scale = torch.tensor([0.6, 1.3416407864998738, 1.8973665961010275, 2.6832815729997477])
    found = AdaCliP(1, 4, scale="paper", h2=10.0).variance(released.square(), scale.double() * 1.5, 4.0)
    assert found.tolist() == pytest.approx([3.7975, 4.7475, 1e-12, 10.0], rel=1e-6)


@pytest.mark.parametrize("deviation", [1.0, 2.0])
def test_the_variance_is_that_of_a_record_not_of_the_mean(deviation: float) -> None:
    batch, z, b, draws = 600, 1.1, 3.0, 100_000
    torch.manual_seed(1)
    released = torch.randn(draws) * math.sqrt(deviation**2 / batch + (b * z / batch) ** 2)
    method = AdaCliP(1, batch, scale="paper", h2=1e6)
    found = method.variance(released.square(), torch.full((draws,), b * z), float(batch))
    assert float(found.mean()) == pytest.approx(deviation**2, rel=0.03)  # 6 standard errors


def test_the_shift_is_added_once_whoever_takes_part() -> None:
    method = AdaCliP(2, 600, beta1=0.5, update=OptimizerConfig(0.25))
    plan = plan_of(method, 3)
    first, nothing = torch.tensor([0.3, -0.2, 0.1]), torch.zeros(3)
    barrier = Answers(first, nothing)
    state = method.step(method.init(torch.zeros(3), plan), plan, barrier)  # type: ignore[arg-type]
    shift = state.mean
    torch.testing.assert_close(shift, 0.5 * first)  # the scale is 1 at the start
    following = method.step(state, plan, barrier)  # type: ignore[arg-type]
    torch.testing.assert_close(following.parameters, state.parameters - 0.25 * shift)
    assert torch.equal(barrier.asked[1].shift, shift)
    assert barrier.asked[1].sensitivity == 1.0


def test_without_adaptation_it_is_dp_sgd() -> None:
    model, settings = small_model("softmax"), {"steps": 4, "expected_batch_size": 10, "clip_norm": 0.7}
    runs = []
    for method in (DPSGD(**settings), AdaCliP(**settings, beta1=1.0, beta2=1.0)):  # type: ignore[arg-type]
        plan = with_equal_steps(plan_with(1.4, steps=4, batch=10, records=40))
        runs.append(run(method, plan, made_up(), model).released)
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-4, atol=1e-5)
    assert not torch.equal(runs[0], model.initial_parameters())


def test_the_variance_is_taken_from_the_shift_of_before() -> None:
    method = AdaCliP(1, 100, beta1=0.0, scale="paper", h2=4.0)
    plan = plan_of(method, 2, noise_multiplier=1e-6)
    found = after(method, plan, torch.tensor([0.05, 0.0]))
    b = math.sqrt(2.0 * 4.0)
    v = 100 * (0.05 * b) ** 2
    assert found.deviation.tolist() == pytest.approx([math.sqrt(0.9 * 4 + 0.1 * v), math.sqrt(3.6)], rel=1e-5)


@pytest.mark.parametrize(("parameters", "steps"), [(7850, 200), (1_000_000, 10)])
def test_under_noise_alone_the_scale_stays_within_the_clip_norm(parameters: int, steps: int) -> None:
    torch.manual_seed(2)
    method = AdaCliP(steps, 600, clip_norm=0.5)
    plan = plan_of(method, parameters)
    state = method.init(torch.zeros(parameters), plan)
    assert state.scale.tolist()[:2] == pytest.approx([0.5, 0.5], rel=1e-4)
    for _ in range(steps):
        state = method.step(state, plan, NoRecords())  # type: ignore[arg-type]
        assert 0.0 < float(state.scale.min()) <= float(state.scale.max()) <= 0.5 * (1 + 1e-4)
    assert bool(torch.isfinite(state.parameters).all())


def test_a_shift_that_is_far_for_its_scale_goes_as_far_as_one_may() -> None:
    """A run does not end over a mean that rounding would be felt at, but takes less of it."""
    method, count = AdaCliP(steps=2, expected_batch_size=100, clip_norm=1.0), 3
    plan = plan_of(method, count)
    state = method.init(torch.zeros(count), plan)
    far = replace(state, mean=torch.full((count,), 1e6))
    barrier = Answers(torch.zeros(count))
    following = method.step(far, plan, barrier)  # type: ignore[arg-type]
    (asked,) = barrier.asked
    assert asked.offset == pytest.approx(999.0, rel=1e-3)
    torch.testing.assert_close(following.mean, asked.shift)


def test_a_quiet_coordinate_gets_less_noise_than_a_loud_one() -> None:
    torch.manual_seed(3)
    spread, batch = torch.tensor([1.0] * 5 + [0.01] * 5), 600
    method = AdaCliP(100, batch, clip_norm=10.0)
    plan = plan_of(method, 10, noise_multiplier=0.5)
    state = method.init(torch.zeros(10), plan)
    for _ in range(100):
        mean = torch.randn(10) * (spread / state.scale) / math.sqrt(batch)
        answer = mean + 0.5 * torch.randn(10) / batch
        state = method.step(state, plan, Answers(answer))  # type: ignore[arg-type]
    scale = state.scale
    assert float(scale[5:].max()) < 0.3 * float(scale[:5].min())
    assert float(scale.norm()) < 10.0


def test_one_step_of_the_printed_update_by_hand() -> None:
    method = AdaCliP(1, 4, h1=0.01, h2=100.0, scale="paper", paper_update=True, update=OptimizerConfig(0.1))
    plan = plan_of(method, 2, noise_multiplier=1.0)
    state = after(method, plan, torch.tensor([1.0, 0.1]))
    # s_0 = 1, so b^2 = 2 and (b sigma)^2 = 2 z^2 / B = 0.5; v = (2 - 0.5, 0.02 - 0.5 clipped to h1)
    root = math.sqrt(2.0)
    assert state.parameters.tolist() == pytest.approx([-0.1 * root, -0.01 * root], rel=1e-5)
    assert state.mean.tolist() == pytest.approx([0.01 * root, 0.001 * root], rel=1e-5)
    assert state.deviation.square().tolist() == pytest.approx([0.9 + 0.1 * 1.5, 0.9 + 0.1 * 0.01], rel=1e-5)


def test_printed_update_takes_noise_of_each_user_for_that_of_the_sum() -> None:
    golden = json.loads((Path(__file__).parents[1] / "privacy/accounting/golden.json").read_text())[
        "adaclip_z"
    ]
    sigma, batch, z = golden["params"]["sigma"], golden["params"]["B"], golden["value"]
    method = AdaCliP(1, batch, h1=1e-6, h2=100.0, scale="paper", paper_update=True)
    b, squares = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    expected = squares - (b * sigma).square()
    torch.testing.assert_close(method.variance(squares, b * z, batch), expected, rtol=1e-12, atol=0.0)


def test_a_plan_with_the_papers_update_states_what_it_decides() -> None:
    facts = PlanningFacts(1000, 100, 1, 2)
    method = AdaCliP(5, 10, paper_update=True, h2=1.0, beta1=0.5)
    assert method.plan(TARGET, facts).method_params["paper_protocol"] == {
        "paper": "Pichapati et al. 2019",
        "settings": {"gamma": 1.0, "beta1": 0.5, "beta2": 0.9, "h1": 1e-12, "scale": "paper", "start": None},
        "departures": ["beta1"],
    }
    assert AdaCliP(5, 10).plan(TARGET, facts).method_params == {}


def test_gamma_scales_what_a_gradient_is_divided_by() -> None:
    """One step by hand at gamma = 1/4: s_0 = 1 and d = 2, so b = 2 sqrt(2), and a mean of (1, 0.1) is g / b."""
    settings: dict[str, Any] = {"h1": 0.01, "h2": 1.0, "scale": "paper", "update": OptimizerConfig(0.1)}
    method = AdaCliP(1, 4, gamma=0.25, **settings)
    plan = plan_of(method, 2, noise_multiplier=1.0)
    state = after(method, plan, torch.tensor([1.0, 0.1]))
    b = 2.0 * math.sqrt(2.0)
    assert state.parameters.tolist() == pytest.approx([-0.1 * b, -0.01 * b], rel=1e-5)
    # v = B (g^2 - (b z / B)^2) = 4 (8 - 0.5) and 4 (0.08 - 0.5), held to [h1, h2]
    assert state.deviation.square().tolist() == pytest.approx([0.9 + 0.1 * 1.0, 0.9 + 0.1 * 0.01], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"scale": "paper"}, "variance_bound_missing"),
        ({"paper_update": True}, "variance_bound_missing"),
        ({"h2": 1.0}, "variance_bound_given"),
        ({"scale": "paper", "h2": 1e-12}, "variance_bounds_crossed"),
        ({"clip_norm": 1e-6}, "variance_bounds_crossed"),
        ({"start": 2.0}, "scale_start_too_large"),
    ],
)
def test_bounds_that_are_missing_or_do_not_fit_are_refused(settings: dict[str, Any], code: str) -> None:
    with refused_as(code):
        AdaCliP(5, 10, **settings).plan(TARGET, PlanningFacts(1000, 100, 1, 2))


def test_a_start_below_the_most_is_kept() -> None:
    method = AdaCliP(1, 10, clip_norm=1.0, start=0.01)
    state = method.init(torch.zeros(100), plan_of(method, 100))
    assert state.deviation.tolist() == pytest.approx([0.01] * 100)
    assert float(state.scale[0]) == pytest.approx(0.1)  # sqrt(d) s
