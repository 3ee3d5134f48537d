"""The fixed layers in front of a model's first parameter, computed once for all records instead of in each step."""

import copy
import math
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from algorithms.gradients import pad_to_multiple
from algorithms.models import Model
from algorithms.models.feature_transforms import front_of, shape_after
from algorithms.models.networks import UnitRecords
from algorithms.models.scaled_target import TargetScaling
from algorithms.privacy.barrier.compute_config import ComputeConfig
from algorithms.privacy.barrier.record_loader import RecordArrays

_BY_RECORD = (UnitRecords, nn.GroupNorm)
"""Layers that process each record independently; without parameters they are fixed maps."""


@dataclass(frozen=True)
class MappedRecords:
    """Records whose features went through a fixed map: features [n, *shape], labels [n]."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]


def has_frozen_prefix(model: Model) -> bool:
    """Whether fixed layers that process each record independently are in front of a model's first parameter."""
    return bool(_split_prefix(model)[0])


def frozen_prefix(
    model: Model, records: RecordArrays, compute: ComputeConfig, *, physical_batch: int
) -> tuple[Model, RecordArrays]:
    """The model without its feature map and its own first fixed layers, and the records mapped by those.

    Returns both unchanged if there are no such layers, or if the mapped records would not fit into memory by the public
    number of records. physical_batch: the size of passes at which the model was compared, and records are mapped.
    """
    first, rest = _split_prefix(model)
    maps = nn.Sequential(*first)
    shape = shape_after(maps, records.features.shape[1:])
    if not first or not compute.holds(math.prod(shape)):
        return model, records
    features = _apply_maps(maps, records, (len(records.labels), *shape), compute, physical_batch)
    return replace(model, module=rest), MappedRecords(features, records.labels)


def _split_prefix(model: Model) -> tuple[list[nn.Module], nn.Module]:
    """Split a model into the map in front of it with its own first fixed layers, and the rest."""
    front = front_of(model)
    if front is None:
        return _split_leading_maps(model.module)
    if isinstance(front, TargetScaling) and front.is_around_the_model:
        return [], model.module
    first, rest = _split_leading_maps(model.module.get_submodule("model"))
    return [front, *first], rest


def _split_leading_maps(module: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """Split a sequence into its leading fixed maps and the rest."""
    if type(module) is not nn.Sequential or not _is_as_its_class(module):
        return [], module
    first = list(takewhile(lambda layer: type(layer) in _BY_RECORD and _is_as_its_class(layer), module))
    return first, module[len(first) :]


def _is_as_its_class(module: nn.Module) -> bool:
    """Whether a module has no hook, parameter, buffer or `forward` of its own, which would be lost or not be called."""
    held = (
        *(
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        ),
        *(module._parameters, module._buffers),
    )
    return "forward" not in vars(module) and all(part is None for each in held for part in each.values())


def _apply_maps(
    maps: nn.Module,
    records: RecordArrays,
    shape: tuple[int, ...],
    compute: ComputeConfig,
    physical_batch: int,
) -> NDArray[np.float32]:
    features, done = np.empty(shape, np.float32), 0
    placed = copy.deepcopy(maps).to(compute.device)
    with torch.no_grad():
        for inputs, _labels in compute.loader.batches(records, np.arange(len(features)), physical_batch):
            mapped = placed(pad_to_multiple(inputs, physical_batch))[: len(inputs)]
            features[done : done + len(inputs)] = mapped.cpu().numpy()
            done += len(inputs)
    return features
