"""The initial parameters of a model, and which of them are frozen.

They come from a public model, or from an earlier release that was charged at the time. No private record is used here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from algorithms.models.model import Model, ModelRefusedError
from algorithms.models.public_models import from_file
from algorithms.models.recurrent import digest

Tensors = Mapping[str, Tensor]


def started(model: Model, path: Path, *, reinitialize: Sequence[str] = ()) -> Model:
    """Load the model's initial parameters from a safetensors file, in place.

    Of a release with learned features, only the model's own parameters are used. reinitialize: names of parameters or
    layers that keep their current start. Raises ModelRefusedError for an unreadable file, for names that the model or
    the file lacks, for other shapes, and for values that are not finite.
    """
    own = model.module.state_dict()
    keeps = named(model, reinitialize, what="model.reinitialize") if reinitialize else set()
    held, map_note = _behind_a_map(from_file(model, _read(path)), own)
    stored = {name: t for name, t in held.items() if not (name in keeps or _is_below(name, reinitialize))}
    _check_names(path, wanted=own.keys() - keeps, found=set(stored))
    for name, tensor in stored.items():
        _check_tensor(path, name, tensor, own[name])
        own[name].copy_(tensor)
    note = f"The start is the file {path.name} (SHA-256 {digest(path)})"
    kept = f", except for {', '.join(reinitialize)}, drawn from the model's seed." if reinitialize else "."
    return replace(model, notes=(*model.notes, note + kept + map_note))


def frozen(model: Model, chosen: Sequence[str]) -> Model:
    """Freeze parameters or layers, by name or by pattern, in place.

    Raises ModelRefusedError for unknown names, and if nothing is left to train.
    """
    names = named(model, chosen, what="model.freeze")
    for name in names:
        model.module.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.module.parameters()):
        raise ModelRefusedError("model.freeze leaves nothing to train; take some of it out.")
    return replace(model, notes=(*model.notes, f"Not trained: {', '.join(chosen)}."))


def named(model: Model, chosen: Sequence[str], *, what: str) -> set[str]:
    """The parameters that have one of the names, or whose layer does; raises ModelRefusedError for an unknown name."""
    own = [name for name, _ in model.module.named_parameters()]
    for prefix in chosen:
        if not any(_is_below(name, [prefix]) for name in own):
            layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in own))
            raise ModelRefusedError(
                f"{what} lists {prefix!r}, which the model {model.name!r} has not; its layers are {', '.join(layers)}."
            )
    return {name for name in own if _is_below(name, chosen)}


def _is_below(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a name has one of the prefixes, which may be patterns such as `encoder.layer.[0-3].*`."""
    return any(fnmatchcase(name, prefix) or fnmatchcase(name, f"{prefix}.*") for prefix in prefixes)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        raise ModelRefusedError(
            f"{path} is no safetensors file that can be read whole; set model.start to one."
        ) from None


def _behind_a_map(stored: Tensors, own: Tensors) -> tuple[Tensors, str]:
    """Select the model's own tensors from a file that also has those of a map (`feature_transforms.in_front`)."""
    is_whole = {name.partition(".")[0] for name in stored} == {"features", "model"}
    if not is_whole or not own.keys().isdisjoint(stored):
        return stored, ""
    behind = {name.removeprefix("model."): t for name, t in stored.items() if name.startswith("model.")}
    return behind, " The learned map in front of it there is not taken over."


def _check_names(path: Path, *, wanted: set[str], found: set[str]) -> None:
    for names, what in ((wanted - found, "lacks"), (found - wanted, "has, unlike the model,")):
        if names:
            raise ModelRefusedError(
                f"{path.name} {what} {min(names)}; give a file of the same model, or list what is new in"
                " model.reinitialize."
            )


def _check_tensor(path: Path, name: str, tensor: Tensor, own: Tensor) -> None:
    if tensor.shape != own.shape or tensor.is_floating_point() != own.is_floating_point():
        raise ModelRefusedError(
            f"{name} is {_form(tensor)} in {path.name}, but {_form(own)} in the model; give a file of the same model,"
            " or list it in model.reinitialize."
        )
    if not bool(torch.isfinite(tensor.to(own.dtype)).all()):
        raise ModelRefusedError(
            f"{name} in {path.name} is not finite everywhere as {own.dtype}; give the file of a sound model."
        )


def _form(tensor: Tensor) -> str:
    kind = "numbers" if tensor.is_floating_point() else "whole numbers"
    return f"{kind} of shape {list(tensor.shape)}"
