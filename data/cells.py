"""The public encoding of a table's row: the few cells that it activates on public grids, of which models get a vector.

A number falls into one cell of each of several grids of its declared bounds, or into each grid's cell for a missing
value; a category has a cell of its own. Together with the leaves of random trees over public thresholds they make a
vector of norm 1, whatever the row, so that a linear model of it needs no bias and clips nothing. All of this is a
function of the data card and of one row.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from data.targets import CardPart

_MAX_TREES = 1024
_FINE_GRIDS = (8, 32, 128, 512)
_FEW_RECORDS, _MANY_RECORDS, _VERY_MANY_RECORDS = 2000, 10_000, 20_000
_GRIDS_OF_NUMBERS, _RECORDS_FOR_GRIDS_OF_NUMBERS = (4, 16, 64, 1024), 40_000
_MANY_TREES = 128
Predicts: TypeAlias = Literal["classes", "labels", "number", "count", "quantile"]
"""What is predicted: one of several classes, labels that are 0 or 1, the mean of a number or a count, or a quantile."""
Values: TypeAlias = NDArray[np.float64]
"""Of a part, [n]: numbers as shares of their bounds, categories as their places; NaN if missing."""


class CellSettings(CardPart):
    """How the columns of a table become cells.

    grids: cells of each pair of grids, a linear and a logarithmic one, of a number's bounds. trees: how many random
    trees look at several columns at a time. depth: splits of a tree, which has 2^depth leaves. seed: of the
    trees; public. constant_share: of a row's squared norm, what belongs to a cell that every row activates; 0 for none.
    tree_share: of the rest, what belongs to the trees, if there are any.
    """

    grids: tuple[Annotated[int, Field(ge=2, le=4096)], ...] = Field(default=(4, 16, 64), min_length=1)
    trees: Annotated[int, Field(ge=0, le=_MAX_TREES)] = 64
    depth: Annotated[int, Field(ge=1, le=8)] = 4
    seed: Annotated[int, Field(ge=0)] = 0
    # left out of a document at the default, so that the digests of cards without it do not change
    tree_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5, exclude_if=lambda share: share == 0.5
    )
    constant_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, exclude_if=lambda share: share == 0.0
    )


def usual_cells(predicts: Predicts, *, classes: int, records: int) -> CellSettings:
    """The settings that suit a table by public numbers alone; comparisons/results/tables.md says how they were chosen.

    A row whose cells nobody else has would be predicted by noise, so rows share a cell, but for a number, whose centre
    is released. The fewer records there are, the more of the norm it takes to learn that cell.

    classes: to predict. records: their number, or a bound on it.
    """
    if predicts in ("number", "count", "quantile"):
        is_fine = predicts == "number" and records >= _RECORDS_FOR_GRIDS_OF_NUMBERS
        return CellSettings(grids=_GRIDS_OF_NUMBERS) if is_fine else CellSettings()
    constant = 0.1 if records <= _FEW_RECORDS else 0.02
    if predicts == "labels":
        return CellSettings(constant_share=constant)
    usual = CellSettings()
    grids = _FINE_GRIDS if classes > 2 and records >= _MANY_RECORDS else usual.grids
    trees = _MANY_TREES if records >= _VERY_MANY_RECORDS else usual.trees
    return CellSettings(grids=grids, trees=trees, tree_share=0.25, constant_share=constant)


@dataclass(frozen=True)
class Grids:
    """Numbers in [0, 1] and their logarithms, as cells of grids.

    span: the distance between the bounds, of which the logarithmic scale is log(1 + x span) / log(1 + span).
    logarithmic: whether there is a grid on that scale beside each linear one.
    """

    span: float
    logarithmic: bool = True

    def to_scales(self, shares: Values) -> list[Values]:
        """The numbers on each scale, [n] each in [0, 1]; NaN stays NaN."""
        if not self.logarithmic:
            return [shares]
        return [shares, np.minimum(np.log1p(shares * self.span) / np.log1p(self.span), 1.0)]

    def codes(self, shares: Values, cells: Sequence[int]) -> list[NDArray[np.int64]]:
        """The cell of each number in each grid, [n]; the last cell, the number of the others, for NaN."""
        absent, scales = np.isnan(shares), [np.nan_to_num(scale) for scale in self.to_scales(shares)]
        return [
            np.where(absent, count, np.minimum(scale * count, count - 1)).astype(np.int64)
            for count in cells
            for scale in scales
        ]

    def sizes(self, cells: Sequence[int]) -> list[int]:
        """The number of cells of each grid, with that for a missing value."""
        return [count + 1 for count in cells for _ in range(1 + self.logarithmic)]


@dataclass(frozen=True)
class Categories:
    """One of `count` categories, the last of which may be for all others.

    is_ordered: whether there is a cell below and one above each step between two of them, besides their own cells.
    """

    count: int
    is_ordered: bool = False

    def codes(self, indices: Values) -> list[NDArray[np.int64]]:
        """The category, with an own cell for a missing one, and for each step whether it is below, above or missing."""
        absent = np.isnan(indices)
        column = np.where(absent, self.count, indices).astype(np.int64)
        steps = range(1, self.count if self.is_ordered else 1)
        return [column, *(np.where(absent, 2, indices >= step).astype(np.int64) for step in steps)]

    def sizes(self) -> list[int]:
        """The number of cells of each of these."""
        return [self.count + 1, *[3] * (self.count - 1 if self.is_ordered else 0)]


@dataclass(frozen=True)
class CellHistogram:
    """A histogram of encoded rows: of the sum of the numbers at some positions, the last of which are for missing ones.

    Those of the finest linear and logarithmic grid of a number make one that is finer than both, since both rise.
    is_ordered: whether a higher sum is a higher value.
    """

    positions: tuple[int, ...]
    is_ordered: bool


@dataclass(frozen=True)
class CellColumn:
    """A column of encoded rows: how many positions of a row it has, and the histogram of each of its parts."""

    count: int
    parts: tuple[CellHistogram, ...]


CellPart: TypeAlias = Grids | Categories
"""Of what kind the values of a part of a row are."""


@dataclass(frozen=True)
class CellFacts:
    """The public layout of encoded rows: for each position of a row, how many cells it has and the active one's weight.

    A row is the vector with `weights[p]` in the active cell of each position p and zeros elsewhere.
    """

    sizes: tuple[PositiveInt, ...]
    weights: tuple[float, ...] = field(repr=False)

    @property
    def total(self) -> int:
        """The length of the vector."""
        return sum(self.sizes)

    @property
    def norms(self) -> tuple[float, float]:
        """Upper bounds on the L1 and L2 norms of each vector, rounding included."""
        return math.fsum(self.weights) * (1.0 + 1e-12), 1.0


def _rounded_down(weight: float) -> float:
    """A number of 32 bits below the weight, so that no vector is longer than 1."""
    return float(np.nextafter(np.float32(weight), np.float32(0.0)))


@dataclass(frozen=True)
class CellTest:
    """A public test of one part: whether a number reaches a threshold on a scale, or is among some categories."""

    part: int
    scale: int = 0
    threshold: float = 0.0
    passing: frozenset[int] = frozenset()

    def holds(self, scales: Sequence[Values], *, is_number: bool) -> NDArray[np.bool_]:
        """Whether each value of the part passes; a missing one, NaN, does not. scales: the values on each scale."""
        if is_number:
            passed: NDArray[np.bool_] = scales[self.scale] >= self.threshold
            return passed
        return np.isin(scales[0], sorted(self.passing))


class _Draws:
    """Numbers in [0, 1) from a public seed, the same in every version of every library."""

    def __init__(self, seed: int) -> None:
        self._seed, self._count = seed, 0

    def draw(self) -> float:
        digest = hashlib.sha256(f"trees over the columns of a table, {self._seed}, {self._count}".encode())
        self._count += 1
        return int.from_bytes(digest.digest()[:6], "big") / 2.0**48  # 48 bits: exact in a float


@dataclass(frozen=True)
class CellEncoding:
    """The encoding of rows whose columns have these parts, a list for each column."""

    settings: CellSettings
    columns: tuple[tuple[CellPart, ...], ...]

    @cached_property
    def parts(self) -> list[CellPart]:
        """The parts of all columns."""
        return [part for column in self.columns for part in column]

    @cached_property
    def trees(self) -> list[list[CellTest]]:
        """The splits of each tree; drawn from the seed alone, each of a part that was drawn, too."""
        draws = _Draws(self.settings.seed)
        return [[self._split(draws) for _ in range(self.settings.depth)] for _ in range(self.settings.trees)]

    def _split(self, draws: _Draws) -> CellTest:
        index = int(draws.draw() * len(self.parts))
        part = self.parts[index]
        if isinstance(part, Grids):
            return CellTest(index, scale=int(draws.draw() * (1 + part.logarithmic)), threshold=draws.draw())
        if part.is_ordered:
            step = 1 + int(draws.draw() * max(1, part.count - 1))
            return CellTest(index, passing=frozenset(range(step, part.count)))
        # A random order; its first half passes.
        order = sorted(range(part.count), key=[draws.draw() for _ in range(part.count)].__getitem__)
        return CellTest(index, passing=frozenset(order[: (part.count + 1) // 2]))

    @cached_property
    def facts(self) -> CellFacts:
        """The layout. Trees share their part of the squared norm equally, columns the rest; a constant is last."""
        sizes, weights, constant = list[int](), list[float](), self.settings.constant_share
        of_trees = (1.0 - constant) * self.settings.tree_share if self.settings.trees else 0.0
        for column in self.columns:
            sizes_of_column = [size for part in column for size in self._sizes(part)]
            sizes += sizes_of_column
            weights += [
                # Shares are of the squared norm, and a column's is split evenly over its positions.
                math.sqrt((1.0 - constant - of_trees) / (len(self.columns) * len(sizes_of_column)))
            ] * len(sizes_of_column)
        sizes += [2**self.settings.depth] * self.settings.trees
        weights += [math.sqrt(of_trees / max(1, self.settings.trees))] * self.settings.trees
        if constant:
            sizes, weights = [*sizes, 1], [*weights, math.sqrt(constant)]
        return CellFacts(tuple(sizes), tuple(_rounded_down(weight) for weight in weights))

    @cached_property
    def histograms(self) -> tuple[CellColumn, ...]:
        """What may be counted of each column."""
        columns, start = list[CellColumn](), 0
        finest = max(range(len(self.settings.grids)), key=self.settings.grids.__getitem__)
        for column in self.columns:
            first, parts = start, list[CellHistogram]()
            for part in column:
                if isinstance(part, Grids):
                    scales = 1 + part.logarithmic
                    # A number's positions are grid by grid, linear then logarithmic.
                    at = start + finest * scales
                    parts.append(CellHistogram((*range(at, at + scales),), True))
                else:
                    parts.append(CellHistogram((start,), part.is_ordered))
                start += len(self._sizes(part))
            columns.append(CellColumn(start - first, tuple(parts)))
        return tuple(columns)

    def positions_of(self, column: Sequence[CellPart]) -> int:
        """How many positions of a row a column has."""
        return sum(len(self._sizes(part)) for part in column)

    def _sizes(self, part: CellPart) -> list[int]:
        return part.sizes(self.settings.grids) if isinstance(part, Grids) else part.sizes()

    def codes(self, values: Sequence[Values]) -> NDArray[np.float32]:
        """The active cell of each position, [n, positions], as whole numbers from 0. values: of each part."""
        codes = np.empty((len(values[0]), len(self.facts.sizes)), np.float32)
        for position, column in enumerate(self._codes_of_positions(values)):
            codes[:, position] = column
        return codes

    def _codes_of_positions(self, values: Sequence[Values]) -> Iterator[NDArray[np.int64]]:
        for part, column in zip(self.parts, values, strict=True):
            yield from (
                part.codes(column, self.settings.grids) if isinstance(part, Grids) else part.codes(column)
            )
        numbers = [isinstance(part, Grids) for part in self.parts]
        scales = [
            part.to_scales(column) if isinstance(part, Grids) else [column]
            for part, column in zip(self.parts, values, strict=True)
        ]
        for splits in self.trees:
            leaf = np.zeros(len(values[0]), np.int64)
            for split in splits:
                # Its number in binary, first split first.
                leaf = 2 * leaf + split.holds(scales[split.part], is_number=numbers[split.part])
            yield leaf
        if self.settings.constant_share:
            yield np.zeros(len(values[0]), np.int64)
