"""What an accelerator is good at, and copies to it. CUDA's own settings are here alone."""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_BACKENDS: Any = torch.backends  # its type stubs are incomplete
CUDA_PRODUCTS = (_BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn)
"""Products that CUDA may compute in TF32, each with its `fp32_precision`."""
HAS_CUDA_PRODUCTS: bool = _BACKENDS.cuda.is_built()

_FAST_IN_64_BITS = frozenset(((6, 0), (7, 0), (8, 0), (9, 0), (10, 0)))
"""The compute capabilities of P100, V100, A100, H100 and B200. Other GPUs multiply in 64 bits 32 to 64 times slower."""


@functools.cache
def is_slow_in_64_bits(device: torch.device) -> bool:
    """Whether products take 32 times as long in 64 bits as in 32, as on most GPUs below a data centre's largest."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) not in _FAST_IN_64_BITS


def why_not_64_bits(device: torch.device) -> str | None:
    """Why a device cannot hold 64-bit numbers, in PyTorch's words; None if it can."""
    if device.type == "cuda":  # which can, and would start to look
        return None
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError) as error:
        return str(error).partition("\n")[0]
    return None


def make_products_repeatable() -> None:
    """Give CUDA's products the workspace in which they repeat every bit, before the first of them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def get_tf32_convolutions() -> bool:
    """Whether CUDA may compute convolutions in TF32, by PyTorch's setting from before 2.9."""
    return bool(_BACKENDS.cudnn.allow_tf32)


def set_tf32_convolutions(allowed: bool) -> None:
    """Change what `get_tf32_convolutions` reads."""
    _BACKENDS.cudnn.allow_tf32 = allowed


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
        stream_in_use = torch.accelerator.current_stream(device)
        stream_in_use.wait_event(done)
        copy.record_stream(stream_in_use)
        return copy

    return wait_for_copy


@functools.cache
def _copying(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
