"""Write the results of a comparison: tables, figures, a self-contained HTML page, the same page as Markdown.

Also update the number of runs on the cards of the cells, and log the comparison to Weights & Biases.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from algorithms.privacy.ledger import Ledger
from data.files import write_text, write_whole
from tasks.comparing import figures
from tasks.comparing.files import Place, write_json
from tasks.comparing.results import beside, read_published, results, summary, with_gap, write_tables
from tasks.comparing.trial import counted
from tasks.comparing.work import Work
from tasks.config import params
from tasks.reporting.figures import Picture, picture
from tasks.reporting.page import environment
from tasks.runs.quality import MEASURES
from tasks.tracking.runs import Member, log_group

_HERE = Path(__file__).parent
PAGE, MARKDOWN = "report.html", "page.md"
FILES = ("results.parquet", "results.csv", "summary.csv", PAGE, MARKDOWN)
"""The files of a finished comparison, besides its figures."""
_DIGITS = {"objective": 5, "gap": 5, "test_loss": 5}
"""Decimal places; metrics of the test records have 4."""
_WORDS = {
    "accuracy": "Accuracy",
    "r2": "Variance explained (R2)",
    "micro_f1": "F1 over all labels",
    "entity_f1": "F1 over entities",
    "token_f1": "F1 over tags",
    "token_accuracy": "Right next tokens",
    "perplexity": "Perplexity",
}
"""The metrics of the test records that are shown; the tables have more."""


def shown(totals: pd.DataFrame) -> list[str]:
    """The metrics that a page shows for a problem: that by which its models are compared, and a few more."""
    known = totals.columns[totals.notna().any()]
    there = [name for name in (*MEASURES, "objective") if f"{name}_mean" in known]
    return [name for place, name in enumerate(there) if place == 0 or name in ("perplexity", "objective")]


def _titled(metric: str) -> str:
    return "Objective" if metric == "objective" else f"{_WORDS[metric]} on the test records"


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def result_tables(totals: pd.DataFrame) -> list[Table]:
    """A table per problem and metric: methods as rows, epsilons as columns, mean and standard error in each cell."""
    tables = []
    for names, rows in totals.groupby(["dataset", "model"], sort=False):
        for metric in shown(rows):
            tables.append(_table(f"{_titled(metric)}: {', '.join(map(str, names))}", rows, metric))
    return tables


def published_table(rows: pd.DataFrame) -> Table:
    """Published numbers beside ours. rows: from `results.beside`."""
    header = ("figure", "data", "method", "epsilon", "metric", "published", "ours", "difference")
    return Table("Published numbers beside ours", header, [_beside(row) for row in rows.to_dict("records")])


def _beside(row: Mapping[Hashable, Any]) -> tuple[str, ...]:
    metric, difference = row["metric"], row["difference"]
    setting = f" ({row['setting']})" if row["setting"] else ""
    return (
        row["figure"],
        f"{row['dataset']}, {row['model']}",
        f"{row['method']}{setting}",
        "no noise" if math.isnan(row["epsilon"]) else f"{row['epsilon']:g}",
        metric,
        f"{row['value']:g}",
        _measured(row["ours"], row["stderr"], metric),
        "" if math.isnan(difference) else f"{difference:+.{_DIGITS.get(metric, 4)}f}",
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
    """A mean with its standard error, if that is known."""
    digits = _DIGITS.get(metric, 4)
    if math.isnan(mean):
        return "not run"
    return f"{mean:.{digits}f}" + ("" if math.isnan(stderr) else f" ± {stderr:.{digits}f}")


@dataclass(frozen=True)
class Report:
    """The finished tables, and the figures by name."""

    table: pd.DataFrame
    totals: pd.DataFrame
    pictures: dict[str, Picture]
    runs: int


def report(work: Work, *, refused: Sequence[str]) -> Report:
    """Write results.parquet, results.csv, summary.csv, the figures, report.html and page.md from all finished cells.

    refused: sentences that say why cells could not run.
    """
    place = work.place
    table = results(place, work.cells)
    totals = summary(table)
    write_tables(place, table, totals)
    runs = count_runs(place)
    _stamp(place, table, runs)
    pictures = _pictures(work, table, totals) if len(table) else {}
    for name, drawn in pictures.items():
        write_whole(place.folder / f"{name}.png", partial(Path.write_bytes, data=drawn.light))
    content = _content(work, table, totals, runs) | {"pictures": pictures, "refused": refused}
    html = environment(below=_HERE).get_template("comparison.html.j2")
    markdown = environment(below=_HERE, autoescape=False).get_template("comparison.md.j2")
    write_text(place.folder / PAGE, html.render(content))
    write_text(place.folder / MARKDOWN, markdown.render(content))
    return Report(table, totals, pictures, runs)


def count_runs(place: Place) -> int:
    """The number of runs in the comparison's ledgers, including cells that are no longer in its file."""
    ledgers = [Ledger.open(url) for url in place.ledger_urls()]
    return sum(row.kind == "reserve" for ledger in ledgers for row in ledger.history())


def _stamp(place: Place, table: pd.DataFrame, runs: int) -> None:
    """Update the number of runs on the cells' cards."""
    for digest in table["digest"].unique():
        result = place.result(digest)
        if result["card"]["runs"] != runs:
            result["card"] = counted(result["card"], runs)
            write_json(place.cells / f"{digest}.json", result)


def _content(work: Work, table: pd.DataFrame, totals: pd.DataFrame, runs: int) -> dict[str, object]:
    """The texts and tables of the page, which are the same as HTML and as Markdown."""
    published = work.comparison.published
    found = None if published is None else beside(read_published(work.place.root / published), totals)
    return {
        "title": work.comparison.title,
        "sweep": (
            f"There were {runs:,} runs of the comparison {work.comparison.name!r} on public records. The comparison as"
            " a whole is not charged to anybody: its ledger records each run by itself, and choosing a method or a"
            " setting by these results is in no epsilon."
        ),
        "facts": _facts(work, table),
        "tables": result_tables(totals),
        "published": None if found is None else published_table(found),
    }


def _facts(work: Work, table: pd.DataFrame) -> list[tuple[str, str]]:
    comparison, versions = work.comparison, table["code"].nunique()
    folds = comparison.folds
    repeats = (
        f"{folds.repeats} x {folds.k}-fold cross-validation over training and test records, seed {folds.seed}"
        if folds
        else "the data's own split"
    )
    deltas = sorted(table["delta"].dropna().unique())
    facts = [
        ("problems", "; ".join(f"{problem.model} on {problem.dataset}" for problem in comparison.problems)),
        ("methods", ", ".join(dict.fromkeys(table["label"]))),
        ("delta", ", ".join(f"{delta:g}" for delta in deltas)),
        ("split", repeats),
        ("seeds of noise", str(comparison.seeds)),
        ("finished cells", f"{len(table):,} of {len(work.cells):,}"),
    ]
    if versions > 1:
        facts.append(("versions of the code", f"{versions}: --renew runs the older cells again"))
    return facts


def _pictures(work: Work, table: pd.DataFrame, totals: pd.DataFrame) -> dict[str, Picture]:
    pictures = {}
    by_metric: dict[str, list[pd.DataFrame]] = {}
    for _, rows in totals.groupby(figures.PROBLEM, sort=False):
        for metric in shown(rows):
            by_metric.setdefault(metric, []).append(rows)
    for metric, problems in by_metric.items():
        if totals["epsilon"].notna().any():
            words = f"{_titled(metric)} against epsilon; bars are one standard error, methods without noise are dashed."
            draw = partial(figures.by_epsilon, pd.concat(problems), metric, words=_titled(metric))
            pictures[metric] = picture(draw, words)
    curves = _gathered(work.place, table, "curve")
    if len(curves):
        gaps = with_gap(curves)
        words = (
            "How far the objective is above the least known on the same records, by step; mean over cells. A method"
            " that asks once is dashed."
        )
        draw = partial(figures.over_steps, gaps, x="step", y="gap", words="objective - least known")
        pictures["convergence"] = picture(draw, words)
    traces = _noise(_gathered(work.place, table, "trace"))
    if len(traces):
        words = (
            "Standard deviation of the noise on each release, before it is divided, in the first run of each."
        )
        draw = partial(figures.over_steps, traces, x="release", y="noise_std", words="noise (std)")
        pictures["noise"] = picture(draw, words)
    return pictures


def _gathered(place: Place, table: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The curves or traces of the finished cells in one table, with the columns that identify a cell."""
    names = ["dataset", "model", "label", "epsilon", "repeat", "fold"]
    frames = []
    for row in table.to_dict("records"):
        path = place.cells / f"{row['digest']}.{kind}.parquet"
        if path.exists():
            frames.append(
                pd.read_parquet(path)
                .rename(columns={"epsilon": "spent"})
                .assign(**{n: row[n] for n in names})
            )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _noise(traces: pd.DataFrame) -> pd.DataFrame:
    """The releases with noise; if a method makes several kinds of release, the label names the kind."""
    if not len(traces):
        return traces
    traces = traces[traces["noise_std"] > 0]
    kinds = traces.groupby("label")["kind"].transform("nunique")
    named = traces["label"] + ", " + traces["kind"]
    return traces.assign(label=traces["label"].where(kinds == 1, named), release=traces["release"] + 1)


def log_comparison(work: Work, report: Report) -> bool:
    """Log the comparison as a group: a run per method with its tables, and a summary with all tables and the figures.

    The settings are those of params.yaml. Returns whether it was logged.
    """
    root = work.place.root
    settings = params.load(root / "params.yaml", reads=("tracking",)).tracking
    return log_group(work.comparison.name, list(_members(work, report)), settings, root=root)


def _members(work: Work, report: Report) -> Iterator[Member]:
    comparison, folder = work.comparison, work.place.folder
    shared: dict[str, Any] = {"comparison": comparison.name, "title": comparison.title, "private": False}
    for method, rows in report.table.groupby("method", sort=False):
        config = shared | {
            "method": str(method),
            "labels": list(dict.fromkeys(rows["label"])),
            "algorithm": comparison.methods[str(method)].algorithm,
        }
        tables = {"results": rows, "summary": report.totals[report.totals["method"] == method]}
        yield Member(str(method), config, {"cells": len(rows), "runs": report.runs}, tables)
    yield Member(
        "summary",
        shared,
        {"cells": len(report.table), "runs": report.runs},
        {"results": report.table, "summary": report.totals},
        images={f"figures/{name}": folder / f"{name}.png" for name in report.pictures},
        files=[folder / name for name in FILES],
    )
