"""The figures of a comparison, as in papers: one panel per problem, one line per method."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from tasks.reporting.figures import Theme, styled

_WIDTH, _HEIGHT, _DOTS_PER_INCH = 3.6, 2.7, 160
_MARKERS = "osD^v<>ph*"
_COLOURS = (
    "#1f77b4", "#e8710a", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#a8a51c", "#17a3b4",
)  # fmt: skip
_LINES = ("-", "--", ":")
_ONE_STEP = 2
"""Points of the curve of a method with a single release: before it and after it."""
PROBLEM = ["dataset", "model"]


def by_epsilon(totals: pd.DataFrame, metric: str, theme: Theme, *, words: str) -> Figure:
    """Draw a metric against a logarithmic epsilon, with bars of one standard error; methods without noise are dashed.

    totals: from `results.summary`. words: the name of the metric.
    """
    problems = list(totals.groupby(PROBLEM, sort=False))
    labels = list(dict.fromkeys(totals["label"]))
    figure, grid = _panels(1, len(problems), labels, theme)
    for axes, (names, rows) in zip(grid[0], problems, strict=True):
        for label, of_method in rows.groupby("label", sort=False):
            _points(axes, of_method, metric, str(label), _look(labels, str(label)))
        axes.set_xscale("log")
        values = sorted(rows["epsilon"].dropna().unique())
        axes.set_xticks(values, labels=[f"{value:g}" for value in values])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(", ".join(map(str, names)), color=theme.ink, size=10)
        axes.set(xlabel="epsilon", ylabel=words)
    _legend(figure, grid[0], labels, theme)
    return figure


def over_steps(table: pd.DataFrame, theme: Theme, *, x: str, y: str, words: str) -> Figure:
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
            shown = rows[rows["epsilon"].isna() | (rows["epsilon"] == epsilon)]
            for label, of_method in shown.groupby("label", sort=False):
                mean = of_method.groupby(x)[y].mean()
                colour, _, line = _look(labels, str(label))
                if len(mean) <= _ONE_STEP:
                    axes.axhline(float(mean.iloc[-1]), color=colour, linestyle="--", linewidth=1, label=label)
                else:
                    axes.plot(mean.index, mean, color=colour, linestyle=line, linewidth=1.2, label=label)
            if (shown[y] > 0).any():
                axes.set_yscale("log", nonpositive="mask")
            where = "" if epsilon is None else f", epsilon {epsilon:g}"
            axes.set_title(", ".join(map(str, names)) + where, color=theme.ink, size=9)
            axes.set(xlabel=x, ylabel=words)
    _legend(figure, [axes for row in grid for axes in row], labels, theme)
    return figure


def _points(axes: Axes, rows: pd.DataFrame, metric: str, label: str, look: tuple[str, str, str]) -> None:
    colour, marker, line = look
    if rows["epsilon"].isna().all():
        axes.axhline(float(rows[f"{metric}_mean"].iloc[0]), color=colour, linestyle="--", label=label)
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
        label=label,
    )


def _look(labels: Sequence[str], label: str) -> tuple[str, str, str]:
    """Colour, marker and line of a method, the same in every panel."""
    place = labels.index(label)
    return (
        _COLOURS[place % len(_COLOURS)],
        _MARKERS[place % len(_MARKERS)],
        _LINES[place // len(_COLOURS) % len(_LINES)],
    )


def _panels(rows: int, columns: int, labels: Sequence[str], theme: Theme) -> tuple[Figure, list[list[Axes]]]:
    """Empty panels with room below them for a legend of these labels."""
    size = (max(5.0, _WIDTH * columns), _HEIGHT * rows + 0.35 + 0.11 * len(labels))
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, facecolor=theme.ground, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        styled(axes, theme, size=8).grid(color=theme.muted, alpha=0.25, linewidth=0.6)
    return figure, [list(row) for row in grid]


def _legend(figure: Figure, panels: Sequence[Axes], labels: Sequence[str], theme: Theme) -> None:
    """One legend for all panels, each label once."""
    lines = {
        name: line for axes in panels for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    shown = [label for label in labels if label in lines]
    figure.legend(
        [lines[label] for label in shown],
        shown,
        loc="outside lower center",
        ncols=3 if max(map(len, shown), default=0) < 24 else 2,
        frameon=False,
        fontsize=8,
        labelcolor=theme.ink,
    )
