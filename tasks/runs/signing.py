"""The key that signs cards.

The owner of the data signs cards with a key that is derived from the owner key of the home. The public half is in
`owner.pub` next to the owner key, and with each run that the ledger reserves. Anyone who has it can check a run's card.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from data.files import OWNER_PUB, keyed_digest, owner_key, public_key, write_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_WORDS = ["key that signs privacy cards"]


def signing_key(home: Path) -> "Ed25519PrivateKey":
    """The signing key of a home, created at first use with owner.pub; raises DataRefusedError if it is damaged."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from algorithms.privacy.card import public_key_of  # takes longer to import than the rest

    key = Ed25519PrivateKey.from_private_bytes(keyed_digest(owner_key(home), _WORDS))
    if public_key(home) != public_key_of(key):
        write_text(home / OWNER_PUB, f"{public_key_of(key)}\n")
    return key


def signer(home: Path) -> dict[str, str]:
    """The ledger's entry about the signer of a reserved run's card."""
    from algorithms.privacy.card import SIGNER, public_key_of

    return {SIGNER: public_key_of(signing_key(home))}
