"""The durable privacy budget of each population: reserve before the records are opened, settle after.

Guaranteed: the runs charged to a population, or to one of its disjoint blocks, compose to at most the cap at every
moment, also when a run is chosen after the results of earlier ones were seen (see `composition`). A record
lies in one block, so blocks compose in parallel; where a person may have a record in each of k blocks, every charge
counts k times, and a run on several blocks is priced for all of a person's records in it. Charged are what each
settled run really spent, and the whole reservation of each forfeited and each open run. A killed run's reservation
stays charged until the run is resumed and settled; forfeited, it is charged for ever.

A row changed, removed or inserted outside the ledger breaks its hash chain, and it cannot be opened any more by
whoever has not verified that row before; `verify` reads all of them. Balances are kept in rows of their own, and
`verify` derives them again. An old copy put back and a deleted file leave a chain that holds: only a `head()` kept
elsewhere shows these, through `verify(containing=...)`. No clock decides anything: `written_at` is for people.

Below the class is what the rows prove by themselves: copies, which restore the same chain hash for hash; whose copy a
ledger is; that prices are what events cost; and a population as it stood when a run had settled, however late one asks.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy.engine import Connection

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.ledger import balances, rules
from algorithms.privacy.ledger.balances import Part
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
from algorithms.privacy.ledger.chain import GENESIS, NOTHING, WHOLE_POPULATION, Draft, Entry, Head, follow
from algorithms.privacy.ledger.composition import BASIC, Composition, Events, Terms
from algorithms.privacy.ledger.policy import Block
from algorithms.privacy.ledger.rules import Blocks
from algorithms.privacy.ledger.store import Store, first_hash, last_of, open_store, place_of_hash, settled_at
from algorithms.privacy.ledger.verification import Checkpoint, Verification, verified

T = TypeVar("T")


@dataclass(frozen=True)
class Ledger:
    """An open ledger; threads may share it, and any number of processes may open the same one.

    Every method raises LedgerBrokenError when the hash chain does not hold from the last row that it knows on, and
    RefusedError when the database fails.
    """

    _store: Store = field(repr=False)
    _priced_by: dict[str, Terms] = field(default_factory=dict, repr=False, compare=False)
    """The terms of populations as they were first seen here; what prices follow from never changes."""
    _reserved: dict[str, tuple[Part | None, Books]] = field(default_factory=dict, repr=False, compare=False)
    """Runs that were reserved here, and what they were charged to; that never changes."""

    @classmethod
    def open(cls, url: str, *, verified: Head = NOTHING) -> "Ledger":
        """The ledger at sqlite:///PATH or postgresql+psycopg://..., created when missing, its chain verified.

        verified: a head up to which the caller has verified it before; the rows after it are verified now, or all of
        them where it is not the head of any. A new SQLite file, and its folder when that is new too, can be read and
        written by the owner only. An older version's tables are brought up to date.
        Raises RefusedError when it cannot be opened; no message holds a password of the URL.
        """
        store = open_store(url)
        store.verified = verified
        store.read(lambda _: None)
        return cls(store)

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
        if rules.declaration(self._books(population, blocks=()), population, cap, terms):
            self._append(
                lambda books: rules.declaration(books, population, cap, terms), population, blocks=()
            )

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

        if decide(self._books(population, blocks=(block,))):
            self._append(decide, population)

    def retire_block(self, population: str, block: str) -> None:
        """Lets no run use a block ever again; does nothing the second time. Raises RefusedError for an unknown
        block.
        """
        rules.check_block_name(block)

        def decide(books: Books) -> list[Draft]:
            cap = books.cap(population, block)
            draft = Draft("cap", population, cap, about={"retired": True}, block=block)
            return [] if (population, block) in books.retired else [draft]

        self._append(decide, population)

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

        self._append(decide, population, blocks=())

    def set_cap(self, population: str, cap: Budget, *, block: str = WHOLE_POPULATION) -> None:
        """The owner of the data changes a cap; below what is charged it is allowed, and nothing more fits.

        The cap of a population that has blocks is the one that its next blocks begin with.
        Raises RefusedError for an unknown population or block, and for an infinite cap.
        """

        def decide(books: Books) -> list[Draft]:
            books.cap(population, block)
            rules.check_cap(books.term(population).composition, cap)
            return [Draft("cap", population, cap, block=block)]

        self._append(decide, population)

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
        terms = self._priced_by.get(population) or self.terms(population)
        self._priced_by[population] = terms
        drafts = rules.reservation(terms, run, blocks, held or {})
        named = {draft.block for draft in drafts}

        # What decides is loaded; what a refusal says more, all blocks and all open runs, where there is one.
        few = None if WHOLE_POPULATION in named else named
        part = Part(population, few, (run_id,), about.get("retraining"), bool(held))

        def decide(connection: Connection, books: Books) -> list[Draft]:
            self._reserved[run_id] = Part(population, few, (run_id,)), books
            try:
                return admitted(books)
            except RefusedError:
                admitted(balances.load(connection, replace(part, blocks=None, opened=True)))
                raise

        def admitted(books: Books) -> list[Draft]:
            rules.check_blocks(books, population, [draft.block for draft in drafts])
            if run_id in books.runs:
                rules.check_resumes(books.runs[run_id], drafts)
                return []
            rules.check_once(books, population, about)
            rules.check_repeats(books, population, held or {})
            rules.check_fits(books, drafts)
            return drafts

        try:
            self._store.append(part, decide)
        except BaseException:
            self._reserved.pop(run_id, None)
            raise

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
        known = self._reserved.pop(run_id, None)
        part, found = self._of_run(run_id) if known is None else known
        drafts = rules.settlement(found, run_id, spent, events, blocks or {}, model)

        def decide(books: Books) -> list[Draft]:
            run = rules.find(books, run_id)
            rules.check_same_model(run_id, run, model)
            if run.status == "settled" and run.charged == spent:
                return []
            rules.check_settles(run_id, run, spent)
            return drafts

        self._store.append(part, lambda _, books: decide(books))

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

        self._store.append(self._of_run(run_id)[0], lambda _, books: decide(books))

    def terms(self, population: str) -> Terms:
        """What a population was declared with; raises RefusedError for an unknown one."""
        return self._books(population, blocks=()).term(population)

    def balance(self, population: str, block: str | None = None) -> Balance:
        """Where a block stands; when None, the whole population, or of its blocks the one that is charged most.

        Raises RefusedError for an unknown population or block.
        """
        books = self._books(population)
        name = most_charged(books, population) if block is None else block
        return balance_of(books, population, name)

    def balances(self, population: str | None = None) -> list[Balance]:
        """Where each block stands, or the whole of a population without blocks, of one population or of all."""
        found = self._store.read(
            lambda connection: [
                balances.load(connection, Part(name))
                for name in ([population] if population is not None else balances.names(connection))
            ]
        )
        names = [population] if population is not None else [next(iter(books.terms)) for books in found]
        return [
            balance_of(books, name, block)
            for name, books in zip(names, found, strict=True)
            for block in books.blocks(name) or [WHOLE_POPULATION]
        ]

    def blocks(self, population: str) -> list[Block]:
        """The blocks as the policies take them, the whole population where it has none; RefusedError for an unknown
        one.
        """
        return standing(self._books(population), population)

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
        return affordable(self._books(population), population, cost, events, adjacency, blocks)

    def held(self, population: str) -> dict[str, frozenset[str]]:
        """The digests of what each block held when runs were reserved on it; see `Ledger.reserve`."""
        books = self._books(population, blocks=(), held=True)
        return {block: found for (_, block), found in books.held.items()}

    def check_repeats(self, population: str, held: Mapping[str, Sequence[str]]) -> None:
        """Raises BudgetRefusedError where `reserve` would, for blocks that hold exactly what others hold."""
        rules.check_repeats(self._books(population, blocks=(), held=True), population, held)

    def status(self, run_id: str) -> Status | None:
        """What became of a run; None when the ledger does not know it."""
        run = self._store.read(lambda connection: balances.find_run(connection, run_id))
        return run.status if run else None

    def run_of(self, population: str, retraining: str) -> str | None:
        """The run that a scheduled retraining of a population was charged for; None where there is none."""
        return self._books(population, blocks=(), retraining=retraining).run_of(population, retraining)

    def is_charged(self, population: str) -> bool:
        """Whether a run was ever reserved in a population; no for one that the ledger does not know."""
        return self._books(population, blocks=()).is_charged(population)

    def populations(self) -> list[str]:
        """The populations, in the order of their declaration."""
        return self._store.read(balances.names)

    def history(self, population: str | None = None) -> list[Entry]:
        """The rows of a population, or all of them, in order; raises RefusedError for an unknown population."""
        if population is None:
            return self._store.read(lambda connection: list(self._store.rows(connection)))

        def of_population(connection: Connection) -> list[Entry]:
            balances.load(connection, Part(population, blocks=())).term(population)
            return list(self._store.rows_of(connection, population))

        return self._store.read(of_population)

    def head(self) -> str:
        """The hash of the last row: it stands for the whole history, so keep it outside the ledger."""
        return self.verified().hash

    def verified(self) -> Head:
        """The last row, up to which the chain is verified now."""
        self._store.read(lambda _: None)
        return self._store.verified

    def verify(
        self, *, containing: str | None = None, since: "Checkpoint | None" = None, prices: bool = False
    ) -> "Verification":
        """Recomputes the chain and what it adds up to, row by row; raises LedgerBrokenError when it does not hold.

        containing: a head() kept elsewhere; LedgerBrokenError when the chain does not contain it, which means
        that rows were cut off or that an older copy was put back. since: what an earlier verification found, from
        where this one goes on. prices: recompute also the price of every run that has one from its events.
        """
        found = self._store.read(lambda connection: verified(self._store, connection, since, prices=prices))
        if containing is not None:
            self.check_contains(containing)
        return found

    def check_contains(self, head: str) -> None:
        """Raises LedgerBrokenError when the chain does not contain a head() kept elsewhere."""
        if head != GENESIS and self.place_of(head) is None:
            raise LedgerBrokenError(
                f"the ledger has no row with the hash {head[:16]}...: rows were cut off or an older"
                " copy was put back; restore the newest copy."
            )

    def place_of(self, head: str) -> int | None:
        """The place of the row with a hash; None where there is none."""
        return self._store.read(lambda connection: place_of_hash(connection, head))

    def rows(self, take: Callable[[Iterator[Entry]], T]) -> T:
        """What `take` makes of all rows, verified one by one and never all in memory; it may be called again."""
        return self._store.read(lambda connection: take(self._store.rows(connection)))

    def _books(self, population: str, **ask: Any) -> Books:
        return self._store.read(lambda connection: balances.load(connection, Part(population, **ask)))

    def _append(self, decide: Callable[[Books], Sequence[Draft]], population: str, **ask: Any) -> None:
        self._store.append(Part(population, **ask), lambda _, books: decide(books))

    def _of_run(self, run_id: str) -> tuple[Part | None, Books]:
        """A run and what it is charged to, which stays as it was reserved; None where the ledger does not know it."""

        def found(connection: Connection) -> tuple[Part | None, Books]:
            run = balances.find_run(connection, run_id)
            if run is None:
                return None, Books()
            part = Part(run.population, [*run.amounts], (run_id,))
            return part, balances.load(connection, part)

        return self._store.read(found)


def export(ledger: Ledger, path: Path) -> int:
    """Writes every row as a line of JSON into a new file that its owner alone can read; returns their number.

    The ledger stays in use meanwhile; the copy is of one moment. Raises RefusedError where the file exists already or
    cannot be written.
    """

    def write(rows: Iterator[Entry]) -> int:
        written = 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row._asdict()) + "\n")
                written += 1
            file.flush()
            os.fsync(file.fileno())
        return written

    try:
        return ledger.rows(write)
    except OSError as error:
        raise RefusedError(
            f"the copy {path} cannot be written ({error.strerror}); choose a new file."
        ) from None


def restore(path: Path, url: str) -> int:
    """Writes the rows of a copy into the ledger at a URL, which must be empty; returns their number.

    Raises LedgerBrokenError where the copy's chain does not hold; RefusedError where the file is no copy of a ledger,
    and where the ledger holds rows.
    """
    for _ in follow(_read(path), name=str(path)):  # before a ledger is made
        pass
    return open_store(url).fill(lambda: follow(_read(path), name=str(path)))


def _read(path: Path) -> Iterator[Entry]:
    """The rows in a copy, not verified; raises RefusedError where it is none."""
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                yield Entry(**json.loads(line))
    except OSError as error:
        raise RefusedError(
            f"the copy {path} cannot be read ({error.strerror}); give the file of an export."
        ) from None
    except (ValueError, TypeError):
        raise RefusedError(f"{path} is no copy of a ledger; give the file of an export.") from None


def identity(ledger: Ledger) -> str | None:
    """The hash of the first row, by which a ledger and its copies are known; None for an empty ledger."""
    return ledger._store.read(first_hash)


def check_prices(ledger: Ledger) -> int:
    """Recomputes the price of every row that has one from its events; returns how many these are.

    A run that was settled at its full cost keeps the price of its reservation, so its settlement may cost less.
    Raises LedgerBrokenError where a price is less than its events cost.
    """
    return ledger.verify(prices=True).priced


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
    found = ledger._store.read(lambda connection: _settlement(ledger._store, connection, population, run_id))
    if found is None:
        raise RefusedError(
            f"the ledger has no settlement of run {run_id!r} on {population!r}; settle it first."
        )
    return Settlement(found, population, run_id)


def _settlement(store: Store, connection: Connection, population: str, run_id: str) -> Books | None:
    """The books right after a settlement: those of now where nothing followed it, else a replay; None without one."""
    balances.load(connection, Part(population, blocks=())).term(population)
    place = settled_at(connection, population, run_id)
    if place is None:
        return None
    if place == last_of(connection, population):
        return balances.load(connection, Part(population, runs=(run_id,), scheduled=True))
    return replay(takewhile(lambda row: row.seq <= place, store.rows_of(connection, population)))
