"""Noise that is correlated over steps: what one step adds, later ones take away in part.

A strategy is a lower triangular matrix C; the noise of all steps is C^-1 W for independent normal rows of W. What it
costs is in `accounting.correlated`. A step's row of W comes from the stream of its release, so that a run that is taken
up again draws the noise of its earlier steps once more instead of keeping it.
"""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import dp_accounting.dp_event as dp
import numpy as np
from numpy.typing import NDArray

from algorithms.errors import RefusedError
from algorithms.gradients import L2, Normalised, PerLayer
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting.correlated import CorrelatedDpEvent, CorrelatedStepDpEvent, buffered_column
from algorithms.privacy.mechanisms.noise import Stream
from algorithms.privacy.mechanisms.release import Correlator, Multiplied
from algorithms.privacy.mechanisms.sampling import CyclicPoisson, FixedOrder

signal = lazy_module("scipy.signal")

Array = NDArray[np.float64]


class Strategy(ABC):
    """How noise is correlated, whatever its scale."""

    @abstractmethod
    def correlator(self, dimension: int) -> Correlator:
        """The generator of the steps' noise, one after the other, of `dimension` coordinates."""

    @abstractmethod
    def variances(self, steps: int) -> Array:
        """The variance of a coordinate of each step's noise, shape [steps], if those of W have variance 1."""

    @abstractmethod
    def event(self, noise_multiplier: float, steps: int) -> CorrelatedDpEvent:
        """The event of all steps if every record takes part in each; a release fills in its sampling."""


class _ToeplitzStrategy(Strategy):
    @abstractmethod
    def column(self, steps: int) -> Array:
        """The first column of C, shape [at most steps]."""

    def inverse(self, steps: int) -> Array:
        """The first column of C^-1, shape [steps]."""
        impulse = np.zeros(steps)
        impulse[0] = 1.0
        response: Array = signal.lfilter([1.0], self.column(steps), impulse)  # the impulse response of 1 / C
        return response

    def variances(self, steps: int) -> Array:
        return np.cumsum(np.square(self.inverse(steps)))  # row t of C^-1 has the first t + 1 entries


@dataclass(frozen=True)
class Toeplitz(_ToeplitzStrategy):
    """A banded Toeplitz matrix. coefficients: its first column without the zeros at the end; (1,) is independent noise.

    Its memory is one vector for each band but the first.
    """

    coefficients: tuple[float, ...]

    def column(self, steps: int) -> Array:
        return np.array(self.coefficients[:steps])

    def correlator(self, dimension: int) -> Correlator:
        return _Recursion(self.coefficients, dimension)

    def event(self, noise_multiplier: float, steps: int) -> CorrelatedDpEvent:
        return CorrelatedDpEvent(noise_multiplier, self.coefficients, (), (), 0, 1, 1.0, steps)


@dataclass(frozen=True)
class Buffered(_ToeplitzStrategy):
    """A Toeplitz matrix with c_0 = 1, c_i = sum_j weights_j decays_j^(i - 1): one vector of memory for each weight.

    Source: Dvijotham et al. 2024, arXiv:2404.16706; McMahan et al. 2024, arXiv:2408.08868.
    """

    weights: tuple[float, ...]
    decays: tuple[float, ...]

    def column(self, steps: int) -> Array:
        return buffered_column(np.array(self.weights), np.array(self.decays), steps)

    def inverse(self, steps: int) -> Array:
        """The first column of C^-1, from what the buffers hold: s = w, then s <- D s - w sum(s), in doubling blocks."""
        weights, decays = np.array(self.weights), np.array(self.decays)
        # [buffers, steps so far], and D - w 1^T
        buffers, later = weights[:, None], np.diag(decays) - weights[:, None]
        while buffers.shape[1] < steps:
            # Twice the steps, by the matrix of as many.
            buffers, later = np.hstack([buffers, later @ buffers]), later @ later
        return np.append(1.0, -buffers.sum(axis=0))[:steps]

    def correlator(self, dimension: int) -> Correlator:
        return _Buffers(self.weights, self.decays, dimension)

    def event(self, noise_multiplier: float, steps: int) -> CorrelatedDpEvent:
        return CorrelatedDpEvent(noise_multiplier, (), self.weights, self.decays, 0, 1, 1.0, steps)


@dataclass(frozen=True)
class Tree(Strategy):
    """Sums over the nodes of a binary tree over `leaves` steps, which then begins anew: the noise of DP-FTRL.

    A node's sum is estimated from its own noise and its children's, weighted by their precisions, with nothing that
    comes later. Source: Kairouz et al. 2021, arXiv:2103.00039; the estimate is Honaker's (2015), "from below".
    """

    leaves: int

    def correlator(self, dimension: int) -> Correlator:
        return _Tree(self.leaves, dimension)

    def variances(self, steps: int) -> Array:
        return np.array([self._variance(leaf % self.leaves + 1) for leaf in range(steps)])

    def squared_sums(self, weights: Array) -> Array:
        """The variances of sums of the steps' noise with these weights, shape [sums, steps] -> [sums].

        A node's estimate counts with the weight of the step that completes it, less that of the step in which its
        parent takes its place; and as a part of its parent's estimate.
        """
        steps = weights.shape[1]
        leaf = np.arange(steps) % self.leaves + 1
        total, of_estimates = np.zeros(len(weights)), np.zeros_like(weights)
        for level in reversed(range(self.leaves.bit_length())):
            length = 1 << level
            ends = np.flatnonzero(leaf % length == 0)  # steps that complete a node of this level
            # A right child is complete in the same step as its parent, which takes its place at once: it counts only as
            # a part of the parent's estimate. A left child stands in the sums until the step in which its parent is.
            is_left = leaf[ends] // length % 2 == 1
            parents = np.where(is_left, ends + length, ends)
            has_parent = ~is_left | (leaf[ends] + length <= self.leaves) & (parents < steps)
            parents = np.where(has_parent, parents, ends)
            replaced = np.where(has_parent, weights[:, parents], 0.0)
            from_parents = np.where(has_parent, of_estimates[:, parents], 0.0)
            share = 1.0 - _node_variance(level + 1)  # of the children in an estimate
            estimates = np.where(is_left, weights[:, ends] - replaced, 0.0) + share * from_parents
            # A node's own draw has this weight in its estimate.
            total += np.square(_node_variance(level) * estimates).sum(1)
            of_estimates[:, ends] = estimates
        return total

    def event(self, noise_multiplier: float, steps: int) -> CorrelatedDpEvent:
        return CorrelatedDpEvent(noise_multiplier, (), (), (), self.leaves, 1, 1.0, steps)

    def _variance(self, leaf: int) -> float:
        """The variance of the noise of the step that is the leaf-th of its tree.

        The step adds the estimate of the node that it completes, less those of the nodes that this one replaces, each
        of which is a part of it with a weight below 1.
        """
        height = _height(leaf)
        total, share = _node_variance(height), 1.0
        for level in reversed(range(height)):
            share *= 1.0 - _node_variance(level + 1)  # the weight of the children
            total += (1.0 - 2.0 * share) * _node_variance(level)
        return total


def strategy_of(event: CorrelatedDpEvent) -> Strategy:
    """The strategy that an event states.

    Example:
        >>> strategy_of(Toeplitz((0.8, 0.6)).event(2.0, 10))
        Toeplitz(coefficients=(0.8, 0.6))
    """
    if event.leaves:
        return Tree(event.leaves)
    if event.coefficients:
        return Toeplitz(event.coefficients)
    return Buffered(event.weights, event.decays)


def _height(leaf: int) -> int:
    """The height of the tallest node that is complete with this leaf, counted from 1."""
    return (leaf & -leaf).bit_length() - 1  # the position of the lowest bit


@lru_cache
def _node_variance(level: int) -> float:
    """The variance of the estimate of a node's noise, from its own draw and its children's."""
    # Precisions add up: 1 of its own, 1 / (2 v) of two children's sum.
    return 1.0 if level == 0 else 1.0 / (1.0 + 0.5 / _node_variance(level - 1))


class _Recursion(Correlator):
    """C Z = W, solved row by row."""

    def __init__(self, coefficients: tuple[float, ...], dimension: int) -> None:
        self._coefficients, self._dimension = coefficients, dimension
        self._past: deque[Array] = deque(maxlen=len(coefficients) - 1)

    def draw(self, stream: Stream) -> Array:
        # Row t of C Z = W: c_0 z_t = w_t - sum_i c_i z_(t-i). Only the last bands are needed.
        noise = stream.normal(self._dimension)
        for coefficient, before in zip(self._coefficients[1:], self._past, strict=False):
            noise = noise - coefficient * before
        if self._coefficients[0] != 1.0:
            noise = noise / self._coefficients[0]
        self._past.appendleft(noise)
        return noise


class _Buffers(Correlator):
    """The same with a geometric sum of the noise so far for each decay."""

    def __init__(self, weights: tuple[float, ...], decays: tuple[float, ...], dimension: int) -> None:
        self._weights, self._decays = np.array(weights), np.array(decays)
        self._sums = np.zeros((len(weights), dimension))

    def draw(self, stream: Stream) -> Array:
        # z_t = w_t - sum_i c_i z_(t-i), where c_i = sum_j weights_j decays_j^(i-1): row j is the sum over i.
        noise: Array = stream.normal(self._sums.shape[1]) - self._weights @ self._sums
        self._sums *= self._decays[:, None]
        self._sums += noise
        return noise


class _Tree(Correlator):
    """Estimates of the nodes that are complete, by level, and what their sum was a step before."""

    def __init__(self, leaves: int, dimension: int) -> None:
        self._leaves, self._dimension, self._leaf = leaves, dimension, 0
        self._nodes: dict[int, Array] = {}

    def draw(self, stream: Stream) -> Array:
        if self._leaf == self._leaves:
            self._leaf, self._nodes = 0, {}
        self._leaf += 1
        node = stream.normal(self._dimension)
        taken = np.zeros(self._dimension)
        for level in range(1, _height(self._leaf) + 1):
            sibling = self._nodes.pop(level - 1)
            taken += sibling
            weight = _node_variance(level)
            # The minimum-variance mean of two independent estimates of a node: its own noise and the sum of its
            # children.
            node = weight * stream.normal(self._dimension) + (1.0 - weight) * (node + sibling)
        self._nodes[_height(self._leaf)] = node
        # A step releases a difference of prefix sums: the new node less the nodes that it takes the place of.
        return node - taken


@dataclass(frozen=True)
class Correlated(Multiplied):
    """Normal noise of one step of a run, correlated with that of the others.

    multiplier: standard deviation of a coordinate of W over the L2 bound of a record. strategy: how it is correlated.
    steps: of the whole run, which is charged with its first step. step: which one this is, from 0.
    """

    strategy: Strategy = field(default_factory=lambda: Toeplitz((1.0,)))
    steps: int = 1
    step: int = 0

    proven = tuple(
        ("gradient", bound, sampling)
        for bound in (L2, PerLayer, Normalised)
        for sampling in (CyclicPoisson, FixedOrder)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.step < self.steps:
            raise RefusedError(
                f"step {self.step} of {self.steps} with correlated noise was asked for; give one from 0 to"
                f" {self.steps - 1}."
            )

    def draw(self, stream: Stream, count: int, *, box: bool) -> NDArray[np.float64]:
        """Raises TypeError: a draw goes on with those of the steps before."""
        raise TypeError("correlated noise is drawn by its correlator")

    def std(self, dimension: int, *, box: bool) -> float:
        return float(_stds(self.strategy, self.steps)[self.step])

    def event(self, kind: str, bound: Any, *, is_sampled: bool) -> dp.DpEvent:
        """The whole run's with the first step, nothing with the others."""
        if self.step == 0:
            return self.strategy.event(self.multiplier, self.steps)
        return CorrelatedStepDpEvent(self.multiplier, 1, 1.0)


@lru_cache(maxsize=64)
def _stds(strategy: Strategy, steps: int) -> Array:
    return np.sqrt(strategy.variances(steps))
