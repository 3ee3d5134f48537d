"""Read the records of a card, from its files or from blocks of its population: split as it declares, and checked.

If the source has no test set, each record's own content decides whether it is held out, and its number among equal
records if the card says so.

A record belongs to one block for good, since blocks can have separate budgets only if no record moves between them.
Rows that arrive late belong in a new block. Keyed digests detect an exact duplicate of a block.
"""

import hashlib
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.card import DataCard, DataRefusedError, SplitRule
from data.files import PUBLIC_KEY, keyed_digest
from data.formats import (
    OF_ROWS,
    Cifar,
    Csv,
    Digits,
    Folder,
    Idx,
    Images,
    OfRows,
    Query,
    Reviews,
    Rows,
    Source,
    Synthetic,
    Texts,
)
from data.readers import images, texts
from data.readers.encoding import check_columns
from data.readers.records import PARTS, OwnReader, RecordBatch, RecordChunk, check_chunks, rows_as_bytes
from data.readers.rows import RowReader

if TYPE_CHECKING:  # imported where a query is read: most data sets are files
    import sqlalchemy as sa

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_WHOLE_POPULATION, _TEST_FILE = "all", "the test file"
_DIGEST_BYTES = 16
_ENDINGS = {
    "csv": (".csv", ".csv.gz"),
    "jsonl": (".jsonl", ".jsonl.gz"),
    "parquet": (".parquet",),
    "datasets": ("",),
}
"""Endings of the files of blocks, by the kind of reader; a block may also be a folder, whose name has none."""
_ROWS = 65536
"""How many rows are fetched from a database at a time."""


def split(chunks: Iterable[RecordChunk], rule: SplitRule) -> Iterator[RecordChunk]:
    """Divide records into training and test records by `rule`, in their order and regardless of their previous part.

    A record's side depends only on its own features and label, or on its key if it has one, and on the rule's public
    salt; with `copies: apart`, also on how many equal records of its block came before it. So one record more or less
    changes one side by one record, and no other block.
    """
    source, copies = None, _Copies()
    for chunk in chunks:
        if chunk.source != source:
            source, copies = chunk.source, _Copies()
        numbers = copies.count(_identities(chunk.records)) if rule.copies == "apart" else None
        test = is_test(chunk.records, rule, numbers)
        yield replace(chunk, part="train", records=chunk.records[~test])
        yield replace(chunk, part="test", records=chunk.records[test])


def is_test(
    records: RecordBatch, rule: SplitRule, numbers: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """Whether a keyed BLAKE2b hash of each record's bytes is in the test fraction; bool [n].

    numbers: for each record, how many equal ones came before it, if each has a side of its own.
    """
    salted = hashlib.blake2b(key=hashlib.sha256(rule.salt.encode()).digest(), digest_size=8)
    digests = bytearray()
    for row, number in zip(_contents_of(records), repeat(0) if numbers is None else numbers, strict=False):
        hasher = salted.copy()
        hasher.update(row)
        if number:
            hasher.update(b" copy %d" % number)
        digests += hasher.digest()
    coins: NDArray[np.bool_] = np.frombuffer(digests, "<u8").astype(float) < rule.test_fraction * 2.0**64
    return coins


def _contents_of(records: RecordBatch) -> Iterable[bytes]:
    """What decides the side of each record."""
    if records.keys is None and records.features.dtype == object:
        return (text.encode() for text in records.features)
    return records.canonical() if records.keys is None else records.keys


def _identities(records: RecordBatch) -> NDArray[np.bytes_]:
    """A digest of all that is used of each record, groups for the evaluation included: equal ones are copies.

    If the digest left something out, equal records could differ there, and one more of them could move another to the
    other side. Where features are cells, the values that they are made of are used instead, so that a new grid of cells
    moves nobody.
    """
    used = records.features if records.values is None else records.values
    parts = [used, records.labels] if records.groups is None else [used, records.labels, records.groups]
    digests = [
        hashlib.blake2b(b"%d " % len(content) + content + row, digest_size=16).digest()
        for content, row in zip(_contents_of(records), rows_as_bytes(*parts), strict=True)
    ]
    return np.array(digests, "S16")


class _Copies:
    """Numbers equal records in their order; 16 bytes a record, in sorted arrays of about doubling sizes."""

    def __init__(self) -> None:
        self._sorted: list[NDArray[np.bytes_]] = []

    def count(self, digests: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """How many equal digests came before each of these, here and in earlier calls."""
        order = np.argsort(digests, kind="stable")
        ordered = digests[order]
        numbers = np.empty(len(ordered), np.int64)
        # Index less that of the first equal one.
        numbers[order] = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
        for earlier in self._sorted:  # as many as lie between both ends of the equal ones
            numbers += np.searchsorted(earlier, digests, "right") - np.searchsorted(earlier, digests)
        # Arrays that are no longer than this one join it, so that there are about log n.
        while self._sorted and len(self._sorted[-1]) <= len(ordered):
            ordered = np.concatenate([self._sorted.pop(), ordered])
            ordered.sort(kind="stable")
        self._sorted.append(ordered)
        return numbers


def read(
    card: DataCard,
    files: Mapping[str, Path],
    *,
    key: bytes = PUBLIC_KEY,
    own_reader: OwnReader | None = None,
    as_texts: bool = False,
) -> Iterator[RecordChunk]:
    """Read the training and test records of `card` in chunks, checked against what it declares.

    Tables, texts and coloured images are read chunk by chunk; other formats are small and come as one chunk.

    Args:
        card: The card of the data set.
        files: Files by role, as `data.files.fetch` returns them.
        key: The owner key, which decides which of a person's records are used.
        own_reader: The reader, if the card names one of the user's own.
        as_texts: Return texts for a text encoder: the features are then arrays of strings [n].

    Raises:
        DataRefusedError: During iteration, without a record's value in the message.
    """
    chunks = _of_the_source(card, files, key=key, own_reader=own_reader, as_texts=as_texts)
    return check_chunks(card, chunks if card.split is None else split(chunks, card.split))


def word_list(card: DataCard, files: Mapping[str, Path]) -> bytes | None:
    """The public words of the tokens of `card`, one per line in the order of their tokens; None without tokens.

    They go into the file of every model, to predict from texts. Raises DataRefusedError as `read` does, if the words do
    not match words_sha256 of the card, and if the card declares their file private.
    """
    is_member = isinstance(card.reader, Reviews) and card.reader.words is not None
    file = card.files.get("archive" if is_member else "words")
    if file is not None and file.keyed_sha256:
        raise DataRefusedError(
            "the words of {dataset!r} are in a file that its card declares private, by keyed_sha256, and are"
            " published in every model's file; declare a public list of words by sha256, or take a tokenizer as"
            " data.encoder.",
            code="bad_card",
            dataset=card.name,
            keys=("files.words",),
        )
    if isinstance(card.reader, Reviews):
        return texts.word_list(files, card.reader)
    if isinstance(card.reader, Texts) and card.reader.tokens is not None:
        return texts.word_list(files, card.reader.tokens)
    return None


def row_reader(card: DataCard, files: Mapping[str, Path], *, key: bytes, as_texts: bool = False) -> RowReader:
    """The reader of the card's rows."""
    secret = keyed_digest(key, ["records of a person", card.population])
    return RowReader(card, files, secret, as_texts)


def _of_the_source(
    card: DataCard, files: Mapping[str, Path], *, key: bytes, own_reader: OwnReader | None, as_texts: bool
) -> Iterator[RecordChunk]:
    if isinstance(card.reader, Idx):
        return images.read_idx(files, shape=card.input_shape)
    if isinstance(card.reader, Digits):
        return images.read_digits(card.reader, shape=card.input_shape)
    if isinstance(card.reader, Synthetic):
        return images.read_synthetic(card.reader, card.records, features=card.input_shape[0])
    if isinstance(card.reader, Cifar):
        return images.read_cifar(files, card.reader, shape=card.input_shape)
    if isinstance(card.reader, Reviews):
        if as_texts:
            return texts.read_texts(files, classes=card.classes)
        return texts.read_tokens(files, card.reader, classes=card.classes)
    if isinstance(card.reader, Images):
        declared = card.reader
        return (
            RecordChunk(part, records)
            for part in PARTS
            if part in files
            for records in images.read_folder(files[part], declared, card.classes, card.input_shape)
        )
    if isinstance(card.reader, OF_ROWS):
        return row_reader(card, files, key=key, as_texts=as_texts).read()
    if own_reader is None:
        raise TypeError(f"the reader of {card.name!r} is not given")
    return iter(own_reader(files))


SCHEME = "way:"
"""How the digest of the key and the columns begins; the ledger has the same, as neither package imports the other."""


class Digests:
    """Keyed digests of the blocks that are read: two blocks share a digest if they hold exactly the same.

    A block has a digest of its rows in any order, over the columns that records are made of, and one of its file's
    bytes. A third one, which begins with SCHEME, is of the key and these columns alone: where it differs, the other two
    may differ for the same content. Nobody without the key can test a guess. An empty block shares no digest with
    another block, and cannot be told from a full one.

    population: the blocks' population; each population has its own digests. key: the owner key.
    """

    def __init__(self, population: str, *, key: bytes) -> None:
        self._key = keyed_digest(key, ["digests of blocks", population])
        self.by_block: dict[str, list[str]] = {}
        """The digests of each block that was read to its end."""

    def count_block_rows(
        self, name: str, portions: Iterable[pa.Table], declared: OfRows, file: Path | None
    ) -> Iterator[pa.Table]:
        """Pass a block's rows on; after the last one, the block's digests are in `by_block`.

        file: of the rows; None for a query. A folder has no digest of bytes. Raises DataRefusedError if a column is
        missing.
        """
        total = count = 0
        columns = tuple(sorted({*declared.content, *(label.name for label in declared.label_columns)}))
        for rows in portions:
            check_columns(rows, columns, file or f"block {name!r}")
            yield rows
            texts = (
                [None if value is None else str(value).strip() for value in rows[column].to_pylist()]
                for column in columns
            )
            for row in zip(*texts, strict=True):
                text = json.dumps(row).encode()
                total += int.from_bytes(
                    hashlib.blake2b(text, key=self._key, digest_size=_DIGEST_BYTES).digest()
                )
                count += 1
        # The sum of keyed digests does not depend on the order, and its own digest hides the number of rows.
        held = f"{count} {total % 256**_DIGEST_BYTES:x}" if count else f"no rows in {name}"
        self.by_block[name] = [self._hex("rows", held)]
        if file is not None and file.is_file():
            self.by_block[name].append(self.of_bytes(file)[0 if count else 1])
        self.by_block[name].append(f"{SCHEME}{self._hex('way', json.dumps(columns))[len(SCHEME) :]}")

    def of_bytes(self, file: Path) -> tuple[str, str]:
        """The digest of a file's bytes, if it has rows and if it has none: empty files of two blocks are no repeat."""
        with file.open("rb") as content:
            plain = hashlib.file_digest(content, "sha256").hexdigest()
        return self._hex("file", plain), self._hex("file", f"no rows in {file.name}: {plain}")

    def _hex(self, of: str, text: str) -> str:
        return keyed_digest(self._key, [of, text]).hex()


Database: TypeAlias = "str | sa.Connection | None"
"""Of a card whose blocks come from a query: its URL, or a `snapshot` of it."""


def block_names(card: DataCard, *, root: Path, url: Database) -> tuple[str, ...]:
    """The names of the current blocks, sorted. If the card of a query declares names, these are the blocks.

    Args:
        card: With a folder of blocks, or a query.
        root: The project.
        url: See `Database`.

    Raises:
        DataRefusedError: For a card without blocks, a source that cannot be read, or an invalid name.
    """
    source = _source(card)
    if isinstance(source, Folder):
        names = list(_files(card, source, root))
    else:
        names = list(source.names)
        if not names:
            with snapshot(card, url) as connection:
                names = _names_in_database(source, connection)
    for name in names:
        if not _NAME.fullmatch(name) or name == _WHOLE_POPULATION:
            raise DataRefusedError(
                "a block of {dataset!r} has a name of other characters than letters, digits, - and _, or the name"
                " {reserved!r}; name its blocks anew.",
                code="bad_block_names",
                dataset=card.name,
                reserved=_WHOLE_POPULATION,
            )
    if len({name.casefold() for name in names}) < len(names):
        raise DataRefusedError(
            "two blocks of {dataset!r} have names that differ in case alone; leave one.",
            code="bad_block_names",
            dataset=card.name,
        )
    return tuple(sorted(names))


def blocks_have_changed(
    card: DataCard, named: Sequence[str], prepared: Mapping[str, Sequence[str]], *, root: Path, key: bytes
) -> bool:
    """Whether the files of blocks are others than those that were prepared; False for a card without such files.

    named: the blocks to read; empty: all. prepared: the digests of each prepared block. A block that is a folder of
    files has no digest of its bytes, and counts as unchanged.
    """
    if not isinstance(card.blocks, Folder):
        return False
    files, digests = _files(card, card.blocks, root), Digests(card.population, key=key)
    if not named and files.keys() != prepared.keys():
        return True
    return any(
        name in files and len(_contents(before)) > 1 and not {*digests.of_bytes(files[name])} & {*before}
        for name, before in prepared.items()
    )


def _contents(digests: Iterable[str]) -> set[str]:
    """The digests of a block's content."""
    return {digest for digest in digests if not digest.startswith(SCHEME)}


def read_blocks(
    card: DataCard,
    chosen: Sequence[str],
    files: Mapping[str, Path],
    *,
    root: Path,
    url: Database,
    digests: Digests,
    key: bytes = PUBLIC_KEY,
    as_texts: bool = False,
) -> Iterator[RecordChunk]:
    """The records of the chosen blocks in their order, then those of the card's test file, checked against the card.

    All blocks of a query are read in one `snapshot`, so a row that moves between blocks meanwhile is in one of them.

    chosen: some of `block_names`. url: see `Database`. digests: receives the digests of each block. key, as_texts: as
    in `read`. Raises DataRefusedError, during iteration and without a record's value in the message, for a block that
    is not as the card declares, or a test file that equals a block.
    """
    rows = row_reader(card, files, key=key, as_texts=as_texts)
    held_out_people = rows.held_out_people()
    training_blocks = _training_blocks(card, rows, chosen, held_out_people, digests, root=root, url=url)
    parts = training_blocks if card.split is None else split(training_blocks, card.split)
    return check_chunks(card, itertools.chain(parts, _held_out_blocks(card, rows, files, digests)))


def _held_out_blocks(
    card: DataCard, rows: RowReader, files: Mapping[str, Path], digests: Digests
) -> Iterator[RecordChunk]:
    if "test" not in files:
        return
    path = files["test"]
    portions = digests.count_block_rows(_TEST_FILE, rows.tables("test", path), rows.declared_reader, path)
    for records in rows.batches(portions, str(path), "test"):
        yield RecordChunk("test", records)
    held_out = _contents(digests.by_block.pop(_TEST_FILE))
    if same := [name for name, contents in digests.by_block.items() if held_out & _contents(contents)]:
        raise DataRefusedError(
            "the test file of population {population!r} holds exactly the records of the block {block!r}, so"
            " that records trained on would be published as held out; take a test file of other records.",
            code="block_held_out",
            population=card.population,
            block=same[0],
        )


def _training_blocks(
    card: DataCard,
    rows: RowReader,
    chosen: Sequence[str],
    held_out_people: frozenset[bytes],
    digests: Digests,
    *,
    root: Path,
    url: Database,
) -> Iterator[RecordChunk]:
    with snapshot(card, url) as connection:
        for name in chosen:
            yield from _records(card, rows, name, held_out_people, digests, root=root, connection=connection)


def _records(
    card: DataCard,
    rows: RowReader,
    name: str,
    held_out_people: frozenset[bytes],
    digests: Digests,
    *,
    root: Path,
    connection: "sa.Connection | None",
) -> Iterator[RecordChunk]:
    """The records of a block, passed on as its rows come; if records are selected by person, at a second reading."""
    source, path = _source(card), None
    before: list[tuple[int, ...]] = []
    make: Callable[[], Iterator[pa.Table]]
    with ExitStack() as until_read:
        if isinstance(source, Folder):
            path = _files(card, source, root)[name]
            before = _marks(path)
            make = partial(rows.tables, "train", path)
        else:
            make = partial(_rows_in_database, source, rows.column_names, name, connection)
            if card.person is not None:
                make = until_read.enter_context(_spool(make()))
        chosen = digests.count_block_rows(name, make(), rows.declared_reader, path)
        if card.person is not None:
            counted = chosen

            def readings() -> Iterator[Iterator[pa.Table]]:
                yield counted
                _check_unchanged(path, before)  # the rows that were selected would be others
                yield make()

            each = readings()
            chosen = rows.select_per_person(lambda: next(each), held_out_people, "train")
        where = f"block {name!r} of {card.name!r}" if path is None else str(path)
        for records in rows.batches(chosen, where, None if path is None else "train"):
            yield RecordChunk("train", records, source=name)
        _check_unchanged(path, before)


def _marks(path: Path) -> list[tuple[int, ...]]:
    """What changes with a file, or with a file of a folder."""
    states = [file.stat() for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in states]


def _check_unchanged(path: Path | None, before: list[tuple[int, ...]]) -> None:
    """Raises DataRefusedError for a block's file that is another than before it was read.

    Its digests, and who has how many rows, could be of one content, and the records of another.
    """
    if path is not None and (not path.exists() or _marks(path) != before):
        raise DataRefusedError(
            "{path} changed while it was read; run again when it is whole, and let whatever writes it do so under a"
            " name that begins with a dot and rename it then.",
            code="changing_file",
            path=path,
        )


@contextmanager
def _spool(portions: Iterator[pa.Table]) -> Iterator[Callable[[], Iterator[pa.Table]]]:
    """A function that reads the rows of a database again within the block, from a file without a name.

    A second query could give rows in another order, where the database takes different texts for equal ones.
    """
    with tempfile.TemporaryFile(prefix="epsilonflow-") as file:
        if (first := next(portions, None)) is not None:
            with pa.ipc.new_stream(file, first.schema) as writer:
                for portion in itertools.chain([first], portions):
                    writer.write_table(portion)

        def read() -> Iterator[pa.Table]:
            if file.tell():
                file.seek(0)
                yield from (pa.Table.from_batches([batch]) for batch in pa.ipc.open_stream(file))

        yield read


def _source(card: DataCard) -> Source:
    if card.blocks is None:
        raise DataRefusedError(
            "the card of {dataset!r} says no `blocks`, so data.blocks must be empty: --set data.blocks=[]; or write"
            " where its blocks are.",
            code="no_blocks",
            dataset=card.name,
        )
    return card.blocks


def _files(card: DataCard, source: Folder, root: Path) -> dict[str, Path]:
    """The file of each block. Other files are ignored, such as one that is being written under a name with a dot."""
    folder = root / source.path
    if not folder.is_dir():
        raise DataRefusedError(
            "there is no folder {path} with the blocks of {dataset!r}; make it.",
            code="missing_file",
            path=folder,
            dataset=card.name,
        )
    form = card.reader.format if isinstance(card.reader, Rows) else card.reader.kind
    endings = (*_ENDINGS[form], *((".zip",) if isinstance(card.reader, Csv) else ()))
    paths: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        ending = next((end for end in endings if path.name.endswith(end)), None)
        if ending is None or path.name.startswith(".") or path.is_dir() == bool(ending):
            continue
        name = path.name.removesuffix(ending)
        if name in paths:
            raise DataRefusedError(
                "{path} has two files of the block {block!r}; leave one.",
                code="bad_block_names",
                path=folder,
                block=name,
            )
        paths[name] = path
    return paths


def block_files(card: DataCard, *, root: Path) -> dict[str, Path]:
    """The file, or folder, of each block; empty for a query. Raises DataRefusedError as `block_names` does."""
    source = _source(card)
    return _files(card, source, root) if isinstance(source, Folder) else {}


# A database. No message contains its URL or a value.


_SNAPSHOTS = {"postgresql": "REPEATABLE READ", "mysql": "REPEATABLE READ", "mariadb": "REPEATABLE READ"}
"""The isolation level at which all statements of a transaction see the rows as they were at the first; elsewhere it is
SERIALIZABLE, and in SQLite any transaction that is really begun."""


@contextmanager
def snapshot(card: DataCard, url: Database) -> "Iterator[sa.Connection | None]":
    """One transaction, within the block, in which rows of the card's query do not change; None for a card without one.

    url: see `Database`; a snapshot is passed on. SQLite lets nobody write meanwhile, unless it has a write-ahead log.
    Raises DataRefusedError without a URL, or if the database cannot be reached.
    """
    source = card.blocks
    if url is not None and not isinstance(url, str):
        yield url
        return
    if not isinstance(source, Query):
        yield None
        return
    if not url:
        raise DataRefusedError(
            "the blocks of {dataset!r} are in a database; set {variable} to its SQLAlchemy URL.",
            code="no_database",
            dataset=card.name,
            variable=source.url_from,
        )
    import sqlalchemy as sa

    with ExitStack() as stack:
        with _reading(source):
            engine = sa.create_engine(url, poolclass=sa.NullPool)
            if engine.dialect.name == "sqlite":  # whose driver begins no transaction for a SELECT
                sa.event.listen(engine, "connect", _begin_nothing)
                sa.event.listen(engine, "begin", lambda begun: begun.exec_driver_sql("BEGIN"))
            else:
                level = _SNAPSHOTS.get(engine.dialect.name, "SERIALIZABLE")
                engine = engine.execution_options(isolation_level=level)
            connection = stack.enter_context(engine.connect())
        yield connection


def _begin_nothing(connection: Any, _record: object) -> None:
    connection.isolation_level = None


def _names_in_database(source: Query, connection: "sa.Connection | None") -> list[str]:
    """The names of the blocks that have rows, as text. Raises DataRefusedError if the query fails."""
    import sqlalchemy as sa

    assert connection is not None
    block = _block(source, sa.text(source.query).columns(sa.column(source.column)).subquery("blocks"))
    with _reading(source):
        rows = connection.execute(sa.select(block).distinct())
        return [str(name) for (name,) in rows if name is not None]


def _rows_in_database(
    source: Query, wanted: Sequence[str], name: str, connection: "sa.Connection | None"
) -> Iterator[pa.Table]:
    """The rows of a block as text, in portions and in an order that depends only on the rows.

    wanted: names of columns. Raises DataRefusedError if the query lacks a column or fails, or if the database treats
    another name as equal to this one, for example if it ignores case.
    """
    import sqlalchemy as sa

    query = sa.text(source.query).columns(*(sa.column(column) for column in {*wanted, source.column}))
    rows = query.subquery("blocks")
    columns, block = [rows.c[column] for column in wanted], _block(source, rows)
    statement = sa.select(*columns, block).where(block == name).order_by(*columns)
    assert connection is not None
    with _reading(source):
        for portion in connection.execution_options(yield_per=_ROWS).execute(statement).partitions():
            if any(row[-1] != name for row in portion):
                raise DataRefusedError(
                    "the database takes other names for that of the block {block!r}, so a row would be in several"
                    " blocks; let the query spell each name in one way, such as by lower().",
                    code="bad_block_names",
                    block=name,
                )
            yield pa.table(
                {
                    column: pa.array(
                        [None if row[at] is None else str(row[at]) for row in portion], pa.string()
                    )
                    for at, column in enumerate(wanted)
                }
            )


def _block(source: Query, rows: "sa.Subquery") -> "sa.Cast[str]":
    import sqlalchemy as sa

    return sa.cast(rows.c[source.column], sa.String)


@contextmanager
def _reading(source: Query) -> Iterator[None]:
    """Turn what fails at a database within the block into a DataRefusedError, as messages quote the URL or values."""
    import sqlalchemy as sa

    try:
        yield
    # ValueError: an invalid port, which may be part of a password; NotImplementedError: no isolation
    except (sa.exc.SQLAlchemyError, ImportError, NotImplementedError, ValueError) as error:
        if isinstance(error, DataRefusedError):
            raise
        raise DataRefusedError(
            "the query of the blocks cannot be read at the URL in {variable}; correct the URL, the query or"
            " the names of its columns.",
            code="no_database",
            variable=source.url_from,
        ) from None
