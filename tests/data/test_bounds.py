"""The norms that a card promises of a record's features: no record goes beyond them, and some reach them."""

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import dataset_info
from data.card import data_card
from tests.data.conftest import CardOf, Document, train_records

NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["?", "0", "1", "-1", "1e308", "-1e308", "5e-324"]),
)
TEXTS = st.sampled_from(["a", "b", "c", "other", "?", ""])


@st.composite
def columns(draw: st.DrawFn) -> Document:
    """A column that becomes features, but for its name; numbers may be missing."""
    low = draw(st.floats(-1e6, 1e6))
    high = low + draw(st.floats(1e-3, 1e9))
    scale = draw(st.sampled_from(["linear", "log"]))
    edges = sorted(draw(st.sets(st.floats(-100, 100), min_size=1, max_size=4)))
    unknown = draw(st.sampled_from(["other", "zeros"]))
    missing = draw(st.sampled_from([low, high]))
    choices: list[Document] = [
        {"kind": "numeric", "bounds": [low, high], "scale": scale, "missing": missing},
        {"kind": "binned", "edges": edges, "missing": "zeros"},
        {"kind": "categorical", "categories": ["a", "b"], "unknown": unknown},
    ]
    return draw(st.sampled_from(choices))


@given(drawn=st.lists(columns(), min_size=1, max_size=5), data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_record_of_any_table_goes_beyond(
    drawn: list[Document],
    data: st.DataObject,
    table: Document,
    card_of: CardOf,
    tmp_path: Path,
) -> None:
    label = {"name": "answer", "kind": "label"}
    named = [column | {"name": f"c{place}"} for place, column in enumerate(drawn)]
    reader = {"kind": "csv", "header": False, "missing": ["?"], "columns": [*named, label]}
    card = card_of(table | {"reader": reader})
    kinds = [TEXTS if column["kind"] == "categorical" else NUMBERS for column in drawn]
    rows = data.draw(st.lists(st.tuples(*kinds), min_size=1, max_size=8))
    with (tmp_path / "t.csv").open("w") as file:
        csv.writer(file, lineterminator="\n").writerows([*row, "no"] for row in rows)
    features = train_records(card, tmp_path / "t.csv").features
    l1, l2 = dataset_info(card).feature_norms or (0, 0)
    wide = features.astype(np.float64)
    assert wide.min() >= 0 and wide.sum(axis=1).max() <= l1
    assert (wide**2).sum(axis=1).max() <= len(drawn) and l2 == len(drawn) ** 0.5


def test_a_record_can_reach_the_norms(table: Document, card_of: CardOf, tmp_path: Path) -> None:
    card = card_of(table)
    (tmp_path / "t.csv").write_text("age,town,answer\n1000,Oslo,no\n")
    features = train_records(card, tmp_path / "t.csv").features
    norms = (float(np.abs(features).sum()), float(np.linalg.norm(features.astype(np.float64))))
    assert dataset_info(card).feature_norms == norms == (2, 2**0.5)


@pytest.mark.parametrize(
    ("name", "ones"),
    [
        ("digits", 64),
        ("mnist", 784),
        ("synthetic-logistic", 20),
        ("adult", 14),
        ("adult-a9a", 14),
        ("bank-marketing", 15),
        ("bank-encoded", 32),
        ("kddcup99", 40),
        ("kddcup99-10-percent", 40),
    ],
)
def test_the_norms_of_the_catalogue(name: str, ones: int) -> None:
    assert dataset_info(data_card(name)).feature_norms == (ones, ones**0.5)
