"""The summary at the end of a run, from the files of the stages and from the ledger."""

import os
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from data.files import read_json
from tasks.runs.ledger import open_ledger
from tasks.runs.quality import rows

REPORT = Path("artifacts/report.html")


@dataclass(frozen=True)
class RunSummary:
    """The result of a run.

    measured: metrics on held-out records, as pairs of a name and a text. epsilon: the cost at `delta`; None for a run
    without privacy. spent, remaining: epsilon of the population according to the ledger, None if the ledger does not
    know the population.
    """

    dataset: str
    algorithm: str
    measured: tuple[tuple[str, str], ...]
    epsilon: float | None
    delta: float
    population: str
    spent: float | None
    remaining: float | None
    report: Path

    def rows(self) -> list[tuple[str, str]]:
        """The summary as pairs of a name and a text."""
        cost = "not private" if self.epsilon is None else f"{self.epsilon:.4g} at delta {self.delta:g}"
        return [
            ("data set", self.dataset),
            ("algorithm", self.algorithm),
            *self.measured,
            ("epsilon of this run", cost),
            ("population", self.population),
            ("epsilon spent on it", _number(self.spent)),
            ("epsilon left for it", _number(self.remaining)),
            ("report", os.path.relpath(self.report)),
        ]

    def table(self) -> Table:
        """The rows as a table for a terminal."""
        table = Table(show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in self.rows():
            table.add_row(name, text)
        return table


def run_summary(root: Path) -> RunSummary:
    """The result of the run in `root`; raises RefusedError or ParamsRefusedError if the ledger cannot be read."""
    metrics, receipt = (read_json(root / "artifacts" / name) for name in ("metrics.json", "receipt.json"))
    ledger, population = open_ledger(root), receipt["population"]
    balance = ledger.balance(population) if population in ledger.populations() else None
    return RunSummary(
        dataset=receipt["dataset"],
        algorithm=receipt["algorithm"],
        measured=tuple(rows(metrics)),
        epsilon=metrics["epsilon"],
        delta=metrics["delta"],
        population=population,
        spent=None if balance is None else balance.spent.epsilon,
        remaining=None if balance is None else balance.remaining.epsilon,
        report=root / REPORT,
    )


def _number(value: float | None) -> str:
    return "unknown to this ledger" if value is None else f"{value:,.6g}"
