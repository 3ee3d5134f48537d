"""Prepare records to predict on like a model's training records, by the part of the data card in the model's file.

The records need no labels; if there are labels, they are ignored. The result for each record depends only on the record
and the card.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from data.card import DataCard, DataRefusedError
from data.formats import (
    Datasets,
    Digits,
    Format,
    ImageTable,
    Own,
    Pixels,
    Reviews,
    Rows,
    Table,
    Texts,
    Tokens,
)
from data.preparation import Preparation, target_in
from data.readers import encoding, images, rows, texts
from data.readers.records import Features, OwnReader, RecordBatch, RecordChunk, files_in
from data.targets import Classes, Tags, Target
from data.transforms import scatter

_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_FORMATS = {".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}
_AT_ONCE = 1024
_INK = 16.0
"""The largest pixel value of scikit-learn's digits, whose pixels are 0..16."""


@dataclass(frozen=True)
class NewRecords:
    """Records to predict on: a name for each (a row's number from 1, or a file's), and their features [n, *shape]."""

    names: tuple[str, ...]
    features: Features


def records_in(
    path: Path,
    preparation: Preparation | None,
    shape: tuple[int, ...],
    *,
    tokens: int | None = None,
    encode: Callable[[Any], Features] | None = None,
    own_reader: OwnReader | None = None,
) -> Iterator[NewRecords]:
    """Read the records of a file or folder in portions, as features of `shape`.

    path: CSV or Parquet for a table; an image, or a folder of images; a text file with one text per line, or a folder
    of text files; or, for any data, an .npy array of prepared features [n, *shape]. tokens: how many there are, if the
    features are tokens. encode: the function of the encoder, if the preparation names one. own_reader: the user's own
    reader, if the preparation names one. A row that cannot be read becomes the stand-in, as in training. Raises
    DataRefusedError if the path is missing or of another kind, or
    the card does not allow a record.
    """
    if not path.exists():
        raise DataRefusedError(
            "there is no {path}; give a file or folder of records to predict on.",
            code="missing_file",
            path=path,
        )
    if path.suffix == ".npy":
        yield from _number(_arrays(path, shape, tokens))
        return
    if preparation is None:
        raise DataRefusedError(
            "the model does not say how its records were prepared; give prepared features in an .npy file,"
            " or train again.",
            code="preparation_unknown",
        )
    card, words = _card(preparation), None if encode else preparation.words
    records = _read_by_card(path, card, words=words, own_reader=own_reader)
    if encode is not None:
        yield from (NewRecords(batch.names, encode(batch.features)) for batch in records)
    elif preparation.transform == "none":
        yield from records
    else:
        for batch in records:
            whole = RecordChunk("test", RecordBatch(batch.features, np.zeros(len(batch.names), np.int64)))
            features = [block.records.features for block in scatter(card, [whole])]
            yield NewRecords(batch.names, np.concatenate(features))


def _read_by_card(
    path: Path, card: DataCard, *, words: tuple[str, ...] | None, own_reader: OwnReader | None
) -> Iterator[NewRecords]:
    """The records as the card's reader reads them, before an encoder or a transform; raises as `records_in` does.

    words: of the vocabulary; None to leave texts as they are.
    """
    reader = card.reader
    if isinstance(reader, Own) and own_reader is not None:
        return _number(block.records.features for block in own_reader({"new": path}))
    if isinstance(reader, Table):
        if path.is_dir() and not isinstance(reader, Datasets):
            raise DataRefusedError(
                "{path} is a folder; give a table, as CSV or Parquet.", code="unreadable_file", path=path
            )
        return _number(_rows(path, reader))
    if isinstance(reader, ImageTable) and _form(path):
        return _number(_row_images(path, card, reader))
    if card.has_texts:
        read = _row_texts(path, reader, card.target) if isinstance(reader, Texts) else _each_text(path)
        return _texts(read, reader, words)
    if len(card.input_shape) == 3:
        return _images(path, card)
    raise DataRefusedError(
        "the records of {dataset!r} come from no file of their own; give prepared features in an .npy file.",
        code="preparation_unknown",
        dataset=card.name,
    )


def _card(preparation: Preparation) -> DataCard:
    """The part of the card that is in the model's file."""
    return DataCard.model_construct(
        name=preparation.name,
        classes=preparation.classes,
        shape=preparation.shape,
        target=target_in(preparation.target),
        reader=preparation.format,
        files={},
    )


def _number(portions: Iterable[Features]) -> Iterator[NewRecords]:
    """Records by their numbers from 1."""
    count = 0
    for features in portions:
        yield NewRecords(tuple(str(count + index) for index in range(1, len(features) + 1)), features)
        count += len(features)


def _arrays(path: Path, shape: tuple[int, ...], tokens: int | None) -> Iterator[Features]:
    try:
        features = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        raise DataRefusedError(
            "{path} is not an .npy array; write it by numpy.save.", code="unreadable_file", path=path
        ) from None
    if features.shape[1:] != shape:
        raise DataRefusedError(
            "{path} holds records of the shape {shape}, and the model takes {expected}.",
            code="unlike_training",
            path=path,
            shape=list(features.shape[1:]),
            expected=list(shape),
        )
    if features.dtype.kind not in ("fiub" if tokens is None else "iu"):
        kind = "numbers" if tokens is None else f"whole numbers from 0 to {tokens - 1}"
        raise DataRefusedError(
            "{path} holds {dtype}, and the model takes {expected}; write it so.",
            code="unlike_training",
            path=path,
            dtype=features.dtype,
            expected=kind,
        )
    for start in range(0, len(features), _AT_ONCE):
        batch = np.array(features[start : start + _AT_ONCE])
        if tokens is None:
            yield batch.astype(np.float32)
            continue
        if batch.size and not 0 <= batch.min() <= batch.max() < tokens:
            raise DataRefusedError(
                "{path} holds tokens from {lowest} to {highest}, and the model knows 0 to {last}.",
                code="unlike_training",
                path=path,
                lowest=batch.min(),
                highest=batch.max(),
                last=tokens - 1,
            )
        yield batch.astype(np.int64)


def _rows(path: Path, reader: Table) -> Iterator[Features]:
    for table in rows.in_portions(rows.tables_in(path, reader), reader):
        features = encoding.features(table, reader, str(path))
        for first in range(0, len(features), _AT_ONCE):
            yield features[first : first + _AT_ONCE]


def _form(path: Path) -> str | None:
    """The format of rows with columns; None for a path of texts or images themselves."""
    if path.is_dir():
        return "datasets" if (path / "state.json").is_file() else None
    return _FORMATS.get(path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix)


def _tables(path: Path, reader: Rows, target: Target | None) -> Iterator[Any]:
    # The stand-in for an invalid line has a label, which is ignored.
    label_type = target or Classes(classes=("-",))
    return rows.tables("test", path, reader.model_copy(update={"format": _form(path)}), label_type)


def _row_texts(path: Path, reader: Texts, target: Target | None) -> Iterator[tuple[str, str]]:
    tags = target if isinstance(target, Tags) else None
    if _form(path) is None:
        for name, text in _each_text(path):
            yield name, texts.truncate(text, reader) if tags is None else texts.apart(text.split(), tags)
        return
    number = 0
    for table in _tables(path, reader, target):
        for text in texts.join_texts(table, reader, tags)[0]:
            number += 1
            yield str(number), text


def _row_images(path: Path, card: DataCard, reader: ImageTable) -> Iterator[Features]:
    """Images in rows; if the column has paths instead of bytes, they are relative to the folder of the table."""
    for table in _tables(path, reader, card.target):
        has_bytes = _form(path) in ("parquet", "datasets") and images.has_bytes(table, reader)
        beside = None if has_bytes else path.parent
        features, _ = images.of_rows(table, reader, card.input_shape, beside)
        if len(features):
            yield features


def _texts(
    each: Iterator[tuple[str, str]], reader: Format, listed: Sequence[str] | None
) -> Iterator[NewRecords]:
    """Texts as tokens of the listed words, or unchanged without a list."""
    words = {word: index + 2 for index, word in enumerate(listed or ())}
    tokens_of = reader.tokens if isinstance(reader, Texts) else reader
    for names, values in _batches(each):
        if listed is None or not isinstance(tokens_of, Reviews | Tokens):
            lines = map(texts.without_breaks, values) if isinstance(reader, Reviews) else values
            yield NewRecords(names, np.array([*lines], dtype=object))
        else:
            yield NewRecords(names, texts.token_rows(values, words, length=tokens_of.length))


def _each_text(path: Path) -> Iterator[tuple[str, str]]:
    """The texts of a folder's files, byte by byte as in training, or the lines of a file that are not blank."""
    try:
        if path.is_dir():
            for file in files_in(path):
                if file.suffix.lower() == ".txt":
                    yield file.relative_to(path).as_posix(), file.read_bytes().decode()
            return
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield str(number), line.removesuffix("\n")
    except UnicodeDecodeError:
        raise DataRefusedError(
            "{path} holds a text that is not UTF-8; correct it.", code="unreadable_file", path=path
        ) from None


def _images(path: Path, card: DataCard) -> Iterator[NewRecords]:
    if path.is_dir():
        files = [file for file in files_in(path) if file.suffix.lower() in _IMAGES]
        named = {file.relative_to(path).as_posix(): file for file in files}
    else:
        named = {path.name: path}
    if not named:
        raise DataRefusedError(
            "{path} holds no images; give a folder of {formats} files.",
            code="unreadable_file",
            path=path,
            formats=", ".join(_IMAGES),
        )
    scale = np.float32(_INK if isinstance(card.reader, Digits) else 255.0)
    for names, chosen in _batches(iter(named.items())):
        if isinstance(card.reader, Pixels):  # as in training, but what cannot be read is refused
            yield NewRecords(names, images.pixels(chosen, card.reader, card.input_shape, strict=True)[0])
        else:
            pixels = np.stack([_pixels(file, card.input_shape) for file in chosen])
            yield NewRecords(names, (pixels / scale).clip(0.0, 1.0))


def _pixels(file: Path, shape: tuple[int, ...]) -> Features:
    """The pixels of an image file of the shape [channels, height, width]; raises DataRefusedError for another size."""
    channels, height, width = shape
    try:
        with Image.open(file) as opened:
            image = images.in_mode(opened, "L" if channels == 1 else "RGB")
    except (UnidentifiedImageError, OSError):
        raise DataRefusedError(
            "{path} is not an image, and the model reads images alone; take it out.",
            code="unreadable_file",
            path=file,
        ) from None
    if image.size != (width, height) or channels not in (1, 3):
        raise DataRefusedError(
            "{path} has {columns} x {rows} pixels, and the model was trained on {width} x {height};"
            " resize it as the training images were.",
            code="unlike_training",
            path=file,
            columns=image.size[0],
            rows=image.size[1],
            width=width,
            height=height,
        )
    pixels = np.asarray(image, np.float32)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _batches(each: Iterator[tuple[str, Any]]) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...]]]:
    """Names and values of some records at a time."""
    while portion := list(islice(each, _AT_ONCE)):
        names, values = zip(*portion, strict=True)
        yield names, values
