"""CSV and Parquet by a card: each record by itself, nothing learned from the rows, no value in a message."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from pyarrow import parquet
from pydantic import ValidationError

from data import DataRefusedError
from data.description import rule_of
from data.formats import Parquet
from data.new_records import records_in
from data.preparation import Preparation
from data.readers import encoding
from data.readers import rows as rows_module
from data.readers.records import RecordBatch
from data.readers.rows import tables as read_tables
from data.targets import Classes
from tests.data.conftest import CardOf, Document, train_records
from tests.support.refusals import refused_as

Encode = Callable[..., RecordBatch]
SECRET = "31337"


@pytest.fixture
def encode(table: Document, card_of: CardOf, tmp_path: Path) -> Encode:
    """Reads one file of the table's card; `reader` changes keys of its reader, `column` those of column 0."""

    def read(content: str | bytes | pa.Table, column: Document | None = None, **reader: Any) -> RecordBatch:
        table["reader"] |= reader | ({"kind": "parquet"} if isinstance(content, pa.Table) else {})
        table["reader"]["columns"][0] |= column or {}
        path = tmp_path / "tiny"
        if isinstance(content, pa.Table):
            parquet.write_table(content, path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return train_records(card_of(table), path)

    return read


def rows(*lines: str) -> str:
    """CSV text with the header of the table's card."""
    return "\n".join(["age,town,answer", *lines]) + "\n"


def test_a_record_becomes_scaled_numbers_and_one_hot_categories(encode: Encode) -> None:
    records = encode(rows("25,Oslo,no", "50,Rome,yes"))
    assert records.features.dtype == np.float32 and records.labels.dtype == np.int64
    assert records.features.tolist() == [[0.25, 0, 1, 0], [0.5, 1, 0, 0]]
    assert records.labels.tolist() == [0, 1]


def test_numbers_outside_the_bounds_are_clamped(encode: Encode) -> None:
    ages = encode(rows("-5,Oslo,no", "1e9,Oslo,no", "100,Oslo,no")).features[:, 0]
    assert ages.tolist() == [0, 1, 1]


def test_unknown_and_missing_categories_go_to_other(encode: Encode) -> None:
    towns = encode(rows("1,Paris,no", "1,,no", "1,?,no", "1,rome,no"), missing=["?", ""]).features[:, 1:]
    assert towns.tolist() == [[0, 0, 1]] * 4


def test_true_and_false_are_read_as_pandas_and_r_write_them(encode: Encode, table: Document) -> None:
    table["reader"]["columns"][1]["categories"] = ["false", "true"]
    assert encode(rows("1,True,no", "1,FALSE,no", "1,true,no")).features[:, 2].tolist() == [1, 0, 1]
    table["reader"]["columns"][1]["categories"] = ["False", "True"]
    parquet = pa.table({"age": [1, 1], "town": [True, False], "answer": ["no", "no"]})
    assert encode(parquet).features[:, 2].tolist() == [1, 0]


def test_whole_numbers_are_read_as_pandas_writes_them_beside_missing_ones(
    encode: Encode, table: Document
) -> None:
    table["reader"]["columns"][1]["categories"] = ["1", "-2"]
    table["reader"]["columns"][2]["spellings"] = {"no": ["0"], "yes": ["1"]}
    found = encode(rows("1,1.0,0.0", "1,-2.00,1.0", "1,1.5,1", "1,,0"))
    assert found.features[:, 1:].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]
    assert found.labels.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("spelled", ["12.0", " 12.00", "1.2e+01"])
def test_a_hashed_number_is_in_one_cell_whether_or_not_another_row_misses_it(
    encode: Encode, table: Document, spelled: str
) -> None:
    """pandas writes 12.0 for 12 in all rows of a column if a single one has no value."""
    table["reader"]["columns"][1] = {"name": "town", "kind": "hashed", "cells": 4096}
    alone, beside = encode(rows("1,12,no")), encode(rows(f"1,{spelled},no", "1,,no"))
    assert beside.features[0].tolist() == alone.features[0].tolist()
    assert encode(rows("1,12.5,no")).features[0].tolist() != alone.features[0].tolist()


def test_a_missing_number_is_refused_unless_the_card_gives_it_a_value(encode: Encode) -> None:
    content = rows("?,Oslo,no", ",Oslo,no", "50,Oslo,no")
    with refused_as("missing_value", DataRefusedError, column="age"):
        encode(content, missing=["?", ""])
    assert encode(content, column={"missing": 20}).features[:, 0].tolist() == pytest.approx([0.2, 0.2, 0.5])


def test_infinite_numbers_are_clamped_and_nan_is_missing(encode: Encode) -> None:
    content = rows(*(f"{written},Oslo,no" for written in ("nan", "NaN", "inf", "-inf", "1e999", "50")))
    with refused_as("missing_value", DataRefusedError, column="age"):
        encode(content)
    ages = encode(content, column={"missing": 20}).features[:, 0].tolist()
    assert ages == pytest.approx([0.2, 0.2, 1.0, 0.0, 1.0, 0.5])


BAD_ROWS = {
    "no number": rows("1,Oslo,no", f"x{SECRET},Oslo,no"),
    "label": rows("1,Oslo,no", f"1,Oslo,{SECRET}"),
    "missing label": rows("1,Oslo,no", f"{SECRET},Oslo,"),
    "field too many": rows("1,Oslo,no", f"1,Oslo,no,{SECRET}"),
    "field too few": rows("1,Oslo,no", SECRET),
    "no UTF-8": b"age,town,answer\n1,\xff31337,no\n",
    "column missing": f"age,answer\n{SECRET},no\n",
    "column twice": f"age,town,answer,age\n{SECRET},Oslo,no,{SECRET}\n",
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_refusal_names_the_file_and_no_value(encode: Encode, bad: str) -> None:
    with pytest.raises(DataRefusedError) as refusal:
        encode(BAD_ROWS[bad])
    shown: BaseException | None = refusal.value
    assert "/tiny" in str(shown) and SECRET not in str(shown)
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


def test_the_form_of_adult_is_read(encode: Encode, table: Document) -> None:
    table["reader"]["columns"][2]["spellings"] = {"no": ["<=50K", "<=50K."], "yes": [">50K", ">50K."]}
    content = "|1x3 Cross validator\n25, Oslo, <=50K.\n50, Rome, >50K\n\n"
    records = encode(content, header=False, skip_lines={"train": 1})
    assert records.features.tolist() == [[0.25, 0, 1, 0], [0.5, 1, 0, 0]]
    assert records.labels.tolist() == [0, 1]


def test_quotes_separators_and_undeclared_columns(encode: Encode, table: Document) -> None:
    table["reader"]["columns"][1]["categories"] = ["Rome; Italy"]
    content = 'name;answer;town;age\n"A ""B""";"yes";"Rome; Italy";10\n'
    records = encode(content, separator=";", quotes=True)
    assert records.features.tolist() == [[pytest.approx(0.1), 1, 0]] and records.labels.tolist() == [1]


def test_decimal_commas_and_other_encodings_that_are_not_declared_are_refused(encode: Encode) -> None:
    with refused_as("bad_value", DataRefusedError, column="age", expected="a number"):
        encode('age;town;answer\n"1,5";Oslo;no\n', separator=";")
    with refused_as("unreadable_file", DataRefusedError, separator=",", encoding="UTF-8"):
        encode("age,town,answer\n1,Lübeck,no\n".encode("latin-1"), separator=",")


def test_a_table_as_european_spreadsheets_write_it(encode: Encode, table: Document) -> None:
    """An empty line, spaces, an exponent and a number that is whole; names and categories beyond ASCII."""
    table["reader"]["columns"][0]["name"] = "größe"
    table["reader"]["columns"][1]["categories"] = ["Lübeck", "Köln, Rhein"]
    lines = ["größe;town;answer", "12,5;Lübeck;no", "", ' 1,5e1 ;"Köln, Rhein";yes', "-3;Oslo;no", ",5;;no"]
    found = encode("\r\n".join(lines).encode("latin-1"), separator=";", decimal=",", encoding="latin-1")
    assert found.features[:, 0].tolist() == pytest.approx([0.125, 0.15, 0.0, 0.005])
    assert found.features[:, 1:].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]
    assert found.labels.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("name", ["windows-1252", "windows-1251", "iso-8859-15", "utf-8-sig"])
@pytest.mark.parametrize("header", [True, False])
def test_categories_are_those_that_python_decodes(
    encode: Encode, table: Document, name: str, header: bool
) -> None:
    town = {"windows-1251": "Київ"}.get(name, "5 €")
    table["reader"]["columns"][1]["categories"] = [town]
    content = (rows if header else lambda line: line)(f"1,{town},no")
    found = encode(content.encode(name), header=header, encoding=name)
    assert found.features[:, 1:].tolist() == [[1, 0]]


def test_a_byte_that_an_encoding_lacks_makes_its_own_value_another(encode: Encode) -> None:
    content = b"age,town,answer\n1,Rome\x81,no\n2,Rome,no\n"
    assert encode(content, encoding="windows-1252").features[:, 1:].tolist() == [[0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize("number", ["1.234,5", "1.5", " -0.5"])
def test_a_point_beside_decimal_commas_is_refused(encode: Encode, number: str) -> None:
    with refused_as("unlike_card", DataRefusedError, column="age", key="reader.decimal"):
        encode(f"age;town;answer\n{number};Oslo;no\n", separator=";", decimal=",")


@pytest.mark.parametrize("name", ["utf-16", "shift_jis", "gbk", "utf-7", "rot13", "none such"])
def test_an_encoding_in_which_a_separator_may_be_part_of_a_character_is_refused(
    encode: Encode, name: str
) -> None:
    with pytest.raises(ValidationError) as refusal:
        encode(rows("1,Oslo,no"), encoding=name)
    assert [error["loc"][-1] for error in refusal.value.errors()] == ["encoding"]


def test_holdout_rule_includes_an_unusual_spelling_of_texts(table: Document, card_of: CardOf) -> None:
    """Another encoding moves records that it reads in another way; cards without one keep their rule."""
    table["split"] = {"salt": "s", "test_fraction": 0.2}
    plain = rule_of(card_of(table))
    for own in ({"encoding": "latin-1"}, {"decimal": ","}):
        changed = table | {"reader": table["reader"] | own}
        assert rule_of(card_of(changed)) != plain
    usual = table | {"reader": table["reader"] | {"encoding": "UTF8", "decimal": "."}}
    assert rule_of(card_of(usual)) == plain
    assert Preparation.from_card(card_of(usual), "none", None) == Preparation.from_card(
        card_of(table), "none", None
    )


def test_names_of_columns_are_trimmed_as_values_are(encode: Encode) -> None:
    assert encode("age, town ,answer\n25, Oslo, no\n").features.tolist() == [[0.25, 0, 1, 0]]


def test_another_separator_an_archive_and_a_folder_are_named_as_such(encode: Encode, tmp_path: Path) -> None:
    with refused_as("unlike_card", DataRefusedError, separator=";", declared=",", key="reader.separator"):
        encode("age;town;answer\n1;Oslo;no\n")
    with refused_as("missing_column", DataRefusedError, column="town"):
        encode("age\n1\n")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("tiny.csv", rows("1,Oslo,no"))
    with refused_as("unlike_card", DataRefusedError, key="reader.member"):
        encode(packed.getvalue())
    with refused_as("unreadable_file", DataRefusedError):
        read_tables(
            "train", tmp_path, Parquet.model_construct(kind="parquet"), Classes(classes=("no", "yes"))
        )


def test_the_archive_of_training_is_predicted_on_as_its_text_is(
    table: Document, card_of: CardOf, tmp_path: Path
) -> None:
    table["reader"]["member"] = "tiny.csv"
    (tmp_path / "new.csv").write_text(rows("25,Oslo,no"))
    with zipfile.ZipFile(tmp_path / "new.zip", "w") as archive:
        archive.write(tmp_path / "new.csv", "tiny.csv")
    for name in ("new.csv", "new.zip"):
        (found,) = records_in(tmp_path / name, Preparation.from_card(card_of(table), "none", None), (4,))
        assert found.features.tolist() == [[0.25, 0, 1, 0]]


def test_records_to_predict_on_are_read_by_the_separator_of_their_header(
    table: Document, card_of: CardOf, tmp_path: Path
) -> None:
    preparation = Preparation.from_card(card_of(table), "none", None)
    for separator in ";\t|":
        (tmp_path / "new.csv").write_text("town,age\nOslo,25\n".replace(",", separator))
        (found,) = records_in(tmp_path / "new.csv", preparation, (4,))
        assert found.features.tolist() == [[0.25, 0, 1, 0]]
    (tmp_path / "new.jsonl").write_text('{"town": "Oslo", "age": 25}\n')
    with refused_as("unreadable_file", DataRefusedError):
        list(records_in(tmp_path / "new.jsonl", preparation, (4,)))


def test_a_comma_in_quotes_as_pandas_writes_it_is_read(encode: Encode, table: Document) -> None:
    table["reader"]["columns"][1]["categories"] = ["Rome, Italy"]
    frame = pd.DataFrame({"age": [10], "town": ["Rome, Italy"], "answer": ["yes"]})
    assert encode(frame.to_csv(index=False)).features.tolist() == [[pytest.approx(0.1), 1, 0]]


def test_an_ignored_column_of_a_file_without_header_makes_nothing(encode: Encode, table: Document) -> None:
    table["reader"]["columns"].insert(0, {"name": "id", "kind": "ignored"})
    columns = table["reader"]["columns"]
    assert encode("7,25,Oslo,no\n", header=False, columns=columns).features.tolist() == [[0.25, 0, 1, 0]]


@pytest.mark.parametrize("content", ["", "\n", rows()])
def test_a_file_without_records_has_none(encode: Encode, content: str) -> None:
    assert len(encode(content)) == 0


PARQUET = pa.table({"age": [25, 50], "town": ["Oslo", "Paris"], "answer": ["no", "yes"], "more": [1.5, 2.5]})


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.float32(), pa.string(), pa.large_string(), pa.decimal128(12, 2)]
)
def test_parquet_says_the_same_by_any_type(encode: Encode, kind: pa.DataType) -> None:
    content = PARQUET.set_column(0, "age", PARQUET["age"].cast(pa.int32()).cast(kind, safe=False))
    content = content.set_column(1, "town", PARQUET["town"].dictionary_encode())
    records = encode(content)
    assert records.features.tolist() == [[0.25, 0, 1, 0], [0.5, 0, 0, 1]]
    assert records.labels.tolist() == [0, 1]


def test_parquet_with_nulls_and_nan(encode: Encode) -> None:
    def ages(*values: float | None) -> pa.Table:
        columns = {"age": values, "town": [None] * len(values), "answer": ["no"] * len(values)}
        return pa.table({name: pa.array(column) for name, column in columns.items()})

    with refused_as("missing_value", DataRefusedError):
        encode(ages(1.0, None))
    assert encode(ages(None, 50.0), column={"missing": 0}).features.tolist() == [[0, 0, 0, 1], [0.5, 0, 0, 1]]
    nan = ages(1.0, float("nan"))
    with refused_as("missing_value", DataRefusedError, column="age"):
        encode(nan, column={"missing": "refuse"})
    assert encode(nan, column={"missing": 50}).features[:, 0].tolist() == pytest.approx([0.01, 0.5])


def test_a_row_without_the_number_to_predict_is_to_be_left_out(encode: Encode, table: Document) -> None:
    """No card can declare what stands for it, unlike for a feature."""
    del table["classes"]
    table["target"] = {"bounds": [0.0, 10.0]}
    with refused_as("missing_value", DataRefusedError, column="answer") as refusal:
        encode(rows("25,Oslo,5", "50,Rome,"))
    assert str(refusal.value.fields["remedy"]).startswith("leave out the rows")
    with refused_as("missing_value", DataRefusedError, column="age") as refusal:
        encode(rows("25,Oslo,5", ",Rome,6"))
    assert "`missing`" in str(refusal.value.fields["remedy"])


def test_parquet_that_is_not_whole_is_refused(encode: Encode, tmp_path: Path) -> None:
    encode(PARQUET)
    whole = (tmp_path / "tiny").read_bytes()
    with refused_as("unreadable_file", DataRefusedError):
        encode(whole[:-20], kind="parquet")
    with refused_as("missing_column", DataRefusedError, column="town"):
        encode(PARQUET.drop_columns(["town"]))


def test_parquet_whose_column_names_are_no_text_is_refused(encode: Encode, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"age": [1.0]}), tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    with refused_as("unreadable_file", DataRefusedError):
        encode(whole.replace(b"age", b"a\xf7e"), kind="parquet")


@pytest.mark.parametrize("values", [[[1], [2]], [b"\xff secret", b"\xfe"]], ids=["lists", "bytes"])
@pytest.mark.parametrize("column", ["age", "town", "answer"])
def test_parquet_with_a_column_of_what_is_no_text_is_refused(
    encode: Encode, column: str, values: list[Any]
) -> None:
    with refused_as("bad_value", DataRefusedError, column=column) as refusal:
        encode(PARQUET.set_column(PARQUET.column_names.index(column), column, pa.array(values)))
    assert "secret" not in str(refusal.value)


def test_a_record_is_encoded_alike_whatever_stands_beside_it(encode: Encode) -> None:
    lines = ["17,Oslo,no", "99.5,Rome,yes", "250,Bergen,no", "3e1,,yes"]
    together: NDArray[np.float32] = encode(rows(*lines)).features
    alone = [encode(rows(line)).features[0] for line in lines]
    assert together.tobytes() == np.stack(alone).tobytes()


class _Names:
    """A table without rows that counts how often Arrow would make its list of names."""

    lists = 0

    @property
    def column_names(self) -> list[str]:
        self.lists += 1
        return [f"c{number}" for number in range(500)]


def test_the_names_of_many_columns_are_listed_once_for_all() -> None:
    table = _Names()
    encoding.check_columns(table, table.column_names, "made up")
    assert table.lists == 2  # one of them here


@pytest.mark.parametrize("column", ["note", "town"])
def test_a_field_longer_than_a_portion_stops_no_table(
    table: Document, card_of: CardOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    """In a column that is ignored or not; every record before and after it is read once."""
    monkeypatch.setattr(rows_module, "BLOCK_BYTES", 256)
    monkeypatch.setattr(rows_module, "LONGEST_LINE", 8192)
    reader = table["reader"] | {"columns": [*table["reader"]["columns"], {"name": "note", "kind": "ignored"}]}
    card, path = card_of(table | {"reader": reader}), tmp_path / "t.csv"

    def written(long: str) -> None:
        fields = [{"age": str(n), "town": "Rome", "answer": "yes", "note": "-"} for n in range(60)]
        fields[40][column] = long
        path.write_text("\n".join(["age,town,answer,note", *(",".join(row.values()) for row in fields), ""]))

    written("x" * 4000)
    found = train_records(card, path)
    ages = np.round(found.features[:, 0] * 100).astype(int).tolist()
    assert ages == list(range(60))
    written("x" * 20000)
    with refused_as("unreadable_file", DataRefusedError):
        train_records(card, path)
