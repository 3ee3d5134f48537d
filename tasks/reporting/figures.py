"""The report's figures, drawn only from released values and held-out metrics; a dark page inverts them."""

import io
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from algorithms.plain_text import for_figure
from algorithms.privacy.accounting.risk import Profile, max_true_positive_rate
from tasks.reporting.shapes import Shape
from tasks.runs.metrics import ACCURACY, is_share
from tasks.runs.metrics_document import CalibrationRow

if TYPE_CHECKING:  # imported by what draws: training draws nothing, and the import takes half a second
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 190
_WIDE_INCHES, _NARROW_INCHES = 5.0, 3.4
"""Inches, in which texts of 9 points are at least 11 pixels: above a window of 32 rem, and on one of 390 pixels."""
_FAR_APART = 8.0
"""The scale is logarithmic if the largest noise is more than this many times the smallest."""
THIS_RUN = "this run"
"""The outcome of the run itself, which is compared with the model in use only after its report is made."""
_MAX_NAMES, _LONGEST_NAME, _FEWEST_PLACES, _MAX_BARS = 10, 12, 6, 60
_OUT_OF_SIGHT = 20.0
"""A cap of more than this many times the largest spending is named and not drawn, since no bar would be visible."""
_MAX_OUTPUTS = 3
"""Of a model with more outputs, the shape of a column is drawn for those that it changes most."""
_MAX_CATEGORIES = 30
"""Of a column with more categories, those are drawn that are farthest from the mean of all."""
_MAX_LABELLED = 12
"""With more classes than this, the cells of the confusion matrix have no numbers."""


@dataclass(frozen=True)
class Theme:
    """Colours: ground, ink for text, muted for axes and guides, accent and second for the curves.

    width: of figures, in inches.
    """

    ground: str
    ink: str
    muted: str
    accent: str
    second: str
    width: float = _WIDE_INCHES

    @property
    def narrow(self) -> "Theme":
        """The same for a phone."""
        return replace(self, width=_NARROW_INCHES)

    @property
    def is_narrow(self) -> bool:
        """Whether it is for a phone."""
        return self.width < _WIDE_INCHES


Drawing = Callable[[Theme], "Figure"]
"""Draws a figure in a theme."""
LIGHT = Theme(ground="#ffffff", ink="#1c2430", muted="#6b7684", accent="#1f5fbf", second="#b4540a")
"""The one theme, in two widths. On a dark page the browser inverts its colours, see style.css.j2."""


@dataclass(frozen=True)
class Picture:
    """A figure, wide and for a phone, as PNG, with its alternative text."""

    wide: bytes
    narrow: bytes
    words: str


def picture(draw: Drawing, words: str) -> Picture:
    """Draw a figure in both widths."""
    with _plain_texts():
        return Picture(png(draw(LIGHT)), png(draw(LIGHT.narrow)), words)


def rehearse_picture(draw: Drawing, words: str) -> Picture:
    """Draw a figure once, to see that it can be drawn; without its layout, which takes as long again."""
    with _plain_texts():
        figure = draw(LIGHT)
        figure.set_layout_engine("none")
        return Picture(png(figure), b"", words)


def undrawn(_draw: Drawing, words: str) -> Picture:
    """In place of a figure where only its page is rehearsed."""
    return Picture(b"", b"", words)


def _plain_texts() -> AbstractContextManager[None]:
    """Within it, names are texts: `$` begins no formula, and nothing goes to LaTeX."""
    from matplotlib import rc_context

    return rc_context({"text.parse_math": False, "text.usetex": False})


@dataclass(frozen=True)
class CostsByStep:
    """The cost after selected steps, which are ascending."""

    steps: Sequence[int]
    epsilon: Sequence[float]


def epsilon_figure(
    curve: CostsByStep, *, target: float | None, theme: Theme, is_fixed: bool = True
) -> "Figure":
    """Draw epsilon over steps; for an empty curve draw a note instead.

    target: the epsilon that the run was allowed. is_fixed: whether the releases were fixed in advance; otherwise the
    sum so far is not a bound for a run that ends there.
    """
    figure, axes = empty(theme)
    axes.set(xlabel="training steps", ylabel="privacy spent (epsilon)")
    if not curve.steps:
        axes.text(
            0.5, 0.5, "no noise: epsilon is infinite", ha="center", color=theme.ink, transform=axes.transAxes
        )
        axes.set(xticks=[], yticks=[])
        return figure
    if target is not None:
        axes.axhline(target, color=theme.muted, linestyle=":", label="allowed")
    if is_fixed:
        axes.plot(
            curve.steps, curve.epsilon, color=theme.accent, marker="o", markersize=3, label="spent so far"
        )
    else:
        label = "added up so far, no bound for ending there"
        axes.plot(curve.steps, curve.epsilon, color=theme.second, linestyle="--", label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    legend(axes, theme)
    return figure


def risk_figure(profile: Profile | None, *, theme: Theme) -> "Figure":
    """Draw what the best attacker recognises at each false alarm rate; None for a run without a promise."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure, axes = empty(theme)
    axes.set(xlabel="false alarms", ylabel="recognised at most", xscale="log", yscale="log")
    rates = np.geomspace(1e-4, 1.0, 200)
    recognised = np.ones_like(rates) if profile is None else max_true_positive_rate(profile, rates)
    axes.plot(rates, rates, color=theme.muted, linestyle=":", label="blind guessing")
    axes.plot(rates, recognised, color=theme.accent, label="best attacker")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator())
        axis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
        axis.set_minor_locator(NullLocator())  # 56 marks take half of the figure's time
    legend(axes, theme)
    return figure


def noise_figure(trace: pd.DataFrame, *, theme: Theme) -> "Figure":
    """Draw the standard deviation of the noise over steps, one line for each kind of release."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure, axes = empty(theme)
    axes.set(xlabel="training steps", ylabel="noise on the sum (std)")
    for (kind, rows), colour in zip(
        trace.groupby("kind"), (theme.accent, theme.second, theme.ink), strict=False
    ):
        marker = "o" if len(rows) == 1 else None
        axes.plot(rows["step"] + 1, rows["noise_std"], color=colour, label=f"{kind}", marker=marker)
    if trace["noise_std"].min() > 0 and trace["noise_std"].max() > _FAR_APART * trace["noise_std"].min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    legend(axes, theme)
    return figure


def correlated_figure(course: Sequence[tuple[int, float, float]], *, theme: Theme) -> "Figure":
    """Draw the standard deviation of correlated and of independent noise in a parameter, after selected steps."""
    figure, axes = empty(theme)
    after, correlated, independent = zip(*course, strict=True)
    axes.set(xlabel="training steps", ylabel="noise in a parameter (std)")
    axes.plot(after, correlated, color=theme.accent, label="correlated")
    axes.plot(after, independent, color=theme.second, linestyle="--", label="independent, of the same cost")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    legend(axes, theme)
    return figure


def confusion_figure(pairs: pd.DataFrame, classes: Sequence[str], *, theme: Theme) -> "Figure":
    """Draw how held-out records were classified. pairs: columns `actual` and `predicted`, a row per record.

    Of private records a row is a released cell, whose column `count` has its noised number; a cell without a row is 0.
    """
    from matplotlib.colors import LinearSegmentedColormap

    if pairs.empty:
        return _nothing_released(theme)
    numbers = pairs["count"].astype(int) if "count" in pairs else 1
    counts = pairs.assign(count=numbers).pivot_table(
        index="actual", columns="predicted", values="count", aggfunc="sum", fill_value=0
    )
    table = counts.reindex(index=list(classes), columns=list(classes), fill_value=0).to_numpy()
    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    figure, axes = empty(theme, height=min(4.6, 1.7 + 0.4 * len(classes)))
    colours = LinearSegmentedColormap.from_list("shares", [theme.ground, theme.accent])
    has_numbers = len(classes) <= _MAX_LABELLED // (2 if theme.is_narrow else 1)
    # With numbers in the cells only the lighter two fifths of the colours are used, on which they are readable.
    axes.imshow(shares, cmap=colours, vmin=0, vmax=2.5 if has_numbers else 1)
    positions, names = range(len(classes)), [_class_name(name, theme) for name in classes]
    axes.set_xticks(positions, labels=names)
    if max(map(len, names)) > 3:
        axes.tick_params(axis="x", labelrotation=45)
    axes.set_yticks(positions, labels=names)
    axes.set(xlabel="the model's answer", ylabel="what it really is")
    for row, column in np.argwhere(table > 0) if has_numbers else ():
        number = f"{table[row, column]:,}"
        axes.text(column, row, number, ha="center", va="center", color=theme.ink, fontsize=9)
    return figure


def class_figure(classes: pd.DataFrame, *, overall: float, theme: Theme) -> "Figure":
    """Draw the held-out accuracy of each class, and overall. classes: columns `class`, `accuracy`, `records`."""
    from matplotlib.ticker import PercentFormatter

    if classes.empty:
        return _nothing_released(theme)
    figure, axes = empty(theme, height=1.3 + 0.24 * len(classes))
    labels = [
        f"{_class_name(name, theme)}  ({records:,})"
        for name, records in zip(classes["class"], classes["records"], strict=True)
    ]
    positions = range(len(classes))
    axes.barh(positions, classes["accuracy"].fillna(0.0), color=theme.accent, height=0.7)
    axes.set_yticks(positions, labels=labels)
    axes.invert_yaxis()
    axes.axvline(overall, color=theme.second, linestyle="--", label=f"overall {overall:.1%}")
    axes.set_xlim(0, 1)
    axes.set_xticks(np.linspace(0, 1, 6))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(xlabel="right answers", ylabel="class (held-out records)")
    legend(axes, theme, outside=True)
    return figure


def calibration_figure(points: Sequence[CalibrationRow], *, theme: Theme) -> "Figure":
    """Draw the observed share with its 95 % interval by predicted probability. points: as in metrics.json."""
    from matplotlib.ticker import PercentFormatter

    figure, axes = empty(theme)
    axes.set(xlabel="predicted probability", ylabel="observed share", xlim=(0, 1), ylim=(0, 1))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(np.linspace(0, 1, 6))
        axis.set_major_formatter(PercentFormatter(1.0))
    axes.plot((0, 1), (0, 1), color=theme.muted, linestyle=":", label="calibrated")
    predicted = [point["predicted"] for point in points]
    observed = [point["observed"] for point in points]
    value, low, high = np.array([(each["value"], each["low"], each["high"]) for each in observed]).T
    reach = np.maximum([value - low, high - value], 0.0)
    axes.errorbar(
        predicted, value, reach, color=theme.accent, marker="o", markersize=3, label="with 95% intervals"
    )
    legend(axes, theme)
    return figure


def shape_figure(shape: Shape, outputs: Sequence[str], *, unit: str, theme: Theme) -> "Figure":
    """Draw what a column adds to the outputs that it changes most, with a band of 1.96 deviations of the noise."""
    order = np.argsort(-np.ptp(shape.effects, axis=0))[:_MAX_OUTPUTS]
    colours, reach = (theme.accent, theme.second, theme.muted), 1.96 * (shape.deviation or 0.0)
    figure, axes = empty(theme, height=2.4)
    shown, note = np.arange(len(shape.values)), ""
    if shape.numbers is None and len(shown) > _MAX_CATEGORIES:
        shown = np.sort(np.argsort(-np.abs(shape.effects).max(axis=1), kind="stable")[:_MAX_CATEGORIES])
        note = f", the {_MAX_CATEGORIES} of {len(shape.values)} values that are farthest from 0"
    positions = np.arange(len(shown)) if shape.numbers is None else shape.numbers
    for output, colour in zip(order, colours, strict=False):
        effect = shape.effects[shown, output]
        name = for_figure(outputs[output], _LONGEST_NAME)
        if shape.numbers is None:
            axes.errorbar(positions, effect, yerr=reach, fmt="o", color=colour, markersize=4, label=name)
        else:
            axes.plot(positions, effect, color=colour, drawstyle="steps-mid", label=name)
            axes.fill_between(positions, effect - reach, effect + reach, color=colour, alpha=0.2, linewidth=0)
    if shape.numbers is None:
        _name(axes, [shape.values[index] for index in shown])
    axes.axhline(0.0, color=theme.muted, linewidth=0.6)
    axes.set(xlabel=for_figure(shape.name) + note, ylabel=for_figure(unit, 2 * _LONGEST_NAME))
    if len(outputs) > 1:
        legend(axes, theme)
    return figure


def _class_name(name: str, theme: Theme) -> str:
    return for_figure(name, _LONGEST_NAME) if theme.is_narrow else for_figure(name)


def _nothing_released(theme: Theme) -> "Figure":
    """A note in place of a figure of classes, of which a released histogram may say nothing."""
    figure, axes = empty(theme, height=1.3)
    axes.text(0.5, 0.5, "not released", ha="center", color=theme.ink, transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])
    return figure


def blocks_figure(blocks: pd.DataFrame, *, theme: Theme) -> "Figure":
    """Draw epsilon spent on each block against its cap, in the order of declaration; columns as in `History.blocks`."""
    figure, axes = empty(theme)
    positions, retired = np.arange(len(blocks)), blocks["retired"].to_numpy(dtype=bool)
    spent, cap = blocks["spent_epsilon"].to_numpy(), blocks["cap_epsilon"].to_numpy()
    has_gaps = len(blocks) <= _MAX_BARS  # between very many bars they would be uneven
    for chosen, colour, words in (
        (~retired, theme.accent, "spent"),
        (retired, theme.muted, "spent, retired"),
    ):
        if chosen.any():
            axes.bar(
                positions[chosen],
                spent[chosen],
                color=colour,
                label=words,
                linewidth=0,
                width=0.8 if has_gaps else 1.0,
                antialiased=has_gaps,
            )
    top = _caps(axes, positions, cap, float(spent.max()), theme)
    axes.set(xlabel="block", ylabel="privacy spent (epsilon)", ylim=(0, top or 1.0))
    _name(axes, list(blocks["block"]))
    legend(axes, theme, outside=True, columns=3)
    return figure


def _caps(axes: "Axes", positions: NDArray[Any], cap: NDArray[Any], spent: float, theme: Theme) -> float:
    """Draw the cap of each block, or name it in the legend if it is far above; returns the end of the axis."""
    highest = float(cap.max())
    if 0 < spent * _OUT_OF_SIGHT < highest:
        number = f"{highest:,.0f}" if highest >= 1000 else f"{highest:g}"
        axes.plot([], [], label=f"cap {number}, far above", color=theme.second, linestyle="--")
        return 1.1 * spent
    edges = np.append(positions - 0.5, positions[-1] + 0.5)
    axes.plot(np.repeat(edges, 2)[1:-1], np.repeat(cap, 2), label="cap", color=theme.second, linestyle="--")
    return 1.08 * max(spent, highest)


def retrainings_figure(retrainings: pd.DataFrame, *, metric: str = ACCURACY, theme: Theme) -> "Figure":
    """Draw held-out quality above epsilon, over the periods; columns as in `History.retrainings`."""
    figure, above = empty(theme, height=4.6, rows=2)
    below = apply_theme(figure.add_subplot(2, 1, 2, sharex=above), theme)
    _qualities(above, retrainings, metric, theme)
    _costs(below, retrainings, theme)
    _name(below, list(retrainings["period"]))
    above.tick_params(labelbottom=False)
    below.set(xlabel="period")
    return figure


def _qualities(axes: "Axes", retrainings: pd.DataFrame, metric: str, theme: Theme) -> None:
    positions, quality = np.arange(len(retrainings)), retrainings["quality"].to_numpy()
    models = np.isfinite(quality)
    axes.plot(positions[models], quality[models], color=theme.accent, linewidth=1, zorder=1)
    for outcome, words, colour, edge in (
        ("promoted", "served", theme.accent, theme.accent),
        ("kept", "did not serve", theme.ground, theme.accent),
        (THIS_RUN, THIS_RUN, theme.second, theme.second),
    ):
        chosen = models & (retrainings["outcome"] == outcome).to_numpy()
        if chosen.any():
            axes.scatter(
                positions[chosen], quality[chosen], color=colour, edgecolor=edge, s=26, label=words, zorder=2
            )
    _label(axes, metric)
    legend(axes, theme, outside=True, columns=3)


def _label(axes: "Axes", metric: str) -> None:
    """Label the vertical axis; shares are in percent."""
    from matplotlib.ticker import PercentFormatter

    if is_share(metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(ylabel=f"held-out {metric}")


def _costs(axes: "Axes", retrainings: pd.DataFrame, theme: Theme) -> None:
    positions, epsilon = np.arange(len(retrainings)), retrainings["epsilon"].fillna(0.0).to_numpy()
    models = retrainings["quality"].notna().to_numpy()
    for chosen, colour, words in (
        (models, theme.accent, "of a model"),
        (~models, theme.muted, "spent without a model"),
    ):
        if chosen.any():
            axes.bar(positions[chosen], epsilon[chosen], color=colour, width=0.6, label=words)
    axes.set(ylabel="epsilon of the run")
    if not models.all():
        legend(axes, theme, outside=True, columns=2)


def quality_figure(retrainings: pd.DataFrame, *, metric: str = ACCURACY, theme: Theme) -> "Figure":
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
    _label(axes, metric)
    axes.set(xlabel="epsilon of the run")
    legend(axes, theme, outside=True, columns=2)
    return figure


def _name(axes: "Axes", names: Sequence[str]) -> None:
    """Label evenly spaced positions 0, 1, ... of the horizontal axis with names, including the last."""
    step = -(-len(names) // _MAX_NAMES)
    shown = range((len(names) - 1) % step, len(names), step)
    short = [for_figure(names[index], _LONGEST_NAME) for index in shown]
    axes.set_xticks(list(shown), labels=short)
    if len(shown) > _FEWEST_PLACES // 2 or max(map(len, names)) > _FEWEST_PLACES:
        axes.tick_params(axis="x", labelrotation=45)
    margin = 0.6 + max(0.0, (_FEWEST_PLACES - len(names)) / 2)
    axes.set_xlim(-margin, len(names) - 1 + margin)


def png(figure: "Figure") -> bytes:
    """The figure as PNG, whose axes say where they do not begin at zero; equal figures give equal bytes."""
    for axes in figure.axes:
        _say_where_it_begins(axes.xaxis, ", ")
        _say_where_it_begins(axes.yaxis, "\n")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    content = io.BytesIO()
    canvas: Any = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # of a name, drawn as a box
        canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    # Flat colours need no search for repetitions, which would take half the time of a figure.
    image.save(content, "png", dpi=(figure.dpi, figure.dpi), compress_type=zlib.Z_RLE)
    return content.getvalue()


def _say_where_it_begins(axis: "Axis", after: str) -> None:
    """Add to the name of an axis, after a separator, that it is logarithmic, or does not begin at zero."""
    name, (low, high) = axis.label.get_text(), sorted(axis.get_view_interval())
    if name and axis.get_scale() == "log":
        axis.label.set_text(f"{name}{after}log scale")
    elif name and low > 0.02 * (high - low):
        axis.label.set_text(f"{name}{after}not from 0")


def empty(theme: Theme, *, height: float = 3.2, rows: int = 1) -> "tuple[Figure, Axes]":
    """Make a figure and its top panel. height: in inches."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(
        figsize=(theme.width, height), dpi=_DOTS_PER_INCH, facecolor=theme.ground, layout="constrained"
    )
    axes = apply_theme(figure.add_subplot(rows, 1, 1), theme)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    return figure, axes


def apply_theme(axes: "Axes", theme: Theme, *, size: int = 9) -> "Axes":
    """Apply a theme's colours to a panel. size: of the numbers at the axes, whose names are a point larger."""
    axes.set_facecolor(theme.ground)
    axes.tick_params(which="both", colors=theme.muted, labelcolor=theme.ink, labelsize=size)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=theme.ink, size=size + 1)
    for side, spine in axes.spines.items():
        spine.set_color(theme.muted)
        spine.set_visible(side in ("left", "bottom"))
    return axes


def legend(axes: "Axes", theme: Theme, *, outside: bool = False, columns: int = 1) -> None:
    """Place the legend where it hides least. outside: place it above the panel, at the right."""
    location = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)} if outside else {"loc": "best"}
    axes.legend(frameon=False, labelcolor=theme.ink, fontsize=9, ncols=columns, **location)
