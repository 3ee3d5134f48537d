"""A ledger's rows as a file, and back into an empty ledger; what is restored is the same chain, hash for hash."""

import json
import os
from pathlib import Path

from algorithms.privacy.errors import LedgerBroken, Refused
from algorithms.privacy.ledger import Ledger
from algorithms.privacy.ledger_books import replay
from algorithms.privacy.ledger_entry import Entry, verify
from algorithms.privacy.ledger_rules import adjacency_of
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
        raise Refused(
            f"the copy {path} cannot be read ({error.strerror}); give the file of an export."
        ) from None
    except (ValueError, TypeError):
        raise Refused(f"{path} is no copy of a ledger; give the file of an export.") from None


def identity(ledger: Ledger) -> str | None:
    """The hash of the first row, by which a ledger and its copies are known; None for an empty ledger."""
    rows = ledger.history()
    return rows[0].hash if rows else None


def check_prices(ledger: Ledger) -> int:
    """Recomputes the price of every row that has one from its events; returns how many these are.

    A run that was settled at its full cost keeps the price of its reservation, so its settlement may cost less.
    Raises LedgerBroken where a price is less than its events cost.
    """
    rows = [row.to_json() for row in ledger.history()]
    terms = replay(ledger.history()).terms
    adjacencies = {row["run_id"]: adjacency_of(row["about"]) for row in rows if row["kind"] == "reserve"}
    priced = [row for row in rows if row["kind"] in ("reserve", "settle") and "price" in row["about"]]
    priced = [row for row in priced if row["events"] and terms[row["population"]].composition.kind != "basic"]
    for row in priced:
        composition, run_id = terms[row["population"]].composition, row["run_id"]
        cost = composition.events_price(row["events"], adjacencies[run_id], row["about"].get("together", 1))
        if row["about"]["price"] < cost * (1 - 1e-9):
            raise LedgerBroken(
                f"row {row['seq']} charges run {run_id!r} {row['about']['price']:g}, its events cost {cost:g}; find out"
                " which software wrote it."
            )
    return len(priced)
