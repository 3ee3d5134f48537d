"""What every algorithm in the catalogue must keep, by being in it."""

import ast
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms import training
from algorithms.catalogue import CATALOGUE
from algorithms.gradients import Engine
from algorithms.privacy.accounting import epsilon
from algorithms.privacy.barrier import Performance
from algorithms.privacy.errors import BudgetRefused
from algorithms.privacy.events import run_lengths
from algorithms.privacy.noise import seeded_generator
from tests.algorithms.bench import (
    DELTA,
    RECORDS,
    SHAPE,
    MadeUp,
    algorithm,
    made_up,
    planned,
    run,
    small_model,
    with_record,
)

every_algorithm = pytest.mark.parametrize("name", list(CATALOGUE))


@every_algorithm
def test_releases_what_it_planned_and_no_more(name: str) -> None:
    method, model = algorithm(name), small_model()
    plan = planned(method, model)
    outcome = run(method, plan, made_up(), model)
    assert run_lengths(outcome.trace.events()) == list(plan.schedule)
    assert outcome.barrier.spent(DELTA) == pytest.approx(plan.cost.epsilon)
    with pytest.raises(BudgetRefused, match="no further release"):
        method.step(method.init(model.initial_parameters(), plan), plan, outcome.barrier)


@every_algorithm
def test_costs_at_most_its_target_by_an_independent_count(name: str) -> None:
    method, model = algorithm(name), small_model()
    plan = planned(method, model, epsilon=2.0)
    if plan.cost.epsilon == math.inf:
        pytest.skip("not private by design")
    assert 1.9 < epsilon(plan.schedule, DELTA) <= 2.0
    assert plan.cost.epsilon == epsilon(plan.schedule, DELTA)


@every_algorithm
def test_neighbours_have_the_same_trace(name: str) -> None:
    method, model = algorithm(name), small_model()
    plan, records = planned(method, model), made_up()
    fewer = MadeUp(records.features[:-1], records.labels[:-1])
    assert run(method, plan, records, model).trace.rows == run(method, plan, fewer, model).trace.rows


@every_algorithm
def test_one_record_moves_an_answer_by_no_more_than_declared(name: str) -> None:
    method, model = algorithm(name, batch_size=RECORDS, steps=1), small_model()
    plan, records = planned(method, model), made_up()
    extreme = with_record(records, np.full(SHAPE, 1e6, dtype=np.float32), 0)
    before, after = run(method, plan, records, model), run(method, plan, extreme, model)
    row = before.trace.rows[0]
    moved = float((after.answers[0].double() - before.answers[0].double()).norm()) * row.divisor
    assert moved > 0.9 * min(row.clip_norm, 1e6)
    assert moved <= row.clip_norm * (1 + 1e-5) + 1e-6 * row.noise_std


@every_algorithm
def test_a_record_without_a_finite_gradient_changes_nothing(name: str) -> None:
    method, model = algorithm(name, batch_size=RECORDS), small_model()
    plan, records = planned(method, model), made_up()
    broken = with_record(records, np.full(SHAPE, np.nan, dtype=np.float32), 0)
    assert torch.equal(run(method, plan, records, model).released, run(method, plan, broken, model).released)


@every_algorithm
def test_answers_without_records_are_noise_of_the_declared_scale(name: str) -> None:
    method, model = algorithm(name), small_model()
    plan = planned(method, model)
    outcome = run(method, plan, made_up(0), model)
    for row, answer in zip(outcome.trace.rows, outcome.answers, strict=True):
        assert bool((answer != 0).any()) == (row.noise_std > 0)
        assert float(answer.abs().max()) * row.divisor <= 6 * row.noise_std


class Stopped(Exception):
    """Stands for a crash."""


def trained(name: str, folder: Path, *, stop_after: int | None = None, **settings: Any) -> tuple[Tensor, Any]:
    method, model = algorithm(name, **settings), small_model()

    def tell(step: int, _epsilon: float) -> None:
        if step == stop_after:
            raise Stopped

    state, trace = training.train(
        method,
        planned(method, model),
        model,
        open_records=made_up,
        generator=seeded_generator(3),
        run_id="one run",
        folder=folder,
        performance=Performance(),
        checkpoint_seconds=0.0,
        tell=tell,
    )
    return method.released(state), trace.rows


@every_algorithm
@pytest.mark.parametrize(
    "settings", [{}, {"update": {"optimizer": "adam", "averaging": "ema", "momentum": 0.9}}]
)
def test_taken_up_after_a_crash_it_ends_bit_for_bit_the_same(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    expected, expected_rows = trained(name, tmp_path / "whole", **settings)
    for stop_after in (1, 2, 4):
        with pytest.raises(Stopped):
            trained(name, tmp_path / "broken", stop_after=stop_after, **settings)
    released, rows = trained(name, tmp_path / "broken", **settings)
    assert torch.equal(released, expected)
    assert rows == expected_rows


@every_algorithm
def test_a_crash_between_charge_and_answer_counts_as_spent(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, model = algorithm(name, steps=1), small_model()
    plan = planned(method, model)
    outcome = run(method, plan, made_up(), model)  # for its row alone
    spend = plan.open_filter()
    monkeypatch.setattr(plan.__class__, "open_filter", lambda self: spend)
    monkeypatch.setattr(Engine, "clipped_sum", _crash)
    with pytest.raises(Stopped):
        run(method, plan, made_up(), model)
    assert spend.spent(DELTA) == outcome.trace.rows[-1].epsilon
    assert not spend.affords(plan.schedule[-1][0])


def _crash(*_arguments: Any) -> Tensor:
    raise Stopped


class Exact:
    """A stand-in for the barrier: the mean gradient over all records, without bound and noise."""

    def __init__(self, records: MadeUp) -> None:
        self.inputs, self.labels = torch.from_numpy(records.features), torch.from_numpy(records.labels)

    def gradient(self, parameters: Tensor, **_settings: Any) -> Tensor:
        model = small_model()
        values = parameters.clone().requires_grad_()
        losses = model.losses(model.outputs(model.named(values), self.inputs), self.labels)
        return torch.autograd.grad(losses.mean(), values)[0]


@every_algorithm
@pytest.mark.parametrize(
    ("update", "reference"),
    [
        ({"learning_rate": 0.3}, lambda p: torch.optim.SGD(p, lr=0.3)),
        ({"learning_rate": 0.3, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)),
        ({"learning_rate": 0.1, "optimizer": "adam", "momentum": 0.9}, lambda p: torch.optim.Adam(p, lr=0.1)),
        (
            {"learning_rate": 0.1, "optimizer": "adam", "momentum": 0.9, "weight_decay": 0.2},
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
        ),
    ],
)
def test_without_bound_and_noise_it_is_the_plain_optimiser(
    name: str, update: dict[str, Any], reference: Any
) -> None:
    method, model, records = algorithm(name, update=update), small_model(), made_up()
    plan, exact = planned(method, model), Exact(records)
    state = method.init(model.initial_parameters(), plan)
    plain = torch.nn.Parameter(model.initial_parameters())
    optimiser = reference([plain])
    for _ in range(plan.steps):
        state = method.step(state, plan, exact)  # type: ignore[arg-type]
        plain.grad = exact.gradient(plain.detach())
        optimiser.step()
    torch.testing.assert_close(method.released(state), plain.detach(), rtol=1e-5, atol=1e-6)


@every_algorithm
def test_its_file_sees_neither_data_nor_the_inside_of_the_barrier(name: str) -> None:
    tree = ast.parse(Path(inspect.getfile(CATALOGUE[name])).read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not {module for module in modules if module.split(".")[0] in ("data", "tasks", "flows")}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {attribute for attribute in attributes if attribute.startswith("_Barrier")}
