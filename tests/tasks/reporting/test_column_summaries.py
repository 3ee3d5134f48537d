"""What released histograms say of each column: in the column's own units, and no surer than the noise allows."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from data.cells import Grids
from data.formats import Column
from tasks.reporting.column_summaries import ColumnSummary, cell_edges, median_of, summarise
from tests.support.cards import category, number


@pytest.mark.parametrize(("cells", "merged"), [(4, 1), (64, 1), (64, 4)])
@pytest.mark.parametrize("grids", [Grids(100.0), Grids(3.0), Grids(50.0, logarithmic=False)])
def test_edges_of_a_histogram_are_where_the_sum_of_the_codes_rises(
    grids: Grids, cells: int, merged: int
) -> None:
    shares = np.linspace(0.0, 1.0, 4001)
    sums = sum(code // merged for code in grids.codes(shares, [cells]))
    edges = cell_edges(grids, cells // merged)
    assert sums.max() == len(edges) - 2
    inside = (shares > edges[sums] - 1e-9) & (shares < edges[sums + 1] + 1e-9)
    assert inside.all() and bool((np.diff(edges) >= 0).all())


def test_a_median_lies_in_its_interval_as_often_as_it_says() -> None:
    """Of a skewed column; 200 releases at three noises, where 95 % is meant for each."""
    draw = np.random.default_rng(0)
    exact = 1000.0 * np.exp(-np.arange(40) / 6.0)
    edges = np.linspace(0.0, 1.0, 41)
    middle = float(np.interp(exact.sum() / 2, np.append(0.0, exact.cumsum()), edges))
    for noise in (1.0, 30.0, 100.0):
        held, widths = 0, []
        for _ in range(200):
            found = median_of(exact + draw.normal(0, noise, 40), edges, noise)
            assert found is not None and found[1] <= found[0] <= found[2]
            held += found[1] <= middle <= found[2]
            widths.append(found[2] - found[1])
        assert held >= 180 and np.mean(widths) < 0.05 + 0.003 * noise


def test_noise_that_could_put_a_median_anywhere_gives_none() -> None:
    counts, edges = np.full(100, 5.0), np.linspace(0.0, 1.0, 101)
    assert median_of(counts, edges, noise=26.0) is None  # 1.96 * 26 * 10 is more than 500
    assert median_of(counts, edges, noise=25.0) is not None


def columns_of(*documents: dict[str, Any]) -> Sequence[Column]:
    return TypeAdapter(tuple[Column, ...]).validate_json(json.dumps(documents))


# Of bounds 15 apart the logarithmic grid of 4 cells has edges at 1, 3 and 7 above the lower one, since 16^(1/4) is 2;
# the linear one has them at 3.75, 7.5 and 11.25. One sum of codes cannot be, and the last one is of missing values.
COUNTS = [10.0, 30.0, 20.0, 20.0, 10.0, 10.0, 0.0, 0.0, 25.0]


@pytest.mark.parametrize(
    ("noise", "interval", "missing"),
    [
        # Half of 100 records and 1.96 * sqrt(7) / 2 = 2.593 deviations: 47.4 to 52.6, in the cell from 3 to 3.75.
        # A fifth is missing, and 1.96 * sqrt(0.8^2 + 8 * 0.2^2) / 125 = 1.54 % of it is a deviation's share.
        (1.0, "13 to 13.75", "18.4% to 21.6%"),
        # 37.0 to 63.0: from the cell whose records end at 40 to the one whose records begin at 60.
        (5.0, "11 to 17", "12.3% to 27.7%"),
    ],
)
def test_median_of_a_number_is_in_its_units(noise: float, interval: str, missing: str) -> None:
    (size,) = summarise(columns_of(number("size", 10, 25)), 4, [np.array(COUNTS)], [1], noise)
    # Half of the records lie below the middle of the third cell: 40 + 20 / 2 = 50.
    assert size == ColumnSummary("size", "13.38", interval, missing)


def test_median_of_merged_cells_lies_between_their_edges() -> None:
    """Two by two: edges at 3 and 7.5 above the lower bound, and a missing value counts as 2 + 2."""
    counts = np.array([20.0, 60.0, 20.0, 0.0, 0.0])
    (size,) = summarise(columns_of(number("size", 10, 25)), 4, [counts], [2], 1.0)
    assert (size.middle, size.interval) == ("15.25", "13 to 17.5")
    assert size.missing == "at most 2%"  # 1.96 of 100 records, rounded outwards


def test_most_frequent_category_is_named_where_it_stands_out() -> None:
    columns = columns_of(category("kind", "old", "new"))
    (kind,) = summarise(columns, 4, [np.array([300.0, 600.0, 100.0])], [1], 10.0)
    # 1.96 * 10 / 1000 * sqrt(0.4^2 + 2 * 0.6^2) = 1.84 %; and with 0.9^2 + 2 * 0.1^2, 1.79 %
    assert kind == ColumnSummary("kind", "new", "58.1% to 61.9%", "8.2% to 11.8%")
    # 30 records more than the other are 2.12 deviations of a difference of two counts at 10, and 1.93 at 11.
    close = [np.array([300.0, 330.0, 0.0])]
    assert summarise(columns, 4, close, [1], 10.0)[0].middle == "new"
    assert summarise(columns, 4, close, [1], 11.0)[0] == ColumnSummary(
        "kind", "not known at this noise", "", "at most 3.5%"
    )


def test_a_day_in_the_middle_is_named() -> None:
    columns = columns_of({"name": "when", "kind": "timestamp", "bounds": ["2019-12-31", "2020-12-31"]})
    year, month, weekday, elapsed = (
        np.array([5.0, 95.0, 0.0]),
        np.array([0.0] * 4 + [100.0] + [0.0] * 8),
        np.array([10.0] * 7 + [30.0]),
        np.array([0.0, 100.0, 0.0, 0.0, 0.0]),
    )
    rows = summarise(columns, 4, [year, month, weekday, elapsed], [1] * 4, 0.5)
    assert [(row.name, row.middle) for row in rows] == [
        ("when, year", "2020"),
        ("when, month", "5"),
        ("when, weekday", "not known at this noise"),
        # 366 days in four cells: in the middle of the second are 137.25 of them
        ("when, elapsed", "2020-05-16"),
    ]
    assert rows[-1].interval == "2020-04-01 to 2020-07-01"  # after 91.5 days, rounded to 92, and 183


def test_counts_that_noise_could_make_say_nothing() -> None:
    columns = columns_of(number("size", 10, 25), category("kind", "old", "new"))
    rows = summarise(columns, 4, [np.zeros(9), np.zeros(3)], [1, 1], 5.0)
    assert {text for row in rows for text in (row.middle, row.missing)} == {"not known at this noise"}
