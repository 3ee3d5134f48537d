"""Where the ledger's rows live: one append-only table in SQLite or PostgreSQL.

A write is one transaction that reads the rows, verifies the chain, asks what to append and appends it. An open store
keeps the rows that it has verified: as long as the last of them is still in its place, only those after it are read and
verified. Opening reads and verifies all.
SQLite runs these one after the other (BEGIN IMMEDIATE); PostgreSQL lets only those through that might have
run so (SERIALIZABLE), and the others are tried again. Unique constraints (one row a place, one successor a
row, one row a run, kind and block) stand behind that. Triggers refuse UPDATE and DELETE: they stop accidents, while
the hash chain shows what was done around them.
"""

import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from algorithms.privacy.errors import Refused
from algorithms.privacy.ledger_engine import PATIENCE_SECONDS, Place, place_of
from algorithms.privacy.ledger_entry import KINDS, Draft, Entry, seal, verify

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

        Raises LedgerBroken when the chain does not hold, Refused when the database cannot be read.
        """
        return [*self._transaction(lambda connection: self._read(connection, afresh=afresh))]

    def append(self, decide: Decision) -> None:
        """Appends what `decide` makes of the verified rows: all of its drafts, or nothing when there are none.

        No other write comes between the reading and the appending. `decide` may be called again after a lost
        race, and may raise: then nothing is written.
        Raises LedgerBroken when the chain does not hold, Refused when the database cannot be written.
        """

        def work(connection: Connection) -> None:
            entries = [*self._read(connection)]
            before, now = len(entries), datetime.now(UTC).isoformat(timespec="microseconds")
            for draft in decide(entries):
                entries.append(seal(draft, entries=entries, written_at=now))
            _insert(connection, entries[before:])

        self._transaction(work, writes=True)

    def fill(self, entries: Sequence[Entry]) -> None:
        """Writes verified rows into an empty ledger as they are; raises Refused where it holds rows already."""

        def work(connection: Connection) -> None:
            if self._read(connection):
                raise Refused(f"the ledger {self.place.name} holds rows already; restore into a new one.")
            _insert(connection, entries)

        self._transaction(work, writes=True)

    def create(self) -> None:
        """Creates the table and its triggers where they are missing; raises Refused where it cannot."""
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
                    raise Refused(self.place.complaint(error)) from None
            time.sleep(random.uniform(0.0, pause))
            pause = min(2 * pause, 0.5)


def _insert(connection: Connection, entries: Sequence[Entry]) -> None:
    # One by one: psycopg's pipeline of many complains aloud where a transaction is tried again.
    for entry in entries:
        connection.execute(_TABLE.insert().values(vars(entry)))


def open_store(url: str) -> Store:
    """The store at a SQLAlchemy URL, created when it is missing; raises Refused where that is impossible."""
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
