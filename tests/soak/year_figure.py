"""The chart of the year: accuracy by week, epsilon by block against the cap, blocks in use and retired."""

import pandas as pd
from matplotlib.figure import Figure

from tasks.reporting.figures import Theme


def figure(weeks: pd.DataFrame, blocks: pd.DataFrame, *, cap: float, theme: Theme) -> Figure:
    """Three charts below each other. weeks, blocks: the tables of the year. cap: epsilon of a block."""
    drawn = Figure(figsize=(7.5, 8.5), layout="constrained", facecolor=theme.ground)
    above, middle, below = drawn.subplots(3, 1)
    trained = weeks.dropna(subset=["accuracy"])
    above.plot(trained["week"], trained["accuracy"], "o", markersize=3, color=theme.muted, label="new model")
    above.step(
        trained["week"], trained["serving_accuracy"], where="post", color=theme.accent, label="serving"
    )
    above.set(xlabel="week", ylabel="held-out accuracy")
    above.legend()
    middle.bar(range(1, len(blocks) + 1), blocks["at_order"], color=theme.accent, label="recomputed")
    middle.axhline(cap, color=theme.second, linestyle="--", label="cap")
    middle.set(xlabel="block", ylabel="epsilon spent at the end")
    middle.legend(loc="lower center")
    below.step(weeks["week"], weeks["retired"], where="post", color=theme.second, label="retired blocks")
    below.step(trained["week"], trained["blocks"], where="post", color=theme.accent, label="blocks used")
    below.set(xlabel="week", ylabel="blocks")
    below.legend()
    return drawn
