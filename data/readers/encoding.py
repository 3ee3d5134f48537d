"""Encode the columns of a table as features or labels: each value independently, as the card declares the column.

Functions take the values as they were read, and `where`, which names file and column in a refusal. No message contains
a value.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data.card import DataRefusedError
from data.cells import Values
from data.formats import Binned, Categorical, Column, Date, Hashed, Ignored, Label, Numeric, Table, Timestamp
from data.readers.records import RecordBatch
from data.targets import IGNORED, Labels, LabelType, NextToken, Number, Tags

_FIRST_DAY, _LAST_DAY = 31 + 1, 31 * 12 + 31
_WHOLE_NUMBER = re.compile("[+-]?[0-9]+")
_WORDS = re.compile(r"[^\W_]+")
_WITH_POINT = re.compile(rb"([+-]?\d+)\.0+")
"""A whole number as a column of real numbers spells it, which it is where some row misses its value."""
_SCIENTIFIC = re.compile(rb"[+-]?\d+(\.\d+)?[eE][+-]?\d{1,3}")
"""How such a column spells a number of more than ten digits."""


@dataclass(frozen=True)
class ColumnSource:
    """The column of a file that a refusal is about; without its name, whatever stands in its place in the sentence."""

    path: str
    column: str = ""

    def __str__(self) -> str:
        return f"{self.path}, column {self.column!r}" if self.column else self.path


def features(table: pa.Table, declared: Table, path: str) -> NDArray[np.float32]:
    """The features of some rows, [n, width], or their active cells, [n, positions].

    The label is not read. Raises DataRefusedError as `records` does.
    """
    if declared.cell_encoding is None:
        return _shares(table, declared, path)
    return declared.cell_encoding.codes(_values(table, declared, path))


def _values(table: pa.Table, declared: Table, path: str) -> list[Values]:
    """The values of all parts of some rows, of which their cells are made."""
    check_columns(table, declared.content, path)
    return [part for column in declared.columns for part in parts_of(table, column, declared.missing, path)]


def _shares(table: pa.Table, declared: Table, path: str) -> NDArray[np.float32]:
    """The features of some rows without cells, [n, width]."""
    check_columns(table, declared.content, path)
    shares = np.zeros((table.num_rows, declared.width), np.float32)
    start = 0
    for column in declared.columns:
        _fill(shares[:, start : start + column.width], column, table, declared.missing, path)
        start += column.width
    return shares


def records(
    table: pa.Table, declared: Table, label_type: LabelType, path: str, *, has_split: bool = False
) -> RecordBatch:
    """The records of some rows. path: name of their source in messages. Raises DataRefusedError for an invalid
    value.

    has_split: whether records decide on which side they are. They do so by their features without cells, so
    that other cells move none of them.
    """
    check_columns(table, declared.in_the_file, path)
    encoding = declared.cell_encoding if has_split else None
    if encoding is not None:  # whose values and the shares below are both made of the numbers
        table = _with_numbers(table, declared, path)
    values = [] if encoding is None else _values(table, declared, path)
    encoded = features(table, declared, path) if encoding is None else encoding.codes(values)
    targets = labels(table, declared.label_columns, label_type, declared.missing, path)
    groups = [
        positions(table[column.name], column.categories, ColumnSource(path, column.name))
        for column in declared.columns
        if isinstance(column, Ignored) and column.categories
    ]
    by_group = np.stack(groups, axis=1) if groups else None
    if encoding is None:
        return RecordBatch(encoded, targets, groups=by_group)
    # By the features without cells: a record stays on its side of the split when cells are declared otherwise.
    keys = [*RecordBatch(_shares(table, declared, path), targets).canonical()]
    return RecordBatch(encoded, targets, keys, by_group, np.stack(values, axis=1))


def _with_numbers(table: pa.Table, declared: Table, path: str) -> pa.Table:
    """The table with its columns of numbers as float64, null where a number is missing.

    The month and the day of a date stay as they are written. Raises DataRefusedError for what is no number.
    """
    in_dates = {
        name for column in declared.columns if isinstance(column, Date) for name in (column.month, column.day)
    }
    for column in declared.columns:
        if isinstance(column, Numeric | Binned) and column.name not in in_dates:
            index = table.column_names.index(column.name)
            where = ColumnSource(path, column.name)
            table = table.set_column(index, column.name, _floats(table[column.name], declared.missing, where))
    return table


def _fill(
    features: NDArray[np.float32], column: Column, table: pa.Table, missing: tuple[str, ...], path: str
) -> None:
    """Write the features of `column`, each in [0, 1], into `features`, which is zero and [n, column.width].

    missing: spellings of a missing number. Raises DataRefusedError if a number is missing but not allowed to be, or is
    none, or if a date is invalid.
    """
    where = ColumnSource(path, column.name)
    if isinstance(column, Numeric):
        features[:, 0] = _scale(table[column.name], column, missing, where)
    elif isinstance(column, Binned):
        _mark(features, _bins(table[column.name], column, missing, where))
    elif isinstance(column, Categorical):
        _mark(features, positions(table[column.name], column.categories, where))
    elif isinstance(column, Hashed):
        hashes = hash_cells(table[column.name], column, missing, where)
        # An index beyond the features, so zeros.
        _mark(features, np.where(np.isnan(hashes), column.cells, hashes).astype(np.int64))
    elif isinstance(column, Timestamp):
        *_, elapsed = moments(table[column.name], column, missing, where)
        features[:, 0] = np.where(np.isnan(elapsed), 0.5, elapsed)
    elif isinstance(column, Date):
        features[:, 0] = _days(table, column, missing, path)


def parts_of(table: pa.Table, column: Column, missing: tuple[str, ...], path: str) -> list[Values]:
    """The values of each of the column's parts; raises DataRefusedError as `_fill` does."""
    where = ColumnSource(path, column.name)
    if isinstance(column, Numeric):
        low, high = column.bounds
        floats, absent = numbers(
            table[column.name], missing, where, refuses_missing=column.missing == "refuse"
        )
        return [np.where(absent, np.nan, (np.clip(floats, low, high) - low) / (high - low))]
    if isinstance(column, Binned):
        bins = _bins(table[column.name], column, missing, where)
        return [np.where(bins == column.width, np.nan, bins)]
    if isinstance(column, Categorical):
        indices = positions(table[column.name], column.categories, where)
        return [np.where(indices == len(column.categories), np.nan, indices)]
    if isinstance(column, Hashed):
        return [hash_cells(table[column.name], column, missing, where)]
    if isinstance(column, Timestamp):
        return moments(table[column.name], column, missing, where)
    if isinstance(column, Date):
        days = _days(table, column, missing, path)  # refuses a month that there is not
        months = positions(table[column.month], column.months, ColumnSource(path, column.month))
        return [months.astype(np.float64), days]
    return []


def hash_cells(
    values: pa.ChunkedArray, column: Hashed, missing: tuple[str, ...], where: ColumnSource
) -> Values:
    """The cell of each value, NaN if it is missing; float64 [n]. 17.0 is 17, see `in_one_spelling`."""
    text = _trim(values, where)
    absent = np.asarray(pc.is_in(text, value_set=pa.array(missing, pa.string())))
    key = hash_key(column)
    cells = [
        np.nan if value is None else float(_cell(value, key, column.cells)) for value in text.to_pylist()
    ]
    return np.where(absent, np.nan, np.array(cells, np.float64))


def hash_key(column: Hashed) -> bytes:
    """The key of the column's hash, which is public."""
    return hashlib.sha256(column.salt.encode()).digest()


def cell_of(text: str, column: Hashed, missing: tuple[str, ...]) -> int:
    """The cell of one text, the number of cells for a missing one."""
    text = text.strip()
    return column.cells if text in missing else _cell(text, hash_key(column), column.cells)


def _cell(value: str, key: bytes, cells: int) -> int:
    digest = hashlib.blake2b(in_one_spelling(value.encode()), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "big") % cells


def in_one_spelling(value: bytes) -> bytes:
    """A value without spaces around it: 17.0 becomes 17, and 1.2345678901e+10 becomes 12345678901.

    A missing value makes whole numbers real ones in all rows of a column, as pandas writes it. Where texts are hashed,
    one record would otherwise change what is made of all others.
    """
    text = value.strip()
    if _SCIENTIFIC.fullmatch(text):
        text = format(Decimal(text.decode()), "f").encode()
    is_whole = _WITH_POINT.fullmatch(text)
    return is_whole[1] if is_whole else text


def moments(
    values: pa.ChunkedArray, column: Timestamp, missing: tuple[str, ...], where: ColumnSource
) -> list[Values]:
    """Year, month, weekday and the share of the time that has passed, float64 [n] each; NaN if there is no date."""
    text = (
        pc.cast(values, pa.string(), safe=False)
        if pa.types.is_temporal(values.type)
        else _trim(values, where)
    )
    first, last = (datetime.combine(day, datetime.min.time()) for day in column.days)
    rows = np.full((len(text), 4), np.nan)  # year, month, weekday, share of the time
    for row, value in enumerate(text.to_pylist()):
        if value is None or value in missing:
            continue
        with suppress(ValueError):
            # Without a zone, as it is written: the hour of the day is what a table means.
            moment = min(max(datetime.fromisoformat(value).replace(tzinfo=None), first), last)
            share = (moment - first) / (last - first)
            rows[row] = moment.year - first.year, moment.month - 1, moment.weekday(), share
    if column.missing == "refuse" and np.isnan(rows).any():
        raise DataRefusedError(
            "{where}: a date is missing or not written as 2020-01-31; correct the file, or declare `missing: middle`"
            " for that column.",
            code="bad_value",
            where=where,
            column=where.column,
            expected="a date",
        )
    return [*rows.T]


def labels(
    table: pa.Table, columns: tuple[Label, ...], label_type: LabelType, missing: tuple[str, ...], path: str
) -> NDArray[Any]:
    """The labels [n, ...] of some rows, in the form of the target.

    These are int64 indices of classes; float32 in [-1, 1] for a number; float32 [n, labels] of ones and zeros; int64
    [n, words], indices of tags; and zeros [n] for the next token, which is in the text itself.

    Raises DataRefusedError as `classes` does, and if a number is missing or invalid.
    """
    if isinstance(label_type, NextToken):
        return np.zeros(table.num_rows, np.int64)
    if isinstance(label_type, Labels):
        has = [holds(table[name], label_type.yes, ColumnSource(path, name)) for name in label_type.labels]
        return np.ascontiguousarray(np.array(has, np.float32).reshape(len(has), -1).T)
    (label,) = columns
    where = ColumnSource(path, label.name)
    if isinstance(label_type, Tags):
        return _tags(table[label.name], label_type, where)
    if not isinstance(label_type, Number):
        return classes(table[label.name], label, label_type.classes, where)
    values, absent = numbers(table[label.name], missing, where, refuses_missing=False)
    if absent.any():
        raise _is_missing(where, "leave out the rows that lack what is predicted")
    return label_type.scale(values)


def holds(values: pa.ChunkedArray, words: tuple[str, ...], where: ColumnSource) -> NDArray[np.bool_]:
    """Whether each value is one of some words; bool [n]. Raises DataRefusedError if the column holds no words."""
    if pa.types.is_nested(values.type):
        raise _is_not("text", where)
    wanted = {word.encode() for word in words}
    return np.array([(content or b"").strip() in wanted for content in contents(values)], bool)


def _tags(values: pa.ChunkedArray, label_type: Tags, where: ColumnSource) -> NDArray[np.int64]:
    """The index of each word's tag; IGNORED if there is no word."""
    if pa.types.is_struct(values.type):
        raise _is_not("text", where)
    # By number or by name; a name that looks like a number is the name.
    index_of = {str(index): index for index in range(len(label_type.tags))}
    index_of |= {name: index for index, name in enumerate(label_type.tags)}
    other = IGNORED if label_type.outside is None else index_of[label_type.outside]
    tags = np.full((len(values), label_type.words), IGNORED, np.int64)
    for row, content in enumerate(contents(values, lists=True)):
        indices = [index_of.get(name, other) for name in words_of(content)[: label_type.words]]
        tags[row, : len(indices)] = indices
    return tags


def words_of(content: bytes | None) -> list[str]:
    """The words of a value: the items of a JSON list, or otherwise separated by spaces; none if it is not UTF-8."""
    content = content or b""
    with suppress(ValueError, RecursionError):
        if content.startswith(b"[") and isinstance(parsed := json.loads(content), list):
            return [str(word) for word in parsed]
    try:
        return content.decode().split()
    except UnicodeDecodeError:
        return []


def contents(column: pa.ChunkedArray, *, lists: bool = False) -> list[bytes | None]:
    """Each value as the bytes in the file; for a struct of Hugging Face, the bytes of its image.

    lists: whether values may be lists, which are returned as JSON.
    """
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_struct(kind):
        if kind.get_field_index("bytes") < 0:
            return [None] * len(column)
        return contents(pc.struct_field(column, "bytes"))
    try:
        if lists and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            column = pc.cast(column, pa.large_list(pa.large_string()), safe=False)
            return [None if words is None else json.dumps(words).encode() for words in column.to_pylist()]
        if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            column = pc.cast(column, pa.large_string(), safe=False)
        values: list[bytes | None] = pc.cast(column, pa.large_binary(), safe=False).to_pylist()
    except pa.ArrowException:
        raise DataRefusedError(
            "a column that was declared holds neither texts, bytes nor numbers; correct the file or its card.",
            code="bad_value",
            expected="text",
        ) from None
    return values


def classes(
    values: pa.ChunkedArray, label: Label, class_names: tuple[str, ...], where: ColumnSource
) -> NDArray[np.int64]:
    """The index of each value's class in `class_names`; int64 [n]. Raises DataRefusedError for any other value."""
    written = [
        (text, index) for index, name in enumerate(class_names) for text in label.spellings.get(name, (name,))
    ]
    indices = positions(values, tuple(text for text, _ in written), where)
    if (indices == len(written)).any():
        raise DataRefusedError(
            "{where}: a label is missing or none of the declared classes; leave out rows without a label, and correct"
            " the file or the card, which lists other ways to write a class as `spellings` of the column.",
            code="bad_value",
            where=where,
            column=where.column,
            expected="a class",
        )
    return np.array([index for _, index in written], np.int64)[indices]


def positions(values: pa.ChunkedArray, names: tuple[str, ...], where: ColumnSource) -> NDArray[np.int64]:
    """The index of each value in `names`, or len(known) if it is unknown or missing; int64 [n].

    Where true and false are all that is known, their case does not count; where whole numbers are, 17.0 is 17, as
    pandas writes it in a column with missing values.
    """
    text = _trim(values, where)
    if {name.lower() for name in names} <= {"true", "false"}:
        text, names = pc.utf8_lower(text), tuple(name.lower() for name in names)
    elif all(_WHOLE_NUMBER.fullmatch(name) for name in names):
        text = pc.replace_substring_regex(text, r"^([+-]?[0-9]+)\.0+$", r"\1")
    matches = pc.index_in(text, value_set=pa.array(names, pa.string()))
    indices: NDArray[np.int64] = matches.cast(pa.int64()).fill_null(len(names)).to_numpy()
    return indices


def _mark(features: NDArray[np.float32], indices: NDArray[np.int64]) -> None:
    """Write a one-hot encoding; an index beyond the features leaves zeros."""
    rows = np.flatnonzero(indices < features.shape[1])
    features[rows, indices[rows]] = 1.0


def _scale(
    values: pa.ChunkedArray, column: Numeric, missing: tuple[str, ...], where: ColumnSource
) -> NDArray[np.float64]:
    """The column clamped to its bounds and scaled to [0, 1]; float64 [n]."""
    low, high = column.bounds
    floats, absent = numbers(values, missing, where, refuses_missing=column.missing == "refuse")
    if column.missing != "refuse":
        floats[absent] = column.missing
    inside = np.clip(floats, low, high) - low
    if column.scale == "linear":
        return inside / (high - low)
    # Not above 1 by rounding.
    scaled: NDArray[np.float64] = np.minimum(np.log1p(inside) / np.log1p(high - low), 1.0)
    return scaled


def _bins(
    values: pa.ChunkedArray, column: Binned, missing: tuple[str, ...], where: ColumnSource
) -> NDArray[np.int64]:
    """The index of each value's interval, or the width if it is missing; int64 [n]."""
    floats, absent = numbers(values, missing, where, refuses_missing=column.missing == "refuse")
    return np.where(absent, column.width, np.searchsorted(column.edges, floats, side="right"))


def _days(table: pa.Table, column: Date, missing: tuple[str, ...], path: str) -> NDArray[np.float64]:
    """31 month + day, scaled to [0, 1]; float64 [n]."""
    months = positions(table[column.month], column.months, ColumnSource(path, column.month))
    where = ColumnSource(path, column.day)
    days, absent = numbers(table[column.day], missing, where, refuses_missing=False)
    if absent.any():
        raise _is_missing(where, "correct the file")
    # An unknown month has the index 12. That a month has fewer than 31 days decides nothing: each has 31 numbers.
    real = (months < 12) & (days >= 1) & (days <= 31) & (days == np.floor(days))
    if not real.all():
        raise DataRefusedError(
            "{where}: a date is none, of a month written {months} and a day from 1 to 31; correct the file, or `months`"
            " of the column in its card.",
            code="bad_value",
            where=ColumnSource(path, column.name),
            column=column.name,
            months=", ".join(column.months),
            expected="a date",
        )
    return (31 * (months + 1) + days - _FIRST_DAY) / (_LAST_DAY - _FIRST_DAY)


def numbers(
    values: pa.ChunkedArray, missing: tuple[str, ...], where: ColumnSource, *, refuses_missing: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The values as numbers, 0 if missing, float64 [n]; and which ones are missing, bool [n].

    NaN is missing, too, as Polars and NumPy write it. An infinite number stays one, beyond any bound.

    Raises DataRefusedError for what is no number, and for a missing one if `refuses_missing`.
    """
    floats = np.array(_floats(values, missing, where).fill_null(np.nan).to_numpy())
    absent = np.isnan(floats)
    floats[absent] = 0.0
    if refuses_missing and absent.any():
        raise _is_missing(where, "correct the file, or declare `missing` for that column")
    return floats, absent


def _floats(values: pa.ChunkedArray, missing: tuple[str, ...], where: ColumnSource) -> pa.ChunkedArray:
    """The values as float64, null where a number is missing; raises DataRefusedError for what is no number."""
    if _is_text(values.type):
        values = _trim(values, where)
        is_missing = pc.is_in(values, value_set=pa.array(missing, pa.string()))
        values = pc.if_else(is_missing, pa.scalar(None, pa.string()), values)
    return _cast(values, pa.float64(), where)


def _is_missing(where: ColumnSource, remedy: str) -> DataRefusedError:
    return DataRefusedError(
        "{where}: a number is missing; {remedy}.",
        code="missing_value",
        where=where,
        column=where.column,
        remedy=remedy,
    )


def _trim(values: pa.ChunkedArray, where: ColumnSource) -> pa.ChunkedArray:
    text = _cast(values, pa.string(), where)
    try:
        return pc.utf8_trim_whitespace(text)
    except pa.ArrowException:  # the cast accepts bytes that are not UTF-8
        raise _is_not("text", where) from None


def _cast(values: pa.ChunkedArray, kind: pa.DataType, where: ColumnSource) -> pa.ChunkedArray:
    try:
        return pc.cast(values, kind, safe=False)
    except pa.ArrowException:  # its message quotes the value
        raise _is_not("a number" if pa.types.is_floating(kind) else "text", where) from None


def _is_not(what: str, where: ColumnSource) -> DataRefusedError:
    if what == "a number":
        hint = (
            " (decimals have a point, or a comma where reader.decimal says so), or list it in reader.missing if it"
            " stands for a missing value"
        )
    else:
        hint = " (texts are in UTF-8)"
    return DataRefusedError(
        "{where}: holds something that is not {expected}; correct the file or its card{hint}.",
        code="bad_value",
        where=where,
        column=where.column,
        expected=what,
        hint=hint,
    )


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def check_columns(table: pa.Table, names: Iterable[str], where: object) -> None:
    """Raise DataRefusedError unless the table has one column of each name. where: name of its source in messages."""
    counts = Counter(table.column_names)  # once: Arrow makes the list anew each time
    for name in names:
        if counts[name] != 1:
            raise not_one_column(name, table.column_names, where)


def not_one_column(name: str, names: Sequence[str], where: object) -> DataRefusedError:
    """The error for a table that lacks a column, or has several of its name. names: those of its columns."""
    near = [other for other in names if _WORDS.findall(other.casefold()) == _WORDS.findall(name.casefold())]
    if names.count(name) > 1:
        problem = "has several columns {column!r}; name each of them otherwise, or leave one"
    elif near:
        problem = "has no column {column!r}, but {near!r}; write the name alike in the file and its card"
    else:
        problem = "has no column {column!r}; correct the file or its card"
    return DataRefusedError(
        f"{{path}} {problem}.",
        code="missing_column",
        path=str(where),
        column=name,
        near=near[0] if near else None,
    )
