"""A tracer of the operations that a model computes, whichever PyTorch function or method calls them."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from algorithms.gradients.grad_sample_recorder import Args, Func, Kwargs, RecordedTensor, tensors_in
from algorithms.gradients.passes import (
    VALUE_CHECKS,
    Passes,
    PinnedBranch,
    is_branch_condition,
    with_pinned_numbers,
)
from algorithms.gradients.patches import with_visible_calls
from algorithms.gradients.randomness import same_randomness
from algorithms.gradients.synthetic_inputs import InputSpec, SyntheticBatch, near_start
from algorithms.gradients.tracer_mode import TracerMode

Shapes = tuple[torch.Size, ...]

_READING_FUNCTIONS = (
    *(
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
        "__dlpack__",
        "__repr__",
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
_NARROW_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operation:
    """The shapes of an operation's outputs, of its inputs that depend on records, and of inputs of unknown origin."""

    outputs: Shapes
    of_records: Shapes
    unknown: Shapes


class OpTracer(TracerMode):
    """Traces every operation within its block, whichever PyTorch function or method calls it.

    records: the records' tensors. constants: other tensors that exist beforehand. pinned: the value of each branch
    condition that depends on the records; None for its own.

    After a run: data_dependent_read: the first function that turned the records' values into Python numbers, except one
    bool or one whole number, or into a number of values; "" for none. pinned_branches: the value of each bool or whole
    number that was read, None if no record can influence it. is_narrow: whether there were 16-bit numbers. is_short:
    whether values of records had 32 bits or fewer. is_drawn: whether random numbers may have been drawn. draws_masks:
    whether these are only masks of many numbers, as dropout draws. has_products: see `Passes.expects_zeros`.
    """

    def __init__(
        self, records: Sequence[Tensor], constants: Sequence[Tensor], pinned: bool | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_narrow = self.is_short = self.is_drawn = False
        self.draws_masks = True
        self.has_products = False
        self.data_dependent_read = ""
        self.pinned = pinned
        self.pinned_branches: list[PinnedBranch] = []
        self.operations: list[Operation] = []
        self.turned: int | None = None
        # Weak references by identity: otherwise all that a pass computes would stay in memory.
        self._of_records = WeakTensorKeyDictionary(dict.fromkeys(records))
        self._known = WeakTensorKeyDictionary(dict.fromkeys((*records, *constants)))
        # Memory that values of records were written into: other views of it depend on records, too. While there is a
        # weak reference, PyTorch gives the storage's address (`_cdata`) to no other one.
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

    def writes_into(self, tensors: Iterable[Tensor]) -> bool:
        """Whether what depends on the records was written into the memory of one of these."""
        return any(storage._cdata in self._written for tensor in tensors for storage in _storages(tensor))

    def pin_branch(self, condition: Callable[[], Any], tree: Any) -> Any:
        """The value of a branch condition, pinned if it depends on the records."""
        depends = self.may_depend(tree)
        value = self.ignoring_reads(condition)
        if depends and self.pinned is not None and isinstance(value, bool):
            value = self.pinned
        self.pinned_branches.append(value if depends else None)
        return value

    def ignoring_reads(self, run: Callable[[], Any]) -> Any:
        """Run a function without noting its use of values, which does not influence the model."""
        before = self.data_dependent_read
        value = run()
        self.data_dependent_read = before
        return value

    def note_read(self, name: str) -> None:
        """Note that a function read values of the records."""
        self.data_dependent_read = self.data_dependent_read or name.strip("_")

    def turn(self) -> None:
        """Note that the backward pass begins; its sums over records belong to no record."""
        self.turned = len(self.operations)

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        inputs = tensors_in((args, kwargs))
        of_records = [tensor for tensor in inputs if self._is_of_records(tensor)]
        unknown = [tensor for tensor in inputs if self._is_unknown(tensor)]
        may_depend = bool(of_records or unknown)
        result = func(*args, **kwargs)
        outputs, kind = tensors_in(result), func.overloadpacket
        if may_depend and self.may_depend(_tensors_read_by(kind, inputs)):
            self.note_read(kind.__name__)
        self.has_products |= kind is _ATEN.prod
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws_masks &= kind in _MASKS and outputs[-1].numel() >= _MANY_DRAWN
        self.is_narrow |= any(tensor.dtype in _NARROW_DTYPES for tensor in outputs)
        self.is_short |= any(
            tensor.dtype in (torch.float32, *_NARROW_DTYPES) for tensor in outputs if of_records
        )
        numbers = [tensor for tensor in outputs if tensor.dtype != torch.uint8]  # bytes are workspace
        self.operations.append(Operation(_shapes(numbers), _shapes(of_records), _shapes(unknown)))
        if kind is _ATEN.set_ and len(inputs) == 1:  # memory that no operation wrote, as in `copy.deepcopy`
            self._known.pop(inputs[0], None)  # type: ignore[no-untyped-call]
        else:
            self._known.update(dict.fromkeys(outputs))
        if of_records and kind not in _OF_NO_VALUE:
            self._of_records.update(dict.fromkeys(outputs))
            if func._schema.is_mutable:
                for storage in _storages((_written_arguments(func, args, kwargs), outputs)):
                    self._written[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return result


class MemoryTracer(TracerMode):
    """Counts the live bytes of tensors computed within its block, whoever holds them. most: the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._possible = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def _count(self) -> None:
        """Update the peak with the bytes that are alive now."""
        self._storages = {
            storage_id: held
            for storage_id, held in self._storages.items()
            if not held[0].expired()  # type: ignore[no-untyped-call]
        }
        self._possible = sum(size for _, size in self._storages.values())
        self.peak = max(self.peak, self._possible)

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        storages_before = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if storage._cdata not in storages_before:  # a view takes no memory
                self._storages[storage._cdata] = (
                    StorageWeakRef(storage),  # type: ignore[no-untyped-call]
                    storage.nbytes(),
                )
                self._possible += storage.nbytes()  # at least what is alive: freed memory is still in it
        if self._possible > self.peak:  # freed memory is counted until the peak could rise
            self._count()
        return result


def _written_arguments(func: Any, args: Args, kwargs: Kwargs) -> list[Any]:
    """The arguments that an operation writes into, by its schema."""
    by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    written = (
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info and argument.alias_info.is_write
    )
    return [by_name.get(name) for name in written]


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors_in(tree):
        # Sparse tensors, and those within torch.func, have none.
        with suppress(NotImplementedError, RuntimeError):
            if not tensor.is_meta:
                yield tensor.untyped_storage()


class ExtremeDraws(TracerMode):
    """Replaces random numbers within its block by zeros or ones, which shows whether a model uses any, if seldom."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._value = value

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(result, Tensor):
            return result
        if func.overloadpacket is _ATEN.randperm:
            order = torch.arange(len(result))  # a permutation has no other extremes than these two
            return result.copy_(order if self._value else order.flip(0))
        return result.fill_(self._value)


class Operations(TracerMode):
    """Counts the operations of products and convolutions within its block, like PyTorch's flop counter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        result = func(*args, **kwargs)
        if func.overloadpacket in flop_registry:
            self.count += int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
        return result


class _ReadingFunctions(TorchFunctionMode):
    """Notes functions that read values without an operation, such as `tolist`."""

    def __init__(self, tracer: OpTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        args, kwargs = with_pinned_numbers(self, func, args), kwargs or {}
        if func in VALUE_CHECKS:
            # PyTorch leaves a mode while the mode handles a call, so the calls within would be hidden.
            with self:
                return with_visible_calls(func)(*args, **kwargs)
        if is_branch_condition(func, args):
            return self._tracer.pin_branch(lambda: func(*args, **kwargs), (args, kwargs))
        read = _read_arguments(func, args, kwargs)
        if getattr(func, "__name__", "") == "one_hot" and not read:
            # It only checks that entries are below the number of classes; control flow does not depend on them.
            return self._tracer.ignoring_reads(lambda: func(*args, **kwargs))
        if self._tracer.may_depend(read):
            self._tracer.note_read(func.__name__)
        return func(*args, **kwargs)


@contextmanager
def tracing(
    records: Sequence[Tensor], constants: Sequence[Tensor], pinned: bool | None = None
) -> Iterator[OpTracer]:
    """Trace the operations within the block, with the same random numbers each time."""
    with tracing_by(OpTracer(records, constants, pinned), records[0]) as tracer:
        yield tracer


T = TypeVar("T", bound=OpTracer)


@contextmanager
def tracing_by(tracer: T, records: Tensor) -> Iterator[T]:
    """The same by a given tracer; records: on the device of the model."""
    with same_randomness():
        before = torch.default_generator.get_state()
        with tracer, _ReadingFunctions(tracer):
            yield tracer
        tracer.is_drawn = draws_since(before, records)


def draws_since(before: Tensor, records: Tensor) -> bool:
    """Whether random numbers may have been drawn since the generator had a state."""
    has_own_generator = records.device.type not in ("cpu", "meta")
    return has_own_generator or not torch.equal(before, torch.default_generator.get_state())


def fills(passes: Passes, form: InputSpec, sizes: Sequence[int]) -> bool:
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


def fills_briefly(passes: Passes, form: InputSpec, sizes: tuple[int, int], *, is_quick: bool) -> bool:
    """`fills` for a large model, by a forward pass of each of two sizes.

    is_quick: whether these passes take little time and memory. Otherwise the model runs on the meta device, which has
    shapes but computes no numbers; to begin with that takes a second, in which PyTorch imports its compiler.
    True for a model that cannot run there, and one whose control flow depends on values, which can not either.
    """
    try:
        few, many = (_forward if is_quick else _forward_on_meta)(passes, form, sizes)
    except Exception:
        return True
    has_branches = not few.has_no_branches or not many.has_no_branches
    return has_branches or _fill_alike(few, many, sizes)


def _forward(passes: Passes, form: InputSpec, sizes: tuple[int, int]) -> list[OpTracer]:
    """Traces of forward passes of these sizes."""
    parameters = near_start(passes.model).to(form.device)
    return [trace_model(passes, parameters, form.draw(size, 0)) for size in sizes]


def _forward_on_meta(passes: Passes, form: InputSpec, sizes: tuple[int, int]) -> list[OpTracer]:
    """The same on the meta device."""
    module = passes.model.module
    # What `copy.deepcopy` takes in place of each tensor, so that no number is copied.
    on_meta = {
        # By id, as `copy.deepcopy` looks up its memo.
        id(part): torch.empty_like(part, device="meta").requires_grad_(part.requires_grad)
        for part in (*module.parameters(), *module.buffers())
    }
    model = replace(passes.model, module=copy.deepcopy(module, on_meta), precision=torch.float32)
    parameters = torch.empty(model.parameter_count, device="meta")
    samples = [replace(form, device=parameters.device).draw(size, 0) for size in sizes]
    with torch.device("meta"):
        return [trace_model(replace(passes, model=model), parameters, sample) for sample in samples]


def trace_model(
    passes: Passes,
    parameters: Tensor,
    sample: SyntheticBatch,
    *,
    is_back: bool = False,
) -> OpTracer:
    """Trace a model on some records; is_back: also through the backward pass."""
    records = (sample.inputs, sample.labels)
    with tracing(records, (parameters, *held_by(passes.model.module))) as tracer:
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
    forward_pairs = pairs[: few.turned]
    return (
        all(_are_multiples(fewer.outputs, more.outputs, records) for fewer, more in pairs)
        and all(fewer.unknown == more.unknown for fewer, more in pairs)
        and not any(mixes(fewer, more) for fewer, more in forward_pairs)
    )


def mixes(few: Operation, many: Operation) -> bool:
    """Whether a value that depends on the records, but has no batch dimension, entered a tensor that has one."""
    # The same shape for both numbers of records.
    of_all = any(a == b and a.numel() for a, b in zip(few.of_records, many.of_records, strict=False))
    return of_all and few.outputs != many.outputs


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


def _read_arguments(func: Func, args: Args, kwargs: Kwargs) -> Args:
    """The arguments whose values a function turns into numbers, or into a number of values; none for most functions."""
    name, arguments = getattr(func, "__name__", ""), (*args, *kwargs.values())
    if name == "__getitem__":
        return tuple(_masks(tree_leaves(args[1:])))
    if name == "where":
        return arguments if len(arguments) == 1 else ()
    if name == "one_hot":
        return arguments if arguments[1:] in ((), (-1,)) else ()
    if name in ("repeat_interleave", "tensor_split"):
        return arguments if len(arguments) == 1 else tuple(tensors_in(arguments[1:]))
    if name not in _READING_FUNCTIONS:
        return ()
    return arguments[1:] if name == "masked_select" else arguments


def _tensors_read_by(kind: Any, inputs: list[Tensor]) -> list[Tensor]:
    """The same for an operation on tensors."""
    if kind is _ATEN.index:
        return _masks(inputs[1:])
    if kind not in _READING_OPERATIONS:
        return []
    return inputs[1:] if kind is _ATEN.masked_select else inputs


def _masks(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8)]
