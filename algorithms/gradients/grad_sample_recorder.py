"""Records every operation of a forward pass that uses a trained parameter, with what its gradients need.

The recorder sees torch functions, not modules, so it also sees a parameter that is used twice, tied to another or used
outside of any layer. A tensor that is computed from parameters alone, such as a standardised weight or position
embeddings shared by all records, gets a name of its own. Its gradients are handled like a parameter's, and are pulled
back to the parameters at the end. An operation without a rule is differentiated for each record by `torch.func`. If
gradients cannot be separated by record, UnrecordedError is raised, so that none is lost silently.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from algorithms.gradients.double_backward import connect
from algorithms.gradients.parameter_gradients import PerExample
from algorithms.gradients.patches import ProcessSetting, reporting_applied


class UnrecordedError(Exception):
    """A use of a parameter whose gradients cannot be separated by record; the message says which.

    parameter: the name of a parameter whose gradients are wrong; "" if it is not known.
    """

    def __init__(self, reason: str, parameter: str = "") -> None:
        super().__init__(reason)
        self.parameter = parameter


class OverwrittenOutputError(UnrecordedError):
    """An output that is a view was overwritten in place, which takes it out of the graph."""


class Layout(NamedTuple):
    """The batch dimension of a tensor, and how many of its indices belong to one record.

    These are consecutive; or, if interleaved, they are as many as there are records apart, as after `torch.cat`.
    """

    dimension: int
    rows_per_record: int = 1
    interleaved: bool = False

    def by_record(self, values: Tensor, batch: int) -> Tensor:
        """The values with the batch first: [batch, rows_per_record (if above 1), the other dimensions]."""
        values = values.detach()
        if values.shape[self.dimension] != batch * self.rows_per_record:
            raise UnrecordedError("a tensor that does not have its part of each record")
        if self.rows_per_record == 1:
            return values.movedim(self.dimension, 0) if self.dimension else values
        # Row r of record i has the index r * batch + i if interleaved, and otherwise i * rows_per_record + r.
        sizes = (self.rows_per_record, batch) if self.interleaved else (batch, self.rows_per_record)
        dimension = self.dimension
        apart = torch.unflatten(values, dimension, sizes)
        return apart.movedim((dimension + self.interleaved, dimension + 1 - self.interleaved), (0, 1))

    def with_channels(self, values: Tensor, batch: int) -> Tensor:
        """The same, with channels after the batch: [batch, channels, rows_per_record (if above 1), all others]."""
        apart = self.by_record(values, batch)
        return apart if self.rows_per_record == 1 else apart.movedim(1, 2)

    def alone(self, value: Tensor) -> Tensor:
        """One record's part of `by_record`, in the shape that the tensor would have for this record alone."""
        # A dimension of size 1 comes back where the batch was; several rows are in it already.
        return (
            value.unsqueeze(self.dimension) if self.rows_per_record == 1 else value.movedim(0, self.dimension)
        )


def layout_of(shape: tuple[int, ...], other: tuple[int, ...], batch: int, other_batch: int) -> Layout | None:
    """The layout of a tensor from its shapes for two batch sizes; None unless exactly one dimension grows with them."""
    if len(shape) != len(other):
        return None
    # Dimensions whose size follows the batch.
    moved = [i for i, (size, changed) in enumerate(zip(shape, other, strict=True)) if size != changed]
    if len(moved) != 1:
        return None
    size, changed = shape[moved[0]], other[moved[0]]
    rows_per_record, rest = divmod(size, batch)  # 1 or more; a rest means a size like batch + 1
    return (
        Layout(moved[0], rows_per_record) if rest == 0 and rows_per_record * other_batch == changed else None
    )


GradOutputs = Tensor
Gradients = dict[str, PerExample]
Func = Callable[..., Any]
"""A function or method of torch; its arguments are `Args` and `Kwargs`."""
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[["GradSampleRecorder", Func, Args, Kwargs], Any]


_OF_COMPLEX = set[Rule]()


def for_complex(rule: Rule) -> Rule:
    """Mark a rule that takes complex numbers, too; for others these are left to the general rule."""
    _OF_COMPLEX.add(rule)
    return rule


class Call(NamedTuple):
    """A call of a torch function, with the layouts of the tensors that it takes and returns.

    A layout is None for a tensor without a batch dimension, and UNKNOWN_LAYOUT if the shape depends on the batch
    otherwise.
    """

    name: str
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]

    @property
    def is_shared(self) -> bool:
        """Whether no record has a part in the call, except for the type of its values."""
        return not any(self.outputs) and (not any(self.inputs) or self.name in ("to", "type_as"))


Layouts = tuple[Call, ...]
"""All uses of parameters in a forward pass, in order."""

UNKNOWN_LAYOUT = Layout(-1, 0)

_SMALL_VIEW = 2**11
"""A record's numbers in an output up to which keeping it until the loss costs less than another tensor of it."""


class Shapes(NamedTuple):
    """The shapes in a call, for one batch size."""

    name: str
    inputs: tuple[torch.Size, ...]
    outputs: tuple[torch.Size, ...]


def _layouts(
    few: Sequence[torch.Size], more: Sequence[torch.Size], counts: tuple[int, int]
) -> tuple[Layout | None, ...]:
    if len(few) != len(more):
        raise UnrecordedError("the model uses its parameters differently for another number of records")
    return tuple(
        None if a == b else layout_of(a, b, *counts) or UNKNOWN_LAYOUT for a, b in zip(few, more, strict=True)
    )


def interleave(layouts: Layouts) -> Layouts:
    """The same if the indices of a record in one dimension are interleaved with those of the others."""

    def interleave_all(all_of: tuple[Layout | None, ...]) -> tuple[Layout | None, ...]:
        return tuple(
            part._replace(interleaved=True) if part is not None and part.rows_per_record > 1 else part
            for part in all_of
        )

    return tuple(
        call._replace(inputs=interleave_all(call.inputs), outputs=interleave_all(call.outputs))
        for call in layouts
    )


class Use(NamedTuple):
    """One operation's output, and a function from the gradient of that output to those of the parameters."""

    edge: GradientEdge
    gradients: Callable[[GradOutputs], Gradients]
    versions: tuple[tuple[Tensor, int], ...]

    def check(self) -> None:
        """Raises UnrecordedError if an input was overwritten after it was used."""
        if any(tensor._version != version for tensor, version in self.versions):
            raise UnrecordedError("an input of a layer is overwritten in place after the layer used it")


@dataclass(frozen=True)
class DerivedParameter:
    """The outputs of an operation on parameters alone.

    names: of the outputs. outputs: in the autograd graph of all such operations. closed: for each output that needs no
    graph, a function from its gradients to those of the inputs.
    """

    names: tuple[str, ...]
    outputs: list[Tensor]
    closed: Sequence["Closed | None"]


Closed = Callable[[PerExample], Gradients | None]
"""From the gradients of a tensor to those of what it was computed from, by name; None if a graph is needed."""


class Bringing(Protocol):
    """Brings parameters from main memory or other processes to the device; see `placement.Bringer`."""

    def call(self, use: Func, func: Func, args: Args, kwargs: Kwargs) -> Any: ...
    def saving(self) -> AbstractContextManager[Any]: ...


class RecordedTensor(Tensor):
    """A parameter, or a tensor computed from parameters alone, whose uses are reported to this thread's recorder.

    A tensor subclass, not a PyTorch mode: a mode would route all other calls through Python too, which takes longer
    than a small layer's arithmetic.

    bringing: brings a parameter that is elsewhere to the device. parameter: the name of one that was brought.
    """

    bringing: Bringing | None = None
    parameter: str | None = None

    @classmethod
    def of(
        cls, tensor: Tensor, *, parameter: str | None = None, bringing: Bringing | None = None
    ) -> "RecordedTensor":
        """The same values, as a tensor whose uses are recorded."""
        # `_make_subclass` shares the memory, and detaches: gradients end at the outputs of uses, not here.
        recorded: RecordedTensor = Tensor._make_subclass(cls, tensor)
        if parameter is not None:
            recorded.parameter, recorded.bringing = parameter, bringing
        return recorded

    @classmethod
    def __torch_function__(cls, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        recorder, keywords = _THREAD.recorder, kwargs or {}
        # Within, calls of a rule on recorded tensors are not reported again.
        with torch._C.DisableTorchFunctionSubclass():
            use, bringing = (_run_again, None) if recorder is None else (recorder.use, recorder.bringing)
            if recorder is None:
                marked = (leaf for leaf in tensors_in((args, keywords)) if isinstance(leaf, RecordedTensor))
                bringing = next((leaf.bringing for leaf in marked if leaf.bringing is not None), None)
            if bringing is not None:
                return bringing.call(use, func, args, keywords)
            return use(func, args, keywords)


def reporting_functions() -> ProcessSetting:
    """Report `Function.apply` to the recorder like torch's own functions."""
    return _REPORTING


def _takes_recorded(args: Args) -> bool:
    return _THREAD.recorder is not None or any(isinstance(leaf, RecordedTensor) for leaf in tensors_in(args))


_REPORTING = reporting_applied(_takes_recorded)


def _run_again(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Call a function of parameters without a recorder, as the backward pass of a checkpointed layer does.

    Autograd must save the same tensors as in the recorded pass, so the output is put into a graph as it was there.
    """
    output = func(*args, **kwargs)
    if not (has_gradient(output) and torch.is_grad_enabled()):
        return output
    if output.requires_grad:
        return output
    if all(isinstance(leaf, RecordedTensor) for leaf in tensors_in((args, kwargs))):
        return RecordedTensor.of(output)
    return _anchor_in_place(output if output._base is None else output.clone())


class OpaqueLayer:
    """A layer as one function of its parameters, by name, and of its other arguments, as the recorder sees it.

    precision: returns a context that the layer runs in.
    """

    def __init__(self, layer: nn.Module, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        self.__name__ = type(layer).__name__
        self._layer, self._precision = layer, precision
        self._around = nn.Module()  # without the layer's hooks, which its caller runs
        self._around.within, self._around.forward = layer, layer.forward

    def __call__(self, parameters: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        named = {f"within.{name}": part for name, part in parameters.items()}
        with self._precision():
            return torch.func.functional_call(self._around, named, args, kwargs)

    def record(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward pass within a recorder's block."""
        parts = self._layer.named_parameters()
        parameters = {name: part for name, part in parts if isinstance(part, RecordedTensor)}
        assert _THREAD.recorder is not None
        return _THREAD.recorder.report(self, (parameters, *args), kwargs)


@contextmanager
def running_opaque(
    layers: Iterable[nn.Module], precision: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Let the recorder see each of these layers as one function within the block; see `OpaqueLayer`."""
    before = [(vars(layer), vars(layer).copy()) for layer in layers]
    for layer in layers:
        # In a module's __dict__ it hides the method of the class, by which `nn.Module.__call__` finds it.
        vars(layer)["forward"] = OpaqueLayer(layer, precision).record
    try:
        yield
    finally:
        for attributes, before_attributes in before:
            del attributes["forward"]
            # In place: these are the dictionaries of the layers.
            attributes |= {key: value for key, value in before_attributes.items() if key == "forward"}


class _Noting(TorchFunctionMode):
    """Notes the shapes in every call of a torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Shapes] = []

    def __torch_function__(
        self, func: Func, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        input_shapes = tuple(leaf.shape for leaf in tensors_in((args, kwargs or {})))
        output = func(*args, **(kwargs or {}))
        outputs = _outputs_of(func, args, output)
        if outputs:
            self.shapes.append(Shapes(name_of(func), input_shapes, tuple(leaf.shape for leaf in outputs)))
        return output


class _Here(threading.local):
    """The active recorder of a thread."""

    recorder: "GradSampleRecorder | None" = None


_THREAD = _Here()


def active_recorder() -> "GradSampleRecorder | None":
    """The recorder in whose block this thread is."""
    return _THREAD.recorder


class GradSampleRecorder:
    """Records the uses of parameters while a model runs within its block.

    parameters: by name; the model must run with the recorder's own `parameters`. rules: by torch function. general: the
    rule for other functions. shared: the rule for functions that neither take nor return a batch. batch: the number of
    records. layouts: of the uses. Without them the recorder notes the shapes in all calls, and learns the layouts by
    comparing them with `other`: the shapes for another batch size, and that size. bringing: if the parameters are
    elsewhere. uses_double_backward: whether the model differentiates in its forward pass.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        rules: dict[Func, Rule],
        general: Rule,
        shared: Rule,
        *,
        batch: int,
        layouts: Layouts | None,
        other: tuple[Sequence[Shapes], int] | None = None,
        bringing: Bringing | None = None,
        uses_double_backward: bool = False,
    ) -> None:
        self.batch = batch
        self.uses: list[Use] = []
        self.derived: list[DerivedParameter] = []
        self.invalidated: set[str] = set()
        self.graph: dict[str, Tensor] = {}
        self.learned: list[Call] = []
        self.without_rule: set[str] = set()
        self.not_by_rows: set[str] = set()
        """Names of weights computed from parameters by other maps than those by rows, as far as it is known."""
        self.asserts_maps = False
        """Whether the maps of all others are by rows, or the pass fails."""
        # Keeps the tensors alive, so that their ids stay unique.
        self.parameters: dict[str, Tensor] = {
            name: RecordedTensor.of(part, parameter=name if bringing else None, bringing=bringing)
            for name, part in parameters.items()
        }
        self.bringing, self.uses_double_backward = bringing, uses_double_backward
        self.keeps_views = False
        """Whether small outputs that are views stay views; if one is overwritten, `take_uses` raises an error."""
        self._views: list[tuple[Tensor, int]] = []
        self._names = {id(tensor): name for name, tensor in self.parameters.items()}
        self._held: list[Tensor] = []
        self._rules = rules
        self._general = general
        self._shared = shared
        self._layouts, self._other = layouts, other
        self._calls, self._is_reported = 0, True
        self._last: Call | None = None
        self._noting = _Noting() if layouts is None else None
        self._here: dict[int, Layout | None] = {}
        self.output_layouts: tuple[Layout | None, ...] = ()
        self._before: GradSampleRecorder | None = None

    def __enter__(self) -> "GradSampleRecorder":
        self._before, _THREAD.recorder = _THREAD.recorder, self
        if self._noting is not None:
            self._noting.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *reason: Any) -> None:
        if self._noting is not None:
            self._noting.__exit__(*reason)  # type: ignore[no-untyped-call]
        _THREAD.recorder, self._before = self._before, None

    def saving(self) -> AbstractContextManager[Any]:
        """A context for the forward pass, in which autograd saves no copies of parameters that are elsewhere."""
        return nullcontext() if self.bringing is None else self.bringing.saving()

    @property
    def shapes(self) -> list[Shapes]:
        """The shapes in all calls that returned tensors, if no layouts were given."""
        return [] if self._noting is None else self._noting.shapes

    def layouts(self) -> Layouts:
        """The layouts that were learned from two batch sizes."""
        before = () if self._other is None else self._other[0]
        if [call.name for call in before] != [call.name for call in self.shapes]:
            raise UnrecordedError("the model uses its parameters differently for another number of records")
        return tuple(self.learned)

    @property
    def use(self) -> Func:
        """Calls a function of parameters and other values, given with its arguments, and records it."""
        return (
            self._record_with_derivatives
            if self.uses_double_backward and torch.is_grad_enabled()
            else self._record
        )

    def _record_with_derivatives(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """`_record`, and the call's derivatives record their own uses."""
        return connect(self._record, self._derivatives, func, args, kwargs, name_of(func))

    def report(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Use a function of parameters whose call PyTorch does not report, but calls within it."""
        self._is_reported = False
        with torch._C.DisableTorchFunctionSubclass():
            return self._with_parameters(self.use, func, args, kwargs)

    def _with_parameters(self, use: Func, func: Func, args: Args, kwargs: Kwargs) -> Any:
        bringing = self.bringing
        return use(func, args, kwargs) if bringing is None else bringing.call(use, func, args, kwargs)

    def _derivatives(self) -> Callable[[Func, Args, list[int], list[int]], Any]:
        """Return a function that records a backward pass of the last call; see `connect`."""
        last = self._last

        def record(func: Func, args: Args, inputs: list[int], outputs: list[int]) -> Any:
            layouts = () if last is None else (*last.inputs, *last.outputs)
            layouts_of_parts = [
                tuple(layouts[i] for i in part) for part in ((inputs, outputs) if layouts else ())
            ]
            call = Call(name_of(func), *layouts_of_parts) if layouts_of_parts else None

            def run(func: Func, args: Args, kwargs: Kwargs) -> Any:
                if self._noting is None:
                    return self._record(func, args, kwargs)
                self._last = call
                if call is None:
                    return func(*args, **kwargs)
                self.learned.append(call)
                return self._shared(self, func, args, kwargs) if call.is_shared else func(*args, **kwargs)

            def use(func: Func, args: Args, kwargs: Kwargs) -> Any:
                return connect(run, self._derivatives, func, args, kwargs, name_of(func))

            with torch._C.DisableTorchFunction():
                return self._with_parameters(use, func, args, {})

        return record

    def _record(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Call a function by its rule, which records it; without layouts, learn those of the call."""
        leaves = tensors_in((args, kwargs))
        if self._noting is not None:
            return self._learn(func, args, kwargs, leaves)
        layouts = self._layouts or ()
        call = layouts[self._calls] if self._calls < len(layouts) else None
        if call is None or call.name != name_of(func) or len(call.inputs) != len(leaves):
            output = func(*args, **kwargs)
            if _outputs_of(func, args, output):  # a call that returns no tensor, such as a shape, is no use
                raise UnrecordedError("the model uses its parameters differently than before")
            return output
        self._calls += 1
        self._last = call
        # By identity, since equal tensors may have other layouts; `leaves` stay alive during the call.
        self._here = {id(leaf): layout for leaf, layout in zip(leaves, call.inputs, strict=True)}
        self.output_layouts = call.outputs
        if call.is_shared:
            return self._shared(self, func, args, kwargs)
        rule = self._rules.get(func, self._general)
        if (
            rule is not self._general
            and rule not in _OF_COMPLEX
            and any(leaf.is_complex() for leaf in leaves)
        ):
            rule = self._general
        return rule(self, func, args, kwargs)

    def _learn(self, func: Func, args: Args, kwargs: Kwargs, leaves: list[Tensor]) -> Any:
        """Call a function and learn its layouts; the output is put into a graph, as in a recorded pass."""
        input_shapes = tuple(leaf.shape for leaf in leaves)
        is_reported, self._is_reported = self._is_reported, True
        output = func(*args, **kwargs)
        outputs, here = _outputs_of(func, args, output), len(self.shapes)
        if not outputs:
            return output
        if not is_reported:
            self.shapes.append(Shapes(name_of(func), input_shapes, tuple(leaf.shape for leaf in outputs)))
        if self._other is not None:
            before, count = self._other
            name, other = name_of(func), before[here] if here < len(before) else None
            if other is None or other.name != name:
                raise UnrecordedError(
                    "the model uses its parameters differently for another number of records"
                )
            pairs = (other.inputs, input_shapes), (other.outputs, tuple(leaf.shape for leaf in outputs))
            call = Call(name, *(_layouts(few, more, (count, self.batch)) for few, more in pairs))
            self.learned.append(call)
            self._last = call
            if call.is_shared:
                # From here on the uses of what is derived from parameters are recorded.
                return self._shared(self, func, args, kwargs)
        is_new = has_gradient(output) and output._base is None and all(output is not leaf for leaf in leaves)
        return _anchor_in_place(output) if is_new and torch.is_grad_enabled() else output

    def name(self, tensor: Any) -> str | None:
        """The name of a trained parameter or of a tensor computed from them alone; None for any other value."""
        known_name = self._names.get(id(tensor))
        return tensor.parameter if known_name is None and isinstance(tensor, RecordedTensor) else known_name

    def layout(self, tensor: Tensor) -> Layout:
        """The layout of a tensor of this call; raises UnrecordedError if it has no batch dimension."""
        layout = self.layout_if_any(tensor)
        if layout is None:
            raise UnrecordedError("a parameter is combined with a value that is the same for all records")
        return layout

    def layout_if_any(self, tensor: Tensor) -> Layout | None:
        """The layout of a tensor of this call; None if all records share it."""
        layout = self._here.get(id(tensor))
        if layout == UNKNOWN_LAYOUT:
            raise UnrecordedError("a tensor that grows with the records in more than one dimension")
        return layout

    @property
    def output_layout(self) -> Layout:
        """The layout of the only tensor that this call returns."""
        if (
            len(self.output_layouts) != 1
            or self.output_layouts[0] is None
            or self.output_layouts[0] == UNKNOWN_LAYOUT
        ):
            raise UnrecordedError("an operation on a parameter whose output has no dimension for the records")
        return self.output_layouts[0]

    def take_uses(self) -> list[Use]:
        """Return and drop the uses: they refer to the recorder, and the cycle would keep their tensors alive.

        Raises OverwrittenOutputError if the gradient of an output would not arrive, since it was overwritten.
        """
        uses, self.uses = self.uses, []
        views, self._views = self._views, []
        if any(view._version != version for view, version in views):
            raise OverwrittenOutputError("the output of a layer of sequences is overwritten in place")
        return uses

    def keep(self, output: Tensor, gradients: Callable[[GradOutputs], Gradients], *inputs: Tensor) -> Tensor:
        """Record a use: `gradients` will be called with the gradient of `output`; `inputs` must not change until then.

        Returns the output for the model to use. Nothing is recorded while gradients are disabled.
        """
        if not torch.is_grad_enabled():
            return output
        if not output.requires_grad:
            if output._base is not None:
                output = output.clone()
            is_input = id(output) in self._here  # as in an operation in place: the model keeps this tensor
            output = _anchor_in_place(output) if is_input else _anchor(output)
        elif output._base is not None:
            # As of a layer of sequences: what overwrites a view is put behind its base in the graph, and the view's own
            # edge is cut off. The result of `_unsafe_view` has the same memory, and is no view for autograd.
            if self.keeps_views and output.numel() <= self.batch * _SMALL_VIEW:
                self._views.append((output, output._version))  # which its base and all its views share
            else:
                output = torch.ops.aten._unsafe_view.default(output, output.shape)
        # PyTorch counts a tensor's changes in place
        versions = tuple((tensor, tensor._version) for tensor in inputs)
        self.uses.append(Use(get_gradient_edge(output), gradients, versions))
        return output

    def record_derived(self, followed: list[Tensor], closed: Sequence[Closed | None]) -> list[Tensor]:
        """Record the outputs of an operation on parameters alone; return the model's tensors."""
        names = tuple(f"#{len(self._held) + index}" for index in range(len(followed)))
        outputs: list[Tensor] = [RecordedTensor.of(output) for output in followed]
        self._held += outputs
        self._names |= {id(output): name for output, name in zip(outputs, names, strict=True)}
        self.graph |= dict(zip(names, followed, strict=True))
        self.derived.append(DerivedParameter(names, followed, closed))
        return outputs

    def record_target(self, target: Tensor) -> None:
        """Record the uses of a constant from here on, since values of parameters are about to be written into it."""
        name = f"#{len(self._held)}"
        self._held.append(target)
        self._names[id(target)], self.graph[name] = name, target.detach()
        target.__class__ = RecordedTensor  # the model holds this object, so it cannot be replaced by another

    def invalidate(self, target: Tensor) -> None:
        """Give a new name to each of the model's tensors that shares memory with one that an operation wrote into.

        Gradients of what was there before have no place any more: a use of the old name raises UnrecordedError.
        """
        address = target.untyped_storage().data_ptr()
        for tensor in self._held[:]:
            if tensor.untyped_storage().data_ptr() == address:
                # Memory, not identity: views of the target are other objects, whose values have changed as well.
                old = self._names[id(tensor)]
                name = f"#{len(self._held)}"
                self._held.append(tensor)
                self.invalidated.add(old)
                self._names[id(tensor)], self.graph[name] = name, self.graph[old]
                self.derived.append(DerivedParameter((name,), [self.graph[old]], (None,)))


def _anchor(output: Tensor) -> Tensor:
    """A new tensor of the same memory, in a graph, but not as a leaf, so that the model may overwrite it in place."""
    # PyTorch forbids to overwrite an output of `chunk`, as one of several views; that of `unsafe_chunk` is no view.
    return output.requires_grad_().unsafe_chunk(1)[0]


def _anchor_in_place(output: Tensor) -> Tensor:
    """The same tensor, now in a graph, but not as a leaf; slower than `_anchor`."""
    anchor = torch.zeros((), requires_grad=True, device=output.device)
    anchored: Tensor = _Anchored.apply(output, anchor)  # type: ignore[no-untyped-call]
    return anchored


def has_gradient(value: Any) -> bool:
    """Whether a value is a tensor of a type that gradients pass through, real or complex."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in a tree, in the order of `tree_leaves`, but in a tenth of the time for plain arguments."""
    tensors: list[Tensor] = []
    _collect(tree, tensors)
    return tensors


def _collect(tree: Any, tensors: list[Tensor]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:
        parts = tree
    elif kind is dict:
        parts = tree.values()
    else:
        parts = (tree,)
    for part in parts:
        if isinstance(part, Tensor):
            tensors.append(part)
        elif type(part) in _NESTS:
            _collect(part, tensors)
        elif type(part) not in _LEAVES:
            tensors += [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)]


def replace_tensors(tree: Any, tensors: Mapping[int, Tensor]) -> Any:
    """The same tree with other tensors for some of its own, given by their ids; as fast as `tensors_in`."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        return tensors.get(id(tree), tree)
    if kind is tuple or kind is list:
        return kind([replace_tensors(part, tensors) for part in tree])
    if kind is dict:
        return {key: replace_tensors(part, tensors) for key, part in tree.items()}
    return tree if kind in _LEAVES else tree_map_only(Tensor, lambda leaf: tensors.get(id(leaf), leaf), tree)


_NESTS = frozenset((tuple, list, dict))
_LEAVES = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, slice)
)


def name_of(func: Func) -> str:
    """A torch function's name, including the attribute that it reads, such as `T.__get__`."""
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    return f"{getattr(owner, '__name__', '')}.{name}" if name in ("__get__", "__set__") else name


def _outputs_of(func: Func, args: Args, output: Any) -> list[Tensor]:
    """The tensors that a call returns, or that an assignment to some entries of a tensor changes."""
    return [args[0]] if func is Tensor.__setitem__ else tensors_in(output)


class _Anchored(torch.autograd.Function):
    """Puts an output into a graph, as if this operation had overwritten it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)  # autograd then takes the same object for this function's result
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None]:
        return None, None
