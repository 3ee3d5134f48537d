"""Roots are those of SciPy, to the last bit."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import brentq

from algorithms.privacy.accounting.roots import find_root


@pytest.mark.parametrize("seed", range(40))
def test_a_root_is_that_of_scipy_bit_for_bit(seed: int) -> None:
    random = np.random.default_rng(seed)
    root, power, scale = random.uniform(-3, 3), int(random.choice([1, 3, 5, 9])), random.uniform(0.01, 100)
    low, high = root - random.exponential(2), root + random.exponential(5)
    functions = (
        lambda x: (x - root) ** power,
        lambda x: math.exp(scale * (x - root) / 10) - 1,
        lambda x: math.atan(scale * (x - root)),
        lambda x: math.floor(scale * (x - root)) + 0.5,  # with jumps
        lambda x: x - root if x > root else 1e-6 * (x - root),
        lambda x: root - x,
    )
    for f in functions:
        for tolerances in ({}, {"xtol": 1e-3}, {"xtol": 1e-300, "rtol": 1e-14}):
            expected, ours = (search_of(find, f, low, high, tolerances) for find in (brentq, find_root))
            assert ours == expected


def search_of(
    find: Callable[..., float],
    f: Callable[[float], float],
    low: float,
    high: float,
    tolerances: dict[str, float],
) -> tuple[float | None, list[float]]:
    """The root, or None where there were too many steps, and where f was evaluated."""
    places = list[float]()

    def noting(x: float) -> float:
        places.append(x)
        return f(x)

    try:
        return find(noting, low, high, **tolerances), places
    except RuntimeError:
        return None, places


def test_ends_are_roots_and_brackets_are_in_any_order() -> None:
    assert find_root(lambda x: x - 1, 1.0, 2.0) == 1.0
    assert find_root(lambda x: x - 2, 1.0, 2.0) == 2.0
    assert find_root(lambda x: x**3 - 2, 2.0, 0.0) == brentq(lambda x: x**3 - 2, 2.0, 0.0)


@pytest.mark.parametrize("value", [1.0, -1.0, math.nan])
def test_a_bracket_without_a_change_of_sign_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="root"):
        find_root(lambda x: value, 0.0, 1.0)
