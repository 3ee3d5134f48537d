"""What released histograms say of each column: in the column's own units, and no surer than the noise allows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from data.cells import Grids
from tasks.reporting.column_summaries import cell_edges, median_of, summaries_of
from tests.support.cards import category, csv_of, label, number
from tests.support.own_records import declared as declared
from tests.support.own_records import finish
from tests.support.workspace import Workspace

__all__ = ["declared"]


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


@pytest.mark.usefixtures("same_secrets")
@pytest.mark.parametrize("merged", [1, 4])
def test_a_report_says_what_was_released_of_each_column(
    workspace: Workspace, declared: Callable[..., None], merged: int
) -> None:
    draw = np.random.default_rng(0)
    size = draw.lognormal(2.5, 1, 4000).clip(0, 100).round(2)
    kind = draw.choice(["old", "<new>"], 4000, p=[0.3, 0.7])
    when = pd.Timestamp("2020-03-01") + pd.to_timedelta(draw.integers(0, 100, 4000), unit="D")
    frame = pd.DataFrame(
        {
            "size": np.where(draw.random(4000) < 0.2, np.nan, size),
            "kind": kind,
            "when": when.strftime("%Y-%m-%d"),
            "price": (np.log1p(size) + 0.3 * draw.normal(size=4000)).round(3),
        }
    )
    frame.to_csv(workspace.root / "sizes.csv", index=False)
    columns: list[dict[str, Any]] = [number("size", 0, 100) | {"missing": 50.0}, category("kind", "old", "<new>")]
    columns.append({"name": "when", "kind": "timestamp", "bounds": ["2020-01-01", "2020-12-31"]})
    reader = csv_of(*columns, label("price")) | {"cells": {"grids": [4, 64], "trees": 0}}
    target = {"target": {"bounds": [0.0, 6.0]}, "classes": []}
    declared("sizes.csv", model={"name": "additive"}, reader=reader, records={"at_most": 4000}, **target)
    workspace.replace("features", {"name": "histograms", "noise": 2.0, "trees": 4, "merged_cells": merged})
    workspace.replace("privacy", {"epsilon": 5.0, "delta": 1e-5})
    finish(workspace)
    artifacts = workspace.root / "artifacts"
    found = {
        row.name: row
        for row in summaries_of(artifacts / "model.safetensors", pd.read_parquet(artifacts / "trace.parquet"))
    }
    assert list(found) == ["size", "kind", "when, year", "when, month", "when, weekday", "when, elapsed"]
    low, high = (float(end) for end in found["size"].interval.split(" to "))
    assert low <= np.nanmedian(frame["size"]) <= high and high - low < 4.0 * merged
    assert low <= float(found["size"].middle) <= high
    assert found["kind"].middle == "<new>" and found["when, year"].middle == "2020"
    assert found["when, weekday"].middle == "not known at this noise"  # all are as frequent
    first, last = found["when, elapsed"].interval.split(" to ")
    assert first <= str(when[np.argsort(when)[2000]].date()) <= last < "2020-06-01" > first > "2020-03-15"
    share, most = (float(end.removesuffix("%")) for end in found["size"].missing.split(" to "))
    assert share <= 100 * frame["size"].isna().mean() <= most < share + 5.0
    assert found["kind"].missing.startswith("at most ")
    page = (artifacts / "report.html").read_text()
    assert "What was released of each column" in page and page.count("<td>&lt;new&gt;</td>") >= 1


def test_other_models_have_no_histograms(workspace: Workspace) -> None:
    workspace.train()
    trace = pd.read_parquet(workspace.root / "artifacts/trace.parquet")
    assert summaries_of(workspace.root / "artifacts/model.safetensors", trace) == ()
