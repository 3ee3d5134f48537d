"""The rows of a ledger, and the hash chain that binds each to the one before it.

A row's hash is the SHA-256 of its canonical JSON, which contains the hash of the row before it. So a row that was
edited, removed or inserted breaks the chain at its position. Rows missing at the end leave a shorter valid chain, which
only a head kept elsewhere (in a receipt) reveals. Nothing here knows a database.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as _quote
from typing import Literal, NamedTuple

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger.composition import (
    WHOLE_POPULATION,
    Events,
    RowNotes,
)

RowKind = Literal["population", "cap", "reserve", "settle", "forfeit"]
GENESIS = "0" * 64


class Head(NamedTuple):
    """The last row of a chain, which commits to all rows before it.

    Attributes:
        seq: Its position, from 1; 0 for an empty chain.
        hash: SHA-256 in hex.
    """

    seq: int
    hash: str


EMPTY_HEAD = Head(0, GENESIS)
"""The head of an empty chain."""


@dataclass(frozen=True)
class Draft:
    """A row to append; the ledger adds position, time and hashes."""

    kind: RowKind
    population: str
    budget: Budget
    run_id: str | None = None
    events: Events = ()
    notes: RowNotes = field(default_factory=RowNotes)
    block: str = WHOLE_POPULATION


class Entry(NamedTuple):
    """A row as it is stored.

    Attributes:
        seq: 1, 2, 3 without gaps.
        kind: One of `RowKind`.
        population, block: What the row is about.
        run_id: Of a reservation, a settlement or a forfeit.
        epsilon: None if it is not finite.
        delta: With it, a cap, a reservation or a spend.
        events, about: Canonical JSON text; the latter are the notes.
        written_at: UTC, ISO 8601.
        previous_hash: Of row seq - 1; `GENESIS` for the first row.
        hash: SHA-256 of all other fields, in hex.
        written_by: The database's user, or the system's for a file.
    """

    seq: int
    kind: str
    population: str
    block: str
    run_id: str | None
    epsilon: float | None
    delta: float
    events: str
    about: str
    written_at: str
    previous_hash: str
    hash: str
    written_by: str

    @property
    def head(self) -> Head:
        """The head of a chain that ends with this row."""
        return Head(self.seq, self.hash)

    @property
    def budget(self) -> Budget:
        """The row's epsilon and delta: a cap, a reservation or a spend."""
        return Budget(math.inf if self.epsilon is None else self.epsilon, self.delta)

    def to_json(self) -> dict[str, object]:
        """The row as a JSON object, with events and notes as objects rather than text."""
        return self._asdict() | {"events": json.loads(self.events), "about": json.loads(self.about)}


def seal(draft: Draft, *, after: Head, written_at: str, written_by: str) -> Entry:
    """The row that appends `draft` to a chain with head `after`; raises RefusedError if it has no JSON form."""
    epsilon = float(draft.budget.epsilon)
    row = Entry(
        seq=after.seq + 1,
        kind=draft.kind,
        population=draft.population,
        block=draft.block,
        run_id=draft.run_id,
        epsilon=epsilon + 0.0 if math.isfinite(epsilon) else None,  # + 0.0: SQLite keeps no negative zero
        delta=float(draft.budget.delta) + 0.0,
        events=_json_text(list(draft.events)),
        about=_json_text(dict(draft.notes)),
        written_at=written_at,
        previous_hash=after.hash,
        hash="",
        written_by=written_by,
    )
    return row._replace(hash=_digest(row))


def is_intact(entry: Entry) -> bool:
    """Whether a row's hash is that of its content."""
    try:
        return entry.hash == _digest(entry)
    except TypeError:
        return False


def follow(entries: Iterable[Entry], *, name: str, after: Head = EMPTY_HEAD) -> Iterator[Entry]:
    """Yield the rows, each after checking that it continues the chain. name: of the ledger, for messages.

    after: the head that they continue. Raises LedgerBrokenError at the first row whose position, content or predecessor
    does not match its hash.
    """
    seq, previous = after
    for entry in entries:
        seq += 1
        if entry.seq != seq or entry.previous_hash != previous or not is_intact(entry):
            raise broken_error(name, seq)
        previous = entry.hash
        yield entry


def broken_error(name: str, seq: int) -> LedgerBrokenError:
    """The error for a row that was changed. name: of the ledger."""
    return LedgerBrokenError(
        f"the hash chain of the ledger {name} breaks at row {seq}: that row was changed, removed or"
        " inserted outside the ledger; restore the ledger from a copy whose chain holds."
    )


def _digest(entry: Entry) -> str:
    """SHA-256 of the row's JSON with sorted keys, without its own hash.

    The JSON is written by hand, since `json.dumps` takes three times as long for a million rows. Raises TypeError for a
    value of another type.
    """
    # The hash itself is left out.
    seq, kind, population, block, run_id, epsilon, delta, events, notes, written_at, previous, _, by = entry
    text = (
        f'{{"about":{_quote(notes)},"block":{_quote(block)},"delta":{delta!r},"epsilon":'
        f'{"null" if epsilon is None else repr(epsilon)},"events":{_quote(events)},"kind":{_quote(kind)},"population":'
        f'{_quote(population)},"previous_hash":{_quote(previous)},"run_id":'
        f'{"null" if run_id is None else _quote(run_id)},"seq":{seq!r},"written_at":{_quote(written_at)},'
        f'"written_by":{_quote(by)}}}'
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _json_text(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RefusedError(
            f"the events and the notes of a ledger entry must be JSON with finite numbers: {error}."
        ) from None
