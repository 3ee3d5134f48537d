"""Stores the ledger's rows: one append-only table in a database.

A write is one transaction. It verifies the chain from the last verified head, asks what to append, appends it and
updates the balances, so that its time does not depend on the ledger's age. SQLite runs writes one after the other
(BEGIN IMMEDIATE). On PostgreSQL writers take turns by a lock, and SERIALIZABLE protects against those who do not take
it. A turn ends before the disk has the rows, and `append` returns when it has them, so that one wait for the disk
serves all waiting writers. Unique constraints (one row per position, one successor per row, one row per run, kind and
block) protect further. A transaction that lost a race or its connection is retried. Triggers refuse UPDATE and DELETE:
they prevent accidents, while the hash chain reveals changes that bypass them.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, OperationalError

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.ledger import database, state_tables
from algorithms.privacy.ledger.database import SET_PATIENCE, Database, database_of, is_busy
from algorithms.privacy.ledger.location import system_user
from algorithms.privacy.ledger.rows import (
    EMPTY_HEAD,
    Draft,
    Entry,
    Head,
    broken_error,
    follow,
    is_intact,
    seal,
)
from algorithms.privacy.ledger.state import LedgerState
from algorithms.privacy.ledger.state_tables import Statement, exchange

_TURN_MILLISECONDS = 5
T = TypeVar("T")
Decision = Callable[[LedgerState], Sequence[Draft]]

LATEST = "0002"
"""The latest migration."""
PAGE = 1000
FIRST_PAGE = PAGE // 20
_MIGRATIONS = Path(__file__).parent / "migrations"
_VERSIONS = "epsilonflow_ledger_version"
_MIGRATING = threading.Lock()
"""Alembic runs one migration at a time in a process."""

_SERIALIZATION_FAILURE, _DEADLOCK, _UNIQUE_VIOLATION = "40001", "40P01", "23505"
_TABLE_EXISTS, _TYPE_EXISTS = "42P07", "42710"  # a table in PostgreSQL is a type, too
_LOST_A_RACE = {_SERIALIZATION_FAILURE, _DEADLOCK, _UNIQUE_VIOLATION, _TABLE_EXISTS, _TYPE_EXISTS}
_SHUTTING_DOWN = {"57P01", "57P02", "57P03", "57P05"}  # shutdown, crash, starting up, and idle session
_NOT_ALLOWED = "42501"  # insufficient_privilege
_DAMAGE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, sa.exc.InvalidRequestError)


def _statements(*texts: str) -> Sequence[Statement]:
    return [(sa.text(text), {}) for text in texts]


# On PostgreSQL. Readers have one snapshot, which no write waits for. Writers take turns; the lock comes first, so that
# the snapshot is taken when the turn has come. The lock conflicts with that of other writers and with no reader's. A
# commit of a turn does not wait for the disk (SET LOCAL, of this transaction alone); `_ENDS` does, after the lock.
_SNAPSHOT = _statements("BEGIN ISOLATION LEVEL REPEATABLE READ")
_TURN = _statements(
    "BEGIN ISOLATION LEVEL SERIALIZABLE",
    "LOCK TABLE epsilonflow_head IN EXCLUSIVE MODE",
    "SET LOCAL synchronous_commit = off",
)
_ENDS = _statements("COMMIT", "SELECT pg_logical_emit_message(true, 'epsilonflow', '')")
_COLUMNS = Entry._fields
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM epsilonflow_ledger"
_ROWS_FROM = sa.text(f"{_SELECT} WHERE seq >= :seq ORDER BY seq LIMIT :page")
_ROWS_OF_POPULATION = sa.text(
    f"{_SELECT} WHERE population = :population AND seq >= :seq ORDER BY seq LIMIT :page"
)
FIRST_HASH = sa.text("SELECT hash FROM epsilonflow_ledger WHERE seq = 1")
"""Which identifies a ledger and its copies."""
SEQ_OF_HASH = sa.text("SELECT seq FROM epsilonflow_ledger WHERE hash = :hash")
LAST_RUN = sa.text(
    "SELECT run_id FROM epsilonflow_ledger WHERE population = :population AND kind = 'reserve'"
    " ORDER BY seq DESC LIMIT 1"
)
SETTLED_AT = sa.text(
    "SELECT max(seq) FROM epsilonflow_ledger"
    " WHERE run_id = :run_id AND kind = 'settle' AND population = :population"
)


class NotAllowedError(RefusedError):
    """The database does not allow this user the action."""


@dataclass
class Store:
    """A table of entries in a database; threads may share it."""

    database: Database = field(repr=False)
    verified: Head = EMPTY_HEAD
    """The last verified row, here or by the caller who opened the store; a write continues from there."""
    _was_connected: bool = field(default=False, repr=False)

    def read(self, query: Callable[[Connection], T]) -> T:
        """Call `query` with one snapshot, in which the chain is verified and the balances are those of its head.

        Raises LedgerBrokenError if the chain is broken, and RefusedError if the database cannot be read.
        """

        def work(connection: Connection) -> tuple[Head, T]:
            try:
                return self._current(connection)[0], query(connection)
            except _DAMAGE as error:  # in rows that no ledger can have written
                if isinstance(error, RefusedError):
                    raise
                raise LedgerBrokenError(
                    f"the ledger {self.database.name} is damaged, what it holds cannot be read"
                    f" ({type(error).__name__}); restore it from a copy whose chain holds."
                ) from error

        self.verified, answer = self._transaction(work)
        return answer

    def append(self, part: state_tables.StatePart | None, decide: Decision) -> None:
        """Append the drafts that `decide` returns for a part of the state, all of them or none.

        No other write happens between reading and appending. `decide` may be called again after a lost race or a lost
        connection, and may raise; then nothing is written. Raises LedgerBrokenError if the chain is broken, and
        RefusedError if the database cannot be written.
        """

        def work(connection: Connection) -> Head:
            queries = part.queries(connection.dialect.name) if part else ()
            # The write has its turn before it reads: what `decide` sees is what its rows will follow.
            head, answers = self._current(connection, writes=True, queries=queries)
            state = part.state(connection, answers) if part else LedgerState()
            entries, now = list[Entry](), datetime.now(UTC).isoformat(timespec="microseconds")
            # the database's, or for a file the system's
            user = str(connection.info.get("user") or system_user())
            try:
                drafts = decide(state)
            except RefusedError:
                if part and part.blocks is not None:
                    # With the whole state, whose refusal says what else there is.
                    decide(state_tables.load(connection, part.whole()))
                raise
            for draft in drafts:
                # Each hash covers the row before, so a row that is changed or removed later breaks all that follow.
                entries.append(seal(draft, after=head, written_at=now, written_by=user))
                head = entries[-1].head
            changes = state_tables.apply_rows(state, entries) if entries else []
            # Rows, balances and commit, in one round trip.
            exchange(connection, [*((INSERT, row._asdict()) for row in entries), *changes, *_end(connection)])
            return head

        self.verified = self._transaction(work, writes=True)

    def fill(self, entries: Callable[[], Iterator[Entry]]) -> int:
        """Write the rows of a chain unchanged into an empty table; returns their number.

        Raises RefusedError if the ledger has rows, and LedgerBrokenError if the chain is broken.
        """

        def work(connection: Connection) -> Head:
            if self._current(connection, writes=True)[0] != EMPTY_HEAD:
                raise RefusedError(
                    f"the ledger {self.database.name} holds rows already; restore into a new one."
                )

            def write_pages() -> Iterator[list[Entry]]:
                for page in pages(entries()):
                    connection.execute(INSERT, [row._asdict() for row in page])
                    yield page

            state_tables.fill(connection, write_pages())
            head = state_tables.head_of(connection)
            exchange(connection, _end(connection))
            return head

        self.verified = self._transaction(work, writes=True)
        return self.verified.seq

    def migrate(self) -> None:
        """Create the tables, or migrate those of an older version.

        Raises RefusedError if that fails, and for a ledger of a newer version.
        """
        if self._transaction(_version) != LATEST:
            self._transaction(self._upgrade, writes=True)

    def administrate(self, work: Callable[[Connection], T]) -> T:
        """A transaction for the owner of the tables."""

        def alone(connection: Connection) -> T:
            exchange(connection, _TURN[:2])  # without the third, so that its own commit waits for the disk
            return work(connection)

        return self._transaction(alone, writes=True)

    def rows(self, connection: Connection, *, after: Head = EMPTY_HEAD) -> Iterator[Entry]:
        """The rows after a head, verified one by one."""
        return follow(_rows(connection, _ROWS_FROM, after.seq + 1), name=self.database.name, after=after)

    def rows_of(self, connection: Connection, population: str) -> Iterator[Entry]:
        """The rows of a population, each checked against its hash."""
        for entry in _rows(connection, _ROWS_OF_POPULATION, 1, population=population):
            if not is_intact(entry):
                raise broken_error(self.database.name, entry.seq)
            yield entry

    def _current(
        self, connection: Connection, *, writes: bool = False, queries: Sequence[Statement] = ()
    ) -> tuple[Head, list[Sequence[Any]]]:
        """The verified head of the chain, and the results of queries on the balances; a write takes its turn."""
        begin = _TURN if writes else _SNAPSHOT
        turn = begin if connection.dialect.name == "postgresql" else ()
        verified = self.verified
        rows: Statement = (_ROWS_FROM, {"seq": max(verified.seq, 1), "page": FIRST_PAGE})
        # One round trip: the turn, the new rows, the head that balances are of, and the queries to them.
        # Those of the turn's statements are not needed.
        results = exchange(connection, [*turn, rows, (state_tables.HEAD_OF, {}), *queries])[len(turn) :]
        page, ((seq, hashed),), *answers = results
        head = self._head(connection, verified, page)
        if Head(seq, hashed) != head:
            raise LedgerBrokenError(
                f"the ledger {self.database.name} keeps balances of row {seq} with the hash {hashed[:16]}..., and its"
                f" last row is {head.seq}: rows were cut off or added outside the ledger, or an older copy was put"
                " back; restore the newest copy."
            )
        return head, answers

    def _head(self, connection: Connection, verified: Head, page: Sequence[Any]) -> Head:
        """The head of the chain, verified from the previously last row on, including that row.

        page: the rows from there on, as far as they are already read.
        """
        if verified.seq:
            rows = _rows(connection, _ROWS_FROM, verified.seq, page)
            last = next(rows, None)
            if last is not None and last.head == verified and is_intact(last):
                return _last(follow(rows, name=self.database.name, after=verified), verified)
            page = ()
        # The first time; or another ledger has this name, or one that was cut.
        rows = _rows(connection, _ROWS_FROM, 1, page)
        return _last(follow(rows, name=self.database.name), EMPTY_HEAD)

    def _upgrade(self, connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            # A lock by number: the tables that a turn locks may not be there yet.
            connection.exec_driver_sql("BEGIN")
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('epsilonflow_ledger'))")
        version = _version(connection)
        from alembic import command
        from alembic.config import Config
        from alembic.script import ScriptDirectory

        config = Config(attributes={"connection": connection, "version_table": _VERSIONS})
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        with _MIGRATING:
            versions = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
            if version is not None and version not in versions:
                remedy = (
                    "an older epsilonflow made and this one does not read; make a new ledger, whose caps are lowered"
                    " by what was spent there."
                    if version < LATEST
                    else "a newer epsilonflow made; use that one."
                )
                raise RefusedError(f"the ledger {self.database.name} is of version {version}, which {remedy}")
            command.upgrade(config, "head")

    def _transaction(self, work: Callable[[Connection], T], *, writes: bool = False) -> T:
        deadline = time.monotonic() + database.PATIENCE_SECONDS
        pause = 0.005
        while True:
            try:
                with self.database.engine.connect() as connection:
                    self._was_connected = True
                    # On PostgreSQL it sends nothing at its start (AUTOCOMMIT), and at its end a COMMIT if `exchange`
                    # began a transaction that has not ended; after an exception a ROLLBACK.
                    with connection.begin():
                        if connection.dialect.name == "sqlite":
                            _begin(connection, writes=writes, deadline=deadline)
                        return work(connection)
            except UnicodeDecodeError:
                raise RefusedError(
                    f"the ledger {self.database.name} is damaged; restore it from a copy whose chain holds."
                ) from None
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) == _NOT_ALLOWED:
                    raise NotAllowedError(self.database.not_allowed()) from None
                # A lost connection only where there was one: otherwise the address or the password is wrong.
                may_retry = _lost_a_race(error) or (self._was_connected and _lost_connection(error))
                if not may_retry or time.monotonic() > deadline:
                    raise RefusedError(self.database.complaint(error)) from None
            time.sleep(random.uniform(0.0, pause))  # a random time, so that two do not meet again
            pause = min(2 * pause, 0.5)


def _begin(connection: Connection, *, writes: bool, deadline: float) -> None:
    """Begin a transaction in SQLite; a write waits for its turn.

    It retries every few milliseconds. SQLite's own retries become rarer and rarer, so that among many writers the
    latest go first and one may wait without end.
    """
    if not writes:
        connection.exec_driver_sql("BEGIN")
        return
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {_TURN_MILLISECONDS}")
    while True:
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            break
        except DBAPIError as error:
            if not _lost_a_race(error) or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.0, _TURN_MILLISECONDS / 1000))
    connection.exec_driver_sql(SET_PATIENCE)


def query_value(connection: Connection, query: sa.TextClause, **parameters: str) -> Any:
    """The one value that a query finds; None if there is none."""
    return connection.execute(query, parameters).scalar_one_or_none()


def pages(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield entries in pages."""
    rest = iter(entries)
    while page := list(islice(rest, PAGE)):
        yield page


def open_store(url: str) -> Store:
    """Open the store at a SQLAlchemy URL, and create or migrate its tables; raises RefusedError if that fails."""
    store = Store(database_of(url))
    store.migrate()
    return store


INSERT = sa.text(
    f"INSERT INTO epsilonflow_ledger ({', '.join(_COLUMNS)}) VALUES ({', '.join(f':{name}' for name in _COLUMNS)})"
)


def _rows(
    connection: Connection, statement: sa.TextClause, seq: int, first: Sequence[Any] = (), **parameters: str
) -> Iterator[Entry]:
    """Read rows page by page, so that a million need no more memory than a thousand. The first page is short, and may
    be given.
    """
    page, rows = FIRST_PAGE, first
    while True:
        rows = rows or exchange(connection, [(statement, {"seq": seq, "page": page, **parameters})])[0]
        yield from map(Entry._make, rows)
        if len(rows) < page:
            return
        seq, page, rows = rows[-1][0] + 1, PAGE, ()


def _last(entries: Iterator[Entry], head: Head) -> Head:
    for entry in entries:
        head = entry.head
    return head


def _end(connection: Connection) -> Sequence[Statement]:
    """The statements that end a turn and then wait until the disk has all commits so far, by a commit that waits for
    the disk.
    """
    return _ENDS if connection.dialect.name == "postgresql" else ()


def _version(connection: Connection) -> str | None:
    if not sa.inspect(connection).has_table(_VERSIONS):
        return None
    version = connection.exec_driver_sql(f"SELECT version_num FROM {_VERSIONS}").scalar_one_or_none()
    return None if version is None else str(version)


def _lost_a_race(error: DBAPIError) -> bool:
    return is_busy(error) or getattr(error.orig, "sqlstate", None) in _LOST_A_RACE


def _lost_connection(error: DBAPIError) -> bool:
    """Whether the server was restarted or ended an idle session. It does not matter whether a commit succeeded, since
    repeating a decision that was carried out appends nothing.
    """
    state = getattr(error.orig, "sqlstate", None)
    is_connecting = (
        isinstance(error, OperationalError) and state is None and not hasattr(error.orig, "sqlite_errorcode")
    )
    return error.connection_invalidated or state in _SHUTTING_DOWN or is_connecting
