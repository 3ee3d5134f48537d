"""Epsilon of Poisson samples with normal noise, exactly: by an inverse Laplace transform, apart from the product.

For a sum of losses with E exp(s L) = M(s), delta(e) is the integral of M(s)^steps exp(-s e) / (s (s + 1)) over a line
Re s = c > 0, over 2 pi i. M is itself a normal integral, for which the trapezoid rule is exact to rounding.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import binom

Array = NDArray[np.float64]


_LINES, _AGREE = (1.0, 0.8), 1e-6
"""How far from 0 lines of the integral lie, relative to where it cancels least; and how closely their results agree."""


def exact_epsilon(rate: float, multiplier: float, steps: int, delta: float, *, count: int = 1) -> float:
    """For `count` records that are added or removed together; close for a hundred steps and more.

    Raises ValueError where results of two lines differ, so that both are wrong: as where rare large losses decide, at
    a rate of 1e-6, multiplier 0.5 and 240,000 steps.
    """
    return exact_epsilon_of_kinds([(rate, multiplier, steps)], delta, count=count)


def exact_epsilon_of_kinds(
    kinds: Sequence[tuple[float, float, int]], delta: float, *, count: int = 1
) -> float:
    """The same for steps of several kinds: their rates, all below 1, multipliers and numbers."""
    first, second = (
        max(_side(kinds, delta, count, way, line) for way in ("remove", "add")) for line in _LINES
    )
    if not (math.isfinite(first) and abs(first - second) <= _AGREE * max(first, 1e-6)):
        raise ValueError(f"two lines of the integral give {first:g} and {second:g}")
    return first


def _log_moments(
    s: NDArray[np.complex128], rate: float, z: float, count: int, way: str
) -> NDArray[np.complex128]:
    """log M(s) of one step, shape [s]."""
    numbers = np.arange(count + 1)
    logs = binom.logpmf(numbers, count, rate)[:, None]
    far = (float(s.real.max()) + 2) * count / z if way == "remove" else 0.0
    t = np.linspace(-13.0, 13.0 + far, int((26 + far) / 0.06))
    losses = np.logaddexp.reduce(logs + numbers[:, None] * (t / z - numbers[:, None] / (2 * z * z)))
    normal = -t * t / 2 + math.log((t[1] - t[0]) / math.sqrt(2 * math.pi))
    powers = s[:, None] + 1 if way == "remove" else -s[:, None]
    exponents = powers * losses + normal
    top = exponents.real.max(axis=1, keepdims=True)
    return np.asarray(np.log(np.exp(exponents - top).sum(axis=1)) + top[:, 0])


def _side(kinds: Sequence[tuple[float, float, int]], delta: float, count: int, way: str, at: float) -> float:
    def moments(s: NDArray[np.complex128]) -> NDArray[np.complex128]:
        """log M(s) of all steps, shape [s]."""
        return np.asarray(sum(steps * _log_moments(s, rate, z, count, way) for rate, z, steps in kinds))

    @lru_cache
    def real(c: float) -> float:
        return float(moments(np.array([complex(c)])).real[0])

    def chernoff(log_c: float) -> float:
        c = math.exp(log_c)
        return (real(c) - math.log(delta)) / c

    start = min(np.arange(-6.0, 9.0, 0.5), key=chernoff)
    best = minimize_scalar(
        chernoff, bounds=(start - 0.5, start + 0.5), method="bounded", options={"xatol": 1e-3}
    )
    c = at * math.exp(float(best.x))
    spread = math.sqrt(max((real(c * 1.01) - 2 * real(c) + real(c * 0.99)) / (0.01 * c) ** 2, 1e-300))
    for reach in (60, 300, 1500):  # a line that is long enough for the integrand to have gone
        u = np.linspace(0.0, reach / spread, 100 * reach + 1)
        line = c + 1j * u
        log_moments = np.concatenate([moments(part) for part in np.array_split(line, reach)])
        if math.exp((log_moments[-1] - log_moments[0]).real) < 1e-9 * abs(line[-1] / line[0]):
            break

    def above(epsilon: float) -> float:
        terms = np.exp(log_moments - log_moments[0].real - 1j * u * epsilon) / (line * (line + 1))
        whole = (terms.real.sum() - terms.real[0] / 2) * (u[1] - u[0]) / math.pi
        return math.log(max(whole, 1e-300)) + log_moments[0].real - c * epsilon - math.log(delta)

    low = high = float(best.fun)  # Chernoff's bound; far below it the integral cancels
    while above(low) < 0 < low:
        low, high = low * 0.98 - 1e-9 * float(best.fun), low
    return float(brentq(above, low, high, xtol=1e-14, rtol=1e-12)) if low > 0 else 0.0
