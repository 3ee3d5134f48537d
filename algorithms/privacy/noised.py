"""What a release draws: the records that take part, and the noise that is added; and nothing else."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import Box
from algorithms.privacy.noise import Stream, add_on_grid, scale_on_grid, std_on_grid
from algorithms.privacy.releases import (
    FullBatch,
    Gaussian,
    Gumbel,
    Importance,
    KNorm,
    Laplace,
    NoNoise,
    ObjectiveNoise,
    PureObjectiveNoise,
    Release,
    Sampling,
    WithoutReplacement,
)


def chosen(sampling: Sampling, count: int, stream: Stream) -> NDArray[np.intp]:
    """The indices of those of `count` records that take part, ascending; not for importance sampling."""
    match sampling:
        case FullBatch():
            return np.arange(count)
        case WithoutReplacement():
            return stream.subset(count, sampling.size)
        case Importance():
            raise TypeError("who takes part in an importance sample depends on gradients")
    return np.flatnonzero(stream.coins(count, sampling.rate))


def noised(total: NDArray[np.float64], release: Release, stream: Stream) -> NDArray[np.float64]:
    """The sum with its noise, both on the grid; the sum itself where the release asks for no noise."""
    if isinstance(release.noise, NoNoise):
        return total
    noise = _noise_on_grid(release, len(total)) * draws(release, stream, len(total))
    return add_on_grid(total, noise, std=release.noise_scale)


def least(losses: Tensor, points: Tensor, release: Release, stream: Stream) -> int:
    """The index of the least of noised losses [k] at points [k, d], of those that are finite points where any is."""
    losses[~torch.isfinite(points).all(dim=1)] = torch.inf  # losses there are no numbers, and count as zero
    return int(np.argmax(release.noise_scale * draws(release, stream, len(points)) - losses.numpy()))


def _noise_on_grid(release: Release, dimension: int) -> float:
    """The scale of the noise with what rounding to the grid costs."""
    widen = scale_on_grid if isinstance(release.noise, Laplace | KNorm) else std_on_grid
    return widen(release.noise_scale, sensitivity=release.clipping.sensitivity, dimension=dimension)


def noise_std(release: Release, dimension: int) -> float:
    """The standard deviation of the noise on the sum (on a score, in an objective), for the trace."""
    if isinstance(release.noise, NoNoise):
        return 0.0
    is_inside = release.kind == "argmin" or isinstance(release.noise, ObjectiveNoise)
    scale = release.noise_scale if is_inside else _noise_on_grid(release, dimension)
    return float(scale * _std_at_scale_1(release, dimension))


def draws(release: Release, stream: Stream, count: int) -> NDArray[np.float64]:
    """Draws of the release's noise at scale 1, shape [count]."""
    match release.noise:
        case KNorm() | PureObjectiveNoise():
            return stream.k_norm(count, box=isinstance(release.clipping, Box))
        case Gaussian() | ObjectiveNoise():
            return stream.normal(count)
        case Laplace():
            return stream.laplace(count)
        case Gumbel():
            return stream.gumbel(count)
        case NoNoise():
            return np.zeros(count)


def _std_at_scale_1(release: Release, dimension: int) -> float:
    """The standard deviation of one coordinate of `draws`."""
    if isinstance(release.clipping, Box):
        return math.sqrt((dimension + 2) * (dimension + 3) / 6)
    if isinstance(release.noise, KNorm | PureObjectiveNoise):
        return math.sqrt(dimension + 1)
    return _STD_AT_SCALE_1[type(release.noise)]


_STD_AT_SCALE_1 = {
    Gaussian: 1.0,
    ObjectiveNoise: 1.0,
    Laplace: math.sqrt(2.0),
    Gumbel: math.pi / math.sqrt(6.0),
}
