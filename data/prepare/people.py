"""The rows of a person as one training record [k, *shape], padded with the person's first row under ignored labels.

Removing a record then removes a person, and a person's rows change no other record.
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
    """The indices of the rows of some people; int64 [people, k], -1 if a person has fewer rows."""

    found: NDArray[np.int64]

    @property
    def filled(self) -> NDArray[np.int64]:
        """The same, with missing rows replaced by the first row."""
        filled: NDArray[np.int64] = np.where(self.found < 0, self.found[:, :1], self.found)
        return filled

    def labels(self, of_rows: NDArray[Any]) -> NDArray[Any]:
        """The labels of the people, [people, k, ...], from the labels of all rows: IGNORED, or NaN, for missing
        rows.
        """
        labels: NDArray[Any] = of_rows[self.filled]
        labels[self.found < 0] = np.nan if labels.dtype.kind == "f" else IGNORED
        return labels


def by_person(owners: bytes | bytearray, most: int) -> Iterator[Places]:
    """The rows of each person, for some people at a time, in an order that depends only on which people there are.

    owners: 16 bytes per row; at most `most` rows have the same owner.

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
