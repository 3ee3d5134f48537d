"""Records of `fit` as arrays: on a disk where they are large, in memory where they are not."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from algorithms.fit_model import model_of
from algorithms.fit_records import FitRecords, group_rows_by_user, records_of
from algorithms.models import mapped_arrays
from algorithms.models.mapped_arrays import is_mapped


class _Items(Dataset[Any]):
    """Items that are made of 2,000 numbers when they are read."""

    def __init__(self, item: Callable[[NDArray[Any]], Any], count: int) -> None:
        self._item, self._count = item, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._item(np.arange(index, index + 2000) % 251)


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2000, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x) * mask.float().mean(1, keepdim=True)


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(251, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


LARGE: dict[str, tuple[Callable[[], nn.Module], Callable[[NDArray[Any]], Any]]] = {
    "real": (lambda: nn.Linear(2000, 2), lambda row: (row.astype(np.float32), row[0] % 2)),
    "bytes": (lambda: nn.Linear(2000, 2), lambda row: (row.astype(np.uint8), row[0] % 2)),
    "double": (lambda: nn.Linear(2000, 2), lambda row: (row / 7, row[0] % 2)),
    "tokens": (_Tagger, lambda row: (row, np.where(row % 3 == 0, -100, row % 2))),
    "named": (_Masked, lambda row: {"x": row / 7, "mask": np.ones(5, int), "label": row[0] % 2}),
}
"""Of each kind of records: a model that takes them, and an item of a Dataset."""


@pytest.mark.parametrize(("kind", "by_person"), [*((kind, False) for kind in LARGE), ("named", True)])
def test_memory_does_not_grow_with_the_records_of_a_dataset(
    kind: str, by_person: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, item = LARGE[kind]

    def records(count: int) -> FitRecords:
        given = records_of(module := make(), _Items(item, count), None, "cross_entropy")
        given = model_of(module, "cross_entropy", given)[2]
        return group_rows_by_user(given, np.arange(count) // 2, 2, b"key") if by_person else given

    monkeypatch.setattr(mapped_arrays, "MAX_IN_MEMORY", 2**20)
    tracemalloc.start()
    try:
        large = records(2500)
        assert tracemalloc.get_traced_memory()[1] < 8e6 < large.features.nbytes
    finally:
        tracemalloc.stop()
    assert is_mapped(large.features)
    monkeypatch.undo()
    small = records(100)
    assert not is_mapped(small.features)
    same = len(small.labels)
    np.testing.assert_array_equal(large.features[:same].view(np.int32), small.features.view(np.int32))
    np.testing.assert_array_equal(large.labels[:same], small.labels)


def test_a_mapped_file_of_the_users_own_is_not_read_into_memory(tmp_path: Path) -> None:
    X = np.lib.format.open_memmap(tmp_path / "X.npy", "w+", np.float32, (5000, 2000))
    X.flush()
    tracemalloc.start()
    try:
        read_only = np.load(tmp_path / "X.npy", mmap_mode="r")
        records = records_of(nn.Linear(2000, 2), read_only, np.arange(5000) % 2, "cross_entropy")
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()
    assert records.features is read_only
