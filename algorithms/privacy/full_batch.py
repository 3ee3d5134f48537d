"""Questions about all records of a linear model, answered by closed forms while the records fit the memory."""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from algorithms.gradients import Affine, Box, Clipping, Engine, Line, PerLayer
from algorithms.gradients.linear import LinearRecords, linear_layer
from algorithms.models import Model
from algorithms.privacy.performance import Performance, Records


class FullBatchAnswers:
    """Exact sums over all records of a model that is one linear layer: for the barrier alone, nothing is noised here.

    features [n, *input_shape] and labels [n], on the device where the arithmetic runs.
    """

    def __init__(self, model: Model, features: Tensor, labels: Tensor) -> None:
        self._records = LinearRecords(model, features, labels)
        self._step = -1

    @classmethod
    def of(cls, model: Model, records: Records, performance: Performance) -> "FullBatchAnswers | None":
        """The answers over all records in a memory of their own, where there are closed forms and room for that."""
        if not (cls.serve(model) and performance.holds(2 * math.prod(records.features.shape[1:]))):
            return None
        features, labels = (torch.from_numpy(np.array(part)) for part in (records.features, records.labels))
        features, labels = features.to(performance.device), labels.to(performance.device)
        return cls(model, features, labels)

    @staticmethod
    def serve(model: Model) -> bool:
        """Whether a model has the closed forms, which compute in the precision of the features."""
        return linear_layer(model.module) is not None and model.precision == torch.float32

    @staticmethod
    def clip(clipping: Clipping) -> bool:
        """Whether there is a closed form for a clipping: for one with a single bound for the whole gradient."""
        return not isinstance(clipping, Affine | Box) and not (
            isinstance(clipping, PerLayer) and len(clipping.norms) > 1
        )

    def at_step(self, step: int) -> "FullBatchAnswers":
        """These answers in a training step.

        What one answer leaves for the next is dropped between steps, where a run may be broken off and taken up: it
        would then round differently, and answers must repeat bit for bit.
        """
        if step != self._step:
            self._records.forget()
            self._step = step
        return self

    def clipped_sum(self, parameters: Tensor, clipping: Clipping) -> Tensor:
        """The sum of all clipped gradients, shape [d], float64."""
        return self._records.clipped_sum(parameters, clipping)

    def clipped_losses(self, candidates: Tensor | Line, bound: float) -> Tensor:
        """The sum of all losses, clipped to [0, bound], at each candidate; shape [k], float64."""
        if isinstance(candidates, Line):
            return self._records.losses_on(candidates, bound=bound)
        return self._records.losses_at(candidates, bound=bound)


class WholeRecords:
    """The closed forms over all records, made when they are first asked for."""

    def __init__(self, model: Model, records: Records, performance: Performance) -> None:
        self._of = (model, records, performance)
        self._answers: FullBatchAnswers | None = None

    def at_step(self, step: int) -> FullBatchAnswers | None:
        """The answers in a training step, where the model has them and the records fit the memory."""
        if self._answers is None:
            self._answers = FullBatchAnswers.of(*self._of)
        return None if self._answers is None else self._answers.at_step(step)


def loss_sums(
    model: Model,
    engine: Engine,
    candidates: Tensor | Line,
    batches: Iterable[tuple[Tensor, Tensor]],
    bound: float,
    performance: Performance,
) -> Tensor:
    """The sums over batches of losses, clipped to [0, bound], at each candidate; shape [k], float64.

    Candidates on a line are points like others: what is quicker on a line computes a record by its place.
    """
    points = candidates.candidates if isinstance(candidates, Line) else candidates
    points = points.to(performance.device)
    totals = torch.zeros(len(points), dtype=torch.float64, device=points.device)
    for inputs, labels in batches:
        if FullBatchAnswers.serve(model):
            totals += FullBatchAnswers(model, inputs, labels).clipped_losses(points, bound)
            continue
        for index, point in enumerate(points):
            totals[index] += engine.clipped_losses(point, inputs, labels, bound)
    return totals
