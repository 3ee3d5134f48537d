"""Lower bounds on privacy loss from attacks that were seen to succeed, each with a stated confidence.

An attacker who tells two neighbouring data sets apart has a rate of false alarms and a rate of misses. A claim bounds
what any test can reach, so a test that is seen to do better, beyond chance, refutes it. All intervals are exact
(Clopper and Pearson 1934), none is asymptotic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri
from scipy.stats import beta, binom

from algorithms.privacy.accounting.risk import Profile

Array = NDArray[np.float64]
Inverse = Callable[[float], float]
"""Of what a test can recognise: the least rate of false alarms at which it recognises a share in [0, 1]."""
_LARGEST_EPSILON, _LARGEST_MU = 60.0, 40.0


def upper_rate(successes: int, trials: int, *, confidence: float) -> float:
    """The largest rate that explains so many successes, one-sided (Clopper and Pearson 1934).

    Example:
        >>> round(upper_rate(0, 100, confidence=0.95), 4)  # 1 - 0.05^(1/100)
        0.0295
    """
    return 1.0 if successes >= trials else float(beta.ppf(confidence, successes + 1, trials - successes))


@dataclass(frozen=True)
class Rates:
    """Upper bounds of an attack's errors. alarms: false alarms. misses: of what was there."""

    alarms: float
    misses: float


def rates(without: Array, with_record: Array, threshold: float, *, confidence: float) -> Rates:
    """The errors of the test `score >= threshold`, both bounds together at `confidence`.

    Args:
        without, with_record: Scores of runs on either of the neighbours, shapes [n0] and [n1].
        threshold: Chosen without looking at these scores.
        confidence: That both bounds hold.
    """
    each = 1 - (1 - confidence) / 2
    return Rates(
        upper_rate(int((without >= threshold).sum()), len(without), confidence=each),
        upper_rate(int((with_record < threshold).sum()), len(with_record), confidence=each),
    )


def epsilon_of(found: Rates, delta: float) -> float:
    """The least epsilon at `delta` with which an attack of such errors agrees, of any mechanism (Kairouz et al. 2015).

    Example:
        >>> round(epsilon_of(Rates(0.1, 0.2), 0.0), 4)  # ln(0.8 / 0.1)
        2.0794
    """
    pairs = ((found.alarms, found.misses), (found.misses, found.alarms))
    return max([0.0, *(math.log((1 - delta - b) / a) for a, b in pairs if a > 0 and 1 - delta - b > a)])


def mu_of(found: Rates) -> float:
    """The least mu of a Gaussian mechanism with which such errors agree (Nasr et al. 2023, section 4)."""
    if found.alarms + found.misses >= 1:
        return 0.0
    return float(ndtri(1 - found.alarms) - ndtri(found.misses))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at `delta` of a Gaussian mechanism of sensitivity over deviation `mu` (Balle and Wang 2018).

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 3)
        4.377
    """

    def excess(epsilon: float) -> float:
        first, second = log_ndtr(mu / 2 - epsilon / mu), log_ndtr(-mu / 2 - epsilon / mu)
        return math.exp(first) - math.exp(epsilon + second) - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    high = mu * mu + 10 * mu
    return float(brentq(excess, 0.0, high)) if excess(high) < 0 else high


def gaussian_inverse(mu: float) -> Inverse:
    """The trade-off of a Gaussian mechanism, as `Inverse`."""
    return lambda share: float(ndtr(ndtri(share) - mu))


def inverse_of(claimed: Profile) -> Inverse:
    """The trade-off of a profile, as `Inverse`: no test recognises more at fewer false alarms."""
    growth, delta = np.exp(claimed.epsilon), claimed.delta

    def inverse(share: float) -> float:
        lines = np.maximum((share - delta) / growth, 1 - delta - (1 - share) * growth)
        return float(max(0.0, lines.max()))

    return inverse


@dataclass(frozen=True)
class Guesses:
    """What came of one run with canaries that were each in by a fair coin.

    canaries: m. made: how many of their coins were guessed. right: how many of these guesses were.
    """

    canaries: int
    made: int
    right: int


def one_run_p_value(seen: Guesses, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are, at most, against an (epsilon, delta) mechanism.

    Source: Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), Theorem 5.2.

    Example:
        >>> round(one_run_p_value(Guesses(100, 100, 75), math.log(3), 0.0), 3)
        0.553
    """
    m, r, v = seen.canaries, seen.made, seen.right
    q = 1 / (1 + math.exp(-epsilon))
    chance = float(binom.sf(v - 1, r, q))
    if delta > 0 and v > 0:
        gains = np.arange(1, v + 1)
        below = binom.cdf(v - 1, r, q) - binom.cdf(v - 1 - gains, r, q)
        chance += 2 * m * delta * float((below / gains).max())
    return min(1.0, chance)


def one_run_epsilon(seen: Guesses, delta: float, *, confidence: float) -> float:
    """The least epsilon at `delta` with which the guesses agree at `confidence` (Steinke et al. 2023)."""
    return _least(lambda e: one_run_p_value(seen, e, delta) > 1 - confidence, _LARGEST_EPSILON)


def is_refuted(seen: Guesses, inverse: Inverse, *, confidence: float) -> bool:
    """Whether the guesses refute a trade-off curve at `confidence`.

    If p_i is the chance of i right guesses of c, then for each i the sum over j >= i of j/m p_j is at most what the
    curve lets a test recognise at false alarms of the sum over j >= i of (c - j + 1)/m p_(j-1). Started with
    the mass 1 - confidence on what was seen, this forces mass on every smaller number; the curve is refuted where more
    than 1 is forced in all.

    Source: Mahloujifar, Melis and Chaudhuri 2024 (arXiv:2410.22235), Theorem 9 and its recursion.
    """
    m, c, v = seen.canaries, seen.made, seen.right
    recognised, alarms = (1 - confidence) * v / m, (1 - confidence) * (c - v) / m
    for i in range(v - 1, -1, -1):
        grown = max(alarms, inverse(min(1.0, recognised)))
        recognised += i / (c - i) * (grown - alarms)
        alarms = grown
        if recognised + alarms > c / m:
            return True
    return False


def one_run_gaussian_epsilon(seen: Guesses, delta: float, *, confidence: float) -> float:
    """The epsilon at `delta` of the least leaky Gaussian mechanism with which the guesses agree.

    It bounds mechanisms whose trade-off has the form of a Gaussian's, as that of many noised steps has.
    """
    mu = _least(lambda mu: not is_refuted(seen, gaussian_inverse(mu), confidence=confidence), _LARGEST_MU)
    return gaussian_epsilon(mu, delta)


def _least(agrees: Callable[[float], bool], most: float) -> float:
    """The least number from 0 up that agrees, rounded down; agreement must not end once it has begun."""
    if agrees(0.0):
        return 0.0
    low, high = 0.0, most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if agrees(middle) else (middle, high)
    return low
