"""A clip norm that follows the errors of a number: what is released for it, what it costs, and what it does."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from algorithms.core.falling_errors import ErrorReleases
from algorithms.core.minibatch import interrupt_steps, moves_of
from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import NumberKind, PlanningFacts
from algorithms.core.shrinkage import Shrinkage, ShrunkState
from algorithms.fitting import fit
from algorithms.gradients import L2
from algorithms.methods.dp_sgd import DPSGD
from algorithms.models import Model, build
from algorithms.models.cells import behind_cells
from algorithms.models.scaled_target import TargetScaling, behind_scaling
from algorithms.privacy.accounting import Budget
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.card import verify, verify_card
from tests.support import bench
from tests.support.bench import MadeUp
from tests.support.refusals import refused_as
from tests.support.unaccounted import plan_with

UPDATE = OptimizerConfig(learning_rate=1.5, momentum=0.5, schedule="linear", noise_limit=0.3)
"""Whose steps are short enough for errors that fall all the time."""
FOLLOWING = DPSGD(steps=20, expected_batch_size=40, update=UPDATE, shrink_share=0.01, error_share=0.01)
PLACES = (1, 2, 4, 6, 10, 14)


def model_of_a_number() -> Model:
    linear = build("additive", input_shape=(8,), classes=1, seed=0, predicts="number")
    return behind_scaling(TargetScaling(), behind_cells(linear, (4, 4), (0.7, 0.7)))


def planned(
    method: DPSGD = FOLLOWING, *, number: NumberKind | None = "number", epsilon: float = 30.0
) -> Plan:
    return method.plan(Target(Budget(epsilon, 1e-5)), PlanningFacts(400, 8, 1, 1, number=number))


def records(*, known: bool) -> MadeUp:
    """A number of mean square 0.44 that follows from the first column, or is random."""
    draw = np.random.default_rng(0)
    rows = draw.integers(0, 4, (400, 2)).astype(np.float32)
    signs = np.where(rows[:, 0] < 2, -1.0, 1.0) if known else draw.choice([-1.0, 1.0], 400)
    return MadeUp(rows, (math.sqrt(0.44) * signs).astype(np.float32))  # type: ignore[arg-type]


def test_the_releases_stand_between_the_steps_and_all_cost_the_target() -> None:
    """Each is a Gaussian mechanism of a hundredth of the squared mu (Balle and Wang 2018, Theorem 8)."""
    plan, plain = planned(epsilon=1.0), planned(replace(FOLLOWING, error_share=None), epsilon=1.0)
    errors = plan.params(Shrinkage).errors
    assert errors is not None and errors.after == PLACES
    mu = 1.0 / (errors.noise * math.sqrt(0.01))
    assert norm.cdf(mu / 2 - 1 / mu) - math.e * norm.cdf(-mu / 2 - 1 / mu) == pytest.approx(1e-5, rel=1e-4)
    in_turn = [
        getattr(event, "noise_multiplier", None) for event, count in plan.schedule for _ in range(count)
    ]
    steps, expected = 0, []
    for noise in in_turn[:-1]:
        if noise is None:
            steps += 1
        else:
            expected.append((steps, noise))
    assert expected == [(place, errors.noise) for place in PLACES] and steps == 20
    assert plan.cost.epsilon == pytest.approx(1.0, rel=1e-3)
    assert plan.noise_multiplier > 1.02 * plain.noise_multiplier
    assert "errors" not in plain.method_params


@pytest.mark.parametrize("known", [True, False])
def test_noise_falls_with_the_errors_and_its_multiplier_stays(known: bool, tmp_path: Path) -> None:
    """The clip norm by which noise falls is that of the gain before, and it stays where nothing is learned."""
    plan = planned()
    held, model = records(known=known), model_of_a_number()
    trained = bench.trained(FOLLOWING, plan, model, tmp_path, records=lambda: held)
    state, rows = trained.state, trained.trace.rows
    assert isinstance(state, ShrunkState)
    kinds = [row.kind for row in rows]
    assert kinds == [
        kind for step in range(20) for kind in (["total"] if step in PLACES else []) + ["gradient"]
    ] + ["total"]
    stds = np.array([row.noise_std for row in rows if row.kind == "gradient"])
    shares = [float(state.clip_shares[sum(place <= step for place in PLACES) - 1]) for step in range(1, 20)]
    assert stds / stds[0] == pytest.approx([1.0, *shares], rel=1e-6)
    events = zip(rows, trained.trace.events(), strict=True)
    assert len({str(event) for row, event in events if row.kind == "gradient"}) == 1
    assert shares[-1] < 0.3 if known else min(shares) > 0.9


def test_the_share_is_the_root_of_what_is_left_of_the_squares(tmp_path: Path) -> None:
    """By NumPy, of the parameters before the second of the releases, with hardly any noise."""
    model, held = model_of_a_number(), records(known=True)
    plan = planned(epsilon=60.0)
    errors = plan.params(Shrinkage).errors
    assert errors is not None
    seen: list[torch.Tensor] = []
    with_errors = ShrunkState.with_errors

    def noting(state: ShrunkState, *others: Any) -> ShrunkState:
        if int(state.optimizer_state.count) == PLACES[1]:
            seen.append(state.parameters.clone())
        return with_errors(state, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShrunkState, "with_errors", noting)
        state = bench.trained(FOLLOWING, plan, model, tmp_path, records=lambda: held).state
    assert isinstance(state, ShrunkState)
    cells = held.features.astype(int) + np.array([0, 4])
    outputs = 0.7 * seen[0].double().numpy()[cells].sum(1)
    left = np.square(held.labels - outputs).mean() / 0.44
    noise = errors.noise / 400 / 0.22
    assert float(state.clip_shares[1]) ** 2 == pytest.approx(left + noise, abs=5 * noise)
    assert noise < 0.05 < left + noise


@pytest.mark.parametrize(
    ("gain", "share"),
    [(-50.0, 1.0), (2.0, 1.0), (2.0 + 0.11 * 400, math.sqrt(0.5)), (2.0 + 0.2 * 400, 0.3015), (500.0, 0.1)],
)
def test_a_gain_within_its_noise_leaves_the_clip_norm(gain: float, share: float) -> None:
    assert ErrorReleases(2.0, (1,)).clip_share(gain, records=400.0) == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize(("records", "follows"), [(1000.0, False), (1100.0, True)])
def test_a_release_that_is_mostly_noise_leaves_the_clip_norm(records: float, follows: bool) -> None:
    """A noise of 58 is a quarter of the loss of 1,055 records, which may be far fewer than planned for."""
    share = ErrorReleases(58.0, (1,)).clip_share(0.2 * records + 58.0, records)
    assert share == pytest.approx(math.sqrt(1.0 - 0.2 / 0.22) if follows else 1.0)


@pytest.mark.parametrize("step", [4, 5])
@pytest.mark.parametrize("where", ["after the step", "within it"])
def test_a_run_that_crashed_beside_a_release_ends_as_if_it_had_not(
    step: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stands before the fifth step: crashed between both, a run draws it again with the same noise."""
    model, held, plan = model_of_a_number(), records(known=True), planned()
    whole = bench.trained(FOLLOWING, plan, model, tmp_path / "whole", records=lambda: held)
    gradient, steps = Barrier.gradient, iter(range(plan.steps))

    def crashing(barrier: Barrier, *given: Any, **named: Any) -> Any:
        if next(steps) == step:
            raise bench.StoppedError
        return gradient(barrier, *given, **named)

    with monkeypatch.context() as patch, pytest.raises(bench.StoppedError):
        if where == "within it":
            patch.setattr(Barrier, "gradient", crashing)
        stop = step if where == "after the step" else None
        bench.trained(FOLLOWING, plan, model, tmp_path / "crashed", records=lambda: held, stop_after=stop)
    resumed = bench.trained(FOLLOWING, plan, model, tmp_path / "crashed", records=lambda: held)
    assert resumed.trace.rows == whole.trace.rows
    assert isinstance(resumed.state, ShrunkState) and isinstance(whole.state, ShrunkState)
    assert torch.equal(resumed.state.clip_shares, whole.state.clip_shares)
    assert torch.equal(FOLLOWING.released(resumed.state), FOLLOWING.released(whole.state))


def test_steps_with_less_noise_are_longer_up_to_the_limit() -> None:
    """By the definition of the limit: all noise together moves a parameter by 0.3, whatever the clip norms."""
    plan = replace(plan_with(9.0, steps=20), sampling_rate=0.1)
    clippings = [L2(1.0)] * 8 + [L2(0.25)] * 12
    moves = moves_of(UPDATE, plan, clippings, 40.0)
    assert moves is not None
    decay = 1.0 - np.arange(20) / 20
    whole = 3.0 * np.sqrt(np.square(decay).sum())
    factors = [min(1.0, 0.3 / (whole * 9.0 * clipping.norm / 40.0)) for clipping in clippings]
    stds = [9.0 * clipping.norm / 40.0 for clipping in clippings]
    assert factors[0] < factors[-1] == pytest.approx(min(1.0, 4 * factors[0]))
    assert moves.noise == pytest.approx(np.sqrt(np.square(3.0 * decay * factors * np.array(stds)).sum()))
    assert moves.noise <= 0.3 * (1 + 1e-9)
    assert moves.record == pytest.approx((3.0 * decay * factors).sum() * 0.1 / 40.0)


def test_rows_are_cut_where_others_stand_between() -> None:
    rows: Any = [("a", 3), ("b", 2)]
    assert interrupt_steps(rows, {}) == rows
    between: Any = {1: [("x", 1)], 3: [("y", 1)], 5: [("z", 2)]}
    assert interrupt_steps(rows, between) == [("a", 1), ("x", 1), ("a", 2), ("y", 1), ("b", 2), ("z", 2)]


def test_a_single_step_has_none_before_it_to_look_at(tmp_path: Path) -> None:
    method, held = replace(FOLLOWING, steps=1), records(known=True)
    plan = planned(method)
    assert plan == planned(replace(method, error_share=None))
    rows = bench.trained(method, plan, model_of_a_number(), tmp_path, records=lambda: held).trace.rows
    assert [row.kind for row in rows] == ["gradient", "total"]


@pytest.mark.parametrize("number", ["count", None])
def test_only_a_number_has_errors_to_follow(number: NumberKind | None) -> None:
    code = "no_errors_to_follow" if number else "nothing_to_shrink_to"
    with refused_as(code):
        planned(number=number)


@pytest.mark.parametrize(
    "change", [{"shrink_share": None}, {"clipping": "normalised"}, {"sampling": "random_allocation"}]
)
def test_errors_are_followed_by_plain_clipping_of_poisson_samples(change: dict[str, Any]) -> None:
    with refused_as("errors_need_settings"):
        planned(replace(FOLLOWING, **change))


def test_both_verifiers_recompute_the_price_of_a_fit_that_follows_errors(tmp_path: Path) -> None:
    """And one that lacks a release on the way, or has less noise in it, passes neither."""
    draw = np.random.default_rng(0)
    X = draw.normal(size=(200, 4)).astype(np.float32)
    module, y = nn.Linear(4, 1), (X[:, 0] / 4).clip(-1, 1)
    for part in module.parameters():
        nn.init.zeros_(part)
    method = DPSGD(steps=3, expected_batch_size=20, shrink_share=0.05, error_share=0.05)
    result = fit(module, "mse_loss", X, y, method=method, epsilon=1.0, delta=1e-5, target_scale=0.05)
    assert list(result.trace["kind"])[2:] == ["gradient", "total", "gradient", "total", "gradient", "total"]
    assert verify(result.card, unsigned=True).passed
    path = tmp_path / "card.json"
    path.write_bytes(result.card.to_bytes())
    assert all(check[1] is not False for check in verify_card.verify(path, unsigned=True))
    for fault in ("missing", "quieter"):
        document = json.loads(path.read_text())
        events = document["events"]
        of_errors = [index for index, row in enumerate(events) if "noise_multiplier" in row["event"]][-2]
        if fault == "missing":
            del events[of_errors]
        else:
            events[of_errors]["event"]["noise_multiplier"] /= 4
        other = tmp_path / f"{fault}.json"
        other.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        assert [check for check in verify_card.verify(other, unsigned=True) if check[1] is False], fault
