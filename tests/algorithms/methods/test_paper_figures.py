"""The papers' figures: published numbers, and what is drawn of a small real comparison on digits."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import typer

from algorithms.methods.momentum import Curvature
from comparisons import adaclip_toy, deep_figures, noise_power, rates
from comparisons.adaclip_toy import METHODS, distances, model, plan_of, records, start_of
from comparisons.deep_figures import accuracy_by_gradients, error_ratio, relative_noise, runs, sampled_noise
from comparisons.rates import (
    MOMENTA,
    QUADRATIC,
    STAGE_COUNTS,
    Method,
    error_bound,
    heavy_ball_bound,
    noise_scales,
    rate,
    settled_error,
    stages,
)
from tasks.comparing.work import ComparisonWork
from tests.support.comparisons import run_here, small
from tests.support.soak import soak_but

# Read off the vector graphics that the authors published; a reading is good to five digits.
BOUNDS_AS_PUBLISHED = [(0.0, 1, 64.234), (0.0, 250, 26.498), (0.3, 1, 64.289), (0.3, 100, 24.564)]
BEST_BOUND_AS_PUBLISHED = 117.661
SCALES_AS_PUBLISHED = [(1, 84.388), (12, 139.178), (13, 133.518), (14, 48.390), (53, 115.063)]


@pytest.mark.parametrize(
    ("method", "size", "least", "at"),
    [
        ("Nesterov", 0.1, 0.901, 0.82),
        ("Nesterov", 0.5, 0.780, 0.64),
        ("Nesterov", 1.0, 0.684, 0.52),
        ("heavy ball", 0.1, 0.900, 0.81),
        ("heavy ball", 0.5, 0.781, 0.61),
        ("heavy ball", 1.0, 0.686, 0.47),
    ],
)
def test_the_least_rates_on_the_grid(method: Method, size: float, least: float, at: float) -> None:
    found = [rate(method, QUADRATIC, size, float(momentum)) for momentum in MOMENTA]
    assert min(found) == pytest.approx(least, abs=5e-4)
    assert MOMENTA[int(np.argmin(found))] == pytest.approx(at)


@pytest.mark.parametrize(("size", "best"), [(0.1, 0.818), (0.5, 0.635), (1.0, 0.520)])
def test_the_best_momenta_are_the_published_ones(size: float, best: float) -> None:
    assert QUADRATIC.momentum(size) == pytest.approx(best, abs=6e-4)


@pytest.mark.parametrize(("size", "momentum"), [(0.1, 0.3), (0.5, 0.8), (1.0, 0.7)])
def test_the_rate_is_how_fast_the_heavy_ball_comes_closer(size: float, momentum: float) -> None:
    early, late = (_heavy_ball(QUADRATIC, size, momentum, steps=steps) for steps in (200, 400))
    fell = math.log(np.abs(late[-20:]).max() / np.abs(early[-20:]).max()) / 200
    assert math.exp(fell) == pytest.approx(rate("heavy ball", QUADRATIC, size, momentum), abs=3e-3)


@pytest.mark.parametrize(("momentum", "steps", "height"), BOUNDS_AS_PUBLISHED)
def test_the_bound_is_the_published_one(momentum: float, steps: int, height: float) -> None:
    assert _log_bound(momentum, steps) == pytest.approx((78.5 - height) / 6.25, abs=2e-4)


def test_the_bound_at_the_best_momentum_is_the_published_one() -> None:
    published = (78.5 - BEST_BOUND_AS_PUBLISHED) / 6.25
    assert _log_bound(QUADRATIC.momentum(0.1), 250) == pytest.approx(published, abs=2e-4)


@pytest.mark.parametrize(("size", "momentum"), [(0.1, 0.0), (0.5, 0.3), (1.0, 0.7)])
def test_noise_settles_where_the_heavy_ball_takes_it(size: float, momentum: float) -> None:
    """Each past noise has moved the ball as a first step of the same size would have."""
    moved = _heavy_ball(QUADRATIC, size, momentum, steps=3000, pushed=size)
    assert settled_error(QUADRATIC, size, momentum) == pytest.approx(np.sum(moved**2), rel=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_the_bound_of_the_heavy_ball_holds_at_both_ends_of_the_spectrum(momentum: float) -> None:
    """By the iteration itself: from the start without noise, and by the noise of each iteration alone."""
    curve, steps, variance = Curvature(1.0, 0.1), 40, 0.3
    ends = (curve.strong_convexity, curve.smoothness)
    starts, noises = [], []
    for end in ends:
        now = before = 1.0
        for _ in range(steps):
            now, before = now - end * now + momentum * (now - before), now
        starts.append(now**2)
        response = []
        for left in range(steps):  # the noise of an iteration moves it, and then decays without more of it
            now, before = 1.0, 0.0
            for _ in range(left):
                now, before = now - end * now + momentum * (now - before), now
            response.append(now)
        noises.append(0.5 * end * variance * float(np.sum(np.square(response))))
    terms = {"gap": 5.0, "dimension": 3, "steps": steps}
    calm = heavy_ball_bound(curve, 1.0, momentum, variance=0.0, **terms)
    noisy = heavy_ball_bound(curve, 1.0, momentum, variance=variance, **terms)
    assert calm >= 5.0 * max(starts) * (1 - 1e-9) and noisy - calm >= 3 * max(noises) * (1 - 1e-9)
    if momentum == 0.0:  # then the worst is at an end
        assert (calm, noisy - calm) == (pytest.approx(5.0 * max(starts)), pytest.approx(3 * max(noises)))


@pytest.mark.parametrize(
    ("momentum", "seen"), [(0.8813, (0.0283, 0.118, 0.664, 2.97)), (0.0, (12.2, 4.74, None, None))]
)
def test_the_bound_foresees_the_curves_of_figure_3(momentum: float, seen: tuple[float | None, ...]) -> None:
    """All records at c = 1, means of 20 runs: never below what was seen, and at most 40 percent above."""
    for steps, error in zip((100, 200, 500, 1000), seen, strict=True):
        variance = 2 * (40 * steps / 100_000) ** 2  # Laplace noise of scale S_1 T / (n epsilon) on the mean
        terms = {"gap": 29.0, "variance": variance, "dimension": 20, "steps": steps}
        bound = heavy_ball_bound(Curvature(5.02, 0.02), 1 / 5.02, momentum, **terms)
        assert error is None or error <= bound <= 1.4 * error


def test_stages_are_those_of_figure_2() -> None:
    assert [[stage.steps for stage in stages(count)] for count in STAGE_COUNTS] == [
        [13, 40],
        [13, 40, 80],
        [13, 40, 80, 160],
        [13, 40, 80, 160, 320],
    ]
    assert [stage.step_size for stage in stages(3)] == [1 / 20, 1 / 320, 1 / 1280]


@pytest.mark.parametrize(("iteration", "height"), SCALES_AS_PUBLISHED)
def test_noise_is_the_published_one(iteration: int, height: float) -> None:
    scales = noise_scales(stages(2), published=True)
    assert scales[iteration - 1] == pytest.approx(20 + (147 - height) * 80 / 112, rel=5e-5)


def test_noise_by_the_equation_differs_at_the_end_of_a_stage() -> None:
    ratio = noise_scales(stages(3), published=True) / noise_scales(stages(3))
    assert ratio[[12, 52]] == pytest.approx(2 ** (1 / 3) * ratio[0])
    assert np.delete(ratio, [12, 52]) == pytest.approx(ratio[0])
    assert np.sum(1 / noise_scales(stages(3))) == pytest.approx(1)


def test_both_figures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pixels, which take seconds: a file holds the titles of its panels."""
    monkeypatch.setattr(rates, "png", lambda figure: "; ".join(a.get_title() for a in figure.axes).encode())
    rates.main(tmp_path / "new")
    first, second = ((tmp_path / "new" / f"accelerated-figure-{n}.png").read_text() for n in (1, 2))
    assert first.count("L") == 9
    assert first.count("0.818") == first.count("0.635") == first.count("0.519") == 2
    assert second == "K = 2, T = 53; K = 3, T = 133; K = 4, T = 293; K = 5, T = 613"


def _log_bound(momentum: float, steps: int) -> float:
    bound = error_bound("Nesterov", QUADRATIC, 0.1, momentum, noise=1e-4, steps=np.array([float(steps)]))
    return math.log(bound[0])


def _heavy_ball(
    curve: Curvature, size: float, momentum: float, *, steps: int, pushed: float = 1.0
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """Both coordinates after each step of a ball that was pushed off a resting place at the least value."""
    eigenvalues = np.array([curve.strong_convexity, curve.smoothness])
    places = [np.zeros(2), np.full(2, pushed)]
    for _ in range(steps):
        now, before = places[-1], places[-2]
        places.append(now - size * eigenvalues * now + momentum * (now - before))
    return np.array(places)


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
def finished(tmp_path_factory: pytest.TempPathFactory) -> ComparisonWork:
    return run_here(small(tmp_path_factory.mktemp("deep") / "checkout"), comparison())


def test_the_noise_of_importance_samples_is_that_of_the_mean(finished: ComparisonWork) -> None:
    table, missing = sampled_noise(finished.workspace.folder)
    noise = table.set_index(["label", "epoch"])["noise"]
    results = {run.algorithm: run for run in runs(finished.workspace.folder, "trace")}
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


def test_importance_samples_pay_with_gradients_for_all_records(finished: ComparisonWork) -> None:
    table, missing = accuracy_by_gradients(finished.workspace.folder)
    results = {run.algorithm: run.results for run in runs(finished.workspace.folder, "trace")}
    rows = table.set_index("label")
    assert missing == [] and sorted(rows.index) == ["DP-SGD", "DPIS"]
    of_epochs = 2 * results["dpis"]["records"]  # of two steps each
    assert rows["gradients"].to_dict() == {"DPIS": 4 * BATCH + of_epochs, "DP-SGD": STEPS * BATCH}
    expected = {"DPIS": results["dpis"]["accuracy"], "DP-SGD": results["dp_sgd"]["accuracy"]}
    assert rows["accuracy"].to_dict() == expected


def test_best_rate_is_by_the_mean_over_seeds(tmp_path: Path) -> None:
    """One seed alone kept a trace."""
    (tmp_path / "cells").mkdir()
    found = {0.5: (0.9, 0.5), 1.0: (0.8, 0.7)}
    for eta, seed in product(found, (0, 1)):
        settings = {"name": "dp_sgd", "expected_batch_size": 10, "update": {"learning_rate": eta}}
        place = {"dataset": "digits", "model": "softmax", "label": "DP-SGD", "epsilon": 1.0}
        results = {"steps": 3, "accuracy": found[eta][seed]}
        document = {"cell": {**place, "settings": settings, "seed": seed}, "results": results}
        (tmp_path / "cells" / f"{eta}-{seed}.json").write_text(json.dumps(document), encoding="utf-8")
    table, missing = accuracy_by_gradients(tmp_path)
    assert missing == []
    (row,) = table.to_dict("records")
    assert (row["rate"], row["gradients"], row["n"]) == (1.0, 30, 2)
    assert row["accuracy"] == pytest.approx(0.75) and row["stderr"] == pytest.approx(0.05)


def test_relative_noise_starts_below_constant_noise_and_ends_above(finished: ComparisonWork) -> None:
    table, missing = relative_noise(finished.workspace.folder)
    assert missing == []
    assert list(table["step"]) == list(range(1, STEPS + 1))
    factors = (1.0 + np.arange(STEPS)) ** -0.5
    shape = table["noise"] / table["noise"].iloc[0]
    assert np.allclose(shape, np.sqrt(factors[0] / factors), rtol=1e-6)
    assert table["noise"].iloc[0] < 1 < table["noise"].iloc[-1]


def test_the_error_of_adaclip_is_by_that_of_dp_sgd(finished: ComparisonWork) -> None:
    table, missing = error_ratio(finished.workspace.folder)
    assert missing == []
    (row,) = table.to_dict("records")
    tables = {
        trial.method: finished.workspace.trials / f"{trial.digest}.diagnostics.parquet"
        for trial in finished.trials
    }
    means = {name: pd.read_parquet(tables[name])["error"].mean() for name in ("adaclip", "dp_sgd")}
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


def test_every_figure_is_written(
    finished: ComparisonWork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the pixels, which take seconds."""
    monkeypatch.setattr(deep_figures, "png", lambda figure: figure.axes[0].get_ylabel().encode())
    for figure in deep_figures.FIGURES:
        deep_figures.main(figure, finished.workspace.folder, tmp_path)
        assert not pd.read_csv(tmp_path / f"{figure}.csv").empty
        words = {"dpis-noise": b"noise", "dpis-gradients": b"accuracy"}.get(figure, b"relative")
        assert words in (tmp_path / f"{figure}.png").read_bytes()


def test_the_gradient_of_a_record_is_its_distance() -> None:
    toy, given = records(3), model(3)
    theta = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    inputs = torch.from_numpy(toy.features)
    losses = given.losses(given.outputs(given.by_name(theta), inputs), torch.from_numpy(toy.labels))
    (gradient,) = torch.autograd.grad(losses.mean(), theta)
    assert torch.allclose(gradient, theta, atol=1e-6)  # the records are as far on either side of 0
    assert losses[0].item() == pytest.approx(0.5 * (0.7**2 + 0.2**2 + 0.1**2))
    assert given.initial_parameters().tolist() == [0.0, 0.0, 0.0]


def test_starts_are_the_optimum_and_a_point_at_distance_1() -> None:
    assert start_of("optimum", 7, seed=0).norm() == 0
    assert start_of("random", 7, seed=0).norm() == pytest.approx(1.0)


def test_a_step_moves_by_the_noise_that_was_given() -> None:
    """The first step of DP-SGD in 1,000 dimensions, whose noise is far more than the records' one coordinate."""
    (found,) = distances(METHODS["DP-SGD"], 1000, "optimum", seed=0, plan=plan_of(1000, steps=1))
    noise = adaclip_toy.LEARNING_RATE**2 * adaclip_toy.NOISE**2 * 1000
    assert found == pytest.approx(noise, rel=0.25, abs=4 * adaclip_toy.LEARNING_RATE**2)


@pytest.mark.parametrize(
    "name",
    soak_but(["AdaCliP, free scale", "AdaCliP as printed, h2 = 1"], METHODS),
)
def test_every_method_comes_nearer_from_afar(name: str) -> None:
    found = distances(METHODS[name], 10, "random", seed=0, plan=plan_of(10, steps=150))
    assert found[-1] < found[0]


def test_a_run_of_the_same_seed_is_the_same() -> None:
    one, two = (distances(METHODS["DP-SGD"], 10, "random", seed=0, plan=plan_of(10, steps=3)) for _ in "ab")
    assert np.array_equal(one, two)


def test_the_table_and_the_figure_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaclip_toy, "CASES", ((1, "random"), (2, "random"), (2, "optimum")))
    monkeypatch.setattr(
        adaclip_toy, "png", lambda figure: "; ".join(a.get_title() for a in figure.axes).encode()
    )
    adaclip_toy.main(tmp_path / "new", seeds=2, steps=3)
    table = pd.read_csv(tmp_path / "new" / "adaclip-toy.csv")
    assert len(table) == 2 * 3 * len(METHODS)
    assert (table["last_epoch"] > 0).all()
    assert (tmp_path / "new" / "adaclip-toy.png").read_text() == "start: random; start: optimum"


def test_the_matched_noise_disturbs_least_where_precisions_add_up() -> None:
    """At a small epsilon, by Cauchy and Schwarz: sum eta_t over the root of T sum eta_t^2 of constant noise's."""
    steps = 60
    eta = 1 / np.sqrt(20 + np.arange(steps))
    expected = eta.sum() / math.sqrt(steps * np.square(eta).sum())
    found = [noise_power.disturbance(power, 0.01, steps=steps) for power in (0.0, 1.0, 2.0)]
    assert found[1] / found[0] == pytest.approx(expected, rel=5e-3)
    assert found[1] < found[0] and found[1] < found[2]


def test_noise_schedules_are_compared_in_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_power, "disturbance", lambda power, epsilon, steps: 2.0 + power * epsilon)
    noise_power.main(tmp_path / "new", steps=5)
    table = pd.read_csv(tmp_path / "new" / "noise-power.csv")
    assert len(table) == len(noise_power.EPSILONS) * len(noise_power.POWERS)
    assert table.relative[0] == 1.0 and table.relative.iloc[-1] == pytest.approx(
        1 + 1.25 * 2.09 / 2, abs=1e-4
    )
