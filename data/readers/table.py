"""Tables: each record encoded by itself, by the bounds, categories and classes that the card declares."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from data.errors import DataRefused
from data.formats import Csv, Parquet, Table
from data.readers import encoding, parquet, text
from data.records import PARTS, Block, Part, Records


def read(files: Mapping[str, Path], declared: Table, *, classes: tuple[str, ...]) -> Iterator[Block]:
    """The records of the train file and, where there is one, of the test file; features float32 [n, width].

    A block is a few megabytes of its file, so that memory does not grow with the file. Raises DataRefused, naming
    the file and the column but no value, when a number is missing without leave, is no number or is not finite,
    or when a label is none of `classes`.
    """
    for part in PARTS:
        if part in files:
            for table in tables(part, files[part], declared):
                yield Block(part, records(table, declared, classes, str(files[part])))


def tables(part: Part, path: Path, declared: Table) -> Iterator[pa.Table]:
    """The rows of a file as they are, some at a time; raises DataRefused where it is not of the declared format."""
    if isinstance(declared, Parquet):
        return parquet.read(path, declared)
    if not isinstance(declared, Csv):
        raise TypeError(f"a table of kind {type(declared).__name__} has no reader")
    skip_lines = declared.skip_lines.test if part == "test" else declared.skip_lines.train
    return text.read(path, declared, skip_lines=skip_lines)


def records(table: pa.Table, declared: Table, classes: tuple[str, ...], path: str) -> Records:
    """The records of some rows; path: what messages call their source. Raises DataRefused as `read` does."""
    _check_columns(table, declared, path)
    features = np.zeros((table.num_rows, declared.width), np.float32)
    start = 0
    for column in declared.columns:
        place = features[:, start : start + column.width]
        encoding.fill(place, column, table, declared.missing, path)
        start += column.width
    label = declared.label
    where = f"{path}, column {label.name!r}"
    return Records(features, encoding.classes(table[label.name], label, classes, where))


def _check_columns(table: pa.Table, declared: Table, path: str) -> None:
    for name in declared.in_the_file:
        if table.column_names.count(name) != 1:
            raise DataRefused(f"{path} must have one column {name!r}; correct the file or its card.")
