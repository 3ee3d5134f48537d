"""Blocks that were seen before under another name: in another order, in part, encoded otherwise, or over time."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from data import DataRefused, PublicDescription
from data.charged_blocks import ChargedBlocks, preparation_of
from data.prepared import salt_of
from data.sketch import SIZE
from tasks.params import parse
from tasks.prepare import prepare

Document = dict[str, Any]
VISITS = (Path(__file__).parents[2] / "examples/own_data/visits.csv").read_text().splitlines()
AGAIN: dict[str, list[str]] = {
    "sorted": sorted(VISITS[1:201]),
    "one-less": VISITS[2:201],
    "one-twice": VISITS[1:202],
    "a-tenth": VISITS[181:381],
    "a-tenth-of-it": VISITS[181:1201],
    "with-spaces": [line.replace(",", " , ") for line in VISITS[1:201]],
}


@dataclass(frozen=True)
class Visits:
    """Blocks of the example's private rows, and the card that they are prepared by."""

    document: Document
    store: Callable[..., Path]
    root: Path

    def hold_out(self, lines: list[str]) -> None:
        """Declares a test file of these rows in place of a split."""
        file = self.root / "test.csv"
        file.write_text("\n".join([VISITS[0], *lines]) + "\n")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        self.document.pop("split", None)
        self.document["files"] = {"test": {"path": "test.csv", "sha256": digest}}

    def charge(self, place: str = "prepared", home: str = "home") -> None:
        """What a run does that was reserved on what was prepared."""
        public, salt = PublicDescription.read(self.root / place), salt_of(self.root / place)
        most = self.document.get("blocks_per_person", 1)
        known = ChargedBlocks("tiny", folder=self.root / home / "blocks", blocks_per_person=most)
        for only_check in (True, False):
            known.charge(preparation_of(salt, public.blocks), public.blocks, only_check=only_check)

    def run(self, **written: list[str]) -> None:
        """Prepares blocks of these rows, and charges them."""
        self.prepare(**written)
        self.charge()

    def prepare(self, place: str = "prepared", **written: list[str]) -> None:
        """Writes rows as blocks and prepares these, in a home that remembers."""
        for name, lines in written.items():
            (self.root / f"weeks/{name}.csv").write_text("\n".join([VISITS[0], *lines]) + "\n")
        params = parse({"data": {"dataset": "tiny", "blocks": [*written]}}, reads=("data",))
        cards, home = self.store(self.document), self.root / "home"
        prepare(params, mirror=None, home=home, destination=self.root / place, root=self.root, cards=cards)

    def kept(self) -> dict[str, Any]:
        """What the home knows of charged blocks."""
        (file,) = (self.root / "home/blocks").glob("*.json")
        known: dict[str, Any] = json.loads(file.read_text())
        return known


@pytest.fixture
def visits(table: Document, store: Callable[..., Path], tmp_path: Path) -> Visits:
    columns = [
        {"name": "age", "kind": "numeric", "bounds": [18, 100]},
        {"name": "distance_km", "kind": "numeric", "bounds": [0, 50], "missing": 10},
        {"name": "insurance", "kind": "ignored"},
        {"name": "reason", "kind": "categorical", "categories": ["pain", "injury"]},
        {"name": "returned", "kind": "label"},
    ]
    source = {"files": {}, "blocks": {"kind": "folder", "path": "weeks"}, "records": {"at_most": 4000}}
    (tmp_path / "weeks").mkdir()
    return Visits(table | source | {"reader": {"kind": "csv", "columns": columns}}, store, tmp_path)


@pytest.mark.parametrize("again", AGAIN)
def test_a_block_that_was_written_again_is_no_new_one(visits: Visits, again: str) -> None:
    visits.run(first=VISITS[1:201])
    visits.run(second=VISITS[401:601], third=VISITS[601:801])
    with pytest.raises(
        DataRefused, match=f"'first' and '{again}' of population 'tiny' hold the same records or"
    ):
        visits.run(**{again: AGAIN[again]})
    visits.run(first=VISITS[1:200])
    visits.run(second=VISITS[401:601], third=VISITS[601:801])


def test_what_a_block_held_before_stays_its_own(visits: Visits) -> None:
    visits.run(first=VISITS[1:201])
    visits.run(first=VISITS[201:401])
    for some in (VISITS[11:201], VISITS[201:391], VISITS[1:401]):
        with pytest.raises(DataRefused, match="'first' and 'other'"):
            visits.run(other=some)
    visits.run(few=VISITS[401:406])
    visits.run(few=VISITS[406:411])
    with pytest.raises(DataRefused, match="'few' and 'renamed'"):
        visits.run(renamed=VISITS[401:406][::-1])


def test_a_block_in_another_run_with_another_encoding_is_no_new_one(visits: Visits) -> None:
    visits.run(first=VISITS[1:201])
    columns = visits.document["reader"]["columns"]
    columns[0]["bounds"] = [18, 110]
    columns[3]["categories"].append("vaccination")
    del columns[2]
    columns.reverse()
    with pytest.raises(DataRefused, match="'first' and 'renamed'"):
        visits.run(renamed=VISITS[1:201])


def test_people_who_are_cut_into_blocks_anew_are_not_new(visits: Visits) -> None:
    """Each new block has a twentieth of each old one."""
    people = [f"{18 + i % 80},{i / 100},public,pain,yes" for i in range(1200)]
    visits.run(**{f"week-{week:02}": people[60 * week : 60 * (week + 1)] for week in range(20)})
    with pytest.raises(
        DataRefused, match="'ward-00' of population 'tiny' are in other blocks of it, a few in each"
    ):
        visits.run(**{f"ward-{ward:02}": people[ward::20] for ward in range(20)})
    visits.run(late=[f"{18 + i % 80},{i / 100},public,injury,yes" for i in range(60)])


def test_records_that_recur_are_in_as_many_blocks_as_a_person_may_be(visits: Visits) -> None:
    visits.document["blocks_per_person"] = 2
    visits.run(january=VISITS[1:201], february=VISITS[1:211])
    with pytest.raises(DataRefused, match="a record is in 2 blocks at most"):
        visits.run(march=VISITS[1:201])


def test_what_is_kept_of_blocks_is_bounded_and_for_their_owner_alone(visits: Visits, tmp_path: Path) -> None:
    visits.run(first=[f"{18 + i % 80},{i / 100},public,pain,yes" for i in range(3500)])
    (kept,) = (tmp_path / "home/blocks").glob("*.json")
    assert not any((tmp_path / "home/blocks/prepared").iterdir())
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.stat().st_size < 30 * SIZE
    assert "0.01" not in kept.read_text() and "pain" not in kept.read_text()


@pytest.mark.parametrize("kept_apart", [False, True])
def test_a_test_file_of_records_in_blocks_is_refused(visits: Visits, kept_apart: bool) -> None:
    """Of a chosen block, of one before, of one block in part, and of many blocks a few; other people are fine."""
    people = [f"{18 + i % 80},{i / 100},public,pain,yes" for i in range(1300)]
    weeks = {f"week-{week:02}": people[60 * week : 60 * (week + 1)] for week in range(20)}
    visits.hold_out(people[1200:])
    visits.run(**weeks)
    chosen = {"late": [f"{18 + i % 80},{i / 100},public,injury,yes" for i in range(60)]}
    chosen = chosen if kept_apart else weeks
    for held_out, where in (
        (people[60:120][::-1], "in the block 'week-01'"),
        (people[60:90] + people[1200:], "in the block 'week-01'"),
        (people[7:1200:20], "in its blocks, a few in each"),
    ):
        visits.hold_out(held_out)
        with pytest.raises(
            DataRefused, match=f"test file of population 'tiny' are {where}.*published as held"
        ):
            visits.run(**chosen)
    visits.hold_out(people[1200:])
    visits.run(**chosen)
    assert set(visits.kept()) == set(weeks) | set(chosen)


def test_a_block_that_no_run_was_charged_for_may_be_renamed(visits: Visits) -> None:
    visits.prepare(typo=VISITS[1:201])
    visits.prepare(wrong=VISITS[401:601], right=VISITS[601:801])
    visits.prepare(right=VISITS[1:201], wrong=VISITS[401:501])
    visits.charge()
    assert set(visits.kept()) == {"right", "wrong"}
    visits.run(late=VISITS[601:801])
    with pytest.raises(DataRefused, match="'right' and 'typo'"):
        visits.prepare(typo=VISITS[1:201])
    with pytest.raises(DataRefused, match="'one' and 'two'"):
        visits.prepare(one=VISITS[801:901], two=VISITS[801:901])


def test_of_two_names_that_were_prepared_the_one_charged_first_stays(visits: Visits) -> None:
    """Neither preparation knew of the other's run."""
    visits.prepare("mine", first=VISITS[1:201])
    visits.prepare("yours", second=VISITS[1:201][::-1], third=VISITS[401:601])
    visits.charge("mine")
    before = visits.kept()
    for _ in range(2):
        with pytest.raises(DataRefused, match="'first' and 'second'"):
            visits.charge("yours")
    assert visits.kept() == before
    visits.charge("mine")
    visits.prepare("mine", first=VISITS[1:301])
    visits.charge("mine")
    with pytest.raises(DataRefused, match="'first' and 'fourth'"):
        visits.prepare(fourth=VISITS[201:301])


def test_records_that_another_home_prepared_are_charged_in_none(visits: Visits) -> None:
    visits.prepare(first=VISITS[1:201])
    with pytest.raises(
        DataRefused, match=r"'first' .* another home folder, .*`dvc repro --force prepare`\.$"
    ):
        visits.charge(home="other")
    visits.charge()


def test_columns_that_a_card_ignores_later_tell_records_apart_still(visits: Visits) -> None:
    """With a test file no rule of the holdout holds the card to its columns."""
    visits.hold_out(VISITS[1001:1101])
    visits.prepare("early", second=VISITS[201:401])
    columns = visits.document["reader"]["columns"]
    visits.document["reader"]["columns"] = [column for column in columns if column["name"] != "reason"]
    visits.run(first=VISITS[1:201])
    assert {tuple(known["columns"]) for known in visits.kept().values()} == {
        ("age", "distance_km", "returned")
    }
    with pytest.raises(DataRefused, match="by other columns"):
        visits.charge("early")
    visits.document["reader"]["columns"] = [
        *columns[:1],
        {"name": "distance_km", "kind": "ignored"},
        *columns[2:],
    ]
    with pytest.raises(DataRefused, match="'first' and 'renamed'"):
        visits.run(renamed=VISITS[1:201])
    visits.run(second=VISITS[201:401])
    visits.document["reader"] |= {
        "header": False,
        "columns": [columns[0], *columns[2:]],
        "skip_lines": {"train": 1, "test": 1},
    }
    with pytest.raises(DataRefused, match=r"by the column 'distance_km' .* at least as ignored\.$"):
        visits.run(renamed=[",".join(line.split(",")[:1] + line.split(",")[2:]) for line in VISITS[1:201]])


def test_what_older_software_kept_of_blocks_counts_as_charged(visits: Visits) -> None:
    visits.run(first=VISITS[1:201])
    (file,) = (visits.root / "home/blocks").glob("*.json")
    known = visits.kept()
    del known["first"]["columns"]
    file.write_text(json.dumps(known | {"before": ["a digest of encoded records"]}))
    with pytest.raises(DataRefused, match="'first' and 'renamed'"):
        visits.run(renamed=VISITS[1:201])


@pytest.mark.parametrize("text", ["", '{"first": {"marks": [', "[]", '{"first": {}}'])
def test_a_damaged_file_of_what_is_known_is_refused(visits: Visits, text: str) -> None:
    visits.run(first=VISITS[1:201])
    (file,) = (visits.root / "home/blocks").glob("*.json")
    file.write_text(text)
    with pytest.raises(DataRefused, match=r"is damaged, by which blocks .* restore it"):
        visits.prepare(second=VISITS[201:401])
    with pytest.raises(DataRefused, match=r"is damaged, by which blocks .* restore it"):
        visits.charge()


def test_blocks_that_were_prepared_together_count_together_when_they_are_charged(visits: Visits) -> None:
    visits.document["blocks_per_person"] = 2
    visits.prepare("mine", january=VISITS[1:201])
    visits.prepare("yours", february=VISITS[1:201], march=VISITS[1:201])
    visits.charge("mine")
    with pytest.raises(DataRefused, match="a record is in 2 blocks at most"):
        visits.charge("yours")
    assert set(visits.kept()) == {"january"}
