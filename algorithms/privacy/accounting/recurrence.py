"""Sums in which what came before decays, number by number, without the import of SciPy's filters for a few of them."""

import sys
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from algorithms.lazy_imports import lazy_module

signal = lazy_module("scipy.signal")

MAX_IN_PYTHON = 2**16
"""Where a sum has more numbers, many follow, and SciPy's filter is worth its import, which takes as long as three
million numbers in Python."""


def decaying_sums(numbers: NDArray[np.float64], step: float) -> NDArray[np.float64]:
    """y_k = x_k + (1 - step) y_(k-1), where x are numbers times the step.

    SciPy's filter takes a tenth of Python's time, and is used where it is there or there are many numbers. Python has
    the same sums, to the last bit.

    Args:
        numbers: Shape [n].
        step: Between 0 and 1.

    Returns:
        The sums, shape [n].

    Example:
        >>> decaying_sums(np.array([1.0, 0.0, 0.0]), 0.5).tolist()
        [0.5, 0.25, 0.125]
    """
    if len(numbers) > MAX_IN_PYTHON or "scipy.signal" in sys.modules:
        return np.asarray(signal.lfilter([step], [1.0, step - 1.0], numbers))
    decay = -(step - 1.0)
    sums = accumulate((step * numbers).tolist(), lambda before, number: number + before * decay)
    return np.fromiter(sums, np.float64, len(numbers))
