"""Linear models: softmax regression, logistic regression and the linear support vector machine.

They start at zero, so their start depends on neither data nor randomness.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.models.model import LossBounds, Model, ModelRefusedError, ModelSpec

CROSS_ENTROPY = LossBounds(slope=math.sqrt(2.0), curvature=0.5, least=0.0)
"""Its gradient is p - e_y, its Hessian diag(p) - p p^T (Böhning 1992)."""

LOGISTIC = LossBounds(slope=1.0, curvature=0.25, least=0.0)
HINGE = LossBounds(slope=1.0, curvature=math.inf, least=0.0)

SQUARED = LossBounds(slope=math.inf, curvature=1.0, least=0.0)
"""Half the squared error, whose slope grows with the error without a bound."""

ROUNDED = 0.5
"""Half the width over which the Huber hinge loss rounds off the kink; as in Chaudhuri et al. 2011, section 6."""
HUBER_HINGE = LossBounds(slope=1.0, curvature=1.0 / (2.0 * ROUNDED), least=0.0)


def softmax(given: ModelSpec) -> Model:
    """Softmax regression: cross-entropy of one linear layer with an output for each class."""
    if given.predicts != "class":
        raise ModelRefusedError(
            f"the model 'softmax' is for classes, the data have the target of {given.predicts}; use 'linear'."
        )
    return classifier("softmax", _linear(given, given.classes))


def logistic(given: ModelSpec) -> Model:
    """Logistic regression for two classes; loss log(1 + exp(-y f(x))) with y in {-1, 1}."""
    return _for_two_classes("logistic", given, _logistic_losses, LOGISTIC)


def logistic_through_origin(given: ModelSpec) -> Model:
    """Logistic regression without a bias."""
    return _for_two_classes("logistic_through_origin", given, _logistic_losses, LOGISTIC, bias=False)


def svm(given: ModelSpec) -> Model:
    """Linear support vector machine for two classes; hinge loss max(0, 1 - y f(x)) with y in {-1, 1}."""
    return _for_two_classes("svm", given, _hinge_losses, HINGE)


def huber_svm(given: ModelSpec) -> Model:
    """Linear support vector machine with the Huber hinge loss, which is smooth (Chaudhuri et al. 2011, section 3.4.2).

    With z = y f(x) and h = 0.5 it is 1 - z below 1 - h, 0 above 1 + h, and (1 + h - z)^2 / (4 h) in between.
    """
    return _for_two_classes("huber_svm", given, _huber_hinge_losses, HUBER_HINGE)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each record, outputs [batch, classes], labels [batch] -> [batch]."""
    return functional.cross_entropy(outputs, labels, reduction="none")


def as_they_are(outputs: Tensor) -> Tensor:
    """Outputs as scores, one for each class."""
    return outputs


def classifier(name: str, module: nn.Module, notes: tuple[str, ...] = ()) -> Model:
    """The model of a module with a score for each class, trained by cross-entropy."""
    return Model(name, module, cross_entropy, as_they_are, bounds=CROSS_ENTROPY, notes=notes)


def linear(given: ModelSpec) -> Model:
    """A linear layer with the loss for the target: half the squared error of a number, or that of several labels."""
    if given.predicts == "class":
        raise ModelRefusedError(
            f"the model 'linear' predicts a number or labels, and the data have {given.classes} classes; use 'softmax'."
        )
    return Model("linear", _linear(given, given.classes), cross_entropy, as_they_are)


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Half the squared error of each record, outputs [batch, 1], labels [batch] in [-1, 1] -> [batch]."""
    return (outputs[..., 0] - labels).square() / 2


def _linear(given: ModelSpec, outputs: int, *, bias: bool = True) -> nn.Module:
    layer = nn.Linear(torch.Size(given.input_shape).numel(), outputs, bias=bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), layer)


def _for_two_classes(
    name: str,
    given: ModelSpec,
    losses: Callable[[Tensor, Tensor], Tensor],
    bounds: LossBounds,
    *,
    bias: bool = True,
) -> Model:
    is_class = given.predicts == "class"
    if given.classes != 2 or not is_class:
        others = (
            f"{given.classes} classes; use 'softmax'"
            if is_class
            else f"the target of {given.predicts}; use 'linear'"
        )
        raise ModelRefusedError(f"the model {name!r} is for 2 classes, the data have {others}.")
    return Model(name, _linear(given, 1, bias=bias), losses, _two_scores, bounds=bounds)


def _signs(labels: Tensor) -> Tensor:
    return 2.0 * labels - 1.0


def _logistic_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.softplus(-_signs(labels) * outputs[..., 0])


def _hinge_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.relu(1.0 - _signs(labels) * outputs[..., 0])


def _huber_hinge_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    short = 1.0 + ROUNDED - _signs(labels) * outputs[..., 0]
    bent = short.clamp(0.0, 2.0 * ROUNDED).square() / (4.0 * ROUNDED)
    return bent + functional.relu(short - 2.0 * ROUNDED)


def _two_scores(outputs: Tensor) -> Tensor:
    return torch.cat([-outputs, outputs], dim=-1) / 2
