"""The ledger that a checkout charges, and what this home records about it.

An older copy of the ledger that was restored is detected by the heads that this home saw last, see
`algorithms.privacy.ledger.heads`, and by the head in the receipt of the checkout's last run. The receipt of another
ledger, as in a checkout from another machine, says nothing about this one.
"""

from pathlib import Path

from algorithms.privacy.ledger import Checkpoint, Ledger, heads, identity
from algorithms.privacy.ledger.heads import remember
from data.files import read_json, write_text
from tasks.config import params
from tasks.config.environment import home, ledger_url


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
