"""Reviews to tokens: Keras' defaults, a list of words that is public, and nothing learned from the texts."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data import DataRefusedError, DatasetInfo, dataset_info, prepared
from data.card import data_card
from data.description import rule_of
from data.files import FileSources, fetch
from data.formats import Reviews
from data.readers import texts
from data.readers.records import RecordBatch, RecordChunk
from data.reading import read, word_list
from tests.data.conftest import CardOf, Document, tar
from tests.support.mirror import MIRROR, needs_mirror
from tests.support.parts import Parts, whole
from tests.support.refusals import contradicting, refused_as

LISTED = b"the\nand\nfilm\nthe\n!\nwell-made\ngood\nnaive\ncaf\xc3\xa9\n"
WORDS = {"the": 2, "and": 3, "film": 4, "good": 5}
TEXTS = {
    "train/neg/1_2.txt": b"The film.<br /><br />And the END",
    "train/neg/0_1.txt": b"the",
    "train/pos/0_9.txt": b"",
    "train/unsup/0_0.txt": b"good good good",
    "test/pos/7_10.txt": b"good and good and good and good",
    "test/neg/3_4.txt": b"(good)",
    "train/urls_pos.txt": b"http://example.org",
}


def packed(path: Path, members: Mapping[str, bytes]) -> Path:
    """A tar archive of the data set's layout, packed as its name says."""
    return tar(path, {f"reviews/{name}": content for name, content in members.items()})


@pytest.fixture
def card(images: Document, card_of: CardOf) -> CardOf:
    """The card of a small archive, with changes to its reader."""
    reader = {"kind": "reviews", "words": "reviews/words.txt", "vocabulary": 6, "length": 5}
    files = {"archive": {"urls": ["http://127.0.0.1:1/a.tar.gz"], "sha256": "0" * 64}}
    own: Document = {"records": {"train": 3, "test": 2}, "classes": ["neg", "pos"], "files": files}
    del images["shape"]
    return lambda **changes: card_of(images | own | {"reader": reader | changes})


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", [0, 0, 0, 0, 0]),
        ("  \t\n ", [0, 0, 0, 0, 0]),
        ("the", [0, 0, 0, 0, 2]),
        ("THE Film, and...", [0, 0, 2, 4, 3]),
        ("film<br />and<br/>the<BR>good", [0, 4, 3, 2, 5]),
        ("the-film/and (good)", [0, 2, 4, 3, 5]),
        ("don't and 'the'", [0, 0, 1, 3, 1]),
        ("the the the the the film and", [2, 2, 2, 4, 3]),
        ("strange wörds 電影 the\u00a0film", [1, 1, 1, 2, 4]),
    ],
    ids=["empty", "blank", "short", "case", "html", "punctuation", "apostrophe", "long", "unicode"],
)
def test_the_tokens_of_a_text(text: str, tokens: list[int]) -> None:
    found = texts.tokens(text, WORDS, length=5)
    assert found.tolist() == tokens and found.dtype == np.int32


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar.xz"])
def test_an_archive_becomes_records_in_an_order_of_their_own(card: CardOf, tmp_path: Path, name: str) -> None:
    for members in (TEXTS, dict(reversed(TEXTS.items()))):
        path = packed(tmp_path / name, members | {"words.txt": LISTED})
        train, test = read(card(), {"archive": path})
        assert (train.part, train.records.labels.tolist()) == ("train", [0, 0, 1])
        assert train.records.features.tolist() == [[0, 0, 0, 0, 2], [2, 4, 3, 2, 1], [0] * 5]
        assert test.records.labels.tolist() == [0, 1]
        assert test.records.features.tolist() == [[0, 0, 0, 0, 5], [5, 3, 5, 3, 5]]


def test_only_the_first_words_that_a_text_can_have_get_a_token(tmp_path: Path) -> None:
    found = texts._vocabulary(LISTED, 8, tmp_path)
    assert found == WORDS | {"naive": 6, "café": 7}
    assert texts._vocabulary(LISTED, 6, tmp_path) == WORDS


def test_a_list_of_words_may_be_a_file_of_its_own(
    images: Document, card_of: CardOf, card: CardOf, tmp_path: Path
) -> None:
    path = packed(tmp_path / "a.tar.gz", TEXTS)
    (tmp_path / "words").write_bytes(LISTED)
    declared = Reviews(kind="reviews", vocabulary=6, length=5)
    files = {"archive": path, "words": tmp_path / "words"}
    train, _ = texts.read_tokens(files, declared, classes=("neg", "pos"))
    assert train.records.features[1].tolist() == [2, 4, 3, 2, 1]
    with contradicting("files", "reader.kind"):
        card(words=None)


def test_the_list_of_the_words_that_have_a_token_is_that_of_the_card(card: CardOf, tmp_path: Path) -> None:
    files = {"archive": packed(tmp_path / "a.tar.gz", TEXTS | {"words.txt": LISTED})}
    listed = word_list(card(), files) or b""
    assert listed == b"the\nand\nfilm\ngood\n"
    declared = card(words_sha256=hashlib.sha256(listed).hexdigest())
    assert word_list(declared, files) == listed
    assert dataset_info(declared).words_sha256 == declared.words_sha256
    with refused_as("altered_file", DataRefusedError):
        word_list(card(words_sha256="0" * 64), files)


def test_a_card_that_does_not_declare_the_words_keeps_its_digests(card: CardOf) -> None:
    plain, declared = card(), card(words_sha256="0" * 64)
    assert "words_sha256" not in plain.model_dump_json() + dataset_info(plain).to_json()
    assert rule_of(plain) == rule_of(declared)


def test_a_text_that_cannot_be_decoded_is_one_record_without_words(card: CardOf, tmp_path: Path) -> None:
    def texts(content: bytes) -> Parts:
        archive = packed(tmp_path / "reviews.gz", TEXTS | {"words.txt": LISTED, "test/neg/3_4.txt": content})
        return whole(read(card(), {"archive": archive}))

    corrupt, empty = texts(b"the film \xff"), texts(b"")
    assert np.array_equal(corrupt.train.features, empty.train.features)
    assert np.array_equal(corrupt.test.features, empty.test.features)
    assert np.array_equal(corrupt.test.labels, empty.test.labels)


@pytest.mark.parametrize(
    ("members", "code", "fields"),
    [
        (TEXTS, "unreadable_file", {"name": "reviews/words.txt"}),
        (
            TEXTS | {"words.txt": b"the\n"},
            "bad_card",
            {"keys": ("reader.vocabulary",), "words": 1, "size": 6},
        ),
        (TEXTS | {"words.txt": LISTED + b"\xff\n"}, "unreadable_file", {"name": None}),
        (TEXTS | {"words.txt": LISTED, "test/neg/03_1.txt": b"secret"}, "unreadable_file", {"part": "test"}),
        (TEXTS | {"words.txt": LISTED, "test/neg/9_1.txt": b"secret"}, "records_differ", {"test": 3}),
    ],
)
def test_an_archive_that_does_not_fit_is_refused_and_no_text_is_said(
    card: CardOf, tmp_path: Path, members: dict[str, bytes], code: str, fields: Document
) -> None:
    path = packed(tmp_path / "a.tar.gz", members)
    with refused_as(code, DataRefusedError, **fields) as refusal:
        list(read(card(), {"archive": path}))
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("size", [0, 100])
def test_an_archive_that_is_cut_short_is_refused(card: CardOf, tmp_path: Path, size: int) -> None:
    path = packed(tmp_path / "a.tar.gz", TEXTS | {"words.txt": LISTED})
    path.write_bytes(path.read_bytes()[:size])
    with refused_as("unreadable_file", DataRefusedError, path=path):
        list(read(card(), {"archive": path}))


def test_tokens_are_described_written_and_mapped_back_as_such(card: CardOf, tmp_path: Path) -> None:
    path = packed(tmp_path / "a.tar.gz", TEXTS | {"words.txt": LISTED})
    info = dataset_info(card())
    assert (info.tokens, info.feature_norms, info.input_shape) == (6, None, (5,))
    assert DatasetInfo.from_json(info.to_json()) == info
    prepared.write(tmp_path / "p", read(card(), {"archive": path}), info, salt=bytes(32), at_most=None)
    loaded = prepared.load(tmp_path / "p")
    assert loaded.train_features.dtype == np.int32 and loaded.train_features[0].tolist() == [0, 0, 0, 0, 2]
    (tmp_path / "p" / "public.json").write_text(replace(info, tokens=None).to_json())
    with refused_as("not_prepared", DataRefusedError):
        prepared.load(tmp_path / "p")


def test_real_numbers_are_not_written_as_tokens(card: CardOf, tmp_path: Path) -> None:
    real = RecordBatch(np.zeros((1, 5), np.float32), np.zeros(1, np.int64))
    info = dataset_info(card())
    with pytest.raises(ValueError, match="kind"):
        prepared.write(tmp_path / "p", [RecordChunk("train", real)], info, salt=bytes(32), at_most=None)


@pytest.mark.soak
@needs_mirror
def test_real_imdb(tmp_path: Path) -> None:
    card = data_card("imdb")
    files = fetch(card, FileSources(root=tmp_path, mirror=Path(MIRROR or ""), cache=tmp_path), key=bytes(32))
    for block in read(card, files):
        features = block.records.features
        assert np.bincount(block.records.labels).tolist() == [12500, 12500]
        assert features.shape == (25000, 80) and features.dtype == np.int32
        assert (features.min(), features.max()) == (0, 19999)
        assert 0.03 < (features == texts.UNKNOWN_WORD).mean() < 0.05
        assert (features[:, -1] != texts.PADDING).all()
