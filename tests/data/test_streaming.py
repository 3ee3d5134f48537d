"""Tables are read and written block by block: the same bytes as in one piece, and never the whole file at once."""

import gzip
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from data import DataRefusedError, dataset_info, prepared
from data.card import DataCard
from data.formats import Rows
from data.prepared import _Rows
from data.readers import rows
from data.readers.records import RecordBatch, RecordChunk
from data.reading import read
from tests.data.conftest import CardOf, Document
from tests.support.refusals import refused_as

ROWS = 5000
HEADER = "age,town,answer,note\n"
LINES = [f"{i % 90}.5,{('Rome', 'Oslo', 'Bergen')[i % 3]},{('no', 'yes')[i % 2]},{i}\n" for i in range(ROWS)]


@pytest.fixture
def card(table: Document, card_of: CardOf) -> CardOf:
    """The tiny table's card, for all of the rows, with changes to its reader."""
    table["records"] = {"at_most": ROWS}
    return lambda **reader: card_of(table | {"reader": table["reader"] | reader})


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few kilobytes."""
    monkeypatch.setattr(rows, "BLOCK_BYTES", 8192)
    monkeypatch.setattr(rows, "TABLE_ROWS", 300)


def written(card: DataCard, path: Path, folder: Path) -> dict[str, bytes]:
    """The files that the records in `path` become."""
    info = dataset_info(card)
    prepared.write(folder, read(card, {"train": path}), info, salt=bytes(32), at_most=ROWS)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_blocks_of_any_size_give_the_same_bytes(
    card: CardOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_text(HEADER + "".join(LINES))
    in_one = written(card(), tmp_path / "t.csv", tmp_path / "one")
    assert sum(1 for _ in read(card(), {"train": tmp_path / "t.csv"})) == 2
    small_blocks(monkeypatch)
    assert sum(1 for _ in read(card(), {"train": tmp_path / "t.csv"})) > 20
    assert written(card(), tmp_path / "t.csv", tmp_path / "many") == in_one


@pytest.mark.parametrize("cells", [None, {"trees": 2}])
def test_rows_of_many_features_are_encoded_a_few_at_a_time(
    card: CardOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cells: dict[str, int] | None
) -> None:
    """Four features a row are 16 bytes, also where cells are made instead and the features decide on its side."""
    (tmp_path / "t.csv").write_text(HEADER + "".join(LINES))
    wide = card(**({} if cells is None else {"cells": cells}))
    in_one = written(wide, tmp_path / "t.csv", tmp_path / "one")
    monkeypatch.setattr(rows, "_FEATURES_BYTES", 16 * 700, raising=False)
    monkeypatch.setattr(rows, "_MIN_ROWS", 500, raising=False)
    batches = [len(batch.labels) for batch in _batches(wide, tmp_path / "t.csv")]
    assert max(batches) == 700 and sum(batches) == ROWS
    assert written(wide, tmp_path / "t.csv", tmp_path / "many") == in_one


def _batches(card: DataCard, path: Path) -> list[RecordBatch]:
    return [chunk.records for chunk in rows.RowReader(card, {"train": path}).read()]


def test_gzip_zip_and_parquet_give_the_same_bytes(
    card: CardOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import csv
    from pyarrow import parquet as pq

    small_blocks(monkeypatch)
    content = (HEADER + "".join(LINES)).encode()
    (tmp_path / "t.csv").write_bytes(content)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(content))
    with zipfile.ZipFile(tmp_path / "t.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("other.csv", "nothing\n")
        archive.writestr("inside.csv", content)
    pq.write_table(csv.read_csv(pa.BufferReader(content)), tmp_path / "t.parquet")
    plain = written(card(), tmp_path / "t.csv", tmp_path / "plain")
    assert written(card(), tmp_path / "t.csv.gz", tmp_path / "gz") == plain
    assert written(card(member="inside.csv"), tmp_path / "t.zip", tmp_path / "zip") == plain
    assert written(card(kind="parquet"), tmp_path / "t.parquet", tmp_path / "pq") == plain


def test_a_file_is_not_read_further_than_it_is_asked_for(
    card: CardOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    (tmp_path / "t.csv").write_text(HEADER + "".join(LINES) + "31337\n")
    blocks = read(card(), {"train": tmp_path / "t.csv"})
    assert len(next(blocks).records) < 500
    with refused_as("unreadable_file", DataRefusedError, separator=",", encoding="UTF-8") as refusal:
        list(blocks)
    assert "31337" not in str(refusal.value)


def test_parquet_of_one_row_group_is_not_read_into_memory(
    table: Document, card_of: CardOf, tmp_path: Path
) -> None:
    size = 10_000
    texts = [random.Random(row).randbytes(size // 2).hex() for row in range(4000)]
    written = pa.table({"words": texts, "answer": ["no"] * len(texts)})
    parquet.write_table(written, tmp_path / "t.parquet", use_dictionary=False, compression="none")
    del written
    reader = {"kind": "texts", "format": "parquet", "columns": ["words"], "label": "answer"}
    card = card_of(table | {"reader": reader})
    assert isinstance(card.reader, Rows)
    before, rows_read, peak = pa.total_allocated_bytes(), 0, 0
    for some in rows.tables("train", tmp_path / "t.parquet", card.reader, card.label_type):
        rows_read += some.num_rows
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert rows_read == len(texts)
    assert peak < size * len(texts) * 0.6


def test_a_file_that_arrow_may_still_read_ahead_from_is_not_closed(
    card: CardOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would read from whatever file gets the descriptor next, which then lacks these rows."""
    (tmp_path / "t.csv").write_text(HEADER + "".join(LINES))
    streams, open_stream = list[pa.NativeFile](), pa.input_stream

    def opened(*args: Any, **options: Any) -> pa.NativeFile:
        streams.append(open_stream(*args, **options))
        return streams[-1]

    monkeypatch.setattr(pa, "input_stream", opened)
    blocks = read(card(), {"train": tmp_path / "t.csv"})
    next(blocks)
    del blocks
    assert len(streams) == 2  # of the header, and of the rows
    assert not any(stream.closed for stream in streams)


def test_a_fault_far_down_leaves_the_prepared_folder_as_it_was(
    card: CardOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    (tmp_path / "t.csv").write_text(HEADER + "".join(LINES))
    before = written(card(), tmp_path / "t.csv", tmp_path / "out" / "p")
    one_too_many = "1,Rome,no,1\n"
    for fault in ("x,Rome,no,1\n", "1,Rome,perhaps,1\n", one_too_many, "1,Rome\n"):
        (tmp_path / "t.csv").write_text(HEADER + "".join(LINES) + fault)
        with pytest.raises(DataRefusedError):
            written(card(), tmp_path / "t.csv", tmp_path / "out" / "p")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out" / "p").iterdir()} == before
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["p"]


def test_an_undeclared_column_may_change_its_looks_in_a_later_block(
    card: CardOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    (tmp_path / "t.csv").write_text(HEADER + "".join(LINES[:-1]) + "1,Rome,no,no number at all\n")
    assert sum(len(block.records) for block in read(card(), {"train": tmp_path / "t.csv"})) == ROWS


def test_a_stray_quote_stays_within_its_record_or_is_refused_in_any_block(
    card: CardOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    lines = [*LINES[:3000], '1,"Rome,no,1\n', *LINES[3001:4000], '1,Rome",no,1\n', *LINES[4001:]]
    (tmp_path / "t.csv").write_text(HEADER + "".join(lines))
    unquoted = read(card(quotes=False), {"train": tmp_path / "t.csv"})
    assert sum(len(block.records) for block in unquoted) == ROWS
    with refused_as("unreadable_file", DataRefusedError):
        list(read(card(quotes=True), {"train": tmp_path / "t.csv"}))


def test_a_file_in_another_encoding_is_refused_and_nothing_else_is_printed(
    card: CardOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", printed.append)
    (tmp_path / "t.csv").write_bytes((HEADER + '1,Köln,no,"a, b"\n' + "".join(LINES)).encode("utf-16"))
    with refused_as("unreadable_file", DataRefusedError, separator=",", encoding="UTF-8"):
        list(read(card(), {"train": tmp_path / "t.csv"}))
    assert not printed


@pytest.mark.parametrize("name", ["absent.csv", "no zip"])
def test_an_archive_without_its_table_is_refused(card: CardOf, tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        archive.writestr("inside.csv", HEADER + "".join(LINES))
    if name == "no zip":
        (tmp_path / "t.zip").write_bytes(b"PK, but nothing like it")
    archive = f"it must be a zip archive that holds {name!r}, where "
    with refused_as("unreadable_file", DataRefusedError, path=tmp_path / "t.zip", archive=archive):
        list(read(card(member=name), {"train": tmp_path / "t.zip"}))


def test_a_gzip_file_that_is_cut_short_is_refused(card: CardOf, tmp_path: Path) -> None:
    packed = gzip.compress((HEADER + "".join(LINES)).encode())
    (tmp_path / "t.csv.gz").write_bytes(packed[: len(packed) // 2])
    with refused_as("unreadable_file", DataRefusedError, path=tmp_path / "t.csv.gz"):
        list(read(card(), {"train": tmp_path / "t.csv.gz"}))


@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 2)])
@pytest.mark.parametrize("sizes", [(), (0,), (7,), (1, 0, 4), (100, 900)])
def test_an_array_that_grew_is_the_file_that_numpy_saves(
    tmp_path: Path, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    rows = np.arange(sum(sizes) * int(np.prod(shape)), dtype=np.float32).reshape(-1, *shape)[: sum(sizes)]
    with _Rows(tmp_path / "grown.npy", np.float32, shape) as grown:
        for part in np.split(rows, np.cumsum(sizes)[:-1]) if sizes else ():
            grown.append(part)
    np.save(tmp_path / "saved.npy", rows)
    assert (tmp_path / "grown.npy").read_bytes() == (tmp_path / "saved.npy").read_bytes()
    assert grown.count == sum(sizes)


def test_rows_of_another_shape_are_not_appended(card: CardOf, tmp_path: Path) -> None:
    narrow = RecordBatch(np.zeros((2, 3), np.float32), np.zeros(2, np.int64))
    info = dataset_info(card())
    with pytest.raises(ValueError, match="shape"):
        prepared.write(tmp_path / "p", [RecordChunk("train", narrow)], info, salt=bytes(32), at_most=None)
    assert not (tmp_path / "p").exists()
