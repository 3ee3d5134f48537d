"""How the noise of a momentum method is divided over its iterations, and how many iterations there should be.

Kuru, Birbil, Gürbüzbalaban and Yıldırım 2022 ("Differentially private accelerated optimization algorithms",
arXiv:2008.01989), Section 4: the noise of iteration t, of variance 2 b_t^2 in each of d coordinates, adds at
most d a_t b_t^2 to the error after the last one. All of it is arithmetic on public numbers.

Differences from the paper: the coefficients a_t grow with t (the text says that they fall; its formulas are right).
The gap that the bound starts from is that of the objective: the paper's potential is at most twice it, and a restart
doubles the potential once more, so stage s begins at 2^s times the gap, as in the authors' code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

Array = NDArray[np.float64]

_SMALLEST_LOG = -600.0


@dataclass(frozen=True)
class Stage:
    """Iterations with one step size; between two stages the momentum is dropped."""

    steps: int
    step_size: float


@dataclass(frozen=True)
class Curve:
    """What is public about the objective: its smoothness L and its strong convexity mu."""

    smoothness: float
    strong_convexity: float

    @property
    def condition_number(self) -> float:
        """L / mu."""
        return self.smoothness / self.strong_convexity

    def momentum(self, step_size: float) -> float:
        """(1 - sqrt(a mu)) / (1 + sqrt(a mu)), Nesterov's choice for a step size a of at most 1 / mu."""
        root = math.sqrt(step_size * self.strong_convexity)
        return (1.0 - root) / (1.0 + root)


def one_stage(steps: int, step_size: float) -> list[Stage]:
    """A constant step size."""
    return [Stage(steps, step_size)]


def growing_stages(steps: int, step_size: float, condition_number: float, *, growth: int = 1) -> list[Stage]:
    """The stages of the multi-stage method, cut off after `steps` iterations.

    Stage 1 has ceil(2 sqrt(kappa) ln sqrt(kappa)) iterations of the given step size; stage k >= 2 has
    2^k ceil(sqrt(kappa) ln 2^(growth + 2)) of a step size 4^k times smaller. Source: Aybat, Fallah, Gürbüzbalaban
    and Ozdaglar 2019 (arXiv:1901.08022); the first length is that of the code of arXiv:2008.01989.
    """
    root = math.sqrt(condition_number)
    base = math.ceil(root * math.log(2.0 ** (growth + 2)))
    stages = [Stage(max(1, math.ceil(2.0 * root * math.log(root))), step_size)]
    while sum(stage.steps for stage in stages) < steps:
        k = len(stages) + 1
        stages.append(Stage(2**k * base, step_size / 4.0**k))
    return cut(stages, steps)


def cut(stages: Sequence[Stage], steps: int) -> list[Stage]:
    """The same stages, ended after `steps` iterations."""
    kept: list[Stage] = []
    for stage in stages:
        left = steps - sum(before.steps for before in kept)
        if left > 0:
            kept.append(Stage(min(stage.steps, left), stage.step_size))
    return kept


def coefficients(stages: Sequence[Stage], curve: Curve) -> Array:
    """a_t, shape [steps]: what b_t^2 in each coordinate adds to the error after the last iteration.

    Equations (28) and (34) of arXiv:2008.01989: 2^(s_T - s_t) prod_{i > t} (1 - sqrt(mu a_i)) a_t (1 + a_t L).
    """
    shrinking, added = _recursion(stages, curve)
    following = np.append(np.cumsum(shrinking[::-1])[::-1][1:], 0.0)
    return np.asarray(np.exp(np.maximum(following, _SMALLEST_LOG)) * added)


def error_bounds(
    stages: Sequence[Stage], curve: Curve, *, gap: float, noise: float, power: float = 1.0 / 3.0
) -> Array:
    """The bound (32) on the error after each iteration, were it the last; shape [steps].

    gap: of the objective at the start, at most. noise: d (S_1 / (n epsilon))^2 for Laplace noise, whose best
    allocation leaves noise (sum a_t^power)^(1 / power) with power 1/3; for Gaussian noise the power is 1/2.
    """
    shrinking, added = _recursion(stages, curve)
    start = 2.0 * gap * np.exp(np.cumsum(shrinking))
    total, totals = 0.0, np.empty(len(added))
    for t in range(len(added)):
        total = total * math.exp(power * shrinking[t]) + added[t] ** power
        totals[t] = total
    return np.asarray(start + noise * totals ** (1.0 / power))


def _recursion(stages: Sequence[Stage], curve: Curve) -> tuple[Array, Array]:
    """By iteration: the logarithm of what the error so far is multiplied by, and what b_t^2 adds; shapes [steps]."""
    shrinking, added = [], []
    for index, stage in enumerate(stages):
        rate = math.log1p(-math.sqrt(curve.strong_convexity * stage.step_size))
        restart = 0.0 if index == 0 else math.log(2.0)
        shrinking += [rate + restart] + [rate] * (stage.steps - 1)
        added += [stage.step_size * (1.0 + stage.step_size * curve.smoothness)] * stage.steps
    return np.array(shrinking), np.array(added)


def grouped(values: Array, kinds: int) -> tuple[Array, Array]:
    """Values rounded to a geometric grid, and how often each occurs in a row; shapes [groups].

    kinds: the most values that the grid has. Neighbours then share their noise, and a schedule has tens of different
    events, not one for each iteration.
    """
    places = np.log(values / values.min())
    width = max(places.max() / kinds, 1e-9)
    cells = np.minimum(np.floor(places / width), kinds - 1)
    first = np.flatnonzero(np.diff(cells, prepend=-1.0))
    counts = np.diff(np.append(first, len(values)))
    return values.min() * np.exp((cells[first] + 0.5) * width), counts


def divide_epsilon(epsilon: float, values: Array, counts: Array, *, rate: float = 1.0) -> Array:
    """The pure epsilon of one iteration of each group that minimises sum a_t b_t^2; shape [groups].

    values, counts: the coefficients a_t, and how many iterations have each; the iterations' epsilons sum to
    `epsilon`. rate: batch / records; 1 is the closed form a_t^(1/3) of Proposition 4.2, below 1 the stationary point
    is found numerically: the objective is convex in the epsilons, as b_t^2 is.
    """
    shares = np.cbrt(values)
    if rate == 1.0:
        return np.asarray(epsilon * shares / np.sum(counts * shares))

    def chosen(price: float) -> Array:
        return _at_price(price, values, rate, most=epsilon)

    def excess(price: float) -> float:
        return float(np.sum(counts * chosen(price))) - epsilon

    low, high = (float(_log_gain(np.array([e]), rate)[0]) for e in (epsilon, epsilon * 1e-12))
    spread = float(np.log(values).max()), float(np.log(values).min())
    found = chosen(brentq(excess, low + spread[1] - 1.0, high + spread[0] + 1.0, xtol=1e-13, rtol=1e-14))
    return np.asarray(found * (epsilon / np.sum(counts * found)))


def laplace_scale(epsilons: Array, *, rate: float = 1.0) -> Array:
    """1 / ln(1 + (e^epsilon - 1) / rate): the scale, relative to the sensitivity, of noise on a sample's sum.

    A sample without replacement of `rate` times the records then costs `epsilon` under replace-one (Balle, Barthe
    and Gaboardi 2018, Theorem 9).
    """
    return np.asarray(1.0 / np.log1p(np.expm1(epsilons) / rate))


def _log_gain(epsilons: Array, rate: float) -> Array:
    """The logarithm of -d(b^2)/d(epsilon), which falls in epsilon."""
    scale = laplace_scale(epsilons, rate=rate)
    return np.asarray(math.log(2.0) + 3.0 * np.log(scale) - np.log1p((rate - 1.0) * np.exp(-epsilons)))


def _at_price(price: float, values: Array, rate: float, *, most: float) -> Array:
    """The epsilons, about `most` at most, where more of it gains exp(price) a unit; by bisection of logarithms."""
    high = np.full(len(values), math.log(most) + 0.1)
    low = high - 80.0
    for _ in range(70):
        middle = (low + high) / 2.0
        gains = np.log(values) + _log_gain(np.exp(middle), rate) > price
        low, high = np.where(gains, middle, low), np.where(gains, high, middle)
    return np.asarray(np.exp((low + high) / 2.0))
