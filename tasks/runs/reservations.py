"""What stays charged for runs that were stopped or refused, how to resume them and how to give them up."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tasks.config import home
from tasks.runs import store
from tasks.runs.ledger import open_ledger
from tasks.runs.stage_main import refusals

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
    ledger, home_folder = open_ledger(root), home()
    waiting = {
        run_id
        for run_id, mark in store.begun_runs(home_folder, root).items()
        if ledger.status(run_id) == "open"
        and (store.is_idle(home_folder, run_id) if since is None else mark >= since.timestamp() * _SECOND)
    }
    if not waiting:
        return []
    rows = {row.run_id: row for row in ledger.history() if row.kind == "reserve" and row.run_id in waiting}
    return [
        Reservation(row.population, run_id, row.budget.epsilon, _resume(json.loads(row.about)))
        for run_id, row in rows.items()
    ]


def begun_since(before: Mapping[str, int], root: Path) -> tuple[str, str | None] | None:
    """The run that the checkout at `root` began or resumed since `before`, and the ledger's status of it.

    before: what `store.begun_runs` gave then. By no clock, which may be set meanwhile, or be that of the machine that
    has the disk.
    """
    runs = store.begun_runs(home(), root).items()
    run_id = next((run for run, mark in runs if before.get(run) != mark), None)
    return None if run_id is None else (run_id, open_ledger(root).status(run_id))


@contextmanager
def noting_what_was_spent(root: Path) -> Iterator[None]:
    """A refusal that leaves the block has a note that says what was spent within it; the checkout is locked."""
    before = store.begun_runs(home(), root)
    try:
        yield
    except refusals() as refusal:
        refusal.add_note(what_was_spent(before, root))
        raise


def what_was_spent(before: Mapping[str, int], root: Path) -> str:
    """A sentence for a run that was refused. before: see `begun_since`."""
    try:
        begun = begun_since(before, root)
    except refusals():  # the ledger, which may be why the run was refused
        return "`epsilonflow doctor` says whether something is reserved for it, once the ledger answers."
    if begun is None or begun[1] is None:
        return "Nothing was spent."
    run_id, status = begun
    if status == "open":
        return (
            f"Run {run_id} is charged: the same run again resumes it at no extra cost, and `epsilonflow ledger forfeit"
            f" {run_id}` gives it up."
        )
    if status == "forfeited":
        return f"Run {run_id} is given up, and its reservation counts as spent."
    return f"Run {run_id} is charged and has ended: the same run again takes its result at no extra cost."


def _resume(notes: dict[str, object]) -> str:
    if "retraining" in notes:
        return "`epsilonflow retrain`"
    return "`epsilonflow tune`" if "search" in notes else "`epsilonflow run` with the same settings"
