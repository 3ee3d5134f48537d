"""What descent with momentum shares, whoever's momentum it is: settings, refusals, state and the noised gradient.

The objective is the mean loss + regularisation ||theta||^2. Only the losses are private: the regulariser's gradient,
step sizes, momentum and the course of the noise are functions of public numbers, and stand in the plan.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from algorithms.algorithm import Plan, Target
from algorithms.allocation import Curve
from algorithms.gradients import L1, L2, Box
from algorithms.privacy.barrier import Barrier
from algorithms.privacy.errors import Refused
from algorithms.privacy.releases import (
    FullBatch,
    Gaussian,
    KNorm,
    Laplace,
    Release,
    WithoutReplacement,
    gradient_release,
)
from algorithms.public import Public
from algorithms.update import STRICT

WHAT = "a budget divided over a sum of all records"


@dataclass(frozen=True)
class Mechanism:
    """How a record's gradient is bounded, in the norm of which order, and noised."""

    order: Literal[1, 2, "box"]
    clipping: Callable[[float], L1 | L2 | Box]
    noise: Callable[[float], Laplace | Gaussian | KNorm]


MECHANISMS = {
    "laplace": Mechanism(1, L1, Laplace),
    "gaussian": Mechanism(2, L2, Gaussian),
    "knorm": Mechanism("box", Box, KNorm),
}


@dataclass(frozen=True)
class State:
    """parameters: [d], the iterate. previous: [d], the one before. count: [], iterations done."""

    parameters: Tensor
    previous: Tensor
    count: Tensor

    def moved(self, parameters: Tensor) -> "State":
        """The state after an iteration."""
        return State(parameters, self.parameters, self.count + 1)


@dataclass(frozen=True)
class Settings:
    """Settings that the methods share.

    steps: iterations, or the most of them where their number is chosen. relative_step: c in the step size c / L.
    regularisation: lambda; the objective is 2 lambda strongly convex. batch_size: records of a sample without
    replacement, None for all of them. noise: "laplace" with an L1 bound, "gaussian" with an L2 bound on a record's
    gradient, or "knorm" with the bound of features in [0, 1]. smoothness: None takes L from public bounds; a number
    is taken only with smoothness_is_data_dependent, to reproduce a publication, and the plan then says that the run
    is not private. start: of every coordinate, None keeps the model's own.
    """

    steps: Annotated[int, Field(ge=1)]
    relative_step: Annotated[float, Field(gt=0, lt=math.inf)] = 1.0
    regularisation: Annotated[float, Field(ge=0, lt=math.inf)] = 0.01
    batch_size: Annotated[int, Field(ge=1)] | None = None
    noise: Literal["laplace", "gaussian", "knorm"] = "gaussian"
    adjacency: Literal["REPLACE_ONE", "ADD_OR_REMOVE_ONE"] = "REPLACE_ONE"
    smoothness: Annotated[float, Field(gt=0, lt=math.inf)] | None = None
    smoothness_is_data_dependent: bool = False
    start: Annotated[float, Field(gt=-math.inf, lt=math.inf)] | None = None

    __pydantic_config__ = STRICT

    @property
    def bounds_apart(self) -> float:
        """How many times a record's bound neighbouring sums may lie apart."""
        return 2.0 if self.adjacency == "REPLACE_ONE" else 1.0

    def curve(self, public: Public) -> Curve:
        """L and mu; raises Refused where no public bound is known, or a number is given by hand without its mark."""
        if self.smoothness_is_data_dependent is not (self.smoothness is not None):
            raise Refused(
                "a smoothness constant given by hand may come from the private records; leave algorithm.smoothness"
                " empty for the public bound, or set smoothness_is_data_dependent with it for a run that is marked as"
                " not private."
            )
        convexity = 2.0 * self.regularisation
        known = self.smoothness if self.smoothness is not None else public.smoothness() + convexity
        return Curve(known, convexity)

    def step_size(self, curve: Curve) -> float:
        """c / L; raises Refused where it is longer than 1 / mu."""
        if self.relative_step * curve.strong_convexity > curve.smoothness:
            raise Refused(
                f"a relative step of {self.relative_step:g} is longer than the strong convexity allows; set"
                f" algorithm.relative_step to at most {curve.condition_number:g}, or to 1 as a start."
            )
        return self.relative_step / curve.smoothness

    def sampling(self, public: Public) -> FullBatch | WithoutReplacement:
        """Which records take part in an iteration."""
        records = public.known_records(WHAT)
        size = self.batch_size or records
        return FullBatch() if size == records else WithoutReplacement(size, records)

    def clipping(self, public: Public) -> L1 | L2 | Box:
        """The bound of a record's gradient; raises Refused where no public bound gives it."""
        mechanism = MECHANISMS[self.noise]
        return mechanism.clipping(public.gradient_norm(mechanism.order))

    def release(self, public: Public, noise_multiplier: float) -> Release:
        """One noised mean of bounded gradients."""
        size = self.batch_size or public.known_records(WHAT)
        noise = MECHANISMS[self.noise].noise(noise_multiplier)
        return gradient_release(self.sampling(public), self.clipping(public), noise, float(size))

    def init(self, parameters: Tensor, plan: Plan) -> State:
        """The state at the model's start, or where the settings say."""
        start = parameters.clone() if self.start is None else torch.full_like(parameters, self.start)
        return State(start, start.clone(), torch.tensor(0))

    def gradient(self, point: Tensor, plan: Plan, noise_multiplier: float, barrier: Barrier) -> Tensor:
        """The noised gradient of the objective, shape [d]; the regulariser's part is exact."""
        asked = self.release(plan.public, noise_multiplier)
        answer = barrier.gradient(
            point,
            sampling=asked.sampling,
            clipping=self.clipping(plan.public),
            noise=asked.noise,
            divisor=asked.divisor,
        )
        return answer + 2.0 * self.regularisation * point

    def released(self, state: State) -> Tensor:
        """The last iterate, shape [d]."""
        return state.parameters


def check(settings: Settings, target: Target, public: Public) -> None:
    """Raises Refused, in one sentence, where settings, target and data do not fit each other."""
    records = public.known_records(WHAT)
    size = settings.batch_size or records
    if size > records:
        raise Refused(
            f"a batch of {size} was asked for, but there are {records} training records; set algorithm.batch_size to"
            f" at most {records}."
        )
    if size < records and settings.adjacency != "REPLACE_ONE":
        raise Refused(
            "a sample without replacement has a proven cost under REPLACE_ONE only; leave algorithm.batch_size empty"
            " or set algorithm.adjacency to REPLACE_ONE."
        )
    if not 0.0 < target.budget.epsilon < math.inf:
        raise Refused(
            f"noise is planned for a finite epsilon above 0, not {target.budget.epsilon}; use 'lbfgs' without privacy."
        )
    if size < records and settings.noise == "gaussian" and target.accountant == "pld":
        raise Refused(
            "Gaussian noise on samples without replacement has a Rényi bound only; set the accountant to rdp, or leave"
            " algorithm.batch_size empty."
        )
    if target.accountant == "pure" and settings.noise == "gaussian":
        raise Refused(
            "gaussian noise has no pure epsilon; set algorithm.noise to laplace or knorm, or the accountant to pld."
        )
    if settings.noise == "knorm" and size < records:
        raise Refused(
            "knorm noise has a proven cost for a full batch only; leave algorithm.batch_size empty or take laplace."
        )
