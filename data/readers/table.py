"""Tables: each record encoded by itself, by the bounds, categories and classes that the card declares."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data.columns import Categorical, Label, Numeric
from data.errors import DataRefused
from data.formats import Csv, Parquet
from data.readers import parquet, text
from data.records import Records


def read(
    files: Mapping[str, Path], declared: Csv | Parquet, *, classes: tuple[str, ...]
) -> dict[str, Records]:
    """The records of the train file and, where there is one, of the test file; features float32 [n, width].

    Raises DataRefused, naming the file and the column but no value, when a number is missing without leave,
    is no number or is not finite, or when a label is none of `classes`.
    """
    return {role: _records(role, path, declared, classes) for role, path in files.items()}


def _records(role: str, path: Path, declared: Csv | Parquet, classes: tuple[str, ...]) -> Records:
    table = _table(role, path, declared)
    features = np.zeros((table.num_rows, declared.width), np.float32)
    start = 0
    for column in declared.columns:
        place = features[:, start : start + column.width]
        where = f"{path}, column {column.name!r}"
        if isinstance(column, Numeric):
            place[:, 0] = _numbers(table[column.name], column, declared.missing, where)
        elif isinstance(column, Categorical):
            place[np.arange(len(place)), _positions(table[column.name], column.categories, where)] = 1.0
        start += column.width
    label = declared.label
    return Records(features, _classes(table[label.name], label, classes, f"{path}, column {label.name!r}"))


def _table(role: str, path: Path, declared: Csv | Parquet) -> pa.Table:
    if isinstance(declared, Parquet):
        table = parquet.read(path, declared)
    else:
        skip_lines = declared.skip_lines.test if role == "test" else declared.skip_lines.train
        table = text.read(path, declared, skip_lines=skip_lines)
    for column in declared.columns:
        if table.column_names.count(column.name) != 1:
            raise DataRefused(f"{path} must have one column {column.name!r}; correct the file or its card.")
    return table


def _numbers(
    values: pa.ChunkedArray, column: Numeric, missing: tuple[str, ...], where: str
) -> NDArray[np.float64]:
    """The column clamped to its bounds and scaled to [0, 1]; float64 [n]."""
    if _is_text(values.type):
        values = _trimmed(values, where)
        absent = pc.is_in(values, value_set=pa.array(missing, pa.string()))
        values = pc.if_else(absent, pa.scalar(None, pa.string()), values)
    if values.null_count and column.missing == "refuse":
        raise DataRefused(
            f"{where}: a number is missing; correct the file, or declare `missing` for that column."
        )
    low, high = column.bounds
    stand_in = low if column.missing == "refuse" else column.missing
    numbers: NDArray[np.float64] = _cast(values, pa.float64(), where).fill_null(stand_in).to_numpy()
    if not np.isfinite(numbers).all():
        raise DataRefused(f"{where}: NaN and infinite numbers are not allowed; correct the file.")
    return (np.clip(numbers, low, high) - low) / (high - low)


def _positions(values: pa.ChunkedArray, known: tuple[str, ...], where: str) -> NDArray[np.int64]:
    """For each value its place among `known`, or len(known) when it is unknown or missing; int64 [n]."""
    found = pc.index_in(_trimmed(values, where), value_set=pa.array(known, pa.string()))
    positions: NDArray[np.int64] = found.cast(pa.int64()).fill_null(len(known)).to_numpy()
    return positions


def _classes(
    values: pa.ChunkedArray, label: Label, classes: tuple[str, ...], where: str
) -> NDArray[np.int64]:
    written = [
        (text, index) for index, name in enumerate(classes) for text in label.spellings.get(name, (name,))
    ]
    positions = _positions(values, tuple(text for text, _ in written), where)
    if (positions == len(written)).any():
        raise DataRefused(f"{where}: a label is none of the declared classes; correct the file or the card.")
    return np.array([index for _, index in written], np.int64)[positions]


def _trimmed(values: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    return pc.utf8_trim_whitespace(_cast(values, pa.string(), where))


def _cast(values: pa.ChunkedArray, kind: pa.DataType, where: str) -> pa.ChunkedArray:
    try:
        return pc.cast(values, kind, safe=False)
    except pa.ArrowException:  # its message quotes the value
        what = "a number" if pa.types.is_floating(kind) else "text"
        raise DataRefused(
            f"{where}: holds something that is not {what}; correct the file or its card."
        ) from None


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
