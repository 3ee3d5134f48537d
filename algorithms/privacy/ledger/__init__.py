"""The durable privacy budget of each population; this is its public face, and `README.md` beside it is its manual.

composition: how runs add up, and what one counts for. policy: which blocks a retraining uses, and how many more there
can be. planned_runs: the composition of a new population. rows: rows and the hashes that bind them. state: what rows
add up to. balances: what is spent and left of it. drafts: the rows that an act adds. rules: what is refused.
state_tables: the state as tables. database: connecting to SQLite or PostgreSQL. store: the tables there, made by
migrations. ledger: the class, whose `reserve` charges a population and its blocks. verification: what its `verify`
does, which reads all rows one by one. location: where a home has its ledger, and what it remembers of it.
administration: copies, and roles in PostgreSQL.

Of the rest of privacy they import budgets, and the accountants where a price by zCDP or Rényi is asked for; nothing
else of ours but errors. What opens a database is imported when it is asked for: `card verify` needs none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from algorithms.privacy.ledger.balances import Balance
from algorithms.privacy.ledger.composition import UNIT, WHOLE_POPULATION, Composition, Terms, group_of, times
from algorithms.privacy.ledger.rows import Entry, Head
from algorithms.privacy.ledger.state import NOISE_KEY, contents

if TYPE_CHECKING:
    from algorithms.privacy.ledger.administration import export, init, restore
    from algorithms.privacy.ledger.ledger import Chain, Ledger, Settlement, identity, settlement
    from algorithms.privacy.ledger.location import (
        check_location,
        check_usual,
        checked_url,
        home,
        keep_usual,
        ledger_url,
        open_newest,
        remember,
        sqlite_url,
        system_user,
    )
    from algorithms.privacy.ledger.planned_runs import (
        ORDERS,
        ChosenComposition,
        choose_composition,
        explain,
    )
    from algorithms.privacy.ledger.policy import (
        BlockBalance,
        Choice,
        Forecast,
        Price,
        Spread,
        exhausted_blocks,
        forecast,
        next_retraining,
    )
    from algorithms.privacy.ledger.rules import floor_to_6_digits
    from algorithms.privacy.ledger.store import NotAllowedError
    from algorithms.privacy.ledger.verification import Checkpoint
else:
    _MODULES = {
        "administration": ("export", "init", "restore"),
        "ledger": ("Chain", "Ledger", "Settlement", "identity", "settlement"),
        "location": (
            *("check_location", "check_usual", "checked_url", "home", "keep_usual"),
            *("ledger_url", "open_newest", "remember", "sqlite_url", "system_user"),
        ),
        "planned_runs": ("ORDERS", "ChosenComposition", "choose_composition", "explain"),
        "policy": (
            *("BlockBalance", "Choice", "Forecast", "Price", "Spread"),
            *("exhausted_blocks", "forecast", "next_retraining"),
        ),
        "rules": ("floor_to_6_digits",),
        "store": ("NotAllowedError",),
        "verification": ("Checkpoint",),
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> Any:
        """Import a name of `_MODULES` on first use, since some of them open a database."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


__all__ = [
    "NOISE_KEY",
    "ORDERS",
    "UNIT",
    "WHOLE_POPULATION",
    "Balance",
    "BlockBalance",
    "Chain",
    "Checkpoint",
    "Choice",
    "ChosenComposition",
    "Composition",
    "Entry",
    "Forecast",
    "Head",
    "Ledger",
    "NotAllowedError",
    "Price",
    "Settlement",
    "Spread",
    "Terms",
    "check_location",
    "check_usual",
    "checked_url",
    "choose_composition",
    "contents",
    "exhausted_blocks",
    "explain",
    "export",
    "floor_to_6_digits",
    "forecast",
    "group_of",
    "home",
    "identity",
    "init",
    "keep_usual",
    "ledger_url",
    "next_retraining",
    "open_newest",
    "remember",
    "restore",
    "settlement",
    "sqlite_url",
    "system_user",
    "times",
]
