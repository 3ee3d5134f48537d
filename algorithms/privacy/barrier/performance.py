"""The records that a barrier holds, and where it works on them: memory, device, cores and processes."""

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
from torch.distributed.device_mesh import init_device_mesh

from algorithms.errors import RefusedError
from algorithms.gradients import Engine, RecordsNotIndependentError
from algorithms.gradients.arithmetic import in_full_precision
from algorithms.gradients.padding import pass_size
from algorithms.models import Model

T = TypeVar("T")
R = TypeVar("R")


class SideBySide:
    """Passes over records on several cores at once, each computed whole by one worker of an engine.

    A worker is a thread with a copy of the engine: PyTorch releases the interpreter's lock inside of its kernels.
    Cutting one pass further would change what a record counts; passes beside each other do not. Their results are
    handed out in the order of the passes, so that sums have the same bits for any number of workers.

    workers: how many, at least 1; a single one is the thread that asks. conditions: what each pass is computed under,
    a context of its own thread.
    """

    def __init__(
        self, engine: Engine, workers: int, conditions: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.workers = workers
        self._engine, self._conditions = engine, conditions

    def map(self, run: Callable[[Engine, T], R], passes: Iterable[T]) -> Iterator[R]:
        """What `run` gives for each pass, in their order; at most one pass more than there are workers is held."""
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
"""What a container may use, in microseconds of each so many; "max" where that is all."""


def cores() -> int:
    """The physical cores that this process may use, at least 1; no more than OMP_NUM_THREADS, where that is set."""
    limits = [psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0))]
    quota, _, period = (_QUOTA.read_text() if _QUOTA.exists() else "").partition(" ")
    if quota.isdecimal():
        limits.append(int(quota) // int(period))
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    if allowed.isdecimal():
        limits.append(int(allowed))
    return max(1, min(limits))


class ProcessLostError(RuntimeError):
    """Another process of the run has ended; the message says what to do."""


@dataclass(frozen=True)
class Group:
    """The processes of a run, of which this one is number `rank` of `count`; `local` of them are on this machine.

    Each computes the sum over a shard of the records, and the first one adds the noise. All of them take the same
    steps: they are asked the same questions in the same order, and each answer is that of the first, noise included, so
    that their states are the same bit for bit. The first alone keeps the trace, the checkpoint and the ledger. A
    record's coin comes from its place in the release's stream, so that who takes part does not depend on how many
    processes there are; sums are added up in 64 bits.
    """

    rank: int = 0
    count: int = 1
    local: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one adds the noise, and keeps what is kept."""
        return self.rank == 0

    def shard(self, rows: NDArray[np.intp], records: int) -> NDArray[np.intp]:
        """Those of some rows, ascending, that lie in this process's shard of so many records."""
        ends = [records * rank // self.count for rank in (self.rank, self.rank + 1)]
        first, last = np.searchsorted(rows, ends)
        return rows[first:last]

    def sum(self, part: Tensor) -> Tensor:
        """The sum of the parts of all processes, in place."""
        if self.count > 1:
            with _connected():
                distributed.all_reduce(part)
        return part

    def most(self, count: int) -> int:
        """The largest of the processes' counts."""
        largest = torch.tensor(count)
        if self.count > 1:
            with _connected():
                distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        return int(largest)

    def first(self, answer: Tensor) -> Tensor:
        """The first process's answer, for all of them."""
        if self.count > 1:
            with _connected():
                distributed.broadcast(answer, src=0)
        return answer

    def told(self, value: Any) -> Any:
        """What the first process says, any picklable value, for all of them."""
        if self.count == 1:
            return value
        box = [value]
        with _connected():
            distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


ALONE = Group()


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, torch.distributed.DistError) as reason:
        raise ProcessLostError(
            "another process of this run has ended; start the run again: it goes on from its checkpoint, on any number"
            " of processes, and spends nothing more."
        ) from reason


_LOG = logging.getLogger(__name__)

_ENDS = torch.ones(2**16)
"""Numbers of which PyTorch gives the first half to one thread and the rest to others."""
_ENDS[0] = _ENDS[-1] = 1e-39

_FAULT_AROUND = 2**16
"""Bytes around a page that Linux maps with it."""


class Records(Protocol):
    """The private records: memory-mapped or plain arrays, `features` [n, *input_shape] and `labels` [n, ...]."""

    @property
    def features(self) -> NDArray[np.float32]: ...
    @property
    def labels(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class OnDevice:
    """Records whose tensors lie on a device as a whole; what asks for arrays is given the original ones."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    tensors: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, records: Records, device: torch.device) -> "OnDevice":
        """The records, copied to a device."""
        copies = [torch.from_numpy(np.array(part)).to(device) for part in (records.features, records.labels)]
        return cls(records.features, records.labels, (copies[0], copies[1]))

    def take(self, rows: NDArray[np.intp]) -> tuple[Tensor, Tensor]:
        """The features and labels of some indices in their order."""
        chosen = torch.from_numpy(rows).to(self.tensors[0].device, non_blocking=True)
        return self.tensors[0].index_select(0, chosen), self.tensors[1].index_select(0, chosen)


@dataclass(frozen=True)
class Performance:
    """What changes a result by rounding at most: where the arithmetic runs and how much memory it may take.

    workers: passes that run side by side on a CPU; as many as the cores and the memory allow by default, with the same
    bits for any number. threads: of each, see `Engine.threads`. group: the processes of the run. shard_frozen:
    whether several of them divide the model's frozen parameters between them. number: of the records, where it is
    public. Ways that hold something of all records at once round otherwise than those that do not, for every record:
    this number and not the true one decides whether they fit, and without it they are not taken.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory_mb: int = 1024
    physical_batch: int | None = None
    number: int | None = None
    workers: int | None = None
    threads: int | None = None
    group: Group = ALONE
    shard_frozen: bool = False

    @property
    def shards(self) -> bool:
        """Whether several processes share frozen parameters."""
        return self.shard_frozen and self.group.count > 1

    def holds(self, numbers: int) -> bool:
        """Whether so many 32-bit numbers of each record fit the memory for all of them."""
        return self.number is not None and 4 * numbers * self.number <= self.memory_mb * 1e6

    def read(self, array: NDArray[Any], rows: NDArray[np.intp]) -> NDArray[Any]:
        """A copy of some rows.

        Each row of a mapped file may bring its neighbours into memory, so of a file that is larger than the memory a
        few rows are read at a time, and what came along is given back; the file keeps it.
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

    def batches(
        self, records: Records, rows: NDArray[np.intp], physical_batch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The records of some indices in their order, in physical batches, on the device."""
        return (self.load(records, some) for some in in_passes(rows, physical_batch))

    def load(self, records: Records, rows: NDArray[np.intp]) -> tuple[Tensor, Tensor]:
        """The records of some indices in their order, on the device."""
        if isinstance(records, OnDevice):
            return records.take(rows)
        inputs = torch.from_numpy(self.read(records.features, rows))
        labels = torch.from_numpy(records.labels[rows])
        if self.device.type != "cuda":
            return inputs.to(self.device), labels.to(self.device)
        stream = _copying(self.device)
        with torch.cuda.stream(stream):
            moved = [part.pin_memory().to(self.device, non_blocking=True) for part in (inputs, labels)]
        stream.synchronize()  # holds up the thread that reads, not the one that computes
        for part in moved:
            part.record_stream(torch.cuda.default_stream(self.device))
        return moved[0], moved[1]

    def placed(self, records: Records) -> Records:
        """The records on a GPU where they fit its memory as given, else as they are."""
        if isinstance(records, OnDevice) or self.device.type != "cuda":
            return records
        fits = records.features.nbytes + records.labels.nbytes <= self.memory_mb * 1e6
        return OnDevice.of(records, self.device) if fits else records

    def loaded(
        self, records: Records, passes: Iterable[NDArray[np.intp]]
    ) -> Iterator[Callable[[], tuple[Tensor, Tensor]]]:
        """For each pass what gives its records: on a GPU they are read while the pass before is computed."""
        if self.device.type != "cuda" or isinstance(records, OnDevice):
            yield from (functools.partial(self.load, records, rows) for rows in passes)
            return
        yield from one_ahead(lambda rows: self.load(records, rows), passes)

    def side_by_side(self, engine: Engine, parameters: int) -> SideBySide:
        """The workers for passes of an engine, whose results are `parameters` numbers each.

        Fewer than there are cores where that takes more memory than is given: a pass stays as large as it is, since
        sums would else round otherwise.
        """
        each = engine.pass_bytes + 8 * parameters
        most = max(1, int(self.memory_mb * 1e6 / each))
        here = max(1, cores() // self.group.local)
        wanted = self.workers or here // min(engine.threads, self.threads or engine.threads, here)
        workers = min(wanted, most) if self.device.type == "cpu" and not self.shards else 1
        return SideBySide(engine, workers, lambda: self.computing(engine))

    def engine(self, model: Model, records: Records) -> Engine:
        """The gradient engine for a model of such records.

        Raises RefusedError where the model mixes them, ModelRefusedError where it cannot be looked at.
        """
        try:
            with torch.autocast(self.device.type, enabled=False):
                engine = Engine(
                    model,
                    input_shape=records.features.shape[1:],
                    input_dtype=torch.from_numpy(np.empty(0, records.features.dtype)).dtype,
                    device=self.device,
                    memory_mb=self.memory_mb,
                    physical_batch=self.physical_batch,
                    mesh=init_device_mesh(self.device.type, (self.group.count,)) if self.shards else None,
                )
        except RecordsNotIndependentError as reason:
            advice = "use layers and losses that take each record by itself, like GroupNorm."
            if "BatchNorm" in str(reason):
                advice = "use GroupNorm, which algorithms.replace_batch_norm(model) puts in its place."
            raise RefusedError(f"{reason}, so no record's gradient can be clipped; {advice}") from reason
        if engine.is_random:
            raise RefusedError(
                f"the model {model.name} draws random numbers, which a run that is taken up again would draw anew;"
                " leave dropout out."
            )
        if engine.is_narrow and model.precision == torch.float32:
            raise RefusedError(
                f"the model {model.name} computes in 16 bits somewhere, though its precision is float32; set"
                " model.precision to bfloat16, or take the conversions out."
            )
        return engine

    @contextmanager
    def computing(self, engine: Engine) -> Iterator[None]:
        """Sets for what it holds what could have a record count for more or otherwise than alone.

        Products are of 32 bits or more, autocast is only the model's own, and on a CPU there are at most as many
        threads as the engine allows, which PyTorch counts for each thread that asks: it keeps the smaller number. Where
        they do not all take the smallest numbers for zero, or none of them, there is one.
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


def in_passes(rows: NDArray[np.intp], physical_batch: int) -> Iterator[NDArray[np.intp]]:
    """Indices in parts for one pass each, about equally large."""
    size = pass_size(len(rows), physical_batch)
    return (rows[start : start + size] for start in range(0, len(rows), size))


def one_ahead(
    load: Callable[[NDArray[np.intp]], tuple[Tensor, Tensor]], passes: Iterable[NDArray[np.intp]]
) -> Iterator[Callable[[], tuple[Tensor, Tensor]]]:
    """What gives the records of each pass, in their order; another thread reads them one pass before they are due."""
    with ThreadPoolExecutor(1, thread_name_prefix="read") as reader:
        before = None
        for rows in passes:
            following = reader.submit(load, rows)
            if before is not None:
                yield before.result
            before = following
        if before is not None:
            yield before.result


@functools.cache
def _copying(device: torch.device) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _limit_threads(most: int) -> None:
    if torch.get_num_threads() > most:
        torch.set_num_threads(most)
        _LOG.info("CPU threads: %d, so that a record counts the same in any place", most)
    if torch.get_num_threads() > 1 and _flushes(_ENDS):
        torch.set_num_threads(1)
        _LOG.warning("CPU threads: 1, since some of them take the smallest numbers for zero")


def _flushes(ends: Tensor) -> bool:
    """Whether a thread takes numbers below 1e-38 for zero; the first and the last number are such ones."""
    halved = ends * 0.5
    return bool(halved[0] == 0.0) or bool(halved[-1] == 0.0)
