"""Histograms of records: cells of single records, and their counts as whole numbers.

A record lies in one cell of each histogram and counts 1 there. A person has a cell for each row; these share the 1, so
a record's counts in a histogram are never negative and are at most 1 in all, and those in F histograms have an L2 norm
of at most sqrt(F). Counts are whole numbers of `SHARES`, so that sums are exact in any order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.errors import RefusedError

SHARES = 2**24
"""The parts of a 1 that are counted: a person's rows may be as many, and a sum of 64 bits holds 2^39 records."""


def check_cells(example: Tensor, sizes: Sequence[int]) -> None:
    """Raises RefusedError unless a record's cells are whole numbers, one of each histogram, as `count_cells` takes.

    example: the cells of a made-up record.
    """
    if not sizes or min(sizes) < 1:
        raise RefusedError(f"histograms have a cell or more each, not {list(sizes)}; give the size of each.")
    if example.dtype != torch.int64 or example.dim() not in (1, 2) or example.shape[-1] != len(sizes):
        raise RefusedError(
            f"a record has one cell, int64, in each of {len(sizes)} histograms, not {list(example.shape)} of"
            f" {example.dtype}; give [histograms], or [rows, histograms] of a person."
        )


def count_cells(cells: Tensor, sizes: Sequence[int]) -> Tensor:
    """How many records lie in each cell, one histogram after another.

    Args:
        cells: int64 [batch, histograms], or [batch, rows, histograms] of people. One beyond a histogram's last cell
            counts as the last; a negative one does not count.
        sizes: Cells of each histogram.

    Returns:
        int64 [sum(sizes)], in units of 1 / SHARES.

    Example:
        >>> import torch
        >>> (count_cells(torch.tensor([[0, 2], [0, -1]]), [2, 3]) / SHARES).tolist()
        [2.0, 0.0, 0.0, 0.0, 1.0]
    """
    rows = cells.reshape(len(cells), -1, len(sizes))
    size = torch.tensor(sizes, device=cells.device)
    starts = size.cumsum(0) - size
    is_counted = rows >= 0
    # Rounded down, so that a person's rows are never more than 1 together.
    share = SHARES // is_counted.sum(1, keepdim=True).clamp(min=1)
    at = starts + torch.minimum(rows.clamp(min=0), size - 1)
    counts = torch.zeros(sum(sizes), dtype=torch.int64, device=cells.device)
    return counts.index_add_(0, at.flatten(), torch.where(is_counted, share, 0).flatten())
