"""What is done to each record by itself before a model: learned feature maps, and several views (augmentation).

The buffers of feature maps are learned by releases. With several views of a record (augmentation multiplicity: De et
al. 2022, arXiv:2204.13650) its loss is the mean over them. Its gradient, their average, is clipped once, so views cost
no privacy. They are a fixed public list, so that a resumed run uses the same ones.
"""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.nn import functional

from algorithms.models.cell_histograms import HistogramCells
from algorithms.models.model import Model, ModelRefusedError
from algorithms.models.scaled_target import TargetScaling, behind_scaling

Shape = tuple[int, ...]


class Whitening(nn.Module):
    """Maps [c, h, w]: group normalisation (if groups > 0), minus `mean`, channels times `matrix` [c, c]."""

    mean: Tensor
    matrix: Tensor

    def __init__(self, shape: Shape, *, groups: int) -> None:
        super().__init__()
        self.settings: dict[str, JsonValue] = {"kind": "whitening", "groups": groups}
        self._groups = groups
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("matrix", torch.eye(shape[0]))

    def normalize(self, maps: Tensor) -> Tensor:
        """The maps [batch, c, h, w] whose mean and covariance are learned."""
        return functional.group_norm(maps, self._groups) if self._groups else maps

    def forward(self, maps: Tensor) -> Tensor:
        """[batch, c, h, w] -> [batch, c, h, w]."""
        centred = (self.normalize(maps) - self.mean).flatten(2)  # [batch, c, h * w]
        return (self.matrix @ centred).view_as(maps)


class Projection(nn.Module):
    """Projects flattened records of any shape on `components` [features, k]."""

    components: Tensor

    def __init__(self, shape: Shape, *, components: int) -> None:
        super().__init__()
        self.settings: dict[str, JsonValue] = {"kind": "projection", "components": components}
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
        self.settings: dict[str, JsonValue] = {"kind": "standardisation"}
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
        self.settings: dict[str, JsonValue] = {"kind": "centring", "whitens": whitens}
        self.register_buffer("mean", torch.zeros(prod(shape)))
        if whitens:
            self.register_buffer("matrix", torch.eye(prod(shape)))

    def forward(self, records: Tensor) -> Tensor:
        """[batch, *shape] -> [batch, d]."""
        centred: Tensor = unit_length(records) - self.mean
        return torch.matmul(centred, self.matrix) if self.settings["whitens"] else centred


class Preconditioning(nn.Module):
    """Flattened records of unit length times `matrix` [d, d]; zeros stay zeros."""

    matrix: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.settings: dict[str, JsonValue] = {"kind": "preconditioning"}
        self.register_buffer("matrix", torch.eye(prod(shape)))

    def forward(self, records: Tensor) -> Tensor:
        """[batch, *shape] -> [batch, d]."""
        return torch.matmul(unit_length(records), self.matrix)


def unit_length(records: Tensor) -> Tensor:
    """Flattened records of unit length, [batch, *shape] -> [batch, d]; zeros stay zeros."""
    flat = records.flatten(1)
    unit: Tensor = flat / torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=1e-6)
    return unit


Front = Whitening | Projection | Standardisation | Centring | Preconditioning | TargetScaling | HistogramCells
_KINDS: dict[str, type[Front]] = {
    "whitening": Whitening,
    "projection": Projection,
    "standardisation": Standardisation,
    "centring": Centring,
    "preconditioning": Preconditioning,
    "target_scale": TargetScaling,
    "cell_histograms": HistogramCells,
}


def front(settings: Mapping[str, JsonValue], shape: Shape) -> Front:
    """The map with these settings for records of this shape, before learning.

    Raises ModelRefusedError for an unknown kind.
    """
    options: dict[str, Any] = {key: value for key, value in settings.items() if key != "kind"}
    kind = _KINDS.get(str(settings.get("kind")))
    if kind is None:
        raise ModelRefusedError(
            f"there is no map {settings.get('kind')!r}; choose one of {', '.join(_KINDS)}."
        )
    return kind(shape, **options)


def shape_after(module: nn.Module, shape: Shape) -> Shape:
    """The shape of a record after a map."""
    with torch.no_grad():
        return tuple(module(torch.zeros(1, *shape)).shape[1:])


def in_front(module: Front, model: Model) -> Model:
    """Put a map in front of a model, which then takes unmapped records; or the scale of its target around it."""
    if isinstance(module, TargetScaling) and module.is_around_the_model:
        return behind_scaling(module, model)
    return replace(model, module=nn.Sequential(OrderedDict(features=module, model=model.module)))


def front_of(model: Model) -> Front | None:
    """The map in front of a model, or None."""
    features = dict(model.module.named_children()).get("features")
    return features if isinstance(features, Front) else None


def buffers(model: Model) -> dict[str, Tensor]:
    """The buffers of the map in front of a model that are learned, and so kept; none without a map."""
    features = front_of(model)
    return {} if features is None else dict(features.state_dict())


def install_buffers(model: Model, learned: Mapping[str, Tensor]) -> Model:
    """A copy of the model with learned buffers in the map in front of it."""
    module = copy.deepcopy(model.module)
    module.get_submodule("features").load_state_dict(dict(learned))
    return replace(model, module=module)


_PIXELS = 2
_SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
"""Shifts down and to the right, in units of two pixels."""

_MAX_CHANNELS = 4
"""More channels are taken for features, and flipped features are not the features of a flipped image."""


@dataclass(frozen=True)
class ShiftedView:
    """An image shifted by whole pixels, with edges padded by reflection, and optionally mirrored left to right."""

    down: int
    right: int
    is_mirrored: bool

    def of(self, images: Tensor) -> Tensor:
        """This view of images [batch, channels, height, width]."""
        height, width = images.shape[2:]
        if self.down or self.right:
            padded = functional.pad(images, (_PIXELS,) * 4, mode="reflect")
            # A window that begins further up shows the image further down.
            top, left = _PIXELS - self.down, _PIXELS - self.right
            images = padded[:, :, top : top + height, left : left + width]
        return images.flip(3) if self.is_mirrored else images


VIEWS = tuple(
    ShiftedView(_PIXELS * down, _PIXELS * right, is_mirrored)
    for (down, right), is_mirrored in product(_SHIFTS, (False, True))
)
"""The image itself, its mirror image, then both with each shift."""


class NetworkOfViews(nn.Sequential):
    """Applies the layers of a network to several views of each record: [batch, ...] -> [batch, views, o]."""

    views: tuple[ShiftedView, ...] = ()

    def forward(self, inputs: Tensor) -> Tensor:
        # One view at a time: convolutions have no closed form if several rows of a batch belong to one record.
        each = [super(NetworkOfViews, self).forward(view.of(inputs)) for view in self.views]  # type: ignore[no-untyped-call]
        return torch.stack(each, dim=1)


def with_views(model: Model, count: int, shape: tuple[int, ...]) -> Model:
    """The model whose loss is the mean over the first `count` views; its scores are those of the first view.

    shape: of an input. Raises ModelRefusedError unless inputs are images with 1 to 4 channels and 3 x 3 pixels or more,
    there are that many views, and the model is a plain sequence of layers.
    """
    if not 1 <= count <= len(VIEWS):
        raise ModelRefusedError(
            "{network.augmentations} is {count}, but there are {most} views; ask for that many or less.",
            code="too_many_views",
            count=count,
            most=len(VIEWS),
        )
    is_image = len(shape) == 3 and shape[0] <= _MAX_CHANNELS
    if not is_image or min(shape[1:]) <= _PIXELS or type(model.module) is not nn.Sequential:
        raise ModelRefusedError(
            "{network.augmentations} is {count}, but views are of images of 1 to {channels} channels, not of"
            " inputs of shape {shape}; set {network.augmentations} to 1.",
            code="views_of_images",
            count=count,
            channels=_MAX_CHANNELS,
            shape=shape,
        )
    seen = NetworkOfViews()
    for name, layer in model.module.named_children():
        seen.add_module(name, layer)
    seen.views = VIEWS[:count]

    def of_views(outputs: Tensor, labels: Tensor) -> Tensor:
        views = outputs.shape[1]  # one in evaluation
        same = labels[:, None].expand(-1, views, *labels.shape[1:])
        each = model.losses(outputs.flatten(0, 1), same.flatten(0, 1))
        return each.view(-1, views).mean(dim=1)  # [batch]

    note = f"Each record is seen in {count} fixed views; its gradient is their mean, clipped once."
    return replace(
        model,
        module=seen,
        losses=of_views,
        scores=lambda outputs: model.scores(outputs[:, 0]),
        notes=(*model.notes, note),
    )


def for_evaluation(model: Model) -> Model:
    """The model for a single view of each record: the record itself."""
    if not any(isinstance(layer, NetworkOfViews) for layer in model.module.modules()):
        return model
    module = copy.deepcopy(model.module)
    for layer in module.modules():
        if isinstance(layer, NetworkOfViews):
            layer.views = VIEWS[:1]
    return replace(model, module=module)
