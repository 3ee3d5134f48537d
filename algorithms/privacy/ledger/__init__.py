"""The durable privacy budget of each population; this is its public face.

composition: how runs add up, and what one counts for. policy: which blocks a retraining uses, and how many more there
can be. rows: rows, the hashes that bind them, and the state that they add up to. rules: the rows of a run, and what is
refused. state_tables: that state as tables beside the rows. store: the tables in SQLite or PostgreSQL, made by
migrations. ledger: the class, whose `reserve` charges a population and its blocks, and whose `verify` reads all rows
one by one. location: where a home has its ledger, and what it remembers of it. administration: copies, and roles in
PostgreSQL.

Of the rest of privacy they import budgets, and the accountants where a price by zCDP or Rényi is asked for. Cards
import `composition` by itself, which decides what they say. What opens a database is imported when it is asked for:
`card verify` needs none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from algorithms.privacy.ledger.composition import WHOLE_POPULATION, Composition
from algorithms.privacy.ledger.rows import Balance, Entry, Head

if TYPE_CHECKING:
    from algorithms.privacy.ledger.administration import export, restore
    from algorithms.privacy.ledger.ledger import Checkpoint, Ledger, Settlement, identity, settlement
    from algorithms.privacy.ledger.store import NotAllowedError
else:
    _OTHER = {"NotAllowedError": "store", "export": "administration", "restore": "administration"}

    def __getattr__(name: str) -> Any:
        """What needs a database, when it is first asked for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_OTHER.get(name, 'ledger')}"), name)


__all__ = [
    "WHOLE_POPULATION",
    "Balance",
    "Checkpoint",
    "Composition",
    "Entry",
    "Head",
    "Ledger",
    "NotAllowedError",
    "Settlement",
    "export",
    "identity",
    "restore",
    "settlement",
]
