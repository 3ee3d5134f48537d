"""Output perturbation: the minimum of a strongly convex objective, with noise on it (Chaudhuri et al. 2011, section 3).

One release: Gaussian(z) on the minimum of the sum of clipped losses plus Lambda / 2 ||theta||^2, which one record
moves by at most C / Lambda. Gaussian noise for this is from Wu et al. 2017 and Zhang et al. 2017.

Differences from the papers: losses are clipped instead of assumed Lipschitz; what the solver is short of the minimum is
part of the sensitivity; the noise is the least that fits the target, not that of the classical formula.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field
from torch import Tensor

from algorithms.core.calibration import plan_fixed
from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.optimizers import STRICT
from algorithms.core.single_release import Answered, private_minimum
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gaussian, Minimum, Release, minimum_release

BALANCE = 0.25
"""Of the regularisation in the noise; measured on the data `adult-a9a` to serve from epsilon 0.05 to 1.6."""


@dataclass(frozen=True)
class OutputPerturbation:
    """Settings of output perturbation; the number of records n must be public.

    regularisation: lambda of lambda / 2 ||theta||^2 on the mean loss; null for 0.25 (d (z C / n)^2)^(1/3), at which
    the losses by regularisation, of the order lambda, and by noise, of the order d (z C / n lambda)^2, are in balance.
    It is at least 1e-10, below which rounding decides where the minimum is.
    clip_norm: the L2 bound C of a record's gradient; null for the bound by the data card, which clips nothing.
    """

    regularisation: Annotated[float, Field(ge=1e-10, le=1e6)] | None = None
    clip_norm: Annotated[float, Field(ge=1e-12, le=1e12)] | None = 2.0

    __pydantic_config__ = STRICT

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The least noise that fits the target; raises RefusedError without public bounds and for a loss with a
        kink.
        """

        def releases(noise_multiplier: float) -> list[tuple[Release, int]]:
            problem = self._problem(public, noise_multiplier)
            return [(minimum_release(problem, Gaussian(noise_multiplier)), 1)]

        return plan_fixed(releases, target=target, public=public, steps=1, sampling_rate=1.0, divisor=1.0)

    def init(self, parameters: Tensor, plan: Plan) -> Answered:
        """The model's start."""
        return Answered(parameters.clone())

    def step(self, state: Answered, plan: Plan, barrier: Barrier) -> Answered:
        """The noised minimum."""
        problem = self._problem(plan.public, plan.noise_multiplier)
        found = barrier.minimum(problem, noise=Gaussian(plan.noise_multiplier))
        return replace(state, parameters=found.to(state.parameters))

    def released(self, state: Answered) -> Tensor:
        """The noised minimum, shape [d]."""
        return state.parameters

    def _problem(self, public: PublicInfo, noise_multiplier: float) -> Minimum:
        records = public.known_records("'output_perturbation'")
        clip_norm = self.clip_norm or public.gradient_norm(2)
        noise = noise_multiplier * clip_norm / records
        balanced = BALANCE * (public.parameters * noise**2) ** (1 / 3)
        regularisation = (self.regularisation or balanced) * records
        return private_minimum(public, clip_norm=clip_norm, regularisation=regularisation)
