"""What DP-SGD and its relatives share: the rate, their state, a noised step, the count where the number is private."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.optimizers import OptimizerConfig, OptimizerState
from algorithms.errors import RefusedError
from algorithms.gradients import L2, Clipping
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import (
    FixedOrder,
    FullBatch,
    Gaussian,
    Poisson,
    Release,
    gradient_release,
    total_release,
)


@dataclass(frozen=True)
class Batches:
    """How records are sampled, and the public divisor of a sum where the number of records is public."""

    sampling: FullBatch | Poisson | FixedOrder
    divisor: float | None

    @property
    def rate(self) -> float:
        """The probability with which a record takes part."""
        return self.sampling.rate


@dataclass(frozen=True)
class State:
    """moving: what the update moves. divisor: [], the public number sums are divided by; 0 until it is released."""

    moving: OptimizerState
    divisor: Tensor

    @property
    def parameters(self) -> Tensor:
        """Where the next gradient is taken, shape [d]."""
        return self.moving.parameters


@dataclass(frozen=True)
class Answer:
    """gradient: [d], a noised sum over `divisor`. divisor: the expected batch size, public or released."""

    gradient: Tensor
    divisor: float


def batches(public: PublicInfo, *, expected_batch_size: int | None, sampling_rate: float | None) -> Batches:
    """The sampling that the settings ask for.

    Raises RefusedError when a batch is larger than the data, and unless exactly the setting is given that fits:
    `expected_batch_size` where the number of records is public, `sampling_rate` where it is private.
    """
    if expected_batch_size is not None and sampling_rate is not None:
        fits, other = ("expected_batch_size", "sampling_rate")[:: 1 if public.records else -1]
        raise RefusedError(
            "expected_batch_size and sampling_rate were both given, and each says how large a batch is;"
            f" keep algorithm.{fits}, which fits the data, and leave algorithm.{other} empty."
        )
    if public.records is None:
        if sampling_rate is None:
            raise RefusedError(
                "the number of records is private, so expected_batch_size cannot become a sampling rate;"
                " set algorithm.sampling_rate and leave expected_batch_size empty."
            )
        return Batches(Poisson(sampling_rate), None)
    if expected_batch_size is None:
        raise RefusedError(
            "algorithm.expected_batch_size is empty, and the number of records is public; give the expected number of"
            " records in a batch there, and leave algorithm.sampling_rate empty."
        )
    if expected_batch_size > public.records:
        raise RefusedError(
            f"a batch of {expected_batch_size} was asked for, but there are {public.records} training records;"
            f" set algorithm.expected_batch_size to at most {public.records}."
        )
    return Batches(Poisson(expected_batch_size / public.records), float(expected_batch_size))


def classic_batches(
    target: Target, public: PublicInfo, *, name: str, expected_batch_size: int | None
) -> Batches:
    """Batches of the algorithm `name` by an older analysis: of sqrt(n) + 10 records where the settings give no number.

    Raises RefusedError where the number of records is private, for delta = 0 and where a batch is larger than the data.
    """
    records = public.known_records(f"'{name}'")
    if target.budget.delta == 0:
        raise RefusedError(f"the analysis of '{name}' has no pure epsilon; set privacy.delta above 0.")
    size = expected_batch_size or min(records, math.isqrt(records) + 10)
    return batches(public, expected_batch_size=size, sampling_rate=None)


def count_release(noise_multiplier: float) -> Release:
    """The release of the number of records, for data sets where that number is private."""
    return total_release(L2(1.0), Gaussian(noise_multiplier))


def noisy_count(barrier: Barrier, noise_multiplier: float) -> float:
    """The number of records by the release of `count_release`."""
    one = torch.ones(1)
    noise = Gaussian(noise_multiplier)
    return float(barrier.total(lambda features, label: one, bound=L2(1.0), noise=noise))


def expected_batch(barrier: Barrier, plan: Plan) -> float:
    """The expected batch size by a released count, at least 1."""
    return max(1.0, plan.sampling_rate * noisy_count(barrier, plan.target.count_noise))


def gradient_steps(
    sampled: Batches, clipping: Clipping, *, steps: int, count_noise: float
) -> Callable[[float], list[tuple[Release, int]]]:
    """The releases of a run of noised gradient steps, at the noise multiplier of a step.

    Where no divisor is public they begin with a count, at the noise multiplier `count_noise`.
    """
    first = [] if sampled.divisor is not None else [(count_release(count_noise), 1)]

    def releases(noise_multiplier: float) -> list[tuple[Release, int]]:
        return [
            *first,
            (gradient_release(sampled.sampling, clipping, Gaussian(noise_multiplier), 1.0), steps),
        ]

    return releases


def start(update: OptimizerConfig, parameters: Tensor, plan: Plan) -> State:
    """The state at the model's start; without a public divisor it waits for the count."""
    return State(update.start(parameters), torch.tensor(plan.divisor or 0.0, dtype=torch.float64))


def noisy_gradient(
    state: State,
    plan: Plan,
    barrier: Barrier,
    *,
    clipping: Clipping,
    sampling: FullBatch | None = None,
    noise_multiplier: float | None = None,
) -> Answer:
    """The noised sum of a step; before the first, the count where the number of records is private.

    sampling: without it a fresh Poisson sample at the plan's rate. noise_multiplier: without it the plan's.
    """
    divisor = float(state.divisor) or expected_batch(barrier, plan)
    gradient = barrier.gradient(
        state.parameters,
        sampling=sampling or Poisson(plan.sampling_rate),
        clipping=clipping,
        noise=Gaussian(noise_multiplier or plan.noise_multiplier),
        divisor=divisor,
    )
    return Answer(gradient, divisor)


def sgd_step(
    state: State,
    plan: Plan,
    barrier: Barrier,
    *,
    clipping: Clipping,
    update: OptimizerConfig,
    sampling: FullBatch | None = None,
    noise_multiplier: float | None = None,
) -> State:
    """One noised gradient, one update; what is asked is said in `asked`."""
    answer = noisy_gradient(
        state, plan, barrier, clipping=clipping, sampling=sampling, noise_multiplier=noise_multiplier
    )
    moving = update.apply(state.moving, answer.gradient, steps=plan.steps)
    return State(moving, torch.full_like(state.divisor, answer.divisor))
