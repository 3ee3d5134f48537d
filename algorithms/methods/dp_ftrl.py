"""DP-FTRL: gradients whose sums are noised by binary trees, without sampling (Kairouz et al. 2021, arXiv:2103.00039).

Every record takes part once in a pass over all records. A tree over `restart` passes has a noised sum for each of its
nodes; a sum of the first t gradients is that of few nodes. One Gaussian event for the whole run, charged with its first
step: see `accounting.correlated`.

Differences from the paper: records are divided into the batches of a pass by a coin of their own, not by their place in
a list; a tree's last, incomplete nodes are not completed by virtual steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field
from torch import Tensor

from algorithms.core.calibration import plan_fixed
from algorithms.core.correlated_steps import (
    INDEPENDENT,
    CorrelatedPlan,
    correlated_step,
    correlated_steps,
    in_order,
    multiplier,
)
from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import State, batches, start
from algorithms.core.optimizers import STRICT, OptimizerConfig
from algorithms.core.strategies import workload
from algorithms.gradients import L2
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.correlated import Tree
from algorithms.privacy.mechanisms.release import Release


@dataclass(frozen=True)
class DPFTRL:
    """Settings of DP-FTRL.

    expected_batch_size: where the number of records is public. sampling_rate: instead, where it is not; a pass has as
    many steps as batches. clip_norm: the L2 bound C of a record's gradient. restart: passes after which a new tree
    begins.
    """

    steps: Annotated[int, Field(ge=1)]
    expected_batch_size: Annotated[int, Field(ge=1)] | None = None
    sampling_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    clip_norm: Annotated[float, Field(ge=1e-12, le=1e12)] = 1.0
    restart: Annotated[int, Field(ge=1)] = 1
    update: OptimizerConfig = field(default_factory=OptimizerConfig)

    __pydantic_config__ = STRICT

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The least noise with which the count, if it is private, and the whole run fit the target."""
        sampled = in_order(
            batches(public, expected_batch_size=self.expected_batch_size, sampling_rate=self.sampling_rate),
            public,
        )
        parts, asked = round(1 / sampled.rate), workload(self.update, self.steps)

        def releases(kept: CorrelatedPlan) -> Callable[[float], list[tuple[Release, int]]]:
            clipping = L2(self.clip_norm)
            return correlated_steps(kept, sampled, clipping, steps=self.steps, count_noise=target.count_noise)

        tree, independent = (
            CorrelatedPlan.of(strategy, "fixed_order", parts)
            for strategy in (Tree(self.restart * parts), INDEPENDENT)
        )
        kept = tree.beside_independent(
            asked,
            own=multiplier(releases(tree), target),
            independent=multiplier(releases(independent), target),
        )
        return plan_fixed(
            releases(kept),
            target=target,
            public=public,
            steps=self.steps,
            sampling_rate=sampled.rate,
            divisor=sampled.divisor,
            method_params=kept,
        )

    def init(self, parameters: Tensor, plan: Plan) -> State:
        """The state at the model's start."""
        return start(self.update, parameters, plan)

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One gradient with the noise of its step, one update."""
        return correlated_step(state, plan, barrier, clipping=L2(self.clip_norm), update=self.update)

    def released(self, state: State) -> Tensor:
        """The last iterate, or the average the settings ask for, shape [d]."""
        return self.update.published(state.moving)
