"""Blocks that were seen before under another name: in another order, in part, encoded otherwise, or over time."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from data import DataRefused
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

    def prepare(self, **written: list[str]) -> None:
        """Writes rows as blocks and prepares these, in a home that remembers."""
        for name, lines in written.items():
            (self.root / f"weeks/{name}.csv").write_text("\n".join([VISITS[0], *lines]) + "\n")
        params = parse({"data": {"dataset": "tiny", "blocks": [*written]}}, reads=("data",))
        cards, home, place = self.store(self.document), self.root / "home", self.root / "prepared"
        prepare(params, mirror=None, home=home, destination=place, root=self.root, cards=cards)


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
    visits.prepare(first=VISITS[1:201])
    visits.prepare(second=VISITS[401:601], third=VISITS[601:801])
    with pytest.raises(
        DataRefused, match=f"'first' and '{again}' of population 'tiny' hold the same records or"
    ):
        visits.prepare(**{again: AGAIN[again]})
    visits.prepare(first=VISITS[1:200])
    visits.prepare(second=VISITS[401:601], third=VISITS[601:801])


def test_what_a_block_held_before_stays_its_own(visits: Visits) -> None:
    visits.prepare(first=VISITS[1:201])
    visits.prepare(first=VISITS[201:401])
    for some in (VISITS[11:201], VISITS[201:391], VISITS[1:401]):
        with pytest.raises(DataRefused, match="'first' and 'other'"):
            visits.prepare(other=some)
    visits.prepare(few=VISITS[401:406])
    visits.prepare(few=VISITS[406:411])
    with pytest.raises(DataRefused, match="'few' and 'renamed'"):
        visits.prepare(renamed=VISITS[401:406][::-1])


def test_a_block_in_another_run_with_another_encoding_is_no_new_one(visits: Visits) -> None:
    visits.prepare(first=VISITS[1:201])
    columns = visits.document["reader"]["columns"]
    columns[0]["bounds"] = [18, 110]
    columns[3]["categories"].append("vaccination")
    del columns[2]
    columns.reverse()
    with pytest.raises(DataRefused, match="'first' and 'renamed'"):
        visits.prepare(renamed=VISITS[1:201])


def test_people_who_are_cut_into_blocks_anew_are_not_new(visits: Visits) -> None:
    """Each new block has a twentieth of each old one."""
    people = [f"{18 + i % 80},{i / 100},public,pain,yes" for i in range(1200)]
    visits.prepare(**{f"week-{week:02}": people[60 * week : 60 * (week + 1)] for week in range(20)})
    with pytest.raises(
        DataRefused, match="'ward-00' of population 'tiny' are in other blocks of it, a few in each"
    ):
        visits.prepare(**{f"ward-{ward:02}": people[ward::20] for ward in range(20)})
    visits.prepare(late=[f"{18 + i % 80},{i / 100},public,injury,yes" for i in range(60)])


def test_records_that_recur_are_in_as_many_blocks_as_a_person_may_be(visits: Visits) -> None:
    visits.document["blocks_per_person"] = 2
    visits.prepare(january=VISITS[1:201], february=VISITS[1:211])
    with pytest.raises(DataRefused, match="a record is in 2 blocks at most"):
        visits.prepare(march=VISITS[1:201])


def test_what_is_kept_of_blocks_is_bounded_and_for_their_owner_alone(visits: Visits, tmp_path: Path) -> None:
    visits.prepare(first=[f"{18 + i % 80},{i / 100},public,pain,yes" for i in range(3500)])
    (kept,) = (tmp_path / "home/blocks").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.stat().st_size < 30 * SIZE
    assert "0.01" not in kept.read_text() and "pain" not in kept.read_text()


@pytest.mark.parametrize("kept_apart", [False, True])
def test_a_test_file_of_records_in_blocks_is_refused(visits: Visits, kept_apart: bool) -> None:
    """Of a chosen block, of one before, of one block in part, and of many blocks a few; other people are fine."""
    people = [f"{18 + i % 80},{i / 100},public,pain,yes" for i in range(1300)]
    weeks = {f"week-{week:02}": people[60 * week : 60 * (week + 1)] for week in range(20)}
    visits.hold_out(people[1200:])
    visits.prepare(**weeks)
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
            visits.prepare(**chosen)
    visits.hold_out(people[1200:])
    visits.prepare(**chosen)
    (kept,) = (visits.root / "home/blocks").iterdir()
    assert set(json.loads(kept.read_text())) == set(weeks) | set(chosen)
