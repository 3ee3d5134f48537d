"""Copies of a ledger, clocks, rows that are read again or have no balances, and the versions of its tables."""

import json
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Ledger, export, identity, open_newest, remember, restore
from algorithms.privacy.ledger import store as module
from algorithms.privacy.ledger.ledger import Chain
from algorithms.privacy.ledger.rows import follow
from algorithms.privacy.ledger.store import INSERT, LATEST

ONE = Budget(0.1, 1e-6)


def _lived(url: str, *, runs: int = 3) -> Ledger:
    ledger = Ledger.open(url)
    ledger.declare("patients", Budget(3.0, 1e-4), public=False)
    for block in ("january", "february"):
        ledger.declare_block("patients", block)
    for i in range(runs):
        ledger.reserve(
            f"run-{i}", "patients", ONE, events=[], notes={"é": "ö"}, blocks=("january", "february")
        )
    ledger.settle("run-0", Budget(0.123456789 / 2, 0.0), events=[])
    return ledger


def test_a_copy_restores_the_same_chain_in_either_kind_of_database(ledger_url: str, tmp_path: Path) -> None:
    ledger = _lived(f"sqlite:///{tmp_path}/first.sqlite")
    copy = tmp_path / "copy.jsonl"
    assert export(ledger, copy) == restore(copy, ledger_url) == 11
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    again = Ledger.open(ledger_url)
    assert again.history() == ledger.history()
    assert (identity(again), again.head()) == (identity(ledger), ledger.head())
    again.forfeit("run-1")
    again.verify()
    again.check_contains(ledger.head())
    with pytest.raises(RefusedError, match="holds rows already; restore into a new one"):
        restore(copy, ledger_url)


def test_a_copy_that_was_changed_or_is_none_restores_nothing(tmp_path: Path) -> None:
    copy, url = tmp_path / "copy.jsonl", f"sqlite:///{tmp_path}/new.sqlite"
    export(_lived(f"sqlite:///{tmp_path}/first.sqlite"), copy)
    with pytest.raises(RefusedError, match="cannot be written"):
        export(Ledger.open(url), copy)
    lines = copy.read_text().splitlines()
    row = json.loads(lines[4]) | {"epsilon": 0.01}
    for text, words in (
        ("\n".join([*lines[:4], json.dumps(row), *lines[5:]]), "breaks at row 5:"),
        ("\n".join([*lines[:4], *lines[5:]]), "breaks at row 5:"),
        ("no json", "is no copy of a ledger"),
        ('{"seq": 1}', "is no copy of a ledger"),
    ):
        copy.write_text(text)
        with pytest.raises(RefusedError, match=words) as refused:
            restore(copy, url)
        assert isinstance(refused.value, LedgerBrokenError) == words.startswith("breaks")
    with pytest.raises(RefusedError, match="cannot be read"):
        restore(tmp_path / "none", url)
    assert identity(Ledger.open(url)) is None


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Backwards(datetime):
        now_is = datetime(2026, 1, 1, tzinfo=UTC)

        @classmethod
        def now(cls, tz: object = None) -> "datetime":  # type: ignore[override]
            cls.now_is -= timedelta(days=400)
            return cls.now_is

    expected = _lived(f"sqlite:///{tmp_path}/first.sqlite")
    monkeypatch.setattr("algorithms.privacy.ledger.store.datetime", Backwards)
    ledger = _lived(f"sqlite:///{tmp_path}/second.sqlite")
    stamps = [row.written_at for row in ledger.history()]
    assert stamps[0] > stamps[-1]
    for block in ("january", "february"):
        assert ledger.balance("patients", block) == expected.balance("patients", block)
    ledger.reserve("run-1", "patients", ONE, events=[], notes={}, blocks=("january", "february"))
    assert len(Ledger.open(f"sqlite:///{tmp_path}/second.sqlite").history()) == 11


def test_ledger_is_verified_in_full_when_opened_and_from_its_last_row_later(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    ledger, other = _lived(url), Ledger.open(url)
    other.settle("run-1", ONE, events=[])
    other.reserve("other", "patients", ONE, events=[], notes={}, blocks=("january",))
    assert ledger.status("other") == "open"
    assert ledger.history() == other.history()
    for row in (5, 14):
        before = ledger.history()[row - 1].epsilon
        _overwrite(other, row, 0.01)
        for read in (lambda: Ledger.open(url), ledger.verify):
            with pytest.raises(LedgerBrokenError, match=f"breaks at row {row}:"):
                read()
        if row == 14:  # the last known row
            with pytest.raises(LedgerBrokenError, match=f"breaks at row {row}:"):
                other.status("other")
        else:
            assert other.status("other") == "open"
        _overwrite(other, row, before)
        assert len(ledger.history()) == 14


def _overwrite(ledger: Ledger, row: int, epsilon: float | None) -> None:
    with ledger._store.database.engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER IF EXISTS epsilonflow_ledger_no_update")
        connection.exec_driver_sql(f"UPDATE epsilonflow_ledger SET epsilon = {epsilon} WHERE seq = {row}")


def test_a_write_reads_the_rows_after_the_last_one_that_was_verified(tmp_path: Path) -> None:
    """However old the ledger is: what is read of the chain is what others wrote since."""
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    ledger, began = _lived(url, runs=20), list[int]()
    head = ledger.last_verified()
    Ledger.open(url).settle("run-1", ONE, events=[])

    def note(_: object, cursor: object, statement: str, given: dict[str, int], *rest: object) -> None:
        if "FROM epsilonflow_ledger WHERE seq" in statement:
            began.append(given["seq"])

    again = Ledger.open(url, verified=head)
    for opened in (ledger, again):
        sa.event.listen(opened._store.database.engine, "before_cursor_execute", note)
        opened.settle("run-2", ONE, events=[])
        opened.reserve(f"new {id(opened)}", "patients", ONE, events=[], notes={}, blocks=("january",))
    assert opened.balance("patients", "january").reserved.epsilon == pytest.approx(0.1 * 19)
    assert min(began) == head.seq


@pytest.mark.parametrize(
    "change",
    [
        lambda ledger: ledger.reserve("new", "patients", ONE, events=[], notes={}, blocks=("january",)),
        lambda ledger: ledger.set_cap("patients", Budget(1.0, 1e-5)),
        lambda ledger: ledger.retire_block("patients", "january"),
    ],
    ids=["reserve", "cap", "retire"],
)
def test_a_backup_from_before_a_change_is_refused_though_nothing_came_after_it(
    change: Callable[[Ledger], object], tmp_path: Path
) -> None:
    """As when a run is killed right after its reservation, or the owner lowers a cap."""
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    _lived(url)
    ledger, backup = open_newest(url, home=tmp_path), (tmp_path / "ledger.sqlite").read_bytes()
    change(ledger)
    open_newest(url, home=tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(backup)
    with pytest.raises(LedgerBrokenError, match="an older copy was put back"):
        open_newest(url, home=tmp_path)


def test_a_copy_that_was_restored_while_a_run_trained_is_not_recorded_as_the_newest(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    _lived(url)
    ledger, older = open_newest(url, home=tmp_path), (tmp_path / "ledger.sqlite").read_bytes()
    other = open_newest(url, home=tmp_path)
    other.reserve("other", "patients", ONE, events=[], notes={}, blocks=("january",))
    (tmp_path / "ledger.sqlite").write_bytes(older)
    with pytest.raises(LedgerBrokenError, match="an older copy was put back"):
        ledger.settle("run-1", ONE, events=[])
    with pytest.raises(LedgerBrokenError, match="an older copy was put back"):
        open_newest(url, home=tmp_path)


@pytest.mark.parametrize("how", ["opened", "remembered"])
def test_a_run_that_another_process_charges_meanwhile_is_no_row_that_was_lost(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the snapshot of the rows and their comparison with the heads of the home."""
    url, first, charges = f"sqlite:///{tmp_path}/ledger.sqlite", Chain.first, ["a"]
    _lived(url)
    here, other = (open_newest(url, home=tmp_path) for _ in range(2))
    remember(other, url, home=tmp_path)

    def charged_meanwhile(chain: Chain) -> str | None:
        found = first.fget(chain)  # type: ignore[attr-defined]
        if charges:
            other.reserve(charges.pop(), "patients", ONE, events=[], notes={}, blocks=("january",))
        return found  # type: ignore[no-any-return]

    monkeypatch.setattr(Chain, "first", property(charged_meanwhile))
    if how == "opened":
        open_newest(url, home=tmp_path)
    else:
        remember(here, url, home=tmp_path)
    assert not charges


def test_a_head_is_written_once_and_again_where_it_changed_or_its_file_is_damaged(tmp_path: Path) -> None:
    """A write waits for the disk, and every command opens the ledger."""
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    _lived(url)
    ledger = open_newest(url, home=tmp_path)

    def files() -> dict[Path, tuple[int, bytes]]:
        remember(ledger, url, home=tmp_path)
        return {
            file: (file.stat().st_mtime_ns, file.read_bytes())
            for file in (tmp_path / "ledger_heads").iterdir()
        }

    before = files()
    assert len(before) == 2 and files() == before
    ledger.retire_block("patients", "january")
    after = files()
    head = ledger.head()
    assert {text for _, text in after.values()} == {f"{ledger.verified_head.seq} {head}\n".encode()}
    assert {text for _, text in before.values()}.isdisjoint(text for _, text in after.values())
    next(iter(after)).write_bytes(b"\xff")
    assert {text for _, text in files().values()} == {text for _, text in after.values()}


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(module.__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


def test_rows_that_were_added_without_their_balances_are_refused(tmp_path: Path) -> None:
    """A reservation that no balance counts would be spent again."""
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    ledger = Ledger.open(url)
    ledger.declare("patients", Budget(1.0, 0.0), public=False)
    ours = ledger._store.verified
    other = Ledger.open(f"sqlite:///{tmp_path}/other.sqlite")
    other._store.fill(lambda: iter(ledger.history()))
    other.reserve("a", "patients", Budget(0.25, 0.0), events=[], notes={})
    with ledger._store.database.engine.begin() as connection:
        for row in follow(other.history()[1:], name="x", after=ours):
            connection.execute(INSERT, row._asdict())
    for act in (lambda: ledger.balance("patients"), lambda: Ledger.open(url), ledger.verify):
        with pytest.raises(LedgerBrokenError, match=r"keeps balances of row 1 .* last row is 2: rows were"):
            act()
    with pytest.raises(LedgerBrokenError, match="keeps balances of row 1"):
        ledger.reserve("b", "patients", Budget(0.9, 0.0), events=[], notes={})


def test_the_tables_are_those_of_the_migrations() -> None:
    assert ScriptDirectory.from_config(_config()).get_current_head() == LATEST


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("9999", "is of version 9999, which a newer epsilonflow made; use that one"),
        (
            "0001",
            "is of version 0001, which an older epsilonflow made and this one does not read; make a new",
        ),
    ],
)
def test_a_ledger_of_another_version_is_refused(version: str, words: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    with Ledger.open(url)._store.database.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE epsilonflow_ledger_version SET version_num = '{version}'")
    with pytest.raises(RefusedError, match=words):
        Ledger.open(url)
