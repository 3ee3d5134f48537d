"""The results of a comparison: tables, figures, a self-contained HTML page, the same page as Markdown.

There is a row per trial, a row per method and epsilon, and a row per published number; these are in a CSV file that the
comparison names, and are joined by name. The comparison is logged to Weights & Biases.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullFormatter, PercentFormatter

from algorithms.plain_text import for_figure
from data.files import write_text, write_whole
from tasks.comparing.definition import METRICS, Trial, read_published
from tasks.comparing.trial import ComparisonFolder, write_parquet
from tasks.comparing.work import ComparisonWork
from tasks.config import params
from tasks.csv_files import write_csv
from tasks.reporting import environment
from tasks.reporting.figures import Picture, Theme, apply_theme, picture
from tasks.runs.metrics import HELD_OUT_METRICS, format_difference, format_metric, is_share
from tasks.tracking.runs import GroupMember, log_group

KEY = ["dataset", "model", "method", "label", "setting", "epsilon"]
METRIC_COLUMNS = [*HELD_OUT_METRICS, "test_loss", "objective", "gap", "seconds", "steps", "epsilon_spent"]
_RESULTS = (
    "test_loss", "objective", "seconds", "steps", "planned_steps", "epsilon_spent", "epsilon_planned",
    "noise_multiplier", "sampling_rate", "records",
)  # fmt: skip
_NUMBERS = ("test_loss", "objective", "seconds", "epsilon_spent", "epsilon_planned", "noise_multiplier")
_WIDTH, _HEIGHT, _DOTS_PER_INCH = 3.6, 2.7, 160
_MARKERS = "osD^v<>ph*"
_COLOURS = (
    "#1f77b4", "#e06c0a", "#2a9d2a", "#d62728", "#9467bd", "#9a6155", "#d65cae", "#7f7f7f", "#8f8c18", "#1599aa",
)  # fmt: skip
"""Each at least 3:1 against the ground of a light page, and inverted of a dark one (WCAG 1.4.11)."""
_LINES = ("-", "--", ":")
_LABEL_LENGTH = 40
"""Characters of a label that are shown."""
_ONE_STEP = 2
"""Points of the curve of a method with a single release: before it and after it."""
PROBLEM = ["dataset", "model"]
_TEMPLATES = Path(__file__).parent
PAGE, MARKDOWN = "report.html", "page.md"
FILES = ("results.parquet", "results.csv", "summary.csv", PAGE, MARKDOWN)
"""The files of a finished comparison, besides its figures."""
_LOSSES = ("objective", "gap", "test_loss")
"""Shown with five decimals; metrics of the test records are shown as on other pages."""
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


def join_published(published: pd.DataFrame, totals: pd.DataFrame) -> pd.DataFrame:
    """Add the columns `ours`, `stderr` and `difference` to published rows; NaN if the comparison has no such trial.

    totals: from `summary`.
    """
    key = ["dataset", "model", "method", "setting", "epsilon", "metric"]
    ours = pd.concat(
        [
            totals[key[:-1]].assign(
                metric=metric, ours=totals[f"{metric}_mean"], stderr=totals[f"{metric}_stderr"]
            )
            for metric in METRICS
            if f"{metric}_mean" in totals
        ]
    )
    joined = published.merge(ours, on=key, how="left")
    return joined.assign(difference=joined["ours"] - joined["value"])


def results(workspace: ComparisonFolder, trials: tuple[Trial, ...]) -> pd.DataFrame:
    """One row per finished trial, in the order of the trials, with the metrics of the targets that occur.

    A number that is infinite or was not recorded is NaN. gap: see `with_gap`.
    """
    done = workspace.finished_digests()
    rows = [_row(trial, workspace.result(trial.digest)) for trial in trials if trial.digest in done]
    metric_columns = [name for name in HELD_OUT_METRICS if any(name in row for row in rows)]
    columns = [
        *KEY,
        "delta",
        "accountant",
        "seed",
        "repeat",
        "fold",
        *metric_columns,
        *_RESULTS,
        "digest",
        "code",
    ]
    numbers = ("epsilon", "delta", *metric_columns, *_NUMBERS)
    return with_gap(pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(numbers, float)))


def with_gap(table: pd.DataFrame) -> pd.DataFrame:
    """Add the column `gap`: the objective minus the smallest that is in the table for the same training records."""
    # Objectives of other training records, as of another fold, have another minimum.
    lowest = table.groupby(["dataset", "model", "repeat", "fold"])["objective"].transform("min")
    return table.assign(gap=table["objective"] - lowest)


def _row(trial: Trial, result: Mapping[str, Any]) -> dict[str, object]:
    fold, results = trial.fold, result["results"]
    return {
        **{name: getattr(trial, name) for name in (*KEY, "accountant", "seed")},
        "delta": None if trial.epsilon is None else trial.delta,
        "repeat": fold.repeat if fold else 0,
        "fold": fold.fold if fold else 0,
        **{name: results[name] for name in (*HELD_OUT_METRICS, *_RESULTS) if name in results},
        "digest": trial.digest,
        "code": result["code"],
    }


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Mean, standard deviation, standard error and number of trials by data set, model, method and epsilon.

    The standard error assumes that trials are independent, which is not quite true for folds of the same records. It is
    NaN for a single trial.
    """
    grouped = table.groupby(KEY, sort=False, dropna=False)
    parts = {"n": grouped.size()}
    for metric in (name for name in METRIC_COLUMNS if name in table):
        mean, std, count = (getattr(grouped[metric], name)() for name in ("mean", "std", "count"))
        parts |= {f"{metric}_mean": mean, f"{metric}_std": std, f"{metric}_stderr": std / np.sqrt(count)}
    return pd.DataFrame(parts).reset_index()


def draw_by_epsilon(totals: pd.DataFrame, metric: str, theme: Theme, *, words: str) -> Figure:
    """Draw a metric against a logarithmic epsilon, with bars of one standard error; methods without noise are dashed.

    totals: from `summary`. words: the name of the metric.
    """
    problems = list(totals.groupby(PROBLEM, sort=False))
    labels = list(dict.fromkeys(totals["label"]))
    figure, grid = _panels(1, len(problems), labels, theme)
    for axes, (names, rows) in zip(grid[0], problems, strict=True):
        for label, of_method in rows.groupby("label", sort=False):
            _draw_points(axes, of_method, metric, str(label), _style_of(labels, str(label)))
        axes.set_xscale("log")
        values = sorted(rows["epsilon"].dropna().unique())
        axes.set_xticks(values, labels=[f"{value:g}" for value in values])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(_title(names), color=theme.ink, size=10)
        axes.set(xlabel="epsilon", ylabel=words)
        if is_share(metric):
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _draw_legend(figure, grid[0], labels, theme)
    return figure


def draw_over_steps(table: pd.DataFrame, theme: Theme, *, x: str, y: str, words: str) -> Figure:
    """Draw the mean of column y over column x; a row per problem, a column per epsilon, a line per label.

    table: columns dataset, model, label, epsilon, x and y. words: the name of y. A label with at most two points, such
    as a method with a single release, is a dashed line.
    """
    labels = list(dict.fromkeys(table["label"]))
    private = table.dropna(subset=["epsilon"])
    epsilons = sorted(private["epsilon"].unique()) or [None]
    problems = list(table.groupby(PROBLEM, sort=False))
    figure, grid = _panels(len(problems), len(epsilons), labels, theme)
    for row, (names, rows) in zip(grid, problems, strict=True):
        for axes, epsilon in zip(row, epsilons, strict=True):
            # Methods without noise have no epsilon, and are in every column.
            at_epsilon = rows[rows["epsilon"].isna() | (rows["epsilon"] == epsilon)]
            for label, of_method in at_epsilon.groupby("label", sort=False):
                mean = of_method.groupby(x)[y].mean()
                colour, _, line = _style_of(labels, str(label))
                if len(mean) <= _ONE_STEP:
                    last = float(mean.iloc[-1])
                    axes.axhline(last, color=colour, linestyle="--", linewidth=1, label=_entry(label))
                else:
                    axes.plot(
                        mean.index, mean, color=colour, linestyle=line, linewidth=1.2, label=_entry(label)
                    )
            if (at_epsilon[y] > 0).any():
                axes.set_yscale("log", nonpositive="mask")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # by default a formula
                axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
            where = "" if epsilon is None else f", epsilon {epsilon:g}"
            axes.set_title(_title(names) + where, color=theme.ink, size=9)
            axes.set(xlabel=x, ylabel=words)
    _draw_legend(figure, [axes for row in grid for axes in row], labels, theme)
    return figure


def _draw_points(
    axes: Axes, rows: pd.DataFrame, metric: str, label: str, style: tuple[str, str, str]
) -> None:
    colour, marker, line = style
    if rows["epsilon"].isna().all():
        value = float(rows[f"{metric}_mean"].iloc[0])
        axes.axhline(value, color=colour, linestyle="--", label=_entry(label))
        return
    rows = rows.sort_values("epsilon")
    axes.errorbar(
        rows["epsilon"],
        rows[f"{metric}_mean"],
        yerr=rows[f"{metric}_stderr"].fillna(0.0),
        color=colour,
        marker=marker,
        linestyle=line,
        markersize=4,
        linewidth=1.3,
        capsize=2,
        label=_entry(label),
    )


def _title(names: Iterable[object]) -> str:
    """The title of a problem's panel. names: data set and model."""
    return ", ".join(for_figure(str(name), _LABEL_LENGTH) for name in names)


def _entry(label: object) -> str:
    """A label in the legend, which leaves out what begins with an underscore."""
    text = for_figure(str(label), _LABEL_LENGTH)
    return f" {text}" if text.startswith("_") else text


def _style_of(labels: Sequence[str], label: str) -> tuple[str, str, str]:
    """Colour, marker and line of a method, the same in every panel."""
    index = labels.index(label)
    return (
        _COLOURS[index % len(_COLOURS)],
        _MARKERS[index % len(_MARKERS)],
        _LINES[index // len(_COLOURS) % len(_LINES)],
    )


def _panels(rows: int, columns: int, labels: Sequence[str], theme: Theme) -> tuple[Figure, list[list[Axes]]]:
    """Empty panels, below each other where the theme is narrow, with room below them for a legend of these labels."""
    high, wide = (rows * columns, 1) if theme.is_narrow else (rows, columns)
    width, line = (theme.width, 0.2) if theme.is_narrow else (max(5.0, _WIDTH * columns), 0.11)
    size = (width, _HEIGHT * high + 0.35 + line * len(labels))
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, facecolor=theme.ground, layout="constrained")
    grid = figure.subplots(high, wide, squeeze=False)
    for axes in grid.flat:
        apply_theme(axes, theme, size=_size(theme)).grid(color=theme.muted, alpha=0.25, linewidth=0.6)
    return figure, [list(row) for row in grid.reshape(rows, columns)]


def _size(theme: Theme) -> int:
    """Of texts, in points."""
    return 9 if theme.is_narrow else 8


def _draw_legend(figure: Figure, panels: Sequence[Axes], labels: Sequence[str], theme: Theme) -> None:
    """One legend for all panels, each label once."""
    lines = {
        name: line for axes in panels for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    entries = [entry for entry in dict.fromkeys(map(_entry, labels)) if entry in lines]
    figure.legend(
        [lines[label] for label in entries],
        entries,
        loc="outside lower center",
        ncols=1 if theme.is_narrow else 3 if max(map(len, entries), default=0) < 24 else 2,
        frameon=False,
        fontsize=_size(theme),
        labelcolor=theme.ink,
    )


def page_metrics(totals: pd.DataFrame) -> list[str]:
    """The metrics that a page shows for a problem: that by which its models are compared, and a few more."""
    columns = totals.columns[totals.notna().any()]
    shown_metrics = [name for name in (*HELD_OUT_METRICS, "objective") if f"{name}_mean" in columns]
    return [
        name for index, name in enumerate(shown_metrics) if index == 0 or name in ("perplexity", "objective")
    ]


def _heading(metric: str) -> str:
    return "Objective" if metric == "objective" else f"{_WORDS[metric]} on the test records"


@dataclass(frozen=True)
class TextTable:
    """A table of texts."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def result_tables(totals: pd.DataFrame) -> list[TextTable]:
    """A table per problem and metric: methods as rows, epsilons as columns, mean and standard error in each cell."""
    tables = []
    for names, rows in totals.groupby(["dataset", "model"], sort=False):
        for metric in page_metrics(rows):
            tables.append(_table(f"{_heading(metric)}: {', '.join(map(str, names))}", rows, metric))
    return tables


def published_table(rows: pd.DataFrame) -> TextTable:
    """Published numbers beside ours. rows: from `join_published`."""
    header = ("figure", "data", "method", "epsilon", "metric", "published", "ours", "difference")
    return TextTable(
        "Published numbers beside ours", header, [_published_row(row) for row in rows.to_dict("records")]
    )


def _published_row(row: Mapping[Hashable, Any]) -> tuple[str, ...]:
    metric, difference = row["metric"], row["difference"]
    setting = f" ({row['setting']})" if row["setting"] else ""
    return (
        row["figure"],
        f"{row['dataset']}, {row['model']}",
        f"{row['method']}{setting}",
        "no noise" if math.isnan(row["epsilon"]) else f"{row['epsilon']:g}",
        metric,
        f"{row['value']:g}" if metric in _LOSSES else format_metric(row["value"], metric),
        _mean_text(row["ours"], row["stderr"], metric),
        "" if math.isnan(difference) else _difference_text(difference, metric),
    )


def _table(title: str, rows: pd.DataFrame, metric: str) -> TextTable:
    epsilons = sorted(rows["epsilon"].dropna().unique())
    body = []
    for label, of_method in rows.groupby("label", sort=False):
        cells = {
            row["epsilon"]: _mean_text(row[f"{metric}_mean"], row[f"{metric}_stderr"], metric)
            for row in of_method.to_dict("records")
        }
        if of_method["epsilon"].isna().all():
            body.append([str(label), *cells.values(), *[""] * (len(epsilons) - 1)])
        else:
            body.append([str(label), *(cells.get(epsilon, "") for epsilon in epsilons)])
    header = (
        ["method", *(f"epsilon {epsilon:g}" for epsilon in epsilons)] if epsilons else ["method", "result"]
    )
    return TextTable(title, header, body)


def _mean_text(mean: float, stderr: float, metric: str) -> str:
    """A mean with its standard error, if that is known."""
    if math.isnan(mean):
        return "not run"
    text = f"{mean:.5f}" if metric in _LOSSES else format_metric(mean, metric)
    if math.isnan(stderr):
        return text
    return f"{text} ± {stderr:.5f}" if metric in _LOSSES else f"{text} ± {format_difference(stderr, metric)}"


def _difference_text(difference: float, metric: str) -> str:
    """A difference with its sign; that of shares is in percentage points."""
    size = abs(difference)
    text = f"{size:.5f}" if metric in _LOSSES else format_difference(size, metric)
    return f"{'-' if difference < 0 else '+'}{text}{' points' if is_share(metric) else ''}"


@dataclass(frozen=True)
class ComparisonReport:
    """The finished tables, and the figures by name. runs: all finished ones, also of trials that left the file."""

    table: pd.DataFrame
    totals: pd.DataFrame
    pictures: dict[str, Picture]
    runs: int


def report(work: ComparisonWork, *, refused: Sequence[str]) -> ComparisonReport:
    """Write results.parquet, results.csv, summary.csv, the figures, report.html and page.md from all finished trials.

    refused: sentences that say why trials could not run.
    """
    workspace = work.workspace
    table = results(workspace, work.trials)
    totals = summary(table)
    write_parquet(workspace.folder / "results.parquet", table)
    for name, frame in (("results", table), ("summary", totals)):
        write_whole(workspace.folder / f"{name}.csv", partial(write_csv, frame))
    runs = len(workspace.finished_digests())
    pictures = _pictures(work, table, totals) if len(table) else {}
    for name, drawn in pictures.items():
        write_whole(workspace.folder / f"{name}.png", partial(Path.write_bytes, data=drawn.wide))
    content = _content(work, table, totals, runs) | {"pictures": pictures, "refused": refused}
    html = environment(below=_TEMPLATES).get_template("comparison.html.j2")
    markdown = environment(below=_TEMPLATES, markdown=True).get_template("comparison.md.j2")
    write_text(workspace.folder / PAGE, html.render(content))
    write_text(workspace.folder / MARKDOWN, markdown.render(content))
    return ComparisonReport(table, totals, pictures, runs)


def _content(work: ComparisonWork, table: pd.DataFrame, totals: pd.DataFrame, runs: int) -> dict[str, object]:
    """The texts and tables of the page, which are the same as HTML and as Markdown."""
    published = work.comparison.published
    published_rows = (
        None if published is None else join_published(read_published(work.workspace.root / published), totals)
    )
    return {
        "title": work.comparison.title,
        "sweep": (
            f"There were {runs:,} runs of the comparison {work.comparison.name!r} on public records. The comparison as"
            " a whole is not charged to anybody, and choosing a method or a setting by these results is in no epsilon."
        ),
        "facts": _facts(work, table),
        "tables": result_tables(totals),
        "published": None if published_rows is None else published_table(published_rows),
    }


def _facts(work: ComparisonWork, table: pd.DataFrame) -> list[tuple[str, str]]:
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
        ("finished trials", f"{len(table):,} of {len(work.trials):,}"),
    ]
    if versions > 1:
        facts.append(("versions of the code", f"{versions}: --renew runs the older trials again"))
    return facts


def _pictures(work: ComparisonWork, table: pd.DataFrame, totals: pd.DataFrame) -> dict[str, Picture]:
    pictures = {}
    by_metric: dict[str, list[pd.DataFrame]] = {}
    for _, rows in totals.groupby(PROBLEM, sort=False):
        for metric in page_metrics(rows):
            by_metric.setdefault(metric, []).append(rows)
    for metric, problems in by_metric.items():
        if totals["epsilon"].notna().any():
            words = f"{_heading(metric)} against epsilon; bars are one standard error, methods without noise dashed."
            draw = partial(draw_by_epsilon, pd.concat(problems), metric, words=_heading(metric))
            pictures[metric] = picture(draw, words)
    curves = _all_rows(work.workspace, table, "curve")
    if len(curves):
        gaps = with_gap(curves)
        words = (
            "How far the objective is above the least known on the same records, by step; mean over trials. A method"
            " that asks once is dashed."
        )
        draw = partial(draw_over_steps, gaps, x="step", y="gap", words="objective - least known")
        pictures["convergence"] = picture(draw, words)
    traces = _noisy_releases(_all_rows(work.workspace, table, "trace"))
    if len(traces):
        words = (
            "Standard deviation of the noise on each release, before it is divided, in the first run of each."
        )
        draw = partial(draw_over_steps, traces, x="release", y="noise_std", words="noise (std)")
        pictures["noise"] = picture(draw, words)
    return pictures


def _all_rows(workspace: ComparisonFolder, table: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The curves or traces of the finished trials in one table, with the columns that identify a trial."""
    names = ["dataset", "model", "label", "epsilon", "repeat", "fold"]
    frames = []
    for row in table.to_dict("records"):
        path = workspace.trials / f"{row['digest']}.{kind}.parquet"
        if path.exists():
            frames.append(
                pd.read_parquet(path)
                .rename(columns={"epsilon": "spent"})
                .assign(**{n: row[n] for n in names})
            )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _noisy_releases(traces: pd.DataFrame) -> pd.DataFrame:
    """The releases with noise; if a method makes several kinds of release, the label names the kind."""
    if not len(traces):
        return traces
    traces = traces[traces["noise_std"] > 0]
    # Noise of counts and of gradients has other units, and one line through both would say nothing.
    kinds = traces.groupby("label")["kind"].transform("nunique")
    named = traces["label"] + ", " + traces["kind"]
    return traces.assign(label=traces["label"].where(kinds == 1, named), release=traces["release"] + 1)


def log_comparison(work: ComparisonWork, report: ComparisonReport) -> bool:
    """Log the comparison as a group: a run per method with its tables, and a summary with all tables and the figures.

    The settings are those of params.yaml. Returns whether it was logged.
    """
    root = work.workspace.root
    settings = params.load(root / "params.yaml", reads=("tracking",)).tracking
    return log_group(work.comparison.name, list(_members(work, report)), settings, root=root)


def _members(work: ComparisonWork, report: ComparisonReport) -> Iterator[GroupMember]:
    comparison, folder = work.comparison, work.workspace.folder
    shared: dict[str, object] = {"comparison": comparison.name, "title": comparison.title, "private": False}
    for method, rows in report.table.groupby("method", sort=False):
        config = shared | {
            "method": str(method),
            "labels": list(dict.fromkeys(rows["label"])),
            "algorithm": comparison.methods[str(method)].algorithm,
        }
        tables = {"results": rows, "summary": report.totals[report.totals["method"] == method]}
        yield GroupMember(str(method), config, {"cells": len(rows), "runs": report.runs}, tables)
    yield GroupMember(
        "summary",
        shared,
        {"cells": len(report.table), "runs": report.runs},
        {"results": report.table, "summary": report.totals},
        images={f"figures/{name}": folder / f"{name}.png" for name in report.pictures},
        files=[folder / name for name in FILES],
    )
