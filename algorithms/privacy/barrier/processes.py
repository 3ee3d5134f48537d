"""Several processes at one run: each computes the sum over a shard of the records, and the first one adds the noise.

All of them take the same steps: they are asked the same questions in the same order, and each answer is that of the
first, noise included, so that their states are the same bit for bit. The first alone keeps the trace, the checkpoint
and the ledger. A record's coin comes from its place in the release's stream, so that who takes part does not depend on
how many processes there are; sums are added up in 64 bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed


class ProcessLostError(RuntimeError):
    """Another process of the run has ended; the message says what to do."""


@dataclass(frozen=True)
class Group:
    """The processes of a run, of which this one is number `rank` of `count`; `local` of them are on this machine."""

    rank: int = 0
    count: int = 1
    local: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one adds the noise, and keeps what is kept."""
        return self.rank == 0

    def shard(self, rows: NDArray[np.intp], records: int) -> NDArray[np.intp]:
        """Those of some rows, ascending, that lie in this process's shard of so many records."""
        ends = [records * rank // self.count for rank in (self.rank, self.rank + 1)]
        first, last = np.searchsorted(rows, ends)
        return rows[first:last]

    def sum(self, part: Tensor) -> Tensor:
        """The sum of the parts of all processes, in place."""
        if self.count > 1:
            with _connected():
                distributed.all_reduce(part)
        return part

    def first(self, answer: Tensor) -> Tensor:
        """The first process's answer, for all of them."""
        if self.count > 1:
            with _connected():
                distributed.broadcast(answer, src=0)
        return answer

    def told(self, value: Any) -> Any:
        """What the first process says, any picklable value, for all of them."""
        if self.count == 1:
            return value
        box = [value]
        with _connected():
            distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


ALONE = Group()


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, torch.distributed.DistError) as reason:
        raise ProcessLostError(
            "another process of this run has ended; start the run again: it goes on from its checkpoint, on any number"
            " of processes, and spends nothing more."
        ) from reason
