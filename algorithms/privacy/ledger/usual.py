"""In which ledger a home has seen a population charged, since another one would be a second budget for the same people.

The home records it once a run on a private population is reserved.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from algorithms.errors import RefusedError
from algorithms.privacy.ledger.heads import write_line
from algorithms.privacy.ledger.ledger import Ledger, identity
from algorithms.privacy.ledger.place import LEDGER, sqlite_url


def check_usual(ledger: Ledger, population: str, *, home: Path) -> None:
    """Raise RefusedError if this home has seen the population charged in another ledger, or contains such a ledger.

    Otherwise a branch that names another ledger would have a second budget for the same people. A ledger that was
    restored elsewhere from a copy is the same ledger.
    """
    kept, own = _usual(population, home), home / LEDGER
    way_out = f"remove {kept}" if kept.exists() else f"keep {own} elsewhere"
    is_another = (
        kept.read_text(encoding="utf-8").strip() != identity(ledger)
        if kept.exists()
        else own.is_file() and _charges(Ledger.open(sqlite_url(own)), population, other_than=ledger)
    )
    if is_another:
        raise RefusedError(
            f"the population {population!r} is charged in another ledger than the one that is named here; name that"
            f" one, restore it here from a copy, or {way_out} where its owner began a new one."
        )


def check_place(ledger: Ledger, population: str, *, public: bool, home: Path) -> None:
    """Do `check_usual` for a private population, and for a public one that was charged as private before."""
    if not public or _usual(population, home).exists():
        check_usual(ledger, population, home=home)


def keep_usual(ledger: Ledger, population: str, *, home: Path) -> None:
    """Record in `home`, for good, the ledger in which a population is charged, by the first hash of its chain.

    Call this for a run that is reserved there. Raises RefusedError if a run was charged in another ledger meanwhile.
    """
    kept = _usual(population, home)
    if not kept.exists():
        write_line(kept, identity(ledger) or "", put=_link)
    check_usual(ledger, population, home=home)


def _charges(own: Ledger, population: str, *, other_than: Ledger) -> bool:
    """Whether `own` is a different ledger and has ever reserved a run of the population."""
    return identity(own) != identity(other_than) and own.is_charged(population)


def _usual(population: str, home: Path) -> Path:
    return home / "ledger_of" / hashlib.sha256(population.encode()).hexdigest()[:16]


def _link(fresh: Path, file: Path) -> None:
    """Move a file to its place unless another exists there."""
    with suppress(FileExistsError):
        os.link(fresh, file)
