"""Second moments of records, as bounded contributions: what a covariance or a principal component is made of.

A record is a matrix A of m rows and c columns (the positions and channels of an image; one row for a flat record). Its
contribution is A^T A, whose Frobenius norm is at most the square of A's: so A is scaled down to the square root of the
bound. A symmetric matrix is summed and noised as its upper triangle, whose other entries are multiplied by the square
root of 2: the L2 norm of that vector is the Frobenius norm of the matrix.
"""

import math

import torch
from torch import Tensor

from algorithms.gradients.clipping import margin


def dimension(columns: int) -> int:
    """The length of the vector that stands for a symmetric matrix, [columns, columns]."""
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
    """The symmetric matrix [c, c] that `as_vector` made a vector of."""
    above, right = torch.triu_indices(columns, columns)
    entries = vector * _weights(above == right, math.sqrt(0.5), vector)
    matrix = vector.new_zeros(columns, columns)
    matrix[above, right] = entries
    matrix[right, above] = entries
    return matrix


def _weights(diagonal: Tensor, beside: float, like: Tensor) -> Tensor:
    """1 on the diagonal, `beside` elsewhere."""
    return torch.where(diagonal, like.new_ones(()), like.new_full((), beside))
