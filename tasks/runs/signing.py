"""Who signs privacy cards: the owner of the data, with a key that follows from the owner key of the home.

Its public half stands beside that key, in `owner.pub`, and with each run that the ledger reserves; whoever has it from
one of these can check the run's card.
"""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from algorithms.privacy.card import SIGNER, public_key_of
from data.prepare.files import write_whole
from data.prepare.secret_key import keyed, owner_key

PUBLIC = "owner.pub"
_WORDS = ["key that signs privacy cards"]


def signing_key(home: Path) -> Ed25519PrivateKey:
    """The key of a home, which is made at first use, its public half written; raises DataRefusedError for a damaged
    one.
    """
    key = Ed25519PrivateKey.from_private_bytes(keyed(owner_key(home), _WORDS))
    if public_key(home) != public_key_of(key):
        write_whole(
            home / PUBLIC, lambda fresh: fresh.write_text(f"{public_key_of(key)}\n", encoding="utf-8")
        )
    return key


def public_key(home: Path) -> str | None:
    """The public half in a home; None where no card was ever signed there."""
    path = home / PUBLIC
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def signer(home: Path) -> dict[str, str]:
    """What the ledger notes of who will sign the card of a run that it reserves."""
    return {SIGNER: public_key_of(signing_key(home))}
