"""What every algorithm in the catalogue must keep, by being in it."""

import ast
import inspect
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.core.method import Algorithm
from algorithms.core.plan import Plan
from algorithms.errors import BudgetRefusedError
from algorithms.gradients import Affine
from algorithms.methods import CATALOGUE
from algorithms.privacy.accounting import epsilon as accounting
from algorithms.privacy.accounting.epsilon import Accountant, adjacency_named
from algorithms.privacy.accounting.events import run_lengths
from algorithms.privacy.mechanisms.noise import Generator
from tests.support import bench
from tests.support.bench import RECORDS, SHAPE, MadeUp, Outcome, StoppedError, run, with_record
from tests.support.refusals import refused_as
from tests.support.soak import soak_but

VARIANTS: dict[str, dict[str, Any]] = {
    "heavy_ball by samples": {"name": "heavy_ball", "batch_size": 10, "noise": "laplace"},
    "nesterov in stages": {"name": "nesterov", "variant": "masg_opt", "steps": 30},
    "nesterov purely": {"name": "nesterov", "noise": "laplace", "accountant": "pure"},
    "adp_sgd with steps that become shorter": {
        "name": "adp_sgd",
        "decay": {"form": "polynomial"},
        "steps": 2,
    },
    "adp_sgd with adaptive steps": {"name": "adp_sgd", "decay": {"form": "adaptive"}, "steps": 4},
    "objective perturbation of 2012": {"name": "objective_perturbation", "analysis": "kst"},
    "dp_sgd by layer": {"name": "dp_sgd", "clipping": "per_layer"},
    "dp_sgd with automatic clipping": {"name": "dp_sgd", "clipping": "normalised", "stability": 0.01},
    "dp_sgd shrunk towards the frequencies": {"name": "dp_sgd", "shrink_share": 0.05},
    "norm_bound_sgd shrunk towards the frequencies": {"name": "norm_bound_sgd", "shrink_share": 0.05},
    "adaclip as printed": {"name": "adaclip", "paper_update": True, "scale": "paper", "h2": 1.0},
    "matrix_factorisation in fixed order": {
        "name": "matrix_factorisation",
        "participation": "fixed_order",
        "bands": 3,
    },
    "matrix_factorisation by cyclic samples": {"name": "matrix_factorisation", "bands": 2},
    "matrix_factorisation with buffers": {
        "name": "matrix_factorisation",
        "participation": "fixed_order",
        "strategy": "buffered",
    },
    "dpis with public norms": {"name": "dpis", "public_norms": [1.0, 0.99]},
    "dpis with adaptive clipping": {
        "name": "dpis",
        "adaptive_clipping": {"min_clip_norm": 0.1, "max_clip_norm": 4.0},
    },
}
CASES = {name: {"name": name} for name in CATALOGUE} | VARIANTS
every_algorithm = pytest.mark.parametrize("case", list(CASES))
SAME_STATE = {
    *("heavy_ball by samples", "nesterov in stages", "nesterov purely", "dp_sgd by layer"),
    *("adp_sgd with steps that become shorter", "objective perturbation of 2012"),
    *("dp_sgd with automatic clipping", "adaclip as printed"),
}
"""Variants that hold what their method holds from step to step."""
every_state = pytest.mark.parametrize("case", soak_but([c for c in CASES if c not in SAME_STATE], CASES))
MODEL = bench.small_model("logistic", classes=2)


def method(case: str, **settings: Any) -> Algorithm[Any]:
    """The algorithm of a case; `settings` are made where it has them."""
    wanted = {key: value for key, value in CASES[case].items() if key != "accountant"}
    fields = set(vars(CATALOGUE[wanted["name"]])["__dataclass_fields__"])
    return bench.algorithm(**wanted | {key: value for key, value in settings.items() if key in fields})


def planned(case: str, *, epsilon: float = 5.0, accountant: Accountant = "rdp", **settings: Any) -> Plan:
    accountant = CASES[case].get("accountant", accountant)
    return bench.planned(method(case, **settings), MODEL, epsilon=epsilon, accountant=accountant)


def made_up(count: int = RECORDS) -> MadeUp:
    return bench.made_up(count, classes=2)


def outcome(case: str, records: MadeUp, **settings: Any) -> Outcome:
    return run(method(case, **settings), planned(case, **settings), records, MODEL)


@cache
def usual(case: str) -> Outcome:
    """What a case leaves of the usual records; for tests that only look at it."""
    return outcome(case, made_up())


def most(case: str) -> int:
    """The largest batch: of all records, but where that leaves importance sampling nothing to choose, and of those of
    one of two parts."""
    return RECORDS - 1 if case.startswith("dpis") else RECORDS // 2 if "cyclic" in case else RECORDS


def is_adaptive(plan: Plan) -> bool:
    return not plan.is_fixed


@every_algorithm
def test_releases_what_it_planned_and_no_more(case: str) -> None:
    plan, found = planned(case), usual(case)
    assert found.trace.rows[-1].epsilon <= plan.cost.epsilon * (1 + 1e-9)
    rows = [row for row in found.trace.rows if row.kind == "gradient" and row.sampling != "full batch"]
    for row in rows:  # a sample's sum is divided by its expected size, at first the batch that was asked for
        assert row.sampling_rate * RECORDS == pytest.approx(row.divisor)
    assert [row.divisor for row in rows[:1]] in ([], [10.0])
    if is_adaptive(plan):
        return
    assert run_lengths(found.trace.events()) == run_lengths(
        [event for event, count in plan.schedule for _ in range(count)]
    )
    assert found.trace.rows[-1].epsilon == pytest.approx(plan.cost.epsilon, rel=1e-4)
    with refused_as("no_further_release", BudgetRefusedError):
        method(case).step(method(case).init(MODEL.initial_parameters(), plan), plan, found.barrier)


@every_algorithm
def test_costs_at_most_its_target_by_an_independent_count(case: str) -> None:
    plan = planned(case, epsilon=2.0, accountant="pld")
    if plan.cost.epsilon == math.inf:
        pytest.skip("not private by design")
    assert plan.cost.epsilon <= 2.0 * (1 + 1e-9)
    if not is_adaptive(plan):
        delta, accountant = plan.target.budget.delta, plan.accountant
        assert plan.cost.epsilon == accounting.epsilon(
            plan.schedule, delta, accountant=accountant, adjacency=adjacency_named(plan.adjacency)
        )


@every_algorithm
def test_neighbours_have_the_same_trace(case: str) -> None:
    """With another record in the place of one where that is what is promised, else with one more."""
    records, plan = made_up(), planned(case)
    kept = records
    if plan.adjacency == "REPLACE_ONE":
        kept = MadeUp(records.features[:-1], records.labels[:-1])
    other = with_record(kept, -records.features[-1], int(records.labels[-1]))
    one, two = usual(case).trace.rows, outcome(case, other).trace.rows
    # What is asked next depends on the answers in an adaptive plan, and where clip norms follow a quantile.
    compared = 1 if is_adaptive(plan) else 2 if case == "quantile_clipping" else None
    assert one[:compared] == two[:compared]


def one_large_batch(case: str) -> dict[str, Any]:
    """Settings under which the first sum is over all records; where they go by parts, each part's."""
    return {
        "batch_size": most(case),
        "expected_batch_size": most(case),
        "sampling_rate": None,
        "steps": 2 if "cyclic" in case else 1,
    }


def moved_by_one_record(case: str) -> tuple[float, Outcome]:
    """How far the first sum moves when an extreme record replaces one, in units of a record's bound."""
    settings = one_large_batch(case)
    records = made_up()
    kept = MadeUp(records.features[:-1], records.labels[:-1])
    near = with_record(kept, np.zeros(SHAPE, dtype=np.float32), 1 - int(kept.labels[0]))
    far = with_record(kept, np.full(SHAPE, 1e6, dtype=np.float32), int(kept.labels[0]))
    before, after = (outcome(case, data, **settings) for data in (near, far))
    row, turn = before.trace.rows[0], 1 if "cyclic" in case else 0  # of the two parts, by its coin
    difference = (after.answers[turn].double() - before.answers[turn].double()) * row.divisor
    order = 1 if row.clipping == "L1" else 2
    rounding = 1e-6 * row.noise_std
    return max(0.0, float(difference.norm(p=order)) - rounding) / row.clip_norm, before


@every_algorithm
def test_one_record_moves_an_answer_by_no_more_than_declared(case: str) -> None:
    moved, found = moved_by_one_record(case)
    row = found.trace.rows[0]
    if row.kind == "argmin" or row.clip_norm == math.inf:
        pytest.skip("its first answer is no bounded sum")
    assert moved <= 2 * (1 + 1e-5)
    if row.kind != "minimum":  # a minimum moves by its bound only for records that none of these is
        assert moved > 0.5


@every_algorithm
def test_a_record_without_a_finite_gradient_changes_nothing(case: str) -> None:
    records = made_up()
    if case == "majority":
        pytest.skip("it looks at labels alone")
    far, nan = (
        MadeUp(
            np.concatenate([records.features[:-1], np.full((1, *SHAPE), value, np.float32)]), records.labels
        )
        for value in (np.inf, np.nan)
    )
    settings = one_large_batch(case)
    assert torch.equal(outcome(case, far, **settings).released, outcome(case, nan, **settings).released)


@every_algorithm
def test_answers_without_records_are_noise_of_the_declared_scale(case: str) -> None:
    if planned(case).adjacency == "REPLACE_ONE" and "samples" in case:
        pytest.skip("a sample of fixed size needs its records")
    found = outcome(case, made_up(0))
    for row, answer in zip(found.trace.rows, found.answers, strict=True):
        if row.kind == "argmin" or row.noise == "objectivenoise":
            continue
        assert bool((answer != 0).any()) == (row.noise_std > 0)
        assert float(answer.abs().max()) * row.divisor <= 8 * row.noise_std


def trained(case: str, folder: Path, *, stop_after: int | None = None, **settings: Any) -> tuple[Tensor, Any]:
    asked, plan = method(case, **settings), planned(case)
    state, trace, _ = bench.trained(asked, plan, MODEL, folder, records=made_up, stop_after=stop_after)
    return asked.released(state), trace.rows


@every_state
def test_taken_up_after_a_crash_it_ends_bit_for_bit_the_same(case: str, tmp_path: Path) -> None:
    settings = {"update": {"optimizer": "adam", "averaging": "ema", "momentum": 0.9}}  # the largest state
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    expected, expected_rows = trained(case, tmp_path / "whole", **settings)
    last = expected_rows[-1].step
    for stop_after in sorted({min(2, last), min(4, last)} - {0}):
        with pytest.raises(StoppedError):
            trained(case, tmp_path / "broken", stop_after=stop_after, **settings)
    released, rows = trained(case, tmp_path / "broken", **settings)
    assert torch.equal(released, expected)
    assert rows == expected_rows


@every_algorithm
def test_a_crash_between_charge_and_answer_counts_as_spent(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, first = planned(case), usual(case).trace.rows[0]
    privacy_filter = plan.open_filter()
    monkeypatch.setattr(Plan, "open_filter", lambda self: privacy_filter)
    monkeypatch.setattr(Generator, "stream", _crash)
    with pytest.raises(StoppedError):
        run(method(case), plan, made_up(), MODEL)
    assert privacy_filter.epsilon_spent(plan.target.budget.delta) == first.epsilon


def _crash(*_arguments: Any) -> Tensor:
    raise StoppedError


class Exact:
    """A stand-in for the barrier: the mean gradient over all records, as a shift asks, without bound and noise."""

    def __init__(self, records: MadeUp) -> None:
        self.inputs, self.labels = torch.from_numpy(records.features), torch.from_numpy(records.labels)

    def gradient(self, parameters: Tensor, *, clipping: Any = None, **_settings: Any) -> Tensor:
        values = parameters.clone().requires_grad_()
        losses = MODEL.losses(MODEL.outputs(MODEL.by_name(values), self.inputs), self.labels)
        gradient = torch.autograd.grad(losses.mean(), values)[0]
        if isinstance(clipping, Affine):
            return (gradient - clipping.shift) / clipping.scale
        return gradient

    def norm_count(self, _parameters: Tensor, **_settings: Any) -> float:
        return 0.0

    def norm_total(self, _parameters: Tensor, **_settings: Any) -> float:
        return float(len(self.labels))


PLAIN = {
    "sgd": ({"learning_rate": 0.3}, lambda p: torch.optim.SGD(p, lr=0.3)),
    "momentum": (
        {"learning_rate": 0.3, "momentum": 0.9},
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    ),
    "adam": (
        {"learning_rate": 0.1, "optimizer": "adam", "momentum": 0.9},
        lambda p: torch.optim.Adam(p, lr=0.1),
    ),
    "adamw": (
        {"learning_rate": 0.1, "optimizer": "adam", "momentum": 0.9, "weight_decay": 0.2},
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
    ),
}
UPDATING = [name for name, kind in CATALOGUE.items() if "update" in vars(kind)["__dataclass_fields__"]]


# Momentum sees the scale of each step and their order; the other optimisers are one piece of code for all methods.
@pytest.mark.parametrize(
    ("case", "optimizer"),
    [(case, "momentum") for case in UPDATING] + [("dp_sgd", name) for name in ("sgd", "adam", "adamw")],
)
def test_without_bound_and_noise_it_is_the_plain_optimiser(case: str, optimizer: str) -> None:
    update, reference = PLAIN[optimizer]
    algorithm = method(case, update=update)
    plan, exact = planned(case, update=update), Exact(made_up())
    state = algorithm.init(MODEL.initial_parameters(), plan)
    plain = torch.nn.Parameter(MODEL.initial_parameters())
    optimiser = reference([plain])
    for _ in range(plan.steps):
        state = algorithm.step(state, plan, exact)  # type: ignore[arg-type]
        plain.grad = exact.gradient(plain.detach())
        optimiser.step()
    torch.testing.assert_close(algorithm.released(state), plain.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_its_file_sees_neither_data_nor_the_inside_of_the_barrier(name: str) -> None:
    path = Path(inspect.getfile(CATALOGUE[name]))
    assert path.parent.name == "methods"
    tree = ast.parse(path.read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not {module for module in modules if module.split(".")[0] in ("data", "tasks", "flows")}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {attribute for attribute in attributes if attribute.startswith("_Barrier")}
