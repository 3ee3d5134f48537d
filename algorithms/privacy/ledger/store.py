"""Where the ledger's rows live: one append-only table in SQLite or PostgreSQL, and how a URL leads to it.

A write is one transaction that reads the rows, verifies the chain, asks what to append and appends it. An open store
keeps the rows that it has verified: as long as the last of them is still in its place, only those after it are read
and verified. Opening reads and verifies all. SQLite runs these one after the other (BEGIN IMMEDIATE); PostgreSQL lets
only those through that might have run so (SERIALIZABLE), and the others are tried again. Unique constraints (one row
a place, one successor a row, one row a run, kind and block) stand behind that. Triggers refuse UPDATE and DELETE:
they stop accidents, while the hash chain shows what was done around them. No message holds a password.
"""

import os
import random
import sqlite3
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool

from algorithms.errors import RefusedError
from algorithms.privacy.ledger.chain import KINDS, Draft, Entry, seal, verify

PATIENCE_SECONDS = 30.0
_CONNECT_SECONDS = 10
_SQLITE_PRAGMAS = (
    f"PRAGMA busy_timeout = {int(PATIENCE_SECONDS * 1000)}",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
)


@dataclass(frozen=True)
class Place:
    """A database: the name by which messages call it, its engine, and what no message may show."""

    name: str
    engine: Engine = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False, default=())

    def complaint(self, error: DBAPIError) -> str:
        """One sentence on what the database refused, without SQL, parameters or password."""
        reason = next(iter(str(error.orig).strip().splitlines()), type(error.orig).__name__)
        for secret in self.secrets:
            reason = reason.replace(secret, "***")
        return (
            f"the ledger {self.name} cannot be used ({reason.rstrip('.')});"
            " make sure that it is there, that it is a ledger and that you may write to it."
        )


def place_of(url: str) -> Place:
    """The database at sqlite:///PATH or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE.

    A new SQLite file, and its folder when that is new too, can be read and written by the owner only.
    Raises RefusedError for any other URL, for a folder that cannot be written, and when psycopg is not installed.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # whose text may hold a piece of the password
        parsed = None
    if parsed is None or "@" in f"{parsed.host}{parsed.database if parsed.host else ''}":
        raise RefusedError(
            "the URL of the ledger cannot be read; write sqlite:///PATH or"
            " postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, special characters of the password as %XX."
        )
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        return _sqlite(parsed, is_whole="?" not in url)
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        return _postgresql(parsed.set(drivername="postgresql+psycopg"))
    raise RefusedError(f"a ledger cannot live in {parsed.drivername!r}; use sqlite or postgresql+psycopg.")


def _sqlite(url: URL, *, is_whole: bool) -> Place:
    """is_whole: nothing follows the path, which a question mark would end, even one that belongs to it."""
    database = url.database or ""
    if not database or database == ":memory:" or database.startswith("file:") or not is_whole:
        raise RefusedError("a ledger in SQLite must be a file that stays; write its URL as sqlite:///PATH.")
    path = Path(database).resolve()
    try:
        _make_private(path)
    except OSError as error:
        raise RefusedError(
            f"the ledger {path} cannot be created or opened ({error.strerror});"
            " choose a place that you may write to."
        ) from None
    engine = sa.create_engine(URL.create("sqlite", database=str(path)), poolclass=NullPool)
    sa.event.listen(engine, "connect", _prepare_sqlite)
    return Place(str(path), engine)


def _make_private(path: Path) -> None:
    if not path.parent.is_dir():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        found = path.stat()
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o077:
            path.chmod(found.st_mode & 0o700)


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where we say BEGIN, not where the driver guesses
    for pragma in _SQLITE_PRAGMAS:
        connection.execute(pragma).close()


def _postgresql(url: URL) -> Place:
    try:
        engine = sa.create_engine(
            url,
            isolation_level="SERIALIZABLE",
            poolclass=NullPool,
            hide_parameters=True,
            connect_args={} if "connect_timeout" in url.query else {"connect_timeout": _CONNECT_SECONDS},
        )
    except ImportError:
        raise RefusedError(
            "a ledger in PostgreSQL needs the package psycopg; install epsilonflow with its extra `postgres`."
        ) from None
    passwords = [url.password, url.query.get("password"), url.query.get("sslpassword")]
    secrets = {form for text in passwords if text for form in (str(text), quote(str(text), safe=""))}
    name = f"{url.database!r} in PostgreSQL on {url.host or 'this machine'}"
    return Place(name, engine, tuple(sorted(secrets, key=len, reverse=True)))


T = TypeVar("T")
Decision = Callable[[list[Entry]], Sequence[Draft]]

_SERIALIZATION_FAILURE, _DEADLOCK, _UNIQUE_VIOLATION = "40001", "40P01", "23505"
_TABLE_EXISTS, _TYPE_EXISTS = "42P07", "42710"  # a table in PostgreSQL is a type, too
_LOST_A_RACE = {_SERIALIZATION_FAILURE, _DEADLOCK, _UNIQUE_VIOLATION, _TABLE_EXISTS, _TYPE_EXISTS}

_TABLE = sa.Table(
    "epsilonflow_ledger",
    sa.MetaData(),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.Text, sa.CheckConstraint(f"kind IN {KINDS}"), nullable=False),
    sa.Column("population", sa.Text, nullable=False),
    sa.Column("block", sa.Text, nullable=False),
    sa.Column("run_id", sa.Text),
    sa.Column("epsilon", sa.Double),
    sa.Column("delta", sa.Double, nullable=False),
    sa.Column("events", sa.Text, nullable=False),
    sa.Column("about", sa.Text, nullable=False),
    sa.Column("written_at", sa.Text, nullable=False),
    sa.Column("previous_hash", sa.Text, nullable=False, unique=True),
    sa.Column("hash", sa.Text, nullable=False, unique=True),
    sa.UniqueConstraint("run_id", "kind", "block"),
    sa.CheckConstraint("(run_id IS NULL) = (kind IN ('population', 'cap'))"),
)
_ROWS = sa.select(_TABLE).order_by(_TABLE.c.seq)
_NEVER = "the rows of the ledger are never changed or removed"
_LAST = "(SELECT max(seq) FROM epsilonflow_ledger)"
_SQLITE_TRIGGERS = tuple(
    f"CREATE TRIGGER IF NOT EXISTS epsilonflow_ledger_{name} BEFORE {when}"
    f" BEGIN SELECT RAISE(ABORT, '{_NEVER}'); END"
    for name, when in {
        "no_update": "UPDATE ON epsilonflow_ledger",
        "no_delete": "DELETE ON epsilonflow_ledger",
        "no_replace": f"INSERT ON epsilonflow_ledger WHEN NEW.seq <= {_LAST}",
    }.items()
)
_POSTGRESQL_TRIGGERS = (
    f"""CREATE OR REPLACE FUNCTION epsilonflow_ledger_refuse() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN RAISE EXCEPTION '{_NEVER}'; END $$""",
    """CREATE TRIGGER epsilonflow_ledger_append_only BEFORE UPDATE OR DELETE OR TRUNCATE
        ON epsilonflow_ledger FOR EACH STATEMENT EXECUTE FUNCTION epsilonflow_ledger_refuse()""",
)


@dataclass
class Store:
    """A table of entries at a place, which threads may share."""

    place: Place = field(repr=False)
    _verified: list[Entry] = field(default_factory=list, repr=False)
    """The chain from its first row. The list is replaced and never changed, so any thread leaves a good one."""

    def read(self, *, afresh: bool = False) -> list[Entry]:
        """Every row in order; afresh: whatever was verified before is read and hashed again.

        Raises LedgerBrokenError when the chain does not hold, RefusedError when the database cannot be read.
        """
        return [*self._transaction(lambda connection: self._read(connection, afresh=afresh))]

    def append(self, decide: Decision) -> None:
        """Appends what `decide` makes of the verified rows: all of its drafts, or nothing when there are none.

        No other write comes between the reading and the appending. `decide` may be called again after a lost race,
        and may raise: then nothing is written. Raises LedgerBrokenError when the chain does not hold, RefusedError
        when the database cannot be written.
        """

        def work(connection: Connection) -> None:
            entries = [*self._read(connection)]
            before, now = len(entries), datetime.now(UTC).isoformat(timespec="microseconds")
            for draft in decide(entries):
                entries.append(seal(draft, entries=entries, written_at=now))
            _insert(connection, entries[before:])

        self._transaction(work, writes=True)

    def fill(self, entries: Sequence[Entry]) -> None:
        """Writes verified rows into an empty ledger as they are; raises RefusedError where it holds rows already."""

        def work(connection: Connection) -> None:
            if self._read(connection):
                raise RefusedError(
                    f"the ledger {self.place.name} holds rows already; restore into a new one."
                )
            _insert(connection, entries)

        self._transaction(work, writes=True)

    def create(self) -> None:
        """Creates the table and its triggers where they are missing; raises RefusedError where it cannot."""
        self._transaction(_create, writes=True)

    def _read(self, connection: Connection, *, afresh: bool = False) -> list[Entry]:
        """The rows in order, verified."""
        known = [] if afresh else self._verified
        rows = self._rows(connection, known[-1].seq if known else 1)
        if known and rows[:1] != known[-1:]:  # another ledger is in this place, or one that was cut
            known, rows = [], self._rows(connection, 1)
        entries = [*known[:-1], *rows]
        verify(entries, name=self.place.name, known=len(known))
        self._verified = entries
        return entries

    def _rows(self, connection: Connection, first: int) -> list[Entry]:
        return [Entry(*row) for row in connection.execute(_ROWS.where(_TABLE.c.seq >= first))]

    def _transaction(self, work: Callable[[Connection], T], *, writes: bool = False) -> T:
        deadline = time.monotonic() + PATIENCE_SECONDS
        pause = 0.005
        while True:
            try:
                with self.place.engine.begin() as connection:
                    if writes and connection.dialect.name == "sqlite":
                        connection.exec_driver_sql("BEGIN IMMEDIATE")
                    return work(connection)
            except DBAPIError as error:
                if not _lost_a_race(error) or time.monotonic() > deadline:
                    raise RefusedError(self.place.complaint(error)) from None
            time.sleep(random.uniform(0.0, pause))
            pause = min(2 * pause, 0.5)


def _insert(connection: Connection, entries: Sequence[Entry]) -> None:
    # One by one: psycopg's pipeline of many complains aloud where a transaction is tried again.
    for entry in entries:
        connection.execute(_TABLE.insert().values(vars(entry)))


def open_store(url: str) -> Store:
    """The store at a SQLAlchemy URL, created when it is missing; raises RefusedError where that is impossible."""
    store = Store(place_of(url))
    store.create()
    return store


def _create(connection: Connection) -> None:
    sqlite = connection.dialect.name == "sqlite"
    if not sqlite and sa.inspect(connection).has_table(_TABLE.name):
        return  # a role that may only SELECT and INSERT can use what its owner created
    _TABLE.create(connection, checkfirst=True)
    for trigger in _SQLITE_TRIGGERS if sqlite else _POSTGRESQL_TRIGGERS:
        connection.exec_driver_sql(trigger)


def _lost_a_race(error: DBAPIError) -> bool:
    busy = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
    return busy or getattr(error.orig, "sqlstate", None) in _LOST_A_RACE
