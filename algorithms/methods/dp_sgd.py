"""DP-SGD: clip each record's gradient, sum over a Poisson sample, add Gaussian noise (Abadi et al. 2016, Algorithm 1).

One release a step: PoissonSampled(B / n, Gaussian(z)). Momentum, Adam, schedules and averaging come after it.

Differences from the paper: Poisson samples as its analysis assumes, a sum divided by the expected batch size, and a
noise multiplier calibrated to the whole schedule by PLD.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from algorithms.core.calibration import plan_fixed
from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import State, batches, gradient_steps, sgd_step, start
from algorithms.core.optimizers import STRICT, OptimizerConfig
from algorithms.gradients import L2, Normalised, PerLayer
from algorithms.privacy.barrier.barrier import Barrier


@dataclass(frozen=True)
class DPSGD:
    """Settings of DP-SGD.

    expected_batch_size: where the number of records is public. sampling_rate: instead, where it is not.
    clip_norm: the L2 bound C of a record's gradient. clipping: "l2"; "per_layer": layers share C equally;
    "normalised": g becomes C g / (|g| + stability), so that C only scales the learning rate (Bu et al. 2023, AUTO-S).
    """

    steps: Annotated[int, Field(ge=1)]
    expected_batch_size: Annotated[int, Field(ge=1)] | None = None
    sampling_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    clip_norm: Annotated[float, Field(ge=1e-12, le=1e12)] = 1.0
    clipping: Literal["l2", "per_layer", "normalised"] = "l2"
    stability: Annotated[float, Field(ge=0, le=1e12)] = 0.01
    update: OptimizerConfig = field(default_factory=OptimizerConfig)

    __pydantic_config__ = STRICT

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The least noise with which the count, if it is private, and all steps fit the target."""
        sampled = batches(
            public, expected_batch_size=self.expected_batch_size, sampling_rate=self.sampling_rate
        )
        releases = gradient_steps(
            sampled, self._clipping(public.layers), steps=self.steps, count_noise=target.count_noise
        )
        return plan_fixed(
            releases,
            target=target,
            public=public,
            steps=self.steps,
            sampling_rate=sampled.rate,
            divisor=sampled.divisor,
        )

    def init(self, parameters: Tensor, plan: Plan) -> State:
        """The state at the model's start."""
        return start(self.update, parameters, plan)

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One noised gradient over a fresh Poisson sample, one update."""
        return sgd_step(state, plan, barrier, clipping=self._clipping(plan.public.layers), update=self.update)

    def released(self, state: State) -> Tensor:
        """The last iterate, or the average the settings ask for, shape [d]."""
        return self.update.published(state.moving)

    def _clipping(self, layers: int) -> L2 | PerLayer | Normalised:
        match self.clipping:
            case "l2":
                return L2(self.clip_norm)
            case "per_layer":
                return PerLayer((self.clip_norm / math.sqrt(layers),) * layers)
            case "normalised":
                return Normalised(self.clip_norm, self.stability)
