"""Descent with momentum on noisy gradients: DP-SHB, DP-NAG and DP-MASG.

Kuru, Birbil, Gürbüzbalaban and Yıldırım 2022 ("Differentially private accelerated optimization algorithms",
arXiv:2008.01989). One release an iteration, of all records or of a fresh sample without replacement: Laplace noise on
an L1 bound as in the paper, or Gaussian noise on an L2 bound. The objective is the mean loss + regularisation
||theta||^2. Only the losses are private: the regulariser's gradient, step sizes, momentum and the noise schedule
are functions of public numbers, and stand in the plan.

Pure epsilon is divided over the iterations by Proposition 4.2, numerically where sampling leaves no closed form. For
(epsilon, delta) the noise has a schedule that is fixed beforehand and scaled until the whole just meets the target:
Laplace noise that of pure epsilon, Gaussian noise b_t^2 ~ a_t^(-1/2), which is best where precisions add
up, as those of Gaussian noise on all records do.

Differences from the paper:
- The bound of a record's gradient is enforced by clipping; the smoothness that sets the step size is a public bound,
  since the largest eigenvalue of the data would give the data away; noise for (epsilon, delta) is calibrated to the
  whole run.
- Noise has the scale that the theorem asks for; the published code draws scale b / sqrt(2), so its curves show epsilon
  1.41, not 1.
- The coefficients a_t grow with t (the text says that they fall; its formulas are right).
- The gap that the error bound starts from is that of the objective: the paper's potential is at most twice it, and a
  restart doubles the potential once more, so stage s begins at 2^s times the gap, as in the authors' code.
- With samples the epsilons are those that minimise the noise at their amplified scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from algorithms.core.calibration import ALL, Batches, Repeated, calibrated_multiplier, plan_fixed
from algorithms.core.minibatch import NoiseSchedule, multiplier_at, noise_runs, run_at
from algorithms.core.optimizers import Count, NotNegative, Positive, StepCount
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.settings import Strict
from algorithms.errors import RefusedError
from algorithms.gradients import L1, L2, Box
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting.noise_search import in_levels
from algorithms.privacy.mechanisms.release import Gaussian, KNorm, Laplace, Release, gradient_release
from algorithms.privacy.mechanisms.sampling import FullBatch, WithoutReplacement

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from algorithms.privacy.barrier.barrier import Barrier
else:
    torch = lazy_module("torch")

Array = NDArray[np.float64]

_SMALLEST_LOG = -600.0


@dataclass(frozen=True)
class Stage:
    """Iterations with one step size and momentum, which is dropped between two stages."""

    steps: int
    step_size: float
    momentum: float = 0.0


@dataclass(frozen=True)
class Curvature:
    """What is public about the objective: its smoothness L and its strong convexity mu."""

    smoothness: float
    strong_convexity: float

    @property
    def condition_number(self) -> float:
        """L / mu."""
        return self.smoothness / self.strong_convexity

    def momentum(self, step_size: float) -> float:
        """(1 - sqrt(a mu)) / (1 + sqrt(a mu)), Nesterov's choice for a step size a of at most 1 / mu."""
        root = math.sqrt(step_size * self.strong_convexity)
        return (1.0 - root) / (1.0 + root)


def growing_stages(
    steps: int, step_size: float, condition_number: float, *, growth: float = 1.0
) -> list[Stage]:
    """The stages of the multi-stage method, cut off after `steps` iterations.

    Stage 1 has ceil(2 sqrt(kappa) ln sqrt(kappa)) iterations of the given step size; stage k >= 2 has 2^k
    ceil(sqrt(kappa) ln 2^(p+2)) of a step size 4^k times smaller, for p = growth. Source: Aybat, Fallah,
    Gürbüzbalaban and Ozdaglar 2019 (arXiv:1901.08022); the first length is that of the code of arXiv:2008.01989.
    """
    root = math.sqrt(condition_number)
    base = math.ceil(root * math.log(2.0 ** (growth + 2.0)))
    stages = [Stage(max(1, math.ceil(2.0 * root * math.log(root))), step_size)]
    while sum(stage.steps for stage in stages) < steps:
        k = len(stages) + 1
        stages.append(Stage(2**k * base, step_size / 4.0**k))
    return truncate_stages(stages, steps)


def truncate_stages(stages: Sequence[Stage], steps: int) -> list[Stage]:
    """The same stages, ended after `steps` iterations."""
    stages_left: list[Stage] = []
    for stage in stages:
        left = steps - sum(before.steps for before in stages_left)
        if left > 0:
            stages_left.append(replace(stage, steps=min(stage.steps, left)))
    return stages_left


def coefficients(stages: Sequence[Stage], curve: Curvature) -> Array:
    """a_t, shape [steps]: what b_t^2 in each coordinate adds to the error after the last iteration.

    Equations (28) and (34) of arXiv:2008.01989: 2^(s_T - s_t) prod_{i > t} (1 - sqrt(mu a_i)) a_t (1 + a_t L).
    """
    shrinking, added = _recursion(stages, curve)
    following = np.append(np.cumsum(shrinking[::-1])[::-1][1:], 0.0)  # sums over later iterations
    return np.asarray(np.exp(np.maximum(following, _SMALLEST_LOG)) * added)


def error_bounds(
    stages: Sequence[Stage], curve: Curvature, *, gap: float, noise: float, power: float = 1.0 / 3.0
) -> Array:
    """The bound (32) on the error after each iteration, were it the last; shape [steps].

    gap: of the objective at the start, at most. noise: d (S_1 / (n epsilon))^2 for Laplace noise, whose best
    allocation leaves noise (sum a_t^power)^(1 / power) with power 1/3; for Gaussian noise the power is 1/2.
    """
    shrinking, added = _recursion(stages, curve)
    start = 2.0 * gap * np.exp(np.cumsum(shrinking))
    total, totals = 0.0, np.empty(len(added))
    for t in range(len(added)):
        # (a_t's sum)^power, as the noise is divided best
        total = total * math.exp(power * shrinking[t]) + added[t] ** power
        totals[t] = total
    return np.asarray(start + noise * totals ** (1.0 / power))


def _recursion(stages: Sequence[Stage], curve: Curvature) -> tuple[Array, Array]:
    """By iteration: the logarithm of what the error so far is multiplied by, and what b_t^2 adds; shapes [steps]."""
    shrinking, added = [], []
    for index, stage in enumerate(stages):
        rate = math.log1p(-math.sqrt(curve.strong_convexity * stage.step_size))
        restart = 0.0 if index == 0 else math.log(2.0)  # a new stage starts with twice the bound of the last
        shrinking += [rate + restart] + [rate] * (stage.steps - 1)
        added += [stage.step_size * (1.0 + stage.step_size * curve.smoothness)] * stage.steps
    return np.array(shrinking), np.array(added)


def divide_epsilon(epsilon: float, values: Array, counts: Array, *, rate: float = 1.0) -> Array:
    """The pure epsilon of one iteration of each group that minimises sum a_t b_t^2; shape [groups].

    values, counts: the coefficients a_t, and how many iterations have each; the iterations' epsilons sum to
    `epsilon`. rate: batch / records; 1 is the closed form a_t^(1/3) of Proposition 4.2, below 1 the stationary point
    is found numerically: the objective is convex in the epsilons, as b_t^2 is.
    """
    shares = np.cbrt(values)
    if rate == 1.0 or len(values) == 1:
        return np.asarray(epsilon * shares / np.sum(counts * shares))

    grid = np.geomspace(1e-12 * epsilon, epsilon, 20_001)
    gains, logs = _log_gain(grid, rate)[::-1], np.log(values)  # ascending, as `interp` asks

    def epsilons_at(price: float) -> Array:
        """The epsilons where more of them gains exp(price) a unit."""
        return np.asarray(np.exp(np.interp(price - logs, gains, np.log(grid[::-1]))))

    def excess(price: float) -> float:
        return float(np.log(np.sum(counts * epsilons_at(price)) / epsilon))

    from scipy.optimize import brentq  # here, since other methods do without it

    epsilons = epsilons_at(brentq(excess, gains[0] + logs.min(), gains[-1] + logs.max()))
    return np.asarray(epsilons * (epsilon / np.sum(counts * epsilons)))  # their sum, exactly


def laplace_scale(epsilons: Array, *, rate: float = 1.0) -> Array:
    """1 / ln(1 + (e^epsilon - 1) / rate): the scale, relative to the sensitivity, of noise on a sample's sum.

    A sample without replacement of `rate` times the records then costs `epsilon` under replace-one (Balle, Barthe
    and Gaboardi 2018, Theorem 9).
    """
    small = np.log1p(np.expm1(np.minimum(epsilons, 1.0)) / rate)
    large = epsilons - math.log(rate) + np.log1p((rate - 1.0) * np.exp(-epsilons))  # without overflow
    return np.asarray(1.0 / np.where(epsilons < 1.0, small, large))


def _log_gain(epsilons: Array, rate: float) -> Array:
    """The logarithm of -d(b^2)/d(epsilon), which falls in epsilon."""
    scale = laplace_scale(epsilons, rate=rate)
    return np.asarray(math.log(2.0) + 3.0 * np.log(scale) - np.log1p((rate - 1.0) * np.exp(-epsilons)))


WHAT = "a budget divided over a sum of all records"


@dataclass(frozen=True)
class BoundAndNoise:
    """How a record's gradient is bounded, in the norm of which order, and noised."""

    order: Literal[1, 2, "box"]
    clipping: Callable[[float], L1 | L2 | Box]
    noise: Callable[[float], Laplace | Gaussian | KNorm]


MECHANISMS = {
    "laplace": BoundAndNoise(1, L1, Laplace),
    "gaussian": BoundAndNoise(2, L2, Gaussian),
    "knorm": BoundAndNoise("box", Box, KNorm),
}


@dataclass(frozen=True)
class MomentumState:
    """parameters: [d], the iterate. previous: [d], the one before. count: [], iterations done."""

    parameters: Tensor
    previous: Tensor
    count: Tensor

    def advance_to(self, parameters: Tensor) -> MomentumState:
        """The state after an iteration."""
        return MomentumState(parameters, self.parameters, self.count + 1)


NOT_PRIVATE = (
    "The smoothness constant, which sets the step sizes, was computed from the private records and no noise covers"
    " it: the stated epsilon does not hold, and the run is only good to reproduce a publication."
)

_KINDS = {
    ("laplace", True): 24,
    ("laplace", False): 24,
    ("knorm", True): 24,
    ("gaussian", True): 64,
    ("gaussian", False): 8,
}
"""The most different releases in a plan, by noise and whether all records take part: what accounts within seconds.

The fewer, the coarser the division; 24 cost the error bound at most 2 percent over 300 iterations."""

_ROUNDING = 1e-12
"""Share of a pure budget that is left to the rounding of its sum."""


@dataclass(frozen=True)
class PathParams(NoiseSchedule):
    """What the plan keeps: the path, the noise relative to the plan's multiplier, and the constants L and mu.

    initial_gap: the bound that the number of iterations follows from, where it does; older plans have none.
    """

    smoothness: float
    strong_convexity: float
    stages: tuple[Stage, ...]
    initial_gap: float | None = None


@dataclass(frozen=True)
class MomentumSettings(Strict):
    """Settings that the methods share.

    steps: iterations, or the most of them where their number is chosen. relative_step: c in the step size c / L.
    regularisation: lambda; the objective is 2 lambda strongly convex. batch_size: records of a sample without
    replacement, None for all of them. noise: "laplace" with an L1 bound, "gaussian" with an L2 bound on a record's
    gradient, or "knorm" with the bound of features in [0, 1]. adjacency: of the guarantee. smoothness: L; None takes it
    from public bounds. smoothness_is_data_dependent: true with a number for L, to reproduce a publication; the plan
    then says that the run is not private. start: of every coordinate, None keeps the model's own.
    """

    by_coordinate: ClassVar[bool] = True
    steps: StepCount
    relative_step: Positive = 1.0
    regularisation: NotNegative = 0.01
    batch_size: Count | None = None
    noise: Literal["laplace", "gaussian", "knorm"] = "gaussian"
    adjacency: Literal["REPLACE_ONE", "ADD_OR_REMOVE_ONE"] = "REPLACE_ONE"
    smoothness: Positive | None = None
    smoothness_is_data_dependent: bool = False
    start: Annotated[float, Field(gt=-math.inf, lt=math.inf)] | None = None

    @property
    def bounds_apart(self) -> float:
        """How many times a record's bound neighbouring sums may lie apart."""
        return 2.0 if self.adjacency == "REPLACE_ONE" else 1.0

    def curve(self, facts: PlanningFacts) -> Curvature:
        """L and mu; raises RefusedError without a public bound, and for a number given by hand without its mark."""
        if self.smoothness_is_data_dependent is not (self.smoothness is not None):
            raise RefusedError(
                "a smoothness constant given by hand may come from the private records; leave"
                " {method.smoothness} empty for the public bound, or set smoothness_is_data_dependent with"
                " it for a run that is marked as not private.",
                code="smoothness_unmarked",
            )
        convexity = 2.0 * self.regularisation
        smoothness = self.smoothness if self.smoothness is not None else facts.smoothness() + convexity
        return Curvature(smoothness, convexity)

    def step_size(self, curve: Curvature) -> float:
        """c / L; raises RefusedError where it is longer than 1 / mu."""
        if self.relative_step * curve.strong_convexity > curve.smoothness:
            raise RefusedError(
                "a relative step of {relative_step:g} is longer than the strong convexity allows; set"
                " {method.relative_step} to at most {longest:g}, or to 1 as a start.",
                code="relative_step_too_long",
                relative_step=self.relative_step,
                longest=curve.condition_number,
            )
        return self.relative_step / curve.smoothness

    def sampling(self, facts: PlanningFacts) -> FullBatch | WithoutReplacement:
        """Which records take part in an iteration."""
        records = facts.known_records(WHAT)
        size = self.batch_size or records
        return FullBatch() if size == records else WithoutReplacement(size, records)

    def clipping(self, facts: PlanningFacts) -> L1 | L2 | Box:
        """The bound of a record's gradient; raises RefusedError where no public bound gives it."""
        mechanism = MECHANISMS[self.noise]
        return mechanism.clipping(facts.gradient_norm(mechanism.order))

    def release(self, facts: PlanningFacts, noise_multiplier: float) -> Release:
        """One noisy mean of bounded gradients."""
        size = self.batch_size or facts.known_records(WHAT)
        noise = MECHANISMS[self.noise].noise(noise_multiplier)
        return gradient_release(self.sampling(facts), self.clipping(facts), noise, float(size))

    def init(self, parameters: Tensor, plan: Plan) -> MomentumState:
        """The state at the model's start, or where the settings say."""
        start = parameters.clone() if self.start is None else torch.full_like(parameters, self.start)
        return MomentumState(start, start.clone(), torch.tensor(0))

    def gradient(self, point: Tensor, plan: Plan, count: int, barrier: Barrier) -> Tensor:
        """The noisy gradient of the objective after `count` iterations, shape [d]; the regulariser's part is exact."""
        release = self.release(plan.facts, multiplier_at(plan, count))
        answer = barrier.gradient(
            point,
            sampling=release.sampling,
            clipping=self.clipping(plan.facts),
            noise=release.noise,
            divisor=release.divisor,
        )
        return answer + 2.0 * self.regularisation * point

    def released(self, state: MomentumState) -> Tensor:
        """The last iterate, shape [d]."""
        return state.parameters

    def check(self, target: Target, facts: PlanningFacts) -> None:
        """Raises RefusedError, in one sentence, where settings, target and data do not fit each other."""
        records = facts.known_records(WHAT)
        size = self.batch_size or records
        if size > records:
            raise RefusedError(
                "a batch of {batch} was asked for, but there are {records} training records; set"
                " {method.batch_size} to at most {records}.",
                code="sample_above_records",
                batch=size,
                records=records,
            )
        if size < records and self.adjacency != "REPLACE_ONE":
            raise RefusedError(
                "a sample without replacement has a proven cost under REPLACE_ONE only; leave"
                " {method.batch_size} empty or set {method.adjacency} to REPLACE_ONE.",
                code="sample_adjacency",
            )
        if not 0.0 < target.budget.epsilon < math.inf:
            raise RefusedError(
                "noise is planned for a finite epsilon above 0, not {epsilon}; use 'lbfgs' without privacy.",
                code="epsilon_not_finite",
                epsilon=target.budget.epsilon,
            )
        if target.accountant == "pure" and self.noise == "gaussian":
            raise RefusedError(
                "gaussian noise has no pure epsilon; set {method.noise} to laplace or knorm, or"
                " {target.accountant} to pld with a {target.delta} above 0.",
                code="gaussian_pure",
            )
        if self.noise == "knorm" and size < records:
            raise RefusedError(
                "knorm noise has a proven cost for a full batch only; leave {method.batch_size} empty or"
                " take laplace.",
                code="knorm_of_samples",
            )

    def plan_path(
        self,
        target: Target,
        facts: PlanningFacts,
        curve: Curvature,
        stages: Sequence[Stage],
        importance: Array,
        *,
        initial_gap: float | None = None,
    ) -> Plan:
        """The plan of a run in stages whose noise follows `importance`, shape [steps]: a_t, or ones for equal noise.

        initial_gap: what `best_length` took, for the plan to state.
        """
        rate = self.sampling(facts).rate
        values, counts = in_levels(importance, _KINDS[self.noise, rate == 1.0])
        if self.noise == "gaussian":  # right up to a factor
            multipliers, power = values**-0.25, 2  # b_t^2 goes with a_t^(-1/2)
        else:
            epsilons = divide_epsilon(target.budget.epsilon * (1.0 - _ROUNDING), values, counts, rate=rate)
            multipliers, power = self.bounds_apart * laplace_scale(epsilons, rate=rate), 1
        # The equal multiplier with the same sum of epsilons, or of precisions for Gaussian noise.
        level = float(np.average(multipliers**-power, weights=counts) ** (-1.0 / power))
        runs, release = noise_runs(multipliers / level, counts), self.release(facts, level)

        def releases(noise_multiplier: float) -> Repeated:
            return [(self.release(facts, noise_multiplier * run.weight), run.steps) for run in runs]

        return plan_fixed(
            releases,
            target=target,
            facts=facts,
            sampled=Batches(release.sampling, release.divisor),
            steps=sum(stage.steps for stage in stages),
            noise_multiplier=level if target.accountant == "pure" else None,
            adjacency=self.adjacency,
            method_params=PathParams(
                runs, curve.smoothness, curve.strong_convexity, tuple(stages), initial_gap
            ),
            not_private=NOT_PRIVATE if self.smoothness_is_data_dependent else None,
        )

    def best_length(
        self, target: Target, facts: PlanningFacts, curve: Curvature, stages: Sequence[Stage], gap: float
    ) -> int:
        """The number of iterations with the least error bound (32), from a public bound on the objective's gap.

        The bound is that of all records: a sample's amplification makes up for its size, to first order.
        """
        records, d = facts.known_records(WHAT), facts.parameters
        if self.noise == "gaussian":  # of the one release of all records that would spend the target
            once = replace(self, batch_size=None)
            multiplier = calibrated_multiplier(
                lambda multiplier: [(once.release(facts, multiplier), 1)],
                target,
                facts,
                ALL,
                adjacency=self.adjacency,
            )
            scale = once.release(facts, multiplier).noise_scale / records
            noise, power = d * scale**2 / 2.0, 1.0 / 2.0  # half of the variance d scale^2
        else:
            scale = self.bounds_apart * self.clipping(facts).sensitivity / (records * target.budget.epsilon)
            # Half the variance of a coordinate; for K-norm noise see `KNorm.std`.
            half = 1.0 if self.noise == "laplace" else (d + 2) * (d + 3) / 12
            noise, power = d * scale**2 * half, 1.0 / 3.0
        bounds = error_bounds(stages, curve, gap=gap, noise=noise, power=power)
        return int(np.argmin(bounds)) + 1


@dataclass(frozen=True)
class HeavyBall(MomentumSettings):
    """DP-SHB: Polyak's heavy ball, with the same noise in each iteration; with momentum 0 it is DP-GD.

    momentum: beta, or None for (1 - sqrt(a mu)) / (1 + sqrt(a mu)) at step size a.

    Example:
        >>> from algorithms import HeavyBall
        >>> HeavyBall(steps=100, noise="laplace").adjacency
        'REPLACE_ONE'
    """

    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """Equal noise in all iterations, the least that fits the target.

        Raises RefusedError where neither a momentum nor a regularisation is set.
        """
        self.check(target, facts)
        curve = self.curve(facts)
        size = self.step_size(curve)
        if self.momentum is None and self.regularisation == 0.0:
            raise RefusedError(
                "without regularisation the objective has no known strong convexity to take the momentum"
                " from; set {method.momentum}, or {method.regularisation} above 0.",
                code="momentum_missing",
            )
        momentum = curve.momentum(size) if self.momentum is None else self.momentum
        stages = [Stage(self.steps, size, momentum)]
        return self.plan_path(target, facts, curve, stages, np.ones(self.steps))

    def step(self, state: MomentumState, plan: Plan, barrier: Barrier) -> MomentumState:
        """One noisy gradient at the iterate; then theta - a g + beta (theta - theta before)."""
        now, _ = run_at(plan.params(PathParams).stages, int(state.count))
        gradient = self.gradient(state.parameters, plan, int(state.count), barrier)
        momentum = now.momentum * (state.parameters - state.previous)
        return state.advance_to(state.parameters - now.step_size * gradient + momentum)


PAPERS_GAP = 10.0
"""E_0 of the paper's experiments, whatever the objective is."""


@dataclass(frozen=True)
class Nesterov(MomentumSettings):
    """DP-NAG and DP-MASG: Nesterov's accelerated gradient, asked for at the extrapolated point.

    variant: one step size ("nag") or stages ("masg"); "_opt" ends after the number of iterations with the least error
    bound, `steps` at most, and divides the noise so that this bound is least. initial_gap: public bound on how far
    the objective at the start lies above its least value; null for the bound that the loss has there (ln 2 for
    logistic regression from zero), and for the paper's 10 where none is known, as from a file. The plan states what
    was taken. stage_growth: p of `growing_stages`: the larger, the longer the stages after the first.

    Example:
        >>> from algorithms import Nesterov
        >>> Nesterov(steps=120, stage_growth=2.0).variant
        'nag_opt'
    """

    variant: Literal["nag", "nag_opt", "masg", "masg_opt"] = "nag_opt"
    initial_gap: Positive | None = None
    stage_growth: Annotated[float, Field(ge=1, le=64)] = 1.0

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The least noise that fits the target, equal or divided; raises RefusedError without regularisation."""
        self.check(target, facts)
        if self.regularisation == 0.0:
            raise RefusedError(
                "Nesterov's momentum needs a strongly convex objective; set {method.regularisation} above 0.",
                code="not_strongly_convex",
            )
        curve = self.curve(facts)
        size = self.step_size(curve)
        stages = [Stage(self.steps, size)]
        if self.variant.startswith("masg"):
            stages = growing_stages(self.steps, size, curve.condition_number, growth=self.stage_growth)
        importance, gap = np.ones(self.steps), None
        if self.variant.endswith("_opt"):
            gap = self.gap_at_start(facts)
            stages = truncate_stages(stages, self.best_length(target, facts, curve, stages, gap))
            importance = coefficients(stages, curve)
        stages = [replace(stage, momentum=curve.momentum(stage.step_size)) for stage in stages]
        return self.plan_path(target, facts, curve, stages, importance, initial_gap=gap)

    def gap_at_start(self, facts: PlanningFacts) -> float:
        """A bound on how far the objective at the start lies above its least value, from public values alone."""
        if self.initial_gap is not None:
            return self.initial_gap
        if facts.start_loss is None or facts.loss is None:
            return PAPERS_GAP
        gap, start = facts.start_loss - facts.loss.least, abs(self.start or 0.0)
        if start == 0.0:
            return gap
        if facts.inputs is None:
            return PAPERS_GAP
        # An output of equal coordinates is at most start |x|_1, and a loss rises by its slope with their norm.
        moved = math.sqrt(facts.inputs.outputs) * start * facts.inputs.l1
        return gap + facts.loss.slope * moved + self.regularisation * facts.parameters * start**2

    def step(self, state: MomentumState, plan: Plan, barrier: Barrier) -> MomentumState:
        """One noisy gradient at the point ahead of the iterate, and a step from there."""
        now, step_in_stage = run_at(plan.params(PathParams).stages, int(state.count))
        # Momentum is dropped where a stage begins.
        momentum = now.momentum * (state.parameters - state.previous) if step_in_stage else 0.0
        ahead = state.parameters + momentum
        gradient = self.gradient(ahead, plan, int(state.count), barrier)
        return state.advance_to(ahead - now.step_size * gradient)
