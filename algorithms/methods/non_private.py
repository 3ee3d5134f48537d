"""References without privacy, through the same loop and barrier as the private methods.

A release has no bound and no noise: NonPrivateDpEvent, so epsilon is infinite and says so.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated

import dp_accounting as dp
from pydantic import Field

from algorithms.core.method import Answered, Plan, PublicInfo, SingleRelease, Target, by_accountants
from algorithms.core.minibatch import Descent, State, batches
from algorithms.core.optimizers import STRICT, Count, OptimizerConfig, Steps
from algorithms.errors import RefusedError
from algorithms.gradients import Unclipped
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Minimum, NoNoise, Poisson


@dataclass(frozen=True)
class NonPrivate(Descent):
    """Plain minibatch SGD or Adam with the sampling of DP-SGD, a release a step."""

    steps: Steps
    expected_batch_size: Count
    update: OptimizerConfig = field(default_factory=OptimizerConfig)

    __pydantic_config__ = STRICT

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The schedule at infinite epsilon; raises RefusedError where the number of records is private."""
        public.known_records("a run without privacy")
        sampled = batches(public, expected_batch_size=self.expected_batch_size, sampling_rate=None)
        return _exact(target, public, steps=self.steps, rate=sampled.rate, divisor=sampled.divisor)

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


LEAST_REGULARISATION = 1e-12
"""Stands for none: it moves no parameter by more than rounding does, and a minimum must be unique."""


@dataclass(frozen=True)
class LBFGS(SingleRelease):
    """The exact minimum of a convex problem by L-BFGS (Byrd et al. 1995), in one release.

    regularisation: lambda of lambda / 2 ||theta||^2 on the mean loss.
    At 0 the solver is slow where features are rare, and never done where the classes can be separated.
    """

    regularisation: Annotated[float, Field(ge=0, le=1e6)] = 1e-4

    __pydantic_config__ = STRICT

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The schedule at infinite epsilon; raises RefusedError for another model and where the records are not
        counted.
        """
        public.known_records("'lbfgs'")
        public.check_rows()
        if public.inputs is None or public.inputs.outputs != 1:
            raise RefusedError(
                "'lbfgs' finds the minimum of a linear model with one output, on data whose card bounds every feature;"
                " use the model 'logistic'."
            )
        return _exact(target, public, steps=1, rate=1.0, divisor=1.0)

    def step(self, state: Answered, plan: Plan, barrier: Barrier) -> Answered:
        """The minimum."""
        records = plan.public.known_records("'lbfgs'")
        problem = Minimum(
            clip_norm=1.0,
            regularisation=max(self.regularisation, LEAST_REGULARISATION) * records,
            tolerance=1.0,
            input_norm=1.0,
            curvature=math.inf,
        )
        found = barrier.minimum(problem, noise=NoNoise())
        return replace(state, parameters=found.to(state.parameters))


def _exact(target: Target, public: PublicInfo, *, steps: int, rate: float, divisor: float | None) -> Plan:
    """A plan of releases without noise, at infinite epsilon."""
    schedule = [*target.prior_events, (dp.NonPrivateDpEvent(), steps)]
    return Plan(
        target=target,
        public=public,
        steps=steps,
        noise_multiplier=0.0,
        sampling_rate=rate,
        divisor=divisor,
        schedule=schedule,
        epsilon=by_accountants(schedule, target.budget.delta),
    )
