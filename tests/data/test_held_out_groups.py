"""The groups of private held-out records are read off their features, with and without cells."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from ruamel.yaml import YAML

from data import dataset_info
from data.card import data_card
from data.formats import Table
from data.prepared import HeldOut, contents, load, load_held_out, write
from data.readers.encoding import features
from data.reading import read
from tests.support.cards import card, category, csv_of, label, number

SEX = ["m", "f", "f", "x", "m"]
REGION = ["north", "south", "elsewhere", "west", "south"]
COLUMNS = (
    number("age", 0, 100),
    category("sex", "f", "m"),
    category("region", "north", "south", "west"),
    label("y"),
)


@pytest.mark.parametrize("cells", [False, True])
@pytest.mark.parametrize("unknown", ["other", "zeros"])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_row_is_in_the_group_that_its_column_names(
    cells: bool, unknown: str, ordered: bool, tmp_path: Path
) -> None:
    columns = [COLUMNS[0], COLUMNS[1] | {"unknown": unknown, "ordered": ordered}, *COLUMNS[2:]]
    reader: dict[str, Any] = csv_of(*columns) | ({"cells": {"trees": 2}} if cells else {})
    document = card(
        "clinic",
        holdout="private",
        records={"at_most": 400},
        classes=["no", "yes"],
        split={"salt": "m", "test_fraction": 0.5},
        files={"train": {"path": "t.csv", "keyed_sha256": "0" * 64}},
        reader=reader,
    )
    YAML(typ="safe", pure=True).dump(document, tmp_path / "clinic.yaml")
    declared = data_card("clinic", tmp_path)
    assert isinstance(declared.reader, Table)
    rows = pa.table({"age": [1.0, 2, 3, 4, 5], "sex": SEX, "region": REGION, "y": ["no"] * 5})
    info = dataset_info(declared)
    held_out = HeldOut(info, features(rows, declared.reader, "t.csv"), np.zeros(5, np.int64))
    found = held_out.group_indices(["region", "sex"], slice(0, 5))
    expected = [[0, 1], [1, 0], [-1, 0], [2, -1], [1, 1]]  # x is no declared sex, elsewhere no region
    assert found.tolist() == expected
    assert held_out.group_indices([], slice(1, 3)).shape == (2, 0)
    assert [(group.name, group.values) for group in info.groups] == [
        ("sex", ("f", "m")),
        ("region", ("north", "south", "west")),
    ]


UNSEEN = {"name": "region", "kind": "ignored", "categories": ["north", "south", "west"]}


def prepare_unseen(folder: Path, regions: list[str], **keys: Any) -> Path:
    """Prepare 300 rows whose region no feature is made of; each age says which region its row has."""
    lines = [f"{at % 100}.{at:03},{regions[at % len(regions)]},no" for at in range(300)]
    (folder / "t.csv").write_text("\n".join(["age,region,y", *lines]) + "\n")
    document = card(
        "clinic",
        holdout="private",
        records={"at_most": 400},
        classes=["no", "yes"],
        split={"salt": "m", "test_fraction": 0.5},
        files={"train": {"path": "t.csv", "keyed_sha256": "0" * 64}},
        reader=csv_of(number("age", 0, 100), UNSEEN, label("y")),
    )
    YAML(typ="safe", pure=True).dump(document | keys, folder / "clinic.yaml")
    declared = data_card("clinic", folder)
    info, key = dataset_info(declared), b"k" * 32
    blocks = read(declared, {"train": folder / "t.csv"}, key=key)
    write(folder / "prepared", blocks, info, salt=key, at_most=400)
    return folder / "prepared"


def test_a_column_that_no_feature_is_made_of_can_divide_those_held_out(tmp_path: Path) -> None:
    prepared = prepare_unseen(tmp_path, REGION)
    data = load_held_out(prepared)
    assert data.info.input_shape == (1,)
    ages = np.asarray(data.test_features)[:, 0].astype(np.float64) * 100
    rows = np.rint((ages * 1000) % 1000).astype(int) % len(REGION)
    codes = np.array([0, 1, -1, 2, 1])  # of REGION, where elsewhere is none
    assert 100 < len(ages) < 200
    assert data.group_indices(["region"], slice(0, None))[:, 0].tolist() == codes[rows].tolist()
    assert load(prepared).group_indices(["region"], slice(3, 9)).shape == (6, 1)


def test_other_groups_of_the_same_rows_are_other_contents(tmp_path: Path) -> None:
    """Or noise would be drawn again for them, and the difference would tell who moved."""
    found = set()
    for name, regions in {"a": ["north", "south"], "b": ["north", "west"], "c": ["north", "south"]}.items():
        (tmp_path / name).mkdir()
        found.add(contents(prepare_unseen(tmp_path / name, regions)))
    assert len(found) == 2


def test_the_size_of_the_folder_does_not_say_how_many_are_held_out(tmp_path: Path) -> None:
    sizes = set()
    for name, fraction in {"few": 0.2, "many": 0.7}.items():
        (tmp_path / name).mkdir()
        folder = prepare_unseen(tmp_path / name, REGION, split={"salt": "m", "test_fraction": fraction})
        sizes.add(sum(file.stat().st_size for file in folder.iterdir()))
    assert len(sizes) == 1
