"""The ledger as this user's home knows it: its newest heads, where it was verified to, which population it charges.

Heads of the ledger that are kept outside of it show an older copy that was put back, whose own chain holds. Known are
the head in the receipt of the checkout's last run, and those that this home saw last at the same URL and of the same
ledger, wherever it was: an old copy at another URL is an older copy, too. A receipt of another ledger, as in a checkout
that was made on another machine, says nothing about this one; the hash of the first row tells them apart. Which ledger
a private population is charged in is kept in the home as well, once a run is reserved there.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sqlalchemy.engine import make_url

from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.privacy.ledger import NOTHING, Checkpoint, Head, Ledger, identity
from data.prepare.files import write_whole
from tasks.config import params
from tasks.config.environment import LEDGER, home, ledger_url, sqlite_url


def open_ledger(root: Path) -> Ledger:
    """The ledger that the checkout at `root` charges; raises LedgerBrokenError where an older copy was put back.

    Of a folder without params.yaml it is the one that a notebook charges.
    """
    file = root / "params.yaml"
    url = ledger_url(params.load(file, reads=("ledger",)).ledger.url if file.exists() else None)
    ledger = open_newest(url, home=home(), root=root)
    remember(ledger, url, home=home())
    return ledger


def open_newest(url: str, *, home: Path, root: Path) -> Ledger:
    """The ledger at a URL, compared with the heads that are known of it.

    home: where heads are kept. root: the checkout. Raises LedgerBrokenError where the ledger lacks a row that it once
    had, and RefusedError where it cannot be opened.
    """
    at_url = _at_url(url, home)
    ledger = Ledger.open(url, verified=_kept(at_url))
    head = head_of(root / "artifacts" / "receipt.json", ledger)
    if head is not None:
        ledger.check_contains(head)
    for seen in _files(ledger, url, home):
        try:
            ledger.check_contains(_kept(seen).hash)
        except LedgerBrokenError as error:
            raise LedgerBrokenError(
                f"{str(error).rstrip('.')}, or remove {seen} where its owner began a new one."
            ) from None
    return ledger


def remember(ledger: Ledger, url: str, *, home: Path) -> None:
    """Keeps the ledger's head in `home`; a head of a moment ago does no harm, so processes need not take turns.

    Whoever opens the ledger next in this home verifies the rows after it.
    """
    head = ledger.verified()
    for file in _files(ledger, url, home):
        _write(file, f"{head.seq} {head.hash}")


def head_of(path: Path, ledger: Ledger) -> str | None:
    """The head in a receipt where it is of this ledger; None for another one's, for an old receipt and for none."""
    if not path.is_file():
        return None
    kept = json.loads(path.read_text(encoding="utf-8")).get("ledger", {})
    is_ours = kept.get("first") is not None and kept["first"] == identity(ledger)
    return str(kept["head"]) if is_ours else None


def check_usual(ledger: Ledger, population: str, *, home: Path) -> None:
    """Raises RefusedError where this user's home has seen the population charged in another ledger, or has one where
    it is.

    Else a branch that names another one would have a second budget for the same people. A ledger that was restored
    elsewhere from a copy is the same one.
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
    """`check_usual` of private people, and of public ones where they were charged as private before."""
    if not public or has_usual(population, home=home):
        check_usual(ledger, population, home=home)


def has_usual(population: str, *, home: Path) -> bool:
    """Whether people were charged as private ones before: another ledger, which says public of them, is refused too."""
    return _usual(population, home).exists()


def keep_usual(ledger: Ledger, population: str, *, home: Path) -> None:
    """Keeps in `home` which ledger, by the first hash of its chain, a population is charged in, for ever.

    It is for a run that is reserved there; raises RefusedError where another one was charged elsewhere meanwhile.
    """
    kept = _usual(population, home)
    if not kept.exists():
        _write(kept, identity(ledger) or "", put=_link)
    check_usual(ledger, population, home=home)


def _charges(own: Ledger, population: str, *, other_than: Ledger) -> bool:
    """Whether a ledger that is another one has ever reserved a run of the population."""
    return identity(own) != identity(other_than) and own.is_charged(population)


def _usual(population: str, home: Path) -> Path:
    return home / "ledger_of" / hashlib.sha256(population.encode()).hexdigest()[:16]


def _files(ledger: Ledger, url: str, home: Path) -> list[Path]:
    """Where the head of what is at the URL is kept, and that of the ledger itself once it has a row."""
    first = identity(ledger)
    return [_at_url(url, home), *([home / "ledger_heads" / first[:16]] if first else [])]


def _at_url(url: str, home: Path) -> Path:
    place = make_url(url).set(password=None).render_as_string()
    return home / "ledger_heads" / hashlib.sha256(place.encode()).hexdigest()[:16]


def _kept(file: Path) -> Head:
    """The head in a file, as of version 0.2 without its place, from which nothing can be gone on; none without one."""
    try:
        words = file.read_text(encoding="utf-8").split()
        return Head(int(words[0]) if words[1:] else 0, words[-1])
    except (OSError, ValueError, IndexError):
        return NOTHING


def _write(file: Path, line: str, *, put: Callable[[Path, Path], object] = os.replace) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(file, lambda fresh: fresh.write_text(line + "\n", encoding="utf-8"), mode=0o600, put=put)


def _link(fresh: Path, file: Path) -> None:
    """Puts a file in its place where there is none."""
    with suppress(FileExistsError):
        os.link(fresh, file)


def keep_checkpoint(checkpoint: Checkpoint) -> None:
    """Signs a checkpoint and keeps it in the home, in place of the one before it."""
    if checkpoint.first is None:
        return
    file = _checkpoint_file(checkpoint.first)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    from tasks.runs.signing import signing_key  # what cards are made of takes longer than the rest

    text = checkpoint.signed(signing_key(home()))
    write_whole(file, lambda fresh: fresh.write_text(text, encoding="utf-8"), mode=0o600)


def kept_checkpoint(ledger: Ledger) -> Checkpoint | None:
    """The checkpoint of a ledger; None where this home has none. Raises RefusedError for one that it did not sign."""
    file = _checkpoint_file(identity(ledger) or "")
    if not file.is_file():
        return None
    from tasks.runs.signing import signing_key

    return Checkpoint.load(file.read_text(encoding="utf-8"), signing_key(home()).public_key())


def _checkpoint_file(first: str) -> Path:
    return home() / "ledger_checkpoints" / f"{first[:16]}.json"
