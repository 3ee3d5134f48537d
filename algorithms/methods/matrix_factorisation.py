"""Gradients with Gaussian noise that is correlated over steps: later steps cancel part of what earlier ones added.

One event for the whole run, charged with its first step: see `accounting.correlated`. A run that ends early costs the
whole. Records are divided into parts by a coin of their own, not by their place in a list as in the papers, so that one
record more or less moves no other.

A strategy of `noise_strategies` is chosen for the least noise in the iterates, which `noise_workload` computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, JsonValue

from algorithms.core.calibration import Batches, Releases, Repeated, calibrated_multiplier, plan_fixed
from algorithms.core.minibatch import (
    DPSGDState,
    SampledMethod,
    divisor_of,
    gradient_steps,
    noise_limit_factor,
)
from algorithms.core.noise_strategies import MAX_BANDS, best_banded, best_buffered, square_root
from algorithms.core.noise_workload import (
    INDEPENDENT,
    Workload,
    mean_squared_noise,
    some_rows,
    squared_noise,
    workload,
)
from algorithms.core.optimizers import Bound, Count
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.errors import RefusedError
from algorithms.gradients import L2, Clipping, Normalised
from algorithms.privacy.accounting.events import CorrelatedDpEvent, event_from_json, event_to_json
from algorithms.privacy.mechanisms.correlated import (
    Correlated,
    Strategy,
    Tree,
    strategy_of,
)
from algorithms.privacy.mechanisms.release import Gaussian, Mechanism, Release, gradient_release
from algorithms.privacy.mechanisms.sampling import Cyclic, CyclicPoisson, FixedOrder, Poisson, Sampling

if TYPE_CHECKING:
    from algorithms.privacy.barrier.barrier import Barrier

_MAX_LEAVES = 10**6
"""The most leaves of an event's tree; no run is as long, so that a larger tree would have the same noise."""
_ROUNDING = 1e-12
"""Relative, of 1 / (1 / k), which is a whole number k."""
_MIN_GAIN = 0.01
"""Of the noise in the iterates, that twice the bands have to take away."""
Participation = Literal["cyclic_poisson", "fixed_order"]
_POINTS = 64


@dataclass(frozen=True)
class CorrelatedPlan:
    """What a plan stores about correlated noise.

    strategy: its event at a noise multiplier of 1, in the form of the card. participation, parts: of the records.
    noise_against_independent: the ratio of the root mean squared noise in the iterates to that of independent noise
    with the same cost, batches and steps; below 1 is a gain. course: for each number of steps, the standard deviation
    of a parameter's noise, and that with independent noise, in units of a record's share of a batch mean.
    """

    strategy: dict[str, JsonValue]
    participation: Participation
    parts: int
    noise_against_independent: float = 1.0
    course: tuple[tuple[int, float, float], ...] = ()

    @classmethod
    def of(cls, strategy: Strategy, participation: Participation, parts: int) -> CorrelatedPlan:
        """The plan's values for a strategy."""
        return cls(event_to_json(strategy.event(1.0, 1)), participation, parts)

    def correlation(self) -> Strategy:
        """The strategy, in the mechanism's form."""
        event = event_from_json(self.strategy)
        assert isinstance(event, CorrelatedDpEvent)
        return strategy_of(event)

    def beside_independent(
        self, iterates: Workload, *, multiplier: float, independent: float
    ) -> CorrelatedPlan:
        """The same with the expected gain over independent noise.

        multiplier, independent: noise multipliers of equal cost, with this strategy and with independent noise.
        """
        correlated = multiplier**2 * squared_noise(self.correlation(), iterates)
        other = independent**2 * squared_noise(INDEPENDENT, iterates)
        steps = np.unique(np.linspace(0, len(iterates.after) - 1, _POINTS).round().astype(int))
        course = [(iterates.after[i], math.sqrt(correlated[i]), math.sqrt(other[i])) for i in steps]
        share = math.sqrt(float(correlated.mean() / other.mean()))
        return replace(self, noise_against_independent=share, course=tuple(course))

    def sampling(self, rate: float) -> Cyclic:
        """How records are sampled, at this rate of a step over all records."""
        is_ordered = self.participation == "fixed_order"
        return FixedOrder(self.parts) if is_ordered else CyclicPoisson(self.parts, rate)

    def noise(self, plan: Plan, *, step: int) -> Correlated:
        """The noise of a step, counted from 0."""
        return Correlated(plan.noise_multiplier, self.correlation(), plan.steps, step)


def in_order(sampled: Batches, facts: PlanningFacts) -> Batches:
    """Batches of about the same size; each record is in one batch of every epoch."""
    parts = max(1, round(1.0 / sampled.rate))
    return Batches(FixedOrder(parts), None if facts.records is None else facts.records / parts)


def correlated_steps(
    correlation: CorrelatedPlan, sampled: Batches, clipping: Clipping, steps: int
) -> Releases:
    """Like `gradient_steps`; the first step is charged for all of them."""
    sampling, strategy = correlation.sampling(sampled.rate), correlation.correlation()

    def releases(noise_multiplier: float) -> Repeated:
        def step(number: int) -> Release:
            noise = Correlated(noise_multiplier, strategy, steps, number)
            return gradient_release(sampling, clipping, noise, 1.0)

        return [(step(0), 1)] + ([(step(1), steps - 1)] if steps > 1 else [])

    return releases


@dataclass(frozen=True)
class MatrixFactorisation(SampledMethod):
    """DP-MF: the noise of the iterates is the least by optimisation (Choquette-Choo et al. 2023, arXiv:2306.08153).

    Differences from the papers: Toeplitz strategies alone, optimised by L-BFGS; the workload has the schedule,
    momentum, weight decay and averaging of the run.

    expected_batch_size, sampling_rate, clip_norm, clipping, update: as in DP-SGD. participation: "cyclic_poisson", a
    Poisson sample of one of `bands` parts of the records in turn, or "fixed_order", every record once in a pass.
    strategy: "banded", the best banded Toeplitz matrix; "square_root", its closed form for a constant learning rate;
    "buffered", in fixed order alone. bands: steps over which noise is correlated, "auto" for as many as gain by the
    run's own numbers; with 1 and Poisson samples the run is DP-SGD, bit for bit. buffers: of a buffered strategy.

    Example:
        >>> from algorithms import MatrixFactorisation, OptimizerConfig
        >>> momentum = OptimizerConfig(learning_rate=2.0, momentum=0.9)
        >>> MatrixFactorisation(steps=300, expected_batch_size=256, update=momentum).bands
        'auto'
    """

    by_coordinate: ClassVar[bool] = True
    clip_norm: Bound = 1.0
    clipping: Literal["l2", "normalised"] = "l2"
    stability: Annotated[float, Field(ge=0, le=1e12)] = 0.01
    participation: Participation = "cyclic_poisson"
    strategy: Literal["banded", "square_root", "buffered"] = "banded"
    bands: Count | Literal["auto"] = "auto"
    buffers: Annotated[int, Field(ge=1, le=16)] = 4

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The strategy with the least noise in the iterates, and the least noise with which its run fits the target."""
        sampled = self.batches(facts)
        if self.participation == "fixed_order":
            sampled = in_order(sampled, facts)
        correlation, multiplier = self._best(sampled, target, facts)
        return plan_fixed(
            self._releases(correlation, sampled),
            target=target,
            facts=facts,
            sampled=sampled,
            steps=self.steps,
            noise_multiplier=multiplier,
            method_params=correlation,
        )

    def step(self, state: DPSGDState, plan: Plan, barrier: Barrier) -> DPSGDState:
        """One gradient with the noise of its step, one update."""
        correlated, clipping = plan.params(CorrelatedPlan), self._clipping()
        divisor, step = divisor_of(state, plan, barrier), int(state.optimizer_state.count)
        sampling: Sampling
        noise: Mechanism
        if self._is_dp_sgd(correlated):
            sampling, noise = Poisson(plan.sampling_rate), Gaussian(plan.noise_multiplier)
        else:
            sampling, noise = correlated.sampling(plan.sampling_rate), correlated.noise(plan, step=step)
        gradient = barrier.gradient(
            state.parameters, sampling=sampling, clipping=clipping, noise=noise, divisor=divisor
        )
        factor = noise_limit_factor(self.update, plan, clipping, divisor)
        moved = self.update.apply(state.optimizer_state, gradient, steps=plan.steps, factor=factor)
        return state.after(moved, divisor)

    def _best(self, sampled: Batches, target: Target, facts: PlanningFacts) -> tuple[CorrelatedPlan, float]:
        """The strategy that the settings ask for, the one with the least noise in the iterates; its multiplier."""
        iterates, lowest_noise = workload(self.update, self.steps), math.inf
        thinned = Workload(some_rows(iterates, None), ())

        def noise_needed(correlation: CorrelatedPlan) -> float:
            return calibrated_multiplier(self._releases(correlation, sampled), target, facts, sampled)

        parts = sampled.sampling.parts if isinstance(sampled.sampling, FixedOrder) else 1
        best = CorrelatedPlan.of(INDEPENDENT, self.participation, parts)
        multiplier = independent = noise_needed(best)
        for strategy, parts in self._candidates(sampled):
            correlation = CorrelatedPlan.of(strategy, self.participation, parts)
            needed = independent if strategy == INDEPENDENT else noise_needed(correlation)
            noise = needed * math.sqrt(mean_squared_noise(strategy, thinned))
            if noise >= (1 - _MIN_GAIN) * lowest_noise:
                break
            best, multiplier, lowest_noise = correlation, needed, noise
        return best.beside_independent(iterates, multiplier=multiplier, independent=independent), multiplier

    def _candidates(self, sampled: Batches) -> Iterator[tuple[Strategy, int]]:
        """Strategies in the order of their memory, and the parts of the records that each goes with."""
        ordered = sampled.sampling.parts if isinstance(sampled.sampling, FixedOrder) else None
        if self.strategy == "buffered":
            if ordered is None:
                raise RefusedError(
                    "{method.strategy} is buffered, whose noise has no end, and a sample's gain is proven"
                    " for bands alone; set {method.participation} to fixed_order, or {method.strategy} to"
                    " banded.",
                    code="buffered_samples",
                )
            yield best_buffered(self.update, self.steps, self.buffers, ordered), ordered
            return
        max_bands = ordered or math.floor(1 / sampled.rate * (1 + _ROUNDING))
        if ordered is None and self.bands != "auto" and self.bands > max_bands:
            raise RefusedError(
                "{bands} bands were asked for, and one of as many parts of the records has less than a batch"
                " at a rate of {rate:.4g}; set {method.bands} to at most {max_bands}, or to auto.",
                code="too_many_bands",
                bands=self.bands,
                rate=sampled.rate,
                max_bands=max_bands,
            )
        limit = min(max_bands, self.steps, MAX_BANDS)
        tried = [bands for bands in (1, 2, 4, 8, 16, 32) if bands < limit] + [limit]
        for bands in tried if self.bands == "auto" else [min(self.bands, self.steps)]:
            if self.strategy == "square_root":
                yield square_root(bands, momentum=self.update.momentum), ordered or bands
            else:
                yield best_banded(self.update, self.steps, bands), ordered or bands

    def _releases(self, correlation: CorrelatedPlan, sampled: Batches) -> Releases:
        steps = gradient_steps if self._is_dp_sgd(correlation) else partial(correlated_steps, correlation)
        return steps(sampled, self._clipping(), self.steps)

    def _is_dp_sgd(self, correlation: CorrelatedPlan) -> bool:
        return self.participation == "cyclic_poisson" and correlation.correlation() == INDEPENDENT

    def _clipping(self) -> L2 | Normalised:
        return L2(self.clip_norm) if self.clipping == "l2" else Normalised(self.clip_norm, self.stability)


@dataclass(frozen=True)
class DPFTRL(SampledMethod):
    """DP-FTRL: sums of gradients with noise from binary trees (Kairouz et al. 2021, arXiv:2103.00039), no sampling.

    Every record takes part once in a pass over all records. A tree over `restart` passes has a noisy sum for each of
    its nodes; a sum of the first t gradients is that of few nodes.

    Differences from the paper: a tree's last, incomplete nodes are not completed by virtual steps.

    expected_batch_size: where the number of records is public. sampling_rate: instead, where it is not; a pass has as
    many steps as batches. clip_norm: the L2 bound C of a record's gradient. restart: passes after which a new tree
    begins.

    Example:
        >>> from algorithms import DPFTRL
        >>> DPFTRL(steps=300, expected_batch_size=256, restart=2).restart  # a tree for two passes
        2
    """

    by_coordinate: ClassVar[bool] = True
    clip_norm: Bound = 1.0
    restart: Count = 1

    def plan(self, target: Target, facts: PlanningFacts) -> Plan:
        """The least noise with which the count, if it is private, and the whole run fit the target."""
        sampled = in_order(self.batches(facts), facts)
        parts, iterates = round(1 / sampled.rate), workload(self.update, self.steps)

        def releases(correlation: CorrelatedPlan) -> Releases:
            return correlated_steps(correlation, sampled, L2(self.clip_norm), self.steps)

        tree, independent = (
            CorrelatedPlan.of(strategy, "fixed_order", parts)
            for strategy in (Tree(min(self.restart * parts, _MAX_LEAVES)), INDEPENDENT)
        )
        multiplier, other = (
            calibrated_multiplier(releases(correlation), target, facts, sampled)
            for correlation in (tree, independent)
        )
        correlation = tree.beside_independent(iterates, multiplier=multiplier, independent=other)
        return plan_fixed(
            releases(correlation),
            target=target,
            facts=facts,
            sampled=sampled,
            steps=self.steps,
            noise_multiplier=multiplier,
            method_params=correlation,
        )

    def step(self, state: DPSGDState, plan: Plan, barrier: Barrier) -> DPSGDState:
        """One gradient with the noise of its step, one update."""
        correlated, clipping = plan.params(CorrelatedPlan), L2(self.clip_norm)
        divisor = divisor_of(state, plan, barrier)
        gradient = barrier.gradient(
            state.parameters,
            sampling=correlated.sampling(plan.sampling_rate),
            clipping=clipping,
            noise=correlated.noise(plan, step=int(state.optimizer_state.count)),
            divisor=divisor,
        )
        factor = noise_limit_factor(self.update, plan, clipping, divisor)
        moved = self.update.apply(state.optimizer_state, gradient, steps=plan.steps, factor=factor)
        return state.after(moved, divisor)
