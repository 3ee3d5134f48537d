"""DP-AGD: its measurements and selections, the range of its steps, and what a run spends by an independent count."""

import json
import math
from dataclasses import replace
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from scipy import stats

from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.selection_law import distance_from_uniform
from algorithms.gradients import L2
from algorithms.methods.dp_agd import DPAGD, OURS, AGDState, Iteration, NoisySum
from algorithms.models import LossBounds
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import rdp
from algorithms.privacy.documents import StatedPlan
from algorithms.privacy.mechanisms.release import Gaussian, Gumbel, Laplace
from algorithms.privacy.mechanisms.sampling import FullBatch, Poisson, Sampling
from tests.support.descent import (
    DELTA,
    EPSILON,
    FEATURES,
    RECORDS,
    Scripted,
    made_up,
    model_of,
    planned,
    rho,
    run,
    stepped,
)
from tests.support.refusals import refused_as
from tests.support.soak import soak_but

GRADIENTS = [torch.tensor([30.0, -40.0]), torch.tensor([10.0, 5.0]), torch.tensor([-7.0, 2.0])]


def rejected(**settings: Any) -> tuple[DPAGD, Plan, Scripted, AGDState]:
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
    assert float(state.max_step) == pytest.approx(1.0)
    assert float(state.recent_steps[0]) == pytest.approx(barrier.lines[-1].steps[3])
    assert torch.equal(state.parameters, barrier.lines[-1].at(3))


def test_the_average_weighs_measurements_by_their_inverse_variances() -> None:
    one = NoisySum(torch.tensor([1.0, 5.0], dtype=torch.float64), 0.5)
    two = NoisySum(torch.tensor([4.0, -1.0], dtype=torch.float64), 0.25)
    both = one.average_with(two)
    assert both.total.tolist() == [2.0, 3.0]
    assert both.rho == 0.75
    draw = torch.Generator().manual_seed(2)
    noise = [
        torch.randn(200_000, generator=draw, dtype=torch.float64) / math.sqrt(2 * r) for r in (0.5, 0.25)
    ]
    mixed = NoisySum(noise[0], 0.5).average_with(NoisySum(noise[1], 0.25))
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
    max_steps = []
    for _ in places:
        state = stepped(method, state, plan, barrier)
        max_steps.append(float(state.max_step))
    assert max_steps[:9] == [2.0] * 9
    assert max_steps[9] == pytest.approx(1.1 * 0.5)
    assert max_steps[18] == max_steps[9]
    assert max_steps[19] == pytest.approx(1.1 * 1.1 * 0.5)


def test_the_range_never_passes_its_most() -> None:
    method = DPAGD(range_every=1, range_growth=3.0, step_range=2.0)
    plan = planned(method)
    barrier = Scripted(plan, chosen=[10, 10])
    state = method.step(method.init(torch.zeros(2), plan), plan, barrier)  # type: ignore[arg-type]
    assert state is not None and float(state.max_step) == 2.0


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


SETTINGS: list[dict[str, Any]] = [
    {},
    {"iterations": 7, "gamma": 1.0, "selection_share": 0.3},
    {"paper_budget": True},
    {"paper_budget": True, "averaging": "printed"},
    {"keep_raised": True, "momentum": 0.0, "iterates": "last", "range_shrink": 1.0},
]


CASES = [*enumerate(SETTINGS)]


@pytest.mark.parametrize(("seed", "settings"), soak_but([CASES[place] for place in (0, 1, 2, 4)], CASES))
def test_spends_at_most_its_rho_by_an_independent_sum(settings: dict[str, Any], seed: int) -> None:
    method = DPAGD(**settings)
    plan = planned(method)
    state, trace, ended = run(method, plan, seed=seed)
    spent = math.fsum(rho(event) for event in trace.events())
    assert spent <= plan.filter.rho
    assert spent > 0.95 * plan.filter.rho
    assert ended == (int(state.iterations) < plan.steps)
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
    assert int(state.iterations) == 3
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
    plan, counted = planned(method, records=None), planned(method).params(Iteration)
    law = counted.selection_law
    assert law is not None and law.distance is not None
    unknown = replace(law, gain=None, distance=None)  # the noise is the same, what it is worth is not known
    assert plan.params(Iteration) == replace(counted, selection_law=unknown)
    _, trace, _ = run(method, replace(plan, steps=3))
    assert {row.divisor for row in trace.rows} == {1.0}
    assert {row.kind for row in trace.rows} == {"gradient", "argmin"}


def test_a_plan_is_read_back_as_it_was() -> None:
    for method in (DPAGD(), DPAGD(sampling_rate=0.2), DPAGD(paper_budget=True)):
        plan = planned(method)
        written = json.loads(json.dumps(plan.to_document().to_json()))
        assert written["noise_multiplier"] is None  # 0 would say that there is no noise
        again = Plan.from_document(StatedPlan.model_validate(written))
        again.check()
        assert again == plan


ADULT = PlanningFacts(39_074, 124, 1, 2, loss=LossBounds(1.0, 0.25, 0.0), start_loss=math.log(2))
"""Four fifths of Adult."""


def law_of(epsilon: float, facts: PlanningFacts = ADULT, **settings: Any) -> dict[str, Any]:
    plan = DPAGD(**settings).plan(Target(Budget(epsilon, 1e-8)), facts)
    return plan.method_params["selection_law"]


def test_a_plan_states_how_far_its_selection_is_from_a_coin() -> None:
    law = law_of(0.1)
    # on Adult the noise has a standard deviation of 11,530, as was found apart from this code
    assert law["noise_scale"] * math.pi / math.sqrt(6) == pytest.approx(11_530, rel=1e-3)
    assert law["gain"] == pytest.approx(39_074 * 0.693147 / 45, rel=1e-5)
    odds = math.exp(law["gain"] / law["noise_scale"])
    assert law["candidates"] == 11
    assert law["distance"] == pytest.approx(odds / (odds + 10) - 1 / 11, rel=1e-9)
    assert law["distance"] < 0.01 < 0.1 < law_of(1.6)["distance"]


def test_the_stated_signal_is_what_can_be_known() -> None:
    unknown = law_of(0.1, replace(ADULT, records=None))
    assert (unknown["gain"], unknown["distance"]) == (None, None)
    assert unknown["noise_scale"] == law_of(0.1)["noise_scale"]
    assert law_of(0.1, replace(ADULT, start_loss=None))["gain"] == pytest.approx(39_074 * 3.0 / 45)
    assert law_of(0.1, loss_bound=0.5)["gain"] == pytest.approx(39_074 * 0.5 / 45)
    assert law_of(1.0, sampling_rate=0.1)["gain"] == pytest.approx(0.1 * 39_074 * math.log(2) / 45)


def test_two_candidates_are_told_apart_as_the_closed_forms_say() -> None:
    for lead in (0.0, 0.3, 2.0, 9.0):
        logistic = 1 / (1 + math.exp(-lead)) - 0.5
        difference = 0.5 - 0.5 * math.exp(-lead) * (1 + lead / 2)  # of two Laplace variables
        assert distance_from_uniform(lead, 2, Gumbel(1.0)) == pytest.approx(logistic, abs=1e-12)
        assert distance_from_uniform(lead, 2, Laplace(1.0)) == pytest.approx(difference, abs=1e-4)


@pytest.mark.parametrize("noise", [Gumbel(1.0), Laplace(1.0)])
def test_the_best_of_several_candidates_is_told_apart_as_an_integral_says(noise: Gumbel | Laplace) -> None:
    """Its noise is above that of each other one less the lead; `test_sampling` has the draws of the mechanism."""
    kind = stats.gumbel_r if isinstance(noise, Gumbel) else stats.laplace
    x = np.linspace(-40.0, 60.0, 400_001)
    for lead, candidates in ((1.5, 4), (0.2, 11), (6.0, 3)):
        share = np.trapezoid(kind.pdf(x) * kind.cdf(x + lead) ** (candidates - 1), x)
        found = distance_from_uniform(lead, candidates, noise)
        assert found == pytest.approx(share - 1 / candidates, abs=1e-4)


def test_a_plan_of_before_has_no_law_and_is_still_run() -> None:
    plan = planned(DPAGD())
    known = {name: plan.method_params[name] for name in ("gradient_rho", "selection_multiplier")}
    state, _, _ = run(DPAGD(), replace(plan, method_params=known))
    assert torch.isfinite(DPAGD().released(state)).all()


def test_a_plan_with_the_papers_budget_states_all_that_it_decides() -> None:
    printed = {
        "iterations": 60, "gamma": 0.1, "keep_raised": True, "clip_norm": 3.0, "loss_bound": 3.0, "step_range": 2.0,
        "steps_grid": [index / 20 for index in range(21)], "range_every": 10, "range_growth": 1.1,
        "range_shrink": 1.0, "momentum": 0.0, "iterates": "last", "regularisation": 0.0,
    }  # fmt: skip
    stated = planned(DPAGD(paper_budget=True)).method_params["paper_protocol"]
    assert stated == {"paper": "Lee and Kifer 2018", "settings": printed, "departures": []}
    other = planned(DPAGD(paper_budget=True, clip_norm=2.0, gamma=0.3)).method_params["paper_protocol"]
    assert other["settings"] == printed | {"clip_norm": 2.0, "gamma": 0.3}
    assert sorted(other["departures"]) == ["clip_norm", "gamma"]
    assert planned(DPAGD()).method_params["paper_protocol"] is None


@pytest.mark.parametrize(
    ("settings", "facts", "code"),
    [
        ({}, {"loss": None}, "losses_below_0"),
        ({}, {"loss": LossBounds(1.0, 1.0, -1.0)}, "losses_below_0"),
        ({"steps_grid": (0.1, 0.2)}, {}, "steps_grid"),
        ({"steps_grid": (0.0,)}, {}, "steps_grid"),
        ({"steps_grid": (0.0, 0.0, 0.5)}, {}, "steps_grid"),
        ({"regularisation": 0.1}, {"records": None}, "regularised_private_count"),
        ({"paper_budget": True, "sampling_rate": 0.1}, {}, "paper_budget_of_samples"),
        ({"averaging": "printed"}, {}, "printed_averaging"),
        ({"paper_budget": True, "iterations": 1}, {}, "iteration_above_budget"),
        ({"sampling_rate": 0.1}, {"epsilon": 1e-3}, "sampled_budget_too_small"),
        ({}, {"delta": 0.0}, "filter_needs_delta"),
        ({"sampling_rate": 0.1}, {"delta": 0.0}, "filter_needs_delta"),
        ({"paper_budget": True}, {"delta": 0.0}, "filter_needs_delta"),
        ({"sampling_rate": 0.1}, {"epsilon": math.inf}, "budget_not_spendable"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], facts: dict[str, Any], code: str) -> None:
    delta = facts.get("delta", DELTA)
    target = Target(Budget(facts.get("epsilon", EPSILON), delta), "pld" if delta else "pure")
    facts = {key: value for key, value in facts.items() if key not in ("epsilon", "delta")}
    known = {"records": RECORDS, "parameters": 7, "layers": 1, "classes": 2, "loss": model_of().bounds}
    with refused_as(code):
        DPAGD(**settings).plan(target, PlanningFacts(**(known | facts)))
