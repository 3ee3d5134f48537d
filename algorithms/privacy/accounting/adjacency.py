"""What an event under replace-one is worth under add-or-remove-one, where the accountants have their bounds.

Events carry noise over the bound C of one record, whatever the adjacency. Replacing a record takes one out and puts one
in, so a sum over all records moves by twice the bound. Events of samples are not translated here unless a theorem says
how: the accountants have bounds of their own for them.
"""

from typing import TypeAlias

import dp_accounting as dp

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.event_rules import parts, rule_of

Adjacency: TypeAlias = dp.NeighboringRelation
ADD_OR_REMOVE_ONE = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_ONE = dp.NeighboringRelation.REPLACE_ONE


def named(name: str) -> Adjacency:
    """The adjacency of a name; raises RefusedError where nothing is accounted under it."""
    known = {adjacency.name: adjacency for adjacency in (ADD_OR_REMOVE_ONE, REPLACE_ONE)}
    if name not in known:
        raise RefusedError(f"the adjacency {name!r} is not known; choose {' or '.join(known)}.")
    return known[name]


def as_add_remove(adjacency: Adjacency, event: dp.DpEvent) -> dp.DpEvent:
    """An event as the accountants are to take it; raises RefusedError where no theorem covers it under this adjacency.

    An event with an impossible number, as in a document that was edited, is refused too.
    """
    _check(adjacency, event)
    plain = event if adjacency is ADD_OR_REMOVE_ONE else rule_of(event).replacing(event)
    return rule_of(plain).amplified(plain)


def pure_epsilon(event: dp.DpEvent) -> float:
    """The epsilon of an event that is purely private, as `under` gives it; infinite for one that is not private.

    Raises RefusedError where the event is not pure.
    """
    return rule_of(event).pure_epsilon(event)


def _check(adjacency: Adjacency, event: dp.DpEvent) -> None:
    """Raises RefusedError for what no theorem covers, however deep it is nested."""
    if not rule_of(event).is_possible(event):
        raise RefusedError(
            f"{event} is no mechanism: a number in it is out of its range; check the document."
        )
    if not rule_of(event).is_proven(event, adjacency):
        raise RefusedError(
            "sampling without replacement is proven under replace-one alone, not under add-or-remove-one;"
            " take a full batch or a Poisson sample."
        )
    for inner in parts(event):
        _check(adjacency, inner)
