"""The state of a ledger as tables next to the chain, so that a write need not read the whole chain.

The tables are written in the transaction that appends to the chain, and hold what a replay of the chain would give;
`Ledger.verify` replays it and compares. Only the needed part of the state is loaded: one population without the runs
that have ended, and of its blocks those that a write is about. Amounts are exact fractions as text.

Statements go to the database with as few round trips as possible, see `exchange`.
"""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypedDict

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.exc import DBAPIError

from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger.composition import WHOLE_POPULATION, Amount, Terms
from algorithms.privacy.ledger.rows import Entry, Head
from algorithms.privacy.ledger.state import STATES, AccountKey, LedgerState, ReservedRun, contents, replay

_MAX_EXCHANGED = 50

Statement = tuple[sa.TextClause, Mapping[str, object]]
Row: TypeAlias = dict[str, str | int | float | None]
"""A row of one of the tables, by column."""


class StateJson(TypedDict):
    """A state as JSON: rows of the three tables."""

    populations: list[Row]
    accounts: list[Row]
    runs: list[Row]


def exchange(connection: Connection, statements: Sequence[Statement]) -> list[Sequence[Any]]:
    """The rows that each statement returns; none for a statement that is not a query.

    On PostgreSQL, where writers wait for each other's turns and a turn mostly waits for answers, they are sent as one
    message, in which statements begin and end transactions; after a failed statement the others do nothing. SQLite runs
    in this process and gets one at a time. Raises DBAPIError.
    """
    if connection.dialect.name != "postgresql":
        # Texts as SQLite reads them, names of values included: SQLAlchemy's own form would take as long again.
        results = (connection.exec_driver_sql(statement.text, {**values}) for statement, values in statements)
        return [rows.all() if rows.returns_rows else () for rows in results]
    driver: Any = connection.dialect.loaded_dbapi
    try:
        # A cursor that fills in parameters itself: the server takes several statements only without any.
        cursor = driver.ClientCursor(connection.connection.driver_connection)
        texts = [
            cursor.mogrify(_sql(statement, connection.dialect), values) for statement, values in statements
        ]
        cursor.execute(";".join(texts))
        return [cursor.fetchall() if cursor.description else () for _ in cursor.results()]
    except driver.Error as error:
        raise _failure(connection, error) from None


@lru_cache(maxsize=256)
def _sql(statement: sa.TextClause, dialect: Dialect) -> str:
    return str(statement.compile(dialect=dialect))


def _failure(connection: Connection, error: Exception) -> DBAPIError:
    """An error in SQLAlchemy's form; a lost connection is not returned to the pool."""
    dialect = connection.dialect
    is_lost = dialect.is_disconnect(error, connection.connection, None)  # type: ignore[arg-type]
    failure = DBAPIError.instance(
        None, None, error, dialect.loaded_dbapi.Error, connection_invalidated=is_lost, dialect=dialect
    )
    if is_lost:
        connection.invalidate(error)
    assert isinstance(failure, DBAPIError)
    return failure


def head_of(connection: Connection) -> Head:
    """The row up to which the balances are computed."""
    return Head(*connection.execute(HEAD_OF).one())


def names(connection: Connection) -> list[str]:
    """The populations, in the order of their declaration."""
    return list(connection.execute(_POPULATIONS).scalars())


class _AccountRow(NamedTuple):
    terms: str
    allowed: str
    adjacency: str | None
    population: str
    block: str
    epsilon: float
    delta: float
    retired: int
    charges: int
    open: str
    settled: str
    forfeited: str


@dataclass(frozen=True)
class StatePart:
    """The part of the state that is needed: a population with its accounts and open runs, and what is asked for.

    Attributes:
        population: Its name.
        run: A run that is needed, of any population.
        retraining: The scheduled retraining whose run is needed.
        content_digests: Of blocks, see `Ledger.reserve`; None if no digests are needed.
        blocks: Blocks whose accounts are enough, with that of the whole population; None for all. With them, no other
            open runs are loaded, and no digests but those of the blocks in `content_digests` and of blocks of the same
            content.
    """

    population: str
    run: str | None = None
    retraining: object = None
    content_digests: Mapping[str, Sequence[str]] | None = None
    blocks: Collection[str] | None = None

    def whole(self) -> "StatePart":
        """The same with all accounts, open runs and digests of the population."""
        return replace(self, blocks=None)

    def queries(self, dialect: str) -> list[Statement]:
        """The queries: for the accounts, for runs, and for digests if they are needed."""
        population = {"population": self.population}
        runs = population | {"run": self.run, "retraining": self.retraining}
        if self.blocks is None:
            queries: list[Statement] = [(_ACCOUNTS, population), (_RUNS, runs)]
            return [*queries, (_HELD, population)] if self.content_digests is not None else queries
        accounts = population | {"blocks": _list([*self.blocks, WHOLE_POPULATION], dialect)}
        queries = [(_NAMED_ACCOUNTS[dialect], accounts), (_ASKED_RUNS, runs)]
        if self.content_digests is None:
            return queries
        digests = [digest for block in self.content_digests.values() for digest in contents(block)]
        held = {"digests": _list(digests, dialect), "names": _list([*self.content_digests], dialect)}
        return [*queries, (_NAMED_HELD[dialect], population | held)]

    def state(self, connection: Connection, answers: Sequence[Sequence[Any]]) -> LedgerState:
        """The state from the queries' answers."""
        state = LedgerState()
        accounts = [_AccountRow(*row) for row in answers[0]]
        if not accounts:
            # A message names some that there are, and a new name must not be one of them in another case.
            for row in connection.execute(_ALL_POPULATIONS):
                _read_population(state, row)
            return state
        _read_population(state, accounts[0])
        for account in accounts:
            _open_account(state, account)
        state.runs = {run_id: _run_of(text) for run_id, text in answers[1]}
        for block, digest in answers[2] if self.content_digests is not None else ():
            block_account = self.population, block
            state.content_digests[block_account] = state.content_digests.get(block_account, frozenset()) | {
                digest
            }
        return state


def load(connection: Connection, part: StatePart) -> LedgerState:
    """Load a part of the state."""
    return part.state(connection, exchange(connection, part.queries(connection.dialect.name)))


def differing_run(connection: Connection, runs: Mapping[str, ReservedRun]) -> str | None:
    """The name of a run that is stored differently; None if all are equal."""
    saved = _texts(connection, runs)
    for run_id, run in runs.items():
        text = saved.get(run_id)
        if text is None or (text != _run_text(run) and _run_of(text) != run):
            return run_id
    return None


def _texts(connection: Connection, run_ids: Collection[str]) -> dict[str, str]:
    """Runs in their stored form."""
    dialect = connection.dialect.name
    return dict(exchange(connection, [(_NAMED_RUNS[dialect], {"names": _list(run_ids, dialect)})])[0])


def _list(texts: Collection[str], dialect: str) -> object:
    """Texts as the value of a list in `_in_each`."""
    return [*texts] if dialect == "postgresql" else json.dumps([*texts])


def find_run(connection: Connection, run_id: str) -> ReservedRun | None:
    """A run; None if the ledger does not know it."""
    text = _texts(connection, [run_id]).get(run_id)
    return None if text is None else _run_of(text)


def apply_rows(state: LedgerState, entries: Sequence[Entry]) -> list[Statement]:
    """Apply rows to a state that holds their populations and runs; the last row is the head.

    Returns the statements that write the changes. Raises RefusedError for a row that another version wrote.
    """
    # As they are before `replay` changes the state: only what differs afterwards is written.
    populations, open_already = set(state.adjacencies), set(state.caps)
    before = {name: _population_row(state, name) for name in state.terms}
    replay(entries, state=state)
    declared = [entry for entry in entries if entry.run_id is None]
    charged = [entry for entry in entries if entry.run_id is not None]
    reserved = [entry for entry in charged if entry.kind == "reserve"]
    # A population and a block keep the place of their first row, in whose order they are listed.
    first: dict[str, int] = {}
    first_rows: dict[AccountKey, int] = {}
    for entry in declared:
        first.setdefault(entry.population, entry.seq)
        first_rows.setdefault((entry.population, entry.block), entry.seq)
    held = [
        {"population": entry.population, "block": entry.block, "digest": digest}
        for entry in reserved
        for digest in json.loads(entry.about).get("held", ())
    ]
    terms = [row for name in first if (row := _population_row(state, name)) != before.get(name)]
    rows = {account: _account_row(state, account) | {"place": seq} for account, seq in first_rows.items()}
    accounts = dict.fromkeys((entry.population, entry.block) for entry in charged)
    runs = dict.fromkeys(entry.run_id for entry in charged if entry.run_id is not None)
    used = {entry.population for entry in reserved} - populations
    changes = (
        # In one transaction: an account is opened before it is charged, a population before its adjacency is set.
        (_ENTER_POPULATION, [row | {"place": first[str(row["population"])]} for row in terms]),
        (_OPEN_ACCOUNT, [row for account, row in rows.items() if account not in open_already]),
        (_SET_CAP, [row for account, row in rows.items() if account in open_already]),
        (_CHARGE, [_account_row(state, account) for account in accounts]),
        (_ENTER_RUN, [_run_row(run_id, state.runs[run_id]) for run_id in runs]),
        (_FIRST_ADJACENCY, [{"population": name, "adjacency": state.adjacencies[name]} for name in used]),
        (_ENTER_HELD, held),
        (_SET_HEAD, [entries[-1].head._asdict()]),
    )
    return [(statement, row) for statement, rows_of_change in changes for row in rows_of_change]


def fill(connection: Connection, pages: Iterable[Sequence[Entry]]) -> None:
    """Fill empty tables from the rows of a chain, page by page, with bounded memory."""
    state = LedgerState()
    for page in pages:
        named = _texts(connection, {entry.run_id for entry in page if entry.run_id})
        state.runs = {run_id: _run_of(text) for run_id, text in named.items()}
        _execute(connection, apply_rows(state, page))


def _execute(connection: Connection, changes: Sequence[Statement]) -> None:
    """Combine many equal statements into one, since an exchange holds the text of each in memory."""
    for statement, group in groupby(changes, key=itemgetter(0)):
        rows = [row for _, row in group]
        if len(rows) > _MAX_EXCHANGED:
            connection.execute(statement, rows)
        else:
            exchange(connection, [(statement, row) for row in rows])


def differing(connection: Connection, state: LedgerState) -> str | None:
    """The first difference between a replayed state and the tables, in words; None if there is none. Ended runs are not
    compared here.
    """
    accounts: dict[str, set[AccountKey]] = {}
    for account in state.caps:
        accounts.setdefault(account[0], set()).add(account)
    populations = connection.execute(_POPULATIONS).all()
    for population, seq in populations:
        saved = load(connection, StatePart(population))
        if population not in state.terms or saved.terms[population] != state.terms[population]:
            return f"the terms of population {population!r} (row {seq})"
        if saved.caps.keys() != accounts[population] or saved.adjacencies.get(
            population
        ) != state.adjacencies.get(population):
            return f"the blocks of population {population!r}"
        if {pair for pair in state.exemptions if pair[0] == population} != saved.exemptions:
            return f"what was overruled in population {population!r}"
        for account in sorted(accounts[population]):
            if _account_row(state, account) != _account_row(saved, account):
                return f"the balance of population {population!r}, block {account[1]!r}"
    if len(populations) != len(state.terms):
        return "the populations"
    # Both ways: each open run of the replay is stored as it is, and no other is stored as open.
    still_open = {name: run for name, run in state.runs.items() if run.status == "open"}
    if {*connection.execute(_OPEN_RUNS).scalars()} != still_open.keys() or differing_run(
        connection, still_open
    ):
        return "the open runs"
    return None


def to_document(state: LedgerState) -> StateJson:
    """A state as JSON values, without the digests of blocks' content, which no balance depends on."""
    return {
        "populations": [
            _population_row(state, name) | {"adjacency": state.adjacencies.get(name)} for name in state.terms
        ],
        "accounts": [_account_row(state, account) for account in state.caps],
        "runs": [_run_row(run_id, run) for run_id, run in state.runs.items()],
    }


def from_document(document: StateJson) -> LedgerState:
    """The inverse of `to_document`."""
    state = LedgerState()
    for row in document["populations"]:
        _read_population(state, SimpleNamespace(**row))
    for row in document["accounts"]:
        _open_account(state, SimpleNamespace(**row))
    state.runs = {str(row["run_id"]): _run_of(str(row["run"])) for row in document["runs"]}
    return state


def _read_population(state: LedgerState, row: Any) -> None:
    state.terms[row.population] = Terms.from_notes(json.loads(row.terms))
    state.exemptions |= {(row.population, frozenset(pair)) for pair in json.loads(row.allowed)}
    if row.adjacency is not None:
        state.adjacencies[row.population] = row.adjacency


def _open_account(state: LedgerState, row: Any) -> None:
    account = row.population, row.block
    state.caps[account] = Budget(row.epsilon, row.delta)
    if row.retired:
        state.retired.add(account)
    sums = {status: _amount(getattr(row, status)) for status in STATES}
    state.sums[account] = {status: amount for status, amount in sums.items() if amount}
    state.charges[account] = row.charges


def _population_row(state: LedgerState, population: str) -> Row:
    pairs = sorted(sorted(pair) for name, pair in state.exemptions if name == population)
    terms = canonical(state.terms[population].to_notes())
    return {"population": population, "terms": terms, "allowed": canonical(pairs)}


def _account_row(state: LedgerState, account: AccountKey) -> Row:
    cap, sums, charges = state.caps[account], state.sums.get(account, {}), state.charges.get(account, 0)
    row: Row = {status: _text(sums.get(status, ())) for status in STATES}
    row |= {"population": account[0], "block": account[1], "charges": charges}
    return row | {"epsilon": cap.epsilon, "delta": cap.delta, "retired": int(account in state.retired)}


def _run_row(run_id: str, run: ReservedRun) -> Row:
    return {
        "run_id": run_id,
        "run": _run_text(run),
        "population": run.population,
        "status": run.status,
        "retraining": run.retraining,
    }


def _run_text(run: ReservedRun) -> str:
    """A run as text; blocks keep the order of the run's rows."""
    budgets = {"reserved": _pair(run.reserved), "charged": _pair(run.charged)}
    amounts = {block: _text(amount) for block, amount in run.amounts.items()}
    return json.dumps(run._asdict() | budgets | {"amounts": amounts})


def _run_of(text: str) -> ReservedRun:
    document = json.loads(text)
    budgets = {name: _budget(document[name]) for name in ("reserved", "charged")}
    amounts = {block: _amount(amount) for block, amount in document["amounts"].items()}
    return ReservedRun(**document | budgets | {"amounts": amounts})


def _text(amount: Amount) -> str:
    return " ".join(map(str, amount))


def _amount(text: str) -> Amount:
    return tuple(map(Fraction, text.split()))


def _pair(budget: Budget) -> list[float | None]:
    return [budget.epsilon if math.isfinite(budget.epsilon) else None, budget.delta]


def _budget(pair: Sequence[float | None]) -> Budget:
    return Budget(math.inf if pair[0] is None else pair[0], pair[1] or 0.0)


def canonical(value: object) -> str:
    """A value as JSON text, always in the same form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


HEAD_OF = sa.text("SELECT seq, hash FROM epsilonflow_head")
_SET_HEAD = sa.text("UPDATE epsilonflow_head SET seq = :seq, hash = :hash")
_POPULATIONS = sa.text("SELECT population, place FROM epsilonflow_population ORDER BY place")
_OPEN_RUNS = sa.text("SELECT run_id FROM epsilonflow_run WHERE status = 'open'")


def _in_each(query: str) -> Mapping[str, sa.TextClause]:
    """A query for each dialect, in which `IN [name]` looks in a list."""
    forms = {"postgresql": r"= ANY(:\1)", "sqlite": r"IN (SELECT value FROM json_each(:\1))"}
    return {dialect: sa.text(re.sub(r"IN \[(\w+)\]", form, query)) for dialect, form in forms.items()}


_ACCOUNTS_OF = (
    f"SELECT {', '.join(_AccountRow._fields).replace('population', 'a.population')}"
    " FROM epsilonflow_population p JOIN epsilonflow_account a ON a.population = p.population"
    " WHERE p.population = :population {} ORDER BY a.place, block"
)
_ACCOUNTS = sa.text(_ACCOUNTS_OF.format(""))
_NAMED_ACCOUNTS = _in_each(_ACCOUNTS_OF.format("AND block IN [blocks]"))
_HELD = sa.text("SELECT block, digest FROM epsilonflow_held WHERE population = :population")
_NAMED_HELD = _in_each(
    "SELECT block, digest FROM epsilonflow_held WHERE population = :population"
    " AND (digest IN [digests] OR block IN [names])"
)
_RUNS_OF = (
    "SELECT run_id, run FROM epsilonflow_run WHERE run_id = :run {}"  # each by an index of its own
    " OR population = :population AND retraining = :retraining ORDER BY run_id"
)
_RUNS = sa.text(_RUNS_OF.format("OR population = :population AND status = 'open'"))
_ASKED_RUNS = sa.text(_RUNS_OF.format(""))
_ALL_POPULATIONS = sa.text("SELECT * FROM epsilonflow_population ORDER BY place")
_NAMED_RUNS = _in_each("SELECT run_id, run FROM epsilonflow_run WHERE run_id IN [names]")
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
