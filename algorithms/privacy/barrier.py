"""The barrier: the only place that holds the private records during training.

It answers through releases alone. Each one is validated, its event is charged to the run's filter, and only then are
the records touched, noise is added and the answer is given; an exception after the charge leaves the charge.

Formal guarantees (under the adjacency of the run's plan, for callers that keep to the public methods):
- a release's noise and its event are built from the same `Release`, so the two cannot disagree;
- a record enters a sum, of 64 bits, through a clipped contribution of its own loss or statistic, never above its bound,
  whatever the other records are; what it contributes is computed in passes that are always full, in which PyTorch's
  kernels take a record alike in any place and company (tested bit for bit on a CPU, not proven; with as few
  threads as `Engine.threads` says); a model that mixes records, as seen on made-up inputs, is refused;
- sums are divided by a public constant; an empty sample answers with noise; a record without a finite contribution
  counts as zero.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import L1, L2, Clipping, Line
from algorithms.models import Model
from algorithms.privacy import minimiser, moments, releases
from algorithms.privacy.ahead import taken_ahead
from algorithms.privacy.checks import check_gradient, check_norms, check_number, check_points
from algorithms.privacy.diagnostics import Answered, Diagnostics
from algorithms.privacy.filters import Filter
from algorithms.privacy.full_batch import FullBatchAnswers, WholeRecords, loss_sums
from algorithms.privacy.importance import LastNorms, Norms
from algorithms.privacy.noise import Generator, Stream
from algorithms.privacy.noised import chosen, least, noise_std, noised
from algorithms.privacy.performance import Performance, Records
from algorithms.privacy.releases import FullBatch, Importance, Minimum, Noise, Release, Sampling
from algorithms.privacy.statistics import Statistic, columns_of, second_moment_sum, shape_of, statistic_sum
from algorithms.privacy.trace import Trace

__all__ = ["Barrier", "Performance", "Records"]


class Barrier:
    """Holds records and answers releases about them.

    model: the architecture whose losses are differentiated. spend: the run's filter. generator: the secret source of
    noise and coins. delta: at which the trace states the cost so far. trace: where releases are recorded. last_norms:
    what importance sampling knows of the records, empty at a run's start. diagnostics: on public records alone, what
    is recorded of each gradient without noise.
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
        last_norms: LastNorms | None = None,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        self.__records = records
        self.__generator = generator
        self.__spend = spend
        self.__model = model
        self.__delta = delta
        self.__trace = trace
        self.__diagnostics = diagnostics
        self.__performance = performance or Performance()
        self.__engine = self.__performance.engine(model, records)
        self.__whole = WholeRecords(model, records, self.__performance)
        size = self.__engine.physical_batch
        self.__slices = partial(self.__performance.batches, records, physical_batch=size)
        self.__norms = Norms(self.__engine, self.__slices, last_norms or LastNorms())

    def gradient(
        self, parameters: Tensor, *, sampling: Sampling, clipping: Clipping, noise: Noise, divisor: float
    ) -> Tensor:
        """A noised sum of clipped gradients over a sample, divided by a public constant.

        parameters: flat, shape [d], where the gradients are taken. divisor: public, usually the expected batch size.
        Returns shape [d], float32. Raises Refused for a combination without a proven event and BudgetRefused when
        the event is not afforded; nothing is touched then.
        """
        check_gradient(self.__model, parameters, sampling, clipping)
        release = releases.gradient_release(sampling, clipping, noise, divisor)
        stream = self.__charge(release, dimension=len(parameters))
        point = parameters.to(self.__performance.device)
        total = self.__clipped_sum(point, clipping, release, stream).numpy()
        noisy = noised(total, release, stream)
        self.__measure(Answered(point, clipping, divisor, total, noisy), release)
        return torch.from_numpy(noisy / divisor).to(torch.float32).to(parameters.device)

    def total(
        self, statistic: Statistic, *, bound: L1 | L2, noise: Noise, sampling: Sampling | None = None
    ) -> Tensor:
        """A noised sum of a statistic of each record, clipped to `bound`.

        statistic: (input [*input_shape], label []) -> [k], of one record alone. Returns shape [k], float64.
        Raises as `gradient` does.
        """
        release = releases.total_release(bound, noise, sampling)
        dimension = shape_of(statistic, self.__records).numel()
        stream = self.__charge(release, dimension=dimension)
        total = statistic_sum(statistic, self.__drawn(release, stream), bound, dimension)
        return torch.from_numpy(noised(total.numpy(), release, stream))

    def moment(self, statistic: Statistic, *, bound: L2, noise: Noise) -> Tensor:
        """A noised sum over all records of A^T A for a matrix A of each, clipped to Frobenius norm `bound`.

        statistic: (input [*input_shape], label []) -> A [m, c]. Returns [c, c], float64. Raises as `gradient` does.
        """
        release, columns = releases.total_release(bound, noise), columns_of(statistic, self.__records)
        stream = self.__charge(release, dimension=moments.dimension(columns))
        batches = self.__drawn(release, stream)
        total = second_moment_sum(statistic, batches, bound, moments.dimension(columns))
        return moments.as_matrix(torch.from_numpy(noised(total.numpy(), release, stream)), columns)

    def norm_total(self, parameters: Tensor, *, bound: L2, noise: Noise) -> float:
        """A noised sum of the norms of all records' gradients, each cut off at `bound`.

        Later importance samples draw by these norms. Raises as `gradient` does.
        """
        check_norms(self.__model, parameters)
        release = releases.norm_total_release(bound, noise)
        stream = self.__charge(release, dimension=1)
        point = parameters.to(self.__performance.device)
        total = self.__norms.total(point, len(self.__records.labels), bound)
        return float(noised(np.array([total]), release, stream)[0])

    def norm_count(
        self, parameters: Tensor, *, bound: L2, noise: Noise, sampling: Sampling | None = None
    ) -> float:
        """A noised sum over a sample of 1/2 where a gradient's norm is at most `bound`, else -1/2.

        Within 1 % of the bound it is a number between the two, as rounding must not move it from one to the other. For
        clipping by quantiles (Andrew et al. 2021, Section 2). Raises as `gradient` does.
        """
        check_norms(self.__model, parameters, bound)
        release = releases.norm_count_release(noise, sampling)
        stream = self.__charge(release, dimension=1)
        point = parameters.to(self.__performance.device)
        balance = self.__norms.balance(point, self.__sample(release, stream), bound)
        return float(noised(np.array([balance]), release, stream)[0])

    def argmin(
        self, candidates: Tensor | Line, *, bound: float, noise: Noise, sampling: Sampling | None = None
    ) -> int:
        """The index of the candidate whose total loss is least, by noisy selection.

        candidates: parameters, shape [k, d], or a line of them, cheaper over all records of a linear model. bound: each
        record's loss is clipped to [0, bound]. Returns 0 .. k - 1. Raises as `gradient` does.
        """
        release = releases.argmin_release(bound, noise, sampling)
        points = candidates.candidates if isinstance(candidates, Line) else candidates
        check_points(self.__model, points)
        stream = self.__charge(release, dimension=len(points))
        return least(self.__clipped_losses(candidates, release, stream).cpu(), points.cpu(), release, stream)

    def minimum(self, problem: Minimum, *, noise: Noise) -> Tensor:
        """The minimum of a regularised sum of all records' losses, with noise in the objective or on the result.

        For a linear model with one output and a smooth loss. Returns the parameters, shape [d], float32.
        Raises as `gradient` does, and RuntimeError where the tolerance is out of the arithmetic's reach.
        """
        minimiser.check(self.__model, problem, noise)
        release = releases.minimum_release(problem, noise)
        stream = self.__charge(release, dimension=self.__model.parameter_count)
        records = self.__records
        return minimiser.minimised(self.__model, records.features, records.labels, release, stream).float()

    def about(self, model: Model) -> "Barrier":
        """The same records, budget, noise and trace, asked about another model of them."""
        model, records = taken_ahead(model, self.__records, self.__performance)
        return Barrier(
            records,
            model,
            spend=self.__spend,
            generator=self.__generator,
            delta=self.__delta,
            trace=self.__trace,
            performance=self.__performance,
            last_norms=self.__norms.last,
            diagnostics=self.__diagnostics,
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one record's features, which the data card declares."""
        return tuple(self.__records.features.shape[1:])

    def affords(self, release: Release) -> bool:
        """Whether a release could be asked for now."""
        return self.__spend.affords(release.event())

    def spent(self, delta: float) -> float:
        """The epsilon spent so far at `delta`, an upper bound."""
        return self.__spend.spent(delta)

    def __charge(self, release: Release, *, dimension: int) -> Stream:
        """Charges a release, writes it to the trace and opens its stream of noise and coins."""
        check_number(release.sampling, self.__records)
        event = release.event()
        self.__spend.charge(event)
        self.__trace.record(
            release, event, noise_std=noise_std(release, dimension), epsilon=self.__spend.spent(self.__delta)
        )
        return self.__generator.stream(len(self.__trace.rows) - 1)

    def __measure(self, answered: Answered, release: Release) -> None:
        """Hands a gradient's sample, drawn once more with the same coins, to the diagnostics if there are any."""
        if self.__diagnostics is None or isinstance(release.sampling, Importance):
            return
        place = len(self.__trace.rows) - 1, self.__trace.step
        batches = self.__drawn(release, self.__generator.stream(place[0]))
        self.__diagnostics.measure(answered, self.__engine, batches, place=place)

    def __clipped_sum(self, point: Tensor, clipping: Clipping, release: Release, stream: Stream) -> Tensor:
        """The exact sum of the sample's clipped gradients, shape [d], float64."""
        is_whole = isinstance(release.sampling, FullBatch) and FullBatchAnswers.clip(clipping)
        answers = self.__whole.at_step(self.__trace.step) if is_whole else None
        if answers is not None:
            return answers.clipped_sum(point, clipping).cpu()
        if isinstance(release.sampling, Importance):
            count = len(self.__records.labels)
            return self.__norms.importance_sum(point, count, release.sampling, clipping, stream)
        total = torch.zeros(len(point), dtype=torch.float64)
        for inputs, labels in self.__drawn(release, stream):
            total += self.__engine.clipped_sum(point, inputs, labels, clipping).cpu()
        return total

    def __clipped_losses(self, candidates: Tensor | Line, release: Release, stream: Stream) -> Tensor:
        """The exact sums of the sample's clipped losses at each candidate, shape [k], float64."""
        bound = release.clipping.sensitivity
        answers = self.__whole.at_step(self.__trace.step) if isinstance(release.sampling, FullBatch) else None
        if answers is not None:
            return answers.clipped_losses(candidates, bound)
        batches = self.__drawn(release, stream)
        return loss_sums(self.__model, self.__engine, candidates, batches, bound, self.__performance)

    def __sample(self, release: Release, stream: Stream) -> NDArray[np.intp]:
        """The indices of the records that take part, ascending."""
        return chosen(release.sampling, len(self.__records.labels), stream)

    def __drawn(self, release: Release, stream: Stream) -> Iterator[tuple[Tensor, Tensor]]:
        """The records that take part, in physical batches, on the device."""
        return self.__slices(self.__sample(release, stream))
