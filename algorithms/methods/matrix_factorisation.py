"""Gradients with Gaussian noise that is correlated over steps: later steps cancel part of what earlier ones added.

One event for the whole run, charged with its first step: see `accounting.correlated`. A run that ends early costs the
whole. Records are divided into parts by a coin of their own, not by their place in a list as in the papers, so that one
record more or less moves no other.

The iterates are linear in the noisy gradients, with public coefficients: row t of the workload A holds the weights of
the gradients so far in iterate t. The iterates' noise is A C^-1 W. A strategy C is chosen for the least squared size,
|A C^-1|^2 times its squared sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, JsonValue

from algorithms.core.calibration import Batches, Releases, Repeated, calibrated_multiplier, plan_fixed
from algorithms.core.minibatch import (
    DPSGDState,
    SampledMethod,
    divisor_of,
    gradient_steps,
    noise_limit_factor,
)
from algorithms.core.optimizers import Bound, Count, OptimizerConfig
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.errors import RefusedError
from algorithms.gradients import L2, Clipping, Normalised
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting.events import CorrelatedDpEvent, event_from_json, event_to_json
from algorithms.privacy.mechanisms.correlated import (
    Buffered,
    Correlated,
    Strategy,
    Toeplitz,
    Tree,
    strategy_of,
)
from algorithms.privacy.mechanisms.release import Gaussian, Mechanism, Release, gradient_release
from algorithms.privacy.mechanisms.sampling import Cyclic, CyclicPoisson, FixedOrder, Poisson, Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from algorithms.privacy.barrier.barrier import Barrier
else:
    torch = lazy_module("torch")

optimize, signal, special = (
    lazy_module("scipy.optimize"),
    lazy_module("scipy.signal"),
    lazy_module("scipy.special"),
)

Array = NDArray[np.float64]

ROWS, MIN_ROWS = 256, 64
"""The most and the fewest iterates whose noise is counted, evenly spaced over longer runs."""
_MAX_WEIGHTS, _MAX_SEARCH_WEIGHTS = 2**21, 2**16
"""The most weights of gradients in iterates, of a workload and in a search; fewer rows of longer runs are counted."""
MAX_STEPS = 50_000
"""The largest number of steps."""
_MAX_LEAVES = 10**6
"""The most leaves of an event's tree; no run is as long, so that a larger tree would have the same noise."""
_ROUNDING = 1e-12
"""Relative, of 1 / (1 / k), which is a whole number k."""

_MAX_BANDS = 64
"""Bands that "auto" tries: each is a vector of memory."""
_SEARCH_ROWS, _MIN_SEARCH_ROWS = 32, 4
"""The most and the fewest iterates that a search for a strategy counts: more give nearly the same one."""
_MIN_GAIN = 0.01
"""Of the noise in the iterates, that twice the bands have to take away."""
_TOO_MUCH = 20.0
"""Of logarithms of noise: so much above the lowest is taken for all that is higher."""
_BANDED_SEARCH, _BUFFERED_SEARCH = {"ftol": 1e-5, "maxfun": 20}, {"ftol": 1e-6, "maxfun": 40}
"""The change of a logarithm of noise at which a search ends, and after how many of them it does at last."""
_MAX_LOGIT = 12.0
"""Of a buffer's share and decay in a search."""
DECAY_LENGTH, _NEGLIGIBLE = 2**12, 1e-12
"""The fewest entries of C^-1's column that a search for bands computes, and below what the others count for nothing."""


@dataclass(frozen=True)
class Workload:
    """The weights of gradients in iterates. rows: shape [iterates, steps]. after: the number of steps before each."""

    rows: Array
    after: tuple[int, ...]

    @property
    def steps(self) -> int:
        """The number of steps of the run."""
        return int(self.rows.shape[1])


@lru_cache(maxsize=4)
def workload(update: OptimizerConfig, steps: int, *, rows: int | None = None) -> Workload:
    """The workload of an optimizer: with averaging that of the average, and for Adam as if its scale were constant.

    Args:
        update: Its learning rate, schedule, momentum, weight decay and averaging, which are public.
        steps: Of the run.
        rows: The largest number of iterates that are counted; by default `ROWS`, and fewer of a long run.

    Returns:
        The workload, at its last row the last iterate.

    Raises:
        RefusedError: for more than `MAX_STEPS` steps.

    Example:
        >>> workload(OptimizerConfig(0.5, momentum=0.5), 3).rows.round(3).tolist()
        [[0.5, 0.0, 0.0], [0.75, 0.5, 0.0], [0.875, 0.75, 0.5]]
    """
    if steps > MAX_STEPS:
        raise RefusedError(
            "{steps:,} steps with correlated noise were asked for, but it is planned for at most"
            " {largest:,}; take fewer steps with larger batches, or a method with independent noise, such as"
            " 'dp_sgd'.",
            code="too_many_correlated_steps",
            steps=steps,
            largest=MAX_STEPS,
        )
    rows = rows or min(ROWS, max(MIN_ROWS, _MAX_WEIGHTS // steps))
    positions = np.linspace(steps - 1, 0, min(rows, steps), endpoint=rows >= steps)
    last = np.unique(positions.round().astype(int))
    return Workload(_weights_of_gradients(update, steps, last), tuple((last + 1).tolist()))


def _weights_of_gradients(update: OptimizerConfig, steps: int, last: NDArray[np.int64]) -> Array:
    """The weights of all gradients in the parameters after each of the steps `last`, shape [iterates, steps].

    An update is linear in the gradients, so that its adjoint, from the last step back, gives the weights of all. It
    moves three numbers of each iterate by the same matrices: the slopes by parameters, velocity and average. Products
    of these within the spans between iterates are computed for all spans at once.
    """
    rates = np.array([update.rate_at(step / steps) for step in range(steps)])
    shares = np.array([update.averaging_weight(step + 1, steps) for step in range(steps)])
    # Nesterov's step is along g + momentum v, the plain one along v
    of_gradient, of_velocity = (1.0, update.momentum) if update.nesterov else (0.0, 1.0)
    nothing, shrink = np.zeros(steps), 1.0 - rates * update.weight_decay
    moves = np.array(
        [
            [shrink, nothing, shrink * shares],
            [of_velocity * rates, nothing + update.momentum, of_velocity * rates * shares],
            [nothing, nothing, 1.0 - shares],
        ]
    ).transpose(2, 0, 1)
    # Slopes by the gradient of a step, [steps, 3].
    readings = moves[:, 1] + of_gradient * np.array([rates, nothing, rates * shares]).T

    starts = np.append(0, last[:-1] + 1)
    lengths = last + 1 - starts
    weights_of_slopes = np.empty((lengths.max(), len(last), 3))
    products = np.tile(np.eye(3), (len(last), 1, 1))  # [iterates, 3, 3]
    for back in range(lengths.max()):
        at = np.maximum(last - back, starts)
        weights_of_slopes[back] = (readings[at, None] @ products)[:, 0]  # [iterates, 3]
        products = np.where((back < lengths)[:, None, None], moves[at] @ products, products)

    # Slopes: by parameters, velocity and average, of each iterate.
    weights, slopes = np.zeros((len(last), steps)), np.zeros((3, len(last)))
    for span in reversed(range(len(last))):
        slopes[2, span] = 1.0
        read = weights_of_slopes[: lengths[span], span][::-1]
        weights[span:, starts[span] : last[span] + 1] = (read @ slopes[:, span:]).T
        slopes = products[span] @ slopes
    return weights


def squared_noise(strategy: Strategy, workload: Workload) -> Array:
    """The noise variance of a coordinate of each iterate, shape [iterates], if the rows of W have variance 1.

    Example:
        >>> squared_noise(Toeplitz((1.0,)), workload(OptimizerConfig(1.0), 4)).tolist()
        [1.0, 2.0, 3.0, 4.0]
    """
    if strategy == INDEPENDENT:
        return np.asarray(np.square(workload.rows).sum(1))
    if isinstance(strategy, Toeplitz | Buffered):
        return _squared_sums(workload.rows, strategy.inverse(workload.steps))
    assert isinstance(strategy, Tree)
    return strategy.squared_sums(workload.rows)


def mean_squared_noise(strategy: Strategy, workload: Workload) -> float:
    """The mean of `squared_noise` over the iterates."""
    return float(squared_noise(strategy, workload).mean())


INDEPENDENT = Toeplitz((1.0,))
"""The strategy of independent noise."""


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


def _some_rows(workload: Workload, count: int | None) -> Array:
    """About so many evenly spaced rows with the last one, shape [rows, steps]."""
    count = count or min(_SEARCH_ROWS, max(_MIN_SEARCH_ROWS, _MAX_SEARCH_WEIGHTS // workload.steps))
    every = max(1, len(workload.rows) // count)
    return workload.rows[::-1][::every][::-1].copy()  # from the last one back


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


def _fast_size(minimum: int) -> int:
    """The smallest size of at least `minimum` whose prime factors are 2 and a few of 3 and 5: transforms are fast."""
    odd = (3**threes * 5**fives for threes in range(4) for fives in range(4))
    sizes: list[int] = [part << (-(-minimum // part) - 1).bit_length() for part in odd]
    return min(sizes)


def _squared_sums(rows: Array, inverse: Array) -> Array:
    """The squared norms of the rows of A C^-1, for A of shape [iterates, steps] and the first column of C^-1."""
    steps, size = rows.shape[1], _fast_size(2 * rows.shape[1])
    spectrum = np.fft.rfft(inverse, n=size).conj()
    # One after the other, as all transforms together have no place in a processor's memory.
    sums = (np.fft.irfft(np.fft.rfft(row, n=size) * spectrum, n=size)[:steps] for row in rows)
    return np.array([row @ row for row in sums])


class _SummedNoise:
    """The squared noise of all iterates together, for the first column h of C^-1 where it has `length` entries.

    Iterate r holds sum_s a_rs h_(s - t) of the noise of step t. Over all whole t, negative ones too, the squares add up
    to h' R h for the rows' autocorrelation R, whatever the number of rows. What is of negative t, to be subtracted,
    depends on the first `length` entries of rows alone. These differ little between iterates, so that a few orthogonal
    combinations of them have the same squares.
    """

    def __init__(self, rows: Array, length: int) -> None:
        self.length, self._rows = length, rows
        self._size = _fast_size(2 * length)

    @cached_property
    def _spectra(self) -> tuple[Array, NDArray[np.complex128]]:
        """Of the autocorrelation, on a circle, and of the combinations of the rows' heads."""
        whole = _fast_size(2 * self._rows.shape[1])
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
    return _SummedNoise(_some_rows(workload(update, steps), rows), length)


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
            if len(column) <= _MAX_BANDS:
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
            if ctx.bands <= _MAX_BANDS:
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


Participation = Literal["cyclic_poisson", "fixed_order"]
_POINTS = 64


@dataclass(frozen=True)
class CorrelatedPlan:
    """What a plan stores about correlated noise.

    strategy: its event at a noise multiplier of 1, in the form of the card. participation, parts: of the records.
    noise_against_independent: the ratio of the root mean squared noise in the iterates to that of independent noise
    with the same cost, batches and steps; below 1 is a gain. course: for each number of steps, the standard deviation
    of a parameter's noise, and that with independent noise, in units of a record's share of a batch mean.
    """

    strategy: dict[str, JsonValue]
    participation: Participation
    parts: int
    noise_against_independent: float = 1.0
    course: tuple[tuple[int, float, float], ...] = ()

    @classmethod
    def of(cls, strategy: Strategy, participation: Participation, parts: int) -> CorrelatedPlan:
        """The plan's values for a strategy."""
        return cls(event_to_json(strategy.event(1.0, 1)), participation, parts)

    def correlation(self) -> Strategy:
        """The strategy, in the mechanism's form."""
        event = event_from_json(self.strategy)
        assert isinstance(event, CorrelatedDpEvent)
        return strategy_of(event)

    def beside_independent(
        self, iterates: Workload, *, multiplier: float, independent: float
    ) -> CorrelatedPlan:
        """The same with the expected gain over independent noise.

        multiplier, independent: noise multipliers of equal cost, with this strategy and with independent noise.
        """
        correlated = multiplier**2 * squared_noise(self.correlation(), iterates)
        other = independent**2 * squared_noise(INDEPENDENT, iterates)
        steps = np.unique(np.linspace(0, len(iterates.after) - 1, _POINTS).round().astype(int))
        course = [(iterates.after[i], math.sqrt(correlated[i]), math.sqrt(other[i])) for i in steps]
        share = math.sqrt(float(correlated.mean() / other.mean()))
        return replace(self, noise_against_independent=share, course=tuple(course))

    def sampling(self, rate: float) -> Cyclic:
        """How records are sampled, at this rate of a step over all records."""
        is_ordered = self.participation == "fixed_order"
        return FixedOrder(self.parts) if is_ordered else CyclicPoisson(self.parts, rate)

    def noise(self, plan: Plan, *, step: int) -> Correlated:
        """The noise of a step, counted from 0."""
        return Correlated(plan.noise_multiplier, self.correlation(), plan.steps, step)


def in_order(sampled: Batches, facts: PlanningFacts) -> Batches:
    """Batches of about the same size; each record is in one batch of every epoch."""
    parts = max(1, round(1.0 / sampled.rate))
    return Batches(FixedOrder(parts), None if facts.records is None else facts.records / parts)


def correlated_steps(
    correlation: CorrelatedPlan, sampled: Batches, clipping: Clipping, steps: int
) -> Releases:
    """Like `gradient_steps`; the first step is charged for all of them."""
    sampling, strategy = correlation.sampling(sampled.rate), correlation.correlation()

    def releases(noise_multiplier: float) -> Repeated:
        def step(number: int) -> Release:
            noise = Correlated(noise_multiplier, strategy, steps, number)
            return gradient_release(sampling, clipping, noise, 1.0)

        return [(step(0), 1)] + ([(step(1), steps - 1)] if steps > 1 else [])

    return releases


@dataclass(frozen=True)
class MatrixFactorisation(SampledMethod):
    """DP-MF: the noise of the iterates is the least by optimisation (Choquette-Choo et al. 2023, arXiv:2306.08153).

    Differences from the papers: Toeplitz strategies alone, optimised by L-BFGS; the workload has the schedule,
    momentum, weight decay and averaging of the run.

    expected_batch_size, sampling_rate, clip_norm, clipping, update: as in DP-SGD. participation: "cyclic_poisson", a
    Poisson sample of one of `bands` parts of the records in turn, or "fixed_order", every record once in a pass.
    strategy: "banded", the best banded Toeplitz matrix; "square_root", its closed form for a constant learning rate;
    "buffered", in fixed order alone. bands: steps over which noise is correlated, "auto" for as many as gain by the
    run's own numbers; with 1 and Poisson samples the run is DP-SGD, bit for bit. buffers: of a buffered strategy.

    Example:
        >>> from algorithms import MatrixFactorisation, OptimizerConfig
        >>> momentum = OptimizerConfig(learning_rate=2.0, momentum=0.9)
        >>> MatrixFactorisation(steps=300, expected_batch_size=256, update=momentum).bands
        'auto'
    """

    by_coordinate: ClassVar[bool] = True
    clip_norm: Bound = 1.0
    clipping: Literal["l2", "normalised"] = "l2"
    stability: Annotated[float, Field(ge=0, le=1e12)] = 0.01
    participation: Participation = "cyclic_poisson"
    strategy: Literal["banded", "square_root", "buffered"] = "banded"
    bands: Count | Literal["auto"] = "auto"
    buffers: Annotated[int, Field(ge=1, le=16)] = 4

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The strategy with the least noise in the iterates, and the least noise with which its run fits the target."""
        sampled = self.batches(facts)
        if self.participation == "fixed_order":
            sampled = in_order(sampled, facts)
        correlation, multiplier = self._best(sampled, target, facts)
        return plan_fixed(
            self._releases(correlation, sampled),
            target=target,
            facts=facts,
            sampled=sampled,
            steps=self.steps,
            noise_multiplier=multiplier,
            method_params=correlation,
        )

    def step(self, state: DPSGDState, plan: Plan, barrier: Barrier) -> DPSGDState:
        """One gradient with the noise of its step, one update."""
        correlated, clipping = plan.params(CorrelatedPlan), self._clipping()
        divisor, step = divisor_of(state, plan, barrier), int(state.optimizer_state.count)
        sampling: Sampling
        noise: Mechanism
        if self._is_dp_sgd(correlated):
            sampling, noise = Poisson(plan.sampling_rate), Gaussian(plan.noise_multiplier)
        else:
            sampling, noise = correlated.sampling(plan.sampling_rate), correlated.noise(plan, step=step)
        gradient = barrier.gradient(
            state.parameters, sampling=sampling, clipping=clipping, noise=noise, divisor=divisor
        )
        factor = noise_limit_factor(self.update, plan, clipping, divisor)
        moved = self.update.apply(state.optimizer_state, gradient, steps=plan.steps, factor=factor)
        return state.after(moved, divisor)

    def _best(self, sampled: Batches, target: Target, facts: PlanningFacts) -> tuple[CorrelatedPlan, float]:
        """The strategy that the settings ask for, the one with the least noise in the iterates; its multiplier."""
        iterates, lowest_noise = workload(self.update, self.steps), math.inf
        thinned = Workload(_some_rows(iterates, None), ())

        def noise_needed(correlation: CorrelatedPlan) -> float:
            return calibrated_multiplier(self._releases(correlation, sampled), target, facts, sampled)

        parts = sampled.sampling.parts if isinstance(sampled.sampling, FixedOrder) else 1
        best = CorrelatedPlan.of(INDEPENDENT, self.participation, parts)
        multiplier = independent = noise_needed(best)
        for strategy, parts in self._candidates(sampled):
            correlation = CorrelatedPlan.of(strategy, self.participation, parts)
            needed = independent if strategy == INDEPENDENT else noise_needed(correlation)
            noise = needed * math.sqrt(mean_squared_noise(strategy, thinned))
            if noise >= (1 - _MIN_GAIN) * lowest_noise:
                break
            best, multiplier, lowest_noise = correlation, needed, noise
        return best.beside_independent(iterates, multiplier=multiplier, independent=independent), multiplier

    def _candidates(self, sampled: Batches) -> Iterator[tuple[Strategy, int]]:
        """Strategies in the order of their memory, and the parts of the records that each goes with."""
        ordered = sampled.sampling.parts if isinstance(sampled.sampling, FixedOrder) else None
        if self.strategy == "buffered":
            if ordered is None:
                raise RefusedError(
                    "{method.strategy} is buffered, whose noise has no end, and a sample's gain is proven"
                    " for bands alone; set {method.participation} to fixed_order, or {method.strategy} to"
                    " banded.",
                    code="buffered_samples",
                )
            yield best_buffered(self.update, self.steps, self.buffers, ordered), ordered
            return
        max_bands = ordered or math.floor(1 / sampled.rate * (1 + _ROUNDING))
        if ordered is None and self.bands != "auto" and self.bands > max_bands:
            raise RefusedError(
                "{bands} bands were asked for, and one of as many parts of the records has less than a batch"
                " at a rate of {rate:.4g}; set {method.bands} to at most {max_bands}, or to auto.",
                code="too_many_bands",
                bands=self.bands,
                rate=sampled.rate,
                max_bands=max_bands,
            )
        limit = min(max_bands, self.steps, _MAX_BANDS)
        tried = [bands for bands in (1, 2, 4, 8, 16, 32) if bands < limit] + [limit]
        for bands in tried if self.bands == "auto" else [min(self.bands, self.steps)]:
            if self.strategy == "square_root":
                yield square_root(bands, momentum=self.update.momentum), ordered or bands
            else:
                yield best_banded(self.update, self.steps, bands), ordered or bands

    def _releases(self, correlation: CorrelatedPlan, sampled: Batches) -> Releases:
        steps = gradient_steps if self._is_dp_sgd(correlation) else partial(correlated_steps, correlation)
        return steps(sampled, self._clipping(), self.steps)

    def _is_dp_sgd(self, correlation: CorrelatedPlan) -> bool:
        return self.participation == "cyclic_poisson" and correlation.correlation() == INDEPENDENT

    def _clipping(self) -> L2 | Normalised:
        return L2(self.clip_norm) if self.clipping == "l2" else Normalised(self.clip_norm, self.stability)


@dataclass(frozen=True)
class DPFTRL(SampledMethod):
    """DP-FTRL: sums of gradients with noise from binary trees (Kairouz et al. 2021, arXiv:2103.00039), no sampling.

    Every record takes part once in a pass over all records. A tree over `restart` passes has a noisy sum for each of
    its nodes; a sum of the first t gradients is that of few nodes.

    Differences from the paper: a tree's last, incomplete nodes are not completed by virtual steps.

    expected_batch_size: where the number of records is public. sampling_rate: instead, where it is not; a pass has as
    many steps as batches. clip_norm: the L2 bound C of a record's gradient. restart: passes after which a new tree
    begins.

    Example:
        >>> from algorithms import DPFTRL
        >>> DPFTRL(steps=300, expected_batch_size=256, restart=2).restart  # a tree for two passes
        2
    """

    by_coordinate: ClassVar[bool] = True
    clip_norm: Bound = 1.0
    restart: Count = 1

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The least noise with which the count, if it is private, and the whole run fit the target."""
        sampled = in_order(self.batches(facts), facts)
        parts, iterates = round(1 / sampled.rate), workload(self.update, self.steps)

        def releases(correlation: CorrelatedPlan) -> Releases:
            return correlated_steps(correlation, sampled, L2(self.clip_norm), self.steps)

        tree, independent = (
            CorrelatedPlan.of(strategy, "fixed_order", parts)
            for strategy in (Tree(min(self.restart * parts, _MAX_LEAVES)), INDEPENDENT)
        )
        multiplier, other = (
            calibrated_multiplier(releases(correlation), target, facts, sampled)
            for correlation in (tree, independent)
        )
        correlation = tree.beside_independent(iterates, multiplier=multiplier, independent=other)
        return plan_fixed(
            releases(correlation),
            target=target,
            facts=facts,
            sampled=sampled,
            steps=self.steps,
            noise_multiplier=multiplier,
            method_params=correlation,
        )

    def step(self, state: DPSGDState, plan: Plan, barrier: Barrier) -> DPSGDState:
        """One gradient with the noise of its step, one update."""
        correlated, clipping = plan.params(CorrelatedPlan), L2(self.clip_norm)
        divisor = divisor_of(state, plan, barrier)
        gradient = barrier.gradient(
            state.parameters,
            sampling=correlated.sampling(plan.sampling_rate),
            clipping=clipping,
            noise=correlated.noise(plan, step=int(state.optimizer_state.count)),
            divisor=divisor,
        )
        factor = noise_limit_factor(self.update, plan, clipping, divisor)
        moved = self.update.apply(state.optimizer_state, gradient, steps=plan.steps, factor=factor)
        return state.after(moved, divisor)
