"""The privacy loss of a pass with random allocation, as a distribution of the ratio P / Q and as Rényi divergences.

A pass has `parts` steps and one event. A record chooses its step uniformly and independently of all others ("balls into
bins"). With the record the outputs of a pass are dominated by P = (1 / T) sum_t N(e_t, z^2 I), without it by
Q = N(0, z^2 I), for T = parts; outputs may depend on earlier ones (Chua et al. 2024, arXiv:2412.16802; Feldman and
Shenfeld 2025, arXiv:2502.08202). Passes draw anew, so their losses add up. In a last pass of fewer steps a record takes
part with probability steps / T, and the other part of P is Q.

The ratio is P / Q = S = (Y_1 + ... + Y_k + T - k) / T for k steps, with Y_t = exp(x_t / z^2 - 1 / (2 z^2)) log-normal
and independent under Q. Both hockey-stick divergences are means of convex functions of S under Q: removing costs
E max(0, S - e^eps), adding E max(0, 1 - e^eps S). So whatever spreads S without moving its mean is an upper bound, and
so is whatever lowers S, where the mean that is lost counts as infinite loss:

1. each Y becomes one of the two neighbouring points of a geometric grid, at random, with the same mean;
2. so does each sum of two independent values on the grid. The sum of as many as a pass has steps is made by doubling;
   the averages of more steps are never more spread out (they are means of those of fewer), so coarser grids will do
   for the first sums;
3. what lies below the grid is spread between 0 and its lowest point, what lies above becomes its highest.

Only positive numbers are added and multiplied, so that rounding stays relative, however small a chance is.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.special import gammaln, ndtr, ndtri

from algorithms.privacy.accounting.event_classes import RandomAllocationDpEvent
from algorithms.privacy.accounting.event_rules import Orders
from algorithms.privacy.accounting.mechanism_plds import AtomsPLD, GaussianPLD, normal_masses
from algorithms.privacy.accounting.pld import PLDPair

Array = NDArray[np.float64]

MIN_NOISE, MAX_NOISE = 0.1, 1e8
"""With less noise, or more than double precision tells apart, a pass counts as one sum over all records."""
_TAIL = 1e-17
"""The chances of a ratio below the grid, and of one above it under P."""
_CELL_IN_DEVIATIONS, _MAX_CELL, _MAX_POINTS = 0.01, 0.02, 4000
"""Cells of the last sum in a standard deviation of the ratio, their largest width, and the most points of a sum."""
_ADDED_VARIANCE, _MAX_ADDED_CELL = 6e-4, 0.2
"""Part of a sum's variance that a single step's grid may add to it, times 6; and the width of its cells."""
_MIN_CONVOLVED = 4
"""The fewest distances of points that are added up by one convolution."""
_ROWS = 32
"""Distances of points whose pairs are added up by one product."""
_ROUNDING, _STEP_ROUNDING = 2.0**-34, 2.0**-44
"""What is added to masses and to logarithms of moments, relatively: the second for each step, to masses the first at
least. Each doubling doubles the rounding so far; masses add up to 1 - 2^-48 steps at the least, as was measured for
noise from 0.3 to 300 and up to a million steps, and 16 times that is added."""
_MAX_ORDER = 256.0
"""The largest whole order at which the moment of removing a record is computed; none is stated above."""
_REACH_IN_DEVIATIONS, _POINTS = 10.0, 2000
"""For negative moments: how many deviations of log Y the points reach, and about how many there are."""
_MAX_RENYI_NOISE = 400.0
"""With more noise the chords of negative moments lose more than the pass gains: 6.4e-6 b (b + 1) of their logarithm."""
_LOG_RATES = (-10.0, 25.0, 4000)
"""The logarithms of the rates l at which E exp(-l S) is computed: the first, the last and their number."""
_HIGHER = np.array([5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0])


@dataclass(frozen=True)
class _Ratio:
    """A sum of ratios Y under Q, on the points 0 and exp(cell (first + i)).

    Attributes:
        cell: The distance of the points' logarithms.
        first: Of the lowest point above 0.
        masses: Of the points above 0, shape [k].
        zero: The mass at 0.
        lost: The mean that is not in these points.
    """

    cell: float
    first: int
    masses: Array
    zero: float
    lost: float

    @property
    def values(self) -> Array:
        """The points above 0, shape [k]."""
        points: Array = np.exp(self.cell * (self.first + np.arange(len(self.masses))))
        return points

    def refine(self, cell: float) -> "_Ratio":
        """The same on a grid of smaller cells, of which the present ones are a multiple."""
        times = round(self.cell / cell)
        masses = np.zeros((len(self.masses) - 1) * times + 1)
        masses[::times] = self.masses
        return replace(self, cell=cell, first=self.first * times, masses=masses)

    def trim(self) -> "_Ratio":
        """The same without points of next to no chance at both ends."""
        values = self.values
        means = self.masses * values
        tail = _TAIL * float(means.sum())
        low = int(np.searchsorted(np.cumsum(self.masses), _TAIL))
        high = len(means) - 1 - int(np.searchsorted(np.cumsum(means[::-1]), tail))
        masses = self.masses[low : high + 1].copy()
        # Low points go to 0 and to the lowest one that stays, by shares that keep the mean. High ones go down to the
        # last; the mean that they lose counts as lost, where the loss is infinite.
        up = float(means[:low].sum()) / float(values[low])
        masses[0] += up
        above = float(self.masses[high + 1 :].sum())
        masses[-1] += above
        return _Ratio(
            self.cell,
            self.first + low,
            masses,
            self.zero + float(self.masses[:low].sum()) - up,
            self.lost + max(0.0, float(means[high + 1 :].sum()) - above * float(values[high])),
        )


def _ratio_of_step(z: float, cell: float) -> _Ratio:
    """Y, whose logarithm is normal with mean -1 / (2 z^2) and deviation 1 / z under Q."""
    reach = -float(ndtri(_TAIL))
    first = math.floor((-reach / z - 0.5 / z**2) / cell)
    last = math.ceil((reach / z + 0.5 / z**2) / cell)
    logs: Array = np.linspace(cell * first, cell * last, last - first + 1)
    under_q = z * logs + 0.5 / z  # log Y in standard deviations under Q, [points]
    under_p = under_q - 1 / z  # the mean of Y in a cell, since Y is the density of N(1 / z, 1)
    (q, _), (mean, _), values = normal_masses(under_q), normal_masses(under_p), np.exp(logs)
    # Split between the two ends so that the mean stays: a spread that keeps it raises every convex function of Y.
    # up at v e^cell and q - up at v have the mean of the cell.
    up = np.clip((mean / values[:-1] - q) / math.expm1(cell), 0.0, q)
    below, above = float(ndtr(under_q[0])), float(ndtr(-under_q[-1]))
    masses = np.append(q - up, above)
    masses[1:] += up
    # What lies below keeps its mean, by this mass on the lowest point and the rest at 0.
    lowest = min(float(ndtr(under_p[0]) / values[0]), below)
    masses[0] += lowest
    # The mass above is on the last point; that all of its mean counts as lost is a bound.
    return _Ratio(cell, first, masses, below - lowest, float(ndtr(-under_p[-1])))


def _double(ratio: _Ratio) -> _Ratio:
    """The sum of two that are alike and independent.

    Points with indices i and i + d have the sum exp(cell i) (1 + exp(cell d)), which lies at the same place between two
    points for every i.
    """
    count, masses = len(ratio.masses), ratio.masses
    # How far the place of a sum is above that of its larger point.
    # In cells: log(1 + e^(-cell d)) / cell.
    excesses = np.log1p(np.exp(-ratio.cell * np.arange(count))) / ratio.cell
    points_up = np.floor(excesses).astype(int)
    # Of a pair's mass, that goes to the point above.
    shares = np.expm1((excesses - points_up) * ratio.cell) / math.expm1(ratio.cell)
    start = int(points_up[0])  # of the distance 0, where a sum is twice its points
    sums = np.zeros(count + 2)
    # Where distances begin whose sums lie equally far above their larger points.
    begins = np.append(0, np.flatnonzero(np.diff(points_up)) + 1)
    is_long = np.diff(np.append(begins, count)) >= _MIN_CONVOLVED
    few = int(begins[np.argmax(is_long)]) if is_long.any() else count
    _add_near(sums, masses, np.arange(few) + points_up[:few] - start, shares[:few])
    for begin, end in pairwise([*begins[begins >= few].tolist(), count]):
        low, size = begin + int(points_up[begin]) - start, count - begin
        for further, kernel in ((0, 1 - shares[begin:end]), (1, shares[begin:end])):
            kernel[0] *= 1.0 if begin else 0.5  # a pair of one point with itself occurs once, others twice
            both = 2.0 * masses[begin:] * np.convolve(masses[:size], kernel)[:size]
            sums[low + further : low + further + size] += both
    # One of the two may be 0; where the other one lies below the new grid, it counts as 0, too.
    sums[: max(0, count - start)] += 2 * ratio.zero * masses[start:]
    missed = masses[:start]
    # Both are 0, or one is and the other is below the grid.
    zero = ratio.zero**2 + 2 * ratio.zero * float(missed.sum())
    lost = 2 * ratio.lost + 2 * ratio.zero * float(missed @ ratio.values[:start])
    return _Ratio(ratio.cell, ratio.first + start, sums, zero, lost).trim()


def _add_near(sums: Array, masses: Array, shifts: NDArray[np.int64], shares: Array) -> None:
    """Add the masses of pairs of points to those of their sums, for distances from 0 on.

    Pairs (i, i + d) and (i + d, i) are alike, so that they count twice, except for d = 0. They are multiplied distance
    by distance, each in a row that begins where its sums do, and the rows of several are added up as one product.

    shifts: How far the sum lies above the smaller point, which grows by 0 or 1 from one distance to the next.
    shares: Of a pair's mass, that goes to the point above.
    """
    count, few = len(masses), len(shifts)
    # Zeros on both sides, so that a shifted row stays inside.
    begun = np.concatenate([np.zeros(_ROWS), masses, np.zeros(_ROWS)])
    other, rows = np.append(masses, np.zeros(2 * _ROWS)), np.empty((_ROWS, count + _ROWS))
    weights = np.stack([1 - shares, shares])
    weights[:, 1:] *= 2.0  # a pair of different points occurs in two orders
    for first in range(0, few, _ROWS):
        last = min(first + _ROWS, few)
        moved = (shifts[first:last] - shifts[first]).tolist()
        size = count - first + moved[-1]
        for row, by in enumerate(moved):
            begin = first + row - by
            np.multiply(
                begun[_ROWS - by : _ROWS - by + size], other[begin : begin + size], out=rows[row, :size]
            )
        # [2, size]: at the point below and at the one above
        sides = weights[:, first:last] @ rows[: last - first, :size]
        low = int(shifts[first])
        for further, side in enumerate(sides):
            inside = sums[low + further : low + further + size]
            inside += side[: len(inside)]


def _plus_step(several: _Ratio, noise_multiplier: float, width: float) -> _Ratio:
    """The sum of several and the ratio of one more step, whose cells are at most this wide, on the grid of the several.

    The wider of both cells is a whole number of the narrower, so that how far a sum lies above a point of the several
    depends on the points' distance alone. Where either of the two is 0 the sum counts as 0, too.
    """
    cell, count = several.cell, len(several.masses)
    # In units of the narrower cell: that of the several, and that of the step.
    cell_units, step_units = max(1, math.ceil(cell / width)), max(1, math.floor(width / cell))
    unit = cell / cell_units  # of which both cells are a whole number
    step = _ratio_of_step(noise_multiplier, unit * step_units)
    lowest = several.first * cell_units - (step.first + len(step.masses) - 1) * step_units
    highest = (several.first + count - 1) * cell_units - step.first * step_units
    # Of a sum above the several's point, for each distance in units.
    above = np.logaddexp(0.0, -unit * np.arange(lowest, highest + 1)) / cell
    points_up = np.floor(above).astype(int)
    shares = np.expm1((above - points_up) * cell) / math.expm1(cell)
    base = int(points_up[several.first * cell_units - step.first * step_units - lowest])  # of the lowest sum
    # Of the several's points, from the lowest sum on.
    indices, size = np.arange(count) - base, count + int(points_up[(count - 1) * cell_units]) - base + 2
    sums = np.zeros(size)
    # Whichever takes fewer products of arrays.
    if cell_units * 2 * math.log(1 / math.expm1(cell)) / cell < len(step.masses):
        for phase in range(cell_units):
            _add_by_distance(sums, several, step, base, cell_units, step_units, phase)
    else:
        for index, mass in enumerate(step.masses.tolist()):
            begin = several.first * cell_units - (step.first + index) * step_units - lowest
            at = slice(begin, begin + (count - 1) * cell_units + 1, cell_units)
            both, low = mass * several.masses, indices + points_up[at]
            up = both * shares[at]
            sums += np.bincount(low, both - up, size)
            sums[1:] += np.bincount(low, up, size)[:-1]
    lost = several.lost + step.lost
    # Where either is 0 the sum counts as 0, so the other's mean is lost.
    lost += several.zero * float(step.masses @ step.values) + step.zero * float(
        several.masses @ several.values
    )
    return _Ratio(cell, several.first + base, sums, several.zero + step.zero, lost).trim()


def _add_by_distance(
    sums: Array, several: _Ratio, step: _Ratio, base: int, cell_units: int, step_units: int, phase: int
) -> None:
    """Add the masses of pairs of points of several and of one step to those of their sums, all of a distance together.

    Takes the step's points that lie `phase` of `cell_units` parts of a cell above one of the several's points. Of
    points that are far apart the sum lies next above the larger, for every distance, as in `_double`.

    base: how far the lowest sum lies above the lowest point of the several.
    """
    cell, a = several.cell, several.masses
    skip = (phase - step.first) % cell_units
    b = step.masses[skip::cell_units]
    # The first of b's points, relative to the lowest of the several.
    first = (step.first + skip) // cell_units * step_units - several.first
    dense = np.zeros((len(b) - 1) * step_units + 1)
    dense[::step_units] = b
    distances = np.arange(-first - len(dense) + 1, len(a) - first)
    above = np.logaddexp(0.0, -cell * (distances - phase / cell_units)) / cell
    points_up = np.floor(above).astype(int)
    shares = np.expm1((above - points_up) * cell) / math.expm1(cell)
    is_far_up, is_far_down = points_up == 0, distances + points_up == 0
    for at in np.flatnonzero(~is_far_up & ~is_far_down).tolist():
        distance = int(distances[at])
        begin = max(0, -(-(-first - distance) // step_units))
        end = min(len(b), (len(a) - 1 - first - distance) // step_units + 1)
        low = first + begin * step_units + distance
        both = a[low : low + (end - begin - 1) * step_units + 1 : step_units] * b[begin:end]
        low += int(points_up[at]) - base
        up = both * shares[at]
        sums[low : low + (end - begin - 1) * step_units + 1 : step_units] += both - up
        sums[low + 1 : low + 1 + (end - begin - 1) * step_units + 1 : step_units] += up
    for further, part in ((0, 1 - shares), (1, shares)):
        far_up = np.convolve(dense, np.where(is_far_up, part, 0.0))[len(dense) - 1 :][: len(a)]
        at = further - base
        sums[max(at, 0) : at + len(a)] += (a * far_up)[max(-at, 0) :]
        far_down = np.convolve(a, np.where(is_far_down & ~is_far_up, part, 0.0)[::-1])[len(a) - 1 :][
            : len(dense)
        ]
        at = first + further - base
        sums[max(at, 0) : at + len(dense)] += (dense * far_down)[max(-at, 0) :]


@lru_cache(maxsize=64)
def ratio_of_pass(
    noise_multiplier: float, parts: int, steps: int, finer: float = 1.0
) -> tuple[Array, Array, float]:
    """A distribution that dominates that of the ratio P / Q of a pass under Q; see the module.

    finer: by how much its cells are smaller than usual.

    Returns:
        Ratios, ascending from 0, shape [k]; their masses under Q, shape [k]; and a bound on the mass of P that is not
        in them, where the loss counts as infinite.
    """
    # The variance of Y under Q; and both tails, in deviations of log Y.
    spread, reach = math.expm1(noise_multiplier**-2), -2 * float(ndtri(_TAIL))
    last = min(_CELL_IN_DEVIATIONS * math.sqrt(spread / steps), _MAX_CELL) / finer

    def cell_for(length: float) -> float:
        # The last cell times a power of two, so that grids are refined to it.
        return float(last * 2.0 ** max(0, math.ceil(math.log2(length / last / (_MAX_POINTS * finer)))))

    total, count = (
        _ratio_of_step(noise_multiplier, cell_for(reach / noise_multiplier + noise_multiplier**-2)),
        1,
    )
    # By the binary digits of the number of steps, from the highest: double, and add one where the digit is 1.
    for bit in f"{steps:b}"[1:]:
        total, count = _double(total), 2 * count
        total = total.refine(min(total.cell, cell_for(total.cell * len(total.masses))))
        if bit == "1":
            width = math.sqrt(_ADDED_VARIANCE * count * spread / (1 + spread)) / finer
            total = _plus_step(total, noise_multiplier, min(width, _MAX_ADDED_CELL))
            count += 1
    rest = (parts - steps) / parts  # the chance that a record has no step in this pass
    ratios = np.append(0.0, total.values / parts) + rest  # S = (Y_1 + ... + Y_k + T - k) / T
    rounding = 1 + max(_ROUNDING, steps * _STEP_ROUNDING)
    return ratios, np.append(total.zero, total.masses) * rounding, total.lost / parts


def pair_of_pass(event: RandomAllocationDpEvent, finer: float = 1.0) -> PLDPair:
    """The losses of a pass; finer: by how much its grid is finer than usual.

    With less noise than `MIN_NOISE` or more than `MAX_NOISE`, and in a pass of one step, they are those of one sum over
    all records: P is a mixture of such, and no divergence of a mixture exceeds that of its parts.
    """
    if not MIN_NOISE <= event.noise_multiplier <= MAX_NOISE or event.parts == 1:
        pld = GaussianPLD(1 / event.noise_multiplier)
        return PLDPair(pld, pld)
    ratios, masses, lost = ratio_of_pass(event.noise_multiplier, event.parts, event.steps, finer)
    never = 0.0 if ratios[0] > 0 else float(masses[0])  # Q where P has nothing: an infinite loss of adding
    ratios, masses = ratios[masses > 0], masses[masses > 0]
    ratios, masses = ratios[ratios > 0], masses[ratios > 0]
    losses = np.log(ratios)
    # Under P a point has its mass times its ratio.
    return PLDPair(AtomsPLD(losses, masses * ratios, lost), AtomsPLD(-losses[::-1], masses[::-1], never))


@lru_cache(maxsize=256)
def divergences_of_pass(event: RandomAllocationDpEvent, orders: Orders) -> tuple[float, ...]:
    """Bounds on the Rényi divergences of a pass, of P from Q and of Q from P, at each order.

    Removing: E[S^a] at whole orders is a! times the coefficient of x^a in (sum_j E[Y^j] (x / T)^j / j!)^k e^(c x), for
    the constant c of a shorter pass and E[Y^j] = exp(j (j - 1) / (2 z^2)); all terms are positive. Its logarithm is
    convex in the order, so that a chord bounds it in between. Adding: E[S^-b] is the integral of
    l^(b-1) E[exp(-l S)] / Gamma(b) over l > 0, from above in cells. Neither is above that of one sum over all records,
    which P is a mixture of, and which is stated where there is next to no noise, or where numbers overflow. Rounding
    grows with the number of steps, as a power's does, and is added.
    """
    z, parts, steps = event.noise_multiplier, event.parts, event.steps
    alpha = np.array(orders)
    plain = alpha / (2 * z**2)
    if not MIN_NOISE <= z <= _MAX_RENYI_NOISE:
        return tuple(plain.tolist())  # of one sum over all records
    whole = np.arange(math.ceil(min(max(orders), _MAX_ORDER)) + 1)
    moments = _log_moments(z, parts, steps, whole)
    removed = np.where(alpha <= whole[-1], np.interp(alpha, whole, moments), math.inf)
    added = _log_negative_moments(z, parts, steps, alpha - 1)
    larger = np.maximum(removed, added)
    larger = np.maximum(larger, 0.0) + steps * _STEP_ROUNDING * (1.0 + np.abs(larger))
    return tuple(np.fmin(plain, larger / (alpha - 1)).tolist())


def _log_moments(z: float, parts: int, steps: int, orders: NDArray[np.int64]) -> Array:
    """log E[S^a] at whole orders from 0, shape [orders]."""
    factorials = gammaln(orders + 1.0)

    def product(first: Array, second: Array) -> Array:
        # So that each row is `second` backwards, shifted by one.
        padded = np.append(second[::-1], np.full(len(orders) - 1, -math.inf))
        exponents = first + sliding_window_view(padded, len(orders))[::-1]
        largest = exponents.max(axis=1)
        products: Array = largest + np.log(np.exp(exponents - largest[:, None]).sum(axis=1))
        return products

    # Log of E[Y^j] / (j! T^j).
    base = orders * (orders - 1) / (2 * z**2) - factorials - orders * math.log(parts)
    # The power of a series by squaring, with coefficients as logarithms: all are positive, so nothing cancels.
    series, count = np.where(orders == 0, 0.0, -math.inf), steps
    while count:
        series = product(series, base) if count & 1 else series
        base, count = product(base, base), count >> 1
    if steps < parts:
        # The coefficients of e^(c x), for c = 1 - steps / T.
        series = product(series, orders * math.log1p(-steps / parts) - factorials)
    total: Array = series + factorials
    return total


def _log_negative_moments(z: float, parts: int, steps: int, powers: Array) -> Array:
    """Bounds on log E[S^-b] at powers b above 0, shape [powers]."""
    logs = np.linspace(*_LOG_RATES)
    log_r, transforms = float(logs[0] - logs[1]), _log_transforms(z, parts, steps)
    moments = []
    for b in powers:
        # The transform is convex, so that a chord bounds it in a cell: its ends' weights, at a ratio r of two rates.
        whole = -math.expm1(b * log_r) / b  # the integral of l^(b - 1) over a cell, in units of its upper end
        upper = (-math.expm1((b + 1) * log_r) / (b + 1) - math.exp(log_r) * whole) / -math.expm1(log_r)
        exponents = transforms + b * logs
        largest = float(exponents.max())
        weights = np.exp(exponents - largest)
        weight = (whole - upper) * math.exp(-b * log_r) * weights[:-1].sum() + upper * weights[1:].sum()
        # Beyond the last rate exp(-l S) is at most (c / (e l S))^c, and S at least steps / parts of the geometric mean.
        c = b + _HIGHER
        tail_bound = c / (2 * z**2) * (1 + c / steps) + c * math.log(parts / steps)
        beyond = tail_bound + c * (np.log(c) - 1) + (b - c) * logs[-1] - np.log(c - b)
        every = [largest + math.log(weight), b * logs[0] - math.log(b), beyond.min()]
        moments.append(np.logaddexp.reduce(every) - gammaln(b))
    return np.array(moments)


@lru_cache(maxsize=16)
def _log_transforms(z: float, parts: int, steps: int) -> Array:
    """Bounds on log E exp(-l S) at each of the rates l, which moments of all orders share."""
    logs = np.linspace(*_LOG_RATES)
    log_r, reach = float(logs[0] - logs[1]), 0.5 / z**2 + _REACH_IN_DEVIATIONS / z
    # The distance of rates is a whole number of those of points, so that a rate times a point is one of few products.
    parts_of_cell = max(1, round(-log_r * _POINTS / (2 * reach)))
    step = -log_r / parts_of_cell
    log_points = np.arange(-reach, reach + step, step)
    points = np.append(0.0, np.exp(log_points))
    masses = _on_points(points, z)  # lower values make the moments larger
    products = step * np.arange((len(logs) - 1) * parts_of_cell + len(log_points))
    decays = np.exp(-np.exp(logs[0] + log_points[0] - math.log(parts) + products))
    means = np.full(len(logs), masses[0])
    for at in range(parts_of_cell):  # the points that lie equally far from some product
        masses_at = masses[1 + at :: parts_of_cell]
        # E exp(-l Y / T) at all rates l at once
        means += np.correlate(decays[at::parts_of_cell], masses_at)[: len(logs)]
    # Of k independent Y, and of the constant (T - k) / T.
    transforms: Array = steps * np.log(means) - np.exp(logs) * (1 - steps / parts)
    transforms.setflags(write=False)
    return transforms


def _on_points(points: Array, z: float) -> Array:
    """Masses of Y under Q on ascending points, each cell's with its mean; what is above is on the last one."""
    with np.errstate(divide="ignore"):
        under_q = z * np.log(points) + 0.5 / z
    (q, _), (mean, _) = normal_masses(under_q), normal_masses(under_q - 1 / z)
    # The mean of Y = P / Q in a cell under Q is the cell's mass under P. Its mass goes to both ends so that this stays,
    # by which means of convex functions of Y only grow.
    up = np.clip((mean - points[:-1] * q) / np.diff(points), 0.0, q)
    masses = np.append(q - up, float(ndtr(-under_q[-1])))
    masses[1:] += up
    return masses
