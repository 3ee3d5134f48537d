"""The epsilon that a price pays for: of a retraining whose blocks can each be charged that much."""

from collections.abc import Callable
from fractions import Fraction
from math import exp, inf, log

from algorithms.core.plan import Plan
from algorithms.core.receipt import reserved_events
from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Balance, Price, floor_to_6_digits

_MAX_UNSPENT, _MAX_PLANS = 0.01, 12
"""The share of a price that may stay unspent, and how many plans are made to come that close."""
_ROUNDING = 1e-9
"""Relative, of a price that a plan's events are compared with."""


def epsilon_for(
    price: Price, balance: Balance, blocks: int, delta: float, plan: Callable[[float], Plan]
) -> tuple[float, float]:
    """The epsilon and delta of the run that costs each of its blocks at most a price; under zCDP and Rényi within 1 %.

    price: in the units of the population's composition. blocks: how many blocks the run reads. delta: the requested
    delta. plan: makes the plan for an epsilon. Raises RefusedError if no run is that cheap.
    """
    # A block is charged the run's price times the number of blocks that a person may be in, see `Terms.charge`.
    together = min(balance.blocks_per_person, blocks)
    each = price[0] / balance.blocks_per_person

    if balance.composition.kind == "basic":
        epsilon = floor_to_6_digits(each)
        fits = epsilon > 0 and (
            balance.composition.cost(Budget(epsilon, delta), together, balance.blocks_per_person)[1]
            <= Fraction(price[1])
        )
        if epsilon > 0 and not fits:  # by the bound for any run; by that of its events it may
            planned = plan(epsilon)
            share = balance.composition.price(
                planned.cost, reserved_events(planned), planned.adjacency, together
            )
            fits = share is not None and share * balance.blocks_per_person <= price[1] * (1 - _ROUNDING)
        if not fits:
            raise RefusedError(
                "a retraining may cost epsilon={epsilon:g}, delta={price_delta:g}, which a delta of {delta:g} exceeds;"
                " set delta in retrain.yaml lower.",
                code="bad_keys",
                epsilon=price[0],
                price_delta=price[1],
                delta=delta,
                keys=("delta",),
            )
        return epsilon, delta

    def share_at(epsilon: float) -> float:
        planned = plan(epsilon)
        cost = balance.composition.price(planned.cost, reserved_events(planned), planned.adjacency, together)
        return inf if cost is None else cost / each

    # The search starts at what the price is as an epsilon, from which the plan's own accountant is not far.
    highest = balance.composition.as_budget((Fraction(each),), delta).epsilon
    return _largest_epsilon(share_at, highest), delta


def _largest_epsilon(share: Callable[[float], float], highest: float) -> float:
    """An epsilon whose share is at most 1 and, if possible, at least 0.99; the share increases with epsilon.

    Found by interpolation between the logarithms of an epsilon that fits and one that does not.
    """
    fits, exceeds = (0.0, 0.0), (0.0, 0.0)
    epsilon = floor_to_6_digits(highest)
    for _ in range(_MAX_PLANS):
        cost_share = share(epsilon)
        if 1 - _MAX_UNSPENT <= cost_share <= 1:
            return epsilon
        if cost_share > 1:
            exceeds = epsilon, cost_share
        else:
            fits = epsilon, cost_share
        epsilon = floor_to_6_digits(_split_bracket(fits, exceeds))
    if fits[0] <= 0:
        raise RefusedError(
            "no run is as cheap as the blocks can pay; raise smallest in retrain.yaml.",
            code="bad_keys",
            keys=("smallest",),
        )
    return fits[0]


def _split_bracket(fits: tuple[float, float], exceeds: tuple[float, float]) -> float:
    """The next epsilon to try. fits, exceeds: an epsilon and its share, or zeros if none is known yet."""
    # With one end only, as if the share were proportional to epsilon; each step a real one, and none too far.
    if not fits[0]:
        return exceeds[0] * max(0.1, min(0.95, 1 / exceeds[1]))
    if not exceeds[0]:
        return fits[0] * max(1.05, 1 / max(fits[1], 0.1))
    # The line through both ends in logarithms, at the middle of what may stay unspent.
    slope = (log(exceeds[0]) - log(fits[0])) / (log(exceeds[1]) - log(fits[1]))
    return fits[0] * exp(slope * (log(1 - _MAX_UNSPENT / 2) - log(fits[1])))
