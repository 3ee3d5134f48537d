"""Records in memory, and what is checked about them before anything is made of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.card import DataCard
from data.errors import DataRefused


@dataclass(frozen=True)
class Records:
    """Records side by side: features float32 [n, *shape], labels int64 [n] counting the declared classes."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: NDArray[np.bool_]) -> "Records":
        return Records(self.features[chosen], self.labels[chosen])


@dataclass(frozen=True)
class Parts:
    """The records to train on, and the public ones to test on."""

    train: Records
    test: Records


def check(card: DataCard, parts: Parts) -> None:
    """Raises DataRefused when the records are not what the card declares: shape, values, classes, number."""
    for part, records in (("training", parts.train), ("test", parts.test)):
        _check_values(card, part, records)
    _check_number(card, parts)


def _check_values(card: DataCard, part: str, records: Records) -> None:
    if len(records) == 0:
        raise DataRefused(f"Data set {card.name!r} has no {part} records; give it a file that holds some.")
    if records.features.shape != (len(records), *card.input_shape):
        raise DataRefused(
            f"The {part} records of {card.name!r} have not the declared shape {list(card.input_shape)}, "
            "or not one label each; correct the files or the card."
        )
    if not np.isfinite(records.features).all():
        raise DataRefused(
            f"The {part} features of {card.name!r} hold NaN or infinite values; correct the files."
        )
    if records.labels.min() < 0 or records.labels.max() >= len(card.classes):
        raise DataRefused(
            f"The {part} labels of {card.name!r} go beyond its {len(card.classes)} declared classes; "
            "correct the files or the classes in the card."
        )


def _check_number(card: DataCard, parts: Parts) -> None:
    declared, found = card.records, (len(parts.train), len(parts.test))
    if declared.at_most is not None and sum(found) > declared.at_most:
        raise DataRefused(
            f"Data set {card.name!r} has more records than its at_most, {declared.at_most}; raise that in its card."
        )
    if declared.at_most is None and found != (declared.train, declared.test):
        raise DataRefused(
            f"Data set {card.name!r} has {found[0]} training and {found[1]} test records, its card declares "
            f"{declared.train} and {declared.test}; correct the files or the card."
        )
