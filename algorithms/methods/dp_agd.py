"""DP-AGD: descent with step sizes by noisy selection (Lee and Kifer 2018, arXiv:1808.09501)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import dp_accounting.dp_event as dp
from pydantic import Field

from algorithms.core.calibration import SLACK, check_adaptive, find_min_noise, plan_renyi, plan_zcdp
from algorithms.core.method import STORED_AS, PaperProtocol, PaperSwitch, paper_protocol
from algorithms.core.optimizers import MAX_STEPS, Bound, Count, NotNegative, Positive, Share
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.selection_law import SelectionDistribution
from algorithms.core.settings import Strict
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.accounting.filters import conversion, rho_of_budget
from algorithms.privacy.mechanisms.release import (
    Gaussian,
    Gumbel,
    Laplace,
    argmin_release,
    gradient_release,
)
from algorithms.privacy.mechanisms.sampling import FullBatch, Poisson

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from algorithms.gradients import LineCandidates
    from algorithms.privacy.barrier.barrier import Barrier
else:
    torch = lazy_module("torch")

_ORDERS = (*range(2, 33), *range(36, 65, 4), *range(80, 129, 16), 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class Iteration:
    """gradient_rho: of the first measurement, before sampling. selection_multiplier: of the selection's noise.

    selection_law: of that noise. paper_protocol: the settings of a run with the paper's choices. Older plans have
    neither.
    """

    gradient_rho: float
    selection_multiplier: float
    selection_law: SelectionDistribution | None = None
    paper_protocol: PaperProtocol | None = None


@dataclass(frozen=True)
class NoisySum:
    """A noisy sum of clipped gradients, [d]; its noise has the variance clip_norm^2 / (2 rho)."""

    total: Tensor
    rho: float

    def average_with(self, other: NoisySum) -> NoisySum:
        """Both by their inverse variances, which add up."""
        rho = self.rho + other.rho
        return NoisySum((self.rho * self.total + other.rho * other.total) / rho, rho)


def plan_sampled(
    iterations: int,
    share: float,
    rate: float,
    target: Target,
    facts: PlanningFacts,
    *,
    law: Callable[[float], SelectionDistribution],
) -> Plan:
    """Equal parts of a Rényi budget, for Poisson samples; at the order that leaves the gradient the least noise.

    The order follows from public values and is fixed with the plan, as a filter needs it. law: of a selection, by its
    noise multiplier.

    Raises RefusedError for a target that is too small for any noise.
    """
    epsilon, delta = target.budget.epsilon, target.budget.delta
    limits = {float(order): (epsilon - conversion(order, delta)) / iterations for order in _ORDERS}
    measuring = {order: (1 - share) * limit for order, limit in limits.items() if limit > 0}

    def gradient(multiplier: float) -> Schedule:
        return [(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)), 1)]

    def selection(multiplier: float) -> Schedule:
        return [(argmin_release(1.0, Gumbel(multiplier), Poisson(rate)).event(), 1)]

    # A filter adds up at one order. The gradients' noise decides it, and selections take their share at the same one.
    measured = find_min_noise(gradient, measuring) if measuring else None
    selected = (
        None if measured is None else find_min_noise(selection, {measured[1]: share * limits[measured[1]]})
    )
    if measured is None or selected is None:
        raise RefusedError(
            "epsilon {epsilon:g} at delta {delta:g} is too small for a run on samples, whose Rényi filter costs"
            " {least:.4g} at any noise; set {target.epsilon} well above that, or leave {method.sampling_rate} empty.",
            code="sampled_budget_too_small",
            epsilon=epsilon,
            delta=delta,
            least=min(conversion(float(order), delta) for order in _ORDERS),
        )
    spent, order = Iteration(0.5 / measured[0] ** 2, selected[0], law(selected[0])), measured[1]
    return plan_renyi(
        order, target=target, facts=facts, steps=iterations, sampling_rate=rate, method_params=spent
    )


StepGrid = tuple[NotNegative, ...]


@dataclass(frozen=True)
class Choices:
    """What `paper_budget` decides where the settings give nothing; the names are the settings'."""

    iterations: int
    clip_norm: float
    steps_grid: StepGrid
    step_range: float
    range_shrink: float
    keep_raised: bool
    momentum: float
    iterates: Literal["last", "average"]


_GEOMETRIC = (0.0, *(16.0 ** (power / 9 - 1) for power in range(10)))
_LINEAR = tuple(index / 20 for index in range(21))
OURS = Choices(45, 2.0, _GEOMETRIC, 1.5, 0.9, keep_raised=False, momentum=0.8, iterates="average")
PAPERS = Choices(60, 3.0, _LINEAR, 2.0, 1.0, keep_raised=True, momentum=0.0, iterates="last")
PAPERS_FIXED = {
    "gamma": 0.1,
    "loss_bound": 3.0,
    "range_every": 10,
    "range_growth": 1.1,
    "regularisation": 0.0,
}
"""The paper's values of settings that have a value of their own in any case."""


@dataclass(frozen=True)
class AGDState:
    """parameters, their average and velocity, the sum of measured gradients that momentum carries on: [d].

    gradient_rho: [], of an iteration's first measurement. max_step: [], the largest step of the grid.
    recent_steps: [range_every], those chosen last. iterations: [], the number done.
    """

    parameters: Tensor
    average: Tensor
    velocity: Tensor
    gradient_rho: Tensor
    max_step: Tensor = field(metadata={STORED_AS: "reach"})
    recent_steps: Tensor = field(metadata={STORED_AS: "window"})
    iterations: Tensor = field(metadata={STORED_AS: "taken"})


@dataclass(frozen=True)
class DPAGD(Strict):
    """DP-AGD: descent that spends its privacy budget as the data ask for it (Lee and Kifer 2018, Algorithm 2).

    An iteration measures the gradient of all records with Gaussian(1 / sqrt(2 rho)) and lets a noisy selection
    choose a step along it, from a grid that begins with 0. Where 0 wins the measurement was too noisy: it is
    improved by a second one of gamma rho, and the selection repeated. A zCDP filter holds the run to its budget,
    and is asked before each release. With a sampling rate each release has a Poisson sample of its own, under a
    Rényi filter at one order.

    Differences from the paper: raw measurements are averaged by their inverse variances and a copy is normalised
    (printed: a unit vector is averaged with a raw one); losses are clipped to [0, loss_bound] on both sides;
    nothing is asked that is not afforded. By default also: Gumbel instead of Laplace noise in the selection, a
    quarter of the cost; the best conversion between zCDP and (epsilon, delta); rho / iterations an iteration, of
    which the selection has a small part; a geometric grid, whose range shrinks when 0 wins; momentum and an average
    of the iterates, for losses with a kink. `paper_budget` has the paper's choices in all of these. The
    regularisation is in the gradient, not in the compared losses, as in the released code.

    What is None is as `paper_budget` has it, see `OURS` and `PAPERS`. Plan and card state all that it decides.

    paper_budget: take the paper's choices. iterations: how many the budget is for when no step is rejected; with the
    paper's budget the "splits" of epsilon, half of each for a gradient, half for a selection. selection_share: the
    selection's part of an iteration's budget (the paper's budget knows its own). gamma: how much a rejection raises the
    gradient's budget by; keep_raised: also for later iterations. clip_norm, loss_bound: of a record's gradient and
    loss. steps_grid: the candidate steps as parts of their range, 0 first. step_range: the range's start and its most;
    it becomes range_growth times the largest step chosen in each range_every iterations. range_every, range_growth: see
    step_range. range_shrink: its factor on a rejection. averaging: how a second measurement is averaged with the first,
    raw or as the paper prints it. momentum: the part of earlier measurements that is kept. iterates: publish the last
    or an average (Shamir and Zhang 2013, eta = 3). regularisation: lambda of lambda / 2 ||parameters||^2 beside the
    mean loss. sampling_rate: of Poisson samples.

    Example:
        >>> from algorithms import DPAGD
        >>> DPAGD().selection_share  # of the budget; the rest is for gradients
        0.003
    """

    paper_switch: ClassVar[PaperSwitch] = PaperSwitch(
        "paper_budget", "Lee and Kifer 2018", {**asdict(PAPERS), **PAPERS_FIXED}
    )
    paper_budget: bool = False
    iterations: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = None
    selection_share: Annotated[float, Field(gt=0, lt=1)] = 0.003
    gamma: Annotated[float, Field(gt=0, le=10)] = 0.1
    keep_raised: bool | None = None
    clip_norm: Bound | None = None
    loss_bound: Bound = 3.0
    steps_grid: StepGrid | None = None
    step_range: Positive | None = None
    range_every: Count = 10
    range_growth: Positive = 1.1
    range_shrink: Share | None = None
    averaging: Literal["raw", "printed"] = "raw"
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    iterates: Literal["last", "average"] | None = None
    regularisation: NotNegative = 0.0
    sampling_rate: Share | None = None

    @cached_property
    def choices(self) -> Choices:
        """What the run does, given by hand or by the budget."""
        settings = {field.name: getattr(self, field.name) for field in fields(Choices)}
        default = PAPERS if self.paper_budget else OURS
        return replace(default, **{name: value for name, value in settings.items() if value is not None})

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The budget that the run is held to: rho in equal parts, or the paper's cuts of epsilon; for as many
        iterations as it holds without a rejection.

        The paper's are epsilon / (2 splits) for a measurement, by the Gaussian mechanism's formula, and for a selection
        with Laplace noise, and rho = (sqrt(L + epsilon) - sqrt(L))^2 for L = ln(1 / delta) in all (Lee and Kifer 2018,
        Section 5; that the formula is taken at the whole delta is known from the released code). Raises RefusedError
        where the settings do not fit each other or the data.
        """
        self._check(facts)
        check_adaptive(target)
        iterations, share, budget = self.choices.iterations, self.selection_share, target.budget

        def law(multiplier: float) -> SelectionDistribution:
            release = argmin_release(self.loss_bound, self._selection_noise(multiplier), self._sampling())
            return SelectionDistribution.of(release, len(self.choices.steps_grid), iterations, facts)

        if self.sampling_rate is not None:
            return plan_sampled(iterations, share, self.sampling_rate, target, facts, law=law)
        if self.paper_budget:
            # Gaussian noise of sqrt(2 ln(1.25 / delta)) / part has rho = part^2 / (4 ln(1.25 / delta)), and Laplace
            # noise of scale 1 / part has part^2 / 2.
            part, log_delta = budget.epsilon / (2 * iterations), math.log(1 / budget.delta)
            rho = (math.sqrt(log_delta + budget.epsilon) - math.sqrt(log_delta)) ** 2
            protocol = paper_protocol(self, **asdict(self.choices))
            gradient_rho = part**2 / (4 * math.log(1.25 / budget.delta))
            spent = Iteration(gradient_rho, 1 / part, law(1 / part), protocol)
            cost = spent.gradient_rho + part**2 / 2
        else:
            rho = rho_of_budget(budget)
            cost = rho * (1 - SLACK) / iterations
            multiplier = 1 / math.sqrt(8 * share * cost)  # of Gumbel noise, whose rho is 1 / (8 multiplier^2)
            spent = Iteration((1 - share) * cost, multiplier, law(multiplier))
        if cost > rho:
            raise RefusedError(
                "an iteration would cost more than the whole budget; set {method.iterations} higher.",
                code="iteration_above_budget",
            )
        return plan_zcdp(rho, target=target, facts=facts, steps=math.floor(rho / cost), method_params=spent)

    def init(self, parameters: Tensor, plan: Plan) -> AGDState:
        """The state at the model's start."""
        return AGDState(
            parameters=parameters.clone(),
            average=parameters.clone(),
            velocity=torch.zeros_like(parameters),
            gradient_rho=torch.tensor(plan.params(Iteration).gradient_rho, dtype=torch.float64),
            max_step=torch.tensor(self.choices.step_range, dtype=torch.float64),
            recent_steps=torch.zeros(self.range_every, dtype=torch.float64),
            iterations=torch.tensor(0),
        )

    def step(self, state: AGDState, plan: Plan, barrier: Barrier) -> AGDState | None:
        """One iteration: measure and select until the step is not 0; None where the budget does not allow that."""
        from algorithms.gradients import LineCandidates  # torch, which takes seconds to import

        is_printed, sampling, max_step = self.averaging == "printed", self._sampling(), float(state.max_step)
        noise = self._selection_noise(plan.params(Iteration).selection_multiplier)
        # Of the sum over a sample, which is rate * n times the mean.
        pull = self.regularisation * sampling.rate * (plan.facts.records or 0)  # public where there is one
        measured = self._measure_gradient(state, float(state.gradient_rho), barrier)
        if measured is not None and is_printed:
            measured = replace(measured, total=_normalise(measured.total))
        while measured is not None:
            velocity = self.choices.momentum * state.velocity + measured.total + pull * state.parameters
            direction = velocity if is_printed else _normalise(velocity)
            steps = tuple(max_step * part for part in self.choices.steps_grid)
            line = LineCandidates(state.parameters, direction, steps)
            # The filter answers before the release: what does not fit is neither drawn nor charged.
            if not barrier.affords(argmin_release(self.loss_bound, noise, sampling)):
                return None
            chosen = barrier.argmin(line, bound=self.loss_bound, noise=noise, sampling=sampling)
            if chosen > 0:
                keeps = measured.rho if self.choices.keep_raised else float(state.gradient_rho)
                return self._state_after(
                    replace(state, velocity=velocity), line, chosen, max_step=max_step, rho=keeps
                )
            # A step of 0 won, so the direction is too noisy: it is measured once more and both are averaged.
            max_step *= self.choices.range_shrink
            another = self._measure_gradient(state, self.gamma * measured.rho, barrier)
            measured = None if another is None else measured.average_with(another)
        return None

    def released(self, state: AGDState) -> Tensor:
        """The last iterate or their average, as the settings ask, shape [d]."""
        return state.parameters if self.choices.iterates == "last" else state.average

    def _measure_gradient(self, state: AGDState, rho: float, barrier: Barrier) -> NoisySum | None:
        """A measurement of the gradient where it is afforded."""
        sampling, bound = self._sampling(), L2(self.choices.clip_norm)
        noise = Gaussian(1 / math.sqrt(2 * rho))
        if not barrier.affords(gradient_release(sampling, bound, noise, 1.0)):
            return None
        at = state.parameters
        total = barrier.gradient(at, sampling=sampling, clipping=bound, noise=noise, divisor=1.0)
        return NoisySum(total, rho)

    def _state_after(
        self, state: AGDState, line: LineCandidates, chosen: int, *, max_step: float, rho: float
    ) -> AGDState:
        """The state after a step that is not 0; its range follows from the steps chosen, which are public."""
        iterations, parameters, recent_steps = (
            int(state.iterations) + 1,
            line.at(chosen),
            state.recent_steps.clone(),
        )
        recent_steps[(iterations - 1) % self.range_every] = line.steps[chosen]
        if iterations % self.range_every == 0:
            max_step = min(self.range_growth * float(recent_steps.max()), self.choices.step_range)
        return replace(
            state,
            parameters=parameters,
            # (eta + 1) / (t + eta) for eta = 3
            average=state.average + 4 / (iterations + 3) * (parameters - state.average),
            gradient_rho=torch.full_like(state.gradient_rho, rho),
            max_step=torch.full_like(state.max_step, max_step),
            recent_steps=recent_steps,
            iterations=torch.full_like(state.iterations, iterations),
        )

    def _selection_noise(self, multiplier: float) -> Gumbel | Laplace:
        return Laplace(multiplier) if self.paper_budget else Gumbel(multiplier)

    def _sampling(self) -> FullBatch | Poisson:
        return FullBatch() if self.sampling_rate is None else Poisson(self.sampling_rate)

    def _check(self, facts: PlanningFacts) -> None:
        """Raises RefusedError where the settings do not fit each other or the data."""
        grid = self.choices.steps_grid
        facts.check_losses("a step")
        if len(grid) < 2 or grid[0] != 0 or any(step <= 0 for step in grid[1:]):
            raise RefusedError(
                "{method.steps_grid} must be 0, which is a rejection, and then steps above 0, not {grid}.",
                code="steps_grid",
                grid=list(grid),
            )
        if self.regularisation and facts.records is None:
            raise RefusedError(
                "the number of records is private, and with it the mean; set {method.regularisation} to 0.",
                code="regularised_private_count",
            )
        if self.paper_budget and self.sampling_rate is not None:
            raise RefusedError(
                "the paper's budget is not valid for samples; leave {method.sampling_rate} empty.",
                code="paper_budget_of_samples",
            )
        if self.averaging == "printed" and (self.choices.momentum or self.regularisation):
            raise RefusedError(
                "{method.averaging} 'printed' has no momentum and no regularisation; set both to 0.",
                code="printed_averaging",
            )


def _normalise(vector: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vector)
    return vector / length.clamp(min=torch.finfo(vector.dtype).tiny)
