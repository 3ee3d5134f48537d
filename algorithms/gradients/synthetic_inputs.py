"""Made-up records: their form, how they are drawn and changed, and what a model takes and labels by."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from algorithms.gradients.model import PerExampleModel
from algorithms.gradients.packing import Packing, Padding, Part
from algorithms.gradients.passes import (
    Passes,
)
from algorithms.gradients.randomness import same_randomness

_NUMBERS = torch.tensor([0.0, 1.0, -1.0, 0.5, -2.5, 10.0])
"""Labels of a regression; a loss may treat some specially, such as -1 for an unknown one."""

_LABELLINGS = 6
"""How many made-up labels of a record are tried."""
_BYTE = 256
"""The range of made-up integers for a model without an embedding table."""
_SPECIAL_TOKENS = 8
"""How many first entries of a table are treated as special tokens, such as padding."""
_CLASSES = 17
"""How many classes of labels are made up at most."""


@dataclass(frozen=True)
class InputSpec:
    """The form of records: shape and type of their inputs, integers below `entries`, labels below `classes`.

    constants: integers that may fill the rest of a record, as padding does. packing: for inputs of several tensors,
    each with its own entries. label_shape, label_dtype: of one record's labels. is_signed: whether labels are
    `_NUMBERS` in place of classes. padding: what no record consists of alone.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    entries: int = 2
    constants: tuple[int, ...] = (0, 1)
    classes: int = 2
    packing: Packing | None = None
    label_shape: tuple[int, ...] = ()
    label_dtype: torch.dtype = torch.int64
    is_signed: bool = False
    padding: Padding | None = None

    def draw(self, count: int, seed: int) -> "SyntheticBatch":
        """Draw made-up records: normal numbers, or random entries followed by one constant."""
        source = torch.Generator().manual_seed(seed)
        if self.packing is None:
            part = Part("", self.shape, self.dtype, self.entries, self.padding)
            inputs = self._part(part, count, seed, source)
        else:
            drawn = [self._part(part, count, seed, source) for part in self.packing.parts]
            inputs = self.packing.join(drawn)
        return SyntheticBatch(inputs.to(self.device), self.labels(count, seed), self.packing, self.padding)

    def labels(self, count: int, seed: int) -> Tensor:
        """The labels of `draw`: classes or numbers in turn."""
        labels_of_record = math.prod(self.label_shape)
        # [count, labels of a record]
        order = torch.arange(seed, seed + count)[:, None] + torch.arange(labels_of_record)
        labels = _NUMBERS[order % len(_NUMBERS)] if self.is_signed else order % self.classes
        return labels.view(count, *self.label_shape).to(self.device, self.label_dtype)

    def _part(self, part: Part, count: int, seed: int, source: torch.Generator) -> Tensor:
        if part.dtype.is_floating_point:
            return torch.randn(count, *part.shape, generator=source).to(part.dtype)
        if part.is_mask:
            values = torch.ones(count, math.prod(part.shape), dtype=torch.int64)
            constants: tuple[int, ...] = (0,)
        else:
            values = torch.randint(0, part.entries, (count, math.prod(part.shape)), generator=source)
            values[0, :1] = part.entries - 1  # the largest entry occurs, so a table that is too short fails
            constants = tuple(c for c in self.constants if c < part.entries)
        length = values.shape[1]
        begins = torch.randint(int(part.is_mask), length + 1, (count, 1), generator=source)
        # One has no padding, so that no other one is longer, and a single one names the last entry.
        begins[-1:] = length
        rests = torch.tensor(constants)[(seed + torch.arange(count)) % len(constants)]  # [count], in turn
        values = torch.where(torch.arange(length) >= begins, rests[:, None], values)
        return _avoid_padding(values.view(count, *part.shape), part.padding).to(self.dtype)


@dataclass(frozen=True)
class SyntheticBatch:
    """Made-up inputs [count, *shape] and labels; packing: for inputs of several tensors. padding: as in `InputSpec`."""

    inputs: Tensor
    labels: Tensor
    packing: Packing | None = None
    padding: Padding | None = None

    def all_of(self, constant: int) -> "SyntheticBatch":
        """The same number of records with all integers equal, limited to the entries of each part."""

        def full(values: Tensor, part: Part | None) -> Tensor:
            if part is not None and (values.is_floating_point() or part.is_mask or constant >= part.entries):
                return values
            return torch.full_like(values, constant)

        return self._map_parts(full)

    def times(self, factor: float) -> "SyntheticBatch":
        """The records times a factor; integers become 0 for the factor 0 and are unchanged otherwise."""

        def larger(values: Tensor, part: Part | None) -> Tensor:
            if part is not None and part.is_mask:
                return values
            if factor == 0.0:
                return torch.zeros_like(values)
            return values * factor if values.is_floating_point() else values

        return self._map_parts(larger)

    def with_holes(self) -> "SyntheticBatch":
        """The records with NaN as the first values of each; integers are unchanged."""

        def add_hole(values: Tensor, _part: Part | None) -> Tensor:
            values = values.clone()
            if values.is_floating_point() and values.dim() > 1:
                values[:, 0] = math.nan
            return values

        return self._map_parts(add_hole)

    def in_64_bits(self) -> "SyntheticBatch":
        """The records in float64; integers, and inputs packed with them, are unchanged."""
        is_float = self.inputs.is_floating_point()
        return replace(self, inputs=self.inputs.double() if is_float else self.inputs)

    def among(self, others: "SyntheticBatch", index: int | Tensor) -> "SyntheticBatch":
        """The other records, with this sample's at a position, or at several."""
        inputs, labels = others.inputs.clone(), others.labels.clone()
        inputs[index], labels[index] = self.inputs[index], self.labels[index]
        return replace(self, inputs=inputs, labels=labels)

    def take(self, chosen: Tensor | slice | list[int]) -> "SyntheticBatch":
        """The records at some positions, given as indices or as a mask."""
        return replace(self, inputs=self.inputs[chosen], labels=self.labels[chosen])

    def alone(self, index: int) -> "SyntheticBatch":
        """One record alone."""
        return self.take(slice(index, index + 1))

    def repeat_record(self, index: int) -> "SyntheticBatch":
        """The same number of records, all equal to the one at a position."""
        return self.take(torch.full((len(self.labels),), index))

    def shorten(self) -> "SyntheticBatch":
        """The same series, cut in turn to a third, two thirds or all of their length; the rest is zero.

        A model that sorts series by length then swaps the first two. Images, which have no length, are unchanged.
        """

        def shorter(values: Tensor, part: Part | None) -> Tensor:
            if not 1 < values.dim() < 4 or (part is not None and part.is_mask):
                return values
            values, third = values.clone(), values.shape[1] // 3
            for index, record in enumerate(values):
                record[values.shape[1] - 2 * (index + 1) % 3 * third :] = 0
            return values

        return self._map_parts(shorter)

    def _map_parts(self, change: Callable[[Tensor, Part | None], Tensor]) -> "SyntheticBatch":
        """The same records with a function applied to each tensor; none becomes padding alone."""
        if self.packing is None:
            return replace(self, inputs=_avoid_padding(change(self.inputs, None), self.padding))
        pairs = zip(self.packing.split(self.inputs), self.packing.parts, strict=True)
        changed = [_avoid_padding(change(values, part), part.padding) for values, part in pairs]
        return replace(self, inputs=self.packing.join(changed))


def _avoid_padding(values: Tensor, padding: Padding | None) -> Tensor:
    return values if padding is None else padding.replace_first(values)


def near_start(model: PerExampleModel) -> Tensor:
    """Parameters near the initial ones with no zero layer, which would hide the layers before it.

    Moves are proportional to a parameter's size, so that outputs of a deep model do not explode.
    """
    moved = model.initial_parameters()
    longest = max((span.stop - span.start for span in model.slices.values()), default=0)
    # PyTorch draws 16 numbers at a time, so that fewer of them are the same.
    draw = torch.randn(16 * min(2**12, longest // 16 + 1), generator=torch.Generator().manual_seed(2))
    for span in model.slices.values():
        part = moved[span]
        size = float(torch.linalg.vector_norm(part)) / max(1, len(part)) ** 0.5 or 0.1
        for portion in torch.split(part, len(draw)):
            portion.add_(draw[: len(portion)].to(part), alpha=0.1 * size)
    return moved


def form_of(passes: Passes, parameters: Tensor, spec: InputSpec, count: int) -> InputSpec:
    """The form with all entries of the model's tables, or those of a byte, and all labels that the model accepts."""
    layers = [
        layer for layer in passes.model.module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    ]
    paddings = {layer.padding_idx for layer in layers if layer.padding_idx is not None}
    tables = sorted({layer.num_embeddings for layer in layers} or {_BYTE}, reverse=True)
    form, outputs = spec, None
    for index in (0,) if spec.packing is None else spec.packing.entry_parts:
        ends = (
            tables
            if spec.packing is None
            else sorted({*tables, *_lengths(spec.packing, index)}, reverse=True)
        )
        for entries in ends:
            candidate = _with_entries(form, entries, paddings, index)
            accepted = _outputs_if_accepted(passes, parameters, candidate, count)
            # Few numbers drawn for columns with tables of their own may happen to be entries of each.
            if accepted is not None and (
                len(ends) == 1 or _has_entry(passes, parameters, candidate, entries - 1)
            ):
                form, outputs = candidate, accepted
                break
    if outputs is None:
        sample = form.draw(count, 0)
        with torch.no_grad(), same_randomness():
            outputs = passes.model.outputs(passes.model.by_name(parameters), sample.inputs)
    if form.label_dtype.is_floating_point:
        signed = replace(form, is_signed=True)
        losses = _losses_with_labels(passes, outputs, signed)
        if losses is not None and bool(losses.isfinite().all()):
            return signed
    labelled = replace(form, classes=min(max(2, outputs.shape[-1]), _CLASSES))
    return form if _losses_with_labels(passes, outputs, labelled) is None else labelled


def _lengths(packing: Packing, index: int) -> set[int]:
    """Ends of the numbers that a part may hold if it counts places of another one, as the length of a text does."""
    if math.prod(packing.parts[index].shape) != 1:
        return set()
    return {part.shape[0] + 1 for part in packing.parts if part.shape}


def _losses_with_labels(passes: Passes, outputs: Tensor, form: InputSpec) -> Tensor | None:
    """The losses of some outputs with made-up labels; None if the loss rejects a label, such as another class."""
    labels = (form.labels(len(outputs), seed) for seed in range(_LABELLINGS))
    try:
        with torch.no_grad():
            return torch.cat([passes.model.losses(outputs, of_output) for of_output in labels])
    except Exception:
        return None


def _with_entries(form: InputSpec, entries: int, paddings: set[int], index: int) -> InputSpec:
    """The form with this many entries in one of its parts."""
    packing, maximum = form.packing, entries
    if packing is not None:
        parts = list(packing.parts)
        parts[index] = replace(parts[index], entries=entries)
        packing, maximum = Packing(tuple(parts)), max(entries, form.entries)
    constants = {*paddings, *range(_SPECIAL_TOKENS), entries - 1, maximum - 1}
    chosen = tuple(sorted(c for c in constants if c < maximum))
    return replace(form, entries=maximum, constants=chosen, packing=packing)


def _outputs_if_accepted(passes: Passes, parameters: Tensor, form: InputSpec, count: int) -> Tensor | None:
    """The outputs for records of a form; None if the model cannot compute losses for them."""
    model, sample = passes.model, form.draw(count, 0)
    try:
        with torch.no_grad(), same_randomness():
            outputs = model.outputs(model.by_name(parameters), sample.inputs)
            model.losses(outputs, sample.labels)
    except Exception:
        return None
    return outputs


def _has_entry(passes: Passes, parameters: Tensor, form: InputSpec, entry: int) -> bool:
    """Whether every table that a record looks numbers up in has an entry; true if the model fails for another reason.

    A model need not take a text of one entry alone.
    """
    model, sample = passes.model, form.draw(1, 0).all_of(entry)
    try:
        with torch.no_grad(), same_randomness():
            model.outputs(model.by_name(parameters), sample.inputs)
    except Exception as error:
        return not isinstance(error, IndexError)
    return True
