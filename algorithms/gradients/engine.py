"""The engine: clipped sums of per-example gradients, by the fastest correct algorithm for the model.

A pass records every use of a trained parameter and the gradient of its output (book-keeping, Bu et al. 2023), so norms
and clipped sums need no second pass. A model that cannot be recorded is differentiated record by record with
`torch.func`. An inspection on made-up inputs decides, once, which of the two is used, which dimension of each tensor
is the batch, and whether the model can be clipped at all.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial, reduce

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import (
    KERNEL_BATCH,
    MAX_SMALLER_SIZES,
    MIN_KERNEL_BATCH,
    PassCounts,
    pad_to_multiple,
    pass_sizes,
    round_batch,
    split_passes,
)
from algorithms.gradients.batch_invariance import (
    BatchComparison,
    PassValues,
    compare_batches,
    sizes_that_agree,
)
from algorithms.gradients.clipping import L1, L2, Box, Clipping, Normalised
from algorithms.gradients.cpu_threads import (
    SECONDS_PER_BYTE,
    SECONDS_PER_OPERATION,
    SHORT_PASS_SECONDS,
    threads_up_to,
)
from algorithms.gradients.determinism import refusal_of, unrepeatable_kernel
from algorithms.gradients.errors import ProcessLostError, UnsupportedModelError
from algorithms.gradients.grad_sample_recorder import UnrecordedError
from algorithms.gradients.independence import content_digest
from algorithms.gradients.linear import linear_layer
from algorithms.gradients.model import PerExampleModel, copy_module
from algorithms.gradients.model_failures import refuse_failures, where_raised, without_wrappers
from algorithms.gradients.model_gradients import PerExampleGradients, all_finite
from algorithms.gradients.model_inspection import (
    MAX_RECORDS,
    InspectionLimits,
    ModelInspection,
    PassCost,
    check_apart_at,
    examine,
    in_16_bits,
)
from algorithms.gradients.op_tracer import fills, fills_briefly
from algorithms.gradients.passes import Passes
from algorithms.gradients.patches import in_full_precision, without_shortcuts
from algorithms.gradients.placement import Shards, beside, shard_frozen
from algorithms.gradients.replay import NormReplay, Replay, Replays, flatten, norm_replay_of, replay_of
from algorithms.gradients.synthetic_inputs import InputSpec, SyntheticBatch, near_start
from algorithms.gradients.vector_ends import VectorEnds

_LOG = logging.getLogger(__name__)

_PASS_MEMORY = 3
"""Memory for a forward and a backward pass and the norms, as a multiple of what a forward pass saves."""

_CACHED_BYTES = 128e6
"""Memory of a pass with which a CPU is fastest, in bytes."""

_BRIEF_RECORDS = 3
"""The most records in a pass of a brief inspection."""

_MAX_BATCH_ON_DEVICE = 2**16
"""The largest physical batch on a device."""

_USUAL_BATCH, _USUAL_BATCH_ON_DEVICE = 64, 1024
"""The physical batch if the expected number of records is private, as far as memory allows."""

_SECONDS_PER_PASS, _SECONDS_PER_KERNEL, _SECONDS_PER_PARAMETER = 5e-4, 3e-5, 3e-9
"""Seconds of a pass of any size on one core, and those for each operator that it calls and each parameter.

Measured on 18 models of the zoo and three of dense layers, and true to a factor of two for most: an operator costs
5 to 60 microseconds, most in convolutional networks. Too much is the better error, as passes that hold nearly all
samples whole are the largest that are chosen.
"""

_RECORD_SLOWDOWN = 1.5
"""How much longer a record takes in a pass, with its norm and its share of the sum, than threads are chosen by.

In replayed passes of eleven models that the zoo does not have, records take 1.0 to 2.7 times as long, 8 times in a tiny
SqueezeBERT, and an operator 13 to 90 microseconds. By these times no sum over a sample of 8 to 64 takes more than 4 %
longer than with the best sizes; at factors of 1 and 2 some take 9 and 7 % longer.
"""

_MAX_OTHER_SIZES = 3
"""How many usual sizes are compared besides the first, of which some smaller ones do not agree.

With one, and that smaller than the first, sums of these models over samples of 32 and 64 take up to 18 % longer.
"""

_DEVICE_SPEEDUP = 100
"""How much faster a device computes; any pass takes as long."""

_ROUNDING_ALONE, _ROUNDING_IN_16_BITS = 1e-4, 3e-2
"""Differences of a record's loss between a full pass and one of it alone from which on 64 bits are to decide."""

_FEW_FURTHER_PASSES = 1e-3
"""Passes beyond the first in a sample, on average, for which no larger ones are worth their memory."""

_COMPARED_OPERATIONS, MAX_SEEDS = 10**9, 8
"""Operations of a forward pass up to which passes of a small model are compared again, and how often."""

_REPLAYED_BYTES, _TRACED_SHARE = 256e6, 0.25
"""Memory of a pass, and its share of what passes may take, up to which it is traced, which keeps all its tensors."""

_RECORDS_IN_PART = MIN_KERNEL_BATCH
"""Records whose gradients are materialised at a time where a pass has more and this is worth it."""

MATERIALIZED_PER_SAVED, MIN_PART_BYTES, MIN_PARAMETER_BYTES = 1.5, 4e6, 1e5
"""Materialised memory from which it is: as a multiple of what autograd saves, for all records of a part, and for each
parameter, whose calls take longer than the memory's traffic where it is less.

Measured with passes of 64 on slot attention, PatchTST, an MLP-Mixer, and on TabM and NF-ResNet-26, which are below.
"""

QUICK_OPERATIONS, _QUICK_BYTES = 2e9, 5e8
"""Operations, and bytes, of a pass on a CPU up to which a brief inspection computes numbers, not shapes alone."""


class Engine:
    """Per-example gradients of a model on one device, clipped and summed.

    The constructor inspects the model on made-up records: whether a record's result depends on another, which
    operations use parameters, and which dimension of their tensors is the batch. This takes about a hundred small
    passes, or passes of about fifteen records for large models. Each sum then takes one forward and one backward pass,
    as in ordinary training.

    All passes have one size, `physical_batch`; shorter ones are padded. It follows from the expected number of records
    and the memory, never from the records. Two passes of this size are compared: a record has to have the same loss,
    norm and gradient, bit for bit, beside any others. If only rounding differs, a larger size is tried, and then one
    record a pass; on an accelerator the size stays, and `batch_dependence` says why private records are refused.

    On a CPU a pass over fewer records may have one of `smaller_sizes`, in which records were found to have the same
    loss, norm and gradient bit for bit as in the usual one. So the size, which follows from how many records are left
    for the pass, changes nothing that a record contributes.

    Args:
        model: the architecture and the per-record loss.
        input_shape: of one record, without the batch dimension.
        input_dtype: of the inputs; an integer type for tokens.
        device: where the arithmetic runs; the CPU by default.
        memory_mb: for one pass. It limits the physical batch: a multiple of 64, or a power of two up to 32. If a model
            computes with other numbers of rows, or its control flow depends on values, the physical batch is 1.
        expected_batch: the expected number of records in a sum, from public numbers; None if it is private. It decides
            the physical batch, so that few records are added to fill passes.
        physical_batch: the number of records in a pass, in place of what follows from these.
        offload: whether trained parameters, and sums over records, stay in main memory: the points of queries are then
            on the CPU, and each use of a parameter copies it to the device. The model is inspected on the CPU.
        shards: the processes that share the model's parameters. The whole model is then inspected on the CPU, and each
            process must take the same number of batches, of which some may be empty.
        shard_frozen: whether each keeps a shard of the frozen parameters.
        shard_trained: whether each keeps a slice of the flat vector of trained parameters, and of sums: the points of
            queries are then divided by `shards`, and the clipping has no shift.
        limits: up to which models are inspected in full; larger ones are inspected briefly, by a few passes.

    Raises:
        RecordsNotIndependentError: if the model mixes records; the message names the layer.
        UnsupportedModelError: if the model fails on made-up records or cannot be sharded.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from algorithms.gradients import L2, Engine, PerExampleModel
        >>> losses = nn.CrossEntropyLoss(reduction="none")
        >>> module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> model = PerExampleModel("small", module, losses)
        >>> engine = Engine(model, input_shape=(3,))

        The parameters are one flat vector. The sum is neither divided by anything nor noised.

        >>> inputs, labels = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
        >>> total = engine.clipped_sum(model.initial_parameters(), inputs, labels, L2(1.0))
        >>> total.shape, total.dtype
        (torch.Size([26]), torch.float64)

        A batch norm would let each record change the others' contributions without a bound, so it is refused.

        >>> mixing = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        >>> Engine(PerExampleModel("mixing", mixing, losses), input_shape=(3,))
        Traceback (most recent call last):
        algorithms.gradients.errors.RecordsNotIndependentError: the layer 1 (BatchNorm1d) mixes records
    """

    def __init__(  # noqa: PLR0913
        self,
        model: PerExampleModel,
        *,
        input_shape: tuple[int, ...],
        input_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        memory_mb: int = 1024,
        expected_batch: float | None = None,
        physical_batch: int | None = None,
        offload: bool = False,
        shards: Shards | None = None,
        shard_frozen: bool = False,
        shard_trained: bool = False,
        limits: InspectionLimits | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        self.smaller_sizes: tuple[int, ...] = ()
        """Sizes of passes over fewer records than `physical_batch`, in which a record has the same bits; ascending."""
        self.batch_dependence = ""
        """Why private records are refused on this device unless rounding is accepted; usually empty."""
        inspected_on = torch.device("cpu") if offload or shards is not None else device
        self.shards = shards
        form = InputSpec(
            input_shape,
            input_dtype,
            inspected_on,
            packing=model.packing,
            label_shape=model.label_shape,
            label_dtype=model.label_dtype,
            padding=model.padding,
        )
        with refuse_failures(model, form), without_shortcuts():
            self.inspection = examine(Passes(model.on(inspected_on)), form, limits or InspectionLimits())
            self.passes = self.inspection.passes
            is_linear = linear_layer(model.module) is not None
            in_closed_form = expected_batch or 0.0 if is_linear else 0.0
            self._closed_form_seconds = in_closed_form * SECONDS_PER_OPERATION * self.inspection.operations
            largest = _records_that_fit(self.inspection.cost, memory_mb, device)
            if physical_batch is None:
                largest = round_batch(largest)
                size = self._cheapest_size(largest, expected_batch, device)
            else:
                size = largest = round_batch(physical_batch)
            self.physical_batch = self._size_that_fills(size, physical_batch, largest)
        # Passes of the inspection are recorded.
        self._replays: Replays[Replay] | None = None
        self._norm_replays: Replays[NormReplay] | None = None
        # Processes that share parameters need the same number of parts.
        is_placed = offload or shards is not None
        self.part_size = None if is_placed else _records_in_part(self.inspection, device)
        """How many records' gradients are measured and summed at a time; None if those of a pass are."""
        self._log()
        if offload or shards is not None:
            self._distribute(device, offload=offload, frozen=shard_frozen, trained=shard_trained)
        with refuse_failures(model, form), without_shortcuts():
            self._find_invariant_size(largest, device)
            if expected_batch is not None and physical_batch is None and self._may_have_smaller_sizes(device):
                self._find_smaller_sizes(largest, expected_batch, device)
        is_small = self.pass_bytes <= min(_REPLAYED_BYTES, _TRACED_SHARE * memory_mb * 1e6)
        if is_small and self._may_have_smaller_sizes(device):
            self._replays, self._norm_replays = Replays(), Replays()

    def _cheapest_size(self, largest: int, expected_batch: float | None, device: torch.device) -> int:
        """The size, up to the largest, with which a sum over an expected number of records takes least time."""
        if expected_batch is None:
            usual = _USUAL_BATCH if device.type == "cpu" else _USUAL_BATCH_ON_DEVICE
            return pass_sizes(min(largest, usual))[-1]
        seconds = self._seconds_by_size(largest, expected_batch, device)
        return min(seconds, key=seconds.__getitem__)

    def _seconds_by_size(self, largest: int, expected_batch: float, device: torch.device) -> dict[int, float]:
        """About how long passes of each size up to the largest take over a sample, if all smaller ones agree."""
        has_smaller = device.type == "cpu" and self._may_have_smaller_sizes(device)
        seconds = {}
        for size in pass_sizes(largest):
            counts = PassCounts.of(size, expected_batch)
            smaller = counts.smaller_sizes(self._max_smaller_sizes) if has_smaller else ()
            seconds[size] = self._sum_seconds(counts, smaller, device)
            if counts.mean_full < _FEW_FURTHER_PASSES:
                break
        return seconds

    def _sum_seconds(self, counts: PassCounts, smaller: tuple[int, ...], device: torch.device) -> float:
        """About how long passes over a sample take one core, if a last pass may have one of the smaller sizes."""
        parameters = self.passes.model.parameter_count
        fixed = (
            _SECONDS_PER_PASS
            + _SECONDS_PER_KERNEL * self.inspection.kernels
            + _SECONDS_PER_PARAMETER * parameters
        )
        each = _RECORD_SLOWDOWN * self._record_seconds / (1 if device.type == "cpu" else _DEVICE_SPEEDUP)
        # Each pass has a fixed part, whatever its size; its slots take time whether a record or padding fills them.
        return (counts.mean_full + 1.0) * fixed + counts.slots(smaller) * each

    def _size_that_fills(self, size: int, physical_batch: int | None, largest: int) -> int:
        """The size, or 1 if records do not keep to their rows in passes of it."""
        model = self.passes.model
        inspection = self.inspection
        if size > 1 and not self._fills(size):
            size = 1
            _LOG.warning(
                "the model %s processes one record at a time, since some of its tensors have other numbers of rows than"
                " there are records, or since its control flow depends on values",
                model.name,
            )
        elif physical_batch is None and largest < MIN_KERNEL_BATCH:
            _LOG.warning(
                "the model %s processes %d records a pass, since a record needs %.1f MB; passes of %d would be faster,"
                " and need memory_mb=%d",
                model.name,
                size,
                inspection.cost.each / 1e6,
                MIN_KERNEL_BATCH,
                math.ceil((inspection.cost.fixed + MIN_KERNEL_BATCH * inspection.cost.each) / 1e6),
            )
        return size

    def _find_invariant_size(self, largest: int, device: torch.device) -> None:
        """Find the size, from `physical_batch` on, at which no record's values depend on the others; or 1.

        A model that draws random numbers is not compared, and the barrier takes none. Raises RecordsNotIndependentError
        if values differ by more than rounding.
        """
        first = self.physical_batch
        if self.is_random or first == 1:
            return
        larger = [size for size in pass_sizes(min(largest, KERNEL_BATCH)) if size > first]
        for self.physical_batch in (first, *larger):
            if self._is_invariant(device):
                return
        if device.type != "cpu":
            self.physical_batch = first
            self.batch_dependence = (
                f"on the device {device.type} the last bits of a record's gradient depend on the other records in a"
                f" pass of the model {self.passes.model.name}, so that one record's effect is bounded there only up to"
                " rounding in 32 bits"
            )
            _LOG.warning("%s", self.batch_dependence)
            return
        self.physical_batch = 1
        _LOG.warning(
            "the model %s processes one record at a time, since the last bits of a record's values depend on the other"
            " records in passes of %d",
            self.passes.model.name,
            first,
        )

    def _is_invariant(self, device: torch.device) -> bool:
        """Whether no record's values depend on the others in passes of the present size."""
        try:
            comparison = self.compare_passes(self._point_for_comparison(device), device)
        except torch.OutOfMemoryError:
            raise UnsupportedModelError(
                f"a pass of {self.physical_batch} records of the model {self.passes.model.name} does not fit the"
                f" memory of the device {device.type}; set physical_batch or memory_mb to less.",
                code="pass_exceeds_memory",
                size=self.physical_batch,
                model=self.passes.model.name,
                device=device.type,
            ) from None
        if not (comparison.is_same and comparison.is_like_alone) and self.shards is None:
            check_apart_at(self.passes, replace(self.inspection.form, device=device), self.physical_batch)
        return comparison.is_same

    def _may_have_smaller_sizes(self, device: torch.device) -> bool:
        """Whether passes over fewer records may be smaller: where processes and devices need not keep in step."""
        passes = self.passes
        is_placed = (
            self.shards is not None or passes.offload is not None or passes.model.precision != torch.float32
        )
        return device.type == "cpu" and self.is_batched and not self.is_random and not is_placed

    @property
    def _max_smaller_sizes(self) -> int:
        """How many smaller sizes are compared: one for a large model, whose passes take long."""
        return 1 if self.inspection.is_brief else MAX_SMALLER_SIZES

    def _find_smaller_sizes(self, largest: int, expected_batch: float, device: torch.device) -> None:
        """Find the smaller sizes, and another usual size if it is faster with those that agree with it.

        Convolutions have kernels for 16 records and others for fewer, so that 8 agree with 12, but not with 16.
        """
        best = self.physical_batch
        if best == 1:
            return
        self.smaller_sizes, seconds = self._smaller_sizes_in_time(expected_batch, device)
        at_best = self._seconds_by_size(largest, expected_batch, device)
        others = sorted(at_best.keys() - {best}, key=lambda size: (at_best[size], size))
        for size in others[:_MAX_OTHER_SIZES]:
            # Its time if all smaller sizes agree, which is the least it can take: no later one can be faster, either.
            if at_best[size] >= seconds:
                break
            self.physical_batch = size  # whose invariance is compared, and with it the smaller sizes
            if self._fills(size) and self._is_invariant(device):
                smaller, its_seconds = self._smaller_sizes_in_time(expected_batch, device)
                if its_seconds < seconds:
                    best, self.smaller_sizes, seconds = size, smaller, its_seconds
        self.physical_batch = best

    def _smaller_sizes_in_time(
        self, expected_batch: float, device: torch.device
    ) -> tuple[tuple[int, ...], float]:
        """The smaller sizes that agree with the present one, and about how many seconds a sum takes with them."""
        counts = PassCounts.of(self.physical_batch, expected_batch)
        smaller = self._sizes_that_agree(counts.smaller_sizes(self._max_smaller_sizes), device)
        return smaller, self._sum_seconds(counts, smaller, device)

    def _sizes_that_agree(self, smaller: tuple[int, ...], device: torch.device) -> tuple[int, ...]:
        """Of smaller sizes, those in passes of which records have the bits of those of the usual size."""
        usual, threads, point = self.physical_batch, self.threads, self._point_for_comparison(device)
        uneven: set[int] = set()

        def compute(sample: SyntheticBatch, indices: Sequence[int], size: int) -> PassValues:
            self.physical_batch = size
            with VectorEnds(size, threads) as ends:
                parts = [part for part, _, _ in self.in_parts(point, sample.inputs, sample.labels)]
            if not ends.are_even:
                uneven.add(size)
            norms = torch.cat([part.norms(L2(1.0)) for part in parts])  # [records]
            each = [(part, torch.tensor([index])) for part in parts for index in range(len(part.losses))]
            losses = torch.cat([part.losses for part in parts])
            return PassValues(
                losses, losses, norms, [_digest(part.take(at)) for part, at in map(each.__getitem__, indices)]
            )

        try:
            for maximum in range(1, min(threads, torch.get_num_threads()) + 1):  # as a run may have fewer
                with threads_up_to(maximum):
                    smaller = sizes_that_agree(
                        compute,
                        self.inspection.form,
                        usual,
                        smaller,
                        seeds=max(
                            1, min((self._seeds + 1) // 2, 4 * KERNEL_BATCH // usual)
                        ),  # each compares twice
                        has_missing=True,
                    )
        finally:
            self.physical_batch = usual
        return tuple(size for size in smaller if size not in uneven)

    def _replay(self, size: int, clipping: Clipping | None) -> Replay | None:
        """The replay of a pass of this size for a clipping; None if the pass is to be recorded."""
        layouts = self.inspection.layouts
        if self._replays is None or layouts is None:
            return None
        is_whole = _is_by_whole_norm(clipping) and not self._has_parts(size)
        find = partial(replay_of, self.passes, layouts, self.inspection.form, size)
        return self._replays.of(
            (size, is_whole), lambda: (find(with_norms=True) if is_whole else None) or find()
        )

    def _point_for_comparison(self, device: torch.device) -> Tensor:
        """Parameters near the initial ones, where those of queries are."""
        point, shards = near_start(self.passes.model), self.passes.shards
        if shards is not None:
            return shards.slice_of(point)
        return point.to("cpu" if self.passes.offload is not None else device)

    def compare_passes(self, point: Tensor, device: torch.device) -> BatchComparison:
        """Compare passes of the present size at a point [d]."""
        inspection, passes, size = self.inspection, self.passes, self.physical_batch
        ends = VectorEnds(size)

        def compute(sample: SyntheticBatch, indices: Sequence[int]) -> PassValues:
            records = sample.inputs.to(device), sample.labels.to(device)
            with ends if device.type == "cpu" else nullcontext():
                parts = [part for part, _, _ in self.in_parts(point, *records)]
            losses = torch.cat([part.losses for part in parts])
            # Processes with slices of the parameters answer no queries of losses.
            evaluated = self._losses(point, *records) if passes.shards is None else losses
            norms = torch.cat([part.norms(L2(1.0)) for part in parts])
            each = [(part, index) for part in parts for index in range(len(part.losses))]
            chosen = [  # each record alone, by its index within its pass
                (part, torch.tensor([index], device=device)) for part, index in map(each.__getitem__, indices)
            ]
            return PassValues(losses, evaluated, norms, [_digest(part.take(index)) for part, index in chosen])

        def loss_alone(single: SyntheticBatch) -> Tensor:
            records = single.inputs.to(device), single.labels.to(device)
            if passes.shards is not None:
                return self.contributions(point, *records).losses
            return passes.losses(point.to(device), *records)

        is_narrow = passes.model.precision == torch.bfloat16
        with threads_up_to(self.threads):
            comparison = compare_batches(
                compute,
                loss_alone,
                inspection.form,
                size,
                seeds=self._seeds,
                has_missing=not is_narrow,  # such records are computed again
                tolerance=_ROUNDING_IN_16_BITS if is_narrow else _ROUNDING_ALONE,
            )
        return replace(comparison, is_same=comparison.is_same and ends.are_even)

    @property
    def _seeds(self) -> int:
        """How often passes are compared: once for a large model, whose many numbers show any rounding."""
        if self.inspection.is_brief:
            return 1
        affordable = _COMPARED_OPERATIONS // max(1, self.inspection.operations * self.physical_batch)
        return max(1, KERNEL_BATCH // self.physical_batch, min(MAX_SEEDS, affordable))

    def _fills(self, size: int) -> bool:
        """Whether records keep to their rows in passes of up to this many records."""
        inspection = self.inspection
        if not inspection.is_brief:
            with threads_up_to(1 if size * self._record_seconds < SHORT_PASS_SECONDS else None):
                return fills(self.passes, inspection.form, _sizes(size))
        is_quick = (
            size * inspection.operations <= QUICK_OPERATIONS and size * inspection.cost.each <= _QUICK_BYTES
        )
        is_quick &= inspection.form.device.type == "cpu"
        return inspection.layouts is None or fills_briefly(
            self.passes, inspection.form, (_BRIEF_RECORDS, size), is_quick=is_quick
        )

    def _distribute(self, device: torch.device, *, offload: bool, frozen: bool, trained: bool) -> None:
        """Put the parameters where they stay from now on; tries it on a made-up record."""
        wanted = {"offload": offload, "shard_frozen": frozen, "shard_trained": trained}
        words = " and ".join(name for name, is_wanted in wanted.items() if is_wanted)
        model, shards = self.passes.model, self.shards
        refused = f"the model {model.name} cannot be trained with {words}"
        if not self.is_batched:
            raise UnsupportedModelError(
                f"{refused}, since it is differentiated record by record; set it to false.",
                code="placement_record_by_record",
                model=model.name,
                settings=words,
            )
        model = shard_frozen(model, shards.mesh) if shards is not None and frozen else beside(model, device)
        self.passes = replace(
            self.passes,
            model=model,
            offload=device if offload else None,
            shards=shards if trained else None,
        )
        point = model.initial_parameters()
        if not offload:
            point = shards.slice_of(point) if shards is not None and trained else point.to(device)
        try:
            inputs, labels = self.synthetic_record()
            self.clipped_sum(point, inputs.to(device), labels.to(device), L2(1.0))
        except ProcessLostError:
            raise
        except (RuntimeError, UnrecordedError) as error:
            if (kernel := unrepeatable_kernel(error)) is not None:
                raise UnsupportedModelError(
                    refusal_of(kernel, model, device, where_raised(error, model))
                ) from error
            reason = str(error).partition("\n")[0]
            raise UnsupportedModelError(
                f"{refused} ({reason}); set it to false.",
                code="placement_failed",
                model=model.name,
                settings=words,
                reason=reason,
            ) from error

    def copy_for_thread(self) -> "Engine":
        """A copy for another thread: its modules are its own, their tensors are shared."""
        model, same = self.passes.model, copy.copy(self)
        module = copy_module(model.module, (*model.module.parameters(), *model.module.buffers()))
        same.passes = replace(self.passes, model=replace(model, module=module))
        return same

    def synthetic_record(self) -> tuple[Tensor, Tensor]:
        """The inputs and labels of one record, in the form of those that the model was inspected on."""
        made_up = self.inspection.form.draw(1, 0)
        return made_up.inputs, made_up.labels

    @property
    def pass_bytes(self) -> int:
        """Memory of a pass with the physical batch, in bytes."""
        return self.inspection.cost.fixed + self.physical_batch * max(1, self.inspection.cost.each)

    @property
    def is_batched(self) -> bool:
        """Whether one backward pass computes the gradients of all records in a pass."""
        return self.inspection.layouts is not None

    @property
    def replayed_sizes(self) -> tuple[int, ...]:
        """The sizes of passes that are by now replayed as lists of tensor operations, with recorded ones' bits."""
        return () if self._replays is None else self._replays.sizes

    @property
    def operations_without_rule(self) -> tuple[str, ...]:
        """The operations on parameters that have no rule; their gradients are materialised record by record."""
        return self.inspection.without_rule

    @property
    def is_random(self) -> bool:
        """Whether the model draws random numbers, as dropout does, so that its sums differ between calls."""
        return self.inspection.is_random

    @property
    def random_layer(self) -> str:
        """A sentence on the layer that draws random numbers; empty if none does."""
        return without_wrappers(self.inspection.random_layer())

    @property
    def is_narrow(self) -> bool:
        """Whether the model computes in 16 bits somewhere."""
        return self.inspection.is_narrow

    @property
    def precision_refusal(self) -> str:
        """Why no model of 32 bits may compute as this one does, in 16 bits somewhere; empty if it does not."""
        model = self.passes.model
        return in_16_bits(model.name) if self.is_narrow and model.precision == torch.float32 else ""

    @property
    def threads(self) -> int:
        """The number of CPU threads for a pass, from public numbers: `max_threads`, but one for a short pass."""
        return self.max_threads if self.pass_seconds >= SHORT_PASS_SECONDS else 1

    @property
    def pass_seconds(self) -> float:
        """About how long the records of a pass take one core; those of a sum, where closed forms take all at once."""
        together = self.physical_batch if self.is_batched else 1
        return max(together * self._record_seconds, self._closed_form_seconds)

    @property
    def _record_seconds(self) -> float:
        return (
            SECONDS_PER_OPERATION * self.inspection.operations + SECONDS_PER_BYTE * self.inspection.cost.each
        )

    @property
    def max_threads(self) -> int:
        """The largest number of CPU threads with which a record's result does not depend on its batch position.

        PyTorch splits long elementwise operations between threads, and processes the last numbers before a split
        differently if they do not fill two SIMD vectors. Halves of 64 records in 32 bits or more leave no such numbers.
        """
        leaves_none = (
            self.physical_batch % KERNEL_BATCH == 0 and self.passes.model.precision != torch.bfloat16
        )
        return 2 if leaves_none or self.physical_batch == 1 else 1

    @in_full_precision()
    def clipped_sum(
        self,
        parameters: Tensor,
        inputs: Tensor,
        labels: Tensor,
        clipping: Clipping,
        out: Tensor | None = None,
    ) -> Tensor:
        """The sum of the records' clipped gradients.

        A record whose gradient is not finite adds nothing.

        Args:
            parameters: flat, shape [d].
            inputs: [batch, *input_shape]; an empty batch gives zero.
            labels: [batch, ...].
            clipping: how each record's gradient is bounded.
            out: [d], float64, to write the sum into; allocating and clearing a new tensor takes noticeable time.

        Returns:
            Shape [d], float64. Every contribution is within the clipping's bound, rounding included.

        Example:
            A record moves the sum by at most the bound, however large it is.

            >>> import torch
            >>> from algorithms.gradients import L2, Engine, PerExampleModel, logistic_loss
            >>> model = PerExampleModel("logistic", torch.nn.Linear(3, 1), logistic_loss)
            >>> engine, point = Engine(model, input_shape=(3,)), model.initial_parameters()
            >>> inputs, labels = torch.tensor([[1.0, 2.0, 3.0], [1e6, 0.0, 0.0]]), torch.tensor([0, 1])
            >>> both = engine.clipped_sum(point, inputs, labels, L2(0.5))
            >>> one = engine.clipped_sum(point, inputs[:1], labels[:1], L2(0.5))
            >>> bool((both - one).norm() <= 0.5)
            True
        """
        total = None if out is None else out.zero_()
        for gradients, *records in self.in_parts(parameters, inputs, labels, clipping):
            norms = gradients.norms(clipping)
            if total is None:  # after the backward pass, which needs the memory
                total = torch.zeros_like(parameters, dtype=torch.float64)
            if self.passes.model.precision == torch.bfloat16:
                self._add_apart(gradients, norms, parameters, records, clipping, total)
            else:
                self._add(gradients, clipping, total, norms)
            # Names would keep the tensors alive until the next pass has its own, which needs their memory.
            del gradients, norms
        assert total is not None
        return total

    @in_full_precision()
    def clipped_sum_if_finite(
        self, parameters: Tensor, inputs: Tensor, labels: Tensor, clipping: Clipping
    ) -> tuple[Tensor, Tensor]:
        """The sum of one physical batch, [d], float64, and whether it is that of `clipped_sum`, [].

        It is not if a gradient is not finite. Nothing on the host waits for the device, so that passes follow each
        other without a gap. Not for parameters that processes share.
        """
        total = torch.zeros_like(parameters, dtype=torch.float64)
        parts = self.in_parts(parameters, inputs, labels, clipping)
        return total, reduce(
            torch.logical_and, [f.add_clipped_if_finite(clipping, total) for f, _, _ in parts]
        )

    def in_parts(
        self, parameters: Tensor, inputs: Tensor, labels: Tensor, clipping: Clipping | None = None
    ) -> Iterator[tuple[PerExampleGradients, Tensor, Tensor]]:
        """Yield per-example gradients, with their records, of one physical batch after another; for the barrier alone.

        clipping: that they are used for, which decides on the sizes of passes; all have one if it is not known.
        If the pass of a batch cannot be recorded, each half has a pass of the same size, and so on: a record for which
        the model takes another way is differentiated alone, and all others have the values that they have without it.
        """
        for batch in self._batches(inputs, labels):
            try:
                gradients = self.contributions(parameters, *batch, clipping)
            except UnrecordedError:
                if self.shards is not None:  # the other processes would wait for another number of passes
                    raise
                for half in _halves(*batch):
                    yield from self.in_parts(parameters, *half, clipping)
            else:
                yield from self._in_parts(gradients, *batch, clipping)
                del gradients  # the next pass needs its memory

    def _in_parts(
        self, gradients: PerExampleGradients, inputs: Tensor, labels: Tensor, clipping: Clipping | None
    ) -> Iterator[tuple[PerExampleGradients, Tensor, Tensor]]:
        """Yield the gradients of a pass, whole or in parts, with their records.

        In models of short sequences materialised gradients, which are kept from the norms to the sum, are most of a
        pass's memory. The parts follow from the size of the pass alone.
        """
        if not self._has_parts(gradients.rows):
            yield gradients, inputs, labels
            return
        assert self.part_size is not None
        norms = self._norms_of_parts(gradients, clipping)
        for rows in gradients.parts(self.part_size):
            part = norms(rows) or gradients.part(rows)
            yield part, inputs[rows], labels[rows]
            del part  # the next one needs its memory

    def _has_parts(self, size: int) -> bool:
        """Whether gradients of passes of this size are measured and summed in parts."""
        return self.part_size is not None and size > self.part_size

    def _norms_of_parts(
        self, gradients: PerExampleGradients, clipping: Clipping | None
    ) -> Callable[[slice], PerExampleGradients | None]:
        """What replays norms of some rows of a pass; it returns None where there is no replay."""
        replays, layouts, size = self._norm_replays, self.inspection.layouts, gradients.rows
        if replays is None or layouts is None or not _is_by_whole_norm(clipping):
            return lambda rows: None
        find = partial(norm_replay_of, self.passes, layouts, self.inspection.form, size)
        flat = cache(partial(flatten, gradients))  # a replay was found, so that it can be done

        @in_full_precision()
        def measure(rows: slice) -> PerExampleGradients | None:
            # The last rows of a pass may be fewer than these.
            replay = replays.of((size, rows.start), partial(find, rows))
            return None if replay is None else replay(gradients, flat())

        return measure

    @in_full_precision()
    def contributions(
        self, parameters: Tensor, inputs: Tensor, labels: Tensor, clipping: Clipping | None = None
    ) -> PerExampleGradients:
        """Per-example gradients of one physical batch from a single pass; for the barrier alone.

        clipping: see `in_parts`. Raises UnrecordedError if the pass of several records cannot be recorded.
        """
        if len(labels) == 0:
            if self.shards is None:
                return self.passes.contributions(parameters, parameters.new_zeros(0), {})
            # A pass over a made-up record, so that other processes can gather weights for theirs.
            made_up, label = (part.to(inputs.device) for part in self.synthetic_record())
            return self.contributions(parameters, made_up, label).first(0)
        count = len(labels)
        size = self._size_of_pass(count, clipping)
        padded = pad_to_multiple(inputs, size), pad_to_multiple(labels, size)
        if self.inspection.layouts is not None:
            replay = self._replay(size, clipping)
            replayed = None if replay is None else replay(parameters, *padded)
            if replayed is not None:
                return replayed.first(count)
            try:
                return self.passes.record_gradients(parameters, *padded, self.inspection.layouts).first(count)
            except UnrecordedError:  # for this batch alone: a record must not affect the next batch
                if count > 1 or self.shards is not None:
                    raise
            padded = inputs, labels
        on_device = parameters.to(inputs.device)  # all at once, if they are in main memory
        return self.passes.one_by_one(on_device, *padded, count).first(count)

    def norms(self, parameters: Tensor, inputs: Tensor, labels: Tensor, clipping: Clipping) -> Tensor:
        """The norm of every record's gradient as `clipping` defines it.

        Args:
            parameters: flat, shape [d].
            inputs: [batch, *input_shape].
            labels: [batch, ...].
            clipping: which norm: L2, L1, over each layer, or after an affine map.

        Returns:
            Shape [batch], or [batch, layers] for `PerLayer`; float64, not finite for a gradient that is not. Norms
            include a margin for the rounding of the contributions. They are as private as the records.
        """
        parts = self.in_parts(parameters, inputs, labels, clipping)
        return torch.cat([gradients.norms(clipping) for gradients, _, _ in parts])

    def clipped_losses(self, parameters: Tensor, inputs: Tensor, labels: Tensor, bound: float) -> Tensor:
        """The sum over records of their losses, each clipped to [0, bound].

        Args:
            parameters: flat, shape [d].
            inputs: [batch, *input_shape]; an empty batch gives zero.
            labels: [batch, ...].
            bound: what a single loss counts at most, in its own units. A loss that is NaN counts as zero.

        Returns:
            Shape [], float64.
        """
        total = torch.zeros((), dtype=torch.float64, device=parameters.device)
        for batch_inputs, batch_labels in self._batches(inputs, labels) if len(labels) else []:
            losses = self._losses(parameters, batch_inputs, batch_labels).double()
            # NaN before the clamp, which would keep it: the sum of all records would be NaN.
            clipped = torch.nan_to_num(losses, nan=0.0, posinf=bound, neginf=0.0).clamp(0.0, bound)
            total += clipped.sum().to(total.device)
        return total

    def clipped_loss_gain(
        self, start: Tensor, parameters: Tensor, inputs: Tensor, labels: Tensor, bound: float
    ) -> Tensor:
        """The sum over records of how far their loss is lower than at `start`, each clipped to [-bound, bound].

        start, parameters: flat, shape [d]. inputs, labels, bound: as in `clipped_losses`; a difference that is NaN, as
        of two infinite losses, counts as zero. Returns shape [], float64.
        """
        total = torch.zeros((), dtype=torch.float64, device=parameters.device)
        for batch_inputs, batch_labels in self._batches(inputs, labels) if len(labels) else []:
            before, after = (
                self._losses(point, batch_inputs, batch_labels).double() for point in (start, parameters)
            )
            gains = torch.nan_to_num(before - after, nan=0.0, posinf=bound, neginf=-bound)
            total += gains.clamp(-bound, bound).sum().to(total.device)
        return total

    def _losses(self, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each record of one physical batch.

        In bfloat16 those that are not finite come from passes of their own, as in `_add_apart`.
        """
        losses = self._losses_together(parameters, inputs, labels)
        if self.passes.model.precision == torch.bfloat16:
            for index in torch.nonzero(~torch.isfinite(losses))[:, 0].tolist():
                row = slice(index, index + 1)
                losses[row] = self._losses_together(parameters, inputs[row], labels[row])
        return losses

    def _losses_together(self, parameters: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """The same in one pass; computed record by record, or in parts, as gradients are."""
        if self.inspection.layouts is not None:
            on_device = parameters.to(inputs.device)  # all at once, if they are in main memory
            try:
                return self.passes.losses(on_device, self._pad(inputs), self._pad(labels))[: len(labels)]
            except UnrecordedError:
                if len(labels) > 1:
                    halves = _halves(inputs, labels)
                    return torch.cat([self._losses_together(parameters, *half) for half in halves])
        return self.passes.losses_one_by_one(parameters, inputs, labels)

    def _add_apart(
        self,
        gradients: PerExampleGradients,
        norms: Tensor,
        parameters: Tensor,
        records: Sequence[Tensor],
        clipping: Clipping,
        total: Tensor,
    ) -> None:
        """Add clipped contributions in bfloat16, those that are not finite from passes of their own.

        Matrix products on some processors corrupt the rows next to a row that is not finite, so each record that is not
        is computed again, alone.
        """
        finite = all_finite(norms)
        # A sum without the rows that may be spoilt.
        self._add(gradients.take(torch.nonzero(finite)[:, 0]), clipping, total, norms[finite])
        spoilt = torch.nonzero(~finite)[:, 0].tolist()
        inputs, labels = records
        # Processes that share parameters take as many passes each as the one with the most, some of them empty.
        for number in range(len(spoilt) if self.shards is None else self.shards.max_count(len(spoilt))):
            row = slice(spoilt[number], spoilt[number] + 1) if number < len(spoilt) else slice(0)
            self._add(self.contributions(parameters, inputs[row], labels[row]), clipping, total, None)

    @property
    def _add(self) -> Callable[[PerExampleGradients, Clipping, Tensor, Tensor | None], None]:
        """What adds clipped contributions to a total, of which other processes may hold slices."""
        if self.passes.shards is None:
            return PerExampleGradients.add_clipped
        return partial(_add_to_shards, self.passes.shards)

    def _size_of_pass(self, count: int, clipping: Clipping | None) -> int:
        """The size of a pass over so many records, at most `physical_batch`.

        Smaller ones have the same bits in norms over the whole gradient; others, as after a map, were not compared.
        """
        fitting = (size for size in self.smaller_sizes if count <= size < self.physical_batch)
        return next(fitting, self.physical_batch) if _is_by_whole_norm(clipping) else self.physical_batch

    def _pad(self, values: Tensor) -> Tensor:
        return pad_to_multiple(values, self.physical_batch)

    def _batches(self, inputs: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        if len(labels) <= self.physical_batch:  # also none
            return [(inputs, labels)]
        parts = (split_passes(part, self.physical_batch) for part in (inputs, labels))
        return list(zip(*parts, strict=True))

    def _log(self) -> None:
        name, inspection = self.passes.model.name, self.inspection
        if inspection.layouts is None:
            _LOG.warning("the model %s is differentiated record by record: %s", name, inspection.reason)
        elif inspection.without_rule:
            _LOG.warning(
                "in the model %s these are differentiated record by record: %s",
                name,
                ", ".join(inspection.without_rule),
            )


def _is_by_whole_norm(clipping: Clipping | None) -> bool:
    """Whether gradients are scaled by their L2 norms over all parameters."""
    return isinstance(clipping, L2 | Normalised)


def _add_to_shards(
    shards: Shards, gradients: PerExampleGradients, clipping: Clipping, total: Tensor, norms: Tensor | None
) -> None:
    """Add clipped contributions to a total of which each process holds a slice, one parameter at a time."""
    for index, part in gradients.clipped_parts(clipping, norms):
        shards.add(part, index, total)


def clip_and_sum(rows: Tensor, clipping: L1 | L2 | Box) -> Tensor:
    """The sum of the clipped rows, in 64 bits; a row that is not finite counts as zero.

    Args:
        rows: [batch, d], of any floating type.
        clipping: The bound on each row.

    Returns:
        Shape [d], float64; every row's contribution is within the bound, rounding included.

    Example:
        >>> import torch
        >>> from algorithms.gradients import L2, clip_and_sum
        >>> rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 0.0]])
        >>> [round(value, 3) for value in clip_and_sum(rows, L2(1.0)).tolist()]
        [0.9, 1.2]
    """
    rows = rows.double()  # in which no square of a smaller number overflows
    norms = PerExampleGradients.of_rows(rows).norms(clipping)
    are_finite = all_finite(norms)
    # Zeros instead of fewer rows, whose number the host would have to wait for.
    finite_rows = PerExampleGradients.of_rows(torch.where(are_finite[:, None], rows, 0.0))
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    finite_rows.add_clipped_if_finite(clipping, total, torch.where(are_finite, norms, 0.0))
    return total


def _records_that_fit(cost: PassCost, memory_mb: int, device: torch.device) -> int:
    """How many records fit into memory; on a CPU no more than is fast, but at least `KERNEL_BATCH` if that fits."""
    is_cpu = device.type == "cpu"
    saved = _PASS_MEMORY * (cost.saved + cost.materialized)
    maximum = max(1, cost.each)  # frozen layers save nothing, but running them needs memory
    best = max(KERNEL_BATCH, _CACHED_BYTES / saved) if is_cpu else math.inf
    free = memory_mb * 1e6 - cost.fixed
    return max(1, int(min(free / maximum, best, MAX_RECORDS if is_cpu else _MAX_BATCH_ON_DEVICE)))


def _records_in_part(inspection: ModelInspection, device: torch.device) -> int | None:
    """How many records' gradients to materialise at a time; None for those of a pass."""
    cost, parameters = inspection.cost, len(inspection.passes.model.slices)
    # Where autograd saves more, they are not what takes the memory.
    is_most = cost.materialized > MATERIALIZED_PER_SAVED * cost.saved
    is_worth_it = _RECORDS_IN_PART * cost.materialized >= max(
        MIN_PART_BYTES, parameters * MIN_PARAMETER_BYTES
    )
    is_apart = inspection.layouts is not None and device.type == "cpu"
    return _RECORDS_IN_PART if is_apart and is_most and is_worth_it else None


def _digest(record: PerExampleGradients) -> int:
    """A digest of the gradient of one record, zeros without their sign."""
    parts = record.weighted_parts(torch.ones(1, dtype=torch.float64, device=record.losses.device))
    return hash(tuple((name, content_digest(part.add_(0.0))) for name, part in parts))  # 0.0 + -0.0 is 0.0


def _halves(inputs: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The first and the second half of a batch of at least two records."""
    middle = len(labels) // 2
    return [(inputs[half], labels[half]) for half in (slice(middle), slice(middle, None))]


def _sizes(physical_batch: int) -> list[int]:
    """Batch sizes to inspect: the smallest, twice that and the largest; for a single size also half of it."""
    minimum = min(MIN_KERNEL_BATCH if physical_batch == KERNEL_BATCH else KERNEL_BATCH, physical_batch)
    return sorted({minimum, 2 * minimum, physical_batch})
