"""Privacy events as JSON: dp_accounting's own class and field names, nested as the events are, and three more."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import dp_accounting as dp

from algorithms.errors import RefusedError

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

T = TypeVar("T")

Schedule = Sequence[tuple[dp.DpEvent, int]]
"""Events with the number of times each occurs in a row, in the order of the releases."""


@attrs.frozen
class PureDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A mechanism of pure differential privacy, of which nothing but its epsilon under add-or-remove-one is used."""

    epsilon: float


@attrs.frozen
class ObjectivePerturbationDpEvent(dp.DpEvent):  # type: ignore[misc]
    """The exact minimum of a convex objective with a random linear term, for a linear model with one output.

    noise_multiplier: standard deviation of the term over the bound of a record's gradient. curvature_ratio: bound of
    a record's curvature over the strong convexity of the objective. See Redberg, Koskela and Wang 2023.
    """

    noise_multiplier: float
    curvature_ratio: float


@attrs.frozen
class RenyiDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A mechanism of which nothing but its Rényi divergence at one order is known, under add-or-remove-one.

    order: above 1. bound: the divergence there. The releases of a run under a Rényi filter are one such event.
    """

    order: float
    bound: float


def kept(function: "_lru_cache_wrapper[T]", *key: Any) -> T:
    """What a function with a cache makes of events, each time anew where an event is such as no cache can key."""
    try:
        return function(*key)
    except TypeError:  # a ComposedDpEvent holds a list
        return function.__wrapped__(*key)


_TYPES: dict[str, type[dp.DpEvent]] = {
    kind.__name__: kind
    for kind in (
        dp.NoOpDpEvent,
        dp.NonPrivateDpEvent,
        dp.GaussianDpEvent,
        dp.LaplaceDpEvent,
        dp.PoissonSampledDpEvent,
        dp.SampledWithoutReplacementDpEvent,
        dp.SelfComposedDpEvent,
        dp.ComposedDpEvent,
        dp.dp_event.ZCDpEvent,
        dp.dp_event.RepeatAndSelectDpEvent,
        dp.dp_event.TruncatedSubsampledGaussianDpEvent,
        PureDpEvent,
        ObjectivePerturbationDpEvent,
        RenyiDpEvent,
    )
}


def event_to_json(event: dp.DpEvent) -> dict[str, Any]:
    """An event as a nested object: its class name under "type", its fields under their own names.

    Raises RefusedError for an event type that the project does not use.
    """
    kind = type(event)
    if kind.__name__ not in _TYPES:
        raise RefusedError(f"the event {kind.__name__} is not one of {', '.join(_TYPES)}; use one of these.")
    fields: tuple[Any, ...] = attrs.fields(kind)
    return {"type": kind.__name__} | {f.name: _value_to_json(getattr(event, f.name)) for f in fields}


def _value_to_json(value: Any) -> Any:
    if isinstance(value, dp.DpEvent):
        return event_to_json(value)
    if isinstance(value, list | tuple):
        return [_value_to_json(item) for item in value]
    return value


def event_from_json(document: Mapping[str, Any]) -> dp.DpEvent:
    """The event that `event_to_json` wrote.

    Raises RefusedError for an unknown type, for a missing field and for a field the type does not have.
    """
    name = document.get("type")
    if not isinstance(name, str) or name not in _TYPES:
        raise RefusedError(f"the event type {name!r} is not one of {', '.join(_TYPES)}; check the document.")
    kind = _TYPES[name]
    expected = {f.name for f in attrs.fields(kind)}
    given = set(document) - {"type"}
    if given != expected:
        raise RefusedError(
            f"a {name} has the fields {sorted(expected)}, not {sorted(given)}; check the document."
        )
    return kind(**{key: _value_from_json(document[key]) for key in expected})


def _value_from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return event_from_json(value)
    if isinstance(value, list):
        return [_value_from_json(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RefusedError(f"an event's field must be a number, an event or a list of these, not {value!r}.")
    return value


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


def run_lengths(events: Sequence[dp.DpEvent]) -> list[tuple[dp.DpEvent, int]]:
    """Single events in their order as a schedule: neighbours that are equal are counted together."""
    schedule: list[tuple[dp.DpEvent, int]] = []
    for event in events:
        if schedule and schedule[-1][0] == event:
            schedule[-1] = (event, schedule[-1][1] + 1)
        else:
            schedule.append((event, 1))
    return schedule
