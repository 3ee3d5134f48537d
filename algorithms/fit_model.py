"""The module that `fit` is given as a model with one loss per record, tried on made-up records."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from algorithms.errors import RefusedError
from algorithms.fit_losses import (
    class_count,
    losses_of_records,
    warn_of_probabilities,
    without_reduction,
)
from algorithms.fit_records import FitRecords, without_shapes
from algorithms.gradients import Packing, Padding, RowModule
from algorithms.gradients.model import copy_module
from algorithms.gradients.patches import without_shortcuts
from algorithms.gradients.randomness import same_randomness
from algorithms.models.feature_transforms import in_front
from algorithms.models.libraries import warn_of_unusable_torchvision
from algorithms.models.mapped_arrays import as_type, row_chunks
from algorithms.models.model import Model, ModelRefusedError, batch_experts, check_module
from algorithms.models.number_losses import CountLoss, QuantileLoss
from algorithms.models.objectives import as_they_are, squared_error
from algorithms.raw_scales import warn_of_raw_scales
from algorithms.target_scale import TargetScale


@without_shapes()
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
    # What the engine takes is one array in and [batch, outputs] out; `RowModule` makes that of any other module.
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
    # The loss decides what the targets are, so it comes before their range is checked.
    outputs, shape = tuple(result.shape[1:]), records.labels.shape[1:]
    _check_entries(trained, records)
    records = _with_numbers(records, loss, outputs, is_flat=is_flat)
    is_real = records.labels.dtype.kind == "f"
    losses, bounds, ignored = losses_of_records(
        loss, records.labels, outputs, is_flat=is_flat, is_column=records.is_column
    )
    warn_of_probabilities(loss, result)
    if records.packing is None:
        warn_of_raw_scales(trained, records.features, records.whole, is_public=is_public)
    classes = max(class_count(outputs, shape), 2 if ignored is None else 1)
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
    if loss is squared_error or without_reduction(loss)[0] in ("mse_loss", "MSELoss"):
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


def _with_numbers(
    records: FitRecords, loss: object, outputs: tuple[int, ...], *, is_flat: bool
) -> FitRecords:
    """The records, with whole targets as real numbers if they are no classes and the user's own loss takes numbers.

    So a hinge loss has its -1 and 1, which are inspected as numbers, too.
    """
    labels, shape = records.labels, records.labels.shape[1:]
    if labels.dtype.kind == "f" or without_reduction(loss)[0] != "" or not callable(loss):
        return records
    if labels.min() >= 0 and labels.max() < max(2, class_count(outputs, shape)):
        return records
    numbers = replace(records, labels=as_type(labels, np.float32))
    try:
        losses, _, _ = losses_of_records(
            loss, numbers.labels, outputs, is_flat=is_flat, is_column=numbers.is_column
        )
        with torch.no_grad(), same_randomness():
            takes = losses(torch.zeros(3, *outputs), torch.zeros(3, *shape)).shape == (3,)
    except Exception:  # it looks them up, as cross_entropy does
        return records
    return numbers if takes else records


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
