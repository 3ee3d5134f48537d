"""Noisy gradient descent with all records or without clipping (Song, Chaudhuri and Sarwate 2013)."""

import math
from dataclasses import dataclass, field

from algorithms.core.calibration import Batches
from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import Descent, Sampled, State, plan_gradient_steps, sgd_step
from algorithms.core.optimizers import Bound, OptimizerConfig, Steps
from algorithms.gradients import L2
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import FullBatch

STEPS_AT_ONE = 150
"""Steps at epsilon 1 where the settings give none; they grow with its root, so that steps and noise stay in balance."""


@dataclass(frozen=True)
class DPGD(Descent):
    """DP-GD: noisy gradient descent on all records, with momentum: the method to beat on convex problems.

    One release a step: Gaussian(z) on the sum of all clipped gradients. No sampling, so the cost of all steps together
    is that of one Gaussian release, and known exactly (Dong, Roth and Su 2022, section 3). The method is Song,
    Chaudhuri and Sarwate 2013 and Bassily, Smith and Thakurta 2014 without their sampling.

    Differences from the papers: clipped gradients instead of a bound on them, heavy-ball momentum, a learning rate that
    falls to 0, the last iterate. The defaults are one setting for every epsilon: the steps are a public function of it.

    steps: null for 150 sqrt(epsilon), from 10 to 1000. clip_norm: the L2 bound C of a record's gradient.
    update: the learning rate is of the mean of clipped gradients; a part of it that is not given is Update's own.
    """

    steps: Steps | None = None
    clip_norm: Bound = 2.0
    update: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(1.25, schedule="linear", momentum=0.8)
    )

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


@dataclass(frozen=True)
class NormBoundSGD(Sampled):
    """Noisy SGD without clipping: the bound on a record's gradient is public (Song, Chaudhuri and Sarwate 2013).

    One release a step: PoissonSampled(B / n, Gaussian(z)). A record's gradient is at most the loss's slope times the
    norm that the data card allows a record's features, so no gradient is changed and nothing about the data is guessed.

    Differences from the paper: Gaussian instead of gamma-distributed noise, Poisson samples, PLD accounting.

    expected_batch_size: where the number of records is public. sampling_rate: instead, where it is not.
    """

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The least noise that fits the target; raises RefusedError where no public bound on gradients exists."""
        sampled, clipping = self.sampled(public), _never_reached(public)
        return plan_gradient_steps(sampled, clipping, steps=self.steps, target=target, public=public)

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One noisy gradient over a fresh Poisson sample, one update."""
        return sgd_step(state, plan, barrier, clipping=_never_reached(plan.public), update=self.update)


def _never_reached(public: PublicInfo) -> L2:
    """The public bound as a clip norm: the barrier still holds each record to it, should a data card be wrong."""
    return L2(public.gradient_norm(2))
