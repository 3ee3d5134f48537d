"""The data sets of the catalogue, against published facts about them."""

import os
from pathlib import Path

import numpy as np
import pytest

from data import DataRefused, catalogue
from data.fetch import Places, fetch
from data.formats import Digits
from data.readers import digits
from data.reading import read
from data.records import Parts

MIRROR = os.environ.get("EPSILONFLOW_DATA_MIRROR")
needs_mirror = pytest.mark.skipif(
    not MIRROR, reason="EPSILONFLOW_DATA_MIRROR names no folder with the real files"
)


def parts_of(name: str, cache: Path) -> Parts:
    """The records of a data set of the catalogue, from the mirror."""
    card = catalogue.card(name)
    places = Places(root=Path(), mirror=Path(MIRROR) if MIRROR else None, cache=cache)
    return read(card, fetch(card, places, key=bytes(32)))


def test_digits(tmp_path: Path) -> None:
    parts = parts_of("digits", tmp_path)
    assert (len(parts.train), len(parts.test)) == (1436, 361)
    labels = np.concatenate([parts.train.labels, parts.test.labels])
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (parts.train.features.min(), parts.train.features.max()) == (0, 1)
    assert parts.train.features.shape[1:] == (1, 8, 8) and parts.train.features.dtype == np.float32


def test_digits_that_are_not_the_declared_ones_are_refused() -> None:
    with pytest.raises(DataRefused, match="installed scikit-learn are not the declared ones"):
        digits.read(Digits(kind="digits", sha256="0" * 64), shape=(1, 8, 8))


MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@needs_mirror
@pytest.mark.parametrize(
    ("name", "means", "counts"),
    [("mnist", (0.1307, 0.1325), MNIST_TRAIN), ("fashion-mnist", (0.2860, 0.2868), [6000] * 10)],
)
def test_images(name: str, means: tuple[float, float], counts: list[int], tmp_path: Path) -> None:
    parts = parts_of(name, tmp_path)
    assert parts.train.features.shape == (60000, 1, 28, 28) and parts.test.features.shape == (
        10000,
        1,
        28,
        28,
    )
    assert np.bincount(parts.train.labels).tolist() == counts
    assert parts.train.features.mean(dtype=np.float64) == pytest.approx(means[0], abs=5e-5)
    assert parts.test.features.mean(dtype=np.float64) == pytest.approx(means[1], abs=5e-5)


@needs_mirror
def test_adult(tmp_path: Path) -> None:
    parts = parts_of("adult", tmp_path)
    assert parts.train.features.shape == (32561, 113) and parts.test.features.shape == (16281, 113)
    assert np.bincount(parts.train.labels).tolist() == [24720, 7841]
    assert np.bincount(parts.test.labels).tolist() == [12435, 3846]
    assert parts.train.features.min() == 0 and parts.train.features.max() == 1


@needs_mirror
def test_adult_sends_what_is_missing_and_nothing_else_to_other(tmp_path: Path) -> None:
    card, parts = catalogue.card("adult"), parts_of("adult", tmp_path)
    assert card.reader.kind == "csv"
    ends = np.cumsum([column.width for column in card.reader.columns])
    other = [
        end - 1 for end, column in zip(ends, card.reader.columns, strict=True) if column.kind == "categorical"
    ]
    assert (parts.train.features[:, other].sum(axis=1) > 0).sum() == 2399
    assert (parts.test.features[:, other].sum(axis=1) > 0).sum() == 1221
    one_hot = [
        end - 1 for end, column in zip(ends, card.reader.columns, strict=True) if column.kind == "numeric"
    ]
    assert (np.delete(parts.train.features, one_hot, axis=1).sum(axis=1) == 8).all()
