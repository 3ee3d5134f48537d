"""What errors the metrics will have, before anything is spent: from the public spec, a number of people and the noise.

They are those of made-up people, the same for every data set, and of a fair model: of two classes 30 % are positive and
the AUC is .86, a class is right in 70 % of the cases, a number's R2 is .65, two models differ on 20 % of the people.
Real metrics may have other errors.
"""

from collections.abc import Mapping

import numpy as np

from algorithms.evaluation.counts import count
from algorithms.evaluation.estimates import metrics_of
from algorithms.evaluation.groups import groups_of
from algorithms.evaluation.histogram import BINARY, MULTICLASS, Floats, HistogramSpec, Integers
from algorithms.evaluation.intervals import Estimate
from algorithms.evaluation.released_histogram import ReleasedHistogram

_PEOPLE = 2000


def expected_errors(spec: HistogramSpec, at_most: int, noise_std: float) -> Mapping[str, float | None]:
    """Standard errors by noise and sampling that a planned release will have, from public values alone.

    Args:
        spec: Of the histogram.
        at_most: Held-out people, an upper bound.
        noise_std: Of each cell.

    Returns:
        By metric, None where noise will drown it.

    Example:
        >>> from algorithms.evaluation import histogram_for
        >>> spec = histogram_for("two classes", 2)
        >>> few, many = (expected_errors(spec, people, 3.7 * spec.sensitivity) for people in (100, 5000))
        >>> few["auc"] is None, many["auc"] < 0.02
        (True, True)
    """
    return _errors(metrics_of(_expected_histogram(spec, at_most, noise_std)))


def expected_group_errors(
    spec: HistogramSpec, at_most: int, noise_std: float
) -> Mapping[str, Mapping[str, float | None]]:
    """The same for one group, where all groups have equally many people; by column, and for all columns crossed.

    Args:
        spec, at_most, noise_std: As for `expected_errors`.
    """
    groups = groups_of(_expected_histogram(spec, at_most, noise_std))
    return {column: _errors(of_column[0].metrics) for column, of_column in groups.items()}


def _expected_histogram(spec: HistogramSpec, at_most: int, noise_std: float) -> ReleasedHistogram:
    """Cells without noise that are said to have it."""
    halves = np.arange(_PEOPLE) % 2 if spec.halves else None
    differences = np.tile([1.0, -1.0, *[0.0] * 8], _PEOPLE // 10) if spec.compared else None
    cells = count(spec, *_made_up(spec), halves=halves, differences=differences) * at_most / _PEOPLE
    return ReleasedHistogram(spec, cells, noise_std)


def _errors(metrics: Mapping[str, Estimate | None]) -> Mapping[str, float | None]:
    return {name: None if metric is None else metric.standard_error for name, metric in metrics.items()}


def _made_up(spec: HistogramSpec) -> tuple[Floats, Floats, Integers]:
    """Scores, labels and groups of people."""
    draw = np.random.default_rng(1)
    groups = np.stack(
        [draw.integers(0, len(values), _PEOPLE) for _, values in spec.groups]
        or [np.zeros(_PEOPLE, np.int64)],
        axis=1,
    )[:, : len(spec.groups)]
    if spec.kind == BINARY:
        labels = (draw.random(_PEOPLE) < 0.3).astype(np.float64)
        odds = draw.normal(-1.0 + 2.3 * (labels - 0.3), 1.5)  # an AUC of Phi(2.3 / (1.5 sqrt(2))) = .86
        return np.stack([1 / (1 + np.exp(odds)), 1 / (1 + np.exp(-odds))], axis=1), labels, groups
    if spec.kind == MULTICLASS:
        label = draw.integers(0, spec.outputs, _PEOPLE)
        predicted = np.where(draw.random(_PEOPLE) < 0.7, label, draw.integers(0, spec.outputs, _PEOPLE))
        confidence = draw.uniform(0.5, 1.0, (_PEOPLE, 1))
        scores = np.repeat((1 - confidence) / max(1, spec.outputs - 1), spec.outputs, axis=1)
        np.put_along_axis(scores, predicted[:, None], confidence, axis=1)
        return scores, label.astype(np.float64), groups
    if spec.kind == "number":
        target = draw.uniform(-0.6, 0.6, _PEOPLE)
        # Variances .042 of the error and .12 of the target: an R2 of .65.
        return (target + draw.normal(0.0, 0.205, _PEOPLE))[:, None], target, groups
    return draw.beta(6.0, 2.0, (_PEOPLE, 1)), np.zeros(_PEOPLE), groups
