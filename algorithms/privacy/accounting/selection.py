"""Private selection: the best of a random number of trials, released alone (Papernot and Steinke 2022).

The number must be random: the best of a fixed number tells about how many it was the best of, and costs like all of
them. Which settings a trial takes is drawn without a look at the records, so a trial is an `EitherDpEvent` of the
candidates.

Source: arXiv:2110.03620, Theorem 2 (truncated negative binomial) and Theorem 6 (Poisson).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import dp_accounting as dp
import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import _gamma_truncated_negative_binomial
from scipy.special import gammaln
from scipy.stats import poisson

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.event_rules import EitherDpEvent
from algorithms.privacy.accounting.events import Schedule

_LARGEST = 1_000_000


@dataclass(frozen=True)
class Trials:
    """How the number of trials is drawn.

    Attributes:
        mean: Of the number, at least 1.
        shape: Of the truncated negative binomial: 1 is geometric, 0 logarithmic; infinite for Poisson, which may be 0.
    """

    mean: float
    shape: float = 1.0

    def number(self, uniform: float) -> int:
        """The number that a uniform draw in (0, 1) stands for, by inversion.

        Example:
            >>> [Trials(10.0).number(u) for u in (0.05, 0.5, 0.95)]
            [1, 7, 29]
        """
        if math.isinf(self.shape):
            return int(poisson.ppf(uniform, self.mean))
        counts = np.arange(1, 4096, dtype=np.float64)
        while True:
            reached = np.cumsum(np.exp(self._log_chances(counts)))
            place = int(np.searchsorted(reached, uniform))
            if place < len(counts) or len(counts) >= _LARGEST:
                return min(place, len(counts) - 1) + 1
            counts = np.arange(1, 8 * len(counts), dtype=np.float64)

    def _log_chances(self, counts: np.ndarray) -> np.ndarray:
        if self.mean == 1:
            return np.where(counts == 1, 0.0, -np.inf)
        gamma = float(_gamma_truncated_negative_binomial(self.shape, self.mean))
        falls: np.ndarray = counts * math.log1p(-gamma)
        if self.shape == 0:
            logarithmic: np.ndarray = falls - np.log(counts) - math.log(math.log(1 / gamma))
            return logarithmic
        ways = gammaln(counts + self.shape) - gammaln(self.shape) - gammaln(counts + 1)
        found: np.ndarray = falls + ways - math.log(math.expm1(-self.shape * math.log(gamma)))
        return found

    def event(self, candidates: Sequence[Schedule]) -> dp.DpEvent:
        """What the whole search costs, whose trials are each one of the candidates."""
        return dp.dp_event.RepeatAndSelectDpEvent(
            EitherDpEvent([trial_event(schedule) for schedule in candidates]), self.mean, self.shape
        )


def trial_event(schedule: Schedule) -> dp.DpEvent:
    """The releases of one trial as one event."""
    return dp.ComposedDpEvent([dp.SelfComposedDpEvent(event, count) for event, count in schedule])


def all_shown(trials: Sequence[Schedule]) -> dp.DpEvent:
    """What it costs to show every trial: all of them."""
    return dp.ComposedDpEvent([trial_event(schedule) for schedule in trials])


def trials_of(schedule: Schedule) -> list[list[tuple[dp.DpEvent, int]]] | None:
    """The schedules that a trial may have had, where a schedule is that of a search, else None.

    The search is its last event; what comes before it was released once, and every trial begins with it.
    """
    if not schedule or schedule[-1][1] != 1:
        return None
    *shared, (whole, _) = schedule
    inner = whole.event if isinstance(whole, dp.dp_event.RepeatAndSelectDpEvent) else whole
    if not isinstance(inner, EitherDpEvent) and not (
        inner is whole and isinstance(whole, dp.ComposedDpEvent)
    ):
        return None
    if not all(
        isinstance(trial, dp.ComposedDpEvent)
        and all(isinstance(part, dp.SelfComposedDpEvent) for part in trial.events)
        for trial in inner.events
    ):
        return None
    return [[*shared, *((part.event, int(part.count)) for part in trial.events)] for trial in inner.events]


def after_shared(schedule: Schedule, shared: Schedule) -> list[tuple[dp.DpEvent, int]]:
    """What a schedule has after the releases that it begins with.

    Raises RefusedError where it does not begin with them.
    """
    left, rest = [*shared], [*schedule]
    while left:
        (event, count), *left = left
        if not rest or rest[0][0] != event or rest[0][1] < count:
            raise RefusedError("the trials of a search begin with other releases than those that they share.")
        (_, there), *rest = rest
        rest = [(event, there - count), *rest] if there > count else rest
    return rest
