"""What an accelerator is good at, and copies to it. What is CUDA's own stands here alone."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_FAST_IN_64_BITS = frozenset(((6, 0), (7, 0), (8, 0), (9, 0), (10, 0)))
"""The compute capabilities of P100, V100, A100, H100 and B200. Other GPUs multiply in 64 bits 32 to 64 times slower."""


@functools.cache
def is_slow_in_64_bits(device: torch.device) -> bool:
    """Whether products take 32 times as long in 64 bits as in 32, as on most GPUs below a data centre's largest."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) not in _FAST_IN_64_BITS


def upload(tensor: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """Begin to copy a tensor to a device, beside what is computed there; nothing on the host waits for it.

    Returns a function that gives the copy to the calling thread's stream, which waits for it.
    """
    if device.type == "cpu":
        return lambda: tensor
    stream = _copying(device)
    with stream:
        copy = tensor.pin_memory().to(device, non_blocking=True)
        done = stream.record_event()

    def wait_for_copy() -> Tensor:
        here = torch.accelerator.current_stream(device)
        here.wait_event(done)
        copy.record_stream(here)
        return copy

    return wait_for_copy


@functools.cache
def _copying(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
