"""Who takes part in a release: the ways of sampling records, and the draw of a sample."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from algorithms.errors import RefusedError
from algorithms.privacy.mechanisms.binomial import draw_binomial
from algorithms.privacy.mechanisms.noise import Stream, floor_rate


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

    Candidates are drawn before their gradients are known, by their last norms.

    Attributes:
        rate: A bound on the probability, which is charged.
        oversampling: How many times more candidates are drawn than needed, from 1.
        floor: The smallest last norm that a record counts with, as part of C.
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

    Only for correlated noise.

    Attributes:
        parts: How many parts the records are divided into, from 1.
        rate: The share of all records in a step; a record's chance in its step is `parts` times that.
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
        """The probability that a record takes part in a step of its part."""
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
        """The probability that a record takes part in a step of its part."""
        return 1.0


@dataclass(frozen=True)
class RandomAllocation:
    """A record takes part in exactly one of the `parts` steps of each pass, drawn anew and independently in each.

    What shuffled epochs are meant to be, with a proven cost; the sizes of batches still vary. steps: of the run, whose
    last pass may be cut short. step: which of them this is, from 0.
    """

    parts: int
    steps: int
    step: int = 0

    def __post_init__(self) -> None:
        if self.parts < 1 or not 0 <= self.step < self.steps:
            raise RefusedError(
                f"step {self.step} of {self.steps} with {self.parts} steps to a pass was asked for; give at least 1"
                " step to a pass, and a step of the run."
            )

    @property
    def rate(self) -> float:
        """The probability that a record takes part in a step."""
        return 1.0 / self.parts

    @property
    def passes(self) -> int:
        """The number of passes before this step's."""
        return self.step // self.parts

    @property
    def first_step(self) -> int:
        """The first step of this step's pass."""
        return self.passes * self.parts

    @property
    def index_in_pass(self) -> int:
        """The index of this step within its pass, from 0."""
        return self.step % self.parts

    @property
    def steps_of_pass(self) -> int:
        """How many steps this step's pass has."""
        return min(self.parts, self.steps - self.passes * self.parts)


_DENSE_RATE = 1 / 32
Cyclic = CyclicPoisson | FixedOrder
Sampling = FullBatch | Poisson | WithoutReplacement | Importance | Cyclic | RandomAllocation


def draw_sample(sampling: Sampling, count: int, stream: Stream, *, step: int) -> NDArray[np.intp]:
    """Draw the sample of `count` records, as ascending indices; not for importance sampling.

    step: of the run, from 0, which decides whose turn it is when records are divided into parts.

    Example:
        >>> from algorithms.privacy.mechanisms.noise import seeded_generator
        >>> draw_sample(Poisson(0.3), 10, seeded_generator(0).stream(0), step=0).tolist()
        [1, 6, 8, 9]
    """
    match sampling:
        case FullBatch():
            return np.arange(count)
        case WithoutReplacement(size=size):
            return stream.of_sample().subset(count, size)
        case Poisson(rate=rate):
            words = stream.of_sample()
            if rate >= _DENSE_RATE:  # a coin for each record is quicker
                return np.flatnonzero(words.coins(count, rate))
            # The size is binomial, and given the size all subsets are equally likely: the same distribution as a coin
            # for each record, at the cost of the sample alone.
            return words.subset(count, draw_binomial(count, floor_rate(rate), words))
        case CyclicPoisson(parts=parts) | FixedOrder(parts=parts):
            # Parts are the same in every step of a run, the coins are of this step alone.
            has_turn = stream.parts(count, parts) == step % parts
            return np.flatnonzero(has_turn & stream.coins(count, sampling.chance))
        case RandomAllocation(parts=parts):
            return np.flatnonzero(
                stream.allocation(count, parts, sampling.first_step) == sampling.index_in_pass
            )
        case Importance():
            raise TypeError("who takes part in an importance sample depends on gradients")


def words_of_sample(sampling: Sampling, count: int) -> int:
    """The number of words in a release's stream for the sample of `count` records, which comes before the noise."""
    match sampling:
        case Importance():
            return 2 * count
        case CyclicPoisson(chance=chance) if chance < 1:
            return count
    return 0
