"""The blocks on a privacy card: where each that the run was charged to stood when the run had settled."""

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, model_validator

from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.card.parts import Amount, Section, Text
from algorithms.privacy.card.verdict import BELOW
from algorithms.privacy.ledger.composition import Composition, Events, times


class ChargedBlock(Section):
    """A block right after the run's settlement, as the ledger had it."""

    name: Text
    cap: Amount
    spent: Amount
    remaining: Amount


class AcrossRuns(Section):
    """How the runs on a block add up; order: of "renyi" alone."""

    kind: Literal["basic", "zcdp", "renyi"]
    order: Annotated[float, Field(gt=1)] | None
    statement: Text


class Blocks(Section):
    """The blocks of a run. unit: whom the numbers of a block protect, in words."""

    charged: Annotated[tuple[ChargedBlock, ...], Field(min_length=1)]
    blocks_per_person: Annotated[int, Field(ge=1)]
    unit: Text
    composition: AcrossRuns

    @model_validator(mode="after")
    def _names_each_once(self) -> "Blocks":
        if len({block.name for block in self.charged}) < len(self.charged):
            raise ValueError("a run is charged to a block once")
        return self

    def least_spent(self, cost: Budget, events: Events, adjacency: str) -> dict[str, Budget]:
        """What this run alone takes from each block; see the function of this name."""
        rule, count = Composition(self.composition.kind, self.composition.order), self.blocks_per_person
        return {
            block.name: least_spent(
                rule,
                cost,
                events,
                adjacency,
                delta=block.cap.delta,
                blocks_per_person=count,
                together=min(count, len(self.charged)),
            )
            for block in self.charged
        }


def least_spent(
    rule: Composition,
    cost: Budget,
    events: Events,
    adjacency: str,
    *,
    delta: float,
    blocks_per_person: int = 1,
    together: int = 1,
) -> Budget:
    """What a run alone takes from an account, counted as the ledger counts; nothing for one without noise.

    cost: of the run. events: its recorded releases. delta: of the account's cap. together: how many records of a person
    the run may have read. Raises RefusedError where an event has no bound under the composition.
    """
    if math.isinf(cost.epsilon):
        return Budget(0.0, 0.0)
    price = rule.price(cost, events, adjacency, together)
    charge = rule.cost(cost, together) if price is None else (Fraction(price),)
    return rule.shown(times(charge, blocks_per_person), delta)


def is_left(rule: Composition, cap: Amount, spent: Amount, remaining: Amount) -> bool:
    """Whether so much can remain of a cap of which so much is spent; nothing of one lowered below that.

    Sums other than basic ones show each amount as an epsilon of its own, of which none is above the cap.
    """
    pairs = [(cap.epsilon, spent.epsilon, remaining.epsilon), (cap.delta, spent.delta, remaining.delta)]
    return all(_is_left(rule, *(math.inf if end is None else end for end in pair)) for pair in pairs)


def _is_left(rule: Composition, cap: float, spent: float, remaining: float) -> bool:
    most = max(0.0, cap - spent) if rule.kind == "basic" and math.isfinite(spent) else cap
    return remaining <= most + cap * BELOW if math.isfinite(cap) else True
