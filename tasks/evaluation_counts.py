"""The histogram of private held-out records, and its exact cells.

What is counted here is private: it leaves only by `algorithms.core.private_evaluation`, which adds the noise. It is a
module of its own since the evaluate stage, which scores public records, depends on no barrier.
"""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms import models
from algorithms.evaluation import HistogramSpec, count
from algorithms.evaluation.histogram import Floats
from algorithms.gradients import Engine
from algorithms.gradients.arithmetic import KERNEL_BATCH
from algorithms.models import Model
from algorithms.privacy.barrier.compute_config import ComputeConfig
from algorithms.privacy.barrier.fixed_arithmetic import fixed_arithmetic
from data.description import DatasetInfo
from data.prepared import HeldOut
from data.readers.records import RecordBatch
from tasks.prediction_passes import outputs_a_record, passes, predictions, record_scores, records_a_pass


def passes_alone(model: Model, info: DatasetInfo) -> tuple[int, ComputeConfig, Engine]:
    """The size of passes in which a record's score depends on that record alone, and what computes in them so.

    An inspection finds the same values for a record beside any others in passes of this size, as in training; it is 1
    for models that branch on values, which are pinned in the engine's own passes alone.
    """
    compute = ComputeConfig(
        torch.device("cpu"), physical_batch=min(KERNEL_BATCH, records_a_pass(outputs_a_record(info)))
    )
    features = np.empty((0, *info.input_shape), np.float32 if info.tokens is None else np.int32)
    engine = compute.engine(models.for_evaluation(model), RecordBatch(features, np.empty(0, np.int64)))
    reads_values = not engine.is_batched or bool(engine.inspection.passes.pinned_branches)
    return 1 if reads_values else engine.physical_batch, compute, engine


LoadedModel: TypeAlias = tuple[Model, Mapping[str, Tensor]]
"""A model and its parameters by name."""


def count_held_out(
    spec: HistogramSpec,
    trained: LoadedModel,
    data: HeldOut,
    other: LoadedModel | None = None,
    halves: NDArray[np.int64] | None = None,
) -> Floats:
    """The exact cells of the histogram, [cells]; private.

    A record's score may not depend on who else is held out, or one person could move many records to other cells.

    other: the model compared with, where the histogram compares. halves: [n], of each record, where it has halves.
    """
    label_type, cells, start = data.info.label_type, np.zeros(spec.cells), 0
    before = (
        None
        if other is None
        else np.concatenate([_bounded_scores(data, *rest) for rest in _held_out_scores(other, data)])
    )
    for scores, labels in _held_out_scores(trained, data):
        is_bounded, score = spec.kind == "score", _bounded_scores(data, scores, labels)
        values = score[:, None] if is_bounded else predictions(label_type, scores).double().numpy()
        rows = slice(start, start := start + len(labels))
        cells += count(
            spec,
            values,
            labels.numpy(),
            data.group_indices([column for column, _ in spec.groups], rows),
            np.full(len(labels), data.row_weight),
            None if halves is None else halves[rows],
            None if before is None else score - before[rows],
        )
    return cells


def _held_out_scores(trained: LoadedModel, data: HeldOut) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores and labels of the held-out records, pass by pass, each from its record alone."""
    size, compute, engine = passes_alone(trained[0], data.info)
    with fixed_arithmetic(compute, engine):
        for _, scores, labels, _ in passes(*trained, data, filled=size):
            yield scores, labels


def _bounded_scores(data: HeldOut, scores: Tensor, labels: Tensor) -> Floats:
    """A score from 0 to 1 of each record, [n]."""
    score: Floats = record_scores(data.info.label_type, scores, labels).double().numpy()
    return score
