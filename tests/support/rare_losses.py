"""What rare samples cost at least, apart from the product: by telling of each step no more than whether it stands out.

An output below a threshold is replaced by one common output, and one above it by the lower end of its cell: both only
take away from what an attacker sees. Few steps stand out, so that rounding their losses down costs little, and what is
left out is how the others vary among themselves.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

_CELLS, _SIZE, _ROUNDING = 2000, 2**13, 1e-14
"""The cells of a step's loss, up to twice the scale; the points of the sum; and a bound on what transforms lose."""
_NUMBERS = (0.3, 3.0, 30.0)
"""About how many steps shall stand out."""


def rare_lower_bound(kinds: Sequence[tuple[float, float, int]], delta: float, scale: float) -> float:
    """An epsilon that rates, multipliers and counts of steps with normal noise cost at least.

    scale: An epsilon about which the cells are fine; any gives a bound.
    """
    width = 2.0 * scale / _CELLS
    return max(_bound(kinds, delta, width, number) for number in _NUMBERS)


def _bound(kinds: Sequence[tuple[float, float, int]], delta: float, width: float, number: float) -> float:
    edges = width * np.arange(1, _CELLS + 1)
    above = [_chances_above(edges, rate, multiplier) for rate, multiplier, _ in kinds]
    counts = [count for *_, count in kinds]
    expected = sum(count * under_p for (under_p, _), count in zip(above, counts, strict=True))
    first = int(np.argmax(expected <= number)) if expected[-1] <= number else _CELLS - 1
    common, logarithm = 0.0, np.zeros(_SIZE // 2 + 1, dtype=np.complex128)
    for (under_p, under_q), count in zip(above, counts, strict=True):
        masses = np.zeros(_SIZE)
        masses[first + 1 : _CELLS + 1] = -np.diff(np.append(under_p[first:], 0.0))
        x = np.fft.rfft(masses) - under_p[first]
        # numpy's log1p of complex numbers is no more exact than log(1 + x).
        logarithm += count * (np.log1p(2 * x.real + np.abs(x) ** 2) / 2 + 1j * np.arctan2(x.imag, 1 + x.real))
        common += count * (math.log1p(-under_p[first]) - math.log1p(-under_q[first]))
    sums = np.maximum(np.fft.irfft(np.exp(logarithm), _SIZE), 0.0)
    losses = common + width * np.arange(_SIZE)

    def missing(epsilon: float) -> float:
        return float(sums @ np.maximum(-np.expm1(epsilon - losses), 0.0)) - _ROUNDING - delta

    return float(brentq(missing, 0.0, float(losses[-1]))) if missing(0.0) > 0 else 0.0


def _chances_above(
    losses: NDArray[np.float64], rate: float, multiplier: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The chances, with the record and without it, of outputs whose loss is above each of these."""
    outputs = multiplier**2 * np.log1p(np.expm1(losses) / rate) + 0.5
    without = norm.sf(outputs / multiplier)
    return (1 - rate) * without + rate * norm.sf((outputs - 1) / multiplier), without
