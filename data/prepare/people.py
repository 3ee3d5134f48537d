"""The rows of a person as one training record: [k, *shape], filled up with the person's first row, whose labels then
do not count.

A record that is removed is then a person, and what a person's rows are changes no other record.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.schema.targets import IGNORED

_AT_ONCE = 1024


@dataclass(frozen=True)
class Places:
    """Where the rows of some people lie; int64 [people, k], -1 where a person has no more."""

    found: NDArray[np.int64]

    @property
    def filled(self) -> NDArray[np.int64]:
        """The same, with the first row in place of those that are not there."""
        filled: NDArray[np.int64] = np.where(self.found < 0, self.found[:, :1], self.found)
        return filled

    def labels(self, of_rows: NDArray[Any]) -> NDArray[Any]:
        """The labels of the people, [people, k, ...], of those of all rows: IGNORED, or NaN, where there is no row."""
        labels: NDArray[Any] = of_rows[self.filled]
        labels[self.found < 0] = np.nan if labels.dtype.kind == "f" else IGNORED
        return labels


def by_person(owners: bytes | bytearray, most: int) -> Iterator[Places]:
    """The rows of each person, some people at a time, in an order that follows from who there is alone.

    owners: 16 bytes a row, at most `most` rows having the same.

    Example:
        >>> [places.found.tolist() for places in by_person(b"b" * 16 + b"a" * 16 + b"b" * 16, 2)]
        [[[1, -1], [0, 2]]]
    """
    rows = np.frombuffer(owners, ">u8").reshape(-1, 2)
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    sorted_ = rows[order]
    starts = (
        np.flatnonzero(np.append(True, (sorted_[1:] != sorted_[:-1]).any(axis=1))) if len(order) else order
    )
    counts = np.diff(np.append(starts, len(order)))
    for at in range(0, len(starts), _AT_ONCE):
        first, count = starts[at : at + _AT_ONCE, None], counts[at : at + _AT_ONCE, None]
        slots = np.arange(most)[None]
        inside = np.minimum(first + slots, len(order) - 1)
        yield Places(np.where(slots < count, order[inside], -1))
