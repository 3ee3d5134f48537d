"""Read PNG and JPEG images as pixels of the declared size, from a folder with one subfolder per class or from rows.

An image that cannot be read becomes the stand-in, without an error or a warning, since either would reveal something
about the record.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from data.card import DataRefusedError
from data.formats import Images, ImageTable, Pixels
from data.readers.records import Records, files_in

if TYPE_CHECKING:
    import pyarrow as pa
    from PIL import Image

_ENDINGS = (".png", ".jpg", ".jpeg")
_AT_ONCE = 256
_BYTES_A_PIXEL, _BYTES_BESIDE = 8, 2**20
"""A file with more bytes than this is not accepted as an image of that number of pixels."""
_Source: TypeAlias = Path | bytes | None


def read(folder: Path, declared: Images, classes: Sequence[str], shape: tuple[int, ...]) -> Iterator[Records]:
    """Read some hundred images at a time, in the order of `listed`: float32 in [0, 1] (pixel / 255) of `shape`."""
    each = listed(folder, classes)
    for start in range(0, len(each), _AT_ONCE):
        some = each[start : start + _AT_ONCE]
        features, keys = pixels([path for _, path in some], declared, shape)
        yield Records(features, np.array([label for label, _ in some], np.int64), keys)


def listed(folder: Path, classes: Sequence[str]) -> list[tuple[int, Path]]:
    """The images of a folder with the index of their class, in the order of class and name; other files are left out.

    Raises DataRefusedError if a folder is named after no class, as for a label in a table.
    """
    if not folder.is_dir():
        raise not_a_folder(folder)
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not {*found} <= {*classes}:
        raise DataRefusedError(
            f"{folder} has a folder of none of the declared classes; correct it or the card."
        )
    return [
        (label, path)
        for label, name in enumerate(classes)
        for path in files_in(folder / name)
        if path.suffix.lower() in _ENDINGS
    ]


def not_a_folder(path: Path) -> DataRefusedError:
    """The error for a path that is not a folder of images."""
    return DataRefusedError(f"{path} is no folder of images; correct its path in the data card.")


def of_rows(
    table: "pa.Table", declared: ImageTable, shape: tuple[int, ...], folder: Path | None
) -> tuple[NDArray[np.float32], list[bytes]]:
    """The images of some rows, and a digest of each source. folder: of the paths, None if the rows have the bytes."""
    from data.readers import encoding

    found = encoding.contents(table[declared.image])
    return pixels([_below(folder, one) if folder else one for one in found], declared, shape)


def has_bytes(table: "pa.Table", declared: ImageTable) -> bool:
    """Whether the column has images, and not paths of images."""
    import pyarrow as pa

    kind = table[declared.image].type
    return bool(pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _below(folder: Path, content: bytes | None) -> Path | None:
    """The file of a relative path; None if it is outside the folder."""
    try:
        path = (folder / (content or b"").decode("utf-8").strip()).resolve()
    except (ValueError, OSError, RuntimeError):
        return None
    return path if path.is_relative_to(folder.resolve()) else None


def pixels(
    sources: Sequence[_Source], declared: Pixels, shape: tuple[int, ...], *, strict: bool = False
) -> tuple[NDArray[np.float32], list[bytes]]:
    """The images [n, *shape], and a digest of each file; read in parallel on all cores.

    strict: raise DataRefusedError instead of using a stand-in, for images that need no protection.
    """

    def read_one(source: _Source) -> tuple[NDArray[np.float32], bytes]:
        content = source if isinstance(source, bytes) else _content(source, declared.most_pixels)
        image = _decoded(content, declared, shape)
        if image is None and strict:
            raise DataRefusedError(f"{source!s} is not an image in PNG or JPEG; convert it, or take it out.")
        stand_in = np.full(shape, declared.stand_in, np.float32)
        return stand_in if image is None else image, sha256(content).digest()

    if not sources:
        return np.zeros((0, *shape), np.float32), []
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # Pillow warns about single images
        images, keys = zip(*pool.map(read_one, sources), strict=True)
    return np.stack(images), list(keys)


def _content(path: Path | None, most_pixels: int) -> bytes:
    """The bytes of a file; empty if there is no file or it is too long."""
    try:
        if path is None or not path.is_file():
            return b""
        with path.open("rb") as file:
            content = file.read(most_pixels * _BYTES_A_PIXEL + _BYTES_BESIDE + 1)
    except (OSError, ValueError):
        return b""
    return content if len(content) <= most_pixels * _BYTES_A_PIXEL + _BYTES_BESIDE else b""


def in_mode(image: "Image.Image", mode: str) -> "Image.Image":
    """The image in a mode of 8 bits; of 16 bits the upper 8, since Pillow would clip all but the darkest pixels."""
    if image.mode.startswith("I"):
        from PIL import Image

        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    return image.convert(mode)


def _decoded(content: bytes, declared: Pixels, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """One image, float32 of `shape`; None if it is not an image or too large."""
    from PIL import Image, ImageOps

    size, bilinear = (shape[2], shape[1]), Image.Resampling.BILINEAR
    try:
        with Image.open(BytesIO(content), formats=("PNG", "JPEG")) as opened:
            if opened.width * opened.height > declared.most_pixels:
                return None
            image = in_mode(opened, declared.mode)
            if image.size != size and declared.fit == "crop":
                image = ImageOps.fit(image, size, bilinear)
            elif image.size != size:
                image = image.resize(size, bilinear)
    except Exception:  # Pillow may raise anything for a hostile file
        return None
    found = np.asarray(image, np.float32) / np.float32(255)
    return found[None] if shape[0] == 1 else np.ascontiguousarray(found.transpose(2, 0, 1))
