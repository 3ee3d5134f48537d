"""The processes of an audit, which import what their share of the work needs and nothing else."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from algorithms.errors import RefusedError

Array = NDArray[np.float64]


def run_in_processes(share: Callable[[Sequence[int]], Array], seeds: Sequence[int], *, workers: int) -> Array:
    """What `share` makes of each seed, in the order of the seeds, by as many processes side by side."""
    size = max(1, len(seeds) // (4 * workers))
    shares = [seeds[start : start + size] for start in range(0, len(seeds), size)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        try:
            return np.concatenate(list(pool.map(share, shares)))
        except BrokenProcessPool:
            raise RefusedError(
                "a process of the audit was killed, as where memory runs out; start it again with fewer --workers.",
                code="process_killed",
            ) from None


def _end_with_parent() -> None:
    """End this worker when its parent is killed; it would wait for more work for ever."""

    def end() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=end, daemon=True).start()
