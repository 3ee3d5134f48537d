"""What each block lost, from the ledger's rows alone and by dp_accounting's accountant; none of our sums is used."""

import json
import math
from collections.abc import Mapping
from typing import Any

import dp_accounting
from dp_accounting.rdp import RdpAccountant

from algorithms.privacy.ledger import Entry, Ledger


def recomputed(ledger: Ledger, population: str, *, order: float, delta: float) -> list[dict[str, Any]]:
    """For each block its runs, and the epsilon of all their releases together.

    at_order: by the divergence at `order` alone, which is what a cap under that composition bounds. any_order: by the
    best of dp_accounting's orders. Releases are those of the settlement, or of the reservation of a run without one.
    """
    rows = ledger.history(population)
    found = []
    for block in dict.fromkeys(row.block for row in rows if row.run_id):
        events = _events([row for row in rows if row.block == block])
        at_order, any_order = RdpAccountant([order]), RdpAccountant()
        for event, count in events:
            at_order.compose(event, count)
            any_order.compose(event, count)
        costs = {"at_order": at_order.get_epsilon(delta), "any_order": any_order.get_epsilon(delta)}
        runs = len({row.run_id for row in rows if row.block == block and row.run_id})
        by_ledger = ledger.balance(population, block)
        own = {"ledger": by_ledger.spent.epsilon, "retired": by_ledger.retired}
        found.append({"block": block, "runs": runs} | costs | own)
    return found


def _events(rows: list[Entry]) -> list[tuple[dp_accounting.DpEvent, int]]:
    last = {row.run_id: row for row in rows if row.kind in ("reserve", "settle")}
    documents = [document for row in last.values() for document in json.loads(row.events)]
    return [(event_of(document["event"]), document["count"]) for document in documents]


def event_of(document: Mapping[str, Any]) -> dp_accounting.DpEvent:
    """dp_accounting's event from what the ledger keeps of it."""
    fields = {
        name: event_of(value) if isinstance(value, Mapping) else value for name, value in document.items()
    }
    kind = getattr(dp_accounting, fields.pop("type"))
    assert all(not isinstance(value, float) or math.isfinite(value) for value in fields.values())
    return kind(**fields)
