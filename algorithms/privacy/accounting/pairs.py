"""Pairs of output distributions whose privacy losses `pld` composes: of a library's distribution, or of a curve.

Private names of dp_accounting are used where it has no public equivalent.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import dp_accounting.dp_event as dp
import numpy as np
from dp_accounting.privacy_accountant import NeighboringRelation

from algorithms.errors import RefusedError
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting.mechanism_plds import AtomsPLD, ProfilePLD
from algorithms.privacy.accounting.pld import PLDPair

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

library = lazy_module("dp_accounting.pld")

TAIL_DELTA = 1e-13
_CORNERS, _RATIOS, _NEAREST = 4000, 8000, 1e-8
"""At how many points a curve is taken on each side of 0, at equal distances and at equal ratios; and the first of the
latter, as a share of the largest."""
_MIN_CORNER, _SMALLEST_LOSS, _LARGEST_LOSS = 1e-11, 1e-6, 500.0
"""The least of these points, as those below would differ by less than the rounding of exp(epsilon); and the smallest
and the largest epsilon at which they end."""
_ROUNDING = 2e-15

DeltasOfSides: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Upper bounds on delta at epsilons of any sign, shape [k] -> [k], for a record less and for a record more."""


def pld_by_library(
    event: dp.DpEvent, grid: float, adjacency: NeighboringRelation, words: str
) -> "PrivacyLossDistribution":
    """dp_accounting's distribution of an event; raises RefusedError, with these words, if it has none."""
    accountant = library.PLDAccountant(adjacency, grid)
    if not accountant.supports(event):
        raise RefusedError(
            "no bound is known by PLD for {mechanism}; set {target.accountant} or {method.kind} to another.",
            code="no_bound_by_pld",
            mechanism=words,
        )
    accountant.compose(event)
    return accountant._pld  # it has no public reader


def pair_of_pld(loss: "PrivacyLossDistribution") -> PLDPair:
    """The losses of a distribution of dp_accounting's."""
    remove, add = (_atoms_of(pmf.to_dense_pmf()) for pmf in (loss._pmf_remove, loss._pmf_add))
    return PLDPair(remove, remove if loss._pmf_add is loss._pmf_remove else add)


def _atoms_of(pmf: Any) -> AtomsPLD:
    # The index of a point times the grid's width.
    losses = (pmf._lower_loss + np.arange(pmf._probs.size)) * pmf._discretization
    return AtomsPLD(losses, np.asarray(pmf._probs, dtype=np.float64), float(pmf._infinity_mass))


def pair_of_curves(deltas_of_sides: DeltasOfSides, largest: float) -> PLDPair:
    """Losses whose deltas are at least those of two curves; beyond the largest epsilon they are infinite.

    Below 0 a curve follows from the other: delta(-e) = 1 - exp(-e) (1 - delta'(e)). True curves are convex in
    exp(epsilon), so they are below the convex hull of their bounds, whose corners "connect the dots" uses.
    """
    largest = min(max(largest, _SMALLEST_LOSS), _LARGEST_LOSS)
    above = np.linspace(0.0, largest, _CORNERS)
    # Where few losses are far above the others, epsilon may lie near 0 beside the largest.
    first = max(_NEAREST * largest, _MIN_CORNER)
    above = np.unique(np.append(above, np.geomspace(first, largest, _RATIOS)))
    points = np.concatenate([-above[:0:-1], above])  # ascending, 0 once
    remove, add = (np.clip(deltas, 0.0, 1.0) for deltas in deltas_of_sides(above))

    def pld_of_side(deltas_above: np.ndarray, deltas_of_other: np.ndarray) -> ProfilePLD:
        below = 1.0 - np.exp(-above[:0:-1]) * (1.0 - deltas_of_other[:0:-1])
        x = np.exp(points)
        deltas = np.minimum.accumulate(_lower_hull(x, np.concatenate([below, deltas_above])))
        # delta(e) is the sum of p_i max(0, 1 - exp(e) / x_i), so that each corner's p_i is x_i times its bend.
        # By exp(epsilon), from delta 1 at exp(epsilon) = 0.
        slopes = np.diff(np.append(1.0, deltas)) / np.diff(np.append(0.0, x))
        # Slopes are negative: rounding raises the masses.
        masses = np.maximum(0.0, x * np.diff(np.append(slopes, 0.0))) - _ROUNDING * x * slopes
        return ProfilePLD(points, masses, float(deltas[-1]))

    return PLDPair(pld_of_side(remove, add), pld_of_side(add, remove))


def _lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The largest convex function with no value above y at x, ascending, and none above 1 at 0; its values at x."""
    corners = [(0.0, 1.0)]
    for c in zip(x.tolist(), y.tolist(), strict=True):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (b[1] - a[1]) * (c[0] - a[0]) < (c[1] - a[1]) * (b[0] - a[0]):
                break
            corners.pop()  # b lies on the chord from a to c, or above
        corners.append(c)
    at, height = np.array(corners).T
    hull: np.ndarray = np.interp(x, at, height)
    return hull
