"""The durable privacy budget of each population: reserve before the records are opened, settle after.

Guaranteed: the runs charged to a population, or to one of its disjoint blocks, compose to at most the cap at every
moment, also when a run is chosen after the results of earlier ones were seen (see `composition`). A record
lies in one block, so blocks compose in parallel; where a person may have a record in each of k blocks, every charge
counts k times, and a run on several blocks is priced for all of a person's records in it. Charged are what each
settled run really spent, and the whole reservation of each forfeited and each open run. A killed run's reservation
stays charged until the run is resumed and settled; forfeited, it is charged for ever.

A row changed, removed or inserted outside the ledger breaks its hash chain, and it cannot be opened any more.
Rows cut off at the end, an old copy put back and a deleted file leave a chain that holds: only a `head()`
kept elsewhere shows these, through `verify(containing=...)`. No clock decides anything: `written_at` is for people.

Below the class is what the rows prove by themselves: copies, which restore the same chain hash for hash; whose copy a
ledger is; that prices are what events cost; and a population as it stood when a run had settled, however late one asks.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.ledger import rules
from algorithms.privacy.ledger.books import (
    Balance,
    Books,
    Run,
    Status,
    affordable,
    balance_of,
    in_words,
    most_charged,
    replay,
    standing,
)
from algorithms.privacy.ledger.chain import GENESIS, WHOLE_POPULATION, Draft, Entry, head, verify
from algorithms.privacy.ledger.composition import BASIC, Composition, Events, Terms
from algorithms.privacy.ledger.policy import Block
from algorithms.privacy.ledger.rules import Blocks, adjacency_of
from algorithms.privacy.ledger.store import Store, open_store

_Decision = Callable[[Books], Sequence[Draft]]


class _Memory(threading.local):
    """The books of the rows that this thread replayed last, so that only new rows are replayed; they trust nothing."""

    def __init__(self) -> None:
        self._books, self._rows, self._head = Books(), 0, GENESIS

    def books(self, entries: Sequence[Entry]) -> Books:
        """The books of verified rows; they change with the next call of the same thread."""
        is_longer = self._rows == 0 or (
            len(entries) >= self._rows and entries[self._rows - 1].hash == self._head
        )
        known = self._rows if is_longer else 0
        books, self._books, self._rows = (
            self._books if known else Books(),
            Books(),
            0,
        )  # in case replaying fails
        self._books = replay(entries[known:], books=books)
        self._rows, self._head = len(entries), head(entries)
        return self._books


@dataclass(frozen=True)
class Ledger:
    """An open ledger; threads may share it, and any number of processes may open the same one.

    Every method raises LedgerBrokenError when the hash chain does not hold from the last row that it knows on, and
    RefusedError when the database fails.
    """

    _store: Store = field(repr=False)
    _memory: _Memory = field(default_factory=_Memory, repr=False, compare=False)

    @classmethod
    def open(cls, url: str) -> "Ledger":
        """The ledger at sqlite:///PATH or postgresql+psycopg://..., created when missing, its chain verified.

        A new SQLite file, and its folder when that is new too, can be read and written by the owner only.
        Raises RefusedError when it cannot be opened; no message holds a password of the URL.
        """
        ledger = cls(open_store(url))
        ledger.verify()
        return ledger

    def declare(
        self,
        population: str,
        cap: Budget,
        *,
        public: bool,
        composition: Composition = BASIC,
        blocks_per_person: int = 1,
        bound: Mapping[str, str] | None = None,
    ) -> None:
        """Enters a population with its cap at first sight; one that the ledger has already keeps what it has.

        public: the records are public, so that runs without noise are allowed. composition: how its runs add up.
        blocks_per_person: in how many blocks a person may have records; 1 where a record is the unit.
        bound: what else its runs are held to, by name; the values at the first reservation, and the first one of a name
        that comes later, stay, and terms that contradict those there are bind nothing: see `terms`.
        Raises RefusedError for an infinite cap, and for one of which the composition leaves nothing.
        """
        rules.check_name(population, "population")
        rules.check_new(composition, cap, blocks_per_person)
        terms = Terms(bool(public), composition, blocks_per_person, dict(bound or {}))
        self._append(lambda books: rules.declaration(books, population, cap, terms))

    def declare_block(self, population: str, block: str, cap: Budget | None = None) -> None:
        """Enters a block at first sight; does nothing when the ledger has it already.

        cap: the population's, as it is now, when None. What was charged to the whole population before it had blocks
        counts in each of them. Raises RefusedError for an unknown population and for a name that differs in case alone.
        """
        rules.check_block_name(block)

        def decide(books: Books) -> list[Draft]:
            limit = cap or books.cap(population)
            rules.check_new_block(books, population, block, limit)
            draft = Draft("cap", population, limit, about={"declared": True}, block=block)
            return [] if block in books.blocks(population) else [draft]

        self._append(decide)

    def retire_block(self, population: str, block: str) -> None:
        """Lets no run use a block ever again; does nothing the second time. Raises RefusedError for an unknown
        block.
        """
        rules.check_block_name(block)

        def decide(books: Books) -> list[Draft]:
            cap = books.cap(population, block)
            draft = Draft("cap", population, cap, about={"retired": True}, block=block)
            return [] if (population, block) in books.retired else [draft]

        self._append(decide)

    def overrule(self, population: str, block: str, other: str, *, by: str) -> None:
        """The owner of the data lets two blocks hold exactly the same; does nothing the second time.

        by: who says so, which the row keeps. Raises RefusedError for an unknown population and for one block twice.
        """
        for name in (block, other):
            rules.check_block_name(name)
        rules.check_name(by, "name of who overrules")
        if block == other:
            raise RefusedError(
                f"block {block!r} holds what it holds; name another block that may hold the same."
            )

        def decide(books: Books) -> list[Draft]:
            cap, about = books.cap(population), {"overruled": sorted((block, other)), "by": by}
            is_known = (population, frozenset((block, other))) in books.allowed
            return [] if is_known else [Draft("cap", population, cap, about=about)]

        self._append(decide)

    def set_cap(self, population: str, cap: Budget, *, block: str = WHOLE_POPULATION) -> None:
        """The owner of the data changes a cap; below what is charged it is allowed, and nothing more fits.

        The cap of a population that has blocks is the one that its next blocks begin with.
        Raises RefusedError for an unknown population or block, and for an infinite cap.
        """

        def decide(books: Books) -> list[Draft]:
            books.cap(population, block)
            rules.check_cap(books.term(population).composition, cap)
            return [Draft("cap", population, cap, block=block)]

        self._append(decide)

    def reserve(
        self,
        run_id: str,
        population: str,
        cost: Budget,
        *,
        events: Events,
        about: Mapping[str, str],
        blocks: Blocks = (WHOLE_POPULATION,),
        held: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Charges a run before it sees a record; does nothing when the same run is open already (it resumes).

        cost: the most that the run can spend; infinite epsilon for a run without noise. events: the planned releases.
        about: notes for people, "adjacency" where it is not add-or-remove-one, and "retraining" where it is a
        scheduled one, which is charged only once. blocks: those that the run reads, all charged or none; a mapping
        gives each block events of its own. held: digests that only the owner's key makes of what each block holds;
        blocks with one in common hold the same. Raises BudgetRefusedError when a cap does not allow it, and where a
        block holds exactly what a block of another name holds or held, unless the owner overruled that; RefusedError
        for what is unknown, for events without a bound under the population's composition, for another adjacency than
        the one a private population was charged under, and for a run_id that is taken: by another reservation, or by
        a run that has ended.
        """
        rules.check_name(run_id, "run_id")
        run = Draft("reserve", population, cost, run_id, events, about)
        # Priced before the database is locked: accountants take their time.
        drafts = rules.reservation(self._books().term(population), run, blocks, held or {})

        def decide(books: Books) -> list[Draft]:
            rules.check_blocks(books, population, [draft.block for draft in drafts])
            if run_id in books.runs:
                rules.check_resumes(books.runs[run_id], drafts)
                return []
            rules.check_once(books, population, about)
            rules.check_repeats(books, population, held or {})
            rules.check_fits(books, drafts)
            return drafts

        self._append(decide)

    def settle(
        self,
        run_id: str,
        spent: Budget,
        *,
        events: Events,
        blocks: Mapping[str, Events] | None = None,
        model: str | None = None,
    ) -> None:
        """Ends a run at what it really spent; does nothing when it is settled so already.

        events: the releases that happened. blocks: the same for each block, where these differ. model: its SHA-256.
        Raises BudgetRefusedError when it spent more than it reserved, RefusedError for a run that is unknown or
        ended otherwise.
        """
        drafts = rules.settlement(self._books(), run_id, spent, events, blocks or {}, model)

        def decide(books: Books) -> list[Draft]:
            run = rules.find(books, run_id)
            rules.check_same_model(run_id, run, model)
            if run.status == "settled" and run.charged == spent:
                return []
            rules.check_settles(run_id, run, spent)
            return drafts

        self._append(decide)

    def forfeit(self, run_id: str) -> None:
        """Gives a run up: its whole reservation counts as spent for ever; does nothing the second time.

        Raises RefusedError for an unknown and for a settled run.
        """

        def decide(books: Books) -> list[Draft]:
            run = rules.find(books, run_id)
            if run.status == "settled":
                raise RefusedError(f"run {run_id!r} is settled at {in_words(run.charged)}; leave it at that.")
            blocks = run.amounts if run.status == "open" else ()
            return [Draft("forfeit", run.population, run.reserved, run_id, block=block) for block in blocks]

        self._append(decide)

    def terms(self, population: str) -> Terms:
        """What a population was declared with; raises RefusedError for an unknown one."""
        return self._books().term(population)

    def balance(self, population: str, block: str | None = None) -> Balance:
        """Where a block stands; when None, the whole population, or of its blocks the one that is charged most.

        Raises RefusedError for an unknown population or block.
        """
        books = self._books()
        name = most_charged(books, population) if block is None else block
        return balance_of(books, population, name)

    def blocks(self, population: str) -> list[Block]:
        """The blocks as the policies take them, the whole population where it has none; RefusedError for an unknown
        one.
        """
        return standing(self._books(), population)

    def affordable(
        self,
        population: str,
        cost: Budget,
        *,
        events: Events = (),
        adjacency: str = rules.ADJACENCY,
        blocks: Sequence[str] = (),
    ) -> int | None:
        """How many more runs like this the caps allow, on these blocks or all living ones; None for no limit.

        Raises RefusedError for an unknown population or block, and for events without a bound.
        """
        return affordable(self._books(), population, cost, events, adjacency, blocks)

    def held(self, population: str) -> dict[str, frozenset[str]]:
        """The digests of what each block held when runs were reserved on it; see `Ledger.reserve`."""
        return {block: found for (name, block), found in self._books().held.items() if name == population}

    def check_repeats(self, population: str, held: Mapping[str, Sequence[str]]) -> None:
        """Raises BudgetRefusedError where `reserve` would, for blocks that hold exactly what others hold."""
        rules.check_repeats(self._books(), population, held)

    def status(self, run_id: str) -> Status | None:
        """What became of a run; None when the ledger does not know it."""
        run = self._books().runs.get(run_id)
        return run.status if run else None

    def populations(self) -> list[str]:
        """The populations, in the order of their declaration."""
        return list(self._books().terms)

    def history(self, population: str | None = None) -> list[Entry]:
        """The rows of a population, or all of them, in order; raises RefusedError for an unknown population."""
        rows = self._store.read()
        if population is not None:
            self._memory.books(rows).term(population)
        return [row for row in rows if population in (None, row.population)]

    def head(self) -> str:
        """The hash of the last row: it stands for the whole history, so keep it outside the ledger."""
        return head(self._store.read())

    def verify(self, *, containing: str | None = None) -> None:
        """Recomputes the chain; raises LedgerBrokenError when it does not hold.

        containing: a head() kept elsewhere; LedgerBrokenError when the chain does not contain it, which means
        that rows were cut off or that an older copy was put back.
        """
        rows = self._store.read(afresh=True)
        if containing is not None:
            rules.check_contains(rows, containing)

    def _append(self, decide: _Decision) -> None:
        self._store.append(lambda entries: decide(self._memory.books(entries)))

    def _books(self) -> Books:
        return self._memory.books(self._store.read())


def export(ledger: Ledger, path: Path) -> int:
    """Writes every row as a line of JSON into a new file that its owner alone can read; returns their number.

    Raises RefusedError where the file exists already or cannot be written.
    """
    rows = ledger.history()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(vars(row)) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RefusedError(
            f"the copy {path} cannot be written ({error.strerror}); choose a new file."
        ) from None
    return len(rows)


def restore(path: Path, url: str) -> int:
    """Writes the rows of a copy into the ledger at a URL, which must be empty; returns their number.

    Raises LedgerBrokenError where the copy's chain does not hold; RefusedError where the file is no copy of a ledger,
    and where the ledger holds rows.
    """
    entries = _read(path)
    verify(entries, name=str(path))
    open_store(url).fill(entries)
    return len(entries)


def _read(path: Path) -> list[Entry]:
    """The rows in a copy, not verified; raises RefusedError where it is none."""
    try:
        return [Entry(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise RefusedError(
            f"the copy {path} cannot be read ({error.strerror}); give the file of an export."
        ) from None
    except (ValueError, TypeError):
        raise RefusedError(f"{path} is no copy of a ledger; give the file of an export.") from None


def identity(ledger: Ledger) -> str | None:
    """The hash of the first row, by which a ledger and its copies are known; None for an empty ledger."""
    rows = ledger.history()
    return rows[0].hash if rows else None


def check_prices(ledger: Ledger) -> int:
    """Recomputes the price of every row that has one from its events; returns how many these are.

    A run that was settled at its full cost keeps the price of its reservation, so its settlement may cost less.
    Raises LedgerBrokenError where a price is less than its events cost.
    """
    rows = [row.to_json() for row in ledger.history()]
    terms = replay(ledger.history()).terms
    adjacencies = {row["run_id"]: adjacency_of(row["about"]) for row in rows if row["kind"] == "reserve"}
    priced = [row for row in rows if row["kind"] in ("reserve", "settle") and "price" in row["about"]]
    priced = [row for row in priced if row["events"] and terms[row["population"]].composition.kind != "basic"]
    for row in priced:
        composition, run_id = terms[row["population"]].composition, row["run_id"]
        cost = composition.events_price(row["events"], adjacencies[run_id], row["about"].get("together", 1))
        if row["about"]["price"] < cost * (1 - 1e-9):
            raise LedgerBrokenError(
                f"row {row['seq']} charges run {run_id!r} {row['about']['price']:g}, its events cost {cost:g}; find out"
                " which software wrote it."
            )
    return len(priced)


@dataclass(frozen=True)
class Settlement:
    """A population right after a run's settlement, which is among the books."""

    books: Books
    population: str
    run_id: str

    @property
    def balance(self) -> Balance:
        """Where the population stood, or of its blocks the one that was charged most."""
        return balance_of(self.books, self.population, most_charged(self.books, self.population))

    @property
    def blocks(self) -> list[Balance]:
        """Where each block of the population stood, in the order of declaration; none where it has none."""
        return self._balances(self.books.blocks(self.population))

    @property
    def charged(self) -> list[Balance]:
        """Where each block of the run stood; none for a run on the whole population."""
        return self._balances([name for name in self.run.amounts if name != WHOLE_POPULATION])

    @property
    def run(self) -> Run:
        """What the ledger has of the run."""
        return self.books.runs[self.run_id]

    def _balances(self, names: list[str]) -> list[Balance]:
        return [balance_of(self.books, self.population, name) for name in names]


def settlement(ledger: Ledger, population: str, run_id: str) -> Settlement:
    """The settlement of a run on a population; raises RefusedError for an unknown population and a run not settled."""
    rows = ledger.history(population)
    ends = [place for place, row in enumerate(rows) if (row.kind, row.run_id) == ("settle", run_id)]
    if not ends:
        raise RefusedError(
            f"the ledger has no settlement of run {run_id!r} on {population!r}; settle it first."
        )
    return Settlement(replay(rows[: ends[-1] + 1]), population, run_id)
