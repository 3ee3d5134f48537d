"""Read the records from a card's files: by the reader of its format, with the split that it declares, and checked.

If the source has no test set, each record's own content decides whether it is held out.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from data.prepare.secret_key import PUBLIC_KEY, keyed
from data.readers import builtin, cifar, idx, images, reviews
from data.readers.records import PARTS, Block, Records, checked
from data.schema.card import DataCard, Split
from data.schema.formats import OF_ROWS, Cifar, Digits, Idx, Images, Reviews, Synthetic, Texts

if TYPE_CHECKING:
    from data.readers.of_rows import RowReader

_BLOCK = 16384


def split(blocks: Iterable[Block], rule: Split) -> Iterator[Block]:
    """Divide records into training and test records by `rule`, in their order and regardless of their previous part.

    A record's side depends only on its own features and label, or on its key if it has one, and on the rule's public
    salt. So adding or removing a record moves no other record, and equal records, or equal keys, stay together.
    """
    for block in blocks:
        test = is_test(block.records, rule)
        yield replace(block, part="train", records=block.records[~test])
        yield replace(block, part="test", records=block.records[test])


def is_test(records: Records, rule: Split) -> NDArray[np.bool_]:
    """Whether a keyed BLAKE2b hash of each record's bytes is in the test fraction; bool [n]."""
    salted = hashlib.blake2b(key=hashlib.sha256(rule.salt.encode()).digest(), digest_size=8)
    keys = records.keys
    if keys is None and records.features.dtype == object:
        keys = [text.encode() for text in records.features]
    if keys is not None:
        hashes = _hashes(salted, keys)
    else:
        hashes = np.empty(len(records), dtype="<u8")
        for start in range(0, len(records), _BLOCK):
            stop = min(start + _BLOCK, len(records))
            hashes[start:stop] = _hashes(salted, _canonical(records, start, stop))
    found: NDArray[np.bool_] = hashes.astype(np.float64) < rule.test_fraction * 2.0**64
    return found


def _canonical(records: Records, start: int, stop: int) -> NDArray[np.uint8]:
    """One row of bytes per record: features as little-endian float32 without negative zeros, label as int64 or
    float32.
    """
    features = (records.features[start:stop].reshape(stop - start, -1) + 0.0).astype("<f4")
    is_number = records.labels.dtype.kind == "f"
    labels = (records.labels[start:stop].reshape(stop - start, -1) + 0).astype("<f4" if is_number else "<i8")
    return np.hstack([features.view(np.uint8), labels.view(np.uint8)])


def _hashes(salted: "hashlib.blake2b", rows: Iterable[Any]) -> NDArray[np.uint64]:
    digests = bytearray()
    for row in rows:
        hasher = salted.copy()
        hasher.update(row)
        digests += hasher.digest()
    return np.frombuffer(digests, dtype="<u8")


Own = Callable[[Mapping[str, Path]], Iterable[Block]]
"""A reader of the user's own, as its factory returns it."""


def read(
    card: DataCard,
    files: Mapping[str, Path],
    *,
    key: bytes = PUBLIC_KEY,
    own: Own | None = None,
    as_texts: bool = False,
) -> Iterator[Block]:
    """Read the training and test records of `card` in blocks, checked against what it declares.

    Tables, texts and coloured images are read block by block; other formats are small and come as one block.

    Args:
        card: The card of the data set.
        files: Files by role, as `data.prepare.fetch` returns them.
        key: The owner key, which decides which of a person's records are used.
        own: The reader, if the card names one of the user's own.
        as_texts: Return texts for a text encoder: the features are then arrays of strings [n].

    Raises:
        DataRefusedError: During iteration, without a record's value in the message.
    """
    blocks = _of_the_source(card, files, key=key, own=own, as_texts=as_texts)
    return checked(card, blocks if card.split is None else split(blocks, card.split))


def word_list(card: DataCard, files: Mapping[str, Path]) -> bytes | None:
    """The public words of the tokens of `card`, one per line in the order of their tokens; None without tokens.

    Raises DataRefusedError as `read` does, and if the words do not match words_sha256 of the card.
    """
    if isinstance(card.reader, Reviews):
        return reviews.word_list(files, card.reader)
    if isinstance(card.reader, Texts) and card.reader.tokens is not None:
        return reviews.word_list(files, card.reader.tokens.as_reviews)
    return None


def row_reader(
    card: DataCard, files: Mapping[str, Path], *, key: bytes, as_texts: bool = False
) -> "RowReader | None":
    """The reader of the card's rows; None if its format has no rows."""
    if not isinstance(card.reader, OF_ROWS):
        return None
    from data.readers.of_rows import RowReader  # pyarrow takes half a second to import, and only rows need it

    secret = keyed(key, ["records of a person", card.population])
    return RowReader(
        card.reader, card.known, card.input_shape, files, card.person, secret, as_texts, card.public
    )


def _of_the_source(
    card: DataCard, files: Mapping[str, Path], *, key: bytes, own: Own | None, as_texts: bool
) -> Iterator[Block]:
    if isinstance(card.reader, Idx):
        return idx.read(files, shape=card.input_shape)
    if isinstance(card.reader, Digits):
        return builtin.read_digits(card.reader, shape=card.input_shape)
    if isinstance(card.reader, Synthetic):
        return builtin.read_synthetic(card.reader, card.records, features=card.input_shape[0])
    if isinstance(card.reader, Cifar):
        return cifar.read(files, card.reader, shape=card.input_shape)
    if isinstance(card.reader, Reviews):
        if as_texts:
            return reviews.read_texts(files, classes=card.classes)
        return reviews.read(files, card.reader, classes=card.classes)
    if isinstance(card.reader, Images):
        declared = card.reader
        return (
            Block(part, records)
            for part in PARTS
            if part in files
            for records in images.read(files[part], declared, card.classes, card.input_shape)
        )
    rows = row_reader(card, files, key=key, as_texts=as_texts)
    if rows is not None:
        return rows.read()
    if own is None:
        raise TypeError(f"the reader of {card.name!r} is not given")
    return iter(own(files))
