"""A checkout with a Prefect server and workers of its own, for scenarios that kill them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import psutil

from algorithms.privacy.ledger import Ledger
from tests.soak.scheduler_place import clone

_PREFECT = str(Path(sys.executable).parent / "prefect")
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}
_WAIT_SECONDS, _POLL_SECONDS, _TRIES = 400.0, 0.5, 60


@dataclass
class Site:
    """A checkout with its server and its workers."""

    root: Path
    home: Path
    port: int
    processes: dict[str, psutil.Process] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Of the server's API."""
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def environment(self) -> dict[str, str]:
        """Of what runs here."""
        own = {"EPSILONFLOW_HOME": str(self.home), "PREFECT_API_URL": self.url}
        own |= {"PREFECT_HOME": str(self.home / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        own |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return kept | own | {"OMP_NUM_THREADS": "1", "DVC_NO_ANALYTICS": "1", "DO_NOT_TRACK": "1"}

    def command(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end."""
        environment = self.environment | variables
        return subprocess.run(
            arguments,
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def spawn(self, name: str, *arguments: str) -> None:
        """Start a Prefect command in the background."""
        with (self.home / f"{name}.log").open("ab") as log:
            started = subprocess.Popen(
                [_PREFECT, *arguments], cwd=self.root, env=self.environment, stdout=log, stderr=log
            )
        self.processes[name] = psutil.Process(started.pid)

    def start_server(self) -> None:
        """Start the server and wait for it."""
        self.spawn("server", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        self.until(lambda: self._answers())

    def start_worker(self, name: str = "worker") -> None:
        """Start a worker."""
        self.spawn(name, "worker", "start", "--pool", "local-pool", "--type", "process", "--name", name)

    def kill(self, name: str, *, with_children: bool) -> None:
        """SIGKILL for a process, and for all that it started."""
        process = self.processes.pop(name)
        members = [process, *(process.children(recursive=True) if with_children else [])]
        for member in members:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)
        psutil.wait_procs(members, timeout=10)

    def deliver(self, file: str, *, late: int = 0) -> str:
        """Create a run of the deployment, due some minutes ago; returns its id."""
        deployment = self.get("/deployments/name/retrain/retrain")
        due = pd.Timestamp.now("UTC") - pd.Timedelta(minutes=late)
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": due.isoformat()}}
        body = {"parameters": {"file": file}, "state": state}
        return str(self.post(f"/deployments/{deployment['id']}/create_flow_run", body)["id"])

    def get(self, path: str) -> Any:
        """What the server answers."""
        return self._asked("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """What the server answers."""
        return self._asked("POST", path, json=body)

    def _asked(self, method: str, path: str, **content: Any) -> Any:
        """The answer; a server that is busy, or that is starting, is asked again."""
        for _ in range(_TRIES):
            with suppress(httpx.TransportError):
                answer = httpx.request(method, self.url + path, timeout=30, **content)
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    return answer.raise_for_status().json()
            time.sleep(_POLL_SECONDS)
        raise TimeoutError("the server does not answer")

    def ended(self, *runs: str) -> list[str]:
        """Waits for the end of runs; the names of their states, with the message of the last."""
        self.until(lambda: all(self.get(f"/flow_runs/{run}")["state_type"] in _ENDED for run in runs))
        return [self.state(run) for run in runs]

    def state(self, run: str) -> str:
        """The name of a run's state."""
        return str(self.get(f"/flow_runs/{run}")["state_name"])

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition; raises TimeoutError after minutes."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("a scenario did not come to its end")
            time.sleep(_POLL_SECONDS)

    def _answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        return False

    @property
    def runs(self) -> dict[str, str]:
        """What the ledger says of each run."""
        ledger = Ledger.open(f"sqlite:///{self.home}/ledger.sqlite")
        names = dict.fromkeys(row.run_id for row in ledger.history() if row.run_id)
        return {name: str(ledger.status(name)) for name in names}

    def until_open(self) -> None:
        """Waits until a run holds a reservation, and a moment more, so that it trains."""
        self.until(lambda: "open" in self.runs.values())
        time.sleep(2)


@contextmanager
def site_of(folder: Path) -> Iterator[Site]:
    """A checkout with a server and a worker, ended by their ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    site = Site(folder / "checkout", folder / "home", port)
    site.home.mkdir()
    clone(Path.cwd(), site.root)
    try:
        site.start_server()
        for command in (
            ["work-pool", "create", "local-pool", "--type", "process"],
            ["--no-prompt", "deploy", "--all"],
        ):
            site.command(_PREFECT, *command).check_returncode()
        site.start_worker()
        yield site
    finally:
        for name in sorted(site.processes, reverse=True):
            with suppress(psutil.NoSuchProcess):
                site.kill(name, with_children=True)
