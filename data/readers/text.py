"""CSV and its kin: text with one record a line."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from data.errors import DataRefused
from data.formats import Csv

_BLOCK_BYTES = 4 * 2**20


def read(path: Path, declared: Csv, *, skip_lines: int) -> Iterator[pa.Table]:
    """The file's columns as text, some megabytes at a time; gzip is recognised by the file's ending.

    Raises DataRefused when a line has too many or too few fields, or is not UTF-8; an empty file has no rows.
    """
    try:
        for batch in _batches(path, declared, skip_lines):
            table = pa.Table.from_batches([batch])
            if declared.quotes and any(_holds_a_line_break(column) for column in table.columns):
                raise DataRefused(
                    f"{path} has a field with a line break in quotes, which may be several records read as one; "
                    "remove the line break or the stray quote."
                )
            yield table
    except (pa.ArrowException, OSError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        if "Empty CSV file" not in str(error):
            raise DataRefused(_what_is_wrong(path, declared)) from None  # the cause quotes the line


def _batches(path: Path, declared: Csv, skip_lines: int) -> Iterator[pa.RecordBatch]:
    names = list(declared.in_the_file)
    if declared.header:
        with ExitStack() as stack:
            names = _open(stack, path, declared, skip_lines, {}).schema.names
    with ExitStack() as stack:
        yield from _open(stack, path, declared, skip_lines, dict.fromkeys(names, pa.string()))


def _open(
    stack: ExitStack, path: Path, declared: Csv, skip_lines: int, types: dict[str, pa.DataType]
) -> csv.CSVStreamingReader:
    names = None if declared.header else list(declared.in_the_file)
    return stack.enter_context(
        csv.open_csv(
            _bytes(stack, path, declared.member),
            read_options=csv.ReadOptions(
                skip_rows=skip_lines, column_names=names, block_size=_BLOCK_BYTES, use_threads=False
            ),
            parse_options=csv.ParseOptions(
                delimiter=declared.separator,
                quote_char='"' if declared.quotes else False,
                newlines_in_values=declared.quotes,
            ),
            convert_options=csv.ConvertOptions(column_types=types),
        )
    )


def _bytes(stack: ExitStack, path: Path, member: str | None) -> Any:
    if member is None:
        return stack.enter_context(pa.input_stream(str(path), compression="detect"))
    archive = stack.enter_context(zipfile.ZipFile(path))
    opened: IO[bytes] = stack.enter_context(archive.open(member))
    return opened


def _what_is_wrong(path: Path, declared: Csv) -> str:
    archive = f"it must be a zip archive that holds {declared.member!r}, where " if declared.member else ""
    return (
        f"{path} cannot be read as declared: {archive}every line needs the same number of fields, separated by "
        f"{declared.separator!r}, in UTF-8; correct the file or its card."
    )


def _holds_a_line_break(column: pa.ChunkedArray) -> bool:
    return bool(pc.any(pc.match_substring_regex(column.cast(pa.string()), "[\\r\\n]")).as_py())
