"""Data in blocks: a folder of files or a query; which blocks there are, and what of them is refused."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from data import DataRefusedError, dataset_info, prepared, reading
from data.card import DataCard, data_card
from data.files import PUBLIC_KEY
from data.readers.records import RecordBatch, RecordChunk
from data.readers.rows import RowReader
from data.reading import Digests, block_names, read_blocks
from tasks.check_data import check_data
from tasks.config.params import ParamsRefusedError, parse
from tasks.prepare import prepare
from tasks.runs.dvc_process import has_other_blocks
from tests.data.conftest import CardOf, Document, Store
from tests.support.cards import csv_of, label, number
from tests.support.parts import whole
from tests.support.postgres import new_database, postgres_server  # noqa: F401 - fixtures
from tests.support.refusals import refused_as

WEEKS = ("2026-W01", "2026-W02", "2026-W03")
QUERY = "SELECT week, age, town, answer FROM visits"


def read(card: DataCard, chosen: Sequence[str], *, root: Path, url: str | None) -> Iterator[RecordChunk]:
    """The records of blocks."""
    digests = Digests(card.population, key=PUBLIC_KEY)
    return read_blocks(card, chosen, {}, root=root, url=url, digests=digests)


def digests_of(
    card: DataCard, chosen: Sequence[str], root: Path, *, url: str | None = None, key: bytes = PUBLIC_KEY
) -> dict[str, set[str]]:
    """The digests that reading blocks gives of the content of each."""
    digests = Digests(card.population, key=key)
    whole(read_blocks(card, chosen, {}, root=root, url=url, digests=digests))
    return {
        name: {digest for digest in found if not digest.startswith("way:")}
        for name, found in digests.by_block.items()
    }


def rows(week: int) -> list[tuple[str, str, str]]:
    """Ten records of a week; their ages tell them apart."""
    return [(str(10 * week + i), "Rome" if i % 2 else "Oslo", "yes" if i % 3 else "no") for i in range(10)]


@pytest.fixture
def folder_card(table: Document, tmp_path: Path) -> Document:
    place = tmp_path / "weeks"
    place.mkdir()
    for index, week in enumerate(WEEKS):
        lines = ["age,town,answer", *map(",".join, rows(index))]
        (place / f"{week}.csv").write_text("\n".join(lines) + "\n")
    (place / ".2026-W04.csv").write_text("half a fi")
    (place / "notes.txt").write_text("no block")
    return table | {"files": {}, "blocks": {"kind": "folder", "path": "weeks"}}


def of_a_query(table: Document, url: str) -> Document:
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("CREATE TABLE visits (week TEXT, age INTEGER, town TEXT, answer TEXT)"))
        for number, week in enumerate((*WEEKS, None)):
            for age, town, answer in rows(number):
                values = {"week": week, "age": int(age), "town": town, "answer": answer}
                connection.execute(sa.text("INSERT INTO visits VALUES (:week, :age, :town, :answer)"), values)
    source = {"kind": "sql", "url_from": "VISITS_URL", "query": QUERY, "column": "week"}
    return table | {"files": {}, "blocks": source}


@pytest.fixture
def query_card(table: Document, tmp_path: Path) -> tuple[Document, str]:
    url = f"sqlite:///{tmp_path}/visits.sqlite"
    return of_a_query(table, url), url


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_row_that_moves_between_blocks_while_they_are_read_is_in_one_of_them(
    kind: str,
    table: Document,
    store: Store,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it moves after the blocks' names were read, or after the first block."""
    url = f"sqlite:///{tmp_path}/visits.sqlite"
    if kind == "postgresql":
        url = request.getfixturevalue("new_database")().render_as_string(hide_password=False)
    document = of_a_query(table | {"public": True}, url)
    monkeypatch.setenv("VISITS_URL", url)
    with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
        # An index, so that the order of rows does not stop a writer; a log, so that SQLite lets one write.
        connection.execute(sa.text("CREATE INDEX of_weeks ON visits (week)"))
    if kind == "sqlite":
        with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")

    def move(to: str) -> None:
        with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
            connection.execute(sa.text("UPDATE visits SET week = :week WHERE week IS NOT NULL"), {"week": to})

    read, encode = reading.read_blocks, RowReader.records

    def after_the_names(*given: Any, **named: Any) -> Iterator[RecordChunk]:
        move("2026-W09")
        return read(*given, **named)

    def after_a_block(reader: RowReader, *given: Any) -> RecordBatch:
        move("2026-W03")
        return encode(reader, *given)

    monkeypatch.setattr(reading, "read_blocks", after_the_names)
    monkeypatch.setattr(RowReader, "records", after_a_block)
    found = prepared.load(run([], document, store, tmp_path))
    assert found.info.blocks == WEEKS
    ages = np.concatenate([found.train_features[:, 0], found.test_features[:, 0]]) * 100
    assert sorted(np.round(ages).astype(int).tolist()) == sorted(
        int(age) for week in range(3) for age, _, _ in rows(week)
    )


def test_check_of_blocks_by_query_says_that_the_column_must_not_change(
    folder_card: Document, query_card: tuple[Document, str], store: Store, tmp_path: Path
) -> None:
    for document, said in ((query_card[0], "column 'week' of a query"), (folder_card, "")):
        found = check_data(str(store(document) / "tiny.yaml"), tmp_path, counted=False)
        assert said in (found.warning or "")
        assert (found.warning is None) == (said == "")


def test_a_folder_and_a_query_of_the_same_records_read_the_same(
    folder_card: Document, query_card: tuple[Document, str], card_of: CardOf, tmp_path: Path
) -> None:
    document, url = query_card
    files, query = card_of(folder_card), card_of(document)
    for card in (files, query):
        assert block_names(card, root=tmp_path, url=url) == WEEKS
    chosen = WEEKS[1:]
    first, second = (whole(read(card, chosen, root=tmp_path, url=url)) for card in (files, query))
    assert len(first.train) + len(first.test) == 20
    for one, other in ((first.train, second.train), (first.test, second.test)):
        np.testing.assert_array_equal(np.sort(one.features[:, 0]), np.sort(other.features[:, 0]))
    assert min(first.train.features[:, 0].min(), first.test.features[:, 0].min()) == np.float32(0.1)


@pytest.mark.parametrize(
    ("name", "text", "code", "fields"),
    [
        (
            "2026-W09.csv",
            "age,town,answer\n12,Rome,maybe-secret\n",
            "bad_value",
            {"column": "answer", "expected": "a class"},
        ),
        ("2026-W09.csv", "age,town\n12,secret\n", "missing_column", {"column": "answer"}),
        (
            "2026-W09.csv",
            "age,town,answer\nsecret,Rome,yes\n",
            "bad_value",
            {"column": "age", "expected": "a number"},
        ),
        ("all.csv", "age,town,answer\n", "bad_block_names", {"reserved": "all"}),
        ("2026-W01.csv.gz", "", "bad_block_names", {"block": "2026-W01"}),
    ],
)
def test_a_block_that_does_not_fit_the_card_is_refused_without_a_value(
    folder_card: Document, card_of: CardOf, tmp_path: Path, name: str, text: str, code: str, fields: Document
) -> None:
    (tmp_path / "weeks" / name).write_text(text)
    with refused_as(code, DataRefusedError, **fields) as refusal:
        card = card_of(folder_card)
        assert name.removesuffix(".csv") in block_names(card, root=tmp_path, url=None)
        whole(read(card, (name.removesuffix(".csv"),), root=tmp_path, url=None))
    assert "secret" not in str(refusal.value)


def test_a_database_that_does_not_answer_is_refused_without_its_url(
    query_card: tuple[Document, str], card_of: CardOf, tmp_path: Path
) -> None:
    document, url = query_card
    with refused_as("no_database", DataRefusedError, variable="VISITS_URL"):
        block_names(card_of(document), root=tmp_path, url=None)
    document["blocks"]["query"] = "SELECT week, secret FROM visits"
    others = ("nosuch://user:hidden@host/db", "postgresql+psycopg://me:pass@word:hidden@host/db")
    for place in (url, *others):
        with refused_as("no_database", DataRefusedError, variable="VISITS_URL") as refusal:
            list(read(card_of(document), WEEKS[:1], root=tmp_path, url=place))
        assert "hidden" not in str(refusal.value)


def run(names: list[str], document: Document, store: Store, tmp_path: Path) -> Path:
    """Prepares chosen blocks; returns the folder."""
    params = parse({"data": {"dataset": "tiny", "blocks": names}}, reads=("data",))
    cards, folder = store(document), tmp_path / "prepared"
    prepare(params, mirror=None, home=tmp_path / "home", destination=folder, root=tmp_path, cards=cards)
    return folder


@pytest.mark.parametrize("named", [[], list(WEEKS)])
@pytest.mark.parametrize("public", [True, False])
def test_a_block_that_was_corrected_is_prepared_again_though_dvc_does_not_watch_it(
    folder_card: Document, store: Store, tmp_path: Path, own_home: Path, named: list[str], public: bool
) -> None:
    document = folder_card | {"public": public}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/cards").symlink_to(store(document))
    (tmp_path / "params.yaml").write_text(f"data: {{dataset: tiny, blocks: {named}}}\n")
    assert not has_other_blocks(tmp_path)  # nothing is prepared yet

    def prepared_now() -> None:
        params = parse({"data": {"dataset": "tiny", "blocks": named}}, reads=("data",))
        place, cards = tmp_path / "datasets/prepared", tmp_path / "cards"
        prepare(params, mirror=None, home=own_home, destination=place, root=tmp_path, cards=cards)

    prepared_now()
    assert not has_other_blocks(tmp_path)
    corrected = tmp_path / "weeks" / f"{WEEKS[1]}.csv"
    corrected.write_text(corrected.read_text().replace("Rome", "Oslo"))
    assert has_other_blocks(tmp_path)
    prepared_now()
    assert not has_other_blocks(tmp_path)
    corrected.write_text("age,town,answer\n")
    assert has_other_blocks(tmp_path)
    prepared_now()
    assert not has_other_blocks(tmp_path)
    corrected.with_name("2026-W04.csv").write_text("age,town,answer\n1,Rome,no\n")
    assert has_other_blocks(tmp_path) == (not named)


def test_what_makes_the_blocks_of_private_records_is_described(
    folder_card: Document, query_card: tuple[Document, str], table: Document, card_of: CardOf
) -> None:
    by = [dataset_info(card_of(card)).blocks_by for card in (folder_card, query_card[0], table)]
    assert by == ["the files of a folder", "the column 'week' of a query", None]
    other = query_card[0] | {"blocks": query_card[0]["blocks"] | {"query": f"{QUERY} WHERE age > 0"}}
    assert dataset_info(card_of(other)).blocks_by == by[1]
    moved = folder_card | {"blocks": {"kind": "folder", "path": "elsewhere"}}
    assert dataset_info(card_of(moved)).blocks_by == by[0]
    assert dataset_info(card_of(folder_card | {"public": True})).blocks_by is None


def test_preparing_reads_the_named_blocks_and_says_so(
    folder_card: Document, store: Store, tmp_path: Path
) -> None:
    folder = run(["2026-W03", "2026-W02"], folder_card, store, tmp_path)
    found, salt = prepared.load(folder), (folder / "salt").read_bytes()
    assert found.info.blocks == WEEKS[1:]
    assert len(found.train_labels) + len(found.test_labels) == 20
    size = sum(path.stat().st_size for path in folder.iterdir())
    again = run(["2026-W03", "2026-W02"], folder_card, store, tmp_path)
    assert (again / "salt").read_bytes() == salt
    with (tmp_path / "weeks/2026-W03.csv").open("a") as file:
        file.write("99,Rome,no\n")
    run(["2026-W03", "2026-W02"], folder_card, store, tmp_path)
    assert (folder / "salt").read_bytes()[:32] != salt[:32]
    assert sum(path.stat().st_size for path in folder.iterdir()) == size
    assert prepared.load(run([], folder_card, store, tmp_path)).info.blocks == WEEKS


def test_a_block_that_is_not_there_leaves_everything_as_it_was(
    folder_card: Document, store: Store, tmp_path: Path
) -> None:
    folder = run([], folder_card, store, tmp_path)
    before = (folder / "public.json").read_text()
    with refused_as("no_blocks", DataRefusedError):
        run(["2026-W99"], folder_card, store, tmp_path)
    assert (folder / "public.json").read_text() == before


def test_blocks_of_a_card_without_blocks_are_refused(store: Store, table: Document, tmp_path: Path) -> None:
    with refused_as("no_blocks", DataRefusedError):
        run(["2026-W01"], table, store, tmp_path)
    with pytest.raises(ParamsRefusedError):
        run([""], table, store, tmp_path)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"records": {"train": 10, "test": 10}}, ("blocks", "records.at_most")),
        ({"files": {"train": {"path": "t.csv", "sha256": "0" * 64}}}, ("blocks", "files")),
        ({"blocks": {"kind": "folder", "path": "../weeks"}}, ("blocks.path",)),
        ({"split": None}, ("split", "files.test")),
    ],
)
def test_a_card_that_contradicts_its_blocks_is_refused(
    folder_card: Document, store: Store, changes: Document, keys: tuple[str, ...]
) -> None:
    with refused_as("bad_card", DataRefusedError, keys=keys):
        data_card("tiny", store(folder_card | changes))


def test_names_that_differ_in_case_alone_are_refused(
    folder_card: Document, card_of: CardOf, tmp_path: Path
) -> None:
    (tmp_path / "weeks/2026-w01.csv").symlink_to("2026-W01.csv")
    with refused_as("bad_block_names", DataRefusedError):
        block_names(card_of(folder_card), root=tmp_path, url=None)


def write_week(root: Path, name: str, lines: Sequence[str]) -> None:
    (root / f"weeks/{name}.csv").write_text("\n".join(["age,town,answer", *lines]) + "\n")


WEEK = [",".join(row) for row in rows(0)]
AGAIN = {
    "the same file": WEEK,
    "in another order": WEEK[::-1],
    "with spaces": [line.replace(",", " , ") for line in WEEK],
}
OTHERS = {
    "one less": WEEK[1:],
    "one twice": [*WEEK, WEEK[0]],
    "one instead of another": [*WEEK[1:], WEEK[1]],
    "one that differs": [*WEEK[1:], "0,Oslo,yes"],
}


@pytest.mark.parametrize("lines", [*AGAIN.values(), *OTHERS.values()], ids=[*AGAIN, *OTHERS])
def test_two_blocks_share_a_digest_where_they_hold_exactly_the_same(
    folder_card: Document, card_of: CardOf, tmp_path: Path, lines: list[str]
) -> None:
    write_week(tmp_path, "other", lines)
    found = digests_of(card_of(folder_card), ("2026-W01", "other"), tmp_path)
    assert bool(found["2026-W01"] & found["other"]) == (lines in AGAIN.values())


def test_a_file_is_the_same_whatever_the_card_makes_of_it(
    folder_card: Document, card_of: CardOf, tmp_path: Path
) -> None:
    (tmp_path / "weeks/other.csv").symlink_to("2026-W01.csv")
    before = digests_of(card_of(folder_card), ("2026-W01",), tmp_path)["2026-W01"]
    folder_card["reader"]["columns"][1] = {"name": "town", "kind": "ignored"}
    (after,) = digests_of(card_of(folder_card), ("other",), tmp_path).values()
    assert len(before & after) == 1


def test_the_rows_of_a_query_have_a_digest_in_any_order(
    query_card: tuple[Document, str], card_of: CardOf, tmp_path: Path
) -> None:
    document, url = query_card
    with sa.create_engine(url).begin() as connection:
        copied = "INSERT INTO visits SELECT 'other', age, town, answer FROM visits WHERE week = '2026-W01'"
        connection.execute(sa.text(f"{copied} ORDER BY age DESC"))
    found = digests_of(card_of(document), (*WEEKS, "other"), tmp_path, url=url)
    assert found["other"] == found[WEEKS[0]] != found[WEEKS[1]]


def test_small_blocks_share_a_digest_only_with_the_same_rows(
    folder_card: Document, card_of: CardOf, tmp_path: Path
) -> None:
    """Their rows are of few kinds."""
    card, draw, same = card_of(folder_card), random.Random(2), 0
    for _ in range(50):
        one, other = (
            [f"50,{draw.choice(('Rome', 'Oslo'))},{draw.choice(('yes', 'no'))}" for _ in range(6)]
            for _ in range(2)
        )
        write_week(tmp_path, "one", one)
        write_week(tmp_path, "other", other)
        found = digests_of(card, ("one", "other", WEEKS[1]), tmp_path)
        assert bool(found["one"] & found["other"]) == (sorted(one) == sorted(other))
        same += sorted(one) == sorted(other)
    assert 0 < same < 10


def test_empty_blocks_are_not_the_same_and_look_like_any_other(
    folder_card: Document, card_of: CardOf, tmp_path: Path
) -> None:
    for name in ("one", "other"):
        write_week(tmp_path, name, [])
    found = digests_of(card_of(folder_card), ("2026-W01", "one", "other"), tmp_path)
    assert not found["one"] & found["other"]
    assert {len(digest) for digests in found.values() for digest in digests} == {64}
    assert {len(digests) for digests in found.values()} == {2}


def test_nobody_without_the_key_can_test_a_guess_of_a_block(
    folder_card: Document, card_of: CardOf, tmp_path: Path
) -> None:
    """Neither by a key of their own nor by the digests of another population under the owner's."""
    card, other = card_of(folder_card), card_of(folder_card | {"population": "others"})
    found = [
        digests_of(card, ("2026-W01",), tmp_path)["2026-W01"],
        digests_of(card, ("2026-W01",), tmp_path, key=bytes(31) + b"x")["2026-W01"],
        digests_of(other, ("2026-W01",), tmp_path)["2026-W01"],
    ]
    assert len(set.union(*found)) == 6
    plain = hashlib.sha256((tmp_path / "weeks/2026-W01.csv").read_bytes()).hexdigest()
    assert plain not in set.union(*found)


def test_digests_say_by_which_key_and_columns_they_were_made(
    folder_card: Document, card_of: CardOf, tmp_path: Path
) -> None:
    def way(document: Document, block: str, key: bytes = PUBLIC_KEY) -> str:
        digests = Digests("tiny", key=key)
        whole(read_blocks(card_of(document), (block,), {}, root=tmp_path, url=None, digests=digests))
        return digests.by_block[block][-1]

    fewer = folder_card | {"reader": csv_of(number("age", 0, 100), label("answer"))}
    one = way(folder_card, WEEKS[0])
    assert one.startswith("way:") and one == way(folder_card, WEEKS[1])
    assert len({one, way(fewer, WEEKS[0]), way(folder_card, WEEKS[0], bytes(31) + b"x")}) == 3


def test_what_prepare_found_is_kept_with_the_records(
    folder_card: Document, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "weeks/again.csv").symlink_to("2026-W01.csv")
    kept = prepared.block_digests(run(["again", *WEEKS[:2]], folder_card, store, tmp_path))
    assert list(kept) == [*WEEKS[:2], "again"]
    assert kept["again"] == kept["2026-W01"] != kept["2026-W02"]
    (tmp_path / "prepared/digests.json").unlink()
    with refused_as("not_prepared", DataRefusedError, folder=tmp_path / "prepared"):
        prepared.block_digests(tmp_path / "prepared")


@pytest.mark.parametrize("held_out", [WEEK[::-1], WEEK])
def test_a_test_file_that_is_exactly_a_block_is_refused(
    folder_card: Document, store: Store, tmp_path: Path, held_out: list[str]
) -> None:
    def hold_out(lines: list[str]) -> Document:
        file = tmp_path / "test.csv"
        file.write_text("\n".join(["age,town,answer", *lines]) + "\n")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        return folder_card | {"split": None, "files": {"test": {"path": "test.csv", "sha256": digest}}}

    with refused_as("block_held_out", DataRefusedError, population="tiny", block="2026-W01"):
        run([], hold_out(held_out), store, tmp_path)
    folder = run([], hold_out([*held_out[1:], "99,Rome,yes"]), store, tmp_path)
    assert list(prepared.block_digests(folder)) == [*WEEKS]


def test_a_database_that_minds_no_case_gives_no_row_to_two_blocks(
    query_card: tuple[Document, str], card_of: CardOf, tmp_path: Path
) -> None:
    document, url = query_card
    document["blocks"]["query"] = QUERY.replace("week,", "week COLLATE NOCASE AS week,")
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("INSERT INTO visits VALUES ('2026-w01', 7, 'Rome', 'no')"))
    card = card_of(document)
    with refused_as("bad_block_names", DataRefusedError, block="2026-W01"):
        whole(read(card, block_names(card, root=tmp_path, url=url)[:1], root=tmp_path, url=url))


@pytest.mark.parametrize("late", [0, 1])
def test_declared_names_of_blocks_tell_nothing_of_the_rows(
    query_card: tuple[Document, str], card_of: CardOf, tmp_path: Path, late: int
) -> None:
    """One record that alone is in a block, or is alone in being in none that is declared."""
    document, url = query_card
    declared = [*WEEKS[:2], "2026-W09"]
    card = card_of(document | {"blocks": document["blocks"] | {"names": declared[::-1]}})
    with sa.create_engine(url).begin() as connection:
        for week in ("2026-W09", "2026-W99")[: 2 * late]:
            connection.execute(sa.text(f"INSERT INTO visits VALUES ('{week}', 7, 'Rome', 'no')"))
    assert block_names(card, root=tmp_path, url=url) == tuple(declared)
    found = whole(read(card, declared, root=tmp_path, url=url))
    assert len(found.train) + len(found.test) == 20 + late
    assert "names" not in card_of(document).model_dump_json()
