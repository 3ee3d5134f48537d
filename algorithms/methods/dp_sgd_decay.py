"""DP-SGD-Decay: DP-SGD whose noise falls from epoch to epoch (Yu, Liu, Pu, Gursoy and Truex 2019, arXiv:1904.02200).

One release a step: PoissonSampled(B / n, Gaussian(sigma_e)) in epoch e, on a schedule fixed in advance.

Differences from the paper: sigma_0 is calibrated so that the whole schedule costs the target by PLD, where the paper
sets sigma_0 and stops when a zCDP budget is used up; Poisson samples, an epoch is the 1 / rate steps in which a
record takes part once on average; more than 24 different noise multipliers share 24 levels.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import Sampled, State, multiplier_at, plan_noise_schedule, sgd_step
from algorithms.core.optimizers import Bound, Count, Share
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.privacy.accounting.calibration import Array
from algorithms.privacy.barrier.barrier import Barrier

LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class DPSGDDecay(Sampled):
    """Settings of DP-SGD-Decay.

    form: sigma_e / sigma_0 in epoch e = 0, 1, .. of E: "exponential" exp(-rate e), "time" 1 / (1 + rate e), "step"
    (1 - rate)^floor(e / period), "polynomial" (1 - end) (1 - e / E)^power + end. The other settings are DP-SGD's.
    """

    clip_norm: Bound = 1.0
    form: Literal["exponential", "time", "step", "polynomial"] = "exponential"
    rate: Annotated[float, Field(ge=0, lt=1)] = 0.01
    period: Count = 10
    power: Annotated[float, Field(ge=0, le=100)] = 1.0
    end: Share = 0.5

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The least sigma_0 whose whole schedule fits the target; raises RefusedError for noise that all but ends."""
        sampled = self.sampled(public)
        return plan_noise_schedule(
            self.shares(sampled.rate), sampled=sampled, clip_norm=self.clip_norm, target=target, public=public
        )

    def shares(self, sampling_rate: float) -> Array:
        """sigma / sigma_0 of each step, shape [steps]."""
        epochs = np.floor(np.arange(self.steps) * sampling_rate + 1e-9)
        shares: Array
        match self.form:
            case "exponential":
                shares = np.exp(-self.rate * epochs)
            case "time":
                shares = 1.0 / (1.0 + self.rate * epochs)
            case "step":
                shares = (1.0 - self.rate) ** np.floor(epochs / self.period)
            case "polynomial":
                left = 1.0 - epochs / max(1.0, np.ceil(self.steps * sampling_rate - 1e-9))
                shares = (1.0 - self.end) * left**self.power + self.end
        if shares[-1] < LEAST_SHARE:
            raise RefusedError(
                f"the noise would fall to {shares[-1]:.1e} of its start, and {LEAST_SHARE:g} is the least allowed;"
                " set a lower algorithm.rate or fewer steps."
            )
        return shares

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One gradient with the noise of its epoch over a fresh Poisson sample, one update."""
        return sgd_step(
            state,
            plan,
            barrier,
            clipping=L2(self.clip_norm),
            update=self.update,
            noise_multiplier=multiplier_at(plan, int(state.moving.count)),
        )
