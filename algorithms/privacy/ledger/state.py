"""The state of a ledger, to which its rows add up: terms, caps, runs, and the amounts that they charge to each block.

Sums are exact: every number counts as the decimal that a person reads (three times 0.1 is 0.3). A sum fits if it
exceeds the cap by at most one part in 10^12, so that rounding refuses no run exactly at the cap.

A charge to the whole population counts in each of its blocks. If a person may have records in k blocks, every charge
counts k times, so that a block's balance holds for a person with records in k blocks.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from typing import Final, Literal, NamedTuple

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger.composition import (
    WHOLE_POPULATION,
    Amount,
    RowNotes,
    Terms,
    plus,
    times,
)
from algorithms.privacy.ledger.rows import Entry

Status = Literal["open", "settled", "forfeited"]
STATES: tuple[Status, ...] = ("open", "settled", "forfeited")
AccountKey = tuple[str, str]
"""A population and one of its blocks."""

ADJACENCY = "ADD_OR_REMOVE_ONE"
"""The adjacency of a run whose notes name none."""
NOISE_KEY: Final = "noise_key"
"""The note of a reservation with a digest of the key of its noise, of which a run has one."""
ROUNDING = Fraction(1, 10**12)
_NAMES_IN_A_MESSAGE = 10
_SCHEME = "way:"
"""How a digest begins that says how the others of its block were made; see `Ledger.reserve`.

`data.reading` has the same, as neither package imports the other.
"""


class ReservedRun(NamedTuple):
    """A reservation and its present state.

    Attributes:
        population: That the run is charged to.
        reserved: What it reserved.
        charged: The cost that counts now.
        status: Open, settled or forfeited.
        amounts: The amount that counts in each of its blocks.
        adjacency: What its events are accounted under.
        retraining: The scheduled retraining that it belongs to.
        model: The SHA-256 of its model.
        noise_key: A digest of the key of its noise.
    """

    population: str
    reserved: Budget
    charged: Budget
    status: Status
    amounts: Mapping[str, Amount]
    adjacency: str
    retraining: str | None = None
    model: str | None = None
    noise_key: str | None = None


@dataclass
class LedgerState:
    """The state of a ledger after its rows; a cap belongs to an account, which is a population and a block."""

    terms: dict[str, Terms] = field(default_factory=dict)
    caps: dict[AccountKey, Budget] = field(default_factory=dict)
    retired: set[AccountKey] = field(default_factory=set)
    adjacencies: dict[str, str] = field(default_factory=dict)
    content_digests: dict[AccountKey, frozenset[str]] = field(default_factory=dict)
    """The keyed digests of a block's content at all reservations on it."""
    exemptions: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    """By decision of the data's owner: a population with a pair of blocks that may hold the same records, or with one
    that may change its content."""
    runs: dict[str, ReservedRun] = field(default_factory=dict)
    sums: dict[AccountKey, dict[Status, Amount]] = field(default_factory=dict)
    """The amounts of an account's runs by status."""
    charges: dict[AccountKey, int] = field(default_factory=dict)
    """The number of runs that were ever reserved in an account."""

    def add(self, entry: Entry) -> None:
        """Add a verified row; rows must come in order."""
        notes: RowNotes = json.loads(entry.about)
        match entry.kind:
            case "reserve":
                self._reserve(entry, notes)
            case "settle":
                self._end(entry, notes, "settled")
            case "forfeit":
                self._end(entry, notes, "forfeited")
            case "population":
                self.terms[entry.population] = Terms.from_notes(notes)
                self.caps[entry.population, entry.block] = entry.budget
            case "cap" if notes.get("retired"):
                self.retired.add((entry.population, entry.block))
            case "cap" if overruled := notes.get("overruled"):
                self.exemptions.add((entry.population, frozenset(overruled)))
            case "cap":
                self.caps[entry.population, entry.block] = entry.budget
                bound, terms = notes.get("bound", {}), self.terms[entry.population]
                is_charged = self.is_charged(entry.population)
                self.terms[entry.population] = terms.binding(bound, is_charged=is_charged)

    def term(self, population: str) -> Terms:
        """The terms of a population; raises RefusedError for an unknown one."""
        if population not in self.terms:
            names = ", ".join(map(repr, islice(self.terms, _NAMES_IN_A_MESSAGE))) or "none yet"
            raise RefusedError(
                f"the ledger has no population {population!r} (it has {names}); the first run on one declares it."
            )
        return self.terms[population]

    def blocks(self, population: str) -> list[str]:
        """The declared blocks, in order, retired ones included; raises RefusedError for an unknown population."""
        self.term(population)
        return [block for name, block in self.caps if name == population and block != WHOLE_POPULATION]

    def cap(self, population: str, block: str = WHOLE_POPULATION) -> Budget:
        """The cap in force; raises RefusedError for an unknown population or block."""
        self.term(population)
        if (population, block) not in self.caps:
            names = ", ".join(map(repr, self.blocks(population))) or "none yet"
            raise RefusedError(
                "population {population!r} has no block {block!r} (it has {known}); declare it, or let the first"
                " run on it do so.",
                code="block_unknown",
                population=population,
                block=block,
                known=names,
            )
        return self.caps[population, block]

    def limit(self, population: str, block: str) -> Amount:
        """The amount that the cap allows."""
        return self.term(population).composition.amount_of(self.cap(population, block))

    def charged_amount(self, population: str, block: str, *states: Status) -> Amount:
        """The amount of all runs in these states in a block, including runs on the whole population."""
        total = self.term(population).composition.nothing()
        for name in {block, WHOLE_POPULATION}:  # a set: without blocks both are one
            for status, amount in self.sums.get((population, name), {}).items():
                total = plus(total, amount) if status in states else total
        return total

    def remaining(self, population: str, block: str) -> Amount:
        """The amount that can still be charged; negative if a cap was lowered."""
        charged = self.charged_amount(population, block, *STATES)
        # Ten runs at a tenth of a cap fit, though a tenth of it is rounded up as a floating-point number.
        rounded = times(self.limit(population, block), 1 + ROUNDING)
        return plus(rounded, charged, sign=-1)

    def how_many(self, population: str, block: str, charge: Amount) -> int | None:
        """How many such charges fit: the least, over the numbers of an amount, of what is left over what one takes.

        None for a charge of nothing, which always fits, and 0 if the cap is exceeded already.
        """
        room = self.remaining(population, block)
        if min(room) < 0 or (population, block) in self.retired:
            return 0
        # `//` of fractions gives whole numbers.
        return min((left // part for left, part in zip(room, charge, strict=True) if part), default=None)

    def is_charged(self, population: str) -> bool:
        """Whether a run was ever reserved in a population."""
        return population in self.adjacencies

    def run_of(self, population: str, retraining: str) -> str | None:
        """The run of a scheduled retraining of a population; None if there is none."""
        key = population, retraining
        names = (name for name, run in self.runs.items() if (run.population, run.retraining) == key)
        return next(names, None)

    def repeats(self, population: str, content_digests: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
        """For each block with digests, the other blocks that hold exactly the same records, by all reservations.

        Pairs that the data's owner allowed, and blocks without a repeat, are left out.
        """
        known = {
            block: digests for (name, block), digests in self.content_digests.items() if name == population
        }
        known |= {
            block: known.get(block, frozenset()).union(digests) for block, digests in content_digests.items()
        }
        contents_by_block = {block: contents(digests) for block, digests in content_digests.items()}
        repeated = {
            block: [
                other
                for other, theirs in known.items()
                if other != block
                and not theirs.isdisjoint(mine)
                and (population, frozenset((block, other))) not in self.exemptions
            ]
            for block, mine in contents_by_block.items()
        }
        return {block: others for block, others in repeated.items() if others}

    def _reserve(self, entry: Entry, notes: RowNotes) -> None:
        account, run_id = (entry.population, entry.block), entry.run_id or ""
        adjacency = adjacency_of(notes)
        self.adjacencies.setdefault(entry.population, adjacency)
        amount = self.terms[entry.population].charge(entry.budget, notes)
        # A run has a row for each of its blocks: the first makes it, the others add their amounts.
        run = self.runs.get(run_id) or ReservedRun(
            entry.population,
            entry.budget,
            entry.budget,
            "open",
            {},
            adjacency,
            notes.get("retraining"),
            noise_key=notes.get(NOISE_KEY),
        )
        self.runs[run_id] = run._replace(amounts={**run.amounts, entry.block: amount})
        if "held" in notes:
            self.content_digests[account] = self.content_digests.get(account, frozenset()).union(
                notes["held"]
            )
        self.charges[account] = self.charges.get(account, 0) + 1
        self._move(account, amount, "open")

    def _end(self, entry: Entry, notes: RowNotes, status: Status) -> None:
        run = self.runs[entry.run_id or ""]
        # What a run was not charged for when it was reserved (infinite epsilon), it is not charged for when it ends.
        amount = before = run.amounts[entry.block]
        if status == "settled" and any(before):
            amount = self.terms[entry.population].charge(entry.budget, notes)
        self.runs[entry.run_id or ""] = run._replace(
            charged=entry.budget if status == "settled" else run.charged,
            status=status,
            amounts={**run.amounts, entry.block: amount},
            model=notes.get("model"),
        )
        account = entry.population, entry.block
        # From the open runs' sum to that of its end, so that it counts once.
        self._move(account, before, "open", sign=-1)
        self._move(account, amount, status)

    def _move(self, account: AccountKey, amount: Amount, status: Status, sign: int = 1) -> None:
        sums = self.sums.setdefault(account, {})
        sums[status] = plus(sums.get(status, (Fraction(0),) * len(amount)), amount, sign)


def replay(entries: Iterable[Entry], *, state: LedgerState | None = None) -> LedgerState:
    """The state that verified rows add up to, on top of the state after the rows before them, which is changed.

    Raises RefusedError for a row that another version wrote.
    """
    state = LedgerState() if state is None else state
    for entry in entries:
        try:
            state.add(entry)
        except KeyError:
            raise RefusedError(
                f"row {entry.seq} of the ledger was written by another version of epsilonflow, whose rows this one does"
                " not read; use that one, or let the owner of the data begin a new ledger."
            ) from None
    return state


def adjacency_of(notes: RowNotes) -> str:
    """The adjacency in the notes of a run."""
    return str(notes.get("adjacency", ADJACENCY))


def contents(digests: Iterable[str]) -> frozenset[str]:
    """The digests of content among those of a block.

    Example:
        >>> contents(["way:0a", "1b"])
        frozenset({'1b'})
    """
    return frozenset(digest for digest in digests if not digest.startswith(_SCHEME))


def digest_schemes(digests: Iterable[str]) -> frozenset[str]:
    """Those of a block's digests that say by which key and columns the others were made; only alike ones compare."""
    return frozenset(digest for digest in digests if digest.startswith(_SCHEME))
