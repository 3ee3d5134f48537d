"""Whether a CPU computes the last numbers of a tensor in another way than those before.

An elementwise kernel takes two SIMD vectors at a time, and what is left at the end one by one. For a few functions,
such as sigmoid, the two ways give other last bits for a few numbers in a hundred, which made-up records may not show.
So passes are watched: a size is not taken if such a function has numbers left at the end.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from algorithms.gradients.grad_sample_recorder import Args, Kwargs
from algorithms.gradients.tracer_mode import TracerMode

_TWO_VECTORS = 128
"""Bytes of two vectors of AVX-512; those of other processors divide it."""

_MAX_UNDIVIDED = 2**10
"""Numbers that PyTorch leaves to one thread; its elementwise functions divide from 2^11, 2^14 or 2^15 on."""

_NAMES = (
    "abs add addcdiv addcmul asinh atan bitwise_and bitwise_not bitwise_or ceil clamp clamp_max "
    "clamp_min clone copy cos div eq erf exp expm1 fill floor ge gelu gt hardsigmoid hardswish hardtanh "
    "isinf isnan le leaky_relu lerp log log1p logical_and logical_not logical_or lt masked_fill "
    "maximum minimum mul ne neg reciprocal relu round rsqrt rsub sgn sign sin sqrt square sub tan "
    "tanh threshold to where zero"
)
_SAME_ALONE = frozenset(_NAMES.split())
"""Elementwise functions that have the same bits in both ways, as they round exactly or are vectorised alone, too."""


class VectorEnds(TracerMode):
    """Watches passes of a size within the block; `are_even` says whether all numbers were computed in the same way.

    threads: between which PyTorch may divide a tensor's numbers equally, so that each has an end.
    """

    def __init__(self, size: int, threads: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.are_even = True
        self._size, self._threads = size, threads

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run the function, and note whether it had numbers left."""
        results = super().run(func, args, kwargs)
        if self.are_even and not _is_same_alone(func, args, kwargs):
            self.are_even = not any(map(self._has_rest, tree_leaves(results)))
        return results

    def _has_rest(self, value: Any) -> bool:
        """Whether numbers are left of a tensor that has as many for each record of the pass."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() % self._size:
            return False
        ends = self._threads if value.numel() > _MAX_UNDIVIDED else 1
        return value.nbytes % (ends * _TWO_VECTORS) != 0


def _is_same_alone(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function has the same bits in both ways."""
    name: str = func.overloadpacket.__name__.removesuffix("_").removesuffix("_backward")
    if torch.Tag.pointwise not in func.tags:
        return name != "glu"  # which has no tag; other backward passes follow functions that have one
    if name == "pow":
        return isinstance(args[-1], int | float) and args[-1] in (0.5, 1, 2, 3)
    return name in _SAME_ALONE and bool(kwargs.get("approximate", "none") == "none")  # of gelu
