"""Scattering: replace the pixels of each image by its wavelet features.

This is the transform of Bruna and Mallat 2013 with two scales and eight angles, on which Tramèr and Boneh 2021
(arXiv:2011.11660) train linear models and small networks. Nothing in it is learned, so it costs nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from data.readers.records import Block, Features
from data.schema.card import DataCard
from data.schema.errors import DataRefusedError

_SCALES, _ANGLES = 2, 8
_PATHS = 1 + _SCALES * _ANGLES + _SCALES * (_SCALES - 1) // 2 * _ANGLES**2
_STRIDE = 2**_SCALES
_SMALLEST_SIDE = 8
_AT_ONCE = 256
_MEANS, _DEVIATIONS = (
    np.array(values, np.float32)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)
"""Means and standard deviations of ImageNet's red, green and blue pixels, which are public."""

_Images: TypeAlias = NDArray[np.float32]


def scattered_shape(card: DataCard) -> tuple[int, int, int]:
    """Shape of one image's features: (81 channels, height // 4, width // 4).

    Raises DataRefusedError if the records are not images of at least 8 x 8 pixels.
    """
    shape = card.input_shape
    if len(shape) != 3 or min(shape[1:]) < _SMALLEST_SIDE:
        raise DataRefusedError(
            f"scattering takes images of at least {_SMALLEST_SIDE} x {_SMALLEST_SIDE} pixels, but a record of "
            f"{card.name!r} has the shape {list(shape)}; set data.transform to none."
        )
    channels, height, width = shape
    return _PATHS * channels, height // _STRIDE, width // _STRIDE


def scattered(card: DataCard, blocks: Iterable[Block]) -> Iterator[Block]:
    """Replace the pixels of each image by its features, some hundred images at a time.

    An image's features are the same, bit for bit, with any block contents. Raises DataRefusedError as `scattered_shape`
    does.
    """
    shape, features_of = scattered_shape(card), _scattering(card)
    for some, found in mapped(blocks, features_of, at_once=_AT_ONCE):
        yield replace(some, records=replace(some.records, features=found.reshape(-1, *shape)))


def mapped(
    blocks: Iterable[Block], features_of: Callable[[Features], Features], *, at_once: int
) -> Iterator[tuple[Block, Features]]:
    """Portions of the blocks, and the new features of their records.

    `features_of` gets at most `at_once` records at a time. It is called by as many workers as torch has threads, each
    with one thread: a transform is hundreds of short operations, and threads that share each operation wait for each
    other, which took more than twice as long on a busy machine.
    """
    import torch

    count = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for block in blocks:
                for some in block.portions(count * at_once):
                    made = pool.map(features_of, [one.records.features for one in some.portions(at_once)])
                    yield some, np.concatenate(list(made))
    finally:
        torch.set_num_threads(count)


def _scattering(card: DataCard) -> Callable[[_Images], _Images]:
    """The transform of images [n, channels, height, width] to [n, channels, 81, height // 4, width // 4]."""
    import torch  # these take seconds to import, and only scattering needs them
    from kymatio.torch import Scattering2D

    channels, height, width = card.input_shape
    transform = Scattering2D(J=_SCALES, shape=(height, width), L=_ANGLES)

    def features_of(images: _Images) -> _Images:
        seen = (images - _MEANS) / _DEVIATIONS if channels == len(_MEANS) else images
        with torch.no_grad():
            found: _Images = transform(torch.from_numpy(np.ascontiguousarray(seen))).numpy()
        return found

    return features_of
