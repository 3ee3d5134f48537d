"""Tables that are encoded as cells, from the card to a prediction; methods that take linear models, and people."""

import hashlib
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

from algorithms.cell_histograms import TableHistograms
from algorithms.core.minibatch import DPSGDState
from algorithms.methods.dp_sgd import DPSGD
from algorithms.model_facts import facts_of
from algorithms.models.cell_histograms import HistogramCells
from algorithms.models.saved import load
from algorithms.privacy.card import load as load_card
from algorithms.privacy.card import verify, verify_card
from data.card import data_card
from data.files import public_key
from data.prepared import load as load_prepared
from flows.cli.costs import _plan_rows
from tasks import calibrate, model_building
from tasks.config import params
from tasks.config.overrides import recipe
from tasks.export import export
from tasks.predict import predict
from tasks.runs.metrics import _shrinkage_text, metric_rows
from tasks.runs.store import training_digest
from tasks.tuning.search import Search
from tasks.tuning.search_plan import SearchPlan
from tasks.tuning.settings import Tuning
from tests.support.cards import card, category, csv_of, label, number
from tests.support.metrics import metrics_of
from tests.support.own_records import finish
from tests.support.refusals import refused_as
from tests.support.soak import soak_but
from tests.support.workspace import Workspace, crash, killed_in

pytestmark = pytest.mark.usefixtures("same_secrets")
CELLS = {"grids": [4, 16], "trees": 8}
HISTOGRAMS = {"features": {"name": "histograms", "noise": 5.0, "bins": 4}}
COLUMNS = [number("size", 0, 1000) | {"missing": 500.0}, category("kind", "old", "new")]
TARGETS: dict[str, dict[str, Any]] = {
    "two": {"classes": ["no", "yes"]},
    "three": {"classes": ["low", "middle", "high"]},
    "price": {"target": {"bounds": [0.0, 10.0]}},
}


def write(path: Path, count: int, seed: int) -> None:
    """Rows whose answers rise with the size, a tenth of which is missing; each person has two rows."""
    draw = np.random.default_rng(seed)
    lines = ["who,size,kind,two,three,price"]
    for place in range(count):
        size, kind = draw.lognormal(4, 1), draw.choice(["old", "new"])
        two, three = ("no", "yes")[size > 55], ("low", "middle", "high")[int(size > 30) + int(size > 90)]
        shown = "" if draw.random() < 0.1 else f"{size:.3f}"
        lines.append(f"p{place // 2},{shown},{kind},{two},{three},{np.log(size):.3f}")
    path.write_text("\n".join(lines) + "\n")


def declared(root: Path, name: str, *, people: bool = False, **cells: float) -> None:
    ignored = [{"name": other, "kind": "ignored"} for other in ("who", *TARGETS) if other != name]
    files = {
        part: {
            "path": f"{part}.csv",
            "sha256": hashlib.sha256((root / f"{part}.csv").read_bytes()).hexdigest(),
        }
        for part in ("train", "test")
    }
    document = card(
        name,
        public=True,
        cap={"epsilon": 1000.0, "delta": 1e-2},
        records={"train": 300 if people else 600, "test": 200},
        reader=csv_of(*ignored, *COLUMNS, label(name)) | {"cells": CELLS | cells},
        files=files,
        **TARGETS[name],
    )
    if people:
        document |= {"person": {"column": "who", "per_person": 2}}
    YAML(typ="safe", pure=True).dump(document, root / f"data/cards/{name}.yaml")
    Workspace(root, root / "home").prepare(name)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data/cards").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    write(tmp_path / "train.csv", 600, 1)
    # Other people than those who are trained on.
    write(tmp_path / "test.csv", 200, 2)
    text = (tmp_path / "test.csv").read_text().replace("\np", "\nq")
    (tmp_path / "test.csv").write_text(text)
    monkeypatch.setenv("EPSILONFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def document(root: Path, name: str, algorithm: str, **groups: Any) -> dict[str, Any]:
    usual = recipe(data_card(name, root / "data/cards"), algorithm, 8.0)
    settings = usual.settings | ({"steps": 60} if usual.settings.get("steps") else {})
    return {
        "data": {"dataset": name},
        "privacy": {"epsilon": 8.0, "delta": 1e-4},
        "algorithm": {"name": algorithm} | settings,
        "model": {"name": usual.model},
        "performance": {"threads": 1, "device": "cpu"},
        "tracking": {"mode": "disabled"},
    } | groups


def run(root: Path, name: str, algorithm: str, **groups: Any) -> dict[str, Any]:
    place = Workspace(root, root / "home")
    place.write(document(root, name, algorithm, **groups))
    finish(place)
    return metrics_of(place)


PREDICTED: list[tuple[str, str, float, dict[str, Any]]] = [
    ("three", "test_accuracy", 0.7, {}),
    ("price", "test_r2", 0.3, {"features": HISTOGRAMS["features"] | {"merged_cells": 2}}),
    ("two", "test_accuracy", 0.8, {}),
    ("two", "test_accuracy", 0.8, HISTOGRAMS),
    ("price", "test_r2", 0.3, {"features": {"name": "target_scale", "noise": 5.0, "mean_noise": 5.0}}),
]


@pytest.mark.parametrize(
    ("name", "metric", "low", "features"),
    soak_but([PREDICTED[0], PREDICTED[1]], PREDICTED),
)
def test_a_run_predicts_from_the_file_what_it_was_measured_on(
    root: Path, name: str, metric: str, low: float, features: dict[str, Any]
) -> None:
    declared(root, name)
    assert run(root, name, "dp_sgd", **features)[metric] > low
    model, prepared = load(root / "artifacts"), load_prepared(root / "datasets/prepared")
    with torch.no_grad():
        scores = model(torch.from_numpy(np.array(prepared.test_features)))
    (some,) = predict(root / "artifacts", root / "test.csv")
    if name == "price":
        expected = 5.0 + 5.0 * scores[:, 0].clamp(-1, 1).double()
        assert np.array(some.predicted, float) == pytest.approx(expected.numpy(), rel=1e-4)
    else:
        assert some.predicted == tuple(model.classes[place] for place in scores.argmax(-1))
    assert export(root / "artifacts", "torchscript", root / "model.pt") < 1e-4
    exported = torch.jit.load(root / "model.pt")(torch.from_numpy(np.array(prepared.test_features)))
    assert torch.allclose(exported, scores, atol=1e-5)
    if features:
        assert export(root / "artifacts", "onnx", root / "model.onnx") < 1e-4
        artifacts = root / "artifacts"
        by_one_file = verify_card.verify(artifacts, key=public_key(root / "home"))
        assert [check for check in by_one_file if check[1] is False] == []
        # Of a number its mean, too, if it was asked for, and its gain, six times on the way and after the training.
        totals = 1 + 7 * (name == "price") + ("mean_noise" in features["features"])
        assert pd.read_parquet(artifacts / "trace.parquet")["kind"].value_counts().get("total") == totals


METHODS = [
    "dp_gd", "dp_agd", "norm_bound_sgd", "heavy_ball", "nesterov", "objective_perturbation", "output_perturbation",
    "dp_ftrl", "adaclip", "quantile_clipping", "dpis",
]  # fmt: skip
BY_KIND = ["dp_agd", "objective_perturbation"]
"""By steps and by a minimum of all records."""


@pytest.mark.parametrize("methods", soak_but([BY_KIND], [BY_KIND, METHODS]))
def test_methods_that_take_linear_models_take_cells(root: Path, methods: list[str]) -> None:
    declared(root, "two")
    accuracies = {algorithm: run(root, "two", algorithm)["test_accuracy"] for algorithm in methods}
    majority = metrics_of(Workspace(root, root / "home"))["majority_accuracy"]
    assert all(accuracy > majority for accuracy in accuracies.values()), accuracies


def test_the_rows_of_a_person_are_one_record_of_cells(root: Path) -> None:
    declared(root, "two", people=True)
    assert load_prepared(root / "datasets/prepared").train_features.shape[:2] == (300, 2)
    assert run(root, "two", "dp_sgd", **HISTOGRAMS)["test_accuracy"] > 0.7


def test_methods_that_bound_norms_need_less_noise_by_the_norm_of_one(root: Path) -> None:
    """The sensitivity of a gradient is that of the logistic loss times the norm: sqrt(3) with 2 columns and a bias."""
    noises = []
    for cells in (CELLS, None):
        declared(root, "two")
        path = root / "data/cards/two.yaml"
        own = YAML(typ="safe", pure=True).load(path)
        own["reader"]["cells"] = cells
        YAML(typ="safe", pure=True).dump(own, path)
        Workspace(root, root / "home").prepare("two")
        settings = params.parse(document(root, "two", "heavy_ball"), reads=calibrate.READS)
        info = Workspace(root, root / "home").info
        noises.append(calibrate.plan_for(settings, info).facts.gradient_norm(2))
    assert noises == [pytest.approx(1.0), pytest.approx(3.0**0.5)]


def test_learned_features_of_cells_are_refused(root: Path) -> None:
    declared(root, "two")
    asked = document(root, "two", "dp_sgd", features={"name": "centred"})
    info = Workspace(root, root / "home").info
    with refused_as("bad_keys", keys=("features.name", "reader.cells")):
        calibrate.plan_for(params.parse(asked, reads=calibrate.READS), info)


@pytest.mark.parametrize("trees", [64, 0])
def test_histograms_keep_the_constant_cell_that_the_card_declares(root: Path, trees: int) -> None:
    declared(root, "two", trees=trees, tree_share=0.25, constant_share=0.1)
    info = Workspace(root, root / "home").info
    settings = params.parse(document(root, "two", "dp_sgd", **HISTOGRAMS), reads=calibrate.READS)
    features = model_building.features_for(settings, info)
    assert isinstance(features, TableHistograms)
    sizes, weights = features.module(info.input_shape).layout
    assert sizes[-1] == 1 and weights[-1] ** 2 == pytest.approx(0.1, rel=1e-5)
    learned = sum(weight**2 for size, weight in zip(sizes, weights, strict=True) if size == 16)
    assert learned == pytest.approx(0.225 if trees else 0.45, rel=1e-5)


def test_histograms_of_other_columns_of_the_same_rows_get_other_noise(root: Path) -> None:
    """A training and a search; without histograms the columns decide nothing, and ids stay what they are."""
    declared(root, "two")
    info, prepared = Workspace(root, root / "home").info, root / "datasets/prepared"
    others = replace(info, cell_columns=info.cell_columns[::-1])
    tuning = Tuning.model_validate({"space": {"algorithm.steps": [2, 3]}, "epsilon": 4.0})
    model = params.ModelParams(name="additive")
    for settings, is_covered in ((HISTOGRAMS, True), ({}, False)):
        search_plan = SearchPlan(False, 1.0, {"pld": 4.0}, [], False, (settings,), ())
        trainings, searches = zip(
            *(
                (
                    training_digest(settings, model, (), one, prepared, home=root / "home"),
                    Search(tuning, search_plan, prepared, one).digest(root / "home"),
                )
                for one in (info, others)
            ),
            strict=True,
        )
        assert (len({*trainings}) > 1, len({*searches}) > 1) == (is_covered, is_covered)


def test_a_run_killed_after_its_histograms_releases_the_same_again_for_one_charge(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared(root, "two")
    place, released, learned = (
        Workspace(root, root / "home"),
        list[torch.Tensor](),
        HistogramCells.buffers_from,
    )

    def noting(cells: HistogramCells, counts: torch.Tensor, noise_std: float) -> dict[str, torch.Tensor]:
        released.append(counts.clone())
        return learned(cells, counts, noise_std)

    monkeypatch.setattr(HistogramCells, "buffers_from", noting)
    place.write(document(root, "two", "dp_sgd", **HISTOGRAMS))
    with killed_in(DPSGD, "step"):
        place.train()
    place.train()
    assert len(released) == 2 and torch.equal(*released)
    assert [row.kind for row in place.ledger.history("two")].count("reserve") == 1
    file = load_file(root / "artifacts/model.safetensors")
    assert torch.equal(file["features.counts"], released[0])


def test_a_run_with_histograms_goes_on_from_its_checkpoint(root: Path) -> None:
    """Killed once and never, they end in the same model; what is not learned of their map is in no checkpoint."""
    declared(root, "two")
    asked = document(root, "two", "dp_sgd", **HISTOGRAMS) | {"performance": {"checkpoint_seconds": 1e-9}}
    asked["privacy"]["noise"], models, step = "seeded", [], DPSGD.step

    def until_the_second(method: DPSGD, state: DPSGDState, *rest: Any) -> DPSGDState:
        return crash() if int(state.optimizer_state.count) == 1 else step(method, state, *rest)

    for home in ("killed", "never"):
        place = Workspace(root, root / home)
        place.write(asked)
        with killed_in(DPSGD, "step", until_the_second) if home == "killed" else nullcontext():
            place.train()
        if home == "killed":
            place.train()
        models.append(place.model())
    assert models[0] == models[1]


def test_histograms_of_a_table_that_an_earlier_version_prepared_are_refused(root: Path) -> None:
    """Its description does not say yet what of its cells may be counted."""
    declared(root, "two")
    asked = params.parse(document(root, "two", "dp_sgd", **HISTOGRAMS), reads=calibrate.READS)
    earlier = replace(Workspace(root, root / "home").info, cell_columns=())
    with refused_as("not_prepared"):
        calibrate.plan_for(asked, earlier)


@pytest.mark.parametrize(
    ("name", "change"),
    [("price", {"features": {"name": "none"}}), ("two", {"model": {"name": "mlp"}})],
    ids=["no released centre", "no linear model"],
)
def test_a_share_for_shrinking_stays_unspent_where_another_model_is_chosen(
    root: Path, name: str, change: dict[str, Any]
) -> None:
    """`init` sets it, and whoever changes the model alone need not know of it."""
    declared(root, name, constant_share=0.1)
    place, asked = Workspace(root, root / "home"), document(root, name, "dp_sgd", **change)
    asked["algorithm"] |= {"steps": 3, "shrink_share": 0.05, "error_share": 0.05}
    place.write(asked)
    finish(place)
    assert facts_of(root / "artifacts/model.safetensors").shrinkage is None
    kinds = pd.read_parquet(root / "artifacts/trace.parquet")["kind"]
    assert set(kinds) == {"gradient"}
    settings = params.load(root / "params.yaml", reads=("data", *calibrate.READS))
    rows = dict(_plan_rows(settings, calibrate.plan_for(settings, place.info)))
    assert "is not spent" in rows["shrinkage"] and "is not spent" in rows["clip norm"]


def test_a_share_for_shrinking_stays_unspent_by_norm_bounds_where_rows_share_no_cell(root: Path) -> None:
    shares = []
    for constant_share in (0.0, 0.1):
        declared(root, "two", constant_share=constant_share)
        asked = document(root, "two", "norm_bound_sgd")
        asked["algorithm"]["shrink_share"] = 0.05
        settings = params.parse(asked, reads=calibrate.READS)
        shares.append(calibrate.plan_for(settings, Workspace(root, root / "home").info).method_params)
    assert not shares[0] and shares[1]


@pytest.mark.parametrize(("name", "follows"), [("price", True), ("two", False)])
def test_the_clip_norm_follows_errors_where_a_number_is_predicted(
    root: Path, name: str, follows: bool
) -> None:
    """A share for it stays unspent where classes are, and both verifiers find its releases on the card."""
    declared(root, name, constant_share=0.1)
    learned = HISTOGRAMS if name == "price" else {}
    place, asked = Workspace(root, root / "home"), document(root, name, "dp_sgd", **learned)
    asked["algorithm"] |= {"steps": 3, "shrink_share": 0.05, "error_share": 0.05}
    place.write(asked)
    finish(place)
    kinds = list(pd.read_parquet(root / "artifacts/trace.parquet")["kind"])
    steps = ["gradient", "total"] * 3 if follows else ["gradient"] * 3 + ["total"]
    assert kinds[-len(steps) :] == steps and set(kinds[: -len(steps)]) == {"total"}
    settings = params.load(root / "params.yaml", reads=("data", *calibrate.READS))
    rows = dict(_plan_rows(settings, calibrate.plan_for(settings, place.info)))
    assert ("2 releases on the way" if follows else "is not spent") in rows["clip norm"]
    artifacts = root / "artifacts"
    by_one_file = verify_card.verify(artifacts, key=public_key(root / "home"))
    assert [check for check in by_one_file if check[1] is False] == []
    assert verify(load_card(artifacts / "privacy_card.json"), artifacts, key=public_key(root / "home")).passed


@pytest.mark.parametrize(
    ("epsilon", "words"), [(8.0, "none, as the model gained"), (0.05, "released frequencies")]
)
def test_a_shrunk_run_says_how_much_of_its_training_is_kept(root: Path, epsilon: float, words: str) -> None:
    declared(root, "two", constant_share=0.1)
    place, asked = Workspace(root, root / "home"), document(root, "two", "dp_sgd")
    asked["algorithm"]["shrink_share"], asked["privacy"]["epsilon"] = 0.05, epsilon
    place.write(asked)
    finish(place)
    metrics, stated = metrics_of(place), facts_of(root / "artifacts/model.safetensors").shrinkage
    assert stated is not None and metrics["shrinkage"] == {**stated.model_dump(), "predicts": "class"}
    assert stated.kept == 1.0 if words.startswith("none") else stated.kept < 1.0
    assert re.search(words, dict(metric_rows(metrics))["shrinkage"])
    (weights,) = load_file(root / "artifacts/model.safetensors").values()
    assert bool(weights[:, :-1].any()) == (stated.kept > 0.0)
    artifacts = root / "artifacts"
    assert list(pd.read_parquet(artifacts / "trace.parquet")["kind"].iloc[[0, -1]]) == ["total", "total"]
    by_one_file = verify_card.verify(artifacts, key=public_key(root / "home"))
    assert [check for check in by_one_file if check[1] is False] == []
    assert verify(load_card(artifacts / "privacy_card.json"), artifacts, key=public_key(root / "home")).passed


@pytest.mark.parametrize(
    ("gain", "kept", "words"),
    [
        (4.0, 1.0, r"^none, as the model gained 4\.0 standard deviations"),
        (
            -3.0,
            0.0,
            r"^nothing certain was learnt \(the model lost 3\.0 .*\), so the released frequencies are",
        ),
        (-1.0, 0.25, r"^the model lost 1\.0 .*, less than its noise costs, so 25% of it is kept"),
        (
            2.0,
            0.75,
            r"^the model gained 2\.0 .*beyond chance, so 75% of it is kept, and the rest is the released",
        ),
    ],
)
def test_what_a_shrinkage_kept_is_said_in_words(gain: float, kept: float, words: str) -> None:
    shrinkage = {"gain": gain, "kept": kept, "predicts": "labels"}
    assert re.search(words, _shrinkage_text({"shrinkage": shrinkage}))
