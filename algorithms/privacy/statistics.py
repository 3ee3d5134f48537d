"""Sums of bounded statistics of records: for the barrier alone, nothing is noised here.

A record of which a statistic cannot be taken counts as zero, like one that is not finite.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from algorithms.gradients import L1, L2, clip_and_sum, filled
from algorithms.privacy.errors import Refused
from algorithms.privacy.moments import moment_sum
from algorithms.privacy.performance import Records

Statistic = Callable[[Tensor, Tensor], Tensor]
Batches = Iterable[tuple[Tensor, Tensor]]


def shape_of(statistic: Statistic, records: Records) -> torch.Size:
    """The shape of a statistic of one record, seen on made-up zeros, taken as it is of the records themselves."""
    example = torch.from_numpy(np.zeros((1, *records.features.shape[1:]), records.features.dtype))
    return torch.func.vmap(statistic)(example, torch.zeros(1, dtype=torch.int64)).shape[1:]


def columns_of(statistic: Statistic, records: Records) -> int:
    """The columns of a statistic that is a matrix of each record; raises Refused for any other."""
    shape = shape_of(statistic, records)
    if len(shape) != 2 or 0 in shape:
        raise Refused(
            f"second moments are of a matrix of each record, not of a statistic of shape {list(shape)}; give [m, c]."
        )
    return shape[1]


def statistic_sum(statistic: Statistic, batches: Batches, bound: L1 | L2, dimension: int) -> Tensor:
    """The sum of a statistic of each record, clipped to the bound; shape [dimension], float64."""
    total = torch.zeros(dimension, dtype=torch.float64)
    for found in _answers(statistic, batches):
        total += clip_and_sum(found.reshape(len(found), dimension).double(), bound).cpu()
    return total


def second_moment_sum(statistic: Statistic, batches: Batches, bound: L2, dimension: int) -> Tensor:
    """The sum of A^T A for each record's matrix A, clipped to the bound; a vector [dimension], float64."""
    total = torch.zeros(dimension, dtype=torch.float64)
    for found in _answers(statistic, batches):
        total += moment_sum(found, bound.norm).cpu()
    return total


def _answers(statistic: Statistic, batches: Batches) -> Iterator[Tensor]:
    """The statistic of some records at a time, without those of which it cannot be taken.

    These are found by copies of each record, and another record takes their place: all others are computed as they
    would be without them.
    """
    for inputs, labels in batches:
        found = _taken(statistic, inputs, labels)
        if found is not None:
            yield found
            continue
        sound = [i for i in range(len(labels)) if _taken(statistic, inputs[[i]], labels[[i]]) is not None]
        if not sound:
            continue
        places = torch.full((len(labels),), sound[0])
        places[sound] = torch.tensor(sound)
        found = _taken(statistic, inputs[places], labels[places])
        if found is not None:
            yield found[sound]


def _taken(statistic: Statistic, inputs: Tensor, labels: Tensor) -> Tensor | None:
    """The statistic of each record, or None where that raises: the error would tell that there is such a record."""
    try:
        return torch.func.vmap(statistic)(filled(inputs), filled(labels))[: len(labels)]
    except Exception:
        return None
