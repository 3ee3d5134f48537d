"""Events as JSON, and the ranges within which a document's numbers are priced in bounded time."""

import math
from typing import Any

import attrs
import dp_accounting.dp_event as dp

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import EventJson
from algorithms.privacy.accounting.event_classes import SampledGroupDpEvent
from algorithms.privacy.accounting.event_rules import check_possible, classes_by_name, in_words

_MAX_NUMBER = 1e100
"""The largest number in a document: products and squares of larger ones are beyond a float."""
_RANGES = {
    "noise_multiplier": (1e-6, 1e12),
    "mean": (1.0, 1e6),
    "parts": (1.0, 1e9),
    "steps": (1.0, 1e6),
    "leaves": (0.0, 1e6),
    "count": (0.0, 1e9),
    "SampledGroupDpEvent.count": (1.0, 1000.0),
    **dict.fromkeys(("coefficients", "weights"), (-1e6, 1e6)),
}
"""The ranges of fields in a document, by name or by event and name: accountants take bounded time and memory within."""
_MAX_GROUP_WORK = 1e4
"""The largest squared size of a group over its noise: its moment at order a is an integral of a times as many terms."""


def event_to_json(event: dp.DpEvent) -> EventJson:
    """An event as a nested object: its class name under "type", its fields under their own names.

    Raises RefusedError for an event type that the project does not use.
    """
    name = type(event).__name__
    if classes_by_name().get(name) is not type(event):
        raise RefusedError(f"the event {name} is not one of {_names()}; use one of these.")
    fields = {field: _value_to_json(value) for field, value in attrs.asdict(event, recurse=False).items()}
    if isinstance(event, dp.RepeatAndSelectDpEvent) and math.isinf(event.shape):
        fields["shape"] = None  # JSON has no infinity
    return {"type": name} | fields


def event_from_json(document: EventJson) -> dp.DpEvent:
    """The inverse of `event_to_json`.

    Raises RefusedError for an unknown type, missing or unknown fields, and numbers that no mechanism has or that
    take for ever to account for.
    """
    name = document.get("type")
    kind = classes_by_name().get(name) if isinstance(name, str) else None
    if kind is None:
        raise RefusedError(f"the event type {name!r} is not one of {_names()}; check the document.")
    event = _event_of(kind, {field: value for field, value in document.items() if field != "type"})
    check_possible(event)
    _check_ranges(event)
    return event


def _event_of(kind: type[dp.DpEvent], stated: EventJson) -> dp.DpEvent:
    """The event of a class with these fields; raises RefusedError for fields that the class does not have."""
    fields: tuple[Any, ...] = attrs.fields(kind)
    expected = {field.name: field for field in fields}
    if set(stated) != set(expected):
        raise RefusedError(
            f"a {kind.__name__} has the fields {sorted(expected)}, not {sorted(stated)}; check the document."
        )
    is_poisson = kind is dp.RepeatAndSelectDpEvent and stated["shape"] is None
    if is_poisson:
        stated = {**stated, "shape": 1.0}
    values = {name: _value_from_json(stated[name]) for name in expected}
    if wrong := [name for name, field in expected.items() if not _fits(field, values[name])]:
        raise RefusedError(
            f"the field {wrong[0]} of a {kind.__name__} is {values[wrong[0]]!r:.60}, which is of another kind;"
            " check the document."
        )
    try:
        return kind(**values | ({"shape": math.inf} if is_poisson else {}))
    except TypeError:  # a number where numbers belong
        raise RefusedError(f"a field of the {kind.__name__} is no list; check the document.") from None


def _value_to_json(value: Any) -> Any:
    if isinstance(value, dp.DpEvent):
        return event_to_json(value)
    if isinstance(value, list | tuple):
        return [_value_to_json(item) for item in value]
    return value


def _value_from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return event_from_json(value)
    if isinstance(value, list):
        return [_value_from_json(item) for item in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        raise RefusedError(
            f"an event's field must be a number, an event or a list of these, not {value!r:.60}."
        )
    return value


def _fits(field: Any, value: Any) -> bool:
    """Whether a field that is an event, events or a number in its class is that here."""
    if field.name == "event":
        return isinstance(value, dp.DpEvent)
    if field.name == "events":
        return isinstance(value, list) and all(isinstance(part, dp.DpEvent) for part in value)
    if field.type in (int, "int"):
        return isinstance(value, int)
    return field.type not in (float, "float") or isinstance(value, int | float)


def _names() -> str:
    return ", ".join(classes_by_name())


def _check_ranges(event: dp.DpEvent) -> None:
    for name, value in attrs.asdict(event, recurse=False).items():
        low, high = (
            _RANGES.get(f"{type(event).__name__}.{name}") or _RANGES.get(name) or (-math.inf, math.inf)
        )
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and math.isfinite(number) and not low <= number <= high:
                raise RefusedError(
                    f"{name} {number!r:.60} of {in_words(event)} is outside {low:g} to {high:g}; check the document."
                )
    if isinstance(event, SampledGroupDpEvent) and event.count**2 > _MAX_GROUP_WORK * event.noise_multiplier:
        raise RefusedError(
            f"{event.count} records under noise {event.noise_multiplier:g} take too long to account for; check the"
            " document."
        )
