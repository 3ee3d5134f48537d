"""Rényi divergence bounds of privacy events, and the epsilon that follows from them."""

import math
from functools import lru_cache

import dp_accounting as dp
import numpy as np
from dp_accounting.rdp import compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

from algorithms.privacy.accounting.adjacency import ADD_OR_REMOVE_ONE, Adjacency, as_add_remove
from algorithms.privacy.accounting.event_rules import rule_of
from algorithms.privacy.accounting.events import Schedule, kept

ORDERS = tuple(float(order) for order in DEFAULT_RDP_ORDERS)


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
    plain = as_add_remove(adjacency, event)
    divergences = rule_of(plain).rdp(plain, orders, adjacency)
    divergences.setflags(write=False)
    return divergences


def is_not_private(event: dp.DpEvent) -> bool:
    """Whether an event, or one that it is made of, protects nobody."""
    return rule_of(event).is_not_private(event)
