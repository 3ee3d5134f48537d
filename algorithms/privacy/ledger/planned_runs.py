"""The composition of a population on which several runs are planned: Rényi at the cheapest order, or basic sums.

Sums are exact for one run and charge ten runs ten times. A Rényi filter charges one run more than its own epsilon,
since its order has to serve the total, and ten runs much less than ten times. So the order is chosen for the planned
number of runs like the first, among those at which a single run stays near its own price. Everything that decides is
public: the planned events, the number of runs and the cap. The choice is made once, when the population is entered into
the ledger.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger.composition import BASIC, Composition, Events

ORDERS = (1.25, 1.5, 1.75, *range(2, 65), 80, 96, 128, 192, 256, 384, 512)
"""The Rényi orders of which the cheapest is found first; then tenths around it are tried."""
MAX_SINGLE_RATIO = 1.5
"""The most that one run may take of the cap, as a multiple of its own epsilon, for a Rényi composition to be chosen."""
MAX_SHARE_OF_CAP = 0.5
"""The most that one run may take of the cap, as a share of it, for a Rényi composition to be chosen."""

Reason = Literal["costs-less", "sums-cost-less", "one-run-too-dear", "half-of-the-cap", "no-bound"]


@dataclass(frozen=True)
class ChosenComposition:
    """A composition and what decided for it.

    Attributes:
        composition: How the runs on the population add up.
        per_run: The epsilon that one run takes of a fresh cap under it.
        all: The epsilon that all planned runs take.
        sums: The epsilon that all planned runs take under basic sums.
        reason: Why this composition.
    """

    composition: Composition
    per_run: float
    all: float
    sums: float
    reason: Reason


def choose_composition(
    runs: int,
    *,
    cost: Budget,
    events: Events,
    adjacency: str,
    cap: Budget,
    blocks_per_person: int = 1,
    group_size: int = 1,
) -> ChosenComposition:
    """Choose how the runs on a new population add up.

    Args:
        runs: The planned number of runs, from 1.
        cost: The (epsilon, delta) of one run; `events`: its planned releases, as JSON; `adjacency`: of its accounting.
        cap: The cap of the population, at whose delta a Rényi composition states epsilon.
        blocks_per_person: In how many blocks a person may have records.
        group_size: The number of records of a person that one run may read.

    Returns:
        Rényi at the order that minimises the price of all planned runs, where one run alone takes at most
        `MAX_SINGLE_RATIO` times its epsilon and at most `MAX_SHARE_OF_CAP` of the cap; otherwise basic sums.

    Example:
        >>> gaussian = {"type": "GaussianDpEvent", "noise_multiplier": 4.22}
        >>> events = [{"event": gaussian, "count": 1}]
        >>> chosen = choose_composition(
        ...     10, cost=Budget(1.0, 1e-5), events=events, adjacency="ADD_OR_REMOVE_ONE", cap=Budget(10.0, 1e-5)
        ... )
        >>> str(chosen.composition), round(chosen.all, 1)
        ('Rényi at order 7.7', 3.4)
    """
    from algorithms.privacy.accounting.events import count_same, schedule_from_json, schedule_to_json

    epsilon_of_person = cost.epsilon * blocks_per_person
    sums = epsilon_of_person * runs

    def basic(reason: Reason) -> ChosenComposition:
        return ChosenComposition(BASIC, epsilon_of_person, sums, sums, reason)

    if not 0 < cap.delta < 1 or not 0 < epsilon_of_person < float("inf"):
        return basic("no-bound")
    fewer = schedule_to_json(count_same(schedule_from_json(events)))  # priced at each of many orders

    def at_order(order: float) -> ChosenComposition | None:
        """The choice of this order; None where it bounds an event by nothing, or leaves nothing of the cap."""
        composition = Composition("renyi", order)
        try:
            price = composition.price(cost, fewer, adjacency, group_size)
        except RefusedError:
            return None
        if price is None or not any(composition.amount_of(cap)):
            return None
        per_run, all_runs = (
            composition.as_budget((Fraction(price) * blocks_per_person * count,), cap.delta).epsilon
            for count in (1, runs)
        )
        return ChosenComposition(composition, per_run, all_runs, sums, "costs-less")

    def cheapest(choices: Iterable[ChosenComposition]) -> ChosenComposition | None:
        """The cheapest of those under which one run stays within the limits."""
        within = [
            choice
            for choice in choices
            if is_near(choice) and choice.per_run <= MAX_SHARE_OF_CAP * cap.epsilon
        ]
        return min(within, key=lambda choice: choice.all, default=None)

    def is_near(choice: ChosenComposition) -> bool:
        return choice.per_run <= MAX_SINGLE_RATIO * epsilon_of_person

    choices = [*filter(None, map(at_order, map(float, ORDERS)))]
    best = cheapest(choices)
    if best is None:
        too_dear: Reason = "half-of-the-cap" if any(map(is_near, choices)) else "one-run-too-dear"
        return basic(too_dear if choices else "no-bound")
    order = best.composition.order
    assert order is not None
    tenths = (round(order + tenth / 10, 2) for tenth in range(-9, 10))
    finer = cheapest(filter(None, map(at_order, (tenth for tenth in tenths if tenth > 1))))
    best = min(best, finer or best, key=lambda choice: choice.all)
    return best if best.all < sums else basic("sums-cost-less")


def explain(choice: ChosenComposition, runs: int) -> str:
    """Why this composition was chosen, as a clause with its numbers.

    Args:
        choice: Of `choose_composition`.
        runs: The number of runs that were planned there.

    Example:
        >>> explain(ChosenComposition(BASIC, 1.0, 2.0, 2.0, "sums-cost-less"), 2)
        'the epsilons of 2 runs add up to 2, which no Rényi order undercuts'
    """
    match choice.reason:
        case "costs-less":
            return (
                f"{runs:,} such runs take epsilon {choice.all:.3g}, where their epsilons add up to {choice.sums:.3g};"
                f" one alone takes {choice.per_run:.3g}"
            )
        case "sums-cost-less":
            return (
                f"the epsilons of {runs:,} runs add up to {choice.sums:.3g}, which no Rényi order undercuts"
            )
        case "one-run-too-dear":
            return (
                f"under Rényi one run would take more than {MAX_SINGLE_RATIO:g} times its epsilon of the cap"
            )
        case "half-of-the-cap":
            return f"under Rényi one run would take more than {MAX_SHARE_OF_CAP:.0%} of the cap"
        case "no-bound":
            return "Rényi needs a cap with a delta above 0 and below 1, and releases with a Rényi bound"
