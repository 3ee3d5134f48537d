"""The rows of a ledger, the hash chain that binds each to the one before it, and what they add up to for each block.

A row's hash is the SHA-256 of its canonical JSON, which contains the hash of the row before it. So a row that was
edited, removed or inserted breaks the chain at its position. Rows missing at the end leave a shorter valid chain, which
only a head kept elsewhere (in a receipt) reveals. Nothing here knows a database.

Sums are exact: every number counts as the decimal that a person reads (three times 0.1 is 0.3). A sum fits if it
exceeds the cap by at most one part in 10^12, so that rounding refuses no run exactly at the cap.

A charge to the whole population counts in each of its blocks. If a person may have records in k blocks, every charge
counts k times, so that a block's balance holds for a person with records in k blocks.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from json.encoder import encode_basestring_ascii as _quote
from typing import Final, Literal, NamedTuple

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger.composition import (
    BASIC,
    WHOLE_POPULATION,
    Amount,
    Composition,
    Events,
    RowNotes,
    Terms,
    plus,
    times,
)
from algorithms.privacy.ledger.policy import BlockBalance

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


Status = Literal["open", "settled", "forfeited"]
STATES: tuple[Status, ...] = ("open", "settled", "forfeited")
AccountKey = tuple[str, str]
"""A population and one of its blocks."""

ADJACENCY = "ADD_OR_REMOVE_ONE"
"""The adjacency of a run whose notes name none."""
NOISE_KEY: Final = "noise_key"
"""The note of a reservation with a digest of the key of its noise, of which a run has one."""
ROUNDING = Fraction(1, 10**12)
NAMES_IN_A_MESSAGE = 10
_SCHEME = "way:"
"""How a digest begins that says how the others of its block were made; see `Ledger.reserve`.

`data.reading` has the same, as neither package imports the other.
"""


class ReservedRun(NamedTuple):
    """A reservation and its present state.

    Attributes:
        population: That the run is charged to.
        reserved: What it reserved.
        charged: The cost that counts now.
        status: Open, settled or forfeited.
        amounts: The amount that counts in each of its blocks.
        adjacency: What its events are accounted under.
        retraining: The scheduled retraining that it belongs to.
        model: The SHA-256 of its model.
        noise_key: A digest of the key of its noise.
    """

    population: str
    reserved: Budget
    charged: Budget
    status: Status
    amounts: Mapping[str, Amount]
    adjacency: str
    retraining: str | None = None
    model: str | None = None
    noise_key: str | None = None


@dataclass
class LedgerState:
    """The state of a ledger after its rows; a cap belongs to an account, which is a population and a block."""

    terms: dict[str, Terms] = field(default_factory=dict)
    caps: dict[AccountKey, Budget] = field(default_factory=dict)
    retired: set[AccountKey] = field(default_factory=set)
    adjacencies: dict[str, str] = field(default_factory=dict)
    content_digests: dict[AccountKey, frozenset[str]] = field(default_factory=dict)
    """The keyed digests of a block's content at all reservations on it."""
    exemptions: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    """By decision of the data's owner: a population with a pair of blocks that may hold the same records, or with one
    that may change its content."""
    runs: dict[str, ReservedRun] = field(default_factory=dict)
    sums: dict[AccountKey, dict[Status, Amount]] = field(default_factory=dict)
    """The amounts of an account's runs by status."""
    charges: dict[AccountKey, int] = field(default_factory=dict)
    """The number of runs that were ever reserved in an account."""

    def add(self, entry: Entry) -> None:
        """Add a verified row; rows must come in order."""
        notes: RowNotes = json.loads(entry.about)
        match entry.kind:
            case "reserve":
                self._reserve(entry, notes)
            case "settle":
                self._end(entry, notes, "settled")
            case "forfeit":
                self._end(entry, notes, "forfeited")
            case "population":
                self.terms[entry.population] = Terms.from_notes(notes)
                self.caps[entry.population, entry.block] = entry.budget
            case "cap" if notes.get("retired"):
                self.retired.add((entry.population, entry.block))
            case "cap" if overruled := notes.get("overruled"):
                self.exemptions.add((entry.population, frozenset(overruled)))
            case "cap":
                self.caps[entry.population, entry.block] = entry.budget
                bound, terms = notes.get("bound", {}), self.terms[entry.population]
                is_charged = self.is_charged(entry.population)
                self.terms[entry.population] = terms.binding(bound, is_charged=is_charged)

    def term(self, population: str) -> Terms:
        """The terms of a population; raises RefusedError for an unknown one."""
        if population not in self.terms:
            names = ", ".join(map(repr, islice(self.terms, NAMES_IN_A_MESSAGE))) or "none yet"
            raise RefusedError(
                f"the ledger has no population {population!r} (it has {names}); the first run on one declares it."
            )
        return self.terms[population]

    def blocks(self, population: str) -> list[str]:
        """The declared blocks, in order, retired ones included; raises RefusedError for an unknown population."""
        self.term(population)
        return [block for name, block in self.caps if name == population and block != WHOLE_POPULATION]

    def cap(self, population: str, block: str = WHOLE_POPULATION) -> Budget:
        """The cap in force; raises RefusedError for an unknown population or block."""
        self.term(population)
        if (population, block) not in self.caps:
            names = ", ".join(map(repr, self.blocks(population))) or "none yet"
            raise RefusedError(
                "population {population!r} has no block {block!r} (it has {known}); declare it, or let the first"
                " run on it do so.",
                code="block_unknown",
                population=population,
                block=block,
                known=names,
            )
        return self.caps[population, block]

    def limit(self, population: str, block: str) -> Amount:
        """The amount that the cap allows."""
        return self.term(population).composition.amount_of(self.cap(population, block))

    def charged_amount(self, population: str, block: str, *states: Status) -> Amount:
        """The amount of all runs in these states in a block, including runs on the whole population."""
        total = self.term(population).composition.nothing()
        for name in {block, WHOLE_POPULATION}:  # a set: without blocks both are one
            for status, amount in self.sums.get((population, name), {}).items():
                total = plus(total, amount) if status in states else total
        return total

    def remaining(self, population: str, block: str) -> Amount:
        """The amount that can still be charged; negative if a cap was lowered."""
        charged = self.charged_amount(population, block, *STATES)
        # Ten runs at a tenth of a cap fit, though a tenth of it is rounded up as a floating-point number.
        rounded = times(self.limit(population, block), 1 + ROUNDING)
        return plus(rounded, charged, sign=-1)

    def how_many(self, population: str, block: str, charge: Amount) -> int | None:
        """How many such charges fit: the least, over the numbers of an amount, of what is left over what one takes.

        None for a charge of nothing, which always fits, and 0 if the cap is exceeded already.
        """
        room = self.remaining(population, block)
        if min(room) < 0 or (population, block) in self.retired:
            return 0
        # `//` of fractions gives whole numbers.
        return min((left // part for left, part in zip(room, charge, strict=True) if part), default=None)

    def is_charged(self, population: str) -> bool:
        """Whether a run was ever reserved in a population."""
        return population in self.adjacencies

    def run_of(self, population: str, retraining: str) -> str | None:
        """The run of a scheduled retraining of a population; None if there is none."""
        key = population, retraining
        names = (name for name, run in self.runs.items() if (run.population, run.retraining) == key)
        return next(names, None)

    def repeats(self, population: str, content_digests: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
        """For each block with digests, the other blocks that hold exactly the same records, by all reservations.

        Pairs that the data's owner allowed, and blocks without a repeat, are left out.
        """
        known = {
            block: digests for (name, block), digests in self.content_digests.items() if name == population
        }
        known |= {
            block: known.get(block, frozenset()).union(digests) for block, digests in content_digests.items()
        }
        contents_by_block = {block: contents(digests) for block, digests in content_digests.items()}
        repeated = {
            block: [
                other
                for other, theirs in known.items()
                if other != block
                and not theirs.isdisjoint(mine)
                and (population, frozenset((block, other))) not in self.exemptions
            ]
            for block, mine in contents_by_block.items()
        }
        return {block: others for block, others in repeated.items() if others}

    def _reserve(self, entry: Entry, notes: RowNotes) -> None:
        account, run_id = (entry.population, entry.block), entry.run_id or ""
        adjacency = adjacency_of(notes)
        self.adjacencies.setdefault(entry.population, adjacency)
        amount = self.terms[entry.population].charge(entry.budget, notes)
        # A run has a row for each of its blocks: the first makes it, the others add their amounts.
        run = self.runs.get(run_id) or ReservedRun(
            entry.population,
            entry.budget,
            entry.budget,
            "open",
            {},
            adjacency,
            notes.get("retraining"),
            noise_key=notes.get(NOISE_KEY),
        )
        self.runs[run_id] = run._replace(amounts={**run.amounts, entry.block: amount})
        if "held" in notes:
            self.content_digests[account] = self.content_digests.get(account, frozenset()).union(
                notes["held"]
            )
        self.charges[account] = self.charges.get(account, 0) + 1
        self._move(account, amount, "open")

    def _end(self, entry: Entry, notes: RowNotes, status: Status) -> None:
        run = self.runs[entry.run_id or ""]
        # What a run was not charged for when it was reserved (infinite epsilon), it is not charged for when it ends.
        amount = before = run.amounts[entry.block]
        if status == "settled" and any(before):
            amount = self.terms[entry.population].charge(entry.budget, notes)
        self.runs[entry.run_id or ""] = run._replace(
            charged=entry.budget if status == "settled" else run.charged,
            status=status,
            amounts={**run.amounts, entry.block: amount},
            model=notes.get("model"),
        )
        account = entry.population, entry.block
        # From the open runs' sum to that of its end, so that it counts once.
        self._move(account, before, "open", sign=-1)
        self._move(account, amount, status)

    def _move(self, account: AccountKey, amount: Amount, status: Status, sign: int = 1) -> None:
        sums = self.sums.setdefault(account, {})
        sums[status] = plus(sums.get(status, (Fraction(0),) * len(amount)), amount, sign)


def replay(entries: Iterable[Entry], *, state: LedgerState | None = None) -> LedgerState:
    """The state that verified rows add up to, on top of the state after the rows before them, which is changed.

    Raises RefusedError for a row that another version wrote.
    """
    state = LedgerState() if state is None else state
    for entry in entries:
        try:
            state.add(entry)
        except KeyError:
            raise RefusedError(
                f"row {entry.seq} of the ledger was written by another version of epsilonflow, whose rows this one does"
                " not read; use that one, or let the owner of the data begin a new ledger."
            ) from None
    return state


def adjacency_of(notes: RowNotes) -> str:
    """The adjacency in the notes of a run."""
    return str(notes.get("adjacency", ADJACENCY))


@dataclass(frozen=True)
class Balance:
    """Balance of a population or block for the worst-case person, who is in as many blocks as one may be.

    Runs without noise on public records are in none of the amounts. Under zCDP and Rényi each is the epsilon that its
    amount alone has at the cap's delta, so spent, reserved and remaining do not add up to the cap.

    Attributes:
        population: Its name.
        cap: What all runs together may spend.
        public: Whether the records are.
        spent: By settled and forfeited runs.
        reserved: By open runs.
        remaining: What the cap leaves, at least 0.
        block: Its name, or `WHOLE_POPULATION`.
        composition: How runs add up.
        blocks_per_person: In how many blocks a person may have records; every charge counts so often.
        retired: Whether no run can use the block again.
    """

    population: str
    cap: Budget
    public: bool
    spent: Budget
    reserved: Budget
    remaining: Budget
    block: str = WHOLE_POPULATION
    composition: Composition = BASIC
    blocks_per_person: int = 1
    retired: bool = False


def balance_of(state: LedgerState, population: str, block: str) -> Balance:
    """The balance of a block, or of a population without blocks; raises RefusedError for an unknown one."""
    terms, cap = state.term(population), state.cap(population, block)
    spent = state.charged_amount(population, block, "settled", "forfeited")
    reserved = state.charged_amount(population, block, "open")
    rest = left_of(state.limit(population, block), plus(spent, reserved))
    untouched = not any(plus(spent, reserved))
    return Balance(
        population=population,
        cap=cap,
        public=terms.public,
        spent=terms.composition.as_budget(spent, cap.delta),
        reserved=terms.composition.as_budget(reserved, cap.delta),
        remaining=cap if untouched else terms.composition.as_budget(rest, cap.delta),
        block=block,
        composition=terms.composition,
        blocks_per_person=terms.blocks_per_person,
        retired=(population, block) in state.retired,
    )


def find_fullest_block(state: LedgerState, population: str) -> str:
    """The block of which the greatest share is charged: no person has lost more than its balance says."""

    def share(block: str) -> tuple[bool, Fraction]:
        charged = state.charged_amount(population, block, *STATES)
        pairs = list(zip(charged, state.limit(population, block), strict=True))
        beyond = any(part and not whole for part, whole in pairs)  # charged where the cap is 0
        return beyond, max(part / whole if whole else Fraction(0) for part, whole in pairs)

    return max(state.blocks(population) or [WHOLE_POPULATION], key=share)


def block_views(state: LedgerState, population: str, also: Sequence[str] = ()) -> list[BlockBalance]:
    """The blocks for a policy, in the order of their declaration; the whole population where it has none.

    also: blocks that come last, as they would be declared now, unless they are already.
    """
    blocks, declared = [], state.blocks(population)
    for name in [*declared, *(name for name in also if name not in declared)] or [WHOLE_POPULATION]:
        account = name if name in declared else WHOLE_POPULATION
        limit, charged = state.limit(population, account), state.charged_amount(population, account, *STATES)
        left = _floats(left_of(limit, charged))
        is_retired = (population, name) in state.retired
        blocks.append(
            BlockBalance(name, _floats(limit), left, state.charges.get((population, name), 0), is_retired)
        )
    return blocks


def affordable_runs(
    state: LedgerState, population: str, cost: Budget, events: Events, adjacency: str, blocks: Sequence[str]
) -> int | None:
    """How many more runs of this cost fit into all of the blocks, every living one when none are named.

    None when there is no limit. Raises RefusedError for an unknown population or block, and for events without a bound.
    """
    terms = state.term(population)
    if math.isinf(cost.epsilon) and not terms.public:
        return 0
    named = blocks or _living(state, population)
    charge = terms.planned_charge(cost, events, adjacency, named)
    counts = [state.how_many(population, block, charge) for block in named]
    return min((count for count in counts if count is not None), default=None if counts else 0)


def spent_after(
    state: LedgerState,
    population: str,
    cost: Budget,
    events: Events,
    adjacency: str,
    blocks: Sequence[str],
    runs: Sequence[int],
) -> tuple[Budget, ...]:
    """What is spent or reserved after these numbers of further runs, in the most charged of the blocks.

    blocks: those that each run reads; none for all that are not retired. Raises what `affordable_runs` raises, and
    RefusedError if no block is left.
    """
    terms, named = state.term(population), blocks or _living(state, population)
    if not named:
        raise RefusedError(f"every block of population {population!r} is retired; add blocks.")
    charges = dict.fromkeys(named, terms.planned_charge(cost, events, adjacency, named))
    return tuple(spent_with(state, population, charges, count) for count in runs)


def spent_with(state: LedgerState, population: str, charges: Mapping[str, Amount], runs: int) -> Budget:
    """What is spent or reserved, in the most charged of some blocks, after runs that each charge them these amounts."""
    composition = state.term(population).composition

    def after(block: str, charge: Amount) -> Budget:
        total = plus(state.charged_amount(population, block, *STATES), times(charge, runs))
        return composition.as_budget(total, state.cap(population, block).delta)

    return max((after(*pair) for pair in charges.items()), key=lambda spent: spent.epsilon)


def _living(state: LedgerState, population: str) -> list[str]:
    return [block.name for block in block_views(state, population) if not block.retired]


def left_of(limit: Amount, charged: Amount) -> Amount:
    """What a limit leaves; less than its rounding is nothing."""
    rest = plus(limit, charged, sign=-1)
    return tuple(
        part if part > whole * ROUNDING else Fraction(0) for part, whole in zip(rest, limit, strict=True)
    )


def _floats(amount: Amount) -> tuple[float, ...]:
    return tuple(map(float, amount))


def contents(digests: Iterable[str]) -> frozenset[str]:
    """The digests of content among those of a block.

    Example:
        >>> contents(["way:0a", "1b"])
        frozenset({'1b'})
    """
    return frozenset(digest for digest in digests if not digest.startswith(_SCHEME))


def digest_schemes(digests: Iterable[str]) -> frozenset[str]:
    """Those of a block's digests that say by which key and columns the others were made; only alike ones compare."""
    return frozenset(digest for digest in digests if digest.startswith(_SCHEME))
