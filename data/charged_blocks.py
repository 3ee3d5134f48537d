"""What this user's home knows of the blocks of a population: those of runs that were charged, and those only prepared.

A block that was prepared and never charged has no name to keep, so a file may be renamed until then. What preparing has
read waits in the home under a digest of the prepared folder, and the run that is charged for it moves it to the others.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock

from data.errors import DataRefused
from data.files import write_whole
from data.sketch import Sketch

DIGEST_BYTES = 16
_KEPT_BYTES = 8


@dataclass
class Contents:
    """The records of one block. total: the sum of their digests, in any order. earlier: marks of other times.

    columns: what the digests are of; none where older software did not say it.
    """

    total: int = 0
    records: int = 0
    sketch: Sketch = field(default_factory=Sketch)
    earlier: frozenset[str] = frozenset()
    columns: tuple[str, ...] = ()

    def add(self, digest: bytes) -> None:
        """Counts one more record."""
        self.total = (self.total + int.from_bytes(digest)) % 256**DIGEST_BYTES
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
            return Contents(sketch=Sketch(self.sketch.kept), earlier=self.marks, columns=self.columns)
        sketch, columns = self.sketch.joined(before.sketch), self.columns or before.columns
        return Contents(sketch=sketch, earlier=self.marks | before.marks, columns=columns)

    def to_json(self) -> dict[str, Any]:
        """What is kept of it."""
        return {"marks": sorted(self.marks), "sketch": self.sketch.kept, "columns": self.columns}

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> "Contents":
        """What `to_json` gave."""
        sketch, columns = Sketch(Counter(kept["sketch"])), tuple(kept.get("columns", ()))
        return cls(sketch=sketch, earlier=frozenset(kept["marks"]), columns=columns)


Known: TypeAlias = Mapping[str, Contents]
"""Blocks by name."""


class ChargedBlocks:
    """The blocks of one population. folder: where they are kept, or None to keep nothing.

    blocks_per_person: in how many blocks the same record may be, as one of a person that never changes.
    """

    def __init__(self, population: str, *, folder: Path | None, blocks_per_person: int = 1) -> None:
        self._population, self._folder, self._most = population, folder, blocks_per_person
        self._name = hashlib.sha256(population.encode()).hexdigest()[:16]

    def read(self) -> dict[str, Contents]:
        """Those of runs that were charged, and those that older software prepared; raises DataRefused if damaged."""
        return {} if self._folder is None else _read(self._folder / f"{self._name}.json")

    def note(self, preparation: str, blocks: Known) -> None:
        """Remembers what preparing has read; preparation: what `preparation_of` gives of the folder."""
        if self._folder is not None:
            _write(self._waiting(self._folder, preparation), blocks)

    def charge(self, preparation: str, names: Sequence[str], *, only_check: bool = False) -> None:
        """Takes the names of prepared blocks to be theirs for ever, for a run that is reserved on them.

        only_check: without taking them, for one that is to be. Raises DataRefused where another run was charged for
        the same records under another name since they were prepared, and where they were prepared elsewhere.
        """
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(self._folder / f"{self._name}.lock", mode=0o600):
            charged, waiting = self.read(), self._waiting(self._folder, preparation)
            seen = _read(waiting)
            self._check_seen(names, charged, seen)
            joined = {name: contents.joined(charged.get(name)) for name, contents in seen.items()}
            known = dict(charged)
            for name in [name for name in seen if joined[name] != charged.get(name)]:
                self.check(name, seen[name], known)
                known[name] = joined[name]
            if seen and not only_check:
                _write(self._folder / f"{self._name}.json", known)
                waiting.unlink()

    def check(self, name: str, contents: Contents, known: Known) -> None:
        """Raises DataRefused where too many blocks of other names, or all together, have the same records or many."""
        others = {other: kept for other, kept in known.items() if other != name}
        alike = [other for other, kept in others.items() if contents.is_too_like(kept)]
        if len(alike) >= self._most:
            places = "one block alone" if self._most == 1 else f"{self._most} blocks at most"
            raise DataRefused(
                f"The blocks {alike[0]!r} and {name!r} of population {self._population!r} hold the same records or many"
                f" of them, and a record is in {places}, whose name is for ever; leave each record in the block that"
                " had it first."
            )
        if self._most == 1 and contents.sketch.shares_many(*(kept.sketch for kept in others.values())):
            raise DataRefused(
                f"Many records of the block {name!r} of population {self._population!r} are in other blocks of it, a"
                " few in each, as if the same people had been cut into blocks anew; leave each record in the block that"
                " had it first."
            )

    def _check_seen(self, names: Sequence[str], charged: Known, seen: Known) -> None:
        columns = [{known.columns for known in each.values() if known.columns} for each in (charged, seen)]
        missing = [name for name in names if name not in charged and name not in seen]
        if missing or (all(columns) and columns[0] != columns[1]):
            why = "with another home folder" if missing else "before a run was charged by other columns"
            raise DataRefused(
                f"The block {[*missing, *names][0]!r} of population {self._population!r} was prepared {why}, so that"
                " nobody could know its records again; prepare it here by `dvc repro --force prepare`."
            )

    def _waiting(self, folder: Path, preparation: str) -> Path:
        return folder / "prepared" / f"{self._name}-{preparation}.json"


def preparation_of(salt: bytes, names: Sequence[str]) -> str:
    """By what a prepared folder is known: a digest of its secret salt, which stands for its records, and its blocks."""
    return hashlib.sha256(salt + json.dumps(list(names)).encode()).hexdigest()[:16]


def _read(file: Path) -> dict[str, Contents]:
    if not file.is_file():
        return {}
    try:
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        # Older software kept names by digests of encoded records, of which nothing can be compared.
        return {name: Contents.from_json(seen) for name, seen in kept.items() if isinstance(seen, dict)}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataRefused(
            f"{file} is damaged, by which blocks are known again that were charged; restore it, or remove it where"
            " none of them was."
        ) from None


def _write(file: Path, blocks: Known) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps({name: contents.to_json() for name, contents in blocks.items()})
    write_whole(file, lambda fresh: fresh.write_text(text, encoding="utf-8"), mode=0o600)
