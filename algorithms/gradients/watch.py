"""What a model computes, operation by operation, seen on made-up records."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TO_A_NUMBER = torch.ops.aten._local_scalar_dense.default
_NARROW = (torch.bfloat16, torch.float16)


class Watch(TorchDispatchMode):
    """Sees every operation that runs inside of it, whatever function or method of PyTorch led there.

    has_looked: whether one made a number of Python out of a tensor's value. is_narrow: whether one gave numbers of 16
    bits. shapes: of the numbers with fractions that each one gave.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_looked = self.is_narrow = False
        self.shapes: list[tuple[torch.Size, ...]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves(found) if isinstance(one, Tensor) and one.is_floating_point()]
        self.has_looked |= func is _TO_A_NUMBER
        self.is_narrow |= any(one.dtype in _NARROW for one in given)
        self.shapes.append(tuple(one.shape for one in given))
        return found


def fill_alike(few: Watch, twice: Watch, records: int) -> bool:
    """Whether all numbers that `records` records were computed in lie in multiples of so many rows.

    few, twice: of so many records and of twice as many. Else what one record counts could depend on its place, or on
    the number of others, even where a pass is full: as where a row is put in front of them, or where they are cut.
    """
    pairs = list(zip(few.shapes, twice.shapes, strict=False))
    return len(few.shapes) == len(twice.shapes) and all(
        len(some) == len(more) and all(map(lambda a, b: _is_multiple(a, b, records), some, more))
        for some, more in pairs
    )


def _is_multiple(few: torch.Size, twice: torch.Size, records: int) -> bool:
    """Whether one dimension alone, or none, grows with the records: a multiple of their number, twice as long."""
    if len(few) != len(twice):
        return False
    growing = [(a, b) for a, b in zip(few, twice, strict=True) if a != b]
    return len(growing) <= 1 and all(a % records == 0 and b == 2 * a for a, b in growing)
