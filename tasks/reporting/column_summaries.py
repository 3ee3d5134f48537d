"""What released histograms say of each column of a table: its median or most frequent value, and how much is missing.

All of this follows from the noisy counts in the model's file and from the data card there, and costs nothing. Intervals
hold the value that the exact counts would give, in 95 % of all cases, by the known noise alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from safetensors import safe_open

from algorithms.histogram_columns import columns_in, histogram_sizes
from algorithms.model_facts import facts_of
from data.cells import Grids
from data.formats import Column, Table
from data.preparation import reader_in
from tasks.reporting.shapes import in_units, name_of_part, values_of

_DEVIATIONS = 1.96
_UNKNOWN = "not known at this noise"


@dataclass(frozen=True)
class ColumnSummary:
    """A column, or a part of one.

    Attributes:
        name: of the column.
        middle: its median or its most frequent value, in words.
        interval: in which the median is, or the share of that value.
        missing: how many of the values are missing.
    """

    name: str
    middle: str
    interval: str
    missing: str


def summaries_of(model: Path, trace: pd.DataFrame) -> tuple[ColumnSummary, ...]:
    """The columns of a table whose histograms a run released, from its model's file; none for other models.

    trace: of the run, which says how much noise is in each count.
    """
    facts = facts_of(model)
    front: Mapping[str, Any] = facts.front or {}
    reader = reader_in(facts.preparation)
    encoding = reader.cell_encoding if isinstance(reader, Table) else None
    if front.get("kind") != "cell_histograms" or encoding is None or not isinstance(reader, Table):
        return ()
    columns = columns_in(front["columns"])
    sensitivity = math.sqrt(sum(len(column.parts) for column in columns) + bool(front["is_of_number"]))
    releases = trace[(trace["kind"] == "total") & np.isclose(trace["clip_norm"], sensitivity, rtol=1e-9)]
    if releases.empty:
        return ()
    # Other totals may have the same bound where there is one histogram; what is said then is less sure than it is.
    noise = float(releases["noise_std"].max())

    with safe_open(model, framework="np") as file:
        counts = file.get_tensor("features.counts").astype(np.float64)
    ends = [*accumulate(histogram_sizes(columns, front["sizes"]))]
    merged = [part.merged for column in columns for part in column.parts]
    return summarise(reader.columns, max(encoding.settings.grids), np.split(counts, ends[:-1]), merged, noise)


def summarise(
    columns: Sequence[Column],
    grid: int,
    histograms: Sequence[NDArray[np.float64]],
    merged: Sequence[int],
    noise: float,
) -> tuple[ColumnSummary, ...]:
    """What histograms say of the parts of columns.

    Args:
        columns: Of the data card.
        grid: The cells of the finest grid of a number.
        histograms: Noisy counts of each part, the last of which is of missing values.
        merged: How many cells are counted as one, of each part.
        noise: The standard deviation of each count.
    """
    parts, summaries = zip(histograms, merged, strict=True), list[ColumnSummary]()
    for column in columns:
        for index, part in enumerate(column.parts):
            histogram, together = next(parts)
            if isinstance(part, Grids):
                edges = cell_edges(part, grid // together)
                middle, interval = _median(column, part, histogram[: len(edges) - 1], edges, noise)
            else:
                names = values_of(column, part, index)[0]
                middle, interval = _most_frequent(names, histogram, noise)
            missing = _share(histogram, len(histogram) - 1, noise)
            summaries.append(ColumnSummary(name_of_part(column, index), middle, interval, missing))
    return tuple(summaries)


def cell_edges(part: Grids, cells: int) -> NDArray[np.float64]:
    """The edges of a number's histogram, shares of its bounds: those of its finest grids together, [values + 1].

    The sum of a number's cells in a linear and a logarithmic grid rises by 1 at each edge of either.

    Example:
        >>> cell_edges(Grids(3.0), 2).round(3).tolist()
        [0.0, 0.333, 0.5, 1.0]
    """
    steps = np.arange(1, cells) / cells
    inner = [steps, np.expm1(steps * math.log1p(part.span)) / part.span] if part.logarithmic else [steps]
    return np.concatenate([[0.0], np.sort(np.concatenate(inner)), [1.0]])


def median_of(
    counts: NDArray[np.float64], edges: NDArray[np.float64], noise: float
) -> tuple[float, float, float] | None:
    """The median by noisy counts, [cells], and the ends of its interval; None where noise could put it anywhere.

    noise: the standard deviation of each count.

    Example:
        >>> median_of(np.array([10.0, 80.0, 10.0]), np.array([0.0, 1.0, 2.0, 3.0]), noise=1.0)
        (1.5, 1.0, 2.0)
    """
    below = counts.cumsum()
    # Half of what lies above a value less half of what lies below it: a sum of all counts, each with a sign.
    reach = _DEVIATIONS * noise * math.sqrt(len(counts)) / 2.0
    half = below[-1] / 2.0
    if half <= reach:
        return None
    # Noise lets sums of counts fall here and there, so the interval goes as far as any of them allows.
    first = int(np.argmax(below >= half - reach))
    last = int(np.flatnonzero(np.append(-np.inf, below[:-1]) < half + reach)[-1])
    at = int(np.argmax(below >= half))
    before = below[at] - counts[at]
    middle = float(np.interp(half, [before, below[at]], edges[at : at + 2]))
    return middle, float(edges[first]), float(edges[last + 1])


def _median(
    column: Column, part: Grids, counts: NDArray[np.float64], edges: NDArray[np.float64], noise: float
) -> tuple[str, str]:
    found = median_of(counts, edges, noise)
    if found is None:
        return _UNKNOWN, ""
    middle, low, high = (in_units(column, part, share) for share in found)
    return middle, f"{low} to {high}"


def _most_frequent(names: Sequence[str], histogram: NDArray[np.float64], noise: float) -> tuple[str, str]:
    """The value with the largest count, if noise alone does not make it so, and its share of all records."""
    counts = histogram[: len(names)]
    first = int(counts.argmax())
    others = np.delete(counts, first)
    if counts[first] - max(0.0, others.max(initial=0.0)) <= _DEVIATIONS * math.sqrt(2.0) * noise:
        return _UNKNOWN, ""
    return names[first], _share(histogram, first, noise)


def _share(histogram: NDArray[np.float64], index: int, noise: float) -> str:
    """The interval of a cell's share of all records, in percent.

    Example:
        >>> _share(np.array([700.0, 300.0]), 1, noise=10.0)
        '28.5% to 31.5%'
        >>> _share(np.array([995.0, 5.0]), 1, noise=10.0)
        'at most 2.5%'
    """
    total = float(histogram.sum())
    if total <= _DEVIATIONS * noise * math.sqrt(len(histogram)):
        return _UNKNOWN
    share = float(np.clip(histogram[index] / total, 0.0, 1.0))
    # Of count - share * total, in which the count has the weight 1 - share, and each other one -share.
    reach = _DEVIATIONS * noise * math.hypot(1.0 - share, share * math.sqrt(len(histogram) - 1)) / total
    # In tenths of a percent, rounded outwards.
    low, high = (
        math.floor(1000 * max(0.0, share - reach)) / 10,
        math.ceil(1000 * min(1.0, share + reach)) / 10,
    )
    return f"at most {high:g}%" if low == 0.0 else f"{low:g}% to {high:g}%"
