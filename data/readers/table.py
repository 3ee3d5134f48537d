"""Tables from CSV (text with one record per line) and Parquet (typed columns).

Each record is encoded independently, by the bounds, categories and classes that the card declares.
"""

import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv

from data.card import DataRefusedError
from data.formats import Csv, Datasets, Label, Parquet, SkipLines, Table
from data.readers import encoding
from data.readers.records import Part, Records
from data.readers.rows import arrow, check_columns, parquet_tables
from data.targets import Known

_BLOCK_BYTES = 4 * 2**20
_ROWS = 65536
_BROKEN = (pa.ArrowException, OSError, zipfile.BadZipFile, zlib.error, KeyError, UnicodeDecodeError)


def read_text(path: Path, declared: Csv, *, skip_lines: int, names_rows: bool = False) -> Iterator[pa.Table]:
    """The file's columns as text, some megabytes at a time; gzip is recognised by the file's suffix.

    Names of columns are trimmed, as values are. Raises DataRefusedError if a line has too many or too few fields, or is
    not UTF-8. names_rows: with the number of that line, for public records. An empty file has no rows.
    """
    names, wrong = list(declared.in_the_file), list[int]()

    def note(row: csv.InvalidRow) -> str:
        wrong.append(row.number)
        return "error"

    try:
        if declared.header:
            with _opened(path, declared, skip_lines, {}, note) as first:
                names = first.schema.names
            if len(names) == 1 < len(declared.content) and names[0].strip() not in declared.in_the_file:
                raise DataRefusedError(_what_is_wrong(path, declared))
        with _opened(path, declared, skip_lines, dict.fromkeys(names, pa.string()), note) as batches:
            for batch in batches:
                table = pa.Table.from_batches([batch])
                if declared.quotes and any(_holds_a_line_break(column) for column in table.columns):
                    raise DataRefusedError(
                        f"{path} has a field with a line break in quotes, which may be several records read as one; "
                        "remove the line break or the stray quote."
                    )
                yield table.rename_columns([name.strip() for name in names])
    except _BROKEN as error:
        if "Empty CSV file" not in str(error):
            said = _what_is_wrong(path, declared)
            said += f" See row {wrong[0]}, not counting empty lines." if names_rows and wrong else ""
            raise DataRefusedError(said) from None  # the cause quotes the line


@contextmanager
def _opened(
    path: Path,
    declared: Csv,
    skip_lines: int,
    types: dict[str, pa.DataType],
    note: Callable[[csv.InvalidRow], str],
) -> Iterator[csv.CSVStreamingReader]:
    with ExitStack() as stack:
        if declared.member is None and zipfile.is_zipfile(path):
            raise DataRefusedError(
                f"{path} is a zip archive; name the CSV file in it as reader.member of the card, or save a spreadsheet"
                " as CSV."
            )
        if declared.member is None:
            content: Any = stack.enter_context(pa.input_stream(str(path), compression="detect"))
        else:
            content = stack.enter_context(stack.enter_context(zipfile.ZipFile(path)).open(declared.member))
        reader = csv.open_csv(
            content,
            read_options=csv.ReadOptions(
                skip_rows=skip_lines,
                column_names=None if declared.header else list(declared.in_the_file),
                block_size=_BLOCK_BYTES,
                use_threads=False,
            ),
            parse_options=csv.ParseOptions(
                delimiter=declared.separator,
                quote_char='"' if declared.quotes else False,
                newlines_in_values=declared.quotes,
                invalid_row_handler=note,
            ),
            convert_options=csv.ConvertOptions(column_types=types),
        )
        yield stack.enter_context(reader)


def _what_is_wrong(path: Path, declared: Csv) -> str:
    archive = f"it must be a zip archive that holds {declared.member!r}, where " if declared.member else ""
    return (
        f"{path} cannot be read as declared: {archive}every line needs the same number of fields, separated by "
        f"{declared.separator!r}, in UTF-8; correct the file, or reader.separator in its card."
    )


def _holds_a_line_break(column: pa.ChunkedArray) -> bool:
    return bool(pc.any(pc.match_substring_regex(column.cast(pa.string()), "[\\r\\n]")).as_py())


def read_parquet(path: Path, declared: Parquet) -> Iterator[pa.Table]:
    """The declared columns that the file has, in portions.

    Raises DataRefusedError if it is not a complete Parquet file.
    """
    try:
        yield from parquet_tables(path, declared.in_the_file, _ROWS)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        raise DataRefusedError(f"{path} is not a whole Parquet file; correct it or its card.") from None


def tables(part: Part, path: Path, declared: Table, *, names_rows: bool = False) -> Iterator[pa.Table]:
    """The rows of a file, in portions; raises DataRefusedError if the file does not have the declared format."""
    if isinstance(declared, Datasets):
        return (pa.Table.from_batches([some]) for some in arrow(path))
    if path.is_dir():
        raise DataRefusedError(
            f"{path} is a folder, and a table is one file; join its files, or let each be a block of the population."
        )
    if isinstance(declared, Parquet):
        return read_parquet(path, declared)
    assert isinstance(declared, Csv)
    skip_lines = declared.skip_lines.test if part == "test" else declared.skip_lines.train
    return read_text(path, declared, skip_lines=skip_lines, names_rows=names_rows)


def tables_in(path: Path, declared: Table) -> Iterator[pa.Table]:
    """The rows of a file of unlabelled records: Parquet by its suffix, otherwise text as declared, or with a header
    line.

    The label's column may be missing. Raises DataRefusedError as the readers do.
    """
    if path.is_dir():
        yield from (pa.Table.from_batches([some]) for some in arrow(path))
        return
    if path.suffix == ".parquet":
        yield from read_parquet(
            path, Parquet(kind="parquet", columns=declared.columns, missing=declared.missing)
        )
        return
    text = (
        declared
        if isinstance(declared, Csv)
        else Csv(kind="csv", columns=declared.columns, missing=declared.missing)
    )
    member = text.member if zipfile.is_zipfile(path) else None
    plain = text.model_copy(update={"member": member, "skip_lines": SkipLines()})
    try:
        yield from read_text(path, plain, skip_lines=0)
    except DataRefusedError:
        if plain.header:
            raise
        unlabelled = tuple(column for column in declared.columns if not isinstance(column, Label))
        yield from read_text(path, plain.model_copy(update={"columns": unlabelled}), skip_lines=0)


def features(table: pa.Table, declared: Table, path: str) -> NDArray[np.float32]:
    """The features of some rows, [n, width]; the label is not read. Raises DataRefusedError as `records` does."""
    check_columns(table, declared.content, path)
    made = np.zeros((table.num_rows, declared.width), np.float32)
    start = 0
    for column in declared.columns:
        encoding.fill(made[:, start : start + column.width], column, table, declared.missing, path)
        start += column.width
    return made


def records(table: pa.Table, declared: Table, known: Known, path: str) -> Records:
    """The records of some rows. path: name of their source in messages. Raises DataRefusedError for an invalid
    value.
    """
    check_columns(table, declared.in_the_file, path)
    made = features(table, declared, path)
    return Records(made, encoding.labels(table, declared.label_columns, known, declared.missing, path))
