"""The per-record losses, their public bounds, and the form of labels for each kind of target."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms.models.bounds import (
    CROSS_ENTROPY,
    HUBER_HALF_WIDTH,
    SQUARED_ERROR,
    LossBounds,
    bounds_of_labels,
)
from algorithms.models.model import Model, ModelSpec
from algorithms.models.number_losses import CountLoss, QuantileLoss

MARGINS = ("svm", "huber_svm")
"""Models whose scores are margins, not log-odds."""
IGNORED = -100
"""The label of a position that is ignored."""


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each record, outputs [batch, classes], labels [batch] -> [batch]."""
    return functional.cross_entropy(outputs, labels, reduction="none")


def huber_hinge_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The hinge loss without its kink (Chaudhuri et al. 2011, section 3.4.2); shapes as in `logistic_loss`.

    With z = y f(x) and h = 0.5 it is 1 - z below 1 - h, 0 above 1 + h, and (1 + h - z)^2 / (4 h) in between.
    """
    short = 1.0 + HUBER_HALF_WIDTH - (2.0 * labels - 1.0) * outputs[..., 0]
    bent = short.clamp(0.0, 2.0 * HUBER_HALF_WIDTH).square() / (4.0 * HUBER_HALF_WIDTH)
    return bent + functional.relu(short - 2.0 * HUBER_HALF_WIDTH)


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Half the squared error of each record, outputs [batch, 1], labels [batch] in [-1, 1] -> [batch]."""
    return (outputs[..., 0] - labels).square() / 2


def binary_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean binary cross-entropy over a record's labels; outputs, labels [batch, labels] -> [batch]."""
    each = functional.binary_cross_entropy_with_logits(outputs, labels.to(outputs.dtype), reduction="none")
    return each.mean(-1)


def token_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean over labels except ignored ones; outputs [batch, length, classes], labels [batch, length] -> [batch]."""
    each = functional.cross_entropy(outputs.movedim(-1, 1), labels, reduction="none", ignore_index=IGNORED)
    return each.sum(-1) / labels.ne(IGNORED).sum(-1).clamp(min=1)


def next_token(outputs: Tensor, labels: Tensor) -> Tensor:
    """`token_cross_entropy` for labels that are the tokens themselves: each position predicts the next token."""
    return token_cross_entropy(outputs[:, :-1], labels[:, 1:])


def as_they_are(outputs: Tensor) -> Tensor:
    """Outputs as scores, one for each class."""
    return outputs


def classifier(name: str, module: nn.Module, notes: tuple[str, ...] = ()) -> Model:
    """The model of a module with a score for each class, trained by cross-entropy."""
    return Model(name, module, cross_entropy, as_they_are, bounds=CROSS_ENTROPY, notes=notes)


@dataclass(frozen=True)
class LossObjective:
    """losses, scores: as in `Model`, None for the model's own scores. bounds: from the number of outputs. of_tokens:
    whether each token has a label."""

    losses: Callable[[Tensor, Tensor], Tensor]
    bounds: Callable[[int], LossBounds | None]
    label_dtype: torch.dtype = torch.int64
    of_tokens: bool = False
    scores: Callable[[Tensor], Tensor] | None = None


def _of_quantile(level: float) -> LossObjective:
    loss = QuantileLoss(level)
    bounds = LossBounds(slope=loss.slope, curvature=loss.curvature, least=0.0)
    return LossObjective(loss, lambda _: bounds, torch.float32, scores=loss.scores)


_COUNT = CountLoss()
POISSON = LossBounds(slope=math.inf, curvature=_COUNT.curvature, least=0.0)


OBJECTIVES: Mapping[str, LossObjective] = {
    "number": LossObjective(squared_error, lambda _: SQUARED_ERROR, torch.float32),
    "count": LossObjective(_COUNT, lambda _: POISSON, torch.float32, scores=_COUNT.scores),
    "quantile": _of_quantile(0.5),
    "labels": LossObjective(binary_cross_entropy, bounds_of_labels, torch.float32),
    "next token": LossObjective(next_token, lambda _: None, of_tokens=True),
    "tags": LossObjective(token_cross_entropy, lambda _: None, of_tokens=True),
}


def with_class_weights(model: Model, weights: Sequence[float]) -> Model:
    """Multiply the loss of each record by its class's weight over the largest weight.

    Gradients are clipped after that, so their bound stays; so do public bounds on the loss, as no factor is above 1.

    Example:
        >>> weighted = with_class_weights(classifier("small", nn.Linear(2, 2)), (1.0, 4.0))
        >>> (weighted.losses(torch.zeros(2, 2), torch.tensor([0, 1])) / math.log(2)).tolist()
        [0.25, 1.0]
    """
    shares = torch.tensor([weight / max(weights) for weight in weights])

    @functools.wraps(model.losses)  # with its module, as a loss of the user's own has no closed form
    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        return shares.to(outputs)[labels] * model.losses(outputs, labels)

    return replace(model, losses=losses)


def predicting(model: Model, spec: ModelSpec) -> Model:
    """Turn a model for classes into one for the data's target; a loss of the model's own is kept."""
    if spec.predicts == "class":
        return model
    objective = _of_quantile(spec.level) if spec.predicts == "quantile" else OBJECTIVES[spec.predicts]
    shape = spec.input_shape if objective.of_tokens else (spec.classes,) if spec.predicts == "labels" else ()
    model = replace(model, label_shape=shape, label_dtype=objective.label_dtype)
    if model.losses is not cross_entropy:
        return model
    scores = objective.scores or model.scores
    return replace(model, losses=objective.losses, scores=scores, bounds=objective.bounds(spec.classes))
