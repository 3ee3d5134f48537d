"""The totals of a ledger's rows for each block: caps, charges, what is left, and why a run does not fit.

Sums are exact: every number counts as the decimal that a person reads (three times 0.1 is 0.3). A sum fits if it
exceeds the cap by at most one part in 10^12, so that rounding refuses no run exactly at the cap.

A charge to the whole population counts in each of its blocks. If a person may have records in k blocks, every charge
counts k times, so that a block's balance holds for a person with records in k blocks.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_FLOOR, Context
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger.chain import WHOLE_POPULATION, Draft, Entry
from algorithms.privacy.ledger.composition import BASIC, Amount, Composition, Events, Terms, plus, times
from algorithms.privacy.ledger.policy import Block

Status = Literal["open", "settled", "forfeited"]
STATES: tuple[Status, ...] = ("open", "settled", "forfeited")
Account = tuple[str, str]
"""A population and one of its blocks."""

ADJACENCY = "ADD_OR_REMOVE_ONE"
"""The adjacency of a run whose notes name none."""
NOISE_KEY = "noise_key"
"""The note of a reservation with a digest of the key of its noise, of which a run has one."""
ROUNDING = Fraction(1, 10**12)


class Run(NamedTuple):
    """A reservation and its present state.

    charged: the cost that counts now. amounts: the amount that counts in each of its blocks. adjacency: of its events.
    retraining: the scheduled retraining that it belongs to. model: the SHA-256 of its model. noise_key: a digest of the
    key of its noise.
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
class Books:
    """The state of a ledger after its rows; a cap belongs to an account, which is a population and a block."""

    terms: dict[str, Terms] = field(default_factory=dict)
    caps: dict[Account, Budget] = field(default_factory=dict)
    retired: set[Account] = field(default_factory=set)
    adjacencies: dict[str, str] = field(default_factory=dict)
    held: dict[Account, frozenset[str]] = field(default_factory=dict)
    """The keyed digests of a block's content at all reservations on it."""
    allowed: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    """Populations with pairs of their blocks that may hold the same records, by decision of the data's owner."""
    runs: dict[str, Run] = field(default_factory=dict)
    sums: dict[Account, dict[Status, Amount]] = field(default_factory=dict)
    """The amounts of an account's runs by status."""
    charges: dict[Account, int] = field(default_factory=dict)
    """The number of runs that were ever reserved in an account."""

    def add(self, entry: Entry) -> None:
        """Add a verified row; rows must come in order."""
        about = json.loads(entry.about)
        match entry.kind:
            case "reserve":
                self._reserve(entry, about)
            case "settle":
                self._end(entry, about, "settled")
            case "forfeit":
                self._end(entry, about, "forfeited")
            case "population":
                self.terms[entry.population] = Terms.from_json(about)
                self.caps[entry.population, entry.block] = entry.budget
            case "cap" if about.get("retired"):
                self.retired.add((entry.population, entry.block))
            case "cap" if overruled := about.get("overruled"):
                self.allowed.add((entry.population, frozenset(overruled)))
            case "cap":
                self.caps[entry.population, entry.block] = entry.budget
                bound, terms = about.get("bound", {}), self.terms[entry.population]
                is_charged = self.is_charged(entry.population)
                self.terms[entry.population] = terms.binding(bound, is_charged=is_charged)

    def term(self, population: str) -> Terms:
        """The terms of a population; raises RefusedError for an unknown one."""
        if population not in self.terms:
            known = ", ".join(map(repr, self.terms)) or "none yet"
            raise RefusedError(
                f"the ledger has no population {population!r} (it has {known}); the first run on one declares it."
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
            known = ", ".join(map(repr, self.blocks(population))) or "none yet"
            raise RefusedError(
                f"population {population!r} has no block {block!r} (it has {known}); `epsilonflow ledger block"
                f" {population} {block}` declares it, and so does the first run on it."
            )
        return self.caps[population, block]

    def limit(self, population: str, block: str) -> Amount:
        """The amount that the cap allows."""
        return self.term(population).composition.amount_of(self.cap(population, block))

    def charged(self, population: str, block: str, *states: Status) -> Amount:
        """The amount of all runs in these states in a block, including runs on the whole population."""
        total = self.term(population).composition.nothing()
        for name in {block, WHOLE_POPULATION}:
            for status, amount in self.sums.get((population, name), {}).items():
                total = plus(total, amount) if status in states else total
        return total

    def left(self, population: str, block: str) -> Amount:
        """The amount that can still be charged; negative if a cap was lowered."""
        charged = self.charged(population, block, *STATES)
        rounded = times(self.limit(population, block), 1 + ROUNDING)
        return plus(rounded, charged, sign=-1)

    def how_many(self, population: str, block: str, charge: Amount) -> int | None:
        """How many such charges fit; None for a charge of nothing, which always fits, and 0 if the cap is exceeded."""
        room = self.left(population, block)
        if min(room) < 0 or (population, block) in self.retired:
            return 0
        return min((left // part for left, part in zip(room, charge, strict=True) if part), default=None)

    def is_charged(self, population: str) -> bool:
        """Whether a run was ever reserved in a population."""
        return population in self.adjacencies

    def open_runs(self, population: str, block: str) -> list[str]:
        """The open runs in a block or on the whole population."""
        places = {block, WHOLE_POPULATION}
        return [
            name
            for name, run in self.runs.items()
            if run.status == "open" and run.population == population and places & set(run.amounts)
        ]

    def run_of(self, population: str, retraining: str) -> str | None:
        """The run of a scheduled retraining of a population; None if there is none."""
        asked = population, retraining
        found = (name for name, run in self.runs.items() if (run.population, run.retraining) == asked)
        return next(found, None)

    def repeats(self, population: str, held: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
        """For each block in `held`, the other blocks that hold exactly the same records, according to all reservations.

        Pairs that the data's owner allowed, and blocks without a repeat, are left out.
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

    def join(self, other: "Books") -> None:
        """Add the books of another population."""
        for name, value in vars(other).items():
            getattr(self, name).update(value)

    def _reserve(self, entry: Entry, about: Mapping[str, Any]) -> None:
        account, run_id = (entry.population, entry.block), entry.run_id or ""
        adjacency = adjacency_of(about)
        self.adjacencies.setdefault(entry.population, adjacency)
        amount = self.terms[entry.population].charge(entry.budget, about)
        run = self.runs.get(run_id) or Run(
            entry.population,
            entry.budget,
            entry.budget,
            "open",
            {},
            adjacency,
            about.get("retraining"),
            noise_key=about.get(NOISE_KEY),
        )
        self.runs[run_id] = run._replace(amounts={**run.amounts, entry.block: amount})
        if "held" in about:
            self.held[account] = self.held.get(account, frozenset()).union(about["held"])
        self.charges[account] = self.charges.get(account, 0) + 1
        self._move(account, amount, "open")

    def _end(self, entry: Entry, about: Mapping[str, Any], status: Status) -> None:
        run = self.runs[entry.run_id or ""]
        amount = before = run.amounts[entry.block]
        if status == "settled" and any(before):
            amount = self.terms[entry.population].charge(entry.budget, about)
        self.runs[entry.run_id or ""] = run._replace(
            charged=entry.budget if status == "settled" else run.charged,
            status=status,
            amounts={**run.amounts, entry.block: amount},
            model=about.get("model"),
        )
        account = entry.population, entry.block
        self._move(account, before, "open", sign=-1)
        self._move(account, amount, status)

    def _move(self, account: Account, amount: Amount, status: Status, sign: int = 1) -> None:
        sums = self.sums.setdefault(account, {})
        sums[status] = plus(sums.get(status, (Fraction(0),) * len(amount)), amount, sign)


def replay(entries: Iterable[Entry], *, books: Books | None = None) -> Books:
    """The books that verified rows add up to, on top of books of the rows before them, which are changed.

    Raises RefusedError for a row that another version wrote.
    """
    books = Books() if books is None else books
    for entry in entries:
        try:
            books.add(entry)
        except KeyError:
            raise RefusedError(
                f"row {entry.seq} of the ledger was written by another version of epsilonflow, whose rows this one does"
                " not read; use that one, or let the owner of the data begin a new ledger."
            ) from None
    return books


def adjacency_of(about: Mapping[str, object]) -> str:
    """The adjacency in the notes of a run."""
    return str(about.get("adjacency", ADJACENCY))


def blocks_in_words(blocks: Sequence[str]) -> str:
    """Some blocks as messages name them: the first three."""
    shown = ", ".join(map(repr, blocks[:3])) + (f" and {len(blocks) - 3} more" if blocks[3:] else "")
    return shown or "none"


_RAISED = "unless the owner of the data raises the cap by `epsilonflow ledger cap`."


@dataclass(frozen=True)
class Balance:
    """Where a population or one of its blocks stands, for a person who is in as many blocks as one may be.

    spent: settled and forfeited runs. reserved: open runs. remaining: what the cap leaves, at least 0.
    Runs without noise on public records are in none of these. Under zCDP and Rényi each is the epsilon that its
    amount alone has at the cap's delta, so spent, reserved and remaining do not add up to the cap.
    """

    population: str
    cap: Budget
    public: bool
    spent: Budget
    reserved: Budget
    remaining: Budget
    block: str = WHOLE_POPULATION
    composition: Composition = BASIC
    blocks_per_person: int = 1
    retired: bool = False


def balance_of(books: Books, population: str, block: str) -> Balance:
    """The balance of a block, or of a population without blocks; raises RefusedError for an unknown one."""
    terms, cap = books.term(population), books.cap(population, block)
    spent = books.charged(population, block, "settled", "forfeited")
    reserved = books.charged(population, block, "open")
    rest = _rest(books.limit(population, block), plus(spent, reserved))
    untouched = not any(plus(spent, reserved))
    return Balance(
        population=population,
        cap=cap,
        public=terms.public,
        spent=terms.composition.shown(spent, cap.delta),
        reserved=terms.composition.shown(reserved, cap.delta),
        remaining=cap if untouched else terms.composition.shown(rest, cap.delta),
        block=block,
        composition=terms.composition,
        blocks_per_person=terms.blocks_per_person,
        retired=(population, block) in books.retired,
    )


def most_charged(books: Books, population: str) -> str:
    """The block of which the greatest share is charged: no person has lost more than its balance says."""

    def share(block: str) -> tuple[bool, Fraction]:
        charged = books.charged(population, block, *STATES)
        pairs = list(zip(charged, books.limit(population, block), strict=True))
        beyond = any(part and not whole for part, whole in pairs)
        return beyond, max(part / whole if whole else Fraction(0) for part, whole in pairs)

    return max(books.blocks(population) or [WHOLE_POPULATION], key=share)


def standing(books: Books, population: str, also: Sequence[str] = ()) -> list[Block]:
    """The blocks for a policy, in the order of their declaration; the whole population where it has none.

    also: blocks that come last, as they would be declared now, unless they are already.
    """
    blocks, declared = [], books.blocks(population)
    for name in [*declared, *(name for name in also if name not in declared)] or [WHOLE_POPULATION]:
        account = name if name in declared else WHOLE_POPULATION
        limit, charged = books.limit(population, account), books.charged(population, account, *STATES)
        left = _floats(_rest(limit, charged))
        is_retired = (population, name) in books.retired
        blocks.append(Block(name, _floats(limit), left, books.charges.get((population, name), 0), is_retired))
    return blocks


def affordable(
    books: Books, population: str, cost: Budget, events: Events, adjacency: str, blocks: Sequence[str]
) -> int | None:
    """How many more runs of this cost fit into all of the blocks, every living one when none are named.

    None when there is no limit. Raises RefusedError for an unknown population or block, and for events without a bound.
    """
    terms = books.term(population)
    if math.isinf(cost.epsilon) and not terms.public:
        return 0
    named = blocks or [block.name for block in standing(books, population) if not block.retired]
    together = terms.together(named)
    price = terms.composition.price(cost, events, adjacency, together)
    charge = terms.charge(cost, {"price": price, "together": together})
    counts = [books.how_many(population, block, charge) for block in named]
    return min((count for count in counts if count is not None), default=None if counts else 0)


def refusal(books: Books, account: tuple[str, str], draft: Draft, charge: Amount) -> BudgetRefusedError:
    """Why a run does not fit a block: requested, remaining, and what would fit."""
    run_id, cost = draft.run_id, draft.budget
    population, block = account
    where = f"population {population!r}"
    where = where if block == WHOLE_POPULATION else f"block {block!r} of {where}"
    if math.isinf(cost.epsilon):
        return BudgetRefusedError(
            f"run {run_id!r} adds no noise (infinite epsilon), which the private {where}"
            " never allows; choose a private algorithm or public records."
        )
    if account in books.retired:
        return BudgetRefusedError(
            f"run {run_id!r} asks for {where}, which is retired for ever; choose other blocks."
        )
    words = _basic if books.term(population).composition.kind == "basic" else _by_events
    return BudgetRefusedError(words(books, account, f"run {run_id!r}", where, draft, charge))


def _basic(books: Books, account: tuple[str, str], run: str, where: str, draft: Draft, charge: Amount) -> str:
    balance, terms, cost = balance_of(books, *account), books.term(account[0]), draft.budget
    count = terms.blocks_per_person
    left = Budget(floored(balance.remaining.epsilon), floored(balance.remaining.delta))
    each = Budget(floored(left.epsilon / count), floored(left.delta / count)) if count > 1 else left
    fitting = Budget(min(cost.epsilon, each.epsilon), _share(min(cost.delta, each.delta), draft))
    fits = left.epsilon > 0 and books.how_many(*account, terms.charge(fitting, draft.about)) != 0
    return (
        f"{run} asks for {in_words(cost)}{_counted(count)}, but {where} has {in_words(left)} left"
        f" of its cap {in_words(balance.cap)}, with {in_words(balance.spent)} spent and"
        f" {in_words(balance.reserved)} reserved{_held(books, account)}; "
        + (f"at most {in_words(fitting)} would fit" if fits else "nothing more fits")
        + f", {_RAISED}"
    )


def _by_events(
    books: Books, account: tuple[str, str], run: str, where: str, draft: Draft, charge: Amount
) -> str:
    terms, limit = books.term(account[0]), books.limit(*account)
    say, balance = terms.composition.in_words, balance_of(books, *account)
    rest = _rest(limit, books.charged(*account, *STATES))
    asked = times(charge, Fraction(1, terms.blocks_per_person))
    return (
        f"{run} of {in_words(draft.budget)} asks for {say(asked)}{_counted(terms.blocks_per_person)}, but {where} has"
        f" {say(rest)} left of the {say(limit)} of its cap {in_words(balance.cap)}, with {in_words(balance.spent)}"
        f" spent and {in_words(balance.reserved)} reserved{_held(books, account)}; ask for less, {_RAISED}"
    )


def _share(delta: float, draft: Draft) -> float:
    """Of a delta that fits, what a run may state that reads several records of a person."""
    together = draft.about.get("together", 1)
    if not isinstance(together, int) or together == 1:
        return delta
    grows = math.fsum(math.exp(min(700.0, i * draft.budget.epsilon)) for i in range(together)) / together
    return floored(delta / grows)


def in_words(budget: Budget) -> str:
    """A budget as messages write it, to 12 digits."""
    return f"epsilon={budget.epsilon:.12g}, delta={budget.delta:.12g}"


def _counted(count: int) -> str:
    return f", counted {count} times since a person may be in {count} blocks" if count > 1 else ""


def _held(books: Books, account: tuple[str, str]) -> str:
    holders = books.open_runs(*account)
    return f" by open runs ({blocks_in_words(holders)})" if holders else ""


def _rest(limit: Amount, charged: Amount) -> Amount:
    """What a limit leaves; less than its rounding is nothing."""
    rest = plus(limit, charged, sign=-1)
    return tuple(
        part if part > whole * ROUNDING else Fraction(0) for part, whole in zip(rest, limit, strict=True)
    )


def _floats(amount: Amount) -> tuple[float, ...]:
    return tuple(map(float, amount))


def floored(number: float) -> float:
    """The number to 6 digits, never above it."""
    return float(Context(prec=6, rounding=ROUND_FLOOR).create_decimal(repr(number)))
