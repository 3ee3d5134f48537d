"""What each block lost, from the ledger's rows alone and by dp_accounting's accountant; none of our sums is used."""

import json
import math
from collections.abc import Mapping
from typing import Any

import dp_accounting
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

from algorithms.privacy.ledger import Entry, Ledger

DISJOINT = "DisjointPartsDpEvent"
"""Training, then the evaluation of other people; dp_accounting has no such event."""


def recomputed(ledger: Ledger, population: str, *, order: float, delta: float) -> list[dict[str, Any]]:
    """For each block its runs, and the epsilon of all their releases together.

    at_order: by the divergence at `order` alone, which is what a cap under that composition bounds. any_order: by the
    best of dp_accounting's orders. Releases are those of the settlement, or of the reservation of a run without one.
    Where held-out people are private, each cost is that of the people who lose most: trained_on and held_out are
    those of either side at the order.
    """
    rows = ledger.history(population)
    found = []
    for block in dict.fromkeys(row.block for row in rows if row.run_id):
        documents = _documents([row for row in rows if row.block == block])
        at_order, any_order = (
            [_cost(_of_side(documents, side), RdpAccountant(orders), delta) for side in (0, 1)]
            for orders in ([order], DEFAULT_RDP_ORDERS)
        )
        costs = {"at_order": max(at_order), "any_order": max(any_order)}
        if any(document["event"]["type"] == DISJOINT for document in documents):
            costs |= {"trained_on": at_order[0], "held_out": at_order[1]}
        runs = len({row.run_id for row in rows if row.block == block and row.run_id})
        by_ledger = ledger.balance(population, block)
        own = {"ledger": by_ledger.spent.epsilon, "retired": by_ledger.retired}
        found.append({"block": block, "runs": runs} | costs | own)
    return found


def _documents(rows: list[Entry]) -> list[dict[str, Any]]:
    last = {row.run_id: row for row in rows if row.kind in ("reserve", "settle")}
    return [document for row in last.values() for document in json.loads(row.events)]


def _of_side(documents: list[dict[str, Any]], side: int) -> list[dict[str, Any]]:
    """What a person of one side loses: of releases on disjoint people, the part of that side alone."""
    return [
        document | {"event": document["event"]["events"][side]}
        if document["event"]["type"] == DISJOINT
        else document
        for document in documents
    ]


def _cost(documents: list[dict[str, Any]], accountant: RdpAccountant, delta: float) -> float:
    for document in documents:
        accountant.compose(event_of(document["event"]), document["count"])
    return float(accountant.get_epsilon(delta))


def event_of(document: Mapping[str, Any]) -> dp_accounting.DpEvent:
    """dp_accounting's event from what the ledger keeps of it."""
    fields = {name: _value_of(value) for name, value in document.items()}
    kind = getattr(dp_accounting, fields.pop("type"))
    assert all(not isinstance(value, float) or math.isfinite(value) for value in fields.values())
    return kind(**fields)


def _value_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_value_of(one) for one in value]
    return event_of(value) if isinstance(value, Mapping) else value
