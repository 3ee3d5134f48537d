"""What `data check` counts is what the reader does, and what the reader refuses is refused in a sentence."""

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from hashlib import sha256
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from ruamel.yaml import YAML

from data.card import DataRefusedError
from data.files import _checksum as checksum
from data.readers import rows
from data.reading import read
from tasks.check_data import DataFindings, check_data
from tests.support.cards import card, category, csv_of, label, number
from tests.support.soak import soak_but

Check = Callable[..., DataFindings]
CARD = card("mine", records={"at_most": 4000})
CLASSES = {"classes": ["no", "yes"]}
LABELS = {"target": {"labels": ["x", "z"]}}
NUMBER = number("x", 0, 100)
BINNED = {"name": "x", "kind": "binned", "edges": [0.5]}
CATEGORY = category("x", "Rome", "Oslo")
DATE = {"name": "x", "kind": "timestamp", "bounds": ["2019-01-01", "2021-12-31"]}
HASHED = {"name": "x", "kind": "hashed", "cells": 8}
REFUSED = "train, column x: refused: "
NO_NUMBER = REFUSED + "holds something that is not a number"
NO_TEXT = REFUSED + "holds something that is not text"
MISSING = REFUSED + "a number is missing"
CLAMPED = "train, column x: clamped to 100"


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Checks a table, Parquet or the text of a CSV file, by a card of these columns and this target.

    The test file holds the same rows twice.
    """

    def checked(
        table: dict[str, Any] | pa.Table | str,
        *columns: dict[str, Any],
        public: bool = False,
        encoding: Mapping[str, Any] = {},
        **target: Any,
    ) -> DataFindings:
        paths = {"train": tmp_path / "train", "test": tmp_path / "test"}
        for times, path in enumerate(paths.values(), 1):
            if isinstance(table, str):
                path.write_text(table * times)
            else:
                parquet.write_table(pa.concat_tables([pa.table(table)] * times), path)
        reader = {"kind": "csv" if isinstance(table, str) else "parquet", "columns": [*columns], **encoding}
        files = {
            part: {"path": part, "sha256": sha256(path.read_bytes()).hexdigest()}
            for part, path in paths.items()
        }
        document = CARD | (target or CLASSES) | {"files": files, "reader": reader, "public": public}
        YAML(typ="safe", pure=True).dump(document, tmp_path / "mine.yaml")
        return check_data(str(tmp_path / "mine.yaml"), tmp_path, counted=not public)

    return checked


def in_turns(cases: Iterable[str]) -> list[tuple[str, bool]]:
    """Each case once, of a private table and of a public one in turn."""
    return list(zip(cases, cycle((False, True)), strict=False))


def in_train(found: DataFindings) -> dict[str, int]:
    """The counts of the train file's columns."""
    return {name: count for name, count in (found.counts or {}).items() if "train, column" in name}


def test_a_file_is_read_once_for_counts_and_remarks_and_once_as_training_does(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def counting(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path.name)
        return open_csv(path, *args, **options)

    open_csv = rows._open_csv
    monkeypatch.setattr(rows, "_open_csv", counting)
    found = check("Rome,yes\nOslo,no\n" * 20, CATEGORY, label("y"), encoding={"header": False})
    assert found.refused is None
    assert any("the label 'y' of nearly every record" in remark for remark in found.remarks)
    assert sorted(opened) == ["test"] * 2 + ["train"] * 2


COUNTED: dict[str, tuple[dict[str, Any], list[Any], dict[str, int], str | None]] = {
    "nulls that have a value": (
        NUMBER | {"missing": 5},
        [None, 1.0, None, 101.0],
        {"train, column x: missing, taken as 5.0": 2, CLAMPED: 1},
        None,
    ),
    "nulls that have none": (NUMBER, [None, 1.0, None], {MISSING: 2}, "a number is missing"),
    "true and false as numbers": (NUMBER, [True, False, True], {}, None),
    "true and false in bins": (BINNED, [True, False, True], {}, None),
    "durations": (NUMBER, [timedelta(days=900), None], {NO_NUMBER: 2}, "that is not a number"),
    "numbers beyond all numbers": (
        NUMBER,
        ["1e999", "nan", "101", "2"],
        {MISSING: 1, CLAMPED: 2},
        "a number is missing",
    ),
    "words among numbers": (
        NUMBER,
        ["one", "2", "", "one", " 101 "],
        {NO_NUMBER: 2, MISSING: 1, CLAMPED: 1},
        "not a number",
    ),
    "lists": (NUMBER, [[1], [2]], {NO_NUMBER: 2}, "not a number"),
    "structs": (CATEGORY, [{"a": 1}, {"a": 2}], {NO_TEXT: 2}, "not text"),
    "maps": (CATEGORY, pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), {NO_TEXT: 1}, "not text"),
    "lists of one size": (BINNED, pa.array([[1]], pa.list_(pa.int64(), 1)), {NO_NUMBER: 1}, "not a number"),
    "bytes that are no UTF-8": (CATEGORY, [b"\xff", b"Rome"], {NO_TEXT: 1}, "not text"),
    "dates": (
        DATE,
        ["2020-02-29", "29.02.2020", None, "1999-01-01", "2020-02-30"],
        {"train, column x: missing or not written as 2020-01-31, taken as missing": 3},
        None,
    ),
    "dates that have to be there": (
        DATE | {"missing": "refuse"},
        ["2020-02-29", ""],
        {REFUSED + "a date is missing or not written as 2020-01-31": 1},
        "a date is missing",
    ),
    "hashed texts": (HASHED, ["a", "", None, "b"], {"train, column x: missing": 2}, None),
    "hashed structs": (HASHED, [{"a": 1}], {NO_TEXT: 1}, "not text"),
    "categories": (
        CATEGORY,
        ["Rome", "Paris", None, " Oslo"],
        {"train, column x: counted as other": 2},
        None,
    ),
}


@pytest.mark.parametrize(("case", "public"), soak_but(in_turns(COUNTED), product(COUNTED, (False, True))))
def test_the_counts_are_what_the_reader_does(check: Check, case: str, public: bool) -> None:
    column, values, counts, refused = COUNTED[case]
    found = check({"x": values, "y": ["no"] * len(values)}, column, label("y"), public=public)
    assert in_train(found) == counts
    assert (found.refused is None) == (refused is None) and (refused or "") in str(found.refused or "")


def test_nothing_replaces_a_missing_value_that_has_cells_of_its_own(check: Check) -> None:
    rows = {"x": [None, 1.0, 101.0], "y": ["no"] * 3}
    found = check(rows, NUMBER | {"missing": 5}, label("y"), encoding={"cells": {"grids": [4]}})
    assert in_train(found) == {"train, column x: missing": 1, CLAMPED: 1}


LABELLED: dict[str, tuple[dict[str, Any], list[Any], dict[str, int], str | None]] = {
    "true and false as a number": ({"target": {"bounds": [0, 1]}}, [True, False], {}, None),
    "numbers, one too large": ({"target": {"bounds": [0, 100]}}, [101, 0], {CLAMPED: 1}, None),
    "no class": (
        CLASSES,
        ["no", "maybe", None],
        {REFUSED + "a label is missing or none of the declared classes": 2},
        "none of",
    ),
    "a label of several": (
        LABELS,
        ["1", None, "0"],
        {"train, column x: neither yes nor 0, without the label": 1},
        None,
    ),
    "a label of several, true or false": (LABELS, [True, False], {}, None),
    "a label of several, as R writes it": (LABELS, ["TRUE", "FALSE"], {}, None),
    "a label of several, structs": (
        LABELS,
        [{"a": 1}, {"a": 1}],
        {NO_TEXT: 2},
        "'x': holds something that is not text",
    ),
}


@pytest.mark.parametrize("case", LABELLED)
def test_labels_are_counted_as_they_are_read(check: Check, tmp_path: Path, case: str) -> None:
    target, values, counts, refused = LABELLED[case]
    table = {"a": [1] * len(values), "x": values, "z": [0] * len(values)}
    others = [label("z")] if target is LABELS else []
    found = check(table, NUMBER | {"name": "a"}, label("x"), *others, **target)
    quiet = check_data(str(tmp_path / "mine.yaml"), tmp_path, counted=False)
    assert (in_train(found), quiet.counts) == (counts, None)
    for one in (found, quiet):
        assert (one.refused is None) == (refused is None) and (refused or "") in str(one.refused or "")


def test_rows_that_a_person_leaves_out_are_counted(tmp_path: Path) -> None:
    """Twenty people have two rows each, of which one is used, and three rows name nobody."""
    lines = [f"{who},1,no" for who in (*range(20), *range(20), "", "", "")]
    (tmp_path / "t").write_text("\n".join(["who,x,y", *lines]))
    files = {"train": {"path": "t", "sha256": sha256((tmp_path / "t").read_bytes()).hexdigest()}}
    reader = csv_of({"name": "who", "kind": "ignored"}, NUMBER, label("y"))
    document = CARD | CLASSES | {"files": files, "reader": reader, "person": {"column": "who"}}
    YAML(typ="safe", pure=True).dump(
        document | {"split": {"salt": "m", "test_fraction": 0.5}}, tmp_path / "mine.yaml"
    )
    assert check_data(str(tmp_path / "mine.yaml"), tmp_path, counted=True).counts == {
        "train: records": 43,
        "rows left out: of nobody, of people in the test file, or beyond per_person": 23,
    }


@pytest.mark.parametrize("twice", ["x", "y"])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_column_that_occurs_twice_is_refused(check: Check, twice: str, as_text: bool) -> None:
    table = pa.table([[1], ["no"], [1]], names=["x", "y", twice])
    found = check(f"x,y,{twice}\n1,no,1\n" if as_text else table, NUMBER, label("y"))
    assert f"has several columns '{twice}'" in str(found.refused or "")


@pytest.mark.parametrize("public", [True, False])
def test_the_row_that_is_wrong_is_named_where_it_is_public(
    check: Check, tmp_path: Path, public: bool
) -> None:
    found = check("x,y\n1,no\n\n2,yes\n31337\n", NUMBER, label("y"), public=public)
    with pytest.raises(DataRefusedError) as refusal:
        list(read(found.card, {part: tmp_path / part for part in ("train", "test")}))
    for said in (str(refusal.value), str(found.refused or "")):
        assert "every line needs the same number" in said and "31337" not in said
        assert ("See row 4, not counting empty lines." in said) == public
        assert ("tells the owner of the data which line it is" in said) != public


WRONG_ROWS: dict[str, tuple[str, str]] = {
    "no number": ("x,y\n1,no\n\n2,yes\n31337x,no\n4,perhaps\n", "row 4, not counting empty lines."),
    "a missing number": ("x,y\n1,no\n,yes\n,no\n", "row 3, not counting empty lines."),
    "no class": ("x,y\n1,no\n2,perhaps\n31337x,yes\n", "row 3, not counting empty lines."),
}


@pytest.mark.parametrize("public", [True, False])
@pytest.mark.parametrize("case", WRONG_ROWS)
def test_the_row_of_a_wrong_value_is_named_where_it_is_public(
    check: Check, tmp_path: Path, case: str, public: bool
) -> None:
    content, row = WRONG_ROWS[case]
    found = check(content, NUMBER, label("y"), public=public)
    with pytest.raises(DataRefusedError) as refusal:
        list(read(found.card, {part: tmp_path / part for part in ("train", "test")}))
    for said in (str(refusal.value), str(found.refused or "")):
        assert "31337" not in said and "perhaps" not in said and "column" in said
        assert (f"See {row}" in said) == public and ("See row" in said) == public


def test_rows_are_counted_from_the_first_line_and_over_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.readers.rows.BLOCK_BYTES", 64)
    content = "# one\n# two\nx,y\n" + "1,no\n" * 500 + "word,no\n" + "1,yes\n" * 500
    (tmp_path / "t").write_text(content)
    files = {"train": {"path": "t", "sha256": sha256(content.encode()).hexdigest()}}
    reader = csv_of(NUMBER, label("y")) | {"skip_lines": {"train": 2}}
    document = CARD | CLASSES | {"files": files, "reader": reader, "public": True}
    document |= {"split": {"salt": "m", "test_fraction": 0.5}}
    YAML(typ="safe", pure=True).dump(document, tmp_path / "mine.yaml")
    refused = check_data(str(tmp_path / "mine.yaml"), tmp_path, counted=False).refused
    assert content.splitlines()[503] == "word,no" and "See row 504, not" in str(refused)


def test_the_row_of_a_parquet_file_is_counted_without_a_header(check: Check) -> None:
    table = {"x": ["1", "2", "x"], "y": ["no", "yes", "no"]}
    assert str(check(table, NUMBER, label("y"), public=True).refused).endswith("See row 3.")


@pytest.mark.parametrize("public", [True, False])
def test_the_row_of_a_wrong_value_in_a_block_is_named_where_public(
    weekly: Callable[..., DataFindings], public: bool
) -> None:
    refused = str(weekly(WEEK, "x,y\n1,no\nword,yes\n", public=public).refused)
    assert "w2.csv" in refused and ("See row 3, not counting empty lines." in refused) == public
    assert ("See row" in refused) == public


def test_files_that_are_no_records_and_images_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    for name in ("no/a.png", "no/b.PNG", "yes/c.gif", "yes/d.jpg", "yes/.hidden.png", "e.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / "photos" / name)
    (tmp_path / "photos/yes/d.jpg").write_bytes(b"")
    files = {"train": {"path": "photos", "sha256": checksum(tmp_path / "photos", "sha256")}}
    reader = {"kind": "images", "mode": "L"}
    document = CARD | CLASSES | {"files": files, "reader": reader, "shape": [1, 2, 2]}
    document |= {"split": {"salt": "b", "test_fraction": 0.5}}
    YAML(typ="safe", pure=True).dump(document, tmp_path / "mine.yaml")
    assert check_data(str(tmp_path / "mine.yaml"), tmp_path, counted=True).counts == {
        "train: files that are not PNG or JPEG in a class's folder, ignored": 2,
        "train: records": 2,
        "test: records": 1,
        "test: not read as images, the stand-in": 1,
    }


SEX = category("sex", "male", "female")
ROWS_OF = 40
REMARKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, list[str]], str, bool]] = {
    "a category in another spelling": (
        [SEX],
        CLASSES,
        {"sex": ["Male", "female"] * 20, "y": ["no", "yes", "yes", "no"] * 10},
        "column sex: the file writes 'Male', which counts as other, and no record has 'male'",
        False,
    ),
    "half of the values": (
        [SEX],
        CLASSES,
        {"sex": ["x", "female"] * 20, "y": ["no", "yes", "yes", "no"] * 10},
        "train, column sex: counted as other: about half of the records",
        False,
    ),
    "a few of the values": (
        [NUMBER],
        CLASSES,
        {"x": ["101", *["5"] * 39], "y": ["no", "yes"] * 20},
        "train, column x: clamped to 100: more than a hundredth of the records",
        False,
    ),
    "Yes and No": (
        [NUMBER],
        CLASSES,
        {"x": ["1"] * 40, "y": ["No", "Yes"] * 20},
        """give the column 'y' `spellings: {"no": ["No"], "yes": ["Yes"]}`""",
        True,
    ),
    "one class in two spellings": (
        [NUMBER],
        CLASSES,
        {"x": ["1"] * 40, "y": ["no", "yes", "YES", "no"] * 10},
        """`spellings: {"yes": ["yes", "YES"]}`""",
        True,
    ),
    "True and False": (
        [NUMBER],
        {"classes": ["0", "1"]},
        {"x": ["1"] * 40, "y": ["False", "True"] * 20},
        """`spellings: {"0": ["False"], "1": ["True"]}`""",
        True,
    ),
    "true and false of Parquet": (
        [NUMBER],
        {"classes": ["0", "1"]},
        {"x": [1.0] * 40, "y": [False, True] * 20},
        """`spellings: {"0": ["false"], "1": ["true"]}`""",
        True,
    ),
    "true and false in more spellings": (
        [category("x", "true", "false")],
        CLASSES,
        {"x": ["True", "FALSE", "1", "true"] * 10, "y": ["no", "yes"] * 20},
        "column x: the file writes '1', which counts as other; write the category 'true'",
        False,
    ),
    "a number in another spelling": (
        [category("x", "0.5", "1")],
        CLASSES,
        {"x": ["0.5", "1.0"] * 20, "y": ["no", "yes"] * 20},
        "column x: the file writes '1.0', which counts as other, and no record has '1'",
        False,
    ),
    "missing labels": (
        [NUMBER],
        CLASSES,
        {"x": ["1"] * 40, "y": ["no", "yes", "", "no"] * 10},
        "column y: labels are missing; leave out the rows that lack what is predicted",
        True,
    ),
    "bounds of what is predicted that are far too wide": (
        [NUMBER],
        {"target": {"bounds": [0, 100000]}},
        {"x": ["1", "2"] * 20, "y": [*map(str, range(900, 940))]},
        "column y: nearly all numbers lie in a fiftieth of the declared range",
        False,
    ),
    "one number for all": (
        [NUMBER],
        {"target": {"bounds": [0, 10]}},
        {"x": ["1", "2"] * 20, "y": ["5"] * 40},
        "column y: all records have the same number, so there is nothing to learn",
        False,
    ),
    "one class": (
        [NUMBER],
        CLASSES,
        {"x": ["1"] * 40, "y": ["no"] * 40},
        "column y: only one class is in the file, 'no', so there is nothing to learn",
        False,
    ),
    "a class that nobody has": (
        [NUMBER],
        {"classes": ["no", "yes", "maybe"]},
        {"x": ["1"] * 40, "y": ["no", "yes"] * 20},
        "column y: no record has the class 'maybe'",
        False,
    ),
    "a copy of the class": (
        [category("copy", "n", "y")],
        CLASSES,
        {"copy": ["n", "y"] * 20, "y": ["no", "yes"] * 20},
        "column copy: it says the label 'y' of nearly every record",
        False,
    ),
    "a copy of a number": (
        [number("copy", 0, 100)],
        {"target": {"bounds": [0, 100]}},
        {
            "copy": [str(n % 97 + n / 1000) for n in range(400)],
            "y": [str(n % 97 + n / 1000) for n in range(400)],
        },
        "column copy: it says the label 'y' of nearly every record",
        False,
    ),
    "bounds that hold no value": (
        [NUMBER],
        CLASSES,
        {"x": ["101", "-5"] * 20, "y": ["no", "yes"] * 20},
        "column x: none of its values lies between its bounds, 0 and 100",
        False,
    ),
    "a list of one category": (
        [category("sex", "male")],
        CLASSES,
        {"sex": ["male"] * 40, "y": ["no", "yes"] * 20},
        "column sex: 'male' is its only category, of which a model learns nothing",
        False,
    ),
    "an id beside people": (
        [NUMBER, {"name": "patientId", "kind": "ignored"}],
        CLASSES,
        {"x": ["1"] * 40, "patientId": ["7"] * 40, "y": ["no", "yes"] * 20},
        "may a person have several rows? The column 'patientId' is named like an id",
        False,
    ),
    "an id that the card does not list": (
        [NUMBER],
        CLASSES,
        {"x": ["1"] * 40, "email": ["7"] * 40, "y": ["no", "yes"] * 20},
        "declare `person: {column: email, per_person: K}`",
        False,
    ),
}


@pytest.mark.parametrize(("case", "public"), soak_but(in_turns(REMARKS), product(REMARKS, (False, True))))
def test_what_looks_wrong_is_told_to_the_owner_in_words(
    check: Check, tmp_path: Path, case: str, public: bool
) -> None:
    columns, target, table, words, is_refused = REMARKS[case]
    check(table, *columns, label("y"), public=public, **target)
    quiet = check_data(str(tmp_path / "mine.yaml"), tmp_path, counted=False)
    assert any(words in remark for remark in quiet.remarks), quiet.remarks
    assert (quiet.counts is not None) == public and bool(quiet.refused) == is_refused


def test_bounds_that_are_twenty_times_too_wide_are_not_told(check: Check) -> None:
    table = {"x": ["1", "2"] * 20, "y": [*map(str, range(900, 980, 2))]}
    remarks = check(table, NUMBER, label("y"), target={"bounds": [0, 2000]}).remarks
    assert not [remark for remark in remarks if "declared range" in remark]


def test_other_numbers_are_no_spellings_of_a_category(check: Check) -> None:
    table = {"x": ["15", "1.5"] * 20, "y": ["no", "yes", "yes", "no"] * 10}
    remarks = check(table, category("x", "15", "20"), label("y")).remarks
    assert not [remark for remark in remarks if "the file writes" in remark]


def test_one_value_between_the_bounds_is_enough(check: Check) -> None:
    for inside in ("100", "0", ""):  # a bound itself; and a missing value is not outside
        table = {"x": ["101"] * 39 + [inside], "y": ["no", "yes"] * 20}
        remarks = " ".join(check(table, NUMBER | {"missing": 50.0}, label("y"), **CLASSES).remarks)
        assert ("none of its values" in remarks) == (inside == "")


def test_a_checksum_without_a_key_of_a_private_file_is_named(check: Check) -> None:
    """Who knows all records but one can test each guess of that one by it."""
    table = {"x": ["1", "2"] * 20, "y": ["no", "yes"] * 20}
    private, public = (check(table, NUMBER, label("y"), public=public).remarks for public in (False, True))
    said = (
        "the card has sha256 of the private test and train, by which whoever sees the card can test a guess"
    )
    assert [said in remark for remark in private].count(True) == 1
    assert not [remark for remark in public if "sha256" in remark]


def test_nothing_is_told_of_a_table_that_is_as_its_card_declares(check: Check) -> None:
    table = {
        "x": ["-", *map(str, range(39))],
        "sex": ["male", "female", "male", "male"] * 10,
        "y": ["no", "yes"] * 20,
    }
    x, reader = NUMBER | {"missing": 50.0}, {"missing": ["", "-"], "cells": {"grids": [4]}}
    remarks = check(table, x, SEX, label("y"), public=True, encoding=reader).remarks
    said = "column x: missing: more than a hundredth of the records"
    assert remarks == (f"train, {said}", f"test, {said}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b"x;y\n1;no\n",
            "separated by ';', and its card declares ','; set `separator: \";\"` under `reader`",
        ),
        (b"x\ty\n1\tno\n", "separated by '\\t', and its card declares ','; set `separator: \"\\t\"`"),
        (
            "x,y\n1,no\n2,nö\n".encode("latin-1"),
            "line 3 of {} is not UTF-8, but probably Latin-1 or Windows-1252; set `encoding: windows-1252` under",
        ),
        ("x,y\n1,no\n".encode("utf-16"), "{} is UTF-16; save it as UTF-8"),
        (
            b"x,y\n1,no\n1,5,no\n",
            "line 3 of {} has 3 fields, separated by ',', instead of 2; save the table with"
            ' semicolons, and set `separator: ";"` and `decimal: ","`',
        ),
        (b"x,y\n1,no\n1\n", "line 3 of {} has 1 fields"),
        (
            b'x,y\n"1,5",no\n',
            'column x: numbers have decimal commas, as in 1,5; set `decimal: ","` under `reader`',
        ),
        (b'x,y\n"1,200",no\n999,no\n"-1,200,000.5",no\n', "column x: numbers have commas between thousands"),
        (
            b'x,y\n"1,200",no\n"2,5",no\n"7,25",no\n',
            'column x: numbers have decimal commas, as in 1,5; set `decimal: ","` under `reader`',
        ),
        (b'x,y,note\n1,no,"first\nsecond"\n', "line 2 of {} ends within quotes, and a record has to be"),
        (b"x,y\n71 kg,no\n", "column x: numbers have a unit, as in 5 kg or 5%; write them without"),
        (b"x,y\n5.5%,no\n", "column x: numbers have a unit, as in 5 kg or 5%; write them without"),
        (
            b"x,y\nN/A,no\n1,no\n",
            "column x: values are written as missing ones often are, as NA or ?; list the",
        ),
        (b"x,y\n1'200,no\n", "column x: numbers have marks between thousands, as in 1'200 or 1 200; write"),
        ("x,y\n1\u00a0200,no\n".encode(), "column x: numbers have marks between thousands, as in 1'200"),
        (b"x,y\n<5,no\n", "column x: numbers stand behind a sign, as in <0.5; write a number for each"),
        (
            b"Report,2024\n\nx,y\n1,no\n",
            "line 3 of {} names the columns, and the lines above it are no records; set `skip_lines: {{train: 2}}`",
        ),
        (
            b"x,y\n1,no,\n",
            "line 2 of {} has 3 fields, separated by ',', instead of 2; take the separator at its",
        ),
        (
            b"x y\n1 no\n",
            "separated by ' ', and its card declares ','; set `separator: \" \"` under `reader`",
        ),
        (b"X,y\n1,no\n", "{} has no column 'x', but 'X'; write the name alike in the file and its card"),
        ("x,y\n€ 20,no\n".encode(), "column x: numbers have a unit, as in 5 kg or 5%; write them without"),
    ],
)
def test_the_owner_is_told_which_fault_a_file_has(
    check: Check, tmp_path: Path, content: bytes, words: str
) -> None:
    check("x,y\n1,no\n", NUMBER, label("y"))
    path = tmp_path / "train"
    path.write_bytes(content)
    card_file = tmp_path / "mine.yaml"
    document = YAML(typ="safe", pure=True).load(card_file)
    document["files"]["train"]["sha256"] = sha256(content).hexdigest()
    YAML(typ="safe", pure=True).dump(document, card_file)
    found = check_data(str(card_file), tmp_path, counted=False)
    assert found.refused is not None
    assert words.format(path) in " ".join([str(found.refused), *found.remarks])


@pytest.mark.parametrize("content", ["", "x,y\n"])
def test_a_table_without_rows_is_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "t").write_text(content)
    files = {"train": {"path": "t", "sha256": sha256(content.encode()).hexdigest()}}
    document = CARD | CLASSES | {"files": files, "reader": csv_of(NUMBER, label("y"))}
    document |= {"split": {"salt": "m", "test_fraction": 0.5}}
    YAML(typ="safe", pure=True).dump(document, tmp_path / "mine.yaml")
    refused = check_data(str(tmp_path / "mine.yaml"), tmp_path, counted=False).refused
    assert refused is not None and (refused.code, refused.fields["part"]) == ("no_records", "training")


def test_without_a_header_the_separator_of_the_lines_is_named(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("1;no\n2;yes\n")
    files = {"train": {"path": "t", "sha256": sha256((tmp_path / "t").read_bytes()).hexdigest()}}
    reader = csv_of(NUMBER, label("y")) | {"header": False}
    document = (
        CARD | CLASSES | {"files": files, "reader": reader, "split": {"salt": "m", "test_fraction": 0.5}}
    )
    YAML(typ="safe", pure=True).dump(document, tmp_path / "mine.yaml")
    *_, question, remark = check_data(str(tmp_path / "mine.yaml"), tmp_path, counted=False).remarks
    assert "why are the held-out records public?" in question
    assert "line 1 of" in remark and "it has 2 by ';', which `separator` under `reader`" in remark


def test_at_most_says_that_it_counts_the_rows_that_are_used(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(
        "\n".join(["who,x,y", *(f"{who},1,no" for who in range(30) for _ in range(3))])
    )
    files = {"train": {"path": "t", "sha256": sha256((tmp_path / "t").read_bytes()).hexdigest()}}
    reader = csv_of({"name": "who", "kind": "ignored"}, NUMBER, label("y"))
    document = CARD | CLASSES | {"files": files, "reader": reader, "records": {"at_most": 40}}
    document |= {"person": {"column": "who", "per_person": 2}, "split": {"salt": "m", "test_fraction": 0.5}}
    YAML(typ="safe", pure=True).dump(document, tmp_path / "mine.yaml")
    refused = check_data(str(tmp_path / "mine.yaml"), tmp_path, counted=False).refused
    assert refused is not None and (refused.code, refused.fields["at_most"]) == ("too_many_records", 40)
    assert "at most 2 of each person" in str(refused)


@pytest.fixture
def weekly(tmp_path: Path) -> Callable[..., DataFindings]:
    """Checks blocks that are files of a folder, by their texts."""

    def checked(*texts: str, public: bool = False) -> DataFindings:
        (tmp_path / "weeks").mkdir(exist_ok=True)
        for week, text in enumerate(texts, 1):
            (tmp_path / f"weeks/w{week}.csv").write_text(text)
        blocks = {
            "blocks": {"kind": "folder", "path": "weeks"},
            "split": {"salt": "mine", "test_fraction": 0.3},
        }
        document = (
            CARD | CLASSES | blocks | {"reader": csv_of(NUMBER, label("y")), "files": {}, "public": public}
        )
        YAML(typ="safe", pure=True).dump(document, tmp_path / "mine.yaml")
        return check_data(str(tmp_path / "mine.yaml"), tmp_path, counted=public)

    return checked


WEEK = "x,y\n" + "1,no\n2,yes\n" * 20


def test_the_records_of_all_blocks_are_read_and_counted(
    weekly: Callable[..., DataFindings], tmp_path: Path
) -> None:
    found = weekly(WEEK, "x,y\n" + "500,no\n" * 10, public=True)
    assert (found.refused, found.counts) == (
        None,
        {"blocks: records": 50, "blocks, column x: clamped to 100": 10},
    )
    private = weekly(WEEK, "x,y\n" + "500,no\n" * 10)
    assert (private.refused, private.counts) == (None, None)
    assert any("blocks, column x: clamped to 100: " in remark for remark in private.remarks)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("x,y\n1,no\n2,yes,7\n", "line 3 of "),
        ("x,y\n1,perhaps\n", "y"),
        ("z,y\n1,no\n", "x"),
    ],
)
def test_a_block_that_is_not_as_declared_is_named(
    weekly: Callable[..., DataFindings], bad: str, words: str
) -> None:
    found = weekly(WEEK, bad)
    assert found.refused is not None and "w2.csv" in str(found.refused)
    assert any(words in str(remark) for remark in (found.refused, *found.remarks))


def test_two_blocks_of_the_same_name_and_no_block_are_refused(
    weekly: Callable[..., DataFindings], tmp_path: Path
) -> None:
    assert "there is no block" in str(weekly().refused)
    (tmp_path / "weeks/w1.csv.gz").write_bytes(b"")
    assert "two files of the block 'w1'" in str(weekly(WEEK).refused)
