"""Made-up records, and a tracer of the operations that a model computes on them."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from algorithms.gradients.grad_sample_recorder import Args, Func, Kwargs, RecordedTensor, tensors_in
from algorithms.gradients.passes import (
    CHECKING,
    Passes,
    PinnedBranch,
    is_branch_condition,
    seen_within,
    with_pinned_numbers,
)
from algorithms.models import Model
from algorithms.models.model import Packing, Padding, Part, same_randomness

_NUMBERS = torch.tensor([0.0, 1.0, -1.0, 0.5, -2.5, 10.0])
"""Labels of a regression; a loss may treat some specially, such as -1 for an unknown one."""

_LABELLINGS = 6
"""How many made-up labels of a record are tried."""
_BYTE = 256
"""The range of made-up integers for a model without an embedding table."""
_SPECIAL = 8
"""How many first entries of a table are treated as special tokens, such as padding."""
_CLASSES = 17
"""How many classes of labels are made up at most."""


@dataclass(frozen=True)
class Form:
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

    def draw(self, count: int, seed: int) -> "Sample":
        """Draw made-up records: normal numbers, or random entries followed by one constant."""
        source = torch.Generator().manual_seed(seed)
        places = math.prod(self.label_shape)
        order = torch.arange(seed, seed + count)[:, None] + torch.arange(places)
        labels = _NUMBERS[order % len(_NUMBERS)] if self.is_signed else order % self.classes
        labels = labels.view(count, *self.label_shape).to(self.label_dtype)
        if self.packing is None:
            part = Part("", self.shape, self.dtype, self.entries, self.padding)
            inputs = self._part(part, count, seed, source)
        else:
            drawn = [self._part(part, count, seed, source) for part in self.packing.parts]
            inputs = self.packing.joined(drawn)
        return Sample(inputs.to(self.device), labels.to(self.device), self.packing, self.padding)

    def _part(self, part: Part, count: int, seed: int, source: torch.Generator) -> Tensor:
        if part.dtype.is_floating_point:
            return torch.randn(count, *part.shape, generator=source).to(part.dtype)
        if part.is_mask:
            values = torch.ones(count, math.prod(part.shape), dtype=torch.int64)
            constants: tuple[int, ...] = (0,)
        else:
            values = torch.randint(0, part.entries, (count, math.prod(part.shape)), generator=source)
            values[0, :1] = part.entries - 1
            constants = tuple(c for c in self.constants if c < part.entries)
        length = values.shape[1]
        begins = torch.randint(int(part.is_mask), length + 1, (count, 1), generator=source)
        begins[-1:] = (
            length  # one has no padding, so that no other one is longer, and a single one names the last entry
        )
        rests = torch.tensor(constants)[(seed + torch.arange(count)) % len(constants)]
        values = torch.where(torch.arange(length) >= begins, rests[:, None], values)
        return _begun(values.view(count, *part.shape), part.padding).to(self.dtype)


@dataclass(frozen=True)
class Sample:
    """Made-up inputs [count, *shape] and labels; packing: for inputs of several tensors. padding: as in `Form`."""

    inputs: Tensor
    labels: Tensor
    packing: Packing | None = None
    padding: Padding | None = None

    def all_of(self, constant: int) -> "Sample":
        """The same number of records with all integers equal, limited to the entries of each part."""

        def full(values: Tensor, part: Part | None) -> Tensor:
            if part is not None and (values.is_floating_point() or part.is_mask or constant >= part.entries):
                return values
            return torch.full_like(values, constant)

        return self._changed(full)

    def times(self, factor: float) -> "Sample":
        """The records times a factor; integers become 0 for the factor 0 and are unchanged otherwise."""

        def larger(values: Tensor, part: Part | None) -> Tensor:
            if part is not None and part.is_mask:
                return values
            if factor == 0.0:
                return torch.zeros_like(values)
            return values * factor if values.is_floating_point() else values

        return self._changed(larger)

    def with_holes(self) -> "Sample":
        """The records with NaN as the first values of each; integers are unchanged."""

        def holed(values: Tensor, _part: Part | None) -> Tensor:
            values = values.clone()
            if values.is_floating_point() and values.dim() > 1:
                values[:, 0] = math.nan
            return values

        return self._changed(holed)

    def in_64_bits(self) -> "Sample":
        """The records in float64; integers, and inputs packed with them, are unchanged."""
        is_float = self.inputs.is_floating_point()
        return replace(self, inputs=self.inputs.double() if is_float else self.inputs)

    def among(self, others: "Sample", place: int | Tensor) -> "Sample":
        """The other records, with this sample's at a position, or at several."""
        inputs, labels = others.inputs.clone(), others.labels.clone()
        inputs[place], labels[place] = self.inputs[place], self.labels[place]
        return replace(self, inputs=inputs, labels=labels)

    def some(self, chosen: Tensor | slice | list[int]) -> "Sample":
        """The records at some positions, given as indices or as a mask."""
        return replace(self, inputs=self.inputs[chosen], labels=self.labels[chosen])

    def alone(self, place: int) -> "Sample":
        """One record alone."""
        return self.some(slice(place, place + 1))

    def repeated(self, place: int) -> "Sample":
        """The same number of records, all equal to the one at a position."""
        return self.some([place] * len(self.labels))

    def shortened(self) -> "Sample":
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

        return self._changed(shorter)

    def _changed(self, change: Callable[[Tensor, Part | None], Tensor]) -> "Sample":
        """The same records with a function applied to each tensor; none becomes padding alone."""
        if self.packing is None:
            return replace(self, inputs=_begun(change(self.inputs, None), self.padding))
        pairs = zip(self.packing.split(self.inputs), self.packing.parts, strict=True)
        changed = [_begun(change(values, part), part.padding) for values, part in pairs]
        return replace(self, inputs=self.packing.joined(changed))


def _begun(values: Tensor, padding: Padding | None) -> Tensor:
    return values if padding is None else padding.begun(values)


def near_start(model: Model) -> Tensor:
    """Parameters near the initial ones with no zero layer, which would hide the layers before it.

    Moves are proportional to a parameter's size, so that outputs of a deep model do not explode.
    """
    moved, draw = model.initial_parameters(), torch.randn(2**16, generator=torch.Generator().manual_seed(2))
    for place in model.places.values():
        part = moved[place]
        size = float(torch.linalg.vector_norm(part)) / max(1, len(part)) ** 0.5 or 0.1
        for some in torch.split(part, len(draw)):
            some.add_(draw[: len(some)].to(part), alpha=0.1 * size)
    return moved


def form_of(passes: Passes, parameters: Tensor, least: Form, count: int) -> Form:
    """The form with all entries of the model's tables, or those of a byte, and all labels that the model accepts."""
    layers = [
        layer for layer in passes.model.module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    ]
    paddings = {layer.padding_idx for layer in layers if layer.padding_idx is not None}
    tables = sorted({layer.num_embeddings for layer in layers} or {_BYTE}, reverse=True)
    form, outputs = least, None
    for place in (0,) if least.packing is None else least.packing.entries:
        ends = (
            tables
            if least.packing is None
            else sorted({*tables, *_lengths(least.packing, place)}, reverse=True)
        )
        for some in (_with_entries(form, entries, paddings, place) for entries in ends):
            found = _taken(passes, parameters, some, count)
            if found is not None:
                form, outputs = some, found
                break
    if outputs is None:
        sample = form.draw(count, 0)
        with torch.no_grad(), same_randomness():
            outputs = passes.model.outputs(passes.model.named(parameters), sample.inputs)
    if form.label_dtype.is_floating_point:
        signed = replace(form, is_signed=True)
        losses = _labelled(passes, outputs, signed)
        if losses is not None and bool(losses.isfinite().all()):
            return signed
    labelled = replace(form, classes=min(max(2, outputs.shape[-1]), _CLASSES))
    return form if _labelled(passes, outputs, labelled) is None else labelled


def _lengths(packing: Packing, place: int) -> set[int]:
    """Ends of the numbers that a part may hold if it counts places of another one, as the length of a text does."""
    if math.prod(packing.parts[place].shape) != 1:
        return set()
    return {part.shape[0] + 1 for part in packing.parts if part.shape}


def _labelled(passes: Passes, outputs: Tensor, form: Form) -> Tensor | None:
    """The losses of some outputs with made-up labels; None if the loss rejects a label, such as another class."""
    labels = (form.draw(len(outputs), seed).labels for seed in range(_LABELLINGS))
    try:
        with torch.no_grad():
            return torch.cat([passes.model.losses(outputs, some) for some in labels])
    except Exception:
        return None


def _with_entries(form: Form, entries: int, paddings: set[int], place: int) -> Form:
    """The form with this many entries in one of its parts."""
    packing, most = form.packing, entries
    if packing is not None:
        parts = list(packing.parts)
        parts[place] = replace(parts[place], entries=entries)
        packing, most = Packing(tuple(parts)), max(entries, form.entries)
    constants = {*paddings, *range(_SPECIAL), entries - 1, most - 1}
    chosen = tuple(sorted(c for c in constants if c < most))
    return replace(form, entries=most, constants=chosen, packing=packing)


def _taken(passes: Passes, parameters: Tensor, form: Form, count: int) -> Tensor | None:
    """The outputs for records of a form; None if the model cannot compute losses for them."""
    model, sample = passes.model, form.draw(count, 0)
    try:
        with torch.no_grad(), same_randomness():
            outputs = model.outputs(model.named(parameters), sample.inputs)
            model.losses(outputs, sample.labels)
    except Exception:
        return None
    return outputs


Shapes = tuple[torch.Size, ...]

_READING_FUNCTIONS = (
    *(
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
        "item",
        "tolist",
        "numpy",
        "is_nonzero",
        "equal",
    ),
    *("allclose", "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select"),
    *("bincount", "to_sparse", "_pack_padded_sequence", "pack_padded_sequence"),
)
"""Functions that return a value, or a data-dependent number of values, so that control flow may depend on values."""

_ATEN = torch.ops.aten
_READING_OPERATIONS = (
    *(_ATEN._local_scalar_dense, _ATEN.equal, _ATEN.nonzero, _ATEN.nonzero_static, _ATEN.masked_select),
    *(_ATEN._unique, _ATEN._unique2, _ATEN.unique_dim, _ATEN.unique_consecutive, _ATEN.is_nonzero),
)
_OF_NO_VALUE = (
    *(_ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full, _ATEN.new_empty, _ATEN.new_empty_strided),
    *(_ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like, _ATEN.empty_like),
)
_MASKS = (_ATEN.bernoulli, _ATEN.bernoulli_, _ATEN.native_dropout)
_MANY_DRAWN = 128
"""Numbers in a mask from which any seed shows what others would: one decision or order may be as if none was drawn."""
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operation:
    """The shapes of an operation's outputs, of its inputs that depend on records, and of inputs of unknown origin."""

    given: Shapes
    of_records: Shapes
    unknown: Shapes


class _TracerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does not make PyTorch import its compiler, which would take a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an operation; subclasses add what they observe."""
        return func(*args, **kwargs)


class OpTracer(_TracerMode):
    """Traces every operation within its block, whichever PyTorch function or method calls it.

    records: the records' tensors. known: other tensors that exist beforehand. pinned: the value of each branch
    condition that depends on the records; None for its own.

    After a run: data_dependent_read: the first function that turned the records' values into Python numbers, except one
    bool or one whole number, or into a number of values; "" for none. pinned_branches: the value of each bool or whole
    number that was read, None if no record can influence it. is_narrow: whether there were 16-bit numbers. is_short:
    whether values of records had 32 bits or fewer. is_drawn: whether random numbers may have been drawn. draws_masks: whether these are only masks of many numbers, as
    dropout draws.
    """

    def __init__(
        self, records: Sequence[Tensor], known: Sequence[Tensor], pinned: bool | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_narrow = self.is_short = self.is_drawn = False
        self.draws_masks = True
        self.data_dependent_read = ""
        self.pinned = pinned
        self.pinned_branches: list[PinnedBranch] = []
        self.operations: list[Operation] = []
        self.turned: int | None = None
        # Weak references by identity: otherwise all that a pass computes would stay in memory.
        self._of_records = WeakTensorKeyDictionary(dict.fromkeys(records))
        self._known = WeakTensorKeyDictionary(dict.fromkeys((*records, *known)))
        # Memory that values of records were written into: other views of it depend on records, too.
        self._written: dict[int, StorageWeakRef] = {}

    @property
    def has_no_branches(self) -> bool:
        """Whether the model's control flow did not depend on a record's values."""
        return not self.data_dependent_read and not any(pinned is not None for pinned in self.pinned_branches)

    def may_depend(self, tree: Any) -> bool:
        """Whether an argument is a tensor that depends on the records' values, or is of unknown origin."""
        return any(self._is_of_records(part) or self._is_unknown(part) for part in tensors_in(tree))

    def _is_of_records(self, tensor: Tensor) -> bool:
        if tensor in self._of_records:
            return True
        return bool(self._written) and any(part._cdata in self._written for part in _storages(tensor))

    def _is_unknown(self, tensor: Tensor) -> bool:
        """Whether a tensor's origin is unknown, since it was not made within the block."""
        return tensor not in self._known and not isinstance(tensor, RecordedTensor)

    def pin_branch(self, condition: Callable[[], Any], tree: Any) -> Any:
        """The value of a branch condition, pinned if it depends on the records."""
        depends = self.may_depend(tree)
        given = self.ignoring_reads(condition)
        if depends and self.pinned is not None and isinstance(given, bool):
            given = self.pinned
        self.pinned_branches.append(given if depends else None)
        return given

    def ignoring_reads(self, run: Callable[[], Any]) -> Any:
        """Run a function without noting its use of values, which does not influence the model."""
        before = self.data_dependent_read
        given = run()
        self.data_dependent_read = before
        return given

    def note_read(self, name: str) -> None:
        """Note that a function read values of the records."""
        self.data_dependent_read = self.data_dependent_read or name.strip("_")

    def turn(self) -> None:
        """Note that the backward pass begins; its sums over records belong to no record."""
        self.turned = len(self.operations)

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        taken = tensors_in((args, kwargs))
        of_records = [tensor for tensor in taken if self._is_of_records(tensor)]
        unknown = [tensor for tensor in taken if self._is_unknown(tensor)]
        may_depend = bool(of_records or unknown)
        found = func(*args, **kwargs)
        given, kind = tensors_in(found), func.overloadpacket
        if may_depend and self.may_depend(_tensors_read_by(kind, taken)):
            self.note_read(kind.__name__)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws_masks &= kind in _MASKS and given[-1].numel() >= _MANY_DRAWN
        self.is_narrow |= any(tensor.dtype in _NARROW for tensor in given)
        self.is_short |= any(tensor.dtype in (torch.float32, *_NARROW) for tensor in given if of_records)
        numbers = [tensor for tensor in given if tensor.dtype != torch.uint8]  # bytes are workspace
        self.operations.append(Operation(_shapes(numbers), _shapes(of_records), _shapes(unknown)))
        self._known.update(dict.fromkeys(given))
        if of_records and kind not in _OF_NO_VALUE:
            self._of_records.update(dict.fromkeys(given))
            if func._schema.is_mutable:
                for storage in _storages((args[:1], given)):
                    self._written[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return found


class Memory(_TracerMode):
    """Counts the live bytes of tensors computed within its block, whoever holds them. most: the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._possible = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def _count(self) -> None:
        """Update the peak with the bytes that are alive now."""
        self._storages = {
            place: held
            for place, held in self._storages.items()
            if not held[0].expired()  # type: ignore[no-untyped-call]
        }
        self._possible = sum(size for _, size in self._storages.values())
        self.most = max(self.most, self._possible)

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        found = func(*args, **kwargs)
        for storage in _storages(found):
            if storage._cdata not in given:  # a view takes no memory
                self._storages[storage._cdata] = (
                    StorageWeakRef(storage),  # type: ignore[no-untyped-call]
                    storage.nbytes(),
                )
                self._possible += storage.nbytes()
        if self._possible > self.most:  # freed memory is counted until the peak could rise
            self._count()
        return found


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors_in(tree):
        # Sparse tensors, and those within torch.func, have none.
        with suppress(NotImplementedError, RuntimeError):
            if not tensor.is_meta:
                yield tensor.untyped_storage()


class ExtremeDraws(_TracerMode):
    """Replaces random numbers within its block by zeros or ones, which shows whether a model uses any, if seldom."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._value = value

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        found = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(found, Tensor):
            return found
        if func.overloadpacket is _ATEN.randperm:
            order = torch.arange(len(found))
            return found.copy_(order if self._value else order.flip(0))
        return found.fill_(self._value)


class Operations(_TracerMode):
    """Counts the operations of products and convolutions within its block, like PyTorch's flop counter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        found = func(*args, **kwargs)
        if func.overloadpacket in flop_registry:
            self.count += int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=found))
        return found


class _ReadingFunctions(TorchFunctionMode):
    """Notes functions that read values without an operation, such as `tolist`."""

    def __init__(self, tracer: OpTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        args, kwargs = with_pinned_numbers(self, func, args), kwargs or {}
        if func in CHECKING:
            with self:
                return seen_within(func)(*args, **kwargs)
        if is_branch_condition(func, args):
            return self._tracer.pin_branch(lambda: func(*args, **kwargs), (args, kwargs))
        looked_at = _looked_at(func, args, kwargs)
        if getattr(func, "__name__", "") == "one_hot" and not looked_at:
            # It only checks that entries are below the number of classes; control flow does not depend on them.
            return self._tracer.ignoring_reads(lambda: func(*args, **kwargs))
        if self._tracer.may_depend(looked_at):
            self._tracer.note_read(func.__name__)
        return func(*args, **kwargs)


@contextmanager
def tracing(
    records: Sequence[Tensor], known: Sequence[Tensor], pinned: bool | None = None
) -> Iterator[OpTracer]:
    """Trace the operations within the block, with the same random numbers each time."""
    tracer = OpTracer(records, known, pinned)
    with same_randomness():
        before = torch.default_generator.get_state()
        with tracer, _ReadingFunctions(tracer):
            yield tracer
        tracer.is_drawn = draws_since(before, records[0])


def draws_since(before: Tensor, records: Tensor) -> bool:
    """Whether random numbers may have been drawn since the generator had a state."""
    has_own_generator = records.device.type not in ("cpu", "meta")
    return has_own_generator or not torch.equal(before, torch.default_generator.get_state())


def fills(passes: Passes, form: Form, sizes: Sequence[int]) -> bool:
    """Whether, for these batch sizes, the rows of all tensors computed from records are multiples of the batch size.

    If not, a record's result could depend on its batch position or on the batch size even in a full pass, as when the
    model puts a row in front of the records or cuts them. Checked with and without an autograd graph; False if control
    flow depends on values.
    """
    parameters = near_start(passes.model).to(form.device)
    for is_back in (True, False):
        first = trace_model(passes, parameters, form.draw(sizes[0], 0), is_back=is_back)
        for size in sizes[1:]:
            other = trace_model(passes, parameters, form.draw(size, 0), is_back=is_back)
            if not _fill_alike(first, other, (sizes[0], size)):
                return False
    return True


def fills_briefly(passes: Passes, form: Form, sizes: Sequence[int]) -> bool:
    """`fills` for a large model: by forward passes on the meta device, which has shapes but computes no numbers.

    True for a model that cannot run there, such as one that asks for a value.
    """
    module = passes.model.module
    on_meta = {
        id(part): torch.empty_like(part, device="meta").requires_grad_(part.requires_grad)
        for part in (*module.parameters(), *module.buffers())
    }
    model = replace(passes.model, module=copy.deepcopy(module, on_meta), precision=torch.float32)
    parameters = torch.empty(model.parameter_count, device="meta")
    samples = [replace(form, device=parameters.device).draw(size, 0) for size in sizes]
    try:
        with torch.device("meta"):
            few, many = (trace_model(replace(passes, model=model), parameters, some) for some in samples)
    except Exception:
        return True
    return _fill_alike(few, many, (sizes[0], sizes[1]))


def trace_model(
    passes: Passes, parameters: Tensor, sample: Sample, *, pinned: bool | None = None, is_back: bool = False
) -> OpTracer:
    """Trace a model on some records; pinned: as in `OpTracer`. is_back: also through the backward pass."""
    records = (sample.inputs, sample.labels)
    with tracing(records, (parameters, *held_by(passes.model.module)), pinned) as tracer:
        if is_back:
            passes.gradients(parameters, *records, turn=tracer.turn)
        else:
            passes.losses(parameters, *records)
    return tracer


def held_by(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that a module holds before a pass: parameters, buffers, and attributes of its layers."""
    yield from module.parameters()
    yield from module.buffers()
    for layer in module.modules():
        yield from (value for value in vars(layer).values() if isinstance(value, Tensor))


def _fill_alike(few: OpTracer, many: OpTracer, records: tuple[int, int]) -> bool:
    """Whether the tensors of records in two traces, for these batch sizes, grow as multiples of the batch size.

    Before the backward pass, every tensor that depends on the records and is used by others must have a batch
    dimension, and tensors of unknown origin must have none.
    """
    pairs = list(zip(few.operations, many.operations, strict=False))
    if len(few.operations) != len(many.operations) or not few.has_no_branches or not many.has_no_branches:
        return False
    there = pairs[: few.turned]
    return (
        all(_are_multiples(some.given, more.given, records) for some, more in pairs)
        and all(some.unknown == more.unknown for some, more in pairs)
        and not any(mixes(some, more) for some, more in there)
    )


def mixes(few: Operation, many: Operation) -> bool:
    """Whether a value that depends on the records, but has no batch dimension, entered a tensor that has one."""
    of_all = any(a == b and a.numel() for a, b in zip(few.of_records, many.of_records, strict=False))
    return of_all and few.given != many.given


def _are_multiples(few: Shapes, many: Shapes, records: tuple[int, int]) -> bool:
    return len(few) == len(many) and all(_is_multiple(a, b, records) for a, b in zip(few, many, strict=True))


def _is_multiple(few: torch.Size, many: torch.Size, records: tuple[int, int]) -> bool:
    """Whether at most one dimension grows with the batch, as a multiple of its size."""
    if len(few) != len(many):
        return False
    growing = [(a, b) for a, b in zip(few, many, strict=True) if a != b]
    fewer, more = records
    return len(growing) <= 1 and all(a % fewer == 0 and b == a // fewer * more for a, b in growing)


def _shapes(tensors: Iterable[Tensor]) -> Shapes:
    return tuple(tensor.shape for tensor in tensors)


def _looked_at(func: Func, args: Args, kwargs: Kwargs) -> Args:
    """The arguments whose values a function turns into numbers, or into a number of values; none for most functions."""
    name, given = getattr(func, "__name__", ""), (*args, *kwargs.values())
    if name == "__getitem__":
        return tuple(_masks(tree_leaves(args[1:])))
    if name == "where":
        return given if len(given) == 1 else ()
    if name == "one_hot":
        return given if given[1:] in ((), (-1,)) else ()
    if name in ("repeat_interleave", "tensor_split"):
        return given if len(given) == 1 else tuple(tensors_in(given[1:]))
    if name not in _READING_FUNCTIONS:
        return ()
    return given[1:] if name == "masked_select" else given


def _tensors_read_by(kind: Any, taken: list[Tensor]) -> list[Tensor]:
    """The same for an operation on tensors."""
    if kind is _ATEN.index:
        return _masks(taken[1:])
    if kind not in _READING_OPERATIONS:
        return []
    return taken[1:] if kind is _ATEN.masked_select else taken


def _masks(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8)]
