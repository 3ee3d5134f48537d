"""Rules for operations that have none of their own.

- Elementwise operations that broadcast a parameter over the batch: biases, scales, positions.
- Operations on parameters alone, whose results all records share: standardised weights, positions, attention biases.
  One autograd graph holds all of them, and the records' gradients of the results pass back through it in one batched
  call. If an operation only reshapes or permutes values, gradients keep their closed form.
- Any other: gradients are materialised record by record, with `torch.func` or by separate passes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from algorithms.gradients.complex_gradients import of_both_parts, of_real_part
from algorithms.gradients.grad_sample_recorder import (
    UNKNOWN_LAYOUT,
    Args,
    Closed,
    Func,
    Gradients,
    GradSampleRecorder,
    Kwargs,
    Layout,
    UnrecordedError,
    has_gradient,
    name_of,
    replace_tensors,
    tensors_in,
)
from algorithms.gradients.memory import lacks_memory
from algorithms.gradients.model_gradients import combine
from algorithms.gradients.normalised_weights import (
    normalised_gradients,
    pull_back_by_rows,
    standardised_gradients,
)
from algorithms.gradients.parameter_gradients import (
    DenseGrad,
    LinearGrad,
    PerExample,
    RowGrad,
    SlicedGrad,
)
from algorithms.gradients.patches import APPLIED
from algorithms.gradients.pointwise_gradients import pointwise_gradients
from algorithms.gradients.rules.computed_kernels import kernel_form
from algorithms.gradients.rules.parameter_products import product_form, scale_gradient
from algorithms.gradients.table_gradients import EmbeddingGrad


def _words(text: str) -> frozenset[str]:
    """The set of names in a text."""
    return frozenset(text.split())


_WITHOUT_GRADIENT = _words(
    "detach data.__get__ zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full"
    " new_empty new_tensor size sign round floor ceil"
)
"""Functions of a tensor through which no gradient passes."""

_SAME_ORDER = _words(
    "view reshape flatten unflatten unsqueeze squeeze view_as reshape_as contiguous to float double type type_as clone"
    " alias"
)
"""Functions whose output has the same numbers as the input, in the same order."""

_BY_ENTRIES = _words(
    "mul __mul__ __rmul__ multiply div __truediv__ true_divide divide where masked_fill pow __pow__ square exp exp2"
    " expm1 log log1p sqrt rsqrt reciprocal abs absolute neg __neg__ sin cos tanh sigmoid softplus relu relu6"
    " leaky_relu elu celu selu gelu silu mish hardtanh hardsigmoid logsigmoid softsign tanhshrink clamp clamp_min"
    " clamp_max clip maximum minimum fmax fmin tril triu"
)
"""Functions of one parameter and constants each of whose numbers follows from the one in its place alone."""

_HOLOMORPHIC = _words(
    "mul __mul__ __rmul__ multiply div __truediv__ true_divide divide square exp log neg __neg__ reciprocal"
)
"""Those of `_BY_ENTRIES` that multiply gradients of complex numbers by their slopes' conjugates, too."""

_CONVERSIONS = _words("to type type_as cfloat cdouble")
"""Functions that may make complex numbers of real ones."""

_UNIT_SLOPES = _words("add __add__ __radd__ sub __sub__")
"""Functions whose derivative by the first tensor is 1 if the other argument is a number."""

_LIKE_ANOTHER = _words("view_as reshape_as type_as expand_as")
"""Functions that use only the shape or type of their second tensor."""

_ADJOINTS = frozenset(("adjoint", "H.__get__", "mH.__get__"))
_TRANSPOSED = frozenset(
    ("t", "transpose", "permute", "swapaxes", "swapdims", "T.__get__", "mT.__get__", *_ADJOINTS)
)

_REORDERED = (_SAME_ORDER | _TRANSPOSED) - _ADJOINTS  # which conjugate
_SUMS = _words("add __add__ __radd__ __iadd__ add_")
_STRETCHES = _words("expand expand_as broadcast_to")
_PRODUCTS = _words("mul __mul__ __rmul__ multiply")
_QUOTIENTS = _words("div __truediv__ divide true_divide")
_OTHER_ELEMENTWISE = _words(
    "sub __sub__ __rsub__ __isub__ sub_ rsub subtract mul __mul__ __rmul__ __imul__ mul_ multiply div __truediv__"
    " __rtruediv__ true_divide divide div_ where masked_fill maximum minimum addcmul addcdiv lerp __pow__ pow"
)
_ELEMENTWISE = _SUMS | _STRETCHES | _OTHER_ELEMENTWISE

_FEWEST_BY_ROWS = 2048
"""The size of a model's computed weights, together, from which each map is read off instead of used for each record."""


_LARGE_GRAPH, _FEW_RECORDS = 2**16, 8
"""Numbers of computed values from which so many records at a time are pulled back through their graph on a CPU."""

_TWO_VECTORS = 32
"""Numbers in two vectors of AVX-512; see `vector_ends`."""


def _writes(name: str, kwargs: Kwargs) -> bool:
    """Whether a function writes into an existing tensor."""
    in_place = name.endswith("_") and not name.endswith("__")
    inside = (
        name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    )
    return (
        in_place
        or inside
        or name == "__setitem__"
        or name.endswith("__set__")
        or kwargs.get("out") is not None
    )


def general(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """An operation on parameters, values with a batch dimension, and values that all records share."""
    name = name_of(func)
    if name in ("to", "type_as", "view_as", "reshape_as") and recorder.name(args[0]) is None:
        return func(*args, **kwargs)  # only the parameter's shape or type is read
    if name in _ELEMENTWISE:
        return elementwise(recorder, func, args, kwargs)
    is_assigned = func is Tensor.__setitem__ and recorder.name(args[0]) is None and args[0]._base is None
    if _writes(name, kwargs) and not is_assigned:
        raise UnrecordedError(f"the operation '{name}' on a parameter")
    output = func(*args, **kwargs)
    if is_assigned:
        func, output = _assign, args[0]
    outputs = tensors_in(output)
    if name in _WITHOUT_GRADIENT or not any(map(has_gradient, outputs)):
        return output
    leaves, structure = tree_flatten((args, kwargs))
    recorder.without_rule.add(func.__self__.__name__ if name == APPLIED else name)  # type: ignore[attr-defined]

    values = [leaf for leaf in leaves if _is_value(recorder, leaf)]
    taken = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    names = [recorder.name(leaf) for leaf in leaves]
    layouts = [recorder.layout_if_any(leaf) if _is_value(recorder, leaf) else None for leaf in leaves]
    batch = recorder.batch

    def record(output: Tensor, out: Layout | None, index: int) -> Tensor:
        if out is None or out == UNKNOWN_LAYOUT:
            raise UnrecordedError("an operation on a parameter whose output has no dimension for the records")

        def output_of(*leaves: Any) -> Tensor:
            args, named = tree_unflatten(leaves, structure)
            return tensors_in(func(*args, **named))[index]

        call = _Call(output_of, taken, names, layouts, out, batch)
        return recorder.keep(output, call.gradients, *(values[1:] if is_assigned else values))

    if len(outputs) != len(recorder.output_layouts):
        raise UnrecordedError("an operation on a parameter that does not return what it did before")
    with_layouts = zip(outputs, recorder.output_layouts, range(len(outputs)), strict=True)
    recorded_outputs = iter([record(*each) if has_gradient(each[0]) else each[0] for each in with_layouts])
    return tree_map_only(Tensor, lambda _: next(recorded_outputs), output)


def _assign(target: Tensor, index: Any, value: Any) -> Tensor:
    """A tensor of which some entries are replaced, as far as the gradients of the new ones are concerned."""
    changed = target.clone()
    changed[index] = value
    return changed


def _is_value(recorder: GradSampleRecorder, leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and recorder.name(leaf) is None


@dataclass(frozen=True)
class _Call:
    """A call of a function with a single output, from which gradients of its parameters are computed for each record.

    run: the function of the leaves. names: of the parameters among them. layouts: of the other leaves and the output.
    """

    run: Callable[..., Tensor]
    leaves: list[Any]
    names: list[str | None]
    layouts: list[Layout | None]
    out: Layout
    batch: int

    def gradients(self, grad_outputs: Tensor) -> Gradients:
        """Gradients from that of the output; no record's values meet those of another, which may be infinite."""
        for differentiate in (self._together, self._alone):
            try:
                return differentiate(grad_outputs)
            except Exception as error:  # functions of others may raise any
                # Another way would round otherwise, depending on what else takes memory.
                if lacks_memory(error):
                    raise
        return self._among_copies(grad_outputs)

    @property
    def _positions(self) -> list[int]:
        return [i for i, name in enumerate(self.names) if name is not None]

    def _by_record(self) -> dict[int, Tensor]:
        """The leaves that differ between records, batch first."""
        pairs = enumerate(zip(self.layouts, self.leaves, strict=True))
        return {i: layout.by_record(leaf, self.batch) for i, (layout, leaf) in pairs if layout is not None}

    def _with(self, values: dict[int, Tensor]) -> Callable[..., Tensor]:
        """The function of the parameters alone."""

        def of_parameters(*parameters: Tensor) -> Tensor:
            chosen = values | dict(zip(self._positions, parameters, strict=True))
            return self.run(*(chosen.get(i, leaf) for i, leaf in enumerate(self.leaves)))

        return of_parameters

    def _of_record(self, values: dict[int, Tensor]) -> dict[int, Tensor]:
        """A record's values as leaves of a batch of one."""
        return {i: layout.alone(values[i]) for i, layout in enumerate(self.layouts) if layout is not None}

    def _together(self, grad_outputs: Tensor) -> Gradients:
        """The gradients of all records at once, by `torch.func`."""

        def gradients_of_record(grad_output: Tensor, values: dict[int, Tensor]) -> tuple[Tensor, ...]:
            run = self._with(self._of_record(values))
            backward = torch.func.vjp(run, *(self.leaves[i] for i in self._positions))[1]
            return backward(self.out.alone(grad_output))  # type: ignore[no-any-return]

        by_record = self.out.by_record(grad_outputs, self.batch), self._by_record()
        gradients = torch.func.vmap(gradients_of_record)(*by_record)
        return self._gradients_by_name(gradients)

    def _alone(self, grad_outputs: Tensor) -> Gradients:
        """The gradients of each record in a batch of one."""
        by_record = self._by_record()
        return self._each(
            (
                self._of_record({i: values[record] for i, values in by_record.items()}),
                self.out.alone(grad_output),
            )
            for record, grad_output in enumerate(self.out.by_record(grad_outputs, self.batch))
        )

    def _among_copies(self, grad_outputs: Tensor) -> Gradients:
        """The gradients of each record in a batch of its copies, for a function that is given the number of records."""

        def only_record(layout: Layout, values: Tensor, record: int, *, copies: bool) -> Tensor:
            filled = torch.zeros_like(values)
            layout.by_record(filled, self.batch)[slice(None) if copies else record] = layout.by_record(
                values, self.batch
            )[record]
            return filled

        layouts = {i: layout for i, layout in enumerate(self.layouts) if layout is not None}
        return self._each(
            (
                {
                    i: only_record(layout, self.leaves[i], record, copies=True)
                    for i, layout in layouts.items()
                },
                only_record(self.out, grad_outputs, record, copies=False),
            )
            for record in range(self.batch)
        )

    def _each(self, calls: Iterable[tuple[dict[int, Tensor], Tensor]]) -> Gradients:
        """The gradients from the values and the output's gradient in a call for each record."""
        free, each = [self.leaves[i].requires_grad_() for i in self._positions], []
        for values, grad_output in calls:
            with torch.enable_grad():
                output = self._with(values)(*free)
            if not output.requires_grad:
                return {}
            each.append(torch.autograd.grad(output, free, grad_output, materialize_grads=True))
        return self._gradients_by_name(tuple(map(torch.stack, zip(*each, strict=True))))

    def _gradients_by_name(self, gradients: tuple[Tensor, ...]) -> Gradients:
        """Gradients by name; those of a parameter used twice in one operation are added."""
        rows: dict[str, Tensor] = {}
        for i, gradient in zip(self._positions, gradients, strict=True):
            name = str(self.names[i])
            rows[name] = rows.get(name, 0) + gradient.reshape(len(gradient), -1)
        return {name: DenseGrad(gradient) for name, gradient in rows.items()}


def elementwise(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """An elementwise function with one output, whose arguments broadcast to its shape."""
    name, out, batch = name_of(func), recorder.output_layout, recorder.batch
    view: Tensor | None = None
    if _writes(name, kwargs) and recorder.name(args[0]) is None and args[0]._base is not None:
        view, args = args[0], (args[0].clone(), *args[1:])  # what is recorded is then behind its base, too
    leaves = [*args, *kwargs.values()]
    names = {i: parameter for i, leaf in enumerate(leaves) if (parameter := recorder.name(leaf)) is not None}
    is_real = not any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in leaves)
    is_sum = name in _STRETCHES or (name in _SUMS and not kwargs and is_real)
    is_product = name in _PRODUCTS and len(names) == 1 and not kwargs and is_real
    if kwargs.get("out") is not None or (_writes(name, kwargs) and 0 in names):
        raise UnrecordedError(f"the operation '{name}' on a parameter")
    # A value that is overwritten is needed as it was; others must not change until the gradients are computed.
    before = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    inputs: list[Tensor] = []
    if not is_sum:
        if _writes(name, kwargs):
            before[0] = before[0].clone()
        inputs = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in names]
        inputs = inputs[1:] if _writes(name, kwargs) else inputs
    output = func(*args, **kwargs)
    shape, shapes = output.shape, {i: leaves[i].shape for i in names}

    def gradients(grad_outputs: Tensor) -> Gradients:
        stretched = dict.fromkeys(names, grad_outputs)
        if is_product:
            (factor,) = names
            stretched = {factor: grad_outputs * before[1 - factor]}
        elif not is_sum:
            # Broadcast first, so that the derivative is by every entry of the output, and records are still apart.
            free = {i: before[i].expand(shape).detach().requires_grad_() for i in names}
            with torch.enable_grad():
                arguments = [
                    free.get(i, leaf.clone() if i == 0 and _writes(name, kwargs) else leaf)
                    for i, leaf in enumerate(before)
                ]
                again = func(
                    *arguments[: len(args)], **dict(zip(kwargs, arguments[len(args) :], strict=True))
                )
            back = torch.autograd.grad(again, list(free.values()), grad_outputs, materialize_grads=True)
            stretched = dict(zip(free, back, strict=True))
        # The adjoint of a broadcast is a sum over what was repeated, here within each record.
        rows: dict[str, Tensor] = {}
        for i, values in stretched.items():
            part = summed_to(values, shapes[i], out, batch)
            rows[names[i]] = rows[names[i]] + part if names[i] in rows else part
        return {name: DenseGrad(gradient) for name, gradient in rows.items()}

    result = recorder.keep(output, gradients, *inputs)
    return result if view is None else view.copy_(result)


def summed_to(values: Tensor, shape: torch.Size, out: Layout, batch: int) -> Tensor:
    """Sum each record's values over the dimensions along which a tensor of this shape was broadcast; [batch, numel]."""
    full = (1,) * (values.dim() - len(shape)) + tuple(shape)
    if full[out.dimension] != 1:
        raise UnrecordedError("a parameter that has the dimension of the records")
    # [batch, rows_per_record (if above 1), the other dimensions]: a 1 in `rest` says that one of these was broadcast.
    by_record = out.by_record(values, batch)
    rest = full[: out.dimension] + full[out.dimension + 1 :]
    first = 2 if out.rows_per_record > 1 else 1
    over = [first + i for i, size in enumerate(rest) if size == 1]
    over += [1] if out.rows_per_record > 1 else []
    return (by_record.sum(dim=over) if over else by_record).reshape(batch, -1)


def shared_operation(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """An operation on parameters and on values that all records share."""
    name = name_of(func)
    if name in _WITHOUT_GRADIENT or not torch.is_grad_enabled():
        return func(*args, **kwargs)
    is_materialized = _writes(name, kwargs)
    if is_materialized and type(args[0]) is Tensor and args[0]._base is None and has_gradient(args[0]):
        recorder.record_target(args[0])
    if is_materialized and (recorder.name(args[0]) is None or name.endswith("__set__") or "out" in kwargs):
        raise UnrecordedError(f"the operation '{name}' on a parameter")
    leaves = tensors_in((args, kwargs))[: 1 if name in _LIKE_ANOTHER else None]
    parameters = [leaf for leaf in leaves if recorder.name(leaf) is not None and has_gradient(leaf)]
    # One graph from the parameters on holds all of these, through which `pull_back` goes back at the end.
    free = {id(leaf): _in_shared_graph(recorder, leaf) for leaf in parameters}
    # Keep tensors that checkpointing would drop: no layer runs again to recompute them.
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        new_args, new_kwargs = replace_tensors((args, kwargs), free)
        output = func(*new_args, **new_kwargs)
    if is_materialized:
        recorder.invalidate(args[0])
    back = {id(free[id(leaf)]): leaf for leaf in parameters}
    moving = [leaf for leaf in tensors_in(output) if leaf.requires_grad and id(leaf) not in back]
    if moving:
        sources = {id(free[id(leaf)]): str(recorder.name(leaf)) for leaf in parameters}
        if func is functional.batch_norm:
            closed = [_standardised_form(sources, *new_args, **new_kwargs)]
        elif name == _WEIGHT_NORM and len(free) == 2:
            v, g = (value.detach() for value in free.values())
            closed = [_weight_norm_form([*sources.values()], v, g, *new_args[2:], **new_kwargs)]
        elif len(moving) == 1 and (form := _form_of_many(name, sources, moving[0], new_args, new_kwargs)):
            closed = [form]
        else:
            closed = _forms_of_one(sources, free, name, args, kwargs, moving)
        back |= {
            id(leaf): derived
            for leaf, derived in zip(moving, recorder.record_derived(moving, closed), strict=True)
        }
    return replace_tensors(output, back)


def _form_of_many(
    name: str, sources: Mapping[int, str], output: Tensor, args: Args, kwargs: Kwargs
) -> Closed | None:
    """The closed form of an operation that may take several parameters."""
    arguments = name, sources, output, args, kwargs
    return product_form(*arguments) or kernel_form(*arguments)


def _forms_of_one(
    sources: Mapping[int, str],
    free: Mapping[int, Tensor],
    name: str,
    args: Args,
    kwargs: Kwargs,
    outputs: list[Tensor],
) -> list[Closed | None]:
    """The closed forms of an operation's outputs if it takes a single parameter.

    sources: names by tensor in the shared graph. free: these tensors.
    """
    if len(free) > 1 or name == APPLIED:  # which may change a view's gradient on its way back
        return [None] * len(outputs)
    (parameter,), (source,) = free.values(), sources.values()
    forms = [_sliced_form(parameter, output) for output in outputs]
    if len(outputs) == 1:
        form = _closed_form(name, args, kwargs, outputs[0]) or forms[0]
        forms = [form or _form_by_entries(name, parameter, outputs[0])]
    return [None if form is None else _closed_form_for(source, form) for form in forms]


def _in_shared_graph(recorder: GradSampleRecorder, tensor: Tensor) -> Tensor:
    """A parameter, or a tensor computed from parameters, in the shared graph."""
    return recorder.graph.setdefault(str(recorder.name(tensor)), tensor.detach().requires_grad_())


def pull_back(
    recorder: GradSampleRecorder, by_name: dict[str, list[PerExample]]
) -> dict[str, list[PerExample]]:
    """Pull gradients of tensors computed from parameters back to the parameters; returns all by parameter.

    Adds the tensors whose maps are not by rows to those that the recorder knows.
    """
    starts = {name: recorder.graph[name] for name in recorder.parameters if name in recorder.graph}
    ends: list[tuple[str, PerExample, Tensor]] = []
    for derived in reversed(recorder.derived):
        for name, end, closed in zip(derived.names, derived.outputs, derived.closed, strict=True):
            if name in by_name and name in recorder.invalidated:
                raise UnrecordedError("a value computed from parameters is overwritten after its use")
            if name in by_name:
                part = combine(by_name.pop(name))
                of_sources = None if closed is None else closed(part)
                if of_sources is None:
                    ends.append((name, part, end))
                for source, gradient in (of_sources or {}).items():
                    by_name.setdefault(source, []).append(gradient)
    by_rows: dict[str, Gradients] = {}
    if sum(end.numel() for _, part, end in ends if isinstance(part, RowGrad)) >= _FEWEST_BY_ROWS:
        tried = [each for each in ends if each[0] not in recorder.not_by_rows]
        of_tried = pull_back_by_rows(
            [(part, end) for _, part, end in tried], starts, is_asserted=recorder.asserts_maps
        )
        for (name, _, _), pulled in zip(tried, of_tried, strict=True):
            if pulled is None:
                recorder.not_by_rows.add(name)
            else:
                by_rows[name] = pulled
    through: list[tuple[Tensor, Tensor]] = []
    for name, part, end in ends:
        if name not in by_rows:
            through.append((end, part.rows.to(end.dtype).view(len(part.rows), *end.shape)))
        for source, gradient in by_rows.get(name, {}).items():
            by_name.setdefault(source, []).append(gradient)
    if through:
        at_once = _records_at_once([*recorder.graph.values(), *(end for end, _ in through)])
        for name, gradient in _through(through, starts, at_once).items():
            by_name.setdefault(name, []).append(gradient)
    recorder.derived.clear()
    recorder.graph.clear()
    return by_name


_Form = Callable[[PerExample], PerExample | None]
"""From the gradients of a tensor to those of the only parameter that it follows from; None if a graph is needed."""


def _closed_form_for(source: str, form: _Form) -> Closed:
    """The closed form of a tensor that was computed from a parameter of this name alone."""

    def gradients_of(part: PerExample) -> Gradients | None:
        gradient = form(part)
        return None if gradient is None else {source: gradient}

    return gradients_of


_WEIGHT_NORM = torch._weight_norm.__name__


def _weight_norm_form(sources: list[str], v: Tensor, g: Tensor, dim: int = 0) -> Closed:
    """The closed form of weights g v / |v|, with a norm for each index of a dimension, or one of all for -1.

    sources: the names of v and g. Small weights have one for any dimension: a batched call through the graph takes
    several times as long as these products.
    """
    norm_dim = dim + v.dim() if dim < -1 else dim

    def gradients_of(part: PerExample) -> Gradients | None:
        if v.numel() >= _FEWEST_BY_ROWS:
            pulled = (
                normalised_gradients(part, v.reshape(len(v), -1), g.reshape(-1)) if norm_dim == 0 else None
            )
            return None if pulled is None else dict(zip(sources, pulled, strict=True))
        # w = g u with u = v / |v|: a gradient h of w gives <h, u> to g, and g / |v| (h - u <h, u>) to v.
        lengths: Tensor = torch.norm_except_dim(v, 2, dim)
        unit, scale = v / lengths, g / lengths
        over = [1 + other for other in range(v.dim()) if other != norm_dim]
        rows = part.rows.view(-1, *v.shape)
        along = (rows * unit).sum(dim=over, keepdim=True)
        both = scale * (rows - unit * along), along
        return {name: DenseGrad(each.flatten(start_dim=1)) for name, each in zip(sources, both, strict=True)}

    return gradients_of


def _standardised_form(
    sources: Mapping[int, str],
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Closed | None:
    """The closed form of a weight [1, rows, ...] standardised as the channels of a batch are; None for another use.

    sources: names by tensor. The others are the arguments of `functional.batch_norm`.
    """
    is_of_itself = training and running_mean is None and running_var is None
    is_tied = weight is bias and weight is not None
    if not is_of_itself or is_tied or input.dim() < 3 or len(input) > 1 or id(input) not in sources:
        return None
    matrix = input.detach().reshape(input.shape[1], -1)
    gain = None if weight is None else weight.detach()

    def gradients_of(part: PerExample) -> Gradients | None:
        pulled = zip(
            (input, weight, bias), standardised_gradients(part, matrix, gain, eps) or (), strict=False
        )
        return {sources[id(leaf)]: gradient for leaf, gradient in pulled if id(leaf) in sources} or None

    return gradients_of


def _sliced_form(parameter: Tensor, output: Tensor) -> _Form | None:
    """The closed form of a view of consecutive entries of a parameter, such as a chunk of a packed weight."""
    if (
        parameter.dtype != output.dtype
        or parameter.untyped_storage().data_ptr() != output.untyped_storage().data_ptr()
        or not (parameter.is_contiguous() and output.is_contiguous())
        or (output.is_neg(), output.is_conj()) != (parameter.is_neg(), parameter.is_conj())
    ):
        return None
    start, size = output.storage_offset() - parameter.storage_offset(), parameter.numel()
    span = int(start), int(start) + output.numel()
    if not 0 <= span[0] < span[1] <= size:
        return None
    return (lambda part: part) if span == (0, size) else lambda part: SlicedGrad({span: part}, size)


def _closed_form(name: str, args: Args, kwargs: Kwargs, output: Tensor) -> _Form | None:
    """A function from the gradients of a single output to those of its parameter, if that needs no graph."""
    parameter = next((arg for arg in args if isinstance(arg, Tensor)), None)
    if parameter is None:
        return None
    if name == "view_as_complex":
        return of_both_parts
    if output.is_complex() and not parameter.is_complex() and name in _CONVERSIONS:
        return of_real_part
    if parameter.is_complex() and (parameter.dtype != output.dtype or name not in _REORDERED):
        return None
    if output.is_complex() and not parameter.is_complex():
        return None
    is_moved = name in _UNIT_SLOPES and not all(isinstance(arg, Tensor) for arg in args)  # by a Python number
    if (name in _SAME_ORDER or is_moved) and parameter.numel() == output.numel():
        return lambda gradient: gradient
    is_by_number = parameter is args[0] and len(args) == 2 and isinstance(args[1], int | float)
    if name in _PRODUCTS and is_by_number:
        return lambda gradient: scale_gradient(gradient, args[1])
    if name in _QUOTIENTS and is_by_number and args[1] != 0 and not kwargs:  # such as a mode of rounding
        return lambda gradient: scale_gradient(gradient, 1.0 / args[1])
    if name in _TRANSPOSED and parameter.dim() == 2 and output.shape == parameter.shape[::-1]:
        return lambda gradient: _transpose_gradient(gradient, output.shape)
    if name == "embedding" and len(args) >= 2 and isinstance(args[1], Tensor):
        padding = args[2] if len(args) > 2 else None
        return lambda gradient: _gradients_of_lookup(gradient, args[0], args[1], padding)
    if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.long:
        return lambda gradient: _gradients_of_lookup(gradient, args[1] % len(args[0]), args[0], None)
    return None


def _form_by_entries(name: str, parameter: Tensor, output: Tensor) -> _Form | None:
    """The closed form of a map by entries, such as a mask; None for other maps."""
    is_real = parameter.is_floating_point() and output.is_floating_point()
    is_complex = parameter.is_complex() and output.is_complex() and name in _HOLOMORPHIC
    if name not in _BY_ENTRIES or parameter.shape != output.shape or not (is_real or is_complex):
        return None

    def of_parameter(gradient: PerExample) -> PerExample:
        # The Jacobian is diagonal, and a vector of ones reads off its diagonal.
        (slopes,) = torch.autograd.grad(output, parameter, torch.ones_like(output), retain_graph=True)
        return pointwise_gradients(gradient, slopes.flatten())

    return of_parameter


def _transpose_gradient(gradient: PerExample, shape: torch.Size) -> PerExample | None:
    """Gradients of a matrix from those of its transpose, of this shape."""
    # Each record's gradient is a product A^T B of factors, and its transpose B^T A.
    if isinstance(gradient, LinearGrad) and gradient.inputs.shape[2] == shape[1]:
        return LinearGrad(gradient.grad_outputs, gradient.inputs)
    if isinstance(gradient, LinearGrad | DenseGrad):  # a layer may use a view of another shape
        return DenseGrad(gradient.rows.view(-1, *shape).mT.flatten(start_dim=1))
    return None


def _gradients_of_lookup(
    gradient: PerExample, indices: Tensor, table: Tensor, padding: int | None
) -> PerExample:
    """Gradients of a table if every record looks up the same entries."""
    grad_outputs = gradient.rows.view(len(gradient.rows), indices.numel(), -1)
    flat = indices.reshape(-1).long()
    if padding is not None:
        grad_outputs = grad_outputs * (flat != padding % len(table)).to(grad_outputs.dtype)[:, None]
    if len(table) > len(flat) and table.dim() == 2:
        return EmbeddingGrad(flat.expand(len(grad_outputs), -1), grad_outputs, len(table))
    rows = grad_outputs.new_zeros(len(grad_outputs), len(table), grad_outputs.shape[2]).index_add_(
        1, flat, grad_outputs
    )
    return DenseGrad(rows.flatten(start_dim=1))


def _records_at_once(values: Sequence[Tensor]) -> int | None:
    """How many records to pull back at once through a graph of these values; None for all.

    Fewer only if no value leaves numbers at the end of a vector, so that each record is computed alike in every part.
    """
    sizes = [value.numel() for value in values]
    is_large = sum(sizes) > _LARGE_GRAPH and values[0].device.type == "cpu"
    return _FEW_RECORDS if is_large and all(size % _TWO_VECTORS == 0 for size in sizes) else None


def _through(ends: list[tuple[Tensor, Tensor]], starts: dict[str, Tensor], at_once: int | None) -> Gradients:
    """Each record's gradients of the `starts`, by name, from those of the `ends` that follow in the graph.

    at_once: how many records share a backward pass; None for all.
    """
    outputs, grad_outputs = [output for output, _ in ends], [grad_output for _, grad_output in ends]
    inputs = list(starts.values())

    def back(*vectors: Tensor) -> tuple[Tensor, ...]:
        """The gradients of one record, without those that there are none of."""
        gradients = torch.autograd.grad(outputs, inputs, vectors, retain_graph=True, allow_unused=True)
        used[:] = [name for name, gradient in zip(starts, gradients, strict=True) if gradient is not None]
        return tuple(gradient for gradient in gradients if gradient is not None)

    used: list[str] = []
    try:
        size = at_once or len(grad_outputs[0])
        some = zip(*(torch.split(grad_output, size) for grad_output in grad_outputs), strict=True)
        # Not by `is_grads_batched`, which differentiates most functions one record after another.
        passes = [torch.func.vmap(back)(*vectors_of_pass) for vectors_of_pass in some]
        pulled = [torch.cat(parts) for parts in zip(*passes, strict=True)]
    except RuntimeError as error:  # an operation whose backward pass has no batched form
        if lacks_memory(error):
            raise
        each = [back(*of_record) for of_record in zip(*grad_outputs, strict=True)]
        pulled = [torch.stack(parts) for parts in zip(*each, strict=True)]
    return {
        name: DenseGrad(gradient.reshape(len(gradient), -1))
        for name, gradient in zip(used, pulled, strict=True)
    }
