"""An iteration of DP-AGD: its measurements, its selections, the range of its steps, and that it learns."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from algorithms.core.method import Plan
from algorithms.methods.dp_agd import DPAGD, Measured, State
from tests.algorithms.descent import (
    FEATURES,
    RECORDS,
    Scripted,
    check_taken_up,
    made_up,
    planned,
    run,
    stepped,
)

GRADIENTS = [torch.tensor([30.0, -40.0]), torch.tensor([10.0, 5.0]), torch.tensor([-7.0, 2.0])]


def rejected(**settings: Any) -> tuple[DPAGD, Plan, Scripted, State]:
    """An iteration in which 0 is selected twice, then the third step."""
    method = DPAGD(momentum=0.0, iterations=50, **settings)
    plan = planned(method)
    barrier = Scripted(plan, chosen=[0, 0, 3], gradients=[vector.clone() for vector in GRADIENTS])
    following = method.step(method.init(torch.zeros(2), plan), plan, barrier)  # type: ignore[arg-type]
    assert following is not None
    return method, plan, barrier, following


def test_a_rejection_measures_the_difference_and_averages_raw_measurements() -> None:
    _, plan, barrier, _ = rejected(gamma=0.25)
    start = plan.method_params["gradient_rho"]
    rhos = [start, 0.25 * start, 0.25 * 1.25 * start]
    assert barrier.multipliers == pytest.approx([1 / math.sqrt(2 * part) for part in rhos], rel=1e-12)
    total = torch.zeros(2)
    for line, measured, part in zip(barrier.lines, GRADIENTS, rhos, strict=True):
        total = total + part * measured
        torch.testing.assert_close(line.direction, total / total.norm())


def test_printed_averaging_mixes_a_unit_vector_with_raw_measurements() -> None:
    _, _, barrier, _ = rejected(gamma=0.25, averaging="printed")
    direction = GRADIENTS[0] / 50.0
    torch.testing.assert_close(barrier.lines[0].direction, direction)
    for line, measured in zip(barrier.lines[1:], GRADIENTS[1:], strict=True):
        direction = (direction + 0.25 * measured) / 1.25
        torch.testing.assert_close(line.direction, direction)


@pytest.mark.parametrize(("keeps", "factor"), [(True, 1.1**2), (False, 1.0)])
def test_a_raised_budget_is_kept_or_not(keeps: bool, factor: float) -> None:
    _, plan, _, state = rejected(keep_raised=keeps)
    assert float(state.gradient_rho) == pytest.approx(factor * plan.method_params["gradient_rho"], rel=1e-12)


def test_a_rejection_shrinks_the_range_at_once() -> None:
    _, _, barrier, state = rejected(range_shrink=0.5, step_range=4.0)
    assert [line.steps[-1] for line in barrier.lines] == pytest.approx([4.0, 2.0, 1.0])
    assert float(state.reach) == pytest.approx(1.0)
    assert float(state.window[0]) == pytest.approx(barrier.lines[-1].steps[3])
    assert torch.equal(state.parameters, barrier.lines[-1].at(3))


def test_the_average_weighs_measurements_by_their_inverse_variances() -> None:
    one = Measured(torch.tensor([1.0, 5.0], dtype=torch.float64), 0.5)
    two = Measured(torch.tensor([4.0, -1.0], dtype=torch.float64), 0.25)
    both = one.averaged(two)
    assert both.total.tolist() == [2.0, 3.0]
    assert both.rho == 0.75
    draw = torch.Generator().manual_seed(2)
    noise = [
        torch.randn(200_000, generator=draw, dtype=torch.float64) / math.sqrt(2 * r) for r in (0.5, 0.25)
    ]
    mixed = Measured(noise[0], 0.5).averaged(Measured(noise[1], 0.25))
    assert float(mixed.total.var()) == pytest.approx(1 / (2 * mixed.rho), rel=0.02)  # 6 standard errors


@pytest.mark.parametrize("settings", [{}, {"paper_budget": True}, {"steps_grid": (0.0, 0.5, 2.0)}])
def test_the_first_candidate_is_where_the_iteration_stands(settings: dict[str, Any]) -> None:
    method = DPAGD(**settings)
    plan = planned(method)
    barrier = Scripted(plan, chosen=[2, 2])
    state = method.init(torch.tensor([0.3, -0.1]), plan)
    for _ in range(2):
        following = stepped(method, state, plan, barrier)
        assert barrier.lines[-1].steps[0] == 0.0
        assert torch.equal(barrier.lines[-1].at(0), state.parameters)
        state = following
    grid = {"paper_budget": 21, "steps_grid": 3}.get(next(iter(settings), ""), 11)
    assert len(barrier.lines[0].steps) == grid


def test_the_range_follows_the_steps_that_were_chosen() -> None:
    method = DPAGD(paper_budget=True)
    plan = planned(method)
    places = [3, 5, 2, 4, 1, 1, 2, 3, 5, 1, 20, *[1] * 9]
    barrier = Scripted(plan, chosen=places)
    state = method.init(torch.zeros(2), plan)
    reaches = []
    for _ in places:
        state = stepped(method, state, plan, barrier)
        reaches.append(float(state.reach))
    assert reaches[:9] == [2.0] * 9
    assert reaches[9] == pytest.approx(1.1 * 0.5)
    assert reaches[18] == reaches[9]
    assert reaches[19] == pytest.approx(1.1 * 1.1 * 0.5)


def test_the_range_never_passes_its_most() -> None:
    method = DPAGD(range_every=1, range_growth=3.0, step_range=2.0)
    plan = planned(method)
    barrier = Scripted(plan, chosen=[10, 10])
    state = method.step(method.init(torch.zeros(2), plan), plan, barrier)  # type: ignore[arg-type]
    assert state is not None and float(state.reach) == 2.0


def test_momentum_carries_raw_measurements_on_and_the_average_is_of_iterates() -> None:
    method = DPAGD(momentum=0.5)
    plan = planned(method)
    barrier = Scripted(plan, chosen=[4, 4, 4], gradients=[vector.clone() for vector in GRADIENTS])
    state, velocity, average = method.init(torch.zeros(2), plan), torch.zeros(2), torch.zeros(2)
    for count, measured in enumerate(GRADIENTS, start=1):
        velocity = 0.5 * velocity + measured
        following = stepped(method, state, plan, barrier)
        torch.testing.assert_close(barrier.lines[-1].direction, velocity / velocity.norm())
        weight = 4 / (count + 3)
        average = (1 - weight) * average + weight * following.parameters
        state = following
    torch.testing.assert_close(method.released(state), average)
    assert torch.equal(replace(method, iterates="last").released(state), state.parameters)


def test_regularisation_pulls_the_sum_of_gradients() -> None:
    method = DPAGD(momentum=0.0, regularisation=0.1)
    plan = planned(method)
    start = torch.tensor([1.0, -2.0])
    barrier = Scripted(plan, chosen=[1], gradients=[torch.tensor([3.0, 4.0])])
    method.step(method.init(start, plan), plan, barrier)  # type: ignore[arg-type]
    pulled = torch.tensor([3.0, 4.0]) + 0.1 * RECORDS * start
    torch.testing.assert_close(barrier.lines[0].direction, pulled / pulled.norm())


@pytest.mark.parametrize(
    "settings", [{"paper_budget": True, "iterations": 10}, {"sampling_rate": 0.3}, {"keep_raised": True}]
)
def test_taken_up_after_a_crash_it_ends_bit_for_bit_the_same(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    check_taken_up(DPAGD(range_every=3, **settings), tmp_path, crashes=(1, 2, 5, 9))


@pytest.mark.parametrize("name", ["logistic", "svm"])
def test_it_learns(name: str) -> None:
    method, records = DPAGD(), made_up()
    state, _, _ = run(method, planned(method, epsilon=8.0), name=name)
    weights = method.released(state).numpy()
    scores = records.features @ weights[:FEATURES] + weights[FEATURES]
    assert np.mean((scores > 0) == (records.labels == 1)) > 0.85


def test_settings_are_read_strictly_from_json() -> None:
    adapter = TypeAdapter(DPAGD)
    assert adapter.validate_json('{"steps_grid": [0, 0.5], "clip_norm": 1.5}').choices.steps_grid == (
        0.0,
        0.5,
    )
    for broken in ('{"gamma": 0}', '{"iterations": 0}', '{"steps": 3}', '{"steps_grid": [0, -1]}'):
        with pytest.raises(ValidationError):
            adapter.validate_json(broken)
