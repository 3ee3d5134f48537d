"""Checking a privacy card against the noise trace beside it: its events, its columns, and what the card sums up."""

import json
from collections.abc import Hashable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pandas as pd

from algorithms.privacy.accounting.events import Schedule, event_from_json, event_to_json, schedule_to_json
from algorithms.privacy.card.model import PrivacyCard
from algorithms.privacy.card.terms import row_fits, terms_of
from algorithms.privacy.card.verdict import Check, finite

EVENTS, COLUMNS = "events of the trace", "columns of the trace"
_KINDS = ["kind", "sampling", "clipping", "noise"]
_SPANS = ["sampling_rate", "clip_norm", "noise_multiplier", "noise_std", "divisor"]
_CHECKED = ["event", *_KINDS, *_SPANS[:-1]]
_CLOSE = 1e-3
"""How closely the cost that a run kept count of ends at that of its schedule, which is accounted as a whole."""


def check_trace(path: Path, card: PrivacyCard, schedule: Schedule) -> Iterator[Check]:
    """Whether the trace has the card's events, and nothing beside them that they or the card contradict."""
    if not path.is_file():
        yield from (Check(name, None, "no trace lies beside the card") for name in (EVENTS, COLUMNS))
        return
    try:
        yield from list(_checks(pd.read_parquet(path), card, schedule))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        yield from (Check(name, False, "the trace cannot be read") for name in (EVENTS, COLUMNS))


def queries(trace: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The releases of a trace by kind, with the least and the most that each of their numbers was."""
    for names, rows in trace.groupby(_KINDS, sort=False):
        spans = {name: _span(rows[name].min(), rows[name].max()) for name in _SPANS}
        yield {**dict(zip(_KINDS, names, strict=True)), "count": len(rows), **spans}


def trace_schedule(trace: pd.DataFrame) -> list[tuple[dp.DpEvent, int]]:
    """The events of a noise trace in their order, equal neighbours counted together."""
    return merged(
        [(event_from_json(json.loads(text)), count) for text, count in _run_lengths(trace["event"])]
    )


def made_up_trace(schedule: Schedule) -> pd.DataFrame:
    """A trace that the releases of a schedule could have left, with bounds of 1 and no other facts than their events.

    Raises RefusedError where an event is of no release that a trace can name.
    """
    same = {
        "kind": "release",
        "clipping": "bound",
        "clip_norm": 1.0,
        "divisor": 1.0,
        "step": 0,
        "epsilon": 0.0,
    }
    rows = [same | terms_of(event) | {"event": json.dumps(event_to_json(event))} for event, _ in schedule]
    frame = pd.DataFrame(rows).assign(noise_std=lambda rows: rows["noise_multiplier"])
    return frame.loc[np.repeat(np.arange(len(rows)), [count for _, count in schedule])]


def merged(schedule: Schedule) -> list[tuple[dp.DpEvent, int]]:
    """A schedule in which equal neighbours are counted together."""
    rows: list[tuple[dp.DpEvent, int]] = []
    for event, count in schedule:
        if rows and rows[-1][0] == event:
            rows[-1] = (event, rows[-1][1] + count)
        else:
            rows.append((event, count))
    return rows


def same_events(one: Schedule, other: Schedule) -> bool:
    """Whether two schedules are the same releases in the same order."""
    return schedule_to_json(merged(one)) == schedule_to_json(merged(other))


def _checks(trace: pd.DataFrame, card: PrivacyCard, schedule: Schedule) -> Iterator[Check]:
    same = same_events(trace_schedule(trace), schedule)
    yield Check(EVENTS, same, "the card's events" if same else "other events than the card's")
    problem = _problem(trace, card)
    yield Check(COLUMNS, problem is None, problem or "those of its events, summed up on the card")


def _problem(trace: pd.DataFrame, card: PrivacyCard) -> str | None:
    for row in trace[_CHECKED].drop_duplicates().to_dict("records"):
        if not _is_of_its_event(row, card.mechanism.model.parameters):
            return f"a {row['kind']} has other sampling or noise than its event"
    if list(queries(trace)) != [query.model_dump() for query in card.mechanism.queries]:
        return "mechanism.queries sums up other columns"
    return None if _ends_at(trace["epsilon"], card) else "the epsilon that was kept count of is another"


def _is_of_its_event(row: Mapping[Hashable, Any], parameters: int) -> bool:
    return row_fits(
        {str(key): value for key, value in row.items()}, _event(row["event"]), parameters=parameters
    )


def _ends_at(kept: "pd.Series[float]", card: PrivacyCard) -> bool:
    """Whether the cost so far rises to that of the run, or under a filter to no more than it allowed.

    It is kept by Rényi divergences, which may end below what the other accountant gives for the whole.
    """
    epsilon = card.accounting.epsilon
    cost: float | None = getattr(epsilon, card.accounting.accountant)
    if cost is None:
        return True
    within = bool(kept.is_monotonic_increasing) and kept.iloc[-1] <= cost * (1 + _CLOSE)
    is_fixed = card.accounting.composition.kind == "schedule"
    least = cost if epsilon.rdp is None else min(cost, epsilon.rdp)
    return within and (not is_fixed or kept.iloc[-1] >= least * (1 - _CLOSE))


@lru_cache(maxsize=4096)
def _event(text: str) -> dp.DpEvent:
    return event_from_json(json.loads(text))


def _run_lengths(texts: "pd.Series[str]") -> Iterator[tuple[str, int]]:
    groups = texts.ne(texts.shift()).cumsum()
    for _, group in texts.groupby(groups, sort=True):
        yield str(group.iloc[0]), len(group)


def _span(least: float, most: float) -> dict[str, float | None]:
    return {"least": finite(least), "most": finite(most)}
