"""The processes of a run: started by torchrun, or by the first process on this machine.

They communicate by PyTorch's collectives, over gloo, or NCCL if the sums are on GPUs. If one process ends, the others
end at their next query or before, so that none continues alone.

PyTorch authenticates no connection: whoever connects first would take a process's place, and get sums without noise. So
processes on one machine find each other in a folder that only their user can read, listen on the loopback interface,
and then prove to each other that they know a secret: a new one, which the first process passes on by the others'
standard input, or one from the owner key, which all machines have. What carries the key of the noise is encrypted by
that secret. Sums are not: the network between machines must be private.
"""

import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import torch
from torch import distributed
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import FileStore  # type: ignore[attr-defined]

from algorithms.errors import RefusedError
from algorithms.gradients import ProcessLostError
from algorithms.gradients.placement import together
from algorithms.privacy.barrier.process_group import SINGLE_PROCESS, ProcessGroup
from data.files import KEY_BYTES, keyed_digest, owner_key

_VARIABLE = "EPSILONFLOW_PROCESS"
"""Rank, number of processes and file of the store, for processes that the first one started."""

_LOCALHOST, _POLL_SECONDS = "127.0.0.1", 0.05
SEALED_AT_ONCE = 2**30
"""Bytes; the cipher takes less than twice as many."""


def _start_process(rank: int, count: int, file: Path, secret: bytes) -> "subprocess.Popen[bytes]":
    variables = {_VARIABLE: f"{rank}/{count}/{file}", "LOCAL_RANK": str(rank)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tasks.train"],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdin is not None
    process.stdin.write(secret)  # fits the pipe, so that this waits for nobody
    return process


@contextmanager
def join_processes(
    wanted: int, *, home: Path, start: "Callable[..., subprocess.Popen[bytes]]" = _start_process
) -> Iterator[ProcessGroup]:
    """Connect the processes of this run within the block.

    wanted: the number of processes on this machine, unless torchrun started them. home: folder of the owner key, which
    is the same for all processes that torchrun started. start: starts another process. At the end of the block, the
    first process ends those that it started. Raises RefusedError if a process does not know the secret.
    """
    rank_file = os.environ.get(_VARIABLE)
    if rank_file is not None:  # started by the first process, in the last branch
        number, count, path = rank_file.split("/", 2)
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
            secret = pipe.read(KEY_BYTES) or b""
        Thread(target=_end_with_input, daemon=True).start()
        store = _store(Path(path), int(count))
        store.set(f"process {number}", "is here")
        with _connect(ProcessGroup(int(number), int(count), int(count), secret), store) as group:
            yield group
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        rank, all_, here = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        secret = keyed_digest(owner_key(home), ["secret of a run's processes"])
        with _connect(ProcessGroup(rank, all_, here, secret), None) as group:
            yield group
    elif wanted == 1:
        yield SINGLE_PROCESS
    else:
        secret = secrets.token_bytes(KEY_BYTES)
        # Of this user alone; it holds addresses.
        with tempfile.TemporaryDirectory(prefix="epsilonflow-") as folder:
            file = Path(folder) / "store"
            store = _store(file, wanted)
            started = [start(rank, wanted, file, secret) for rank in range(1, wanted)]
            try:
                _await(started, store)
                with _connect(ProcessGroup(0, wanted, wanted, secret), store) as group:
                    yield group
            finally:
                for process in started:
                    process.terminate()
                    process.wait()


def _store(file: Path, count: int) -> FileStore:
    """The store by which the processes on this machine find each other; they listen on the loopback interface alone."""
    interfaces = psutil.net_if_addrs().items()
    loopback = next(name for name, all_ in interfaces if any(each.address == _LOCALHOST for each in all_))
    os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    return FileStore(str(file), count)


def _await(started: "list[subprocess.Popen[bytes]]", store: FileStore) -> None:
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
def _connect(group: ProcessGroup, store: Store | None) -> Iterator[ProcessGroup]:
    """Connect a group of processes; without a store, by torchrun's environment variables."""
    kind = "gloo"
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        kind = f"cpu:gloo,{device.type}:{distributed.get_default_backend_for_device(device)}"
        device_index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
        torch.accelerator.set_device_index(device_index)
    if store is None:
        distributed.init_process_group(kind)
    else:
        distributed.init_process_group(kind, store=store, rank=group.rank, world_size=group.count)
    try:
        _authenticate(group)
        yield group
    finally:
        distributed.destroy_process_group()


def _authenticate(group: ProcessGroup) -> None:
    """Raise RefusedError unless every other process proves, on its own connection, that it knows the group's secret.

    A proof is for the other's fresh challenge, so that nobody can repeat one.
    """
    for other in range(group.count):
        if other == group.rank:
            continue
        challenge = secrets.token_bytes(KEY_BYTES)
        theirs = _exchange(challenge, other)
        proof = _exchange(_proof(group, group.rank, theirs), other)
        if not secrets.compare_digest(proof, _proof(group, other, challenge)):
            raise RefusedError(
                "process {process} of this run does not know the secret that all share; give every machine the same"
                " owner key, and see that nobody else can connect to them.",
                code="processes_differ",
                process=other,
                differing="secret",
            )


def _proof(group: ProcessGroup, rank: int, challenge: bytes) -> bytes:
    return keyed_digest(group.secret, ["process", str(rank), challenge.hex()])


def _exchange(message: bytes, other: int) -> bytes:
    """Send 32 bytes to another process, and receive its."""
    received = torch.empty(KEY_BYTES, dtype=torch.uint8)
    with together():
        sending = distributed.isend(torch.tensor(list(message), dtype=torch.uint8), other)
        distributed.recv(received, other)
        if sending is not None:
            sending.wait()
    return bytes(received.tolist())


def broadcast_sealed(group: ProcessGroup, value: Any) -> Any:
    """Send a picklable value from the first process to all, encrypted by the group's secret; returns that value."""
    if group.count == 1:
        return value
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305  # which other runs do without

    cipher = ChaCha20Poly1305(group.secret)
    if group.is_first:
        content = pickle.dumps(value)
        parts = [content[start : start + SEALED_AT_ONCE] for start in range(0, len(content), SEALED_AT_ONCE)]
        nonces = [secrets.token_bytes(12) for _ in parts]
        group.broadcast_object(
            [
                (nonce, cipher.encrypt(nonce, part, _index(index, parts)))
                for index, (nonce, part) in enumerate(zip(nonces, parts, strict=True))
            ]
        )
        return value
    sealed = group.broadcast_object(None)
    return pickle.loads(
        b"".join(
            cipher.decrypt(nonce, part, _index(index, sealed)) for index, (nonce, part) in enumerate(sealed)
        )
    )


def _index(index: int, parts: Sequence[object]) -> bytes:
    return f"{index} of {len(parts)}".encode()
