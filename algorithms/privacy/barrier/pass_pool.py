"""Workers that run passes over records in parallel, with the same result for any number of them."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import psutil

from algorithms.gradients import Engine
from algorithms.privacy.barrier.compute_config import ComputeConfig
from algorithms.privacy.barrier.fixed_arithmetic import fixed_arithmetic

T = TypeVar("T")
R = TypeVar("R")

_VERY_SHORT = 4e-4
"""Seconds that a pass takes one core, as `Engine.pass_seconds`, from which two workers cost no more than one."""


class PassPool:
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
        """The results of `run`, in the order of the passes; holds at most `workers` + 1 passes."""
        if self.workers == 1:
            return map(partial(run, self._engine), passes)
        return self._map_in_threads(run, passes)

    def _map_in_threads(self, run: Callable[[Engine, T], R], passes: Iterable[T]) -> Iterator[R]:
        passes = iter(passes)
        first = list(islice(passes, 2))
        if len(first) < 2:  # a thread would only copy the engine
            yield from map(partial(run, self._engine), first)
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
        return deque(self._engine.copy_for_thread() for _ in range(self.workers))


def pass_pool(compute: ComputeConfig, engine: Engine, parameters: int) -> PassPool:
    """The workers for an engine's passes, each of which returns `parameters` numbers.

    If memory is short there are fewer workers than cores. The passes stay as large as they are, since sums would
    round differently. Very short passes have one worker, unless more are asked for: they would wait for Python's lock.
    """
    worker_bytes = engine.pass_bytes + 8 * parameters
    max_workers = max(1, int(compute.memory_mb * 1e6 / worker_bytes))
    is_very_short = engine.pass_seconds < _VERY_SHORT
    local_cores = 1 if is_very_short else max(1, cores() // compute.group.local)
    wanted = compute.workers or local_cores // min(
        engine.threads, compute.threads or engine.threads, local_cores
    )
    workers = min(wanted, max_workers) if compute.device.type == "cpu" and compute.shards is None else 1
    return PassPool(engine, workers, lambda: fixed_arithmetic(compute, engine))


QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
"""CPU microseconds that a container may use, and the period; "max" if there is no limit."""


def cores() -> int:
    """The number of physical cores that this process may use, at least 1; at most OMP_NUM_THREADS if that is set."""
    limits = [psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0))]
    quota, _, period = (QUOTA_FILE.read_text() if QUOTA_FILE.exists() else "").partition(" ")
    if quota.isdecimal():
        limits.append(int(quota) // int(period))
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    if allowed.isdecimal():
        limits.append(int(allowed))
    return max(1, min(limits))
