"""A ledger's rows as a file, and back into an empty ledger; what is restored is the same chain, hash for hash."""

import json
import os
from pathlib import Path

from algorithms.privacy.errors import Refused
from algorithms.privacy.ledger import Ledger
from algorithms.privacy.ledger_entry import Entry, verify
from algorithms.privacy.ledger_store import open_store


def export(ledger: Ledger, path: Path) -> int:
    """Writes every row as a line of JSON into a new file that its owner alone can read; returns their number.

    Raises Refused where the file exists already or cannot be written.
    """
    rows = ledger.history()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(vars(row)) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise Refused(f"the copy {path} cannot be written ({error.strerror}); choose a new file.") from None
    return len(rows)


def restore(path: Path, url: str) -> int:
    """Writes the rows of a copy into the ledger at a URL, which must be empty; returns their number.

    Raises LedgerBroken where the copy's chain does not hold; Refused where the file is no copy of a ledger, and where
    the ledger holds rows.
    """
    entries = read(path)
    verify(entries, name=str(path))
    open_store(url).fill(entries)
    return len(entries)


def read(path: Path) -> list[Entry]:
    """The rows in a copy, not verified; raises Refused where it is none."""
    try:
        return [Entry(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise Refused(f"the copy {path} cannot be read ({error.strerror}); give the file of an export.") from None
    except (ValueError, TypeError):
        raise Refused(f"{path} is no copy of a ledger; give the file of an export.") from None


def identity(ledger: Ledger) -> str | None:
    """The hash of the first row, by which a ledger and its copies are known; None for an empty ledger."""
    rows = ledger.history()
    return rows[0].hash if rows else None
