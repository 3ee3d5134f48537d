"""A model (a module, per-record losses, and parameters as one flat vector), the facts it is built for, its settings."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from algorithms.errors import ModelRefusedError as ModelRefusedError  # users of models import it from here
from algorithms.models.packing import Packing

T = TypeVar("T")


@dataclass(frozen=True)
class LossBounds:
    """Public bounds on a record's loss as a function of the outputs, never computed from data.

    slope: bounds the L2 norm of its gradient. curvature: bounds the eigenvalues of its Hessian; infinite if the loss
    has a kink. least: the smallest loss.
    """

    slope: float
    curvature: float
    least: float


@dataclass(frozen=True)
class Model:
    """An architecture with the loss of each record.

    module: maps inputs [batch, *input_shape] to outputs [batch, outputs]; its own parameters are the start.
    losses: (outputs [batch, ...], labels [batch, ...]) -> [batch]; record by record, not averaged.
    scores: outputs -> [batch, classes]; the largest is the predicted class.
    precision: of gradients; bfloat16 where autocast considers it safe, and sums in 32 bits or more.
    bounds: of the losses, or None if unknown.
    settings: build the same architecture in the registry, without a file. notes: public sentences on the start and on
    frozen parameters. packing: for records of several tensors, which are packed into one row.
    label_shape, label_dtype: of one record's labels.
    """

    name: str
    module: nn.Module
    losses: Callable[[Tensor, Tensor], Tensor]
    scores: Callable[[Tensor], Tensor]
    precision: torch.dtype = torch.float32
    bounds: LossBounds | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()
    packing: Packing | None = None
    label_shape: tuple[int, ...] = ()
    label_dtype: torch.dtype = torch.int64

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the trained parameters by name, in the order of the flat vector; fixed on first use."""
        return {name: p.shape for name, p in self.module.named_parameters() if p.requires_grad}

    @cached_property
    def places(self) -> dict[str, slice]:
        """The slice of each trained parameter in the flat vector."""
        ends = accumulate(shape.numel() for shape in self.shapes.values())
        pairs = zip(self.shapes.items(), ends, strict=True)
        return {name: slice(end - shape.numel(), end) for (name, shape), end in pairs}

    @cached_property
    def _holders(self) -> list[dict[str, Any] | list[Any]]:
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

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector, shape [d], by parameter name."""
        if not parameters.requires_grad:
            return {name: parameters[place].view(self.shapes[name]) for name, place in self.places.items()}
        # The gradient of each slice would be as long as the whole vector; those of a split are concatenated.
        parts = torch.split(parameters, [shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }

    def published(self, parameters: Tensor) -> dict[str, Tensor]:
        """All tensors that evaluation needs, by name: the trained parameters from [d], frozen ones, and buffers."""
        kept = self.module.state_dict()
        own = [
            name
            for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())
            if name in kept
        ]
        return {name: kept[name] for name in own} | self.named(parameters)

    def outputs(self, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """The module's outputs for given parameters, shape [batch, outputs]; changes to its buffers are discarded."""
        found: Tensor = self.inside(parameters, lambda: self.module(inputs))
        return found

    def inside(self, parameters: Mapping[str, Tensor], run: Callable[[], T]) -> T:
        """Call `run` while the module has the given parameters instead of its own, and copies of its buffers.

        What layers keep of a pass in other attributes is discarded, too: some keep what they computed from their
        parameters, as biases of attention, for later passes. Backward passes must run inside too: they run checkpointed
        layers again, which would otherwise use the module's own parameters.
        """
        slots = [
            (own, key, f"{name}.{key}" if name else key, tensor, own is layer._buffers)
            for name, layer in self.module.named_modules()
            for own in (layer._parameters, layer._buffers)
            for key, tensor in own.items()
            if tensor is not None
        ]
        # By tensor, not by name, so that a tied parameter is replaced everywhere.
        held = {id(tensor): parameters[name] for _, _, name, tensor, _ in slots if name in parameters}
        for _, _, _, tensor, is_buffer in slots:
            if is_buffer and id(tensor) not in held:
                held[id(tensor)] = tensor.clone()
        # No other parameters: FSDP replaces its shards by gathered weights while a model runs.
        replaced = [(own, key, tensor) for own, key, _, tensor, _ in slots if id(tensor) in held]
        kept = [(holder, holder.copy()) for holder in self._holders]
        try:
            for own, key, tensor in replaced:
                own[key] = held[id(tensor)]
            return run()
        finally:
            for own, key, tensor in replaced:
                own[key] = tensor
            for holder, before in kept:
                holder.clear()
                if isinstance(holder, dict):
                    holder |= before
                else:
                    holder += before


_OF_MODULES = vars(nn.Module()).keys()
"""The attributes that every module has."""


def _holders(module: nn.Module) -> list[dict[str, Any] | list[Any]]:
    """The attributes of each layer, and those among them that are lists and dictionaries."""
    each = [vars(layer) for layer in module.modules()]
    return [
        *each,
        *(
            value
            for own in each
            for key, value in own.items()
            if key not in _OF_MODULES and type(value) in (dict, list)
        ),
    ]


def copied(module: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """A copy that can be trained, with some shared tensors: what layers keep of a pass is constant in it, or dropped.

    `torch.nn.utils.weight_norm` keeps a tensor with a graph, which cannot be copied. Some layers keep what they
    computed from their parameters for evaluation, and drop it when they are put into training mode.
    """
    kept = (
        value
        for holder in _holders(module)
        for value in (holder.values() if isinstance(holder, dict) else holder)
    )
    constants = {
        id(value): value.detach() for value in kept if isinstance(value, Tensor) and not value.is_leaf
    }
    own = deepcopy(module, constants | {id(part): part for part in shared})
    modes = [(layer, layer.training) for layer in own.modules()]
    own.train()
    for layer, mode in modes:
        layer.training = mode
    return own


def cannot_be_made(name: str, error: Exception) -> ModelRefusedError:
    """The refusal of settings with which a library, or the user's own factory, fails."""
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    return ModelRefusedError(f"the model {name!r} cannot be made with these settings ({why}); change them.")


def check_module(module: nn.Module) -> None:
    """Raises ModelRefusedError for a module that is wrapped or not initialised, or has tensors that do not fit."""
    is_spread = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    if is_spread or hasattr(module, "_orig_mod"):
        inner = "module" if is_spread else "_orig_mod"
        raise ModelRefusedError(
            f"the model is wrapped by {type(module).__name__}; give the module inside of it, model.{inner}."
        )
    if any(isinstance(layer, torch.jit.ScriptModule) for layer in module.modules()):
        raise ModelRefusedError(
            "the model has TorchScript in it; give the torch.nn.Module that it was made from."
        )
    parameters = list(module.parameters())
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in parameters):
        raise ModelRefusedError(
            "the model has layers whose size is not known yet; call it once on a made-up record, as of zeros."
        )
    if any(part.is_meta for part in (*parameters, *module.buffers())):
        raise ModelRefusedError(
            "the model has tensors without values, on the device meta; load its weights first."
        )
    if any(part.layout != torch.strided for part in (*parameters, *module.buffers())):
        raise ModelRefusedError("the model has sparse tensors; give them as dense ones, by .to_dense().")
    if any(getattr(layer, "max_norm", None) is not None for layer in module.modules()):
        raise ModelRefusedError(
            "the model has an embedding with max_norm, which mixes records, since a forward pass rewrites the entries"
            " that they share; set it to None, and bound the norms of what is looked up."
        )
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if any(parameter.is_complex() for parameter in trained):
        raise ModelRefusedError(
            "the model has trained parameters that are complex; keep them as real numbers, and make them complex in the"
            " forward pass by torch.view_as_complex."
        )
    if any(parameter.dtype != torch.float32 for parameter in trained):
        raise ModelRefusedError("the model has trained parameters that are not float32; give model.float().")
    if any(part.is_inference() for part in (*parameters, *module.buffers())):
        raise ModelRefusedError(
            "the model was made under torch.inference_mode, where nothing can be trained; make it outside of it."
        )
    if not all(bool(parameter.isfinite().all()) for parameter in parameters):
        raise ModelRefusedError("the model has parameters that are not finite; give it another start.")
    if any(part._backward_hooks or part._post_accumulate_grad_hooks for part in trained):
        raise ModelRefusedError(
            "the model has hooks on its parameters, which per-record gradients would pass by; remove them, and change"
            " what they change in the forward pass."
        )
    if not trained:
        raise ModelRefusedError(
            "the model has no parameters to train; give it some, or set requires_grad of those that it has."
        )


ACTIVATIONS: Mapping[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class ModelSpec:
    """Public facts about the data.

    input_shape: of one record. classes: the number of outputs, 1 for the prediction of a number. tokens: size of the
    vocabulary, including padding and unknown words; None for real-valued features. words_sha256: of the vocabulary
    file, with one word per line from entry 2 on; None if the data do not state it. padding: the entry that pads a text.
    predicts: class, number, labels, next token or tags.
    """

    input_shape: tuple[int, ...]
    classes: int
    tokens: int | None = None
    words_sha256: str | None = None
    padding: int = 0
    predicts: str = "class"


class Settings(BaseModel):
    """The settings of one model; unknown names and wrong types are refused. Settings that end in `_file` are paths."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def without_files(self) -> dict[str, Any]:
        """Settings that build the same architecture without files, if the parameters are read from elsewhere."""
        return self.model_dump()


_S = TypeVar("_S", bound=Settings)


def settings_of(kind: type[_S], values: Mapping[str, Any], name: str) -> _S:
    """Validate the settings of the model `name`; raises ModelRefusedError for unknown, missing and invalid ones."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ModelRefusedError(_sentence(name, dict(error.errors()[0]), list(kind.model_fields))) from None


def _sentence(name: str, problem: Mapping[str, Any], known: list[str]) -> str:
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        allowed = f"its settings are {', '.join(known)}" if known else "it has none"
        return f"the model {name!r} has no setting {key!r}; {allowed}."
    if problem["type"] == "value_error":
        return f"the model {name!r}: {problem['msg'].partition(', ')[2]}."
    what = problem["msg"].replace("Input should", "should", 1)
    return f"the setting {key} of the model {name!r} is {problem['input']!r}, but {what}; change it."
