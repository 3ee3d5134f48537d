"""The newest heads of ledgers that a home has seen, since an older copy that was restored has a valid chain of its own.

They are kept for a URL and for the ledger itself at any URL, since an old copy at another URL is an older copy, too.
Ledgers are distinguished by the hash of their first row.
"""

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from sqlalchemy.engine import make_url

from algorithms.errors import LedgerBrokenError
from algorithms.privacy.ledger.chain import NOTHING, Head
from algorithms.privacy.ledger.ledger import Ledger, identity


def open_newest(url: str, *, home: Path) -> Ledger:
    """Open the ledger at a URL and compare it with the heads in a home.

    Raises LedgerBrokenError if the ledger lacks a row that it once had, and RefusedError if it cannot be opened.
    """
    ledger = Ledger.open(url, verified=_kept(_at_url(url, home)))
    _check_newest(ledger, url, home)
    return ledger


def remember(ledger: Ledger, url: str, *, home: Path) -> None:
    """Record the ledger's head in a home; a slightly older head does no harm, so processes need no lock.

    The next process that opens the ledger in this home verifies the rows after this head. Raises LedgerBrokenError and
    records nothing if an older copy was restored since the ledger was opened.
    """
    head = ledger.verified()
    _check_newest(ledger, url, home)
    for file in _files(ledger, url, home):
        write_line(file, f"{head.seq} {head.hash}")


def _check_newest(ledger: Ledger, url: str, home: Path) -> None:
    for seen in _files(ledger, url, home):
        try:
            ledger.check_contains(_kept(seen).hash)
        except LedgerBrokenError as error:
            raise LedgerBrokenError(
                f"{str(error).rstrip('.')}, or remove {seen} where its owner began a new one."
            ) from None


def write_line(file: Path, line: str, *, put: Callable[[Path, Path], object] = os.replace) -> None:
    """Write a file of one line durably, for its owner alone. put: moves a temporary file to its place."""
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


def _files(ledger: Ledger, url: str, home: Path) -> list[Path]:
    """The files of the head at the URL and, once the ledger has a row, of the head of the ledger itself."""
    first = identity(ledger)
    return [_at_url(url, home), *([home / "ledger_heads" / first[:16]] if first else [])]


def _at_url(url: str, home: Path) -> Path:
    place = make_url(url).set(password=None).render_as_string()
    return home / "ledger_heads" / hashlib.sha256(place.encode()).hexdigest()[:16]


def _kept(file: Path) -> Head:
    """The head in a file, or NOTHING."""
    try:
        seq, hash_ = file.read_text(encoding="utf-8").split()
        return Head(int(seq), hash_)
    except (OSError, ValueError):
        return NOTHING
