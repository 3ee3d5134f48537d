"""The noise of correlated steps in a run's iterates, which are linear in the noisy gradients.

Row t of the workload A holds the weights of the gradients so far in iterate t; they are public. A strategy C draws
C^-1 W, so that the iterates' noise is A C^-1 W.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from algorithms.core.optimizers import OptimizerConfig
from algorithms.errors import RefusedError
from algorithms.privacy.mechanisms.correlated import Buffered, Strategy, Toeplitz, Tree

Array = NDArray[np.float64]

ROWS, MIN_ROWS = 256, 64
"""The most and the fewest iterates whose noise is counted, evenly spaced over longer runs."""
_MAX_WEIGHTS, _MAX_SEARCH_WEIGHTS = 2**21, 2**16
"""The most weights of gradients in iterates, of a workload and in a search; fewer rows of longer runs are counted."""
MAX_STEPS = 50_000
"""The largest number of steps."""
_SEARCH_ROWS, _MIN_SEARCH_ROWS = 32, 4
"""The most and the fewest iterates that a search for a strategy counts: more give nearly the same one."""

INDEPENDENT = Toeplitz((1.0,))
"""The strategy of independent noise."""


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


def some_rows(workload: Workload, count: int | None) -> Array:
    """About so many evenly spaced rows with the last one, shape [rows, steps]."""
    count = count or min(_SEARCH_ROWS, max(_MIN_SEARCH_ROWS, _MAX_SEARCH_WEIGHTS // workload.steps))
    every = max(1, len(workload.rows) // count)
    return workload.rows[::-1][::every][::-1].copy()  # from the last one back


def _squared_sums(rows: Array, inverse: Array) -> Array:
    """The squared norms of the rows of A C^-1, for A of shape [iterates, steps] and the first column of C^-1."""
    steps, size = rows.shape[1], fast_size(2 * rows.shape[1])
    spectrum = np.fft.rfft(inverse, n=size).conj()
    # One after the other, as all transforms together have no place in a processor's memory.
    sums = (np.fft.irfft(np.fft.rfft(row, n=size) * spectrum, n=size)[:steps] for row in rows)
    return np.array([row @ row for row in sums])


def fast_size(minimum: int) -> int:
    """The smallest size of at least `minimum` whose prime factors are 2 and a few of 3 and 5: transforms are fast."""
    odd = (3**threes * 5**fives for threes in range(4) for fives in range(4))
    sizes: list[int] = [part << (-(-minimum // part) - 1).bit_length() for part in odd]
    return min(sizes)
