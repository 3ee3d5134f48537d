"""Noisy SGD without clipping: the bound on a record's gradient is public (Song, Chaudhuri and Sarwate 2013).

One release a step: PoissonSampled(B / n, Gaussian(z)). A record's gradient is at most the loss's slope times the
norm that the data card allows a record's features, so no gradient is changed and nothing about the data is guessed.

Differences from the paper: Gaussian instead of gamma-distributed noise, Poisson samples, PLD accounting.
"""

from dataclasses import dataclass

from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import Sampled, State, plan_gradient_steps, sgd_step
from algorithms.gradients import L2
from algorithms.privacy.barrier.barrier import Barrier


@dataclass(frozen=True)
class NormBoundSGD(Sampled):
    """Settings of noisy SGD without clipping.

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
