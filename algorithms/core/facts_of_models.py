"""What planning may know of a model that was built, see `planning_facts`."""

import torch
from torch import nn

from algorithms.core.planning_facts import Intercepts, NumberKind
from algorithms.gradients import BehindSparseMap, linear_layer
from algorithms.models import Model
from algorithms.models.bounds import CROSS_ENTROPY, LOGISTIC
from algorithms.models.cells import CellVectors
from algorithms.models.feature_transforms import Centring
from algorithms.models.networks import UnitRecords
from algorithms.models.number_losses import CountLoss
from algorithms.models.objectives import binary_cross_entropy
from algorithms.models.scaled_target import ScaledTarget, scaled_squared_error


def zero_start_loss(model: Model, classes: int) -> float | None:
    """The largest loss of a record at the start of a linear classifier that starts at zero, whatever its features are.

    All outputs are 0 there: ln 2 for logistic regression, ln K for K classes, 1 for a hinge. None for any other model.
    """
    layer = linear_layer(model.module)
    if layer is None or classes < 2 or any(bool(part.any()) for part in model.module.parameters()):
        return None
    labels = torch.arange(classes, dtype=model.label_dtype)
    return float(model.losses(torch.zeros(classes, layer.out_features, dtype=torch.float64), labels).max())


def number_of(model: Model) -> NumberKind | None:
    """What a model predicts that starts at zero on a released scale, where it says the centre to every record.

    None for other models, losses and targets.
    """
    starts_elsewhere = any(bool(part.any()) for part in model.module.parameters())
    if starts_elsewhere or not isinstance(model.module, ScaledTarget):
        return None
    if isinstance(model.losses, CountLoss):
        return "count"
    return "number" if model.losses is scaled_squared_error else None


def intercepts_of(model: Model, classes: int) -> Intercepts | None:
    """The intercepts of a linear model by cross-entropy, the logistic loss or its mean over labels; None for any other.

    They are its biases, or without these the parameters of the last cell, if all rows of an encoded table share it, or
    of the constant that records of unit length have as their last feature.
    """
    layers, of_labels = _layers_of(model.module), model.losses is binary_cross_entropy
    if layers is None or not (of_labels or (classes >= 2 and model.bounds in (CROSS_ENTROPY, LOGISTIC))):
        return None
    inputs, layer = layers
    outputs, width = layer.out_features, layer.in_features
    expected = model.label_shape[0] if of_labels else 1 if model.bounds == LOGISTIC else classes
    if outputs != expected:
        return None
    weights = () if of_labels else _class_weights(model, classes, outputs)
    if layer.bias is not None:
        return Intercepts(outputs * width, 1, outputs, 1.0, weights, of_labels)
    constant = _constant_of(inputs)
    if constant == 0.0:
        return None
    return Intercepts(width - 1, width, outputs, constant, weights, of_labels)


def _constant_of(inputs: CellVectors | UnitRecords | None) -> float:
    """The last number of all vectors that a linear layer takes, 0 if it is not always the same."""
    if isinstance(inputs, UnitRecords):
        return inputs.constant
    if inputs is None or float(inputs.last[-1]) > 0.0:
        return 0.0
    return float(inputs.numbers[-1])


def _class_weights(model: Model, classes: int, outputs: int) -> tuple[float, ...]:
    """The losses of the classes where all outputs are 0, relative to the largest; empty if they are equal."""
    labels = torch.arange(classes, dtype=model.label_dtype)
    losses = model.losses(torch.zeros(classes, outputs, dtype=torch.float64), labels)
    return () if bool((losses == losses[0]).all()) else tuple((losses / losses.max()).tolist())


def _layers_of(module: nn.Module) -> tuple[CellVectors | UnitRecords | None, nn.Linear] | None:
    """What makes the vectors of a linear model, if they are no records, and its only layer with parameters.

    That is the map of a table's cells, or of records to unit length, before which another map may stand.
    """
    around = (nn.Sequential, nn.Flatten, BehindSparseMap)
    inner = [part for part in module.modules() if type(part) not in around]
    match inner:
        case [nn.Linear() as layer]:
            inputs = None
        case [CellVectors() as inputs, nn.Linear() as layer]:
            pass
        case [UnitRecords() as inputs, nn.Linear() as layer] | [
            Centring(),
            UnitRecords() as inputs,
            nn.Linear() as layer,
        ]:
            pass
        case _:
            return None
    is_plain = type(layer) is nn.Linear and all(part.requires_grad for part in layer.parameters())
    return (inputs, layer) if is_plain else None
