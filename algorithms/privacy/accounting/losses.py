"""The privacy loss of single mechanisms, as distributions and as Rényi bounds at each order.

Faster versions of dp_accounting's, and some that it does not have; `event_rules` assigns them to events. Private names
of dp_accounting are used where it has no public equivalent.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import dp_accounting as dp
import numpy as np
from dp_accounting.pld import PLDAccountant, pld_pmf, privacy_loss_mechanism
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import _gamma_truncated_negative_binomial
from scipy.special import expit, gammaln, log_ndtr, logsumexp
from scipy.stats import norm

from algorithms.errors import RefusedError

TAIL_DELTA = 1e-13
_TAIL, _NEAR_NOTHING = 12.0, 1e-9
_CORNERS, _LARGEST_STEP, _LARGEST_LOSS = 4000, 10.0, 500.0
_LARGEST_EXPONENT = 700.0
_ROUNDING, _NEAR_ZERO = 2e-15, 1e-10
_LARGE_ORDER = 64.0
_TERMS, _AT_ONCE, _NEGLIGIBLE = 1000, 50, 30.0

Deltas: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""Upper bounds on delta at epsilons of any sign, shape [k] -> [k]."""


def by_pld(
    event: dp.DpEvent, count: int, grid: float, adjacency: dp.NeighboringRelation
) -> PrivacyLossDistribution:
    """dp_accounting's distribution of `count` events; raises RefusedError if it has none."""
    accountant = PLDAccountant(adjacency, grid)
    if not accountant.supports(event):
        raise RefusedError(f"the PLD accountant has no bound for {event}; use the other accountant.")
    accountant.compose(event, count)
    return accountant._pld  # it has no public reader


class SampledGaussianLoss(privacy_loss_mechanism.GaussianPrivacyLoss):  # type: ignore[misc]
    """dp_accounting's privacy loss, with its inverse vectorised over the points of a grid.

    The inverse takes nine tenths of the time for an epsilon: a fine grid has 100,000 points. At rate 1 there is no
    sampling.
    """

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        """The divergence at one epsilon or at many, like the base class."""
        epsilons = np.atleast_1d(np.asarray(epsilon, dtype=float))
        sign = 1.0 if self.adjacency_type is privacy_loss_mechanism.AdjacencyType.REMOVE else -1.0
        least = math.log1p(-self.sampling_prob) if self.sampling_prob < 1 else -math.inf
        losses = sign * epsilons  # adding is removing with the sign of loss and output turned round
        with np.errstate(over="ignore"):  # what overflows is clipped to 0
            deltas = -np.expm1(epsilons) if sign > 0 else np.zeros_like(epsilons)
        inside = (losses > least) & ~np.isclose(losses, least, rtol=1e-9, atol=0.0)
        # log(1 + (e^loss - 1) / q), without overflow; operation by operation as dp_accounting rounds them
        unsampled = sign * losses[inside]
        if self.sampling_prob < 1:
            high, low = losses[inside] + np.log(1 / self.sampling_prob), np.log(-(1 - 1 / self.sampling_prob))
            unsampled = sign * (high + np.log1p(-np.exp(low - high)))
        cutoffs = -0.5 * self.sensitivity - unsampled * self._standard_deviation**2 / self.sensitivity
        cutoffs += 0.0 if sign > 0 else self.sensitivity
        lower = np.exp(epsilons[inside] + self.mu_lower_log_cdf(cutoffs))
        deltas[inside] = self.mu_upper_cdf(cutoffs) - lower
        deltas = np.clip(deltas, 0, 1)
        return float(deltas[0]) if np.ndim(epsilon) == 0 else deltas


def of_sampled_gaussian(multiplier: float, rate: float, grid: float) -> PrivacyLossDistribution:
    """dp_accounting's `from_gaussian_mechanism`, with the loss above."""

    def one(adjacency: privacy_loss_mechanism.AdjacencyType) -> pld_pmf.PLDPmf:
        loss = SampledGaussianLoss(multiplier, sampling_prob=rate, adjacency_type=adjacency)
        return distributions._create_pld_pmf_from_monotone_privacy_loss(
            loss, value_discretization_interval=grid, use_connect_dots=True
        )

    return distributions._pld_for_subsampled_mechanism(one, rate)


def of_pure(epsilon: float, grid: float) -> PrivacyLossDistribution:
    """The distribution of randomised response, which dominates every mechanism with this epsilon (Kairouz et al. 2015).

    Its loss is epsilon or -epsilon. Each is divided between the neighbouring grid points so that neither distribution
    loses mass: the result dominates the pair ("connect the dots", Doroshenko et al. 2022), with an error of the order
    of the grid's square per composition. Rounding both losses up would add a whole grid step each time.
    """
    masses: dict[int, float] = {}
    for loss, mass in ((epsilon, float(expit(epsilon))), (-epsilon, float(expit(-epsilon)))):
        below = math.floor(loss / grid)
        share = min(1.0, max(0.0, math.expm1(below * grid - loss) / math.expm1(-grid)))
        masses[below + 1] = masses.get(below + 1, 0.0) + mass * share
        masses[below] = masses.get(below, 0.0) + mass * (1 - share)
    return PrivacyLossDistribution(pld_pmf.create_pmf(masses, grid, 0.0, pessimistic_estimate=True))


def curves_of(loss: PrivacyLossDistribution) -> tuple[Deltas, Deltas]:
    """The privacy profiles for removing and for adding a record."""
    return _curve_of(loss._pmf_remove.to_dense_pmf()), _curve_of(loss._pmf_add.to_dense_pmf())


def _curve_of(pmf: Any) -> Deltas:
    """delta(e), the sum over losses l above e of p(l) (1 - exp(e - l)), at many points at once."""
    losses = (pmf._lower_loss + np.arange(pmf._probs.size)) * pmf._discretization
    ratios = np.exp(np.minimum(-losses, _LARGEST_EXPONENT))  # a smaller ratio gives a larger delta
    above, scaled = (
        np.append(np.cumsum(terms[::-1])[::-1], 0.0) for terms in (pmf._probs, pmf._probs * ratios)
    )

    def deltas(at: np.ndarray) -> np.ndarray:
        first = np.searchsorted(losses, at, side="right")
        found: np.ndarray = pmf._infinity_mass + above[first] - np.exp(at) * scaled[first]
        return found

    return deltas


def of_curves(remove: Deltas, add: Deltas, largest: float, grid: float) -> PrivacyLossDistribution:
    """A distribution whose deltas are at least those of both curves; beyond the largest epsilon the loss is infinite.

    Below 0 a curve follows from the other: delta(-e) = 1 - exp(-e) (1 - delta'(e)). True curves are convex in
    exp(epsilon), so they are below the convex hull of their bounds, whose corners "connect the dots" uses.
    """
    if not largest < _LARGEST_LOSS:
        raise RefusedError("the privacy loss of a trial has too heavy a tail; use the accountant rdp.")
    last = max(1, math.ceil(largest / grid))
    above = np.unique(np.linspace(0, last, min(last + 1, _CORNERS)).round().astype(int))
    places = np.concatenate([-above[:0:-1], above])

    def one(own: Deltas, other: Deltas) -> pld_pmf.PLDPmf:
        own_deltas, others = (np.clip(curve(above * grid), 0.0, 1.0) for curve in (own, other))
        below = 1.0 - np.exp(-above[:0:-1] * grid) * (1.0 - others[:0:-1])
        deltas = _lower_hull(np.exp(places * grid), np.concatenate([below, own_deltas]))
        return pld_pmf.create_pmf_pessimistic_connect_dots(grid, places, np.minimum.accumulate(deltas))

    return PrivacyLossDistribution(one(remove, add), one(add, remove))


def _lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The largest convex function with no value above y at x, ascending, and none above 1 at 0; its values at x."""
    corners = [(0.0, 1.0)]
    for c in zip(x.tolist(), y.tolist(), strict=True):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (b[1] - a[1]) * (c[0] - a[0]) < (c[1] - a[1]) * (b[0] - a[0]):
                break
            corners.pop()  # b lies on the chord from a to c, or above
        corners.append(c)
    at, height = np.array(corners).T
    found: np.ndarray = np.interp(x, at, height)
    return found


def shift_of_selection(event: Any, deltas: Deltas, grid: float) -> float:
    """How far the best trial's epsilon exceeds one trial's: a bound on log f'(Q) - log f'(Q') for neighbours.

    For any e, 1 - Q' <= exp(e) (1 - Q) + delta(e). A Poisson number has log f' = mean (Q - 1); a truncated negative
    binomial one has f' proportional to (1 - (1 - gamma) Q)^-(shape + 1), of which e bounds the logarithm of the base's
    ratio as soon as (1 - gamma) delta(e) <= gamma (exp(e) - 1).
    """
    tried = grid * np.arange(0.0, _LARGEST_STEP / grid)
    slack = deltas(tried) * (1 + _NEAR_NOTHING) + TAIL_DELTA
    if math.isinf(event.shape):
        return float(event.mean * np.min(np.expm1(tried) + slack))
    if event.mean == 1:
        return 0.0
    gamma = float(_gamma_truncated_negative_binomial(event.shape, event.mean))
    enough = np.flatnonzero((1 - gamma) * slack <= gamma * np.expm1(tried))
    if not len(enough):
        raise RefusedError("a trial tells too much for the profile of the best; use the accountant rdp.")
    return float((event.shape + 1) * tried[enough[0]])


def of_objective(noise_multiplier: float, curvature_ratio: float, grid: float) -> PrivacyLossDistribution:
    """The distribution of an exact private minimum: the loss is at most log(1 + ratio) + s^2 / 2 + |X|, X ~ N(0, s^2).

    s is 1 / multiplier. Between neighbours the density of the minimum changes by the Jacobian, a rank-one change, and
    by the density of the random term, which a record's gradient shifts along its features by at most its bound.
    """
    s = 1.0 / noise_multiplier
    least = math.log1p(curvature_ratio) + s**2 / 2
    first, last = math.ceil(least / grid), math.ceil((least + _TAIL * s) / grid)
    places = np.arange(first, last + 1)
    below = 2.0 * norm.cdf((places * grid - least) / s) - 1.0
    masses = np.diff(np.maximum(below, 0.0), prepend=0.0)
    tail = float(2.0 * norm.sf((last * grid - least) / s))
    losses = {int(place): float(mass) for place, mass in zip(places, masses, strict=True)}
    return PrivacyLossDistribution(pld_pmf.create_pmf(losses, grid, tail, pessimistic_estimate=True))


def by_rdp(event: dp.DpEvent, orders: tuple[float, ...], adjacency: dp.NeighboringRelation) -> np.ndarray:
    """The bounds of dp_accounting; raises RefusedError if it has none."""
    accountant = RdpAccountant(orders, adjacency)
    if not accountant.supports(event):
        raise RefusedError(f"the RDP accountant has no bound for {event}; use the other accountant.")
    with _quiet_about_dropped_orders():
        accountant.compose(event)
    return np.asarray(accountant._rdp, dtype=np.float64)  # the bounds have no public reader


def rdp_of_sampled_gaussian(multiplier: float, rate: float, orders: tuple[float, ...]) -> np.ndarray:
    """Bounds for a Poisson sample under add-or-remove-one, at a rate inside (0, 1), shape [orders].

    The sums of Mironov, Talwar and Zhang 2019, Section 3.3, as in dp_accounting, but vectorised over orders: term by
    term they take most of the time of a search for noise. Infinite at an order whose series converges slowly.
    """
    alpha = np.array(orders)
    is_whole = alpha == np.floor(alpha)
    is_large = is_whole & (alpha >= _LARGE_ORDER)
    is_small = is_whole & ~is_large
    moments = np.empty(len(alpha))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # what overflows becomes infinite
        if is_small.any():
            moments[is_small] = _binomial_moments(multiplier, rate, tuple(alpha[is_small]))
        for place in np.flatnonzero(is_large):  # by itself, since it has so many more terms
            moments[place] = _binomial_moments(multiplier, rate, (orders[place],))[0]
        if not is_whole.all():
            moments[~is_whole] = _series_moments(multiplier, rate, tuple(alpha[~is_whole]))
    divergences: np.ndarray = moments / (alpha - 1)
    return divergences


def _binomial_moments(z: float, q: float, orders: tuple[float, ...]) -> np.ndarray:
    """log A at integer orders, shape [orders], by the finite sum."""
    count = int(max(orders)) + 1
    alpha, k = np.array(orders), np.arange(count)[:, None]
    terms = _log_binomials(orders, 0, count) + k * math.log(q) + (alpha - k) * math.log1p(-q)
    terms += (k * k - k) / (2 * z * z)
    found: np.ndarray = logsumexp(np.where(k <= alpha, terms, -math.inf), axis=0)
    return found


def _series_moments(z: float, q: float, orders: tuple[float, ...]) -> np.ndarray:
    """log A at other orders, shape [orders], by the two series, until both fall and add nothing."""
    alpha, found = np.array(orders), np.full(len(orders), math.inf)
    is_found = np.zeros(len(orders), dtype=bool)
    middle, log_q, log_rest = z * z * math.log(1 / q - 1) + 0.5, math.log(q), math.log1p(-q)
    terms = sums = np.full((2, 1, len(orders)), -math.inf)
    for first in range(0, _TERMS, _AT_ONCE):
        i = np.arange(first, first + _AT_ONCE)[:, None]
        j, binomials = alpha - i, _log_binomials(orders, first, _AT_ONCE)
        low = binomials + i * log_q + j * log_rest + (i * i - i) / (2 * z * z) + log_ndtr((middle - i) / z)
        high = binomials + j * log_q + i * log_rest + (j * j - j) / (2 * z * z) + log_ndtr((j - middle) / z)
        before, terms = terms[:, -1:], np.stack([low, high])
        sums = np.logaddexp.accumulate(np.concatenate([sums[:, -1:], terms], axis=1), axis=1)[:, 1:]
        total = np.logaddexp(sums[0], sums[1])
        falls = (terms < np.concatenate([before, terms[:, :-1]], axis=1)).all(axis=0)
        is_last = falls & (terms.max(axis=0) < total - _NEGLIGIBLE)
        is_new = is_last.any(axis=0) & ~is_found
        found[is_new] = total[is_last.argmax(axis=0)[is_new], np.flatnonzero(is_new)]
        is_found |= is_new
        if is_found.all():
            break
    return found


@lru_cache(maxsize=256)
def _log_binomials(orders: tuple[float, ...], first: int, count: int) -> np.ndarray:
    """log |binomial(order, k)| for k = first, ..., first + count - 1, shape [count, orders]."""
    alpha, k = np.array(orders), np.arange(first, first + count)[:, None]
    found: np.ndarray = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1)
    found.setflags(write=False)
    return found


def rounded_up(divergences: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Bounds of a sample, increased for rounding; infinite where they overflowed.

    Rounding may reduce a logarithm by 1e-15 times the order, which matters near 0: many such events must not cost
    nothing, and one must not cost less than nothing.
    """
    least = np.nan_to_num(divergences, nan=math.inf, posinf=math.inf).clip(min=0.0)
    is_near_zero = least * (orders - 1) < _NEAR_ZERO * orders
    raised: np.ndarray = least + np.where(is_near_zero, _ROUNDING * orders / (orders - 1), 0.0)
    return raised


def rdp_of_pure(epsilon: float, orders: np.ndarray) -> np.ndarray:
    """Bounds for randomised response, which dominates every mechanism with this epsilon (Mironov 2017, Prop. 5)."""
    truth = -np.logaddexp(0.0, -epsilon)
    lie = truth - epsilon
    moments = np.logaddexp(orders * truth + (1 - orders) * lie, orders * lie + (1 - orders) * truth)
    # Near 0 rounding takes all of the moments; this bound is as tight there (Bun and Steinke 2016, Proposition 3.3).
    divergences = np.where(moments < _NEAR_NOTHING, orders * epsilon**2 / 2, moments / (orders - 1))
    return np.clip(divergences, 0.0, epsilon)


def rdp_of_objective(noise_multiplier: float, curvature_ratio: float, orders: np.ndarray) -> np.ndarray:
    """Bounds for the privacy loss of `losses.of_objective`: Redberg, Koskela and Wang 2023."""
    s = 1.0 / noise_multiplier
    divergences: np.ndarray = (
        math.log1p(curvature_ratio)
        + orders * s**2 / 2
        + (math.log(2.0) + log_ndtr((orders - 1) * s)) / (orders - 1)
    )
    return divergences


@contextmanager
def _quiet_about_dropped_orders() -> Iterator[None]:
    """Suppress the RDP accountant's warning about dropped orders, without which the bound is still valid."""
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        yield
    finally:
        absl.setLevel(level)
