"""Privacy loss distributions of events, also of those that dp_accounting has none for."""

import math
from collections.abc import Iterable
from itertools import groupby

import dp_accounting as dp
import numpy as np
from dp_accounting.pld import PLDAccountant, pld_pmf
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.special import expit
from scipy.stats import norm

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.adjacency import ADD_OR_REMOVE_ONE, REPLACE_ONE, Adjacency, as_add_remove
from algorithms.privacy.accounting.events import ObjectivePerturbationDpEvent, PureDpEvent, Schedule

_TAIL = 12.0
_GROUPS = 24


def composed(schedule: Schedule, grid: float, adjacency: Adjacency) -> PrivacyLossDistribution:
    """The distribution of a schedule's privacy loss, rounded up to multiples of `grid`.

    Raises RefusedError for an event without one.
    """
    return _sum(((as_add_remove(adjacency, event), count) for event, count in schedule), grid, adjacency)


def in_few_kinds(schedule: Schedule) -> Schedule:
    """A schedule that costs at least as much with fewer kinds of events, so that it is composed quickly.

    Equal events are counted together, and Gaussian ones added up exactly. More than 24 kinds of Laplace events, as
    noise that changes with each step has them, become 24 whose noise is the least of those that they stand for.
    """
    gaussian = [(event, count) for event, count in schedule if isinstance(event, dp.GaussianDpEvent)]
    laplace = [(event, count) for event, count in schedule if isinstance(event, dp.LaplaceDpEvent)]
    apart = (dp.GaussianDpEvent, dp.LaplaceDpEvent)
    others = [(event, count) for event, count in schedule if not isinstance(event, apart)]
    return [*_added_up(gaussian), *_grouped(laplace), *_counted(others)]


def _counted(schedule: Schedule) -> Schedule:
    """Each event once, with how often it occurs in all."""
    counts: dict[str, tuple[dp.DpEvent, int]] = {}
    for event, count in schedule:
        counts[repr(event)] = (event, counts.get(repr(event), (event, 0))[1] + count)
    return list(counts.values())


def _added_up(schedule: Schedule) -> Schedule:
    if len({event for event, _ in schedule}) < 2:
        return schedule
    precision = math.fsum(count / event.noise_multiplier**2 for event, count in schedule)
    return [(dp.GaussianDpEvent(1.0 / math.sqrt(precision)), 1)]


def _grouped(schedule: Schedule) -> Schedule:
    multipliers = {event.noise_multiplier for event, _ in schedule}
    if len(multipliers) <= _GROUPS:
        return schedule
    low, high = math.log(min(multipliers)), math.log(max(multipliers))
    edges = np.exp(np.linspace(low, high, _GROUPS, endpoint=False))

    def place(row: tuple[dp.DpEvent, int]) -> int:
        return int(np.searchsorted(edges, row[0].noise_multiplier, side="right"))

    groups = (list(rows) for _, rows in groupby(sorted(schedule, key=place), key=place))
    return [_least_noise(rows) for rows in groups]


def _least_noise(rows: Iterable[tuple[dp.DpEvent, int]]) -> tuple[dp.DpEvent, int]:
    rows = list(rows)
    least = min(event.noise_multiplier for event, _ in rows)
    return dp.LaplaceDpEvent(least), sum(count for _, count in rows)


def _sum(
    schedule: Iterable[tuple[dp.DpEvent, int]], grid: float, adjacency: Adjacency
) -> PrivacyLossDistribution:
    total = distributions.identity(grid)
    for event, count in schedule:
        total = total.compose(_of(event, count, grid, adjacency))
    return total


def _of(event: dp.DpEvent, count: int, grid: float, adjacency: Adjacency) -> PrivacyLossDistribution:
    """Of `count` times an event as `under` gives it."""
    match event:
        case PureDpEvent(epsilon=epsilon):
            return _of_pure(epsilon, grid).self_compose(count)
        case ObjectivePerturbationDpEvent():
            return _of_objective(event, grid).self_compose(count)
        case dp.ComposedDpEvent(events=inners):
            return _sum(((inner, count) for inner in inners), grid, adjacency)
        case dp.SelfComposedDpEvent(event=inner, count=repeats):
            return _of(inner, count * repeats, grid, adjacency)
    is_own = isinstance(event, dp.PoissonSampledDpEvent) and adjacency is REPLACE_ONE
    accountant = PLDAccountant(REPLACE_ONE if is_own else ADD_OR_REMOVE_ONE, grid)
    if not accountant.supports(event):
        raise RefusedError(f"the PLD accountant has no bound for {event}; use the other accountant.")
    accountant.compose(event, count)
    return accountant._pld  # it has no public reader


def _of_pure(epsilon: float, grid: float) -> PrivacyLossDistribution:
    """Of randomised response, which every mechanism with this epsilon can be made from (Kairouz et al. 2015).

    Its loss is epsilon or -epsilon. Each is shared between the grid's points around it so that neither distribution
    loses mass: the result dominates the pair ("connect the dots", Doroshenko et al. 2022), and what one composition
    adds is of the order of the grid's square. Rounding both losses up would add a whole step, each time.
    """
    masses: dict[int, float] = {}
    for loss, mass in ((epsilon, float(expit(epsilon))), (-epsilon, float(expit(-epsilon)))):
        below = math.floor(loss / grid)
        share = min(1.0, max(0.0, math.expm1(below * grid - loss) / math.expm1(-grid)))
        masses[below + 1] = masses.get(below + 1, 0.0) + mass * share
        masses[below] = masses.get(below, 0.0) + mass * (1 - share)
    return PrivacyLossDistribution(pld_pmf.create_pmf(masses, grid, 0.0, pessimistic_estimate=True))


def _of_objective(event: ObjectivePerturbationDpEvent, grid: float) -> PrivacyLossDistribution:
    """The loss is at most log(1 + ratio) + s^2 / 2 + |X| with X normal of standard deviation s = 1 / multiplier.

    Between two minima the density changes by the Jacobian, a change of rank one, and by the density of the random
    term, which is moved by a record's gradient: along that record's features and by at most its bound.
    """
    s = 1.0 / event.noise_multiplier
    least = math.log1p(event.curvature_ratio) + s**2 / 2
    first, last = math.ceil(least / grid), math.ceil((least + _TAIL * s) / grid)
    places = np.arange(first, last + 1)
    below = 2.0 * norm.cdf((places * grid - least) / s) - 1.0
    masses = np.diff(np.maximum(below, 0.0), prepend=0.0)
    tail = float(2.0 * norm.sf((last * grid - least) / s))
    losses = {int(place): float(mass) for place, mass in zip(places, masses, strict=True)}
    return PrivacyLossDistribution(pld_pmf.create_pmf(losses, grid, tail, pessimistic_estimate=True))
