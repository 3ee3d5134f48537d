"""Records in memory, and the checks before they are used."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from data.card import DataCard, DataRefusedError
from data.formats import Format, Pixels, Texts

SplitPart: TypeAlias = Literal["train", "test"]
PARTS: tuple[SplitPart, SplitPart] = ("train", "test")
Features: TypeAlias = NDArray[Any]
"""Real numbers as float32, or tokens as int32; texts as strings before they are encoded."""
_AT_ONCE = 1024
"""How many records are converted at a time, so that a copy of a few is made and not of all."""
_WORDS = {"train": "training", "test": "test"}


def add_features(features: Features, digest: "hashlib._Hash") -> None:
    """Update a digest with features, or with texts, in their order."""
    if features.dtype == object:
        for text in features:
            digest.update(b"%d " % len(text.encode()) + text.encode())
    else:
        digest.update(np.ascontiguousarray(features).data)


def rows_as_bytes(*arrays: NDArray[Any]) -> Iterator[bytes]:
    """For each row the bytes of all arrays, one after the other; they are [n, ...] each.

    Example:
        >>> list(rows_as_bytes(np.array([[1, 2], [3, 4]], np.uint8), np.array([5, 6], np.uint8)))
        [b'\\x01\\x02\\x05', b'\\x03\\x04\\x06']
    """
    for start in range(0, len(arrays[0]), _AT_ONCE):
        portions = [np.ascontiguousarray(array[start : start + _AT_ONCE]) for array in arrays]
        rows = np.concatenate(
            [portion.reshape(len(portion), -1).view(np.uint8) for portion in portions], axis=1
        )
        content, width = rows.tobytes(), rows.shape[1]
        yield from (content[at : at + width] for at in range(0, len(content), width))


@dataclass(frozen=True)
class RecordBatch:
    """A batch of records: features float32 [n, *shape], labels int64 [n], indices into the declared classes.

    If a card declares a target, labels are as `data.readers.encoding.labels` returns them, before an encoder. If it
    declares tokens, features are int32. keys: for each record, what decides its side of the split, such as its person;
    None if the record itself decides. groups: [n, columns], the index of its category in each column that has some and
    no feature, the number of categories for none of them; None without such columns. values: [n, parts], of a table
    whose features are cells, what any cells of a record depend on: more than its key, such as whether a number
    is missing.
    """

    features: Features
    labels: NDArray[Any]
    keys: Sequence[bytes] | None = None
    groups: NDArray[np.int64] | None = None
    values: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def add_to(self, digest: "hashlib._Hash") -> None:
        """Update a digest with the contents of the records, in their order."""
        add_features(self.features, digest)
        digest.update(np.ascontiguousarray(self.labels).data)

    def canonical(self) -> Iterator[bytes]:
        """Each record's bytes: features as little-endian float32 without negative zeros, label as int64 or float32."""
        kind = "<f4" if self.labels.dtype.kind == "f" else "<i8"
        for start in range(0, len(self), _AT_ONCE):
            rows = slice(start, start + _AT_ONCE)
            features, labels = (self.features[rows] + 0.0).astype("<f4"), (self.labels[rows] + 0).astype(kind)
            yield from rows_as_bytes(features, labels)

    def __getitem__(self, chosen: NDArray[np.bool_] | slice) -> "RecordBatch":
        keys = self.keys
        if keys is not None:
            keys = keys[chosen] if isinstance(chosen, slice) else list(compress(keys, chosen))
        groups = None if self.groups is None else self.groups[chosen]
        values = None if self.values is None else self.values[chosen]
        return RecordBatch(self.features[chosen], self.labels[chosen], keys, groups, values)


@dataclass(frozen=True)
class RecordChunk:
    """Some records of a part that were read together; the chunks of a part are in the order of its source.

    source: the records' block of the population, if it has blocks.
    """

    part: SplitPart
    records: RecordBatch
    source: str = ""

    @property
    def owners(self) -> list[bytes]:
        """For each record, a digest of its person; a person in another block of the population has another digest."""
        block = self.source.encode()
        before = b"%d " % len(block) + block
        return [blake2b(before + key, digest_size=16).digest() for key in self.records.keys or ()]

    def portions(self, size: int) -> Iterator["RecordChunk"]:
        """The same records in portions of at most `size`."""
        for start in range(0, len(self.records), size):
            yield replace(self, records=self.records[start : start + size])


OwnReader: TypeAlias = Callable[[Mapping[str, Path]], Iterable[RecordChunk]]
"""A reader of the user's own, as its factory returns it."""


_OF_A_PATH = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EINVAL,
)  # fmt: skip


def check_is_of_the_path(error: OSError) -> None:
    """Raise DataRefusedError unless a file's own path or permissions are why it cannot be read.

    Anything else, such as too many open files or a failing disk, is a fault of the machine at that moment: it must not
    make a record a stand-in, which would depend on what else is read. The message has no path, as it may be a record's.
    """
    if error.errno not in _OF_A_PATH:
        why = os.strerror(error.errno or errno.EIO).lower()
        raise DataRefusedError(
            "a file could not be read, and not because of what is in it ({why}); mend that, then start it again.",
            code="machine_fault",
            why=why,
        ) from None


def files_in(folder: Path) -> list[Path]:
    """All files at any depth in a folder, in the order of their names, except hidden ones, whose names begin with a
    dot. Raises DataRefusedError for a link to a folder that contains it, whose files would be found again and again.
    """
    paths = []
    for folder_name, folders, names in os.walk(folder, followlinks=True):
        for link in (Path(folder_name, name) for name in folders):
            if link.is_symlink() and Path(folder_name).resolve().is_relative_to(link.resolve()):
                raise DataRefusedError(
                    "{path} is a link to a folder that contains it; remove the link.",
                    code="unreadable_file",
                    path=link,
                )
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(folder_name, name) for name in names if not name.startswith(".")]
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def check_chunks(card: DataCard, chunks: Iterable[RecordChunk]) -> Iterator[RecordChunk]:
    """Pass on the chunks that have records, and check them; at the end, check the number of records.

    If a person's rows are one training record, people are counted. Raises DataRefusedError if the records are not as
    the card declares: shape, values, classes, number; or if all of them are the stand-in.
    """
    counts, people, has_content = dict.fromkeys(PARTS, 0), set[bytes](), False
    counts_people = card.person is not None and card.person.rows_per_user is not None
    for chunk in chunks:
        if len(chunk.records):
            _check_values(card, _WORDS[chunk.part], chunk.records)
            has_content = has_content or not stand_ins(chunk.records.features, card.reader).all()
            if counts_people and chunk.part == "train":
                people.update(chunk.owners)
                counts["train"] = len(people)
            else:
                counts[chunk.part] += len(chunk.records)
            _check_bound(card, counts)
            yield chunk
    if any(counts.values()) and not has_content:
        raise DataRefusedError(
            "no record of {dataset!r} has {content} that can be read; correct the"
            " column, the paths or the format in its card, or the file.",
            code="nothing_readable",
            dataset=card.name,
            content="a text" if card.has_texts else "an image",
        )
    _check_number(card, counts)


def stand_ins(features: Features, reader: Format) -> NDArray[np.bool_]:
    """Which records are the stand-in for an image or a text that cannot be read; bool [n]."""
    if isinstance(reader, Pixels):
        grey: NDArray[np.bool_] = np.all(features == np.float32(reader.stand_in), axis=(1, 2, 3))
        return grey
    if isinstance(reader, Texts) and features.dtype == object:
        empty = reader.join * (len(reader.columns) - 1)
        return np.array([text == empty for text in features], bool)
    return np.zeros(len(features), bool)


def _check_values(card: DataCard, part: str, records: RecordBatch) -> None:
    if records.features.dtype != object:
        _check_features(card, part, records)
    if card.target is not None:
        return  # the reader has made valid labels
    if records.labels.min() < 0 or records.labels.max() >= len(card.classes):
        raise DataRefusedError(
            "the {part} labels of {dataset!r} go beyond its {classes} declared classes; "
            "correct the files or the classes in the card.",
            code="records_differ",
            part=part,
            dataset=card.name,
            classes=len(card.classes),
        )


def _check_features(card: DataCard, part: str, records: RecordBatch) -> None:
    if records.features.shape != (len(records), *card.input_shape):
        raise DataRefusedError(
            "the {part} records of {dataset!r} have not the declared shape {shape}, "
            "or not one label each; correct the files or the card.",
            code="records_differ",
            part=part,
            dataset=card.name,
            shape=list(card.input_shape),
        )
    if card.tokens is not None and not 0 <= records.features.min() <= records.features.max() < card.tokens:
        raise DataRefusedError(
            "the {part} records of {dataset!r} hold tokens beyond its {tokens}; correct one.",
            code="records_differ",
            part=part,
            dataset=card.name,
            tokens=card.tokens,
        )
    if not np.isfinite(records.features).all():
        raise DataRefusedError(
            "the {part} features of {dataset!r} hold NaN or infinite values; correct the files.",
            code="records_differ",
            part=part,
            dataset=card.name,
        )


def _check_bound(card: DataCard, counts: Mapping[SplitPart, int]) -> None:
    at_most = card.records.at_most
    if at_most is not None and sum(counts.values()) > at_most:
        what = "records"
        if card.person is not None:
            per_person = card.person.per_person
            what = f"rows that are used (at most {per_person} of each person, in training and test together)"
        raise DataRefusedError(
            "data set {dataset!r} has more {what} than its at_most, {at_most}; raise that in its card.",
            code="too_many_records",
            dataset=card.name,
            what=what,
            at_most=at_most,
        )


def _check_number(card: DataCard, counts: Mapping[SplitPart, int]) -> None:
    for part in PARTS:
        if counts[part] == 0:
            raise DataRefusedError(
                "data set {dataset!r} has no {part} records; give it a file that holds some.",
                code="no_records",
                dataset=card.name,
                part=_WORDS[part],
            )
    declared = card.records
    if declared.at_most is None and (counts["train"], counts["test"]) != (declared.train, declared.test):
        raise DataRefusedError(
            "data set {dataset!r} has {train} training and {test} test records, its card "
            "declares {declared_train} and {declared_test}; correct the files or the card.",
            code="records_differ",
            dataset=card.name,
            train=counts["train"],
            test=counts["test"],
            declared_train=declared.train,
            declared_test=declared.test,
        )
