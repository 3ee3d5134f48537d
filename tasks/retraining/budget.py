"""What a retraining may cost as an epsilon for its plan: a block's share is in the units of its composition."""

from collections.abc import Callable
from decimal import ROUND_FLOOR, Context
from fractions import Fraction
from math import exp, inf, log

from algorithms.algorithm import Plan
from algorithms.privacy.budget import Budget
from algorithms.privacy.errors import Refused
from algorithms.privacy.ledger import Balance, Price
from algorithms.receipt import reserved_events

_CLOSE, _MOST_PLANS = 0.01, 12


def epsilon_for(
    price: Price, balance: Balance, blocks: int, delta: float, plan: Callable[[float], Plan]
) -> tuple[float, float]:
    """The epsilon and delta of the run that costs each of its blocks at most a price; under zCDP and Rényi within 1 %.

    price: in the units of the population's composition, as its policies give it. blocks: how many the run reads.
    delta: the one wanted. plan: makes the plan of an epsilon. Raises Refused where no run is that cheap.
    """
    together = min(balance.blocks_per_person, blocks)
    if balance.composition.kind == "basic":
        return _basic(price, balance, together, delta)
    each = price[0] / balance.blocks_per_person

    def share(epsilon: float) -> float:
        made = plan(epsilon)
        cost = balance.composition.price(made.cost, reserved_events(made), made.adjacency, together)
        return inf if cost is None else cost / each

    highest = balance.composition.shown((Fraction(each),), delta).epsilon
    return _largest(share, highest), delta


def _basic(price: Price, balance: Balance, together: int, delta: float) -> tuple[float, float]:
    count = balance.blocks_per_person
    epsilon = _floor(price[0] / count)
    charged = balance.composition.cost(Budget(epsilon, delta), together)[1] * count
    if epsilon <= 0 or charged > Fraction(price[1]):
        raise Refused(
            f"a retraining may cost epsilon={price[0]:g}, delta={price[1]:g}, which a delta of {delta:g} exceeds;"
            " set delta in retrain.yaml lower."
        )
    return epsilon, delta


def _largest(share: Callable[[float], float], highest: float) -> float:
    """The largest epsilon whose share is at most 1, or down to 1 % less; the share grows with epsilon.

    By interpolation between the logarithms of one that fits and one that does not.
    """
    fits, exceeds = (0.0, 0.0), (0.0, 0.0)
    epsilon = _floor(highest)
    for _ in range(_MOST_PLANS):
        found = share(epsilon)
        if 1 - _CLOSE <= found <= 1:
            return epsilon
        if found > 1:
            exceeds = epsilon, found
        else:
            fits = epsilon, found
        epsilon = _floor(_between(fits, exceeds))
    if fits[0] <= 0:
        raise Refused("no run is as cheap as the blocks can pay; raise smallest in retrain.yaml.")
    return fits[0]


def _between(fits: tuple[float, float], exceeds: tuple[float, float]) -> float:
    """Where to look next; each is an epsilon and its share, or zeros while none is known."""
    if not fits[0]:
        return exceeds[0] * max(0.1, min(0.95, 1 / exceeds[1]))
    if not exceeds[0]:
        return fits[0] * max(1.05, 1 / max(fits[1], 0.1))
    slope = (log(exceeds[0]) - log(fits[0])) / (log(exceeds[1]) - log(fits[1]))
    return fits[0] * exp(slope * (log(1 - _CLOSE / 2) - log(fits[1])))


def _floor(number: float) -> float:
    """The number to 6 digits, never above it."""
    return float(Context(prec=6, rounding=ROUND_FLOOR).create_decimal(repr(number)))
