"""Data sets without files: the handwritten digits of scikit-learn, and synthetic records for problems with a known
answer.

Synthetic records are the same on every machine.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from data.card import DataRefusedError
from data.card import Records as Numbers
from data.formats import Digits, Synthetic
from data.readers.records import Block, Records


def read_digits(declared: Digits, *, shape: tuple[int, ...]) -> Iterator[Block]:
    """The 1797 images as one block: float32 in [0, 1] (ink 0..16, divided by 16) of `shape`, labels as int64.

    Raises DataRefusedError if the installed scikit-learn has other digits than the declared ones.
    """
    from sklearn.datasets import load_digits  # takes a second to import, and only this reader needs it

    bunch = load_digits()
    pixels, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.uint8)
    if hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest() != declared.sha256:
        raise DataRefusedError(
            "the digits of the installed scikit-learn are not the declared ones; install the locked one."
        )
    images = pixels.reshape(-1, *shape).astype(np.float32) / np.float32(16)
    yield Block("train", Records(images, labels.astype(np.int64)))


def read_synthetic(declared: Synthetic, numbers: Numbers, *, features: int) -> Iterator[Block]:
    """One block per part: features uniform in [0, 1] as float32 [n, features], label 1 if X w is positive, else 0.

    The generators are NumPy's RandomState, whose numbers never change. Features are drawn column by column, first for
    training and then for test records, and w is standard normal. Labels are computed in 64 bits. Raises
    DataRefusedError if this machine makes other records than the declared ones.
    """
    uniform = RandomState(declared.features_seed)
    normal: NDArray[np.float64] = RandomState(declared.hyperplane_seed).standard_normal(features)
    train = _records(uniform, normal, numbers.train or 0)
    test = _records(uniform, normal, numbers.test or 0)
    digest = hashlib.sha256()
    for part in (train, test):
        part.add_to(digest)
    if digest.hexdigest() != declared.sha256:
        raise DataRefusedError("the synthetic records are not the declared ones; install the locked NumPy.")
    yield Block("train", train)
    yield Block("test", test)


def _records(uniform: RandomState, normal: NDArray[np.float64], n: int) -> Records:
    points = uniform.random_sample((len(normal), n)).T
    return Records(np.ascontiguousarray(points, np.float32), (points @ normal > 0).astype(np.int64))
