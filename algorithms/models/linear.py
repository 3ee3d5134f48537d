"""Linear models: softmax regression, logistic regression and the linear support vector machine.

They start at zero, so their start depends on nothing.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.models.model import LossBounds, Model, ModelRefused

CROSS_ENTROPY = LossBounds(slope=math.sqrt(2.0), curvature=0.5, least=0.0)
"""Its gradient is p - e_y, its Hessian diag(p) - p p^T (Böhning 1992)."""

LOGISTIC = LossBounds(slope=1.0, curvature=0.25, least=0.0)
HINGE = LossBounds(slope=1.0, curvature=math.inf, least=0.0)


def softmax(input_shape: tuple[int, ...], classes: int) -> Model:
    """Softmax regression: cross-entropy of one linear layer with an output for each class."""
    return Model("softmax", _linear(input_shape, classes), cross_entropy, _as_they_are, bounds=CROSS_ENTROPY)


def logistic(input_shape: tuple[int, ...], classes: int) -> Model:
    """Logistic regression for two classes; loss log(1 + exp(-y f(x))) with y in {-1, 1}."""
    _two_classes("logistic", classes)
    return Model("logistic", _linear(input_shape, 1), _logistic_losses, _two_scores, bounds=LOGISTIC)


def logistic_through_origin(input_shape: tuple[int, ...], classes: int) -> Model:
    """Logistic regression without a bias."""
    _two_classes("logistic_through_origin", classes)
    module = _linear(input_shape, 1, bias=False)
    return Model("logistic_through_origin", module, _logistic_losses, _two_scores, bounds=LOGISTIC)


def svm(input_shape: tuple[int, ...], classes: int) -> Model:
    """Linear support vector machine for two classes; hinge loss max(0, 1 - y f(x)) with y in {-1, 1}."""
    _two_classes("svm", classes)
    return Model("svm", _linear(input_shape, 1), _hinge_losses, _two_scores, bounds=HINGE)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each record, outputs [batch, classes], labels [batch] -> [batch]."""
    return functional.cross_entropy(outputs, labels, reduction="none")


def _linear(input_shape: tuple[int, ...], outputs: int, *, bias: bool = True) -> nn.Module:
    layer = nn.Linear(torch.Size(input_shape).numel(), outputs, bias=bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), layer)


def _two_classes(name: str, classes: int) -> None:
    if classes != 2:
        raise ModelRefused(f"the model {name!r} is for 2 classes, the data have {classes}; use 'softmax'.")


def _signs(labels: Tensor) -> Tensor:
    return 2.0 * labels - 1.0


def _logistic_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.softplus(-_signs(labels) * outputs[..., 0])


def _hinge_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.relu(1.0 - _signs(labels) * outputs[..., 0])


def _as_they_are(outputs: Tensor) -> Tensor:
    return outputs


def _two_scores(outputs: Tensor) -> Tensor:
    return torch.cat([-outputs, outputs], dim=-1) / 2
