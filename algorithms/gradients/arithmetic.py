"""Norms that are upper bounds despite rounding, and the size of a run's passes.

A contribution is clipped by its norm, but the sum is computed with other products than the norm, in another order. So
each estimate of a norm includes a margin for the rounding of the contribution.

A matrix product computes rows that do not fill its kernel in another order, which changes their last bits. If a
function has a kink, one bit can decide a whole gradient, so adding a record could change the gradients of many.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

_IN_CACHE = 2**16
"""Numbers that stay in a CPU's cache for several passes."""

_MAX_DEVIATIONS = 9
"""Standard deviations from the mean beyond which no Poisson sample is expected to be."""

MAX_SMALLER_SIZES, _WORTH_A_SIZE = 3, 0.01
"""How many smaller sizes a last pass may have, each of which is compared; the share of slots that one must save."""

_BLOCK = 256
"""Values that are summed in their own type, before these sums are added in 64 bits: few enough for rounding, enough for
speed."""


def wide(values: Tensor) -> Tensor:
    """Values in at least 32 bits."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def square_norms(rows: Tensor) -> Tensor:
    """Squared L2 norm of each row, [batch, ...] -> [batch], float64, relative error below 1e-6 (1e-14 in float64).

    Infinite if the squares overflow the rows' type.
    """
    rows = wide(rows.flatten(start_dim=1)).contiguous()  # with other strides PyTorch sums one value at a time
    if rows.shape[1] <= _BLOCK:  # few enough to be summed in their own type
        return _squares(rows, 1)
    block = _block(rows.shape[1])
    whole = rows.shape[1] // block * block  # values in full blocks; the rest is a block of its own
    blocks = _squares(torch.unflatten(rows[:, :whole], 1, (-1, block)), 2).sum(dim=1)
    return blocks + _squares(rows[:, whole:], 1) if whole < rows.shape[1] else blocks


@functools.cache
def _block(width: int) -> int:
    """The number of values to sum together, out of `width`: without a remainder if that is possible."""
    return next((block for block in range(_BLOCK, _BLOCK // 2, -1) if width % block == 0), _BLOCK)


def absolute_norms(rows: Tensor) -> Tensor:
    """L1 norm of each row, [batch, ...] -> [batch], float64."""
    return wide(rows.flatten(start_dim=1)).abs().sum(dim=1, dtype=torch.float64)


def rounding(terms: int, dtype: torch.dtype) -> float:
    """The rounding error of a sum of products, relative to the sum of their absolute values.

    terms: the number of products. This is the worst case for terms of equal size, as from a constant background: all
    are rounded the same way, each relative to the sum so far, which is half of the total on average (Higham 2002,
    "Accuracy and Stability of Numerical Algorithms", section 4.2). The general worst case is twice as large.
    """
    return torch.finfo(dtype).eps / 2 * (6.0 + 0.5 * terms)  # `eps / 2` is the unit roundoff


def add_rounding_margin(squares: Tensor, sizes: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """Squared norms plus a margin for rounding in a sum of `terms` products of given sizes, all [batch], float64."""
    # Norms add, squares do not: the margin is a length by the triangle inequality.
    return (squares.clamp(min=0.0).sqrt() + rounding(terms, dtype) * sizes).square()


def square_distances(rows: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Squared L2 norms of (row - shift) / scale, with a margin for rounding under cancellation; [batch], float64."""
    shift, scale = shift.to(wide(rows).dtype), scale.to(wide(rows).dtype)
    moved, inverse = shift / scale, scale.reciprocal()
    size = max(1, _IN_CACHE // max(1, rows.shape[1]))  # rows at a time
    return torch.cat([_square_distances(wide(part), moved, inverse) for part in torch.split(rows, size)])


def _square_distances(rows: Tensor, moved: Tensor, inverse: Tensor) -> Tensor:
    scaled = rows * inverse
    sizes = square_norms(scaled).sqrt()
    return add_rounding_margin(square_norms(scaled.sub_(moved)), sizes, 1, scaled.dtype)


def _squares(values: Tensor, dimension: int) -> Tensor:
    """Sums of squares along a dimension, float64, with a margin for squares that underflow the type."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=dimension)
    lost = values.shape[dimension] * torch.finfo(values.dtype).tiny
    return norms.double().square().add_(lost)


KERNEL_BATCH = 64
"""A batch size that fills all products' kernels; its multiples give the same bits with up to `Engine.max_threads`."""

MIN_KERNEL_BATCH = 32
"""The smallest batch size that fills all kernels."""


def round_batch(count: int) -> int:
    """The largest allowed batch size up to `count`: a multiple of 64, or 32, or any smaller number."""
    return count // KERNEL_BATCH * KERNEL_BATCH if count >= KERNEL_BATCH else min(count, MIN_KERNEL_BATCH)


_SMALL_SIZES = (1, 2, 4, 8, 12, 16, 24, MIN_KERNEL_BATCH, 48)
_LARGER_SIZES = *range(64, 128, 16), *range(128, 256, 32), *range(256, 1024, 64)
_LAST_SIZES = *_SMALL_SIZES, *_LARGER_SIZES
"""The sizes of which a sample's last pass may have some that are smaller than the usual one."""


def pass_sizes(maximum: int) -> list[int]:
    """The sizes that passes may have, up to `maximum` records: few below 64, and its multiples."""
    return [size for size in _SMALL_SIZES if size <= maximum] + [
        *range(KERNEL_BATCH, maximum + 1, KERNEL_BATCH)
    ]


@dataclass(frozen=True)
class PassCounts:
    """Passes of a size over Poisson samples of an expected size, at least one for each sample.

    mean_full: how many come before a sample's last pass, on average. at_most: for each number of records from none to
    `size`, the chance that the last pass has no more.
    """

    size: int
    mean_full: float
    at_most: tuple[float, ...]

    @classmethod
    def of(cls, size: int, expected_batch: float) -> Self:
        """Those of a size.

        Example:
            >>> [round(PassCounts.of(size, 16.0).mean_full, 1) for size in (8, 16, 32)]
            [1.4, 0.4, 0.0]
        """
        spread = _MAX_DEVIATIONS * math.sqrt(expected_batch) + _MAX_DEVIATIONS
        first, last = int(max(0.0, expected_batch - spread)), int(expected_batch + spread)
        # Log-probabilities of Poisson(expected_batch), up to a constant that `softmax` divides out.
        counts = torch.arange(first, last + 1, dtype=torch.float64)
        logs = counts * math.log(max(expected_batch, 1e-9)) - torch.lgamma(counts + 1.0)
        chances = torch.softmax(logs, dim=0)
        # Full passes before the last one, which is never empty.
        before = counts.sub(1.0).clamp(min=0.0).div(size, rounding_mode="floor")
        # Records of the last pass; an empty sample has a pass of one.
        left = (counts.clamp(min=1.0) - before * size).long()
        at_most = torch.zeros(size + 1, dtype=torch.float64).index_add_(0, left, chances).cumsum(0)
        return cls(size, float(before @ chances), tuple(at_most.tolist()))

    def slots(self, smaller: Sequence[int]) -> float:
        """How many slots for records they have on average if a last pass may have one of the smaller sizes, ascending.

        Example:
            >>> [round(PassCounts.of(size, 64.0).slots(())) for size in (64, 128)]
            [94, 128]
            >>> round(PassCounts.of(128, 64.0).slots((64, 80)))
            73
        """
        sizes = (0, *smaller, self.size)
        # A pass grows from one of its sizes to the next where there are more records than slots.
        grown = ((larger - less) * (1.0 - self.at_most[less]) for less, larger in pairwise(sizes))
        return self.mean_full * self.size + sum(grown)

    def smaller_sizes(self, maximum: int = MAX_SMALLER_SIZES) -> tuple[int, ...]:
        """At most `maximum` smaller sizes with which passes have few slots, found one after another; ascending.

        Example:
            >>> [PassCounts.of(size, 64.0).smaller_sizes() for size in (64, 128)]
            [(8, 16, 24), (64, 80)]
        """
        chosen: tuple[int, ...] = ()
        for _ in range(maximum):
            sets = [tuple(sorted((*chosen, size))) for size in _LAST_SIZES if size < self.size]
            best = min(sets, key=self.slots, default=())
            if self.slots(best) > (1.0 - _WORTH_A_SIZE) * self.slots(chosen):
                break
            chosen = best
        return chosen


class Sliceable(Protocol):
    """A batch as a tensor, or the indices of its records as an array."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Any: ...


S = TypeVar("S", bound=Sliceable)


def split_passes(rows: S, size: int) -> Iterator[S]:
    """Split a batch into passes of at most `size` records; the engine pads the last one.

    Example:
        >>> [len(part) for part in split_passes(torch.zeros(150, 3), 64)]
        [64, 64, 22]
    """
    return (rows[start : start + size] for start in range(0, len(rows), size))


def pad_to_multiple(values: Tensor, step: int = KERNEL_BATCH) -> Tensor:
    """Pad a batch, [batch, ...] with at least one record, to a multiple of `step` by repeating the last record.

    A copy is a record that can occur, where a row of zeros may be none, such as a text without words. What is computed
    of it is dropped, and no other record's result depends on it, as the inspection has found of the model.

    Example:
        >>> pad_to_multiple(torch.tensor([5.0, 7.0, 9.0]), 2)
        tensor([5., 7., 9., 9.])
    """
    missing = -len(values) % step  # 0 to step - 1
    return torch.cat([values, values[-1:].expand(missing, *values.shape[1:])]) if missing else values
