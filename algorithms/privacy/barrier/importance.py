"""Importance sampling in two stages, by the norms that the records' gradients last had (Wei et al. 2022, DPIS).

The exact norms are unknown before a step's gradients are computed. So candidates are drawn by bounds that follow from
the last norms. A candidate's gradient is clipped to its bound, and the candidate is accepted with probability norm /
bound. A record thus takes part with probability rate * |g| / C, for g clipped to both, whatever its last norm was. The
last norms only decide how many gradients are computed in vain, and how much of a norm that has outgrown its bound
counts.

They are private: they stay in the barrier, no answer, text or trace shows them or the number of drawn records, and a
checkpoint stores them among the secrets of its run.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import L2, Clipping, Engine
from algorithms.privacy.barrier.performance import Batch, Load, Rows
from algorithms.privacy.mechanisms.noise import Stream, is_below
from algorithms.privacy.mechanisms.release import Importance

_DOWN = 1.0 - 2.0**-50
"""A factor that keeps probabilities within those of the event despite rounding."""

_BLURRED = 0.01
"""Relative distance from a bound within which a norm counts in part."""

Batches = Callable[[Rows], Iterator[Batch]]
Each = Callable[[Callable[[Engine, Load], Tensor], Rows], Iterator[Tensor]]


class LastNorms:
    """The norm of each record's gradient when last computed; infinite if it never was, or was not finite."""

    def __init__(self) -> None:
        self._norms: NDArray[np.float64] | None = None
        self._point: Tensor | None = None
        self._of: Engine | None = None

    def at(
        self, point: Tensor, of: Engine, measured: Callable[[], NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """The norms of all records at a point, [n], infinite if not finite.

        of: the engine. measured: computes the norms in a pass over the records; it is not called if the last pass had
        the same engine and point.
        """
        is_here = self._of is of and self._point is not None and torch.equal(point, self._point)
        if self._norms is None or not is_here:
            norms = measured()
            self._norms = np.where(np.isfinite(norms), norms, np.inf)
            self._point, self._of = point.clone(), of
        return self._norms

    def bounds(self, count: int, sampling: Importance, clip_norm: float) -> NDArray[np.float64]:
        """Bounds on the norms of `count` records, [count]: at least floor * C, times the oversampling."""
        if self._norms is None:
            self._norms = np.full(count, np.inf)
        return sampling.oversampling * np.clip(self._norms, sampling.floor * clip_norm, clip_norm)

    def see(self, rows: Rows, norms: NDArray[np.float64]) -> None:
        """Remember new norms of some records, finite or not."""
        if self._norms is None:
            raise RuntimeError("norms were seen before their records were drawn")
        self._norms[rows] = np.where(np.isfinite(norms), norms, np.inf)
        self._point = None

    def to_tensor(self) -> Tensor | None:
        """The norms for a checkpoint, [n], which only the owner may read; None if there are none."""
        return None if self._norms is None else torch.from_numpy(self._norms)

    def restore(self, kept: Tensor) -> None:
        """Restore the norms from `to_tensor`."""
        self._norms, self._point = kept.numpy().copy(), None


class Norms:
    """Exact answers from the norms of gradients: before noise, for the barrier alone.

    batches: yields the records at some indices in physical batches. each: runs the same passes in parallel. last: the
    remembered norms.
    """

    def __init__(self, engine: Engine, batches: Batches, each: Each, last: LastNorms) -> None:
        self._engine, self._batches, self._each, self.last = engine, batches, each, last

    def total(self, point: Tensor, count: int, bound: L2) -> float:
        """The sum of the norms of all `count` records, each clipped to the bound; zero if not finite."""
        norms = self.last.at(point, self._engine, lambda: self._measured(point, np.arange(count), bound))
        return float(np.where(np.isfinite(norms), np.minimum(norms, bound.norm), 0.0).sum())

    def balance(self, point: Tensor, rows: Rows, bound: L2) -> float:
        """Half the difference between the numbers of chosen records with norms within and above the bound.

        Norms within 1 % of the bound count in part: the last bits of a norm depend on the batch, and with a step one
        record could change the contributions of many.
        """
        norms = np.nan_to_num(self._measured(point, rows, bound), nan=np.inf, posinf=np.inf)
        parts = np.clip((1.0 - norms / bound.norm) / (2.0 * _BLURRED), -0.5, 0.5)
        return float(parts.sum())

    def importance_sum(
        self, point: Tensor, count: int, sampling: Importance, clipping: Clipping, stream: Stream
    ) -> Tensor:
        """The sum of C g / |g| over an importance sample of `count` records, shape [d], float64.

        A record without a finite norm is never accepted. Each record has two coins of its own.
        """
        words, clip_norm = stream.pairs(count), clipping.sensitivity
        bounds = self.last.bounds(count, sampling, clip_norm)
        candidates = np.flatnonzero(is_below(words[:, 0], _DOWN * sampling.rate * bounds / clip_norm))
        total, start = torch.zeros(len(point), dtype=torch.float64), 0
        for inputs, labels in self._batches(candidates):
            rows = candidates[start : start + len(labels)]
            start += len(labels)
            found = self._engine.contributions(point, inputs, labels)
            measured = found.norms(clipping)
            norms = measured.cpu().numpy()
            clipped = np.minimum(np.minimum(norms, bounds[rows]), clip_norm)
            chances = np.where(np.isfinite(norms), clipped, 0.0) / bounds[rows]
            accepted = is_below(words[rows, 1], chances)
            self.last.see(rows, norms)
            places = torch.from_numpy(np.flatnonzero(accepted)).to(inputs.device)
            total += found.take(places).clipped_sum(clipping, measured[places]).cpu()
        return total

    def _measured(self, point: Tensor, rows: Rows, bound: L2) -> NDArray[np.float64]:
        """Upper bounds on the norms of the chosen records' gradients, [rows]; not finite if a gradient is not."""
        each = list(self._each(lambda engine, records: engine.norms(point, *records(), bound), rows))
        found: NDArray[np.float64] = torch.cat(each).cpu().numpy() if each else np.zeros(0)
        return found
