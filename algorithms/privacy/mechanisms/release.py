"""Releases: queries to the private records, as values of sampling, bound and noise, and what they cost.

First the mechanisms, which are kinds of noise. Then the release itself: it alone turns a query into a privacy event, if
its mechanism states that the combination is proven; all others are refused. An event states the noise in units of the
bound on one record; accounting decides what that means under add-or-remove-one or replace-one. Samples of records are
drawn in `sampling`, and a release's noise in `release_noise`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import attrs
import dp_accounting.dp_event as dp
import numpy as np
from numpy.typing import NDArray

from algorithms.errors import RefusedError
from algorithms.gradients import L1, L2, Affine, Box, Clipping, Normalised, PerLayer
from algorithms.privacy.accounting.correlated import CorrelatedDpEvent, releases_of
from algorithms.privacy.accounting.event_classes import (
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    RandomAllocationDpEvent,
    RandomAllocationStepDpEvent,
)
from algorithms.privacy.mechanisms.noise import Stream, scale_on_grid, std_on_grid
from algorithms.privacy.mechanisms.sampling import (
    CyclicPoisson,
    FixedOrder,
    FullBatch,
    Importance,
    Poisson,
    RandomAllocation,
    Sampling,
    WithoutReplacement,
)


@dataclass(frozen=True)
class Minimum:
    """The minimum over all parameters of the sum of all records' losses and of `regularisation / 2 ||parameters||^2`.

    Attributes:
        clip_norm: L2 bound on the gradient of a record's loss; a steeper loss is continued linearly.
        tolerance: L2 norm of the sum's gradient at which the solver may stop.
        input_norm: L2 bound on a record's features including the bias's 1; longer records are scaled down.
        curvature: The resulting bound on a record's second derivative, infinite only without noise.
    """

    clip_norm: float
    regularisation: float
    tolerance: float
    input_norm: float
    curvature: float

    def __post_init__(self) -> None:
        for name in ("clip_norm", "regularisation", "tolerance", "input_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise RefusedError(
                    f"a minimum needs a finite {name} above 0, not {getattr(self, name)}; give public bounds and a"
                    " regularisation above 0."
                )
        if not self.curvature >= 0:
            raise RefusedError(
                f"a curvature is at least 0, not {self.curvature}; give the bound of the loss."
            )

    @property
    def slack(self) -> float:
        """The largest distance from the minimum at which the solver may stop, by strong convexity."""
        return self.tolerance / self.regularisation

    @property
    def sensitivity(self) -> float:
        """How far the solver's result can move in L2 norm if one record is added or removed."""
        # Both results may be that far from their minima.
        return self.clip_norm / self.regularisation + 2 * self.slack


class Correlator(ABC):
    """The noise of one run, correlated over its steps, step after step."""

    @abstractmethod
    def draw(self, stream: Stream) -> NDArray[np.float64]:
        """The noise of the next step at scale 1, shape [dimension], from the stream of its release."""


class Mechanism(ABC):
    """A kind of noise: its draws, standard deviation, privacy event and name, and for which releases it is proven.

    A new mechanism is a subclass whose event registers its own rule (see `event_rules.register`). proven: the
    combinations of release, bound and sampling with a proven event.
    """

    multiplier: float
    proven: ClassVar[tuple[tuple[str, type, type], ...]] = ()
    is_inside: ClassVar[bool] = False
    """Whether the noise is added inside an objective, where there is no grid."""
    on_grid: ClassVar[Callable[..., float]] = staticmethod(std_on_grid)
    """The scale, increased for rounding to the grid: by the L2 norm of what rounding moves, or the L1 norm."""
    step: int = 0
    """Which step of a run this is, from 0, for noise that is correlated over steps."""

    @property
    def name(self) -> str:
        """The name in traces and on cards."""
        return type(self).__name__.lower()

    @abstractmethod
    def draw(self, stream: Stream, count: int, *, box: bool) -> NDArray[np.float64]:
        """Draw at scale 1, shape [count]. box: whether a record's bound is a `Box`."""

    @abstractmethod
    def std(self, dimension: int, *, box: bool) -> float:
        """The standard deviation of one coordinate of `draw`."""

    @abstractmethod
    def event(self, kind: str, bound: Any, *, is_sampled: bool) -> dp.DpEvent:
        """The event on the records that take part."""

    def scale(self, bound: Any) -> float:
        """The scale of the noise for a bound on a record."""
        return float(self.multiplier * bound.sensitivity)


@dataclass(frozen=True)
class Multiplied(Mechanism):
    """Noise whose scale is `multiplier` times the bound on a record. Raises RefusedError unless it is above 0."""

    multiplier: float

    def __post_init__(self) -> None:
        _positive_multiplier(self.multiplier)


_SUMMED_L2 = (L2, PerLayer, Affine, Normalised)


@dataclass(frozen=True)
class Gaussian(Multiplied):
    """Normal noise; its standard deviation on the sum is `multiplier` times the L2 bound of a record."""

    proven = (
        *(
            ("gradient", bound, sampling)
            for bound in _SUMMED_L2
            for sampling in (Poisson, FullBatch, RandomAllocation)
        ),
        ("gradient", Normalised, Importance),
        ("gradient", L2, WithoutReplacement),
        ("total", L2, Poisson),
        ("total", L2, FullBatch),
        ("evaluation", L2, FullBatch),
        ("norms", L2, FullBatch),
        ("norm count", L2, Poisson),
        ("norm count", L2, FullBatch),
        ("minimum", Minimum, FullBatch),
    )

    def draw(self, stream: Stream, count: int, *, box: bool) -> NDArray[np.float64]:
        return stream.normal(count)

    def std(self, dimension: int, *, box: bool) -> float:
        return 1.0

    def event(self, kind: str, bound: Any, *, is_sampled: bool) -> dp.DpEvent:
        return dp.GaussianDpEvent(self.multiplier)


@dataclass(frozen=True)
class Laplace(Multiplied):
    """Laplace noise; its scale is `multiplier` times the L1 bound of a record (pure epsilon = 1 / multiplier)."""

    proven = (
        ("gradient", L1, Poisson),
        ("gradient", L1, FullBatch),
        ("gradient", L1, WithoutReplacement),
        ("total", L1, Poisson),
        ("total", L1, FullBatch),
        ("evaluation", L1, FullBatch),
        ("argmin", L1, FullBatch),
        ("argmin", L1, Poisson),
    )
    on_grid = staticmethod(scale_on_grid)

    def draw(self, stream: Stream, count: int, *, box: bool) -> NDArray[np.float64]:
        return stream.laplace(count)

    def std(self, dimension: int, *, box: bool) -> float:
        return math.sqrt(2.0)

    def event(self, kind: str, bound: Any, *, is_sampled: bool) -> dp.DpEvent:
        """A sum is pure epsilon 1/z; a selection is charged as the zCDP of that, epsilon^2 / 2.

        Report noisy min of monotone scores is pure epsilon 1/z, too (Dwork and Roth 2014, Claim 3.9). But selections
        are chosen adaptively, beside Gaussian releases, under a filter that adds up rhos. Of a sample the pure epsilon
        is charged, since no amplification of zCDP is known.
        """
        if kind != "argmin":
            return dp.LaplaceDpEvent(self.multiplier)
        return _event_of_selection(self.multiplier, 2.0, is_sampled=is_sampled)


@dataclass(frozen=True)
class KNorm(Multiplied):
    """Noise x with density proportional to exp(-|x| / scale) in the norm of the bound (Hardt and Talwar 2010).

    Its scale is `multiplier` times the bound on a record (pure epsilon = 1 / multiplier). The norm is that of `L2` or
    of `Box`.
    """

    proven = (("gradient", L2, FullBatch), ("gradient", Box, FullBatch), ("minimum", Minimum, FullBatch))
    on_grid = staticmethod(scale_on_grid)

    def draw(self, stream: Stream, count: int, *, box: bool) -> NDArray[np.float64]:
        return stream.k_norm(count, box=box)

    def std(self, dimension: int, *, box: bool) -> float:
        # L2: E |x|^2 = d (d + 1) of a Gamma(d) length, in equal parts. Box: u - s has mean square 1 / 6 a coordinate
        # and E r^2 = d (d + 1) / ((d + 2) (d + 3)) of its length r, which is replaced by one with d (d + 1).
        return math.sqrt((dimension + 2) * (dimension + 3) / 6) if box else math.sqrt(dimension + 1)

    def event(self, kind: str, bound: Any, *, is_sampled: bool) -> dp.DpEvent:
        return PureDpEvent(1.0 / self.multiplier)


@dataclass(frozen=True)
class Gumbel(Multiplied):
    """Gumbel noise on the scores of a selection; its scale is `multiplier` times the bound of a record's score."""

    proven = (("argmin", L1, FullBatch), ("argmin", L1, Poisson))

    def draw(self, stream: Stream, count: int, *, box: bool) -> NDArray[np.float64]:
        return stream.gumbel(count)

    def std(self, dimension: int, *, box: bool) -> float:
        return math.pi / math.sqrt(6.0)

    def event(self, kind: str, bound: Any, *, is_sampled: bool) -> dp.DpEvent:
        """A record moves scores by [0, bound]: range epsilon = 1/z, so epsilon^2 / 8 (Cesar and Rogers 2021)."""
        return _event_of_selection(self.multiplier, 8.0, is_sampled=is_sampled)


@dataclass(frozen=True)
class NoNoise(Mechanism):
    """The exact answer: not private."""

    multiplier: float = 0.0

    def draw(self, stream: Stream, count: int, *, box: bool) -> NDArray[np.float64]:
        return np.zeros(count)

    def std(self, dimension: int, *, box: bool) -> float:
        return 0.0

    def event(self, kind: str, bound: Any, *, is_sampled: bool) -> dp.DpEvent:
        return dp.NonPrivateDpEvent()

    def scale(self, bound: Any) -> float:
        return 0.0


@dataclass(frozen=True)
class ObjectiveNoise(Multiplied):
    """Normal noise in an objective that is then minimised, and on the result.

    multiplier: of the linear term, whose standard deviation is `multiplier` times the bound on a record's gradient.
    output: multiplier of the noise that hides how far from the minimum the solver stopped, relative to twice that
    distance.
    """

    output: float
    proven = (("minimum", Minimum, FullBatch),)
    is_inside = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive_multiplier(self.output)

    def draw(self, stream: Stream, count: int, *, box: bool) -> NDArray[np.float64]:
        return stream.normal(count)

    def std(self, dimension: int, *, box: bool) -> float:
        return 1.0

    def event(self, kind: str, bound: Any, *, is_sampled: bool) -> dp.DpEvent:
        """The event of the perturbed objective's exact minimum, and a Gaussian one for where the solver stopped."""
        # The most curvature of a record over the least of the sum.
        ratio = bound.curvature / bound.regularisation
        return dp.ComposedDpEvent(
            [ObjectivePerturbationDpEvent(self.multiplier, ratio), dp.GaussianDpEvent(self.output)]
        )

    def scale(self, bound: Any) -> float:
        return float(self.multiplier * bound.clip_norm)

    def on_result(self) -> Mechanism:
        """The noise that hides where the solver stopped."""
        return Gaussian(self.output)


@dataclass(frozen=True)
class PureObjectiveNoise(ObjectiveNoise):
    """The same with `KNorm` noise instead of normal noise, for pure epsilon (Chaudhuri et al. 2011, Algorithm 2)."""

    def draw(self, stream: Stream, count: int, *, box: bool) -> NDArray[np.float64]:
        return stream.k_norm(count, box=box)

    def std(self, dimension: int, *, box: bool) -> float:
        return math.sqrt(dimension + 1)

    def event(self, kind: str, bound: Any, *, is_sampled: bool) -> dp.DpEvent:
        """The Jacobian's log(1 + ratio), the shifted density's 1/z, and the cost of the noise on the result."""
        inside = math.log1p(bound.curvature / bound.regularisation) + 1.0 / self.multiplier
        return dp.ComposedDpEvent([PureDpEvent(inside), PureDpEvent(1.0 / self.output)])

    def on_result(self) -> Mechanism:
        return KNorm(self.output)


def _event_of_selection(multiplier: float, divisor: float, *, is_sampled: bool) -> dp.DpEvent:
    """The event of a selection by scores within [0, bound], which is pure epsilon 1/z and (1/z)^2 / divisor-zCDP.

    Of a sample it is the pure one, whose amplification is known.
    """
    if is_sampled:
        return PureDpEvent(1.0 / multiplier)
    return dp.ZCDpEvent(1.0 / (divisor * multiplier**2))


def _positive_multiplier(multiplier: float) -> None:
    if not 0 < multiplier < math.inf:
        raise RefusedError(
            f"a noise multiplier must be a finite number above 0, not {multiplier}; calibrate it."
        )


ReleaseKind = Literal["gradient", "total", "argmin", "minimum", "norms", "norm count", "evaluation"]


QueryBound = Clipping | Minimum


@dataclass(frozen=True)
class Release:
    """One query, with everything that decides its cost and its noise.

    Attributes:
        kind: What is asked.
        sampling: Which records take part.
        clipping: The bound on a record.
        noise: Relative to that bound.
        divisor: The public number that the noisy sum is divided by; never the realised batch size.

    Example:
        >>> Release("gradient", Poisson(0.01), L2(1.0), Gaussian(1.1), divisor=256.0).event()
        PoissonSampledDpEvent(sampling_probability=0.01, event=GaussianDpEvent(noise_multiplier=1.1))
    """

    kind: ReleaseKind
    sampling: Sampling
    clipping: QueryBound
    noise: Mechanism
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
        return _event_of_sample(self, self.noise.event(self.kind, self.clipping, is_sampled=is_sampled))


def gradient_release(sampling: Sampling, clipping: Clipping, noise: Mechanism, divisor: float) -> Release:
    """The noisy sum of a sample's clipped gradients, divided by a public number."""
    return Release("gradient", sampling, clipping, noise, divisor)


def total_release(bound: L1 | L2, noise: Mechanism, sampling: Sampling | None = None) -> Release:
    """The noisy sum of a bounded statistic of each record."""
    return Release("total", sampling or FullBatch(), bound, noise)


def histograms_release(histograms: int, noise: Mechanism) -> Release:
    """Noisy histograms, in each of which a record counts 1 in one cell."""
    return total_release(L2(math.sqrt(histograms)), noise)


def norm_total_release(bound: L2, noise: Mechanism) -> Release:
    """The noisy sum of all records' gradient norms, each clipped to the bound."""
    return Release("norms", FullBatch(), bound, noise)


def norm_count_release(noise: Mechanism, sampling: Sampling | None = None) -> Release:
    """The noisy sum of 1/2 for each gradient norm within a public bound, and -1/2 for the others."""
    return Release("norm count", sampling or FullBatch(), L2(0.5), noise)


def argmin_release(bound: float, noise: Mechanism, sampling: Sampling | None = None) -> Release:
    """A noisy selection of the candidate with the smallest total loss, each record's loss clipped to [0, bound]."""
    return Release("argmin", sampling or FullBatch(), L1(bound), noise)


def minimum_release(problem: Minimum, noise: Mechanism) -> Release:
    """The minimum of a sum of losses, with noise in the objective or on the result."""
    return Release("minimum", FullBatch(), problem, noise)


def _event_of_sample(release: Release, inner: dp.DpEvent) -> dp.DpEvent:
    """The event of a release, given the event on those who take part.

    Under random allocation the first step of a pass is charged the whole pass, and each later one states that it is
    paid for. An importance sample is charged as a Poisson sample: a record adds a vector of the bound's norm, with at
    most the rate (Wei et al. 2022, Lemma 3.1).
    """
    match release.sampling:
        case FullBatch():
            return inner
        case CyclicPoisson(parts=parts) | FixedOrder(parts=parts):
            event = attrs.evolve(inner, parts=parts, rate=release.sampling.chance)
            if isinstance(event, CorrelatedDpEvent):
                releases_of(event)  # which refuses what no theorem covers
            return event
        case RandomAllocation(parts=parts) as allocation:
            if allocation.index_in_pass:  # not the first step of its pass
                return RandomAllocationStepDpEvent(inner.noise_multiplier, parts)
            return RandomAllocationDpEvent(inner.noise_multiplier, parts, allocation.steps_of_pass)
        case WithoutReplacement(size=size, records=records):
            return dp.SampledWithoutReplacementDpEvent(records, size, inner)
        case Importance() if not isinstance(release.clipping, Normalised) or release.clipping.stability:
            raise RefusedError(
                "importance sampling is proven for contributions that all have one norm;"
                " take Normalised clipping with stability 0."
            )
    return dp.PoissonSampledDpEvent(release.sampling.rate, inner)


def _combinations() -> str:
    noises = Mechanism.__subclasses__()
    for noise in noises:  # which grows by the subclasses of these
        noises += noise.__subclasses__()
    return ", ".join(
        f"{kind}/{sampling.__name__}/{bound.__name__}/{noise.__name__}"
        for noise in noises
        for kind, bound, sampling in noise.proven
    )
