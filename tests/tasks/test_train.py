"""The train stage: reserve, train, settle; killed anywhere it ends with the same model and one charge."""

import dataclasses
import hashlib
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open

from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.models import Model
from algorithms.privacy.accounting import Budget
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.documents import Receipt
from algorithms.privacy.ledger import Ledger
from data.card import DataRefusedError
from data.files import owner_key
from tasks import evaluate, report, train
from tasks.model_building import model_for
from tasks.preflight import rehearsal
from tasks.runs import store
from tasks.runs.ledger import bind
from tasks.runs.store import check_run_facts
from tasks.tracking import live
from tests.support.refusals import refused_as
from tests.support.soak import soak_but
from tests.support.waiting import HANG_SECONDS
from tests.support.wandb_stand_in import standing_in
from tests.support.workspace import Workspace, crash, killed_in


def test_diagnostics_change_no_result_and_end_the_promise(workspace: Workspace) -> None:
    workspace.set("privacy", noise="seeded")
    receipt, model = workspace.train(), workspace.model()
    table = pd.read_parquet(workspace.root / "artifacts/diagnostics.parquet")
    assert (receipt["diagnostics"], table.empty) == (False, True)
    workspace.set("privacy", diagnostics=True)
    receipt = workspace.train()
    table = pd.read_parquet(workspace.root / "artifacts/diagnostics.parquet")
    assert receipt["diagnostics"] is True
    assert workspace.model() == model
    assert list(table["step"]) == list(range(6))
    assert (table["error"] > 0).all()


@pytest.mark.usefixtures("every_rehearsal")
def test_a_run_that_could_not_be_reported_is_refused_and_nothing_is_charged(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> str:
        raise ArithmeticError("this page fails")

    with monkeypatch.context() as patch, refused_as("card_rehearsal_failed") as refusal:
        patch.setattr(report, "page", failing)
        workspace.train()
    assert str(refusal.value.fields["error"]) == "this page fails"
    assert [entry.kind for entry in workspace.ledger.history("digits")] == ["population"]
    assert workspace.run_folders == []
    workspace.train()


def test_a_run_reserves_settles_and_leaves_its_files(workspace: Workspace) -> None:
    receipt = workspace.train()
    assert receipt["epsilon"]["pld"] <= 3.0 < receipt["epsilon"]["rdp"]
    assert receipt["private_noise"] is True
    assert receipt["description_sha256"] == workspace.info.digest
    assert [entry.kind for entry in workspace.ledger.history("digits")] == ["population", "reserve", "settle"]
    balance = workspace.ledger.balance("digits")
    assert balance.spent == Budget(receipt["epsilon"]["pld"], 1e-5)
    assert balance.reserved == Budget(0.0, 0.0)
    for name, digest in receipt["sha256"].items():
        assert hashlib.sha256((workspace.root / "artifacts" / name).read_bytes()).hexdigest() == digest
    (folder,) = workspace.run_folders  # which keeps no secret
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "result", "run.json"]


def test_a_run_again_spends_again_with_fresh_secret_noise_or_the_same_seeded_noise(
    workspace: Workspace,
) -> None:
    models, runs, cost = [], set(), 0.0
    for noise in ("secure", "secure", "seeded", "seeded"):
        workspace.set("privacy", noise=noise)
        receipt = workspace.train()
        workspace.mark_used()
        assert workspace.run_folders == []
        models.append(workspace.model())
        runs.add(receipt["run_id"])
        cost += receipt["epsilon"]["pld"]
        assert receipt["private_noise"] is (noise == "secure")
    assert models[0] != models[1]
    assert models[2] == models[3]
    assert len(runs) == 4
    assert workspace.ledger.balance("digits").spent.epsilon == pytest.approx(cost)


def test_a_live_curve_changes_no_result_whether_wandb_hangs_or_answers(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workspace.set("privacy", noise="seeded")
    first, model = workspace.train(), workspace.model()
    workspace.set("tracking", mode="online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    for hangs, patience in ((True, 1.0), (False, HANG_SECONDS)):
        workspace.mark_used()
        monkeypatch.setattr(train, "live_curve", partial(live.live_curve, patience_seconds=patience))
        caplog.clear()
        with (
            standing_in(hangs=hangs) as backend,
            caplog.at_level(logging.WARNING, "tasks.tracking.live"),
        ):
            monkeypatch.setenv("WANDB_BASE_URL", backend.known.url)
            first = workspace.train()
        assert workspace.model() == model
        assert workspace.ledger.status(first["run_id"]) == "settled"
        assert len(caplog.messages) == hangs
    trace = pd.read_parquet(workspace.root / "artifacts/trace.parquet")
    last = backend.rows(first["run_id"])[-1]
    expected = (6, trace["epsilon"].iloc[-1], trace["noise_std"].iloc[-1])
    assert tuple(
        last[name] for name in ("live/step", "live/epsilon_so_far", "live/noise_std")
    ) == pytest.approx(expected)


CRASHES = [("reserve", False), ("reserve", True), ("settle", False), ("settle", True), ("finish", False)]
"""After the last step nothing is left that could cost a charge."""


@pytest.mark.parametrize(("where", "after"), soak_but(CRASHES, [*CRASHES, ("finish", True)]))
def test_a_crash_around_each_durable_step_costs_one_charge(
    where: str, after: bool, workspace: Workspace
) -> None:
    owner: Any = store.RunAttempt if where == "finish" else Ledger
    whole = getattr(owner, where)

    def crashing(*arguments: Any, **named: Any) -> Any:
        if after:
            whole(*arguments, **named)
        raise KeyboardInterrupt

    with killed_in(owner, where, crashing):
        workspace.train()
    receipt = workspace.train()
    assert [entry.kind for entry in workspace.ledger.history("digits")] == ["population", "reserve", "settle"]
    assert workspace.ledger.status(receipt["run_id"]) == "settled"


def test_a_killed_run_stays_charged_until_it_is_forfeited_and_then_for_ever(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_in(train, "run_training"):
        workspace.train()
    balance = workspace.ledger.balance("digits")
    assert balance.reserved.epsilon == pytest.approx(3.0, rel=1e-3)
    killed = workspace.run_folders[0].name
    workspace.ledger.forfeit(killed)
    balance = workspace.ledger.balance("digits")
    assert (balance.reserved.epsilon, balance.spent.epsilon) == (0.0, pytest.approx(3.0, rel=1e-3))
    store.abandon(workspace.home, killed)
    assert not workspace.run_folders
    monkeypatch.undo()
    assert workspace.train()["run_id"] != killed
    assert workspace.ledger.balance("digits").spent.epsilon == pytest.approx(6.0, rel=1e-3)


def test_a_population_that_cannot_pay_refuses_before_the_records_are_read(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Barrier, "gradient", crash)
    workspace.declare(population="people", cap_epsilon=1.0, cap_delta=1e-4, is_public=False)
    with refused_as("budget_exceeded", BudgetRefusedError):
        workspace.train()
    assert workspace.run_folders == []
    assert workspace.ledger.balance("people").remaining == Budget(1.0, 1e-4)


class Centred(torch.nn.Linear):
    """Takes what is common to the batch out of each record."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.flatten(1)
        return super().forward(flat - flat.mean(dim=0))


def test_a_model_that_mixes_records_is_refused_before_anything_is_spent(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixing(*given: Any) -> Model:
        return dataclasses.replace(model_for(*given), module=Centred(64, 10))

    monkeypatch.setattr(train, "model_for", mixing)
    with refused_as("records_mixed"):
        workspace.train()
    assert workspace.run_folders == []
    assert workspace.ledger.balance("digits").reserved.epsilon == 0.0


def test_what_a_machine_lacks_is_refused_before_anything_is_spent(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    workspace.set("performance", device="cuda")
    with refused_as("device_missing", name="cuda", choice="auto or cpu"):
        workspace.train()
    assert workspace.run_folders == []
    with pytest.raises(RefusedError, match="it has none yet"):
        workspace.ledger.balance("digits")


def test_a_start_that_is_replaced_after_its_check_trains_nothing(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []
    for steps in (2, 3):
        workspace.set("algorithm", steps=steps)
        workspace.train()
        starts.append((workspace.root / "artifacts/model.safetensors").read_bytes())
    start, before = workspace.root / "start.safetensors", workspace.ledger.head()
    start.write_bytes(starts[0])
    workspace.set("model", start=str(start))

    def replaced(*about: Any) -> Any:
        start.write_bytes(starts[1])
        return model_for(*about)

    monkeypatch.setattr(train, "model_for", replaced)
    folders = workspace.run_folders
    with pytest.raises(RefusedError):
        workspace.train()
    assert workspace.ledger.head() == before and workspace.run_folders == folders


def test_a_run_without_privacy_is_for_public_records_only(workspace: Workspace) -> None:
    workspace.replace("algorithm", {"name": "non_private", "expected_batch_size": 64, "steps": 5})
    receipt = workspace.train()
    assert receipt["epsilon"] == {"pld": None, "rdp": None, "pure": None}
    assert workspace.ledger.balance("digits").spent.epsilon == 0
    workspace.declare(population="people", is_public=False)
    with pytest.raises(BudgetRefusedError):
        workspace.train()


def test_private_records_cannot_be_charged_to_a_public_population(workspace: Workspace) -> None:
    workspace.train()
    workspace.declare(is_public=False)
    with refused_as(
        "unlike_population", population="digits", declared="public", kind="private", differing="public"
    ):
        workspace.train()


def test_seeded_noise_is_refused_for_private_records(workspace: Workspace) -> None:
    workspace.declare(population="people", is_public=False)
    with refused_as("bad_keys", keys=("privacy.noise",)):
        workspace.set("privacy", noise="seeded")


@pytest.mark.parametrize("kind", [RefusedError, BudgetRefusedError])
def test_a_ledger_that_fails_does_not_cost_a_run_its_key(
    kind: type[RefusedError], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise kind("the ledger cannot be reached; try again.")

    with killed_in(train, "run_training"):
        workspace.train()
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "reserve", refuse)
        with pytest.raises(RefusedError, match="cannot be reached"):
            workspace.train()
    assert workspace.train()["run_id"] == workspace.run_folders[0].name
    assert len(workspace.ledger.history("digits")) == 3


def settled_alone(workspace: Workspace) -> Path:
    """A run that was killed at its settlement; its folder."""
    before = workspace.run_folders
    with killed_in(Ledger, "settle"):
        workspace.train()
    return next(folder for folder in workspace.run_folders if folder not in before)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_without_its_checkpoint_a_run_begins_again_and_gives_the_same_model(
    workspace: Workspace, is_swapped: bool
) -> None:
    other = settled_alone(workspace)
    workspace.set("privacy", noise="seeded")
    workspace.train()
    expected = workspace.model()
    workspace.mark_used()
    folder = settled_alone(workspace)
    damaged = (other / "state.safetensors").read_bytes()[: None if is_swapped else 1000]
    (folder / "state.safetensors").write_bytes(damaged)
    assert workspace.train()["run_id"] == folder.name
    assert workspace.model() == expected


def test_a_damaged_key_draws_no_other_noise(workspace: Workspace) -> None:
    """Sixteen bytes are a key of AES, too."""
    key = settled_alone(workspace) / "generator.key"
    whole = key.read_bytes()
    key.write_bytes(whole[:16])
    with refused_as("broken_file"):
        workspace.train()
    key.write_bytes(whole)
    assert workspace.train()["run_id"] == key.parent.name


def test_the_noise_of_a_run_is_not_used_on_records_made_anew_meanwhile(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_anew_first(*arguments: Any, **named: Any) -> None:
        bind(*arguments, **named)
        (workspace.root / "datasets/prepared/contents").write_text("others, described alike\n")

    monkeypatch.setattr(train, "bind", made_anew_first)
    with refused_as("prepared_anew", DataRefusedError):
        workspace.train()
    assert not list((workspace.home / "runs").glob("*/result"))


def test_what_a_run_keeps_is_for_its_owner_only(workspace: Workspace) -> None:
    with killed_in(Ledger, "settle"):
        workspace.train()
    folder = workspace.run_folders[0]
    for path in (folder, folder / "generator.key", folder / "state.safetensors"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_private_number_of_records_is_released_first_and_charged(workspace: Workspace) -> None:
    workspace.declare(records=None)
    with refused_as("rate_missing"):
        workspace.set("privacy")
    workspace.replace("algorithm", {"name": "dp_sgd", "sampling_rate": 0.05, "steps": 20})
    workspace.set("privacy", count_noise=50.0)
    receipt = workspace.train()
    assert receipt["events"][0]["event"] == {"type": "GaussianDpEvent", "noise_multiplier": 50.0}
    assert receipt["events"][1]["count"] == 20
    assert receipt["epsilon"]["pld"] <= 3.0
    check_files_hold_no_other_fact(workspace)


def check_files_hold_no_other_fact(workspace: Workspace) -> None:
    """A number of records or the frequencies of their classes, say, would be one fact more."""
    assert {path.name for path in (workspace.root / "artifacts").iterdir()} == {
        *("diagnostics.parquet", "evaluation.json", "model.safetensors", "plan.json", "receipt.json"),
        "trace.parquet",
    }
    receipt = workspace.receipt
    assert set(receipt) == {
        *(
            "accountant",
            "algorithm",
            "blocks",
            "dataset",
            "delta",
            "description_sha256",
            "device",
            "diagnostics",
        ),
        *("epsilon", "events", "ledger", "population", "private_noise", "releases", "run_id", "sha256"),
        *("software", "steps"),
    }
    assert set(receipt["ledger"]) == {"cap", "composition", "first", "head", "remaining", "spent", "ten_more"}
    with safe_open(workspace.root / "artifacts/model.safetensors", framework="pt") as file:
        metadata, tensors = file.metadata(), set(file.keys())
    assert (set(metadata), tensors) == ({"epsilonflow"}, {"1.weight", "1.bias"})
    facts = json.loads(metadata["epsilonflow"])
    assert set(facts) == {
        *("algorithm", "classes", "dataset", "front", "input_shape", "model", "model_settings", "outputs"),
        *("predicts", "preparation", "tokens"),
    }
    preparation = {"classes", "encoder", "name", "reader", "shape", "transform", "unit", "words"}
    assert set(facts["preparation"]) == preparation
    assert pd.read_parquet(workspace.root / "artifacts/diagnostics.parquet").empty


def test_a_plan_edited_by_hand_is_refused(workspace: Workspace) -> None:
    path = workspace.root / "artifacts" / "plan.json"
    plan = json.loads(path.read_text())
    louder = {"event": {"type": "GaussianDpEvent", "noise_multiplier": 0.5}, "count": 6}
    lower = {"pld": 0.1, "rdp": 0.2}
    path.write_text(json.dumps(plan | {"epsilon": lower}))
    with refused_as("plan_misstates_epsilon", stated=lower):
        workspace.train()
    path.write_text(json.dumps(plan | {"schedule": [louder]}))
    with refused_as("plan_above_target", epsilon=3.0):
        workspace.train()
    changes: dict[str, dict[str, Any]] = {
        "public facts": {"public": {"records": 9, "parameters": 650, "layers": 1, "classes": 10}},
        "target": {"target": {"epsilon": 0.5, "delta": 1e-5}},
        "algorithm": {"algorithm": "non_private"},
        "features": {"features": {"name": "whitened"}},
        "model": {"model": {"name": "svm", "seed": 0, "parameters": 650}},
    }
    for differing, change in changes.items():
        path.write_text(json.dumps(plan | change))
        with refused_as("stale_plan", differing=differing):
            workspace.train()
    assert workspace.run_folders == []


@pytest.mark.usefixtures("same_secrets")
def test_evaluation_scores_the_model_and_takes_the_result_up(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.set(
        "algorithm", steps=150, expected_batch_size=256, update={"learning_rate": 0.5, "momentum": 0.9}
    )
    workspace.train()
    for records in (workspace.root / "datasets/prepared").glob("train_*.npy"):
        records.unlink()  # what was trained on is not even opened
    monkeypatch.chdir(workspace.root)
    evaluate.main()
    metrics = json.loads((workspace.root / "artifacts/metrics.json").read_text())
    quality = {"test_accuracy", "majority_accuracy", "test_loss", "test_auc", "test_f1", "calibration_error"}
    assert set(metrics) == quality | {"by_class", "test_records", "epsilon", "delta", "run_id"}
    assert metrics["test_accuracy"] > 0.85
    assert metrics["test_auc"] > 0.95 and metrics["test_f1"] > 0.8 and 0 < metrics["calibration_error"] < 0.5
    labels = np.load(workspace.root / "datasets/prepared/test_labels.npy")
    assert metrics["majority_accuracy"] == np.unique(labels, return_counts=True)[1].max() / len(labels)
    assert metrics["test_records"] == len(labels)
    assert not [value for name, value in metrics.items() if isinstance(value, str) and name != "run_id"]
    assert metrics["epsilon"] == workspace.receipt["epsilon"]["pld"]
    check_run_facts(metrics, Receipt.read(workspace.root / "artifacts/receipt.json"))
    confusion = (workspace.root / "artifacts/plots/confusion.csv").read_text().splitlines()
    right = sum(len(set(line.split(","))) == 1 for line in confusion[1:])
    assert len(confusion) - 1 == workspace.info.test_records
    assert right / (len(confusion) - 1) == pytest.approx(metrics["test_accuracy"])
    assert workspace.run_folders == []


def test_auc_f1_and_calibration_are_what_they_are_called() -> None:
    sure = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.2, 0.8]])
    metrics = evaluate.classification_metrics(
        evaluate.EvaluationResult(sure.argmax(axis=1), 0.0, sure), np.array([0, 1, 0, 1])
    )
    assert metrics.test_auc == 0.625  # of the four pairs two and a half are in order
    assert metrics.test_f1 == 0.5
    assert metrics.calibration_error == pytest.approx((2 * 0.4 + 0.6 + 0.2) / 4)
    alone = evaluate.classification_metrics(
        evaluate.EvaluationResult(np.array([0]), 0.0, sure[:1]), np.array([0])
    )
    assert alone.test_auc is None


def test_nothing_and_another_model_are_not_evaluated_and_the_result_is_kept(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = workspace.train()["run_id"]
    monkeypatch.chdir(workspace.root)
    with (workspace.root / "artifacts/model.safetensors").open("ab") as model:
        model.write(b"\0")
    with refused_as("files_of_two_runs"):
        evaluate.main()
    for name in ("model.safetensors", "receipt.json"):
        file = workspace.root / "artifacts" / name
        file.rename(workspace.root / "away")
        with refused_as("missing_file"):
            evaluate.main()
        (workspace.root / "away").rename(file)
    assert [folder.name for folder in workspace.run_folders] == [run_id]


def test_of_two_homes_that_begin_a_run_at_once_one_trains_it(
    workspace: Workspace, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the owner key and the ledger; each has made a key of the run's noise when it is reserved."""
    other, rehearse = tmp_path_factory.mktemp("other"), rehearsal.rehearse
    (other / "owner.key").write_bytes(owner_key(workspace.home))

    def meanwhile(*given: Any) -> None:
        monkeypatch.setattr(rehearsal, "rehearse", rehearse)
        with killed_in(train, "run_training"):
            workspace.train()
        rehearse(*given)

    monkeypatch.setattr(rehearsal, "rehearse", meanwhile)
    with refused_as("noise_elsewhere"):
        workspace.train(home=other)
    assert list((other / "runs").iterdir()) == []
    workspace.train()
    assert [row.kind for row in workspace.ledger.history()] == ["population", "reserve", "settle"]
