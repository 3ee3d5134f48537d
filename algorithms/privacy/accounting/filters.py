"""Filters: what a run may still spend, asked before every release.

A fixed schedule is accounted as a whole before the run (PLD or RDP) and its filter holds the run to it. A spend
chosen on the way needs a filter whose budget is valid under any adaptive choice: zCDP, whose cost is linear in the
order, or Rényi at one order fixed in advance (Feldman and Zrnic 2021, Lécuyer 2021).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import dp_accounting as dp
import numpy as np
from scipy.optimize import minimize_scalar

from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.accounting.calibration import smallest
from algorithms.privacy.accounting.epsilon import (
    ADD_OR_REMOVE_ONE,
    ORDERS,
    Adjacency,
    as_add_remove,
    epsilon_of_rdp,
    rdp,
)
from algorithms.privacy.accounting.event_rules import rule_of
from algorithms.privacy.accounting.events import Schedule, schedule_to_json


@dataclass(frozen=True)
class FixedSchedule:
    """Every release is fixed before the first one; the schedule is accounted as a whole."""


@dataclass(frozen=True)
class ZCDPBudget:
    """Releases are chosen adaptively, and their zCDP costs add up to at most `rho`."""

    rho: float


@dataclass(frozen=True)
class RenyiBudget:
    """Releases are chosen adaptively, and their Rényi divergences at `order` add up to at most `limit`."""

    order: float
    limit: float


FIXED = FixedSchedule()

Holding = FixedSchedule | ZCDPBudget | RenyiBudget
"""What holds a run to its budget."""

_KINDS: dict[str, type[FixedSchedule] | type[ZCDPBudget] | type[RenyiBudget]] = {
    "schedule": FixedSchedule,
    "zcdp": ZCDPBudget,
    "renyi": RenyiBudget,
}


def holding_to_json(held_by: Holding) -> dict[str, Any]:
    """As plans and cards write it: its kind, and its numbers.

    Example:
        >>> holding_to_json(ZCDPBudget(0.5))
        {'kind': 'zcdp', 'rho': 0.5}
    """
    (kind,) = (name for name, known in _KINDS.items() if isinstance(held_by, known))
    return {"kind": kind, **asdict(held_by)}


def holding_from_json(document: Mapping[str, Any]) -> Holding:
    """What `holding_to_json` wrote; raises RefusedError for anything else."""
    numbers = {name: value for name, value in document.items() if name != "kind"}
    try:
        return _KINDS[document["kind"]](**numbers)
    except (KeyError, TypeError):
        raise RefusedError(f"the plan's filter {dict(document)} is not known; make the plan again.") from None


class Filter(Protocol):
    """Decides before each release whether its event may still happen."""

    def affords(self, event: dp.DpEvent) -> bool:
        """Whether the event may be charged now."""

    def charge(self, event: dp.DpEvent) -> None:
        """Charges the event; raises BudgetRefusedError, and charges nothing, where it is not afforded."""

    def spent(self, delta: float) -> float:
        """What the releases so far cost at `delta`; see `trace.Row` for where that is no bound."""


class ScheduleFilter:
    """Holds a run to a schedule fixed before its first release: its events, in their order, and no other.

    total: what the whole schedule was accounted to cost; a part of it never costs more. adjacency: under which.
    Raises RefusedError for a count that is not a whole number from 1.
    """

    def __init__(self, schedule: Schedule, total: Budget, adjacency: Adjacency = ADD_OR_REMOVE_ONE) -> None:
        self._schedule = list(schedule)
        for event, count in self._schedule:
            if count < 1 or count != int(count):
                raise RefusedError(f"{event} is planned {count} times; give a whole number from 1.")
        self._total = total
        self._adjacency = adjacency
        self._position = 0
        self._done = 0
        self._rdp = np.zeros(len(ORDERS))

    def affords(self, event: dp.DpEvent) -> bool:
        return self._position < len(self._schedule) and event == self._schedule[self._position][0]

    def charge(self, event: dp.DpEvent) -> None:
        if not self.affords(event):
            raise BudgetRefusedError(
                f"{event} was asked for, but the plan allows {self._next()}; follow the plan."
            )
        self._rdp = self._rdp + self._cost(event)
        self._done += 1
        if self._done == self._schedule[self._position][1]:
            self._position, self._done = self._position + 1, 0

    def spent(self, delta: float) -> float:
        by_rdp = epsilon_of_rdp(self._rdp, delta) if delta > 0 else math.inf if self._rdp.any() else 0.0
        return min(by_rdp, self._total.epsilon) if delta >= self._total.delta else by_rdp

    def _cost(self, event: dp.DpEvent) -> np.ndarray:
        """The event's Rényi bounds; infinite where it has none, so that the whole schedule's cost is stated at once."""
        try:
            return rdp([(event, 1)], adjacency=self._adjacency)
        except RefusedError:
            return np.full(len(ORDERS), math.inf)

    def _next(self) -> str:
        if self._position == len(self._schedule):
            return "no further release"
        return f"{self._schedule[self._position][0]} next"


class RenyiFilter:
    """A Rényi filter at one order fixed in advance: releases stop before the order's budget is passed.

    order: above 1. budget: the (epsilon, delta) that the whole run may cost; the order's Rényi budget is what
    Canonne et al. 2020, Proposition 12, leaves of it. Raises RefusedError when the order alone costs more than that.
    """

    def __init__(self, order: float, budget: Budget) -> None:
        if not order > 1:
            raise RefusedError(f"a Rényi filter needs an order above 1, not {order}; 4 to 32 are usual.")
        self.order = order
        self.limit = budget.epsilon - conversion(order, budget.delta)
        if self.limit <= 0:
            raise RefusedError(
                f"epsilon {budget.epsilon:g} at delta {budget.delta:g} leaves nothing at order {order:g};"
                " choose a larger order or a larger epsilon."
            )
        self._total = 0.0

    def affords(self, event: dp.DpEvent) -> bool:
        return self._total + self._cost(event) <= self.limit

    def charge(self, event: dp.DpEvent) -> None:
        if not self.affords(event):
            raise _exhausted(event, f"{self.limit - self._total:.4g} at order {self.order:g}")
        self._total += self._cost(event)

    def spent(self, delta: float) -> float:
        return max(0.0, self._total + conversion(self.order, delta)) if self._total else 0.0

    def _cost(self, event: dp.DpEvent) -> float:
        return float(rdp([(event, 1)], orders=(self.order,))[0])


class ZCDPFilter:
    """A zCDP filter: the events' rho add up to at most `rho` (Bun and Steinke 2016; any adaptive choice)."""

    def __init__(self, rho: float) -> None:
        self._limit = rho
        self._total = 0.0

    def affords(self, event: dp.DpEvent) -> bool:
        return self._total + rho_of(event) <= self._limit

    def charge(self, event: dp.DpEvent) -> None:
        if not self.affords(event):
            raise _exhausted(event, f"rho = {self._limit - self._total:.4g}")
        self._total += rho_of(event)

    def spent(self, delta: float) -> float:
        return epsilon_of_zcdp(self._total, delta)


def _exhausted(event: dp.DpEvent, left: str) -> BudgetRefusedError:
    name = schedule_to_json([(event, 1)])[0]["event"]
    return BudgetRefusedError(f"{name} costs more than the {left} that the run has left; stop here.")


def conversion(order: float, delta: float) -> float:
    """What is added to a Rényi bound at `order` to give epsilon at `delta` (Canonne et al. 2020, Prop. 12)."""
    return math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def epsilon_of_zcdp(rho: float, delta: float) -> float:
    """The smallest epsilon that rho-zCDP implies at `delta`, at the best real order."""
    if rho == 0:
        return 0.0
    best = minimize_scalar(
        lambda x: (1 + math.exp(x)) * rho + conversion(1 + math.exp(x), delta),
        bounds=(-12.0, 25.0),
        method="bounded",
        options={"xatol": 1e-9},
    )
    return max(0.0, float(best.fun))


def rho_of_budget(budget: Budget) -> float:
    """The largest rho whose zCDP implies (epsilon, delta); 1.1 to 1.5 times that of Bun and Steinke's formula."""
    if not 0 < budget.epsilon < math.inf or not 0 < budget.delta < 1:
        raise RefusedError(f"{budget} has no finite rho; give a finite epsilon above 0 and delta in (0, 1).")
    inverse = smallest(
        lambda x: epsilon_of_zcdp(1 / x, budget.delta),
        budget.epsilon,
        low=1 / budget.epsilon,
        high=math.exp(60.0),
        tolerance=1e-10,
    )
    if inverse is None:
        raise RefusedError(f"{budget} leaves no rho above {math.exp(-60.0):.0e}; ask for a larger epsilon.")
    return (1 - 1e-9) / inverse


def rho_of(event: dp.DpEvent) -> float:
    """The rho of an event under zCDP; raises RefusedError where none is proven.

    Gaussian: 1 / (2 z^2). Pure epsilon, as of Laplace noise 1/z: epsilon^2 / 2 (Bun and Steinke 2016, Props. 1.6, 1.4).
    """
    return rule_of(event).rho(event)


def rho_under(adjacency: Adjacency, event: dp.DpEvent) -> float:
    """The rho of an event under an adjacency; raises RefusedError where none is proven.

    A sample is charged as if it had been taken of all records: with the same coins on both sides it is a mixture of
    pairs that differ in one record or not at all, and no worse than the worst pair. It gains nothing from sampling.
    """
    as_add_remove(
        adjacency, event
    )  # what is refused as a sample is refused before it is taken for all records
    return rho_of(as_add_remove(adjacency, rule_of(event).unsampled(event, adjacency)))
