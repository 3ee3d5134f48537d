"""A model: a module, per-record losses, parameters as one flat vector, the facts it is built for, and its settings.

Records of several named tensors, such as token ids with an attention mask, are packed into one tensor each: the
barrier, its samples and its passes use one array of records, from which the model's tensors are unpacked.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from algorithms.errors import ModelRefusedError as ModelRefusedError  # users of models import it from here
from algorithms.errors import RefusedError

T = TypeVar("T")


@dataclass(frozen=True)
class Padding:
    """Numbers of which alone no record consists: a model may take no text that is padding alone.

    axes: of a tensor, the first ones, that count records: 2 for people with several rows.
    """

    numbers: tuple[int, ...]
    axes: int = 1

    @property
    def other(self) -> int:
        """The smallest number that is not padding."""
        return next(number for number in range(len(self.numbers) + 1) if number not in self.numbers)

    def begun(self, values: Tensor) -> Tensor:
        """Made-up values, [batch, ...], of which each record that begins by padding begins by another number."""
        rows = values.reshape(*values.shape[: self.axes], -1).clone()
        numbers = torch.tensor(self.numbers, device=values.device)
        rows[..., 0].masked_fill_(torch.isin(rows[..., 0], numbers), self.other)
        return rows.view(values.shape)

    def is_all_of(self, values: NDArray[Any]) -> bool:
        """Whether some record of [n, ...] consists of padding alone."""
        return bool(np.isin(values.reshape(len(values), -1), self.numbers).all(axis=1).any())


@dataclass(frozen=True)
class Part:
    """One tensor of a record.

    shape: for one record. dtype: for the model: float32, int64 or bool. entries: made-up integers are drawn below it.
    padding: what no record has alone there.
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
        >>> import numpy as np
        >>> records = {"ids": np.array([[7, 8], [9, 0]]), "weight": np.array([0.5, 2.0])}
        >>> packing = Packing.of(records)
        >>> rows = packing.packed(records)
        >>> rows.shape, rows.dtype
        ((2, 3), dtype('int32'))
        >>> packing.mapping(torch.from_numpy(rows))["weight"]
        tensor([0.5000, 2.0000])
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, records: Mapping[str, NDArray[Any]]) -> "Packing":
        """The packing of arrays [n, *shape] by name; raises RefusedError for integers beyond 32 bits."""
        parts = []
        for name, values in records.items():
            if values.dtype.kind in "iu" and values.size and int(np.abs(values).max()) >= 2**31:
                raise RefusedError(f"{name} holds whole numbers beyond 32 bits; number its entries from 0.")
            dtypes = {"f": torch.float32, "b": torch.bool}
            parts.append(Part(name, values.shape[1:], dtypes.get(values.dtype.kind, torch.int64)))
        return cls(tuple(parts))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of a row."""
        only_real = all(part.is_real for part in self.parts)
        return torch.float32 if only_real else torch.int32

    @property
    def entries(self) -> list[int]:
        """The indices of the parts that hold entries of tables."""
        return [
            place for place, part in enumerate(self.parts) if part.dtype == torch.int64 and not part.is_mask
        ]

    @cached_property
    def _places(self) -> list[slice]:
        ends = accumulate(prod(part.shape) for part in self.parts)
        return [slice(end - prod(part.shape), end) for part, end in zip(self.parts, ends, strict=True)]

    def packed(self, records: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Pack arrays [n, *shape], given by name, into rows [n, width]."""
        values = [
            torch.from_numpy(np.array(records[part.name], np.float32 if part.is_real else np.int32))
            for part in self.parts
        ]
        return self.joined(values).numpy()

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`: rows [batch, width]."""
        flat = [value.reshape(len(value), -1) for value in values]
        if not self.dtype.is_floating_point:
            flat = [value.view(torch.int32) if value.is_floating_point() else value for value in flat]
        return torch.cat(flat, dim=1)

    def split(self, rows: Tensor) -> list[Tensor]:
        """Split rows [batch, width] into parts [batch, *shape]; integers stay in 32 bits as stored."""
        found = []
        for part, place in zip(self.parts, self._places, strict=True):
            values = rows[:, place]
            if part.is_real and not self.dtype.is_floating_point:
                values = values.view(torch.float32)
            found.append(values.reshape(len(rows), *part.shape))
        return found

    def mapping(self, rows: Tensor, floating: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The model's inputs by name for rows [batch, width]; floating: the type of real numbers."""
        pairs = zip(self.parts, self.split(rows), strict=True)
        return {part.name: values.to(floating if part.is_real else part.dtype) for part, values in pairs}


class Called(nn.Module):
    """Wraps a module for the engine: rows [batch, ...] to one tensor of outputs.

    packing: of the rows; None if the module takes them unchanged. The module is called with the parts by name, or with
    a mapping if it takes one argument of another name. Of several outputs, the `logits` are returned. Outputs [batch]
    become [batch, 1].
    """

    def __init__(self, module: nn.Module, packing: Packing | None) -> None:
        super().__init__()
        self.module = module
        self.packing = packing
        self.takes_names = packing is not None and _takes(module, [part.name for part in packing.parts])

    def forward(self, rows: Tensor) -> Tensor:
        if self.packing is None:
            found = self.module(rows)
        else:
            real = (p.dtype for p in self.module.parameters() if p.is_floating_point())
            parts = self.packing.mapping(rows, next(real, torch.float32))
            found = self.module(**parts) if self.takes_names else self.module(parts)
        is_named = isinstance(found, Mapping)
        logits: Tensor = found.get("logits", found) if is_named else getattr(found, "logits", found)
        return logits[:, None] if isinstance(logits, Tensor) and logits.dim() == 1 else logits


def _takes(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether a module takes arguments with these names rather than a mapping."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError:
        required = [
            one
            for one in signature.parameters.values()
            if one.default is one.empty and one.kind < one.VAR_POSITIONAL
        ]
        return len(required) != 1
    return True


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
    label_shape, label_dtype: of one record's labels. padding: what no record consists of alone, unless they are packed.
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
    padding: Padding | None = None

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
    def _views(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]:
        """The shape, strides and first index of each trained parameter in the flat vector."""
        return {
            name: (shape, tuple(prod(shape[i + 1 :]) for i in range(len(shape))), self.places[name].start)
            for name, shape in ((name, tuple(shape)) for name, shape in self.shapes.items())
        }

    @cached_property
    def _owners(self) -> list[tuple[dict[str, Tensor | None], str, bool]]:
        """The parameters and the buffers of each layer, found once: the prefix of their names, and whether buffers."""
        layers = [(layer, f"{name}." if name else "") for name, layer in self.module.named_modules()]
        return [
            (own, prefix, own is layer._buffers)
            for layer, prefix in layers
            for own in (layer._parameters, layer._buffers)
        ]

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
        """The parts of a flat vector, shape [d], by parameter name."""
        if not parameters.requires_grad:
            first = parameters.storage_offset()
            return {  # in half the time of slices and their views
                name: _aligned(parameters.as_strided(shape, strides, first + start))
                for name, (shape, strides, start) in self._views.items()
            }
        # The gradient of each slice would be as long as the whole vector; those of a split are concatenated.
        parts = torch.split(parameters, [shape.numel() for shape in self.shapes.values()])
        return {
            name: _aligned(part.view(shape))
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
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
            (own, key, prefix + key, tensor, is_buffer)
            for own, prefix, is_buffer in self._owners
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


def _aligned(part: Tensor) -> Tensor:
    """A copy if `torch.view_as_complex` would reject the part of a vector, whose pairs begin at an odd place."""
    is_odd = part.dim() > 0 and part.shape[-1] == 2 and part.storage_offset() % 2 == 1
    return part.clone() if is_odd else part


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


def batch_experts(module: nn.Module) -> None:
    """Let trained experts of transformers keep tokens with their records, instead of sorting all by expert."""
    for layer in module.modules():
        config: Any = getattr(layer, "config", None)
        parts = layer.parameters(recurse=False)
        if hasattr(config, "_experts_implementation") and any(part.requires_grad for part in parts):
            config._experts_implementation = "batched_mm"


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
    for name, layer in module.named_modules():
        if hasattr(layer, "to_standard_module"):
            raise ModelRefusedError(
                f"{f'the layer {name} of ' * bool(name)}the model is wrapped by Opacus's {type(layer).__name__}, and"
                " per-record gradients are taken here without it; give the module inside of it, by"
                " .to_standard_module()."
            )
        if isinstance(layer, torch.jit.ScriptModule):
            where = f"its layer {name}" if name else "it"
            raise ModelRefusedError(
                f"the model has TorchScript in it ({where}), whose uses of parameters cannot be seen; make the"
                " torch.nn.Module that it was made from, by its class, and load the weights by"
                " load_state_dict(scripted.state_dict())."
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
    complex_ones = [
        name for name, part in module.named_parameters() if part.requires_grad and part.is_complex()
    ]
    if complex_ones:
        raise ModelRefusedError(
            f"the model has trained parameters that are complex ({', '.join(complex_ones[:3])}), and all are one vector"
            " of real numbers here; keep them as real numbers, [..., 2], and make them complex in the forward pass by"
            " torch.view_as_complex."
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


_TURN = threading.RLock()


@contextmanager
def same_randomness(seed: int = 0) -> Iterator[None]:
    """Seed PyTorch's generators within the block, one thread at a time, and restore them afterwards.

    Models are built and inspected in this context. Trials of a search do so in threads; if an initialisation depended
    on other threads' draws, it would reveal that there were other trials.
    """
    accelerator = torch.accelerator.current_accelerator() or torch.device("cuda")
    module = torch.get_device_module(accelerator)
    is_used = hasattr(module, "is_initialized") and module.is_initialized()
    devices = range(module.device_count()) if is_used else range(0)
    with _TURN, torch.random.fork_rng(devices=devices, device_type=accelerator.type):
        # torch.manual_seed would record the call stack for each kind of accelerator that is missing
        torch.default_generator.manual_seed(seed)
        for device in devices:
            module.default_generators[device].manual_seed(seed)
        yield
