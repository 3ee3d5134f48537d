"""DP-SGD and its relatives: bounds on a gradient, noise by epochs and by steps, adaptive steps and clip norms."""

import math
from dataclasses import replace
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.core.method import Algorithm
from algorithms.core.minibatch import multiplier_at, noise_factors
from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.gradients import L2, Normalised, PerLayer
from algorithms.methods.adaptive_clipping import QuantileClipping
from algorithms.methods.dp_sgd import DPSGD
from algorithms.methods.noise_schedules import ADPSGD, Decay, DPSGDDecay, square_without_noise
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import epsilon
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.accounting.noise_search import in_levels
from algorithms.privacy.mechanisms.release import Release
from tests.support import bench
from tests.support.bench import made_up, run, small_model
from tests.support.refusals import refused_as
from tests.support.unaccounted import plan_with, with_equal_steps, with_schedule

TARGET = Target(Budget(0.3, 1e-5))
TWO_LAYERS = PlanningFacts(1000, 10, 2, 2)
RELATIVES = ["dp_sgd", "dp_sgd_decay", "quantile_clipping", "adaclip", "adp_sgd"]


class Asked:
    """A stand-in for the barrier that keeps what it was asked, and answers 0."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def gradient(self, parameters: torch.Tensor, **settings: Any) -> torch.Tensor:
        self.settings = settings
        return torch.zeros_like(parameters)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"clip_norm": 3.0}, L2(3.0)),
        ({"clip_norm": 3.0, "clipping": "per_layer"}, PerLayer((3.0 / 2**0.5,) * 2)),
        ({"clip_norm": 3.0, "clipping": "normalised"}, Normalised(3.0, 0.01)),
        ({"clip_norm": 3.0, "clipping": "normalised", "stability": 0.5}, Normalised(3.0, 0.5)),
    ],
)
def test_the_bound_is_the_one_that_was_asked_for(settings: dict[str, Any], expected: Any) -> None:
    method, barrier = DPSGD(2, 10, **settings), Asked()
    plan = replace(plan_with(1.0, steps=2), facts=TWO_LAYERS)
    method.step(method.init(torch.zeros(10), plan), plan, barrier)  # type: ignore[arg-type]
    assert barrier.settings["clipping"] == expected


def test_a_run_with_normalised_gradients_takes_steps_of_their_scale() -> None:
    model = small_model("softmax")
    found = {}
    for clip_norm in (1.0, 10.0):
        method = DPSGD(1, 40, clip_norm=clip_norm, clipping="normalised", stability=0.0)
        plan = with_equal_steps(plan_with(0.5, steps=1, batch=40, records=40))
        found[clip_norm] = run(method, plan, made_up(), model).answers[0]
    torch.testing.assert_close(found[10.0], 10.0 * found[1.0], rtol=1e-4, atol=1e-6)


def planned(name: str, epsilon: float, *, records: int | None = 40, **settings: Any) -> Plan:
    method: Algorithm[Any] = bench.algorithm(name, **settings)
    return method.plan(Target(Budget(epsilon, 1e-5)), PlanningFacts(records, 10, 1, 2))


@pytest.mark.parametrize("name", RELATIVES)
def test_where_the_number_of_records_is_private_it_is_counted_first(name: str) -> None:
    plan = planned(name, 0.5, records=None, expected_batch_size=None, sampling_rate=0.1)
    first, rest = plan.schedule[0], plan.schedule[1:]
    assert (type(first[0]).__name__, first[1], plan.divisor) == ("GaussianDpEvent", 1, None)
    assert {type(event).__name__ for event, _ in rest} == {"PoissonSampledDpEvent"}
    alone = epsilon([(dp.GaussianDpEvent(100.0), 1)], 1e-5)  # of the count of records
    spent = {"setting": "target.count_noise", "alone": alone, "epsilon": 0.005}
    first_spent = (
        ("counts_above_target", {}) if name == "quantile_clipping" else ("budget_spent_before_steps", spent)
    )
    with refused_as(first_spent[0], **first_spent[1]):
        planned(name, 0.005, records=None, expected_batch_size=None, sampling_rate=0.1)
    with refused_as("rate_missing"):
        planned(name, 2.0, records=None)


FACTS = PlanningFacts(1000, 10, 1, 2)


@pytest.mark.parametrize(
    ("form", "settings", "expected"),
    [
        ("exponential", {"rate": 0.1}, [math.exp(-0.1 * e) for e in range(4)]),
        ("time", {"rate": 0.5}, [1 / (1 + 0.5 * e) for e in range(4)]),
        ("step", {"rate": 0.4, "period": 2}, [1.0, 1.0, 0.6, 0.6]),
        ("polynomial", {"power": 2.0, "end": 0.2}, [0.2 + 0.8 * (1 - e / 4) ** 2 for e in range(4)]),
    ],
)
def test_the_share_of_an_epoch_follows_its_formula(
    form: Any, settings: dict[str, Any], expected: list[float]
) -> None:
    found = DPSGDDecay(40, 100, form=form, **settings).shares(0.1)
    assert found.tolist() == pytest.approx(np.repeat(expected, 10).tolist(), rel=1e-12)


def test_an_epoch_begins_after_as_many_steps_as_its_batches_need() -> None:
    shares = DPSGDDecay(25, 64, rate=0.5).shares(0.3)
    assert np.flatnonzero(np.diff(shares)).tolist() == [3, 6, 9, 13, 16, 19, 23]


@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_the_whole_schedule_costs_the_target(rate: float) -> None:
    plan = DPSGDDecay(30, 100, rate=rate).plan(TARGET, FACTS)
    assert 0.298 < plan.cost.epsilon <= 0.3
    constant = DPSGD(30, 100).plan(TARGET, FACTS).noise_multiplier
    if rate == 0.0:
        assert plan.noise_multiplier == constant
    else:
        assert plan.noise_multiplier * math.exp(-2 * rate) < constant < plan.noise_multiplier


def test_each_release_has_the_noise_of_its_epoch() -> None:
    model, method = small_model("softmax"), DPSGDDecay(12, 10, rate=0.3)
    plan = with_schedule(plan_with(1.4, steps=12, batch=10, records=40, weights=method.shares(0.25)))
    rows = run(method, plan, made_up(), model).trace.rows
    expected = [plan.noise_multiplier * math.exp(-0.3 * (t // 4)) for t in range(12)]
    assert [row.noise_multiplier for row in rows] == pytest.approx(expected, rel=1e-12)
    assert [row.noise_std for row in rows] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("steps", [1, 5, 24, 25, 5000])
def test_a_course_has_few_levels_near_its_weights(steps: int) -> None:
    weights = (20.0 + np.arange(steps)) ** 0.25
    values, counts = in_levels(weights)
    assert min(steps, 23) <= len(values) == len(counts) <= 24
    assert counts.sum() == steps
    assert counts.min() >= 1
    found = np.repeat(values, counts)
    if steps <= 24:
        np.testing.assert_allclose(found, weights, rtol=1e-12)
    assert np.abs(np.log(found / weights)).max() < 0.1


def test_a_course_that_jumps_at_its_end_keeps_its_levels_where_the_steps_are() -> None:
    weights = (1.0 - (1.0 - 1e-9) * np.sqrt(np.arange(2000) / 2000)) ** -0.5
    values, counts = in_levels(weights)
    errors = np.log(np.repeat(values, counts) / weights)
    assert np.quantile(np.abs(errors), 0.99) < 0.15
    assert len(values) <= 24


STEEP = Decay(offset=1.0)


class Slope:
    """A stand-in for the barrier whose gradient is 1 everywhere."""

    def gradient(self, parameters: Tensor, **_settings: Any) -> Tensor:
        return torch.ones_like(parameters)


def by_hand(method: ADPSGD) -> Plan:
    """A plan with the allocation that the method's own has, for a noise multiplier of 1."""
    weights = noise_factors(method.decay.factors(method.steps), method.allocation)
    return plan_with(1.0, steps=method.steps, weights=weights)


def path(method: ADPSGD) -> list[float]:
    """The first coordinate after each step along a gradient of ones."""
    plan = by_hand(method)
    state, found = method.init(torch.zeros(10), plan), []
    for _ in range(plan.steps):
        state = method.step(state, plan, Slope())  # type: ignore[arg-type]
        found.append(float(state.parameters[0]))
    return found


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (Decay(), [(20 + t) ** -0.5 for t in range(8)]),
        (Decay(offset=2.0, rate=0.1), [(2 + 0.1 * t) ** -0.5 for t in range(8)]),
        (Decay("linear_in_sqrt", end=0.2), [1 - 0.8 * math.sqrt(t / 8) for t in range(8)]),
        (Decay("constant"), [1.0] * 8),
        (Decay("adaptive", noise_growth=0.5), [(20 + 0.5 * t) ** -0.5 for t in range(8)]),
    ],
)
def test_steps_become_shorter_by_their_formula(decay: Decay, expected: list[float]) -> None:
    assert decay.factors(8).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_sums_of_the_paper_s_steps() -> None:
    assert Decay().factors(11760).sum() == pytest.approx(208.23, abs=0.005)
    assert 0.1 * Decay("linear_in_sqrt", end=1e-9).factors(11760).sum() == pytest.approx(392.05, abs=0.005)


def test_reversed_noise_is_the_matched_one_in_reverse_order() -> None:
    factors = Decay().factors(5)
    reverse = noise_factors(factors, "reversed")
    assert reverse.tolist() == noise_factors(factors, "matched").tolist()[::-1]
    assert np.mean(1 / reverse**2) == pytest.approx(1.0) and (np.diff(reverse) < 0).all()
    update = OptimizerConfig(1.0)
    method = ADPSGD(5, 10, allocation="reversed", update=update)
    multipliers = [event.event.noise_multiplier for event, _ in method.plan(TARGET, FACTS).schedule]
    assert multipliers == sorted(multipliers, reverse=True) and len(multipliers) == 5


def test_matched_noise_is_the_reference_value() -> None:
    found = noise_factors(Decay().factors(4), "matched") ** 2
    expected = [0.9654668676086098, 0.9893091458550657, 1.0125901933630301, 1.0353478706780044]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert np.mean(1.0 / found) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("decay", [STEEP, Decay("linear_in_sqrt"), Decay("adaptive", noise_growth=5.0)])
def test_the_noise_s_variance_times_the_step_is_the_same_at_each_step(decay: Decay) -> None:
    plan = by_hand(ADPSGD(20, 100, decay=decay))
    found = np.square([multiplier_at(plan, t) for t in range(20)]) * decay.factors(20)
    np.testing.assert_allclose(found, found[0], rtol=1e-9)


def test_of_all_courses_with_its_cost_in_precision_it_adds_the_least_noise() -> None:
    factors = STEEP.factors(11700)
    added = {}
    for kind in ("matched", "constant"):
        alphas = noise_factors(factors, kind)  # type: ignore[arg-type]
        assert np.mean(alphas**-2.0) == pytest.approx(1.0)
        added[kind] = float(np.sum((alphas * factors) ** 2))
    moved = noise_factors(factors, "matched") * np.exp(0.1 * np.sin(np.arange(11700)))
    moved *= math.sqrt(np.mean(moved**-2.0))
    assert added["matched"] < float(np.sum((moved * factors) ** 2))
    assert added["matched"] < added["constant"]


def test_both_allocations_meet_the_same_epsilon() -> None:
    plans = [
        ADPSGD(6, 100, decay=STEEP, allocation=kind).plan(TARGET, FACTS) for kind in ("matched", "constant")
    ]  # type: ignore[arg-type]
    for plan in plans:
        assert 0.298 < plan.cost.epsilon <= 0.3
    assert plans[1].noise_multiplier == DPSGD(6, 100).plan(TARGET, FACTS).noise_multiplier
    assert plans[0].noise_multiplier > plans[1].noise_multiplier  # early steps of little noise cost more


def test_each_release_has_the_noise_of_its_step() -> None:
    model, method = small_model("softmax"), ADPSGD(6, 10, decay=STEEP)
    weights = noise_factors(STEEP.factors(6), "matched")
    plan = with_schedule(plan_with(1.4, steps=6, batch=10, records=40, weights=weights))
    rows = run(method, plan, made_up(), model).trace.rows
    assert [row.noise_multiplier for row in rows] == pytest.approx((1.4 * weights).tolist(), rel=1e-9)
    assert [row["steps"] for row in plan.method_params["noise"]] == [1] * 6


def test_momentum_goes_over_the_shortened_steps() -> None:
    method = ADPSGD(3, 100, decay=STEEP, update=OptimizerConfig(1.0, momentum=0.5))
    expected = np.cumsum(STEEP.factors(3) * np.array([1.0, 1.5, 1.75]))
    assert path(method) == pytest.approx((-expected).tolist(), rel=1e-5)


def test_the_adaptive_step_size_follows_its_formula() -> None:
    decay = Decay("adaptive", beta=4.0, period=3)
    method = ADPSGD(5, 100, clip_norm=2.0, decay=decay)
    squared, where, expected = 20.0, 0.0, []
    for t in range(5):
        left = 10.0 - 10 * (multiplier_at(by_hand(method), t) * 2.0 / 100) ** 2
        squared += max([4.0, 2.0, 4 / 3][t % 3] * left, 1e-5)
        where -= squared**-0.5
        expected.append(where)
    assert path(method) == pytest.approx(expected, rel=1e-5)


def test_under_noise_alone_the_adaptive_step_size_sees_no_gradient() -> None:
    torch.manual_seed(4)
    d, noise, draws = 400, 0.7, 4000
    found = [square_without_noise(noise * torch.randn(d), noise) for _ in range(draws)]
    error = noise**2 * math.sqrt(2 * d / draws)
    assert abs(np.mean(found)) < 5 * error  # as printed it would be d noise^2, 196, or 440 of these errors
    decay = Decay("adaptive")
    assert decay.growth(-1.0, 0) == decay.growth(0.0, 7) == 1e-5


@pytest.mark.parametrize(
    ("method", "code"),
    [
        (DPSGDDecay(500, 100, rate=0.5), "noise_falls_too_far"),
        (ADPSGD(10, 100, decay=Decay("linear_in_sqrt", end=-0.5)), "step_size_not_finite"),
        (ADPSGD(5, 100, decay=Decay(offset=0.0)), "step_size_not_finite"),
        (ADPSGD(5, 100, decay=Decay("adaptive", offset=0.0)), "step_size_not_finite"),
        (
            ADPSGD(5, 100, update=OptimizerConfig(schedule="linear")),
            "schedule_given_twice",
        ),
    ],
)
def test_decays_that_end_in_nothing_and_second_schedules_are_refused(
    method: Algorithm[Any], code: str
) -> None:
    with refused_as(code):
        method.plan(TARGET, FACTS)


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
    assert method.next_clip_norm(1.0, 0.8) == pytest.approx(math.exp(-0.2 * 0.5), rel=1e-12)
    assert method.next_clip_norm(1.0, -5.0) == pytest.approx(math.exp(0.2 * 0.3), rel=1e-12)
    assert method.next_clip_norm(1.99, 0.0) == 2.0
    assert method.next_clip_norm(0.5, 1.0) == 0.5


def test_both_releases_fit_the_target_together() -> None:
    plan = QuantileClipping(3, 100).plan(TARGET, FACTS)
    counted = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(10.0))  # a twentieth of the batch over 1/2
    noised = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(plan.noise_multiplier))
    assert plan.schedule == [(noised, 1), (counted, 1)] * 3
    assert 0.298 < plan.cost.epsilon <= 0.3
    assert plan.noise_multiplier > DPSGD(3, 100).plan(TARGET, FACTS).noise_multiplier


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
    ("settings", "records", "code"),
    [
        ({"expected_batch_size": 10, "clip_norm": 2.0, "max_clip_norm": 1.0}, 1000, "clip_norm_outside"),
        ({"sampling_rate": 0.1}, None, "count_noise_missing"),
        ({"expected_batch_size": 500, "count_noise_multiplier": 0.5}, 1000, "counts_above_target"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], records: int | None, code: str) -> None:
    with refused_as(code):
        QuantileClipping(2, **settings).plan(TARGET, PlanningFacts(records, 10, 1, 2))


@pytest.mark.parametrize("target", [0.001, 0.01])
def test_counts_that_cost_the_target_are_refused_with_noise_that_leaves_the_gradients_a_part(
    target: float,
) -> None:
    method, facts = QuantileClipping(2000, 256), PlanningFacts(50_000, 10, 1, 2)
    counted = dp.PoissonSampledDpEvent(256 / 50_000, dp.GaussianDpEvent(25.6))
    with refused_as("counts_above_target", noise=25.6, epsilon=target) as refusal:
        method.plan(Target(Budget(target, 1e-5)), facts)
    assert refusal.value.fields["alone"] == epsilon([(counted, 2000)], 1e-5)
    enough = float(refusal.value.fields["enough"])  # type: ignore[arg-type]
    plan = replace(method, count_noise_multiplier=enough).plan(Target(Budget(target, 1e-5)), facts)
    assert 0.999 * target < plan.cost.epsilon <= target
    assert 0 < plan.noise_multiplier < 2 * enough


def test_a_long_schedule_of_two_releases_in_turn_is_planned_from_these_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each of some twenty evaluations makes and writes two events a step."""
    made, event = list[Release](), Release.event

    def counting(self: Release) -> dp.DpEvent:
        made.append(self)
        return event(self)

    monkeypatch.setattr(Release, "event", counting)
    plan = QuantileClipping(3000, 256).plan(Target(Budget(1.0, 1e-5)), PlanningFacts(50_000, 10, 1, 2))
    assert len(made) < 100
    assert len(plan.schedule) == 6000 and len({repr(event) for event, _ in plan.schedule}) == 2
    grouped: Schedule = [(plan.schedule[0][0], 3000), (plan.schedule[1][0], 3000)]
    assert plan.cost.epsilon == epsilon(grouped, 1e-5)
