"""An ONNX file takes rows of the table as they are, and onnxruntime alone says what the product says."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from epsilonflow.sklearn import load
from tasks import export as exports
from tasks import onnx_tables
from tasks.export import export
from tasks.predict import predict
from tests.support.checkout import PROJECT
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
        is_text = column.type == "tensor(string)"
        inputs[column.name] = np.array(
            texts if is_text else [float(text or "nan") for text in texts], object if is_text else float
        )
    return inputs


@pytest.mark.parametrize(("name", "cells"), [("logistic", False), ("softmax", False), ("additive", True)])
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
    assert "privacy" not in facts  # no card lies beside the model


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


def test_a_column_that_onnx_cannot_prepare_is_named(tmp_path: Path) -> None:
    columns = [{"name": "town", "kind": "hashed", "cells": 4}, *COLUMNS]
    write_model(tmp_path, "logistic", cells=False, columns=columns)
    export(tmp_path, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert [one.name for one in session.get_inputs()] == ["records"]
    assert "cannot compute for town" in session.get_modelmeta().custom_metadata_map["preparation"]


def test_a_graph_that_prepares_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "logistic", cells=False)
    right = onnx_tables.Graph.share
    monkeypatch.setattr(
        onnx_tables.Graph, "share", lambda self, number, low, high: right(self, number, low, high + 1.0)
    )
    with pytest.raises(exports.RefusedError, match="other scores for rows of the table"):
        export(tmp_path, "onnx", tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_the_page_on_serving_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("starlette.testclient")
    write_model(tmp_path, "logistic", cells=False)
    export(tmp_path, "onnx", tmp_path / "model.onnx")
    page = (PROJECT / "docs/how-to/serve-the-model.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    monkeypatch.chdir(tmp_path)
    service: dict[str, Any] = {}
    exec(compile(code, "page", "exec"), service)
    client = testing.TestClient(service["app"])
    row = {"age": 35, "pay": None, "job": "nurse", "month": "jan", "day": 3}
    answer = client.post("/predict", json=[row, row | {"age": None}]).json()
    assert answer["classes"] == ["no", "yes"]
    assert np.sum(answer["probabilities"], axis=1) == pytest.approx(1)
    assert client.get("/privacy").json() == "no privacy card was beside the model"


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
    with pytest.raises(exports.RefusedError, match="margins in place of probabilities"):
        load(tmp_path)
