"""What a person is told at the end of a run, from the files that the stages left and from the ledger."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from algorithms.privacy.ledger import Ledger
from tasks.config import params
from tasks.config.environment import home, ledger_url
from tasks.runs.provenance import REGRESSION
from tasks.runs.rollback_guard import open_newest, remember

REPORT = Path("artifacts/report.html")


@dataclass(frozen=True)
class RunSummary:
    """The result of a run.

    further: area under the ROC curve, F1 averaged over classes, calibration error; see `tasks.evaluate.further`.
    errors: where a number was predicted in place of a class, R2, the root mean squared and the mean absolute error, and
    the root mean squared error of always naming the mean; the accuracies are then None.
    majority_accuracy, verdict: what always naming the commonest class reaches on the same records, and how the test
    accuracy compares with it.

    epsilon: what it cost at `delta`; None for a run without privacy. spent, remaining: epsilon of the population by
    the ledger, None where the ledger does not know the population.
    """

    dataset: str
    algorithm: str
    test_accuracy: float | None
    majority_accuracy: float | None
    verdict: str | None
    errors: tuple[float, ...] | None
    further: tuple[float | None, float | None, float | None]
    epsilon: float | None
    delta: float
    population: str
    spent: float | None
    remaining: float | None
    report: Path

    def rows(self) -> list[tuple[str, str]]:
        """What to show, as pairs of a name and a text."""
        cost = "not private" if self.epsilon is None else f"{self.epsilon:.4g} at delta {self.delta:g}"
        return [
            ("data set", self.dataset),
            ("algorithm", self.algorithm),
            *self._measured(),
            ("epsilon of this run", cost),
            (f"epsilon spent on population {self.population}", _number(self.spent)),
            (f"epsilon left to population {self.population}", _number(self.remaining)),
            ("report", os.path.relpath(self.report)),
        ]

    def _measured(self) -> list[tuple[str, str]]:
        if self.errors is not None:
            r2, rmse, mae, mean = self.errors
            return [
                ("variance explained (R2)", f"{r2:.2%}"),
                ("root mean squared, mean absolute error", f"{rmse:.4g}, {mae:.4g}"),
                ("root mean squared error of the mean alone", f"{mean:.4g}"),
            ]
        return [
            ("test accuracy", f"{self.test_accuracy:.2%}"),
            ("AUC, F1, calibration error", ", ".join(map(_share, self.further))),
            (
                "of the most frequent class alone",
                f"{self.majority_accuracy:.2%}: the model is {self.verdict}",
            ),
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
    """The result that lies in `root`; raises RefusedError or ParamsRefusedError where the ledger cannot be read."""
    metrics, receipt = (_document(root / "artifacts" / name) for name in ("metrics.json", "receipt.json"))
    spent, remaining = _balance(root, receipt["population"])
    return RunSummary(
        dataset=metrics["dataset"],
        algorithm=metrics["algorithm"],
        **{name: metrics.get(name) for name in ("test_accuracy", "majority_accuracy", "verdict")},
        errors=None if "test_accuracy" in metrics else tuple(metrics[name] for name in REGRESSION),
        further=(metrics.get("test_auc"), metrics.get("test_f1"), metrics.get("calibration_error")),
        epsilon=metrics["epsilon"],
        delta=metrics["delta"],
        population=receipt["population"],
        spent=spent,
        remaining=remaining,
        report=root / REPORT,
    )


def open_ledger(root: Path) -> Ledger:
    """The ledger that the checkout at `root` charges; raises LedgerBrokenError where an older copy was put back."""
    settings = params.load(root / "params.yaml", reads=("ledger",))
    url = ledger_url(settings.ledger.url)
    ledger = open_newest(url, home=home(), root=root)
    remember(ledger, url, home=home())
    return ledger


def _balance(root: Path, population: str) -> tuple[float | None, float | None]:
    ledger = open_ledger(root)
    if population not in ledger.populations():
        return None, None
    balance = ledger.balance(population)
    return balance.spent.epsilon, balance.remaining.epsilon


def _document(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _number(value: float | None) -> str:
    return "unknown to this ledger" if value is None else f"{value:,.6g}"
