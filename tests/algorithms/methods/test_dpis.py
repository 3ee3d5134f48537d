"""DPIS: what it may spend, how its noise follows the norms, and what it asks of the barrier."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from pydantic import ValidationError
from torch import Tensor

from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.gradients import L2, Clipping
from algorithms.methods import from_settings
from algorithms.methods.dpis import DPIS, ImportanceState, plan_fixed_noise
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.events import RenyiDpEvent
from algorithms.privacy.accounting.filters import conversion
from algorithms.privacy.accounting.noise_search import calibrate
from algorithms.privacy.barrier.trace import ReleaseRow
from algorithms.privacy.mechanisms.release import (
    Gaussian,
    gradient_release,
    norm_total_release,
    total_release,
)
from algorithms.privacy.mechanisms.sampling import Importance
from tests.support import bench
from tests.support.bench import RECORDS, StoppedError, small_model
from tests.support.refusals import refused_as
from tests.support.soak import soak_but

GOLDEN = json.loads((Path(__file__).parents[1] / "privacy/accounting/golden.json").read_text())
DELTA, MANY, C = 1e-5, 6000, 0.5
FALLING = [1.0, 0.8, 0.6, 0.45, 0.3, 0.2, 0.15, 0.12, 0.11, 0.1]


def method(**settings: Any) -> DPIS:
    made = from_settings({"name": "dpis", "epochs": 10, "expected_batch_size": 60, "clip_norm": C} | settings)
    assert isinstance(made, DPIS)
    return made


def planned(made: DPIS, *, records: int | None = MANY, epsilon: float = 2.0, accountant: Any = "rdp") -> Plan:
    return made.plan(Target(Budget(epsilon, DELTA), accountant), PlanningFacts(records, 7, 1, 2))


class Scripted:
    """A stand-in for the barrier under the plan's own filter: K / (N C) of each release of norms as given."""

    def __init__(self, plan: Plan, fractions: Sequence[float], *, records: float = MANY) -> None:
        self.privacy_filter, self.fractions, self.records = plan.open_filter(), list(fractions), records
        self.steps: list[dict[str, Any]] = []
        self.events: list[dp.DpEvent] = []
        self.norms: list[float] = []

    def _charge(self, event: dp.DpEvent) -> None:
        self.privacy_filter.charge(event)
        self.events.append(event)

    def total(self, _statistic: Callable[..., Tensor], *, bound: L2, noise: Gaussian) -> Tensor:
        self._charge(total_release(bound, noise).event())
        return torch.tensor([self.records])

    def norm_total(self, _parameters: Tensor, *, bound: L2, noise: Gaussian) -> float:
        self._charge(norm_total_release(bound, noise).event())
        self.norms.append(bound.norm)
        return self.fractions.pop(0) * self.records * bound.norm

    def gradient(
        self, parameters: Tensor, *, sampling: Importance, clipping: Clipping, noise: Gaussian, divisor: float
    ) -> Tensor:
        self._charge(gradient_release(sampling, clipping, noise, divisor).event())
        self.steps.append(
            {"rate": sampling.rate, "z": noise.multiplier, "divisor": divisor, "clipping": clipping}
        )
        return torch.zeros_like(parameters)


def run(
    made: DPIS, plan: Plan, fractions: Sequence[float], **changes: Any
) -> tuple[Scripted, list[ImportanceState]]:
    """The stand-in after a whole run, and the state after each step."""
    asked = Scripted(plan, fractions, **changes)
    states, state = [], made.init(torch.zeros(7), plan)
    for _ in range(plan.steps):
        following = made.step(state, plan, asked)  # type: ignore[arg-type]
        assert following is not None
        state = following
        states.append(state)
    return asked, states


def spent(plan: Plan, events: Sequence[dp.DpEvent]) -> float:
    """The Rényi cost of events at the plan's order, counted apart from ours."""
    accountant = RdpAccountant([plan.filter.order])
    for event in events:
        accountant.compose(event)
    return float(accountant._rdp[0])


def noises(made: DPIS, plan: Plan, fractions: Sequence[float]) -> list[float]:
    """sigma_G of each epoch."""
    _, states = run(made, plan, fractions)
    return [float(state.epoch.noise) for state in states[:: plan.method_params["steps_per_epoch"]]]


SHARES: list[dict[str, Any]] = [
    {},
    {"cautious_share": 0.0},
    {"cautious_share": 1.0},
    {"adaptive_clipping": {"min_clip_norm": 0.1, "max_clip_norm": 2.0}},
]
COURSES = [*zip(SHARES, ("jumping", "falling", "jumping", "falling"), strict=True), ({}, "falling")]


@pytest.mark.parametrize(
    ("settings", "course"), soak_but(COURSES, itertools.product(SHARES, ("falling", "jumping")))
)
def test_a_run_spends_its_budget_and_no_more_by_an_independent_count(
    settings: dict[str, Any], course: str
) -> None:
    made = method(**settings)
    plan = planned(made)
    draws = np.random.default_rng(0).uniform(-0.2, 1.3, size=40)
    asked, _ = run(made, plan, (FALLING * 4) if course == "falling" else draws)
    total = spent(plan, asked.events)
    assert total <= plan.filter.limit
    assert total + conversion(plan.filter.order, DELTA) <= 2.0
    if made.cautious_share < 1:
        assert total == pytest.approx(plan.filter.limit, rel=1e-6)


def test_noise_never_rises_while_norms_fall() -> None:
    made = method()
    plan = planned(made)
    found = noises(made, plan, FALLING)
    assert found[0] == pytest.approx(plan.method_params["most_noise"], rel=1e-6)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(found))
    assert found[8] < 0.9 * found[7]  # where later epochs are no longer reserved for at the worst


def test_without_falling_norms_the_noise_is_the_same_throughout() -> None:
    made = method()
    plan = planned(made)
    assert noises(made, plan, [1.0] * 10) == pytest.approx([plan.method_params["most_noise"]] * 10, rel=1e-6)


def test_a_step_is_that_of_dp_sgd_at_the_batch_that_the_norms_allow() -> None:
    """q = b C / K, z = sigma_G N C / K, divided by q N; K cut off at k b C below and N C above."""
    made = method(epochs=4)
    plan = planned(made)
    asked, states = run(made, plan, [0.5, 9.0, -3.0, 0.05])
    for epoch, fraction in enumerate([0.5, 1.0, 0.05 * (1 + 1e-6), 0.05 * (1 + 1e-6)]):
        step, noise = asked.steps[100 * epoch], float(states[100 * epoch].epoch.noise)
        assert step["rate"] == pytest.approx(0.01 / fraction)
        assert step["z"] == pytest.approx(noise / fraction)
        assert step["divisor"] == pytest.approx(step["rate"] * MANY) == pytest.approx(60 / fraction)
        assert asked.steps[100 * epoch + 99] == step
    assert plan.steps == 400 and len(asked.norms) == 4


def test_the_clip_norm_follows_the_mean_norm_within_its_bounds() -> None:
    made = method(epochs=4, adaptive_clipping={"factor": 0.5, "min_clip_norm": 0.2, "max_clip_norm": 2.0})
    asked, _ = run(made, planned(made), [0.5, 0.3, 0.5, 0.01, 0.5, 9.0, 0.5])
    assert asked.norms == [C, 2.0, 0.3, 2.0, 0.2, 2.0, 2.0]
    assert [step["clipping"].norm for step in asked.steps[::100]] == [C, 0.3, 0.2, 2.0]


def test_the_order_is_the_best_for_the_worst_case() -> None:
    made = method()
    plan = planned(made)
    event = dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(plan.method_params["most_noise"]))
    norms = [(dp.GaussianDpEvent(plan.method_params["norm_multiplier"]), 10)]
    best = calibrate(
        lambda noise: [(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(noise)), 1000), *norms],
        Budget(2.0, DELTA),
        accountant="rdp",
    )
    assert plan.method_params["most_noise"] == pytest.approx(best, rel=2e-3)
    cost = spent(plan, [event] * 1000 + [norms[0][0]] * 10)
    assert cost == pytest.approx(plan.filter.limit, rel=1e-6)


@pytest.mark.parametrize("name", ["dpis_sigma_K1", "dpis_sigma_K0.25"])
def test_the_noise_at_a_fixed_sum_of_norms_has_its_reference_value(name: str) -> None:
    p = GOLDEN[name]["params"]

    def event(noise: float) -> dp.DpEvent:
        return dp.PoissonSampledDpEvent(p["b"] / (p["N"] * p["r"]), dp.GaussianDpEvent(noise / p["r"]))

    _, noise = plan_fixed_noise(event, p["T"], [], Target(Budget(4.0, p["delta"])))
    assert noise == pytest.approx(GOLDEN[name]["value"], rel=2e-3)


def test_a_private_number_of_records_is_counted_first_and_paid_for() -> None:
    made = method(expected_batch_size=None, sampling_rate=0.01, norm_noise_multiplier=100.0)
    plan = planned(made, records=None)
    assert (plan.steps, plan.method_params["norm_multiplier"]) == (1000, 100.0)
    asked, states = run(made, plan, FALLING, records=5000.0)
    assert asked.events[0] == dp.GaussianDpEvent(plan.target.count_noise)
    assert float(states[0].epoch.expected_batch) == 50.0
    assert asked.steps[0]["divisor"] == pytest.approx(50.0)
    assert spent(plan, asked.events) == pytest.approx(plan.filter.limit, rel=1e-6)


def test_public_norms_are_a_schedule_with_one_noise() -> None:
    made = method(epochs=3, expected_batch_size=600, oversampling=1.0, public_norms=[0.5, 0.2])
    plan = planned(made, accountant="pld")
    assert plan.is_fixed
    assert plan.epsilon["pld"] == pytest.approx(2.0, rel=1e-3)
    assert plan.epsilon["pld"] < plan.epsilon["rdp"]
    asked, _ = run(made, plan, [])
    assert asked.events == [event for event, count in plan.schedule for _ in range(count)]
    for epoch, fraction in enumerate([0.5, 0.35, 0.2]):
        step = asked.steps[10 * epoch]
        assert step["rate"] == pytest.approx(0.1 / fraction)
        assert step["z"] * fraction == pytest.approx(plan.noise_multiplier)


@pytest.mark.parametrize(
    ("settings", "records", "code", "fields"),
    [
        ({"expected_batch_size": 1200}, MANY, "all_records_candidates", {}),
        ({"public_norms": [1.0, 0.05]}, MANY, "all_records_candidates", {}),
        (
            {"public_norms": [1.0, 0.5], "adaptive_clipping": {"min_clip_norm": 1.0, "max_clip_norm": 2.0}},
            MANY,
            "norms_public_and_released",
            {},
        ),
        (
            {"adaptive_clipping": {"min_clip_norm": 2.0, "max_clip_norm": 1.0}},
            MANY,
            "clip_norms_crossed",
            {},
        ),
        ({"expected_batch_size": None, "sampling_rate": 0.01}, None, "norm_noise_missing", {}),
        ({"norm_noise": 1e-5}, MANY, "norms_take_budget", {"noise": "method.norm_noise"}),
        (
            {"norm_noise_multiplier": 1e-2},
            MANY,
            "norms_take_budget",
            {"noise": "method.norm_noise_multiplier"},
        ),
        ({"norm_noise": 1e-5, "norm_noise_multiplier": 100.0}, MANY, "norm_noise_given_twice", {}),
        ({"sampling_rate": 0.01}, MANY, "batch_given_twice", {"other": "method.sampling_rate"}),
        ({"sampling_rate": 0.01}, None, "batch_given_twice", {"other": "method.expected_batch_size"}),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: Any, records: int | None, code: str, fields: Any
) -> None:
    with refused_as(code, **fields):
        planned(method(**settings), records=records)


def test_more_steps_than_can_be_planned_are_refused_before_they_are_planned() -> None:
    with refused_as("too_many_steps", largest=1_000_000):
        planned(method(epochs=999_999))
    with pytest.raises(ValidationError, match="less than or equal to 1000000"):
        method(epochs=10**9)


def test_without_a_setting_the_noise_of_norms_is_a_part_of_the_number_of_records() -> None:
    assert (method().norm_noise, method(norm_noise_multiplier=9.0).norm_noise) == (0.02, None)
    assert planned(method()).method_params["norm_multiplier"] == 0.02 * MANY
    assert planned(method(norm_noise_multiplier=9.0)).method_params["norm_multiplier"] == 9.0


@pytest.mark.parametrize(
    ("epsilon", "before", "code"),
    [
        (0.005, [], "below_filter"),
        (1.0, [(dp.GaussianDpEvent(0.1), 1)], "features_take_budget"),
        (1.0, [(RenyiDpEvent(512.0, 1.0 - conversion(512.0, DELTA) - 1e-15), 1)], "no_noise_fits_rest"),
    ],
)
def test_what_eats_the_budget_is_named(epsilon: float, before: Any, code: str) -> None:
    target = Target(Budget(epsilon, DELTA), prior_events=tuple(before))
    with refused_as(code):
        plan_fixed_noise(lambda noise: method()._release(0.01, 1.0, noise).event(), 100, before, target)


def trained(
    made: DPIS, plan: Plan, folder: Path, *, stop_after: int | None = None
) -> tuple[Tensor, list[ReleaseRow]]:
    state, trace, *_ = bench.trained(made, plan, small_model(), folder, stop_after=stop_after)
    return made.released(state), trace.rows


@pytest.mark.parametrize(
    ("settings", "records"),
    [
        ({"expected_batch_size": 4, "norm_noise": 0.5}, RECORDS),
        ({"expected_batch_size": None, "sampling_rate": 0.1, "norm_noise_multiplier": 20.0}, None),
    ],
)
def test_taken_up_anywhere_in_an_epoch_it_ends_bit_for_bit_the_same(
    settings: dict[str, Any], records: int | None, tmp_path: Path
) -> None:
    """Ten steps an epoch; the last norms decide who is a candidate, so they must survive every crash."""
    made = method(epochs=2, oversampling=2.0, clip_norm=6.0, **settings)
    model = small_model()
    plan = made.plan(Target(Budget(8.0, 1e-3), "rdp"), PlanningFacts(records, model.parameter_count, 1, 3))
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    expected, expected_rows = trained(made, plan, tmp_path / "whole")
    for stop_after in (1, 4, 10, 13):
        with pytest.raises(StoppedError):
            trained(made, plan, tmp_path / "broken", stop_after=stop_after)
    released, rows = trained(made, plan, tmp_path / "broken")
    assert torch.equal(released, expected)
    assert rows == expected_rows
    assert (tmp_path / "broken" / "state.safetensors").stat().st_mode & 0o077 == 0


def test_a_checkpoint_without_its_last_norms_would_not_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same crashes with the norms forgotten: the test above can fail."""
    made = method(epochs=2, oversampling=2.0, clip_norm=6.0, expected_batch_size=4, norm_noise=0.5)
    plan = made.plan(
        Target(Budget(8.0, 1e-3), "rdp"), PlanningFacts(RECORDS, small_model().parameter_count, 1, 3)
    )
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    expected, _ = trained(made, plan, tmp_path / "whole")
    monkeypatch.setattr(
        "algorithms.privacy.barrier.importance_sampling.LastNorms.to_tensor", lambda self: None
    )
    with pytest.raises(StoppedError):
        trained(made, plan, tmp_path / "broken", stop_after=4)
    assert not torch.equal(trained(made, plan, tmp_path / "broken")[0], expected)
