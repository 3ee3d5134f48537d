"""How the runs on a population add up: basic sums, zCDP, or Rényi at one order; declared once and never changed.

All three hold when a later run is chosen after an earlier one's results were seen: basic sums by Rogers et al. 2016,
zCDP by Whitehouse et al. 2023, Rényi at an order fixed in advance by Feldman and Zrnic 2021 and Lécuyer 2021. Under
zCDP and Rényi a run's price follows from its events alone; nobody states it.

The accountants are imported where they are needed, so that the books of basic sums need none of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

from algorithms.privacy.budget import Budget
from algorithms.privacy.errors import Refused

Kind = Literal["basic", "zcdp", "renyi"]
Events: TypeAlias = Sequence[Mapping[str, Any]]
Amount: TypeAlias = tuple[Fraction, ...]
"""What is charged: epsilon and delta of basic sums, else one number, rho or the divergence at the order."""


@dataclass(frozen=True)
class Composition:
    """How charges are counted; order: of "renyi" alone, above 1. Raises Refused for anything else."""

    kind: Kind = "basic"
    order: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise Refused(f"{self.kind!r} is no composition; choose basic, zcdp or renyi.")
        if (self.kind == "renyi") != (self.order is not None):
            raise Refused(f"{self.kind} with the order {self.order}: renyi needs one, the others have none.")
        if self.order is not None and not 1 < self.order < math.inf:
            raise Refused(f"a Rényi composition needs an order above 1, not {self.order}; 4 to 32 are usual.")

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | None) -> "Composition":
        """The composition that `to_json` wrote; basic where there is none."""
        return cls(**document) if document else cls()

    def to_json(self) -> dict[str, Any]:
        """The composition as JSON values, without what does not apply."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def nothing(self) -> Amount:
        """The amount of no charge."""
        return (Fraction(0),) * (2 if self.kind == "basic" else 1)

    def amount_of(self, budget: Budget) -> Amount:
        """What a cap allows, or the largest amount whose (epsilon, delta) a budget covers; at least nothing.

        Raises Refused for a delta of 0 or 1 under zCDP and Rényi, which state epsilon at a delta in between.
        """
        if self.kind == "basic":
            return exact(budget.epsilon), exact(budget.delta)
        if not 0 < budget.delta < 1:
            raise Refused(
                f"{self} states epsilon at a delta above 0 and below 1, not at {budget.delta:g}; give one."
            )
        return (exact(_largest(self, budget)),)

    def price(self, cost: Budget, events: Events, adjacency: str, together: int = 1) -> float | None:
        """The price of a run from its events, in rho or divergence; None under basic sums, which count its cost.

        together: how many records a person may have in it; the price is then the share of each of their blocks.
        Raises Refused for a run without events and where an event has no bound.
        """
        if self.kind == "basic" or math.isinf(cost.epsilon):
            return None
        if not events:
            raise Refused(
                f"{self} counts a run by its events, and this one names none; reserve it with its events."
            )
        return self.events_price(events, adjacency, together)

    def events_price(self, events: Events, adjacency: str, together: int = 1) -> float:
        """The rho of events, or their divergence at the order; raises Refused where one has no bound."""
        from algorithms.privacy.ledger_price import price_of

        return price_of(self.order, events, adjacency, together)

    def cost(self, budget: Budget, together: int) -> Amount:
        """What a run counts for under basic sums in each block of a person who has so many records in it."""
        delta = budget.delta
        if together > 1:
            delta = min(1.0, _group_delta(budget, together) / together)
        return exact(budget.epsilon), exact(delta)

    def shown(self, amount: Amount, delta: float) -> Budget:
        """An amount as (epsilon, delta); delta: of the cap, where the amount has none of its own."""
        if not any(amount):
            return Budget(0.0, 0.0)
        if self.kind == "basic":
            return Budget(float(amount[0]), min(1.0, float(amount[1])))
        from algorithms.privacy.filters import conversion, epsilon_of_zcdp

        if self.order is None:
            return Budget(epsilon_of_zcdp(float(amount[0]), delta), delta)
        return Budget(max(0.0, float(amount[0]) + conversion(self.order, delta)), delta)

    def in_words(self, amount: Amount) -> str:
        """An amount as messages write it, to 6 digits."""
        if self.kind == "basic":
            return f"epsilon={float(amount[0]):.6g}, delta={float(amount[1]):.6g}"
        name = "rho" if self.order is None else f"divergence of order {self.order:g}"
        return f"{name}={float(amount[0]):.6g}"

    def __str__(self) -> str:
        return {"basic": "basic composition", "zcdp": "zCDP"}.get(self.kind, f"Rényi at order {self.order}")


BASIC = Composition()


@lru_cache(maxsize=4096)
def exact(number: float) -> Fraction:
    """The decimal that a person reads: three times 0.1 is 0.3."""
    return Fraction(repr(float(number)))


def times(amount: Amount, count: int | Fraction) -> Amount:
    """An amount so many times."""
    return tuple(part * count for part in amount)


def plus(first: Amount, second: Amount, sign: int = 1) -> Amount:
    """The sum of two amounts, or with the sign -1 their difference."""
    return tuple(a + sign * b for a, b in zip(first, second, strict=True))


def _group_delta(budget: Budget, count: int) -> float:
    """The delta of `count` records together, at `count` times their epsilon: Dwork and Roth 2014, Theorem 2.2."""
    if (count - 1) * budget.epsilon > 700:  # beyond what a float holds
        return float(count) if budget.delta else 0.0
    return budget.delta * math.fsum(math.exp(i * budget.epsilon) for i in range(count))


@lru_cache(maxsize=4096)
def _largest(composition: Composition, budget: Budget) -> float:
    from algorithms.privacy.filters import conversion, rho_of_budget

    if composition.order is None:
        return rho_of_budget(budget) if budget.epsilon > 0 else 0.0
    return max(0.0, budget.epsilon - conversion(composition.order, budget.delta))
