"""python -m benchmarks.kddcup_rows FILE: rows of the schema of KDD Cup 1999, made up, as many as are asked for.

They come from the data card alone: numbers between the declared bounds, listed categories and labels. With --prepare
they are then prepared as the real file would be, and the seconds and the growth of memory are shown.
"""

import gzip
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import pyarrow as pa
import typer
from numpy.random import Generator, default_rng
from pyarrow import csv
from rich.console import Console

from data import DataCard, catalogue, prepared, public_description
from data.card import File, Split
from data.columns import Categorical, Column, Label, Numeric
from data.formats import Csv
from data.reading import read

_BLOCK = 100_000
_STATUS = Path("/proc/self/status")
_MEBIBYTE = 2**20

Count: TypeAlias = Annotated[int, typer.Option(min=1, help="How many rows.")]


def write(path: Path, declared: Csv, *, records: int, seed: int) -> None:
    """Write `records` rows of the table that `declared` describes, gzipped; the same for the same seed."""
    random = default_rng(seed)
    options = csv.WriteOptions(include_header=False, quoting_style="none")
    with path.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as file:
        for start in range(0, records, _BLOCK):
            rows = min(_BLOCK, records - start)
            columns = {column.name: _values(column, rows, random) for column in declared.columns}
            text = pa.BufferOutputStream()
            csv.write_csv(pa.table(columns), text, options)
            file.write(text.getvalue())


def _values(column: Column, rows: int, random: Generator) -> pa.Array:
    if isinstance(column, Numeric):
        return _numbers(column, rows, random)
    known: tuple[str, ...] = ("0",)
    if isinstance(column, Categorical):
        known = column.categories
    elif isinstance(column, Label):
        known = tuple(text for texts in column.spellings.values() for text in texts)
    return pa.array(np.array(known, dtype=object)[random.integers(len(known), size=rows)], pa.string())


def _numbers(column: Numeric, rows: int, random: Generator) -> pa.Array:
    """Shares in hundredths, counts as whole numbers, on the scale of the column."""
    low, high = column.bounds
    share = random.random(rows)
    if column.scale == "log":
        return pa.array((low + np.expm1(share * np.log1p(high - low))).astype(np.int64))
    return pa.array(np.round(low + share * (high - low), 2 if high == 1 else 0))


def prepare(path: Path, card: DataCard, *, records: int) -> tuple[float, float]:
    """Prepare the rows in `path` as training records; returns the seconds and the growth of memory in MiB."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        _STATUS.with_name("clear_refs").write_text("5")  # the kernel's way of resetting the peak
        before, start = _status("VmRSS"), time.perf_counter()
        blocks = read(_with_a_split(card, path, records), {"train": path})
        prepared.write(
            Path(folder) / "prepared", blocks, public_description(card), salt=bytes(32), at_most=records
        )
        return time.perf_counter() - start, (_status("VmHWM") - before) / _MEBIBYTE


def _with_a_split(card: DataCard, path: Path, records: int) -> DataCard:
    """The card of the rows alone, with a hash of each to decide its side: the most work that a table can be."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return card.model_copy(
        update={
            "files": {"train": File(path=os.path.relpath(path), sha256=checksum)},
            "records": card.records.model_copy(update={"train": None, "test": None, "at_most": records}),
            "split": Split(salt="rows", test_fraction=0.05),
        }
    )


def _status(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main(
    file: Path,
    records: Count = 4_898_431,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    prepare_too: Annotated[
        bool, typer.Option("--prepare", help="Then prepare them, and measure it.")
    ] = False,
) -> None:
    """Write the rows; with --prepare, prepare them and say what it took."""
    card = catalogue.card("kddcup99")
    if not isinstance(card.reader, Csv):
        raise typer.BadParameter("the card of kddcup99 declares no text")
    write(file, card.reader, records=records, seed=seed)
    if prepare_too:
        seconds, growth = prepare(file, card, records=records)
        Console().print(f"{records} rows: {seconds:.1f} s, memory grew by {growth:.0f} MiB")


if __name__ == "__main__":
    typer.run(main)
