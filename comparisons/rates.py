"""Reproduces Figures 1 and 2 of the DP-SHB, DP-NAG and DP-MASG paper: `python -m comparisons.rates FOLDER`.

Kuru, Birbil, Gürbüzbalaban and Yıldırım 2022 ("Differentially private accelerated optimization algorithms",
arXiv:2008.01989). Both figures are computed from public numbers, without data or randomness. What the text leaves open
(the momenta, the number of iterations, the axes) is taken from the authors' scripts and vector graphics.

Figure 1: a quadratic with mu = .1 and L = 1 (the text says mu = .5, but the published axes are those of .1), for step
sizes of .1, .5 and 1. Top: the rate by momentum. Bottom: the bound on the error if t is the last iteration, for noise
of Laplace scale c_w t, since epsilon is divided equally and the noise of each iteration grows with their number.
Figure 2: mu = 1, L = 20; the best Laplace scale of each iteration of DP-MASG, in units of S_1 / (n epsilon).

Differences from the paper, each drawn with the published curve, which is dotted:
- The published rate is the spectral radius of Nesterov's iteration, not of the heavy ball's, in both rows of Figure 1;
  its minima on a grid of .01 are .901 at beta .82, .780 at .64 and .684 at .52. Those of the heavy ball are .900 at
  .81, .781 at .61 and .686 at .47: as small, at a smaller momentum. The noise term is that of the heavy ball.
- The published Figure 2 halves the coefficient of the last iteration of every stage but the last, as if the restart
  that follows did not double it too; equation (34) doubles it. It rounds the first stage down, to 13 iterations.
"""

import math
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from algorithms.methods.momentum import (
    Array,
    Curvature,
    Stage,
    coefficients,
    divide_epsilon,
    growing_stages,
    laplace_scale,
)
from tasks.reporting.figures import LIGHT, Theme, png

QUADRATIC = Curvature(smoothness=1.0, strong_convexity=0.1)
STEP_SIZES = (0.1, 0.5, 1.0)
MOMENTA = np.linspace(0.0, 0.99, 100)
NOISES = (1e-2, 1e-4)
START = 10.0
"""E_0, the initial error in Figure 1."""
STEPS = 250
STAGED = Curvature(smoothness=20.0, strong_convexity=1.0)
STAGE_COUNTS = (2, 3, 4, 5)

Method = Literal["heavy ball", "Nesterov"]

_SHOWN_MOMENTA = (0.0, 0.3, 0.7)
_LOWEST, _HIGHEST = math.exp(-10.0), math.exp(10.0)
_LONG_ENOUGH = 1000
_DOTS_PER_INCH = 160


def rate(method: Method, curve: Curvature, step_size: float, momentum: float) -> float:
    """The spectral radius of a method without noise on a quadratic: the larger one of both ends of the spectrum."""
    ends = (curve.strong_convexity, curve.smoothness)
    blocks = [_block(method, end, step_size, momentum) for end in ends]
    return max(float(np.abs(np.linalg.eigvals(block)).max()) for block in blocks)


def _block(method: Method, eigenvalue: float, step_size: float, momentum: float) -> Array:
    """The map from (x_t, x_{t-1}) to (x_{t+1}, x_t) along one eigenvector, shape [2, 2]."""
    shrunk = 1.0 - step_size * eigenvalue
    if method == "heavy ball":
        return np.array([[shrunk + momentum, -momentum], [1.0, 0.0]])
    return np.array([[(1.0 + momentum) * shrunk, -momentum * shrunk], [1.0, 0.0]])


def settled_error(curve: Curvature, step_size: float, momentum: float) -> float:
    """L / 2 times the stationary squared distance that Laplace noise of scale 1 causes in the heavy ball.

    For a quadratic with two coordinates, one at each end of the spectrum.
    """
    eigenvalues = np.array([curve.strong_convexity, curve.smoothness])
    damping = (1.0 - momentum) / (1.0 + momentum)
    variances = 2.0 * step_size / (damping * eigenvalues * (2.0 + 2.0 * momentum - step_size * eigenvalues))
    return 0.5 * curve.smoothness * float(variances.sum())


def error_bound(
    method: Method, curve: Curvature, step_size: float, momentum: float, *, noise: float, steps: Array
) -> Array:
    """The bound of Figure 1 after each number of iterations in `steps`, in their shape.

    method: whose rate is used. noise: c_w. The first term is C_t^2 rho^(2 t) with the figure's C_t = t, which is a
    choice and not a theorem; the second is the stationary error from the noise.
    """
    squared = rate(method, curve, step_size, momentum) ** 2
    scales = (noise * steps) ** 2
    potential = START + scales * step_size**2 / (1.0 - squared)
    settled = scales * settled_error(curve, step_size, momentum)
    return np.asarray(potential * steps**2 * squared**steps + settled)


def heavy_ball_bound(
    curve: Curvature,
    step_size: float,
    momentum: float,
    *,
    gap: float,
    variance: float,
    dimension: int,
    steps: int,
) -> float:
    """A bound on F(x_T) - F* of the heavy ball after `steps` iterations, for any quadratic F with this curve.

    The two terms of Proposition 3.4, where C_T rho^T is computed instead of bounded: the start's error is multiplied by
    at most the largest square of the iteration's response over the spectrum, and noise of each iteration adds what it
    still moves the last iterate by. gap: F(x_0) - F*. variance: of a coordinate of the noise on the gradient. The
    spectrum is searched on a grid of 400 points.
    """
    eigenvalues = np.geomspace(curve.strong_convexity, curve.smoothness, 400)
    shrunk = 1.0 - step_size * eigenvalues + momentum
    start, before = np.ones_like(eigenvalues), np.ones_like(eigenvalues)
    pushed, pushed_before = np.ones_like(eigenvalues), np.zeros_like(eigenvalues)
    added = np.zeros_like(eigenvalues)
    for _ in range(steps):
        added += pushed**2
        start, before = shrunk * start - momentum * before, start
        pushed, pushed_before = shrunk * pushed - momentum * pushed_before, pushed
    noise = 0.5 * dimension * variance * step_size**2 * float((eigenvalues * added).max())
    return gap * float((start**2).max()) + noise


def stages(count: int) -> list[Stage]:
    """The first `count` stages of DP-MASG as in Figure 2: p = 1, c = 1, the first one's length rounded down."""
    root = math.sqrt(STAGED.condition_number)
    first = Stage(math.floor(2.0 * root * math.log(root)), 1.0 / STAGED.smoothness)
    grown = growing_stages(_LONG_ENOUGH, first.step_size, STAGED.condition_number)
    return [first, *grown[1:count]]


def noise_scales(path: list[Stage], *, published: bool = False) -> Array:
    """The best b_t of each iteration, in units of S_1 / (n epsilon); shape [steps]. published: as the paper drew it."""
    values = coefficients(path, STAGED)
    if published:
        ends = np.cumsum([stage.steps for stage in path])[:-1] - 1
        values[ends] /= 2.0
    return laplace_scale(divide_epsilon(1.0, values, np.ones(len(values))))


def figure_1(theme: Theme = LIGHT) -> Figure:
    """Rates on top, error bounds below; one column per step size."""
    figure, grid = _panels(1 + len(NOISES), len(STEP_SIZES), (9.6, 7.6), theme)
    for column, size in enumerate(STEP_SIZES):
        _draw_rates(grid[0][column], size, theme)
        for row, noise in enumerate(NOISES, start=1):
            _draw_bounds(grid[row][column], size, noise, theme)
    _legend(grid[0][0], theme)
    _legend(grid[1][0], theme, title="dotted: as published")
    return figure


def figure_2(theme: Theme = LIGHT) -> Figure:
    """The noise of each iteration; one panel per number of stages."""
    figure, grid = _panels(1, len(STAGE_COUNTS), (10.8, 2.9), theme)
    for axes, count in zip(grid[0], STAGE_COUNTS, strict=True):
        path = stages(count)
        scales = noise_scales(path)
        steps = np.arange(1, len(scales) + 1)
        axes.plot(steps, scales, color=theme.accent, linewidth=1.2, label="equation (34)")
        published = noise_scales(path, published=True)
        axes.plot(steps, published, color=theme.second, linewidth=1.2, linestyle=":", label="as published")
        axes.set_title(f"K = {count}, T = {len(scales)}", color=theme.ink, size=9)
        axes.set_xlabel("iteration t")
    grid[0][0].set_ylabel("best $b_t$, times $n \\epsilon / S_1$")
    _legend(grid[0][-1], theme, corner="upper right")
    return figure


def _draw_rates(axes: Axes, size: float, theme: Theme) -> None:
    curves: list[tuple[Method, str, str, str]] = [
        ("heavy ball", "heavy ball", theme.accent, "-"),
        ("Nesterov", "as published (Nesterov)", theme.second, ":"),
    ]
    for method, label, colour, line in curves:
        rates = [rate(method, QUADRATIC, size, float(momentum)) for momentum in MOMENTA]
        axes.plot(MOMENTA, rates, color=colour, linestyle=line, linewidth=1.3, label=label)
    axes.set_title(f"$\\alpha$ = {size:g} / L", color=theme.ink, size=9)
    axes.set(xlabel="momentum $\\beta$", ylabel="rate $\\rho$")


def _draw_bounds(axes: Axes, size: float, noise: float, theme: Theme) -> None:
    best = QUADRATIC.momentum(size)
    colours = (theme.muted, theme.second, theme.accent, theme.ink)
    steps = np.arange(1.0, STEPS + 1.0)
    for momentum, colour in zip((*_SHOWN_MOMENTA, best), colours, strict=True):
        label = "$\\beta$ = $\\beta_{opt}$" if momentum == best else f"$\\beta$ = {momentum:g}"
        bound = error_bound("heavy ball", QUADRATIC, size, momentum, noise=noise, steps=steps)
        axes.plot(steps, bound, color=colour, linewidth=1.2, label=label)
        published = error_bound("Nesterov", QUADRATIC, size, momentum, noise=noise, steps=steps)
        axes.plot(steps, published, color=colour, linewidth=1.2, linestyle=":")
    axes.set_yscale("log")
    axes.set_ylim(_LOWEST, _HIGHEST)
    axes.set_title(
        f"$\\alpha$ = {size:g} / L, $c_w$ = {noise:g}, $\\beta_{{opt}}$ = {best:.3f}", color=theme.ink, size=9
    )
    axes.set(xlabel="iterations t", ylabel="error bound")


def _panels(
    rows: int, columns: int, size: tuple[float, float], theme: Theme
) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, facecolor=theme.ground, layout="constrained")
    grid: list[list[Axes]] = figure.subplots(rows, columns, squeeze=False).tolist()
    for axes in (axes for row in grid for axes in row):
        axes.set_facecolor(theme.ground)
        axes.tick_params(which="both", colors=theme.muted, labelcolor=theme.ink, labelsize=8)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(color=theme.ink, size=9)
        for side, spine in axes.spines.items():
            spine.set_color(theme.muted)
            spine.set_visible(side in ("left", "bottom"))
    return figure, grid


def _legend(
    axes: Axes,
    theme: Theme,
    *,
    corner: Literal["lower left", "upper right"] = "lower left",
    title: str | None = None,
) -> None:
    legend = axes.legend(
        loc=corner, title=title, frameon=False, labelcolor=theme.ink, fontsize=7.5, title_fontsize=7.5
    )
    legend.get_title().set_color(theme.ink)


def main(
    folder: Annotated[Path, typer.Argument(help="Where both PNG files go; made if it is not there.")],
) -> None:
    """Draw Figures 1 and 2 of arXiv:2008.01989."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "accelerated-figure-1.png").write_bytes(png(figure_1()))
    (folder / "accelerated-figure-2.png").write_bytes(png(figure_2()))


if __name__ == "__main__":
    typer.run(main)
