"""Where a ledger may live, who may read it, and what its messages never show."""

import itertools
import os
import pwd
import resource
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Ledger, checked_url

NOBODY = 65534


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _url(path: Path) -> str:
    return f"sqlite:///{path}"


def test_a_new_ledger_belongs_to_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "home" / "ledger.sqlite"
    old = os.umask(0)
    try:
        ledger = Ledger.open(_url(path))
        with ledger._store.database.engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            beside = {file.name: _mode(file) for file in path.parent.iterdir()}
    finally:
        os.umask(old)
    assert _mode(path.parent) == 0o700
    assert beside == {"ledger.sqlite": 0o600, "ledger.sqlite-wal": 0o600, "ledger.sqlite-shm": 0o600}


def test_a_ledger_that_others_could_read_is_closed_to_them_and_its_folder_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger.open(_url(path))
    path.chmod(0o664)
    tmp_path.chmod(0o755)
    Ledger.open(_url(path))
    assert (_mode(path), _mode(tmp_path)) == (0o600, 0o755)


def test_what_is_written_survives_a_power_cut(tmp_path: Path) -> None:
    ledger = Ledger.open(_url(tmp_path / "ledger.sqlite"))
    with ledger._store.database.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL


def test_a_user_without_a_name_is_recorded_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with any number."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    ledger = Ledger.open(_url(tmp_path / "ledger.sqlite"))
    ledger.declare("patients", Budget(1.0, 0.0), public=False)
    assert ledger.history()[0].written_by == str(os.getuid())


def test_a_relative_path_stays_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = Ledger.open("sqlite:///ledger.sqlite")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    ledger.declare("patients", Budget(1.0, 0.0), public=False)
    assert Ledger.open(_url(tmp_path / "ledger.sqlite")).populations() == ["patients"]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError, match=r"^the ledger .*file/ledger.sqlite cannot be created .*\.$"):
        Ledger.open(_url(tmp_path / "file" / "ledger.sqlite"))
    with pytest.raises(RefusedError, match=r"^the ledger .* cannot be used \(unable to open .*\); .*\.$"):
        Ledger.open(_url(tmp_path))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(
        RefusedError, match=r"^the ledger .*loop cannot be created or opened \(Too many levels"
    ):
        Ledger.open(checked_url(_url(tmp_path / "loop")))


def test_a_read_only_ledger_is_one_sentence() -> None:
    """Root may write everywhere, so under root the ledger is opened as nobody."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger.sqlite")
        Ledger.open(_url(path))
        path.chmod(0o400)
        Path(folder).chmod(0o500)
        root = os.geteuid() == 0
        if root:
            os.chown(folder, NOBODY, NOBODY)
            os.chown(path, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            with pytest.raises(
                RefusedError, match=r"^the ledger .* cannot be (used|opened) \(.*write to it\.$"
            ):
                Ledger.open(_url(path))
            with pytest.raises(RefusedError, match="Permission denied"):
                Ledger.open(_url(Path(folder, "new", "ledger.sqlite")))
        finally:
            if root:
                os.seteuid(0)
            Path(folder).chmod(0o700)


@pytest.mark.parametrize("content", [b"somebody's text\n" * 100, b"\0" * 5000])
def test_a_file_that_is_no_ledger_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(RefusedError, match=r"^the ledger .* cannot be used \(.*\); .*\.$"):
        Ledger.open(_url(path))
    assert path.read_bytes() == content


def test_of_many_writers_each_has_its_turn(tmp_path: Path) -> None:
    """The last to ask does not go first: of 120 writes each of eight threads does about fifteen."""
    url, writes, start = _url(tmp_path / "ledger.sqlite"), itertools.count(), threading.Barrier(8)
    Ledger.open(url).declare("patients", Budget(100.0, 0.0), public=False)
    done = [0] * 8

    def write(thread: int) -> None:
        ledger = Ledger.open(url)
        start.wait()
        while next(writes) < 120:
            ledger.reserve(f"{thread}-{done[thread]}", "patients", Budget(0.1, 0.0), events=[], notes={})
            done[thread] += 1

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(done) == 120 and min(done) >= 5, done


def test_a_busy_ledger_is_waited_for_and_then_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(_url(path))
    monkeypatch.setattr("algorithms.privacy.ledger.database.PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr("algorithms.privacy.ledger.database.SQLITE_PRAGMAS", ("PRAGMA busy_timeout = 50",))
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    assert Ledger.open(_url(path)).populations() == []  # a reader waits for nobody
    with pytest.raises(RefusedError, match=r"another program has kept the ledger .* locked"):
        ledger.declare("patients", Budget(1.0, 0.0), public=False)
    holder.close()
    ledger.declare("patients", Budget(1.0, 0.0), public=False)
    assert Ledger.open(_url(path)).populations() == ["patients"]


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?mode=memory&uri=true",
        "mysql://user:hunter2@host/db",
        "no url",
        "postgresql://user:hunter2@host:hunter2/db",
        "postgresql://user:x@hunter2@host/db",
        "postgresql://user:x@h/hunter2@host/db",
        "postgresql://user:hunter2@127.0.0.1:1/db",
        "postgresql+psycopg://user:hunter2@127.0.0.1:1/db?connect_timeout=1",
        "postgresql+psycopg://127.0.0.1:1/db?password=hunter2&options=hunter2",
        "postgresql+psycopg://user:hunter2@127.0.0.1:1/db?nonsense=hunter2",
        "postgresql+psycopg2://user:hunter2@127.0.0.1:1/db",
    ],
)
def test_an_unusable_url_is_one_sentence_without_its_password(url: str) -> None:
    with pytest.raises(RefusedError) as refused:
        Ledger.open(url)
    message = str(refused.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert "hunter2" not in message


def test_a_server_that_is_away_is_named_with_what_to_type() -> None:
    with pytest.raises(RefusedError) as refused:
        Ledger.open("postgresql+psycopg://user@127.0.0.1:1/db")
    words = "`pg_isready --host 127.0.0.1 --port 1` says whether its server answers, and EPSILONFLOW_LEDGER_URL names"
    assert words in str(refused.value)


def test_postgresql_without_its_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(RefusedError, match=r"install epsilonflow with its extra `postgres`\.$"):
        Ledger.open("postgresql+psycopg://user:hunter2@127.0.0.1:1/db")


def test_the_ledger_needs_neither_torch_nor_an_accountant() -> None:
    """Its own modules, that is: algorithms/__init__.py is left out, whatever it imports."""
    code = """
import sys, types
package = sys.modules["algorithms"] = types.ModuleType("algorithms")
package.__path__ = ["algorithms"]
import algorithms.privacy.ledger
print({"torch", "dp_accounting.dp_event", "numpy"} & {*sys.modules})
"""
    root = Path(__file__).parents[4]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


@contextmanager
def _unwritable() -> Iterator[None]:
    """No file can grow, which SQLite meets as it does a disk without room for its log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_called_a_full_disk_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    with pytest.raises(RefusedError, match=r"cannot be used \(disk I/O error\)"), _unwritable():
        ledger.declare("patients", Budget(1.0, 1e-5), public=False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=8, f_frsize=4096))
    with (
        pytest.raises(RefusedError, match=r"^the disk is full; make room where the ledger .*\.$"),
        _unwritable(),
    ):
        ledger.declare("patients", Budget(1.0, 1e-5), public=False)
    ledger.declare("patients", Budget(1.0, 1e-5), public=False)
    assert ledger.verify().read == 1
