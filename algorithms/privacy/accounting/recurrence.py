"""Sums in which what came before decays, number by number, without the import of SciPy's filters for a few of them."""

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from algorithms.lazy_imports import later

signal = later("scipy.signal")


class DecayingSums:
    """y_k = x_k + (1 - step) y_(k-1), where x are numbers times the step; to the last bit the same by both ways.

    Python takes ten times as long as SciPy's filter, whose import takes as long as five million numbers in Python.

    Args:
        by_hand: How many numbers Python adds up, for all calls together.

    Example:
        >>> DecayingSums()(np.array([1.0, 0.0, 0.0]), 0.5).tolist()
        [0.5, 0.25, 0.125]
    """

    def __init__(self, by_hand: int = 2**21) -> None:
        self._by_hand = by_hand

    def __call__(self, numbers: NDArray[np.float64], step: float) -> NDArray[np.float64]:
        """The sums, shape [n], of numbers of shape [n]."""
        self._by_hand -= len(numbers)
        if self._by_hand < 0:
            return np.asarray(signal.lfilter([step], [1.0, step - 1.0], numbers))
        kept = -(step - 1.0)
        sums = accumulate((step * numbers).tolist(), lambda before, number: number + before * kept)
        return np.fromiter(sums, np.float64, len(numbers))
