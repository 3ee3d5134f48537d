"""Statistics of single records, such as means and second moments: their shapes, values and clipped sums.

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
from algorithms.gradients import pad_to_multiple
from algorithms.gradients.clipping import rounding_margin
from algorithms.gradients.memory import lacks_memory
from algorithms.models import Model
from algorithms.privacy.barrier.record_loader import Batch, RecordArrays

Statistic = Callable[[Tensor, Tensor], Tensor]
"""A function of one record, (input [*input_shape], label []), to a tensor of one shape for all records."""

_NEAR_ZERO = 1e-300
"""Above 0, and below the norm of any matrix that is not 0."""


def vector_length(columns: int) -> int:
    """The length of the vector for a symmetric matrix [columns, columns]."""
    return columns * (columns + 1) // 2


def moment_sum(records: Tensor, bound: float) -> Tensor:
    """The sum of the records' clipped A^T A, as a vector.

    records: [n, m, c]; one that is not finite counts as zero. Returns [c (c + 1) / 2], float64.
    """
    wide = records.double()
    finite = torch.isfinite(wide).flatten(1).all(dim=1)
    wide = torch.where(finite[:, None, None], wide, 0.0)
    norms = torch.linalg.vector_norm(wide, dim=(1, 2))  # Frobenius norms, [n]
    max_norm = math.sqrt(bound) * (1.0 - rounding_margin(torch.float64))  # |A^T A| is at most |A|^2
    # [n m, c]: the sum of A^T A is one product
    rows = (wide * torch.clamp(max_norm / norms.clamp(min=_NEAR_ZERO), max=1.0)[:, None, None]).flatten(0, 1)
    return as_vector(rows.T @ rows)


def as_vector(matrix: Tensor) -> Tensor:
    """A symmetric matrix [c, c] as a vector of the same norm, [c (c + 1) / 2]."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    # An entry beside the diagonal stands for two.
    return matrix[rows, columns] * _weights(rows == columns, math.sqrt(2.0), matrix)


def as_matrix(vector: Tensor, columns: int) -> Tensor:
    """The inverse of `as_vector`: a symmetric matrix [c, c]."""
    above, right = torch.triu_indices(columns, columns, device=vector.device)
    entries = vector * _weights(above == right, math.sqrt(0.5), vector)
    matrix = vector.new_zeros(columns, columns)
    matrix[above, right] = entries
    matrix[right, above] = entries
    return matrix


def _weights(diagonal: Tensor, beside: float, like: Tensor) -> Tensor:
    """1 on the diagonal, `beside` elsewhere."""
    return torch.where(diagonal, like.new_ones(()), like.new_full((), beside))


def example_of(
    statistic: Statistic, records: RecordArrays, model: Model, device: torch.device | None = None
) -> Tensor:
    """A statistic of one record of zeros, which has the shape and type that all records' have.

    device: where the records will be, by default the CPU. A statistic that fails there, as with tensors of its own on
    the CPU, would count each record as zero, so it is tried there before it is charged.
    """
    example = torch.from_numpy(np.zeros((1, *records.features.shape[1:]), records.features.dtype))
    label = torch.zeros(1, *model.label_shape, dtype=model.label_dtype)
    value: Tensor = torch.func.vmap(statistic)(example.to(device), label.to(device))[0]
    return value


def columns_of(statistic: Statistic, records: RecordArrays, model: Model, device: torch.device) -> int:
    """The number of columns of a matrix statistic; raises RefusedError for other shapes."""
    shape = example_of(statistic, records, model, device).shape
    if len(shape) != 2 or 0 in shape:
        raise RefusedError(
            f"second moments are of a matrix of each record, not of a statistic of shape {list(shape)}; give [m, c]."
        )
    return shape[1]


def answers(statistic: Statistic, batches: Iterable[Batch], size: int) -> Iterator[Tensor]:
    """Yield the statistics of batches of records, without records for which they cannot be computed.

    size: to which all batches are padded.

    Such records are found one by one, and replaced by copies of another record, so that the results of all others are
    those that they would have without them.
    """
    for inputs, labels in batches:
        values = _try_statistic(statistic, inputs, labels, size)
        if values is not None:
            yield values
            continue
        sound = [
            i
            for i in range(len(labels))
            if _try_statistic(statistic, inputs[[i]], labels[[i]], size) is not None
        ]
        if not sound:
            continue
        indices = torch.full((len(labels),), sound[0])
        indices[sound] = torch.tensor(sound)
        values = _try_statistic(statistic, inputs[indices], labels[indices], size)
        if values is not None:
            yield values[sound]


def _try_statistic(statistic: Statistic, inputs: Tensor, labels: Tensor, size: int) -> Tensor | None:
    """The statistic of each record, or None on an error, which must not reveal that there is such a record.

    What is for lack of memory is raised: it would leave out records because of others.
    """
    try:
        full = (pad_to_multiple(part, size) for part in (inputs, labels))
        return torch.func.vmap(statistic)(*full)[: len(labels)]
    except Exception as error:
        if lacks_memory(error):
            raise
        return None
