"""The device that computes, and settings of the process for its arithmetic. What is CUDA's own stands here alone."""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_FAST_IN_64_BITS = frozenset(((6, 0), (7, 0), (8, 0), (9, 0), (10, 0)))
"""The compute capabilities of P100, V100, A100, H100 and B200. Other GPUs multiply in 64 bits 32 to 64 times slower."""

_BACKENDS: Any = torch.backends  # its type stubs are incomplete
_ON_CPU = (_BACKENDS.mkldnn.matmul, _BACKENDS.mkldnn.conv, _BACKENDS.mkldnn.rnn)
_PRODUCTS = (_BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn, *_ON_CPU)
_USED = _PRODUCTS if _BACKENDS.cuda.is_built() else _ON_CPU


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
        moved = tensor.pin_memory().to(device, non_blocking=True)
        done = stream.record_event()

    def arrived() -> Tensor:
        here = torch.accelerator.current_stream(device)
        here.wait_event(done)
        moved.record_stream(here)
        return moved

    return arrived


@functools.cache
def _copying(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


class ProcessSetting(ContextDecorator):
    """A setting of the process that all threads share: it holds until the last of those that entered has left.

    change: makes the setting, and returns what restores the earlier one.
    """

    def __init__(self, change: Callable[[], Callable[[], object]]) -> None:
        self._change = change
        self._restore: Callable[[], object] = _nothing
        self._turn, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._turn:
            if not self._inside:
                self._restore = self._change()
            self._inside += 1

    def __exit__(self, *reason: object) -> None:
        with self._turn:
            self._inside -= 1
            if not self._inside:
                self._restore()


def _nothing() -> None:
    pass


def in_full_precision() -> ProcessSetting:
    """Disable reduced-precision products of 32-bit numbers, with which a norm and its contribution could differ.

    These are TF32 on GPUs and bfloat16 on some CPUs.
    """
    return _FULL_PRECISION


def _switch_off() -> Callable[[], object]:
    # None: set neither for these nor for all products.
    if all(kind.fp32_precision in ("ieee", "none") for kind in _USED):
        return _nothing
    kept = [kind.fp32_precision for kind in _PRODUCTS]
    products = _where_set(torch.get_float32_matmul_precision)
    convolutions = _where_set(lambda: torch.backends.cudnn.allow_tf32)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    _set_precisions(["ieee"] * len(kept))
    return functools.partial(_switch_back, kept, products, convolutions)


def _switch_back(kept: Sequence[str], products: str | None, convolutions: bool | None) -> None:
    if products is not None:
        torch.set_float32_matmul_precision(products)
    if convolutions is not None:
        torch.backends.cudnn.allow_tf32 = convolutions
    _set_precisions(kept)


def _set_precisions(precisions: Sequence[str]) -> None:
    for kind, precision in zip(_PRODUCTS, precisions, strict=True):
        kind.fp32_precision = precision


def _where_set(setting: Callable[[], T]) -> T | None:
    """Read one of PyTorch's settings from before 2.9; None if it cannot be read, since the newer settings were used."""
    try:
        return setting()
    except RuntimeError:
        return None


_FULL_PRECISION = ProcessSetting(_switch_off)
