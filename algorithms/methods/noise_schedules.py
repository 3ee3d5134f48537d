"""DP-SGD with noise that changes between steps, on a public schedule that is fixed in advance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from algorithms.core.minibatch import (
    Allocation,
    DPSGDState,
    SampledMethod,
    check_no_noise_limit,
    divisor_of,
    multiplier_at,
    noise_factors,
    noise_limit_factor,
    plan_noise_schedule,
)
from algorithms.core.optimizers import Bound, Count, Share
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.settings import Strict
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting.epsilon import Array
from algorithms.privacy.mechanisms.release import Gaussian
from algorithms.privacy.mechanisms.sampling import Poisson

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from algorithms.privacy.barrier.barrier import Barrier
else:
    torch = lazy_module("torch")

MIN_SHARE = 1e-3
"""The least that noise may fall to, relative to that of the first step."""

_PART_OF_A_STEP = 1e-9
"""By so little, in epochs, a whole number of epochs may be missed by rounding; far below one step."""


@dataclass(frozen=True)
class DPSGDDecay(SampledMethod):
    """DP-SGD-Decay: the noise falls from epoch to epoch (Yu, Liu, Pu, Gursoy and Truex 2019, arXiv:1904.02200).

    One release a step: PoissonSampled(B / n, Gaussian(sigma_e)) in epoch e.

    Differences from the paper: sigma_0 is calibrated so that the whole schedule costs the target by PLD, where the
    paper sets sigma_0 and stops when a zCDP budget is used up; Poisson samples, an epoch is the 1 / rate steps in which
    a record takes part once on average; more than 24 different noise multipliers share 24 levels.

    form: sigma_e / sigma_0 in epoch e = 0, 1, .. of E: "exponential" exp(-rate e), "time" 1 / (1 + rate e), "step"
    (1 - rate)^floor(e / period), "polynomial" (1 - end) (1 - e / E)^power + end. rate, period, power,
    end: numbers of the form. The other settings are DP-SGD's.

    Example:
        >>> from algorithms import DPSGDDecay
        >>> halving = DPSGDDecay(steps=300, expected_batch_size=256, form="polynomial")  # to `end` of the noise
        >>> halving.end
        0.5
    """

    by_coordinate: ClassVar[bool] = True
    clip_norm: Bound = 1.0
    form: Literal["exponential", "time", "step", "polynomial"] = "exponential"
    rate: Annotated[float, Field(ge=0, lt=1)] = 0.01
    period: Count = 10
    power: Annotated[float, Field(ge=0, le=100)] = 1.0
    end: Share = 0.5

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The least sigma_0 whose whole schedule fits the target; raises RefusedError for noise that all but ends."""
        sampled = self.batches(facts)
        return plan_noise_schedule(
            self.shares(sampled.rate), sampled=sampled, clip_norm=self.clip_norm, target=target, facts=facts
        )

    def shares(self, sampling_rate: float) -> Array:
        """sigma / sigma_0 of each step, shape [steps].

        Raises RefusedError for noise that falls too far.
        """
        epochs = np.floor(np.arange(self.steps) * sampling_rate + _PART_OF_A_STEP)  # [steps]
        shares: Array
        match self.form:
            case "exponential":
                shares = np.exp(-self.rate * epochs)
            case "time":
                shares = 1.0 / (1.0 + self.rate * epochs)
            case "step":
                shares = (1.0 - self.rate) ** np.floor(epochs / self.period)
            case "polynomial":
                left = 1.0 - epochs / max(1.0, np.ceil(self.steps * sampling_rate - _PART_OF_A_STEP))
                shares = (1.0 - self.end) * left**self.power + self.end
        if shares[-1] < MIN_SHARE:
            raise RefusedError(
                "the noise would fall to {share:.1e} of its start, and {smallest:g} is the least allowed;"
                " set a lower {method.rate} or fewer steps.",
                code="noise_falls_too_far",
                share=shares[-1],
                smallest=MIN_SHARE,
            )
        return shares

    def step(self, state: DPSGDState, plan: Plan, barrier: Barrier) -> DPSGDState:
        """One gradient with the noise of its epoch over a fresh Poisson sample, one update."""
        clipping, divisor = L2(self.clip_norm), divisor_of(state, plan, barrier)
        gradient = barrier.gradient(
            state.parameters,
            sampling=Poisson(plan.sampling_rate),
            clipping=clipping,
            noise=Gaussian(multiplier_at(plan, int(state.optimizer_state.count))),
            divisor=divisor,
        )
        factor = noise_limit_factor(self.update, plan, clipping, divisor)
        moved = self.update.apply(state.optimizer_state, gradient, steps=plan.steps, factor=factor)
        return state.after(moved, divisor)


BoundedPositive = Annotated[float, Field(gt=0, le=1e12)]
BoundedNotNegative = Annotated[float, Field(ge=0, le=1e12)]


@dataclass(frozen=True)
class Decay(Strict):
    """How steps become shorter: eta_t is update.learning_rate times a factor of t = 0, 1, .. of T.

    form: "polynomial" (offset + rate t)^(-power); "linear_in_sqrt" 1 - (1 - end) sqrt(t / T); "constant" 1; "adaptive"
    1 / b_{t+1} with b_{t+1}^2 = b_t^2 + max(beta_t (|g|^2 - noise), least_growth), b_0^2 = offset and
    beta_t = max(beta / (t mod period + 1), 1), where noise is matched to alpha_t^2 = sqrt(offset + noise_growth t).
    offset, rate, power, end, beta, period, least_growth, noise_growth: numbers of the form.
    """

    form: Literal["polynomial", "linear_in_sqrt", "constant", "adaptive"] = "polynomial"
    offset: BoundedNotNegative = 20.0
    rate: BoundedNotNegative = 1.0
    power: Annotated[float, Field(ge=0, le=10)] = 0.5
    end: Annotated[float, Field(ge=-1e12, le=1)] = 0.01
    beta: BoundedNotNegative = 512.0
    period: Count = 195
    least_growth: BoundedPositive = 1e-5
    noise_growth: BoundedNotNegative = 0.01

    def factors(self, steps: int) -> Array:
        """What the learning rate is multiplied by, in "adaptive" as it is foreseen for the noise; shape [steps].

        Raises RefusedError where a step would have no length, none that is finite, or go backwards.
        """
        t, factor = np.arange(steps, dtype=np.float64), np.ones(steps)
        with np.errstate(divide="ignore"):
            match self.form:
                case "polynomial":
                    factor = (self.offset + self.rate * t) ** -self.power
                case "linear_in_sqrt":
                    factor = 1.0 - (1.0 - self.end) * np.sqrt(t / steps)
                case "adaptive":
                    factor = (self.offset + self.noise_growth * t) ** -0.5
        is_wrong = ~(np.isfinite(factor) & (factor > 0))
        if is_wrong.any():
            wrong = int(np.flatnonzero(is_wrong)[0])
            raise RefusedError(
                "the step size after {steps} steps would be {factor:.3g} times the learning rate, and every"
                " step needs a finite one above 0; change {method.decay}.",
                code="step_size_not_finite",
                steps=wrong,
                factor=factor[wrong],
            )
        return factor

    def growth(self, square: float, count: int) -> float:
        """What b^2 gains after `count` steps from a gradient of the given square, its noise's share taken off."""
        beta = max(self.beta / (count % self.period + 1), 1.0)
        return max(beta * square, self.least_growth)


@dataclass(frozen=True)
class ADPSGDState(DPSGDState):
    """DP-SGD's, and squared: [], b^2 of the adaptive step size."""

    squared: Tensor


@dataclass(frozen=True)
class ADPSGD(SampledMethod):
    """ADP-SGD: noise that grows as the steps of SGD become shorter (Wu, Wang, Cristali, Gu and Willett 2021).

    "Adaptive differentially private empirical risk minimization", Algorithms 1 and 3. One release a step:
    PoissonSampled(B / n, Gaussian(z alpha_t)), with alpha_t^2 ~ b_t = 1 / eta_t: of all noise schedules with the
    same sum of 1 / alpha_t^2 it adds the least noise to the parameters. Its mean of 1 / alpha_t^2 is 1.

    Formal guarantee: the PLD cost of the events with the noise that each step really has; z is calibrated so that the
    whole schedule meets the target, with `allocation: constant`, which is DP-SGD with the same steps, as with
    `matched`.

    Differences from the paper:
    - The standard deviation of the noise on the mean is alpha_t sigma, as in Algorithm 1; equations (3) and (11)
      multiply it by eta_t once more, and then the stated privacy does not hold.
    - The adaptive b follows the released gradient, less what the noise adds to its square, where the paper's follows
      the exact one: its norm would show in the length of the next step. That is post-processing, and costs nothing.
    - Methods are compared at an equal epsilon. Equal sums of 1 / alpha_t^2, as in the paper, are not that: with
      sampling the early steps of little noise cost more than their share (at its largest epsilon, 7.8 instead of 2.1).
    - Poisson samples instead of disjoint batches; at most 24 levels of noise, as near to alpha_t as that many can be.

    allocation: "matched" noise, alpha_t^2 ~ 1 / eta_t, "reversed", the same in reverse order, so that noise falls as
    steps become shorter, or "constant", the paper's baseline. decay: how steps become shorter. update: its learning
    rate is multiplied by the factors of `decay`, so its own schedule stays constant. The other settings are
    DP-SGD's.

    Example:
        >>> from algorithms import ADPSGD, OptimizerConfig
        >>> shrinking = ADPSGD(steps=300, expected_batch_size=256, update=OptimizerConfig(learning_rate=2.0))
        >>> shrinking.allocation, shrinking.decay.form
        ('matched', 'polynomial')
    """

    by_coordinate: ClassVar[bool] = True
    clip_norm: Bound = 1.0
    decay: Decay = field(default_factory=Decay)
    allocation: Allocation = "matched"

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The least noise with which the whole schedule fits the target; raises RefusedError for impossible steps."""
        if self.update.schedule != "constant":
            raise RefusedError(
                "the learning rate of 'adp_sgd' follows {method.decay}, and {schedule!r} was asked for"
                " besides; set {method.update.schedule} to constant.",
                code="schedule_given_twice",
                schedule=self.update.schedule,
            )
        check_no_noise_limit(self.update, "adp_sgd")
        sampled = self.batches(facts)
        return plan_noise_schedule(
            noise_factors(self.decay.factors(self.steps), self.allocation),
            sampled=sampled,
            clip_norm=self.clip_norm,
            target=target,
            facts=facts,
        )

    def init(self, parameters: Tensor, plan: Plan) -> ADPSGDState:
        """The state at the model's start."""
        usual = super().init(parameters, plan)
        squared = torch.tensor(self.decay.offset, dtype=torch.float64)
        return ADPSGDState(usual.optimizer_state, usual.divisor, squared)

    def step(self, state: ADPSGDState, plan: Plan, barrier: Barrier) -> ADPSGDState:
        """One gradient with the noise of its step over a fresh Poisson sample, one update of its length."""
        count = int(state.optimizer_state.count)
        multiplier = multiplier_at(plan, count)
        divisor = divisor_of(state, plan, barrier)
        gradient = barrier.gradient(
            state.parameters,
            sampling=Poisson(plan.sampling_rate),
            clipping=L2(self.clip_norm),
            noise=Gaussian(multiplier),
            divisor=divisor,
        )
        squared = state.squared
        if self.decay.form == "adaptive":
            noise = multiplier * self.clip_norm / divisor
            squared = squared + self.decay.growth(square_without_noise(gradient, noise), count)
            factor = float(squared) ** -0.5
        else:
            factor = float(self.decay.factors(plan.steps)[count])
        moved = self.update.apply(state.optimizer_state, gradient, steps=plan.steps, factor=factor)
        return state.after(moved, divisor, squared=squared)


def square_without_noise(gradient: Tensor, noise_std: float) -> float:
    """An unbiased estimate of the squared norm of a gradient before its noise, of that deviation a coordinate."""
    gradient = gradient.double()
    from algorithms.gradients.placement import total

    return total(gradient.square()) - gradient.numel() * noise_std**2  # less E |noise|^2 = d sigma^2
