"""The processes of a run: started by torchrun, or by the first process on this machine.

They communicate by PyTorch's collectives, over gloo, or NCCL if the sums are on GPUs. If one process ends, the others
end at their next query or before, so that none continues alone.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import torch
from torch import distributed
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from algorithms.errors import ProcessLostError
from algorithms.privacy.barrier.performance import ALONE, Group

_PLACE = "EPSILONFLOW_PROCESS"
"""Rank, number of processes and port, for processes that the first one started."""

_HERE, _POLL_SECONDS = "127.0.0.1", 0.05


@contextmanager
def joined(wanted: int) -> Iterator[Group]:
    """Connect the processes of this run within the block.

    wanted: the number of processes on this machine, unless torchrun started them. At the end of the block, the first
    process ends those that it started.
    """
    given = os.environ.get(_PLACE)
    if given is not None:
        rank, count, port = map(int, given.split("/"))
        Thread(target=_end_with_input, daemon=True).start()
        store = _store(port, count)
        store.set(f"process {rank}", "is here")
        with _connected(Group(rank, count, count), store) as group:
            yield group
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        rank, count, here = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        with _connected(Group(rank, count, here), None) as group:
            yield group
    elif wanted == 1:
        yield ALONE
    else:
        store = _store(0, wanted)
        started = [_started(rank, wanted, store.port) for rank in range(1, wanted)]
        try:
            _await(started, store)
            with _connected(Group(0, wanted, wanted), store) as group:
                yield group
        finally:
            for process in started:
                process.terminate()
                process.wait()


def _store(port: int, count: int) -> TCPStore:
    """The store by which the processes find each other. port: 0 creates a new store."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return TCPStore(_HERE, port, count, is_master=port == 0, wait_for_workers=False)


def _started(rank: int, count: int, port: int) -> "subprocess.Popen[bytes]":
    place = {_PLACE: f"{rank}/{count}/{port}", "LOCAL_RANK": str(rank)}
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.train"], env=os.environ | place, stdin=subprocess.PIPE
    )


def _await(started: "list[subprocess.Popen[bytes]]", store: TCPStore) -> None:
    """Wait until the started processes can connect; raises ProcessLostError if one has ended before."""
    for rank, process in enumerate(started, 1):
        while not store.check([f"process {rank}"]):
            if process.poll() is not None:
                raise ProcessLostError
            time.sleep(_POLL_SECONDS)


def _end_with_input() -> None:
    """End this process when the first one has ended, which holds the other end of its input."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


@contextmanager
def _connected(group: Group, store: Store | None) -> Iterator[Group]:
    """Connect a group of processes; without a store, by torchrun's environment variables."""
    kind = "gloo"
    if torch.cuda.is_available():
        kind = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if store is None:
        distributed.init_process_group(kind)
    else:
        distributed.init_process_group(kind, store=store, rank=group.rank, world_size=group.count)
    try:
        yield group
    finally:
        distributed.destroy_process_group()
