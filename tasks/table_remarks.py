"""What the owner of a table should look at: told by `data check` and nowhere else, since it depends on private rows."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal
from zipfile import is_zipfile

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data.card import DataCard, DataRefusedError
from data.formats import UTF_8, Binned, Categorical, Csv, Label, Numeric, Rows, Table
from data.readers import encoding
from data.readers.rows import SEPARATORS, tables
from data.targets import Classes, Number

SHOWN_ABOVE = 0.01
"""The share of a column's values above which a change is told in words."""
_SHARES = (
    (0.95, "nearly all"),
    (0.6, "most"),
    (0.4, "about half"),
    (0.2, "more than a fifth"),
    (0.1, "more than a tenth"),
)
_MAX_VALUES = 200
"""A column with more values than this is no class that was copied, and its spellings are not compared."""
_MIN_ROWS, _NEARLY_ALWAYS = 20, 0.99
_PARTS_OF_RANGE = 100
"""In how many parts of its declared range a number to predict is counted."""
_YES_WORDS, _NO_WORDS = {"1", "1.0", "true", "t", "yes", "y"}, {"0", "0.0", "false", "f", "no", "n"}
"""How files write yes and no."""
_MISSING = (
    r"(?i)^(#?n/?a|<na>|null|none|nil|nan|unknown|missing|not available|\?+|-+|\.+)$",
    "values are written as missing ones often are, as NA or ?; list the spelling as `missing` under `reader` in the"
    " card",
)
"""How missing values are often written that are refused as numbers, and what to do."""
_FAULTS_OF_NUMBERS = (
    (
        r"^[+-]?\d{1,3}(,\d{3})+(\.\d+)?$",
        "numbers have commas between thousands, as in 1,200; write them without",
    ),
    (
        r"^[+-]?\d{1,3}(['’ \x{a0}\x{202f}]\d{3})+([.,]\d+)?$",
        "numbers have marks between thousands, as in 1'200 or 1 200; write them without",
    ),
    (
        r"^[+-]?\d+(\.\d{3})*,\d+$",
        'numbers have decimal commas, as in 1,5; set `decimal: ","` under `reader` in the card of a CSV file, or write'
        " points",
    ),
    (
        r"^(\p{Sc}\s*[+-]?\d.*|[+-]?\d+([.,]\d+)?\s*(%|\p{Sc}|\p{L}{1,10}))$",
        "numbers have a unit, as in 5 kg or 5%; write them without",
    ),
    (
        r"^[<>≤≥~]=?\s*[+-]?\d+([.,]\d+)?$",
        "numbers stand behind a sign, as in <0.5; write a number for each",
    ),
)
"""How numbers are written that are refused, and what to do; a text counts for the first that it matches."""
_HEADER_LINES = 100
"""How far down a file the names of its columns are looked for."""
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def in_words(share: float) -> str:
    """A share of at most 1, roughly.

    Example:
        >>> in_words(0.5), in_words(0.02)
        ('about half', 'more than a hundredth')
    """
    return next((words for low, words in _SHARES if share >= low), "more than a hundredth")


@dataclass
class _Column:
    """How often each value of a column occurs, with each label; None if there are too many values."""

    values: Counter[str] | None = field(default_factory=Counter)
    with_label: Counter[tuple[str, str]] = field(default_factory=Counter)
    equal_to_label: int = 0
    faults: Counter[str] = field(default_factory=Counter)


def remarks_on(card: DataCard, file: Path) -> list[str]:
    """Remarks on the training file of a table, or of rows with texts or images, whether or not it can be read."""
    if not isinstance(card.reader, Table | Rows):
        return []
    values = TrainingValues(card, card.reader)
    for table in tables("train", file, card.reader, card.label_type):
        values.add(table)
    return values.remarks()


class TrainingValues:
    """The values of a training file, counted portion by portion; `names` are those of its columns.

    reader: the card's.
    """

    def __init__(self, card: DataCard, reader: Table | Rows) -> None:
        self.names: tuple[str, ...] = ()
        self._card, self._rows = card, 0
        self._columns: dict[str, _Column] = {}
        self._in_range = np.zeros(_PARTS_OF_RANGE, np.int64)
        self._missing = pa.array(reader.missing if isinstance(reader, Table) else (), pa.string())
        self._label = reader.label_columns[0].name if len(reader.label_columns) == 1 else ""
        if isinstance(reader, Table):
            self._wanted = [
                column.name
                for column in reader.columns
                if isinstance(column, Numeric | Binned | Categorical | Label)
            ]
        else:
            self._wanted = [column.name for column in reader.label_columns]

    def add(self, table: pa.Table) -> None:
        """Count the values of a portion."""
        # A Parquet file's first portion has all columns and no rows, and the others have those that are declared.
        self.names = self.names or tuple(table.column_names)
        self._rows += table.num_rows
        times = Counter(table.column_names)
        texts = {name: _texts(table, name) for name in self._wanted if times[name] == 1}
        for name, values in texts.items():
            if values is not None:
                labels = None if name == self._label else texts.get(self._label)
                _count(self._columns.setdefault(name, _Column()), values, labels, self._missing)

        if isinstance(self._card.label_type, Number) and times[self._label] == 1:
            self._count_in_range(table[self._label], self._card.label_type)

    def _count_in_range(self, values: pa.ChunkedArray, target: Number) -> None:
        """Count the numbers to predict in each part of their range; none of values that are refused."""
        missing = tuple(self._missing.to_pylist())
        with suppress(DataRefusedError):
            numbers, absent = encoding.numbers(
                values, missing, encoding.ColumnSource(""), refuses_missing=False
            )
            shares = (target.scale(numbers[~absent]) + 1.0) / 2.0
            parts = np.minimum(shares * _PARTS_OF_RANGE, _PARTS_OF_RANGE - 1).astype(np.int64)
            self._in_range += np.bincount(parts, minlength=_PARTS_OF_RANGE)

    def remarks(self) -> list[str]:
        """Remarks on all values so far."""
        return [
            *_single_categories(self._card),
            *_spelling_remarks(self._card, self._columns, self._label),
            *_label_remarks(self._card, self._columns.get(self._label), self._label),
            *_range_remarks(self._in_range, self._label),
            *_copies(self._columns, self._label, self._rows),
            *_faults_of_numbers(self._card, self._columns),
        ]


def _texts(table: pa.Table, name: str) -> pa.ChunkedArray | None:
    """The values of a column without spaces around them, missing ones empty; None where they are no texts."""
    try:
        texts = pc.utf8_trim_whitespace(pc.cast(table[name], pa.string(), safe=False))
    except pa.ArrowException:
        return None
    return pc.fill_null(texts, "")


def _count(
    column: _Column, values: pa.ChunkedArray, labels: pa.ChunkedArray | None, missing: pa.Array
) -> None:
    rest = values.slice(0, 0) if _are_numbers(values) else values
    rest = rest.filter(pc.invert(pc.is_in(rest, value_set=missing)))
    for pattern, fault in (_MISSING, *_FAULTS_OF_NUMBERS):
        matches = pc.match_substring_regex(rest, pattern)
        column.faults[fault] += pc.sum(matches).as_py() or 0
        rest = rest.filter(pc.invert(matches))
    both = pa.table({"value": values} if labels is None else {"value": values, "label": labels})
    if labels is not None:
        column.equal_to_label += pc.sum(pc.equal(values, labels)).as_py() or 0
    if column.values is None:
        return
    groups = both.group_by(both.column_names).aggregate([([], "count_all")])
    if groups.num_rows + len(column.values) > _MAX_VALUES:
        column.values, column.with_label = None, Counter()
        return
    for row in groups.to_pylist():
        column.values[row["value"]] += row["count_all"]
        if labels is not None:
            column.with_label[row["value"], row["label"]] += row["count_all"]


def _are_numbers(values: pa.ChunkedArray) -> bool:
    """Whether all texts but empty ones are numbers, as the reader takes them: no fault is in these."""
    try:
        pc.cast(values.filter(pc.not_equal(values, "")), pa.float64())
    except pa.ArrowException:
        return False
    return True


def _single_categories(card: DataCard) -> Iterator[str]:
    for column in card.reader.columns if isinstance(card.reader, Table) else ():
        if isinstance(column, Categorical) and len(column.categories) == 1:
            yield (
                f"column {column.name}: {column.categories[0]!r} is its only category, of which a model learns nothing;"
                " declare all that there may be, or make it `kind: ignored`"
            )


def _spelling_remarks(card: DataCard, columns: Mapping[str, _Column], label: str) -> Iterator[str]:
    """Other spellings of classes and categories."""
    reader = card.reader
    assert isinstance(reader, Table | Rows)
    if label in columns and isinstance(card.label_type, Classes):
        (declared,) = reader.label_columns
        spellings_of = {name: declared.spellings.get(name, (name,)) for name in card.label_type.classes}
        values = columns[label].values or Counter()
        spellings = [text for texts in spellings_of.values() for text in texts]
        others = {value: _respelled_name(value, spellings_of) for value in _unknown(values, spellings)}
        wanted = {
            name: [value for value in values if value in texts or others.get(value) == name]
            for name, texts in spellings_of.items()
        }
        if any(name is not None for name in others.values()):
            new = {name: texts for name, texts in wanted.items() if texts != [name]}
            where = f"the column {label!r}" if isinstance(reader, Table) else "`reader`"
            yield (
                f"column {label}: the file writes classes in another way than the card; give {where}"
                f" `spellings: {json.dumps(new, ensure_ascii=False)}`"
            )
        used = {name for name, texts in wanted.items() if texts}
        if len(used) == 1 and not set(others.values()) - used:
            yield f"column {label}: only one class is in the file, {next(iter(used))!r}, so there is nothing to learn"
        elif used:
            yield from (
                f"column {label}: no record has the class {name!r}"
                for name in spellings_of
                if name not in used
            )
    for column in reader.columns if isinstance(reader, Table) else ():
        kinds = columns[column.name].values if column.name in columns else None
        if isinstance(column, Categorical) and kinds is not None:
            unknown = _unknown(kinds, column.categories)
            spellings_of = {name: (name,) for name in column.categories}
            there = {_plain(value) for value in kinds.keys() - set(unknown)}
            for value in unknown:
                meant = _respelled_name(value, spellings_of)
                if meant is not None:
                    absent = "" if _plain(meant) in there else f", and no record has {meant!r}"
                    becomes = "counts as other" if column.unknown == "other" else "becomes zeros"
                    yield (
                        f"column {column.name}: the file writes {value!r}, which {becomes}{absent}; write the category"
                        f" {meant!r} of the card as the file does"
                    )


def _label_remarks(card: DataCard, column: _Column | None, label: str) -> Iterator[str]:
    """Missing labels, and a number that is the same in all records."""
    values = Counter[str]() if column is None or column.values is None else column.values
    if isinstance(card.label_type, Classes) and isinstance(card.reader, Table):
        spellings = card.reader.label_columns[0].spellings
        read = {text for name in card.label_type.classes for text in spellings.get(name, (name,))}
        if any(values[text] for text in {"", *card.reader.missing} - read):
            yield f"column {label}: labels are missing; leave out the rows that lack what is predicted"
    if isinstance(card.label_type, Number) and len(values) == 1:
        yield f"column {label}: all records have the same number, so there is nothing to learn"


def _range_remarks(counts: NDArray[np.int64], label: str) -> Iterator[str]:
    """A number to predict whose declared range is far too wide, by the counts of its parts."""
    nearly_all = _NEARLY_ALWAYS * counts.sum()
    if counts.sum() >= _MIN_ROWS and (counts[1:] + counts[:-1]).max() >= nearly_all:
        yield (
            f"column {label}: nearly all numbers lie in a fiftieth of the declared range, and a model of a far too wide"
            " one is poor; declare narrower bounds, if they are known without looking"
        )


def _unknown(values: Counter[str], spellings: Iterable[str]) -> list[str]:
    """The values of a column that the reader does not take for one of those declared."""
    declared = tuple(spellings)
    indices = encoding.positions(
        pa.chunked_array([list(values)], pa.string()), declared, encoding.ColumnSource("")
    ).tolist()
    return [value for value, index in zip(values, indices, strict=True) if value and index == len(declared)]


def _respelled_name(value: str, spellings_of: Mapping[str, tuple[str, ...]]) -> str | None:
    """The only class or category that a value is another spelling of."""
    same = [
        name
        for name, texts in spellings_of.items()
        if _plain(value) in {_plain(text) for text in (name, *texts)}
    ]
    if not same and len(spellings_of) == 2:
        same = [
            name
            for name in spellings_of
            if any(value.casefold() in kind and name.casefold() in kind for kind in (_YES_WORDS, _NO_WORDS))
        ]
    return same[0] if len(same) == 1 else None


def _plain(text: str) -> str:
    """A text without case, spaces, points, underscores, and hyphens between letters; a number in its usual spelling."""
    with suppress(ValueError):
        return repr(float(text.replace(",", ".")))
    return re.sub(r"[\s_.]+|(?<=\w)-(?=\w)", "", text.casefold())


def _copies(columns: Mapping[str, _Column], label: str, rows: int) -> Iterator[str]:
    """Columns from which the label can be read off."""
    labels = columns[label].values if label in columns else Counter[str]()
    if rows < _MIN_ROWS or (labels is not None and len(labels) < 2):
        return
    for name, column in columns.items():
        right = Counter[str]()
        for (value, _), count in column.with_label.items():
            right[value] = max(right[value], count)
        few = labels is not None and 1 < len(right) <= 2 * len(labels)
        says = (
            few and labels is not None and sum(right.values()) >= _NEARLY_ALWAYS * rows > max(labels.values())
        )
        if name != label and (column.equal_to_label >= _NEARLY_ALWAYS * rows or says):
            yield (
                f"column {name}: it says the label {label!r} of nearly every record, as a copy does; if it is not known"
                " before the label is, make it `kind: ignored`"
            )


def _faults_of_numbers(card: DataCard, columns: Mapping[str, _Column]) -> Iterator[str]:
    """The fault that most values of each column of numbers have, but for those that are read, and missing ones."""
    numbers = (Numeric, Binned, Label) if isinstance(card.label_type, Number) else (Numeric, Binned)
    for column in card.reader.columns if isinstance(card.reader, Table) else ():
        if isinstance(column, numbers) and column.name in columns:
            faults = Counter(columns[column.name].faults)
            _, says_missing = _MISSING
            if faults.pop(says_missing, 0):
                yield f"column {column.name}: {says_missing}"
            if faults.total():
                yield f"column {column.name}: {max(faults, key=faults.__getitem__)}"


def fault_of_text(path: Path, declared: Csv) -> str | None:
    """The first line that makes a CSV file unreadable, and why; None if none does, or for an archive."""
    if declared.member is not None or path.suffix == ".gz" or is_zipfile(path):
        return None
    with path.open("rb") as file:
        if file.read(2) in _UTF_16:
            return f"{path} is UTF-16; save it as UTF-8"
        file.seek(0)
        wanted = None if declared.header else len(declared.in_the_file)
        for number, line in enumerate(file, 1):
            if number <= declared.skip_lines.train or not line.strip():
                continue
            try:
                text = _decode(line, declared.encoding).removeprefix("\ufeff" * (number == 1)).rstrip("\r\n")
            except UnicodeDecodeError:
                return (
                    f"line {number} of {path} is not UTF-8, but probably Latin-1 or Windows-1252; set"
                    " `encoding: windows-1252` under `reader` in the card, or save the file as UTF-8"
                )
            begins_field = re.search(rf'(^|{re.escape(declared.separator)})"', text)
            if declared.quotes and begins_field and text.count('"') % 2:
                return f"line {number} of {path} ends within quotes, and a record has to be one line"
            count = _fields(text, declared, declared.separator)
            wanted = count if wanted is None else wanted
            if count != wanted:
                others = [mark for mark in SEPARATORS if _fields(text, declared, mark) == wanted]
                why = "put texts that contain it in quotes"
                if text.rstrip().endswith(declared.separator) and count == wanted + 1:
                    why = "take the separator at its end away, or add one to the first line, too"
                elif others:
                    why = f"it has {wanted} by {others[0]!r}, which `separator` under `reader` in the card may name"
                elif declared.separator == "," and re.search(r"(^|,)[+-]?\d+,\d+(,|$)", text):
                    why = (
                        'save the table with semicolons, and set `separator: ";"` and `decimal: ","` under `reader`'
                        " in the card, or write numbers with a point; put texts with a comma in quotes"
                    )
                return (
                    f"line {number} of {path} has {count} fields, separated by {declared.separator!r}, instead of"
                    f" {wanted}; {why}"
                )
    return None


def fault_of_header(path: Path, declared: Csv) -> str | None:
    """The line that names the declared columns, if it is not the first of a CSV file, as below a title."""
    if not declared.header or declared.member is not None or path.suffix == ".gz" or is_zipfile(path):
        return None
    wanted = set(declared.in_the_file)
    with path.open("rb") as file:
        for number, line in enumerate(islice(file, _HEADER_LINES)):
            text = line.decode(declared.encoding, "replace").removeprefix("\ufeff").strip()
            with suppress(csv.Error):
                fields = next(csv.reader([text], delimiter=declared.separator), ())
                if wanted <= {field.strip() for field in fields}:
                    return (
                        None
                        if number == declared.skip_lines.train
                        else (
                            f"line {number + 1} of {path} names the columns, and the lines above it are no records; set"
                            f" `skip_lines: {{train: {number}}}` under `reader` in the card"
                        )
                    )
    return None


def _decode(line: bytes, encoding: str) -> str:
    return line.decode(encoding, "strict" if encoding == UTF_8 else "replace")


def _fields(text: str, declared: Csv, separator: str) -> int:
    """How many fields a line has; 0 for one that is no CSV."""
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if declared.quotes else csv.QUOTE_NONE
    try:
        return len(next(csv.reader([text], delimiter=separator, quoting=quoting), ()))
    except csv.Error:
        return 0
