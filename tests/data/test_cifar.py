"""CIFAR in all its forms: the same records from each, and refusals of what is cut short or more than plain values."""

import hashlib
import io
import lzma
import pickle
import struct
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from data import DataRefusedError
from data.card import DataCard, data_card
from data.files import FileSources, fetch
from data.formats import Cifar
from data.readers import images
from data.reading import read
from tests.data.conftest import CardOf, Document, tar
from tests.support.mirror import MIRROR, needs_mirror
from tests.support.parts import Parts, whole
from tests.support.refusals import contradicting, refused_as

Batch = tuple[NDArray[np.uint8], list[int], list[int]]
SHAPE, SIZE = (3, 2, 2), 12
DECLARED = Cifar(kind="cifar", train=("b1", "b2"), test="t")
FINE = DECLARED.model_copy(update={"labels": "fine"})


def batches() -> dict[str, Batch]:
    """Pixels, coarse labels and fine labels of three small batches."""
    random = np.random.default_rng(0)
    made = {}
    for name, n in (("b1", 3), ("b2", 5), ("t", 2)):
        labels = random.integers(0, 4, (2, n)).tolist()
        made[name] = random.integers(0, 256, (n, SIZE), dtype=np.uint8), labels[0], labels[1]
    return made


def in_bytes(batch: Batch, *, fine: bool) -> bytes:
    """The binary version."""
    pixels, coarse, exact = batch
    rows = zip(coarse, exact, pixels, strict=True)
    return b"".join(bytes([a, b] if fine else [a]) + row.tobytes() for a, b, row in rows)


def text(value: bytes) -> bytes:
    """A string as Python 2 pickled it."""
    return b"T" + struct.pack("<i", len(value)) + value


def numbers(values: list[int]) -> bytes:
    """A list of integers."""
    return b"](" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"e"


def in_a_pickle(batch: Batch, *, fine: bool, kind: bytes = b"u1") -> bytes:
    """The Python version, protocol 2 of Python 2, with what NumPy wrote of an array then."""
    pixels, coarse, exact = batch
    shape = b"J" + struct.pack("<i", len(pixels)) + b"J" + struct.pack("<i", SIZE) + b"\x86"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + text(kind) + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xff"
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    array = made + b"(K\x01" + shape + dtype + b"\x89" + text(pixels.tobytes()) + b"tb"
    labels = text(b"fine_labels") + numbers(exact) + text(b"coarse_labels") + numbers(coarse)
    labels = labels if fine else text(b"labels") + numbers(coarse)
    return b"\x80\x02}(" + text(b"data") + array + labels + b"u."


def archive(path: Path, members: Mapping[str, bytes]) -> Path:
    """A tar archive, packed as its name says, with its members in the reverse order and a file of no interest."""
    packed = [*reversed(members.items()), ("readme.html", b"hello")]
    return tar(path, {f"cifar/{name}": content for name, content in packed})


def loose(folder: Path, contents: Mapping[str, bytes]) -> dict[str, Path]:
    """A file for each batch."""
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {name.split(".")[0]: folder / name for name in contents}


def read_in(files: Mapping[str, Path], declared: Cifar = DECLARED) -> Parts:
    """The records of some files."""
    return whole(images.read_cifar(files, declared, shape=SHAPE))


@pytest.mark.parametrize("fine", [False, True])
def test_every_form_gives_the_same_records(
    tmp_path: Path, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "CIFAR_ROWS", 2)
    made, declared = batches(), FINE if fine else DECLARED
    plain = {f"{name}.bin": in_bytes(batch, fine=fine) for name, batch in made.items()}
    pickled = {name: in_a_pickle(batch, fine=fine) for name, batch in made.items()}
    forms = [
        loose(tmp_path, plain),
        loose(tmp_path, {f"{name}.xz": lzma.compress(content) for name, content in plain.items()}),
        {"archive": archive(tmp_path / "binary.tar.gz", plain)},
        {"archive": archive(tmp_path / "python.tar.gz", pickled)},
    ]
    pixels = np.concatenate([made["b1"][0], made["b2"][0]]).reshape(-1, *SHAPE)
    labels = [label for name in ("b1", "b2") for label in made[name][2 if fine else 1]]
    for files in forms:
        parts = read_in(files, declared)
        assert np.array_equal(parts.train.features, pixels.astype(np.float32) / np.float32(255))
        assert parts.train.features.dtype == np.float32 and parts.train.labels.dtype == np.int64
        assert parts.train.labels.tolist() == labels
        assert parts.test.labels.tolist() == made["t"][2 if fine else 1]


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_a_pickle_that_runs_something_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    harmful = pickle.dumps({b"data": Malicious(trap), b"labels": []}, protocol=2)
    path = archive(tmp_path / "python.tar.gz", {"b1": harmful, "b2": b"", "t": b""})
    with refused_as("unreadable_file", DataRefusedError, name="b1"):
        read_in({"archive": path})
    assert not trap.exists()
    pickle.loads(harmful)
    assert trap.exists()


@pytest.mark.parametrize(
    "name", ["builtins\neval", "os\nsystem", "numpy\nload", "numpy.core.multiarray\nfromfile"]
)
def test_a_pickle_gets_nothing_but_what_an_array_needs(name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="no array needs"):
        images.load_pickle(io.BytesIO(b"\x80\x02c" + name.encode() + b"\n."))


def broken_batches() -> dict[str, bytes]:
    """Batches that are none."""
    batch = batches()["b1"]
    whole_pickle = in_a_pickle(batch, fine=False)
    return {
        "b1.bin": in_bytes(batch, fine=False)[:-1],
        "b1": whole_pickle[:-30],
        "b1 ": b"",
        " b1": in_a_pickle((batch[0], [1, 2], []), fine=False),
        "  b1": in_a_pickle(batch, fine=False, kind=b"O8"),
        "   b1": in_a_pickle(batch, fine=True),
        "b1  ": pickle.dumps([1, 2], protocol=2),
    }


@pytest.mark.parametrize("name", broken_batches())
def test_a_batch_that_is_not_whole_is_refused(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path / "a.tar.gz", {name.strip(): broken_batches()[name]})
    with refused_as("unreadable_file", DataRefusedError, name="b1") as refusal:
        read_in({"archive": path})
    assert refusal.value.__suppress_context__


@pytest.mark.parametrize("name", ["a.tar.gz", "b1.bin.xz"])
def test_a_file_that_is_cut_short_or_lacks_a_batch_is_refused(tmp_path: Path, name: str) -> None:
    made = {f"{key}.bin": in_bytes(batch, fine=False) for key, batch in batches().items()}
    cut = archive(tmp_path / "a.tar.gz", {"b1.bin": made["b1.bin"]})
    files = {"archive": cut}
    if name != "a.tar.gz":
        files = loose(tmp_path, {"b1.bin.xz": lzma.compress(made["b1.bin"])[:-20]})
    with refused_as("unreadable_file", DataRefusedError):
        read_in(files)


@pytest.fixture
def card(images: Document, card_of: CardOf) -> CardOf:
    """The card of an archive, or else of loose batches that only a mirror has."""

    def make(alternative: Mapping[str, bytes], **changes: Any) -> DataCard:
        loose_files = {
            name.split(".")[0]: {"saved_as": name, "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in alternative.items()
        }
        published = {"urls": ["http://127.0.0.1:1/a.tar.gz"], "md5": "0" * 32}
        return card_of(
            images
            | {"shape": list(SHAPE), "records": {"train": 8, "test": 2}, "classes": list("abcd")}
            | {"reader": {"kind": "cifar", "train": ["b1", "b2"], "test": "t"}}
            | {"files": {"archive": published}, "alternatives": [loose_files]}
            | changes
        )

    return make


def test_the_set_that_the_mirror_holds_is_taken(card: CardOf, tmp_path: Path) -> None:
    plain = {f"{name}.bin": in_bytes(batch, fine=False) for name, batch in batches().items()}
    sources = FileSources(root=tmp_path, mirror=tmp_path / "mirror", cache=tmp_path / "cache")
    (tmp_path / "mirror" / "dots").mkdir(parents=True)
    with refused_as("not_fetched", DataRefusedError, name="a.tar.gz"):
        fetch(card(plain), sources, key=bytes(32))
    held = loose(tmp_path / "mirror" / "dots", plain)
    assert fetch(card(plain), sources, key=bytes(32)) == held
    assert len(whole(read(card(plain), held)).train) == 8
    only = card(plain, files=card(plain).model_dump(mode="json")["alternatives"][0], alternatives=[])
    held["t"].unlink()
    with refused_as("not_fetched", DataRefusedError, name="t.bin"):
        fetch(only, sources, key=bytes(32))


def test_a_published_md5_is_checked(card: CardOf, tmp_path: Path) -> None:
    (tmp_path / "dots").mkdir()
    path = archive(tmp_path / "dots" / "a.tar.gz", {})
    sources = FileSources(root=tmp_path, mirror=tmp_path, cache=tmp_path / "cache")
    file = {"urls": ["http://127.0.0.1:1/a.tar.gz"], "md5": hashlib.md5(path.read_bytes()).hexdigest()}
    right = card({}, files={"archive": file}, alternatives=[])
    assert fetch(right, sources, key=bytes(32)) == {"archive": path}
    path.write_bytes(b"")
    with refused_as("altered_file", DataRefusedError, path=path, kind="md5"):
        fetch(right, sources, key=bytes(32))


@pytest.mark.parametrize(
    ("files", "keys"),
    [
        ({"archive": {"path": "a.tar", "md5": "0" * 32}}, ("md5", "urls")),
        (
            {"archive": {"urls": ["https://a.invalid/a"], "md5": "0" * 32, "sha256": "0" * 64}},
            ("sha256", "keyed_sha256", "md5"),
        ),
        ({"archive": {"saved_as": "a.tar", "keyed_sha256": "0" * 64}}, ("keyed_sha256", "path")),
        ({"b1": {"path": "b1.bin", "sha256": "0" * 64}}, ("files", "reader.kind")),
    ],
)
def test_files_that_do_not_fit_are_refused(card: CardOf, files: Document, keys: tuple[str, ...]) -> None:
    with contradicting(*keys):
        card({}, files=files, alternatives=[])


def test_cards_without_alternatives_are_written_as_before_there_were_any() -> None:
    written = data_card("mnist").model_dump(mode="json")
    assert "alternatives" not in written and "md5" not in written["files"]["train_images"]


@pytest.mark.soak
@needs_mirror
def test_real_cifar_10(tmp_path: Path) -> None:
    """The first batch: its known checksum and labels."""
    card = data_card("cifar-10")
    files = fetch(card, FileSources(root=tmp_path, mirror=Path(MIRROR or ""), cache=tmp_path), key=bytes(32))
    assert set(files) == {*card.reader.train, card.reader.test} if isinstance(card.reader, Cifar) else False
    with lzma.open(files["data_batch_1"]) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"
    few = Cifar(kind="cifar", train=("data_batch_1",), test="test_batch")
    blocks = images.read_cifar(files, few, shape=card.input_shape)
    train = whole(takewhile(lambda block: block.part == "train", blocks)).train
    assert np.bincount(train.labels).tolist() == [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    assert train.features.shape == (10000, 3, 32, 32) and train.features.max() == 1
