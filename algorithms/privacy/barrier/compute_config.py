"""Where a run's arithmetic takes place, and how much memory it has; a result changes by rounding at most."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from algorithms.errors import ModelRefusedError, RefusedError
from algorithms.gradients import Engine, RecordsNotIndependentError, UnsupportedModelError
from algorithms.gradients.placement import Shards
from algorithms.models import Model
from algorithms.privacy.barrier.process_group import SINGLE_PROCESS, ProcessGroup
from algorithms.privacy.barrier.record_loader import RecordArrays, RecordLoader


@dataclass(frozen=True)
class ComputeConfig:
    """Settings that change a result by rounding at most: where the arithmetic runs, and its memory.

    Attributes:
        device: Where the arithmetic runs.
        memory_mb: Memory for per-record work, in MB.
        physical_batch: Records in a pass; by default what is fastest by public numbers.
        number: The number of records, if it is public. Some algorithms hold a value of every record at once, and round
            differently. This number, not the true one, decides whether such an algorithm fits into memory; without it
            they are not used.
        max_number: A public bound on it where it is private; it decides how many records a pass has.
        expected_batch: The expected number of records in a step, from public numbers, which decides how many a pass has
            unless `physical_batch` does.
        workers: Parallel passes on a CPU; by default as many as cores and memory allow, with the same bits for any
            number.
        threads: Per worker, see `Engine.threads`.
        group: The run's processes.
        shard_frozen: Whether the processes divide the model's frozen parameters between them. It, the next and
            `offload` are for a model that does not fit the device.
        shard_trained: Whether they divide the trained parameters, sums and the method's state.
        offload: Whether trained parameters, sums and the method's state stay in main memory instead.
        accept_rounding: Whether private records are trained on where an accelerator's last bits depend on the other
            records.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory_mb: int = 1024
    physical_batch: int | None = None
    number: int | None = None
    max_number: int | None = None
    expected_batch: float | None = None
    workers: int | None = None
    threads: int | None = None
    group: ProcessGroup = SINGLE_PROCESS
    shard_frozen: bool = False
    shard_trained: bool = False
    offload: bool = False
    accept_rounding: bool = False

    @cached_property
    def shards(self) -> Shards | None:
        """The processes that share parameters, if several do."""
        if self.group.count == 1 or not (self.shard_frozen or self.shard_trained):
            return None
        from torch.distributed.device_mesh import init_device_mesh

        return Shards(init_device_mesh(self.device.type, (self.group.count,)))

    @property
    def slices(self) -> Shards | None:
        """The processes that hold slices of flat vectors, if several share trained parameters."""
        return self.shards if self.shard_trained else None

    def local_copy(self, vector: Tensor) -> Tensor:
        """A copy of a flat vector [d] on the `parameter_device`; the process's slice where several share parameters."""
        if self.slices is not None:
            return self.slices.slice_of(vector)
        return vector.to(self.parameter_device, copy=True)

    @property
    def parameter_device(self) -> torch.device:
        """Where parameters, sums and the method's state lie."""
        return torch.device("cpu") if self.offload else self.device

    def holds(self, numbers: int) -> bool:
        """Whether memory holds this many 32-bit numbers per record, for all records at once."""
        return self.number is not None and 4 * numbers * self.number <= self.memory_mb * 1e6

    @property
    def loader(self) -> RecordLoader:
        """What brings records to the device."""
        return RecordLoader(self.device, self.memory_mb)

    def check_rounding(self, engine: Engine, *, private: bool) -> None:
        """Raises RefusedError for private records if the device's last bits depend on the batch, unless accepted."""
        if engine.batch_dependence and private and not self.accept_rounding:
            raise RefusedError(
                "{why}; set {compute.device} to cpu, or {compute.accept_rounding} to true, which the privacy"
                " card states.",
                code="rounding_depends_on_batch",
                why=engine.batch_dependence,
            )

    def engine(self, model: Model, records: RecordArrays) -> Engine:
        """The gradient engine for a model of such records; only their shape and type are used.

        Raises RefusedError if the model mixes records, and ModelRefusedError if it cannot be inspected.
        """
        # Passes are planned for what one process computes.
        records_per_process = None if self.expected_batch is None else self.expected_batch / self.group.count
        try:
            # The inspection computes as training will, whatever autocast the caller has open.
            with torch.autocast(self.device.type, enabled=False):
                engine = Engine(
                    model,
                    input_shape=records.features.shape[1:],
                    input_dtype=torch.from_numpy(np.empty(0, records.features.dtype)).dtype,
                    device=self.device,
                    memory_mb=self.memory_mb,
                    expected_batch=records_per_process,
                    physical_batch=self.physical_batch,
                    offload=self.offload,
                    shards=self.shards,
                    shard_frozen=self.shard_frozen,
                    shard_trained=self.shard_trained,
                )
        except UnsupportedModelError as reason:
            raise ModelRefusedError(
                "{message}", code=reason.code or "model_unsupported", message=str(reason), **reason.fields
            ) from reason
        except RecordsNotIndependentError as reason:
            advice = "use layers and losses that take each record by itself, like GroupNorm"
            if reason.kind == "batch_norm":
                advice = "use GroupNorm, which algorithms.replace_batch_norm(model) puts in its place"
            raise RefusedError(
                "{why}, so no record's gradient can be clipped; {advice}.",
                code="records_mixed",
                why=reason,
                advice=advice,
            ) from reason
        if engine.is_random:
            raise RefusedError(engine.random_layer)
        if engine.precision_refusal:
            raise RefusedError(
                "{message}", code="computes_in_16_bits", message=engine.precision_refusal, model=model.name
            )
        return engine
