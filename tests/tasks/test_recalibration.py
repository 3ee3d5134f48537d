"""A temperature from the released histogram: in the model's file, in whatever is exported of it, and in metrics."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray

from algorithms import load
from algorithms.evaluation import ReleasedHistogram, recalibration_of
from algorithms.model_facts import facts_of
from algorithms.models.saved import load_model
from data.prepared import HeldOut, halves_of, load_held_out
from epsilonflow import sklearn
from tasks import evaluate, train
from tasks.config import params
from tasks.export import export
from tasks.runs import store
from tasks.runs.summary import run_summary
from tasks.tracking.runs import curve_tables
from tests.support.cards import csv_of, label, number
from tests.support.own_records import declared, finish
from tests.support.refusals import refused_as
from tests.support.workspace import Workspace, killed_in, prepared_digits, workspace

__all__ = ["declared", "prepared_digits", "workspace"]
pytestmark = pytest.mark.usefixtures("same_secrets")

Declared = Callable[..., None]


@pytest.fixture
def underconfident(workspace: Workspace, declared: Declared) -> Workspace:
    """A price that decides the answer, and a model of five small steps, which hardly says so."""
    prices = np.random.default_rng(0).random(6000)
    lines = [f"{price:.4f},{'yes' if price > 0.5 else 'no'}" for price in prices]
    (workspace.root / "fruit.csv").write_text("\n".join(["price,kind", *lines]) + "\n")
    reader = csv_of(number("price", 0, 1), label("kind"))
    declared(
        "fruit.csv", model={"name": "softmax"}, reader=reader, holdout="private", records={"at_most": 9000}
    )
    workspace.set("privacy", epsilon=8.0, evaluation={"recalibrate": True})
    return workspace


def read(workspace: Workspace, name: str) -> Any:
    return json.loads((workspace.root / "artifacts" / name).read_text())


def test_the_model_in_use_and_all_its_exports_are_recalibrated(underconfident: Workspace) -> None:
    finish(underconfident)
    root, artifacts = underconfident.root, underconfident.root / "artifacts"
    temperature = facts_of(artifacts / "model.safetensors").temperature
    assert 0 < temperature < 0.8  # it was too unsure
    parameters = load_model(artifacts / "model.safetensors")[1]
    weight, bias = sorted(parameters.values(), key=torch.Tensor.dim, reverse=True)
    prices = torch.tensor([[0.1], [0.45], [0.9]])
    by_hand = torch.softmax((prices @ weight.T + bias) / temperature, dim=-1)
    assert torch.allclose(load(artifacts)(prices).softmax(-1), by_hand, atol=1e-6)
    table = pd.DataFrame({"price": prices[:, 0].numpy()})
    assert np.allclose(sklearn.load(artifacts).predict_proba(table), by_hand.numpy(), atol=1e-6)
    assert export(artifacts, "torchscript", root / "model.pt") < 1e-5
    metrics = read(underconfident, "metrics.json")
    said = metrics["recalibration"]
    assert said["temperature"] == temperature and said["log_loss_gain"]["low"] > 0
    # Its probabilities are right, on held-out people who are in no part of the fit, by their exact log loss.
    data = load_held_out(root / "datasets/prepared")
    second = np.asarray(halves_of(data, root / "datasets/prepared")) == 1
    assert 0.4 < second.mean() < 0.6
    scores = load(artifacts)(torch.from_numpy(np.array(data.test_features)[second]))
    labels = torch.from_numpy(np.array(data.test_labels)[second])
    loss = [float(torch.nn.functional.cross_entropy(scores * one, labels)) for one in (1.0, temperature)]
    assert loss[0] < loss[1]
    assert "log-odds are divided by" in dict(run_summary(root))["recalibration"]


def test_onnx_has_the_temperature(underconfident: Workspace) -> None:
    pytest.importorskip("onnxruntime", exc_type=ImportError)
    pytest.importorskip("onnxscript", exc_type=ImportError)
    finish(underconfident)
    assert export(underconfident.root / "artifacts", "onnx", underconfident.root / "model.onnx") < 1e-4


def test_curves_and_thresholds_have_intervals_wherever_they_are_shown(underconfident: Workspace) -> None:
    finish(underconfident)
    metrics = read(underconfident, "metrics.json")
    for point in metrics["calibration"]:
        assert point["observed"]["low"] <= point["observed"]["value"] <= point["observed"]["high"]
    assert len(metrics["thresholds"]) == 15
    # The middle one is even odds; the others are where the recalibrated model says what the histogram's edges say.
    temperature, odds = (
        metrics["recalibration"]["temperature"],
        np.sinh(np.arcsinh(16) * np.linspace(-1, 1, 63)) / 2,
    )
    shown = [one["threshold"] for one in metrics["thresholds"]]
    assert shown == pytest.approx((1 / (1 + np.exp(-odds[3::4] / temperature))).tolist())
    page = " ".join((underconfident.root / "artifacts/report.html").read_text().split())
    assert "the observed share by predicted probability, with 95% intervals" in page.lower()
    assert page.count("<tr><td>") >= 7 and "Where the second class is predicted" in page
    tables = curve_tables(metrics)
    assert {"predicted", "observed_value", "observed_low", "observed_high"} <= set(tables["calibration"])
    assert {"threshold", "recall_value", "recall_low", "lift_high"} <= set(tables["thresholds"])


def test_a_killed_run_has_the_same_temperature(underconfident: Workspace) -> None:
    with killed_in(store.RunAttempt, "finish"):
        underconfident.train()
    underconfident.train()
    released = ReleasedHistogram.from_json((underconfident.root / "artifacts/evaluation.json").read_text())
    found = recalibration_of(released)
    assert found is not None
    model = underconfident.root / "artifacts/model.safetensors"
    assert facts_of(model).temperature == found.temperature
    assert store.sha256_of(model) == read(underconfident, "receipt.json")["sha256"]["model.safetensors"]


def test_without_a_gain_beyond_noise_nothing_changes(
    underconfident: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "recalibration_of", lambda _: None)
    monkeypatch.setattr(evaluate, "recalibration_of", lambda _: None)
    finish(underconfident)
    assert facts_of(underconfident.root / "artifacts/model.safetensors").temperature is None
    assert read(underconfident, "metrics.json")["recalibration"] is None


def test_the_model_of_more_classes_is_recalibrated(workspace: Workspace, declared: Declared) -> None:
    """A colour that decides the answer, and a model of five small steps; by exact scores of who did not fit it."""
    kinds = ("a", "b", "c")
    drawn = np.random.default_rng(0).choice(kinds, 6000)
    lines = [f"{at / 6000:.4f},{kind},{kind}" for at, kind in enumerate(drawn)]
    (workspace.root / "fruit.csv").write_text("\n".join(["price,colour,kind", *lines]) + "\n")
    colour = {"name": "colour", "kind": "categorical", "categories": list(kinds)}
    declared(
        "fruit.csv",
        model={"name": "softmax"},
        reader=csv_of(number("price", 0, 1), colour, label("kind")),
        holdout="private",
        records={"at_most": 9000},
        classes=list(kinds),
    )
    workspace.set("privacy", epsilon=8.0, evaluation={"recalibrate": True})
    finish(workspace)
    root, artifacts = workspace.root, workspace.root / "artifacts"
    temperature = facts_of(artifacts / "model.safetensors").temperature
    said = read(workspace, "metrics.json")["recalibration"]
    assert said["temperature"] == temperature < 1.0
    data = load_held_out(root / "datasets/prepared")
    judging = np.asarray(halves_of(data, root / "datasets/prepared")) == 1
    logs = load(artifacts)(torch.from_numpy(np.array(data.test_features)[judging])).log_softmax(-1).detach()
    labels = torch.nn.functional.one_hot(torch.from_numpy(np.array(data.test_labels)[judging]).long(), 3)
    before, after = (
        float((torch.softmax(logs * beta, -1) - labels).square().sum(-1).mean())
        for beta in (temperature, 1.0)
    )
    gain = said["brier_score_gain"]
    sides = gain["value"] - gain["low"], gain["high"] - gain["value"]
    # Three times the interval of 95 %, which one draw of the noise in twenty leaves.
    assert gain["value"] - 3 * sides[0] < before - after < gain["value"] + 3 * sides[1]
    assert gain["low"] > 0 and gain["high"] - gain["low"] < 0.06
    assert export(artifacts, "torchscript", root / "model.pt") < 1e-5
    assert "its Brier score is smaller by" in dict(run_summary(root))["recalibration"]
    assert "its Brier score is smaller by" in (artifacts / "report.html").read_text()


def test_only_classes_can_be_recalibrated(workspace: Workspace, declared: Declared) -> None:
    lines = [f"{at / 300:.4f},3" for at in range(300)]
    (workspace.root / "fruit.csv").write_text("\n".join(["price,kind", *lines]) + "\n")
    reader = csv_of(number("price", 0, 1), label("kind"))
    declared(
        "fruit.csv",
        model={"name": "linear"},
        reader=reader,
        holdout="private",
        classes=[],
        target={"bounds": [0, 9]},
    )
    with refused_as("bad_keys", keys=("privacy.evaluation.recalibrate",)):
        workspace.set("privacy", evaluation={"recalibrate": True})


PEOPLE = {"column": "who", "per_person": 2}


def people_of(workspace: Workspace, declared: Declared, person: dict[str, Any]) -> NDArray[np.int64]:
    """Prices by which rows can be told; each of 200 people has two, whose sum is 1."""
    prices = np.random.default_rng(1).integers(1, 1000, 200) / 1000
    rows = [(who, price) for who, one in enumerate(prices) for price in (one, 1 - one)]
    lines = [f"p{who},{price:.3f},{'yes' if price > 0.5 else 'no'}" for who, price in rows]
    (workspace.root / "fruit.csv").write_text("\n".join(["who,price,kind", *lines]) + "\n")
    reader = csv_of(number("price", 0, 1), label("kind"), {"name": "who", "kind": "ignored"})
    declared(
        "fruit.csv",
        model={"name": "softmax"},
        reader=reader,
        holdout="private",
        person=person,
        records={"at_most": 9000},
    )
    return np.array([who for who, _ in rows])


def test_all_rows_of_a_person_are_in_one_half(workspace: Workspace, declared: Declared) -> None:
    people_of(workspace, declared, PEOPLE)
    folder = workspace.root / "datasets/prepared"
    data = load_held_out(folder)
    halves, prices = halves_of(data, folder), np.asarray(data.test_features)[:, 0]
    by_person: dict[float, set[int]] = {}
    for price, half in zip(prices, halves, strict=True):
        by_person.setdefault(round(min(price, 1 - price), 3), set()).add(int(half))
    assert len(by_person) > 15 and {frozenset(each) for each in by_person.values()} == {
        frozenset({0}),
        frozenset({1}),
    }


def test_rows_of_a_person_that_are_records_of_their_own_are_refused(
    workspace: Workspace, declared: Declared
) -> None:
    people_of(workspace, declared, PEOPLE | {"group_privacy": True})
    with refused_as("bad_keys", keys=("privacy.evaluation.recalibrate", "person.group_privacy")):
        workspace.set("privacy", evaluation={"recalibrate": True})


def test_the_same_rows_in_other_halves_are_another_run(workspace: Workspace, declared: Declared) -> None:
    """Under the same noise the difference of two releases would tell who moved."""
    people_of(workspace, declared, PEOPLE)
    prepared, plan = workspace.root / "datasets/prepared", workspace.root / "artifacts/plan.json"

    def digest() -> str:
        settings = params.load(workspace.root / "params.yaml", reads=train.READS)
        return train.Job(settings, plan.read_bytes(), prepared, workspace.info).digest(workspace.home)

    workspace.set("privacy", evaluation={})
    without = digest()
    workspace.set("privacy", evaluation={"recalibrate": True})
    before = digest()
    halves = np.load(prepared / "test_halves.npy")
    np.save(prepared / "test_halves.npy", 1 - halves)
    assert digest() != before
    workspace.set("privacy", evaluation={})
    assert digest() == without


def test_halves_that_were_prepared_again_meanwhile_are_not_counted(
    underconfident: Workspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prepared_meanwhile(data: HeldOut, folder: Path) -> NDArray[np.int64]:
        (folder / "contents").write_text("0" * 64 + "\n")
        return halves_of(data, folder)

    monkeypatch.setattr(train, "halves_of", prepared_meanwhile)
    underconfident.train()
    assert "could not be evaluated (DataRefusedError)" in caplog.text
    assert read(underconfident, "evaluation.json") == {}
