"""The centre and the scale of a number to predict, from one noisy histogram that is released before training."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from algorithms.core.learned_features import NoisyCount
from algorithms.core.optimizers import Positive
from algorithms.core.settings import Strict
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.models import Model
from algorithms.models.feature_transforms import Shape
from algorithms.models.scaled_target import TargetScaling, can_be_scaled
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gaussian, Release, histograms_release, total_release

_STEPS, _DOUBLED_FROM, _MAX_STEPS = 12, 60.0, 192
"""Steps of the linear grid: 12, and twice as many each time that the records are twice as many, from so many standard
deviations of a count on."""
_LOGARITHMIC_STEPS, _SPAN = 12, 1000.0
"""Steps of the logarithmic grid, and how many times as wide as the first the last is, or nearly."""
_DECADES, _CELLS_OF_DECADE = 6, 3
"""Of the grids around both ends and the middle, which is 0 where the range goes as far below it as above: they tell
numbers of a range that is 100,000 times too wide apart."""
_ABOVE_NOISE, _MOST_TOGETHER = 5.0, 12
"""Neighbouring cells, at most so many, belong to the number wherever they lie if their sum is so many standard
deviations of its noise; 1 of 4,000 histograms has some by noise alone."""
_NEAR_DEVIATIONS = 3.0
"""Others belong to it that are at most so many standard deviations of these away from their mean, and their width."""
_OF_A_TAIL = 1.0
"""And others that are beside those, one after the other, as long as each is above so many deviations of the noise."""
_POINT = 2.1e-6
"""Where only the narrowest cells belong to it, those at the ends and the middle, most numbers are the same. Then the
others lie in the noise by cells, and many cells apart."""
_NEAR_A_POINT, _PASSES = 0.3, 22
"""They are looked for within this distance, if the mean is released, too; what noise adds to the centre it corrects.
Cells join in so many passes that are beside those that belong to it."""
_DEVIATIONS = 1.5
"""The scale in standard deviations. Clipping errors at one would draw a skewed number's mean towards its median."""
_OF_FARTHEST = 0.35
"""Or of how far the farthest cell of the number is from the mean, if that is more, as of a number with a long tail."""
_CLAMP_SCALES, _WIDER_FROM = 1.5, 15.0
"""Numbers are clamped to so many scales around the centre where their mean is released, and to more by the root of how
many times this the records are, in standard deviations of the sum's noise: of a skewed number that leaves out less."""
_ABOVE_LOWEST = 0.5
"""How far a mean is at least above the low end of the range, in standard deviations of its noise: no rate is 0."""
_MIN_SCALE = 2e-6
"""The width of the narrowest cells."""


@dataclass(frozen=True)
class TargetScale(Strict):
    """Centre and scale of a number to predict, by a Gaussian release of its histogram.

    The cells of the histogram are nowhere wide, finer at the low end of the declared range, where numbers with a heavy
    tail are, and finest at both ends and in the middle, where numbers are whose range is far too wide. Mean and
    standard deviation are those of the nearest histogram without negative counts, by its cells that stand out from the
    noise and those near them.

    noise: multiplier of the release. mean_noise: of a second release, of the mean of the numbers near that centre,
    which replaces it; null for none. It is far more exact with few records, so that the centre may be predicted itself.
    """

    of_target: ClassVar[bool] = True
    noise: Positive = 40.0
    mean_noise: Positive | None = None

    def releases(self, shape: Shape) -> list[Release]:
        """One histogram, of which a record changes one cell by 1, and the mean, if there is one."""
        return [histograms_release(1, Gaussian(self.noise)), *mean_releases(self.mean_noise)]

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> dict[str, Tensor]:
        """centre, scale: []."""
        edges = histogram_edges(records / self.noise)

        def cell(_record: Tensor, label: Tensor) -> Tensor:
            return target_cell(label, edges)

        counts = barrier.histograms(cell, [len(edges) - 1], noise=Gaussian(self.noise)).cpu()
        return scaling_from(counts, edges, self.noise, records, barrier=barrier, mean_noise=self.mean_noise)

    def module(self, shape: Shape) -> TargetScaling:
        """The scale before learning: the whole declared range."""
        return TargetScaling(shape)

    def check(self, model: Model) -> None:
        """Raises RefusedError unless the model predicts a number, by a loss that can be put on a scale."""
        if model.label_shape or model.label_dtype != torch.float32:
            raise RefusedError(
                "{learned.kind} is target_scale, which is of a number to predict, and the data have another"
                " target; set it to none.",
                code="target_not_a_number",
            )
        check_loss(model)


def check_loss(model: Model) -> None:
    """Raises RefusedError for a loss of the model's own: what it computes of numbers on another scale is not known."""
    if not can_be_scaled(model):
        raise RefusedError(
            "{learned.kind} puts the number to predict on a released scale, and the model has a loss of its own, which"
            " is written for the declared one; set it to none.",
            code="own_loss_on_a_scale",
        )


def mean_releases(noise: float | None) -> list[Release]:
    """The release of `released_mean`; none without a noise multiplier."""
    return [] if noise is None else [total_release(L2(1.0), Gaussian(noise))]


def scaling_from(
    counts: Tensor, edges: Tensor, noise: float, records: float, *, barrier: Barrier, mean_noise: float | None
) -> dict[str, Tensor]:
    """centre, scale: [], from the noisy counts of the cells; with `mean_noise` the mean is released besides."""
    number = count_with_histogram(records, counts, noise)
    centre, scale = centre_and_scale(counts, edges, noise, number, is_exact_later=mean_noise is not None)
    if mean_noise is not None:
        centre = released_mean(barrier, centre, scale, mean_noise, number)
    return {"centre": torch.tensor(centre), "scale": torch.tensor(scale)}


def released_mean(barrier: Barrier, centre: float, scale: float, noise: float, records: float) -> float:
    """The mean of the numbers, each clamped to an interval around a centre, by one release.

    What is summed is how far each lies from an origin, of which the noisy number of records is no part: an error of
    that number shifts the mean by its share of the distance between both, most where the interval ends at the low end
    of the range. From the middle of the interval distances and so the noise are smallest, at the centre that error. The
    origin makes the sum of both squares least.

    noise: its multiplier; a record moves the sum by 1 in units of the longest distance. records: their number, exact or
    a `NoisyCount`.
    """
    error = records.noise if isinstance(records, NoisyCount) else 0.0
    # In units of the target's range [-1, 1].
    reach = _CLAMP_SCALES * scale * math.sqrt(max(1.0, records / (noise * _WIDER_FROM)))
    low, high = max(-1.0, centre - reach), min(1.0, centre + reach)
    middle, half = (low + high) / 2.0, (high - low) / 2.0  # |label - origin| <= half + |origin - middle|
    apart = centre - middle
    # Least error^2 (apart - m)^2 + noise^2 (half + m)^2, by its derivative in m.
    moved = (error**2 * abs(apart) - noise**2 * half) / (error**2 + noise**2)
    moved = min(abs(apart), max(0.0, moved))
    origin, longest = middle + math.copysign(moved, apart), half + moved

    def on_scale(_record: Tensor, label: Tensor) -> Tensor:
        return ((label.clamp(low, high) - origin) / longest)[None]

    total = float(barrier.total(on_scale, bound=L2(1.0), noise=Gaussian(noise)))
    lowest = _ABOVE_LOWEST * longest * noise / records - 1.0
    return min(high, max(low, lowest, origin + longest * total / records))


def count_with_histogram(records: float, counts: Tensor, noise: float) -> float:
    """The number of records by its release and by the sum of a histogram's cells, each as far as it is exact.

    An exact number stays. noise: the standard deviation of each cell.

    Example:
        >>> better = count_with_histogram(NoisyCount(300.0, noise=60.0), torch.full((16,), 25.0), noise=15.0)
        >>> round(float(better), 1), round(better.noise, 1)
        (350.0, 42.4)
    """
    if not isinstance(records, NoisyCount):
        return records
    of_sum = noise * math.sqrt(len(counts))
    # Both are unbiased with independent errors, so they are weighed by the inverse of their variances.
    both = math.hypot(records.noise, of_sum)
    moved = (records.noise / both) ** 2 * (float(counts.sum()) - records)
    return NoisyCount(records + moved, records.noise * of_sum / both)


def histogram_edges(deviations: float) -> Tensor:
    """The edges of the cells, float64, from -1 to 1; more, the less noise there is in counts.

    Of a linear and a logarithmic grid over the range, and within a step of the linear one from both ends and from the
    middle, of logarithmic ones.

    deviations: the number of records in standard deviations of a count.

    Example:
        >>> [len(histogram_edges(deviations)) for deviations in (24, 500)]
        [77, 152]
    """
    doubled = max(0, math.floor(math.log2(max(1.0, deviations / _DOUBLED_FROM))))
    count = min(_MAX_STEPS, _STEPS * 2**doubled)
    steps = torch.arange(1, count, dtype=torch.float64) / count
    shares = torch.arange(1, _LOGARITHMIC_STEPS, dtype=torch.float64) / _LOGARITHMIC_STEPS
    logarithmic = torch.expm1(shares * math.log1p(_SPAN)) / _SPAN
    first = float(steps[0])
    decades = torch.arange(_DECADES * _CELLS_OF_DECADE, 0, -1, dtype=torch.float64) / _CELLS_OF_DECADE
    near = 10.0**-decades
    near = near[near < 0.8 * first]
    grids = [steps, logarithmic[logarithmic > first], near, 1.0 - near, 0.5 + near, 0.5 - near]
    return 2.0 * torch.cat([steps.new_tensor([0.0, 1.0]), *grids]).sort().values - 1.0


def target_cell(label: Tensor, edges: Tensor) -> Tensor:
    """The cell of a number to predict, int64 [1]; edges: of `histogram_edges`."""
    return (label >= edges[1:-1].to(label)).sum(dim=0, keepdim=True)


def centre_and_scale(
    counts: Tensor, edges: Tensor, noise: float, records: float, *, is_exact_later: bool = False
) -> tuple[float, float]:
    """Mean, and standard deviations that make the scale, by noisy counts of the cells.

    edges: of the cells, one more than counts. noise: the standard deviation of each count. records: their number, as
    far as it is known. is_exact_later: whether the mean is released, too.

    Example:
        >>> edges = torch.linspace(-1, 1, 21, dtype=torch.float64)
        >>> counts = torch.zeros(20)
        >>> counts[10:12] = 1000.0
        >>> centre, scale = centre_and_scale(counts, edges, noise=1.0, records=2000)
        >>> round(centre, 3), round(scale, 3)
        (0.1, 0.087)
    """
    middles, widths = (edges[1:] + edges[:-1]) / 2, edges.diff()
    nearest, is_above_noise = (
        _without_negatives(counts.double(), records),
        _above_noise(counts.double(), noise),
    )

    def moments(belongs: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.where(belongs, nearest, 0.0)
        # Of very few records, none may be left in the cells that stand out together.
        weights = weights if weights.any() else belongs.double()
        shares = weights / weights.sum()
        mean = shares @ middles
        # A number is spread evenly over its cell, which adds width^2 / 12 to the variance of the middles.
        return mean, (shares @ ((middles - mean).square() + widths.square() / 12.0)).sqrt()

    # Numbers of which most are the same have others around these, wherever those lie.
    spread = is_above_noise & (widths > _POINT)
    centre, deviation = moments(spread if spread.any() else is_above_noise)
    minimum = _NEAR_A_POINT if is_exact_later and not spread.any() else 0.0
    for _ in range(1 if spread.any() else _PASSES):
        reach = (_NEAR_DEVIATIONS * deviation).clamp(min=minimum) + widths
        near = (nearest > 0.0) & ((middles - centre).abs() <= reach)
        belongs = _with_tails(is_above_noise | near, counts > _OF_A_TAIL * noise)
        centre, deviation = moments(belongs)
    farthest = (middles - centre).abs()[belongs].max()
    return float(centre), max(_MIN_SCALE, _DEVIATIONS * float(deviation), _OF_FARTHEST * float(farthest))


def _above_noise(counts: Tensor, noise: float) -> Tensor:
    """The neighbours whose sum stands out most from its noise, and all others that do; bool [cells].

    noise: the standard deviation of each count.

    Example:
        >>> _above_noise(torch.tensor([0.0, 4.0, 4.0, 4.0, -1.0, 0.0, 9.0]), noise=1.0)
        tensor([False,  True,  True,  True, False, False,  True])
    """
    sums = [0.0, *counts.cumsum(0).tolist()]
    scores = [
        ((sums[stop] - sums[start]) / math.sqrt(stop - start), start, stop)
        for start in range(len(counts))
        for stop in range(start + 1, min(start + _MOST_TOGETHER, len(counts)) + 1)
    ]
    above = torch.zeros(len(counts), dtype=torch.bool)
    for score, start, stop in sorted(scores, reverse=True):
        if above.any() and score < _ABOVE_NOISE * noise:
            break
        if not above[start:stop].any():
            above[start:stop] = True
    return above


def _with_tails(belongs: Tensor, stand_out: Tensor) -> Tensor:
    """The cells with those beside them that stand out, one after the other; bool [cells].

    Example:
        >>> belongs = torch.tensor([False, False, True, False, False, False])
        >>> _with_tails(belongs, torch.tensor([True, False, True, True, True, False]))
        tensor([False, False,  True,  True,  True, False])
    """
    while True:
        beside = torch.zeros_like(belongs)
        beside[1:] |= belongs[:-1]
        beside[:-1] |= belongs[1:]
        grown = belongs | beside & stand_out
        if torch.equal(grown, belongs):
            return belongs
        belongs = grown


def _without_negatives(counts: Tensor, total: float) -> Tensor:
    """The histogram without negative counts, and with this sum, or 1 at least, that is nearest to a noisy one.

    Example:
        >>> _without_negatives(torch.tensor([10.0, 3.0, -3.0]), 10.0)
        tensor([8.5000, 1.5000, 0.0000])
    """
    # The projection onto a simplex (Duchi et al. 2008): all lose the same excess, and what falls below 0 becomes 0. The
    # excess is that of the longest head of the ranked counts whose last one stays positive.
    ranked = counts.sort(descending=True).values
    excess = (ranked.cumsum(0) - max(1.0, total)) / torch.arange(1, len(counts) + 1)
    return (counts - excess[ranked > excess][-1]).clamp(min=0.0)
