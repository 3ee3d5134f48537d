"""What one record becomes depends on that record alone: a fault of the machine makes none of them a stand-in."""

import errno
import io
import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from data.card import DataRefusedError, File
from data.files import PUBLIC_KEY, checksum_for
from data.formats import Images, Texts
from data.readers import images, rows
from data.targets import Classes, Tags
from tests.support.refusals import refused_as

DECLARED = Images(kind="images", mode="L", stand_in=0.25)
SHAPE = (1, 8, 8)


def image(size: tuple[int, int], brightness: int, form: str = "PNG", **more: Any) -> bytes:
    made = io.BytesIO()
    Image.new("L", size, brightness).save(made, form, **more)
    return made.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> list[Path]:
    """Sixteen images of the brightnesses 0 to 15."""
    for place in range(16):
        (tmp_path / f"{place:02}.png").write_bytes(image((9, 9), place))
    return sorted(tmp_path.iterdir())


def brightness(found: tuple[np.ndarray, list[bytes]]) -> list[float]:
    """Of the first pixel of each image, in 255ths; 63.75 for a stand-in."""
    return [float(one) for one in found[0][:, 0, 0, 0] * 255]


EVERY = [float(place) for place in range(16)]


def failing(monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], *, place: int = 7) -> None:
    """Decoding the image of this brightness raises an error."""
    decode = images.in_mode

    def fail(opened: Image.Image, mode: str) -> Image.Image:
        if opened.getpixel((0, 0)) == place:
            raise error()
        return decode(opened, mode)

    monkeypatch.setattr(images, "in_mode", fail)


@pytest.mark.parametrize(
    "error",
    [
        lambda: OSError("broken data stream when reading image file"),
        lambda: Image.DecompressionBombError("too many pixels"),
        RecursionError,
        lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        lambda: SyntaxError("broken PNG file"),
    ],
)
def test_an_image_that_cannot_be_decoded_is_a_stand_in_and_no_other_is(
    folder: list[Path], monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]
) -> None:
    failing(monkeypatch, error)
    assert brightness(images.pixels(folder, DECLARED, SHAPE)) == [*EVERY[:7], 63.75, *EVERY[8:]]


def test_memory_that_lacks_ends_the_reading(folder: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, MemoryError)
    with refused_as("out_of_memory", DataRefusedError) as refused:
        images.pixels(folder, DECLARED, SHAPE)
    assert "07" not in str(refused.value) and refused.value.__suppress_context__


@pytest.mark.parametrize("error", [MemoryError, lambda: OSError("broken data stream")])
def test_memory_that_others_take_makes_no_stand_in(
    folder: list[Path], monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]
) -> None:
    """Decoding beside another image fails here, as libjpeg calls a file broken where memory lacks."""
    decode, lock, now = images.in_mode, Lock(), [0]

    def crowded(opened: Image.Image, mode: str) -> Image.Image:
        with lock:
            now[0] += 1
            beside = now[0]
        time.sleep(0.001)
        try:
            if beside > 1:
                raise error()
            return decode(opened, mode)
        finally:
            with lock:
                now[0] -= 1

    monkeypatch.setattr(images, "in_mode", crowded)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert brightness(images.pixels(folder, DECLARED, SHAPE)) == EVERY


@contextmanager
def full_memory() -> Iterator[None]:
    """This process can have only a few megabytes more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**23, before[1]))
    taken: list[np.ndarray] = []
    try:
        with suppress(MemoryError):
            while True:
                taken.append(np.empty(2**20, np.uint8))
        del taken[-4:]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_fine_image_for_which_memory_lacks_is_refused() -> None:
    """A progressive JPEG, of which libjpeg keeps all coefficients."""
    content = image((4000, 4000), 9, "JPEG", progressive=True)
    room = images._Room(images.PIXELS_AT_ONCE)
    with full_memory(), refused_as("out_of_memory", DataRefusedError):
        images._decode_or_none(content, DECLARED, SHAPE, room)
    fine = images._decode_or_none(content, DECLARED, SHAPE, room)
    assert fine is not None and fine[0, 0, 0] * 255 == pytest.approx(9)


def test_an_image_called_broken_where_memory_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libjpeg does not tell the two apart."""
    failing(monkeypatch, lambda: OSError("broken data stream when reading image file"), place=9)
    room = images._Room(images.PIXELS_AT_ONCE)
    with full_memory(), refused_as("out_of_memory", DataRefusedError):
        images._decode_or_none(image((9, 9), 9), DECLARED, SHAPE, room)
    assert images._decode_or_none(image((9, 9), 9), DECLARED, SHAPE, room) is None


def test_pixels_in_flight_are_bounded(folder: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of 81 pixels two at a time, and one of 900, which is larger than the limit, by itself."""
    decode, lock, now, seen = images.in_mode, Lock(), [0], [0]

    def spy(opened: Image.Image, mode: str) -> Image.Image:
        size = opened.width * opened.height
        with lock:
            now[0] += size
            seen.append(now[0])
        time.sleep(0.001)  # so that others begin
        try:
            return decode(opened, mode)
        finally:
            with lock:
                now[0] -= size

    folder[3].write_bytes(image((30, 30), 3))
    monkeypatch.setattr(images, "PIXELS_AT_ONCE", 200)
    monkeypatch.setattr(images, "in_mode", spy)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert brightness(images.pixels(folder, DECLARED, SHAPE)) == EVERY
    assert max(count for count in seen if count < 900) <= 162 and max(seen) == 900


def test_an_image_is_decoded_without_copies_of_its_pixels() -> None:
    with Image.open(io.BytesIO(image((4, 4), 9))) as opened:
        assert images.in_mode(opened, "L") is opened


@pytest.mark.parametrize(
    ("number", "is_stand_in"),
    [
        (errno.EACCES, True),
        (errno.ENAMETOOLONG, True),
        (errno.EMFILE, False),
        (errno.ENFILE, False),
        (errno.EIO, False),
        (errno.ENOMEM, False),
        (errno.ESTALE, False),
    ],
)
def test_a_file_that_cannot_be_opened_is_a_stand_in_by_itself_alone(
    folder: list[Path], monkeypatch: pytest.MonkeyPatch, number: int, is_stand_in: bool
) -> None:
    is_there, opens = folder[7].parent, Path.open

    def refuse(path: Path, *how: Any) -> Any:
        if path.name == "07.png":
            raise OSError(number, "no", str(path))
        return opens(path, *how)

    whole = checksum_for(is_there, File(path="x", sha256="0" * 64), key=PUBLIC_KEY)
    monkeypatch.setattr(Path, "open", refuse)
    if is_stand_in:
        assert brightness(images.pixels(folder, DECLARED, SHAPE)) == [*EVERY[:7], 63.75, *EVERY[8:]]
        assert checksum_for(is_there, File(path="x", sha256="0" * 64), key=PUBLIC_KEY) != whole
        return
    for read in (
        lambda: images.pixels(folder, DECLARED, SHAPE),
        lambda: checksum_for(is_there, File(path="x", sha256="0" * 64), key=PUBLIC_KEY),
    ):
        with refused_as("machine_fault", DataRefusedError) as refused:
            read()
        assert "07" not in str(refused.value) and refused.value.__suppress_context__


def test_a_path_that_cannot_be_followed_is_a_stand_in_by_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert images._below(tmp_path, b"a\0b") is images._below(tmp_path, b"\xff") is None
    monkeypatch.setattr(Path, "resolve", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOMEM, "no")))
    with refused_as("machine_fault", DataRefusedError, why="cannot allocate memory"):
        images._below(tmp_path, b"a")


@pytest.mark.parametrize("target", [Classes(classes=("no", "yes")), Tags(tags=("a", "b"), words=2)])
def test_a_line_nested_at_any_depth_is_one_record(tmp_path: Path, target: Any) -> None:
    """Also where it is only just not too deep for Python to read, and too deep to write."""
    fine = json.dumps({"text": ["a", "b"] if isinstance(target, Tags) else "a", "mood": "yes"})
    depths = [*range(800, 1000), 5000, 10**5]
    lines = [fine, *('{"text": ' + "[" * depth + "]" * depth + ', "mood": "yes"}' for depth in depths), fine]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    declared = Texts(kind="texts", format="jsonl", columns=("text",), label="mood")
    tables = [*rows.tables("train", tmp_path / "t.jsonl", declared, target)]
    found = [cell for some in tables for cell in some["text"].to_pylist()]
    assert len(found) == len(lines) and found[0] == found[-1] is not None


def test_bytes_that_are_no_text_are_one_empty_text(tmp_path: Path) -> None:
    from data.readers import texts

    lines = [
        b'{"text": "a", "mood": "yes"}',
        b'{"text": "\xff", "mood": "yes"}',
        b'{"text": "\\ud800"}',
        b"\xfe",
    ]
    (tmp_path / "t.jsonl").write_bytes(b"\n".join([*lines, lines[0]]))
    declared = Texts(kind="texts", format="jsonl", columns=("text",), label="mood")
    tables = rows.tables("train", tmp_path / "t.jsonl", declared, Classes(classes=("no", "yes")))
    assert [one for some in tables for one in texts.join_texts(some, declared)[0]] == ["a", "", "", "", "a"]
