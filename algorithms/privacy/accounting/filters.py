"""Privacy filters, which decide before every release whether the run can still pay for it.

A fixed schedule is accounted as a whole before the run (PLD or RDP), and its filter enforces the schedule. Adaptive
spending needs a filter whose budget holds for any adaptive choice: zCDP, whose cost is linear in the order, or Rényi at
one order fixed in advance (Feldman and Zrnic 2021, Lécuyer 2021).
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Protocol

import dp_accounting.dp_event as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation

from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import (
    ACCOUNTANTS,
    ADD_OR_REMOVE_ONE,
    ORDERS,
    Accountant,
    epsilon,
    epsilon_near,
    epsilon_of_rdp,
    event_for_accountants,
    rdp,
)
from algorithms.privacy.accounting.event_rules import in_words, rule_of
from algorithms.privacy.accounting.events import RenyiDpEvent, Schedule, disjoint_parts_of
from algorithms.privacy.accounting.noise_search import find_smallest
from algorithms.privacy.accounting.random_allocation import PaidSteps


@dataclass(frozen=True)
class FixedSchedule:
    """All releases are fixed in advance, and the schedule is accounted as a whole."""


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
_FIRST_RELEASES, _GROWTH_PART, _GRID = 16, 8, 1e-3
"""The epsilon so far is computed after each of the first 16 releases, then whenever their number has grown by an
eighth, on a grid of a thousandth of the total, and of 0.001 where this is above 1.
"""

_COVER_ROUNDING = 1e-9
"""Relative; by so much rounding may raise a cost above what was stated of it."""

_SOME_DELTA = 1e-5
"""At which events are priced to learn whether there are bounds for them at all."""

FilterSpec = FixedSchedule | ZCDPBudget | RenyiBudget
"""How a run's budget is enforced."""

_KINDS: dict[str, type[FixedSchedule] | type[ZCDPBudget] | type[RenyiBudget]] = {
    "schedule": FixedSchedule,
    "zcdp": ZCDPBudget,
    "renyi": RenyiBudget,
}


def filter_to_json(spec: FilterSpec) -> dict[str, str | float]:
    """The form in plans and on cards: the kind and its numbers.

    Example:
        >>> filter_to_json(ZCDPBudget(0.5))
        {'kind': 'zcdp', 'rho': 0.5}
    """
    (kind,) = (name for name, known in _KINDS.items() if isinstance(spec, known))
    return {"kind": kind, **asdict(spec)}


_MAX_NUMBER = 1e100
"""The largest number of a filter in a document."""


def filter_from_json(document: Mapping[str, Any]) -> FilterSpec:
    """The inverse of `filter_to_json`; raises RefusedError for anything else."""
    numbers = {name: value for name, value in document.items() if name != "kind"}
    try:
        if all(type(value) in (int, float) and 0 < value < _MAX_NUMBER for value in numbers.values()):
            return _KINDS[document["kind"]](**numbers)
    except (KeyError, TypeError):
        pass
    raise RefusedError(
        "the plan's filter {spec!r:.200} is not known; {plan.remedy}.",
        code="filter_unknown",
        spec=dict(document),
    )


class Filter(Protocol):
    """Decides before each release whether its event may still happen."""

    def affords(self, event: dp.DpEvent) -> bool:
        """Whether the filter can pay for the event now."""

    def charge(self, event: dp.DpEvent) -> None:
        """Charge the event; raises BudgetRefusedError, and charges nothing, if the filter cannot pay for it."""

    def epsilon_spent(self, delta: float) -> float:
        """The cost of the releases so far at `delta`; see `trace.ReleaseRow` for when this is not a bound."""


class CostCurve:
    """The cost of the first releases of a schedule, at the delta of its total; public, as it follows from the plan.

    It is computed when it is asked for, after each of the first releases and then after numbers that grow by
    an eighth. In between it is that of the next of these numbers, so that it is a bound everywhere, and at the end the
    total.
    """

    def __init__(
        self, schedule: Schedule, total: Budget, accountant: Accountant, adjacency: NeighboringRelation
    ) -> None:
        self._schedule, self._total = schedule, total
        self._accountant, self._adjacency = accountant, adjacency
        self._number = sum(int(count) for _, count in schedule)
        self._grid = _GRID * min(1.0, total.epsilon) or _GRID
        self._at, self._cost = 0, 0.0

    def after(self, releases: int) -> float:
        """The cost of so many releases, which never falls from one call to the next."""
        if releases > self._at:
            self._at = self._next_number(releases)
            self._cost = max(self._cost, min(self._total.epsilon, self._epsilon(self._at)))
        return self._cost

    def _next_number(self, releases: int) -> int:
        number = min(releases, _FIRST_RELEASES)
        while number < releases:
            number += number // _GROWTH_PART
        return min(number, self._number)

    def _epsilon(self, releases: int) -> float:
        """The cost by a coarse grid, which is slightly high; the total if the accountant has no bound for a part."""
        if releases == self._number:
            return self._total.epsilon
        begun, left = [], releases
        for event, count in self._schedule:
            if left:
                begun.append((event, min(left, int(count))))
                left -= begun[-1][1]
        try:
            return epsilon(
                begun,
                self._total.delta,
                accountant=self._accountant,
                adjacency=self._adjacency,
                discretisation=self._grid,
            )
        except RefusedError:
            return self._total.epsilon


class ScheduleFilter:
    """Allows the events of a schedule that was fixed in advance, in order, and no others.

    Args:
        schedule: Events with their counts, in order.
        total: The cost of the whole schedule; a part never costs more.
        adjacency: Of that cost.
        accountant: By which what is spent so far is stated at the delta of the total.

    Raises:
        RefusedError: For a count that is not a whole number of at least 1.

    Example:
        >>> step = dp.GaussianDpEvent(2.0)
        >>> privacy_filter = ScheduleFilter([(step, 2)], Budget(5.0, 1e-5))
        >>> privacy_filter.charge(step)
        >>> privacy_filter.affords(step), privacy_filter.affords(dp.GaussianDpEvent(1.0))
        (True, False)
    """

    def __init__(
        self,
        schedule: Schedule,
        total: Budget,
        adjacency: NeighboringRelation = ADD_OR_REMOVE_ONE,
        accountant: Accountant = "rdp",
    ) -> None:
        for event, count in schedule:
            if count < 1 or count != int(count):
                raise RefusedError(
                    f"{in_words(event)} is planned {count:g} times; give a whole number from 1."
                )
        self._events = (event for event, count in schedule for _ in range(int(count)))
        self._next = next(self._events, None)
        self._total = total
        self._adjacency = adjacency
        self._rdp = np.zeros(len(ORDERS))
        self._count = 0
        self._curve = None if accountant == "rdp" else CostCurve(schedule, total, accountant, adjacency)

    def affords(self, event: dp.DpEvent) -> bool:
        return bool(event == self._next)

    def charge(self, event: dp.DpEvent) -> None:
        if not self.affords(event):
            if self._next is None:
                raise BudgetRefusedError(
                    "the plan allows no further release; calibrate a run of more steps.",
                    code="no_further_release",
                )
            raise BudgetRefusedError(
                "{event} was asked for, but the plan allows {following} next; follow the plan.",
                code="not_the_next_release",
                event=event,
                following=self._next,
            )
        if self._curve is None:
            self._rdp = self._rdp + self._cost(event)
        self._count += 1
        self._next = next(self._events, None)

    def epsilon_spent(self, delta: float) -> float:
        if self._curve is not None:
            return self._curve.after(self._count)
        rdp_by_library = (
            epsilon_of_rdp(self._rdp, delta) if delta > 0 else math.inf if self._rdp.any() else 0.0
        )
        return min(rdp_by_library, self._total.epsilon) if delta >= self._total.delta else rdp_by_library

    def _cost(self, event: dp.DpEvent) -> np.ndarray:
        """The event's Rényi bounds; infinite without bounds, so that the whole schedule's cost is stated at once."""
        try:
            return rdp([(event, 1)], adjacency=self._adjacency)
        except RefusedError:
            return np.full(len(ORDERS), math.inf)


class RenyiFilter:
    """A Rényi filter at one order fixed in advance: releases stop before they exceed the order's budget.

    Args:
        order: Above 1; 4 to 32 are usual.
        budget: The (epsilon, delta) of the whole run, which Canonne et al. 2020, Proposition 12, converts to the
            order's Rényi budget.

    Raises:
        RefusedError: If the conversion alone costs more than the budget.

    Source:
        Feldman and Zrnic 2021, arXiv:2008.11193: at an order that is fixed in advance, the costs of adaptively chosen
        releases add up.

    Example:
        >>> privacy_filter = RenyiFilter(8.0, Budget(2.0, 1e-5))
        >>> privacy_filter.charge(dp.GaussianDpEvent(5.0))  # 8 / (2 * 25) = 0.16 at order 8
        >>> round(privacy_filter.limit, 2), privacy_filter.affords(dp.GaussianDpEvent(1.0))
        (0.79, False)
    """

    def __init__(self, order: float, budget: Budget) -> None:
        if not order > 1:
            raise RefusedError(f"a Rényi filter needs an order above 1, not {order}; 4 to 32 are usual.")
        self.order = order
        self.limit = budget.epsilon - conversion(order, budget.delta)
        if self.limit <= 0:
            raise RefusedError(
                "epsilon {epsilon:g} at delta {delta:g} leaves nothing to a Rényi filter at order {order:g}, which"
                " costs epsilon {least:.4g} at any noise; set {target.epsilon} to more, or choose a larger order.",
                code="order_leaves_nothing",
                epsilon=budget.epsilon,
                delta=budget.delta,
                order=order,
                least=conversion(order, budget.delta),
            )
        self._total, self._paid = Fraction(), PaidSteps()  # exact: see `_fits`

    def affords(self, event: dp.DpEvent) -> bool:
        return _fits(self._total, self._cost(event), self.limit)

    def charge(self, event: dp.DpEvent) -> None:
        if not self.affords(event):
            raise _exhausted_error(event, f"{self.limit - float(self._total):.4g} at order {self.order:g}")
        # Refuses a later step of a pass that no first step has paid for, before anything is added.
        self._paid.take(event)
        self._total += Fraction(self._cost(event))

    def epsilon_spent(self, delta: float) -> float:
        return max(0.0, float(self._total) + conversion(self.order, delta)) if self._total else 0.0

    def _cost(self, event: dp.DpEvent) -> float:
        # At one order that is fixed in advance, the costs of adaptively chosen releases add up (Feldman and Zrnic
        # 2021).
        return float(rdp([(event, 1)], orders=(self.order,))[0])


class ZCDPFilter:
    """A zCDP filter: the events' rho add up to at most `rho`, for any adaptive choice (Bun and Steinke 2016).

    Example:
        >>> privacy_filter = ZCDPFilter(0.5)
        >>> privacy_filter.charge(dp.GaussianDpEvent(1.0))
        >>> privacy_filter.affords(dp.GaussianDpEvent(1.0))
        False
    """

    def __init__(self, rho: float) -> None:
        self._limit = rho
        self._total = Fraction()

    def affords(self, event: dp.DpEvent) -> bool:
        return _fits(self._total, rho_of(event), self._limit)

    def charge(self, event: dp.DpEvent) -> None:
        if not self.affords(event):
            raise _exhausted_error(event, f"rho = {self._limit - float(self._total):.4g}")
        self._total += Fraction(rho_of(event))

    def epsilon_spent(self, delta: float) -> float:
        return epsilon_of_zcdp(float(self._total), delta)


def _fits(total: Fraction, cost: float, limit: float) -> bool:
    """Whether a filter that has paid `total` can pay `cost`, in exact arithmetic.

    A sum of floats may round down, so that a release beyond the limit would be allowed, or up, so that the last one
    would be refused. Infinity is no fraction.
    """
    return math.isfinite(cost) and total + Fraction(cost) <= limit


def _exhausted_error(event: dp.DpEvent, left: str) -> BudgetRefusedError:
    return BudgetRefusedError(
        "{mechanism} costs more than the {left} that the run has left; end the run before it, or set {target.epsilon}"
        " to more.",
        code="filter_exhausted",
        mechanism=in_words(event),
        left=left,
    )


def conversion(order: float, delta: float) -> float:
    """The amount to add to a Rényi bound at `order` for epsilon at `delta` (Canonne et al. 2020, Prop. 12)."""
    return math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


_LOG_ORDERS_ABOVE_1, _ORDER_TOLERANCE = (-12.0, 25.0), 1e-9
"""ln(order - 1) of the orders that are tried, from 1 + 6e-6 to 7e10, and how exactly the best of them is found."""

_MIN_RHO, _RHO_TOLERANCE, _RHO_LEFT_OVER = math.exp(-60.0), 1e-10, 1e-9
"""The smallest rho of the search, and, relative to it, how exact it is and what is left over, so that
neither that nor rounding puts epsilon above the budget."""


def epsilon_of_zcdp(rho: float, delta: float) -> float:
    """The smallest epsilon that rho-zCDP implies at `delta`, at the best real order.

    Every order gives a bound, so the search may miss the best one.
    """
    if rho == 0:
        return 0.0
    from scipy.optimize import minimize_scalar  # here, since fixed schedules do without it

    best = minimize_scalar(
        lambda x: (1 + math.exp(x)) * rho + conversion(1 + math.exp(x), delta),
        bounds=_LOG_ORDERS_ABOVE_1,
        method="bounded",
        options={"xatol": _ORDER_TOLERANCE},
    )
    return max(0.0, float(best.fun))


def rho_of_budget(budget: Budget) -> float:
    """The largest rho whose zCDP implies (epsilon, delta); 1.1 to 1.5 times that of Bun and Steinke's formula.

    Raises RefusedError for a budget that holds no rho, or only one next to 0.
    """
    if not 0 < budget.epsilon < math.inf or not 0 < budget.delta < 1:
        raise RefusedError(
            "epsilon {epsilon:g} at delta {delta:g} has no rho under zCDP; set {target.epsilon} to a finite number"
            " above 0, and {target.delta} above 0 and below 1.",
            code="rho_not_finite",
            epsilon=budget.epsilon,
            delta=budget.delta,
        )
    # In 1 / rho, of which the cost falls, as `find_smallest` asks.
    inverse = find_smallest(
        lambda x: epsilon_of_zcdp(1 / x, budget.delta),
        budget.epsilon,
        low=1 / budget.epsilon,
        high=1 / _MIN_RHO,
        tolerance=_RHO_TOLERANCE,
    )
    if inverse is None:
        raise RefusedError(
            "epsilon {epsilon:g} at delta {delta:g} leaves no rho above {smallest:.0e}; set {target.epsilon} to more.",
            code="rho_too_small",
            epsilon=budget.epsilon,
            delta=budget.delta,
            smallest=_MIN_RHO,
        )
    return (1 - _RHO_LEFT_OVER) / inverse


def rho_of(event: dp.DpEvent) -> float:
    """The rho of an event under zCDP; raises RefusedError if none is proven.

    Gaussian: 1 / (2 z^2). Pure epsilon, as of Laplace noise 1/z: epsilon^2 / 2 (Bun and Steinke 2016, Props. 1.6, 1.4).
    """
    return rule_of(event).rho(event)


def rho_under(adjacency: NeighboringRelation, event: dp.DpEvent) -> float:
    """The rho of an event under an adjacency; raises RefusedError if none is proven.

    A sample costs as much as all records, without amplification: with the same coins on both sides, it is a mixture of
    pairs that differ in one record or not at all, and no worse than the worst pair.
    """
    # An event that is refused as a sample is refused before it is treated as one of all records.
    event_for_accountants(adjacency, event)
    return rho_of(event_for_accountants(adjacency, rule_of(event).without_subsampling(event, adjacency)))


def is_covered(stated: Budget, schedule: Schedule, adjacency: NeighboringRelation) -> bool | None:
    """Whether a bound for the releases of a schedule is at most a stated budget; None where none takes its events.

    The bounds are those of the accountants, and those of filters, whose runs reserve a divergence at one order or a
    rho: of these the conversion at a real order may be tighter than that at the accountants' orders. A delta of 0
    covers no events that are not purely private.

    Args:
        stated: The epsilon and delta that the releases are said to cost.
        schedule: Events and how often each occurs in a row.
        adjacency: What the events are accounted under.

    Example:
        >>> step = dp.GaussianDpEvent(4.0)
        >>> is_covered(Budget(1.0, 1e-5), [(step, 1)], ADD_OR_REMOVE_ONE)
        True
        >>> is_covered(Budget(1.0, 1e-5), [(step, 2)], ADD_OR_REMOVE_ONE)
        False
    """
    parts = disjoint_parts_of(schedule)
    if parts is not None:
        verdicts = [is_covered(stated, part, adjacency) for part in parts]
        return False if False in verdicts else None if None in verdicts else True
    bounds: list[Callable[[], float]] = [
        partial(epsilon_near, stated.epsilon, schedule, stated.delta, accountant=name, adjacency=adjacency)
        for name in (ACCOUNTANTS if stated.delta > 0 else ("pure",))
    ]
    if 0 < stated.delta < 1:
        orders = {event.order for event, _ in schedule if isinstance(event, RenyiDpEvent)}
        bounds += [partial(_by_order, order, schedule, stated.delta, adjacency) for order in orders]
        bounds.append(partial(_by_rho, schedule, stated.delta, adjacency))
    # Any one of them is enough, so that each is computed only where those before it did not say yes.
    has_bound = False
    for bound in bounds:
        with suppress(RefusedError):
            if bound() <= stated.epsilon * (1 + _COVER_ROUNDING):
                return True
            has_bound = True
    if stated.delta == 0 and not has_bound:
        has_bound = is_covered(Budget(math.inf, _SOME_DELTA), schedule, adjacency) is not None
    return False if has_bound else None


def _by_order(order: float, schedule: Schedule, delta: float, adjacency: NeighboringRelation) -> float:
    divergence = float(rdp(schedule, orders=(order,), adjacency=adjacency)[0])
    return max(0.0, divergence + conversion(order, delta))


def _by_rho(schedule: Schedule, delta: float, adjacency: NeighboringRelation) -> float:
    return epsilon_of_zcdp(math.fsum(count * rho_under(adjacency, event) for event, count in schedule), delta)
