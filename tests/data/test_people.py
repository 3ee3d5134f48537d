"""One record a person, or so many as the card says: which they are, and on which side of the split."""

import json
import sqlite3
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from data import DataRefusedError, dataset_info
from data.card import DataCard
from data.description import rule_of
from data.formats import OfRows
from data.new_records import records_in
from data.preparation import Preparation
from data.prepared import Prepared, load
from data.prepared import write as write_prepared
from data.readers.records import RecordBatch, RecordChunk, SplitPart
from data.readers.rows import RowReader
from data.reading import Digests, read, read_blocks
from data.targets import IGNORED, Number
from tests.data.conftest import CardOf, Document, named_files
from tests.support.parts import Parts, whole
from tests.support.refusals import contradicting, refused_as

KEY = b"k" * 32


@pytest.fixture
def card(table: Document, card_of: CardOf) -> CardOf:
    """A card of the table with a column `who`; the age tells the records apart."""
    table["reader"]["columns"].insert(0, {"name": "who", "kind": "ignored"})
    table["person"] = {"column": "who"}
    return lambda **changes: card_of(table | changes)


Row = tuple[str, int]


def rows(count: int = 60) -> list[Row]:
    """Person number p has p % 4 + 1 rows, each with an age of its own."""
    return [
        (f"p{person}", person + 100 * place) for person in range(count) for place in range(person % 4 + 1)
    ]


def write(path: Path, some: list[Row]) -> Path:
    path.write_text("who,age,town,answer\n" + "".join(f"{who},{age / 10},Rome,no\n" for who, age in some))
    return path


def ages(parts: Parts) -> tuple[set[int], set[int]]:
    """Of the records to train on and of those held out; an age is of one row alone."""
    found = [np.rint(one.features[:, 0] * 1000).astype(int).tolist() for one in (parts.train, parts.test)]
    assert all(len({*one}) == len(one) for one in found)
    return {*found[0]}, {*found[1]}


def drawn(card: DataCard, folder: Path, some: list[Row], key: bytes = KEY) -> tuple[set[int], set[int]]:
    return ages(whole(read(card, {"train": write(folder / "tiny.csv", some)}, key=key)))


def people(found: set[int]) -> Counter[int]:
    return Counter(age % 100 for age in found)


@pytest.mark.parametrize("most", [1, 3])
def test_each_person_has_so_many_records_and_is_on_one_side(card: CardOf, tmp_path: Path, most: int) -> None:
    own = card(person={"column": "who", "per_person": most, "group_privacy": most > 1})
    train, test = (people(one) for one in drawn(own, tmp_path, rows()))
    assert not train.keys() & test.keys() and len(test) > 15 < len(train)
    assert train + test == {person: min(most, person % 4 + 1) for person in range(60)}


def test_adding_or_removing_a_person_moves_no_other(card: CardOf, tmp_path: Path) -> None:
    """In whatever order the rows are, however many the person has."""
    train, test = drawn(card(), tmp_path, rows())
    shuffled = [rows()[place] for place in np.random.default_rng(0).permutation(len(rows()))]
    assert drawn(card(), tmp_path, shuffled) == (train, test)
    for gone in (3, 30, 31):
        less_train, less_test = drawn(card(), tmp_path, [row for row in shuffled if row[0] != f"p{gone}"])
        assert {age % 100 for age in (train | test) - (less_train | less_test)} == {gone}
        assert less_train <= train and less_test <= test
    more_rows = [*shuffled, *[("p3", 3 + 100 * place) for place in range(4, 9)]]
    more_train, more_test = drawn(card(), tmp_path, more_rows)
    assert {age for age in more_train | more_test if age % 100 != 3} == {
        age for age in train | test if age % 100 != 3
    }


def test_another_key_takes_other_records_of_the_same_people(card: CardOf, tmp_path: Path) -> None:
    first, other = (drawn(card(), tmp_path, rows(), key=bytes([place]) * 32) for place in (1, 2))
    assert first[0] != other[0] and [people(one) for one in first] == [people(one) for one in other]


def test_who_is_not_named_has_no_record(card: CardOf, tmp_path: Path) -> None:
    train, test = drawn(card(), tmp_path, [*rows(), ("", 70), (" ", 71), ("  p70", 170), ("p70 ", 270)])
    assert not {70, 71} & (train | test) and len({170, 270} & (train | test)) == 1


@pytest.mark.parametrize(
    ("kind", "changes"), [("parquet", {}), ("csv", {"missing": ["", "?"]}), ("texts", {"format": "jsonl"})]
)
def test_a_missing_name_is_nobody_s(
    card: CardOf, table: Document, tmp_path: Path, kind: str, changes: Document
) -> None:
    """As each format writes it: one more such row would else replace another, and not add one."""
    named = [(float(who), age) for who in range(1, 60) for age in (who, 100 + who)]
    if kind == "texts":
        reader = changes | {"kind": kind, "columns": ["age"], "label": "answer"}
    else:
        reader = changes | {"kind": kind, "columns": table["reader"]["columns"]}

    def drawn_of(unnamed: list[float]) -> list[Any]:
        some = [*named, *((float("nan"), age) for age in unnamed)]
        path, fields = tmp_path / "rows", ("who", "age", "town", "answer")
        rows_ = [dict(zip(fields, (who, str(age / 10), "Rome", "no"), strict=True)) for who, age in some]
        if kind == "parquet":
            parquet.write_table(pa.Table.from_pylist(rows_), path)
        elif kind == "csv":
            lines = [",".join("?" if one != one else str(one) for one in row.values()) for row in rows_]
            path.write_text("\n".join([",".join(fields), *lines]) + "\n")
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows_))
        found = read(card(reader=reader), {"train": path}, key=KEY, as_texts=kind == "texts")
        parts = whole(found)
        return [*parts.train.features.tolist(), *parts.test.features.tolist()]

    assert len(drawn_of([])) == 59 and drawn_of([700, 710]) == drawn_of([])


def test_whoever_is_in_the_test_file_is_not_trained_on(card: CardOf, tmp_path: Path) -> None:
    files = named_files("train", "test")
    own = card(files=files, split=None)
    paths = {"train": write(tmp_path / "train.csv", rows()), "test": write(tmp_path / "test.csv", rows(9))}
    train, test = ages(whole(read(own, paths, key=KEY)))
    assert people(train).keys() == {*range(9, 60)} and len(test) == len(rows(9))
    assert rule_of(own) != rule_of(card(files=files, split=None, person=None))


def test_a_whole_number_names_one_person_however_a_file_spells_it(card: CardOf, tmp_path: Path) -> None:
    """pandas writes 17.0 for 17 where another row of the column names nobody."""
    spelled = [(f"{who}{end}", age) for who in range(20) for age, end in ((who, ""), (100 + who, ".0"))]
    train, test = drawn(card(), tmp_path, spelled)
    assert people(train | test) == dict.fromkeys(range(20), 1)


def test_rows_of_a_person_do_not_depend_on_the_spelling_of_numbers(card: CardOf, tmp_path: Path) -> None:
    """A missing value in one row makes whole numbers real ones in all."""
    found = []
    for end in ("", ".0"):
        lines = [f"p{who},{who + 20 * place}{end},Rome,no" for who in range(20) for place in range(4)]
        (tmp_path / "tiny.csv").write_text("\n".join(["who,age,town,answer", *lines]) + "\n")
        parts = whole(read(card(), {"train": tmp_path / "tiny.csv"}, key=KEY))
        found.append([one.features[:, 0].tolist() for one in (parts.train, parts.test)])
    assert found[0] == found[1]


def test_people_in_parquet_of_polars_are_named_by_views(
    table: Document, card: CardOf, tmp_path: Path
) -> None:
    table["reader"] |= {"kind": "parquet"}
    texts = {"who": ["a", "a", "b"], "town": ["Rome"] * 3, "answer": ["no"] * 3}
    columns = {name: pa.array(held, pa.string_view()) for name, held in texts.items()} | {"age": [1, 2, 3]}
    parquet.write_table(pa.table(columns), tmp_path / "t")
    own = card(split={"salt": "t", "test_fraction": 0.5})
    parts = whole(read(own, {"train": tmp_path / "t"}))
    assert len(parts.train) + len(parts.test) == 2


@pytest.mark.parametrize("person", [{}, {"per_person": 3}, {"per_person": 3, "group_privacy": True}])
def test_a_private_test_file_has_no_more_rows_of_a_person_than_are_paid_for(
    person: Document, card: CardOf, tmp_path: Path
) -> None:
    """Nor rows of nobody, one more of which would be more than a person; of a public test file all rows are used."""
    train = write(tmp_path / "train.csv", [("p100", 5)])
    test = write(tmp_path / "test.csv", [*rows(), ("", 70), ("p70", 170)])
    own = {"files": named_files("train", "test"), "split": None, "person": {"column": "who"} | person}

    def held_out(**changes: Any) -> set[int]:
        found = read(card(**own, **changes), {"train": train, "test": test}, key=KEY)
        return ages(whole(found))[1]

    most = person.get("per_person", 1)
    numbers = {who: min(most, who % 4 + 1) for who in range(60)}
    assert people(held_out(holdout="private")) == numbers | {70: 1}
    assert held_out() == {age for _, age in rows()} | {70, 170}


def test_a_long_number_names_one_person_in_both_files(table: Document, card: CardOf, tmp_path: Path) -> None:
    """Real numbers of more than ten digits become texts with an exponent."""
    table["reader"] |= {"kind": "parquet"}
    whose = {"train": [12345678901.0, 1e15, 2e17, None], "test": [12345678901, 10**15, 2 * 10**17]}
    paths = {part: tmp_path / f"{part}.parquet" for part in whose}
    for part, who in whose.items():
        rows = {"who": who, "age": range(len(who)), "town": ["Rome"] * len(who), "answer": ["no"] * len(who)}
        pd.DataFrame(rows).to_parquet(paths[part])
    with refused_as("no_records", DataRefusedError, part="training"):  # all of them are in the test file
        whole(read(card(files=named_files("train", "test"), split=None), paths))


@pytest.mark.parametrize(("declared", "spelled"), [("-1", "-1.0"), ("-1.0", "-1")])
def test_a_number_for_nobody_is_nobody_however_it_is_spelled(
    card: CardOf, table: Document, tmp_path: Path, declared: str, spelled: str
) -> None:
    own = card(reader=table["reader"] | {"missing": [declared]})
    named = [(f"{who}", who) for who in range(20)]
    train, test = drawn(own, tmp_path, [*named, (spelled, 700), (spelled, 710)])
    assert train | test == {*range(20)}


def two_weeks(folder: Path) -> None:
    """The same people in two blocks, with other ages in the second."""
    (folder / "weeks").mkdir()
    write(folder / "weeks/one.csv", rows(20))
    write(folder / "weeks/two.csv", [(who, age + 500) for who, age in rows(20)])


def test_in_blocks_each_block_draws_for_itself(card: CardOf, tmp_path: Path) -> None:
    two_weeks(tmp_path)
    own = card(files={}, blocks={"kind": "folder", "path": "weeks"}, blocks_per_person=2)

    def taken(*names: str) -> tuple[set[int], set[int]]:
        digests = Digests("tiny", key=KEY)
        return ages(whole(read_blocks(own, names, {}, root=tmp_path, url=None, digests=digests, key=KEY)))

    both, one = taken("one", "two"), taken("one")
    assert people(both[0] | both[1]) == dict.fromkeys(range(20), 2)
    assert all(some <= all_ for some, all_ in zip(one, both, strict=True))
    assert not people(both[0]).keys() & people(both[1]).keys()


def test_a_block_of_people_is_never_in_memory_as_a_whole(
    card: CardOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weeks").mkdir()
    note = "n" * 20_000
    lines = [f"p{place // 2},{place % 90}.5,Rome,no,{note}\n" for place in range(1000)]
    (tmp_path / "weeks" / "one.csv").write_text("who,age,town,answer,note\n" + "".join(lines))
    own = card(files={}, blocks={"kind": "folder", "path": "weeks"})
    portions, read_file = list[weakref.ref[pa.Table]](), RowReader.tables

    def tables(reader: RowReader, part: SplitPart, path: Path) -> Iterator[pa.Table]:
        for some in read_file(reader, part, path):
            portions.append(weakref.ref(some))
            yield some

    monkeypatch.setattr(RowReader, "tables", tables)
    digests = Digests("tiny", key=KEY)
    alive = [
        (len(block.records), sum(some() is not None for some in portions))
        for block in read_blocks(own, ["one"], {}, root=tmp_path, url=None, digests=digests, key=KEY)
    ]
    assert sum(count for count, _ in alive) == 500
    assert max(count for _, count in alive) <= 2 < len(portions) // 2


class Overwritten(Digests):
    """Digests of a block whose file is replaced as soon as all its rows are counted."""

    def count_block_rows(
        self, name: str, portions: Iterable[pa.Table], declared: OfRows, file: Path | None
    ) -> Iterator[pa.Table]:
        yield from super().count_block_rows(name, portions, declared, file)
        assert file is not None
        write(file, [("another", age) for age in range(40)])


@pytest.mark.parametrize("later", [False, True])
def test_a_block_that_changes_while_it_is_read_is_refused(
    card: CardOf, tmp_path: Path, *, later: bool
) -> None:
    """Otherwise the rows that were selected are others, here forty of one person."""
    (tmp_path / "weeks").mkdir()
    path = write(tmp_path / "weeks" / "one.csv", [(f"p{person}", person) for person in range(40)])
    own = card(files={}, blocks={"kind": "folder", "path": "weeks"})
    digests = (Digests if later else Overwritten)(own.population, key=KEY)
    blocks = read_blocks(own, ["one"], {}, root=tmp_path, url=None, digests=digests, key=KEY)
    with refused_as("changing_file", DataRefusedError):
        for _ in blocks:
            path.write_text(path.read_text() + "p1,0.1,Rome,no\n")


def test_a_block_of_people_that_lacks_a_column_is_refused(card: CardOf, tmp_path: Path) -> None:
    (tmp_path / "weeks").mkdir()
    (tmp_path / "weeks" / "one.csv").write_text("who,age,answer\np1,1,no\n")
    own = card(files={}, blocks={"kind": "folder", "path": "weeks"})
    digests = Digests("tiny", key=KEY)
    with refused_as("missing_column", DataRefusedError, column="town"):
        whole(read_blocks(own, ["one"], {}, root=tmp_path, url=None, digests=digests, key=KEY))


def test_the_person_is_never_a_feature_and_never_leaves(card: CardOf, tmp_path: Path) -> None:
    own = card()
    info, carried = dataset_info(own), Preparation.from_card(own, "none", None)
    assert info.input_shape == (4,) and (info.per_person, info.blocks_per_person) == (1, 1)
    assert "who" not in str(carried)
    (tmp_path / "new.csv").write_text("age,town\n50,Rome\n")
    (found,) = records_in(tmp_path / "new.csv", carried, (4,))
    assert found.features[0].tolist() == [0.5, 1, 0, 0]
    many = card(person={"column": "who", "per_person": 3, "group_privacy": True})
    assert dataset_info(many).blocks_per_person == 3


def test_the_person_keeps_its_place_in_a_file_without_header(
    card: CardOf, table: Document, tmp_path: Path
) -> None:
    """Without it, the number that names the person would be read as an age."""
    table["reader"]["header"] = False
    carried = Preparation.from_card(card(), "none", None)
    for line in ("17,50,Rome", "17,50,Rome,no"):
        (tmp_path / "new.csv").write_text(f"{line}\n")
        (found,) = records_in(tmp_path / "new.csv", carried, (4,))
        assert found.features[0].tolist() == [0.5, 1, 0, 0] and "who" not in str(carried)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"person": {"column": "age"}}, ("person.column", "reader.columns")),
        ({"person": {"column": "whom"}}, ("person.column", "reader.columns")),
        ({"person": {"column": "who", "group_privacy": True}}, ("group_privacy", "per_person")),
        (
            {
                "person": {"column": "who", "per_person": 2, "group_privacy": True},
                "files": {},
                "blocks": {"kind": "folder", "path": "weeks"},
            },
            ("person.group_privacy", "blocks"),
        ),
        (
            {
                "files": named_files("test"),
                "split": None,
                "blocks": {"kind": "folder", "path": "weeks"},
                "holdout": "private",
            },
            ("blocks", "files.test", "holdout"),
        ),
    ],
)
def test_wrong_declarations_are_refused(card: CardOf, changes: Document, keys: tuple[str, ...]) -> None:
    with contradicting(*keys):
        card(**changes)


def prepare_people(
    card: DataCard, folder: Path, some: list[Row], name: str = "prepared"
) -> tuple[Prepared, list[frozenset[int]]]:
    """What is prepared of the card's file, and the ages of the rows that count of each person to train on."""
    found = read(card, {"train": write(folder / "tiny.csv", some)}, key=KEY)
    at_most = card.records.at_most
    write_prepared(folder / name, found, dataset_info(card), salt=b"s" * 32, at_most=at_most)
    data = load(folder / name)
    there = data.train_labels != IGNORED
    ages_ = np.rint(data.train_features[..., 0] * 1000).astype(int)
    return data, [frozenset(row[known].tolist()) for row, known in zip(ages_, there, strict=True)]


def test_the_rows_of_a_person_are_one_record(card: CardOf, tmp_path: Path) -> None:
    """In whatever order the rows are; who is held out has each row by itself."""
    own = card(person={"column": "who", "per_person": 3}, records={"at_most": 200})
    shuffled = [rows()[place] for place in np.random.default_rng(0).permutation(len(rows()))]
    data, found = prepare_people(own, tmp_path, shuffled)
    assert data.train_features.shape == (len(found), 3, 4) and data.train_labels.shape == (len(found), 3)
    assert data.test_features.shape[1:] == (4,) and data.info.input_shape == (4,)
    numbers = [people(set(ages_)) for ages_ in found]
    assert all(len(one) == 1 for one in numbers) and len({*map(tuple, numbers)}) == len(found)
    assert all(count == min(3, who % 4 + 1) for one in numbers for who, count in one.items())
    held_out = people({*np.rint(data.test_features[:, 0] * 1000).astype(int).tolist()})
    assert {*held_out} == {*range(60)} - {who for one in numbers for who in one}
    first = data.train_features[:, :1].repeat(3, axis=1)
    missing = data.train_labels == -100
    assert (~missing).sum(axis=1).tolist() == [len(ages_) for ages_ in found]
    np.testing.assert_array_equal(data.train_features[missing], first[missing])
    assert (data.info.per_person, data.info.rows_per_user, data.info.blocks_per_person) == (1, 3, 1)

    less, rest = prepare_people(
        own, tmp_path, [row for row in shuffled if row[0] not in ("p3", "p30")], "less"
    )
    gone = [ages_ for ages_ in found if ages_ not in rest]
    assert {who for ages_ in gone for who in people(set(ages_))} <= {3, 30} and len(gone) < 3
    assert rest == [ages_ for ages_ in found if ages_ not in gone]  # the others as they were, in their order
    sizes = [
        sum(one.stat().st_size for one in (tmp_path / name).glob("*.npy")) for name in ("prepared", "less")
    ]
    salts = [(tmp_path / name / "salt").stat().st_size for name in ("prepared", "less")]
    assert sizes[0] + salts[0] == sizes[1] + salts[1] and sizes[0] > sizes[1] and len(less.train_labels)


@pytest.mark.parametrize("target", [None, Number(bounds=(-1.0, 1.0))])
def test_the_rows_that_a_person_lacks_have_no_label(
    target: Number | None, card: CardOf, tmp_path: Path
) -> None:
    """-100 in place of a class, and NaN in place of a number; their features are those of a row of the person."""
    info = replace(
        dataset_info(card(person={"column": "who", "per_person": 2}, records={"at_most": 200})), target=target
    )
    labels = np.array([1, 0, 1], np.int64 if target is None else np.float32)
    features = np.arange(12, dtype=np.float32).reshape(3, 4)
    train = RecordBatch(features, labels, keys=(b"her", b"his", b"her"))
    chunks = [RecordChunk("train", train), RecordChunk("test", RecordBatch(features[:1], labels[:1]))]
    write_prepared(tmp_path / "p", chunks, info, salt=b"s" * 32, at_most=200)
    data = load(tmp_path / "p")
    order = np.argsort(data.train_features[:, 0, 0])
    mark = -100 if target is None else np.nan
    np.testing.assert_array_equal(data.train_labels[order], [[1, 1], [0, mark]])
    np.testing.assert_array_equal(data.train_features[order], features[[[0, 2], [1, 1]]])


def test_people_are_counted_where_they_are_the_records(card: CardOf, tmp_path: Path) -> None:
    own = {"person": {"column": "who", "per_person": 3}}
    _, found = prepare_people(card(**own, records={"at_most": 200}), tmp_path, rows())
    tested = sum(min(3, who % 4 + 1) for who in range(60)) - sum(map(len, found))
    right = {"train": len(found), "test": tested}
    prepare_people(card(**own, records=right), tmp_path, rows())
    with refused_as("records_differ", DataRefusedError, **right, declared_train=len(found) + 1):
        prepare_people(card(**own, records=right | {"train": len(found) + 1}), tmp_path, rows())


def test_in_each_block_a_person_is_a_record_of_its_own(card: CardOf, tmp_path: Path) -> None:
    two_weeks(tmp_path)
    source = {"files": {}, "blocks": {"kind": "folder", "path": "weeks"}, "blocks_per_person": 2}
    own = card(**source, person={"column": "who", "per_person": 3})
    digests = Digests("tiny", key=KEY)
    found = read_blocks(own, ("one", "two"), {}, root=tmp_path, url=None, digests=digests, key=KEY)
    write_prepared(tmp_path / "prepared", found, dataset_info(own), salt=b"s" * 32, at_most=200)
    data = load(tmp_path / "prepared")
    counted = [
        frozenset((int(age) // 500, int(age) % 100) for age in np.rint(1000 * ages_[known]))
        for ages_, known in zip(data.train_features[..., 0], data.train_labels != IGNORED, strict=True)
    ]
    assert all(len(one) == 1 for one in counted) and len({*counted}) == len(counted)


def test_a_file_without_the_person_is_refused(card: CardOf, tmp_path: Path) -> None:
    (tmp_path / "tiny.csv").write_text("age,town,answer\n1,Rome,no\n")
    with refused_as("missing_column", DataRefusedError, column="who"):
        whole(read(card(), {"train": tmp_path / "tiny.csv"}))


def test_people_in_a_database(card: CardOf, tmp_path: Path) -> None:
    """Texts, whose person is a column that they are not made of."""
    with sqlite3.connect(tmp_path / "t.sqlite") as connection:
        connection.execute("create table films (week text, who text, words text, answer text)")
        some = [(f"w{place % 2}", f"p{place % 7}", f"text {place}", "no") for place in range(42)]
        connection.executemany("insert into films values (?, ?, ?, ?)", some)
    source = {"kind": "sql", "url_from": "FILMS_URL", "query": "select * from films", "column": "week"}
    reader = {"kind": "texts", "format": "csv", "columns": ["words"], "label": "answer"}
    own = card(files={}, blocks=source, blocks_per_person=2, reader=reader)
    url, digests = f"sqlite:///{tmp_path}/t.sqlite", Digests("tiny", key=KEY)
    read_ = read_blocks(
        own, ("w0", "w1"), {}, root=tmp_path, url=url, digests=digests, key=KEY, as_texts=True
    )
    parts = whole(read_)
    texts = [*parts.train.features, *parts.test.features]
    places = [int(text.split()[1]) for text in texts]
    assert Counter((place % 2, place % 7) for place in places) == dict.fromkeys(np.ndindex(2, 7), 1)
