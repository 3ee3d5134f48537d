"""Read files, write them whole or not at all, and lock those that several processes share."""

import fcntl
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def write_whole(
    path: Path,
    content: Callable[[Path], object],
    *,
    mode: int = 0o666,
    put: Callable[[Path, Path], object] = os.replace,
) -> None:
    """Write a file through a temporary file next to it, so that a crash leaves the old file, the new one or none.

    content: writes the temporary file. mode: of the file, before the umask. put: moves the file to its place.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        content(fresh)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        put(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a text file whole; see `write_whole`."""
    write_whole(path, lambda fresh: fresh.write_text(text, encoding="utf-8"), mode=mode)


def taken(path: Path) -> int | None:
    """Lock a file and return a descriptor that holds the lock until it is closed; None if another process has locked or
    deleted the file.

    This is for a lock file that is deleted with its folder; `filelock`, which is used elsewhere, would create the
    folder again. Raises FileNotFoundError if the folder does not exist.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        is_there = False
    if not is_there:
        os.close(descriptor)
        return None
    return descriptor
