"""The budget of DP-AGD: what a run spends, by an independent count, when it ends, and what is refused."""

import json
import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch

from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.methods.dp_agd import DPAGD, OURS
from algorithms.models import LossBounds
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import rdp
from algorithms.privacy.mechanisms.release import FullBatch, Gaussian, Gumbel, Laplace, Poisson, Sampling
from tests.algorithms.descent import (
    DELTA,
    EPSILON,
    RECORDS,
    Scripted,
    model_of,
    planned,
    rho,
    run,
    stepped,
)

SETTINGS: list[dict[str, Any]] = [
    {},
    {"iterations": 7, "gamma": 1.0, "selection_share": 0.3},
    {"paper_budget": True},
    {"paper_budget": True, "averaging": "printed"},
    {"keep_raised": True, "momentum": 0.0, "iterates": "last", "range_shrink": 1.0},
]


@pytest.mark.parametrize(("seed", "settings"), [*enumerate(SETTINGS)])
def test_spends_at_most_its_rho_by_an_independent_sum(settings: dict[str, Any], seed: int) -> None:
    method = DPAGD(**settings)
    plan = planned(method)
    state, trace, ended = run(method, plan, seed=seed)
    spent = math.fsum(rho(event) for event in trace.events())
    assert spent <= plan.filter.rho
    assert spent > 0.95 * plan.filter.rho
    assert ended == (int(state.taken) < plan.steps)
    assert torch.isfinite(method.released(state)).all()


def test_the_whole_rho_is_that_of_the_target() -> None:
    order = np.linspace(1.001, 400, 400_000)
    plan = planned(DPAGD())
    conversion = np.log1p(-1 / order) - np.log(DELTA * order) / (order - 1)
    assert (order * plan.filter.rho + conversion).min() == pytest.approx(EPSILON, rel=1e-6)
    assert plan.cost.epsilon <= EPSILON


def test_where_a_selection_is_not_afforded_the_run_ends_without_a_step() -> None:
    method = DPAGD(iterations=5, gamma=0.1, selection_share=0.6)
    plan = planned(method)
    barrier = Scripted(plan, chosen=[2, 0, 0, 1, 1])
    state = method.init(torch.zeros(2), plan)
    while (following := method.step(state, plan, barrier)) is not None:  # type: ignore[arg-type]
        state = following
    # The rejections cost 1.284 of the 5 parts; after three iterations 0.716 are left, and a measurement takes 0.4.
    assert int(state.taken) == 3
    assert [release.kind for release in barrier.asked[-3:]] == ["gradient", "argmin", "gradient"]


@pytest.mark.parametrize(
    ("epsilon", "rho_all", "rho_selection", "rho_gradient", "noise", "scale"),
    [(0.1, 1.354e-4, 3.47e-7, 9.31e-9, 21_983, 3600), (1.6, 0.0333, 8.89e-5, 2.38e-6, 1374, 225)],
)
def test_the_papers_budget_has_the_papers_numbers(
    epsilon: float, rho_all: float, rho_selection: float, rho_gradient: float, noise: float, scale: float
) -> None:
    method = DPAGD(paper_budget=True)
    plan = planned(method, epsilon=epsilon, delta=1e-8)
    barrier = Scripted(plan, chosen=[1])
    assert plan.filter.rho == pytest.approx(rho_all, rel=2e-3)
    assert plan.cost.epsilon < epsilon
    method.step(method.init(torch.zeros(2), plan), plan, barrier)  # type: ignore[arg-type]
    gradient, selection = barrier.asked
    assert isinstance(gradient.noise, Gaussian) and isinstance(selection.noise, Laplace)
    assert gradient.clipping == L2(3.0)
    assert rho(gradient.event()) == pytest.approx(rho_gradient, rel=2e-3)
    assert rho(selection.event()) == pytest.approx(rho_selection, rel=2e-3)
    assert gradient.noise_scale == pytest.approx(noise, rel=1e-3)
    assert selection.noise_scale == pytest.approx(scale, rel=1e-3)
    assert barrier.lines[0].steps == pytest.approx([0.1 * index for index in range(21)])
    assert 364 <= plan.steps <= 380


def test_by_default_a_selection_has_gumbel_noise_and_a_small_share() -> None:
    method = DPAGD()
    plan = planned(method)
    barrier = Scripted(plan, chosen=[1])
    method.step(method.init(torch.zeros(2), plan), plan, barrier)  # type: ignore[arg-type]
    gradient, selection = (release.event() for release in barrier.asked)
    assert isinstance(barrier.asked[1].noise, Gumbel)
    assert rho(selection) / (rho(gradient) + rho(selection)) == pytest.approx(0.003)
    assert rho(gradient) + rho(selection) == pytest.approx(plan.filter.rho / OURS.iterations, rel=1e-6)


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_a_sampled_run_stays_within_the_budget_of_an_order_fixed_in_advance(rate: float) -> None:
    method = DPAGD(sampling_rate=rate, iterations=12)
    plan = planned(method)
    order = float(plan.filter.order)
    _, trace, _ = run(method, plan)
    cost = math.fsum(float(rdp([(event, 1)], orders=(order,))[0]) for event in trace.events())
    left = EPSILON - math.log1p(-1 / order) + math.log(DELTA * order) / (order - 1)
    assert 0.5 * left < cost <= left
    assert {(row.sampling, row.sampling_rate) for row in trace.rows} == {("poisson", rate)}
    assert {row.kind for row in trace.rows} == {"gradient", "argmin"}


def test_the_order_of_a_sampled_run_leaves_the_least_noise() -> None:
    plan = planned(DPAGD(sampling_rate=0.05, iterations=12))
    chosen, precision = plan.filter.order, plan.method_params["gradient_rho"]
    for order in (chosen - 1, chosen + 1):
        limit = EPSILON - math.log1p(-1 / order) + math.log(DELTA * order) / (order - 1)
        event = dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(1 / math.sqrt(2 * precision)))
        assert float(rdp([(event, 12)], orders=(float(order),))[0]) > (1 - 0.003) * limit * (1 - 1e-3)


@pytest.mark.parametrize(("rate", "sampling"), [(None, FullBatch()), (0.1, Poisson(0.1))])
def test_without_a_rejection_all_planned_iterations_fit(rate: float | None, sampling: Sampling) -> None:
    method = DPAGD(sampling_rate=rate, iterations=9)
    plan = planned(method)
    barrier = Scripted(plan, chosen=[1] * 9)
    state = method.init(torch.zeros(2), plan)
    for _ in range(9):
        state = stepped(method, state, plan, barrier)
    assert plan.steps == 9
    assert method.step(state, plan, barrier) is None  # type: ignore[arg-type]
    assert [release.sampling for release in barrier.asked] == [sampling] * 18


def test_a_private_number_of_records_is_not_asked_for() -> None:
    method = DPAGD()
    plan = planned(method, records=None)
    assert plan.method_params == planned(method).method_params
    _, trace, _ = run(method, plan)
    assert {row.divisor for row in trace.rows} == {1.0}
    assert {row.kind for row in trace.rows} == {"gradient", "argmin"}


def test_a_plan_is_read_back_as_it_was() -> None:
    for method in (DPAGD(), DPAGD(sampling_rate=0.2), DPAGD(paper_budget=True)):
        plan = planned(method)
        written = json.loads(json.dumps(plan.to_json()))
        assert written["noise_multiplier"] is None  # 0 would say that there is no noise
        again = Plan.from_json(written)
        again.check()
        assert again == plan


@pytest.mark.parametrize(
    ("settings", "public", "sentence"),
    [
        ({}, {"loss": None}, "losses from 0 up"),
        ({}, {"loss": LossBounds(1.0, 1.0, -1.0)}, "losses from 0 up"),
        ({"steps_grid": (0.1, 0.2)}, {}, "must be 0"),
        ({"steps_grid": (0.0,)}, {}, "must be 0"),
        ({"steps_grid": (0.0, 0.0, 0.5)}, {}, "must be 0"),
        ({"regularisation": 0.1}, {"records": None}, "regularisation"),
        ({"paper_budget": True, "sampling_rate": 0.1}, {}, "not valid for samples"),
        ({"averaging": "printed"}, {}, "printed"),
        ({"paper_budget": True, "iterations": 1}, {}, "iterations"),
        ({"sampling_rate": 0.1}, {"epsilon": 1e-3}, "too small"),
        ({}, {"delta": 0.0}, "delta"),
        ({"paper_budget": True}, {"delta": 0.0}, "delta"),
        ({"sampling_rate": 0.1}, {"epsilon": math.inf}, "finite epsilon"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(
    settings: dict[str, Any], public: dict[str, Any], sentence: str
) -> None:
    delta = public.get("delta", DELTA)
    target = Target(Budget(public.get("epsilon", EPSILON), delta), "pld" if delta else "pure")
    public = {key: value for key, value in public.items() if key not in ("epsilon", "delta")}
    known = {"records": RECORDS, "parameters": 7, "layers": 1, "classes": 2, "loss": model_of().bounds}
    with pytest.raises(RefusedError, match=sentence):
        DPAGD(**settings).plan(target, PublicInfo(**(known | public)))
