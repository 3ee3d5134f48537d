"""Columns of the records' own file beside their predictions, and records from standard input."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pandas as pd

from data.card import DataRefusedError
from data.files import try_lock
from data.formats import Format, Ignored, Table
from data.prepared import LOCK, sweep
from data.readers import rows
from data.readers.encoding import check_columns
from tasks.predict import Predictions

_PARQUET = b"PAR1"
_PREDICTION_COLUMNS = ("record", "predicted")
"""Columns that predictions have themselves."""


@contextmanager
def spool_to_file(source: BinaryIO) -> Iterator[Path]:
    """The content of a stream as a file for its owner alone, Parquet by its first bytes and else CSV.

    What processes that were killed left of theirs is deleted.
    """
    spool = Path(tempfile.gettempdir()) / "epsilonflow-input"
    sweep(spool)
    folder = Path(tempfile.mkdtemp(prefix=f".{spool.name}-"))  # of mode 0700
    held = try_lock(folder / LOCK)
    try:
        first = source.read(len(_PARQUET))
        path = folder / f"input.{'parquet' if first == _PARQUET else 'csv'}"
        with path.open("wb") as file:
            file.write(first)
            shutil.copyfileobj(source, file)
        yield path
    finally:
        shutil.rmtree(folder)
        if held is not None:
            os.close(held)


def with_columns(
    predictions: Iterator[Predictions], path: Path, reader: Format | None, keep: Sequence[str]
) -> Iterator[Predictions]:
    """Predictions with these columns of the file that was predicted on, as they are there.

    Raises DataRefusedError if the records are no table, or the file has no such column.
    """
    if not isinstance(reader, Table) or path.suffix == ".npy":
        raise DataRefusedError(
            "columns can be kept of a table alone; leave out --keep, or give CSV or Parquet.",
            code="columns_not_kept",
        )
    if taken := [name for name in keep if name in _PREDICTION_COLUMNS]:
        raise DataRefusedError(
            "predictions have a column {column!r} of their own; rename it in the file.",
            code="columns_not_kept",
            column=taken[0],
        )
    names = {column.name for column in reader.columns}
    more = tuple(Ignored(kind="ignored", name=name) for name in keep if name not in names)
    declared = reader.model_copy(update={"columns": (*reader.columns, *more)})
    left = pd.DataFrame(columns=list(keep))
    tables = rows.tables_in(path, declared)
    for portion in predictions:
        while len(left) < len(portion.names) and (table := next(tables, None)) is not None:
            check_columns(table, keep, path)
            left = pd.concat([left, table.select(list(keep)).to_pandas()], ignore_index=True)
        columns, left = (
            left.iloc[: len(portion.names)],
            left.iloc[len(portion.names) :].reset_index(drop=True),
        )
        yield replace(portion, input_columns=columns.reset_index(drop=True))
