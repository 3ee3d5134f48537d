"""A ledger of version 0.2 is brought up to date where it is opened; `ledger-0.2.sql` is one, as SQLite dumped it."""

import sqlite3
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Entry, Ledger
from algorithms.privacy.ledger import store as module
from algorithms.privacy.ledger.chain import follow
from algorithms.privacy.ledger.store import INSERT, LATEST

DUMP = Path(__file__).with_name("ledger-0.2.sql").read_text()
HEAD = "458f87b68e326b8b5c7a62e894276fe2b056e6551c2eefb7283baaa1ec7c2d3c"
EVENTS = [{"event": {"type": "GaussianDpEvent", "noise_multiplier": 4.0}, "count": 1}]


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(module.__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


def _old_rows() -> list[Entry]:
    connection = sqlite3.connect(":memory:")
    connection.executescript(DUMP)
    return [Entry(*row) for row in connection.execute("SELECT * FROM epsilonflow_ledger ORDER BY seq")]


@pytest.fixture
def old(ledger_url: str) -> str:
    """The URL of a ledger of version 0.2."""
    if ledger_url.startswith("sqlite"):
        path = Path(ledger_url.removeprefix("sqlite:///"))
        path.parent.mkdir()
        sqlite3.connect(path).executescript(DUMP)
        return ledger_url
    with sa.create_engine(ledger_url, poolclass=sa.NullPool).begin() as connection:
        config = _config()
        config.attributes |= {"connection": connection, "version_table": "old"}
        command.upgrade(config, "0001")
        connection.exec_driver_sql("DROP TABLE old")
        columns = ", ".join(name for name in Entry._fields if name != "written_by")
        for row in _old_rows():
            values = {name: value for name, value in row._asdict().items() if name != "written_by"}
            names = ", ".join(f":{name}" for name in values)
            connection.execute(
                sa.text(f"INSERT INTO epsilonflow_ledger ({columns}) VALUES ({names})"), values
            )
    return ledger_url


def test_a_ledger_of_the_version_before_keeps_its_chain_and_its_balances(old: str) -> None:
    ledger = Ledger.open(old)
    assert ledger.history() == _old_rows()
    assert ledger.head() == HEAD
    ledger.verify(prices=True)
    ledger.check_contains(HEAD)
    # As version 0.2 stated them.
    january, february = ledger.balances("patients")
    found = (january.spent, january.reserved, february.spent, february.remaining)
    stated = (2.165715545175485, 1.478115992626568, 2.165715545175485, 3.1756282357404837)
    # To what the solver of an epsilon is exact to.
    assert [budget.epsilon for budget in found] == pytest.approx(stated, rel=1e-9)
    assert {budget.delta for budget in found} == {1e-5}
    assert (january.retired, february.retired) == (False, True)
    digits = ledger.balance("digits")
    assert (digits.cap, digits.spent) == (Budget(0.3, 1e-3), Budget(0.1, 1e-9))
    assert [ledger.status(run) for run in ("a", "b", "c", "free")] == ["settled", "open", "forfeited", "open"]
    assert ledger.run_of("patients", "m 2026-W01") == "a"
    assert ledger.held("patients") == {"january": frozenset({"x1"})}
    ledger.settle("b", Budget(1.0, 1e-6), events=EVENTS)
    assert Ledger.open(old).verify().read == len(_old_rows()) + 1
    assert [row.written_by is None for row in ledger.history()][-2:] == [True, False]


def test_rows_that_the_version_before_adds_meanwhile_are_entered_by_the_next_opening(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    ledger = Ledger.open(url)
    ledger.declare("patients", Budget(1.0, 0.0), public=False)
    ours = ledger._store.verified
    other = Ledger.open(f"sqlite:///{tmp_path}/other.sqlite")
    other._store.fill(lambda: iter(ledger.history()))
    other.reserve("a", "patients", Budget(0.25, 0.0), events=[], about={})
    with ledger._store.place.engine.begin() as connection:
        for row in follow(other.history()[1:], name="x", after=ours):
            connection.execute(INSERT, row._asdict())
    assert ledger.balance("patients").reserved == Budget(0.25, 0.0)
    ledger.verify()


def test_the_tables_are_those_of_the_migrations_and_a_newer_version_is_refused(tmp_path: Path) -> None:
    assert ScriptDirectory.from_config(_config()).get_current_head() == LATEST
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    with Ledger.open(url)._store.place.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE epsilonflow_ledger_version SET version_num = '9999'")
    with pytest.raises(
        RefusedError, match="is of version 9999, which a newer epsilonflow made; use that one"
    ):
        Ledger.open(url)


def test_several_may_open_an_old_ledger_at_once(old: str) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(Ledger.open(old).head())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [HEAD] * 4
