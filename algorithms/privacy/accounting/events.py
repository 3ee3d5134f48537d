"""Privacy events as JSON: dp_accounting's own class and field names, nested as the events are, and five more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

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

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

__all__ = [
    "CorrelatedDpEvent",
    "CorrelatedStepDpEvent",
    "ObjectivePerturbationDpEvent",
    "PureDpEvent",
    "RenyiDpEvent",
    "Schedule",
    "event_from_json",
    "event_to_json",
    "kept",
    "merged",
    "run_lengths",
    "schedule_from_json",
    "schedule_to_json",
    "unrolled",
]

T = TypeVar("T")

Schedule = Sequence[tuple[dp.DpEvent, int]]
"""Events with the number of times each occurs in a row, in the order of the releases."""


def kept(function: "_lru_cache_wrapper[T]", *key: Any) -> T:
    """What a function with a cache makes of events; where no cache can key one, by what it is written as."""
    try:
        return function(*key)
    except TypeError:  # a ComposedDpEvent holds a list
        found: T = _kept_by_words(function, repr(key), _Aside(key))
        return found


@dataclass(frozen=True)
class _Aside:
    """What a cache is to hand on without a look at it: all are equal."""

    key: tuple[Any, ...] = field(compare=False)


@lru_cache(maxsize=128)
def _kept_by_words(function: "_lru_cache_wrapper[Any]", _words: str, aside: _Aside) -> Any:
    return function.__wrapped__(*aside.key)


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
