"""What the methods with correlated noise share: who takes part in which step, their plan and a step of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from pydantic import JsonValue

from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import Batches, State, count_release, expected_batch
from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.strategies import Workload, squared_noise
from algorithms.gradients import Clipping
from algorithms.privacy.accounting.calibration import calibrate
from algorithms.privacy.accounting.events import CorrelatedDpEvent, event_from_json, event_to_json
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.correlated import Correlated, Strategy, Toeplitz, strategy_of
from algorithms.privacy.mechanisms.mechanisms import Cyclic, CyclicPoisson, FixedOrder
from algorithms.privacy.mechanisms.release import Release, gradient_release

Participation = Literal["cyclic_poisson", "fixed_order"]
INDEPENDENT = Toeplitz((1.0,))
"""The strategy of noise that is not correlated."""
_POINTS = 64


@dataclass(frozen=True)
class CorrelatedPlan:
    """What a plan keeps of correlated noise.

    strategy: its event at a noise multiplier of 1, as cards have it. participation, parts: of the records.
    noise_against_independent: the root mean squared noise in the iterates over that of independent noise of the same
    cost, batches and steps; below 1 it gains. course: by the number of steps, the standard deviation of a parameter's
    noise and that with independent noise, over the share of a record in a batch's mean.
    """

    strategy: dict[str, JsonValue]
    participation: Participation
    parts: int
    noise_against_independent: float = 1.0
    course: tuple[tuple[int, float, float], ...] = ()

    @classmethod
    def of(cls, strategy: Strategy, participation: Participation, parts: int) -> "CorrelatedPlan":
        """What a plan keeps of a strategy."""
        return cls(event_to_json(strategy.event(1.0, 1)), participation, parts)

    def correlation(self) -> Strategy:
        """The strategy as the mechanism takes it."""
        event = event_from_json(self.strategy)
        assert isinstance(event, CorrelatedDpEvent)
        return strategy_of(event)

    def beside_independent(self, asked: Workload, *, own: float, independent: float) -> "CorrelatedPlan":
        """The same with what it is expected to gain. own, independent: the noise multipliers of equal cost."""
        strategies = (self.correlation(), own), (INDEPENDENT, independent)
        one, other = (multiplier**2 * squared_noise(strategy, asked) for strategy, multiplier in strategies)
        some = np.unique(np.linspace(0, len(asked.after) - 1, _POINTS).round().astype(int))
        course = [(asked.after[i], math.sqrt(one[i]), math.sqrt(other[i])) for i in some]
        share = math.sqrt(float(one.mean() / other.mean()))
        return replace(self, noise_against_independent=share, course=tuple(course))

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
