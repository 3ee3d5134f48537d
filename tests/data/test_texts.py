"""Texts of one's own, in every format of rows: a row is a record, whatever is in it."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from data import DataRefusedError, dataset_info
from data.card import DataCard
from data.description import rule_of
from data.files import PUBLIC_KEY
from data.new_records import records_in
from data.preparation import Preparation
from data.readers.records import RecordBatch
from data.reading import Digests, read, read_blocks, row_reader, word_list
from tests.data.conftest import CardOf, Document, named_files
from tests.support.parts import whole
from tests.support.refusals import contradicting, refused, refused_as

ROWS = [
    ("On time", "good", "pos"),
    ("", "the the film", "neg"),
    ('A "quoted", one', "naïve", "pos"),
    ("x", "y" * 50, "neg"),
]
TEXTS = ["On time|good", "|the the film", 'A "quoted", one|naïve', "x|" + "y" * 28]


@pytest.fixture
def card(images: Document, card_of: CardOf) -> CardOf:
    """A card of rows with the columns title, body and mood."""
    del images["shape"]
    reader: Document = {
        "kind": "texts",
        "format": "csv",
        "columns": ["title", "body"],
        "label": "mood",
        "join": "|",
    }
    own: Document = {
        "public": False,
        "classes": ["neg", "pos"],
        "records": {"at_most": 1000},
        "files": {"train": {"path": "t", "sha256": "0" * 64}},
        "split": {"salt": "s", "test_fraction": 0.5},
    }
    reader["longest"] = 30
    return lambda more={}, **changes: card_of(images | own | {"reader": reader | changes} | more)


def write(folder: Path, form: str, rows: list[tuple[str, str, str]] = ROWS) -> Path:
    """The rows as a file of a format; as `save_to_disk` writes them with the class as its number."""
    path = folder / f"t.{form}"
    columns = dict(zip(("title", "body", "mood"), zip(*rows, strict=True), strict=True))
    if form == "csv":
        quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
        path.write_text("\n".join(["title,body,mood", *quoted]) + "\n", encoding="utf-8")
    elif form == "jsonl":
        path.write_text("\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows))
    elif form == "parquet":
        parquet.write_table(pa.table(columns), path)
    else:
        path.mkdir()
        table = pa.table(columns | {"mood": [("neg", "pos").index(one) for one in columns["mood"]]})
        for place, some in enumerate((table[:3], table[3:])):
            with (
                pa.OSFile(str(path / f"data-{place}.arrow"), "wb") as file,
                pa.ipc.new_stream(file, table.schema) as to,
            ):
                to.write_table(some)
        listed = [{"filename": f"data-{place}.arrow"} for place in range(2)]
        (path / "state.json").write_text(json.dumps({"_data_files": listed}))
    return path


def records(card: DataCard, path: Path, *, as_texts: bool = False, **files: Path) -> RecordBatch:
    """All rows in their order, whatever their side."""
    reader = row_reader(card, {"train": path, **files}, key=PUBLIC_KEY, as_texts=as_texts)
    assert reader is not None
    return whole(reader.read()).train


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "datasets"])
def test_columns_are_joined_and_cut_in_every_format(card: CardOf, tmp_path: Path, form: str) -> None:
    spellings = {"spellings": {"neg": ["0"], "pos": ["1"]}} if form == "datasets" else {}
    own, path = card(format=form, **spellings), write(tmp_path, form)
    found = records(own, path)
    assert found.features.tolist() == TEXTS and found.labels.tolist() == [1, 0, 1, 0]
    (unseen,) = records_in(
        path,
        Preparation.from_card(own, "none", None),
        (4,),
        encode=lambda texts: np.array([[len(t)] for t in texts]),
    )
    assert unseen.features[:, 0].tolist() == [len(text) for text in TEXTS]
    assert records(card(format=form, longest=4, keep="end", **spellings), path).features[0] == "good"


def test_texts_in_another_encoding_are_read_as_declared(card: CardOf, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("title;körper;mood\nÄ;“naïve”;pos\n".encode("windows-1252"))
    how = {"separator": ";", "columns": ["title", "körper"], "encoding": "windows-1252"}
    assert records(card(**how), path).features.tolist() == ["Ä|“naïve”"]


def test_words_become_the_tokens_of_a_public_list(card: CardOf, tmp_path: Path) -> None:
    listed = tmp_path / "words.txt"
    listed.write_text("the\nfilm\ngood\n")
    own = card({"files": named_files("train", "words")}, tokens={"vocabulary": 5, "length": 3})
    path = write(tmp_path, "csv")
    found = records(own, path, words=listed)
    assert found.features.dtype == np.int32 and found.features[:2].tolist() == [[1, 1, 4], [2, 2, 3]]
    assert dataset_info(own).tokens == 5 and word_list(own, {"words": listed}) == b"the\nfilm\ngood\n"
    (tmp_path / "new.txt").write_text("the film\n" + "good " * 50)
    (lines,) = records_in(
        tmp_path / "new.txt", Preparation.from_card(own, "none", b"the\nfilm\ngood\n"), (3,)
    )
    assert lines.features.tolist() == [[0, 2, 3], [4, 4, 4]]
    (tmp_path / "new.csv").write_text("title,body\nthe,good\n")
    (unseen,) = records_in(
        tmp_path / "new.csv", Preparation.from_card(own, "none", b"the\nfilm\ngood\n"), (3,)
    )
    assert unseen.features.tolist() == [[0, 2, 4]]
    assert whole(read(own, {"train": path, "words": listed}, as_texts=True)).train.features.dtype == object


def test_a_private_list_of_words_does_not_become_public(card: CardOf, tmp_path: Path) -> None:
    """It would be in the file of every model; a private archive that has the list in it, too."""
    listed = tmp_path / "words.txt"
    listed.write_text("the\nfilm\ngood\n")
    files = named_files("train", "words")
    files["words"] = {"path": "words", "keyed_sha256": "2" * 64}
    own = card({"files": files}, tokens={"vocabulary": 5, "length": 3})
    words = "in a file that its card declares private, .* published in every model's file; .* by sha256"
    with refused(words, DataRefusedError):
        word_list(own, {"words": listed})
    assert word_list(card(), {}) is None


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_number_is_predicted_from_texts(card: CardOf, tmp_path: Path, form: str) -> None:
    """Within its bounds, scaled to [-1, 1]; a line that is no row is of the lowest."""
    own = card({"classes": [], "target": {"bounds": [1.0, 5.0]}}, format=form)
    path = write(tmp_path, form, [("a", "b", "3"), ("c", "d", "9.5"), ("e", "f", "1.0")])
    expected = [0.0, 1.0, -1.0]
    if form != "parquet":
        path.write_text(path.read_text() + "\nno row")
        expected.append(-1.0)
    found = records(own, path)
    assert (found.labels.dtype, found.labels.tolist()) == (np.float32, expected)
    with refused_as("bad_value", DataRefusedError, column="mood", expected="a number"):
        records(own, write(tmp_path, form, [("a", "b", "three")]))


BROKEN_CSV = b"""title,body,mood
ok,ok,pos
bad\xff,text,pos
one field
\xff\xfe
,,pos
"open,quote,pos
a,b,c,pos
last,one,pos
"""
BROKEN_JSONL = b"\n".join(
    [
        b'{"title": "ok", "body": "ok", "mood": "pos"}',
        b'{"title": "\xff", "body": "text", "mood": "pos"}',
        b"no json",
        b"[1, 2]",
        b'{"title": "\\ud800", "body": null, "mood": "pos"}',
        b"[" * 100_000,
        b'{"mood": "pos", "title": {"a": 1}}',
        b'{"title": "last", "body": "one", "mood": "pos"}',
    ]
)


@pytest.mark.parametrize(
    ("form", "content", "texts"),
    [
        ("csv", BROKEN_CSV, ["ok|ok", "|text", "|", "|", "|", "|", "|", "last|one"]),
        ("jsonl", BROKEN_JSONL, ["ok|ok", "|", "|", "|", "|", "|", "|", "last|one"]),
    ],
)
def test_a_line_that_is_no_row_is_one_record_and_nobody_is_told(
    card: CardOf, tmp_path: Path, capfd: Any, form: str, content: bytes, texts: list[str]
) -> None:
    """The text is the empty one, and the class the first where the line has none."""
    (tmp_path / "t").write_bytes(content)
    with gzip.open(tmp_path / "t.gz", "wb") as packed:
        packed.write(content)
    for path in (tmp_path / "t", tmp_path / "t.gz"):
        found = records(card(format=form), path)
        assert found.features.tolist() == texts and set(found.labels) == {0, 1}
    assert capfd.readouterr() == ("", "")


def test_a_long_field_is_cut_and_not_lost(card: CardOf, tmp_path: Path) -> None:
    path = write(tmp_path, "csv", [("t" * 200_000, "b", "pos")])
    assert records(card(), path).features.tolist() == ["t" * 30]


def test_bytes_that_are_no_text_in_parquet(card: CardOf, tmp_path: Path) -> None:
    columns = {"title": [b"\xff", None, b"a"], "body": ["b", None, "c"], "mood": ["pos", "neg", "pos"]}
    parquet.write_table(pa.table(columns), tmp_path / "t")
    assert records(card(format="parquet"), tmp_path / "t").features.tolist() == ["|b", "|", "a|c"]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_mutated_text_moves_nothing_beyond_its_line(
    card: CardOf, tmp_path: Path, form: str, capfd: Any
) -> None:
    """100 changes within one line, each leaves the other lines as they were; labels stay, as in a table."""
    path, generator = write(tmp_path, form, [("a title", "a body", "neg")] * 5), np.random.default_rng(1)
    lines = path.read_bytes().splitlines()
    start = lines[2].index(b"a title")
    for _ in range(100):
        broken = bytearray(lines[2])
        for _ in range(3):
            place = start + generator.integers(16)
            broken[place] = generator.choice([0, 34, 44, 92, 123, 200, 255, *range(32, 60)])
        path.write_bytes(b"\n".join([*lines[:2], bytes(broken), *lines[3:]]))
        texts = records(card(format=form), path).features.tolist()
        assert len(texts) == 5 and texts.count("a title|a body") >= 4
    assert capfd.readouterr() == ("", "")


def test_a_side_is_decided_by_the_texts_whole(card: CardOf, tmp_path: Path) -> None:
    path = write(tmp_path, "csv", [(f"{place}", "b", "neg") for place in range(60)])
    long, short = (whole(read(card(longest=most), {"train": path}, as_texts=True)) for most in (9, 1))
    assert 15 < len(long.test) < 45
    assert [text[0] for text in long.test.features] == short.test.features.tolist()
    assert rule_of(card(longest=9)) == rule_of(card()) != rule_of(card(columns=["body"]))


@pytest.mark.parametrize(
    ("form", "content", "code", "fields"),
    [
        ("csv", b"title,mood\na,pos\n", "missing_column", {"column": "body"}),
        ("csv", b"title,body,body,mood\na,b,c,pos\n", "missing_column", {"column": "body"}),
        ("csv", b"title,body\na,b\n", "missing_column", {"column": "mood"}),
        ("csv", b"title,body,mood\na,secret,angry\n", "bad_value", {"column": "mood", "expected": "a class"}),
        (
            "jsonl",
            b'{"title": "secret", "body": "b"}',
            "bad_value",
            {"column": "mood", "expected": "a class"},
        ),
        ("parquet", b"no parquet", "unreadable_file", {}),
        ("datasets", b"no folder", "unreadable_file", {}),
    ],
)
def test_what_is_no_record_s_doing_is_refused(
    card: CardOf, tmp_path: Path, form: str, content: bytes, code: str, fields: Document
) -> None:
    (tmp_path / "t").write_bytes(content)
    with refused_as(code, DataRefusedError, **fields) as refusal:
        records(card(format=form), tmp_path / "t")
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("more", "changes", "keys"),
    [
        ({}, {"tokens": {"vocabulary": 9, "length": 3}}, ("reader.tokens", "files.words")),
        ({}, {"spellings": {"angry": ["a"]}}, ("classes", "reader")),
        ({"person": {"column": "title"}}, {}, ("person.column", "reader")),
    ],
)
def test_wrong_declarations_are_refused(
    card: CardOf, more: Document, changes: Document, keys: tuple[str, ...]
) -> None:
    with contradicting(*keys):
        card(more, **changes)


def test_texts_without_words_are_for_an_encoder(card: CardOf, tmp_path: Path) -> None:
    with refused_as("encoder_needed", DataRefusedError):
        dataset_info(card())
    with refused_as("encoder_needed", DataRefusedError):
        dataset_info(card({"shape": [3]}))


def test_all_splits_at_once_are_refused(card: CardOf, tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    with refused_as("unreadable_file", DataRefusedError, path=tmp_path):
        records(card(format="datasets"), tmp_path)


def test_a_table_that_save_to_disk_wrote(table: Document, card_of: CardOf, tmp_path: Path) -> None:
    """Numbers, categories and a class as its number."""
    rows = [("12", "Rome", "pos"), ("90", "Oslo", "neg"), ("50", "x", "pos"), ("0", "", "neg")]
    path = write(tmp_path, "datasets", rows)
    columns = [
        {"name": "title", "kind": "numeric", "bounds": [0, 100]},
        {"name": "body", "kind": "categorical", "categories": ["Rome", "Oslo"]},
        {"name": "mood", "kind": "label", "spellings": {"no": ["0"], "yes": ["1"]}},
    ]
    own = card_of(table | {"reader": {"kind": "datasets", "columns": columns}})
    found = records(own, path)
    np.testing.assert_allclose(found.features[:2], [[0.12, 1, 0, 0], [0.9, 0, 1, 0]], rtol=1e-6)
    assert found.labels.tolist() == [1, 0, 1, 0]
    unseen = [some.features for some in records_in(path, Preparation.from_card(own, "none", None), (4,))]
    np.testing.assert_array_equal(np.concatenate(unseen), found.features)


def test_blocks_of_texts(card: CardOf, tmp_path: Path) -> None:
    """Each with digests of its rows in any order, by which an exact repeat is known."""
    (tmp_path / "weeks").mkdir()
    for name, some in (("one", ROWS), ("two", ROWS[::-1]), ("three", ROWS[1:])):
        write(tmp_path, "jsonl", some).rename(tmp_path / "weeks" / f"{name}.jsonl")
    blocks_of: Document = {"files": {}, "blocks": {"kind": "folder", "path": "weeks"}, "split": None}
    own = card(blocks_of | {"files": {"test": {"path": "test.csv", "sha256": "0" * 64}}}, format="jsonl")
    test = write(tmp_path, "jsonl", [("t", "t", "pos")])
    digests, names = Digests("dots", key=PUBLIC_KEY), ("one", "two", "three")
    read_ = read_blocks(own, names, {"test": test}, root=tmp_path, url=None, digests=digests, as_texts=True)
    assert sorted(whole(read_).train.features) == sorted([*TEXTS, *TEXTS, *TEXTS[1:]])
    held = [digests.by_block[name][0] for name in names]
    assert held[0] == held[1] != held[2]


def test_a_column_of_lists_is_refused(card: CardOf, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"title": [["a"]], "body": ["b"], "mood": ["pos"]}), tmp_path / "t")
    with refused_as("bad_value", DataRefusedError, expected="text"):
        records(card(format="parquet"), tmp_path / "t")


@pytest.mark.parametrize("target", [{"tags": ["A", "B"]}, {"labels": ["mood", "more"]}])
def test_labels_that_are_structs_are_refused(card: CardOf, tmp_path: Path, target: Document) -> None:
    parquet.write_table(pa.table({"title": ["a"], "mood": [{"a": 1}], "more": [0]}), tmp_path / "t")
    label = target.get("labels", "mood")
    own = card({"classes": [], "target": target}, format="parquet", columns=["title"], label=label)
    with refused_as("bad_value", DataRefusedError, expected="text"):
        records(own, tmp_path / "t", as_texts=True)


def test_texts_under_another_key_are_refused(card: CardOf, tmp_path: Path) -> None:
    (tmp_path / "t").write_text('{"review": "good", "mood": "pos"}\n' * 3)
    with refused_as("nothing_readable", DataRefusedError, content="a text"):
        whole(read(card(format="jsonl"), {"train": tmp_path / "t"}, as_texts=True))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_true_and_false_have_one_spelling(card: CardOf, tmp_path: Path, form: str) -> None:
    rows = [{"title": True, "body": "b", "mood": True}, {"title": False, "body": "b", "mood": False}]
    if form == "jsonl":
        (tmp_path / "t").write_text("\n".join(map(json.dumps, rows)))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t")
    found = records(card(format=form, spellings={"neg": ["false"], "pos": ["true"]}), tmp_path / "t")
    assert (found.features.tolist(), found.labels.tolist()) == (["true|b", "false|b"], [1, 0])


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_words_and_their_tags_are_lists_or_apart_by_spaces(card: CardOf, tmp_path: Path, form: str) -> None:
    rows = {"words": [["a", "b\x1fc"], ["[d"], []], "who": ["1", "2", "3"], "tags": [[1, 0], [7], []]}
    if form == "csv":
        (tmp_path / "t").write_text("words,who,tags\na b\x1fc,1,B A\n[d,2,7\n,3,\n")
    elif form == "jsonl":
        lines = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        (tmp_path / "t").write_text("\n".join(map(json.dumps, lines)))
    else:
        parquet.write_table(pa.table(rows), tmp_path / "t")
    target = {"tags": ["A", "B"], "words": 2}
    more: Document = {"classes": [], "target": target, "person": {"column": "who"}}
    own = card(more, format=form, columns=["words"], label="tags")
    found = records(own, tmp_path / "t", as_texts=True)
    assert found.features.tolist() == ["a\x1fb" if form == "csv" else "a\x1fb c", "[d", ""]
    assert found.labels.tolist() == [[1, 0], [-100, -100], [-100, -100]]
