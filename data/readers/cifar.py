"""CIFAR-10 and CIFAR-100 in every form that their author publishes: batches as bytes or as Python pickles.

The batches are in one archive, or in separate files, which may be compressed with xz (Krizhevsky 2009,
https://www.cs.toronto.edu/~kriz/cifar.html). Pickles are read without running any code that they name.
"""

import lzma
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
from numpy._core.multiarray import _reconstruct
from numpy.typing import NDArray

from data.card import DataRefusedError
from data.formats import Cifar
from data.readers.records import PARTS, Block, Records

_OF_ARRAYS: Mapping[tuple[str, str], Callable[..., object]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): lambda code, *_: np.dtype(code),  # NumPy warns of the other arguments of Python 2
}
"""The names in a pickled array."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., object]:
        """What a name stands for; the pickle can call nothing else."""
        if (module, name) not in _OF_ARRAYS:
            raise pickle.UnpicklingError("the pickle names something that no array needs")
        return _OF_ARRAYS[module, name]


def load(file: IO[bytes]) -> object:
    """The plain value or array in a pickle from Python 2, with text as bytes.

    Raises pickle.UnpicklingError if the pickle names anything else, and whatever Python raises for a broken pickle.
    """
    return _Plain(file, encoding="bytes").load()


_ROWS = 2000
_BROKEN = (
    OSError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError,
    pickle.UnpicklingError, tarfile.TarError, lzma.LZMAError, zlib.error,
)  # fmt: skip

_Rows: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.integer]]
"""Pixels [n, size] and labels [n]."""


def read(files: Mapping[str, Path], declared: Cifar, *, shape: tuple[int, ...]) -> Iterator[Block]:
    """Read blocks of some thousand images: float32 in [0, 1] (pixel / 255) of `shape`, labels as int64.

    files: `archive`, or a file for each batch by its name. Raises DataRefusedError, which names the file, if one is
    truncated, lacks a batch, or has anything but such images.
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
        raise DataRefusedError(
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
    """Read consecutive records: one label, or a coarse and a fine one, and then the pixels, one byte each."""
    labels = 2 if fine else 1
    while content := file.read(_ROWS * (labels + size)):
        rows = np.frombuffer(content, np.uint8).reshape(-1, labels + size)
        yield rows[:, labels:], rows[:, labels - 1]


def _in_a_pickle(file: IO[bytes], *, fine: bool, size: int) -> Iterator[_Rows]:
    batch = load(file)
    if not isinstance(batch, dict) or getattr(batch[b"data"], "dtype", None) != np.uint8:
        raise ValueError("no images")
    pixels = batch[b"data"].reshape(-1, size)
    labels = np.array(batch[b"fine_labels" if fine else b"labels"], np.int64)
    if labels.shape != (len(pixels),):
        raise ValueError("not one label an image")
    for start in range(0, len(pixels), _ROWS):
        yield pixels[start : start + _ROWS], labels[start : start + _ROWS]
