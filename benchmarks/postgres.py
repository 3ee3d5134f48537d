"""Temporary PostgreSQL servers for measurements and tests, where its binaries are installed."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

_START_SECONDS = 60


@contextmanager
def server(*, password: str | None = None, durable: bool = True) -> Iterator[str | None]:
    """The superuser's URL of a new server on a free port; None where PostgreSQL is not installed.

    password: the superuser's; by default none is needed. durable: wait for the disk like a production server.
    Raises KeyError if run as root where there is no user postgres.
    """
    initdb, postgres = _binary("initdb"), _binary("postgres")
    if initdb is None or postgres is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ledger-", dir="/tmp") as folder:
        user = _user(folder)
        options, run = ([], []) if durable else (["--no-sync"], ["-c", "fsync=off"])
        login = [*_login(password, Path(folder, "password")), *options]
        _start([initdb, "-D", f"{folder}/data", "--username=owner", *login], folder, user).wait()
        port = _free_port()
        listen = ["-h", "127.0.0.1", "-p", str(port), "-k", folder]
        process = _start([postgres, "-D", f"{folder}/data", *run, *listen], folder, user)
        secret = "" if password is None else f":{quote(password, safe='')}"
        try:
            yield _once_ready(f"postgresql+psycopg://owner{secret}@127.0.0.1:{port}/postgres")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)


def _login(password: str | None, file: Path) -> Sequence[str]:
    if password is None:
        return ["--auth=trust"]
    file.write_text(password)
    return [f"--pwfile={file}", "--auth=scram-sha-256"]


def _binary(name: str) -> str | None:
    versions = sorted(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")))
    return versions[-1] if versions else shutil.which(name)


def _user(folder: str) -> int | None:
    """PostgreSQL refuses to run as root, so root gives the folder to the user postgres."""
    if os.geteuid() != 0:
        return None
    user = pwd.getpwnam("postgres").pw_uid
    os.chown(folder, user, -1)
    return user


def _start(command: list[str], folder: str, user: int | None) -> "subprocess.Popen[bytes]":
    quiet = subprocess.DEVNULL
    groups: list[int] | None = None if user is None else []
    return subprocess.Popen(command, user=user, extra_groups=groups, cwd=folder, stdout=quiet, stderr=quiet)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _once_ready(url: str) -> str:
    deadline, engine = time.monotonic() + _START_SECONDS, sa.create_engine(url, poolclass=sa.NullPool)
    while True:
        try:
            engine.connect().close()
            return url
        except DBAPIError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
