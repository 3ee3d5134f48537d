"""python -m tests.soak.faults: a retraining whose disk, database, worker or W&B fails in each stage, and then not.

A week's retraining is delivered to a process of its own, in which the fault begins when a stage does: before the
first, in each of the five, and after the last, where models are compared. Then the fault ends, and the retraining is
delivered again until it has ended. What must hold is checked as after a kill; and what the delivery said is a
sentence, whoever reads it.
"""

import io
import multiprocessing
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import psycopg
import typer
from ruamel.yaml import YAML

from algorithms.privacy.ledger import store
from benchmarks.postgres import server
from tasks.retraining.delivery import Work, retrain
from tasks.runs.stages import REFUSED, STAGES, StageFailedError, StageRefusedError, main_of
from tests.soak import kills_check
from tests.soak.kills_child import imported
from tests.soak.kills_place import PARAMS, Place, make
from tests.soak.year import _inside, _prepare
from tests.support.wandb_stand_in import standing_in

MOMENTS = ("before", *STAGES, "after")
_DISK_MB, _PAGE, _MOST_DELIVERIES, _PATIENCE_SECONDS = 48, 4096, 3, 1.0
_LONG = 5
"""Deliveries that a long fault lasts."""
_NO_SENTENCE = re.compile(r"Traceback|\[Errno|Error\(|exit(ed)? (status|with)|File \"")
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Fault:
    """What fails. strike: begins it, in the process of the delivery; mend: ends it; moments: at which it is tried.

    lasts: over how many deliveries, where it is not mended by itself.
    """

    name: str
    place: Place
    strike: Callable[[], object]
    mend: Callable[[], object] = lambda: None
    moments: tuple[str, ...] = MOMENTS
    lasts: int = 1


def deliver(fault: Fault, week: int, moment: str | None, told: Connection) -> None:
    """Delivers the retraining of a week, with the fault from a moment on; the body of a fork."""
    place = fault.place
    os.setsid()
    os.environ |= {"EPSILONFLOW_HOME": str(place.home), "EPSILONFLOW_LEDGER_URL": place.url}
    os.environ |= {"TMPDIR": str(place.home.parent), "WANDB_API_KEY": "0" * 40}
    tempfile.tempdir = None
    store.PATIENCE_SECONDS = _PATIENCE_SECONDS

    def stage(name: str, root: Path) -> None:
        if name == moment:
            fault.strike()
        _stage(name, root)
        if name == STAGES[-1] and moment == "after":
            fault.strike()

    try:
        if moment == "before":
            fault.strike()
        outcome = retrain(Work(place.settings, place.root, stage, lambda _: None), now=place.moment(week))
        told.send((outcome.kind, outcome.message))
    except Exception:
        told.send(("raised", traceback.format_exc()))


def _stage(name: str, root: Path) -> None:
    """A stage as its process would be seen by whoever reads the last line that it wrote."""
    said = io.StringIO()
    try:
        with _inside(root), redirect_stderr(said):
            main_of((lambda: _prepare(root)) if name == "prepare" else import_module(f"tasks.{name}").main)
    except SystemExit:
        line = next(line for line in said.getvalue().splitlines() if line.startswith(REFUSED))
        raise StageRefusedError(line.removeprefix(REFUSED)) from None
    except Exception as error:
        sys.stderr.write(traceback.format_exc())
        raise StageFailedError(f"{name} exited with 1: {error!r}") from error


def tried(fault: Fault) -> Iterator[dict[str, Any]]:
    """A row for each moment: what was said under the fault, how often it was delivered, and what is wrong."""
    week = 0
    _delivered(fault, week, None)
    for moment in fault.moments:
        week += 1
        fault.place.arrive(week)
        before = kills_check.rows_of(fault.place)
        try:
            first = _delivered(fault, week, moment)
            said = [first, *(_delivered(fault, week, None) for _ in range(1, fault.lasts))]
        finally:
            fault.mend()
        while len(said) < fault.lasts + _MOST_DELIVERIES and said[-1][0] not in ("promoted", "kept", "done"):
            said.append(_delivered(fault, week, None))
        rows = kills_check.rows_of(fault.place)
        wrong = kills_check.problems(fault.place, before, rows)
        wrong += kills_check.ended_badly(fault.place, rows, week)
        wrong += [
            f"no sentence: {words}" for kind, words in said if kind == "raised" or _NO_SENTENCE.search(words)
        ]
        wrong += [] if said[-1][0] in ("promoted", "kept", "done") else [f"ended as {said[-1]}"]
        charged = {row["run_id"] for row in rows[len(before) :] if row["kind"] == "reserve"}
        wrong += [] if len(charged) == 1 else [f"{len(charged)} runs charged"]
        yield {
            "fault": fault.name,
            "from": moment,
            "first": first[0],
            "said": first[1].replace(f"{fault.place.home.parent}/", ""),
            "lasted": fault.lasts,
            "deliveries": len(said),
            "last": said[-1][0],
            "charged": len(charged),
            "wrong": "; ".join(wrong),
        }


def _delivered(fault: Fault, week: int, moment: str | None) -> tuple[str, str]:
    fault.place.arrive(week)
    told, child = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=deliver, args=(fault, week, moment, child))
    process.start()
    child.close()
    try:
        kind, words = told.recv()
    except EOFError:
        kind, words = "killed", ""
    process.join()
    return kind, words


@contextmanager
def disks(folder: Path) -> Iterator[list[Fault]]:
    """A small file system that is full but for some room; none where nothing can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        typer.echo("no file system can be mounted here: full disks are left out")
        yield []
        return
    ballast = folder / "ballast"
    try:
        place = make(folder / "place", None)
        yield [
            Fault(
                f"disk full but for {pages * _PAGE // 1024} kB",
                place if pages == 0 else make(folder / f"place-{pages}", None),
                lambda pages=pages: _fill(ballast, pages),  # type: ignore[misc]
                lambda: ballast.unlink(missing_ok=True),
                lasts=lasts,
            )
            for pages, lasts in ((0, _LONG), (8, 1))
        ]
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def _fill(ballast: Path, pages: int) -> None:
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(_PAGE))
    os.truncate(ballast, max(0, ballast.stat().st_size - pages * _PAGE))


@contextmanager
def databases(folder: Path) -> Iterator[list[Fault]]:
    """A server that is restarted, and one that is down; none where there is no PostgreSQL."""
    folder.mkdir()
    with server() as url:
        if url is None:
            typer.echo("no PostgreSQL here: it is left out")
            yield []
            return
        with psycopg.connect(url.replace("+psycopg", "")) as connection:
            connection.autocommit = True
            connection.execute("CREATE DATABASE down")
            data = str(connection.execute("SHOW data_directory").fetchone()[0])  # type: ignore[index]

        def control(what: str) -> None:
            found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
            command = [str(found[-1]) if found else "pg_ctl", "-D", data, "-w", *what.split()]
            user = pwd.getpwnam("postgres").pw_uid if os.geteuid() == 0 else None
            log = ["-l", f"{Path(data).parent}/log"] if what != "stop -m immediate" else []
            quiet = subprocess.DEVNULL
            groups: list[int] | None = None if user is None else []
            subprocess.run(
                [*command, *log],
                check=True,
                user=user,
                extra_groups=groups,
                cwd="/",
                stdout=quiet,
                stderr=quiet,
            )

        try:
            yield [
                Fault(
                    "PostgreSQL restarted",
                    make(folder / "restarted", url),
                    lambda: control("restart -m immediate"),
                ),
                Fault(
                    "PostgreSQL down",
                    make(folder / "down", url.removesuffix("postgres") + "down"),
                    lambda: control("stop -m immediate"),
                    lambda: control("restart -m immediate"),  # "start" would forget its port
                    lasts=_LONG,
                ),
            ]
        finally:
            with suppress(subprocess.CalledProcessError):
                control("stop -m immediate")


@contextmanager
def workers(folder: Path) -> Iterator[list[Fault]]:
    """A worker that is lost as a stage begins."""
    yield [Fault("worker lost", make(folder, None), lambda: os.kill(os.getpid(), signal.SIGKILL))]


@contextmanager
def tracking(folder: Path) -> Iterator[list[Fault]]:
    """W&B online, at servers that fail: asked in training, report and promotion."""
    with ExitStack() as servers:
        urls = {
            "W&B unreachable": "http://127.0.0.1:9",
            "W&B answers 500": servers.enter_context(standing_in(fails=True)).known.url,
            "W&B hangs": servers.enter_context(standing_in(hangs=True)).known.url,
        }
        faults = []
        for name, url in urls.items():
            place = make(folder / name.split()[-1], None)
            online = PARAMS | {"tracking": {"mode": "online"}}

            def strike(url: str = url) -> None:
                os.environ["WANDB_BASE_URL"] = url

            YAML(typ="safe", pure=True).dump(online, place.root / "params.yaml")
            faults.append(Fault(name, place, strike, moments=("before",)))
        os.environ["WANDB_BASE_URL"] = urls["W&B unreachable"]
        yield faults


KINDS = {"disk": disks, "postgresql": databases, "worker": workers, "wandb": tracking}


def main(
    file: Annotated[Path, typer.Option(help="The table to write.")] = Path("docs/results/faults.csv"),
    only: Annotated[str, typer.Option(help="Kinds of faults, with commas.")] = ",".join(KINDS),
) -> None:
    """Try every fault at every moment; exit status 1 where something was wrong."""
    imported()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        for kind in only.split(","):
            with KINDS[kind](Path(name, kind)) as faults:
                for fault in faults:
                    for row in tried(fault):
                        rows.append(row)
                        typer.echo(" | ".join(str(value) for value in row.values()))
                        pd.DataFrame(rows).to_csv(file, index=False)
    raise typer.Exit(int(any(row["wrong"] for row in rows)))


if __name__ == "__main__":
    typer.run(main)
