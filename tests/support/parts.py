"""Records of both parts in memory, as tests compare them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from data.readers.records import PARTS, RecordBatch, RecordChunk, SplitPart


@dataclass(frozen=True)
class Parts:
    """The training records and the public test records."""

    train: RecordBatch
    test: RecordBatch


def whole(chunks: Iterable[RecordChunk]) -> Parts:
    """Concatenate all chunks of each part; a part without chunks has no records and no shape."""
    read: dict[SplitPart, list[RecordBatch]] = {part: [] for part in PARTS}
    for chunk in chunks:
        read[chunk.part].append(chunk.records)
    return Parts(*(_joined(read[part]) for part in PARTS))


def _joined(records: list[RecordBatch]) -> RecordBatch:
    if not records:
        return RecordBatch(np.zeros((0,), np.float32), np.zeros((0,), np.int64))
    return RecordBatch(
        np.concatenate([r.features for r in records]), np.concatenate([r.labels for r in records])
    )
