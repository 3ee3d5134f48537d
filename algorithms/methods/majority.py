"""The majority class: what a model is worth that knows nothing but how frequent the classes are.

One release: Gaussian(z) on the counts of the classes, of which a record changes one by 1. What is published is a
linear model without weights, whose bias gives the log odds of the counts.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms.core.calibration import plan_fixed
from algorithms.core.method import Answered, Plan, PublicInfo, SingleRelease, Target
from algorithms.core.optimizers import STRICT
from algorithms.core.people import asked_of_rows
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gaussian, total_release

MOST_LOG_ODDS = 10.0
BOUND = L2(1.0)


@dataclass(frozen=True)
class Majority(SingleRelease):
    """The majority class has no settings."""

    __pydantic_config__ = STRICT

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The least noise on the counts that fits the target; raises RefusedError unless the model is linear."""
        if public.classes < 2:
            raise RefusedError("'majority' names a class, and the data have none to predict; use 'dp_sgd'.")
        if public.inputs is None:
            raise RefusedError(
                "'majority' sets the bias of a linear model on data whose card bounds every feature, and this model or"
                " card is another; choose the model 'logistic', 'svm' or 'softmax'."
            )
        return plan_fixed(
            lambda noise_multiplier: [(total_release(BOUND, Gaussian(noise_multiplier)), 1)],
            target=target,
            public=public,
        )

    def step(self, state: Answered, plan: Plan, barrier: Barrier) -> Answered:
        """The noisy counts, and the bias that follows."""
        classes = torch.arange(plan.public.classes)
        counts = asked_of_rows(barrier, plan.public.pooled).total(
            lambda features, label: (classes == label).float(),
            bound=BOUND,
            noise=Gaussian(plan.noise_multiplier),
        )
        biases = log_odds(counts)
        parameters = torch.zeros_like(state.parameters)
        parameters[-len(biases) :] = biases.to(parameters)
        return replace(state, parameters=parameters)


def log_odds(counts: Tensor) -> Tensor:
    """The last biases of a linear model that answers as the counts [classes] do, each within 10 of 0.

    They come last in the parameters. For two classes it is one, of the second class against the first: right for
    a model with one output, and for one with two, whose first bias then is 0.
    """
    logs = counts.clamp(min=1.0).log()
    biases = logs[1:] - logs[0] if len(counts) == 2 else logs - logs.mean()
    return biases.clamp(-MOST_LOG_ODDS, MOST_LOG_ODDS)
