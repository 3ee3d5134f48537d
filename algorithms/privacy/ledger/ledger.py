"""The durable privacy budget of each population: reserve before the records are read, settle afterwards.

Guaranteed: at any time, the runs charged to a population, or to one of its disjoint blocks, compose to at most the cap,
even if a run is chosen after seeing the results of earlier ones (see `composition`). A record is in one block, so
blocks compose in parallel. If a person may have a record in each of k blocks, every charge counts k times, and a run on
several blocks is priced for all of a person's records in it. A settled run is charged what it spent; a forfeited or
open run its whole reservation. The reservation of a killed run stays charged until the run is resumed and settled; if
it is forfeited, it is charged for ever.

A row that was changed, removed or inserted outside of the ledger breaks its hash chain. Opening the ledger verifies the
rows after the last head that the caller has verified, and fails where the chain breaks; `verify` reads all rows, and so
finds a change to a row that was verified before. Balances have rows of their own, which `verify` derives again.
Restoring an old copy, or deleting the file, leaves a valid chain: only a `head()` that is kept elsewhere reveals these,
with `check_contains`. No decision depends on a clock: `written_at` is for people.

Below the class: whether a ledger is a copy of another, and the state of a population right after a run settled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar, cast

from sqlalchemy.engine import Connection

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import rules, state_tables
from algorithms.privacy.ledger.balances import (
    Balance,
    affordable_runs,
    balance_of,
    block_views,
    find_fullest_block,
    spent_after,
    spent_with,
)
from algorithms.privacy.ledger.composition import (
    BASIC,
    WHOLE_POPULATION,
    Composition,
    Events,
    RowNotes,
    Terms,
)
from algorithms.privacy.ledger.drafts import declaration_drafts, reservation_drafts, settlement_drafts
from algorithms.privacy.ledger.policy import BlockBalance
from algorithms.privacy.ledger.rows import EMPTY_HEAD, GENESIS, Draft, Entry, Head
from algorithms.privacy.ledger.state import ADJACENCY, LedgerState, ReservedRun, Status, replay
from algorithms.privacy.ledger.state_tables import StatePart
from algorithms.privacy.ledger.store import (
    FIRST_HASH,
    LAST_RUN,
    SEQ_OF_HASH,
    SETTLED_AT,
    Decision,
    Store,
    open_store,
    query_value,
)
from algorithms.privacy.ledger.verification import Checkpoint, LedgerVerification, verify_rows

T = TypeVar("T")


@dataclass(frozen=True)
class Ledger:
    """An open ledger; threads may share it, and any number of processes may open the same one.

    Every method raises LedgerBrokenError if the hash chain is broken after the last verified row, and RefusedError if
    the database fails and for a population, a block or a run that the ledger does not know.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     ledger = Ledger.open(f"sqlite:///{folder}/ledger.sqlite")
        ...     ledger.declare("patients", Budget(3.0, 1e-5), public=False)
        ...     ledger.reserve("run-1", "patients", Budget(1.0, 1e-6), events=[], notes={})
        ...     ledger.settle("run-1", Budget(1.0, 1e-6), events=[])
        ...     ledger.balance("patients").remaining
        Budget(epsilon=2.0, delta=9e-06)
    """

    _store: Store = field(repr=False)
    _remember: Callable[["Ledger"], object] | None = field(default=None, repr=False)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        verified: Head = EMPTY_HEAD,
        remember: Callable[["Ledger"], object] | None = None,
        check: Callable[["Chain"], object] = lambda _: None,
    ) -> "Ledger":
        """Open the ledger at sqlite:///PATH or postgresql+psycopg://..., or create it, and verify its chain.

        Only the owner can read and write a new SQLite file and its new folder.

        Args:
            url: Of the ledger.
            verified: A head up to which the caller has verified it; only later rows are verified then, or all rows if
                none has this hash.
            remember: Called after each change, to record the new head outside of the ledger.
            check: Called with the verified rows; see `read_chain`.

        Raises:
            RefusedError: If it cannot be opened; no message contains the URL's password.
        """
        store = open_store(url)
        store.verified = verified
        store.read(lambda connection: check(Chain(connection)))
        return cls(store, remember)

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
        """Register a population with its cap; a known population keeps its terms.

        Args:
            population: Its name.
            cap: What all its runs together may spend.
            public: Whether the records are public, so that runs without noise are allowed.
            composition: How its runs add up.
            blocks_per_person: The number of blocks in which a person may have records; 1 if a record is the unit.
            bound: Other terms that its runs must keep, by name. Their values at the first reservation are final, as is
                the first value of a name that is added later; contradicting terms are ignored, see `terms`.

        Raises:
            RefusedError: For an infinite cap, and for one that the composition turns into nothing.
        """
        rules.check_name(population, "population")
        rules.check_new(composition, cap, blocks_per_person)
        terms = Terms(bool(public), composition, blocks_per_person, dict(bound or {}))
        # A read tells that nothing is to be written, as is usual, without a turn at the ledger's lock.
        if declaration_drafts(self._state(population, blocks=()), population, cap, terms):
            self._append(
                StatePart(population, blocks=()),
                lambda state: declaration_drafts(state, population, cap, terms),
            )

    def declare_block(self, population: str, block: str, cap: Budget | None = None) -> None:
        """Register a block; does nothing if it exists.

        Charges to the whole population, before it had blocks, count in each block.

        Args:
            population: A registered one.
            block: Its name.
            cap: By default the population's present cap.

        Raises:
            RefusedError: For a name that differs from another only in case.
        """
        rules.check_block_name(block)

        def decide(state: LedgerState) -> list[Draft]:
            limit = cap or state.cap(population)
            rules.check_new_block(state, population, block, limit)
            draft = Draft("cap", population, limit, notes={"declared": True}, block=block)
            return [] if block in state.blocks(population) else [draft]

        if decide(self._state(population)):
            self._append(StatePart(population), decide)

    def retire_block(self, population: str, block: str) -> None:
        """Retire a block, which no run can use again; repeating it does nothing.

        Args:
            population: A registered one.
            block: One of its blocks; what it has spent stays spent.
        """
        rules.check_block_name(block)

        def decide(state: LedgerState) -> list[Draft]:
            cap = state.cap(population, block)
            draft = Draft("cap", population, cap, notes={"retired": True}, block=block)
            return [] if (population, block) in state.retired else [draft]

        self._append(StatePart(population, blocks=[block]), decide)

    def overrule(self, population: str, block: str, other: str | None = None, *, by: str) -> None:
        """Exempt two blocks from holding different records, or one from keeping its content after a charge.

        By decision of the data's owner, who vouches that no person gets a second cap by it; repeating it does nothing.

        Args:
            population: A registered one.
            block: A block; it may be declared later.
            other: The block with the same records; None to let `block` change its content.
            by: Who decided, which the row records.

        Raises:
            RefusedError: For the same block twice.
        """
        if block == other:
            raise RefusedError(
                f"block {block!r} was named twice; name another block that may hold the same records."
            )
        blocks = [block] if other is None else sorted((block, other))
        for name in blocks:
            rules.check_block_name(name)
        rules.check_name(by, "name of who overrules")

        def decide(state: LedgerState) -> list[Draft]:
            cap, notes = state.cap(population), RowNotes(overruled=blocks, by=by)
            is_known = (population, frozenset(blocks)) in state.exemptions
            return [] if is_known else [Draft("cap", population, cap, notes=notes)]

        self._append(StatePart(population, blocks=()), decide)

    def set_cap(self, population: str, cap: Budget, *, block: str = WHOLE_POPULATION) -> None:
        """Change a cap, by decision of the data's owner; it may be below what is charged, and then no run fits.

        Args:
            population: A registered one.
            cap: The new cap; what was spent before counts against it.
            block: Whose cap; by default that of the population, which with blocks is the initial cap of the next ones.

        Raises:
            RefusedError: For an infinite cap, and for one without a delta where the composition needs one.
        """

        def decide(state: LedgerState) -> list[Draft]:
            state.cap(population, block)
            rules.check_cap(state.term(population).composition, cap)
            return [Draft("cap", population, cap, block=block)]

        self._append(StatePart(population, blocks=[block]), decide)

    def reserve(
        self,
        run_id: str,
        population: str,
        cost: Budget,
        *,
        events: Events,
        notes: Mapping[str, str],
        blocks: Sequence[str] = (WHOLE_POPULATION,),
        content_digests: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Charge a run before it reads a record; does nothing if the same run is open, as when it is resumed.

        Args:
            run_id: The run's name, of printable text.
            population: A registered one.
            cost: The most that the run can spend; infinite epsilon for a run without noise.
            events: The planned releases.
            notes: For people; also "adjacency" if it is not add-or-remove-one, and "retraining" for a scheduled
                retraining, which is charged only once.
            blocks: Those that the run reads, of which all are charged or none.
            content_digests: Keyed digests of each block's content; blocks with a common digest hold the same records.
                One that begins with "way:" is of the key and the columns by which they were made.

        Raises:
            BudgetRefusedError: If a cap does not allow the run, and if a block holds exactly what a block of another
                name holds or held, or not what it was charged for, unless the owner overruled that.
            RefusedError: For events without a bound under the population's composition, for an adjacency other than
                that of earlier charges to a private population, and for a run_id of another reservation or of a run
                that has ended.
        """
        rules.check_name(run_id, "run_id")
        row_notes = cast("RowNotes", dict(notes))
        run = Draft("reserve", population, cost, run_id, events, row_notes)
        # Priced before the database is locked: accountants take their time. Of the terms, what a price depends on never
        # changes: the composition and the number of blocks per person.
        drafts = reservation_drafts(self.terms(population), run, blocks, content_digests or {})

        def decide(state: LedgerState) -> list[Draft]:
            rules.check_blocks(state, population, [draft.block for draft in drafts])
            if run_id in state.runs:
                rules.check_resumes(state.runs[run_id], drafts)
                return []
            rules.check_once(state, population, row_notes)
            # Again, since another run may have charged these blocks with other content after `check_contents`.
            rules.check_repeats(state, population, content_digests or {})
            rules.check_changes(state, population, content_digests or {})
            rules.check_fits(state, drafts)
            return drafts

        # A run on a whole population has to know whether that has blocks.
        blocks_to_load = None if WHOLE_POPULATION in blocks else blocks
        self._append(
            StatePart(population, run_id, notes.get("retraining"), content_digests or None, blocks_to_load),
            decide,
        )

    def settle(self, run_id: str, spent: Budget, *, events: Events, model: str | None = None) -> None:
        """Settle a run at what it spent; does nothing if it is already settled at this cost, with this model.

        The events of the first settlement stay in the ledger then; a card that states others does not match it.

        Args:
            run_id: Of an open run.
            spent: At most what it reserved.
            events: The releases that happened.
            model: The SHA-256 of the run's model, by which a second one is known.

        Raises:
            BudgetRefusedError: If the run spent more than it reserved.
            RefusedError: For a run that ended otherwise.
        """
        # Outside of the turn, too: the run's population and reservation stay, and `decide` looks at its status.
        part, state_of_run = self._of_run(run_id)
        drafts = settlement_drafts(state_of_run, run_id, spent, events, model)

        def decide(state: LedgerState) -> list[Draft]:
            run = rules.find(state, run_id)
            rules.check_same_model(run_id, run, model)
            if run.status == "settled" and run.charged == spent:
                return []
            rules.check_settles(run_id, run, spent)
            return drafts

        self._append(part, decide)

    def forfeit(self, run_id: str) -> None:
        """Give a run up: its whole reservation counts as spent for ever; not a settled one. Repeating does nothing."""

        def decide(state: LedgerState) -> list[Draft]:
            run = rules.find(state, run_id)
            if run.status == "settled":
                raise RefusedError(f"run {run_id!r} is settled at {run.charged}; leave it at that.")
            blocks = run.amounts if run.status == "open" else ()
            return [Draft("forfeit", run.population, run.reserved, run_id, block=block) for block in blocks]

        self._append(self._of_run(run_id)[0], decide)

    def terms(self, population: str) -> Terms:
        """The terms of a population."""
        return self._state(population, blocks=()).term(population)

    def find_terms(self, population: str) -> Terms | None:
        """The terms of a population; None if the ledger does not know it."""
        return self._state(population, blocks=()).terms.get(population)

    def balance(self, population: str, block: str | None = None) -> Balance:
        """The balance of a block.

        Args:
            population: A registered one.
            block: None for the whole population, or for its most charged block if it has blocks.
        """
        state = self._state(population)
        name = find_fullest_block(state, population) if block is None else block
        return balance_of(state, population, name)

    def balances(self, population: str | None = None) -> list[Balance]:
        """The balances of all blocks, or of populations without blocks; of one population or of all."""

        def load(connection: Connection) -> list[tuple[str, LedgerState]]:
            names = state_tables.names(connection) if population is None else [population]
            return [(name, state_tables.load(connection, StatePart(name))) for name in names]

        return [
            balance_of(state, name, block)
            for name, state in self._store.read(load)
            for block in state.blocks(name) or [WHOLE_POPULATION]
        ]

    def blocks(self, population: str, also: Sequence[str] = ()) -> list[BlockBalance]:
        """The blocks, as the policies of retrainings take them; the whole population if it has none.

        Args:
            population: A registered one.
            also: Names of blocks that may not be declared yet, which come last, with the cap that they would get.
        """
        return block_views(self._state(population), population, also)

    def affordable_runs(
        self,
        population: str,
        cost: Budget,
        *,
        events: Events = (),
        adjacency: str = ADJACENCY,
        blocks: Sequence[str] = (),
    ) -> int | None:
        """How many more such runs the caps allow; nothing is reserved.

        Args:
            population: A registered one.
            cost: Of one run.
            events: Its releases, by which zCDP and Rényi count it.
            adjacency: Of the events.
            blocks: Those that each run reads; by default all that are not retired.

        Returns:
            The number of runs, or None for no limit.

        Raises:
            RefusedError: For events without a bound.
        """
        return affordable_runs(self._state(population), population, cost, events, adjacency, blocks)

    def spent_after(
        self,
        population: str,
        cost: Budget,
        *,
        runs: Sequence[int],
        events: Events = (),
        adjacency: str = ADJACENCY,
        blocks: Sequence[str] = (),
    ) -> tuple[Budget, ...]:
        """What would be spent or reserved after some further runs like this; nothing is reserved.

        Args:
            population: A registered one.
            cost: Of one run.
            runs: Numbers of further runs.
            events: Their releases, by which zCDP and Rényi count them.
            adjacency: Of the events.
            blocks: Those that each run reads; by default all that are not retired.

        Returns:
            For each number the budget of the most charged of these blocks. Under zCDP and Rényi it is the epsilon of
            the whole amount at the cap's delta, as epsilons do not add up.

        Raises:
            RefusedError: For events without a bound, and if every block is retired.
        """
        return spent_after(self._state(population), population, cost, events, adjacency, blocks, runs)

    def spent_if_repeated(self, population: str, runs: int) -> Budget | None:
        """What would be spent or reserved after further runs that are charged like the last one.

        Args:
            population: A registered one.
            runs: The number of further runs.

        Returns:
            The budget of the most charged block; None if there was no run.
        """

        def last(connection: Connection) -> tuple[ReservedRun | None, LedgerState]:
            run_id = query_value(connection, LAST_RUN, population=population)
            run = None if run_id is None else state_tables.find_run(connection, run_id)
            return run, state_tables.load(connection, StatePart(population))

        run, state = self._store.read(last)
        return None if run is None else spent_with(state, population, run.amounts, runs)

    def reserved_digests(self, population: str) -> dict[str, frozenset[str]]:
        """The digests of each block's content at its reservations; see `Ledger.reserve`."""
        state = self._state(population, content_digests={})
        return {block: digests for (_, block), digests in state.content_digests.items()}

    def check_contents(self, population: str, content_digests: Mapping[str, Sequence[str]]) -> None:
        """Check the content of blocks before a run is reserved.

        Args:
            population: A registered one.
            content_digests: Keyed digests of each block's content, as for `reserve`.

        Raises:
            BudgetRefusedError: For blocks that hold exactly what others hold, or not what they were charged for.
        """
        state = self._state(population, content_digests={})
        rules.check_repeats(state, population, content_digests)
        rules.check_changes(state, population, content_digests)

    def status(self, run_id: str) -> Status | None:
        """The status of a run; None if the ledger does not know it."""
        run = self._store.read(lambda connection: state_tables.find_run(connection, run_id))
        return run.status if run else None

    def run_of(self, population: str, retraining: str) -> str | None:
        """The run of a scheduled retraining of a population; None if there is none."""
        return self._state(population, retraining=retraining, blocks=()).run_of(population, retraining)

    def is_charged(self, population: str) -> bool:
        """Whether a run was ever reserved in a population; False for an unknown one."""
        return self._state(population, blocks=()).is_charged(population)

    def populations(self) -> list[str]:
        """The populations, in the order of their declaration."""
        return self._store.read(state_tables.names)

    def history(self, population: str | None = None) -> list[Entry]:
        """The rows of a population, or all of them, in order."""
        if population is None:
            return self._store.read(lambda connection: list(self._store.rows(connection)))

        def of_population(connection: Connection) -> list[Entry]:
            state_tables.load(connection, StatePart(population)).term(population)
            return list(self._store.rows_of(connection, population))

        return self._store.read(of_population)

    def head(self) -> str:
        """The hash of the last row, which commits to the whole history; keep it outside of the ledger."""
        return self.last_verified().hash

    def last_verified(self) -> Head:
        """The last verified row."""
        self._store.read(lambda _: None)
        return self.verified_head

    def verify(self, *, since: Checkpoint | None = None, prices: bool = False) -> LedgerVerification:
        """Recompute the chain and the balances, row by row.

        Args:
            since: An earlier verification to continue from; by default from the first row.
            prices: Also recompute what the events of each run cost, and refuse a row that charges less: epsilon under
                basic sums, rho or the divergence under filters, and the delta of several records of a person, of which
                a hundredth may be missing. A row may charge more, as a run that was settled at its full cost keeps the
                price of its reservation. Rows whose events are left out, unknown or without a bound are not compared.

        Raises:
            LedgerBrokenError: If a hash, a balance or a price does not hold.
        """
        return self._store.read(lambda connection: verify_rows(self._store, connection, since, prices=prices))

    def check_contains(self, head: str) -> None:
        """Check that this is no older copy of a ledger that was seen before.

        Args:
            head: A result of `head` that was kept elsewhere.

        Raises:
            LedgerBrokenError: If the chain lacks it, since rows were cut off or an older copy was restored.
        """
        self.read_chain(lambda chain: chain.check_contains(head))

    def seq_of(self, head: str) -> int | None:
        """The position of the row with a hash; None if there is none."""
        return self.read_chain(lambda chain: chain.seq_of(head))

    def read_chain(self, read: Callable[["Chain"], T]) -> T:
        """Query the rows several times in one snapshot, which costs about as much as one query.

        Args:
            read: Gets the rows. It is called again after a lost connection.

        Returns:
            What `read` returns.
        """
        return self._store.read(lambda connection: read(Chain(connection)))

    @property
    def verified_head(self) -> Head:
        """The last row that was verified so far; `last_verified` looks for later ones."""
        return self._store.verified

    def rows(self, take: Callable[[Iterator[Entry]], T]) -> T:
        """Call a function with all rows, verified one by one and never all in memory.

        Args:
            take: Gets the rows as an iterator. It is called again after a lost connection, so it must not keep
                what it did before.

        Returns:
            What `take` returns.
        """
        return self._store.read(lambda connection: take(self._store.rows(connection)))

    def _append(self, part: StatePart | None, decide: Decision) -> None:
        self._store.append(part, decide)
        if self._remember is not None:
            self._remember(self)

    def _state(self, population: str, **parts: Any) -> LedgerState:
        return self._store.read(
            lambda connection: state_tables.load(connection, StatePart(population, **parts))
        )

    def _of_run(self, run_id: str) -> tuple[StatePart | None, LedgerState]:
        """A run and what it is charged to, which never changes; None if the ledger does not know it."""

        def load_run(connection: Connection) -> tuple[StatePart | None, LedgerState]:
            run = state_tables.find_run(connection, run_id)
            if run is None:
                return None, LedgerState()
            part = StatePart(run.population, run_id, blocks=run.amounts)
            return part, state_tables.load(connection, part)

        return self._store.read(load_run)


@dataclass(frozen=True)
class Chain:
    """The verified rows of a ledger in one snapshot, see `Ledger.read_chain`."""

    _connection: Connection

    @property
    def first(self) -> str | None:
        """The hash of the first row, which identifies a ledger and its copies; None for an empty ledger."""
        first: str | None = query_value(self._connection, FIRST_HASH)
        return first

    def seq_of(self, head: str) -> int | None:
        """The position of the row with a hash; None if there is none."""
        seq: int | None = query_value(self._connection, SEQ_OF_HASH, hash=head)
        return seq

    def check_contains(self, head: str) -> None:
        """`Ledger.check_contains` of this snapshot.

        Raises LedgerBrokenError as it does.
        """
        if head != GENESIS and self.seq_of(head) is None:
            raise LedgerBrokenError(
                f"the ledger has no row with the hash {head[:16]}...: rows were cut off or an older"
                " copy was put back; restore the newest copy."
            )


def identity(ledger: Ledger) -> str | None:
    """The hash of the first row, which identifies a ledger and its copies; None for an empty ledger."""
    return ledger.read_chain(lambda chain: chain.first)


@dataclass(frozen=True)
class Settlement:
    """A population right after a run's settlement.

    Attributes:
        state: Of the ledger, of this population alone.
        population: Its name.
        run_id: Of the run.
    """

    state: LedgerState
    population: str
    run_id: str

    @property
    def balance(self) -> Balance:
        """The balance of the population, or of its most charged block."""
        return balance_of(self.state, self.population, find_fullest_block(self.state, self.population))

    @property
    def blocks(self) -> list[Balance]:
        """The balances of the population's blocks, in the order of declaration."""
        return self._balances(self.state.blocks(self.population))

    @property
    def charged_balances(self) -> list[Balance]:
        """The balances of the run's blocks; empty for a run on the whole population."""
        return self._balances([name for name in self.run.amounts if name != WHOLE_POPULATION])

    @property
    def run(self) -> ReservedRun:
        """The run in the ledger."""
        return self.state.runs[self.run_id]

    def spent_after(self, runs: int) -> Budget:
        """What is spent or reserved after this number of further runs charged like this one; of its dearest block."""
        return spent_with(self.state, self.population, self.run.amounts, runs)

    def _balances(self, names: list[str]) -> list[Balance]:
        return [balance_of(self.state, self.population, name) for name in names]


def settlement(ledger: Ledger, population: str, run_id: str) -> Settlement:
    """The state of a population right after the settlement of a run.

    Args:
        ledger: An open one.
        population: Its name.
        run_id: Of a settled run.

    Raises:
        RefusedError: For an unknown population, and for a run that is not settled.
    """

    def right_after(connection: Connection) -> LedgerState:
        state_tables.load(connection, StatePart(population)).term(population)
        settled_at = query_value(connection, SETTLED_AT, population=population, run_id=run_id)
        if settled_at is None:
            raise RefusedError(
                f"the ledger has no settlement of run {run_id!r} on {population!r}; settle it first."
            )
        return replay(
            takewhile(lambda row: row.seq <= settled_at, ledger._store.rows_of(connection, population))
        )

    return Settlement(ledger._store.read(right_after), population, run_id)
