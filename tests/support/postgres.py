"""A PostgreSQL server of the tests' own; where it is not installed, its tests are skipped, as `-ra` shows."""

import os
import pwd
import secrets
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from benchmarks.postgres import server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[sa.URL]:
    """A PostgreSQL server of our own on a free port; the URL of its superuser."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    if os.geteuid() == 0 and "postgres" not in {user.pw_name for user in pwd.getpwall()}:
        pytest.skip("running as root, and there is no user postgres to start a server as")
    with server(password="s3cret@word", durable=False) as url:
        yield sa.make_url(url or pytest.skip("PostgreSQL is not installed"))


@pytest.fixture
def new_database(postgres_server: sa.URL) -> Callable[..., sa.URL]:
    """Makes a database on the server, with options of CREATE DATABASE; returns the superuser's URL of it."""

    def made(options: str = "") -> sa.URL:
        name = f"ledger_{secrets.token_hex(8)}"
        engine = sa.create_engine(postgres_server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name} {options}")
        return postgres_server.set(database=name)

    return made
