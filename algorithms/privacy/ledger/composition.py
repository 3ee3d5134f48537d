"""How the runs on a population add up: basic sums, zCDP, or Rényi at one order; declared once and never changed.

All three hold if a later run is chosen after seeing an earlier one's results: basic sums by Rogers et al. 2016, zCDP by
Whitehouse et al. 2023, Rényi at an order fixed in advance by Feldman and Zrnic 2021 and Lécuyer 2021. Under zCDP and
Rényi a run's price follows from its events alone, under basic sums only the delta of several records of a person.

`Terms` are a population's declared terms, including its composition; they decide what a run counts.

The accountants are imported on demand, so that a ledger of basic sums needs none of them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget, EventRow

if TYPE_CHECKING:
    from algorithms.privacy.accounting.events import Schedule

WHOLE_POPULATION = "all"
"""The block of a population without blocks."""

CompositionKind = Literal["basic", "zcdp", "renyi"]
Events: TypeAlias = Sequence[EventRow]
Amount: TypeAlias = tuple[Fraction, ...]
"""A charge: epsilon and delta for basic sums, otherwise one number: rho, or the divergence at the order."""
_WIDE_CELLS, _MAX_OVERSTATED = 8.0, 2.0
"""By how much cells are wider for losses of several records that only tell which numbers of records matter, and how
much more they may state for that."""


@dataclass(frozen=True)
class Composition:
    """How charges on the same people add up.

    Attributes:
        kind: "basic", where epsilons and deltas are added; "zcdp", where rhos are; or "renyi", where divergences at one
            order are.
        order: Above 1, for "renyi" alone.

    Raises:
        RefusedError: For another kind, and for an order that is missing or too much.

    Example:
        >>> str(Composition("renyi", 8.0))
        'Rényi at order 8.0'
        >>> Composition().amount_of(Budget(1.5, 1e-5))
        (Fraction(3, 2), Fraction(1, 100000))
    """

    kind: CompositionKind = "basic"
    order: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(CompositionKind):
            raise RefusedError(
                "{kind!r} is no composition; set {population.composition} to basic, zcdp or renyi.",
                code="composition_unknown",
                kind=self.kind,
            )
        if (self.kind == "renyi") != (self.order is not None):
            raise RefusedError(
                "{kind} with the order {order}: renyi needs one, the others have none; set"
                " {population.composition} so.",
                code="composition_order",
                kind=self.kind,
                order=self.order,
            )
        if self.order is not None and not 1 < self.order < math.inf:
            raise RefusedError(
                "a Rényi composition needs an order above 1, not {order:g}; set it in {population.composition}, where 4"
                " to 32 are usual.",
                code="composition_order_low",
                order=self.order,
            )

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | None) -> "Composition":
        """The inverse of `to_json`; basic if there is none."""
        return cls(**document) if document else cls()

    def to_json(self) -> dict[str, str | float]:
        """The composition as JSON values."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def nothing(self) -> Amount:
        """The amount zero."""
        return (Fraction(0),) * (2 if self.kind == "basic" else 1)

    def amount_of(self, budget: Budget) -> Amount:
        """The amount that a cap allows: the largest whose (epsilon, delta) is within the budget, at least zero.

        Args:
            budget: The cap.

        Returns:
            (epsilon, delta) under basic sums, otherwise (rho,) or (divergence,), as exact fractions.

        Raises:
            RefusedError: For a delta of 0 or 1 under zCDP and Rényi, which need a delta in between.
        """
        if self.kind == "basic":
            return exact(budget.epsilon), exact(budget.delta)
        if not 0 < budget.delta < 1:
            raise RefusedError(
                "{composition} states epsilon at a delta above 0 and below 1, not at {delta:g}; set the delta of"
                " {population.cap} so, or {population.composition} to basic.",
                code="composition_needs_delta",
                composition=self,
                delta=budget.delta,
            )
        return (exact(_largest(self, budget)),)

    def price(self, cost: Budget, events: Events, adjacency: str, group_size: int = 1) -> float | None:
        """The price of a run in each of a person's blocks, from its events.

        Args:
            cost: What the run states.
            events: Its releases.
            adjacency: Under which they are counted.
            group_size: The number of records that a person may have in the run, one in each of as many blocks; the
                price is the share of each block.

        Returns:
            A rho or a divergence. Under basic sums a delta, or None where the run's own cost is charged.

        Raises:
            RefusedError: For a run without events, and for an event without a bound.
        """
        if math.isinf(cost.epsilon):
            return None
        if self.kind == "basic":
            return _delta_share(cost, events, adjacency, group_size) if events and group_size > 1 else None
        if not events:
            raise RefusedError(
                f"{self} counts a run by its events, and this one names none; reserve it with its events."
            )
        return self.events_price(events, adjacency, group_size)

    def events_price(self, events: Events, adjacency: str, group_size: int) -> float:
        """The rho of events, or their divergence at the order, in each block of a person's `group_size` records.

        Any number k of these records costs at most k shares, which their k blocks pay together.

        Args:
            events, adjacency, group_size: As for `price`.

        Raises:
            RefusedError: For an event without a finite bound.
        """
        from algorithms.privacy.accounting.events import count_same, schedule_from_json

        schedule = count_same(schedule_from_json(events))
        # The price of k records together over k, for the k that is dearest by it.
        price = max(
            _group_price(self.order, schedule, adjacency, count) / count for count in range(1, group_size + 1)
        )
        if not math.isfinite(price):
            raise RefusedError(
                "the run's releases have no finite {unit}, by which the runs on its population add up; set"
                " {method.kind} to another, or give these releases more noise.",
                code="price_not_finite",
                unit="zCDP" if self.order is None else f"Rényi divergence of order {self.order:g}",
            )
        return price

    def cost(self, budget: Budget, group_size: int, count: int) -> Amount:
        """The amount of `count` runs in each block under basic sums; group_size: as in `price`."""
        # Each of the blocks pays a share, so that those of one person's `group_size` records pay for all of them.
        delta = min(1.0, _group_delta(budget, group_size) / group_size) if group_size > 1 else budget.delta
        return _charge_of_person((budget.epsilon, delta), count)

    def as_budget(self, amount: Amount, delta: float) -> Budget:
        """An amount as (epsilon, delta).

        Args:
            amount: As `amount_of` gives it.
            delta: Of the cap, for amounts without one; under basic sums it is ignored.
        """
        if not any(amount):
            return Budget(0.0, 0.0)
        if self.kind == "basic":
            return Budget(float(amount[0]), min(1.0, float(amount[1])))
        from algorithms.privacy.accounting.filters import conversion, epsilon_of_zcdp

        if self.order is None:
            return Budget(epsilon_of_zcdp(float(amount[0]), delta), delta)
        return Budget(max(0.0, float(amount[0]) + conversion(self.order, delta)), delta)

    def in_words(self, amount: Amount) -> str:
        """A rho or a divergence for messages, with 6 digits."""
        name = "rho" if self.order is None else f"divergence of order {self.order:g}"
        return f"{name}={float(amount[0]):.6g}"

    def __str__(self) -> str:
        return {"basic": "basic composition", "zcdp": "zCDP"}.get(self.kind, f"Rényi at order {self.order}")


BASIC = Composition()


@lru_cache(maxsize=4096)
def exact(number: float) -> Fraction:
    """A float as the decimal that a person reads: three times 0.1 is 0.3."""
    return Fraction(repr(float(number)))  # repr has the shortest decimal that is this float


def times(amount: Amount, count: int | Fraction) -> Amount:
    """A multiple of an amount.

    Args:
        amount: Exact numbers, in the units of a composition.
        count: A number of runs, or a share.

    Example:
        >>> times((Fraction(1, 10),), 3)
        (Fraction(3, 10),)
    """
    return amount if count == 1 else tuple(part * count for part in amount)


@lru_cache(maxsize=4096)
def _charge_of_person(numbers: tuple[float, ...], count: int) -> Amount:
    return times(tuple(map(exact, numbers)), count)


def plus(first: Amount, second: Amount, sign: int = 1) -> Amount:
    """The sum of two amounts; with sign -1 their difference."""
    return tuple(a + b if sign == 1 else a - b for a, b in zip(first, second, strict=True))


def group_of(budget: Budget, count: int) -> Budget:
    """The cost of several records together, under basic composition.

    Args:
        budget: What each of them costs.
        count: Their number, from 1.

    Source:
        Dwork and Roth 2014, Theorem 2.2.

    Example:
        >>> group_of(Budget(0.5, 0.0), 3)
        Budget(epsilon=1.5, delta=0.0)
    """
    return Budget(count * budget.epsilon, min(1.0, _group_delta(budget, count)))


def _group_delta(budget: Budget, count: int) -> float:
    """The delta of `count` records together, at `count` times their epsilon: Dwork and Roth 2014, Theorem 2.2."""
    if (count - 1) * budget.epsilon > 700:  # beyond what a float holds
        return float(count) if budget.delta else 0.0
    # Sum of e^(i epsilon), i from 0 to k - 1.
    return budget.delta * math.fsum(math.exp(i * budget.epsilon) for i in range(count))


@lru_cache(maxsize=4096)
def _largest(composition: Composition, budget: Budget) -> float:
    from algorithms.privacy.accounting.filters import conversion, rho_of_budget

    if composition.order is None:
        with suppress(RefusedError):  # too small for any rho, as an epsilon of 0
            return rho_of_budget(budget)
        return 0.0
    # What Canonne et al. 2020, Prop. 12, leaves of epsilon.
    return max(0.0, budget.epsilon - conversion(composition.order, budget.delta))


def _group_price(order: float | None, schedule: "Schedule", adjacency: str, count: int) -> float:
    """The divergence at an order of this number of records of one person, or their rho where the order is None."""
    from algorithms.privacy.accounting.epsilon import adjacency_named, group_privacy, rdp
    from algorithms.privacy.accounting.filters import rho_under

    relation = adjacency_named(adjacency)
    of_group = [(group_privacy(event, count), times) for event, times in schedule]
    if order is None:
        return math.fsum(times * rho_under(relation, event) for event, times in of_group)
    return float(rdp(of_group, orders=(order,), adjacency=relation)[0])


class _GroupShares:
    """Bounds on delta_j / j for up to `group_size` records j of a person, each the least that is known.

    delta_j is what j records lose at j times a run's epsilon: by its events, and at most what any run of its cost
    allows. A bound for some records holds for fewer, whom the others may leave alone: the losses of k bound delta_j for
    all j up to k.
    """

    def __init__(self, cost: Budget, events: Events, adjacency: str, group_size: int) -> None:
        import numpy as np  # as below: the ledger opens without it

        from algorithms.privacy.accounting.epsilon import adjacency_named
        from algorithms.privacy.accounting.events import count_same, schedule_from_json

        self._cost, self._group_size = cost, group_size
        self._schedule = count_same(schedule_from_json(events))
        self._relation = adjacency_named(adjacency)
        self._counts = np.arange(1, group_size + 1, dtype=np.float64)
        self._bounds = (
            np.array([_group_delta(cost, count) for count in range(1, group_size + 1)]) / self._counts
        )
        self._powers = {min(2**power, group_size) for power in range(1, group_size.bit_length() + 1)}
        self._on_wide_cells, self._exactly = set[int](), set[int]()

    def __getitem__(self, count: int) -> float:
        return float(self._bounds[count - 1])

    def bound(self, count: int, coarser: float = 1.0) -> float:
        """The share of `count` records, after their losses are computed on cells that are so much wider."""
        import numpy as np

        from algorithms.privacy.accounting.epsilon import compose_loss, group_privacy, merge_events

        (self._exactly if coarser == 1.0 else self._on_wide_cells).add(count)
        with suppress(RefusedError):  # an event without a bound by PLD, or for several records
            of_group = [(group_privacy(event, count), times) for event, times in self._schedule]
            loss = compose_loss(
                merge_events(of_group), self._relation, delta=self._cost.delta, coarser=coarser
            )
            fewer = slice(0, count)
            deltas = loss.deltas(self._counts[fewer] * self._cost.epsilon)
            self._bounds[fewer] = np.minimum(self._bounds[fewer], deltas / self._counts[fewer])
        return self[count]

    def above(self, share: float) -> list[int]:
        """The numbers of records between one and all whose share may be above this one."""
        return [j for j in range(2, self._group_size) if self[j] > share and j not in self._exactly]

    def largest_power(self, counts: Sequence[int]) -> int:
        """The largest power of two among these numbers; the largest number where none is one."""
        return max(self._powers.intersection(counts), default=counts[-1])

    def next_on_wide_cells(self, counts: Sequence[int], share: float) -> int | None:
        """Which of these numbers to bound on wide cells, as its share may be above all that are known roughly.

        None if the largest share is of a number that is known roughly.
        """
        if max(counts, key=self.__getitem__) in self._on_wide_cells:
            return None
        highest = max((self[j] for j in self._on_wide_cells.intersection(counts)), default=share)
        unknown = [j for j in counts if self[j] >= highest and j not in self._on_wide_cells]
        return max(self._powers.intersection(unknown), default=unknown[len(unknown) // 2])


def _delta_share(cost: Budget, events: Events, adjacency: str, group_size: int) -> float:
    """The delta of each block, at the run's epsilon in each, that pays for up to `group_size` records of a person.

    j records in as many blocks pay j times both numbers. So it is the largest of delta_j / j in `_GroupShares`, of
    which only those are computed whose bound is above the largest share so far, first on wide cells, whose losses are
    bounds, too.
    """
    if not cost.delta:
        return 0.0
    # `share` is the largest that is known exactly, from that of a single record on. The bounds of `shares` only fall,
    # and a number of records whose bound is at most `share` needs no computation.
    shares, share = _GroupShares(cost, events, adjacency, group_size), cost.delta
    on_wide_cells = shares.bound(group_size, _WIDE_CELLS)
    are_wide_cells_useful = True
    if on_wide_cells > share:
        share = max(share, shares.bound(group_size))
        # Where wide cells state far too much, each number would be computed twice.
        are_wide_cells_useful = on_wide_cells <= _MAX_OVERSTATED * max(share, shares[group_size])
    while counts := shares.above(share):
        if not are_wide_cells_useful:
            share = max(share, shares.bound(shares.largest_power(counts)))
        elif (count := shares.next_on_wide_cells(counts, share)) is not None:
            shares.bound(count, _WIDE_CELLS)
        else:
            share = max(share, shares.bound(max(counts, key=shares.__getitem__)))
    return min(1.0, share)


UNIT = "unit"
"""The name of the term that fixes what one record of a population is, since amounts of other units do not add up."""


class RowNotes(TypedDict, total=False):
    """What the ledger itself reads in a row's notes; a run's notes may hold more, for people.

    Of a population: public, composition, blocks_per_person, bound. Of a change of a cap: bound; declared or retired,
    for a block; overruled, the blocks that may hold the same, and by whom. Of a run: price, by the composition;
    together, how many records of a person it may read; adjacency; retraining, the scheduled one that it belongs to;
    noise_key and model, digests; held, digests of what a block holds.
    """

    public: bool
    composition: dict[str, str | float]
    blocks_per_person: int
    bound: dict[str, str]
    declared: bool
    retired: bool
    overruled: list[str]
    by: str
    price: float | None
    together: int
    adjacency: str
    retraining: str
    noise_key: str
    model: str
    held: list[str]


@dataclass(frozen=True)
class Terms:
    """The terms of a population, which never change.

    Attributes:
        public: Whether its records are.
        composition: How its runs add up.
        blocks_per_person: In how many blocks a person may have records.
        bound: Other terms that its runs must keep, by name. A value can be replaced until the first run is reserved, so
            that a refused run binds nobody; a name that is added later is bound from then on.
    """

    public: bool
    composition: Composition
    blocks_per_person: int
    bound: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_notes(cls, notes: RowNotes) -> "Terms":
        """The terms in the notes of a population's row."""
        composition = Composition.from_json(notes["composition"])
        return cls(notes["public"], composition, notes["blocks_per_person"], notes["bound"])

    def to_notes(self) -> RowNotes:
        """The notes of a population's row."""
        return RowNotes(
            public=self.public,
            composition=self.composition.to_json(),
            blocks_per_person=self.blocks_per_person,
            bound=dict(self.bound),
        )

    def values_to_bind(self, requested: "Terms", *, is_charged: bool) -> dict[str, str]:
        """What other terms would bind in addition; nothing if they contradict these and must be refused.

        is_charged: whether a run was reserved in the population, after which bound values are final.
        """
        others = {name: value for name, value in requested.bound.items() if self.bound.get(name) != value}
        contradicts = replace(self, bound={}) != replace(requested, bound={})
        return {} if contradicts or (is_charged and others.keys() & self.bound.keys()) else others

    def binding(self, bound: Mapping[str, str], *, is_charged: bool) -> "Terms":
        """The terms with additional bound values; values bound before the first reservation are kept."""
        return replace(self, bound={**bound, **self.bound} if is_charged else {**self.bound, **bound})

    def group_size(self, blocks: Collection[str]) -> int:
        """The number of records that a person may have in a run on these blocks."""
        return (
            self.blocks_per_person if WHOLE_POPULATION in blocks else min(self.blocks_per_person, len(blocks))
        )

    def planned_charge(self, cost: Budget, events: Events, adjacency: str, blocks: Collection[str]) -> Amount:
        """The amount that a run would be charged in each of its blocks; raises what `Composition.price` raises."""
        group_size = self.group_size(blocks)
        price = self.composition.price(cost, events, adjacency, group_size)
        return self.charge(cost, {"price": price, "together": group_size})

    def charge(self, budget: Budget, notes: RowNotes) -> Amount:
        """The amount of a run in a block; nothing for a run without noise, which is recorded but not added.

        notes: of its row, with its price and the number of records of a person that it may read.
        """
        if math.isinf(budget.epsilon):
            return self.composition.nothing()
        if self.composition.kind == "basic":
            if self.blocks_per_person > 1 and notes.get("price") is not None:
                return _charge_of_person((budget.epsilon, notes["price"]), self.blocks_per_person)
            group_size = notes["together"] if self.blocks_per_person > 1 else 1
            return self.composition.cost(budget, group_size, self.blocks_per_person)
        return _charge_of_person((notes["price"],), self.blocks_per_person)
