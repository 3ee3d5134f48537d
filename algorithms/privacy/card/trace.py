"""What the noise trace beside a card says: its events, whether its columns are those of its events, and their sums.

The events are what a cost is computed from; a trace that tells of less noise, or of another sample, tells of another
release. An event has no clip norm of its own: noise is compared as a multiple of it.
"""

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol

import dp_accounting as dp
import numpy as np
from numpy.typing import NDArray

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.event_rules import rule_of
from algorithms.privacy.accounting.events import (
    Schedule,
    event_from_json,
    event_to_json,
    merged,
    schedule_to_json,
)
from algorithms.privacy.card.schema import PrivacyCard

_KINDS = ["kind", "sampling", "clipping", "noise"]
_SPANS = ["sampling_rate", "clip_norm", "noise_multiplier", "noise_std", "divisor"]
_CHECKED = ["event", *_KINDS, "sampling_rate", "noise_multiplier"]
_CLOSE = 1e-3
"""How closely the cost that a run kept count of ends at that of its schedule, which is accounted as a whole."""
_ROUNDING = 1e-9


class Columns(Protocol):
    """A table by its columns: a mapping of arrays, or a DataFrame, which `card verify` does without for its time."""

    def __getitem__(self, name: str, /) -> Any:
        """The values of a column, in order."""


def row_fits(row: Mapping[str, Any], event: dp.DpEvent) -> bool:
    """Whether a row of the trace has the sampling and the noise multiplier of its event.

    Without noise any sample does. Of pure noise in an objective the event has a bound alone, since the curvature is in
    it, too.
    """
    terms, noise = rule_of(event).traced(event), row["noise"]
    if noise not in terms.multipliers or row["sampling"] not in terms.sampling:
        return False
    known, multiplier = terms.multipliers[noise], row["noise_multiplier"]
    same = multiplier >= known if noise == "pureobjectivenoise" else False
    same = same or math.isclose(multiplier, known, rel_tol=_ROUNDING)
    return same and (noise == "nonoise" or math.isclose(row["sampling_rate"], terms.rate, rel_tol=_ROUNDING))


def queries(trace: Columns) -> Iterator[dict[str, Any]]:
    """The releases of a trace by kind, with the least and the most that each of their numbers was."""
    places: dict[tuple[Any, ...], int] = {}
    place = np.array([places.setdefault(names, len(places)) for names in _rows(trace, _KINDS)])
    for names, number in places.items():
        rows = {name: np.asarray(trace[name], float)[place == number] for name in _SPANS}
        spans = {name: _span(np.fmin.reduce(some), np.fmax.reduce(some)) for name, some in rows.items()}
        count = int((place == number).sum())
        yield {**dict(zip(_KINDS, names, strict=True)), "count": count, **spans}


def trace_schedule(trace: Columns) -> list[tuple[dp.DpEvent, int]]:
    """The events of a noise trace in their order, equal neighbours counted together."""
    return merged([(_event(str(text)), len([*run])) for text, run in groupby(trace["event"])])


def _rows(trace: Columns, names: list[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(np.asarray(trace[name]).tolist() for name in names), strict=True)


def made_up_trace(schedule: Schedule) -> dict[str, list[Any]]:
    """A trace that the releases of a schedule could have left, with bounds of 1 and no other facts than their events.

    Raises RefusedError where an event is of no release that a trace can name.
    """
    rows = []
    for event, count in schedule:
        terms = rule_of(event).traced(event)
        if not terms.multipliers:
            raise RefusedError(
                f"{event} is the event of no release that a card can state; use another method."
            )
        noise, multiplier = next(iter(terms.multipliers.items()))
        own = {"noise": noise, "noise_multiplier": multiplier, "noise_std": multiplier}
        own |= {
            "sampling": terms.sampling[0],
            "sampling_rate": terms.rate,
            "event": json.dumps(event_to_json(event)),
        }
        same = {"kind": "release", "clipping": "bound", "clip_norm": 1.0, "divisor": 1.0}
        rows += [same | own | {"step": 0, "epsilon": 0.0}] * count
    return {name: [row[name] for row in rows] for name in rows[0]}


def same_events(one: Schedule, other: Schedule) -> bool:
    """Whether two schedules are the same releases in the same order."""
    return schedule_to_json(merged(one)) == schedule_to_json(merged(other))


def column_problem(trace: Columns, card: PrivacyCard, *, is_whole: bool = True) -> str | None:
    """What a trace has otherwise than its own events or the card's sums; None where nothing.

    is_whole: whether it is of all that was charged, and not of the winner of a search.
    """
    for values in dict.fromkeys(_rows(trace, _CHECKED)):
        row = dict(zip(_CHECKED, values, strict=True))
        if not row_fits(row, _event(row["event"])):
            return f"a {row['kind']} has other sampling or noise than its event"
    if list(queries(trace)) != [query.model_dump() for query in card.mechanism.queries]:
        return "mechanism.queries sums up other columns"
    return (
        None
        if _ends_at(np.asarray(trace["epsilon"], float), card, is_whole=is_whole)
        else "it counts another epsilon"
    )


def _ends_at(kept: NDArray[np.float64], card: PrivacyCard, *, is_whole: bool) -> bool:
    """Whether the cost so far rises to that of the run, or under a filter to no more than it allowed.

    It is kept by Rényi divergences, which may end below what the other accountant gives for the whole.
    """
    cost, rdp = card.cost, card.accounting.epsilon.rdp
    if cost is None:
        return True
    within = bool((kept[1:] >= kept[:-1]).all()) and kept[-1] <= cost * (1 + _CLOSE)
    is_fixed = is_whole and card.accounting.composition.kind == "schedule"
    least = cost if rdp is None else min(cost, rdp)
    return bool(within and (not is_fixed or kept[-1] >= least * (1 - _CLOSE)))


@lru_cache(maxsize=4096)
def _event(text: str) -> dp.DpEvent:
    return event_from_json(json.loads(text))


def _span(least: float, most: float) -> dict[str, float | None]:
    ends = {"least": float(least), "most": float(most)}
    return {name: end if math.isfinite(end) else None for name, end in ends.items()}
