"""Rows as the cells that they activate: where each value goes, and what no other row or encoding may change."""

import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest

from data import DataRefusedError, dataset_info
from data.cells import Categories, CellEncoding, CellSettings, Grids, usual_cells
from data.description import rule_of
from data.formats import Csv
from data.readers.encoding import features, records
from data.reading import read
from tests.data.conftest import CardOf, Document
from tests.support.cards import card, category, csv_of, label, number
from tests.support.refusals import contradicting, refused_as

COLUMNS: list[Document] = [
    number("income", 0.0, 1000.0) | {"missing": 500.0},
    category("town", "Rome", "Oslo", "Ulm"),
    category("pain", "none", "mild", "bad") | {"ordered": True},
    {"name": "seen", "kind": "timestamp", "bounds": ["2019-01-01", "2021-12-31"]},
    {"name": "job", "kind": "hashed", "cells": 16},
]
BINS: Document = {"grids": [4, 16], "trees": 8, "depth": 3, "seed": 5}


def table(cells: Document | None) -> Document:
    reader = csv_of(*COLUMNS, label("back"))
    return card(
        "clinic",
        records={"at_most": 1000},
        classes=["no", "yes"],
        reader=reader | ({} if cells is None else {"cells": cells}),
        files={"train": {"path": "datasets/raw/clinic.csv", "keyed_sha256": "0" * 64}},
        split={"salt": "clinic", "test_fraction": 0.3},
    )


def lines(count: int) -> list[str]:
    draw = np.random.default_rng(3)
    made = []
    for place in range(count):
        income = "" if place % 5 == 0 else f"{draw.lognormal(3, 2):.4f}"
        town, pain = (
            draw.choice(["Rome", "Oslo", "Ulm", "Bonn", ""]),
            draw.choice(["none", "mild", "bad", ""]),
        )
        day = draw.choice(["2018-05-05", "2020-02-29", "2021-12-31", "soon", ""])
        made.append(
            f"{income},{town},{pain},{day},{draw.choice(['baker', 'nurse', ''])},{'yes' if place % 2 else 'no'}"
        )
    return made


def records_of(document: Document, rows: list[str], path: Path, card_of: CardOf) -> dict[str, list[bytes]]:
    """The features of each record, by part."""
    path.write_text("\n".join(["income,town,pain,seen,job,back", *rows]) + "\n")
    found: dict[str, list[bytes]] = {"train": [], "test": []}
    for block in read(card_of(document), {"train": path}):
        found[block.part] += [row.tobytes() for row in block.records.features]
    return found


@pytest.mark.parametrize(
    "share", [{}, {"tree_share": 0.25}, {"constant_share": 0.1}], ids=["half", "quarter", "constant"]
)
def test_each_row_is_a_vector_of_norm_one(share: Document, tmp_path: Path, card_of: CardOf) -> None:
    facts = dataset_info(card_of(table(BINS | share))).cells
    assert facts is not None and len(facts.sizes) == len(facts.weights)
    norm = np.sqrt(np.square(np.array(facts.weights, np.float32).astype(np.float64)).sum())
    assert 1.0 - 1e-6 < norm <= 1.0  # whatever cells are active, and never above
    constant = share.get("constant_share", 0.0)
    squares = np.square(facts.weights)[: -1 if constant else None]
    of_trees = squares[-BINS["trees"] :].sum() / squares.sum()
    assert of_trees == pytest.approx(share.get("tree_share", 0.5), rel=1e-6)
    assert squares.sum() == pytest.approx(1.0 - constant, rel=1e-6)
    found = records_of(table(BINS | share), lines(200), tmp_path / "t.csv", card_of)
    codes = np.stack([np.frombuffer(row, np.float32) for part in found.values() for row in part])
    assert (codes >= 0).all() and (codes < np.array(facts.sizes)).all() and (codes == np.floor(codes)).all()


def test_a_number_lies_between_the_edges_of_its_cells() -> None:
    low, high, count = -20.0, 980.0, 16
    edges = [low + (high - low) * i / count for i in range(count + 1)]
    bent = [low + np.expm1(i / count * np.log1p(high - low)) for i in range(count + 1)]
    values = np.array([-20.0, -19.5, 0.0, 17.3, 333.0, 979.0, 980.0, np.nan])
    linear, logarithmic = Grids(high - low).codes((values - low) / (high - low), [count])
    for value, place, other in zip(values[:-1], linear, logarithmic, strict=False):
        assert (
            edges[place] <= value <= edges[place + 1]
            and bent[other] <= value + 1e-9 <= bent[other + 1] + 1e-8
        )
    assert linear[-1] == logarithmic[-1] == count  # what is missing has a cell of its own


def test_ordered_categories_are_codes_of_a_thermometer() -> None:
    own, first, second = Categories(3, is_ordered=True).codes(np.array([0.0, 1.0, 2.0, np.nan]))
    assert own.tolist() == [0, 1, 2, 3]
    assert first.tolist() == [0, 1, 1, 2] and second.tolist() == [0, 0, 1, 2]


def test_a_date_has_its_year_month_weekday_and_the_time_that_has_passed(card_of: CardOf) -> None:
    document = table(BINS | {"trees": 0, "grids": [4]})
    document["reader"]["columns"] = [COLUMNS[3], label("back")]
    days = ["2019-01-01", "2020-02-29T12:00", "2030-01-01", "", "2020-02-30"]
    rows = features(pa.table({"seen": days}), card_of(document).reader, "the table").tolist()
    # year, whether it is 2020 or later, whether 2021, month, weekday (Monday is 0), quarter of the time
    assert rows == [
        [0, 0, 0, 0, 1, 0],
        [1, 1, 0, 1, 5, 1],
        [2, 1, 1, 11, 4, 3],  # clamped to the last day of 2021
        [3, 2, 2, 12, 7, 4],
        [3, 2, 2, 12, 7, 4],  # a day that there is not
    ]


def test_no_row_changes_the_cells_of_another(tmp_path: Path, card_of: CardOf) -> None:
    rows = lines(120)
    together = records_of(table(BINS), rows, tmp_path / "t.csv", card_of)
    turned = records_of(table(BINS), rows[::-1], tmp_path / "t.csv", card_of)
    assert sorted(together["train"]) == sorted(turned["train"]) and sorted(together["test"]) == sorted(
        turned["test"]
    )
    fewer = records_of(table(BINS), rows[:60], tmp_path / "t.csv", card_of)
    assert fewer["train"] == together["train"][: len(fewer["train"])]


def test_an_encoding_moves_no_record_to_the_other_side(tmp_path: Path, card_of: CardOf) -> None:
    plain, encoded = table(None), table(BINS)
    assert rule_of(card_of(plain)) == rule_of(card_of(encoded))
    rows = lines(150)
    sides = [
        {part: len(found) for part, found in records_of(document, rows, tmp_path / "t.csv", card_of).items()}
        for document in (plain, encoded, table(BINS | {"seed": 6}))
    ]
    assert sides[0] == sides[1] == sides[2] and min(sides[0].values()) > 20


def test_a_card_without_an_encoding_is_written_as_before(card_of: CardOf) -> None:
    document = table(None)
    document["reader"]["columns"] = [*COLUMNS[:2], label("back")]
    text = card_of(document).model_dump_json()
    assert "cells" not in text and "ordered" not in text
    assert "cells" not in dataset_info(card_of(document)).to_json()
    text = card_of(table(BINS)).model_dump_json()
    assert "tree_share" not in text and "constant_share" not in text


def test_settings_follow_from_public_numbers() -> None:
    """Numbers need no cell for all rows, as their centre is released; fine grids cost norm where records are few."""
    few, many, several = (
        usual_cells("classes", classes=classes, records=records)
        for classes, records in ((2, 2000), (2, 2001), (5, 10_000))
    )
    assert (few.constant_share, many.constant_share, several.constant_share) == (0.1, 0.02, 0.02)
    assert few.grids == many.grids == (4, 16, 64) and several.grids == (8, 32, 128, 512)
    assert usual_cells("classes", classes=5, records=9999).grids == (4, 16, 64)
    trees = [usual_cells("classes", classes=2, records=records).trees for records in (19_999, 20_000)]
    assert trees == [64, 128]
    assert usual_cells("number", classes=0, records=500) == CellSettings()
    assert usual_cells("number", classes=0, records=39_999) == CellSettings()
    assert usual_cells("number", classes=0, records=40_000) == CellSettings(grids=(4, 16, 64, 1024))
    assert usual_cells("count", classes=0, records=10**6) == CellSettings()
    assert usual_cells("quantile", classes=0, records=10**6) == CellSettings()
    assert usual_cells("labels", classes=0, records=500).constant_share == 0.1


def test_trees_are_the_same_for_ever() -> None:
    """Their thresholds are in no card, only their seed, so that a model's trees must come back in each version."""
    columns = ((Grids(10.0),), (Categories(3),), (Categories(4, is_ordered=True),))
    (splits,) = CellEncoding(CellSettings(trees=1, depth=4), columns).trees
    found = [(split.part, split.scale, round(split.threshold, 6), sorted(split.passing)) for split in splits]
    assert found == [(2, 0, 0.0, [3]), (0, 1, 0.161565, []), (0, 1, 0.831877, []), (1, 0, 0.0, [0, 2])]


@pytest.mark.parametrize(
    ("column", "key"),
    [
        ({"name": "income", "kind": "numeric", "bounds": [5.0, 5.0]}, "bounds"),
        ({"name": "seen", "kind": "timestamp", "bounds": ["2020-01-01", "2020-01-01"]}, "bounds"),
        ({"name": "seen", "kind": "timestamp", "bounds": ["2020-02-30", "2021-01-01"]}, "bounds"),
        (label("income"), "columns"),
    ],
)
def test_bounds_without_values_and_a_column_that_is_the_label_are_refused(
    column: Document, key: str, card_of: CardOf
) -> None:
    document = table(BINS)
    document["reader"]["columns"] = [COLUMNS[0], *COLUMNS[2:3], column, label("back")]
    if column["name"] == "income" and "bounds" in column:
        document["reader"]["columns"] = [column, label("back")]
    with contradicting(key):
        card_of(document)


def test_a_missing_date_is_refused_where_the_card_says_so(tmp_path: Path, card_of: CardOf) -> None:
    document = table(BINS)
    document["reader"]["columns"][3] = COLUMNS[3] | {"missing": "refuse"}
    with refused_as("bad_value", DataRefusedError, column="seen", expected="a date") as refusal:
        records_of(document, lines(40), tmp_path / "t.csv", card_of)
    assert "soon" not in str(refusal.value)


def test_numbers_are_parsed_once_for_cells_and_for_the_side_of_a_record(
    card_of: CardOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, cast = list[pa.DataType](), pa.compute.cast

    def counting(values: pa.ChunkedArray, kind: pa.DataType, **options: object) -> pa.ChunkedArray:
        if pa.types.is_floating(kind) and pa.types.is_string(values.type):
            parsed.append(kind)
        return cast(values, kind, **options)

    monkeypatch.setattr("data.readers.encoding.pc.cast", counting)
    card, row = card_of(table(BINS)), ("12.5", "Rome", "mild", "2020-01-01", "nurse", "yes")
    names = [str(column["name"]) for column in COLUMNS] + ["back"]
    rows = pa.table({name: [value, value] for name, value in zip(names, row, strict=True)})
    assert isinstance(card.reader, Csv)
    made = records(rows, card.reader, card.label_type, "t.csv", has_split=True)
    assert len(parsed) == 1 and made.values is not None and made.values[0, 0] == 0.0125


def test_a_month_that_is_a_number_too_stays_as_it_is_written_in_a_date(card_of: CardOf) -> None:
    document = table(BINS)
    months = [f"{month:02}" for month in range(1, 13)]
    dates = {"name": "date", "kind": "date", "month": "month", "day": "day", "months": months}
    document["reader"]["columns"] = [
        number("month", 1.0, 12.0),
        number("day", 1.0, 31.0),
        dates,
        label("back"),
    ]
    card, rows = card_of(document), pa.table({"month": ["03"], "day": ["05"], "back": ["no"]})
    assert isinstance(card.reader, Csv)
    made = records(rows, card.reader, card.label_type, "t.csv", has_split=True)
    assert made.values is not None
    assert made.values[0].tolist() == pytest.approx([2 / 11, 4 / 30, 2.0, (31 * 3 + 5 - 32) / (403 - 32)])


def test_encoding_takes_little_more_memory_than_the_cells_themselves() -> None:
    encoding = CellEncoding(CellSettings(trees=128), ((Grids(1.0),), (Categories(3),)))
    values = [np.linspace(0.0, 1.0, 20_000), np.arange(20_000) % 3.0]
    encoding.codes([column[:1] for column in values])  # what is computed once
    tracemalloc.start()
    cells = encoding.codes(values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * cells.nbytes
