"""Writes synthetic rows with the schema of KDD Cup 1999: `python -m benchmarks.kddcup_rows FILE`.

They are drawn from the data card alone: numbers within the declared bounds, and the listed categories and labels. With
--prepare they are then prepared like the real file, and DP-AGD is trained on them with samples of 40,000, the
mini-batch of Lee and Kifer 2018; seconds and memory growth are printed for both.
"""

import gzip
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import pyarrow as pa
import typer
from numpy.random import Generator, default_rng
from pyarrow import csv
from rich.console import Console

from algorithms.core import training
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.mechanisms.noise import seeded_generator
from data import DataCard, dataset_info, prepared
from data.card import File, SplitRule, data_card
from data.formats import Categorical, Column, Csv, Label, Numeric
from data.readers.records import RecordBatch
from data.reading import read
from tasks.calibrate import plan_for
from tasks.config import params
from tasks.model_building import model_for

_BLOCK = 100_000
_ITERATIONS = 45
_STATUS = Path("/proc/self/status")
_MEBIBYTE = 2**20

Count: TypeAlias = Annotated[int, typer.Option(min=1, help="How many rows.")]


def write(path: Path, declared: Csv, *, records: int, seed: int) -> None:
    """Write `records` gzipped rows of the table that `declared` describes; the same seed gives the same rows."""
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
    """Shares are rounded to hundredths and counts to integers, on the column's scale."""
    low, high = column.bounds
    share = random.random(rows)
    if column.scale == "log":
        return pa.array((low + np.expm1(share * np.log1p(high - low))).astype(np.int64))
    return pa.array(np.round(low + share * (high - low), 2 if high == 1 else 0))


@dataclass(frozen=True)
class Cost:
    """Seconds, and the largest growth of this process's memory in MiB."""

    seconds: float
    growth: float


@contextmanager
def measure_cost() -> Iterator[list[Cost]]:
    """Yield a list that holds the cost of the block once it has ended."""
    costs: list[Cost] = []
    _STATUS.with_name("clear_refs").write_text("5")  # makes the kernel reset the peak
    before, start = _status("VmRSS"), time.perf_counter()
    yield costs
    costs.append(Cost(time.perf_counter() - start, (_status("VmHWM") - before) / _MEBIBYTE))


def prepare(path: Path, card: DataCard, folder: Path, *, records: int) -> Cost:
    """The cost of preparing the rows in `path` as training records."""
    with measure_cost() as costs:
        blocks = read(_with_a_split(card, path, records), {"train": path})
        prepared.write(folder, blocks, dataset_info(card), salt=bytes(32), at_most=records)
    return costs[0]


def train(folder: Path, *, records: int, iterations: int) -> Cost:
    """The cost of DP-AGD's iterations on prepared rows, with a new sample of 40,000 for each query."""
    algorithm = {"name": "dp_agd", "sampling_rate": 40_000 / records, "iterations": iterations}
    settings = params.parse(
        {
            "data": {"dataset": "kddcup99"},
            "privacy": {"epsilon": 1.0, "delta": 1e-12, "noise": "seeded"},
            "algorithm": algorithm,
            "model": {"name": "logistic"},
        }
    )
    with measure_cost() as costs:
        data = prepared.load(folder)
        training.train(
            settings.algorithm,
            plan_for(settings, data.info),
            model_for(settings, data.info),
            open_records=lambda: RecordBatch(data.train_features, data.train_labels),
            run=training.ResumableRun(run_id="rows", generator=seeded_generator(0), folder=folder),
            compute=ComputeConfig(memory_mb=512),
        )
    return costs[0]


def _with_a_split(card: DataCard, path: Path, records: int) -> DataCard:
    """The card for these rows alone, split by a hash of each row: the most work that a table can need."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return card.model_copy(
        update={
            "files": {"train": File(path=os.path.relpath(path), sha256=checksum)},
            "records": card.records.model_copy(update={"train": None, "test": None, "at_most": records}),
            "split": SplitRule(salt="rows", test_fraction=0.05),
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
        bool, typer.Option("--prepare", help="Then prepare them and train on them, and measure it.")
    ] = False,
) -> None:
    """Write the rows; with --prepare, also prepare them, train on them and print the cost."""
    card = data_card("kddcup99")
    if not isinstance(card.reader, Csv):
        raise typer.BadParameter("the card of kddcup99 declares no text")
    write(file, card.reader, records=records, seed=seed)
    if prepare_too:
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            records_folder = Path(folder) / "prepared"
            costs = {"prepared": prepare(file, card, records_folder, records=records)}
            costs["trained"] = train(records_folder, records=records, iterations=_ITERATIONS)
        for what, cost in costs.items():
            Console().print(f"{records} rows {what}: {cost.seconds:.1f} s, {cost.growth:.0f} MiB more memory")


if __name__ == "__main__":
    typer.run(main)
