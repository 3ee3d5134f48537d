"""What a search would cost if each trial were one Gaussian mechanism, to guess the epsilon of trials that fits."""

import math
from dataclasses import dataclass

import dp_accounting.dp_event as dp
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from algorithms.privacy.accounting.events import Trials
from algorithms.privacy.accounting.gaussian import gaussian_epsilon
from algorithms.privacy.accounting.selection import shift_of_selection

_MIN_SLOPE, _MAX_SLOPE = 0.3, 3.0
"""How steeply a price may rise beside that of Gaussian trials, both as logarithms, to be believed."""
_LOG_MU, _LOG_TOLERANCE = (math.log(1e-9), math.log(1e3)), 1e-5
"""The logarithms of mu that are searched, and how closely."""


@dataclass(frozen=True)
class GaussianSearch:
    """A search whose trials are each one Gaussian mechanism, by closed forms; no bound on another.

    Attributes:
        delta: Of the search, above 0.
        trials: How the number of trials is drawn; None if all are shown.
        shown: How many trials are shown, if they are.
    """

    delta: float
    trials: Trials | None
    shown: int = 1

    def price(self, epsilon: float) -> float:
        """The epsilon of the search with trials of this epsilon."""
        return self._price(self._log_mu(epsilon))

    def epsilon_per_trial(self, price: float, largest: float) -> float:
        """The epsilon of the trials of a search with this price, or the largest if that is less."""
        highest = self._log_mu(largest)
        if self._price(highest) <= price:
            return largest
        log_mu = brentq(lambda tried: self._price(tried) - price, _LOG_MU[0], highest, xtol=_LOG_TOLERANCE)
        return gaussian_epsilon(math.exp(log_mu), self.delta)

    def _log_mu(self, epsilon: float) -> float:
        def excess(log_mu: float) -> float:
            return gaussian_epsilon(math.exp(log_mu), self.delta) - epsilon

        return float(brentq(excess, *_LOG_MU, xtol=_LOG_TOLERANCE))

    def _price(self, log_mu: float) -> float:
        mu = math.exp(log_mu)
        if self.trials is None:
            return gaussian_epsilon(mu * math.sqrt(self.shown), self.delta)

        # Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu) (Balle and Wang 2018, Theorem 8).
        def deltas(epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
            above, below = mu / 2 - epsilons / mu, -mu / 2 - epsilons / mu
            each: NDArray[np.float64] = ndtr(above) - np.exp(epsilons + log_ndtr(below))
            return each

        event = self.trials.event([[(dp.GaussianDpEvent(1 / mu), 1)]])
        return gaussian_epsilon(mu, self.delta / self.trials.mean) + shift_of_selection(event, deltas)


class EpsilonGuesses:
    """Guesses of the epsilon of trials with which a search costs what is wanted, each from what the last ones cost.

    A price rises nearly in proportion to that of Gaussian trials.
    """

    def __init__(self, like: GaussianSearch, wanted: float, largest: float) -> None:
        self._like, self._wanted, self._largest = like, wanted, largest
        self._last: tuple[float, float] | None = None

    def first(self) -> float:
        """The guess before any cost is known."""
        return self._like.epsilon_per_trial(self._wanted, self._largest)

    def after(self, epsilon: float, cost: float) -> float | None:
        """The next guess, at most the largest, once the cost with this epsilon is known; None where that is 0."""
        price = self._like.price(epsilon)
        if min(price, cost) <= 0:
            return None
        last, self._last = self._last, (math.log(price), math.log(cost))
        slope = 1.0
        if last is not None and last[0] != self._last[0]:
            slope = (self._last[1] - last[1]) / (self._last[0] - last[0])
        # A step of the secant method in logarithms.
        step = (math.log(self._wanted) - self._last[1]) / min(max(slope, _MIN_SLOPE), _MAX_SLOPE)
        return self._like.epsilon_per_trial(price * math.exp(step), self._largest)
