"""The made-up records are the ones that were published, drawn as MATLAB draws them."""

import numpy as np
import pytest

from data import DataRefusedError
from data.card import data_card
from data.formats import Synthetic
from data.reading import read
from tests.data.conftest import CardOf, Document
from tests.support.parts import Parts, whole


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
    with pytest.raises(DataRefusedError, match="synthetic records are not the declared ones; install"):
        whole(read(card, {}))
