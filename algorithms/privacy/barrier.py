"""The barrier: the only place that holds the private records during training.

It answers through releases alone. Each one is validated, its event is charged to the run's filter, and only then are
the records touched, noise is added and the answer is given; an exception after the charge leaves the charge.

Formal guarantees (under the adjacency of the run's plan, for callers that keep to the public methods):
- a release's noise and its event are built from the same `Release`, so the two cannot disagree;
- a record enters a sum through a clipped contribution of its own loss or statistic, never above its bound, whatever the
  other records are, up to the rounding of 32-bit sums (which depends on the batch, and is not small for extreme
  parameters); a model that does not take each record by itself, as seen on made-up inputs, is refused;
- sums are divided by a public constant; an empty sample answers with noise; a record without a finite contribution
  counts as zero.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import L1, L2, Clipping, Line, PerLayer, clip_and_sum
from algorithms.models import Model
from algorithms.privacy import minimiser
from algorithms.privacy.errors import Refused
from algorithms.privacy.filters import Filter
from algorithms.privacy.full_batch import FullBatchAnswers
from algorithms.privacy.noise import Generator, Stream
from algorithms.privacy.noised import draws, noise_std, noised
from algorithms.privacy.performance import Performance, Records
from algorithms.privacy.releases import (
    FullBatch,
    Minimum,
    Noise,
    Release,
    Sampling,
    WithoutReplacement,
    argmin_release,
    gradient_release,
    minimum_release,
    total_release,
)
from algorithms.privacy.trace import Trace

__all__ = ["Barrier", "Performance", "Records"]


class Barrier:
    """Holds records and answers releases about them.

    model: the architecture whose losses are differentiated. spend: the run's filter. generator: the secret source of
    noise and coins. delta: at which the trace states the cost so far. trace: where releases are recorded.
    Raises Refused, before anything is spent, when the model mixes records or the answers could not be private.
    """

    def __init__(
        self,
        records: Records,
        model: Model,
        *,
        spend: Filter,
        generator: Generator,
        delta: float,
        trace: Trace,
        performance: Performance | None = None,
    ) -> None:
        self.__records = records
        self.__generator = generator
        self.__spend = spend
        self.__model = model
        self.__delta = delta
        self.__trace = trace
        self.__performance = performance or Performance()
        self.__engine = self.__performance.engine(model, records)
        self.__whole: FullBatchAnswers | None = None

    def gradient(
        self, parameters: Tensor, *, sampling: Sampling, clipping: Clipping, noise: Noise, divisor: float
    ) -> Tensor:
        """A noised sum of clipped gradients over a sample, divided by a public constant.

        parameters: flat, shape [d], where the gradients are taken. divisor: public, usually the expected batch size.
        Returns shape [d], float32. Raises Refused for a combination without a proven event and BudgetRefused when
        the event is not afforded; nothing is touched then.
        """
        self.__check_points(parameters[None])
        layers = len(self.__model.layers)
        if isinstance(clipping, PerLayer) and len(clipping.norms) != layers:
            raise Refused(
                f"per-layer clipping has {len(clipping.norms)} bounds, the model has {layers} layers;"
                " give one for each."
            )
        release = gradient_release(sampling, clipping, noise, divisor)
        stream = self.__charge(release, dimension=len(parameters))
        total = self.__clipped_sum(parameters.to(self.__performance.device), clipping, release, stream)
        answer = noised(total.numpy(), release, stream) / divisor
        return torch.from_numpy(answer).to(torch.float32).to(parameters.device)

    def total(
        self,
        statistic: Callable[[Tensor, Tensor], Tensor],
        *,
        bound: L1 | L2,
        noise: Noise,
        sampling: Sampling | None = None,
    ) -> Tensor:
        """A noised sum of a statistic of each record, clipped to `bound`.

        statistic: (input [*input_shape], label []) -> [k], of one record alone. Returns shape [k], float64.
        Raises as `gradient` does.
        """
        release = total_release(bound, noise, sampling)
        example = torch.zeros(self.__records.features.shape[1:])
        dimension = statistic(example, torch.tensor(0)).numel()
        stream = self.__charge(release, dimension=dimension)
        total = torch.zeros(dimension, dtype=torch.float64)
        for inputs, labels in self.__slices(self.__sample(release, stream)):
            rows = torch.func.vmap(statistic)(inputs, labels).reshape(len(labels), dimension).double()
            total += clip_and_sum(rows, bound).cpu()
        return torch.from_numpy(noised(total.numpy(), release, stream))

    def argmin(
        self,
        candidates: Tensor | Line,
        *,
        bound: float,
        noise: Noise,
        sampling: Sampling | None = None,
    ) -> int:
        """The index of the candidate whose total loss is least, by noisy selection.

        candidates: parameters, shape [k, d], or a line of them, which is cheaper for a linear model. bound: each
        record's loss is clipped to [0, bound]. Returns 0 .. k - 1. Raises as `gradient` does.
        """
        release = argmin_release(bound, noise, sampling)
        points = candidates.candidates() if isinstance(candidates, Line) else candidates
        self.__check_points(points)
        count = len(points)
        stream = self.__charge(release, dimension=count)
        losses = self.__clipped_losses(candidates, release, stream).cpu()
        losses[~torch.isfinite(points).all(dim=1).cpu()] = (
            torch.inf
        )  # losses there are no numbers, and count as zero
        return int(np.argmax(release.noise_scale * draws(release, stream, count) - losses.numpy()))

    def minimum(self, problem: Minimum, *, noise: Noise) -> Tensor:
        """The minimum of a regularised sum of all records' losses, with noise in the objective or on the result.

        For a linear model with one output and a smooth loss. Returns the parameters, shape [d], float32.
        Raises as `gradient` does, and RuntimeError where the tolerance is out of the arithmetic's reach.
        """
        minimiser.check(self.__model, problem, noise)
        release = minimum_release(problem, noise)
        stream = self.__charge(release, dimension=self.__model.parameter_count)
        records = self.__records
        return minimiser.minimised(self.__model, records.features, records.labels, release, stream).float()

    def affords(self, release: Release) -> bool:
        """Whether a release could be asked for now."""
        return self.__spend.affords(release.event())

    def spent(self, delta: float) -> float:
        """The epsilon spent so far at `delta`, an upper bound."""
        return self.__spend.spent(delta)

    def __check_points(self, points: Tensor) -> None:
        """Raises Refused for points [k, d] at which no release can be made."""
        expected = self.__model.parameter_count
        if points.dim() != 2 or len(points) == 0 or points.shape[1] != expected:
            raise Refused(
                f"points of shape {list(points.shape)} do not fit the model; give one or more of {expected}."
            )

    def __check_number(self, release: Release) -> None:
        """Raises Refused for a sample of fixed size of another number of records, which such a sample makes public."""
        sampling = release.sampling
        if isinstance(sampling, WithoutReplacement) and sampling.records != len(self.__records.labels):
            raise Refused(
                f"a sample without replacement of {sampling.records} records was asked for, but there are others;"
                " it needs their public number."
            )

    def __charge(self, release: Release, *, dimension: int) -> Stream:
        """Charges a release, writes it to the trace and opens its stream of noise and coins."""
        self.__check_number(release)
        event = release.event()
        self.__spend.charge(event)
        self.__trace.record(
            release, event, noise_std=noise_std(release, dimension), epsilon=self.__spend.spent(self.__delta)
        )
        return self.__generator.stream(len(self.__trace.rows) - 1)

    def __clipped_sum(self, point: Tensor, clipping: Clipping, release: Release, stream: Stream) -> Tensor:
        """The exact sum of the sample's clipped gradients, shape [d], float64."""
        is_whole = isinstance(release.sampling, FullBatch) and FullBatchAnswers.clip(clipping)
        answers = self.__full_batch() if is_whole else None
        if answers is not None:
            return answers.clipped_sum(point, clipping).cpu()
        total = torch.zeros(len(point), dtype=torch.float64)
        for inputs, labels in self.__slices(self.__sample(release, stream)):
            total += self.__engine.clipped_sum(point, inputs, labels, clipping).cpu()
        return total

    def __clipped_losses(self, candidates: Tensor | Line, release: Release, stream: Stream) -> Tensor:
        """The exact sums of the sample's clipped losses at each candidate, shape [k], float64."""
        bound = release.clipping.sensitivity
        answers = self.__full_batch() if isinstance(release.sampling, FullBatch) else None
        if answers is not None:
            return answers.clipped_losses(candidates, bound)
        points = candidates.candidates() if isinstance(candidates, Line) else candidates
        points = points.to(self.__performance.device)
        totals = torch.zeros(len(points), dtype=torch.float64, device=points.device)
        for inputs, labels in self.__slices(self.__sample(release, stream)):
            if FullBatchAnswers.serve(self.__model, inputs.shape, self.__performance.memory_mb):
                totals += FullBatchAnswers(self.__model, inputs, labels).clipped_losses(candidates, bound)
                continue
            for index, point in enumerate(points):
                totals[index] += self.__engine.clipped_losses(point, inputs, labels, bound)
        return totals

    def __full_batch(self) -> FullBatchAnswers | None:
        """The closed forms over all records, where the model has them and the records fit the memory."""
        features, performance = self.__records.features, self.__performance
        if self.__whole is None and FullBatchAnswers.serve(
            self.__model, features.shape, performance.memory_mb
        ):
            inputs, labels = (torch.from_numpy(np.array(part)) for part in (features, self.__records.labels))
            self.__whole = FullBatchAnswers(
                self.__model, inputs.to(performance.device), labels.to(performance.device)
            )
        return None if self.__whole is None else self.__whole.at_step(self.__trace.step)

    def __sample(self, release: Release, stream: Stream) -> NDArray[np.intp]:
        """The indices of the records that take part, ascending."""
        count = len(self.__records.labels)
        if isinstance(release.sampling, FullBatch):
            return np.arange(count)
        if isinstance(release.sampling, WithoutReplacement):
            return stream.subset(count, release.sampling.size)
        return np.flatnonzero(stream.coins(count, release.sampling.rate))

    def __slices(self, chosen: NDArray[np.intp]) -> Iterator[tuple[Tensor, Tensor]]:
        """The chosen records in physical batches, on the device."""
        device = self.__performance.device
        size = self.__performance.rows_at_once(self.__records.features, self.__engine.physical_batch)
        for start in range(0, len(chosen), size):
            rows = chosen[start : start + size]
            inputs = torch.from_numpy(self.__records.features[rows]).to(device)
            yield inputs, torch.from_numpy(self.__records.labels[rows]).to(device)
            self.__performance.let_go(self.__records.features)
