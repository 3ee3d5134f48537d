"""Verifies all rows of a ledger, one by one: the hash chain, the balances, and the prices of events.

Memory grows with the number of populations and open runs, not with the rows. The result can be stored, signed, as a
checkpoint from which a later verification continues; the hash chain commits to everything before it.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy.engine import Connection

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.ledger import balances
from algorithms.privacy.ledger.books import Books, adjacency_of, replay
from algorithms.privacy.ledger.chain import NOTHING, Entry, Head
from algorithms.privacy.ledger.composition import Composition
from algorithms.privacy.ledger.store import Store, first_hash, pages

_UNDER = 1 - 1e-9


@dataclass(frozen=True)
class Checkpoint:
    """The state at the end of a verification: the books without the runs that have ended.

    first: the hash of the first row, which identifies the ledger. priced: whether prices were recomputed too.
    """

    first: str | None
    head: Head
    books: Books
    priced: bool

    def signed(self, key: Ed25519PrivateKey) -> str:
        """The checkpoint as JSON text, with a signature."""
        document: dict[str, Any] = {"first": self.first, "head": list(self.head), "priced": self.priced}
        document["books"] = balances.to_document(self.books)
        signature = key.sign(balances.canonical(document).encode()).hex()
        return json.dumps(document | {"signature": signature}, indent=1) + "\n"

    @classmethod
    def load(cls, text: str, key: Ed25519PublicKey) -> "Checkpoint":
        """The checkpoint that `signed` wrote; raises RefusedError unless this key signed exactly this text."""
        try:
            document = json.loads(text)
            key.verify(bytes.fromhex(document.pop("signature")), balances.canonical(document).encode())
            books = balances.from_document(document["books"])
            return cls(document["first"], Head(*document["head"]), books, document["priced"])
        except (InvalidSignature, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise RefusedError(
                "the checkpoint is not one that the owner's key of this home signed; verify the ledger from its first"
                " row."
            ) from None


@dataclass(frozen=True)
class Verification:
    """The result: the checkpoint at the end, the number of rows read, and the number of recomputed prices."""

    checkpoint: Checkpoint
    read: int
    priced: int

    @property
    def head(self) -> Head:
        """The last row."""
        return self.checkpoint.head


def verified(store: Store, connection: Connection, since: Checkpoint | None, *, prices: bool) -> Verification:
    """Replay the rows after a checkpoint and compare the balances with the books; see `Ledger.verify`.

    Raises LedgerBrokenError if the chain, a price or a balance does not hold, or if the ledger does not contain the
    checkpoint's head.
    """
    first = first_hash(connection)
    books, start = (since.books.copy(), since.head) if since else (Books(), NOTHING)
    if since is not None and (since.first != first or not _has(store, connection, since.head)):
        raise LedgerBrokenError(
            f"the ledger {store.place.name} has no row {start.seq} with the hash {start.hash[:16]}... of the"
            " checkpoint: rows were cut off or an older copy was put back; restore the newest copy."
        )
    head, count, priced = start, 0, 0
    for page in pages(store.rows(connection, after=start)):
        priced += _enter(books, page, prices=prices)
        count, head = count + len(page), page[-1].head
        _leave_out_ended(store, connection, books, page)
    _leave_out_ended(store, connection, books, [])
    wrong = balances.differing(connection, books)
    if wrong is not None:
        raise _wrong(store, wrong)
    is_priced = prices and (since is None or since.priced)
    return Verification(Checkpoint(first, head, books, is_priced), count, priced)


def _has(store: Store, connection: Connection, head: Head) -> bool:
    if head == NOTHING:
        return True
    found = next(store.rows_from(connection, head.seq), None)
    return found is not None and found.head == head


def _enter(books: Books, page: list[Entry], *, prices: bool) -> int:
    if not prices:
        replay(page, books=books)
        return 0
    priced = 0
    for entry in page:
        replay((entry,), books=books)
        priced += _check_price(books, entry)
    return priced


def _check_price(books: Books, entry: Entry) -> bool:
    """Whether the row has a price that follows from events; raises LedgerBrokenError if they cost more."""
    composition = books.terms[entry.population].composition
    if entry.run_id is None or composition.kind == "basic" or entry.events == "[]":
        return False
    about = json.loads(entry.about)
    if "price" not in about:
        return False
    adjacency = books.runs[entry.run_id].adjacency if entry.kind == "settle" else adjacency_of(about)
    cost = _cost(composition, entry.events, adjacency, about.get("together", 1))
    if about["price"] < cost * _UNDER:
        raise LedgerBrokenError(
            f"row {entry.seq} charges run {entry.run_id!r} {about['price']:g}, its events cost {cost:g}; find out"
            " which software wrote it."
        )
    return True


@lru_cache(maxsize=4096)
def _cost(composition: Composition, events: str, adjacency: str, together: int) -> float:
    return composition.events_price(json.loads(events), adjacency, together)


def _leave_out_ended(store: Store, connection: Connection, books: Books, page: list[Entry]) -> None:
    """Compare ended runs with the stored ones, and forget them.

    A run with a row in this page may have more rows in the next, for its other blocks, and is kept.
    """
    touched = {entry.run_id for entry in page}
    ended = {name: run for name, run in books.runs.items() if run.status != "open" and name not in touched}
    wrong = balances.differing_run(connection, ended) if ended else None
    if wrong is not None:
        raise _wrong(store, f"what became of run {wrong!r}")
    for name in ended:
        del books.runs[name]


def _wrong(store: Store, what: str) -> LedgerBrokenError:
    return LedgerBrokenError(
        f"the ledger {store.place.name} keeps other balances than its rows add up to, in {what}: they were changed"
        " outside the ledger; export it and restore it into a new one, which derives them from the rows."
    )
