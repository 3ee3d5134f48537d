"""Comparing a privacy card with what the ledger was told of its run when it was settled."""

import json
import math
from collections.abc import Iterator
from typing import Any

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.events import schedule_from_json
from algorithms.privacy.card.model import PrivacyCard
from algorithms.privacy.card.parts import Amount
from algorithms.privacy.card.sentences import rule_across_runs
from algorithms.privacy.card.trace import same_events
from algorithms.privacy.card.verdict import BELOW, finite
from algorithms.privacy.ledger import WHOLE_POPULATION, Balance, Entry, Ledger, Settlement, settlement
from algorithms.privacy.ledger.composition import UNIT


def check_charged(card: PrivacyCard, ledger: Ledger) -> None:
    """Compares a card with its run's settlement: events, cost, model, adjacency, and where each account then stood.

    Also with how the population was declared, with what the run was reserved for, and the card's head with the chain.

    Raises RefusedError where the ledger has no settlement of the run on the card's population, and where they differ.
    """
    run_id = card.evidence.run_id
    past = settlement(ledger, card.setting.population, run_id)
    rows = [row for row in ledger.history() if (row.population, row.run_id) == (past.population, run_id)]
    settled = [row for row in rows if row.kind == "settle"]
    differing = [name for row in settled for name in _of_row(card, row)]
    differing += [*_of_account(card, past), *_of_terms(card, past)]
    differing += [name for row in rows if row.kind == "reserve" for name in _of_reservation(card, row)]
    heads = {row.hash for row in ledger.history()[settled[-1].seq - 1 :]}
    differing += [] if card.evidence.ledger_head in heads else ["ledger_head"]
    if differing:
        raise RefusedError(
            f"the card of run {run_id!r} and its settlement in the ledger differ in"
            f" {', '.join(dict.fromkeys(differing))}; ask for the card that the run wrote."
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


def _of_reservation(card: PrivacyCard, row: Entry) -> Iterator[str]:
    """What the run was reserved for otherwise than the card says."""
    about: dict[str, Any] = json.loads(row.about)
    stated = {"algorithm": card.mechanism.algorithm, "dataset": card.setting.dataset}
    stated["noise"] = card.implementation.noise.kind
    yield from (name for name, value in stated.items() if about.get(name) != value)


def _of_terms(card: PrivacyCard, past: Settlement) -> Iterator[str]:
    """What the population was declared with otherwise."""
    blocks, declared = card.accounting.blocks, past.balance
    if past.books.term(past.population).bound.get(UNIT) != card.setting.unit:
        yield "unit"
    if rule_across_runs(card) != declared.composition:
        yield "composition"
    if blocks is not None and blocks.blocks_per_person != declared.blocks_per_person:
        yield "blocks_per_person"
    if card.setting.public_records != declared.public:
        yield "public_records"


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
