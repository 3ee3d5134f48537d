"""Sums of bounded statistics of records, including second moments: before noise, for the barrier alone.

A record whose statistic cannot be computed, or is not finite, counts as zero.

For a second moment, as in a covariance, a record gives a matrix A with m rows and c columns (positions and channels of
an image; one row for a flat record). Its contribution is A^T A, whose Frobenius norm is at most the square of A's, so A
is scaled down to the square root of the bound. A symmetric matrix is represented by its upper triangle, with
off-diagonal entries times sqrt(2): the L2 norm of this vector is the Frobenius norm of the matrix.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from algorithms.errors import RefusedError
from algorithms.gradients import L1, L2, clip_and_sum, pad_to_multiple
from algorithms.gradients.clipping import margin
from algorithms.models import Model
from algorithms.privacy.barrier.performance import Batch, Records


def dimension(columns: int) -> int:
    """The length of the vector for a symmetric matrix [columns, columns]."""
    return columns * (columns + 1) // 2


def moment_sum(records: Tensor, bound: float) -> Tensor:
    """The sum of the records' clipped A^T A, as a vector.

    records: [n, m, c]; one that is not finite counts as zero. Returns [c (c + 1) / 2], float64.
    """
    wide = records.double()
    finite = torch.isfinite(wide).flatten(1).all(dim=1)
    wide = torch.where(finite[:, None, None], wide, 0.0)
    norms = torch.linalg.vector_norm(wide, dim=(1, 2))
    most = math.sqrt(bound) * (1.0 - margin(torch.float64))
    rows = (wide * torch.clamp(most / norms.clamp(min=1e-300), max=1.0)[:, None, None]).flatten(0, 1)
    return as_vector(rows.T @ rows)


def as_vector(matrix: Tensor) -> Tensor:
    """A symmetric matrix [c, c] as a vector of the same norm, [c (c + 1) / 2]."""
    rows, columns = torch.triu_indices(*matrix.shape)
    return matrix[rows, columns] * _weights(rows == columns, math.sqrt(2.0), matrix)


def as_matrix(vector: Tensor, columns: int) -> Tensor:
    """The inverse of `as_vector`: a symmetric matrix [c, c]."""
    above, right = torch.triu_indices(columns, columns)
    entries = vector * _weights(above == right, math.sqrt(0.5), vector)
    matrix = vector.new_zeros(columns, columns)
    matrix[above, right] = entries
    matrix[right, above] = entries
    return matrix


def _weights(diagonal: Tensor, beside: float, like: Tensor) -> Tensor:
    """1 on the diagonal, `beside` elsewhere."""
    return torch.where(diagonal, like.new_ones(()), like.new_full((), beside))


Statistic = Callable[[Tensor, Tensor], Tensor]
Batches = Iterable[Batch]


def shape_of(statistic: Statistic, records: Records, model: Model) -> torch.Size:
    """The shape of a statistic of one record, found with zeros in the record's form."""
    example = torch.from_numpy(np.zeros((1, *records.features.shape[1:]), records.features.dtype))
    label = torch.zeros(1, *model.label_shape, dtype=model.label_dtype)
    return torch.func.vmap(statistic)(example, label).shape[1:]


def columns_of(statistic: Statistic, records: Records, model: Model) -> int:
    """The number of columns of a matrix statistic; raises RefusedError for other shapes."""
    shape = shape_of(statistic, records, model)
    if len(shape) != 2 or 0 in shape:
        raise RefusedError(
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
    """Yield the statistics of batches of records, without records for which they cannot be computed.

    Such records are found one by one, and replaced by copies of another record, so that the results of all others are
    those that they would have without them.
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
    """The statistic of each record, or None on an error, which must not reveal that there is such a record."""
    try:
        return torch.func.vmap(statistic)(pad_to_multiple(inputs), pad_to_multiple(labels))[: len(labels)]
    except Exception:
        return None
