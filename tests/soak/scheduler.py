"""python -m tests.soak.scheduler: what goes wrong with schedulers, on a real Prefect server, and what it cost.

A clone of this checkout's last commit gets the example of weekly visits, a server and a worker. Each scenario is a
retraining of its own name; counted are the runs that the ledger reserved, settled and still holds open after it.
"""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import pandas as pd
import psutil
import typer

from tests.soak.scheduler_place import retraining_file, set_seed, set_steps
from tests.soak.scheduler_site import Site, site_of

_LATE_RUNS, _LONG, _SHORT = 12, 3_000, 20
_FLOW = ("prefect.engine", "prefect.flow_engine")


def twelve_late_runs(site: Site) -> list[str]:
    """Twelve runs that are all due in the past are created at once."""
    return site.ended(*(site.deliver("late.yaml", late=60 + number) for number in range(_LATE_RUNS)))


def retried_by_hand(site: Site) -> list[str]:
    """A run that is completed is set back to scheduled, as the page's retry does: it is delivered twice."""
    run = site.deliver("twice.yaml")
    first = site.ended(run)
    site.post(
        f"/flow_runs/{run}/set_state",
        {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True},
    )
    time.sleep(2)
    return first + site.ended(run)


def worker_killed(site: Site) -> list[str]:
    """A worker and all that it started is killed in training; another delivers the retraining again."""
    set_steps(site.root, _LONG)
    site.deliver("killed.yaml")
    site.until_open()
    site.kill("worker", with_children=True)
    for process in _orphans(site):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    site.command("dvc", "status")
    site.start_worker()
    _free_the_slot(site)
    set_steps(site.root, _SHORT)
    return site.ended(site.deliver("killed.yaml"))


def worker_terminated(site: Site) -> list[str]:
    """A worker is asked to end (SIGTERM) in training, as by a machine that shuts down; then another delivers again."""
    set_steps(site.root, _LONG)
    run = site.deliver("terminated.yaml")
    site.until_open()
    site.processes["worker"].terminate()
    site.until(lambda: not list(_at_work(site)))
    first = [site.state(run)]
    site.kill("worker", with_children=True)  # where it has not ended by itself
    site.start_worker()
    _free_the_slot(site)
    set_steps(site.root, _SHORT)
    return first + site.ended(site.deliver("terminated.yaml"))


def flow_terminated(site: Site) -> list[str]:
    """The process of a flow is asked to end (SIGTERM) in training, as by a container that is stopped."""
    set_steps(site.root, _LONG)
    run = site.deliver("stopped.yaml")
    site.until_open()
    for flow in _of_the_checkout(site, *_FLOW):
        flow.terminate()
    site.until(lambda: not list(_at_work(site)))
    first = [site.state(run)]
    _free_the_slot(site)
    set_steps(site.root, _SHORT)
    return first + site.ended(site.deliver("stopped.yaml"))


def flow_cancelled(site: Site) -> list[str]:
    """A flow is cancelled in training; then it is delivered again."""
    set_steps(site.root, _LONG)
    run = site.deliver("cancelled.yaml")
    site.until_open()
    site.post(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    first = site.ended(run)
    set_steps(site.root, _SHORT)
    return first + site.ended(site.deliver("cancelled.yaml"))


def server_restarted(site: Site) -> list[str]:
    """The server is killed in training and starts again; then the retraining is delivered again."""
    set_steps(site.root, _LONG)
    run = site.deliver("server.yaml")
    site.until_open()
    site.kill("server", with_children=True)
    site.start_server()
    first = site.ended(run)
    set_steps(site.root, _SHORT)
    return first + site.ended(site.deliver("server.yaml"))


def two_workers(site: Site) -> list[str]:
    """Two workers look for work while two runs are due."""
    site.start_worker("other")
    found = site.ended(site.deliver("workers.yaml"), site.deliver("workers.yaml"))
    site.kill("other", with_children=True)
    return found


def dvc_again(site: Site) -> list[str]:
    """`dvc repro` with nothing changed, after its results were deleted, and `dvc exp run`."""
    first = site.command("dvc", "repro")
    shutil.rmtree(site.root / "artifacts")
    commands = (["dvc", "repro"], ["dvc", "exp", "run"])
    return [_ended_well(done) for done in (first, *(site.command(*command) for command in commands))]


def old_commit(site: Site) -> list[str]:
    """An old commit is checked out, and a retraining that was done is delivered again."""
    site.command("git", "stash", "--include-untracked")
    site.command("git", "checkout", "--quiet", "before")
    retraining_file(site.root, "workers")
    states = site.ended(site.deliver("workers.yaml"))
    (site.root / "workers.yaml").unlink()
    site.command("git", "checkout", "--quiet", "--force", "main")
    site.command("git", "stash", "pop")
    return states


def forced(site: Site) -> list[str]:
    """`dvc repro -f train`, which spends: without a person who agrees it is refused, with one it is charged."""
    refused = site.command("dvc", "repro", "-f", "-s", "train")
    agreed = site.command("dvc", "repro", "-f", "-s", "train", EPSILONFLOW_SPEND_AGAIN="yes")
    return [_ended_well(refused), _ended_well(agreed)]


SCENARIOS = (
    twelve_late_runs,
    retried_by_hand,
    worker_killed,
    worker_terminated,
    flow_terminated,
    flow_cancelled,
    server_restarted,
    two_workers,
    dvc_again,
    old_commit,
    forced,
)


RETRAINED = SCENARIOS[:8]


def _ended_well(done: subprocess.CompletedProcess[str]) -> str:
    refusals = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("refused: ")]
    return refusals[0][:60] if refusals else "ok" if done.returncode == 0 else f"exit {done.returncode}"


def _of_the_checkout(site: Site, *words: str) -> Iterator[psutil.Process]:
    """The processes at work in the checkout whose command has one of these words."""
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if process.info["cwd"] == str(site.root) and {*words} & {*(process.info["cmdline"] or [])}:
            yield process


def _orphans(site: Site) -> Iterator[psutil.Process]:
    """Stages of the checkout that outlived their flow."""
    return _of_the_checkout(site, "dvc", "tasks.train")


def _at_work(site: Site) -> Iterator[psutil.Process]:
    """Flows of the checkout and their stages."""
    return _of_the_checkout(site, *_FLOW, "dvc", "tasks.train")


def _free_the_slot(site: Site) -> None:
    """Marks runs whose process is gone as crashed: Prefect holds their place for minutes otherwise."""
    running = site.post(
        "/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}}}
    )
    for run in running:
        site.post(f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CRASHED"}, "force": True})


def main(
    file: Annotated[Path, typer.Option(help="The table to write.")] = Path(
        "comparisons/results/scheduler.csv"
    ),
    only: Annotated[str, typer.Option(help="Names of scenarios, with commas.")] = "",
) -> None:
    """Run the scenarios one after the other."""
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, site_of(Path(folder)) as site:
        for seed, scenario in enumerate(SCENARIOS):
            if only and scenario.__name__ not in only.split(","):
                continue
            before, began = site.runs, time.monotonic()
            for name in (
                "late",
                "twice",
                "killed",
                "terminated",
                "stopped",
                "cancelled",
                "server",
                "workers",
            ):
                retraining_file(site.root, name)
            if scenario in RETRAINED:
                set_seed(site.root, seed)  # so that DVC has not done it already
            states = scenario(site)
            fresh = {name: status for name, status in site.runs.items() if name not in before}
            rows.append(
                {
                    "scenario": scenario.__name__,
                    "ended": json.dumps({state: states.count(state) for state in states}),
                    "charged": len(fresh),
                    "open": sum(status == "open" for status in site.runs.values()),
                    "seconds": round(time.monotonic() - began),
                }
            )
            typer.echo(json.dumps(rows[-1]))
            pd.DataFrame(rows).to_csv(file, index=False)


if __name__ == "__main__":
    typer.run(main)
