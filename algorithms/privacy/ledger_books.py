"""What the rows of a ledger add up to: who has which cap, and what is charged against it.

Sums are exact: every number counts as the decimal that a person reads (three times 0.1 is 0.3). A sum fits
when it exceeds the cap by at most one part in 10^12, so that rounding refuses no run exactly at the cap.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_FLOOR, Context
from fractions import Fraction
from typing import Literal

from algorithms.privacy.budget import Budget
from algorithms.privacy.errors import BudgetRefused, Refused
from algorithms.privacy.ledger_entry import Entry

Status = Literal["open", "settled", "forfeited"]

ROUNDING = Fraction(1, 10**12)


@dataclass(frozen=True)
class Balance:
    """Where a population stands.

    spent: settled and forfeited runs. reserved: open runs. remaining: what the cap leaves, at least 0.
    Runs without noise on public records are in none of these.
    """

    population: str
    cap: Budget
    public: bool
    spent: Budget
    reserved: Budget
    remaining: Budget


@dataclass(frozen=True)
class Run:
    """A reservation and what became of it; `charged` is what it counts for now."""

    population: str
    reserved: Budget
    charged: Budget
    status: Status

    @property
    def counts(self) -> bool:
        """False for a run without noise: its infinite epsilon is recorded and not added up."""
        return math.isfinite(self.reserved.epsilon)


@dataclass(frozen=True)
class Books:
    """The ledger replayed: caps and publicness by population, runs by run_id, in the order of the rows."""

    caps: Mapping[str, Budget]
    public: Mapping[str, bool]
    runs: Mapping[str, Run]

    def cap(self, population: str) -> Budget:
        """The cap in force; raises Refused for a population that nobody declared."""
        if population not in self.caps:
            known = ", ".join(map(repr, self.caps)) or "none yet"
            raise Refused(f"the ledger has no population {population!r} (it has {known}); declare it first.")
        return self.caps[population]

    def balance(self, population: str) -> Balance:
        """Cap, charges and rest of a population; raises Refused for one that nobody declared."""
        cap, runs = self.cap(population), self._charged(population)
        epsilon, delta = _total(run.charged for run in runs)
        return Balance(
            population=population,
            cap=cap,
            public=self.public[population],
            spent=_budget(*_total(run.charged for run in runs if run.status != "open")),
            reserved=_budget(*_total(run.charged for run in runs if run.status == "open")),
            remaining=_budget(_left(cap.epsilon, epsilon), _left(cap.delta, delta)),
        )

    def how_many(self, population: str, cost: Budget) -> int | None:
        """How many runs of this cost fit one after the other; None when there is no limit.

        No number of runs costs less than nothing: 0 too when the charges already exceed the cap.
        """
        cap = self.cap(population)
        epsilon, delta = _total(run.charged for run in self._charged(population))
        room = (_limit(cap.epsilon) - epsilon, _limit(cap.delta) - delta)
        if min(room) < 0 or (math.isinf(cost.epsilon) and not self.public[population]):
            return 0
        if math.isinf(cost.epsilon):
            return None
        prices = (_exact(cost.epsilon), _exact(cost.delta))
        return min((left // price for left, price in zip(room, prices, strict=True) if price), default=None)

    def open_runs(self, population: str) -> list[str]:
        """The runs that hold a reservation."""
        runs = self.runs.items()
        return [name for name, run in runs if run.population == population and run.status == "open"]

    def _charged(self, population: str) -> list[Run]:
        return [run for run in self.runs.values() if run.population == population and run.counts]


def replay(entries: Iterable[Entry]) -> Books:
    """The books that verified rows add up to."""
    caps: dict[str, Budget] = {}
    public: dict[str, bool] = {}
    runs: dict[str, Run] = {}
    for entry in entries:
        if entry.kind in ("population", "cap"):
            caps[entry.population] = entry.budget
        if entry.kind == "population":
            public[entry.population] = entry.to_json()["about"]["public"]
        run_id = entry.run_id or ""
        if entry.kind == "reserve":
            runs[run_id] = Run(entry.population, entry.budget, entry.budget, "open")
        elif entry.kind == "settle":
            runs[run_id] = replace(runs[run_id], charged=entry.budget, status="settled")
        elif entry.kind == "forfeit":
            runs[run_id] = replace(runs[run_id], status="forfeited")
    return Books(caps, public, runs)


def refusal(books: Books, population: str, *, run_id: str, cost: Budget) -> BudgetRefused:
    """Why a run does not fit: requested, remaining, and what would fit."""
    if math.isinf(cost.epsilon):
        return BudgetRefused(
            f"run {run_id!r} adds no noise (infinite epsilon), which the private population {population!r}"
            " never allows; choose a private algorithm or public records."
        )
    balance, holders = books.balance(population), books.open_runs(population)
    left = Budget(_floor(balance.remaining.epsilon), _floor(balance.remaining.delta))
    fitting = Budget(min(cost.epsilon, left.epsilon), min(cost.delta, left.delta))
    fits = left.epsilon > 0 and books.how_many(population, fitting) != 0
    shown = ", ".join(map(repr, holders[:3])) + (f" and {len(holders) - 3} more" if holders[3:] else "")
    held = f" by open runs ({shown})" if holders else ""
    return BudgetRefused(
        f"run {run_id!r} asks for {in_words(cost)}, but population {population!r} has {in_words(left)} left"
        f" of its cap {in_words(balance.cap)}, with {in_words(balance.spent)} spent and"
        f" {in_words(balance.reserved)} reserved{held}; "
        + (f"at most {in_words(fitting)} would fit" if fits else "nothing more fits")
        + ", unless the owner of the data raises the cap."
    )


def in_words(budget: Budget) -> str:
    """A budget as messages write it, to 12 digits."""
    return f"epsilon={budget.epsilon:.12g}, delta={budget.delta:.12g}"


def _total(budgets: Iterable[Budget]) -> tuple[Fraction, Fraction]:
    epsilon = delta = Fraction(0)
    for budget in budgets:
        epsilon, delta = epsilon + _exact(budget.epsilon), delta + _exact(budget.delta)
    return epsilon, delta


def _exact(number: float) -> Fraction:
    return Fraction(repr(float(number)))


def _limit(cap: float) -> Fraction:
    return _exact(cap) * (1 + ROUNDING)


def _left(cap: float, charged: Fraction) -> Fraction:
    """What a cap leaves; less than the rounding of the cap is nothing."""
    left = _exact(cap) - charged
    return left if left > _exact(cap) * ROUNDING else Fraction(0)


def _budget(epsilon: Fraction, delta: Fraction) -> Budget:
    return Budget(float(epsilon), min(1.0, float(delta)))


def _floor(number: float) -> float:
    """The number to 6 digits, never above it."""
    return float(Context(prec=6, rounding=ROUND_FLOOR).create_decimal(repr(number)))
