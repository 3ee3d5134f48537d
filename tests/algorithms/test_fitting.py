"""`fit`: the one call for a notebook is the pipeline's run, charged once, and refuses before anything is spent."""

import copy
import json
import logging
import math
import re
import subprocess
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from typer.testing import CliRunner

import algorithms
from algorithms import DPSGD, NonPrivate, OptimizerConfig, fit, fit_charge, fitting
from algorithms.core.method import Algorithm
from algorithms.errors import BudgetRefusedError, LedgerBrokenError, QueryFailedError, RefusedError
from algorithms.fit_model import model_of
from algorithms.fit_records import records_of
from algorithms.methods import CATALOGUE, from_settings
from algorithms.models import ModelRefusedError, build
from algorithms.models.libraries import imported_library
from algorithms.models.number_losses import CountLoss, QuantileLoss
from algorithms.models.objectives import squared_error
from algorithms.privacy.accounting import Budget
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.record_loader import RecordLoader
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.card import RunRecord, check_charged, load, text, verify
from algorithms.privacy.card import build as build_card
from algorithms.privacy.ledger import Ledger, export, restore
from data.prepared import load_as
from flows.cli.main import app
from tests.support import bench
from tests.support.checkout import PROJECT
from tests.support.costs import costs_once
from tests.support.engines import engines_once
from tests.support.refusals import refused, refused_as
from tests.support.synthetic_run import with_entries
from tests.support.threads import cpu_threads
from tests.support.transactions import transactions
from tests.support.workspace import Workspace, prepared_digits, workspace

__all__ = ["costs_once", "engines_once", "prepared_digits", "workspace"]

DELTA = 1e-3
FEW = DPSGD(steps=4, expected_batch_size=20)


def two_classes(count: int = 60) -> tuple[Any, Any]:
    X = np.random.default_rng(0).normal(size=(count, 5)).astype(np.float32)
    return X, (X[:, 0] > 0).astype(np.int64)


def linear(outputs: int = 2) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Linear(5, outputs)


def call(**changes: Any) -> fitting.Fitted:
    X, y = two_classes()
    asked = {"model": linear(), "loss": "cross_entropy", "X": X, "y": y, "method": FEW, "epsilon": 3.0}
    return fit(**(asked | {"delta": DELTA} | changes))  # type: ignore[no-any-return]


def seeded(**changes: Any) -> list[Tensor]:
    """The trained parameters of a repeatable call."""
    model = call(public=True, noise="seeded", **changes).model
    return [parameter.detach() for parameter in model.parameters()]


@cache
def usual() -> list[Tensor]:
    """What other calls are compared with; not to be changed."""
    return seeded()


@pytest.mark.usefixtures("full_inspections")
@pytest.mark.parametrize("module", [linear, lambda: nn.Sequential(nn.Flatten(), linear())])
@pytest.mark.parametrize(
    "method", [FEW, DPSGD(steps=4, expected_batch_size=60), from_settings({"name": "dp_gd", "steps": 2})]
)
def test_a_loss_that_is_scaled_by_the_number_of_records_is_refused(
    method: Any, module: Callable[[], nn.Module]
) -> None:
    """Of more records than are few, whatever number a pass of the method has."""

    def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="none") * min(1.0, 64 / len(targets))

    with refused_as("records_mixed"):
        call(model=module(), loss=scaled, method=method)


@pytest.mark.parametrize(
    ("expected", "allowed"), [(4, {2, 4, 8, 12}), (20, {16, 24, 32, 48}), (60, {48, 64, 80, 128})]
)
def test_passes_follow_from_the_expected_batch(expected: int, allowed: set[int]) -> None:
    """Of a small model, of which 60 records take hardly longer than one."""
    sizes: list[int] = []

    class Seen(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            sizes.append(len(input))
            return super().forward(input)

    call(model=Seen(5, 2), method=DPSGD(steps=4, expected_batch_size=expected))
    assert {*sizes[-4:]} <= allowed


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def ledger_rows(home: Path) -> list[str]:
    return [row.kind for row in Ledger.open(f"sqlite:///{home}/ledger.sqlite").history()]


def test_it_is_the_pipelines_run_for_the_same_seed_and_settings(workspace: Workspace) -> None:
    workspace.set("privacy", noise="seeded")
    workspace.train()
    expected = load_file(workspace.root / "artifacts/model.safetensors")
    data = load_as(workspace.root / "datasets/prepared", workspace.info)
    start = build("softmax", input_shape=workspace.info.input_shape, classes=10, seed=0).module
    method = DPSGD(steps=6, expected_batch_size=64, update=OptimizerConfig(momentum=0.9, averaging="ema"))
    own, how = (data.train_features, data.train_labels), {"public": True, "noise": "seeded", "seed": 0}
    result = fit(start, nn.CrossEntropyLoss(), *own, method=method, epsilon=3, delta=1e-5, **how)
    assert dict(result.epsilon) == workspace.receipt["epsilon"]
    found = result.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_without_privacy_and_without_sampling_it_is_plain_gradient_descent() -> None:
    X, y = two_classes()
    model, rate = linear(), 0.5
    method = NonPrivate(steps=3, expected_batch_size=60, update=OptimizerConfig(learning_rate=rate))
    found = seeded(model=model, method=method)
    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    for _ in range(3):
        outputs = functional.linear(torch.from_numpy(X), *parameters)
        gradients = torch.autograd.grad(functional.cross_entropy(outputs, torch.from_numpy(y)), parameters)
        parameters = [
            (p - rate * g).detach().requires_grad_() for p, g in zip(parameters, gradients, strict=True)
        ]
    for a, b in zip(found, parameters, strict=True):
        torch.testing.assert_close(a, b.detach())


def test_the_module_stays_as_it_was_and_the_copy_is_trained() -> None:
    model = linear()
    before = copy.deepcopy(model.state_dict())
    result = call(model=model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(result.model.state_dict()["weight"], before["weight"])
    assert (model.training, result.model.training) == (True, False)


def test_each_step_is_shown_and_shows_what_is_released() -> None:
    shown: list[fitting.Step] = []
    result = call(public=True, noise="seeded", on_step=shown.append)
    assert [(step.number, step.of) for step in shown] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [step.epsilon for step in shown] == result.trace["epsilon"].tolist()
    assert [step.noise_std for step in shown] == result.trace["noise_std"].tolist()
    assert same([*shown[-1].parameters.values()], [*result.model.state_dict().values()])
    assert not same([*shown[0].parameters.values()], [*shown[1].parameters.values()])
    assert same([*result.model.parameters()], usual())  # whether somebody looks or not


def test_an_error_of_the_function_that_is_shown_steps_ends_a_charged_call(own_home: Path) -> None:
    def enough(step: fitting.Step) -> None:
        step.parameters["weight"].zero_()  # a copy
        if step.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        call(population="visits", cap=(7.0, 1e-2), on_step=enough)
    assert "were charged before this happened" in stopped.value.__notes__[-1]
    assert ledger_rows(own_home) == ["population", "reserve", "forfeit"]
    with pytest.raises(RefusedError, match="on_step is no function"):
        call(on_step="print")


@pytest.mark.parametrize(
    ("last", "loss", "warned"),
    [
        (nn.Softmax(dim=1), "cross_entropy", "takes the softmax once more"),
        (nn.Sigmoid(), "binary_cross_entropy_with_logits", "takes the sigmoid once more"),
        (nn.LogSoftmax(dim=1), "cross_entropy", None),
        (nn.Tanh(), "cross_entropy", None),
        (nn.Softmax(dim=1), "mse_loss", None),
    ],
)
def test_probabilities_for_a_loss_of_scores_are_warned_of(
    last: nn.Module, loss: str, warned: str | None
) -> None:
    y: Any = two_classes()[1]
    if loss != "cross_entropy":
        y = np.stack([1 - y, y], axis=1).astype(np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        call(
            model=nn.Sequential(linear(), last), loss=loss, y=y, method=DPSGD(steps=1, expected_batch_size=20)
        )
    said = [one for one in caught if one.category is UserWarning and "once more" in str(one.message)]
    assert {one.filename for one in said} <= {__file__}  # the line that calls fit
    texts = [str(one.message) for one in said]
    assert len(texts) == (warned is not None) and all(warned in text for text in texts if warned)


def test_the_card_holds_against_the_files_and_says_that_no_ledger_kept_it(
    tmp_path: Path, own_home: Path
) -> None:
    result = call()
    result.save(tmp_path)
    card = load(tmp_path / "privacy_card.json")
    assert verify(card, tmp_path, unsigned=True).passed
    assert card.setting.guarantee == "private"
    assert card.cost == result.epsilon["pld"] <= 3.0
    assert text.population(card).startswith("No ledger kept this run")
    assert len(result.trace) == FEW.steps == sum(row.count for row in card.events)
    assert not any(own_home.iterdir())


def test_the_card_says_what_the_model_started_from_and_what_was_not_trained() -> None:
    layers = nn.Linear(5, 4).requires_grad_(False), nn.Linear(4, 2)
    first = call(model=nn.Sequential(*layers))
    again = call(model=first.model)
    stated = again.card.mechanism.model
    assert stated.start == first.card.evidence.files["model.safetensors"]
    assert stated.frozen == ("0.weight", "0.bias")
    assert "whoever was in both trainings loses both together" in text.statement(again.card)


def test_a_public_run_without_noise_has_a_card_that_promises_nothing(tmp_path: Path) -> None:
    result = call(method=NonPrivate(steps=2, expected_batch_size=20), public=True, noise="seeded")
    result.save(tmp_path)
    assert verify(result.card, tmp_path, unsigned=True).passed
    assert result.card.setting.guarantee == "none"


def test_a_population_is_charged_once_and_refuses_what_it_cannot_pay(own_home: Path) -> None:
    result = call(population="visits", cap=(4.0, 1e-2))
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    assert ledger_rows(own_home) == ["population", "reserve", "settle"]
    assert ledger.balance("visits").spent == Budget(result.epsilon["pld"], DELTA)
    assert result.card.setting.population == "visits"
    assert "No ledger" not in text.population(result.card)
    with pytest.raises(BudgetRefusedError):
        call(population="visits")
    assert ledger_rows(own_home) == ["population", "reserve", "settle"]


@pytest.mark.parametrize(("population", "limit"), [(None, 11), ("visits", 14)])
def test_a_call_asks_the_ledger_few_times(population: str | None, limit: int) -> None:
    """Of a population that is known: to open it, check, reserve and settle, and to state the balance on the card."""
    if population:
        call(population=population, cap=(7.0, 1e-2))
    with transactions() as begun:
        call(population=population)
    assert len(begun) <= limit


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (Barrier, "gradient", MemoryError),
        (Barrier, "gradient", KeyboardInterrupt),
        (Trace, "write", OSError),
        (Ledger, "settle", RefusedError),
    ],
)
def test_a_call_that_fails_after_its_charge_is_given_up_and_says_what_it_cost(
    owner: type, name: str, error: type[BaseException], own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        assert ledger_rows(own_home) == ["population", "reserve"]
        raise error("it broke")

    with monkeypatch.context() as patch, pytest.raises(error) as failed:
        patch.setattr(owner, name, broken)
        call(population="visits", cap=(7.0, 1e-2))
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    assert ledger_rows(own_home) == ["population", "reserve", "forfeit"]
    balance = ledger.balance("visits")
    assert balance.reserved.epsilon == 0 and balance.spent.epsilon > 2.0
    assert hasattr(failed.value, "model") is (owner is Ledger)
    assert failed.value.__notes__[-1:] == [
        f"epsilon={balance.spent.epsilon:.12g}, delta=0.001 of the population 'visits', for run"
        f" {ledger.history()[1].run_id} were charged before this happened and count as spent; the same call is not"
        " resumed, and is charged again."
    ]
    assert call(population="visits").card.setting.private


def test_a_ledger_that_is_gone_after_training_leaves_the_trained_model_to_the_caller(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError

    start = linear()
    with monkeypatch.context() as patch, pytest.raises(OSError) as failed:
        patch.setattr(Ledger, "settle", unreachable)
        patch.setattr(Ledger, "forfeit", unreachable)
        call(model=start, population="visits", cap=(7.0, 1e-2))
    model = failed.value.model  # type: ignore[attr-defined]
    assert not model.training and not torch.equal(model.weight, start.weight)
    told = " ".join(failed.value.__notes__)
    run_id = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite").history()[1].run_id
    assert "`model`, without a card" in told and f"`epsilonflow ledger forfeit {run_id}`" in told
    done = CliRunner().invoke(app, ["ledger", "forfeit", run_id, "--yes"])
    assert done.exit_code == 0 and ledger_rows(own_home) == ["population", "reserve", "forfeit"], done.output


def test_a_call_without_a_ledger_says_what_it_cost_only_once_it_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RefusedError) as refused:
        call(epsilon=-1.0)
    assert not hasattr(refused.value, "__notes__")
    monkeypatch.setattr(Barrier, "gradient", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError) as failed:
        call()
    assert "delta=0.001 were charged before this happened and count as spent" in failed.value.__notes__[0]


def test_what_a_card_cannot_state_is_refused_before_the_charge(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_a_source(run: RunRecord, *given: Any) -> Any:
        return build_card(replace(run, data=with_entries(run.data, source="")), *given)

    monkeypatch.setattr(fit_charge, "build", without_a_source)
    with refused_as("card_rehearsal_failed"):
        call(population="visits", cap=(9.0, 1e-2))
    assert ledger_rows(own_home) == []


def test_numbers_of_numpy_and_settings_by_name_are_taken_as_those_of_python() -> None:
    update = {"learning_rate": np.float32(0.5)}
    method: Any = DPSGD(steps=np.int64(4), expected_batch_size=np.int32(20), update=update)
    numbers = {"epsilon": np.float32(3), "delta": np.float64(DELTA), "seed": np.int64(0)}
    found = seeded(method=method, memory_mb=np.int64(500), device=torch.device("cpu"), **numbers)
    plain = DPSGD(steps=4, expected_batch_size=20, update=OptimizerConfig(learning_rate=0.5))
    assert same(found, seeded(method=plain))


def test_an_older_copy_of_the_ledger_that_was_put_back_is_refused(own_home: Path) -> None:
    url, copy = f"sqlite:///{own_home}/ledger.sqlite", own_home / "yesterday"
    call(population="visits", cap=(4.0, 1e-2))
    export(Ledger.open(url), copy)
    call(population="others", cap=(4.0, 1e-2))
    (own_home / "ledger.sqlite").unlink()
    restore(copy, url)
    with pytest.raises(
        LedgerBrokenError, match="an older copy was put back; restore the newest copy, or remove"
    ):
        call(population="others", cap=(4.0, 1e-2))
    assert ledger_rows(own_home) == ["population", "reserve", "settle"]


def test_a_population_that_is_charged_in_another_ledger_is_refused(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"ledger": f"sqlite:///{own_home}/other.sqlite", "population": "visits", "cap": (9.0, 1e-2)}
    with monkeypatch.context() as patch:  # which is for calls that name no ledger
        patch.setenv("EPSILONFLOW_LEDGER_URL", f"sqlite:///{own_home}/ledger.sqlite")
        call(**other)
    with refused_as("charged_elsewhere", population="visits"):
        call(population="visits", cap=(9.0, 1e-2))
    assert ledger_rows(own_home) == []
    call(**other)


def a_number(**changes: Any) -> fitting.Fitted:
    X, _ = two_classes(400)
    y = (0.3 + 0.02 * np.tanh(X[:, 0])).astype(np.float32)
    asked = {"model": linear(1), "loss": "mse_loss", "X": X, "y": y, "target_scale": 0.05}
    return call(**(asked | changes))


@pytest.mark.parametrize(
    "loss",
    ["mse_loss", nn.MSELoss(), squared_error, CountLoss(), QuantileLoss(0.5)],
    ids=["name", "module", "function", "counts", "quantile"],
)
def test_a_number_is_trained_and_predicted_on_its_released_scale(loss: Any, tmp_path: Path) -> None:
    steps: list[fitting.Step] = []
    result = a_number(loss=loss, on_step=steps.append)
    assert len(result.trace) == FEW.steps + 1 and result.epsilon["pld"] <= 3.0
    assert verify(result.card, unsigned=True).passed
    result.save(tmp_path)
    tensors, X = load_file(tmp_path / "model.safetensors"), torch.randn(5, 5)
    assert abs(float(tensors["features.centre"]) - 0.3) < 0.1 and float(tensors["features.scale"]) < 0.2
    own = linear(1)
    own.load_state_dict(steps[-1].parameters)
    centre, scale = tensors["features.centre"], tensors["features.scale"]
    if isinstance(loss, CountLoss):
        rate = (centre + 1) / 2 * own(X).clamp(max=1).exp()
        below = own(X)[:, 0] <= 1
        assert below.any() and torch.allclose(result.model(X)[below], (2 * rate - 1)[below], atol=1e-5)
    else:
        assert torch.allclose(result.model(X), centre + scale * own(X), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target_scale": 5}, "give a share of the budget"),
        ({"target_scale": "0.05"}, "give a number"),
        ({"delta": 0.0}, "set delta to one above 0"),
        ({"model": linear(2), "loss": lambda outputs, y: (outputs[:, 0] - y).square()}, "another shape"),
        ({"loss": lambda outputs, y: (outputs[:, 0] - y).abs()}, "target_scale puts .* a loss of its own"),
        ({"loss": "l1_loss"}, "target_scale puts .* a loss of its own"),
    ],
)
def test_a_scale_that_cannot_be_is_refused_before_anything_is_spent(
    changes: Any, sentence: str, own_home: Path
) -> None:
    with pytest.raises(RefusedError, match=sentence):
        a_number(**changes, population="people", cap=(9.0, 1e-2))
    assert ledger_rows(own_home) in ([], ["population"])


@pytest.mark.parametrize("epsilon", [0, -1.0, float("nan"), float("inf"), 20_000])
def test_a_target_that_is_no_budget_is_refused(epsilon: float, own_home: Path) -> None:
    with pytest.raises(
        RefusedError, match=rf"epsilon is {epsilon:g}; give a number above 0, .*at most 10000"
    ):
        call(epsilon=epsilon, population="visits", cap=(9.0, 1e-2))
    assert ledger_rows(own_home) == []


def test_what_the_accountant_or_a_private_number_needs_is_refused() -> None:
    with refused_as("rate_missing"):
        call(n_is_public=False, delta=1e-5)
    with refused_as("not_purely_private", mechanism="Gaussian noise"):
        call(accountant="pure", delta=0.0)


def test_a_private_number_of_records_is_released_with_noise_and_charged() -> None:
    method = DPSGD(steps=4, sampling_rate=0.2)
    result = call(method=method, delta=1e-5, n_is_public=False)
    assert result.trace["kind"].iloc[0] == "total"
    assert len(result.trace) == 5
    assert result.card.setting.records is None


def test_a_dataset_stands_for_both_arrays_and_tensors_for_arrays() -> None:
    X, y = map(torch.from_numpy, two_classes())
    assert same(seeded(X=X, y=y), usual())
    assert same(seeded(X=TensorDataset(X, y), y=None), usual())


def test_items_of_a_dataset_are_not_kept_beside_the_array() -> None:
    X, y = map(torch.from_numpy, two_classes())
    items: list[weakref.ref[Tensor]] = []

    class Items(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            item = X[index].clone()
            assert sum(each() is not None for each in items) <= 1
            items.append(weakref.ref(item))
            return item, y[index]

    assert same(seeded(X=Items(), y=None), usual())
    assert len(items) == len(X)


def test_numbers_of_a_dataset_may_be_of_several_types() -> None:
    class Items(Dataset[Any]):
        items = ((np.array([0, 1], np.float32), 0), (np.array([2, 3]), 1), (np.array([4, 5.5]), np.int8(1)))

        def __len__(self) -> int:
            return len(self.items)

        def __getitem__(self, index: int) -> Any:
            return self.items[index]

    records = records_of(nn.Linear(2, 2), Items(), None, nn.CrossEntropyLoss())
    assert records.features.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.5]]
    assert records.labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        functional.cross_entropy,
        lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="none"),
    ],
)
def test_the_same_loss_in_other_words_gives_the_same_model(loss: Any) -> None:
    assert same(seeded(loss=loss), usual())


def test_whole_numbers_are_numbers_for_a_loss_of_numbers() -> None:
    y = np.arange(60) - 10
    found = [seeded(model=linear(1), loss="mse_loss", y=y.astype(kind)) for kind in (np.int64, np.float32)]
    assert same(*found)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_gradients_are_taken_where_they_are_switched_off(
    mode: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    expected, model = usual(), linear()
    with mode():
        assert same(seeded(model=model), expected)
    assert "record by record" not in "".join(capfd.readouterr())


def test_settings_of_pytorch_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training on a GPU makes PyTorch deterministic, and on a CPU it takes few threads."""

    def changing(name: str) -> torch.device:
        torch.set_deterministic_debug_mode("error")
        torch.set_num_threads(1)
        return torch.device(name)

    monkeypatch.setattr(fitting, "device_of", changing)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        call(device="cpu")
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (3, False)
    finally:
        torch.set_num_threads(before)


def test_short_passes_leave_the_cores_to_others_and_the_setting_as_it_was() -> None:
    """Threads that wait for each other at each operation of a short pass take 20 times as long on a busy machine."""
    seen: list[int] = []
    with cpu_threads(2):
        call(on_step=lambda _: seen.append(torch.get_num_threads()))
        assert torch.get_num_threads() == 2
    assert set(seen) == {1}


def test_a_default_device_other_than_the_cpu_is_refused() -> None:
    model = linear()
    with torch.device("meta"), pytest.raises(RefusedError, match=r"default device is meta; set it to cpu"):
        call(model=model)


def test_a_regression_is_trained_on_each_records_own_target() -> None:
    """[batch, 1] outputs beside [batch] targets would be broadcast to all pairs of records."""
    X, _ = two_classes()
    y = X @ np.arange(5.0) + 1.0
    update = OptimizerConfig(learning_rate=0.2)
    method = NonPrivate(steps=60, expected_batch_size=60, update=update)
    for loss in ("mse_loss", nn.MSELoss(), lambda outputs, targets: (outputs - targets).square()):
        weight, bias = seeded(model=linear(1), loss=loss, y=y, method=method)
        torch.testing.assert_close(weight[0], torch.arange(5.0), atol=1e-2, rtol=0.0)
        torch.testing.assert_close(bias, torch.ones(1), atol=1e-2, rtol=0.0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: (outputs[:, 0] - targets).square(),
        lambda outputs, targets: (outputs.squeeze(1) - targets).square(),
        lambda outputs, targets: (outputs - targets[:, None]).square().sum(dim=1),
        lambda outputs, targets: (outputs - targets).square(),
    ],
)
def test_a_loss_of_ones_own_may_take_one_output_as_the_model_gives_it(loss: Any) -> None:
    X, _ = two_classes()
    method = NonPrivate(steps=3, expected_batch_size=60)
    found, expected = (
        seeded(model=linear(1), loss=each, y=X @ np.arange(5.0), method=method) for each in (loss, "mse_loss")
    )
    assert same(found, expected)


@pytest.mark.parametrize("loss", ["mse_loss", lambda outputs, targets: (outputs - targets).square()])
def test_a_model_may_give_one_number_for_each_record(loss: Any) -> None:
    X, _ = two_classes()
    method = NonPrivate(steps=3, expected_batch_size=60)
    one, flat = (
        seeded(model=model, loss=loss, y=X @ np.arange(5.0), method=method)
        for model in (linear(1), nn.Sequential(linear(1), nn.Flatten(0)))
    )
    assert same(one, flat)


def test_a_loss_of_ones_own_gets_targets_in_the_shape_they_were_given() -> None:
    """Two outputs are compared with targets [batch, 1] each; beside [batch] they would be broadcast otherwise."""
    X, _ = two_classes()
    y = (X @ np.arange(5.0))[:, None]
    shapes = set()

    def pinball(outputs: Tensor, targets: Tensor) -> Tensor:
        shapes.add(tuple(targets.shape[1:]))
        above = targets - outputs
        return torch.maximum(torch.tensor([0.1, 0.9]) * above, torch.tensor([-0.9, -0.1]) * above).sum(dim=1)

    method = NonPrivate(steps=30, expected_batch_size=60, update=OptimizerConfig(learning_rate=0.2))
    weight, bias = seeded(model=linear(2), loss=pinball, y=y, method=method)
    assert shapes == {(1,)}
    low, high = (torch.from_numpy(X).float() @ weight.T + bias).T
    assert float((low < high).float().mean()) > 0.9


def _not_finite() -> nn.Module:
    layer = nn.Linear(5, 2)
    nn.init.constant_(layer.bias, math.inf)
    return layer


def _inferring() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(5, 2)


class _Sum(nn.Linear):
    """One number for all records."""

    def __init__(self) -> None:
        super().__init__(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).sum()


class _Tokens(nn.Module):
    """Tokens [batch, length] to a class of each, [batch, length, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.over, self.head = (
            nn.Embedding(30, 4),
            nn.GRU(4, 4, batch_first=True),
            nn.Linear(4, 3),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.over(self.table(tokens))[0])
        return found


class _Mixed(nn.Module):
    """Numbers, categories and a mask of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.cities, self.kinds = nn.Embedding(9, 4), nn.Embedding(3, 4)
        self.numbers, self.out = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, numbers: Tensor, city: Tensor, kind: Tensor, known_mask: Tensor) -> Tensor:
        parts = torch.stack([self.numbers(numbers), self.cities(city), self.kinds(kind)], 1)
        counted = known_mask[:, :, None].to(parts.dtype)
        found: Tensor = self.out((parts * counted).sum(1) / counted.sum(1))
        return found


class _Cities(nn.Module):
    """Two categories of each record, in a mapping; a mapping, as well."""

    def __init__(self) -> None:
        super().__init__()
        self.cities, self.kinds = nn.Embedding(2, 2), nn.Embedding(3, 2)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": self.cities(batch["city"]) + self.kinds(batch["kind"])}


def _library(task: str, model_type: str, **settings: Any) -> nn.Module:
    transformers = imported_library("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(model_type, vocab_size=30, **settings)
        module: nn.Module = getattr(transformers, f"AutoModelFor{task}").from_config(config)
        return module.eval()


_BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
_GPT = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "bos_token_id": 1, "eos_token_id": 2}
_TEXTS, _LENGTH = 16, 6


def _texts() -> tuple[dict[str, Any], Any]:
    """Token ids with their mask, and where there are any."""
    draw = np.random.default_rng(1)
    there = np.arange(_LENGTH) < draw.integers(2, _LENGTH + 1, (_TEXTS, 1))
    ids = np.where(there, draw.integers(3, 30, (_TEXTS, _LENGTH)), 0)
    return {"input_ids": ids, "attention_mask": there.astype(int)}, there


STRUCTURED = (
    *("tokens of texts", "several labels", "the next token", "tokens without a mapping"),
    *("pixels", "numbers and categories", "several numbers", "classes of each record"),
)


def _structured(name: str) -> tuple[nn.Module, str, Any, Any]:
    """A model, its loss, records and targets that are more than one array or one number each."""
    (texts, there), draw = _texts(), np.random.default_rng(2)
    each = np.where(there, draw.integers(0, 3, (_TEXTS, _LENGTH)), -100)
    images = draw.normal(size=(_TEXTS, 1, 5, 4))
    numbers = {"numbers": draw.normal(size=(_TEXTS, 5)), "city": draw.integers(0, 9, _TEXTS)}
    kinds = {"kind": draw.integers(0, 3, _TEXTS), "known_mask": draw.random((_TEXTS, 3)) < 0.5}
    kinds["known_mask"][:, 0] = True
    following = np.where(np.roll(there, -1, 1) & there, np.roll(texts["input_ids"], -1, 1), -100)
    types = texts | {"token_type_ids": draw.integers(0, 2, (_TEXTS, _LENGTH))}
    several = draw.integers(0, 2, (_TEXTS, 3))
    cases: dict[str, tuple[Callable[[], nn.Module], str, Any, Any]] = {
        "tokens of texts": (
            lambda: _library("TokenClassification", "bert", **_BERT, num_labels=3),
            "cross_entropy",
            texts,
            each,
        ),
        "several labels": (
            lambda: _library("SequenceClassification", "bert", **_BERT, num_labels=3),
            "binary_cross_entropy_with_logits",
            types,
            several,
        ),
        "the next token": (lambda: _library("CausalLM", "gpt2", **_GPT), "cross_entropy", texts, following),
        "tokens without a mapping": (_Tokens, "cross_entropy", texts["input_ids"], each),
        "pixels": (
            lambda: nn.Conv2d(1, 3, 3, padding=1),
            "cross_entropy",
            images,
            draw.integers(0, 3, (_TEXTS, 5, 4)),
        ),
        "numbers and categories": (_Mixed, "cross_entropy", numbers | kinds, draw.integers(0, 2, _TEXTS)),
        "several numbers": (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 3)),
            "mse_loss",
            numbers["numbers"],
            draw.normal(size=(_TEXTS, 3)),
        ),
        "classes of each record": (
            lambda: nn.Linear(5, 3),
            "multilabel_margin_loss",
            numbers["numbers"],
            np.where(
                np.arange(3) < draw.integers(1, 4, (_TEXTS, 1)),
                draw.permuted([[0, 1, 2]] * _TEXTS, axis=1),
                -1,
            ),
        ),
    }
    make, loss, records, targets = cases[name]
    return make(), loss, records, targets


def _own_loss(model: nn.Module, loss: str, X: Any, y: Any, place: int) -> Tensor:
    """A record's loss as PyTorch has it for that record alone: the mean over what counts."""
    one = slice(place, place + 1)
    tensors = {
        name: torch.as_tensor(part[one]) for name, part in (X if isinstance(X, dict) else {"": X}).items()
    }
    tensors = {name: part.float() if part.is_floating_point() else part for name, part in tensors.items()}
    found = model(**tensors) if isinstance(X, dict) else model(*tensors.values())
    outputs, target = getattr(found, "logits", found), torch.as_tensor(y[one])
    if loss != "cross_entropy":
        target = target if loss == "multilabel_margin_loss" else target.float()
        return getattr(functional, loss)(outputs, target)  # type: ignore[no-any-return]
    if target.dim() == 2:
        outputs, target = outputs.flatten(0, 1), target.flatten()
    return functional.cross_entropy(outputs, target)


@pytest.mark.parametrize("name", STRUCTURED)
def test_records_and_targets_of_several_parts(name: str) -> None:
    """A step over all records without noise or clipping is PyTorch's own, and a private one trains.

    Models of a library are looked at once, which takes a second.
    """
    model, loss, X, y = _structured(name)
    rate = 0.5
    method = NonPrivate(steps=1, expected_batch_size=_TEXTS, update=OptimizerConfig(learning_rate=rate))
    found = seeded(model=model, loss=loss, X=X, y=y, method=method)
    total = sum((_own_loss(model, loss, X, y, place) for place in range(_TEXTS)), torch.zeros(()))
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(total / _TEXTS, parameters, allow_unused=True)
    for value, gradient, parameter in zip(found, gradients, parameters, strict=True):
        step = torch.zeros_like(parameter) if gradient is None else gradient
        torch.testing.assert_close(value, parameter.detach() - rate * step, atol=1e-6, rtol=1e-4)
    all_of_them = DPSGD(steps=2, expected_batch_size=_TEXTS)
    private = call(model=model, loss=loss, X=X, y=y, method=all_of_them, delta=1e-2)
    assert private.card.setting.guarantee == "private"
    assert private.model.state_dict().keys() == model.state_dict().keys()


def test_a_dataset_of_mappings_has_its_labels_among_them() -> None:
    model, loss, X, y = _structured("numbers and categories")
    rows = [{name: part[place] for name, part in X.items()} | {"labels": y[place]} for place in range(_TEXTS)]
    few = DPSGD(steps=1, expected_batch_size=4)
    expected = seeded(model=model, loss=loss, X=X, y=y, method=few, delta=1e-2)
    assert same(seeded(model=model, loss=loss, X=Rows(rows), y=None, method=few, delta=1e-2), expected)


class Rows:
    """A data set as the libraries have it: a length, and items by their place."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self._rows[place]


def test_a_table_of_pandas_may_have_columns_of_several_types() -> None:
    X, y = two_classes()
    table, labels = pd.DataFrame(X, columns=list("abcde")), pd.Series(y)
    assert same(seeded(X=table.astype("Float64"), y=labels.astype("Int64")), usual())
    marked = table.assign(a=table["a"] > 0)  # as pd.get_dummies has it
    assert same(seeded(X=marked, y=labels), seeded(X=marked.astype("float32")))


def test_tensors_may_be_in_16_bits_and_need_gradients() -> None:
    X = torch.from_numpy(two_classes()[0]).bfloat16()
    assert same(seeded(X=X), seeded(X=X.float().requires_grad_()))


class _Focal(nn.Module):
    """A loss of classes as many projects have it."""

    def __init__(self, weight: Tensor, reduction: str = "mean") -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = functional.cross_entropy(outputs, targets, weight=self.weight, reduction="none")
        return found.mean() if self.reduction == "mean" else found


class _Weighted(nn.CrossEntropyLoss):
    """PyTorch's own in other words."""


@pytest.mark.parametrize("loss", [_Focal, lambda weight: _Weighted(weight, reduction="none")])
def test_a_loss_of_ones_own_with_a_reduction_takes_classes(loss: Callable[..., nn.Module]) -> None:
    weight = torch.tensor([1.0, 3.0])
    assert same(seeded(loss=loss(weight)), seeded(loss=nn.CrossEntropyLoss(weight, reduction="none")))


@pytest.mark.parametrize("y", [2 * two_classes()[1] - 1, 7 * two_classes()[1]])
def test_whole_targets_that_are_no_classes_are_numbers_for_a_loss_of_ones_own(y: Any) -> None:
    def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.relu(1.0 - outputs[:, 0] * targets)

    found = [seeded(model=linear(1), loss=hinge, y=y.astype(kind)) for kind in (np.int64, np.float32)]
    assert same(*found)


def test_a_models_own_autocast_is_ignored_in_training_and_stays_in_the_model() -> None:
    """In 16 bits, rounding would hide whether records mix: it trains in 32, as without autocast."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        halved = _Halved(by_autocast=True)
    plain = nn.Sequential(copy.deepcopy(halved.first), nn.ReLU(), copy.deepcopy(halved.last))
    enter = torch.autocast.__enter__
    assert same(seeded(model=halved), seeded(model=plain))
    assert torch.autocast.__enter__ is enter
    with torch.autocast("cpu", torch.bfloat16):
        assert halved.first(torch.ones(1, 5)).dtype == torch.bfloat16


def test_several_heads_may_come_as_one_tensor() -> None:
    def both(outputs: Tensor, targets: Tensor) -> Tensor:
        return _by_class(outputs[:, :2], targets) + outputs[:, 2].square()

    joined = _Several(lambda *heads: torch.cat(heads, dim=1))
    assert call(model=joined, loss=both).card.setting.private


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"epochs": 3},
            r"DPSGD has no setting 'epochs', perhaps steps=\.\.\. \(n / expected_batch_size for each",
        ),
        (
            {"learning_rate": 0.1},
            r"'learning_rate', perhaps update=OptimizerConfig\(learning_rate=\.\.\.\); its settings",
        ),
        (
            {"lr": 0.1},
            r"'lr', perhaps update=OptimizerConfig\(learning_rate=\.\.\.\); its settings are steps, ",
        ),
        ({"max_grad_norm": 1.0}, r"'max_grad_norm', perhaps clip_norm=\.\.\.; "),
        (
            {"noise_multiplier": 1.0},
            "'noise_multiplier', perhaps epsilon of fit, for which the noise is found",
        ),
        ({"n_epochs": 3}, r"'n_epochs', perhaps steps=\.\.\. \(n / expected_batch_size for each"),
        ({"sigma": 1.0}, "'sigma', perhaps epsilon of fit"),
        ({"expected_batchsize": 1}, r"'expected_batchsize', perhaps expected_batch_size=\.\.\.; "),
    ],
)
def test_a_setting_that_does_not_exist_is_refused_with_the_one_that_was_meant(
    settings: dict[str, Any], words: str
) -> None:
    with refused(words):
        DPSGD(steps=2, **settings)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "groups",
            "fit has no argument 'groups', perhaps people; its arguments are model, loss, X, y, method,",
        ),
        ("target_epsilon", "'target_epsilon', perhaps epsilon; "),
        ("eps", "'eps', perhaps epsilon; "),
        ("user_id", "'user_id', perhaps people; "),
        ("random_state", "'random_state', perhaps seed; "),
        ("targets", "'targets', perhaps y; "),
        ("precision", "no argument 'precision'; "),  # which is not like epsilon
        ("batch_size", r"'batch_size', perhaps method=DPSGD\(expected_batch_size=\.\.\.\); "),
        ("lr", r"'lr', perhaps method=DPSGD\(update=OptimizerConfig\(learning_rate=\.\.\.\)\); "),
    ],
)
def test_an_argument_that_does_not_exist_is_refused_with_the_one_that_was_meant(
    name: str, words: str
) -> None:
    with refused(words):
        call(**{name: 1})
    with pytest.raises(TypeError):  # as any function of Python
        call(**{name: 1})


def test_an_optimizers_setting_that_does_not_exist_is_refused_with_the_one_that_was_meant() -> None:
    with refused(
        "OptimizerConfig has no setting 'lr', perhaps learning_rate=...; its settings are learning_rate,"
    ):
        OptimizerConfig(lr=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize("value", [1.0, None])
def test_a_loss_that_is_no_tensor_is_named(value: float | None) -> None:
    with pytest.raises(ModelRefusedError, match=f"the loss gives a {type(value).__name__}, but it has to"):
        seeded(loss=lambda outputs, targets: value)


def test_a_model_may_end_in_a_sigmoid() -> None:
    """BCELoss raises an error for NaN, which a record must not be able to cause."""
    method = NonPrivate(steps=3, expected_batch_size=60)
    found = seeded(model=nn.Sequential(linear(1), nn.Sigmoid()), loss=nn.BCELoss(), method=method)
    expected = seeded(model=linear(1), loss=nn.BCEWithLogitsLoss(), method=method)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_errors_of_a_data_set_are_its_own() -> None:
    class Broken(Rows):
        def __getitem__(self, place: int) -> dict[str, Any]:
            raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        call(X=Broken([{}]), y=None)


def test_a_folder_that_cannot_be_written_is_refused_and_the_result_stays(tmp_path: Path) -> None:
    result = call()
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match=r"file \(File exists\); give a folder"):
        result.save(tmp_path / "file")
    result.save(tmp_path / "folder")
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {*result.files}


def test_a_model_may_take_and_give_a_mapping() -> None:
    _, y = two_classes()
    result = call(model=_Cities(), X={"city": y, "kind": y})
    assert result.card.setting.guarantee == "private"


@pytest.mark.parametrize("part", ["numbers", "city", "known_mask"])
def test_records_that_mix_through_one_of_their_parts_are_refused(part: str, own_home: Path) -> None:
    """Each by what another record of the batch has there."""

    class Mixing(_Mixed):
        def forward(self, numbers: Tensor, city: Tensor, kind: Tensor, known_mask: Tensor) -> Tensor:
            parts = {"numbers": numbers, "city": city, "known_mask": known_mask}
            of_all = parts[part].to(numbers.dtype).mean()
            return super().forward(numbers + of_all, city, kind, known_mask)

    _, loss, X, y = _structured("numbers and categories")
    method, people = DPSGD(steps=2, expected_batch_size=8), {"population": "visits", "cap": (9.0, 0.5)}
    with refused_as("records_mixed"):
        call(model=Mixing(), loss=loss, X=X, y=y, method=method, delta=1e-2, **people)
    assert ledger_rows(own_home) == []


class _Quantised(nn.Module):
    """Frozen weights of few bits, and an adapter beside them that is trained."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Parameter((10 * torch.randn(8, 5)).to(dtype), requires_grad=False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.linear(inputs, 0.1 * self.base.float()) + self.up(self.down(inputs))
        found: Tensor = self.head(torch.tanh(hidden))
        return found


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_frozen_weights_may_have_few_bits(dtype: torch.dtype) -> None:
    model = _Quantised(dtype)
    trained = call(model=model).model
    assert torch.equal(trained.base, model.base) and trained.base.dtype == dtype
    assert not torch.equal(trained.down.weight, model.down.weight)


def test_an_embedding_may_ask_for_sparse_gradients() -> None:
    layers = nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(20, 2)
    trained = call(model=nn.Sequential(*layers), X=np.ones((60, 5), int)).model
    assert trained[0].sparse and not torch.equal(trained[0].weight, layers[0].weight)


def test_a_module_may_rename_its_weights_where_they_are_loaded() -> None:
    """As modules do that read checkpoints of an earlier version; the weights came back untrained."""

    class Renamed(nn.Linear):
        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            state.pop(f"{prefix}weight")
            super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[no-untyped-call]

    model = Renamed(5, 2)
    model.weight, model.bias = linear().parameters()
    assert same(seeded(model=model), usual())


def test_a_hook_may_keep_what_the_model_computes(own_home: Path) -> None:
    """The module can then not be copied again, and the result was lost after the charge."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda *given: setattr(model, "features", given[-1]))
    assert not torch.equal(
        call(model=model, population="visits", cap=(9.0, 0.5)).model[1].weight, model[1].weight
    )
    assert ledger_rows(own_home)[-1] == "settle"


class _Keeping(nn.Linear):
    """Keeps the weight of its first pass in evaluation mode, and its last outputs."""

    scaled: Tensor | None = None

    def train(self, mode: bool = True) -> "_Keeping":
        self.scaled = None if mode else self.scaled
        return super().train(mode)

    def forward(self, input: Tensor) -> Tensor:
        if self.scaled is None or self.training:
            self.scaled = 2 * self.weight
        self.last = functional.linear(input, self.scaled, self.bias)
        return self.last


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("keeping", [lambda: _Keeping(5, 2), lambda: nn.utils.weight_norm(nn.Linear(5, 2))])
def test_what_a_model_keeps_of_an_earlier_pass_is_not_used(keeping: Callable[[], nn.Module]) -> None:
    model, records = keeping().eval(), torch.ones(1, 5)
    model(records)
    trained = call(model=model).model
    assert not any(
        torch.equal(part, start) for part, start in zip(trained.parameters(), model.parameters(), strict=True)
    )
    fresh = keeping().eval()
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(trained(records), fresh(records))


def test_weights_in_another_order_of_memory_are_trained_and_returned(own_home: Path) -> None:
    """safetensors writes contiguous tensors only, and an expanded one cannot be overwritten."""
    frozen = nn.Linear(5, 4).requires_grad_(False)
    frozen.weight.data = frozen.weight.data.T.contiguous().T
    frozen.register_buffer("scale", torch.ones(1).expand(4))
    model = nn.Sequential(frozen, nn.Linear(4, 2))
    trained = call(model=model, population="visits", cap=(9.0, 0.5)).model
    assert torch.equal(trained[0].weight, frozen.weight)
    assert ledger_rows(own_home)[-1] == "settle"


def _sparse() -> nn.Module:
    layer = nn.Linear(5, 2)
    layer.register_buffer("neighbours", torch.eye(5).to_sparse_csr())
    return layer


def _hooked() -> nn.Module:
    layer = nn.Linear(5, 2)
    layer.weight.register_hook(lambda gradient: 0.0 * gradient)
    return layer


class _Experts(nn.Linear):
    """An expert of transformers, whose configuration says how tokens get to theirs."""

    def __init__(self) -> None:
        super().__init__(5, 2)
        self.config = SimpleNamespace(_experts_implementation="grouped_mm")


class _Named(NamedTuple):
    logits: Tensor
    hidden: Tensor


@pytest.mark.parametrize("named", [_Named, lambda logits, hidden: {"logits": logits, "hidden": hidden}])
def test_of_several_outputs_the_logits_are_used(named: Callable[[Tensor, Tensor], Any]) -> None:
    class Both(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return named(super().forward(input), input)

    module = Both(5, 2)
    records = records_of(module, np.zeros((4, 5), np.float32), np.array([0, 1, 0, 1]), "cross_entropy")
    model, classes, _ = model_of(module, "cross_entropy", records)
    outputs = model.outputs(model.by_name(model.initial_parameters()), torch.ones(3, 5))
    assert (tuple(outputs.shape), classes) == ((3, 2), 2)


@pytest.mark.parametrize(("is_trained", "expected"), [(True, "batched_mm"), (False, "grouped_mm")])
def test_the_tokens_of_all_records_are_not_sorted_by_trained_experts(is_trained: bool, expected: str) -> None:
    experts = _Experts().requires_grad_(is_trained)
    module = nn.Sequential(experts, nn.Linear(2, 2))
    records = records_of(module, np.zeros((4, 5), np.float32), np.array([0, 1, 0, 1]), "cross_entropy")
    model, _, _ = model_of(module, "cross_entropy", records)
    own = next(layer for layer in model.module.modules() if isinstance(layer, _Experts))
    assert own.config._experts_implementation == expected
    assert experts.config._experts_implementation == "grouped_mm"


def _locked() -> nn.Module:
    layer = nn.Linear(5, 2)
    layer.lock = Lock()  # type: ignore[assignment]
    return layer


class _Complex(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 2)
        self.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_method_trains_or_is_refused_in_a_sentence(name: str, own_home: Path) -> None:
    method: Algorithm[Any] = bench.algorithm(name)
    free = name in ("non_private", "sgd_adv") or _is_not_private(method)
    try:
        result = call(method=method, accountant="rdp", public=free, noise="seeded" if free else "secure")
    except RefusedError as refusal:
        assert str(refusal).rstrip().endswith(".")
        assert name not in ("dp_sgd", "dp_gd", "adaclip", "dpis", "non_private", "sgd_ma", "dp_agd")
    else:
        assert result.card.mechanism.algorithm == name
        assert verify(result.card, unsigned=True).passed


def _is_not_private(method: Algorithm[Any]) -> bool:
    model = bench.small_model()
    try:
        return bench.planned(method, model).not_private is not None
    except RefusedError:
        return False


class _Several(nn.Module):
    """Two heads, joined in some way."""

    def __init__(self, joined: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second, self.joined = nn.Linear(5, 2), nn.Linear(5, 1), joined

    def forward(self, inputs: Tensor) -> Any:
        return self.joined(self.first(inputs), self.second(inputs))


class _Halved(nn.Module):
    """A layer in 16 bits, by autocast or by conversions of its own."""

    def __init__(self, *, by_autocast: bool) -> None:
        super().__init__()
        self.first, self.last, self.by_autocast = nn.Linear(5, 6), nn.Linear(6, 2), by_autocast

    def forward(self, inputs: Tensor) -> Tensor:
        if self.by_autocast:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.first(inputs)
        else:
            weight, bias = (part.bfloat16() for part in self.first.parameters())
            hidden = functional.linear(inputs.bfloat16(), weight, bias)
        found: Tensor = self.last(torch.relu(hidden.float()))
        return found


def _by_class(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def _fractional() -> nn.Module:
    """Its windows differ between draws, as (9 - 2) / (3 - 1) is no whole number."""
    layers = nn.Unflatten(1, (1, 1, 5)), nn.Upsample(size=(9, 9)), nn.FractionalMaxPool2d(2, output_size=3)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(9, 2))


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)

    def __len__(self) -> int:
        return 60


class _OfNumpy(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.from_numpy(super().forward(inputs).detach().numpy())


class _Late(NamedTuple):
    """A value that is made when a test asks, as it imports much: PyTorch's compiler, or Opacus."""

    make: Callable[[], Any]


def _compiled() -> nn.Module:
    return torch.compile(nn.Linear(5, 2))  # type: ignore[return-value]


def _opacus() -> nn.Module:
    from opacus import GradSampleModule

    wrapped: nn.Module = GradSampleModule(nn.Linear(5, 2))
    return wrapped


_ODD = type("Odd", (), dict.fromkeys(("plan", "init", "step", "released")))()


X, Y = two_classes()


def refusals(X: Any, Y: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """What is refused of a call with these records, by name: what is changed, and words of the refusal."""
    N = len(Y)
    return {
        "lengths": ({"y": Y[:-1]}, "of the same number of records"),
        "no records": ({"X": X[:0], "y": Y[:0]}, "of the same number of records"),
        "missing targets": ({"y": None}, "y is missing"),
        "a dataset of no pairs": ({"X": TensorDataset(torch.zeros(3, 5)), "y": None}, "does not hold pairs"),
        "NaN targets": ({"y": np.where(Y == 1, np.nan, 0.0)}, "y holds NaN"),
        "infinite records": ({"X": np.where(X > 0, np.inf, X)}, "X holds NaN or infinite"),
        "texts": (
            {"y": np.array(["yes"] * N)},
            r"^y holds texts; give classes as whole numbers from 0, such as \[classes\.index\(text\) for text in y\]",
        ),
        "texts of pandas": ({"y": pd.Series(["yes"] * N)}, "^y holds texts; give classes as whole numbers"),
        "texts as bytes": ({"y": np.array([b"yes"] * N)}, "^y holds texts; give classes as whole numbers"),
        "texts in a table": (
            {"y": pd.DataFrame({"ill": ["yes"] * N})},
            "^y holds texts; give classes as whole numbers",
        ),
        "dates": (
            {"y": pd.Series(pd.date_range("2020-01-01", periods=N))},
            "^y holds dates or times; give numbers, such as days since a date",
        ),
        "records of texts": ({"X": X.astype(str)}, "^X holds texts; leave them out, or encode them"),
        "Opacus's wrapper": (
            {"model": _Late(_opacus)},
            r"wrapped by Opacus's GradSampleModule, .*give the module inside of it, by \.to_standard_module\(\)",
        ),
        "Opacus's wrapper around a layer": (
            {"model": _Late(lambda: nn.Sequential(_opacus()))},
            r"^the layer 0 of the model is wrapped by Opacus's GradSampleModule, .*, by \.to_standard_module\(\)",
        ),
        "two tensors": (
            {"model": _Several(lambda *heads: heads)},
            r"returns a tuple of 2; .*torch\.cat\(heads, dim=1\)",
        ),
        "a mapping without logits": (
            {"model": _Several(lambda first, second: {"a": first, "b": second})},
            r"returns a dict of a, b, and no `logits`; .*torch\.cat\(heads, dim=1\)",
        ),
        "whole numbers below 0 for a loss of classes": (
            {"loss": _by_class, "y": 2 * Y - 1},
            r"y holds classes below 0; count the classes from 0, or give y as real numbers, by \.astype\('float32'\)",
        ),
        "16 bits by conversions": (
            {"model": _Halved(by_autocast=False)},
            r"^the model _Halved computes in 16 bits somewhere, .*; take the conversions out\.$",
        ),
        "a random slope": (
            {"model": nn.Sequential(nn.Linear(5, 4), nn.RReLU(), nn.Linear(4, 2))},
            r"^the layer 1 \(RReLU\) draws random numbers, .*by \.eval\(\)",
        ),
        "a random loss": (
            {"loss": lambda outputs, targets: _by_class(functional.dropout(outputs), targets)},
            r"^the loss of the model Linear draws random numbers, .*after \.eval\(\), too: leave it out",
        ),
        "windows that are drawn in evaluation mode, too": (
            {"model": _fractional().eval()},
            r"^the layer 2 \(FractionalMaxPool2d\) draws random numbers, .*after \.eval\(\), too: .*nn\.MaxPool2d",
        ),
        "a mapping of other names": ({"X": {"ids": X}}, "does not take records of shape ids \\[5\\]"),
        "a mapping of other lengths": (
            {"X": {"input": X[:-1]}},
            rf"the shapes are input \[{N - 1}, 5\] and y \[{N}\]",
        ),
        "whole numbers of 64 bits": ({"X": {"input": np.full((N, 5), 2**40)}}, "beyond 32 bits"),
        "whole numbers of 64 bits for a table": (
            {"model": _Tokens(), "X": np.full((N, 4), 2**40), "y": np.ones((N, 4), int)},
            "beyond 32 bits",
        ),
        "masked records": ({"X": np.ma.masked_greater(X, 2)}, "X has masked values"),
        "masked targets": ({"y": np.ma.masked_equal(Y, 1)}, "y has masked values"),
        "a sparse matrix": (
            {"X": scipy.sparse.csr_array(X)},
            r"X \(csr_array, object\) is no dense .* \.toarray\(\)",
        ),
        "columns of dates and words": (
            {"X": pd.DataFrame(X).assign(at=pd.Timestamp(0), town="Rome")},
            "X has columns that hold no numbers: at, town; ",
        ),
        "a dataset with its targets, and targets": (
            {"X": TensorDataset(torch.zeros(N, 5), torch.zeros(N))},
            "X is a TensorDataset, which has the targets as well; leave y out",
        ),
        "classes from 1": ({"y": Y + 1}, "the classes 0 to 1; count the classes from 0"),
        "missing numbers of pandas": (
            {"X": pd.DataFrame(X).astype("Float64").mask(X > 2)},
            "X holds NaN or infinite",
        ),
        "rows in another order": (
            {"X": pd.DataFrame(X), "y": pd.Series(Y)[::-1]},
            r"X and y have different indexes.*y\.loc",
        ),
        "people in another order": (
            {"X": pd.DataFrame(X), "people": pd.Series(range(N))[::-1], "per_person": 2},
            "X and people have different indexes",
        ),
        "ragged people": (
            {"people": [[1], [1, 2]] * (N // 2), "per_person": 2},
            "people is no list of numbers or names",
        ),
        "people that are no names": (
            {"people": [{}] * N, "per_person": 2},
            "people is no list of numbers or names",
        ),
        "too few people": ({"people": [1] * (N - 1), "per_person": 2}, f"a name for each of the {N} records"),
        "a stream": ({"X": _Stream(), "y": None}, "y is missing; give .* map-style"),
        "one number of each record": (
            {"X": X[:, 0]},
            rf"X \[{N}\] and y \[{N}\]; give X as \[n, features\]",
        ),
        "one number of each class": (
            {"y": np.eye(2, dtype=int)[Y]},
            r"in the shape of the model's outputs; give classes, such as y.argmax\(1\)",
        ),
        "classes in the first dimension or in the last one": (
            {"model": _Tokens(), "X": np.ones((N, 3), int), "y": np.ones((N, 3), int)},
            r"outputs \[3, 3\] for targets \[3\] of a record, .*cross_entropy\(outputs\.movedim",
        ),
        "real marks beyond 0 and 1": (
            {"model": linear(1), "loss": "binary_cross_entropy_with_logits", "y": 2.0 * Y - 1.0},
            "below 0 or above 1",
        ),
        "a loss as its class": (
            {"loss": nn.CrossEntropyLoss},
            r"give an instance, such as CrossEntropyLoss\(\)",
        ),
        "a loss without a gradient": (
            {"loss": lambda o, t: functional.cross_entropy(o, t, reduction="none").detach()},
            "have no gradient",
        ),
        "a model of NumPy": ({"model": _OfNumpy(5, 2)}, "have no gradient"),
        "a model without values": ({"model": nn.Linear(5, 2, device="meta")}, "tensors without values"),
        "numbers beyond float32": ({"X": X * 1e300}, "beyond float32"),
        "an empty mapping": ({"X": {}}, "of the same number of records"),
        "entries that a table lacks": (
            {"model": _Tokens(), "X": np.full((N, 4), 30), "y": np.full((N, 4), 1)},
            "whole numbers that the model.s tables have no entry for",
        ),
        "entries that one of several tables lacks": (
            {"model": _Cities(), "X": {"city": Y, "kind": 3 * Y}},
            "whole numbers that the model.s tables have no entry for",
        ),
        "a loader": (
            {"X": DataLoader(TensorDataset(torch.zeros(3, 5), torch.zeros(3))), "y": None},
            "its dataset",
        ),
        "one value of all records": ({"model": _Sum()}, "one row of outputs for each record"),
        "a class of one token too many": (
            {"model": _Tokens(), "X": np.ones((N, 4), int), "y": np.full((N, 4), 3)},
            "beyond the model's 3 outputs",
        ),
        "a class of one token below 0": (
            {"model": _Tokens(), "X": np.ones((N, 4), int), "y": np.full((N, 4), -1)},
            "below 0",
        ),
        "no module": ({"model": lambda inputs: inputs}, "give a torch.nn.Module"),
        "a compiled module": ({"model": _Late(_compiled)}, "give .* model._orig_mod"),
        "several devices": ({"model": nn.DataParallel(nn.Linear(5, 2))}, "give .* model.module"),
        "TorchScript": (
            {"model": torch.jit.script(nn.Linear(5, 2))},
            r"TorchScript in it \(it\), .*by its class, and load the weights by load_state_dict\(scripted\.state_dict",
        ),
        "TorchScript inside": (
            {"model": nn.Sequential(torch.jit.script(nn.Linear(5, 2)))},
            r"TorchScript in it \(its layer 0\), .*by its class, and load the weights by load_state_dict",
        ),
        "hooks on a parameter": ({"model": _hooked()}, "hooks on its parameters"),
        "a lock": ({"model": _locked()}, "cannot be copied"),
        "complex parameters": (
            {"model": _Complex()},
            r"complex \(turn\), and all are one vector of real numbers here; .*torch\.view_as_complex",
        ),
        "a sparse buffer": ({"model": _sparse()}, r"by \.to_dense\(\)"),
        "entries that a pass rewrites": (
            {"model": nn.Embedding(5, 2, max_norm=1.0)},
            "max_norm.*mixes records",
        ),
        "a lazy layer": ({"model": nn.LazyLinear(2)}, "call it once on a made-up record"),
        "double parameters": ({"model": nn.Linear(5, 2).double()}, "not float32"),
        "a start that is not finite": ({"model": _not_finite()}, "not finite"),
        "a model for inference": ({"model": _inferring()}, "outside of it"),
        "nothing to train": ({"model": nn.Linear(5, 2).requires_grad_(False)}, "no parameters to train"),
        "another shape": ({"model": nn.Linear(4, 2)}, "does not take records of shape"),
        "one output too few": ({"y": Y + 1}, "beyond the model's 2 outputs"),
        "one output for classes": (
            {"model": nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))},
            "beyond the model's 1 outputs",
        ),
        "classes below 0": ({"y": Y - 1}, "below 0"),
        "an unknown loss": ({"loss": "no_such_loss"}, "there is no loss 'no_such_loss'"),
        "a loss in TorchScript": (
            {"loss": torch.jit.script(nn.CrossEntropyLoss())},
            "the loss is TorchScript",
        ),
        "no loss at all": ({"loss": X}, "there is no loss <class 'numpy.ndarray'>; name"),
        "classes as real numbers": ({"y": Y.astype(float)}, r"takes classes; .* y\.astype\(int\)"),
        "a mark beyond 0 and 1": (
            {"model": linear(1), "loss": "binary_cross_entropy_with_logits", "y": 2 * Y},
            "beyond the model's 2 outputs",
        ),
        "two outputs for one number": (
            {"loss": "mse_loss", "y": X[:, 0]},
            r"outputs \[batch, 2\] and y has targets \[batch\]",
        ),
        "a loss of all records": ({"loss": lambda o, t: functional.cross_entropy(o, t)}, "reduction='none'"),
        "a loss with parameters": ({"loss": nn.Bilinear(2, 1, 1)}, "the loss has parameters of its own"),
        "a loss that fails": ({"loss": lambda o, t: o @ t}, "the loss"),
        "records as a name": ({"dataset": X}, "dataset is of type ndarray; give a text"),
        "an epsilon in quotes": ({"epsilon": "3"}, "epsilon is of type str; give a number"),
        "part of a person's record": (
            {"people": Y, "per_person": 1.5},
            "per_person is of type float; give a whole",
        ),
        "room beyond all records": ({"people": Y, "per_person": 10**7}, "per_person is 10000000, and room"),
        "delta": ({"delta": 0.1}, "set delta to at most 0.0167"),
        "delta of a private number": ({"n_is_public": False}, "number of records is private"),
        "BatchNorm": (
            {"model": nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))},
            r"1 \(BatchNorm1d\) mixes records.*replace_batch_norm\(model\)",
        ),
        "dropout": (
            {"model": nn.Sequential(nn.Dropout(), nn.Linear(5, 2))},
            r"^the layer 0 \(Dropout\) draws random numbers, .*by \.eval\(\)",
        ),
        "seeded noise": ({"noise": "seeded"}, "protects nobody"),
        "unknown noise": ({"noise": "none"}, "choose"),
        "no noise": (
            {"method": NonPrivate(steps=2, expected_batch_size=20)},
            "without noise|infinite|no noise",
        ),
        "whether public in words": ({"public": "no"}, "public is of type str; give True or False"),
        "a blank name": ({"dataset": " "}, "dataset is ' '; give a text without spaces"),
        "a population with a space, which would be another": (
            {"population": "visits "},
            "population is 'visits '; give",
        ),
        "no memory": ({"memory_mb": 0}, "memory_mb is 0; give at least 1"),
        "a method with settings of its own kind": ({"method": _ODD}, "settings of Odd cannot be stated"),
        "a method as a setting": (
            {"method": DPSGD(steps=FEW, expected_batch_size=20)},  # type: ignore[arg-type]
            "the setting steps of DPSGD does not fit",
        ),
        "no method": ({"method": DPSGD}, "give the settings of one"),
        "an unknown device": ({"device": "tpu"}, "no such device here; set it to auto or cpu"),
        "a batch beyond the data": ({"method": DPSGD(steps=2, expected_batch_size=1000)}, "batch"),
        "a cap without a population": ({"cap": (1.0, 1e-5), "population": None}, "without a population"),
        "an unknown population": ({"population": "others", "cap": None}, "does not know the population"),
        "a cap of one number": ({"cap": 100.0}, r"cap is 100\.0; give a pair"),
        "a cap in quotes": ({"cap": "10"}, "cap is '10'; give a pair"),
        "a cap below the call": ({"cap": (1.0, 0.5)}, "is below this call's own"),
    }


REFUSED = refusals(X, Y)


def made(changes: dict[str, Any]) -> dict[str, Any]:
    """The same changes, with what is late made."""
    return {name: value.make() if isinstance(value, _Late) else value for name, value in changes.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_spent(name: str, own_home: Path) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(RefusedError, match=words):
        call(**({"population": "visits", "cap": (100.0, 0.5)} | made(changes)))
    assert ledger_rows(own_home) in ([], ["population"])
    if "cap" in changes:
        assert not ledger_rows(own_home)  # so that a slip does not stay


PRIVATE, GROUPS = 317, 211
"""A number of records, and one of people, that occur nowhere else."""
HIDDEN: dict[str, Any] = {
    "n_is_public": False,
    "delta": 1e-5,
    "method": DPSGD(steps=4, sampling_rate=0.2),
    "people": np.arange(PRIVATE) % GROUPS,
    "per_person": 2,
}


@cache
def of_private_number() -> dict[str, tuple[dict[str, Any], str]]:
    return refusals(*two_classes(PRIVATE))


def counts() -> re.Pattern[str]:
    """What tells how many records, people, or records of a class there are, or one fewer."""
    numbers = {PRIVATE, GROUPS, *np.bincount(two_classes(PRIVATE)[1]).tolist()}
    every = "|".join(str(number - less) for number in numbers for less in (0, 1))
    return re.compile(rf"(?<![\d.e-])(?:{every})(?![\d.])")


@pytest.mark.usefixtures("log_to_pytest_alone")
@pytest.mark.parametrize("name", REFUSED)
def test_no_refusal_log_or_traceback_says_a_private_number(
    name: str, own_home: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    X, y = two_classes(PRIVATE)
    changes, _ = of_private_number()[name]
    told: list[str] = []
    with caplog.at_level(logging.DEBUG):
        try:
            call(**({"X": X, "y": y, "population": "visits", "cap": (100.0, 0.5)} | HIDDEN | made(changes)))
        except RefusedError as refusal:
            told += ["".join(traceback.format_exception(refusal)), *getattr(refusal, "__notes__", ())]
        else:
            assert name == "delta of a private number"
    told += [caplog.text, *capfd.readouterr()]
    assert not (said := counts().findall(re.sub(r"line \d+, in", "", "\n".join(told)))), said


def test_what_fails_over_private_records_does_not_say_how_many_there_are(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's errors name the shapes of what they are given."""
    X, y = two_classes(PRIVATE)

    def failing(_: RecordLoader, records: Any, rows: Any) -> None:
        raise RuntimeError(f"records {records.features.shape} and {len(rows)} rows do not fit")

    monkeypatch.setattr(RecordLoader, "load", failing)
    with caplog.at_level(logging.DEBUG), pytest.raises(QueryFailedError) as failed:
        call(X=X, y=y, **HIDDEN)
    told = "".join(traceback.format_exception(failed.value)) + caplog.text
    assert "were charged before this happened" in told
    assert not (said := counts().findall(re.sub(r"line \d+, in", "", told))), said


@pytest.mark.parametrize("of_numpy", ["isfinite", "full"])
def test_memory_that_is_short_does_not_say_how_many_records_there_are(
    of_numpy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy's error names the shape of the array that it could not make."""
    X, y = two_classes(PRIVATE)

    def failing(*_: object, **__: object) -> None:
        raise MemoryError(f"Unable to allocate 9.1 GiB for an array with shape ({PRIVATE}, 5)")

    monkeypatch.setattr(np, of_numpy, failing)
    with pytest.raises(RefusedError, match="memory did not suffice for the records") as refusal:
        call(X=X, y=y, **HIDDEN)
    assert not counts().findall(str(refusal.value)) and refusal.value.__suppress_context__


def test_a_public_number_is_said_where_it_helps() -> None:
    """So the test above looks for what would be there."""
    X, y = two_classes(PRIVATE)
    for name in ("lengths", "too few people", "room beyond all records"):
        changes, words = of_private_number()[name]
        with pytest.raises(RefusedError, match=words) as refusal:
            call(**({"X": X, "y": y} | changes))
        assert counts().search(str(refusal.value))


def test_a_population_of_another_kind_is_refused() -> None:
    call(population="visits", cap=(4.0, 1e-2))
    with pytest.raises(RefusedError, match="'visits' is private in the ledger"):
        call(population="visits", public=True)


def test_the_rows_that_a_person_lacks_do_not_count() -> None:
    """A plain step over people is one over the means of their own rows, however many others have."""
    X, y = two_classes(6)
    people = np.array(["a", "b", "b", "b", "c", "c"])
    rate, model = 0.5, linear()
    method = NonPrivate(steps=1, expected_batch_size=3, update=OptimizerConfig(learning_rate=rate))
    for loss, targets in (("cross_entropy", y), (functional.mse_loss, np.eye(2)[y] + X[:, :2])):
        of_rows = functional.cross_entropy if loss == "cross_entropy" else functional.mse_loss
        outputs, wanted = model(torch.from_numpy(X)), torch.from_numpy(targets)
        wanted = wanted.float() if wanted.is_floating_point() else wanted
        of_people = [of_rows(outputs[people == one], wanted[people == one]) for one in "abc"]
        gradients = torch.autograd.grad(torch.stack(of_people).mean(), list(model.parameters()))
        found = seeded(
            model=model, loss=loss, X=X, y=targets, people=people, per_person=3, method=method, delta=1e-2
        )
        for value, parameter, gradient in zip(found, model.parameters(), gradients, strict=True):
            torch.testing.assert_close(value, parameter.detach() - rate * gradient)


@pytest.mark.parametrize(
    ("cap", "is_enough"),
    [((2.99, 1e-2), False), ((50.0, 0.9e-3), False), ((3.0, DELTA), True)],
)
def test_a_cap_of_a_new_population_holds_the_call_itself(
    cap: tuple[float, float], is_enough: bool, own_home: Path
) -> None:
    if is_enough:
        call(population="visits", cap=cap)
        return
    with refused("'visits' is below this call's own epsilon=3, delta=0.001; give a cap for all runs"):
        call(population="visits", cap=cap)
    assert ledger_rows(own_home) == []


@pytest.mark.parametrize(
    ("declared", "words"), [(True, "is public in the ledger"), (False, "counts 'one image'")]
)
def test_terms_of_a_population_that_is_declared_meanwhile_are_compared(
    declared: bool, words: str, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process declares it between the call's check and its reservation."""
    cap, declare = Budget(9.0, 1e-2), Ledger.declare

    def overtaken(ledger: Ledger, *given: Any, **terms: Any) -> None:
        bound = {"unit": "one record" if declared else "one image"}
        declare(ledger, "visits", cap, public=declared, bound=bound)
        # from its first charge on the terms are final
        ledger.reserve("another", "visits", Budget(1.0, 1e-4), events=[], notes={})
        declare(ledger, *given, **terms)

    monkeypatch.setattr(Ledger, "declare", overtaken)
    with refused(words):
        call(population="visits", cap=(9.0, 1e-2))
    assert ledger_rows(own_home).count("reserve") == 1


def test_a_result_holds_these_facts_and_no_other() -> None:
    """A number of records of a class, say, or the accuracy on the training records, would be one more."""
    result = call(method=DPSGD(steps=4, sampling_rate=0.2), delta=1e-5, n_is_public=False)
    plan = json.loads(result.files["plan.json"])
    assert set(result.files) == {"model.safetensors", "plan.json", "trace.parquet", "privacy_card.json"}
    assert set(plan) == {
        *(
            "accountant",
            "adjacency",
            "algorithm",
            "attack",
            "code",
            "count_noise",
            "dataset",
            "delta",
            "diagnostics",
            "divisor",
        ),
        *(
            "epsilon",
            "features",
            "filter",
            "method_params",
            "model",
            "noise",
            "noise_multiplier",
            "not_private",
        ),
        *("prior_events", "public", "sampling_rate", "schedule", "settings", "steps", "target"),
    }
    assert set(plan["public"]) == {"classes", "inputs", "layers", "loss", "parameters", "records"}
    assert plan["public"]["records"] is plan["divisor"] is None
    assert set(plan["model"]) == {
        *("name", "seed", "parameters", "files", "freeze", "settings", "notes", "precision", "start"),
        *("augmentations", "reinitialize"),
    }
    header = int.from_bytes(result.files["model.safetensors"][:8], "little")
    assert set(json.loads(result.files["model.safetensors"][8 : 8 + header])) == {"weight", "bias"}
    assert set(result.trace.columns) == {
        *("release", "step", "kind", "event", "sampling", "sampling_rate", "clipping", "clip_norm", "noise"),
        *("noise_multiplier", "noise_std", "divisor", "epsilon"),
    }
    card = json.loads(result.files["privacy_card.json"])
    assert set(card) == {
        *("schema_version", "signature", "setting", "mechanism", "accounting", "events", "implementation"),
        "evidence",
    }
    assert set(card["setting"]) == {
        *("adjacency", "dataset", "delta", "epsilon", "guarantee", "holdout", "licence", "population"),
        *("public_records", "records", "source", "title", "unit"),
    }
    assert card["setting"]["records"] is None
    assert set(card["mechanism"]) == {
        *(
            "algorithm",
            "diagnostics",
            "divisor",
            "encoder",
            "features",
            "model",
            "noise_multiplier",
            "queries",
        ),
        *("releases", "sampling_rate", "settings", "settings_from_records", "steps", "transform"),
    }


PEOPLE: dict[str, Any] = {
    "people": np.arange(60) // 2,
    "per_person": 2,
    "method": DPSGD(steps=4, expected_batch_size=9),
}


def test_records_and_people_have_the_units_that_they_are() -> None:
    """A card that says "one person" of single rows would promise to people with several what does not hold."""
    plain, grouped = call().card.setting, call(**PEOPLE).card.setting
    assert (plain.unit, plain.per_person, plain.unit_is_stated) == ("one record", None, False)
    assert (grouped.unit, grouped.per_person, grouped.rows_per_user) == ("one person", 1, 2)
    assert not grouped.unit_is_stated


def test_the_card_of_grouped_rows_promises_the_person_what_was_charged(own_home: Path) -> None:
    """A person's rows are one record: no group of records costs more, and the account was charged for one."""
    card = call(**PEOPLE, population="visits", cap=(20.0, 1e-2)).card
    assert text.unit_in_words(card) == "one person, of whose records 2 were used at most, together as one,"
    assert "for all records of a person together it is" not in text.markdown(card)
    check_charged(card, Ledger.open(f"sqlite:///{own_home}/ledger.sqlite"))


@pytest.mark.parametrize("unit", ["one person", "one patient", "one image"])
def test_rows_pass_as_another_unit_only_by_a_statement_that_the_card_shows(unit: str, own_home: Path) -> None:
    people = {"population": "visits", "cap": (20.0, 1e-2)}
    with refused(
        rf"unit is '{unit}', and nothing says that nobody has several rows; give people.*one_row_per_unit=True"
    ):
        call(unit=unit, **people)
    assert ledger_rows(own_home) == []
    card = call(unit=unit, one_row_per_unit=True, **people).card
    assert (card.setting.unit, card.setting.unit_is_stated) == (unit, True)
    claim = f"one record ({unit}, as whoever trained it states: nobody checked that none has several records)"
    assert claim in text.protection_sentence(card) and claim in text.unit_in_words(card)
    assert verify(card, unsigned=True).passed
    assert "nobody checked" not in text.protection_sentence(call().card)


def test_a_statement_beside_people_is_refused() -> None:
    assert call(one_row_per_unit=True).card.setting.unit == "one person"
    with refused("people and one_row_per_unit were both given"):
        call(one_row_per_unit=True, **PEOPLE)


def test_a_population_keeps_how_its_rows_are_grouped(own_home: Path) -> None:
    """The unit alone would let rows that are people by statement follow people with several rows."""
    visits: dict[str, Any] = {"population": "visits", "cap": (20.0, 1e-2)}
    call(**PEOPLE, **visits)
    charged = ledger_rows(own_home)
    with refused(
        "'visits' takes rows by their person, and this call takes them one for each unit, as stated"
    ):
        call(one_row_per_unit=True, **visits)
    with refused("'visits' counts 'one person' as one record, and unit='one record' was given"):
        call(**visits)
    call(one_row_per_unit=True, population="others", cap=(20.0, 1e-2))
    with refused(
        "'others' takes rows one for each unit, as stated, and this call takes them by their person"
    ):
        call(population="others", **PEOPLE)
    assert ledger_rows(own_home)[: len(charged)] == charged


def test_a_population_without_that_term_is_bound_by_the_first_statement(own_home: Path) -> None:
    """As those are that the pipeline declared, or an earlier version."""
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    ledger.declare("visits", Budget(20.0, 1e-2), public=False, bound={"unit": "one person"})
    call(one_row_per_unit=True, population="visits")
    with refused("takes rows one for each unit, as stated"):
        call(population="visits", **PEOPLE)


def test_importing_the_package_loads_no_torch() -> None:
    words = "import sys, algorithms; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", words], cwd=PROJECT, check=True)
    with pytest.raises(AttributeError, match="no attribute 'Unheard'"):
        _ = algorithms.Unheard


def test_a_notebook_completes_every_public_name() -> None:
    assert {"fit", "load", *(method.__name__ for method in CATALOGUE.values())} == set(dir(algorithms)) - {
        "Fitted",
        "OptimizerConfig",
        "replace_batch_norm",
    }
    assert all(hasattr(algorithms, name) for name in dir(algorithms))


@pytest.mark.usefixtures("same_secrets")
def test_the_notebook_runs() -> None:
    """Its cells, in their order, in one namespace, with the outputs that it was saved with in place."""
    notebook = json.loads((PROJECT / "examples/fit.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    assert any(cell["outputs"] for cell in cells)
    names: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    assert names["result"].epsilon["pld"] <= 3
    assert 0.5 < names["accuracy"] <= 1
