"""The rows that a declaration, a reservation and a settlement add to the ledger, priced by their events."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from algorithms.errors import BudgetRefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger.composition import Events, RowNotes, Terms
from algorithms.privacy.ledger.rows import Draft
from algorithms.privacy.ledger.rules import check_new_population, check_settles, find
from algorithms.privacy.ledger.state import LedgerState, adjacency_of

_PRICE_ROUNDING = 1e-9
"""Relative; far above the rounding of a price, as the same events may be added up in another order than planned."""


def declaration_drafts(state: LedgerState, population: str, cap: Budget, terms: Terms) -> list[Draft]:
    """The row that enters a population; for one that is there, the row that binds what is not yet bound, if any.

    Raises RefusedError for a new name that differs from another in case or spaces alone.
    """
    if population not in state.terms:
        check_new_population(state, population)
        return [Draft("population", population, cap, notes=terms.to_notes())]
    to_bind = state.terms[population].values_to_bind(terms, is_charged=state.is_charged(population))
    return [Draft("cap", population, state.cap(population), notes={"bound": to_bind})] if to_bind else []


def reservation_drafts(
    terms: Terms, run: Draft, blocks: Sequence[str], content_digests: Mapping[str, Sequence[str]]
) -> list[Draft]:
    """The rows that reserve a run in its blocks; raises RefusedError where its events have no bound under the terms.

    run: the row of a run on the whole population. content_digests: of the blocks. The price is computed here
    and never taken from the notes.
    """
    blocks = [*dict.fromkeys(blocks)]  # a row for each, however often it is named
    if not blocks:
        return []
    group_size = terms.group_size(blocks)
    price = terms.composition.price(run.budget, run.events, adjacency_of(run.notes), group_size)
    notes = run.notes.copy()
    notes.pop("price", None)
    notes |= _notes(terms, price, group_size)
    held_notes = {block: RowNotes(held=sorted(digests)) for block, digests in content_digests.items()}
    return [replace(run, notes=notes | held_notes.get(block, RowNotes()), block=block) for block in blocks]


def settlement_drafts(
    state: LedgerState, run_id: str, spent: Budget, events: Events, model: str | None
) -> list[Draft]:
    """The rows that settle an open run, none for another; model: the SHA-256 of what the run gave, by which a second
    one is known.

    A run settled at its full cost keeps its full price: when to end may have been chosen on the way, under a filter
    of its own. One settled at less is priced by what happened.
    Raises BudgetRefusedError where that costs more than was reserved, RefusedError where it has no bound.
    """
    run = find(state, run_id)
    if run.status != "open":
        return []
    check_settles(run_id, run, spent)
    terms = state.term(run.population)
    drafts, group_size, in_full = [], terms.group_size(run.amounts), spent == run.reserved
    is_basic = terms.composition.kind == "basic"
    is_known = in_full and (is_basic or not events)
    happened = None if is_known else terms.composition.price(spent, events, run.adjacency, group_size)
    for block, amount in run.amounts.items():
        # The last number of an amount is the price; under basic sums the first is epsilon, which is not divided.
        reserved = float(amount[-1] / Fraction(terms.blocks_per_person))
        if happened is not None and not is_basic and happened > reserved * (1 + _PRICE_ROUNDING):
            raise BudgetRefusedError(
                f"run {run_id!r} cannot settle: its events in block {block!r} cost {happened:g}, more than the"
                f" {reserved:g} it reserved; find out why it did more than it planned."
            )
        is_priced = any(amount) and (not is_basic or group_size > 1)
        notes = _notes(terms, (reserved if in_full else happened) if is_priced else None, group_size)
        if model is not None:
            notes["model"] = model
        drafts.append(Draft("settle", run.population, spent, run_id, events, notes, block))
    return drafts


def _notes(terms: Terms, price: float | None, group_size: int) -> RowNotes:
    """What the ledger itself keeps in a row, whatever the caller's notes say."""
    notes = RowNotes()
    if price is not None:
        notes["price"] = price
    if terms.blocks_per_person > 1:
        notes["together"] = group_size
    return notes
