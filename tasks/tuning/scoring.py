"""The score of a trial's model on each private record, as a statistic that a barrier sums up."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from algorithms.gradients.arithmetic import pad_to_multiple
from algorithms.gradients.patches import without_shortcuts
from algorithms.models import Model
from algorithms.privacy.barrier.statistics import Statistic
from data import DatasetInfo
from data.readers.records import RecordBatch
from tasks.prediction_passes import record_scores


def record_of_zeros(info: DatasetInfo) -> RecordBatch:
    """A record of zeros in the form of the prepared records."""
    return RecordBatch(
        np.zeros((1, *info.input_shape), np.float32 if info.tokens is None else np.int32),
        np.zeros((1, *info.label_shape), info.label_type.label_dtype),
    )


def score_statistic(
    info: DatasetInfo, model: Model, parameters: Mapping[str, torch.Tensor], *, size: int
) -> Statistic:
    """The score of the model's output for a record, [1], as a statistic that a barrier sums up.

    size: of the passes through the model, in which a record's score depends on that record alone; see `passes_alone`.
    """

    @without_shortcuts()
    def of_batch(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        passes = torch.split(pad_to_multiple(features, size), size)
        outputs = torch.cat([model.outputs(parameters, inputs) for inputs in passes])[: len(features)]
        return record_scores(info.label_type, model.scores(outputs), labels)[:, None]

    return lambda features, label: _OfBatch.apply(of_batch, features, label)  # type: ignore[no-untyped-call]


class _OfBatch(torch.autograd.Function):
    """Wraps a per-record function of a batch as a function of one record, which vmap calls on the whole batch.

    This is needed since models of libraries branch on values of their inputs, which vmap forbids.
    """

    @staticmethod
    def forward(run: Statistic, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return run(features[None], label[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing, since there is no backward pass."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, run: Statistic, features: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        return run(features, labels), 0
