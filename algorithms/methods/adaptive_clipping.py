"""DP-SGD whose clipping follows what earlier releases say about gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from algorithms.core.calibration import SLACK, Repeated, calibrated_multiplier, plan_fixed
from algorithms.core.method import PaperProtocol, PaperSwitch, paper_protocol
from algorithms.core.minibatch import (
    DPSGDState,
    SampledMethod,
    check_no_noise_limit,
    divisor_of,
    plan_gradient_steps,
)
from algorithms.core.optimizers import Bound, Positive
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.errors import RefusedError
from algorithms.gradients import L2, Affine
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import epsilon
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.accounting.noise_search import calibrate
from algorithms.privacy.mechanisms.release import Gaussian, Release, gradient_release, norm_count_release
from algorithms.privacy.mechanisms.sampling import Poisson

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from algorithms.privacy.barrier.barrier import Barrier
else:
    torch = lazy_module("torch")

USUAL_SHARE = 0.1
"""Noise of the count over the bound of a record, as a share of the batch: the paper's sigma_b = B / 20 over 1/2."""


@dataclass(frozen=True)
class QuantileClippingState(DPSGDState):
    """DP-SGD's, and clip_norm: [], C of the next step."""

    clip_norm: Tensor


@dataclass(frozen=True)
class Counts:
    """What the plan keeps: the noise multiplier of the counts of norms."""

    count_noise_multiplier: float


@dataclass(frozen=True)
class QuantileClipping(SampledMethod):
    """DP-SGD whose clip norm follows a quantile of the gradients' norms (Andrew, Thakkar, McMahan and Ramaswamy 2021).

    arXiv:1905.03871, Algorithm 1, on single records instead of users. Two releases a step:
    PoissonSampled(B / n, Gaussian(z)) of the clipped gradients and PoissonSampled(B / n, Gaussian(b)) of how many of
    them stay within the clip norm; C <- C exp(-rate (fraction - quantile)) is a function of that.

    Differences from the paper: the count is of a fresh sample and is accounted as a release of its own, where the paper
    takes both from one sample and counts one Gaussian of joint noise; the noisy fraction is held to [0, 1] and C to
    public limits; Poisson samples, PLD.

    clip_norm: C at the start. min_clip_norm, max_clip_norm: its public limits. quantile: the share of records'
    gradients that C shall leave as they are. rate: how fast C follows. count_noise_multiplier: standard deviation of
    the noise on a count, in units of the 1/2 that a record adds; null for a tenth of the batch. The other settings are
    DP-SGD's.

    Example:
        >>> from algorithms import QuantileClipping
        >>> median = QuantileClipping(steps=300, expected_batch_size=256)  # C follows the median norm from 0.1 on
        >>> median.quantile, median.clip_norm
        (0.5, 0.1)
    """

    by_coordinate: ClassVar[bool] = True
    clip_norm: Bound = 0.1
    min_clip_norm: Bound = 1e-6
    max_clip_norm: Bound = 1e6
    quantile: Annotated[float, Field(ge=0, le=1)] = 0.5
    rate: Annotated[float, Field(gt=0, le=10)] = 0.2
    count_noise_multiplier: Positive | None = None

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The least noise on gradients that fits the target beside the counts; raises RefusedError where none does."""
        facts.check_norms()
        check_no_noise_limit(self.update, "quantile_clipping")
        if not self.min_clip_norm <= self.clip_norm <= self.max_clip_norm:
            raise RefusedError(
                "a start of {clip_norm:g} lies outside [{min_clip_norm:g}, {max_clip_norm:g}]; set"
                " {method.clip_norm} between {method.min_clip_norm} and {method.max_clip_norm}.",
                code="clip_norm_outside",
                clip_norm=self.clip_norm,
                min_clip_norm=self.min_clip_norm,
                max_clip_norm=self.max_clip_norm,
            )
        sampled = self.batches(facts)
        if self.count_noise_multiplier is None and sampled.divisor is None:
            raise RefusedError(
                "the number of records is private, so a tenth of the batch is not known; set"
                " {method.count_noise_multiplier}.",
                code="count_noise_missing",
            )
        counts = self.count_noise_multiplier or USUAL_SHARE * (sampled.divisor or 0.0)
        bound, counted = L2(self.clip_norm), norm_count_release(Gaussian(counts), sampled.sampling)
        self._check_counts(counted, counts, target)

        def releases(noise_multiplier: float, times: int = 1) -> Repeated:
            noised = gradient_release(sampled.sampling, bound, Gaussian(noise_multiplier), 1.0)
            return [(noised, times), (counted, times)]

        multiplier = calibrated_multiplier(partial(releases, times=self.steps), target, facts, sampled)
        return plan_fixed(
            lambda noise_multiplier: [*releases(noise_multiplier)] * self.steps,
            target=target,
            facts=facts,
            sampled=sampled,
            steps=self.steps,
            noise_multiplier=multiplier,
            method_params=Counts(counts),
        )

    def _check_counts(self, counted: Release, noise: float, target: Target) -> None:
        """Raises RefusedError where the counts of norms alone cost the target, with noise that leaves half of it."""
        budget, how = target.budget, target.accountant

        def counts_at(multiplier: float) -> Schedule:
            return [(replace(counted, noise=Gaussian(multiplier)).event(), self.steps)]

        alone = epsilon(counts_at(noise), budget.delta, accountant=how)
        if alone >= budget.epsilon:
            enough = calibrate(counts_at, Budget(budget.epsilon / 2, budget.delta), accountant=how)
            raise RefusedError(
                "the counts of norms alone cost epsilon {alone:.4g} with {method.count_noise_multiplier} {noise:g}, and"
                " {epsilon:g} was asked for; set it to {enough:g}, which leaves half of that to the gradients, or"
                " {target.epsilon} to more.",
                code="counts_above_target",
                alone=alone,
                noise=noise,
                epsilon=budget.epsilon,
                enough=math.ceil(enough),
            )

    def init(self, parameters: Tensor, plan: Plan) -> QuantileClippingState:
        """The state at the model's start."""
        usual = super().init(parameters, plan)
        return QuantileClippingState(
            usual.optimizer_state, usual.divisor, torch.tensor(self.clip_norm, dtype=torch.float64)
        )

    def step(self, state: QuantileClippingState, plan: Plan, barrier: Barrier) -> QuantileClippingState:
        """One noisy gradient, one noisy count of the norms within C, one update of the parameters and of C."""
        bound = L2(float(state.clip_norm))
        divisor, sampling = divisor_of(state, plan, barrier), Poisson(plan.sampling_rate)
        gradient = barrier.gradient(
            state.parameters,
            sampling=sampling,
            clipping=bound,
            noise=Gaussian(plan.noise_multiplier),
            divisor=divisor,
        )
        within = barrier.norm_count(
            state.parameters,
            bound=bound,
            noise=Gaussian(plan.params(Counts).count_noise_multiplier),
            sampling=sampling,
        )
        clip_norm = self.next_clip_norm(bound.norm, within / divisor + 0.5)  # each record adds +1/2 or -1/2
        moved = self.update.apply(state.optimizer_state, gradient, steps=plan.steps)
        return state.after(moved, divisor, clip_norm=torch.full_like(state.clip_norm, clip_norm))

    def next_clip_norm(self, clip_norm: float, fraction: float) -> float:
        """The next C from a noisy fraction of norms within this one."""
        moved = clip_norm * math.exp(-self.rate * (min(1.0, max(0.0, fraction)) - self.quantile))
        return min(self.max_clip_norm, max(self.min_clip_norm, moved))


@dataclass(frozen=True)
class AdaCliPState(DPSGDState):
    """DP-SGD's, and mean, deviation: m and s of the gradient's coordinates, [d] each."""

    mean: Tensor
    deviation: Tensor

    @property
    def scale(self) -> Tensor:
        """b, shape [d]: the scale of Theorem 1 at gamma = 1."""
        return torch.sqrt(self.deviation * self.deviation.sum())


@dataclass(frozen=True)
class AdaCliPParams:
    """What the plan keeps: the settings of a run with the paper's update."""

    paper_protocol: PaperProtocol | None = None


@dataclass(frozen=True)
class AdaCliP(SampledMethod):
    """AdaCliP: coordinate-wise adaptive clipping (Pichapati et al. 2019, arXiv:1908.07643, Algorithm 1).

    One release a step: PoissonSampled(B / n, Gaussian(z)) on sums of (g - m) / b, each of norm at most 1. The shift m
    and the scale b_i = sqrt(s_i sum_j s_j) are functions of past releases only, so they cost nothing.

    Differences from the paper (`paper_update` brings back its update of s):
    - Noise once on the sum, and m once on the mean: noise or m for each sampled record would reveal their number.
    - v = B ((g~ - m)^2 - (b z / B)^2): the noise that is really there is subtracted, and times B it estimates the
      variance of a record's gradient, which clipping needs, not that of the mean. The paper subtracts (b sigma)^2 for
      one record.
    - v is computed with m as it was before the update: with the new one, which holds g~ itself, it would be beta1^2
      times too small.
    - Of m no more is taken than 1000 scales together: further away rounding would be felt (see `Affine`).
    - Scale-free bounds: h2 = clip_norm^2 / d, so that b is at most clip_norm, and s starts there: the method begins as
      DP-SGD with that clip norm, and where noise hides the variances it stays near it. Absolute ones fit one model.

    gamma: the mean square that a transformed gradient may have in Theorem 1: b has the factor gamma^(-1/2), so that
    below 1 fewer records are clipped and there is more noise. beta1, beta2: what m and s^2 keep in a step. scale:
    "free", where `clip_norm` bounds the norm of b and h2 follows, or "paper", where h2 is given; both at gamma = 1.
    h1, h2: bounds of s^2. start: s_0, public; null for sqrt(h2), the most. paper_update: the printed update of s,
    from sqrt(h1 h2), in the paper's scale; plan and card state what it decides. The other settings are DP-SGD's.

    Example:
        >>> from algorithms import AdaCliP
        >>> AdaCliP(steps=300, expected_batch_size=256, clip_norm=0.5).scale
        'free'
    """

    paper_switch: ClassVar[PaperSwitch] = PaperSwitch(
        "paper_update",
        "Pichapati et al. 2019",
        {"gamma": 1.0, "beta1": 0.99, "beta2": 0.9, "h1": 1e-12, "scale": "paper", "start": None},
    )
    gamma: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    beta1: Annotated[float, Field(ge=0, le=1)] = 0.99
    beta2: Annotated[float, Field(ge=0, le=1)] = 0.9
    scale: Literal["free", "paper"] = "free"
    clip_norm: Bound = 1.0
    h1: Annotated[float, Field(ge=1e-24, le=1e12)] = 1e-12
    h2: Annotated[float, Field(gt=0, le=1e12)] | None = None
    start: Annotated[float, Field(gt=0, le=1e12)] | None = None
    paper_update: bool = False

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The least noise that fits the target; raises RefusedError where a public bound is missing or none is left."""
        self.start_at(facts.parameters)
        check_no_noise_limit(self.update, "adaclip")
        unit = Affine(1.0, torch.zeros(1), torch.ones(1))  # the cost is that of any shift and scale
        protocol = paper_protocol(self, scale="paper")
        return plan_gradient_steps(
            self.batches(facts),
            unit,
            steps=self.steps,
            target=target,
            facts=facts,
            method_params=None if protocol is None else AdaCliPParams(protocol),
        )

    def init(self, parameters: Tensor, plan: Plan) -> AdaCliPState:
        """The state at the model's start: no shift, an equal scale for all coordinates."""
        usual = super().init(parameters, plan)
        deviation = torch.full_like(parameters, self.start_at(len(parameters)))
        return AdaCliPState(usual.optimizer_state, usual.divisor, torch.zeros_like(parameters), deviation)

    def step(self, state: AdaCliPState, plan: Plan, barrier: Barrier) -> AdaCliPState:
        """One noisy sum of transformed gradients over a fresh Poisson sample, one update, the next m and s."""
        s, b, z = state.deviation, state.scale / math.sqrt(self.gamma), plan.noise_multiplier
        clipping = Affine.within_reach(1.0, state.mean, b)
        divisor, m = divisor_of(state, plan, barrier), clipping.shift
        transformed = barrier.gradient(
            state.parameters,
            sampling=Poisson(plan.sampling_rate),
            clipping=clipping,
            noise=Gaussian(z),
            divisor=divisor,
        )
        g = m + b * transformed  # the inverse of (g - m) / b
        v = self.variance((g - m).square(), b * z, divisor)
        return state.after(
            self.update.apply(state.optimizer_state, g, steps=plan.steps),
            divisor,
            mean=self.beta1 * m + (1.0 - self.beta1) * g,
            deviation=torch.sqrt(self.beta2 * s.square() + (1.0 - self.beta2) * v),
        )

    def variance(self, squares: Tensor, noise: Tensor, batch: float) -> Tensor:
        """v, shape [d], from (g~ - m)^2, the noise's deviation on the sum and the expected batch size."""
        exact = batch * (squares - (noise / batch).square())
        printed = squares - noise.square() / batch  # (b sigma)^2 with sigma = z / sqrt(B)
        variance = printed if self.paper_update else exact
        return variance.clamp(self.h1, self.highest(len(squares)))

    def highest(self, parameters: int) -> float:
        """h2 for a model of so many parameters; raises RefusedError where it is missing, or both given and derived."""
        needed = self.scale == "paper" or self.paper_update
        if needed and self.h2 is None:
            raise RefusedError(
                "a public bound is missing: the paper's scale needs the largest variance of a coordinate;"
                " set {method.h2}, or {method.scale} to free with paper_update false.",
                code="variance_bound_missing",
            )
        if not needed and self.h2 is not None:
            raise RefusedError(
                "{method.h2} was given, but follows from clip_norm where the scale is free; leave it empty,"
                " or set {method.scale} to paper.",
                code="variance_bound_given",
            )
        return self.h2 if self.h2 is not None else self.clip_norm**2 / parameters

    def start_at(self, parameters: int) -> float:
        """s_0 for a model of so many parameters; raises RefusedError where h1, h2 and it do not fit each other."""
        highest = self.highest(parameters)
        if self.h1 >= highest:
            raise RefusedError(
                "the bounds of a variance are h1 = {h1:g} and h2 = {highest:g}, and nothing lies between"
                " them; set {method.h1} lower, or a larger h2 or clip_norm.",
                code="variance_bounds_crossed",
                h1=self.h1,
                highest=highest,
            )
        usual = math.sqrt(self.h1 * highest) if self.paper_update else math.sqrt(highest)
        begin = usual if self.start is None else self.start
        if begin**2 > highest * (1.0 + SLACK):
            raise RefusedError(
                "a start of {start:g} is above sqrt(h2) = {largest:g}, the most that s can be; set"
                " {method.start} to at most that, or leave it empty.",
                code="scale_start_too_large",
                start=begin,
                largest=math.sqrt(highest),
            )
        return begin
