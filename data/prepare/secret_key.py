"""The owner key: one secret per machine, so that nothing about private files can be guessed from what is published."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from data.prepare.files import write_whole
from data.schema.errors import DataRefusedError

KEY_BYTES = 32
OWNER_KEY = "owner.key"
"""The key's file in the home."""
OWNER_PUB = "owner.pub"
"""The file in the home with the public half of the signing key, which is derived from the owner key."""
PUBLIC_KEY = bytes(KEY_BYTES)
"""Used instead of the secret for public records, so that prepared data have the same checksum on every machine."""


def owner_key(home: Path) -> bytes:
    """The 32 secret bytes in `home`/owner.key, created at first use and readable by the owner only.

    Raises DataRefusedError if the file is not a key, or was lost: with another key, what was charged before is another
    run, and what was trained on before are other records.
    """
    path, signed = home / OWNER_KEY, home / OWNER_PUB
    if not path.exists():
        if signed.exists():
            raise DataRefusedError(
                f"{path} is gone, with which runs were charged here; restore it, or move {signed} away for a new one."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # linked into place, so that one of two processes wins
            fresh = secrets.token_bytes(KEY_BYTES)
            write_whole(path, lambda file: file.write_bytes(fresh), mode=0o600, put=os.link)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise DataRefusedError(
            f"{path} is not an owner key of {KEY_BYTES} bytes; restore it, or move it and {signed} away for a new one."
        )
    return key


def keyed(key: bytes, words: Iterable[str]) -> bytes:
    """32 bytes that only a holder of `key` can derive from `words` (HMAC-SHA256, RFC 2104)."""
    return hmac.new(key, "\n".join(words).encode(), hashlib.sha256).digest()
