"""Frozen parameters sharded over several processes by FSDP2, for models whose weights do not fit one device.

Trained parameters, such as LoRA's adapters, stay whole on every process, since noise is added to them as one flat
vector. A block's frozen weights are gathered for its forward pass and again for its backward pass.
"""

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from algorithms.models import Model, ModelRefusedError

if TYPE_CHECKING:  # most runs shard nothing, and the import takes as long as half of PyTorch
    from torch.distributed.device_mesh import DeviceMesh


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
