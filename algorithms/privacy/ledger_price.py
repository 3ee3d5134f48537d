"""What a run costs a population that composes by zCDP or Rényi, computed from the run's events alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from algorithms.privacy.accounting import rdp
from algorithms.privacy.adjacency import named
from algorithms.privacy.errors import Refused
from algorithms.privacy.events import schedule_from_json
from algorithms.privacy.filters import rho_under


def price_of(order: float | None, events: Sequence[Mapping[str, Any]], adjacency: str) -> float:
    """The divergence of the events at an order, or their rho where the order is None.

    events: as {"event", "count"}. adjacency: its name. Raises Refused where an event has no finite bound.
    """
    schedule, relation = schedule_from_json(events), named(adjacency)
    if order is None:
        price = math.fsum(count * rho_under(relation, event) for event, count in schedule)
    else:
        price = float(rdp(schedule, orders=(order,), adjacency=relation)[0])
    if not math.isfinite(price):
        unit = "zCDP" if order is None else f"Rényi divergence of order {order:g}"
        raise Refused(f"the run's events have no finite {unit}; take a method whose events have one.")
    return price
