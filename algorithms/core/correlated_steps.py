"""What the methods with correlated noise share: who takes part in which step, their plan and a step of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import Batches, State, count_release, expected_batch
from algorithms.core.optimizers import OptimizerConfig
from algorithms.gradients import Clipping
from algorithms.privacy.accounting.calibration import calibrate
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.correlated import Buffered, Correlated, Strategy, Toeplitz, Tree
from algorithms.privacy.mechanisms.mechanisms import Cyclic, CyclicPoisson, FixedOrder
from algorithms.privacy.mechanisms.release import Release, gradient_release

Participation = Literal["cyclic_poisson", "fixed_order"]


@dataclass(frozen=True)
class CorrelatedPlan:
    """What a plan keeps of correlated noise.

    coefficients, or weights and decays, or leaves: of the strategy, as its event has them. participation, parts: of
    the records. noise_against_dp_sgd: the root mean squared noise in the iterates over that of independent noise at the
    same budget and batch, by the settings alone; below 1 it gains.
    """

    coefficients: tuple[float, ...]
    weights: tuple[float, ...]
    decays: tuple[float, ...]
    leaves: int
    participation: Participation
    parts: int
    noise_against_dp_sgd: float

    def strategy(self) -> Strategy:
        """As the mechanism takes it."""
        if self.leaves:
            return Tree(self.leaves)
        return Toeplitz(self.coefficients) if self.coefficients else Buffered(self.weights, self.decays)

    @classmethod
    def of(
        cls, strategy: Strategy, participation: Participation, parts: int, noise_against_dp_sgd: float
    ) -> "CorrelatedPlan":
        """What a plan keeps of a strategy."""
        event = strategy.event(1.0, 1)
        return cls(
            tuple(event.coefficients),
            tuple(event.weights),
            tuple(event.decays),
            event.leaves,
            participation,
            parts,
            noise_against_dp_sgd,
        )

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
    sampling, strategy = kept.sampling(sampled.rate), kept.strategy()

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
    noise = Correlated(plan.noise_multiplier, kept.strategy(), plan.steps, int(state.moving.count))
    gradient = barrier.gradient(
        state.parameters,
        sampling=kept.sampling(plan.sampling_rate),
        clipping=clipping,
        noise=noise,
        divisor=divisor,
    )
    moving = update.apply(state.moving, gradient, steps=plan.steps)
    return State(moving, torch.full_like(state.divisor, divisor))
