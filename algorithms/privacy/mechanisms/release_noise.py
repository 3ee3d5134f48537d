"""The noise of releases: drawn from a release's stream at its scale, on the grid, maybe ahead of the sum."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from algorithms.gradients import Box
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.mechanisms.noise import Stream, add_steps, steps_of
from algorithms.privacy.mechanisms.release import Correlator, NoNoise, Release

if TYPE_CHECKING:
    import torch
    from torch import Tensor

else:
    torch = lazy_module("torch")

MIN_DRAWN_AHEAD = 2**16
"""The number of draws from which a separate thread pays."""


def add_noise(total: Tensor, release: Release, stream: Stream) -> Tensor:
    """A sum [d], float64, plus noise, both on the grid; the sum itself for a release without noise."""
    if isinstance(release.noise, NoNoise):
        return total
    return add_steps(total, _noise_in_steps(release, stream, len(total), None), std=release.noise_scale)


@dataclass(frozen=True)
class NoiseAhead:
    """The noise of a release, drawn by another thread while the sum is computed.

    Attributes:
        release: Whose noise it is.
        start: The position in the release's stream where its draws begin.
        steps: Waits for the noise, in grid steps; None without noise.
    """

    release: Release
    start: int
    steps: Callable[[], Tensor] | None

    @staticmethod
    def of(
        release: Release,
        stream: Stream,
        dimension: int,
        *,
        skip: int = 0,
        correlator: Correlator | None = None,
        device: torch.device | None = None,
    ) -> NoiseAhead:
        """Draw noise from a stream after `skip` more words; small draws are made immediately.

        correlator: continues the noise of the steps before, for correlated noise. device: where the noise is added, to
        which it is copied as soon as it is drawn; the CPU by default.
        """
        if isinstance(release.noise, NoNoise):
            return NoiseAhead(release, stream.position + skip, None)
        later, there = stream.later(skip), device or torch.device("cpu")

        def draw() -> Callable[[], Tensor]:
            from algorithms.gradients.devices import upload

            return upload(_noise_in_steps(release, later, dimension, correlator), there)

        if dimension >= MIN_DRAWN_AHEAD:
            drawing = _drawer().submit(draw)
            return NoiseAhead(release, stream.position + skip, lambda: drawing.result()())
        return NoiseAhead(release, stream.position + skip, draw())

    def add_noise(self, total: Tensor) -> Tensor:
        """The sum [d], on any device, plus the noise, both on the grid; float64."""
        if self.steps is None:
            return total
        return add_steps(total, self.steps(), std=self.release.noise_scale)


@cache
def _drawer() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="ahead")


def noisy_argmin(losses: Tensor, release: Release, stream: Stream) -> int:
    """The index of the smallest noisy loss [k]; infinite ones count only if all are."""
    # Argmin of loss - noise.
    return int(np.argmax(release.noise_scale * draws(release, stream, len(losses)) - losses.numpy()))


def _noise_on_grid(release: Release, dimension: int) -> float:
    """The scale of the noise, increased for rounding to the grid."""
    return release.noise.on_grid(
        release.noise_scale, sensitivity=release.clipping.sensitivity, dimension=dimension
    )


def _noise_in_steps(
    release: Release, stream: Stream, dimension: int, correlator: Correlator | None
) -> Tensor:
    drawn = draws(release, stream, dimension) if correlator is None else correlator.draw(stream)
    # The steps are those of the scale before it is increased, on which `std_on_grid` counts, and `add_steps` rounds.
    return steps_of(_noise_on_grid(release, dimension) * drawn, std=release.noise_scale)


def noise_std(release: Release, dimension: int) -> float:
    """The standard deviation of the noise on the sum (on a score, in an objective), for the trace."""
    if isinstance(release.noise, NoNoise):
        return 0.0
    is_inside = release.kind == "argmin" or release.noise.is_inside
    scale = release.noise_scale if is_inside else _noise_on_grid(release, dimension)
    return float(scale * release.noise.std(dimension, box=isinstance(release.clipping, Box)))


def draws(release: Release, stream: Stream, count: int) -> NDArray[np.float64]:
    """Draw the release's noise at scale 1, shape [count]."""
    return release.noise.draw(stream, count, box=isinstance(release.clipping, Box))
