"""A population in blocks: which there are, and the records of chosen ones.

A record belongs to one block for ever: budgets of blocks hold side by side only because no record moves between them.
Rows that come late belong in a new block.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa

from data import database
from data.card import DataCard
from data.charged_blocks import Contents
from data.errors import DataRefused
from data.formats import Csv, Table
from data.known_blocks import KnownBlocks
from data.readers import table
from data.records import Block, Part, checked
from data.sources import Folder, Query, Source
from data.split import split

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_WHOLE_POPULATION = "all"
_Rows: TypeAlias = tuple[pa.Table, str]
"""Some rows and what messages call their source."""


def names(card: DataCard, *, root: Path, url: str | None) -> tuple[str, ...]:
    """The blocks that there are now, sorted by name; those that the card of a query declares, whatever rows there are.

    root: the project. url: of the database, for a card whose blocks are a query. Raises DataRefused for a card
    without blocks, a source that cannot be read, and a name that no block can have.
    """
    source = _source(card)
    if isinstance(source, Folder):
        found = list(_files(card, source, root))
    else:
        found = list(source.names) or database.names(source, _given(card, source, url))
    for name in found:
        _check_name(card, name)
    if len({name.casefold() for name in found}) < len(found):
        raise DataRefused(f"Two blocks of {card.name!r} have names that differ in case alone; leave one.")
    return tuple(sorted(found))


def read(
    card: DataCard,
    chosen: Sequence[str],
    files: Mapping[str, Path],
    *,
    root: Path,
    url: str | None,
    known: KnownBlocks,
) -> Iterator[Block]:
    """The records of the chosen blocks in their order, then those of the card's test file, checked as `data.reading`.

    Raises DataRefused, while the records are taken and without a record's value in the message, for a block that is
    not there, for one that is not what the card declares, and for one whose records another block has or had, where
    the message names the block; and for a test file of which a block has or had many records.
    """
    missing = [name for name in chosen if name not in names(card, root=root, url=url)]
    if missing:
        raise DataRefused(f"{card.name!r} has no block {missing[0]!r}; choose among those that there are.")
    each = (_of_the_block(card, name, root, url, known) for name in chosen)
    blocks = itertools.chain.from_iterable(each)
    parts = blocks if card.split is None else split(blocks, card.split)
    return checked(card, _chained(parts, card, files, known))


def _chained(
    parts: Iterable[Block], card: DataCard, files: Mapping[str, Path], known: KnownBlocks
) -> Iterator[Block]:
    yield from parts
    if "test" in files:
        contents, path = Contents(), files["test"]
        rows = ((some, str(path)) for some in table.tables("test", path, _table(card)))
        yield from _counted("test", rows, card, known, contents)
        known.check_held_out(contents)


def _of_the_block(
    card: DataCard, name: str, root: Path, url: str | None, known: KnownBlocks
) -> Iterator[Block]:
    """The records of a block; raises DataRefused at their end where another block had the same or many of them."""
    contents = Contents()
    yield from _counted("train", _rows(card, name, root, url), card, known, contents)
    known.check(name, contents)


def _counted(
    part: Part, read: Iterable[_Rows], card: DataCard, known: KnownBlocks, contents: Contents
) -> Iterator[Block]:
    """The records of rows as they come, counted to `contents`."""
    declared = _table(card)
    for rows, where in read:
        records = table.records(rows, declared, card.classes, where)
        known.add(rows, declared, contents)
        yield Block(part, records)


def _rows(card: DataCard, name: str, root: Path, url: str | None) -> Iterator[_Rows]:
    """Some rows of a block at a time, as they are read, and what messages call their source."""
    source, declared = _source(card), _table(card)
    if isinstance(source, Folder):
        path = _files(card, source, root)[name]
        for rows in table.tables("train", path, declared):
            yield rows, str(path)
        return
    for rows in database.read(source, declared, name, _given(card, source, url)):
        yield rows, f"block {name!r} of {card.name!r}"


def _source(card: DataCard) -> Source:
    if card.blocks is None:
        raise DataRefused(
            f"The card of {card.name!r} says no `blocks`, so data.blocks must be empty; write where its blocks are."
        )
    return card.blocks


def _table(card: DataCard) -> Table:
    if not isinstance(card.reader, Table):
        raise DataRefused(f"The card of {card.name!r} has blocks, but its reader is of no table; correct it.")
    return card.reader


def _files(card: DataCard, source: Folder, root: Path) -> dict[str, Path]:
    """The file of each block; others, such as one that is still being written under a name with a dot, are none."""
    folder = root / source.path
    if not folder.is_dir():
        raise DataRefused(f"There is no folder {folder} with the blocks of {card.name!r}; make it.")
    endings = (".csv", ".csv.gz", ".zip") if isinstance(card.reader, Csv) else (".parquet",)
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        ending = next((end for end in endings if path.name.endswith(end)), None)
        if ending is None or path.name.startswith("."):
            continue
        name = path.name.removesuffix(ending)
        if name in found:
            raise DataRefused(f"{folder} has two files of the block {name!r}; leave one.")
        found[name] = path
    return found


def _given(card: DataCard, source: Query, url: str | None) -> str:
    if not url:
        raise DataRefused(
            f"The blocks of {card.name!r} are in a database; set {source.url_from} to its SQLAlchemy URL."
        )
    return url


def _check_name(card: DataCard, name: str) -> None:
    if not _NAME.fullmatch(name) or name == _WHOLE_POPULATION:
        raise DataRefused(
            f"A block of {card.name!r} has a name of other characters than letters, digits, - and _, or the name"
            f" {_WHOLE_POPULATION!r}; name its blocks anew."
        )
