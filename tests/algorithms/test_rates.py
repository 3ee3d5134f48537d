"""The published numbers behind Figures 1 and 2 of arXiv:2008.01989, and the noise term against the recursion itself."""

import math
from pathlib import Path

import numpy as np
import pytest

from algorithms.methods.momentum import Curve
from comparisons import rates
from comparisons.rates import (
    MOMENTA,
    QUADRATIC,
    STAGE_COUNTS,
    Method,
    error_bound,
    noise_scales,
    rate,
    settled_error,
    stages,
)

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
    curve: Curve, size: float, momentum: float, *, steps: int, pushed: float = 1.0
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """Both coordinates after each step of a ball that was pushed off a resting place at the least value."""
    eigenvalues = np.array([curve.strong_convexity, curve.smoothness])
    places = [np.zeros(2), np.full(2, pushed)]
    for _ in range(steps):
        now, before = places[-1], places[-2]
        places.append(now - size * eigenvalues * now + momentum * (now - before))
    return np.array(places)
