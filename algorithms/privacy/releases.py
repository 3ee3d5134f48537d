"""What can be asked of the private records: sampling, bound and noise, as values, and what each question costs.

The table at the end is the only place where a question becomes a privacy event; a combination without a proven
event is refused. Adjacency is add-or-remove-one record throughout.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import dp_accounting as dp

from algorithms.gradients import L1, L2, Affine, Clipping, Normalised, PerLayer
from algorithms.privacy.errors import Refused


@dataclass(frozen=True)
class FullBatch:
    """Every record takes part."""

    rate: float = 1.0


@dataclass(frozen=True)
class Poisson:
    """Every record takes part with probability `rate`, by a coin of its own."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise Refused(
                f"a sampling rate must lie in (0, 1], not {self.rate}; give expected batch / records."
            )


Sampling = FullBatch | Poisson


@dataclass(frozen=True)
class Gaussian:
    """Normal noise; its standard deviation on the sum is `multiplier` times the L2 bound of a record."""

    multiplier: float

    def __post_init__(self) -> None:
        _positive_multiplier(self.multiplier)


@dataclass(frozen=True)
class Laplace:
    """Laplace noise; its scale is `multiplier` times the L1 bound of a record (pure epsilon = 1 / multiplier)."""

    multiplier: float

    def __post_init__(self) -> None:
        _positive_multiplier(self.multiplier)


@dataclass(frozen=True)
class Gumbel:
    """Gumbel noise on the scores of a selection; its scale is `multiplier` times the bound of a record's score."""

    multiplier: float

    def __post_init__(self) -> None:
        _positive_multiplier(self.multiplier)


@dataclass(frozen=True)
class NoNoise:
    """The exact answer: not private."""

    multiplier: float = 0.0


Noise = Gaussian | Laplace | Gumbel | NoNoise
Kind = Literal["gradient", "total", "argmin"]


@dataclass(frozen=True)
class Release:
    """One question with everything that decides its cost and its noise.

    divisor: the public number that the noised sum is divided by; never the realised batch size.
    """

    kind: Kind
    sampling: Sampling
    clipping: Clipping
    noise: Noise
    divisor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.divisor < math.inf:
            raise Refused(
                f"a sum is divided by a public number above 0, not {self.divisor}; give the expected size."
            )

    @property
    def noise_scale(self) -> float:
        """Scale of the noise on the sum: standard deviation for Gaussian noise, scale for Laplace and Gumbel."""
        return 0.0 if isinstance(self.noise, NoNoise) else self.noise.multiplier * self.clipping.sensitivity

    def event(self) -> dp.DpEvent:
        """What the release costs under add-or-remove-one; raises Refused where no event is proven."""
        if isinstance(self.noise, NoNoise):
            return dp.NonPrivateDpEvent()
        proven = _EVENTS.get((self.kind, type(self.clipping), type(self.noise), type(self.sampling)))
        if proven is None:
            raise Refused(
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


def argmin_release(bound: float, noise: Noise) -> Release:
    """A noisy selection of the candidate with the least total loss, each record's loss clipped to [0, bound]."""
    return Release("argmin", FullBatch(), L1(bound), noise)


def _gaussian(release: Release) -> dp.DpEvent:
    return dp.GaussianDpEvent(release.noise.multiplier)


def _laplace(release: Release) -> dp.DpEvent:
    return dp.LaplaceDpEvent(release.noise.multiplier)


def _poisson(inner: Callable[[Release], dp.DpEvent]) -> Callable[[Release], dp.DpEvent]:
    return lambda release: dp.PoissonSampledDpEvent(release.sampling.rate, inner(release))


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
    ("gradient", L1, Laplace, Poisson): _poisson(_laplace),
    ("gradient", L1, Laplace, FullBatch): _laplace,
    ("total", L2, Gaussian, Poisson): _poisson(_gaussian),
    ("total", L2, Gaussian, FullBatch): _gaussian,
    ("total", L1, Laplace, Poisson): _poisson(_laplace),
    ("total", L1, Laplace, FullBatch): _laplace,
    ("argmin", L1, Gumbel, FullBatch): _gumbel_selection,
    ("argmin", L1, Laplace, FullBatch): _laplace_selection,
}


def _combinations() -> str:
    rows = (f"{kind}/{s.__name__}/{c.__name__}/{n.__name__}" for kind, c, n, s in _EVENTS)
    return ", ".join(rows)


def _positive_multiplier(multiplier: float) -> None:
    if not 0 < multiplier < math.inf:
        raise Refused(f"a noise multiplier must be a finite number above 0, not {multiplier}; calibrate it.")
