"""IDX files, made by hand: what is read, and what is refused."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from data import DataRefusedError, reading
from data.card import DataCard
from tests.data.conftest import CardOf, Document
from tests.support.parts import Parts, whole
from tests.support.refusals import refused_as

Pack = Callable[[NDArray[np.uint8]], bytes]

PIXELS = np.array([[[0, 255], [51, 102]], [[1, 2], [3, 4]], [[255] * 2] * 2], np.uint8)
LABELS = np.array([0, 1, 1], np.uint8)


@pytest.fixture
def files(tmp_path: Path, idx: Pack) -> dict[str, Path]:
    """Three training images and one to test on, with their labels."""
    content = {
        "train_images": PIXELS,
        "train_labels": LABELS,
        "test_images": PIXELS[:1],
        "test_labels": LABELS[:1],
    }
    for role, values in content.items():
        (tmp_path / f"{role}.gz").write_bytes(idx(values))
    return {role: tmp_path / f"{role}.gz" for role in content}


def read(card: DataCard, files: dict[str, Path]) -> Parts:
    """All records of the files."""
    return whole(reading.read(card, files))


@pytest.fixture
def card(images: Document, card_of: CardOf) -> DataCard:
    """The card of those files."""
    return card_of(images)


def test_pixels_become_shares_of_255(card: DataCard, files: dict[str, Path]) -> None:
    parts = read(card, files)
    assert parts.train.features.shape == (3, 1, 2, 2) and parts.train.features.dtype == np.float32
    np.testing.assert_allclose(parts.train.features[0, 0], np.array([[0, 1], [0.2, 0.4]]), rtol=1e-6)
    assert parts.train.labels.tolist() == [0, 1, 1] and parts.train.labels.dtype == np.int64
    assert len(parts.test) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda packed: packed[:-9],
        lambda packed: b"not gzip" + packed,
        lambda packed: gzip.compress(gzip.decompress(packed)[:-1]),
        lambda packed: gzip.compress(gzip.decompress(packed) + b"\0"),
        lambda packed: gzip.compress(b"\0\0\x0d" + gzip.decompress(packed)[3:]),
        lambda packed: gzip.compress(b"\0\0\x08\x00"),
        lambda packed: gzip.compress(b"\0\0\x08\x03\0"),
        lambda packed: gzip.compress(b""),
        lambda packed: b"",
    ],
    ids=["cut", "no gzip", "byte short", "byte long", "floats", "scalar", "cut header", "empty", "nothing"],
)
def test_a_damaged_file_is_refused_by_name(
    card: DataCard, files: dict[str, Path], spoil: Callable[[bytes], bytes]
) -> None:
    for role in ("train_images", "train_labels"):
        whole = files[role].read_bytes()
        files[role].write_bytes(spoil(whole))
        with refused_as("unreadable_file", DataRefusedError, path=files[role]):
            read(card, files)
        files[role].write_bytes(whole)


@pytest.mark.parametrize(
    ("contents", "code", "fields"),
    [
        ({"train_labels": LABELS[:2]}, "records_differ", {}),
        ({"train_labels": PIXELS}, "records_differ", {}),
        ({"train_images": PIXELS.reshape(3, 4, 1)}, "records_differ", {"shape": [1, 2, 2]}),
        (
            {"train_labels": np.array([0, 1, 2], np.uint8)},
            "records_differ",
            {"part": "training", "classes": 2},
        ),
        ({"test_images": PIXELS[:0], "test_labels": LABELS[:0]}, "no_records", {"part": "test"}),
        (
            {"train_images": PIXELS[:2], "train_labels": LABELS[:2]},
            "records_differ",
            {"train": 2, "test": 1, "declared_train": 3, "declared_test": 1},
        ),
    ],
)
def test_files_that_do_not_fit_each_other_or_the_card_are_refused(
    card: DataCard,
    files: dict[str, Path],
    idx: Pack,
    contents: dict[str, NDArray[np.uint8]],
    code: str,
    fields: dict[str, object],
) -> None:
    for role, content in contents.items():
        files[role].write_bytes(idx(content))
    with refused_as(code, DataRefusedError, **fields):
        read(card, files)
