"""Encoding: what a killed prepare stage encoded is not encoded again, and nothing of it stays."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.card import DataRefusedError, data_card
from data.description import EncoderFacts, public_description
from data.readers.records import Block, Records
from data.targets import Classes
from data.transforms import encoded

FACTS = EncoderFacts("halves", "images", 4, "0" * 64, "unknown", "{}")
ROWS = 3000


def blocks() -> Iterator[Block]:
    rows = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 1, 2, 2)
    yield Block("train", Records(rows, np.zeros(ROWS, np.int64)))


class Halves:
    """Flat images, halved; raises after so many records where that is given."""

    def __init__(self, most: int | None = None) -> None:
        self.seen, self.most = 0, most

    def load(self) -> Any:
        return self.encode

    def encode(self, images: Any) -> Any:
        if self.most is not None and self.seen + len(images) > self.most:
            raise KeyboardInterrupt
        self.seen += len(images)
        return images.reshape(len(images), -1) / 2


CLASSES = Classes(classes=("a", "b"))


def features(encoder: Halves, kept: Path) -> np.ndarray:
    told: list[int] = []
    made = list(encoded(blocks(), FACTS, encoder.load, CLASSES, kept=kept, say=told.append))
    assert told[-1] == ROWS
    return np.concatenate([block.records.features for block in made])


def test_encoding_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    first, second = Halves(1600), Halves()
    with pytest.raises(KeyboardInterrupt):
        features(first, tmp_path / "kept")
    found = features(second, tmp_path / "kept")
    assert second.seen <= ROWS - first.seen < ROWS
    assert np.array_equal(found, np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4) / 2)
    assert not (tmp_path / "kept").exists()


def test_another_encoder_takes_nothing_of_what_was_kept(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        features(Halves(1600), tmp_path / "kept")
    other = EncoderFacts("halves", "images", 4, "1" * 64, "unknown", "{}")
    encoder = Halves()
    list(encoded(blocks(), other, encoder.load, CLASSES, kept=tmp_path / "kept", say=lambda _: None))
    assert encoder.seen == ROWS


@pytest.mark.parametrize(
    ("name", "facts", "words"),
    [
        ("adult", FACTS, "takes images, and 'adult' has tables"),
        ("imdb", FACTS, "takes images, and 'imdb' has texts"),
        ("mnist", replace(FACTS, takes="texts"), "takes texts, and 'mnist' has images"),
        ("mnist", None, "data.encoder names none"),
    ],
)
def test_an_encoder_of_other_records_is_refused(name: str, facts: EncoderFacts | None, words: str) -> None:
    with pytest.raises(DataRefusedError, match=words):
        public_description(data_card(name), "encoder", facts)
