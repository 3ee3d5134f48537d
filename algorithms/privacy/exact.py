"""Exact answers about the records, which nothing has noised yet: for the barrier alone.

All of them are computed under the same conditions, whatever the process around them has set, and an error of the
arithmetic is raised without what it says, which may be of a record.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import L1, L2, Clipping, Line
from algorithms.gradients.minimum import OutOfReach
from algorithms.models import Model
from algorithms.privacy import minimiser
from algorithms.privacy.ahead import taken_ahead
from algorithms.privacy.errors import Failed
from algorithms.privacy.full_batch import FullBatchAnswers, WholeRecords, loss_sums
from algorithms.privacy.importance import LastNorms, Norms
from algorithms.privacy.noise import Stream
from algorithms.privacy.noised import chosen
from algorithms.privacy.performance import Performance, Records
from algorithms.privacy.releases import FullBatch, Importance, Release
from algorithms.privacy.statistics import Statistic, second_moment_sum, statistic_sum

P = ParamSpec("P")
T = TypeVar("T")

_UNTOLD = (
    "an answer could not be computed; why is not shown, as it may tell of a record:"
    " try the model and the algorithm on public records of the same form."
)
_TOO_LITTLE = "memory did not suffice for an answer; set performance.physical_batch or memory_mb to less."


def _computed(
    answer: Callable[Concatenate["ExactAnswers", P], T],
) -> Callable[Concatenate["ExactAnswers", P], T]:
    """An answer computed under the conditions of the performance; its errors as Failed."""

    @functools.wraps(answer)
    def computed(self: "ExactAnswers", /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with self.performance.computing(self.engine):
                return answer(self, *args, **kwargs)
        except OutOfReach:
            raise
        except (MemoryError, torch.OutOfMemoryError):
            told = _TOO_LITTLE
        except Exception:
            told = _UNTOLD
        raise Failed(told)  # out here, since an error raised while another is handled carries it along

    return computed


class ExactAnswers:
    """Holds records of which a model is asked; `engine` takes its gradients.

    last_norms: what importance sampling knows of the records. Raises Refused where the model mixes records.
    """

    def __init__(
        self, records: Records, model: Model, performance: Performance, last_norms: LastNorms
    ) -> None:
        self.records, self.performance = records, performance
        # A copy, which nobody else can change or switch to training after it was examined.
        self.model = replace(model, module=copy.deepcopy(model.module))
        self.engine = performance.engine(self.model, records)
        self._whole = WholeRecords(self.model, records, performance)
        self._norms = Norms(self.engine, self._batches, last_norms)

    @property
    def last_norms(self) -> LastNorms:
        """What importance sampling knows of the records by now."""
        return self._norms.last

    @_computed
    def ahead_of(self, model: Model) -> tuple[Model, Records]:
        """Another model of these records without the maps in front of it, and the records after those."""
        return taken_ahead(model, self.records, self.performance)

    @_computed
    def clipped_sum(
        self, point: Tensor, clipping: Clipping, release: Release, stream: Stream, *, step: int
    ) -> Tensor:
        """The sum of the sample's clipped gradients at a point [d], in a training step; shape [d], float64."""
        point = self._copied(point)
        if isinstance(release.sampling, Importance):
            return self._norms.importance_sum(point, self._count, release.sampling, clipping, stream)
        is_whole = isinstance(release.sampling, FullBatch) and FullBatchAnswers.clip(clipping)
        answers = self._whole.at_step(step) if is_whole else None
        if answers is not None:
            return answers.clipped_sum(point, clipping).cpu()
        total = torch.zeros(len(point), dtype=torch.float64)
        for inputs, labels in self.drawn(release, stream):
            total += self.engine.clipped_sum(point, inputs, labels, clipping).cpu()
        return total

    @_computed
    def clipped_losses(
        self, candidates: Tensor | Line, release: Release, stream: Stream, *, step: int
    ) -> Tensor:
        """The sums of the sample's clipped losses at each candidate, in a training step; shape [k], float64."""
        bound = release.clipping.sensitivity
        candidates = candidates if isinstance(candidates, Line) else self._copied(candidates)
        answers = self._whole.at_step(step) if isinstance(release.sampling, FullBatch) else None
        if answers is not None:
            return answers.clipped_losses(candidates, bound).cpu()
        batches = self.drawn(release, stream)
        return loss_sums(self.model, self.engine, candidates, batches, bound, self.performance).cpu()

    @_computed
    def statistic_sum(
        self, statistic: Statistic, bound: L1 | L2, dimension: int, release: Release, stream: Stream
    ) -> Tensor:
        """The sum of a statistic of the sample, clipped to the bound; shape [dimension], float64."""
        return statistic_sum(statistic, self.drawn(release, stream), bound, dimension)

    @_computed
    def second_moment_sum(
        self, statistic: Statistic, bound: L2, dimension: int, release: Release, stream: Stream
    ) -> Tensor:
        """The sum of A^T A for each record's matrix A, clipped to the bound; a vector [dimension], float64."""
        return second_moment_sum(statistic, self.drawn(release, stream), bound, dimension)

    @_computed
    def norm_total(self, point: Tensor, bound: L2) -> float:
        """The sum of the norms of all records' gradients at a point [d], each cut off at `bound`."""
        return self._norms.total(self._copied(point), self._count, bound)

    @_computed
    def norm_balance(self, point: Tensor, bound: L2, release: Release, stream: Stream) -> float:
        """Half of how many more of the sample's norms at a point [d] are within `bound` than beyond it."""
        rows = chosen(release.sampling, self._count, stream)
        return self._norms.balance(self._copied(point), rows, bound)

    @_computed
    def minimum(self, release: Release, stream: Stream) -> Tensor:
        """The minimum over all records that a release asks for, noise included; shape [d], float64."""
        return minimiser.minimised(self.model, self.records.features, self.records.labels, release, stream)

    def drawn(self, release: Release, stream: Stream) -> Iterator[tuple[Tensor, Tensor]]:
        """The records that take part, in physical batches, on the device."""
        return self._batches(chosen(release.sampling, self._count, stream))

    def _copied(self, points: Tensor) -> Tensor:
        """Points on the device, of which nothing that a model does to them is seen outside."""
        return points.detach().to(self.performance.device, copy=True)

    @property
    def _count(self) -> int:
        return len(self.records.labels)

    def _batches(self, rows: NDArray[np.intp]) -> Iterator[tuple[Tensor, Tensor]]:
        return self.performance.batches(self.records, rows, self.engine.physical_batch)
