"""One row of the ledger, and the hash chain that binds every row to the one before it.

Nothing here knows of a database. A row's hash is SHA-256 over the row's canonical JSON, which holds the hash
of the row before it. So a row that was edited, removed or inserted later breaks the chain at its place. Rows
missing at the end leave a shorter chain that still holds: only a head kept elsewhere (a receipt) shows that.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.accounting.budget import Budget

Kind = Literal["population", "cap", "reserve", "settle", "forfeit"]
KINDS: tuple[str, ...] = get_args(Kind)
GENESIS = "0" * 64
WHOLE_POPULATION = "all"


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

    @property
    def budget(self) -> Budget:
        """The row's epsilon and delta: a cap, a reservation or a spend."""
        return Budget(math.inf if self.epsilon is None else self.epsilon, self.delta)

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object, with events and about as objects rather than text."""
        return vars(self) | {"events": json.loads(self.events), "about": json.loads(self.about)}


def seal(draft: Draft, *, entries: Sequence[Entry], written_at: str) -> Entry:
    """The row that appends `draft` to a chain of entries; raises RefusedError when its JSON cannot be written."""
    epsilon = float(draft.budget.epsilon)
    row: dict[str, Any] = {
        "seq": len(entries) + 1,
        "kind": draft.kind,
        "population": draft.population,
        "block": draft.block,
        "run_id": draft.run_id,
        "epsilon": epsilon + 0.0 if math.isfinite(epsilon) else None,  # + 0.0: SQLite keeps no negative zero
        "delta": float(draft.budget.delta) + 0.0,
        "events": _json_text(list(draft.events)),
        "about": _json_text(dict(draft.about)),
        "written_at": written_at,
        "previous_hash": head(entries),
    }
    return Entry(**row, hash=_digest(row))


def head(entries: Sequence[Entry]) -> str:
    """The hash of the last row, which stands for the whole chain; GENESIS when there is none."""
    return entries[-1].hash if entries else GENESIS


def verify(entries: Sequence[Entry], *, name: str, known: int = 0) -> None:
    """Recomputes the chain, but for the first `known` rows; `name` is how the message calls the ledger.

    Raises LedgerBrokenError at the first row whose place, content or predecessor is not what its hash says.
    """
    previous = entries[known - 1].hash if known else GENESIS
    for place, entry in enumerate(entries[known:], start=known + 1):
        row = {key: value for key, value in vars(entry).items() if key != "hash"}
        if entry.seq != place or entry.previous_hash != previous or entry.hash != _digest(row):
            raise LedgerBrokenError(
                f"the hash chain of the ledger {name} breaks at row {place}: that row was changed, removed or"
                " inserted outside the ledger; restore the ledger from a copy whose chain holds."
            )
        previous = entry.hash


def _digest(row: Mapping[str, Any]) -> str:
    text = json.dumps(row, sort_keys=True, separators=(",", ":"), default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _json_text(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RefusedError(
            f"the events and the notes of a ledger entry must be JSON with finite numbers: {error}."
        ) from None
