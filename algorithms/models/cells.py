"""Rows that are encoded as active cells, as the vectors that models take: unit vectors with a few numbers in them.

Records stay as short as the cells that they activate, in files, in memory and in the passes of a linear model. Other
models take the vectors, by a fixed public map of each record alone.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from algorithms.errors import ModelRefusedError
from algorithms.gradients import BehindSparseMap, SparseMap
from algorithms.models.model import Model


class CellVectors(SparseMap):
    """The vectors of rows: for each position p of a row, weights[p] in the cell that its number says, zeros elsewhere.

    sizes: the number of cells of each position. A number that is no cell's counts as the nearest one that is.

    Example:
        >>> CellVectors((2, 3), (0.6, 0.8))(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        tensor([[0.0000, 0.6000, 0.8000, 0.0000, 0.0000],
                [0.6000, 0.0000, 0.0000, 0.0000, 0.8000]])
    """

    first: Tensor
    last: Tensor

    def __init__(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        super().__init__()
        self.total = sum(sizes)
        # Not persistent, so that they are in no model's file, whose facts have them.
        # [positions]: where each one's cells begin
        first = torch.tensor([0, *accumulate(sizes[:-1])], dtype=torch.int64)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("last", torch.tensor([float(size - 1) for size in sizes]), persistent=False)
        self.register_buffer("numbers", torch.tensor(list(weights)), persistent=False)

    def indices(self, rows: Tensor) -> Tensor:
        """[batch, positions] -> the same, int64: the cell of each position, of which no other has any."""
        codes = torch.minimum(rows.nan_to_num(0.0).round().clamp(min=0.0), self.last.to(rows.dtype))
        return codes.long() + self.first

    def forward(self, rows: Tensor) -> Tensor:
        """[batch, positions] -> [batch, cells]."""
        cell_indices = self.indices(rows)
        # By the form of the rows, not by their number, which an export would take for a constant.
        zeros = torch.zeros_like(rows[:, :1]).expand(-1, self.total)
        return zeros.scatter(1, cell_indices, self.numbers.to(rows.dtype).expand_as(cell_indices))


def behind_cells(model: Model, sizes: Sequence[int], weights: Sequence[float]) -> Model:
    """Put the map of rows to vectors in front of a model of vectors, which then takes rows.

    Raises ModelRefusedError in bfloat16, which rounds the numbers of cells.
    """
    if model.precision == torch.bfloat16:
        raise ModelRefusedError(
            "the table is encoded as numbers of cells, which bfloat16 would round; set {network.precision}"
            " to float32.",
            code="cells_in_bfloat16",
        )
    layers = OrderedDict(cells=CellVectors(sizes, weights), model=model.module)
    return replace(model, module=BehindSparseMap(layers))


def cells_before(module: nn.Module) -> CellVectors | None:
    """The map of rows to vectors in front of a model's module, or None."""
    cells = dict(module.named_children()).get("cells")
    return cells if isinstance(cells, CellVectors) else None
