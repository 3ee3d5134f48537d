"""The cost of random allocation: in each pass over the data a record takes part in exactly one step, drawn at random.

A pass has `parts` steps and one event. A record chooses its step uniformly and independently of all others ("balls into
bins"). With the record the outputs of a pass are dominated by P = (1 / T) sum_t N(e_t, z^2 I), without it by
Q = N(0, z^2 I), for T = parts; outputs may depend on earlier ones (Chua et al. 2024, arXiv:2412.16802; Feldman and
Shenfeld 2025, arXiv:2502.08202). Passes draw anew, so their losses add up. In a last pass of fewer steps a record takes
part with probability steps / T, and the other part of P is Q.

The ratio is P / Q = S = (Y_1 + ... + Y_k + T - k) / T for k steps, with Y_t = exp(x_t / z^2 - 1 / (2 z^2)) log-normal
and independent under Q. Both hockey-stick divergences are means of convex functions of S under Q: removing costs
E max(0, S - e^eps), adding E max(0, 1 - e^eps S). So whatever spreads S without moving its mean is an upper bound, and
so is whatever lowers S, where the mean that is lost counts as infinite loss:

1. each Y becomes one of the two neighbouring points of a grid, at random, with the same mean;
2. a Y beyond the grid is rare under Q. With one such Y, S is replaced by what that Y contributes; the rest of the sum,
   and sums with two of them, are lost. Their mean is at most the chance of a second one;
3. sums on the grid are convolved by a Fourier transform, whose rounding is added to each point;
4. S becomes one of the two neighbouring points of a grid of losses, in the same way.

Neighbours differ by adding or removing a record. Nothing is proven here for correlated noise, whose rows tie steps of
different passes, or for a record that is replaced.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import attrs
import dp_accounting as dp
import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import gammaln, ndtr, ndtri

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.event_rules import EventRule, Orders, Relation, TraceFields, register
from algorithms.privacy.accounting.laws import AtomsLaw, GaussianLaw, normal_masses
from algorithms.privacy.accounting.pld import Pair

Array = NDArray[np.float64]

MIN_NOISE = 0.5
"""With less noise the ratio's tail is too heavy for its grid, and a pass counts as one sum over all records."""
_TAIL = 1e-14
"""The chance under Q that any of a pass's steps lies beyond the grid, and the mean of a ratio beyond all points."""
_FINE, _MAX_POINTS, _MAX_SUMS = 30.0, 2**20, 2**21
"""Cells of the first grid in a standard deviation of Y, and about the most of them, of Y and of sums."""
_SPREAD, _NEGLIGIBLE = 12.0, 1e-10
_RARE_CELLS, _LOSS_CELLS, _LOSS_RANGE = 400, 2**14, 60.0
_UNIT, _NEVER = 2.0**-53, 1e-14
_ROUNDING, _CELLS_ROUNDING = 2.0**-36, 2.0**-48
"""Of the mass in a cell where most mass is, relative to it; and of the mean that is lost."""
_MAX_ORDER = 256.0
_FAR, _LOW, _POINTS = 10.0, 9.0, 2000
_LOG_RATES = (-10.0, 25.0, 4000)
_HIGHER = np.array([5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0])


@attrs.frozen
class RandomAllocationDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A pass in which each record takes part in one of `parts` Gaussian sums, charged with the first of them.

    Attributes:
        noise_multiplier: Of each sum, relative to the bound on a record.
        parts: Steps of a whole pass.
        steps: Steps of this pass; fewer than `parts` only for a run's last one.
    """

    noise_multiplier: float
    parts: int
    steps: int


@attrs.frozen
class RandomAllocationStepDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A later step of a pass that a `RandomAllocationDpEvent` before it has paid for."""

    noise_multiplier: float
    parts: int


@dataclass(frozen=True)
class _Step:
    """The ratio Y of a step under Q.

    Attributes:
        masses: On the points start, start + cell, start + 2 cell, ..., shape [k].
        cell: The distance of two points.
        values, rare: Points beyond the grid, and their masses, shape [r].
        below: The chance of a Y below all points. lost: The mean of Y beyond them.
    """

    start: float
    masses: Array
    cell: float
    values: Array
    rare: Array
    below: float
    lost: float


@lru_cache(maxsize=64)
def ratio_of_pass(noise_multiplier: float, parts: int, steps: int) -> tuple[Array, Array, float]:
    """A distribution that dominates that of the ratio P / Q of a pass under Q; see the module.

    Returns:
        Ratios, ascending from 0, shape [k]; their masses under Q, shape [k]; and a bound on the mass of P that is not
        in them, where the loss counts as infinite.
    """
    step, rest = _ratio_of_step(noise_multiplier, steps, _TAIL / parts), (parts - steps) / parts
    sd = math.sqrt(math.expm1(noise_multiplier**-2))
    max_index = steps * (len(step.masses) - 1)
    window = (steps * (1 - step.start) + _SPREAD * math.sqrt(steps) * sd) / step.cell + 1.5 * len(step.masses)
    size = fft.next_fast_len(int(min(max_index, window)) + 2, real=True)
    power = _power(fft.rfft(step.masses, size), steps)
    sums = np.maximum(fft.irfft(power, size), 0.0)
    # What transforms and powers lose at each point (Higham 2002, Theorem 24.2).
    sums += 8 * _UNIT * (steps + math.log2(size)) * float(np.linalg.norm(power)) / size
    ratios = (steps * step.start + step.cell * np.arange(size)) / parts + rest
    last = steps * step.start + step.cell * (size - 1)
    beyond = _mean_beyond(step, steps, last) if size - 1 < max_index else 0.0
    # Sums with one rare value, without their other terms; the mean of these terms, and of sums with more such values.
    ratios = np.concatenate([ratios, step.values / parts + rest])
    sums = np.concatenate([sums, steps * step.rare])
    lost = steps / parts * step.lost + beyond + steps * (3 * float(step.rare.sum()) + step.below)
    ratios, sums = _on_losses(ratios, sums * (1 + steps * _ROUNDING))
    sums[0] += steps * step.below  # a ratio that may be as low as 0
    return ratios, sums, lost


def _power(values: NDArray[np.complex128], count: int) -> NDArray[np.complex128]:
    """By squaring, which is many times as fast as NumPy's power of complex numbers."""
    found = np.ones_like(values)
    while count:
        found = found * values if count & 1 else found
        values, count = values * values, count >> 1
    return found


def _ratio_of_step(z: float, steps: int, tail: float) -> _Step:
    sd, reach = math.sqrt(math.expm1(z**-2)), -float(ndtri(tail))
    end = math.exp(reach / z - 0.5 / z**2)  # rarely exceeded under Q
    start = math.exp(-_LOW / z - 0.5 / z**2)
    cell = max(sd / _FINE, (end - start) / _MAX_POINTS, steps * (1 - start) / _MAX_SUMS)
    count = math.ceil((end - start) / cell)
    grid = start + cell * np.arange(count + 1)
    highest = math.exp(reach / z + 0.5 / z**2)  # and under P
    values = np.geomspace(grid[-1], max(highest, 1.001 * grid[-1]), _RARE_CELLS)
    points = np.concatenate([grid, values[1:]])
    masses, below, lost = _on_points(points, z)
    return _Step(start, masses[: count + 1], cell, points[count + 1 :], masses[count + 1 :], below, lost)


def _on_points(points: Array, z: float) -> tuple[Array, float, float]:
    """Masses of Y under Q on ascending points, each cell's with its mean; the mass below, and the mean above."""
    with np.errstate(divide="ignore"):
        under_q = z * np.log(points) + 0.5 / z
    under_p = under_q - 1 / z  # the mean of Y in a cell, since Y is the density of N(1 / z, 1)
    (q, _), (mean, _) = normal_masses(under_q), normal_masses(under_p)
    q_above, mean_above = float(ndtr(-under_q[-1])), float(ndtr(-under_p[-1]))
    up = np.clip((mean - points[:-1] * q) / np.diff(points), 0.0, q)
    masses = np.append(q - up, q_above)
    masses[1:] += up
    return (
        masses,
        float(ndtr(under_q[0])),
        max(0.0, mean_above - float(points[-1]) * q_above) + _CELLS_ROUNDING,
    )


def _mean_beyond(step: _Step, steps: int, last: float) -> float:
    """A bound on the mean of S where the sum on the grid is above `last`, by Chernoff's inequality.

    E[Y_1; sum > s] <= exp(-e s) E[Y e^(e Y)] E[e^(e Y)]^(steps - 1), and the constant of a shorter pass alike.
    """
    values = step.start + step.cell * np.arange(len(step.masses))
    with np.errstate(divide="ignore"):
        logs = np.log(step.masses)
    best = math.inf
    for exponent in np.geomspace(0.1, 1e3, 40) / values[-1]:
        tilted = logs + exponent * values
        largest = float(tilted.max())
        weights = np.exp(tilted - largest)
        moment, mean = math.log(float(weights.sum())), math.log(float(values @ weights))
        every = max(mean, moment) + (steps - 1) * moment + steps * largest
        best = min(best, every - exponent * last)
    return math.exp(min(0.0, best))


def _on_losses(ratios: Array, masses: Array) -> tuple[Array, Array]:
    """The distribution on points whose logarithms are equidistant; each mass goes to its two neighbours."""
    order = np.argsort(ratios)
    ratios, masses = ratios[order], masses[order]
    below, above = np.cumsum(masses), np.cumsum((masses * ratios)[::-1])[::-1]
    low = max(float(ratios[np.searchsorted(below, _NEVER)]), math.exp(-_LOSS_RANGE))
    high = float(ratios[len(above) - np.searchsorted(above[::-1], _NEVER) - 1])
    losses = np.linspace(math.log(low), math.log(max(high, low * 1.001)), _LOSS_CELLS)
    points = np.concatenate([[0.0], np.exp(losses), [2.0 * float(ratios[-1]) + high]])
    after = np.clip(np.searchsorted(points, ratios, side="right"), 1, len(points) - 1)
    share = np.clip((ratios - points[after - 1]) / (points[after] - points[after - 1]), 0.0, 1.0)
    spread = np.bincount(after, masses * share, len(points)) + np.bincount(
        after - 1, masses * (1 - share), len(points)
    )
    return points, np.asarray(spread, dtype=np.float64)


def pair_of_pass(event: RandomAllocationDpEvent) -> Pair:
    """The losses of a pass.

    With less noise than `MIN_NOISE`, and in a pass of so few steps that the grid leaves ratios of 0, they are those of
    one sum over all records: P is a mixture of such, and no divergence of a mixture exceeds that of its parts.
    """
    law = GaussianLaw(1 / event.noise_multiplier)
    if event.noise_multiplier < MIN_NOISE or event.parts == 1:
        return Pair(law, law)
    ratios, masses, lost = ratio_of_pass(event.noise_multiplier, event.parts, event.steps)
    if max(float(masses[0]), lost) > _NEGLIGIBLE:
        return Pair(law, law)
    losses = np.log(ratios[1:])
    remove = AtomsLaw(losses, masses[1:] * ratios[1:], lost)
    add = AtomsLaw(-losses[::-1], masses[:0:-1], float(masses[0]))
    return Pair(remove, add)


@lru_cache(maxsize=256)
def divergences_of_pass(event: RandomAllocationDpEvent, orders: Orders) -> tuple[float, ...]:
    """Bounds on the Rényi divergences of a pass, of P from Q and of Q from P, at each order.

    Removing: E[S^a] at whole orders is a! times the coefficient of x^a in (sum_j E[Y^j] (x / T)^j / j!)^k e^(c x), for
    the constant c of a shorter pass and E[Y^j] = exp(j (j - 1) / (2 z^2)); all terms are positive. Its logarithm is
    convex in the order, so that a chord bounds it in between. Adding: E[S^-b] is the integral of
    l^(b-1) E[exp(-l S)] / Gamma(b) over l > 0, from above in cells. Neither is above that of one sum over all records,
    which P is a mixture of.
    """
    z, parts, steps = event.noise_multiplier, event.parts, event.steps
    alpha = np.array(orders)
    plain = alpha / (2 * z**2)
    whole = np.arange(math.ceil(min(max(orders), _MAX_ORDER)) + 1)
    moments = _log_moments(z, parts, steps, whole)
    removed = np.where(alpha <= whole[-1], np.interp(alpha, whole, moments), math.inf)
    added = _log_negative_moments(z, parts, steps, alpha - 1)
    return tuple(np.minimum(plain, np.maximum(removed, added) / (alpha - 1)).tolist())


def _log_moments(z: float, parts: int, steps: int, orders: NDArray[np.int64]) -> Array:
    """log E[S^a] at whole orders from 0, shape [orders]."""
    factorials = gammaln(orders + 1.0)

    def product(first: Array, second: Array) -> Array:
        sums = [np.logaddexp.reduce(first[: n + 1] + second[n::-1]) for n in orders]
        return np.array(sums)

    base = orders * (orders - 1) / (2 * z**2) - factorials - orders * math.log(parts)
    series, count = np.where(orders == 0, 0.0, -math.inf), steps
    while count:
        series = product(series, base) if count & 1 else series
        base, count = product(base, base), count >> 1
    if steps < parts:
        series = product(series, orders * math.log1p(-steps / parts) - factorials)
    total: Array = series + factorials
    return total


def _log_negative_moments(z: float, parts: int, steps: int, powers: Array) -> Array:
    """Bounds on log E[S^-b] at powers b above 0, shape [powers]."""
    points = np.append(0.0, np.exp(np.linspace(-0.5 / z**2 - _FAR / z, 0.5 / z**2 + _FAR / z, _POINTS)))
    masses, _, _ = _on_points(points, z)  # lower values make the moments larger
    logs = np.linspace(*_LOG_RATES)
    transforms = np.log(np.array([masses @ np.exp(-rate / parts * points) for rate in np.exp(logs)]))
    transforms = steps * transforms - np.exp(logs) * (1 - steps / parts)
    found, log_r = [], float(logs[0] - logs[1])
    for b in powers:
        # The transform is convex, so that a chord bounds it in a cell: its ends' weights, at a ratio r of two rates.
        whole = -math.expm1(b * log_r) / b
        upper = (-math.expm1((b + 1) * log_r) / (b + 1) - math.exp(log_r) * whole) / -math.expm1(log_r)
        ends = np.logaddexp(transforms[:-1] + math.log(whole - upper), transforms[1:] + math.log(upper))
        cells = ends + b * logs[1:]
        # Beyond the last rate exp(-l S) is at most (c / (e l S))^c, and S at least steps / parts of the geometric mean.
        c = b + _HIGHER
        tail_bound = c / (2 * z**2) * (1 + c / steps) + c * math.log(parts / steps)
        beyond = tail_bound + c * (np.log(c) - 1) + (b - c) * logs[-1] - np.log(c - b)
        every = np.append(cells, b * logs[0] - math.log(b))
        found.append(np.logaddexp(np.logaddexp.reduce(every), beyond.min()) - gammaln(b))
    return np.array(found)


class _RandomAllocation(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(0 < event.noise_multiplier < math.inf and 1 <= event.steps <= event.parts)

    def losses(self, event: Any, grid: float, adjacency: Relation) -> Pair:
        return pair_of_pass(event)

    def rdp(self, event: Any, orders: Orders, adjacency: Relation) -> np.ndarray:
        return np.array(divergences_of_pass(event, orders), dtype=np.float64)

    def without_subsampling(self, event: Any, adjacency: Relation) -> dp.DpEvent:
        return dp.GaussianDpEvent(event.noise_multiplier)

    def trace_fields(self, event: Any) -> TraceFields:
        return TraceFields({"gaussian": event.noise_multiplier}, ("random allocation",), 1.0 / event.parts)


class _RandomAllocationStep(_RandomAllocation):
    def is_possible(self, event: Any) -> bool:
        return bool(0 < event.noise_multiplier < math.inf and event.parts >= 1)

    def releases(self, event: Any) -> Iterator[tuple[dp.DpEvent, int]]:
        return iter(())

    def with_amplification(self, event: Any) -> dp.DpEvent:
        return dp.NoOpDpEvent()


register(RandomAllocationDpEvent, _RandomAllocation())
register(RandomAllocationStepDpEvent, _RandomAllocationStep())


class PaidSteps:
    """The later steps of a pass that its first one has paid for, as events come one after the other."""

    def __init__(self) -> None:
        self._paid: tuple[float, int] | None = None
        self._left = 0

    def take(self, event: dp.DpEvent, count: int = 1) -> None:
        """Take an event, `count` times; raises RefusedError for a later step that is not paid for."""
        if isinstance(event, RandomAllocationDpEvent):
            self._paid, self._left = (event.noise_multiplier, event.parts), event.steps - 1
        elif isinstance(event, RandomAllocationStepDpEvent):
            if (event.noise_multiplier, event.parts) != self._paid or count > self._left:
                raise RefusedError(
                    f"{count} later steps of a pass stand among the events, and none before them has paid for as many;"
                    " check the document, or the noise of each step."
                )
            self._left -= count


def check_passes(schedule: Iterable[tuple[dp.DpEvent, int]]) -> None:
    """Raises RefusedError for later steps of a pass that no event before them has paid for."""
    paid = PaidSteps()
    for event, count in schedule:
        paid.take(event, count)
