"""Runs on what people have, and on an encoder's features of it: from the card to the report."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from algorithms.encoders import EncoderSettings
from algorithms.errors import ModelRefusedError, RefusedError
from algorithms.extension import NotUsableError, source_digest
from algorithms.models.saved import load as load_model
from algorithms.privacy.card import load, text, verify
from data.card import CARDS, DataRefusedError, data_card
from data.formats import Own
from data.prepared import load as load_prepared
from flows.cli.costs import cost_table
from tasks import evaluate, prepare, report
from tasks.check_data import check_data
from tasks.config import params
from tasks.config.overrides import ParamOverrides, params_edit
from tasks.export import export
from tasks.predict import Predictions, predict
from tasks.preflight.preview import preview_run
from tasks.prepare import reader_of
from tasks.runs import store
from tasks.runs.dvc_process import code_has_changed
from tests.support import tiny_encoder
from tests.support.cards import csv_of, label, number
from tests.support.own_code import own_code_alone as own_code_alone
from tests.support.own_records import _write, finish
from tests.support.own_records import declared as declared
from tests.support.public_texts import WORDS, publish
from tests.support.refusals import refused_as
from tests.support.workspace import Workspace

ROWS = csv_of({"name": "who", "kind": "ignored"}, number("x", 0, 1), label("answer"))


ENCODER = "tests.support.tiny_encoder:make"


def test_an_experiment_in_a_copy_reads_the_raw_files_of_the_first_checkout(
    workspace: Workspace, declared: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC copies what git has, which no private file is."""
    rows = [f"{person},{person / 60},{'yes' if person > 30 else 'no'}" for person in range(60)]
    (workspace.root / "rows.csv").write_text("\n".join(["who,x,answer", *rows]) + "\n")
    declared("rows.csv", reader=ROWS)
    copy = tmp_path / "copy"
    shutil.copytree(workspace.root / "data/cards", copy / "data/cards")
    shutil.copyfile(workspace.root / "params.yaml", copy / "params.yaml")
    monkeypatch.setenv("DVC_ROOT", str(workspace.root))
    monkeypatch.chdir(copy)
    prepare.main()
    for name in "contents", "salt", "train_features.npy":
        place = Path("datasets/prepared") / name
        assert (copy / place).read_bytes() == (workspace.root / place).read_bytes()


@pytest.mark.parametrize("most", [1, 3])
def test_the_unit_is_the_person_at_the_price_of_as_many_records(
    workspace: Workspace, declared: Callable[..., None], most: int
) -> None:
    """Of 60 people with 4 rows each."""
    rows = [
        f"{person},{person / 60},{'yes' if person > 30 else 'no'}" for person in range(60) for _ in range(4)
    ]
    (workspace.root / "rows.csv").write_text("\n".join(["who,x,answer", *rows]) + "\n")
    person = {"column": "who", "per_person": most, "group_privacy": most > 1}
    declared("rows.csv", reader=ROWS, person=person)
    data = load_prepared(workspace.root / "datasets/prepared")
    assert len(data.train_labels) + len(data.test_labels) == 60 * most
    assert not {*data.train_features[:, 0]} & {*data.test_features[:, 0]}
    settings = params.load(workspace.root / "params.yaml", reads=params.GROUPS)
    shown = [*cost_table(preview_run(workspace.root, settings), settings).columns[1].cells]
    assert ("one record of each" in shown) == (most == 1)
    assert ("up to 3 records of each; 3 times that is charged" in shown) == (most == 3)
    words = finish(workspace)
    spent = workspace.ledger.balance("mine").spent
    assert most * 2.9 < spent.epsilon <= most * 3.0 and (spent.delta > 5e-5) == (most > 1)
    assert ("one person, of whose records one was used" in words) == (most == 1)
    assert ("for all records of a person together it is epsilon = " in words) == (most == 3)
    whose = {
        1: "one person, of whose records one",
        3: "one of the at most 3 records of a person",
    }
    assert f"find out whether {whose[most]}" in (workspace.root / "artifacts/report.html").read_text()


@pytest.mark.parametrize(
    "features", [{"name": "none"}, {"name": "centred", "moment_noise": 60.0, "head_noise": 60.0}]
)
def test_the_rows_of_a_person_are_clipped_together_at_the_price_of_one(
    workspace: Workspace, declared: Callable[..., None], features: dict[str, Any]
) -> None:
    """Of 200 people with up to 4 rows each, from the card to the predictions; nothing is charged but the person."""
    rows = [
        f"{person},{person / 200 + row / 1000},{'yes' if person > 100 else 'no'}"
        for person in range(200)
        for row in range(person % 4 + 1)
    ]
    (workspace.root / "rows.csv").write_text("\n".join(["who,x,answer", *rows]) + "\n")
    person = {"column": "who", "per_person": 3}
    declared("rows.csv", model={"name": "unit_linear"}, reader=ROWS, person=person)
    workspace.set("features", **features)
    data = load_prepared(workspace.root / "datasets/prepared")
    assert data.train_labels.shape[1:] == (3,) and data.test_labels.ndim == 1
    settings = params.load(workspace.root / "params.yaml", reads=params.GROUPS)
    shown = [*cost_table(preview_run(workspace.root, settings), settings).columns[1].cells]
    assert "up to 3 records of each, together as one" in shown
    words = finish(workspace)
    spent = workspace.ledger.balance("mine").spent
    assert 2.9 < spent.epsilon <= 3.0 and spent.delta == 1e-5
    assert "one person, of whose records 3 were used at most, together as one, is" in words
    (workspace.root / "new.csv").write_text("x\n0.1\n0.9\n")
    (found,) = predict(workspace.root / "artifacts/model.safetensors", workspace.root / "new.csv")
    assert len(found.predicted) == 2


def test_a_folder_of_images_goes_from_its_card_to_predictions(
    workspace: Workspace, declared: Callable[..., None], tmp_path: Path
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 10, 12), np.uint8)
    for place, image in enumerate(pixels):
        folder = workspace.root / "photos" / ("no", "yes")[place % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{place:02}.png")
    (workspace.root / "photos/no/broken.png").write_bytes(b"broken")
    data = {"transform": "encoder", "encoder": {"name": ENCODER, "settings": {}}}
    declared("photos", data, reader={"kind": "images", "mode": "L"}, shape=[1, 8, 8], unit="one image")
    counts = check_data("mine", workspace.root, counted=True).counts or {}
    assert {name: count for name, count in counts.items() if "stand-in" in name} in (
        {"train: not read as images, the stand-in": 1},
        {"test: not read as images, the stand-in": 1},
    )
    assert check_data("mine", workspace.root, counted=False).counts is None
    assert load_prepared(workspace.root / "datasets/prepared").info.input_shape == (12,)
    workspace.train()
    model = load_model(workspace.root / "artifacts/model.safetensors")
    (found,) = predict(model, workspace.root / "photos/yes", allow_code=[ENCODER])
    assert len(found.names) == 30 and set(found.predicted) <= {"no", "yes"}


def test_a_reader_of_ones_own(workspace: Workspace, declared: Callable[..., None], tmp_path: Path) -> None:
    """Its source stands in the card, and so decides the run."""
    lines = "".join(f"{place % 2} {place / 90} 0.5\n" for place in range(90))
    (workspace.root / "lines").write_text(lines)
    factory = "tests.support.tiny_reader:make"
    reader = {"kind": "own", "factory": factory, "settings": {"scale": 2}, "source_sha256": "0" * 64}
    with refused_as("bad_card", DataRefusedError, keys=("reader.each_record_alone",)):
        declared("lines", reader=reader, shape=[2])
    reader["each_record_alone"] = True
    declared("lines", reader=reader, shape=[2])
    info = workspace.info
    assert (info.reader_sha256, info.feature_norms) == (source_digest(factory), None)
    assert load_prepared(workspace.root / "datasets/prepared").train_features[:, 1].tolist()[0] == 1.0
    assert info.each_record_alone
    assert "who declares that it reads each record by itself" in finish(workspace)
    (tmp_path / "new").write_text("0 0.1 0.2\n")
    model = load_model(workspace.root / "artifacts/model.safetensors")
    (found,) = predict(model, tmp_path / "new", allow_code=[factory])
    assert found.names == ("1",)
    settings = Own(**reader | {"source_sha256": "1" * 64})
    with refused_as("altered_file", DataRefusedError):
        reader_of(settings)
    with pytest.raises(NotUsableError, match="has no 'made'"):
        declared("lines", reader=reader | {"factory": "tests.support.tiny_reader:made"}, shape=[2])


def test_the_words_of_a_reader_that_fails_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may hold a value of a record."""
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing" / "__init__.py").touch()
    (tmp_path / "failing" / "readers.py").write_text(
        "def rows(settings):\n    return lambda files: [float(files['train'].read_text())]\n"
    )
    (tmp_path / "people").write_text("Smith")
    monkeypatch.syspath_prepend(tmp_path)
    factory = "failing.readers:rows"
    own = reader_of(Own(kind="own", factory=factory, settings={}, source_sha256=source_digest(factory)))
    assert own is not None
    with refused_as(
        "code_failed", DataRefusedError, error="ValueError", where=" in line 2 of readers.py"
    ) as refused:
        list(own({"train": tmp_path / "people"}))
    assert "Smith" not in str(refused.value) and refused.value.__suppress_context__


def test_code_of_ones_own_that_changed_is_noticed_though_dvc_does_not_watch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "changing"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "methods.py").write_text("RATE = 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "changing.methods:rate"
    (tmp_path / "params.yaml").write_text(f"algorithm: {{name: '{name}'}}\nmodel: {{name: logistic}}\n")
    assert not code_has_changed("calibrate", tmp_path)  # there is no plan yet
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts/plan.json").write_text(json.dumps({"code": {"algorithm": source_digest(name)}}))
    assert not code_has_changed("calibrate", tmp_path)
    (package / "methods.py").write_text("RATE = 0.5\n")
    assert code_has_changed("calibrate", tmp_path) and not code_has_changed("train", tmp_path)


def _texts(root: Path) -> dict[str, Any]:
    """Writes 90 texts of two moods; the reader of a card for them."""
    moods = ("bad", "good")
    lines = [{"text": f"a {moods[place % 2]} film {place}", "mood": place % 2} for place in range(90)]
    (root / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    spellings = {"no": ["0"], "yes": ["1"]}
    named = {"columns": ["text"], "label": "mood", "spellings": spellings}
    return {"kind": "texts", "format": "jsonl"} | named


def same_by_onnxruntime(
    artifacts: Path, records: np.ndarray, found: Predictions, allow_code: Sequence[str] = ()
) -> dict[str, Any]:
    """Checks the probabilities and classes of an ONNX file by onnxruntime alone; returns what its metadata say."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export(artifacts, "onnx", artifacts / "model.onnx", allow_code=allow_code)
    session = onnxruntime.InferenceSession(artifacts / "model.onnx")
    shares, classes = session.run(["probabilities", "predicted"], {"records": records})
    assert shares == pytest.approx(found.scores, abs=1e-5)
    assert tuple(classes) == found.predicted
    told = session.get_modelmeta().custom_metadata_map
    encoder = json.loads(told["encoder"])
    assert encoder["name"] in told["preparation"] and encoder["sha256"] in told["preparation"]
    return told | {"encoder": encoder}


def test_a_public_model_is_tuned_on_the_tokens_of_its_own_tokenizer(
    workspace: Workspace, declared: Callable[..., None], tmp_path: Path
) -> None:
    public = tmp_path / "public"
    publish(public)
    encoder = {"name": f"tokenizer/{public}", "settings": {"length": 6}}
    declared(
        "texts.jsonl",
        {"transform": "encoder", "encoder": encoder},
        {"name": "huggingface", "checkpoint": str(public), "adapter": {"rank": 2}},
        reader=_texts(workspace.root),
        unit="one text",
    )
    assert (workspace.info.tokens, workspace.info.padding) == (len(WORDS), WORDS.index("<pad>"))
    words = finish(workspace)
    assert "The first 6 tokens of each text by the public tokenizer/public" in words
    model = load_model(workspace.root / "artifacts/model.safetensors")
    (tmp_path / "new.txt").write_text("a good film\nbad\n")
    (found,) = predict(model, tmp_path / "new.txt")
    rows = torch.tensor([[4, 2, 1, 7, 7, 7], [3, 7, 7, 7, 7, 7]], dtype=torch.int32)
    expected = model(rows).double().softmax(-1).detach().numpy()
    assert found.scores == pytest.approx(expected)
    facts = same_by_onnxruntime(workspace.root / "artifacts", rows.numpy(), found)
    tokenizer, sha256 = facts["encoder"], workspace.info.encoder.sha256
    assert (tokenizer["sha256"], tokenizer["settings"]["length"], facts["padding"]) == (sha256, 6, "7")

    publish(public)  # with other weights
    with refused_as("stale_plan"):
        workspace.train()


def test_a_run_on_texts_is_all_there_is_to_type(workspace: Workspace, declared: Callable[..., None]) -> None:
    pytest.importorskip("wordllama", exc_type=ImportError)
    reader = _texts(workspace.root)
    encoder = {"name": "wordllama", "settings": {}}
    declared("texts.jsonl", {"transform": "encoder", "encoder": encoder}, reader=reader, unit="one text")
    card = data_card("mine", workspace.root / "data/cards")
    assert card.input_shape == () and workspace.info.input_shape == (768,)
    finish(workspace)
    found = list(
        predict(load_model(workspace.root / "artifacts/model.safetensors"), workspace.root / "texts.jsonl")
    )
    assert sum(len(some.names) for some in found) == 90


DATA: dict[str, Any] = {
    "dataset": "digits",
    "transform": "encoder",
    "encoder": {"name": ENCODER, "settings": {"mirror": True}},
}


def test_a_run_on_an_encoders_features_ends_with_a_card_that_holds(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = workspace.root
    tiny_encoder.LOADED.clear()
    assert workspace.prepare(**DATA).input_shape == (12,)
    assert [loaded.mirror for loaded in tiny_encoder.LOADED] == [True]  # once, however many workers
    workspace.replace("data", DATA)
    workspace.replace("features", {"name": "centred", "mean_noise": 5.0, "moment_noise": 10.0})
    workspace.train()
    monkeypatch.chdir(root)
    monkeypatch.setenv("EPSILONFLOW_HOME", str(workspace.home))
    evaluate.main()
    report.report(artifacts=root / "artifacts", prepared=root / "datasets/prepared", root=root)
    card = load(root / "artifacts" / report.CARD)
    assert verify(card, root / "artifacts", unsigned=True).passed
    assert card.mechanism.encoder is not None
    assert card.mechanism.encoder.sha256 == workspace.info.encoder.sha256 != "ab" * 32  # computed
    assert "whose people this run does not protect" in text.transform(card.mechanism)
    assert "whose people this run does not protect" in (root / "artifacts" / report.PAGE).read_text()
    events = [row.event["type"] for row in card.events]
    assert events[:2] == ["GaussianDpEvent"] * 2  # the mean and the moment are charged


def test_a_model_on_an_encoders_features_predicts_from_images(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    workspace.prepare(**DATA)
    workspace.replace("data", DATA)
    workspace.train()
    folder = tmp_path / "new"
    folder.mkdir()
    pixels = load_digits().images[:10].astype(np.uint8)  # ink from 0 to 16
    for place, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{place}.png")
    trained = load_model(workspace.root / "artifacts/model.safetensors")
    encode = tiny_encoder.make(EncoderSettings()).load()
    expected = trained(torch.from_numpy(encode(pixels[:, None] / np.float32(16)))).argmax(-1)
    (found,) = predict(trained, folder, allow_code=[ENCODER])
    assert found.names == tuple(f"{place}.png" for place in range(10))
    assert found.predicted == tuple(str(place) for place in expected.tolist())
    facts = same_by_onnxruntime(
        workspace.root / "artifacts", encode(pixels[:, None] / np.float32(16)), found, allow_code=[ENCODER]
    )
    assert facts["encoder"]["name"] == ENCODER
    assert facts["encoder"]["sha256"] == workspace.info.encoder.sha256
    other = replace(tiny_encoder.make(EncoderSettings()), sha256="cd" * 32)
    monkeypatch.setattr(tiny_encoder, "make", lambda _settings: other)
    with refused_as("encoder_unfit", ModelRefusedError):
        next(predict(trained, folder, allow_code=[ENCODER]))


def test_an_encoder_is_all_there_is_to_type(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text((Path(__file__).parents[2] / "params.yaml").read_text())
    (tmp_path / "data").mkdir()
    (tmp_path / "data/cards").symlink_to(CARDS)
    asked = params_edit(
        tmp_path, ParamOverrides(dataset="cifar-10", epsilon=1.0, encoder="efficientnet-lite0")
    )
    asked.write()
    chosen = asked.params
    assert chosen.data.transform == "encoder"
    assert chosen.data.encoder is not None
    assert chosen.data.encoder.settings == {"size": 160}
    assert (chosen.model.name, chosen.features_settings["name"]) == ("unit_linear", "centred")
    at_half = params_edit(tmp_path, ParamOverrides(epsilon=0.5, encoder="efficientnet-lite0")).params
    rates = [one.algorithm_settings["update"]["learning_rate"] for one in (at_half, chosen)]
    assert 0 < rates[0] < rates[1]
    plain = params_edit(tmp_path, ParamOverrides(dataset="mnist")).params
    assert (plain.data.transform, plain.data.encoder, plain.features) == ("none", None, None)


@pytest.mark.parametrize("data", [{"transform": "encoder"}, {"encoder": {"name": "wordllama"}}])
def test_an_encoder_and_its_transform_come_together(data: dict[str, Any]) -> None:
    with refused_as("bad_keys", params.ParamsRefusedError, keys=("data.transform", "data.encoder")):
        params.parse({"data": {"dataset": "digits"} | data}, reads=prepare.READS)


def test_settings_that_an_encoder_has_not_are_refused_by_name() -> None:
    from tasks.prepare import encoder_of

    with refused_as("bad_keys", params.ParamsRefusedError, keys=("data.encoder.settings.sise",)):
        encoder_of(params.EncoderParams(name="wordllama", settings=json.loads('{"sise": 3}')))


def test_the_declaration_of_a_reader_changes_no_run(
    workspace: Workspace, declared: Callable[..., None]
) -> None:
    """A run of before is not paid for again; a plan on what was prepared before, without it, is refused."""
    (workspace.root / "lines").write_text("".join(f"{place % 2} {place / 90} 0.5\n" for place in range(90)))
    own = {"kind": "own", "factory": "tests.support.tiny_reader:make", "settings": {"scale": 2}}
    declared("lines", reader=own | {"source_sha256": "0" * 64, "each_record_alone": True}, shape=[2])
    info, prepared = workspace.info, workspace.root / "datasets/prepared"
    before = replace(info, each_record_alone=False)
    ids = [store.digest([], some, prepared, home=workspace.home) for some in (info, before)]
    assert ids[0] == ids[1] and info.digest == before.digest
    cards = [data_card("mine", workspace.root / "data/cards")]
    cards.append(cards[0].model_copy(update={"reader": Own(**own, source_sha256="1" * 64)}))
    documents = [json.loads(card.model_dump_json()) for card in cards]
    assert documents[0]["reader"] | {"source_sha256": "1" * 64} == documents[1]["reader"]
    (prepared / "public.json").write_text(before.to_json())
    with refused_as("bad_card", DataRefusedError, keys=("reader.each_record_alone",)):
        workspace.train()
    with pytest.raises(RefusedError):
        workspace.ledger.history("mine")  # which knows no such population


NORMS = """
import numpy as np, torch
from algorithms.encoders import Encoder

def make(settings):
    def load():
        norm = torch.nn.BatchNorm1d(64){eval}
        def encode(images):
            with torch.no_grad():
                return norm(torch.from_numpy(images).flatten(1)).numpy()
        return encode
    return Encoder("mine", "images", 64, "ab" * 32, "unknown", load)
"""


def test_own_encoder_is_refused_if_it_mixes_records_and_prepared_again_if_edited(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "norms"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)

    def write(text: str) -> None:
        (package / "__init__.py").write_text(text)
        importlib.invalidate_caches()
        sys.modules.pop("norms", None)

    data = {"dataset": "digits", "transform": "encoder", "encoder": {"name": "norms:make", "settings": {}}}
    write(NORMS.format(eval=""))
    with pytest.raises(ModelRefusedError, match=r"beside other records.*evaluation mode by \.eval\(\)"):
        workspace.prepare(**data)
    write(NORMS.format(eval=".eval()"))
    first = workspace.prepare(**data)
    _write(workspace.root / "params.yaml", {"data": data})
    assert not code_has_changed("prepare", workspace.root)
    write(NORMS.format(eval=".eval()") + "# edited\n")
    assert code_has_changed("prepare", workspace.root)
    second = workspace.prepare(**data)
    assert first.encoder is not None and second.encoder is not None
    assert first.encoder.sha256 != second.encoder.sha256
    assert not code_has_changed("prepare", workspace.root)
