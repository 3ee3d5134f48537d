"""A temperature for the probabilities of classes, from the released histogram.

It is fitted to one half of the people and judged on the other one. Of two classes the table of halves has the log-odds.
Log-odds of more classes would be too many cells, so it has what each of six temperatures gains, in the Brier score,
which is bounded: a log loss that is cut off would favour temperatures that make a wrong answer certain.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from algorithms.evaluation.estimates import pairs_in_one_bin
from algorithms.evaluation.histogram import (
    MAX_BRIER_GAIN,
    MAX_LOG_ODDS,
    MULTICLASS,
    SIDE_SHARE,
    TEMPERATURE_NORM,
    TEMPERATURES,
    Floats,
    score_edges,
)
from algorithms.evaluation.intervals import Estimate, independent, mean_gain, mean_of_sums
from algorithms.evaluation.released_histogram import ReleasedHistogram

_RANGE, _CANDIDATES, _MIN_SIGNAL, _MAX_TIES = 8.0, 121, 3.0, 0.5


@dataclass(frozen=True)
class Recalibration:
    """A temperature that improves a model's probabilities.

    Attributes:
        temperature: By which log-odds are divided.
        gain: By how much the metric falls for a person, on people whom the temperature was not chosen on.
        metric: The log loss, or for more than two classes the Brier score.
    """

    temperature: float
    gain: Estimate
    metric: Literal["log_loss", "brier_score"] = "log_loss"


def recalibration_of(released: ReleasedHistogram) -> Recalibration | None:
    """The temperature, or None where it does not help beyond the noise.

    It minimises the log loss of the first half's cells that stand out from the noise, or for more than two classes the
    noisy Brier score of the first half. It helps if the 95 % interval of its gain on the second half is above 0: noise
    and people there are others, so a temperature that does not help is taken for one that does in at most 2.5 % of
    releases.

    Raises:
        ValueError: if the histogram has no halves.
    """
    if not released.spec.halves:
        raise ValueError(
            "this histogram has no halves of the people, of which one could judge a recalibration."
        )
    if released.spec.kind == MULTICLASS:
        return _of_classes(released)
    first = _without_empty_bins(released.half(0), released.noise_std)
    if first.sum() <= 0 or released.has_invalid:
        return None
    people = first.sum(axis=1)
    # Where in their bin people are would decide the temperature, and is unknown.
    if pairs_in_one_bin(people, 0.0) > _MAX_TIES:
        return None
    centres = _half_centres(released)
    candidates, losses = _candidates(tuple(centres.tolist()))
    # [candidates, bins, 2] x [bins, 2] over both last
    temperature = float(candidates[int(np.argmin(np.tensordot(losses, first, axes=2)))])
    gains = _losses(centres) - _losses(centres / temperature)
    gain = mean_gain(independent(released.half(1), released.noise_std), gains.ravel())
    if gain is None or gain.low <= 0.0:
        return None
    return Recalibration(temperature, gain)


def _of_classes(released: ReleasedHistogram) -> Recalibration | None:
    if released.has_invalid:
        return None
    count, noise = len(TEMPERATURES), released.noise_std * TEMPERATURE_NORM
    # A half is in the order of `temperature_cells`: the people, what each temperature gains, the squares of that.
    best = int(np.argmax(released.half(0)[1 : 1 + count]))
    judging = released.half(1) * TEMPERATURE_NORM
    people, total, squares = (
        judging[0] / SIDE_SHARE,
        judging[1 + best],
        judging[1 + count + best] / SIDE_SHARE,
    )
    gain = mean_of_sums(float(total), float(people), float(squares), noise, noise / SIDE_SHARE)
    if not isinstance(gain, Estimate) or gain.low <= 0.0:
        return None
    return Recalibration(TEMPERATURES[best], gain.map(lambda share: share * MAX_BRIER_GAIN), "brier_score")


def _without_empty_bins(cells: Floats, noise_std: float) -> Floats:
    """The cells, [bins, 2], but 0 in bins that noise alone explains: far ones would decide the temperature."""
    sizes = cells.sum(axis=1, keepdims=True)
    # A bin's size has the noise of two cells.
    return np.where(sizes > _MIN_SIGNAL * math.sqrt(2) * noise_std, cells, 0.0)


def _half_centres(released: ReleasedHistogram) -> Floats:
    """Log-odds in the middle of the bins of the halves' table, [bins]."""
    bins = released.spec.bins
    width = bins // len(released.half(0))
    # Edge i lies between the bins i and i + 1, so the middle of a group of `width` bins is an edge.
    return score_edges(bins)[width // 2 - 1 :: width]


@cache
def _candidates(centres: tuple[float, ...]) -> tuple[Floats, Floats]:
    """Temperatures, [candidates], and the log losses of the bins by each, [candidates, bins, 2]."""
    candidates = np.exp(np.linspace(-math.log(_RANGE), math.log(_RANGE), _CANDIDATES))
    return candidates, np.stack([_losses(np.array(centres) / each) for each in candidates])


def _losses(centres: Floats) -> Floats:
    """Log losses by label, [bins, 2]; log-odds are cut off where those of the metric are."""
    odds = np.clip(centres, -MAX_LOG_ODDS, MAX_LOG_ODDS)
    # -log(1 - p), -log p for p = sigmoid(odds)
    losses: Floats = np.logaddexp(0.0, np.stack([odds, -odds], axis=1))
    return losses
