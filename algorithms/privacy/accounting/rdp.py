"""Rényi divergence bounds of privacy events, and the epsilon that follows from them."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import dp_accounting as dp
import numpy as np
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS
from scipy.special import log_ndtr

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.adjacency import (
    ADD_OR_REMOVE_ONE,
    Adjacency,
    as_add_remove,
    parts,
    pure_epsilon,
)
from algorithms.privacy.accounting.events import (
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    RenyiDpEvent,
    Schedule,
    kept,
)

ORDERS = tuple(float(order) for order in DEFAULT_RDP_ORDERS)
_ROUNDING, _NEAR_ZERO = 2e-15, 1e-10


def rdp(
    schedule: Schedule, *, orders: tuple[float, ...] = ORDERS, adjacency: Adjacency = ADD_OR_REMOVE_ONE
) -> np.ndarray:
    """The Rényi divergence bound of a schedule at each order, shape [orders]."""
    total = np.zeros(len(orders))
    for event, count in schedule:
        total += count * kept(_event_rdp, event, orders, adjacency)
    return total


def epsilon_of_rdp(divergences: np.ndarray, delta: float, orders: tuple[float, ...] = ORDERS) -> float:
    """The epsilon at `delta` of Rényi bounds, shape [orders], at the best of their orders.

    Source: Mironov 2017; Canonne et al. 2020, Proposition 12.
    """
    if np.isinf(divergences).all():
        return math.inf
    return float(compute_epsilon(orders, divergences, delta)[0])


@lru_cache(maxsize=4096)
def _event_rdp(event: dp.DpEvent, orders: tuple[float, ...], adjacency: Adjacency) -> np.ndarray:
    if is_not_private(event):
        return np.full(len(orders), math.inf)
    divergences = _plain_rdp(as_add_remove(adjacency, event), orders, adjacency)
    divergences.setflags(write=False)
    return divergences


def _plain_rdp(event: dp.DpEvent, orders: tuple[float, ...], adjacency: Adjacency) -> np.ndarray:
    """The divergences of an event as `under` gives it, shape [orders]."""
    match event:
        case PureDpEvent(epsilon=epsilon):
            return _rdp_of_pure(epsilon, np.array(orders))
        case ObjectivePerturbationDpEvent():
            return _rdp_of_objective(event, np.array(orders))
        case RenyiDpEvent(order=order, bound=bound):  # which never falls as the order grows
            return np.where(np.array(orders) <= order, bound, math.inf)
        case dp.PoissonSampledDpEvent(event=dp.LaplaceDpEvent()):
            return _rdp_of_pure(pure_epsilon(event), np.array(orders))
        case dp.ComposedDpEvent(events=inners):
            return sum((_plain_rdp(inner, orders, adjacency) for inner in inners), np.zeros(len(orders)))
        case dp.SelfComposedDpEvent(event=inner, count=count):
            return int(count) * _plain_rdp(inner, orders, adjacency)
    is_own = isinstance(event, dp.PoissonSampledDpEvent | dp.SampledWithoutReplacementDpEvent)
    accountant = RdpAccountant(orders, adjacency if is_own else ADD_OR_REMOVE_ONE)
    if not accountant.supports(event):
        raise RefusedError(f"the RDP accountant has no bound for {event}; use the other accountant.")
    with _quiet_about_dropped_orders():
        accountant.compose(event)
    found = np.asarray(accountant._rdp, dtype=np.float64)  # the bounds have no public reader
    return _rounded_up(found, np.array(orders)) if is_own else found


def _rounded_up(divergences: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Bounds of a sample, logarithms over (order - 1): infinite where they overflowed, and the least with room.

    Rounding takes up to 1e-15 times the order from a logarithm, which counts where it is near 0: a large number of
    such events must not cost nothing, nor one less than nothing.
    """
    least = np.nan_to_num(divergences, nan=math.inf, posinf=math.inf).clip(min=0.0)
    is_near_zero = least * (orders - 1) < _NEAR_ZERO * orders
    raised: np.ndarray = least + np.where(is_near_zero, _ROUNDING * orders / (orders - 1), 0.0)
    return raised


def _rdp_of_pure(epsilon: float, orders: np.ndarray) -> np.ndarray:
    """Of randomised response, which every mechanism with this epsilon can be made from (Mironov 2017, Prop. 5)."""
    truth = -np.logaddexp(0.0, -epsilon)
    lie = truth - epsilon
    moments = np.logaddexp(orders * truth + (1 - orders) * lie, orders * lie + (1 - orders) * truth)
    divergences: np.ndarray = np.clip(moments / (orders - 1), 0.0, epsilon)
    return divergences


def _rdp_of_objective(event: ObjectivePerturbationDpEvent, orders: np.ndarray) -> np.ndarray:
    """Of the privacy loss that `losses` bounds: Redberg, Koskela and Wang 2023."""
    s = 1.0 / event.noise_multiplier
    divergences: np.ndarray = (
        math.log1p(event.curvature_ratio)
        + orders * s**2 / 2
        + (math.log(2.0) + log_ndtr((orders - 1) * s)) / (orders - 1)
    )
    return divergences


def is_not_private(event: dp.DpEvent) -> bool:
    """Whether an event, or one that it is made of, protects nobody."""
    return isinstance(event, dp.NonPrivateDpEvent) or any(map(is_not_private, parts(event)))


@contextmanager
def _quiet_about_dropped_orders() -> Iterator[None]:
    """The RDP accountant warns when it drops an order whose series is slow; the bound stays valid."""
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        yield
    finally:
        absl.setLevel(level)
