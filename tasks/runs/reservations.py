"""Reservations of runs that were stopped: what they hold, how to resume them and how to give them up."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tasks.config import home
from tasks.runs import store
from tasks.runs.ledger import open_ledger

_SECOND = 10**9  # in nanoseconds, the unit of a file's time


@dataclass(frozen=True)
class Reservation:
    """What a stopped run holds of a population. resume: what resumes it, with commands in backticks."""

    population: str
    run_id: str
    epsilon: float
    resume: str

    def sentence(self, quote: Callable[[str], str] = str) -> str:
        """What to do about it. quote: of the population's name, as for Markdown."""
        return (
            f"Run {self.run_id} was stopped, and epsilon {self.epsilon:g} of {quote(self.population)} stays reserved"
            f" for it: {self.resume} resumes it at no extra cost. `epsilonflow ledger forfeit {self.run_id}` gives it"
            " up, and the reservation then counts as spent."
        )


def open_reservations(root: Path, *, since: datetime | None = None) -> list[Reservation]:
    """Those of runs that the checkout at `root` began, and that ended without their result.

    since: only of runs that were begun or resumed from then on, also if a process may be at it, as where it is just
    being stopped.
    """
    ledger, here = open_ledger(root), home()
    waiting = {
        run_id
        for run_id, mark in store.begun_runs(here, root).items()
        if ledger.status(run_id) == "open"
        and (store.is_idle(here, run_id) if since is None else mark >= since.timestamp() * _SECOND)
    }
    if not waiting:
        return []
    rows = {row.run_id: row for row in ledger.history() if row.kind == "reserve" and row.run_id in waiting}
    return [
        Reservation(row.population, run_id, row.budget.epsilon, _resume(json.loads(row.about)))
        for run_id, row in rows.items()
    ]


def _resume(notes: dict[str, object]) -> str:
    if "retraining" in notes:
        return "`epsilonflow retrain`"
    return "`epsilonflow tune`" if "search" in notes else "`epsilonflow run` with the same settings"
