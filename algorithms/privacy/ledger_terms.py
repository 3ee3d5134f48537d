"""What a population was declared with, and what a run of it therefore counts for."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from algorithms.privacy.budget import Budget
from algorithms.privacy.ledger_composition import Amount, Composition, exact, times
from algorithms.privacy.ledger_entry import WHOLE_POPULATION


@dataclass(frozen=True)
class Terms:
    """What was declared with a population, for ever.

    bound: by name, what else its runs are held to. A value can be replaced until the first run is reserved, so that
    one that was refused binds nobody; a name that comes later is bound from then on.
    """

    public: bool
    composition: Composition
    blocks_per_person: int
    bound: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, about: Mapping[str, Any]) -> "Terms":
        """The terms in the notes of a population's row."""
        composition = Composition.from_json(about["composition"])
        return cls(about["public"], composition, about["blocks_per_person"], about["bound"])

    def to_json(self) -> dict[str, Any]:
        """The terms as notes."""
        return vars(self) | {"composition": self.composition.to_json(), "bound": dict(self.bound)}

    def unbound(self, asked: "Terms", *, is_charged: bool) -> dict[str, str]:
        """What other terms would bind beyond these; nothing where they contradict these and are to be refused.

        is_charged: whether a run was reserved in the population, from when on what is bound stays.
        """
        others = {name: value for name, value in asked.bound.items() if self.bound.get(name) != value}
        contradicts = replace(self, bound={}) != replace(asked, bound={})
        return {} if contradicts or (is_charged and others.keys() & self.bound.keys()) else others

    def binding(self, bound: Mapping[str, str], *, is_charged: bool) -> "Terms":
        """The terms with more that is bound; what was bound before the first run was reserved stays as it is."""
        return replace(self, bound={**bound, **self.bound} if is_charged else {**self.bound, **bound})

    def together(self, blocks: Collection[str]) -> int:
        """How many records a person may have in a run on these blocks: one in each, and one for each possible block."""
        return (
            self.blocks_per_person if WHOLE_POPULATION in blocks else min(self.blocks_per_person, len(blocks))
        )

    def charge(self, budget: Budget, about: Mapping[str, Any]) -> Amount:
        """What a run counts for in a block; nothing for one without noise, which is recorded and not added up.

        about: the notes of its row, in which the ledger keeps its price and how many records of a person it may read.
        """
        if math.isinf(budget.epsilon):
            return self.composition.nothing()
        if self.composition.kind == "basic":
            together = about["together"] if self.blocks_per_person > 1 else 1
            return times(self.composition.cost(budget, together), self.blocks_per_person)
        return times((exact(about["price"]),), self.blocks_per_person)
