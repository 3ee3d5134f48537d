"""A delivery of a retraining in a process of its own, which says when it is where it is to be killed.

It sees what it does itself: files that it is about to open for writing, to rename or to remove, by Python's audit
events, and what it sends to the ledger, by SQLAlchemy's, and in PostgreSQL by what psycopg is given. What runs is
unchanged by that.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import psycopg
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from tasks.retraining.delivery import DeliveryWork, give_up, retrain
from tasks.runs.dvc_stages import STAGES, StageFailedError, StageRefusedError, reproduce
from tests.soak.kills_place import Place
from tests.soak.year import run_here

Where = Literal["any time", "ledger", "run", "state", "registry", "results"]
WHERE: tuple[Where, ...] = ("any time", "ledger", "run", "state", "registry", "results")
_CHANGES = {"os.rename", "os.symlink", "os.remove", "os.rmdir", "os.mkdir", "os.chmod"}
_TWO_PATHS = {"os.rename", "os.symlink"}
_WRITES = os.O_WRONLY | os.O_RDWR
_UNTIL_KILLED = 600.0
_SEND: Callable[..., Any] = psycopg.ClientCursor.execute


@dataclass(frozen=True)
class Aim:
    """Where a delivery is to be killed: at the moment `number` of those at a place, counted from 1.

    held: it waits there for its end, instead of going on while its killer wakes up. At any time: by the clock alone.
    """

    where: Where
    number: int = 0
    held: bool = False


@dataclass
class OpTracer:
    """Counts the moments at each place, and tells when the one that was aimed at is there."""

    places: Mapping[str, Where]
    aim: Aim
    told: Connection
    seen: Counter[str] = field(default_factory=Counter)
    inserted: bool = False

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python is about to do something."""
        if event in _CHANGES or (event == "open" and arguments[2] & _WRITES):
            path = _path(event, arguments)
            where = next((kind for start, kind in self.places.items() if path.startswith(start)), None)
            if where is not None:
                self.moment(where)

    def statement(self, _connection: Any, _cursor: Any, text: str, *_: Any) -> None:
        """A statement is about to be sent to the ledger."""
        if text.startswith("INSERT INTO epsilonflow_ledger"):
            self.inserted = True
            self.moment("ledger")

    def commit(self, _connection: Any) -> None:
        """A transaction is about to be committed, or its connection to be given back."""
        if self.inserted:
            self.inserted = False
            self.moment("ledger")

    def message(self, cursor: Any, text: str, *_: Any) -> Any:
        """What the ledger sends to PostgreSQL at once; where it writes, its commit is the last of it."""
        writes = "INSERT INTO epsilonflow_ledger" in text
        if writes:
            self.moment("ledger")
        found = _SEND(cursor, text)
        if writes:
            self.moment("ledger")
        return found

    def moment(self, where: Where) -> None:
        """One more moment at a place."""
        self.seen[where] += 1
        if (where, self.seen[where]) == (self.aim.where, self.aim.number):
            self.told.send(("here",))
            if self.aim.held:
                time.sleep(_UNTIL_KILLED)


def _path(event: str, arguments: tuple[Any, ...]) -> str:
    """The file that an event is about; one that is removed with its folder comes relative to an open folder."""
    named = arguments[1] if event in _TWO_PATHS else arguments[0]
    if isinstance(named, int):
        return ""
    folder = arguments[-1] if event in ("os.remove", "os.rmdir") else -1
    start = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
    return os.path.join(start, os.fsdecode(named))


def deliver(place: Place, week: int, aim: Aim, told: Connection) -> None:
    """Delivers the retraining of a week in a session of this process's own; the body of a fork."""
    os.setsid()
    os.environ |= {"EPSILONFLOW_HOME": str(place.home), "EPSILONFLOW_LEDGER_URL": place.url}
    places: dict[str, Where] = {
        str(place.home / "runs"): "run",
        str(place.states): "state",
        str(place.registry): "registry",
        f"{place.root}/": "results",
        f"{place.home}/": "results",
    }
    watch = OpTracer(places, aim, told)
    told.send(("ready",))
    sys.addaudithook(watch.audit)
    sa.event.listen(Engine, "before_cursor_execute", watch.statement)
    sa.event.listen(Engine, "commit", watch.commit)
    psycopg.ClientCursor.execute = lambda *given: watch.message(*given)  # type: ignore[method-assign, assignment]
    try:
        work = DeliveryWork(place.settings, place.root, by_dvc if place.dvc else stage, lambda _: None)
        outcome = retrain(work, now=place.moment(week))
        told.send(("ended", outcome.kind, outcome.message, dict(watch.seen)))
    except Exception:
        told.send(("ended", "raised", traceback.format_exc(), dict(watch.seen)))


def abandon(place: Place) -> None:
    """A person gives the retraining up, as nobody else does where a checkpoint is damaged; the body of a fork."""
    os.environ |= {"EPSILONFLOW_HOME": str(place.home), "EPSILONFLOW_LEDGER_URL": place.url}
    work = DeliveryWork(place.settings, place.root, stage, lambda _: None)
    state = work.states.open()
    assert state is not None
    give_up(work, state)


def by_dvc(name: str, root: Path) -> None:
    """Runs a stage by DVC, in processes of its own."""
    reproduce(name, root=root, say=lambda _: None)


def stage(name: str, root: Path) -> None:
    """Runs a stage here as DVC would: not again when it has ended, and what is no refusal is a failure."""
    file = root / ".dvc" / "tmp" / "done.json"
    key = hashlib.sha256((root / "params.yaml").read_bytes()).hexdigest()
    done = json.loads(file.read_text()) if file.exists() else {}
    if name in done.get(key, ()):
        return
    try:
        run_here(name, root)
    except StageRefusedError:
        raise
    except Exception as error:
        raise StageFailedError(f"{name}: {error!r}") from error
    fresh = file.with_name("done.new")
    fresh.write_text(json.dumps({key: [*done.get(key, ()), name]}))
    fresh.replace(file)


def imported() -> None:
    """Imports what stages import, so that forks are at work at once."""
    for name in STAGES:
        import_module(f"tasks.{name}")
