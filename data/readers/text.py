"""CSV and its kin: text with one record a line."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from data.errors import DataRefused
from data.formats import Csv


def read(path: Path, declared: Csv, *, skip_lines: int) -> pa.Table:
    """The file's columns as text, whole; gzip is recognised by the file's ending.

    Raises DataRefused when a line has too many or too few fields, or is not UTF-8; an empty file has no rows.
    """
    names = [column.name for column in declared.columns]
    try:
        table = csv.read_csv(
            path,
            read_options=csv.ReadOptions(
                skip_rows=skip_lines, column_names=None if declared.header else names
            ),
            parse_options=csv.ParseOptions(
                delimiter=declared.separator,
                quote_char='"' if declared.quotes else False,
                newlines_in_values=declared.quotes,
            ),
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
    except (pa.ArrowException, OSError) as error:
        if "Empty CSV file" in str(error):
            return pa.table({name: pa.array([], pa.string()) for name in names})
        raise DataRefused(
            f"{path} cannot be read as declared: every line needs the same number of fields, separated by "
            f"{declared.separator!r}, in UTF-8; correct the file or its card."
        ) from None  # the cause quotes the line
    if declared.quotes and any(_holds_a_line_break(column) for column in table.columns):
        raise DataRefused(
            f"{path} has a field with a line break in quotes, which may be several records read as one; remove"
            " the line break or the stray quote."
        )
    return table


def _holds_a_line_break(column: pa.ChunkedArray) -> bool:
    return bool(pc.any(pc.match_substring_regex(column.cast(pa.string()), "[\\r\\n]")).as_py())
