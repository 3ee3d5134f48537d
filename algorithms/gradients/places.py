"""Whether a record's numbers depend on its place in a pass, which the number of CPU threads can bring about.

PyTorch cuts elementwise work of more than 32,768 numbers into as many parts as there are threads, and takes the numbers
before a cut that do not fill a vector in another way: sigmoid, SiLU and others then differ in their last bits. With one
or two threads a cut falls between vectors, since passes are of multiples of 64 records.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from algorithms.gradients.contributions import Contributions
from algorithms.gradients.filling import WHOLE
from algorithms.gradients.sample import Sample

EVEN_THREADS = 2
"""CPU threads with which no cut falls inside of a vector."""

_SEEDS = range(2)
_ENDS = 8
"""How many of the smallest and of the largest passes are looked at: cuts repeat with the number of threads."""


def alike_in_any_place(
    take: Callable[[Tensor, Tensor], Contributions], draw: Callable[[int], Sample], physical_batch: int
) -> bool:
    """Whether one made-up record, in all places of passes of several sizes, gives the same bits in each.

    take: what a pass makes of inputs [batch, *shape] and labels [batch]. draw: a sample of one record, by seed.
    """
    for one in map(draw, _SEEDS):
        first: list[Tensor] = []
        for size in _sizes(physical_batch):
            numbers = list(_numbers(take(*one.repeated(size))))
            first = first or [part[:1].clone() for part in numbers]
            if not all(
                torch.equal(part, its.expand_as(part)) for part, its in zip(numbers, first, strict=True)
            ):
                return False
    return True


def _sizes(physical_batch: int) -> list[int]:
    """Sizes of passes, the smallest and the largest; that of a physical batch of fewer than 64 records alone."""
    sizes = list(range(min(WHOLE, physical_batch), physical_batch + 1, WHOLE))
    return sizes if len(sizes) <= 2 * _ENDS else sizes[:_ENDS] + sizes[-_ENDS:]


def _numbers(found: Contributions) -> Iterator[Tensor]:
    """All that a pass has kept of each record, [batch, ...] each."""
    yield found.losses
    for gradient in found.gradients.values():
        yield from _kept(gradient)


def _kept(gradient: Any) -> Iterator[Tensor]:
    for value in vars(gradient).values():
        if isinstance(value, Tensor):
            yield value
        elif hasattr(value, "__dict__"):
            yield from _kept(value)
