"""The exact minimum of a regularised sum of losses over all records, for a linear model with one output.

A record's loss is convex in the output. It is continued linearly where its gradient would exceed the bound, so the sum
is still convex (Redberg, Koskela and Wang 2023, on generalised linear models). `solve_minimum` adds the noise.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import PerExampleModel, layer_inputs, linear_layer
from algorithms.models import Model
from algorithms.privacy.mechanisms.noise import Stream
from algorithms.privacy.mechanisms.release import Minimum, NoNoise, ObjectiveNoise, Release, minimum_release
from algorithms.privacy.mechanisms.release_noise import add_noise, draws

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Rows: TypeAlias = "Tensor | csr_array"
"""Of a block of records, [b, d]; sparse ones by what is not zero."""
RecordBlock: TypeAlias = tuple[Rows, Tensor, Tensor]

_RECORDS = 2**14
_KEPT_BYTES = 2**28
_MANY_PARAMETERS, _SPARSE, _FIRST_ROWS = 1000, 0.25, 64
"""From so many on, rows are kept by what is not zero if that is a small share of the first ones, as of cells."""
_ROUGH = 0.01
"""Of a gradient, what a step may leave of it that is found by conjugate gradients."""
_MAX_STEPS, _MAX_HALVINGS = 1000, 40
_OUT_OF_REACH = "the minimum was not reached within the tolerance; ask for a larger tolerance."
_ROUNDING = 1e-14
"""Relative size below which a step only changes rounding."""
_ROUND_INSIDE = 1.0 - 1e-12
"""A factor that keeps a clipped gradient within its bound despite rounding."""
_NO_BOUND = 1e150
"""Above the norm of any record and gradient, yet finite."""
_NO_TOLERANCE = 1e-300
"""A tolerance has to be above 0; this one adds nothing to a sensitivity."""


class OutOfReachError(ArithmeticError):
    """The minimum was not reached within the tolerance."""


@dataclass(frozen=True)
class PerturbedObjective:
    """The sum over records of clipped losses, plus regularisation / 2 ||v||^2 + <tilt, v>.

    Attributes:
        model: One linear layer with one output.
        features: [n, *input_shape], plain or memory-mapped.
        labels: [n].
        clip_norm, input_norm: L2 bounds on a record's gradient and on its features, including the bias's 1. Longer
            records are scaled down; records that are not finite count as zero.
        regularisation: Above 0.
        tilt: [d], float64.

    Raises:
        ValueError: For other models.
    """

    model: PerExampleModel
    features: NDArray[Any]
    labels: NDArray[np.int64]
    clip_norm: float
    input_norm: float
    regularisation: float
    tilt: Tensor

    def __post_init__(self) -> None:
        layer = linear_layer(self.model.module)
        if layer is None or layer.out_features != 1:
            raise ValueError(f"the model {self.model.name!r} is not one linear layer with one output.")

    def at(self, point: Tensor) -> tuple[float, Tensor]:
        """The objective without linear continuations, and its gradient [d], float64."""
        value = self.regularisation / 2 * point @ point + self.tilt @ point
        total = self.regularisation * point + self.tilt
        for rows, labels, limits in self._records():
            outputs = _outputs(rows, point)[:, None]
            value = value + self.model.losses(outputs, labels).sum()
            total = total + _sum_of_rows(rows, self._slopes(outputs, labels, limits))
        return float(value), total

    def gradient(self, point: Tensor) -> Tensor:
        """Shape [d], float64."""
        return self.at(point)[1]

    def hessian(self, point: Tensor) -> Tensor:
        """Shape [d, d], float64; a record whose loss is continued linearly adds nothing."""
        total = self.regularisation * torch.eye(len(point), dtype=torch.float64)
        for rows, labels, limits in self._records():
            dense = rows if isinstance(rows, Tensor) else torch.from_numpy(rows.toarray())
            curvatures = self._curvatures((dense @ point)[:, None], labels, limits)  # [b]
            total += dense.T @ (curvatures[:, None] * dense)  # sum of curvature x x^T
        return total

    def newton_step(self, point: Tensor, gradient: Tensor) -> Tensor:
        """H^-1 g, shape [d], for the Hessian H, which is positive by the regularisation.

        Of sparse rows it leaves up to `_ROUGH` of the gradient, as H is then never computed.
        """
        if not self._is_sparse:
            return torch.cholesky_solve(gradient[:, None], torch.linalg.cholesky(self.hessian(point)))[:, 0]
        curvatures = [
            self._curvatures(_outputs(rows, point)[:, None], labels, limits)
            for rows, labels, limits in self._records()
        ]  # [b] each
        return conjugate_gradients(lambda step: self._times_hessian(step, curvatures), gradient)

    def _times_hessian(self, step: Tensor, curvatures: list[Tensor]) -> Tensor:
        """The Hessian times a step, [d]. curvatures: of the records of each block."""
        total = self.regularisation * step
        for (rows, _, _), of_block in zip(self._records(), curvatures, strict=True):
            total = total + _sum_of_rows(rows, of_block * _outputs(rows, step))
        return total

    @cached_property
    def _numbers(self) -> int:
        """How many numbers of a row are kept: of sparse ones those of the first rows, with their places."""
        some = np.asarray(self.features[:_FIRST_ROWS])
        active = 2 * (int(np.count_nonzero(some)) // max(1, len(some)) + 2)
        return min(active, len(self.tilt))

    @property
    def _is_sparse(self) -> bool:
        """Whether rows are kept by what is not zero, which decides nothing but time, memory and rounding."""
        return len(self.tilt) >= _MANY_PARAMETERS and self._numbers <= _SPARSE * len(self.tilt)

    def _records(self) -> Iterable[RecordBlock]:
        """The blocks of `_read`, cached if they are small enough."""
        count = self._numbers if self._is_sparse else len(self.tilt)
        return self._cached_blocks if 8 * len(self.labels) * count <= _KEPT_BYTES else self._read()

    @cached_property
    def _cached_blocks(self) -> list[RecordBlock]:
        return list(self._read())

    def _read(self) -> Iterator[RecordBlock]:
        """Yield blocks of features [b, d] float64, labels [b], and bounds on the derivative by the output, [b]."""
        from scipy.sparse import csr_array  # here, since other methods do without it

        count = len(self.tilt)
        for start in range(0, len(self.labels), _RECORDS):
            block = torch.from_numpy(np.array(self.features[start : start + _RECORDS]))
            rows = torch.ones(len(block), count, dtype=torch.float64)
            flat = layer_inputs(self.model.module, block).flatten(start_dim=1)
            rows[:, : flat.shape[1]] = flat
            # A record that is not finite counts as zero, as in every query, so that it cannot spoil the sum of the
            # others.
            rows = torch.where(torch.isfinite(rows).all(dim=1, keepdim=True), rows, 0.0)
            norms = torch.linalg.vector_norm(rows, dim=1)
            # Longer records are scaled down, the bias's 1 with them.
            rows = rows * (self.input_norm / norms.clamp(min=self.input_norm))[:, None]
            # The gradient of a linear model is slope times features: |slope| <= clip_norm / |features| bounds its norm.
            limits = self.clip_norm * _ROUND_INSIDE / norms.clamp(min=1e-300, max=self.input_norm)
            kept = csr_array(rows.numpy()) if self._is_sparse else rows
            yield kept, torch.from_numpy(np.array(self.labels[start : start + _RECORDS])), limits

    def _slopes(self, outputs: Tensor, labels: Tensor, limits: Tensor) -> Tensor:
        """The first derivative of each record's clipped loss by its output [b, 1], [b]."""
        free = outputs.detach().requires_grad_()
        with torch.enable_grad():
            (slopes,) = torch.autograd.grad(self.model.losses(free, labels).sum(), free)
        # A clamped slope is the slope of a convex loss that goes on linearly, so the objective stays convex.
        return slopes[:, 0].clamp(-limits, limits)

    def _curvatures(self, outputs: Tensor, labels: Tensor, limits: Tensor) -> Tensor:
        """The second derivative of the same, [b]; zero where the loss goes on linearly."""
        free = outputs.detach().requires_grad_()
        with torch.enable_grad():
            losses = self.model.losses(free, labels).sum()
            (slopes,) = torch.autograd.grad(losses, free, create_graph=True)
            curved = slopes.requires_grad  # for a piecewise linear loss the second derivative is zero
            second = torch.autograd.grad(slopes.sum(), free)[0] if curved else torch.zeros_like(free)
        return torch.where(slopes.detach()[:, 0].abs() < limits, second[:, 0], 0.0)


def minimum(problem: PerturbedObjective, *, tolerance: float) -> Tensor:
    """A point where the gradient's L2 norm is at most `tolerance`; shape [d], float64.

    Uses Newton's method, whose steps may be rough. If a step does not at least halve the gradient, as when many losses
    become linear at once, it goes to the minimum along the step instead. Raises OutOfReachError if rounding keeps the
    gradient above the tolerance.
    """
    point = torch.zeros_like(problem.tilt)
    gradient = problem.gradient(point)
    for _ in range(_MAX_STEPS):
        if gradient.norm() <= tolerance:
            return point
        step = problem.newton_step(point, gradient)
        moved = point - step
        new_gradient = problem.gradient(moved)
        is_shorter = new_gradient.norm() <= max(float(gradient.norm()) / 2, tolerance)
        point, gradient = (moved, new_gradient) if is_shorter else _lowest(problem, point, step)
    raise OutOfReachError(_OUT_OF_REACH)


def conjugate_gradients(product: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
    """x with |H x - b| of at most `_ROUGH` |b| for a positive matrix H (Hestenes and Stiefel 1952); shape [d], float64.

    product: H times a vector. right: b, shape [d].
    """
    solution, left, direction = torch.zeros_like(right), right, right
    square, enough = float(left @ left), (_ROUGH * float(right.norm())) ** 2
    for _ in range(len(right)):
        if square <= enough:
            break
        curved = product(direction)
        length = square / float(direction @ curved)
        solution, left = solution + length * direction, left - length * curved
        before, square = square, float(left @ left)
        direction = left + square / before * direction
    return solution


def _outputs(rows: Rows, point: Tensor) -> Tensor:
    """The product of each row and a point, [b]."""
    return rows @ point if isinstance(rows, Tensor) else torch.from_numpy(rows @ point.numpy())


def _sum_of_rows(rows: Rows, weights: Tensor) -> Tensor:
    """The weighted sum of rows, [d]."""
    return rows.T @ weights if isinstance(rows, Tensor) else torch.from_numpy(rows.T @ weights.numpy())


def _lowest(problem: PerturbedObjective, point: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum of the convex objective along a step, and the gradient there.

    Raises OutOfReachError if the objective does not fall along the step, up to rounding.
    """
    low, high = 0.0, 1.0
    # Along a step a convex objective has one minimum, where the slope changes its sign: double until then, then halve.
    while problem.gradient(point - high * step) @ step > 0:
        low, high = high, 2.0 * high
    for _ in range(_MAX_HALVINGS):
        middle = (low + high) / 2
        falls = bool(problem.gradient(point - middle * step) @ step > 0)
        low, high = (middle, high) if falls else (low, middle)
    if low * step.norm() <= _ROUNDING * point.norm():
        raise OutOfReachError(_OUT_OF_REACH)
    return point - low * step, problem.gradient(point - low * step)


def exact_minimum(problem: PerturbedObjective) -> Tensor:
    """The minimum of the objective without clipping by L-BFGS (Byrd et al. 1995); shape [d], float64."""

    def value_and_gradient(values: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = problem.at(torch.from_numpy(values))
        return value, gradient.numpy()

    from scipy.optimize import minimize  # here, since other methods do without it

    start = np.zeros(len(problem.tilt))
    solution = minimize(
        value_and_gradient,
        start,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 1000, "ftol": 1e-12, "gtol": 1e-6},
    )
    return torch.from_numpy(solution.x)


def solve_minimum(
    model: Model, features: NDArray[np.float32], labels: NDArray[np.int64], release: Release, stream: Stream
) -> Tensor:
    """The answer to the release of a minimum, noise included, shape [d], float64."""
    problem = release.clipping
    if not isinstance(problem, Minimum):
        raise TypeError(f"{release} does not ask for a minimum")
    tilt = np.zeros(model.parameter_count)
    if isinstance(release.noise, ObjectiveNoise):
        tilt = release.noise_scale * draws(release, stream, len(tilt))
    whole = PerturbedObjective(
        model,
        features,
        labels,
        clip_norm=problem.clip_norm,
        input_norm=problem.input_norm,
        regularisation=problem.regularisation,
        tilt=torch.from_numpy(tilt),
    )
    if isinstance(release.noise, NoNoise):
        return exact_minimum(replace(whole, clip_norm=_NO_BOUND, input_norm=_NO_BOUND))
    solution = minimum(whole, tolerance=problem.tolerance)
    return add_noise(solution, _on_the_result(problem, release), stream)


def _on_the_result(problem: Minimum, release: Release) -> Release:
    """The noise on the solver's result: as requested, or, with noise in the objective, what hides where it stopped."""
    if not isinstance(release.noise, ObjectiveNoise):
        return release
    # Two solvers stop within tolerance / regularisation of their minima, so that this has twice that as sensitivity.
    stopped = Minimum(
        clip_norm=2 * problem.tolerance,
        regularisation=problem.regularisation,
        tolerance=_NO_TOLERANCE,
        input_norm=problem.input_norm,
        curvature=problem.curvature,
    )
    return minimum_release(stopped, release.noise.on_result())
