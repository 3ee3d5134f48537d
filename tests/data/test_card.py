"""Cards are strict: what is wrong is refused in one sentence that names the key."""

import math
from pathlib import Path
from typing import Any

import pytest

from data import DataRefusedError, dataset_info
from data.card import CARDS, card_names, data_card
from tests.data.conftest import CardOf, Document, Store
from tests.support.changed import changed
from tests.support.refusals import refused_as


@pytest.mark.parametrize("name", card_names())
def test_every_card_of_the_catalogue_is_valid_and_public(name: str) -> None:
    info = dataset_info(data_card(name))
    assert (info.dataset, info.is_public, info.holdout) == (name, True, "public")
    assert (info.cap_epsilon, info.cap_delta) == (1e6, 1.0)
    assert (info.records is None) == (info.test_records is None) == (name == "ipums")


def test_the_two_cards_of_kddcup99_differ_in_their_training_records_only() -> None:
    full, tenth = data_card("kddcup99"), data_card("kddcup99-10-percent")
    assert (full.reader, full.classes, full.population) == (tenth.reader, tenth.classes, tenth.population)
    assert full.files["test"] == tenth.files["test"] and full.files["train"] != tenth.files["train"]


@pytest.mark.parametrize("name", ["cifar", "../cards/mnist", "mnist.yaml", ""])
def test_an_unknown_data_set_is_refused_with_the_known_ones(name: str) -> None:
    with refused_as("unknown_data_set", DataRefusedError, name=name, known=card_names()):
        data_card(name)


def test_a_private_number_of_records_is_not_described(table: Document, card_of: CardOf) -> None:
    info = dataset_info(card_of(table))
    assert (info.records, info.test_records, info.input_shape) == (None, None, (4,))
    assert "1000" not in info.to_json()


BINNED = {"name": "age", "kind": "binned", "edges": [1]}
AT: Document = {"urls": ["https://a.invalid/5"], "sha256": "0" * 64}
DATE = {"name": "date", "kind": "date", "month": "age", "day": "age"}
FAULTS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "unknown key": ("colour", "red", ("colour",)),
    "no group of keys": ("records", 3, ("records",)),
    "unknown nested key": ("files.train.colour", "red", ("files.train.colour",)),
    "unknown column key": ("reader.columns.0.unit", "y", ("reader.columns.0.unit",)),
    "unknown kind": ("reader.columns.0.kind", "text", ("reader.columns.0",)),
    "unknown reader": ("reader.kind", "excel", ("reader",)),
    "unknown holdout": ("holdout", "secret", ("holdout",)),
    "text for a number": ("cap.epsilon", "1.0", ("cap.epsilon",)),
    "text for a truth value": ("public", "yes", ("public",)),
    "no budget": ("cap.epsilon", 0, ("cap.epsilon",)),
    "infinite cap": ("cap.epsilon", math.inf, ("cap.epsilon",)),
    "impossible delta": ("cap.delta", 1.5, ("cap.delta",)),
    "bounds beyond all numbers": ("reader.columns.0.bounds", [-1e308, 1e308], ("reader.columns.0.bounds",)),
    "bounds upside down": ("reader.columns.0.bounds", [5, 1], ("reader.columns.0.bounds",)),
    "one bound": ("reader.columns.0.bounds", [0], ("reader.columns.0.bounds.1",)),
    "infinite bound": ("reader.columns.0.bounds", [0, math.inf], ("reader.columns.0.bounds.1",)),
    "missing out of bounds": (
        "reader.columns.0.missing",
        101,
        ("reader.columns.0.missing", "reader.columns.0.bounds"),
    ),
    "missing is a word": ("reader.columns.0.missing", "mean", ("reader.columns.0.missing",)),
    "category twice": ("reader.columns.1.categories", ["a", "a"], ("reader.columns.1.categories",)),
    "unseen category twice": (
        "reader.columns.1",
        {"name": "b", "kind": "ignored", "categories": ["a", "a"]},
        ("reader.columns.1.categories",),
    ),
    "number as category": ("reader.columns.1.categories", [1, 2], ("reader.columns.1.categories.0",)),
    "two labels": ("reader.columns.1", {"name": "b", "kind": "label"}, ("reader",)),
    "no features": ("reader.columns", [{"name": "b", "kind": "label"}], ("reader.columns",)),
    "column twice": ("reader.columns.1.name", "age", ("reader.columns",)),
    "spells no class": ("reader.columns.2.spellings", {"perhaps": ["?"]}, ("classes", "reader")),
    "spells two alike": ("reader.columns.2.spellings", {"no": ["yes"]}, ("classes", "reader")),
    "one class": ("classes", ["yes"], ("classes", "target")),
    "class twice": ("classes", ["yes", "yes"], ("classes",)),
    "shape of other columns": ("shape", [5], ("shape", "reader")),
    "count and bound": ("records.train", 5, ("records.train", "records.test", "records.at_most")),
    "edges that fall": ("reader.columns.0", BINNED | {"edges": [2, 1]}, ("reader.columns.0.edges",)),
    "edge twice": ("reader.columns.0", BINNED | {"edges": [1, 1]}, ("reader.columns.0.edges",)),
    "no edges": ("reader.columns.0", BINNED | {"edges": []}, ("reader.columns.0.edges",)),
    "infinite edge": ("reader.columns.0", BINNED | {"edges": [1, math.inf]}, ("reader.columns.0.edges.1",)),
    "bin for missing": ("reader.columns.0", BINNED | {"missing": "other"}, ("reader.columns.0.missing",)),
    "unknown scale": ("reader.columns.0.scale", "sqrt", ("reader.columns.0.scale",)),
    "unknown unknown": ("reader.columns.1.unknown", "mode", ("reader.columns.1.unknown",)),
    "date without month": ("reader.columns.1", DATE | {"month": "month"}, ("reader.columns",)),
    "date of a label": ("reader.columns.1", DATE | {"day": "answer"}, ("reader.columns",)),
    "date of itself": ("reader.columns.1", DATE | {"day": "date"}, ("reader.columns",)),
    "eleven months": ("reader.columns.1", DATE | {"months": [*"abcdefghijk"]}, ("reader.columns.1.months",)),
    "month twice": ("reader.columns.1", DATE | {"months": ["may"] * 12}, ("reader.columns.1.months",)),
    "member that is no word": ("reader.member", "", ("reader.member",)),
    "folder with a folder": ("folder", "a/b", ("folder",)),
    "own file under another name": (
        "files.train.saved_as",
        "t.csv",
        ("files.train.path", "files.train.saved_as"),
    ),
    "names of a file": (
        "files.train",
        AT | {"urls": [*AT["urls"], "https://a.invalid/6"]},
        ("files.train.urls", "files.train.saved_as"),
    ),
    "saved in a folder": ("files.train", AT | {"saved_as": "../t.csv"}, ("files.train.saved_as",)),
    "no records": ("records", {"train": 0, "test": 1}, ("records.train",)),
    "no checksum": (
        "files.train.sha256",
        None,
        ("files.train.sha256", "files.train.keyed_sha256", "files.train.md5"),
    ),
    "short checksum": ("files.train.sha256", "ab12", ("files.train.sha256",)),
    "nowhere": ("files.train.path", None, ("files.train.urls", "files.train.path")),
    "absolute path": ("files.train.path", "/etc/passwd", ("files.train.path",)),
    "home path": ("files.train.path", "~/tiny.csv", ("files.train.path",)),
    "url and path": (
        "files.train.urls",
        ["https://a.invalid/tiny.csv"],
        ("files.train.urls", "files.train.path"),
    ),
    "url that is none": ("files.train.urls", ["ftp://a.invalid/tiny.csv"], ("files.train.urls.0",)),
    "no train file": ("files", {}, ("files", "reader.kind")),
    "no split": ("split", None, ("split", "files.test")),
    "everything is test": ("split.test_fraction", 1.0, ("split.test_fraction",)),
    "skips a missing file": ("reader.skip_lines", {"test": 1}, ("reader.skip_lines.test", "files.test")),
    "name of another set": ("name", "other", ("name",)),
    "name with a folder": ("name", "a/b", ("name",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_card_is_one_sentence_with_the_key(fault: str, table: Document, store: Store) -> None:
    place, value, keys = FAULTS[fault]
    with refused_as("bad_card", DataRefusedError, keys=keys) as refusal:
        data_card("tiny", store(changed(table, place, value), name="tiny"))
    assert str(refusal.value).startswith("data card ") and "\n" not in str(refusal.value)


def test_every_required_key_is_missed_by_name(table: Document, store: Store) -> None:
    for key in set(table) - {"name", "files", "split"}:
        folder = store({other: value for other, value in table.items() if other != key})
        keys = ("classes", "target") if key == "classes" else (key,)
        with refused_as("bad_card", DataRefusedError, keys=keys):
            data_card("tiny", folder)


@pytest.mark.parametrize(
    "text", ["name: [", "name: tiny\nname: tiny\n", "- name\n", "", "name: !!binary aGVsbG8="]
)
def test_a_card_that_is_no_yaml_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tiny.yaml").write_text(text)
    with refused_as("unreadable_file", DataRefusedError, path=tmp_path / "tiny.yaml"):
        data_card("tiny", tmp_path)


def test_a_public_download_cannot_be_declared_by_a_keyed_checksum(images: Document, store: Store) -> None:
    images["files"]["test_labels"] = {"urls": ["https://a.invalid/x.gz"], "keyed_sha256": "0" * 64}
    with refused_as(
        "bad_card", DataRefusedError, keys=("files.test_labels.keyed_sha256", "files.test_labels.path")
    ):
        data_card("dots", store(images))


def test_images_need_their_four_files_and_a_shape(images: Document, store: Store) -> None:
    with refused_as("bad_card", DataRefusedError, keys=("shape",)):
        data_card("dots", store({**images, "shape": None}))
    del images["files"]["test_labels"]
    with refused_as("bad_card", DataRefusedError, keys=("files", "reader.kind")):
        data_card("dots", store(images))


def test_synthetic_records_need_public_numbers_one_axis_two_classes_and_no_files(
    table: Document, store: Store
) -> None:
    reader = {"kind": "synthetic", "features_seed": 1, "hyperplane_seed": 2, "sha256": "0" * 64}
    changes = {"reader": reader, "files": {}, "split": None, "shape": [3], "records": {"train": 5, "test": 2}}
    good = table | changes
    assert data_card("tiny", store(good)).input_shape == (3,)
    wanted = ("reader.kind", "shape", "classes", "records")
    for bad, keys in (
        ({"shape": [1, 3]}, wanted),
        ({"classes": ["a", "b", "c"]}, wanted),
        ({"records": {"at_most": 9}}, wanted),
        ({"shape": None}, wanted),
        ({"split": table["split"]}, ("split", "files.test")),
        ({"files": table["files"]}, ("files", "reader.kind")),
    ):
        with refused_as("bad_card", DataRefusedError, keys=keys):
            data_card("tiny", store(good | bad))


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ({"path": "a.csv", "sha256": "1" * 64}, {"path": "a.csv", "sha256": "1" * 64}),
        ({"path": "a.csv", "sha256": "1" * 64}, {"path": "./b/../a.csv", "keyed_sha256": "2" * 64}),
        ({"path": "a.csv", "sha256": "1" * 64}, {"path": "b.csv", "sha256": "1" * 64}),
        ({"path": "a.csv", "keyed_sha256": "1" * 64}, {"path": "b.csv", "keyed_sha256": "1" * 64}),
    ],
)
def test_the_training_file_is_no_test_file(
    table: Document, store: Store, train: Document, test: Document
) -> None:
    del table["split"]
    other = {"path": "c.csv", "sha256": "3" * 64, "keyed_sha256": None}
    table["files"] = {"train": train, "test": test | other}
    assert data_card("tiny", store(table)).files
    table["files"] = {"train": train, "test": test}
    with refused_as("bad_card", DataRefusedError, keys=("files",)):
        data_card("tiny", store(table))


def test_checksums_that_are_still_to_be_filled_in_may_be_equal(table: Document, store: Store) -> None:
    del table["split"]
    table["files"] = {role: {"path": f"{role}.csv", "keyed_sha256": "0" * 64} for role in ("train", "test")}
    assert len(data_card("tiny", store(table)).files) == 2


@pytest.mark.parametrize("folder", ["weeks", "./weeks/", "data/../weeks"])
def test_a_test_file_is_no_block(table: Document, store: Store, folder: str) -> None:
    del table["split"]
    table["blocks"] = {"kind": "folder", "path": folder.replace("data/../", "")}
    table["files"] = {"test": {"path": f"{folder.rstrip('/')}-not/a.csv", "sha256": "1" * 64}}
    assert data_card("tiny", store(table)).blocks
    table["files"] = {"test": {"path": f"{folder}/a.csv", "sha256": "1" * 64}}
    with refused_as("bad_card", DataRefusedError, keys=("blocks.path", "files.test")):
        data_card("tiny", store(table))


def test_a_key_in_another_spelling_is_named_with_the_right_one(tmp_path: Path) -> None:
    text = (CARDS / "digits.yaml").read_text().replace("licence:", "license:")
    (tmp_path / "digits.yaml").write_text(text)
    with refused_as("bad_card", DataRefusedError, key="license", keys=("license",), meant="licence"):
        data_card("digits", tmp_path)
