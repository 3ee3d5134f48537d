"""Lower bounds on privacy loss from successful attacks, each with a stated confidence.

An attacker who distinguishes two neighbouring data sets has a rate of false alarms and a rate of misses. A claim bounds
these for every test, so a test that does significantly better refutes the claim. All intervals are exact (Clopper and
Pearson 1934), none is asymptotic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom

from algorithms.privacy.accounting.risk import Profile, gaussian_delta

Array = NDArray[np.float64]
Inverse = Callable[[float], float]
"""The smallest rate of false alarms at which a test can recognise a share in [0, 1]."""
_LARGEST_EPSILON, _LARGEST_MU = 60.0, 40.0


def upper_rate(successes: int, trials: int, *, confidence: float) -> float:
    """The one-sided upper confidence bound on a rate, given a number of successes (Clopper and Pearson 1934).

    Example:
        >>> round(upper_rate(0, 100, confidence=0.95), 4)  # 1 - 0.05^(1/100)
        0.0295
    """
    return 1.0 if successes >= trials else float(beta.ppf(confidence, successes + 1, trials - successes))


@dataclass(frozen=True)
class Rates:
    """Upper bounds on an attack's error rates. alarms: false alarms. misses: of records that were there."""

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
    """The smallest epsilon at `delta` of any mechanism that is consistent with these errors (Kairouz et al. 2015).

    Example:
        >>> round(epsilon_of(Rates(0.1, 0.2), 0.0), 4)  # ln(0.8 / 0.1)
        2.0794
    """
    pairs = ((found.alarms, found.misses), (found.misses, found.alarms))
    return max([0.0, *(math.log((1 - delta - b) / a) for a, b in pairs if a > 0 and 1 - delta - b > a)])


def mu_of(found: Rates) -> float:
    """The smallest mu of a Gaussian mechanism that is consistent with these errors (Nasr et al. 2023, section 4)."""
    if found.alarms + found.misses >= 1:
        return 0.0
    return float(ndtri(1 - found.alarms) - ndtri(found.misses))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon at `delta` of a Gaussian mechanism; see `gaussian_delta`.

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 3)
        4.377
    """

    def excess(epsilon: float) -> float:
        return gaussian_delta(mu, epsilon) - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    high = mu * mu + 10 * mu
    return float(brentq(excess, 0.0, high)) if excess(high) < 0 else high


def gaussian_inverse(mu: float) -> Inverse:
    """The trade-off of a Gaussian mechanism, as `Inverse`."""
    return lambda share: float(ndtr(ndtri(share) - mu))


def inverse_of(claimed: Profile) -> Inverse:
    """The trade-off of a profile, as `Inverse`."""
    growth, delta = np.exp(claimed.epsilon), claimed.delta

    def inverse(share: float) -> float:
        lines = np.maximum((share - delta) / growth, 1 - delta - (1 - share) * growth)
        return float(max(0.0, lines.max()))

    return inverse


@dataclass(frozen=True)
class Guesses:
    """The guesses on one run in which each canary was included by a fair coin.

    canaries: m. made: the number of guesses. right: the number of correct guesses.
    """

    canaries: int
    made: int
    right: int


def one_run_p_value(seen: Guesses, epsilon: float, delta: float) -> float:
    """A bound on the probability of this many correct guesses against an (epsilon, delta) mechanism.

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
    """The smallest epsilon at `delta` that is consistent with the guesses at `confidence` (Steinke et al. 2023)."""
    return _least(lambda e: one_run_p_value(seen, e, delta) > 1 - confidence, _LARGEST_EPSILON)


def is_refuted(seen: Guesses, inverse: Inverse, *, confidence: float) -> bool:
    """Whether the guesses refute a trade-off curve at `confidence`.

    If p_i is the probability of i correct guesses of c, then for each i the sum over j >= i of j/m p_j is at most what
    the curve allows to recognise at a rate of false alarms equal to the sum over j >= i of (c - j + 1)/m p_(j-1).
    Starting with the mass 1 - confidence on the observed number, this forces mass on every smaller number. The curve is
    refuted if the total exceeds 1.

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
    """The epsilon at `delta` of the least leaky Gaussian mechanism that is consistent with the guesses.

    It bounds mechanisms with a Gaussian trade-off curve, which many noisy steps have approximately.
    """
    mu = _least(lambda mu: not is_refuted(seen, gaussian_inverse(mu), confidence=confidence), _LARGEST_MU)
    return gaussian_epsilon(mu, delta)


def _least(agrees: Callable[[float], bool], most: float) -> float:
    """The smallest number from 0 on for which a monotone condition holds, rounded down."""
    if agrees(0.0):
        return 0.0
    low, high = 0.0, most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if agrees(middle) else (middle, high)
    return low
