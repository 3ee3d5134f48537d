"""Verifying a ledger: its hash chain, the balances that its rows add up to, and what the events of each run cost.

All rows are replayed, one by one. Memory grows with the number of populations and open runs, not with the rows; the
result can be stored, signed, as a checkpoint from which a later verification continues.
"""

import json
import math
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy.engine import Connection

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import state_tables
from algorithms.privacy.ledger.composition import Composition, RowNotes
from algorithms.privacy.ledger.rows import EMPTY_HEAD, Entry, Head
from algorithms.privacy.ledger.state import LedgerState, adjacency_of, replay
from algorithms.privacy.ledger.store import FIRST_HASH, SEQ_OF_HASH, Store, pages, query_value

_MIN_PAID, _MIN_PAID_OF_DELTA = 1 - 1e-9, 1 - 1e-2
"""The least share of what a run's events cost by this version that its row must have charged, else it is refused.

Of prices by formulas (zCDP, Rényi) all but rounding. Under basic composition the price is a delta, that of several
records of one person together: a bound from a grid of privacy losses, which a version with a finer grid states lower.
So a row may charge a hundredth less: between this grid and one of quarter cells it moved by 0.1 % mostly, and by up to
4 %, for which the row of such a version would be refused."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a ledger at the end of a verification, from which a later one continues.

    Attributes:
        first: The hash of the first row, which identifies the ledger; None for an empty one.
        head: The last row that was verified.
        state: Without the runs that have ended.
        priced: Whether prices were recomputed too.
    """

    first: str | None
    head: Head
    state: LedgerState
    priced: bool

    def to_signed_json(self, key: Ed25519PrivateKey) -> str:
        """The checkpoint as JSON text, with a signature.

        Args:
            key: Of the owner, whose public half `load` is given.
        """
        document: dict[str, object] = {"first": self.first, "head": list(self.head), "priced": self.priced}
        document["books"] = state_tables.to_document(self.state)
        signature = key.sign(state_tables.canonical(document).encode()).hex()
        return json.dumps(document | {"signature": signature}, indent=1) + "\n"

    @classmethod
    def load(cls, text: str, key: Ed25519PublicKey) -> "Checkpoint":
        """The checkpoint that `to_signed_json` wrote.

        Args:
            text: The JSON text.
            key: The public half of the owner's key.

        Raises:
            RefusedError: Unless this key signed exactly this text.
        """
        try:
            document = json.loads(text)
            key.verify(bytes.fromhex(document.pop("signature")), state_tables.canonical(document).encode())
            state = state_tables.from_document(document["books"])
            return cls(document["first"], Head(*document["head"]), state, document["priced"])
        except (InvalidSignature, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise RefusedError(
                "the checkpoint is not one that the owner's key of this home signed; verify the ledger from its first"
                " row."
            ) from None


@dataclass(frozen=True)
class LedgerVerification:
    """The result of `Ledger.verify`.

    Attributes:
        checkpoint: At the end of the chain.
        read: The number of rows that were read.
        priced: The number of rows whose charge was compared with what their events cost.
    """

    checkpoint: Checkpoint
    read: int
    priced: int

    @property
    def head(self) -> Head:
        """The last row."""
        return self.checkpoint.head


def verify_rows(
    store: Store, connection: Connection, since: Checkpoint | None, *, prices: bool
) -> LedgerVerification:
    """Replay the rows after a checkpoint and compare the balances with the state; see `Ledger.verify`.

    Raises LedgerBrokenError if the chain, a price or a balance does not hold, or if the ledger does not contain the
    checkpoint's head.
    """
    first = query_value(connection, FIRST_HASH)
    # A copy, as replaying changes it.
    state, start = (deepcopy(since.state), since.head) if since else (LedgerState(), EMPTY_HEAD)
    is_here = start == EMPTY_HEAD or query_value(connection, SEQ_OF_HASH, hash=start.hash) == start.seq
    if since is not None and (since.first != first or not is_here):
        raise LedgerBrokenError(
            f"the ledger {store.database.name} has no row {start.seq} with the hash {start.hash[:16]}... of the"
            " checkpoint: rows were cut off or an older copy was put back; restore the newest copy."
        )
    head, count, priced = start, 0, 0
    for page in pages(store.rows(connection, after=start)):
        priced += _replay_page(state, page, prices=prices)
        count, head = count + len(page), page[-1].head
        _check_and_drop_ended(store, connection, state, page)  # runs whose last row was on an earlier page
    _check_and_drop_ended(store, connection, state, [])  # and those of the last page
    wrong = state_tables.differing(connection, state)
    if wrong is not None:
        raise _wrong(store, wrong)
    # Of all rows, those before the checkpoint included.
    is_priced = prices and (since is None or since.priced)
    return LedgerVerification(Checkpoint(first, head, state, is_priced), count, priced)


def _replay_page(state: LedgerState, page: list[Entry], *, prices: bool) -> int:
    if not prices:
        replay(page, state=state)
        return 0
    priced = 0
    for entry in page:
        replay((entry,), state=state)
        priced += _check_price(state, entry)
    return priced


def _check_price(state: LedgerState, entry: Entry) -> bool:
    """Whether what the row charges could be compared with its events; raises LedgerBrokenError if they cost more."""
    composition = state.terms[entry.population].composition
    if entry.run_id is None or entry.events == "[]":
        return False
    notes: RowNotes = json.loads(entry.about)
    adjacency = state.runs[entry.run_id].adjacency if entry.kind == "settle" else adjacency_of(notes)
    is_covered = _is_covered(entry.budget, entry.events, adjacency) if composition.kind == "basic" else None
    if is_covered is False:
        raise LedgerBrokenError(
            f"row {entry.seq} charges run {entry.run_id!r} {entry.budget}, its events cost more at this"
            " delta; find out which software wrote it."
        )
    price = notes.get("price")
    if price is None or (composition.kind == "basic" and notes.get("together", 1) == 1):
        return is_covered is True
    cost = _cost(composition, entry.budget, entry.events, adjacency, notes.get("together", 1))
    if price < cost * (_MIN_PAID_OF_DELTA if composition.kind == "basic" else _MIN_PAID):
        raise LedgerBrokenError(
            f"row {entry.seq} charges run {entry.run_id!r} {price:g}, its events cost {cost:g}; find out"
            " which software wrote it."
        )
    return True


@lru_cache(maxsize=1024)
def _is_covered(stated: Budget, events: str, adjacency: str) -> bool | None:
    """`filters.is_covered` of a row; kept, since runs repeat and a settlement mostly has its reservation's events."""
    if math.isinf(stated.epsilon):
        return None  # a run without noise, which is recorded and not added
    from algorithms.privacy.accounting.epsilon import adjacency_named
    from algorithms.privacy.accounting.events import schedule_from_json
    from algorithms.privacy.accounting.filters import is_covered

    with suppress(RefusedError):  # events that this version does not know
        return is_covered(stated, schedule_from_json(json.loads(events)), adjacency_named(adjacency))
    return None


@lru_cache(maxsize=4096)
def _cost(composition: Composition, budget: Budget, events: str, adjacency: str, group_size: int) -> float:
    return composition.price(budget, json.loads(events), adjacency, group_size) or 0.0


def _check_and_drop_ended(
    store: Store, connection: Connection, state: LedgerState, page: list[Entry]
) -> None:
    """Compare runs that have ended with the stored ones, and drop them, so that memory grows with the open runs alone.

    A run with a row in this page may have more rows in the next, for its other blocks, and is kept. Raises
    LedgerBrokenError where a stored run is another.
    """
    touched = {entry.run_id for entry in page}
    ended = {name: run for name, run in state.runs.items() if run.status != "open" and name not in touched}
    wrong = state_tables.differing_run(connection, ended) if ended else None
    if wrong is not None:
        raise _wrong(store, f"what became of run {wrong!r}")
    for name in ended:
        del state.runs[name]


def _wrong(store: Store, what: str) -> LedgerBrokenError:
    return LedgerBrokenError(
        f"the ledger {store.database.name} keeps other balances than its rows add up to, in {what}: they were changed"
        " outside the ledger; export it and restore it into a new one, which derives them from the rows."
    )
