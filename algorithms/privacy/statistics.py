"""Sums of bounded statistics of records: for the barrier alone, nothing is noised here."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from algorithms.gradients import L1, L2, clip_and_sum
from algorithms.privacy.moments import moment_sum
from algorithms.privacy.performance import Records

Statistic = Callable[[Tensor, Tensor], Tensor]
Batches = Iterable[tuple[Tensor, Tensor]]


def shape_of(statistic: Statistic, records: Records) -> torch.Size:
    """The shape of a statistic of one record, seen on made-up zeros."""
    example = torch.from_numpy(np.zeros(records.features.shape[1:], records.features.dtype))
    return statistic(example, torch.tensor(0)).shape


def statistic_sum(statistic: Statistic, batches: Batches, bound: L1 | L2, dimension: int) -> Tensor:
    """The sum of a statistic of each record, clipped to the bound; shape [dimension], float64."""
    total = torch.zeros(dimension, dtype=torch.float64)
    for inputs, labels in batches:
        rows = torch.func.vmap(statistic)(inputs, labels).reshape(len(labels), dimension).double()
        total += clip_and_sum(rows, bound).cpu()
    return total


def second_moment_sum(statistic: Statistic, batches: Batches, bound: L2, dimension: int) -> Tensor:
    """The sum of A^T A for each record's matrix A, clipped to the bound; a vector [dimension], float64."""
    total = torch.zeros(dimension, dtype=torch.float64)
    for inputs, labels in batches:
        total += moment_sum(torch.func.vmap(statistic)(inputs, labels), bound.norm).cpu()
    return total
