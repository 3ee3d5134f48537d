"""Encoding: replace each record by its features from a frozen public network.

Each record is processed independently, so this costs nothing. Encoded portions are kept until all records are encoded,
so a killed prepare stage can be resumed.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from data.prepare.description import EncoderFacts
from data.prepare.files import write_whole
from data.prepare.scattering import workers
from data.readers.records import Block, Features, Records
from data.schema.targets import Known

_AT_ONCE = 512
Encode = Callable[[Any], Features]


def encoded(
    blocks: Iterable[Block],
    facts: EncoderFacts,
    load: Callable[[], Encode],
    known: Known,
    *,
    kept: Path,
    say: Callable[[int], object],
) -> Iterator[Block]:
    """Replace the records of the blocks by their features.

    Args:
        blocks: Blocks of images as float32 [n, channels, height, width], or of texts as an array of strings [n].
        facts: The facts of the encoder.
        load: Loads its weights; called only if something has to be encoded.
        known: The target; if it has a label per token, labels are made from the tokens.
        kept: Folder for encoded portions, readable by the owner only; deleted at the end.
        say: Called with the number of encoded records, after each portion.
    """
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    (kept / ".gitignore").write_text("*\n", encoding="utf-8")
    encoder, done = _Lazy(load), 0
    shape = (2, facts.width) if known.kind == "tags" else (facts.width,)

    def features_of(records: Sequence[Any]) -> Features:
        path = kept / f"{_digest(facts, records)}.npy"
        with suppress(OSError, ValueError):
            found: Features = np.load(path)
            if found.shape == (len(records), *shape):
                return found
        made = encoder.get()(records)
        write_whole(path, lambda fresh: _save(fresh, made), mode=0o600)
        return made

    with workers() as (pool, count):
        for block in blocks:
            for some in block.portions(count * _AT_ONCE):
                made = pool.map(features_of, [one.records.features for one in some.portions(_AT_ONCE)])
                features = np.concatenate(list(made))
                done += len(features)
                say(done)
                own = known.labelled(features, some.records.labels, facts.padding)
                yield replace(some, records=Records(*own, some.records.keys))
    shutil.rmtree(kept)


class _Lazy:
    """An encoder whose weights are loaded at first use, once for all threads."""

    def __init__(self, load: Callable[[], Encode]) -> None:
        self._load, self._lock = load, Lock()
        self._made: Encode | None = None

    def get(self) -> Encode:
        """The encoder."""
        with self._lock:
            made = self._made = self._made or self._load()
            return made


def _digest(facts: EncoderFacts, records: Sequence[Any]) -> str:
    found = hashlib.sha256(f"{facts.name} {facts.sha256} {facts.settings} ".encode())
    if isinstance(records, np.ndarray) and records.dtype != object:
        found.update(np.ascontiguousarray(records).data)
    else:
        for text in records:
            found.update(f"{len(text.encode())} ".encode() + text.encode())
    return found.hexdigest()


def _save(path: Path, values: Features) -> None:
    with path.open("wb") as file:
        np.save(file, values)
