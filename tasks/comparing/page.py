"""The page of a comparison, as HTML that needs nothing else and as Markdown: what was compared, results, figures."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from tasks.page import Picture
from tasks.templates import environment

_HERE = Path(__file__).parent
_DIGITS = {"accuracy": 4, "objective": 5, "gap": 5, "test_loss": 5}
WORDS = {
    "accuracy": "Accuracy on the test records",
    "objective": "Objective",
    "gap": "Objective above the least",
    "test_loss": "Test loss",
}


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Content:
    """What the page says. pictures: by file name, without its ending. refused: cells that could not run, and why."""

    title: str
    name: str
    sweep: str
    facts: Sequence[tuple[str, str]]
    tables: Sequence[Table]
    pictures: Mapping[str, Picture]
    published: Table | None
    refused: Sequence[str]


def html(content: Content) -> str:
    """The page as HTML, in the style of a run's report."""
    made = environment(below=_HERE)
    return made.get_template("comparison.html.j2").render(content=content)


def markdown(content: Content) -> str:
    """The page as Markdown; its figures are files beside it."""
    return environment(below=_HERE, autoescape=False).get_template("comparison.md.j2").render(content=content)


def result_tables(totals: pd.DataFrame) -> list[Table]:
    """A table a problem and metric: methods down, epsilons across, mean and standard error in each cell."""
    tables = []
    for names, rows in totals.groupby(["dataset", "model"], sort=False):
        for metric in ("accuracy", "objective"):
            if rows[f"{metric}_mean"].notna().any():
                tables.append(_table(f"{WORDS[metric]}: {', '.join(map(str, names))}", rows, metric))
    return tables


def published_table(rows: pd.DataFrame) -> Table:
    """Published numbers beside ours. rows: as `comparison_published.beside` makes them."""
    header = ("figure", "data", "method", "epsilon", "metric", "published", "ours", "difference")
    return Table("Published numbers beside ours", header, [_beside(row) for row in rows.to_dict("records")])


def _beside(row: Mapping[Hashable, object]) -> tuple[str, ...]:
    metric = str(row["metric"])
    value, ours, stderr, difference = (
        float(str(row[name])) for name in ("value", "ours", "stderr", "difference")
    )
    setting = f" ({row['setting']})" if row["setting"] else ""
    return (
        str(row["figure"]),
        f"{row['dataset']}, {row['model']}",
        f"{row['method']}{setting}",
        _epsilon(float(str(row["epsilon"]))),
        metric,
        f"{value:g}",
        _measured(ours, stderr, metric),
        "" if math.isnan(difference) else f"{difference:+.{_DIGITS[metric]}f}",
    )


def _table(title: str, rows: pd.DataFrame, metric: str) -> Table:
    epsilons = sorted(rows["epsilon"].dropna().unique())
    body = []
    for label, of_method in rows.groupby("label", sort=False):
        found = {
            row["epsilon"]: _measured(row[f"{metric}_mean"], row[f"{metric}_stderr"], metric)
            for row in of_method.to_dict("records")
        }
        if of_method["epsilon"].isna().all():
            body.append([str(label), *found.values(), *[""] * (len(epsilons) - 1)])
        else:
            body.append([str(label), *(found.get(epsilon, "") for epsilon in epsilons)])
    header = (
        ["method", *(f"epsilon {epsilon:g}" for epsilon in epsilons)] if epsilons else ["method", "result"]
    )
    return Table(title, header, body)


def _measured(mean: float, stderr: float, metric: str) -> str:
    """A mean and its standard error; one that is not known is left out."""
    digits = _DIGITS[metric]
    if math.isnan(mean):
        return "not run"
    return f"{mean:.{digits}f}" + ("" if math.isnan(stderr) else f" ± {stderr:.{digits}f}")


def _epsilon(value: float) -> str:
    return "no noise" if math.isnan(value) else f"{value:g}"
