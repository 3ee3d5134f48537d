"""The loss of a record by what is predicted of it, and the form of its labels: never computed from data."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from algorithms.models.linear import SQUARED, cross_entropy, squared_error
from algorithms.models.model import LossBounds, Model, ModelSpec

IGNORED = -100
"""The label of a place that does not count."""


@dataclass(frozen=True)
class Objective:
    """losses: as of a `Model`. bounds: by the number of outputs. label_dtype, of_tokens: a label for each token."""

    losses: Callable[[Tensor, Tensor], Tensor]
    bounds: Callable[[int], LossBounds | None]
    label_dtype: torch.dtype = torch.int64
    of_tokens: bool = False


def binary_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean over labels of the cross-entropy of each by itself; outputs, labels [batch, labels] -> [batch]."""
    return functional.binary_cross_entropy_with_logits(
        outputs, labels.to(outputs.dtype), reduction="none"
    ).mean(-1)


def token_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels that count; outputs [batch, length, classes], labels [batch, length] -> [batch]."""
    each = functional.cross_entropy(outputs.movedim(-1, 1), labels, reduction="none", ignore_index=IGNORED)
    return each.sum(-1) / labels.ne(IGNORED).sum(-1).clamp(min=1)


def next_token(outputs: Tensor, labels: Tensor) -> Tensor:
    """The same, where the label of a place is its own token: what is said there is about the token that follows."""
    return token_cross_entropy(outputs[:, :-1], labels[:, 1:])


def _of_labels(count: int) -> LossBounds:
    """Of a mean of `count` logistic losses."""
    return LossBounds(slope=1.0 / math.sqrt(count), curvature=0.25 / count, least=0.0)


OBJECTIVES: Mapping[str, Objective] = {
    "number": Objective(squared_error, lambda _: SQUARED, torch.float32),
    "labels": Objective(binary_cross_entropy, _of_labels, torch.float32),
    "next token": Objective(next_token, lambda _: None, of_tokens=True),
    "tags": Objective(token_cross_entropy, lambda _: None, of_tokens=True),
}


def predicting(model: Model, given: ModelSpec) -> Model:
    """A model that was made for classes, for what the data have; a loss of its own stays."""
    if given.predicts == "class":
        return model
    found = OBJECTIVES[given.predicts]
    shape = given.input_shape if found.of_tokens else (given.classes,) if given.predicts == "labels" else ()
    model = replace(model, label_shape=shape, label_dtype=found.label_dtype)
    if model.losses is not cross_entropy:
        return model
    return replace(model, losses=found.losses, bounds=found.bounds(given.classes))
