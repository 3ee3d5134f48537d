"""The private records, and how they come from memory or a mapped file to the device, one pass at a time."""

import functools
import mmap
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import split_passes
from algorithms.gradients.devices import upload

T = TypeVar("T")

RowIndices = NDArray[np.intp]
"""Indices of records."""
Batch = tuple[Tensor, Tensor]
"""The features and labels of some records."""
Load = Callable[[], Batch]
"""Gives the records of a pass, on the device."""

_FAULT_AROUND = 2**16
"""Linux maps up to this many bytes around a page that is read."""


class RecordArrays(Protocol):
    """The private records, as plain or memory-mapped arrays: `features` [n, *input_shape] and `labels` [n, ...]."""

    @property
    def features(self) -> NDArray[np.float32]: ...
    @property
    def labels(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class OnDevice:
    """Records that are copied to a device as a whole; `features` and `labels` are still the original arrays."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    tensors: Batch

    @classmethod
    def of(cls, records: RecordArrays, device: torch.device) -> "OnDevice":
        """The records, copied to a device."""
        copies = [torch.from_numpy(np.array(part)).to(device) for part in (records.features, records.labels)]
        return cls(records.features, records.labels, (copies[0], copies[1]))

    def take(self, rows: RowIndices) -> Batch:
        """The features and labels at some indices, in that order."""
        chosen = upload(torch.from_numpy(rows), self.tensors[0].device)()
        return self.tensors[0].index_select(0, chosen), self.tensors[1].index_select(0, chosen)


@dataclass(frozen=True)
class RecordLoader:
    """Reads records and copies them to a device.

    memory_mb: how much of a mapped file, or of all records on a GPU, may be held at once.
    """

    device: torch.device
    memory_mb: int

    def read(self, array: NDArray[Any], rows: RowIndices) -> NDArray[Any]:
        """A copy of some rows.

        Reading a row of a mapped file may bring its neighbours into memory. So from a file larger than the memory, a
        few rows are read at a time and the pages are given back, which are still in the file.
        """
        # What was changed in memory of a file mapped as "c" would be given back with it.
        if getattr(array, "mode", None) not in ("r", "r+") or array.nbytes <= self.memory_mb * 1e6:
            return array[rows]
        copies = np.empty((len(rows), *array.shape[1:]), array.dtype)
        size = max(1, int(self.memory_mb * 1e6 / (2 * _FAULT_AROUND)))
        for start in range(0, len(rows), size):
            copies[start : start + size] = array[rows[start : start + size]]
            array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined] # numpy names it nowhere else
        return copies

    def batches(self, records: RecordArrays, rows: RowIndices, physical_batch: int) -> Iterator[Batch]:
        """The records at some indices, in that order, in physical batches on the device; the last may be shorter."""
        return (self.load(records, rows_of_pass) for rows_of_pass in split_passes(rows, physical_batch))

    def load(self, records: RecordArrays, rows: RowIndices) -> Batch:
        """The records at some indices, in that order, on the device."""
        return self._begin_to_load(records, rows)()

    def _begin_to_load(self, records: RecordArrays, rows: RowIndices) -> Load:
        """Read records and begin to copy them; the result gives the copies to the thread that computes."""
        if isinstance(records, OnDevice):
            return functools.partial(records.take, rows)
        inputs = torch.from_numpy(self.read(records.features, rows))
        labels = torch.from_numpy(records.labels[rows])
        moving = upload(inputs, self.device), upload(labels, self.device)
        return lambda: (moving[0](), moving[1]())

    def put_on_device(self, records: RecordArrays) -> RecordArrays:
        """The records on the GPU if they fit into `memory_mb`; otherwise unchanged."""
        if isinstance(records, OnDevice) or self.device.type == "cpu":
            return records
        fits = records.features.nbytes + records.labels.nbytes <= self.memory_mb * 1e6
        return OnDevice.of(records, self.device) if fits else records

    def prefetch(self, records: RecordArrays, passes: Iterable[RowIndices]) -> Iterator[Load]:
        """Yield a function for each pass that returns its records; a GPU's are read during the previous pass."""
        if self.device.type == "cpu" or isinstance(records, OnDevice):
            yield from (functools.partial(self.load, records, rows) for rows in passes)
            return
        for begun in load_ahead(lambda rows: self._begin_to_load(records, rows), passes):
            yield functools.partial(_wait_for, begun)


def _wait_for(begun: Callable[[], Load]) -> Batch:
    return begun()()


def load_ahead(load: Callable[[RowIndices], T], passes: Iterable[RowIndices]) -> Iterator[Callable[[], T]]:
    """Yield a function for each pass that returns what is loaded for it; another thread loads one pass ahead."""
    with ThreadPoolExecutor(1, thread_name_prefix="read") as reader:
        before = None
        for rows in passes:
            following = reader.submit(load, rows)
            if before is not None:
                yield before.result
            before = following
        if before is not None:
            yield before.result
