"""Where parameters of models lie that do not fit one device: in main memory, or sharded over several processes.

**Trained parameters** are one flat vector, as are sums, noise and the moments of an optimizer. Either all of these
vectors stay in main memory, or each process holds an equal slice of each. A parameter is brought to the device for each
call that uses it, and again for the backward pass of that call. So the device holds the weights of a layer or two at a
time, beside what a pass saves. Source: Rajbhandari et al. 2020 and 2021, arXiv:1910.02054 (stage 3) and 2104.07857.

**Frozen parameters** are sharded by FSDP2: a block's weights are gathered for its forward pass and again for its
backward pass.

A gather needs all processes, so they run the same passes in the same order.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from algorithms.gradients.errors import ProcessLostError, UnsupportedModelError
from algorithms.gradients.grad_sample_recorder import Args, Func, Kwargs, RecordedTensor, name_of
from algorithms.gradients.model import PerExampleModel

if TYPE_CHECKING:  # most runs shard nothing, and the import takes as long as half of PyTorch
    from torch.distributed.device_mesh import DeviceMesh

_SHAPE_FUNCTIONS = frozenset(
    ("size", "dim", "numel", "stride", "__len__", "is_floating_point", "is_contiguous")
)
"""Functions that read no values."""
_DEVICE_ATTRIBUTES = frozenset(f"{name}.__get__" for name in ("device", "is_cuda", "is_cpu", "is_meta"))
"""Attributes that tell where a tensor lies."""
_VALUE_ATTRIBUTES = frozenset(f"{name}.__get__" for name in ("T", "mT", "H", "mH", "data", "real", "imag"))
"""Attributes with values; others, such as the shape, have none."""


@dataclass(frozen=True)
class _Source:
    """The parameter whose copy, or a view of it, a backward pass needs, so that it is brought again."""

    parameter: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Bringer:
    """Brings parameters to a device, for one call at a time. bring: gives a new copy of a parameter, by name."""

    def __init__(self, device: torch.device, bring: Callable[[str], Tensor]) -> None:
        self._there = torch.empty(0, device=device)
        self._bring = bring
        self._parameters: dict[int, str] = {}

    def call(self, use: Func, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """The result of `use(func, args, kwargs)` with the parameters among the arguments brought to the device."""
        name = name_of(func)
        if name in _DEVICE_ATTRIBUTES:
            return getattr(self._there, name.removesuffix(".__get__"))
        if name in _SHAPE_FUNCTIONS or (name.endswith(".__get__") and name not in _VALUE_ATTRIBUTES):
            return use(func, args, kwargs)
        args, kwargs = tree_map_only(RecordedTensor, self._bring_argument, (args, kwargs))
        try:
            return use(func, args, kwargs)
        finally:
            self._parameters.clear()

    def saving(self) -> AbstractContextManager[Any]:
        """A context in which autograd saves no copy of a parameter, but its name."""
        return saved_tensors_hooks(self._pack_saved, self._unpack_saved)

    def _bring_argument(self, tensor: RecordedTensor) -> RecordedTensor:
        if tensor.bringing is None or tensor.parameter is None:  # made from parameters, on the device already
            return tensor
        copy_there = self._bring(tensor.parameter)
        # The storage's address, while the copy is alive.
        self._parameters[copy_there.untyped_storage()._cdata] = tensor.parameter
        return RecordedTensor.of(copy_there, parameter=tensor.parameter)

    def _pack_saved(self, saved: Tensor) -> Tensor | _Source:
        if self._parameters:
            name = self._parameters.get(saved.untyped_storage()._cdata)
            if name is not None:
                return _Source(name, saved.size(), saved.stride(), saved.storage_offset())
        return saved

    def _unpack_saved(self, saved: Tensor | _Source) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return self._bring(saved.parameter).as_strided(saved.size, saved.stride, saved.offset)


@contextmanager
def together() -> Iterator[None]:
    """Turn the failure of what all processes do at once into a ProcessLostError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, torch.distributed.DistError) as reason:
        raise ProcessLostError from reason


class Shards:
    """The processes of a mesh that share parameters, and flat vectors [d] of which each has an equal slice.

    A slice lies on the process's device, in the order of the ranks. Such a vector is a DTensor with the placement
    `Shard(0)`, so that a method's arithmetic by coordinates is the same as for a whole vector, and needs no
    communication. All processes must call the methods at once.
    """

    def __init__(self, mesh: "DeviceMesh") -> None:
        self.mesh, self._group = mesh, mesh.get_group()
        self.rank, self._count = mesh.get_local_rank(), mesh.size()
        self.device = torch.device(mesh.device_type)

    def max_count(self, count: int) -> int:
        """The largest of the processes' counts."""
        largest = torch.tensor(count, device=self.device)
        with together():
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self._group)
        return int(largest)

    def slice_of(self, vector: Tensor) -> Tensor:
        """This process's slice of a vector that every process has."""
        return self._of(vector[self._slice(len(vector), self.rank)].to(self.device, copy=True), len(vector))

    def gather(self, vector: Tensor, span: slice) -> Tensor:
        """A slice [n] of a divided vector, whole on every process."""
        shard = _own(vector)
        whole = shard.new_empty(span.stop - span.start)
        with together():
            for owner, ours, theirs in self._pieces(len(vector), span):
                if owner == self.rank:
                    whole[theirs] = shard[ours]
                # Into a view of `whole`.
                distributed.broadcast(whole[theirs], group=self._group, group_src=owner)
        return whole

    def add(self, part: Tensor, span: slice, total: Tensor) -> None:
        """Add every process's `part` [n] to a slice of a divided total."""
        shard = _own(total)
        with together():
            for owner, ours, theirs in self._pieces(len(total), span):
                # The owner's `part` is the sum afterwards.
                distributed.reduce(part[theirs], group=self._group, group_dst=owner)
                if owner == self.rank:
                    shard[ours] += part[theirs]

    def scatter(self, vector: Tensor | None, like: Tensor) -> Tensor:
        """A float64 vector that the first process alone has, divided as `like` is."""
        shard = torch.empty_like(_own(like), dtype=torch.float64)
        with together():
            for owner, _, theirs in self._pieces(len(like), slice(0, len(like))):
                if owner == self.rank and vector is None:
                    distributed.recv(shard, group=self._group, group_src=0)
                elif owner == self.rank and vector is not None:
                    shard.copy_(vector[theirs])
                elif vector is not None:
                    distributed.send(vector[theirs].to(self.device), group=self._group, group_dst=owner)
        return self._of(shard, len(like))

    def collect(self, vector: Tensor) -> Tensor:
        """A divided vector in the first process's main memory; the other processes get an empty one."""
        shard, length = _own(vector).contiguous(), len(vector) if self.rank == 0 else 0
        whole = torch.empty(length, dtype=vector.dtype)
        with together():
            for owner, _, theirs in self._pieces(len(vector), slice(0, len(vector))):
                if self.rank == owner != 0:
                    distributed.send(shard, group=self._group, group_dst=0)
                elif self.rank == 0:
                    part = shard if owner == 0 else shard.new_empty(theirs.stop - theirs.start)
                    if owner != 0:
                        distributed.recv(part, group=self._group, group_src=owner)
                    whole[theirs] = part.cpu()
        return whole

    def _of(self, shard: Tensor, length: int) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(shard, self.mesh, [Shard(0)], shape=torch.Size([length]), stride=(1,))

    def _slice(self, length: int, rank: int) -> slice:
        each = -(-length // self._count)  # as `Shard` divides
        return slice(min(rank * each, length), min((rank + 1) * each, length))

    def _pieces(self, length: int, span: slice) -> Iterator[tuple[int, slice, slice]]:
        """The parts of a slice by owner: the owner, the part within its slice, and the part within `span`."""
        for owner in range(self._count):
            shard_span = self._slice(length, owner)
            start, stop = max(shard_span.start, span.start), min(shard_span.stop, span.stop)
            if start < stop:
                ours, theirs = (slice(start - each.start, stop - each.start) for each in (shard_span, span))
                yield owner, ours, theirs


def is_divided(vector: Tensor) -> bool:
    """Whether processes hold slices of a vector."""
    return hasattr(vector, "to_local")


def total(vector: Tensor) -> float:
    """The sum of a vector's coordinates, the same on every process that holds a slice of it."""
    summed = vector.sum()
    if is_divided(summed):  # read as a number, it would be the sum of this process's slice
        with together():
            summed = summed.full_tensor()  # type: ignore[attr-defined] # a DTensor
    return float(summed)


def _own(vector: Tensor) -> Tensor:
    shard: Tensor = vector.to_local()  # type: ignore[attr-defined] # a DTensor, whose import would be felt here
    return shard


def beside(model: PerExampleModel, device: torch.device) -> PerExampleModel:
    """A copy of the model with its frozen parameters and buffers on a device, and not its trained parameters."""
    frozen = [part for part in model.module.parameters() if not part.requires_grad]
    # What a deep copy takes in their place. Not every device lets a parameter's data become a tensor on it.
    on_device: dict[int, Tensor] = {
        id(part): part.detach().to(device, copy=True) for part in model.module.buffers()
    }
    on_device |= {id(part): nn.Parameter(part.detach().to(device, copy=True), False) for part in frozen}
    return replace(model, module=copy.deepcopy(model.module, on_device))


def shard_frozen(model: PerExampleModel, mesh: "DeviceMesh") -> PerExampleModel:
    """A copy of the model with its frozen parameters sharded over the processes of a mesh, on the mesh's devices.

    Each entry of an `nn.ModuleList` or `nn.Sequential` that holds other modules, such as a transformer block, is
    gathered separately; the rest of the model is gathered together.

    Every process must then run the same number of passes, since each pass gathers weights from all processes.

    Raises:
        UnsupportedModelError: if nothing is frozen.
    """
    frozen = [part for part in model.module.parameters() if not part.requires_grad]
    if not frozen:
        raise UnsupportedModelError(
            f"the model {model.name} has no frozen parameters to shard; set shard_frozen to false, and"
            " shard_trained to true to shard the others.",
            code="nothing_frozen_to_shard",
            model=model.name,
        )
    from torch.distributed.fsdp import fully_shard

    module = copy.deepcopy(model.module)
    trained = {part for part in module.parameters() if part.requires_grad}
    for block in _blocks(module):
        fully_shard(block, mesh=mesh, ignored_params=trained)
    fully_shard(module, mesh=mesh, ignored_params=trained, reshard_after_forward=True)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(mesh.device_type)
    return replace(model, module=module)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The largest modules that are gathered separately; none lies within another."""
    blocks: list[nn.Module] = []
    for part in module.children():
        if isinstance(part, nn.ModuleList | nn.Sequential):
            blocks += [entry for entry in part if next(entry.children(), None) is not None]
        else:
            blocks += _blocks(part)
    return blocks
