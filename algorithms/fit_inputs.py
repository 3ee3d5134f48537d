"""Converts the arguments of `fit` for the barrier: records to one array, a module to one with per-record losses."""

import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from algorithms.errors import RefusedError
from algorithms.models.linear import CROSS_ENTROPY, LOGISTIC, as_they_are
from algorithms.models.model import LossBounds, Model, ModelRefusedError, check_module, copied
from algorithms.models.objectives import IGNORED
from algorithms.models.packing import Called, Packing

Losses: TypeAlias = Callable[[Tensor, Tensor], Tensor]

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
_BOUNDS = {"cross_entropy": CROSS_ENTROPY, "binary_cross_entropy_with_logits": LOGISTIC}


@dataclass(frozen=True)
class GivenRecords:
    """features [n, *shape], float32 or int32; labels [n, ...], int64 or, for real numbers, float32.

    is_column: whether labels [n] were given as [n, 1], the shape that the user's own loss then expects.
    """

    features: NDArray[Any]
    labels: NDArray[Any]
    packing: Packing | None
    is_column: bool = False


def records_of(model: object, X: Any, y: Any, loss: object) -> GivenRecords:
    if not isinstance(model, nn.Module):
        raise RefusedError(f"the model is a {type(model).__name__}; give a torch.nn.Module.")
    if y is None:
        X, y = _stacked(X)
    labels = _array(y, "y")
    is_column = labels.ndim == 2 and labels.shape[1] == 1
    labels = labels[:, 0] if is_column else labels
    by_name, least = (X, 1) if isinstance(X, Mapping) else ({"X": X}, 2)
    parts = {str(name): _array(part, str(name)) for name, part in by_name.items()}
    if (
        not parts
        or any(part.ndim < least or len(part) != len(labels) for part in parts.values())
        or not len(labels)
    ):
        shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in parts.items())
        raise RefusedError(
            f"the shapes are {shapes} and y {list(labels.shape)}; give X as [n, ...] and y as [n] or [n, ...], of the"
            " same number of records, one at least."
        )
    for name, part in (*parts.items(), ("y", labels)):
        if not np.isfinite(part).all():
            raise RefusedError(
                f"{name} holds NaN or infinite values, or numbers beyond float32; leave these records out or fill"
                " them in."
            )
    if isinstance(X, Mapping):
        packing = Packing.of(parts)
        features = packing.packed(parts)
    else:
        packing, features = None, parts["X"]
        is_token = features.dtype.kind in "iu" and any(
            isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in model.modules()
        )
        if is_token:
            Packing.of(parts)  # refuses numbers beyond 32 bits
        features = np.ascontiguousarray(features, np.int32 if is_token else np.float32)
    is_real = labels.dtype.kind == "f" or not _counts_classes(loss)
    labels = np.ascontiguousarray(labels, np.float32 if is_real else np.int64)
    return GivenRecords(features, labels, packing, is_column)


def pooled(records: GivenRecords, people: Any, most: int, key: bytes) -> GivenRecords:
    """Group records by person, [people, most, ...]; of more than `most`, those with the smallest keyed hash are kept.

    Empty rows are marked as absent (see `algorithms.core.people`). For most = 1 there is no second dimension. Raises
    RefusedError unless `people` has an entry for each record.
    """
    if most < 1:
        raise RefusedError(
            f"per_person is {most}; give the most records of a person that are used, at least 1."
        )
    features, labels, shape = records.features, records.labels, np.shape(people)
    if shape != (len(labels),):
        raise RefusedError(
            f"people has shape {list(shape)}; give a number or a name for each of the {len(labels)} records."
        )
    codes, names = pd.factorize(pd.Series(people.cpu().numpy() if isinstance(people, Tensor) else people))
    if (codes < 0).any():
        raise RefusedError("people names nobody for some records; leave these out.")
    hashes = [
        hashlib.blake2b(row.tobytes() + label.tobytes(), key=key, digest_size=8).digest()
        for row, label in zip(features, labels, strict=True)
    ]
    order = np.lexsort((np.frombuffer(b"".join(hashes), ">u8"), codes))
    codes = codes[order]
    rank = np.arange(len(codes)) - np.searchsorted(codes, codes)
    places = np.full((len(names), most), -1)
    places[codes[rank < most], rank[rank < most]] = order[rank < most]
    filled = np.where(places < 0, places[:, :1], places)
    features, labels = features[filled], labels[filled]
    if most == 1:
        return replace(records, features=features[:, 0], labels=labels[:, 0])
    labels[places < 0] = np.nan if labels.dtype.kind == "f" else IGNORED
    return replace(records, features=features, labels=labels)


def _stacked(dataset: Any) -> tuple[Any, Any]:
    """The items of a map-style Dataset, pairs or mappings with labels, as arrays."""
    if isinstance(dataset, DataLoader):
        raise RefusedError("X is a DataLoader, and batches are drawn here; give its dataset.")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(
        dataset, np.ndarray | Tensor | Mapping | list | tuple | pd.DataFrame
    ):
        raise RefusedError(
            "y is missing; give X and y, or in their place a map-style torch Dataset of pairs."
        )
    try:
        pairs = [_pair(dataset[place]) for place in range(len(dataset))]
        records, targets = zip(*pairs, strict=True)
        y = np.stack([np.asarray(target) for target in targets])
        if not isinstance(records[0], Mapping):
            return np.stack([np.asarray(record) for record in records]), y
        return {name: np.stack([np.asarray(some[name]) for some in records]) for name in records[0]}, y
    except (TypeError, ValueError, KeyError, StopIteration):
        raise RefusedError(
            "the Dataset does not hold pairs (record, target), or mappings with labels, of numbers all of one shape;"
            " transform them to tensors."
        ) from None


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, Mapping):
        record, target = item
        return record, target
    own = dict(item)
    return own, own.pop("labels" if "labels" in own else "label")


def _array(values: Any, name: str) -> NDArray[Any]:
    try:
        found = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        raise RefusedError(
            f"{name} is not an array of numbers; give a numpy array or a torch tensor."
        ) from None
    if found.dtype.kind not in "fiub":
        raise RefusedError(f"{name} holds {found.dtype}; give numbers, classes as whole numbers from 0.")
    with np.errstate(over="ignore"):
        return found.astype(np.float32, copy=False) if found.dtype.kind == "f" else found


def model_of(module: nn.Module, loss: object, records: GivenRecords) -> tuple[Model, int]:
    """A copy of the module with per-record losses, and the number of classes.

    Raises RefusedError if it does not accept such records.
    """
    check_module(module)
    own = _own_copy(module)
    is_flat = False
    if records.packing is not None or not isinstance(found := _probed(own, records), Tensor):
        own = Called(own, records.packing)
    elif found.dim() == 1:
        own, is_flat = Called(own, None), True
    outputs, shape = _output_shape(own, records), records.labels.shape[1:]
    _check_entries(own, records)
    is_real = records.labels.dtype.kind == "f"
    losses, bounds, ignored = _losses(loss, records, outputs, is_flat=is_flat)
    classes = outputs[0] if outputs[1:] == shape else outputs[-1]  # PyTorch puts classes first
    classes = max(classes, 2 if ignored is None else 1)
    counted = records.labels
    if shape and ignored is not None:
        counted = counted[counted != ignored]
    if not is_real and len(counted) and counted.min() < 0:
        raise RefusedError("y holds classes below 0; count the classes from 0.")
    if not is_real and len(counted) and counted.max() >= classes:
        raise RefusedError(
            f"y holds classes beyond the model's {classes} outputs; give it an output for each class, or y as real"
            " numbers if they are no classes."
        )
    note = (
        "The start is the weights that the module was given with; what they were made of is not in this card."
    )
    model = Model(
        type(module).__name__,
        own,
        losses,
        as_they_are,
        bounds=bounds if not shape and len(outputs) == 1 else None,
        notes=(note,),
        packing=records.packing,
        label_shape=shape,
        label_dtype=torch.from_numpy(np.empty(0, records.labels.dtype)).dtype,
    )
    return model, classes


def _own_copy(module: nn.Module) -> nn.Module:
    try:
        own = copied(module).cpu()
    except Exception as error:
        why = str(error).partition("\n")[0][:200]
        raise ModelRefusedError(
            f"the model cannot be copied ({why}); let it keep no tensors of its passes."
        ) from None
    for layer in own.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.sparse = False  # noise makes every entry's gradient dense
    return own


def _probed(module: nn.Module, records: GivenRecords) -> Any:
    """The module's outputs for two records of zeros, with masks of ones."""
    try:
        return _called_with(module, records, [np.zeros(records.features.shape[1:])] * 2)
    except Exception as error:
        why = str(error).partition("\n")[0]
        parts = () if records.packing is None else records.packing.parts
        form = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
        raise RefusedError(
            f"the model does not take records of shape {form or list(records.features.shape[1:])} ({why}); change the"
            " model or X."
        ) from None


def _check_entries(module: nn.Module, records: GivenRecords) -> None:
    """Raises RefusedError if an embedding lacks an entry; tries the smallest and largest number at each position."""
    if records.features.dtype != np.int32:
        return
    try:
        _called_with(module, records, [records.features.max(axis=0), records.features.min(axis=0)])
    except Exception:  # its message may reveal a record
        raise RefusedError(
            "X holds whole numbers that the model's tables have no entry for; count from 0, and give each table an"
            " entry for each number."
        ) from None


def _called_with(module: nn.Module, records: GivenRecords, rows: list[NDArray[Any]]) -> Any:
    """The module's outputs for the records' whole numbers, with zeros for real numbers and ones for masks."""
    given = torch.from_numpy(np.stack(rows).astype(records.features.dtype))
    if records.packing is not None:
        parts = zip(records.packing.split(given), records.packing.parts, strict=True)
        given = records.packing.joined(
            [
                torch.ones_like(some) if part.is_mask else torch.zeros_like(some) if part.is_real else some
                for some, part in parts
            ]
        )
    with torch.no_grad():
        return copy.deepcopy(module)(given)


def _output_shape(module: nn.Module, records: GivenRecords) -> tuple[int, ...]:
    """The shape of the module's output for one record."""
    found = _probed(module, records)
    if not isinstance(found, Tensor) or found.dim() < 2 or len(found) != 2:
        raise RefusedError(
            "the model does not give one row of outputs for each record; let it return [batch, outputs], or"
            " [batch, ..., outputs], itself or as `logits`."
        )
    return tuple(found.shape[1:])


def _losses(
    loss: object, records: GivenRecords, outputs: tuple[int, ...], *, is_flat: bool
) -> tuple[Losses, LossBounds | None, int | None]:
    """The per-record loss [batch], its public bounds, and the class of ignored targets.

    outputs: the shape of a record's outputs. is_flat: whether the module gives [batch], as one's own loss takes it.
    """
    name, of_torch, reduction = _of_torch(loss)
    if isinstance(loss, nn.Module) and any(part.requires_grad for part in loss.parameters()):
        raise RefusedError(
            "the loss has parameters of its own, and only those of the model are trained; move them into the model, or"
            " freeze them by loss.requires_grad_(False)."
        )
    if of_torch is None and not callable(loss):
        raise RefusedError(
            f"there is no loss {loss if isinstance(loss, str) else type(loss)!r}; name one of torch.nn.functional, such"
            " as 'cross_entropy'."
        )
    each: Any = loss if of_torch is None else of_torch
    by_index = of_torch is not None and name in _BY_INDEX
    is_real, is_own = records.labels.dtype.kind == "f", of_torch is None
    as_real = is_real or not (is_own or by_index)
    if not is_own and as_real:
        _check_shapes(name, of_torch, outputs, records.labels.shape[1:], is_real=is_real)
    keeps = is_own and is_real and not is_flat and _takes_column(each, outputs, records.labels.shape[1:])
    none = -1 if name == "multilabel_margin_loss" else -100  # marks the end of a record's classes
    ignored: int | None = getattr(loss, "ignore_index", none) if by_index else None

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
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
        found: Tensor = each(outputs, targets)
        if is_own or found.dim() <= 1:
            return found
        found = found.flatten(1)
        if reduction == "sum":
            return found.sum(-1)
        if ignored is None:
            return found.mean(-1)
        return found.sum(-1) / targets.flatten(1).ne(ignored).sum(-1).clamp(min=1)

    return losses, _BOUNDS.get(name) if reduction == "" else None, ignored


def _check_shapes(
    name: str, loss: object, outputs: tuple[int, ...], targets: tuple[int, ...], *, is_real: bool
) -> None:
    """Raises RefusedError if a record's outputs and targets differ in shape and a loss of PyTorch compares them."""
    ours = isinstance(loss, partial) or type(loss).__module__.startswith("torch.nn.")
    if not ours or targets in (outputs, outputs[:-1] if outputs[-1] == 1 else outputs):
        return
    if name in _BY_INDEX and is_real:
        raise RefusedError(
            f"y holds real numbers, and the loss {name} takes classes; give them as whole numbers from 0, such as"
            " y.astype(int)."
        )
    shapes = (", ".join(map(str, ("batch", *shape))) for shape in (outputs, targets))
    raise RefusedError(
        "the model gives outputs [{}] and y has targets [{}], which".format(*shapes)
        + f" the loss {name} compares one by one; let the model give outputs of the targets' shape."
    )


def _counts_classes(loss: object) -> bool:
    """Whether whole numbers are classes for a loss; other losses of PyTorch take them as numbers."""
    name, of_torch, _ = _of_torch(loss)
    return of_torch is None or name in _BY_INDEX | _BINARY


def _takes_column(loss: Losses, outputs: tuple[int, ...], targets: tuple[int, ...]) -> bool:
    """Whether a loss takes outputs [batch, 1] for targets [batch], given these shapes of a record's."""
    if outputs != (*targets, 1):
        return False
    try:
        return loss(torch.zeros(3, *outputs), torch.zeros(3, *targets)).shape == (3,)
    except Exception:  # it expects [batch]
        return False


def _of_torch(loss: object) -> tuple[str, Any, str]:
    """A PyTorch loss without reduction: its functional name, the function, and its reduction ("" for the default)."""
    if isinstance(loss, torch.jit.ScriptModule):
        raise RefusedError("the loss is TorchScript; give the torch.nn.Module that it was made from.")
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            return "", None, ""
        own = copy.deepcopy(loss)
        own.reduction = "none"  # type: ignore[assignment]
        kind = type(loss).__name__
        return _FUNCTIONAL.get(kind, kind), own, str(loss.reduction)
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", "")
    found = getattr(functional, name, None) if name else None
    if found is None or not (isinstance(loss, str) or found is loss):
        return "", None, ""
    try:
        has_reduction = "reduction" in inspect.signature(found).parameters
    except (TypeError, ValueError):
        has_reduction = False
    return (name, partial(found, reduction="none"), "") if has_reduction else ("", None, "")
