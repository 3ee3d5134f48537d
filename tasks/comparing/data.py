"""The records of a comparison: prepared once per data set, read and folded once per process."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.random import MT19937, RandomState, SeedSequence
from numpy.typing import NDArray

from data import PublicDescription
from data.card import DataRefusedError
from data.prepared import Prepared, load
from data.readers.records import Records
from tasks.comparing.trials import Fold, Trial, digest_of
from tasks.config import params
from tasks.config.environment import data_mirror, home
from tasks.prepare import prepare

_KEPT_FOLDS = 16
_LARGE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Sides:
    """The training and test records of a cell. public: the public facts of exactly these records."""

    public: PublicDescription
    train: Records
    test: Records


@dataclass(frozen=True)
class Cut:
    """The indices of the test records and of all others, for training: int64, ascending."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]


def cut(records: int, chosen: Fold) -> Cut:
    """The records of a fold; depends only on these numbers.

    The records are shuffled by (seed, repeat), with a NumPy generator whose numbers never change, and divided into
    folds whose sizes differ by at most one. Raises DataRefusedError if there are more folds than records.
    """
    if chosen.k > records:
        raise DataRefusedError(
            f"{chosen.k} folds of {records} records cannot be made; choose from 2 to {records} folds."
        )
    generator = RandomState(MT19937(SeedSequence((chosen.seed, chosen.repeat))))
    shuffled = generator.permutation(records).astype(np.int64)
    start, stop = (records * place // chosen.k for place in (chosen.fold, chosen.fold + 1))
    return Cut(
        train=np.sort(np.concatenate([shuffled[:start], shuffled[stop:]])), test=np.sort(shuffled[start:stop])
    )


def check_classes(labels: NDArray[np.int64], chosen: Cut) -> None:
    """Raise DataRefusedError if all training records, or all test records, have the same class.

    labels: of all records, int64 [n]. Only for public records, since a refusal reveals something about them.
    """
    for name, part in (("training", chosen.train), ("test", chosen.test)):
        if len(np.unique(labels[part])) < 2:
            raise DataRefusedError(f"the {name} records of a fold are all of one class; choose fewer folds.")


def prepared_folder(store: Path, cell: Trial) -> Path:
    """The folder below `store` of a cell's prepared data set; another card or transform has another folder."""
    transform = "" if cell.transform == "none" else f"-{cell.transform}"
    transform += f"-{digest_of(cell.encoder)}" if cell.encoder else ""
    return store / f"{cell.dataset}-{cell.card}{transform}"


def make_ready(store: Path, cell: Trial, *, root: Path) -> None:
    """Prepare a cell's data set below `store` unless it exists; raises DataRefusedError if that is impossible."""
    folder = prepared_folder(store, cell)
    if not folder.exists():
        encoder = {key: value for key, value in cell.encoder.items() if key != "sha256"} or None
        chosen = {"dataset": cell.dataset, "transform": cell.transform, "encoder": encoder}
        wanted = params.parse({"data": chosen}, reads=("data",))
        cards = root / "data" / "cards"
        prepare(wanted, mirror=data_mirror(), home=home(), destination=folder, root=root, cards=cards)


def sides(store: Path, cell: Trial) -> Sides:
    """The records of a cell; raises DataRefusedError if a fold cannot be trained on."""
    folder = prepared_folder(store, cell)
    if cell.fold is None:
        return _own_split(folder)
    return (_folded if _is_large(folder) else _kept)(folder, cell.fold)


def public_of(store: Path, cell: Trial) -> PublicDescription:
    """The public facts of the records that a cell trains on."""
    folder = prepared_folder(store, cell)
    if cell.fold is None:
        return _own_split(folder).public
    found = _indices(folder, cell.fold)
    return replace(_loaded(folder).public, records=len(found.train), test_records=len(found.test))


@lru_cache(maxsize=64)
def _loaded(folder: Path) -> Prepared:
    return load(folder)


@lru_cache(maxsize=_KEPT_FOLDS)
def _own_split(folder: Path) -> Sides:
    """The data's own split; small arrays are read into memory, large ones stay memory-mapped."""
    data = _loaded(folder)
    train = Records(data.train_features, data.train_labels)
    test = Records(data.test_features, data.test_labels)
    if not _is_large(folder):
        train, test = (Records(np.array(side.features), np.array(side.labels)) for side in (train, test))
    return Sides(data.public, train, test)


def _folded(folder: Path, fold: Fold) -> Sides:
    data, found = _loaded(folder), _indices(folder, fold)
    features = np.concatenate([data.train_features, data.test_features])
    labels = np.concatenate([data.train_labels, data.test_labels])
    train, test = (Records(features[side], labels[side]) for side in (found.train, found.test))
    public = replace(data.public, records=len(found.train), test_records=len(found.test))
    return Sides(public, train, test)


_kept = lru_cache(maxsize=_KEPT_FOLDS)(_folded)


@lru_cache(maxsize=256)
def _indices(folder: Path, chosen: Fold) -> Cut:
    """The indices of a fold's records in the union, training records first; raises DataRefusedError as above."""
    data = _loaded(folder)
    if data.public.pooled is not None:
        raise DataRefusedError(
            f"folds of {data.public.dataset!r} were asked for, whose training records are people with several rows;"
            " leave folds out, or keep one record a person."
        )
    labels = np.concatenate([data.train_labels, data.test_labels])
    found = cut(len(labels), chosen)
    if data.public.known.kind == "class":
        check_classes(labels, found)
    return found


def _is_large(folder: Path) -> bool:
    data = _loaded(folder)
    return data.train_features.nbytes + data.test_features.nbytes > _LARGE_BYTES
