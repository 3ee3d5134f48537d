"""An ONNX file takes rows of the table as they are, and onnxruntime alone says what the product says."""

import csv
import itertools
import json
import re
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from algorithms.errors import RefusedError
from algorithms.plain_text import for_markdown
from algorithms.privacy.card import build
from algorithms.privacy.card.text import statement
from data.formats import Timestamp
from epsilonflow.sklearn import load
from tasks import export as exports
from tasks import onnx_graph
from tasks.export import export
from tasks.onnx_dates import moments
from tasks.onnx_graph import Graph
from tasks.predict import predict
from tests.algorithms.privacy.conftest import KEY
from tests.support.checkout import PROJECT
from tests.support.refusals import refused_as
from tests.support.soak import soak_but
from tests.support.synthetic_run import record, write_run
from tests.support.trees import COLUMNS, HEADER, ROWS, write_model

onnxruntime: Any = pytest.importorskip("onnxruntime", exc_type=ImportError)
pytest.importorskip("onnxscript", exc_type=ImportError)


def write_rows(path: Path) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *ROWS])
    return path


def as_inputs(session: Any, path: Path) -> dict[str, Any]:
    """The columns of a CSV file by the types of the file's inputs, with nothing of ours."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    inputs = {}
    for column in session.get_inputs():
        texts = [row[column.name] for row in rows]
        if column.type == "tensor(int64)":  # a hashed text, whose cell is computed apart
            continue
        is_text = column.type == "tensor(string)"
        inputs[column.name] = np.array(
            texts if is_text else [float(text or "nan") for text in texts], object if is_text else float
        )
    return inputs


TABULAR = [("softmax", False), ("additive", True)]
"""Numbers as they are, and cells; a model of one output is tried with missing numbers and dates below."""


@pytest.mark.parametrize(("name", "cells"), soak_but(TABULAR, [*TABULAR, ("logistic", False)]))
def test_onnxruntime_alone_goes_from_a_row_to_probabilities(name: str, cells: bool, tmp_path: Path) -> None:
    write_model(tmp_path, name, cells=cells)
    assert export(tmp_path, "onnx", tmp_path / "model.onnx") < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert [one.name for one in session.get_inputs()] == HEADER
    rows = write_rows(tmp_path / "rows.csv")
    names, shares = session.run(["predicted", "probabilities"], as_inputs(session, rows))
    (expected,) = predict(tmp_path, rows)
    assert shares == pytest.approx(expected.scores, abs=1e-5)
    assert tuple(names) == expected.predicted
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["classes"]) == ["no", "yes"]
    assert json.loads(facts["columns"]) == HEADER
    assert facts["preparation"] == "in this file"
    assert facts["privacy"] == exports.NO_CARD


def test_a_number_comes_in_its_own_units(tmp_path: Path) -> None:
    more = {"classes": [], "predicts": "number", "outputs": 1, "target": {"bounds": [10, 30]}}
    write_model(tmp_path, "linear", cells=False, **more)
    export(tmp_path, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    rows = write_rows(tmp_path / "rows.csv")
    (numbers,) = session.run(["number"], as_inputs(session, rows))
    (expected,) = predict(tmp_path, rows)
    assert numbers[:, 0] == pytest.approx([float(one) for one in expected.predicted], rel=1e-4)


@pytest.mark.parametrize("cells", [False, True])
def test_a_missing_number_that_the_card_refuses_gives_no_probability(cells: bool, tmp_path: Path) -> None:
    columns = [COLUMNS[0] | {"missing": "refuse"}, *COLUMNS[1:]]
    write_model(tmp_path, "additive" if cells else "logistic", cells=cells, columns=columns)
    export(tmp_path, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (shares,) = session.run(["probabilities"], as_inputs(session, write_rows(tmp_path / "rows.csv")))
    assert np.isnan(shares).any(axis=1).tolist() == [False, False, False, True, False]


TOWN = {"name": "town", "kind": "hashed", "cells": 4, "salt": "s"}


@pytest.mark.parametrize(("missing", "cells"), [("middle", True), ("refuse", False)])
def test_dates_are_texts_and_hashed_texts_are_cells(missing: str, cells: bool, tmp_path: Path) -> None:
    since = {"name": "since", "kind": "timestamp", "bounds": ["2019-12-30", "2024-03-01"], "missing": missing}
    write_model(tmp_path, "additive" if cells else "logistic", cells=cells, columns=[TOWN, since, *COLUMNS])
    dates = [
        "2020-02-29",
        "2030-01-01",
        "1999-01-01T00:00",
        " 2024-02-29 23:59:59.5+01:00",
        "2019-12-31T12:30Z",
    ]
    towns = ["Oslo", "Ås ", "", "17.0", "Oslo"]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        rows = zip(towns, dates, ROWS, strict=True)
        csv.writer(file).writerows(
            [["town", "since", *HEADER], *([town, day, *row] for town, day, row in rows)]
        )
    export(tmp_path, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    facts = session.get_modelmeta().custom_metadata_map
    inputs = as_inputs(session, tmp_path / "rows.csv")
    code = _snippets()[1]
    exec(compile(code, "page", "exec"), page := {"facts": facts})
    inputs["town"] = np.array([page["cell"](text, "town") for text in towns], np.int64)
    (shares,) = session.run(["probabilities"], inputs)
    (expected,) = predict(tmp_path, tmp_path / "rows.csv")
    assert shares == pytest.approx(expected.scores, abs=1e-5)
    inputs["since"] = np.array([*dates[:2], "", "20240229", "2023-02-29"], object)
    (shares,) = session.run(["probabilities"], inputs)
    # 20240229 is a date in another form; the last one is no date.
    absent = missing == "refuse"
    assert np.isnan(shares).any(axis=1).tolist() == [False, False, absent, True, absent]


def _date_graph(bounds: tuple[str, str]) -> Any:
    column = Timestamp(name="when", kind="timestamp", bounds=bounds)
    graph = onnx_graph.Graph("dates")
    made = moments(graph, column, ("", "1900-01-01"))
    helper, kinds = onnx_graph.helper, onnx_graph.TensorProto
    outputs = [helper.make_tensor_value_info(part, kinds.DOUBLE, ["n"]) for part in made.parts]
    outputs.append(helper.make_tensor_value_info(made.unread, kinds.BOOL, ["n"]))
    texts = [helper.make_tensor_value_info("when", kinds.STRING, ["n"])]
    whole = helper.make_graph(graph.nodes, "dates", texts, outputs, graph.initializers)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(onnx_graph.ML, 4)]
    model = helper.make_model(whole, opset_imports=opsets, ir_version=9)
    return onnxruntime.InferenceSession(model.SerializeToString())


def test_the_graph_reads_dates_as_python_does() -> None:
    draw = np.random.default_rng(0)
    texts = [f"{y:04d}-{m:02d}-{d:02d}" for y, m, d in draw.integers((1, 0, 0), (2400, 15, 34), (4000, 3))]
    times = itertools.cycle(("T12:30", " 24:00", "T09:59:60", " 23:59:59Z"))
    texts += [f"{y}-02-29" for y in (1600, 1700, 1900, 2000, 2023, 2024)]
    texts += [f"{day}{next(times)}" for day in texts]
    texts += ["0000-01-01", "9999-12-31", "1900-01-01", "", "none", "20", "2020", "2020-1-1", "202-01-01"]
    bounds = ("1987-06-05", "2111-03-04")
    first, last = (datetime.fromisoformat(day) for day in bounds)
    *parts, unread = _date_graph(bounds).run(None, {"when": np.array(texts, object)})
    for row, text in enumerate(texts):
        try:
            moment = datetime.fromisoformat(text) if text != "1900-01-01" else None
        except ValueError:
            moment = None
        seen = [float(part[row]) for part in parts]
        if unread[row]:
            assert text in ("2020-1-1",)  # no date, but it looks like one in another form
        elif moment is None:
            assert np.isnan(seen).all(), text
        else:
            moment = min(max(moment.replace(tzinfo=None), first), last)
            share = (moment - first) / (last - first)
            expected = [moment.year - first.year, moment.month - 1, moment.weekday(), share]
            assert seen == pytest.approx(expected, abs=1e-9), text


def test_a_file_without_the_preparation_names_the_encoder_and_its_digest(tmp_path: Path) -> None:
    write_model(tmp_path, "logistic", cells=False)
    encoder = {"name": "resnet18", "sha256": "ab" * 32, "settings": {}, "checkpoint": None}
    facts = _change_preparation(tmp_path, transform="encoder", encoder=encoder)
    assert facts["encoder"]["sha256"] == "ab" * 32
    export(tmp_path, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    told = session.get_modelmeta().custom_metadata_map
    assert [one.name for one in session.get_inputs()] == ["records"]
    assert "resnet18" in told["preparation"] and "ab" * 32 in told["preparation"]
    assert json.loads(told["encoder"]) == encoder


def _change_preparation(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write a model's file anew with other facts of its preparation; returns these."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["epsilonflow"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    facts["preparation"] |= changes
    save_file(tensors, path, metadata={"epsilonflow": json.dumps(facts)})
    preparation: dict[str, Any] = facts["preparation"]
    return preparation


def test_a_graph_that_prepares_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "logistic", cells=False)
    right = Graph.share
    monkeypatch.setattr(Graph, "share", lambda self, number, low, high: right(self, number, low, high + 1.0))
    with refused_as("scores_differ"):
        export(tmp_path, "onnx", tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def _snippets() -> list[str]:
    page = (PROJECT / "docs/how-to/serve-the-model.md").read_text()
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def test_the_page_on_serving_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("starlette.testclient")
    write_model(tmp_path, "logistic", cells=False)
    export(tmp_path, "onnx", tmp_path / "model.onnx")
    code = _snippets()[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    monkeypatch.chdir(tmp_path)
    service: dict[str, Any] = {}
    exec(compile(code, "page", "exec"), service)
    client = testing.TestClient(service["app"])
    row = {"age": 35, "pay": None, "job": "nurse", "month": "jan", "day": 3}
    answer = client.post("/predict", json=[row, row | {"age": None}]).json()
    assert answer["classes"] == ["no", "yes"]
    assert np.sum(answer["probabilities"], axis=1) == pytest.approx(1)
    assert client.get("/privacy").json() == exports.NO_CARD


@pytest.mark.filterwarnings("ignore:No privacy card")
@pytest.mark.parametrize("cells", [False, True])
def test_the_same_model_is_an_estimator_of_scikit_learn(cells: bool, tmp_path: Path) -> None:
    write_model(tmp_path, "additive" if cells else "logistic", cells=cells)
    rows = write_rows(tmp_path / "rows.csv")
    frame = pd.read_csv(
        rows, dtype={name: str for name in HEADER if name not in ("age", "pay", "hours", "day")}
    )
    estimator = load(tmp_path)
    (expected,) = predict(tmp_path, rows)
    assert estimator.predict_proba(frame.assign(id=1)) == pytest.approx(expected.scores, abs=1e-6)
    assert tuple(estimator.predict(frame)) == expected.predicted
    assert estimator.score(frame, list(expected.predicted)) == 1


@pytest.mark.filterwarnings("ignore:No privacy card")
def test_so_is_one_of_a_number_and_others_are_refused(tmp_path: Path) -> None:
    more = {"classes": [], "predicts": "number", "outputs": 1, "target": {"bounds": [10, 30]}}
    (tmp_path / "number").mkdir()
    write_model(tmp_path / "number", "linear", cells=False, **more)
    rows = write_rows(tmp_path / "rows.csv")
    frame = pd.read_csv(
        rows, dtype={name: str for name in HEADER if name not in ("age", "pay", "hours", "day")}
    )
    (expected,) = predict(tmp_path / "number", rows)
    numbers = load(tmp_path / "number").predict(frame)
    assert numbers == pytest.approx([float(one) for one in expected.predicted], rel=1e-4)
    write_model(tmp_path, "svm", cells=False)
    with pytest.raises(RefusedError, match="margins in place of probabilities"):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore:No privacy card")
def test_an_estimator_of_other_records_names_its_encoder(tmp_path: Path) -> None:
    reader = write_model(tmp_path, "logistic", cells=False)
    encoder = {"name": "resnet18", "sha256": "ab" * 32, "settings": {}, "checkpoint": None}
    _change_preparation(tmp_path, transform="encoder", encoder=encoder)
    estimator = load(tmp_path)
    assert estimator.encoding_.encoder["sha256"] == "ab" * 32
    records = np.random.default_rng(0).random((3, reader.width))
    assert estimator.predict_proba(records).sum(axis=1) == pytest.approx(1)
    for wrong in (records[0], records[:, 1:], pd.DataFrame({"age": [1]}), [["a", "b"]]):
        with pytest.raises(RefusedError, match=r"prepare them by the encoder resnet18"):
            estimator.predict(wrong)


@pytest.mark.filterwarnings("ignore:No privacy card")
def test_transformers_loads_buffers_that_are_in_no_file(tmp_path: Path) -> None:
    """Of cells, for one: transformers leaves them unset, as memory happens to be."""
    write_model(tmp_path, "additive", cells=True)
    assert export(tmp_path, "huggingface", tmp_path / "out") < 1e-6


@pytest.mark.parametrize("kind", ["private", "seeded"])
def test_every_form_says_what_the_card_says_of_privacy(kind: Any, tmp_path: Path) -> None:
    """A page, the registry and the model card have tests of their own."""
    folders = write_run(tmp_path / "run", kind=kind)
    card = build(record(folders), KEY)
    write_model(folders.artifacts, "logistic", cells=False)
    (folders.artifacts / "metrics.json").unlink()
    (folders.artifacts / "privacy_card.json").write_bytes(card.to_bytes())
    assert ("NOT PRIVATE" in statement(card)) is (kind == "seeded")
    for form in ("onnx", "torchscript", "huggingface"):
        export(folders.artifacts, form, tmp_path / form)
    session = onnxruntime.InferenceSession(tmp_path / "onnx")
    assert session.get_modelmeta().custom_metadata_map["privacy"] == statement(card)
    texts: dict[str, Any] = {"privacy.txt": ""}  # whose values PyTorch replaces by bytes
    torch.jit.load(tmp_path / "torchscript", _extra_files=texts)
    assert texts["privacy.txt"] == statement(card).encode()
    assert for_markdown(statement(card)) in (tmp_path / "huggingface/README.md").read_text()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        estimator = load(folders.artifacts)
    assert estimator.card_ == card
    said = [str(one.message) for one in given]
    assert (statement(card) in said) is (kind == "seeded")


def test_a_model_without_a_card_promises_nothing_in_any_form(tmp_path: Path) -> None:
    write_model(tmp_path, "logistic", cells=False)
    with pytest.warns(UserWarning, match="nothing is promised"):
        assert load(tmp_path).card_ is None
    export(tmp_path, "torchscript", tmp_path / "model.pt")
    texts: dict[str, Any] = {"privacy.txt": ""}  # whose values PyTorch replaces by bytes
    torch.jit.load(tmp_path / "model.pt", _extra_files=texts)
    assert texts["privacy.txt"].decode() == exports.NO_CARD
