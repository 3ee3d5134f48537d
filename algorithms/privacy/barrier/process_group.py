"""The processes of a run, which share its records: each sums over its shard, and the first adds the noise."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from algorithms.gradients.placement import together


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run: this is number `rank` of `count`, and `local` of them run on this machine.

    Each process sums over its shard of the records, and the first adds the noise. All processes take the same steps:
    they make the same queries in the same order and use the first one's answer, noise included, so their states agree
    bit for bit. Only the first keeps the trace, the checkpoint and the ledger. A record's coin depends on its position
    in the release's stream, so the sample does not depend on the number of processes. Sums are added in 64 bits.

    Attributes:
        rank: The number of this process, from 0.
        count: How many there are.
        local: How many of them run on this machine.
        secret: 32 bytes that these processes alone know, if there are several.
    """

    rank: int = 0
    count: int = 1
    local: int = 1
    secret: bytes = field(default=b"", repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this process adds the noise and keeps trace, checkpoint and ledger."""
        return self.rank == 0

    def shard(self, rows: NDArray[np.intp], records: int) -> NDArray[np.intp]:
        """The part of `rows`, ascending indices into `records` records, that lies in this process's shard."""
        ends = [records * rank // self.count for rank in (self.rank, self.rank + 1)]
        first, last = np.searchsorted(rows, ends)
        return rows[first:last]

    def sum(self, part: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        self._together(lambda: distributed.all_reduce(part))
        return part

    def broadcast(self, answer: Tensor) -> Tensor:
        """Send a tensor from the first process to all, in place."""
        self._together(lambda: distributed.broadcast(answer, src=0))
        return answer

    def broadcast_object(self, value: Any) -> Any:
        """Send a picklable value from the first process to all; returns that value."""
        box, cpu = [value], torch.device("cpu")
        self._together(lambda: distributed.broadcast_object_list(box, src=0, device=cpu))
        return box[0]

    def agrees(self, digest: str) -> bool:
        """Whether all processes have the same digest, in hexadecimal digits."""
        digest_bytes = torch.tensor(list(bytes.fromhex(digest)))
        differing = (self.broadcast(digest_bytes.clone()) != digest_bytes).sum()
        return not self.sum(differing)

    def _together(self, act: Callable[[], object]) -> None:
        """What all processes do at once; nothing for a single one."""
        if self.count > 1:
            with together():
                act()


SINGLE_PROCESS = ProcessGroup()
