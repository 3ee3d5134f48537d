"""Replays of a recorded pass: its tensor operations one after another, without the Python code that called them.

A pass over few records spends most of its time in Python: in the model's layers, in autograd, and in the recorder. All
passes of a size call the same operations on tensors of the same shapes, if nothing in them depends on a value. So one
pass over made-up records is traced, and PyTorch's interpreter of TorchScript then runs its operations, as they were,
without fusing or reordering any. A record's losses and gradients have the bits that a recorded pass gives them.

What a trace holds fast must not depend on records or parameters. There is no replay of a pass

- in which a value of theirs is read, as by a branch, or decides on a shape;
- in which random numbers are drawn;
- that writes into a tensor from before it, which would carry something from one pass to the next;
- whose losses or gradients differ in a bit from a recorded pass's, on any of several made-up batches at other
  parameters, some with large, zero and missing values. This also finds values that a model computes outside of PyTorch.

Such passes are recorded each time. Whether a map of a weight is by rows would be read, too. A replay on a CPU asserts
it instead, and a pass whose assertion fails is recorded.

A trace takes as long as some thirty to fifty passes, so the first ones of a size are recorded. As bits are the same,
it matters to no result when a pass is traced, and a process or a thread may do so before others.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from algorithms.gradients.clipping import L2
from algorithms.gradients.grad_sample_recorder import Args, Kwargs, Layouts, RecordedTensor, tensors_in
from algorithms.gradients.model_gradients import PerExampleGradients
from algorithms.gradients.op_tracer import OpTracer, held_by, tracing_by
from algorithms.gradients.passes import Passes
from algorithms.gradients.synthetic_inputs import InputSpec, SyntheticBatch, near_start

Inputs = tuple[Tensor, Tensor, Tensor]
"""What a pass takes: parameters [d], inputs [size, *input_shape] and labels [size, ...]."""

_C: Any = torch._C  # its type stubs are incomplete
_ATEN = torch.ops.aten
_SAME_TENSOR = (_ATEN.detach, _ATEN.alias)
"""Operations that return the same numbers in the same memory; without autograd they do nothing."""

RECORDED = 64
"""How many passes of a size are recorded before one is traced."""

_COMPARED_BATCHES, _LARGE_FACTOR = 2, 1e3
"""How many made-up batches are compared, each as it is and changed; the factor of large values."""


class _NotReplayableError(Exception):
    """Something in a pass that a list of operations does not hold; the message says what."""


@dataclass(frozen=True)
class Replay:
    """One pass of a fixed size as a list of operations.

    run: from parameters, inputs and labels to the losses and all tensors of the gradients. forms: of these arguments.
    structure: puts these into losses, gradients by parameter, and what norms left. like: the gradients of the pass that
    was traced, without its tensors.
    """

    run: Callable[..., Sequence[Tensor]]
    forms: tuple["_Form", ...]
    structure: "_Structure"
    like: PerExampleGradients

    def __call__(self, parameters: Tensor, inputs: Tensor, labels: Tensor) -> PerExampleGradients | None:
        """The pass; None if its arguments have another form, or if an operation fails, as with a label too large."""
        arguments = parameters, inputs, labels
        has_form = tuple(map(_form, arguments)) == self.forms
        # Views of the parameters are held with their places in memory, which begins with the vector.
        if not has_form or parameters.storage_offset() or torch.is_autocast_enabled("cpu"):
            return None
        try:
            with torch.no_grad(), _without_optimisation():
                tensors = self.run(*arguments)
        except RuntimeError:  # a recorded pass raises the error in PyTorch's own words
            return None
        losses, gradients, measured = self.structure.fill(tensors)
        return replace(self.like, losses=losses, gradients=gradients).with_measured(measured)


@dataclass(frozen=True)
class NormReplay:
    """Norms of whole gradients, for the same rows of each pass, as a list of operations.

    rows: of the part. run: from all tensors of the pass's gradients to those of the part's and what norms leave. forms:
    of these arguments. flat: how they lie in the gradients. structure: puts the results into gradients by parameter,
    and what norms left.
    """

    rows: slice
    run: Callable[..., Sequence[Tensor]]
    forms: tuple["_Form", ...]
    flat: "_Structure"
    structure: "_Structure"

    def __call__(self, gradients: PerExampleGradients, flat: "_Structure") -> PerExampleGradients | None:
        """The part with its norms; None if the gradients have another form, or if an operation fails.

        flat: the gradients' own.
        """
        has_form = flat.parts == self.flat.parts and tuple(map(_form, flat.tensors)) == self.forms
        if not has_form or self.rows not in gradients.parts(self.rows.stop - self.rows.start):
            return None
        try:
            with torch.no_grad(), _without_optimisation():
                tensors = self.run(*flat.tensors)
        except RuntimeError:
            return None
        of_part, measured = self.structure.fill(tensors)
        return gradients.part(self.rows, of_part).with_measured(measured)


_Kind = tuple[int, int]
"""How many records a pass has; and whether norms of whole gradients follow, or from which record on their part is."""

R = TypeVar("R")


class Replays(Generic[R]):
    """The replays of an engine's passes, or of their norms, for all its threads."""

    def __init__(self) -> None:
        self._recorded, self._found = Counter[_Kind](), dict[_Kind, R | None]()
        self._tracing = threading.Lock()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of passes that have a replay by now."""
        return tuple({size: None for (size, _), replay in self._found.items() if replay is not None})

    def of(self, kind: _Kind, find: Callable[[], R | None]) -> R | None:
        """The replay of a pass of this kind, found when enough have been recorded; None if this one is to be, too.

        One thread at a time finds a replay, as a trace takes memory; others record their passes meanwhile.
        """
        if kind in self._found:
            return self._found[kind]
        self._recorded[kind] += 1
        if self._recorded[kind] <= RECORDED or not self._tracing.acquire(blocking=False):
            return None
        try:
            if kind not in self._found:  # another thread may have been quicker
                self._found[kind] = find()
            return self._found[kind]
        finally:
            self._tracing.release()


def replay_of(
    passes: Passes, layouts: Layouts, form: InputSpec, size: int, *, with_norms: bool = False
) -> Replay | None:
    """The replay of passes over this many records; None if there is none.

    with_norms: whether norms of whole gradients are part of it, and what they leave for their sums. Other clippings
    take gradients as they are before.
    """
    passes = _without_reads(passes, form)

    def record(parameters: Tensor, inputs: Tensor, labels: Tensor) -> PerExampleGradients:
        gradients = passes.record_gradients(parameters, inputs, labels, layouts)
        if with_norms:
            gradients.norms(L2(1.0))
        return gradients

    try:
        replay = _trace(record, passes, _first(passes, form, size))
        for arguments in _compared_batches(passes, form, size):
            if not _is_same(replay(*arguments), record(*arguments)):
                return None
    except Exception:  # as of an operation that TorchScript does not know, or a model that rejects a sample
        return None
    return replay


def norm_replay_of(
    passes: Passes, layouts: Layouts, form: InputSpec, size: int, rows: slice
) -> NormReplay | None:
    """The replay of norms of whole gradients for these rows of passes over so many records; None if there is none."""
    passes = _without_reads(passes, form)
    try:
        replay = _trace_norms(passes.record_gradients(*_first(passes, form, size), layouts), rows, passes)
        for arguments in _compared_batches(passes, form, size):
            gradients = passes.record_gradients(*arguments, layouts)
            replayed, expected = replay(gradients, flatten(gradients)), gradients.part(rows)
            expected.norms(L2(1.0))
            if not _is_same(replayed, expected):
                return None
    except Exception:
        return None
    return replay


def flatten(gradients: PerExampleGradients) -> "_Structure":
    """The tensors of all gradients, and how they lie in them."""
    flat = _Structure()
    flat.add(gradients.gradients)
    return flat


def _without_reads(passes: Passes, form: InputSpec) -> Passes:
    """Passes that assert of maps by rows what others read; on an accelerator a failed assertion ends the process."""
    return replace(passes, asserts_maps=True) if form.device.type == "cpu" else passes


def _first(passes: Passes, form: InputSpec, size: int) -> Inputs:
    """What is traced."""
    return near_start(passes.model), *_arguments(form.draw(size, 0))


def _compared_batches(passes: Passes, form: InputSpec, size: int) -> Iterator[Inputs]:
    """The made-up batches on which a replay is compared, at two points."""
    points = near_start(passes.model), passes.model.initial_parameters()
    for seed in range(_COMPARED_BATCHES):
        for sample in _samples(form, size, seed):
            yield points[seed % len(points)], *_arguments(sample)


def _arguments(sample: SyntheticBatch) -> tuple[Tensor, Tensor]:
    return sample.inputs, sample.labels


def _samples(form: InputSpec, size: int, seed: int) -> Iterator[SyntheticBatch]:
    """Made-up batches: usual records, that lie within a larger tensor, and some of these large, zero or missing."""
    both = form.draw(2 * size, seed + 1)
    usual = both.take(slice(size, 2 * size))
    yield usual
    third = torch.arange(size) % 3
    mixed = usual.times(_LARGE_FACTOR).among(usual, torch.nonzero(third == 0)[:, 0])
    mixed = usual.times(0.0).among(mixed, torch.nonzero(third == 1)[:, 0])
    yield mixed
    if form.dtype.is_floating_point or (form.packing and any(part.is_real for part in form.packing.parts)):
        yield usual.times(math.nan).among(mixed, torch.nonzero(third == 2)[:, 0])


def _is_same(gradients: PerExampleGradients | None, expected: PerExampleGradients) -> bool:
    """Whether losses and gradients are the same, bit for bit, in tensors of the same strides."""
    if gradients is None:
        return False
    first, second = _Structure(), _Structure()
    first.add((gradients.gradients, gradients.measured))
    second.add((expected.gradients, expected.measured))
    pairs = zip((gradients.losses, *first.tensors), (expected.losses, *second.tensors), strict=True)
    return first.parts == second.parts and all(_has_same_bits(*pair) for pair in pairs)


def _has_same_bits(values: Tensor, expected: Tensor) -> bool:
    if (values.dtype, values.shape, values.stride()) != (expected.dtype, expected.shape, expected.stride()):
        return False
    # As bytes, NaN equals NaN, and 0 differs from -0.
    return torch.equal(*(part.contiguous().view(-1).view(torch.uint8) for part in (values, expected)))


@contextmanager
def _without_optimisation() -> Iterator[None]:
    """Let this thread's interpreter run operations as they were traced."""
    before = _C._get_graph_executor_optimize()
    _C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        _C._set_graph_executor_optimize(before)


_Form = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]


def _form(value: Tensor) -> _Form:
    return value.dtype, value.device, value.shape, value.stride()


class _Part(NamedTuple):
    """A part of a tree: its kind, type or value, the keys of what it consists of, and where these parts are."""

    kind: str
    of: Any
    keys: tuple[Any, ...] = ()
    places: tuple[int, ...] = ()


class _Structure:
    """What a tree of gradients consists of, and the tensors in it.

    The tree is made of dataclasses, dictionaries, lists and tuples. An object that is in several places, as a layer of
    which a bias is a part, stays one object.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.parts: list[_Part] = []
        """In the order in which they are put together."""
        self._places: dict[int, int] = {}
        self._held: list[Any] = []  # keeps ids unique

    def add(self, tree: Any) -> int:
        """Add a tree; the place of its part."""
        known = self._places.get(id(tree))
        if known is not None and not isinstance(tree, Tensor):
            return known
        self._held.append(tree)
        kind = type(tree)
        if isinstance(tree, Tensor):
            self.tensors.append(tree)
            part = _Part("tensor", len(self.tensors) - 1)
        elif kind is dict or is_dataclass(tree):
            items = tree if kind is dict else vars(tree)
            name = "dict" if kind is dict else "object"
            part = _Part(name, kind, tuple(items), tuple(map(self.add, items.values())))
        elif kind in (list, tuple):
            part = _Part("sequence", kind, (), tuple(map(self.add, tree)))
        elif isinstance(tree, int | float | str | torch.Size | slice | frozenset | None):
            part = _Part("value", tree)
        else:
            raise _NotReplayableError(f"a {kind.__name__} in gradients")
        self.parts.append(part)
        self._places[id(tree)] = len(self.parts) - 1
        return len(self.parts) - 1

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The tree with other tensors."""
        made: list[Any] = []
        for kind, of, keys, places in self.parts:
            parts = [made[place] for place in places]
            if kind == "tensor":
                made.append(tensors[of])
            elif kind == "object":
                filled = object.__new__(of)
                vars(filled).update(zip(keys, parts, strict=True))
                made.append(filled)
            elif kind == "dict":
                made.append(dict(zip(keys, parts, strict=True)))
            else:
                made.append(of(parts) if kind == "sequence" else of)
        return made[-1]

    def without_tensors(self) -> "_Structure":
        """The same for filling alone, which keeps no tensor alive."""
        alone = _Structure()
        alone.parts = self.parts
        return alone


class _Calls(OpTracer):  # type: ignore[no-untyped-call]
    """Keeps all operations within its block, and their tensors, whose memory is then used by no other."""

    def __init__(self, records: Sequence[Tensor], constants: Sequence[Tensor]) -> None:
        super().__init__(records, constants)
        self.calls: list[tuple[Any, Args, Kwargs, Any]] = []

    def _is_of_records(self, tensor: Tensor) -> bool:
        return isinstance(tensor, RecordedTensor) or super()._is_of_records(tensor)

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        result = super().run(func, args, kwargs)
        # The masks of `index` are looked at above; its other indices decide on no shape.
        is_counted = torch.Tag.dynamic_output_shape in func.tags and func.overloadpacket is not _ATEN.index
        if is_counted and self.may_depend((args, kwargs)):
            self.note_read(func.overloadpacket.__name__)
        self.calls.append((func, args, kwargs, result))
        return result


def _trace(record: Callable[..., PerExampleGradients], passes: Passes, arguments: Inputs) -> Replay:
    """The replay of a pass, not compared yet."""
    like = record(*arguments)  # what is computed once and kept is then there

    def compute() -> object:
        traced = record(*arguments)
        return traced.losses, traced.gradients, traced.measured

    run, structure = _function(compute, passes, arguments)
    forms = tuple(map(_form, arguments))
    return Replay(run, forms, structure, replace(like, losses=torch.empty(0), gradients={}))


def _trace_norms(gradients: PerExampleGradients, rows: slice, passes: Passes) -> NormReplay:
    """The replay of the norms of a part of a pass, not compared yet."""
    flat = flatten(gradients)

    def compute() -> object:
        # Of other objects, which hold nothing that norms left before.
        part = replace(gradients, gradients=flat.fill(flat.tensors)).part(rows)
        part.norms(L2(1.0))
        return part.gradients, part.measured

    compute()
    run, structure = _function(compute, passes, flat.tensors)
    return NormReplay(rows, run, tuple(map(_form, flat.tensors)), flat.without_tensors(), structure)


def _function(
    compute: Callable[[], object], passes: Passes, arguments: Sequence[Tensor]
) -> tuple[Callable[..., Sequence[Tensor]], "_Structure"]:
    """A computation as a function of tensors, which returns those in its result, and the structure of this."""
    # Parameters count as records: what follows from their values may not be held fast either.
    calls = _Calls(arguments, tuple(held_by(passes.model.module)))
    with tracing_by(calls, arguments[0]) as tracer:
        traced = compute()
    if not tracer.has_no_branches or tracer.is_drawn:
        raise _NotReplayableError("a value that is read")
    structure = _Structure()
    structure.add(traced)
    # Otherwise the recorder's tensors would report that their shapes are read.
    with torch.no_grad(), _C.DisableTorchFunctionSubclass():
        graph = _Graph(arguments)
        for call in tracer.calls:
            graph.add(*call)
        function, read_as = graph.function(structure.tensors), tuple(graph.read_as)

    def run(*given: Tensor) -> Sequence[Tensor]:
        return function(*given, *(given[index].view(dtype) for index, dtype in read_as))

    return run if read_as else function, structure.without_tensors()


class _Graph:
    """A function of TorchScript, made of the operations of a trace.

    A tensor of the trace is known by its memory and its form, since autograd keeps other objects of the same tensor.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._graph = _C.Graph()
        self._values: dict[Any, Any] = {}
        self._memory: set[int] = set()
        self._constants: dict[Any, Any] = {}
        self._constant_memory: set[int] = set()
        self._tensors: list[Tensor] = []
        self._inputs = inputs
        self.read_as: list[tuple[int, torch.dtype]] = []
        """The index of an input and the type that its bits are read as: further inputs of the function."""
        for number, tensor in enumerate(inputs):
            self._set(tensor, self._graph.addInput(f"input_{number}"))

    def add(self, func: Any, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Add an operation of the trace."""
        outputs = tensors_in(result)
        if func.overloadpacket in _SAME_TENSOR:
            self._set(result, self._value(args[0]))
            return
        if not outputs:  # as a number that no record can influence, which later operations hold
            return
        if func.overloadpacket is _ATEN._conj and not isinstance(args[0], Tensor):
            return  # of a number that a complex product holds, of which TorchScript takes no view: a constant
        if func is _ATEN.view.dtype:
            self._read_as(args[0], result)
            return
        schema = func._schema
        values = []
        for place, argument in enumerate(schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._check_written(given)
            values.append(self._argument(given, argument.type))
        node = self._node(schema.name, values, len(schema.returns))
        returned = result if len(schema.returns) > 1 else (result,)
        for value, of, tensor in zip(node.outputs(), schema.returns, returned, strict=True):
            value.setType(of.type)
            if isinstance(tensor, Tensor):
                self._set(tensor, value)
            elif isinstance(tensor, list | tuple):
                parts = self._node("prim::ListUnpack", [value], len(tensor)).outputs()
                for part, its in zip(tensor, parts, strict=True):
                    self._set(part, its)

    def _read_as(self, tensor: Tensor, result: Tensor) -> None:
        """Take an input with its bits read as another type, which TorchScript cannot, as a further input."""
        if _view(result) in self._values:
            return
        index = next((i for i, given in enumerate(self._inputs) if _view(given) == _view(tensor)), None)
        if index is None:
            raise _NotReplayableError("bits of a computed tensor that are read as another type")
        self.read_as.append((index, result.dtype))
        self._set(result, self._graph.addInput(f"input_{index}_as_{len(self.read_as)}"))

    def function(self, outputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
        """The function; no output may share memory with a constant, which a later pass would find changed."""
        values = [self._value(output) for output in outputs]
        for output in outputs:
            self._check_written(output)
        returned = self._node("prim::TupleConstruct", values, 1).output()
        returned.setType(_C.TupleType([_C.TensorType.get()] * len(values)))
        self._graph.registerOutput(returned)
        function: Callable[..., Sequence[Tensor]] = _C._create_function_from_graph("replay", self._graph)
        return function

    def _check_written(self, tree: Any) -> None:
        for tensor in tensors_in(tree):
            self._value(tensor)
            if _address(tensor) in self._constant_memory:
                raise _NotReplayableError("a tensor from before the pass that may be written into")

    def _node(self, name: str, values: list[Any], outputs: int) -> Any:
        node = self._graph.create(name, values, outputs)
        self._graph.appendNode(node)
        return node

    def _set(self, tensor: Tensor, value: Any) -> None:
        self._tensors.append(tensor)
        if _address(tensor) not in self._constant_memory:
            self._memory.add(_address(tensor))
        self._values[_view(tensor)] = value

    def _argument(self, given: Any, of: Any) -> Any:
        """The value of an argument, whose type is that of the operation's schema."""
        if isinstance(given, Tensor):
            return self._value(given)
        if isinstance(given, list | tuple) and (not given or tensors_in(given)):
            parts = [self._argument(part, None) for part in given]
            listed = self._node("prim::ListConstruct", parts, 1).output()
            listed.setType(of)
            return listed
        return self._constant(list(given) if isinstance(given, tuple) else given)

    def _value(self, tensor: Tensor) -> Any:
        """The value of a tensor; one from before the pass is a constant."""
        known = self._values.get(_view(tensor))
        if known is not None:
            return known
        address = _address(tensor)
        if address in self._memory:
            raise _NotReplayableError("a view that no operation made")
        constant = self._graph.insertConstant(tensor.detach().as_subclass(Tensor))
        self._constant_memory.add(address)
        self._tensors.append(tensor)
        self._values[_view(tensor)] = constant
        return constant

    def _constant(self, given: Any) -> Any:
        if isinstance(given, torch.dtype | torch.memory_format | torch.layout):
            given = _CODES[given]
        key = type(given), repr(given)  # 1, 1.0 and True are equal, their types are not
        if key not in self._constants:
            self._constants[key] = self._graph.insertConstant(given)
        return self._constants[key]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _view(tensor: Tensor) -> tuple[object, ...]:
    """What a tensor is known by: its memory, and how its numbers lie there."""
    turned = tensor.is_conj(), tensor.is_neg()
    return _address(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), *turned


_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32),
    *(torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.bool),
)
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
_CODES: dict[object, int] = {
    **{dtype: code for code, dtype in enumerate(_DTYPES)},
    **{memory_format: code for code, memory_format in enumerate(_FORMATS)},
    torch.bfloat16: 15,
    torch.strided: 0,
}
"""The numbers of PyTorch's enumerations in C++, which TorchScript takes in place of their values."""
