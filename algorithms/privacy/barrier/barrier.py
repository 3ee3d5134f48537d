"""The barrier: the only code that holds the private records during training.

It answers queries by releases alone. It validates a release, charges its event to the run's filter, and only then reads
the records and adds noise. An exception after the charge keeps the charge and says nothing about the records. An
impossible query must therefore be refused before the charge, from public facts about the model and the query
(`query_checks`): an arithmetic error would otherwise occur only if there is a record to compute with, and so reveal
one.

Formal guarantees (under the adjacency of the run's plan, for callers that use only the public methods):
- The noise and the event of a release come from the same `Release`, so they cannot disagree.
- A record enters a 64-bit sum through the clipped contribution of its own loss or statistic. The contribution never
  exceeds the bound, whatever the other records are. It is computed in passes of one size, which public numbers decide,
  or of smaller sizes with the same bits. Before any charge, passes of these sizes over made-up records show that a
  record has the same values bit for bit in each, beside others and in other rows (compared, not proven; with at most
  `Engine.threads` threads on a CPU). A model that mixes made-up records is refused.
- Sums are divided by a public constant. An empty sample is answered with noise. A record without a finite contribution
  counts as zero.
"""

import os
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from algorithms.errors import RefusedError
from algorithms.gradients import L1, L2, Clipping, LineCandidates
from algorithms.gradients.placement import Shards
from algorithms.models import Model
from algorithms.privacy.accounting.filters import Filter
from algorithms.privacy.barrier.compute_config import ComputeConfig
from algorithms.privacy.barrier.correlation import Correlation
from algorithms.privacy.barrier.histograms import check_cells
from algorithms.privacy.barrier.importance_sampling import LastNorms
from algorithms.privacy.barrier.query_checks import (
    check_gradient,
    check_minimum,
    check_norms,
    check_points,
    check_slices,
)
from algorithms.privacy.barrier.record_loader import RecordArrays
from algorithms.privacy.barrier.statistics import Statistic, as_matrix, columns_of, example_of, vector_length
from algorithms.privacy.barrier.trace import AnsweredGradient, Diagnostics, Trace
from algorithms.privacy.barrier.unnoised_queries import UnnoisedQueries
from algorithms.privacy.mechanisms import release as releases
from algorithms.privacy.mechanisms.noise import Generator, Stream, add_steps
from algorithms.privacy.mechanisms.release import Mechanism, Minimum, NoNoise, Release
from algorithms.privacy.mechanisms.release_noise import NoiseAhead, add_noise, noise_std, noisy_argmin
from algorithms.privacy.mechanisms.sampling import (
    Importance,
    RandomAllocation,
    Sampling,
    WithoutReplacement,
    words_of_sample,
)


def _noisy_slices(total: Tensor, release: Release, noise: NoiseAhead | None, slices: Shards) -> Tensor:
    """A sum of which processes hold slices, plus noise, which the first process has and sends to the others."""
    if isinstance(release.noise, NoNoise):
        return total
    steps = None if noise is None or noise.steps is None else noise.steps()
    return add_steps(total, slices.scatter(steps, like=total), std=release.noise_scale)


__all__ = ["Barrier", "ComputeConfig", "RecordArrays"]


class Barrier:
    """Holds records and releases answers about them.

    Args:
        records: The private records, as arrays.
        model: The architecture whose losses are differentiated.
        privacy_filter: The run's; it decides before each release whether the budget allows it.
        generator: The secret source of noise and coins.
        delta: For the epsilon that the trace states.
        trace: Records each release.
        compute: Where and how gradients are computed.
        last_norms: The norms that importance sampling remembers, empty at a run's start.
        diagnostics: Records each gradient without noise; for public records only.

    Raises:
        RefusedError: Before anything is spent, if the model mixes records or the answers could not be private.

    Example:
        >>> import numpy as np
        >>> from types import SimpleNamespace
        >>> from algorithms.models import build
        >>> from algorithms.privacy.accounting.filters import ZCDPFilter
        >>> from algorithms.privacy.mechanisms.noise import secure_generator
        >>> from algorithms.privacy.mechanisms.release import Gaussian
        >>> from algorithms.privacy.mechanisms.sampling import FullBatch
        >>> model = build("softmax", input_shape=(3,), classes=2, seed=0)
        >>> records = SimpleNamespace(features=np.ones((8, 3), np.float32), labels=np.zeros(8, np.int64))
        >>> run = {"privacy_filter": ZCDPFilter(0.5), "generator": secure_generator(), "delta": 1e-5, "trace": Trace()}
        >>> barrier = Barrier(records, model, **run)
        >>> terms = {"sampling": FullBatch(), "clipping": L2(1.0), "noise": Gaussian(1.0), "divisor": 8.0}
        >>> barrier.gradient(model.initial_parameters(), **terms).shape
        torch.Size([8])
        >>> barrier.gradient(model.initial_parameters(), **terms)
        Traceback (most recent call last):
        algorithms.errors.BudgetRefusedError: ...
    """

    def __init__(
        self,
        records: RecordArrays,
        model: Model,
        *,
        privacy_filter: Filter,
        generator: Generator,
        delta: float,
        trace: Trace,
        compute: ComputeConfig | None = None,
        last_norms: LastNorms | None = None,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        self.__unnoised = UnnoisedQueries(
            records, model, compute or ComputeConfig(), last_norms or LastNorms()
        )
        self.__unnoised.compute.check_rounding(self.__unnoised.engine, private=generator.private)
        self.__records = records
        self.__generator = generator
        self.__privacy_filter = privacy_filter
        self.__model = model
        self.__delta = delta
        self.__trace = trace
        self.__diagnostics = diagnostics
        self.__correlation = Correlation(generator, trace, records)
        self.__group = self.__unnoised.compute.group
        self.__device = self.__unnoised.compute.device
        self.__process = os.getpid()
        # Steps of random allocation before a crash are in the trace.
        self.__allocated = sum(row.sampling == "random allocation" for row in trace.rows)

    def gradient(
        self, parameters: Tensor, *, sampling: Sampling, clipping: Clipping, noise: Mechanism, divisor: float
    ) -> Tensor:
        """Release the noisy sum of a sample's clipped gradients, divided by a public constant.

        Args:
            parameters: The point, flat, shape [d].
            sampling: Which records take part.
            clipping: The bound on one record's gradient.
            noise: Relative to that bound, on the sum.
            divisor: Public, above 0; usually the expected batch size, never the size that was drawn.

        Returns:
            The gradient, shape [d], float32, on the parameters' device.

        Raises:
            RefusedError: For a combination without a proven event.
            BudgetRefusedError: If the filter cannot pay for the event; the records are not read then.
        """
        # Whatever can fail for public reasons fails here: nothing is charged yet, and no record has been read.
        check_gradient(self.__model, parameters, sampling, clipping)
        slices = self.__unnoised.compute.slices
        if slices is not None:
            check_slices(sampling, clipping)
        release = releases.gradient_release(sampling, clipping, noise, divisor)
        correlator = self.__correlation.of(release, len(parameters))
        # From here on the release is paid for, whatever happens: taking the charge back would reveal that a record
        # failed.
        stream = self.__charge(release, dimension=len(parameters))
        if correlator is not None:
            self.__correlation.advance()
        # Importance samples and cyclic ones draw from the noise's stream, before the noise. How many words they draw
        # does not depend on the outcome, so the noise can be drawn while the gradients are computed.
        drawn = words_of_sample(sampling, len(self.__records.labels))
        noise_ahead = (
            NoiseAhead.of(
                release,
                stream,
                len(parameters),
                skip=drawn,
                correlator=correlator,
                device=None if slices is not None else self.__unnoised.compute.parameter_device,
            )
            if self.__group.is_first
            else None
        )
        total = self.__unnoised.clipped_sum(parameters, clipping, release, stream)
        if noise_ahead is not None and stream.position != noise_ahead.start:
            raise RuntimeError("the noise does not follow the sample in the stream")
        if slices is not None:
            return (_noisy_slices(total, release, noise_ahead, slices) / divisor).to(torch.float32)
        if noise_ahead is None:
            return self.__group.broadcast(torch.empty_like(parameters))
        noisy = noise_ahead.add_noise(total)
        self.__measure(parameters, clipping, release, total, noisy)
        # Post-processing: the divisor is public, never the size of the sample that was drawn.
        return self.__group.broadcast((noisy / divisor).to(torch.float32).to(parameters.device))

    def total(
        self, statistic: Statistic, *, bound: L1 | L2, noise: Mechanism, sampling: Sampling | None = None
    ) -> Tensor:
        """Release the noisy sum of a statistic of each record, clipped to `bound`.

        Args:
            statistic: (input [*input_shape], label []) -> [k], of one record.
            bound: The norm to which each record's statistic is scaled down.
            noise: Relative to the bound, on the sum.
            sampling: Which records take part; by default all.

        Returns:
            The sum, shape [k], float64; divide it by a public number for a mean.

        Raises:
            RefusedError, BudgetRefusedError: As `gradient` does.
        """
        release = releases.total_release(bound, noise, sampling)
        dimension = example_of(statistic, self.__records, self.__model, self.__device).numel()
        stream = self.__charge(release, dimension=dimension)
        total = self.__unnoised.statistic_sum(statistic, bound, dimension, release, stream)
        return self.__group.broadcast(add_noise(total, release, stream))

    def histograms(self, cells: Statistic, sizes: Sequence[int], *, noise: Mechanism) -> Tensor:
        """Release noisy histograms of all records: how many lie in each cell.

        A record is in a cell of each, so that F histograms change by a vector of L2 norm sqrt(F). It is the sum of that
        vector as by `total`, and is summed without it.

        Args:
            cells: (input [*input_shape], label []) -> int64 [histograms], or [rows, histograms] of a person, whose rows
                share a count of 1. A cell beyond the last counts as the last; a negative one does not count.
            sizes: Cells of each histogram.
            noise: Relative to sqrt(F), on each count.

        Returns:
            The counts, one histogram after another, shape [sum(sizes)], float64.

        Raises:
            RefusedError, BudgetRefusedError: As `gradient` does.
        """
        check_cells(example_of(cells, self.__records, self.__model, self.__device), sizes)
        release = releases.histograms_release(len(sizes), noise)
        stream = self.__charge(release, dimension=sum(sizes))
        counts = self.__unnoised.cell_counts(cells, sizes, release, stream)
        return self.__group.broadcast(add_noise(counts, release, stream))

    def moment(self, statistic: Statistic, *, bound: L2, noise: Mechanism) -> Tensor:
        """Release the noisy sum of A^T A over all records, for a matrix A of each clipped to Frobenius norm `bound`.

        Args:
            statistic: (input [*input_shape], label []) -> A [m, c], of one record.
            bound: On the Frobenius norm of A.
            noise: On the upper triangle; the lower one mirrors it.

        Returns:
            The sum, shape [c, c], float64, symmetric; with noise it may have negative eigenvalues.

        Raises:
            RefusedError, BudgetRefusedError: As `gradient` does.
        """
        release = releases.total_release(bound, noise)
        columns = columns_of(statistic, self.__records, self.__model, self.__device)
        dimension = vector_length(columns)
        stream = self.__charge(release, dimension=dimension)
        total = self.__unnoised.second_moment_sum(statistic, bound, dimension, release, stream)
        noisy = self.__group.broadcast(add_noise(total, release, stream))
        return as_matrix(noisy, columns)

    def norm_total(self, parameters: Tensor, *, bound: L2, noise: Mechanism) -> float:
        """Release the noisy sum of all records' gradient norms, each clipped to `bound`.

        Later importance samples use these norms. Raises as `gradient` does.
        """
        check_norms(self.__model, parameters)
        release = releases.norm_total_release(bound, noise)
        stream = self.__charge(release, dimension=1)
        total = torch.tensor([self.__unnoised.norm_total(parameters, bound)], dtype=torch.float64)
        return float(self.__group.broadcast(add_noise(total, release, stream)))

    def norm_count(
        self, parameters: Tensor, *, bound: L2, noise: Mechanism, sampling: Sampling | None = None
    ) -> float:
        """Release the noisy sum over a sample of 1/2 for each gradient norm up to `bound`, and -1/2 for the others.

        Within 1 % of the bound the summand lies between the two, so that rounding cannot move it from one to the other.
        For quantile clipping (Andrew et al. 2021, Section 2). Raises as `gradient` does.
        """
        check_norms(self.__model, parameters, bound)
        release = releases.norm_count_release(noise, sampling)
        stream = self.__charge(release, dimension=1)
        balance = self.__unnoised.norm_balance(parameters, bound, release, stream)
        total = torch.tensor([balance], dtype=torch.float64)
        return float(self.__group.broadcast(add_noise(total, release, stream)))

    def argmin(
        self,
        candidates: Tensor | LineCandidates,
        *,
        bound: float,
        noise: Mechanism,
        sampling: Sampling | None = None,
    ) -> int:
        """Release the index of the candidate with the smallest total loss, by noisy selection.

        Args:
            candidates: Parameters, shape [k, d]; or candidates on a line, which are cheaper for a full batch of a
                linear model.
            bound: Each record's loss is clipped to [0, bound].
            noise: Relative to the bound, on each candidate's total loss.
            sampling: Which records take part; by default all.

        Returns:
            The index, 0 to k - 1.

        Raises:
            RefusedError, BudgetRefusedError: As `gradient` does.
        """
        release = releases.argmin_release(bound, noise, sampling)
        points = candidates.candidates if isinstance(candidates, LineCandidates) else candidates
        check_points(self.__model, points)
        stream = self.__charge(release, dimension=len(points))
        losses = self.__unnoised.clipped_losses(candidates, release, stream)
        index = noisy_argmin(losses, release, stream)
        return int(self.__group.broadcast(torch.tensor([index])))

    def loss_gain(self, start: Tensor, parameters: Tensor, *, bound: L2, noise: Mechanism) -> float:
        """Release the noisy sum over all records of how far their loss is lower than at `start`.

        Args:
            start: The point to compare with, flat, shape [d].
            parameters: The other point, shape [d].
            bound: Each record's gain is clipped to [-bound, bound].
            noise: Relative to the bound, on the sum.

        Returns:
            The sum, above 0 where the losses at `parameters` are lower.

        Raises:
            RefusedError, BudgetRefusedError: As `gradient` does.
        """
        points = torch.stack([start, parameters])
        check_points(self.__model, points)
        release = releases.total_release(bound, noise)
        stream = self.__charge(release, dimension=1)
        gain = torch.tensor([self.__unnoised.loss_gain(points, release, stream)], dtype=torch.float64)
        return float(self.__group.broadcast(add_noise(gain, release, stream)))

    def minimum(self, problem: Minimum, *, noise: Mechanism) -> Tensor:
        """Release the minimum of a regularised sum of all losses, with noise in the objective or on the result.

        For a linear model with one output and a smooth loss.

        Args:
            problem: The regularisation, the bounds on a record, and the tolerance.
            noise: In the objective, or on its minimum.

        Returns:
            The parameters, shape [d], float32.

        Raises:
            RefusedError, BudgetRefusedError: As `gradient` does.
            OutOfReachError: If floating-point arithmetic cannot reach the tolerance; the release stays charged.
        """
        check_minimum(self.__model, problem, noise)
        release = releases.minimum_release(problem, noise)
        stream = self.__charge(release, dimension=self.__model.parameter_count)
        return self.__group.broadcast(self.__unnoised.minimum(release, stream).float())

    def with_model(self, model: Model) -> "Barrier":
        """A barrier for another model of the same records, with the same budget, noise and trace.

        What the model's fixed first layers give is computed once for all records, where memory holds it and the
        other layers take made-up records too.
        """
        self.__check_process()
        rest, records = self.__unnoised.precompute_frozen_prefix(model)
        if rest is not model:
            try:
                return self.__with(records, rest)
            except RefusedError:  # though paid for, since the whole model was accepted
                pass
        return self if model is self.__model else self.__with(self.__unnoised.records, model)

    def __with(self, records: RecordArrays, model: Model) -> "Barrier":
        """A barrier with the same budget, noise and trace."""
        return Barrier(
            records,
            model,
            privacy_filter=self.__privacy_filter,
            generator=self.__generator,
            delta=self.__delta,
            trace=self.__trace,
            compute=self.__unnoised.compute,
            last_norms=self.__unnoised.last_norms,
            diagnostics=self.__diagnostics,
        )

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: a copy would draw the same noise for other answers, and their difference has no noise."""
        raise TypeError("a barrier cannot be copied or pickled; make one for each run.")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one record's features, which the data card declares."""
        return tuple(self.__records.features.shape[1:])

    def affords(self, release: Release) -> bool:
        """Whether the filter can pay for a release now."""
        return self.__privacy_filter.affords(release.event())

    def __check_process(self) -> None:
        if os.getpid() != self.__process:  # a fork is a copy, too
            raise RefusedError(
                "a barrier was asked in another process than it was made in; make one for each run."
            )

    def __charge(self, release: Release, *, dimension: int) -> Stream:
        """Charge a release, record it in the trace, and open its stream of noise and coins."""
        self.__check_process()
        sampling = release.sampling
        if isinstance(sampling, WithoutReplacement) and sampling.records != len(self.__records.labels):
            raise RefusedError(
                f"a sample without replacement of {sampling.records} records was asked for, but the dataset has another"
                " number of them; give its public size."
            )
        if isinstance(sampling, RandomAllocation) and sampling.step != self.__allocated:
            raise RefusedError(
                f"step {sampling.step} of random allocation was asked for after {self.__allocated} others, and a pass"
                " is paid for once; ask for the steps in their order, one release each."
            )
        event = release.event()
        # The filter refuses before the trace has a row. A row is one stream, so that no two releases share noise or
        # coins.
        self.__privacy_filter.charge(event)
        self.__allocated += isinstance(sampling, RandomAllocation)
        self.__trace.record(
            release,
            event,
            noise_std=noise_std(release, dimension),
            epsilon=self.__privacy_filter.epsilon_spent(self.__delta),
        )
        return self.__generator.stream(len(self.__trace.rows) - 1)

    def __measure(
        self, parameters: Tensor, clipping: Clipping, release: Release, total: Tensor, noisy: Tensor
    ) -> None:
        """Give the gradient's sample, drawn again with the same coins, to the diagnostics if there are any."""
        if self.__diagnostics is None or isinstance(release.sampling, Importance):
            return
        point = self.__unnoised.compute.local_copy(parameters)
        sums = total.cpu().numpy(), noisy.cpu().numpy()
        release_and_step = len(self.__trace.rows) - 1, self.__trace.step
        batches = self.__unnoised.sample_batches(release, self.__generator.stream(release_and_step[0]))
        answered = AnsweredGradient(point, clipping, release.divisor, *sums)
        self.__diagnostics.measure(
            answered, self.__unnoised.engine, batches, release_and_step=release_and_step
        )
