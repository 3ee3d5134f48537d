"""Trained parameters that stay in main memory, for models whose weights and gradient sums do not fit a device.

The flat vector of parameters, sums, noise and the method's state lie in main memory. A parameter is copied to the
device for each call that uses it, and again for the backward pass of that call. So the device holds the weights of a
layer or two at a time, beside what a pass saves. Source: Rajbhandari et al. 2021, arXiv:2104.07857.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from algorithms.gradients.grad_sample_recorder import Args, Func, Kwargs, RecordedTensor, name_of

_READS = frozenset(("size", "dim", "numel", "stride", "__len__", "is_floating_point", "is_contiguous"))
"""Functions that read no values."""
_VALUES = frozenset(f"{name}.__get__" for name in ("T", "mT", "H", "mH", "data", "real", "imag"))
"""Attributes with values; others, such as the shape, have none."""


@dataclass(frozen=True)
class _Source:
    """Where a copy, or a view of one, that a backward pass needs is copied from again."""

    parameter: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Offload:
    """Copies parameters to a device, for one call at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._parameters: dict[int, Tensor] = {}

    def call(self, use: Func, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """The result of `use(func, args, kwargs)` with copies of the parameters among the arguments."""
        name = name_of(func)
        if name == "device.__get__":
            return self.device
        if name in _READS or (name.endswith(".__get__") and name not in _VALUES):
            return use(func, args, kwargs)
        args, kwargs = tree_map_only(RecordedTensor, self._copied, (args, kwargs))
        try:
            return use(func, args, kwargs)
        finally:
            self._parameters.clear()

    def saving(self) -> AbstractContextManager[Any]:
        """A context in which autograd saves no copy, but where to copy it from."""
        return saved_tensors_hooks(self._noted, self._fetched)

    def _copied(self, tensor: RecordedTensor) -> RecordedTensor:
        if tensor.offload is None:  # computed from parameters, on the device already
            return tensor
        copy = _brought(tensor, self.device)
        self._parameters[copy.untyped_storage()._cdata] = tensor.detach()
        return RecordedTensor.of(copy, parameter=tensor.parameter)

    def _noted(self, saved: Tensor) -> Tensor | _Source:
        if self._parameters:
            parameter = self._parameters.get(saved.untyped_storage()._cdata)
            if parameter is not None:
                return _Source(parameter, saved.size(), saved.stride(), saved.storage_offset())
        return saved

    def _fetched(self, saved: Tensor | _Source) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return _brought(saved.parameter, self.device).as_strided(saved.size, saved.stride, saved.offset)


def _brought(parameter: Tensor, device: torch.device) -> Tensor:
    return parameter.to(device, copy=True)
