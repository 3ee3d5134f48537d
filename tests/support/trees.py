"""A model of a table with categories, as it is written for ONNX, and the rows of that table."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from algorithms import models
from algorithms.models.cells import behind_cells
from data.formats import Csv

COLUMNS: list[dict[str, Any]] = [
    {"name": "age", "kind": "numeric", "bounds": [17, 90], "missing": 40},
    {"name": "pay", "kind": "numeric", "bounds": [0, 1e5], "scale": "log", "missing": 0},
    {"name": "hours", "kind": "binned", "edges": [10, 20.5, 40], "missing": "zeros"},
    {"name": "job", "kind": "categorical", "categories": ["clerk", "nurse"]},
    {"name": "member", "kind": "categorical", "categories": ["true", "false"], "unknown": "zeros"},
    {"name": "grade", "kind": "categorical", "categories": ["1", "2", "3"], "ordered": True},
    {"name": "month", "kind": "ignored"},
    {"name": "day", "kind": "ignored"},
    {"name": "when", "kind": "date", "month": "month", "day": "day"},
    {"name": "answer", "kind": "label"},
]


HEADER = ["age", "pay", "hours", "job", "member", "grade", "month", "day"]


ROWS = [
    ["35", "12000", "38", "nurse", "True", "2.0", "jan", "3"],
    ["17", "0", "10", " clerk", "FALSE", "1", "dec", "31"],
    ["90", "100000", "20.5", "clerk ", "", "3", "feb", "28"],
    ["", "", "", "", "", "", "mar", "1"],
    ["200", "-5", "1e3", "unheard of", "yes", "4", "apr", "30"],
]


def write_model(folder: Path, name: str, *, cells: bool, columns: Any = COLUMNS, **more: Any) -> Csv:
    """A model's file with random weights, as a run releases it; returns the declared table."""
    document = {"kind": "csv", "columns": columns} | (
        {"cells": {"trees": 16, "constant_share": 0.1}} if cells else {}
    )
    reader = Csv.model_validate_json(json.dumps(document))
    classes = more.get("classes", ["no", "yes"])
    facts = {"model": name, "model_settings": {}, "tokens": None, "classes": classes} | more
    predicts = more.get("predicts", "class")
    encoding = reader.cell_encoding
    width = reader.width if encoding is None else encoding.facts.total
    model = models.build(name, input_shape=(width,), classes=max(1, len(classes)), seed=0, predicts=predicts)
    facts["input_shape"] = [reader.width]
    if encoding is not None:
        model = behind_cells(model, encoding.facts.sizes, encoding.facts.weights)
        facts["cells"] = {"sizes": encoding.facts.sizes, "weights": encoding.facts.weights}
        facts["input_shape"] = [len(encoding.facts.sizes)]
    facts["preparation"] = {"name": "people", "unit": "one person", "classes": classes, "shape": None}
    facts["preparation"] |= {"reader": document, "transform": "none", "words": None, "encoder": None}
    facts["preparation"] |= {"target": more["target"]} if "target" in more else {}
    torch.manual_seed(1)
    released = {
        key: torch.randn_like(part)
        for key, part in model.published_tensors(model.initial_parameters()).items()
    }
    save_file(released, folder / "model.safetensors", metadata={"epsilonflow": json.dumps(facts)})
    return reader
