"""Decaying sums are those of SciPy's filter, to the last bit, whoever adds them up."""

import math

import numpy as np
import pytest
from scipy.signal import lfilter

from algorithms.privacy.accounting.recurrence import DecayingSums


@pytest.mark.parametrize("grid", [1e-6, 1e-4, 0.03, 0.7, 20.0])
def test_sums_in_python_are_those_of_scipy_bit_for_bit(grid: float) -> None:
    random, step = np.random.default_rng(0), -math.expm1(-grid)
    for count in (1, 2, 5000):
        numbers = random.exponential(size=count) * np.exp(-random.uniform(0, 200, size=count))
        expected = lfilter([step], [1.0, step - 1.0], numbers)
        for sums in (DecayingSums(), DecayingSums(by_hand=0)):
            assert np.array_equal(sums(numbers[::-1][::-1], step), expected)


def test_after_many_numbers_scipy_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    class Signal:
        @staticmethod
        def lfilter(b: list[float], a: list[float], numbers: np.ndarray) -> np.ndarray:
            calls.append(len(numbers))
            return numbers

    monkeypatch.setattr("algorithms.privacy.accounting.recurrence.signal", Signal)
    sums = DecayingSums(by_hand=10)
    for _ in range(3):
        sums(np.ones(4), 0.5)
    assert calls == [4]
