"""Shared by DP-SGD and its relatives: settings, sampling, state, a noisy step, and noise that changes between steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from algorithms.core.calibration import Batches, Releases, Repeated, calibrated_multiplier, plan_fixed
from algorithms.core.method import STORED_AS
from algorithms.core.optimizers import Count, OptimizerConfig, OptimizerState, Share, StepCount
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.settings import Strict
from algorithms.errors import BudgetRefusedError, RefusedError, Slot
from algorithms.gradients import L2, Clipping
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting.epsilon import Array
from algorithms.privacy.accounting.noise_search import in_levels
from algorithms.privacy.mechanisms.release import Gaussian, gradient_release
from algorithms.privacy.mechanisms.sampling import Poisson, RandomAllocation, Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from algorithms.privacy.barrier.barrier import Barrier
else:
    torch = lazy_module("torch")


@dataclass(frozen=True)
class DPSGDState:
    """The state of DP-SGD and its relatives between steps.

    Attributes:
        optimizer_state: Parameters [d], and what the optimizer keeps beside them.
        divisor: [], the number that sums are divided by; 0 until it is released.
    """

    optimizer_state: OptimizerState = field(
        metadata={STORED_AS: "moving"}
    )  # the name in checkpoints, which stays
    divisor: Tensor

    @property
    def parameters(self) -> Tensor:
        """The point of the next gradient, shape [d]."""
        return self.optimizer_state.parameters

    def after(self, optimizer_state: OptimizerState, divisor: float, **others: Tensor) -> Self:
        """The state after a step. others: what a method keeps besides."""
        divisor_tensor = torch.full_like(self.divisor, divisor)
        return replace(self, optimizer_state=optimizer_state, divisor=divisor_tensor, **others)


def batches(facts: PlanningFacts, *, expected_batch_size: int | None, sampling_rate: float | None) -> Batches:
    """The sampling that the settings ask for.

    Args:
        facts: Whose `records` are None where their number is private.
        expected_batch_size: The expected number of records in a Poisson sample, where the number of records is public.
        sampling_rate: The probability that a record takes part in a step, where it is private.

    Raises:
        RefusedError: If a batch is larger than the data, and unless exactly the right setting is given.
    """
    if expected_batch_size is not None and sampling_rate is not None:
        size, rate = Slot("method.expected_batch_size"), Slot("method.sampling_rate")
        raise RefusedError(
            "expected_batch_size and sampling_rate were both given, and each says how large a batch is;"
            " keep {fitting}, which fits the data, and leave {other} empty.",
            code="batch_given_twice",
            fitting=size if facts.records else rate,
            other=rate if facts.records else size,
        )
    if facts.records is None:
        if sampling_rate is None:
            raise RefusedError(
                "the number of records is private, so expected_batch_size cannot become a sampling rate; set"
                " {method.sampling_rate} and leave expected_batch_size empty.",
                code="rate_missing",
            )
        return Batches(Poisson(sampling_rate), None)  # a released count decides the divisor
    if expected_batch_size is None:
        raise RefusedError(
            "the number of records is public, so a batch is given by its size; set"
            " {method.expected_batch_size}, the expected number of records in a batch, and leave"
            " {method.sampling_rate} empty.",
            code="batch_missing",
        )
    if expected_batch_size > facts.records:
        raise RefusedError(
            "a batch of {batch} was asked for, but there are {records} training records; set"
            " {method.expected_batch_size} to at most {records}.",
            code="batch_above_records",
            batch=expected_batch_size,
            records=facts.records,
        )
    return Batches(Poisson(expected_batch_size / facts.records), float(expected_batch_size))


def noisy_count(barrier: Barrier, noise_multiplier: float) -> float:
    """Release the number of records as `count_release` says."""

    def presence(_features: Tensor, label: Tensor) -> Tensor:
        return torch.ones(1, device=label.device)

    return float(barrier.total(presence, bound=L2(1.0), noise=Gaussian(noise_multiplier)))


def expected_batch(barrier: Barrier, plan: Plan) -> float:
    """The expected batch size from a released count, at least 1."""
    return max(1.0, plan.sampling_rate * noisy_count(barrier, plan.target.count_noise))


def gradient_steps(sampled: Batches, clipping: Clipping, steps: int) -> Releases:
    """The releases of a run of noisy gradient steps, by the noise multiplier.

    Args:
        sampled: How records are sampled.
        clipping: Of each record's gradient.
        steps: Their number; random allocation has its own.
    """
    if not isinstance(sampled.sampling, RandomAllocation):
        return _steps_on([(sampled.sampling, steps)], clipping)
    # In the order in which a run releases them, which its filter follows.
    rows = [row for turns, times in _passes(sampled.sampling) for row in turns * times]
    return _steps_on(rows, clipping)


def charged_steps(sampled: Batches, clipping: Clipping, steps: int) -> Releases:
    """Like `gradient_steps`, without the order: of passes only the steps that pay for them, equal ones together."""
    if not isinstance(sampled.sampling, RandomAllocation):
        return gradient_steps(sampled, clipping, steps)
    return _steps_on([(turns[0][0], times) for turns, times in _passes(sampled.sampling)], clipping)


def _steps_on(turns: Sequence[tuple[Sampling, int]], clipping: Clipping) -> Releases:
    """Noisy gradients over samples, each so often; one release for all turns of one sampling."""
    samplings = {id(sampling): sampling for sampling, _ in turns}

    def releases(noise_multiplier: float) -> Repeated:
        noise = Gaussian(noise_multiplier)
        release_of = {
            key: gradient_release(sampling, clipping, noise, 1.0) for key, sampling in samplings.items()
        }
        return [(release_of[id(sampling)], count) for sampling, count in turns]

    return releases


def _passes(allocation: RandomAllocation) -> list[tuple[list[tuple[Sampling, int]], int]]:
    """The turns of a whole pass and of a last shorter one, and how often each pass occurs.

    A pass has its first step, which pays for it, and then those that follow.
    """

    def turns(first: int) -> list[tuple[Sampling, int]]:
        start = replace(allocation, step=first)
        following = start.steps_of_pass - 1
        # One stands for all later steps of the pass.
        return [(start, 1), *([(replace(allocation, step=first + 1), following)] if following else [])]

    whole = allocation.steps // allocation.parts
    passes = [(turns(0), whole)] if whole else []
    is_last_shorter = allocation.steps % allocation.parts > 0
    return passes + ([(turns(whole * allocation.parts), 1)] if is_last_shorter else [])


def allocate_batches(sampled: Batches, facts: PlanningFacts, steps: int) -> Batches:
    """The same batches by random allocation: as many steps to a pass as come nearest to their rate."""
    parts = max(1, round(1 / sampled.rate))
    divisor = None if sampled.divisor is None or facts.records is None else facts.records / parts
    return Batches(RandomAllocation(parts, steps), divisor)


class Descent(Strict):
    """The base of methods that move a model with the optimizer `update`."""

    update: OptimizerConfig

    def init(self, parameters: Tensor, plan: Plan) -> DPSGDState:
        """The state at the model's start; without a public divisor it waits for the count."""
        return DPSGDState(
            self.update.start(parameters), torch.tensor(plan.divisor or 0.0, dtype=torch.float64)
        )

    def released(self, state: DPSGDState) -> Tensor:
        """The last iterate, or the average that the settings ask for, shape [d]."""
        return self.update.published_parameters(state.optimizer_state)


def check_no_noise_limit(update: OptimizerConfig, name: str) -> None:
    """Raises RefusedError for `noise_limit`, for a method whose gradients do not all have the plan's noise."""
    if update.noise_limit is not None:
        raise RefusedError(
            "the noise of {method!r} changes between steps or coordinates, so {method.update.noise_limit}"
            " would not bound what it does; leave it out, or take 'dp_sgd'.",
            code="noise_limit_unbounding",
            method=name,
        )


@dataclass(frozen=True)
class SampledMethod(Descent):
    """Settings of noisy gradient steps over samples.

    expected_batch_size: if the number of records is public. sampling_rate: if it is private.
    """

    steps: StepCount
    expected_batch_size: Count | None = None
    sampling_rate: Share | None = None
    update: OptimizerConfig = field(default_factory=OptimizerConfig)

    def batches(self, facts: PlanningFacts) -> Batches:
        """The batches that the settings ask for; raises what `batches` raises."""
        return batches(facts, expected_batch_size=self.expected_batch_size, sampling_rate=self.sampling_rate)


def plan_gradient_steps(
    sampled: Batches,
    clipping: Clipping,
    *,
    steps: int,
    target: Target,
    facts: PlanningFacts,
    method_params: object | None = None,
    before: Repeated = (),
    between: Mapping[int, Repeated] = MappingProxyType({}),
    after: Repeated = (),
) -> Plan:
    """The plan of noisy gradient steps with the smallest noise that meets the target.

    Args:
        sampled, clipping, steps: As for `gradient_steps`.
        target, facts, method_params: As for `plan_fixed`.
        before, between, after: Releases of the method beside the steps, whose noise is given; those between by the
            number of steps that come before them.

    Raises:
        RefusedError: If no noise meets the target.
    """

    def beside(releases: Releases) -> Releases:
        return lambda noise_multiplier: [
            *before,
            *interrupt_steps(releases(noise_multiplier), between),
            *after,
        ]

    # The search prices each row at many multipliers, so it gets few; the plan states every release in its order.
    charged = beside(charged_steps(sampled, clipping, steps))
    return plan_fixed(
        beside(gradient_steps(sampled, clipping, steps)),
        target=target,
        facts=facts,
        sampled=sampled,
        steps=steps,
        noise_multiplier=calibrated_multiplier(charged, target, facts, sampled),
        method_params=method_params,
    )


def interrupt_steps(steps: Repeated, between: Mapping[int, Repeated]) -> Repeated:
    """The releases of steps with others between them, by the number of steps before those.

    Example:
        >>> interrupt_steps([("step", 5)], {2: [("count", 1)], 4: [("count", 1)]})
        [('step', 2), ('count', 1), ('step', 2), ('count', 1), ('step', 1)]
    """
    rows, taken = [], 0
    for release, count in steps:
        end = taken + count
        for stop in sorted(stop for stop in between if taken < stop <= end):
            rows += [(release, stop - taken), *between[stop]]
            taken = stop
        if taken < end:
            rows.append((release, end - taken))
            taken = end
    return rows


def divisor_of(state: DPSGDState, plan: Plan, barrier: Barrier) -> float:
    """The number that sums are divided by: the expected batch size, never the size of the sample.

    Args:
        state: After the steps before.
        plan: Which has paid for a count where the number of records is private.
        barrier: Which releases that count in the first step of a run.
    """
    return float(state.divisor) or expected_batch(barrier, plan)


def noise_limit_factor(update: OptimizerConfig, plan: Plan, clipping: Clipping, divisor: float) -> float:
    """What the learning rate is multiplied with to keep to the update's `noise_limit`.

    It follows from the divisor, which may be a released number: with far fewer records than their bound allows, steps
    become shorter instead of noisier.

    Args:
        update: With or without a limit; 1 without.
        plan: With the noise multiplier of all steps.
        clipping: Whose sensitivity the noise is a multiple of.
        divisor: Of sums.
    """
    if update.noise_limit is None:
        return 1.0
    # The noise z C on a sum, in each coordinate of the mean that the optimizer gets.
    return update.factor_for(plan.noise_multiplier * clipping.sensitivity / divisor, plan.steps)


class Moves(NamedTuple):
    """How far all steps together move what a linear model says of a unit vector.

    Attributes:
        noise: The standard deviation of that by noise.
        record: That by the vector's own gradients, in multiples of one.
    """

    noise: float
    record: float


def moves_of(
    update: OptimizerConfig, plan: Plan, clippings: Sequence[Clipping], divisor: float
) -> Moves | None:
    """How far the steps move, as long as no other gradient pulls back; arguments as of `noise_limit_factor`.

    None without a noise limit, by which the settings say that records are unit vectors.

    clippings: of each step.
    """
    if update.noise_limit is None:
        return None
    assert len(clippings) == plan.steps
    noises = [plan.noise_multiplier * clipping.sensitivity / divisor for clipping in clippings]
    moves = update.limited_moves(noises)
    of_noise = math.fsum((move * noise) ** 2 for move, noise in zip(moves, noises, strict=True))
    # A step holds the record with the probability of the rate, and divides its gradient by the divisor.
    return Moves(math.sqrt(of_noise), math.fsum(moves) * plan.sampling_rate / divisor)


@dataclass(frozen=True)
class NoiseRun:
    """Consecutive steps with the same noise.

    Attributes:
        steps: Their number.
        weight: Of their noise multiplier, in multiples of the plan's.
    """

    steps: int
    weight: float


@dataclass(frozen=True)
class NoiseSchedule:
    """The noise of a plan whose noise changes between steps."""

    noise: tuple[NoiseRun, ...]


def noise_runs(values: Array, counts: Array) -> tuple[NoiseRun, ...]:
    """The runs with these weights and lengths, each of shape [runs]."""
    return tuple(NoiseRun(int(count), float(value)) for value, count in zip(values, counts, strict=True))


Allocation = Literal["matched", "reversed", "constant"]
"""How noise goes with the lengths of the steps."""


def noise_factors(factors: Array, allocation: Allocation) -> Array:
    """alpha_t with mean 1 / alpha_t^2 = 1: its square goes with 1 / eta_t, in reverse or not at all; shape [steps]."""
    if allocation == "constant":
        return np.ones_like(factors)
    alphas: Array = np.sqrt(factors.mean() / factors)  # 1 / alpha^2 = f / mean(f), whose mean is 1
    return alphas if allocation == "matched" else alphas[::-1].copy()


def plan_noise_schedule(
    weights: Array, *, sampled: Batches, clip_norm: float, target: Target, facts: PlanningFacts
) -> Plan:
    """The plan of noisy gradient steps whose noise changes from step to step by a public schedule.

    All steps are calibrated together. The plan stores the weights as a `NoiseSchedule`.

    Args:
        weights: [steps], the noise multiplier of each step in multiples of the plan's.
        sampled: How records are sampled.
        clip_norm: L2 norm that each record's gradient is scaled down to.
        target, facts: As for `plan_fixed`.

    Raises:
        RefusedError: If no noise meets the target.
    """
    runs, clipping = noise_runs(*in_levels(weights)), L2(clip_norm)

    def releases(noise_multiplier: float) -> Repeated:
        noises = [Gaussian(noise_multiplier * run.weight) for run in runs]
        steps = [gradient_release(sampled.sampling, clipping, noise, 1.0) for noise in noises]
        return [(step, run.steps) for step, run in zip(steps, runs, strict=True)]

    return plan_fixed(
        releases,
        target=target,
        facts=facts,
        sampled=sampled,
        steps=len(weights),
        method_params=NoiseSchedule(runs),
    )


class _Run(Protocol):
    """Consecutive steps."""

    @property
    def steps(self) -> int: ...


R = TypeVar("R", bound=_Run)


def run_at(runs: Sequence[R], count: int) -> tuple[R, int]:
    """The run that holds a step, and the step's index there.

    Args:
        runs: In order.
        count: The number of steps before.

    Raises:
        BudgetRefusedError: After the last step.
    """
    for run in runs:
        if count < run.steps:
            return run, count
        count -= run.steps
    raise BudgetRefusedError(
        "the plan allows no further release; calibrate a run of more steps.",
        code="no_further_release",
    )


def multiplier_at(plan: Plan, count: int) -> float:
    """The noise multiplier of the step after `count` other steps; raises BudgetRefusedError after the last one."""
    run, _ = run_at(plan.params(NoiseSchedule).noise, count)
    return plan.noise_multiplier * run.weight
