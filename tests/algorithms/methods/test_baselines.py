"""What others are compared with: DP-GD, SGD without clipping, the majority class, and the older analyses of SGD."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import dp_accounting as dp
import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor

from algorithms.core.facts_of_models import intercepts_of
from algorithms.core.method import Algorithm
from algorithms.core.minibatch import DPSGDState, multiplier_at
from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import Inputs, PlanningFacts
from algorithms.methods.baselines import Majority, log_odds
from algorithms.methods.dp_sgd import DPGD, DPSGD, SGDMA, NormBoundSGD, SGDAdv, steps_for
from algorithms.models import Model, build
from algorithms.models.cells import behind_cells
from algorithms.privacy.accounting import Budget
from tests.support import bench
from tests.support.bench import MadeUp, Outcome, made_up, run, small_model
from tests.support.refusals import refused_as

LOGISTIC = small_model("logistic", classes=2)
LONGEST = math.sqrt(17.0)
TARGET = Target(Budget(1.0, 1e-8))
QUIET = 1e-5


def facts(records: int | None, model: Model = LOGISTIC, **changes: Any) -> PlanningFacts:
    """What is public of records of norm up to 4, the bias's 1 not counted."""
    known = PlanningFacts(
        records,
        model.parameter_count,
        1,
        2,
        inputs=Inputs(17.0, LONGEST),
        loss=model.bounds,
        intercepts=intercepts_of(model, changes.get("classes", 2)),
    )
    return replace(known, **changes)


def quiet(plan: Plan) -> Plan:
    """The plan with so little noise that it is far below what is measured."""

    def event(planned: dp.DpEvent) -> dp.DpEvent:
        if isinstance(planned, dp.PoissonSampledDpEvent):
            return attrs.evolve(planned, event=event(planned.event))
        return attrs.evolve(planned, noise_multiplier=QUIET)

    schedule = [(event(planned), count) for planned, count in plan.schedule]
    return replace(plan, noise_multiplier=QUIET, schedule=schedule)


def within(records: MadeUp, longest: float = 4.0) -> MadeUp:
    norms = np.linalg.norm(records.features.reshape(len(records.labels), -1), axis=1)
    return MadeUp(
        records.features * np.minimum(1, longest / norms)[:, None, None, None].astype(np.float32),
        records.labels,
    )


def gradients(parameters: Tensor, records: MadeUp) -> Tensor:
    """Of each record's loss of the logistic model, shape [n, d]."""
    rows = torch.from_numpy(records.features).flatten(1)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
    slopes = torch.sigmoid(rows @ parameters) - torch.from_numpy(records.labels)
    return slopes[:, None] * rows


def clipped(rows: Tensor, clip_norm: float) -> Tensor:
    scales: Tensor = clip_norm / rows.norm(dim=1).clamp(min=clip_norm)
    return rows * scales[:, None]


# DP-GD


@pytest.mark.parametrize(
    ("epsilon", "steps"),
    [(1e-6, 10), (0.05, 34), (0.1, 47), (0.2, 67), (0.4, 95), (0.8, 134), (1.6, 190), (math.inf, 1000)],
)
def test_the_steps_of_dp_gd_follow_from_epsilon(epsilon: float, steps: int) -> None:
    assert steps_for(epsilon) == steps
    assert DPGD().plan(TARGET, facts(50)).schedule[0][1] == 150
    assert DPGD(steps=7).plan(TARGET, facts(50)).schedule[0][1] == 7


@pytest.mark.parametrize("epsilon", [0.05, 1.6])
def test_the_noise_of_dp_gd_is_that_of_one_gaussian_release(epsilon: float) -> None:
    """All steps together are mu-GDP with mu = sqrt(T) / z (Dong, Roth and Su 2022)."""
    plan = DPGD().plan(Target(Budget(epsilon, 1e-8)), facts(50))
    least = math.sqrt(plan.steps) / greatest_mu(epsilon)
    assert least <= plan.noise_multiplier <= 1.002 * least


def greatest_mu(epsilon: float) -> float:
    """The mu whose delta at epsilon is 1e-8."""

    def excess(mu: float) -> float:
        return float(
            norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2) - 1e-8
        )

    return float(brentq(excess, 1e-4, 10.0))


MATCHED = DPGD(steps=6, clip_norm=0.8, allocation="matched")


@pytest.mark.parametrize("epsilon", [0.05, 1.6])
def test_matched_noise_of_dp_gd_is_charged_as_gaussian_releases_of_different_noise(epsilon: float) -> None:
    """They are mu-GDP with mu^2 the sum of 1 / z_t^2, and z_t^2 goes with 1 / (1 - t / T)."""
    plan = MATCHED.plan(Target(Budget(epsilon, 1e-8)), facts(50))
    noises = np.array([multiplier_at(plan, step) for step in range(6)])
    events = [event.noise_multiplier for event, count in plan.schedule for _ in range(count)]
    assert events == pytest.approx(noises.tolist())
    spent = math.sqrt(np.sum(1.0 / noises**2))
    assert 0.998 * greatest_mu(epsilon) <= spent <= greatest_mu(epsilon)
    assert noises**2 * (1 - np.arange(6) / 6) == pytest.approx(noises[0] ** 2)


def test_each_step_of_matched_dp_gd_has_the_noise_that_its_plan_charges() -> None:
    plan = MATCHED.plan(TARGET, facts(50))
    found = run(MATCHED, plan, made_up(50, classes=2), LOGISTIC)
    noises = [row.noise_multiplier for row in found.trace.rows]
    assert noises == pytest.approx([multiplier_at(plan, step) for step in range(6)])


def test_a_noise_limit_is_refused_for_matched_noise() -> None:
    limited = OptimizerConfig(1.25, schedule="linear", noise_limit=0.7)
    with refused_as("noise_limit_unbounding"):
        replace(MATCHED, update=limited).plan(TARGET, facts(50))


def test_dp_gd_is_descent_on_all_clipped_gradients_with_momentum() -> None:
    method, records = DPGD(steps=6, clip_norm=0.8), made_up(50, classes=2)
    found = run(method, quiet(method.plan(TARGET, facts(50))), records, LOGISTIC)
    point, velocity = torch.zeros(17), torch.zeros(17)
    for step in range(6):
        velocity = 0.8 * velocity + clipped(gradients(point, records), 0.8).mean(dim=0)
        point = point - 1.25 * (1 - step / 6) * velocity
    torch.testing.assert_close(found.released, point, rtol=0, atol=1e-5)
    assert {row.sampling for row in found.trace.rows} == {"full batch"}


def test_dp_gd_divides_by_a_released_count_where_the_number_is_private(tmp_path: Path) -> None:
    method = DPGD(steps=4)
    plan = method.plan(Target(Budget(2.0, 1e-3), count_noise=3.0), facts(None))
    assert plan.divisor is None
    records = partial(made_up, 50, classes=2)
    state, trace, _ = bench.trained(method, plan, LOGISTIC, tmp_path, records=records)
    assert [row.kind for row in trace.rows] == ["total"] + ["gradient"] * 4
    assert trace.rows[0].noise_multiplier == 3.0
    assert isinstance(state, DPSGDState)
    assert {row.divisor for row in trace.rows[1:]} == {float(state.divisor)}
    assert 0 < abs(float(state.divisor) - 50) < 6 * 3.0


# SGD without clipping


def test_norm_bound_sgd_takes_its_sensitivity_from_the_data_card() -> None:
    plan = NormBoundSGD(steps=3, expected_batch_size=20).plan(TARGET, facts(50))
    clips = DPSGD(steps=3, expected_batch_size=20, clip_norm=1.0).plan(TARGET, facts(50))
    assert plan.schedule == clips.schedule
    records = made_up(50, classes=2)
    rows = run(NormBoundSGD(steps=3, expected_batch_size=20), plan, records, LOGISTIC).trace.rows
    assert {row.clip_norm for row in rows} == {LONGEST}
    assert rows[0].noise_std == pytest.approx(plan.noise_multiplier * LONGEST, rel=1e-3)


def test_norm_bound_sgd_changes_no_gradient_within_the_bound() -> None:
    method = NormBoundSGD(steps=1, expected_batch_size=50, update=OptimizerConfig(1.0))
    records = within(made_up(50, classes=2))
    found = run(method, quiet(method.plan(TARGET, facts(50))), records, LOGISTIC)
    rows = gradients(torch.zeros(17), records)
    assert float(rows.norm(dim=1).max()) > 1.5  # a usual bound would have changed it
    torch.testing.assert_close(found.released, -rows.mean(dim=0), rtol=0, atol=1e-5)


def test_norm_bound_sgd_holds_a_record_beyond_the_bound_to_it() -> None:
    method = NormBoundSGD(steps=1, expected_batch_size=1, update=OptimizerConfig(1.0))
    far = MadeUp(np.full((1, 1, 4, 4), 1e3, np.float32), np.ones(1, np.int64))
    found = run(method, quiet(method.plan(TARGET, facts(1))), far, LOGISTIC)
    assert float(found.released.norm()) == pytest.approx(LONGEST, abs=1e-3)


def majority(model: Model, labels: list[int], *, classes: int = 2, noised: bool = False) -> Outcome:
    records = MadeUp(np.ones((len(labels), 1, 4, 4), np.float32), np.array(labels))
    plan = Majority().plan(TARGET, facts(len(labels), model, classes=classes))
    return run(Majority(), plan if noised else quiet(plan), records, model)


@pytest.mark.parametrize("name", ["logistic", "svm"])
@pytest.mark.parametrize(("ones", "zeros"), [(30, 10), (10, 30)])
def test_the_majority_class_of_two_is_a_bias(name: str, ones: int, zeros: int) -> None:
    released = majority(small_model(name, classes=2), [1] * ones + [0] * zeros).released
    assert not released[:-1].any()
    assert float(released[-1]) == pytest.approx(math.log(ones / zeros), abs=1e-4)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_majority_class_of_a_softmax_has_the_frequencies_for_probabilities(classes: int) -> None:
    model = build("softmax", input_shape=(1, 4, 4), classes=classes, seed=1)
    counts = [20, 70, 10][:classes]
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    released = majority(model, labels, classes=classes).released
    outputs = model.outputs(model.by_name(released), torch.randn(5, 1, 4, 4))
    expected = torch.tensor(counts) / sum(counts)
    torch.testing.assert_close(outputs.softmax(dim=1), expected.expand(5, -1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_majority_class_of_a_table_is_in_the_cell_that_all_rows_share(classes: int) -> None:
    """Also where the plan was written to disk, as between two stages."""
    additive = build("additive", input_shape=(6,), classes=classes, seed=0)
    model = behind_cells(additive, (2, 3, 1), (0.6, 0.7, 0.3873))
    counts = [20, 70, 10][:classes]
    rows = np.tile(np.array([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]], np.float32), (50, 1))[: sum(counts)]
    records = MadeUp(rows, np.repeat(np.arange(classes), counts))
    plan = Majority().plan(TARGET, facts(len(rows), model, classes=classes))
    written = Plan.from_document(plan.to_document())
    released = run(Majority(), quiet(written), records, model).released
    outputs = model.outputs(model.by_name(released), torch.from_numpy(rows[:2]))
    logits = torch.cat([torch.zeros_like(outputs), outputs], dim=1) if classes == 2 else outputs
    expected = torch.tensor(counts) / sum(counts)
    torch.testing.assert_close(logits.softmax(dim=1), expected.expand(2, -1), atol=1e-3, rtol=0)


def test_counts_that_noise_made_negative_give_a_bounded_bias() -> None:
    assert log_odds(torch.tensor([-50.0, 1e9]), 4.0).tolist() == [10.0]
    assert log_odds(torch.tensor([1e9, -50.0]), 4.0).tolist() == [-10.0]
    three = log_odds(torch.tensor([-1.0, 0.5, 1e30]), 4.0)
    assert three.tolist() == [-10.0, -10.0, 10.0]


@pytest.mark.parametrize("classes", [2, 5, 26])
def test_the_frequencies_of_rare_classes_are_nearer_than_by_counts_cut_off_at_one(classes: int) -> None:
    """In nats that they lose to the exact ones, of 500 records of which each class but one has 1 %."""
    draw, noise = np.random.default_rng(0), 3.73
    shares = np.r_[1.0 - 0.01 * (classes - 1), np.full(classes - 1, 0.01)]
    lost = []
    for _ in range(200):
        noisy = torch.from_numpy(500 * shares + draw.normal(0, noise, classes))
        biases = log_odds(noisy, noise)
        said = torch.cat([torch.zeros(1), biases]) if classes == 2 else biases
        cut_off = noisy.clamp(min=1.0).log()
        for logits in (said.double(), cut_off):
            lost.append(float((shares * (np.log(shares) - logits.log_softmax(0).numpy())).sum()))
    ours, before = np.reshape(lost, (200, 2)).mean(axis=0)
    assert ours < 0.75 * before


def test_a_record_changes_one_count_by_one() -> None:
    found = majority(LOGISTIC, [1] * 30 + [0] * 10, noised=True)
    more = majority(LOGISTIC, [1] * 30 + [0] * 11, noised=True)
    torch.testing.assert_close(
        more.answers[0] - found.answers[0], torch.tensor([1.0, 0.0], dtype=torch.float64), atol=1e-3, rtol=0
    )
    row = found.trace.rows[0]
    assert (row.kind, row.clip_norm) == ("total", 1.0)
    assert 5 < row.noise_std < 6  # epsilon 1 at delta 1e-8


@pytest.mark.parametrize(
    ("epsilon", "steps", "noise_multiplier"),
    [(0.05, 4, 67.48022113), (0.4, 31, 24.61494784), (1.6, 125, 12.72970658)],
)
def test_sgd_adv_has_the_noise_of_its_formula_on_adult(
    epsilon: float, steps: int, noise_multiplier: float
) -> None:
    """The numbers are the formula of Lee and Kifer's code, worked out apart from this package."""
    plan = SGDAdv().plan(Target(Budget(epsilon, 1e-8)), facts(39_073))
    assert (plan.steps, plan.divisor) == (steps, 207.0)
    assert plan.noise_multiplier == pytest.approx(noise_multiplier, rel=1e-9)


def test_sgd_adv_s_noise_gives_back_the_target_by_advanced_composition() -> None:
    plan = SGDAdv(steps=60, expected_batch_size=300).plan(TARGET, facts(40_000))
    step_epsilon = 2 * math.sqrt(2 * math.log(1.25 * 2 * 60 / 1e-8)) / plan.noise_multiplier
    sampled = 2 * (300 / 40_000) * step_epsilon
    assert sampled * 2 * math.sqrt(2 * 60 * math.log(2 / 1e-8)) == pytest.approx(1.0)


def test_sgd_adv_states_both_epsilons() -> None:
    plan = SGDAdv().plan(TARGET, facts(39_073))
    assert plan.method_params == {"claimed_epsilon": 1.0}
    assert 0.005 < plan.cost.epsilon < 0.05


# SGD by the moments accountant

ADULT = {1: 0.5757, 100: 0.5787, 1000: 0.6058, 10_000: 0.8776, 20_000: 1.1795}
"""Epsilon by the number of steps, for noise 4 and batches of 207 of 39,074 records, by the code of Lee and Kifer."""


@pytest.mark.parametrize("steps", ADULT)
def test_sgd_ma_s_epsilon_is_that_of_its_paper_on_adult(steps: int) -> None:
    plan = SGDMA(steps=steps, noise_multiplier=4.0).plan(Target(Budget(2.0, 1e-8), "rdp"), facts(39_074))
    assert plan.divisor == 207.0
    assert plan.method_params["claimed_epsilon"] == pytest.approx(ADULT[steps], abs=6e-5)
    assert plan.cost.epsilon < plan.method_params["claimed_epsilon"]


def test_sgd_ma_takes_the_least_noise_that_its_accountant_allows() -> None:
    plan = SGDMA(steps=500).plan(TARGET, facts(10_000))
    assert 1 - 1e-4 < plan.method_params["claimed_epsilon"] <= 1.0
    less = SGDMA(steps=500, noise_multiplier=0.999 * plan.noise_multiplier).plan(TARGET, facts(10_000))
    assert less.method_params["claimed_epsilon"] > 1.0
    assert plan.cost.epsilon < 0.8


def test_sgd_ma_cannot_state_a_small_epsilon() -> None:
    with refused_as("below_moments", smallest=pytest.approx(0.5756, abs=5e-5)):
        SGDMA().plan(Target(Budget(0.5, 1e-8)), facts(39_074))
    fixed = SGDMA(steps=100, noise_multiplier=4.0).plan(Target(Budget(0.5, 1e-8)), facts(39_074))
    assert fixed.cost.epsilon < 0.5 < fixed.method_params["claimed_epsilon"]


def test_what_a_baseline_cannot_do_is_refused_in_one_sentence() -> None:
    bounded = NormBoundSGD(steps=3, expected_batch_size=20)
    for missing in ({"inputs": None}, {"loss": None}):
        with refused_as("public_bound_missing", what="sensitivity"):
            bounded.plan(TARGET, facts(50, **missing))
    for without in ({"inputs": None}, {"intercepts": None}):
        with refused_as("majority_model"):
            Majority().plan(TARGET, facts(50, **without))
    with refused_as("releases_above_target"):
        SGDMA(steps=1000, noise_multiplier=0.5).plan(TARGET, facts(10_000))


@pytest.mark.parametrize("method", [SGDAdv(), SGDMA()])
def test_older_analyses_refuse_what_they_have_no_answer_for(method: Algorithm[Any]) -> None:
    with refused_as("records_private"):
        method.plan(TARGET, facts(None))
    with refused_as("analysis_needs_delta"):
        method.plan(Target(Budget(1.0, 0.0), "pure"), facts(10_000))


@pytest.mark.parametrize(("records", "size"), [(10_000, 110), (4, 4)])
def test_their_batches_are_of_the_root_of_the_number_of_records(records: int, size: int) -> None:
    assert SGDAdv(steps=5).plan(TARGET, facts(records)).divisor == size
