"""Privacy loss distributions of events, also of those that dp_accounting has none for."""

import math
from collections.abc import Iterable
from itertools import groupby

import dp_accounting as dp
import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from algorithms.privacy.accounting.adjacency import Adjacency, as_add_remove
from algorithms.privacy.accounting.event_rules import loss_of
from algorithms.privacy.accounting.events import Schedule, unrolled

_GROUPS = 24


def composed(schedule: Schedule, grid: float, adjacency: Adjacency) -> PrivacyLossDistribution:
    """The distribution of a schedule's privacy loss, rounded up to multiples of `grid`.

    Raises RefusedError for an event without one.
    """
    return loss_of(((as_add_remove(adjacency, event), count) for event, count in schedule), grid, adjacency)


def in_few_kinds(schedule: Schedule) -> Schedule:
    """A schedule that costs at least as much with fewer kinds of events, so that it is composed quickly.

    Equal events are counted together, and Gaussian ones added up exactly. More than 24 kinds of Laplace events, as
    noise that changes with each step has them, become 24 whose noise is the least of those that they stand for. An
    event of many releases becomes these.
    """
    schedule = unrolled(schedule)
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
