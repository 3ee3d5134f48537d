"""Under which name records were first seen, so that a block that was renamed is not taken for a new one.

Kept in the user's home, beside the owner key, by digests that only this key makes. It sees the same records under
another name: not rows that moved between blocks, and not what another home has seen.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from data.errors import DataRefused
from data.owner import keyed
from data.records import Block


class KnownBlocks:
    """The blocks of one population. folder: where they are kept, or None to keep nothing. key: of the digests."""

    def __init__(self, population: str, *, folder: Path | None, key: bytes) -> None:
        name = hashlib.sha256(population.encode()).hexdigest()[:16]
        self._file = None if folder is None else folder / f"{name}.json"
        self._population, self._key = population, key
        self._names = self._kept()

    def seen(self, name: str, blocks: Iterable[Block]) -> Iterator[Block]:
        """The records of a block as they come; raises DataRefused at their end where another block had the same."""
        digest, count = hashlib.sha256(), 0
        for block in blocks:
            block.records.add_to(digest)
            count += len(block.records)
            yield block
        mark = keyed(self._key, ["records of a block", digest.hexdigest()]).hex()
        other = self._names.setdefault(mark, name) if count else name
        if other != name:
            raise DataRefused(
                f"The blocks {other!r} and {name!r} of population {self._population!r} hold the same records, and a"
                " record is in one block alone, whose name is for ever; leave one of them."
            )

    def keep(self) -> None:
        """Remembers what was seen."""
        if self._file is None:
            return
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, fresh = tempfile.mkstemp(dir=self._file.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(
                self._kept() | self._names, file, indent=1
            )  # what another process has kept meanwhile stays
        os.replace(fresh, self._file)

    def _kept(self) -> dict[str, str]:
        if self._file is None or not self._file.is_file():
            return {}
        names: dict[str, str] = json.loads(self._file.read_text(encoding="utf-8"))
        return names
