"""The settings of PyTorch under which a record's contribution does not depend on where it is computed."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from algorithms.gradients import Engine
from algorithms.gradients.patches import in_full_precision
from algorithms.privacy.barrier.compute_config import ComputeConfig

_LOG = logging.getLogger(__name__)

_ENDS = torch.ones(2**16)
"""PyTorch processes the two halves of this tensor in different threads."""
_ENDS[0] = _ENDS[-1] = 1e-39

_MIN_NORMAL = sys.float_info.min
"""Half of it is denormal."""


@contextmanager
def fixed_arithmetic(compute: ComputeConfig, engine: Engine) -> Iterator[None]:
    """Set, within the block, what could otherwise change a record's contribution.

    Products have 32 bits or more, and only the model's own autocast is used. On a CPU there are at most as many
    threads as the engine takes; PyTorch has this setting per thread, and the smaller number is kept. If some
    threads flush denormal numbers to zero and others do not, there is one thread.
    """
    # Of 64 bits, for which processors have the same setting; asking PyTorch would take ten times as long.
    flushes = _MIN_NORMAL * 0.5 == 0.0
    torch.set_flush_denormal(False)
    try:
        if compute.device.type == "cpu":
            _limit_threads(compute, engine)
        with in_full_precision(), torch.autocast(compute.device.type, enabled=False):
            yield
    finally:
        torch.set_flush_denormal(flushes)


def _limit_threads(compute: ComputeConfig, engine: Engine) -> None:
    threads = min(engine.threads, compute.threads or engine.threads)
    if torch.get_num_threads() > threads:
        torch.set_num_threads(threads)
        if threads == engine.max_threads:
            _LOG.info(
                "Limiting to %d CPU threads so a record's gradient does not depend on its batch position.",
                threads,
            )
    if torch.get_num_threads() > 1 and _flushes(_ENDS):
        torch.set_num_threads(1)
        _LOG.warning("Falling back to 1 CPU thread: flush-to-zero differs between threads.")


def _flushes(ends: Tensor) -> bool:
    """Whether a thread flushes denormal numbers to zero; the first and the last number are denormal."""
    halved = ends * 0.5
    return bool(halved[0] == 0.0) or bool(halved[-1] == 0.0)
