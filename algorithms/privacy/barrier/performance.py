"""The private records, and the resources that process them: memory, device, cores and processes."""

import functools
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from algorithms.errors import RefusedError
from algorithms.gradients import Engine, RecordsNotIndependentError
from algorithms.gradients.devices import in_full_precision, upload
from algorithms.gradients.model_inspection import in_16_bits
from algorithms.gradients.placement import Shards, together
from algorithms.models import Model

T = TypeVar("T")
R = TypeVar("R")

Rows = NDArray[np.intp]
"""Indices of records."""
Batch = tuple[Tensor, Tensor]
"""The features and labels of some records."""
Load = Callable[[], Batch]
"""Gives the records of a pass, on the device."""


class SideBySide:
    """Runs passes over records in parallel, each pass in one worker.

    A worker is a thread with its own copy of the engine: PyTorch releases the interpreter's lock in its kernels.
    Splitting a pass would change a record's contribution; running passes in parallel does not. Results come back in the
    order of the passes, so that sums have the same bits for any number of workers.

    workers: at least 1; a single worker is the calling thread. conditions: a context that each worker enters for a
    pass, since PyTorch's settings are per thread.
    """

    def __init__(
        self, engine: Engine, workers: int, conditions: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.workers = workers
        self._engine, self._conditions = engine, conditions

    def map(self, run: Callable[[Engine, T], R], passes: Iterable[T]) -> Iterator[R]:
        """Yield the results of `run`, in the order of the passes; holds at most `workers` + 1 passes."""
        passes = iter(passes)
        first = list(islice(passes, 2))
        if self.workers == 1 or len(first) < 2:
            yield from (run(self._engine, each) for each in chain(first, passes))
            return
        running: deque[Future[R]] = deque()
        try:
            for each in chain(first, passes):
                running.append(self._threads.submit(self._run, run, each))
                if len(running) > self.workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for left in running:
                left.cancel()

    def _run(self, run: Callable[[Engine, T], R], each: T) -> R:
        engine = self._free.pop()  # as many as threads, so that there is one
        try:
            with self._conditions():
                return run(engine, each)
        finally:
            self._free.append(engine)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.workers, thread_name_prefix="pass")

    @cached_property
    def _free(self) -> deque[Engine]:
        return deque(self._engine.copied() for _ in range(self.workers))


_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""CPU microseconds that a container may use, and the period; "max" if there is no limit."""


def cores() -> int:
    """The number of physical cores that this process may use, at least 1; at most OMP_NUM_THREADS if that is set."""
    limits = [psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0))]
    quota, _, period = (_QUOTA.read_text() if _QUOTA.exists() else "").partition(" ")
    if quota.isdecimal():
        limits.append(int(quota) // int(period))
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    if allowed.isdecimal():
        limits.append(int(allowed))
    return max(1, min(limits))


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run: this is number `rank` of `count`, and `local` of them run on this machine.

    Each process sums over its shard of the records, and the first adds the noise. All processes take the same steps:
    they make the same queries in the same order and use the first one's answer, noise included, so their states agree
    bit for bit. Only the first keeps the trace, the checkpoint and the ledger. A record's coin depends on its position
    in the release's stream, so the sample does not depend on the number of processes. Sums are added in 64 bits.

    secret: 32 bytes that these processes alone know, if there are several.
    """

    rank: int = 0
    count: int = 1
    local: int = 1
    secret: bytes = field(default=b"", repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this process adds the noise and keeps trace, checkpoint and ledger."""
        return self.rank == 0

    def shard(self, rows: Rows, records: int) -> Rows:
        """The part of `rows`, ascending indices into `records` records, that lies in this process's shard."""
        ends = [records * rank // self.count for rank in (self.rank, self.rank + 1)]
        first, last = np.searchsorted(rows, ends)
        return rows[first:last]

    def sum(self, part: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        self._together(lambda: distributed.all_reduce(part))
        return part

    def broadcast(self, answer: Tensor) -> Tensor:
        """Send a tensor from the first process to all, in place."""
        self._together(lambda: distributed.broadcast(answer, src=0))
        return answer

    def broadcast_object(self, value: Any) -> Any:
        """Send a picklable value from the first process to all; returns that value."""
        box, cpu = [value], torch.device("cpu")
        self._together(lambda: distributed.broadcast_object_list(box, src=0, device=cpu))
        return box[0]

    def agrees(self, digest: str) -> bool:
        """Whether all processes have the same digest, in hexadecimal digits."""
        own = torch.tensor(list(bytes.fromhex(digest)))
        differing = (self.broadcast(own.clone()) != own).sum()
        return not self.sum(differing)

    def _together(self, act: Callable[[], object]) -> None:
        """What all processes do at once; nothing for a single one."""
        if self.count > 1:
            with together():
                act()


ALONE = ProcessGroup()

_LOG = logging.getLogger(__name__)

_ENDS = torch.ones(2**16)
"""PyTorch processes the two halves of this tensor in different threads."""
_ENDS[0] = _ENDS[-1] = 1e-39

_FAULT_AROUND = 2**16
"""Linux maps up to this many bytes around a page that is read."""


class Records(Protocol):
    """The private records, as plain or memory-mapped arrays: `features` [n, *input_shape] and `labels` [n, ...]."""

    @property
    def features(self) -> NDArray[np.float32]: ...
    @property
    def labels(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class OnDevice:
    """Records that are copied to a device as a whole; `features` and `labels` are still the original arrays."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    tensors: Batch

    @classmethod
    def of(cls, records: Records, device: torch.device) -> "OnDevice":
        """The records, copied to a device."""
        copies = [torch.from_numpy(np.array(part)).to(device) for part in (records.features, records.labels)]
        return cls(records.features, records.labels, (copies[0], copies[1]))

    def take(self, rows: Rows) -> Batch:
        """The features and labels at some indices, in that order."""
        chosen = upload(torch.from_numpy(rows), self.tensors[0].device)()
        return self.tensors[0].index_select(0, chosen), self.tensors[1].index_select(0, chosen)


@dataclass(frozen=True)
class Performance:
    """Settings that change a result by rounding at most: where the arithmetic runs, and its memory.

    workers: parallel passes on a CPU; by default as many as cores and memory allow, with the same bits for any number.
    threads: per worker, see `Engine.threads`. group: the run's processes. shard_frozen, shard_trained: whether they
    divide the model's frozen parameters between them; and the trained ones, sums and the method's state. offload:
    whether these stay in main memory instead. All three are for a model that does not fit the device. expected_batch:
    the expected number of records in a step, from public numbers, which decides how many a pass has unless
    `physical_batch` does. number: the number of records, if it is public. Some algorithms hold a value of every record
    at once, and round differently. This number, not the true one, decides whether such an algorithm fits into memory;
    without it they are not used.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory_mb: int = 1024
    physical_batch: int | None = None
    number: int | None = None
    expected_batch: float | None = None
    workers: int | None = None
    threads: int | None = None
    group: ProcessGroup = ALONE
    shard_frozen: bool = False
    shard_trained: bool = False
    offload: bool = False

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

    def at_home(self, vector: Tensor) -> Tensor:
        """A copy of a flat vector [d] where parameters, sums and the method's state lie."""
        if self.slices is not None:
            return self.slices.divided(vector)
        return vector.to(self.home, copy=True)

    @property
    def home(self) -> torch.device:
        """The device of parameters and sums."""
        return torch.device("cpu") if self.offload else self.device

    def holds(self, numbers: int) -> bool:
        """Whether memory holds this many 32-bit numbers per record, for all records at once."""
        return self.number is not None and 4 * numbers * self.number <= self.memory_mb * 1e6

    def read(self, array: NDArray[Any], rows: Rows) -> NDArray[Any]:
        """A copy of some rows.

        Reading a row of a mapped file may bring its neighbours into memory. So from a file larger than the memory, a
        few rows are read at a time and the pages are given back, which are still in the file.
        """
        # What was changed in memory of a file mapped as "c" would be given back with it.
        if getattr(array, "mode", None) not in ("r", "r+") or array.nbytes <= self.memory_mb * 1e6:
            return array[rows]
        found = np.empty((len(rows), *array.shape[1:]), array.dtype)
        size = max(1, int(self.memory_mb * 1e6 / (2 * _FAULT_AROUND)))
        for start in range(0, len(rows), size):
            found[start : start + size] = array[rows[start : start + size]]
            array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined] # numpy names it nowhere else
        return found

    def batches(self, records: Records, rows: Rows, physical_batch: int) -> Iterator[Batch]:
        """The records at some indices, in that order, in physical batches on the device; the last may be shorter."""
        return (self.load(records, some) for some in in_passes(rows, physical_batch))

    def load(self, records: Records, rows: Rows) -> Batch:
        """The records at some indices, in that order, on the device."""
        return self._begin_to_load(records, rows)()

    def _begin_to_load(self, records: Records, rows: Rows) -> Load:
        """Read records and begin to copy them; the result gives the copies to the thread that computes."""
        if isinstance(records, OnDevice):
            return functools.partial(records.take, rows)
        inputs = torch.from_numpy(self.read(records.features, rows))
        labels = torch.from_numpy(records.labels[rows])
        moving = upload(inputs, self.device), upload(labels, self.device)
        return lambda: (moving[0](), moving[1]())

    def placed(self, records: Records) -> Records:
        """The records on the GPU if they fit into `memory_mb`; otherwise unchanged."""
        if isinstance(records, OnDevice) or self.device.type == "cpu":
            return records
        fits = records.features.nbytes + records.labels.nbytes <= self.memory_mb * 1e6
        return OnDevice.of(records, self.device) if fits else records

    def loaded(self, records: Records, passes: Iterable[Rows]) -> Iterator[Load]:
        """Yield a function for each pass that returns its records; a GPU's are read during the previous pass."""
        if self.device.type == "cpu" or isinstance(records, OnDevice):
            yield from (functools.partial(self.load, records, rows) for rows in passes)
            return
        for begun in one_ahead(lambda rows: self._begin_to_load(records, rows), passes):
            yield functools.partial(_arrived, begun)

    def side_by_side(self, engine: Engine, parameters: int) -> SideBySide:
        """The workers for an engine's passes, each of which returns `parameters` numbers.

        If memory is short there are fewer workers than cores. The passes stay as large as they are, since sums would
        round differently.
        """
        each = engine.pass_bytes + 8 * parameters
        most = max(1, int(self.memory_mb * 1e6 / each))
        here = max(1, cores() // self.group.local)
        wanted = self.workers or here // min(engine.threads, self.threads or engine.threads, here)
        workers = min(wanted, most) if self.device.type == "cpu" and self.shards is None else 1
        return SideBySide(engine, workers, lambda: self.computing(engine))

    def engine(self, model: Model, records: Records) -> Engine:
        """The gradient engine for a model of such records; only their shape and type are used.

        Raises RefusedError if the model mixes records or cannot be inspected.
        """
        each = None if self.expected_batch is None else self.expected_batch / self.group.count
        try:
            with torch.autocast(self.device.type, enabled=False):
                engine = Engine(
                    model,
                    input_shape=records.features.shape[1:],
                    input_dtype=torch.from_numpy(np.empty(0, records.features.dtype)).dtype,
                    device=self.device,
                    memory_mb=self.memory_mb,
                    expected_batch=each,
                    physical_batch=self.physical_batch,
                    offload=self.offload,
                    shards=self.shards,
                    shards_frozen=self.shard_frozen,
                    shards_trained=self.shard_trained,
                )
        except RecordsNotIndependentError as reason:
            advice = "use layers and losses that take each record by itself, like GroupNorm."
            if "BatchNorm" in str(reason):
                advice = "use GroupNorm, which algorithms.replace_batch_norm(model) puts in its place."
            raise RefusedError(f"{reason}, so no record's gradient can be clipped; {advice}") from reason
        if engine.is_random:
            raise RefusedError(engine.random_layer)
        if engine.is_narrow and model.precision == torch.float32:
            raise RefusedError(in_16_bits(model.name))
        return engine

    @contextmanager
    def computing(self, engine: Engine) -> Iterator[None]:
        """Set, within the block, what could otherwise change a record's contribution.

        Products have 32 bits or more, and only the model's own autocast is used. On a CPU there are at most as many
        threads as the engine allows; PyTorch has this setting per thread, and the smaller number is kept. If some
        threads flush denormal numbers to zero and others do not, there is one thread.
        """
        flushes = _flushes(_ENDS[:1])
        torch.set_flush_denormal(False)
        try:
            if self.device.type == "cpu":
                _limit_threads(min(engine.threads, self.threads or engine.threads))
            with in_full_precision(), torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            torch.set_flush_denormal(flushes)


def in_passes(rows: Rows, physical_batch: int) -> Iterator[Rows]:
    """Split indices into parts for passes; the last one is padded by whoever computes it."""
    return (rows[start : start + physical_batch] for start in range(0, len(rows), physical_batch))


def _arrived(begun: Callable[[], Load]) -> Batch:
    return begun()()


def one_ahead(load: Callable[[Rows], T], passes: Iterable[Rows]) -> Iterator[Callable[[], T]]:
    """Yield a function for each pass that returns what is loaded for it; another thread loads one pass ahead."""
    with ThreadPoolExecutor(1, thread_name_prefix="read") as reader:
        before = None
        for rows in passes:
            following = reader.submit(load, rows)
            if before is not None:
                yield before.result
            before = following
        if before is not None:
            yield before.result


def _limit_threads(most: int) -> None:
    if torch.get_num_threads() > most:
        torch.set_num_threads(most)
        _LOG.info("CPU threads: %d, so that a record counts the same in any place", most)
    if torch.get_num_threads() > 1 and _flushes(_ENDS):
        torch.set_num_threads(1)
        _LOG.warning("CPU threads: 1, since some of them take the smallest numbers for zero")


def _flushes(ends: Tensor) -> bool:
    """Whether a thread flushes denormal numbers to zero; the first and the last number are denormal."""
    halved = ends * 0.5
    return bool(halved[0] == 0.0) or bool(halved[-1] == 0.0)
