"""One row of the ledger, and the hash chain that binds every row to the one before it.

Nothing here knows of a database. A row's hash is SHA-256 over the row's canonical JSON, which holds the hash
of the row before it. So a row that was edited, removed or inserted later breaks the chain at its place. Rows
missing at the end leave a shorter chain that still holds: only a head kept elsewhere (a receipt) shows that.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.accounting.budget import Budget

Kind = Literal["population", "cap", "reserve", "settle", "forfeit"]
KINDS: tuple[str, ...] = get_args(Kind)
GENESIS = "0" * 64
WHOLE_POPULATION = "all"


class Head(NamedTuple):
    """The last row of a chain, by its place and its hash, which stand for all rows before it."""

    seq: int
    hash: str


NOTHING = Head(0, GENESIS)
"""Of a chain without rows."""


@dataclass(frozen=True)
class Draft:
    """What somebody wants to append; the ledger adds the place, the time and the hashes."""

    kind: Kind
    population: str
    budget: Budget
    run_id: str | None = None
    events: Sequence[Mapping[str, Any]] = ()
    about: Mapping[str, object] = field(default_factory=dict)
    block: str = WHOLE_POPULATION


@dataclass(frozen=True)
class Entry:
    """A row as it is stored.

    seq: 1, 2, 3 without gaps. epsilon: None when it is not finite. events, about: canonical JSON text.
    written_at: UTC, ISO 8601. previous_hash: the hash of row seq - 1, GENESIS for the first row.
    written_by: the database's user, or the system's for a file; None in rows of version 0.2, whose hash has no name.
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
        """The head of a chain that ends here."""
        return Head(self.seq, self.hash)

    @property
    def budget(self) -> Budget:
        """The row's epsilon and delta: a cap, a reservation or a spend."""
        return Budget(math.inf if self.epsilon is None else self.epsilon, self.delta)

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object, with events and about as objects rather than text."""
        return vars(self) | {"events": json.loads(self.events), "about": json.loads(self.about)}


def seal(draft: Draft, *, after: Head, written_at: str, written_by: str) -> Entry:
    """The row that appends `draft` to a chain that ends at `after`; raises RefusedError when it has no JSON."""
    epsilon = float(draft.budget.epsilon)
    row: dict[str, Any] = {
        "seq": after.seq + 1,
        "kind": draft.kind,
        "population": draft.population,
        "block": draft.block,
        "run_id": draft.run_id,
        "epsilon": epsilon + 0.0 if math.isfinite(epsilon) else None,  # + 0.0: SQLite keeps no negative zero
        "delta": float(draft.budget.delta) + 0.0,
        "events": _json_text(list(draft.events)),
        "about": _json_text(dict(draft.about)),
        "written_at": written_at,
        "previous_hash": after.hash,
        "written_by": written_by,
    }
    return Entry(**row, hash=_digest(row))


def is_intact(entry: Entry) -> bool:
    """Whether a row has the content that its hash is of."""
    return entry.hash == _digest(vars(entry))


def follow(entries: Iterable[Entry], *, name: str, after: Head = NOTHING) -> Iterator[Entry]:
    """The same rows, each after it was found to continue the chain; `name` is how the message calls the ledger.

    after: where the chain ends that they continue. Raises LedgerBrokenError at the first row whose place, content or
    predecessor is not what its hash says.
    """
    seq, previous = after
    for entry in entries:
        seq += 1
        if entry.seq != seq or entry.previous_hash != previous or not is_intact(entry):
            raise LedgerBrokenError(
                f"the hash chain of the ledger {name} breaks at row {seq}: that row was changed, removed or"
                " inserted outside the ledger; restore the ledger from a copy whose chain holds."
            )
        previous = entry.hash
        yield entry


def _digest(row: Mapping[str, Any]) -> str:
    row = {
        key: value
        for key, value in row.items()
        if key != "hash" and (key != "written_by" or value is not None)
    }
    text = json.dumps(row, sort_keys=True, separators=(",", ":"), default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _json_text(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RefusedError(
            f"the events and the notes of a ledger entry must be JSON with finite numbers: {error}."
        ) from None
