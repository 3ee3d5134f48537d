"""Decaying sums are those of SciPy's filter, to the last bit, whoever adds them up."""

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
from scipy.signal import lfilter

from algorithms.privacy.accounting import recurrence
from algorithms.privacy.accounting.recurrence import MAX_IN_PYTHON, decaying_sums

Signal = Callable[[bool], list[int]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Signal:
    """Counts the numbers of each call of SciPy's filter, in a process that has imported it or not."""

    class Filters:
        @staticmethod
        def lfilter(b: list[float], a: list[float], numbers: np.ndarray) -> np.ndarray:
            calls.append(len(numbers))
            return np.asarray(lfilter(b, a, numbers))

    def process(is_imported: bool) -> list[int]:
        if not is_imported:
            monkeypatch.delitem(sys.modules, "scipy.signal", raising=False)
        calls.clear()
        return calls

    calls: list[int] = []
    monkeypatch.setitem(sys.modules, "scipy.signal", sys.modules["scipy.signal"])
    monkeypatch.setattr(recurrence, "signal", Filters)
    return process


@pytest.mark.parametrize("is_imported", [True, False])
@pytest.mark.parametrize("grid", [1e-6, 1e-4, 0.03, 0.7, 20.0])
def test_sums_in_python_are_those_of_scipy_bit_for_bit(
    grid: float, is_imported: bool, counted: Signal
) -> None:
    random, step = np.random.default_rng(0), -math.expm1(-grid)
    calls = counted(is_imported)
    for count in (1, 2, 5000):
        numbers = random.exponential(size=count) * np.exp(-random.uniform(0, 200, size=count))
        expected = lfilter([step], [1.0, step - 1.0], numbers)
        assert np.array_equal(decaying_sums(numbers[::-1][::-1], step), expected)
    assert calls == ([1, 2, 5000] if is_imported else [])


def test_scipy_is_imported_for_many_numbers_however_many_came_before(counted: Signal) -> None:
    calls = counted(False)
    for count in (MAX_IN_PYTHON, MAX_IN_PYTHON, MAX_IN_PYTHON, MAX_IN_PYTHON + 1):
        decaying_sums(np.ones(count), 0.5)
    assert calls == [MAX_IN_PYTHON + 1]
