"""New ledgers in SQLite are what the migrations made once: Alembic takes a hundredth of a second for each."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from algorithms.privacy.ledger import Ledger
from algorithms.privacy.ledger.store import Store

_MIGRATE = Store.migrate


@cache
def _statements() -> tuple[str, ...]:
    """What makes an empty ledger, as the migrations do."""
    with TemporaryDirectory() as folder:
        Ledger.open(f"sqlite:///{folder}/ledger.sqlite")
        with closing(sqlite3.connect(f"{folder}/ledger.sqlite")) as made:
            return tuple(made.iterdump())[1:-1]  # without BEGIN and COMMIT


def _migrate(store: Store) -> None:
    url = store.database.engine.url
    if url.drivername.startswith("sqlite") and url.database and not Path(url.database).stat().st_size:
        with suppress(sqlite3.Error), closing(sqlite3.connect(url.database, isolation_level=None)) as new:
            new.execute("BEGIN IMMEDIATE")  # so that no other process is at it
            if not new.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _statements():
                    new.execute(statement)
            new.execute("COMMIT")
    _MIGRATE(store)


@contextmanager
def empty_ledgers_made_once() -> Iterator[None]:
    """In the block; an error is left to the migrations, which begin anew."""
    with pytest.MonkeyPatch.context() as patch:
        _statements()
        patch.setattr(Store, "migrate", _migrate)
        yield
