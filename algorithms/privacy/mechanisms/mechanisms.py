"""The terms of a release: how records are sampled, what noise is added, and what is minimised."""

import math
from dataclasses import dataclass

from algorithms.errors import RefusedError


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
            raise RefusedError(
                f"a sampling rate must lie in (0, 1], not {self.rate}; give expected batch / records."
            )


@dataclass(frozen=True)
class WithoutReplacement:
    """A random subset of `size` of the `records`, whose number is public; proven under replace-one alone."""

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
        """How likely a record is to take part."""
        return self.size / self.records


@dataclass(frozen=True)
class Importance:
    """A record takes part with probability rate * |g| / C, for its gradient g clipped to the norm C (Wei et al. 2022).

    rate: what the probability is at most, and what is charged. Candidates are drawn before their gradients are known,
    by their last norms: `oversampling` times more than needed, none as if its norm was below `floor` times C.
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


Sampling = FullBatch | Poisson | WithoutReplacement | Importance


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
class KNorm:
    """Noise x of density proportional to exp(-|x| / scale) in the norm of the bound (Hardt and Talwar 2010).

    Its scale is `multiplier` times the bound of a record (pure epsilon = 1 / multiplier). The norms are that of `L2`
    and that of `Box`.
    """

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


@dataclass(frozen=True)
class ObjectiveNoise:
    """Normal noise in an objective before it is minimised, and on the minimum that was found.

    multiplier: of the linear term, whose standard deviation is `multiplier` times the bound of a record's gradient.
    output: of the noise that hides how far the solver stopped from the minimum, relative to twice that distance.
    """

    multiplier: float
    output: float

    def __post_init__(self) -> None:
        _positive_multiplier(self.multiplier)
        _positive_multiplier(self.output)


class PureObjectiveNoise(ObjectiveNoise):
    """The same with `KNorm` noise in place of normal noise, for pure epsilon (Chaudhuri et al. 2011, Algorithm 2)."""


Noise = Gaussian | Laplace | KNorm | Gumbel | ObjectiveNoise | PureObjectiveNoise | NoNoise


@dataclass(frozen=True)
class Minimum:
    """The minimum over all parameters of the sum of all records' losses and of `regularisation / 2 ||parameters||^2`.

    clip_norm: L2 bound of the gradient of a record's loss; a loss is continued linearly where it would be steeper.
    input_norm: L2 bound of a record's features, the bias's 1 included; a longer record is scaled down to it.
    curvature: the bound of a record's second derivative that follows, infinite only without noise.
    tolerance: L2 norm of the gradient of the sum at which the solver may stop.
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
        """How far the solver may stop from the minimum, by its strong convexity."""
        return self.tolerance / self.regularisation

    @property
    def sensitivity(self) -> float:
        """How far what the solver finds can move in L2 norm when one record comes or goes."""
        return self.clip_norm / self.regularisation + 2 * self.slack


def _positive_multiplier(multiplier: float) -> None:
    if not 0 < multiplier < math.inf:
        raise RefusedError(
            f"a noise multiplier must be a finite number above 0, not {multiplier}; calibrate it."
        )
