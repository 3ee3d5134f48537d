"""Seeds PyTorch's random generators, which all threads of a process share."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TURN = threading.RLock()


@contextmanager
def same_randomness(seed: int = 0) -> Iterator[None]:
    """Seed PyTorch's generators within the block, one thread at a time, and restore them afterwards.

    Models are built and inspected in this context. Trials of a search do so in threads; if an initialisation depended
    on other threads' draws, it would reveal that there were other trials.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with _TURN, torch.random.fork_rng(devices=devices):
        # torch.manual_seed would record the call stack for each kind of accelerator that is missing
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
