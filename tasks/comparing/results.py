"""Numbers that a paper published, beside ours: a CSV file given by the comparison, joined by name.

The results of a comparison as tables: a row a cell, a row a method and epsilon, and beside published numbers.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from data.prepare.files import write_whole
from tasks.comparing.files import Place, write_parquet
from tasks.comparing.trials import Trial
from tasks.config.params import ParamsRefusedError
from tasks.runs.quality import MEASURES

COLUMNS = ("figure", "dataset", "model", "method", "setting", "epsilon", "metric", "value")
METRICS = (*MEASURES, "objective", "gap", "test_loss")


def read_published(path: Path) -> pd.DataFrame:
    """Published numbers, a row each. dataset, model, method: as the comparison's file names them. setting: of a
    varied method, or empty. epsilon: empty for a method without noise. metric: what the target is measured by, such as
    accuracy, r2 or micro_f1; objective, gap (of the objective above the least that is known) or test_loss.

    Raises ParamsRefusedError for a file that is not there, other columns, an unknown metric and what is no number.
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
    """The published rows with `ours`, `stderr` and `difference`; NaN where the comparison has no such cell.

    totals: as `comparison_results.summary` makes them.
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


KEY = ["dataset", "model", "method", "label", "setting", "epsilon"]
METRIC_COLUMNS = [*MEASURES, "test_loss", "objective", "gap", "seconds", "steps", "epsilon_spent"]
PUBLISHED = ("figure", "dataset", "model", "method", "setting", "epsilon", "metric", "value")


def results(place: Place, cells: tuple[Trial, ...]) -> pd.DataFrame:
    """One row a finished cell, in the order of the cells; a number that is infinite or was not asked for is NaN.

    It has the measures of the targets that there are.

    gap: how far the objective is above the least that any cell reached on the same training records.
    """
    done = place.finished()
    rows = [_row(cell, place.result(cell.digest)) for cell in cells if cell.digest in done]
    there = [name for name in MEASURES if any(name in row for row in rows)]
    columns = [*KEY, "delta", "accountant", "seed", "repeat", "fold", *there, *_RESULTS, "digest", "code"]
    numbers = ("epsilon", "delta", *there, *_NUMBERS)
    table = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(numbers, float))
    least = table.groupby(["dataset", "model", "repeat", "fold"])["objective"].transform("min")
    return table.assign(gap=table["objective"] - least)


_RESULTS = (
    "test_loss", "objective", "seconds", "steps", "planned_steps", "epsilon_spent", "epsilon_planned",
    "noise_multiplier", "sampling_rate", "records",
)  # fmt: skip
_NUMBERS = (
    "test_loss",
    "objective",
    "seconds",
    "epsilon_spent",
    "epsilon_planned",
    "noise_multiplier",
)


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

    The standard error is of the mean over cells as if they were independent, which folds of the same records are not
    quite; it is NaN for a single cell.
    """
    grouped = table.groupby(KEY, sort=False, dropna=False)
    parts = {"n": grouped.size()}
    for metric in (name for name in METRIC_COLUMNS if name in table):
        mean, std, count = (getattr(grouped[metric], name)() for name in ("mean", "std", "count"))
        parts |= {f"{metric}_mean": mean, f"{metric}_std": std, f"{metric}_stderr": std / np.sqrt(count)}
    return pd.DataFrame(parts).reset_index()


def write_tables(place: Place, table: pd.DataFrame, totals: pd.DataFrame) -> None:
    """Writes results.parquet, results.csv and summary.csv into the comparison's folder."""
    write_parquet(place.folder / "results.parquet", table)
    for name, frame in (("results", table), ("summary", totals)):
        write_whole(place.folder / f"{name}.csv", partial(frame.to_csv, index=False))
