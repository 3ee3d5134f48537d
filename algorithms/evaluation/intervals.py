"""Estimates of ratios of noisy sums, with 95 % intervals that count the noise and that the records are a sample.

Every interval inverts a test (Fieller 1954; Wilson 1927 for a proportion): it holds the values t for which the sums
N - t D, whose mean is 0 at the true t, are within 1.96 of their standard deviations of 0. That deviation is computed at
t itself, from the known covariance of the noise, and from the sampling variance, which is that of independent people. A
person with several weighted records adds at most as much to it as the formulas for single records say (Jensen), so for
them intervals are wider than needed rather than narrower.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Z = 1.959964
"""Standard deviations on each side of an interval, unless of a best of several."""
MAX_NOISE, MAX_RELATIVE_NOISE = 0.05, 0.1
"""A metric whose standard error by noise alone is above the first, or above this part of its value, if it is in the
target's units, is drowned."""
_MIN_SIGNAL = 4.0
"""Standard deviations of the noise by which a denominator has to be above 0."""
HALVINGS = 24

NOISE_DROWNS_IT = "noise drowns it: there are too few people for this epsilon."
TOO_FEW = "the released histogram does not show that there are people of this kind: too few for this epsilon."


@dataclass(frozen=True)
class Estimate:
    """A metric of the people that the held-out records are a sample of.

    Attributes:
        value: The estimate.
        low, high: The ends of its 95 % interval, which counts noise and sampling.
    """

    value: float
    low: float
    high: float

    @property
    def standard_error(self) -> float:
        """A quarter of the interval's width, nearly; of a best of several it is too large."""
        return (self.high - self.low) / (2 * Z)

    def map(self, monotone: Callable[[float], float]) -> "Estimate":
        """The same for a monotone function of the metric."""
        low, high = monotone(self.low), monotone(self.high)
        return Estimate(monotone(self.value), min(low, high), max(low, high))


Outcome: TypeAlias = Estimate | str
"""An estimate, or one sentence that says why there is none."""


def estimate_in(outcome: Outcome) -> Estimate | None:
    """The estimate, if there is one."""
    return outcome if isinstance(outcome, Estimate) else None


@dataclass(frozen=True)
class NoisyCells:
    """Unbiased noisy cells and what is known of their noise.

    Attributes:
        values: [k], cells in people.
        covariance: [k, k], of the noise.
        z: Standard deviations on each side of their intervals.
    """

    values: Floats
    covariance: Floats
    z: float = field(default=Z, kw_only=True)

    @property
    def people(self) -> Floats:
        """What the sampling variance is computed from, [k]."""
        return self.values

    def total(self, weights: Floats) -> float:
        """The weighted sum of the cells."""
        return float(weights @ self.values)

    def noise(self, first: Floats, second: Floats) -> float:
        """Covariance of the noise in two weighted sums."""
        return float(first @ self.covariance @ second)

    def is_clear(self, weights: Floats) -> bool:
        """Whether a weighted sum is so far above 0 that noise alone does not explain it."""
        return self.total(weights) > _MIN_SIGNAL * math.sqrt(self.noise(weights, weights))


def independent(values: Floats, noise_std: float, z: float = Z) -> NoisyCells:
    """Cells, flattened, with independent noise.

    Args:
        values: Of any shape, in people.
        noise_std: Standard deviation of the noise in each.
        z: Standard deviations on each side of their intervals.
    """
    flat = values.ravel()
    return NoisyCells(flat, noise_std**2 * np.eye(flat.size), z=z)


def proportion(cells: NoisyCells, hits: Floats, misses: Floats, *, twice: bool = False) -> Outcome:
    """hits / (hits + misses) of two weighted sums; with `twice` 2 hits / (2 hits + misses), which is an F1.

    At the true share t of D = hits + misses people the sum hits - t D has variance D t (1 - t), and for an F1, whose D
    counts hits twice, D t (1 - t) (2 - t). So the interval is Wilson's, with the variance of the noise added.

    Args:
        cells: [k].
        hits, misses: [k], weights 0 or 1.
        twice: Whether hits count twice.

    Returns:
        The estimate within [0, 1], or why there is none.
    """
    top = 2 * hits if twice else hits
    everyone = top + misses
    if not cells.is_clear(everyone):
        return TOO_FEW
    above, below = cells.total(top), cells.total(everyone)
    # Covariances of numerator and denominator.
    nn, nd, dd = cells.noise(top, top), cells.noise(top, everyone), cells.noise(everyone, everyone)

    # Of N - t D where t is the ratio, to which a hit adds 1 - t, or twice that where it counts twice, and a miss -t.
    def variance(t: float) -> float:
        return below * t * (1 - t) * ((2 - t) if twice else 1.0) + nn - 2 * t * nd + t * t * dd

    at = min(max(above / below, 0.0), 1.0)
    by_noise = nn - 2 * at * nd + at * at * dd
    return _invert(above, below, variance, by_noise, 0.0, 1.0, z=cells.z, bounds=(0.0, 1.0))


def mean(
    cells: NoisyCells,
    top: Floats,
    everyone: Floats,
    *,
    has_units: bool,
    minimum: float = -math.inf,
    squares: float | None = None,
) -> Outcome:
    """The mean of `top` over the cells' people: (top . x) / (everyone . x), both linear, so unbiased to first order.

    Args:
        cells: [k].
        top: [k].
        everyone: [k].
        has_units: whether noise is compared with the value rather than with 1.
        minimum: lower bound of the mean.
        squares: the sum over people of the squared value, where cells at nodes do not give it.
    """
    if not cells.is_clear(everyone):
        return TOO_FEW
    above, below, people = cells.total(top), cells.total(everyone), cells.people
    nn, nd, dd = cells.noise(top, top), cells.noise(top, everyone), cells.noise(everyone, everyone)
    # A person in cell i changes N - t D by top_i - t everyone_i; its square is expanded in t.
    uu = float(people @ (top * top)) if squares is None else squares
    uv, vv = float(people @ (top * everyone)), float(people @ (everyone * everyone))

    def variance(t: float) -> float:
        return max(0.0, uu - 2 * t * uv + t * t * vv) + nn - 2 * t * nd + t * t * dd

    value = above / below
    by_noise = nn - 2 * value * nd + value * value * dd
    # Far outside the interval: only where the search begins.
    reach = 4 * cells.z * math.sqrt(max(variance(value), 0.0)) / below
    return _invert(
        above,
        below,
        variance,
        by_noise,
        max(minimum, value - reach),
        value + reach,
        z=cells.z,
        bounds=(minimum, math.inf),
        has_units=has_units,
    )


def _invert(
    above: float,
    below: float,
    variance: Callable[[float], float],
    by_noise: float,
    minimum: float,
    maximum: float,
    *,
    z: float = Z,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    has_units: bool = False,
) -> Outcome:
    """The t in [minimum, maximum] for which above - t below is within z standard deviations of 0, or less near a bound.

    by_noise: the noise's part of the variance at the estimate. bounds: of what can be true.
    """
    value = min(max(above / below, minimum), maximum)
    if math.sqrt(max(by_noise, 0.0)) / below > (MAX_RELATIVE_NOISE * abs(value) if has_units else MAX_NOISE):
        return NOISE_DROWNS_IT
    lowest, highest = bounds

    def is_inside(t: float) -> bool:
        deviation = math.sqrt(max(variance(t), 1e-300))
        distance = above - t * below
        # To the nearer bound, in standard deviations.
        nearer = min(t - lowest, highest - t) * below / deviation
        towards = (distance if highest - t < t - lowest else -distance) / deviation
        away, beyond = _acceptance(nearer, z)
        return -away <= towards <= beyond

    return Estimate(value, _edge(is_inside, value, minimum), _edge(is_inside, value, maximum))


def _acceptance(distance: float, z: float) -> tuple[float, float]:
    """How far, in standard deviations, an estimate may be from a t which is `distance` from the bound of all t.

    By the ratio of likelihoods at t and at the best t within the bound (Feldman and Cousins 1998): intervals that hold
    t as often at the bound, where those that are cut off there would more often, and are never empty.

    Returns:
        How far away from the bound, and how far towards and beyond it; z each far from it.
    """
    if distance >= z:
        return z, z
    distances, roots = _critical_values(z)
    if distance <= 0.0:
        return float(roots[0]), math.inf
    away = float(np.interp(distance, distances, roots))
    # Beyond it the bound itself is the best t: x^2 - (x - d)^2 = c has the root (c + d^2) / 2 d.
    return away, (away**2 + distance**2) / (2 * distance)


def normal_cdf(z: float) -> float:
    """The probability that a standard normal number is below z, exact to a rounding also where it is small."""
    return math.erfc(-z / math.sqrt(2)) / 2


_normal_cdfs = np.vectorize(normal_cdf, otypes=[float])


@cache
def _critical_values(z: float) -> tuple[Floats, Floats]:
    """Distances d to the bound, and roots of the critical ratio c there: Phi((c + d^2) / 2 d) - Phi(-sqrt(c)) is the
    coverage."""
    distances, coverage = np.linspace(0.0, z, 200), 2 * normal_cdf(z) - 1
    # At the bound the test has one side, so its root is the quantile at the coverage; far from it the root is z.
    low, high = np.full(200, NormalDist().inv_cdf(coverage)), np.full(200, z)
    for _ in range(40):
        middle = (low + high) / 2
        beyond = (middle**2 + distances**2) / (2 * np.maximum(distances, 1e-9))
        covers = _normal_cdfs(beyond) - _normal_cdfs(-middle) > coverage
        low, high = np.where(covers, low, middle), np.where(covers, middle, high)
    return distances, high


def _edge(is_inside: Callable[[float], bool], start: float, end: float) -> float:
    """Where the interval around `start` ends towards `end`, by halving."""
    if is_inside(end):
        return end
    for _ in range(HALVINGS):
        middle = (start + end) / 2
        start, end = (middle, end) if is_inside(middle) else (start, middle)
    return (start + end) / 2


def mean_of_sums(total: float, people: float, squares: float, noise: float, people_noise: float) -> Outcome:
    """The mean of values in [-1, 1] from their sum, their number and the sum of their squares, all noisy.

    Args:
        total: The sum of the values.
        people: Their number.
        squares: The sum of their squares.
        noise, people_noise: Standard deviations of the independent noise in the first two.
    """
    if people <= _MIN_SIGNAL * people_noise or people <= 0:
        return TOO_FEW
    spread = min(max(squares, total * total / people, 0.0), people)

    # Of the sum less t times the number: the sum of (v - t)^2, and the noise of both.
    def variance(t: float) -> float:
        return max(spread - 2 * t * total + t * t * people, 0.0) + noise**2 + (t * people_noise) ** 2

    value = min(max(total / people, -1.0), 1.0)
    return _invert(
        total, people, variance, noise**2 + (value * people_noise) ** 2, -1.0, 1.0, bounds=(-1.0, 1.0)
    )


def product_ratio(cells: NoisyCells, above: tuple[Floats, Floats], below: tuple[Floats, Floats]) -> Outcome:
    """The ratio of two products of weighted sums, such as a lift; the noise's covariance in each product is subtracted.

    The variance of the difference of products at a ratio t is that of its linear part.
    """
    if not all(cells.is_clear(weights) for weights in (*above, *below)):
        return TOO_FEW
    (a, b), (c, d) = ([cells.total(weights) for weights in pair] for pair in (above, below))
    top, bottom = a * b - cells.noise(*above), c * d - cells.noise(*below)

    def parts(t: float) -> tuple[float, float]:
        slope = a * above[1] + b * above[0] - t * (c * below[1] + d * below[0])  # of a b - t c d by each cell
        return cells.noise(slope, slope), cells.total(slope * slope)

    noise_at, variance = _variances_of(parts)
    value = top / bottom
    reach = 4 * cells.z * math.sqrt(variance(value)) / bottom
    minimum = max(0.0, value - reach)
    return _invert(
        top,
        bottom,
        variance,
        noise_at(value),
        minimum,
        value + reach,
        z=cells.z,
        bounds=(0.0, math.inf),
        has_units=True,
    )


def root_mean_square(squares: Floats, chances: Floats, between: float, z: float) -> Estimate:
    """The root of a sum of squared means, from squares that noise and sampling make larger by their variances.

    At the true sum s, noisy squares add up to a variable of mean s + sum(chances), which is nearly a multiple of a chi
    square one, so its cube root is nearly normal (Wilson and Hilferty 1931). Of s each square has its estimated share.

    Args:
        squares: [k], of normal variables. chances: [k], their variances, above 0.
        between: variance of the sum by how many people are where.
        z: standard deviations on each side of the interval.
    """
    total, by_chance = float(squares.sum()), float(chances.sum())
    excess = np.maximum(squares - chances, 0.0)  # each one's part of s, up to a factor
    # The variance of squares is 2 sum v^2 + 4 sum v m^2 for variances v and means m: a constant, and a part linear in
    # s.
    slope = 4 * float(np.average(chances, weights=excess if excess.any() else None))
    constant = 2 * float(chances @ chances) + between
    value = max(total - by_chance, 0.0)

    def is_inside(s: float) -> bool:
        mean = s + by_chance
        spread = (constant + slope * s) / (9 * mean**2)  # 2 / 9 k for chi square with k degrees of freedom
        away, beyond = _acceptance((1 - math.cbrt(by_chance / mean)) / math.sqrt(spread), z)
        return -beyond <= (math.cbrt(total / mean) - 1 + spread) / math.sqrt(spread) <= away

    maximum = total + 5 * z * math.sqrt(constant + slope * total) + 5 * z * slope
    return Estimate(value, _edge(is_inside, value, 0.0), _edge(is_inside, value, maximum)).map(math.sqrt)


def mean_gain(cells: NoisyCells, gains: Floats) -> Estimate | None:
    """The mean of what each person gains, with an interval also where noise is larger than the gain.

    Args:
        cells: [k].
        gains: [k], of each person in a cell.

    Returns:
        The estimate; None if noise alone would explain that there are people.
    """
    people = float(cells.values.sum())
    everyone = np.ones_like(gains)
    if not cells.is_clear(everyone):
        return None
    value = cells.total(gains) / people
    centred = gains - value  # of the ratio's linear part, per person
    error = Z * math.sqrt(cells.noise(centred, centred) + max(cells.total(centred * centred), 0.0)) / people
    return Estimate(value, value - error, value + error)


def area_under_curve(values: Floats, people: Floats, noise: Floats, kernel: Floats, z: float) -> Outcome:
    """The share of pairs of a positive and a negative that are in the right order, sum_ij p_i K_ij n_j / (P N).

    The noise of positives and negatives is independent, so the sums of products are unbiased. Their variance at a
    share t has with C = K - t, a = C n, b = C'p the noise's part a'S a + b'S b + tr(C S C'S), and the sample's part
    sum p_i a_i^2 + sum n_j b_j^2 (Hoeffding 1948), both with counts that are not negative.

    Args:
        values: [bins, 2], negatives and positives.
        people: [bins, 2], the same as counts from 0.
        noise: [bins, bins], covariance of the noise, the same for both.
        kernel: [bins, bins], 1 where a positive's bin is above a negative's.
        z: standard deviations on each side of the interval.
    """
    negatives, positives = values.T
    ones = np.ones(len(values))  # weights that add up all bins
    total_noise = math.sqrt(float(ones @ noise @ ones))
    below_n, below_p = float(negatives.sum()), float(positives.sum())
    if min(below_n, below_p) <= _MIN_SIGNAL * total_noise:
        return TOO_FEW
    above, below = float(positives @ kernel @ negatives), below_n * below_p
    of_n, of_p = people.T

    def parts(t: float) -> tuple[float, float]:
        centred = kernel - t
        a, b = centred @ of_n, centred.T @ of_p
        # The trace is a sum of products, as S is symmetric.
        by_noise = a @ noise @ a + b @ noise @ b + np.sum((centred @ noise @ centred.T) * noise)
        return float(by_noise), float(of_p @ (a * a) + of_n @ (b * b))

    noise_at, variance = _variances_of(parts)
    value = min(max(above / below, 0.0), 1.0)
    return _invert(above, below, variance, noise_at(value), 0.0, 1.0, z=z, bounds=(0.0, 1.0))


def _variances_of(
    parts: Callable[[float], tuple[float, float]],
) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """The variance by noise alone at a ratio t, and by noise and sample, of what states both parts at any t."""
    # Both parts are quadratic in t, so three values of each tell all.
    noise_at, sample_at = (_quadratic(*three) for three in zip(*map(parts, (0.0, 0.5, 1.0)), strict=True))
    return noise_at, lambda t: max(noise_at(t), 0.0) + max(sample_at(t), 0.0)


def _quadratic(at_0: float, at_half: float, at_1: float) -> Callable[[float], float]:
    # The coefficients of c + slope t + square t^2 by its values at 0, 1/2 and 1.
    square = 2 * (at_0 - 2 * at_half + at_1)
    slope = at_1 - at_0 - square
    return lambda t: at_0 + t * (slope + t * square)


def variance_explained(
    errors: Floats,
    targets: Floats,
    joint: Floats,
    squares: Floats,
    nodes: Floats,
    joint_nodes: Floats,
    noise_std: float,
    z: float,
) -> tuple[Outcome, Outcome]:
    """R2, which is 1 - E / V for the mean squared error E and the target's variance V, and V itself.

    V is the mean square less the squared mean, whose noise and sampling variance are added back. E - t V has mean 0 at
    t = 1 - R2; its sampling variance is that of e - t (y - m)^2, whose square is summed over the joint cells.

    Args:
        errors: [errors], cells of the squared error. targets: [targets], cells of the target.
        joint: [errors, bins], cells of both.
        squares: [errors], the squared error in each cell. nodes: [targets], the target in each cell.
        joint_nodes: [bins], the target in each joint cell.
        z: standard deviations on each side of the interval.
    """
    people, total = float(errors.sum()), float(targets.sum())
    if min(people / math.sqrt(errors.size), total / math.sqrt(targets.size)) <= _MIN_SIGNAL * noise_std:
        return TOO_FEW, TOO_FEW
    error, centre = float(errors @ squares) / people, float(targets @ nodes) / total
    spread = np.square(nodes - centre)  # [targets]
    variance = float(targets @ spread) / total
    joint_spread = np.square(joint_nodes - centre)[None, :]  # [1, bins]
    # The centre's variance, by noise and by sampling (V / n): its square is too large by that.
    variance += (noise_std**2 * float(spread.sum()) / total + max(variance, 0.0)) / total
    if variance <= 0:
        return NOISE_DROWNS_IT, NOISE_DROWNS_IT
    of_error = noise_std**2 * float(np.sum(np.square(squares - error))) / people**2
    of_spread = noise_std**2 * float(np.sum(np.square(spread - variance))) / total**2

    def sample(t: float) -> float:
        return float(np.sum(joint * np.square(squares[:, None] - t * joint_spread))) / total**2

    sample_at = _quadratic(sample(0.0), sample(0.5), sample(1.0))

    def variance_at(t: float) -> float:
        return max(0.0, sample_at(t)) + of_error + t * t * of_spread

    ratio = error / variance
    reach = 4 * z * math.sqrt(variance_at(ratio)) / variance
    unexplained = _invert(
        error,
        variance,
        variance_at,
        of_error + ratio**2 * of_spread,
        max(0.0, ratio - reach),
        ratio + reach,
        z=z,
    )
    explained = unexplained.map(lambda t: 1 - t) if isinstance(unexplained, Estimate) else unexplained
    if math.sqrt(of_spread) > MAX_RELATIVE_NOISE * variance:
        return explained, NOISE_DROWNS_IT
    # Sampling variance of V, by the fourth moment.
    fourth = max(0.0, float(np.sum(joint * np.square(joint_spread - variance)))) / total**2
    width = z * math.sqrt(fourth + of_spread)
    return explained, Estimate(variance, max(0.0, variance - width), variance + width)


def share(value: float, variance: Callable[[float], float], z: float) -> Outcome:
    """A metric in [0, 1] with its interval.

    Args:
        value: The estimate.
        variance: Of the estimate, where the true metric is t.
        z: Standard deviations on each side of the interval.
    """
    return _invert(value, 1.0, variance, 0.0, 0.0, 1.0, z=z, bounds=(0.0, 1.0))


def shrunk(counts: Floats, variances: Floats) -> Floats:
    """Counts drawn to their mean by what noise explains of their differences.

    Args:
        counts: [k], noisy.
        variances: [k], of their noise.

    Source:
        James and Stein 1961.
    """
    by_chance = float(variances.mean())
    signal = max(0.0, float(np.var(counts)) - by_chance)
    middle = float(counts.mean())
    drawn: Floats = middle + signal / max(signal + by_chance, 1e-12) * (counts - middle)
    return drawn


def difference(first: Estimate, second: Estimate) -> Estimate:
    """first - second of independent estimates; the squared distances to the ends of their intervals add up.

    Args:
        first, second: Estimates from different people.

    Source:
        Newcombe 1998.
    """
    value = first.value - second.value
    # First at its low end, second at its high one.
    down = math.hypot(first.value - first.low, second.high - second.value)
    up = math.hypot(first.high - first.value, second.value - second.low)
    return Estimate(value, value - down, value + up)
