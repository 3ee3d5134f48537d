"""The results of a comparison as tables: a row per cell, a row per method and epsilon, and beside published numbers.

Published numbers are in a CSV file that the comparison names, and are joined by name.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from data.files import write_whole
from tasks.comparing.files import Place, write_parquet
from tasks.comparing.trials import Trial
from tasks.config.params import ParamsRefusedError
from tasks.runs.quality import MEASURES

COLUMNS = ("figure", "dataset", "model", "method", "setting", "epsilon", "metric", "value")
"""Of published numbers."""
METRICS = (*MEASURES, "objective", "gap", "test_loss")
KEY = ["dataset", "model", "method", "label", "setting", "epsilon"]
METRIC_COLUMNS = [*MEASURES, "test_loss", "objective", "gap", "seconds", "steps", "epsilon_spent"]
_RESULTS = (
    "test_loss", "objective", "seconds", "steps", "planned_steps", "epsilon_spent", "epsilon_planned",
    "noise_multiplier", "sampling_rate", "records",
)  # fmt: skip
_NUMBERS = ("test_loss", "objective", "seconds", "epsilon_spent", "epsilon_planned", "noise_multiplier")


def read_published(path: Path) -> pd.DataFrame:
    """Read a CSV file of published numbers, one per row.

    dataset, model, method: names as in the comparison's file. setting: of a varied method, or empty. epsilon: empty for
    a method without noise. metric: a metric of the target, such as accuracy, r2 or micro_f1; or objective, gap (the
    objective minus the smallest known) or test_loss.

    Raises ParamsRefusedError if the file is missing, has other columns, or has an unknown metric or an invalid number.
    """
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, comment="#")
    except (OSError, ValueError):
        raise ParamsRefusedError(f"{path} is no CSV file of published numbers; correct published.") from None
    if tuple(table.columns) != COLUMNS:
        raise ParamsRefusedError(f"{path} must have the columns {', '.join(COLUMNS)}; correct it.")
    unknown = sorted(set(table["metric"]) - set(METRICS))
    if unknown:
        raise ParamsRefusedError(f"{path}: the metric {unknown[0]!r} is not one of {', '.join(METRICS)}.")
    for name in ("epsilon", "value"):
        table[name] = _numbers(table[name], path)
    return table


def beside(published: pd.DataFrame, totals: pd.DataFrame) -> pd.DataFrame:
    """Add the columns `ours`, `stderr` and `difference` to published rows; NaN if the comparison has no such cell.

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


def _numbers(texts: pd.Series, path: Path) -> pd.Series:
    numbers = pd.to_numeric(texts.where(texts != "", "nan"), errors="coerce")
    wrong = texts[(texts != "") & ~np.isfinite(numbers)]
    if len(wrong):
        raise ParamsRefusedError(
            f"{path}: {wrong.name} is {wrong.iloc[0]!r}, but should be a number; correct it."
        )
    return numbers


def results(place: Place, cells: tuple[Trial, ...]) -> pd.DataFrame:
    """One row per finished cell, in the order of the cells, with the metrics of the targets that occur.

    A number that is infinite or was not recorded is NaN. gap: see `with_gap`.
    """
    done = place.finished()
    rows = [_row(cell, place.result(cell.digest)) for cell in cells if cell.digest in done]
    there = [name for name in MEASURES if any(name in row for row in rows)]
    columns = [*KEY, "delta", "accountant", "seed", "repeat", "fold", *there, *_RESULTS, "digest", "code"]
    numbers = ("epsilon", "delta", *there, *_NUMBERS)
    return with_gap(pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(numbers, float)))


def with_gap(table: pd.DataFrame) -> pd.DataFrame:
    """Add the column `gap`: the objective minus the smallest that is in the table for the same training records."""
    least = table.groupby(["dataset", "model", "repeat", "fold"])["objective"].transform("min")
    return table.assign(gap=table["objective"] - least)


def _row(cell: Trial, result: dict[str, Any]) -> dict[str, Any]:
    fold, found = cell.fold, result["results"]
    return {
        **{name: getattr(cell, name) for name in (*KEY, "accountant", "seed")},
        "delta": None if cell.epsilon is None else cell.delta,
        "repeat": fold.repeat if fold else 0,
        "fold": fold.fold if fold else 0,
        **{name: found[name] for name in (*MEASURES, *_RESULTS) if name in found},
        "digest": cell.digest,
        "code": result["code"],
    }


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Mean, standard deviation, standard error and number of cells by data set, model, method and epsilon.

    The standard error assumes that cells are independent, which is not quite true for folds of the same records. It is
    NaN for a single cell.
    """
    grouped = table.groupby(KEY, sort=False, dropna=False)
    parts = {"n": grouped.size()}
    for metric in (name for name in METRIC_COLUMNS if name in table):
        mean, std, count = (getattr(grouped[metric], name)() for name in ("mean", "std", "count"))
        parts |= {f"{metric}_mean": mean, f"{metric}_std": std, f"{metric}_stderr": std / np.sqrt(count)}
    return pd.DataFrame(parts).reset_index()


def write_tables(place: Place, table: pd.DataFrame, totals: pd.DataFrame) -> None:
    """Write results.parquet, results.csv and summary.csv into the comparison's folder."""
    write_parquet(place.folder / "results.parquet", table)
    for name, frame in (("results", table), ("summary", totals)):
        write_whole(place.folder / f"{name}.csv", partial(frame.to_csv, index=False))
