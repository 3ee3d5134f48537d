"""Fixed draws of PyTorch's generators, for everything that must not depend on what was drawn before."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_TURN = threading.RLock()


@contextmanager
def same_randomness(seed: int = 0) -> Iterator[None]:
    """Seed PyTorch's generators within the block, one thread at a time, and restore them afterwards.

    Models are built and inspected in this context. Trials of a search do so in threads; if an initialisation depended
    on other threads' draws, it would reveal that there were other trials.
    """
    accelerator = torch.accelerator.current_accelerator()
    module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    is_used = hasattr(module, "is_initialized") and module.is_initialized()
    devices = range(module.device_count()) if is_used else range(0)
    kind = "cpu" if accelerator is None else accelerator.type
    with _TURN, torch.random.fork_rng(devices=devices, device_type=kind):
        # torch.manual_seed would record the call stack for each kind of accelerator that is missing
        torch.default_generator.manual_seed(seed)
        for device in devices:
            module.default_generators[device].manual_seed(seed)
        yield
