"""The books as rows: what the chain adds up to, kept beside it, so that a write need not read the chain again.

Each table is written in the transaction that appends to the chain, and says what a replay of the chain would say:
`Ledger.verify` replays it and compares. Only the part of the books that a question is about is loaded: one
population, the blocks that are named, a run. Amounts are exact fractions as text.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.ledger.books import Account, Books, Run, Status, replay
from algorithms.privacy.ledger.chain import NOTHING, WHOLE_POPULATION, Entry, Head
from algorithms.privacy.ledger.composition import Amount, Terms

STATES: tuple[Status, ...] = ("open", "settled", "forfeited")
_NAMES_IN_A_MESSAGE, _MANY = 10, 50

_METADATA = sa.MetaData()


def _table(name: str, *columns: str) -> sa.Table:
    """A table as the migrations made it; its types are known to the database."""
    return sa.Table(f"epsilonflow_{name}", _METADATA, *(sa.Column(column) for column in columns))


HEAD = _table("head", "one", "seq", "hash")
POPULATION = _table("population", "population", "place", "terms", "allowed", "adjacency")
ACCOUNT = _table("account", "population", "block", "place", "epsilon", "delta", "retired", "charges", *STATES)
RUN = _table("run", "run_id", "population", "status", "retraining", "run")
HELD = _table("held", "population", "block", "digest")
_TABLES = (POPULATION, ACCOUNT, RUN, HELD)


def head_of(connection: Connection) -> Head:
    """Up to which row the balances are."""
    return Head(*connection.execute(_HEAD).one())


def names(connection: Connection, *, limit: int | None = None) -> list[str]:
    """The populations, in the order of their declaration."""
    found = sa.select(POPULATION.c.population).order_by(POPULATION.c.place).limit(limit)
    return list(connection.execute(found).scalars())


def load(
    connection: Connection,
    population: str,
    *,
    blocks: Collection[str] | None = None,
    runs: Collection[str] = (),
    retraining: object = None,
    held: bool = False,
    opened: bool = False,
    scheduled: bool = False,
) -> Books:
    """The books of a population.

    blocks: those of its blocks that are needed, besides the whole; None for all. runs: needed, whatever population they
    are of. retraining: whose run is needed. held: whether the digests of what blocks held are. opened, scheduled:
    whether all open runs are, and all of retrainings.
    """
    books = Books()
    if blocks is None:
        accounts = connection.execute(_ACCOUNTS, {"population": population}).all()
    else:
        named = sorted({*blocks, WHOLE_POPULATION})
        accounts = connection.execute(_SOME_ACCOUNTS, {"population": population, "blocks": named}).all()
    if not accounts:  # the message names some that there are
        for row in connection.execute(_SOME_POPULATIONS):
            _enter(books, row)
        return books
    _enter(books, accounts[0])
    for account in accounts:
        _open_account(books, account)
    conditions: list[sa.ColumnElement[bool]] = [RUN.c.run_id.in_(sorted(runs))] if runs else []
    of_population = RUN.c.population == population
    if retraining is not None:
        conditions.append(of_population & (RUN.c.retraining == retraining))
    if opened:
        conditions.append(of_population & (RUN.c.status == "open"))
    if scheduled:
        conditions.append(of_population & RUN.c.retraining.is_not(None))
    if conditions:
        books.runs = find_runs(connection, sa.or_(*conditions))
    if held:
        for _, block, digest in connection.execute(sa.select(HELD).where(HELD.c.population == population)):
            books.held[population, block] = books.held.get((population, block), frozenset()) | {digest}
    return books


def find_runs(connection: Connection, condition: "sa.ColumnElement[bool]") -> dict[str, Run]:
    """The runs of which a condition holds, by their names."""
    found = connection.execute(sa.select(RUN.c.run_id, RUN.c.run).where(condition).order_by(RUN.c.run_id))
    return {run_id: _run_of(text) for run_id, text in found}


def find_run(connection: Connection, run_id: str) -> Run | None:
    """A run; None where the ledger does not know it."""
    text = connection.execute(_RUN, {"run_id": run_id}).scalar_one_or_none()
    return None if text is None else _run_of(text)


def enter(connection: Connection, books: Books, entries: Sequence[Entry]) -> None:
    """Adds rows to the books, which hold what these are about, and writes what they change; the last one is the head.

    Raises RefusedError for a row that another version wrote.
    """
    known, open_already = set(books.adjacencies), set(books.caps)
    before = {name: _population_row(books, name) for name in books.terms}
    replay(entries, books=books)
    declared = [entry for entry in entries if entry.run_id is None]
    charged = [entry for entry in entries if entry.run_id is not None]
    reserved = [entry for entry in charged if entry.kind == "reserve"]
    first: dict[str, int] = {}
    places: dict[Account, int] = {}
    for entry in declared:
        first.setdefault(entry.population, entry.seq)
        places.setdefault((entry.population, entry.block), entry.seq)
    held = [
        {"population": entry.population, "block": entry.block, "digest": digest}
        for entry in reserved
        for digest in json.loads(entry.about).get("held", ())
    ]
    terms = [row for name in first if (row := _population_row(books, name)) != before.get(name)]
    rows = {account: _account_row(books, account) | {"place": seq} for account, seq in places.items()}
    accounts = dict.fromkeys((entry.population, entry.block) for entry in charged)
    runs = dict.fromkeys(entry.run_id for entry in charged if entry.run_id is not None)
    used = {entry.population for entry in reserved} - known
    changes = (
        (_ENTER_POPULATION, [row | {"place": first[row["population"]]} for row in terms]),
        (_OPEN_ACCOUNT, [row for account, row in rows.items() if account not in open_already]),
        (_SET_CAP, [row for account, row in rows.items() if account in open_already]),
        (_CHARGE, [_account_row(books, account) for account in accounts]),
        (_ENTER_RUN, [_run_row(run_id, books.runs[run_id]) for run_id in runs]),
        (_FIRST_ADJACENCY, [{"population": name, "adjacency": books.adjacencies[name]} for name in used]),
        (_ENTER_HELD, held),
        (_SET_HEAD, [entries[-1].head._asdict()]),
    )
    for statement, given in changes:
        _execute(connection, statement, given)


def catch_up(connection: Connection, pages: Iterable[Sequence[Entry]]) -> None:
    """Enters rows that no balances were kept of, page by page, in a memory that does not grow with them."""
    books, there_are = Books(), set(names(connection))
    for page in pages:
        for population in {entry.population for entry in page} & there_are:
            there_are.discard(population)
            books.join(load(connection, population))
        books.runs = find_runs(connection, RUN.c.run_id.in_({entry.run_id for entry in page if entry.run_id}))
        enter(connection, books, page)


def _execute(connection: Connection, statement: sa.TextClause, rows: Sequence[dict[str, Any]]) -> None:
    """One by one where they are few: psycopg's pipeline of many complains aloud where a transaction is tried again."""
    if len(rows) > _MANY:
        connection.execute(statement, rows)
        return
    for row in rows:
        connection.execute(statement, row)


def clear(connection: Connection) -> None:
    """Forgets all balances, to derive them anew."""
    for table in _TABLES:
        connection.execute(table.delete())
    connection.execute(_SET_HEAD, NOTHING._asdict())


def differing(connection: Connection, books: Books) -> str | None:
    """What of replayed books the tables say otherwise, in words; None where nothing. Runs that have ended are not
    compared here.
    """
    for population, place in connection.execute(sa.select(POPULATION.c.population, POPULATION.c.place)):
        kept = load(connection, population)
        accounts = {account for account in books.caps if account[0] == population}
        if population not in books.terms or kept.terms[population] != books.terms[population]:
            return f"the terms of population {population!r} (row {place})"
        if {*kept.caps} != accounts or kept.adjacencies.get(population) != books.adjacencies.get(population):
            return f"the blocks of population {population!r}"
        if {pair for pair in books.allowed if pair[0] == population} != kept.allowed:
            return f"what was overruled in population {population!r}"
        for account in sorted(accounts):
            if _account_row(books, account) != _account_row(kept, account):
                return f"the balance of population {population!r}, block {account[1]!r}"
    count = connection.execute(sa.select(sa.func.count()).select_from(POPULATION)).scalar_one()
    if count != len(books.terms):
        return "the populations"
    still_open = find_runs(connection, RUN.c.status == "open")
    if still_open != {name: run for name, run in books.runs.items() if run.status == "open"}:
        return "the open runs"
    return None


def to_document(books: Books) -> dict[str, Any]:
    """Books as JSON values; what blocks held, which no balance follows from, is left out."""
    return {
        "populations": [
            _population_row(books, name) | {"adjacency": books.adjacencies.get(name)} for name in books.terms
        ],
        "accounts": [_account_row(books, account) for account in books.caps],
        "runs": [_run_row(run_id, run) for run_id, run in books.runs.items()],
    }


def from_document(document: Mapping[str, Any]) -> Books:
    """The books that `to_document` wrote."""
    books = Books()
    for row in document["populations"]:
        _enter(books, SimpleNamespace(**row))
    for row in document["accounts"]:
        _open_account(books, SimpleNamespace(**row))
    books.runs = {row["run_id"]: _run_of(row["run"]) for row in document["runs"]}
    return books


def _enter(books: Books, row: Any) -> None:
    books.terms[row.population] = Terms.from_json(json.loads(row.terms))
    books.allowed |= {(row.population, frozenset(pair)) for pair in json.loads(row.allowed)}
    if row.adjacency is not None:
        books.adjacencies[row.population] = row.adjacency


def _open_account(books: Books, row: Any) -> None:
    account = row.population, row.block
    books.caps[account] = Budget(row.epsilon, row.delta)
    if row.retired:
        books.retired.add(account)
    sums = {status: _amount(getattr(row, status)) for status in STATES}
    books.set_account(account, {status: amount for status, amount in sums.items() if amount}, row.charges)


def _population_row(books: Books, population: str) -> dict[str, Any]:
    pairs = sorted(sorted(pair) for name, pair in books.allowed if name == population)
    terms = _canonical(books.terms[population].to_json())
    return {"population": population, "terms": terms, "allowed": _canonical(pairs)}


def _account_row(books: Books, account: Account) -> dict[str, Any]:
    cap, (sums, charges) = books.caps[account], books.account(account)
    row: dict[str, Any] = {status: _text(sums.get(status, ())) for status in STATES}
    row |= {"population": account[0], "block": account[1], "charges": charges}
    return row | {"epsilon": cap.epsilon, "delta": cap.delta, "retired": int(account in books.retired)}


def _run_row(run_id: str, run: Run) -> dict[str, Any]:
    document = {
        "reserved": _pair(run.reserved),
        "charged": _pair(run.charged),
        "amounts": {block: _text(amount) for block, amount in run.amounts.items()},
        "adjacency": run.adjacency,
        "model": run.model,
        "status": run.status,
        "retraining": run.retraining,
        "population": run.population,
    }
    names = ("population", "status", "retraining")
    # Blocks keep their order, which is that of the run's rows.
    return {"run_id": run_id, "run": json.dumps(document)} | {name: document[name] for name in names}


def _run_of(text: str) -> Run:
    document = json.loads(text)
    budgets = {name: _budget(document[name]) for name in ("reserved", "charged")}
    amounts = {block: _amount(amount) for block, amount in document["amounts"].items()}
    return Run(**document | budgets | {"amounts": amounts})


def _text(amount: Amount) -> str:
    return " ".join(map(str, amount))


def _amount(text: str) -> Amount:
    return tuple(map(Fraction, text.split()))


def _pair(budget: Budget) -> list[float | None]:
    return [budget.epsilon if math.isfinite(budget.epsilon) else None, budget.delta]


def _budget(pair: Sequence[float | None]) -> Budget:
    return Budget(math.inf if pair[0] is None else pair[0], pair[1] or 0.0)


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


_HEAD = sa.text("SELECT seq, hash FROM epsilonflow_head")
_SET_HEAD = sa.text("UPDATE epsilonflow_head SET seq = :seq, hash = :hash")
_JOINED = (
    "SELECT terms, allowed, adjacency, a.* FROM epsilonflow_population p JOIN epsilonflow_account a"
    " ON a.population = p.population WHERE p.population = :population"
)
_ACCOUNTS = sa.text(f"{_JOINED} ORDER BY a.place, block")
_SOME_ACCOUNTS = sa.text(f"{_JOINED} AND block IN :blocks ORDER BY a.place, block").bindparams(
    sa.bindparam("blocks", expanding=True)
)
_SOME_POPULATIONS = sa.text(
    f"SELECT * FROM epsilonflow_population ORDER BY place LIMIT {_NAMES_IN_A_MESSAGE}"
)
_RUN = sa.text("SELECT run FROM epsilonflow_run WHERE run_id = :run_id")
_ENTER_POPULATION = sa.text(
    "INSERT INTO epsilonflow_population (population, place, terms, allowed)"
    " VALUES (:population, :place, :terms, :allowed)"
    " ON CONFLICT (population) DO UPDATE SET terms = excluded.terms, allowed = excluded.allowed"
)
_OPEN_ACCOUNT = sa.text(
    "INSERT INTO epsilonflow_account"
    " (population, block, place, epsilon, delta, retired, charges, open, settled, forfeited)"
    " VALUES (:population, :block, :place, :epsilon, :delta, :retired, :charges, :open, :settled, :forfeited)"
)
_SET_CAP = sa.text(
    "UPDATE epsilonflow_account SET epsilon = :epsilon, delta = :delta, retired = :retired"
    " WHERE population = :population AND block = :block"
)
_CHARGE = sa.text(
    "UPDATE epsilonflow_account SET charges = :charges, open = :open, settled = :settled, forfeited = :forfeited"
    " WHERE population = :population AND block = :block"
)
_ENTER_RUN = sa.text(
    "INSERT INTO epsilonflow_run (run_id, population, status, retraining, run)"
    " VALUES (:run_id, :population, :status, :retraining, :run)"
    " ON CONFLICT (run_id) DO UPDATE SET status = excluded.status, run = excluded.run"
)
_FIRST_ADJACENCY = sa.text(
    "UPDATE epsilonflow_population SET adjacency = :adjacency WHERE population = :population AND adjacency IS NULL"
)
_ENTER_HELD = sa.text(
    "INSERT INTO epsilonflow_held (population, block, digest) VALUES (:population, :block, :digest)"
    " ON CONFLICT DO NOTHING"
)
