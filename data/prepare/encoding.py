"""Encoding: replace each record by its features from a frozen public network.

Each record is processed independently, so this costs nothing. Encoded portions are kept until all records are encoded,
so a killed prepare stage can be resumed.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from data.prepare.description import EncoderFacts
from data.prepare.files import write_whole
from data.prepare.scattering import mapped
from data.readers.records import Block, Features, Records, add_features
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
    loaded, lock, done = cache(load), Lock(), 0
    shape = (2, facts.width) if known.kind == "tags" else (facts.width,)

    def features_of(records: Features) -> Features:
        digest = hashlib.sha256(f"{facts.name} {facts.sha256} {facts.settings} ".encode())
        add_features(records, digest)
        path = kept / f"{digest.hexdigest()}.npy"
        with suppress(OSError, ValueError):
            found: Features = np.load(path)
            if found.shape == (len(records), *shape):
                return found
        with lock:  # the weights are loaded at first use, once for all threads
            encode = loaded()
        made = encode(records)
        write_whole(path, lambda fresh: _save(fresh, made), mode=0o600)
        return made

    for some, features in mapped(blocks, features_of, at_once=_AT_ONCE):
        done += len(features)
        say(done)
        own = known.labelled(features, some.records.labels, facts.padding)
        yield replace(some, records=Records(*own, some.records.keys))
    shutil.rmtree(kept)


def _save(path: Path, values: Features) -> None:
    with path.open("wb") as file:
        np.save(file, values)
