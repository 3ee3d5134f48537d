"""Several views of one record (augmentation multiplicity: De et al. 2022, arXiv:2204.13650).

A record's loss is the mean over its views. Its gradient, their average, is clipped once, so views cost no privacy.
The views are a fixed public list, so that a resumed run uses the same ones.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.models.model import Model, ModelRefusedError

_PIXELS = 2
_SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
"""Shifts down and to the right, in units of two pixels."""

_MOST_CHANNELS = 4
"""More channels are taken for features, and flipped features are not the features of a flipped image."""


@dataclass(frozen=True)
class View:
    """An image shifted by whole pixels, with edges padded by reflection, and optionally mirrored left to right."""

    down: int
    right: int
    is_mirrored: bool

    def of(self, images: Tensor) -> Tensor:
        """This view of images [batch, channels, height, width]."""
        height, width = images.shape[2:]
        if self.down or self.right:
            padded = functional.pad(images, (_PIXELS,) * 4, mode="reflect")
            top, left = _PIXELS - self.down, _PIXELS - self.right
            images = padded[:, :, top : top + height, left : left + width]
        return images.flip(3) if self.is_mirrored else images


VIEWS = tuple(
    View(_PIXELS * down, _PIXELS * right, is_mirrored)
    for (down, right), is_mirrored in product(_SHIFTS, (False, True))
)
"""The image itself, its mirror image, then both with each shift."""


class Seen(nn.Sequential):
    """Applies the layers of a network to several views of each record: [batch, ...] -> [batch, views, o]."""

    views: tuple[View, ...] = ()

    def forward(self, inputs: Tensor) -> Tensor:
        # One view at a time: convolutions have no closed form if several rows of a batch belong to one record.
        each = [super(Seen, self).forward(view.of(inputs)) for view in self.views]  # type: ignore[no-untyped-call]
        return torch.stack(each, dim=1)


def with_views(model: Model, count: int, shape: tuple[int, ...]) -> Model:
    """The model whose loss is the mean over the first `count` views; its scores are those of the first view.

    shape: of an input. Raises ModelRefusedError unless inputs are images with 1 to 4 channels and 3 x 3 pixels or more,
    there are that many views, and the model is a plain sequence of layers.
    """
    if not 1 <= count <= len(VIEWS):
        raise ModelRefusedError(
            f"model.augmentations is {count}, but there are {len(VIEWS)} views; ask for that many or less."
        )
    is_image = len(shape) == 3 and shape[0] <= _MOST_CHANNELS
    if not is_image or min(shape[1:]) <= _PIXELS or type(model.module) is not nn.Sequential:
        raise ModelRefusedError(
            f"model.augmentations is {count}, but views are of images of 1 to {_MOST_CHANNELS} channels, not of inputs"
            f" of shape {shape}; set model.augmentations to 1."
        )
    seen = Seen()
    for name, layer in model.module.named_children():
        seen.add_module(name, layer)
    seen.views = VIEWS[:count]
    note = f"Each record is seen in {count} fixed views; its gradient is their mean, clipped once."
    return replace(
        model,
        module=seen,
        losses=_mean_of_views(model.losses),
        scores=lambda outputs: model.scores(outputs[:, 0]),
        notes=(*model.notes, note),
    )


def for_evaluation(model: Model) -> Model:
    """The model for a single view of each record: the record itself."""
    if not any(isinstance(layer, Seen) for layer in model.module.modules()):
        return model
    module = copy.deepcopy(model.module)
    for layer in module.modules():
        if isinstance(layer, Seen):
            layer.views = VIEWS[:1]
    return replace(model, module=module)


def _mean_of_views(losses: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def of_records(outputs: Tensor, labels: Tensor) -> Tensor:
        count = outputs.shape[1]
        each = losses(
            outputs.flatten(0, 1), labels[:, None].expand(-1, count, *labels.shape[1:]).flatten(0, 1)
        )
        return each.view(-1, count).mean(dim=1)

    return of_records
