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
from data.prepared import HeldOut
from data.readers.encoding import features
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
    public = dataset_info(declared)
    held_out = HeldOut(public, features(rows, declared.reader, "t.csv"), np.zeros(5, np.int64))
    found = held_out.group_indices(["region", "sex"], slice(0, 5))
    expected = [[0, 1], [1, 0], [-1, 0], [2, -1], [1, 1]]  # x is no declared sex, elsewhere no region
    assert found.tolist() == expected
    assert held_out.group_indices([], slice(1, 3)).shape == (2, 0)
    assert [(group.name, group.values) for group in public.groups] == [
        ("sex", ("f", "m")),
        ("region", ("north", "south", "west")),
    ]
