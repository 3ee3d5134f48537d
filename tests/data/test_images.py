"""Images of one's own: every file is one record of the declared size, also where it cannot be read."""

import io
import json
import logging
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from pydantic import ValidationError

from data import DataRefusedError, dataset_info
from data.card import DataCard
from data.description import rule_of
from data.files import PUBLIC_KEY, FileSources, checksum_for, fetch
from data.new_records import records_in
from data.preparation import Preparation
from data.readers import images
from data.readers.images import in_mode
from data.reading import read, row_reader
from tests.data.conftest import CardOf, Document, named_files
from tests.support.parts import Parts, whole
from tests.support.refusals import refused_as

GREY = 0.25
"""The stand-in."""


def image(size: tuple[int, int], colour: tuple[int, int, int], form: str = "PNG") -> bytes:
    made = io.BytesIO()
    Image.new("RGB", size, colour).save(made, form)
    return made.getvalue()


def test_an_image_is_turned_upright_as_its_camera_says() -> None:
    made, turned = io.BytesIO(), Image.Exif()
    turned[0x0112] = 6  # orientation: a quarter turn
    Image.new("RGB", (4, 2)).save(made, "JPEG", exif=turned)
    with Image.open(made) as opened:
        assert opened.size == (4, 2) and in_mode(opened, "RGB").size == (2, 4)


def bomb() -> bytes:
    """A small file of 30,000 x 30,000 pixels, by its header."""
    made = bytearray(image((2, 2), (1, 2, 3)))
    made[16:24] = (30000).to_bytes(4) * 2
    made[29:33] = zlib.crc32(made[12:29]).to_bytes(4)
    return bytes(made)


PICTURES: Mapping[str, bytes] = {
    "light/a.png": image((4, 6), (255, 0, 51)),
    "light/deep/b.JPG": image((2, 3), (255, 255, 255), "JPEG"),
    "dark/c.png": image((2, 3), (0, 0, 0)),
    "dark/cut.png": image((90, 90), (9, 9, 9))[:60],
    "dark/nothing.png": b"",
    "dark/bomb.png": bomb(),
    "dark/text.jpeg": b"no image",
    "dark/notes.txt": b"no record",
    ".hidden/d.png": b"",
}


def folder(place: Path, content: Mapping[str, bytes] = PICTURES) -> Path:
    for name, each in content.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(each)
    return place


@pytest.fixture
def card(images: Document, card_of: CardOf) -> CardOf:
    """A card of a folder photos/, split by a hash."""
    reader = {"kind": "images", "mode": "RGB", "stand_in": GREY}
    own: Document = {
        "public": False,
        "records": {"at_most": 100},
        "shape": [3, 3, 2],
        "files": {"train": {"path": "photos", "sha256": "0" * 64}},
        "split": {"salt": "s", "test_fraction": 0.4},
    }
    return lambda more={}, **changes: card_of(images | own | {"reader": reader | changes} | more)


def both(parts: Parts) -> tuple[np.ndarray, np.ndarray]:
    held = [one for one in (parts.train, parts.test) if len(one)]
    return np.concatenate([one.features for one in held]), np.concatenate([one.labels for one in held])


def rows_of(card: DataCard, files: Mapping[str, Path]) -> tuple[np.ndarray, np.ndarray]:
    """All rows in their order, whatever their side."""
    reader = row_reader(card, files, key=PUBLIC_KEY)
    assert reader is not None
    return both(whole(reader.read()))


def test_a_folder_by_class_is_read_and_what_is_broken_is_the_stand_in(
    card: CardOf, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    place = folder(tmp_path / "photos")
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("error")
        features, labels = both(whole(read(card(), {"train": place})))
    assert features.shape == (7, 3, 3, 2) and features.dtype == np.float32
    assert (labels == 0).sum() == 5 and (labels == 1).sum() == 2
    stand_ins = (features == np.float32(GREY)).all(axis=(1, 2, 3))
    assert stand_ins.sum() == 4 and set(labels[stand_ins]) == {0}
    light = features[labels == 1]
    assert sorted(one[:, 0, 0].round(3).tolist() for one in light) == [pytest.approx([1, 0, 0.2]), [1, 1, 1]]
    assert capfd.readouterr() == ("", "") and caplog.text == ""


def test_images_of_a_folder_are_decoded_as_they_are_asked_for(
    card: CardOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {f"dark/{place}.png": image((9, 9), (place % 256, 0, 0)) for place in range(600)}
    decoded, decode = [], Image.open

    def opened(*args: Any, **options: Any) -> Image.Image:
        decoded.append(1)
        return decode(*args, **options)

    place = folder(tmp_path / "photos", content)
    monkeypatch.setattr(Image, "open", opened)
    next(read(card({"records": {"at_most": 600}}), {"train": place}))
    assert 0 < len(decoded) < 300


def test_a_side_is_decided_by_the_file_and_not_by_what_is_made_of_it(card: CardOf, tmp_path: Path) -> None:
    """Another size, or a stand-in in place of another, moves no record to the other side."""
    content = {f"dark/{place}.png": bytes([place]) * 40 for place in range(39)}
    content["dark/39.png"] = PICTURES["light/a.png"]
    place = folder(tmp_path / "photos", content)
    parts = whole(read(card(), {"train": place}))
    assert 5 < len(parts.test) < 30  # though all stand-ins are equal
    assert rule_of(card()) == rule_of(card({"shape": [3, 9, 9]}, stand_in=0.5))
    assert rule_of(card()) != rule_of(card({"split": {"salt": "t", "test_fraction": 0.4}}))
    (place / "dark/0.png").unlink()
    less = whole(read(card(), {"train": place}))
    assert len(less.train) + len(less.test) == 39
    assert {len(parts.train) - len(less.train), len(parts.test) - len(less.test)} == {0, 1}


def test_the_checksum_of_a_folder_is_of_all_that_is_in_it(card: CardOf, tmp_path: Path) -> None:
    place = folder(tmp_path / "photos")
    sources = FileSources(root=tmp_path, mirror=None, cache=tmp_path)
    with refused_as("altered_file", DataRefusedError, kind="sha256"):
        fetch(card(), sources, key=PUBLIC_KEY)
    right = (checksum_for(place, card().files["train"], key=PUBLIC_KEY) or "").removeprefix("sha256: ")
    good = card({"files": {"train": {"path": "photos", "sha256": right}}})
    assert fetch(good, sources, key=PUBLIC_KEY) == {"train": place}
    (place / ".DS_Store").write_bytes(b"1")
    assert fetch(good, sources, key=PUBLIC_KEY) == {"train": place}
    (place / "dark/c.png").rename(place / "light/c.png")
    with refused_as("altered_file", DataRefusedError, kind="sha256"):
        fetch(good, sources, key=PUBLIC_KEY)


def test_an_image_of_16_bits_and_one_of_too_many_pixels(card: CardOf, tmp_path: Path) -> None:
    deep = io.BytesIO()
    Image.fromarray(np.full((3, 2), 51 * 256, np.uint16)).save(deep, "PNG")
    content = {"dark/deep.png": deep.getvalue(), "light/a.png": PICTURES["light/a.png"]}
    place = folder(tmp_path / "photos", content)
    few = card(most_pixels=23)
    (found,) = images.read_folder(place, few.reader, few.classes, few.input_shape)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.features[0], 0.2, rtol=1e-6)
    assert (found.features[1] == np.float32(GREY)).all()


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_table_of_paths(card: CardOf, tmp_path: Path, form: str) -> None:
    """One that is missing, and one that leads out of the folder, are the stand-in."""
    place = folder(tmp_path / "photos")
    (tmp_path / "secret.png").write_bytes(image((2, 3), (255, 255, 255)))
    paths = ["light/a.png", "none.png", "../secret.png", str(tmp_path / "secret.png"), "dark", "a\0b", None]
    kinds = ["light", *["dark"] * 6]
    table = tmp_path / f"t.{form}"
    if form == "parquet":
        parquet.write_table(pa.table({"file": paths, "kind": kinds}), table)
    else:
        rows = zip(paths, kinds, strict=True)
        lines = [json.dumps({"file": a, "kind": b}) if form == "jsonl" else f"{a or ''},{b}" for a, b in rows]
        table.write_text("\n".join(lines if form == "jsonl" else ["file,kind", *lines]) + "\n")
    own = card(
        {"files": named_files("train", "images")}, kind="image_table", format=form, image="file", label="kind"
    )
    features, labels = rows_of(own, {"train": table, "images": place})
    stand_ins = (features == np.float32(GREY)).all(axis=(1, 2, 3))
    assert len(features) == 7 and stand_ins.tolist() == (labels == 0).tolist()


def test_a_table_of_bytes_as_hugging_face_writes_it(card: CardOf, tmp_path: Path) -> None:
    cells = [{"bytes": PICTURES["light/a.png"], "path": None}, {"bytes": b"broken", "path": "x.png"}, None]
    parquet.write_table(pa.table({"image": cells, "label": [1, 0, 0]}), tmp_path / "t.parquet")
    spellings = {"dark": ["0"], "light": ["1"]}
    own = card(kind="image_table", format="parquet", image="image", label="label", spellings=spellings)
    features, labels = rows_of(own, {"train": tmp_path / "t.parquet"})
    assert sorted(labels) == [0, 0, 1]
    assert (features[labels == 0] == np.float32(GREY)).all()
    assert features[labels == 1][0, :, 0, 0].tolist() == pytest.approx([1, 0, 0.2])
    (found,) = records_in(tmp_path / "t.parquet", Preparation.from_card(own, "none", None), (3, 3, 2))
    assert found.names == ("1", "2", "3") and (found.features[1:] == np.float32(GREY)).all()


def test_a_folder_in_which_nothing_can_be_read_is_refused(card: CardOf, tmp_path: Path) -> None:
    place = folder(tmp_path / "photos", {f"dark/{place}.png": b"%d" % place for place in range(20)})
    with refused_as("nothing_readable", DataRefusedError, content="an image"):
        whole(read(card(), {"train": place}))


def test_images_to_predict_on_become_what_those_of_training_did(card: CardOf, tmp_path: Path) -> None:
    place = folder(tmp_path / "photos", {"x.png": PICTURES["light/a.png"], "._x.png": b"of a Mac"})
    carried = Preparation.from_card(card(fit="crop"), "none", None)
    (found,) = records_in(place, carried, (3, 3, 2))
    np.testing.assert_allclose(found.features[0, :, 0, 0], [1, 0, 0.2])
    (place / "y.png").write_bytes(b"no image")
    with refused_as("unreadable_file", DataRefusedError, path=place / "y.png"):
        list(records_in(place, carried, (3, 3, 2)))


@pytest.mark.parametrize(
    ("bits", "content"), [(8, [[0, 51], [102, 255]]), (16, [[0, 13107], [26214, 65535]])]
)
def test_pixels_of_16_bits_are_those_of_8_where_training_had_bytes(
    images: Document, card_of: CardOf, tmp_path: Path, bits: int, content: list[list[int]]
) -> None:
    Image.fromarray(np.array(content, f"uint{bits}")).save(tmp_path / "new.png")
    (found,) = records_in(
        tmp_path / "new.png", Preparation.from_card(card_of(images), "none", None), (1, 2, 2)
    )
    np.testing.assert_allclose(found.features[0, 0], [[0, 0.2], [0.4, 1]])


def test_a_mutated_image_never_stops_and_never_tells(card: CardOf, tmp_path: Path, capfd: Any) -> None:
    """Of 199 files with one to eight bytes changed each, every one is a record."""
    generator, content = np.random.default_rng(0), {}
    originals = [PICTURES["light/a.png"], PICTURES["light/deep/b.JPG"], image((40, 40), (3, 2, 1), "PNG")]
    for number in range(200):
        broken = bytearray(originals[number % 3])
        for _ in range(generator.integers(1, 9)):
            broken[generator.integers(len(broken))] = generator.integers(256)
        content[f"dark/{number}.png"] = bytes(broken[: generator.integers(1, len(broken) + 1)])
    content["dark/0.png"] = originals[0]
    place = folder(tmp_path / "photos", content)
    features, _ = both(whole(read(card({"records": {"at_most": 200}}), {"train": place})))
    assert features.shape == (200, 3, 3, 2) and np.isfinite(features).all()
    assert features.min() >= 0 and features.max() <= 1 and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("more", "changes", "words"),
    [
        ({"shape": [1, 3, 2]}, {}, r"shape of images in mode RGB is \[3, height, width\]"),
        ({"shape": None}, {}, "shape is missing"),
        ({"person": {"column": "who"}}, {}, "no column that could name a person"),
        ({"split": None}, {}, "split is needed"),
        ({}, {"kind": "image_table", "format": "xml", "image": "i", "label": "l"}, "Input should be 'csv'"),
    ],
)
def test_wrong_declarations_are_refused(card: CardOf, more: Document, changes: Document, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        card(more, **changes)


def test_a_folder_of_no_class_is_refused(card: CardOf, tmp_path: Path) -> None:
    place = folder(tmp_path / "photos", {"drak/a.png": b""})
    with refused_as("bad_value", DataRefusedError, expected="a class"):
        whole(read(card(), {"train": place}))
    assert dataset_info(card()).feature_norms == (18.0, 18.0**0.5)
    with refused_as("unreadable_file", DataRefusedError):
        whole(read(card(), {"train": place / "light/a.png"}))
