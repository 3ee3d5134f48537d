"""The papers' figures, from a small real comparison on digits: known noise, known ratios, and what is not there."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer

from comparisons import deep_figures
from comparisons.deep_figures import error_ratio, relative_noise, runs, sampled_noise
from tasks.comparing.work import Work
from tests.support.comparisons import run_here, small

BATCH, STEPS = 720, 3  # two steps an epoch of the 1,437 training records


def comparison() -> dict[str, Any]:
    usual = {"expected_batch_size": BATCH, "steps": STEPS, "update": {"learning_rate": 1.0}}
    own = {
        "dp_sgd": usual,
        "dp_sgd_decay": {**usual, "rate": 0.2},
        "dpis": {
            "expected_batch_size": BATCH,
            "epochs": 2,
            "oversampling": 1,
            "update": {"learning_rate": 1.0},
        },
        "adp_sgd": {**usual, "decay": {"offset": 1.0}},
        "adaclip": usual,
    }
    methods = {
        name: {"accountant": "rdp", "algorithm": {"name": name} | settings} for name, settings in own.items()
    }
    return {
        "name": "tiny",
        "title": "A tiny comparison",
        "delta": 1e-5,
        "epsilons": [4.0],
        "problems": [{"dataset": "digits", "model": "softmax"}],
        "methods": methods,
        "record": {"diagnostics": True},
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return run_here(small(tmp_path_factory.mktemp("deep") / "checkout"), comparison())


def test_the_noise_of_importance_samples_is_that_of_the_mean(finished: Work) -> None:
    table, missing = sampled_noise(finished.place.folder)
    noise = table.set_index(["label", "epoch"])["noise"]
    results = {run.algorithm: run for run in runs(finished.place.folder, "trace")}
    assert list(noise["dp_sgd"].index) == [1, 2]
    assert list(noise["dpis"].index) == [1, 2]
    assert np.allclose(noise["dp_sgd"], results["dp_sgd"].results["noise_multiplier"])
    assert (np.diff(noise["dp_sgd_decay"]) < 0).all()
    of_dpis = results["dpis"].table.query("kind == 'gradient'")
    fraction = BATCH / results["dpis"].results["records"] / of_dpis["sampling_rate"]
    expected = (of_dpis["noise_multiplier"] * fraction).to_numpy()
    assert noise["dpis", 1] == pytest.approx(expected[0], rel=1e-6)
    assert len(missing) == 6  # at epsilon 1 and .5
    assert missing[0] == "There is no trace of dpis at epsilon 1; its curve is left out."


def test_relative_noise_starts_below_constant_noise_and_ends_above(finished: Work) -> None:
    table, missing = relative_noise(finished.place.folder)
    assert missing == []
    assert list(table["step"]) == list(range(1, STEPS + 1))
    factors = (1.0 + np.arange(STEPS)) ** -0.5
    shape = table["noise"] / table["noise"].iloc[0]
    assert np.allclose(shape, np.sqrt(factors[0] / factors), rtol=1e-6)
    assert table["noise"].iloc[0] < 1 < table["noise"].iloc[-1]


def test_the_error_of_adaclip_is_by_that_of_dp_sgd(finished: Work) -> None:
    table, missing = error_ratio(finished.place.folder)
    assert missing == []
    (row,) = table.to_dict("records")
    cells = {
        cell.method: finished.place.cells / f"{cell.digest}.diagnostics.parquet" for cell in finished.cells
    }
    means = {name: pd.read_parquet(cells[name])["error"].mean() for name in ("adaclip", "dp_sgd")}
    assert row["ratio"] == pytest.approx(means["adaclip"] / means["dp_sgd"])
    assert 0.1 < row["ratio"] < 10


def test_what_is_not_there_is_said_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for figure in deep_figures.FIGURES:
        with pytest.raises(typer.Exit):
            deep_figures.main(figure, tmp_path, tmp_path / "out")
        assert capsys.readouterr().err.startswith("There ")
    assert not (tmp_path / "out").exists()
    with pytest.raises(typer.BadParameter, match="adaclip-error"):
        deep_figures.main("none", tmp_path, tmp_path)


def test_every_figure_is_written(finished: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pixels, which take seconds."""
    monkeypatch.setattr(deep_figures, "png", lambda figure: figure.axes[0].get_ylabel().encode())
    for figure in deep_figures.FIGURES:
        deep_figures.main(figure, finished.place.folder, tmp_path)
        assert not pd.read_csv(tmp_path / f"{figure}.csv").empty
        assert b"relative" in (tmp_path / f"{figure}.png").read_bytes() or figure == "dpis-noise"
