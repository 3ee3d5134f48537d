"""Any other operation: gradients are materialised record by record, with `torch.func` or by separate passes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from algorithms.gradients.grad_sample_recorder import (
    UNKNOWN,
    Args,
    Func,
    Gradients,
    GradSampleRecorder,
    Kwargs,
    has_gradient,
    name_of,
    tensors_in,
)
from algorithms.gradients.grads import DenseGrad
from algorithms.gradients.padding import Layout, UnrecordedError
from algorithms.gradients.rules.elementwise import ELEMENTWISE, elementwise
from algorithms.gradients.rules.shared import WITHOUT_GRADIENT, shared, writes


def general(tape: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """An operation on parameters, values with a batch dimension, and values that all records share."""
    name = name_of(func)
    if name in ("to", "type_as", "view_as", "reshape_as") and tape.name(args[0]) is None:
        return func(*args, **kwargs)  # only the parameter's shape or type is read
    if name in ("to", "type_as") and not any(tape.given):
        return shared(tape, func, args, kwargs)  # only the type of a batch is read
    if name in ELEMENTWISE:
        return elementwise(tape, func, args, kwargs)
    is_assigned = func is Tensor.__setitem__ and tape.name(args[0]) is None and args[0]._base is None
    if writes(name, kwargs) and not is_assigned:
        raise UnrecordedError(f"the operation '{name}' on a parameter")
    output = func(*args, **kwargs)
    if is_assigned:
        func, output = _assigned, args[0]
    outputs = tensors_in(output)
    if name in WITHOUT_GRADIENT or not any(map(has_gradient, outputs)):
        return output
    leaves, structure = tree_flatten((args, kwargs))
    tape.without_rule.add(name)

    def run(*leaves: Any) -> Tensor:
        some, named = tree_unflatten(leaves, structure)
        return func(*some, **named)  # type: ignore[no-any-return]

    values = [leaf for leaf in leaves if _is_value(tape, leaf)]
    taken = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    names = [tape.name(leaf) for leaf in leaves]
    if isinstance(output, Tensor):
        out = tape.output_layout
        layouts = [tape.layout_if_any(leaf) if _is_value(tape, leaf) else None for leaf in leaves]
        batch = tape.batch

        def gradients(errors: Tensor) -> Gradients:
            try:
                found = _together(run, taken, names, layouts, out, errors, batch)
            except RuntimeError:
                found = _one_by_one(lambda *some: [run(*some)], taken, names, [out], [errors], batch)
            return found

        return tape.keep(output, gradients, *(values[1:] if is_assigned else values))
    return _several(tape, run, taken, names, output, values)


def _assigned(target: Tensor, places: Any, value: Any) -> Tensor:
    """A tensor of which some entries are replaced, as far as the gradients of the new ones are concerned."""
    found = target.clone()
    found[places] = value
    return found


def _several(
    tape: GradSampleRecorder,
    run: Callable[..., Any],
    taken: list[Any],
    names: list[str | None],
    output: Any,
    values: list[Tensor],
) -> Any:
    """An operation with several outputs; each is recorded as a separate use."""
    leaves, structure = tree_flatten(output)
    if len(leaves) != len(tape.given):
        raise UnrecordedError("an operation on a parameter that gives tensors and other values")
    kept = []
    for index, (leaf, layout) in enumerate(zip(leaves, tape.given, strict=True)):
        if layout is None or layout == UNKNOWN:
            raise UnrecordedError("an operation on a parameter whose output has no dimension for the records")

        def gradients(errors: Tensor, index: int = index, layout: Layout = layout) -> Gradients:
            def one(*some: Any) -> list[Tensor]:
                return [tensors_in(run(*some))[index]]

            return _one_by_one(one, taken, names, [layout], [errors], tape.batch)

        kept.append(tape.keep(leaf, gradients, *values) if has_gradient(leaf) else leaf)
    return tree_unflatten(kept, structure)


def _is_value(tape: GradSampleRecorder, leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and tape.name(leaf) is None


def _together(
    run: Callable[..., Tensor],
    leaves: list[Any],
    names: list[str | None],
    layouts: list[Layout | None],
    out: Layout,
    errors: Tensor,
    batch: int,
) -> Gradients:
    """Gradients of the parameters among the leaves, for each record from its own values."""
    places = [i for i, name in enumerate(names) if name is not None]
    moving = {i: layout for i, layout in enumerate(layouts) if layout is not None}

    def one(error: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        alone = dict(
            zip(moving, (moving[i].alone(v) for i, v in zip(moving, values, strict=True)), strict=True)
        )
        fixed = [alone.get(i, leaf) for i, leaf in enumerate(leaves)]

        def of_parameters(*parameters: Tensor) -> Tensor:
            chosen = dict(zip(places, parameters, strict=True))
            return run(*(chosen.get(i, leaf) for i, leaf in enumerate(fixed)))

        backward = torch.func.vjp(of_parameters, *(leaves[i] for i in places))[1]
        return backward(out.alone(error))  # type: ignore[no-any-return]

    by_record = [layout.by_record(leaves[i], batch) for i, layout in moving.items()]
    found = torch.func.vmap(one)(out.by_record(errors, batch), *by_record)
    return _named([str(names[i]) for i in places], found)


def _one_by_one(
    run: Callable[..., list[Tensor]],
    leaves: list[Any],
    names: list[str | None],
    outs: list[Layout],
    errors: list[Tensor],
    batch: int,
) -> Gradients:
    """`_together` for an operation that `torch.func` cannot separate by record: a backward pass for each record."""
    places = [i for i, name in enumerate(names) if name is not None]
    free = {i: leaves[i].requires_grad_() for i in places}
    with torch.enable_grad():
        outputs = run(*(free.get(i, leaf) for i, leaf in enumerate(leaves)))
    if not any(output.requires_grad for output in outputs):
        return {}
    each = []
    for record in range(batch):
        alone = [torch.zeros_like(error) for error in errors]
        for part, error, layout in zip(alone, errors, outs, strict=True):
            layout.by_record(part, batch)[record] = layout.by_record(error, batch)[record]
        each.append(
            torch.autograd.grad(
                outputs, list(free.values()), alone, retain_graph=True, materialize_grads=True
            )
        )
    return _named([str(names[i]) for i in places], tuple(map(torch.stack, zip(*each, strict=True))))


def _named(names: list[str], gradients: tuple[Tensor, ...]) -> Gradients:
    """Gradients by name; those of a parameter used twice in one operation are added."""
    rows: dict[str, Tensor] = {}
    for name, gradient in zip(names, gradients, strict=True):
        rows[name] = rows.get(name, 0) + gradient.reshape(len(gradient), -1)
    return {name: DenseGrad(gradient) for name, gradient in rows.items()}
