"""`python -m flows.server start` and `stop`: a Prefect server and a worker of this checkout in the background.

A file under `.prefect` holds each process's id and start time. Only these processes are ever ended.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import typer

from flows.cli.terminal import SETTINGS, say

NAMES = ("worker", "server")
"""In the order in which they are ended, since a worker without its server does not end by itself."""
POOL = "local-pool"

_PREFECT = str(Path(sys.executable).parent / "prefect")
_UP_SECONDS, _GRACE_SECONDS, _POLL_SECONDS = 120.0, 20.0, 0.3

app = typer.Typer(**SETTINGS, help="A Prefect server and a worker on this machine.")


@dataclass(frozen=True)
class Known:
    """A process, identified by its id and its start time, since the system reuses ids."""

    pid: int
    began: float

    def process(self) -> psutil.Process | None:
        """The process, or None if it has ended."""
        try:
            process = psutil.Process(self.pid)
            is_same = process.create_time() == self.began and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if is_same else None


@app.command()
def start(port: Annotated[int, typer.Option(help="Port of the server on 127.0.0.1.")] = 4200) -> None:
    """Start a server and a worker if they are not running, and deploy the flows of prefect.yaml."""
    url = f"http://127.0.0.1:{port}/api"
    os.environ["PREFECT_API_URL"] = url
    folder = Path(".prefect")
    folder.mkdir(exist_ok=True)
    say("Starting a Prefect server; this takes a minute or two ...")
    _spawn(folder, "server", "server", "start", "--host", "127.0.0.1", "--port", str(port))
    _wait_for(f"{url}/health", folder)
    for command in (
        ["work-pool", "create", POOL, "--type", "process", "--overwrite"],
        ["--no-prompt", "deploy", "--all"],
    ):
        done = subprocess.run([_PREFECT, *command], capture_output=True, text=True)
        if done.returncode:
            say(done.stdout + done.stderr, error=True)
            raise typer.Exit(1)
    _spawn(folder, "worker", "worker", "start", "--pool", POOL, "--type", "process")
    say(f"The server is at http://127.0.0.1:{port}; a worker runs beside it. Their logs are in {folder}.")
    say(f"To use prefect here: export PREFECT_API_URL={url}")


@app.command()
def stop() -> None:
    """Stop the worker and the server. Runs of flows continue."""
    for name in NAMES:
        file = Path(".prefect", f"{name}.pid")
        known = _known(file)
        if known is not None:
            _end(known)
        say(f"The {name} {'has stopped' if known else 'is not running'}.")
        file.unlink(missing_ok=True)


def _spawn(folder: Path, name: str, *arguments: str) -> None:
    file = folder / f"{name}.pid"
    if _known(file) is not None:
        return
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [_PREFECT, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    known = Known(process.pid, psutil.Process(process.pid).create_time())
    file.write_text(json.dumps(asdict(known)) + "\n", encoding="utf-8")


def _known(file: Path) -> psutil.Process | None:
    if not file.is_file():
        return None
    return Known(**json.loads(file.read_text(encoding="utf-8"))).process()


def _wait_for(url: str, folder: Path) -> None:
    deadline = time.monotonic() + _UP_SECONDS
    while time.monotonic() < deadline and _known(folder / "server.pid") is not None:
        try:
            with urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(_POLL_SECONDS)
    say(f"refused: the server did not start; see {folder / 'server.log'} for the reason.", error=True)
    raise typer.Exit(1)


def _end(process: psutil.Process) -> None:
    """End a process and its children. Runs of flows have their own sessions and continue."""
    members = [process, *process.children(recursive=True)]
    own = [member for member in members if _same_session(member, process)]
    for member in own:
        with suppress(psutil.NoSuchProcess):
            member.terminate()
    _, left = psutil.wait_procs(own, timeout=_GRACE_SECONDS)
    for member in left:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(left, timeout=_GRACE_SECONDS)


def _same_session(member: psutil.Process, process: psutil.Process) -> bool:
    try:
        return os.getsid(member.pid) == os.getsid(process.pid)
    except ProcessLookupError:
        return False


if __name__ == "__main__":
    app()
