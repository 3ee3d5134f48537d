"""The history on a run's page: the population's blocks according to the ledger, and earlier periods of the retraining.

Everything is shown as of the run's settlement, so that a later report says the same. Nothing here is about private
records, except numbers that were released and paid for; held-out records are public. The texts are in history.html.j2.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from algorithms.privacy.card.text import rounded_up
from algorithms.privacy.ledger import WHOLE_POPULATION, Ledger, Settlement, settlement
from tasks.reporting.figures import Drawing, Theme, empty, legend, styled
from tasks.retraining.registry import Registry, State, States
from tasks.runs.quality import ACCURACY, amount, measure, quality

if TYPE_CHECKING:  # as in `figures`
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLOCKS = ("block", "spent_epsilon", "spent_delta", "cap_epsilon", "cap_delta", "retired")
RETRAININGS = ("period", "outcome", "run_id", "epsilon", "quality", "blocks")
THIS_RUN = "this run"
"""The outcome of the run itself, which is compared with the model in use only after its report is made."""
_MOST_NAMES, _LONGEST_NAME, _FEWEST_PLACES, _MOST_BARS = 10, 12, 6, 60
_OUT_OF_SIGHT = 20.0
"""A cap of more than this many times the largest spending is named and not drawn, since no bar would be visible."""
_MOST_ROWS = 12
_DIFFERS = 1.02
"""Quality is drawn against epsilon if the largest epsilon is more than this many times the smallest."""
_BECAME = {
    "promoted": "its model served",
    "kept": "its model did not serve",
    "forfeited": "given up; all of it counts as spent",
    "given up": "given up",
    "open": "not finished",
    THIS_RUN: THIS_RUN,
}


def blocks_figure(blocks: pd.DataFrame, *, theme: Theme) -> "Figure":
    """Draw epsilon spent on each block against its cap, in the order of declaration; columns as in `History.blocks`."""
    figure, axes = empty(theme)
    places, retired = np.arange(len(blocks)), blocks["retired"].to_numpy(dtype=bool)
    spent, cap = blocks["spent_epsilon"].to_numpy(), blocks["cap_epsilon"].to_numpy()
    # Gaps between very many bars would be uneven.
    shape: dict[str, Any] = (
        {"width": 0.8} if len(blocks) <= _MOST_BARS else {"width": 1.0, "antialiased": False}
    )
    for chosen, colour, alpha, words in (
        (~retired, theme.accent, 1.0, "spent"),
        (retired, theme.muted, 0.55, "spent, retired"),
    ):
        if chosen.any():
            axes.bar(
                places[chosen], spent[chosen], color=colour, alpha=alpha, label=words, linewidth=0, **shape
            )
    top = _caps(axes, places, cap, float(spent.max()), theme)
    axes.set(xlabel="block", ylabel="privacy spent (epsilon)", ylim=(0, top or 1.0))
    _name(axes, list(blocks["block"]))
    legend(axes, theme, outside=True, columns=3)
    return figure


def _caps(axes: "Axes", places: NDArray[Any], cap: NDArray[Any], spent: float, theme: Theme) -> float:
    """Draw the cap of each block, or name it in the legend if it is far above; returns the end of the axis."""
    highest = float(cap.max())
    look: dict[str, Any] = {"color": theme.second, "linestyle": "--"}
    if 0 < spent * _OUT_OF_SIGHT < highest:
        number = f"{highest:,.0f}" if highest >= 1000 else f"{highest:g}"
        axes.plot([], [], label=f"cap {number}, far above", **look)
        return 1.1 * spent
    edges = np.append(places - 0.5, places[-1] + 0.5)
    axes.plot(np.repeat(edges, 2)[1:-1], np.repeat(cap, 2), label="cap", **look)
    return 1.08 * max(spent, highest)


def retrainings_figure(retrainings: pd.DataFrame, *, measure: str = ACCURACY, theme: Theme) -> "Figure":
    """Draw held-out quality above epsilon, over the periods; columns as in `History.retrainings`."""
    figure, above = empty(theme, height=4.6, rows=2)
    below = styled(figure.add_subplot(2, 1, 2, sharex=above), theme)
    _qualities(above, retrainings, measure, theme)
    _costs(below, retrainings, theme)
    _name(below, list(retrainings["period"]))
    above.tick_params(labelbottom=False)
    below.set(xlabel="period")
    return figure


def _qualities(axes: "Axes", retrainings: pd.DataFrame, measure: str, theme: Theme) -> None:
    places, quality = np.arange(len(retrainings)), retrainings["quality"].to_numpy()
    models = np.isfinite(quality)
    axes.plot(places[models], quality[models], color=theme.accent, linewidth=1, zorder=1)
    for outcome, words, colour, edge in (
        ("promoted", "served", theme.accent, theme.accent),
        ("kept", "did not serve", theme.ground, theme.accent),
        (THIS_RUN, THIS_RUN, theme.second, theme.second),
    ):
        chosen = models & (retrainings["outcome"] == outcome).to_numpy()
        if chosen.any():
            axes.scatter(
                places[chosen], quality[chosen], color=colour, edgecolor=edge, s=26, label=words, zorder=2
            )
    _label(axes, measure)
    legend(axes, theme, outside=True, columns=3)


def _label(axes: "Axes", measure: str) -> None:
    """Label the vertical axis; accuracies are in percent."""
    from matplotlib.ticker import PercentFormatter

    if measure.endswith(ACCURACY):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(ylabel=f"held-out {measure}")


def _costs(axes: "Axes", retrainings: pd.DataFrame, theme: Theme) -> None:
    places, epsilon = np.arange(len(retrainings)), retrainings["epsilon"].fillna(0.0).to_numpy()
    models = retrainings["quality"].notna().to_numpy()
    for chosen, colour, words in (
        (models, theme.accent, "of a model"),
        (~models, theme.muted, "spent without a model"),
    ):
        if chosen.any():
            axes.bar(places[chosen], epsilon[chosen], color=colour, width=0.6, label=words)
    axes.set(ylabel="epsilon of the run")
    if not models.all():
        legend(axes, theme, outside=True, columns=2)


def quality_figure(retrainings: pd.DataFrame, *, measure: str = ACCURACY, theme: Theme) -> "Figure":
    """Draw the held-out quality of the models against their epsilon; columns as in `History.retrainings`."""
    figure, axes = empty(theme, height=2.8)
    for chosen, colour, words in (
        (retrainings["outcome"] != THIS_RUN, theme.accent, "earlier models"),
        (retrainings["outcome"] == THIS_RUN, theme.second, THIS_RUN),
    ):
        axes.scatter(
            retrainings["epsilon"][chosen], retrainings["quality"][chosen], color=colour, s=26, label=words
        )
    axes.locator_params(axis="x", nbins=6)
    _label(axes, measure)
    axes.set(xlabel="epsilon of the run")
    legend(axes, theme, outside=True, columns=2)
    return figure


def _name(axes: "Axes", names: Sequence[str]) -> None:
    """Label evenly spaced positions 0, 1, ... of the horizontal axis with names, including the last."""
    step = -(-len(names) // _MOST_NAMES)
    shown = range((len(names) - 1) % step, len(names), step)
    short = [
        name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
        for name in (names[place] for place in shown)
    ]
    axes.set_xticks(list(shown), labels=short)
    if len(shown) > _FEWEST_PLACES // 2 or max(map(len, names)) > _FEWEST_PLACES:
        axes.tick_params(axis="x", labelrotation=45)
    margin = 0.6 + max(0.0, (_FEWEST_PLACES - len(names)) / 2)
    axes.set_xlim(-margin, len(names) - 1 + margin)


@dataclass(frozen=True)
class History:
    """The history of a run.

    blocks: the population's blocks in order, with the columns BLOCKS. retrainings: from the oldest to this run, with
    the columns RETRAININGS: epsilon is what a run is charged; quality is on held-out records, NaN if there is no model;
    blocks are a text. Both tables may be empty. measure: the name of the quality metric.
    """

    blocks: pd.DataFrame
    retrainings: pd.DataFrame
    measure: str = ACCURACY


def nothing() -> History:
    """The history of a run on a whole population."""
    return History(_frame([], BLOCKS), _frame([], RETRAININGS))


def is_on_blocks(receipt: Mapping[str, Any]) -> bool:
    """Whether a run was charged to blocks; other runs have no history and do not need the ledger."""
    return bool(receipt.get("blocks", [WHOLE_POPULATION]) != [WHOLE_POPULATION])


def history(
    receipt: Mapping[str, Any], metrics: Mapping[str, Any], *, ledger: Ledger, home: Path, root: Path
) -> History:
    """The history of a finished run on blocks.

    receipt, metrics: of the run. home: folder of the states of retrainings. root: the checkout, with its models. If the
    ledger does not know the run, the history has only the blocks that the receipt names.
    """
    if ledger.status(receipt["run_id"]) != "settled":
        return History(_blocks_of_receipt(receipt), nothing().retrainings)
    past = settlement(ledger, receipt["population"], receipt["run_id"])
    rows = [
        (b.block, b.spent.epsilon, b.spent.delta, b.cap.epsilon, b.cap.delta, b.retired) for b in past.blocks
    ]
    return History(_frame(rows, BLOCKS), _retrainings(receipt, metrics, past, home, root), measure(metrics))


def _blocks_of_receipt(receipt: Mapping[str, Any]) -> pd.DataFrame:
    rows = [
        (row["name"], *(row[part][name] for part in ("spent", "cap") for name in ("epsilon", "delta")), False)
        for row in receipt["ledger"].get("blocks", ())
    ]
    return _frame(rows, BLOCKS)


def _retrainings(
    receipt: Mapping[str, Any], metrics: Mapping[str, Any], past: Settlement, home: Path, root: Path
) -> pd.DataFrame:
    if past.run.retraining is None:
        return nothing().retrainings
    name, _, period = past.run.retraining.rpartition(" ")
    registry = Registry(root / "models" / name)
    # In the order in which they began, since names of periods of several lengths do not sort by time.
    earlier = itertools.takewhile(
        lambda state: state.period != period, States(home / "retrainings" / name).all()
    )
    rows = [_row(state, past, registry) for state in earlier]
    this = (receipt["run_id"], metrics["epsilon"], quality(metrics), _words(receipt["blocks"]))
    return _frame([*rows, (period, THIS_RUN, *this)], RETRAININGS)


def _row(state: State, past: Settlement, registry: Registry) -> tuple[Any, ...]:
    """An earlier period. Without a model, epsilon is what the ledger charged for the run; without a run, it is 0."""
    found = registry.metrics(state.run_id) if state.run_id else {}
    run = past.books.runs.get(state.run_id or "")
    epsilon = found.get("epsilon", run.charged.epsilon if run else 0.0)
    value = quality(found) if found else None
    return state.period, state.kind, state.run_id, epsilon, value, _words(state.blocks)


def _words(blocks: Sequence[str]) -> str:
    """Blocks in a table cell: up to three are listed, more are shown as the first, the last and their number."""
    return ", ".join(blocks) if len(blocks) < 4 else f"{blocks[0]} to {blocks[-1]} ({len(blocks)})"


def _frame(rows: Sequence[tuple[Any, ...]], columns: Sequence[str]) -> pd.DataFrame:
    """Make a table; a missing or infinite number becomes NaN."""
    table = pd.DataFrame(rows, columns=list(columns))
    numbers = [name for name in columns if name.endswith(("epsilon", "delta", "quality"))]
    return table.assign(**{name: pd.to_numeric(table[name]).replace(math.inf, math.nan) for name in numbers})


def drawings(history: History) -> dict[str, tuple[Drawing, str]]:
    """The figures that have data, by name, each with its alternative text."""
    blocks, retrainings, of = history.blocks, history.retrainings, history.measure
    found: dict[str, tuple[Drawing, str]] = {}
    if not blocks.empty:
        found["blocks"] = lambda theme: blocks_figure(blocks, theme=theme), _blocks_in_words(blocks)
    models = retrainings.dropna(subset=["quality"])
    if len(models) > 1:
        words = (
            f"Held-out {of} of {len(models)} models over {len(retrainings)} periods, from"
            f" {amount(models['quality'].iloc[0], of, 1)} to {amount(models['quality'].iloc[-1], of, 1)}, and epsilon"
            " of each run below."
        )
        found["retrainings"] = lambda theme: retrainings_figure(retrainings, measure=of, theme=theme), words
    private = models.dropna(subset=["epsilon"])
    least, most = private["epsilon"].min(), private["epsilon"].max()
    if most > _DIFFERS * least:
        words = f"Held-out {of} of {len(private)} models whose epsilon is between {least:.3g} and {most:.3g}."
        found["quality"] = lambda theme: quality_figure(private, measure=of, theme=theme), words
    return found


def _blocks_in_words(blocks: pd.DataFrame) -> str:
    spent, cap = blocks["spent_epsilon"], blocks["cap_epsilon"]
    over = "" if (spent <= cap).all() else " Some are above a cap that was lowered later."
    return (
        f"Epsilon spent on each of {len(blocks)} blocks, from {spent.min():.3g} to {spent.max():.3g}, against caps of"
        f" at most {cap.max():,.10g}; {int(blocks['retired'].sum())} are retired.{over}"
    )


def shown(history: History, *, read: int) -> dict[str, object]:
    """The variables of the template. read: the number of blocks that this run read."""
    blocks, retrainings = history.blocks, history.retrainings
    served = retrainings.loc[retrainings["outcome"] == "promoted", "period"]
    serving = None if served.empty else str(served.iloc[-1])
    last = retrainings.iloc[::-1].head(_MOST_ROWS)
    return {
        "history": history,
        "read": read,
        "retired": int(blocks["retired"].sum()),
        "most_spent": 0.0 if blocks.empty else float(blocks["spent_epsilon"].max()),
        "serving": serving,
        "retrainings": [_table_row(row, serving, history.measure) for row in last.to_dict("records")],
        "earlier": len(retrainings) - len(last),
    }


def _table_row(row: Mapping[Any, Any], serving: str | None, of: str) -> dict[str, str]:
    is_serving = row["period"] == serving
    return {
        "period": row["period"],
        "became": "its model serves" if is_serving else _BECAME[row["outcome"]],
        "epsilon": "no bound" if math.isnan(row["epsilon"]) else rounded_up(row["epsilon"]),
        "quality": "no model" if math.isnan(row["quality"]) else amount(row["quality"], of, 1),
        "blocks": row["blocks"],
    }
