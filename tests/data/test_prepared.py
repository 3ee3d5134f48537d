"""The prepared folder: mapped, whole or absent, silent about private records; and what is encoded into it."""

import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import DatasetInfo, prepared
from data.card import DataRefusedError, data_card
from data.description import EncoderFacts, dataset_info
from data.readers.records import RecordBatch, RecordChunk
from data.targets import Classes
from data.transforms import encode_records
from tasks.runs import dvc_stages
from tests.data.conftest import CardOf, Document
from tests.support.modes import open_to_others, open_umask
from tests.support.refusals import refused_as


def parts(train: int, test: int) -> list[RecordChunk]:
    """Records of four features, as the card of the tiny table makes them."""

    def some(n: int) -> RecordBatch:
        return RecordBatch(np.full((n, 4), 0.5, np.float32), np.ones(n, np.int64))

    return [RecordChunk("train", some(train)), RecordChunk("test", some(test))]


@pytest.fixture
def info(table: Document, card_of: CardOf) -> DatasetInfo:
    """What is public of the tiny table."""
    return dataset_info(card_of(table))


def test_what_is_written_is_mapped_back_read_only(info: DatasetInfo, tmp_path: Path) -> None:
    prepared.write(tmp_path / "p", parts(5, 2), info, salt=b"s" * 32, at_most=None)
    loaded = prepared.load(tmp_path / "p")
    assert loaded.info == info
    assert isinstance(loaded.train_features, np.memmap) and not loaded.train_features.flags.writeable
    assert loaded.train_features.flags.c_contiguous
    assert (loaded.train_features.shape, loaded.test_labels.tolist()) == ((5, 4), [1, 1])
    assert loaded.train_features.dtype == np.float32 and loaded.train_labels.dtype == np.int64


def test_what_is_prepared_is_for_its_owner_alone(info: DatasetInfo, tmp_path: Path) -> None:
    with open_umask():
        prepared.write(tmp_path / "p", parts(5, 2), info, salt=b"s" * 32, at_most=None)
    assert (tmp_path / "p/train_features.npy").is_file() and open_to_others(tmp_path / "p") == []


def test_digest_of_contents_is_of_training_records_alone(info: DatasetInfo, tmp_path: Path) -> None:
    def digest(chunks: list[RecordChunk], **changes: Any) -> str:
        described = replace(info, **changes)
        prepared.write(tmp_path / "p", chunks, described, salt=os.urandom(32), at_most=None)
        return prepared.contents(tmp_path / "p")

    whole = digest(parts(5, 2))
    assert digest([*parts(2, 1), *parts(3, 4)], title="Another") == whole
    labels = [RecordChunk("train", RecordBatch(np.full((5, 4), 0.5, np.float32), np.arange(5)))]
    features = [RecordChunk("train", RecordBatch(np.full((5, 4), 0.25, np.float32), np.ones(5, np.int64)))]
    assert len({whole, digest(parts(6, 2)), digest(labels), digest(features)}) == 4
    (tmp_path / "p" / "contents").unlink()
    with refused_as("not_prepared", DataRefusedError):
        prepared.contents(tmp_path / "p")


def test_the_description_survives_json(info: DatasetInfo) -> None:
    counted = replace(info, records=7, test_records=3)
    assert DatasetInfo.from_json(counted.to_json()) == counted
    with refused_as("not_prepared", DataRefusedError):
        DatasetInfo.from_json(counted.to_json()[:-5])


def test_size_depends_on_the_bound_alone_when_the_number_is_private(
    info: DatasetInfo, tmp_path: Path
) -> None:
    sizes = set()
    for train, test in [(1, 1), (5, 2), (999, 1), (1, 999), (123, 456)]:
        prepared.write(tmp_path / "p", parts(train, test), info, salt=b"s" * 32, at_most=1000)
        sizes.add(sum(file.stat().st_size for file in (tmp_path / "p").iterdir()))
    assert len(sizes) == 1
    assert (tmp_path / "p" / "salt").read_bytes()[:32] == b"s" * 32


def test_a_folder_is_replaced_whole_and_nothing_else_stays(info: DatasetInfo, tmp_path: Path) -> None:
    for train in (5, 6):
        prepared.write(tmp_path / "p", parts(train, 2), info, salt=b"s" * 32, at_most=None)
    assert len(prepared.load(tmp_path / "p").train_labels) == 6
    assert os.listdir(tmp_path) == ["p"]


def test_a_write_that_fails_leaves_the_old_folder(
    info: DatasetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared.write(tmp_path / "p", parts(5, 2), info, salt=b"s" * 32, at_most=None)
    monkeypatch.setattr(DatasetInfo, "to_json", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepared.write(tmp_path / "p", parts(6, 2), info, salt=b"s" * 32, at_most=None)
    assert len(prepared.load(tmp_path / "p").train_labels) == 5
    assert os.listdir(tmp_path) == ["p"]


@pytest.mark.parametrize(
    "spoil",
    [
        shutil.rmtree,
        lambda folder: (folder / "public.json").unlink(),
        lambda folder: (folder / "public.json").write_text("{}"),
        lambda folder: (folder / "test_labels.npy").unlink(),
        lambda folder: (folder / "test_labels.npy").write_bytes(b""),
        lambda folder: os.truncate(folder / "train_features.npy", 150),
        lambda folder: np.save(folder / "train_labels.npy", np.zeros(4, np.int64)),
        lambda folder: np.save(folder / "train_features.npy", np.zeros((5, 4))),
        lambda folder: np.save(folder / "train_features.npy", np.zeros((5, 3), np.float32)),
    ],
    ids=[
        "no folder",
        "no json",
        "other json",
        "no array",
        "empty",
        "cut",
        "too few labels",
        "float64",
        "narrow",
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    info: DatasetInfo, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    prepared.write(tmp_path / "p", parts(5, 2), info, salt=b"s" * 32, at_most=None)
    spoil(tmp_path / "p")
    with refused_as("not_prepared", DataRefusedError):
        prepared.load(tmp_path / "p")


def test_portions_that_a_killed_process_encoded_go_unless_another_goes_on_with_them(
    info: DatasetInfo, tmp_path: Path
) -> None:
    folder = tmp_path / "prepared"
    for is_killed in (False, True):
        with prepared.portions_of(folder) as portions:
            assert portions.stat().st_mode & 0o077 == 0
            (portions / "a.npy").write_bytes(b"of records")
            if not is_killed:
                prepared.write(folder, parts(4, 4), info, salt=bytes(32), at_most=None)
                prepared.sweep(folder)
                assert (portions / "a.npy").exists()
    prepared.sweep(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prepared"]


@pytest.mark.parametrize("stage", dvc_stages.STAGES)
def test_the_next_stage_removes_what_a_killed_one_left_of_records(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for prepare, which goes on with what was encoded, or removes it when it writes the records."""
    for name in ("encoding", "killed"):
        left = tmp_path / f"datasets/.prepared-{name}"
        left.mkdir(parents=True)
        (left / "lock").touch()
    monkeypatch.setattr(dvc_stages.DvcProcess, "request", lambda *_: (0, []))
    dvc_stages.DvcProcess(tmp_path, say=lambda _: None).reproduce(stage)
    assert any((tmp_path / "datasets").iterdir()) == (stage == "prepare")


def test_what_a_killed_process_left_goes_and_what_another_writes_stays(
    info: DatasetInfo, tmp_path: Path
) -> None:
    def more() -> Iterator[RecordChunk]:
        (at_work,) = tmp_path.glob(".prepared-*")
        shutil.copytree(at_work, tmp_path / ".prepared-killed")
        prepared.write(tmp_path / "prepared", parts(5, 5), info, salt=bytes(32), at_most=None)
        assert list(tmp_path.glob(".prepared-*")) == [at_work]
        yield from parts(4, 4)

    prepared.write(tmp_path / "prepared", more(), info, salt=bytes(32), at_most=None)
    assert len(prepared.load(tmp_path / "prepared").train_labels) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]


FACTS = EncoderFacts("halves", "images", 4, "0" * 64, "unknown", "{}")
ROWS = 3000


def chunks() -> Iterator[RecordChunk]:
    rows = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 1, 2, 2)
    yield RecordChunk("train", RecordBatch(rows, np.zeros(ROWS, np.int64)))


class Halves:
    """Flat images, halved; raises after so many records where that is given."""

    def __init__(self, most: int | None = None) -> None:
        self.seen, self.most = 0, most

    def load(self) -> Any:
        return self.encode

    def encode(self, images: Any) -> Any:
        if self.most is not None and self.seen + len(images) > self.most:
            raise KeyboardInterrupt
        self.seen += len(images)
        return images.reshape(len(images), -1) / 2


CLASSES = Classes(classes=("a", "b"))


def features(encoder: Halves, kept: Path) -> np.ndarray:
    told: list[int] = []
    made = list(encode_records(chunks(), FACTS, encoder.load, CLASSES, folder=kept, say=told.append))
    assert told[-1] == ROWS
    return np.concatenate([block.records.features for block in made])


def test_encoded_portions_are_for_their_owner_alone_and_go_when_all_are_encoded(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with open_umask(), pytest.raises(KeyboardInterrupt):
        features(Halves(1600), kept)
    assert len(list(kept.glob("*.npy"))) > 1
    assert open_to_others(kept) == [str(kept / ".gitignore")]
    features(Halves(), kept)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_encoded_portions_is_for_its_owner_alone(tmp_path: Path) -> None:
    with open_umask(), prepared.portions_of(tmp_path / "p") as portions:
        assert portions.is_dir() and portions.stat().st_mode & 0o077 == 0


def test_encoding_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    first, second = Halves(1600), Halves()
    with pytest.raises(KeyboardInterrupt):
        features(first, tmp_path / "kept")
    found = features(second, tmp_path / "kept")
    assert second.seen <= ROWS - first.seen < ROWS
    assert np.array_equal(found, np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4) / 2)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("error", [ValueError, OSError, MemoryError])
def test_an_encoders_error_shows_nothing_of_a_record(error: type[Exception], tmp_path: Path) -> None:
    class Failing(Halves):
        def encode(self, images: Any) -> Any:
            raise error(f"cannot take {images[3].tolist()}")

    with pytest.raises((DataRefusedError, MemoryError)) as failed:
        features(Failing(), tmp_path / "kept")
    if error is MemoryError:  # of the machine, which `main_of` says in words of its own
        assert failed.type is MemoryError
    else:
        told = "".join(traceback.format_exception(failed.value))
        assert f"'halves' raised {error.__name__}; its message" in told and "cannot take [" not in told


def test_another_encoder_takes_nothing_of_what_was_kept(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        features(Halves(1600), tmp_path / "kept")
    other = EncoderFacts("halves", "images", 4, "1" * 64, "unknown", "{}")
    encoder = Halves()
    list(encode_records(chunks(), other, encoder.load, CLASSES, folder=tmp_path / "kept", say=lambda _: None))
    assert encoder.seen == ROWS


@pytest.mark.parametrize(
    ("name", "facts", "kind"),
    [
        ("adult", FACTS, "tables"),
        ("imdb", FACTS, "texts"),
        ("mnist", replace(FACTS, takes="texts"), "images"),
    ],
)
def test_an_encoder_of_other_records_is_refused(name: str, facts: EncoderFacts, kind: str) -> None:
    with refused_as("transform_unfit", DataRefusedError, takes=facts.takes, dataset=name, kind=kind):
        dataset_info(data_card(name), "encoder", facts)


def test_the_transform_encoder_needs_one() -> None:
    with refused_as("encoder_needed", DataRefusedError):
        dataset_info(data_card("mnist"), "encoder", None)
