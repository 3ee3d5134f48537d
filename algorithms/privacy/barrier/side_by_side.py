"""Passes over records on several cores at once, each computed whole by one worker.

A worker is a thread with a copy of the engine: PyTorch releases the interpreter's lock inside of its kernels. Cutting
one pass further would change what a record counts; passes beside each other do not. Their results are handed out in the
order of the passes, so that sums have the same bits for any number of workers.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import psutil

from algorithms.gradients import Engine

T = TypeVar("T")
R = TypeVar("R")


class SideBySide:
    """The workers of one engine.

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
