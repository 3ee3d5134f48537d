"""Log a comparison to Weights & Biases: one run per method with its tables, and a summary with figures and results."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from tasks.comparing.report import FILES, Report
from tasks.comparing.work import Work
from tasks.config import params
from tasks.tracking.runs import Member, log_group

SUMMARY = ("cells", "runs")
TABLES = ("results", "summary")


def log_comparison(work: Work, report: Report) -> bool:
    """Log the comparison as a group of its name, with the tracking settings of params.yaml; returns whether it did."""
    root = work.place.root
    settings = params.load(root / "params.yaml", reads=("tracking",)).tracking
    return log_group(work.comparison.name, list(members(work, report)), settings, root=root)


def members(work: Work, report: Report) -> Iterator[Member]:
    """The runs of the group: one for each method that has results, then the summary."""
    for method, rows in report.table.groupby("method", sort=False):
        totals = report.totals[report.totals["method"] == method]
        own = {
            "method": str(method),
            "labels": list(dict.fromkeys(rows["label"])),
            "algorithm": work.comparison.methods[str(method)].algorithm,
        }
        yield Member(str(method), _shared(work) | own, _counts(rows, report), _tables(rows, totals))
    folder = work.place.folder
    yield Member(
        "summary",
        _shared(work),
        _counts(report.table, report),
        _tables(report.table, report.totals),
        images={f"figures/{name}": folder / f"{name}.png" for name in report.pictures},
        files=[folder / name for name in FILES],
    )


def _shared(work: Work) -> dict[str, Any]:
    return {"comparison": work.comparison.name, "title": work.comparison.title, "private": False}


def _counts(rows: pd.DataFrame, report: Report) -> dict[str, int]:
    return dict(zip(SUMMARY, (len(rows), report.runs), strict=True))


def _tables(rows: pd.DataFrame, totals: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return dict(zip(TABLES, (rows, totals), strict=True))
