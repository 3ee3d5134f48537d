"""Sums of privacy losses on one grid, by Fourier transforms, and what they say of delta and epsilon.

Each distribution is first multiplied by exp(tilt * L) and normalised, which commutes with convolution. With the tilt of
a saddle point the mean of the sum lies near the epsilon of the search, so a delta of 1e-15 is as exact as one of
0.1. (A sum without tilt is known to about 1e-16 in all, which is more than the tail that decides a small delta.)

What the numbers lose is added: the norm of the rounding of the transforms is bounded by Higham 2002, Theorem 24.2, and
what it adds to a delta by Cauchy and Schwarz; mass that leaves the window upwards is bounded by Chernoff's bound and
counts as infinite loss.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from algorithms.privacy.accounting.pld import (
    Array,
    GridLoss,
    Indices,
    PLDSum,
    PrivacyLoss,
    check_points,
    discretise,
    low_tail_truncation,
    sketch,
    tail_truncation,
)
from algorithms.privacy.accounting.recurrence import decaying_sums

_UNIT_ROUNDOFF = 2.0**-53
_LOG_ABOVE_WINDOW, _LOG_NEGLIGIBLE = math.log(1e8), math.log(1e7)
"""Logarithms of how rare a tilted sum above the window is, and of how small a part of delta does not matter."""
_LARGEST_EXPONENT = 600.0
_RARE_TAIL = 5.0
"""At most exp(-5) of the tilted sum is folded from below the window to its top, even where more would not matter to
delta, so that the window holds the bulk."""
_MIN_MODULUS, _LOG_SURE = 1e-300, math.log(1e-9)
"""The least modulus of a transform, and the logarithm of one that rounding is far below."""
_LOG_NOTHING, _NOTHING = -42.0, math.exp(-40.0)
"""The logarithm of a product that is left out, and a bound on the norm of all that are, which rounding is above."""
_FEW_POINTS, _MANY_CELLS, _MAX_WIDENING = 2**12, 2**13, 50
"""Up to so many points of one distribution, and 16 times as many of all, they themselves choose the tilt and the
window; beyond so many equal cells of all, cells are wide where little lies; and how often a window is widened."""
_MAX_BLOCK = 2**21
"""Points of the circles of all losses that are transformed at once."""
_ROOT, _PRODUCTS = 2, 8
"""Of a transform at few frequencies: what a root takes, by what a point of a fast transform does, and how many products
take as long as one."""
MAX_POINTS = 2**20
"""So long an array is the last to be tried."""
_JUMPS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Multiples of 1 / the longest loss: where rare jumps decide, K(t + s) - K(t) is about lambda (exp(s loss) - 1), whose
best s * loss is a logarithm of the rarity."""
_SHIFTS = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
"""Multiples of sqrt(2 r / variance), the best shift of Chernoff's bound for a normal sum; smaller ones, too, since
tilted sums have heavier upper tails. One that is off by a factor c costs (c + 1 / c) / 2 of the half-width."""


class GridComposition:
    """The sum of independent losses on one grid, whose deltas are upper bounds.

    Args:
        plds: Each with the number of times that it occurs.
        grid: The width of a cell.
        delta: The delta that matters: less than a millionth of it is given to tails.
        rough: The sum of a few hundred points a distribution, where it is known.
        decisive: The losses that decide, where delta alone matters: those above are capped.
    """

    def __init__(
        self,
        plds: Sequence[tuple[PrivacyLoss, int]],
        grid: float,
        delta: float,
        rough: PLDSum | None = None,
        decisive: tuple[float, float] | None = None,
    ) -> None:
        rough = rough or sketch(plds, tail_truncation(plds, delta), low_tail_truncation(plds))
        capped = rough.with_cap(decisive[1]) if decisive else rough
        self._grid, self._size = grid, 0
        self._last_tail: tuple[float, _Tail] | None = None
        tilt = 0.0
        if decisive:
            each = [points.ends[1] - max(points.ends[0], decisive[0]) for points, _ in capped.parts]
            tilt = capped.saddle_point(delta)[1] if sum(each) > _MANY_CELLS * grid else 0.0
        self._losses = [
            discretise(pld, count, grid, whole.ends, decisive, (points, tilt) if tilt > 0 else None)
            for (pld, count), (whole, _), (points, _) in zip(plds, rough.parts, capped.parts, strict=True)
        ]
        self._exact = PLDSum([(loss.points, loss.count) for loss in self._losses])
        # A grid of few points may be so coarse that its losses spread further than the distributions do.
        lengths = [len(points.losses) for points, _ in self._exact.parts]
        is_small = tilt == 0 and max(lengths) <= _FEW_POINTS and sum(lengths) <= 16 * _FEW_POINTS
        self._rough = self._exact if is_small else capped

    @property
    def points(self) -> int:
        """The size of the largest array that was needed."""
        return max(self._size, *(len(points.losses) for points, _ in self._exact.parts))

    @property
    def infinity_mass(self) -> float:
        """A bound on the chance of an infinite loss, on any grid."""
        return self._exact.infinity_mass

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at which delta is known to be at most this one."""
        if min(self._rough.delta_at_0, self._exact.delta_at_0) <= delta:
            return 0.0
        tail, widening = self._tail_of(delta), 0
        while True:
            epsilon = tail.epsilon(delta)
            # Where losses take few values, epsilon may lie in a gap below the window, unless that holds all losses.
            is_whole = float(tail.losses[0]) <= self._lowest
            if epsilon > tail.lowest or is_whole or widening > _MAX_WIDENING or self._size > MAX_POINTS:
                return epsilon
            widening = 4 * widening + 1
            tail = self._tilted_tail(tail.tilt, delta, widening)

    @property
    def _lowest(self) -> float:
        """The lowest sum."""
        return math.fsum(count * float(points.losses[0]) for points, count in self._exact.parts)

    def deltas(self, epsilons: Array, min_delta: float) -> Array:
        """Bounds on delta at each epsilon, close where delta is at least `min_delta`, shape [epsilons]."""
        best = self.deltas_without_tilt(epsilons)
        for delta in deltas_of_tails(min_delta):
            best = np.minimum(best, self.deltas_near(epsilons, delta))
            if best.min(initial=1.0) >= delta:  # tails for less would not be closer
                break
        return best

    def deltas_without_tilt(self, epsilons: Array) -> Array:
        """Bounds on delta at each epsilon, close where most of the sum lies, shape [epsilons]."""
        best: Array = np.minimum(1.0, self._whole.deltas(epsilons))
        return best

    @cached_property
    def _whole(self) -> "_Tail":
        return self._tilted_tail(0.0, 0.5)

    def deltas_near(self, epsilons: Array, delta: float) -> Array:
        """Bounds on delta at each epsilon, close where they are near this one, shape [epsilons]."""
        return self._tail_of(delta).deltas(epsilons)

    def _tail_of(self, delta: float) -> "_Tail":
        """The upper tail that decides at a delta; the last one is kept."""
        if self._last_tail is None or self._last_tail[0] != delta:
            self._last_tail = delta, self._tilted_tail(self._rough.tail_tilt(delta), delta)
        return self._last_tail[1]

    def _tilted_tail(self, tilt: float, delta: float, widening: int = 0) -> "_Tail":
        """The upper tail, from the transforms of the tilted losses; widening: adds so many lengths below."""
        grid, parts = self._grid, self._exact.parts
        low, high, shift = self._window(tilt, delta)
        lowest = self._lowest
        low = max(lowest, low - widening * (high - low))
        check_points((high - low) / grid)
        # Two points more than the window, as its ends are rounded to points.
        size = fft.next_fast_len(max(8, math.ceil((high - low) / grid) + 2), real=True)
        self._size = max(self._size, size)
        product = _Product.of(self._losses, tilt, size)
        sums, error = product.sums(), product.error_norm()
        # Tilted masses are each off by a few units in the last place, as many times as they are multiplied.
        rounding = 1 + 64 * _UNIT_ROUNDOFF * product.count
        sums, error = np.maximum(sums, 0.0) * rounding, error * rounding  # rounding may leave masses below 0
        # The point with circular index i has the loss lowest + grid * (index + i), for i around 0.
        first = math.floor((low - lowest) / grid) - product.index
        sums = np.roll(sums, -(first % size))  # the window's lowest loss comes first
        losses = lowest + grid * (product.index + first + np.arange(size))
        # Chernoff: P(L > l) <= exp(K(t) - t l). What may lie above the window counts as an infinite loss.
        k, _, _ = self._exact.cumulant(tilt + shift)
        top = math.fsum(count * float(points.losses[-1]) for points, count in parts)  # the largest finite sum
        beyond = math.exp(min(0.0, k - (tilt + shift) * float(losses[-1]))) if losses[-1] < top else 0.0
        return _Tail(losses, sums, error, tilt, product.log_moment, grid, self._exact.infinity_mass + beyond)

    def _window(self, tilt: float, delta: float) -> tuple[float, float, float]:
        """Where nearly all of the tilted sum lies, and a further tilt with which Chernoff's bound says so.

        What lies below comes back at the top, where it has to count for next to nothing.
        """
        k, mean, variance = self._rough.cumulant(tilt)
        log_delta = math.log(self._exact.finite_delta(delta))
        # The smallest and the largest sum.
        ends = [math.fsum(n * float(p.losses[at]) for p, n in self._exact.parts) for at in (0, -1)]
        if variance <= 0:
            return ends[0], ends[1] + self._grid, 1.0

        def top(moments: Array, shifts: Array, log_rarity: float) -> tuple[float, float]:
            # Chernoff: P(tilted sum > h) <= exp(K(t + s) - K(t) - s h), which is 1 / rarity at this h.
            tops = (moments + log_rarity) / shifts
            at = int(np.argmin(tops))
            return min((float(tops[at]), float(shifts[at])), (ends[1] + self._grid, 1.0))

        def moments(shifts: Array) -> Array:
            return self._rough.log_moments(tilt + shifts) - k

        usual, log_rarity = math.sqrt(2 * _LOG_ABOVE_WINDOW / variance) * np.array(_SHIFTS), _LOG_ABOVE_WINDOW
        longest = max(float(points.losses[-1]) for points, _ in self._rough.parts)
        jumps = np.array(_JUMPS) / longest if longest > 0 else usual[:0]
        of_jumps = moments(jumps)
        for _ in range(2):  # the second time with what the first leaves above of delta
            shifts = usual * math.sqrt(log_rarity / _LOG_ABOVE_WINDOW)
            high, best = top(moments(shifts), shifts, log_rarity)
            if longest > 0:
                # Where rare large losses decide, the sum is not normal, and the window would be far too wide.
                jumped, shift = top(of_jumps, jumps, log_rarity)
                if jumped - mean < (high - mean) / 2:
                    exact = self._exact.log_moments(np.array([tilt + shift])) - self._exact.cumulant(tilt)[0]
                    high, best = min((high, best), top(exact, np.array([shift]), log_rarity))
            first, log_rarity = (
                log_rarity,
                max(_LOG_ABOVE_WINDOW, k - tilt * high - log_delta + _LOG_NEGLIGIBLE),
            )
            if log_rarity == first:
                break
        log_rarity = max(_RARE_TAIL, k - tilt * high - log_delta + _LOG_NEGLIGIBLE)
        shifts = np.append(usual * math.sqrt(log_rarity / _LOG_ABOVE_WINDOW), tilt * np.array(_SHIFTS))

        def bottom(shifts: Array) -> float:
            return float(np.max((k - self._rough.log_moments(tilt - shifts) - log_rarity) / shifts))

        low = max(ends[0], bottom(shifts[shifts > 0]))
        lowest = min(float(points.losses[0]) for points, _ in self._rough.parts)
        if high - low > MAX_POINTS * self._grid and lowest < 0:
            # As where rare losses are far below the others.
            low = max(low, bottom(np.array(_JUMPS) / -lowest))
        return low, high, best


def deltas_of_tails(min_delta: float, max_delta: float = 0.5) -> list[float]:
    """The deltas whose upper tails together give a whole profile, from the largest down to the least."""
    count = max(2, math.ceil((math.log10(2 * max_delta) - math.log10(min_delta)) / 2))
    return list(dict.fromkeys(np.geomspace(max_delta, min_delta, count).tolist()))


def _fold(masses: Array, indices: Indices, size: int) -> Array:
    """Masses on a circle of this size."""
    return np.bincount(indices % size, weights=masses, minlength=size).astype(np.float64)


def _fast_unit(size: int) -> float:
    """How far a fast transform of this size may be off, relative to the masses."""
    return 8 * _UNIT_ROUNDOFF * math.log2(size)


def _transform_at(
    frequencies: Indices, masses: Array, indices: Indices, size: int
) -> tuple[NDArray[np.complex128], float]:
    """The transforms of masses at points of a circle, less their sums, and how far each may be off, relative to that.

    At few frequencies they are added up term by term: each part of a sum of n terms is off by n units, each root by a
    few. A frequency is b k + l for l below b, so that each term's root is one of few that are computed times another.

    Args:
        frequencies: Ascending, shape [m].
        masses: Of each loss, shape [losses, points].
        indices: Of the points, shape [points].
        size: Of the circle.

    Returns:
        The transforms, shape [losses, m], and units of the sums.
    """
    totals, count = masses.sum(axis=1, keepdims=True), int(frequencies[-1]) + 1
    b = math.isqrt(count - 1) + 1  # the root of their number, rounded up
    rows = -(-count // b)
    if (_ROOT * (b + rows) / len(masses) + count / _PRODUCTS) * len(indices) > size:
        folded = np.array([_fold(masses_of_side, indices, size) for masses_of_side in masses])
        return fft.rfft(folded)[:, frequencies] - totals, _fast_unit(size)
    points = indices % size
    low, high = (  # [b, points] and [rows, points]
        np.exp(-2j * math.pi / size * (np.outer(factors, points) % size))
        for factors in (np.arange(b), b * np.arange(rows))
    )
    if len(masses) == 1:
        # [rows, b], row after row the frequencies b k + l
        sums = ((high * masses) @ low.T).reshape(1, -1)[:, frequencies]
    else:
        roots = low[frequencies % b] * high[frequencies // b]
        sums = masses @ roots.real.T + 1j * (masses @ roots.imag.T)
    return sums - totals, (2 * len(indices) + 128) * _UNIT_ROUNDOFF  # terms and roots, in units roundoff


def _tilt(loss: GridLoss, tilt: float) -> tuple[Array, Array]:
    """The masses times exp(tilt * loss), each loss' divided by their sum, and the logarithms of the sums."""
    exponents = loss.points.logarithms + tilt * loss.points.losses
    largest = float(exponents.max())  # taken out, so that nothing overflows
    if len(loss.masses) == 1:
        weights = np.exp(exponents - largest)[None, :]
    else:
        # Half of the exponent, so that neither factor underflows alone.
        half = np.exp((tilt * loss.points.losses - largest) / 2)
        weights = loss.masses * half * half
    totals = weights.sum(axis=1, keepdims=True)
    if totals.min() < _MIN_MODULUS:  # of one that lacks what the others have most of
        with np.errstate(divide="ignore"):
            exponents = np.log(loss.masses) + tilt * loss.points.losses
        each = exponents.max(axis=1, keepdims=True)
        weights = np.exp(exponents - each)
        totals = weights.sum(axis=1, keepdims=True)
        return weights / totals, (each + np.log(totals))[:, 0]
    return weights / totals, largest + np.log(totals[:, 0])


@dataclass(frozen=True)
class _TiltedLosses:
    """Tilted losses on the same points, each of which is summed so often.

    Attributes:
        counts: Shape [losses].
        rest: The masses beside the centre, a likely point, whose transform is its mass, exactly; [losses, points].
        offsets: Of the points from the centre, in steps of the grid, [points].
        centre: Its index on the grid.
        log_totals: Logarithms of the tilted masses, by which they are normalised, [losses].
    """

    counts: Array
    rest: Array
    offsets: Indices
    centre: int
    log_totals: Array

    @classmethod
    def of(cls, loss: GridLoss, tilt: float) -> "_TiltedLosses":
        rest, log_totals = _tilt(loss, tilt)
        at = int(np.argmax(rest.sum(axis=0)))
        rest[:, at] = 0.0
        return cls(loss.counts, rest, loss.indices - loss.indices[at], int(loss.indices[at]), log_totals)

    @cached_property
    def spreads(self) -> Array:
        """By how much each loss' transform falls, about, [losses]: the more, the fewer frequencies it leaves."""
        spreads: Array = self.counts * (self.rest @ np.square(self.offsets, dtype=float))
        return spreads

    def blocks(self, sizes: Iterator[int]) -> Iterator["_TiltedLosses"]:
        """The losses in blocks of so many, those of the largest spread first."""
        order, first = np.argsort(-self.spreads), 0
        while first < len(order):
            block = order[first : first + next(sizes)]
            first += len(block)
            yield replace(self, counts=self.counts[block], rest=self.rest[block])


def _block_sizes(size: int) -> Iterator[int]:
    """Few losses at first, at all frequencies, and ever more the fewer of these are left."""
    number, maximum = 1, max(1, _MAX_BLOCK // size)
    while True:
        yield min(number, maximum)
        number *= 2


def _log_modulus_of_1_plus(x: NDArray[np.complex128], modulus: Array) -> Array:
    """log |1 + x|, also for small x; modulus: |x|."""
    is_small, logs = modulus < 0.25, np.empty_like(modulus)
    small, large = x[is_small], x[~is_small]
    # |1 + x|^2 = 1 + 2 Re x + |x|^2
    logs[is_small] = np.log1p(2 * small.real + np.square(modulus[is_small])) / 2
    logs[~is_small] = np.log(np.maximum(np.abs(1 + large), _MIN_MODULUS))
    return logs


@dataclass(frozen=True)
class _Factors:
    """The transforms of a block of losses.

    Attributes:
        counts: Of each loss, how often it is summed, [losses].
        log_moduli: Logarithms of the moduli, [losses, m].
        unit: By how much each value may be off, relative to its norm.
        norms: The mass of each loss beside its centre, to which the rounding of its transform is relative, [losses].
    """

    counts: Array
    log_moduli: Array
    unit: float
    norms: Array


@dataclass(frozen=True)
class _Product:
    """The transform of a sum of tilted losses, which is the product of the losses' transforms to their counts.

    Attributes:
        size: Of the circular grid, in points.
        count: The number of losses.
        frequencies: Those of the half spectrum where the product is not negligible, [m]; the arrays below are there.
        log_modulus: Logarithm of the product's modulus, [m].
        argument: Its argument, [m].
        conditioning: By how many units roundoff a power may be off, relative to the product, [m].
        factors: Of which it is the product.
        log_moment: Logarithm of the tilted mass, by which the losses are normalised.
        index: The point that the circular grid begins at, in steps of the grid from the lowest loss.
    """

    size: int
    count: int
    frequencies: Indices
    log_modulus: Array
    argument: Array
    conditioning: Array
    factors: list[_Factors]
    log_moment: float
    index: int

    @classmethod
    def of(cls, losses: Sequence[GridLoss], tilt: float, size: int) -> "_Product":
        """The product for losses on a circular grid of so many points."""
        frequencies = np.arange(size // 2 + 1)  # half a spectrum: masses are real
        log_product, argument, conditioning, log_bound = np.zeros((4, size // 2 + 1))
        factors: list[_Factors] = []
        tilted = sorted(
            (_TiltedLosses.of(loss, tilt) for loss in losses), key=lambda losses: -losses.spreads.max()
        )
        sizes = _block_sizes(size)
        for block in (block for losses in tilted for block in losses.blocks(sizes)):
            counts = block.counts
            # [losses, m]. With the centre's the masses add up to 1, so that a transform is 1 + x.
            x, unit = _transform_at(frequencies, block.rest, block.offsets, size)
            # Powers by logarithms of modulus and argument: (1 + x)^count neither overflows nor loses a small x.
            modulus = np.abs(x)
            log_moduli = _log_modulus_of_1_plus(x, modulus)
            # Where the product is nothing, as it mostly is, it need not be computed. A factor that is nearly 0 may be
            # so by rounding alone, so it counts as no less than what is sure.
            log_bound = log_bound + counts @ np.maximum(log_moduli, _LOG_SURE)
            is_large = log_bound > _LOG_NOTHING
            if is_large.mean() < 0.5:
                x, modulus, log_moduli = x[:, is_large], modulus[:, is_large], log_moduli[:, is_large]
                frequencies = frequencies[is_large]
                log_product, argument, conditioning, log_bound = (
                    array[is_large] for array in (log_product, argument, conditioning, log_bound)
                )
                factors = [replace(factor, log_moduli=factor.log_moduli[:, is_large]) for factor in factors]
            log_product = log_product + counts @ log_moduli  # [m]
            angles = np.arctan2(x.imag, 1 + x.real)
            argument = argument + counts @ angles
            conditioning = conditioning + counts @ (np.abs(log_moduli) + np.abs(angles) + modulus)
            factors.append(_Factors(counts, log_moduli, unit, block.rest.sum(axis=1)))  # the centre is exact
        return cls(
            size,
            sum(loss.count for loss in losses),
            frequencies,
            log_product,
            argument,
            conditioning,
            factors,
            math.fsum(float(losses.counts @ losses.log_totals) for losses in tilted),
            sum(int(losses.counts.sum()) * losses.centre for losses in tilted),
        )

    def sums(self) -> Array:
        """The probabilities of the sums, [size], with rounding."""
        transform = np.zeros(self.size // 2 + 1, dtype=np.complex128)
        # Other frequencies are next to nothing.
        transform[self.frequencies] = np.exp(self.log_modulus) * np.exp(1j * self.argument)
        return np.asarray(fft.irfft(transform, self.size))

    def error_norm(self) -> float:
        """What transforms and powers lose at most, as the norm of the error of `sums`."""
        product = np.exp(self.log_modulus)
        kinds = sum(len(factor.counts) for factor in self.factors)  # whose logarithms are added up
        # Parseval for half a spectrum: the norm of the sums is at most sqrt(2 / size) times that of the half.
        root = math.sqrt(2 / self.size)
        error = _fast_unit(self.size) * root * float(np.linalg.norm(product))
        powers = float(np.linalg.norm((1 + self.conditioning) * product))
        error += (8 + kinds) * _UNIT_ROUNDOFF * root * powers + _NOTHING
        for factor in self.factors:
            # The power's derivative, count * transform^(count - 1), times what the transform is off by.
            others = np.linalg.norm(np.exp(self.log_modulus - factor.log_moduli), axis=1)
            error += 2 * factor.unit * root * float((factor.counts * factor.norms) @ others)
        return error


@dataclass(frozen=True)
class _Tail:
    """A tilted sum: the mass at losses[i] is sums[i] exp(log_moment - tilt losses[i]).

    error: A bound on the norm of the error of the sums.
    """

    losses: Array
    sums: Array
    error: float
    tilt: float
    log_moment: float
    grid: float
    infinity_mass: float

    @cached_property
    def _hockey_stick(self) -> tuple[Array, Array]:
        """All losses and the deltas at them."""
        return self._hockey_stick_from(-math.inf)

    def _hockey_stick_from(self, lowest: float) -> tuple[Array, Array]:
        """Losses from the last one that is at most the lowest on, or from the first, and the deltas at them.

        With A_k the mass above point k, delta_k = exp(-grid) delta_(k+1) + (1 - exp(-grid)) A_k: nothing cancels.
        Errors of the sums count with weights w_j = exp(-tilt grid j) (1 - exp(-grid j)) for the j-th point above k, so
        that together they are at most their norm times that of the weights (Cauchy and Schwarz).
        """
        middle = float(self.losses[int(np.argmax(self.sums))])
        relative = self.losses - middle
        inside = int(np.argmax(self.tilt * relative > -_LARGEST_EXPONENT))
        first = int(np.searchsorted(self.losses, lowest, side="right")) - 1
        first = max(inside, min(first, len(self.losses) - 2))
        losses, relative = self.losses[first:], relative[first:]
        falls = np.exp(-self.tilt * relative)
        masses = self.sums[first:] * falls  # without exp(log_moment - tilt middle), which comes last
        above = np.append(np.cumsum(masses[::-1])[::-1][1:], 0.0)  # strictly above each point
        step = -math.expm1(-self.grid)
        # By the recurrence of the docstring, from the top down.
        sticks = decaying_sums(above[::-1], step)[::-1]
        # No weight is above 1, so k of them are at most k.
        weights = np.sqrt(np.minimum(self._squared_weights, np.arange(len(losses), 0.0, -1.0)))
        sticks = sticks + self.error * falls * weights
        scale = self.log_moment - self.tilt * middle
        rounding = (
            1
            + 8 * _UNIT_ROUNDOFF * (len(self.losses) - inside)
            + 16 * _UNIT_ROUNDOFF * (abs(scale) + abs(self.tilt * middle))
        )
        with np.errstate(over="ignore", invalid="ignore"):
            deltas = np.nan_to_num(sticks * rounding * math.exp(min(scale, 700.0)), nan=1.0, posinf=1.0)
        return losses, deltas + self.infinity_mass

    @property
    def lowest(self) -> float:
        """The lowest loss whose delta is known."""
        return float(self._hockey_stick[0][0])

    @property
    def _squared_weights(self) -> float:
        """A bound on the sum of w_j^2, from w_j at most exp(-tilt grid j) and at most that times grid j."""
        ratio, rest = math.exp(-2 * self.tilt * self.grid), -math.expm1(-2 * self.tilt * self.grid)
        return min(ratio / rest, self.grid**2 * ratio * (1 + ratio) / rest**3) if rest > 0 else math.inf

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon with at most this delta; infinite where none has."""
        losses, deltas = self._hockey_stick
        if deltas[-1] > delta:
            return math.inf
        first = int(np.argmax(deltas <= delta))  # deltas fall along the losses
        if first == 0:
            return max(0.0, float(losses[0]))
        # Between two points delta is linear in exp(epsilon), since the loss has no value there.
        share = (deltas[first - 1] - delta) / (deltas[first - 1] - deltas[first])
        # exp(within) - 1 is this share of exp(grid) - 1.
        within = math.log1p(share * math.expm1(self.grid)) if self.grid < _LARGEST_EXPONENT else self.grid
        return max(0.0, float(losses[first - 1] + within))

    def deltas(self, epsilons: Array) -> Array:
        """Bounds on delta, shape [epsilons].

        delta is convex in exp(epsilon) and at most 1 at 0, which bounds it below the window.
        """
        lowest = float(np.min(epsilons, initial=math.inf))
        is_whole = lowest <= self.losses[0] or "_hockey_stick" in vars(self)  # which is kept
        losses, deltas = self._hockey_stick if is_whole else self._hockey_stick_from(lowest)
        after = np.searchsorted(losses, epsilons, side="right")
        is_inside = (after > 0) & (after < len(losses))
        at = np.clip(after, 1, len(losses) - 1)
        above = np.clip(epsilons - losses[at - 1], 0.0, self.grid)
        share = np.exp(above - self.grid) * np.expm1(-above) / math.expm1(-self.grid)
        between = deltas[at - 1] + np.clip(share, 0.0, 1.0) * (deltas[at] - deltas[at - 1])
        before = 1.0 - np.exp(np.minimum(epsilons - losses[0], 0.0)) * (1.0 - min(1.0, float(deltas[0])))
        outside = np.where(after == 0, before, self.infinity_mass)
        return np.where(is_inside, np.minimum(between, 1.0), outside)
