"""python -m tests.soak.faults: a retraining whose disk, database, worker or W&B fails in each stage, and then not.

A week's retraining is delivered to a process of its own, in which the fault begins when a stage does: before the
first, in each of the five, and after the last, where models are compared. Then the fault ends, and the retraining is
delivered again until it has ended. What must hold is checked as after a kill; and what the delivery said is a
sentence, whoever reads it. `--weeks 52` is a year at one place, with a trouble of its data in each week besides.
"""

import multiprocessing
import os
import pwd
import random
import re
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import psycopg
import typer
from ruamel.yaml import YAML

from benchmarks.postgres import server
from tasks.retraining.delivery import DeliveryWork, retrain
from tasks.runs.dvc_stages import STAGES
from tests.soak import kills_check, troubles
from tests.soak.kills_child import imported
from tests.soak.kills_place import PARAMS, Place, make
from tests.soak.one_process import enter, run_stage
from tests.soak.troubles import Trouble
from tests.support.wandb_stand_in import standing_in

MOMENTS = ("before", *STAGES, "after")
_DISK_MB, _YEAR_MB, _PAGE, _MAX_DELIVERIES = 48, 256, 4096, 3
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
    enter(place)
    said: list[str] = []

    def stage(name: str, root: Path) -> None:
        if name == moment:
            fault.strike()
        run_stage(name, root)
        if name == STAGES[-1] and moment == "after":
            fault.strike()

    try:
        if moment == "before":
            fault.strike()
        outcome = retrain(
            DeliveryWork(place.settings, place.root, stage, said.append), now=place.moment(week)
        )
        told.send((outcome.kind, outcome.message, said))
    except Exception:
        told.send(("raised", traceback.format_exc(), said))


def tried(fault: Fault) -> Iterator[dict[str, Any]]:
    """A row for each moment, in a week of its own."""
    _delivered(fault, 0, None)
    for week, moment in enumerate(fault.moments, 1):
        yield _under(fault, week, moment)


def a_year(faults: list[Fault], weeks: int, draw: random.Random) -> Iterator[dict[str, Any]]:
    """A row for each week of one place: a trouble, then a fault at random at a moment at random."""
    _delivered(faults[0], 0, None)
    following = troubles.in_turn(draw)
    for week in range(1, weeks + 1):
        fault, trouble = draw.choice(faults), following()
        lasts = 1 if fault.lasts == 1 else draw.randint(1, fault.lasts)
        begun = _troubled(fault, trouble, week)
        if begun["then"] in troubles.ENDED:
            yield {"week": week} | begun
            continue
        row = _under(replace(fault, lasts=lasts), week, draw.choice(fault.moments))
        both = {"trouble": begun["trouble"], "then": begun["then"]} | row
        yield {"week": week} | both | {"wrong": "; ".join(filter(None, (begun["wrong"], row["wrong"])))}


def _troubled(fault: Fault, trouble: Trouble, week: int) -> dict[str, Any]:
    """What a delivery said in a trouble, which is mended then, and what is wrong."""
    place = fault.place
    place.arrive(week)
    before = kills_check.rows_of(place)
    trouble.begin(place, week)
    params = (place.root / "params.yaml").read_text()
    kind, words, said = _delivered(fault, week, None)
    rows = kills_check.rows_of(place)
    trouble.end(place, week)
    wrong = [*kills_check.problems(place, before, rows), *trouble.wrong(rows[len(before) :])]
    charged = kills_check.charged_to_retrainings(rows[len(before) :])
    if kind not in trouble.kinds:
        wrong.append(f"ended as {kind}: {words}")
    elif trouble.words not in " ".join([*said, words]):
        wrong.append(f"did not say {trouble.words!r}: {words}")
    wrong += [] if not _NO_SENTENCE.search(words) else [f"no sentence: {words}"]
    wrong += [] if (place.root / "params.yaml").read_text() == params else ["params.yaml was changed"]
    if kind in troubles.ENDED:
        wrong += kills_check.ended_badly(place, rows, week)
        wrong += [] if len(charged) == 1 else [f"{len(charged)} runs charged"]
        wrong += [words for run_id in charged for words in troubles.other_recipe(place, run_id)]
    elif charged:
        wrong.append(f"{len(charged)} runs charged in a trouble")
    return {
        **{"trouble": trouble.name, "then": kind, "fault": "", "from": "", "first": kind},
        "said": words.replace(f"{place.home.parent}/", ""),
        **{"lasted": 0, "deliveries": 1, "last": kind, "charged": len(charged), "wrong": "; ".join(wrong)},
    }


def _under(fault: Fault, week: int, moment: str) -> dict[str, Any]:
    """What was said under the fault, how often the week was delivered, and what is wrong."""
    fault.place.arrive(week)
    before = kills_check.rows_of(fault.place)
    try:
        first = _delivered(fault, week, moment)
        said = [first, *(_delivered(fault, week, None) for _ in range(1, fault.lasts))]
    finally:
        fault.mend()
    while len(said) < fault.lasts + _MAX_DELIVERIES and said[-1][0] not in ("promoted", "kept", "done"):
        said.append(_delivered(fault, week, None))
    rows = kills_check.rows_of(fault.place)
    wrong = kills_check.problems(fault.place, before, rows)
    wrong += kills_check.ended_badly(fault.place, rows, week)
    wrong += [
        f"no sentence: {words}" for kind, words, _ in said if kind == "raised" or _NO_SENTENCE.search(words)
    ]
    wrong += [] if said[-1][0] in ("promoted", "kept", "done") else [f"ended as {said[-1]}"]
    charged = kills_check.charged_to_retrainings(rows[len(before) :])
    wrong += [] if len(charged) == 1 else [f"{len(charged)} runs charged"]
    wrong += [words for run_id in charged for words in troubles.other_recipe(fault.place, run_id)]
    return {
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


def _delivered(fault: Fault, week: int, moment: str | None) -> tuple[str, str, list[str]]:
    """How the delivery ended, its message, and what it said on the way."""
    fault.place.arrive(week)
    told, child = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=deliver, args=(fault, week, moment, child))
    process.start()
    child.close()
    try:
        kind, words, said = told.recv()
    except EOFError:
        kind, words, said = "killed", "", []
    process.join()
    return kind, words, said


@contextmanager
def _mounted(folder: Path, megabytes: int) -> Iterator[bool]:
    """A small file system; whether one can be mounted here."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        typer.echo("no file system can be mounted here: full disks are left out")
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def _full(place: Place, ballast: Path, pages: int, lasts: int) -> Fault:
    """The disk of the ballast, with room for so many pages."""
    return Fault(
        f"disk full but for {pages * _PAGE // 1024} kB",
        place,
        lambda: _fill(ballast, pages),
        lambda: ballast.unlink(missing_ok=True),
        lasts=lasts,
    )


@contextmanager
def disks(folder: Path) -> Iterator[list[Fault]]:
    """A small file system that is full but for some room; none where nothing can be mounted."""
    with _mounted(folder, _DISK_MB) as is_there:
        yield [
            _full(make(folder / f"place-{pages}", None), folder / "ballast", pages, lasts)
            for pages, lasts in (((0, _LONG), (8, 1)) if is_there else ())
        ]


def _fill(ballast: Path, pages: int) -> None:
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(_PAGE))
    os.truncate(ballast, max(0, ballast.stat().st_size - pages * _PAGE))


Control = Callable[[str], object]


@contextmanager
def _controlled() -> Iterator[tuple[str, Control] | None]:
    """The URL of a server with two databases, the other one called down, and what pg_ctl does to it; None without."""
    with server() as url:
        if url is None:
            typer.echo("no PostgreSQL here: it is left out")
            yield None
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
            yield url, control
        finally:
            with suppress(subprocess.CalledProcessError):
                control("stop -m immediate")


def _restarted(place: Place, control: Control) -> Fault:
    return Fault("PostgreSQL restarted", place, lambda: control("restart -m immediate"))


def _down(place: Place, control: Control) -> Fault:
    """Ended by a restart, since "start" would forget its port."""
    stop, restart = "stop -m immediate", "restart -m immediate"
    return Fault("PostgreSQL down", place, lambda: control(stop), lambda: control(restart), lasts=_LONG)


@contextmanager
def databases(folder: Path) -> Iterator[list[Fault]]:
    """A server that is restarted, and one that is down; none where there is no PostgreSQL."""
    folder.mkdir()
    with _controlled() as found:
        if found is None:
            yield []
            return
        url, control = found
        other = make(folder / "down", url.removesuffix("postgres") + "down")
        yield [_restarted(make(folder / "restarted", url), control), _down(other, control)]


def _lost(place: Place) -> Fault:
    """A worker that is lost as a stage begins."""
    return Fault("worker lost", place, lambda: os.kill(os.getpid(), signal.SIGKILL))


@contextmanager
def workers(folder: Path) -> Iterator[list[Fault]]:
    """A worker that is lost."""
    yield [_lost(make(folder, None))]


@contextmanager
def _accounts() -> Iterator[dict[str, str]]:
    """The URLs of W&B's servers that fail, by how."""
    with standing_in(fails=True) as failing, standing_in(hangs=True) as hanging:
        yield {
            "W&B unreachable": "http://127.0.0.1:9",
            "W&B answers 500": failing.known.url,
            "W&B hangs": hanging.known.url,
        }


def _without_account(name: str, place: Place, url: str) -> Fault:
    """W&B online, at a server that fails: asked in training, report and promotion."""
    online = PARAMS | {"tracking": {"mode": "online"}}
    YAML(typ="safe", pure=True).dump(online, place.root / "params.yaml")
    return Fault(name, place, lambda: os.environ.update(WANDB_BASE_URL=url), moments=("before",))


@contextmanager
def tracking(folder: Path) -> Iterator[list[Fault]]:
    """W&B online, at servers that fail."""
    with _accounts() as urls:
        os.environ["WANDB_BASE_URL"] = urls["W&B unreachable"]
        yield [
            _without_account(name, make(folder / name.split()[-1], None), url) for name, url in urls.items()
        ]


@contextmanager
def all_in_one(folder: Path) -> Iterator[list[Fault]]:
    """Every fault at one place: its disk is small, its ledger in PostgreSQL, its W&B online."""
    with (
        _mounted(folder, _YEAR_MB) as is_there,
        _controlled() as found,
        _accounts() as urls,
        standing_in() as well,
    ):
        os.environ["WANDB_BASE_URL"] = well.known.url
        place = make(folder / "place", None if found is None else found[0])
        faults = [_lost(place), *(_without_account(name, place, url) for name, url in urls.items())]
        if is_there:
            faults += [
                _full(place, folder / "ballast", pages, lasts) for pages, lasts in ((0, _LONG), (8, 1))
            ]
        if found is not None:
            faults += [_restarted(place, found[1]), _down(place, found[1])]
        yield faults


KINDS = {"disk": disks, "postgresql": databases, "worker": workers, "wandb": tracking}


def main(
    file: Annotated[Path, typer.Option(help="The table to write.")] = Path("comparisons/results/faults.csv"),
    only: Annotated[str, typer.Option(help="Kinds of faults, with commas.")] = ",".join(KINDS),
    weeks: Annotated[int, typer.Option(help="Instead, weeks of one place with faults at random.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the faults at random.")] = 0,
) -> None:
    """Try every fault at every moment; exit status 1 where something was wrong."""
    imported()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        for row in _rows(Path(name), only.split(","), weeks, seed):
            rows.append(row)
            typer.echo(" | ".join(str(value) for value in row.values()))
            pd.DataFrame(rows).to_csv(file, index=False)
    raise typer.Exit(int(any(row["wrong"] for row in rows)))


def _rows(folder: Path, kinds: list[str], weeks: int, seed: int) -> Iterator[dict[str, Any]]:
    if weeks:
        with all_in_one(folder / "year") as faults:
            yield from a_year(faults, weeks, random.Random(seed))
        return
    for kind in kinds:
        with KINDS[kind](folder / kind) as faults:
            for fault in faults:
                yield from tried(fault)


if __name__ == "__main__":
    typer.run(main)
