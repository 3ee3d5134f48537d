"""Records from rows of tables, texts and images with columns; and the selection of each person's rows."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.card import Person
from data.formats import ImageTable, OfRows, Table, Texts
from data.readers import encoding, images, reviews, rows, table, texts
from data.readers.records import PARTS, Block, Features, Part, Records
from data.targets import Known, Tags

_Tables: TypeAlias = Iterator[pa.Table]
_NOBODY = frozenset((b"", b"nan", b"NaN"))
"""Names that name nobody: empty, or the spelling of a missing number."""
_WHOLE = re.compile(rb"([+-]?\d+)\.0+")
"""A whole number as a column of real numbers spells it, which it is where some row names nobody."""
_SCIENTIFIC = re.compile(rb"[+-]?\d+(\.\d+)?[eE][+-]?\d{1,3}")
"""How such a column spells a number of more than ten digits."""


@dataclass(frozen=True)
class RowReader:
    """Reads the rows of a card.

    declared: the card's reader. known: the target. shape: shape of an image. files: files by role, including those
    besides the rows. person: of the card. key: a secret that decides which of a person's rows are used. as_texts:
    return texts unchanged, even if they could be tokens. public: whether a refusal may name the row that is wrong.
    """

    declared: OfRows
    known: Known
    shape: tuple[int, ...]
    files: Mapping[str, Path]
    person: Person | None = None
    key: bytes = b""
    as_texts: bool = False
    public: bool = False

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the columns that are read, including the person's."""
        own = () if self.person is None else (self.person.column,)
        return tuple(dict.fromkeys((*self.declared.in_the_file, *own)))

    def read(self) -> Iterator[Block]:
        """The records of the train file and, if there is one, of the test file.

        A block is a few megabytes of its file, so that memory does not grow with the file. Raises DataRefusedError,
        which names the file and the column but no value.
        """
        if "images" in self.files and not self.files["images"].is_dir():
            raise images.not_a_folder(self.files["images"])
        elsewhere = self.held_out_people()
        for part in PARTS:
            if part in self.files:
                for some in self.drawn(partial(self.tables, part, self.files[part]), elsewhere, part):
                    yield Block(part, self.records(some, str(self.files[part])))

    def tables(self, part: Part, path: Path) -> _Tables:
        """The rows of a file, in portions; raises DataRefusedError if the file is not as declared."""
        if isinstance(self.declared, Table):
            return table.tables(part, path, self.declared, names_rows=self.public)
        more = () if self.person is None else (self.person.column,)
        return rows.tables(path, self.declared, self.known, more=more)

    def records(self, some: pa.Table, where: str) -> Records:
        """The records of some rows. where: name of their source in messages. Raises DataRefusedError as `read` does."""
        declared = self.declared
        if isinstance(declared, Table):
            made = table.records(some, declared, self.known, where)
        else:
            features, keys = self._content(some, declared)
            made = Records(features, rows.labels(some, declared, self.known, where), keys)
        if self.person is None:
            return made
        return Records(made.features, made.labels, [sha256(who).digest() for who in self._who(some)])

    def _content(self, some: pa.Table, declared: Texts | ImageTable) -> tuple[Features, list[bytes]]:
        """The features of some rows, and the key of each row's content."""
        if isinstance(declared, ImageTable):
            return images.of_rows(some, declared, self.shape, self.files.get("images"))
        found, made_of = texts.joined(some, declared, self.known if isinstance(self.known, Tags) else None)
        return texts.as_features(found, declared, self._words), made_of

    def held_out_people(self) -> frozenset[bytes]:
        """All people that the test file names, if the card names a person column and has such a file."""
        if self.person is None or "test" not in self.files:
            return frozenset()
        return frozenset(who for some in self.tables("test", self.files["test"]) for who in self._who(some))

    def drawn(self, make: Callable[[], _Tables], elsewhere: frozenset[bytes], part: Part) -> _Tables:
        """Select as many rows of each person as the card allows; of test records, which are public, all rows.

        make: returns the rows, each time from the start. elsewhere: people of whom no row is used. The rows with the
        smallest keyed hashes are used, so the selection depends only on the person's own rows, and not on their order.
        """
        if self.person is None or part == "test":
            yield from make()
            return
        owners, ranks, usable = bytearray(), bytearray(), []
        for some in make():
            names = (*self.declared.content, *(label.name for label in self.declared.label_columns))
            has_lists = isinstance(self.known, Tags)
            columns = (encoding.contents(rows.column(some, name), lists=has_lists) for name in names)
            for who, *row in zip(self._who(some), *columns, strict=True):
                owner = blake2b(who, key=self.key, digest_size=16).digest()
                owners += owner
                content = owner + b"".join(b"%d " % len(part or b"") + (part or b"") for part in row)
                ranks += blake2b(content, key=self.key, digest_size=8).digest()
                usable.append(bool(who) and who not in elsewhere)
        taken = _first_of_each(owners, ranks, self.person.per_person) & np.array(usable, bool)
        start = 0
        for some in make():
            yield some.filter(pa.array(taken[start : start + some.num_rows]))
            start += some.num_rows

    def _who(self, some: pa.Table) -> list[bytes]:
        """The person that each row names; an empty name for nobody. 17.0 is 17, since files may spell it either way."""
        column = rows.column(some, "" if self.person is None else self.person.column)
        names = [_named(who or b"") for who in encoding.contents(column)]
        return [b"" if who in self._nobody else who for who in names]

    @cached_property
    def _nobody(self) -> frozenset[bytes]:
        declared = self.declared.missing if isinstance(self.declared, Table) else ()
        return _NOBODY.union(_named(one.encode()) for one in declared)

    @cached_property
    def _words(self) -> dict[str, int] | None:
        tokens = self.declared.tokens if isinstance(self.declared, Texts) else None
        return None if tokens is None or self.as_texts else reviews.words_of(self.files, tokens.as_reviews)


def _named(who: bytes) -> bytes:
    """A name in one spelling: 17.0 becomes 17, and 1.2345678901e+10 becomes 12345678901."""
    name = who.strip()
    if _SCIENTIFIC.fullmatch(name):
        name = format(Decimal(name.decode()), "f").encode()
    is_whole = _WHOLE.fullmatch(name)
    return is_whole[1] if is_whole else name


def _first_of_each(owners: bytearray, ranks: bytearray, count: int) -> NDArray[np.bool_]:
    """Whether each row is among the first `count` of its owner by rank; bool [n]."""
    who = np.frombuffer(owners, "<u8").reshape(-1, 2)
    order = np.lexsort((np.frombuffer(ranks, "<u8"), who[:, 1], who[:, 0]))
    sorted_, places = who[order], np.arange(len(order))
    is_first = np.ones(len(order), bool)
    is_first[1:] = (sorted_[1:] != sorted_[:-1]).any(axis=1)
    begins = np.maximum.accumulate(np.where(is_first, places, 0))
    taken = np.empty(len(order), bool)
    taken[order] = places - begins < count
    return taken
