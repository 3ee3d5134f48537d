"""DP-SGD: clip each record's gradient, sum over a Poisson sample, add Gaussian noise (Abadi et al. 2016, Algorithm 1).

One release a step: PoissonSampled(B / n, Gaussian(z)). Momentum, Adam, schedules and averaging come after it.

Differences from the paper: Poisson samples as its analysis assumes, a sum divided by the expected batch size, and a
noise multiplier calibrated to the whole schedule by PLD.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import Sampled, State, plan_gradient_steps, sgd_step
from algorithms.core.optimizers import Bound
from algorithms.gradients import L2, Normalised, PerLayer
from algorithms.privacy.barrier.barrier import Barrier


@dataclass(frozen=True)
class DPSGD(Sampled):
    """Settings of DP-SGD.

    steps: updates, each from a sample of its own. expected_batch_size: mean number of records in a sample, where the
    number of all is public. sampling_rate: instead, where it is not: the probability of each record. update: the
    optimizer, for the noisy mean gradient. clip_norm: the L2 bound C of a record's gradient. clipping: "l2";
    "per_layer": layers share C equally; "normalised": g becomes C g / (|g| + stability), so that C only scales the
    learning rate (Bu et al. 2023, AUTO-S).

    Example:
        >>> from algorithms import DPSGD, OptimizerConfig
        >>> momentum = OptimizerConfig(learning_rate=2.0, momentum=0.9, schedule="linear")
        >>> DPSGD(steps=300, expected_batch_size=256, clip_norm=0.5, update=momentum).clipping
        'l2'
    """

    clip_norm: Bound = 1.0
    clipping: Literal["l2", "per_layer", "normalised"] = "l2"
    stability: Annotated[float, Field(ge=0, le=1e12)] = 0.01

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The least noise with which the count, if it is private, and all steps fit the target."""
        sampled, clipping = self.sampled(public), self._clipping(public.layers)
        return plan_gradient_steps(sampled, clipping, steps=self.steps, target=target, public=public)

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One noisy gradient over a fresh Poisson sample, one update."""
        return sgd_step(state, plan, barrier, clipping=self._clipping(plan.public.layers), update=self.update)

    def _clipping(self, layers: int) -> L2 | PerLayer | Normalised:
        match self.clipping:
            case "l2":
                return L2(self.clip_norm)
            case "per_layer":
                return PerLayer((self.clip_norm / math.sqrt(layers),) * layers)
            case "normalised":
                return Normalised(self.clip_norm, self.stability)
