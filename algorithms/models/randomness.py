"""PyTorch's own random numbers, of which a process has one source for all its threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TURN = threading.RLock()


@contextmanager
def same_randomness(seed: int = 0) -> Iterator[None]:
    """Draws of a seed, the same each time, for one thread after the other; leaves the generators as they were.

    Models are made and looked at in it. Trials of a search do so in threads, and a start into which others drew would
    tell that there were others.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with _TURN, torch.random.fork_rng(devices=devices):
        # torch.manual_seed would note the call stack for each kind of accelerator that is not there
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
