"""Reproduces Figure 2 of the AdaCliP paper: `python -m comparisons.adaclip_toy FOLDER`.

Pichapati, Suresh, Yu, Reddi and Kumar 2019 (arXiv:1908.07643): 1,000 records (y, 0, .., 0) in d dimensions, half with
y = 1 and half with y = -1; the loss 1/2 |theta - x|^2, whose optimum is 0; batches of one record, 10 epochs, a learning
rate of .01, a clip norm of 1 for DP-SGD, and noise of standard deviation .1 for each record.

The algorithms are those of the catalogue and use the real barrier. The noise is not calibrated: the plan has fixed
releases at the noise multiplier .1 under an infinite budget, and its filter counts nothing, to be fast. Nobody should
do this with private data: 1,000 of the 10,000 steps alone cost an epsilon of 341 by PLD at delta = 1e-5.

Differences from the paper: batches are Poisson samples of one record on average, not of exactly one; the start, which
the text leaves open, is either the optimum, where the least movement wins, or a public random point at distance 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from dp_accounting import DpEvent
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from algorithms.core.method import Algorithm
from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.gradients import L2
from algorithms.methods.adaptive_clipping import AdaCliP
from algorithms.methods.dp_sgd import DPSGD
from algorithms.models import Model
from algorithms.privacy.accounting import Budget
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian, gradient_release
from algorithms.privacy.mechanisms.sampling import Poisson
from tasks.reporting.figures import LIGHT, Theme, png

RECORDS, EPOCHS, NOISE, LEARNING_RATE, DELTA = 1000, 10, 0.1, 0.01, 1e-5
STARTS = ("random", "optimum")
CASES = (
    *((dimension, "random") for dimension in (1, 10, 100, 500, 1000)),
    *((dimension, "optimum") for dimension in (100, 1000)),
)
"""Dimensions and starts; fewer from the optimum, since a run takes ten seconds."""
VARIANCES = (1e-8, 1e-4, 1.0)
"""h2, the upper bound on AdaCliP's estimate of a coordinate's variance."""
PRINTED = (1e-8, 1.0)
"""h2 of the runs with the paper's literal update, including its start s_0 = sqrt(h1 h2)."""
SEEDS = 3

_DOTS_PER_INCH = 160
_STEPS = RECORDS * EPOCHS
_UPDATE = OptimizerConfig(learning_rate=LEARNING_RATE)
METHODS: dict[str, Algorithm[Any]] = {
    "DP-SGD": DPSGD(steps=_STEPS, expected_batch_size=1, update=_UPDATE),
    "AdaCliP, free scale": AdaCliP(steps=_STEPS, expected_batch_size=1, update=_UPDATE),
    **{
        f"AdaCliP, h2 = {h2:g}": AdaCliP(
            steps=_STEPS, expected_batch_size=1, update=_UPDATE, scale="paper", h2=h2
        )
        for h2 in VARIANCES
    },
    **{
        f"AdaCliP as printed, h2 = {h2:g}": AdaCliP(
            steps=_STEPS, expected_batch_size=1, update=_UPDATE, scale="paper", h2=h2, paper_update=True
        )
        for h2 in PRINTED
    },
}


@dataclass(frozen=True)
class Toy:
    """The records of the toy: features [n, d] and labels [n], which are unused."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]


class Uncounted:
    """A privacy filter that allows everything, for synthetic records that belong to nobody."""

    def affords(self, event: DpEvent) -> bool:
        return True

    def charge(self, event: DpEvent) -> None:
        pass

    def epsilon_spent(self, delta: float) -> float:
        return math.inf


class Mean(nn.Module):
    """theta - x, with theta as the weights of a linear layer, which the engine supports."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.theta = nn.Linear(1, dimension, bias=False)
        nn.init.zeros_(self.theta.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        estimate: Tensor = self.theta(torch.ones(len(inputs), 1, dtype=inputs.dtype, device=inputs.device))
        return estimate - inputs


def records(dimension: int, *, count: int = RECORDS) -> Toy:
    """The records in the given dimension."""
    features = np.zeros((count, dimension), np.float32)
    features[:, 0] = np.where(np.arange(count) < count // 2, 1.0, -1.0)
    return Toy(features, np.zeros(count, np.int64))


def model(dimension: int) -> Model:
    """The model with parameters theta and the loss 1/2 |theta - x|^2."""
    return Model("mean", Mean(dimension), _half_squares, lambda outputs: outputs)


def _half_squares(outputs: Tensor, _labels: Tensor) -> Tensor:
    return 0.5 * outputs.square().sum(dim=1)


def start_of(name: str, dimension: int, *, seed: int) -> Tensor:
    """The start: the optimum, or a random point at distance 1 from it."""
    if name == "optimum":
        return torch.zeros(dimension)
    drawn = torch.randn(dimension, generator=torch.Generator().manual_seed(seed))
    unit: Tensor = drawn / drawn.norm()
    return unit


def plan_of(dimension: int, *, steps: int, count: int = RECORDS) -> Plan:
    """A plan with the toy's noise under an infinite budget.

    Its events are the same for every clipping to norm 1, shifted and scaled or not.
    """
    release = gradient_release(Poisson(1.0 / count), L2(1.0), Gaussian(NOISE), 1.0)
    return Plan(
        schedule=[(release.event(), steps)],
        epsilon={"rdp": math.inf},
        target=Target(Budget(math.inf, DELTA), "rdp"),
        facts=PlanningFacts(records=count, parameters=dimension, layers=1, classes=1),
        steps=steps,
        noise_multiplier=NOISE,
        sampling_rate=1.0 / count,
        divisor=1.0,
    )


def distances(
    method: Algorithm[Any], dimension: int, start: str, *, seed: int, plan: Plan, data: Toy | None = None
) -> NDArray[np.float64]:
    """The squared distance from the optimum after each step, shape [steps]."""
    trace = Trace()
    barrier = Barrier(
        data or records(dimension),
        model(dimension),
        privacy_filter=Uncounted(),
        generator=seeded_generator(seed),
        delta=DELTA,
        trace=trace,
    )
    state, squared_distances = method.init(start_of(start, dimension, seed=seed), plan), []
    for trace.step in range(plan.steps):
        state = method.step(state, plan, barrier)
        squared_distances.append(float(method.released(state).double().square().sum()))
    return np.array(squared_distances)


def rows(*, seeds: int = SEEDS, steps: int = _STEPS) -> Iterator[dict[str, Any]]:
    """One row per run: the final squared distance, and its mean over the last epoch, which is less noisy."""
    for dimension, start in CASES:
        plan, data = plan_of(dimension, steps=steps), records(dimension)
        for (name, method), seed in product(METHODS.items(), range(seeds)):
            course = distances(method, dimension, start, seed=seed, plan=plan, data=data)
            about = {"method": name, "dimension": dimension, "start": start, "seed": seed}
            yield {**about, "last": course[-1], "last_epoch": course[-RECORDS:].mean()}


def figure(table: pd.DataFrame, theme: Theme = LIGHT) -> Figure:
    """The mean squared distance over the last epoch by dimension: a panel per start, a line per method."""
    starts = [start for start in STARTS if start in set(table["start"])]
    drawn = Figure(
        figsize=(4.8 * len(starts), 3.4), dpi=_DOTS_PER_INCH, facecolor=theme.ground, layout="constrained"
    )
    panels: list[Axes] = drawn.subplots(1, len(starts), squeeze=False, sharey=True)[0].tolist()
    for axes, start in zip(panels, starts, strict=True):
        _draw(axes, table[table["start"] == start], theme)
        axes.set_title(f"start: {start}", color=theme.ink, size=9)
    panels[0].set_ylabel("squared distance from the optimum")
    panels[0].legend(frameon=False, labelcolor=theme.ink, fontsize=7, ncols=2, loc="lower center")
    return drawn


def _draw(axes: Axes, table: pd.DataFrame, theme: Theme) -> None:
    colours = (theme.ink, theme.accent, theme.second, theme.muted, theme.accent, theme.second, theme.accent)
    lines = ("-", "-", "-", "-", "--", ":", ":")
    methods = table.groupby("method", sort=False)
    for (name, of_method), colour, line in zip(methods, colours, lines, strict=True):
        means = of_method.groupby("dimension")["last_epoch"].mean()
        axes.plot(means.index, means, color=colour, linestyle=line, marker="o", markersize=3, label=str(name))
    axes.set(xscale="log", yscale="log", xlabel="dimension", facecolor=theme.ground)
    axes.tick_params(which="both", colors=theme.muted, labelcolor=theme.ink, labelsize=8)


def main(
    folder: Annotated[
        Path, typer.Argument(help="Where the CSV and the PNG file go; made if it is not there.")
    ],
    seeds: Annotated[
        int, typer.Option(help="How many runs of each case; one takes six minutes of a core.")
    ] = SEEDS,
    steps: Annotated[int, typer.Option(help="Steps of a run; fewer are for a try.")] = _STEPS,
) -> None:
    """Run the regression toy of arXiv:1908.07643 and draw its Figure 2."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows(seeds=seeds, steps=steps))
    table.to_csv(folder / "adaclip-toy.csv", index=False)
    (folder / "adaclip-toy.png").write_bytes(png(figure(table)))


if __name__ == "__main__":
    typer.run(main)
