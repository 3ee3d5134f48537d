"""DP-SGD: clip each record's gradient, sum over a Poisson sample, add Gaussian noise (Abadi et al. 2016, Algorithm 1).

One release a step: PoissonSampled(B / n, Gaussian(z)). Momentum, Adam, schedules and averaging come after it.

Differences from the paper: Poisson samples as its analysis assumes, a sum divided by the expected batch size, and a
noise multiplier calibrated to the whole schedule by PLD.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from algorithms.algorithm import Plan, Public, Target, plan_fixed
from algorithms.gradients import L2, PerLayer
from algorithms.privacy.barrier import Barrier
from algorithms.privacy.releases import Gaussian, Poisson, Release, gradient_release
from algorithms.sampled import State, batches, count_release, expected_batch
from algorithms.update import STRICT, Update


@dataclass(frozen=True)
class DPSGD:
    """Settings of DP-SGD.

    batch_size: expected records in a batch, where their number is public. sampling_rate: instead, where it is not.
    clip_norm: the L2 bound C of a record's gradient. clipping: "l2", or "per_layer": layers share C equally.
    """

    steps: Annotated[int, Field(ge=1)]
    batch_size: Annotated[int, Field(ge=1)] | None = None
    sampling_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    clip_norm: Annotated[float, Field(ge=1e-12, le=1e12)] = 1.0
    clipping: Literal["l2", "per_layer"] = "l2"
    update: Update = field(default_factory=Update)

    __pydantic_config__ = STRICT

    def plan(self, target: Target, public: Public) -> Plan:
        """The least noise with which the count, if it is private, and all steps fit the target."""
        sampled = batches(public, batch_size=self.batch_size, sampling_rate=self.sampling_rate)
        clipping = self._clipping(public.layers)

        def releases(noise_multiplier: float) -> list[tuple[Release, int]]:
            step = gradient_release(Poisson(sampled.rate), clipping, Gaussian(noise_multiplier), 1.0)
            first = [] if sampled.divisor is not None else [(count_release(target.count_noise), 1)]
            return [*first, (step, self.steps)]

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
        return State(self.update.start(parameters), torch.tensor(plan.divisor or 0.0, dtype=torch.float64))

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One noised gradient, one update; before the first, the count where the number of records is private."""
        divisor = float(state.divisor) or expected_batch(barrier, plan)
        gradient = barrier.gradient(
            state.parameters,
            sampling=Poisson(plan.sampling_rate),
            clipping=self._clipping(plan.public.layers),
            noise=Gaussian(plan.noise_multiplier),
            divisor=divisor,
        )
        moving = self.update.apply(state.moving, gradient, steps=plan.steps)
        return replace(state, moving=moving, divisor=torch.full_like(state.divisor, divisor))

    def released(self, state: State) -> Tensor:
        """The last iterate, or the average the settings ask for."""
        return self.update.published(state.moving)

    def _clipping(self, layers: int) -> L2 | PerLayer:
        if self.clipping == "l2":
            return L2(self.clip_norm)
        return PerLayer((self.clip_norm / math.sqrt(layers),) * layers)
