"""CIFAR-10 and CIFAR-100 in every form that their author publishes: batches of bytes or of Python pickles.

The batches lie in an archive, or each in a file of its own, which may be packed with xz (Krizhevsky 2009,
https://www.cs.toronto.edu/~kriz/cifar.html).
"""

import lzma
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from data.errors import DataRefused
from data.formats import Cifar
from data.readers import pickles
from data.records import PARTS, Block, Records

_ROWS = 2000
_BROKEN = (
    OSError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError,
    pickle.UnpicklingError, tarfile.TarError, lzma.LZMAError, zlib.error,
)  # fmt: skip

_Rows: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.integer]]
"""Pixels [n, size] and labels [n]."""


def read(files: Mapping[str, Path], declared: Cifar, *, shape: tuple[int, ...]) -> Iterator[Block]:
    """Some thousand images a block: float32 in [0, 1] (pixel / 255) of `shape`, labels as int64.

    files: `archive`, or a file for each batch by its name. Raises DataRefused, naming the file, when one is cut
    short, lacks a batch, or holds anything but such images.
    """
    for part in PARTS:
        for name in declared.train if part == "train" else (declared.test,):
            for pixels, labels in _batch(files, name, declared, size=int(np.prod(shape))):
                images = pixels.reshape(-1, *shape).astype(np.float32)
                images /= 255.0
                yield Block(part, Records(images, labels.astype(np.int64)))


def _batch(files: Mapping[str, Path], name: str, declared: Cifar, *, size: int) -> Iterator[_Rows]:
    path = files.get(name) or files["archive"]
    reader = _in_bytes, _in_a_pickle
    try:
        with _opened(path, name) as (file, is_pickled):
            yield from reader[is_pickled](file, fine=declared.labels == "fine", size=size)
    except _BROKEN:
        raise DataRefused(
            f"{path} is no whole file with the batch {name!r} of images of {size} bytes; fetch it again."
        ) from None


@contextmanager
def _opened(path: Path, name: str) -> Iterator[tuple[IO[bytes], bool]]:
    """The content of a batch, and whether it is a pickle."""
    if ".tar" not in path.suffixes:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            yield file, ".bin" not in path.suffixes
        return
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None and member.name.rsplit("/", 1)[-1] in (name, f"{name}.bin"):
                yield content, not member.name.endswith(".bin")
                return
    raise ValueError("no such batch")


def _in_bytes(file: IO[bytes], *, fine: bool, size: int) -> Iterator[_Rows]:
    """Records one after the other: one label, or a coarse and a fine one, and the pixels; a byte each."""
    labels = 2 if fine else 1
    while content := file.read(_ROWS * (labels + size)):
        rows = np.frombuffer(content, np.uint8).reshape(-1, labels + size)
        yield rows[:, labels:], rows[:, labels - 1]


def _in_a_pickle(file: IO[bytes], *, fine: bool, size: int) -> Iterator[_Rows]:
    batch = pickles.load(file)
    if not isinstance(batch, dict) or not isinstance(batch[b"data"], pickles.Bytes):
        raise ValueError("no images")
    pixels = batch[b"data"].array().reshape(-1, size)
    labels = np.array(batch[b"fine_labels" if fine else b"labels"], np.int64)
    if labels.shape != (len(pixels),):
        raise ValueError("not one label an image")
    for start in range(0, len(pixels), _ROWS):
        yield pixels[start : start + _ROWS], labels[start : start + _ROWS]
