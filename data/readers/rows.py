"""Rows with named columns, from CSV, JSON lines, Parquet and the Arrow files of Hugging Face, as records.

A table is read as it is declared: a line with too many fields is refused. Rows of texts and images are independent: CSV
and JSON are split into lines before a line is parsed, and an invalid line becomes a row without content and with the
first class, the lowest number or no label. So no record affects the next one or stops the rest.
"""

import csv
import gzip
import json
import re
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b, sha256
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv as tables_of_text
from pyarrow import parquet

from data.card import DataCard, DataRefusedError
from data.formats import (
    OF_ROWS,
    UTF_8,
    Binned,
    Csv,
    Datasets,
    Ignored,
    ImageTable,
    Label,
    Numeric,
    OfRows,
    Parquet,
    Rows,
    SkipLines,
    Table,
    Texts,
)
from data.readers import encoding, images, texts
from data.readers.encoding import check_columns, in_one_spelling
from data.readers.records import PARTS, Features, RecordBatch, RecordChunk, SplitPart
from data.targets import Classes, LabelType, Number, Tags

BLOCK_BYTES = 4 * 2**20
TABLE_ROWS, _ROWS = 65536, 1024
"""Rows at a time, of a table and of texts or images."""
_FEATURES_BYTES, _MIN_ROWS = 2**26, 4096
"""What the features of the rows that are encoded at a time take, unless these are fewer rows."""
_PARQUET_BUFFER = 2**16
"""Bytes of a column that are read ahead."""
LONGEST_LINE = 2**26
csv.field_size_limit(LONGEST_LINE)  # a long text exceeds Python's default, 2**17
_Row: TypeAlias = Mapping[str, Any]
_Tables: TypeAlias = Iterator[pa.Table]
_BROKEN = (
    pa.ArrowException,
    OSError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    KeyError,
    TypeError,
)
_WORDS = {
    "csv": "lines with a header in UTF-8, or in reader.encoding",
    "jsonl": "lines",
    "parquet": "a whole Parquet file",
    "datasets": "a split that save_to_disk of Hugging Face wrote, a folder with state.json",
}
SEPARATORS = (",", ";", "\t", "|")
"""Characters that usually separate the fields of a line."""
NO_TABLES = (".json", ".jsonl", ".xls", ".xlsx", ".ods")
"""Suffixes of files that would be read as CSV without any record."""
_MISSING_NAMES = frozenset((b"", b"nan", b"NaN"))
"""Names that name nobody: empty, or the spelling of a missing number."""
_DECIMAL_COMMA = r"^(\s*[+-]?\d*),(\d+(?:[eE][+-]?\d+)?\s*)$"
_POINT_IN_NUMBER = r"^\s*[+-]?[\d.]*\.\d"


@dataclass(frozen=True)
class RowReader:
    """Reads the rows of a card.

    files: files by role, including those besides the rows. key: a secret that decides which of a person's rows are
    used. as_texts: return texts unchanged, even if they could be tokens.
    """

    card: DataCard
    files: Mapping[str, Path]
    key: bytes = b""
    as_texts: bool = False

    @property
    def declared_reader(self) -> OfRows:
        """The card's reader."""
        assert isinstance(self.card.reader, OF_ROWS)
        return self.card.reader

    @property
    def _person(self) -> tuple[str, ...]:
        """The column that names the person, if the card has one."""
        return () if self.card.person is None else (self.card.person.column,)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the columns that are read, including the person's."""
        return tuple(dict.fromkeys((*self.declared_reader.in_the_file, *self._person)))

    def read(self) -> Iterator[RecordChunk]:
        """The records of the train file and, if there is one, of the test file.

        A block is a few megabytes of its file, so that memory does not grow with the file. Raises DataRefusedError,
        which names the file and the column but no value.
        """
        if "images" in self.files and not self.files["images"].is_dir():
            raise images.not_a_folder(self.files["images"])
        excluded: Mapping[SplitPart, frozenset[bytes]] = {
            "train": self.held_out_people(),
            "test": frozenset(),
        }
        for part in PARTS:
            if part in self.files:
                rows = self.select_per_person(
                    partial(self.tables, part, self.files[part]), excluded[part], part
                )
                for records in self.batches(rows, str(self.files[part]), part):
                    yield RecordChunk(part, records)

    def tables(self, part: SplitPart, path: Path) -> _Tables:
        """The rows of a file, in portions; raises DataRefusedError if the file is not as declared."""
        card = self.card
        return tables(
            part, path, self.declared_reader, card.label_type, more=self._person, names_rows=card.public
        )

    def batches(
        self, portions: Iterable[pa.Table], where: str, part: SplitPart | None
    ) -> Iterator[RecordBatch]:
        """The records of all rows of a source. where: its name in messages. part: of its file; None for a query.

        Raises DataRefusedError as `read` does; of public records it names the first row that is wrong.
        """
        names_rows = self.card.public and self.card.person is None and part is not None
        done = _lines_before(self.declared_reader, part) if part is not None else 0
        for table in in_portions(portions, self.declared_reader):
            try:
                records = self.records(table, where)
            except DataRefusedError as refusal:
                raise (self._at_first_row(table, where, done) if names_rows else None) or refusal from None
            yield records
            done += table.num_rows

    def _at_first_row(self, table: pa.Table, where: str, done: int) -> DataRefusedError | None:
        """The refusal of the first row that cannot be read, with its number; None if a column is wrong as a whole."""

        def refusal_of(rows: int) -> DataRefusedError | None:
            try:
                self.records(table.slice(0, rows), where)
            except DataRefusedError as refusal:
                return refusal
            return None

        # Rows up to and with the first wrong one.
        count = bisect_left(range(table.num_rows + 1), True, key=lambda rows: refusal_of(rows) is not None)
        refusal = refusal_of(count)
        return refusal.with_more(_see_row(done + count, self.declared_reader)) if refusal and count else None

    def records(self, table: pa.Table, where: str) -> RecordBatch:
        """The records of some rows. where: name of their source in messages. Raises DataRefusedError as `read` does."""
        declared, label_type = self.declared_reader, self.card.label_type
        if isinstance(declared, Table):
            batch = encoding.records(
                table, declared, label_type, where, has_split=self.card.split is not None
            )
        else:
            if isinstance(declared, ImageTable):
                features: Features
                features, keys = images.of_rows(
                    table, declared, self.card.input_shape, self.files.get("images")
                )
            else:
                joined, keys = texts.join_texts(
                    table, declared, label_type if isinstance(label_type, Tags) else None
                )
                features = texts.as_features(joined, declared, self._words)
            check_columns(table, (label.name for label in declared.label_columns), where)
            batch = RecordBatch(
                features, encoding.labels(table, declared.label_columns, label_type, ("",), where), keys
            )
        if self.card.person is None:
            return batch
        return replace(batch, keys=[sha256(who).digest() for who in self._who(table)])

    def held_out_people(self) -> frozenset[bytes]:
        """All people that the test file names, if the card names a person column and has such a file."""
        if self.card.person is None or "test" not in self.files:
            return frozenset()
        return frozenset(who for table in self.tables("test", self.files["test"]) for who in self._who(table))

    def select_per_person(
        self, make: Callable[[], _Tables], excluded: frozenset[bytes], part: SplitPart
    ) -> _Tables:
        """Select as many rows of each person as the card allows; of public held-out records, all rows.

        make: returns the rows, each time from the start. excluded: people of whom no row is used. The rows with the
        smallest keyed hashes are used, so the selection depends only on the person's own rows, and not on their order.
        """
        if self.card.person is None or (part == "test" and self.card.holdout == "public"):
            yield from make()
            return
        owners, ranks, usable = bytearray(), bytearray(), bytearray()
        spelled = in_one_spelling if isinstance(self.declared_reader, Table) else bytes
        for table in make():
            names = (
                *self.declared_reader.content,
                *(label.name for label in self.declared_reader.label_columns),
            )
            has_lists = isinstance(self.card.label_type, Tags)
            columns = (encoding.contents(_column(table, name), lists=has_lists) for name in names)
            for who, *row in zip(self._who(table), *columns, strict=True):
                owner = blake2b(who, key=self.key, digest_size=16).digest()
                owners += owner
                parts = [spelled(part or b"") for part in row]
                # With lengths, so that no other row has the same bytes.
                content = owner + b"".join(b"%d " % len(part) + part for part in parts)
                ranks += blake2b(content, key=self.key, digest_size=8).digest()
                usable.append(bool(who) and who not in excluded)
        taken = _first_of_each(owners, ranks, self.card.person.per_person) & np.frombuffer(usable, bool)
        start = 0
        for table in make():
            yield table.filter(pa.array(taken[start : start + table.num_rows]))
            start += table.num_rows

    def _who(self, table: pa.Table) -> list[bytes]:
        """The person that each row names; an empty name for nobody. 17.0 is 17, since files may spell it either way."""
        (column,) = (_column(table, name) for name in self._person)
        names = [in_one_spelling(who or b"") for who in encoding.contents(column)]
        return [b"" if who in self._nobody else who for who in names]

    @cached_property
    def _nobody(self) -> frozenset[bytes]:
        declared = self.declared_reader.missing if isinstance(self.declared_reader, Table) else ()
        return _MISSING_NAMES.union(in_one_spelling(spelling.encode()) for spelling in declared)

    @cached_property
    def _words(self) -> dict[str, int] | None:
        tokens = self.declared_reader.tokens if isinstance(self.declared_reader, Texts) else None
        return None if tokens is None or self.as_texts else texts.words_of(self.files, tokens)


def _first_of_each(owners: bytearray, ranks: bytearray, count: int) -> NDArray[np.bool_]:
    """Whether each row is among the first `count` of its owner by rank; bool [n]."""
    who = np.frombuffer(owners, "<u8").reshape(-1, 2)  # [n, 2], the halves of 16 bytes
    # By the last key first: by owner, then rank.
    order = np.lexsort((np.frombuffer(ranks, "<u8"), who[:, 1], who[:, 0]))
    sorted_, positions = who[order], np.arange(len(order))
    is_first = np.ones(len(order), bool)
    is_first[1:] = (sorted_[1:] != sorted_[:-1]).any(axis=1)
    begins = np.maximum.accumulate(np.where(is_first, positions, 0))  # [n], where each owner's rows begin
    taken = np.empty(len(order), bool)
    taken[order] = positions - begins < count
    return taken


def in_portions(tables: Iterable[pa.Table], declared: OfRows) -> _Tables:
    """The same rows, fewer at a time where each has many features: one for each of thousands of categories.

    Rows of a table with cells have them, too, where they decide on a record's side.
    """
    if not isinstance(declared, Table):
        yield from tables
        return
    rows = max(_MIN_ROWS, _FEATURES_BYTES // (4 * declared.width))
    for table in tables:
        yield from (table.slice(start, rows) for start in range(0, max(1, table.num_rows), rows))


def _lines_before(declared: OfRows, part: SplitPart) -> int:
    """How many lines of a file come before its first record."""
    if isinstance(declared, Csv):
        skipped = declared.skip_lines.test if part == "test" else declared.skip_lines.train
        return skipped + declared.header
    return int(isinstance(declared, Rows) and declared.format == "csv")


def _see_row(number: int, declared: OfRows) -> str:
    has_lines = isinstance(declared, Csv) or (
        isinstance(declared, Rows) and declared.format in ("csv", "jsonl")
    )
    return f"See row {number}{', not counting empty lines' if has_lines else ''}."


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    check_columns(table, [name], "the table")
    return table[name]


def tables(
    part: SplitPart,
    path: Path,
    declared: OfRows | Rows,
    label_type: LabelType,
    *,
    more: Sequence[str] = (),
    names_rows: bool = False,
) -> _Tables:
    """The rows of a file, in portions.

    Of texts and images these are the declared columns; label columns are left out if the file does not have them. JSON
    lines have no common columns: a key that an object lacks is a missing value.

    more: names of further columns, such as the person's. names_rows: a refusal may name the row that is wrong, as the
    records are public. Raises DataRefusedError if the file does not have the declared format, is incomplete or lacks a
    column.
    """
    if isinstance(declared, Rows):
        return _rows(path, declared, label_type, more)
    if isinstance(declared, Datasets):
        return (pa.Table.from_batches([batch]) for batch in _arrow(path))
    if path.is_dir():
        raise DataRefusedError(
            "{path} is a folder, and a table is one file; join its files, or let each be a block of the population.",
            code="unreadable_file",
            path=path,
        )
    if isinstance(declared, Parquet):
        return _table_of_parquet(path, declared)
    assert isinstance(declared, Csv)
    skip_lines = declared.skip_lines.test if part == "test" else declared.skip_lines.train
    table = _table_of_text(path, declared, skip_lines=skip_lines, names_rows=names_rows)
    return _with_points(table, path, declared, label_is_number=isinstance(label_type, Number))


def tables_in(path: Path, declared: Table) -> Iterator[pa.Table]:
    """The rows of a file of unlabelled records: Parquet by its suffix, otherwise text as declared, or with a header
    line, which may show another separator.

    The label's column may be missing, and so may the lines that training skips before the header. Raises
    DataRefusedError as the readers do, and for a file that is known by its suffix to be no such table.
    """
    if path.is_dir():
        yield from (pa.Table.from_batches([batch]) for batch in _arrow(path))
        return
    if path.suffix == ".parquet":
        yield from _table_of_parquet(
            path, Parquet(kind="parquet", columns=declared.columns, missing=declared.missing)
        )
        return
    if path.suffix.lower() in NO_TABLES:
        raise DataRefusedError(
            "{path} is no CSV or Parquet file; save the table as one of them.",
            code="unreadable_file",
            path=path,
        )
    text = (
        declared
        if isinstance(declared, Csv)
        else Csv(kind="csv", columns=declared.columns, missing=declared.missing)
    )
    try:
        yield from _rows_to_predict(path, text)
    except DataRefusedError as refusal:
        if refusal.fields.get("key") != "reader.separator":
            raise
        yield from _rows_to_predict(path, text.model_copy(update={"separator": refusal.fields["separator"]}))


def _rows_to_predict(path: Path, text: Csv) -> _Tables:
    """The rows of a text, with or without a label, and with or without the lines that training skips."""
    member = text.member if zipfile.is_zipfile(path) else None
    plain = text.model_copy(update={"member": member, "skip_lines": SkipLines()})
    skipped = text.skip_lines.train if plain.header else 0
    try:
        yield from _with_points(_table_of_text(path, plain, skip_lines=0), path, plain)
    except DataRefusedError:
        if plain.header and not skipped:
            raise
        unlabelled = tuple(column for column in text.columns if not isinstance(column, Label))
        plain = plain.model_copy(update={"columns": unlabelled})
        yield from _with_points(_table_of_text(path, plain, skip_lines=skipped), path, plain)


def _with_points(tables: _Tables, path: Path, declared: Csv, *, label_is_number: bool = False) -> _Tables:
    """The tables with a point in numbers that have a decimal comma, where the card declares commas.

    So, too, in columns that name a person. Raises DataRefusedError for a number with a point, which could be one for
    thousands.
    """
    kinds = (Numeric, Binned, Label) if label_is_number else (Numeric, Binned)
    numbers = {column.name for column in declared.columns if isinstance(column, kinds)}
    changed = numbers | {column.name for column in declared.columns if isinstance(column, Ignored)}
    for table in tables:
        for index, name in enumerate(table.column_names if declared.decimal == "," else ()):
            texts = table.column(index)
            if name in numbers and pc.any(pc.match_substring_regex(texts, _POINT_IN_NUMBER)).as_py():
                raise DataRefusedError(
                    "{path}, column {column!r}: a number has a point, and `decimal` of the card is a comma; take points"
                    " out that mark thousands, or correct `decimal`.",
                    code="unlike_card",
                    path=path,
                    column=name,
                    key="reader.decimal",
                )
            if name in changed:
                with_points = pc.replace_substring_regex(texts, _DECIMAL_COMMA, r"\1.\2")
                table = table.set_column(index, name, with_points)
        yield table


def _table_of_text(
    path: Path, declared: Csv, *, skip_lines: int, names_rows: bool = False
) -> Iterator[pa.Table]:
    """The file's columns as text, some megabytes at a time, or as many as its longest line needs; see `_portions`.

    Raises DataRefusedError for a line beyond `LONGEST_LINE`, which Arrow cannot read either.
    """
    done = 0
    for size in (BLOCK_BYTES, LONGEST_LINE):
        seen = 0
        try:
            for table in _portions(path, declared, size, skip_lines=skip_lines, names_rows=names_rows):
                seen += table.num_rows
                if seen > done:  # what was read before it met a longer line is passed on once
                    yield table.slice(max(0, table.num_rows - (seen - done)))
                    done = seen
            return
        except _LineTooLongError:
            continue
    raise DataRefusedError(
        "{path} has a line of more than {largest} MB, or a quote that is never closed; take that field"
        " or that quote out of the file, even if its column is ignored.",
        code="unreadable_file",
        path=path,
        largest=LONGEST_LINE // 2**20,
    )


class _LineTooLongError(Exception):
    """A line is longer than a portion."""


def _portions(
    path: Path, declared: Csv, size: int, *, skip_lines: int, names_rows: bool
) -> Iterator[pa.Table]:
    """The file's columns as text, `size` bytes at a time; gzip is recognised by the file's suffix.

    Names of columns are trimmed, as values are. In an encoding other than UTF-8, Arrow is given the header as a row, as
    it could not read it. Raises DataRefusedError if a line has too many or too few fields, or is not UTF-8 though it is
    declared to be. names_rows: with the number of that line, for public records. An empty file has no rows.

    Arrow reads ahead in a thread of its own. It is given no Python function to call: releasing one from that thread
    while Python shuts down would abort the process.
    """
    names = list(declared.in_the_file)
    is_utf_8 = declared.encoding == UTF_8
    has_header_row = declared.header and not is_utf_8
    kind = pa.string() if is_utf_8 else pa.binary()
    try:
        if declared.header:
            with _open_csv(path, declared, skip_lines, {}, size) as first:
                names = first.schema.names
        if declared.header and is_utf_8:
            _check_separator(names, declared, path)
        with _open_csv(path, declared, skip_lines, dict.fromkeys(names, kind), size) as batches:
            for batch in batches:
                table = pa.Table.from_batches([batch])
                if not is_utf_8:
                    table = pa.table(
                        [_decode_bytes(part, declared.encoding) for part in table.columns], names
                    )
                if has_header_row and table.num_rows:
                    names = [part[0].as_py() for part in table.columns]
                    _check_separator(names, declared, path)
                    table, has_header_row = table.slice(1), False
                if declared.quotes and any(_holds_a_line_break(column) for column in table.columns):
                    raise DataRefusedError(
                        "{path} has a field with a line break in quotes, which may be several records read as one; "
                        "remove the line break or the stray quote, or write the table as Parquet.",
                        code="unreadable_file",
                        path=path,
                    )
                yield table.rename_columns([name.strip() for name in names])
    except (
        pa.ArrowException,
        OSError,
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        UnicodeDecodeError,
    ) as error:
        if "straddling object" in str(error):
            raise _LineTooLongError from None
        if "Empty CSV file" not in str(error):
            row = re.search(r"Row #(\d+)", str(error))
            wrong = _what_is_wrong(path, declared)
            if names_rows and row:
                wrong = wrong.with_more(_see_row(int(row[1]), declared))
            elif not names_rows and declared.member is None and path.suffix != ".gz":
                wrong = wrong.with_more(
                    "`epsilonflow data check` tells the owner of the data which line it is."
                )
            raise wrong from None  # the cause quotes the line


@contextmanager
def _open_csv(
    path: Path,
    declared: Csv,
    skip_lines: int,
    types: dict[str, pa.DataType],
    size: int,
) -> Iterator[tables_of_text.CSVStreamingReader]:
    with ExitStack() as stack:
        if declared.member is None and zipfile.is_zipfile(path):
            raise DataRefusedError(
                "{path} is a zip archive; name the CSV file in it as reader.member of the card, or save a spreadsheet"
                " as CSV.",
                code="unlike_card",
                path=path,
                key="reader.member",
            )
        if declared.member is None:
            # Not closed here: Arrow's thread may be reading ahead from it, and would go on with the next file that
            # gets its descriptor. Arrow closes it with the last reference.
            content: Any = pa.input_stream(str(path), compression="detect")
        else:
            content = stack.enter_context(stack.enter_context(zipfile.ZipFile(path)).open(declared.member))
        reader = tables_of_text.open_csv(
            content,
            read_options=tables_of_text.ReadOptions(
                skip_rows=skip_lines,
                column_names=None if declared.header else list(declared.in_the_file),
                autogenerate_column_names=declared.header and declared.encoding != UTF_8,
                block_size=size,
                use_threads=False,
            ),
            parse_options=tables_of_text.ParseOptions(
                delimiter=declared.separator,
                quote_char='"' if declared.quotes else False,
                newlines_in_values=declared.quotes,
            ),
            convert_options=tables_of_text.ConvertOptions(column_types=types),
        )
        yield stack.enter_context(reader)


def _decode_bytes(values: pa.ChunkedArray, encoding: str) -> pa.ChunkedArray:
    """Bytes as text; bytes that the encoding lacks become the replacement character."""
    try:
        plain = pc.cast(values, pa.string())
        if pc.all(pc.string_is_ascii(plain)).as_py():
            return plain
    except pa.ArrowException:  # not UTF-8, so not ASCII either
        pass
    return pa.chunked_array(
        [[value.decode(encoding, "replace") for value in values.to_pylist()]], pa.string()
    )


def _what_is_wrong(path: Path, declared: Csv) -> DataRefusedError:
    archive = f"it must be a zip archive that holds {declared.member!r}, where " if declared.member else ""
    return DataRefusedError(
        "{path} cannot be read as declared: {archive}every line needs the same number of fields, separated by "
        "{separator!r}, in {encoding}; correct the file, or reader.separator and reader.encoding in its card.",
        code="unreadable_file",
        path=path,
        archive=archive,
        separator=declared.separator,
        encoding=declared.encoding.upper(),
    )


def _other_separator(names: Sequence[str], separator: str, wanted: Iterable[str]) -> str | None:
    """The character that separates more of the wanted columns in a header than the declared one; None if none does."""
    parts_of = {
        mark: {part.strip().strip('"') for part in separator.join(names).split(mark)}
        for mark in (*SEPARATORS, " ")
    }
    matches = {mark: len(parts & set(wanted)) for mark, parts in parts_of.items()}
    best = max(parts_of, key=matches.__getitem__)
    return best if matches[best] > len({name.strip() for name in names} & set(wanted)) else None


def _check_separator(names: Sequence[str], declared: Csv, path: Path) -> None:
    """Raises DataRefusedError if another character separates the header."""
    if (separator := _other_separator(names, declared.separator, declared.in_the_file)) is not None:
        raise _separator_error(separator, declared.separator, path)


def _separator_error(separator: str, declared: str, path: Path) -> DataRefusedError:
    return DataRefusedError(
        "the header of {path} is separated by {separator!r}, and its card declares {declared!r}; set"
        " `separator: {wanted}` under `reader` in the card.",
        code="unlike_card",
        path=path,
        separator=separator,
        declared=declared,
        wanted=json.dumps(separator),
        key="reader.separator",
    )


def _holds_a_line_break(column: pa.ChunkedArray) -> bool:
    """Whether a text has a byte that ends lines; found in all bytes at once, in a fiftieth of an expression's time."""
    for chunk in column.cast(pa.string()).chunks:
        _, offsets, content = chunk.buffers()
        if content is None:
            continue
        # Arrow's offsets: value i is content[ends[i] : ends[i + 1]]
        ends = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        characters = np.frombuffer(content, np.uint8)[ends[0] : ends[-1]]
        if ((characters == ord("\n")) | (characters == ord("\r"))).any():
            return True
    return False


def _table_of_parquet(path: Path, declared: Parquet) -> Iterator[pa.Table]:
    """The declared columns that the file has, in portions.

    Raises DataRefusedError if it is not a complete Parquet file.
    """
    try:
        yield from _parquet(path, declared.in_the_file, TABLE_ROWS)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        raise DataRefusedError(
            "{path} is not a whole Parquet file; correct it or its card.", code="unreadable_file", path=path
        ) from None


def _rows(path: Path, declared: Rows, label_type: LabelType, more: Sequence[str]) -> _Tables:
    label_names = [label.name for label in declared.label_columns]
    wanted = (*declared.content, *label_names, *more)
    try:
        if declared.format == "parquet":
            tables = _parquet(path, wanted, _ROWS)
        elif declared.format == "datasets":
            batches = (pa.Table.from_batches([batch]) for batch in _arrow(path))
            tables = (
                batch.select([name for name in wanted if name in batch.schema.names]) for batch in batches
            )
        else:
            tables = (_csv if declared.format == "csv" else _jsonl)(path, wanted, declared, label_type)
        for table in tables:
            check_columns(table, [name for name in wanted if name not in label_names], path)
            yield table
    except DataRefusedError:
        raise
    except _BROKEN:
        raise DataRefusedError(
            "{path} cannot be read as {expected}; correct the file or its card.",
            code="unreadable_file",
            path=path,
            expected=_WORDS[declared.format],
        ) from None


def _csv(path: Path, wanted: Sequence[str], declared: Rows, label_type: LabelType) -> _Tables:
    """Read CSV. Fields stay bytes, even if not UTF-8: lines are read as Latin-1, in which every byte is a character."""
    lines = _lines(path)
    first = next(lines, None) or b""
    header = _fields(first.removeprefix(b"\xef\xbb\xbf"), declared.separator)
    names = [name.decode(declared.encoding).strip() for name in header or ()]
    if (separator := _other_separator(names, declared.separator, wanted)) is not None:
        raise _separator_error(separator, declared.separator, path)
    for name in wanted:
        if names.count(name) > 1:
            raise encoding.not_one_column(name, names, path)
    index_of = {name: names.index(name) for name in wanted if name in names}

    def row(line: bytes | None) -> _Row:
        fields = None if line is None else _fields(line, declared.separator)
        if fields is None or len(fields) != len(names):
            return _stand_in(declared, label_type)
        return {name: _in_utf_8(fields[index], declared.encoding) for name, index in index_of.items()}

    yield from _in_tables((row(line) for line in lines if line is None or line.strip()), tuple(index_of))


def _in_utf_8(field: bytes, encoding: str) -> bytes:
    return field if encoding == UTF_8 else field.decode(encoding, "replace").encode()


def _fields(line: bytes, separator: str) -> list[bytes] | None:
    try:
        (fields,) = csv.reader([line.decode("latin-1")], delimiter=separator)
        return [field.encode("latin-1") for field in fields]
    except (csv.Error, ValueError):
        return None


def _jsonl(path: Path, wanted: Sequence[str], declared: Rows, label_type: LabelType) -> _Tables:
    def row(line: bytes | None) -> _Row:
        try:
            parsed = json.loads(line or b"")
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            return _stand_in(declared, label_type)
        try:
            return {name: _as_bytes(parsed.get(name), lists=isinstance(label_type, Tags)) for name in wanted}
        except RecursionError:  # a list that is only just not too deep to be read
            return _stand_in(declared, label_type)

    yield from _in_tables((row(line) for line in _lines(path) if line is None or line.strip()), wanted)


def _as_bytes(value: object, *, lists: bool) -> bytes | None:
    if lists and isinstance(value, list):
        return json.dumps(value).encode()
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")  # half a surrogate pair is then not UTF-8
    if isinstance(value, bool):
        return b"true" if value else b"false"  # as in Parquet
    return str(value).encode() if isinstance(value, int | float) else None


def _stand_in(declared: Rows, label_type: LabelType) -> _Row:
    """A row of the first class, as the file would write it, of the lowest number, or without a label."""
    if isinstance(label_type, Number):
        return {label.name: repr(label_type.bounds[0]).encode() for label in declared.label_columns}
    if isinstance(label_type, Classes):
        written = declared.spellings.get(label_type.classes[0], label_type.classes)[0].encode()
        return {label.name: written for label in declared.label_columns}
    return {}


def _lines(path: Path) -> Iterator[bytes | None]:
    """The lines without line ends; None for a line that is too long for memory."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            if line.endswith(b"\n") or len(line) < LONGEST_LINE:
                yield line.rstrip(b"\r\n")
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)
            yield None


def _in_tables(rows: Iterator[_Row], names: Sequence[str]) -> _Tables:
    """Tables of the rows; at least one, so that missing columns are noticed in a file without rows."""
    kinds = pa.schema([(name, pa.large_binary()) for name in names])
    yield kinds.empty_table()
    while portion := list(islice(rows, _ROWS)):
        yield pa.Table.from_pylist(portion, kinds)


def _parquet(path: Path, wanted: Sequence[str], batch_rows: int) -> Iterator[pa.Table]:
    """The wanted columns that a Parquet file has, in tables of at most `batch_rows` rows.

    The first has no rows, so that missing columns are noticed in a file without rows. Views, as Polars writes texts and
    bytes, become what they view, since Arrow cannot filter them.
    """
    plain = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    # Otherwise Arrow holds whole row groups, which may be most of a file.
    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_PARQUET_BUFFER) as file:
        yield file.schema_arrow.empty_table()
        for batch in file.iter_batches(batch_rows, columns=list(wanted)):
            fields = [field.with_type(plain.get(field.type, field.type)) for field in batch.schema]
            yield pa.Table.from_batches([batch]).cast(pa.schema(fields))


def _arrow(path: Path) -> Iterator[pa.RecordBatch]:
    """The rows of one split that `save_to_disk` wrote; raises DataRefusedError if it is not one, or incomplete."""
    if (path / "dataset_dict.json").is_file():
        raise DataRefusedError(
            "{path} holds several splits; give one of its folders, such as {name}/train.",
            code="unreadable_file",
            path=path,
            name=path.name,
        )
    try:
        listed = json.loads((path / "state.json").read_text(encoding="utf-8"))["_data_files"]
        for file in listed:
            with (
                pa.memory_map(str(path / Path(file["filename"]).name)) as mapped,
                pa.ipc.open_stream(mapped) as stream,
            ):
                for batch in stream:
                    for start in range(0, max(1, batch.num_rows), _ROWS):
                        yield batch.slice(start, _ROWS)
    except _BROKEN:
        raise DataRefusedError(
            "{path} cannot be read as {expected}; correct the folder or its card.",
            code="unreadable_file",
            path=path,
            expected=_WORDS["datasets"],
        ) from None
