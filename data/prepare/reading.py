"""Which records are set apart for testing, where the source does not say: each record decides for itself.

From the files of a card to records: the reader of its format, the split it declares, and the checks.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.readers import builtin, cifar, idx, reviews
from data.readers import builtin as synthetic
from data.readers.records import Block, Records, checked
from data.schema.card import DataCard, Split
from data.schema.errors import DataRefusedError
from data.schema.formats import Cifar, Digits, Idx, Reviews, Synthetic

_BLOCK = 16384


def split(blocks: Iterable[Block], rule: Split) -> Iterator[Block]:
    """Training and test records by `rule`, in the order they came, whatever part they were in.

    A record's side is a function of its own features and label and of the rule's public salt: adding or
    removing a record moves no other one, and equal records stay together.
    """
    for block in blocks:
        test = is_test(block.records, rule)
        yield Block("train", block.records[~test])
        yield Block("test", block.records[test])


def is_test(records: Records, rule: Split) -> NDArray[np.bool_]:
    """For each record, whether a keyed BLAKE2b hash of its bytes falls into the test fraction; bool [n]."""
    salted = hashlib.blake2b(key=hashlib.sha256(rule.salt.encode()).digest(), digest_size=8)
    hashes = np.empty(len(records), dtype="<u8")
    for start in range(0, len(records), _BLOCK):
        stop = min(start + _BLOCK, len(records))
        hashes[start:stop] = _hashes(salted, _canonical(records, start, stop))
    found: NDArray[np.bool_] = hashes.astype(np.float64) < rule.test_fraction * 2.0**64
    return found


def _canonical(records: Records, start: int, stop: int) -> NDArray[np.uint8]:
    """One row of bytes a record: features as little-endian float32 without negative zeros, label as int64 or,
    where it is a number, as float32."""
    features = (records.features[start:stop].reshape(stop - start, -1) + 0.0).astype("<f4")
    is_number = records.labels.dtype.kind == "f"
    labels = (records.labels[start:stop, None] + 0).astype("<f4" if is_number else "<i8")
    return np.hstack([features.view(np.uint8), labels.view(np.uint8)])


def _hashes(salted: "hashlib.blake2b", rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    digests = bytearray()
    for row in rows:
        hasher = salted.copy()
        hasher.update(row)
        digests += hasher.digest()
    return np.frombuffer(digests, dtype="<u8")


def read(card: DataCard, files: Mapping[str, Path]) -> Iterator[Block]:
    """The training and test records of `card` in blocks, checked against what it declares.

    Tables and coloured images are read block by block; what other formats hold is small, and comes whole. files: by
    role, as `data.prepare.fetch` gives them. Raises DataRefusedError, while the blocks are taken and without a
    record's value in the message.
    """
    return checked(card, _read(card, files))


def read_texts(card: DataCard, files: Mapping[str, Path]) -> Iterator[Block]:
    """The records of `card` as they are written, for a text encoder; the features are arrays of strings [n].

    Raises DataRefusedError as `read` does, and for a card whose records are no texts.
    """
    if not isinstance(card.reader, Reviews):
        raise DataRefusedError(f"the records of {card.name!r} are no texts; name another encoder.")
    return checked(card, reviews.read_texts(files, classes=card.classes))


def word_list(card: DataCard, files: Mapping[str, Path]) -> bytes | None:
    """The public words that the tokens of `card` stand for, one a line in the order of their tokens; else None.

    Raises DataRefusedError as `read` does, and where they are not those that the card declares by words_sha256.
    """
    return reviews.word_list(files, card.reader) if isinstance(card.reader, Reviews) else None


def _read(card: DataCard, files: Mapping[str, Path]) -> Iterator[Block]:
    blocks = _of_the_source(card, files)
    return blocks if card.split is None else split(blocks, card.split)


def _of_the_source(card: DataCard, files: Mapping[str, Path]) -> Iterator[Block]:
    if isinstance(card.reader, Idx):
        return idx.read(files, shape=card.input_shape)
    if isinstance(card.reader, Digits):
        return builtin.read_digits(card.reader, shape=card.input_shape)
    if isinstance(card.reader, Synthetic):
        return synthetic.read_synthetic(card.reader, card.records, features=card.input_shape[0])
    if isinstance(card.reader, Cifar):
        return cifar.read(files, card.reader, shape=card.input_shape)
    if isinstance(card.reader, Reviews):
        return reviews.read(files, card.reader, classes=card.classes)
    from data.readers import table  # pyarrow takes half a second to import, and only tables need it

    return table.read_table(files, card.reader, known=card.known)
