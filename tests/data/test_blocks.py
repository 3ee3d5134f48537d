"""Data in blocks: a folder of files or a query; which blocks there are, and what of them is refused."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from data import DataRefused, blocks, catalogue, prepared, public_description
from data.card import DataCard
from data.charged_blocks import ChargedBlocks, preparation_of
from data.known_blocks import KnownBlocks
from data.owner import PUBLIC_KEY
from data.records import Block, whole
from tasks.params import ParamsRefused, parse
from tasks.prepare import hide, prepare

Document = dict[str, Any]
CardOf = Callable[..., DataCard]
WEEKS = ("2026-W01", "2026-W02", "2026-W03")
QUERY = "SELECT week, age, town, answer FROM visits"


def read(card: DataCard, chosen: Sequence[str], *, root: Path, url: str | None) -> Iterator[Block]:
    """The records of blocks by one who has seen none before."""
    known = KnownBlocks(card.population, folder=None, key=PUBLIC_KEY)
    return blocks.read(card, chosen, {}, root=root, url=url, known=known)


def rows(week: int) -> list[tuple[str, str, str]]:
    """Ten records of a week; their ages tell them apart."""
    return [(str(10 * week + i), "Rome" if i % 2 else "Oslo", "yes" if i % 3 else "no") for i in range(10)]


@pytest.fixture
def folder_card(table: Document, tmp_path: Path) -> Document:
    place = tmp_path / "weeks"
    place.mkdir()
    for number, week in enumerate(WEEKS):
        lines = ["age,town,answer", *map(",".join, rows(number))]
        (place / f"{week}.csv").write_text("\n".join(lines) + "\n")
    (place / ".2026-W04.csv").write_text("half a fi")
    (place / "notes.txt").write_text("no block")
    return table | {"files": {}, "blocks": {"kind": "folder", "path": "weeks"}}


@pytest.fixture
def query_card(table: Document, tmp_path: Path) -> tuple[Document, str]:
    url = f"sqlite:///{tmp_path}/visits.sqlite"
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("CREATE TABLE visits (week TEXT, age INTEGER, town TEXT, answer TEXT)"))
        for number, week in enumerate((*WEEKS, None)):
            for age, town, answer in rows(number):
                values = {"week": week, "age": int(age), "town": town, "answer": answer}
                connection.execute(sa.text("INSERT INTO visits VALUES (:week, :age, :town, :answer)"), values)
    source = {"kind": "sql", "url_from": "VISITS_URL", "query": QUERY, "column": "week"}
    return table | {"files": {}, "blocks": source}, url


def test_a_folder_has_a_block_a_file(folder_card: Document, card_of: CardOf, tmp_path: Path) -> None:
    assert blocks.names(card_of(folder_card), root=tmp_path, url=None) == WEEKS


def test_a_folder_and_a_query_of_the_same_records_read_the_same(
    folder_card: Document, query_card: tuple[Document, str], card_of: CardOf, tmp_path: Path
) -> None:
    document, url = query_card
    files, query = card_of(folder_card), card_of(document)
    assert blocks.names(query, root=tmp_path, url=url) == WEEKS
    chosen = WEEKS[1:]
    first, second = (whole(read(card, chosen, root=tmp_path, url=url)) for card in (files, query))
    assert len(first.train) + len(first.test) == 20
    for one, other in ((first.train, second.train), (first.test, second.test)):
        np.testing.assert_array_equal(np.sort(one.features[:, 0]), np.sort(other.features[:, 0]))
    assert min(first.train.features[:, 0].min(), first.test.features[:, 0].min()) == np.float32(0.1)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("2026-W09.csv", "age,town,answer\n12,Rome,maybe-secret\n", "none of the declared classes"),
        ("2026-W09.csv", "age,town\n12,secret\n", "one column 'answer'"),
        ("2026-W09.csv", "age,town,answer\nsecret,Rome,yes\n", "not a number"),
        ("all.csv", "age,town,answer\n", "name"),
        ("2026-W01.csv.gz", "", "two files of the block '2026-W01'"),
    ],
)
def test_a_block_that_does_not_fit_the_card_is_refused_without_a_value(
    folder_card: Document, card_of: CardOf, tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / "weeks" / name).write_text(text)
    with pytest.raises(DataRefused, match=said) as refusal:
        whole(read(card_of(folder_card), (name.removesuffix(".csv"),), root=tmp_path, url=None))
    assert "secret" not in str(refusal.value)


def test_a_database_that_does_not_answer_is_refused_without_its_url(
    query_card: tuple[Document, str], card_of: CardOf, tmp_path: Path
) -> None:
    document, url = query_card
    with pytest.raises(DataRefused, match="set VISITS_URL"):
        blocks.names(card_of(document), root=tmp_path, url=None)
    document["blocks"]["query"] = "SELECT week, secret FROM visits"
    for card, place in ((document, url), (query_card[0], "nosuch://user:hidden@host/db")):
        with pytest.raises(DataRefused, match="cannot be read") as refusal:
            list(read(card_of(card), WEEKS[:1], root=tmp_path, url=place))
        assert "hidden" not in str(refusal.value)


def run(names: list[str], document: Document, store: Callable[..., Path], tmp_path: Path) -> Path:
    """Prepares chosen blocks; returns the folder."""
    params = parse({"data": {"dataset": "tiny", "blocks": names}}, reads=("data",))
    cards, folder = store(document), tmp_path / "prepared"
    prepare(params, mirror=None, home=tmp_path / "home", destination=folder, root=tmp_path, cards=cards)
    return folder


def test_what_makes_the_blocks_of_private_records_is_described(
    folder_card: Document, query_card: tuple[Document, str], table: Document, card_of: CardOf
) -> None:
    by = [public_description(card_of(card)).blocks_by for card in (folder_card, query_card[0], table)]
    assert by == ["the files of a folder", "the column 'week' of a query", None]
    other = query_card[0] | {"blocks": query_card[0]["blocks"] | {"query": f"{QUERY} WHERE age > 0"}}
    assert public_description(card_of(other)).blocks_by == by[1]
    moved = folder_card | {"blocks": {"kind": "folder", "path": "elsewhere"}}
    assert public_description(card_of(moved)).blocks_by == by[0]
    assert public_description(card_of(folder_card | {"public": True})).blocks_by is None


def test_preparing_reads_the_named_blocks_and_says_so(
    folder_card: Document, store: Callable[..., Path], tmp_path: Path
) -> None:
    folder = run(["2026-W03", "2026-W02"], folder_card, store, tmp_path)
    found, salt = prepared.load(folder), (folder / "salt").read_bytes()
    assert found.public.blocks == WEEKS[1:]
    assert len(found.train_labels) + len(found.test_labels) == 20
    size = sum(path.stat().st_size for path in folder.iterdir())
    again = run(["2026-W03", "2026-W02"], folder_card, store, tmp_path)
    assert (again / "salt").read_bytes() == salt
    with (tmp_path / "weeks/2026-W03.csv").open("a") as file:
        file.write("99,Rome,no\n")
    run(["2026-W03", "2026-W02"], folder_card, store, tmp_path)
    assert (folder / "salt").read_bytes()[:32] != salt[:32]
    assert sum(path.stat().st_size for path in folder.iterdir()) == size
    assert prepared.load(run([], folder_card, store, tmp_path)).public.blocks == WEEKS


def test_a_block_that_is_not_there_leaves_everything_as_it_was(
    folder_card: Document, store: Callable[..., Path], tmp_path: Path
) -> None:
    folder = run([], folder_card, store, tmp_path)
    before = (folder / "public.json").read_text()
    with pytest.raises(DataRefused, match="no block '2026-W99'"):
        run(["2026-W99"], folder_card, store, tmp_path)
    assert (folder / "public.json").read_text() == before


def test_blocks_of_a_card_without_blocks_are_refused(
    store: Callable[..., Path], table: Document, tmp_path: Path
) -> None:
    with pytest.raises(DataRefused, match="says no `blocks`"):
        run(["2026-W01"], table, store, tmp_path)
    with pytest.raises(ParamsRefused, match=r"data\.blocks"):
        run([""], table, store, tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"records": {"train": 10, "test": 10}}, "at_most"),
        ({"files": {"train": {"path": "t.csv", "sha256": "0" * 64}}}, "test file or none"),
        ({"blocks": {"kind": "folder", "path": "../weeks"}}, "relative"),
        ({"split": None}, "split is needed"),
    ],
)
def test_a_card_that_contradicts_its_blocks_is_refused(
    folder_card: Document, store: Callable[..., Path], changes: Document, said: str
) -> None:
    with pytest.raises(DataRefused, match=said):
        catalogue.card("tiny", store(folder_card | changes))


def test_records_under_two_names_are_refused(folder_card: Document, card_of: CardOf, tmp_path: Path) -> None:
    card = card_of(folder_card)
    (tmp_path / "weeks/again.csv").symlink_to("2026-W01.csv")
    assert len(whole(read(card, ("again", "2026-W02"), root=tmp_path, url=None)).train) > 0
    with pytest.raises(
        DataRefused, match="'again' and '2026-W01' of population 'tiny' hold the same records"
    ):
        whole(read(card, ("again", "2026-W01"), root=tmp_path, url=None))
    (tmp_path / "weeks/again.csv").rename(tmp_path / "weeks/2026-w01.csv")
    with pytest.raises(DataRefused, match="differ in case alone"):
        blocks.names(card, root=tmp_path, url=None)


def test_a_block_that_was_renamed_is_no_new_one(
    folder_card: Document, store: Callable[..., Path], tmp_path: Path
) -> None:
    """As a file was: its records have spent of the cap under their first name. Another week of another home is free."""
    cards = store(folder_card | {"public": False})

    def prepared_of(block: str, home: str) -> None:
        params = parse({"data": {"dataset": "tiny", "blocks": [block]}}, reads=("data",))
        folder = tmp_path / home
        prepare(params, mirror=None, home=folder, destination=folder / "out", root=tmp_path, cards=cards)
        preparation = preparation_of(prepared.salt_of(folder / "out"), [block])
        ChargedBlocks("tiny", folder=folder / "blocks").charge(preparation, [block])

    prepared_of("2026-W01", "home")
    (tmp_path / "weeks/2026-W01.csv").rename(tmp_path / "weeks/fresh.csv")
    with pytest.raises(DataRefused, match="'2026-W01' and 'fresh' of population 'tiny'"):
        prepared_of("fresh", "home")
    prepared_of("2026-W02", "home")
    prepared_of("fresh", "another")
    kept = b"".join(path.read_bytes() for path in (tmp_path / "home/blocks").glob("*.json"))
    assert hashlib.sha256((tmp_path / "weeks/fresh.csv").read_bytes()).hexdigest().encode() not in kept


def test_what_two_processes_have_seen_at_once_is_all_kept(
    folder_card: Document, card_of: CardOf, tmp_path: Path
) -> None:
    def known() -> KnownBlocks:
        return KnownBlocks("tiny", folder=tmp_path / "blocks", key=PUBLIC_KEY)

    card, both = card_of(folder_card), (known(), known())
    for week, one in zip(WEEKS, both, strict=False):
        list(blocks.read(card, (week,), {}, root=tmp_path, url=None, known=one))
    for week, one in zip(WEEKS, both, strict=False):
        one.note(week)
        ChargedBlocks("tiny", folder=tmp_path / "blocks").charge(week, [week])
    for week in WEEKS[:2]:
        (tmp_path / f"weeks/{week}.csv").rename(tmp_path / f"weeks/again-{week}.csv")
        with pytest.raises(DataRefused, match=week):
            list(blocks.read(card, (f"again-{week}",), {}, root=tmp_path, url=None, known=known()))


def test_a_database_that_minds_no_case_gives_no_row_to_two_blocks(
    query_card: tuple[Document, str], card_of: CardOf, tmp_path: Path
) -> None:
    document, url = query_card
    document["blocks"]["query"] = QUERY.replace("week,", "week COLLATE NOCASE AS week,")
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("INSERT INTO visits VALUES ('2026-w01', 7, 'Rome', 'no')"))
    card = card_of(document)
    with pytest.raises(DataRefused, match="several blocks"):
        whole(read(card, blocks.names(card, root=tmp_path, url=url)[:1], root=tmp_path, url=url))


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
    assert blocks.names(card, root=tmp_path, url=url) == tuple(declared)
    found = whole(read(card, declared, root=tmp_path, url=url))
    assert len(found.train) + len(found.test) == 20 + late
    with pytest.raises(DataRefused, match="no block '2026-W99'"):
        next(read(card, ("2026-W99",), root=tmp_path, url=url))
    assert "names" not in card_of(document).model_dump_json()


def test_a_url_that_cannot_be_read_is_refused_without_its_password(
    query_card: tuple[Document, str], card_of: CardOf, tmp_path: Path
) -> None:
    url = "postgresql+psycopg://me:pass@word:hidden@host/db"
    with pytest.raises(DataRefused, match="VISITS_URL") as refusal:
        blocks.names(card_of(query_card[0]), root=tmp_path, url=url)
    assert "hidden" not in str(refusal.value)


def test_what_dvc_keeps_of_private_records_is_for_their_owner_alone(tmp_path: Path) -> None:
    hide(tmp_path / ".dvc/cache")
    assert not (tmp_path / ".dvc").exists()
    (tmp_path / ".dvc/cache").mkdir(parents=True, mode=0o755)
    hide(tmp_path / ".dvc/cache")
    assert (tmp_path / ".dvc/cache").stat().st_mode & 0o777 == 0o700
