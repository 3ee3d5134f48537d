"""What comes before a model, done once for all records instead of in each step, where the result fits the memory."""

import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from algorithms.models import Model
from algorithms.models.fronts import Front, front_of, shape_after
from algorithms.privacy.performance import Performance, Records

_AT_ONCE = 1024


@dataclass(frozen=True)
class Mapped:
    """Records after a map of each by itself: features [n, *shape], labels [n]."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]


def taken_ahead(model: Model, records: Records, performance: Performance) -> tuple[Model, Records]:
    """The model without what is in front of it, and the records after that; both as they are where it would not fit."""
    front = front_of(model)
    if front is None:
        return model, records
    shape = (len(records.labels), *shape_after(front, records.features.shape[1:]))
    if 4 * np.prod(shape) > performance.memory_mb * 1e6:
        return model, records
    head = replace(model, module=model.module.get_submodule("model"))
    return head, Mapped(_mapped(front, records, shape, performance), records.labels)


def _mapped(
    front: Front, records: Records, shape: tuple[int, ...], performance: Performance
) -> NDArray[np.float32]:
    features, done = np.empty(shape, np.float32), 0
    placed = copy.deepcopy(front).to(performance.device)
    with torch.no_grad():
        for inputs, _labels in performance.batches(records, np.arange(len(features)), _AT_ONCE):
            features[done : done + len(inputs)] = placed(inputs).cpu().numpy()
            done += len(inputs)
    return features
