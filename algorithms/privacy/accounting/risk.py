"""What an attacker can achieve against a run, from its whole privacy profile and not from one (epsilon, delta) alone.

The attacker knows all other records and decides by what was released whether one record was used. Any test of that has
a false positive rate (of records not used that are taken for used ones) and a false negative rate. A profile, delta as
a function of epsilon, bounds both (Kairouz et al. 2015; Dong, Roth and Su 2022, Proposition 6): every number here is a
limit that holds for the best attacker, never an estimate.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from numpy.typing import ArrayLike, NDArray

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.epsilon import (
    ADD_OR_REMOVE_ONE,
    ORDERS,
    ReprKey,
    adjacency_named,
    compose_loss,
    epsilon_of_rdp,
    is_not_private,
    merge_events,
    rdp,
)
from algorithms.privacy.accounting.events import Schedule, count_same
from algorithms.privacy.accounting.filters import FilterSpec, FixedSchedule, RenyiBudget, ZCDPBudget
from algorithms.privacy.accounting.gaussian import gaussian_delta

Array = NDArray[np.float64]
_POINTS, _MIN_DELTA = 300, 1e-10
"""The number of epsilons of a profile, and its least delta."""
_LARGEST_EPSILON, _LARGEST_MU = 100.0, 1e6
"""The epsilon above which a larger one says nothing more, and the largest mu of a Gaussian that is searched."""


@dataclass(frozen=True)
class Profile:
    """Upper bounds of delta at some epsilons.

    Attributes:
        epsilon: Ascending from 0, shape [k].
        delta: In [0, 1], shape [k].
    """

    epsilon: Array
    delta: Array


def profile(schedule: Schedule, *, adjacency: NeighboringRelation = ADD_OR_REMOVE_ONE) -> Profile:
    """The profile of releases that were fixed in advance: by PLD, or by Rényi divergences where that has no bound.

    Args:
        schedule: The events and how often each occurs.
        adjacency: What the events are accounted under.

    Raises:
        RefusedError: Where an event has no bound at all.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> bool(profile([(GaussianDpEvent(1.0), 1)]).delta[0] >= 0.3829)  # 2 Phi(1/2) - 1
        True
    """
    return _profile(ReprKey.of(count_same(schedule), adjacency))


@lru_cache(maxsize=128)
def _profile(key: ReprKey) -> Profile:
    """`profile` with a cache, since plan, report and audit look at the same one."""
    schedule, adjacency = key.arguments
    if any(is_not_private(event) for event, _ in schedule):
        return Profile(np.zeros(1), np.ones(1))
    few = merge_events(schedule)
    with suppress(RefusedError):
        divergences = rdp(few, adjacency=adjacency)
        if epsilon_of_rdp(divergences, _MIN_DELTA) > _LARGEST_EPSILON:  # which tells nothing more
            return profile_of_rdp(np.array(ORDERS), divergences)
    try:
        loss = compose_loss(few, adjacency, delta=_MIN_DELTA)
    except RefusedError:
        return profile_of_rdp(np.array(ORDERS), rdp(few, adjacency=adjacency))
    epsilons = _grid(loss.epsilon(_MIN_DELTA))
    return Profile(epsilons, loss.deltas(epsilons))


def profile_of_rdp(orders: Array, divergences: Array) -> Profile:
    """The profile that Rényi bounds give, as for a run that is held by a filter.

    Args:
        orders: Above 1, shape [k].
        divergences: The bound at each order, shape [k].

    Example:
        >>> rho, orders = 0.1, np.arange(2.0, 60.0)
        >>> bool(profile_of_rdp(orders, rho * orders).delta[-1] < 1e-8)
        True
    """
    epsilons = _grid(epsilon_of_rdp(divergences, _MIN_DELTA, tuple(orders)))
    deltas = [compute_delta(orders, divergences, epsilon)[0] for epsilon in epsilons]
    return Profile(epsilons, np.clip(np.array(deltas), 0.0, 1.0))


def risk_profile(spec: FilterSpec, schedule: Schedule, adjacency: str) -> Profile:
    """What a run tells at each epsilon: of its events where these are fixed, else of the filter that holds it.

    spec: the plan's filter. schedule, adjacency: of the plan.

    Raises RefusedError where an event has no bound.
    """
    match spec:
        case ZCDPBudget(rho):
            return profile_of_rdp(np.array(ORDERS), rho * np.array(ORDERS))
        case RenyiBudget(order, limit):
            return profile_of_rdp(np.array([order]), np.array([limit]))
        case FixedSchedule():
            return profile(schedule, adjacency=adjacency_named(adjacency))


def _grid(largest: float) -> Array:
    return np.linspace(0.0, min(max(largest, 1e-6), 500.0), _POINTS)


def min_false_negative_rate(curve: Profile, false_positive_rates: ArrayLike) -> Array:
    """The smallest false negative rate of any test at a false positive rate: the trade-off curve.

    Args:
        curve: The run's profile.
        false_positive_rates: Rates in [0, 1], of any shape.

    Returns:
        Lower bounds in [0, 1], of the same shape.

    Example:
        >>> perfect = Profile(np.zeros(1), np.zeros(1))  # nothing was released
        >>> min_false_negative_rate(perfect, [0.1, 0.5]).tolist()
        [0.9, 0.5]
    """
    rates = np.asarray(false_positive_rates, dtype=np.float64)[..., None]
    of_one_side = 1 - curve.delta - np.exp(curve.epsilon) * rates
    of_other_side = np.exp(-curve.epsilon) * (1 - curve.delta - rates)
    best: Array = np.maximum(0.0, np.maximum(of_one_side, of_other_side).max(axis=-1))
    return best


def max_true_positive_rate(curve: Profile, false_positive_rates: ArrayLike) -> Array:
    """The largest true positive rate of any test at a false positive rate: the share of used records it recognises.

    Example:
        >>> round(float(max_true_positive_rate(Profile(np.zeros(1), np.zeros(1)), 0.05)), 6)
        0.05
    """
    detected: Array = 1 - min_false_negative_rate(curve, false_positive_rates)
    return detected


def advantage(curve: Profile) -> float:
    """The most by which a true positive rate exceeds its false positive rate.

    It is delta at epsilon 0; where that is a loose bound, as Rényi's, a larger epsilon can give a smaller one.
    Half of it above one half is how often the best guess is right where half of the records were used.

    Example:
        >>> advantage(Profile(np.zeros(1), np.array([0.25])))
        0.25
    """
    return float(np.min(1 - 2 * (1 - curve.delta) / (1 + np.exp(curve.epsilon))))


def gaussian_mu(curve: Profile) -> float:
    """The smallest mu of a Gaussian mechanism (sensitivity over standard deviation) that is at least as leaky.

    Its delta is no smaller at any epsilon of the profile at which the profile's is above 1e-10; beyond, nothing is
    compared. Infinite where none is.

    Source: Dong, Roth and Su 2022 (Gaussian differential privacy).

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> round(gaussian_mu(profile([(GaussianDpEvent(2.0), 1)])), 2)
        0.5
    """
    if curve.delta[0] >= 1:
        return math.inf
    pairs = zip(curve.epsilon.tolist(), curve.delta.tolist(), strict=True)
    points, largest = [(e, d) for e, d in pairs if d > _MIN_DELTA], 0.0
    # Delta grows with mu, so that a point whose delta the largest mu so far reaches has no larger one. A few points
    # from everywhere come first, after which nearly all others are such.
    for e, d in [*points[:: max(1, len(points) // 8)], *points]:
        if d > gaussian_delta(largest, e):
            largest = _mu_at(e, d)
        if math.isinf(largest):
            break
    return largest


def _mu_at(epsilon: float, delta: float) -> float:
    """The mu whose delta at this epsilon is `delta`."""

    def above(mu: float) -> float:
        return gaussian_delta(mu, epsilon) - delta

    if above(0.0) >= 0:
        return 0.0
    if above(_LARGEST_MU) < 0:
        return math.inf
    from scipy.optimize import brentq  # here, since most reports do without it

    return float(brentq(above, 0.0, _LARGEST_MU, xtol=1e-9))
