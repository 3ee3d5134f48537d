"""Places for a ledger: a SQLite file, and a PostgreSQL server that is started here and stopped at the end."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

PASSWORD = "s3cret%40word"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[sa.URL]:
    """A PostgreSQL server of our own on a free port; the URL of its superuser."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    initdb, postgres = _binary("initdb"), _binary("postgres")
    with tempfile.TemporaryDirectory(prefix="ledger-", dir="/tmp") as folder:
        account = _account(folder)
        Path(folder, "password").write_text("s3cret@word")
        login = ["--username=owner", f"--pwfile={folder}/password", "--auth=scram-sha-256"]
        _spawn([initdb, "-D", f"{folder}/data", "--no-sync", *login], folder, account).wait()
        port = _free_port()
        listen = ["-h", "127.0.0.1", "-p", str(port), "-k", folder]
        process = _spawn([postgres, "-D", f"{folder}/data", "-c", "fsync=off", *listen], folder, account)
        try:
            yield _wait_for(sa.make_url(f"postgresql+psycopg://owner:{PASSWORD}@127.0.0.1:{port}/postgres"))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)


def _binary(name: str) -> str:
    versions = sorted(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")))
    found = versions[-1] if versions else shutil.which(name)
    return found or pytest.skip(f"PostgreSQL's {name} is not installed")


def _account(folder: str) -> int | None:
    """PostgreSQL refuses to run as root, so root hands the folder to the user postgres."""
    if os.geteuid() != 0:
        return None
    try:
        user = pwd.getpwnam("postgres").pw_uid
    except KeyError:
        pytest.skip("running as root, and there is no user postgres to start a server as")
    os.chown(folder, user, -1)
    return user


def _spawn(command: list[str], folder: str, user: int | None) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    groups: list[int] | None = None if user is None else []
    return subprocess.Popen(command, user=user, extra_groups=groups, cwd=folder, stdout=quiet, stderr=quiet)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(url: sa.URL) -> sa.URL:
    deadline = time.monotonic() + 60
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    while True:
        try:
            engine.connect().close()
            return url
        except DBAPIError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a ledger that does not exist yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/home/ledger.sqlite"
    admin: sa.URL = request.getfixturevalue("postgres_server")
    name = f"ledger_{time.monotonic_ns()}"
    with sa.create_engine(admin, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool).connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    return admin.set(database=name).render_as_string(hide_password=False)
