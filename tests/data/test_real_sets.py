"""The data sets of the catalogue, against published facts about them; the made-up one as MATLAB draws it."""

import sys
from pathlib import Path

import numpy as np
import pytest

from data import DataRefusedError, dataset_info
from data.card import data_card
from data.files import FileSources, fetch
from data.formats import Digits, Synthetic
from data.readers import images
from data.readers.records import RecordBatch
from data.reading import read
from tests.data.conftest import CardOf, Document
from tests.support.mirror import MIRROR, needs_mirror
from tests.support.parts import Parts, whole
from tests.support.refusals import refused_as

A9A = {  # rows of the published file, whose order is that of adult.data
    0: [3, 11, 14, 19, 39, 42, 55, 64, 67, 73, 75, 76, 80, 83],
    7: [5, 7, 17, 22, 36, 40, 51, 63, 67, 73, 74, 76, 81, 83],
    27: [5, 16, 20, 37, 40, 63, 68, 73, 74, 76, 82, 93],  # two values missing
    58: [4, 6, 15, 22, 36, 40, 55, 63, 67, 73, 74, 76, 82, 83],  # 48 hours
    155: [4, 6, 16, 22, 36, 40, 48, 63, 67, 73, 74, 76, 81, 83],  # 46 hours
    247: [2, 6, 16, 22, 36, 42, 49, 64, 67, 72, 74, 76, 78, 83],  # 34 hours
    13866: [5, 7, 15, 22, 36, 40, 49, 63, 67, 73, 74, 76, 78, 83],  # the four edges of fnlwgt,
    10858: [1, 6, 16, 22, 36, 40, 55, 61, 67, 72, 74, 76, 82, 83],
    6393: [3, 6, 17, 26, 35, 43, 58, 66, 67, 72, 74, 76, 78, 103],
    29641: [4, 6, 15, 24, 38, 42, 52, 66, 67, 72, 74, 76, 79, 83],  # and the last numbers below two of them
    9840: [1, 6, 17, 22, 36, 42, 55, 64, 67, 72, 74, 76, 78, 83],
    30469: [2, 7, 18, 22, 36, 40, 49, 63, 71, 73, 74, 76, 82, 83],
}


def parts_of(name: str, cache: Path) -> Parts:
    """The records of a data set of the catalogue, from the mirror."""
    card = data_card(name)
    places = FileSources(root=Path(), mirror=Path(MIRROR) if MIRROR else None, cache=cache)
    return whole(read(card, fetch(card, places, key=bytes(32))))


def test_digits(tmp_path: Path) -> None:
    parts = parts_of("digits", tmp_path)
    assert (len(parts.train), len(parts.test)) == (1436, 361)
    labels = np.concatenate([parts.train.labels, parts.test.labels])
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (parts.train.features.min(), parts.train.features.max()) == (0, 1)
    assert parts.train.features.shape[1:] == (1, 8, 8) and parts.train.features.dtype == np.float32


def test_digits_are_read_without_the_import_of_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    declared = data_card("digits").reader
    assert isinstance(declared, Digits)
    assert len(whole(images.read_digits(declared, shape=(1, 8, 8))).train.labels) == 1797


def test_digits_that_are_not_the_declared_ones_are_refused() -> None:
    with refused_as("other_software", DataRefusedError):
        whole(images.read_digits(Digits(kind="digits", sha256="0" * 64), shape=(1, 8, 8)))


MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@needs_mirror
@pytest.mark.parametrize(
    ("name", "means", "counts"),
    [("mnist", (0.1307, 0.1325), MNIST_TRAIN), ("fashion-mnist", (0.2860, 0.2868), [6000] * 10)],
)
def test_images(name: str, means: tuple[float, float], counts: list[int], tmp_path: Path) -> None:
    parts = parts_of(name, tmp_path)
    assert parts.train.features.shape == (60000, 1, 28, 28)
    assert parts.test.features.shape == (10000, 1, 28, 28)
    assert np.bincount(parts.train.labels).tolist() == counts
    assert parts.train.features.mean(dtype=np.float64) == pytest.approx(means[0], abs=5e-5)
    assert parts.test.features.mean(dtype=np.float64) == pytest.approx(means[1], abs=5e-5)


@needs_mirror
def test_adult(tmp_path: Path) -> None:
    parts = parts_of("adult", tmp_path)
    assert parts.train.features.shape == (32561, 113) and parts.test.features.shape == (16281, 113)
    assert np.bincount(parts.train.labels).tolist() == [24720, 7841]
    assert np.bincount(parts.test.labels).tolist() == [12435, 3846]
    assert parts.train.features.min() == 0 and parts.train.features.max() == 1


@needs_mirror
def test_adult_sends_what_is_missing_and_nothing_else_to_other(tmp_path: Path) -> None:
    card, parts = data_card("adult"), parts_of("adult", tmp_path)
    assert card.reader.kind == "csv"
    ends = np.cumsum([column.width for column in card.reader.columns])
    last = [*zip(ends - 1, card.reader.columns, strict=True)]
    other = [place for place, column in last if column.kind == "categorical"]
    assert (parts.train.features[:, other].sum(axis=1) > 0).sum() == 2399
    assert (parts.test.features[:, other].sum(axis=1) > 0).sum() == 1221
    numbers = [place for place, column in last if column.kind == "numeric"]
    assert (np.delete(parts.train.features, numbers, axis=1).sum(axis=1) == 8).all()


def gradient_at_zero(*parts: RecordBatch) -> float:
    """Norm of the gradient of the mean logistic loss at 0, with a bias."""
    x = np.concatenate([records.features for records in parts]).astype(np.float64)
    residuals = 0.5 - np.concatenate([records.labels for records in parts])
    return float(np.hypot(np.linalg.norm(x.T @ residuals), residuals.sum()) / len(x))


@needs_mirror
def test_adult_in_binary_features_is_a9a(tmp_path: Path) -> None:
    """Norms of DP-AGD's Table 1 (over all records) and of the published test file; then single rows."""
    parts = parts_of("adult-a9a", tmp_path)
    assert gradient_at_zero(parts.train, parts.test) == pytest.approx(0.72558, abs=5e-6)
    assert gradient_at_zero(parts.test) == pytest.approx(0.7330, abs=5e-5)
    assert set(np.unique(parts.train.features)) == {0, 1} == set(np.unique(parts.test.features))
    assert parts.train.features.shape == (32561, 123) and parts.test.features.shape == (16281, 123)
    for row, ones in A9A.items():
        assert (np.flatnonzero(parts.train.features[row]) + 1).tolist() == ones
    missing = (parts.train.features.sum(axis=1) < 14).sum(), (parts.test.features.sum(axis=1) < 14).sum()
    assert missing == (2399, 1221)


@needs_mirror
def test_bank_marketing_and_the_encoded_table_say_the_same(tmp_path: Path) -> None:
    own, encoded = (together(parts_of(name, tmp_path)) for name in ("bank-marketing", "bank-encoded"))
    assert np.bincount(own.labels).tolist() == np.bincount(encoded.labels).tolist() == [39922, 5289]
    assert own.features.sum(axis=0)[own_places()] == pytest.approx(
        encoded.features.sum(axis=0)[encoded_places()], rel=1e-4
    )
    jobs, unknown = own.features[:, 1:13], own.features[:, 12]
    assert (jobs.sum(axis=1) == 1).all() and unknown.sum() == 288


def together(parts: Parts) -> RecordBatch:
    """Training and test records one after the other."""
    return RecordBatch(
        np.concatenate([parts.train.features, parts.test.features]),
        np.concatenate([parts.train.labels, parts.test.labels]),
    )


def own_places() -> list[int]:
    """In bank-marketing: age, jobs, single, married, education, default, balance, housing, loan, contact,
    duration to previous."""
    return [0, *range(1, 12), 13, 14, *range(16, 19), 20, 21, 22, 23, 24, 25, 28, 29, 30, 31]


def encoded_places() -> list[int]:
    """The same in the encoded table."""
    return [0, *range(1, 12), 12, 13, *range(14, 17), 17, 18, 19, 20, 21, 22, 24, 25, 27, 28]


@pytest.fixture(scope="session")
def kddcup99(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """The 10 percent file and the test records, read once."""
    return parts_of("kddcup99-10-percent", tmp_path_factory.mktemp("cache"))


@pytest.mark.soak
@needs_mirror
def test_kddcup99(kddcup99: Parts) -> None:
    assert kddcup99.train.features.shape == (494021, 121) and kddcup99.test.features.shape == (311029, 121)
    smurf, neptune, others = 280790, 107201, 2203 + 979 + 264 + 21
    assert kddcup99.train.labels.sum() == smurf + neptune + others
    new_in_the_test_records = 5000 + 794 + 759 + 2
    assert kddcup99.test.labels.sum() == 164091 + 58001 + 1098 + 12 + 87 + 9 + new_in_the_test_records


@pytest.mark.soak
@needs_mirror
def test_kddcup99_knows_every_category_but_one(kddcup99: Parts) -> None:
    for start, stop in ((1, 4), (4, 74), (74, 85)):
        assert (kddcup99.train.features[:, start:stop].sum(axis=1) == 1).all()
        unknown = (kddcup99.test.features[:, start:stop].sum(axis=1) == 0).sum()
        assert unknown == (2 if start == 4 else 0)  # the service "icmp"


@pytest.mark.soak
@needs_mirror
def test_no_record_of_kddcup99_goes_beyond_the_norms_of_its_card(kddcup99: Parts) -> None:
    check_norms("kddcup99-10-percent", kddcup99)


@needs_mirror
@pytest.mark.parametrize("name", ["adult-a9a", "bank-encoded", "digits"])
def test_no_real_record_goes_beyond_the_norms_of_its_card(name: str, tmp_path: Path) -> None:
    check_norms(name, parts_of(name, tmp_path))


def check_norms(name: str, parts: Parts) -> None:
    l1, l2 = dataset_info(data_card(name)).feature_norms or (0, 0)
    for records in (parts.train, parts.test):
        rows = records.features.reshape(len(records), -1)
        assert rows.min() >= 0
        assert rows.sum(axis=1).max() <= l1 and np.linalg.norm(rows, axis=1).max() <= l2 * (1 + 1e-6)


@pytest.fixture(scope="module")
def parts() -> Parts:
    """The records of the catalogue."""
    return whole(read(data_card("synthetic-logistic"), {}))


def test_the_features_are_drawn_column_by_column(parts: Parts) -> None:
    drawn = np.random.RandomState(1).random_sample(110_000 * 20)
    columns = drawn[: 100_000 * 20].reshape(20, 100_000)
    np.testing.assert_array_equal(parts.train.features, columns.T.astype(np.float32))
    assert parts.test.features[1, 0] == np.float32(drawn[100_000 * 20 + 1])
    assert parts.train.features.flags.c_contiguous and parts.train.features.max() <= 1


def test_the_problem_is_that_of_the_paper(parts: Parts) -> None:
    """Smoothness 5.100 as its code has it (four times the logistic loss's), and its share of negative labels."""
    x = parts.train.features.astype(np.float64)
    assert np.linalg.eigvalsh(x.T @ x / len(x))[-1] + 0.02 == pytest.approx(5.1, abs=5e-4)
    assert 1 - parts.train.labels.mean() == pytest.approx(0.09457, abs=1e-12)
    assert 1 - parts.test.labels.mean() == pytest.approx(0.0923, abs=1e-12)


def test_the_labels_are_the_sides_of_the_hyperplane(parts: Parts) -> None:
    w = np.random.RandomState(75).standard_normal(20)
    margin = parts.test.features.astype(np.float64) @ w
    sure = np.abs(margin) > 1e-5
    assert sure.mean() > 0.999
    assert ((margin > 0) == (parts.test.labels == 1))[sure].all()


def test_other_records_than_the_declared_ones_are_refused(table: Document, card_of: CardOf) -> None:
    known = data_card("synthetic-logistic").reader
    assert isinstance(known, Synthetic)
    own = {"files": {}, "split": None, "shape": [20], "records": {"train": 100, "test": 10}}
    card = card_of(table | own | {"reader": known.model_dump(mode="json")})
    with refused_as("other_software", DataRefusedError):
        whole(read(card, {}))
