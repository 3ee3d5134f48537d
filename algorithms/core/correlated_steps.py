"""What the methods with correlated noise share: who takes part in which step, their plan and a step of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue

from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import Batches, State, count_release, expected_batch
from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.strategies import squared_noise, workload
from algorithms.gradients import Clipping
from algorithms.privacy.accounting.calibration import calibrate
from algorithms.privacy.accounting.events import CorrelatedDpEvent, event_from_json, event_to_json
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.correlated import Correlated, Strategy, Toeplitz, strategy_of
from algorithms.privacy.mechanisms.mechanisms import Cyclic, CyclicPoisson, FixedOrder
from algorithms.privacy.mechanisms.release import Release, gradient_release

Array = NDArray[np.float64]
Participation = Literal["cyclic_poisson", "fixed_order"]


@dataclass(frozen=True)
class CorrelatedPlan:
    """What a plan keeps of correlated noise.

    strategy: its event at a noise multiplier of 1, as cards have it. participation, parts: of the records.
    independent_noise_multiplier: of a run with the same cost, batches and steps. noise_against_independent: the root
    mean squared noise in the iterates over that of such a run; below 1 it gains.
    """

    strategy: dict[str, JsonValue]
    participation: Participation
    parts: int
    independent_noise_multiplier: float = 1.0
    noise_against_independent: float = 1.0

    @classmethod
    def of(cls, strategy: Strategy, participation: Participation, parts: int) -> "CorrelatedPlan":
        """What a plan keeps of a strategy."""
        return cls(event_to_json(strategy.event(1.0, 1)), participation, parts)

    def correlation(self) -> Strategy:
        """The strategy as the mechanism takes it."""
        event = event_from_json(self.strategy)
        assert isinstance(event, CorrelatedDpEvent)
        return strategy_of(event)

    def sampling(self, rate: float) -> Cyclic:
        """Who takes part, at a rate of a step over all records."""
        is_ordered = self.participation == "fixed_order"
        return FixedOrder(self.parts) if is_ordered else CyclicPoisson(self.parts, rate)


def in_order(sampled: Batches, public: PublicInfo) -> Batches:
    """Batches of about the same size of which each record is in one a pass."""
    parts = max(1, round(1.0 / sampled.rate))
    return Batches(FixedOrder(parts), None if public.records is None else public.records / parts)


def correlated_steps(
    kept: CorrelatedPlan, sampled: Batches, clipping: Clipping, *, steps: int, count_noise: float
) -> Callable[[float], list[tuple[Release, int]]]:
    """As `gradient_steps`; the first step is charged for all of them."""
    first = [] if sampled.divisor is not None else [(count_release(count_noise), 1)]
    sampling, strategy = kept.sampling(sampled.rate), kept.correlation()

    def releases(noise_multiplier: float) -> list[tuple[Release, int]]:
        def step(number: int) -> Release:
            noise = Correlated(noise_multiplier, strategy, steps, number)
            return gradient_release(sampling, clipping, noise, 1.0)

        return [*first, (step(0), 1)] + ([(step(1), steps - 1)] if steps > 1 else [])

    return releases


def multiplier(releases_at: Callable[[float], Sequence[tuple[Release, int]]], target: Target) -> float:
    """The least noise multiplier with which releases fit a target, what is released before them included."""
    return calibrate(
        lambda z: [*target.prior_events, *((release.event(), count) for release, count in releases_at(z))],
        target.budget,
        accountant=target.accountant,
    )


def correlated_step(
    state: State, plan: Plan, barrier: Barrier, *, clipping: Clipping, update: OptimizerConfig
) -> State:
    """One gradient with the noise of its step, one update; before the first, the count where it is private."""
    kept = plan.params(CorrelatedPlan)
    divisor = float(state.divisor) or expected_batch(barrier, plan)
    noise = Correlated(plan.noise_multiplier, kept.correlation(), plan.steps, int(state.moving.count))
    gradient = barrier.gradient(
        state.parameters,
        sampling=kept.sampling(plan.sampling_rate),
        clipping=clipping,
        noise=noise,
        divisor=divisor,
    )
    moving = update.apply(state.moving, gradient, steps=plan.steps)
    return State(moving, torch.full_like(state.divisor, divisor))


@dataclass(frozen=True)
class NoiseByStep:
    """Standard deviations of a parameter after some numbers of steps, over the bound of a record's share of a batch."""

    after: tuple[int, ...]
    correlated: Array
    independent: Array


def noise_in_parameters(
    kept: CorrelatedPlan, update: OptimizerConfig, *, steps: int, multiplier: float
) -> NoiseByStep:
    """The noise in what a run would publish, beside that of independent noise of the same cost."""
    asked = workload(update, steps)
    own, other = (squared_noise(strategy, asked) for strategy in (kept.correlation(), Toeplitz((1.0,))))
    return NoiseByStep(
        asked.after, multiplier * np.sqrt(own), kept.independent_noise_multiplier * np.sqrt(other)
    )
