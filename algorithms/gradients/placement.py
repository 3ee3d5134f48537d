"""Where parameters of models lie that do not fit one device: in main memory, or sharded over several processes.

**Trained parameters in main memory.** The flat vector of parameters, sums, noise and the method's state lie there. A
parameter is copied to the device for each call that uses it, and again for the backward pass of that call. So the
device holds the weights of a layer or two at a time, beside what a pass saves. Source: Rajbhandari et al. 2021,
arXiv:2104.07857.

**Frozen parameters over several processes**, by FSDP2. Trained parameters, such as LoRA's adapters, stay whole on every
process, since noise is added to them as one flat vector. A block's frozen weights are gathered for its forward pass and
again for its backward pass.
"""

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from algorithms.gradients.grad_sample_recorder import Args, Func, Kwargs, RecordedTensor, name_of
from algorithms.models import Model, ModelRefusedError

if TYPE_CHECKING:  # most runs shard nothing, and the import takes as long as half of PyTorch
    from torch.distributed.device_mesh import DeviceMesh

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


def shard_frozen(model: Model, mesh: "DeviceMesh") -> Model:
    """A copy of the model with its frozen parameters sharded over the processes of a mesh, on the mesh's devices.

    Each entry of an `nn.ModuleList` or `nn.Sequential` that holds other modules, such as a transformer block, is
    gathered separately; the rest of the model is gathered together.

    Every process must then run the same number of passes, since each pass gathers weights from all processes.

    Raises:
        ModelRefusedError: if nothing is frozen, or if the model computes in 16 bits, where one process may have to
            repeat a pass that the others do not.
    """
    frozen = [part for part in model.module.parameters() if not part.requires_grad]
    if not frozen:
        raise ModelRefusedError(
            f"the model {model.name} has no frozen parameters, and only these are sharded; freeze some of them, or set"
            " performance.shard_frozen to false."
        )
    if model.precision.itemsize < 4:
        raise ModelRefusedError(
            f"the model {model.name} computes in bfloat16, and its frozen parameters cannot be sharded then; set"
            " model.precision to float32, or performance.shard_frozen to false."
        )
    from torch.distributed.fsdp import fully_shard

    module = copy.deepcopy(model.module)
    trained = {part for part in module.parameters() if part.requires_grad}
    for block in _blocks(module):
        fully_shard(block, mesh=mesh, ignored_params=trained)
    fully_shard(module, mesh=mesh, ignored_params=trained, reshard_after_forward=True)
    for part in (*trained, *module.buffers()):
        part.data = part.data.to(mesh.device_type)
    return replace(model, module=module)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The largest modules that are gathered separately; none lies within another."""
    found: list[nn.Module] = []
    for part in module.children():
        if isinstance(part, nn.ModuleList | nn.Sequential):
            found += [entry for entry in part if next(entry.children(), None) is not None]
        else:
            found += _blocks(part)
    return found
