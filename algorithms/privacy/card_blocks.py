"""The blocks on a privacy card: where each that the run was charged to stood when the run had settled."""

import math
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, model_validator

from algorithms.privacy.budget import Budget
from algorithms.privacy.card_parts import Amount, Section, Text
from algorithms.privacy.ledger_composition import Composition, Events, times


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

    def least_spent(self, cost: Budget, events: Events, adjacency: str) -> dict[str, float]:
        """The epsilon that this run alone takes from each block, counted as the ledger counts; nothing without noise.

        cost: of the run. events: its recorded releases. Raises Refused where an event has no bound under the
        composition.
        """
        if math.isinf(cost.epsilon):
            return {block.name: 0.0 for block in self.charged}
        rule = Composition(self.composition.kind, self.composition.order)
        together = min(self.blocks_per_person, len(self.charged))
        price = rule.price(cost, events, adjacency, together)
        charge = rule.cost(cost, together) if price is None else (Fraction(price),)
        amount = times(charge, self.blocks_per_person)
        return {block.name: rule.shown(amount, block.cap.delta).epsilon for block in self.charged}
