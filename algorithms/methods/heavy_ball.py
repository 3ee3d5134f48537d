"""DP-SHB: gradient descent with Polyak's heavy ball on noised gradients; with momentum 0 it is DP-GD.

Kuru, Birbil, Gürbüzbalaban and Yıldırım 2022 ("Differentially private accelerated optimization algorithms",
arXiv:2008.01989). One release an iteration, with the same noise in each: Laplace noise on an L1 bound as in
the paper, or Gaussian noise on an L2 bound; of all records, or of a fresh sample without replacement.

Differences from the paper: the bound of a record's gradient is enforced by clipping; the smoothness that sets the step
size is a public bound, since the largest eigenvalue of the data would give the data away; noise for (epsilon, delta)
is calibrated to the whole run. Noise has the scale that the theorem asks for; the published code draws scale
b / sqrt(2), so its curves show epsilon 1.41, not 1.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.momentum import Curve, Path, Settings, State, check, iteration, one_stage, plan_path
from algorithms.errors import RefusedError
from algorithms.privacy.barrier.barrier import Barrier


@dataclass(frozen=True)
class HeavyBall(Settings):
    """Settings of DP-SHB; momentum: beta, or None for (1 - sqrt(a mu)) / (1 + sqrt(a mu)) at step size a."""

    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """Equal noise in all iterations, the least that fits the target."""
        check(self, target, public)
        curve = self.curve(public)
        size = self.step_size(curve)
        path = Path(one_stage(self.steps, size), [self._momentum(curve, size)])
        return plan_path(self, target, public, curve=curve, path=path, importance=np.ones(self.steps))

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One noised gradient at the iterate; then theta - a g + beta (theta - theta before)."""
        now = iteration(plan, int(state.count))
        gradient = self.gradient(state.parameters, plan, now.noise_multiplier, barrier)
        kept = now.momentum * (state.parameters - state.previous)
        return state.moved(state.parameters - now.step_size * gradient + kept)

    def _momentum(self, curve: Curve, step_size: float) -> float:
        if self.momentum is not None:
            return self.momentum
        if self.regularisation == 0.0:
            raise RefusedError(
                "without regularisation the objective has no known strong convexity to take the momentum from; set"
                " algorithm.momentum, or algorithm.regularisation above 0."
            )
        return curve.momentum(step_size)
