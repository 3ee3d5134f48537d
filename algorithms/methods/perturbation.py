"""Minima with noise: of an objective with a random linear term, or of a strongly convex one with noise on the result.

Both are Chaudhuri, Monteleoni and Sarwate 2011, section 3. The number of records n must be public where a
regularisation of the mean loss is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from algorithms.core.calibration import Claim, Repeated, plan_fixed
from algorithms.core.method import PaperSwitch, ReleasedParameters, SingleRelease
from algorithms.core.optimizers import Bound
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.mechanisms.release import (
    Gaussian,
    Minimum,
    ObjectiveNoise,
    PureObjectiveNoise,
    Release,
    minimum_release,
)

if TYPE_CHECKING:
    from algorithms.privacy.barrier.barrier import Barrier

RELATIVE_TOLERANCE = 1e-6
"""Length of the gradient at which a solver may stop, over the bound of one record's gradient."""

SMALLEST_CLIP_NORM = 1e-7
"""Of a record's gradient, over its public bound: below it rounding may keep a solver above its tolerance."""

SPREAD = 3.0
"""Lambda over the standard deviation of the linear term: parameters the data say nothing about then vary by 1 / 3.

Measured on the data `adult-a9a` to serve from epsilon 0.05 to 1.6.
"""
NoiseLimit: TypeAlias = Annotated[float, Field(gt=0, le=1e3)]
"""The largest standard deviation that noise may give a parameter."""
WHAT = "a regularisation of the mean loss"
_LARGEST_EXPONENT = 700.0
OUTPUT_NOISE = 30.0
"""Noise multiplier on the result over that in the objective; 0.06 % of the noise is lost to it."""


@dataclass(frozen=True)
class ObjectivePerturbation(SingleRelease):
    """Objective perturbation: the minimum of an objective with a random linear term (Chaudhuri et al. 2011, section 3).

    One release: the minimum of the sum of losses plus Lambda / 2 ||theta||^2 + <b, theta> with b normal of standard
    deviation z C, as ObjectivePerturbation(z, beta / Lambda), beta a bound of a record's curvature. By the analysis of

    - "rkw", Redberg, Koskela and Wang 2023 (arXiv:2401.00583): the privacy loss is at most log(1 + beta / Lambda) plus
      s^2 / 2 + |X|, X normal with standard deviation s = 1 / z. Losses are clipped by continuing them linearly, and a
      little noise on the result, Gaussian(30 z), hides where the solver stopped (their approximate minima). With the
      accountant "pure" the term has the density exp(-|b| / (z C)) of Chaudhuri et al. 2011, Algorithm 2, and the
      epsilon is log(1 + beta / Lambda) + 1 / z, and 1 / (30 z) for where the solver stopped;
    - "kst", Kifer, Smith and Thakurta 2012, Algorithm 1: z^2 = (8 ln(2 / delta) + 4 epsilon) / epsilon^2 and
      Lambda >= 2 beta / epsilon. The plan states this as `claimed_epsilon`; the cost it is held to is the one above.

    Differences from the papers: log(1 + beta / Lambda) for their -log(1 - beta / Lambda), of which it is the tighter
    half (the Jacobian grows by a positive matrix of rank one); whole privacy loss distributions, not one Rényi order.

    analysis: one of these two. regularisation: lambda of lambda / 2 ||theta||^2 on the mean loss, where the number of
    records is public; null for Lambda = 3 z C on the sum. "kst" adds its 2 beta / epsilon, and nothing else for null.
    It is at least 1e-10, below which rounding decides where the minimum is. clip_norm: the L2 bound C of a record's
    gradient; null for the bound by the data card, which clips nothing. adjacency: for "rkw" with the accountant "pure"
    it may be REPLACE_ONE, at twice the epsilon of add-or-remove-one. noise_limit: the largest standard deviation that
    the linear term may give a parameter, which it has where the data say nothing; Lambda is at least z C over it, and
    that where no regularisation is given. Of records of public norm R it moves an output by R times that at most.

    Example:
        >>> from algorithms import ObjectivePerturbation
        >>> ObjectivePerturbation(clip_norm=1.0).analysis
        'rkw'
    """

    paper_switch: ClassVar[PaperSwitch] = PaperSwitch(
        "analysis", "Kifer, Smith and Thakurta 2012", {"clip_norm": None, "noise_limit": None}, value="kst"
    )
    analysis: Literal["rkw", "kst"] = "rkw"
    regularisation: Annotated[float, Field(ge=1e-10, le=1e6)] | None = None
    clip_norm: Bound | None = 2.0
    adjacency: Literal["ADD_OR_REMOVE_ONE", "REPLACE_ONE"] = "ADD_OR_REMOVE_ONE"
    noise_limit: NoiseLimit | None = None

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The noise of the analysis; raises RefusedError without public bounds and for a loss with a kink."""
        self._check(target, facts)
        is_kst = self.analysis == "kst"
        return plan_fixed(
            lambda multiplier: [(self._release(multiplier, target, facts), 1)],
            target=target,
            facts=facts,
            noise_multiplier=noise_multiplier_by_kst(target.budget) if is_kst else None,
            adjacency=self.adjacency,
            method_params=Claim(target.budget.epsilon) if is_kst else None,
        )

    def step(self, state: ReleasedParameters, plan: Plan, barrier: Barrier) -> ReleasedParameters:
        """The minimum of the perturbed objective."""
        problem = self._problem(plan.noise_multiplier, plan.target, plan.facts)
        solution = barrier.minimum(problem, noise=_noise(plan.noise_multiplier, plan.target))
        return replace(state, parameters=solution.to(state.parameters, non_blocking=True))

    def _release(self, multiplier: float, target: Target, facts: PlanningFacts) -> Release:
        problem = self._problem(multiplier, target, facts)
        return minimum_release(problem, _noise(multiplier, target))

    def _problem(self, multiplier: float, target: Target, facts: PlanningFacts) -> Minimum:
        clip_norm = self.clip_norm or facts.gradient_norm(2)
        regularisation = 0.0
        if self.regularisation is not None:
            regularisation = self.regularisation * facts.known_records(WHAT)
        if self.noise_limit is not None:
            std = multiplier * clip_norm * _noise(multiplier, target).std(facts.parameters, box=False)
            regularisation = max(regularisation, std / self.noise_limit)
        if self.analysis == "kst":
            # Their Algorithm 1 needs Delta >= 2 lambda / epsilon: the Jacobian of noise by minimum then changes by at
            # most exp(epsilon / 2), and the linear term has the other half.
            regularisation += 2 * facts.smoothness() / target.budget.epsilon
        elif self.regularisation is None and self.noise_limit is None:
            regularisation = SPREAD * multiplier * clip_norm
        return private_minimum(facts, clip_norm=clip_norm, regularisation=regularisation)

    def _check(self, target: Target, facts: PlanningFacts) -> None:
        """Raises RefusedError if analysis and accountant do not fit, or the regularisation costs the whole budget."""
        budget = target.budget
        if self.analysis == "kst" and target.accountant == "pure":
            raise RefusedError(
                "the analysis 'kst' has no pure epsilon; set {method.analysis} to rkw, or {target.accountant} to pld or"
                " rdp with a {target.delta} above 0.",
                code="analysis_not_pure",
            )
        if self.analysis == "kst" or self.regularisation is None:
            return
        # The Jacobian costs up to ln(1 + smoothness / Lambda), whatever the noise; that has to be below epsilon.
        gap = math.expm1(min(budget.epsilon, _LARGEST_EXPONENT))
        min_regularisation = facts.smoothness() / gap / facts.known_records(WHAT)
        if self.regularisation <= min_regularisation:
            raise RefusedError(
                "a regularisation of {regularisation:g} costs more than epsilon {epsilon:g} by itself; set"
                " {method.regularisation} well above {smallest:.3g}, or leave it empty.",
                code="regularisation_too_small",
                regularisation=self.regularisation,
                epsilon=budget.epsilon,
                smallest=min_regularisation,
            )


def noise_multiplier_by_kst(budget: Budget) -> float:
    """Standard deviation over C of the linear term by Kifer, Smith and Thakurta 2012, Algorithm 1."""
    return math.sqrt(8 * math.log(2 / budget.delta) + 4 * budget.epsilon) / budget.epsilon


def _noise(multiplier: float, target: Target) -> ObjectiveNoise:
    kind = PureObjectiveNoise if target.accountant == "pure" else ObjectiveNoise
    return kind(multiplier, output=OUTPUT_NOISE * multiplier)


BALANCE = 0.25
"""Of the regularisation in the noise; measured on the data `adult-a9a` to serve from epsilon 0.05 to 1.6."""


@dataclass(frozen=True)
class OutputPerturbation(SingleRelease):
    """Output perturbation: the minimum of a strongly convex objective, with noise on it (Chaudhuri et al. 2011, section
    3).

    One release: Gaussian(z) on the minimum of the sum of clipped losses plus Lambda / 2 ||theta||^2, which one record
    moves by at most C / Lambda. Gaussian noise for this is from Wu et al. 2017 and Zhang et al. 2017.

    Differences from the papers: losses are clipped instead of assumed Lipschitz; what the solver is short of the
    minimum is part of the sensitivity; the noise is the least that fits the target, not that of the classical formula.

    regularisation: lambda of lambda / 2 ||theta||^2 on the mean loss; null for 0.25 (d (z C / n)^2)^(1/3), at which
    the losses by regularisation, of the order lambda, and by noise, of the order d (z C / n lambda)^2, are in balance.
    It is at least 1e-10, below which rounding decides where the minimum is.
    clip_norm: the L2 bound C of a record's gradient; null for the bound by the data card, which clips nothing.
    noise_limit: the largest standard deviation that the noise may give a parameter; Lambda is at least z C over it,
    and that where no regularisation is given, for which the number of records may be private. It moves what is said of
    a record of public norm R by R times that, whatever d is.

    Example:
        >>> from algorithms import OutputPerturbation
        >>> OutputPerturbation(clip_norm=1.0).regularisation is None  # chosen from n, d and the noise
        True
    """

    regularisation: Annotated[float, Field(ge=1e-10, le=1e6)] | None = None
    clip_norm: Bound | None = 2.0
    noise_limit: NoiseLimit | None = None

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The least noise that fits the target; raises RefusedError without public bounds and for a kink."""

        def releases(noise_multiplier: float) -> Repeated:
            problem = self._problem(facts, noise_multiplier)
            return [(minimum_release(problem, Gaussian(noise_multiplier)), 1)]

        return plan_fixed(releases, target=target, facts=facts)

    def step(self, state: ReleasedParameters, plan: Plan, barrier: Barrier) -> ReleasedParameters:
        """The noisy minimum."""
        problem = self._problem(plan.facts, plan.noise_multiplier)
        solution = barrier.minimum(problem, noise=Gaussian(plan.noise_multiplier))
        return replace(state, parameters=solution.to(state.parameters, non_blocking=True))

    def _problem(self, facts: PlanningFacts, noise_multiplier: float) -> Minimum:
        clip_norm, regularisation = self.clip_norm or facts.gradient_norm(2), 0.0
        if self.regularisation is not None or self.noise_limit is None:
            records = facts.known_records("'output_perturbation'")
            noise = noise_multiplier * clip_norm / records
            balanced = BALANCE * (facts.parameters * noise**2) ** (1 / 3)
            regularisation = (self.regularisation or balanced) * records
        if self.noise_limit is not None:
            # As in `Minimum.sensitivity`, with what the solver may be short of the minimum.
            moved = noise_multiplier * clip_norm * (1.0 + 2.0 * RELATIVE_TOLERANCE)
            regularisation = max(regularisation, moved / self.noise_limit)
        return private_minimum(facts, clip_norm=clip_norm, regularisation=regularisation)


def private_minimum(facts: PlanningFacts, *, clip_norm: float, regularisation: float) -> Minimum:
    """The minimum of the clipped losses of a linear model with public bounds, ready for noise.

    regularisation: of the sum of losses. Raises RefusedError for more than two classes, for a loss with a kink and
    where no public bound exists, and for a clip norm that is lost in the rounding.
    """
    facts.check_rows()
    if facts.classes != 2 or (facts.inputs is not None and facts.inputs.outputs != 1):
        raise RefusedError(
            "a minimum is released for linear models with one output, for 2 classes, and the model has"
            " another or the data have {classes} classes; use the model 'logistic', or 'dp_gd'.",
            code="minimum_model",
            classes=facts.classes if facts.classes > 1 else "no",
        )
    curvature = facts.smoothness()
    if clip_norm < SMALLEST_CLIP_NORM * facts.gradient_norm(2):
        raise RefusedError(
            "a clip norm of {clip_norm:g} is below what the minimum can be found to, for gradients of up to"
            " {largest:g}; set {method.clip_norm} to 1 or so, or null for no clipping.",
            code="clip_norm_too_small",
            clip_norm=clip_norm,
            largest=facts.gradient_norm(2),
        )
    return Minimum(
        clip_norm=clip_norm,
        regularisation=regularisation,
        tolerance=RELATIVE_TOLERANCE * clip_norm,
        input_norm=0.0 if facts.inputs is None else facts.inputs.l2,
        curvature=curvature,
    )
