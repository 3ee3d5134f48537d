"""IDX, the format of MNIST: a gzipped big-endian header followed by unsigned bytes."""

import gzip
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.card import DataRefusedError
from data.readers.records import PARTS, Block, Records

_UNSIGNED_BYTE = 0x08


def read(files: Mapping[str, Path], *, shape: tuple[int, ...]) -> Iterator[Block]:
    """Read one block per part: images as float32 in [0, 1] (pixel / 255) of `shape`, labels as int64.

    Raises DataRefusedError, which names the file, if one is not IDX, is truncated, or does not have such images.
    """
    for part in PARTS:
        yield Block(part, _records(files[f"{part}_images"], files[f"{part}_labels"], shape))


def _records(images: Path, labels: Path, shape: tuple[int, ...]) -> Records:
    pixels, classes = parse(images), parse(labels)
    if classes.ndim != 1:
        raise DataRefusedError(f"{labels} must hold one label a record; give the published label file.")
    if [side for side in pixels.shape[1:] if side != 1] != [side for side in shape if side != 1]:
        raise DataRefusedError(
            f"{images} holds images of another size than the declared {list(shape)}; correct one."
        )
    if len(pixels) != len(classes):
        raise DataRefusedError(
            f"{images} and {labels} hold different numbers of records; give files that belong together."
        )
    scaled = pixels.reshape(-1, *shape).astype(np.float32)
    scaled /= 255.0
    return Records(scaled, classes.astype(np.int64))


def parse(path: Path) -> NDArray[np.uint8]:
    """The array in a gzipped IDX file of unsigned bytes; raises DataRefusedError for any other file."""
    try:
        content = gzip.decompress(path.read_bytes())
        zero, kind, dimensions = struct.unpack_from(">HBB", content)
        sizes = struct.unpack_from(f">{dimensions}I", content, 4)
    except (OSError, EOFError, zlib.error, struct.error):
        raise DataRefusedError(f"{path} is not a whole gzipped IDX file; fetch it again.") from None
    body = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if zero != 0 or kind != _UNSIGNED_BYTE or not sizes or body.size != np.prod(sizes, dtype=np.float64):
        raise DataRefusedError(
            f"{path} is not an IDX file of unsigned bytes of the length it states; fetch it again."
        )
    return body.reshape(sizes)
