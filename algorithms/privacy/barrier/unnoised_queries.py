"""Exact answers about the records, before noise: for the barrier alone.

Layers in front of a model's first parameter are computed once for all records instead of in each step, if the results
fit into memory. Full-batch queries of a linear model use closed forms, if the records fit. All answers are computed
under the same conditions, whatever the process has set. An error is raised without its message, which may tell of a
record; if the query fails on made-up records too, as with tensors on two devices, it says how it fails there. A
record whose statistic cannot be computed, or is not finite, counts as zero.

For a second moment, as in a covariance, a record gives a matrix A with m rows and c columns (positions and channels of
an image; one row for a flat record). Its contribution is A^T A, whose Frobenius norm is at most the square of A's, so A
is scaled down to the square root of the bound. A symmetric matrix is represented by its upper triangle, with
off-diagonal entries times sqrt(2): the L2 norm of this vector is the Frobenius norm of the matrix.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from algorithms.errors import QueryFailedError, RefusedError
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
    pad_to_multiple,
    split_passes,
)
from algorithms.gradients.arithmetic import WHOLE, round_batch
from algorithms.gradients.clipping import rounding_margin
from algorithms.gradients.devices import upload
from algorithms.gradients.memory import lacks_memory
from algorithms.models import Model
from algorithms.models.cells import cells_before
from algorithms.models.feature_transforms import front_of, shape_after
from algorithms.models.networks import UnitRecords
from algorithms.models.scaled_target import TargetScaling
from algorithms.privacy.barrier.compute_config import ComputeConfig
from algorithms.privacy.barrier.fixed_arithmetic import fixed_arithmetic
from algorithms.privacy.barrier.minimum import OutOfReachError, PerturbedObjective, exact_minimum, minimum
from algorithms.privacy.barrier.pass_pool import pass_pool
from algorithms.privacy.barrier.record_loader import Batch, Load, OnDevice, RecordArrays, Rows
from algorithms.privacy.mechanisms.noise import Stream, is_below
from algorithms.privacy.mechanisms.release import (
    Minimum,
    NoNoise,
    ObjectiveNoise,
    Release,
    add_noise,
    draws,
    minimum_release,
)
from algorithms.privacy.mechanisms.sampling import (
    Cyclic,
    FullBatch,
    Importance,
    Sampling,
    WithoutReplacement,
    draw_sample,
)

Statistic = Callable[[Tensor, Tensor], Tensor]
"""Of one record: (input [*input_shape], label []) -> a tensor, of one shape for all records."""

_BY_RECORD = (UnitRecords, nn.GroupNorm)
"""Layers that process each record independently; without parameters they are fixed maps."""


@dataclass(frozen=True)
class MappedRecords:
    """Records whose features went through a fixed map: features [n, *shape], labels [n]."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]


def frozen_prefix(
    model: Model, records: RecordArrays, compute: ComputeConfig, *, physical_batch: int
) -> tuple[Model, RecordArrays]:
    """The model without its feature map and the untrained layers that follow it, and the records mapped by those.

    Returns both unchanged if there is no feature map, or if the mapped records would not fit into memory by the public
    number of records. physical_batch: the size of passes at which the model was compared, and records are mapped.
    """
    front = front_of(model)
    if front is None or (isinstance(front, TargetScaling) and front.is_around_the_model):
        return model, records
    first, rest = _split_leading_maps(model.module.get_submodule("model"))
    maps = nn.Sequential(front, *first)
    shape = shape_after(maps, records.features.shape[1:])
    if not compute.holds(math.prod(shape)):
        return model, records
    features = _apply_maps(maps, records, (len(records.labels), *shape), compute, physical_batch)
    return replace(model, module=rest), MappedRecords(features, records.labels)


def _split_leading_maps(module: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """Split a sequence into its leading fixed maps and the rest."""
    if type(module) is not nn.Sequential:
        return [], module
    first = list(takewhile(lambda layer: type(layer) in _BY_RECORD and not list(layer.parameters()), module))
    return first, module[len(first) :]


def _apply_maps(
    maps: nn.Module,
    records: RecordArrays,
    shape: tuple[int, ...],
    compute: ComputeConfig,
    physical_batch: int,
) -> NDArray[np.float32]:
    features, done = np.empty(shape, np.float32), 0
    placed = copy.deepcopy(maps).to(compute.device)
    with torch.no_grad():
        for inputs, _labels in compute.loader.batches(records, np.arange(len(features)), physical_batch):
            mapped = placed(pad_to_multiple(inputs, physical_batch))[: len(inputs)]
            features[done : done + len(inputs)] = mapped.cpu().numpy()
            done += len(inputs)
    return features


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
    for inputs, labels in batches:
        if has_closed_forms(model):
            totals += LinearRecords(model, inputs, labels).losses_at(points, bound=bound)
            continue
        for index, point in enumerate(points):
            totals[index] += engine.clipped_losses(point, inputs, labels, bound)
    return totals


_NO_BOUND, _NEAR_ZERO = 1e150, 1e-300
"""Above the norm of any record and gradient, yet finite; and a number above 0 that is below any other."""


def solve_minimum(
    model: Model, features: NDArray[np.float32], labels: NDArray[np.int64], release: Release, stream: Stream
) -> Tensor:
    """The answer to the release of a minimum, noise included, shape [d], float64."""
    problem = release.clipping
    if not isinstance(problem, Minimum):
        raise TypeError(f"{release} does not ask for a minimum")
    tilt = np.zeros(model.parameter_count)
    if isinstance(release.noise, ObjectiveNoise):
        tilt = release.noise_scale * draws(release, stream, len(tilt))
    whole = PerturbedObjective(
        model,
        features,
        labels,
        clip_norm=problem.clip_norm,
        input_norm=problem.input_norm,
        regularisation=problem.regularisation,
        tilt=torch.from_numpy(tilt),
    )
    if isinstance(release.noise, NoNoise):
        return exact_minimum(replace(whole, clip_norm=_NO_BOUND, input_norm=_NO_BOUND))
    solution = minimum(whole, tolerance=problem.tolerance)
    return add_noise(solution, _on_the_result(problem, release), stream)


def _on_the_result(problem: Minimum, release: Release) -> Release:
    """The noise on the solver's result: as requested, or, with noise in the objective, what hides where it stopped."""
    if not isinstance(release.noise, ObjectiveNoise):
        return release
    stopped = Minimum(
        clip_norm=2 * problem.tolerance,
        regularisation=problem.regularisation,
        tolerance=_NEAR_ZERO,
        input_norm=problem.input_norm,
        curvature=problem.curvature,
    )
    return minimum_release(stopped, release.noise.on_result())


def vector_length(columns: int) -> int:
    """The length of the vector for a symmetric matrix [columns, columns]."""
    return columns * (columns + 1) // 2


def moment_sum(records: Tensor, bound: float) -> Tensor:
    """The sum of the records' clipped A^T A, as a vector.

    records: [n, m, c]; one that is not finite counts as zero. Returns [c (c + 1) / 2], float64.
    """
    wide = records.double()
    finite = torch.isfinite(wide).flatten(1).all(dim=1)
    wide = torch.where(finite[:, None, None], wide, 0.0)
    norms = torch.linalg.vector_norm(wide, dim=(1, 2))
    max_norm = math.sqrt(bound) * (1.0 - rounding_margin(torch.float64))
    rows = (wide * torch.clamp(max_norm / norms.clamp(min=_NEAR_ZERO), max=1.0)[:, None, None]).flatten(0, 1)
    return as_vector(rows.T @ rows)


def as_vector(matrix: Tensor) -> Tensor:
    """A symmetric matrix [c, c] as a vector of the same norm, [c (c + 1) / 2]."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns] * _weights(rows == columns, math.sqrt(2.0), matrix)


def as_matrix(vector: Tensor, columns: int) -> Tensor:
    """The inverse of `as_vector`: a symmetric matrix [c, c]."""
    above, right = torch.triu_indices(columns, columns, device=vector.device)
    entries = vector * _weights(above == right, math.sqrt(0.5), vector)
    matrix = vector.new_zeros(columns, columns)
    matrix[above, right] = entries
    matrix[right, above] = entries
    return matrix


def _weights(diagonal: Tensor, beside: float, like: Tensor) -> Tensor:
    """1 on the diagonal, `beside` elsewhere."""
    return torch.where(diagonal, like.new_ones(()), like.new_full((), beside))


def shape_of(
    statistic: Statistic, records: RecordArrays, model: Model, device: torch.device | None = None
) -> torch.Size:
    """The shape of a statistic of one record, found with zeros in the record's form.

    device: where the records will be, by default the CPU. A statistic that fails there, as with tensors of its own on
    the CPU, would count each record as zero, so it is tried there before it is charged.
    """
    example = torch.from_numpy(np.zeros((1, *records.features.shape[1:]), records.features.dtype))
    label = torch.zeros(1, *model.label_shape, dtype=model.label_dtype)
    return torch.func.vmap(statistic)(example.to(device), label.to(device)).shape[1:]


def columns_of(statistic: Statistic, records: RecordArrays, model: Model, device: torch.device) -> int:
    """The number of columns of a matrix statistic; raises RefusedError for other shapes."""
    shape = shape_of(statistic, records, model, device)
    if len(shape) != 2 or 0 in shape:
        raise RefusedError(
            f"second moments are of a matrix of each record, not of a statistic of shape {list(shape)}; give [m, c]."
        )
    return shape[1]


def _answers(statistic: Statistic, batches: Iterable[Batch], size: int) -> Iterator[Tensor]:
    """Yield the statistics of batches of records, without records for which they cannot be computed.

    size: to which all batches are padded.

    Such records are found one by one, and replaced by copies of another record, so that the results of all others are
    those that they would have without them.
    """
    for inputs, labels in batches:
        values = _try_statistic(statistic, inputs, labels, size)
        if values is not None:
            yield values
            continue
        sound = [
            i
            for i in range(len(labels))
            if _try_statistic(statistic, inputs[[i]], labels[[i]], size) is not None
        ]
        if not sound:
            continue
        indices = torch.full((len(labels),), sound[0])
        indices[sound] = torch.tensor(sound)
        values = _try_statistic(statistic, inputs[indices], labels[indices], size)
        if values is not None:
            yield values[sound]


def _try_statistic(statistic: Statistic, inputs: Tensor, labels: Tensor, size: int) -> Tensor | None:
    """The statistic of each record, or None on an error, which must not reveal that there is such a record.

    What is for lack of memory is raised: it would leave out records because of others.
    """
    try:
        full = (pad_to_multiple(part, size) for part in (inputs, labels))
        return torch.func.vmap(statistic)(*full)[: len(labels)]
    except Exception as error:
        if lacks_memory(error):
            raise
        return None


_MOST_STATISTICS, _STATISTIC_NUMBERS = 4096, 2**20
"""How many records a pass of statistics has at most, and about how many numbers of records and statistics together."""

_DOWN = 1.0 - 2.0**-50
"""A factor that keeps probabilities within those of the event despite rounding."""

_BLURRED = 0.01
"""Relative distance from a bound within which a norm counts in part."""


class LastNorms:
    """The norm of each record's gradient when last computed; infinite if it never was, or was not finite.

    They are private: they stay in the barrier, no answer, text or trace shows them or the number of drawn records, and
    a checkpoint stores them among the secrets of its run.
    """

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
    load: Callable[[Rows], Batch],
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
    candidates = np.flatnonzero(is_below(words[:, 0], _DOWN * sampling.rate * bounds / clip_norm))
    coins = torch.from_numpy(np.stack(np.divmod(words[:, 1], 2**32), axis=1).astype(np.float64))

    def sum_pass(rows: Rows, *, by_weight: bool) -> tuple[Tensor, Tensor]:
        """The sum over a pass's accepted records, and the norms of all; by weight, one that is not finite spoils it."""
        total, norms, start = torch.zeros_like(point, dtype=torch.float64), list[Tensor](), 0
        for found, inputs, labels in engine.in_parts(point, *load(rows)):
            some, device = rows[start : start + len(labels)], inputs.device
            start += len(labels)
            limits = upload(torch.from_numpy(bounds[some]), device)()
            norms.append(found.norms(clipping))
            clipped = torch.minimum(norms[-1], limits).clamp(max=clip_norm)
            chances = torch.where(torch.isfinite(norms[-1]), clipped, 0.0) / limits
            accepted = are_below(upload(coins[torch.from_numpy(some)], device)(), chances)
            added = torch.zeros(len(point), dtype=torch.float64, device=device)
            if by_weight:
                found.add_clipped_if_finite(clipping, added, torch.where(accepted, norms[-1], torch.inf))
            else:
                chosen = torch.nonzero(accepted)[:, 0]  # all of them are finite
                found.take(chosen).add_clipped_if_finite(clipping, added, norms[-1][chosen])
            total += added.to(total.device)
        return total, torch.cat(norms)

    total, norms = torch.zeros_like(point, dtype=torch.float64), list[Tensor]()
    passes = list(split_passes(candidates, engine.physical_batch))
    for rows in passes:
        found, of_pass = sum_pass(rows, by_weight=by_weight)
        total += torch.where(of_pass.amax() < torch.inf, found, 0.0) if by_weight else found
        norms.append(of_pass)
    measured = torch.cat(norms).cpu().numpy() if norms else np.zeros(0)  # the one wait for a device
    known = split_passes(np.isfinite(measured), engine.physical_batch)
    for rows, are_finite in zip(passes, known, strict=True) if by_weight else ():
        if not are_finite.all():
            total += sum_pass(rows, by_weight=False)[0]
    last.see(candidates, measured)
    return total


def are_below(words: Tensor, rates: Tensor) -> Tensor:
    """`is_below` on a device, [n]; words: [n, 2], the upper and the lower 32 bits of each, in 64-bit floats."""
    is_certain = rates >= 1.0
    # Factors of a power of two, and what is left below 1, are exact.
    scaled = torch.where(is_certain, 0.0, rates) * 2.0**32
    upper = scaled.floor()
    lower = ((scaled - upper) * 2.0**32).floor()
    is_in_lower = (words[:, 0] == upper) & (words[:, 1] < lower)
    return is_certain | (words[:, 0] < upper) | is_in_lower


P = ParamSpec("P")
T = TypeVar("T")

_UNTOLD = (
    "The query failed. The cause is withheld because it could reveal a record:"
    " try the model and the algorithm on public records of the same form."
)
_SOME, _PASSES, _MAX_MADE_UP = 100, 3, 10**7
"""The least of made-up records in a sample, its passes, and the most of which it is drawn; they are one record, so they
take no memory."""


def _with_fixed_arithmetic(
    answer: Callable[Concatenate["UnnoisedQueries", P], T],
) -> Callable[Concatenate["UnnoisedQueries", P], T]:
    """Compute an answer under the arithmetic of the configuration; its errors become QueryFailedError."""

    @functools.wraps(answer)
    def computed(self: "UnnoisedQueries", /, *args: P.args, **kwargs: P.kwargs) -> T:
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
        raise QueryFailedError(_failure_on_made_up_records(answer, self, args, kwargs) or _UNTOLD)

    return computed


def _failure_on_made_up_records(
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
    return min(_MAX_MADE_UP, math.ceil(max(_SOME, _PASSES * physical_batch) / sampling.rate))


class UnnoisedQueries:
    """Holds the records and computes the answers; `engine` computes the model's gradients.

    last_norms: the norms that importance sampling remembers. Raises RefusedError if the model mixes records.
    """

    def __init__(
        self, records: RecordArrays, model: Model, compute: ComputeConfig, last_norms: LastNorms
    ) -> None:
        self._given, self.compute = records, compute
        # A copy, which nobody else can change or switch to training after it was examined.
        self.model = replace(model, module=copy.deepcopy(model.module))
        self.engine = compute.engine(self.model, records)
        self._pool = pass_pool(compute, self.engine, model.parameter_count)
        self.last_norms = last_norms

    def of_made_up_records(self, count: int) -> "UnnoisedQueries":
        """The same queries of made-up records, which are all alike, and streamed to a device where the records are."""
        inputs, labels = (part.cpu().numpy() for part in self.engine.made_up_record())
        alike = (np.broadcast_to(part, (count, *part.shape[1:])) for part in (inputs, labels))
        queries = copy.copy(self)
        queries._given, queries.last_norms = MappedRecords(*alike), LastNorms()
        vars(queries).pop("_whole", None)
        if vars(queries).pop("records", None) is self._given:
            queries.records = queries._given
        return queries

    @functools.cached_property
    def records(self) -> RecordArrays:
        """The records on the device; the first answer brings them there, after its charge."""
        return self.compute.loader.put_on_device(self._given)

    @functools.cached_property
    def _whole(self) -> LinearRecords | None:
        """Closed forms over all records, if the model has them and the records fit into memory."""
        return all_in_closed_form(self.model, self._given, self.compute)

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
            return self._whole.clipped_sum(point.to(self.compute.home), clipping)

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
        if self.compute.home.type != "cpu" and self.compute.shards is None:
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
            total += part
            spare.append(part)
        return group.sum(total) if self.compute.slices is None else total

    def _sum_on_device(self, point: Tensor, clipping: Clipping, release: Release, stream: Stream) -> Tensor:
        """`clipped_sum` with one wait for the device; passes with a gradient that is not finite are taken again."""
        rows = self.compute.group.shard(self._sample(release, stream), self._count)
        passes = list(split_passes(rows, self.engine.physical_batch))
        total, are_right = torch.zeros_like(point, dtype=torch.float64), list[Tensor]()
        for records in self.compute.loader.prefetch(self.records, passes):
            part, is_right = self.engine.clipped_sum_if_finite(point, *records(), clipping)
            total += torch.where(is_right, part, 0.0)
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
    def statistic_sum(
        self, statistic: Statistic, bound: L1 | L2, dimension: int, release: Release, stream: Stream
    ) -> Tensor:
        """The sum of a statistic of the sample, clipped to the bound; shape [dimension], float64."""
        total = torch.zeros(dimension, dtype=torch.float64, device=self.compute.device)
        for part in self._statistics(statistic, dimension, release, stream):
            total += clip_and_sum(part.reshape(len(part), dimension), bound)
        return total.cpu()

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
        return float(np.clip((1.0 - norms / bound.norm) / (2.0 * _BLURRED), -0.5, 0.5).sum())

    @_with_fixed_arithmetic
    def minimum(self, release: Release, stream: Stream) -> Tensor:
        """The minimum that a release asks for, noise included; shape [d], float64."""
        return solve_minimum(self.model, self._given.features, self._given.labels, release, stream)

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
            WHOLE,
            self.engine.physical_batch,
            round_batch(min(_MOST_STATISTICS, _STATISTIC_NUMBERS // numbers)),
        )
        rows = self._sample(release, stream)
        return _answers(statistic, self.compute.loader.batches(self.records, rows, size), size)

    def _sample(self, release: Release, stream: Stream) -> Rows:
        if isinstance(release.sampling, Cyclic) and isinstance(release.noise, NoNoise):
            raise TypeError("parts are taken in turn by the steps of correlated noise alone")
        return draw_sample(release.sampling, self._count, stream, step=release.noise.step)

    def _copy_point(self, points: Tensor) -> Tensor:
        """A copy of points where sums are, so that a model that changes them changes only the copy."""
        return points.clone() if self.compute.slices else self.compute.at_home(points.detach())

    @property
    def _count(self) -> int:
        return len(self.records.labels)

    def _norms(self, point: Tensor, rows: Rows, bound: L2) -> NDArray[np.float64]:
        """Upper bounds on the norms of the chosen records' gradients, [rows]; not finite if a gradient is not."""

        def norms(engine: Engine, records: Load) -> Tensor:
            return engine.norms(point, *records(), bound)

        each = list(self._pool.map(norms, self._passes(rows)))
        return torch.cat(each).cpu().numpy() if each else np.zeros(0)

    def _passes(self, rows: Rows) -> Iterator[Load]:
        """Yield a function for each pass over some indices that returns its records."""
        return self.compute.loader.prefetch(self.records, split_passes(rows, self.engine.physical_batch))

    def _shared_passes(self, rows: Rows) -> Iterator[Load]:
        """The same for this process's rows; processes that share parameters run equally many passes."""
        if (shards := self.compute.shards) is None:
            return self._passes(rows)
        passes = list(split_passes(rows, self.engine.physical_batch))
        missing = shards.max_count(len(passes)) - len(passes)
        return self.compute.loader.prefetch(self.records, [*passes, *[rows[:0]] * missing])

    def _batches(self, rows: Rows) -> Iterator[Batch]:
        return self.compute.loader.batches(self.records, rows, self.engine.physical_batch)
