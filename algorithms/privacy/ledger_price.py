"""What a run costs a population that composes by zCDP or Rényi, computed from the run's events alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from algorithms.privacy.adjacency import named
from algorithms.privacy.errors import Refused
from algorithms.privacy.events import Schedule, schedule_from_json
from algorithms.privacy.filters import rho_under
from algorithms.privacy.group import grouped
from algorithms.privacy.renyi import rdp


def price_of(
    order: float | None, events: Sequence[Mapping[str, Any]], adjacency: str, together: int = 1
) -> float:
    """The divergence of the events at an order, or their rho where the order is None.

    events: as {"event", "count"}. adjacency: its name. together: how many records a person may have in the run, each
    in a block of its own; the price is what each of these blocks pays so that they pay for any number of the records.
    Raises Refused where an event has no finite bound.
    """
    schedule = schedule_from_json(events)
    price = max(_price(order, schedule, adjacency, count) / count for count in range(1, together + 1))
    if not math.isfinite(price):
        unit = "zCDP" if order is None else f"Rényi divergence of order {order:g}"
        raise Refused(f"the run's events have no finite {unit}; take a method whose events have one.")
    return price


def _price(order: float | None, schedule: Schedule, adjacency: str, count: int) -> float:
    """Of so many records of one person."""
    relation, of_group = named(adjacency), [(grouped(event, count), times) for event, times in schedule]
    if order is None:
        return math.fsum(times * rho_under(relation, event) for event, times in of_group)
    return float(rdp(of_group, orders=(order,), adjacency=relation)[0])
