"""What a model's file says about how its records were prepared."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.card import DataRefusedError, data_card
from data.preparation import Preparation, preparation_of, reader_in
from tests.support.checkout import PROJECT
from tests.support.refusals import refused_as

TABLE = {
    "name": "people",
    "classes": ["no", "yes"],
    "shape": None,
    "reader": {
        "kind": "csv",
        "columns": [{"name": "x", "kind": "numeric", "bounds": [0, 1]}, {"name": "y", "kind": "label"}],
    },
    "transform": "none",
}


def test_file_has_the_keys_of_the_card_in_their_order() -> None:
    """Files of models and of prepared records stay the same, byte for byte."""
    document = Preparation.from_card(data_card("digits"), "none", None).document()
    assert json.dumps(document | {"reader": 0, "unit": 0, "classes": 0}) == (
        '{"name": "digits", "unit": 0, "classes": 0, "shape": [1, 8, 8], "reader": 0, "transform": "none",'
        ' "words": null, "encoder": null}'
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in (PROJECT / "data/cards").glob("*.yaml")))
def test_every_shipped_card_is_read_again_from_its_json(name: str, tmp_path: Path) -> None:
    card = data_card(name)
    preparation = Preparation.from_card(card, "encoder", b"good\nbad\n", encoder={"name": "wordllama"})
    again = Preparation.of(json.loads(json.dumps(preparation.document())))
    assert again == preparation and again.words == ("good", "bad") and again.encoder_name == "wordllama"
    assert again.format.kind == card.reader.kind == again.reader_kind
    assert again.table is None  # since an encoder made the records


def test_an_older_file_has_no_preparation() -> None:
    assert preparation_of(None) is None and reader_in(None) is None


@pytest.mark.parametrize(
    "change",
    [
        {"name": None},
        {"classes": "no"},
        {"shape": 3},
        {"reader": "csv"},
        {"reader": {}},
        {"reader": {"kind": "of a later version"}},
        {"transform": "wavelets"},
        {"words": [1]},
        {"encoder": "resnet18"},
    ],
)
def test_what_this_version_does_not_know_is_refused(change: dict[str, Any]) -> None:
    assert reader_in(TABLE) is not None
    with refused_as("preparation_unknown", DataRefusedError):
        reader_in(TABLE | change)


@pytest.mark.parametrize("key", ["name", "classes", "shape", "reader", "transform"])
def test_a_file_without_a_key_is_refused(key: str) -> None:
    with refused_as("preparation_unknown", DataRefusedError):
        reader_in({name: value for name, value in TABLE.items() if name != key})
