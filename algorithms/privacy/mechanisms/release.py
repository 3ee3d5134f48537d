"""What can be asked of the private records: sampling, bound and noise, as values, and what each question costs.

The table at the end is the only place where a question becomes a privacy event; a combination without a proven
event is refused. An event carries noise over the bound of one record; what that is worth under add-or-remove-one or
replace-one is for the accounting to say.

What a release draws: the records that take part, and the noise that is added; and nothing else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import dp_accounting as dp
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.errors import RefusedError
from algorithms.gradients import L1, L2, Affine, Box, Clipping, Normalised, PerLayer
from algorithms.privacy.accounting.events import ObjectivePerturbationDpEvent, PureDpEvent
from algorithms.privacy.mechanisms.mechanisms import (
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
from algorithms.privacy.mechanisms.noise import Stream, add_on_grid, scale_on_grid, std_on_grid

__all__ = [
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

Kind = Literal["gradient", "total", "argmin", "minimum", "norms", "norm count"]


Bound = Clipping | Minimum


@dataclass(frozen=True)
class Release:
    """One question with everything that decides its cost and its noise.

    divisor: the public number that the noised sum is divided by; never the realised batch size.
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
        if isinstance(self.noise, NoNoise):
            return 0.0
        if isinstance(self.noise, ObjectiveNoise) and isinstance(self.clipping, Minimum):
            return self.noise.multiplier * self.clipping.clip_norm
        return self.noise.multiplier * self.clipping.sensitivity

    def event(self) -> dp.DpEvent:
        """What the release costs; raises RefusedError where no event is proven."""
        if isinstance(self.noise, NoNoise):
            return dp.NonPrivateDpEvent()
        proven = _EVENTS.get((self.kind, type(self.clipping), type(self.noise), type(self.sampling)))
        if proven is None:
            raise RefusedError(
                f"a {self.kind} with {type(self.sampling).__name__} sampling, {type(self.clipping).__name__} bound and"
                f" {type(self.noise).__name__} noise has no proven privacy event; choose one of {_combinations()}."
            )
        return proven(self)


def gradient_release(sampling: Sampling, clipping: Clipping, noise: Noise, divisor: float) -> Release:
    """A noised sum of clipped gradients over a sample, divided by a public number."""
    return Release("gradient", sampling, clipping, noise, divisor)


def total_release(bound: L1 | L2, noise: Noise, sampling: Sampling | None = None) -> Release:
    """A noised sum of a bounded statistic of each record."""
    return Release("total", sampling or FullBatch(), bound, noise)


def norm_total_release(bound: L2, noise: Noise) -> Release:
    """A noised sum of the norms of all records' gradients, each cut off at the bound."""
    return Release("norms", FullBatch(), bound, noise)


def norm_count_release(noise: Noise, sampling: Sampling | None = None) -> Release:
    """A noised sum of 1/2 for each record whose gradient's norm is within a public bound, -1/2 for each other."""
    return Release("norm count", sampling or FullBatch(), L2(0.5), noise)


def argmin_release(bound: float, noise: Noise, sampling: Sampling | None = None) -> Release:
    """A noisy selection of the candidate with the least total loss, each record's loss clipped to [0, bound]."""
    return Release("argmin", sampling or FullBatch(), L1(bound), noise)


def minimum_release(problem: Minimum, noise: Noise) -> Release:
    """The minimum of a sum of losses, with noise in the objective or on the result."""
    return Release("minimum", FullBatch(), problem, noise)


def _gaussian(release: Release) -> dp.DpEvent:
    return dp.GaussianDpEvent(release.noise.multiplier)


def _laplace(release: Release) -> dp.DpEvent:
    return dp.LaplaceDpEvent(release.noise.multiplier)


def _poisson(inner: Callable[[Release], dp.DpEvent]) -> Callable[[Release], dp.DpEvent]:
    return lambda release: dp.PoissonSampledDpEvent(release.sampling.rate, inner(release))


def _importance(release: Release) -> dp.DpEvent:
    """A contribution has the norm of the bound and a probability of at most the rate (Wei et al. 2022, Lemma 3.1)."""
    if not isinstance(release.clipping, Normalised) or release.clipping.stability:
        raise RefusedError(
            "importance sampling is proven for contributions that all have one norm;"
            " take Normalised clipping with stability 0."
        )
    return dp.PoissonSampledDpEvent(release.sampling.rate, _gaussian(release))


def _without_replacement(inner: Callable[[Release], dp.DpEvent]) -> Callable[[Release], dp.DpEvent]:
    def event(release: Release) -> dp.DpEvent:
        if not isinstance(release.sampling, WithoutReplacement):
            raise TypeError(f"{release.sampling} is no sample without replacement")
        sampling = release.sampling
        return dp.SampledWithoutReplacementDpEvent(sampling.records, sampling.size, inner(release))

    return event


def _pure_objective(release: Release) -> dp.DpEvent:
    """As `_objective`, but purely: the Jacobian's log(1 + ratio) and the moved density's 1/z, then the result's."""
    problem, noise = release.clipping, release.noise
    if not isinstance(problem, Minimum) or not isinstance(noise, PureObjectiveNoise):
        raise TypeError(f"{release} is no objective with pure noise")
    inside = math.log1p(problem.curvature / problem.regularisation) + 1.0 / noise.multiplier
    return dp.ComposedDpEvent([PureDpEvent(inside), PureDpEvent(1.0 / noise.output)])


def _pure(release: Release) -> dp.DpEvent:
    """Noise in the norm of the bound is pure epsilon = 1/z (Hardt and Talwar 2010, Section 4)."""
    return PureDpEvent(1.0 / release.noise.multiplier)


def _pure_selection(release: Release) -> dp.DpEvent:
    """A selection by scores that move within [0, bound] is pure epsilon = 1/z; of its zCDP no sampled form is known."""
    return PureDpEvent(1.0 / release.noise.multiplier)


def _objective(release: Release) -> dp.DpEvent:
    """The minimum of the perturbed objective, then how far from it the solver stopped, as a Gaussian release."""
    problem, noise = release.clipping, release.noise
    if not isinstance(problem, Minimum) or not isinstance(noise, ObjectiveNoise):
        raise TypeError(f"{release} is no perturbed objective")
    ratio = problem.curvature / problem.regularisation
    return dp.ComposedDpEvent(
        [ObjectivePerturbationDpEvent(noise.multiplier, ratio), dp.GaussianDpEvent(noise.output)]
    )


def _gumbel_selection(release: Release) -> dp.DpEvent:
    """Scores move by [0, bound] for one record: range epsilon = 1/z, so epsilon^2 / 8 zCDP (Cesar and Rogers 2021)."""
    return dp.dp_event.ZCDpEvent(1.0 / (8.0 * release.noise.multiplier**2))


def _laplace_selection(release: Release) -> dp.DpEvent:
    """Report noisy min of monotone scores is pure epsilon = 1/z (Dwork and Roth 2014, Claim 3.9): epsilon^2 / 2."""
    return dp.dp_event.ZCDpEvent(1.0 / (2.0 * release.noise.multiplier**2))


_EVENTS: dict[tuple[Kind, type, type, type], Callable[[Release], dp.DpEvent]] = {
    ("gradient", L2, Gaussian, Poisson): _poisson(_gaussian),
    ("gradient", L2, Gaussian, FullBatch): _gaussian,
    ("gradient", PerLayer, Gaussian, Poisson): _poisson(_gaussian),
    ("gradient", PerLayer, Gaussian, FullBatch): _gaussian,
    ("gradient", Affine, Gaussian, Poisson): _poisson(_gaussian),
    ("gradient", Affine, Gaussian, FullBatch): _gaussian,
    ("gradient", Normalised, Gaussian, Poisson): _poisson(_gaussian),
    ("gradient", Normalised, Gaussian, FullBatch): _gaussian,
    ("gradient", Normalised, Gaussian, Importance): _importance,
    ("gradient", L2, KNorm, FullBatch): _pure,
    ("gradient", Box, KNorm, FullBatch): _pure,
    ("gradient", L1, Laplace, Poisson): _poisson(_laplace),
    ("gradient", L1, Laplace, FullBatch): _laplace,
    ("gradient", L2, Gaussian, WithoutReplacement): _without_replacement(_gaussian),
    ("gradient", L1, Laplace, WithoutReplacement): _without_replacement(_laplace),
    ("total", L2, Gaussian, Poisson): _poisson(_gaussian),
    ("total", L2, Gaussian, FullBatch): _gaussian,
    ("total", L1, Laplace, Poisson): _poisson(_laplace),
    ("total", L1, Laplace, FullBatch): _laplace,
    ("norms", L2, Gaussian, FullBatch): _gaussian,
    ("norm count", L2, Gaussian, Poisson): _poisson(_gaussian),
    ("norm count", L2, Gaussian, FullBatch): _gaussian,
    ("argmin", L1, Gumbel, FullBatch): _gumbel_selection,
    ("argmin", L1, Laplace, FullBatch): _laplace_selection,
    ("argmin", L1, Gumbel, Poisson): _poisson(_pure_selection),
    ("argmin", L1, Laplace, Poisson): _poisson(_pure_selection),
    ("minimum", Minimum, Gaussian, FullBatch): _gaussian,
    ("minimum", Minimum, ObjectiveNoise, FullBatch): _objective,
    ("minimum", Minimum, PureObjectiveNoise, FullBatch): _pure_objective,
    ("minimum", Minimum, KNorm, FullBatch): _pure,
}


def _combinations() -> str:
    rows = (f"{kind}/{s.__name__}/{c.__name__}/{n.__name__}" for kind, c, n, s in _EVENTS)
    return ", ".join(rows)


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


def add_noise(total: NDArray[np.float64], release: Release, stream: Stream) -> NDArray[np.float64]:
    """The sum with its noise, both on the grid; the sum itself where the release asks for no noise."""
    if isinstance(release.noise, NoNoise):
        return total
    noise = _noise_on_grid(release, len(total)) * draws(release, stream, len(total))
    return add_on_grid(total, noise, std=release.noise_scale)


def noisy_argmin(losses: Tensor, points: Tensor, release: Release, stream: Stream) -> int:
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
