"""Gradients with Gaussian noise that is correlated over steps: later steps cancel part of what earlier ones added.

One event for the whole run, charged with its first step: see `accounting.correlated`. A run that ends early costs the
whole. Records are divided into parts by a coin of their own, not by their place in a list as in the papers, so that one
record more or less moves no other.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from algorithms.core.calibration import Batches, Releases, calibrated_multiplier, plan_fixed
from algorithms.core.correlated import (
    INDEPENDENT,
    CorrelatedPlan,
    Participation,
    banded,
    buffered,
    correlated_step,
    correlated_steps,
    in_order,
    mean_squared_noise,
    square_root,
    workload,
)
from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import Sampled, State, gradient_steps, sgd_step
from algorithms.core.optimizers import Bound, Count
from algorithms.errors import RefusedError
from algorithms.gradients import L2, Normalised
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.correlated import Strategy, Tree
from algorithms.privacy.mechanisms.sampling import FixedOrder

_MOST = 64
"""Bands that "auto" tries: each is a vector of memory."""
_WORTH = 0.01
"""Of the noise in the iterates, that twice the bands have to take away."""


@dataclass(frozen=True)
class MatrixFactorisation(Sampled):
    """DP-MF: the noise of the iterates is the least by optimisation (Choquette-Choo et al. 2023, arXiv:2306.08153).

    Differences from the papers: Toeplitz strategies alone, optimised by L-BFGS; the workload has the schedule,
    momentum, weight decay and averaging of the run.

    expected_batch_size, sampling_rate, clip_norm, clipping, update: as in DP-SGD. participation: "cyclic_poisson", a
    Poisson sample of one of `bands` parts of the records in turn, or "fixed_order", every record once in a pass.
    strategy: "banded", the best banded Toeplitz matrix; "square_root", its closed form for a constant learning rate;
    "buffered", in fixed order alone. bands: steps over which noise is correlated, "auto" for as many as gain by the
    run's own numbers; with 1 and Poisson samples the run is DP-SGD, bit for bit. buffers: of a buffered strategy.
    """

    clip_norm: Bound = 1.0
    clipping: Literal["l2", "normalised"] = "l2"
    stability: Annotated[float, Field(ge=0, le=1e12)] = 0.01
    participation: Participation = "cyclic_poisson"
    strategy: Literal["banded", "square_root", "buffered"] = "banded"
    bands: Count | Literal["auto"] = "auto"
    buffers: Annotated[int, Field(ge=1, le=16)] = 4

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The strategy with the least noise in the iterates, and the least noise with which its run fits the target."""
        sampled = self.sampled(public)
        if self.participation == "fixed_order":
            sampled = in_order(sampled, public)
        kept, multiplier = self._best(sampled, target, public)
        return plan_fixed(
            self._releases(kept, sampled),
            target=target,
            public=public,
            sampled=sampled,
            steps=self.steps,
            noise_multiplier=multiplier,
            method_params=kept,
        )

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One gradient with the noise of its step, one update."""
        if self._is_dp_sgd(plan.params(CorrelatedPlan)):
            return sgd_step(state, plan, barrier, clipping=self._clipping(), update=self.update)
        return correlated_step(state, plan, barrier, clipping=self._clipping(), update=self.update)

    def _best(self, sampled: Batches, target: Target, public: PublicInfo) -> tuple[CorrelatedPlan, float]:
        """The strategy that the settings ask for, the one with the least noise in the iterates; its multiplier."""
        asked, found = workload(self.update, self.steps), math.inf

        def needed(kept: CorrelatedPlan) -> float:
            return calibrated_multiplier(self._releases(kept, sampled), target, public, sampled)

        parts = sampled.sampling.parts if isinstance(sampled.sampling, FixedOrder) else 1
        best = CorrelatedPlan.of(INDEPENDENT, self.participation, parts)
        own = independent = needed(best)
        for strategy, own_parts in self._candidates(sampled):
            kept = CorrelatedPlan.of(strategy, self.participation, own_parts)
            there = independent if strategy == INDEPENDENT else needed(kept)
            noise = there * math.sqrt(mean_squared_noise(strategy, asked))
            if noise >= (1 - _WORTH) * found:
                break
            best, own, found = kept, there, noise
        return best.beside_independent(asked, own=own, independent=independent), own

    def _candidates(self, sampled: Batches) -> Iterator[tuple[Strategy, int]]:
        """Strategies in the order of their memory, and the parts of the records that each goes with."""
        ordered = sampled.sampling.parts if isinstance(sampled.sampling, FixedOrder) else None
        if self.strategy == "buffered":
            if ordered is None:
                raise RefusedError(
                    "algorithm.strategy is buffered, whose noise has no end, and a sample's gain is proven for bands"
                    " alone; set algorithm.participation to fixed_order, or algorithm.strategy to banded."
                )
            yield buffered(self.update, self.steps, self.buffers, ordered), ordered
            return
        most = ordered or math.floor(1 / sampled.rate * (1 + 1e-12))
        if ordered is None and self.bands != "auto" and self.bands > most:
            raise RefusedError(
                f"{self.bands} bands were asked for, and one of as many parts of the records has less than a batch at a"
                f" rate of {sampled.rate:.4g}; set algorithm.bands to at most {most}, or to auto."
            )
        limit = min(most, self.steps, _MOST)
        tried = [bands for bands in (1, 2, 4, 8, 16, 32) if bands < limit] + [limit]
        for bands in tried if self.bands == "auto" else [min(self.bands, self.steps)]:
            if self.strategy == "square_root":
                yield square_root(bands, momentum=self.update.momentum), ordered or bands
            else:
                yield banded(self.update, self.steps, bands), ordered or bands

    def _releases(self, kept: CorrelatedPlan, sampled: Batches) -> Releases:
        steps = gradient_steps if self._is_dp_sgd(kept) else partial(correlated_steps, kept)
        return steps(sampled, self._clipping(), self.steps)

    def _is_dp_sgd(self, kept: CorrelatedPlan) -> bool:
        return self.participation == "cyclic_poisson" and kept.correlation() == INDEPENDENT

    def _clipping(self) -> L2 | Normalised:
        return L2(self.clip_norm) if self.clipping == "l2" else Normalised(self.clip_norm, self.stability)


@dataclass(frozen=True)
class DPFTRL(Sampled):
    """DP-FTRL: sums of gradients with noise from binary trees (Kairouz et al. 2021, arXiv:2103.00039), no sampling.

    Every record takes part once in a pass over all records. A tree over `restart` passes has a noisy sum for each of
    its nodes; a sum of the first t gradients is that of few nodes.

    Differences from the paper: a tree's last, incomplete nodes are not completed by virtual steps.

    expected_batch_size: where the number of records is public. sampling_rate: instead, where it is not; a pass has as
    many steps as batches. clip_norm: the L2 bound C of a record's gradient. restart: passes after which a new tree
    begins.
    """

    clip_norm: Bound = 1.0
    restart: Count = 1

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The least noise with which the count, if it is private, and the whole run fit the target."""
        sampled = in_order(self.sampled(public), public)
        parts, asked = round(1 / sampled.rate), workload(self.update, self.steps)

        def releases(kept: CorrelatedPlan) -> Releases:
            return correlated_steps(kept, sampled, L2(self.clip_norm), self.steps)

        tree, independent = (
            CorrelatedPlan.of(strategy, "fixed_order", parts)
            for strategy in (Tree(self.restart * parts), INDEPENDENT)
        )
        own, other = (
            calibrated_multiplier(releases(kept), target, public, sampled) for kept in (tree, independent)
        )
        kept = tree.beside_independent(asked, own=own, independent=other)
        return plan_fixed(
            releases(kept),
            target=target,
            public=public,
            sampled=sampled,
            steps=self.steps,
            noise_multiplier=own,
            method_params=kept,
        )

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One gradient with the noise of its step, one update."""
        return correlated_step(state, plan, barrier, clipping=L2(self.clip_norm), update=self.update)
