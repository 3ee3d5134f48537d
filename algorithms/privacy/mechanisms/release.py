"""Releases: queries to the private records, as values of sampling, bound and noise; their cost, and their draws.

Only this module turns a query into a privacy event, if its mechanism states that the combination is proven (see
`mechanisms`); all others are refused. An event states the noise in units of the bound on one record; accounting decides
what that means under add-or-remove-one or replace-one.

A release draws its sample of records and its noise, and nothing else.
"""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Literal

import attrs
import dp_accounting as dp
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.errors import RefusedError
from algorithms.gradients import L1, L2, Box, Clipping, Normalised
from algorithms.privacy.accounting.correlated import CorrelatedDpEvent, releases_of
from algorithms.privacy.mechanisms.correlated import Correlated, Correlator
from algorithms.privacy.mechanisms.mechanisms import (
    CyclicPoisson,
    FixedOrder,
    FullBatch,
    Gaussian,
    Gumbel,
    Importance,
    KNorm,
    Laplace,
    Minimum,
    Noise,
    NoNoise,
    ObjectiveNoise,
    Poisson,
    PureObjectiveNoise,
    Sampling,
    WithoutReplacement,
)
from algorithms.privacy.mechanisms.noise import Stream, add_steps, steps_of

__all__ = [
    "Correlated",
    "CyclicPoisson",
    "FixedOrder",
    "FullBatch",
    "Gaussian",
    "Gumbel",
    "Importance",
    "KNorm",
    "Laplace",
    "Minimum",
    "NoNoise",
    "Noise",
    "ObjectiveNoise",
    "Poisson",
    "PureObjectiveNoise",
    "Release",
    "Sampling",
    "WithoutReplacement",
    "argmin_release",
    "gradient_release",
    "minimum_release",
    "norm_count_release",
    "norm_total_release",
    "total_release",
]

_MANY = 2**16
"""The number of draws from which a separate thread pays."""

Kind = Literal["gradient", "total", "argmin", "minimum", "norms", "norm count"]


Bound = Clipping | Minimum


@dataclass(frozen=True)
class Release:
    """One query, with everything that decides its cost and its noise.

    divisor: the public number that the noisy sum is divided by; never the realised batch size.
    """

    kind: Kind
    sampling: Sampling
    clipping: Bound
    noise: Noise
    divisor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.divisor < math.inf:
            raise RefusedError(
                f"a sum is divided by a public number above 0, not {self.divisor}; give the expected size."
            )

    @property
    def noise_scale(self) -> float:
        """Scale of the noise on the sum: standard deviation for Gaussian noise, scale for Laplace and Gumbel.

        For noise in an objective: the standard deviation of the linear term.
        """
        return self.noise.scale(self.clipping)

    def event(self) -> dp.DpEvent:
        """The privacy event; raises RefusedError if none is proven for this combination."""
        if isinstance(self.noise, NoNoise):
            return dp.NonPrivateDpEvent()
        if (self.kind, type(self.clipping), type(self.sampling)) not in self.noise.proven:
            raise RefusedError(
                f"a {self.kind} with {type(self.sampling).__name__} sampling, {type(self.clipping).__name__} bound and"
                f" {type(self.noise).__name__} noise has no proven privacy event; choose one of {_combinations()}."
            )
        is_sampled = not isinstance(self.sampling, FullBatch)
        return _of_sample(self, self.noise.event(self.kind, self.clipping, is_sampled=is_sampled))


def gradient_release(sampling: Sampling, clipping: Clipping, noise: Noise, divisor: float) -> Release:
    """The noisy sum of a sample's clipped gradients, divided by a public number."""
    return Release("gradient", sampling, clipping, noise, divisor)


def total_release(bound: L1 | L2, noise: Noise, sampling: Sampling | None = None) -> Release:
    """The noisy sum of a bounded statistic of each record."""
    return Release("total", sampling or FullBatch(), bound, noise)


def norm_total_release(bound: L2, noise: Noise) -> Release:
    """The noisy sum of all records' gradient norms, each clipped to the bound."""
    return Release("norms", FullBatch(), bound, noise)


def norm_count_release(noise: Noise, sampling: Sampling | None = None) -> Release:
    """The noisy sum of 1/2 for each gradient norm within a public bound, and -1/2 for the others."""
    return Release("norm count", sampling or FullBatch(), L2(0.5), noise)


def argmin_release(bound: float, noise: Noise, sampling: Sampling | None = None) -> Release:
    """A noisy selection of the candidate with the smallest total loss, each record's loss clipped to [0, bound]."""
    return Release("argmin", sampling or FullBatch(), L1(bound), noise)


def minimum_release(problem: Minimum, noise: Noise) -> Release:
    """The minimum of a sum of losses, with noise in the objective or on the result."""
    return Release("minimum", FullBatch(), problem, noise)


def _of_sample(release: Release, inner: dp.DpEvent) -> dp.DpEvent:
    """An importance sample adds a vector of the bound's norm, with at most the rate (Wei et al. 2022, Lemma 3.1)."""
    match release.sampling:
        case FullBatch():
            return inner
        case CyclicPoisson(parts=parts) | FixedOrder(parts=parts):
            event = attrs.evolve(inner, parts=parts, rate=release.sampling.chance)
            if isinstance(event, CorrelatedDpEvent):
                releases_of(event)  # which refuses what no theorem covers
            return event
        case WithoutReplacement(size=size, records=records):
            return dp.SampledWithoutReplacementDpEvent(records, size, inner)
        case Importance() if not isinstance(release.clipping, Normalised) or release.clipping.stability:
            raise RefusedError(
                "importance sampling is proven for contributions that all have one norm;"
                " take Normalised clipping with stability 0."
            )
    return dp.PoissonSampledDpEvent(release.sampling.rate, inner)


def _combinations() -> str:
    noises = (Gaussian, Laplace, KNorm, Gumbel, ObjectiveNoise, PureObjectiveNoise, Correlated)
    return ", ".join(
        f"{kind}/{sampling.__name__}/{bound.__name__}/{noise.__name__}"
        for noise in noises
        for kind, bound, sampling in noise.proven
    )


def chosen(release: Release, count: int, stream: Stream) -> NDArray[np.intp]:
    """Draw the sample of `count` records, as ascending indices; not for importance sampling."""
    match sampling := release.sampling:
        case FullBatch():
            return np.arange(count)
        case WithoutReplacement():
            return stream.subset(count, sampling.size)
        case CyclicPoisson() | FixedOrder():
            if not isinstance(release.noise, Correlated):
                raise TypeError("parts are taken in turn by the steps of correlated noise alone")
            has_turn = stream.parts(count, sampling.parts) == release.noise.step % sampling.parts
            return np.flatnonzero(has_turn & stream.coins(count, sampling.chance))
        case Importance():
            raise TypeError("who takes part in an importance sample depends on gradients")
    return np.flatnonzero(stream.coins(count, sampling.rate))


def add_noise(total: Tensor, release: Release, stream: Stream) -> Tensor:
    """A sum [d], float64, plus noise, both on the grid; the sum itself for a release without noise."""
    if isinstance(release.noise, NoNoise):
        return total
    return add_steps(total, _noise_in_steps(release, stream, len(total), None), std=release.noise_scale)


@dataclass(frozen=True)
class NoiseAhead:
    """The noise of a release, drawn by another thread while the sum is computed.

    start: the position in the release's stream where its draws begin. steps: in grid steps, None without noise.
    """

    release: Release
    start: int
    steps: Future[NDArray[np.float64]] | None

    @staticmethod
    def of(
        release: Release,
        stream: Stream,
        dimension: int,
        *,
        skip: int = 0,
        correlator: Correlator | None = None,
    ) -> "NoiseAhead":
        """Draw noise from a stream after `skip` more words; small draws are made immediately.

        correlator: continues the noise of the steps before, for correlated noise.
        """
        if isinstance(release.noise, NoNoise):
            return NoiseAhead(release, stream.position + skip, None)
        later, start = stream.later(skip), stream.position + skip
        asked = release, later, dimension, correlator
        if dimension >= _MANY:
            return NoiseAhead(release, start, _drawer().submit(_noise_in_steps, *asked))
        steps: Future[NDArray[np.float64]] = Future()
        steps.set_result(_noise_in_steps(*asked))
        return NoiseAhead(release, start, steps)

    def added(self, total: Tensor) -> Tensor:
        """The sum [d], on any device, plus the noise, both on the grid; float64."""
        if self.steps is None:
            return total
        return add_steps(total, self.steps.result(), std=self.release.noise_scale)


@cache
def _drawer() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="ahead")


def words_of_sample(sampling: Sampling, count: int) -> int:
    """The number of words in a release's stream for the sample of `count` records, which comes before the noise."""
    match sampling:
        case FullBatch():
            return 0
        case Importance():
            return 2 * count
        case Poisson() | FixedOrder() if sampling.rate >= 1 or isinstance(sampling, FixedOrder):
            return 0
        case CyclicPoisson() if sampling.chance >= 1:
            return 0
    return count


def noisy_argmin(losses: Tensor, points: Tensor, release: Release, stream: Stream) -> int:
    """The index of the smallest noisy loss [k] at points [k, d]; only finite points count if there are any."""
    losses[~torch.isfinite(points).all(dim=1)] = torch.inf  # losses there are no numbers, and count as zero
    return int(np.argmax(release.noise_scale * draws(release, stream, len(points)) - losses.numpy()))


def _noise_on_grid(release: Release, dimension: int) -> float:
    """The scale of the noise, increased for rounding to the grid."""
    return release.noise.on_grid(
        release.noise_scale, sensitivity=release.clipping.sensitivity, dimension=dimension
    )


def _noise_in_steps(
    release: Release, stream: Stream, dimension: int, correlator: Correlator | None
) -> NDArray[np.float64]:
    drawn = draws(release, stream, dimension) if correlator is None else correlator.draw(stream)
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
