"""Feature maps in front of a model. They map each record independently, with buffers learned by releases."""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.models.model import Model, ModelRefusedError

Shape = tuple[int, ...]


class Whitening(nn.Module):
    """Maps [c, h, w]: group normalisation (if groups > 0), minus `mean`, channels times `matrix` [c, c]."""

    mean: Tensor
    matrix: Tensor

    def __init__(self, shape: Shape, *, groups: int) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {"kind": "whitening", "groups": groups}
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("matrix", torch.eye(shape[0]))

    def normalised(self, maps: Tensor) -> Tensor:
        """The maps [batch, c, h, w] whose mean and covariance are learned."""
        groups = self.settings["groups"]
        return functional.group_norm(maps, groups) if groups else maps

    def forward(self, maps: Tensor) -> Tensor:
        """[batch, c, h, w] -> [batch, c, h, w]."""
        centred = (self.normalised(maps) - self.mean).flatten(2)
        return (self.matrix @ centred).view_as(maps)


class Projection(nn.Module):
    """Projects flattened records of any shape on `components` [features, k]."""

    components: Tensor

    def __init__(self, shape: Shape, *, components: int) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {"kind": "projection", "components": components}
        self.register_buffer("components", torch.eye(prod(shape), components))

    def forward(self, records: Tensor) -> Tensor:
        """[batch, *shape] -> [batch, k]."""
        return records.flatten(1) @ self.components


class Standardisation(nn.Module):
    """Channels of maps [c, h, w] minus `mean`, times `scale`, both [c, 1, 1]."""

    mean: Tensor
    scale: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {"kind": "standardisation"}
        self.register_buffer("mean", torch.zeros(shape[0], 1, 1))
        self.register_buffer("scale", torch.ones(shape[0], 1, 1))

    def forward(self, maps: Tensor) -> Tensor:
        """[batch, c, h, w] -> [batch, c, h, w]."""
        return (maps - self.mean) * self.scale


class Centring(nn.Module):
    """Flattened records of unit length, minus `mean` [d], and times `matrix` [d, d] if they are whitened."""

    mean: Tensor
    matrix: Tensor

    def __init__(self, shape: Shape, *, whitens: bool) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {"kind": "centring", "whitens": whitens}
        self.register_buffer("mean", torch.zeros(prod(shape)))
        if whitens:
            self.register_buffer("matrix", torch.eye(prod(shape)))

    def normalised(self, records: Tensor) -> Tensor:
        """The unit vectors whose mean and moment are learned, [batch, *shape] -> [batch, d]; zeros stay zeros."""
        flat = records.flatten(1)
        unit: Tensor = flat / torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=1e-6)
        return unit

    def forward(self, records: Tensor) -> Tensor:
        """[batch, *shape] -> [batch, d]."""
        centred: Tensor = self.normalised(records) - self.mean
        return torch.matmul(centred, self.matrix) if self.settings["whitens"] else centred


Front = Whitening | Projection | Standardisation | Centring
_KINDS: dict[str, type[Front]] = {
    "whitening": Whitening,
    "projection": Projection,
    "standardisation": Standardisation,
    "centring": Centring,
}


def front(settings: Mapping[str, Any], shape: Shape) -> Front:
    """The map with these settings for records of this shape, before learning."""
    own = {key: value for key, value in settings.items() if key != "kind"}
    if settings.get("kind") not in _KINDS:
        raise ModelRefusedError(
            f"there is no map {settings.get('kind')!r}; choose one of {', '.join(_KINDS)}."
        )
    return _KINDS[settings["kind"]](shape, **own)


def shape_after(module: nn.Module, shape: Shape) -> Shape:
    """The shape of a record after a map."""
    with torch.no_grad():
        return tuple(module(torch.zeros(1, *shape)).shape[1:])


def in_front(module: Front, model: Model) -> Model:
    """Put a map in front of a model, which then takes unmapped records."""
    return replace(model, module=nn.Sequential(OrderedDict(features=module, model=model.module)))


def front_of(model: Model) -> Front | None:
    """The map in front of a model, or None."""
    found = dict(model.module.named_children()).get("features")
    return found if isinstance(found, Front) else None


def buffers(model: Model) -> dict[str, Tensor]:
    """The buffers of the map in front of a model; none without a map."""
    found = front_of(model)
    return {} if found is None else dict(found.named_buffers())


def installed(model: Model, learned: Mapping[str, Tensor]) -> Model:
    """A copy of the model with learned buffers in the map in front of it."""
    module = copy.deepcopy(model.module)
    module.get_submodule("features").load_state_dict(dict(learned))
    return replace(model, module=module)
