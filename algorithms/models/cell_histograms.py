"""Tables whose rows are cells, with random trees whose thresholds follow from released histograms of the columns.

A row comes and goes as numbers of cells. The positions of its columns stay; those of the public trees are replaced by
leaves of trees that split each column where its released histogram has the mass, not where its declared bounds are.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from algorithms.errors import ModelRefusedError
from algorithms.histogram_columns import (
    HistogramPart,
    columns_in,
    columns_with_bins,
    histogram_sizes,
    row_layout,
    stated_columns,
)
from algorithms.models.scaled_target import TargetScaling

Splits: TypeAlias = Literal["even", "by_content"]
"""Whether trees split each column as often, or those more often whose histograms say more."""
_TREES_AT_A_TIME = 32
"""So few that intermediate values stay in memory that is used again, rather than being returned to the system."""


@dataclass(frozen=True)
class _Test:
    """A node of a tree, drawn from a public seed: of an ordered part at a quantile, else of categories in an order."""

    part: int
    quantile: float
    order: tuple[int, ...]


class HistogramCells(TargetScaling):
    """Rows of cells with the leaves of learned trees, and the centre and the scale of a number to predict.

    sizes: the number of cells of each position of a row. columns: of the row's beginning. bins: quantile bins of each
    number, 0 for none. is_of_number: whether a number is predicted. tree_share: of a row's squared norm afterwards,
    what belongs to the trees. constant_share: what belongs to the cell that all rows share, which is a row's last; 0
    for none. splits: how trees choose columns. learns_finest: whether the finest pair of grids of each number has
    weights; else it is for its histogram alone. counts: of all histograms, as released. looked_up: the part of each row
    of the table.
    """

    counts: Tensor
    table: Tensor
    looked_up: Tensor
    offsets: Tensor
    last: Tensor

    def __init__(  # noqa: PLR0913
        self,
        shape: tuple[int, ...],
        *,
        sizes: Sequence[int],
        columns: Sequence[Any],
        bins: int,
        trees: int,
        depth: int,
        seed: int,
        is_of_number: bool,
        tree_share: float = 0.5,
        constant_share: float = 0.0,
        splits: Splits = "even",
        learns_finest: bool = True,
    ) -> None:
        super().__init__(shape)
        self.columns = columns_in(columns)
        self.settings = {
            "kind": "cell_histograms",
            "sizes": list(sizes),
            "columns": stated_columns(self.columns),
            "bins": bins,
            "trees": trees,
            "depth": depth,
            "seed": seed,
            "is_of_number": is_of_number,
            # as models' files before them
            **({} if tree_share == 0.5 else {"tree_share": tree_share}),
            **({} if constant_share == 0.0 else {"constant_share": constant_share}),
            **({} if splits == "even" else {"splits": splits}),
            **({} if learns_finest else {"learns_finest": False}),
        }
        self.is_around_the_model = is_of_number
        self._sizes, self._bins, self._trees, self._depth = tuple(sizes), bins, trees, depth
        self._seed, self._is_by_content = seed, splits == "by_content"
        self._tree_share, self._constant_share = tree_share, constant_share
        self.parts = tuple(part for column in self.columns for part in column.parts)
        self._front = sum(column.count for column in self.columns)
        self._learns_finest = learns_finest
        if len(sizes) != math.prod(shape) or self._front > len(sizes) or not self.parts:
            raise ModelRefusedError("the model's file has histograms of other rows; take the file of a run.")
        self.part_sizes = histogram_sizes(self.columns, sizes)
        with_bins = columns_with_bins(self.columns, sizes, bins)
        self._bin_parts = [part for part, column in enumerate(with_bins) if column is not None]
        self._register_tables(sizes)

    def tests(self, masses: Sequence[Tensor] | None = None) -> list["_Test"]:
        """The nodes of all trees, one tree after the other. masses: of the histograms, for trees that split by them."""
        shares = None if masses is None or not self._is_by_content else _shares_of_splits(masses)
        return [*_draw_tests(self._seed, self._trees * self._depth, self.parts, self.part_sizes, shares)]

    def _register_tables(self, sizes: Sequence[int]) -> None:
        """Register the tables of bins and tests by cell, one after the other in `table`, and what they follow from.

        Where counts decide which part a test is of, each has room for the largest part.
        """
        if self._is_by_content:
            looked_up = [*self._bin_parts, *[0] * (self._trees * self._depth)]
            widths = [max(self.part_sizes)] * len(looked_up)
        else:
            looked_up = [*self._bin_parts, *(test.part for test in self.tests())]
            widths = [self.part_sizes[part] for part in looked_up]
        ends = [*accumulate(widths)]
        self._widths = widths
        fixed = {
            "offsets": torch.tensor([0, *ends[:-1]], dtype=torch.int64),
            "last": torch.tensor([float(size - 1) for size in sizes]),
        }
        for name, values in fixed.items():
            self.register_buffer(name, values, persistent=False)
        self.register_buffer(
            "looked_up", torch.tensor(looked_up, dtype=torch.int64), persistent=self._is_by_content
        )
        self.register_buffer("counts", torch.zeros(sum(self.part_sizes), dtype=torch.float64))
        self.register_buffer("table", torch.zeros(ends[-1] if ends else 0, dtype=torch.uint8))

    def indices(self, rows: Tensor) -> Tensor:
        """The cell of each row in each histogram, [batch, positions] -> int64 [batch, parts]."""
        # A number outside counts as the nearest cell.
        codes = torch.minimum(rows.nan_to_num(0.0).round().clamp(min=0.0), self.last.to(rows.dtype)).long()
        # Grids of 2^k times as many cells are nested, so that cells merge into those of the coarser grid.
        return torch.stack(
            [(codes[:, list(part.positions)] // part.merged).sum(1) for part in self.parts], dim=1
        )

    def forward(self, rows: Tensor) -> Tensor:
        """[batch, positions] -> [batch, positions after]: columns, quantile bins, leaves, the constant."""
        shared = [rows[:, -1:]] if self._constant_share else []
        if not self._widths:
            return torch.cat([rows[:, : self._front], *shared], dim=1)
        cells, bins = self.indices(rows).t(), len(self._bin_parts)
        after = [rows[:, : self._front], self._values(cells, 0, bins).t()]
        # A leaf's number in binary, first split first.
        powers = 2.0 ** torch.arange(self._depth - 1, -1, -1, device=rows.device)
        for first in range(0, self._trees, _TREES_AT_A_TIME):
            last = min(first + _TREES_AT_A_TIME, self._trees)
            passed = self._values(cells, bins + first * self._depth, bins + last * self._depth)
            leaves = passed.reshape(last - first, self._depth, -1) * powers.to(rows.dtype)[:, None]
            after.append(leaves.sum(1).t())
        return torch.cat([part.to(rows.dtype) for part in [*after, *shared]], dim=1)

    def _values(self, cells: Tensor, first: int, last: int) -> Tensor:
        """What the table says of some bins and tests, [last - first, batch]. cells: of each histogram, [parts, batch].

        Test by test, so that what one needs of the table stays at hand for all rows.
        """
        of_tests = cells.index_select(0, self.looked_up[first:last])
        return self.table.take(of_tests + self.offsets[first:last, None])

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The number of cells of each position after it, and the active one's weight; every row has norm 1."""
        return row_layout(
            self.columns,
            self._sizes,
            bins=self._bins,
            trees=self._trees,
            depth=self._depth,
            tree_share=self._tree_share,
            constant_share=self._constant_share,
            learns_finest=self._learns_finest,
        )

    def buffers_from(self, counts: Tensor, noise_std: float) -> dict[str, Tensor]:
        """counts, table, and where counts decide it looked_up: from noisy counts of all histograms, float64 [cells]."""
        masses = [
            _without_noise(noisy, noise_std) for noisy in torch.split(counts.double(), list(self.part_sizes))
        ]
        # Of all records that are not missing.
        quantiles = [_middles(mass[:-1]) for mass in masses]
        rows = [
            torch.cat(
                [(quantiles[part] * self._bins).floor().clamp(max=self._bins - 1), torch.tensor([self._bins])]
            )
            for part in self._bin_parts
        ]
        tests = self.tests(masses)
        # Roots bring more thresholds to where records are few, whose values are often far apart.
        of_roots = [_middles(mass[:-1].sqrt()) for mass in masses]
        for test in tests:
            if self.parts[test.part].is_ordered:
                middles, quantile = quantiles[test.part], test.quantile
                if self._is_by_content:
                    middles = of_roots[test.part]
                    quantile = _between_values(middles, masses[test.part][:-1], quantile)
                passed = middles >= quantile
            else:
                passed = _about_half(masses[test.part][:-1], test.order)
            rows.append(torch.cat([passed, torch.tensor([False])]))
        padded = [
            nn.functional.pad(row.to(torch.uint8), (0, width - len(row)))
            for row, width in zip(rows, self._widths, strict=True)
        ]
        table = torch.cat(padded) if padded else self.table
        if not self._is_by_content:
            return {"counts": counts, "table": table}
        looked_up = torch.tensor([*self._bin_parts, *(test.part for test in tests)], dtype=torch.int64)
        return {"counts": counts, "table": table, "looked_up": looked_up}


def _without_noise(counts: Tensor, noise_std: float) -> Tensor:
    """The counts of a histogram that stand out from the noise; evenly one each where no value does.

    The last cell, for missing ones, takes no part in quantiles.
    """
    large_counts = torch.where(counts < 2.0 * noise_std, 0.0, counts)
    return large_counts if float(large_counts[:-1].sum()) > 0.0 else torch.ones_like(large_counts)


def _shares_of_splits(masses: Sequence[Tensor]) -> list[float]:
    """How much of all splits each histogram gets: by the root of its entropy, as a split of few values says little."""
    shares = [mass / mass.sum() for mass in masses]
    roots = [math.sqrt(float(-torch.xlogy(share, share).sum().clamp(max=0.0))) for share in shares]
    total = math.fsum(roots)
    return [root / total for root in roots] if total > 0.0 else [1.0 / len(roots)] * len(roots)


def _middles(masses: Tensor) -> Tensor:
    """The middle of each value's share of all masses, [values] each in [0, 1]."""
    return (masses.cumsum(0) - masses / 2) / masses.sum()


def _between_values(quantiles: Tensor, masses: Tensor, quantile: float) -> float:
    """A number in [0, 1) as a quantile that some values reach and others do not, where there are several."""
    held = quantiles[masses > 0.0]
    low, high = float(held[0]), float(held[-1])
    return high - (high - low) * quantile if high > low else quantile


def _about_half(counts: Tensor, order: Sequence[int]) -> Tensor:
    """Categories in an order until they hold half of the records, bool [categories]."""
    ordered = counts[list(order)]
    passed = torch.zeros(len(counts), dtype=torch.bool)
    passed[list(order)] = ordered.cumsum(0) - ordered < ordered.sum() / 2
    return passed


def _draw_tests(
    seed: int,
    count: int,
    parts: Sequence[HistogramPart],
    sizes: Sequence[int],
    shares: Sequence[float] | None,
) -> Sequence[_Test]:
    """Public draws. Their result is in the model's file, but for the part of each where all have the same share."""
    draws, tests = random.Random(seed), list[_Test]()
    ends = None if shares is None else [*accumulate(shares)]
    for _ in range(count):
        drawn = draws.random()
        part = int(drawn * len(parts)) if ends is None else min(bisect_right(ends, drawn), len(parts) - 1)
        order = [] if parts[part].is_ordered else [draws.random() for _ in range(sizes[part] - 1)]
        tests.append(_Test(part, draws.random(), tuple(sorted(range(len(order)), key=order.__getitem__))))
    return tests
