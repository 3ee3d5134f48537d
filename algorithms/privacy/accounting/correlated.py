"""The cost of correlated noise: one event for all steps of a run, from the sensitivity of its strategy.

The noise of step t is row t of C^-1 W, for a lower triangular strategy C and independent normal rows of W. The noisy
gradients G + C^-1 W determine C G + W and vice versa, so the run is one Gaussian release of C G, even if gradients
depend on earlier releases (Denisov et al. 2022, arXiv:2202.08312, Theorem 2.1). A record belongs to one of `parts` and
takes part only in every parts-th step, with gradients u of norm at most 1.

Fixed order (rate 1): the release moves by the sum of C's columns at those steps, each times its u. Since products of
the vectors u can have any sign, the square is at most the sum of the absolute products of these columns; this is exact
if no product is negative. Cyclic Poisson sampling (rate below 1): with at most `parts` bands, the columns of one record
do not overlap, and each is a Poisson sampled Gaussian release (Choquette-Choo et al. 2023, arXiv:2306.08153, Theorem
4). For other strategies no amplification by sampling is proven here, and they are refused.
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import attrs
import dp_accounting.dp_event as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation
from numpy.typing import NDArray

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.event_rules import EventRule, TraceFields, register

Array = NDArray[np.float64]


def _numbers(numbers: Iterable[float]) -> tuple[float, ...]:
    return tuple(numbers)  # of a list, as documents have them: caches key by the event


@attrs.frozen
class CorrelatedDpEvent(dp.DpEvent):  # type: ignore[misc]
    """All steps of a run with correlated Gaussian noise, charged with the first of them.

    Attributes:
        noise_multiplier: Standard deviation of a coordinate of W over the bound on a record's gradient.
        coefficients: The first column of a Toeplitz strategy, without the zeros at its end; empty for others. The first
            is at least 1e-6.
        weights, decays: Of a buffered strategy: c_0 = 1 and c_i = sum_j weights_j decays_j^(i - 1).
        leaves: Of a binary tree, the number of steps after which a new tree begins; otherwise 0.
        parts: The number of parts that the records are divided into.
        rate: The probability that a record takes part in a step of its part.
        steps: Of the run.
    """

    noise_multiplier: float
    coefficients: tuple[float, ...] = attrs.field(converter=_numbers)
    weights: tuple[float, ...] = attrs.field(converter=_numbers)
    decays: tuple[float, ...] = attrs.field(converter=_numbers)
    leaves: int
    parts: int
    rate: float
    steps: int


@attrs.frozen
class CorrelatedStepDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A later step of the run that a `CorrelatedDpEvent` before it has paid for."""

    noise_multiplier: float
    parts: int
    rate: float


def toeplitz(event: CorrelatedDpEvent) -> Array:
    """The first column of a Toeplitz strategy, shape [at most steps]."""
    if event.coefficients:
        return np.array(event.coefficients[: event.steps], dtype=np.float64)
    return buffered_column(np.array(event.weights), np.array(event.decays), event.steps)


def buffered_column(weights: Array, decays: Array, steps: int) -> Array:
    """The first column of a buffered strategy, shape [steps]."""
    powers = decays[:, None] ** np.arange(max(steps - 1, 0))  # [buffers, steps - 1]
    return np.concatenate([[1.0], weights @ powers])[:steps]


def squared_sensitivity(coefficients: Array, *, steps: int, parts: int) -> float:
    """A bound on the squared Frobenius norm of the change of C G by a record that takes part every `parts` steps.

    Args:
        coefficients: The first column of C, shape [bands].
        steps: Rows and columns of C.
        parts: Steps between a record's participations.

    Example:
        >>> squared_sensitivity(np.array([1.0, 0.5]), steps=4, parts=2)
        2.5
    """
    column = np.zeros(steps)
    column[: min(len(coefficients), steps)] = coefficients[:steps]
    if column.min() >= 0:
        # No products are negative, and a record that begins with the first step moves most. Row i of the reshaped
        # column is what a participation i periods ago still adds, so that cumulated rows are the change of C G.
        period = min(parts, steps)
        moved = np.cumsum(np.append(column, np.zeros(-steps % period)).reshape(-1, period), axis=0)
        return float(np.square(moved.ravel()[:steps]).sum())
    totals = np.zeros(min(parts, steps))  # by the record's part, [parts]
    for lag in range(0, steps, parts):
        if lag >= len(coefficients):
            break
        # The product of the columns at steps p - lag and p is that of c and c moved by the lag, up to row steps - 1.
        products = np.abs(np.cumsum(column[: steps - lag] * column[lag:]))
        positions = np.arange(lag, steps)
        # The product of two different columns occurs twice.
        weights = (1.0 if lag == 0 else 2.0) * products[steps - 1 - positions]
        totals += np.bincount(positions % parts, weights=weights, minlength=len(totals))[: len(totals)]
    return float(totals.max())


def squared_tree_sensitivity(*, leaves: int, steps: int, parts: int) -> float:
    """The same for binary trees over `leaves` steps each, which release the sum of every complete node.

    Source: Kairouz et al. 2021, arXiv:2103.00039, where a record takes part once per tree; here a node changes by the
    number of its leaves that contain the record.

    Example:
        >>> squared_tree_sensitivity(leaves=8, steps=8, parts=8)
        4.0
    """

    step = np.arange(steps)
    tree, leaf = step // leaves, step % leaves
    length = np.minimum(leaves, steps - tree * leaves)
    first = step % parts
    totals = np.zeros(min(parts, steps))
    for level in range(leaves.bit_length()):
        nodes = (leaves >> level) + 1
        node = leaf >> level
        is_complete = node < length >> level
        # A number for each (first participation, tree, node): it is there once for each leaf with the record.
        positions = ((first * (tree[-1] + 1) + tree) * nodes + node)[is_complete]
        changed, times = np.unique(positions, return_counts=True)
        # Squared: a node moves by the sum of a record's leaves in it.
        totals += np.bincount(changed // (nodes * (tree[-1] + 1)), np.square(times), minlength=len(totals))
    return float(totals.max())


@lru_cache(maxsize=256)
def _squared_sensitivity_of(event: CorrelatedDpEvent) -> float:
    if event.leaves:
        return squared_tree_sensitivity(leaves=event.leaves, steps=event.steps, parts=event.parts)
    return squared_sensitivity(toeplitz(event), steps=event.steps, parts=event.parts)


def releases_of(event: CorrelatedDpEvent) -> tuple[dp.DpEvent, int]:
    """An event that costs as much as the run, and how often it occurs; raises RefusedError if no theorem gives one.

    Example:
        >>> releases_of(CorrelatedDpEvent(2.0, [1.0], [], [], 0, 1, 0.1, 50))
        (PoissonSampledDpEvent(sampling_probability=0.1, event=GaussianDpEvent(noise_multiplier=2.0)), 50)
    """
    if event.rate == 1.0:
        squared = _squared_sensitivity_of(attrs.evolve(event, noise_multiplier=1.0))
        return dp.GaussianDpEvent(event.noise_multiplier / math.sqrt(squared)), 1
    if not 0 < len(event.coefficients) <= event.parts:  # the columns of one record overlap
        bands = "a tree" if event.leaves else f"{len(event.coefficients) or event.steps} bands"
        raise RefusedError(
            "a sample from each of {parts} parts was asked for with the noise of {bands}; its gain is proven for"
            " Toeplitz strategies of no more bands than parts: set {method.bands} to at most {parts}, or"
            " {method.participation} to fixed_order.",
            code="more_bands_than_parts",
            parts=event.parts,
            bands=bands,
        )
    # Of one column, as those of one record do not overlap.
    norm = math.sqrt(float(np.square(toeplitz(event)).sum()))
    inner = dp.GaussianDpEvent(event.noise_multiplier / norm)
    # How often a record's turn comes, rounded up.
    return dp.PoissonSampledDpEvent(event.rate, inner), math.ceil(event.steps / event.parts)


_MIN_FIRST = 1e-6
"""The least first coefficient of a strategy: squares of much smaller ones vanish, and with them what a record moves."""


class _Correlated(EventRule):
    def is_possible(self, event: Any) -> bool:
        numbers = [event.noise_multiplier, *event.coefficients, *event.weights, *event.decays, event.rate]
        kinds = [bool(event.coefficients), bool(event.weights), event.leaves > 0]
        return bool(
            all(map(math.isfinite, numbers))
            and event.noise_multiplier > 0
            and sum(kinds) == 1
            and len(event.weights) == len(event.decays)
            and all(0 <= decay < 1 for decay in event.decays)
            and (not event.coefficients or event.coefficients[0] >= _MIN_FIRST)
            and min(event.parts, event.steps) >= 1
            and 0 < event.rate <= 1
        )

    def releases(self, event: Any) -> Iterator[tuple[dp.DpEvent, int]]:
        yield releases_of(event)

    def with_amplification(self, event: Any) -> dp.DpEvent:
        return dp.SelfComposedDpEvent(*releases_of(event))

    def without_subsampling(self, event: Any, adjacency: NeighboringRelation) -> dp.DpEvent:
        return attrs.evolve(event, rate=1.0)

    def group_privacy(self, event: Any, count: int) -> dp.DpEvent:
        """For a fixed order: several records change the release by at most the sum of their changes."""
        if event.rate < 1:
            raise RefusedError(
                "correlated noise over samples has no bound for {count} records of one person; set"
                " {method.participation} to fixed_order, or {records.blocks} to one block.",
                code="no_bound_of_correlated_group",
                count=count,
            )
        return attrs.evolve(event, noise_multiplier=event.noise_multiplier / count)

    def trace_fields(self, event: Any) -> TraceFields:
        name = "fixed order" if event.rate == 1 else "cyclic poisson"
        return TraceFields({"correlated": event.noise_multiplier}, (name,), event.rate / event.parts)


class _CorrelatedStep(_Correlated):
    def is_possible(self, event: Any) -> bool:
        return bool(0 < event.noise_multiplier < math.inf and event.parts >= 1 and 0 < event.rate <= 1)

    def releases(self, event: Any) -> Iterator[tuple[dp.DpEvent, int]]:
        return iter(())

    def with_amplification(self, event: Any) -> dp.DpEvent:
        return dp.NoOpDpEvent()


register(CorrelatedDpEvent, _Correlated(), "correlated noise")
register(CorrelatedStepDpEvent, _CorrelatedStep(), "correlated noise")


def check_paid(schedule: Iterable[tuple[dp.DpEvent, int]]) -> None:
    """Raises RefusedError for later steps of correlated noise that no event before them has paid for."""
    paid, left = None, 0
    for event, count in schedule:
        if isinstance(event, CorrelatedDpEvent) and count > 0:
            paid, left = (event.noise_multiplier, event.parts, event.rate), event.steps - 1
        elif isinstance(event, CorrelatedStepDpEvent):
            left -= count
            if (event.noise_multiplier, event.parts, event.rate) != paid or left < 0:
                raise RefusedError(
                    f"{count} later steps of correlated noise are among the events, and none before them has paid"
                    " for as many; check the document."
                )
