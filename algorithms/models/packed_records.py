"""Arrays of records by name, packed into the rows that the engine takes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from algorithms.errors import RefusedError
from algorithms.gradients import Packing, Part


def packing_of(records: Mapping[str, NDArray[Any]]) -> Packing:
    """The packing of arrays [n, *shape] by name; raises RefusedError for integers beyond 32 bits."""
    parts = []
    for name, values in records.items():
        if values.dtype.kind in "iu" and values.size and int(np.abs(values).max()) >= 2**31:
            raise RefusedError(f"{name} holds whole numbers beyond 32 bits; number its entries from 0.")
        dtypes = {"f": torch.float32, "b": torch.bool}
        parts.append(Part(name, values.shape[1:], dtypes.get(values.dtype.kind, torch.int64)))
    return Packing(tuple(parts))


def pack(records: Mapping[str, NDArray[Any]], packing: Packing) -> NDArray[Any]:
    """Pack arrays [n, *shape], given by name, into rows [n, width].

    Example:
        >>> records = {"ids": np.array([[7, 8], [9, 0]]), "weight": np.array([0.5, 2.0])}
        >>> rows = pack(records, packing_of(records))
        >>> rows.shape, rows.dtype
        ((2, 3), dtype('int32'))
    """
    values = [
        torch.from_numpy(np.array(records[part.name], np.float32 if part.is_real else np.int32))
        for part in packing.parts
    ]
    return packing.join(values).numpy()
