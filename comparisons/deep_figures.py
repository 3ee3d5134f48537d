"""Draws figures of the deep learning papers from what the runs of a comparison recorded.

`python -m comparisons.deep_figures FIGURE COMPARISON FOLDER`, where COMPARISON is the folder of a finished comparison.

dpis-noise: Figure 1 of Wei, Bao, Xiao and Yang 2022 (DPIS): sigma_G, the noise on the mean gradient times the batch
size, in units of the clip norm, by epoch. For DPIS it is the noise multiplier times K / (N C), else the multiplier.
dpis-gradients: accuracy of DPIS and DP-SGD by the number of gradients that they compute, at the best learning rate.
adp-sgd-noise: Figure 1 of Wu et al. 2021 (ADP-SGD): the noise of each step, relative to constant noise for the same
batches and steps at the same epsilon.
adaclip-error: Figure 3 of Pichapati et al. 2019 (AdaCliP): the error of released mean gradients against the exact ones
of their samples, as a ratio to DP-SGD's; from runs with `record: {diagnostics: true}`.

Each writes a CSV and a PNG file of its name. Curves whose runs are missing are reported and left out.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import typer
from matplotlib.figure import Figure

from tasks.comparing.report import draw_by_epsilon, draw_over_steps
from tasks.reporting.figures import LIGHT, png

SAMPLED = ("dpis", "dp_sgd", "dp_sgd_decay")
EPSILONS = (4.0, 1.0, 0.5)
"""The epsilons of Figure 1 of DPIS."""
BASELINE = "dp_sgd"
"""The method that AdaCliP is compared with, by its key in the comparison's file."""

_SLACK = 1e-9


@dataclass(frozen=True)
class Run:
    """A finished run. cell: its settings. results: its numbers. table: a row per release, none if not asked for."""

    cell: Mapping[str, Any]
    results: Mapping[str, Any]
    table: pd.DataFrame

    @property
    def curve(self) -> dict[str, Any]:
        """The label of its curve and where it belongs."""
        return {name: self.cell[name] for name in ("dataset", "model", "label", "epsilon")}

    @property
    def problem(self) -> tuple[str, str, float | None]:
        """What compared runs have in common."""
        return self.cell["dataset"], self.cell["model"], self.cell["epsilon"]

    @property
    def algorithm(self) -> str:
        """The name of its algorithm."""
        return str(self.cell["settings"]["name"])

    def in_words(self) -> str:
        """A description for a sentence."""
        return f"{self.cell['label']} on {self.cell['dataset']} at epsilon {self.cell['epsilon']:g}"


class FigureData(NamedTuple):
    """The data of a figure, and a sentence for each thing that is missing."""

    table: pd.DataFrame
    missing: list[str]


def runs(comparison: Path, kind: Literal["trace", "diagnostics"] | None = None) -> Iterator[Run]:
    """The private runs of a comparison that kept such a table; without a kind all of them, of every seed."""
    for path in sorted((comparison / "cells").glob("*.json")):
        table = None if kind is None else path.with_suffix(f".{kind}.parquet")
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["cell"]["epsilon"] is not None and (table is None or table.exists()):
            table_of_run = pd.DataFrame() if table is None else pd.read_parquet(table)
            yield Run(document["cell"], document["results"], table_of_run)


def sampled_noise(comparison: Path, *, epsilons: tuple[float, ...] = EPSILONS) -> FigureData:
    """sigma_G by epoch of DPIS, DP-SGD and DP-SGD with decaying noise."""
    chosen = [run for run in runs(comparison, "trace") if run.algorithm in SAMPLED]
    chosen = [run for run in chosen if run.cell["epsilon"] in epsilons]
    there = {(run.algorithm, run.cell["epsilon"]) for run in chosen}
    missing = [
        f"There is no trace of {name} at epsilon {epsilon:g}; its curve is left out."
        for name in SAMPLED
        for epsilon in epsilons
        if (name, epsilon) not in there
    ]
    tables = [pd.DataFrame({**run.curve, **_by_epoch(run)}) for run in chosen]
    return FigureData(_together(tables, ["dataset", "model", "label", "epsilon", "epoch", "noise"]), missing)


def _by_epoch(run: Run) -> dict[str, Any]:
    """Epochs from 1, and the mean of sigma_G in each."""
    batch, gradients = run.cell["settings"]["expected_batch_size"], run.table[run.table["kind"] == "gradient"]
    steps_per_epoch = math.ceil(run.results["records"] / batch - _SLACK)
    noise = gradients["noise_multiplier"] * batch / gradients["divisor"]
    means = noise.groupby(gradients["step"] // steps_per_epoch + 1).mean()
    return {"epoch": means.index, "noise": means.to_numpy()}


def accuracy_by_gradients(comparison: Path) -> FigureData:
    """The accuracy of DPIS and DP-SGD by the gradients computed; the best learning rate by the mean over seeds.

    stderr, n: of that mean. DP-SGD computes its batch a step; DPIS its batch times the oversampling, and each epoch
    those of all records.
    """
    rows = [
        {
            **run.curve,
            "label": "DPIS" if run.algorithm == "dpis" else "DP-SGD",
            "gradients": _gradients_of(run),
            "rate": run.cell["settings"]["update"]["learning_rate"],
            "accuracy": run.results["accuracy"],
        }
        for run in runs(comparison)
        if run.algorithm in ("dpis", "dp_sgd")
    ]
    if not rows:
        columns = ["dataset", "model", "label", "epsilon", "gradients", "rate", "accuracy", "stderr", "n"]
        return FigureData(
            pd.DataFrame(columns=columns), ["There is no run of DPIS or DP-SGD in this comparison."]
        )
    keys = ["dataset", "model", "label", "epsilon", "gradients"]
    by_rate = pd.DataFrame(rows).groupby([*keys, "rate"], sort=False)["accuracy"]
    means = by_rate.agg(accuracy="mean", stderr="sem", n="count").reset_index()
    return FigureData(
        means.loc[means.groupby(keys, sort=False)["accuracy"].idxmax()].reset_index(drop=True), []
    )


def _gradients_of(run: Run) -> float:
    """How many gradients of records a run computes, as expected."""
    settings, steps = run.cell["settings"], run.results["steps"]
    if run.algorithm == "dp_sgd":
        return float(steps * settings["expected_batch_size"])
    every_epoch = settings["epochs"] * run.results["records"]
    return float(steps * settings["oversampling"] * settings["expected_batch_size"] + every_epoch)


def relative_noise(comparison: Path) -> FigureData:
    """ADP-SGD's noise multiplier at each step, relative to constant noise for as many steps of such batches."""
    tables, missing, all_runs = [], [], list(runs(comparison, "trace"))
    constant = {_course(run): run for run in all_runs if _is_constant(run)}
    for run in all_runs:
        if run.algorithm != "adp_sgd" or _is_constant(run):
            continue
        if _course(run) not in constant:
            missing.append(
                f"There is no run with constant noise to compare {run.in_words()} with; its curve is left out."
            )
            continue
        base = _multipliers(constant[_course(run)])[0]
        noise = _multipliers(run) / base
        tables.append(pd.DataFrame({**run.curve, "step": np.arange(1, len(noise) + 1), "noise": noise}))
    if not tables:
        missing.append("There is no curve of ADP-SGD in this comparison.")
    return FigureData(_together(tables, ["dataset", "model", "label", "epsilon", "step", "noise"]), missing)


def _multipliers(run: Run) -> Any:
    return run.table.loc[run.table["kind"] == "gradient", "noise_multiplier"].to_numpy()


def _is_constant(run: Run) -> bool:
    """Whether the run has only gradient steps, with equal noise and Poisson sampling."""
    is_plain = bool((run.table["kind"] == "gradient").all() and (run.table["sampling"] == "poisson").all())
    return is_plain and run.table["noise_multiplier"].nunique() == 1


def _course(run: Run) -> tuple[Any, ...]:
    """What constant noise depends on: the data's size, epsilon, the sampling rate and the number of steps."""
    return (*run.problem, run.results["sampling_rate"], run.results["steps"])


def error_ratio(comparison: Path) -> FigureData:
    """The mean error of AdaCliP's gradients relative to DP-SGD's, by epsilon."""
    measured = list(runs(comparison, "diagnostics"))
    base = {run.problem: run for run in measured if run.cell["method"] == BASELINE}
    rows, missing = [], []
    for run in measured:
        if run.algorithm != "adaclip":
            continue
        if run.problem not in base:
            missing.append(
                f"There are no diagnostics of {BASELINE} to compare {run.in_words()} with; it is left out."
            )
            continue
        error, other = (float(one.table["error"].mean()) for one in (run, base[run.problem]))
        rows.append({**run.curve, "error": error, "baseline_error": other, "ratio": error / other})
    if not rows:
        missing.append("There are no diagnostics of AdaCliP; record them with `record: {diagnostics: true}`.")
    columns = ["dataset", "model", "label", "epsilon", "error", "baseline_error", "ratio"]
    return FigureData(pd.DataFrame(rows, columns=columns), missing)


def _together(tables: list[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def _draw_noise(table: pd.DataFrame) -> Figure:
    return draw_over_steps(table, x="epoch", y="noise", words="noise $\\sigma_G$", theme=LIGHT)


def _draw_accuracy(table: pd.DataFrame) -> Figure:
    figure = draw_over_steps(table, x="gradients", y="accuracy", words="accuracy", theme=LIGHT)
    for axes in figure.axes:
        axes.set(xscale="log", yscale="linear")
    return figure


def _draw_relative(table: pd.DataFrame) -> Figure:
    return draw_over_steps(table, x="step", y="noise", words="noise, relative to constant", theme=LIGHT)


def _draw_ratio(table: pd.DataFrame) -> Figure:
    totals = table.assign(ratio_mean=table["ratio"], ratio_stderr=0.0)
    return draw_by_epsilon(totals, "ratio", words="error, relative to DP-SGD", theme=LIGHT)


FIGURES: dict[str, tuple[Callable[[Path], FigureData], Callable[[pd.DataFrame], Figure]]] = {
    "dpis-noise": (sampled_noise, _draw_noise),
    "dpis-gradients": (accuracy_by_gradients, _draw_accuracy),
    "adp-sgd-noise": (relative_noise, _draw_relative),
    "adaclip-error": (error_ratio, _draw_ratio),
}


def main(
    figure: Annotated[str, typer.Argument(help=f"One of {', '.join(FIGURES)}.")],
    comparison: Annotated[Path, typer.Argument(help="The folder of a comparison, artifacts/compare/NAME.")],
    folder: Annotated[
        Path, typer.Argument(help="Where the CSV and the PNG file go; made if it is not there.")
    ],
) -> None:
    """Draw a figure of a paper from the runs of a comparison."""
    if figure not in FIGURES:
        raise typer.BadParameter(f"there is no figure {figure!r}; choose one of {', '.join(FIGURES)}")
    measure, draw = FIGURES[figure]
    table, missing = measure(comparison)
    for sentence in missing:
        typer.echo(sentence, err=True)
    if table.empty:
        raise typer.Exit(1)
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / f"{figure}.csv", index=False)
    (folder / f"{figure}.png").write_bytes(png(draw(table)))


if __name__ == "__main__":
    typer.run(main)
