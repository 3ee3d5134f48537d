"""Exact binomial numbers: how many of equal coins show heads, at a cost that does not grow with their number.

Drawing that number and then a uniform subset of so many coins is the same as tossing each: a set of k of n coins has
the probability C(n, k) p^k (1 - p)^(n - k) / C(n, k), which is that of the tosses.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

CHANCE_BITS = 64
"""A coin's chance is a multiple of 2 to the power of minus this."""
_BITS, _GUARD_BITS = 128, 64


class RandomWords(Protocol):
    """A source of uniform 64-bit words."""

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next words, shape [count]."""


def draw_binomial(count: int, chance: int, source: RandomWords) -> int:
    """Draw how many of `count` coins show heads.

    A uniform number is compared with the cumulative distribution. Both are known to so many bits, with an error that
    is bounded. Where that leaves open which number is drawn, which happens about once in 2^100 draws, more bits of both
    are computed. So the draw is exact.

    Args:
        count: at least 0.
        chance: the probability of heads in units of 2^-64, from 0 to 2^64.
        source: of random words, of which two are used, and two more each time.

    Example:
        >>> from algorithms.privacy.mechanisms.noise import seeded_generator
        >>> draw_binomial(1000, 2**62, seeded_generator(0).stream(0))
        274
    """
    if chance <= 0 or chance >= 1 << CHANCE_BITS:
        return count if chance > 0 else 0
    uniform = bits = 0
    while True:
        # Only if the bits so far leave two numbers open are more drawn; the earlier ones are kept, so the draw stays
        # exact.
        uniform = uniform << _BITS | int.from_bytes(source.words(_BITS // 64).astype(">u8").tobytes())
        bits += _BITS
        number = _cumulative(count, chance, bits + _GUARD_BITS).find(uniform, bits)
        if number is not None:
            return number


@dataclass(frozen=True)
class _Cumulative:
    """Bounds on the cumulative distribution, without its normalisation.

    first: the smallest number whose weight is not rounded to 0. sums: the sum of the weights up to each number from
    `first`, too small by at most `error`; the last is the total. has_lower, has_upper: whether there are smaller and
    larger numbers.
    """

    first: int
    sums: list[int]
    error: int
    has_lower: bool
    has_upper: bool

    def find(self, uniform: int, bits: int) -> int | None:
        """The number at a point of [uniform, uniform + 1) / 2^bits of the distribution; None if there may be two."""
        total = self.sums[-1]
        # The largest and the smallest value of the distribution in this interval must lie within one number.
        above = -(-(uniform + 1) * (total + self.error) >> bits)  # rounded up
        index = bisect_left(self.sums, above)
        if index == len(self.sums):
            if self.has_upper:
                return None  # it may be a larger number, of those left out
            index -= 1
        # Numbers left out below the first may have the error's mass.
        below = self.sums[index - 1] + self.error if index else self.error * self.has_lower
        return self.first + index if below << bits <= uniform * total else None


@lru_cache(maxsize=8)
def _cumulative(count: int, chance: int, bits: int) -> _Cumulative:
    """The distribution, with a weight of 2^bits at its mode."""
    other, mode = (1 << CHANCE_BITS) - chance, (count + 1) * chance >> CHANCE_BITS  # floor((n + 1) p)
    # Weight k + 1 over weight k.
    upwards = (((count - k) * chance, (k + 1) * other) for k in range(mode, count))
    # Weight k - 1 over weight k.
    downwards = ((k * other, (count - k + 1) * chance) for k in range(mode, 0, -1))
    upper, error_above, has_upper = _weights(1 << bits, upwards)
    lower, error_below, has_lower = _weights(1 << bits, downwards)
    sums = list(accumulate([*reversed(lower), 1 << bits, *upper]))
    return _Cumulative(mode - len(lower), sums, error_above + error_below, has_lower, has_upper)


def _weights(weight: int, ratios: Iterable[tuple[int, int]]) -> tuple[list[int], int, bool]:
    """The weights on one side of the mode until one is 0, their error in sum, and whether numbers are left out.

    weight: of the mode. ratios: of each weight to the one before, as numerator and denominator; they fall from at most
    1. So a weight d steps away, rounded down d times, is too small by less than d. Those that are left out are a
    geometric series at most, from the first of them.
    """
    weights: list[int] = []
    error = 0
    for distance, (numerator, denominator) in enumerate(ratios, 1):
        weight = weight * numerator // denominator
        if weight == 0:
            # Distance / (1 - ratio), rounded up.
            left_out = -(-distance * denominator // (denominator - numerator))
            return weights, error + left_out, True
        weights.append(weight)
        error += distance
    return weights, error, False
