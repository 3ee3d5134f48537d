"""Strategies C for correlated noise with the least noise in the iterates, by closed form or by optimisation.

A strategy is chosen for the least squared size, |A C^-1|^2 times its squared sensitivity, for the workload A of
`noise_workload`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from algorithms.core.noise_workload import Array, fast_size, some_rows, workload
from algorithms.core.optimizers import OptimizerConfig
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.mechanisms.correlated import Buffered, Toeplitz

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_module("torch")

optimize, signal, special = (
    lazy_module("scipy.optimize"),
    lazy_module("scipy.signal"),
    lazy_module("scipy.special"),
)

MAX_BANDS = 64
"""Bands that "auto" tries: each is a vector of memory."""
_TOO_MUCH = 20.0
"""Of logarithms of noise: so much above the lowest is taken for all that is higher."""
_BANDED_SEARCH, _BUFFERED_SEARCH = {"ftol": 1e-5, "maxfun": 20}, {"ftol": 1e-6, "maxfun": 40}
"""The change of a logarithm of noise at which a search ends, and after how many of them it does at last."""
_MAX_LOGIT = 12.0
"""Of a buffer's share and decay in a search."""
DECAY_LENGTH, _NEGLIGIBLE = 2**12, 1e-12
"""The fewest entries of C^-1's column that a search for bands computes, and below what the others count for nothing."""


def square_root(bands: int, *, momentum: float = 0.0) -> Toeplitz:
    """The first bands of the square root of the workload of a constant learning rate, its first column of norm 1.

    Source: Kalinin and Lampert 2024, arXiv:2405.13763, Theorem 1, without weight decay.
    """
    # Coefficients of 1 / sqrt(1 - x).
    falls = np.cumprod(np.concatenate([[1.0], 1.0 - 0.5 / np.arange(1, bands)]))
    # Of 1 / sqrt((1 - x) (1 - momentum x)).
    column = np.convolve(falls, falls * momentum ** np.arange(bands))[:bands] if momentum else falls
    return _normalise(column)


@lru_cache(maxsize=64)
def best_banded(update: OptimizerConfig, steps: int, bands: int, *, rows: int | None = None) -> Toeplitz:
    """The banded Toeplitz strategy with the smallest noise in the iterates, its first column of norm 1.

    rows: about the number of iterates that are counted, by default few of a long run. Source: McKenna 2024,
    arXiv:2405.15913, for records that take part again after `bands` steps or more.

    Example:
        >>> best_banded(OptimizerConfig(1.0), 64, 1).coefficients
        (1.0,)
    """
    bands = min(bands, steps)
    if bands == 1:
        return Toeplitz((1.0,))
    lengths = _decay_length(bands, steps), steps
    truncated, every = (_summed_noise(update, steps, length, rows=rows) for length in lengths)

    def noise(tail: Tensor) -> Tensor:
        column = torch.cat([torch.ones(1, dtype=torch.float64), tail])
        inverse, error = _inverse(column, truncated.length), truncated
        # Else the later entries are next to nothing, or grow without end.
        if truncated.length < steps and _NEGLIGIBLE < inverse[-bands:].abs().max() < 1 / _NEGLIGIBLE:
            inverse, error = _inverse(column, steps), every
        return torch.log(error(inverse) * column.square().sum())

    start = square_root(bands, momentum=update.momentum).coefficients
    coefficients = _minimise(noise, np.array(start[1:]) / start[0], _BANDED_SEARCH)
    return _normalise(np.concatenate([[1.0], coefficients]))


@lru_cache(maxsize=64)
def best_buffered(
    update: OptimizerConfig, steps: int, buffers: int, parts: int, *, rows: int | None = None
) -> Buffered:
    """The buffered strategy with the smallest noise in the iterates, for records that take part every `parts` steps.

    rows: about the number of iterates that are counted, by default few of a long run. Source: McMahan et al. 2024,
    arXiv:2408.08868.
    """
    error = _summed_noise(update, steps, steps, rows=rows)
    period = min(parts, steps)

    def terms(point: Tensor) -> tuple[Tensor, Tensor]:
        # C^-1 stays bounded as long as the weights, each over 1 + its decay, add up to less than 1.
        decays, rest = torch.sigmoid(point[buffers:]), torch.zeros(1, dtype=torch.float64)
        return (1 + decays) * torch.softmax(torch.cat([point[:buffers], rest]), 0)[:-1], decays

    def noise(point: Tensor) -> Tensor:
        weights, decays = terms(point)
        # As in `Buffered`: each term of C's column falls by its decay, and that of C^-1 by what the buffers hold.
        first, decay_matrix = torch.ones(1, dtype=torch.float64), torch.diag(decays)
        column = torch.cat([first, _sums(weights, decay_matrix, steps - 1)])
        inverse = torch.cat([first, -_sums(weights, decay_matrix - weights[:, None], steps - 1)])
        # No coefficient is negative, so a record's columns move most where all its gradients are alike.
        # [steps / period, period]: what the participations so far add up to
        moved = torch.nn.functional.pad(column, (0, -steps % period)).view(-1, period).cumsum(0)
        return torch.log(error(inverse) * moved.reshape(-1)[:steps].square().sum())

    slow = np.linspace(np.log(max(period, 8)), 0.5, buffers)
    shares = 0.4 / buffers * np.exp(-slow / 2) / (1 + special.expit(slow))
    start = np.concatenate([np.log(shares / (1 - shares.sum())), slow])
    # Beyond these a buffer holds next to nothing, or what it holds hardly falls in the whole run.
    limits = [(-_MAX_LOGIT, _MAX_LOGIT)] * buffers + [(-_MAX_LOGIT, math.log(8 * steps))] * buffers
    solution = _minimise(noise, start, _BUFFERED_SEARCH, limits)
    weights, decays = terms(torch.from_numpy(solution))
    return Buffered(tuple(map(float, weights)), tuple(map(float, decays)))


def _normalise(column: Array) -> Toeplitz:
    return Toeplitz(tuple(map(float, column / np.sqrt(np.square(column).sum()))))


def _minimise(
    value: Callable[[Tensor], Tensor],
    start: Array,
    options: dict[str, float],
    limits: list[tuple[float, float]] | None = None,
) -> Array:
    """A local minimum of a logarithm by L-BFGS, between limits."""
    lowest, best = math.inf, start

    def with_gradient(point: Array) -> tuple[float, Array]:
        nonlocal lowest, best
        variables = torch.from_numpy(point.copy()).requires_grad_()
        objective = value(variables)
        if not objective < lowest + _TOO_MUCH:  # an inverse that grows without end; back to where it does not
            return lowest + _TOO_MUCH, np.zeros_like(point)
        if objective < lowest:
            lowest, best = float(objective.detach()), point.copy()
        (slope,) = torch.autograd.grad(objective, variables)
        return float(objective.detach()), slope.numpy()

    optimize.minimize(with_gradient, start, jac=True, method="L-BFGS-B", bounds=limits, options=options)
    return best


class _SummedNoise:
    """The squared noise of all iterates together, for the first column h of C^-1 where it has `length` entries.

    Iterate r holds sum_s a_rs h_(s - t) of the noise of step t. Over all whole t, negative ones too, the squares add up
    to h' R h for the rows' autocorrelation R, whatever the number of rows. What is of negative t, to be subtracted,
    depends on the first `length` entries of rows alone. These differ little between iterates, so that a few orthogonal
    combinations of them have the same squares.
    """

    def __init__(self, rows: Array, length: int) -> None:
        self.length, self._rows = length, rows
        self._size = fast_size(2 * length)

    @cached_property
    def _spectra(self) -> tuple[Array, NDArray[np.complex128]]:
        """Of the autocorrelation, on a circle, and of the combinations of the rows' heads."""
        whole = fast_size(2 * self._rows.shape[1])
        energy = np.square(np.abs(np.fft.rfft(self._rows, n=whole))).sum(0)
        lags = np.fft.irfft(energy, n=whole)[: self.length]  # the rows' autocorrelation, summed over rows
        # Symmetric, with zeros between.
        circle = np.concatenate([lags, np.zeros(self._size + 1 - 2 * self.length), lags[:0:-1]])
        _, sizes, heads = np.linalg.svd(self._rows[:, : self.length], full_matrices=False)
        heads = (sizes[:, None] * heads)[sizes > _NEGLIGIBLE * sizes[0]]
        return np.fft.rfft(circle).real, np.fft.rfft(heads, n=self._size)

    def __call__(self, inverse: Tensor) -> Tensor:
        column, size = inverse.detach().numpy(), self._size
        circle, heads = self._spectra
        with np.errstate(over="ignore", invalid="ignore"):
            spectrum = np.fft.rfft(column, n=size)
            moved = np.fft.irfft(spectrum * circle, n=size)[: self.length]
            value, back = moved @ column, np.zeros_like(spectrum)
            for head in heads:
                # At lag k what is of t = -k; lag 0 is no negative t.
                before = np.fft.irfft(spectrum * head.conj(), n=size)
                before[0] = before[self.length :] = 0.0
                value -= before @ before
                back += np.fft.rfft(before) * head
            slopes = 2.0 * (moved - np.fft.irfft(back, n=size)[: self.length])
        # The value, with these slopes for autograd.
        return float(value) + torch.from_numpy(slopes) @ (inverse - inverse.detach())


@lru_cache(maxsize=4)
def _summed_noise(update: OptimizerConfig, steps: int, length: int, *, rows: int | None) -> _SummedNoise:
    return _SummedNoise(some_rows(workload(update, steps), rows), length)


def _decay_length(bands: int, steps: int) -> int:
    """How many entries of C^-1's column are mostly all that count."""
    return min(steps, max(DECAY_LENGTH, 8 * bands, 1 << (steps // 4).bit_length()))


def _sums(first: Tensor, later: Tensor, count: int) -> Tensor:
    """The sums of `first`, shape [buffers], and of what it becomes by each step with a matrix, shape [count].

    Steps are few leaps of many: their product with single steps is one product of two small matrices.
    """
    size = 1 << (count.bit_length() + 1) // 2
    single, leap = _powers(torch.ones_like(first), later.T, size)
    leaps, _ = _powers(first, leap.T, -(-count // size))
    return (leaps.T @ single).reshape(-1)[:count]


def _powers(first: Tensor, later: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`first` after each number of steps below `count`, shape [dimension, count], in doubling blocks.

    Also the matrix of as many steps as the next power of two.
    """
    columns = first[:, None]
    while columns.shape[1] < count:
        columns, later = torch.hstack([columns, later @ columns]), later @ later
    return columns[:, :count], later


@cache
def _inverse_function() -> type[torch.autograd.Function]:
    """`Inverse` below, whose base comes with PyTorch."""

    class Inverse(torch.autograd.Function):
        """The first column of the inverse of a Toeplitz matrix, shape [steps].

        column: that of the matrix, shape [at most steps]. Few bands are a recurrence; more take Newton's iteration on
        power series.
        """

        @staticmethod
        def forward(ctx: Any, column: Tensor, steps: int) -> Tensor:
            ctx.bands = len(column)
            if len(column) <= MAX_BANDS:
                impulse = np.zeros(steps)
                impulse[0] = 1.0
                with np.errstate(over="ignore", invalid="ignore"):
                    inverse = torch.from_numpy(signal.lfilter([1.0], column.numpy(), impulse))
                ctx.save_for_backward(column, inverse)
                return inverse
            inverse = 1.0 / column[:1]
            while (half := len(inverse)) < steps:
                # Of column * inverse the first half is (1, 0, ..), so that what wraps round on the circle may fall
                # there.
                there = torch.fft.rfft(inverse, n=2 * half)
                product = torch.fft.irfft(torch.fft.rfft(column[: 2 * half], n=2 * half) * there, n=2 * half)
                product[:half] = 0.0
                change = torch.fft.irfft(torch.fft.rfft(product) * there, n=2 * half)
                inverse = torch.cat([inverse, -change[half:]])
            inverse = inverse[:steps]
            ctx.save_for_backward(column, inverse)
            return inverse

        @staticmethod
        def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
            """By d(1 / c) = -(1 / c)^2 dc."""
            column, inverse = ctx.saved_tensors
            if ctx.bands <= MAX_BANDS:
                back = signal.lfilter([1.0], column.numpy(), slopes.numpy()[::-1])[::-1]
                lags = range(ctx.bands)
                moved = [-(back[lag:] @ inverse.numpy()[: len(inverse) - lag]) for lag in lags]
                return torch.tensor(moved, dtype=torch.float64), None
            # The adjoint of a convolution is a correlation, hence the conjugate; twice the length, so that none wraps.
            size = 2 * len(inverse)
            square = torch.fft.irfft(torch.fft.rfft(inverse, n=size).square(), n=size)[: len(inverse)]
            product = torch.fft.rfft(slopes, n=size) * torch.fft.rfft(square, n=size).conj()
            return -torch.fft.irfft(product, n=size)[: ctx.bands], None

    return Inverse


def _inverse(column: Tensor, steps: int) -> Tensor:
    inverse: Tensor = _inverse_function().apply(column, steps)  # type: ignore[no-untyped-call]
    return inverse
