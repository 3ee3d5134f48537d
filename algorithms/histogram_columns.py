"""The columns of a table of cells whose histograms are released, and the weights of their cells afterwards.

It is read without importing PyTorch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HistogramPart:
    """One histogram: of the sum of a row's codes at some positions, whose last value is for a missing one.

    positions: those of the finest grids of a number, which together are a finer one since both rise with the number; or
    that of a category. is_ordered: whether a higher code is a higher value.
    """

    positions: tuple[int, ...]
    is_ordered: bool


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
        (HistogramColumn(count=2, parts=(HistogramPart(positions=(0, 1), is_ordered=True),)),)
    """
    return tuple(
        HistogramColumn(int(count), tuple(HistogramPart(tuple(at), bool(ordered)) for at, ordered in parts))
        for count, parts in stated
    )


def stated_columns(columns: Sequence[HistogramColumn]) -> list[Any]:
    """The same as JSON; the inverse of `columns_in`."""
    return [
        [column.count, [[list(part.positions), part.is_ordered] for part in column.parts]]
        for column in columns
    ]


def weights_of_columns(
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
        >>> weights_of_columns([column], 0.5, learns_finest=False)
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
