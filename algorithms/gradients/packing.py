"""Records of several named tensors, such as token ids with an attention mask, packed into one row each.

Passes, samples and batches then handle one tensor of records, from which `RowModule` unpacks the model's inputs.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Padding:
    """Numbers of which alone no record consists: a model may take no text that is padding alone.

    Args:
        numbers: What fills up records, such as the entry of a padding token.
        axes: How many dimensions of a tensor, from the first on, count records: 2 for people with several rows.

    Example:
        >>> Padding((0,)).replace_first(torch.tensor([[0, 0, 0], [7, 8, 0]])).tolist()
        [[1, 0, 0], [7, 8, 0]]
    """

    numbers: tuple[int, ...]
    axes: int = 1

    @property
    def smallest_other(self) -> int:
        """The smallest number that is not padding."""
        return next(number for number in range(len(self.numbers) + 1) if number not in self.numbers)

    def replace_first(self, values: Tensor) -> Tensor:
        """Values [batch, ...] where each record that begins with padding begins with another number instead."""
        rows = values.reshape(*values.shape[: self.axes], -1).clone()
        numbers = torch.tensor(self.numbers, device=values.device)
        rows[..., 0].masked_fill_(torch.isin(rows[..., 0], numbers), self.smallest_other)
        return rows.view(values.shape)


@dataclass(frozen=True)
class Part:
    """One tensor of a record.

    Args:
        name: Of the model's argument that takes it.
        shape: Of one record's part.
        dtype: What the model takes: float32, int64 or bool.
        entries: Made-up integers are drawn from 0 up to this number, exclusive.
        padding: Numbers of which alone no record's part consists.

    Example:
        >>> Part("attention_mask", (8,), torch.int64).is_mask, Part("ids", (8,), torch.int64, entries=100).is_mask
        (True, False)
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    entries: int = 2
    padding: Padding | None = None

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
        >>> packing = Packing((Part("ids", (2,), torch.int64, entries=10), Part("weight", (), torch.float32)))
        >>> rows = packing.join([torch.tensor([[7, 8], [9, 0]]), torch.tensor([0.5, 2.0])])
        >>> rows.shape, rows.dtype
        (torch.Size([2, 3]), torch.int32)
        >>> packing.inputs_by_name(rows)["weight"]
        tensor([0.5000, 2.0000])
    """

    parts: tuple[Part, ...]

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of a row."""
        only_real = all(part.is_real for part in self.parts)
        return torch.float32 if only_real else torch.int32

    @property
    def entry_parts(self) -> list[int]:
        """The indices of the parts that hold entries of tables."""
        return [
            index for index, part in enumerate(self.parts) if part.dtype == torch.int64 and not part.is_mask
        ]

    @cached_property
    def _columns(self) -> list[slice]:
        ends = accumulate(prod(part.shape) for part in self.parts)
        return [slice(end - prod(part.shape), end) for part, end in zip(self.parts, ends, strict=True)]

    def join(self, values: Sequence[Tensor]) -> Tensor:
        """The rows [batch, width] of parts [batch, *shape]; the inverse of `split`."""
        flat = [value.reshape(len(value), -1) for value in values]
        if not self.dtype.is_floating_point:
            # Real numbers keep their bits; a conversion to integers would round them.
            flat = [value.view(torch.int32) if value.is_floating_point() else value.int() for value in flat]
        return torch.cat(flat, dim=1)

    def split(self, rows: Tensor) -> list[Tensor]:
        """Split rows [batch, width] into parts [batch, *shape]; integers stay in 32 bits as stored."""
        # All columns first: a replay takes the rows in a second type as it is given them, and nothing else.
        is_mixed = not self.dtype.is_floating_point and any(part.is_real for part in self.parts)
        as_real = rows.view(torch.float32) if is_mixed else rows
        return [
            (as_real if part.is_real else rows)[:, columns].reshape(len(rows), *part.shape)
            for part, columns in zip(self.parts, self._columns, strict=True)
        ]

    def inputs_by_name(self, rows: Tensor, floating: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The model's inputs by name for rows [batch, width]; floating: the type of real numbers."""
        pairs = zip(self.parts, self.split(rows), strict=True)
        return {part.name: values.to(floating if part.is_real else part.dtype) for part, values in pairs}


class RowModule(nn.Module):
    """Wraps a module for the engine: rows [batch, ...] to one tensor of outputs.

    The module is called with the parts by name, or with a mapping if it takes one argument of another name. Of several
    outputs, the `logits` are returned. Outputs [batch] become [batch, 1].

    Args:
        module: Takes the parts of a record, or the rows.
        packing: Of the rows; None if the module takes them unchanged.

    Example:
        >>> class Weighted(nn.Module):
        ...     def forward(self, values: Tensor, weight: Tensor) -> Tensor:
        ...         return values.sum(dim=1) * weight
        >>> parts = Part("values", (2,), torch.float32), Part("weight", (), torch.float32)
        >>> RowModule(Weighted(), Packing(parts))(torch.tensor([[1.0, 2.0, 10.0]]))
        tensor([[30.]])
    """

    def __init__(self, module: nn.Module, packing: Packing | None) -> None:
        super().__init__()
        self.module = module
        self.packing = packing
        self.takes_names = packing is not None and _takes(module, [part.name for part in packing.parts])

    def forward(self, rows: Tensor) -> Tensor:
        if self.packing is None:
            outputs = self.module(rows)
        else:
            real = (p.dtype for p in self.module.parameters() if p.is_floating_point())
            parts = self.packing.inputs_by_name(rows, next(real, torch.float32))
            outputs = self.module(**parts) if self.takes_names else self.module(parts)
        is_named = isinstance(outputs, Mapping)
        logits: Tensor = outputs.get("logits", outputs) if is_named else getattr(outputs, "logits", outputs)
        return logits[:, None] if isinstance(logits, Tensor) and logits.dim() == 1 else logits


def _takes(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether a module takes arguments with these names rather than a mapping."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError:
        required = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.default is parameter.empty and parameter.kind < parameter.VAR_POSITIONAL
        ]
        return len(required) != 1
    return True
