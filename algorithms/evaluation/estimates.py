"""Metrics of a released histogram, with 95 % intervals.

They estimate metrics of the people that the held-out records are a sample of. Metrics of numbers are those of numbers
scaled to [-1, 1]. Where noise drowns a metric there is none: this is decided from released cells alone.
"""

import math
from collections.abc import Mapping
from functools import cache
from statistics import NormalDist

import numpy as np

from algorithms.evaluation.histogram import (
    BINARY,
    MAX_LOG_ODDS,
    MULTICLASS,
    SIDE_SHARE,
    Floats,
    error_nodes,
    loss_nodes,
    score_edges,
    score_nodes,
    target_centres,
    target_nodes,
)
from algorithms.evaluation.intervals import (
    MAX_NOISE,
    NOISE_DROWNS_IT,
    TOO_FEW,
    Estimate,
    NoisyCells,
    Outcome,
    area_under_curve,
    estimate_in,
    independent,
    mean,
    mean_of_sums,
    normal_cdf,
    proportion,
    share,
    shrunk,
    variance_explained,
)
from algorithms.evaluation.released_histogram import NoisyTables, ReleasedHistogram

MAX_TIES, MAX_OUTER_TIES = 0.3, 0.01
"""The AUC is not shown where more of the pairs of a positive and a negative are in one bin, which hides their order; in
one of the outer bins, which have no width to extrapolate, where more than the second are."""
_IN_FEW_BINS = "the model's scores lie in a few of the bins, which hide the order of too many pairs."
_INVALID = "the model's scores are not finite, or labels unknown, for more of the held-out records than noise explains."


def metrics_of(released: ReleasedHistogram) -> Mapping[str, Estimate | None]:
    """The metrics by name; None where noise drowns them, or a bias cannot be removed."""
    return {name: estimate_in(outcome) for name, outcome in outcomes_of(released).items()}


def reasons_of(released: ReleasedHistogram) -> Mapping[str, str]:
    """One sentence for every metric that is None."""
    return {name: outcome for name, outcome in outcomes_of(released).items() if isinstance(outcome, str)}


def sum_of_scores(released: ReleasedHistogram) -> float:
    """The noisy sum of a score from 0 to 1 of each person, by which models for the same people are ranked.

    Whether the class is right; for a number 1 less the squared error, in halves of the range and at most 1. A record
    that cannot be evaluated adds nothing. There is always one: noise that drowns every metric makes the ranking random.
    """
    spec, view = released.spec, released.view()
    if spec.kind == BINARY:
        tn, _, _, tp = confusion_at(spec.bins, spec.bins // 2)
        return scored_cells(view).total(tn + tp)
    if spec.kind == MULTICLASS:
        return float(view.tables["right"][1])
    if spec.kind == "number":
        return float(view.tables["error"] @ (1.0 - np.square(np.append(error_nodes(spec.bins), 1.0))))
    return float(view.tables["score"] @ score_nodes(spec.bins))


def outcomes_of(released: ReleasedHistogram) -> dict[str, Outcome]:
    """The metrics by name, or the reason why there is none."""
    outcomes = outcomes_of_view(released.view())
    if released.spec.compared:
        outcomes["difference"] = _difference_of_models(released)
    if released.has_invalid:
        return dict.fromkeys(outcomes, _INVALID)
    return outcomes


def outcomes_of_view(view: NoisyTables) -> dict[str, Outcome]:
    """The metrics of all records or of a group."""
    if view.spec.kind == BINARY:
        return _of_two_classes(scored_cells(view))
    if view.spec.kind == MULTICLASS:
        return _of_classes(view)
    if view.spec.kind == "number":
        return _of_numbers(view)
    cells, nodes = independent(view.tables["score"], view.noise_std, view.z), score_nodes(view.spec.bins)
    return {"score": mean(cells, nodes, np.ones_like(nodes), has_units=False, minimum=0.0)}


# Two classes


class ScoredCells(NoisyCells):
    """Cells of score bin x label, [bins x 2] flattened, by least squares from all resolutions.

    The resolutions are y = A x + noise with the same A for both labels, so x is estimated by (A'A)^-1 A'y, which is
    unbiased and of which no linear estimate has a smaller variance (Gauss-Markov).
    """

    bin_covariance: Floats
    counts: Floats

    def __init__(self, values: Floats, bin_covariance: Floats, counts: Floats, z: float) -> None:
        super().__init__(values.ravel(), np.kron(bin_covariance, np.eye(2)).astype(np.float64), z=z)
        object.__setattr__(self, "bin_covariance", bin_covariance)
        object.__setattr__(self, "counts", counts)

    @property
    def people(self) -> Floats:
        """The number of people in each cell, [k]."""
        return self.counts.ravel()

    @property
    def by_bin(self) -> Floats:
        """The cells of score bin x label, [bins, 2]."""
        return self.values.reshape(-1, 2)


def scored_cells(view: NoisyTables) -> ScoredCells:
    """The cells at the finest resolution."""
    solve, covariance = _least_squares(view.spec.resolutions)
    stacked = np.concatenate([view.tables[f"score x label, {size}"] for size in view.spec.resolutions])
    values = solve @ stacked
    return ScoredCells(
        values, view.noise_std**2 * covariance, _counts_from_0(values, view.spec.resolutions), view.z
    )


def _counts_from_0(values: Floats, resolutions: tuple[int, ...]) -> Floats:
    """Counts from 0 instead of unbiased ones, [bins, 2]: each resolution divides the counts of the coarser one.

    Empty bins have noise, often below 0, of which a variance would be made up. Here bins share what their coarser bin
    has, so that bins far from all people have next to nothing.
    """
    counts = np.zeros(0)
    for size in resolutions:
        finer = values.reshape(size, -1, 2).sum(axis=1)
        if not counts.size:
            counts = np.maximum(finer, 0.0)
            continue
        parts = np.maximum(finer, 1e-9).reshape(len(counts), -1, 2)
        counts = (parts / parts.sum(axis=1, keepdims=True) * counts[:, None, :]).reshape(finer.shape)
    return counts


@cache
def _least_squares(resolutions: tuple[int, ...]) -> tuple[Floats, Floats]:
    """(A'A)^-1 A' and (A'A)^-1, where A adds up bins of the last resolution to those of each."""
    bins = resolutions[-1]
    # [all bins, bins of the last resolution]
    sums = np.concatenate([np.kron(np.eye(size), np.ones((1, bins // size))) for size in resolutions])
    covariance: Floats = np.linalg.inv(sums.T @ sums)
    return covariance @ sums.T, covariance


def bin_centres(bins: int) -> Floats:
    """Log-odds in the middle of each bin, [bins], in asinh(2 z); of the outer ones where log-odds are cut off."""
    edges = np.arcsinh(2 * score_edges(bins))
    middles = np.sinh((edges[1:] + edges[:-1]) / 2) / 2
    return np.concatenate([[-MAX_LOG_ODDS], middles, [MAX_LOG_ODDS]])


def _of_two_classes(cells: ScoredCells) -> dict[str, Outcome]:
    bins = len(cells.by_bin)
    tn, fp, fn, tp = confusion_at(bins, bins // 2)
    positive = proportion(cells, tp + fn, tn + fp)
    return {
        "accuracy": proportion(cells, tp + tn, fp + fn),
        "majority_accuracy": _larger_part(positive, cells.z),
        "positive_share": positive,
        "auc": _auc(cells),
        "f1": macro_f1(cells, np.stack([tn, tp]), np.stack([2 * tn + fp + fn, 2 * tp + fp + fn])),
        "positive_f1": proportion(cells, tp, fp + fn, twice=True),
        "precision": proportion(cells, tp, fp),
        "recall": proportion(cells, tp, fn),
        "log_loss": _unless_hidden(
            cells, mean(cells, log_losses(bins), np.ones(2 * bins), has_units=True, minimum=0.0)
        ),
        "calibration_gap": _unless_hidden(cells, _calibration_gap(cells)),
    }


def confusion_at(bins: int, cut: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Weights of the cells, [bins x 2] each, that add up true negatives, false positives, false negatives and true
    positives, where bins from `cut` on are predicted positive."""
    above = np.arange(bins) >= cut
    return tuple(  # type: ignore[return-value]
        np.outer(side, label).ravel().astype(np.float64)
        for label in ([1.0, 0.0], [0.0, 1.0])
        for side in (~above, above)
    )


def _auc(cells: ScoredCells) -> Outcome:
    """AUC, extrapolated to bins of no width: ties in a bin count half, whose bias falls with the square of the width,
    so it is (4 A - A') / 3 for the AUC A' of pairs of bins."""
    fine, coarse = _auc_kernels(len(cells.by_bin))
    n, p = cells.by_bin.T
    outcome = area_under_curve(
        cells.by_bin, cells.counts, cells.bin_covariance, (4 * fine - coarse) / 3, cells.z
    )
    ties, pairs = p * n, float(n.sum() * p.sum())
    if isinstance(outcome, Estimate) and (
        ties.sum() > MAX_TIES * pairs or ties[0] + ties[-1] > MAX_OUTER_TIES * pairs
    ):
        return _IN_FEW_BINS
    return outcome


def pairs_in_one_bin(people: Floats, variance: float) -> float:
    """The share of pairs of people who are in the same bin.

    Args:
        people: [bins], noisy.
        variance: Of the noise of all bins together, which their squares hold, too, and which is subtracted.
    """
    return (float(people @ people) - variance) / max(float(people.sum()), 1.0) ** 2


def _unless_hidden(cells: ScoredCells, outcome: Outcome) -> Outcome:
    """A mean of probabilities, whose bias is removed for scores over many bins, but not for those within a few."""
    return _IN_FEW_BINS if isinstance(outcome, Estimate) and are_in_few_bins(cells) else outcome


def are_in_few_bins(cells: ScoredCells) -> bool:
    """Whether too many people share a bin for what their probabilities are on average."""
    people, variance = cells.by_bin.sum(axis=1), 2 * float(np.trace(cells.bin_covariance))
    return pairs_in_one_bin(people, variance) > MAX_TIES


@cache
def _auc_kernels(bins: int) -> tuple[Floats, Floats]:
    def order_kernel(size: int) -> Floats:
        # A positive above a negative counts 1, and one in the same bin 1/2.
        return np.tril(np.ones((size, size)), -1) + np.eye(size) / 2

    merge = np.kron(np.eye(bins // 2), np.ones((1, 2)))
    return order_kernel(bins), merge.T @ order_kernel(bins // 2) @ merge


def extrapolate(bins: int, of: Floats, of_pairs: Floats) -> Floats:
    """Values in the middle of bins and of pairs of bins, made into weights whose sum over people has no bias of second
    order in the width (Richardson); for the outer pairs, which have no width, those of the bins."""
    weights = (4 * of - np.repeat(of_pairs, 2, axis=0)) / 3
    weights[:2], weights[-2:] = of[:2], of[-2:]
    return weights


def log_losses(bins: int) -> Floats:
    """The weights of the cells, [bins x 2] flattened, for the log loss, with log-odds cut off at -8 and 8."""

    def losses(centres: Floats) -> Floats:
        return np.logaddexp(0.0, np.stack([centres, -centres], axis=1))

    return extrapolate(bins, losses(bin_centres(bins)), losses(pair_centres(bins))).ravel()


def pair_centres(bins: int) -> Floats:
    """Log-odds in the middle of pairs of bins, [bins / 2]; `extrapolate` ignores those of the outer pairs."""
    return score_edges(bins)[::2]


def _calibration_gap(cells: ScoredCells) -> Outcome:
    """The mean predicted probability less the share of positives."""
    bins = len(cells.by_bin)
    probability = extrapolate(bins, sigmoid(bin_centres(bins)), sigmoid(pair_centres(bins)))
    gaps = np.stack([probability, probability - 1], axis=1).ravel()
    return mean(cells, gaps, np.ones(2 * bins), has_units=False)


def sigmoid(log_odds: Floats) -> Floats:
    """1 / (1 + exp(-x)), which overflows for no log-odds."""
    return 0.5 + 0.5 * np.tanh(log_odds / 2)


def _larger_part(positive: Outcome, z: float) -> Outcome:
    """The accuracy of always predicting the more frequent class, which is at least a half."""
    if not isinstance(positive, Estimate):
        return positive
    # The larger of two noisy shares is too large: the square of the distance to a half has its variance subtracted.
    error = (positive.high - positive.low) / (2 * z)  # half of the interval, in standard deviations
    distance = max(0.0, (positive.value - 0.5) ** 2 - error**2)
    low = max(positive.low, 1 - positive.high, 0.5)
    high = max(positive.high, 1 - positive.low)
    return Estimate(min(max(0.5 + math.sqrt(distance), low), high), low, high)


# Classes


def _of_classes(view: NoisyTables) -> dict[str, Outcome]:
    wrong_right = independent(view.tables["right"], view.noise_std, view.z)
    losses = independent(view.tables["log loss"], view.noise_std, view.z)
    nodes = loss_nodes(view.spec.bins)
    return {
        "accuracy": proportion(wrong_right, np.array([0.0, 1.0]), np.array([1.0, 0.0])),
        "majority_accuracy": _majority(view),
        "f1": _f1_of_classes(view),
        "log_loss": mean(losses, np.square(nodes), np.ones_like(nodes), has_units=True, minimum=0.0),
    }


def class_cells(view: NoisyTables) -> tuple[NoisyCells, Floats, Floats, Floats]:
    """Cells, and the weights [classes, cells] that add up each class's right records, its records, and the records that
    are predicted to be of it."""
    classes = view.spec.outputs
    identity = np.eye(classes)
    if "predicted x label" in view.tables:
        right = np.stack([np.outer(row, row).ravel() for row in identity])
        return (
            independent(view.tables["predicted x label"], view.noise_std, view.z),
            right,
            np.tile(identity, classes),
            np.repeat(identity, classes, axis=1),
        )
    parts = [view.tables["label x right"].ravel(), view.tables["predicted"]]
    none = np.zeros((classes, classes))
    return (
        independent(np.concatenate(parts), view.noise_std, view.z),
        np.hstack([np.kron(identity, [0.0, 1.0]), none]),
        np.hstack([np.kron(identity, [1.0, 1.0]), none]),
        np.hstack([np.zeros((classes, 2 * classes)), identity]),
    )


def _f1_of_classes(view: NoisyTables) -> Outcome:
    cells, right, of_class, predicted = class_cells(view)
    is_joint = "predicted x label" in view.tables
    return macro_f1(cells, right, of_class + predicted, None if is_joint else (of_class, predicted))


def macro_f1(
    cells: NoisyCells, right: Floats, named: Floats, apart: tuple[Floats, Floats] | None = None
) -> Outcome:
    """The mean over classes of F_k = 2 T_k / Q_k, by the delta method.

    The curvature's bias, -2 cov(T, Q) / Q^2 + 2 T var(Q) / Q^3, of noise and sample, is subtracted. A right record adds
    1 to T and 2 to Q of its class, a wrong one 1 to Q of two classes. The sampling variance at a t is that at the
    estimate in proportion to t (1 - t) (2 - t).

    Args:
        cells: [k].
        right: [classes, k], weights that add up T_k, the right records of a class.
        named: [classes, k], those that add up Q_k, its records and those that are predicted to be of it.
        apart: both parts of Q_k, [classes, k] each, where a record enters one cell for its label and another one for
            its prediction; which predictions wrong records of a class have is then taken for independent of the class.
    """
    hits, totals = right @ cells.values, named @ cells.values
    joint, squares = (np.einsum("ij,ij->i", rows @ cells.covariance, named) for rows in (right, named))
    # What is decided by noisy sizes themselves would show the classes that noise has made larger.
    sizes = shrunk(totals, squares)
    if (sizes <= 4.0 * np.sqrt(squares)).any() or (totals <= np.sqrt(squares)).any():
        return TOO_FEW
    expected = ((2 / sizes)[:, None] * right - (2 * hits / sizes**2)[:, None] * named).mean(axis=0)
    if math.sqrt(cells.noise(expected, expected)) > MAX_NOISE:
        return NOISE_DROWNS_IT
    of_hit, of_named = 2 / totals / len(hits), -2 * hits / totals**2 / len(hits)
    gradient = of_hit @ right + of_named @ named
    bias = np.mean(-2 * (joint + 2 * hits) / totals**2 + 2 * hits * (squares + totals + 2 * hits) / totals**3)
    if apart is None:
        by_sample = float(cells.people @ np.square(gradient))
    else:
        by_label, by_prediction = (rows @ cells.values - hits for rows in apart)
        crossed = (by_label @ of_named) * (by_prediction @ of_named) / max(float(by_label.sum()), 1.0)
        wrong = (by_label + by_prediction) @ np.square(of_named) + 2 * crossed
        by_sample = float(hits @ np.square(of_hit + 2 * of_named) + wrong)
    value, by_noise = float(np.mean(2 * hits / totals) - bias), cells.noise(gradient, gradient)
    # Of one class it is t (1 - t) (2 - t) / Q, near 1 twice that on average, as a wrong record is in two classes' Q.
    # Where noise hides how far from 1 the metric is, so it hides the sampling variance: that is then the usual one.
    usual, unclear = 2 * float(np.mean(1 / totals)) / len(hits), 2 * math.sqrt(by_noise)
    inside = min(max(value, 0.0), 1.0)
    rate = (max(by_sample, 0.0) + unclear * usual) / max(_spread_of_f1(inside) + unclear, 1e-12)
    return share(value, lambda t: by_noise + rate * _spread_of_f1(t), cells.z)


def _spread_of_f1(t: float) -> float:
    return t * (1 - t) * (2 - t)


def _majority(view: NoisyTables) -> Outcome:
    """The accuracy of always predicting the most frequent class.

    The largest of many noisy counts is too large, so it is that of shrunk ones. The lower end holds for all classes
    that can be the most frequent one (Bonferroni), so the interval is wider than needed where several are. The number
    of people is that of the table with the fewest cells, and so the least noise.
    """
    label_cells, _, of_class, _ = class_cells(view)
    classes, right = len(of_class), view.tables["right"]
    cells = independent(np.concatenate([label_cells.values, right]), view.noise_std, view.z)
    everyone = np.concatenate([np.zeros(of_class.shape[1]), np.ones(right.size)])
    hits = np.hstack([of_class, np.zeros((classes, right.size))])
    if not cells.is_clear(everyone):
        return TOO_FEW
    counts, total = of_class @ label_cells.values, cells.total(everyone)
    noise, total_noise = cells.noise(hits[0], hits[0]), cells.noise(everyone, everyone)
    if math.sqrt(noise) > 0.05 * total:
        return NOISE_DROWNS_IT
    shares = np.clip(counts / total, 0.0, 1.0)
    # Of a count less its share of the total: the noise of both, and that these people are a sample.
    variances = noise + total_noise * shares**2 + total * shares * (1 - shares)
    deviations = np.sqrt(variances)
    quantile, beyond = NormalDist().inv_cdf, normal_cdf(-cells.z)
    # So wide that the intervals of all classes hold at once: no class below a contender can be the most frequent one.
    every = -quantile(beyond / classes) * deviations
    contenders = int(np.sum(counts + every >= (counts - every).max()))
    first = hits[int(np.argmax(counts))]
    if contenders == 1:
        return proportion(cells, first, everyone - first)
    surely = float((counts + quantile(2 * beyond / contenders) * deviations).max())
    low = min(max(total / classes, surely), total)
    high = min(max(low, float((counts + cells.z * deviations).max())), total)
    largest = min(max(float(shrunk(counts, variances).max()), low), high)
    return Estimate(*(float(end / total) for end in (largest, low, high)))


# Numbers


def _of_numbers(view: NoisyTables) -> dict[str, Outcome]:
    """Errors above 1, half of the range, count as 1."""
    nodes = np.append(error_nodes(view.spec.bins), 1.0)
    errors = independent(view.tables["error"], view.noise_std, view.z)
    # Sums over nodes are exact for squares of the error, but not for squares of those: these are from the joint bins.
    fourth = float(view.tables["error x target"].sum(axis=1) @ nodes**4)
    ones = np.ones_like(nodes)
    squared = mean(errors, np.square(nodes), ones, has_units=True, minimum=0.0, squares=fourth)
    explained, spread = variance_explained(
        errors.values,
        independent(view.tables["target"], view.noise_std).values,
        view.tables["error x target"],
        np.square(nodes),
        target_nodes(),
        target_centres(),
        view.noise_std,
        view.z,
    )
    return {
        "r2": explained,
        "rmse": squared.map(math.sqrt) if isinstance(squared, Estimate) else squared,
        "mae": mean(errors, nodes, ones, has_units=True, minimum=0.0),
        "mean_rmse": spread.map(math.sqrt) if isinstance(spread, Estimate) else spread,
    }


# The difference of two models


def _difference_of_models(released: ReleasedHistogram) -> Outcome:
    """The mean score of the model less that of the model it is compared with, on the same people.

    A score is from 0 to 1, such as whether a class is right. Of equal models 2.5 % of intervals start above 0.
    """
    spec = released.spec
    differences, people, squares = spec.comparison_cells(released.values)
    # Undoes the scaling of `histogram.difference_cells`.
    scale = math.sqrt(1 + 2 * SIDE_SHARE**2) / spec.comparison_norm
    side = scale / SIDE_SHARE
    return mean_of_sums(
        float(differences) * scale,
        float(people) * side,
        float(squares) * side,
        released.noise_std * scale,
        released.noise_std * side,
    )
