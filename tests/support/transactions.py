"""How often a ledger is asked: on a server, each time is a journey there and back."""

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa


@contextmanager
def transactions() -> Iterator[list[sa.Connection]]:
    """The connections of the transactions that begin in the block, one a transaction."""
    begun = list[sa.Connection]()
    note = begun.append
    sa.event.listen(sa.Engine, "begin", note)
    try:
        yield begun
    finally:
        sa.event.remove(sa.Engine, "begin", note)
