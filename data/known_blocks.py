"""Under which name records were first seen, so that a block that was renamed or cut anew is not taken for a new one.

Kept in the user's home, beside the owner key, by digests that only this key makes. A record is digested as it was read,
whatever its card makes of it, and the order of records does not count. It sees a block that comes whole under another
name, or of which a tenth does and at least 16 records, in one other block or in all together (unless a record may be
in several); not what another home has seen, nor values that were rewritten.
"""

import hashlib
import json
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from data.columns import Date, Ignored
from data.errors import DataRefused
from data.formats import Table
from data.owner import keyed
from data.sketch import Sketch

_DIGEST_BYTES, _KEPT_BYTES = 16, 8


@dataclass
class Contents:
    """The records of one block. total: the sum of their digests, in any order. earlier: marks of other times."""

    total: int = 0
    records: int = 0
    sketch: Sketch = field(default_factory=Sketch)
    earlier: frozenset[str] = frozenset()

    def add(self, digest: bytes) -> None:
        """Counts one more record."""
        self.total = (self.total + int.from_bytes(digest)) % 256**_DIGEST_BYTES
        self.records += 1
        self.sketch.add(digest[:_KEPT_BYTES].hex())

    @property
    def marks(self) -> frozenset[str]:
        """One for all records that the block held at a time; none while it is empty."""
        return self.earlier | ({f"{self.records}:{self.total:x}"} if self.records else set())

    def is_too_like(self, other: "Contents") -> bool:
        """Whether the records of both were ever the same, or many of them."""
        return bool(self.marks & other.marks) or self.sketch.shares_many(other.sketch)

    def joined(self, before: "Contents | None") -> "Contents":
        """What the block ever held."""
        if before is None:
            return self
        return Contents(sketch=self.sketch.joined(before.sketch), earlier=self.marks | before.marks)

    def to_json(self) -> dict[str, Any]:
        """What is kept of it."""
        return {"marks": sorted(self.marks), "sketch": self.sketch.kept}

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> "Contents":
        """What `to_json` gave."""
        return cls(sketch=Sketch(Counter(kept["sketch"])), earlier=frozenset(kept["marks"]))


class KnownBlocks:
    """The blocks of one population.

    folder: where they are kept, or None to keep nothing. key: of the digests. blocks_per_person: in how many blocks
    the same record may be, as one of a person that never changes.
    """

    def __init__(
        self, population: str, *, folder: Path | None, key: bytes, blocks_per_person: int = 1
    ) -> None:
        name = hashlib.sha256(population.encode()).hexdigest()[:16]
        self._file = None if folder is None else folder / f"{name}.json"
        self._population, self._key = population, keyed(key, ["records of blocks"])
        self._most, self._known = blocks_per_person, self._kept()

    def add(self, rows: pa.Table, declared: Table, contents: Contents) -> None:
        """Counts rows, which have the declared columns, to a block's contents, by what records are made of."""
        read = [column.name for column in declared.columns if not isinstance(column, Date | Ignored)]
        dates = [column for column in declared.columns if isinstance(column, Date)]
        names = sorted({*read, *(part for column in dates for part in (column.month, column.day))})
        columns = [_texts(rows[name]) for name in names]
        salted = hashlib.blake2b(json.dumps(names).encode(), key=self._key, digest_size=_DIGEST_BYTES)
        for row in zip(*columns, strict=True):
            hasher = salted.copy()
            hasher.update(json.dumps(row).encode())
            contents.add(hasher.digest())

    def check(self, name: str, contents: Contents) -> None:
        """Raises DataRefused where too many blocks of other names, or all together, have the same records or many."""
        others = {other: known for other, known in self._known.items() if other != name}
        alike = [other for other, known in others.items() if contents.is_too_like(known)]
        if len(alike) >= self._most:
            places = "one block alone" if self._most == 1 else f"{self._most} blocks at most"
            raise DataRefused(
                f"The blocks {alike[0]!r} and {name!r} of population {self._population!r} hold the same records or many"
                f" of them, and a record is in {places}, whose name is for ever; leave each record in the block that"
                " had it first."
            )
        if self._most == 1 and contents.sketch.shares_many(*(known.sketch for known in others.values())):
            raise DataRefused(
                f"Many records of the block {name!r} of population {self._population!r} are in other blocks of it, a"
                " few in each, as if the same people had been cut into blocks anew; leave each record in the block that"
                " had it first."
            )
        self._known[name] = contents.joined(self._known.get(name))

    def check_held_out(self, contents: Contents) -> None:
        """Raises DataRefused where a block, or all together, have the records of a test file or many of them."""
        alike = [name for name, known in self._known.items() if contents.is_too_like(known)]
        if alike or contents.sketch.shares_many(*(known.sketch for known in self._known.values())):
            where = f"in the block {alike[0]!r}" if alike else "in its blocks, a few in each"
            raise DataRefused(
                f"Many records of the test file of population {self._population!r} are {where}, so that records trained"
                " on could be published as held out; take a test file of records that no block has or had."
            )

    def keep(self) -> None:
        """Remembers what was seen."""
        if self._file is None:
            return
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        meanwhile = self._kept()  # by another process
        known = {name: seen.joined(meanwhile.get(name)) for name, seen in self._known.items()}
        descriptor, fresh = tempfile.mkstemp(dir=self._file.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({name: seen.to_json() for name, seen in (meanwhile | known).items()}, file)
        os.replace(fresh, self._file)

    def _kept(self) -> dict[str, Contents]:
        if self._file is None or not self._file.is_file():
            return {}
        kept: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
        # Older software kept names by digests of encoded records, of which nothing can be compared.
        return {name: Contents.from_json(seen) for name, seen in kept.items() if isinstance(seen, dict)}


def _texts(values: pa.ChunkedArray) -> list[str | None]:
    return [None if value is None else str(value).strip() for value in values.to_pylist()]
