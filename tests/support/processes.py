"""Real processes that compute together, over gloo or NCCL."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from algorithms.privacy.barrier.process_group import ProcessGroup
from tests.support.device import DEVICE
from tests.support.waiting import HANG_SECONDS
from tests.support.warm_processes import warm_pool

T = TypeVar("T")
PLACE = DEVICE if torch.accelerator.device_count() > 1 else torch.device("cpu")
"""An accelerator for each process, with two of them."""

HANGS = timedelta(seconds=HANG_SECONDS)
"""After which processes are taken to wait for each other for good, as when they run different numbers of passes."""


@contextmanager
def joined(rank: int, count: int, folder: Path, *, secret: bytes = b"") -> Iterator[ProcessGroup]:
    """The processes that meet in a folder; one that fails leaves them, so that no other waits for it."""
    torch.set_num_threads(1)
    kind, meeting = "gloo", f"file://{folder / 'store'}"
    if PLACE.type != "cpu":
        torch.accelerator.set_device_index(rank)
        kind = f"cpu:gloo,{PLACE.type}:{distributed.get_default_backend_for_device(PLACE)}"
    distributed.init_process_group(kind, init_method=meeting, rank=rank, world_size=count, timeout=HANGS)
    try:
        yield ProcessGroup(rank, count, count, secret)
    finally:
        distributed.destroy_process_group()


def in_processes(work: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
    """The results of calls in a process each; the first that fails ends the others, which may wait for it."""
    calls = [(work, number, each) for number, each in enumerate(arguments)]
    with warm_pool(len(calls)) as pool:
        results = dict(pool.imap_unordered(_call, calls, chunksize=1))
    return [results[number] for number in range(len(calls))]


def _call(call: tuple[Callable[..., T], int, tuple[Any, ...]]) -> tuple[int, T]:
    work, number, arguments = call
    return number, work(*arguments)
