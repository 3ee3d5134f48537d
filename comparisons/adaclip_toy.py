"""Figure 2 of the AdaCliP paper, run anew: `python -m comparisons.adaclip_toy FOLDER`.

Pichapati, Suresh, Yu, Reddi and Kumar 2019 (arXiv:1908.07643): 1,000 records (y, 0, .., 0) in d dimensions, half with
y = 1 and half with y = -1, the loss 1/2 |theta - x|^2, whose optimum is 0; batches of one record, 10 epochs, a learning
rate of .01, a clip norm of 1 for DP-SGD, and noise of standard deviation .1 for each record.

The algorithms are those of the catalogue and ask the real barrier. Noise is given here and not calibrated: the plan is
one of fixed releases at the multiplier .1, and its target is whatever they cost, which no one should spend on data.

Differences from the paper: Poisson samples of one record in the mean instead of exactly one; the start, which the text
leaves open, is either the optimum, where the least movement wins, or a public random point at distance 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from algorithms.adaclip import AdaCliP
from algorithms.algorithm import Algorithm, Plan, Target
from algorithms.dp_sgd import DPSGD
from algorithms.gradients import L2
from algorithms.models import Model
from algorithms.planning import plan_given
from algorithms.privacy.barrier import Barrier
from algorithms.privacy.budget import Budget
from algorithms.privacy.filters import ScheduleFilter
from algorithms.privacy.noise import seeded_generator
from algorithms.privacy.releases import Gaussian, Poisson, gradient_release
from algorithms.privacy.trace import Trace
from algorithms.public import Public
from algorithms.update import Update
from tasks.figures import LIGHT, Theme, png

RECORDS, EPOCHS, NOISE, LEARNING_RATE, DELTA = 1000, 10, 0.1, 0.01, 1e-5
DIMENSIONS = (1, 10, 100, 500, 1000)
STARTS = ("optimum", "random")
VARIANCES = (1e-8, 1e-4, 1.0)
"""h2, the most that AdaCliP takes for the variance of a coordinate."""
SEEDS = 2

_STEPS = RECORDS * EPOCHS
_UPDATE = Update(learning_rate=LEARNING_RATE)
METHODS: dict[str, Algorithm[Any]] = {
    "DP-SGD": DPSGD(steps=_STEPS, batch_size=1, update=_UPDATE),
    "AdaCliP, free scale": AdaCliP(steps=_STEPS, batch_size=1, update=_UPDATE),
    **{
        f"AdaCliP, h2 = {h2:g}": AdaCliP(steps=_STEPS, batch_size=1, update=_UPDATE, scale="paper", h2=h2)
        for h2 in VARIANCES
    },
}


@dataclass(frozen=True)
class Toy:
    """The records of the toy: features [n, d], labels [n], which are not used."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]


class Mean(nn.Module):
    """theta - x, with theta as the weights of a linear layer, which the engine knows."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.theta = nn.Linear(1, dimension, bias=False)
        nn.init.zeros_(self.theta.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        estimate: Tensor = self.theta(torch.ones(len(inputs), 1, dtype=inputs.dtype, device=inputs.device))
        return estimate - inputs


def records(dimension: int, *, count: int = RECORDS) -> Toy:
    """The records in some dimension."""
    features = np.zeros((count, dimension), np.float32)
    features[:, 0] = np.where(np.arange(count) < count // 2, 1.0, -1.0)
    return Toy(features, np.zeros(count, np.int64))


def model(dimension: int) -> Model:
    """The model theta with the loss 1/2 |theta - x|^2."""
    return Model("mean", Mean(dimension), _half_squares, lambda outputs: outputs)


def _half_squares(outputs: Tensor, _labels: Tensor) -> Tensor:
    return 0.5 * outputs.square().sum(dim=1)


def start_of(name: str, dimension: int, *, seed: int) -> Tensor:
    """The start: the optimum, or a random point at distance 1 from it."""
    if name == "optimum":
        return torch.zeros(dimension)
    drawn = torch.randn(dimension, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.norm()


def plan_of(dimension: int, *, steps: int, count: int = RECORDS) -> Plan:
    """A plan at the toy's noise, whose target is what that costs.

    The cost is the same for every clipping of norm 1, shifted and scaled or not. It is not small.
    """
    release = gradient_release(Poisson(1.0 / count), L2(1.0), Gaussian(NOISE), 1.0)
    return plan_given(
        [(release.event(), steps)],
        target=Target(Budget(math.inf, DELTA), "rdp"),
        public=Public(records=count, parameters=dimension, layers=1, classes=1),
        steps=steps,
        noise_multiplier=NOISE,
        sampling_rate=1.0 / count,
        divisor=1.0,
    )


def error(
    method: Algorithm[Any], dimension: int, start: str, *, seed: int, plan: Plan, data: Toy | None = None
) -> float:
    """The squared distance of the last parameters from the optimum."""
    trace = Trace()
    spend = ScheduleFilter(plan.schedule, plan.cost)
    barrier = Barrier(
        data or records(dimension),
        model(dimension),
        spend=spend,
        generator=seeded_generator(seed),
        delta=DELTA,
        trace=trace,
    )
    state = method.init(start_of(start, dimension, seed=seed), plan)
    for trace.step in range(plan.steps):
        state = method.step(state, plan, barrier)
    return float(method.released(state).double().square().sum())


def rows(*, seeds: int = SEEDS) -> Iterator[dict[str, Any]]:
    """A row a run: method, dimension, start, seed and the squared distance at its end."""
    for dimension in DIMENSIONS:
        plan, data = plan_of(dimension, steps=_STEPS), records(dimension)
        for (name, method), start, seed in product(METHODS.items(), STARTS, range(seeds)):
            found = error(method, dimension, start, seed=seed, plan=plan, data=data)
            yield {"method": name, "dimension": dimension, "start": start, "seed": seed, "error": found}
