"""Results of finished runs, kept in the home: what was paid for is there still where DVC never had it, or lost it.

A result is what a run releases: model, noise trace and receipt. One of records that are public is not kept, since
training again is free. Whoever needs the room deletes the folder of a run below `results`.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from data.prepare.files import write_whole

RESULTS = "results"
"""The folder of the home with a folder for each kept run, named by its id."""

_RELEASED = ("model.safetensors", "trace.parquet")


def keep(home: Path, run_id: str, result: Path) -> None:
    """Copies the folder with a run's result, whole or not at all; a run that is kept already stays as it is.

    For who holds the run's lock: of two that keep one run at once, one would sweep away what the other has copied.
    """
    (home / RESULTS).mkdir(mode=0o700, exist_ok=True)
    entry, fresh = home / RESULTS / run_id, home / RESULTS / f".new-{run_id}"
    if entry.is_dir():
        return
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(result, fresh, copy_function=_copy)
    fresh.rename(entry)


def kept(home: Path, run_id: str) -> Path | None:
    """The folder with the result of a run; None where none is kept that is whole, by the checksums of its receipt."""
    entry = home / RESULTS / run_id
    try:
        receipt: dict[str, Any] = json.loads((entry / "receipt.json").read_text(encoding="utf-8"))
        same = all(_digest(entry / name) == receipt["sha256"][name] for name in _RELEASED)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return entry if same and receipt.get("run_id") == run_id else None


def _copy(source: str, target: str) -> None:
    """A copy that is on the disk before this returns."""
    write_whole(Path(target), lambda fresh: shutil.copyfile(source, fresh), mode=0o600)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
