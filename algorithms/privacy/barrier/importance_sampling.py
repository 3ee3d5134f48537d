"""Sums over importance samples, which records enter by the norms of their gradients (Wei et al. 2022, DPIS)."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import Clipping, Engine, split_passes
from algorithms.gradients.devices import upload
from algorithms.privacy.barrier.record_loader import Batch, RowIndices
from algorithms.privacy.mechanisms.noise import Stream, is_below
from algorithms.privacy.mechanisms.sampling import Importance

_ROUND_DOWN = 1.0 - 2.0**-50
"""A factor that keeps probabilities within those of the event despite rounding."""


class LastNorms:
    """The norm of each record's gradient when last computed; infinite if it never was, or was not finite.

    They are private: they stay in the barrier, no answer, text or trace shows them or the number of drawn records, and
    a checkpoint stores them among the secrets of its run.
    """

    def __init__(self) -> None:
        self._norms: NDArray[np.float64] | None = None
        self._point: Tensor | None = None
        self._engine: Engine | None = None

    def at(
        self, point: Tensor, engine: Engine, compute: Callable[[], NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """The norms of all records at a point, [n], infinite if not finite.

        compute: a pass over the records; it is not called if the last pass had the same engine and point.
        """
        is_here = self._engine is engine and self._point is not None and torch.equal(point, self._point)
        if self._norms is None or not is_here:
            norms = compute()
            self._norms = np.where(np.isfinite(norms), norms, np.inf)
            self._point, self._engine = point.clone(), engine
        return self._norms

    def bounds(self, count: int, sampling: Importance, clip_norm: float) -> NDArray[np.float64]:
        """Bounds on the norms of `count` records, [count]: at least floor * C, times the oversampling."""
        if self._norms is None:
            self._norms = np.full(count, np.inf)
        # Room for norms that have grown since.
        return sampling.oversampling * np.clip(self._norms, sampling.floor * clip_norm, clip_norm)

    def remember(self, rows: RowIndices, norms: NDArray[np.float64]) -> None:
        """Remember new norms of some records, finite or not.

        Raises RuntimeError for norms from before their records were drawn.
        """
        if self._norms is None:
            raise RuntimeError("norms were computed before their records were drawn")
        self._norms[rows] = np.where(np.isfinite(norms), norms, np.inf)
        self._point = None

    def to_tensor(self) -> Tensor | None:
        """The norms for a checkpoint, [n], which only the owner may read; None if there are none."""
        return None if self._norms is None else torch.from_numpy(self._norms)

    def restore(self, norms: Tensor) -> None:
        """Restore the norms from `to_tensor`."""
        self._norms, self._point = norms.numpy().copy(), None


def importance_sum(
    point: Tensor,
    count: int,
    sampling: Importance,
    clipping: Clipping,
    stream: Stream,
    *,
    engine: Engine,
    load: Callable[[RowIndices], Batch],
    last: LastNorms,
    by_weight: bool = False,
) -> Tensor:
    """The sum of C g / |g| over an importance sample of `count` records, shape [d], float64.

    The exact norms are unknown before a step's gradients are computed. So candidates are drawn by bounds that follow
    from the last norms. A candidate's gradient is clipped to its bound, and the candidate is accepted with probability
    norm / bound. A record thus takes part with probability rate * |g| / C, for g clipped to both, whatever its last
    norm was: these only decide how many gradients are computed in vain, and how much of a norm that has outgrown its
    bound counts. A record without a finite norm is never accepted. Each record has two coins of its own.

    load: gives the records at some indices, on the device. by_weight: weigh what is not accepted 0 instead of leaving
    it out, as an accelerator does, where the host then waits once. Source: Wei et al. 2022 (DPIS).
    """
    words, clip_norm = stream.pairs(count), clipping.sensitivity
    bounds = last.bounds(count, sampling, clip_norm)
    # A candidate by rate * bound / C, accepted by |g| / bound, is a record that takes part by rate * |g| / C.
    candidates = np.flatnonzero(is_below(words[:, 0], _ROUND_DOWN * sampling.rate * bounds / clip_norm))
    # Halves of 32 bits: a device compares them in float64, which does not hold all words of 64 bits.
    coins = torch.from_numpy(np.stack(np.divmod(words[:, 1], 2**32), axis=1).astype(np.float64))

    def sum_pass(rows: RowIndices, *, by_weight: bool) -> tuple[Tensor, Tensor]:
        """The sum over a pass's accepted records, and the norms of all; by weight, one that is not finite spoils it."""
        total, norms, start = torch.zeros_like(point, dtype=torch.float64), list[Tensor](), 0
        for sum_of_pass, inputs, labels in engine.in_parts(point, *load(rows)):
            rows_of_part, device = rows[start : start + len(labels)], inputs.device
            start += len(labels)
            limits = upload(torch.from_numpy(bounds[rows_of_part]), device)()
            norms.append(sum_of_pass.norms(clipping))
            # |g|, clipped to the bound and to C, [records]
            clipped = torch.minimum(norms[-1], limits).clamp(max=clip_norm)
            chances = torch.where(torch.isfinite(norms[-1]), clipped, 0.0) / limits
            accepted = are_below(upload(coins[torch.from_numpy(rows_of_part)], device)(), chances)
            added = torch.zeros(len(point), dtype=torch.float64, device=device)
            if by_weight:  # a norm of infinity gives the weight 0
                sum_of_pass.add_clipped_if_finite(
                    clipping, added, torch.where(accepted, norms[-1], torch.inf)
                )
            else:
                chosen = torch.nonzero(accepted)[:, 0]  # all of them are finite
                sum_of_pass.take(chosen).add_clipped_if_finite(clipping, added, norms[-1][chosen])
            total += added.to(total.device)
        return total, torch.cat(norms)

    total, norms = torch.zeros_like(point, dtype=torch.float64), list[Tensor]()
    passes = list(split_passes(candidates, engine.physical_batch))
    for rows in passes:
        sum_of_pass, of_pass = sum_pass(rows, by_weight=by_weight)
        # Of a pass that is spoilt nothing; it is taken again below.
        total += torch.where(of_pass.amax() < torch.inf, sum_of_pass, 0.0) if by_weight else sum_of_pass
        norms.append(of_pass)
    measured = torch.cat(norms).cpu().numpy() if norms else np.zeros(0)  # the one wait for a device
    known = split_passes(np.isfinite(measured), engine.physical_batch)
    for rows, are_finite in zip(passes, known, strict=True) if by_weight else ():
        if not are_finite.all():
            total += sum_pass(rows, by_weight=False)[0]
    last.remember(candidates, measured)
    return total


def are_below(words: Tensor, rates: Tensor) -> Tensor:
    """`is_below` on a device, [n]; words: [n, 2], the upper and the lower 32 bits of each, in 64-bit floats."""
    is_certain = rates >= 1.0
    # Factors of a power of two, and what is left below 1, are exact.
    scaled = torch.where(is_certain, 0.0, rates) * 2.0**32
    upper = scaled.floor()
    lower = ((scaled - upper) * 2.0**32).floor()
    is_in_lower = (words[:, 0] == upper) & (words[:, 1] < lower)  # equal in the upper 32 bits
    return is_certain | (words[:, 0] < upper) | is_in_lower
