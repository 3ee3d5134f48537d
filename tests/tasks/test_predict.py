"""A trained model is used: on files, from Python, in the forms of others, and by a stranger who has a release."""

import csv
import importlib
import io
import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import algorithms
from algorithms.errors import ModelRefusedError
from algorithms.models.saved import TrainedModel
from algorithms.plain_text import for_markdown
from algorithms.privacy.card import build, load
from algorithms.privacy.card.text import statement
from data import dataset_info
from data.card import DataRefusedError, data_card
from data.new_records import records_in
from data.preparation import Preparation
from data.prepared import load_held_out
from data.readers.texts import read_texts
from flows.cli.main import app
from tasks.export import NO_CARD, _add_library_files, export, release
from tasks.predict import predict
from tests.algorithms.models.forms import FORMS, LORA, form_of, moved
from tests.algorithms.privacy.conftest import KEY
from tests.data.conftest import tar
from tests.support.checkout import PROJECT, Checkout
from tests.support.modes import open_to_others, open_umask
from tests.support.refusals import refused_as
from tests.support.soak import soak_but
from tests.support.synthetic_run import record, write_run


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def artifacts(finished_once: Checkout) -> Path:
    return finished_once.root / "artifacts"


@pytest.fixture(scope="module")
def trained(artifacts: Path) -> TrainedModel:
    return algorithms.load(artifacts)


def test_a_model_predicts_images_as_it_was_evaluated_on_them(
    finished_once: Checkout, trained: TrainedModel, tmp_path: Path
) -> None:
    held_out = load_held_out(finished_once.root / "datasets/prepared")
    features = np.array(held_out.test_features[:40])
    for place, image in enumerate(features):
        Image.fromarray((image[0] * 16).astype(np.uint8)).save(tmp_path / f"{place:02}.png")
    (found,) = predict(trained, tmp_path)
    with torch.no_grad():
        scores = trained(torch.from_numpy(features))
    assert found.names[:2] == ("00.png", "01.png") and found.is_probability
    np.testing.assert_allclose(found.scores, scores.double().softmax(-1).numpy(), rtol=1e-9)
    np.save(tmp_path / "features.npy", features)
    (again,) = predict(trained, tmp_path / "features.npy")
    assert again.predicted == found.predicted and again.names[0] == "1"


def test_the_command_writes_csv_and_parquet(artifacts: Path, tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "blank.png")
    shown = call("predict", str(tmp_path / "blank.png"), "--model", str(artifacts))
    (row,) = csv.DictReader(io.StringIO(shown.stdout))
    assert row["record"] == "blank.png" and row["predicted"] in map(str, range(10))
    assert (
        call(
            "predict", str(tmp_path), "--model", str(artifacts), "--to", str(tmp_path / "p.parquet")
        ).exit_code
        == 0
    )
    table = pd.read_parquet(tmp_path / "p.parquet")
    assert list(table["predicted"]) == [row["predicted"]]
    assert table.filter(like="probability").sum(axis=1).tolist() == pytest.approx([1.0])


def test_a_file_is_replaced_by_whole_predictions_alone(artifacts: Path, tmp_path: Path) -> None:
    model, image = ("--model", str(artifacts)), tmp_path / "images" / "0.png"
    image.parent.mkdir()
    Image.new("L", (8, 8)).save(image)
    to, features = tmp_path / "new" / "p.csv", tmp_path / "features.npy"
    with open_umask():
        assert call("predict", str(image.parent), *model, "--to", str(to)).exit_code == 0
    written = to.read_bytes()
    assert open_to_others(to) == []
    Image.new("L", (9, 8)).save(image.parent / "1.png")
    np.save(features, np.zeros((0, 1, 8, 8), np.float32))
    for given, words in ((image.parent, "has 9 x 8 pixels"), (features, "holds no records")):
        refused = call("predict", str(given), *model, "--to", str(to))
        assert refused.exit_code == 2 and words in refused.stderr
        assert [file.read_bytes() for file in to.parent.iterdir()] == [written]
    same = call("predict", str(to), *model, "--to", str(to))
    assert same.exit_code == 2 and "to another file" in same.stderr and to.read_bytes() == written


def test_an_array_of_any_numbers_is_predicted_on_and_of_anything_else_refused(
    trained: TrainedModel, tmp_path: Path
) -> None:
    file, ones = tmp_path / "features.npy", np.ones((2, 1, 8, 8))
    found = []
    for values in (ones, ones.astype(np.int64), ones.astype(bool)):
        np.save(file, values)
        found += [some.scores for some in predict(trained, file)]
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    for other in (ones.astype(str), ones.astype(complex)):
        np.save(file, other)
        with refused_as("unlike_training", DataRefusedError, expected="numbers"):
            list(predict(trained, file))


def test_an_array_of_tokens_holds_whole_numbers_that_the_model_knows(tmp_path: Path) -> None:
    for values, fields in (
        (np.ones((1, 4)), {"expected": "whole numbers from 0 to 8"}),
        (np.full((1, 4), 9), {"highest": 9, "last": 8}),
    ):
        np.save(tmp_path / "tokens.npy", values)
        with refused_as("unlike_training", DataRefusedError, **fields):
            list(records_in(tmp_path / "tokens.npy", None, (4,), tokens=9))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.png", "there is no"),
        ("large.png", "has 9 x 8 pixels"),
        ("other.png", "is not an image, and the"),
    ],
)
def test_what_cannot_be_predicted_on_is_refused(
    artifacts: Path, tmp_path: Path, name: str, words: str
) -> None:
    Image.new("L", (9, 8)).save(tmp_path / "large.png")
    (tmp_path / "other.png").write_text("no image")
    refused = call("predict", str(tmp_path / name), "--model", str(artifacts))
    assert refused.exit_code == 2 and words in refused.stderr


def test_a_table_without_labels_becomes_the_features_of_training(tmp_path: Path) -> None:
    (tmp_path / "visits.yaml").write_text((PROJECT / "examples/own_data/visits.yaml").read_text())
    card = data_card("visits", tmp_path)
    document: Any = Preparation.from_card(card, "none", None).document()
    assert not [word for word in ("sha256", "cap", "population") if word in json.dumps(document)]
    carried = Preparation.of(json.loads(json.dumps(document)))
    shape = dataset_info(card).input_shape
    rows = "age,distance_km,insurance,reason\n50,100,none,pain\n18,,unheard of,injury\n"
    (tmp_path / "new.csv").write_text(rows)
    (found,) = records_in(tmp_path / "new.csv", carried, shape)
    assert found.names == ("1", "2")
    expected = [[32 / 82, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0], [0, 0.2, 0, 0, 0, 1, 0, 0, 1, 0, 0]]
    np.testing.assert_allclose(found.features, expected, rtol=1e-6)
    document["reader"]["skip_lines"] = {"train": 1}
    carried = Preparation.of(document)
    for first in ("sep=,\n", ""):
        (tmp_path / "new.csv").write_text(first + rows)
        (again,) = records_in(tmp_path / "new.csv", carried, shape)
        np.testing.assert_array_equal(again.features, found.features)
    frame = pd.DataFrame({"age": [50], "distance_km": [100.0], "insurance": ["none"], "reason": ["pain"]})
    frame.to_parquet(tmp_path / "new.parquet")
    (again,) = records_in(tmp_path / "new.parquet", carried, shape)
    np.testing.assert_array_equal(again.features, found.features[:1])
    (tmp_path / "new.csv").write_text("age,reason\n50,pain\n")
    with refused_as("missing_column", DataRefusedError, column="distance_km"):
        list(records_in(tmp_path / "new.csv", carried, shape))


def test_texts_become_the_tokens_of_training(tmp_path: Path) -> None:
    card = data_card("imdb")
    carried = Preparation.from_card(card, "none", b"good\nbad\n")
    (tmp_path / "texts.txt").write_text("Good, bad!\n\nunheard good\n")
    (found,) = records_in(tmp_path / "texts.txt", carried, (80,))
    assert found.names == ("1", "3")
    assert found.features[:, -3:].tolist() == [[0, 2, 3], [0, 1, 2]]


def test_texts_become_the_texts_of_training_for_an_encoder(tmp_path: Path) -> None:
    """Also what is no word, and what a Mac or an editor puts beside or before it."""
    text = b"Good<br />film?\r\nYes.\n"
    archive = tar(tmp_path / "reviews.tar", {f"x/{part}/pos/1_9.txt": text for part in ("train", "test")})
    (trained, _) = read_texts({"archive": archive}, classes=("neg", "pos"))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a.TXT").write_bytes(text)
    (tmp_path / "new" / "._a.TXT").write_bytes(b"\xff")
    (tmp_path / "lines.txt").write_bytes(b"\xef\xbb\xbfGood film\r\n\n:-)\n")
    carried = Preparation.from_card(data_card("imdb"), "encoder", None, encoder={"name": "wordllama"})

    def predicted_on(path: Path) -> tuple[tuple[str, ...], list[str]]:
        (found,) = records_in(path, carried, (2,), encode=lambda texts: texts)
        return found.names, found.features.tolist()

    assert predicted_on(tmp_path / "new") == (("a.TXT",), trained.records.features.tolist())
    assert predicted_on(tmp_path / "lines.txt") == (("1", "3"), ["Good film", ":-)"])


@pytest.mark.parametrize("form", ["onnx", "torchscript", "huggingface"])
def test_an_export_is_loaded_by_its_library_and_agrees(
    artifacts: Path, trained: TrainedModel, tmp_path: Path, form: str
) -> None:
    needs = {"onnx": "onnxruntime", "torchscript": "torch", "huggingface": "transformers"}
    pytest.importorskip(needs[form], exc_type=ImportError)
    pytest.importorskip("onnxscript") if form == "onnx" else None
    to = tmp_path / form
    done = call("export", "--to", form, "--output", str(to), "--model", str(artifacts))
    assert done.exit_code == 0 and done.stderr == "", done.output
    refused = call("export", "--to", form, "--output", str(to), "--model", str(artifacts))
    assert refused.exit_code == 2 and "is there already" in refused.stderr
    if form == "onnx":
        facts = (
            importlib.import_module("onnxruntime").InferenceSession(to).get_modelmeta().custom_metadata_map
        )
        assert facts["privacy"] == statement(load(artifacts / "privacy_card.json"))
    if form == "huggingface":
        text = (to / "README.md").read_text()
        assert f"**{statement(load(artifacts / 'privacy_card.json'))}**" in text
        assert text.startswith("---\nlibrary_name:")


EXPORTED = [(form, name) for form in ("onnx", "torchscript") for name in FORMS if name != "timm"]
BY_KIND = [("onnx", name) for name in ("bilstm", "cifar_cnn")]
"""Models of tables go to ONNX with the preparation of their rows, in tests of their own."""


@pytest.mark.parametrize(
    ("form", "name"), soak_but([*BY_KIND, *(each for each in EXPORTED if each[0] != "onnx")], EXPORTED)
)
def test_every_model_is_exported_for_any_number_of_records(tmp_path: Path, form: Any, name: str) -> None:
    for needed in ("onnxruntime", "onnxscript") if form == "onnx" else ():
        pytest.importorskip(needed, exc_type=ImportError)
    if name == "huggingface":
        pytest.importorskip("transformers")
    _save(name, tmp_path)
    assert export(tmp_path, form, tmp_path / "out") < 1e-4


def _save(name: str, folder: Path, **settings: Any) -> None:
    """Writes the model file of a form, as a run releases it."""
    form, model = FORMS[name], form_of(name, **settings)
    facts = {
        "model": name,
        "model_settings": model.settings,
        "tokens": form.tokens,
        "input_shape": form.shape,
        "classes": [str(place) for place in range(form.classes)],
    }
    released = {key: tensor.contiguous() for key, tensor in model.published_tensors(moved(model)).items()}
    save_file(released, folder / "model.safetensors", metadata={"epsilonflow": json.dumps(facts)})


@pytest.mark.parametrize(("name", "adapter"), [("huggingface", LORA), ("timm", None)])
def test_a_model_of_a_library_is_exported_as_that_reads_it(tmp_path: Path, name: str, adapter: Any) -> None:
    """By `from_pretrained` or `create_model` alone; the export compares the scores."""
    pytest.importorskip("transformers" if name == "huggingface" else "timm")
    _save(name, tmp_path, **({} if adapter is None else {"adapter": adapter}))
    assert export(tmp_path, "library", tmp_path / "out") < 1e-4
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in names and ("config.json" in names) is (name == "huggingface")
    assert (tmp_path / "out/README.md").read_text() == f"{NO_CARD}\n"


@pytest.mark.parametrize("kind", ["private", "seeded"])
def test_a_model_for_its_library_says_what_the_card_says_of_privacy(kind: Any, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    folders = write_run(tmp_path / "run", kind=kind)
    card = build(record(folders), KEY)
    _save("timm", folders.artifacts)
    (folders.artifacts / "metrics.json").unlink()
    (folders.artifacts / "privacy_card.json").write_bytes(card.to_bytes())
    export(folders.artifacts, "library", tmp_path / "out")
    assert ("NOT PRIVATE" in statement(card)) is (kind == "seeded")
    assert for_markdown(statement(card)) in (tmp_path / "out/README.md").read_text()


def test_other_models_are_of_no_library(artifacts: Path, tmp_path: Path) -> None:
    with refused_as("form_unfit"):
        export(artifacts, "library", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_says_something_else_is_refused(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = torch.jit.load
    monkeypatch.setattr(torch.jit, "load", lambda path: (model := read(path), lambda x: model(x) + 1e-3)[1])
    with refused_as("scores_differ"):
        export(artifacts, "torchscript", tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def test_an_export_that_its_library_cannot_make_is_refused_in_a_sentence(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexError("no such operator\nsecond line")

    monkeypatch.setattr(torch.jit, "trace", fail)
    with refused_as("form_unfit", form="torchscript"):
        export(artifacts, "torchscript", tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def test_a_release_holds_what_a_stranger_needs_and_nothing_else(artifacts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "release"
    key = json.loads((artifacts / "privacy_card.json").read_text())["signature"]["public_key"]
    names = release(artifacts, folder, key=key)
    assert names == [
        "PRIVACY.md",
        "README.md",
        "SHA256SUMS",
        "model.safetensors",
        "plan.json",
        "privacy_card.json",
        "trace.parquet",
        "verify_card.py",
    ]
    alone = [sys.executable, "-I", "verify_card.py", ".", "--key", key]
    checked = subprocess.run(alone, cwd=folder, capture_output=True, text=True)
    assert checked.returncode == 0 and "not checked" not in checked.stdout
    needed = version("epsilonflow")
    assert f"With epsilonflow {needed} installed" in (folder / "README.md").read_text()
    verified = call("card", "verify", str(folder / "privacy_card.json"), "--key", key)
    assert verified.exit_code == 0 and "not checked" not in verified.stdout
    assert algorithms.load(folder).classes == tuple(map(str, range(10)))
    with refused_as("bad_output"):
        release(artifacts, folder, key=key)
    with refused_as("missing_file"):
        release(tmp_path, tmp_path / "other", key=key)


def test_a_run_whose_card_does_not_hold_is_not_released(artifacts: Path, tmp_path: Path) -> None:
    changed = tmp_path / "artifacts"
    shutil.copytree(artifacts, changed)
    plan = changed / "plan.json"
    plan.write_text(plan.read_text() + "\n")
    with refused_as("card_broken"):
        release(changed, tmp_path / "release", key=None)
    assert not (tmp_path / "release").exists()


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_an_export_whose_scores_are_no_numbers_is_not_written(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, score: float
) -> None:
    monkeypatch.setattr(torch.jit, "load", lambda _: lambda given: torch.full((len(given), 10), score))
    with refused_as("scores_differ"):
        export(artifacts, "torchscript", tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("score", [float("nan"), 1e3])
def test_a_release_whose_library_gives_other_scores_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, score: float
) -> None:
    pytest.importorskip("transformers")
    _save("huggingface", tmp_path)
    (tmp_path / "plan.json").write_text('{"model": {}}')
    model = algorithms.load(tmp_path)
    monkeypatch.setattr(
        "algorithms.models.library_files.write_beside",
        lambda *_: lambda given: torch.full((len(given), len(model.classes)), score),
    )
    with refused_as("scores_differ"):
        _add_library_files(model, tmp_path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelRefusedError, match="is not a model that epsilonflow trained"):
        algorithms.load(tmp_path)
    with pytest.raises(ModelRefusedError, match="there is no model at"):
        algorithms.load(tmp_path / "other")
