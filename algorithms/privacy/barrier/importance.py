"""Importance sampling in two stages, by the norms that the records' gradients last had (Wei et al. 2022, DPIS).

The exact norms are not known before a step's gradients are. So candidates are drawn by bounds on them, which follow
from last norms; a candidate's gradient is clipped to its bound, and it is accepted with probability norm / bound. A
record then takes part with probability rate * |g| / C, g clipped to both, whatever its last norm was: the last norms
decide how many gradients are computed in vain, and where a norm has grown beyond its bound, how much of it counts.

They are private: they live in the barrier, no answer, text or trace shows them or how many records were drawn, and a
checkpoint keeps them among the secrets of its run.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import L2, Clipping, Engine
from algorithms.privacy.mechanisms.mechanisms import Importance
from algorithms.privacy.mechanisms.noise import Stream, is_below

_DOWN = 1.0 - 2.0**-50
"""So that rounding makes no record more likely than its event says."""

_BLURRED = 0.01
"""How near to a bound, relative to it, a norm is neither within nor beyond it."""

Batches = Callable[[NDArray[np.intp]], Iterator[tuple[Tensor, Tensor]]]
Each = Callable[
    [Callable[[Engine, Callable[[], tuple[Tensor, Tensor]]], Tensor], NDArray[np.intp]], Iterator[Tensor]
]


class LastNorms:
    """The norm of each record's gradient when it was last computed; infinite where it never was or was not finite."""

    def __init__(self) -> None:
        self._norms: NDArray[np.float64] | None = None
        self._point: Tensor | None = None
        self._of: Engine | None = None

    def at(
        self, point: Tensor, of: Engine, measured: Callable[[], NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """The norms of all records at a point, [n], infinite where not finite.

        of: whose gradients. measured: computes them in a pass over the records; not called where the last pass was of
        the same engine at the same point.
        """
        is_here = self._of is of and self._point is not None and torch.equal(point, self._point)
        if self._norms is None or not is_here:
            norms = measured()
            self._norms = np.where(np.isfinite(norms), norms, np.inf)
            self._point, self._of = point.clone(), of
        return self._norms

    def bounds(self, count: int, sampling: Importance, clip_norm: float) -> NDArray[np.float64]:
        """Bounds on the norms of `count` records, [count], from floor * C up, times the oversampling."""
        if self._norms is None:
            self._norms = np.full(count, np.inf)
        return sampling.oversampling * np.clip(self._norms, sampling.floor * clip_norm, clip_norm)

    def see(self, rows: NDArray[np.intp], norms: NDArray[np.float64]) -> None:
        """Takes note of new norms, finite or not, of some records."""
        if self._norms is None:
            raise RuntimeError("norms were seen before their records were drawn")
        self._norms[rows] = np.where(np.isfinite(norms), norms, np.inf)
        self._point = None

    def to_tensor(self) -> Tensor | None:
        """What a checkpoint keeps, readable by the owner only: the norms, [n], or None where none were asked for."""
        return None if self._norms is None else torch.from_numpy(self._norms)

    def restore(self, kept: Tensor) -> None:
        """Takes back what `to_tensor` gave."""
        self._norms, self._point = kept.numpy().copy(), None


class Norms:
    """Exact answers that need norms of records' gradients: for the barrier alone, nothing is noised here.

    batches: the records of some indices, in their order, one physical batch after another. each: the same passes, side
    by side. last: what is remembered.
    """

    def __init__(self, engine: Engine, batches: Batches, each: Each, last: LastNorms) -> None:
        self._engine, self._batches, self._each, self.last = engine, batches, each, last

    def total(self, point: Tensor, count: int, bound: L2) -> float:
        """The sum of the norms of all `count` records, each cut off at the bound; one not finite counts as zero."""
        norms = self.last.at(point, self._engine, lambda: self._measured(point, np.arange(count), bound))
        return float(np.where(np.isfinite(norms), np.minimum(norms, bound.norm), 0.0).sum())

    def balance(self, point: Tensor, rows: NDArray[np.intp], bound: L2) -> float:
        """Half of how many more of the chosen records have a norm within the bound than beyond it.

        A norm within 1 % of the bound counts in part: the last bits of a norm differ with the records beside it, and a
        step would let one record change what many others count.
        """
        norms = np.nan_to_num(self._measured(point, rows, bound), nan=np.inf, posinf=np.inf)
        parts = np.clip((1.0 - norms / bound.norm) / (2.0 * _BLURRED), -0.5, 0.5)
        return float(parts.sum())

    def importance_sum(
        self, point: Tensor, count: int, sampling: Importance, clipping: Clipping, stream: Stream
    ) -> Tensor:
        """The sum of C g / |g| over an importance sample of `count` records, shape [d], float64.

        A record without a finite norm is never accepted. Each record's two coins are its own, whatever the others do.
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
            accepted = is_below(words[rows, 1], _clipped(norms, bounds[rows], clip_norm) / bounds[rows])
            self.last.see(rows, norms)
            places = torch.from_numpy(np.flatnonzero(accepted)).to(inputs.device)
            total += found.take(places).clipped_sum(clipping, measured[places]).cpu()
        return total

    def _measured(self, point: Tensor, rows: NDArray[np.intp], bound: L2) -> NDArray[np.float64]:
        """The norms of the chosen records' gradients, [rows], upper bounds; not finite where a gradient is not."""
        each = list(self._each(lambda engine, records: engine.norms(point, *records(), bound), rows))
        found: NDArray[np.float64] = torch.cat(each).cpu().numpy() if each else np.zeros(0)
        return found


def _clipped(
    norms: NDArray[np.float64], bounds: NDArray[np.float64], clip_norm: float
) -> NDArray[np.float64]:
    """Norms after clipping to their bounds and to the clip norm, [n]; zero where not finite."""
    return np.where(np.isfinite(norms), np.minimum(np.minimum(norms, bounds), clip_norm), 0.0)
