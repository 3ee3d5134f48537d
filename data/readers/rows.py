"""Rows with named columns for texts and images, from CSV, JSON lines, Parquet and the Arrow files of Hugging Face.

Rows are independent: CSV and JSON are split into lines before a line is parsed. An invalid line becomes a row without
content and with the first class, the lowest number or no label. So no record affects the next one or stops the rest.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from data.card import DataRefusedError
from data.formats import Rows
from data.readers import encoding
from data.targets import Classes, Known, Number, Tags

_ROWS = 1024
_LONGEST_LINE = 2**26
csv.field_size_limit(_LONGEST_LINE)  # a long text exceeds Python's default, 2**17
_Row: TypeAlias = Mapping[str, Any]
_BROKEN = (pa.ArrowException, OSError, EOFError, zlib.error, ValueError, KeyError, TypeError)


def tables(path: Path, declared: Rows, known: Known, *, more: Sequence[str] = ()) -> Iterator[pa.Table]:
    """The declared columns of a file, in portions; label columns are left out if the file does not have them.

    more: names of further columns, such as the person's. Raises DataRefusedError if the file is incomplete or lacks a
    column. JSON lines have no common columns: a key that an object lacks is a missing value.
    """
    own = [label.name for label in declared.label_columns]
    wanted = (*declared.content, *own, *more)
    try:
        for table in _formats[declared.format](path, wanted, declared, known):
            check_columns(table, [name for name in wanted if name not in own], path)
            yield table
    except _BROKEN as error:
        if isinstance(error, DataRefusedError):
            raise
        raise DataRefusedError(
            f"{path} cannot be read as {_WORDS[declared.format]}; correct the file or its card."
        ) from None


def check_columns(table: pa.Table, names: Iterable[str], where: object) -> None:
    """Raise DataRefusedError unless the table has one column of each name. where: name of its source in messages."""
    for name in names:
        if table.column_names.count(name) != 1:
            raise _missing(name, where)


def _missing(column: str, where: object) -> DataRefusedError:
    return DataRefusedError(f"{where} must have one column {column!r}; correct the file or its card.")


_WORDS = {
    "csv": "lines with a header in UTF-8",
    "jsonl": "lines",
    "parquet": "a whole Parquet file",
    "datasets": "a split that save_to_disk of Hugging Face wrote, a folder with state.json",
}


def column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column of the table; raises DataRefusedError if there is no column of that name, or two."""
    check_columns(table, [name], "the table")
    return table[name]


def labels(table: pa.Table, declared: Rows, known: Known, where: str) -> NDArray[Any]:
    """The result of `encoding.labels` for the rows; raises DataRefusedError for an unknown label."""
    check_columns(table, (label.name for label in declared.label_columns), where)
    return encoding.labels(table, declared.label_columns, known, ("",), where)


def _csv(path: Path, wanted: Sequence[str], declared: Rows, known: Known) -> Iterator[pa.Table]:
    """Read CSV. Fields stay bytes, even if not UTF-8: lines are read as Latin-1, in which every byte is a character."""
    lines = _lines(path)
    first = next(lines, None) or b""
    header = _fields(first.removeprefix(b"\xef\xbb\xbf"), declared.separator)
    names = [name.decode().strip() for name in header or ()]
    for name in wanted:
        if names.count(name) > 1:
            raise _missing(name, path)
    places = {name: names.index(name) for name in wanted if name in names}

    def row(line: bytes | None) -> _Row:
        fields = None if line is None else _fields(line, declared.separator)
        if fields is None or len(fields) != len(names):
            return _stand_in(declared, known)
        return {name: fields[place] for name, place in places.items()}

    yield from _tables((row(line) for line in lines if line is None or line.strip()), tuple(places))


def _fields(line: bytes, separator: str) -> list[bytes] | None:
    try:
        (fields,) = csv.reader([line.decode("latin-1")], delimiter=separator)
        return [field.encode("latin-1") for field in fields]
    except (csv.Error, ValueError):
        return None


def _jsonl(path: Path, wanted: Sequence[str], declared: Rows, known: Known) -> Iterator[pa.Table]:
    def row(line: bytes | None) -> _Row:
        try:
            found = json.loads(line or b"")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            return _stand_in(declared, known)
        return {name: _as_bytes(found.get(name), lists=isinstance(known, Tags)) for name in wanted}

    yield from _tables((row(line) for line in _lines(path) if line is None or line.strip()), wanted)


def _as_bytes(value: object, *, lists: bool) -> bytes | None:
    if lists and isinstance(value, list):
        return json.dumps(value).encode()
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")  # half a surrogate pair is then not UTF-8
    if isinstance(value, bool):
        return b"true" if value else b"false"  # as in Parquet
    return str(value).encode() if isinstance(value, int | float) else None


def _stand_in(declared: Rows, known: Known) -> _Row:
    """A row of the first class, as the file would write it, of the lowest number, or without a label."""
    if isinstance(known, Number):
        return {label.name: repr(known.bounds[0]).encode() for label in declared.label_columns}
    if isinstance(known, Classes):
        written = declared.spellings.get(known.classes[0], known.classes)[0].encode()
        return {label.name: written for label in declared.label_columns}
    return {}


def _lines(path: Path) -> Iterator[bytes | None]:
    """The lines without line ends; None for a line that is too long for memory."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if line.endswith(b"\n") or len(line) < _LONGEST_LINE:
                yield line.rstrip(b"\r\n")
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(_LONGEST_LINE)
            yield None


def _tables(rows: Iterator[_Row], names: Sequence[str]) -> Iterator[pa.Table]:
    """Tables of the rows; at least one, so that missing columns are noticed in a file without rows."""
    kinds = pa.schema([(name, pa.large_binary()) for name in names])
    yield kinds.empty_table()
    while some := list(islice(rows, _ROWS)):
        yield pa.Table.from_pylist(some, kinds)


def _parquet(path: Path, wanted: Sequence[str], _: Rows, __: Known) -> Iterator[pa.Table]:
    return parquet_tables(path, wanted, _ROWS)


def parquet_tables(path: Path, wanted: Sequence[str], most: int) -> Iterator[pa.Table]:
    """The wanted columns that a Parquet file has, in tables of at most `most` rows.

    The first has no rows, so that missing columns are noticed in a file without rows. Views, as Polars writes texts and
    bytes, become what they view, since Arrow cannot filter them.
    """
    plain = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    with parquet.ParquetFile(path) as file:
        yield file.schema_arrow.empty_table()
        for batch in file.iter_batches(most, columns=list(wanted)):
            fields = [field.with_type(plain.get(field.type, field.type)) for field in batch.schema]
            yield pa.Table.from_batches([batch]).cast(pa.schema(fields))


def _datasets(path: Path, wanted: Sequence[str], _: Rows, __: Known) -> Iterator[pa.Table]:
    for batch in arrow(path):
        yield pa.Table.from_batches([batch]).select([name for name in wanted if name in batch.schema.names])


def arrow(path: Path) -> Iterator[pa.RecordBatch]:
    """The rows of one split that `save_to_disk` wrote; raises DataRefusedError if it is not one, or incomplete."""
    if (path / "dataset_dict.json").is_file():
        raise DataRefusedError(
            f"{path} holds several splits; give one of its folders, such as {path.name}/train."
        )
    try:
        listed = json.loads((path / "state.json").read_text(encoding="utf-8"))["_data_files"]
        for file in listed:
            with (
                pa.memory_map(str(path / Path(file["filename"]).name)) as mapped,
                pa.ipc.open_stream(mapped) as found,
            ):
                for batch in found:
                    for start in range(0, max(1, batch.num_rows), _ROWS):
                        yield batch.slice(start, _ROWS)
    except _BROKEN:
        raise DataRefusedError(
            f"{path} cannot be read as {_WORDS['datasets']}; correct the folder or its card."
        ) from None


_formats = {"csv": _csv, "jsonl": _jsonl, "parquet": _parquet, "datasets": _datasets}
