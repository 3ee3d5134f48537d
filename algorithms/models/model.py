"""What a model is to the rest: a module, a loss of each record by itself, and parameters as one flat vector.

What a model is built for, and how its settings are read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from algorithms.errors import ModelRefusedError as ModelRefusedError  # where whoever uses models looks for it
from algorithms.models.packing import Packing

T = TypeVar("T")


@dataclass(frozen=True)
class LossBounds:
    """What is public about a record's loss as a function of its outputs: never computed from data.

    slope: the most that its gradient's L2 norm can be. curvature: the most that an eigenvalue of its Hessian can be,
    infinite where it has a kink. least: the least that it can be.
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
    precision: in which gradients are computed; bfloat16 wherever autocast holds that safe, sums in 32 bits or more.
    bounds: of the losses, or None where nothing is known.
    settings: with which the catalogue makes this form again, without a file. notes: public sentences on the start and
    on what is not trained. packing: of inputs that are several tensors of each record, in one row each.
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
        """The shapes of the trained parameters by name, in the order of the flat vector; fixed at first use."""
        return {name: p.shape for name, p in self.module.named_parameters() if p.requires_grad}

    @cached_property
    def places(self) -> dict[str, slice]:
        """Where each trained parameter lies in the flat vector."""
        ends = accumulate(shape.numel() for shape in self.shapes.values())
        pairs = zip(self.shapes.items(), ends, strict=True)
        return {name: slice(end - shape.numel(), end) for (name, shape), end in pairs}

    @cached_property
    def layers(self) -> tuple[tuple[str, ...], ...]:
        """The names of each layer's trained parameters: one group for each module that owns some."""
        groups: dict[str, list[str]] = {}
        for name in self.shapes:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
        return tuple(tuple(names) for names in groups.values())

    @property
    def parameter_count(self) -> int:
        """The number of trained parameters, d."""
        return sum(shape.numel() for shape in self.shapes.values())

    def initial_parameters(self) -> Tensor:
        """The start as a flat vector, shape [d], float32."""
        return torch.cat([self.module.get_parameter(name).detach().reshape(-1) for name in self.shapes])

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """A flat vector, shape [d], as views by parameter name."""
        if not parameters.requires_grad:
            return {name: parameters[place].view(self.shapes[name]) for name, place in self.places.items()}
        # A slice's gradient is as long as the whole vector, for each parameter anew; those of a split are put together.
        parts = torch.split(parameters, [shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }

    def published(self, parameters: Tensor) -> dict[str, Tensor]:
        """All that an evaluation needs, by name: what is trained at a flat vector [d], what is not, and the buffers."""
        kept = self.module.state_dict()
        own = [
            name
            for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())
            if name in kept
        ]
        return {name: kept[name] for name in own} | self.named(parameters)

    def outputs(self, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """The module's outputs at given parameters, shape [batch, outputs]; what it does to its buffers is dropped."""
        found: Tensor = self.inside(parameters, lambda: self.module(inputs))
        return found

    def inside(self, parameters: Mapping[str, Tensor], run: Callable[[], T]) -> T:
        """What `run` gives while the module has given parameters in place of its own, and copies of its buffers.

        Backward passes belong there as well: layers may run again in them, as with gradient checkpointing, and would
        else do so at the module's own parameters.
        """
        slots = [
            (own, key, f"{name}.{key}" if name else key, tensor, own is layer._buffers)
            for name, layer in self.module.named_modules()
            for own in (layer._parameters, layer._buffers)
            for key, tensor in own.items()
            if tensor is not None
        ]
        # By tensor, and not by name, so that a parameter that is tied to another one is replaced wherever it stands.
        held = {id(tensor): parameters[name] for _, _, name, tensor, _ in slots if name in parameters}
        for _, _, _, tensor, is_buffer in slots:
            if is_buffer and id(tensor) not in held:
                held[id(tensor)] = tensor.clone()
        # No others: FSDP puts gathered weights in the place of its shards while a model runs.
        replaced = [(own, key, tensor) for own, key, _, tensor, _ in slots if id(tensor) in held]
        try:
            for own, key, tensor in replaced:
                own[key] = held[id(tensor)]
            return run()
        finally:
            for own, key, tensor in replaced:
                own[key] = tensor


ACTIVATIONS: Mapping[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class ModelSpec:
    """Public facts of the data.

    input_shape: of one record. classes: how many outputs a model needs, 1 where a number is predicted. tokens: how many
    entries a vocabulary has, padding and unknown words included; None where features are real numbers. words_sha256: of
    the file of the words that the entries stand for, one a line, the first at entry 2; None where the data do not say
    it. padding: the entry that fills up a text. predicts: class, number, labels, next token or tags.
    """

    input_shape: tuple[int, ...]
    classes: int
    tokens: int | None = None
    words_sha256: str | None = None
    padding: int = 0
    predicts: str = "class"


class Settings(BaseModel):
    """The settings of one model; unknown ones and wrong types are refused. Those that end in `_file` are paths."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def without_files(self) -> dict[str, Any]:
        """Settings that make a model of the same form, of no file: its parameters are then read from elsewhere."""
        return self.model_dump()


_S = TypeVar("_S", bound=Settings)


def settings_of(kind: type[_S], values: Mapping[str, Any], name: str) -> _S:
    """The settings of the model `name`; raises ModelRefusedError for unknown, missing and impossible ones."""
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
