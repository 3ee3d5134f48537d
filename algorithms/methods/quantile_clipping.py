"""DP-SGD whose clip norm follows a quantile of the gradients' norms (Andrew, Thakkar, McMahan and Ramaswamy 2021).

arXiv:1905.03871, Algorithm 1, on single records instead of users. Two releases a step:
PoissonSampled(B / n, Gaussian(z)) of the clipped gradients and PoissonSampled(B / n, Gaussian(b)) of how many of them
stay within the clip norm; C <- C exp(-rate (fraction - quantile)) is a function of that.

Differences from the paper: the count is of a fresh sample and is accounted as a release of its own, where the paper
takes both from one sample and counts one Gaussian of joint noise; the noisy fraction is held to [0, 1] and C to public
limits; Poisson samples, PLD.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from algorithms.core.calibration import Releases, Repeated
from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import Batches, Sampled, State, noisy_gradient, plan_steps
from algorithms.core.optimizers import Bound, Positive
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gaussian, Poisson, gradient_release, norm_count_release

USUAL_SHARE = 0.1
"""Noise of the count over the bound of a record, as a share of the batch: the paper's sigma_b = B / 20 over 1/2."""


@dataclass(frozen=True)
class ClippedState(State):
    """DP-SGD's, and clip_norm: [], C of the next step."""

    clip_norm: Tensor


@dataclass(frozen=True)
class Counts:
    """What the plan keeps: the noise multiplier of the counts of norms."""

    count_noise_multiplier: float


@dataclass(frozen=True)
class QuantileClipping(Sampled):
    """Settings of DP-SGD with quantile clipping.

    clip_norm: C at the start. min_clip_norm, max_clip_norm: its public limits. quantile: the share of records'
    gradients that C shall leave as they are. rate: how fast C follows. count_noise_multiplier: standard deviation of
    the noise on a count, in units of the 1/2 that a record adds; null for a tenth of the batch. The other settings are
    DP-SGD's.
    """

    clip_norm: Bound = 0.1
    min_clip_norm: Bound = 1e-6
    max_clip_norm: Bound = 1e6
    quantile: Annotated[float, Field(ge=0, le=1)] = 0.5
    rate: Annotated[float, Field(gt=0, le=10)] = 0.2
    count_noise_multiplier: Positive | None = None

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The least noise on gradients that fits the target beside the counts; raises RefusedError where none does."""
        if not self.min_clip_norm <= self.clip_norm <= self.max_clip_norm:
            raise RefusedError(
                f"a start of {self.clip_norm:g} lies outside [{self.min_clip_norm:g}, {self.max_clip_norm:g}]; set"
                " algorithm.clip_norm between algorithm.min_clip_norm and algorithm.max_clip_norm."
            )
        sampled = self.sampled(public)
        counts = self._count_noise(sampled)
        return plan_steps(
            self._releases(sampled, Gaussian(counts), target.count_noise),
            sampled,
            steps=self.steps,
            target=target,
            public=public,
            method_params=Counts(counts),
        )

    def init(self, parameters: Tensor, plan: Plan) -> ClippedState:
        """The state at the model's start."""
        usual = super().init(parameters, plan)
        return ClippedState(usual.moving, usual.divisor, torch.tensor(self.clip_norm, dtype=torch.float64))

    def step(self, state: ClippedState, plan: Plan, barrier: Barrier) -> ClippedState:
        """One noisy gradient, one noisy count of the norms within C, one update of the parameters and of C."""
        bound = L2(float(state.clip_norm))
        answer = noisy_gradient(state, plan, barrier, clipping=bound)
        within = barrier.norm_count(
            state.parameters,
            bound=bound,
            noise=Gaussian(plan.params(Counts).count_noise_multiplier),
            sampling=Poisson(plan.sampling_rate),
        )
        return ClippedState(
            moving=self.update.apply(state.moving, answer.gradient, steps=plan.steps),
            divisor=torch.full_like(state.divisor, answer.divisor),
            clip_norm=torch.full_like(
                state.clip_norm, self.followed(bound.norm, within / answer.divisor + 0.5)
            ),
        )

    def followed(self, clip_norm: float, fraction: float) -> float:
        """The next C from a noisy fraction of norms within this one."""
        moved = clip_norm * math.exp(-self.rate * (min(1.0, max(0.0, fraction)) - self.quantile))
        return min(self.max_clip_norm, max(self.min_clip_norm, moved))

    def _releases(self, sampled: Batches, counts: Gaussian, count_noise: float) -> Releases:
        first, bound = sampled.count_releases(count_noise), L2(self.clip_norm)

        def releases(noise_multiplier: float) -> Repeated:
            noised = gradient_release(sampled.sampling, bound, Gaussian(noise_multiplier), 1.0)
            counted = norm_count_release(counts, sampled.sampling)
            return [*first, *[(noised, 1), (counted, 1)] * self.steps]

        return releases

    def _count_noise(self, sampled: Batches) -> float:
        if self.count_noise_multiplier is not None:
            return self.count_noise_multiplier
        if sampled.divisor is None:
            raise RefusedError(
                "the number of records is private, so a tenth of the batch is not known; set"
                " algorithm.count_noise_multiplier."
            )
        return USUAL_SHARE * sampled.divisor
