"""Privacy events as JSON: dp_accounting's own class and field names, nested as the events are, and five more."""

from collections.abc import Mapping, Sequence
from typing import Any

import dp_accounting as dp

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.correlated import CorrelatedDpEvent, CorrelatedStepDpEvent, check_paid
from algorithms.privacy.accounting.event_rules import (
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    RenyiDpEvent,
    event_from_json,
    event_to_json,
    rule_of,
)

__all__ = [
    "CorrelatedDpEvent",
    "CorrelatedStepDpEvent",
    "ObjectivePerturbationDpEvent",
    "PureDpEvent",
    "RenyiDpEvent",
    "Schedule",
    "event_from_json",
    "event_to_json",
    "merged",
    "run_lengths",
    "schedule_from_json",
    "schedule_to_json",
    "unrolled",
]

Schedule = Sequence[tuple[dp.DpEvent, int]]
"""Events with the number of times each occurs in a row, in the order of the releases."""


def unrolled(schedule: Schedule) -> list[tuple[dp.DpEvent, int]]:
    """A schedule with the releases that the accountants know in place of an event that stands for many.

    Raises RefusedError for a step of correlated noise that no event before it has paid for.

    Example:
        >>> unrolled([(CorrelatedDpEvent(2.0, [2.0], [], [], 0, 4, 1.0, 4), 1)])
        [(GaussianDpEvent(noise_multiplier=1.0), 1)]
    """
    check_paid(schedule)
    return [
        (part, times * count) for event, count in schedule for part, times in rule_of(event).releases(event)
    ]


def schedule_to_json(schedule: Schedule) -> list[dict[str, Any]]:
    """A schedule as a list of {"event", "count"}."""
    return [{"event": event_to_json(event), "count": count} for event, count in schedule]


def schedule_from_json(document: Sequence[Mapping[str, Any]]) -> list[tuple[dp.DpEvent, int]]:
    """The schedule that `schedule_to_json` wrote; raises RefusedError where a row is not {"event", "count"}."""
    for row in document:
        count = row.get("count")
        if set(row) != {"event", "count"} or type(count) is not int or count < 1:
            raise RefusedError(
                "a schedule's row must hold an event and a count of at least 1; check the document."
            )
    return [(event_from_json(row["event"]), row["count"]) for row in document]


def merged(schedule: Schedule) -> list[tuple[dp.DpEvent, int]]:
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
    return merged([(event, 1) for event in events])
