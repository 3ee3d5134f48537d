"""Plans with a noise multiplier given by hand, whose cost nobody computed: for what happens after the barrier."""

from dataclasses import replace
from typing import Any

import dp_accounting as dp

from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import Array
from algorithms.privacy.accounting.noise_search import in_levels


def plan_with(
    noise_multiplier: float,
    *,
    steps: int,
    batch: int = 100,
    records: int = 1000,
    parameters: int = 10,
    weights: Array | None = None,
    **method_params: Any,
) -> Plan:
    """A plan of `steps` with an expected batch of `records`; weights: of the noise of each step, shape [steps]."""
    if weights is not None:
        runs = zip(*in_levels(weights), strict=True)
        method_params["noise"] = [{"steps": int(count), "weight": float(weight)} for weight, count in runs]
    return Plan(
        target=Target(Budget(1.0, 1e-5)),
        facts=PlanningFacts(records, parameters, 1, 2),
        steps=steps,
        noise_multiplier=noise_multiplier,
        sampling_rate=batch / records,
        divisor=float(batch),
        schedule=[],
        epsilon={"pld": 1.0},
        method_params=method_params,
    )


def with_schedule(plan: Plan) -> Plan:
    """The plan with the events of its noised gradients, which a barrier's filter wants to see."""
    schedule = [
        (
            dp.PoissonSampledDpEvent(
                plan.sampling_rate, dp.GaussianDpEvent(plan.noise_multiplier * run["weight"])
            ),
            run["steps"],
        )
        for run in plan.method_params["noise"]
    ]
    return replace(plan, schedule=schedule)


def with_equal_steps(plan: Plan) -> Plan:
    """The same for a plan whose steps all have its noise multiplier, and that states nothing else."""
    event = dp.PoissonSampledDpEvent(plan.sampling_rate, dp.GaussianDpEvent(plan.noise_multiplier))
    return replace(plan, schedule=[(event, plan.steps)])
