"""The ledger in SQLite and PostgreSQL: its life, races, rows that are changed behind it, and the server's roles."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from algorithms.errors import BudgetRefusedError, LedgerBrokenError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Balance, Ledger, NotAllowedError, init
from tests.support.waiting import HANG_SECONDS
from tests.support.warm_processes import warm_context

TABLE = "epsilonflow_ledger"
KINDS = ["population", "reserve", "settle", "reserve", "forfeit", "reserve"]
EVENTS = [{"event": {"type": "GaussianDpEvent", "noise_multiplier": 1.1}, "count": 3}]


def _tamper(url: str, *statements: str) -> None:
    with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def _disarm(url: str) -> None:
    if url.startswith("sqlite"):
        _tamper(url, "DROP TRIGGER epsilonflow_ledger_no_update", "DROP TRIGGER epsilonflow_ledger_no_delete")
    else:
        _tamper(url, "DROP TRIGGER epsilonflow_ledger_append_only ON epsilonflow_ledger")


def _lived(url: str) -> Ledger:
    ledger = Ledger.open(url)
    ledger.declare("patients", Budget(3.0, 1e-4), public=False)
    ledger.reserve("a", "patients", Budget(1.0, 1e-5), events=EVENTS, notes={"algorithm": "dp_sgd", "ö": "é"})
    ledger.settle("a", Budget(0.9873645182736451, 1e-5), events=EVENTS)
    ledger.reserve("b", "patients", Budget(0.5, 2e-5), events=EVENTS, notes={})
    return ledger


def test_lifecycle(ledger_url: str) -> None:
    ledger = _lived(ledger_url)
    ledger.forfeit("b")
    ledger.reserve("c", "patients", Budget(0.25, 3e-5), events=EVENTS, notes={})

    again = Ledger.open(ledger_url)
    assert again.balance("patients") == Balance(
        population="patients",
        cap=Budget(3.0, 1e-4),
        public=False,
        spent=Budget(1.4873645182736451, 3e-5),
        reserved=Budget(0.25, 3e-5),
        remaining=Budget(1.2626354817263549, 4e-5),
    )
    assert [again.status(run) for run in "abcd"] == ["settled", "forfeited", "open", None]
    rows = [entry.to_json() for entry in again.history("patients")]
    assert [row["kind"] for row in rows] == KINDS
    assert rows[1]["events"] == rows[2]["events"] == EVENTS
    assert rows[1]["about"] == {"algorithm": "dp_sgd", "ö": "é"}
    assert again.head() == ledger.head() == rows[-1]["hash"]


def _reserve(url: str, run_id: str, all_ready: Barrier, outcome: Connection, all_done: Barrier) -> None:
    """What a process of its own does, at the same time as others, and none of them ends before all have tried."""
    all_ready.wait(HANG_SECONDS)
    ledger = Ledger.open(url)
    ledger.declare("patients", Budget(0.3, 1e-5), public=False)
    try:
        ledger.reserve(run_id, "patients", Budget(0.1, 1e-6), events=[], notes={})
        outcome.send("won")
    except BudgetRefusedError:
        outcome.send("refused")
    all_done.wait(HANG_SECONDS)


def _race(url: str, run_ids: list[str]) -> list[str]:
    context = warm_context()
    all_ready, all_done = (context.Barrier(len(run_ids)) for _ in range(2))
    receivers, processes = [], []
    for run_id in run_ids:
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=_reserve, args=(url, run_id, all_ready, sender, all_done)))
        processes[-1].start()
        sender.close()  # the other end is the process's, and is closed if it fails
        receivers.append(receiver)
    outcomes = [receiver.recv() for receiver in receivers]
    for process in processes:
        process.join(HANG_SECONDS)
    return outcomes


def test_five_processes_race_for_a_budget_of_three(ledger_url: str) -> None:
    outcomes = _race(ledger_url, [f"run-{i}" for i in range(5)])
    assert sorted(outcomes) == ["refused"] * 2 + ["won"] * 3
    ledger = Ledger.open(ledger_url)
    assert ledger.balance("patients").reserved == Budget(0.3, 3e-6)
    assert [entry.kind for entry in ledger.history()] == ["population"] + ["reserve"] * 3


def test_processes_that_race_with_one_run_id_charge_it_once(ledger_url: str) -> None:
    assert _race(ledger_url, ["same"] * 3) == ["won"] * 3
    assert Ledger.open(ledger_url).balance("patients").reserved == Budget(0.1, 1e-6)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE epsilonflow_ledger SET epsilon = 0.0 WHERE seq = 3",
        "DELETE FROM epsilonflow_ledger WHERE seq = 4",
        "DELETE FROM epsilonflow_ledger",
        "INSERT OR REPLACE INTO epsilonflow_ledger SELECT * FROM epsilonflow_ledger WHERE seq = 4",
    ],
)
def test_the_database_refuses_to_change_rows(ledger_url: str, statement: str) -> None:
    ledger = _lived(ledger_url)
    if "REPLACE" in statement and not ledger_url.startswith("sqlite"):
        statement = "TRUNCATE epsilonflow_ledger"
    before = ledger.history()
    with pytest.raises(DBAPIError, match="never changed or removed"):
        _tamper(ledger_url, statement)
    assert ledger.history() == before


@pytest.mark.parametrize(
    ("statement", "row"),
    [
        ("UPDATE epsilonflow_ledger SET epsilon = 0.1 WHERE seq = 3", 3),
        ("UPDATE epsilonflow_ledger SET events = '[]' WHERE seq = 2", 2),
        ("UPDATE epsilonflow_ledger SET epsilon = NULL WHERE seq = 4", 4),
        ("UPDATE epsilonflow_ledger SET previous_hash = 'x' WHERE seq = 1", 1),
        ("DELETE FROM epsilonflow_ledger WHERE seq = 3", 3),
        ("DELETE FROM epsilonflow_ledger WHERE seq = 1", 1),
    ],
)
def test_a_row_changed_behind_the_ledger_is_detected(ledger_url: str, statement: str, row: int) -> None:
    ledger = _lived(ledger_url)
    _disarm(ledger_url)
    _tamper(ledger_url, statement)
    with pytest.raises(LedgerBrokenError, match=f"breaks at row {row}:"):
        Ledger.open(ledger_url)
    with pytest.raises(LedgerBrokenError, match=f"breaks at row {row}:"):
        ledger.verify()


def ledger_hash(url: str, seq: int) -> str:
    with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
        return str(connection.exec_driver_sql(f"SELECT hash FROM {TABLE} WHERE seq = {seq}").scalar_one())


def test_rows_cut_off_at_the_end_show_only_against_a_head_kept_elsewhere(ledger_url: str) -> None:
    ledger = _lived(ledger_url)
    head = ledger.head()
    ledger.check_contains(head)
    _disarm(ledger_url)
    _tamper(ledger_url, "DELETE FROM epsilonflow_ledger WHERE seq = 4")
    with pytest.raises(LedgerBrokenError, match=r"keeps balances of row 4 .* its last row is 3: rows were"):
        Ledger.open(ledger_url)
    before = f"seq = 3, hash = '{ledger_hash(ledger_url, 3)}'"
    _tamper(
        ledger_url, f"UPDATE epsilonflow_head SET {before}", "DELETE FROM epsilonflow_run WHERE run_id = 'b'"
    )
    with pytest.raises(
        LedgerBrokenError, match="keeps other balances than its rows add up to, in the balance of"
    ):
        ledger.verify()
    nothing = "SET open = '0 0', charges = 1"
    _tamper(ledger_url, f"UPDATE epsilonflow_account {nothing}")
    ledger.verify()
    with pytest.raises(LedgerBrokenError, match=head[:16]):
        ledger.check_contains(head)


def test_a_ledger_whose_last_known_row_is_gone_is_read_again_from_the_first(ledger_url: str) -> None:
    ledger = _lived(ledger_url)
    ledger.head()
    _disarm(ledger_url)
    _tamper(ledger_url, "DELETE FROM epsilonflow_ledger WHERE seq = 2")
    _tamper(ledger_url, "DELETE FROM epsilonflow_ledger WHERE seq = 4")
    with pytest.raises(LedgerBrokenError, match="breaks at row 2:"):
        ledger.reserve("late", "patients", Budget(0.1, 1e-6), events=[], notes={})


def _sent(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What goes to the server from now on, each message as one."""
    messages, execute = list[str](), psycopg.ClientCursor.execute

    def sent(cursor: Any, query: Any, *given: Any, **more: Any) -> Any:
        messages.append(query)
        return execute(cursor, query, *given, **more)

    monkeypatch.setattr(psycopg.ClientCursor, "execute", sent)
    sa.event.listen(
        ledger._store.database.engine, "before_cursor_execute", lambda *given: messages.append(given[2])
    )
    return messages


def test_a_turn_of_a_writer_is_two_messages_to_the_server(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait meanwhile: what it asks is sent at once, and so is what it writes, begin and commit included."""
    if ledger_url.startswith("sqlite"):
        return
    ledger = _lived(ledger_url)
    messages = _sent(ledger, monkeypatch)
    for act in (
        lambda: ledger.reserve("c", "patients", Budget(0.5, 0.0), events=EVENTS, notes={}),
        lambda: ledger.settle("c", Budget(0.25, 0.0), events=EVENTS),
    ):
        messages.clear()
        act()
        *before, asked, written = messages  # what is looked up before makes nobody wait
        assert not any("SERIALIZABLE" in message or "LOCK" in message for message in before)
        assert asked.startswith(
            "BEGIN ISOLATION LEVEL SERIALIZABLE;LOCK TABLE epsilonflow_head IN EXCLUSIVE MODE;"
        )
        assert written.startswith("INSERT INTO epsilonflow_ledger")
        assert ";COMMIT;" in written
    assert Ledger.open(ledger_url).status("c") == "settled"


def test_no_session_has_what_a_later_transaction_needs(ledger_url: str) -> None:
    """A pooler gives each transaction another session, where statements that were prepared in one are not."""
    if ledger_url.startswith("sqlite"):
        return
    ledger = _lived(ledger_url)
    for _ in range(10):
        assert ledger.status("a") == "settled"
    prepared = "SELECT statement FROM pg_prepared_statements"
    assert ledger._store.read(lambda connection: connection.exec_driver_sql(prepared).all()) == []


def test_what_reads_sees_one_moment(ledger_url: str) -> None:
    ledger, other = _lived(ledger_url), Ledger.open(ledger_url)

    def count_twice(connection: sa.Connection) -> tuple[int, int]:
        first = len(list(ledger._store.rows(connection)))
        other.reserve("c", "patients", Budget(0.5, 0.0), events=EVENTS, notes={})
        return first, len(list(ledger._store.rows(connection)))

    assert ledger._store.read(count_twice) == (4, 4)
    assert len(ledger.history()) == 5


def test_rows_are_read_page_by_page(ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _lived(ledger_url).history()
    monkeypatch.setattr("algorithms.privacy.ledger.store.FIRST_PAGE", 1)
    monkeypatch.setattr("algorithms.privacy.ledger.store.PAGE", 2)
    again = Ledger.open(ledger_url)
    again.forfeit("b")
    assert [entry.kind for entry in again.history()] == KINDS[:5]
    assert again.history()[:4] == rows
    assert again.verify().read == 5


def test_a_wrong_password_is_refused_without_showing_it(postgres_server: sa.URL) -> None:
    wrong = postgres_server.set(password="wr0ng/pass@word").render_as_string(hide_password=False)
    with pytest.raises(RefusedError, match="password authentication failed") as refused:
        Ledger.open(wrong)
    assert "wr0ng" not in repr(refused.value)


def test_a_database_without_an_encoding_keeps_names(new_database: Callable[..., sa.URL]) -> None:
    """As in a cluster that was made in the locale C."""
    database = new_database("ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    ledger = _lived(database.render_as_string(hide_password=False))
    ledger.declare("mésange", Budget(1.0, 1e-6), public=False)
    assert ledger.populations() == ["patients", "mésange"]
    assert ledger.verify().read == 5


def test_a_server_that_ended_its_sessions_is_connected_to_again(
    postgres_server: sa.URL, new_database: Callable[..., sa.URL]
) -> None:
    """As one that was restarted does, or that an idle session was too long for."""
    own = new_database()
    ledger = _lived(own.render_as_string(hide_password=False))
    ended = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{own.database}'"
    with sa.create_engine(
        postgres_server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
    ).connect() as connection:
        for act in (
            lambda: ledger.settle("b", Budget(0.25, 0.0), events=EVENTS),
            lambda: ledger.reserve("c", "patients", Budget(0.5, 0.0), events=EVENTS, notes={}),
        ):
            assert connection.exec_driver_sql(ended).all()
            act()
    assert [ledger.status(run) for run in "bc"] == ["settled", "open"]
    assert ledger.verify().read == 6


CAP, ONE = Budget(3.0, 1e-4), Budget(1.0, 1e-5)
USERS = {"alice": "owner", "bob": "runner", "ben": "runner", "carol": "auditor", "nobody": None}
Open = Callable[[str], Ledger]


@pytest.fixture
def url_of(new_database: Callable[..., sa.URL]) -> Callable[[str], str]:
    """The URL of a new ledger with its roles, by the name of a user."""
    admin = new_database()
    with sa.create_engine(admin, isolation_level="AUTOCOMMIT").connect() as connection:
        for user in USERS:
            known = connection.exec_driver_sql(f"SELECT 1 FROM pg_roles WHERE rolname = '{user}'").scalar()
            if not known:
                connection.exec_driver_sql(f"CREATE ROLE {user} LOGIN PASSWORD 'of {user}'")

    def url(user: str) -> str:
        of_user = admin if user == "admin" else admin.set(username=user, password=f"of {user}")
        return of_user.render_as_string(hide_password=False)

    members: dict[str, list[str]] = {}
    for user, role in USERS.items():
        members.setdefault(role or "", []).append(user)
    members.pop("")
    expected = tuple(f"{admin.database}_{role}" for role in ("owner", "runner", "auditor"))
    assert init(url("admin"), members) == init(url("admin")) == expected  # type: ignore[arg-type]
    return url


def test_each_does_what_the_role_is_for_and_the_row_says_who_did_it(url_of: Callable[[str], str]) -> None:
    alice, bob = Ledger.open(url_of("alice")), Ledger.open(url_of("bob"))
    alice.declare("patients", CAP, public=False)
    alice.declare("others", CAP, public=False, bound={"unit": "a person"})
    bob.declare_block("patients", "january")  # at the population's cap, as blocks that arrive are
    bob.reserve(
        "a", "patients", ONE, events=[], notes={}, blocks=["january"], content_digests={"january": ["x"]}
    )
    bob.settle("a", Budget(0.5, 0.0), events=[])
    bob.reserve("b", "others", ONE, events=[], notes={})
    bob.forfeit("b")
    alice.set_cap("patients", Budget(1.5, 1e-4), block="january")
    alice.retire_block("patients", "january")
    alice.reserve("c", "others", ONE, events=[], notes={})
    carol = Ledger.open(url_of("carol"))
    assert [row.written_by for row in carol.history()] == ["alice"] * 2 + ["bob"] * 5 + ["alice"] * 3
    assert carol.verify().read == 10
    assert carol.balance("patients", "january").spent == Budget(0.5, 0.0)


def test_the_database_refuses_what_the_role_is_not_for(url_of: Callable[[str], str]) -> None:
    alice, bob = Ledger.open(url_of("alice")), Ledger.open(url_of("bob"))
    ben, carol = Ledger.open(url_of("ben")), Ledger.open(url_of("carol"))
    alice.declare("patients", CAP, public=False)
    alice.declare_block("patients", "january")
    bob.reserve("a", "patients", ONE, events=[], notes={}, blocks=["january"])
    before = alice.history()
    refused = [
        lambda: bob.set_cap("patients", Budget(9.0, 1e-3)),
        lambda: bob.set_cap("patients", Budget(9.0, 1e-3), block="january"),
        lambda: bob.declare("mine", CAP, public=False),
        lambda: bob.declare_block("patients", "february", Budget(9.0, 1e-3)),
        lambda: bob.retire_block("patients", "january"),
        lambda: bob.overrule("patients", "january", "february", by="the owner"),
        lambda: ben.forfeit("a"),
        lambda: ben.settle("a", Budget(0.0, 0.0), events=[]),
        lambda: carol.reserve("c", "patients", ONE, events=[], notes={}, blocks=["january"]),
        lambda: carol.forfeit("a"),
        lambda: Ledger.open(url_of("nobody")),
    ]
    for act in refused:
        with pytest.raises(
            NotAllowedError, match=r"does not let (bob|ben|carol|nobody) do this; ask its owner"
        ):
            act()
    assert alice.history() == before
    alice.verify()


@pytest.mark.parametrize(
    ("user", "statement"),
    [
        ("alice", "DELETE FROM epsilonflow_ledger"),
        ("admin", "DELETE FROM epsilonflow_ledger"),
        ("bob", "UPDATE epsilonflow_account SET epsilon = 9"),
        ("carol", "UPDATE epsilonflow_head SET seq = 0"),
    ],
)
def test_the_database_refuses_statements_of_ones_own(
    url_of: Callable[[str], str], user: str, statement: str
) -> None:
    Ledger.open(url_of("alice")).declare("patients", CAP, public=False)
    engine = sa.create_engine(url_of(user), poolclass=sa.NullPool)
    words = "permission denied|never changed or removed"
    with pytest.raises(DBAPIError, match=words), engine.begin() as connection:
        connection.exec_driver_sql(statement)
    assert Ledger.open(url_of("carol")).verify().read == 1


ROWS = {
    "a reservation": ("ledger", {"kind": "reserve", "run_id": "new", "about": "{}"}, {"written_by": "alice"}),
    "another's reservation": (
        "ledger",
        {"kind": "reserve", "run_id": "new", "about": "{}"},
        {"written_by": "ben"},
    ),
    "the end of a run": ("ledger", {"kind": "settle", "run_id": "of bob"}, {"run_id": "of ben"}),
    "a run given up": ("ledger", {"kind": "forfeit", "run_id": "of bob"}, {"run_id": "of ben"}),
    "the row of a block": (
        "ledger",
        {"kind": "cap", "run_id": None, "block": "new", "about": '{"declared":true}'},
        {"epsilon": 9.0},
    ),
    "the row of a block, its delta": (
        "ledger",
        {"kind": "cap", "run_id": None, "block": "new", "about": '{"declared":true}'},
        {"delta": 1.0},
    ),
    "the account of a block": ("account", {"block": "new"}, {"epsilon": 9.0}),
    "the account of a retired block": ("account", {"block": "new"}, {"retired": 1}),
}
"""Rows that bob may insert by statements of his own, and a change with which he may not."""


@pytest.mark.parametrize("name", ROWS)
def test_the_database_refuses_rows_in_anothers_name_and_blocks_at_other_caps(
    url_of: Callable[[str], str], name: str
) -> None:
    """By the policies alone: this is a runner who goes around the ledger's own checks."""
    alice = Ledger.open(url_of("alice"))
    alice.declare("patients", CAP, public=False)
    for user in ("bob", "ben"):
        Ledger.open(url_of(user)).reserve(f"of {user}", "patients", Budget(0.1, 0.0), events=[], notes={})
    table, allowed, forbidden = ROWS[name]
    engine = sa.create_engine(url_of("bob"), poolclass=sa.NullPool)
    with engine.connect() as connection:
        own = f"SELECT * FROM epsilonflow_{table} WHERE block = 'all' ORDER BY 1 LIMIT 1"
        row = dict(connection.exec_driver_sql(own).mappings().one()) | allowed
        if table == "ledger":
            row |= {"seq": 4, "previous_hash": "e" * 64, "hash": "f" * 64, "written_by": "bob"}
        places = ", ".join(f":{column}" for column in row)
        insert = sa.text(f"INSERT INTO epsilonflow_{table} ({', '.join(row)}) VALUES ({places})")
        connection.rollback()
        connection.execute(insert, row)  # so that the change alone is why it is refused
        connection.rollback()
        with pytest.raises(DBAPIError, match="violates row-level security policy"):
            connection.execute(insert, row | forbidden)
    assert alice.verify().read == 3


def test_a_member_must_be_there_and_a_file_has_no_roles(
    url_of: Callable[[str], str], tmp_path: object
) -> None:
    with pytest.raises(RefusedError, match=r"has no user 'zoe'; create it there first"):
        init(url_of("admin"), {"runner": ["zoe"]})
    with pytest.raises(NotAllowedError):
        init(url_of("alice"), {})
    assert init(f"sqlite:///{tmp_path}/ledger.sqlite") == ()
