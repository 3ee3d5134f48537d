"""What held-out records add to the cells of a histogram, before its noise: each at most the sensitivity of the spec.

Sums of these are private. Only noisy ones leave, see `released_histogram`.
"""

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from algorithms.evaluation.histogram import (
    BINARY,
    MAX_BRIER_GAIN,
    MAX_CONFUSION,
    MAX_LOSS,
    MULTICLASS,
    SIDE_SHARE,
    TARGET_BINS,
    TEMPERATURE_NORM,
    TEMPERATURES,
    Floats,
    HistogramSpec,
    Integers,
    confidence_edges,
    error_nodes,
    loss_nodes,
    score_edges,
    score_nodes,
    target_nodes,
)


def spread(values: Floats, nodes: Floats) -> Floats:
    """Each value's weights at the nodes, [n, nodes]: the quadratic Lagrange weights at three nodes.

    These are the node below the value and the two above it, so for nodes whose distances do not shrink a row's norm is
    at most 1, and it is divided by its norm where rounding makes it more. Sums over records of 1, of the value and of
    its square are sums over nodes of 1, of the node and of its square, exactly.
    """
    # The node below, or the third last: three are needed.
    first = np.clip(np.searchsorted(nodes, values, side="right") - 1, 0, len(nodes) - 3)
    a, b, c = (nodes[first + step] for step in range(3))
    weights = np.zeros((len(values), len(nodes)))
    rows = np.arange(len(values))
    weights[rows, first] = (values - b) * (values - c) / ((a - b) * (a - c))
    weights[rows, first + 1] = (values - a) * (values - c) / ((b - a) * (b - c))
    weights[rows, first + 2] = (values - a) * (values - b) / ((c - a) * (c - b))
    weights /= np.maximum(np.linalg.norm(weights, axis=1, keepdims=True), 1.0)
    return weights


def count(
    spec: HistogramSpec,
    scores: Floats,
    labels: NDArray[np.generic],
    group_indices: Integers | None = None,
    weights: Floats | None = None,
    halves: Integers | None = None,
    differences: Floats | None = None,
) -> Floats:
    """The cells' sums over records, [cells]. They are private: only noisy ones may leave.

    Args:
        spec: the histogram.
        scores: [n, outputs], probabilities of classes, a number in [-1, 1], or a bounded score in [0, 1].
        labels: [n], class indices, or the number in [-1, 1]; not read for bounded scores.
        group_indices: [n, len(spec.groups)], the index of the record's value in each column, anything outside the
            declared ones if it is none of them.
        weights: [n], 1 / k for each of a person's k records; 1 each if None. Outside of [0, 1] they are clipped.
        halves: [n], 0 or 1, the same for all records of a person, by a keyed hash; needed where the spec has halves.
        differences: [n], each record's score from 0 to 1 less that of the other model; needed where the spec compares.

    Records with scores that are not finite or labels outside of the classes are counted in the last cell alone, and
    records in none of a column's declared groups in no table of that column.

    Raises ValueError where the indices of groups, or the halves, are needed and missing.
    """
    scores = np.asarray(scores, np.float64).reshape(len(labels), -1)
    weights = np.ones(len(labels)) if weights is None else np.clip(np.nan_to_num(weights), 0.0, 1.0)
    members = np.zeros((len(labels), 0), np.int64) if group_indices is None else np.asarray(group_indices)
    if members.shape[1] < len(spec.groups):
        raise ValueError("this histogram has groups, so the index of every column's value is needed.")
    cells = np.zeros(spec.cells)
    valid = _countable(spec, scores, labels, differences)
    cells[-1] = weights[~valid].sum()
    scores, labels, weights, members = scores[valid], labels[valid], weights[valid], members[valid]
    groups = {"": np.zeros(len(labels), np.int64), **_group_of(spec, members)}
    contributions = _contributions(spec, scores, labels)
    for part, group in groups.items():
        for name, table in spec.tables_of(part, cells).items():
            size = table[0].size
            for index, share in contributions[name]:
                inside = group >= 0
                at = (group * size + index)[inside]  # by group, then by cell
                table += np.bincount(at, (share * weights)[inside], table.size).reshape(table.shape)
    if spec.halves:
        if halves is None:
            raise ValueError("this histogram has halves of the people, so `halves` is needed.")
        half = np.asarray(halves)[valid] % 2
        if spec.kind == BINARY:
            index, _ = contributions[f"score x label, {spec.resolutions[-2]}"][0]
            spec.half_cells(cells)[...] = _label_halves(spec, index, half, weights)
        else:
            each = temperature_cells(scores, labels) * weights[:, None]
            spec.half_cells(cells)[...] = [each[half == which].sum(axis=0) for which in (0, 1)]
    if differences is not None:
        sums = weights @ difference_cells(np.clip(differences[valid], -1.0, 1.0))
        spec.comparison_cells(cells)[...] = spec.comparison_norm * sums
    return cells


def _countable(
    spec: HistogramSpec, scores: Floats, labels: NDArray[np.generic], differences: Floats | None
) -> NDArray[np.bool_]:
    """Whether a record's scores are finite, [n], and its label and difference are ones that the histogram has."""
    valid = np.asarray(np.isfinite(scores).all(axis=1))
    if spec.compared:
        if differences is None:
            raise ValueError("this histogram compares two models, so `differences` is needed.")
        valid &= np.isfinite(differences)
    if spec.kind == "number":
        valid &= np.isfinite(np.asarray(labels, np.float64))
    elif spec.kind in (BINARY, MULTICLASS):
        valid &= (np.asarray(labels) >= 0) & (np.asarray(labels) < spec.outputs)
    return valid


def _label_halves(spec: HistogramSpec, index: Integers, half: Integers, weights: Floats) -> Floats:
    """Sums of weights by half of the people, score and label, of the spec's shape; index: of score and label, [n]."""
    size = math.prod(spec.half_shape)
    sums = np.bincount(half * size // 2 + index, weights, size)  # half, then score, then label
    return np.asarray(sums, np.float64).reshape(spec.half_shape)


def _group_of(spec: HistogramSpec, members: Integers) -> dict[str, Integers]:
    """The record's group in each grouping, -1 where it is in none."""
    sizes = [len(values) for _, values in spec.groups]
    indices = [
        np.where((members[:, at] >= 0) & (members[:, at] < size), members[:, at], -1)
        for at, size in enumerate(sizes)
    ]
    if not spec.cross or not spec.groups:
        return dict(zip(spec.parts, indices, strict=True))
    crossed = np.zeros(len(members), np.int64)
    for index, size in zip(indices, sizes, strict=True):
        crossed = np.where((crossed < 0) | (index < 0), -1, crossed * size + index)
    return dict.fromkeys(spec.parts, crossed)


def difference_cells(differences: Floats) -> Floats:
    """What a difference d in [-1, 1] adds, [n, 3]: d, 1/4 and d^2/4, by a factor that makes the norm at most 1.

    The sum of differences decides, so it has nearly all of the norm; the others tell how many people there are and
    how much they differ.
    """
    small = np.full(len(differences), SIDE_SHARE)
    cells = np.stack([differences, small, SIDE_SHARE * np.square(differences)], axis=1)
    return cells / math.sqrt(1 + 2 * SIDE_SHARE**2)


def temperature_cells(scores: Floats, labels: NDArray[np.generic]) -> Floats:
    """What a record adds to its half's table, [n, 1 + 2 temperatures], of norm at most 1.

    A share of 1, what each temperature gains in the Brier score over `MAX_BRIER_GAIN`, and shares of the squares.

    Args:
        scores: [n, classes], probabilities; only their order and ratios count.
        labels: [n], class indices.
    """
    logs = np.log(np.clip(scores, 1e-300, None))
    before = _brier_scores(logs, labels)
    gains = np.stack([before - _brier_scores(logs / each, labels) for each in TEMPERATURES], axis=1)
    gains = np.clip(gains / MAX_BRIER_GAIN, -1.0, 1.0)
    small = np.full((len(scores), 1), SIDE_SHARE)
    return np.concatenate([small, gains, SIDE_SHARE * np.square(gains)], axis=1) / TEMPERATURE_NORM


def _brier_scores(logs: Floats, labels: NDArray[np.generic]) -> Floats:
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(shares)), np.asarray(labels, np.int64)] -= 1.0
    scores: Floats = np.square(shares).sum(axis=1)
    return scores


_Parts: TypeAlias = list[tuple[Integers, Floats]]


def _contributions(spec: HistogramSpec, scores: Floats, labels: NDArray[np.generic]) -> dict[str, _Parts]:
    """For each table the cells that each record adds to, and how much: pairs of [n] and [n]."""
    ones = np.ones(len(scores))
    if spec.kind == "score":
        return {"score": _at_nodes(spread(np.clip(scores[:, 0], 0.0, 1.0), score_nodes(spec.bins)))}
    if spec.kind == "number":
        target = np.clip(np.asarray(labels, np.float64), -1.0, 1.0)
        error = np.abs(np.clip(scores[:, 0], -1.0, 1.0) - target)
        # Errors above 1 count as 1, in a cell of their own, so that they are seen.
        near = np.column_stack([spread(np.minimum(error, 1.0), error_nodes(spec.bins)), np.zeros(len(error))])
        errors = np.where((error > 1.0)[:, None], np.eye(spec.bins + 1)[-1], near)
        targets = spread(target, target_nodes())
        nearest = np.where(
            error > 1.0, spec.bins, _bin(error, np.convolve(error_nodes(spec.bins), [0.5, 0.5], "valid"))
        )
        interval = np.minimum((target + 1) * TARGET_BINS / 2, TARGET_BINS - 1).astype(np.int64)
        return {
            "error": _at_nodes(errors),
            "target": _at_nodes(targets),
            "error x target": [(nearest * TARGET_BINS + interval, ones)],
        }
    classes: Integers = np.asarray(labels, np.int64)
    if spec.kind == BINARY:
        odds = log_odds(scores)
        # Even odds are the first class, as by argmax.
        fine = np.searchsorted(score_edges(spec.bins), odds, side="left")
        return {
            # Coarser bins are whole numbers of the finest.
            f"score x label, {size}": [(fine // (spec.bins // size) * 2 + classes, ones)]
            for size in spec.resolutions
        }
    predicted: Integers = scores.argmax(axis=1)
    right = (predicted == classes).astype(np.int64)
    confidence = _bin(scores.max(axis=1), confidence_edges(spec.bins))
    loss = -np.log(np.clip(scores[np.arange(len(scores)), classes], math.exp(-MAX_LOSS), 1.0))
    tables: dict[str, _Parts] = {
        "right": [(right, ones)],
        "confidence x right": [(confidence * 2 + right, ones)],
        "log loss": _at_nodes(spread(np.sqrt(loss), loss_nodes(spec.bins))),
    }
    if spec.outputs <= MAX_CONFUSION:
        return tables | {"predicted x label": [(predicted * spec.outputs + classes, ones)]}
    return tables | {"label x right": [(classes * 2 + right, ones)], "predicted": [(predicted, ones)]}


def log_odds(scores: Floats) -> Floats:
    """Log-odds of the second class, [n], from probabilities [n, 2]."""
    logs = np.log(np.maximum(scores, 1e-300))
    return logs[:, 1] - logs[:, 0]


def _bin(values: Floats, edges: Floats) -> Integers:
    return np.searchsorted(edges, values, side="right").astype(np.int64)


def _at_nodes(weights: Floats) -> _Parts:
    return [(np.full(len(weights), at, np.int64), weights[:, at]) for at in range(weights.shape[1])]
