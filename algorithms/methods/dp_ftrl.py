"""DP-FTRL: sums of gradients with noise from binary trees, without sampling (Kairouz et al. 2021, arXiv:2103.00039).

Every record takes part once in a pass over all records. A tree over `restart` passes has a noisy sum for each of its
nodes; a sum of the first t gradients is that of few nodes. One Gaussian event for the whole run, charged with its first
step: see `accounting.correlated`.

Differences from the paper: records are divided into the batches of a pass by a coin of their own, not by their place in
a list; a tree's last, incomplete nodes are not completed by virtual steps.
"""

from dataclasses import dataclass

from algorithms.core.calibration import Releases, calibrated_multiplier
from algorithms.core.correlated import (
    INDEPENDENT,
    CorrelatedPlan,
    correlated_step,
    correlated_steps,
    in_order,
    workload,
)
from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import Sampled, State, plan_steps
from algorithms.core.optimizers import Bound, Count
from algorithms.gradients import L2
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.correlated import Tree


@dataclass(frozen=True)
class DPFTRL(Sampled):
    """Settings of DP-FTRL.

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
            clipping = L2(self.clip_norm)
            return correlated_steps(kept, sampled, clipping, steps=self.steps, count_noise=target.count_noise)

        tree, independent = (
            CorrelatedPlan.of(strategy, "fixed_order", parts)
            for strategy in (Tree(self.restart * parts), INDEPENDENT)
        )
        kept = tree.beside_independent(
            asked,
            own=calibrated_multiplier(releases(tree), target),
            independent=calibrated_multiplier(releases(independent), target),
        )
        return plan_steps(
            releases(kept), sampled, steps=self.steps, target=target, public=public, method_params=kept
        )

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One gradient with the noise of its step, one update."""
        return correlated_step(state, plan, barrier, clipping=L2(self.clip_norm), update=self.update)
