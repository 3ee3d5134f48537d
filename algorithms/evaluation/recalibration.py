"""A temperature for the probabilities of two classes, from the released histogram.

It is fitted to one half of the people and judged on the other one. More than two classes have none: their log-odds
are not in the histogram, only the predicted class's probability.
"""

import math
from dataclasses import dataclass

import numpy as np

from algorithms.evaluation.estimates import pairs_in_one_bin
from algorithms.evaluation.histogram import MAX_LOG_ODDS, Floats, ReleasedHistogram, score_edges
from algorithms.evaluation.intervals import Estimate, independent, mean_gain

_RANGE, _CANDIDATES, _CLEAR, _MAX_TIES = 8.0, 121, 3.0, 0.5


@dataclass(frozen=True)
class Recalibration:
    """Log-odds divided by `temperature` have a smaller log loss, by `gain` a person."""

    temperature: float
    gain: Estimate


def recalibration_of(released: ReleasedHistogram) -> Recalibration | None:
    """The temperature, or None where it does not help beyond the noise.

    It minimises the log loss of the first half's cells that stand out from the noise. It helps if the 95 % interval of
    its gain on the second half is above 0: noise and people there are others, so a temperature that does not help is
    taken for one that does in at most 2.5 % of releases.

    Raises:
        ValueError: if the histogram has no halves.
    """
    if not released.spec.halves:
        raise ValueError(
            "this histogram has no halves of the people, of which one could judge a recalibration."
        )
    first = _without_empty_bins(released.half(0), released.noise_std)
    if first.sum() <= 0 or released.has_invalid:
        return None
    people = first.sum(axis=1)
    if (
        pairs_in_one_bin(people, 0.0) > _MAX_TIES
    ):  # where in the bin they are decides the temperature, and is unknown
        return None
    centres = _half_centres(released)
    candidates = np.exp(np.linspace(-math.log(_RANGE), math.log(_RANGE), _CANDIDATES))
    fits = [float(np.sum(first * _losses(centres / each))) for each in candidates]
    temperature = float(candidates[int(np.argmin(fits))])
    gains = _losses(centres) - _losses(centres / temperature)
    gain = mean_gain(independent(released.half(1), released.noise_std), gains.ravel())
    if gain is None or gain.low <= 0.0:
        return None
    return Recalibration(temperature, gain)


def _without_empty_bins(cells: Floats, noise_std: float) -> Floats:
    """The cells, [bins, 2], but 0 in bins that noise alone explains: far ones would decide the temperature."""
    sizes = cells.sum(axis=1, keepdims=True)
    return np.where(sizes > _CLEAR * math.sqrt(2) * noise_std, cells, 0.0)


def _half_centres(released: ReleasedHistogram) -> Floats:
    """Log-odds in the middle of the bins of the halves' table, [bins]."""
    bins = released.spec.bins
    width = bins // len(released.half(0))
    return score_edges(bins)[width // 2 - 1 :: width]


def _losses(centres: Floats) -> Floats:
    """Log losses by label, [bins, 2]; log-odds are cut off where those of the metric are."""
    odds = np.clip(centres, -MAX_LOG_ODDS, MAX_LOG_ODDS)
    losses: Floats = np.logaddexp(0.0, np.stack([odds, -odds], axis=1))
    return losses
