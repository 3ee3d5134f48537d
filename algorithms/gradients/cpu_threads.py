"""How many of PyTorch's threads share the operations of a pass on a CPU.

At the end of an operation its threads wait for each other. On an idle machine that takes microseconds. Where another
program has one of the cores it takes until that core is free: on busy cores short passes took 20 to 40 times as long.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SHORT_PASS_SECONDS = 1e-2
"""Seconds that a pass takes one core, below which it has one thread.

Two threads took as long as one at 2 to 8 ms of this estimate, on linear, dense, convolutional and recurrent networks
and transformers, and two thirds as long at 20 to 40 ms.
"""

SECONDS_PER_OPERATION, SECONDS_PER_BYTE = 2.5e-11, 3e-10
"""Seconds for each operation of a record and byte of it on one core, measured like those of the engine."""


@contextmanager
def threads_up_to(maximum: int | None) -> Iterator[None]:
    """At most so many CPU threads within the block; None: as many as before."""
    before = torch.get_num_threads()
    if maximum is not None and before > maximum:
        torch.set_num_threads(maximum)
    try:
        yield
    finally:
        torch.set_num_threads(before)
