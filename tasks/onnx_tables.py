"""The preparation of a table's rows as a part of an ONNX file, so that onnxruntime alone takes rows as they are.

The file has one input for each column: numbers [n] as doubles, where NaN is a missing one, texts and dates [n] as
strings, and for a hashed text [n] the number of its cell, since no operator of ONNX reads the bytes of a text. What the
data card says of missing numbers and unknown categories is in the graph; a missing number or date that the card refuses
makes the row's scores NaN. Texts are compared as in the file, with at most one space around them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
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
from data.cells import CellEncoding, Grids
from data.formats import Binned, Categorical, Date, Hashed, Numeric, Table, Timestamp
from data.preparation import Preparation, preparation_of, target_in
from data.readers import encoding
from data.targets import Number
from tasks.onnx_dates import Moments, moments
from tasks.onnx_graph import ML, Graph

# Of the extra `export`.
onnx: Any = import_module("onnx")
onnxruntime: Any = import_module("onnxruntime")
helper: Any = import_module("onnx.helper")
TensorProto = onnx.TensorProto
_TOLERANCE, _SYNTHETIC_ROWS = 1e-4, 64
"""How far outputs may be from the model's, and on how many made-up rows they are compared."""
Outputs = Callable[[Mapping[str, NDArray[Any]]], dict[str, NDArray[Any]]]


def inputs_of(reader: Table) -> dict[str, int]:
    """The columns that the graph takes, and the type of each."""
    kinds: dict[str, int] = {}
    for column in reader.columns:
        if isinstance(column, Numeric | Binned):
            kinds[column.name] = TensorProto.DOUBLE
        elif isinstance(column, Categorical | Timestamp):
            kinds[column.name] = TensorProto.STRING
        elif isinstance(column, Hashed):
            kinds[column.name] = TensorProto.INT64
        elif isinstance(column, Date):
            kinds |= {column.month: TensorProto.STRING, column.day: TensorProto.DOUBLE}
    return kinds


def opset_of(reader: Table | None) -> int | None:
    """The operator set that the graph needs, None for the exporter's own: dates are taken apart by operators of 20."""
    has_dates = reader is not None and any(isinstance(column, Timestamp) for column in reader.columns)
    return 20 if has_dates else None


def _number(graph: Graph, column: Numeric | Binned) -> str:
    """The column's input, with the value that stands for a missing number where the card has one."""
    if isinstance(column, Binned) or column.missing == "refuse":
        return column.name
    stand_in = graph.constant(float(column.missing))
    return graph.add("Where", graph.add("IsNaN", column.name), stand_in, column.name)


def _features(graph: Graph, reader: Table, dates: Mapping[str, Moments]) -> str:
    """The features of `data.readers.encoding` without cells, [n, width]."""
    parts = []
    for column in reader.columns:
        if isinstance(column, Numeric):
            low, high = column.bounds
            share = graph.share(_number(graph, column), low, high)
            parts.append(share if column.scale == "linear" else graph.logarithmic(share, high - low))
        elif isinstance(column, Binned):
            bins = graph.add("Squeeze", graph.bins(column.name, column.edges), graph.constant([1], np.int64))
            bin_indices = graph.add("Cast", graph.add("Round", bins), to=TensorProto.INT64)
            absent = graph.constant(column.width, np.int64)
            bin_indices = graph.add("Where", graph.add("IsNaN", column.name), absent, bin_indices)
            parts.append(graph.one_hot(bin_indices, column.width))
        elif isinstance(column, Categorical):
            parts.append(graph.one_hot(graph.indices(column.name, column.categories), column.width))
        elif isinstance(column, Hashed):
            parts.append(graph.one_hot(column.name, column.width))
        elif isinstance(column, Timestamp):
            share = dates[column.name].parts[-1]
            share = graph.add("Where", graph.add("IsNaN", share), graph.constant(0.5), share)
            parts.append(graph.column(share))
        elif isinstance(column, Date):
            parts.append(_day_of_year(graph, column)[1])
    return graph.concatenate(parts)


def _day_of_year(graph: Graph, column: Date) -> tuple[str, str]:
    """The month from 0, and 31 month + day scaled to [0, 1]; doubles [n, 1]."""
    indices = graph.add("Cast", graph.indices(column.month, column.months), to=TensorProto.DOUBLE)
    month = graph.column(indices)
    days = graph.add("Add", graph.add("Mul", month, graph.constant(31.0)), graph.column(column.day))
    # 31 (month + 1) + day, from 32 to 403
    return month, graph.add("Div", graph.add("Sub", days, graph.constant(1.0)), graph.constant(371.0))


def _cells(graph: Graph, reader: Table, cells: CellEncoding, dates: Mapping[str, Moments]) -> str:
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
            indices = graph.indices(column.name, column.categories)
            scales.append([graph.column(_nan_outside(graph, indices, len(column.categories)))])
        elif isinstance(column, Hashed):
            scales.append([graph.column(_nan_outside(graph, column.name, column.cells))])
        elif isinstance(column, Timestamp):
            scales += [[graph.column(part)] for part in dates[column.name].parts]
        elif isinstance(column, Date):
            scales += [[part] for part in _day_of_year(graph, column)]
    # Of each part the cell that is active, and the last one where the value is missing, which is NaN here.
    codes = []
    for part, values in zip(cells.parts, scales, strict=True):
        if isinstance(part, Grids):
            for count in cells.settings.grids:
                for value in values:
                    cell = graph.add("Floor", graph.add("Mul", value, graph.constant(float(count))))
                    cell = graph.add(
                        "Min", cell, graph.constant(count - 1.0)
                    )  # the upper bound is in the last cell
                    is_missing = graph.add("IsNaN", value)
                    codes.append(graph.add("Where", is_missing, graph.constant(float(count)), cell))
        else:
            is_missing = graph.add("IsNaN", values[0])
            codes.append(graph.add("Where", is_missing, graph.constant(float(part.count)), values[0]))
            # Of ordered values also, for each step, whether they are above it: three cells, below, above and missing.
            for step in range(1, part.count if part.is_ordered else 1):
                above = graph.add("GreaterOrEqual", values[0], graph.constant(float(step)))
                above = graph.add("Cast", above, to=TensorProto.DOUBLE)
                codes.append(graph.add("Where", is_missing, graph.constant(2.0), above))
    if cells.trees:
        codes.append(_leaves(graph, cells, scales))
    # The cell that all rows share: zeros of the batch's length, which is only known when it runs.
    if cells.settings.constant_share:
        codes.append(graph.add("Mul", codes[0], graph.constant(0.0)))
    return graph.concatenate(codes)


def _nan_outside(graph: Graph, indices: str, count: int) -> str:
    """Indices as doubles [n], NaN from `count` on."""
    number = graph.add("Cast", indices, to=TensorProto.DOUBLE)
    is_known = graph.add("Less", indices, graph.constant(count, np.int64))
    return graph.add("Where", is_known, number, graph.constant(np.nan))


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
    # Back into the order of the trees: numeric splits were compared together, and first.
    order = np.argsort([*numeric, *others])
    in_order = graph.add("Gather", ones, graph.constant(order, np.int64), axis=1)
    depth = cells.settings.depth
    shape = graph.constant([-1, len(cells.trees), depth], np.int64)
    # A leaf's number has the splits of its path as binary digits, the root's the highest.
    powers = graph.constant([[2.0**level] for level in range(depth - 1, -1, -1)])
    leaves = graph.add("MatMul", graph.add("Reshape", in_order, shape), powers)
    return graph.add("Squeeze", leaves, graph.constant([2], np.int64))


def prepend(model: Any, reader: Table) -> Any:
    """The model from the columns of a table: its input `records` is computed from them."""
    graph, cells = Graph("preparation"), reader.cell_encoding
    dates = {
        column.name: moments(graph, column, reader.missing)
        for column in reader.columns
        if isinstance(column, Timestamp)
    }
    features = _features(graph, reader, dates) if cells is None else _cells(graph, reader, cells, dates)
    refused = [graph.add("IsNaN", name) for name in _refused_where_missing(reader, dates)]
    refused += [date.unread for date in dates.values()]
    records = graph.add("Cast", features, to=TensorProto.FLOAT)
    inputs = [
        helper.make_tensor_value_info(name, kind, ["batch"]) for name, kind in inputs_of(reader).items()
    ]
    for node in model.graph.node:
        node.input[:] = [records if name == "records" else name for name in node.input]
    model_nodes = [*model.graph.node]
    # A row with something that the card refuses has the scores NaN, since a graph cannot raise an error.
    if refused:
        for node in model_nodes:
            node.output[:] = ["scores of the rows" if name == "scores" else name for name in node.output]
        before, graph.nodes = graph.nodes, []
        every = graph.concatenate([graph.column(name) for name in refused])
        ones = graph.add("Cast", every, to=TensorProto.FLOAT)
        largest = graph.add("ReduceMax", ones, graph.constant([1], np.int64), keepdims=1)
        is_refused = graph.add("Greater", largest, graph.constant(0.5, np.float32))
        nan = graph.constant(np.nan, np.float32)
        where = helper.make_node("Where", [is_refused, nan, "scores of the rows"], ["scores"], name="refused")
        nodes = [*before, *model_nodes, *graph.nodes, where]
    else:
        nodes = [*graph.nodes, *model_nodes]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(graph.initializers)
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    del model.graph.value_info[:]
    if all(opset.domain != ML for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(ML, 4))
    return model


def _refused_where_missing(reader: Table, dates: Mapping[str, Moments]) -> Iterator[str]:
    """What the card refuses where it is missing: doubles [n], NaN there."""
    for column in reader.columns:
        if isinstance(column, Numeric | Binned) and column.missing == "refuse":
            yield column.name
        elif isinstance(column, Timestamp) and column.missing == "refuse":
            yield dates[column.name].parts[-1]
        elif isinstance(column, Date):
            yield column.day


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
            "LabelEncoder", best, domain=ML, keys_int64s=keys, values_strings=[*classes], default_string=""
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
    if all(opset.domain != ML for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(ML, 4))
    return model


def synthetic_rows(reader: Table) -> dict[str, NDArray[Any]]:
    """Rows that the card allows, as they are in the table: inside and outside of bounds, missing, unknown."""
    draw = np.random.default_rng(0)
    rows: dict[str, NDArray[Any]] = {}
    for column in reader.columns:
        if isinstance(column, Numeric | Binned):
            low, high = (
                column.bounds if isinstance(column, Numeric) else (column.edges[0] - 1, column.edges[-1] + 1)
            )
            values = draw.uniform(low - 0.1 * (high - low), high + 0.1 * (high - low), _SYNTHETIC_ROWS)
            values[:2] = low, high
            if column.missing != "refuse":
                values[draw.random(_SYNTHETIC_ROWS) < 0.1] = np.nan
            rows[column.name] = values
        elif isinstance(column, Categorical):
            rows[column.name] = draw.choice(
                np.array([*column.categories, "", "unknown to the card"], object), _SYNTHETIC_ROWS
            )
        elif isinstance(column, Hashed):
            rows[column.name] = np.array([*["", "a"], *map(str, range(_SYNTHETIC_ROWS - 2))], object)
        elif isinstance(column, Timestamp):
            first, last = (day.toordinal() for day in column.days)
            days = draw.integers(max(1, first - 400), last + 400, _SYNTHETIC_ROWS)
            times = draw.choice(["", "T09:30", " 23:59:59.5", "T00:00:01+01:00"], _SYNTHETIC_ROWS)
            dates = [f"{date.fromordinal(day)}{time}" for day, time in zip(days, times, strict=True)]
            rows[column.name] = np.array(dates, object)
            if column.missing != "refuse":
                rows[column.name][:3] = "", "none", f"{column.years[0]:04d}-02-30"
        elif isinstance(column, Date):
            rows[column.month] = draw.choice(np.array(column.months, object), _SYNTHETIC_ROWS)
            rows[column.day] = draw.integers(1, 29, _SYNTHETIC_ROWS).astype(np.float64)
    return rows


def as_inputs(rows: Mapping[str, NDArray[Any]], reader: Table) -> dict[str, NDArray[Any]]:
    """Rows of the table as inputs of the graph."""
    hashed = [column for column in reader.columns if isinstance(column, Hashed)]
    cells = {
        column.name: np.array(
            [encoding.cell_of(text, column, reader.missing) for text in rows[column.name]], np.int64
        )
        for column in hashed
    }
    return {**rows, **cells}


def features_of(rows: Mapping[str, NDArray[Any]], reader: Table) -> NDArray[np.float32]:
    """The features of such rows by the product's own reader."""
    frame = pd.DataFrame({name: pd.Series(values) for name, values in rows.items()})
    table = pa.Table.from_pandas(frame, preserve_index=False)
    return encoding.features(table, reader, "made-up rows")


def complete(path: Path, model: TrainedModel, privacy: str) -> None:
    """Add to an ONNX file of a model how a table's rows are prepared, what scores mean, and facts in its metadata.

    Args:
        path: From the input `records` to the output `scores`.
        model: The model that it was made of.
        privacy: What its privacy card promises, which goes into the metadata.

    Raises:
        RefusedError: If the file gives other scores for made-up rows than the model does.
    """
    whole, target = onnx.load(str(path)), target_in(model.target)
    table, preparation = table_of(model), preparation_of(model.preparation)
    if table is not None:
        whole = prepend(whole, table)
    if isinstance(target, Number) or model.predicts in ("class", "labels"):
        whole = append_answers(
            whole,
            classes=model.classes,
            bounds=target.bounds if isinstance(target, Number) else None,
            is_probability=model.facts.model not in MARGINS,
            has_labels=model.predicts == "labels",
        )
    facts: dict[str, object] = {
        "predicts": model.predicts,
        "classes": list(model.classes),
        "columns": [] if table is None else [*inputs_of(table)],
        "preparation": _what_records_are(preparation) if table is None else "in this file",
        "privacy": privacy,
    }
    if table is not None and (hashed := _hashes(table)):
        facts["hashed"] = hashed
    if model.facts.tokens is not None:
        facts["padding"] = model.facts.padding
    if preparation is not None and preparation.encoder:
        facts["encoder"] = preparation.encoder  # with the digest of its weights
    for name, value in facts.items():
        entry = whole.metadata_props.add()
        entry.key, entry.value = name, value if isinstance(value, str) else json.dumps(value)
    onnx.save(whole, str(path))
    if table is not None:
        _compare(path, model, table)


def table_of(model: TrainedModel) -> Table | None:
    """The columns of a model of a table as it is, whose preparation belongs into the file."""
    preparation = preparation_of(model.preparation)
    return None if preparation is None else preparation.table


def _what_records_are(preparation: Preparation | None) -> str:
    """What to feed a file without the preparation."""
    if preparation is not None and (encoder := preparation.encoder):
        return (
            f"not in this file: records are what the public encoder {encoder['name']} makes, whose weights have the"
            f" SHA-256 {encoder['sha256']}"
        )
    if preparation is not None and preparation.transform != "none":
        return (
            f"not in this file: records are as epsilonflow's transform {preparation.transform!r} makes them"
        )
    return "not in this file: records are as prepared"


def _hashes(reader: Table) -> dict[str, object]:
    """How the cell of each hashed text is computed: BLAKE2b of 8 bytes with the key, big-endian, modulo the cells."""
    return {
        column.name: {
            "cells": column.cells,
            "key": encoding.hash_key(column).hex(),
            "missing": list(reader.missing),
        }
        for column in reader.columns
        if isinstance(column, Hashed)
    }


def _compare(path: Path, model: TrainedModel, table: Table) -> None:
    rows = synthetic_rows(table)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (scores,) = session.run(["scores"], as_inputs(rows, table))
    with torch.no_grad():
        expected = model(torch.from_numpy(features_of(rows, table))).numpy()
    far = float(np.abs(scores - expected).max())
    if not far <= _TOLERANCE:
        raise RefusedError(
            "the onnx form gives other scores for rows of the table than the model, by up to {difference:.2g}; use the"
            " model as it is.",
            code="scores_differ",
            difference=far,
        )
