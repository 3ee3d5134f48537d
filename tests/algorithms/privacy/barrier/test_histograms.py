"""Counts of cells: what a record adds, exactly, and what is refused before the charge."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.errors import RefusedError
from algorithms.privacy.barrier.histograms import SHARES, count_cells
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.release import Gaussian
from tests.support.barriers import Free, barrier
from tests.support.bench import made_up, with_record

SIZES = (3, 1, 5)


def cells_of(records: int, rows: int, seed: int = 0) -> Tensor:
    """Random cells, some beyond the last of their histogram, some negative."""
    drawn = np.random.default_rng(seed).integers(-2, 7, (records, rows, len(SIZES)))
    return torch.from_numpy(drawn)


def counted_one_by_one(cells: Tensor) -> list[Fraction]:
    """Each row's share of 1 in the nearest cell, record by record and histogram by histogram."""
    counts = [[Fraction(0)] * size for size in SIZES]
    for record in cells.tolist():
        for histogram, size in enumerate(SIZES):
            kept = [row[histogram] for row in record if row[histogram] >= 0]
            for cell in kept:
                counts[histogram][min(cell, size - 1)] += Fraction(1, len(kept))
    return [count for histogram in counts for count in histogram]


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_counts_are_those_of_one_record_after_the_other(rows: int) -> None:
    cells = cells_of(40, rows)
    counts = [Fraction(count, SHARES) for count in count_cells(cells, SIZES).tolist()]
    expected = counted_one_by_one(cells)
    if rows == 1:
        assert counts == expected
        assert torch.equal(count_cells(cells[:, 0], SIZES), count_cells(cells, SIZES))
    assert all(abs(a - b) <= 40 * Fraction(rows, SHARES) for a, b in zip(counts, expected, strict=True))


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 10, 1000])
def test_a_record_adds_at_most_one_to_each_histogram(rows: int) -> None:
    """Not a bit more, however its rows share it; so its L2 norm is at most the root of the histograms' number."""
    others = cells_of(30, rows, seed=1)
    one = others[:1].clone()
    for same in (False, True):
        if same:
            one[:] = 0
        moved = count_cells(torch.cat([others, one]), SIZES) - count_cells(others, SIZES)
        assert torch.equal(moved, count_cells(one, SIZES))
        of_each = [part.tolist() for part in moved.split(SIZES)]
        assert all(min(part) >= 0 and SHARES - rows <= sum(part) <= SHARES for part in of_each if any(part))
        assert sum(value**2 for part in of_each for value in part) <= len(SIZES) * SHARES**2


def test_the_noise_is_that_of_a_record_in_all_histograms() -> None:
    trace = Trace()
    barrier(made_up(), trace=trace).histograms(
        lambda one, label: label.long()[None].expand(9), [2] * 9, noise=Gaussian(5.0)
    )
    (row,) = trace.rows
    assert row.clip_norm == 3.0 and row.noise_std == pytest.approx(15.0, rel=1e-6)


def test_a_record_whose_cells_cannot_be_found_counts_nowhere() -> None:
    table, usual = torch.eye(3, dtype=torch.int64), made_up(5)
    odd = with_record(usual, usual.features[0], 7)  # a label that the table lacks
    counts = [
        barrier(records).histograms(lambda one, label: table[label], [2] * 3, noise=Gaussian(1e-6))
        for records in (usual, odd)
    ]
    torch.testing.assert_close(*counts, rtol=0, atol=1e-4)
    assert float(counts[0].sum()) == pytest.approx(15.0, abs=1e-3)


@pytest.mark.parametrize(
    ("cells", "sizes"),
    [
        (lambda one, label: torch.zeros(2), [4, 4]),
        (lambda one, label: torch.zeros(2, dtype=torch.int32), [4, 4]),
        (lambda one, label: torch.zeros(3, dtype=torch.int64), [4, 4]),
        (lambda one, label: torch.zeros((), dtype=torch.int64), [4]),
        (lambda one, label: torch.zeros(2, 2, 2, dtype=torch.int64), [4, 4]),
        (lambda one, label: torch.zeros(2, dtype=torch.int64), [4, 0]),
        (lambda one, label: torch.zeros(0, dtype=torch.int64), []),
    ],
)
def test_what_are_no_cells_is_refused_before_the_charge(
    cells: Callable[[Tensor, Tensor], Tensor], sizes: list[int]
) -> None:
    privacy_filter = Free()
    with pytest.raises(RefusedError, match="histograms"):
        barrier(made_up(), privacy_filter=privacy_filter).histograms(cells, sizes, noise=Gaussian(1.0))
    assert privacy_filter.events == []
