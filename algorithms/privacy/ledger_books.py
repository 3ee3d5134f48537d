"""What the rows of a ledger add up to: who has which cap, and what is charged against it, block by block.

Sums are exact: every number counts as the decimal that a person reads (three times 0.1 is 0.3). A sum fits
when it exceeds the cap by at most one part in 10^12, so that rounding refuses no run exactly at the cap.

A charge of the whole population counts in each of its blocks. Where a person may have records in k blocks, every
charge counts k times, so that what a block's balance says holds for a person who is in k of them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from algorithms.privacy.budget import Budget
from algorithms.privacy.errors import Refused
from algorithms.privacy.ledger_composition import Amount, plus, times
from algorithms.privacy.ledger_entry import WHOLE_POPULATION, Entry
from algorithms.privacy.ledger_terms import Terms

Status = Literal["open", "settled", "forfeited"]
Account = tuple[str, str]
"""A population and one of its blocks."""

ROUNDING = Fraction(1, 10**12)


@dataclass(frozen=True)
class Run:
    """A reservation and what became of it.

    charged: the cost that it counts for now. amounts: what it counts for in each of its blocks.
    adjacency: of its events. retraining: the scheduled one that it is charged for. model: the SHA-256 of what it gave.
    """

    population: str
    reserved: Budget
    charged: Budget
    status: Status
    amounts: Mapping[str, Amount]
    adjacency: str
    retraining: str | None = None
    model: str | None = None


@dataclass
class Books:
    """The ledger replayed, row by row; a cap belongs to an account, a population and a block."""

    terms: dict[str, Terms] = field(default_factory=dict)
    caps: dict[Account, Budget] = field(default_factory=dict)
    retired: set[Account] = field(default_factory=set)
    adjacencies: dict[str, str] = field(default_factory=dict)
    held: dict[Account, frozenset[str]] = field(default_factory=dict)
    """The keyed digests of what a block held, whenever a run was reserved on it."""
    allowed: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    """Populations and two of their blocks each, which may hold the same, as the owner of the data has said."""
    runs: dict[str, Run] = field(default_factory=dict)
    _sums: dict[Account, dict[Status, Amount]] = field(default_factory=dict)
    _charges: dict[Account, int] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Enters a verified row; the rows come in their order."""
        match entry.kind:
            case "population":
                self.terms[entry.population] = Terms.from_json(json.loads(entry.about))
                self.caps[entry.population, entry.block] = entry.budget
            case "cap" if json.loads(entry.about).get("retired"):
                self.retired.add((entry.population, entry.block))
            case "cap" if overruled := json.loads(entry.about).get("overruled"):
                self.allowed.add((entry.population, frozenset(overruled)))
            case "cap":
                self.caps[entry.population, entry.block] = entry.budget
                bound, terms = json.loads(entry.about).get("bound", {}), self.terms[entry.population]
                is_charged = self.is_charged(entry.population)
                self.terms[entry.population] = terms.binding(bound, is_charged=is_charged)
            case "reserve":
                self._reserve(entry)
            case "settle":
                self._end(entry, "settled")
            case "forfeit":
                self._end(entry, "forfeited")

    def term(self, population: str) -> Terms:
        """The terms of a population; raises Refused for one that nobody declared."""
        if population not in self.terms:
            known = ", ".join(map(repr, self.terms)) or "none yet"
            raise Refused(f"the ledger has no population {population!r} (it has {known}); declare it first.")
        return self.terms[population]

    def blocks(self, population: str) -> list[str]:
        """The declared blocks, in order, retired ones included; raises Refused for an unknown population."""
        self.term(population)
        return [block for name, block in self.caps if name == population and block != WHOLE_POPULATION]

    def cap(self, population: str, block: str = WHOLE_POPULATION) -> Budget:
        """The cap in force; raises Refused for an unknown population or block."""
        self.term(population)
        if (population, block) not in self.caps:
            known = ", ".join(map(repr, self.blocks(population))) or "none yet"
            raise Refused(
                f"population {population!r} has no block {block!r} (it has {known}); declare it first."
            )
        return self.caps[population, block]

    def limit(self, population: str, block: str) -> Amount:
        """What the cap allows."""
        return self.term(population).composition.amount_of(self.cap(population, block))

    def charged(self, population: str, block: str, *states: Status) -> Amount:
        """What the runs of these states count for in a block, those on the whole population included."""
        total = self.term(population).composition.nothing()
        for name in {block, WHOLE_POPULATION}:
            for status, amount in self._sums.get((population, name), {}).items():
                total = plus(total, amount) if status in states else total
        return total

    def left(self, population: str, block: str) -> Amount:
        """What more may be charged, less than nothing where a cap was lowered."""
        charged = self.charged(population, block, "open", "settled", "forfeited")
        rounded = times(self.limit(population, block), 1 + ROUNDING)
        return plus(rounded, charged, sign=-1)

    def how_many(self, population: str, block: str, charge: Amount) -> int | None:
        """How many such charges fit one after the other; None for one of nothing, which always fits.

        No number of runs costs less than nothing: 0 too when the charges already exceed the cap.
        """
        room = self.left(population, block)
        if min(room) < 0 or (population, block) in self.retired:
            return 0
        return min((left // part for left, part in zip(room, charge, strict=True) if part), default=None)

    def charges(self, population: str, block: str) -> int:
        """How many runs were ever reserved in a block."""
        return self._charges.get((population, block), 0)

    def is_charged(self, population: str) -> bool:
        """Whether a run was ever reserved in a population."""
        return population in self.adjacencies

    def open_runs(self, population: str, block: str) -> list[str]:
        """The runs that hold a reservation in a block, or on the whole population."""
        places = {block, WHOLE_POPULATION}
        return [
            name
            for name, run in self.runs.items()
            if run.status == "open" and run.population == population and places & set(run.amounts)
        ]

    def run_of(self, population: str, retraining: str) -> str | None:
        """The run that a scheduled retraining of a population was charged for; None where there is none."""
        return next(
            (
                name
                for name, run in self.runs.items()
                if (run.population, run.retraining) == (population, retraining)
            ),
            None,
        )

    def repeats(self, population: str, held: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
        """For each block that `held` has digests of, the others that hold exactly the same, by what was reserved too.

        Two that the owner of the data allowed are left out, and so are blocks without another.
        """
        known = {block: found for (name, block), found in self.held.items() if name == population}
        known |= {block: known.get(block, frozenset()).union(found) for block, found in held.items()}
        found = {
            block: [
                other
                for other, theirs in known.items()
                if other != block
                and not theirs.isdisjoint(mine)
                and (population, frozenset((block, other))) not in self.allowed
            ]
            for block, mine in held.items()
        }
        return {block: others for block, others in found.items() if others}

    def _reserve(self, entry: Entry) -> None:
        about, run_id = json.loads(entry.about), entry.run_id or ""
        adjacency = about.get("adjacency", "ADD_OR_REMOVE_ONE")
        self.adjacencies.setdefault(entry.population, adjacency)
        amount = self.terms[entry.population].charge(entry.budget, about)
        run = self.runs.get(run_id) or Run(
            entry.population, entry.budget, entry.budget, "open", {}, adjacency, about.get("retraining")
        )
        self.runs[run_id] = replace(run, amounts={**run.amounts, entry.block: amount})
        account = entry.population, entry.block
        self.held[account] = self.held.get(account, frozenset()).union(about.get("held", ()))
        self._charges[account] = self._charges.get(account, 0) + 1
        self._move(account, amount, "open")

    def _end(self, entry: Entry, status: Status) -> None:
        run = self.runs[entry.run_id or ""]
        amount = before = run.amounts[entry.block]
        about = json.loads(entry.about)
        if status == "settled" and any(before):
            amount = self.terms[entry.population].charge(entry.budget, about)
        charged = entry.budget if status == "settled" else run.charged
        amounts = {**run.amounts, entry.block: amount}
        ended = replace(run, charged=charged, status=status, amounts=amounts, model=about.get("model"))
        self.runs[entry.run_id or ""] = ended
        account = entry.population, entry.block
        self._move(account, before, "open", sign=-1)
        self._move(account, amount, status)

    def _move(self, account: Account, amount: Amount, status: Status, sign: int = 1) -> None:
        sums = self._sums.setdefault(account, {})
        nothing = self.terms[account[0]].composition.nothing()
        sums[status] = plus(sums.get(status, nothing), amount, sign)


def replay(entries: Iterable[Entry], *, books: Books | None = None) -> Books:
    """The books that verified rows add up to, on top of books of the rows before them, which are changed.

    Raises Refused for a row that another version wrote.
    """
    books = Books() if books is None else books
    for entry in entries:
        try:
            books.add(entry)
        except KeyError:
            raise Refused(
                f"row {entry.seq} of the ledger was written by another version of epsilonflow, whose rows this one does"
                " not read; use that one, or let the owner of the data begin a new ledger."
            ) from None
    return books


def blocks_in_words(blocks: Sequence[str]) -> str:
    """Some blocks as messages name them: the first three."""
    shown = ", ".join(map(repr, blocks[:3])) + (f" and {len(blocks) - 3} more" if blocks[3:] else "")
    return shown or "none"
