"""The losses of single mechanisms for `pld`: normal and Laplace noise, samples of them, groups, and single values.

Masses are differences of distribution functions of tails, each with its rounding error: `ndtr` of a negative number is
right to a few units in the last place times 1 + t^2, and so is t itself.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, xlogy

from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting.pld import CellMasses, PrivacyLoss

stats = lazy_module("scipy.stats")

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_ROUNDING = 2.0**-51
_MARGIN = 1e-9
_MIN_POINTS, _MAX_POINTS = 64, 2000
"""The fewest and the most edges of a mechanism's losses."""
_NORMAL_STEP, _LOSS_STEP = 0.1, 0.25
"""The largest distance of edges: in standard deviations of the noise, and in losses."""
_NEGLIGIBLE_CHANCE = 1e-45
"""Chances of numbers of a person's records in a sample up to which they are left out, and counted as lost."""
_AT_ONCE, _TABLE_REACH, _TABLE_SIZE = 8192, 38.0, 4000
"""For a group's losses: how many are computed together; and the table that gives a first guess of their inverse, how
many standard deviations it goes beyond the means and how many outputs it has."""


def _knots(low: float, high: float, step: float) -> Array:
    """Ascending numbers between two, about a step apart."""
    count = int(min(max((high - low) / step, _MIN_POINTS), _MAX_POINTS))
    return np.linspace(low, high, count)


def _reach(tail: float) -> float:
    """How many standard deviations have this mass beyond them; -inf where any do."""
    return -math.inf if tail >= 1 else float(-ndtri(tail))


def normal_masses(t: Array) -> tuple[Array, Array]:
    """The masses of a standard normal between ascending numbers, and the nearer tails that they are differences of.

    t: Shape [numbers] or [rows, numbers].
    """
    # Differences of the nearer tail: those of 1 - tail would have lost small masses to rounding.
    tails = ndtr(-np.abs(t))
    first, last = tails[..., :-1], tails[..., 1:]
    masses = np.where(
        t[..., 1:] <= 0, last - first, np.where(t[..., :-1] >= 0, first - last, 1.0 - first - last)
    )
    return np.maximum(masses, 0.0), tails


def _normal(t: Array, scale: Array) -> tuple[Array, Array, float, float]:
    """The masses of a standard normal between ascending numbers, their errors, and the masses outside.

    scale: The size of the terms that t is a difference of, which rounding is relative to.
    """
    masses, tails = normal_masses(t)
    # Relative to a tail: what the function itself loses, and how far it moves as t is rounded relative to `scale`; the
    # density is at most 1 + |t| times the tail.
    with np.errstate(invalid="ignore"):
        errors = _ROUNDING * tails * (4.0 + np.square(t) + (1.0 + np.abs(t)) * scale)
    errors = np.where(tails > 0, errors, 0.0)
    first, last = (t[0], t[-1]) if t.ndim == 1 else (t[:, :1], t[:, -1:])
    return masses, errors[..., 1:] + errors[..., :-1], ndtr(first), ndtr(-last)


@dataclass(frozen=True)
class GaussianPLD:
    """N(mu, 1) against N(0, 1): a loss with mean mu^2 / 2 and standard deviation mu."""

    mu: float

    def edges(self, p_tail: float, q_tail: float) -> Array:
        reaches = [(sign * self.mu / 2, _reach(tail)) for sign, tail in ((1, p_tail), (-1, q_tail))]
        low = min((mean - reach for mean, reach in reaches if reach > -math.inf), default=0.0)
        high = max((mean + reach for mean, reach in reaches if reach > -math.inf), default=0.0)
        return _knots(self.mu * low, self.mu * high, min(_NORMAL_STEP * self.mu, _LOSS_STEP))

    def cells(self, edges: Array) -> CellMasses:
        # The loss l is that of the output x = l / mu + mu / 2; x is N(mu, 1) under P and N(0, 1) under Q.
        scaled, half = edges / self.mu, self.mu / 2
        scale = np.abs(scaled) + half
        p, p_error, p_below, p_above = _normal(scaled - half, scale)  # x - mu = l / mu - mu / 2
        q, q_error, q_below, q_above = _normal(scaled + half, scale)  # x = l / mu + mu / 2
        return CellMasses(p, q, p_error, q_error, (p_below, q_below), (p_above, q_above))


@dataclass(frozen=True)
class LaplacePLD:
    """Laplace noise of scale 1 / epsilon against the same moved by 1: the loss is epsilon, -epsilon or between."""

    epsilon: float

    def edges(self, p_tail: float, q_tail: float) -> Array:
        return _knots(-self.epsilon, self.epsilon, _LOSS_STEP)

    def cells(self, edges: Array) -> CellMasses:
        # Cells from below all edges to above all. Half of P has the largest loss, half of Q the smallest.
        e = self.epsilon
        inside = np.clip(np.concatenate([[-e], edges, [e]]), -e, e)
        step = -np.expm1((inside[:-1] - inside[1:]) / 2)
        # F(l) is exp((l - e) / 2) / 2 under P, so differences lose nothing
        p, q = 0.5 * np.exp((inside[1:] - e) / 2) * step, 0.5 * np.exp(-(inside[:-1] + e) / 2) * step
        # The atoms where the output is beyond both centres.
        for loss, p_mass, q_mass in ((-e, 0.5 * math.exp(-e), 0.5), (e, 0.5, 0.5 * math.exp(-e))):
            # Cells are (lower, upper], but the first has its lower edge, too.
            at = 1 if loss == edges[0] else int(np.searchsorted(edges, loss))
            p[at], q[at] = p[at] + p_mass, q[at] + q_mass
        errors = 8 * _ROUNDING * p[1:-1], 8 * _ROUNDING * q[1:-1]
        below, above = ((float(p[end]), float(q[end])) for end in (0, -1))
        return CellMasses(p[1:-1], q[1:-1], *errors, below, above)


@dataclass(frozen=True)
class SampledPLD:
    """(1 - rate) Q + rate P against Q, where `pld` is that of P against Q."""

    pld: PrivacyLoss
    rate: float

    def edges(self, p_tail: float, q_tail: float) -> Array:
        each = min(p_tail, q_tail) if p_tail < 1 else q_tail
        # The sample has `rate` of P's tail.
        losses = self.pld.edges(min(1.0, p_tail / self.rate) if p_tail < 1 else 1.0, each)
        # log(1 - rate + rate exp(loss)), without overflow
        low = np.log1p(self.rate * np.expm1(np.minimum(losses, 1.0)))
        high = losses + math.log(self.rate) + np.log1p((1 / self.rate - 1) * np.exp(-np.maximum(losses, 0.0)))
        edges = np.where(losses < 1, low, high)
        margin = _MARGIN * (edges[-1] - edges[0])
        edges[0], edges[-1] = edges[0] - min(margin, _MARGIN), edges[-1] + margin
        return np.unique(edges)

    def cells(self, edges: Array) -> CellMasses:
        # The loss rises with that of the whole, so that the cells of one are those of the other.
        within = self.pld.cells(_loss_without_sampling(edges, self.rate))
        rest, rate = 1 - self.rate, self.rate
        (p_below, q_below), (p_above, q_above) = within.below, within.above
        return CellMasses(  # P' = (1 - rate) Q + rate P, and Q' = Q
            rest * within.q + rate * within.p,
            within.q,
            rest * within.q_error + rate * within.p_error + 4 * _ROUNDING * within.q,
            within.q_error,
            (rest * q_below + rate * p_below, q_below),
            (rest * q_above + rate * p_above, q_above),
            within.slip,
        )


def _loss_without_sampling(losses: Array, rate: float) -> Array:
    """log(1 + (exp(loss) - 1) / rate), without overflow; -inf for losses that a sample does not have."""
    with np.errstate(divide="ignore"):
        # log(1 - rate) is the least loss of a sample.
        low = np.log1p(np.maximum(np.expm1(np.minimum(losses, 1.0)) / rate, -1.0))
    high = losses - np.log(rate) + np.log1p(-(1 - rate) * np.exp(-np.maximum(losses, 0.5)))
    return np.where(losses < 1, low, high)


@dataclass(frozen=True)
class ReversedPLD:
    """Q against P, where `pld` is that of P against Q."""

    pld: PrivacyLoss

    def edges(self, p_tail: float, q_tail: float) -> Array:
        return -self.pld.edges(q_tail, p_tail)[::-1]

    def cells(self, edges: Array) -> CellMasses:
        c = self.pld.cells(-edges[::-1])
        p, q, p_error, q_error = (masses[..., ::-1] for masses in (c.q, c.p, c.q_error, c.p_error))
        return CellMasses(p, q, p_error, q_error, c.above[::-1], c.below[::-1], c.slip)


@dataclass(frozen=True)
class PoissonReplacedPLD:
    """(1 - rate) N(0, z^2) + rate N(1, z^2) against (1 - rate) N(0, z^2) + rate N(-1, z^2)."""

    multiplier: float
    rate: float

    def edges(self, p_tail: float, q_tail: float) -> Array:
        low = high = 0.0
        for tail, sign in ((p_tail, 1), (q_tail, -1)):
            if tail < 1:
                # Of the part of the mixture that is not moved, and of the part that is.
                near, far = (
                    _reach(tail) * self.multiplier,
                    _reach(min(tail / self.rate, 0.5)) * self.multiplier,
                )
                ends = max(near, 1 + far), -near
                low = min(low, ends[1] if sign > 0 else -ends[0])
                high = max(high, ends[0] if sign > 0 else -ends[1])
        step = min(_NORMAL_STEP * self.multiplier, _LOSS_STEP * self.multiplier**2)
        return np.unique(self._losses(_knots(low, high, step)))

    def _losses(self, outputs: Array) -> Array:
        tilt, half = outputs / self.multiplier**2, 0.5 / self.multiplier**2
        rest = np.log1p(-self.rate) if self.rate < 1 else -math.inf
        # Log densities less that of N(0, z^2): up and down.
        sides = [np.logaddexp(rest, math.log(self.rate) - half + sign * tilt) for sign in (1, -1)]
        difference: Array = sides[0] - sides[1]
        return difference

    def cells(self, edges: Array) -> CellMasses:
        z, half = self.multiplier, np.abs(edges) / 2
        # With t = output / z^2, a = 1 - rate and b = rate exp(-1 / (2 z^2)), exp(loss) = (a + b e^t) / (a + b e^-t), so
        # that t = loss / 2 + asinh(a / b sinh(loss / 2)); by the logarithm of the ratio a / b, which may overflow.
        ratio = xlogy(1, (1 - self.rate) / self.rate) + 0.5 / z**2  # log(a / b)
        with np.errstate(divide="ignore", over="ignore"):
            inner = ratio + half + np.log(-np.expm1(-2 * half) / 2)  # log(a / b sinh(loss / 2))
            # asinh(y) is about log(2 y) where exp would overflow.
            bend = np.where(inner < 300, np.arcsinh(np.exp(np.minimum(inner, 300))), inner + math.log(2))
        outputs = z**2 * np.sign(edges) * (half + bend)  # t z^2, odd in the loss
        at, scale = outputs / z, np.abs(outputs / z) + 1 / z
        middle, m_error, *m_out = _normal(at, scale)
        up, up_error, *up_out = _normal(at - 1 / z, scale)
        down, down_error, *down_out = _normal(at + 1 / z, scale)
        rest, rate = 1 - self.rate, self.rate
        below, above = (
            (rest * m + rate * u, rest * m + rate * d)
            for m, u, d in zip(m_out, up_out, down_out, strict=True)
        )
        p, q = rest * middle + rate * up, rest * middle + rate * down
        return CellMasses(
            p, q, rest * m_error + rate * up_error, rest * m_error + rate * down_error, below, above
        )


@dataclass(frozen=True)
class GroupPLD:
    """A Poisson sample of `count` records that all point one way, against none of them, with normal noise.

    P is the mixture of N(j, z^2) with the binomial chances that j of the records are sampled, Q is N(0, z^2). Ganesh
    2024, arXiv:2401.10294, shows that it dominates: given the sample of all other records, outputs with and without
    the group are a mixture of N(v_S, z^2) over samples S of the group and N(0, z^2), with |v_S| at most the size of S;
    among such vectors those on one ray are the worst (Choquette-Choo et al. 2023, arXiv:2310.15526, Lemma 4.5).
    The group must be removed or added as a whole.
    """

    multiplier: float
    rate: float
    count: int

    @cached_property
    def _weights(self) -> tuple[Array, Array, float]:
        """The numbers of sampled records, their chances, and the chance of numbers that are left out."""
        every = np.arange(self.count + 1)
        chances = stats.binom.pmf(every, self.count, self.rate)
        is_likely = chances > _NEGLIGIBLE_CHANCE
        return every[is_likely], chances[is_likely], float(self.count * _NEGLIGIBLE_CHANCE)

    def _losses(self, outputs: Array) -> tuple[Array, Array]:
        """The losses at outputs, and how fast they rise."""
        numbers, chances, _ = self._weights
        losses, slopes = np.empty(len(outputs)), np.empty(len(outputs))
        for first in range(0, len(outputs), _AT_ONCE):
            portion = slice(first, first + _AT_ONCE)
            # Log of N(j, z^2) over N(0, z^2): (j x - j^2 / 2) / z^2.
            exponents = numbers[:, None] * (outputs[portion] - numbers[:, None] / 2) / self.multiplier**2
            exponents += np.log(chances)[:, None]
            largest = exponents.max(axis=0)
            shares = np.exp(exponents - largest)
            whole = shares.sum(axis=0)
            losses[portion] = largest + np.log(whole)
            # The mean of j given the output, over z^2.
            slopes[portion] = (numbers @ shares) / whole / self.multiplier**2
        return losses, slopes

    def edges(self, p_tail: float, q_tail: float) -> Array:
        z, low, high = self.multiplier, 0.0, 0.0
        if q_tail < 1:
            low, high = -z * _reach(q_tail), z * _reach(q_tail)
        if p_tail < 1:
            low = min(low, -z * _reach(p_tail))
            for number, chance in zip(*self._weights[:2], strict=True):
                # Each part of the mixture has its share of the tail.
                high = max(high, number + z * _reach(min(p_tail / chance / len(self._weights[0]), 0.5)))
        return np.unique(self._losses(_knots(low, high, min(_NORMAL_STEP * z, _LOSS_STEP * z**2)))[0])

    @cached_property
    def _table(self) -> tuple[Array, Array, Array]:
        """Outputs, their losses and how fast these rise, shape [_TABLE_SIZE] each."""
        reach = _TABLE_REACH * self.multiplier
        outputs = np.linspace(-reach, float(self._weights[0][-1]) + reach, _TABLE_SIZE)
        return outputs, *self._losses(outputs)

    def _outputs(self, losses: Array) -> tuple[Array, float]:
        """The outputs with these losses, and by how much theirs differ from these; infinite beyond all mass."""
        table, known, slopes = self._table
        after = np.clip(np.searchsorted(known, losses), 1, len(table) - 1)
        # A table gives the start, a step of Newton's the rest; what is then still missing widens the cells (`slip`).
        outputs = _inverse_start(losses, known, table, slopes, after)
        there, slopes = self._losses(outputs)
        # Where the loss is flat, which is beyond all mass, a step may be anything.
        with np.errstate(divide="ignore", invalid="ignore"):
            stepped = outputs + (losses - there) / slopes  # a step of Newton's method
        outputs = np.clip(stepped, table[after - 1], table[after])
        is_inside = (losses > known[0]) & (losses < known[-1])
        missed = np.abs(self._losses(outputs)[0] - losses)[is_inside]
        outputs = np.where(is_inside, outputs, np.where(losses <= known[0], -math.inf, math.inf))
        return outputs, float(missed.max(initial=0.0))

    def cells(self, edges: Array) -> CellMasses:
        outputs, slip = self._outputs(edges)
        at = outputs / self.multiplier
        q, q_error, q_below, q_above = _normal(at, np.abs(at))
        numbers, chances, never = self._weights
        # What was left out may be infinite loss.
        p, p_error, p_below, p_above = np.zeros(len(q)), np.zeros(len(q)), 0.0, never
        for number, chance in zip(numbers, chances, strict=True):
            mean = number / self.multiplier
            mass, error, below, above = _normal(at - mean, np.abs(at) + mean)
            p, p_error = p + chance * mass, p_error + chance * (error + 16 * _ROUNDING * mass)
            p_below, p_above = p_below + chance * below, p_above + chance * above
        return CellMasses(p, q, p_error, q_error, (p_below, q_below), (p_above, q_above), slip)


def _inverse_start(losses: Array, known: Array, table: Array, slopes: Array, after: Indices) -> Array:
    """Outputs at losses by the cubics through a table's points with its slopes, kept between the points.

    known, slopes: The losses at the outputs in the table and how fast they rise there. after: The point above each.
    """
    before, width = after - 1, known[after] - known[after - 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.clip((losses - known[before]) / width, 0.0, 1.0)
        rise = t * t * (3.0 - 2.0 * t)  # Hermite's cubic: 3 t^2 - 2 t^3 between the two outputs
        # The slopes of the inverse, 1 / slopes, at both ends.
        bend = t * (1.0 - t) * width * ((1.0 - t) / slopes[before] - t / slopes[after])
        outputs = table[before] + rise * (table[after] - table[before]) + bend
    outputs = np.where(np.isfinite(outputs), outputs, table[before])
    return np.clip(outputs, table[before], table[after])


@dataclass(frozen=True)
class FoldedPLD:
    """The loss whose deltas are those of `pld` at every epsilon from 0 on, removing and adding alike.

    Where both H(P'|Q') and H(Q'|P') are at most its delta(e) for all e >= 0, delta(-e) is at most
    1 - exp(-e) + exp(-e) delta(e), which makes a whole profile: above 0 the loss is distributed as under P, below 0 as
    under Q with the sign turned round, and the rest of the mass lies at 0.
    """

    pld: PrivacyLoss

    def edges(self, p_tail: float, q_tail: float) -> Array:
        above = self.pld.edges(min(p_tail, q_tail), 1.0)
        above = np.append(0.0, above[above > 0])  # 0 is an edge, so that each cell is on one side
        return np.unique(np.concatenate([-above, above]))

    def cells(self, edges: Array) -> CellMasses:
        if edges[0] > 0:
            return self.cells(np.append(0.0, edges)).above_edge(edges, 1)[1]
        if edges[-1] < 0:
            return ReversedPLD(self).cells(edges)
        # Above 0 as the loss itself, below 0 mirrored with P and Q exchanged.
        up, down = self.pld.cells(np.maximum(edges, 0.0)), self.pld.cells(np.maximum(-edges[::-1], 0.0))
        p, q = up.p + down.q[::-1], up.q + down.p[::-1]
        # A cell on the other side of 0 is empty, exactly: what rounding may add to it would be far above rare losses.
        is_up, is_down = edges[1:] > 0, edges[:-1] < 0
        p_error = is_up * up.p_error + is_down * down.q_error[::-1]
        q_error = is_up * up.q_error + is_down * down.p_error[::-1]
        middle = max(0.0, 1.0 - self._above_0())  # what neither side has lies at loss 0
        at = min(max(int(np.searchsorted(edges, 0.0, side="left")) - 1, 0), len(p) - 1)
        p[at], q[at] = p[at] + middle, q[at] + middle
        below, above = (down.above[1], down.above[0]), (up.above[0], up.above[1])
        return CellMasses(p, q, p_error, q_error, below, above, up.slip)

    def _above_0(self) -> float:
        """The masses of P and of Q above 0, added up."""
        cells = self.pld.cells(np.array([0.0, 1.0]))
        return float(cells.p[0] + cells.q[0]) + sum(cells.above)


@dataclass(frozen=True)
class ObjectivePLD:
    """log(1 + ratio) + s^2 / 2 + |X| for X ~ N(0, s^2), which bounds the loss of an exact private minimum.

    s is 1 / multiplier. Between neighbours the density of the minimum changes by the Jacobian, a rank-one change, and
    by the density of the random term, which a record's gradient shifts along its features by at most its bound.
    Under "Q" is E exp(-L) here, which is all that the discretisation needs.
    """

    multiplier: float
    ratio: float

    @property
    def _min_loss(self) -> float:
        return math.log1p(self.ratio) + 0.5 / self.multiplier**2

    def edges(self, p_tail: float, q_tail: float) -> Array:
        s = 1 / self.multiplier
        high = s * _reach(min(p_tail, q_tail) / 2)
        return self._min_loss + _knots(0.0, high, min(_NORMAL_STEP * s, _LOSS_STEP))

    def cells(self, edges: Array) -> CellMasses:
        s = 1 / self.multiplier
        t = np.maximum(edges - self._min_loss, 0.0) / s
        scale = (np.abs(edges) + self._min_loss) / s
        p, p_error, _, p_above = _normal(t, scale)
        q, q_error, _, q_above = _normal(t + s, scale + s)
        # exp(-s t) times the normal density at t is exp(s^2 / 2) times that at t + s; both signs of X count.
        weight = 2 * math.exp(min(s**2 / 2 - self._min_loss, 700.0))
        return CellMasses(
            2 * p, weight * q, 2 * p_error, weight * q_error, (0.0, 0.0), (2 * p_above, weight * q_above)
        )


@dataclass(frozen=True)
class AtomsPLD:
    """A loss that takes finitely many values, by their chances under P."""

    losses: Array
    masses: Array
    infinity_mass: float = 0.0

    @cached_property
    def weights(self) -> Array:
        """The chances under Q; a value without mass has none, however low it is."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.where(self.masses > 0, self.masses * np.exp(-self.losses), 0.0)

    def edges(self, p_tail: float, q_tail: float) -> Array:
        tails = ((self.masses, p_tail), (self.weights, q_tail))
        # A far value of next to no mass would decide how wide cells are, and how far the sum reaches.
        is_above = np.all([np.cumsum(masses[::-1])[::-1] <= tail for masses, tail in tails], axis=0)
        is_below = np.all([np.cumsum(masses) <= tail for masses, tail in tails], axis=0)
        inside = np.flatnonzero(~is_above & ~is_below)
        losses = self.losses[inside] if len(inside) > 1 else self.losses
        thinned = np.linspace(0, len(losses) - 1, min(len(losses), _MAX_POINTS)).round().astype(int)
        edges = np.unique(losses[thinned])
        return edges if len(edges) > 1 else np.append(edges, edges[0] + _MARGIN)

    def cells(self, edges: Array) -> CellMasses:
        at = np.searchsorted(edges, self.losses, side="left") - 1  # cells are (lower, upper]
        at[self.losses == edges[0]] = 0
        is_inside = (at >= 0) & (at < len(edges) - 1)
        cells, weights, is_below = len(edges) - 1, self.weights, at < 0
        p, q = (np.bincount(at[is_inside], m[is_inside], cells).astype(float) for m in (self.masses, weights))
        is_above = ~is_inside & ~is_below
        below = float(self.masses[is_below].sum()), float(weights[is_below].sum())
        above = float(self.masses[is_above].sum()) + self.infinity_mass, float(weights[is_above].sum())
        return CellMasses(p, q, 8 * _ROUNDING * p, 8 * _ROUNDING * q, below, above)


@dataclass(frozen=True)
class ProfilePLD(AtomsPLD):
    """The same where all of its deltas matter and nothing is added to it: they are sums over its points, on no grid."""

    @cached_property
    def _sums_from(self) -> tuple[Array, Array, float]:
        """P and Q of each point and those above it, shape [k + 1] each, and the share of P that rounding may take."""
        # From the top down, so that small sums lose nothing.
        p, q = (np.append(np.cumsum(masses[::-1])[::-1], 0.0) for masses in (self.masses, self.weights))
        return p, q, (len(p) + 16) * _ROUNDING

    def deltas(self, epsilons: Array, min_delta: float = 0.0) -> Array:
        """Delta at epsilons of any sign, shape [epsilons]; min_delta: as for `GridComposition`."""
        p, q, rounding = self._sums_from
        above = np.searchsorted(self.losses, epsilons, side="right")
        # At most P (1 + rounding) is left, however small: what is subtracted is at most P.
        sticks = p[above] * (1 + rounding) - np.exp(epsilons) * q[above]
        return np.clip(sticks, 0.0, 1.0) + self.infinity_mass

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon with at most this delta; infinite where none has."""
        if self.infinity_mass > delta:
            return math.inf
        p, q, rounding = self._sums_from
        first = int(np.argmax(np.append(self.deltas(self.losses[:-1]), self.infinity_mass) <= delta))
        # Below the first point with at most this delta, and above the last one with more, P - exp(epsilon) Q falls to
        # what infinite losses leave.
        excess = p[first] * (1 + rounding) - (delta - self.infinity_mass)
        with np.errstate(divide="ignore"):
            epsilon = float(np.log(excess / q[first])) if excess > 0 else 0.0
        return max(0.0, epsilon + _ROUNDING * (1 + abs(epsilon)))
