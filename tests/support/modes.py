"""Who can read files, where the umask lets everybody."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def open_umask() -> Iterator[None]:
    """Within the block, what is written without a mode of its own can be read and written by everybody."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def open_to_others(place: Path) -> list[str]:
    """What in a folder, or the file itself, others have any permission for."""
    return [str(path) for path in (place, *place.rglob("*")) if path.lstat().st_mode & 0o077]
