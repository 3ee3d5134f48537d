"""From the files of a card to records: the reader of its format, the split it declares, and the checks."""

from collections.abc import Mapping
from pathlib import Path

from data.card import DataCard
from data.formats import Digits, Idx
from data.readers import digits, idx
from data.records import Parts, Records, check
from data.split import split


def read(card: DataCard, files: Mapping[str, Path]) -> Parts:
    """The training and test records of `card`, checked against what it declares.

    files: by role, as `data.fetch` gives them. Raises DataRefused without a record's value in the message.
    """
    parts = _read(card, files)
    check(card, parts)
    return parts


def _read(card: DataCard, files: Mapping[str, Path]) -> Parts:
    if isinstance(card.reader, Idx):
        return idx.read(files, shape=card.input_shape)
    if isinstance(card.reader, Digits):
        return _parts(card, {"train": digits.read(card.reader, shape=card.input_shape)})
    from data.readers import table  # pyarrow takes half a second to import, and only tables need it

    return _parts(card, table.read(files, card.reader, classes=card.classes))


def _parts(card: DataCard, read: Mapping[str, Records]) -> Parts:
    if card.split is not None:
        return split(read["train"], card.split)
    return Parts(train=read["train"], test=read["test"])
