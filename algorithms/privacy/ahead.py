"""What comes before a model's parameters, done once for all records instead of in each step, where it fits memory."""

import copy
import math
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from algorithms.gradients import filled
from algorithms.models import Model
from algorithms.models.fronts import front_of, shape_after
from algorithms.models.scattered import UnitRecords
from algorithms.privacy.performance import Performance, Records

_AT_ONCE = 1024
_BY_RECORD = (UnitRecords, nn.GroupNorm)
"""Layers that take each record by itself, and are maps for good where they have no parameters."""


@dataclass(frozen=True)
class Mapped:
    """Records after a map of each by itself: features [n, *shape], labels [n]."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]


def taken_ahead(model: Model, records: Records, performance: Performance) -> tuple[Model, Records]:
    """The model without the map in front of it and its own first layers that train nothing; the records after those.

    Both as they are where there is no map in front, and where the mapped records would not fit, as far as is public.
    """
    front = front_of(model)
    if front is None:
        return model, records
    first, rest = _divided(model.module.get_submodule("model"))
    maps = nn.Sequential(front, *first)
    shape = shape_after(maps, records.features.shape[1:])
    if not performance.holds(math.prod(shape)):
        return model, records
    features = _mapped(maps, records, (len(records.labels), *shape), performance)
    return replace(model, module=rest), Mapped(features, records.labels)


def _divided(module: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """The first layers of a sequence that are maps of each record, and what comes after them."""
    if type(module) is not nn.Sequential:
        return [], module
    first = list(takewhile(_is_map, module))
    return first, module[len(first) :]


def _is_map(layer: nn.Module) -> bool:
    return type(layer) in _BY_RECORD and not list(layer.parameters())


def _mapped(
    maps: nn.Module, records: Records, shape: tuple[int, ...], performance: Performance
) -> NDArray[np.float32]:
    features, done = np.empty(shape, np.float32), 0
    placed = copy.deepcopy(maps).to(performance.device)
    with torch.no_grad():
        for inputs, _labels in performance.batches(records, np.arange(len(features)), _AT_ONCE):
            features[done : done + len(inputs)] = placed(filled(inputs))[: len(inputs)].cpu().numpy()
            done += len(inputs)
    return features
