"""A model: a module with per-record losses, the facts it is built for, and its settings."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from pydantic_core import ErrorDetails
from torch import Tensor, nn

from algorithms.errors import ModelRefusedError as ModelRefusedError  # users of models import it from here
from algorithms.gradients import PerExampleModel
from algorithms.models.bounds import LossBounds


@dataclass(frozen=True)
class Model(PerExampleModel):
    """An architecture with the loss of each record, and what the rest of the project knows of it.

    The first three and those by keyword are as in `PerExampleModel`.

    Attributes:
        scores: A function of outputs [batch, ...] to [batch, classes]; the largest is the predicted class.
        bounds: Of the losses, or None if unknown.
        settings: By which the registry builds the same architecture, without a file.
        notes: Public sentences on the start and on frozen parameters.
    """

    scores: Callable[[Tensor], Tensor]
    _: KW_ONLY
    bounds: LossBounds | None = None
    settings: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()

    def published_tensors(self, parameters: Tensor) -> dict[str, Tensor]:
        """All tensors that evaluation needs, by name: the trained parameters from [d], frozen ones, and buffers."""
        state = self.module.state_dict()
        parameters_of_module = [
            name
            for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())
            if name in state
        ]
        return {name: state[name] for name in parameters_of_module} | self.by_name(parameters)


def batch_experts(module: nn.Module) -> None:
    """Let trained experts of transformers keep tokens with their records, instead of sorting all by expert."""
    for layer in module.modules():
        config: Any = getattr(layer, "config", None)
        parts = layer.parameters(recurse=False)
        if hasattr(config, "_experts_implementation") and any(part.requires_grad for part in parts):
            config._experts_implementation = "batched_mm"


def model_build_error(name: str, error: Exception) -> ModelRefusedError:
    """The refusal of settings with which a library, or the user's own factory, fails."""
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    return ModelRefusedError(f"the model {name!r} cannot be made with these settings ({why}); change them.")


def check_module(module: nn.Module) -> None:
    """Raises ModelRefusedError for a module that is wrapped or not initialised, or has tensors that do not fit."""
    _check_wrappers(module)
    _check_tensors(module)
    _check_trained(module)


def _check_wrappers(module: nn.Module) -> None:
    """Raises ModelRefusedError where a module, or a layer of it, hides the one whose gradients are taken."""
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


def _check_tensors(module: nn.Module) -> None:
    """Raises ModelRefusedError for tensors without values, sparse ones, and tables that a forward pass rewrites."""
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


def _check_trained(module: nn.Module) -> None:
    """Raises ModelRefusedError unless the trained parameters are finite 32-bit numbers, without hooks of their own."""
    parameters = list(module.parameters())
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
    predicts: class, number, count, quantile, labels, next token or tags. level: of a quantile.
    """

    input_shape: tuple[int, ...]
    classes: int
    tokens: int | None = None
    words_sha256: str | None = None
    padding: int = 0
    predicts: str = "class"
    level: float = 0.5


class ModelSettings(BaseModel):
    """The settings of one model; unknown names and wrong types are refused. Settings that end in `_file` are paths."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def without_files(self) -> dict[str, JsonValue]:
        """Settings that build the same architecture without files, if the parameters are read from elsewhere."""
        return self.model_dump()


_S = TypeVar("_S", bound=ModelSettings)


def settings_of(kind: type[_S], values: Mapping[str, JsonValue], name: str) -> _S:
    """Validate the settings of the model `name`; raises ModelRefusedError for unknown, missing and invalid ones."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ModelRefusedError(_sentence(name, error.errors()[0], list(kind.model_fields))) from None


def _sentence(name: str, problem: ErrorDetails, names: list[str]) -> str:
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        allowed = f"its settings are {', '.join(names)}" if names else "it has none"
        return f"the model {name!r} has no setting {key!r}; {allowed}."
    if problem["type"] == "value_error":
        return f"the model {name!r}: {problem['msg'].partition(', ')[2]}."
    what = problem["msg"].replace("Input should", "should", 1)
    return f"the setting {key} of the model {name!r} is {problem['input']!r}, but {what}; change it."
