"""The summary of a finished run: its data, metrics, cost and what the population has left."""

import os
from pathlib import Path

from rich.table import Table

from algorithms.privacy.accounting import rounded_up
from algorithms.privacy.documents import Receipt
from tasks.runs.ledger import open_ledger
from tasks.runs.metrics import NOT_EVALUATED, TextRows, describe_metric, held_out_metrics, metric_rows
from tasks.runs.metrics_document import Metrics, read_metrics

REPORT = Path("artifacts/report.html")


def run_summary(root: Path) -> TextRows:
    """The result of the run in `root` as pairs of a name and a text, from the files of the stages and the ledger.

    Raises RefusedError if the ledger cannot be read.
    """
    artifacts = root / "artifacts"
    metrics, receipt = read_metrics(artifacts / "metrics.json"), Receipt.read(artifacts / "receipt.json")
    ledger, population = open_ledger(root), receipt.population
    balance = ledger.balance(population) if population in ledger.populations() else None
    spent, left = ("unknown to this ledger",) * 2
    if balance is not None:
        spent, left = (f"{budget.epsilon:,.6g}" for budget in (balance.spent, balance.remaining))
        if balance.composition.kind != "basic":
            left = f"{left} for one more run; {balance.composition} adds up the runs, not their epsilons"
    return [
        ("data set", receipt.dataset),
        ("algorithm", receipt.algorithm),
        *metric_rows(metrics),
        ("epsilon of this run", claimed_cost(metrics, receipt) or "not private"),
        ("population", population),
        ("epsilon spent on it", spent),
        ("epsilon left for it", left),
        ("report", os.path.relpath(root / REPORT)),
    ]


def outcome_sentence(root: Path) -> str:
    """What was trained in `root`, its epsilon, its score on the held-out records, and where the card is."""
    artifacts = root / "artifacts"
    metrics, receipt = read_metrics(artifacts / "metrics.json"), Receipt.read(artifacts / "receipt.json")
    cost = claimed_cost(metrics, receipt)
    epsilon = "without privacy" if cost is None else f"for epsilon {cost}"
    score = f"held-out {describe_metric(metrics)}" if held_out_metrics(metrics) else NOT_EVALUATED
    return (
        f"{receipt.algorithm} on {receipt.dataset} {epsilon}: {score}. The privacy card is the artifact privacy-card"
        f" and artifacts/privacy_card.json; the report is {REPORT}."
    )


def claimed_cost(metrics: Metrics, receipt: Receipt) -> str | None:
    """The epsilon that is claimed, with its delta; None for a run that is not private, as with seeded noise."""
    if metrics["epsilon"] is None or not receipt.private_noise or receipt.diagnostics:
        return None
    return f"{rounded_up(metrics['epsilon'])} at delta {metrics['delta']:g}"


def two_columns(pairs: TextRows) -> Table:
    """Pairs of a name and a text as a table for a terminal."""
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in pairs:
        table.add_row(name, text)
    return table
