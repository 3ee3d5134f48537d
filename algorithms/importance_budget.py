"""What an epoch of DPIS knows, and the least noise that a Rényi budget affords: now at one K, later at another."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import dp_accounting as dp
import numpy as np
import torch
from pydantic import Field
from scipy.optimize import brentq
from torch import Tensor

from algorithms.algorithm import Target
from algorithms.privacy.budget import Budget
from algorithms.privacy.errors import Refused
from algorithms.privacy.events import Schedule
from algorithms.privacy.filters import conversion
from algorithms.privacy.renyi import rdp
from algorithms.update import STRICT

SLACK = 1e-9
"""Part of a budget that is left over, so that what is spent of it does not round above it."""

_ORDERS = (*map(float, range(2, 33)), *map(float, range(36, 65, 4)), 80.0, 96.0, 128.0, 192.0, 256.0, 512.0)
_NOISE_RANGE = (1e-2, 1e8)

ClipNorm = Annotated[float, Field(ge=1e-12, le=1e12)]
Event = Callable[[float, float], dp.DpEvent]
"""The event of a step at a fraction K / (N C) and a noise sigma_G."""
Steps = tuple[float, int]
"""A fraction K / (N C), and how many steps are taken at it."""


@dataclass(frozen=True)
class AdaptiveClipping:
    """The clip norm of an epoch but the first: `factor` times the mean norm, norms cut off at `most`; within bounds."""

    least: ClipNorm
    most: ClipNorm
    factor: Annotated[float, Field(gt=0, lt=math.inf)] = 1.0

    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Epoch:
    """What is public of an epoch, all []: expected batch b, 0 until it is released; clip norm C; fraction K / (N C);
    noise sigma_G; spent: Rényi cost at the plan's order, that of all of the epoch's steps included.
    """

    expected_batch: Tensor
    clip_norm: Tensor
    fraction: Tensor
    noise: Tensor
    spent: Tensor

    @classmethod
    def of(cls, *numbers: float) -> "Epoch":
        """The epoch of these numbers, in the order above."""
        return cls(*(torch.tensor(number, dtype=torch.float64) for number in numbers))

    def changed(self, **numbers: float) -> "Epoch":
        """The same with other numbers."""
        return replace(self, **{name: torch.full_like(getattr(self, name), n) for name, n in numbers.items()})


def cost(event: Event, steps: Sequence[Steps], noise: float, orders: tuple[float, ...]) -> np.ndarray:
    """The Rényi divergence bounds of some steps, shape [orders]."""
    return rdp([(event(fraction, noise), count) for fraction, count in steps if count], orders=orders)


def least_noise(
    event: Event, steps: Sequence[Steps], limits: Mapping[float, float]
) -> tuple[float, float] | None:
    """The least noise sigma_G at which the steps keep to the limit of one order, and that order; None above 1e8.

    limits: by order, above 0.
    """
    orders, allowed = tuple(limits), np.array(list(limits.values())) * (1 - SLACK)

    def excess(logarithm: float) -> np.ndarray:
        costs = np.clip(cost(event, steps, math.exp(logarithm), orders), 1e-300, 1e300)
        return np.asarray(np.log(costs / allowed))

    low, high = map(math.log, _NOISE_RANGE)
    if excess(high).min() > 0:
        return None
    if excess(low).min() > 0:
        low = brentq(lambda x: float(excess(x).min()), low, high, xtol=1e-10) + SLACK
    return math.exp(low), orders[int(excess(low).argmin())]


def precommitted(
    event: Event, steps: int, others: Schedule, target: Target, *, noise_setting: str = "norm_noise"
) -> tuple[float, float]:
    """The order at which `steps` steps at K = N C need the least noise beside other releases, and that noise.

    It follows from public values and is fixed with the plan, as a filter needs it. noise_setting: which decides the
    noise of the norms among the other releases. Raises Refused where the filter or
    what is released beside the steps leaves nothing, and where no noise up to 1e8 fits in what is left.
    """
    budget = target.budget
    if not 0 < budget.epsilon < math.inf or not 0 < budget.delta < 1:
        raise Refused(
            f"{budget} gives no budget to spend; give a finite epsilon above 0 and delta in (0, 1)."
        )
    found = least_noise(event, [(1.0, steps)], _limits(others, target, noise_setting))
    if found is None:
        raise Refused(
            f"no noise multiplier up to {_NOISE_RANGE[1]:.0e} fits in what {_asked(budget)} leaves for the steps;"
            " ask for a larger epsilon, or more noise in what is released beside them."
        )
    noise, order = found
    return order, noise


def _limits(others: Schedule, target: Target, noise_setting: str) -> dict[float, float]:
    """What other releases leave of a budget, by order; raises Refused, with the one to blame, where that is nothing."""
    if not _left(target.budget, []):
        least = min(conversion(order, target.budget.delta) for order in _ORDERS)
        raise Refused(
            f"{_asked(target.budget)} is not above {least:.4g}, what a Rényi filter costs at any noise; ask for a"
            " larger epsilon, or give algorithm.public_norms."
        )
    if not _left(target.budget, target.before):
        raise Refused(
            f"{_asked(target.budget)} leaves nothing beside the learned features; raise their noise or epsilon."
        )
    left = _left(target.budget, others)
    if not left:
        raise Refused(
            f"{_asked(target.budget)} leaves nothing beside the releases of norms; raise algorithm.{noise_setting} or"
            " epsilon, or give algorithm.public_norms."
        )
    return left


def _asked(budget: Budget) -> str:
    return f"epsilon {budget.epsilon:g} at delta {budget.delta:g}"


def _left(budget: Budget, others: Schedule) -> dict[float, float]:
    """What other releases leave of a budget at each order, where they leave something."""
    costs = map(float, rdp(others, orders=_ORDERS))
    left = {a: budget.epsilon - conversion(a, budget.delta) - c for a, c in zip(_ORDERS, costs, strict=True)}
    return {order: limit for order, limit in left.items() if limit > 0}
