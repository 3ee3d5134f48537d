"""Where a verification of the ledger ended, signed with the owner's key of the home: the next one goes on there."""

from pathlib import Path

from algorithms.privacy.ledger import Checkpoint, Ledger, identity
from data.prepare.files import write_whole
from tasks.config.environment import home
from tasks.runs.signing import signing_key


def keep(checkpoint: Checkpoint) -> None:
    """Signs a checkpoint and keeps it in the home, in place of the one before it."""
    if checkpoint.first is None:
        return
    file = _file(checkpoint.first)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = checkpoint.signed(signing_key(home()))
    write_whole(file, lambda fresh: fresh.write_text(text, encoding="utf-8"), mode=0o600)


def kept(ledger: Ledger) -> Checkpoint | None:
    """The checkpoint of a ledger; None where this home has none. Raises RefusedError for one that it did not sign."""
    file = _file(identity(ledger) or "")
    if not file.is_file():
        return None
    return Checkpoint.load(file.read_text(encoding="utf-8"), signing_key(home()).public_key())


def _file(first: str) -> Path:
    return home() / "ledger_checkpoints" / f"{first[:16]}.json"
