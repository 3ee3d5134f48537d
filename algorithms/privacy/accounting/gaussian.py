"""The Gaussian mechanism in closed form (Balle and Wang 2018, arXiv:1805.06530, Theorem 8)."""

import math

from scipy.special import erfcx, log_ndtr, ndtr

_U = 2.0**-53
SHARE_OF_FEATURES = 0.05
"""The usual share of the squared mu of a budget for a release before training, of a number's scale or of histograms."""


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The delta at epsilon of a Gaussian mechanism with `mu`, its sensitivity over its standard deviation.

    delta = Phi(a) - exp(epsilon) Phi(a - mu) at a = mu / 2 - epsilon / mu. Where a is not above 0 both terms are
    exp(-a^2 / 2) / 2 times a scaled error function, so that only these are subtracted.

    Example:
        >>> round(gaussian_delta(1.0, 0.0), 4)  # 2 Phi(1/2) - 1
        0.3829
    """
    return _terms(mu, epsilon)[0]


def _terms(mu: float, epsilon: float) -> tuple[float, float]:
    """delta, and how far it may be off."""
    if mu == 0:
        return 0.0, 0.0
    a = mu / 2 - epsilon / mu
    # Of a, by rounding, and so of the logarithm of a term.
    moved = 4 * _U * (1 + abs(a)) * (mu + epsilon / mu)
    if a > 0:
        first, second = float(ndtr(a)), math.exp(min(0.0, epsilon + float(log_ndtr(a - mu))))
        return max(0.0, first - second), (first + second) * (8 * _U * (1 + epsilon) + moved)
    scale, s = math.exp(-a * a / 2) / 2, -a / math.sqrt(2)
    first, second = float(erfcx(s)), float(erfcx(s + mu / math.sqrt(2)))
    delta = scale * max(0.0, first - second)
    return delta, 8 * _U * scale * first + delta * moved


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon of a Gaussian mechanism at `delta`, rounded up by less than a part in a million.

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 6)
        4.377178
    """

    def delta_bound(epsilon: float) -> float:
        return math.fsum(_terms(mu, epsilon))

    if delta_bound(0.0) <= delta:
        return 0.0
    from scipy.optimize import brentq  # here and below, since most runs do without it

    low, high = 0.0, mu * mu / 2 + mu
    while delta_bound(high) > delta:
        low, high = high, 2 * high
    root = brentq(lambda e: math.log(max(delta_bound(e), 1e-320) / delta), low, high, xtol=1e-300, rtol=1e-14)
    slack = 1e-13
    while delta_bound(epsilon := float(root) * (1 + slack)) > delta:
        slack *= 4
    return epsilon


def noise_for_share(share: float, epsilon: float, delta: float = 1e-5) -> float:
    """The noise multiplier of a Gaussian release that takes a share of the squared mu of a budget.

    A Gaussian mechanism has mu, its sensitivity over its standard deviation; squares of mu add up.
    """
    from scipy.optimize import brentq

    mu = brentq(lambda mu: gaussian_epsilon(mu, delta) - epsilon, 1e-6, 1e3)
    return 1.0 / (float(mu) * math.sqrt(share))
