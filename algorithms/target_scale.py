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

_STEPS, _SPAN = 12, 1000.0
"""Steps of each grid, and how many times as wide as the first the last of the logarithmic ones is, or nearly."""
_ABOVE_NOISE = 4.5
"""A cell of so many standard deviations of the noise belongs to the number wherever it lies; 1 of 300,000 does so by
noise alone."""
_NEAR_DEVIATIONS = 2.5
"""Others belong to it that are at most so many standard deviations of the number away from its mean."""
_NEAR_AT_LEAST = 0.3
"""Or at most so far away, where the mean is released, too. Of numbers that are mostly zero, the others lie in the noise
by cells, and many cells apart; what noise adds here to the centre the mean corrects."""
_PASSES = 22
"""In which cells may join that are beside those that belong to it."""
_DEVIATIONS = 1.5
"""The scale in standard deviations. Clipping errors at one would draw a skewed number's mean towards its median."""
_CLAMP_SCALES, _WIDER_FROM = 1.5, 30.0
"""Numbers are clamped to so many scales around the centre where their mean is released, and to more by the root of how
many times this the records are, in standard deviations of the sum's noise: of a skewed number that leaves out less."""
_ABOVE_LOWEST = 0.5
"""How far a mean is at least above the low end of the range, in standard deviations of its noise: no rate is 0."""
_MIN_SCALE = 0.02
"""A hundredth of the range, which is 2: shorter errors are not worth telling apart."""


@dataclass(frozen=True)
class TargetScale(Strict):
    """Centre and scale of a number to predict, by a Gaussian release of its histogram.

    The cells of the histogram are those of a linear and of a logarithmic grid together: finer at the low end of the
    declared range, where numbers with a heavy tail are, and nowhere wide. Mean and standard deviation are those of the
    nearest histogram without negative counts, by its cells that stand out from the noise and those near them.

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
        edges = histogram_edges()

        def cell(_record: Tensor, label: Tensor) -> Tensor:
            return target_cell(label, edges)

        counts = barrier.histograms(cell, [len(edges) - 1], noise=Gaussian(self.noise)).cpu()
        centre, scale = centre_and_scale(counts, self.noise, is_exact_later=self.mean_noise is not None)
        if self.mean_noise is not None:
            number = count_with_histogram(records, counts, self.noise)
            centre = released_mean(barrier, centre, scale, self.mean_noise, number)
        return {"centre": torch.tensor(centre), "scale": torch.tensor(scale)}

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


def histogram_edges() -> Tensor:
    """The edges of the cells, [24], float64, from -1 to 1: of a linear and a logarithmic grid."""
    steps = torch.arange(_STEPS + 1, dtype=torch.float64) / _STEPS
    logarithmic = torch.expm1(steps * math.log1p(_SPAN)) / _SPAN
    inner = torch.cat([steps[1:-1], logarithmic[1:-1]]).sort().values
    return 2.0 * torch.cat([steps[:1], inner, steps[-1:]]) - 1.0


def target_cell(label: Tensor, edges: Tensor) -> Tensor:
    """The cell of a number to predict, int64 [1]; edges: of `histogram_edges`."""
    return (label >= edges[1:-1].to(label)).sum(dim=0, keepdim=True)


def centre_and_scale(counts: Tensor, noise: float, *, is_exact_later: bool = False) -> tuple[float, float]:
    """Mean, and standard deviations that make the scale, by noisy counts of the cells, [23].

    noise: the standard deviation of each count. is_exact_later: whether the mean is released, too.

    Example:
        >>> counts = torch.zeros(23)
        >>> counts[0] = 1000.0
        >>> centre, scale = centre_and_scale(counts, noise=1.0)
        >>> round(centre, 3), scale
        (-0.999, 0.02)
    """
    edges = histogram_edges()
    middles, widths = (edges[1:] + edges[:-1]) / 2, edges.diff()
    nearest, is_above_noise = _without_negatives(counts.double()), counts >= _ABOVE_NOISE * noise
    belongs = is_above_noise if is_above_noise.any() else nearest == nearest.max()
    minimum = _NEAR_AT_LEAST if is_exact_later else 0.0
    for _ in range(_PASSES):
        shares = torch.where(belongs, nearest, 0.0) / nearest[belongs].sum()
        centre = shares @ middles
        # A number is spread evenly over its cell, which adds width^2 / 12 to the variance of the middles.
        deviation = (shares @ ((middles - centre).square() + widths.square() / 12.0)).sqrt()
        reach = (_NEAR_DEVIATIONS * deviation).clamp(min=minimum) + widths
        belongs = is_above_noise | (nearest > 0.0) & ((middles - centre).abs() <= reach)
    return float(centre), max(_MIN_SCALE, _DEVIATIONS * float(deviation))


def _without_negatives(counts: Tensor) -> Tensor:
    """The histogram without negative counts, and with the same sum, that is nearest to a noisy one; at least 1 in all.

    Example:
        >>> _without_negatives(torch.tensor([10.0, 3.0, -3.0]))
        tensor([8.5000, 1.5000, 0.0000])
    """
    # The projection onto a simplex (Duchi et al. 2008): all lose the same excess, and what falls below 0 becomes 0. The
    # excess is that of the longest head of the ranked counts whose last one stays positive.
    ranked = counts.sort(descending=True).values
    excess = (ranked.cumsum(0) - counts.sum().clamp(min=1.0)) / torch.arange(1, len(counts) + 1)
    return (counts - excess[ranked > excess][-1]).clamp(min=0.0)
