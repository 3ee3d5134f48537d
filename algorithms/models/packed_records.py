"""Arrays of records by name, packed into the rows that the engine takes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from algorithms.errors import RefusedError
from algorithms.gradients import Packing, Part
from algorithms.models.mapped_arrays import is_mapped, new_array, row_chunks


def packing_of(records: Mapping[str, NDArray[Any]]) -> Packing:
    """The packing of arrays [n, *shape] by name; raises RefusedError for integers beyond 32 bits."""
    parts = []
    for name, values in records.items():
        is_whole = values.dtype.kind in "iu" and values.size > 0
        if is_whole and max(int(values.max()), -int(values.min())) >= 2**31:
            raise RefusedError(f"{name} holds whole numbers beyond 32 bits; number its entries from 0.")
        dtypes = {"f": torch.float32, "b": torch.bool}
        parts.append(Part(name, values.shape[1:], dtypes.get(values.dtype.kind, torch.int64)))
    return Packing(tuple(parts))


def pack(records: Mapping[str, NDArray[Any]], packing: Packing) -> NDArray[Any]:
    """Pack arrays [n, *shape], given by name, into rows [n, width], which are mapped if an array is.

    Example:
        >>> records = {"ids": np.array([[7, 8], [9, 0]]), "weight": np.array([0.5, 2.0])}
        >>> rows = pack(records, packing_of(records))
        >>> rows.shape, rows.dtype
        ((2, 3), dtype('int32'))
    """
    arrays = [records[part.name] for part in packing.parts]
    dtypes = [np.float32 if part.is_real else np.int32 for part in packing.parts]

    def join(chunk: slice) -> NDArray[Any]:
        values = [np.array(array[chunk], dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
        joined: NDArray[Any] = packing.join([torch.from_numpy(part) for part in values]).numpy()
        return joined

    if not any(map(is_mapped, arrays)):
        return join(slice(None))
    first = join(slice(1))
    rows = new_array((len(arrays[0]), *first.shape[1:]), first.dtype)
    for chunk in row_chunks(rows):
        rows[chunk] = join(chunk)
    return rows
