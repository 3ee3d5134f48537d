"""Held-out records: a model's passes over them, its predictions, and the score of each record."""

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from algorithms import models
from algorithms.gradients.arithmetic import pad_to_multiple
from algorithms.gradients.patches import without_shortcuts
from algorithms.models import Model
from data.description import DatasetInfo
from data.prepared import HeldOut
from data.targets import IGNORED, LabelType, Number, Quantile, Tags

_BATCH = 1024
MAX_OUTPUTS = 2**24
"""Upper bound on the number of outputs in a pass: a vocabulary at each token gives many."""


def passes(
    model: Model, parameters: Mapping[str, Tensor], data: HeldOut, *, filled: int | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Model]]:
    """The model's outputs and scores for the records, their labels, and the model as it evaluates; pass by pass.

    filled: take so many records in each pass, the last of which repeats its last record.
    """
    model, info = models.for_evaluation(model), data.info
    size = filled or records_a_pass(outputs_a_record(info))
    with torch.no_grad(), without_shortcuts():  # as in training
        for start in range(0, len(data.test_labels), size):
            inputs = torch.from_numpy(np.array(data.test_features[start : start + size]))
            labels = torch.from_numpy(np.array(data.test_labels[start : start + size]))
            outputs = model.outputs(parameters, pad_to_multiple(inputs, filled or 1))[: len(labels)]
            yield outputs, model.scores(outputs), labels, model


def outputs_a_record(info: DatasetInfo) -> int:
    """The number of outputs of a model for a record, at all its positions."""
    label_type = info.label_type
    positions = prod(info.label_shape) if label_type.has_tokens else 1
    return label_type.outputs(info.tokens) * positions


def records_a_pass(outputs: int) -> int:
    """As many records of so many outputs each as have no more outputs together than is allowed."""
    return max(1, min(_BATCH, MAX_OUTPUTS // max(1, outputs)))


def predictions(label_type: LabelType, scores: Tensor) -> Tensor:
    """Scores as `Evaluation.scores` has them: probabilities, or the number; [n, 0] for tokens."""
    if label_type.has_tokens:
        return torch.zeros(len(scores), 0, dtype=torch.float64)
    if label_type.kind == "class":
        return scores.double().softmax(dim=-1)
    return scores.double().sigmoid() if label_type.kind == "labels" else scores.double()


def record_scores(label_type: LabelType, scores: Tensor, labels: Tensor) -> Tensor:
    """Score the model's output for each record from 0 to 1, from that record alone: shape [batch].

    A class scores 1 if it is right. A number scores 1 minus the squared error in [-1, 1], at least 0; a
    quantile 1 minus the pinball loss over its largest value. Labels score the
    F1 within the record, and tags the F1 within the record without the outside tag; if there are none and none was
    predicted, the score is 1. A text scores the share of next tokens that were ranked first.

    Args:
        label_type: the target, which says what a label can be.
        scores: [batch, ..., outputs], as `Model.scores` gives them.
        labels: [batch, ...].

    Example:
        >>> from data.targets import Labels
        >>> record_scores(Labels(labels=("a", "b")), torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([0.6667])
    """
    if isinstance(label_type, Quantile):
        above = labels - scores[:, 0].clamp(-1.0, 1.0)
        # An error is at most 2, so that the loss is at most 2 max(q, 1 - q).
        pinball = torch.maximum(label_type.quantile * above, (label_type.quantile - 1.0) * above)
        return 1.0 - pinball / (2.0 * max(label_type.quantile, 1.0 - label_type.quantile))
    if isinstance(label_type, Number):
        return 1.0 - (scores[:, 0].clamp(-1.0, 1.0) - labels).square().clamp(max=1.0)
    if label_type.kind == "class":
        return (scores.argmax(dim=-1) == labels).float()
    if label_type.kind == "labels":
        positive, real = scores > 0, labels > 0
        right = positive & real
    else:
        predicted = scores.argmax(dim=-1)
        if label_type.kind == "next token":
            predicted, labels = predicted[:, :-1], labels[:, 1:]
        counts, right = labels != IGNORED, predicted == labels
        if not isinstance(label_type, Tags):
            return (right & counts).sum(-1) / counts.sum(-1).clamp(min=1)
        outside = -1 if label_type.outside is None else label_type.tags.index(label_type.outside)
        positive, real = counts & (predicted != outside), counts & (labels != outside)
        right = right & positive & real
    named = positive.sum(-1) + real.sum(-1)
    return torch.where(named > 0, 2.0 * right.sum(-1) / named.clamp(min=1), 1.0)
