"""Comparing a privacy card with what the ledger was told of its run when it was settled."""

import json
import math
from collections.abc import Iterator
from typing import Any

from algorithms.privacy.card_model import PrivacyCard
from algorithms.privacy.card_parts import Amount
from algorithms.privacy.card_trace import same_events
from algorithms.privacy.card_verdict import BELOW, finite
from algorithms.privacy.errors import Refused
from algorithms.privacy.events import schedule_from_json
from algorithms.privacy.ledger import WHOLE_POPULATION, Balance, Ledger
from algorithms.privacy.ledger_entry import Entry
from algorithms.privacy.ledger_past import Settlement, settlement


def check_charged(card: PrivacyCard, ledger: Ledger) -> None:
    """Compares a card with its run's settlement: events, cost, model, adjacency, and where each account then stood.

    Raises Refused where the ledger has no settlement of the run on the card's population, and where they differ.
    """
    run_id = card.evidence.run_id
    past = settlement(ledger, card.setting.population, run_id)
    rows = [
        row for row in ledger.history(card.setting.population) if (row.kind, row.run_id) == ("settle", run_id)
    ]
    differing = list(
        dict.fromkeys([name for row in rows for name in _of_row(card, row)] + [*_of_account(card, past)])
    )
    if differing:
        raise Refused(
            f"the card of run {run_id!r} and its settlement in the ledger differ in {', '.join(differing)}; ask for the"
            " card that the run wrote."
        )


def _of_row(card: PrivacyCard, row: Entry) -> Iterator[str]:
    """What a row of the settlement has otherwise than the card."""
    accounting = card.accounting
    stated = [event.model_dump() for event in card.events]
    if not same_events(schedule_from_json(json.loads(row.events)), schedule_from_json(stated)):
        yield "events"
    cost = Amount(epsilon=getattr(accounting.epsilon, accounting.accountant), delta=accounting.delta)
    if not _same(cost, Amount(epsilon=row.epsilon, delta=row.delta)):
        yield "cost"
    about: dict[str, Any] = json.loads(row.about)
    if "model" in about and about["model"] != card.evidence.files["model.safetensors"]:
        yield "model"


def _of_account(card: PrivacyCard, past: Settlement) -> Iterator[str]:
    """What the ledger has otherwise of the run and of the accounts that it was charged to."""
    accounting = card.accounting
    if past.run.adjacency != card.setting.adjacency:
        yield "adjacency"
    if not _stands(accounting.population, past.balance):
        yield "population"
    stated = [] if accounting.blocks is None else [*accounting.blocks.charged]
    names = [WHOLE_POPULATION] if accounting.blocks is None else [block.name for block in stated]
    charged = {balance.block: balance for balance in past.charged}
    if names != [*past.run.amounts] or not all(_stands(block, charged[block.name]) for block in stated):
        yield "blocks"


def _stands(stated: Any, balance: Balance) -> bool:
    """Whether an account stands on the card as in the ledger; stated: with cap, spent and remaining."""
    return all(
        _same(getattr(stated, name), Amount(epsilon=finite(found.epsilon), delta=found.delta))
        for name in ("cap", "spent", "remaining")
        for found in [getattr(balance, name)]
    )


def _same(one: Amount, other: Amount) -> bool:
    if one.epsilon is None or other.epsilon is None:
        return one.epsilon is other.epsilon and _close(one.delta, other.delta)
    return _close(one.epsilon, other.epsilon) and _close(one.delta, other.delta)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=BELOW, abs_tol=1e-300)
