"""Who is held out: each record decides for itself, by a rule that what moves a record changes and nothing else does."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import dataset_info
from data.card import DataRefusedError, SplitRule
from data.description import rule_of
from data.readers.records import RecordBatch, RecordChunk
from data.reading import is_test, read, split
from tests.data.conftest import CardOf, Document
from tests.support.changed import changed
from tests.support.parts import whole
from tests.support.refusals import contradicting, refused_as

MOVES: dict[str, tuple[str, Any]] = {
    "salt": ("split.salt", "another"),
    "copies": ("split.copies", "apart"),
    "fraction": ("split.test_fraction", 0.25),
    "bound": ("reader.columns.0.bounds", [0, 110]),
    "scale": ("reader.columns.0.scale", "log"),
    "category": ("reader.columns.1.categories", ["Rome", "Oslo", "Bern"]),
    "column left out": ("reader.columns.1", {"name": "town", "kind": "ignored"}),
    "classes": ("classes", ["yes", "no"]),
    "spellings": ("reader.columns.2.spellings", {"no": ["yes"], "yes": ["no"]}),
    "what is missing": ("reader.missing", ["0"]),
}
KEEPS: dict[str, tuple[str, Any]] = {
    "title": ("title", "Another"),
    "cap": ("cap.epsilon", 2.0),
    "bound of the number": ("records.at_most", 2000),
    "training file": ("files.train.sha256", "1" * 64),
    "separator": ("reader.separator", ";"),
    "default": ("reader.columns.0.scale", "linear"),
    "ignored column": ("reader.columns.3", {"name": "note", "kind": "ignored"}),
}


@pytest.mark.parametrize("what", MOVES)
def test_what_moves_a_record_changes_the_rule(what: str, table: Document, card_of: CardOf) -> None:
    assert rule_of(card_of(changed(table, *MOVES[what]))) != rule_of(card_of(table))


@pytest.mark.parametrize("what", KEEPS)
def test_what_moves_no_record_keeps_the_rule(what: str, table: Document, card_of: CardOf) -> None:
    assert rule_of(card_of(changed(table, *KEEPS[what]))) == rule_of(card_of(table))


def test_a_rule_stays_what_it_was(table: Document, card_of: CardOf) -> None:
    """Ledgers hold it: were it computed otherwise, every private population would refuse its card."""
    assert rule_of(card_of(table)) == "8fd68b3c2b3dbee8d5fdf54f68a2e95e374f38dd4df00c6e98453e490b6b4dbc"


def test_with_a_test_file_its_checksum_is_the_rule(
    table: Document, images: Document, card_of: CardOf
) -> None:
    def of(train: str, test: str) -> str:
        files = {
            role: {"path": f"{role}.csv", "sha256": sha * 64}
            for role, sha in (("train", train), ("test", test))
        }
        return rule_of(card_of(table | {"files": files, "split": None}))

    assert of("0", "1") == of("2", "1") != of("0", "2")
    assert of("0", "1") != rule_of(card_of(table))
    before = rule_of(card_of(images))
    for role in images["files"]:
        other = changed(images, f"files.{role}.sha256", "1" * 64)
        assert (rule_of(card_of(other)) == before) == role.startswith("train")


def test_the_rule_is_described_for_private_records_alone(table: Document, card_of: CardOf) -> None:
    card = card_of(table)
    assert dataset_info(card).holdout_rule == rule_of(card)
    assert dataset_info(card_of(table | {"public": True})).holdout_rule is None


def with_test_files(document: Document, *tests: str) -> Document:
    """The table with a test file in each of its sets of files, and another training file in each."""
    sets = [
        {
            "train": {"path": f"train{place}.csv", "sha256": str(place) * 64},
            "test": {"path": f"test{place}.csv", "sha256": sha256},
        }
        for place, sha256 in enumerate(tests, start=1)
    ]
    without_split = {key: value for key, value in document.items() if key != "split"}
    return {**without_split, "public": False, "files": sets[0], "alternatives": sets[1:]}


def test_held_out_records_do_not_depend_on_which_private_files_exist(
    table: Document, card_of: CardOf
) -> None:
    same, other = "a" * 64, "b" * 64
    alone = dataset_info(card_of(with_test_files(table, same))).holdout_rule
    assert dataset_info(card_of(with_test_files(table, same, same))).holdout_rule == alone
    with refused_as("bad_card", DataRefusedError, keys=("alternatives",)):
        dataset_info(card_of(with_test_files(table, same, same, other)))
    public = card_of({**with_test_files(table, same, other), "public": True})
    assert dataset_info(public).holdout_rule is None


def test_records_that_decide_for_themselves_may_come_in_other_files(table: Document, card_of: CardOf) -> None:
    sets = [{"train": {"path": "again.csv", "sha256": "1" * 64}}]
    assert rule_of(card_of({**table, "alternatives": sets})) == rule_of(card_of(table))


RULE = SplitRule(salt="a public salt", test_fraction=0.5)
ROWS = st.lists(
    st.tuples(st.sampled_from([-0.0, 0.0, 0.25, 1.0]), st.integers(0, 2)), min_size=1, max_size=30
)


def records(rows: list[tuple[float, int]]) -> RecordBatch:
    """Records of one feature and one label each."""
    return RecordBatch(np.array([[x] for x, _ in rows], np.float32), np.array([y for _, y in rows], np.int64))


@given(rows=ROWS, data=st.data())
def test_removing_a_record_moves_no_other(rows: list[tuple[float, int]], data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, len(rows) - 1))
    before = is_test(records(rows), RULE)
    after = is_test(records(rows[:gone] + rows[gone + 1 :]), RULE) if len(rows) > 1 else np.array([], bool)
    assert np.delete(before, gone).tolist() == after.tolist()


APART = RULE.model_copy(update={"copies": "apart"})


def sides(
    rows: list[tuple[float, int]], portion: int, groups: list[int] | None = None
) -> tuple[Counter[Any], ...]:
    """How often each record is on each side, of records that are read in portions."""
    batch = records(rows) if groups is None else replace(records(rows), groups=np.array([groups]).T)
    read = (RecordChunk("train", batch[at : at + portion]) for at in range(0, len(rows), portion))
    counted: dict[str, Counter[Any]] = {"train": Counter(), "test": Counter()}
    for block in split(read, APART):
        of = block.records
        group = [()] * len(of) if of.groups is None else map(tuple, of.groups.tolist())
        counted[block.part].update(zip(of.features[:, 0].tolist(), of.labels.tolist(), group, strict=True))
    return counted["train"], counted["test"]


@given(rows=ROWS, data=st.data())
def test_one_copy_more_changes_one_side_by_one_record(
    rows: list[tuple[float, int]], data: st.DataObject
) -> None:
    """Wherever it is read, and whatever group it belongs to."""
    gone, portion = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(1, len(rows)))
    groups = data.draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows)))
    before = sides(rows, portion, groups)
    after = sides(rows[:gone] + rows[gone + 1 :], portion, groups[:gone] + groups[gone + 1 :])
    lost = [was - now for was, now in zip(before, after, strict=True)]
    gained = [now - was for was, now in zip(before, after, strict=True)]
    assert not any(gained)
    assert sorted(side.total() for side in lost) == [0, 1]
    x, y = rows[gone]
    assert next(filter(None, lost)) == Counter([(x, y, (groups[gone],))])


def test_of_many_equal_records_the_declared_share_is_held_out() -> None:
    rows = [(float(x), 0) for x in range(3)] * 2_000
    train, test = sides(rows, portion=700)
    assert all(850 < test[x, 0, ()] < 1_150 for x in range(3))  # 6 standard deviations
    assert all(train[x, 0, ()] + test[x, 0, ()] == 2_000 for x in range(3))


@given(rows=ROWS)
def test_records_without_copies_are_on_the_same_side_in_either_way(rows: list[tuple[float, int]]) -> None:
    once = list({(x + 0.0, y): None for x, y in rows})
    assert sides(once, portion=4)[1] == Counter(
        (x, y, ()) for (x, y), side in zip(once, is_test(records(once), RULE), strict=True) if side
    )


def test_copies_in_another_block_of_the_population_move_nobody() -> None:
    blocks = [
        RecordChunk("train", records([(0.0, 0)] * count), source) for source, count in (("a", 7), ("b", 9))
    ]
    alone = [len(one.records) for one in split(blocks[1:], APART)]
    assert [len(one.records) for one in split(blocks, APART)][2:] == alone
    assert 0 < alone[0] < 9


def of_apart(table: Document, *changes: tuple[str, Any]) -> Document:
    """The table with copies that have sides of their own, a default for a missing age, and the changes."""
    for place, value in (("split.copies", "apart"), ("reader.columns.0.missing", 50), *changes):
        table = changed(table, place, value)
    return table


def test_rows_whose_cells_differ_are_no_copies(table: Document, card_of: CardOf, tmp_path: Path) -> None:
    """A missing number is replaced in what decides a row's side, and has cells of its own in what a model is given."""
    card = card_of({**of_apart(table, ("reader.cells", {"grids": [4]})), "public": True})

    def known(missing: int) -> Counter[tuple[str, bytes, int]]:
        """How often each row with an age is on each side, after so many without."""
        path, people = (
            tmp_path / "tiny.csv",
            [(town, of) for town in ("Rome", "Oslo", "Ulm") for of in ("no", "yes")],
        )
        ages = [""] * missing + ["50"] * 20
        path.write_text("age,town,answer\n" + "".join(f"{age},{a},{b}\n" for age in ages for a, b in people))
        counted: Counter[tuple[str, bytes, int]] = Counter()
        for block in read(card, {"train": path}):
            rows = zip(block.records.features, block.records.labels.tolist(), strict=True)
            counted.update((block.part, row.tobytes(), of) for row, of in rows if row[0] < 4)
        return counted

    assert known(missing=0) == known(missing=1) == known(missing=7)
    assert {part for part, *_ in known(missing=7)} == {"train", "test"}


@given(zeros=st.lists(st.booleans(), min_size=2, max_size=30))
def test_a_negative_zero_is_no_copy_of_a_zero(zeros: list[bool]) -> None:
    """They are on one side, but a model may tell them apart."""
    mixed = records([(-0.0 if negative else 0.0, 0) for negative in zeros])
    counts = {
        one.part: np.signbit(one.records.features).sum()
        for one in split([RecordChunk("train", mixed)], APART)
    }
    alone = records([(-0.0, 0)] * sum(zeros))
    assert counts == {one.part: len(one.records) for one in split([RecordChunk("train", alone)], APART)}


@pytest.mark.parametrize("apart", [True, False])
def test_what_decides_who_is_a_copy_changes_the_rule(apart: bool, table: Document, card_of: CardOf) -> None:
    """A column of groups makes copies differ, as cells do of a missing value; other cells do not."""
    table = of_apart(table, ("split.copies", "apart" if apart else "together"))
    columns = [*table["reader"]["columns"], {"name": "sex", "kind": "ignored"}]
    rule = rule_of(card_of(changed(table, "reader.columns", columns)))
    grouped = [*columns[:-1], {**columns[-1], "categories": ["f", "m"]}]
    assert (rule_of(card_of(changed(table, "reader.columns", grouped))) != rule) == apart
    cells = [rule_of(card_of(changed(table, "reader.cells", {"grids": [grid]}))) for grid in (4, 8)]
    assert cells[0] == cells[1]
    assert (cells[0] != rule) == apart


def test_images_have_no_copies_apart(images: Document, card_of: CardOf) -> None:
    of_rows = {"format": "csv", "kind": "image_table", "image": "pixels", "label": "answer", "mode": "L"}
    files = {"train": {"path": "images.csv", "sha256": "0" * 64}}
    split_rule = {"salt": "dots", "test_fraction": 0.5, "copies": "apart"}
    with contradicting("split.copies", "reader.kind"):
        card_of(images | {"records": {"at_most": 3}, "files": files, "split": split_rule, "reader": of_rows})


def test_people_have_no_copies(table: Document, card_of: CardOf) -> None:
    columns = [*table["reader"]["columns"], {"name": "who", "kind": "ignored"}]
    of_people = changed(table, "reader.columns", columns) | {"person": {"column": "who"}}
    assert card_of(of_people).split.copies == "together"
    with contradicting("split.copies", "person"):
        card_of(changed(of_people, "split.copies", "apart"))


@given(rows=ROWS)
def test_equal_records_stay_together_and_none_is_lost(rows: list[tuple[float, int]]) -> None:
    sides: dict[tuple[float, int], set[bool]] = {}
    for row, side in zip(rows, is_test(records(rows), RULE), strict=True):
        sides.setdefault(row, set()).add(bool(side))
    assert all(len(side) == 1 for side in sides.values())
    parts = whole(split([RecordChunk("train", records(rows))], RULE))
    assert len(parts.train) + len(parts.test) == len(rows)
    kept = [float(x) for part in (parts.train, parts.test) for x in part.features[:, 0]]
    assert sorted(kept) == sorted(x for x, _ in rows)


def test_the_sides_are_the_ones_published() -> None:
    """A change of the rule would move private records between training and test unnoticed."""
    rows = records([(x / 8, x % 3) for x in range(16)])
    sides = "".join("x" if side else "." for side in is_test(rows, RULE))
    assert sides == "xxxx.x.x..xx...."


def test_label_feature_and_salt_each_count() -> None:
    rows = records([(x / 1000, 0) for x in range(1000)])
    other_label = RecordBatch(rows.features, rows.labels + 1)
    other_salt = SplitRule(salt="another", test_fraction=0.5)
    sides = is_test(rows, RULE)
    assert 400 < (sides != is_test(other_label, RULE)).sum() < 600  # 6 standard deviations: 1 in 10^9
    assert 400 < (sides != is_test(rows, other_salt)).sum() < 600
    assert 400 < sides.sum() < 600


def test_the_share_of_test_records_is_the_declared_one() -> None:
    """Five standard deviations: a false alarm in 10^6."""
    n, share = 40_000, 0.2
    rows = records([(x / n, 0) for x in range(n)])
    found = is_test(rows, SplitRule(salt="s", test_fraction=share)).mean()
    assert abs(found - share) < 5 * (share * (1 - share) / n) ** 0.5


def test_many_records_are_hashed_as_few_are() -> None:
    rows = [(x / 40_000, 0) for x in range(40_000)]  # more than two blocks of hashes
    apart = [records(rows[start : start + 7_000]) for start in range(0, len(rows), 7_000)]
    sides = is_test(records(rows), RULE)
    assert np.concatenate([is_test(block, RULE) for block in apart]).tolist() == sides.tolist()
    parts = whole(split([RecordChunk("train", block) for block in apart], RULE))
    assert parts.test.features.tobytes() == records(rows)[sides].features.tobytes()
    assert parts.train.features.tobytes() == records(rows)[~sides].features.tobytes()
