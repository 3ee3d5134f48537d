"""Histograms of all columns of a table whose rows are cells, released before training.

They follow from the prepared rows. A number is counted in a cell of the finest linear and logarithmic grids together, a
category in its own, so a row adds 1 to one cell of each histogram: with F histograms its sum has norm sqrt(F), and the
release is one Gaussian mechanism of that sensitivity. Everything else is post-processing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from algorithms.core.optimizers import Positive
from algorithms.core.settings import Strict
from algorithms.errors import RefusedError
from algorithms.histogram_columns import HistogramColumn, finest_cells, stated_columns, with_merged_cells
from algorithms.models import Model
from algorithms.models.cell_histograms import HistogramCells, Splits
from algorithms.models.feature_transforms import Shape
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gaussian, Release, histograms_release
from algorithms.target_scale import (
    check_loss,
    histogram_edges,
    mean_releases,
    scaling_from,
    target_cell,
)


@dataclass(frozen=True)
class CellHistograms(Strict):
    """The trees of a table of cells with thresholds by a Gaussian release of all columns' histograms.

    If a number is predicted, its histogram is part of the release, and gives its centre and scale as `target_scale`
    does.

    noise: multiplier of the release; a count's standard deviation is noise sqrt(F) for F histograms. trees, depth,
    seed: of random trees that replace the public ones. splits: "even", or "by_content" for more tests of columns whose
    histograms say more, each between values that stand out from the noise. learns_finest: whether the model learns the
    cells of the finest pair of grids of each number, too; else these are for histograms alone. merged_cells: how many
    cells of that pair are counted as one; it divides their number. bins: quantile bins of each number, 0 for none.
    mean_noise: of a number's mean, as for `target_scale`; null for none.
    """

    of_cells: ClassVar[bool] = True
    noise: Positive = 16.0
    trees: Annotated[int, Field(ge=0, le=1024)] = 64
    depth: Annotated[int, Field(ge=1, le=8)] = 4
    splits: Splits = "even"
    learns_finest: bool = True
    merged_cells: Annotated[int, Field(ge=1, le=4096)] = 1
    bins: Annotated[int, Field(ge=0, le=255)] = 0
    seed: Annotated[int, Field(ge=0)] = 0
    mean_noise: Positive | None = None

    def of_table(
        self,
        sizes: Sequence[int],
        columns: Sequence[HistogramColumn],
        *,
        is_of_number: bool,
        tree_share: float = 0.5,
        constant_share: float = 0.0,
    ) -> "TableHistograms":
        """The features for rows of a public layout; see `HistogramCells`.

        Raises RefusedError if cells of a number cannot be merged so.
        """
        finest = finest_cells(columns, sizes)
        if finest % self.merged_cells:
            raise RefusedError(
                "{learned.merged_cells} is {asked}, which does not divide the {cells} cells of a number's finest grid;"
                " set it to 1, or to a power of 2.",
                code="cells_not_divided",
                asked=self.merged_cells,
                cells=finest,
            )
        merged = with_merged_cells(columns, sizes, self.merged_cells)
        return TableHistograms(self, tuple(sizes), merged, is_of_number, tree_share, constant_share)

    def releases(self, shape: Shape) -> list[Release]:
        """Raises RefusedError, as rows without a layout of cells have no histograms."""
        raise RefusedError(
            "{learned.kind} is histograms, which is of a table whose columns are encoded as cells, and these records"
            " are not; set it to none, or have the table read as cells.",
            code="no_cells",
        )

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> dict[str, Tensor]:
        """Raises RefusedError as `releases` does."""
        self.releases(shape)
        return {}

    def module(self, shape: Shape) -> HistogramCells:
        """Raises RefusedError as `releases` does."""
        self.releases(shape)
        raise AssertionError


@dataclass(frozen=True)
class TableHistograms:
    """`CellHistograms` for the rows of a table."""

    settings: CellHistograms
    sizes: tuple[int, ...]
    columns: tuple[HistogramColumn, ...]
    is_of_number: bool
    tree_share: float = 0.5
    constant_share: float = 0.0

    @property
    def sensitivity(self) -> float:
        """The norm of what one row adds: 1 in each histogram."""
        return math.sqrt(self._histograms)

    @property
    def _histograms(self) -> int:
        return sum(len(column.parts) for column in self.columns) + self.is_of_number

    @property
    def mean_noise(self) -> float | None:
        """The noise multiplier of the mean, None unless a number is predicted whose mean is released."""
        return self.settings.mean_noise if self.is_of_number else None

    def releases(self, shape: Shape) -> list[Release]:
        """One release of all histograms, and the number's mean, if it is released."""
        histograms = histograms_release(self._histograms, Gaussian(self.settings.noise))
        return [histograms, *mean_releases(self.mean_noise)]

    def check(self, model: Model) -> None:
        """Raises RefusedError for a number to predict by a loss of the model's own."""
        if self.is_of_number:
            check_loss(model)

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> dict[str, Tensor]:
        """counts, table; centre, scale: [] (0 and 1 unless a number is predicted)."""
        module = self.module(shape)
        noise_std = self.settings.noise * self.sensitivity
        edges = histogram_edges(records / noise_std)
        sizes = [*module.part_sizes, *([len(edges) - 1] if self.is_of_number else [])]

        def cells(record: Tensor, label: Tensor) -> Tensor:
            of_columns = module.to(record.device).indices(record[None])[0]
            return torch.cat([of_columns, target_cell(label, edges)]) if self.is_of_number else of_columns

        released = barrier.histograms(cells, sizes, noise=Gaussian(self.settings.noise))
        total = sum(module.part_sizes)
        counts, of_target = torch.split(released.cpu(), [total, len(released) - total])
        scaling = {"centre": torch.tensor(0.0), "scale": torch.tensor(1.0)}
        if self.is_of_number:
            scaling = scaling_from(
                of_target, edges, noise_std, records, barrier=barrier, mean_noise=self.mean_noise
            )
        return {**module.cpu().buffers_from(counts, noise_std), **scaling}

    def module(self, shape: Shape) -> HistogramCells:
        """The map before learning, in which no row passes a test."""
        chosen = self.settings
        return HistogramCells(
            shape,
            sizes=self.sizes,
            columns=stated_columns(self.columns),
            bins=chosen.bins,
            trees=chosen.trees,
            depth=chosen.depth,
            seed=chosen.seed,
            is_of_number=self.is_of_number,
            tree_share=self.tree_share,
            constant_share=self.constant_share,
            splits=chosen.splits,
            learns_finest=chosen.learns_finest,
        )
