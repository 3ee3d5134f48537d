"""Repeated k-fold cross-validation: the records to train on and the records to test on."""

from dataclasses import dataclass

import numpy as np
from numpy.random import MT19937, RandomState, SeedSequence
from numpy.typing import NDArray

from data.schema.errors import DataRefusedError


@dataclass(frozen=True)
class Fold:
    """The indices of the test records and of all others, for training: int64, ascending."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]


def fold(records: int, *, folds: int, repeat: int, index: int, seed: int) -> Fold:
    """Fold `index` of `folds` in repetition `repeat`, both counted from 0; depends only on these numbers.

    The records are shuffled by (seed, repeat), with a NumPy generator whose numbers never change, and divided into
    folds whose sizes differ by at most one. Raises DataRefusedError if there is no such fold.
    """
    if not 2 <= folds <= records:
        raise DataRefusedError(
            f"{folds} folds of {records} records cannot be made; choose from 2 to {records} folds."
        )
    if not 0 <= index < folds:
        raise DataRefusedError(f"there is no fold {index} of {folds}; choose from 0 to {folds - 1}.")
    if repeat < 0 or seed < 0:
        raise DataRefusedError(
            "a seed and a repetition of folds are counted from 0; choose numbers that are not negative."
        )
    shuffled = RandomState(MT19937(SeedSequence((seed, repeat)))).permutation(records).astype(np.int64)
    start, stop = (records * place // folds for place in (index, index + 1))
    return Fold(
        train=np.sort(np.concatenate([shuffled[:start], shuffled[stop:]])), test=np.sort(shuffled[start:stop])
    )


def check_classes(labels: NDArray[np.int64], chosen: Fold) -> None:
    """Raise DataRefusedError if all training records, or all test records, have the same class.

    labels: of all records, int64 [n]. Only for public records, since a refusal reveals something about them.
    """
    for name, part in (("training", chosen.train), ("test", chosen.test)):
        if len(np.unique(labels[part])) < 2:
            raise DataRefusedError(f"the {name} records of a fold are all of one class; choose fewer folds.")
