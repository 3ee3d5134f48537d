"""python -m tests.soak.kills: retrainings whose process is killed by SIGKILL, some two hundred times.

Each week's retraining is delivered to a process of its own until it has ended: the ledger, the state, and the five
stages. Most deliveries are killed: at any time, or while they write to the ledger, the run's folder, the state, the
registry or the results. What must hold is checked after every one. Now and then the key of a run's noise is damaged by
hand, so that the run must be forfeited.
"""

import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.postgres import server
from tests.soak import kills_check
from tests.soak.kills_child import WHERE, Aim, abandon, deliver, imported
from tests.soak.kills_place import Place, make

_NOWHERE = Aim("any time")
_SHARES = {"any time": 0.3, "ledger": 0.25, "run": 0.15, "state": 0.1, "registry": 0.1, "results": 0.1}
_DAMAGED_EVERY, _STUCK, _AT_THE_FORFEIT = 6, 4, 0.7
_LONGEST_PAUSE = 0.004  # seconds between the moment that was aimed at and the kill
_WRITES_BY_DVC, _POLL_SECONDS = 4, 0.0005
_FORK = multiprocessing.get_context("fork")


@dataclass
class Trial:
    """Retrainings of a place under fire.

    whole: the seconds and the moments of the last delivery that nobody killed. rows: the ledger's, seen last.
    """

    place: Place
    ledger: str
    draw: random.Random
    seconds: float = 0.0
    moments: dict[str, int] = field(default_factory=dict)
    rows: list[kills_check.Row] = field(default_factory=list)

    def deliveries(self, kills: int) -> Iterator[dict[str, Any]]:
        """A row a delivery, until so many were killed and the last period has ended."""
        week, undamaged = 0, False
        while kills > 0 or week == 0:
            self.place.arrive(week)
            undamaged = week % _DAMAGED_EVERY == _DAMAGED_EVERY - 1
            for row in self._period(week, kills if week else 0, undamaged):
                kills -= bool(row["fell"])
                yield row
            week += 1

    def _period(self, week: int, kills: int, undamaged: bool) -> Iterator[dict[str, Any]]:
        """Delivers the retraining of a week until it has ended; kills at most so many."""
        unended, damaged = 0, False
        while unended < _STUCK:
            aim = self._aim(giving_up=damaged) if kills > 0 else None
            said = self._delivered(week, aim)
            row = self._checked(week, aim, said)
            kills -= bool(row["fell"])
            if undamaged and row["fell"] == "in training":
                damaged = self._damage()
                undamaged = not damaged
            yield row
            if said is not None and row["state"] not in ("none", "open"):
                return
            if damaged and said is not None:
                person = _FORK.Process(target=abandon, args=(self.place,))
                person.start()
                person.join()
            unended += said is not None
        raise RuntimeError(f"the retraining of {self.place.period(week)} does not come to its end")

    def _aim(self, *, giving_up: bool) -> Aim:
        """Where to kill next; a run that is given up writes little, so it is killed at that."""
        where = self.draw.choices(WHERE, [_SHARES[where] for where in WHERE])[0]
        if giving_up and self.draw.random() < _AT_THE_FORFEIT:
            where, number = self.draw.choice((("ledger", 6), ("state", 6), ("run", 12)))
            return Aim(where, self.draw.randint(1, number), self.draw.random() < 0.5)
        if self.place.dvc:
            return self.draw.choice((Aim("any time"), Aim("ledger", self.draw.randint(1, _WRITES_BY_DVC))))
        if where == "any time":
            return Aim(where)
        return Aim(where, self.draw.randint(1, max(1, self.moments.get(where, 1))), self.draw.random() < 0.5)

    def _delivered(self, week: int, aim: Aim | None) -> str | None:
        """What the process said at its end; None for one that was killed."""
        told, child = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=deliver, args=(self.place, week, aim or _NOWHERE, child))
        process.start()
        child.close()
        told.recv()
        began = time.monotonic()
        if aim is not None and aim.where == "any time":
            last = None if not told.poll(self.draw.uniform(0.0, self.seconds)) else told.recv()
        elif aim is not None and self.place.dvc:
            last = told.recv() if self._is_over_before(aim.number, told) else None
        else:
            last = told.recv()
        if last is None or last[0] == "here":
            time.sleep(0.0 if aim and aim.held else self.draw.uniform(0.0, _LONGEST_PAUSE))
            _kill(psutil.Process(process.pid))
        process.join()
        with suppress(EOFError):
            last = told.recv() if last is None or last[0] == "here" else last
        if last is None or last[0] == "here":
            return None
        if aim is None:
            self.seconds, self.moments = time.monotonic() - began, last[3]
        return f"{last[1]}: {last[2]}".replace(f"{self.place.home.parent}/", "")

    def _is_over_before(self, number: int, told: Connection) -> bool:
        """Waits for a write to the ledger by whatever process; whether the delivery ended before it."""
        log, seen, written = Path(f"{self.place.url.removeprefix('sqlite:///')}-wal"), 0, False
        while seen < number and not told.poll(_POLL_SECONDS):
            before, written = written, False
            with suppress(FileNotFoundError):
                written = log.stat().st_size > 0
            seen += written and not before
        return seen < number

    def _checked(self, week: int, aim: Aim | None, said: str | None) -> dict[str, Any]:
        """The row of a delivery, with what is wrong after it."""
        before, self.rows = self.rows, kills_check.rows_of(self.place)
        state = kills_check.state_of(self.place, week)
        kind = "none" if state is None else str(state["kind"])
        wrong = kills_check.problems(self.place, before, self.rows)
        if said is not None and kind not in ("none", "open"):
            wrong += kills_check.ended_badly(self.place, self.rows, week)
        row = {
            "ledger": self.ledger,
            "period": self.place.period(week),
            "aimed": "",
            "fell": "",
            "state": kind,
        }
        if said is None and aim is not None:
            where = f"{aim.where} {aim.number}{' held' if aim.held else ''}" if aim.number else aim.where
            row |= {"aimed": where, "fell": kills_check.fell(self.place, self.rows, week)}
        return row | {"new_rows": len(self.rows) - len(before), "said": said or "", "wrong": "; ".join(wrong)}

    def _damage(self) -> bool:
        """Cuts the key of a run's noise short; whether there is one."""
        found = list((self.place.home / "runs").glob("[!.]*/generator.key"))
        for path in found:
            os.truncate(path, 10)
        return bool(found)


def _kill(leader: psutil.Process) -> None:
    """SIGKILL for a process and all that it started; all are stopped first, so that none is started meanwhile."""
    members: list[psutil.Process] = []
    while fresh := [each for each in (leader, *leader.children(recursive=True)) if each not in members]:
        for member in fresh:
            with suppress(psutil.NoSuchProcess):
                member.suspend()
        members += fresh
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGKILL)
    psutil.wait_procs(members[1:])


def main(
    kills: Annotated[int, typer.Option(help="How many deliveries are killed.")] = 200,
    postgres: Annotated[int, typer.Option(help="How many of them on a ledger in PostgreSQL.")] = 40,
    dvc: Annotated[int, typer.Option(help="How many of them with stages that DVC runs.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the instants.")] = 0,
    file: Annotated[Path, typer.Option(help="The table to write.")] = Path("comparisons/results/kills.csv"),
) -> None:
    """Kill retrainings; exit status 1 where something was wrong afterwards."""
    imported()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, server() as url:
        postgres = postgres if url else 0
        trials = [
            ("SQLite", kills - postgres - dvc, make(Path(folder, "sqlite"), None)),
            ("PostgreSQL", postgres, make(Path(folder, "postgresql"), url)),
            ("SQLite, by DVC", dvc, make(Path(folder, "dvc"), None, source=Path.cwd())),
        ]
        for number, (name, most, place) in enumerate(trials):
            trial = Trial(place, name, random.Random(seed + number))
            for row in trial.deliveries(most) if most else ():
                rows.append(row)
                typer.echo(" | ".join(str(value) for value in row.values()))
                pd.DataFrame(rows).to_csv(file, index=False)
    table = pd.DataFrame(rows)
    Console(width=110).print(_summary(table))
    raise typer.Exit(int((table["wrong"] != "").any()))


def _summary(rows: pd.DataFrame) -> Table:
    """Kills by where they fell, and what was wrong."""
    killed = rows[rows["fell"] != ""]
    table = Table("the kill fell", *killed["ledger"].unique(), "with something wrong")
    for where, group in killed.groupby("fell", sort=False):
        counts = (str((group["ledger"] == name).sum()) for name in killed["ledger"].unique())
        table.add_row(str(where), *counts, str((group["wrong"] != "").sum()))
    return table


if __name__ == "__main__":
    typer.run(main)
