"""A real Prefect server on a free port of this machine, ended by its process id."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
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

_UP_SECONDS, _GRACE_SECONDS = 90, 5
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


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


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
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(database, folder)
    prefect = str(Path(sys.executable).parent / "prefect")
    command = [prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    variables = os.environ | {"PREFECT_API_URL": url, "PREFECT_HOME": str(folder), _PROACTIVE: "PT2S"}
    with (folder / "log").open("wb") as log, ended(command, env=variables, stdout=log, stderr=log) as process:
        _wait_for(f"{url}/health", process, folder / "log")
        yield url


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _UP_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if HTTP.get(url, timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.3)
    pytest.fail(f"the Prefect server did not come up:\n{log.read_text()}")
