"""Columns that become bins, dates and logarithms: where each value goes, and what is refused without a value."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from data import DataRefusedError
from tests.data.conftest import CardOf, Document, train_records
from tests.support.refusals import refused_as

Encode = Callable[..., NDArray[np.float32]]
SECRET = "31337"


@pytest.fixture
def encode(table: Document, card_of: CardOf, tmp_path: Path) -> Encode:
    """The features of lines without header, of a table with the given columns and, as its last, the label."""

    def read(columns: list[Document], *lines: str, missing: tuple[str, ...] = ("?",)) -> NDArray[np.float32]:
        label = {"name": "answer", "kind": "label"}
        table["reader"] |= {"header": False, "missing": list(missing), "columns": [*columns, label]}
        path = tmp_path / "tiny.csv"
        path.write_text("".join(f"{line},no\n" for line in lines))
        card = card_of(table)
        features = train_records(card, path).features
        assert features.shape == (len(lines), *card.input_shape)
        return features

    return read


BINS = {"name": "age", "kind": "binned", "edges": [26, 33.5]}


def test_an_edge_is_the_least_number_of_the_bin_above(encode: Encode) -> None:
    features = encode([BINS], "25.999", "26", "33.499", "33.5", "-1e300", "1e300")
    assert features.argmax(axis=1).tolist() == [0, 1, 1, 2, 0, 2]
    assert (features.sum(axis=1) == 1).all()


def test_a_missing_number_has_no_bin_only_where_the_card_says_so(encode: Encode) -> None:
    assert encode([BINS | {"missing": "zeros"}], "?", "30").tolist() == [[0, 0, 0], [0, 1, 0]]
    with refused_as("missing_value", DataRefusedError, column="age"):
        encode([BINS], "30", "?")


def test_a_bin_takes_numbers_only_and_infinite_ones_are_in_the_outer_bins(encode: Encode) -> None:
    bins = BINS | {"missing": "zeros"}
    assert encode([bins], "inf", "-inf", "nan").tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0]]
    with refused_as("bad_value", DataRefusedError, column="age") as refusal:
        encode([bins], "30", f"x{SECRET}")
    assert SECRET not in str(refusal.value)


def test_unknown_and_missing_categories_are_zeros_where_the_card_says_so(encode: Encode) -> None:
    town = {"name": "town", "kind": "categorical", "categories": ["Rome", "Oslo"], "unknown": "zeros"}
    assert encode([town], "Oslo", "Bergen", "?", "Rome").tolist() == [[0, 1], [0, 0], [0, 0], [1, 0]]


def test_a_logarithm_goes_from_0_to_1_between_the_bounds(encode: Encode) -> None:
    column = {"name": "bytes", "kind": "numeric", "bounds": [-1, 998], "scale": "log"}
    features = encode([column], "-1", "998", "8", "-5", "1e9", "98")[:, 0]
    assert features.tolist() == pytest.approx([0, 1, np.log(10) / np.log(1000), 0, 1, 2 / 3], abs=1e-7)


DATE = [
    {"name": "day", "kind": "ignored"},
    {"name": "month", "kind": "ignored"},
    {"name": "date", "kind": "date", "month": "month", "day": "day"},
]


def test_a_date_is_made_of_two_columns(encode: Encode) -> None:
    features = encode(DATE, "1,jan", "31,dec", "5, may", "1,feb", "31,jan")[:, 0]
    assert features.tolist() == pytest.approx([0, 1, 128 / 371, 31 / 371, 30 / 371])
    own = [*DATE[:2], DATE[2] | {"months": [str(month) for month in range(1, 13)]}]
    assert encode(own, "5,5").tolist() == [[pytest.approx(128 / 371)]]


@pytest.mark.parametrize(
    ("code", "column", "bad"),
    [
        *(
            ("bad_value", "date", bad)
            for bad in ("0,jan", "32,jan", "1.5,jan", "inf,jan", "1,JAN", "1,?", f"1,{SECRET}")
        ),
        *(("missing_value", "day", bad) for bad in ("?,jan", "nan,jan")),
        ("bad_value", "day", f"x{SECRET},jan"),
    ],
)
def test_what_is_no_date_is_refused(encode: Encode, code: str, column: str, bad: str) -> None:
    with refused_as(code, DataRefusedError, column=column) as refusal:
        encode(DATE, "5,may", bad)
    assert SECRET not in str(refusal.value)


def test_columns_keep_their_places_beside_each_other(encode: Encode) -> None:
    columns = [BINS, *DATE, {"name": "height", "kind": "numeric", "bounds": [0, 2]}]
    assert encode(columns, "30,1,jan,1").tolist() == [[0, 1, 0, 0, 0.5]]
