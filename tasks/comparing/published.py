"""Numbers that a paper published, beside ours: a CSV file given by the comparison, joined by name."""

from pathlib import Path

import numpy as np
import pandas as pd

from tasks.params import ParamsRefused

COLUMNS = ("figure", "dataset", "model", "method", "setting", "epsilon", "metric", "value")
METRICS = ("accuracy", "objective", "gap", "test_loss")


def read_published(path: Path) -> pd.DataFrame:
    """Published numbers, a row each. dataset, model, method: as the comparison's file names them. setting: of a
    varied method, or empty. epsilon: empty for a method without noise. metric: accuracy, objective, gap
    (of the objective above the least that is known) or test_loss.

    Raises ParamsRefused for a file that is not there, other columns, an unknown metric and what is no number.
    """
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, comment="#")
    except (OSError, ValueError):
        raise ParamsRefused(f"{path} is no CSV file of published numbers; correct published.") from None
    if tuple(table.columns) != COLUMNS:
        raise ParamsRefused(f"{path} must have the columns {', '.join(COLUMNS)}; correct it.")
    unknown = sorted(set(table["metric"]) - set(METRICS))
    if unknown:
        raise ParamsRefused(f"{path}: the metric {unknown[0]!r} is not one of {', '.join(METRICS)}.")
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
        ]
    )
    joined = published.merge(ours, on=key, how="left")
    return joined.assign(difference=joined["ours"] - joined["value"])


def _numbers(texts: pd.Series, path: Path) -> pd.Series:
    numbers = pd.to_numeric(texts.where(texts != "", "nan"), errors="coerce")
    wrong = texts[(texts != "") & ~np.isfinite(numbers)]
    if len(wrong):
        raise ParamsRefused(f"{path}: {wrong.name} is {wrong.iloc[0]!r}, but should be a number; correct it.")
    return numbers
