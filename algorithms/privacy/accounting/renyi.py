"""Rényi bounds of single mechanisms, at each order."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import dp_accounting as dp
import numpy as np
from dp_accounting.rdp import RdpAccountant
from scipy.special import log_ndtr

from algorithms.errors import RefusedError

_ROUNDING, _NEAR_ZERO, _NEAR_NOTHING = 2e-15, 1e-10, 1e-9


def by_rdp(event: dp.DpEvent, orders: tuple[float, ...], adjacency: dp.NeighboringRelation) -> np.ndarray:
    """What dp_accounting has; raises RefusedError where that is nothing."""
    accountant = RdpAccountant(orders, adjacency)
    if not accountant.supports(event):
        raise RefusedError(f"the RDP accountant has no bound for {event}; use the other accountant.")
    with _quiet_about_dropped_orders():
        accountant.compose(event)
    return np.asarray(accountant._rdp, dtype=np.float64)  # the bounds have no public reader


def rounded_up(divergences: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Bounds of a sample, logarithms over (order - 1): infinite where they overflowed, and the least with room.

    Rounding takes up to 1e-15 times the order from a logarithm, which counts where it is near 0: a large number of
    such events must not cost nothing, nor one less than nothing.
    """
    least = np.nan_to_num(divergences, nan=math.inf, posinf=math.inf).clip(min=0.0)
    is_near_zero = least * (orders - 1) < _NEAR_ZERO * orders
    raised: np.ndarray = least + np.where(is_near_zero, _ROUNDING * orders / (orders - 1), 0.0)
    return raised


def rdp_of_pure(epsilon: float, orders: np.ndarray) -> np.ndarray:
    """Of randomised response, which every mechanism with this epsilon can be made from (Mironov 2017, Prop. 5)."""
    truth = -np.logaddexp(0.0, -epsilon)
    lie = truth - epsilon
    moments = np.logaddexp(orders * truth + (1 - orders) * lie, orders * lie + (1 - orders) * truth)
    # Near 0 rounding takes all of the moments; this bound is as tight there (Bun and Steinke 2016, Proposition 3.3).
    divergences = np.where(moments < _NEAR_NOTHING, orders * epsilon**2 / 2, moments / (orders - 1))
    return np.clip(divergences, 0.0, epsilon)


def rdp_of_objective(noise_multiplier: float, curvature_ratio: float, orders: np.ndarray) -> np.ndarray:
    """Of the privacy loss that `losses.of_objective` bounds: Redberg, Koskela and Wang 2023."""
    s = 1.0 / noise_multiplier
    divergences: np.ndarray = (
        math.log1p(curvature_ratio)
        + orders * s**2 / 2
        + (math.log(2.0) + log_ndtr((orders - 1) * s)) / (orders - 1)
    )
    return divergences


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
