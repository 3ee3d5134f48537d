"""Which records are set apart for testing, where the source does not say: each record decides for itself."""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from data.card import Split
from data.records import Block, Records

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
    return hashes.astype(np.float64) < rule.test_fraction * 2.0**64


def _canonical(records: Records, start: int, stop: int) -> NDArray[np.uint8]:
    """One row of bytes a record: features as little-endian float32 without negative zeros, label as int64."""
    features = (records.features[start:stop].reshape(stop - start, -1) + 0.0).astype("<f4")
    labels = records.labels[start:stop, None].astype("<i8")
    return np.hstack([features.view(np.uint8), labels.view(np.uint8)])


def _hashes(salted: "hashlib.blake2b", rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    digests = bytearray()
    for row in rows:
        hasher = salted.copy()
        hasher.update(row)
        digests += hasher.digest()
    return np.frombuffer(digests, dtype="<u8")
