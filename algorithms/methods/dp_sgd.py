"""Noisy gradient descent: DP-SGD, with noise by tight accounting or older analyses (Lee and Kifer 2018, section 5).

And its two relatives: DP-GD, with all records in each step, and descent without clipping (Song et al. 2013).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from algorithms.core.calibration import Batches, Claim, Releases, Repeated, events_of, plan_fixed
from algorithms.core.minibatch import (
    Descent,
    DPSGDState,
    SampledMethod,
    allocate_batches,
    batches,
    check_no_noise_limit,
    divisor_of,
    gradient_steps,
    moves_of,
    multiplier_at,
    noise_factors,
    noise_limit_factor,
    plan_gradient_steps,
    plan_noise_schedule,
)
from algorithms.core.optimizers import Bound, Count, OptimizerConfig, Positive, Share, StepCount
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.shrinkage import Shrinkage, ShrunkState, plan_errors, plan_shrinkage
from algorithms.errors import RefusedError
from algorithms.gradients import L2, Clipping, Normalised, PerLayer
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import rdp
from algorithms.privacy.accounting.noise_search import find_smallest
from algorithms.privacy.mechanisms.release import Gaussian
from algorithms.privacy.mechanisms.sampling import FullBatch, Poisson, RandomAllocation, Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from algorithms.privacy.barrier.barrier import Barrier
else:
    torch = lazy_module("torch")

_STEPS_AT_ONE, _MIN_STEPS, _MAX_STEPS = 150, 10, 1000
"""DP-GD's steps at epsilon 1 where the settings give none, and the fewest and most at any other. They grow with the
root of epsilon, so that steps and noise stay in balance."""

_BATCH_ABOVE_ROOT, _BUDGET_OF_A_STEP = 10, 500
"""Defaults of the older analyses: records of a batch above the root of n, and the n epsilon that pays for one step."""


@dataclass(frozen=True)
class DPSGD(SampledMethod):
    """DP-SGD: clip each record's gradient, sum over a Poisson sample, add Gaussian noise (Abadi et al. 2016, Alg. 1).

    One release a step: PoissonSampled(B / n, Gaussian(z)). Momentum, Adam, schedules and averaging come after it.

    Differences from the paper: Poisson samples as its analysis assumes, a sum divided by the expected batch size, and a
    noise multiplier calibrated to the whole schedule by PLD.

    steps: updates, each from a sample of its own. expected_batch_size: mean number of records in a sample; needs
    a public number of records. sampling_rate: for a private one: the probability of each record. update: the
    optimizer, for the noisy mean gradient. clip_norm: the L2 bound C of a record's gradient. clipping: "l2";
    "per_layer": layers share C equally; "normalised": g becomes C g / (|g| + stability), so that C only scales the
    learning rate (Bu et al. 2023, AUTO-S). stability: of normalised clipping alone. sampling: "poisson";
    "random_allocation": each record takes part in exactly one step of each pass over the data, drawn at random (Chua et
    al. 2024, balls and bins). Use it instead of shuffling: it needs less noise than Poisson samples, and batches have n
    / round(n / B) records on average. shrink_share: of the squared mu of the budget, for the last of two more releases
    of a linear model: the counts of its classes or labels, first, and how much lower than theirs its losses are, last;
    or for that alone, of a number or a count whose centre is released. What is published lies between the frequencies,
    or the centre, and the trained model, the nearer to them the less that gain is beyond chance; null for none.
    error_share: with it, of a number: of the squared mu, for each of six more releases of that gain on the way; the
    clip norm, and the noise with it, falls as errors do. It needs "l2" clipping and Poisson samples; null for none.

    Example:
        >>> from algorithms import DPSGD, OptimizerConfig
        >>> momentum = OptimizerConfig(learning_rate=2.0, momentum=0.9, schedule="linear")
        >>> DPSGD(steps=300, expected_batch_size=256, clip_norm=0.5, update=momentum).clipping
        'l2'
    """

    by_coordinate: ClassVar[bool] = True
    clip_norm: Bound = 1.0
    clipping: Literal["l2", "per_layer", "normalised"] = "l2"
    stability: Annotated[float, Field(ge=0, le=1e12)] = 0.01
    sampling: Literal["poisson", "random_allocation"] = "poisson"
    shrink_share: Share | None = None
    error_share: Annotated[Share | None, Field(exclude_if=lambda share: share is None)] = None

    def __post_init__(self) -> None:
        if self.shrink_share is not None:  # losses are those of whole vectors of parameters
            object.__setattr__(self, "by_coordinate", False)

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The least noise with which the count, if it is private, and all steps fit the target.

        Beside the releases of a shrinkage, if there is one.

        Raises RefusedError for an error_share without what it needs.
        """
        sampled, clipping = self.batches(facts), self._clipping(facts.layers)
        if self.sampling == "random_allocation":
            sampled = allocate_batches(sampled, facts, self.steps)
        if self.error_share is not None and (
            self.shrink_share is None or self.clipping != "l2" or self.sampling != "poisson"
        ):
            raise RefusedError(
                "{method.error_share} needs a {method.shrink_share}, {method.clipping} l2 and {method.sampling}"
                " poisson; set them, or leave it out.",
                code="errors_need_settings",
            )
        shrinkage = None
        if self.shrink_share is not None:
            shrinkage = plan_shrinkage(self.shrink_share, target, facts)
            if self.error_share is not None:
                errors = plan_errors(self.error_share, target, facts, self.steps)
                shrinkage = replace(shrinkage, errors=errors)
        return _plan_with(shrinkage, sampled, clipping, steps=self.steps, target=target, facts=facts)

    def init(self, parameters: Tensor, plan: Plan) -> DPSGDState:
        """The state at the model's start."""
        return _state_with_shrinkage(super().init(parameters, plan), plan)

    def step(self, state: DPSGDState, plan: Plan, barrier: Barrier) -> DPSGDState:
        """One noisy gradient over a fresh sample, one update; with a shrinkage, what it releases first or last, too."""
        count, divisor = int(state.optimizer_state.count), divisor_of(state, plan, barrier)
        records = divisor / plan.sampling_rate
        if isinstance(state, ShrunkState):
            state = (
                state.with_start(plan, barrier) if count == 0 else state.with_errors(plan, barrier, records)
            )
        clipping = self._clipping_at(count, state, plan)
        gradient = barrier.gradient(
            state.parameters,
            sampling=self._sampling_of(plan, step=count),
            clipping=clipping,
            noise=Gaussian(plan.noise_multiplier),
            divisor=divisor,
        )
        factor = noise_limit_factor(self.update, plan, clipping, divisor)
        moved = self.update.apply(state.optimizer_state, gradient, steps=plan.steps, factor=factor)
        after = state.after(moved, divisor)
        if isinstance(after, ShrunkState) and count + 1 == plan.steps:
            clippings = [self._clipping_at(step, after, plan) for step in range(plan.steps)]
            moves = moves_of(self.update, plan, clippings, divisor)
            return after.shrunk(self.released(after), plan, barrier, records, moves)
        return after

    def _clipping_at(self, step: int, state: DPSGDState, plan: Plan) -> L2 | PerLayer | Normalised:
        share = state.clip_share_at(step, plan) if isinstance(state, ShrunkState) else 1.0
        return self._clipping(plan.facts.layers) if share == 1.0 else L2(share * self.clip_norm)

    def _sampling_of(self, plan: Plan, *, step: int) -> Sampling:
        if self.sampling == "poisson":
            return Poisson(plan.sampling_rate)
        return RandomAllocation(round(1 / plan.sampling_rate), plan.steps, step)

    def _clipping(self, layers: int) -> L2 | PerLayer | Normalised:
        match self.clipping:
            case "l2":
                return L2(self.clip_norm)
            case "per_layer":
                return PerLayer((self.clip_norm / math.sqrt(layers),) * layers)
            case "normalised":
                return Normalised(self.clip_norm, self.stability)


def _plan_with(
    shrinkage: Shrinkage | None,
    sampled: Batches,
    clipping: Clipping,
    *,
    steps: int,
    target: Target,
    facts: PlanningFacts,
) -> Plan:
    """The plan of noisy gradient steps beside the releases of a shrinkage, if there is one."""
    planned = partial(plan_gradient_steps, sampled, clipping, steps=steps, target=target, facts=facts)
    if shrinkage is None:
        return planned()
    return planned(
        method_params=shrinkage,
        before=shrinkage.before,
        between=shrinkage.between,
        after=shrinkage.after,
    )


def _state_with_shrinkage(state: DPSGDState, plan: Plan) -> DPSGDState:
    """The first state, with what a shrinkage keeps beside it if one is planned."""
    if not plan.method_params:
        return state
    errors, unknown = plan.params(Shrinkage).errors, torch.tensor(math.nan)
    return ShrunkState(
        **vars(state),
        start=torch.zeros_like(state.parameters),
        clip_shares=torch.ones(0 if errors is None else len(errors.after), dtype=torch.float64),
        gain=unknown,
        kept=unknown.clone(),
    )


@dataclass(frozen=True)
class _LegacyAnalysis(Descent):
    """Settings that both older analyses have; the number of records must be public.

    expected_batch_size: null for sqrt(n) + 10. clip_norm: the L2 bound C of a record's gradient.
    """

    by_coordinate: ClassVar[bool] = True
    expected_batch_size: Count | None = None
    clip_norm: Bound = 3.0

    def step(self, state: DPSGDState, plan: Plan, barrier: Barrier) -> DPSGDState:
        """One noisy gradient over a fresh Poisson sample, one update."""
        clipping, divisor = L2(self.clip_norm), divisor_of(state, plan, barrier)
        gradient = barrier.gradient(
            state.parameters,
            sampling=Poisson(plan.sampling_rate),
            clipping=clipping,
            noise=Gaussian(plan.noise_multiplier),
            divisor=divisor,
        )
        factor = noise_limit_factor(self.update, plan, clipping, divisor)
        moved = self.update.apply(state.optimizer_state, gradient, steps=plan.steps, factor=factor)
        return state.after(moved, divisor)

    def _batches(self, target: Target, facts: PlanningFacts, name: str) -> Batches:
        """Raises RefusedError if the number of records is private, for delta = 0, and for a batch above the data."""
        records = facts.known_records(f"'{name}'")
        if target.budget.delta == 0:
            raise RefusedError(
                "the analysis of '{method}' has no pure epsilon; set {target.accountant} to pld or rdp, with a"
                " {target.delta} above 0.",
                code="analysis_needs_delta",
                method=name,
            )
        size = self.expected_batch_size or min(records, math.isqrt(records) + _BATCH_ABOVE_ROOT)
        return batches(facts, expected_batch_size=size, sampling_rate=None)


@dataclass(frozen=True)
class SGDAdv(_LegacyAnalysis):
    """SGD-Adv: DP-SGD whose noise follows from advanced composition (Bassily, Smith and Thakurta 2014).

    The budget is divided over T steps by advanced composition (Dwork and Roth 2014, Corollary 3.21), multiplied by
    n / 2B for the sampling, and turned into noise by the classical Gaussian mechanism (Dwork and Roth 2014, Appendix A)
    with sensitivity 2 C, that of replacing a record.

    Formal guarantee: not the analysis above, which asks for step epsilons below 1, but the PLD cost of the
    releases, PoissonSampled(B / n, Gaussian(z)) T times. The plan states that cost, and the other as `claimed_epsilon`.

    Differences from the paper's code: Poisson samples where it drew a fixed number of records.

    The number of records must be public. steps: null for n epsilon / 500. expected_batch_size: null for sqrt(n) + 10.
    clip_norm: the L2 bound C of a record's gradient.

    Example:
        >>> from algorithms import SGDAdv
        >>> SGDAdv().steps is None  # n epsilon / 500, once n and epsilon are known
        True
    """

    steps: StepCount | None = None
    update: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(0.1, weight_decay=1e-3))

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The noise by advanced composition, at what it costs; raises RefusedError where that is above the target."""
        sampled = self._batches(target, facts, "sgd_adv")
        budget = (facts.records or 0) * target.budget.epsilon
        steps = self.steps or max(1, round(budget / _BUDGET_OF_A_STEP))
        return plan_fixed(
            gradient_steps(sampled, L2(self.clip_norm), steps),
            target=target,
            facts=facts,
            sampled=sampled,
            steps=steps,
            noise_multiplier=noise_multiplier_by_advanced_composition(
                target.budget, steps=steps, sampling_rate=sampled.rate
            ),
            method_params=Claim(target.budget.epsilon),
        )


def noise_multiplier_by_advanced_composition(budget: Budget, *, steps: int, sampling_rate: float) -> float:
    """Standard deviation over C of each step's noise: half of delta is for the composition, half for the steps."""
    # Corollary 3.21 with half of delta: epsilon / (2 sqrt(2 T ln(2 / delta))).
    step_epsilon = budget.epsilon / (2 * math.sqrt(2 * steps * math.log(2 / budget.delta)))
    step_delta = budget.delta / (2 * steps)
    amplified = step_epsilon / (2 * sampling_rate)
    return 2 / amplified * math.sqrt(2 * math.log(1.25 / step_delta))  # sensitivity 2 C, over C


_MOMENTS = np.arange(1, 33)
"""Those of the privacy loss that the first moments accountant bounds."""

_MIN_MULTIPLIER, _MAX_MULTIPLIER, _MULTIPLIER_TOLERANCE = 0.3, 1e6, 1e-6
"""Noise multipliers between which the search by moments looks, and how exactly, relatively."""


@dataclass(frozen=True)
class SGDMA(_LegacyAnalysis):
    """SGD-MA: DP-SGD whose noise follows from the first moments accountant (Abadi et al. 2016, section 3.2).

    That accountant bounds the moments of the privacy loss at the integers 1 to 32 and turns them into epsilon by
    Markov's inequality, so it never states less than ln(1 / delta) / 32.

    Formal guarantee: the PLD cost of the releases, PoissonSampled(B / n, Gaussian(z)) T times, which is lower. The plan
    states that cost, and the accountant's as `claimed_epsilon`.

    Differences from the paper's code: Poisson samples where it drew a fixed number of records; the best of all 32
    moments where it took the last; the noise is calibrated to the target where it was fixed and epsilon a result
    (`noise_multiplier` fixes it again).

    The number of records must be public.

    expected_batch_size: null for sqrt(n) + 10. clip_norm: the L2 bound C of a record's gradient. noise_multiplier:
    standard deviation over C; null for the least that the moments accountant allows.

    Example:
        >>> from algorithms import SGDMA
        >>> SGDMA(expected_batch_size=256).steps
        10000
    """

    steps: StepCount = 10_000
    clip_norm: Bound = 4.0
    noise_multiplier: Positive | None = None
    update: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(0.05))

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The noise by the moments accountant, at what it costs; raises RefusedError where that is above the target."""
        sampled = self._batches(target, facts, "sgd_ma")
        releases = gradient_steps(sampled, L2(self.clip_norm), self.steps)
        multiplier = self.noise_multiplier or calibrate_by_moments(releases, target.budget)
        return plan_fixed(
            releases,
            target=target,
            facts=facts,
            sampled=sampled,
            steps=self.steps,
            noise_multiplier=multiplier,
            method_params=Claim(epsilon_by_moments(releases(multiplier), target.budget.delta)),
        )


def epsilon_by_moments(releases: Repeated, delta: float) -> float:
    """The epsilon of releases at `delta` by moments 1 to 32: least of (moment + ln(1 / delta)) / its number.

    A moment m of the privacy loss is m times the Rényi divergence of order m + 1 (Abadi et al. 2016, Theorem 2).
    """
    divergences = rdp(events_of(releases), orders=tuple(float(moment + 1) for moment in _MOMENTS))  # [32]
    return float(np.min(divergences - math.log(delta) / _MOMENTS))


def calibrate_by_moments(releases: Releases, budget: Budget) -> float:
    """The least noise multiplier whose epsilon by moments is within the budget; raises RefusedError if none is."""
    multiplier = find_smallest(
        lambda multiplier: epsilon_by_moments(releases(multiplier), budget.delta),
        budget.epsilon,
        low=_MIN_MULTIPLIER,
        high=_MAX_MULTIPLIER,
        tolerance=_MULTIPLIER_TOLERANCE,
    )
    if multiplier is None:
        raise RefusedError(
            "the moments accountant states no epsilon below {smallest:.4g} at delta {delta:g}, and"
            " {epsilon:g} was asked for; set {target.epsilon} to more, or give {method.noise_multiplier}.",
            code="below_moments",
            smallest=-math.log(budget.delta) / _MOMENTS[-1],
            delta=budget.delta,
            epsilon=budget.epsilon,
        )
    return multiplier


@dataclass(frozen=True)
class DPGD(Descent):
    """DP-GD: noisy gradient descent on all records, with momentum: the method to beat on convex problems.

    One release a step: Gaussian(z) on the sum of all clipped gradients. No sampling, so the cost of all steps together
    is that of one Gaussian release, and known exactly (Dong, Roth and Su 2022, section 3). The method is Song,
    Chaudhuri and Sarwate 2013 and Bassily, Smith and Thakurta 2014 without their sampling.

    Differences from the papers: clipped gradients instead of a bound on them, heavy-ball momentum, a learning rate that
    falls to 0, the last iterate. The defaults are one setting for every epsilon: the steps are a public function of it.

    steps: null for 150 sqrt(epsilon), from 10 to 1000. clip_norm: the L2 bound C of a record's gradient.
    allocation: "matched" noise grows as steps become shorter, its square with 1 / eta_t, which adds the least to the
    parameters (Wu, Wang, Cristali, Gu and Willett 2021); "constant" is the same in each step.
    update: the learning rate is of the mean of clipped gradients; fields that are not set take OptimizerConfig's
    defaults.

    Example:
        >>> from algorithms import DPGD
        >>> DPGD(steps=30, clip_norm=1.0).update.momentum  # the default of full batches
        0.8
    """

    by_coordinate: ClassVar[bool] = True
    steps: StepCount | None = None
    clip_norm: Bound = 2.0
    allocation: Literal["constant", "matched"] = "constant"
    update: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(1.25, schedule="linear", momentum=0.8)
    )

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The least noise with which the count, if it is private, and all steps fit the target."""
        steps = self.steps or steps_for(target.budget.epsilon)
        every = Batches(FullBatch(), None if facts.records is None else float(facts.records))
        if self.allocation == "constant":
            return plan_gradient_steps(every, L2(self.clip_norm), steps=steps, target=target, facts=facts)
        check_no_noise_limit(self.update, "dp_gd")
        rates = np.array([self.update.rate_at(step / steps) for step in range(steps)])
        weights = noise_factors(rates, self.allocation)
        return plan_noise_schedule(
            weights, sampled=every, clip_norm=self.clip_norm, target=target, facts=facts
        )

    def multiplier_at(self, plan: Plan, count: int) -> float:
        """The noise multiplier of the step after `count` other steps."""
        return plan.noise_multiplier if self.allocation == "constant" else multiplier_at(plan, count)

    def step(self, state: DPSGDState, plan: Plan, barrier: Barrier) -> DPSGDState:
        """One noisy gradient over all records, one update."""
        clipping, divisor = L2(self.clip_norm), divisor_of(state, plan, barrier)
        gradient = barrier.gradient(
            state.parameters,
            sampling=FullBatch(),
            clipping=clipping,
            noise=Gaussian(self.multiplier_at(plan, int(state.optimizer_state.count))),
            divisor=divisor,
        )
        factor = noise_limit_factor(self.update, plan, clipping, divisor)
        moved = self.update.apply(state.optimizer_state, gradient, steps=plan.steps, factor=factor)
        return state.after(moved, divisor)


def steps_for(epsilon: float) -> int:
    """The number of steps for an epsilon where the settings give none."""
    return round(min(_MAX_STEPS, max(_MIN_STEPS, _STEPS_AT_ONE * math.sqrt(epsilon))))


@dataclass(frozen=True)
class NormBoundSGD(SampledMethod):
    """Noisy SGD without clipping: the bound on a record's gradient is public (Song, Chaudhuri and Sarwate 2013).

    One release a step: PoissonSampled(B / n, Gaussian(z)). A record's gradient is at most the loss's slope times the
    norm that the data card allows a record's features, so no gradient is changed and nothing about the data is guessed.

    Differences from the paper: Gaussian instead of gamma-distributed noise, Poisson samples, PLD accounting.

    expected_batch_size: where the number of records is public. sampling_rate: instead, where it is not. shrink_share:
    as of `DPSGD`, of the squared mu, for each of two more releases by which a classifier is shrunk towards the
    frequencies of its classes or labels; null for none.

    Example:
        >>> from algorithms import NormBoundSGD
        >>> NormBoundSGD(steps=300, expected_batch_size=256).update.optimizer
        'sgd'
    """

    by_coordinate: ClassVar[bool] = True
    shrink_share: Annotated[Share | None, Field(exclude_if=lambda share: share is None)] = None

    def __post_init__(self) -> None:
        if self.shrink_share is not None:  # losses are those of whole vectors of parameters
            object.__setattr__(self, "by_coordinate", False)

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The least noise that fits the target; raises RefusedError where no public bound on gradients exists."""
        sampled, clipping = self.batches(facts), _gradient_bound(facts)
        share = self.shrink_share
        shrinkage = None if share is None else plan_shrinkage(share, target, facts)
        return _plan_with(shrinkage, sampled, clipping, steps=self.steps, target=target, facts=facts)

    def init(self, parameters: Tensor, plan: Plan) -> DPSGDState:
        """The state at the model's start."""
        return _state_with_shrinkage(super().init(parameters, plan), plan)

    def step(self, state: DPSGDState, plan: Plan, barrier: Barrier) -> DPSGDState:
        """One noisy gradient over a fresh sample, one update; with a shrinkage, what it releases first or last, too."""
        count, divisor = int(state.optimizer_state.count), divisor_of(state, plan, barrier)
        clipping = _gradient_bound(plan.facts)
        if isinstance(state, ShrunkState) and count == 0:
            state = state.with_start(plan, barrier)
        gradient = barrier.gradient(
            state.parameters,
            sampling=Poisson(plan.sampling_rate),
            clipping=clipping,
            noise=Gaussian(plan.noise_multiplier),
            divisor=divisor,
        )
        factor = noise_limit_factor(self.update, plan, clipping, divisor)
        moved = self.update.apply(state.optimizer_state, gradient, steps=plan.steps, factor=factor)
        after = state.after(moved, divisor)
        if isinstance(after, ShrunkState) and count + 1 == plan.steps:
            moves = moves_of(self.update, plan, [clipping] * plan.steps, divisor)
            records = divisor / plan.sampling_rate
            return after.shrunk(self.released(after), plan, barrier, records, moves)
        return after


def _gradient_bound(facts: PlanningFacts) -> L2:
    """The public bound as a clip norm: the barrier still holds each record to it, should a data card be wrong."""
    return L2(facts.gradient_norm(2))
