"""The ledger that a checkout charges, and what this home records about it.

An older copy of the ledger that was restored is detected by the heads that this home saw last, see
`algorithms.privacy.ledger.heads`, and by the head in the receipt of the checkout's last run. The receipt of another
ledger, as in a checkout from another machine, says nothing about this one. Once a run on a private population is
reserved, the home also records in which ledger the population is charged.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from algorithms.errors import RefusedError
from algorithms.privacy.ledger import Checkpoint, Ledger, heads, identity
from algorithms.privacy.ledger.heads import remember, write_line
from data.prepare.files import read_json, write_text
from tasks.config import params
from tasks.config.environment import LEDGER, home, ledger_url, sqlite_url


def open_ledger(root: Path, settings: params.Params | None = None) -> Ledger:
    """Open the ledger that the checkout at `root` charges; raises LedgerBrokenError if it is an older copy.

    settings: in place of params.yaml. For a folder without params.yaml, it is the ledger that a notebook charges.
    """
    file = root / "params.yaml"
    if settings is None and file.exists():
        settings = params.load(file, reads=("ledger",))
    url = ledger_url(None if settings is None else settings.ledger.url)
    ledger = open_newest(url, home=home(), root=root)
    remember(ledger, url, home=home())
    return ledger


def open_newest(url: str, *, home: Path, root: Path) -> Ledger:
    """Do `heads.open_newest`, and compare the ledger with the receipt of the checkout at `root`, too."""
    ledger = heads.open_newest(url, home=home)
    head = head_of(root / "artifacts" / "receipt.json", ledger)
    if head is not None:
        ledger.check_contains(head)
    return ledger


def head_of(path: Path, ledger: Ledger) -> str | None:
    """The head in a receipt of this ledger; None if it is of another ledger, too old or missing."""
    if not path.is_file():
        return None
    kept = read_json(path).get("ledger", {})
    is_ours = kept.get("first") is not None and kept["first"] == identity(ledger)
    return str(kept["head"]) if is_ours else None


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


def keep_checkpoint(checkpoint: Checkpoint) -> None:
    """Sign a checkpoint and store it in the home, replacing the previous one."""
    if checkpoint.first is None:
        return
    file = _checkpoint_file(checkpoint.first)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    from tasks.runs.signing import signing_key  # importing what cards need takes longer than the rest

    write_text(file, checkpoint.signed(signing_key(home())), mode=0o600)


def kept_checkpoint(ledger: Ledger) -> Checkpoint | None:
    """The stored checkpoint of a ledger, or None. Raises RefusedError if this home did not sign it."""
    file = _checkpoint_file(identity(ledger) or "")
    if not file.is_file():
        return None
    from tasks.runs.signing import signing_key

    return Checkpoint.load(file.read_text(encoding="utf-8"), signing_key(home()).public_key())


def _checkpoint_file(first: str) -> Path:
    return home() / "ledger_checkpoints" / f"{first[:16]}.json"
