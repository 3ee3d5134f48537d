"""Schedules of privacy events, also as JSON and of a search: dp_accounting's events, nested, and ten more."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dp_accounting.dp_event as dp
from dp_accounting.rdp.rdp_privacy_accountant import _gamma_truncated_negative_binomial

from algorithms.errors import RefusedError
from algorithms.lazy_imports import lazy_module
from algorithms.privacy.accounting import (
    EventRow,
    compound_rules,  # noqa: F401 - it registers its rules
    release_rules,  # noqa: F401 - so does this
)
from algorithms.privacy.accounting.correlated import CorrelatedDpEvent, CorrelatedStepDpEvent, check_paid
from algorithms.privacy.accounting.event_classes import (
    DisjointPartsDpEvent,
    EitherDpEvent,
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    RandomAllocationDpEvent,
    RandomAllocationStepDpEvent,
    RenyiDpEvent,
    SampledGroupDpEvent,
    parts,
    with_parts,
)
from algorithms.privacy.accounting.event_documents import event_from_json, event_to_json
from algorithms.privacy.accounting.event_rules import rule_of
from algorithms.privacy.accounting.random_allocation import check_passes

stats = lazy_module("scipy.stats")

__all__ = [
    "CorrelatedDpEvent",
    "CorrelatedStepDpEvent",
    "DisjointPartsDpEvent",
    "EitherDpEvent",
    "ObjectivePerturbationDpEvent",
    "PureDpEvent",
    "RandomAllocationDpEvent",
    "RandomAllocationStepDpEvent",
    "RenyiDpEvent",
    "SampledGroupDpEvent",
    "Schedule",
    "Trials",
    "after_shared",
    "all_shown",
    "check_payments",
    "count_same",
    "disjoint_parts_of",
    "event_from_json",
    "event_to_json",
    "merge_neighbours",
    "on_disjoint_parts",
    "releases_in_order",
    "run_lengths",
    "schedule_from_json",
    "schedule_to_json",
    "trials_of",
    "unroll",
]

Schedule = Sequence[tuple[dp.DpEvent, int]]
"""Events with the number of times each occurs in a row, in the order of the releases."""

_LATER_STEPS = (CorrelatedStepDpEvent, RandomAllocationStepDpEvent)
"""Steps that an event before them pays for."""


def unroll(schedule: Schedule) -> list[tuple[dp.DpEvent, int]]:
    """A schedule with the releases that the accountants know in place of an event that stands for many.

    Raises RefusedError for a step of correlated noise that no event before it has paid for.

    Example:
        >>> unroll([(CorrelatedDpEvent(2.0, [2.0], [], [], 0, 4, 1.0, 4), 1)])
        [(GaussianDpEvent(noise_multiplier=1.0), 1)]
    """
    check_payments(schedule)
    return [
        (part, times * count) for event, count in schedule for part, times in rule_of(event).releases(event)
    ]


def count_same(schedule: Schedule) -> Schedule:
    """A schedule that costs the same in fewer rows: equal events are counted together, at any depth of nesting.

    Steps that an event before them has paid for are left out. Where one is not paid for, the schedule stays as it is,
    and is refused where it is priced.
    """
    schedule = [*schedule]  # whose rows exist as long as their identities are compared
    occurrences = Counter(map(id, schedule))
    counts: dict[int, tuple[dp.DpEvent, int]] = {}
    for key, (event, count) in dict(zip(map(id, schedule), schedule, strict=True)).items():
        counts[id(event)] = (event, counts.get(id(event), (event, 0))[1] + occurrences[key] * count)
    charged = [row for row in counts.values() if not isinstance(row[0], _LATER_STEPS)]
    if len(charged) < len(counts):
        try:
            check_payments(schedule)
        except RefusedError:
            return schedule
    rows: dict[Any, tuple[dp.DpEvent, int]] = {}
    for event, count in charged:
        key = event if _has_hash(event) else id(event)
        rows[key] = (event, rows.get(key, (event, 0))[1] + count)
    return [(_with_fewer_parts(event), count) for event, count in rows.values()]


def _has_hash(event: dp.DpEvent) -> bool:
    """Whether an event can be found among others; not with a list inside."""
    try:
        hash(event)
    except TypeError:
        return False
    return True


def _with_fewer_parts(event: Any) -> dp.DpEvent:
    """An event that costs the same, in whose compositions equal parts are counted together."""
    if isinstance(event, dp.ComposedDpEvent):
        rows = _composed_rows(event)
        fewer = count_same(rows)
        return trial_event(fewer) if len(fewer) < len(rows) else event
    if isinstance(event, EitherDpEvent | DisjointPartsDpEvent | dp.RepeatAndSelectDpEvent):
        return with_parts(event, _with_fewer_parts)
    return event


def check_payments(schedule: Schedule) -> None:
    """Raises RefusedError for steps that no event before them has paid for, at any depth of nesting."""
    check_paid(schedule)
    check_passes(schedule)
    for event in {id(event): event for event, _ in schedule}.values():
        if isinstance(event, dp.ComposedDpEvent):
            check_payments(_composed_rows(event))
        else:
            for inner in parts(event):
                check_payments([(inner, 1)])


def _composed_rows(event: dp.ComposedDpEvent) -> list[tuple[dp.DpEvent, int]]:
    """The rows of a schedule that became one event by `trial_event`, or of another composition."""
    return [
        (inner.event, int(inner.count)) if isinstance(inner, dp.SelfComposedDpEvent) else (inner, 1)
        for inner in event.events
    ]


def schedule_to_json(schedule: Schedule) -> list[EventRow]:
    """A schedule as the rows of a document."""
    documents = {
        id(event): event_to_json(event) for event in {id(row[0]): row[0] for row in schedule}.values()
    }
    return [{"event": {**documents[id(event)]}, "count": count} for event, count in schedule]


MAX_NESTING = 18
"""In how many events one of a document may be nested: enough for a search over compositions on disjoint people."""
_MAX_COUNT = 10**9
"""The most releases in a row."""


def schedule_from_json(document: Sequence[EventRow]) -> list[tuple[dp.DpEvent, int]]:
    """The schedule that `schedule_to_json` wrote.

    Rows that are written alike share an event. Raises RefusedError where a row is not {"event", "count"}, and for
    events in more than `MAX_NESTING` others.
    """
    events: dict[str, dp.DpEvent] = {}
    schedule = []
    for row in document:
        count = row.get("count")
        if set(row) != {"event", "count"} or type(count) is not int or not 1 <= count <= _MAX_COUNT:
            raise RefusedError(
                "a schedule's row must hold an event and a count of at least 1; check the document."
            )
        if _is_nested_too_deeply(row["event"]):
            raise RefusedError(f"an event is nested in more than {MAX_NESTING} others; check the document.")
        if (text := repr(row["event"])) not in events:
            events[text] = event_from_json(row["event"])
        schedule.append((events[text], count))
    return schedule


def _is_nested_too_deeply(event: Any) -> bool:
    inside = [event]
    for _ in range(MAX_NESTING + 1):
        holders = [value for value in inside if isinstance(value, dict)]
        inside = [part for holder in holders for part in _held_in(holder)]
        if not inside:
            return False
    return True


def _held_in(event: dict[str, Any]) -> list[Any]:
    parts = event.get("events")
    return [*([event["event"]] if "event" in event else []), *(parts if isinstance(parts, list) else [])]


def merge_neighbours(schedule: Schedule) -> list[tuple[dp.DpEvent, int]]:
    """A schedule in which equal neighbours are counted together."""
    rows: list[tuple[dp.DpEvent, int]] = []
    for event, count in schedule:
        if rows and rows[-1][0] == event:
            rows[-1] = (event, rows[-1][1] + count)
        else:
            rows.append((event, count))
    return rows


def run_lengths(events: Sequence[dp.DpEvent]) -> list[tuple[dp.DpEvent, int]]:
    """Single events in their order as a schedule: neighbours that are equal are counted together."""
    return merge_neighbours([(event, 1) for event in events])


@dataclass(frozen=True)
class Trials:
    """How the number of trials is drawn in a private selection, which releases the best of them alone.

    The number must be random: the best of a fixed number tells about how many it was the best of, and costs like all of
    them. Which settings a trial takes is drawn without reading the records, so a trial is an `EitherDpEvent` of the
    candidates.

    Attributes:
        mean: Of the number, at least 1.
        shape: Of the truncated negative binomial: 1 is geometric, 0 logarithmic; infinite for Poisson, which may be 0.

    Source: Papernot and Steinke 2022, arXiv:2110.03620, Theorems 2 (truncated negative binomial) and 6 (Poisson).
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
            return int(stats.poisson.ppf(uniform, self.mean))
        if self.mean == 1:
            return 1
        gamma = float(_gamma_truncated_negative_binomial(self.shape, self.mean))
        if self.shape == 0:
            return int(stats.logser.ppf(uniform, 1 - gamma))
        none = gamma**self.shape  # the probability of 0 before truncation
        return max(1, int(stats.nbinom.ppf(none + uniform * (1 - none), self.shape, gamma)))

    def event(self, candidates: Sequence[Schedule]) -> dp.DpEvent:
        """What the whole search costs, whose trials are each one of the candidates."""
        return dp.RepeatAndSelectDpEvent(
            EitherDpEvent([trial_event(schedule) for schedule in candidates]), self.mean, self.shape
        )


def trial_event(schedule: Schedule) -> dp.DpEvent:
    """The releases of one trial as one event."""
    return dp.ComposedDpEvent([dp.SelfComposedDpEvent(event, count) for event, count in schedule])


def all_shown(trials: Sequence[Schedule]) -> dp.DpEvent:
    """What it costs to show every trial: all of them."""
    return dp.ComposedDpEvent([trial_event(schedule) for schedule in trials])


def on_disjoint_parts(*schedules: Schedule) -> list[tuple[dp.DpEvent, int]]:
    """The schedule of releases on disjoint people, one schedule for each part; under add-or-remove-one alone.

    Example:
        >>> training, evaluation = [(dp.GaussianDpEvent(2.0), 1)], [(dp.GaussianDpEvent(4.0), 1)]
        >>> disjoint_parts_of(on_disjoint_parts(training, evaluation)) == [training, evaluation]
        True
    """
    return [(DisjointPartsDpEvent([trial_event(schedule) for schedule in schedules]), 1)]


def disjoint_parts_of(schedule: Schedule) -> list[list[tuple[dp.DpEvent, int]]] | None:
    """The schedules of the parts, if a schedule is that of releases on disjoint people and nothing else; else None."""
    if len(schedule) != 1 or schedule[0][1] != 1 or not isinstance(schedule[0][0], DisjointPartsDpEvent):
        return None
    return [
        _composed_rows(part) if isinstance(part, dp.ComposedDpEvent) else [(part, 1)]
        for part in schedule[0][0].events
    ]


def releases_in_order(schedule: Schedule) -> list[tuple[dp.DpEvent, int]]:
    """The rows of a schedule as a trace has them: those of disjoint parts one after the other."""
    return [row for part in disjoint_parts_of(schedule) or [[*schedule]] for row in part]


def trials_of(schedule: Schedule) -> list[list[tuple[dp.DpEvent, int]]] | None:
    """The schedules that a trial may have had, where a schedule is that of a search, else None.

    The search is its last event; what comes before it was released once, and every trial begins with it. Where other
    people evaluated the winner, the search is the first of two disjoint parts, and every trial ends with the second.
    Where they evaluated each trial, the second is a search, too, of trials that are all alike, and a trial ends with
    one of these.
    """
    if disjoint := disjoint_parts_of(schedule):
        first, *others = disjoint
        after = [row for part in others for row in (trials_of(part) or [part])[0]]
        inside = trials_of(first)
        return None if inside is None else [[*trial, *after] for trial in inside]
    if not schedule or schedule[-1][1] != 1:
        return None
    *shared, (whole, _) = schedule
    inner = whole.event if isinstance(whole, dp.RepeatAndSelectDpEvent) else whole
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
            raise RefusedError(
                "the trials of a search begin with other releases than those that they share; check the document."
            )
        (_, available), *rest = rest
        rest = [(event, available - count), *rest] if available > count else rest
    return rest
