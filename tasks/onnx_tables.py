"""The preparation of a table's rows as a part of an ONNX file, so that onnxruntime alone takes rows as they are.

The file has one input for each column: numbers [n] as doubles, where NaN is a missing one, and texts [n] as strings.
What the data card says of missing numbers and unknown categories is in the graph; a missing number that the card
refuses makes the row's scores NaN. Texts are compared as in the file, with at most one space around them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from numpy.typing import NDArray

from algorithms.errors import RefusedError
from algorithms.models.objectives import MARGINS
from algorithms.models.saved import TrainedModel
from algorithms.privacy.card import load as load_card
from algorithms.privacy.card.text import statement
from data.cells import CellEncoding, Grids
from data.formats import Binned, Categorical, Date, Ignored, Label, Numeric, Table
from data.readers import encoding
from data.targets import Number
from data.unseen import reader_in, target_in

# Of the extra `export`.
onnx: Any = import_module("onnx")
onnxruntime: Any = import_module("onnxruntime")
helper: Any = import_module("onnx.helper")
TensorProto = onnx.TensorProto
_CLOSE = 1e-4
_ML = "ai.onnx.ml"
_WHOLE = re.compile("[+-]?[0-9]+")
Outputs = Callable[[Mapping[str, NDArray[Any]]], dict[str, NDArray[Any]]]


def columns_without_onnx(reader: Table) -> list[str]:
    """The columns whose preparation no operators of ONNX compute: a keyed hash, and dates in words."""
    supported = Numeric | Binned | Categorical | Date | Label | Ignored
    return [column.name for column in reader.columns if not isinstance(column, supported)]


def inputs_of(reader: Table) -> dict[str, bool]:
    """The columns that the graph takes, and whether each is a number."""
    kinds: dict[str, bool] = {}
    for column in reader.columns:
        if isinstance(column, Numeric | Binned | Categorical):
            kinds[column.name] = not isinstance(column, Categorical)
        elif isinstance(column, Date):
            kinds |= {column.month: False, column.day: True}
    return kinds


class Graph:
    """Nodes of a graph, each of which gets a name of its own."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._count = prefix, 0
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def add(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """A node with one output; returns the output's name."""
        self._count += 1
        name = f"{self._prefix}/{self._count}/{op}"
        self.nodes.append(helper.make_node(op, [*inputs], [name], name=name, domain=domain, **attributes))
        return name

    def constant(self, value: Any, dtype: Any = np.float64) -> str:
        """An array that belongs to the graph."""
        name = f"{self._prefix}/constant/{len(self.initializers)}"
        self.initializers.append(onnx.numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def column(self, value: str) -> str:
        """[n] as [n, 1]."""
        return self.add("Unsqueeze", value, self.constant([1], np.int64))

    def concatenate(self, parts: Sequence[str]) -> str:
        """Parts [n, k] side by side, [n, all of them]."""
        return parts[0] if len(parts) == 1 else self.add("Concat", *parts, axis=1)

    def places(self, text: str, names: Sequence[str]) -> str:
        """The index of each text in the names, their number for any other; int64 [n]."""
        spellings = {
            spelling: place for place, name in enumerate(names) for spelling in _spellings(name, names)
        }
        return self.add(
            "LabelEncoder",
            text,
            domain=_ML,
            keys_strings=[*spellings],
            values_int64s=[*spellings.values()],
            default_int64=len(names),
        )

    def one_hot(self, places: str, width: int) -> str:
        """Doubles [n, width], zero where the index is beyond them."""
        same = self.add("Equal", self.column(places), self.constant([np.arange(width)], np.int64))
        return self.add("Cast", same, to=TensorProto.DOUBLE)

    def bins(self, number: str, edges: Sequence[float]) -> str:
        """The number of edges that are at most each number, [n, 1]."""
        reached = self.add("GreaterOrEqual", self.column(number), self.constant([edges]))
        ones = self.add("Cast", reached, to=TensorProto.DOUBLE)
        return self.add("ReduceSum", ones, self.constant([1], np.int64), keepdims=1)

    def share(self, number: str, low: float, high: float) -> str:
        """The number clamped to its bounds as a share of them, [n, 1]; NaN stays NaN."""
        inside = self.add(
            "Min", self.add("Max", self.column(number), self.constant(low)), self.constant(high)
        )
        # Some kernels take a bound for NaN.
        moved = self.add("Sub", self.keep_nan(inside, self.column(number)), self.constant(low))
        return self.add("Div", moved, self.constant(high - low))

    def keep_nan(self, value: str, number: str) -> str:
        """A value, NaN where the number is."""
        return self.add("Where", self.add("IsNaN", number), self.constant(np.nan), value)

    def logarithmic(self, share: str, span: float) -> str:
        """log(1 + x span) / log(1 + span) of shares, at most 1."""
        grown = self.add("Add", self.add("Mul", share, self.constant(span)), self.constant(1.0))
        scaled = self.add("Div", self.add("Log", grown), self.constant(np.log1p(span)))
        return self.keep_nan(self.add("Min", scaled, self.constant(1.0)), share)


def _spellings(name: str, names: Sequence[str]) -> list[str]:
    forms = [name]
    if {one.lower() for one in names} <= {"true", "false"}:
        forms = [name.lower(), name.lower().capitalize(), name.upper()]
    elif all(_WHOLE.fullmatch(one) for one in names):
        forms = [name, f"{name}.0"]
    return [spelling for form in forms for spelling in (form, f" {form}", f"{form} ", f" {form} ")]


def _number(graph: Graph, column: Numeric | Binned) -> str:
    """The column's input, with the value that stands for a missing number where the card has one."""
    if isinstance(column, Binned) or column.missing == "refuse":
        return column.name
    stand_in = graph.constant(float(column.missing))
    return graph.add("Where", graph.add("IsNaN", column.name), stand_in, column.name)


def _features(graph: Graph, reader: Table) -> str:
    """The features of `data.readers.encoding` without cells, [n, width]."""
    parts = []
    for column in reader.columns:
        if isinstance(column, Numeric):
            low, high = column.bounds
            share = graph.share(_number(graph, column), low, high)
            parts.append(share if column.scale == "linear" else graph.logarithmic(share, high - low))
        elif isinstance(column, Binned):
            bins = graph.add("Squeeze", graph.bins(column.name, column.edges), graph.constant([1], np.int64))
            here = graph.add("Cast", graph.add("Round", bins), to=TensorProto.INT64)
            absent = graph.constant(column.width, np.int64)
            here = graph.add("Where", graph.add("IsNaN", column.name), absent, here)
            parts.append(graph.one_hot(here, column.width))
        elif isinstance(column, Categorical):
            parts.append(graph.one_hot(graph.places(column.name, column.categories), column.width))
        elif isinstance(column, Date):
            parts.append(_day_of_year(graph, column)[1])
    return graph.concatenate(parts)


def _day_of_year(graph: Graph, column: Date) -> tuple[str, str]:
    """The month from 0, and 31 month + day scaled to [0, 1]; doubles [n, 1]."""
    places = graph.add("Cast", graph.places(column.month, column.months), to=TensorProto.DOUBLE)
    month = graph.column(places)
    days = graph.add("Add", graph.add("Mul", month, graph.constant(31.0)), graph.column(column.day))
    # 31 (month + 1) + day, from 32 to 403
    return month, graph.add("Div", graph.add("Sub", days, graph.constant(1.0)), graph.constant(371.0))


def _cells(graph: Graph, reader: Table, cells: CellEncoding) -> str:
    """The active cell of each position, as `CellEncoding.codes` has them, [n, positions]."""
    scales: list[list[str]] = []
    for column in reader.columns:
        if isinstance(column, Numeric):
            share = graph.share(column.name, *column.bounds)
            grids = column.parts[0]
            assert isinstance(grids, Grids)
            scales.append([share, graph.logarithmic(share, grids.span)] if grids.logarithmic else [share])
        elif isinstance(column, Binned):
            bins = graph.keep_nan(graph.bins(column.name, column.edges), graph.column(column.name))
            scales.append([bins])
        elif isinstance(column, Categorical):
            places = graph.places(column.name, column.categories)
            is_known = graph.add("Less", places, graph.constant(len(column.categories), np.int64))
            number = graph.add("Cast", places, to=TensorProto.DOUBLE)
            known = graph.add("Where", is_known, number, graph.constant(np.nan))
            scales.append([graph.column(known)])
        elif isinstance(column, Date):
            scales += [[part] for part in _day_of_year(graph, column)]
    codes = []
    for part, values in zip(cells.parts, scales, strict=True):
        if isinstance(part, Grids):
            for count in cells.settings.grids:
                for value in values:
                    cell = graph.add("Floor", graph.add("Mul", value, graph.constant(float(count))))
                    cell = graph.add("Min", cell, graph.constant(count - 1.0))
                    is_missing = graph.add("IsNaN", value)
                    codes.append(graph.add("Where", is_missing, graph.constant(float(count)), cell))
        else:
            is_missing = graph.add("IsNaN", values[0])
            codes.append(graph.add("Where", is_missing, graph.constant(float(part.count)), values[0]))
            for step in range(1, part.count if part.is_ordered else 1):
                above = graph.add("GreaterOrEqual", values[0], graph.constant(float(step)))
                above = graph.add("Cast", above, to=TensorProto.DOUBLE)
                codes.append(graph.add("Where", is_missing, graph.constant(2.0), above))
    if cells.trees:
        codes.append(_leaves(graph, cells, scales))
    return graph.concatenate(codes)


def _leaves(graph: Graph, cells: CellEncoding, scales: list[list[str]]) -> str:
    """The leaf of each tree, [n, trees]."""
    splits = [split for tree in cells.trees for split in tree]
    numeric = [k for k, split in enumerate(splits) if isinstance(cells.parts[split.part], Grids)]
    others = [k for k, split in enumerate(splits) if k not in set(numeric)]
    passed = []
    if numeric:
        every = [name for part in scales for name in part]
        starts = np.cumsum([0, *(len(part) for part in scales)])
        columns = [int(starts[splits[k].part]) + splits[k].scale for k in numeric]
        values = graph.add("Gather", graph.concatenate(every), graph.constant(columns, np.int64), axis=1)
        # A comparison with NaN is false, as a missing value passes no split.
        thresholds = graph.constant([[splits[k].threshold for k in numeric]])
        passed.append(graph.add("GreaterOrEqual", values, thresholds))
    for k in others:
        among = graph.constant([sorted(splits[k].passing) or [-1]])
        same = graph.add("Equal", scales[splits[k].part][0], among)
        ones = graph.add("Cast", same, to=TensorProto.DOUBLE)
        total = graph.add("ReduceMax", ones, graph.constant([1], np.int64), keepdims=1)
        passed.append(graph.add("Greater", total, graph.constant(0.5)))
    ones = graph.add("Cast", graph.concatenate(passed), to=TensorProto.DOUBLE)
    order = np.argsort([*numeric, *others])
    in_order = graph.add("Gather", ones, graph.constant(order, np.int64), axis=1)
    depth = cells.settings.depth
    shape = graph.constant([-1, len(cells.trees), depth], np.int64)
    powers = graph.constant([[2.0**level] for level in range(depth - 1, -1, -1)])
    leaves = graph.add("MatMul", graph.add("Reshape", in_order, shape), powers)
    return graph.add("Squeeze", leaves, graph.constant([2], np.int64))


def prepend(model: Any, reader: Table) -> Any:
    """The model from the columns of a table: its input `records` is computed from them."""
    graph, cells = Graph("preparation"), reader.cell_encoding
    features = _features(graph, reader) if cells is None else _cells(graph, reader, cells)
    refused = [
        column.name
        for column in reader.columns
        if isinstance(column, Numeric | Binned) and column.missing == "refuse"
    ]
    refused += [column.day for column in reader.columns if isinstance(column, Date)]
    records = graph.add("Cast", features, to=TensorProto.FLOAT)
    inputs = [
        helper.make_tensor_value_info(
            name, TensorProto.DOUBLE if is_number else TensorProto.STRING, ["batch"]
        )
        for name, is_number in inputs_of(reader).items()
    ]
    for node in model.graph.node:
        node.input[:] = [records if name == "records" else name for name in node.input]
    own = [*model.graph.node]
    if refused:
        for node in own:
            node.output[:] = ["scores of the rows" if name == "scores" else name for name in node.output]
        before, graph.nodes = graph.nodes, []
        absent = graph.add("IsNaN", graph.concatenate([graph.column(name) for name in refused]))
        ones = graph.add("Cast", absent, to=TensorProto.FLOAT)
        some = graph.add("ReduceMax", ones, graph.constant([1], np.int64), keepdims=1)
        is_refused = graph.add("Greater", some, graph.constant(0.5, np.float32))
        nan = graph.constant(np.nan, np.float32)
        where = helper.make_node("Where", [is_refused, nan, "scores of the rows"], ["scores"], name="refused")
        nodes = [*before, *own, *graph.nodes, where]
    else:
        nodes = [*graph.nodes, *own]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(graph.initializers)
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    del model.graph.value_info[:]
    if all(opset.domain != _ML for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_ML, 4))
    return model


def append_answers(
    model: Any,
    *,
    classes: Sequence[str],
    bounds: tuple[float, float] | None,
    is_probability: bool,
    has_labels: bool,
) -> Any:
    """Add what the scores mean: probabilities and the predicted class, or a number in its own units."""
    graph = Graph("answers")
    outputs: list[tuple[str, str, int, list[str | int | None]]] = []
    if bounds is not None:
        low, high = bounds
        inside = graph.add(
            "Clip", "scores", graph.constant(-1.0, np.float32), graph.constant(1.0, np.float32)
        )
        share = graph.add("Add", graph.add("Cast", inside, to=TensorProto.DOUBLE), graph.constant(1.0))
        number = graph.add(
            "Add", graph.add("Mul", share, graph.constant((high - low) / 2)), graph.constant(low)
        )
        outputs.append((number, "number", TensorProto.DOUBLE, ["batch", 1]))
    elif has_labels:
        shares = graph.add("Sigmoid", "scores")
        outputs.append((shares, "probabilities", TensorProto.FLOAT, ["batch", len(classes)]))
    elif classes:
        best = graph.add("ArgMax", "scores", axis=1, keepdims=0)
        keys = [*range(len(classes))]
        name = graph.add(
            "LabelEncoder", best, domain=_ML, keys_int64s=keys, values_strings=[*classes], default_string=""
        )
        outputs.append((name, "predicted", TensorProto.STRING, ["batch"]))
        if is_probability:
            shares = graph.add("Softmax", "scores", axis=1)
            outputs.append((shares, "probabilities", TensorProto.FLOAT, ["batch", len(classes)]))
    model.graph.node.extend(graph.nodes)
    model.graph.initializer.extend(graph.initializers)
    for name, output, kind, shape in outputs:
        model.graph.node.append(helper.make_node("Identity", [name], [output], name=output))
        model.graph.output.append(helper.make_tensor_value_info(output, kind, shape))
    if all(opset.domain != _ML for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_ML, 4))
    return model


def made_up_rows(reader: Table, count: int = 64) -> dict[str, NDArray[Any]]:
    """Rows that the card allows, in the form of the graph's inputs: inside and outside of bounds, missing, unknown."""
    draw = np.random.default_rng(0)
    rows: dict[str, NDArray[Any]] = {}
    for column in reader.columns:
        if isinstance(column, Numeric | Binned):
            low, high = (
                column.bounds if isinstance(column, Numeric) else (column.edges[0] - 1, column.edges[-1] + 1)
            )
            values = draw.uniform(low - 0.1 * (high - low), high + 0.1 * (high - low), count)
            values[:2] = low, high
            if column.missing != "refuse":
                values[draw.random(count) < 0.1] = np.nan
            rows[column.name] = values
        elif isinstance(column, Categorical):
            rows[column.name] = draw.choice(
                np.array([*column.categories, "", "unknown to the card"], object), count
            )
        elif isinstance(column, Date):
            rows[column.month] = draw.choice(np.array(column.months, object), count)
            rows[column.day] = draw.integers(1, 29, count).astype(np.float64)
    return rows


def features_of(rows: Mapping[str, NDArray[Any]], reader: Table) -> NDArray[np.float32]:
    """The features of such rows by the product's own reader."""
    frame = pd.DataFrame({name: pd.Series(values) for name, values in rows.items()})
    table = pa.Table.from_pandas(frame, preserve_index=False)
    return encoding.features(table, reader, "made-up rows")


def complete(path: Path, model: TrainedModel, card: Path) -> None:
    """Add to an ONNX file of a model how a table's rows are prepared, what scores mean, and facts in its metadata.

    Args:
        path: From the input `records` to the output `scores`.
        model: The model that it was made of.
        card: The run's privacy card, if it has one, whose promise goes into the metadata.

    Raises:
        RefusedError: If the file gives other scores for made-up rows than the model does.
    """
    whole, reader, target = onnx.load(str(path)), reader_in(model.preparation), target_in(model.facts)
    preparation = model.preparation or {}
    table = reader if isinstance(reader, Table) and preparation.get("transform") == "none" else None
    unknown = [] if table is None else columns_without_onnx(table)
    has_preparation = table is not None and not unknown
    if table is not None and has_preparation:
        whole = prepend(whole, table)
    if model.predicts in ("class", "number", "labels"):
        whole = append_answers(
            whole,
            classes=model.classes,
            bounds=target.bounds if isinstance(target, Number) else None,
            is_probability=model.facts.get("model") not in MARGINS,
            has_labels=model.predicts == "labels",
        )
    why = f", which ONNX cannot compute for {', '.join(unknown)}" if unknown else ""
    facts: dict[str, Any] = {
        "predicts": model.predicts,
        "classes": list(model.classes),
        "columns": [] if table is None else [*inputs_of(table), *unknown],
        "preparation": "in this file"
        if has_preparation
        else f"not in this file{why}: records are as prepared",
    }
    if preparation.get("encoder"):
        facts["encoder"] = preparation["encoder"]  # with the digest of its weights
    if card.is_file():
        facts["privacy"] = statement(load_card(card))
    for name, value in facts.items():
        entry = whole.metadata_props.add()
        entry.key, entry.value = name, value if isinstance(value, str) else json.dumps(value)
    onnx.save(whole, str(path))
    if table is not None and has_preparation:
        _compare(path, model, table)


def _compare(path: Path, model: TrainedModel, table: Table) -> None:
    rows = made_up_rows(table)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (scores,) = session.run(["scores"], rows)
    with torch.no_grad():
        expected = model(torch.from_numpy(features_of(rows, table))).numpy()
    far = float(np.abs(scores - expected).max())
    if not far <= _CLOSE:
        raise RefusedError(
            f"the onnx form gives other scores for rows of the table than the model, by up to {far:.2g}; use the model"
            " as it is."
        )
