"""From a URL to a database engine that is safe for a ledger, and to messages that hold no password."""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool

from algorithms.privacy.errors import Refused

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
    Raises Refused for any other URL, for a folder that cannot be written, and when psycopg is not installed.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # whose text may hold a piece of the password
        parsed = None
    if parsed is None or "@" in f"{parsed.host}{parsed.database if parsed.host else ''}":
        raise Refused(
            "the URL of the ledger cannot be read; write sqlite:///PATH or"
            " postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, special characters of the password as %XX."
        )
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        return _sqlite(parsed, is_whole="?" not in url)
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        return _postgresql(parsed.set(drivername="postgresql+psycopg"))
    raise Refused(f"a ledger cannot live in {parsed.drivername!r}; use sqlite or postgresql+psycopg.")


def _sqlite(url: URL, *, is_whole: bool) -> Place:
    """is_whole: nothing follows the path, which a question mark would end, even one that belongs to it."""
    database = url.database or ""
    if not database or database == ":memory:" or database.startswith("file:") or not is_whole:
        raise Refused("a ledger in SQLite must be a file that stays; write its URL as sqlite:///PATH.")
    path = Path(database).resolve()
    try:
        _make_private(path)
    except OSError as error:
        raise Refused(
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
        raise Refused(
            "a ledger in PostgreSQL needs the package psycopg; install epsilonflow with its extra `postgres`."
        ) from None
    passwords = [url.password, url.query.get("password"), url.query.get("sslpassword")]
    secrets = {form for text in passwords if text for form in (str(text), quote(str(text), safe=""))}
    name = f"{url.database!r} in PostgreSQL on {url.host or 'this machine'}"
    return Place(name, engine, tuple(sorted(secrets, key=len, reverse=True)))
