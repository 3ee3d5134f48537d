"""What an event is worth for a group of records that a person has in one run, one record in each of several blocks."""

import dp_accounting as dp

from algorithms.privacy.accounting.event_rules import rule_of


def group_privacy(event: dp.DpEvent, count: int) -> dp.DpEvent:
    """An event whose loss bounds that of `event` when `count` records come or go together.

    A sum moves by at most `count` bounds. A Poisson sample holds one of the records or more with probability
    1 - (1 - rate)^count, and moves by at most all of them then: divergences are convex in the moved output, so the
    largest move at that rate is the worst. zCDP grows by the square (Bun and Steinke 2016, Proposition 1.9).
    Raises RefusedError where nothing is known of groups.
    """
    return event if count == 1 else rule_of(event).grouped(event, count)
