"""Images: PNG and JPEG from a folder with one subfolder per class or from rows, and published sets in other formats.

A PNG or JPEG image that cannot be read becomes the stand-in, without an error or a warning, since either would reveal
something about the record. The other formats are IDX, that of MNIST; the batches of CIFAR-10 and CIFAR-100 in every
form that their author publishes (Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html); scikit-learn's digits;
and, for problems with a known answer, synthetic points, which are the same on every machine.
"""

import gzip
import hashlib
import lzma
import os
import pickle
import struct
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import distribution
from io import BytesIO
from pathlib import Path
from threading import Condition
from typing import IO, TypeAlias

import numpy as np
import pyarrow as pa
from numpy._core.multiarray import _reconstruct
from numpy.random import RandomState
from numpy.typing import NDArray
from PIL import Image, ImageOps

from data.card import DataRefusedError
from data.card import RecordCounts as Numbers
from data.formats import Cifar, Digits, Images, ImageTable, Pixels, Synthetic
from data.readers import encoding
from data.readers.records import PARTS, RecordBatch, RecordChunk, check_is_of_the_path, files_in

_ENDINGS = (".png", ".jpg", ".jpeg")
_AT_ONCE = 256
_BYTES_A_PIXEL, _BYTES_BESIDE = 8, 2**20
"""A file with more bytes than this is not accepted as an image of that number of pixels."""
PIXELS_AT_ONCE, _BYTES_AT_ONCE = 2**25, 2**27
"""Pixels that are decoded, and bytes of files that are read, at the same time; a larger image is decoded alone."""
_MEMORY_A_PIXEL, _MEMORY_BESIDE = 32, 2**26
"""More bytes than Pillow and libjpeg take to decode an image of any mode and to resize it."""
_UNSIGNED_BYTE = 0x08
_Source: TypeAlias = Path | bytes | None


def read_folder(
    folder: Path, declared: Images, classes: Sequence[str], shape: tuple[int, ...]
) -> Iterator[RecordBatch]:
    """Read some hundred images at a time, in the order of `image_files`: float32 in [0, 1] (pixel / 255) of `shape`."""
    each = image_files(folder, classes)
    for start in range(0, len(each), _AT_ONCE):
        portion = each[start : start + _AT_ONCE]
        features, keys = pixels([path for _, path in portion], declared, shape)
        yield RecordBatch(features, np.array([label for label, _ in portion], np.int64), keys)


def image_files(folder: Path, classes: Sequence[str]) -> list[tuple[int, Path]]:
    """The images of a folder with the index of their class, in the order of class and name; other files are left out.

    Raises DataRefusedError if a folder is named after no class, as for a label in a table.
    """
    if not folder.is_dir():
        raise not_a_folder(folder)
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not {*names} <= {*classes}:
        raise DataRefusedError(
            "{where} has a folder of none of the declared classes; correct it or the card.",
            code="bad_value",
            where=folder,
            expected="a class",
        )
    return [
        (label, path)
        for label, name in enumerate(classes)
        for path in files_in(folder / name)
        if path.suffix.lower() in _ENDINGS
    ]


def not_a_folder(path: Path) -> DataRefusedError:
    """The error for a path that is not a folder of images."""
    return DataRefusedError(
        "{path} is no folder of images; correct its path in the data card.", code="unreadable_file", path=path
    )


def of_rows(
    table: pa.Table, declared: ImageTable, shape: tuple[int, ...], folder: Path | None
) -> tuple[NDArray[np.float32], list[bytes]]:
    """The images of some rows, and a digest of each source. folder: of the paths, None if the rows have the bytes."""
    contents = encoding.contents(table[declared.image])
    return pixels([_below(folder, content) if folder else content for content in contents], declared, shape)


def has_bytes(table: pa.Table, declared: ImageTable) -> bool:
    """Whether the column has images, and not paths of images."""
    kind = table[declared.image].type
    return bool(pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _below(folder: Path, content: bytes | None) -> Path | None:
    """The file of a relative path; None if it is outside the folder."""
    try:
        path = (folder / (content or b"").decode("utf-8").strip()).resolve()
    except OSError as error:
        check_is_of_the_path(error)
        return None
    except (ValueError, RuntimeError):  # no UTF-8, a null character, a circle of links
        return None
    return path if path.is_relative_to(folder.resolve()) else None


def pixels(
    sources: Sequence[_Source], declared: Pixels, shape: tuple[int, ...], *, strict: bool = False
) -> tuple[NDArray[np.float32], list[bytes]]:
    """The images [n, *shape], and a digest of each file; read in parallel on all cores.

    strict: raise DataRefusedError instead of using a stand-in, for images that need no protection. Raises
    DataRefusedError if the machine lacks memory or open files, which must make no image a stand-in.
    """
    files, decoding = _Room(_BYTES_AT_ONCE), _Room(PIXELS_AT_ONCE)

    def read_one(source: _Source) -> tuple[NDArray[np.float32], bytes]:
        with files.of(_size_of(source)):
            content = source if isinstance(source, bytes) else _content(source, declared.most_pixels)
            image = _decode_or_none(content, declared, shape, decoding)
        if image is None and strict:
            raise DataRefusedError(
                "{path!s} is not an image in PNG or JPEG; convert it, or take it out.",
                code="unreadable_file",
                path=source,
            )
        stand_in = np.full(shape, declared.stand_in, np.float32)
        return stand_in if image is None else image, hashlib.sha256(content).digest()

    if not sources:
        return np.zeros((0, *shape), np.float32), []
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # Pillow warns about single images
        images, keys = zip(*pool.map(read_one, sources), strict=True)
    return np.stack(images), list(keys)


class _Room:
    """Room for work of a limited size at the same time; work that is larger than the limit takes all of it."""

    def __init__(self, limit: int) -> None:
        self.limit = self._free = limit
        self._changed = Condition()

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Room of this size within the block, for which this waits."""
        size = min(size, self.limit)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


def _size_of(source: _Source) -> int:
    """The bytes of a file that has to be read; 0 if there is none."""
    try:
        return source.stat().st_size if isinstance(source, Path) else 0
    except (OSError, ValueError):
        return 0  # reading it says why


def _content(path: Path | None, most_pixels: int) -> bytes:
    """The bytes of a file; empty if there is no file or it is too long."""
    try:
        if path is None or not path.is_file():
            return b""
        with path.open("rb") as file:
            content = file.read(most_pixels * _BYTES_A_PIXEL + _BYTES_BESIDE + 1)
    except OSError as error:
        check_is_of_the_path(error)
        return b""
    except ValueError:  # a path with a null character
        return b""
    return content if len(content) <= most_pixels * _BYTES_A_PIXEL + _BYTES_BESIDE else b""


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """The image upright, as its EXIF data say, in a mode of 8 bits; of 16 bits the upper 8, which Pillow would clip."""
    ImageOps.exif_transpose(image, in_place=True)  # without a copy, as below
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    return image if image.mode == mode else image.convert(mode)


def _decode_or_none(
    content: bytes, declared: Pixels, shape: tuple[int, ...], room: _Room
) -> NDArray[np.float32] | None:
    """One image, float32 of `shape`; None if it is not an image or too large.

    For a hostile file Pillow may raise anything, and libjpeg calls a file broken too if memory lacks, which depends on
    what other threads decode. So what fails is decoded again while nothing else is, with memory that is known to
    suffice. Raises DataRefusedError if it does not.
    """
    try:
        return _decode(content, declared, shape, room.of)
    except Exception:
        pass  # not decoded again in the handler, which keeps what the first attempt had allocated
    try:
        with room.of(room.limit), _memory(len(content)):
            return _decode(content, declared, shape, lambda pixels: _memory(pixels * _MEMORY_A_PIXEL))
    except MemoryError:
        raise DataRefusedError(
            "memory does not suffice to decode the images; free some, or run where there is more, then start it again.",
            code="out_of_memory",
        ) from None
    except Exception:
        return None


@contextmanager
def _memory(size: int) -> Iterator[None]:
    """Raise MemoryError unless this many bytes can be had, and some more."""
    np.empty(size + _MEMORY_BESIDE, np.uint8)
    yield


def _decode(
    content: bytes,
    declared: Pixels,
    shape: tuple[int, ...],
    room_of: Callable[[int], AbstractContextManager[None]],
) -> NDArray[np.float32] | None:
    """Decode one image within room for its pixels."""
    size, bilinear = (shape[2], shape[1]), Image.Resampling.BILINEAR
    with Image.open(BytesIO(content), formats=("PNG", "JPEG")) as opened:
        pixels = opened.width * opened.height
        if pixels > declared.most_pixels:
            return None
        with room_of(pixels):
            image = in_mode(opened, declared.mode)
            if image.size != size and declared.fit == "crop":
                image = ImageOps.fit(image, size, bilinear)
            elif image.size != size:
                image = image.resize(size, bilinear)
    image_values = np.asarray(image, np.float32) / np.float32(255)
    return image_values[None] if shape[0] == 1 else np.ascontiguousarray(image_values.transpose(2, 0, 1))


def read_idx(files: Mapping[str, Path], *, shape: tuple[int, ...]) -> Iterator[RecordChunk]:
    """Read one block per part: images as float32 in [0, 1] (pixel / 255) of `shape`, labels as int64.

    Raises DataRefusedError, which names the file, if one is not IDX, is truncated, or does not have such images.
    """
    for part in PARTS:
        yield RecordChunk(part, _of_idx(files[f"{part}_images"], files[f"{part}_labels"], shape))


def _of_idx(images: Path, labels: Path, shape: tuple[int, ...]) -> RecordBatch:
    pixels, classes = parse_idx(images), parse_idx(labels)
    if classes.ndim != 1:
        raise DataRefusedError(
            "{labels} must hold one label a record; give the published label file.",
            code="records_differ",
            labels=labels,
        )
    if [side for side in pixels.shape[1:] if side != 1] != [side for side in shape if side != 1]:
        raise DataRefusedError(
            "{images} holds images of another size than the declared {shape}; correct one.",
            code="records_differ",
            images=images,
            shape=list(shape),
        )
    if len(pixels) != len(classes):
        raise DataRefusedError(
            "{images} and {labels} hold different numbers of records; give files that belong together.",
            code="records_differ",
            images=images,
            labels=labels,
        )
    scaled = pixels.reshape(-1, *shape).astype(np.float32)
    scaled /= 255.0
    return RecordBatch(scaled, classes.astype(np.int64))


def parse_idx(path: Path) -> NDArray[np.uint8]:
    """The array in a gzipped IDX file of unsigned bytes; raises DataRefusedError for any other file."""
    try:
        content = gzip.decompress(path.read_bytes())
        zero, kind, dimensions = struct.unpack_from(">HBB", content)
        sizes = struct.unpack_from(f">{dimensions}I", content, 4)
    except (OSError, EOFError, zlib.error, struct.error):
        raise DataRefusedError(
            "{path} is not a whole gzipped IDX file; fetch it again.", code="unreadable_file", path=path
        ) from None
    body = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if zero != 0 or kind != _UNSIGNED_BYTE or not sizes or body.size != np.prod(sizes, dtype=np.float64):
        raise DataRefusedError(
            "{path} is not an IDX file of unsigned bytes of the length it states; fetch it again.",
            code="unreadable_file",
            path=path,
        )
    return body.reshape(sizes)


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


def load_pickle(file: IO[bytes]) -> object:
    """The plain value or array in a pickle from Python 2, with text as bytes.

    Raises pickle.UnpicklingError if the pickle names anything else, and whatever Python raises for a broken pickle.
    """
    return _Plain(file, encoding="bytes").load()


CIFAR_ROWS = 2000
_BROKEN_CIFAR = (
    OSError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError,
    pickle.UnpicklingError, tarfile.TarError, lzma.LZMAError, zlib.error,
)  # fmt: skip

_CifarRows: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.integer]]
"""Pixels [n, size] and labels [n]."""


def read_cifar(
    files: Mapping[str, Path], declared: Cifar, *, shape: tuple[int, ...]
) -> Iterator[RecordChunk]:
    """Read blocks of some thousand images: float32 in [0, 1] (pixel / 255) of `shape`, labels as int64.

    files: `archive`, or a file for each batch by its name. Raises DataRefusedError, which names the file, if one is
    truncated, lacks a batch, or has anything but such images.
    """
    for part in PARTS:
        for name in declared.train if part == "train" else (declared.test,):
            for pixels, labels in _cifar_batch(files, name, declared, size=int(np.prod(shape))):
                images = pixels.reshape(-1, *shape).astype(np.float32)
                images /= 255.0
                yield RecordChunk(part, RecordBatch(images, labels.astype(np.int64)))


def _cifar_batch(files: Mapping[str, Path], name: str, declared: Cifar, *, size: int) -> Iterator[_CifarRows]:
    path = files.get(name) or files["archive"]
    reader = _in_bytes, _in_a_pickle
    try:
        with _open_batches(path, name) as (file, is_pickled):
            yield from reader[is_pickled](file, fine=declared.labels == "fine", size=size)
    except _BROKEN_CIFAR:
        raise DataRefusedError(
            "{path} is no whole file with the batch {name!r} of images of {size} bytes; fetch it again.",
            code="unreadable_file",
            path=path,
            name=name,
            size=size,
        ) from None


@contextmanager
def _open_batches(path: Path, name: str) -> Iterator[tuple[IO[bytes], bool]]:
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


def _in_bytes(file: IO[bytes], *, fine: bool, size: int) -> Iterator[_CifarRows]:
    """Read consecutive records: one label, or a coarse and a fine one, and then the pixels, one byte each."""
    labels = 2 if fine else 1
    while content := file.read(CIFAR_ROWS * (labels + size)):
        rows = np.frombuffer(content, np.uint8).reshape(-1, labels + size)
        yield rows[:, labels:], rows[:, labels - 1]


def _in_a_pickle(file: IO[bytes], *, fine: bool, size: int) -> Iterator[_CifarRows]:
    batch = load_pickle(file)
    if not isinstance(batch, dict) or getattr(batch[b"data"], "dtype", None) != np.uint8:
        raise ValueError("no images")
    pixels = batch[b"data"].reshape(-1, size)
    labels = np.array(batch[b"fine_labels" if fine else b"labels"], np.int64)
    if labels.shape != (len(pixels),):
        raise ValueError("not one label an image")
    for start in range(0, len(pixels), CIFAR_ROWS):
        yield pixels[start : start + CIFAR_ROWS], labels[start : start + CIFAR_ROWS]


def read_digits(declared: Digits, *, shape: tuple[int, ...]) -> Iterator[RecordChunk]:
    """The 1797 images as one block: float32 in [0, 1] (ink 0..16, divided by 16) of `shape`, labels as int64.

    Raises DataRefusedError if the installed scikit-learn has other digits than the declared ones.
    """
    # The file of `sklearn.datasets.load_digits`, which takes a second to import.
    file = Path(str(distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")))
    table = np.loadtxt(file, np.uint8, delimiter=",") if file.exists() else np.zeros((0, 65), np.uint8)
    pixels, labels = table[:, :-1], table[:, -1]
    if hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest() != declared.sha256:
        raise DataRefusedError(
            "the digits of the installed scikit-learn are not the declared ones; install the locked one.",
            code="other_software",
        )
    images = pixels.reshape(-1, *shape).astype(np.float32) / np.float32(16)
    yield RecordChunk("train", RecordBatch(images, labels.astype(np.int64)))


def read_synthetic(declared: Synthetic, numbers: Numbers, *, features: int) -> Iterator[RecordChunk]:
    """One block per part: features uniform in [0, 1] as float32 [n, features], label 1 if X w is positive, else 0.

    The generators are NumPy's RandomState, whose numbers never change. Features are drawn column by column, first for
    training and then for test records, and w is standard normal. Labels are computed in 64 bits. Raises
    DataRefusedError if this machine makes other records than the declared ones.
    """
    uniform = RandomState(declared.features_seed)
    normal: NDArray[np.float64] = RandomState(declared.hyperplane_seed).standard_normal(features)
    train = _synthetic(uniform, normal, numbers.train or 0)
    test = _synthetic(uniform, normal, numbers.test or 0)
    digest = hashlib.sha256()
    for part in (train, test):
        part.add_to(digest)
    if digest.hexdigest() != declared.sha256:
        raise DataRefusedError(
            "the synthetic records are not the declared ones; install the locked NumPy.",
            code="other_software",
        )
    yield RecordChunk("train", train)
    yield RecordChunk("test", test)


def _synthetic(uniform: RandomState, normal: NDArray[np.float64], n: int) -> RecordBatch:
    points = uniform.random_sample((len(normal), n)).T
    return RecordBatch(np.ascontiguousarray(points, np.float32), (points @ normal > 0).astype(np.int64))
