"""Noised SGD without clipping: the bound on a record's gradient is public (Song, Chaudhuri and Sarwate 2013).

One release a step: PoissonSampled(B / n, Gaussian(z)). A record's gradient is at most the loss's slope times the
norm that the data card allows a record's features, so no gradient is changed and nothing about the data is guessed.

Differences from the paper: Gaussian instead of gamma-distributed noise, Poisson samples, PLD accounting.
"""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field
from torch import Tensor

from algorithms.core.calibration import plan_fixed
from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import State, batches, gradient_steps, sgd_step, start
from algorithms.core.optimizers import STRICT, OptimizerConfig
from algorithms.gradients import L2
from algorithms.privacy.barrier.barrier import Barrier


@dataclass(frozen=True)
class NormBoundSGD:
    """Settings of noised SGD without clipping.

    expected_batch_size: where the number of records is public. sampling_rate: instead, where it is not.
    """

    steps: Annotated[int, Field(ge=1)]
    expected_batch_size: Annotated[int, Field(ge=1)] | None = None
    sampling_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    update: OptimizerConfig = field(default_factory=OptimizerConfig)

    __pydantic_config__ = STRICT

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The least noise that fits the target; raises RefusedError where no public bound on gradients exists."""
        sampled = batches(
            public, expected_batch_size=self.expected_batch_size, sampling_rate=self.sampling_rate
        )
        releases = gradient_steps(
            sampled, _never_reached(public), steps=self.steps, count_noise=target.count_noise
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
        return sgd_step(state, plan, barrier, clipping=_never_reached(plan.public), update=self.update)

    def released(self, state: State) -> Tensor:
        """The last iterate, or the average the settings ask for, shape [d]."""
        return self.update.published(state.moving)


def _never_reached(public: PublicInfo) -> L2:
    """The public bound as a clip norm: the barrier still holds each record to it, should a data card be wrong."""
    return L2(public.gradient_norm(2))
