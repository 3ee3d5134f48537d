"""The files of a comparison, which are written whole or not at all."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from data.files import read_json, write_text, write_whole
from tasks.config.params import ParamsRefusedError


@dataclass(frozen=True)
class Place:
    """The folder of one comparison. root: the checkout, as an absolute path."""

    root: Path
    name: str

    @property
    def folder(self) -> Path:
        """The folder of all files of this comparison."""
        return self.root / "artifacts" / "compare" / self.name

    @property
    def cells(self) -> Path:
        """The results, one JSON file per finished cell."""
        return self.folder / "cells"

    @property
    def plans(self) -> Path:
        """The plans."""
        return self.folder / "plans"

    @property
    def failures(self) -> Path:
        """Tracebacks of cells that failed."""
        return self.folder / "failures"

    @property
    def store(self) -> Path:
        """Prepared data sets, shared by all comparisons of the checkout."""
        return self.root / "artifacts" / "compare" / ".data"

    @property
    def stop(self) -> Path:
        """A file that asks workers to start no further cell."""
        return self.folder / "stop"

    def ledger_url(self, *, dataset: str, model: str, method: str) -> str:
        """The ledger of a method on a problem; they are separate, since a ledger with more rows takes longer."""
        return f"sqlite:///{self.folder / 'ledger' / f'{dataset}-{model}-{method}.sqlite'}"

    def ledger_urls(self) -> list[str]:
        """The existing ledgers."""
        return [f"sqlite:///{path}" for path in sorted((self.folder / "ledger").glob("*.sqlite"))]

    def finished(self) -> set[str]:
        """The digests of the cells that have a result."""
        return {path.stem for path in self.cells.glob("*.json")}

    def result(self, digest: str) -> dict[str, Any]:
        """The result of a finished cell."""
        return read_json(self.cells / f"{digest}.json")


@contextmanager
def held(place: Place) -> Iterator[None]:
    """Lock the comparison within the block; raises ParamsRefusedError if another process has locked it."""
    for folder in (place.cells, place.plans, place.failures):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(place.folder / "lock").acquire(blocking=False)
    except Timeout:
        raise ParamsRefusedError(
            f"another process works on the comparison {place.name!r}; wait for its end."
        ) from None
    with lock:
        place.stop.unlink(missing_ok=True)
        for half in (path for folder in (place.cells, place.plans) for path in folder.glob(".*")):
            half.unlink()  # left by a process that was killed while writing
        yield


def write_json(path: Path, document: object) -> None:
    """Write a JSON document."""
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_parquet(path: Path, frame: pd.DataFrame) -> None:
    """Write a table."""
    write_whole(path, lambda fresh: frame.to_parquet(fresh, index=False))
