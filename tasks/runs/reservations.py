"""Reservations of runs that were stopped: what they hold, how to resume them and how to give them up."""

import json
from pathlib import Path

from tasks.config import home
from tasks.runs import store
from tasks.runs.ledger import open_ledger


def open_reservations(root: Path, *, also_running: bool = False) -> list[tuple[str, str]]:
    """Population and a sentence for each run that the checkout at `root` began, and that ended without its result.

    also_running: whether a process may be at it, as where a run is just being stopped.
    """
    ledger, here = open_ledger(root), home()
    waiting = {
        run_id
        for run_id in store.begun_runs(here, root)
        if ledger.status(run_id) == "open" and (also_running or store.is_idle(here, run_id))
    }
    if not waiting:
        return []
    rows = {row.run_id: row for row in ledger.history() if row.kind == "reserve" and row.run_id in waiting}
    return [
        (
            row.population,
            f"Run {run_id} was stopped, and epsilon {row.budget.epsilon:g} of {row.population} stays reserved for it:"
            f" {_resume(json.loads(row.about))} resumes it at no extra cost. `epsilonflow ledger forfeit {run_id}`"
            " gives it up, and the reservation then counts as spent.",
        )
        for run_id, row in rows.items()
    ]


def _resume(notes: dict[str, object]) -> str:
    if "retraining" in notes:
        return "`epsilonflow retrain`"
    return "`epsilonflow tune`" if "search" in notes else "`epsilonflow run` with the same settings"
