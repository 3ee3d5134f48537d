"""The key with which the owner of the data signs privacy cards; it is derived from the owner key of the home.

The public half is in `owner.pub` next to the owner key, and with each run that the ledger reserves. Anyone who has it
can check a run's card.
"""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from algorithms.privacy.card import SIGNER, public_key_of
from data.files import OWNER_PUB, keyed, owner_key, write_text

_WORDS = ["key that signs privacy cards"]


def signing_key(home: Path) -> Ed25519PrivateKey:
    """The signing key of a home, created at first use with owner.pub; raises DataRefusedError if it is damaged."""
    key = Ed25519PrivateKey.from_private_bytes(keyed(owner_key(home), _WORDS))
    if public_key(home) != public_key_of(key):
        write_text(home / OWNER_PUB, f"{public_key_of(key)}\n")
    return key


def public_key(home: Path) -> str | None:
    """The public key of a home; None if no card was ever signed there."""
    path = home / OWNER_PUB
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None


def signer(home: Path) -> dict[str, str]:
    """The ledger's entry about the signer of a reserved run's card."""
    return {SIGNER: public_key_of(signing_key(home))}
