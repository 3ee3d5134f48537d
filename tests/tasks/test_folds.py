"""Repeated k-fold cross-validation: every record is tested on once a repetition, and the cut never changes."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from data import DataRefusedError
from tasks.comparing import Fold
from tasks.comparing.trial import check_classes, cut

PUBLISHED = {(0, 0): [1, 7], (0, 1): [3, 9], (7, 0): [2, 3, 8]}


class Cut(NamedTuple):
    train: NDArray[np.int64]
    test: NDArray[np.int64]


def fold(records: int, *, folds: int, repeat: int, index: int, seed: int) -> Cut:
    return Cut(*cut(records, Fold(folds, seed, repeat, index)))


@given(records=st.integers(2, 200), data=st.data(), repeat=st.integers(0, 5), seed=st.integers(0, 2**40))
def test_the_folds_of_a_repetition_are_a_partition_into_equal_parts(
    records: int, data: st.DataObject, repeat: int, seed: int
) -> None:
    folds = data.draw(st.integers(2, records))
    cuts = [fold(records, folds=folds, repeat=repeat, index=index, seed=seed) for index in range(folds)]
    assert sorted(np.concatenate([each.test for each in cuts])) == list(range(records))
    assert {len(each.test) for each in cuts} <= {records // folds, -(-records // folds)}
    for each in cuts:
        assert each.train.dtype == each.test.dtype == np.int64
        assert (np.diff(each.train) > 0).all() and (np.diff(each.test) > 0).all()
        assert sorted([*each.train, *each.test]) == list(range(records))


def test_a_cut_is_the_one_that_was_published() -> None:
    """Another cut would give other results under the same name."""
    assert fold(12, folds=5, repeat=0, index=0, seed=0).test.tolist() == PUBLISHED[0, 0]
    assert fold(12, folds=5, repeat=1, index=0, seed=0).test.tolist() == PUBLISHED[0, 1]
    assert fold(12, folds=5, repeat=0, index=4, seed=7).test.tolist() == PUBLISHED[7, 0]


def test_repetitions_and_seeds_cut_differently() -> None:
    cuts = {
        fold(1000, folds=5, repeat=repeat, index=0, seed=seed).test.tobytes()
        for repeat in range(4)
        for seed in range(4)
    }
    assert len(cuts) == 16


def test_every_record_is_tested_on_alike_often() -> None:
    """Pearson's chi-square over 200 repetitions of one fold in four; a false alarm in 10^6 (100 records)."""
    counts = np.zeros(100)
    for repeat in range(200):
        counts[fold(100, folds=4, repeat=repeat, index=1, seed=3).test] += 1
    assert ((counts - 50) ** 2 / (50 * 0.75)).sum() * 0.99 < 181  # chi-square, 99 degrees of freedom


def test_more_folds_than_records_are_refused() -> None:
    with pytest.raises(DataRefusedError, match="11 folds of 10 records cannot be made; choose from 2 to 10"):
        fold(10, folds=11, repeat=0, index=0, seed=0)


def test_a_fold_of_one_class_is_refused() -> None:
    chosen = fold(10, folds=5, repeat=0, index=2, seed=0)
    mixed = np.zeros(10, np.int64)
    mixed[[chosen.train[0], chosen.test[0]]] = 1
    check_classes(mixed, *chosen)
    for name, part in (("training", chosen.train), ("test", chosen.test)):
        labels = mixed.copy()
        labels[part] = 0
        words = rf"^[^\n]*the {name} records of a fold are all of one class[^\n]*$"
        with pytest.raises(DataRefusedError, match=words):
            check_classes(labels, *chosen)
