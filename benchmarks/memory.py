"""Measures the memory that a method's steps need beyond the model and the data, one method per process."""

import ctypes
import gc
import re
from pathlib import Path

import torch

from benchmarks.gpu_memory import run_steps
from benchmarks.measure import timed_problem
from benchmarks.methods import start
from benchmarks.workloads import Workload


def growth(workload: Workload, name: str, device: torch.device, *, autocast: bool) -> float:
    """Peak memory of the process in three steps minus memory before them, in MB; on a CPU.

    A run on two records comes first, so that libraries loaded on first use are not counted.
    Raises NotAvailableError if the method cannot run.
    """
    run_steps(start(name, timed_problem(workload, device, autocast=autocast, records=2)))
    method = start(name, timed_problem(workload, device, autocast=autocast))
    gc.collect()
    _give_back_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # makes the kernel reset the peak
    before = _status("VmRSS")
    run_steps(method)
    return (_status("VmHWM") - before) / 1e6


def _give_back_free_memory() -> None:
    """Return the memory that building the model freed, so that its reuse by steps is counted."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status(key: str) -> int:
    """A value from /proc/self/status, in bytes."""
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise RuntimeError(f"/proc/self/status does not tell {key}; memory is measured on Linux only.")
    return 1024 * int(match[1])
