"""A number to predict: read within its bounds, trained on, measured and predicted in its own units."""

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML

from algorithms.errors import ModelRefusedError, RefusedError
from algorithms.methods import from_settings
from algorithms.models import build
from algorithms.models.saved import load
from algorithms.privacy.card import load as load_card
from algorithms.privacy.ledger import Ledger
from data import DatasetInfo
from data.card import DataCard, DataRefusedError, data_card
from data.prepared import load as load_prepared
from data.readers import encoding, rows
from tasks import calibrate, evaluate
from tasks.config import params
from tasks.config.overrides import recipe
from tasks.predict import predict
from tasks.predict import write as write_predictions
from tasks.runs.metrics import metric_rows, report_text
from tasks.runs.summary import run_summary
from tasks.tuning.search import Search, tune
from tasks.tuning.search_plan import plan_search
from tasks.tuning.settings import Tuning
from tests.support.cards import card, category, csv_of, label, number
from tests.support.metrics import metrics_of
from tests.support.own_records import finish
from tests.support.refusals import contradicting
from tests.support.workspace import Workspace

LOW, HIGH = 10.0, 50.0
DIGITS = {"kind": "digits", "sha256": "0" * 64}
SPLIT = {"salt": "tiny", "test_fraction": 0.3}
CARD = card(
    "prices",
    public=True,
    unit="one sale",
    cap={"epsilon": 100.0, "delta": 1e-2},
    records={"train": 600, "test": 200},
    target={"bounds": [LOW, HIGH]},
    reader=csv_of(number("size", 0, 1), category("kind", "old", "new"), label("price")),
)


def write(path: Path, count: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    sizes, kinds = draw.uniform(0, 1, count).round(4), draw.integers(0, 2, count)
    prices = (15 + 20 * sizes + 8 * kinds + draw.normal(0, 1, count)).round(3)
    prices[:2] = 5.0, 500.0  # beyond the bounds
    rows = [f"{s},{('old', 'new')[k]},{p}" for s, k, p in zip(sizes, kinds, prices, strict=True)]
    path.write_text("\n".join(["size,kind,price", *rows]) + "\n")
    return prices


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("regression")
    (root / "data/cards").mkdir(parents=True)
    (root / "home").mkdir()
    write(root / "train.csv", 600, 1)
    write(root / "test.csv", 200, 2)
    files = {
        part: {
            "path": f"{part}.csv",
            "sha256": hashlib.sha256((root / f"{part}.csv").read_bytes()).hexdigest(),
        }
        for part in ("train", "test")
    }
    YAML(typ="safe", pure=True).dump(CARD | {"files": files}, root / "data/cards/prices.yaml")
    YAML(typ="safe", pure=True).dump({}, root / "params.yaml")
    Workspace(root, root / "home").prepare("prices")
    return root


def document(root: Path, algorithm: str, **model: Any) -> dict[str, Any]:
    card = data_card("prices", root / "data/cards")
    usual = recipe(card, algorithm, 8.0)
    return {
        "data": {"dataset": "prices"},
        "privacy": {"epsilon": 8.0, "delta": 1e-4},
        "algorithm": {"name": algorithm} | usual.settings,
        "model": {"name": usual.model} | model,
        "performance": {"threads": 1, "device": "cpu"},
        "tracking": {"mode": "disabled"},
    }


def run(root: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, **model: Any) -> dict[str, Any]:
    monkeypatch.setenv("EPSILONFLOW_HOME", str(root / "home"))
    monkeypatch.chdir(root)
    place = Workspace(root, root / "home")
    place.write(document(root, algorithm, **model))
    finish(place)
    return metrics_of(place)


@pytest.mark.usefixtures("same_secrets")
def test_a_search_takes_the_settings_with_the_best_r2(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPSILONFLOW_HOME", str(root / "home"))
    info, base = DatasetInfo.read(root / "datasets/prepared"), document(root, "dp_sgd")
    rates = {"algorithm.update.learning_rate": [1e-9, base["algorithm"]["update"]["learning_rate"]]}
    asked = {"space": rates, "epsilon": 8.0, "show_all": True}
    tuning = Tuning.model_validate(asked)
    search = Search(tuning, plan_search(tuning, base, info), root / "datasets/prepared", info)
    tune(search, ledger=Ledger.open(f"sqlite:///{root}/home/ledger.sqlite"), home=root / "home", root=root)
    with (root / "tuned/trials.csv").open() as file:
        scores = [float(row["score"]) for row in csv.DictReader(file)]
    best = evaluate.metrics_of(root / "tuned/model.safetensors", root / "datasets/prepared")["test_r2"]
    assert scores[0] < 0.5 < scores[1] == best


def test_labels_are_clamped_to_their_bounds_and_scaled(root: Path) -> None:
    prepared = load_prepared(root / "datasets/prepared")
    labels = np.array(prepared.train_labels)
    assert labels.dtype == np.float32 and labels[:2].tolist() == [-1.0, 1.0]
    prices = np.loadtxt(root / "train.csv", delimiter=",", skiprows=1, usecols=2)
    assert labels == pytest.approx((2 * (prices.clip(LOW, HIGH) - LOW) / (HIGH - LOW) - 1).astype(np.float32))


@pytest.mark.usefixtures("same_secrets")
def test_a_run_ends_with_errors_in_the_numbers_own_units(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = run(root, monkeypatch, "dp_sgd")
    assert set(measured) == {
        "test_r2", "test_rmse", "test_mae", "mean_rmse", "test_loss", "gain",
        "epsilon", "delta", "run_id",
    }  # fmt: skip
    batches = [*predict(root / "artifacts", root / "test.csv")]
    said = [row for some in batches for row in some.predicted]
    assert [*write_predictions(batches, (), root / "predicted.parquet")][-1] == len(said)
    stored = pd.read_parquet(root / "predicted.parquet")["predicted"]
    assert stored.dtype == np.float64 and [f"{number:.6g}" for number in stored] == said
    assert any(float(text) != number for text, number in zip(said, stored, strict=True))  # unrounded
    found = np.array(said, float)
    real = np.loadtxt(root / "test.csv", delimiter=",", skiprows=1, usecols=2).clip(LOW, HIGH)
    assert measured["test_rmse"] == pytest.approx(np.sqrt(np.square(found - real).mean()), rel=1e-4)
    assert measured["test_mae"] == pytest.approx(np.abs(found - real).mean(), rel=1e-4)
    assert measured["mean_rmse"] == pytest.approx(real.std(), rel=1e-5)
    assert measured["test_r2"] == pytest.approx(1 - np.square(found - real).mean() / real.var(), rel=1e-3)
    assert measured["test_r2"] > 0.5 and found.min() >= LOW and found.max() <= HIGH
    page = (root / "artifacts/report.html").read_text()
    assert "of the variance explained (R2)" in page and "right answers" not in page
    assert load_card(root / "artifacts/privacy_card.json").setting.private
    rows = dict(run_summary(root))
    assert rows["variance explained (R2)"] == f"{measured['test_r2']:.2%}" and "test accuracy" not in rows
    assert load(root / "artifacts").target == {"bounds": [LOW, HIGH]}


@pytest.mark.usefixtures("same_secrets")
def test_a_line_search_predicts_numbers_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(root, monkeypatch, "dp_agd")["test_r2"] > 0.3


@pytest.mark.parametrize(("name", "shape"), [("mlp", (3,)), ("tanh_cnn", (1, 28, 28))])
def test_a_network_has_one_output_and_half_the_squared_error(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, input_shape=shape, classes=1, seed=0)
    inputs, labels = torch.rand(4, *shape), torch.tensor([-1.0, 0.0, 0.5, 1.0])
    outputs = model.module(inputs)
    assert outputs.shape == (4, 1)
    assert torch.allclose(model.losses(outputs, labels), (outputs[:, 0] - labels) ** 2 / 2)


@pytest.mark.parametrize("model", ["softmax", "logistic", "huber_svm"])
def test_models_of_classes_are_refused(model: str) -> None:
    with pytest.raises(ModelRefusedError, match="'linear'"):
        build(model, input_shape=(3,), classes=1, seed=0)
    with pytest.raises(ModelRefusedError, match="predicts a number"):
        build("linear", input_shape=(3,), classes=2, seed=0)


@pytest.mark.parametrize("algorithm", ["majority", "heavy_ball", "norm_bound_sgd", "objective_perturbation"])
def test_methods_that_need_classes_or_a_bounded_gradient_are_refused(root: Path, algorithm: str) -> None:
    info = DatasetInfo.read(root / "datasets/prepared")
    settings = params.parse(document(root, algorithm), reads=calibrate.READS)
    with pytest.raises(RefusedError):
        calibrate.calibrate(settings, info)
    assert from_settings(document(root, algorithm)["algorithm"]) is not None


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"target": {"bounds": [5, 5]}}, ("bounds",)),
        ({"classes": ["a", "b"]}, ("classes", "target")),
        ({"target": None}, ("classes", "target")),
        ({"reader": DIGITS, "shape": [1, 8, 8], "split": SPLIT}, ("target", "reader.kind")),
    ],
)
def test_a_card_has_classes_or_a_target(change: dict[str, Any], keys: tuple[str, ...]) -> None:
    files = {
        part: {"path": f"{part}.csv", "sha256": f"{n}" * 64} for n, part in enumerate(("train", "test"), 1)
    }
    card = CARD | {"files": {} if "reader" in change else files} | change
    with contradicting(*keys):
        DataCard.model_validate_json(json.dumps(card))


def test_a_label_that_is_no_number_is_refused_without_its_value(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("size,kind,price\n0.5,old,a secret\n")
    card = data_card("prices", root / "data/cards")
    with pytest.raises(DataRefusedError) as refused:
        read = rows.tables("train", path, card.reader, card.label_type)  # type: ignore[arg-type]
        [encoding.records(some, card.reader, card.label_type, "train.csv") for some in read]  # type: ignore[arg-type]
    assert "not a number" in str(refused.value) and "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("r2", "words"), [(0.2, "better than"), (0.0, "no better than"), (-0.1, "worse than")]
)
def test_the_terminal_and_the_page_say_whether_the_mean_would_do_better(r2: float, words: str) -> None:
    metrics = {"test_r2": r2, "test_rmse": 3.0, "test_mae": 2.0, "mean_rmse": 3.1}
    rows = dict(metric_rows(metrics))
    assert rows["root mean squared error of the mean"] == f"3.1: the model is {words} always naming the mean"
    warning = report_text(metrics, 100, 0.0).warning
    assert warning == (None if r2 > 0 else f"The model is {words} always naming the mean.")
