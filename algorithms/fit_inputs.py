"""Converts the arguments of `fit` for the barrier: records to one array, a module to one with per-record losses."""

import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

from algorithms.errors import RefusedError
from algorithms.gradients import Packing, Padding, RowModule
from algorithms.gradients.model import copy_module
from algorithms.gradients.patches import without_shortcuts
from algorithms.gradients.randomness import same_randomness
from algorithms.models.bounds import CROSS_ENTROPY, LOGISTIC, LossBounds
from algorithms.models.feature_transforms import in_front
from algorithms.models.libraries import warn_of_unusable_torchvision
from algorithms.models.mapped_arrays import (
    as_type,
    is_finite,
    new_array,
    row_chunks,
    take_rows,
)
from algorithms.models.model import Model, ModelRefusedError, batch_experts, check_module
from algorithms.models.number_losses import CountLoss, QuantileLoss
from algorithms.models.objectives import IGNORED, as_they_are, squared_error
from algorithms.models.packed_records import pack, packing_of
from algorithms.raw_scales import warn_of_raw_scales, whole_numbers
from algorithms.target_scale import TargetScale
from algorithms.user_warnings import warn_user

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_BY_INDEX = {"cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss"}
"""Losses whose targets are classes, as whole numbers."""
_BINARY = {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
_FUNCTIONAL = {
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MultiMarginLoss": "multi_margin_loss",
    "MultiLabelMarginLoss": "multilabel_margin_loss",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
}
_REDUCTIONS = ("none", "mean", "sum", "batchmean")
_NUMBERS = "fiub"
"""Kinds of NumPy's types."""
_BOUNDS = {"cross_entropy": CROSS_ENTROPY, "binary_cross_entropy_with_logits": LOGISTIC}


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
def _without_shapes() -> Iterator[None]:
    """Refuse for lack of memory without the array's shape, which NumPy names: it begins with the number of records."""
    try:
        yield
    except MemoryError:
        raise RefusedError(
            "memory did not suffice for the records as one array; give fewer or smaller ones, or a smaller per_person."
        ) from None


@_without_shapes()
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
    # PyTorch's other losses take whole numbers as numbers.
    counts_classes = _without_reduction(loss)[0] in {"", *_BY_INDEX, *_BINARY}
    is_real = labels.dtype.kind == "f" or not counts_classes
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


@_without_shapes()
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


@_without_shapes()
def model_of(
    module: nn.Module, loss: object, records: FitRecords, *, is_public: bool = False
) -> tuple[Model, int, FitRecords]:
    """A copy of the module with per-record losses, the number of classes, and the records for it.

    Whole targets that are no classes of the model's become numbers for a loss of the user's own that takes them.
    is_public: whether a warning may depend on the records' values. Raises RefusedError if the module does not accept
    such records.
    """
    check_module(module)
    warn_of_unusable_torchvision(module)
    trained = _copy_to_train(module)
    records = _with_padding(trained, records)
    is_flat = False
    if records.packing is not None or not isinstance(result := _probe(trained, records), Tensor):
        trained = RowModule(trained, records.packing)
    elif result.dim() == 1:
        trained, is_flat = RowModule(trained, None), True
    result = _probe(trained, records)
    if not isinstance(result, Tensor):
        raise RefusedError(
            f"the model returns a {type(result).__name__}{_named_outputs(result)}; let it return one tensor, such as"
            " torch.cat(heads, dim=1) of all heads, [batch, outputs], which a loss of your own takes apart again."
        )
    if result.dim() < 2 or len(result) != 2:
        raise RefusedError(
            "the model does not give one row of outputs for each record; let it return [batch, outputs], or"
            " [batch, ..., outputs], itself or as `logits`."
        )
    outputs, shape = tuple(result.shape[1:]), records.labels.shape[1:]
    _check_entries(trained, records)
    records = _with_numbers(records, loss, outputs, is_flat=is_flat)
    is_real = records.labels.dtype.kind == "f"
    losses, bounds, ignored = _losses(loss, records, outputs, is_flat=is_flat)
    _warn_of_probabilities(loss, result)
    if records.packing is None:
        warn_of_raw_scales(trained, records.features, records.whole, is_public=is_public)
    classes = max(_classes(outputs, shape), 2 if ignored is None else 1)
    lowest, highest = (0, 0) if is_real else _class_range(records.labels, ignored if shape else None)
    if lowest < 0:
        raise RefusedError(
            "y holds classes below 0; count the classes from 0, or give y as real numbers, by .astype('float32'), if"
            " they are no classes."
        )
    if highest >= classes:
        raise RefusedError(
            f"y holds classes beyond the model's {classes} outputs, which are for the classes 0 to {classes - 1}; count"
            " the classes from 0 and give the model an output for each, or y as real numbers if they are no classes."
        )
    model = Model(
        type(module).__name__,
        trained,
        losses,
        as_they_are,
        bounds=bounds if not shape and len(outputs) == 1 else None,
        packing=records.packing,
        label_shape=shape,
        label_dtype=torch.from_numpy(np.empty(0, records.labels.dtype)).dtype,
        padding=records.padding,
    )
    return model, classes, records


def on_its_scale(model: Model, loss: object, records: FitRecords, scale: TargetScale) -> Model:
    """The model on the scale of the one number that it predicts; raises RefusedError for another shape or loss."""
    if isinstance(model.module, RowModule) or tuple(_probe(model.module, records).shape) != (2, 1):
        raise RefusedError(
            "target_scale is of one number for each record, and the model gives another shape; let it give [batch, 1]."
        )
    if loss is squared_error or _without_reduction(loss)[0] in ("mse_loss", "MSELoss"):
        model = replace(model, losses=squared_error)
    elif isinstance(loss, CountLoss | QuantileLoss):
        model = replace(model, losses=loss, scores=loss.scores)
    scale.check(model)
    return in_front(scale.module(()), model)


def _class_range(labels: NDArray[Any], ignored: int | None) -> tuple[int, int]:
    """The lowest and the highest class that is not ignored, and 0."""
    ends = [0]
    for rows in row_chunks(labels):
        classes = labels[rows] if ignored is None else labels[rows][labels[rows] != ignored]
        ends += [int(classes.min()), int(classes.max())] if classes.size else []
    return min(ends), max(ends)


def _warn_of_probabilities(loss: object, outputs: Tensor) -> None:
    """Warn if outputs for made-up records, [2, outputs, ...], are what the loss makes of scores by itself."""
    name, values = _without_reduction(loss)[0], outputs.detach().double()
    is_share = bool(((values >= 0) & (values <= 1)).all())
    sums_to_one = torch.allclose(values.sum(-1), torch.ones_like(values[..., 0]), rtol=0, atol=1e-5)
    if is_share and name == "cross_entropy" and values.shape[-1] > 1 and sums_to_one:
        function = "softmax"
    elif is_share and name == "binary_cross_entropy_with_logits":
        function = "sigmoid"
    else:
        return
    warn_user(
        f"the model's outputs are probabilities, of which {name} takes the {function} once more, so it hardly learns;"
        f" take the last {function} out of the model.",
    )


def _classes(outputs: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The number of classes, given the shapes of a record's outputs and targets; PyTorch puts classes first."""
    return outputs[0] if outputs[1:] == shape else outputs[-1]


def _named_outputs(outputs: object) -> str:
    """What a model returns in place of a tensor, in words."""
    if isinstance(outputs, Mapping):
        return f" of {', '.join(map(str, outputs))}, and no `logits`"
    return f" of {len(outputs)}" if isinstance(outputs, list | tuple) else ""


def _copy_to_train(module: nn.Module) -> nn.Module:
    try:
        duplicate = copy_module(module).cpu()
    except Exception as error:
        why = str(error).partition("\n")[0][:200]
        raise ModelRefusedError(
            f"the model cannot be copied ({why}); let it keep no tensors of its passes."
        ) from None
    for layer in duplicate.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.sparse = False  # noise makes every entry's gradient dense
    batch_experts(duplicate)
    return duplicate


def _with_padding(module: nn.Module, records: FitRecords) -> FitRecords:
    """The records with a mark on each tensor of which the model takes no padding alone, such as a text without words.

    Made-up records then have something besides, too. Raises RefusedError if a private record is padding alone.
    """
    tables = (layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
    numbers = {0, *(table.padding_idx for table in tables if table.padding_idx is not None)}
    module = module if records.packing is None else RowModule(module, records.packing)
    parts = 1 if records.packing is None else len(records.packing.parts)
    for number in sorted(numbers):
        padding = Padding((number,))
        if _failure(module, records, [number] * parts) is None:
            continue
        others = [padding.smallest_other] * parts
        if _failure(module, records, others) is not None:
            continue  # something else is wrong
        alone = [_failure(module, records, [*others[:i], number, *others[i + 1 :]]) for i in range(parts)]
        for part_index, why in enumerate(alone):
            if why is not None:
                records = _mark_absent(records, part_index, padding, why)
    return records


def _failure(module: nn.Module, records: FitRecords, numbers: list[int]) -> str | None:
    """Why the model does not take records that are full of a number in each part; None if it does."""
    try:
        _called_with(module, _full(records, numbers))
    except Exception as error:
        return str(error).partition("\n")[0]
    return None


def _mark_absent(records: FitRecords, part_index: int, padding: Padding, why: str) -> FitRecords:
    """The records with the padding of one part, of which none may consist."""
    packing = records.packing
    values, name = records.features, "X"
    if packing is not None:
        values = packing.split(torch.from_numpy(records.features))[part_index].numpy()
        name = packing.parts[part_index].name
    flat = values.reshape(len(values), -1)
    if any(np.isin(flat[rows], padding.numbers).all(axis=1).any() for rows in row_chunks(flat)):
        raise RefusedError(
            f"{name} holds records of nothing but {padding.numbers[0]}, which the model does not take ({why}); leave"
            " them out, or let the model take them, as by lengths.clamp(min=1) for pack_padded_sequence."
        )
    if packing is None:
        return replace(records, padding=padding)
    parts = list(packing.parts)
    parts[part_index] = replace(parts[part_index], padding=padding)
    return replace(records, packing=Packing(tuple(parts)))


def _full(records: FitRecords, numbers: list[int]) -> Tensor:
    """Two records that are full of a number in each part, with masks of ones."""
    features, packing = records.features, records.packing
    if packing is None:
        dtype = torch.from_numpy(np.empty(0, features.dtype)).dtype
        return torch.full((2, *features.shape[1:]), numbers[0], dtype=dtype)
    return packing.join(
        [
            torch.full(
                (2, *part.shape),
                1 if part.is_mask else number,
                dtype=torch.float32 if part.is_real else torch.int32,
            )
            for part, number in zip(packing.parts, numbers, strict=True)
        ]
    )


def _plausible(records: FitRecords) -> Tensor:
    """Two records of zeros, with masks of ones, or of another number where no record is padding alone."""
    parts = [records] if records.packing is None else records.packing.parts
    return _full(records, [0 if part.padding is None else part.padding.smallest_other for part in parts])


def _probe(module: nn.Module, records: FitRecords) -> Any:
    """The module's outputs for two made-up records."""
    try:
        return _called_with(module, _plausible(records))
    except Exception as error:
        why = str(error).partition("\n")[0]
        parts = () if records.packing is None else records.packing.parts
        form = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
        raise RefusedError(
            f"the model does not take records of shape {form or list(records.features.shape[1:])} ({why}); change the"
            " model or X."
        ) from None


def _check_entries(module: nn.Module, records: FitRecords) -> None:
    """Raises RefusedError if an embedding lacks an entry; tries the smallest and largest number at each position."""
    features, packing = records.features, records.packing
    if features.dtype != np.int32:
        return
    ends = torch.from_numpy(np.stack([features.max(axis=0), features.min(axis=0)]))
    if packing is None:
        ends = ends if records.padding is None else records.padding.replace_first(ends)
    else:
        plausible_parts = packing.split(_plausible(records))
        ends = packing.join(
            [
                plain
                if part.is_mask or part.is_real
                else end
                if part.padding is None
                else part.padding.replace_first(end)
                for end, plain, part in zip(packing.split(ends), plausible_parts, packing.parts, strict=True)
            ]
        )
    try:
        _called_with(module, ends)
    except Exception:  # its message may reveal a record
        raise RefusedError(
            "X holds whole numbers that the model's tables have no entry for; count from 0, and give each table an"
            " entry for each number."
        ) from None


@without_shortcuts()
def _called_with(module: nn.Module, rows: Tensor) -> Any:
    """The outputs of a copy, whose state stays as it was."""
    with torch.no_grad():
        return copy.deepcopy(module)(rows)


def _losses(
    loss: object, records: FitRecords, outputs: tuple[int, ...], *, is_flat: bool
) -> tuple[LossFunction, LossBounds | None, int | None]:
    """The per-record loss [batch], its public bounds, and the class of ignored targets.

    outputs: the shape of a record's outputs. is_flat: whether the module gives [batch], as one's own loss takes it.
    """
    name, loss_of_each, reduction = _without_reduction(loss)
    _check_arguments(loss_of_each)
    if isinstance(loss, nn.Module) and any(part.requires_grad for part in loss.parameters()):
        raise RefusedError(
            "the loss has parameters of its own, and only those of the model are trained; move them into the model, or"
            " freeze them by loss.requires_grad_(False)."
        )
    if not callable(loss_of_each):
        raise RefusedError(
            f"there is no loss {loss if isinstance(loss, str) else type(loss)!r}; name one of torch.nn.functional, such"
            " as 'cross_entropy'."
        )
    by_index, is_own = name in _BY_INDEX, name == ""
    is_real, shape = records.labels.dtype.kind == "f", records.labels.shape[1:]
    as_real = is_real or not (is_own or by_index)
    if not is_own:
        _check_targets(name, records.labels, outputs, is_real=is_real, as_real=as_real)
    keeps = is_own and is_real and not is_flat and _takes_column(loss_of_each, outputs, shape)
    none = -1 if name == "multilabel_margin_loss" else -100  # marks the end of a record's classes
    ignored: int | None = getattr(loss, "ignore_index", none) if by_index else None

    def match_shapes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if records.is_column and is_own:
            targets = targets[:, None]
        if is_flat and is_own:
            outputs = outputs[:, 0]
        if as_real:
            targets = targets.to(outputs.dtype)
            # [batch, 1] and [batch] would broadcast to [batch, batch]
            is_one = outputs.shape[-1] == 1 and outputs.dim() == targets.dim() + 1
            outputs = outputs[..., 0] if is_one and not keeps else outputs
        elif by_index and targets.dim() > 1 and outputs.shape[2:] != targets.shape[1:]:
            outputs = outputs.movedim(-1, 1)  # where PyTorch's losses expect the classes
        if name == "binary_cross_entropy":  # it raises an error for NaN, where a record has to count as zero
            outputs = outputs.nan_to_num(0.5)
        return outputs, targets

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        return _reduce_per_record(loss_of_each(*match_shapes(outputs, targets)), targets, reduction, ignored)

    # A mean may divide by weights of the whole batch, which the values without reduction do not show.
    if reduction not in (None, "none"):
        reduced: Any = getattr(functional, name) if reduction == "" else loss
        _check_reduction(
            lambda *pair: reduced(*match_shapes(*pair)),
            losses,
            _synthetic_pair(outputs, shape, by_class=not as_real, ignored=ignored),
            is_sum=reduction == "sum",
        )
    return losses, _BOUNDS.get(name) if reduction == "" or _is_default(loss) else None, ignored


def _is_default(loss: object) -> bool:
    """Whether a loss of PyTorch, as a module, computes what its function does with no more than two arguments."""
    kind = type(loss)
    if kind not in (nn.CrossEntropyLoss, nn.BCEWithLogitsLoss) or getattr(loss, "reduction", "") == "sum":
        return False
    usual: nn.Module = kind()
    names = ("weight", "pos_weight", "label_smoothing", "ignore_index")
    return all(getattr(loss, name, None) == getattr(usual, name, None) for name in names)


def _reduce_per_record(values: object, targets: Tensor, reduction: str | None, ignored: int | None) -> Tensor:
    """One loss per record, [batch], of a loss's values [batch, ...] for the targets of each record.

    Their sum or mean, by the loss's reduction; the mean is over the targets that are not `ignored`.
    """
    if not isinstance(values, Tensor):
        raise ModelRefusedError(
            f"the loss gives a {type(values).__name__}, but it has to give a tensor with a number for each record;"
            " compute it in PyTorch alone, without float() or .item(), and return it."
        )
    if reduction is None or values.dim() <= 1:
        return values
    values = values.flatten(1)
    if reduction in ("sum", "batchmean"):
        return values.sum(-1)
    if ignored is None:
        return values.mean(-1)
    return values.sum(-1) / targets.flatten(1).ne(ignored).sum(-1).clamp(min=1)


_COMPARED_RECORDS = 4
"""Made-up records on which a loss is compared with its own reduction."""


def _synthetic_pair(
    outputs: tuple[int, ...], shape: tuple[int, ...], *, by_class: bool, ignored: int | None
) -> tuple[Tensor, Tensor]:
    """Outputs between 0 and 1, with which all losses of PyTorch can be computed, and targets of each class in turn.

    ignored: left out of records of several targets, each of which has a mean over those of its targets that count.
    """
    draw = torch.Generator().manual_seed(0)
    outputs_drawn = torch.rand(_COMPARED_RECORDS, *outputs, generator=draw) * 0.8 + 0.1
    if not by_class:
        return outputs_drawn, torch.rand(_COMPARED_RECORDS, *shape, generator=draw)
    classes = max(2, _classes(outputs, shape))
    allowed = torch.tensor([index for index in range(classes) if not shape or index != ignored])
    order = torch.arange(_COMPARED_RECORDS * math.prod(shape)) % len(allowed)
    return outputs_drawn, allowed[order].view(_COMPARED_RECORDS, *shape)


def _check_reduction(
    reduced: Callable[[Tensor, Tensor], Any],
    losses: LossFunction,
    pair: tuple[Tensor, Tensor],
    *,
    is_sum: bool,
) -> None:
    """Raises RefusedError if a loss's own value is not the mean, or the sum, of the losses of the records."""
    try:
        with torch.no_grad(), same_randomness():
            value, each = reduced(*pair), losses(*pair)
            differs = value.dim() == 0 and each.dim() == 1
            differs &= not torch.allclose(value, each.sum() if is_sum else each.mean(), rtol=1e-4, atol=1e-6)
    except Exception:  # it is called on made-up records of the model once more, where errors are put in words
        return
    if differs:
        raise RefusedError(
            "the loss divides by what the records of a batch hold together, such as the weights of their classes or how"
            " many targets are not ignored, and so mixes records; give it reduction='none', with which each record's"
            " loss counts as it is, and the batch's is divided by its size."
        )


def _with_numbers(
    records: FitRecords, loss: object, outputs: tuple[int, ...], *, is_flat: bool
) -> FitRecords:
    """The records, with whole targets as real numbers if they are no classes and the user's own loss takes numbers.

    So a hinge loss has its -1 and 1, which are inspected as numbers, too.
    """
    labels, shape = records.labels, records.labels.shape[1:]
    if labels.dtype.kind == "f" or _without_reduction(loss)[0] != "" or not callable(loss):
        return records
    if labels.min() >= 0 and labels.max() < max(2, _classes(outputs, shape)):
        return records
    numbers = replace(records, labels=as_type(labels, np.float32))
    try:
        losses, _, _ = _losses(loss, numbers, outputs, is_flat=is_flat)
        with torch.no_grad(), same_randomness():
            takes = losses(torch.zeros(3, *outputs), torch.zeros(3, *shape)).shape == (3,)
    except Exception:  # it looks them up, as cross_entropy does
        return records
    return numbers if takes else records


def _check_targets(
    name: str, labels: NDArray[Any], outputs: tuple[int, ...], *, is_real: bool, as_real: bool
) -> None:
    """Raises RefusedError if a loss of PyTorch does not take such targets beside a record's outputs."""
    if name in _BINARY and is_real and (labels.min() < 0 or labels.max() > 1):
        raise RefusedError(
            f"y holds numbers below 0 or above 1, and the loss {name} takes 0 to 1; scale them."
        )
    shape = labels.shape[1:]
    if name == "cross_entropy" and not is_real and shape == outputs:
        raise RefusedError(
            "y holds whole numbers in the shape of the model's outputs; give classes, such as y.argmax(1), or real"
            " numbers as the probability of each class, such as y.astype(float)."
        )
    if name in _BY_INDEX and not is_real and shape and shape == outputs[1:] == outputs[:-1]:
        raise RefusedError(
            f"the model gives outputs {[*outputs]} for targets {[*shape]} of a record, where the first or the last"
            " dimension could be that of the classes; give a loss of your own, such as lambda outputs, targets:"
            f" {name}(outputs.movedim(-1, 1), targets, reduction='none').mean(1) for the last one."
        )
    if not as_real or shape in (outputs, outputs[:-1] if outputs[-1] == 1 else outputs):
        return
    if name in _BY_INDEX and is_real:
        raise RefusedError(
            f"y holds real numbers, and the loss {name} takes classes; give them as whole numbers from 0, such as"
            " y.astype(int)."
        )
    shapes = (", ".join(map(str, ("batch", *part))) for part in (outputs, shape))
    raise RefusedError(
        "the model gives outputs [{}] and y has targets [{}], which".format(*shapes)
        + f" the loss {name} compares one by one; let the model give outputs of the targets' shape."
    )


def _takes_column(loss: LossFunction, outputs: tuple[int, ...], targets: tuple[int, ...]) -> bool:
    """Whether a loss takes outputs [batch, 1] for targets [batch], given these shapes of a record's."""
    if outputs != (*targets, 1):
        return False
    try:
        return loss(torch.zeros(3, *outputs), torch.zeros(3, *targets)).shape == (3,)
    except Exception:  # it expects [batch]
        return False


def _check_arguments(loss: Any) -> None:
    """Raises RefusedError if a loss takes more than outputs and targets."""
    try:
        taken = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):  # it states no arguments
        return
    needed = [
        parameter.name
        for parameter in taken
        if parameter.default is parameter.empty and parameter.kind in _BY_PLACE
    ]
    if len(needed) > 2:
        raise RefusedError(
            f"the loss takes {', '.join(needed)}, and it is called with outputs and targets alone; give one of your own"
            " that takes the others from the outputs, such as lambda outputs, targets:"
            " torch.nn.functional.gaussian_nll_loss(outputs[:, 0], targets, outputs[:, 1].exp(), reduction='none')."
        )


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _without_reduction(loss: object) -> tuple[str, Any, str | None]:
    """A loss as (its functional name, the loss of each record, its reduction).

    The name is "" if the loss is not PyTorch's, and the reduction None if it has none and "" if it is the default.
    """
    if isinstance(loss, type):
        raise RefusedError(
            f"the loss is the class {loss.__name__}; give an instance, such as {loss.__name__}()."
        )
    if isinstance(loss, torch.jit.ScriptModule):
        raise RefusedError("the loss is TorchScript; give the torch.nn.Module that it was made from.")
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            return "", loss, None
        unreduced = copy.deepcopy(loss)
        unreduced.reduction = "none"  # type: ignore[assignment]
        bases = [of.__name__ for of in type(loss).__mro__ if of.__module__ == "torch.nn.modules.loss"]
        kind = next((base for base in bases if not base.startswith("_")), "")
        reductions = _REDUCTIONS if kind in ("", "KLDivLoss") else _REDUCTIONS[:3]
        if loss.reduction not in reductions:
            raise RefusedError(
                f"the loss has the reduction {loss.reduction!r}; give it one of {', '.join(reductions)}."
            )
        name = next((_FUNCTIONAL[base] for base in bases if base in _FUNCTIONAL), kind)
        return name, unreduced, str(loss.reduction)
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", "")
    function = getattr(functional, name, None) if name else None
    if function is None or not (isinstance(loss, str) or function is loss):
        return "", loss, None
    try:
        has_reduction = "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        has_reduction = False
    return (name, partial(function, reduction="none"), "") if has_reduction else ("", loss, None)
