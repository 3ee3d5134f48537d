"""A model of a number on its own scale: what it predicts is a centre plus a scale times what it computes.

Centre and scale are released before training (`algorithms.target_scale`). Errors are then as large as the bound on a
gradient, whatever the declared range, so that neither the bound nor the noise is too large for a number that fills
little of it.
"""

from collections import OrderedDict
from dataclasses import replace

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from algorithms.models.model import Model
from algorithms.models.number_losses import CountLoss, QuantileLoss
from algorithms.models.objectives import squared_error


class TargetScaling(nn.Module):
    """Leaves records as they are, and holds the centre and the scale of the number to predict, both []."""

    centre: Tensor
    scale: Tensor
    is_around_the_model: bool = True
    """Whether outputs are scaled; a map of records alone is before the model."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.settings: dict[str, JsonValue] = {"kind": "target_scale"}
        self.register_buffer("centre", torch.tensor(0.0))
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, records: Tensor) -> Tensor:
        """[batch, *shape] -> the same."""
        return records


class ScaledTarget(nn.Sequential):
    """A model behind a `TargetScaling`: [batch, ...] -> [batch, 3], its output with the centre and the scale."""

    def forward(self, records: Tensor) -> Tensor:
        scaling = self.get_submodule("features")
        assert isinstance(scaling, TargetScaling)
        outputs: Tensor = self.get_submodule("model")(scaling(records))
        beside = torch.zeros_like(outputs)
        return torch.cat([outputs, beside + scaling.centre, beside + scaling.scale], dim=-1)


class PredictedNumber(ScaledTarget):
    """A trained model on its own scale, whose output is the number itself: [batch, ...] -> [batch, 1]."""

    def __init__(self, model: Model) -> None:
        super().__init__(OrderedDict(model.module.named_children()))
        self.scores = model.scores

    def forward(self, records: Tensor) -> Tensor:
        return self.scores(super().forward(records))


def scaled_squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Half the squared error of each record in units of the scale, outputs [batch, 3], labels [batch] -> [batch]."""
    output, centre, scale = outputs.unbind(-1)
    return (output - (labels - centre) / scale).square() / 2


def predicted_number(outputs: Tensor) -> Tensor:
    """What the model predicts, outputs [..., 3] -> [..., 1]."""
    number: Tensor = outputs[..., 1:2] + outputs[..., 2:3] * outputs[..., :1]
    return number


def can_be_scaled(model: Model) -> bool:
    """Whether the loss is one of this package, which is known on any scale."""
    return model.losses is squared_error or isinstance(model.losses, CountLoss | QuantileLoss)


def behind_scaling(scaling: TargetScaling, model: Model) -> Model:
    """The model of a number, trained and read on its own scale."""
    module = ScaledTarget(OrderedDict(features=scaling, model=model.module))
    if isinstance(model.losses, CountLoss | QuantileLoss):  # which take the centre and the scale themselves
        return replace(model, module=module)
    return replace(model, module=module, losses=scaled_squared_error, scores=predicted_number)
