"""The owner key: one secret per machine, so that nothing about private files can be guessed from what is published."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from data.schema.errors import DataRefusedError

KEY_BYTES = 32
OWNER_KEY = "owner.key"
"""The key's file in the home."""
PUBLIC_KEY = bytes(KEY_BYTES)
"""Used instead of the secret for public records, so that prepared data have the same checksum on every machine."""


def owner_key(home: Path) -> bytes:
    """The 32 secret bytes in `home`/owner.key, created at first use and readable by the owner only.

    Raises DataRefusedError if the file is not a key.
    """
    path = home / OWNER_KEY
    if not path.exists():
        _make(path)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise DataRefusedError(
            f"{path} is not an owner key of {KEY_BYTES} bytes; restore it, or move it away for a new one."
        )
    return key


def keyed(key: bytes, words: Iterable[str]) -> bytes:
    """32 bytes that only a holder of `key` can derive from `words` (HMAC-SHA256, RFC 2104)."""
    return hmac.new(key, "\n".join(words).encode(), hashlib.sha256).digest()


def _make(path: Path) -> None:
    """Write a key and link it into place, so that one of two processes wins and none reads half a key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"owner.key.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
