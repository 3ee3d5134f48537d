"""The regression toy of the AdaCliP paper: its records, its loss, its noise, and that it is drawn."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from comparisons import adaclip_toy
from comparisons.adaclip_toy import METHODS, distances, model, plan_of, records, start_of


def test_the_gradient_of_a_record_is_its_distance() -> None:
    toy, given = records(3), model(3)
    theta = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    inputs = torch.from_numpy(toy.features)
    losses = given.losses(given.outputs(given.named(theta), inputs), torch.from_numpy(toy.labels))
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


@pytest.mark.parametrize("name", METHODS)
def test_every_method_comes_nearer_from_afar(name: str) -> None:
    found = distances(METHODS[name], 10, "random", seed=0, plan=plan_of(10, steps=150))
    assert found[-1] < found[0]


def test_a_run_of_the_same_seed_is_the_same() -> None:
    one, two = (distances(METHODS["DP-SGD"], 10, "random", seed=0, plan=plan_of(10, steps=3)) for _ in "ab")
    assert np.array_equal(one, two)


def test_the_table_and_the_figure_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaclip_toy, "_STEPS", 3)
    monkeypatch.setattr(adaclip_toy, "CASES", ((1, "random"), (2, "random"), (2, "optimum")))
    monkeypatch.setattr(
        adaclip_toy, "png", lambda figure: "; ".join(a.get_title() for a in figure.axes).encode()
    )
    adaclip_toy.main(tmp_path / "new", seeds=2)
    table = pd.read_csv(tmp_path / "new" / "adaclip-toy.csv")
    assert len(table) == 2 * 3 * len(METHODS)
    assert (table["last_epoch"] > 0).all()
    assert (tmp_path / "new" / "adaclip-toy.png").read_text() == "start: random; start: optimum"
