"""Under which name records were first seen, so that a block that was renamed or cut anew is not taken for a new one.

Kept in the user's home, beside the owner key, by digests that only this key makes. A record is digested as it was read,
whatever its card makes of it, and the order of records does not count. It sees a block that comes whole under another
name, or of which a tenth does and at least 16 records, in one other block or in all together (unless a record may be
in several); of few kinds of records (fewer than about 32) one that comes almost whole, and of very few (fewer than
about 6) none but a whole one. Not what another home has seen, nor values that were rewritten.
"""

import hashlib
import json
from pathlib import Path

import pyarrow as pa

from data.charged_blocks import DIGEST_BYTES, ChargedBlocks, Contents
from data.columns import Date, Ignored
from data.errors import DataRefused
from data.formats import Table
from data.owner import keyed


class KnownBlocks:
    """The blocks of one population, as they are prepared.

    folder: where those that were charged are kept, or None to keep nothing. key: of the digests. blocks_per_person: in
    how many blocks the same record may be, as one of a person that never changes.
    """

    def __init__(
        self, population: str, *, folder: Path | None, key: bytes, blocks_per_person: int = 1
    ) -> None:
        self._population, self._key = population, keyed(key, ["records of blocks"])
        self._kept = ChargedBlocks(population, folder=folder, blocks_per_person=blocks_per_person)
        self._known, self._seen = self._kept.read(), dict[str, Contents]()
        self._columns = next((known.columns for known in self._known.values() if known.columns), ())

    def add(self, rows: pa.Table, declared: Table, contents: Contents) -> None:
        """Counts rows, which have the declared columns, to a block's contents, by what records are made of.

        Those columns are the same for ever, whatever a card makes of them later, or nothing could be compared.
        Raises DataRefused where the rows lack one of them.
        """
        contents.columns = self._columns = self._columns or _made_of(declared)
        missing = [name for name in self._columns if rows.column_names.count(name) != 1]
        if missing:
            raise DataRefused(
                f"The blocks of population {self._population!r} are known again by the column {missing[0]!r} among"
                " others, which is not read any more; give it back to the card, at least as ignored."
            )
        columns = [_texts(rows[name]) for name in self._columns]
        salted = hashlib.blake2b(json.dumps(self._columns).encode(), key=self._key, digest_size=DIGEST_BYTES)
        for row in zip(*columns, strict=True):
            hasher = salted.copy()
            hasher.update(json.dumps(row).encode())
            contents.add(hasher.digest())

    def check(self, name: str, contents: Contents) -> None:
        """Raises DataRefused where blocks that were charged, or that came before here, have the same records."""
        self._kept.check(name, contents, self._known)
        self._seen[name], self._known[name] = contents, contents.joined(self._known.get(name))

    def check_held_out(self, contents: Contents) -> None:
        """Raises DataRefused where a block, or all together, have the records of a test file or many of them."""
        alike = [name for name, known in self._known.items() if contents.is_too_like(known)]
        if alike or contents.sketch.shares_many(*(known.sketch for known in self._known.values())):
            where = f"in the block {alike[0]!r}" if alike else "in its blocks, a few in each"
            raise DataRefused(
                f"Many records of the test file of population {self._population!r} are {where}, so that records trained"
                " on could be published as held out; take a test file of records that no block has or had."
            )

    def note(self, preparation: str) -> None:
        """Remembers what was seen until a run is charged for it; preparation: by what the prepared folder is known."""
        self._kept.note(preparation, self._seen)


def _made_of(declared: Table) -> tuple[str, ...]:
    """The columns of the file that records are made of."""
    read = [column.name for column in declared.columns if not isinstance(column, Date | Ignored)]
    dates = [column for column in declared.columns if isinstance(column, Date)]
    return tuple(sorted({*read, *(part for column in dates for part in (column.month, column.day))}))


def _texts(values: pa.ChunkedArray) -> list[str | None]:
    return [None if value is None else str(value).strip() for value in values.to_pylist()]
