"""The terms of a release: how records are sampled, what noise is added, and what is minimised."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import dp_accounting as dp
import numpy as np
from numpy.typing import NDArray

from algorithms.errors import RefusedError
from algorithms.gradients import L1, L2, Affine, Box, Normalised, PerLayer
from algorithms.privacy.accounting.event_rules import ObjectivePerturbationDpEvent, PureDpEvent
from algorithms.privacy.mechanisms.noise import Stream, scale_on_grid, std_on_grid


@dataclass(frozen=True)
class FullBatch:
    """Every record takes part."""

    rate: float = 1.0


@dataclass(frozen=True)
class Poisson:
    """Every record takes part independently with probability `rate`."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise RefusedError(
                f"a sampling rate must lie in (0, 1], not {self.rate}; give expected batch / records."
            )


@dataclass(frozen=True)
class WithoutReplacement:
    """A random subset of `size` of the `records`, whose number is public; proven only under replace-one."""

    size: int
    records: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.records:
            raise RefusedError(
                f"a sample of {self.size} without replacement was asked for, of {self.records} records;"
                f" give a size from 1 to {self.records}."
            )

    @property
    def rate(self) -> float:
        """The probability that a record takes part."""
        return self.size / self.records


@dataclass(frozen=True)
class Importance:
    """A record takes part with probability rate * |g| / C, for its gradient g clipped to the norm C (Wei et al. 2022).

    rate: bounds the probability, and is charged. Candidates are drawn before their gradients are known, by their last
    norms: `oversampling` times more than needed, and with norms of at least `floor` times C.
    """

    rate: float
    oversampling: float = 5.0
    floor: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1 or not 1 <= self.oversampling < math.inf or not 0 < self.floor <= 1:
            raise RefusedError(
                f"importance sampling needs a rate and a floor in (0, 1] and an oversampling from 1 up, not {self};"
                " give other numbers."
            )
        if self.oversampling * self.rate > 1:
            raise RefusedError(
                f"a rate of {self.rate:g} oversampled {self.oversampling:g} times is above 1, and no coin is;"
                f" give a rate of at most {1 / self.oversampling:g}."
            )


@dataclass(frozen=True)
class CyclicPoisson:
    """A record belongs to one of `parts`, drawn once per run, and takes part with `chance` in every parts-th step.

    rate: of a step over all records; the chance is `parts` times that. Only for correlated noise.
    """

    parts: int
    rate: float

    def __post_init__(self) -> None:
        if self.parts < 1 or not self.rate > 0 or not self.chance <= 1:
            raise RefusedError(
                f"{self.parts} parts with a rate of {self.rate:g} were asked for; give at least 1 part and a rate in"
                f" (0, 1 / parts], so that a record's chance in its step is at most 1."
            )

    @property
    def chance(self) -> float:
        """With which a record takes part in a step of its part."""
        return self.parts * self.rate


@dataclass(frozen=True)
class FixedOrder:
    """A record belongs to one of `parts`, drawn once per run, and always takes part in every parts-th step."""

    parts: int

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise RefusedError(f"{self.parts} parts were asked for; give 1 or more steps to a pass.")

    @property
    def rate(self) -> float:
        """The share of all records in a step."""
        return 1.0 / self.parts

    @property
    def chance(self) -> float:
        """With which a record takes part in a step of its part."""
        return 1.0


Cyclic = CyclicPoisson | FixedOrder
Sampling = FullBatch | Poisson | WithoutReplacement | Importance | Cyclic


@dataclass(frozen=True)
class Minimum:
    """The minimum over all parameters of the sum of all records' losses and of `regularisation / 2 ||parameters||^2`.

    clip_norm: L2 bound on the gradient of a record's loss; a steeper loss is continued linearly. input_norm: L2 bound
    on a record's features including the bias's 1; longer records are scaled down. curvature: the resulting bound on a
    record's second derivative, infinite only without noise. tolerance: L2 norm of the sum's gradient at which the
    solver may stop.
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
        return self.clip_norm / self.regularisation + 2 * self.slack


class Mechanism(ABC):
    """A kind of noise: its draws, standard deviation, privacy event and name, and for which releases it is proven.

    A new mechanism is a subclass whose event registers its own rule (see `event_rules.register`). proven: the
    combinations of release, bound and sampling with a proven event.
    """

    multiplier: float
    proven: ClassVar[tuple[tuple[str, type, type], ...]] = ()
    is_inside: ClassVar[bool] = False
    """Whether the noise is added inside an objective, where there is no grid."""

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

    def on_grid(self, scale: float, *, sensitivity: float, dimension: int) -> float:
        """The scale, increased for rounding to the grid."""
        return std_on_grid(scale, sensitivity=sensitivity, dimension=dimension)


@dataclass(frozen=True)
class Multiplied(Mechanism):
    multiplier: float

    def __post_init__(self) -> None:
        _positive_multiplier(self.multiplier)


_SUMMED_L2 = (L2, PerLayer, Affine, Normalised)


@dataclass(frozen=True)
class Gaussian(Multiplied):
    """Normal noise; its standard deviation on the sum is `multiplier` times the L2 bound of a record."""

    proven = (
        *(("gradient", bound, sampling) for bound in _SUMMED_L2 for sampling in (Poisson, FullBatch)),
        ("gradient", Normalised, Importance),
        ("gradient", L2, WithoutReplacement),
        ("total", L2, Poisson),
        ("total", L2, FullBatch),
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
        ("argmin", L1, FullBatch),
        ("argmin", L1, Poisson),
    )

    def draw(self, stream: Stream, count: int, *, box: bool) -> NDArray[np.float64]:
        return stream.laplace(count)

    def std(self, dimension: int, *, box: bool) -> float:
        return math.sqrt(2.0)

    def event(self, kind: str, bound: Any, *, is_sampled: bool) -> dp.DpEvent:
        """Report noisy min of monotone scores is pure epsilon = 1/z (Dwork and Roth 2014, Claim 3.9): epsilon^2 / 2."""
        if kind != "argmin":
            return dp.LaplaceDpEvent(self.multiplier)
        return _selected(self.multiplier, 2.0, is_sampled=is_sampled)

    def on_grid(self, scale: float, *, sensitivity: float, dimension: int) -> float:
        return scale_on_grid(scale, sensitivity=sensitivity, dimension=dimension)


@dataclass(frozen=True)
class KNorm(Multiplied):
    """Noise x with density proportional to exp(-|x| / scale) in the norm of the bound (Hardt and Talwar 2010).

    Its scale is `multiplier` times the bound on a record (pure epsilon = 1 / multiplier). The norm is that of `L2` or
    of `Box`.
    """

    proven = (("gradient", L2, FullBatch), ("gradient", Box, FullBatch), ("minimum", Minimum, FullBatch))

    def draw(self, stream: Stream, count: int, *, box: bool) -> NDArray[np.float64]:
        return stream.k_norm(count, box=box)

    def std(self, dimension: int, *, box: bool) -> float:
        return math.sqrt((dimension + 2) * (dimension + 3) / 6) if box else math.sqrt(dimension + 1)

    def event(self, kind: str, bound: Any, *, is_sampled: bool) -> dp.DpEvent:
        return PureDpEvent(1.0 / self.multiplier)

    def on_grid(self, scale: float, *, sensitivity: float, dimension: int) -> float:
        return scale_on_grid(scale, sensitivity=sensitivity, dimension=dimension)


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
        return _selected(self.multiplier, 8.0, is_sampled=is_sampled)


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


Noise = Mechanism


def _selected(multiplier: float, divisor: float, *, is_sampled: bool) -> dp.DpEvent:
    """A selection by scores within [0, bound] is pure epsilon = 1/z; of its zCDP no sampled form is known."""
    if is_sampled:
        return PureDpEvent(1.0 / multiplier)
    return dp.dp_event.ZCDpEvent(1.0 / (divisor * multiplier**2))


def _positive_multiplier(multiplier: float) -> None:
    if not 0 < multiplier < math.inf:
        raise RefusedError(
            f"a noise multiplier must be a finite number above 0, not {multiplier}; calibrate it."
        )
