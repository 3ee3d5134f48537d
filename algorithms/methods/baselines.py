"""References: what a model is worth without privacy, and one that knows nothing but how frequent the classes are.

Those without privacy go through the same loop and barrier. A release has no bound and no noise: NonPrivateDpEvent, so
epsilon is infinite and says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import dp_accounting.dp_event as dp
from pydantic import Field

from algorithms.core.calibration import plan_fixed
from algorithms.core.estimated_counts import estimated_counts
from algorithms.core.method import ReleasedParameters, SingleRelease
from algorithms.core.minibatch import Descent, DPSGDState, batches, divisor_of
from algorithms.core.optimizers import Count, OptimizerConfig, StepCount
from algorithms.core.plan import Plan, Target, by_accountants
from algorithms.core.planning_facts import Intercepts, PlanningFacts
from algorithms.errors import RefusedError
from algorithms.gradients import L2, Unclipped
from algorithms.lazy_imports import lazy_module
from algorithms.models.bounds import CROSS_ENTROPY, LOGISTIC
from algorithms.privacy.mechanisms.release import Gaussian, Minimum, NoNoise, total_release
from algorithms.privacy.mechanisms.sampling import Poisson

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from algorithms.privacy.barrier.barrier import Barrier
else:
    torch = lazy_module("torch")


@dataclass(frozen=True)
class NonPrivate(Descent):
    """Plain minibatch SGD or Adam with the sampling of DP-SGD, a release a step.

    Example:
        >>> from algorithms import NonPrivate
        >>> NonPrivate(steps=300, expected_batch_size=256).update.learning_rate
        1.0
    """

    by_coordinate: ClassVar[bool] = True
    steps: StepCount
    expected_batch_size: Count
    update: OptimizerConfig = field(default_factory=OptimizerConfig)

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The schedule at infinite epsilon; raises RefusedError where the number of records is private."""
        facts.known_records("a run without privacy")
        sampled = batches(facts, expected_batch_size=self.expected_batch_size, sampling_rate=None)
        return _exact(target, facts, steps=self.steps, rate=sampled.rate, divisor=sampled.divisor)

    def step(self, state: DPSGDState, plan: Plan, barrier: Barrier) -> DPSGDState:
        """One exact gradient, one update."""
        divisor = divisor_of(state, plan, barrier)
        gradient = barrier.gradient(
            state.parameters,
            sampling=Poisson(plan.sampling_rate),
            clipping=Unclipped(),
            noise=NoNoise(),
            divisor=divisor,
        )
        return state.after(self.update.apply(state.optimizer_state, gradient, steps=plan.steps), divisor)


MIN_REGULARISATION = 1e-12
"""Stands for none: it moves no parameter by more than rounding does, and a minimum must be unique."""


@dataclass(frozen=True)
class LBFGS(SingleRelease):
    """The exact minimum of a convex problem by L-BFGS (Byrd et al. 1995), in one release.

    regularisation: lambda of lambda / 2 ||theta||^2 on the mean loss.
    At 0 the solver is slow where features are rare, and never done where the classes can be separated.

    Example:
        >>> from algorithms import LBFGS
        >>> LBFGS(regularisation=1e-3)
        LBFGS(regularisation=0.001)
    """

    regularisation: Annotated[float, Field(ge=0, le=1e6)] = 1e-4

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The schedule at infinite epsilon; raises RefusedError for another model and a private number of records."""
        facts.known_records("'lbfgs'")
        facts.check_rows()
        if facts.inputs is None or facts.inputs.outputs != 1:
            raise RefusedError(
                "'lbfgs' finds the minimum of a linear model with one output, on data whose card bounds"
                " every feature; use the model 'logistic'.",
                code="lbfgs_model",
            )
        return _exact(target, facts, steps=1, rate=1.0, divisor=1.0)

    def step(self, state: ReleasedParameters, plan: Plan, barrier: Barrier) -> ReleasedParameters:
        """The minimum."""
        records = plan.facts.known_records("'lbfgs'")
        problem = Minimum(
            clip_norm=1.0,
            regularisation=max(self.regularisation, MIN_REGULARISATION) * records,
            tolerance=1.0,
            input_norm=1.0,
            curvature=math.inf,
        )
        solution = barrier.minimum(problem, noise=NoNoise())
        return replace(state, parameters=solution.to(state.parameters, non_blocking=True))


def _exact(target: Target, facts: PlanningFacts, *, steps: int, rate: float, divisor: float | None) -> Plan:
    """A plan of releases without noise, at infinite epsilon."""
    schedule = [*target.prior_events, (dp.NonPrivateDpEvent(), steps)]
    return Plan(
        target=target,
        facts=facts,
        steps=steps,
        sampling_rate=rate,
        divisor=divisor,
        schedule=schedule,
        epsilon=by_accountants(schedule, target.budget.delta),
    )


MAX_LOG_ODDS = 10.0
BOUND = L2(1.0)


@dataclass(frozen=True)
class Majority(SingleRelease):
    """The majority class: what a model is worth that knows nothing but how frequent the classes are.

    One release: Gaussian(z) on the counts of the classes, of which a record changes one by 1. What is published is a
    linear model without weights, whose bias gives the log odds of the counts, or the cell that all rows of a table
    share. It has no settings.

    Example:
        >>> from algorithms import Majority
        >>> Majority()  # what a model without features would reach
        Majority()
    """

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The least noise on the counts that fits the target; raises RefusedError unless the model is linear."""
        if facts.classes < 2:
            raise RefusedError(
                "'majority' names a class, and the data have none to predict; use 'dp_sgd'.",
                code="majority_without_classes",
            )
        has_none = facts.intercepts is None and facts.loss in (CROSS_ENTROPY, LOGISTIC)
        if facts.inputs is None or has_none:
            raise RefusedError(
                "'majority' sets the bias of a linear model on data whose card bounds every feature, or the"
                " constant cell of a table, and this model or card is another; choose the model 'logistic',"
                " 'svm' or 'softmax'.",
                code="majority_model",
            )
        is_of_cells = facts.intercepts is not None and facts.intercepts.weight != 1.0
        return plan_fixed(
            lambda noise_multiplier: [(total_release(BOUND, Gaussian(noise_multiplier)), 1)],
            target=target,
            facts=facts,
            method_params=facts.intercepts if is_of_cells else None,
        )

    def step(self, state: ReleasedParameters, plan: Plan, barrier: Barrier) -> ReleasedParameters:
        """The noisy counts, and the bias that follows."""

        def of_its_class(_features: Tensor, label: Tensor) -> Tensor:
            return (torch.arange(plan.facts.classes, device=label.device) == label).float()

        from algorithms.core.user_level import user_level_barrier

        rows = user_level_barrier(barrier, plan.facts.rows_per_user)
        counts = rows.total(of_its_class, bound=BOUND, noise=Gaussian(plan.noise_multiplier))
        biases = log_odds(counts, plan.noise_multiplier)
        parameters = torch.zeros_like(state.parameters)
        biases = biases.to(parameters, non_blocking=True)
        if plan.method_params:
            of_cells = plan.params(Intercepts)
            parameters[of_cells.indices[-len(biases) :]] = biases / of_cells.weight
        else:
            parameters[-len(biases) :] = biases
        return replace(state, parameters=parameters)


def log_odds(counts: Tensor, noise: float) -> Tensor:
    """The last biases of a linear model that answers as the noisy counts [classes] do, each within 10 of 0.

    Biases come last in the parameters. For two classes it is one, of the second class against the first: right for
    a model with one output, and for one with two, whose first bias then is 0.
    """
    logs = estimated_counts(counts, noise).log()
    # A softmax stays the same if all are shifted.
    biases = logs[1:] - logs[0] if len(counts) == 2 else logs - logs.mean()
    return biases.clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)
