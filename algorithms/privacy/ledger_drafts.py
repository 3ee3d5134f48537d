"""The rows of a run, one for each of its blocks, priced by its events; and the books that a thread keeps at hand."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TypeAlias

from algorithms.privacy import ledger_rules as rules
from algorithms.privacy.budget import Budget
from algorithms.privacy.ledger_books import Books, Run, replay
from algorithms.privacy.ledger_composition import Events
from algorithms.privacy.ledger_entry import GENESIS, Draft, Entry, head
from algorithms.privacy.ledger_terms import Terms

Blocks: TypeAlias = Sequence[str] | Mapping[str, Events]
"""Blocks that share a run's events, or each with its own."""


class Memory(threading.local):
    """The books of the rows that this thread replayed last, so that only new rows are replayed; they trust nothing."""

    def __init__(self) -> None:
        self._books, self._rows, self._head = Books(), 0, GENESIS

    def books(self, entries: Sequence[Entry]) -> Books:
        """The books of verified rows; they change with the next call of the same thread."""
        is_longer = self._rows == 0 or (
            len(entries) >= self._rows and entries[self._rows - 1].hash == self._head
        )
        known = self._rows if is_longer else 0
        books, self._books, self._rows = (
            self._books if known else Books(),
            Books(),
            0,
        )  # in case replaying fails
        self._books = replay(entries[known:], books=books)
        self._rows, self._head = len(entries), head(entries)
        return self._books


def declaration(books: Books, population: str, cap: Budget, terms: Terms) -> list[Draft]:
    """The row that enters a population; for one that is there, the row that binds what is not yet bound, if any."""
    if population not in books.terms:
        return [Draft("population", population, cap, about=terms.to_json())]
    unbound = books.terms[population].unbound(terms, is_charged=books.is_charged(population))
    return [Draft("cap", population, books.cap(population), about={"bound": unbound})] if unbound else []


def reservation(terms: Terms, run: Draft, blocks: Blocks, held: Mapping[str, Sequence[str]]) -> list[Draft]:
    """The rows that reserve a run in its blocks; raises Refused where its events have no bound under the terms.

    run: the row of a run on the whole population. held: digests of what the blocks hold. Each price is computed here
    and never taken from `about`.
    """
    drafts, by_block = [], _by_block(blocks, run.events)
    together = terms.together(by_block)
    for block, events in by_block.items():
        price = terms.composition.price(run.budget, events, rules.adjacency_of(run.about), together)
        about = dict(run.about) | _notes(terms, price, together)
        about |= {"held": sorted(held[block])} if block in held else {}
        drafts.append(Draft("reserve", run.population, run.budget, run.run_id, events, about, block))
    return drafts


def settlement(
    books: Books, run_id: str, spent: Budget, events: Events, blocks: Mapping[str, Events], model: str | None
) -> list[Draft]:
    """The rows that settle an open run, none for another; blocks: the events of those where they are not `events`.

    model: the SHA-256 of what the run gave, by which a second one is known.

    A run settled at its full cost keeps its full price: when to end may have been chosen on the way, under a filter
    of its own. One settled at less is priced by what happened.
    Raises BudgetRefused where that costs more than was reserved, Refused where it has no bound.
    """
    run = rules.find(books, run_id)
    if run.status != "open":
        return []
    rules.check_settles(run_id, run, spent)
    by_block = {block: blocks.get(block, events) for block in run.amounts}
    notes = {} if model is None else {"model": model}
    drafts = _settled(books.term(run.population), run_id, run, spent, by_block)
    return [replace(draft, about={**draft.about, **notes}) for draft in drafts]


def _settled(
    terms: Terms, run_id: str, run: Run, spent: Budget, by_block: Mapping[str, Events]
) -> list[Draft]:
    drafts, together = [], terms.together(by_block)
    for block, events in by_block.items():
        reserved = float(run.amounts[block][0] / Fraction(terms.blocks_per_person))
        in_full = spent == run.reserved
        price = (
            None
            if in_full and not events
            else terms.composition.price(spent, events, run.adjacency, together)
        )
        if price is not None:
            rules.check_price(run_id, block, reserved=reserved, happened=price)
        is_priced = terms.composition.kind != "basic" and any(run.amounts[block])
        about = _notes(terms, (reserved if in_full else price) if is_priced else None, together)
        drafts.append(Draft("settle", run.population, spent, run_id, events, about, block))
    return drafts


def _by_block(blocks: Blocks, events: Events) -> dict[str, Events]:
    return dict(blocks) if isinstance(blocks, Mapping) else dict.fromkeys(blocks, events)


def _notes(terms: Terms, price: float | None, together: int) -> dict[str, float]:
    """What the ledger itself keeps in a row, whatever the caller's notes say."""
    notes: dict[str, float] = {} if price is None else {"price": price}
    return notes | ({"together": together} if terms.blocks_per_person > 1 else {})
