"""What the page says and draws of a run's history; the words around it are in history.html.j2."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from algorithms.privacy.card_words import rounded_up
from tasks.figures import Theme
from tasks.history import THIS_RUN, History
from tasks.history_figures import accuracy_figure, blocks_figure, retrainings_figure

_MOST_ROWS = 12
_DIFFERS = 1.02
"""Accuracy is drawn against epsilon where the largest epsilon is more than this many times the smallest."""
_BECAME = {
    "promoted": "its model served",
    "kept": "its model did not serve",
    "forfeited": "given up; all of it counts as spent",
    "given up": "given up",
    "open": "not finished",
    THIS_RUN: THIS_RUN,
}


def drawings(history: History) -> dict[str, tuple[Callable[[Theme], Figure], str]]:
    """The figures that there is something to draw for, by name, each with its words for who cannot see it."""
    blocks, retrainings = history.blocks, history.retrainings
    found: dict[str, tuple[Callable[[Theme], Figure], str]] = {}
    if not blocks.empty:
        found["blocks"] = lambda theme: blocks_figure(blocks, theme=theme), _blocks_in_words(blocks)
    models = retrainings.dropna(subset=["accuracy"])
    if len(models) > 1:
        words = (
            f"Right answers of {len(models)} models over {len(retrainings)} periods, from"
            f" {models['accuracy'].iloc[0]:.1%} to {models['accuracy'].iloc[-1]:.1%}, and epsilon of each run below."
        )
        found["retrainings"] = lambda theme: retrainings_figure(retrainings, theme=theme), words
    private = models.dropna(subset=["epsilon"])
    least, most = private["epsilon"].min(), private["epsilon"].max()
    if most > _DIFFERS * least:
        words = f"Right answers of {len(private)} models whose epsilon is between {least:.3g} and {most:.3g}."
        found["accuracy"] = lambda theme: accuracy_figure(private, theme=theme), words
    return found


def _blocks_in_words(blocks: pd.DataFrame) -> str:
    spent, cap = blocks["spent_epsilon"], blocks["cap_epsilon"]
    over = "" if (spent <= cap).all() else " Some are above a cap that was lowered later."
    return (
        f"Epsilon spent on each of {len(blocks)} blocks, from {spent.min():.3g} to {spent.max():.3g}, against caps of"
        f" at most {cap.max():,.10g}; {int(blocks['retired'].sum())} are retired.{over}"
    )


def shown(history: History, *, read: int) -> dict[str, object]:
    """What the template takes. read: how many blocks this run read."""
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
        "retrainings": [_row(row, serving) for row in last.to_dict("records")],
        "earlier": len(retrainings) - len(last),
    }


def _row(row: Mapping[Any, Any], serving: str | None) -> dict[str, str]:
    is_serving = row["period"] == serving
    return {
        "period": row["period"],
        "became": "its model serves" if is_serving else _BECAME[row["outcome"]],
        "epsilon": "no bound" if math.isnan(row["epsilon"]) else rounded_up(row["epsilon"]),
        "accuracy": "no model" if math.isnan(row["accuracy"]) else f"{100 * row['accuracy']:.1f} %",
        "blocks": row["blocks"],
    }
