"""The database of a ledger, found by a URL: connecting to SQLite or PostgreSQL, and its errors in words.

No message contains a password.
"""

import errno
import os
import shlex
import sqlite3
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool, QueuePool

from algorithms.errors import RefusedError

PATIENCE_SECONDS = 30.0
_CONNECT_SECONDS = 10
_ROOM_BYTES = 2**20
"""A disk with less free space than this is full."""
_SESSION = {"lock_timeout": 30, "idle_in_transaction_session_timeout": 60, "idle_session_timeout": 10}
SET_PATIENCE = f"PRAGMA busy_timeout = {int(PATIENCE_SECONDS * 1000)}"
# Readers have a snapshot that no writer waits for (WAL), and a commit returns once the log is on the disk (FULL).
SQLITE_PRAGMAS = (SET_PATIENCE, "PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL")


@dataclass(frozen=True)
class Database:
    """A database.

    name: in messages. engine: SQLAlchemy's. secrets: the forms of its password, which messages replace by stars.
    check: what to type where it is away, as the end of a sentence.
    """

    name: str
    engine: Engine = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False, default=())
    check: str = ""

    def not_allowed(self) -> str:
        """The message for an action that the user may not do."""
        user = self.engine.url.username or "this user"
        return (
            f"the ledger {self.name} does not let {user} do this; ask its owner, who registers populations, sets caps,"
            " retires and overrules, while a runner reserves, settles and forfeits runs of his own."
        )

    def complaint(self, error: DBAPIError) -> str:
        """The message for an error of the database, without SQL, parameters or password."""
        if self._is_full(error):
            return full_disk(self.name)
        if is_busy(error):
            return f"another program has kept the ledger {self.name} locked; start again when that has ended."
        reason = next(iter(str(error.orig).strip().splitlines()), type(error.orig).__name__)
        for secret in self.secrets:
            reason = reason.replace(secret, "***")
        return (
            f"the ledger {self.name} cannot be used ({reason.rstrip('.')});"
            f" make sure that it is there, that it is a ledger and that you may write to it{self.check}."
        )

    def _is_full(self, error: DBAPIError) -> bool:
        """Whether a file's disk is full; for its log and index, SQLite only says that they cannot be written."""
        # Extended codes have the primary one in their low byte.
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        if code != sqlite3.SQLITE_IOERR:
            return code == sqlite3.SQLITE_FULL
        disk = os.statvfs(Path(str(self.engine.url.database)).parent)
        return disk.f_bavail * disk.f_frsize < _ROOM_BYTES


def full_disk(name: str) -> str:
    """The message if there is no space left for a ledger."""
    return f"the disk is full; make room where the ledger {name} lies, then start it again: it goes on where it was."


def database_of(url: str) -> Database:
    """The database at sqlite:///PATH or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE.

    Only the owner can read and write a new SQLite file and its new folder. Raises RefusedError for any other URL, for a
    folder that cannot be written, and if psycopg is not installed.
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


def _sqlite(url: URL, *, is_whole: bool) -> Database:
    """is_whole: whether the URL is only a path; a question mark, even one in the path, would end it."""
    database = url.database or ""
    if not database or database == ":memory:" or database.startswith("file:") or not is_whole:
        raise RefusedError("a ledger in SQLite must be a file that stays; write its URL as sqlite:///PATH.")
    path = Path(os.path.realpath(database))  # unlike `resolve`, it leaves a loop of links to `open`
    try:
        _make_private(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RefusedError(full_disk(str(path))) from None
        raise RefusedError(
            f"the ledger {path} cannot be created or opened ({error.strerror});"
            " choose a place that you may write to."
        ) from None
    engine = sa.create_engine(URL.create("sqlite", database=str(path)), poolclass=NullPool)
    sa.event.listen(engine, "connect", _prepare_sqlite)
    return Database(str(path), engine)


def _make_private(path: Path) -> None:
    if not path.parent.is_dir():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        # A file that is there already, and is ours, loses what it lets others do.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o077:
            path.chmod(status.st_mode & 0o700)


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where we say BEGIN, not where the driver guesses
    for pragma in SQLITE_PRAGMAS:
        connection.execute(pragma).close()


def _prepare_postgresql(connection: Any, record: Any) -> None:
    """Set timeouts for a session, so that it never waits for ever and the server ends it soon if it is idle."""
    cursor = connection.execute("SELECT session_user")
    record.info["user"] = cursor.fetchone()[0]
    for name, seconds in _SESSION.items():
        # PostgreSQL has this one since version 14.
        if name != "idle_session_timeout" or connection.info.server_version >= 140000:
            connection.execute(f"SET {name} = '{seconds}s'")
    connection.commit()


def _postgresql(url: URL) -> Database:
    # A pooler may give each transaction another session; and a database without an encoding returns bytes.
    options: dict[str, str | None] = {"prepare_threshold": None, "client_encoding": "utf8"}
    try:
        engine = sa.create_engine(
            url,
            isolation_level="AUTOCOMMIT",  # statements of ours begin and end a transaction, sent with what it asks
            poolclass=QueuePool,
            pool_size=1,
            max_overflow=32,
            pool_use_lifo=True,
            hide_parameters=True,
            connect_args=options
            if "connect_timeout" in url.query
            else options | {"connect_timeout": _CONNECT_SECONDS},
        )
    except ImportError:
        raise RefusedError(
            "a ledger in PostgreSQL needs the package psycopg; install epsilonflow with its extra `postgres`."
        ) from None
    sa.event.listen(engine, "connect", _prepare_postgresql)
    passwords = [url.password, url.query.get("password"), url.query.get("sslpassword")]
    secrets = {form for text in passwords if text for form in (str(text), quote(str(text), safe=""))}
    name = f"{url.database!r} in PostgreSQL on {url.host or 'this machine'}"
    options_of_host = {"host": url.host, "port": url.port}
    where = "".join(
        f" --{key} {shlex.quote(str(value))}" for key, value in options_of_host.items() if value is not None
    )
    check = f"; `pg_isready{where}` says whether its server answers, and EPSILONFLOW_LEDGER_URL names another"
    return Database(name, engine, tuple(sorted(secrets, key=len, reverse=True)), check)


def is_busy(error: DBAPIError) -> bool:
    """Whether another connection has locked the SQLite file."""
    return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
