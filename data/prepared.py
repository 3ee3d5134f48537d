"""The prepared folder: memory-mapped arrays and their public facts."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from data.card import DataRefusedError
from data.description import DatasetInfo
from data.files import hide, try_lock
from data.preparation import Preparation
from data.readers.records import PARTS, Features, RecordBatch, RecordChunk, SplitPart
from data.targets import IGNORED

Salt: TypeAlias = bytes | Callable[[], bytes]
_Arrays: TypeAlias = tuple[Features, NDArray[Any]]
PREPARATION = "preparation.json"
LOCK, _CONTENTS, _DIGESTS = "lock", "contents", "digests.json"
_HALVES, _GROUPS = "test_halves.npy", "test_groups.npy"
_PEOPLE_AT_ONCE = 1024


@dataclass(frozen=True)
class HeldOut:
    """The held-out part of a prepared data set; the arrays are read-only maps of their files.

    Features are float32 [n, *info.input_shape], or int32 if they are tokens. Labels are int64 [n], indices into
    info.classes, or have the shape and type of the target, [n, *info.label_shape]. test_groups: [n, columns], the
    index of each row's category in the columns of groups from which no feature is made, if there are any.
    """

    info: DatasetInfo
    test_features: Features
    test_labels: NDArray[Any]
    test_groups: NDArray[np.int16] | None = field(default=None, kw_only=True)

    @property
    def row_weight(self) -> float:
        """The most that each row may count, so that the rows of a person count 1 together."""
        return 1.0 / (self.info.rows_per_user or 1)

    def group_indices(self, columns: Sequence[str], rows: slice) -> NDArray[np.int64]:
        """The index of each row's category in each of some declared columns, [rows, columns]; -1 for none of them."""
        by_name = {group.name: group for group in self.info.groups}
        features = np.asarray(self.test_features[rows])
        indices = np.full((len(features), len(columns)), -1, np.int64)
        for at, group in enumerate(by_name[name] for name in columns):
            # Of a column that is no feature indices are stored apart; of others a cell is the index, or one of several
            # features is 1.
            count = len(group.values)
            if group.start is None:
                assert self.test_groups is not None
                unseen = self.test_groups[rows, self.info.unseen_groups.index(group.name)]
                indices[:, at] = np.where(unseen < count, unseen, -1)
            elif self.info.cells is not None:
                codes = features[:, group.start].astype(np.int64)
                indices[:, at] = np.where(codes < count, codes, -1)
            else:
                marked = features[:, group.start : group.start + count]
                indices[:, at] = np.where(marked.max(axis=1) > 0, marked.argmax(axis=1), -1)
        return indices


@dataclass(frozen=True)
class Prepared(HeldOut):
    """A prepared data set with training records; their arrays are like the others, or group a person's rows per
    record.
    """

    train_features: Features
    train_labels: NDArray[Any]


def write(
    folder: Path,
    chunks: Iterable[RecordChunk],
    info: DatasetInfo,
    *,
    salt: Salt,
    at_most: int | None,
    digests: Mapping[str, Sequence[str]] | None = None,
    words: bytes | None = None,
    preparation: Preparation | None = None,
) -> None:
    """Write the records into `folder` as their chunks come, whole or not at all; only its owner can read it.

    salt: secret bytes that make the folder's checksum unguessable, or a function that returns them after the records
    are written. at_most: bound on the number of records if that is private; the file `salt` is then padded so that the
    folder's size depends only on this bound. digests: of the population's blocks, complete once the records are
    written. words: the public words of the tokens, one per line in their order, for the file words.txt. preparation:
    how they were prepared, for the file preparation.json.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    held = try_lock(fresh / LOCK)
    try:
        (fresh / ".gitignore").write_text("*\n")
        content = fresh / "content"
        content.mkdir(mode=0o700)
        counts, digest = _fill(content, chunks, info)
        (content / _CONTENTS).write_text(f"{digest}\n", encoding="utf-8")
        (content / "public.json").write_text(info.to_json(), encoding="utf-8")
        (content / _DIGESTS).write_text(json.dumps(dict(digests or {})), encoding="utf-8")
        if words is not None:
            (content / "words.txt").write_bytes(words)
        if preparation is not None:
            (content / PREPARATION).write_text(json.dumps(preparation.document()), encoding="utf-8")
        padding = 0 if at_most is None else _padding(counts, at_most, info)
        secret = salt if isinstance(salt, bytes) else salt()
        with (content / "salt").open("wb") as file:
            file.write(secret)
            # Padded by the records that are missing to the bound, so that the size does not tell how many there are.
            file.truncate(len(secret) + padding)
        hide(content)
        if folder.exists():
            folder.rename(fresh / "replaced")
        content.rename(folder)
    finally:
        shutil.rmtree(fresh)
        if held is not None:
            os.close(held)


def preparation_in(folder: Path) -> Preparation | None:
    """How the records in a prepared folder were prepared, for a model's file; None in a folder of an older version."""
    path = folder / PREPARATION
    return Preparation.of(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def sweep(folder: Path) -> None:
    """Delete records left by processes that were killed while writing `folder`; those at work hold their lock."""
    for lock in folder.parent.glob(f".{folder.name}-*/{LOCK}"):
        with suppress(OSError):  # a process that has just ended deleted it
            if (held := try_lock(lock)) is not None:
                os.close(held)
                shutil.rmtree(lock.parent)


@contextmanager
def portions_of(folder: Path) -> Iterator[Path]:
    """A private folder for what is encoded of the records to come, locked within the block.

    It stays if the process is killed, so that the same stage goes on with it; `sweep` deletes it otherwise.
    """
    portions = folder.with_name(f".{folder.name}-encoding")
    portions.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = try_lock(portions / LOCK)
    try:
        yield portions
    finally:
        if held is not None:
            os.close(held)


def _fill(
    folder: Path, chunks: Iterable[RecordChunk], info: DatasetInfo
) -> tuple[Mapping[SplitPart, int], str]:
    """Write the arrays; returns the number of records of each part, and a digest of those that noise is drawn for."""
    owners, halves, groups = bytearray(), bytearray(), list[NDArray[np.int16]]()
    with ExitStack() as stack:
        features, labels = (
            {part: stack.enter_context(_Rows(folder / f"{part}_{name}.npy", kind, shape)) for part in PARTS}
            for name, kind, shape in (
                ("features", _feature_dtype(info), info.input_shape),
                ("labels", _label_dtype(info), info.label_shape),
            )
        )
        for chunk in chunks:
            features[chunk.part].append(chunk.records.features)
            labels[chunk.part].append(chunk.records.labels)
            if info.rows_per_user is not None and chunk.part == "train":
                owners += b"".join(chunk.owners)
            if chunk.part == "test":
                halves += bytes(owner[0] & 1 for owner in chunk.owners)
                if chunk.records.groups is not None:
                    groups.append(chunk.records.groups.astype(np.int16))
    if _has_halves(info):
        np.save(folder / _HALVES, np.frombuffer(halves, np.uint8))
    if info.rows_per_user is not None:
        features["train"], labels["train"] = _group_by_user(folder, owners, info)
    digest = _hash_of_both(features["train"].digest, labels["train"].digest)
    if info.holdout == "private":  # noise must not be drawn again for others
        digest = _hash_of_both(bytes.fromhex(digest), features["test"].digest + labels["test"].digest)
    if info.unseen_groups:
        rows = np.concatenate([np.zeros((0, len(info.unseen_groups)), np.int16), *groups])
        np.save(folder / _GROUPS, rows)
        digest = _hash_of_both(bytes.fromhex(digest), rows.tobytes())
    return {part: labels[part].count for part in PARTS}, digest


def _has_halves(info: DatasetInfo) -> bool:
    """Whether the folder says in which half of the people held out each row is; otherwise the rows do."""
    return info.holdout == "private" and info.per_person is not None


def halves_of(data: HeldOut, folder: Path) -> NDArray[np.int64]:
    """The half of the held-out people that each row is in, 0 or 1, [n]: by a hash of its person, or else of the row.

    Raises DataRefusedError for a table of people that an earlier version prepared.
    """
    if _has_halves(data.info):
        with suppress(OSError):
            return np.load(folder / _HALVES).astype(np.int64)  # type: ignore[no-any-return]
        raise _not_whole(folder)
    rows = RecordBatch(np.asarray(data.test_features), np.asarray(data.test_labels)).canonical()
    hashed = (
        hashlib.blake2b(row, key=b"half of the held-out records", digest_size=1).digest() for row in rows
    )
    return np.fromiter((digest[0] & 1 for digest in hashed), np.int64)


def halves_digest(folder: Path) -> str:
    """A digest of the halves that people are in; "" where the rows decide."""
    file = folder / _HALVES
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _hash_of_both(first: bytes, second: bytes) -> str:
    return hashlib.sha256(first + second).hexdigest()


def digest_of(features: Features, labels: NDArray[Any]) -> str:
    """The digest of training records, read whole: that in the file `contents` if the arrays are as they were."""
    return _hash_of_both(
        *(hashlib.sha256(np.ascontiguousarray(part).data).digest() for part in (features, labels))
    )


def _group_by_user(folder: Path, owners: bytearray, info: DatasetInfo) -> tuple["_Rows", "_Rows"]:
    """Group rows, which came in any order: the rows of a person become one training record [k, *shape].

    It is padded with the person's first row under ignored labels. Removing a record then removes a person, and a
    person's rows change no other record. owners: 16 bytes per row.
    """
    features, labels = folder / "train_features.npy", folder / "train_labels.npy"
    old = [path.rename(path.with_suffix(".rows")) for path in (features, labels)]
    rows, row_labels = (np.load(path, mmap_mode="r") for path in old)
    with (
        _Rows(features, _feature_dtype(info), (*info.rows, *info.input_shape)) as feature_rows,
        _Rows(labels, _label_dtype(info), (*info.rows, *info.label_shape)) as label_rows,
    ):
        for row_indices in _by_person(owners, *info.rows):
            filled = np.where(row_indices < 0, row_indices[:, :1], row_indices)
            filled_labels = row_labels[filled]
            filled_labels[row_indices < 0] = np.nan if filled_labels.dtype.kind == "f" else IGNORED
            feature_rows.append(rows[filled])
            label_rows.append(filled_labels)
    for path in old:
        path.unlink()
    return feature_rows, label_rows


def _by_person(owners: bytes | bytearray, max_rows: int) -> Iterator[NDArray[np.int64]]:
    """The indices of each person's rows, [people, most], -1 if a person has fewer; for some people at a time.

    Their order depends only on which people there are. At most `max_rows` rows have the same owner.

    Example:
        >>> [places.tolist() for places in _by_person(b"b" * 16 + b"a" * 16 + b"b" * 16, 2)]
        [[[1, -1], [0, 2]]]
    """
    # An owner is a digest of 16 bytes, here two numbers. Sorted by it, the rows of a person lie one after the other.
    rows = np.frombuffer(owners, ">u8").reshape(-1, 2)
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    sorted_ = rows[order]
    starts = np.flatnonzero(np.append(True, (sorted_[1:] != sorted_[:-1]).any(axis=1)))
    counts = np.diff(np.append(starts, len(order)))
    for at in range(0, len(starts), _PEOPLE_AT_ONCE):
        first, count = starts[at : at + _PEOPLE_AT_ONCE, None], counts[at : at + _PEOPLE_AT_ONCE, None]
        slots = np.arange(max_rows)[None]
        inside = np.minimum(first + slots, len(order) - 1)
        yield np.where(slots < count, order[inside], -1)


def _padding(counts: Mapping[SplitPart, int], at_most: int, info: DatasetInfo) -> int:
    """The number of bytes by which the arrays are smaller than those of `at_most` training records."""
    bytes_per_label = prod(info.label_shape) * _label_dtype(info).itemsize
    bytes_per_row = prod(info.input_shape) * _feature_dtype(info).itemsize + bytes_per_label
    bytes_per_record = bytes_per_row * prod(info.rows)  # a training record may be all rows of a person
    bytes_beside = _has_halves(info) + 2 * len(info.unseen_groups)  # of a held-out row, in files of their own
    train = (at_most - counts["train"]) * bytes_per_record
    return train - counts["test"] * bytes_per_row + (at_most - counts["test"]) * bytes_beside


class _Rows:
    """An .npy file that grows row by row, with the same bytes as `numpy.save` of all rows.

    NumPy reserves room in the header for the number of rows, so that it can be set at the end.
    """

    def __init__(self, path: Path, kind: DTypeLike, shape: tuple[int, ...]) -> None:
        self._kind, self._shape, self.count = np.dtype(kind), shape, 0
        self._file, self._hash = path.open("wb"), hashlib.sha256()
        self._write_header()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the rows so far."""
        return self._hash.digest()

    def append(self, rows: NDArray[np.generic]) -> None:
        """Append rows; real numbers may be rounded to the array's type, but not converted to integers."""
        if rows.shape[1:] != self._shape:
            raise ValueError("rows have another shape than the array")
        if not np.can_cast(rows.dtype, self._kind, "same_kind"):
            raise ValueError("rows are of another kind than the array")
        content = np.ascontiguousarray(rows, self._kind).data
        self._file.write(content)
        self._hash.update(content)
        self.count += len(rows)

    def _write_header(self) -> None:
        shape = (self.count, *self._shape)
        facts = {"descr": npy.dtype_to_descr(self._kind), "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(self._file, facts)

    def __enter__(self) -> "_Rows":
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()


def _feature_dtype(info: DatasetInfo) -> np.dtype[Any]:
    return np.dtype(np.float32 if info.tokens is None else np.int32)


def _label_dtype(info: DatasetInfo) -> np.dtype[Any]:
    return np.dtype(info.label_type.label_dtype)


def contents(folder: Path) -> str:
    """A digest of the training records, and of private held-out ones; it is as secret as they are.

    Raises DataRefusedError if it is missing.
    """
    return _text(folder, _CONTENTS).strip()


def block_digests(folder: Path) -> dict[str, list[str]]:
    """The keyed digests of each block, which detect an exact duplicate; raises DataRefusedError if they are missing."""
    digests: dict[str, list[str]] = json.loads(_text(folder, _DIGESTS))
    return digests


def _text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except OSError:
        raise _not_whole(folder) from None


def _not_whole(folder: Path) -> DataRefusedError:
    return DataRefusedError(
        "{folder} holds no whole prepared data; run the prepare stage (again).",
        code="not_prepared",
        folder=folder,
    )


def load(folder: Path) -> Prepared:
    """Load what `write` wrote into `folder`; raises DataRefusedError if it is missing or incomplete."""
    info, (train, test) = _read(folder, PARTS)
    return Prepared(info, *test, *train, test_groups=_groups_in(folder, info))


def load_held_out(folder: Path) -> HeldOut:
    """Load only the held-out part; the training records are not opened. Raises DataRefusedError as `load` does."""
    info, (test,) = _read(folder, ("test",))
    return HeldOut(info, *test, test_groups=_groups_in(folder, info))


def _groups_in(folder: Path, info: DatasetInfo) -> NDArray[np.int16] | None:
    if not info.unseen_groups:
        return None
    try:
        groups: NDArray[np.int16] = np.load(folder / _GROUPS)
    except (OSError, ValueError):
        raise _not_whole(folder) from None
    return groups


def load_as(folder: Path, info: DatasetInfo) -> Prepared:
    """Load what `write` wrote with this description; raises DataRefusedError if it was prepared again with another.

    The description is read after the arrays are mapped, since preparing again replaces the whole folder.
    """
    data = load(folder)
    if DatasetInfo.read(folder) != info:
        raise changed_records_error(folder)
    return data


def changed_records_error(folder: Path) -> DataRefusedError:
    """The error for a `folder` that no longer has the records that a run was charged for."""
    return DataRefusedError(
        "{folder} was made anew while this run began, so its records are not those that were charged; let one"
        " command at a time work in a checkout, and forfeit this run by `epsilonflow ledger forfeit`.",
        code="prepared_anew",
        folder=folder,
    )


def _read(folder: Path, parts: Iterable[SplitPart]) -> tuple[DatasetInfo, list[_Arrays]]:
    try:
        info = DatasetInfo.read(folder)
        return info, [_map(folder, part, info) for part in parts]
    except (OSError, EOFError, ValueError):
        raise _not_whole(folder) from None


def _map(folder: Path, part: SplitPart, info: DatasetInfo) -> _Arrays:
    features = np.load(folder / f"{part}_features.npy", mmap_mode="r")
    labels = np.load(folder / f"{part}_labels.npy", mmap_mode="r")
    rows = info.rows if part == "train" else ()
    shapes = (len(labels), *rows, *info.input_shape), (len(labels), *rows, *info.label_shape)
    kinds = _feature_dtype(info), _label_dtype(info)
    if (features.shape, labels.shape) != shapes or (features.dtype, labels.dtype) != kinds:
        raise ValueError("the arrays do not fit the description")
    return features, labels
