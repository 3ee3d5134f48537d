"""What decides on which side a record is, for training or held out, as one value that a population can be held to."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from data.card import DataCard, File
from data.columns import Ignored
from data.errors import DataRefused
from data.formats import Cifar, Digits, Format, Reviews, Synthetic, Table


def rule_of(card: DataCard) -> str:
    """SHA-256 in hex of all in a card that can move a record between the training and the held-out side.

    Where the card splits: salt and test fraction, and what an encoded record depends on, such as bounds, categories and
    classes. Elsewhere the checksums of the files that hold test records. It is a function of the card alone: raises
    DataRefused where it has `alternatives` with other test files, since which of them is there would decide.
    """
    if card.split is None:
        _check_alternatives(card)
    decides = _of_the_files(card) if card.split is None else _of_the_split(card)
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _of_the_split(card: DataCard) -> dict[str, Any]:
    """A key that a card leaves at its default is left out, here and below, so that later keys change no rule."""
    split = card.split.model_dump(mode="json", exclude_defaults=True) if card.split else None
    return {
        "split": split,
        "encoding": _encoding(card.reader),
        "classes": card.classes,
        "shape": card.input_shape,
    }


def _encoding(reader: Format) -> object:
    if not isinstance(reader, Table):
        return reader.model_dump(
            mode="json", exclude_defaults=True, exclude={"words_sha256"}
        )  # moves no record
    read = [column for column in reader.columns if not isinstance(column, Ignored)]
    columns = [column.model_dump(mode="json", exclude_defaults=True) for column in read]
    return {"columns": columns, "missing": sorted(set(reader.missing))}


def _of_the_files(card: DataCard) -> dict[str, Any]:
    names_its_part = isinstance(card.reader, Cifar | Digits | Reviews | Synthetic)
    return {"files": _held_out(card.files), "reader": _encoding(card.reader) if names_its_part else None}


def _held_out(files: Mapping[str, File]) -> dict[str, str | None]:
    """The checksums by role; the files of the training records alone are left out."""
    test = {role: file for role, file in files.items() if role.split("_")[0] != "train"}
    return {role: file.sha256 or file.keyed_sha256 or file.md5 for role, file in test.items()}


def _check_alternatives(card: DataCard) -> None:
    if any(_held_out(files) != _held_out(card.files) for files in card.alternatives):
        raise DataRefused(
            f"the alternatives of the private data set {card.name!r} have other test files than its files, so that"
            " records trained on could be published as held out; give them the same checksums, or leave them out."
        )
