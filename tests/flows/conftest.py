"""A real Prefect server on a free port of this machine, ended by its process id."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from filelock import FileLock
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, temporary_settings
from prefect.utilities.asyncutils import run_sync_in_worker_thread

from tests.support.quick_work import quick_work
from tests.support.waiting import before_long

__all__ = ["HTTP", "ended", "free_port", "get", "post", "quick_work", "server"]

_GRACE_SECONDS = 5
HTTP = httpx.Client(verify=False, timeout=60.0, limits=httpx.Limits(max_keepalive_connections=0))
"""For servers of this machine: to read the certificates of others takes longer than a request.

A server on SQLite may be busy with events for longer than the usual 5 s. It closes connections that are kept, maybe
just when the next request is sent.
"""
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


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The file `prefect.db` of a server that has not run yet, to be copied: its tables take seconds to make.

    The first process of this test run that asks makes it for all.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "database"
    file = folder / "prefect.db"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # where another process has failed
            folder.mkdir()
            from prefect.server.database.alembic_commands import alembic_upgrade  # which takes a moment

            with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{file}"}):
                asyncio.run(run_sync_in_worker_thread(alembic_upgrade))
            (folder / "done").touch()
    return file


@pytest.fixture(scope="module")
def server(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the server's API."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(database, folder)
    prefect = str(Path(sys.executable).parent / "prefect")
    with free_port() as port, (folder / "log").open("wb") as log:
        url = f"http://127.0.0.1:{port}/api"
        command = [prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        variables = os.environ | {"PREFECT_API_URL": url, "PREFECT_HOME": str(folder), _PROACTIVE: "PT2S"}
        with ended(command, env=variables, stdout=log, stderr=log) as process:
            before_long(lambda: process.poll() is not None or _answers(f"{url}/health"))
            if process.poll() is not None or not _answers(f"{url}/health"):
                pytest.fail(f"the Prefect server did not come up:\n{(folder / 'log').read_text()}")
            yield url


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return HTTP.get(url, timeout=5).is_success
    return False
