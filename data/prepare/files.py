"""Files that several processes share: written whole or not at all, and held by one process at a time."""

import fcntl
import os
import secrets
from collections.abc import Callable
from pathlib import Path


def write_whole(
    path: Path,
    content: Callable[[Path], object],
    *,
    mode: int = 0o666,
    put: Callable[[Path, Path], object] = os.replace,
) -> None:
    """Writes a file by way of a fresh one beside it, so that a crash leaves the old file, the new one or none.

    content: writes the fresh file. mode: of the file, less what the umask takes. put: moves it into its place.
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


def taken(path: Path) -> int | None:
    """A descriptor that holds a lock file until it is closed; None where another process holds it, or took it away.

    For a lock that is deleted with the folder that it is in: `filelock`, which the others are of, would make the folder
    anew. Raises FileNotFoundError where the folder is gone.
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
