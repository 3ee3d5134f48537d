"""Check a data card and its files for the owner before anything is spent: checksums, and values that would change.

Counts are made without noise, so they are only for the owner. They are not written, logged or kept, and of private
records numbers are shown only on request, and otherwise words.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from algorithms.extension import source_digest
from data.card import DataCard, DataRefusedError, data_card
from data.files import PUBLIC_KEY, RAW, FileSources, checksum_for, fetch, owner_key
from data.formats import (
    Binned,
    Categorical,
    Column,
    Csv,
    Date,
    Format,
    Hashed,
    Ignored,
    Images,
    Label,
    Numeric,
    Own,
    Pixels,
    Query,
    Reviews,
    Rows,
    Source,
    Table,
    Texts,
    Timestamp,
)
from data.readers import encoding, images
from data.readers.encoding import check_columns
from data.readers.records import RecordChunk, files_in, stand_ins
from data.readers.rows import tables
from data.reading import Digests, block_files, block_names, read, read_blocks, snapshot
from data.targets import Classes, Labels, Number
from tasks.card_questions import questions_about
from tasks.config import data_mirror, database_url, home
from tasks.prepare import reader_of
from tasks.table_remarks import (
    SHOWN_ABOVE,
    TrainingValues,
    fault_of_header,
    fault_of_text,
    in_words,
    remarks_on,
)

_REFUSED_SOURCE = encoding.ColumnSource("refused")
"""How a refusal of the reader begins, where it would name file and column."""


@dataclass(frozen=True)
class DataFindings:
    """The findings.

    checksums: by path, the line with key and checksum for each file whose checksum on the card is wrong. counts: for
    each column, how many values would be changed or refused, and why; None if not requested. refused: why the data
    cannot be used, or None. warning: what the card's owner has to see to, or None. remarks: what the owner should look
    at, in words; of private records, too, since nobody else is told.
    """

    card: DataCard
    checksums: Mapping[str, str]
    counts: Mapping[str, int] | None
    refused: DataRefusedError | None
    warning: str | None = None
    remarks: tuple[str, ...] = ()


def check_data(name: str, root: Path, *, counted: bool) -> DataFindings:
    """Check the data set of a card in the checkout at `root`.

    name: name of the data set, or path of its card. counted: whether to count values of private records. Raises
    DataRefusedError if the card is missing or invalid.
    """
    path = Path(name)
    is_path = path.suffix == ".yaml"
    folder = path.parent if is_path else root / "data" / "cards"
    report = _check_card(data_card(path.stem if is_path else name, folder), root, counted=counted)
    about_card = (*_about_held_out(report.card), *_about_checksums(report.card))
    return replace(report, remarks=(*about_card, *report.remarks))


def _about_held_out(card: DataCard) -> list[str]:
    """Why held-out records of a private data set are public, where the card says it; else it is asked."""
    if card.holdout_why is None:
        return []
    return [f"the held-out records are declared public, and their exact metrics leave: {card.holdout_why}"]


def _about_checksums(card: DataCard) -> list[str]:
    """Private files by whose checksum anyone can test a guess of them."""
    plain = [role for role, file in card.files.items() if file.path and file.sha256 and role != "words"]
    if card.public or not plain:
        return []
    return [
        f"the card has sha256 of the private {' and '.join(plain)}, by which whoever sees the card can test a guess of"
        " all records; write keyed_sha256, with 64 zeros first"
    ]


def _check_card(card: DataCard, root: Path, *, counted: bool) -> DataFindings:
    key = PUBLIC_KEY if card.public else owner_key(home())
    if card.blocks is not None:
        return _check_blocks(card, card.blocks, root, counted=counted, key=key)
    if right := _right_checksums(card, root, key):
        first = next(iter(right))
        altered = DataRefusedError(
            "{name} has another checksum than its card declares", code="altered_file", name=first
        )
        return DataFindings(card, right, None, altered)
    counts = Counter[str]()
    refused, used, files, labels = None, 0, dict[str, Path](), set[int]()
    values = TrainingValues(card, card.reader) if isinstance(card.reader, Table) else None
    has_values = False
    try:
        files = fetch(card, FileSources(root=root, mirror=data_mirror(), cache=root / RAW), key=key)
        if isinstance(card.reader, Table):
            for part in sorted(files, key="train".__ne__):
                into = values if part == "train" else None
                for problem, count in _problems(part, files[part], card, card.reader, into):
                    counts[problem] += count
                has_values |= part == "train"
        if isinstance(card.reader, Images):
            for part, folder in files.items():
                others = len(files_in(folder)) - len(images.image_files(folder, card.classes))
                if others:
                    counts[f"{part}: files that are not PNG or JPEG in a class's folder, ignored"] = others
        as_texts = card.has_texts and not isinstance(card.reader, Reviews)
        for chunk in read(card, files, key=key, own_reader=reader_of(card.reader), as_texts=as_texts):
            for problem, count in _stand_ins(chunk, card.reader):
                counts[problem] += count
            used += len(chunk.records)
            if isinstance(card.label_type, Classes):
                labels.update(np.unique(chunk.records.labels).tolist())
        rows = sum(count for problem, count in counts.items() if problem.endswith(": records"))
        if isinstance(card.reader, Table) and card.person is not None and rows > used:
            counts["rows left out: of nobody, of people in the test file, or beyond per_person"] = rows - used
    except DataRefusedError as refusal:
        refused = refusal
    remarks = questions_about(card, () if values is None else values.names)
    remarks += [*_of_bounds(card, counts), *_in_words(counts)]
    if len(labels) == 1 and not isinstance(card.reader, Table | Rows):
        remarks.append("only one class is in the files, so there is nothing to learn")
    if values is not None and has_values:
        remarks += values.remarks()
    elif "train" in files:
        remarks += _of_the_rows(card, files["train"])
    return DataFindings(card, {}, counts if counted or card.public else None, refused, remarks=tuple(remarks))


def _right_checksums(card: DataCard, root: Path, key: bytes) -> dict[str, str]:
    """What the card would have to say of files, or of the user's own reader, that do not fit it, by their names."""
    right = {
        file.path: checksum
        for file in card.files.values()
        if file.path
        and (root / file.path).exists()
        and (checksum := checksum_for(root / file.path, file, key=key))
    }
    reader = card.reader
    if isinstance(reader, Own) and (source := source_digest(reader.factory)) != reader.source_sha256:
        right[reader.factory] = f"source_sha256: {source}"
    return right


def _check_blocks(card: DataCard, source: Source, root: Path, *, counted: bool, key: bytes) -> DataFindings:
    """Read all blocks that are there now, each whole, and the card's test file."""
    counts, refused, paths = Counter[str](), None, dict[str, Path]()
    try:
        with snapshot(card, database_url(source)) as database:
            names, paths = block_names(card, root=root, url=database), block_files(card, root=root)
            if not names:
                raise DataRefusedError(
                    "there is no block of {dataset!r} yet; put the first one there.",
                    code="no_blocks",
                    dataset=card.name,
                )
            files = fetch(card, FileSources(root=root, mirror=data_mirror(), cache=root / RAW), key=key)
            if isinstance(card.reader, Table):
                for path in paths.values():
                    for problem, count in _problems("blocks", path, card, card.reader):
                        counts[problem] += count
            digests = Digests(card.population, key=key)
            as_texts = card.has_texts
            for chunk in read_blocks(
                card, names, files, root=root, url=database, digests=digests, key=key, as_texts=as_texts
            ):
                for problem, count in _stand_ins(chunk, card.reader):
                    counts[problem] += count
    except DataRefusedError as refusal:
        refused = refusal
    faults = [
        fault
        for path in paths.values()
        if refused is not None and isinstance(card.reader, Csv) and path.is_file()
        if (fault := fault_of_text(path, card.reader)) is not None
    ]
    remarks = (*questions_about(card), *_in_words(counts), *faults)
    shown = counts if counted or card.public else None
    return DataFindings(card, {}, shown, refused, _about_blocks(source), remarks)


def _of_bounds(card: DataCard, counts: Mapping[str, int]) -> list[str]:
    """Remarks on numbers of which no value in the training file lies between the bounds."""
    columns = card.reader.columns if isinstance(card.reader, Table) else ()
    remarks = []
    for column in (column for column in columns if isinstance(column, Numeric)):
        of_column = f"train, column {column.name}: "
        clamped = sum(count for problem, count in counts.items() if problem.startswith(f"{of_column}clamped"))
        missing = sum(count for problem, count in counts.items() if problem.startswith(f"{of_column}missing"))
        if 0 < clamped == counts.get("train: records", 0) - missing:
            low, high = column.bounds
            remarks.append(
                f"column {column.name}: none of its values lies between its bounds, {low:g} and {high:g}, so a model"
                " learns nothing of it; correct the bounds, by what is known without looking"
            )
    return remarks


def _in_words(counts: Mapping[str, int]) -> list[str]:
    """Remarks on the changes that more than a hundredth of the values of a column undergo."""
    sentences = []
    for problem, count in counts.items():
        part, _, _ = problem.partition(",") if ", column " in problem else problem.partition(":")
        records = counts.get(f"{part}: records", 0)
        if records and problem != f"{part}: records" and count > SHOWN_ABOVE * records:
            sentences.append(f"{problem}: {in_words(min(1.0, count / records))} of the records")
    return sentences


def _of_the_rows(card: DataCard, file: Path) -> list[str]:
    """Remarks on the rows of the training file; where it cannot be read, on the line that is wrong."""
    if isinstance(card.reader, Csv) and (fault := fault_of_header(file, card.reader)) is not None:
        return [fault]
    try:
        return remarks_on(card, file)
    except DataRefusedError:
        fault = fault_of_text(file, card.reader) if isinstance(card.reader, Csv) else None
        return [] if fault is None else [fault]


def _about_blocks(source: Source) -> str | None:
    """A query may give a row another block each time, which nothing but its database could tell."""
    if not isinstance(source, Query):
        return None
    return (
        f"The blocks are made by {source.divides_by}, and a database can change what a column holds: a row that moves"
        " between runs is charged in several blocks, where each counts it once. Take a column whose value never changes"
        " once the row is there, such as the date of its entry, and no function of the present time."
    )


def _stand_ins(chunk: RecordChunk, reader: Format) -> Iterator[tuple[str, int]]:
    """Count the records of images and texts that were replaced by the stand-in because they cannot be read."""
    if not isinstance(reader, Pixels | Texts):
        return
    yield f"{chunk.part}: records", len(chunk.records)
    if count := int(stand_ins(chunk.records.features, reader).sum()):
        words = "no text, the empty one" if isinstance(reader, Texts) else "not read as images, the stand-in"
        yield f"{chunk.part}: {words}", count


def _problems(
    part: str, file: Path, card: DataCard, reader: Table, values: TrainingValues | None = None
) -> Iterator[tuple[str, int]]:
    """How many values of each column would be changed or refused, and why. values: what to count them in, too."""
    for rows in tables(
        "test" if part == "test" else "train", file, reader, card.label_type, names_rows=card.public
    ):
        if values is not None:
            values.add(rows)
        check_columns(rows, reader.in_the_file, file)
        yield f"{part}: records", rows.num_rows
        for column in reader.columns:
            if not isinstance(column, Ignored | Date):
                for problem, count in _of_column(column, rows[column.name], card, reader):
                    yield f"{part}, column {column.name}: {problem}", count


def _of_column(
    column: Column, values: pa.ChunkedArray, card: DataCard, reader: Table
) -> Iterator[tuple[str, int]]:
    """The ways in which values would be changed or refused, each with the number of these values."""
    try:
        _changes(column, values[:0], card, reader)
    except DataRefusedError as refusal:  # because of the column's type
        if len(values):
            yield _reason(refusal), len(values)
        return
    if isinstance(column, Numeric | Binned):  # most numbers differ, and counting equal ones takes longest
        with suppress(DataRefusedError):
            changes = _changes(column, values, card, reader)
            yield from (
                (problem, int(changed.sum())) for problem, changed in changes.items() if changed.any()
            )
            return
    different = pa.chunked_array([values.value_counts()])
    counts = pc.struct_field(different, "counts").to_numpy()
    yield from _problem_counts(column, pc.struct_field(different, "values"), counts, card, reader)


def _problem_counts(
    column: Column, values: pa.ChunkedArray, counts: NDArray[np.int64], card: DataCard, reader: Table
) -> Iterator[tuple[str, int]]:
    """The same for different values and how often each occurs.

    The reader refuses all values together, so those that it refuses are found by dividing them again and again.
    """
    try:
        for problem, is_changed in _changes(column, values, card, reader).items():
            if is_changed.any():
                yield problem, int(counts[is_changed].sum())
    except DataRefusedError as refusal:
        if len(values) == 1:
            yield _reason(refusal), int(counts[0])
            return
        step = max(1, len(values) // 8)
        for start in range(0, len(values), step):
            rows = slice(start, start + step)
            yield from _problem_counts(column, values[rows], counts[rows], card, reader)


def _changes(
    column: Column, values: pa.ChunkedArray, card: DataCard, reader: Table
) -> dict[str, NDArray[np.bool_]]:
    """The ways in which the reader changes values, each with the changed ones, bool [n].

    Raises DataRefusedError if the reader refuses any of them.
    """
    if isinstance(column, Label) and isinstance(card.target, Number):
        column = Numeric(name=column.name, kind="numeric", bounds=card.target.bounds)
    if isinstance(column, Categorical):
        into = "counted as other" if column.unknown == "other" else "without a category, zeros"
        positions = encoding.positions(values, column.categories, _REFUSED_SOURCE)
        return {into: positions == len(column.categories)}
    if isinstance(column, Label) and isinstance(card.target, Labels):
        spellings = (*card.target.yes, "0", "0.0", "false", "False", "FALSE")
        return {"neither yes nor 0, without the label": ~encoding.holds(values, spellings, _REFUSED_SOURCE)}
    if isinstance(column, Label):
        encoding.classes(values, column, card.classes, _REFUSED_SOURCE)
        return {}
    if isinstance(column, Timestamp):
        *_, elapsed = encoding.moments(values, column, reader.missing, _REFUSED_SOURCE)
        return {"missing or not written as 2020-01-31, taken as missing": np.isnan(elapsed)}
    if isinstance(column, Hashed):
        return {"missing": np.isnan(encoding.hash_cells(values, column, reader.missing, _REFUSED_SOURCE))}
    assert isinstance(column, Numeric | Binned)
    refuses = column.missing == "refuse"
    numbers, absent = encoding.numbers(values, reader.missing, _REFUSED_SOURCE, refuses_missing=refuses)
    as_cell = reader.cells is not None  # a missing value has cells of its own, and nothing replaces it
    changes = {"missing" if as_cell else f"missing, taken as {column.missing}": absent}
    if isinstance(column, Numeric):
        low, high = column.bounds
        changes[f"clamped to {low:g}"] = ~absent & (numbers < low)
        changes[f"clamped to {high:g}"] = ~absent & (numbers > high)
    return changes


def _reason(refusal: DataRefusedError) -> str:
    """Why values are refused, without what to do."""
    return str(refusal).partition(";")[0]
