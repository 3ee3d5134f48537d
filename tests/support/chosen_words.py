"""A stream of words that a test chooses, to have coins at their limits."""

import numpy as np
from numpy.typing import NDArray

from algorithms.privacy.mechanisms.noise import Stream


class ChosenWords(Stream):
    """A stream that answers with these words, once."""

    def __init__(self, *given: int) -> None:
        self._given = np.array(given, dtype=np.uint64)

    def words(self, count: int) -> NDArray[np.uint64]:
        assert count == len(self._given)
        return self._given
