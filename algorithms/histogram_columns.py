"""The columns of a table of cells whose histograms are released, and the weights of their cells afterwards.

It is read without importing PyTorch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class HistogramPart:
    """One histogram that is released of a column.

    A row holds a code at each of its positions: the index of its cell in one public grid. A number has a linear and a
    logarithmic grid. Both codes rise with it, so that their sum is its cell in a grid that is finer than both. So a
    histogram counts rows by the sum of their codes at `positions`; its last cell is for a missing value.

    Attributes:
        positions: Of a number, those of a pair of grids, such as (2, 3); of a category, its only one.
        is_ordered: Whether a higher code is a higher value, as of a number.
        merged: How many neighbouring cells are counted as one.
    """

    positions: tuple[int, ...]
    is_ordered: bool
    merged: int = 1


@dataclass(frozen=True)
class HistogramColumn:
    """A column: how many positions of a row it has, and the histograms of its parts."""

    count: int
    parts: tuple[HistogramPart, ...]

    @property
    def finest(self) -> frozenset[int]:
        """The positions of a number's finest pair of grids, if it has others."""
        positions = frozenset(at for part in self.parts if len(part.positions) > 1 for at in part.positions)
        return positions if len(positions) < self.count else frozenset()


def columns_in(stated: Sequence[Any]) -> tuple[HistogramColumn, ...]:
    """Columns from the JSON in a model's file.

    Example:
        >>> columns_in([[2, [[[0, 1], True]]]])
        (HistogramColumn(count=2, parts=(HistogramPart(positions=(0, 1), is_ordered=True, merged=1),)),)
    """
    return tuple(
        HistogramColumn(
            int(count),
            tuple(HistogramPart(tuple(at), bool(ordered), *merged) for at, ordered, *merged in parts),
        )
        for count, parts in stated
    )


def stated_columns(columns: Sequence[HistogramColumn]) -> list[Any]:
    """The same as JSON; the inverse of `columns_in`."""
    return [[column.count, [_part_to_json(part) for part in column.parts]] for column in columns]


def _part_to_json(part: HistogramPart) -> list[Any]:
    merged = [] if part.merged == 1 else [part.merged]  # left out as in models' files before it
    return [list(part.positions), part.is_ordered, *merged]


def finest_cells(columns: Sequence[HistogramColumn], sizes: Sequence[int]) -> int:
    """How many cells the finest grid of a number has, 0 if there is no pair of grids. sizes: of each position of a row.

    Example:
        >>> finest_cells([HistogramColumn(4, (HistogramPart((2, 3), True),))], [5, 5, 17, 17])
        16
    """
    pairs = [part.positions for column in columns for part in column.parts if len(part.positions) > 1]
    return max((sizes[at] - 1 for pair in pairs for at in pair), default=0)


def with_merged_cells(
    columns: Sequence[HistogramColumn], sizes: Sequence[int], merged: int
) -> tuple[HistogramColumn, ...]:
    """The columns where so many cells of numbers' finest grids are counted as one. sizes: of each position of a row.

    Example:
        >>> column = HistogramColumn(4, (HistogramPart((2, 3), True),))
        >>> with_merged_cells([column], [5, 5, 17, 17], 4)[0].parts
        (HistogramPart(positions=(2, 3), is_ordered=True, merged=4),)
    """
    finest = finest_cells(columns, sizes)

    def merge_finest(part: HistogramPart) -> HistogramPart:
        is_finest = part.is_ordered and all(sizes[at] - 1 == finest for at in part.positions)
        return replace(part, merged=merged) if is_finest else part

    return tuple(replace(column, parts=tuple(map(merge_finest, column.parts))) for column in columns)


def _weights_of_columns(
    columns: Sequence[HistogramColumn], share: float, *, learns_finest: bool = True, bins: Sequence[int] = ()
) -> tuple[tuple[float, ...], ...]:
    """The weight of the active cell at each position of each column.

    Columns have equal parts of a row's squared norm, and so have the positions of a column.

    Args:
        columns: In the order of a row.
        share: Of a row's squared norm, what belongs to all columns.
        learns_finest: Whether the finest pair of grids of each number has weights; else they have 0.
        bins: How many sets of quantile bins each column has besides, each as heavy as a position.

    Example:
        >>> column = HistogramColumn(4, (HistogramPart((2, 3), True),))
        >>> _weights_of_columns([column], 0.5, learns_finest=False)
        ((0.5, 0.5, 0.0, 0.0),)
    """
    weights, start = list[tuple[float, ...]](), 0
    for index, column in enumerate(columns):
        without = frozenset[int]() if learns_finest else column.finest
        heavy = column.count - len(without) + (bins[index] if bins else 0)
        each = math.sqrt(share / (len(columns) * heavy))
        positions = range(start, start + column.count)
        weights.append(tuple(0.0 if at in without else each for at in positions))
        start += column.count
    return tuple(weights)


def histogram_sizes(columns: Sequence[HistogramColumn], sizes: Sequence[int]) -> tuple[int, ...]:
    """The number of values of each histogram, of the sums of a row's codes. sizes: cells of each position of the row.

    Example:
        >>> histogram_sizes([HistogramColumn(2, (HistogramPart((0, 1), True),))], [4, 8])
        (11,)
    """
    # Each code is at most its size less 1, for a missing number; so their sum is at most that of these.
    return tuple(
        sum((sizes[at] - 1) // part.merged for at in part.positions) + 1
        for column in columns
        for part in column.parts
    )


def columns_with_bins(
    columns: Sequence[HistogramColumn], sizes: Sequence[int], bins: int
) -> list[int | None]:
    """For each histogram, the index of its column if quantile bins are made of it, else None.

    They are made where values are ordered and the histogram has more of them than there are bins.

    Args:
        columns: In the order of a row.
        sizes: Cells of each position of a row.
        bins: Quantile bins of each number, 0 for none.

    Example:
        >>> category = HistogramColumn(1, (HistogramPart((0,), False),))
        >>> number = HistogramColumn(2, (HistogramPart((1, 2), True),))
        >>> columns_with_bins([category, number], [40, 17, 17], 8)  # 17 + 17 codes add up to 33 values
        [None, 1]
    """
    parts = [(index, part) for index, column in enumerate(columns) for part in column.parts]
    return [
        index if bins and part.is_ordered and size > bins + 1 else None
        for (index, part), size in zip(parts, histogram_sizes(columns, sizes), strict=True)
    ]


def row_layout(
    columns: Sequence[HistogramColumn],
    sizes: Sequence[int],
    *,
    bins: int,
    trees: int,
    depth: int,
    tree_share: float = 0.5,
    constant_share: float = 0.0,
    learns_finest: bool = True,
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The cells of each position of a row behind histograms, and the active one's weight; every row has norm 1.

    In this order: the positions of the columns, one for each set of quantile bins, one for each tree, the constant.

    Args:
        columns: In the order of a row before.
        sizes: Cells of each position of a row before, of which only those of the columns stay.
        bins: Quantile bins of each number, 0 for none.
        trees: Their number.
        depth: Tests of each tree.
        tree_share: Of a row's squared norm, what belongs to the trees, if there are any.
        constant_share: What belongs to the cell that all rows share; 0 for none.
        learns_finest: As for `_weights_of_columns`.

    Example:
        >>> column = HistogramColumn(1, (HistogramPart((0,), False),))
        >>> sizes, weights = row_layout([column], [3], bins=0, trees=2, depth=2)
        >>> sizes, [round(weight, 3) for weight in weights]
        ((3, 4, 4), [0.707, 0.5, 0.5])
    """
    tree_share = tree_share if trees else 0.0
    with_bins = [index for index in columns_with_bins(columns, sizes, bins) if index is not None]
    of_columns = _weights_of_columns(
        columns,
        1.0 - tree_share - constant_share,
        learns_finest=learns_finest,
        bins=[with_bins.count(index) for index in range(len(columns))],
    )
    weights = [weight for column in of_columns for weight in column]
    sizes_after = [*sizes[: len(weights)], *[bins + 1] * len(with_bins), *[2**depth] * trees]
    weights += [max(of_columns[index]) for index in with_bins]
    weights += [math.sqrt(tree_share / max(1, trees))] * trees
    if constant_share:
        sizes_after, weights = [*sizes_after, 1], [*weights, math.sqrt(constant_share)]
    # Rounding to 32 bits makes no row longer than 1.
    return tuple(sizes_after), tuple(weight * (1.0 - 2.0**-23) for weight in weights)
