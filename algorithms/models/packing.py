"""Packs records of several named tensors, such as token ids with an attention mask, into one tensor each.

The barrier, its samples and its passes use one array of records; the model's tensors are unpacked from it.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from algorithms.errors import RefusedError


@dataclass(frozen=True)
class Part:
    """One tensor of a record.

    shape: for one record. dtype: for the model: float32, int64 or bool. entries: made-up integers are drawn below it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    entries: int = 2

    @property
    def is_real(self) -> bool:
        """Whether it holds real numbers."""
        return self.dtype == torch.float32

    @property
    def is_mask(self) -> bool:
        """Whether this is a mask; a mask without a one would make models divide by zero."""
        return self.dtype == torch.bool or (self.dtype == torch.int64 and "mask" in self.name)


@dataclass(frozen=True)
class Packing:
    """The layout of a record's parts in one row: one after the other, with real numbers stored bit for bit.

    Example:
        >>> import numpy as np
        >>> records = {"ids": np.array([[7, 8], [9, 0]]), "weight": np.array([0.5, 2.0])}
        >>> packing = Packing.of(records)
        >>> rows = packing.packed(records)
        >>> rows.shape, rows.dtype
        ((2, 3), dtype('int32'))
        >>> packing.mapping(torch.from_numpy(rows))["weight"]
        tensor([0.5000, 2.0000])
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, records: Mapping[str, NDArray[Any]]) -> "Packing":
        """The packing of arrays [n, *shape] by name; raises RefusedError for integers beyond 32 bits."""
        parts = []
        for name, values in records.items():
            if values.dtype.kind in "iu" and values.size and int(np.abs(values).max()) >= 2**31:
                raise RefusedError(f"{name} holds whole numbers beyond 32 bits; number its entries from 0.")
            dtypes = {"f": torch.float32, "b": torch.bool}
            parts.append(Part(name, values.shape[1:], dtypes.get(values.dtype.kind, torch.int64)))
        return cls(tuple(parts))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of a row."""
        only_real = all(part.is_real for part in self.parts)
        return torch.float32 if only_real else torch.int32

    @property
    def entries(self) -> list[int]:
        """The indices of the parts that hold entries of tables."""
        return [
            place for place, part in enumerate(self.parts) if part.dtype == torch.int64 and not part.is_mask
        ]

    @cached_property
    def _places(self) -> list[slice]:
        ends = accumulate(prod(part.shape) for part in self.parts)
        return [slice(end - prod(part.shape), end) for part, end in zip(self.parts, ends, strict=True)]

    def packed(self, records: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Pack arrays [n, *shape], given by name, into rows [n, width]."""
        values = [
            torch.from_numpy(np.array(records[part.name], np.float32 if part.is_real else np.int32))
            for part in self.parts
        ]
        return self.joined(values).numpy()

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`: rows [batch, width]."""
        flat = [value.reshape(len(value), -1) for value in values]
        if not self.dtype.is_floating_point:
            flat = [value.view(torch.int32) if value.is_floating_point() else value for value in flat]
        return torch.cat(flat, dim=1)

    def split(self, rows: Tensor) -> list[Tensor]:
        """Split rows [batch, width] into parts [batch, *shape]; integers stay in 32 bits as stored."""
        found = []
        for part, place in zip(self.parts, self._places, strict=True):
            values = rows[:, place]
            if part.is_real and not self.dtype.is_floating_point:
                values = values.view(torch.float32)
            found.append(values.reshape(len(rows), *part.shape))
        return found

    def mapping(self, rows: Tensor, floating: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The model's inputs by name for rows [batch, width]; floating: the type of real numbers."""
        pairs = zip(self.parts, self.split(rows), strict=True)
        return {part.name: values.to(floating if part.is_real else part.dtype) for part, values in pairs}


class Called(nn.Module):
    """Wraps a module for the engine: rows [batch, ...] to one tensor of outputs.

    packing: of the rows; None if the module takes them unchanged. The module is called with the parts by name, or with
    a mapping if it takes one argument of another name. Of a library's model the logits are returned. Outputs [batch]
    become [batch, 1].
    """

    def __init__(self, module: nn.Module, packing: Packing | None) -> None:
        super().__init__()
        self.module = module
        self.packing = packing
        self.takes_names = packing is not None and _takes(module, [part.name for part in packing.parts])

    def forward(self, rows: Tensor) -> Tensor:
        if self.packing is None:
            found = self.module(rows)
        else:
            real = (p.dtype for p in self.module.parameters() if p.is_floating_point())
            parts = self.packing.mapping(rows, next(real, torch.float32))
            found = self.module(**parts) if self.takes_names else self.module(parts)
        logits: Tensor = found.get("logits", found) if isinstance(found, Mapping) else found
        return logits[:, None] if isinstance(logits, Tensor) and logits.dim() == 1 else logits


def _takes(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether a module takes arguments with these names rather than a mapping."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError:
        required = [
            one
            for one in signature.parameters.values()
            if one.default is one.empty and one.kind < one.VAR_POSITIONAL
        ]
        return len(required) != 1
    return True
