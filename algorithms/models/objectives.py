"""The per-record loss for each kind of target, and the form of labels; never computed from data."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from algorithms.models.linear import SQUARED, cross_entropy, squared_error
from algorithms.models.model import LossBounds, Model, ModelSpec

IGNORED = -100
"""The label of a position that is ignored."""


@dataclass(frozen=True)
class Objective:
    """losses: as in `Model`. bounds: from the number of outputs. of_tokens: whether each token has a label."""

    losses: Callable[[Tensor, Tensor], Tensor]
    bounds: Callable[[int], LossBounds | None]
    label_dtype: torch.dtype = torch.int64
    of_tokens: bool = False


def binary_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean binary cross-entropy over a record's labels; outputs, labels [batch, labels] -> [batch]."""
    return functional.binary_cross_entropy_with_logits(
        outputs, labels.to(outputs.dtype), reduction="none"
    ).mean(-1)


def token_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean over labels except ignored ones; outputs [batch, length, classes], labels [batch, length] -> [batch]."""
    each = functional.cross_entropy(outputs.movedim(-1, 1), labels, reduction="none", ignore_index=IGNORED)
    return each.sum(-1) / labels.ne(IGNORED).sum(-1).clamp(min=1)


def next_token(outputs: Tensor, labels: Tensor) -> Tensor:
    """`token_cross_entropy` for labels that are the tokens themselves: each position predicts the next token."""
    return token_cross_entropy(outputs[:, :-1], labels[:, 1:])


def _of_labels(count: int) -> LossBounds:
    """The bounds for a mean of `count` logistic losses."""
    return LossBounds(slope=1.0 / math.sqrt(count), curvature=0.25 / count, least=0.0)


OBJECTIVES: Mapping[str, Objective] = {
    "number": Objective(squared_error, lambda _: SQUARED, torch.float32),
    "labels": Objective(binary_cross_entropy, _of_labels, torch.float32),
    "next token": Objective(next_token, lambda _: None, of_tokens=True),
    "tags": Objective(token_cross_entropy, lambda _: None, of_tokens=True),
}


def predicting(model: Model, given: ModelSpec) -> Model:
    """Turn a model for classes into one for the data's target; a loss of the model's own is kept."""
    if given.predicts == "class":
        return model
    found = OBJECTIVES[given.predicts]
    shape = given.input_shape if found.of_tokens else (given.classes,) if given.predicts == "labels" else ()
    model = replace(model, label_shape=shape, label_dtype=found.label_dtype)
    if model.losses is not cross_entropy:
        return model
    return replace(model, losses=found.losses, bounds=found.bounds(given.classes))
