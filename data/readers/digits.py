"""The handwritten digits that come with scikit-learn: nothing to fetch."""

import hashlib
from collections.abc import Iterator

import numpy as np

from data.errors import DataRefused
from data.formats import Digits
from data.records import Block, Records


def read(declared: Digits, *, shape: tuple[int, ...]) -> Iterator[Block]:
    """The 1797 images as one block: float32 in [0, 1] (ink 0..16, divided by 16) of `shape`, labels as int64.

    Raises DataRefused when the installed scikit-learn carries other digits than the declared ones.
    """
    from sklearn.datasets import load_digits  # takes a second to import, and only this reader needs it

    bunch = load_digits()
    pixels, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.uint8)
    if hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest() != declared.sha256:
        raise DataRefused(
            "The digits of the installed scikit-learn are not the declared ones; install the locked one."
        )
    images = pixels.reshape(-1, *shape).astype(np.float32) / np.float32(16)
    yield Block("train", Records(images, labels.astype(np.int64)))
