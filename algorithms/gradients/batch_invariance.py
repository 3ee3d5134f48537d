"""Batch invariance: in passes of the run's size a record's values may not depend on the others, bit for bit.

All passes of a run have one size, which follows from public numbers. So a record's contribution depends on that record
alone if its values are the same in every such pass, at each position and beside any other records. Two passes over
made-up records are compared here, in the precision and on the device of training.

Values in passes of another size agree up to rounding, since kernels follow from shapes. Where they agree bit for bit,
which is compared here, too, the number of sampled records may choose between the sizes: it changes no record's values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.gradients.synthetic_inputs import InputSpec, SyntheticBatch

_LARGE_FACTOR = 1e3


@dataclass(frozen=True)
class PassValues:
    """What a pass gives: losses with and without gradients and gradient norms, all [size], and some gradients' digests.

    gradients: one digest for each chosen record.
    """

    losses: Tensor
    evaluated: Tensor
    norms: Tensor
    gradients: list[int]


@dataclass(frozen=True)
class BatchComparison:
    """is_same: whether records have the same values, bit for bit, in passes of one size among other records.

    is_like_alone: whether their losses there are those in passes of one record, up to rounding.
    """

    is_same: bool
    is_like_alone: bool


Compute = Callable[[SyntheticBatch, Sequence[int]], PassValues]
"""Computes a pass over records; also digests the gradients of those at some positions."""


def compare_batches(
    compute: Compute,
    loss_alone: Callable[[SyntheticBatch], Tensor],
    form: InputSpec,
    size: int,
    *,
    seeds: int,
    has_missing: bool,
    tolerance: float,
) -> BatchComparison:
    """Compare made-up records in passes of `size` records, among others and at other positions.

    Args:
        compute: a pass; see `Compute`.
        loss_alone: the loss [1] of one record in a pass of its own.
        form: of the made-up records.
        size: of the passes.
        seeds: how often to compare; small passes hold too few records for rounding to show in one.
        has_missing: whether NaN may be among the others.
        tolerance: of a loss, relative and absolute, for rounding in passes of another size.

    Example:
        Losses that depend on the largest record of a pass:

        >>> form = InputSpec((3,), torch.float32, torch.device("cpu"))
        >>> def compute(sample: SyntheticBatch, indices: Sequence[int]) -> PassValues:
        ...     losses = sample.inputs.sum(dim=1) / sample.inputs.abs().amax()
        ...     return PassValues(losses, losses, losses, [0 for _ in indices])
        >>> def loss_alone(one: SyntheticBatch) -> Tensor:
        ...     return compute(one, []).losses
        >>> compare_batches(compute, loss_alone, form, 64, seeds=1, has_missing=False, tolerance=1e-4)
        BatchComparison(is_same=False, is_like_alone=False)
    """
    is_same = is_like_alone = True
    for seed in range(seeds):
        records, index = form.draw(size, seed), seed % size
        kinds = _other_kinds(form, size, seed + seeds, has_missing=has_missing)
        # Another order of kinds for each seed, so that large, zero and missing neighbours come to every position.
        turn = seed % len(kinds)
        mixed, origins = _among_others(records, index, kinds[turn:] + kinds[:turn], seed)
        copies = torch.nonzero(origins == index)[:, 0].tolist()
        # The same record in two passes: at its own position among its own kind, and as the first and last copy among
        # others. Bits that differ depend on the others.
        before, after = compute(records, [index]), compute(mixed, [copies[0], copies[-1]])
        is_same &= set(before.gradients) == set(after.gradients)
        is_copy = origins >= 0
        for name in ("losses", "evaluated", "norms"):
            first, second = getattr(before, name).cpu()[origins[is_copy]], getattr(after, name).cpu()[is_copy]
            is_same &= torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
        alone, together = loss_alone(records.alone(index)), before.evaluated[index : index + 1]
        is_like_alone &= torch.allclose(alone, together, rtol=tolerance, atol=tolerance, equal_nan=True)
    return BatchComparison(is_same, is_like_alone)


Contributions = Callable[[SyntheticBatch, Sequence[int], int], PassValues]
"""Computes records in passes of a size, without `evaluated`; also digests the gradients at some positions."""


def sizes_that_agree(
    compute: Contributions,
    form: InputSpec,
    size: int,
    smaller: Sequence[int],
    *,
    seeds: int,
    has_missing: bool,
) -> tuple[int, ...]:
    """The smaller sizes in passes of which records have the values, bit for bit, that they have in those of `size`.

    Made-up records fill one pass of `size`, and are then cut into passes of each of the others; the last one is padded.
    Other arguments are as in `compare_batches`.
    """
    agreeing = list(smaller)
    for seed in range(seeds if smaller else 0):
        records = form.draw(size, seed)
        kinds = _other_kinds(form, size, seed + seeds, has_missing=has_missing)
        mixed, _ = _among_others(records, seed % size, kinds, seed)
        # The last rows are those that kernels compute otherwise, if any.
        ends = sorted({*(each - 1 for each in smaller), size - 1})
        for batch in (mixed, records) if seeds > 1 else (mixed,):
            expected = compute(batch, ends, size)
            agreeing = [each for each in agreeing if _is_same(compute(batch, ends, each), expected)]
    return tuple(agreeing)


def _is_same(values: PassValues, expected: PassValues) -> bool:
    """Whether losses, norms and the gradients that were digested are the same bit for bit."""
    pairs = (values.losses, expected.losses), (values.norms, expected.norms)
    same_bits = all(torch.allclose(*pair, rtol=0.0, atol=0.0, equal_nan=True) for pair in pairs)
    return same_bits and values.gradients == expected.gradients


def _other_kinds(form: InputSpec, size: int, seed: int, *, has_missing: bool) -> list[SyntheticBatch]:
    """Records to be beside others: large ones, zeros and missing ones."""
    others = form.draw(size, seed)
    missing = [others.times(math.nan)] if has_missing and form.dtype.is_floating_point else []
    return [others.times(_LARGE_FACTOR), others.times(0.0), *missing]


def _among_others(
    records: SyntheticBatch, position: int, kinds: list[SyntheticBatch], shift: int
) -> tuple[SyntheticBatch, Tensor]:
    """A pass of as many records, and where each came from in `records`, -1 for others, [size].

    Of four, two are copies of one record, as padding is, one is another of the records, and one is of the other kinds
    in turn. Without a shift copies come first and last, where kernels begin and end.
    """
    rows = torch.arange(len(records.labels))
    turn = (rows + shift) % 4
    # Half a pass further on.
    origins = torch.where(turn == 2, (rows + 1 + len(rows) // 2) % len(rows), position)
    mixed, foreign = records.take(origins.to(records.labels.device)), rows[turn == 1]
    for index, kind in enumerate(kinds):
        mixed = kind.among(mixed, foreign[index :: len(kinds)].to(records.labels.device))
    return mixed, torch.where(turn == 1, -1, origins)
