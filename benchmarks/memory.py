"""Measures the memory that a method's steps need beyond the model and the data, one method per process."""

import ctypes
import gc
import re
from pathlib import Path

import torch

from benchmarks.measure import timed_problem
from benchmarks.methods import Method, start
from benchmarks.workloads import Workload

_STEPS = 3


def growth(workload: Workload, name: str, device: torch.device, *, autocast: bool) -> float:
    """Peak memory in three steps minus memory before them, in MB: the process's on a CPU, the allocator's on a GPU.

    A run on two records comes first, so that libraries loaded on first use are not counted.
    Raises NotAvailableError if the method cannot run.
    """
    _steps(start(name, timed_problem(workload, device, autocast=autocast, records=2)))
    method = start(name, timed_problem(workload, device, autocast=autocast))
    gc.collect()
    if device.type == "cuda":
        return _growth_on_gpu(method, name)
    _give_back_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # makes the kernel reset the peak
    before = _status("VmRSS")
    _steps(method)
    return (_status("VmHWM") - before) / 1e6


def _growth_on_gpu(method: Method, name: str) -> float:
    if name == "jax":
        return _growth_of_jax(method)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _steps(method)
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def _growth_of_jax(method: Method) -> float:
    """JAX has its own allocator, whose peak cannot be reset and may include what compiling needed."""
    import jax

    device = jax.devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    _steps(method)
    return (device.memory_stats()["peak_bytes_in_use"] - before) / 1e6  # type: ignore[no-any-return]


def _steps(method: Method) -> None:
    for _ in range(_STEPS):
        method.step()
    method.wait()


def _give_back_free_memory() -> None:
    """Return the memory that building the model freed, so that its reuse by steps is counted."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status(key: str) -> int:
    """A value from /proc/self/status, in bytes."""
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise RuntimeError(f"/proc/self/status does not tell {key}; memory is measured on Linux only.")
    return 1024 * int(match[1])
