"""The records that `fit` is given as arrays, one row each or one for each person."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from algorithms.errors import RefusedError
from algorithms.fit_losses import takes_classes
from algorithms.gradients import Packing, Padding
from algorithms.models.mapped_arrays import as_type, is_finite, new_array, take_rows
from algorithms.models.objectives import IGNORED
from algorithms.models.packed_records import pack, packing_of
from algorithms.raw_scales import whole_numbers

_NUMBERS = "fiub"
"""Kinds of NumPy's types."""


@dataclass(frozen=True)
class FitRecords:
    """features [n, *shape], float32 or int32; labels [n, ...], int64 or, for real numbers, float32.

    is_column: whether labels [n] were given as [n, 1], the shape that the user's own loss then expects. padding: what
    no record consists of alone; of packed records, their parts have it. whole: what of the features had a type of whole
    numbers before they became float32, in words.
    """

    features: NDArray[Any]
    labels: NDArray[Any]
    packing: Packing | None
    is_column: bool = False
    padding: Padding | None = None
    whole: str = ""


@contextmanager
def without_shapes() -> Iterator[None]:
    """Refuse for lack of memory without the array's shape, which NumPy names: it begins with the number of records."""
    try:
        yield
    except MemoryError:
        raise RefusedError(
            "memory did not suffice for the records as one array; give fewer or smaller ones, or a smaller per_person."
        ) from None


@without_shapes()
def records_of(model: object, X: Any, y: Any, loss: object, *, n_is_public: bool = True) -> FitRecords:
    """The records as arrays.

    n_is_public: whether refusals may say how many there are. Raises RefusedError if they do not fit.
    """
    if not isinstance(model, nn.Module):
        raise RefusedError(f"the model is a {type(model).__name__}; give a torch.nn.Module.")
    if y is None:
        X, y = _stack(X)
    check_index(X, y, "y")
    labels = _array(y, "y")
    is_column = labels.ndim == 2 and labels.shape[1] == 1
    labels = labels[:, 0] if is_column else labels
    by_name, min_dims = (X, 1) if isinstance(X, Mapping) else ({"X": X}, 2)
    parts = {str(name): _array(part, str(name)) for name, part in by_name.items()}
    if (
        not parts
        or any(part.ndim < min_dims or len(part) != len(labels) for part in parts.values())
        or not len(labels)
    ):
        shapes = ", ".join(f"{name} {_shape(part, n_is_public)}" for name, part in parts.items())
        raise RefusedError(
            f"the shapes are {shapes} and y {_shape(labels, n_is_public)}; give X as [n, features] or [n, ...] and y as"
            " [n] or [n, ...], of the same number of records, one at least."
        )
    for name, part in (*parts.items(), ("y", labels)):
        if not is_finite(part):
            raise RefusedError(
                f"{name} holds NaN or infinite values, or numbers beyond float32; leave these records out or fill"
                " them in."
            )
    whole = ""
    if isinstance(X, Mapping):
        packing = packing_of(parts)
        features = pack(parts, packing)
    else:
        packing, features = None, parts["X"]
        is_token = features.dtype.kind in "iu" and any(
            isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in model.modules()
        )
        if is_token:
            packing_of(parts)  # refuses numbers beyond 32 bits
        else:
            whole = whole_numbers(X, features)
        features = as_type(features, np.int32 if is_token else np.float32)
    is_real = labels.dtype.kind == "f" or not takes_classes(loss)
    labels = as_type(labels, np.float32 if is_real else np.int64)
    return FitRecords(features, labels, packing, is_column, whole=whole)


def _shape(part: NDArray[Any], n_is_public: bool) -> str:
    """The shape of an array in words, without how many records there are if that is private."""
    first = part.shape[:1] if n_is_public or not part.ndim else ("n",)
    return f"[{', '.join(map(str, (*first, *part.shape[1:])))}]"


def check_index(X: Any, other: Any, name: str) -> None:
    """Raises RefusedError if both have indexes of pandas that differ, since rows are taken by their position."""
    both = [part.index for part in (X, other) if isinstance(part, pd.DataFrame | pd.Series)]
    if len(both) == 2 and not both[0].equals(both[1]):
        raise RefusedError(
            f"X and {name} have different indexes, and rows are matched by their position; give {name}.loc[X.index], or"
            f" {name}.to_numpy() if the order is the same."
        )


@without_shapes()
def group_rows_by_user(
    records: FitRecords, people: Any, max_rows: int, key: bytes, *, n_is_public: bool = True
) -> FitRecords:
    """Group records by person, [people, max_rows, ...]; of more rows, those with the smallest keyed hash stay.

    Empty rows are marked as absent (see `algorithms.core.user_level`). For max_rows = 1 there is no second dimension.
    Raises RefusedError unless `people` has an entry for each record, which says how many there are where `n_is_public`.
    """
    if max_rows < 1:
        raise RefusedError(
            f"per_person is {max_rows}; give the most records of a person that are used, at least 1."
        )
    features, labels = records.features, records.labels
    if max_rows > len(labels):
        raise RefusedError(
            f"per_person is {max_rows}, and room is made for as many of each person, but there are"
            f" {f'{len(labels)}' if n_is_public else 'fewer'} records; give the most that one person usually has."
        )
    try:
        fits = np.shape(people) == (len(labels),)
        codes, names = pd.factorize(pd.Series(people.cpu().numpy() if isinstance(people, Tensor) else people))
    except (TypeError, ValueError):  # rows of several lengths, or what is neither a number nor a name
        fits = False
    if not fits:
        raise RefusedError(
            f"people is no list of numbers or names; give a number or a name for each of the"
            f"{f' {len(labels)}' if n_is_public else ''} records."
        )
    if (codes < 0).any():
        raise RefusedError("people names nobody for some records; leave these out.")
    hashes = bytearray()
    for row, label in zip(features, labels, strict=True):
        hashes += hashlib.blake2b(row.tobytes() + label.tobytes(), key=key, digest_size=8).digest()
    order = np.lexsort((np.frombuffer(hashes, ">u8"), codes))
    codes = codes[order]
    rank = np.arange(len(codes)) - np.searchsorted(codes, codes)
    row_index = np.full((len(names), max_rows), -1)
    row_index[codes[rank < max_rows], rank[rank < max_rows]] = order[rank < max_rows]
    filled = np.where(row_index < 0, row_index[:, :1], row_index)
    features, labels = take_rows(features, filled), take_rows(labels, filled)
    if max_rows == 1:
        return replace(records, features=features[:, 0], labels=labels[:, 0])
    labels[row_index < 0] = np.nan if labels.dtype.kind == "f" else IGNORED
    return replace(records, features=features, labels=labels)


def _stack(dataset: Any) -> tuple[Any, Any]:
    """The items of a map-style Dataset, pairs or mappings with labels, as arrays."""
    if isinstance(dataset, DataLoader):
        raise RefusedError("X is a DataLoader, and batches are drawn here; give its dataset.")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(
        dataset, np.ndarray | Tensor | Mapping | list | tuple | pd.DataFrame | IterableDataset
    ):
        raise RefusedError(
            "y is missing; give X and y, or in their place a map-style torch Dataset of pairs."
        )
    arrays: dict[str | None, NDArray[Any]] = {}
    names: set[Any] | None = None
    for index in range(len(dataset)):
        item = dataset[index]  # its own errors are not caught
        try:
            record, target = _pair(item)
            parts = dict(record) if isinstance(record, Mapping) else {"": record}
            if names not in (None, set(parts)):
                raise KeyError(*parts)
            names = set(parts)
            for name, value in (*parts.items(), (None, target)):
                arrays[name] = _fill(arrays.get(name), index, np.asarray(value), len(dataset))
        except (TypeError, ValueError, KeyError):
            raise _no_pairs() from None
    if not arrays:
        raise _no_pairs()
    y = arrays.pop(None)
    return arrays.get("", arrays), y


def _no_pairs() -> RefusedError:
    return RefusedError(
        "the Dataset does not hold pairs (record, target), or mappings with labels, of numbers all of one shape;"
        " transform them to tensors."
    )


def _fill(array: NDArray[Any] | None, index: int, value: NDArray[Any], count: int) -> NDArray[Any]:
    """The array with the value at an index; made for `count` values at the first, and again for a wider type."""
    if array is None:
        array = new_array((count, *value.shape), value.dtype)
    if value.shape != array.shape[1:]:
        raise ValueError("items of several shapes")
    if value.dtype != array.dtype:
        array = as_type(array, np.result_type(array, value))
    array[index] = value
    return array


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, Mapping):
        record, target = item
        return record, target
    fields_of_item = dict(item)
    return fields_of_item, fields_of_item.pop("labels" if "labels" in fields_of_item else "label")


_FOR_CATEGORIES = (
    "leave them out, or encode them, such as categories that are known without the data by a column of 0 and 1 for"
    " each"
)
_FOR_CLASSES = (
    "give classes as whole numbers from 0, such as [classes.index(text) for text in y] for a list of classes that"
    " is known without the data"
)


def _array(values: Any, name: str) -> NDArray[Any]:
    if np.ma.is_masked(values):
        raise RefusedError(f"{name} has masked values; leave these records out or fill them in.")
    try:
        if isinstance(values, Tensor):  # NumPy has no bfloat16
            array = (values.float() if values.is_floating_point() else values).detach().cpu().numpy()
        else:
            array = values if isinstance(values, np.memmap) else np.asarray(values)
        if isinstance(values, pd.DataFrame) and {of.kind for of in values.dtypes} <= {*_NUMBERS}:
            # Of several types, or with a mark for missing ones, they are objects until here.
            array = values.to_numpy(np.float64, na_value=np.nan) if array.dtype == object else array
    except (TypeError, ValueError, RuntimeError):
        array = np.empty(0, object)
    if array.dtype.kind not in _NUMBERS:
        if isinstance(values, Dataset):
            raise RefusedError(
                f"{name} is a {type(values).__name__}, which has the targets as well; leave y out."
            )
        if name != "y" and isinstance(values, pd.DataFrame) and (others := _no_numbers(values)):
            raise RefusedError(
                f"{name} has columns that hold no numbers: {', '.join(others)}; {_FOR_CATEGORIES}."
            )
        if array.dtype.kind in "US" or (
            array.dtype.kind == "O" and any(isinstance(value, str | bytes) for value in array.flat)
        ):
            raise RefusedError(f"{name} holds texts; {_FOR_CLASSES if name == 'y' else _FOR_CATEGORIES}.")
        if array.dtype.kind in "Mm":
            raise RefusedError(
                f"{name} holds dates or times; give numbers, such as days since a date that is known without the data."
            )
        raise RefusedError(
            f"{name} ({type(values).__name__}, {array.dtype}) is no dense array of numbers; give numbers, as by"
            ' .toarray(), .to_dense() or .astype("float32"), and classes as whole numbers from 0.'
        )
    with np.errstate(over="ignore"):
        return as_type(array, np.float32) if array.dtype.kind == "f" else array


def _no_numbers(table: pd.DataFrame) -> list[str]:
    return [
        str(name) for name, of in zip(table.columns, table.dtypes, strict=True) if of.kind not in _NUMBERS
    ]
