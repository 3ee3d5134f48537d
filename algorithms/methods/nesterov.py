"""DP-NAG and DP-MASG: Nesterov's accelerated gradient on noised gradients, with one step size or in stages.

Kuru, Birbil, Gürbüzbalaban and Yıldırım 2022 ("Differentially private accelerated optimization algorithms",
arXiv:2008.01989), Section 4. One release an iteration, at the extrapolated point. The "_opt" variants end
after the number of iterations with the least error bound, and divide the noise so that this bound is least.

Differences from the paper: as in `heavy_ball`, and Gaussian noise is divided by its own rule, b_t^2 ~ a_t^(-1/2); with
samples the epsilons are those that minimise the noise at their amplified scale.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.momentum import (
    Curve,
    Path,
    Settings,
    Stage,
    State,
    best_length,
    check,
    coefficients,
    cut,
    growing_stages,
    iteration,
    one_stage,
    plan_path,
)
from algorithms.errors import RefusedError
from algorithms.privacy.barrier.barrier import Barrier


@dataclass(frozen=True)
class Nesterov(Settings):
    """Settings of Nesterov's methods.

    variant: one step size ("nag") or stages ("masg"); "_opt" chooses the number of iterations, `steps` at most, and
    divides the noise. initial_gap: public bound on how far the objective at the start lies above its least value.
    """

    variant: Literal["nag", "nag_opt", "masg", "masg_opt"] = "nag_opt"
    initial_gap: Annotated[float, Field(gt=0, lt=math.inf)] = 10.0

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The least noise that fits the target, equal or divided; raises RefusedError without regularisation."""
        check(self, target, public)
        if self.regularisation == 0.0:
            raise RefusedError(
                "Nesterov's momentum needs a strongly convex objective; set algorithm.regularisation above 0."
            )
        curve = self.curve(public)
        stages = self._stages(curve)
        importance = np.ones(self.steps)
        if self.variant.endswith("_opt"):
            gap = self.initial_gap
            length = best_length(self, target, public, curve=curve, stages=stages, gap=gap)
            stages = cut(stages, length)
            importance = coefficients(stages, curve)
        path = Path(stages, [curve.momentum(stage.step_size) for stage in stages])
        return plan_path(self, target, public, curve=curve, path=path, importance=importance)

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One noised gradient at the point ahead of the iterate, and a step from there."""
        now = iteration(plan, int(state.count))
        kept = 0.0 if now.restarts else now.momentum * (state.parameters - state.previous)
        ahead = state.parameters + kept
        gradient = self.gradient(ahead, plan, now.noise_multiplier, barrier)
        return state.moved(ahead - now.step_size * gradient)

    def _stages(self, curve: Curve) -> Sequence[Stage]:
        size = self.step_size(curve)
        if self.variant in ("nag", "nag_opt"):
            return one_stage(self.steps, size)
        return growing_stages(self.steps, size, curve.condition_number)
