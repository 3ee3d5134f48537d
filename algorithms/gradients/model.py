"""A module with the loss of each record, whose trained parameters are one flat vector: what the engine takes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from algorithms.gradients.packing import Packing, Padding

T = TypeVar("T")
Holder: TypeAlias = dict[str, Any] | list[Any]
"""An attribute of a layer that can keep something of a pass."""


@dataclass(frozen=True)
class PerExampleModel:
    """A module and the loss of each record.

    Args:
        name: for messages.
        module: maps inputs [batch, *input_shape] to outputs [batch, ...]; its own parameters are the start. Those that
            require gradients are trained, in float32.
        losses: (outputs [batch, ...], labels [batch, ...]) -> [batch]; record by record, not averaged.
        precision: of gradients; bfloat16 where autocast considers it safe, and sums in 32 bits or more.
        packing: for records of several tensors, which are packed into one row.
        label_shape, label_dtype: of one record's labels.
        padding: what no record consists of alone, unless they are packed.

    Example:
        >>> module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> model = PerExampleModel("small", module, nn.CrossEntropyLoss(reduction="none"))
        >>> model.parameter_count, model.initial_parameters().shape
        (26, torch.Size([26]))
        >>> model.slices["2.bias"]
        slice(24, 26, None)
    """

    name: str
    module: nn.Module
    losses: Callable[[Tensor, Tensor], Tensor]
    _: KW_ONLY
    precision: torch.dtype = torch.float32
    packing: Packing | None = None
    label_shape: tuple[int, ...] = ()
    label_dtype: torch.dtype = torch.int64
    padding: Padding | None = None

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the trained parameters by name, in the order of the flat vector; fixed on first use."""
        return {name: p.shape for name, p in self.module.named_parameters() if p.requires_grad}

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The slice of each trained parameter in the flat vector."""
        ends = accumulate(shape.numel() for shape in self.shapes.values())
        pairs = zip(self.shapes.items(), ends, strict=True)
        return {name: slice(end - shape.numel(), end) for (name, shape), end in pairs}

    @cached_property
    def _views(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]:
        """The shape, strides and first index of each trained parameter in the flat vector."""
        return {
            # Strides of a contiguous tensor.
            name: (shape, tuple(prod(shape[i + 1 :]) for i in range(len(shape))), self.slices[name].start)
            for name, shape in ((name, tuple(shape)) for name, shape in self.shapes.items())
        }

    @cached_property
    def _owners(self) -> list[tuple[dict[str, Tensor | None], str, bool]]:
        """The parameters and the buffers of each layer, found once: the prefix of their names, and whether buffers."""
        layers = [(layer, f"{name}." if name else "") for name, layer in self.module.named_modules()]
        return [
            (tensors, prefix, tensors is layer._buffers)
            for layer, prefix in layers
            for tensors in (layer._parameters, layer._buffers)
        ]

    @cached_property
    def _holders(self) -> list[Holder]:
        """What layers may keep something of a pass in, found once: `inside` discards what a pass adds to it."""
        return _holders(self.module)

    @cached_property
    def layers(self) -> tuple[tuple[str, ...], ...]:
        """The names of trained parameters by layer; a layer is a module that owns some."""
        groups: dict[str, list[str]] = {}
        for name in self.shapes:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
        return tuple(tuple(names) for names in groups.values())

    @property
    def parameter_count(self) -> int:
        """The number of trained parameters, d."""
        return sum(shape.numel() for shape in self.shapes.values())

    def initial_parameters(self) -> Tensor:
        """The initial parameters as a flat vector, shape [d], float32."""
        return torch.cat([self.module.get_parameter(name).detach().reshape(-1) for name in self.shapes])

    def on(self, device: torch.device) -> Self:
        """A copy on a device; on the CPU it shares the parameters."""
        shared = self.module.parameters() if device.type == "cpu" else ()
        moved = copy_module(self.module, shared).to(device)
        _tie(moved, self.module)
        return replace(self, module=moved)

    def by_name(self, parameters: Tensor) -> dict[str, Tensor]:
        """The parts of a flat vector, shape [d], by parameter name."""
        if not parameters.requires_grad:
            first = parameters.storage_offset()
            return {  # in half the time of slices and their views
                name: _align(parameters.as_strided(shape, strides, first + start))
                for name, (shape, strides, start) in self._views.items()
            }
        # The gradient of each slice would be as long as the whole vector; those of a split are concatenated.
        parts = torch.split(parameters, [shape.numel() for shape in self.shapes.values()])
        return {
            name: _align(part.view(shape))
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }

    def outputs(self, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """The module's outputs for given parameters, shape [batch, outputs]; changes to its buffers are discarded."""
        with self.using(parameters):
            outputs: Tensor = self.module(inputs)
        return outputs

    @contextmanager
    def using(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block, the module has the given parameters instead of its own, and copies of its buffers.

        What layers keep of a pass in other attributes is discarded, too: some keep what they computed from their
        parameters, as biases of attention, for later passes. Backward passes must run within it too: they run
        checkpointed layers again, which would otherwise use the module's own parameters.
        """
        slots = [
            (owner, key, prefix + key, tensor, is_buffer)
            for owner, prefix, is_buffer in self._owners
            for key, tensor in owner.items()
            if tensor is not None
        ]
        # By tensor, not by name, so that a tied parameter is replaced everywhere.
        held = {id(tensor): parameters[name] for _, _, name, tensor, _ in slots if name in parameters}
        for _, _, _, tensor, is_buffer in slots:
            if is_buffer and id(tensor) not in held:
                held[id(tensor)] = tensor.clone()
        # No other parameters: FSDP replaces its shards by gathered weights while a model runs.
        replaced = [(owner, key, tensor) for owner, key, _, tensor, _ in slots if id(tensor) in held]
        contents = [(holder, holder.copy()) for holder in self._holders]
        try:
            for owner, key, tensor in replaced:
                owner[key] = held[id(tensor)]
            yield
        finally:
            for owner, key, tensor in replaced:
                owner[key] = tensor
            for holder, before in contents:
                holder.clear()
                if isinstance(holder, dict):
                    holder |= before
                else:
                    holder += before


def _align(part: Tensor) -> Tensor:
    """A copy if `torch.view_as_complex` would reject the part of a vector, whose pairs begin at an odd place."""
    is_odd = part.dim() > 0 and part.shape[-1] == 2 and part.storage_offset() % 2 == 1
    return part.clone() if is_odd else part


_OF_MODULES = vars(nn.Module()).keys()
"""The attributes that every module has."""


def _holders(module: nn.Module) -> list[Holder]:
    """The attributes of each layer, and those among them that are lists and dictionaries."""
    each = [vars(layer) for layer in module.modules()]
    return [
        *each,
        *(
            value
            for attributes in each
            for key, value in attributes.items()
            if key not in _OF_MODULES and type(value) in (dict, list)
        ),
    ]


def _tie(moved: nn.Module, like: nn.Module) -> None:
    """Make names of one parameter in `like` those of one in `moved`: some devices get a new parameter for each name."""
    first = dict[int, str]()
    for name, part in like.named_parameters(remove_duplicate=False):
        holder, _, leaf = name.rpartition(".")
        if first.setdefault(id(part), name) != name:
            setattr(moved.get_submodule(holder), leaf, moved.get_parameter(first[id(part)]))


def copy_module(module: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """A copy that can be trained, with some shared tensors: what layers keep of a pass is constant in it, or dropped.

    `torch.nn.utils.weight_norm` keeps a tensor with a graph, which cannot be copied. Some layers keep what they
    computed from their parameters for evaluation, and drop it when they are put into training mode.
    """
    values = (
        value
        for holder in _holders(module)
        for value in (holder.values() if isinstance(holder, dict) else holder)
    )
    constants = {
        id(value): value.detach() for value in values if isinstance(value, Tensor) and not value.is_leaf
    }
    copy = deepcopy(module, constants | {id(part): part for part in shared})
    modes = [(layer, layer.training) for layer in copy.modules()]
    copy.train()
    for layer, mode in modes:
        layer.training = mode
    return copy
