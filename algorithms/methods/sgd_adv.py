"""SGD-Adv: DP-SGD whose noise follows from advanced composition (Bassily, Smith and Thakurta 2014).

A baseline of Lee and Kifer 2018, section 5. The budget is divided over T steps by advanced composition (Dwork and
Roth 2014, Corollary 3.21), multiplied by n / 2B for the sampling, and turned into noise by the classical Gaussian
mechanism (Dwork and Roth 2014, Appendix A) with sensitivity 2 C, that of replacing a record.

Formal guarantee: not the analysis above, which asks for step epsilons below 1, but the PLD cost of the
releases, PoissonSampled(B / n, Gaussian(z)) T times. The plan states that cost, and the other as `claimed_epsilon`.

Differences from the paper's code: Poisson samples where it drew a fixed number of records.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field
from torch import Tensor

from algorithms.core.calibration import Claim, plan_given
from algorithms.core.method import Plan, PublicInfo, Target
from algorithms.core.minibatch import State, classic_batches, gradient_steps, sgd_step, start
from algorithms.core.optimizers import STRICT, OptimizerConfig
from algorithms.gradients import L2
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.barrier.barrier import Barrier


@dataclass(frozen=True)
class SGDAdv:
    """Settings of SGD-Adv; the number of records must be public.

    steps: null for n epsilon / 500. expected_batch_size: null for sqrt(n) + 10.
    clip_norm: the L2 bound C of a record's gradient.
    """

    steps: Annotated[int, Field(ge=1)] | None = None
    expected_batch_size: Annotated[int, Field(ge=1)] | None = None
    clip_norm: Annotated[float, Field(ge=1e-12, le=1e12)] = 3.0
    update: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(0.1, weight_decay=1e-3))

    __pydantic_config__ = STRICT

    def plan(self, target: Target, public: PublicInfo) -> Plan:
        """The noise by advanced composition, at what it costs; raises RefusedError where that is above the target."""
        sampled = classic_batches(
            target, public, name="sgd_adv", expected_batch_size=self.expected_batch_size
        )
        records = public.known_records("'sgd_adv'")
        steps = self.steps or max(1, round(records * target.budget.epsilon / 500))
        multiplier = noise_multiplier_by_advanced_composition(
            target.budget, steps=steps, sampling_rate=sampled.rate
        )
        releases = gradient_steps(sampled, L2(self.clip_norm), steps=steps, count_noise=target.count_noise)
        return plan_given(
            [(release.event(), count) for release, count in releases(multiplier)],
            target=target,
            public=public,
            steps=steps,
            noise_multiplier=multiplier,
            sampling_rate=sampled.rate,
            divisor=sampled.divisor,
            method_params=Claim(target.budget.epsilon),
        )

    def init(self, parameters: Tensor, plan: Plan) -> State:
        """The state at the model's start."""
        return start(self.update, parameters, plan)

    def step(self, state: State, plan: Plan, barrier: Barrier) -> State:
        """One noised gradient over a fresh Poisson sample, one update."""
        return sgd_step(state, plan, barrier, clipping=L2(self.clip_norm), update=self.update)

    def released(self, state: State) -> Tensor:
        """The last iterate, or the average the settings ask for, shape [d]."""
        return self.update.published(state.moving)


def noise_multiplier_by_advanced_composition(budget: Budget, *, steps: int, sampling_rate: float) -> float:
    """Standard deviation over C of each step's noise: half of delta is for the composition, half for the steps."""
    step_epsilon = budget.epsilon / (2 * math.sqrt(2 * steps * math.log(2 / budget.delta)))
    step_delta = budget.delta / (2 * steps)
    amplified = step_epsilon / (2 * sampling_rate)
    return 2 / amplified * math.sqrt(2 * math.log(1.25 / step_delta))
