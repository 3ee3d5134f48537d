"""The prepared folder: arrays that are mapped into memory, and what is public about them."""

import shutil
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.description import PublicDescription
from data.errors import DataRefused
from data.records import Parts

_FEATURES, _LABELS = np.dtype(np.float32), np.dtype(np.int64)


@dataclass(frozen=True)
class Prepared:
    """A prepared data set; the arrays are read-only maps of their files.

    Features are float32 [n, *public.input_shape], labels int64 [n] counting public.classes.
    """

    public: PublicDescription
    train_features: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_features: NDArray[np.float32]
    test_labels: NDArray[np.int64]


def write(folder: Path, parts: Parts, public: PublicDescription, *, salt: bytes, at_most: int | None) -> None:
    """Put the records into `folder`, whole or not at all.

    salt: secret bytes that keep a checksum of the folder from being guessed. at_most: bound on the number of
    records when that is private; the file `salt` then grows so that the folder's size depends on it alone.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (fresh / ".gitignore").write_text("*\n")
        content = fresh / "content"
        content.mkdir(mode=0o700)
        _fill(content, parts, public)
        _write_salt(content / "salt", salt, padding=_padding(parts, public, at_most))
        if folder.exists():
            folder.rename(fresh / "replaced")
        content.rename(folder)
    finally:
        shutil.rmtree(fresh)


def _fill(folder: Path, parts: Parts, public: PublicDescription) -> None:
    for name, records in (("train", parts.train), ("test", parts.test)):
        np.save(folder / f"{name}_features.npy", np.ascontiguousarray(records.features, _FEATURES))
        np.save(folder / f"{name}_labels.npy", np.ascontiguousarray(records.labels, _LABELS))
    (folder / "public.json").write_text(public.to_json(), encoding="utf-8")


def _padding(parts: Parts, public: PublicDescription, at_most: int | None) -> int:
    """Bytes that the records still missing to `at_most` would have taken."""
    if at_most is None:
        return 0
    bytes_a_record = prod(public.input_shape) * _FEATURES.itemsize + _LABELS.itemsize
    return (at_most - len(parts.train) - len(parts.test)) * bytes_a_record


def _write_salt(path: Path, salt: bytes, *, padding: int) -> None:
    with path.open("wb") as file:
        file.write(salt)
        file.truncate(len(salt) + padding)


def load(folder: Path) -> Prepared:
    """What `write` put into `folder`; raises DataRefused when it is not there or not whole."""
    try:
        public = PublicDescription.from_json((folder / "public.json").read_text(encoding="utf-8"))
        train, test = (_map(folder, part, public) for part in ("train", "test"))
    except (OSError, EOFError, ValueError):
        raise DataRefused(f"{folder} holds no whole prepared data; run the prepare stage (again).") from None
    return Prepared(public, *train, *test)


def _map(folder: Path, part: str, public: PublicDescription) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    features = np.load(folder / f"{part}_features.npy", mmap_mode="r")
    labels = np.load(folder / f"{part}_labels.npy", mmap_mode="r")
    if features.shape != (len(labels), *public.input_shape) or (features.dtype, labels.dtype) != (
        _FEATURES,
        _LABELS,
    ):
        raise ValueError("the arrays do not fit the description")
    return features, labels
