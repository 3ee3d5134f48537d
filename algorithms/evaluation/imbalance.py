"""Where classes are uneven: recall and precision of each class, and the threshold of two classes at a stated cost.

Accuracy says little there, as always naming the most frequent class is hard to beat. What is rare is found by naming it
from a lower probability on, which costs nothing: it is post-processing of released scores.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from algorithms.evaluation.curves import Threshold, threshold_at
from algorithms.evaluation.estimates import (
    ScoredCells,
    class_cells,
    confusion_at,
    scored_cells,
    sigmoid,
)
from algorithms.evaluation.histogram import BINARY, MULTICLASS, Floats, score_edges
from algorithms.evaluation.intervals import Estimate, NoisyCells, estimate_in, mean, proportion
from algorithms.evaluation.released_histogram import ReleasedHistogram


@dataclass(frozen=True)
class MetricsOfClass:
    """Of one class.

    Attributes:
        share: of all people. Naming everybody so would have this precision.
        recall: the share of the class's people who are predicted to be of it.
        precision: the share of those predicted to be of it who are.
    """

    share: Estimate | None
    recall: Estimate | None
    precision: Estimate | None


@dataclass(frozen=True)
class Decision:
    """The cheapest threshold of two classes.

    Attributes:
        at: what the second class's probability has to exceed for it to be predicted, and what comes of it.
        cost: of a person on average.
        constant_cost: of always naming the class that is cheaper to name always.
    """

    at: Threshold
    cost: Estimate | None
    constant_cost: Estimate | None


def class_metrics_of(released: ReleasedHistogram) -> tuple[MetricsOfClass, ...]:
    """The metrics of each class, in their order; empty for other kinds of targets, and where scores are not finite."""
    if released.has_invalid or released.spec.kind not in (BINARY, MULTICLASS):
        return ()
    cells: NoisyCells
    if released.spec.kind == BINARY:
        cells = scored_cells(released.view())
        tn, fp, fn, tp = confusion_at(released.spec.bins, released.spec.bins // 2)
        right, of_class, predicted = (
            np.stack([tn, tp]),
            np.stack([tn + fp, fn + tp]),
            np.stack([tn + fn, fp + tp]),
        )
    else:
        cells, right, of_class, predicted = class_cells(released.view())
    everyone = of_class.sum(axis=0)
    return tuple(
        MetricsOfClass(
            share=estimate_in(proportion(cells, of, everyone - of)),
            recall=estimate_in(proportion(cells, hits, of - hits)),
            precision=estimate_in(proportion(cells, hits, named - hits)),
        )
        for hits, of, named in zip(right, of_class, predicted, strict=True)
    )


def confusion_of(released: ReleasedHistogram) -> Floats | None:
    """Noisy counts of predicted class by label, [classes, classes], from the cells of metrics; None without any."""
    if released.spec.kind == BINARY:
        # [4, cells]: tn, fp, fn, tp
        weights = np.stack(confusion_at(released.spec.bins, released.spec.bins // 2))
        # Label x predicted, transposed.
        counts: Floats = (weights @ scored_cells(released.view()).values).reshape(2, 2).T
        return counts
    return released.view().tables.get("predicted x label")


def cheapest_threshold(released: ReleasedHistogram, costs: Sequence[float]) -> Decision | None:
    """The threshold at which mistakes cost least in the released histogram; None where it says nothing of two classes.

    It is the one at which a right probability would decide, unless another one is cheaper by more than a standard
    deviation of the noise. Chosen on the people whom it is shown for, it looks a little cheaper than it is for others.

    Args:
        released: the histogram.
        costs: of naming a person of the first class, and of the second, to be of the other one.

    Example:
        >>> from algorithms.evaluation import count, histogram_for
        >>> chances, labels = np.repeat([0.05, 0.2, 0.8], [900, 80, 20]), np.repeat([0, 1], [940, 60])
        >>> spec = histogram_for("two classes", 2)
        >>> cells = count(spec, np.stack([1 - chances, chances], axis=1), labels)
        >>> decision = cheapest_threshold(ReleasedHistogram(spec, cells, 0.0), (1.0, 10.0))
        >>> recall, cost, constant = decision.at.recall.value, decision.cost.value, decision.constant_cost.value
        >>> round(recall, 3), round(cost, 3), round(constant, 3)
        (1.0, 0.04, 0.6)
    """
    if released.has_invalid or released.spec.kind != BINARY:
        return None
    cells, bins = scored_cells(released.view()), released.spec.bins
    # The cheapest one if probabilities are right; another one has to be cheaper by more than the noise.
    # Both mistakes cost the same at p = costs[0] / sum: costs[0] (1 - p) = costs[1] p.
    usual = min(max(1 + int(np.searchsorted(sigmoid(score_edges(bins)), costs[0] / sum(costs))), 1), bins - 1)

    def excess(cut: int) -> float:
        change = _mistakes(bins, cut, costs) - _mistakes(bins, usual, costs)
        return cells.total(change) + math.sqrt(cells.noise(change, change))

    cut = min(range(1, bins), key=excess)
    # All second, or all first.
    always = min((0, bins), key=lambda threshold: cells.total(_mistakes(bins, threshold, costs)))
    return Decision(threshold_at(cells, cut), _cost(cells, cut, costs), _cost(cells, always, costs))


def _mistakes(bins: int, cut: int, costs: Sequence[float]) -> Floats:
    """Weights of the cells that add up what mistakes cost, where bins from `cut` on are of the second class."""
    _, false_positives, false_negatives, _ = confusion_at(bins, cut)
    return costs[0] * false_positives + costs[1] * false_negatives


def _cost(cells: ScoredCells, cut: int, costs: Sequence[float]) -> Estimate | None:
    weights = _mistakes(len(cells.by_bin), cut, costs)
    return estimate_in(mean(cells, weights, np.ones_like(weights), has_units=True, minimum=0.0))
