"""The histogram that is released of held-out records: its cells and its sensitivity, by a rule without records.

A record enters several tables: its scores at more than one resolution, its predicted class and label, and those tables
again for its groups. In each table it adds a vector of norm at most 1, so its part in all of them has L2 norm at most
the square root of their number, which is `HistogramSpec.sensitivity`. Coarse tables cost the fine ones a little, and
give sums over many cells with far less noise than adding up fine cells would (Hay et al. 2010, arXiv:0904.0942).

Bins, nodes and tables follow from the public `HistogramSpec` alone, never from records.
"""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
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
_TARGET_NODES, TARGET_BINS = 8, 16
MAX_CONFUSION = 32
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
                "error x target": (self.bins + 1, TARGET_BINS),
            }
        if self.kind == "score":
            return {"score": (self.bins,)}
        classes = self.outputs
        confusion: dict[str, tuple[int, ...]] = (
            {"predicted x label": (classes, classes)}
            if classes <= MAX_CONFUSION
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
    last = 2 * float(nodes[-1]) - float(nodes[-2])  # as wide as the one before, see `counts.spread`
    nodes = np.append(nodes, last) / last
    return nodes


def target_nodes() -> Floats:
    """Nodes of the target, [8], from -1 to 1."""
    return np.linspace(-1.0, 1.0, _TARGET_NODES)


def target_centres() -> Floats:
    """Centres of the target's bins in the joint table, [16]."""
    return (np.arange(TARGET_BINS) + 0.5) * 2 / TARGET_BINS - 1


def score_nodes(bins: int) -> Floats:
    """Nodes of a bounded score, [bins], from 0 to 1."""
    return np.linspace(0.0, 1.0, bins)


def confidence_edges(bins: int) -> Floats:
    """Inner edges of the confidence, [bins - 1]: of equal width in probability."""
    return np.arange(1, bins) / bins


def loss_nodes(bins: int) -> Floats:
    """Nodes of the root of the log loss, [bins], from 0 to 3."""
    return np.linspace(0.0, math.sqrt(MAX_LOSS), bins)
