"""Pictures of what was before a run: spending by block, and retrainings over their periods."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from tasks.figures import Theme, empty, legend, styled
from tasks.history import THIS_RUN

_MOST_NAMES, _LONGEST_NAME, _FEWEST_PLACES, _MOST_BARS = 10, 12, 6, 60
_OUT_OF_SIGHT = 20.0
"""A cap that is this many times the largest spend is named and not drawn: no bar could be seen beside it."""


def blocks_figure(blocks: pd.DataFrame, *, theme: Theme) -> Figure:
    """Epsilon spent on each block against its cap, in the order of declaration; columns as in `History.blocks`."""
    figure, axes = empty(theme)
    places, retired = np.arange(len(blocks)), blocks["retired"].to_numpy(dtype=bool)
    spent, cap = blocks["spent_epsilon"].to_numpy(), blocks["cap_epsilon"].to_numpy()
    # Gaps between very many bars would be drawn unevenly.
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


def _caps(axes: Axes, places: NDArray[Any], cap: NDArray[Any], spent: float, theme: Theme) -> float:
    """Draws the cap of each block, or names it where it is out of sight; returns where the axis ends."""
    highest = float(cap.max())
    look: dict[str, Any] = {"color": theme.second, "linestyle": "--"}
    if 0 < spent * _OUT_OF_SIGHT < highest:
        axes.plot([], [], label=f"cap {_number(highest)}, far above", **look)
        return 1.1 * spent
    edges = np.append(places - 0.5, places[-1] + 0.5)
    axes.plot(np.repeat(edges, 2)[1:-1], np.repeat(cap, 2), label="cap", **look)
    return 1.08 * max(spent, highest)


def retrainings_figure(retrainings: pd.DataFrame, *, theme: Theme) -> Figure:
    """Held-out accuracy and epsilon over the periods, one above the other; columns as in `History.retrainings`."""
    figure, above = empty(theme, height=4.6, rows=2)
    below = styled(figure.add_subplot(2, 1, 2, sharex=above), theme)
    _accuracies(above, retrainings, theme)
    _costs(below, retrainings, theme)
    _name(below, list(retrainings["period"]))
    above.tick_params(labelbottom=False)
    below.set(xlabel="period")
    return figure


def _accuracies(axes: Axes, retrainings: pd.DataFrame, theme: Theme) -> None:
    places, accuracy = np.arange(len(retrainings)), retrainings["accuracy"].to_numpy()
    models = np.isfinite(accuracy)
    axes.plot(places[models], accuracy[models], color=theme.accent, linewidth=1, zorder=1)
    for outcome, words, colour, edge in (
        ("promoted", "served", theme.accent, theme.accent),
        ("kept", "did not serve", theme.ground, theme.accent),
        (THIS_RUN, THIS_RUN, theme.second, theme.second),
    ):
        chosen = models & (retrainings["outcome"] == outcome).to_numpy()
        if chosen.any():
            axes.scatter(
                places[chosen], accuracy[chosen], color=colour, edgecolor=edge, s=26, label=words, zorder=2
            )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(ylabel="right answers")
    legend(axes, theme, outside=True, columns=3)


def _costs(axes: Axes, retrainings: pd.DataFrame, theme: Theme) -> None:
    places, epsilon = np.arange(len(retrainings)), retrainings["epsilon"].fillna(0.0).to_numpy()
    models = retrainings["accuracy"].notna().to_numpy()
    for chosen, colour, words in (
        (models, theme.accent, "of a model"),
        (~models, theme.muted, "spent without a model"),
    ):
        if chosen.any():
            axes.bar(places[chosen], epsilon[chosen], color=colour, width=0.6, label=words)
    axes.set(ylabel="epsilon of the run")
    if not models.all():
        legend(axes, theme, outside=True, columns=2)


def accuracy_figure(retrainings: pd.DataFrame, *, theme: Theme) -> Figure:
    """Held-out accuracy of the models against their epsilon; columns as in `History.retrainings`."""
    figure, axes = empty(theme, height=2.8)
    for chosen, colour, words in (
        (retrainings["outcome"] != THIS_RUN, theme.accent, "earlier models"),
        (retrainings["outcome"] == THIS_RUN, theme.second, THIS_RUN),
    ):
        axes.scatter(
            retrainings["epsilon"][chosen], retrainings["accuracy"][chosen], color=colour, s=26, label=words
        )
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(xlabel="epsilon of the run", ylabel="right answers")
    legend(axes, theme, outside=True, columns=2)
    return figure


def _name(axes: Axes, names: Sequence[str]) -> None:
    """Names at some of the places 0, 1, ... of the horizontal axis, evenly apart, the last included."""
    step = -(-len(names) // _MOST_NAMES)
    shown = range((len(names) - 1) % step, len(names), step)
    axes.set_xticks(list(shown), labels=[_short(names[place]) for place in shown])
    if len(shown) > _FEWEST_PLACES // 2 or max(map(len, names)) > _FEWEST_PLACES:
        axes.tick_params(axis="x", labelrotation=45)
    margin = 0.6 + max(0.0, (_FEWEST_PLACES - len(names)) / 2)
    axes.set_xlim(-margin, len(names) - 1 + margin)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:g}"
