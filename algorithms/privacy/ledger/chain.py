"""One row of the ledger, and the hash chain that binds every row to the one before it.

This module is independent of any database. A row's hash is the SHA-256 of its canonical JSON, which contains the hash
of the row before it. So a row that was edited, removed or inserted breaks the chain at its position. Rows missing at
the end leave a shorter valid chain, which only a head kept elsewhere (in a receipt) reveals.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _quote
from typing import Any, Literal, NamedTuple

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.accounting import Budget

Kind = Literal["population", "cap", "reserve", "settle", "forfeit"]
GENESIS = "0" * 64
WHOLE_POPULATION = "all"


class Head(NamedTuple):
    """The last row of a chain, by position and hash, which commit to all rows before it."""

    seq: int
    hash: str


NOTHING = Head(0, GENESIS)
"""The head of an empty chain."""


@dataclass(frozen=True)
class Draft:
    """A row to append; the ledger adds position, time and hashes."""

    kind: Kind
    population: str
    budget: Budget
    run_id: str | None = None
    events: Sequence[Mapping[str, Any]] = ()
    about: Mapping[str, object] = field(default_factory=dict)
    block: str = WHOLE_POPULATION


class Entry(NamedTuple):
    """A row as it is stored.

    seq: 1, 2, 3 without gaps. epsilon: None if it is not finite. events, about: canonical JSON text. written_at: UTC,
    ISO 8601. previous_hash: the hash of row seq - 1, GENESIS for the first row. written_by: the database's user, or the
    system's for a file; None in rows of version 0.2, whose hash does not include it.
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
    written_by: str | None = None

    @property
    def head(self) -> Head:
        """The head of a chain that ends with this row."""
        return Head(self.seq, self.hash)

    @property
    def budget(self) -> Budget:
        """The row's epsilon and delta: a cap, a reservation or a spend."""
        return _budget(self.epsilon, self.delta)

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object, with events and about as objects rather than text."""
        return self._asdict() | {"events": json.loads(self.events), "about": json.loads(self.about)}


@lru_cache(maxsize=4096)
def _budget(epsilon: float | None, delta: float) -> Budget:
    return Budget(math.inf if epsilon is None else epsilon, delta)


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
        about=_json_text(dict(draft.about)),
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


def follow(entries: Iterable[Entry], *, name: str, after: Head = NOTHING) -> Iterator[Entry]:
    """Yield the rows, each after checking that it continues the chain. name: of the ledger, for messages.

    after: the head that they continue. Raises LedgerBrokenError at the first row whose position, content or predecessor
    does not match its hash.
    """
    seq, previous = after
    for entry in entries:
        seq += 1
        if entry.seq != seq or entry.previous_hash != previous or not is_intact(entry):
            raise broken(name, seq)
        previous = entry.hash
        yield entry


def broken(name: str, seq: int) -> LedgerBrokenError:
    """The error for a row that was changed. name: of the ledger."""
    return LedgerBrokenError(
        f"the hash chain of the ledger {name} breaks at row {seq}: that row was changed, removed or"
        " inserted outside the ledger; restore the ledger from a copy whose chain holds."
    )


def _digest(entry: Entry) -> str:
    """SHA-256 of the row's JSON with sorted keys, without its own hash, and without the writer if there is none.

    The JSON is written by hand, since `json.dumps` takes three times as long for a million rows. Raises TypeError for a
    value of another type.
    """
    seq, kind, population, block, run_id, epsilon, delta, events, about, written_at, previous, _, by = entry
    name = "" if by is None else f',"written_by":{_quote(by)}'
    text = (
        f'{{"about":{_quote(about)},"block":{_quote(block)},"delta":{delta!r},"epsilon":'
        f'{"null" if epsilon is None else repr(epsilon)},"events":{_quote(events)},"kind":{_quote(kind)},"population":'
        f'{_quote(population)},"previous_hash":{_quote(previous)},"run_id":'
        f'{"null" if run_id is None else _quote(run_id)},"seq":{seq!r},"written_at":{_quote(written_at)}{name}}}'
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _json_text(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RefusedError(
            f"the events and the notes of a ledger entry must be JSON with finite numbers: {error}."
        ) from None
