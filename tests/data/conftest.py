"""Cards and files small enough to write by hand."""

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from ruamel.yaml import YAML

from data.card import DataCard
from data.readers.records import RecordBatch
from data.readers.rows import RowReader
from tests.support.cards import card, category, csv_of, label, number
from tests.support.parts import whole

Document = dict[str, Any]
CardOf = Callable[..., DataCard]
Store = Callable[..., Path]


def named_files(*names: str) -> Document:
    """Files of a card, each in the project's root under its own name, with a checksum of its own."""
    return {name: {"path": name, "sha256": str(place) * 64} for place, name in enumerate(names, start=1)}


def train_records(card: DataCard, path: Path) -> RecordBatch:
    """The records to train on of a table in one file."""
    assert card.reader.kind in ("csv", "parquet")
    return whole(RowReader(card, {"train": path}).read()).train


def tar(path: Path, members: Mapping[str, bytes]) -> Path:
    """A tar archive, packed as its name says."""
    with tarfile.open(path, f"w:{path.suffix[1:]}") as packed:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def table() -> Document:
    """The document of a table's card: a number, a category and a label, split by hash."""
    return card(
        "tiny",
        cap={"epsilon": 1.0, "delta": 1e-5},
        records={"at_most": 1000},
        classes=["no", "yes"],
        files={"train": {"path": "tiny.csv", "sha256": "0" * 64}},
        split={"salt": "tiny", "test_fraction": 0.5},
        reader=csv_of(number("age", 0, 100), category("town", "Rome", "Oslo"), label("answer")),
    )


@pytest.fixture
def images() -> Document:
    """The document of an IDX card: two by two pixels, two classes, three records and one to test on."""
    homes = {
        role: {"urls": [f"https://images.invalid/{role}.gz"], "sha256": "0" * 64}
        for role in ("train_images", "train_labels", "test_images", "test_labels")
    }
    return card(
        "dots",
        public=True,
        unit="one image",
        cap={"epsilon": 1000000.0, "delta": 1.0},
        records={"train": 3, "test": 1},
        shape=[1, 2, 2],
        classes=["dark", "light"],
        files=homes,
        reader={"kind": "idx"},
    )


@pytest.fixture
def card_of() -> CardOf:
    """Makes a card of a document, as the catalogue does."""

    def make(document: Document) -> DataCard:
        return DataCard.model_validate_json(json.dumps(document))

    return make


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Writes a document as NAME.yaml, its own name by default, into a folder of cards; returns the folder."""

    def write(document: Document, name: str | None = None) -> Path:
        folder = tmp_path / "cards"
        folder.mkdir(exist_ok=True)
        YAML(typ="safe", pure=True).dump(document, folder / f"{name or document['name']}.yaml")
        return folder

    return write


@pytest.fixture
def idx() -> Callable[[NDArray[np.uint8]], bytes]:
    """Turns an array into gzipped IDX."""

    def pack(values: NDArray[np.uint8]) -> bytes:
        header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
        return gzip.compress(header + values.tobytes())

    return pack
