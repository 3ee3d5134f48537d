"""What the best of a random number of trials costs, by the profile of one trial.

With f the generating function of the number, the best has density q(y) f'(Q(y)), where Q(y) is the probability of at
most y. So it suffices that a shift bounds log f'(Q) - log f'(Q') for neighbours: f' is at most f'(1), the mean, so that
at epsilon + shift the best has at most the mean number times a trial's delta at epsilon. Private names of dp_accounting
are used where it has no public equivalent.

Source: Koskela, Redberg and Wang 2024, arXiv:2402.06701.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import _gamma_truncated_negative_binomial

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.mechanism_plds import ProfilePLD
from algorithms.privacy.accounting.pairs import TAIL_DELTA
from algorithms.privacy.accounting.pld import Array, Indices
from algorithms.privacy.accounting.pld_composition import GridComposition
from algorithms.privacy.accounting.pld_epsilon import ComposedPLD, GridsByDelta

_NEAR_NOTHING = 1e-9
_MIN_STEP, _LARGEST_STEP, _STEPS, _STRIDE = 1e-6, 10.0, 50_000, 250
"""The epsilons, beside 0, at which `shift_of_selection` takes its bound, how many, and how many together first."""
_TILTS, _HALVINGS = (1e-6, 1e15), 14
"""Between which the tilt of the tail that decides is looked for, and how often their ratio is halved."""
_ROUNDS, _TAIL_SHARE, _MAX_TAIL_RATIO = 5, 0.25, 32.0
"""How often tails are taken; which share of the delta that decides the tail is taken at, and by how much more than that
delta may be: caps leave nothing close to less."""

Deltas: TypeAlias = Callable[[Array], Array]
"""Upper bounds on delta at epsilons of any sign, shape [k] -> [k]."""
Side: TypeAlias = GridComposition | GridsByDelta | ProfilePLD
"""Of a `ComposedPLD`."""


def shift_of_selection(event: Any, deltas: Deltas) -> float:
    """How far the best trial's epsilon exceeds one trial's: a bound on log f'(Q) - log f'(Q') for neighbours.

    For any e, 1 - Q' <= exp(e) (1 - Q) + delta(e). A Poisson number has log f' = mean (Q - 1); a truncated negative
    binomial one has f' proportional to (1 - (1 - gamma) Q)^-(shape + 1), of which e bounds the logarithm of the base's
    ratio as soon as (1 - gamma) delta(e) <= gamma (exp(e) - 1).
    """
    return 0.0 if _draws_one(event) else _shift_and_epsilon(event, deltas)[0]


def _draws_one(event: Any) -> bool:
    """Whether a search always has one trial: a truncated number is at least 1, so that its mean is 1 only then."""
    return bool(event.mean == 1 and math.isfinite(event.shape))


def shift_of_trials(event: Any, trials: Sequence[ComposedPLD], minimum: float = 0.0) -> float:
    """`shift_of_selection` for trials of several kinds, each known by the tail at the delta that decides alone.

    Any tail bounds all deltas. Which decides is estimated first, and taken from what was found where that was far off.

    Args:
        event: The search.
        trials: Of each kind.
        minimum: A bound on all deltas of kinds that are none of these.
    """
    if _draws_one(event):
        return 0.0
    sides = [side for trial in trials for side in trial.sides]
    near, shift = [_TAIL_SHARE * _decisive_delta(event, side) for side in sides], math.inf
    for _ in range(_ROUNDS):
        bounds = [partial(_deltas_near, side, delta) for side, delta in zip(sides, near, strict=True)]
        shift_near, epsilon = _shift_and_epsilon(event, partial(_largest, bounds, minimum))
        shift = min(shift, shift_near)
        at_epsilon = [float(bound(np.array([epsilon]))[0]) for bound in bounds]
        worst = int(np.argmax(at_epsilon))
        if near[worst] <= at_epsilon[worst] <= _MAX_TAIL_RATIO * near[worst]:
            break
        near = [_TAIL_SHARE * delta for delta in at_epsilon]
    return shift


def _largest(bounds: Sequence[Deltas], minimum: float, epsilons: Array) -> Array:
    every: Array = np.max([bound(epsilons) for bound in bounds], axis=0, initial=minimum)
    return every


def _deltas_near(side: Side, delta: float, epsilons: Array) -> Array:
    """Bounds on a side's deltas that are close where they are near this one."""
    if not isinstance(side, GridsByDelta):
        return side.deltas(epsilons, TAIL_DELTA)
    largest = min(0.5, side.rough.delta_at_0 / 2)
    return side.deltas_near(epsilons, max(TAIL_DELTA, min(delta, largest)))


def _decisive_delta(event: Any, side: Side) -> float:
    """About the delta at the epsilon at which `shift_of_selection` ends, by saddle points.

    A Poisson number's shift is least where delta falls as fast as exp(epsilon) rises, and under a tilt t delta falls by
    exp(-t epsilon).
    """
    if not isinstance(side, GridsByDelta):
        return TAIL_DELTA
    is_poisson = math.isinf(event.shape)
    gamma = 0.5 if is_poisson else float(_gamma_truncated_negative_binomial(event.shape, event.mean))
    low, high = map(math.log, _TILTS)
    log_delta = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        epsilon, log_delta = side.rough.tail_at(math.exp(middle))
        if is_poisson:
            is_above = middle + log_delta > epsilon
        else:
            log_rise = epsilon + math.log(-math.expm1(-epsilon)) if epsilon > 0 else -math.inf
            is_above = math.log1p(-gamma) + log_delta > math.log(gamma) + log_rise
        low, high = (middle, high) if is_above else (low, middle)
    return math.exp(log_delta)


def _shift_and_epsilon(event: Any, deltas: Deltas) -> tuple[float, float]:
    """`shift_of_selection` of a search of several trials, and the e that it takes."""
    tried = np.append(0.0, np.geomspace(_MIN_STEP, _LARGEST_STEP, _STEPS))

    def slack(at: Indices) -> Array:
        # With the last epsilon, whose delta is the least: how many tails are computed depends on that.
        return deltas(tried[np.append(at, _STEPS)])[:-1] * (1 + _NEAR_NOTHING) + TAIL_DELTA

    # First at some epsilons, then at those between them: delta falls.
    indices = np.append(np.arange(0, _STEPS, _STRIDE), _STEPS)
    slacks, rises = slack(indices), np.expm1(tried[indices])
    if math.isinf(event.shape):
        costs = rises + slacks
        blocks = indices[:-1][rises[:-1] + slacks[1:] < costs.min()]
        between = (blocks[:, None] + np.arange(1, _STRIDE)).ravel()
        if len(between):
            indices, costs = (
                np.append(indices, between),
                np.append(costs, np.expm1(tried[between]) + slack(between)),
            )
        at = int(np.argmin(costs))
        return float(event.mean * costs[at]), float(tried[indices[at]])
    gamma = float(_gamma_truncated_negative_binomial(event.shape, event.mean))
    enough = np.flatnonzero((1 - gamma) * slacks <= gamma * rises)
    if not len(enough):
        raise RefusedError(
            "a trial reveals too much for the profile of the best; set {target.accountant} to rdp.",
            code="trial_profile",
        )
    between = np.arange(indices[max(enough[0] - 1, 0)], indices[enough[0]] + 1)
    holds = (1 - gamma) * slack(between) <= gamma * np.expm1(tried[between])
    holds[-1] = True  # as seen above, whatever the last digit is now
    epsilon = float(tried[between[np.argmax(holds)]])
    return float((event.shape + 1) * epsilon), epsilon
