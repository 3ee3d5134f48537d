"""Products, sums, inverses and exponentials of matrices of parameters, whose gradients stay sums of outer products.

Low-rank weights and orthogonal ones are computed so, by a parametrization or by hand, also by products of reflections.
Of W = A B, the outer product e x^T of an error and an input leaves e (B x)^T for A and (A^T e) x^T for B. So no
gradient of W is materialised and pulled back for each record: a few products of all records' factors with the matrices
do.

For W = exp(A) the derivative is an integral of products:

    dW = int_0^1 exp(t A) dA exp((1 - t) A) dt,    so e x^T leaves int_0^1 (exp(t A)^T e) (exp((1 - t) A) x)^T dt,

which is a sum of outer products by Gauss and Legendre's rule. What is integrated depends on t like exp(t (a - b)) for
eigenvalues a and b of A, which 24 points integrate to within 1e-9 of its largest value for |a - b| up to 48. A weight
exp(X - X^T) has i a for the angles a by which it turns planes, so this holds for up to three turns of each.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import wide
from algorithms.gradients.grad_sample_recorder import Args, Closed, Gradients, Kwargs, UnrecordedError
from algorithms.gradients.model_gradients import combine_by_name
from algorithms.gradients.normalised_weights import RowFactorGrad
from algorithms.gradients.parameter_gradients import (
    DenseGrad,
    LinearGrad,
    PerExample,
    RowGrad,
    materialize,
)
from algorithms.gradients.table_gradients import EmbeddingGrad

_PRODUCTS = frozenset(("matmul", "__matmul__", "mm", "mv", "dot", "vdot", "linalg_matmul"))
_TIMES, _OVER = frozenset(("mul", "__mul__", "multiply")), frozenset(("div", "__truediv__", "divide"))
_SUMS, _DIFFERENCES = frozenset(("add", "__add__")), frozenset(("sub", "__sub__", "subtract"))
_EXPONENTIALS = frozenset(("matrix_exp", "linalg_matrix_exp"))
_INVERSES, _SOLUTIONS = frozenset(("inverse", "linalg_inv")), frozenset(("linalg_solve",))

_REFLECTIONS = frozenset(("linalg_householder_product", "orgqr"))

_POINTS, _PARTS, _TERMS = 24, 12, 16
"""Points on [0, 1], equal parts of it, and terms of the exponential's series within a part."""

_Pull = Callable[[PerExample], Iterable[PerExample | None]]
"""From the gradients of an operation's output to those of its arguments; None for no closed form."""


def product_form(
    name: str, sources: Mapping[int, str], output: Tensor, args: Args, kwargs: Kwargs
) -> Closed | None:
    """The closed form of an operation with one output, of one or two tensors; None for other operations.

    name: of the operation. sources: the names of arguments that are parameters or computed from them, by identity.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    of_parameters = [tensor for tensor in tensors if id(tensor) in sources]
    if any(part.dtype != output.dtype for part in of_parameters) or not output.is_floating_point():
        return None
    pull = _pull(name, [tensor.detach() for tensor in tensors], output.detach(), args, kwargs)
    if pull is None:
        return None
    names, versions = [sources.get(id(tensor)) for tensor in tensors], [part._version for part in tensors]

    def gradients_of(part: PerExample) -> Gradients | None:
        if versions != [tensor._version for tensor in tensors]:
            raise UnrecordedError("a value computed from parameters is overwritten after its use")
        return combine_by_name(names, pull(part))

    return gradients_of


def _pull(name: str, tensors: list[Tensor], output: Tensor, args: Args, kwargs: Kwargs) -> _Pull | None:
    if name in _SUMS | _DIFFERENCES and len(tensors) == len(args) == 2 and kwargs.keys() <= {"alpha"}:
        if any(tensor.shape != output.shape for tensor in tensors):
            return None
        factor = kwargs.get("alpha", 1) * (1 if name in _SUMS else -1)
        return lambda part: (part, scale_gradient(part, factor))
    if kwargs or len(tensors) < len(args):
        return None
    dimensions = tuple(tensor.dim() for tensor in tensors)
    if name in _TIMES | _OVER and tensors[0].shape == output.shape and tensors[-1].numel() == 1:
        return lambda part: _of_multiple(part, *tensors, is_quotient=name in _OVER)
    if name in _TIMES and tensors[-1].shape == output.shape and tensors[0].numel() == 1:
        return lambda part: _of_multiple(part, *tensors[::-1])[::-1]
    is_scaled = dimensions == (2, 2) and tensors[0].shape == output.shape and len(tensors[1]) == 1
    if name in _TIMES and is_scaled:
        return lambda part: _of_scaled(part, tensors[-1])
    if name in _PRODUCTS and set(dimensions) == {2}:
        return lambda part: _of_factors(part, *tensors)
    if name in _PRODUCTS and dimensions == (2, 1):
        return lambda part: _of_image(part, *tensors)
    if name in _PRODUCTS and dimensions == (1, 1):
        return lambda part: [DenseGrad(part.rows * other) for other in reversed(tensors)]
    if name == "kron" and dimensions == (2, 2):
        return lambda part: _of_kronecker(part, *tensors)
    if name in _SOLUTIONS and dimensions == (2, 2):
        return lambda part: _of_system(part, tensors[0], output)
    if name in _INVERSES and dimensions == (2,):
        return lambda part: (_multiply_sides(part, -output.mT, output),)
    if name in _REFLECTIONS and dimensions == (2, 1) and tensors[1].shape == output.shape[1:]:
        return lambda part: _of_reflections(part, *tensors)
    if name in _EXPONENTIALS and dimensions == (2,):
        return lambda part: (_of_exponent(part, *tensors),)
    return None


def scale_gradient(gradient: PerExample, factor: float) -> PerExample:
    """Gradients times a number, in their closed form."""
    if factor == 1:
        return gradient
    if isinstance(gradient, RowFactorGrad):
        return replace(gradient, coefficients=gradient.coefficients * factor)
    if isinstance(gradient, RowGrad | EmbeddingGrad):
        return replace(gradient, grad_outputs=gradient.grad_outputs * factor)  # type: ignore[type-var]
    return DenseGrad(gradient.rows * factor)


def _of_factors(part: PerExample, first: Tensor, second: Tensor) -> tuple[PerExample | None, ...]:
    """Those of A [outputs, rank] and B [rank, inputs] from those of A B."""
    return _multiply_sides(part, None, second), _multiply_sides(part, first.mT, None)


def _of_image(part: PerExample, matrix: Tensor, vector: Tensor) -> tuple[PerExample, PerExample]:
    """Those of A [outputs, inputs] and v [inputs] from those of A v."""
    grad_outputs = part.rows
    of_matrix = LinearGrad(vector.expand(len(grad_outputs), 1, -1), grad_outputs[:, None])
    return of_matrix, DenseGrad(grad_outputs @ matrix)


def _of_multiple(
    part: PerExample, matrix: Tensor, number: Tensor, *, is_quotient: bool = False
) -> tuple[PerExample | None, ...]:
    """Those of a matrix M and a number from those of their product or quotient."""
    factor = (number.reciprocal() if is_quotient else number).view(())
    # By which the number's gradient is multiplied: d(M / f) = -M / f^2 df.
    of_factor = matrix * -factor.square() if is_quotient else matrix
    if isinstance(part, LinearGrad):
        grad_outputs = wide(part.grad_outputs)
        # <e x^T, M> = e . (M x)
        images = _each(part.inputs, of_factor.reshape(grad_outputs.shape[2], -1))
        along = (images * grad_outputs).sum(dim=(1, 2))
        return replace(part, grad_outputs=grad_outputs * factor), DenseGrad(along[:, None])
    if not part.is_materialized:
        return None, None
    along = part.rows @ of_factor.flatten().to(part.rows.dtype)
    return DenseGrad(part.rows * factor), DenseGrad(along[:, None])


def _of_scaled(part: PerExample, factors: Tensor) -> tuple[PerExample | None, None]:
    """Those of a matrix from those of its multiple by a constant for each column, [1, columns]."""
    if not isinstance(part, LinearGrad) or factors.shape != (1, part.inputs.shape[2]):
        return None, None
    return replace(part, inputs=wide(part.inputs) * factors), None


def _of_kronecker(part: PerExample, first: Tensor, second: Tensor) -> tuple[PerExample | None, ...]:
    """Those of A [m, n] and B [p, q] from those of their Kronecker product [m p, n q]."""
    shape = first.shape[0] * second.shape[0], first.shape[1] * second.shape[1]
    if not isinstance(part, LinearGrad) or shape != (part.grad_outputs.shape[2], part.inputs.shape[2]):
        return None, None
    # Of an outer product e x^T, as matrices E [m, p] and X [n, q]: E B X^T for A, and E^T A X for B.
    grads = torch.unflatten(wide(part.grad_outputs), 2, (len(first), len(second)))
    inputs = torch.unflatten(wide(part.inputs), 2, (first.shape[1], second.shape[1]))
    of_first = LinearGrad((inputs @ second.mT.to(inputs)).mT.flatten(1, 2), grads.mT.flatten(1, 2))
    return of_first, LinearGrad((first.to(inputs) @ inputs).flatten(1, 2), grads.flatten(1, 2))


def _of_reflections(part: PerExample, below: Tensor, taus: Tensor) -> tuple[PerExample | None, ...]:
    """Those of the vectors and factors of W = H_1 ... H_k I, whose reflections H_i are 1 - tau_i v_i v_i^T.

    below: [rows, k], whose columns have v_i below the diagonal; its entry there is 1. I: the first k unit vectors.
    """
    if not isinstance(part, LinearGrad) or part.inputs.shape[2] != below.shape[1]:
        return None, None
    inputs, grad_outputs = wide(part.inputs), wide(part.grad_outputs)
    (rows, count), dtype = below.shape, grad_outputs.dtype
    vectors, factors = below.to(dtype).tril(-1) + torch.eye(rows, count).to(below), taus.to(dtype)
    # An outer product e x^T leaves a_i b_i^T for H_i, where a_i = H_(i-1) ... H_1 e and b_i = H_(i+1) ... H_k I x. So
    # a_i = e - sum_{j<i} tau_j alpha_j v_j with alpha_j = v_j . a_j, which solve triangular equations; b_i alike.
    products = (vectors.mT @ vectors) * factors
    one = torch.eye(count).to(products)
    alphas = (grad_outputs @ vectors) @ torch.linalg.inv(one + products.tril(-1)).mT  # [batch, length, k]
    betas = (inputs @ vectors[:count]) @ torch.linalg.inv(one + products.triu(1)).mT
    # What a_i beta_i + b_i alpha_i takes of the vectors v_j, of e and of I x; [batch, j, i] and [batch, rows, i].
    of_vectors = ((alphas * factors).mT @ betas).triu(1) + ((betas * factors).mT @ alphas).tril(-1)
    sums = grad_outputs.mT @ betas
    sums.sub_(vectors @ of_vectors)[:, :count].add_(inputs.mT @ alphas)
    of_below = sums.mul_(-factors).tril_(-1)
    return DenseGrad(of_below.flatten(start_dim=1)), DenseGrad(-(alphas * betas).sum(dim=1))


def _of_system(part: PerExample, matrix: Tensor, solution: Tensor) -> tuple[PerExample | None, ...]:
    """Those of A and B from those of the W that solves A W = B."""
    inverse = torch.linalg.inv(matrix).mT
    return _multiply_sides(part, -inverse, solution), _multiply_sides(part, inverse, None)


def _multiply_sides(
    part: PerExample, of_errors: Tensor | None, of_inputs: Tensor | None
) -> PerExample | None:
    """P G Q^T for matrices P and Q, or the identity for None.

    None for gradients G in which that takes longer, or that are matrices of another shape, as a layer's of a view are.
    """
    if not isinstance(part, LinearGrad):
        return None
    sides = (part.grad_outputs, of_errors), (part.inputs, of_inputs)
    if any(matrix is not None and matrix.shape[1] != vectors.shape[2] for vectors, matrix in sides):
        return None
    if not _is_cheaper(part, of_errors, of_inputs):
        return None
    return LinearGrad(_each(part.inputs, of_inputs), _each(part.grad_outputs, of_errors))


def _each(vectors: Tensor, matrix: Tensor | None) -> Tensor:
    """The product of a matrix with each vector [batch, length, width]."""
    return vectors if matrix is None else wide(vectors) @ matrix.mT.to(wide(vectors).dtype)


def _is_cheaper(part: LinearGrad, *matrices: Tensor | None) -> bool:
    """Whether products of the factors take no more arithmetic than forming each record's G and multiplying it."""
    outputs, inputs = part.grad_outputs.shape[2], part.inputs.shape[2]
    rank = min(min(matrix.shape) for matrix in matrices if matrix is not None)
    return part.length * rank * (outputs + inputs) <= outputs * inputs * (part.length + 2 * rank)


def _of_exponent(part: PerExample, matrix: Tensor) -> PerExample | None:
    """Those of A from those of exp(A), as above; None for more outer products than are worth it, or another shape."""
    width = len(matrix)
    if not isinstance(part, LinearGrad) or part.inputs.shape[2] != width:
        return None
    if part.length > 1 and part.length * _POINTS > 2 * width:
        return None
    points, weights = _rule()
    inputs, grad_outputs = wide(part.inputs), wide(part.grad_outputs)
    at_points = _exponentials(matrix.to(grad_outputs.dtype), points)  # [points, width, width]
    of_outputs = at_points.transpose(0, 1).reshape(width, -1)
    of_inputs = at_points.flip(0).permute(2, 0, 1).reshape(width, -1)
    # [batch, length * points, width]; the points are symmetric: 1 - t is the same one from the other end.
    inputs_at_points = (inputs @ of_inputs).view(len(inputs), -1, width)
    shares = torch.tensor(weights * part.length, dtype=grad_outputs.dtype, device=grad_outputs.device)
    grads_at_points = (grad_outputs @ of_outputs).view(len(inputs), -1, width) * shares[:, None]
    is_shorter = 2 * grads_at_points.shape[1] < width
    if is_shorter:
        return LinearGrad(inputs_at_points, grads_at_points)
    return DenseGrad(materialize(inputs_at_points, grads_at_points))


def _exponentials(matrix: Tensor, points: Sequence[float]) -> Tensor:
    """exp(t matrix) for each point t in (0, 1), [points, width, width].

    As a power of exp(matrix / _PARTS) and the rest by the exponential's series.
    """
    # With n parts and t n = k + r: exp(t A) = exp(A / n)^k exp(r A / n), whose series need few terms.
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    terms = [identity, matrix / _PARTS]
    while len(terms) <= _TERMS:
        terms.append(terms[-1] @ terms[1])
    parts = [int(point * _PARTS) for point in points]
    rests = [point * _PARTS - part for point, part in zip(points, parts, strict=True)]
    series = [[rest**term / math.factorial(term) for term in range(_TERMS + 1)] for rest in (*rests, 1.0)]
    *of_rests, of_part = torch.tensordot(identity.new_tensor(series), torch.stack(terms), dims=1)
    powers = [identity, of_part]
    while len(powers) < _PARTS:
        powers.append(powers[-1] @ of_part)
    return torch.bmm(torch.stack([powers[part] for part in parts]), torch.stack(of_rests))


@lru_cache
def _rule() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Points and weights of Gauss and Legendre's rule on [0, 1] (Golub and Welsch 1969)."""
    index = torch.arange(1, _POINTS, dtype=torch.float64)
    beside = index / (4.0 * index.square() - 1.0).sqrt()
    roots, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return tuple(((1.0 + roots) / 2.0).tolist()), tuple(vectors[0].square().tolist())
