"""Check a data card and its files for the owner before anything is spent: checksums, and values that would change.

Counts are made without noise, so they are only for the owner. They are not written, logged or kept, and private records
are counted only on request.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from algorithms.extension import source_digest
from data.prepare.fetch import RAW, Places, checksum_for, fetch
from data.prepare.reading import read
from data.prepare.secret_key import PUBLIC_KEY, owner_key
from data.readers import table
from data.readers.records import Block
from data.schema import registry
from data.schema.card import DataCard
from data.schema.errors import DataRefusedError
from data.schema.formats import (
    Binned,
    Categorical,
    Column,
    Date,
    Format,
    Ignored,
    Label,
    Numeric,
    Own,
    Pixels,
    Reviews,
    Table,
    Texts,
)
from data.schema.targets import Labels, Number
from tasks.config.environment import data_mirror, home
from tasks.runs.encoders import reader_of


@dataclass(frozen=True)
class Look:
    """The findings.

    checksums: by path, the line with key and checksum for each file whose checksum on the card is wrong. counts: for
    each column, how many values would be changed or refused, and why; None if not requested. refused: why the data
    cannot be used, or None.
    """

    card: DataCard
    checksums: Mapping[str, str]
    counts: Mapping[str, int] | None
    refused: str | None


def look(name: str, root: Path, *, counted: bool) -> Look:
    """Check the data set of a card in the checkout at `root`.

    name: name of the data set, or path of its card. counted: whether to count values of private records. Raises
    DataRefusedError if the card is missing or invalid.
    """
    path = Path(name)
    is_path = path.suffix == ".yaml"
    folder = path.parent if is_path else root / "data" / "cards"
    card = registry.card(path.stem if is_path else name, folder)
    key = PUBLIC_KEY if card.public else owner_key(home())
    if card.blocks is not None:
        return Look(card, {}, None, None)
    right = {
        file.path: found
        for file in card.files.values()
        if file.path
        and (root / file.path).exists()
        and (found := checksum_for(root / file.path, file, key=key))
    }
    if (
        isinstance(card.reader, Own)
        and (source := source_digest(card.reader.factory)) != card.reader.source_sha256
    ):
        right[card.reader.factory] = f"source_sha256: {source}"
    if right:
        first = next(iter(right))
        return Look(card, right, None, f"{first} has another checksum than its card declares")
    counts: dict[str, int] = {}
    shows_counts, refused = counted or card.public, None
    try:
        files = fetch(card, Places(root=root, mirror=data_mirror(), cache=root / RAW), key=key)
        if isinstance(card.reader, Table) and shows_counts:
            for part, file in files.items():
                for problem, count in _problems(part, file, card, card.reader):
                    counts[problem] = counts.get(problem, 0) + count
        as_texts = card.has_texts and not isinstance(card.reader, Reviews)
        for block in read(card, files, key=key, own=reader_of(card.reader), as_texts=as_texts):
            for problem, count in _stand_ins(block, card.reader):
                counts[problem] = counts.get(problem, 0) + count
    except DataRefusedError as refusal:
        refused = str(refusal)
    return Look(card, {}, counts if shows_counts else None, refused)


def _stand_ins(block: Block, reader: Format) -> Iterator[tuple[str, int]]:
    """Count the records of images and texts that were replaced by the stand-in because they cannot be read."""
    features = block.records.features
    if isinstance(reader, Pixels):
        is_one = (features == np.float32(reader.stand_in)).reshape(len(features), -1).all(axis=1)
        words = "not read as images, the stand-in"
    elif isinstance(reader, Texts):
        empty = reader.join * (len(reader.columns) - 1)
        is_one, words = np.array([text == empty for text in features], bool), "no text, the empty one"
    else:
        return
    yield f"{block.part}: records", len(features)
    if count := int(is_one.sum()):
        yield f"{block.part}: {words}", count


def _problems(part: str, file: Path, card: DataCard, reader: Table) -> Iterator[tuple[str, int]]:
    for rows in table.tables("test" if part == "test" else "train", file, reader):
        yield f"{part}: records", rows.num_rows
        for column in reader.columns:
            if column.name in rows.column_names:
                for problem, found in _of_column(column, rows[column.name], card, reader):
                    count = int(pc.sum(found).as_py() or 0)
                    if count:
                        yield f"{part}, column {column.name}: {problem}", count


def _of_column(
    column: Column, values: pa.ChunkedArray, card: DataCard, reader: Table
) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """The ways in which values would be changed or refused, each with a boolean array of the affected values."""
    if isinstance(column, Ignored | Date):
        return
    text = pc.utf8_trim_whitespace(pc.cast(values, pa.string()))
    absent = pc.fill_null(pc.is_in(text, value_set=pa.array(reader.missing, pa.string())), True)
    if isinstance(column, Label) and isinstance(card.target, Labels):
        yes = pc.is_in(text, value_set=pa.array(card.target.yes, pa.string()))
        no = pc.is_in(text, value_set=pa.array(("0", "0.0", "false", "False"), pa.string()))
        yield "neither yes nor 0, without the label", pc.invert(pc.or_(yes, no))
    elif isinstance(column, Label) and isinstance(card.target, Number):
        target = Numeric(name=column.name, kind="numeric", bounds=card.target.bounds)
        yield from _of_column(target, values, card, reader)
    elif isinstance(column, Label):
        known = [one for name in card.classes for one in column.spellings.get(name, (name,))]
        yield (
            "refused, of none of the classes",
            pc.invert(pc.is_in(text, value_set=pa.array(known, pa.string()))),
        )
    elif isinstance(column, Categorical):
        known = list(column.categories)
        into = "counted as other" if column.unknown == "other" else "without a category, zeros"
        yield into, pc.invert(pc.is_in(text, value_set=pa.array(known, pa.string())))
    elif isinstance(column, Numeric | Binned):
        words = "refused, missing" if column.missing == "refuse" else f"missing, taken as {column.missing}"
        yield words, absent
        is_number = pc.match_substring_regex(
            pc.fill_null(text, ""), r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
        )
        yield "refused, no number", pc.and_(pc.invert(absent), pc.invert(is_number))
        if isinstance(column, Numeric):
            numbers = pc.cast(pc.if_else(is_number, text, None), pa.float64())
            low, high = column.bounds
            yield f"clamped to {low:g}", pc.fill_null(pc.less(numbers, low), False)
            yield f"clamped to {high:g}", pc.fill_null(pc.greater(numbers, high), False)
