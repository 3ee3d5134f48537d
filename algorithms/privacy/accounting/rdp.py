"""Rényi divergence bounds of single mechanisms at each order.

Faster versions of dp_accounting's, and some that it does not have; `release_rules` and `compound_rules` assign them to
events. Private names of dp_accounting are used where it has no public equivalent.
"""

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise

import dp_accounting.dp_event as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant, _gamma_truncated_negative_binomial
from scipy.special import gammaln, log_ndtr

from algorithms.errors import RefusedError
from algorithms.lazy_imports import lazy_module

stats = lazy_module("scipy.stats")

_NEAR_NOTHING = 1e-9
_ROUNDING, _NEAR_ZERO = 2e-15, 1e-10
_LARGE_ORDER, _CENTRAL_ORDER = 64.0, 256
"""The orders from which on each is computed by itself, and up to which central moments bound a sample of fixed size."""
_LOG_SUM_ROUNDING = 2.0**-40
"""By how much the logarithm of a sum of some hundred terms is raised, which is more than its rounding."""
_BLOCKS, _NEGLIGIBLE = (0, 50, 200, 1000), 30.0
"""Of a series: the terms that are taken together begin and end at these, and how far below the sum, as a logarithm, the
largest of them is where it ends."""
_WIDTH, _STEP, _POINTS_AT_ONCE = 12.0, 2 / 3, 4096
"""Of an integral over a normal variable: how far beyond its means it goes and its step, both in standard deviations,
and how many points are taken together."""
_POINTS_OF_CELL, _MAX_CELLS, _LEFT_OUT, _MAX_SHIFT = 12, 4096, 60.0, 1e3
"""Of the same: the fewest points of a cell, the most cells, how far below the largest value, as a logarithm, those that
are left out are, and the largest shift, in standard deviations."""
_MIN_ORDER = 1.01
"""The order from which on its divergence bounds delta; of those below, rounding could be more."""


def rdp_by_library(
    event: dp.DpEvent, orders: tuple[float, ...], adjacency: NeighboringRelation, words: str = "an event"
) -> np.ndarray:
    """The bounds of dp_accounting; raises RefusedError, with these words, if it has none."""
    accountant = RdpAccountant(orders, adjacency)
    if not accountant.supports(event):
        raise RefusedError(
            "no bound is known by RDP for {mechanism}; set {target.accountant} or {method.kind} to another.",
            code="no_bound_by_rdp",
            mechanism=words,
        )
    with _quiet_about_dropped_orders():
        accountant.compose(event)
    return np.asarray(accountant._rdp, dtype=np.float64)  # the bounds have no public reader


@lru_cache(maxsize=1024)
def rdp_of_sampled_gaussian(multiplier: float, rate: float, orders: tuple[float, ...]) -> np.ndarray:
    """Bounds for a Poisson sample under add-or-remove-one, at a rate inside (0, 1), shape [orders].

    The sums of Mironov, Talwar and Zhang 2019, Section 3.3, as in dp_accounting, but vectorised over orders: term by
    term they take most of the time of a search for noise. Infinite at an order whose series converges slowly. Kept, as
    a plan of many trials asks for those of each trial, and then for those of the whole.
    """
    alpha = np.array(orders)
    is_whole = alpha == np.floor(alpha)
    is_large = is_whole & (alpha >= _LARGE_ORDER)
    is_small = is_whole & ~is_large
    moments = np.empty(len(alpha))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # what overflows becomes infinite
        if is_small.any():
            moments[is_small] = _binomial_moments(multiplier, rate, tuple(alpha[is_small]))
        for index in np.flatnonzero(is_large):  # by itself, since it has so many more terms
            moments[index] = _binomial_moments(multiplier, rate, (orders[index],))[0]
        if not is_whole.all():
            moments[~is_whole] = _series_moments(multiplier, rate, tuple(alpha[~is_whole]))
    divergences: np.ndarray = moments / (alpha - 1)
    divergences.setflags(write=False)
    return divergences


def _binomial_moments(z: float, q: float, orders: tuple[float, ...]) -> np.ndarray:
    """log A at integer orders, shape [orders], by the finite sum."""
    # Mironov, Talwar and Zhang 2019, section 3.3: A = sum_k C(alpha, k) (1 - q)^(alpha - k) q^k exp((k^2 - k) / 2 z^2),
    # summed as logarithms, since its terms overflow; terms with k above an order's alpha are left out of its sum.
    count = int(max(orders)) + 1
    alpha, k = np.array(orders), np.arange(count)[:, None]  # [orders] and [k, 1]
    terms = _log_binomials(orders, 0, count) + k * math.log(q) + (alpha - k) * math.log1p(-q)
    terms += (k * k - k) / (2 * z * z)
    terms[k > alpha] = -math.inf
    # A term that overflowed stays infinite.
    largest = np.minimum(terms.max(axis=0), sys.float_info.max)
    moments: np.ndarray = largest + np.log(np.exp(terms - largest).sum(axis=0))  # far faster than SciPy's
    return moments


def _series_moments(z: float, q: float, orders: tuple[float, ...]) -> np.ndarray:
    """log A at other orders, shape [orders], by the two series, until both fall and add nothing."""
    alpha, moments = np.array(orders), np.full(len(orders), math.inf)
    # The output where both parts are equal.
    middle, log_q, log_rest = z * z * math.log(1 / q - 1) + 0.5, math.log(q), math.log1p(-q)
    open_ones = np.arange(len(orders))  # orders whose series has not ended yet
    terms = sums = np.full((2, 1, len(orders)), -math.inf)
    for first, end in pairwise(_BLOCKS):
        i = np.arange(first, end)[:, None]  # [terms, 1]
        j, binomials = alpha[open_ones] - i, _log_binomials(orders, first, end - first)[:, open_ones]
        # Mironov, Talwar and Zhang 2019, arXiv:1908.10530, section 3.3: the integral is cut where both parts of the
        # mixture are equal, and each side is a binomial series with normal tails.
        low = binomials + i * log_q + j * log_rest + (i * i - i) / (2 * z * z) + log_ndtr((middle - i) / z)
        high = binomials + j * log_q + i * log_rest + (j * j - j) / (2 * z * z) + log_ndtr((j - middle) / z)
        before, terms = terms[:, -1:], np.stack([low, high])  # [2 series, terms, orders]
        sums = np.logaddexp.accumulate(np.concatenate([sums[:, -1:], terms], axis=1), axis=1)[:, 1:]
        total = np.logaddexp(sums[0], sums[1])
        # A term that falls in both series may end them; before that, the sums may still grow.
        falls = (terms < np.concatenate([before, terms[:, :-1]], axis=1)).all(axis=0)
        # `_NEGLIGIBLE` below the sum, and falling
        is_last = falls & (terms.max(axis=0) < total - _NEGLIGIBLE)
        ends = is_last.any(axis=0)
        moments[open_ones[ends]] = total[is_last.argmax(axis=0)[ends], np.flatnonzero(ends)]
        open_ones, terms, sums = open_ones[~ends], terms[:, :, ~ends], sums[:, :, ~ends]
        if not len(open_ones):
            break
    return moments


def rdp_of_fixed_size_sample(multiplier: float, rate: float, orders: tuple[float, ...]) -> np.ndarray:
    """Bounds for a sample of fixed size under replace-one, at a rate inside (0, 1), shape [orders].

    multiplier: relative to how far the sum moves if one of its records is replaced.
    Wang, Balle and Kasiviswanathan 2019, arXiv:1808.00087, Theorem 27: with r = P/Q for the sum, the moment at a whole
    order a is at most 1 + sum_j C(a, j) rate^j b_j for j from 2 to a. Here b_j is the smaller of 2 E_Q r^j and
    4 sqrt(m_i m_k), with m_i = E_Q (r - 1)^i and the even numbers i and k next to j, or j itself. As in dp_accounting,
    b_j is 2 E_Q r^j for j > 2 at orders above 256. Between whole orders the chord of the logarithms is a bound
    (Corollary 10). None is stated above that of all records: with the same coins on both sides the sample is a mixture
    of pairs that differ by one record's replacement or not at all.
    """
    alpha = np.array(orders)
    whole = np.unique([np.floor(alpha), np.ceil(alpha)])
    j = np.arange(2, int(whole[-1]) + 1)
    moments = []
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # what overflows becomes infinite
        # 2 E_Q r^j, for E_Q r^j = exp(j (j - 1) / (2 z^2))
        far = math.log(2) + np.float64(multiplier) ** -2 * j * (j - 1) / 2
        central = _log_central_moments(multiplier, min(len(j), _CENTRAL_ORDER) + 2)
        few = j[: _CENTRAL_ORDER - 1]
        near = np.minimum(  # 4 sqrt(m_i m_k), for the even numbers around j
            far[: len(few)], math.log(4) + (central[few // 2 * 2] + central[-(-few // 2) * 2]) / 2
        )
        for order in whole:
            count = int(order) - 1
            # The term of j = 2, and then those without central moments.
            logarithms = near if order <= _CENTRAL_ORDER else np.append(near[:1], far[1:])
            terms = _log_binomials((order,), 2, count)[:, 0] + j[:count] * math.log(rate) + logarithms[:count]
            moments.append(np.logaddexp(0.0, np.logaddexp.reduce(terms) + _LOG_SUM_ROUNDING))  # log(1 + sum)
        divergences: np.ndarray = np.fmin(
            np.interp(alpha, whole, moments) / (alpha - 1), alpha / 2 * np.float64(multiplier) ** -2
        )
    return divergences


def _log_central_moments(multiplier: float, last: int) -> np.ndarray:
    """log E_Q (r - 1)^i for i from 0 to `last`, where r = P/Q is that of N(1, multiplier^2) and N(0, multiplier^2).

    E_Q r f(r) is E_Q f(c r) for c = exp(1 / multiplier^2), so that E_Q (r - 1)^(i + 1) is E_Q (c r - 1)^i less
    E_Q (r - 1)^i. With c r - 1 = c (r - 1) + c - 1 this is a sum of earlier moments whose factors are all positive:
    nothing cancels, as it does in the differences of E_Q r^i, which the moments are, too.
    """
    k = np.arange(last + 1)
    log_powers = np.float64(multiplier) ** -2 * k  # of c^k
    log_rests = log_powers + np.log(-np.expm1(-log_powers))  # of c^k - 1
    moments = np.full(last + 1, -math.inf)
    moments[0] = 0.0
    for i in range(1, last):
        earlier = _log_binomials((i,), 0, i)[:, 0] + log_powers[:i] + (i - k[:i]) * log_rests[1] + moments[:i]
        moments[i + 1] = np.logaddexp(np.logaddexp.reduce(earlier), log_rests[i] + moments[i])
    return moments


def rdp_of_group(multiplier: float, rate: float, count: int, orders: tuple[float, ...]) -> np.ndarray:
    """Bounds for the mixture of `mechanism_plds.GroupPLD`, whichever way round, shape [orders].

    With r = P/Q and Q = N(0, z^2), the moment E_Q r^a at a whole order a is a sum of normal integrals with centres in
    [0, a count]. The trapezoid rule is exact for each up to a share of 3 exp(-2 pi^2 / step^2), 2e-19 here.
    Between whole orders log E_Q r^a lies below its chord, since it is convex in a. Where all records together move the
    sum by more than a thousand deviations, far beyond any epsilon that is asked for, the integral is not computed: r^a
    is convex in the mixture, whose parts have the moments of a shift by j records.

    The other way round, E_Q r^(1 - a) is no more. Proof: let F(e) = E_Q (r - c)^+ and B(e) = E_Q (1 - c r)^+ with
    c = exp(e) be delta both ways. By Taylor's formula the first moment less the second is a (a - 1) times the integral
    over e > 0 of (exp((a - 1) e) - exp(-a e)) (F - B). Now F - B = E_Q h(r) with h(y) = min(1, c y) - min(y, c), since
    E_Q r = 1. The loss log r rises with the output, and is convex. Where it is never below -e, B is 0. Else let m be
    the line in the output that meets it at -e and at e: it is above the loss in between, and else below. Let k be such
    that exp(m) has the mean exp(k), so that m - k is the loss of normal noise.
    If k > 0: F is at least that of m, and B at most. With k = 0 those of m are equal, since the losses of normal noise
    are the same both ways, and a larger k raises the former and lowers the latter.
    If k <= 0: h rises up to 1 / c, falls from there to c and is constant beyond, so that h(r) >= h(exp(m)). With
    h(exp(s)) = exp(s / 2) odd(s), for an odd function that is positive below 0, the mean of h(exp(m)) is a positive
    number times that of odd(s) for a normal s of mean k, which is not negative.
    """
    alpha = np.array(orders)
    if count / multiplier > _MAX_SHIFT:
        numbers = np.arange(count + 1)[:, None]
        # Log of the chance of j times exp(a (a - 1) j^2 / (2 z^2)).
        terms = stats.binom.logpmf(numbers, count, rate) + alpha * (alpha - 1) / 2 * np.square(
            numbers / multiplier
        )
        log_moments = np.logaddexp.reduce(terms)
    else:
        whole = np.unique([np.floor(alpha), np.ceil(alpha)])
        moments = _GroupMoments(multiplier, rate, count, float(whole[-1]))
        every = [moments.log_moment(order) if order > 1 else 0.0 for order in whole.tolist()]
        log_moments = np.interp(alpha, whole, every)
    divergences: np.ndarray = log_moments / (alpha - 1)
    return divergences


class _GroupMoments:
    """log E_Q (P/Q)^a of a group at whole orders a, by the trapezoid rule on points that all orders share.

    L(t), the logarithm of P/Q at the output z t, is convex. So inside a cell of points the logarithm of the integrand,
    a L(t) - t^2 / 2 but for a constant, is at most that with the chord of L. For most cells this says that they add
    nothing; L is computed in the others alone.
    """

    def __init__(self, multiplier: float, rate: float, count: int, max_order: float) -> None:
        self._shift, self._numbers = count / multiplier, np.arange(count + 1) / multiplier
        # Log chance of j, and -j^2 / (2 z^2) of its density.
        self._constants = stats.binom.logpmf(np.arange(count + 1), count, rate) - np.square(self._numbers) / 2
        points = math.ceil((max_order * self._shift + 2 * _WIDTH) / _STEP)
        self._points = max(_POINTS_OF_CELL, -(-points // _MAX_CELLS))
        self._edges = _STEP * self._points * np.arange(-(-points // self._points) + 1) - _WIDTH
        self._at_edges = self._log_ratios(self._edges)
        self._inside: dict[int, np.ndarray] = {}

    def log_moment(self, order: float) -> float:
        """log E_Q (P/Q)^order, raised by more than what rounding and the cells that are left out take."""
        end = order * self._shift + _WIDTH
        last = min(int(np.searchsorted(self._edges, end)) + 1, len(self._edges))
        edges, ratios = self._edges[:last], self._at_edges[:last]
        slopes = np.diff(ratios) / np.diff(edges)
        # Where a L(t) - t^2 / 2, with the chord of L, is largest in each cell.
        highest = np.clip(order * slopes, edges[:-1], edges[1:])
        bounds = order * (ratios[:-1] + slopes * (highest - edges[:-1])) - np.square(highest) / 2
        at_edges = order * ratios - np.square(edges) / 2
        # Where numbers are so large that they differ by rounding alone, the cell of the largest one is still there.
        bounds = np.maximum(bounds, np.maximum(at_edges[:-1], at_edges[1:]))
        cells = np.flatnonzero(bounds >= float(at_edges.max()) - _LEFT_OUT)
        t = edges[cells, None] + _STEP * np.arange(self._points)
        self._fill(cells.tolist(), t)
        exponents = order * np.stack([self._inside[cell] for cell in cells.tolist()]) - np.square(t) / 2
        largest = float(exponents.max())
        # Each point left out is below exp(-_LEFT_OUT) of the largest.
        left_out = len(bounds) * self._points * math.exp(-_LEFT_OUT)
        log_sum = largest + math.log(float(np.exp(exponents - largest).sum()) + left_out)
        # The rule's step over the normal density's constant.
        return log_sum + math.log(_STEP / math.sqrt(2 * math.pi)) + _ROUNDING * order

    def _fill(self, cells: list[int], t: np.ndarray) -> None:
        """Compute L in those of the cells, with points t of shape [cells, points], where it is not known."""
        new = [at for at, cell in enumerate(cells) if cell not in self._inside]
        if new:
            ratios = self._log_ratios(t[new].ravel()).reshape(len(new), -1)
            self._inside.update(zip([cells[at] for at in new], ratios, strict=True))

    def _log_ratios(self, t: np.ndarray) -> np.ndarray:
        """L at outputs, shape [outputs]."""
        ratios = np.empty(len(t))
        for first in range(0, len(t), _POINTS_AT_ONCE):
            portion = slice(first, first + _POINTS_AT_ONCE)
            exponents = self._constants[:, None] + self._numbers[:, None] * t[portion]
            largest = exponents.max(axis=0)
            ratios[portion] = largest + np.log(np.exp(exponents - largest).sum(axis=0))
        return ratios


@lru_cache(maxsize=1024)
def _log_binomials(orders: tuple[float, ...], first: int, count: int) -> np.ndarray:
    """log |binomial(order, k)| for k = first, ..., first + count - 1, shape [count, orders]."""
    alpha, k = np.array(orders), np.arange(first, first + count)[:, None]
    logarithms: np.ndarray = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1)
    logarithms.setflags(write=False)
    return logarithms


def round_up_rdp(divergences: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Bounds of a sample, increased for rounding; infinite where they overflowed.

    Rounding may reduce a logarithm by 1e-15 times the order, which matters near 0: many such events must not cost
    nothing, and one must not cost less than nothing.
    """
    bounds = np.nan_to_num(divergences, nan=math.inf, posinf=math.inf).clip(min=0.0)
    is_near_zero = bounds * (orders - 1) < _NEAR_ZERO * orders
    raised: np.ndarray = bounds + np.where(is_near_zero, _ROUNDING * orders / (orders - 1), 0.0)
    return raised


def rdp_of_pure(epsilon: float, orders: np.ndarray) -> np.ndarray:
    """Bounds for randomised response, which dominates every mechanism with this epsilon (Mironov 2017, Prop. 5)."""
    truth = -np.logaddexp(0.0, -epsilon)  # log of e^epsilon / (1 + e^epsilon)
    lie = truth - epsilon
    moments = np.logaddexp(orders * truth + (1 - orders) * lie, orders * lie + (1 - orders) * truth)
    # Near 0 rounding takes all of the moments; this bound is as tight there (Bun and Steinke 2016, Proposition 3.3).
    divergences = np.where(moments < _NEAR_NOTHING, orders * epsilon**2 / 2, moments / (orders - 1))
    return np.clip(divergences, 0.0, epsilon)


def rdp_of_objective(noise_multiplier: float, curvature_ratio: float, orders: np.ndarray) -> np.ndarray:
    """Bounds for the privacy loss of `mechanism_plds.ObjectivePLD`: Redberg, Koskela and Wang 2023."""
    # For a standard normal Z, E exp((order - 1) s |Z|) is 2 exp(((order - 1) s)^2 / 2) Phi((order - 1) s).
    s = 1.0 / noise_multiplier
    divergences: np.ndarray = (
        math.log1p(curvature_ratio)
        + orders * s**2 / 2
        + (math.log(2.0) + log_ndtr((orders - 1) * s)) / (orders - 1)
    )
    return divergences


def rdp_of_selection(mean: float, shape: float, once: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Bounds for the best of a random number of trials.

    The number has a truncated negative binomial law, or a Poisson one where the shape is infinite.

    Args:
        mean: Of the number.
        shape: Of its law.
        once: Bounds for one trial, shape [orders].
        orders: Ascending, from 1 on; those of one trial bound others of the best.

    Source: Papernot and Steinke 2022, arXiv:2110.03620, Theorems 2 and 6.
    """
    once = np.where(np.isnan(once), math.inf, once)
    with np.errstate(divide="ignore", invalid="ignore"):
        # For one trial, and for how many there are.
        bounds = np.where(orders > 1, once + math.log(mean) / (orders - 1), math.inf)
        if math.isinf(shape):
            # Delta at each of these epsilons, one a column, by the better of two bounds at the best order.
            epsilons = np.log1p(1 / (orders - 1))
            a, r = orders[:, None], once[:, None]
            exponents = np.where(
                a > _MIN_ORDER, (a - 1) * (r - epsilons + np.log1p(-1 / a)) - np.log(a), math.inf
            )
            exponents = np.minimum(exponents, np.log1p(-np.exp(-r)) / 2)
            bounds_above: np.ndarray = bounds + mean * np.exp(np.minimum(exponents.min(axis=0), 0.0))
            return np.where(orders > 1, bounds_above, math.inf)
    gamma = float(_gamma_truncated_negative_binomial(shape, mean))
    bounds = bounds + (1 + shape) * np.min((1 - 1 / orders) * once - math.log(gamma) / orders)
    # From the highest order down.
    rising: np.ndarray = np.minimum.accumulate(bounds[::-1])[::-1]  # a bound holds at lower orders, too
    return rising


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
