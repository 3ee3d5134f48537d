"""Noise that changes from step to step on a course that is public and fixed before the first step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algorithms.algorithm import Plan, Target
from algorithms.gradients import L2
from algorithms.planning import plan_fixed
from algorithms.privacy.errors import BudgetRefused
from algorithms.privacy.releases import Gaussian, Release, gradient_release
from algorithms.public import Public
from algorithms.sampled import Batches, count_release

Array = NDArray[np.float64]

LEVELS = 24
"""The most different noise multipliers in a plan; each costs the accountant a distribution of its own."""


def plan_course(
    weights: Array,
    *,
    sampled: Batches,
    clip_norm: float,
    target: Target,
    public: Public,
    own: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of noised gradient steps whose noise multipliers are the plan's times `weights`, shape [steps].

    The whole course is calibrated at once. The plan keeps the weights under "noise", as runs of steps.
    Raises Refused where no noise fits the target.
    """
    values, counts = in_levels(weights)
    first = [] if sampled.divisor is not None else [(count_release(target.count_noise), 1)]

    def releases(noise_multiplier: float) -> list[tuple[Release, int]]:
        later = [
            (_step(sampled, clip_norm, noise_multiplier * float(value)), int(count))
            for value, count in zip(values, counts, strict=True)
        ]
        return [*first, *later]

    runs = [
        {"steps": int(count), "weight": float(value)} for value, count in zip(values, counts, strict=True)
    ]
    return plan_fixed(
        releases,
        target=target,
        public=public,
        steps=len(weights),
        sampling_rate=sampled.rate,
        divisor=sampled.divisor,
        own={"noise": runs, **(own or {})},
    )


def multiplier_at(plan: Plan, count: int) -> float:
    """The noise multiplier of the step after `count` others; raises BudgetRefused after the last."""
    runs: Sequence[Mapping[str, Any]] = plan.own["noise"]
    for run in runs:
        if count < run["steps"]:
            return float(plan.noise_multiplier * run["weight"])
        count -= run["steps"]
    raise BudgetRefused("the plan allows no further release; calibrate a run of more steps.")


def in_levels(weights: Array, levels: int = LEVELS) -> tuple[Array, Array]:
    """Positive weights, shape [steps], as at most `levels` runs of equal ones: their values and lengths, [runs].

    A run takes its geometric mean, so where there are fewer runs of equal weights they are kept. Else runs end where
    they follow the logarithm with the least squared error: their density goes with its slope to the power 2/3.
    """
    moves = np.abs(np.diff(np.log(weights), prepend=math.log(weights[0])))
    cells = np.cumsum(moves > 0)
    if cells[-1] >= levels:
        course = np.cumsum(moves ** (2.0 / 3.0))
        cells = np.minimum(np.floor(course / course[-1] * levels), levels - 1)
    starts = np.flatnonzero(np.diff(cells, prepend=-1.0))
    counts = np.diff(np.append(starts, len(weights)))
    return np.exp(np.add.reduceat(np.log(weights), starts) / counts), counts


def _step(sampled: Batches, clip_norm: float, noise_multiplier: float) -> Release:
    return gradient_release(sampled.sampling, L2(clip_norm), Gaussian(noise_multiplier), 1.0)
