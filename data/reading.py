"""From the files of a card to records: the reader of its format, the split it declares, and the checks."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from data.card import DataCard
from data.formats import Cifar, Digits, Idx, Reviews, Synthetic
from data.readers import cifar, digits, idx, reviews, synthetic
from data.records import Block, checked
from data.split import split


def read(card: DataCard, files: Mapping[str, Path]) -> Iterator[Block]:
    """The training and test records of `card` in blocks, checked against what it declares.

    Tables and coloured images are read block by block; what other formats hold is small, and comes whole.
    files: by role, as `data.fetch` gives them. Raises DataRefused, while the blocks are taken and without a
    record's value in the message.
    """
    return checked(card, _read(card, files))


def word_list(card: DataCard, files: Mapping[str, Path]) -> bytes | None:
    """The public words that the tokens of `card` stand for, one a line in the order of their tokens; else None.

    Raises DataRefused as `read` does, and where they are not those that the card declares by words_sha256.
    """
    return reviews.word_list(files, card.reader) if isinstance(card.reader, Reviews) else None


def _read(card: DataCard, files: Mapping[str, Path]) -> Iterator[Block]:
    blocks = _of_the_source(card, files)
    return blocks if card.split is None else split(blocks, card.split)


def _of_the_source(card: DataCard, files: Mapping[str, Path]) -> Iterator[Block]:
    if isinstance(card.reader, Idx):
        return idx.read(files, shape=card.input_shape)
    if isinstance(card.reader, Digits):
        return digits.read(card.reader, shape=card.input_shape)
    if isinstance(card.reader, Synthetic):
        return synthetic.read(card.reader, card.records, features=card.input_shape[0])
    if isinstance(card.reader, Cifar):
        return cifar.read(files, card.reader, shape=card.input_shape)
    if isinstance(card.reader, Reviews):
        return reviews.read(files, card.reader, classes=card.classes)
    from data.readers import table  # pyarrow takes half a second to import, and only tables need it

    return table.read(files, card.reader, classes=card.classes)
