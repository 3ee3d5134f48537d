"""Repeated k-fold cross-validation: which records a model is trained on, and which it is tested on."""

from dataclasses import dataclass

import numpy as np
from numpy.random import MT19937, RandomState, SeedSequence
from numpy.typing import NDArray

from data.schema.errors import DataRefusedError


@dataclass(frozen=True)
class Fold:
    """The records to test on, and all others to train on: their indices, int64, ascending."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]


def fold(records: int, *, folds: int, repeat: int, index: int, seed: int) -> Fold:
    """Fold `index` of `folds` in repetition `repeat`, both counted from 0; a function of the numbers alone.

    The records are shuffled by (seed, repeat), with a generator of NumPy's whose numbers never change, and cut into
    folds whose sizes differ by at most one. Raises DataRefusedError when there is no such fold.
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
    """Raises DataRefusedError when the records to train on, or those to test on, are all of one class.

    labels: of all records, int64 [n]. For public records only: a refusal says something about them.
    """
    for name, part in (("training", chosen.train), ("test", chosen.test)):
        if len(np.unique(labels[part])) < 2:
            raise DataRefusedError(f"the {name} records of a fold are all of one class; choose fewer folds.")
