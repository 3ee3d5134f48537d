"""A real Prefect server on a free port of this machine, ended by its process id."""

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import prefect
import pytest
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_HOME, temporary_settings

from flows.server import start_server, stop_server
from tests.support.quick_work import quick_work
from tests.support.waiting import HANG_SECONDS, before_long

__all__ = ["HTTP", "PATIENTLY", "ended", "free_port", "get", "post", "quick_work", "server"]

_GRACE_SECONDS = 5
HTTP = httpx.Client(verify=False, timeout=HANG_SECONDS, limits=httpx.Limits(max_keepalive_connections=0))
"""For servers of this machine: to read the certificates of others takes longer than a request.

It closes connections that are kept, maybe just when the next request is sent. On SQLite it may also answer nobody for
60 s: its only event loop looks for garbage, finds a statement of a connection that waits for the database's lock, and
waits for that connection; who has the lock waits for the event loop, until SQLite gives up.
"""
PATIENTLY = {PREFECT_API_REQUEST_TIMEOUT: HANG_SECONDS}
"""For Prefect's own clients, which give up after 60 s."""
_PROACTIVE = "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY"
"""After how long, in ISO 8601, the server looks again for what has not happened."""


@contextmanager
def ended(command: list[str], **where: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the time of the block; then it is asked to end, and killed where it does not."""
    process = subprocess.Popen(command, **where)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def free_port() -> Iterator[int]:
    """A port of this machine for a server to listen on, which no other program is given within the block."""
    with socket.socket() as holder:
        holder.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do, so that one may share the port
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def get(url: str) -> Any:
    """What the server answers; asked again where it was too busy to."""
    answers = list[httpx.Response]()

    def is_answered() -> bool:
        with suppress(httpx.TransportError):
            answers.append(HTTP.get(url))
        return bool(answers) and answers[-1].status_code != httpx.codes.SERVICE_UNAVAILABLE

    assert before_long(is_answered)
    return answers[-1].raise_for_status().json()


def post(url: str, body: Any) -> Any:
    """What the server answers; asked again after a 503, as Prefect's client does: its database was busy."""
    answers = [HTTP.post(url, json=body)]

    def is_answered() -> bool:
        if answers[-1].status_code == httpx.codes.SERVICE_UNAVAILABLE:
            answers.append(HTTP.post(url, json=body))
        return answers[-1].status_code != httpx.codes.SERVICE_UNAVAILABLE

    assert before_long(is_answered)
    answer = answers[-1].raise_for_status()
    return answer.json() if answer.content else None


@pytest.fixture(autouse=True)
def same_module_path() -> Iterator[None]:
    """Prefect adds a flow's folder to the path of modules, in which later tests would find its checkout's packages."""
    before = sys.path.copy()
    yield
    sys.path[:] = before


@pytest.fixture(scope="module")
def server_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's files are, with the note of a server that has died, which hinders none."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "server.pid").write_text(str(os.getpid()))
    return folder


@pytest.fixture(scope="module")
def server(server_home: Path, pytestconfig: pytest.Config) -> Iterator[str]:
    """The URL of the API of a server that runs in the background, started and ended as by `epsilonflow server`.

    Half of its start are Prefect's own migrations of a new database, of which a later run of the tests has the result.
    """
    database = server_home / "prefect.db"
    migrated = pytestconfig.rootpath / f".pytest_cache/prefect-{prefect.__version__}.db"
    if migrated.exists():
        shutil.copyfile(migrated, database)
    with pytest.MonkeyPatch.context() as patch, free_port() as port:
        patch.setenv("PREFECT_HOME", str(server_home))
        patch.setenv(_PROACTIVE, "PT2S")
        patch.setenv("PREFECT_SERVER_UI_ENABLED", "false")  # a copy of its files would be made for this home
        with temporary_settings({PREFECT_HOME: server_home}):
            url = start_server(port, HANG_SECONDS)
    if not migrated.exists():
        _keep(database, migrated)
    try:
        yield url
    finally:
        with temporary_settings({PREFECT_HOME: server_home}):
            assert stop_server(HANG_SECONDS)
        assert not (server_home / "server.pid").exists()


def _keep(database: Path, copy: Path) -> None:
    """Copy a database that is in use, at once for all who look for the copy."""
    copy.parent.mkdir(exist_ok=True)
    part = copy.with_name(f"{copy.name}.{os.getpid()}")
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(part)) as target:
        source.backup(target)
    part.replace(copy)
