"""DP-GD: noisy gradient descent on all records, with momentum: the method to beat on convex problems.

One release a step: Gaussian(z) on the sum of all clipped gradients. No sampling, so the cost of all steps together
is that of one Gaussian release, and known exactly (Dong, Roth and Su 2022, section 3).
The method is Song, Chaudhuri and Sarwate 2013 and Bassily, Smith and Thakurta 2014 without their sampling.

Differences from the papers: clipped gradients instead of a bound on them, heavy-ball momentum, a learning rate that
falls to 0, the last iterate. The defaults are one setting for every epsilon: the steps are a public function of it.
"""

import math
from dataclasses import dataclass, field

from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import Batches, Descent, State, plan_gradient_steps, sgd_step
from algorithms.core.optimizers import STRICT, Bound, OptimizerConfig, Steps
from algorithms.gradients import L2
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import FullBatch

STEPS_AT_ONE = 150
"""Steps at epsilon 1 where the settings give none; they grow with its root, so that steps and noise stay in balance."""


@dataclass(frozen=True)
class DPGD(Descent):
    """Settings of DP-GD.

    steps: null for 150 sqrt(epsilon), from 10 to 1000. clip_norm: the L2 bound C of a record's gradient.
    update: the learning rate is of the mean of clipped gradients; a part of it that is not given is Update's own.
    """

    steps: Steps | None = None
    clip_norm: Bound = 2.0
    update: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(1.25, schedule="linear", momentum=0.8)
    )

    __pydantic_config__ = STRICT

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The least noise with which the count, if it is private, and all steps fit the target."""
        steps = self.steps or steps_for(target.budget.epsilon)
        every = Batches(FullBatch(), None if public.records is None else float(public.records))
        return plan_gradient_steps(every, L2(self.clip_norm), steps=steps, target=target, public=public)

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One noisy gradient over all records, one update."""
        return sgd_step(
            state, plan, barrier, sampling=FullBatch(), clipping=L2(self.clip_norm), update=self.update
        )


def steps_for(epsilon: float) -> int:
    """The number of steps for an epsilon where the settings give none."""
    return round(min(1000.0, max(10.0, STEPS_AT_ONE * math.sqrt(epsilon))))
