"""Exact answers about the records, before noise: for the barrier alone.

Layers in front of a model's first parameter are computed once for all records instead of in each step, if the results
fit into memory. Full-batch queries of a linear model use closed forms, if the records fit. All answers are computed
under the same conditions, whatever the process has set. An error is raised without its message, which may reveal a
record; if the query fails on made-up records too, as with tensors on two devices, it says how it fails there.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.errors import QueryFailedError
from algorithms.gradients import (
    L1,
    L2,
    Clipping,
    Engine,
    LinearRecords,
    LineCandidates,
    ProcessLostError,
    clip_and_sum,
    has_one_bound,
    linear_layer,
    split_passes,
)
from algorithms.gradients.arithmetic import KERNEL_BATCH, round_batch
from algorithms.gradients.memory import lacks_memory
from algorithms.models import Model
from algorithms.models.cells import cells_before
from algorithms.privacy.barrier.compute_config import ComputeConfig
from algorithms.privacy.barrier.fixed_arithmetic import fixed_arithmetic
from algorithms.privacy.barrier.frozen_prefix import MappedRecords, frozen_prefix
from algorithms.privacy.barrier.histograms import SHARES, count_cells
from algorithms.privacy.barrier.importance_sampling import LastNorms, importance_sum
from algorithms.privacy.barrier.minimum import OutOfReachError, solve_minimum
from algorithms.privacy.barrier.pass_pool import pass_pool
from algorithms.privacy.barrier.record_loader import Batch, Load, OnDevice, RecordArrays, RowIndices
from algorithms.privacy.barrier.statistics import Statistic, answers, moment_sum
from algorithms.privacy.mechanisms.noise import Stream
from algorithms.privacy.mechanisms.release import (
    NoNoise,
    Release,
)
from algorithms.privacy.mechanisms.sampling import (
    Cyclic,
    FullBatch,
    Importance,
    Sampling,
    WithoutReplacement,
    draw_sample,
)


def has_closed_forms(model: Model) -> bool:
    """Whether queries of a model's records have closed forms, which compute in the precision of the features.

    They take losses of any number of records at once, so a loss of the user's own, of which only passes of the run's
    size are compared, has none.
    """
    is_ours = (
        str(getattr(model.losses, "__module__", "")).startswith("algorithms.") and model.bounds is not None
    )
    return is_ours and linear_layer(model.module) is not None and model.precision == torch.float32


def all_in_closed_form(model: Model, records: RecordArrays, compute: ComputeConfig) -> LinearRecords | None:
    """A copy of all records, for closed forms; None without these for the model, or without memory for the copy."""
    cells = cells_before(model.module)
    width = math.prod(records.features.shape[1:]) if cells is None else cells.total
    fits = compute.holds(2 * width)
    if compute.offload or compute.slices or not (has_closed_forms(model) and fits):
        return None
    return LinearRecords(model, *OnDevice.of(records, compute.device).tensors)


def loss_sums(
    model: Model,
    engine: Engine,
    points: Tensor,
    batches: Iterable[Batch],
    bound: float,
    compute: ComputeConfig,
) -> Tensor:
    """The sums over batches of losses, clipped to [0, bound], at each point [k, d]; shape [k], float64.

    Points on a line are treated like any others: the faster algorithm for a line depends on a record's position.
    """
    points = points.to(compute.device)
    totals = torch.zeros(len(points), dtype=torch.float64, device=points.device)
    size = max(KERNEL_BATCH, engine.physical_batch)
    # Of cells closed forms would take whole vectors, which a pass does not.
    is_closed = has_closed_forms(model) and cells_before(model.module) is None
    for inputs, labels in batches:
        if is_closed:
            totals += LinearRecords(model, inputs, labels, size).losses_at(points, bound=bound)
            continue
        for index, point in enumerate(points):
            totals[index] += engine.clipped_losses(point, inputs, labels, bound)
    return totals


_MAX_STATISTICS, _STATISTIC_NUMBERS = 4096, 2**20
"""How many records a pass of statistics has at most, and about how many numbers of records and statistics together."""

_BLUR_WIDTH = 0.01
"""Relative distance from a bound within which a norm counts in part."""


P = ParamSpec("P")
T = TypeVar("T")

_UNTOLD = (
    "The query failed. The cause is withheld because it could reveal a record:"
    " try the model and the algorithm on public records of the same form."
)
_MIN_SAMPLE, _PASSES, _MAX_SYNTHETIC_RECORDS = 100, 3, 10**7
"""The least of made-up records in a sample, its passes, and the most of which it is drawn; they are one record, so they
take no memory."""


def _with_fixed_arithmetic(
    answer: Callable[Concatenate["UnnoisedQueries", P], T],
) -> Callable[Concatenate["UnnoisedQueries", P], T]:
    """Compute an answer under the arithmetic of the configuration; its errors become QueryFailedError."""

    @functools.wraps(answer)
    def compute_answer(self: "UnnoisedQueries", /, *args: P.args, **kwargs: P.kwargs) -> T:
        is_short = False
        try:
            with fixed_arithmetic(self.compute, self.engine):
                return answer(self, *args, **kwargs)
        except (OutOfReachError, ProcessLostError):
            raise
        except Exception as reason:
            is_short = lacks_memory(reason)
        # Outside of the handlers, since an error that is raised in one carries the first error along.
        if is_short:
            raise QueryFailedError(
                "memory did not suffice for an answer; set {compute.physical_batch} or {compute.memory_mb} to less.",
                code="answer_short_of_memory",
            )
        raise QueryFailedError(_failure_on_synthetic_records(answer, self, args, kwargs) or _UNTOLD)

    return compute_answer


def _failure_on_synthetic_records(
    answer: Callable[..., object],
    queries: "UnnoisedQueries",
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> str | None:
    """How a query fails on made-up records, with coins of its own; None if it does not, or if this cannot be known."""
    compute = queries.compute
    if compute.group.count > 1:  # the others would wait for each other
        return None
    sampling = next((part.sampling for part in args if isinstance(part, Release)), FullBatch())
    public = [Stream(bytes(32), 0) if isinstance(part, Stream) else part for part in args]
    try:
        if compute.device.type != "cpu":
            torch.accelerator.synchronize()  # fails after an error of a kernel, which may depend on a record
        queries_on_made_up = queries.of_made_up_records(_count_for(sampling, queries.engine.physical_batch))
        with fixed_arithmetic(compute, queries.engine):
            answer(queries_on_made_up, *public, **kwargs)
    except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        return None
    except Exception as reason:
        return f"a query failed, as it does on made-up records: {type(reason).__name__}: {reason}"
    return None


def _count_for(sampling: Sampling, physical_batch: int) -> int:
    """How many records fill some passes of a sample."""
    if isinstance(sampling, WithoutReplacement):
        return sampling.records
    return min(_MAX_SYNTHETIC_RECORDS, math.ceil(max(_MIN_SAMPLE, _PASSES * physical_batch) / sampling.rate))


class UnnoisedQueries:
    """Holds the records and computes the answers; `engine` computes the model's gradients.

    last_norms: the norms that importance sampling remembers. Raises RefusedError if the model mixes records.
    """

    def __init__(
        self, records: RecordArrays, model: Model, compute: ComputeConfig, last_norms: LastNorms
    ) -> None:
        self._all_records, self.compute = records, compute
        # A copy, which nobody else can change or switch to training after it was examined.
        self.model = replace(model, module=copy.deepcopy(model.module))
        self.engine = compute.engine(self.model, records)
        self._pool = pass_pool(compute, self.engine, model.parameter_count)
        self.last_norms = last_norms

    def of_made_up_records(self, count: int) -> "UnnoisedQueries":
        """The same queries of made-up records, which are all alike, and streamed to a device where the records are."""
        inputs, labels = (part.cpu().numpy() for part in self.engine.synthetic_record())
        alike = (np.broadcast_to(part, (count, *part.shape[1:])) for part in (inputs, labels))
        queries = copy.copy(self)
        queries._all_records, queries.last_norms = MappedRecords(*alike), LastNorms()
        vars(queries).pop("_whole", None)
        if vars(queries).pop("records", None) is self._all_records:
            queries.records = queries._all_records
        return queries

    @functools.cached_property
    def records(self) -> RecordArrays:
        """The records on the device; the first answer brings them there, after its charge."""
        return self.compute.loader.put_on_device(self._all_records)

    @functools.cached_property
    def _whole(self) -> LinearRecords | None:
        """Closed forms over all records, if the model has them and the records fit into memory."""
        return all_in_closed_form(self.model, self._all_records, self.compute)

    @_with_fixed_arithmetic
    def precompute_frozen_prefix(self, model: Model) -> tuple[Model, RecordArrays]:
        """The result of `frozen_prefix` for another model of these records."""
        size = self.engine.physical_batch
        return frozen_prefix(model, self.records, self.compute, physical_batch=size)

    @_with_fixed_arithmetic
    def clipped_sum(self, point: Tensor, clipping: Clipping, release: Release, stream: Stream) -> Tensor:
        """The sum of the sample's clipped gradients at a point [d]; shape [d], float64."""
        is_whole = isinstance(release.sampling, FullBatch) and has_one_bound(clipping)
        if is_whole and self._whole is not None:
            return self._whole.clipped_sum(point.to(self.compute.parameter_device), clipping)

        point = self._copy_point(point)
        if isinstance(release.sampling, Importance):
            return importance_sum(
                point,
                self._count,
                release.sampling,
                clipping,
                stream,
                engine=self.engine,
                load=functools.partial(self.compute.loader.load, self.records),
                last=self.last_norms,
                by_weight=point.device.type != "cpu",
            )
        if self.compute.parameter_device.type != "cpu" and self.compute.shards is None:
            return self._sum_on_device(point, clipping, release, stream)
        spare: list[Tensor] = []  # sums of passes that have been added up, to write the next ones into

        def sum_pass(engine: Engine, records: Load) -> Tensor:
            try:
                into = spare.pop()
            except IndexError:  # another worker may have been quicker
                into = None
            return engine.clipped_sum(point, *records(), clipping, into)

        group = self.compute.group
        rows = group.shard(self._sample(release, stream), self._count)
        total = torch.zeros_like(point, dtype=torch.float64)
        for part in self._pool.map(sum_pass, self._shared_passes(rows)):
            total += part  # in the order of the sample, whichever pass is ready first
            spare.append(part)
        return group.sum(total) if self.compute.slices is None else total

    def _sum_on_device(self, point: Tensor, clipping: Clipping, release: Release, stream: Stream) -> Tensor:
        """`clipped_sum` with one wait for the device; passes with a gradient that is not finite are taken again."""
        rows = self.compute.group.shard(self._sample(release, stream), self._count)
        passes = list(split_passes(rows, self.engine.physical_batch))
        total, are_right = torch.zeros_like(point, dtype=torch.float64), list[Tensor]()
        for records in self.compute.loader.prefetch(self.records, passes):
            part, is_right = self.engine.clipped_sum_if_finite(point, *records(), clipping)
            total += torch.where(is_right, part, 0.0)  # a NaN times 0 would be NaN
            are_right.append(is_right)
        finite_parts = torch.stack(are_right).tolist() if are_right else []
        again = [rows for rows, is_right in zip(passes, finite_parts, strict=True) if not is_right]
        for records in self.compute.loader.prefetch(self.records, again):
            total += self.engine.clipped_sum(point, *records(), clipping)
        return self.compute.group.sum(total)

    @_with_fixed_arithmetic
    def clipped_losses(self, candidates: Tensor | LineCandidates, release: Release, stream: Stream) -> Tensor:
        """The sums of the sample's clipped losses at each candidate; shape [k], float64.

        On the CPU. Losses at a candidate that is not finite are no numbers and would count as zero, so the sum there is
        infinite.
        """
        bound = release.clipping.sensitivity
        points = self._copy_point(candidates) if isinstance(candidates, Tensor) else candidates.candidates
        if not isinstance(release.sampling, FullBatch) or self._whole is None:
            batches = self.sample_batches(release, stream)
            losses = loss_sums(self.model, self.engine, points, batches, bound, self.compute)
        elif isinstance(candidates, LineCandidates):
            losses = self._whole.losses_on(candidates, bound=bound)
        else:
            losses = self._whole.losses_at(points, bound=bound)
        are_finite = torch.isfinite(points).all(dim=1).to(losses.device)
        return torch.where(are_finite, losses, torch.inf).cpu()  # the one wait for a device

    @_with_fixed_arithmetic
    def loss_gain(self, points: Tensor, release: Release, stream: Stream) -> float:
        """The sum of the sample's clipped gains in loss, from the first of two points [2, d] to the second."""
        start, end = self._copy_point(points)
        total = torch.zeros((), dtype=torch.float64, device=self.compute.device)
        for inputs, labels in self.sample_batches(release, stream):
            total += self.engine.clipped_loss_gain(start, end, inputs, labels, release.clipping.sensitivity)
        return float(total)

    @_with_fixed_arithmetic
    def statistic_sum(
        self, statistic: Statistic, bound: L1 | L2, dimension: int, release: Release, stream: Stream
    ) -> Tensor:
        """The sum of a statistic of the sample, clipped to the bound; shape [dimension], float64."""
        total = torch.zeros(dimension, dtype=torch.float64, device=self.compute.device)
        for part in self._statistics(statistic, dimension, release, stream):
            total += clip_and_sum(part.reshape(len(part), dimension), bound)
        return total.cpu()

    @_with_fixed_arithmetic
    def cell_counts(self, cells: Statistic, sizes: Sequence[int], release: Release, stream: Stream) -> Tensor:
        """How many of the sample lie in each cell, one histogram after another; shape [sum(sizes)], float64."""
        total = torch.zeros(sum(sizes), dtype=torch.int64, device=self.compute.device)
        for part in self._statistics(cells, len(sizes), release, stream):
            total += count_cells(part, sizes)
        return total.cpu().double() / SHARES

    @_with_fixed_arithmetic
    def second_moment_sum(
        self, statistic: Statistic, bound: L2, dimension: int, release: Release, stream: Stream
    ) -> Tensor:
        """The sum of A^T A over the sample's clipped matrices A, as a vector [dimension], float64."""
        total = torch.zeros(dimension, dtype=torch.float64, device=self.compute.device)
        for part in self._statistics(statistic, dimension, release, stream):
            total += moment_sum(part, bound.norm)
        return total.cpu()

    @_with_fixed_arithmetic
    def norm_total(self, point: Tensor, bound: L2) -> float:
        """The sum of all records' gradient norms at a point [d], each clipped to `bound`; zero if not finite."""
        at = self._copy_point(point)
        norms = self.last_norms.at(at, self.engine, lambda: self._norms(at, np.arange(self._count), bound))
        return float(np.where(np.isfinite(norms), np.minimum(norms, bound.norm), 0.0).sum())

    @_with_fixed_arithmetic
    def norm_balance(self, point: Tensor, bound: L2, release: Release, stream: Stream) -> float:
        """Half the difference between the numbers of the sample's norms at a point [d] within and above `bound`.

        Norms within 1 % of the bound count in part: the last bits of a norm depend on the batch, and with a step one
        record could change the contributions of many.
        """
        measured = self._norms(self._copy_point(point), self._sample(release, stream), bound)
        norms = np.nan_to_num(measured, nan=np.inf, posinf=np.inf)
        # A ramp from 1/2 to -1/2 around the bound.
        return float(np.clip((1.0 - norms / bound.norm) / (2.0 * _BLUR_WIDTH), -0.5, 0.5).sum())

    @_with_fixed_arithmetic
    def minimum(self, release: Release, stream: Stream) -> Tensor:
        """The minimum that a release asks for, noise included; shape [d], float64."""
        return solve_minimum(
            self.model, self._all_records.features, self._all_records.labels, release, stream
        )

    def sample_batches(self, release: Release, stream: Stream) -> Iterator[Batch]:
        """The records of the release's sample, in physical batches on the device."""
        return self._batches(self._sample(release, stream))

    def _statistics(
        self, statistic: Statistic, dimension: int, release: Release, stream: Stream
    ) -> Iterator[Tensor]:
        """Statistics of the release's sample in passes of one size, which fill all kernels whatever the model's do.

        Passes are larger than the model's where records and statistics are short, as a count's are.
        """
        numbers = dimension + math.prod(self.records.features.shape[1:])
        size = max(
            KERNEL_BATCH,
            self.engine.physical_batch,
            round_batch(min(_MAX_STATISTICS, _STATISTIC_NUMBERS // numbers)),
        )
        rows = self._sample(release, stream)
        return answers(statistic, self.compute.loader.batches(self.records, rows, size), size)

    def _sample(self, release: Release, stream: Stream) -> RowIndices:
        if isinstance(release.sampling, Cyclic) and isinstance(release.noise, NoNoise):
            raise TypeError("parts are taken in turn by the steps of correlated noise alone")
        return draw_sample(release.sampling, self._count, stream, step=release.noise.step)

    def _copy_point(self, points: Tensor) -> Tensor:
        """A copy of points where sums are, so that a model that changes them changes only the copy."""
        return points.clone() if self.compute.slices else self.compute.local_copy(points.detach())

    @property
    def _count(self) -> int:
        return len(self.records.labels)

    def _norms(self, point: Tensor, rows: RowIndices, bound: L2) -> NDArray[np.float64]:
        """Upper bounds on the norms of the chosen records' gradients, [rows]; not finite if a gradient is not."""

        def norms(engine: Engine, records: Load) -> Tensor:
            return engine.norms(point, *records(), bound)

        each = list(self._pool.map(norms, self._passes(rows)))
        return torch.cat(each).cpu().numpy() if each else np.zeros(0)

    def _passes(self, rows: RowIndices) -> Iterator[Load]:
        """Yield a function for each pass over some indices that returns its records."""
        return self.compute.loader.prefetch(self.records, split_passes(rows, self.engine.physical_batch))

    def _shared_passes(self, rows: RowIndices) -> Iterator[Load]:
        """The same for this process's rows; processes that share parameters run equally many passes."""
        if (shards := self.compute.shards) is None:
            return self._passes(rows)
        passes = list(split_passes(rows, self.engine.physical_batch))
        # Passes over no records, so that no process waits for another.
        missing = shards.max_count(len(passes)) - len(passes)
        return self.compute.loader.prefetch(self.records, [*passes, *[rows[:0]] * missing])

    def _batches(self, rows: RowIndices) -> Iterator[Batch]:
        return self.compute.loader.batches(self.records, rows, self.engine.physical_batch)
