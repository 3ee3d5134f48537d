"""What depends on a threshold of two classes: precision, recall and lift; and the calibration curve."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from algorithms.evaluation.estimates import (
    ScoredCells,
    are_in_few_bins,
    bin_centres,
    confusion_at,
    extrapolate,
    pair_centres,
    scored_cells,
    sigmoid,
)
from algorithms.evaluation.histogram import BINARY, MULTICLASS, Floats, score_edges
from algorithms.evaluation.intervals import (
    TOO_FEW,
    Estimate,
    NoisyCells,
    Outcome,
    estimate_in,
    independent,
    product_ratio,
    proportion,
    root_mean_square,
)
from algorithms.evaluation.released_histogram import ReleasedHistogram

_POINTS = 16
_MAX_HIDDEN, _HIDDEN_GAP = 0.1, 0.25
_MERGED_BINS = "noise hides too many of the bins, and in merged ones errors of opposite signs cancel."


@dataclass(frozen=True)
class Threshold:
    """Who is predicted positive from one probability on.

    Attributes:
        threshold: the probability.
        selected: the share of all people who are predicted positive.
        precision, recall: as usual.
        false_positive_rate: the share of negatives who are predicted positive.
        lift: precision over the share of positives: how much more frequent they are among those predicted positive.
    """

    threshold: float
    selected: Estimate | None
    precision: Estimate | None
    recall: Estimate | None
    false_positive_rate: Estimate | None
    lift: Estimate | None


@dataclass(frozen=True)
class CalibrationBin:
    """People whose predicted probabilities are close to each other.

    Attributes:
        low, high: The bounds of these probabilities.
        predicted: Their mean.
        observed: The share of these people for whom the prediction is right.
    """

    low: float
    high: float
    predicted: float
    observed: Estimate


def thresholds_of(released: ReleasedHistogram) -> tuple[Threshold, ...]:
    """Metrics of two classes at 15 public thresholds, which are even in the bins; empty for other kinds."""
    if released.spec.kind != BINARY or released.has_invalid:
        return ()
    cells, bins = scored_cells(released.view()), released.spec.bins
    return tuple(threshold_at(cells, cut) for cut in range(bins // _POINTS, bins, bins // _POINTS))


def threshold_at(cells: ScoredCells, cut: int) -> Threshold:
    """The metrics where bins from `cut` on, at least 1, are predicted positive."""
    bins = len(cells.by_bin)
    tn, fp, fn, tp = confusion_at(bins, cut)
    return Threshold(
        float(sigmoid(score_edges(bins))[cut - 1]),
        selected=estimate_in(proportion(cells, tp + fp, tn + fn)),
        precision=estimate_in(proportion(cells, tp, fp)),
        recall=estimate_in(proportion(cells, tp, fn)),
        false_positive_rate=estimate_in(proportion(cells, fp, tn)),
        lift=estimate_in(product_ratio(cells, (tp, tn + fp + fn + tp), (tp + fp, tp + fn))),
    )


def calibration_curve(released: ReleasedHistogram) -> tuple[CalibrationBin, ...]:
    """Predicted probability against the observed share: of the second of two classes, else of the predicted class.

    Neighbouring bins are merged until noise no longer drowns their share; what is left over joins the last.
    Empty where not even all people are enough, where scores of two classes lie in a few bins, which do not tell their
    probability, and for numbers and bounded scores.
    """
    scored = _probability_bins(released)
    if scored is None:
        return ()
    cells, means, edges = scored.cells, scored.means, scored.edges
    bins, group = len(means), len(means) // (len(edges) - 1)
    observed: list[tuple[int, int, Estimate]] = []
    start = 0
    for end in range(group, bins + 1, group):
        outcome = _share_between(cells, bins, start, end)
        if isinstance(outcome, Estimate):
            observed.append((start, end, outcome))
            start = end
    if observed and start < bins:
        last, end, outcome = observed.pop()
        rest = _share_between(cells, bins, last, bins)
        observed.append((last, bins, rest) if isinstance(rest, Estimate) else (last, end, outcome))
    return tuple(
        _point(cells, means, start, end, (edges[start // group], edges[end // group]), share)
        for start, end, share in observed
    )


def calibration_error_of(released: ReleasedHistogram) -> Outcome:
    """The root mean square distance of predicted probability and observed share over 16 public bins.

    Noise and sampling make every distance larger. Each bin's squared sum of differences has their variance subtracted,
    so the mean square has no bias; its root is 0 where chance explains it, and the interval then starts at 0. The
    average distance, which is more usual, has no such correction.

    A bin whose people are not clear of the noise joins its neighbour, where errors of opposite signs cancel. The upper
    end counts the people whom this hides as a quarter off, and there is no error where they are more than a tenth. Of
    more than two classes the mean confidence within the last bin is unknown, which both ends count.
    """
    scored = _probability_bins(released)
    if scored is None:
        return TOO_FEW
    cells, gaps = scored.cells, scored.gaps
    merged, hidden = _clear_bins(scored)
    if not merged:
        return TOO_FEW
    if hidden > _MAX_HIDDEN:
        return _MERGED_BINS
    sizes = np.array([cells.total(people) for people in merged])
    means = np.array([cells.total(gaps * people) for people in merged]) / sizes
    chances = []
    for people, size, gap in zip(merged, sizes, means, strict=True):
        centred = (gaps - gap) * people
        by_sample = max(float(cells.people @ (centred * centred)), 0.0)
        # Variance of the mean gap, times the bin's size.
        chances.append((cells.noise(centred, centred) + by_sample + 1e-9) / size)
    shares, squares = sizes / sizes.sum(), means * means
    # The variance of sum p_i g_i^2 for the multinomial shares p_i of people.
    between = float(shares @ np.square(squares - shares @ squares)) / sizes.sum()
    error = root_mean_square(shares * squares, np.array(chances) / sizes.sum(), between, cells.z)
    # Half a bin's width, which its share enters squared.
    moved = 0.0 if released.spec.kind == BINARY else math.sqrt(shares[-1]) / (2 * len(scored.means))
    high = math.hypot(error.high + moved, _HIDDEN_GAP * math.sqrt(hidden))
    return Estimate(error.value, max(error.low - moved, 0.0), high)


@dataclass(frozen=True)
class _ProbabilityBins:
    """cells: [bins x 2]. means: predicted probability of each bin, [bins]. edges: of the points, [points + 1]."""

    cells: NoisyCells
    means: Floats
    edges: Floats

    @property
    def gaps(self) -> Floats:
        """Predicted less observed in each cell."""
        return np.stack([self.means, self.means - 1], axis=1).ravel()  # [bins x 2]: observed 0, observed 1


def _probability_bins(released: ReleasedHistogram) -> _ProbabilityBins | None:
    spec = released.spec
    if released.has_invalid:
        return None
    if spec.kind == BINARY:
        scored = scored_cells(released.view())
        if are_in_few_bins(scored):
            return None
        bins, group = spec.bins, spec.bins // _POINTS
        means = extrapolate(bins, sigmoid(bin_centres(bins)), sigmoid(pair_centres(bins)))
        edges = np.concatenate([[0.0], sigmoid(score_edges(bins)), [1.0]])[::group]
        return _ProbabilityBins(scored, means, edges)
    if spec.kind == MULTICLASS:
        cells = independent(released.view().tables["confidence x right"], released.noise_std, released.z)
        edges = np.arange(spec.bins + 1) / spec.bins
        return _ProbabilityBins(cells, (edges[1:] + edges[:-1]) / 2, edges)
    return None


def _clear_bins(scored: _ProbabilityBins) -> tuple[list[Floats], float]:
    """Weights that add up the people of neighbouring bins, merged until they are clear of noise.

    With the share of people outside the largest bin of those that were merged.
    """
    cells, bins, points = scored.cells, len(scored.means), len(scored.edges) - 1
    ends = [at * (bins // points) for at in range(points + 1)]  # of points, in bins
    starts = [0]
    for end in range(1, points + 1):
        if cells.is_clear(_between(bins, ends[starts[-1]], ends[end], (1.0, 1.0))):
            starts.append(end)
    del starts[-1]  # what is left over joins the last, which noise below 0 can make unclear
    while starts and not cells.is_clear(_between(bins, ends[starts[-1]], bins, (1.0, 1.0))):
        del starts[-1]
    if not starts:
        return [], 1.0
    merged = [
        _between(bins, ends[first], ends[last], (1.0, 1.0))
        for first, last in zip(starts, [*starts[1:], points], strict=True)
    ]
    sizes = np.array([cells.total(_between(bins, *pair, (1.0, 1.0))) for pair in pairwise(ends)])
    # `reduceat`: the largest of each run of merged points
    hidden = 1.0 - float(np.maximum.reduceat(sizes, starts).sum() / sizes.sum())
    return merged, max(hidden, 0.0)


def _share_between(cells: NoisyCells, bins: int, start: int, end: int) -> Outcome:
    """The observed share in some bins."""
    return proportion(cells, _between(bins, start, end, (0.0, 1.0)), _between(bins, start, end, (1.0, 0.0)))


def _point(
    cells: NoisyCells, means: Floats, start: int, end: int, ends: tuple[float, float], share: Estimate
) -> CalibrationBin:
    people = _between(len(means), start, end, (1.0, 1.0))
    mean = cells.total(np.repeat(means, 2) * people) / cells.total(people)
    low, high = map(float, ends)
    return CalibrationBin(low, high, min(max(mean, low), high), share)


def _between(bins: int, start: int, end: int, columns: tuple[float, float]) -> Floats:
    """Weights of the cells, [bins x 2] flattened, that add up columns of some bins."""
    rows = ((np.arange(bins) >= start) & (np.arange(bins) < end)).astype(np.float64)
    return np.outer(rows, columns).ravel()
