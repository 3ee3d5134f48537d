"""The plan of descent with momentum: the path of step sizes, and the course of the noise along it.

Pure epsilon is divided over the iterations by Proposition 4.2 of arXiv:2008.01989, numerically where sampling leaves
no closed form. For (epsilon, delta) the noise keeps a course that is fixed beforehand and is scaled until the whole
schedule just meets the target: Laplace noise the course of pure epsilon, Gaussian noise b_t^2 ~ a_t^(-1/2), which is
best where precisions add up, as those of Gaussian noise on all records do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from algorithms.accelerated import WHAT, Settings
from algorithms.algorithm import Plan, Target
from algorithms.allocation import Array, Curve, Stage, divide_epsilon, error_bounds, grouped, laplace_scale
from algorithms.planning import plan_fixed, plan_given
from algorithms.privacy.errors import BudgetRefused
from algorithms.privacy.releases import Release
from algorithms.public import Public

NOT_PRIVATE = (
    "The smoothness constant, which sets the step sizes, was computed from the private records and no noise covers"
    " it: the stated epsilon does not hold, and the run is only good to reproduce a publication."
)

_KINDS = {
    ("laplace", True): 24,
    ("laplace", False): 24,
    ("knorm", True): 24,
    ("gaussian", True): 64,
    ("gaussian", False): 8,
}
"""The most different releases in a plan, by noise and whether all records take part: what accounts within seconds.

The fewer, the coarser the division; 24 cost the error bound at most 2 percent over 300 iterations."""

_ROUNDING = 1e-12
"""Share of a pure budget that is left to the rounding of its sum."""


@dataclass(frozen=True)
class Path:
    """Stages, and the momentum in each."""

    stages: Sequence[Stage]
    momenta: Sequence[float]

    @property
    def steps(self) -> int:
        """Iterations in all."""
        return sum(stage.steps for stage in self.stages)


@dataclass(frozen=True)
class Iteration:
    """The public numbers of one iteration; restarts: whether a stage begins, where momentum is dropped."""

    step_size: float
    momentum: float
    noise_multiplier: float
    restarts: bool


def iteration(plan: Plan, count: int) -> Iteration:
    """The numbers of the iteration after `count` others."""
    stage, place = _at(plan.own["stages"], count)
    weight, _ = _at(plan.own["noise"], count)
    return Iteration(
        step_size=stage["step_size"],
        momentum=stage["momentum"],
        noise_multiplier=plan.noise_multiplier * weight["weight"],
        restarts=place == 0,
    )


def _at(runs: Sequence[Mapping[str, Any]], count: int) -> tuple[Mapping[str, Any], int]:
    """The run of iterations that holds the one after `count` others, and how many of the run's came before it."""
    for run in runs:
        if count < run["steps"]:
            return run, count
        count -= run["steps"]
    raise BudgetRefused("the plan allows no further release; calibrate a run of more steps.")


def plan_path(
    settings: Settings, target: Target, public: Public, *, curve: Curve, path: Path, importance: Array
) -> Plan:
    """The plan of a run along `path` whose noise follows `importance`, shape [steps]: a_t, or ones for equal noise."""
    multipliers, counts = _course(settings, target, public, importance)
    level = _mean(multipliers, counts, power=2 if settings.noise == "gaussian" else 1)
    weights = [float(multiplier / level) for multiplier in multipliers]

    def releases(noise_multiplier: float) -> list[tuple[Release, int]]:
        return [
            (settings.release(public, noise_multiplier * weight), int(count))
            for weight, count in zip(weights, counts, strict=True)
        ]

    shared: dict[str, Any] = {
        "target": target,
        "public": public,
        "steps": path.steps,
        "sampling_rate": settings.sampling(public).rate,
        "divisor": settings.release(public, level).divisor,
        "adjacency": settings.adjacency,
        "own": _own(settings, curve, path, weights, counts),
    }
    if target.accountant != "pure":
        return plan_fixed(releases, **shared)
    schedule = [(release.event(), count) for release, count in releases(level)]
    return plan_given(schedule, noise_multiplier=level, **shared)


def best_length(
    settings: Settings, target: Target, public: Public, *, curve: Curve, stages: Sequence[Stage], gap: float
) -> int:
    """The number of iterations with the least error bound (32), from a public bound on the objective's gap.

    The bound is that of all records: a sample's amplification makes up for its size, to first order.
    """
    records = public.known_records(WHAT)
    if settings.noise != "gaussian":
        sensitivity = settings.bounds_apart * settings.clipping(public).sensitivity
        scale = sensitivity / (records * target.budget.epsilon)
        noise, power = public.parameters * scale**2 * _spread(settings, public), 1.0 / 3.0
    else:
        scale = _once(settings, target, public).noise_scale / records
        noise, power = public.parameters * scale**2 / 2.0, 1.0 / 2.0
    bounds = error_bounds(stages, curve, gap=gap, noise=noise, power=power)
    return int(np.argmin(bounds)) + 1


def _spread(settings: Settings, public: Public) -> float:
    """Half the variance of a coordinate of pure noise of scale 1; see `noised` for that of K-norm noise in the box."""
    d = public.parameters
    return 1.0 if settings.noise == "laplace" else (d + 2) * (d + 3) / 12


def _once(settings: Settings, target: Target, public: Public) -> Release:
    """The one Gaussian release of all records that would spend the target."""
    whole = replace(settings, batch_size=None)

    def releases(noise_multiplier: float) -> list[tuple[Release, int]]:
        return [(whole.release(public, noise_multiplier), 1)]

    plan = plan_fixed(
        releases,
        target=target,
        public=public,
        steps=1,
        sampling_rate=1.0,
        divisor=float(public.known_records(WHAT)),
        adjacency=settings.adjacency,
    )
    return whole.release(public, plan.noise_multiplier)


def _course(settings: Settings, target: Target, public: Public, importance: Array) -> tuple[Array, Array]:
    """The noise multipliers of runs of iterations, right for pure epsilon and else up to a factor; shapes [groups]."""
    rate = settings.sampling(public).rate
    values, counts = grouped(importance, _KINDS[settings.noise, rate == 1.0])
    if settings.noise == "gaussian":
        return values**-0.25, counts
    epsilons = divide_epsilon(target.budget.epsilon * (1.0 - _ROUNDING), values, counts, rate=rate)
    return settings.bounds_apart * laplace_scale(epsilons, rate=rate), counts


def _mean(multipliers: Array, counts: Array, *, power: int) -> float:
    """The equal multiplier with the same sum of epsilons (power 1) or of precisions (power 2)."""
    return float(np.average(multipliers**-power, weights=counts) ** (-1.0 / power))


def _own(
    settings: Settings, curve: Curve, path: Path, weights: Sequence[float], counts: Array
) -> dict[str, Any]:
    """What the plan keeps: the path, the noise relative to the plan's multiplier, and where L came from."""
    own: dict[str, Any] = {
        "smoothness": curve.smoothness,
        "strong_convexity": curve.strong_convexity,
        "stages": [
            {"steps": stage.steps, "step_size": stage.step_size, "momentum": momentum}
            for stage, momentum in zip(path.stages, path.momenta, strict=True)
        ],
        "noise": [
            {"steps": int(count), "weight": weight} for weight, count in zip(weights, counts, strict=True)
        ],
    }
    return own | ({"not_private": NOT_PRIVATE} if settings.smoothness_is_data_dependent else {})
