"""Dates in ONNX: year, month, weekday and elapsed time of a text such as 2020-01-31, by operators alone.

Read are 2020-01-31 and 2020-01-31T12:30:00.5+01:00, also with a space for T, without seconds and without a zone, which
is left out as the reader of tables leaves it out. A text that is no such date is a missing one, as it is for the
reader; one in another form of ISO 8601, such as 20200131 or 2020-W05, is `unread`, and its row gets no score.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.formats import Timestamp
from tasks.onnx_graph import Graph, TensorProto

_DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = "[0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])?"


@dataclass(frozen=True)
class Moments:
    """What the graph knows of a column of dates.

    Attributes:
        parts: Year, month and weekday from 0, and the share of the time between the bounds that has passed; doubles
            [n], NaN without a date.
        unread: Bool [n], whether the text is a date in a form that the graph does not read.
    """

    parts: tuple[str, str, str, str]
    unread: str


class _Formulas:
    """Arithmetic on doubles [n] of a graph, where a number stands for itself in each row."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def _name(self, value: str | float) -> str:
        return value if isinstance(value, str) else self._graph.constant(value)

    def plus(self, *values: str | float) -> str:
        total, *others = map(self._name, values)
        for value in others:
            total = self._graph.add("Add", total, value)
        return total

    def times(self, value: str, factor: float) -> str:
        return self._graph.add("Mul", value, self._name(factor))

    def floor(self, value: str, divisor: float) -> str:
        return self._graph.add("Floor", self._graph.add("Div", value, self._name(divisor)))

    def rest(self, value: str, divisor: float) -> str:
        return self.plus(value, self.times(self.floor(value, divisor), -divisor))

    def less(self, value: str | float, bound: str | float) -> str:
        return self._graph.add("Less", self._name(value), self._name(bound))

    def within(self, value: str, low: float, high: str | float) -> str:
        outside = self._graph.add("Or", self.less(value, low), self.less(high, value))
        return self._graph.add("Not", outside)

    def every(self, *conditions: str) -> str:
        whole, *others = conditions
        for condition in others:
            whole = self._graph.add("And", whole, condition)
        return whole

    def one_if(self, condition: str) -> str:
        return self._graph.add("Cast", condition, to=TensorProto.DOUBLE)

    def where(self, condition: str, value: str | float, other: str | float) -> str:
        return self._graph.add("Where", condition, self._name(value), self._name(other))


def moments(graph: Graph, column: Timestamp, missing: Sequence[str]) -> Moments:
    """Take a column's dates apart; clamped to its bounds. missing: spellings of a missing one."""
    of = _Formulas(graph)
    is_read, unread = _forms(graph, column.name, missing)
    year, month, day, hour, minute, second = _numbers(graph, column.name, is_read)
    days = _days(of, year, month, day)
    is_time = of.every(of.within(hour, 0, 23), of.within(minute, 0, 59), of.less(second, 60.0))
    length = _length(graph, of, year, month)
    is_day = of.every(of.within(year, 1, 9999), of.within(month, 1, 12), of.within(day, 1, length))
    is_date = of.every(is_read, is_time, is_day)
    first, last = column.days
    span = float((last - first).days)
    seconds = of.plus(of.times(hour, 3600.0), of.times(minute, 60.0), second)
    elapsed = of.plus(days, -float(first.toordinal()), of.times(seconds, 1 / 86400.0))
    is_before, is_after = of.less(elapsed, 0.0), of.less(span, elapsed)
    parts = []
    for value, low, high in (
        (of.plus(year, -float(first.year)), 0.0, float(last.year - first.year)),
        (of.plus(month, -1.0), first.month - 1.0, last.month - 1.0),
        # Day 1 was a Monday, which is 0.
        (of.rest(of.plus(days, 6.0), 7.0), float(first.weekday()), float(last.weekday())),
        (of.times(elapsed, 1 / span), 0.0, 1.0),
    ):
        clamped = of.where(is_before, low, of.where(is_after, high, value))
        parts.append(of.where(is_date, clamped, np.nan))
    return Moments((parts[0], parts[1], parts[2], parts[3]), unread)


def _forms(graph: Graph, text: str, missing: Sequence[str]) -> tuple[str, str]:
    """Whether each text has a form that is read, and whether it may be a date in another."""
    has_form = graph.add("RegexFullMatch", text, pattern=f" ?{_DATE}([T ]{_TIME})? ?")
    may_be = graph.add("RegexFullMatch", text, pattern=" ?[0-9]{4}.+")
    unread = graph.add("And", graph.add("Not", has_form), may_be)
    if not missing:
        return has_form, unread
    is_present = graph.add("Equal", graph.indices(text, missing), graph.constant(len(missing), np.int64))
    return tuple(graph.add("And", form, is_present) for form in (has_form, unread))  # type: ignore[return-value]


def _numbers(graph: Graph, text: str, is_read: str) -> list[str]:
    """Year, month, day, hour, minute and second as doubles."""

    def unless_empty(texts: str, other: str) -> str:
        return graph.add("Where", graph.add("RegexFullMatch", texts, pattern=".+"), texts, other)

    date_text = graph.add("Where", is_read, text, graph.constant("1970-01-01", object))
    first, behind_space = graph.split(date_text, "", 2)
    date, behind_t = graph.split(first, "T", 2)
    time = unless_empty(unless_empty(behind_space, behind_t), graph.constant("00:00", object))
    for zone in "Z+-":
        time = graph.split(time, zone, 2)[0]
    hour, minute, second = graph.split(time, ":", 3)
    second = unless_empty(second, graph.constant("0", object))
    parts = [*graph.split(date, "-", 3), hour, minute, second]
    return [graph.add("Cast", part, to=TensorProto.DOUBLE) for part in parts]


def _days(of: _Formulas, year: str, month: str, day: str) -> str:
    """`date.toordinal`, counted in years that begin in March, so that a leap day is their last."""
    year = of.plus(year, of.times(of.one_if(of.less(month, 3.0)), -1.0))
    month = of.rest(of.plus(month, 9.0), 12.0)
    leap_days = of.plus(of.floor(year, 4.0), of.times(of.floor(year, 100.0), -1.0), of.floor(year, 400.0))
    before_month = of.floor(of.plus(of.times(month, 153.0), 2.0), 5.0)
    return of.plus(of.times(year, 365.0), leap_days, before_month, day, -306.0)


def _length(graph: Graph, of: _Formulas, year: str, month: str) -> str:
    """The number of days of the month; of any month for one that there is not."""
    index = graph.add("Cast", of.rest(month, 13.0), to=TensorProto.INT64)
    lengths = graph.constant([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])
    divides = [of.less(of.rest(year, number), 0.5) for number in (4.0, 100.0, 400.0)]
    is_leap = of.every(divides[0], graph.add("Or", graph.add("Not", divides[1]), divides[2]))
    is_long = of.every(is_leap, of.within(month, 2, 2))
    return of.plus(graph.add("Gather", lengths, index), of.one_if(is_long))
