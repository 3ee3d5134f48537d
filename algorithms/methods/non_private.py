"""The reference without privacy: plain minibatch SGD or Adam through the same loop, barrier and sampling as DP-SGD.

One release a step, without a bound and without noise: NonPrivateDpEvent, so epsilon is infinite and says so.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated

import dp_accounting as dp
import torch
from pydantic import Field
from torch import Tensor

from algorithms.core.method import Plan, PublicInfo, Target, by_accountants
from algorithms.core.minibatch import State, batches
from algorithms.core.optimizers import STRICT, OptimizerConfig
from algorithms.gradients import Unclipped
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import NoNoise, Poisson


@dataclass(frozen=True)
class NonPrivate:
    """Settings of plain SGD on Poisson samples."""

    steps: Annotated[int, Field(ge=1)]
    expected_batch_size: Annotated[int, Field(ge=1)]
    update: OptimizerConfig = field(default_factory=OptimizerConfig)

    __pydantic_config__ = STRICT

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The schedule at infinite epsilon; raises RefusedError where the number of records is private."""
        public.known_records("a run without privacy")
        sampled = batches(public, expected_batch_size=self.expected_batch_size, sampling_rate=None)
        schedule = [*target.prior_events, (dp.NonPrivateDpEvent(), self.steps)]
        return Plan(
            target=target,
            public=public,
            steps=self.steps,
            noise_multiplier=0.0,
            sampling_rate=sampled.rate,
            divisor=sampled.divisor,
            schedule=schedule,
            epsilon=by_accountants(schedule, target.budget.delta),
        )

    def init(self, parameters: Tensor, plan: Plan) -> State:
        """The state at the model's start."""
        return State(self.update.start(parameters), torch.tensor(plan.divisor, dtype=torch.float64))

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One exact gradient, one update."""
        gradient = barrier.gradient(
            state.parameters,
            sampling=Poisson(plan.sampling_rate),
            clipping=Unclipped(),
            noise=NoNoise(),
            divisor=float(state.divisor),
        )
        return replace(state, moving=self.update.apply(state.moving, gradient, steps=plan.steps))

    def released(self, state: State) -> Tensor:
        """The last iterate, or the average the settings ask for, shape [d]."""
        return self.update.published(state.moving)
