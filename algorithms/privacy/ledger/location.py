"""Where the ledger and the runs are stored: outside of every checkout, so that no copy has its own budget.

A home records the newest heads of the ledgers that it has seen, since an older copy that was restored has a valid chain
of its own. They are kept for a URL and for the ledger itself at any URL, since an old copy at another URL is an older
copy, too. Ledgers are distinguished by the hash of their first row. And it records in which ledger a private population
is charged, since another one would be a second budget for the same people.
"""

import getpass
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy import ledger as ledgers  # whose face opens a database when that is asked for
from algorithms.privacy.ledger.rows import EMPTY_HEAD, Head

if TYPE_CHECKING:
    from algorithms.privacy.ledger import Chain, Ledger

LEDGER = "ledger.sqlite"
"""The ledger's default file in the home."""
_URL = re.compile(r"\w+(\+\w+)?://")
_RELATIVE_SQLITE = re.compile(r"sqlite(\+\w+)?:///(?!/)")
_SQLITE_FILE = re.compile(r"sqlite(\+\w+)?:///(?P<path>/[^?]*)")


def home() -> Path:
    """The folder of the ledger and of the runs: EPSILONFLOW_HOME, or the user's data folder.

    It is outside of every checkout, so that neither version control nor an experiment can restore an old budget, and no
    copy has its own.

    Raises:
        RefusedError: For a relative path, for one within a checkout, and for one where no folder can be created.
    """
    named = os.environ.get("EPSILONFLOW_HOME") or platformdirs.user_data_dir("epsilonflow")
    folder = Path(os.path.expanduser(named))  # ~NAME stays, as a relative path, where nobody has the name
    if not folder.is_absolute():
        raise RefusedError(
            "EPSILONFLOW_HOME is {folder}, a relative path; write the path from the root.",
            code="relative_home",
            folder=folder,
        )
    _check_outside("EPSILONFLOW_HOME", folder)
    _check_usable(folder)
    return folder


def ledger_url(configured: str | None) -> str:
    """Where the ledger is: EPSILONFLOW_LEDGER_URL, else `configured`, else ledger.sqlite in `home()`.

    Args:
        configured: A URL from a file of settings; None or an empty text for none.

    Raises:
        RefusedError: For a URL that `checked_url` refuses.
    """
    return checked_url(os.environ.get("EPSILONFLOW_LEDGER_URL") or configured or sqlite_url(home() / LEDGER))


def checked_url(url: str) -> str:
    """The URL of a ledger, unchanged.

    Raises:
        RefusedError: For what is no URL, and for an SQLite file with a relative path or in a checkout, each copy of
            which would have its own budget.

    Example:
        >>> checked_url("postgresql+psycopg://runner@db.example/privacy")
        'postgresql+psycopg://runner@db.example/privacy'
        >>> checked_url("sqlite:///ledger.sqlite")
        Traceback (most recent call last):
        algorithms.errors.RefusedError: ...
    """
    if not _URL.match(url):
        raise RefusedError(
            f"the ledger {url!r} is no URL; write sqlite:///PATH or postgresql+psycopg://USER@HOST/DATABASE."
        )
    if _RELATIVE_SQLITE.match(url):
        raise RefusedError(
            "the ledger {url} is a relative path; write sqlite:/// and then the path from the root.",
            code="relative_ledger",
            url=url,
        )
    if file := _SQLITE_FILE.match(url):
        _check_outside(f"the ledger {url}", Path(file["path"]))
    return url


def sqlite_url(file: Path) -> str:
    """The URL of an SQLite ledger.

    Args:
        file: Its absolute path.

    Raises:
        RefusedError: For a path that such a URL cannot contain.

    Example:
        >>> sqlite_url(Path("/data/ledger.sqlite"))
        'sqlite:////data/ledger.sqlite'
    """
    if "?" in str(file):
        raise RefusedError(
            f"the ledger {file} cannot be named by a URL, which would end at the question mark; set EPSILONFLOW_HOME to"
            " a folder without one."
        )
    return f"sqlite:///{file}"


def system_user() -> str:
    """The name of the system's user, or the number of one without a name, as containers may have."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _check_usable(folder: Path) -> None:
    """Raises RefusedError unless a folder exists, or can be created in its first existing parent."""
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        is_usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    except OSError:
        is_usable = False
    if not is_usable and folder.is_dir():
        raise RefusedError(
            f"EPSILONFLOW_HOME is {folder}, where you may not write, as on a read-only disk; let the user who runs this"
            " write there. Another home would begin with an empty ledger."
        )
    if not is_usable:
        raise RefusedError(
            f"EPSILONFLOW_HOME is {folder}, which is no folder that you may write to and cannot be made one; name"
            " another."
        )


def _check_outside(what: str, path: Path) -> None:
    """Raises RefusedError for a path within a checkout, after resolving links and dots."""
    resolved = Path(os.path.realpath(path))  # which leaves a loop of links to what opens it
    for folder in (resolved, *resolved.parents):
        if (folder / ".dvc").is_dir():
            raise RefusedError(
                "{what} lies in the checkout {folder}, each copy of which would have a budget of its own; name a place"
                " outside of it.",
                code="within_checkout",
                what=what,
                folder=folder,
            )


def open_newest(
    url: str,
    *,
    home: Path,
    check: Callable[["Chain"], object] = lambda _: None,
    remembers: bool = False,
) -> "Ledger":
    """Open the ledger at a URL and compare it with the heads in a home, which records its head after each change.

    So a backup from before a charge is an older copy as soon as the run is charged, even if nothing after it succeeds.

    Args:
        url: Of the ledger.
        home: The folder that remembers heads, by the URL and by the ledger's first row.
        check: What else is compared with the rows, in the same snapshot.
        remembers: Whether the head is recorded now, too, as by `remember`.

    Raises:
        LedgerBrokenError: If the ledger lacks a row that it once had.
        RefusedError: If it cannot be opened.
    """

    recorded, files = _recorded_heads(home), list[Path]()

    def check_all(chain: "Chain") -> None:
        files[:] = _check_newest(chain, url, home, recorded)
        check(chain)

    ledger = ledgers.Ledger.open(
        url,
        verified=_read_head(_at_url(url, home)),
        remember=lambda changed: remember(changed, url, home=home),
        check=check_all,
    )
    if remembers:
        _record(ledger.verified_head, files)
    return ledger


def remember(ledger: "Ledger", url: str, *, home: Path) -> None:
    """Record the ledger's head in a home; a slightly older head does no harm, so processes need no lock.

    The next process that opens the ledger in this home verifies the rows after this head.

    Args:
        ledger: An open one.
        url: By which it was opened.
        home: The folder that remembers heads.

    Raises:
        LedgerBrokenError: If an older copy was restored since the ledger was opened; nothing is recorded then.
    """
    recorded = _recorded_heads(home)
    files = ledger.read_chain(lambda chain: _check_newest(chain, url, home, recorded))
    _record(ledger.verified_head, files)  # of the snapshot that was checked


def _record(head: Head, files: Sequence[Path]) -> None:
    line = f"{head.seq} {head.hash}"
    for file in files:
        if not _has_line(file, line):
            write_line(file, line)


def _recorded_heads(home: Path) -> dict[Path, Head]:
    """The heads in a home by their files: to be read before the rows are, to which another process may add at any time.

    So a row that is missing later is one that the ledger has lost, and not one that it did not have yet.
    """
    return {file: _read_head(file) for file in (home / "ledger_heads").glob("*")}


def _check_newest(chain: "Chain", url: str, home: Path, recorded: Mapping[Path, Head]) -> list[Path]:
    """Compare the ledger with the heads in a home that were recorded before; returns their files."""
    files = _files(chain, url, home)
    for seen in files:
        try:
            chain.check_contains(recorded.get(seen, EMPTY_HEAD).hash)
        except LedgerBrokenError as error:
            raise LedgerBrokenError(
                f"{str(error).rstrip('.')}, or remove {seen} where its owner began a new one."
            ) from None
    return files


def write_line(file: Path, line: str, *, put: Callable[[Path, Path], object] = os.replace) -> None:
    """Write a file of one line durably, for its owner alone. put: moves a temporary file to its name."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(f"{line}\n")
            opened.flush()
            os.fsync(opened.fileno())
        put(fresh, file)
    finally:
        fresh.unlink(missing_ok=True)


def _has_line(file: Path, line: str) -> bool:
    """Whether a file is what `write_line` writes, so that nobody waits for the disk again."""
    try:
        return file.read_bytes() == f"{line}\n".encode()
    except OSError:
        return False


def _files(chain: "Chain", url: str, home: Path) -> list[Path]:
    """The files of the head at the URL and, once the ledger has a row, of the head of the ledger itself."""
    first = chain.first
    return [_at_url(url, home), *([home / "ledger_heads" / first[:16]] if first else [])]


def _at_url(url: str, home: Path) -> Path:
    from sqlalchemy.engine import make_url  # here, since most who ask for a location open no database

    without_password = make_url(url).set(password=None).render_as_string()
    return home / "ledger_heads" / hashlib.sha256(without_password.encode()).hexdigest()[:16]


def _read_head(file: Path) -> Head:
    """The head in a file, or EMPTY_HEAD."""
    try:
        seq, hash_ = file.read_text(encoding="utf-8").split()
        return Head(int(seq), hash_)
    except (OSError, ValueError):
        return EMPTY_HEAD


def check_usual(ledger: "Ledger", population: str, *, home: Path) -> None:
    """Check that a population is charged in the ledger in which this home has always seen it charged.

    Otherwise a branch that names another ledger would have a second budget for the same people. A ledger that was
    restored elsewhere from a copy is the same ledger.

    Args:
        ledger: The one that is about to be charged.
        population: The population to charge.
        home: The folder that remembers the ledger of each population.

    Raises:
        RefusedError: If the home has seen the population charged in another ledger, or contains such a ledger.
    """
    usual_file, default = _usual(population, home), home / LEDGER
    remedy = f"remove {usual_file}" if usual_file.exists() else f"keep {default} elsewhere"
    if usual_file.exists():
        is_another = usual_file.read_text(encoding="utf-8").strip() != ledgers.identity(ledger)
    else:
        usual = ledgers.Ledger.open(sqlite_url(default)) if default.is_file() else ledger
        is_another = ledgers.identity(usual) != ledgers.identity(ledger) and usual.is_charged(population)
    if is_another:
        raise RefusedError(
            "the population {population!r} is charged in another ledger than the one that is named here; name that"
            " one, restore it here from a copy, or {remedy} where its owner began a new one.",
            code="charged_elsewhere",
            population=population,
            remedy=remedy,
        )


def check_location(ledger: "Ledger", population: str, *, public: bool, home: Path) -> None:
    """Do `check_usual` for a private population, and for a public one that was charged as private before.

    Args:
        ledger, population, home: As there.
        public: Whether the population's records are public now.

    Raises:
        RefusedError: As there.
    """
    if not public or _usual(population, home).exists():
        check_usual(ledger, population, home=home)


def keep_usual(ledger: "Ledger", population: str, *, home: Path) -> None:
    """Record, for good, the ledger in which a population is charged, by the first hash of its chain.

    Call this for a run that is reserved there.

    Args:
        ledger: That ledger.
        population: The population that was charged.
        home: The folder that remembers the ledger of each population.

    Raises:
        RefusedError: If a run was charged in another ledger meanwhile.
    """
    usual = _usual(population, home)
    if not usual.exists():
        write_line(usual, ledgers.identity(ledger) or "", put=_link)
    check_usual(ledger, population, home=home)


def _usual(population: str, home: Path) -> Path:
    return home / "ledger_of" / hashlib.sha256(population.encode()).hexdigest()[:16]


def _link(fresh: Path, file: Path) -> None:
    """Move a file to its name unless another exists there."""
    with suppress(FileExistsError):
        os.link(fresh, file)
