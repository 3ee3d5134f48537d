"""The histogram that is released of held-out records: its cells, each record's part in them, and its sensitivity.

A record enters several tables: its scores at more than one resolution, its predicted class and label, and those tables
again for its groups. In each table it adds a vector of norm at most 1, so its part in all of them has L2 norm at most
the square root of their number, which is `HistogramSpec.sensitivity`. Coarse tables cost the fine ones a little, and
give sums over many cells with far less noise than adding up fine cells would (Hay et al. 2010, arXiv:0904.0942).

Bins, nodes and tables follow from the public `HistogramSpec` alone, never from records.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

BINARY: Final = "two classes"
MULTICLASS: Final = "classes"
"""As plans and cards have named these kinds from the first."""
HistogramKind: TypeAlias = Literal["two classes", "classes", "number", "score"]
Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Groups: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]

_BINS: dict[HistogramKind, int] = {BINARY: 64, MULTICLASS: 16, "number": 12, "score": 3}
_TARGET_NODES, _TARGET_BINS = 8, 16
_MAX_CONFUSION = 32
"""Up to so many classes the table of predicted class and label is released as a whole."""
SIDE_SHARE = 0.25
"""Of the norm of a difference of scores, what counts the people."""
_SUMS = 3
"""The cells of a comparison: differences, people, squared differences."""
_MAX_CELLS = 2**20
TEMPERATURES = (0.35, 0.5, 0.7, 1.4, 2.0, 2.8)
"""By which more than two classes' log-probabilities may be divided."""
MAX_BRIER_GAIN = 1.5
"""Bound on how much a temperature changes a record's Brier score, sum_j (p_j - [j is the label])^2.

It leaves the order of the classes. Where the label comes first, the score is at most (1 - p)^2 + p (1 - p) = 1 - p for
its probability p, so it stays in [0, 1]. Where another class does, with probability q >= p, the score is at most 2,
and at least 1 - 2 p + p^2 + q^2 >= 1 - 2 q + 2 q^2 >= 1/2, as this falls in p up to q.
"""
TEMPERATURE_NORM = math.sqrt(SIDE_SHARE**2 + len(TEMPERATURES) * (1 + SIDE_SHARE**2))
"""Bound on the L2 norm of the number of people, the gain at each temperature, and its square, as they are weighed."""
MAX_LOG_ODDS, MAX_LOSS = 8.0, 9.0
"""Where log-odds of two classes, and the log loss of more, are cut off."""


@dataclass(frozen=True)
class HistogramSpec:
    """What is released of held-out records; all of it is public.

    Attributes:
        kind: what the model predicts.
        outputs: classes; 1 for a number and for a bounded score.
        bins: bins of the score or of the confidence, nodes of the error or of the bounded score.
        groups: columns and their declared values, by which metrics are also given.
        cross: whether groups are the combinations of all columns' values rather than the values of each column.
        halves: whether scores of two classes, or of more what temperatures gain, are also counted in two halves of the
            people, so that a recalibration is judged on people to whom it was not fitted.
        compared: whether the difference to another model's scores is released, too.

    Example:
        >>> spec = histogram_for("two classes", 2, (("sex", ("f", "m")),))
        >>> spec.sensitivity == math.sqrt(10)  # five resolutions, of all records and of a record's sex
        True
        >>> HistogramSpec.from_json(spec.to_json()) == spec
        True
    """

    kind: HistogramKind
    outputs: int
    bins: int
    groups: Groups = ()
    cross: bool = False
    halves: bool = False
    compared: bool = False

    @property
    def cells(self) -> int:
        """Length of the released vector; its last cell counts records that cannot be evaluated."""
        tables = self._block * sum(map(len, self.all_parts.values()))
        return tables + math.prod(self.half_shape) + _SUMS * self.compared + 1

    @property
    def sensitivity(self) -> float:
        """Bound on the L2 norm of one person's part: each of its tables gets a vector of norm at most 1.

        A record enters one table of every name in all records, and one of every name in each of its groups. A person
        with several records enters their weighted sum, whose norm is at most the weights' sum, 1, times that of one.
        A comparison has as large a norm as all tables together, so that its noise is sqrt(2) times that of a release of
        its own, however many tables there are.
        """
        return math.hypot(math.sqrt(self._tables_per_record), self.comparison_norm)

    @property
    def comparison_norm(self) -> float:
        """Bound on the L2 norm of what a record adds to the sums of a comparison; 0 without one."""
        return math.sqrt(self._tables_per_record) if self.compared else 0.0

    @property
    def l1_sensitivity(self) -> float:
        """The same in the L1 norm, for Laplace noise: for weights at three nodes at most 5/4 a table, for counts 1.

        Quadratic Lagrange weights add up to 1, and the only negative one is at least -1/8 where the distances between
        nodes do not shrink. The three sums of a comparison of L2 norm 1 have the L1 norm
        (1 + 1/4 + 1/4) / sqrt(1 + 2/16), which is sqrt(2).
        """
        of_table, of_half = 1.0, 1.0
        if self.kind != BINARY:
            of_table = 1.25
            of_half = (SIDE_SHARE + len(TEMPERATURES) * (1 + SIDE_SHARE)) / TEMPERATURE_NORM
        tables = of_table * (self._tables_per_record - self.halves) + of_half * self.halves
        return tables + math.sqrt(2.0) * self.comparison_norm

    @property
    def _tables_per_record(self) -> int:
        """How many tables a record enters."""
        return len(self.shapes) * len(self.all_parts) + self.halves

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tables of this kind, by name."""
        if self.kind == BINARY:
            return {f"score x label, {size}": (size, 2) for size in self.resolutions}
        if self.kind == "number":
            return {
                "error": (self.bins + 1,),
                "target": (_TARGET_NODES,),
                "error x target": (self.bins + 1, _TARGET_BINS),
            }
        if self.kind == "score":
            return {"score": (self.bins,)}
        classes = self.outputs
        confusion: dict[str, tuple[int, ...]] = (
            {"predicted x label": (classes, classes)}
            if classes <= _MAX_CONFUSION
            else {"label x right": (classes, 2), "predicted": (classes,)}
        )
        return {
            "right": (2,),
            "confidence x right": (self.bins, 2),
            "log loss": (self.bins,),
            **confusion,
        }

    @property
    def resolutions(self) -> tuple[int, ...]:
        """Numbers of score bins in the tables of two classes."""
        return (2, 4, 8, 16, self.bins)

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """The groupings by name with their groups' names: one by columns, or a single crossed one."""
        if not self.cross or not self.groups:
            return dict(self.groups)
        names: list[str] = [""]
        for _, values in self.groups:
            names = [f"{name} / {value}" if name else value for name in names for value in values]
        return {" x ".join(column for column, _ in self.groups): tuple(names)}

    @property
    def all_parts(self) -> dict[str, tuple[str, ...]]:
        """All records, whose name is "", and the parts."""
        return {"": ("",), **self.parts}

    @property
    def half_shape(self) -> tuple[int, ...]:
        """The table of half x score x label; of more than two classes, half x what temperatures gain."""
        if not self.halves:
            return (0,)
        return (2, self.resolutions[-2], 2) if self.kind == BINARY else (2, 1 + 2 * len(TEMPERATURES))

    @property
    def _block(self) -> int:
        """Cells of all tables of one group."""
        return sum(map(math.prod, self.shapes.values()))

    def tables_of(self, part: str, values: Floats) -> dict[str, Floats]:
        """The tables by name, [groups, ...], as views of the released vector.

        The vector holds all records' tables, then those of each group of each part, the table of halves, the sums of a
        comparison, and the cell of records that cannot be evaluated.
        """
        names = list(self.all_parts)
        before = sum(len(self.all_parts[name]) for name in names[: names.index(part)])
        groups, block = len(self.all_parts[part]), self._block
        cells = values[before * block : (before + groups) * block].reshape(groups, block)
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])[:-1]
        tables = np.split(cells, ends, axis=1)
        return {
            name: table.reshape(groups, *shape)
            for (name, shape), table in zip(self.shapes.items(), tables, strict=True)
        }

    def half_cells(self, values: Floats) -> Floats:
        """The table of halves as a view of the released vector, [half, bins, 2], or [half, gains and squares]."""
        end = len(values) - 1 - _SUMS * self.compared
        return values[end - math.prod(self.half_shape) : end].reshape(self.half_shape)

    def comparison_cells(self, values: Floats) -> Floats:
        """The sums of a comparison as a view of the released vector, [3], or [0] without one."""
        return values[len(values) - 1 - _SUMS * self.compared : -1]

    def to_json(self) -> str:
        document = asdict(self)
        if not self.compared:  # part of a plan, whose digest is the run's identity
            del document["compared"]
        return json.dumps(document, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "HistogramSpec":
        """Raises ValueError for a text that `to_json` did not write."""
        try:
            fields = json.loads(text)
            groups = tuple((column, tuple(values)) for column, values in fields.pop("groups"))
            spec = cls(**fields, groups=groups)
            expected = histogram_for(
                spec.kind, spec.outputs, groups, spec.cross, halves=spec.halves, compared=spec.compared
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError("this is not the description of a histogram of held-out records.") from error
        if spec != expected:
            raise ValueError("this histogram of held-out records is not one that the rule for bins gives.")
        return spec


def histogram_for(
    kind: HistogramKind,
    outputs: int,
    groups: Groups = (),
    cross: bool = False,
    *,
    halves: bool = False,
    compared: bool = False,
) -> HistogramSpec:
    """The histogram for this kind of target, by a rule that depends on nothing else.

    Args:
        kind: what the model predicts.
        outputs: classes; 1 for a number and for a bounded score.
        groups: columns with the values that are declared for them.
        cross: whether groups are combinations of all columns' values, not those of each column.
        halves: whether there is a table for each half of the people, by which probabilities are recalibrated.
        compared: whether there are cells for the difference to another model's scores.

    Raises:
        ValueError: if the kind, the outputs and the groups do not fit together, or there are too many cells.

    Example:
        >>> spec = histogram_for("two classes", 2)
        >>> spec.shapes["score x label, 64"]
        (64, 2)
    """
    if kind not in get_args(HistogramKind):
        raise ValueError(f"the kind of a histogram is {', '.join(get_args(HistogramKind))}; got {kind!r}.")
    if not (outputs == 2 if kind == BINARY else outputs >= 2 if kind == MULTICLASS else outputs == 1):
        raise ValueError(f"a histogram of {kind} cannot have {outputs} outputs.")
    columns = [column for column, _ in groups]
    if len(set(columns)) < len(columns) or any(
        not values or len(set(values)) < len(values) for _, values in groups
    ):
        raise ValueError(
            "each column of groups is named once and has values, of which each is declared once."
        )
    sizes = [len(values) for _, values in groups]
    if (math.prod(sizes) if cross else sum(sizes)) > _MAX_CELLS:
        raise ValueError(
            f"there are more than {_MAX_CELLS:,} groups; name fewer columns, or do not cross them."
        )
    for names in HistogramSpec(kind, outputs, _BINS[kind], groups, cross).parts.values():
        if len(set(names)) < len(names):
            twice = Counter(names).most_common(1)[0][0]
            raise ValueError(
                f"two groups would be named {twice}; spell their values otherwise, or do not cross them."
            )
    if halves and kind not in (BINARY, MULTICLASS):
        raise ValueError(
            f"only probabilities of classes can be recalibrated, so a histogram of a {kind} has no halves."
        )
    spec = HistogramSpec(kind, outputs, _BINS[kind], groups, cross, halves, compared)
    if spec.cells > _MAX_CELLS:
        raise ValueError(
            f"the histogram would have {spec.cells:,} cells, at most {_MAX_CELLS:,} are allowed; name fewer columns of"
            " groups, or do not cross them."
        )
    return spec


def score_edges(bins: int) -> Floats:
    """Inner edges of the score's bins in log-odds, [bins - 1]: even in asinh(2 z), from -8 to 8.

    Bins of equal width in probability put all scores of a rare class, or of a confident model, into one of them; bins
    of equal width in log-odds put those of a model near chance into two or three. These are narrow around even odds and
    widen with distance.
    """
    edges: Floats = np.sinh(np.linspace(-1.0, 1.0, bins - 1) * math.asinh(2 * MAX_LOG_ODDS)) / 2.0
    return edges


def error_nodes(bins: int) -> Floats:
    """Nodes of the absolute error, [bins], from 0 to 1, which is half of the declared range."""
    nodes: Floats = np.sinh(np.linspace(0.0, 1.0, bins - 1) * math.asinh(30.0))
    last = 2 * float(nodes[-1]) - float(nodes[-2])  # as wide as the one before, see `spread`
    nodes = np.append(nodes, last) / last
    return nodes


def target_nodes() -> Floats:
    """Nodes of the target, [8], from -1 to 1."""
    return np.linspace(-1.0, 1.0, _TARGET_NODES)


def target_centres() -> Floats:
    """Centres of the target's bins in the joint table, [16]."""
    return (np.arange(_TARGET_BINS) + 0.5) * 2 / _TARGET_BINS - 1


def score_nodes(bins: int) -> Floats:
    """Nodes of a bounded score, [bins], from 0 to 1."""
    return np.linspace(0.0, 1.0, bins)


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
        interval = np.minimum((target + 1) * _TARGET_BINS / 2, _TARGET_BINS - 1).astype(np.int64)
        return {
            "error": _at_nodes(errors),
            "target": _at_nodes(targets),
            "error x target": [(nearest * _TARGET_BINS + interval, ones)],
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
    if spec.outputs <= _MAX_CONFUSION:
        return tables | {"predicted x label": [(predicted * spec.outputs + classes, ones)]}
    return tables | {"label x right": [(classes * 2 + right, ones)], "predicted": [(predicted, ones)]}


def log_odds(scores: Floats) -> Floats:
    """Log-odds of the second class, [n], from probabilities [n, 2]."""
    logs = np.log(np.maximum(scores, 1e-300))
    return logs[:, 1] - logs[:, 0]


def confidence_edges(bins: int) -> Floats:
    """Inner edges of the confidence, [bins - 1]: of equal width in probability."""
    return np.arange(1, bins) / bins


def loss_nodes(bins: int) -> Floats:
    """Nodes of the root of the log loss, [bins], from 0 to 3."""
    return np.linspace(0.0, math.sqrt(MAX_LOSS), bins)


def _bin(values: Floats, edges: Floats) -> Integers:
    return np.searchsorted(edges, values, side="right").astype(np.int64)


def _at_nodes(weights: Floats) -> _Parts:
    return [(np.full(len(weights), at, np.int64), weights[:, at]) for at in range(weights.shape[1])]


@dataclass(frozen=True)
class NoisyTables:
    """Tables by name with their noisy cells, and the standard deviation of the noise in each cell.

    z: standard deviations on each side of an interval.
    """

    spec: HistogramSpec
    tables: Mapping[str, Floats]
    noise_std: float
    z: float


@dataclass(frozen=True)
class ReleasedHistogram:
    """The noisy histogram, which is all that leaves of the held-out records.

    Attributes:
        spec: its description.
        values: [cells].
        noise_std: standard deviation of the independent Gaussian noise in every cell.
        best_of: among how many releases this one is chosen by its own values, on average where their number is drawn at
            random. Intervals then hold in at least 95 % of such choices, whichever is made: each of the releases has an
            interval that misses in at most 5 % / `best_of` (Bonferroni). Estimates are then a little too good.
    """

    spec: HistogramSpec
    values: Floats
    noise_std: float
    best_of: float = 1.0

    @property
    def z(self) -> float:
        """Standard deviations on each side of an interval."""
        return -NormalDist().inv_cdf(0.025 / self.best_of)

    def __post_init__(self) -> None:
        if self.values.shape != (self.spec.cells,) or not np.isfinite(self.values).all():
            raise ValueError("the released cells do not fit the histogram.")
        if not (math.isfinite(self.noise_std) and self.noise_std >= 0):
            raise ValueError("the standard deviation of the noise is a number from 0.")

    def table(self, name: str, part: str = "", group: int = 0) -> Floats:
        """The noisy cells of one table, in its shape."""
        return self.view(part, (group,)).tables[name]

    def view(self, part: str = "", groups: tuple[int, ...] = (0,)) -> "NoisyTables":
        """The tables of all records, or the sums of those of some groups of a part.

        Example:
            >>> released = ReleasedHistogram(histogram_for("score", 1, (("sex", ("f", "m")),)), np.arange(10.0), 2.0)
            >>> both = released.view("sex", (0, 1))
            >>> both.tables["score"].tolist(), both.noise_std == math.sqrt(8)
            ([9.0, 11.0, 13.0], True)
        """
        chosen = list(groups)
        tables = {
            name: table[chosen].sum(axis=0) for name, table in self.spec.tables_of(part, self.values).items()
        }
        return NoisyTables(self.spec, tables, self.noise_std * math.sqrt(len(groups)), self.z)

    def half(self, which: int) -> Floats:
        """The noisy cells of one half of the people: of score x label, [bins, 2], or of `temperature_cells`."""
        half: Floats = self.spec.half_cells(self.values)[which]
        return half

    @property
    def has_invalid(self) -> bool:
        """Whether more records than noise explains could not be evaluated; then metrics of the others would mislead."""
        return bool(self.values[-1] > 6.0 * self.noise_std) and self.noise_std > 0

    def to_json(self) -> str:
        document = {
            "spec": json.loads(self.spec.to_json()),
            "values": self.values.tolist(),
            "noise_std": self.noise_std,
        }
        return json.dumps(document, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ReleasedHistogram":
        """Raises ValueError for a text that `to_json` did not write."""
        try:
            document = json.loads(text)
            spec = HistogramSpec.from_json(json.dumps(document["spec"]))
            return cls(spec, np.array(document["values"], np.float64), float(document["noise_std"]))
        except (TypeError, KeyError) as error:
            raise ValueError("this is not a released histogram of held-out records.") from error
