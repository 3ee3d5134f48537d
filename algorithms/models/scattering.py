"""Models on scattering coefficients (Tramèr and Boneh 2021, "Differentially Private Learning Needs Better Features").

Their normalisations are functions of one record alone, so they cost no privacy. Groups of channels get mean 0 and
variance 1; for linear models each record then gets unit L2 norm, so that clipping hardly changes the gradients.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from algorithms.models.linear import classifier
from algorithms.models.model import Model, ModelRefusedError, ModelSpec, Settings

_GREY, _COLOUR = 81, 243
"""Channels of a scattering transform of depth 2 with 8 angles, for images of one and of three channels."""

_SMALLEST_NORM = 1e-6
"""The smallest norm to divide by, so that a record of zeros does not become NaN."""


class GroupSettings(Settings):
    """groups: number of channel groups to normalise; 0 for none, as when learned features are normalised."""

    groups: int = Field(default=27, ge=0)


class UnitSettings(Settings):
    """bias: the constant feature."""

    bias: float = Field(default=0.3, ge=0)


class ScatteredSettings(GroupSettings, UnitSettings):
    """The settings of both."""


class UnitRecords(nn.Module):
    """Flattens each record, divides it by its L2 norm and appends a constant; [batch, ...] -> [batch, features + 1]."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(start_dim=1)
        norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=_SMALLEST_NORM)
        return torch.cat([flat / norms, torch.full_like(norms, self.constant)], dim=1)


def unit_linear(given: ModelSpec, settings: UnitSettings) -> Model:
    """Softmax regression on records of unit L2 norm with a constant feature; starts at zero."""
    module = nn.Sequential(UnitRecords(settings.bias), _readout(given))
    return classifier("unit_linear", module)


def scatter_linear(given: ModelSpec, settings: ScatteredSettings) -> Model:
    """`unit_linear` on normalised groups of channels; starts at zero.

    given: maps [channels, height, width] whose channels the groups divide. Raises ModelRefusedError otherwise.
    """
    normalised = _normalisation("scatter_linear", given, settings.groups)
    module = nn.Sequential(normalised, UnitRecords(settings.bias), _readout(given))
    return classifier("scatter_linear", module)


def scatter_cnn(given: ModelSpec, settings: GroupSettings) -> Model:
    """The paper's two tanh convolutions on normalised coefficients.

    33,066 parameters on 81 x 7 x 7 (grey images), and 187,210 on 243 x 8 x 8 (colour images). Raises ModelRefusedError
    for other numbers of channels and for maps smaller than 2 x 2.
    """
    normalised = _normalisation("scatter_cnn", given, settings.groups)
    layers = {_GREY: _grey, _COLOUR: _colour}.get(given.input_shape[0])
    if layers is None or min(given.input_shape[1:]) < 2:
        raise ModelRefusedError(
            f"the model 'scatter_cnn' takes scattering coefficients of {_GREY} or {_COLOUR} channels and at least 2 x 2"
            f" places, not inputs of shape {given.input_shape}; set data.transform to scattering."
        )
    module = nn.Sequential(normalised, *layers(given))
    return classifier("scatter_cnn", module)


def _grey(given: ModelSpec) -> list[nn.Module]:
    channels, height, width = given.input_shape
    places = ((height + 1) // 2) * ((width + 1) // 2)
    return [
        nn.Conv2d(channels, 16, kernel_size=3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * places, 32),
        nn.Tanh(),
        nn.Linear(32, given.classes),
    ]


def _colour(given: ModelSpec) -> list[nn.Module]:
    channels, height, width = given.input_shape
    return [
        nn.Conv2d(channels, 64, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64 * (height // 2) * (width // 2), given.classes),
    ]


def _readout(given: ModelSpec) -> nn.Linear:
    layer = nn.Linear(torch.Size(given.input_shape).numel() + 1, given.classes, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def _normalisation(name: str, given: ModelSpec, groups: int) -> nn.Module:
    """Group normalisation without parameters; none for 0 groups."""
    shape = given.input_shape
    if len(shape) == 3 and groups == 0:
        return nn.Identity()
    if len(shape) != 3 or shape[0] % groups or torch.Size(shape).numel() < 2 * groups:
        raise ModelRefusedError(
            f"the model {name!r} takes maps [channels, height, width] whose channels {groups} groups divide, not inputs"
            f" of shape {shape}; set data.transform to scattering, or other groups."
        )
    return nn.GroupNorm(groups, shape[0], affine=False)
