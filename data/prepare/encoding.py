"""Encoding: the features that a frozen public network makes of each record, in place of the record.

Each record is looked at by itself, so this costs nothing. What was encoded is kept until all is, and a prepare stage
that was killed goes on where it was.
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
    """The blocks with the features of each record in its place.

    Args:
        blocks: Of images as float32 [n, channels, height, width], or of texts as an array of strings [n].
        facts: Of the encoder.
        load: Reads its weights; called once something is to be encoded.
        known: What a label can be; those of tokens are made of these.
        kept: A folder for what was encoded until all is, for the owner alone; deleted at the end.
        say: Told how many records were encoded, now and then.
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
    """An encoder whose weights are read when it is first asked, once for all threads."""

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
